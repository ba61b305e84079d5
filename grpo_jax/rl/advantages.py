"""From rewards to advantages: the array functions of `functional`, applied to a scored batch.

Letters as in `types`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.config import LossConfig
from grpo_jax.functional import (
    gdpo_advantages,
    keep_completions,
    kl_penalized_rewards,
    per_token,
    span_advantages,
    top_entropy_tokens,
)
from grpo_jax.rl.types import Advantage, Array, Batch, RewardArrays


def group_advantage(config: LossConfig) -> Advantage:
    """Returns the advantage function of methods that compare rewards within groups: of sums, components or parts."""
    compare = {"components": by_component, "turns": by_part, "spans": by_part}.get(config.advantages_of)

    def advantage(rewards: RewardArrays, batch: Batch, kl_coef: Array) -> tuple[Batch, jax.Array, dict[str, Any]]:
        total, logs, batch = penalized_rewards(rewards.rewards, batch, config, kl_coef)
        if compare is not None:
            advantages = compare(rewards)
        else:
            lengths = jnp.sum(batch.completion_mask, axis=-1, dtype=jnp.int32)
            advantages = config.objective.advantages(total, lengths, where=rewards.applicable)
        return masked(batch._replace(advantages=advantages), config), advantages, logs

    return advantage


def by_component(rewards: RewardArrays) -> jax.Array:
    """`gdpo_advantages` of several rewards, `[N, G]`."""
    advantages = gdpo_advantages(jnp.moveaxis(rewards.components, -1, 0), weights=rewards.weights)
    return jnp.where(jnp.isnan(rewards.rewards), jnp.nan, advantages)  # a reward that is NaN stays visible


def by_part(rewards: RewardArrays) -> jax.Array:
    """`span_advantages` of turns or spans, `[N, G, T]`."""
    ends = ~jnp.isnan(rewards.parts)
    advantages = span_advantages(jnp.where(ends, rewards.parts, 0), ends, where=rewards.applicable)
    is_bad = rewards.applicable & jnp.isnan(rewards.rewards)
    return jnp.where(is_bad[..., None], jnp.nan, advantages)  # a reward that is NaN stays visible


def penalized_rewards(
    rewards: Array, batch: Batch, config: LossConfig, kl_coef: Array
) -> tuple[Array, dict[str, jax.Array], Batch]:
    """rᵢ − β Σₜ k1, if the KL is in the reward. The loss then needs no reference.

    Args:
      rewards: `[N, G]`.
      batch: with old and reference log-probabilities.
      config: the run's.
      kl_coef: β of the step.

    Returns:
      Rewards for the advantages, metrics of the KL, and the batch for the loss.
    """
    if not (config.kl_in_reward and config.objective.has_reference):
        return rewards, {}, batch
    penalized = kl_penalized_rewards(
        rewards, batch.old_logprobs, batch.ref_logprobs, batch.completion_mask, kl_coef=kl_coef
    )
    return penalized, kl_logs(batch, kl_coef), batch._replace(ref_logprobs=None)


def kl_logs(batch: Batch, kl_coef: Array) -> dict[str, jax.Array]:
    """Returns metrics of a KL in the reward: k1 of a token and of a completion, in nats, and its coefficient."""
    mask = batch.completion_mask
    total = jnp.sum(jnp.where(mask, batch.old_logprobs - batch.ref_logprobs, 0))
    counts = {"kl": jnp.sum(mask), "kl_completion": jnp.sum(jnp.any(mask, axis=-1))}
    return {name: total / jnp.maximum(count, 1) for name, count in counts.items()} | {"kl_coef": jnp.asarray(kl_coef)}


def masked(batch: Batch, config: LossConfig) -> Batch:
    """Leaves out truncated completions and tokens of low entropy, as the configuration says.

    A truncated completion leaves the mask, and so the KL too. A token of low entropy loses only its advantage
    (2506.01939).

    Args:
      batch: with advantages, and entropies if they are needed.
      config: the run's.
    """
    if config.top_entropy < 1:
        entropy, mask = batch.old_entropy, batch.completion_mask
        keep = top_entropy_tokens(entropy, mask, share=config.top_entropy)
        batch = batch._replace(advantages=jnp.where(keep, per_token(batch.advantages, entropy), 0))
    if config.mask_truncated:
        batch = batch._replace(completion_mask=keep_completions(batch.completion_mask, ~batch.truncated))
    return batch
