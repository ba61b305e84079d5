"""Losses on arrays: pure functions that depend only on jax, not on the rest of this library.

Arrays keep any leading axes: per-token arrays are `[..., T]`, rewards and advantages of groups `[..., G]`, masks bool.
Everything works under jit, grad, vmap, `jax.pmap` and `shard_map`. Hyperparameters are keyword-only; floats may be
traced, except `share`. Functions of the whole batch take `axis_name`, the mapped axes over which the batch is spread.
All others may be computed in pieces.
"""

# Advantages of completions in groups
from grpo_jax.functional.advantages import (
    batch_std_advantages as batch_std_advantages,
    best_of_group_advantages as best_of_group_advantages,
    centered_advantages as centered_advantages,
    gdpo_advantages as gdpo_advantages,
    gpg_advantages as gpg_advantages,
    group_advantages as group_advantages,
    group_ranks as group_ranks,
    leave_one_out_advantages as leave_one_out_advantages,
    max_rl_advantages as max_rl_advantages,
    opo_advantages as opo_advantages,
    pass_at_k_advantages as pass_at_k_advantages,
    rank_advantages as rank_advantages,
    remax_advantages as remax_advantages,
    span_advantages as span_advantages,
    teacher_advantages as teacher_advantages,
    turn_advantages as turn_advantages,
    whiten as whiten,
)

# Corrections of the policy term and masks
from grpo_jax.functional.correction import (
    keep_completions as keep_completions,
    masked_weights as masked_weights,
    on_policy_completions as on_policy_completions,
    rejection_weights as rejection_weights,
    top_entropy_tokens as top_entropy_tokens,
    truncated_weights as truncated_weights,
)

# Divergence from the reference or a teacher, and entropy
from grpo_jax.functional.divergence import (
    adaptive_entropy_coef as adaptive_entropy_coef,
    adaptive_kl_coef as adaptive_kl_coef,
    entropy as entropy,
    jsd_full as jsd_full,
    kl_abs as kl_abs,
    kl_full as kl_full,
    kl_k1 as kl_k1,
    kl_k2 as kl_k2,
    kl_k3 as kl_k3,
    kl_unbiased as kl_unbiased,
)

# From hidden states, without an array of tokens by vocabulary
from grpo_jax.functional.logprobs import (
    TokenLogprobs as TokenLogprobs,
    bucket_logits as bucket_logits,
    support_logprobs as support_logprobs,
    token_jsd as token_jsd,
    token_kl as token_kl,
    token_logprobs as token_logprobs,
    top_tokens as top_tokens,
)

# Weights of tokens
# Whole losses and their metrics
from grpo_jax.functional.losses import (
    Metrics as Metrics,
    Objective as Objective,
    clipped_term as clipped_term,
    constant_length_weights as constant_length_weights,
    grpo_loss as grpo_loss,
    grpo_objective as grpo_objective,
    masked_sum as masked_sum,
    policy_metrics as policy_metrics,
    sequence_mean_weights as sequence_mean_weights,
    sequence_sum_weights as sequence_sum_weights,
    token_mean_weights as token_mean_weights,
    weighted_sum as weighted_sum,
)

# Log-ratios, surrogates and terms
from grpo_jax.functional.policy_gradient import (
    Term as Term,
    cispo_surrogate as cispo_surrogate,
    clip_cov_term as clip_cov_term,
    clipped_surrogate as clipped_surrogate,
    dppo_term as dppo_term,
    gmpo_term as gmpo_term,
    gspo_log_ratio as gspo_log_ratio,
    kl_cov_term as kl_cov_term,
    per_token as per_token,
    ratio_term as ratio_term,
    reinforce_term as reinforce_term,
    sapo_surrogate as sapo_surrogate,
    sequence_log_ratio as sequence_log_ratio,
    sequence_mean_log_ratio as sequence_mean_log_ratio,
    token_covariance as token_covariance,
    token_log_ratio as token_log_ratio,
    unclipped_surrogate as unclipped_surrogate,
    vespo_term as vespo_term,
)

# Losses of pairs and single completions, of reward models and critics
from grpo_jax.functional.preference import (
    bradley_terry_loss as bradley_terry_loss,
    cpo_loss as cpo_loss,
    critic_loss as critic_loss,
    dpo_loss as dpo_loss,
    hinge_loss as hinge_loss,
    ipo_loss as ipo_loss,
    kto_kl as kto_kl,
    kto_loss as kto_loss,
    length_normalized_dpo_loss as length_normalized_dpo_loss,
    orpo_loss as orpo_loss,
    robust_dpo_loss as robust_dpo_loss,
    simpo_loss as simpo_loss,
)

# Published methods
from grpo_jax.functional.presets import PRESETS as PRESETS, check as check, ignore_lengths as ignore_lengths

# Rewards, and advantages of tokens
from grpo_jax.functional.returns import (
    generalized_advantages as generalized_advantages,
    kl_penalized_rewards as kl_penalized_rewards,
    overlong_penalty as overlong_penalty,
    reinforce_pp_advantages as reinforce_pp_advantages,
    reinforce_pp_baseline_advantages as reinforce_pp_baseline_advantages,
    rewards_at_end as rewards_at_end,
)
