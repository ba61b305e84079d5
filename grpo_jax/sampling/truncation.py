"""Top-k, top-p and min-p as one threshold on the probability.

Each rule keeps the tokens whose probability is at least some number. The largest number
that keeps enough (k tokens, or a mass of p) is found by bisection on the bits of the float,
31 sums over the vocabulary, instead of a sort of it. Ties at the threshold are kept.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Truncation(NamedTuple):
    """Limits on the candidates, applied in this order to what the ones before left.

    Each broadcasts against the rows `[N, G]`, or is None: not applied.
    """

    top_k: jax.Array | int | None = None  # tokens; 0 or less leaves a row as it is
    top_p: jax.Array | float | None = None  # the fewest likeliest tokens whose mass is at least this
    min_p: jax.Array | float | None = None  # probability at least this share of the largest


def truncate(logits: jax.Array, truncation: Truncation, shape: tuple[int, ...]) -> jax.Array:
    """Logits with −inf on the tokens that are no candidates.

    Args:
      logits: float32 `[N, G, V]`, after temperature.
      truncation: the limits.
      shape: (N, G).

    Returns:
      `[N, G, V]`; the likeliest token always stays.
    """
    probs = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))  # the largest is 1
    threshold = jnp.zeros((*shape, 1), jnp.float32)
    if truncation.top_k is not None:
        k = jnp.broadcast_to(jnp.asarray(truncation.top_k), shape)[..., None]
        k = jnp.where(k > 0, jnp.minimum(k, logits.shape[-1]), logits.shape[-1])
        threshold = _largest_threshold(probs, jnp.ones_like(probs), k.astype(jnp.float32))
    if truncation.top_p is not None:
        mass = jnp.where(probs >= threshold, probs, 0)
        p = jnp.broadcast_to(jnp.asarray(truncation.top_p, jnp.float32), shape)[..., None]
        target = p * jnp.sum(mass, axis=-1, keepdims=True)
        # Rounded sums reach the whole mass before the last token; 1 must keep it all the same.
        nucleus = jnp.where(p < 1, _largest_threshold(probs, mass, target), 0)
        threshold = jnp.maximum(threshold, nucleus)
    if truncation.min_p is not None:
        min_p = jnp.broadcast_to(jnp.asarray(truncation.min_p, jnp.float32), shape)[..., None]
        threshold = jnp.maximum(threshold, min_p)
    return jnp.where(probs >= jnp.minimum(threshold, 1), logits, -jnp.inf)


def _largest_threshold(probs: jax.Array, weights: jax.Array, target: jax.Array) -> jax.Array:
    """The largest x in [0, 1] with Σ_{v: p[v] ≥ x} w[v] ≥ target, `[..., 1]`."""

    def halve(_, bounds):
        low, high = bounds  # enough weight above low, too little above high
        middle = low + (high - low) // 2
        x = jax.lax.bitcast_convert_type(middle, jnp.float32)
        enough = jnp.sum(jnp.where(probs >= x, weights, 0), axis=-1, keepdims=True) >= target
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    # The bits of positive floats are ordered as the floats are.
    one = jax.lax.bitcast_convert_type(jnp.float32(1), jnp.int32)
    bounds = jnp.zeros(target.shape, jnp.int32), jnp.full(target.shape, one + 1)
    low, _ = jax.lax.fori_loop(0, 31, halve, bounds)
    return jax.lax.bitcast_convert_type(low, jnp.float32)
