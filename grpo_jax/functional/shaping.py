"""Rewards before they become advantages: length penalty, several rewards, KL."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.functional.numerics import takes, upcast


@takes(lengths="...")
def overlong_penalty(lengths: jax.Array, *, max_length: int, buffer: int) -> jax.Array:
    """clip(−(|o| − (L_max − L_c))/L_c, −1, 0), to add to the reward. DAPO (2503.14476), equation 13.

    0 up to L_max − L_c, then falling on a line to −1 at L_max.

    Args:
      lengths: `[...]`, in tokens.
      max_length: L_max in tokens, the sampler's limit.
      buffer: L_c in tokens; DAPO takes 4096 of 20480.

    Returns:
      `[...]`, float32, from −1 to 0.

    Raises:
      ValueError: buffer is not between 1 and max_length.

    Examples:
      >>> print(overlong_penalty(jnp.array([70, 90, 100]), max_length=100, buffer=20))
      [-0.  -0.5 -1. ]
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer is {buffer}: it must be between 1 and max_length, {max_length}")
    excess = lengths.astype(jnp.float32) - (max_length - buffer)
    return -jnp.clip(excess / buffer, 0, 1)


class CombinedRewards(NamedTuple):
    """Both `[...]`; 0 and False for a completion to which no reward applies."""

    rewards: jax.Array
    applicable: jax.Array


@takes(rewards="K ...", weights="K")
def combine_rewards(rewards: jax.Array, *, weights: jax.Array | None = None) -> CombinedRewards:
    """Σₖ wₖ rᵏ over the rewards that apply.

    Give `applicable` as `where` to the advantage function: a completion without any reward is then in no baseline and
    gets 0. Sums of different rewards are compared with each other; `gdpo_advantages` compares each reward by itself,
    among the completions that it applies to.

    Args:
      rewards: `[K, ...]`, one array a reward, NaN where it does not apply.
      weights: `[K]`; None: 1 each.

    Returns:
      `CombinedRewards(rewards, applicable)`, float and bool `[...]`.

    Examples:
      >>> nan = jnp.nan
      >>> combined = combine_rewards(jnp.array([[1.0, nan, nan], [0.5, 0.5, nan]]), weights=jnp.array([1.0, 2.0]))
      >>> print(combined.rewards, combined.applicable)
      [2. 1. 0.] [ True  True False]
    """
    rewards = upcast(rewards)
    weights = jnp.ones(rewards.shape[0], rewards.dtype) if weights is None else weights
    weights = weights.reshape(-1, *[1] * (rewards.ndim - 1))
    # A weight of 0 is for rewards that are only logged.
    applies = ~jnp.isnan(rewards) & (weights != 0)
    return CombinedRewards(jnp.sum(weights * jnp.where(applies, rewards, 0), axis=0), jnp.any(applies, axis=0))


@takes(logprobs="... T", ref_logprobs="... T", mask="... T", rewards="...")
def kl_penalized_rewards(
    rewards: jax.Array, logprobs: jax.Array, ref_logprobs: jax.Array, mask: jax.Array, *, kl_coef: float
) -> jax.Array:
    """r − β Σₜ k1, the KL divergence in the reward. 1909.08593, section 2, as in RLOO (2402.14740) and PPO.

    Args:
      rewards: `[...]`, one a completion.
      logprobs: `[..., T]` in nats, under the policy that sampled.
      ref_logprobs: `[..., T]` in nats.
      mask: bool `[..., T]`.
      kl_coef: β; 0.05 in RLOO's paper, 0.1 in 1909.08593.

    Returns:
      `[...]`, for an advantage function; without gradient.

    Examples:
      >>> logprobs, ref_logprobs = jnp.array([[-1.0, -2.0]]), jnp.array([[-1.5, -2.5]])
      >>> print(kl_penalized_rewards(jnp.array([1.0]), logprobs, ref_logprobs, jnp.array([[True, True]]), kl_coef=0.1))
      [0.9]
    """
    kl = jnp.where(mask, upcast(logprobs) - upcast(ref_logprobs), 0)
    return upcast(rewards) - kl_coef * jax.lax.stop_gradient(jnp.sum(kl, axis=-1))
