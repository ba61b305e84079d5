"""Losses on arrays: pure functions that import jax and chex, and nothing of the rest of this library.

Arrays keep any leading axes: per-token arrays are `[..., T]`, rewards and advantages
of groups `[..., G]`, masks bool. Everything works under jit, grad, vmap, `jax.pmap` and
`shard_map`. Hyperparameters are keyword-only; those that are floats may be traced.
"""

from grpo_jax.functional.advantages import (
    centered_advantages,
    group_advantages,
    group_ranks,
    leave_one_out_advantages,
    linear_rank_advantages,
    rank_advantages,
)
from grpo_jax.functional.aggregation import (
    constant_length_weights,
    sequence_mean_weights,
    sequence_sum_weights,
    token_mean_weights,
)
from grpo_jax.functional.divergence import entropy, kl_full, kl_k1, kl_k2, kl_k3
from grpo_jax.functional.logprobs import TokenLogprobs, token_logprobs
from grpo_jax.functional.losses import Metrics, grpo_loss, grpo_objective, masked_sum, ratio_metrics
from grpo_jax.functional.policy_gradient import (
    cispo_surrogate,
    clipped_surrogate,
    gspo_log_ratio,
    per_token,
    sequence_log_ratio,
    token_log_ratio,
)

__all__ = [
    "Metrics",
    "TokenLogprobs",
    "centered_advantages",
    "cispo_surrogate",
    "clipped_surrogate",
    "constant_length_weights",
    "entropy",
    "group_advantages",
    "group_ranks",
    "grpo_loss",
    "grpo_objective",
    "gspo_log_ratio",
    "kl_full",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "leave_one_out_advantages",
    "linear_rank_advantages",
    "masked_sum",
    "per_token",
    "rank_advantages",
    "ratio_metrics",
    "sequence_log_ratio",
    "sequence_mean_weights",
    "sequence_sum_weights",
    "token_log_ratio",
    "token_logprobs",
    "token_mean_weights",
]
