"""One decoder for prompts, completions and single tokens.

Everything about a prompt is the same for the G completions of its group, so it is
computed once: a group is one row of P + G·S tokens, the prompt and its completions behind
each other, and each completion attends to the prompt and to itself. Gradients flow back into
the prompt from all of them. The numbers are those of the repeated prompt; the work falls from
G·(P + S) tokens a group to P + G·S. All that acts on tokens one by one (norms, projections,
MLP) sees one array; only attention tells prompt and completions apart.

Letters: N prompts, G completions of each, S tokens of a completion, P tokens of a prompt,
M = P + G·S tokens of a group, C tokens of the cache, D features, F features of the MLP, H query heads,
K key-value heads, Q = H/K query heads that share one key-value head, E features of a head, L layers, V vocabulary.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from grpo_jax.errors import missing
from grpo_jax.models import sharding
from grpo_jax.models.config import AttentionKind, ModelConfig
from grpo_jax.models.config import Params as Params
from grpo_jax.models.sharding import BATCH, DATA, FSDP, MODEL, TENSOR, put_together, spread

try:
    from flax import linen as nn
except ModuleNotFoundError as error:
    raise missing(error.name) from None


class KeyValues(NamedTuple):
    """Keys and values of one layer, or with a leading L of all, as a decode step reads them.

    Heads come before tokens: the products with one query then read memory in order. On a CPU features of keys come
    before tokens too, which made attention in a decode step about twice as fast there; see `keys_for_decoding`.
    Completions have one axis for all that is not multiplied: with an axis G of size 1 XLA on CPU copied the whole cache
    for each token. On a mesh they have two, N and K·G: prompts are spread along other axes of the mesh than heads.
    """

    keys: jax.Array  # [N, K, P, E] of prompts, [N·K·G, C, E] of completions; on a CPU [N, K, E, P] and [N·K·G, E, C]
    values: jax.Array  # [N, K, P, E] of prompts, [N·K·G, C, E] of completions


class Prefix(NamedTuple):
    """What the completions of a prompt share."""

    layers: Any  # KeyValues with a leading L, or a tuple of L KeyValues
    mask: jax.Array  # bool [N, P], true on tokens of the prompt
    length: jax.Array  # int32 [N], tokens of the prompt: the position of the first completion token


class Cache(NamedTuple):
    """Keys and values of the completion tokens seen so far."""

    layers: tuple[KeyValues, ...]
    length: jax.Array  # int32 scalar, tokens written; the next one goes there


class Geometry(NamedTuple):
    """Where the tokens of a call stand and what they look at; the same for all layers.

    Masks are bool, true where a query may look, at least once for each query. They broadcast against scores
    `[N, K, G, Q, queries, keys]`, and there are one or two. Prompts alone: over themselves. Groups: of the prompt over
    itself, and of completions over prompt and completion in a row. One token of each completion: over the prompt, and
    over the cache.
    """

    angles: tuple[jax.Array, jax.Array]  # of the rotations, from `rotary_angles`
    masks: tuple[jax.Array, ...]


# Modules declare shapes. The numbers of a new model come from `initial_params`.
_declared = nn.initializers.zeros


def initial_params(key: jax.Array, shapes: Params, initializer_range: float) -> Params:
    """Kernels and embeddings ~ N(0, initializer_range²), biases 0, norms' scales 1.

    All numbers are one draw: on CPU each further draw takes .2 s to compile.

    Args:
      key: consumed.
      shapes: a tree with the shapes and dtypes of the parameters.
      initializer_range: the standard deviation.

    Returns:
      The parameters.
    """
    constants = {"bias": jnp.zeros, "scale": jnp.ones}

    def name(path: Any) -> str:
        return path[-1].key

    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    sizes = [0 if name(path) in constants else leaf.size for path, leaf in leaves]
    drawn = initializer_range * jax.random.normal(key, (sum(sizes),))
    pieces = jnp.split(drawn, list(itertools.accumulate(sizes))[:-1])
    made = [
        constants[name(path)](leaf.shape, leaf.dtype)
        if name(path) in constants
        else piece.reshape(leaf.shape).astype(leaf.dtype)
        for (path, leaf), piece in zip(leaves, pieces, strict=True)
    ]
    return jax.tree.unflatten(tree, made)


class Transformer(nn.Module):
    """Token ids to hidden states after the last norm.

    With `scan_layers` the layers are one scanned block whose parameters have a leading axis
    L, so that compile time does not depend on depth: for training and prefill. Without, they
    are separate: for decoding, where a scan inside the decode loop would copy every layer's
    parameters and cache once a token. `decoding_layout` converts.

    Reads the collection "params", and "lora" where it is given: adapters of the same tree.
    """

    config: ModelConfig
    scan_layers: bool = True

    @nn.compact
    def __call__(
        self, ids: jax.Array, near: Geometry, far: Geometry, past: tuple[Prefix, Cache] | None = None
    ) -> tuple[jax.Array, Any]:
        """Hidden states of prompts alone, of groups, or with `past` of one more token of each completion.

        Args:
          ids: int `[N, M]`: prompts `[N, P]`; groups, prompt and completions in a row; or one token each, `[N, G]`.
          near: what tokens see in layers with a sliding window.
          far: what they see in the others; the same object where all layers are alike.
          past: the prompts, and where to write the keys and values of `ids` and what else to attend to.

        Returns:
          Hidden states `[N, M, D]`; the keys and values of all layers: of the prompts, or the cache.
        """
        config = self.config
        embedding = self.param("embedding", _declared, (config.vocab_size, config.hidden_size))
        if not config.tie_word_embeddings:
            self.param("unembedding", _declared, (config.vocab_size, config.hidden_size))
        rows = BATCH if past is None else DATA
        # On a mesh embeddings are cut by features: each device reads its own of all tokens, and all are exchanged.
        x = spread(embedding[spread(ids, DATA)], DATA, None, MODEL).astype(config.dtype)
        x = spread(spread(x, DATA, None, FSDP), rows)  # in two steps: XLA would do one by a copy of everything

        layers = range(config.num_hidden_layers)
        sliding = layers if config.sliding_layers is None else config.sliding_layers
        if self.scan_layers:
            scanned = nn.scan(
                rematerialised(Block, config),
                variable_axes={"params": 0, "lora": 0},
                split_rngs={"params": True},
                in_axes=(nn.broadcast, nn.broadcast, 0),
                length=len(layers),
                unroll=len(layers) if unrolls(config) else 1,
            )
            # Which tokens a layer sees is data only where layers differ.
            is_far = None if far is near else jnp.array([layer not in sliding for layer in layers])
            x, key_values = scanned(config, name="layers")(x, near, far.masks, is_far)
        else:
            key_values = []
            for layer in layers:
                own_past = None if past is None else (past[0].layers[layer], past[1].layers[layer], past[1].length)
                block = Block(config, name=f"layer_{layer}")
                x, own = block(x, near if layer in sliding else far, past=own_past)
                key_values.append(own)
            key_values = tuple(key_values)
        return spread(RMSNorm(config.rms_norm_eps, name="final_norm")(x), rows), key_values


# What the backward pass is given of a layer; all else follows from it without another product but that of the scores.
_KEPT = ("projected", "attended", "middle", "gated")


def unrolls(config: ModelConfig) -> bool:
    """Whether layers are compiled one by one and not as a loop.

    On a GPU a loop copies what the backward pass needs of each layer into one array of all, and out of it again: a
    ninth of the time of an update. Compiling 24 layers took half as long again. With remat "layer" little is kept. On a
    mesh one layer after the other is put together.
    """
    return jax.default_backend() == "gpu" and config.remat == "none" and sharding.mesh_sizes() is None


def rematerialised(block: type[nn.Module], config: ModelConfig) -> type[nn.Module]:
    """The block with less kept for the backward pass: see `ModelConfig.remat`.

    Also without remat, norms, rotations and softmax are computed again: that takes less time than writing them down.
    Parameters of a layer that a mesh has put together are not kept either.
    """
    policy = jax.checkpoint_policies.save_only_these_names(*_KEPT) if config.remat == "none" else None
    return nn.remat(block, prevent_cse=False, policy=policy)


class Block(nn.Module):
    """x + attention(norm(x)), then + MLP(norm(x))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x, seen: Geometry, far_masks=None, is_far=None, past=None):
        """x `[N, M, D]`; what it sees, and `far_masks` instead where the bool `is_far` says so; the layer's past.

        Returns x, and keys and values."""
        if is_far is not None:
            seen = seen._replace(masks=jax.tree.map(lambda a, b: jnp.where(is_far, a, b), far_masks, seen.masks))
        rows = BATCH if past is None else DATA
        x = spread(x, rows)
        normed = RMSNorm(self.config.rms_norm_eps, name="input_norm")(x)
        attended, key_values = Attention(self.config, name="attention")(normed, seen, past)
        x = checkpoint_name(spread(x + attended, rows), "middle")
        normed = RMSNorm(self.config.rms_norm_eps, name="post_attention_norm")(x)
        return spread(x + MLP(self.config, name="mlp")(normed), rows), key_values


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x, seen: Geometry, past: tuple[KeyValues, KeyValues, jax.Array] | None = None):
        """x `[N, M, D]`; past: the prompt, the cache and its length -> as x; keys and values of prompt or cache."""
        config = self.config
        heads, kv_heads, features = config.num_attention_heads, config.num_key_value_heads, config.head_dim

        shapes = {"q_proj": (heads, features), "k_proj": (kv_heads, features), "v_proj": (kv_heads, features)}
        projected = [spread(y, BATCH, None, TENSOR) for y in linears(self, x, shapes, config.qkv_bias)]
        queries, keys, values = (checkpoint_name(y, "projected") for y in projected)  # [N, M, heads, E]

        def rotated(name: str, projected: jax.Array) -> jax.Array:
            if config.qk_norm:
                projected = RMSNorm(config.rms_norm_eps, name=f"{name}_norm")(projected)
            return rotate(projected, seen.angles)

        queries, keys = rotated("q", queries), rotated("k", keys)
        queries = queries.reshape(*x.shape[:2], kv_heads, heads // kv_heads, features)
        if past is None:
            attended, kept = attend_groups(queries, keys, values, seen.masks, config.attention)
        else:
            attended, kept = attend_past(queries, keys, values, seen.masks, *past)
        attended = spread(attended.reshape(*x.shape[:2], heads, features), BATCH, None, TENSOR)
        out = Linear((config.hidden_size,), config.o_bias, in_axes=2, name="o_proj")
        return out(attended), kept


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x):
        """x `[..., D]` -> the same."""
        config = self.config

        sizes = {"gate_proj": (config.intermediate_size,), "up_proj": (config.intermediate_size,)}
        gate, up = (checkpoint_name(y, "gated") for y in linears(self, x, sizes, config.mlp_bias))
        return Linear((config.hidden_size,), config.mlp_bias, name="down_proj")(nn.silu(gate) * up)


def linears(
    module: nn.Module, x: jax.Array, out_shapes: Mapping[str, tuple[int, ...]], use_bias: bool
) -> list[jax.Array]:
    """Several linear maps of the same x, by name; one product where `decoding_layout` has joined their matrices.

    Args:
      module: that they are part of.
      x: `[..., in]`.
      out_shapes: name -> `*out`.
      use_bias: whether they have one.

    Returns:
      `[..., *out]` of each.
    """
    products: list[jax.Array] | list[None] = [None] * len(out_shapes)
    if module.has_variable("params", "joined"):
        ends = list(itertools.accumulate(math.prod(shape) for shape in out_shapes.values()))
        products = jnp.split(_times_transposed(x, module.get_variable("params", "joined")), ends[:-1], axis=-1)
    maps = (Linear(shape, use_bias, name=name) for name, shape in out_shapes.items())
    return [linear(x, y) for linear, y in zip(maps, products, strict=True)]


class Linear(nn.Module):
    """x W + b, and + x A B where the collection "lora" holds A and B for it.

    The parameters are `kernel` `[*in, *out]` and `bias` `[*out]`; the adapter's are `a` `[*in, R]` and `b` `[R, *out]`.
    `decoding_layout` has a matrix `transposed` `[out, in]` in place of the kernel.
    """

    out_shape: tuple[int, ...]
    use_bias: bool
    in_axes: int = 1  # trailing axes of x that are contracted

    @nn.compact
    def __call__(self, x, y=None):
        """x `[..., *in]` -> `[..., *out]`, in the dtype of x; y is x W `[..., out]`, where that is known."""
        if self.has_variable("params", "transposed"):
            of_input, of_output = sharding.decoding_axes(str(self.name))
            matrix: jax.Array = self.get_variable("params", "transposed")
            rows = spread(x.reshape(-1, matrix.shape[1]), DATA, of_input)
            y = spread(_times_transposed(rows, matrix), DATA, of_output)
        if y is not None:
            y = y.reshape(*x.shape[: x.ndim - self.in_axes], *self.out_shape)
        else:
            kernel = self.param("kernel", _declared, (*x.shape[-self.in_axes :], *self.out_shape))
            y = product(x, self._whole("kernel", kernel, x), self.in_axes)
        if self.has_variable("lora", "a"):
            a: jax.Array = self.get_variable("lora", "a")
            b: jax.Array = self.get_variable("lora", "b")
            y = y + product(product(x, self._whole("a", a, x), self.in_axes), self._whole("b", b, x))
        if self.use_bias:
            y = y + self._whole("bias", self.param("bias", _declared, self.out_shape), x).astype(x.dtype)
        return y

    def _whole(self, leaf: str, param: jax.Array, x: jax.Array) -> jax.Array:
        """A parameter where it is used, which on a mesh travels in the dtype of x. In decoding it stays where it is."""
        if self.has_variable("params", "transposed"):
            return param
        return put_together(str(self.name), leaf, param.astype(x.dtype))


def _times_transposed(x: jax.Array, matrix: jax.Array, in_axes: int = 1) -> jax.Array:
    """x `[..., *in]` times a matrix `[out, in]` -> `[..., out]`."""
    rows = x.reshape(-1, matrix.shape[1])
    return jnp.einsum("ri,oi->ro", rows, matrix).reshape(*x.shape[: x.ndim - in_axes], -1)


@jax.custom_vjp
def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x W, with ∂L/∂W = xᵀ ∂L/∂y as one product of what is there: x `[M, I]`, W `[I, O]` -> `[M, O]`.

    JAX's own rule gives the transpose of that, ∂L/∂yᵀ x. XLA on CPU then computes the gradient of y a second time, in
    transposed order, which took more than half of a training step.
    """
    return x @ kernel


def _product_forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(x, kernel), (x, kernel)


def _product_backward(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = kept
    return gradient @ kernel.T, jax.lax.dot_general(x, gradient, (((0,), (0,)), ((), ())))


_product.defvjp(_product_forward, _product_backward)


def product(x: jax.Array, kernel: jax.Array, in_axes: int = 1) -> jax.Array:
    """The trailing axes of x contracted with the leading ones of a kernel, in the dtype of x.

    Args:
      x: `[..., *in]`.
      kernel: `[*in, *out]`.
      in_axes: how many axes `*in` has.

    Returns:
      `[..., *out]`.
    """
    inputs = math.prod(kernel.shape[:in_axes])
    # Under shard_map x varies over devices and a kernel does not, and a custom gradient must have the type of its
    # input. A zero that varies gives both one type, and JAX sums the kernel's gradient over devices.
    matrix = kernel.astype(x.dtype).reshape(inputs, -1) + jnp.zeros_like(x, shape=())
    y = _product(x.reshape(-1, inputs), matrix)
    return y.reshape(*x.shape[: x.ndim - in_axes], *kernel.shape[in_axes:])


class RMSNorm(nn.Module):
    """x / √(mean x² + ε) · scale, in float32. 1910.07467."""

    eps: float

    @nn.compact
    def __call__(self, x):
        """x `[..., D]` -> the same."""
        scale = self.param("scale", _declared, (x.shape[-1],))
        return rms_norm(x, scale + jnp.zeros_like(x, shape=(), dtype=jnp.float32), self.eps)  # as in `product`


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / √(mean x² + ε) · scale, in float32: x `[..., D]`, scale `[D]` -> as x.

    The backward pass takes its sums as products with a vector. XLA on CPU needs nine times as long for sums.
    """
    return _rms_norm_forward(x, scale, eps)[0]


def _rms_norm_forward(x, scale, eps):
    exact = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(exact), axis=-1, keepdims=True) + eps)
    return (exact * inverse * scale).astype(x.dtype), (x, scale, inverse)


def _rms_norm_backward(eps, kept, gradient):
    """∂L/∂x = (s g − x̂ mean(s g x̂)) / rms and ∂L/∂s = Σ g x̂, with x̂ = x / rms and g = ∂L/∂y."""
    x, scale, inverse = kept
    normed, gradient = x.astype(jnp.float32) * inverse, gradient.astype(jnp.float32)
    rows = (gradient * normed).reshape(-1, x.shape[-1])
    mean = (rows @ scale).reshape(inverse.shape) / x.shape[-1]
    return ((gradient * scale - normed * mean) * inverse).astype(x.dtype), jnp.ones_like(rows[:, 0]) @ rows


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


def attend_groups(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    masks: tuple[jax.Array, ...],
    kind: AttentionKind,
) -> tuple[jax.Array, KeyValues]:
    """Attention of prompts over themselves, and of the completions behind them over prompt and completion.

    The prompt's keys and values are repeated for each of the G completions. That takes 2E numbers a key where the
    scores take Q·S, and one product over prompt and completion in a row is faster than two joined by a softmax.

    Args:
      queries: `[N, M, K, Q, E]`.
      keys, values: `[N, M, K, E]`.
      masks: of prompts, and of completions where there are any: see `Geometry`.
      kind: `ModelConfig.attention`.

    Returns:
      `[N, M, K, Q, E]`; keys and values of the prompts.
    """
    n, m, k, q, e = queries.shape
    width = masks[0].shape[-1]
    own_queries, own_keys, own_values = (jnp.split(x, [width], axis=1) for x in (queries, keys, values))
    prompt = KeyValues(keys_for_decoding(own_keys[0].swapaxes(1, 2)), own_values[0].swapaxes(1, 2))
    core: Callable[..., jax.Array] = partial(attend_fused, implementation=kind) if kind in ("xla", "cudnn") else attend
    shared = tuple(x[0].swapaxes(1, 2)[:, :, None] for x in (own_keys, own_values))  # [N, K, 1, P, E]
    attended = core(own_queries[0].transpose(0, 2, 3, 1, 4)[:, :, None], *shared, masks[0])
    attended = attended[:, :, 0].transpose(0, 3, 1, 2, 4)
    if len(masks) == 1:
        return attended, prompt
    size = masks[1].shape[-2]
    shape = n, (m - width) // size, size, k

    def in_a_row(prompt: jax.Array, own: jax.Array) -> jax.Array:
        own = own.reshape(*shape, e).transpose(0, 3, 1, 2, 4)
        return jnp.concatenate([jnp.broadcast_to(prompt, (*own.shape[:3], width, e)), own], axis=3)

    given = own_queries[1].reshape(*shape, q, e).transpose(0, 3, 1, 4, 2, 5)
    rest = core(given, *map(in_a_row, shared, (own_keys[1], own_values[1])), masks[1])
    rest = rest.transpose(0, 2, 4, 1, 3, 5).reshape(n, m - width, k, q, e)
    return jnp.concatenate([attended, rest], axis=1), prompt


# Queries are taken in blocks of this many at least, and in this many blocks at most: each block is compiled by itself.
_MIN_BLOCK = 128
_MAX_BLOCKS = 8


def attend(queries: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array) -> jax.Array:
    """softmax(q·k/√E) v, causally: of S queries and C keys, query s sees at most the keys up to C − S + s.

    Queries are taken in blocks. Keys that no query of a block may see are left out. A block of a long text is computed
    in parts of `_MIN_BLOCK` queries, one after the other, so that scores of no more queries exist at a time. Each query
    has its whole row of scores, so no softmax is put together from several.

    Args:
      queries: `[N, K, G, Q, S, E]`.
      keys, values: `[N, K, G, C, E]`.
      mask: bool `[N, 1, G or 1, 1, S, C]`, or with 1 for N; at least one true a query.

    Returns:
      As queries.
    """
    size, features = queries.shape[-2:]
    queries = queries * jnp.asarray(features**-0.5, queries.dtype)
    width = max(_MIN_BLOCK, -(-size // _MAX_BLOCKS))
    if width > 2 * _MIN_BLOCK:
        width = -(-width // _MIN_BLOCK) * _MIN_BLOCK
    attended = []
    for start in range(0, size, width):
        end = min(start + width, size)
        seen = keys.shape[-2] - size + end
        core = _attend_in_parts if end - start > 2 * _MIN_BLOCK else _attend_queries
        own = queries[..., start:end, :], mask[..., start:end, :seen]
        attended.append(core(*own, keys[..., :seen, :], values[..., :seen, :]))
    return jnp.concatenate(attended, axis=-2)


def _attend_in_parts(queries: jax.Array, mask: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """`_attend_queries`, `_MIN_BLOCK` queries after the other."""
    size = queries.shape[-2]
    even = size - size % _MIN_BLOCK

    def parts(x: jax.Array) -> jax.Array:
        x = x[..., :even, :].reshape(*x.shape[:-2], -1, _MIN_BLOCK, x.shape[-1])
        return jnp.moveaxis(x, -3, 0)

    # Masks of parts are made again in the backward pass, and not kept.
    policy = jax.checkpoint_policies.save_only_these_names("attended")

    @partial(jax.checkpoint, policy=policy, prevent_cse=False)
    def attend_part(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        return _attend_queries(part[0], part[1], keys, values)

    attended = jnp.moveaxis(jax.lax.map(attend_part, (parts(queries), parts(mask))), 0, -3)
    attended = attended.reshape(*queries.shape[:-2], even, -1)
    if even == size:
        return attended
    rest = _attend_queries(queries[..., even:, :], mask[..., even:, :], keys, values)
    return jnp.concatenate([attended, rest], axis=-2)


def _attend_queries(queries: jax.Array, mask: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """`_attend_block` of queries `[N, K, G, Q, S, E]`."""
    *leading, shared, _, features = queries.shape
    mask_rows = jnp.repeat(mask, shared, axis=3).reshape(*mask.shape[:3], -1, mask.shape[-1])
    attended = _attend_block(queries.reshape(*leading, -1, features), keys, values, mask_rows)
    return attended.reshape(queries.shape)


@jax.custom_vjp
def _attend_block(queries: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array) -> jax.Array:
    """softmax(q·k) v. The backward pass computes scores again. 2205.14135.

    Queries `[N, K, G, R, E]`, keys and values `[N, K, G, C, E]`, mask against `[N, K, G, R, C]` -> as queries.
    """
    return _attend_block_forward(queries, keys, values, mask)[0]


def _attend_block_forward(queries, keys, values, mask):
    # The mask is added and not selected by: XLA on CPU then makes one operation of product, softmax and product.
    scores = _einsum("nkgre,nkgce->nkgrc", queries, keys) + _bias(mask)
    maximum = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - maximum)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    # Maximum and total are kept, and not the logarithm of both: exp of that has 2.5 times the rounding error.
    attended = _einsum("nkgrc,nkgce->nkgre", (weights / total).astype(queries.dtype), values).astype(queries.dtype)
    attended, maximum, total = (checkpoint_name(x, "attended") for x in (attended, maximum, total))
    return attended, (queries, keys, values, mask, attended, maximum, total)


def _attend_block_backward(kept, gradient):
    """∂L/∂scores = w (∂L/∂attended · v − ∂L/∂attended · attended), with the softmax's weights w."""
    queries, keys, values, mask, attended, maximum, total = kept
    weights = jnp.exp(_einsum("nkgre,nkgce->nkgrc", queries, keys) + _bias(mask) - maximum) / total
    # A product with ones: see `rms_norm`.
    mean = (gradient * attended).astype(jnp.float32) @ jnp.ones((attended.shape[-1], 1), jnp.float32)
    d_scores = weights * (_einsum("nkgre,nkgce->nkgrc", gradient, values) - mean)
    weights, d_scores = weights.astype(queries.dtype), d_scores.astype(queries.dtype)
    d_queries = _einsum("nkgrc,nkgce->nkgre", d_scores, keys).astype(queries.dtype)
    d_keys = _einsum("nkgrc,nkgre->nkgce", d_scores, queries).astype(keys.dtype)
    d_values = _einsum("nkgrc,nkgre->nkgce", weights, gradient).astype(values.dtype)
    return d_queries, d_keys, d_values, None


_attend_block.defvjp(_attend_block_forward, _attend_block_backward)


def attend_fused(
    queries: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array, *, implementation: Literal["xla", "cudnn"]
) -> jax.Array:
    """`attend` through `jax.nn.dot_product_attention`.

    Args:
      queries, keys, values, mask: as in `attend`.
      implementation: of `jax.nn.dot_product_attention`.

    Returns:
      As `attend`.
    """
    n, k, g, q, s, e = queries.shape
    mask = jnp.broadcast_to(mask, (n, 1, g, 1, *mask.shape[-2:]))

    def even(x: jax.Array, axis: int) -> jax.Array:
        """cuDNN wants an even number of tokens. One more query is cut off again, and nobody sees one more key."""
        pad = [(0, 0)] * x.ndim
        pad[axis] = (0, x.shape[axis] % 2)
        return jnp.pad(x, pad)

    def rows(x: jax.Array) -> jax.Array:
        """`[N, K, G, C, E]` as `[N·G, C, K, E]`."""
        return even(x.transpose(0, 2, 3, 1, 4).reshape(n * g, -1, k, e), 1)

    attended = jax.nn.dot_product_attention(
        even(queries.transpose(0, 2, 4, 1, 3, 5).reshape(n * g, s, k * q, e), 1),
        rows(keys),
        rows(values),
        mask=even(even(mask.reshape(n * g, 1, s, -1), 2), 3),
        implementation=implementation,
    )
    attended = checkpoint_name(attended, "attended")
    return attended[:, :s].reshape(n, g, s, k, q, e).transpose(0, 3, 1, 4, 2, 5)


def _features_first() -> bool:
    """Whether features of keys come before tokens. On an H100 the product with such keys took 1.6 times as long."""
    return jax.default_backend() == "cpu"


def keys_for_decoding(keys: jax.Array) -> jax.Array:
    """Keys `[..., C, E]` as `KeyValues` has them."""
    return keys.swapaxes(-1, -2) if _features_first() else keys


def attend_past(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    masks: tuple[jax.Array, ...],
    prompt: KeyValues,
    cache: KeyValues,
    length: jax.Array,
) -> tuple[jax.Array, KeyValues]:
    """Attention of one token of each completion over the prompt and the cache, the token included.

    Two products with one softmax: decoding reads memory, and the prompt's keys and values are read once for a group.

    Args:
      queries: `[N, G, K, Q, E]`.
      keys, values: `[N, G, K, E]`, written to the cache.
      masks: over the prompt and over the cache.
      prompt: of the layer.
      cache: of the layer, or with `[N, K·G, ...]` in place of its first axis.
      length: int32 scalar, tokens in the cache.

    Returns:
      `[N, G, K, Q, E]`; the cache with the token.
    """
    n, g, k, q, e = queries.shape
    rows = cache.values.shape[:-2]
    keys, values = (x.swapaxes(1, 2).reshape(*rows, 1, e) for x in (keys, values))
    keys_axes, axis = ("ec", len(rows) + 1) if _features_first() else ("ce", len(rows))
    cache = KeyValues(
        jax.lax.dynamic_update_slice_in_dim(cache.keys, keys_for_decoding(keys), length, axis),
        jax.lax.dynamic_update_slice_in_dim(cache.values, values, length, len(rows)),
    )
    queries = (queries * jnp.asarray(e**-0.5, queries.dtype)).swapaxes(1, 2)  # [N, K, G, Q, E]
    scores = (
        _einsum(f"nkme,nk{keys_axes}->nkmc", queries.reshape(n, k, g * q, e), prompt.keys).reshape(n, k, g, q, -1),
        _einsum(f"...qe,...{keys_axes}->...qc", queries.reshape(*rows, q, e), cache.keys).reshape(n, k, g, q, -1),
    )
    biased = [x + _bias(mask)[..., 0, :] for x, mask in zip(scores, masks, strict=True)]
    width = masks[0].shape[-1]
    weights = jax.nn.softmax(jnp.concatenate(biased, axis=-1)).astype(queries.dtype)
    of_prompt, of_cache = jnp.split(weights, [width], axis=-1)
    attended = _einsum("nkmp,nkpe->nkme", of_prompt.reshape(n, k, g * q, width), prompt.values).reshape(queries.shape)
    attended += _einsum("...qc,...ce->...qe", of_cache.reshape(*rows, q, of_cache.shape[-1]), cache.values).reshape(
        queries.shape
    )
    return attended.astype(queries.dtype).swapaxes(1, 2), cache


def widen(layers: tuple[KeyValues, ...], slots: int) -> tuple[KeyValues, ...]:
    """A cache of completions with room for `slots` tokens each."""

    def pad(x: jax.Array, axis: int) -> jax.Array:
        return jnp.pad(x, [(0, slots - size if i == axis else 0) for i, size in enumerate(x.shape)])

    last = layers[0].keys.ndim - 1
    axis = last if _features_first() else last - 1
    return tuple(KeyValues(pad(layer.keys, axis), pad(layer.values, last - 1)) for layer in layers)


def select_completions(
    prefix: Prefix, layers: tuple[KeyValues, ...], chosen: jax.Array, num_heads: int
) -> tuple[Prefix, tuple[KeyValues, ...]]:
    """What decoding keeps of some of N·G completions, as that of R prompts with one completion each.

    Args:
      prefix: the N prompts.
      layers: the cache, of all completions.
      chosen: int `[R]`, places of completions among all N·G in a row.
      num_heads: K.

    Returns:
      A copy of its prompt for each completion; their cache.
    """
    num_prompts = prefix.mask.shape[0]
    group_size = layers[0].keys.shape[0] // (num_prompts * num_heads)
    prompt, member = jnp.divmod(chosen, group_size)

    def own(x: jax.Array) -> jax.Array:
        x = x.reshape(num_prompts, num_heads, group_size, *x.shape[1:])[prompt, :, member]  # [R, K, …]
        return x.reshape(-1, *x.shape[2:])

    return jax.tree.map(lambda x: x[prompt], prefix), jax.tree.map(own, layers)


def _bias(mask: jax.Array) -> jax.Array:
    """0 where the mask is true, −∞ elsewhere."""
    return jnp.where(mask, jnp.float32(0), -jnp.inf)


def geometry_of_texts(config: ModelConfig, positions: jax.Array, texts: jax.Array, *, window: int | None) -> Geometry:
    """Of texts, each token of which sees those of its own text up to itself.

    Args:
      config: for the rotations.
      positions: int `[N, S]`, from 0 at the first token of a text.
      texts: int or bool `[N, S]`: several texts in a row, counted from 1, and 0 for padding.
      window: tokens that a token attends to, itself included; None for all.

    Returns:
      `Geometry` with one mask.
    """
    width, texts = positions.shape[-1], texts.astype(jnp.int32)
    queries, keys = texts[:, :, None], texts[:, None, :]
    causal = jnp.tril(jnp.ones((width, width), bool))
    near = _near(positions[:, :, None], positions[:, None, :], window)
    seen = (queries == keys) & (keys > 0) & causal & near
    # Padding attends to itself, so that no row of scores is all −∞. Nobody reads what it computes.
    seen = seen | jnp.eye(width, dtype=bool)
    return Geometry(rotary_angles(positions, config), (seen[:, None, None, None],))


def geometry_of_groups(
    config: ModelConfig, prompt_mask: jax.Array, group_size: int, size: int, *, window: int | None
) -> Geometry:
    """Of prompts, each with completions behind it.

    Args:
      config: for the rotations.
      prompt_mask: bool `[N, P]`.
      group_size: G.
      size: S, tokens of a completion.
      window: tokens that a token attends to, itself included; None for all.

    Returns:
      `Geometry` with two masks.
    """
    of_prompt = prompt_positions(prompt_mask)
    own = jnp.sum(prompt_mask, axis=-1, keepdims=True, dtype=jnp.int32) + jnp.arange(size)  # [N, S]
    in_a_row = jnp.concatenate([of_prompt, own], axis=-1)
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (*own.shape, size))
    of_prompt_seen = jnp.broadcast_to(prompt_mask[:, None], (*own.shape, prompt_mask.shape[-1]))
    seen = jnp.concatenate([of_prompt_seen, causal], axis=-1) & _near(own[:, :, None], in_a_row[:, None, :], window)
    alone = geometry_of_texts(config, of_prompt, prompt_mask, window=window)
    positions = jnp.concatenate([of_prompt, jnp.tile(own, (1, group_size))], axis=-1)
    return Geometry(rotary_angles(positions, config), (*alone.masks, seen[:, None, None, None]))


def geometry_of_packed_groups(
    config: ModelConfig, prompt_mask: jax.Array, completions: jax.Array, *, window: int | None
) -> Geometry:
    """Of prompts, each with several of its completions behind it in one row.

    Args:
      config: for the rotations.
      prompt_mask: bool `[N, P]`.
      completions: int `[N, S]`: numbered from 1, each in one piece, and 0 for padding.
      window: tokens that a token attends to, itself included; None for all.

    Returns:
      `Geometry` with two masks.
    """
    of_prompt = prompt_positions(prompt_mask)
    own = jnp.sum(prompt_mask, axis=-1, keepdims=True, dtype=jnp.int32) + positions_in_texts(completions)
    positions, size = jnp.concatenate([of_prompt, own], axis=-1), own.shape[-1]
    # Padding sees the prompt and itself, as if it were a completion. Nobody reads what it computes.
    same = (completions[:, :, None] == completions[:, None, :]) & jnp.tril(jnp.ones((size, size), bool))
    of_prompt_seen = jnp.broadcast_to(prompt_mask[:, None], (*own.shape, prompt_mask.shape[-1]))
    seen = jnp.concatenate([of_prompt_seen, same], axis=-1) & _near(own[:, :, None], positions[:, None, :], window)
    alone = geometry_of_texts(config, of_prompt, prompt_mask, window=window)
    return Geometry(rotary_angles(positions, config), (*alone.masks, seen[:, None, None, None]))


def positions_in_texts(texts: jax.Array) -> jax.Array:
    """Positions from 0 at the first token of each text: int `[N, S]`, texts numbered from 1, and 0 for padding."""
    place = jnp.arange(texts.shape[-1])
    begins = jnp.where(texts != jnp.pad(texts, [(0, 0), (1, 0)])[:, :-1], place, 0)
    return place - jax.lax.cummax(begins, axis=1)


def geometry_of_step(
    config: ModelConfig, prefix: Prefix, group_size: int, slots: int, step: jax.Array, *, window: int | None
) -> Geometry:
    """Of token number `step` of all completions.

    Args:
      config: for the rotations.
      prefix: the prompts.
      group_size: G.
      slots: C, tokens that the cache has room for.
      step: int32 scalar.
      window: tokens that a token attends to, itself included; None for all.

    Returns:
      `Geometry` with two masks.
    """
    position = prefix.length[:, None] + step  # [N, 1]
    of_prompt = prefix.mask & _near(position, prompt_positions(prefix.mask), window)
    own = jnp.arange(slots)[None] + prefix.length[:, None]
    of_cache = (own <= position) & _near(position, own, window)
    angles = rotary_angles(jnp.broadcast_to(position, (position.shape[0], group_size)), config)
    return Geometry(angles, (of_prompt[:, None, None, None, None], of_cache[:, None, None, None, None]))


def prompt_positions(mask: jax.Array) -> jax.Array:
    """int32 `[N, P]`, from 0 at the first token of each prompt; 0 on the padding before it."""
    return jnp.maximum(jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1, 0)


def _near(queries: jax.Array, keys: jax.Array, window: int | None) -> Any:
    """Whether a key is within the window of a query, from positions that broadcast against each other."""
    return True if window is None else queries - keys < window


def rotary_angles(positions: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """cos and sin of position · θ^(−2i/E), i = 0 … E/2 − 1. RoPE (2104.09864).

    With Llama 3's scaling, waves longer than original/low are stretched by `factor`, those shorter than
    original/high stay, and frequencies in between are mixed linearly in original/wavelength (2407.21783).

    Args:
      positions: int `[N, M]`.
      config: `head_dim`, `rope_theta`, `rope_scaling`.

    Returns:
      (cos, cos) and (−sin, sin), float32 `[N, M, 1, E]`.
    """
    frequencies = config.rope_theta ** (-jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim)
    if config.rope_scaling:
        factor, low, high, original = config.rope_scaling
        waves = original * frequencies / (2 * jnp.pi)  # that fit into the original context
        kept = jnp.clip((waves - low) / (high - low), 0.0, 1.0)
        frequencies = frequencies * (kept + (1 - kept) / factor)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns feature i against feature i + E/2, as Hugging Face checkpoints pair them.

    Args:
      x: `[N, M, heads, E]`.
      angles: from `rotary_angles`.

    Returns:
      As x.
    """
    cos, sin = angles
    exact = x.astype(jnp.float32)
    first, second = jnp.split(exact, 2, axis=-1)
    return (exact * cos + jnp.concatenate([second, first], axis=-1) * sin).astype(x.dtype)


def _einsum(subscripts: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, *operands, preferred_element_type=jnp.float32)


_OF_ONE_INPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # those of attention, and those of the MLP


def decoding_layout(params: Params, config: ModelConfig) -> Params:
    """Parameters of the scanned decoder as those of the one with separate layers.

    Kernels become matrices [out, in], named "transposed", in the dtype of the computation. With the few rows of a
    decode step XLA on CPU multiplies by them 1.5 times as fast as by [in, out]. Those of linear maps that have the same
    input become one, named "joined".

    Args:
      params: of the collection "params", or "lora".
      config: the decoder's shape.

    Returns:
      The tree with `layer_0`, `layer_1`, … in place of `layers`.
    """

    def transposed(name: str, kernel: jax.Array) -> jax.Array:
        inputs = math.prod(kernel.shape[: 2 if name == "o_proj" else 1])
        return kernel.astype(config.dtype).reshape(inputs, -1).T

    def part(tree: Params) -> Params:
        """Attention or MLP."""
        matrices = {name: transposed(name, x["kernel"]) for name, x in tree.items() if "kernel" in x}
        rest = {
            name: {key: x[key] for key in x if key != "kernel"} if name in matrices else x for name, x in tree.items()
        }
        of_one_input = () if sharding.mesh_sizes() else _OF_ONE_INPUT  # a mesh cuts each by itself
        joined = [matrices.pop(name) for name in of_one_input if name in matrices]
        for name, matrix in matrices.items():
            rest[name]["transposed"] = matrix
        return rest | ({"joined": jnp.concatenate(joined)} if joined else {})

    def block(index: int) -> Params:
        layer = jax.tree.map(lambda x: x[index], params["layers"])
        return {name: tree if "scale" in tree else part(tree) for name, tree in layer.items()}

    rest = {name: value for name, value in params.items() if name != "layers"}
    return rest | {f"layer_{i}": block(i) for i in range(config.num_hidden_layers)}
