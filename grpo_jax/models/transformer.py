"""One decoder for prompts, completions and single tokens.

Everything about a prompt is the same for the G completions of its group, so it is
computed once: a *prefix* `[N, P]` becomes keys and values that each of the G *suffixes*
`[N, G, S]` attends to, followed by its own tokens. Gradients flow back into the prefix
from all of them. The numbers are those of the repeated prompt; the work falls from
G·(P + T) tokens a group to P + G·T.

Letters: N prompts, G completions of each, S tokens given in this call, P prefix tokens,
C tokens of the cache, D features, F features of the MLP, H query heads, K key-value heads,
Q = H/K query heads that share one key-value head, E features of a head, L layers, V vocabulary.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from grpo_jax.models.config import ModelConfig

Params = Any


class KeyValues(NamedTuple):
    """Keys and values of one layer, or with a leading L of all.

    Heads come before tokens: the product with one query then reads memory in order,
    which made a decode step on CPU several times faster than tokens before heads.
    """

    keys: jax.Array  # [N, G, K, C, E]; of a prefix [N, K, P, E]
    values: jax.Array  # as keys


class Prefix(NamedTuple):
    """What the completions of a prompt share."""

    layers: Any  # KeyValues with a leading L, or a tuple of L KeyValues
    mask: jax.Array  # bool [N, P], true on tokens of the prompt
    length: jax.Array  # int32 [N], tokens of the prompt: the position of the first completion token


class Cache(NamedTuple):
    """Keys and values of the suffix tokens seen so far."""

    layers: tuple[KeyValues, ...]
    length: jax.Array  # int32 scalar, tokens written; the next one goes there


class Geometry(NamedTuple):
    """What the tokens of a call look at and where they stand; the same for all layers.

    Masks are bool, true where a query may look, and broadcast against scores `[N, G, K, Q, S, keys]`.
    """

    angles: tuple[jax.Array, jax.Array]  # cos and sin of the rotations, [N, G, 1, S, E/2]
    mask: jax.Array  # over the tokens given, or the cache; at least one true a query
    prefix_mask: jax.Array | None  # over the prefix


class Transformer(nn.Module):
    """Token ids to hidden states after the last norm.

    With `scan_layers` the layers are one scanned block whose parameters have a leading axis
    L, so that compile time does not depend on depth: for training and prefill. Without, they
    are separate: for decoding, where a scan inside the decode loop would copy every layer's
    parameters and cache once a token. `unstack_layers` converts.

    Reads the collection "params", and "lora" where it is given: adapters of the same tree.
    """

    config: ModelConfig
    scan_layers: bool = True

    @nn.compact
    def __call__(
        self,
        ids: jax.Array,
        positions: jax.Array,
        mask: jax.Array | None = None,
        prefix: Prefix | None = None,
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Any]:
        """Causal attention over prefix, then cache or the tokens given.

        Args:
          ids: int `[N, G, S]`.
          positions: int `[N, G, S]`, from 0 at the first token of the prompt.
          mask: `[N, G, S]`, bool: which of the tokens given may be attended to; or int: several texts in a row, counted
            from 1, that do not see each other, and 0 for padding. None: all.
          prefix: attended to by all.
          cache: where to write the keys and values of `ids`, and what else to attend to; S is then 1.

        Returns:
          Hidden states `[N, G, S, D]`; the keys and values of all layers.
        """
        config = self.config
        init = nn.initializers.normal(config.initializer_range)
        embedding = self.param("embedding", init, (config.vocab_size, config.hidden_size))
        if not config.tie_word_embeddings:
            self.param("unembedding", init, (config.vocab_size, config.hidden_size))
        x = embedding[ids].astype(config.dtype)

        layers = range(config.num_hidden_layers)
        sliding = layers if config.sliding_layers is None else config.sliding_layers
        near = geometry(config, positions, mask, prefix, cache, window=config.sliding_window)
        far = near if len(sliding) == len(layers) else geometry(config, positions, mask, prefix, cache)
        if self.scan_layers:
            scanned = nn.scan(
                rematerialised(Block, config.remat),
                variable_axes={"params": 0, "lora": 0},
                split_rngs={"params": True},
                in_axes=(nn.broadcast, nn.broadcast, 0, 0),
                length=len(layers),
            )
            # Which tokens a layer sees is data only where layers differ.
            is_far = None if far is near else jnp.array([layer not in sliding for layer in layers])
            prefix_layers = None if prefix is None else prefix.layers
            x, key_values = scanned(config, name="layers")(x, near, far, is_far, prefix_layers)
        else:
            key_values = []
            for layer in layers:
                own_prefix = None if prefix is None else prefix.layers[layer]
                own_cache = None if cache is None else (cache.layers[layer], cache.length)
                block = Block(config, name=f"layer_{layer}")
                x, own = block(x, near if layer in sliding else far, None, None, own_prefix, own_cache)
                key_values.append(own)
            key_values = tuple(key_values)
        return RMSNorm(config.rms_norm_eps, name="final_norm")(x), key_values


def rematerialised(block: type[nn.Module], remat: str) -> type[nn.Module]:
    """The block with less kept for the backward pass: see `ModelConfig.remat`."""
    if remat == "none":
        return block
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if remat == "dots" else None
    return nn.remat(block, prevent_cse=False, policy=policy)


class Block(nn.Module):
    """x + attention(norm(x)), then + MLP(norm(x))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x, seen: Geometry, far: Geometry | None = None, is_far=None, prefix=None, cache=None):
        """x `[N, G, S, D]`; what it sees, and `far` instead where the bool `is_far` says so; keys and values of the
        layer's prefix; its cache with the number of tokens written. -> x, and keys and values."""
        if far is not None and is_far is not None:
            masks = jax.tree.map(lambda a, b: jnp.where(is_far, a, b), far[1:], seen[1:])
            seen = Geometry(seen.angles, *masks)
        normed = RMSNorm(self.config.rms_norm_eps, name="input_norm")(x)
        attended, key_values = Attention(self.config, name="attention")(normed, seen, prefix, cache)
        x = x + attended
        normed = RMSNorm(self.config.rms_norm_eps, name="post_attention_norm")(x)
        return x + MLP(self.config, name="mlp")(normed), key_values


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x, seen: Geometry, prefix: KeyValues | None = None, cache=None):
        """x `[N, G, S, D]` -> the same, and the keys and values of the tokens given or of the whole cache."""
        config = self.config
        heads, kv_heads, features = config.num_attention_heads, config.num_key_value_heads, config.head_dim

        def project(name: str, num_heads: int) -> jax.Array:
            linear = Linear((num_heads, features), config.qkv_bias, config.initializer_range, name=f"{name}_proj")
            return linear(x).swapaxes(2, 3)  # [N, G, H, S, E]

        def rotated(name: str, num_heads: int) -> jax.Array:
            projected = project(name, num_heads)
            if config.qk_norm:
                projected = RMSNorm(config.rms_norm_eps, name=f"{name}_norm")(projected)
            return rotate(projected, seen.angles)

        queries, keys, values = rotated("q", heads), rotated("k", kv_heads), project("v", kv_heads)
        if cache is not None:
            written, length = cache
            keys = jax.lax.dynamic_update_slice_in_dim(written.keys, keys, length, axis=3)
            values = jax.lax.dynamic_update_slice_in_dim(written.values, values, length, axis=3)
        queries = queries.reshape(*queries.shape[:2], kv_heads, heads // kv_heads, *queries.shape[3:])
        # One query at a time leaves a flash kernel nothing to do.
        kind = "shared" if cache is not None else config.attention
        own = KeyValues(keys, values)
        if kind == "shared":
            attended = attend(queries, own, seen.mask, prefix, seen.prefix_mask)
        else:
            attended = attend_in_a_row(queries, own, seen.mask, prefix, seen.prefix_mask, implementation=kind)
        attended = attended.reshape(*attended.shape[:2], heads, *attended.shape[4:]).swapaxes(2, 3)
        out = Linear((config.hidden_size,), config.o_bias, config.initializer_range, in_axes=2, name="o_proj")
        return out(attended), own


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x):
        """x `[..., D]` -> the same."""
        config = self.config

        def linear(name: str, size: int) -> Linear:
            return Linear((size,), config.mlp_bias, config.initializer_range, name=name)

        gate, up = (linear(name, config.intermediate_size)(x) for name in ("gate_proj", "up_proj"))
        return linear("down_proj", config.hidden_size)(nn.silu(gate) * up)


class Linear(nn.Module):
    """x W + b, and + x A B where the collection "lora" holds A and B for it.

    The parameters are `kernel` `[*in, *out]` and `bias` `[*out]`; the adapter's are `a` `[*in, R]` and `b` `[R, *out]`.
    """

    out_shape: tuple[int, ...]
    use_bias: bool
    initializer_range: float
    in_axes: int = 1  # trailing axes of x that are contracted

    @nn.compact
    def __call__(self, x):
        """x `[..., *in]` -> `[..., *out]`, in the dtype of x."""
        init = nn.initializers.normal(self.initializer_range)
        kernel = self.param("kernel", init, (*x.shape[-self.in_axes :], *self.out_shape))
        y = jnp.tensordot(x, kernel.astype(x.dtype), self.in_axes)
        if self.has_variable("lora", "a"):
            a: jax.Array = self.get_variable("lora", "a")
            b: jax.Array = self.get_variable("lora", "b")
            y = y + jnp.tensordot(jnp.tensordot(x, a.astype(x.dtype), self.in_axes), b.astype(x.dtype), 1)
        if self.use_bias:
            y = y + self.param("bias", nn.initializers.zeros, self.out_shape).astype(x.dtype)
        return y


class RMSNorm(nn.Module):
    """x / √(mean x² + ε) · scale, in float32. 1910.07467."""

    eps: float

    @nn.compact
    def __call__(self, x):
        """x `[..., D]` -> the same."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        exact = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(exact), axis=-1, keepdims=True) + self.eps)
        return (exact * inverse * scale).astype(x.dtype)


def attend(
    queries: jax.Array,
    own: KeyValues,
    mask: jax.Array,
    prefix: KeyValues | None = None,
    prefix_mask: jax.Array | None = None,
) -> jax.Array:
    """softmax(q·k/√E) v over the concatenation of a shared prefix and own tokens.

    Two products with one softmax: the prefix is never repeated G times in memory.

    Args:
      queries: `[N, G, K, Q, S, E]`.
      own: keys and values `[N, G, K, C, E]`.
      mask: bool, broadcasts against scores `[N, G, K, Q, S, C]`; at least one true a query.
      prefix: keys and values `[N, K, P, E]`.
      prefix_mask: bool, broadcasts against `[N, G, K, Q, S, P]`.

    Returns:
      `[N, G, K, Q, S, E]`.
    """
    n, g, k, q, s, e = queries.shape
    queries = queries * jnp.asarray(e**-0.5, queries.dtype)
    scores = jnp.where(mask, _einsum("ngkqse,ngkce->ngkqsc", queries, own.keys), -jnp.inf)
    if prefix is None or prefix_mask is None:
        weights = jax.nn.softmax(scores).astype(queries.dtype)
        return _einsum("ngkqsc,ngkce->ngkqse", weights, own.values).astype(queries.dtype)
    shared_queries = queries.transpose(0, 2, 1, 3, 4, 5).reshape(n, k, g * q * s, e)
    prefix_scores = _einsum("nkme,nkpe->nkmp", shared_queries, prefix.keys)
    prefix_scores = prefix_scores.reshape(n, k, g, q, s, -1).transpose(0, 2, 1, 3, 4, 5)
    prefix_scores = jnp.where(prefix_mask, prefix_scores, -jnp.inf)
    width = prefix_scores.shape[-1]
    weights = jax.nn.softmax(jnp.concatenate([prefix_scores, scores], axis=-1)).astype(queries.dtype)
    shared_weights = weights[..., :width].transpose(0, 2, 1, 3, 4, 5).reshape(n, k, g * q * s, width)
    from_prefix = _einsum("nkmp,nkpe->nkme", shared_weights, prefix.values)
    from_prefix = from_prefix.reshape(n, k, g, q, s, e).transpose(0, 2, 1, 3, 4, 5)
    from_own = _einsum("ngkqsc,ngkce->ngkqse", weights[..., width:], own.values)
    return (from_prefix + from_own).astype(queries.dtype)


def attend_in_a_row(
    queries: jax.Array,
    own: KeyValues,
    mask: jax.Array,
    prefix: KeyValues | None = None,
    prefix_mask: jax.Array | None = None,
    *,
    implementation: Literal["xla", "cudnn"],
) -> jax.Array:
    """`attend` through `jax.nn.dot_product_attention`, over prefix and own tokens in one array.

    The prefix's keys and values are repeated for each of the G completions: less than what the scores would take, which
    flash attention does not hold. (Two flash calls joined by their log-sum-exp would not repeat them, but the gradient
    of cuDNN's log-sum-exp is dropped by JAX without a word.)

    Args:
      queries, own, mask, prefix, prefix_mask: as in `attend`.
      implementation: of `jax.nn.dot_product_attention`.

    Returns:
      As `attend`.
    """
    n, g, k, q, s, e = queries.shape
    keys, values = own
    mask = jnp.broadcast_to(mask, (*jnp.broadcast_shapes(mask.shape[:2], (n, g)), 1, 1, s, keys.shape[-2]))
    if prefix is not None and prefix_mask is not None:
        prefix_mask = jnp.broadcast_to(prefix_mask, (*mask.shape[:-1], prefix_mask.shape[-1]))
        mask = jnp.concatenate([prefix_mask, mask], axis=-1)
        keys, values = (
            jnp.concatenate([jnp.broadcast_to(shared[:, None], (n, g, *shared.shape[1:])), x], axis=3)
            for shared, x in zip(prefix, (keys, values), strict=True)
        )

    def even(x: jax.Array, axis: int) -> jax.Array:
        """cuDNN wants an even number of tokens. One more query is cut off again, and nobody sees one more key."""
        pad = [(0, 0)] * x.ndim
        pad[axis] = (0, x.shape[axis] % 2)
        return jnp.pad(x, pad)

    attended = jax.nn.dot_product_attention(
        even(queries.reshape(n * g, k * q, s, e).swapaxes(1, 2), 1),
        even(keys.reshape(n * g, k, -1, e).swapaxes(1, 2), 1),
        even(values.reshape(n * g, k, -1, e).swapaxes(1, 2), 1),
        mask=even(even(mask.reshape(n * g, 1, s, -1), 2), 3),
        implementation=implementation,
    )
    return attended[:, :s].swapaxes(1, 2).reshape(queries.shape)


def geometry(
    config: ModelConfig,
    positions: jax.Array,
    mask: jax.Array | None,
    prefix: Prefix | None,
    cache: Cache | None,
    *,
    window: int | None = None,
) -> Geometry:
    """Who may look where: causal, not at padding, and with a window only at the last `window` positions.

    Args:
      config: for the rotations.
      positions: int `[N, G, S]`.
      mask: `[N, G, S]`, bool or int, or None: which of the tokens given may be attended to, as in `Transformer`.
      prefix: attended to by all, or None.
      cache: None, or the cache that the tokens are written to; then S is 1.
      window: tokens that a token attends to, itself included; None for all.

    Returns:
      `Geometry`.
    """
    queries = positions[:, :, None, None, :, None]
    if cache is not None:
        slots = jnp.arange(cache.layers[0].keys.shape[-2])
        seen = (slots <= cache.length)[None, None, None, None, None, :]
        keys = queries - cache.length + slots  # positions: the token given stands at slot `length`
    else:
        width = positions.shape[-1]
        seen = jnp.tril(jnp.ones((width, width), bool))[None, None, None, None]
        keys = positions[:, :, None, None, None, :]
        if mask is not None:
            text = mask.astype(jnp.int32)
            of_key, of_query = text[:, :, None, None, None, :], text[:, :, None, None, :, None]
            # Padding attends to itself, so that no row of scores is all −∞. Nobody reads what it computes.
            seen = seen & ((of_key == of_query) & (of_key > 0) | jnp.eye(width, dtype=bool))
    prefix_seen: Any = None if prefix is None else prefix.mask[:, None, None, None, None, :]
    if window is not None:
        seen = seen & (queries - keys < window)
    if window is not None and prefix is not None:
        prefix_keys = jnp.cumsum(prefix.mask, axis=-1, dtype=jnp.int32) - 1
        prefix_seen = prefix_seen & (queries - prefix_keys[:, None, None, None, None, :] < window)
    return Geometry(rotary_angles(positions, config), seen, prefix_seen)


def rotary_angles(positions: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """cos and sin of position · θ^(−2i/E), i = 0 … E/2 − 1. RoPE (2104.09864).

    With Llama 3's scaling, waves longer than original/low are stretched by `factor`, those shorter than
    original/high stay, and frequencies in between are mixed linearly in original/wavelength (2407.21783).

    Args:
      positions: int `[N, G, S]`.
      config: `head_dim`, `rope_theta`, `rope_scaling`.

    Returns:
      Two float32 `[N, G, 1, S, E/2]`.
    """
    frequencies = config.rope_theta ** (-jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim)
    if config.rope_scaling:
        factor, low, high, original = config.rope_scaling
        waves = original * frequencies / (2 * jnp.pi)  # that fit into the original context
        kept = jnp.clip((waves - low) / (high - low), 0.0, 1.0)
        frequencies = frequencies * (kept + (1 - kept) / factor)
    angles = positions[:, :, None, :, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns feature i against feature i + E/2, as Hugging Face checkpoints pair them.

    Args:
      x: `[N, G, H, S, E]`.
      angles: from `rotary_angles`.

    Returns:
      As x.
    """
    cos, sin = angles
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _einsum(subscripts: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, *operands, preferred_element_type=jnp.float32)


def unstack_layers(params: Params, num_layers: int) -> Params:
    """Parameters of the scanned decoder as those of the one with separate layers."""
    rest = {name: value for name, value in params.items() if name != "layers"}
    return rest | {f"layer_{i}": jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(num_layers)}
