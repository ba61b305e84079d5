"""One token from logits and uniform numbers, by inversion of the distribution function.

Inversion needs two random numbers for a token where the Gumbel trick needs V. At a
vocabulary of 32 thousand that is 20 times faster on CPU, and the noise does not depend
on V.
"""

import math

import jax
import jax.numpy as jnp


def sample_categorical(
    logits: jax.Array,
    uniforms: jax.Array,
    *,
    scale: jax.Array | float = 1.0,
    greedy: jax.Array | None = None,
    given: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Samples v with probability softmax(scale · logits)[v]: first a block of the vocabulary, then a token of it.

    Each choice is the first i at which the running sum exceeds u times the total. Two uniforms
    keep their full resolution where one would be rounded to 2⁻²³ of the whole vocabulary.

    Args:
      logits: float32 `[..., V]`; −inf is never sampled.
      uniforms: `[..., 2]`, in [0, 1).
      scale: 1/temperature, above 0, broadcasts against `[...]`. Default 1. Scaled logits would be one more array of
        this size to write and to read, which takes a GPU a twentieth of a decode step.
      greedy: bool `[...]`, take the largest logit instead.
      given: int32 `[...]`, ids to take instead, or −1 where one is drawn.

    Returns:
      int32 ids `[...]` and their log-probabilities `[...]` in nats.
    """
    vocab_size = logits.shape[-1]
    width = math.isqrt(vocab_size - 1) + 1
    num_blocks = -(-vocab_size // width)
    maximum = jnp.max(logits, axis=-1, keepdims=True)
    scale = jnp.asarray(scale, jnp.float32)
    weights = jnp.exp((logits - maximum) * scale[..., None])
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, num_blocks * width - vocab_size)]
    blocks = jnp.pad(weights, padding).reshape(*logits.shape[:-1], num_blocks, width)
    sums = jnp.sum(blocks, axis=-1)
    block = _invert(sums, uniforms[..., 0])
    chosen = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    ids = block * width + _invert(chosen, uniforms[..., 1])
    if greedy is not None:
        # On CPU the arg max takes as long as all else here, and mostly nobody asks for it.
        likeliest = jax.lax.cond(jnp.any(greedy), lambda: jnp.argmax(logits, axis=-1).astype(jnp.int32), lambda: ids)
        ids = jnp.where(greedy, likeliest, ids)
    if given is not None:
        ids = jnp.where(given < 0, ids, given)
    logit = jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]
    return ids, (logit - maximum[..., 0]) * scale - jnp.log(jnp.sum(sums, axis=-1))


def _invert(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """The first i with w₀ + … + wᵢ > u Σ w, int32 `[...]`; never one with w = 0."""
    # A parallel prefix sum may rise by a rounding where the weight is 0; 0 never exceeds the target.
    running = jnp.where(weights > 0, jnp.cumsum(weights, axis=-1), 0)
    total = jnp.max(running, axis=-1, keepdims=True)
    # Rounding could also push the target up to the total itself, which nothing exceeds.
    target = jnp.minimum(uniform[..., None] * total, jnp.nextafter(total, 0.0))
    return jnp.argmax(running > target, axis=-1).astype(jnp.int32)
