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
    by_columns: bool = False,
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
      by_columns: the vocabulary is the first axis in memory, as where `times_transposed` multiplies by columns. The
        tokens are the same.

    Returns:
      int32 ids `[...]` and their log-probabilities `[...]` in nats.
    """
    vocab_size, shape = logits.shape[-1], logits.shape[:-1]
    axis = 0 if by_columns else len(shape)
    width = math.isqrt(vocab_size - 1) + 1  # of a block; the last one may have fewer tokens
    end = vocab_size - vocab_size % width
    scale = jnp.broadcast_to(jnp.asarray(scale, jnp.float32), shape)

    logits = jnp.moveaxis(logits, -1, axis)
    maximum = jnp.max(logits, axis)
    weights = jnp.exp((logits - jnp.expand_dims(maximum, axis)) * jnp.expand_dims(scale, axis))
    whole, rest = jnp.split(weights, [end], axis)  # not padded, which would be one more array of this size
    sums = jnp.sum(whole.reshape(*shape[:axis], -1, width, *shape[axis:]), axis + 1)
    sums = jnp.concatenate([sums, jnp.sum(rest, axis, keepdims=True)], axis)
    first = _invert(sums, uniforms[..., 0], axis) * width
    places = jnp.arange(width).reshape([width if x == axis else 1 for x in range(logits.ndim)])
    tokens = jnp.expand_dims(first, axis) + places
    chosen = jnp.where(tokens < vocab_size, jnp.take_along_axis(weights, tokens, axis, mode="clip"), 0)
    ids = first + _invert(chosen, uniforms[..., 1], axis)
    if greedy is not None:
        # On CPU the arg max takes as long as all else here, and mostly nobody asks for it.
        likeliest = jax.lax.cond(jnp.any(greedy), lambda: jnp.argmax(logits, axis).astype(jnp.int32), lambda: ids)
        ids = jnp.where(greedy, likeliest, ids)
    if given is not None:
        ids = jnp.where(given < 0, ids, given)
    logit = jnp.take_along_axis(logits, jnp.expand_dims(ids, axis), axis).squeeze(axis)
    return ids, (logit - maximum) * scale - jnp.log(jnp.sum(sums, axis))


def _invert(weights: jax.Array, uniform: jax.Array, axis: int) -> jax.Array:
    """The first i along an axis with w₀ + … + wᵢ > u Σ w, int32 `[...]`; never one with w = 0."""
    # A parallel prefix sum may rise by a rounding where the weight is 0; 0 never exceeds the target.
    running = jnp.where(weights > 0, jnp.cumsum(weights, axis), 0)
    total = jnp.max(running, axis, keepdims=True)
    # Rounding could also push the target up to the total itself, which nothing exceeds.
    target = jnp.minimum(jnp.expand_dims(uniform, axis) * total, jnp.nextafter(total, 0.0))
    return jnp.argmax(running > target, axis).astype(jnp.int32)
