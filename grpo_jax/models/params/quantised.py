"""Frozen weights in 8 or 4 bits, from which a kernel is computed when it is used: the base of QLoRA (2305.14314).

Only the kernels of projections are quantised, including those of experts. Embeddings, norms, biases and routers are
not. Both formats store the largest absolute weight M of a group of weights, and a code q for each weight:

- int8: W ≈ q · M / 127, q = round(127 W / M). A group is all weights of one output (LLM.int8, 2208.07339). M / 127 is
  stored in float32.
- nf4: W ≈ M · t[q], where t are 16 quantiles of a normal distribution (2305.14314, appendix E) and t[q] is nearest to
  W / M. A group is 64 inputs of one output. M is stored in bfloat16, so a weight takes 4.25 bits. QLoRA's second
  quantisation, of M, would reduce that to 4.13.

Letters: L layers, I inputs and O outputs of a projection, with all axes of heads in one. A mixture of experts has an
axis X of experts after L.
"""

import itertools
import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.errors import UsageError
from grpo_jax.functional.products import delayed_on_mesh, delayed_until
from grpo_jax.models.params.sharding import mesh_sizes
from grpo_jax.models.params.tree import (
    PROJECTIONS,
    Format,
    Params,
    Quantised,
    Quantize,
    check_decoder,
    format_of,
    is_quantised,
    split_shape,
)

_BLOCK = 64  # weights in a group of nf4, as in QLoRA


@partial(jax.jit, static_argnums=(1, 2, 3))
def quantise(kernel: jax.Array, in_shape: tuple[int, ...], out_shape: tuple[int, ...], format: Format) -> Quantised:
    """Quantises a kernel.

    Args:
      kernel: The kernel of all layers, float `[L, *in, *out]`, or of one layer.
      in_shape: The shape of an input, `*in`.
      out_shape: The shape of an output, `*out`.
      format: The format, int8 or nf4.

    Returns:
      The quantised kernel.
    """
    leading = kernel.shape[: kernel.ndim - len(in_shape) - len(out_shape)]
    matrix = kernel.astype(jnp.float32).reshape(*leading, math.prod(in_shape), math.prod(out_shape))
    return Quantised(*_ENCODE[format](matrix), in_shape, out_shape, format)


def dequantised(kernel: Quantised, dtype: Any) -> jax.Array:
    """Dequantises a kernel. It is computed in float32 and rounded once.

    Args:
      kernel: The quantised kernel of one layer or of all layers.
      dtype: The dtype of the result.

    Returns:
      The kernel `[L, *in, *out]`, or that of one layer.
    """
    matrix = _DECODE[kernel.format](kernel.codes, kernel.scales, math.prod(kernel.in_shape))
    return matrix.astype(dtype).reshape(kernel.shape)


def beside(kernel: Quantised, x: jax.Array) -> Quantised:
    """Makes a kernel available only when x is. Otherwise XLA would dequantise all layers before the loop over tokens.

    Args:
      kernel: The quantised kernel of one layer.
      x: The array that is multiplied by the kernel.
    """
    if mesh_sizes() is None:
        return replace(kernel, codes=delayed_until(kernel.codes, x))
    return delayed_on_mesh(kernel, x)


def quantise_params(params: Params, format: Quantize) -> Params:
    """Quantises the kernels of all projections.

    Args:
      params: The parameters of the decoder, with layers stacked and without adapters. The result shares all other
        arrays.
      format: The format, int8 or nf4; with none the parameters are returned unchanged.

    Returns:
      The quantised parameters. They cannot be trained themselves, but LoRA adapters on them can.

    Raises:
      UsageError: The parameters are quantised already, or belong to another model.
    """
    if format == "none":
        return params
    if format_of(params) != "none":
        raise UsageError("these parameters are quantised already: give those of the original model")
    check_decoder(params)

    def leaf(path: Any, x: jax.Array) -> Any:
        names = [str(getattr(key, "key", "")) for key in path]
        is_projection = names[-1] == "kernel" and names[-2] in PROJECTIONS
        return quantise(x, *split_shape(names[-2], x.shape)[1:], format) if is_projection else x

    return jax.tree_util.tree_map_with_path(leaf, params)


def dequantise_params(params: Params, dtype: Any = jnp.float32) -> Params:
    """Dequantises all quantised kernels.

    Args:
      params: The parameters of the decoder. The result shares all arrays that are not quantised.
      dtype: The dtype of the dequantised kernels.
    """
    return jax.tree.map(lambda x: dequantised(x, dtype) if is_quantised(x) else x, params, is_leaf=is_quantised)


# ---- the two formats, for matrices [..., I, O]


def _to_int8(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    steps = jnp.max(jnp.abs(matrix), axis=-2, keepdims=True) / 127
    return jnp.round(matrix / _not_zero(steps)).astype(jnp.int8), steps


def _from_int8(codes: jax.Array, steps: jax.Array, inputs: int) -> jax.Array:
    return codes.astype(jnp.float32) * steps


# Appendix E of 2305.14314. 0 and ±1 are included, for padding and the largest weight.
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


def _to_nf4(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    *leading, inputs, outputs = matrix.shape
    padding = [(0, 0)] * len(leading) + [(0, -inputs % _BLOCK), (0, 0)]
    blocks = jnp.pad(matrix, padding).reshape(*leading, -1, _BLOCK, outputs)
    largest = jnp.max(jnp.abs(blocks), axis=-2).astype(jnp.bfloat16)
    shares = blocks / _not_zero(largest.astype(jnp.float32))[..., None, :]
    codes = jnp.zeros(shares.shape, jnp.uint8)
    for low, high in itertools.pairwise(_NF4):
        codes += shares > (low + high) / 2
    codes = codes.reshape(*leading, -1, outputs)[..., : inputs + inputs % 2, :]
    return codes[..., ::2, :] << 4 | codes[..., 1::2, :], largest


def _from_nf4(codes: jax.Array, largest: jax.Array, inputs: int) -> jax.Array:
    # A byte holds two codes. JAX does not test `jnp.uint4` on GPUs.
    pairs = jnp.stack([codes >> 4, codes & 15], axis=-2)
    codes = pairs.reshape(*codes.shape[:-2], -1, codes.shape[-1])[..., :inputs, :]
    block_scales = jnp.repeat(largest.astype(jnp.float32), _BLOCK, axis=-2)[..., :inputs, :]
    return jnp.asarray(_NF4, jnp.float32)[codes] * block_scales


_ENCODE = {"int8": _to_int8, "nf4": _to_nf4}  # float32 matrix -> codes, scales
_DECODE = {"int8": _from_int8, "nf4": _from_nf4}  # codes, scales, I -> float32 matrix


def _not_zero(x: jax.Array) -> jax.Array:
    """Replaces 0 by 1, to divide by it: a group of zeros then has the codes of zeros."""
    return jnp.where(x > 0, x, 1)
