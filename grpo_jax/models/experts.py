"""A mixture of experts in place of a layer's MLP: each token is sent to a few of many MLPs, and none is dropped.

y = Σⱼ wⱼ · down_eⱼ(silu(gate_eⱼ x) · up_eⱼ x) over the J experts eⱼ with the largest p = softmax(router x). The
weights w are their p, or their p over its sum (`ExpertsConfig.norm_topk_prob`). 1701.06538; as Qwen3-MoE and Mixtral
have it.

Every pair of a token and one of its experts is a row. Rows are sorted by expert, so that those of an expert are one
matrix. Each projection is then one product of groups of rows, each group with its own kernel. On a mesh each device
sorts the tokens that it has. Experts are cut as an MLP is, in their features F: every device has a part of each of
them. No token travels, and none waits for an expert that has more of them.

Letters: M tokens, X experts, J experts of each token, D features, F features of an expert's MLP, R rank of adapters.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from grpo_jax.errors import missing
from grpo_jax.functional.products import traits_of_backend, transposed
from grpo_jax.models import sharding
from grpo_jax.models.config import ExpertsConfig
from grpo_jax.models.params import is_quantised
from grpo_jax.models.quantised import beside, dequantised

try:
    from flax import linen as nn
except ModuleNotFoundError as error:
    raise missing(error.name) from None


class Routing(NamedTuple):
    """The experts that tokens went to in one layer, or in all layers with an axis L behind that of the tokens."""

    experts: jax.Array  # int32 [N, M, J] or [..., L, J]
    entropy: jax.Array  # float32 [N, M] or [..., L], of the router's probabilities, in nats


class Experts(nn.Module):
    """The mixture of a layer. It puts `Routing` into the collection "routing", if that is asked for."""

    config: ExpertsConfig
    has_frozen_router: bool = False
    is_decoding: bool = False  # one more token of each completion: on a mesh kernels then stay cut

    @nn.compact
    def __call__(self, x):
        """x `[N, M, D]` -> the same."""
        config, width = self.config, x.shape[-1]
        shapes = {
            "gate_proj": (config.num_experts, width, config.moe_intermediate_size),
            "up_proj": (config.num_experts, width, config.moe_intermediate_size),
            "down_proj": (config.num_experts, config.moe_intermediate_size, width),
        }
        router = Kernel((width, config.num_experts), self.is_decoding, name="router")(x, jnp.float32)["kernel"]
        router = jax.lax.stop_gradient(router) if self.has_frozen_router else router
        kernels = {name: Kernel(shape, self.is_decoding, name=name)(x, x.dtype) for name, shape in shapes.items()}

        def mixed(x: jax.Array, router: jax.Array, kernels: Any) -> tuple[jax.Array, Routing]:
            tokens = x.reshape(-1, width)
            routing, weights = route(tokens, router, config.num_experts_per_tok, normalise=config.norm_topk_prob)
            mixed_tokens = mixture(tokens, routing.experts, weights, kernels).reshape(x.shape)
            routing = jax.tree.map(lambda y: y.reshape(*x.shape[:2], *y.shape[1:]), routing)
            return mixed_tokens, jax.lax.stop_gradient(routing)

        y, routing = _shared_out(mixed, x, router, kernels, is_decoding=self.is_decoding)
        self.sow("routing", "routing", routing, init_fn=lambda: None, reduce_fn=lambda _, new: new)
        return y


class Kernel(nn.Module):
    """A parameter `kernel`, which may be `Quantised`, and of its adapter `a` and `b` where "lora" has them."""

    shape: tuple[int, ...]
    is_decoding: bool

    @nn.compact
    def __call__(self, x, dtype):
        """The arrays by name, where they are used with x."""
        leaves = [leaf for leaf in "ab" if self.has_variable("lora", leaf)]
        arrays: dict[str, Any] = {leaf: self.get_variable("lora", leaf).astype(dtype) for leaf in leaves}
        kernel: Any = self.get_variable("params", "kernel")
        if is_quantised(kernel):  # what travels on a mesh are the codes
            kernel = beside(kernel, x) if self.is_decoding else sharding.put_together(str(self.name), "kernel", kernel)
            arrays["kernel"] = dequantised(kernel, dtype)
        else:
            arrays["kernel"] = self.param("kernel", nn.initializers.zeros, self.shape).astype(dtype)
        if self.is_decoding:
            return arrays
        return {leaf: sharding.put_together(str(self.name), leaf, y) for leaf, y in arrays.items()}


def _shared_out(
    mixed: Callable[..., tuple[jax.Array, Routing]], x: jax.Array, router: jax.Array, kernels: Any, *, is_decoding: bool
) -> tuple[jax.Array, Routing]:
    """`mixed(x, router, kernels)`. On a mesh each device computes its tokens, with its features of all experts."""
    sizes = sharding.mesh_sizes()
    if sizes is None:
        return mixed(x, router, kernels)
    cuts = sharding.specs(kernels, sizes, sharding.decoding if is_decoding else sharding.gathered)
    features = cuts["gate_proj"]["kernel"][-1]
    rows = PartitionSpec(sharding.fitting(x.shape[0], sizes, sharding.DATA if is_decoding else sharding.BATCH))

    def on_device(x: jax.Array, router: jax.Array, kernels: Any) -> tuple[jax.Array, Routing]:
        part, routing = mixed(x, router, kernels)
        return (jax.lax.psum(part, features) if features else part), routing

    return jax.shard_map(on_device, in_specs=(rows, PartitionSpec(), cuts), out_specs=rows)(x, router, kernels)


def route(x: jax.Array, router: jax.Array, num_chosen: int, *, normalise: bool) -> tuple[Routing, jax.Array]:
    """The experts of each token, and their weights.

    In float32 also for bfloat16 tokens: a rounding of the scores can send a token to another expert, in the sampler and
    not in the trainer.

    Args:
      x: `[M, D]`.
      router: `[D, X]`.
      num_chosen: J.
      normalise: whether the weights of a token add up to 1.

    Returns:
      `Routing` `[M, J]`, the largest probability first, and weights, float32 `[M, J]`. Choosing has no gradient;
      weights have.
    """
    scores = jnp.matmul(x.astype(jnp.float32), router.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    probabilities = jax.nn.softmax(scores)
    # Kept for the backward pass: computed anew, and rounded otherwise, they could be others.
    experts = checkpoint_name(jax.lax.top_k(jax.lax.stop_gradient(probabilities), num_chosen)[1], "routed")
    weights = jnp.take_along_axis(probabilities, experts, axis=-1)
    if normalise:
        weights /= jnp.sum(weights, axis=-1, keepdims=True)
    return Routing(experts, jnp.sum(jax.scipy.special.entr(probabilities), axis=-1)), weights


def mixture(x: jax.Array, experts: jax.Array, weights: jax.Array, kernels: Mapping[str, Any]) -> jax.Array:
    """Σⱼ wⱼ · MLP_eⱼ(x).

    Args:
      x: `[M, D]`.
      experts, weights: of its tokens, from `route`.
      kernels: by projection. Each holds `kernel`: gate_proj and up_proj `[X, D, F]`, down_proj `[X, F, D]`. Where it is
        adapted it holds `a` `[X, in, R]` and `b` `[X, R, out]` too.

    Returns:
      `[M, D]`, in the dtype of x.
    """
    num_tokens, num_chosen = experts.shape
    order = jnp.argsort(experts.ravel(), stable=True)
    place = jnp.argsort(order)  # of each row of the tokens among the sorted ones
    sizes = jnp.bincount(experts.ravel(), length=kernels["gate_proj"]["kernel"].shape[0])

    def project(name: str, rows: jax.Array) -> jax.Array:
        adapted = kernels[name]
        y = grouped_product(rows, adapted["kernel"], sizes)
        if "a" in adapted:
            y = y + grouped_product(grouped_product(rows, adapted["a"], sizes), adapted["b"], sizes)
        return y

    repeated = jnp.broadcast_to(x[:, None], (num_tokens, num_chosen, x.shape[-1])).reshape(-1, x.shape[-1])
    rows = _permuted(repeated, order, place)
    gate, up = (checkpoint_name(project(name, rows), "gated") for name in ("gate_proj", "up_proj"))
    rows = _permuted(project("down_proj", nn.silu(gate) * up), place, order)
    rows = rows.reshape(num_tokens, num_chosen, -1).astype(jnp.float32)
    return jnp.einsum("mjd,mj->md", rows, weights).astype(x.dtype)


@jax.custom_vjp
def _permuted(rows: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """rows[order]. The gradient is gathered as well: JAX's own rule would add it up row by row."""
    return rows[order]


def _permuted_forward(rows, order, inverse):
    return rows[order], inverse


def _permuted_backward(inverse, gradient):
    return gradient[inverse], None, None


_permuted.defvjp(_permuted_forward, _permuted_backward)


# ---- the product of groups of rows, each with its own kernel


def grouped_product(rows: jax.Array, kernels: jax.Array, sizes: jax.Array) -> jax.Array:
    """Each row times the kernel of its group.

    By `jax.lax.ragged_dot`, unless the backend makes it a product of all rows with all kernels, which is X times the
    work and the memory: see `Traits.groups_by_blocks`.

    Args:
      rows: `[M, I]`, sorted by group.
      kernels: `[X, I, O]`.
      sizes: int `[X]`, rows of each group; their sum is M.

    Returns:
      `[M, O]`, in the dtype of the rows.
    """
    kernels = kernels.astype(rows.dtype)
    # Under shard_map all must vary over the same axes: see `products.product`.
    zero = jnp.zeros_like(rows, shape=()) + jnp.zeros_like(kernels, shape=())
    rows, kernels, sizes = (x + zero.astype(x.dtype) for x in (rows, kernels, sizes))
    multiply = _by_blocks if traits_of_backend().groups_by_blocks else jax.lax.ragged_dot
    return multiply(rows, kernels, sizes)


class _Blocks(NamedTuple):
    """Rows cut into blocks of the same size, each of one group. A block that is not full has rows of the next groups
    behind its own."""

    size: int
    used: jax.Array  # int32, how many there are
    group: jax.Array  # int32 [blocks at most]
    start: jax.Array  # int32 [blocks at most], its first row
    end: jax.Array  # int32 [blocks at most], behind its last row


_FEWEST, _MOST = 8, 64  # rows of a block


def _blocks(num_rows: int, sizes: jax.Array) -> _Blocks:
    """The blocks of groups of these sizes: about as many rows as a group has."""
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
    """`grouped_product`, one block after the other."""
    return _times_kernels(rows, kernels, sizes, 1)


def _by_blocks_forward(rows, kernels, sizes):
    return _by_blocks(rows, kernels, sizes), (rows, kernels, sizes)


def _by_blocks_backward(residuals, gradient):
    rows, kernels, sizes = residuals
    return _times_kernels(gradient, kernels, sizes, 2), _gradient_of_kernels(rows, gradient, kernels, sizes), None


_by_blocks.defvjp(_by_blocks_forward, _by_blocks_backward)


def _times_kernels(rows: jax.Array, kernels: jax.Array, sizes: jax.Array, axis: int) -> jax.Array:
    """Rows `[M, ·]` times kernels `[X, I, O]`, contracted over this axis of them."""
    blocks = _blocks(rows.shape[0], sizes)
    padded = jnp.pad(rows, [(0, blocks.size), (0, 0)])

    def put(number: jax.Array, products: jax.Array) -> jax.Array:
        block = jax.lax.dynamic_slice_in_dim(padded, blocks.start[number], blocks.size)
        kernel = jax.lax.dynamic_index_in_dim(kernels, blocks.group[number], keepdims=False)
        made = jax.lax.dot_general(block, kernel, (((1,), (axis - 1,)), ((), ())), preferred_element_type=jnp.float32)
        # What it writes behind its own rows, the next blocks write over.
        return jax.lax.dynamic_update_slice_in_dim(products, made, blocks.start[number], axis=0)

    begun = jnp.zeros_like(rows, jnp.float32, shape=(padded.shape[0], kernels.shape[3 - axis]))
    return jax.lax.fori_loop(0, blocks.used, put, begun)[: rows.shape[0]].astype(rows.dtype)


def _gradient_of_kernels(rows: jax.Array, gradient: jax.Array, kernels: jax.Array, sizes: jax.Array) -> jax.Array:
    """Σ rowsᵀ gradient over the rows of each group, as kernels `[X, I, O]`."""
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


# ---- what is logged


def load(routing: Routing, mask: jax.Array, num_experts: int) -> dict[str, tuple[jax.Array, jax.Array]]:
    """How tokens are shared out among the experts, as (weighted sum, weight).

    Args:
      routing: of all layers: experts `[..., L, J]`, entropy `[..., L]`.
      mask: bool `[...]`, tokens that count.
      num_experts: X.

    Returns:
      `expert_share`, float32 `[L, X]`: of the places that tokens have, the share at each expert. `router_entropy`, of
      the router's probabilities, the mean over layers in nats: log X where all experts are as likely.
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
    """The share of the expert with most tokens, the mean over layers: from 1/X to 1/J. `[L, X]` -> scalar."""
    return jnp.mean(jnp.max(share, axis=-1))
