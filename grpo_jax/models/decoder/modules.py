"""Modules that several kinds of layers share: linear maps, norms and MLPs.

Letters: see `transformer`. R is the rank of adapters.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from grpo_jax.errors import missing
from grpo_jax.functional.numerics import in_float32
from grpo_jax.functional.products import product, rms_norm, times_transposed
from grpo_jax.models.config import Activation, ModelConfig
from grpo_jax.models.params import sharding
from grpo_jax.models.params.quantised import beside, dequantised
from grpo_jax.models.params.sharding import DATA, put_together, spread
from grpo_jax.models.params.tree import is_quantised

try:
    from flax import linen as nn  # other modules import it from here
except ModuleNotFoundError as error:
    raise missing(error.name) from None

# Modules only declare shapes. The initial values come from `transformer.initial_params`.
declared = nn.initializers.zeros


def _rounded_once(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Returns an activation that is computed in float32 and rounded once.

    The backward pass computes it again. It would keep float32 numbers, and an update of Gemma 3 270M would take 9.8
    instead of 9.1 GiB, by XLA's plan for an H100.
    """
    recomputed = jax.checkpoint(partial(in_float32, function))
    return lambda x: recomputed(x) if x.dtype == jnp.bfloat16 else function(x)


ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": partial(in_float32, nn.silu),  # its backward pass keeps no more in float32, by the same plan
    "gelu_pytorch_tanh": _rounded_once(partial(nn.gelu, approximate=True)),
    "gelu": _rounded_once(partial(nn.gelu, approximate=False)),
    "relu": nn.relu,
}


class MLP(nn.Module):
    """down(activation(gate(x)) · up(x)), with this number of features between."""

    config: ModelConfig
    width: int

    @nn.compact
    def __call__(self, x):
        """Computes the MLP of x `[..., D]`, in the shape of x."""
        config, activation = self.config, ACTIVATIONS[self.config.hidden_act]

        sizes = {"gate_proj": (self.width,), "up_proj": (self.width,)}
        gate, up = (checkpoint_name(y, "gated") for y in linears(self, x, sizes, config.mlp_bias))
        return Linear((config.hidden_size,), config.mlp_bias, name="down_proj")(activation(gate) * up)


class PerLayerInput(nn.Module):
    """projection(activation(gate(x)) · features), with the features of the tokens that only this layer reads."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x, features):
        """Computes the change of x `[N, M, D]` from features `[N, M, d]`, in the shape of x."""
        gate = Linear((features.shape[-1],), False, name="per_layer_input_gate")(x)
        gated = ACTIVATIONS[self.config.hidden_act](gate) * features
        return Linear((self.config.hidden_size,), False, name="per_layer_projection")(gated)


def linears(
    module: nn.Module, x: jax.Array, out_shapes: Mapping[str, tuple[int, ...]], use_bias: bool
) -> list[jax.Array]:
    """Applies several linear maps to the same x, with one product if `decoding_layout` has joined their matrices.

    Args:
      module: The module that contains the maps.
      x: The input, `[..., in]`.
      out_shapes: The shape of an output, `*out`, of each map by its name.
      use_bias: True if the maps have biases.

    Returns:
      The output `[..., *out]` of each map.
    """
    products: list[jax.Array] | list[None] = [None] * len(out_shapes)
    if module.has_variable("params", "joined"):
        ends = list(itertools.accumulate(math.prod(shape) for shape in out_shapes.values()))
        matrix: jax.Array = module.get_variable("params", "joined")
        products = jnp.split(times_transposed(x, matrix, x.dtype), ends[:-1], axis=-1)
    maps = (Linear(shape, use_bias, name=name) for name, shape in out_shapes.items())
    return [linear(x, y) for linear, y in zip(maps, products, strict=True)]


class Linear(nn.Module):
    """x W + b, plus x A B if the collection "lora" has A and B for this map.

    The parameters are `kernel` `[*in, *out]`, which may be `Quantised`, and `bias` `[*out]`. Adapters have `a`
    `[*in, R]` and `b` `[R, *out]`. In the `decoding_layout`, the kernel is replaced by a matrix `transposed`
    `[out, in]`, or, if it is quantised, only renamed to `quantised`.
    """

    out_shape: tuple[int, ...]
    use_bias: bool
    in_axes: int = 1  # trailing axes of x that are contracted

    @nn.compact
    def __call__(self, x, y=None):
        """Maps x `[..., *in]` to `[..., *out]`, in the dtype of x. If x W is known already, y is x W, `[..., out]`."""
        is_decoding = self.has_variable("params", "transposed") or self.has_variable("params", "quantised")
        if is_decoding:
            input_axis, output_axis = sharding.decoding_axes(str(self.name))
            rows = spread(x.reshape(-1, math.prod(x.shape[x.ndim - self.in_axes :])), DATA, input_axis)
            if self.has_variable("params", "transposed"):
                y = times_transposed(rows, self.get_variable("params", "transposed"), x.dtype)
            else:
                codes: Any = self.get_variable("params", "quantised")
                matrix = usable_kernel(str(self.name), codes, rows, x.dtype, is_decoding=True)
                y = product(rows, matrix.reshape(rows.shape[-1], -1))
            y = spread(y, DATA, output_axis)
        if y is not None:
            y = y.reshape(*x.shape[: x.ndim - self.in_axes], *self.out_shape)
        else:
            kernel = kernel_param(self, (*x.shape[-self.in_axes :], *self.out_shape))
            y = product(x, usable_kernel(str(self.name), kernel, x, x.dtype), self.in_axes)
        shapes = {"bias": self.out_shape} if self.use_bias else {}
        others = other_params(self, shapes, x.dtype, is_decoding=is_decoding)
        if "a" in others:
            y = y + product(product(x, others["a"], self.in_axes), others["b"])
        return y + others["bias"] if self.use_bias else y


def other_params(
    module: nn.Module, shapes: Mapping[str, tuple[int, ...]], dtype: Any, *, is_decoding: bool
) -> dict[str, jax.Array]:
    """Returns the parameters of a module besides its kernel, by name. In decoding they stay sharded on a mesh.

    Args:
      module: The module. If the collection "lora" has an adapter for it, the result has its `a` and `b`.
      shapes: The shapes of the parameters, such as `bias`.
      dtype: The dtype of the result.
      is_decoding: True in the loop over tokens.
    """
    arrays = {leaf: module.param(leaf, declared, shape) for leaf, shape in shapes.items()}
    arrays |= {leaf: module.get_variable("lora", leaf) for leaf in "ab" if module.has_variable("lora", leaf)}
    arrays = {leaf: x.astype(dtype) for leaf, x in arrays.items()}
    return arrays if is_decoding else {leaf: put_together(str(module.name), leaf, x) for leaf, x in arrays.items()}


def kernel_param(module: nn.Module, shape: tuple[int, ...]) -> Any:
    """Returns the parameter `kernel` of a module, which may be `Quantised`, or declares its shape."""
    if module.has_variable("params", "kernel"):
        return module.get_variable("params", "kernel")
    return module.param("kernel", declared, shape)


def usable_kernel(name: str, kernel: Any, x: jax.Array, dtype: Any, *, is_decoding: bool = False) -> jax.Array:
    """Returns the kernel of one layer as an array that is multiplied by x. In decoding it stays sharded on a mesh.

    Args:
      name: The name of the projection.
      kernel: The kernel, an array or `Quantised`.
      x: The array that is multiplied by the kernel.
      dtype: The dtype of the result.
      is_decoding: True in the loop over tokens.
    """
    if not is_quantised(kernel):
        kernel = kernel.astype(dtype)
        return kernel if is_decoding else put_together(name, "kernel", kernel)
    # A mesh transfers the codes, which are smaller.
    return dequantised(beside(kernel, x) if is_decoding else put_together(name, "kernel", kernel), dtype)


def norm(config: ModelConfig, name: str | None = None) -> "RMSNorm":
    """Makes a norm of the decoder, with its name in the tree of parameters."""
    return RMSNorm(config.rms_norm_eps, config.zero_centered_norms, name=name)


class RMSNorm(nn.Module):
    """x / √(mean x² + ε) · scale, in float32. 1910.07467. The parameter is `scale`, or `offset`, which is scale − 1."""

    eps: float
    zero_centered: bool = False

    @nn.compact
    def __call__(self, x, inverse=None):
        """Normalises x `[..., D]`, in decoding by `inverse_rms` of x if it is known."""
        scale = self.param("offset" if self.zero_centered else "scale", declared, (x.shape[-1],))
        if self.zero_centered:
            scale = 1 + scale.astype(jnp.float32)
        if inverse is not None:
            return (x.astype(jnp.float32) * inverse * scale).astype(x.dtype)
        return rms_norm(x, scale + jnp.zeros_like(x, shape=(), dtype=jnp.float32), self.eps)  # see `product`
