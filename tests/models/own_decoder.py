"""A decoder in Flax NNX with a cache of its own, written without this package: a Llama with tied embeddings."""

import jax
import jax.numpy as jnp
from flax import nnx


def rotate(x, positions, theta=10000.0):
    half = x.shape[-1] // 2
    angles = positions[..., None, None] * theta ** (-jnp.arange(half) / half)
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Layer(nnx.Module):
    def __init__(self, width, hidden, heads, kv_heads, size, rngs):
        self.before, self.between = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.q = nnx.LinearGeneral(width, (heads, size), use_bias=False, rngs=rngs)
        self.k = nnx.LinearGeneral(width, (kv_heads, size), use_bias=False, rngs=rngs)
        self.v = nnx.LinearGeneral(width, (kv_heads, size), use_bias=False, rngs=rngs)
        self.o = nnx.LinearGeneral((heads, size), width, axis=(-2, -1), use_bias=False, rngs=rngs)
        self.gate, self.up, self.down = (
            nnx.Linear(*sizes, use_bias=False, rngs=rngs) for sizes in [(width, hidden)] * 2 + [(hidden, width)]
        )

    def __call__(self, x, positions, cache, mask):
        y = self.before(x)
        q, k, v = rotate(self.q(y), positions), rotate(self.k(y), positions), self.v(y)
        if cache is not None:
            begin = (0, cache["end"], 0, 0)
            k, v = (jax.lax.dynamic_update_slice(cache[name], new, begin) for name, new in (("k", k), ("v", v)))
            cache = {"k": k, "v": v, "end": cache["end"] + x.shape[1]}
        x = x + self.o(jax.nn.dot_product_attention(q, k, v, mask=mask[:, None]))
        y = self.between(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y)), cache


class Decoder(nnx.Module):
    def __init__(self, vocab_size, width, hidden, layers, *heads, rngs):
        self.embed, self.norm = nnx.Embed(vocab_size, width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.layers = nnx.List([Layer(width, hidden, *heads, rngs) for _ in range(layers)])
        self.heads = heads

    def init_cache(self, rows, slots, dtype):
        empty = jnp.zeros((rows, slots, *self.heads[1:]), dtype)
        return [{"k": empty, "v": empty, "end": jnp.int32(0)} for _ in self.layers]

    def hidden(self, tokens, positions, cache, mask):
        x, new = self.embed(tokens), []
        for number, layer in enumerate(self.layers):
            x, layer_cache = layer(x, positions, cache and cache[number], mask)
            new.append(layer_cache)
        return self.norm(x), new

    def __call__(self, tokens, positions, cache, mask):
        x, cache = self.hidden(tokens, positions, cache, mask)
        return self.embed.attend(x), cache
