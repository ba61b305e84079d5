"""Sampling of groups: the prompt once, then one token of every completion at a time.

Letters: N prompts, G completions of each, T completion tokens, P prompt tokens,
V vocabulary, R = N·G rows.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.models.policy import Policy
from grpo_jax.models.sharding import AXES, BATCH, DATA, TENSOR, mesh_sizes, spread, unembedding_axes
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

    On a CPU, long completions are decoded in fewer and fewer rows as they end (`_widths`). The tokens stay the same.

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
    given = _Rows(
        jnp.zeros(shape, jnp.int32),
        _noise(key, rows, max_tokens),
        jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), shape),
        jax.tree.map(lambda limit: jnp.broadcast_to(limit, shape), truncation or Truncation()),
        _nothing(shape, max_tokens, pad_id, truncation),
    )
    given = spread(given, BATCH)
    rooms = _rooms(max_tokens) if policy.widen else (max_tokens,)
    hidden, decode, cache = policy.prefill(params, prompt_ids, prompt_mask, shape[1], rooms[0])
    unembedding = policy.unembedding(params)
    unembedding = spread(unembedding, *unembedding_axes(unembedding.shape[0]))

    def add(rows: _Rows, hidden: jax.Array, step: jax.Array) -> _Rows:
        return _add_token(rows, _logits(hidden, unembedding), step, eos_ids)

    def extend(carry):
        step, cache, rows = carry
        hidden, cache = decode(cache, rows.ids, step - 1)
        return step + 1, cache, add(rows, hidden, step)

    first = add(given, jnp.broadcast_to(hidden[:, None], (*shape, hidden.shape[-1])), jnp.int32(0))
    begun = jnp.int32(1), cache, first
    for room, wider in itertools.pairwise(rooms):
        step, cache, begun_rows = jax.lax.while_loop(partial(_continues, max_tokens=room), extend, begun)
        assert policy.widen
        begun = step, policy.widen(cache, wider - 1), begun_rows
    # On a mesh those that are left would not be shared out evenly.
    widths = _widths(math.prod(shape), max_tokens) if policy.select and mesh_sizes() is None else ()
    return _decode_all(extend, policy.select, begun, max_tokens, widths)


class _Rows(NamedTuple):
    """Completions under way, with what each needs: leading axes [N, G], or [R, 1] of some of them."""

    ids: jax.Array  # int32, the last token
    uniforms: jax.Array  # [..., T, 2]
    temperature: jax.Array
    limits: Truncation
    out: Completions


# Decoding goes on with a quarter of the completions, but with no fewer than 8, and only where texts may be this long:
# each width is a program of its own, which takes seconds to compile. On a CPU 2 take as long as 8.
_QUARTER = 4
_FEWEST = 8
_LONG = 64


def _widths(num_completions: int, max_tokens: int) -> tuple[int, ...]:
    """Numbers of completions to go on with when no more than that are left, from large to small."""
    if jax.default_backend() != "cpu" or max_tokens < _LONG or num_completions < _QUARTER * _FEWEST:
        return ()
    fewer = num_completions // _QUARTER
    return fewer, *_widths(fewer, max_tokens)


# An accelerator reads the whole cache for every token. Where completions may be this long, the cache has half of its
# width for the first half of them: a quarter less is read. A loop more is compiled (10 to 20 s more for 28 layers).
_LONG_CACHE = 128


def _rooms(max_tokens: int) -> tuple[int, ...]:
    """Tokens of a completion that the cache has room for: at first, and later on."""
    if jax.default_backend() == "cpu" or max_tokens < _LONG_CACHE:
        return (max_tokens,)
    return max_tokens // 2, max_tokens


def _continues(carry: Any, *, max_tokens: int, fewer: int = 0) -> jax.Array:
    """Whether more than `fewer` completions have neither ended nor `max_tokens` tokens."""
    step, _, rows = carry
    return (step < max_tokens) & (jnp.sum(rows.out.truncated) > fewer)


def _decode_all(
    extend: Callable[[Any], Any],
    select: Callable[[Any, jax.Array], Any] | None,
    begun: tuple[jax.Array, Any, _Rows],
    max_tokens: int,
    widths: tuple[int, ...],
) -> Completions:
    """Adds tokens until all have ended. When at most widths[0] are left, it copies these and goes on with them alone.

    Args:
      extend: (step, cache, rows) -> the same after one more token of each.
      select: `Policy.select`.
      begun: (step, cache, rows) after the first token.
      max_tokens: T.
      widths: of `_widths`.

    Returns:
      All completions.
    """
    fewer = widths[0] if widths else 0
    step, cache, rows = jax.lax.while_loop(partial(_continues, max_tokens=max_tokens, fewer=fewer), extend, begun)
    if not widths or select is None:
        return rows.out
    chosen = jnp.argsort(~rows.out.truncated.ravel(), stable=True)[:fewer]  # those that have not ended come first
    place = jnp.divmod(chosen, rows.ids.shape[1])
    few = jax.tree.map(lambda x: x[place][:, None], rows)
    out = _decode_all(extend, select, (step, select(cache, chosen), few), max_tokens, widths[1:])
    return jax.tree.map(lambda whole, part: whole.at[place].set(part[:, 0]), rows.out, out)


def _nothing(shape: tuple[int, ...], max_tokens: int, pad_id: int, limits: Truncation | None) -> Completions:
    """Completions before the first token: none has ended yet."""
    ids = jnp.full((*shape, max_tokens), pad_id, jnp.int32)
    zeros = jnp.zeros(ids.shape, jnp.float32)
    truncated_logprobs = zeros if jax.tree.leaves(limits) else None
    return Completions(ids, jnp.zeros(ids.shape, bool), zeros, truncated_logprobs, jnp.ones(shape, bool))


def _add_token(rows: _Rows, logits: jax.Array, step: jax.Array, eos_ids: tuple[int, ...]) -> _Rows:
    """Samples token `step` from logits `[N, G, V]` before temperature. Completions that have ended stay as they are."""
    running, out = rows.out.truncated, rows.out
    limited, greedy = out.truncated_logprobs is not None, rows.temperature == 0
    scale = 1.0 / jnp.where(greedy, 1.0, rows.temperature)
    candidates = logits
    if limited:
        logits, scale = logits * scale[..., None], jnp.ones_like(scale)
        candidates = truncate(logits, rows.limits, running.shape)
    ids, logprob = sample_categorical(candidates, rows.uniforms[:, :, step], scale=scale, greedy=greedy)

    def put(array, value):
        return array.at[:, :, step].set(jnp.where(running, value, array[:, :, step]))

    ends = jnp.any(ids[..., None] == jnp.asarray(eos_ids, jnp.int32), axis=-1)
    out = Completions(
        put(out.completion_ids, ids),
        put(out.completion_mask, True),
        put(out.sampler_logprobs, _logprob_of(logits, ids) if limited else logprob),
        put(out.truncated_logprobs, logprob) if limited else None,
        running & ~ends,
    )
    return rows._replace(ids=ids, out=out)


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


def _logits(hidden: jax.Array, unembedding: jax.Array) -> jax.Array:
    """Logits before temperature, float32 `[N, G, V]`, as `functional.token_logprobs` computes them."""
    of_tokens, of_features = unembedding_axes(unembedding.shape[0])
    hidden = spread(hidden, DATA, None, of_features)
    logits = jnp.einsum("ngd,vd->ngv", hidden, unembedding, preferred_element_type=jnp.float32)
    # On a mesh each device has made the logits of its tokens of the vocabulary, and samples for prompts of its own.
    return spread(spread(spread(logits, DATA, None, of_tokens), BATCH, None, TENSOR), AXES)


def _logprob_of(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """log softmax(logits)[ids], `[N, G]`."""
    chosen = jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)
