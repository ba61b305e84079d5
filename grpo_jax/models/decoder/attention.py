"""Attention with rotary positions: over whole rows in training, and for the next tokens of each completion in decoding.

Letters: see `transformer`. Query heads that share a key-value head have their own axis Q, so that keys and values are
not repeated for them.
"""

import math
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from grpo_jax.errors import UsageError
from grpo_jax.functional.numerics import in_float32, softcapped
from grpo_jax.functional.products import einsum, sum_over_queries, traits_of_backend
from grpo_jax.models.config import AttentionKind, RopeScaling, Rotation
from grpo_jax.models.decoder import cache as caches
from grpo_jax.models.decoder.cache import KeyValues
from grpo_jax.models.params.sharding import mesh_sizes

Angles = tuple[jax.Array, jax.Array]  # from `rotary_angles`


def rotary_angles(positions: jax.Array, rotation: Rotation | None, features: int) -> Angles:
    """cos and sin of position · θ^(−2i/E), i = 0 … E/2 − 1. RoPE (2104.09864).

    A scaling changes the frequencies, and may increase both cos and sin.

    Args:
      positions: The positions of the tokens, int `[N, M]`.
      rotation: The rotation of a layer, θ and scaling; None: no rotation.
      features: The number of features of a head, E, unless the rotation has other heads.

    Returns:
      (cos, cos) and (−sin, sin), float32 `[N, M, 1, E]`.
    """
    frequencies, factor = _frequencies(rotation, features)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if factor != 1:
        cos, sin = factor * cos, factor * sin
    return jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)


def _frequencies(rotation: Rotation | None, features: int) -> tuple[jax.Array, float]:
    """Returns the frequencies `[E/2]`, and a factor for queries and keys."""
    if rotation is None:
        return jnp.zeros(features // 2), 1.0
    turning = 1.0
    if rotation.heads:
        features, turning = rotation.heads.head_dim, rotation.heads.turning
    frequencies = rotation.theta ** (-jnp.arange(0, features, 2, dtype=jnp.float32) / features)
    if turning < 1:
        frequencies = jnp.where(jnp.arange(features // 2) < int(turning * features // 2), frequencies, 0)
    scaling = rotation.scaling
    if scaling is None or scaling.rope_type == "dynamic":  # `ModelConfig.check_width` refuses texts that it changes
        return frequencies, 1.0
    if scaling.rope_type == "llama3":
        return _llama3(frequencies, scaling), 1.0
    if scaling.rope_type == "yarn":
        return _yarn(frequencies, scaling, rotation.theta, features), _attention_factor(scaling)
    if scaling.rope_type == "longrope":
        factors = scaling.long_factor if rotation.is_long else scaling.short_factor
        return frequencies / jnp.array(factors, jnp.float32), _attention_factor(scaling)
    return frequencies / scaling.factor, 1.0


def _llama3(frequencies: jax.Array, scaling: RopeScaling) -> jax.Array:
    """Stretches waves longer than original/low by `factor`, and keeps waves shorter than original/high.

    In between, both frequencies are mixed linearly in original/wavelength (2407.21783).
    """
    _, factor, original, low, high, *_ = scaling
    assert low
    assert high
    waves = original * frequencies / (2 * jnp.pi)  # the number of waves in the original context
    unscaled = jnp.clip((waves - low) / (high - low), 0.0, 1.0)
    return frequencies * (unscaled + (1 - unscaled) / factor)


def _yarn(frequencies: jax.Array, scaling: RopeScaling, theta: float, features: int) -> jax.Array:
    """Stretches waves with fewer than β_slow turns in the original context by `factor`, and keeps waves with more than
    β_fast.

    In between, both frequencies are mixed linearly in their index, 0 to E/2 − 1 (2309.00071).
    """

    original = scaling.original_max_position_embeddings

    def place(rotations: float) -> float:
        """Returns the index of the frequency with this many turns, as a fraction."""
        return features * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, features - 1)
    last = last + 0.001 if first == last else last  # avoids a division by 0 in the same way as transformers
    stretched = jnp.clip((jnp.arange(features // 2, dtype=jnp.float32) - first) / (last - first), 0.0, 1.0)
    return frequencies * (stretched / scaling.factor + 1 - stretched)


def _attention_factor(scaling: RopeScaling) -> float:
    """Returns the factor of queries and keys: see `RopeScaling.attention_factor`."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    growth = math.log(scaling.factor)
    if scaling.rope_type == "longrope":
        return math.sqrt(1 + growth / math.log(scaling.original_max_position_embeddings))
    above, below = scaling.mscale or 0.0, scaling.mscale_all_dim or 0.0
    above, below = (above, below) if above and below else (1.0, 0.0)
    return (1 + 0.1 * growth * above) / (1 + 0.1 * growth * below)


def rotate(x: jax.Array, angles: Angles) -> jax.Array:
    """Rotates the pairs of features (i, i + E/2), which is how Hugging Face checkpoints pair them.

    Args:
      x: Queries or keys, `[N, M, heads, E]`.
      angles: The angles from `rotary_angles`.

    Returns:
      The rotated array, with the shape and dtype of x.
    """
    cos, sin = angles
    turned, rest = jnp.split(x, [cos.shape[-1]], axis=-1)
    exact = turned.astype(jnp.float32)
    first, second = jnp.split(exact, 2, axis=-1)
    turned = (exact * cos + jnp.concatenate([second, first], axis=-1) * sin).astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


# ---- attention


class Softmax(NamedTuple):
    """The scale and the cap of the products q·k, and the sinks beside them."""

    scale: float | None = None  # the factor of q·k; None: 1/√E
    softcap: float | None = None  # c in c·tanh(s/c), applied before the mask and the softmax; None: no cap
    # [H]: a further product of each head, which takes a part of the softmax and adds nothing to the sum. None: none
    sinks: jax.Array | None = None

    def scaled(self, queries: jax.Array) -> jax.Array:
        """Multiplies queries `[..., E]` by the scale."""
        scale = queries.shape[-1] ** -0.5 if self.scale is None else self.scale
        return in_float32(jnp.multiply, queries, scale)


def attend_rows(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    masks: tuple[jax.Array, ...],
    reaches: tuple[int | None, ...],
    kind: AttentionKind,
    softmax: Softmax = Softmax(),  # noqa: B008, it is a tuple
) -> jax.Array:
    """Computes attention over `geometry.Rows`: of prompts over themselves, and of segments over their prompt and
    themselves.

    The prompt's keys and values are repeated for each of the G segments. That takes 2E numbers per key, and the
    products take Q·S. One product over prompt and segment is faster than two products that a softmax joins.

    Args:
      queries: The queries, `[N, M, K, Q, E]`.
      keys, values: The keys and values, `[N, M, K, E]`.
      masks: The mask of the prompts and the mask of the segments: see `geometry.Geometry`. Either may be empty.
      reaches: The reach of each mask, as in `attend`. The fused kinds of attention compute masked products too.
      kind: The kind of attention, `ModelConfig.attention`.
      softmax: The scale and the cap of the products.

    Returns:
      The attended values `[N, M, K, Q, E]`.
    """
    n, m, k, q, e = queries.shape
    width, size = masks[0].shape[-1], masks[1].shape[-2]
    prompt_queries, segment_queries = jnp.split(queries, [width], axis=1)
    in_prompt, in_segments = zip(*(jnp.split(x, [width], axis=1) for x in (keys, values)), strict=True)
    shared = [x.swapaxes(1, 2)[:, :, None] for x in in_prompt]  # [N, K, 1, P, E]
    attended = []

    def core(*arrays: jax.Array, prefix: int, reach: int | None) -> jax.Array:
        if kind in ("xla", "cudnn", "tokamax"):
            return attend_fused(*arrays, implementation=kind, softmax=softmax)
        return attend(*arrays, prefix=prefix, reach=reach, softmax=softmax)

    def behind_prompt(prompt: jax.Array, suffix: jax.Array) -> jax.Array:
        suffix = suffix.reshape(n, -1, size, k, e).transpose(0, 3, 1, 2, 4)
        return jnp.concatenate([jnp.broadcast_to(prompt, (*suffix.shape[:3], width, e)), suffix], axis=3)

    if width:
        prompt_queries = prompt_queries.transpose(0, 2, 3, 1, 4)[:, :, None]
        states = core(prompt_queries, *shared, masks[0], prefix=0, reach=reaches[0])
        attended.append(states[:, :, 0].transpose(0, 3, 1, 2, 4))
    if size:
        segment_queries = segment_queries.reshape(n, -1, size, k, q, e).transpose(0, 3, 1, 4, 2, 5)
        states = core(
            segment_queries, *map(behind_prompt, shared, in_segments), masks[1], prefix=width, reach=reaches[1]
        )
        attended.append(states.transpose(0, 2, 4, 1, 3, 5).reshape(n, m - width, k, q, e))
    return jnp.concatenate(attended, axis=1)


# The fewest queries in a block, and the most blocks, since each block is compiled separately.
_MIN_BLOCK = 128
_MAX_BLOCKS = 8


def num_blocks(size: int) -> int:
    """Counts the blocks in which `attend` computes so many queries."""
    return -(-size // _block_size(size))


def _block_size(size: int) -> int:
    """Returns the most queries of a block."""
    width = max(_MIN_BLOCK, -(-size // _MAX_BLOCKS))
    return -(-width // _MIN_BLOCK) * _MIN_BLOCK if width > 2 * _MIN_BLOCK else width


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    *,
    prefix: int = 0,
    reach: int | None = None,
    softmax: Softmax = Softmax(),  # noqa: B008, it is a tuple
) -> jax.Array:
    """softmax(q·k/√E) v, causally: with S queries and C keys, query s sees at most the keys up to C − S + s.

    Queries are computed in blocks, without the keys that no query of the block can see. A block of a long text is
    computed in chunks of `_MIN_BLOCK` queries, one after the other, so that only their products exist at a time. Each
    query has its whole row of products, so no softmax is assembled from several.

    Args:
      queries: The queries, `[N, K, G, Q, S, E]`.
      keys, values: The keys and values, `[N, K, G, C, E]`.
      mask: True where a query may see a key, bool `[N or 1, 1, G or 1, 1, S, C]`; at least one true per query.
      prefix: The number of keys at the beginning that every query may see.
      reach: The largest number of keys after the prefix, counted back from its own, that the mask lets a query see;
        None: no limit.
      softmax: The scale and the cap of the products.

    Returns:
      The attended values, with the shape of the queries.
    """
    size, before = queries.shape[-2], keys.shape[-2] - queries.shape[-2]
    queries = softmax.scaled(queries)
    width = _block_size(size)
    attended = []
    for start in range(0, size, width):
        end = min(start + width, size)
        first = prefix if reach is None else max(prefix, before + start - reach + 1)
        core = _attend_in_chunks if end - start > 2 * _MIN_BLOCK else _attend_queries
        seen = partial(_without_middle, begin=prefix, end=first, size=before + end)
        block_inputs = queries[..., start:end, :], seen(mask[..., start:end, :], axis=-1), seen(keys), seen(values)
        attended.append(core(*block_inputs, softmax))
    return jnp.concatenate(attended, axis=-2)


def _without_middle(x: jax.Array, *, begin: int, end: int, size: int, axis: int = -2) -> jax.Array:
    """Returns the first `size` elements along an axis, without the elements from `begin` to `end`."""
    ranges = [(0, size)] if begin == end else [(0, begin), (end, size)]
    return jnp.concatenate([jax.lax.slice_in_dim(x, *each, axis=axis) for each in ranges if each[1]], axis=axis)


def _attend_in_chunks(
    queries: jax.Array, mask: jax.Array, keys: jax.Array, values: jax.Array, softmax: Softmax
) -> jax.Array:
    """Computes `_attend_queries` for `_MIN_BLOCK` queries at a time, one chunk after the other."""
    size = queries.shape[-2]
    even = size - size % _MIN_BLOCK

    def chunks(x: jax.Array) -> jax.Array:
        x = x[..., :even, :].reshape(*x.shape[:-2], -1, _MIN_BLOCK, x.shape[-1])
        return jnp.moveaxis(x, -3, 0)

    # The backward pass makes the masks of the chunks again, so that they are not stored.
    policy = jax.checkpoint_policies.save_only_these_names("attended")

    @partial(jax.checkpoint, policy=policy, prevent_cse=False)
    def attend_chunk(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
        return _attend_queries(*chunk, keys, values, softmax)

    attended = jnp.moveaxis(jax.lax.map(attend_chunk, (chunks(queries), chunks(mask))), 0, -3)
    attended = attended.reshape(*queries.shape[:-2], even, -1)
    if even == size:
        return attended
    rest = _attend_queries(queries[..., even:, :], mask[..., even:, :], keys, values, softmax)
    return jnp.concatenate([attended, rest], axis=-2)


def _attend_queries(
    queries: jax.Array, mask: jax.Array, keys: jax.Array, values: jax.Array, softmax: Softmax
) -> jax.Array:
    """Computes `_attend_block` for queries `[N, K, G, Q, S, E]`."""
    *leading, shared, size, features = queries.shape
    mask_rows = jnp.repeat(mask, shared, axis=3).reshape(*mask.shape[:3], -1, mask.shape[-1])
    sinks = softmax.sinks
    if sinks is not None:
        sinks = jnp.repeat(sinks.astype(jnp.float32).reshape(leading[1], shared), size, axis=1)
        sinks = sinks[None, :, None, :, None]
    attended = _attend_block(queries.reshape(*leading, -1, features), keys, values, mask_rows, sinks, softmax.softcap)
    return attended.reshape(queries.shape)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend_block(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    sinks: jax.Array | None,
    softcap: float | None,
) -> jax.Array:
    """softmax(q·k) v, with capped products and sinks. The backward pass computes the products again. 2205.14135.

    Queries are `[N, K, G, R, E]`, keys and values `[N, K, G, C, E]`. The mask broadcasts against `[N, K, G, R, C]`.
    Sinks are `[1, K, 1, R, 1]`. The result has the shape of the queries.
    """
    return _attend_block_forward(queries, keys, values, mask, sinks, softcap)[0]


def _attend_block_forward(queries, keys, values, mask, sinks, softcap):
    # With an added mask, instead of a select, XLA on CPU fuses product, softmax and product into one operation.
    products = softcapped(einsum("nkgre,nkgce->nkgrc", queries, keys), softcap) + _bias(mask)
    maximum = jnp.max(products, axis=-1, keepdims=True)
    maximum = maximum if sinks is None else jnp.maximum(maximum, sinks)
    weights = jnp.exp(products - maximum)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    total = total if sinks is None else total + jnp.exp(sinks - maximum)
    # Maximum and total are saved instead of one logarithm of both, whose exp has 2.5 times the rounding error.
    attended = einsum("nkgrc,nkgce->nkgre", (weights / total).astype(queries.dtype), values, dtype=queries.dtype)
    attended, maximum, total = (checkpoint_name(x, "attended") for x in (attended, maximum, total))
    return attended, (queries, keys, values, mask, sinks, attended, maximum, total)


def _attend_block_backward(softcap, residuals, gradient):
    """∂L/∂products = w (∂L/∂attended · v − ∂L/∂attended · attended), where w are the weights of the softmax.

    A cap s = c·tanh(x/c) has ∂s/∂x = 1 − (s/c)². A sink has v = 0.
    """
    traits = traits_of_backend()
    if traits.backend == "gpu":  # XLA would keep the products of the forward pass, because layers are unrolled
        residuals = jax.lax.optimization_barrier(residuals)
    queries, keys, values, mask, sinks, attended, maximum, total = residuals
    products = softcapped(einsum("nkgre,nkgce->nkgrc", queries, keys), softcap)
    weights = jnp.exp(products + _bias(mask) - maximum) / total
    mean = (gradient * attended).astype(jnp.float32)
    if traits.reorders_sums:
        mean = mean @ jnp.ones((attended.shape[-1], 1), jnp.float32)
    else:
        mean = jnp.sum(mean, axis=-1, keepdims=True)
    d_products = weights * (einsum("nkgre,nkgce->nkgrc", gradient, values) - mean)
    if softcap is not None:
        d_products = d_products * (1 - jnp.square(products / softcap))
    weights, d_products = weights.astype(queries.dtype), d_products.astype(queries.dtype)
    d_queries = einsum("nkgrc,nkgce->nkgre", d_products, keys, dtype=queries.dtype)
    d_keys = sum_over_queries(d_products, queries, keys.dtype)
    d_values = sum_over_queries(weights, gradient, values.dtype)
    d_sinks = None
    if sinks is not None:
        d_sinks = jnp.sum(-jnp.exp(sinks - maximum) / total * mean, axis=(0, 2), keepdims=True)
    return d_queries, d_keys, d_values, None, d_sinks


_attend_block.defvjp(_attend_block_forward, _attend_block_backward)


def attend_fused(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    *,
    implementation: Literal["xla", "cudnn", "tokamax"],
    softmax: Softmax = Softmax(),  # noqa: B008, it is a tuple
) -> jax.Array:
    """Computes `attend` with a library's function. `ModelConfig` refuses products that the function cannot compute.

    Args:
      queries, keys, values, mask, softmax: See `attend`.
      implementation: An implementation of `jax.nn.dot_product_attention`, or "tokamax", which has Pallas kernels for
        TPUs and GPUs, and can cap products.

    Returns:
      The attended values, with the shape of the queries.

    Raises:
      UsageError: tokamax would compute on a mesh, whose devices its kernels do not share.
    """
    n, k, g, q, s, e = queries.shape
    if implementation == "tokamax":
        if mesh_sizes():
            raise UsageError('attention "tokamax" does not run on a mesh: set it to "auto", or parallel to "pmap"')
        import tokamax

        core, multiple = partial(tokamax.dot_product_attention, logits_soft_cap=softmax.softcap), 128
    else:
        core, multiple = partial(jax.nn.dot_product_attention, implementation=implementation), 2
    mask = jnp.broadcast_to(mask, (n, 1, g, 1, *mask.shape[-2:]))

    def padded(x: jax.Array, axis: int) -> jax.Array:
        """Pads tokens: cuDNN takes even numbers, and tokamax on a TPU blocks of 128. Further queries are cut off again,
        and further keys are masked."""
        pad = [(0, 0)] * x.ndim
        pad[axis] = (0, -x.shape[axis] % multiple)
        return jnp.pad(x, pad)

    def rows(x: jax.Array) -> jax.Array:
        """Rearranges `[N, K, G, C, E]` to `[N·G, C, K, E]`, with a padded C."""
        return padded(x.transpose(0, 2, 3, 1, 4).reshape(n * g, -1, k, e), 1)

    attended = core(
        padded(queries.transpose(0, 2, 4, 1, 3, 5).reshape(n * g, s, k * q, e), 1),
        rows(keys),
        rows(values),
        mask=padded(padded(mask.reshape(n * g, 1, s, -1), 2), 3),
        scale=softmax.scale,
    )
    attended = checkpoint_name(attended, "attended")
    return attended[:, :s].reshape(n, g, s, k, q, e).transpose(0, 3, 1, 4, 2, 5)


def fuses_decoding(kind: AttentionKind) -> bool:
    """Returns whether decoding computes attention by a library's function. cuDNN's reads only filled slots.

    It needs keys with tokens before features. A mesh spreads prompts and heads along axes of their own, which no row of
    the call has.
    """
    return kind in ("xla", "cudnn") and not traits_of_backend().features_first and mesh_sizes() is None


def attend_past(
    queries: jax.Array,
    written: KeyValues | None,
    masks: tuple[jax.Array, ...],
    prompt: KeyValues,
    cache: KeyValues,
    places: jax.Array,
    softmax: Softmax = Softmax(),  # noqa: B008, it is a tuple
    *,
    implementation: AttentionKind | None = None,
) -> tuple[jax.Array, KeyValues]:
    """Computes attention of the next tokens of each completion over the prompt, the cache and those tokens.

    softmax(q·k/√E) v. Decoding is bound by reading memory, so the prompt's keys and values are read once for a group.
    The products of prompt and cache stay two arrays. Their softmax has one maximum and one total.

    Args:
      queries: The queries of W tokens per completion, `[N, G·W, K, Q, E]`.
      written: The keys and values of these tokens, `[N, G·W, K, E]`, which are written to the cache; None: the cache
        has them already.
      masks: The mask over the prompt and the mask over the cache.
      prompt: The keys and values of the prompts in this layer.
      cache: The keys and values of the completions in this layer. On a mesh the first axis is two, `[N, K·G, ...]`.
      places: The slots of the cache that the tokens are written to, int32: a scalar if W is 1, or `[N, G, W]`. A token
        whose slot the cache does not have is dropped.
      softmax: The scale and the cap of the products.
      implementation: The library that computes attention. It needs W = 1, and tokens that see all earlier tokens of
        their texts, in slots 0 to `places`. None: plain products, which read all slots.

    Returns:
      The attended values, with the shape of the queries, and the cache with the tokens.
    """
    n, m, k, q, e = queries.shape
    w = masks[1].shape[-2]
    g = m // w

    def by_heads(x: jax.Array) -> jax.Array:
        """Rearranges `[N, G·W, K, ..., E]` to `[N, K, G, ..., W, E]`."""
        return jnp.moveaxis(x.reshape(n, g, w, *x.shape[2:]), (3, 2), (1, -2))

    if written is not None:
        keys, values = map(by_heads, written)
        cache = caches.write_tokens(cache, keys, values, places)
    if implementation is not None:
        attended = _attend_all(
            by_heads(queries)[..., 0, :], masks[0], prompt, cache, places + 1, implementation, softmax
        )
        return attended.transpose(0, 2, 1, 3, 4), cache
    queries = by_heads(softmax.scaled(queries)).reshape(n, k, g, q * w, e)
    if w > 1:
        masks = tuple(jnp.repeat(mask, q, axis=3).reshape(*mask.shape[:3], 1, q * w, -1) for mask in masks)
    bias, own_bias = (_bias(mask)[:, :, :, 0] for mask in masks)
    prompt_products = softcapped(caches.match_prompt(queries, prompt), softmax.softcap) + bias
    suffix = softcapped(caches.match_cache(queries, cache), softmax.softcap) + caches.split_blocks(own_bias, cache)

    maximum = jnp.maximum(jnp.max(prompt_products, axis=-1), jnp.max(suffix, axis=(-3, -1)))
    if softmax.sinks is not None:
        sinks = jnp.repeat(softmax.sinks.astype(jnp.float32).reshape(k, q), w, axis=1)[:, None]
        maximum = jnp.maximum(maximum, sinks)
    prompt_products, suffix = (
        jnp.exp(prompt_products - maximum[..., None]),
        jnp.exp(suffix - maximum[..., None, :, None]),
    )
    total = jnp.sum(prompt_products, axis=-1) + jnp.sum(suffix, axis=(-3, -1))
    total = total if softmax.sinks is None else total + jnp.exp(sinks - maximum)
    prompt_products, suffix = (x.astype(queries.dtype) for x in (prompt_products, suffix))
    attended = (caches.sum_prompt(prompt_products, prompt) + caches.sum_cache(suffix, cache)) / total[..., None]
    attended = attended.astype(queries.dtype).reshape(n, k, g, q, w, e).transpose(0, 2, 4, 1, 3, 5)
    return attended.reshape(n, m, k, q, e), cache


def _attend_all(
    queries: jax.Array,
    mask: jax.Array,
    prompt: KeyValues,
    cache: KeyValues,
    length: jax.Array,
    implementation: AttentionKind,
    softmax: Softmax,
) -> jax.Array:
    """Computes `attend_past` of one token by two calls of a library's function, over the prompt and over the cache.

    (Z₁ a₁ + Z₂ a₂) / (Z₁ + Z₂), where each call gives the values a and the total log Z of its softmax. cuDNN's call
    over the cache reads only slots that are filled. Each head is a row of its own, so no key is moved in memory. JAX
    has no gradient of cuDNN's log Z.

    Args:
      queries: The queries, `[N, K, G, Q, E]`.
      mask: The mask over the prompt, `[N, 1, 1, 1, 1, P]`.
      prompt, cache: The keys and values with heads before tokens and tokens before features: see `KeyValues`.
      length: The number of filled slots of the cache, int32 scalar.
      implementation: The library, which computes one softmax over keys.
      softmax: The scale of the products.

    Returns:
      The attended values, with the shape of the queries.
    """
    n, k, g, q, e = queries.shape
    odd_queries, odd_keys = g % 2, mask.shape[-1] % 2  # cuDNN takes even numbers with a mask
    scale = e**-0.5 if softmax.scale is None else softmax.scale

    def attend_rows(queries: jax.Array, past: KeyValues, **limits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns values and log Z, float32 `[N, K, G, Q, E or 1]`, for queries `[rows, tokens, Q, E]`."""
        rows = (x.reshape(-1, x.shape[-2], 1, e) for x in past)
        attended = _FUSED[implementation](queries, *rows, scale=scale, **limits)
        values, log_total = (x.astype(jnp.float32).reshape(n, k, -1, q, x.shape[-1]) for x in attended)
        return values[:, :, :g], log_total[:, :, :g]

    def padded(x: jax.Array, axis: int, count: int) -> jax.Array:
        return jnp.pad(x, [(0, count if i == axis else 0) for i in range(x.ndim)]) if count else x

    in_prompt = jnp.broadcast_to(mask[:, :, 0, 0], (n, k, g, mask.shape[-1])).reshape(n * k, 1, g, -1)
    values, log_total = attend_rows(
        padded(queries.reshape(n * k, g, q, e), 1, odd_queries),
        KeyValues(*(padded(x, 2, odd_keys) for x in prompt)),
        mask=padded(padded(in_prompt, 2, odd_queries), 3, odd_keys),
    )
    own_values, own_log_total = attend_rows(
        queries.reshape(n * k * g, 1, q, e), cache, lengths=jnp.broadcast_to(length, n * k * g)
    )
    share = jax.nn.sigmoid(log_total - own_log_total)
    return (share * values + (1 - share) * own_values).astype(queries.dtype)


def _attend_by_xla(queries, keys, values, *, scale, mask=None, lengths=None):
    """Returns the attended values `[R, T, Q, E]` and log Z `[R, T, Q, 1]` of queries over keys `[R, S, 1, E]`."""
    attended, log_total = jax.nn.dot_product_attention(
        queries, keys, values, mask=mask, key_value_seq_lengths=lengths, scale=scale, return_residual=True
    )
    return attended, log_total[..., None]


def _attend_by_cudnn(queries, keys, values, *, scale, mask=None, lengths=None):
    """Returns the same as `_attend_by_xla`, for bfloat16.

    jax.nn would round log Z to bfloat16, by up to .03 nats, and the shares of prompt and completion with it.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    padding = {}
    if lengths is not None:
        sizes = jnp.full_like(lengths, queries.shape[1])
        padding = {"q_seqlen": sizes, "kv_seqlen": lengths, "mask_type": cudnn.MaskType.PADDING}
    attended, log_total = cudnn.dot_product_attention(
        queries, keys, values, mask=mask, scale=scale, return_residual=True, **padding
    )
    return attended, log_total.swapaxes(1, 2)[..., None]


_FUSED = {"xla": _attend_by_xla, "cudnn": _attend_by_cudnn}


def _bias(mask: jax.Array) -> jax.Array:
    """Returns 0 where the mask is true, and −∞ elsewhere."""
    return jnp.where(mask, jnp.float32(0), -jnp.inf)
