"""Rounding of float32 parameters to the bfloat16 numbers that a model computes with.

Weights of a pretrained file are often bfloat16 numbers, and an update is often smaller than half the distance to the
next one. Rounded to the nearest, such a weight stays where it is until many updates have added up. With stochastic
rounding a share of the weights moves at once, so that their mean follows the float32 weights.
"""

import math
import zlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.models.params.tree import Params

_MATRICES = {"kernel", "embedding", "unembedding"}  # everything else is computed in float32, as are routers


def _names(path: Any) -> list[str]:
    return [entry.key for entry in path if hasattr(entry, "key")]  # without `Headed.decoder`


def _is_rounded(path: Any, x: Any) -> bool:
    names = _names(path)
    return bool(names) and names[-1] in _MATRICES and "router" not in names and x.dtype == jnp.float32


def round_to_nearest(params: Params) -> Params:
    """Rounds the matrices of a model to the nearest bfloat16 numbers, as products in bfloat16 do by themselves."""

    def rounded(path: Any, x: jax.Array) -> jax.Array:
        # A cast to bfloat16 and back is removed by XLA on GPUs.
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7) if _is_rounded(path, x) else x

    return jax.tree_util.tree_map_with_path(rounded, params)


def round_stochastically(params: Params, dtype: Any = jnp.float32) -> Params:
    """Rounds the matrices of a model up or down to bfloat16 numbers, with probabilities that keep the mean.

    x is rounded away from 0 with the probability (|x| − a) / (b − a), where a and b are the neighbours of |x| (Gupta et
    al., 1502.02551). The noise depends only on a matrix's name and a number's place in it. It is therefore the same in
    each step: a weight moves once its updates exceed its own threshold, and weights without updates do not move.

    Args:
      params: The parameters of one model. bfloat16 numbers stay as they are, to the bit.
      dtype: The dtype of the arrays of rounded numbers.

    Returns:
      The parameters. The gradient of rounded float32 arrays passes unchanged.
    """

    return jax.tree_util.tree_map_with_path(partial(round_leaf, dtype=dtype), params)


def round_leaf(path: Any, x: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Returns one leaf of `round_stochastically`, for its path in the tree of parameters."""
    if not _is_rounded(path, x):
        return x
    # Adding a number below 2¹⁶ to float32's bits and cutting the last 16 bits rounds the magnitude.
    salt = zlib.crc32("/".join(_names(path)).encode())
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + _noise(x.shape, salt)
    near = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    # With 0 for −0, XLA on GPUs would share one array of zeros with the gradients, and copy it.
    return (x + jax.lax.stop_gradient(jnp.where(jnp.isfinite(x), near - x, -0.0))).astype(dtype)


def _noise(shape: tuple[int, ...], salt: int) -> jax.Array:
    """Returns numbers from 0 to 2¹⁶ − 1 as a hash of their places, uint32."""
    places: Any = jnp.uint32(salt)
    for axis in range(len(shape)):
        stride = jnp.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        places = places + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * stride
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # mixes all bits
        places = (places ^ (places >> shift)) * jnp.uint32(factor)
    return places >> 16


def changed_share(before: Params, after: Params) -> jax.Array | None:
    """Returns the share of the numbers in a model's matrices that differ, float32; None for trees of adapters."""

    def matrices(params: Params) -> list[jax.Array]:
        return [x for path, x in jax.tree_util.tree_leaves_with_path(params) if _is_rounded(path, x)]

    pairs = list(zip(matrices(before), matrices(after), strict=True))
    if not pairs:
        return None
    changed = [jnp.sum(x != y, dtype=jnp.float32) for x, y in pairs]
    return jnp.sum(jnp.stack(changed)) / sum(x.size for x, _ in pairs)
