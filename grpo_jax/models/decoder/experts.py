"""A mixture of experts instead of a layer's MLP: each token is sent to a few of many MLPs, and no token is dropped.

y = Σⱼ wⱼ · down_eⱼ(silu(gate_eⱼ x) · up_eⱼ x) over the J experts eⱼ with the largest p = softmax(router x). The
weights w are the p of these experts, or p divided by their sum (`ExpertsConfig.norm_topk_prob`). 1701.06538; this is
the mixture of Qwen3-MoE and Mixtral.

Every pair of a token and one of its experts is a row. Rows are sorted by expert, so that the rows of an expert form one
matrix. Each projection is then one product of groups of rows, each group with its own kernel. On a mesh each device
sorts its own tokens. Experts are sharded by their features F, like an MLP, so every device has a part of each expert.
No token travels, and no token waits for an expert that is busier.

Letters: M tokens, X experts, J experts per token, D features, F features of an expert's MLP, R rank of adapters.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from grpo_jax.functional.numerics import in_float32
from grpo_jax.functional.products import rms_norm, traits_of_backend, transposed
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.decoder.modules import (
    ACTIVATIONS,
    MLP,
    Linear,
    kernel_param,
    nn,
    norm,
    other_params,
    usable_kernel,
)
from grpo_jax.models.params import sharding


class Routing(NamedTuple):
    """The experts of each token, in one layer or in all layers (with an axis L after the axes of tokens)."""

    experts: jax.Array  # int32 [N, M, J] or [..., L, J]
    entropy: jax.Array  # float32 [N, M] or [..., L], the entropy of the router's probabilities, in nats


class Experts(nn.Module):
    """The mixture of experts of a layer."""

    model: ModelConfig  # has experts
    is_decoding: bool  # computes the next tokens of completions; on a mesh kernels then stay sharded

    @nn.compact
    def __call__(self, x, routed):
        """Computes the mixture of x `[N, M, D]`, in the shape of x, and the `Routing` of its tokens.

        The router reads `routed`, in the shape of x.
        """
        config, width = self.model.experts, x.shape[-1]
        assert config
        activation = partial(gated, limit=config.swiglu_limit, activation=ACTIVATIONS[self.model.hidden_act])
        kernel = partial(Kernel, has_bias=config.swiglu_limit is not None, is_decoding=self.is_decoding)
        router = kernel((width, config.num_experts), has_scales=config.has_norms, name="router")(x, jnp.float32)
        router = jax.lax.stop_gradient(router) if self.model.router == "frozen" else router
        inner = config.moe_intermediate_size
        shapes = {"gate_proj": (width, inner), "up_proj": (width, inner), "down_proj": (inner, width)}
        kernels = {name: kernel((config.num_experts, *shape), name=name)(x, x.dtype) for name, shape in shapes.items()}

        def mixed(x: jax.Array, routed: jax.Array, router: Any, kernels: Any) -> tuple[jax.Array, Routing]:
            tokens, routed = (y.reshape(-1, width) for y in (x, routed))
            choose = partial(route, num_chosen=config.num_experts_per_tok, normalise=config.norm_topk_prob)
            routing, weights = choose(routed, **router)
            mixed_tokens = mixture(tokens, routing.experts, weights, kernels, activation).reshape(x.shape)
            routing = jax.tree.map(lambda y: y.reshape(*x.shape[:2], *y.shape[1:]), routing)
            return mixed_tokens, jax.lax.stop_gradient(routing)

        return _shared_out(mixed, x, routed, router, kernels, is_decoding=self.is_decoding)


def mix_experts(
    config: ModelConfig, x: jax.Array, normed: jax.Array, *, is_decoding: bool
) -> tuple[jax.Array, Routing]:
    """Computes the mixture of experts of a layer, and the MLP that all tokens share if there is one.

    Call this inside the layer's module. Gemma 4 has norms of both; others multiply the shared MLP by a gate.

    Args:
      config: The configuration of the decoder, which has experts.
      x: The residual stream, `[N, M, D]`.
      normed: x after the layer's norm.
      is_decoding: True for the next tokens of completions.

    Returns:
      The sum in the shape of x, and the `Routing` of the tokens.
    """
    assert config.experts
    width, has_norms = config.experts.shared_expert_intermediate_size, config.experts.has_norms
    experts, experts_input, routed = Experts(config, is_decoding, name="experts"), normed, normed
    if has_norms:
        scale = jnp.full_like(x, x.shape[-1] ** -0.5, jnp.float32, x.shape[-1:])
        experts_input, routed = norm(config, "experts_input_norm")(x), rms_norm(x, scale, config.rms_norm_eps)
    mixed, routing = experts(experts_input, routed)
    if not width:
        return mixed, routing
    shared = MLP(config, width, name="shared_expert")(normed)
    if has_norms:
        return norm(config, "experts_output_norm")(mixed) + norm(config, "shared_expert_norm")(shared), routing
    gate = Linear((1,), False, name="shared_expert_gate")(normed)
    return mixed + in_float32(jax.nn.sigmoid, gate) * shared, routing


class Kernel(nn.Module):
    """A parameter `kernel`, which may be `Quantised`, its `bias`, and `a` and `b` of its adapter if "lora" has them."""

    shape: tuple[int, ...]
    has_bias: bool
    is_decoding: bool
    has_scales: bool = False  # of a router: `scale` of its input, and `expert_scale` of its weights

    @nn.compact
    def __call__(self, x, dtype):
        """Returns the arrays by name, in the layout in which they are used with x."""
        kernel, shapes = kernel_param(self, self.shape), {}
        if self.has_bias:
            shapes["bias"] = (*self.shape[:-2], self.shape[-1])
        if self.has_scales:
            shapes |= {"scale": self.shape[:1], "expert_scale": self.shape[1:]}
        arrays: dict[str, Any] = other_params(self, shapes, dtype, is_decoding=self.is_decoding)
        return arrays | {"kernel": usable_kernel(str(self.name), kernel, x, dtype, is_decoding=self.is_decoding)}


def _shared_out(
    mixed: Callable[..., tuple[jax.Array, Routing]],
    x: jax.Array,
    routed: jax.Array,
    router: Any,
    kernels: Any,
    *,
    is_decoding: bool,
) -> tuple[jax.Array, Routing]:
    """Computes `mixed(x, routed, router, kernels)`. On a mesh a device uses its tokens and features of all experts."""
    sizes = sharding.mesh_sizes()
    if sizes is None:
        return mixed(x, routed, router, kernels)
    cuts = sharding.specs(kernels, sizes, sharding.decoding if is_decoding else sharding.gathered)
    features = cuts["gate_proj"]["kernel"][-1]
    rows = PartitionSpec(sharding.fitting(x.shape[0], sizes, sharding.DATA if is_decoding else sharding.BATCH))

    def on_device(x: jax.Array, routed: jax.Array, router: Any, kernels: Any) -> tuple[jax.Array, Routing]:
        if features and "bias" in kernels["down_proj"]:  # every device adds its part
            down = kernels["down_proj"]
            kernels = kernels | {"down_proj": down | {"bias": down["bias"] / jax.lax.axis_size(features)}}
        part, routing = mixed(x, routed, router, kernels)
        return (jax.lax.psum(part, features) if features else part), routing

    in_specs = rows, rows, PartitionSpec(), cuts
    return jax.shard_map(on_device, in_specs=in_specs, out_specs=rows)(x, routed, router, kernels)


def route(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    scale: jax.Array | None = None,
    expert_scale: jax.Array | None = None,
    *,
    num_chosen: int,
    normalise: bool,
) -> tuple[Routing, jax.Array]:
    """Returns the experts of each token and their weights.

    Logits are computed in float32 even for bfloat16 tokens: rounded logits could send a token to one expert in the
    sampler and to another in the trainer.

    Args:
      x: The tokens, `[M, D]`.
      kernel, bias: Those of the router, `[D, X]` and `[X]` or None.
      scale: The factors of the features of x, `[D]`. None: none.
      expert_scale: The factors of the weights of each expert, `[X]`. None: none.
      num_chosen: The number of experts per token, J.
      normalise: True if the weights of a token add up to 1, before they are scaled.

    Returns:
      `Routing` `[M, J]`, the largest probability first, and weights, float32 `[M, J]`. The choice has no gradient, and
      the weights have one.
    """
    kernel = kernel if scale is None else scale[:, None] * kernel
    logits = jnp.matmul(x.astype(jnp.float32), kernel.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    logits = logits if bias is None else logits + bias.astype(jnp.float32)
    probabilities = jax.nn.softmax(logits)
    # Saved for the backward pass, which might round logits differently and choose other experts.
    experts = checkpoint_name(jax.lax.top_k(jax.lax.stop_gradient(probabilities), num_chosen)[1], "routed")
    weights = jnp.take_along_axis(probabilities, experts, axis=-1)
    if normalise:
        weights /= jnp.sum(weights, axis=-1, keepdims=True)
    if expert_scale is not None:
        weights *= jax.nn.one_hot(experts, expert_scale.size) @ expert_scale
    return Routing(experts, jnp.sum(jax.scipy.special.entr(probabilities), axis=-1)), weights


def gated(
    gate: jax.Array,
    up: jax.Array,
    *,
    limit: float | None = None,
    activation: Callable[[jax.Array], jax.Array] = nn.silu,
) -> jax.Array:
    """activation(gate) · up; with a limit c (1 + clip(up, −c, c)) · g · sigmoid(1.702 g), where g = min(gate, c)."""
    if limit is None:
        return activation(gate) * up
    gate = jnp.minimum(gate, limit)
    return (1 + jnp.clip(up, -limit, limit)) * gate * in_float32(jax.nn.sigmoid, in_float32(jnp.multiply, gate, 1.702))


def mixture(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    kernels: Mapping[str, Any],
    activation: Callable[[jax.Array, jax.Array], jax.Array] = gated,
) -> jax.Array:
    """Σⱼ wⱼ · MLP_eⱼ(x).

    Args:
      x: The tokens, `[M, D]`.
      experts, weights: The experts of each token and their weights, `[M, J]`, from `route`.
      kernels: The arrays of each projection, by its name. Each has a `kernel`: gate_proj and up_proj `[X, D, F]`,
        down_proj `[X, F, D]`. There may be a `bias` `[X, out]`, and `a` `[X, in, R]` and `b` `[X, R, out]` of adapters.
      activation: (gate, up) -> the input of down_proj.

    Returns:
      `[M, D]`, in the dtype of x.
    """
    num_tokens, num_chosen = experts.shape
    order = jnp.argsort(experts.ravel(), stable=True)
    place = jnp.argsort(order)  # the index of each row after sorting
    sizes = jnp.bincount(experts.ravel(), length=kernels["gate_proj"]["kernel"].shape[0])

    def project(name: str, rows: jax.Array) -> jax.Array:
        adapted = kernels[name]
        y = grouped_product(rows, adapted["kernel"], sizes)
        if "a" in adapted:
            y = y + grouped_product(grouped_product(rows, adapted["a"], sizes), adapted["b"], sizes)
        if "bias" in adapted:  # the product with the experts as one-hot vectors: a gather has a slow gradient
            is_expert = experts.ravel()[order][:, None] == jnp.arange(sizes.size)
            y = y + is_expert.astype(y.dtype) @ adapted["bias"]
        return y

    repeated = jnp.broadcast_to(x[:, None], (num_tokens, num_chosen, x.shape[-1])).reshape(-1, x.shape[-1])
    rows = _permuted(repeated, order, place)
    gate, up = (checkpoint_name(project(name, rows), "gated") for name in ("gate_proj", "up_proj"))
    rows = _permuted(project("down_proj", activation(gate, up)), place, order)
    rows = rows.reshape(num_tokens, num_chosen, -1).astype(jnp.float32)
    return jnp.einsum("mjd,mj->md", rows, weights).astype(x.dtype)


@jax.custom_vjp
def _permuted(rows: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """rows[order]. The gradient is a gather too, since JAX's rule would add it up row by row."""
    return rows[order]


def _permuted_forward(rows, order, inverse):
    return rows[order], inverse


def _permuted_backward(inverse, gradient):
    return gradient[inverse], None, None


_permuted.defvjp(_permuted_forward, _permuted_backward)


# ---- the product of groups of rows, each with its own kernel


def grouped_product(rows: jax.Array, kernels: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiplies each row by the kernel of its group.

    This uses `jax.lax.ragged_dot`, unless the backend computes that as a product of all rows with all kernels, which
    takes X times the work and the memory: see `Traits.groups_by_blocks`.

    Args:
      rows: The rows, `[M, I]`, sorted by group.
      kernels: The kernel of each group, `[X, I, O]`.
      sizes: The number of rows of each group, int `[X]`; the sum is M.

    Returns:
      The products `[M, O]`, in the dtype of the rows.
    """
    kernels = kernels.astype(rows.dtype)
    # Under shard_map all arrays must vary over the same axes: see `products.product`.
    zero = jnp.zeros_like(rows, shape=()) + jnp.zeros_like(kernels, shape=())
    rows, kernels, sizes = (x + zero.astype(x.dtype) for x in (rows, kernels, sizes))
    multiply = _by_blocks if traits_of_backend().groups_by_blocks else jax.lax.ragged_dot
    return multiply(rows, kernels, sizes)


class _Blocks(NamedTuple):
    """Rows split into blocks of the same size, each for one group. A block that its group does not fill ends with rows
    of the next groups."""

    size: int
    used: jax.Array  # int32, the number of blocks
    group: jax.Array  # int32 [maximum number of blocks]
    start: jax.Array  # int32 [maximum number of blocks], the first row
    end: jax.Array  # int32 [maximum number of blocks], the row after its last row


_FEWEST, _MOST = 8, 64  # limits on the rows of a block


def _blocks(num_rows: int, sizes: jax.Array) -> _Blocks:
    """Splits groups of these sizes into blocks, with about as many rows as an average group has."""
    num_groups = sizes.shape[0]
    size = min(_MOST, max(_FEWEST, 1 << (num_rows // num_groups).bit_length()))
    ends, counts = jnp.cumsum(sizes), -(-sizes // size)
    before = jnp.cumsum(counts)
    numbers = jnp.arange(num_rows // size + num_groups, dtype=before.dtype)
    group = jnp.minimum(jnp.sum(numbers[:, None] >= before, axis=-1), num_groups - 1)
    start = (ends - sizes)[group] + (numbers - (before - counts)[group]) * size
    return _Blocks(size, before[-1], group, start, jnp.minimum(start + size, ends[group]))


@jax.custom_vjp
def _by_blocks(rows: jax.Array, kernels: jax.Array, sizes: jax.Array) -> jax.Array:
    """Computes `grouped_product`, one block after the other."""
    return _times_kernels(rows, kernels, sizes, 1)


def _by_blocks_forward(rows, kernels, sizes):
    return _by_blocks(rows, kernels, sizes), (rows, kernels, sizes)


def _by_blocks_backward(residuals, gradient):
    rows, kernels, sizes = residuals
    return _times_kernels(gradient, kernels, sizes, 2), _gradient_of_kernels(rows, gradient, kernels, sizes), None


_by_blocks.defvjp(_by_blocks_forward, _by_blocks_backward)


def _times_kernels(rows: jax.Array, kernels: jax.Array, sizes: jax.Array, axis: int) -> jax.Array:
    """Multiplies rows `[M, ·]` by kernels `[X, I, O]`, contracted over this axis of the kernels."""
    blocks = _blocks(rows.shape[0], sizes)
    padded = jnp.pad(rows, [(0, blocks.size), (0, 0)])

    def put(number: jax.Array, products: jax.Array) -> jax.Array:
        block = jax.lax.dynamic_slice_in_dim(padded, blocks.start[number], blocks.size)
        kernel = jax.lax.dynamic_index_in_dim(kernels, blocks.group[number], keepdims=False)
        made = jax.lax.dot_general(block, kernel, (((1,), (axis - 1,)), ((), ())), preferred_element_type=jnp.float32)
        # The next blocks overwrite the products after this group's rows.
        return jax.lax.dynamic_update_slice_in_dim(products, made, blocks.start[number], axis=0)

    begun = jnp.zeros_like(rows, jnp.float32, shape=(padded.shape[0], kernels.shape[3 - axis]))
    return jax.lax.fori_loop(0, blocks.used, put, begun)[: rows.shape[0]].astype(rows.dtype)


def _gradient_of_kernels(rows: jax.Array, gradient: jax.Array, kernels: jax.Array, sizes: jax.Array) -> jax.Array:
    """Σ rowsᵀ gradient over the rows of each group, in the shape of the kernels `[X, I, O]`."""
    blocks = _blocks(rows.shape[0], sizes)
    rows, gradient = (jnp.pad(x, [(0, blocks.size), (0, 0)]) for x in (rows, gradient))

    def add(number: jax.Array, total: jax.Array) -> jax.Array:
        start, group = blocks.start[number], blocks.group[number]
        block, block_gradient = (jax.lax.dynamic_slice_in_dim(x, start, blocks.size) for x in (rows, gradient))
        is_own = start + jnp.arange(blocks.size) < blocks.end[number]
        block = transposed(jnp.where(is_own[:, None], block, 0))
        more = jax.lax.dot_general(block, block_gradient, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return total.at[group].add(more)

    begun = jnp.zeros_like(rows, jnp.float32, shape=kernels.shape)
    return jax.lax.fori_loop(0, blocks.used, add, begun).astype(kernels.dtype)


# ---- metrics


def load_metrics(routing: Routing, mask: jax.Array, num_experts: int) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Measures how tokens are distributed over the experts. Each metric is a pair (weighted sum, weight).

    Args:
      routing: The experts `[..., L, J]` and entropies `[..., L]` of all layers.
      mask: True on tokens that count, bool `[...]`.
      num_experts: The number of experts, X.

    Returns:
      `expert_share`, float32 `[L, X]`: the share of the choices of tokens that each expert has. `router_entropy`: the
      entropy of the router's probabilities in nats, averaged over layers. It is log X if all experts are equally
      likely.
    """
    *_, layers, num_chosen = routing.experts.shape
    weights = mask.reshape(-1).astype(jnp.float32)
    experts = routing.experts.reshape(-1, layers, num_chosen) + num_experts * jnp.arange(layers)[:, None]
    shares = jnp.broadcast_to(weights[:, None, None] / num_chosen, experts.shape)
    total = jnp.zeros(layers * num_experts).at[experts.ravel()].add(shares.ravel())
    entropy = jnp.sum(jnp.mean(routing.entropy, axis=-1).ravel() * weights)
    return {
        "expert_share": (total.reshape(layers, num_experts), jnp.sum(weights)),
        "router_entropy": (entropy, jnp.sum(weights)),
    }


def busiest(share: jax.Array) -> jax.Array:
    """Returns the share of the busiest expert, averaged over layers: from 1/X to 1/J. `[L, X]` -> scalar."""
    return jnp.mean(jnp.max(share, axis=-1))
