"""Log-probabilities of given tokens and entropies, from hidden states.

Logits over a vocabulary of 150 thousand are the largest array of a training step by
far. Here they exist one slice of the vocabulary at a time, in the forward and in the
backward pass. Letters: T tokens (with any leading axes), D features, V vocabulary,
R rows (all tokens, flat), C width of a slice of the vocabulary, K slices.
"""

from functools import partial
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

# Elements of one [R, C] slice of the logits: 32 MiB in float32. A backward pass holds
# about three such arrays; smaller ones no longer fill the matrix units.
_SLICE_ELEMENTS = 2**23
_MIN_SLICE_WIDTH = 128


class TokenLogprobs(NamedTuple):
    """Both `[..., T]`, float32, in nats."""

    logprobs: jax.Array
    entropy: jax.Array


def token_logprobs(
    hidden: jax.Array,
    unembedding: jax.Array,
    ids: jax.Array,
    *,
    temperature: jax.Array | float = 1.0,
) -> TokenLogprobs:
    """log π(id) = z[id] − log Σ_v exp z[v] and H = −Σ_v π(v) log π(v), where z = W h / τ.

    Never holds `[..., T, V]`: each slice of the vocabulary is reduced at once, and the
    backward pass computes it again. Both results are differentiable in `hidden`,
    `unembedding` and `temperature`. Products are taken in the dtype of the inputs and
    accumulated in float32.

    Args:
      hidden: `[..., T, D]`, the decoder's output after its last norm.
      unembedding: `[V, D]`.
      ids: int `[..., T]`, in [0, V). What an id outside gives is unspecified; mask it.
      temperature: τ > 0, broadcasts against `[..., T]`; that of the sampler. Default 1.

    Returns:
      `TokenLogprobs(logprobs, entropy)`, both float32 `[..., T]`, of the distribution
      after temperature.

    Raises:
      AssertionError: shapes disagree (at trace time).

    Examples:
      >>> hidden, unembedding = jnp.ones((1, 2, 3)), jnp.zeros((4, 3))  # T = 2, D = 3, V = 4
      >>> result = token_logprobs(hidden, unembedding, jnp.array([[0, 3]]))
      >>> print(result.logprobs, result.entropy)  # −log 4, log 4
      [[-1.386 -1.386]] [[1.386 1.386]]
    """
    chex.assert_shape(hidden, (*ids.shape, None))
    chex.assert_shape(unembedding, (None, hidden.shape[-1]))
    inverse_temperature = jnp.broadcast_to(1.0 / jnp.asarray(temperature, jnp.float32), ids.shape)
    # Under shard_map the hidden states differ between devices while the matrix may not.
    # Adding a zero that differs too gives both the same type; XLA removes the addition.
    unembedding = unembedding + jnp.zeros_like(hidden, shape=(), dtype=unembedding.dtype)
    logprobs, entropy = _token_logprobs(
        hidden.reshape(-1, hidden.shape[-1]), unembedding, ids.ravel(), inverse_temperature.ravel()
    )
    return TokenLogprobs(logprobs.reshape(ids.shape), entropy.reshape(ids.shape))


@jax.custom_vjp
def _token_logprobs(hidden, unembedding, ids, scale):
    return _forward(hidden, unembedding, ids, scale)[0]


def _forward(hidden, unembedding, ids, scale):
    """Per slice the maximum m, s = Σ exp(z − m), u = Σ z exp(z − m) and z[id]; then combine them."""

    def reduce_slice(index):
        logits, is_new, column = _slice_logits(hidden, unembedding, scale, index)
        logits = jnp.where(is_new, logits, -jnp.inf)
        maximum = jnp.max(logits, axis=-1)
        weight = jnp.exp(logits - maximum[:, None])
        first_moment = jnp.sum(jnp.where(is_new, logits, 0) * weight, axis=-1)
        chosen = jnp.sum(jnp.where(is_new & (column == ids[:, None]), logits, 0), axis=-1)
        return maximum, jnp.sum(weight, axis=-1), first_moment, chosen

    num_slices = _num_slices(hidden, unembedding)
    maximum, total, first_moment, chosen = jax.lax.map(reduce_slice, jnp.arange(num_slices))  # each [K, R]
    overall = jnp.max(maximum, axis=0)
    rescale = jnp.exp(maximum - overall[None, :])
    total = jnp.sum(total * rescale, axis=0)
    mean_logit = jnp.sum(first_moment * rescale, axis=0) / total
    log_normalizer = overall + jnp.log(total)
    entropy = log_normalizer - mean_logit
    outputs = jnp.sum(chosen, axis=0) - log_normalizer, entropy
    return outputs, (hidden, unembedding, ids, scale, log_normalizer, entropy)


def _backward(residuals, cotangents):
    """∂L/∂z[v] = g_logp (1[v = id] − π(v)) − g_H π(v) (log π(v) + H), slice by slice."""
    hidden, unembedding, ids, scale, log_normalizer, entropy = residuals
    d_logprobs, d_entropy = cotangents

    def accumulate(carry, index):
        d_hidden, d_unembedding = carry
        logits, is_new, column = _slice_logits(hidden, unembedding, scale, index)
        log_p = logits - log_normalizer[:, None]
        slope = d_logprobs[:, None] + d_entropy[:, None] * (log_p + entropy[:, None])
        d_logits = jnp.where(column == ids[:, None], d_logprobs[:, None], 0) - jnp.exp(log_p) * slope
        d_logits = (jnp.where(is_new, d_logits, 0) * scale[:, None]).astype(hidden.dtype)
        weight, start = _slice_weight(unembedding, index, _num_slices(hidden, unembedding))
        d_hidden += _einsum("rc,cd->rd", d_logits, weight)
        d_weight = _einsum("rc,rd->cd", d_logits, hidden).astype(d_unembedding.dtype)
        previous = jax.lax.dynamic_slice_in_dim(d_unembedding, start, weight.shape[0])
        d_unembedding = jax.lax.dynamic_update_slice_in_dim(d_unembedding, previous + d_weight, start, axis=0)
        return (d_hidden, d_unembedding), None

    zeros = jnp.zeros_like(hidden, dtype=jnp.float32), jnp.zeros_like(unembedding)
    slices = jnp.arange(_num_slices(hidden, unembedding))
    (d_hidden, d_unembedding), _ = jax.lax.scan(accumulate, zeros, slices)
    # Σ_v ∂L/∂z[v] · (W h)[v] is h · ∂L/∂h over the scale, which spares a pass over the logits.
    d_scale = jnp.sum(d_hidden * hidden.astype(jnp.float32), axis=-1) / scale
    return d_hidden.astype(hidden.dtype), d_unembedding, None, d_scale


_token_logprobs.defvjp(_forward, _backward)


def _num_slices(hidden, unembedding) -> int:
    width = max(_SLICE_ELEMENTS // max(hidden.shape[0], 1), _MIN_SLICE_WIDTH)
    return -(-unembedding.shape[0] // width)


def _slice_weight(unembedding, index, num_slices):
    """Rows of the matrix for slice `index`, `[C, D]`, and where they start.

    All slices are equally wide. When V is no multiple of C the last one starts early and
    overlaps the one before it: a padded copy of the matrix would cost more than all slices.
    """
    width = -(-unembedding.shape[0] // num_slices)
    start = jnp.minimum(index * width, unembedding.shape[0] - width)
    return jax.lax.dynamic_slice_in_dim(unembedding, start, width), start


def _slice_logits(hidden, unembedding, scale, index):
    """Logits `[R, C]`, which columns `[1, C]` no earlier slice had, and their ids `[1, C]`."""
    weight, start = _slice_weight(unembedding, index, _num_slices(hidden, unembedding))
    column = (start + jnp.arange(weight.shape[0]))[None, :]
    logits = _einsum("rd,cd->rc", hidden, weight) * scale[:, None]
    return logits, column >= index * weight.shape[0], column


_einsum = partial(jnp.einsum, preferred_element_type=jnp.float32)
