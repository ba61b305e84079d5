"""Advantages of completions that answer the same prompt.

Rewards are `[..., G]`: the last axis is the group, the G completions of one
prompt. Every function returns advantages of the same shape, treats
leading axes as independent groups, and knows no parameters.
"""

import jax
import jax.numpy as jnp


def group_advantages(rewards: jax.Array, *, ddof: int = 1, eps: float = 1e-6) -> jax.Array:
    """Standardised rewards: Aᵢ = (rᵢ − μ) / (s + ε).

    DeepSeekMath (2402.03300), equation after (3). μ and s are the mean and
    standard deviation of the group.

    Args:
      rewards: `[..., G]`.
      ddof: what is subtracted from G in the variance. 1 (sample deviation) is
        what published systems and the worked example ±0.8660 use; 0 is the
        population deviation.
      eps: added to s. Default from verl (1e-6); TRL takes 1e-4, the original
        listings 1e-8.

    Returns:
      `[..., G]`. A group whose rewards are all equal gets exactly 0.
    """
    centered = centered_advantages(rewards)
    # Equal rewards have a deviation of rounding noise, not of 0, which ε does
    # not drown: eight times 0.7 in float32 would give 0.86. Compare the rewards.
    has_spread = _has_spread(rewards)
    # Squares of rewards between 0 and 1: larger ones could overflow, and all advantages be 0 without a word.
    scale = jax.lax.stop_gradient(jnp.max(jnp.abs(jnp.where(has_spread, centered, 1)), axis=-1, keepdims=True))
    variance = jnp.sum(jnp.square(centered / scale), axis=-1, keepdims=True) / max(rewards.shape[-1] - ddof, 1)
    deviation = scale * jnp.sqrt(jnp.where(has_spread, variance, 1))
    return jnp.where(has_spread, centered / (deviation + eps), 0)


def centered_advantages(rewards: jax.Array) -> jax.Array:
    """Centred rewards: Aᵢ = rᵢ − μ. Dr.GRPO (2503.20783).

    Args:
      rewards: `[..., G]`.

    Returns:
      `[..., G]`. A group whose rewards are all equal gets exactly 0.
    """
    mean = jnp.mean(rewards, axis=-1, keepdims=True)
    return jnp.where(_has_spread(rewards), rewards - mean, 0)


def leave_one_out_advantages(rewards: jax.Array) -> jax.Array:
    """Reward against the mean of the others: Aᵢ = rᵢ − Σ_{j≠i} rⱼ / (G − 1) = G/(G − 1) · (rᵢ − μ).

    RLOO (2402.14740).

    Args:
      rewards: `[..., G]`.

    Returns:
      `[..., G]`; a group of one has nobody to compare with and gets 0.
    """
    group_size = rewards.shape[-1]
    return centered_advantages(rewards) * (group_size / max(group_size - 1, 1))


def group_ranks(rewards: jax.Array) -> jax.Array:
    """Competition rank: rankᵢ = 1 + #{j : rⱼ > rᵢ}.

    The best reward has rank 1; equal rewards share the better rank; NaN comes last.

    Args:
      rewards: `[..., G]`.

    Returns:
      int32 `[..., G]`, from 1 to G.
    """
    rewards = jnp.where(jnp.isnan(rewards), -jnp.inf, rewards)
    return 1 + jnp.sum(_larger(rewards), axis=-1, dtype=jnp.int32)


def rank_advantages(rewards: jax.Array, *, ddof: int = 1, eps: float = 1e-6) -> jax.Array:
    """Standardised ranks: A = standardise(−rank̄), rank̄ᵢ = ½ (#{j : rⱼ > rᵢ} + #{j : rⱼ ≥ rᵢ} + 1).

    rank̄ gives equal rewards the mean of the ranks they occupy. Unchanged by any
    increasing map of the rewards: only their order counts. For 0/1 rewards this
    equals `group_advantages`.

    Args:
      rewards: `[..., G]`.
      ddof: as in `group_advantages`.
      eps: as in `group_advantages`.

    Returns:
      `[..., G]`, the best positive; exactly 0 where all rewards are equal.
    """
    return group_advantages(-_mean_ranks(rewards), ddof=ddof, eps=eps)


def linear_rank_advantages(rewards: jax.Array) -> jax.Array:
    """Ranks on a line from 1 (best) to −1 (worst): Aᵢ = 2 (G − rank̄ᵢ)/(G − 1) − 1.

    Args:
      rewards: `[..., G]`.

    Returns:
      `[..., G]`; a group of one gets 0.
    """
    group_size = rewards.shape[-1]
    return (group_size + 1 - 2 * _mean_ranks(rewards)) / max(group_size - 1, 1)


def _mean_ranks(rewards: jax.Array) -> jax.Array:
    """Ranks with the mean on ties, floats `[..., G]`."""
    larger = _larger(rewards)
    better, worse = (jnp.sum(x, axis=-1, dtype=jnp.int32) for x in (larger, jnp.swapaxes(larger, -1, -2)))
    dtype = rewards.dtype if jnp.issubdtype(rewards.dtype, jnp.floating) else jnp.float32
    ranks = (better - worse + (rewards.shape[-1] + 1)).astype(dtype) / 2
    return jnp.where(jnp.isnan(rewards), jnp.nan, ranks)  # NaN is larger than nothing; it must not pass for average


def _larger(rewards: jax.Array) -> jax.Array:
    """bool `[..., G, G]`: at [i, j], whether j has a larger reward than i."""
    return rewards[..., None, :] > rewards[..., :, None]


def _has_spread(rewards: jax.Array) -> jax.Array:
    # Not equal rather than greater: a NaN must stay visible, and not pass for "all equal".
    return jnp.max(rewards, axis=-1, keepdims=True) != jnp.min(rewards, axis=-1, keepdims=True)
