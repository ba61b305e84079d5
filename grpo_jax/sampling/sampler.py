"""Sampling of groups: the prompt once, then one token of every completion at a time.

Letters: N prompts, G completions of each, T completion tokens, P prompt tokens,
V vocabulary, R = N·G rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.models.policy import Policy
from grpo_jax.models.transformer import Params
from grpo_jax.sampling.categorical import sample_categorical
from grpo_jax.sampling.truncation import Truncation, truncate


class Completions(NamedTuple):
    """What was sampled. Log-probabilities are in nats, 0 where masked."""

    completion_ids: jax.Array  # int32 [N, G, T], `pad_id` where masked
    completion_mask: jax.Array  # bool [N, G, T], true up to and including the token that ended the row
    sampler_logprobs: jax.Array  # [N, G, T], of the softmax after temperature: what a scorer computes
    truncated_logprobs: jax.Array | None  # [N, G, T], after top-k, top-p and min-p too; None without them
    truncated: jax.Array  # bool [N, G], no token ended the row within T


def sample_groups(
    policy: Policy,
    params: Params,
    prompt_ids: jax.Array,
    prompt_mask: jax.Array,
    rows: jax.Array,
    key: jax.Array,
    *,
    max_tokens: int,
    eos_ids: tuple[int, ...],
    temperature: jax.Array | float = 1.0,
    truncation: Truncation | None = None,
    pad_id: int = 0,
) -> Completions:
    """Samples G completions of each of N prompts.

    The noise of a token depends on the key, the row and the position alone: not on the width
    of the batch or of the prompts, the number of devices, or the vocabulary.

    Args:
      policy: the model's functions.
      params: its parameters.
      prompt_ids: int `[N, P]`, padded on the left.
      prompt_mask: bool `[N, P]`, true on tokens of the prompt; at least one a row.
      rows: int `[N, G]`, numbers of the completions, unique within a step, that key the noise.
      key: consumed; one for each step.
      max_tokens: T.
      eos_ids: any of these ends a row, and belongs to it.
      temperature: broadcasts against `[N, G]`; 0 takes the likeliest token, and the
        log-probabilities are then those at temperature 1. Default 1.
      truncation: limits on the candidates, or None.
      pad_id: fills completion_ids after the end.

    Returns:
      `Completions`.
    """
    shape = rows.shape
    limits = truncation if truncation and any(limit is not None for limit in truncation) else None
    temperature = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), shape)
    uniforms = _noise(key, rows, max_tokens)
    hidden, decode, cache = policy.prefill(params, prompt_ids, prompt_mask, shape[1], max_tokens)
    unembedding = policy.unembedding(params)

    def choose(hidden: jax.Array, step: jax.Array) -> _Token:
        scaled = _logits(hidden, unembedding, temperature)
        candidates = scaled if limits is None else truncate(scaled, limits, shape)
        ids, logprob = sample_categorical(candidates, uniforms[:, :, step], greedy=temperature == 0)
        return _Token(ids, logprob, None) if limits is None else _Token(ids, _logprob_of(scaled, ids), logprob)

    def continues(carry):
        step, _, _, out = carry
        return (step < max_tokens) & jnp.any(out.truncated)

    def extend(carry):
        step, cache, ids, out = carry
        hidden, cache = decode(cache, ids, step - 1)
        token = choose(hidden, step)
        return step + 1, cache, token.ids, _append(out, token, step, eos_ids)

    first = choose(jnp.broadcast_to(hidden[:, None], (*shape, hidden.shape[-1])), jnp.int32(0))
    out = _append(_nothing(shape, max_tokens, pad_id, first), first, jnp.int32(0), eos_ids)
    *_, out = jax.lax.while_loop(continues, extend, (jnp.int32(1), cache, first.ids, out))
    return out


class _Token(NamedTuple):
    """One token of every row, `[N, G]` each, named as in `Completions`."""

    ids: jax.Array
    logprob: jax.Array
    truncated_logprob: jax.Array | None


def _nothing(shape: tuple[int, ...], max_tokens: int, pad_id: int, token: _Token) -> Completions:
    """Completions before the first token: no row has ended yet."""
    ids = jnp.full((*shape, max_tokens), pad_id, jnp.int32)
    zeros = jnp.zeros(ids.shape, jnp.float32)
    truncated_logprobs = None if token.truncated_logprob is None else zeros
    return Completions(ids, jnp.zeros(ids.shape, bool), zeros, truncated_logprobs, jnp.ones(shape, bool))


def _append(out: Completions, token: _Token, step: jax.Array, eos_ids: tuple[int, ...]) -> Completions:
    """Writes a token at `step` to the rows that have not ended. Those it ends keep it."""
    running = out.truncated

    def put(array, value):
        return None if array is None else array.at[:, :, step].set(jnp.where(running, value, array[:, :, step]))

    ends = jnp.any(token.ids[..., None] == jnp.asarray(eos_ids, jnp.int32), axis=-1)
    return Completions(
        put(out.completion_ids, token.ids),
        put(out.completion_mask, True),
        put(out.sampler_logprobs, token.logprob),
        put(out.truncated_logprobs, token.truncated_logprob),
        running & ~ends,
    )


def _noise(key: jax.Array, rows: jax.Array, max_tokens: int) -> jax.Array:
    """Two uniforms for each token, `[N, G, T, 2]`, keyed by (key, row, position).

    The key is folded with both in a scan, which compiles one hash instead of two.
    """
    shape = (*rows.shape, max_tokens)
    numbers = (jnp.broadcast_to(x, shape).ravel() for x in (rows[..., None], jnp.arange(max_tokens)))

    def fold(keys, number):
        return jax.vmap(jax.random.fold_in)(keys, number), None

    keys, _ = jax.lax.scan(fold, jnp.broadcast_to(key, shape).ravel(), jnp.stack([*numbers]))
    return jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys).reshape(*shape, 2)


def _logits(hidden: jax.Array, unembedding: jax.Array, temperature: jax.Array) -> jax.Array:
    """Logits after temperature, float32 `[N, G, V]`, as `functional.token_logprobs` computes them."""
    inverse = 1.0 / jnp.where(temperature == 0, 1.0, temperature)
    return jnp.einsum("ngd,vd->ngv", hidden, unembedding, preferred_element_type=jnp.float32) * inverse[..., None]


def _logprob_of(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """log softmax(logits)[ids], `[N, G]`."""
    chosen = jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)
