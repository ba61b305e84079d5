"""From a mask to one weight per token: loss = Σ weights · per_token.

Weights are computed once for a whole optimizer batch, outside the loss. However that batch is then split into
microbatches or over devices, the pieces of the weighted sum add up to the same number. (A mean of microbatch means
does not.)

Masks are bool `[..., T]`: true on every sampled token, including the one that ended the completion. Leading axes are
completions. B is the number of completions in the optimizer batch. By default it counts those that have a token. Pass
`num_completions` if masked completions, such as truncated ones, should still count in the mean. TRL always counts them,
and Dr.GRPO's constant divisor means the same.

`axis_name` names the mapped axes (of `jax.pmap`, `shard_map`, `vmap`) over which the optimizer batch is spread; totals
are then global. `num_completions` is global already.
"""

import jax
import jax.numpy as jnp

from grpo_jax.functional.numerics import AxisName, maybe_psum, takes


@takes(mask="... T")
def token_mean_weights(mask: jax.Array, *, num_completions: int | None = None, axis_name: AxisName = None) -> jax.Array:
    """w = m / Σ m, the same for every token. DAPO (2503.14476).

    Args:
      mask: bool `[..., T]`.
      num_completions: not read: the divisor is the number of tokens. To count the tokens of masked completions, take
        the weights of the mask that still has them.
      axis_name: mapped axes over which the optimizer batch is spread.

    Returns:
      float32 `[..., T]`, summing to 1 over the optimizer batch (to 0 if it is empty).

    Examples:
      >>> print(token_mean_weights(jnp.array([[True, True, True], [True, False, False]])))
      [[0.25 0.25 0.25]
       [0.25 0.   0.  ]]
    """
    del num_completions
    total = maybe_psum(jnp.sum(mask, dtype=jnp.float32), axis_name)
    return mask.astype(jnp.float32) / jnp.maximum(total, 1)


@takes(mask="... T")
def sequence_mean_weights(
    mask: jax.Array, *, num_completions: int | None = None, axis_name: AxisName = None
) -> jax.Array:
    """w = m / (|oᵢ| · B), the same for every completion, shared by its tokens. DeepSeekMath (2402.03300).

    Args:
      mask: bool `[..., T]`.
      num_completions: B of the whole optimizer batch. None: the completions that have a token.
      axis_name: mapped axes over which the optimizer batch is spread.

    Returns:
      float32 `[..., T]`, summing to 1 over the optimizer batch (to 0 if it is empty, to less than 1 if
      `num_completions` counts completions without tokens).

    Examples:
      >>> mask = jnp.array([[True, True], [True, False], [False, False]])
      >>> print(sequence_mean_weights(mask))
      [[0.25 0.25]
       [0.5  0.  ]
       [0.   0.  ]]
      >>> print(sequence_mean_weights(mask, num_completions=3))
      [[0.167 0.167]
       [0.333 0.   ]
       [0.    0.   ]]
    """
    lengths = jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.float32)
    return mask.astype(jnp.float32) / (jnp.maximum(lengths, 1) * _count(mask, num_completions, axis_name))


@takes(mask="... T")
def sequence_sum_weights(
    mask: jax.Array, *, num_completions: int | None = None, axis_name: AxisName = None
) -> jax.Array:
    """w = m / B, the mean over completions of sums over their tokens. LUSPO (2602.05261).

    Args:
      mask: bool `[..., T]`.
      num_completions: B of the whole optimizer batch. None: the completions that have a token.
      axis_name: mapped axes over which the optimizer batch is spread.

    Returns:
      float32 `[..., T]`, summing to the mean length of a completion.

    Examples:
      >>> print(sequence_sum_weights(jnp.array([[True, True], [True, False]])))
      [[0.5 0.5]
       [0.5 0. ]]
    """
    return mask.astype(jnp.float32) / _count(mask, num_completions, axis_name)


@takes(mask="... T")
def constant_length_weights(
    mask: jax.Array,
    *,
    max_length: int | None = None,
    num_completions: int | None = None,
    axis_name: AxisName = None,
) -> jax.Array:
    """w = m / (B · L_max), sums over tokens divided by a constant. Dr.GRPO (2503.20783).

    Args:
      mask: bool `[..., T]`.
      max_length: L_max in tokens, the sampler's limit. None: the width T of the mask, which is right only if the
        mask is as wide as that limit.
      num_completions: B of the whole optimizer batch. None: the completions that have a token.
      axis_name: mapped axes over which the optimizer batch is spread.

    Returns:
      float32 `[..., T]`.

    Examples:
      >>> print(constant_length_weights(jnp.array([[True, True], [True, False]]), max_length=4))
      [[0.125 0.125]
       [0.125 0.   ]]
    """
    max_length = mask.shape[-1] if max_length is None else max_length
    return mask.astype(jnp.float32) / (max_length * _count(mask, num_completions, axis_name))


def _count(mask: jax.Array, num_completions: int | None, axis_name: AxisName) -> jax.Array:
    """Returns B, at least 1: `num_completions`, or else the number of completions that have a token."""
    if num_completions is not None:
        return jnp.maximum(jnp.asarray(num_completions, jnp.float32), 1)
    return jnp.maximum(maybe_psum(jnp.sum(jnp.any(mask, axis=-1), dtype=jnp.float32), axis_name), 1)
