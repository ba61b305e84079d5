"""From a mask to one weight per token: loss = Σ weights · per_token.

Weights are computed once for a whole optimizer batch, outside the loss. However
that batch is then split into microbatches or over devices, the pieces of the
weighted sum add up to the same number. (A mean of microbatch means does not.)

Masks are bool `[..., T]`: true on every sampled token, including the one that
ended the row. Leading axes are rows. A row without any token is no row: it has
weight 0 and is not counted.

`axis_name` names the mapped axes (of `jax.pmap`, `shard_map`, `vmap`) over which
the optimizer batch is spread; totals are then global. Default: not spread.
"""

from collections.abc import Hashable

import jax
import jax.numpy as jnp

from grpo_jax.functional.numerics import over_devices

AxisName = Hashable | None


def token_mean_weights(mask: jax.Array, *, axis_name: AxisName = None) -> jax.Array:
    """Every token the same: w = m / Σ m. DAPO (2503.14476).

    Args:
      mask: bool `[..., T]`.
      axis_name: mapped axes over which the optimizer batch is spread.

    Returns:
      float32 `[..., T]`, summing to 1 over the optimizer batch (to 0 if it is empty).

    Examples:
      >>> print(token_mean_weights(jnp.array([[True, True, True], [True, False, False]])))
      [[0.25 0.25 0.25]
       [0.25 0.   0.  ]]
    """
    total = over_devices(jnp.sum(mask, dtype=jnp.float32), axis_name)
    return mask.astype(jnp.float32) / jnp.maximum(total, 1)


def sequence_mean_weights(mask: jax.Array, *, axis_name: AxisName = None) -> jax.Array:
    """Every row the same, the tokens of a row share: w = m / (|oᵢ| · B). DeepSeekMath (2402.03300).

    Args:
      mask: bool `[..., T]`.
      axis_name: mapped axes over which the optimizer batch is spread.

    Returns:
      float32 `[..., T]`, summing to 1 over the optimizer batch (to 0 if it is empty).

    Examples:
      >>> print(sequence_mean_weights(jnp.array([[True, True], [True, False]])))
      [[0.25 0.25]
       [0.5  0.  ]]
    """
    lengths = jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.float32)
    return mask.astype(jnp.float32) / (jnp.maximum(lengths, 1) * _num_rows(mask, axis_name))


def sequence_sum_weights(mask: jax.Array, *, axis_name: AxisName = None) -> jax.Array:
    """The mean over rows of sums over tokens: w = m / B.

    Args:
      mask: bool `[..., T]`.
      axis_name: mapped axes over which the optimizer batch is spread.

    Returns:
      float32 `[..., T]`, summing to the mean length of a row.

    Examples:
      >>> print(sequence_sum_weights(jnp.array([[True, True], [True, False]])))
      [[0.5 0.5]
       [0.5 0. ]]
    """
    return mask.astype(jnp.float32) / _num_rows(mask, axis_name)


def constant_length_weights(mask: jax.Array, *, max_length: int | None = None, axis_name: AxisName = None) -> jax.Array:
    """Sums over tokens by a constant: w = m / (B · L_max). Dr.GRPO (2503.20783).

    Args:
      mask: bool `[..., T]`.
      max_length: L_max in tokens, the sampler's limit. None: the width T of the mask, which
        is right only where the mask is as wide as that limit.
      axis_name: mapped axes over which the optimizer batch is spread.

    Returns:
      float32 `[..., T]`.

    Examples:
      >>> print(constant_length_weights(jnp.array([[True, True], [True, False]]), max_length=4))
      [[0.125 0.125]
       [0.125 0.   ]]
    """
    max_length = mask.shape[-1] if max_length is None else max_length
    return mask.astype(jnp.float32) / (max_length * _num_rows(mask, axis_name))


def _num_rows(mask: jax.Array, axis_name: AxisName) -> jax.Array:
    """B, the number of rows that have a token; at least 1."""
    return jnp.maximum(over_devices(jnp.sum(jnp.any(mask, axis=-1), dtype=jnp.float32), axis_name), 1)
