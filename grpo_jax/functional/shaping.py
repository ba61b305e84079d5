"""What becomes of rewards before they are compared."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


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
    """Both `[...]`. What no reward applies to has 0 and False."""

    rewards: jax.Array
    applicable: jax.Array


def combine_rewards(rewards: jax.Array, *, weights: jax.Array | None = None) -> CombinedRewards:
    """Σₖ wₖ rᵏ over the rewards that apply.

    Hand `applicable` on as `where` of an advantage function: what nothing applies to then stays out of its
    group's baseline and gets 0.

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
    applies = ~jnp.isnan(rewards)
    known = jnp.where(applies, rewards, 0)
    if weights is not None:
        known = known * weights.reshape(-1, *[1] * (rewards.ndim - 1))
    return CombinedRewards(jnp.sum(known, axis=0), jnp.any(applies, axis=0))
