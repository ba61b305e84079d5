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

from typing import Any, NamedTuple

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


class Transformer(nn.Module):
    """Token ids to hidden states after the last norm.

    With `scan_layers` the layers are one scanned block whose parameters have a leading axis
    L, so that compile time does not depend on depth: for training and prefill. Without, they
    are separate: for decoding, where a scan inside the decode loop would copy every layer's
    parameters and cache once a token. `unstack_layers` converts.
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
          mask: bool `[N, G, S]`, which of the tokens given may be attended to. None: all.
          prefix: attended to by all.
          cache: where to write the keys and values of `ids`, and what else to attend to.

        Returns:
          Hidden states `[N, G, S, D]`; the keys and values of all layers.
        """
        config, dtype = self.config, jnp.dtype(self.config.dtype)
        init = nn.initializers.normal(config.initializer_range)
        embedding = self.param("embedding", init, (config.vocab_size, config.hidden_size))
        if not config.tie_word_embeddings:
            self.param("unembedding", init, (config.vocab_size, config.hidden_size))
        x = embedding[ids].astype(dtype)
        shared = (
            rotary_angles(positions, config.head_dim, config.rope_theta),
            attention_bias(mask, ids.shape, cache),
            None if prefix is None else jnp.where(prefix.mask, 0.0, -jnp.inf)[:, None, None, None, None, :],
        )
        prefix_layers = None if prefix is None else prefix.layers
        if self.scan_layers:
            block = nn.remat(Block, prevent_cse=False) if config.remat else Block
            layers = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=(nn.broadcast, 0),
                length=config.num_hidden_layers,
            )
            x, key_values = layers(config, name="layers")(x, shared, prefix_layers)
        else:
            key_values = []
            for layer in range(config.num_hidden_layers):
                own_prefix = None if prefix is None else prefix.layers[layer]
                own_cache = None if cache is None else (cache.layers[layer], cache.length)
                x, own = Block(config, name=f"layer_{layer}")(x, shared, own_prefix, own_cache)
                key_values.append(own)
            key_values = tuple(key_values)
        return RMSNorm(config.rms_norm_eps, name="final_norm")(x), key_values


class Block(nn.Module):
    """x + attention(norm(x)), then + MLP(norm(x))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x, shared, prefix=None, cache=None):
        angles, bias, prefix_bias = shared
        normed = RMSNorm(self.config.rms_norm_eps, name="input_norm")(x)
        attended, key_values = Attention(self.config, name="attention")(
            normed, angles, bias, prefix, prefix_bias, cache
        )
        x = x + attended
        normed = RMSNorm(self.config.rms_norm_eps, name="post_attention_norm")(x)
        return x + MLP(self.config, name="mlp")(normed), key_values


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x, angles, bias, prefix, prefix_bias, cache):
        config, dtype = self.config, x.dtype
        heads, kv_heads, features = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        init = nn.initializers.normal(config.initializer_range)

        def project(name: str, num_heads: int) -> jax.Array:
            kernel = self.param(f"{name}_proj", init, (config.hidden_size, num_heads, features))
            projected = jnp.einsum("ngsd,dhe->nghse", x, kernel.astype(dtype))
            if config.qkv_bias:
                bias = self.param(f"{name}_bias", nn.initializers.zeros, (num_heads, features))
                projected = projected + bias[:, None, :].astype(dtype)
            return projected

        queries = rotate(project("q", heads), angles)
        keys, values = rotate(project("k", kv_heads), angles), project("v", kv_heads)
        if cache is not None:
            written, length = cache
            keys = jax.lax.dynamic_update_slice_in_dim(written.keys, keys, length, axis=3)
            values = jax.lax.dynamic_update_slice_in_dim(written.values, values, length, axis=3)
        queries = queries.reshape(*queries.shape[:2], kv_heads, heads // kv_heads, *queries.shape[3:])
        attended = attend(queries, KeyValues(keys, values), bias, prefix, prefix_bias)
        attended = attended.reshape(*attended.shape[:2], heads, *attended.shape[4:])
        kernel = self.param("o_proj", init, (heads, features, config.hidden_size))
        return jnp.einsum("nghse,hed->ngsd", attended, kernel.astype(dtype)), KeyValues(keys, values)


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x):
        width, hidden = self.config.intermediate_size, self.config.hidden_size
        init = nn.initializers.normal(self.config.initializer_range)
        gate = self.param("gate_proj", init, (hidden, width)).astype(x.dtype)
        up = self.param("up_proj", init, (hidden, width)).astype(x.dtype)
        down = self.param("down_proj", init, (width, hidden)).astype(x.dtype)
        return (nn.silu(x @ gate) * (x @ up)) @ down


class RMSNorm(nn.Module):
    """x / √(mean x² + ε) · scale, in float32. 1910.07467."""

    eps: float

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        exact = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(exact), axis=-1, keepdims=True) + self.eps)
        return (exact * inverse * scale).astype(x.dtype)


def attend(
    queries: jax.Array,
    own: KeyValues,
    bias: jax.Array,
    prefix: KeyValues | None = None,
    prefix_bias: jax.Array | None = None,
) -> jax.Array:
    """softmax(q·k/√E + bias) v over the concatenation of a shared prefix and own tokens.

    Two products with one softmax: the prefix is never repeated G times in memory.

    Args:
      queries: `[N, G, K, Q, S, E]`.
      own: keys and values `[N, G, K, C, E]`.
      bias: 0 or −inf, broadcasts against scores `[N, G, K, Q, S, C]`; at least one 0 a query.
      prefix: keys and values `[N, K, P, E]`.
      prefix_bias: 0 or −inf, broadcasts against `[N, G, K, Q, S, P]`.

    Returns:
      `[N, G, K, Q, S, E]`.
    """
    n, g, k, q, s, e = queries.shape
    queries = queries * jnp.asarray(e**-0.5, queries.dtype)
    scores = _einsum("ngkqse,ngkce->ngkqsc", queries, own.keys) + bias
    if prefix is None or prefix_bias is None:
        weights = jax.nn.softmax(scores).astype(queries.dtype)
        return _einsum("ngkqsc,ngkce->ngkqse", weights, own.values).astype(queries.dtype)
    shared_queries = queries.transpose(0, 2, 1, 3, 4, 5).reshape(n, k, g * q * s, e)
    prefix_scores = _einsum("nkme,nkpe->nkmp", shared_queries, prefix.keys)
    prefix_scores = prefix_scores.reshape(n, k, g, q, s, -1).transpose(0, 2, 1, 3, 4, 5) + prefix_bias
    width = prefix_scores.shape[-1]
    weights = jax.nn.softmax(jnp.concatenate([prefix_scores, scores], axis=-1)).astype(queries.dtype)
    shared_weights = weights[..., :width].transpose(0, 2, 1, 3, 4, 5).reshape(n, k, g * q * s, width)
    from_prefix = _einsum("nkmp,nkpe->nkme", shared_weights, prefix.values)
    from_prefix = from_prefix.reshape(n, k, g, q, s, e).transpose(0, 2, 1, 3, 4, 5)
    from_own = _einsum("ngkqsc,ngkce->ngkqse", weights[..., width:], own.values)
    return (from_prefix + from_own).astype(queries.dtype)


def attention_bias(mask: jax.Array | None, shape: tuple[int, ...], cache: Cache | None) -> jax.Array:
    """0 where a token may look, −inf elsewhere; broadcasts against `[N, G, K, Q, S, C]`.

    Args:
      mask: bool `[N, G, S]` or None.
      shape: (N, G, S) of the tokens given.
      cache: None, or the cache that they are written to; then S is 1.

    Returns:
      `[N or 1, G or 1, 1, 1, S, C]`.
    """
    if cache is not None:
        width = cache.layers[0].keys.shape[-2]
        allowed = (jnp.arange(width) <= cache.length)[None, None, None, None, None, :]
    else:
        allowed = jnp.tril(jnp.ones((shape[-1], shape[-1]), bool))[None, None, None, None]
        if mask is not None:
            # Padding attends to itself, so that no row of scores is all −inf. Nobody reads what it computes.
            allowed = allowed & (mask[:, :, None, None, None, :] | jnp.eye(shape[-1], dtype=bool))
    return jnp.where(allowed, 0.0, -jnp.inf)


def rotary_angles(positions: jax.Array, features: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin of position · θ^(−2i/E), i = 0 … E/2 − 1. RoPE (2104.09864).

    Args:
      positions: int `[N, G, S]`.
      features: E, the features of a head.
      theta: the base of the wave lengths.

    Returns:
      Two float32 `[N, G, 1, S, E/2]`.
    """
    frequencies = theta ** (-jnp.arange(0, features, 2, dtype=jnp.float32) / features)
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
