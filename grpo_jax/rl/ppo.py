"""PPO (1707.06347): a critic for a method, which brings other advantages and an additional term of the loss.

A completion is an episode: the state is the text so far, an action is a token, and the reward comes with the last
token. The critic is a separate decoder with a scalar head, which takes as much memory as the policy, or only a head on
the policy's decoder. The models are {"policy": ..., "critic": `heads.Headed`}.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import optax

from grpo_jax import functional as F
from grpo_jax.config import Critic, CriticConfig, GRPOConfig
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.decoder import heads
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.models.rows.geometry import TokenStates
from grpo_jax.optimizer import learning_rate_schedule, optimizer_of
from grpo_jax.rl.grpo import kl_in_reward, masked, masked_mean
from grpo_jax.rl.scorers import old_scorer, reference_scorer
from grpo_jax.rl.types import Forward, LossTerm, Method, RewardArrays
from grpo_jax.scoring import score_completion_tokens, states_of
from grpo_jax.step import Array, Batch, Logs


def critic_policy(config: ModelConfig) -> Policy:
    """Returns the functions of the critic's decoder for a policy with this configuration."""
    return decoder_policy(heads.without_vocabulary(config))


def add_critic(config: ModelConfig, params: Params, critic: Critic = "own") -> Params:
    """Adds a critic that starts from the policy's weights, with a head of zeros: its initial values are all 0.

    Args:
      config: The configuration of the policy's decoder.
      params: The parameters of the policy.
      critic: "own": a separate decoder. "shared": a head on the policy's decoder. "none": no critic.

    Returns:
      {"policy": ..., "critic": ...}, without "critic" if there is none. Both share their arrays; training copies
      trained parameters.
    """
    if critic == "none":
        return {"policy": params}
    headed = heads.add_head(config, params)[1]
    return {"policy": params, "critic": headed._replace(decoder=None) if critic == "shared" else headed}


def ppo_method(method: Method, policies: Mapping[str, Policy], config: GRPOConfig) -> Method:
    """Returns a method that compares rewards with the values of a critic, and trains the critic too.

    Args:
      method: GRPO.
      policies: The functions of the models by role: "policy", and "critic" for the decoder of a separate critic.
      config: Supplies the options of the critic, the optimizer that both share, and the KL in the reward.
    """
    policy, critic, options = policies["policy"], policies.get("critic", policies["policy"]), config.critic
    bootstraps = options.bootstrap_truncated
    values = ("old_values", "end_values") if bootstraps else ("old_values",)
    critic_options = replace(config.optimizer, learning_rate=options.critic_learning_rate)
    critic_schedule = learning_rate_schedule(critic_options, config.num_updates)
    # One optimizer for both, but each gradient is clipped by its own norm.
    optimizer = optax.multi_transform(
        {"policy": method.optimizer, "critic": optimizer_of(config.optimizer, critic_schedule)},
        {"policy": "policy", "critic": "critic"},
    )
    return method._replace(
        terms=(*method.terms, value_term(critic, options)),
        advantage=partial(critic_advantage, config=config),
        optimizer=optimizer,
        scorers=(*old_scorer(partial(score, policy, critic), config, values), *reference_scorer(policy, config)),
        scores_ends=bootstraps,
    )


def critic_advantage(
    rewards: RewardArrays, batch: Batch, kl_coef: Array, *, config: GRPOConfig
) -> tuple[Batch, jax.Array, dict[str, jax.Array]]:
    """Returns a batch with the advantages and returns of tokens; means of advantages over completions; metrics."""
    # Neither policy nor critic learns from these completions, so they must not shift whitened advantages either.
    keep = rewards.applicable & ~batch.truncated if config.loss.mask_truncated else rewards.applicable
    batch = batch._replace(completion_mask=F.keep_completions(batch.completion_mask, keep))
    penalty, logs, batch = kl_in_reward(batch, config.loss, kl_coef)
    by_token, returns = token_advantages(rewards.rewards, batch, penalty, options=config.critic)
    mask, logs = batch.completion_mask, value_logs(batch, returns) | logs
    batch = masked(batch._replace(advantages=by_token, returns=returns), config.loss)
    return batch, masked_mean(by_token, mask, axis=-1), logs


def score(policy: Policy, critic: Policy, models: Params, batch: Batch) -> dict[str, jax.Array]:
    """Scores completions with policy and critic. If they share a decoder, one forward pass serves both.

    Args:
      policy: The functions of the model.
      critic: The functions of the critic's decoder.
      models: Parameters by role.
      batch: The sampled batch, or a piece of it. For values at the end, it has one more token (`scorers.with_ends`).

    Returns:
      Fields of the batch: `old_logprobs`, `old_entropy`, `old_values` and `end_values`, that of the last token.
    """
    states = states_of(policy, models["policy"], batch)
    scores = score_completion_tokens(policy, models["policy"], batch, states)
    values = token_values(critic, models, states, batch)
    last = jnp.sum(batch.completion_mask, axis=-1, keepdims=True, dtype=jnp.int32) - 1
    ends = jnp.take_along_axis(values, jnp.maximum(last, 0), axis=-1)
    names = "old_logprobs", "old_entropy", "old_values", "end_values"
    return dict(zip(names, (*scores, values, ends), strict=True))


def token_values(critic: Policy, models: Params, states: TokenStates, batch: Batch) -> jax.Array:
    """Returns values of the states in which tokens are chosen, `[N, G, T]`.

    Args:
      critic: The functions of the critic's decoder.
      models: Parameters by role.
      states: The states of the policy, which a shared critic reads.
      batch: A batch, or a piece of it.
    """
    headed = models["critic"]
    states = states if headed.decoder is None else states_of(critic, headed.decoder, batch)
    return states.map(partial(heads.read, head=headed.head))


def token_advantages(
    rewards: jax.Array, batch: Batch, penalty: jax.Array | None, *, options: CriticConfig
) -> tuple[jax.Array, jax.Array]:
    """GAE of a rollout, of rₜ = 1[last] r − penaltyₜ. 1506.02438.

    Args:
      rewards: The rewards of completions, `[N, G]`.
      batch: The scored batch, with old values.
      penalty: The penalty of each token, as returned by `grpo.kl_in_reward`.
      options: The options of the critic.

    Returns:
      Advantages A, whitened if `whiten` is set, and returns A + V from before whitening, both `[N, G, T]`.
    """
    mask = batch.completion_mask
    by_token = F.rewards_at_end(rewards, mask) - (0 if penalty is None else penalty)
    values = jnp.where(mask, batch.old_values, 0)
    advantages = F.generalized_advantages(
        by_token,
        values,
        mask,
        gamma=options.gamma,
        lam=options.gae_lambda,
        bootstrap=jnp.where(batch.truncated, batch.end_values[..., 0], 0) if options.bootstrap_truncated else None,
        num_steps=options.gae_steps,
    )
    returns = advantages + values
    if options.whiten:
        # A NaN reward stays visible in its completion, but does not affect other completions.
        finite = jnp.isfinite(advantages)
        whitened = F.whiten(jnp.where(finite, advantages, 0), mask & finite)
        advantages = jnp.where(finite, whitened, advantages)
    return advantages, returns


def value_term(critic: Policy, options: CriticConfig) -> LossTerm:
    """w₃ L_critic, with values clipped around the old values if `value_clip` is set."""

    def term(models: Params, forward: Forward, batch: Batch) -> tuple[jax.Array, Logs]:
        values, mask = token_values(critic, models, forward.states, batch), batch.completion_mask
        returns = jnp.where(mask, batch.returns, 0)  # invalid numbers there would make the gradient NaN
        error, means = F.critic_loss(values, returns), {}
        if options.value_clip is not None:
            old_values = jnp.where(mask, batch.old_values, 0)
            error = F.critic_loss(values, returns, old_values=old_values, clip=options.value_clip)
            held_back = jnp.abs(values - old_values) > options.value_clip
            held_back &= error > F.critic_loss(values, returns)
            means["value_clip"] = F.masked_sum(held_back, mask)
        means["critic_loss"] = F.masked_sum(error, mask)
        return options.value_coef * F.weighted_sum(error, batch.weights, mask), Logs(means)

    return term


# ---- metrics of a critic


def value_logs(batch: Batch, returns: jax.Array) -> dict[str, jax.Array]:
    """Returns means of values and returns over tokens, and how well the values predicted the returns.

    Args:
      batch: The scored batch, with old values.
      returns: The returns of tokens, `[N, G, T]`.
    """
    values, mask = batch.old_values, batch.completion_mask
    return {
        "value_mean": masked_mean(values, mask),
        "returns_mean": masked_mean(returns, mask),
        "explained_variance": explained_variance(values, returns, mask),
    }


def explained_variance(values: jax.Array, returns: jax.Array, mask: jax.Array) -> jax.Array:
    """1 − Var(R − V) / Var(R). 1: V predicts R. 0: no better than a constant. Below 0: worse. NaN: R does not vary.

    Args:
      values: The values V of tokens before the updates, `[...]`.
      returns: The returns R, `[...]`.
      mask: The tokens that count, bool `[...]`.
    """

    def variance(x: jax.Array) -> jax.Array:
        return masked_mean((x - masked_mean(x, mask)) ** 2, mask)

    total = variance(returns)
    return jnp.where(total > 0, 1 - variance(returns - values) / total, jnp.nan)
