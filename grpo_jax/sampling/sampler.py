"""Sampling of groups: the prompt once, then one token of every completion at a time.

Where an environment answers, a completion is an episode of several turns: `begin_episodes` samples the first turn, and
`continue_episodes` appends what the environment said and samples the next one. The host asks the environment in
between. The cache stays on the device, and nothing is encoded or computed twice.

Letters: N prompts, G completions of each, T completion tokens, P prompt tokens,
V vocabulary, R = N·G rows.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.functional.numerics import softcapped
from grpo_jax.functional.products import multiplies_by_columns, times_transposed, traits_of_backend
from grpo_jax.models.geometry import AT_ONCE
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
    # ---- of episodes; None where no environment answers
    turn: Any = None  # int32 [N, G, T], the turn, from 1; a token that is heard has that of what it answers; 0: none
    turn_rewards: Any = None  # float32 [N, G, K] of NumPy, what the environment gave for each turn; NaN for nothing
    ending: Any = None  # int8 [N, G] of NumPy, why the episode ended: a place in `data.episodes.ENDINGS`

    @property
    def attention_mask(self) -> jax.Array:
        """bool `[N, G, T]`, all tokens that there are: the policy's own and those of the environment."""
        return self.completion_mask if self.turn is None else self.turn > 0


class Episodes(NamedTuple):
    """Completions whose turn has ended, and what it takes to go on with them."""

    cache: Any
    rows: "_Rows"
    lengths: jax.Array  # int32 [N, G], tokens of each


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
    given: jax.Array | None = None,
) -> Completions:
    """Samples G completions of each of N prompts.

    The noise of a token depends on the key, the row and the position alone: not on the width
    of the batch or of the prompts, the number of devices, or the vocabulary.

    On a CPU, long completions are decoded in fewer and fewer rows as they end (`_widths`). The tokens stay the same.

    **Replay.** A program of this with `given` can be called twice: with −1 it draws, and with the ids that it drew it
    says what these parameters, or others, give to them. It is the same program, so for the parameters that drew them it
    repeats its log-probabilities to the bit, in bfloat16 too. A pass over whole completions sums in another order.

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
      given: int32 `[N, G, T]`, tokens to take, or −1 where one is drawn. None: all are drawn.

    Returns:
      `Completions`.
    """
    before = _given(rows, key, max_tokens, temperature, truncation, pad_id)._replace(given=spread(given, BATCH))
    rooms = rooms_of(max_tokens) if policy.widen else (max_tokens,)
    # Nothing reads the cache of a completion that has ended, so it need not stay valid.
    extend, begun = _begun(policy._replace(forgets=False), params, prompt_ids, prompt_mask, before, rooms[0], eos_ids)
    # On a mesh those that are left would not be shared out evenly.
    widths = _widths(rows.size, max_tokens) if policy.select and mesh_sizes() is None else ()
    for room, wider in itertools.pairwise(rooms):
        until = partial(_continues, max_tokens=room, fewer=widths[0] if widths else 0)
        step, cache, begun_rows = jax.lax.while_loop(until, extend, begun)
        assert policy.widen
        begun = step, policy.widen(cache, wider), begun_rows
    return _decode_all(extend, policy.select, begun, max_tokens, widths)


def begin_episodes(
    policy: Policy,
    params: Params,
    prompt_ids: jax.Array,
    prompt_mask: jax.Array,
    rows: jax.Array,
    key: jax.Array,
    *,
    max_tokens: int,
    environment_tokens: int,
    eos_ids: tuple[int, ...],
    temperature: jax.Array | float = 1.0,
    truncation: Truncation | None = None,
    pad_id: int = 0,
) -> Episodes:
    """Samples the first turn of G episodes of each of N prompts: the tokens and numbers of `sample_groups`.

    Args:
      policy, params, prompt_ids, prompt_mask, rows, key, temperature, truncation, pad_id: as in `sample_groups`.
      max_tokens: of the policy, in all turns of an episode.
      environment_tokens: of the environment, in all replies of an episode. T is the sum of both.
      eos_ids: any of these ends a turn, and belongs to it.

    Returns:
      `Episodes` after one turn.
    """
    size = max_tokens + environment_tokens
    given = _given(rows, key, size, temperature, truncation, pad_id)
    extend, begun = _begun(policy, params, prompt_ids, prompt_mask, given, size, eos_ids)
    _, cache, ended = jax.lax.while_loop(partial(_continues, max_tokens=max_tokens), extend, begun)
    out = ended.out._replace(turn=ended.out.completion_mask.astype(jnp.int32))
    return Episodes(cache, ended._replace(out=out), jnp.sum(out.completion_mask, axis=-1, dtype=jnp.int32))


def continue_episodes(
    policy: Policy,
    params: Params,
    episodes: Episodes,
    replies: jax.Array,
    counts: jax.Array,
    goes_on: jax.Array,
    *,
    max_tokens: int,
    eos_ids: tuple[int, ...],
) -> Episodes:
    """Appends what the environment said, and samples the next turn of the episodes that go on.

    The others wait. Noise depends on the place of a token in its own row, so the turns of others change no token.

    Args:
      policy, params, max_tokens, eos_ids: as in `begin_episodes`.
      episodes: after the turn before; donated by callers that compile this.
      replies: int32 `[N, G, R]`, in `[..., :counts]`.
      counts: int32 `[N, G]`, at most R, and what environment_tokens leave; 0 where there is no reply.
      goes_on: bool `[N, G]`; where false nothing changes but that the reply is appended.

    Returns:
      The episodes after one more turn.
    """
    assert policy.decoder
    append, logits_of = policy.decoder(params), _logits_of(policy, params)
    rows, lengths = _with_replies(episodes, replies, counts, goes_on)
    number = jnp.max(rows.out.turn, axis=-1) + 1

    def add(rows: _Rows, hidden: jax.Array, lengths: jax.Array) -> tuple[_Rows, jax.Array]:
        """One more token of those whose turn has not ended."""
        active = _active(rows, max_tokens)
        added = _add_token(logits_of, rows, hidden, lengths, eos_ids, active)
        turn = _put(added.out.turn, lengths, number, active)
        return added._replace(out=added.out._replace(turn=turn)), lengths + active

    def extend(carry):
        cache, rows, lengths = carry
        hidden, cache = append(cache, rows.ids[..., None], lengths - 1)
        return cache, *add(rows, hidden[:, :, 0], lengths)

    hidden, cache = _computed(append, episodes, rows.out.completion_ids, lengths, min(AT_ONCE, replies.shape[-1] + 1))
    begun = cache, *add(rows, hidden, lengths)
    return Episodes(*jax.lax.while_loop(lambda carry: jnp.any(_active(carry[1], max_tokens)), extend, begun))


def _active(rows: "_Rows", max_tokens: int) -> jax.Array:
    """Completions that are in their turn, bool `[N, G]`: it has not ended, and there are tokens left for it."""
    return rows.out.truncated & (jnp.sum(rows.out.completion_mask, axis=-1) < max_tokens)


def _with_replies(
    episodes: Episodes, replies: jax.Array, counts: jax.Array, goes_on: jax.Array
) -> tuple["_Rows", jax.Array]:
    """The rows with replies behind them, and in their turn where they go on; the lengths."""
    rows, lengths = episodes.rows, episodes.lengths + counts
    out, places = rows.out, jnp.arange(rows.out.completion_ids.shape[-1])
    within = places - episodes.lengths[..., None]
    said = jnp.take_along_axis(replies, jnp.clip(within, 0, replies.shape[-1] - 1), axis=-1)
    is_reply = (within >= 0) & (places < lengths[..., None])
    out = out._replace(
        completion_ids=jnp.where(is_reply, said, out.completion_ids),
        turn=jnp.where(is_reply, jnp.max(out.turn, axis=-1, keepdims=True), out.turn),
        truncated=jnp.where(goes_on, True, out.truncated),
    )
    return rows._replace(out=out), lengths


def _computed(
    append: Callable[..., Any], episodes: Episodes, ids: jax.Array, lengths: jax.Array, width: int
) -> tuple[jax.Array, Any]:
    """The hidden state of the last token of each completion `[N, G, D]`, and the cache with all of them but padding.

    The cache lacks the last token of the policy and what was appended behind it. `width` tokens are computed at a time;
    a completion that has no more of them writes rubbish behind its end, which the tokens that come there replace.
    """

    def chunk(cache: Any, done: jax.Array) -> tuple[jax.Array, Any]:
        places = done[..., None] + jnp.arange(width)
        return append(cache, jnp.take_along_axis(ids, places, axis=-1, mode="clip"), done)

    def more(carry):
        done, last, cache = carry
        hidden, cache = chunk(cache, done)
        place = jnp.clip(lengths - 1 - done, 0, width - 1)[..., None, None]
        state = jnp.take_along_axis(hidden, place, axis=2)[:, :, 0]
        has_last = (done < lengths) & (lengths <= done + width)
        return jnp.minimum(done + width, lengths), jnp.where(has_last[..., None], state, last), cache

    done = episodes.lengths - 1
    shape = jax.eval_shape(chunk, episodes.cache, done)[0]
    begun = done, jnp.zeros((*done.shape, shape.shape[-1]), shape.dtype), episodes.cache
    _, last, cache = jax.lax.while_loop(lambda carry: jnp.any(carry[0] < lengths), more, begun)
    return last, cache


class _Rows(NamedTuple):
    """Completions under way, with what each needs: leading axes [N, G], or [R, 1] of some of them."""

    ids: jax.Array  # int32, the last token
    uniforms: jax.Array  # [..., T, 2]
    temperature: jax.Array
    limits: Truncation
    out: Completions
    given: Any = None  # int32 [..., T], tokens to take, or −1 where one is drawn; None: all are drawn


def _given(
    rows: jax.Array,
    key: jax.Array,
    size: int,
    temperature: jax.Array | float,
    truncation: Truncation | None,
    pad_id: int,
) -> _Rows:
    """Completions before the first token, with room for `size`."""
    shape = rows.shape
    given = _Rows(
        jnp.zeros(shape, jnp.int32),
        _noise(key, rows, size),
        jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), shape),
        jax.tree.map(lambda limit: jnp.broadcast_to(limit, shape), truncation or Truncation()),
        _nothing(shape, size, pad_id, truncation),
    )
    return spread(given, BATCH)


def _begun(
    policy: Policy,
    params: Params,
    prompt_ids: jax.Array,
    prompt_mask: jax.Array,
    given: _Rows,
    room: int,
    eos_ids: tuple[int, ...],
) -> tuple[Callable[[Any], Any], tuple[jax.Array, Any, _Rows]]:
    """Returns `extend` of (step, cache, rows) by one token, and that after the first one.

    The cache has room for `room` tokens. It stays valid for completions that have ended, also where it forgets.
    """
    shape = given.ids.shape
    hidden, decode, cache = policy.prefill(params, prompt_ids, prompt_mask, shape[1], room)
    logits_of = _logits_of(policy, params)

    def add(rows: _Rows, hidden: jax.Array, step: jax.Array) -> _Rows:
        return _add_token(logits_of, rows, hidden, step, eos_ids, rows.out.truncated)

    def extend(carry):
        step, cache, rows = carry
        active = (rows.out.truncated,) if policy.forgets else ()
        hidden, cache = decode(cache, rows.ids, step - 1, *active)
        return step + 1, cache, add(rows, hidden, step)

    first = add(given, jnp.broadcast_to(hidden[:, None], (*shape, hidden.shape[-1])), jnp.int32(0))
    return extend, (jnp.int32(1), cache, first)


def _logits_of(policy: Policy, params: Params) -> Callable[[jax.Array], jax.Array]:
    """hidden `[N, G, D]` -> logits before temperature, float32 `[N, G, V]`, as `functional.token_logprobs` has them."""
    unembedding = policy.unembedding(params)
    of_tokens, of_features = unembedding_axes(unembedding.shape[0])
    unembedding = spread(unembedding, of_tokens, of_features)

    def logits_of(hidden: jax.Array) -> jax.Array:
        hidden = spread(hidden, DATA, None, of_features)
        logits = softcapped(times_transposed(hidden, unembedding, jnp.float32, by_columns=True), policy.softcap)
        # On a mesh each device has made the logits of its tokens of the vocabulary, and samples for prompts of its own.
        return spread(spread(spread(logits, DATA, None, of_tokens), BATCH, None, TENSOR), AXES)

    return logits_of


# Decoding continues with a quarter of the completions, but with no fewer than 8: on a CPU 2 take as long as 8.
_QUARTER = 4
_FEWEST = 8


def _widths(num_completions: int, max_tokens: int) -> tuple[int, ...]:
    """Returns numbers of completions to continue with when no more than that are left, from large to small."""
    least = traits_of_backend().narrows_from
    if least is None or max_tokens < least or num_completions < _QUARTER * _FEWEST:
        return ()
    fewer = num_completions // _QUARTER
    return fewer, *_widths(fewer, max_tokens)


def rooms_of(max_tokens: int) -> tuple[int, ...]:
    """Returns the tokens of a completion that the cache has room for, at first and later on: see `Traits.rooms`."""
    traits = traits_of_backend()
    if max_tokens < traits.grows_from:
        return (max_tokens,)
    return tuple(max_tokens * room // traits.rooms for room in range(1, traits.rooms + 1))


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


def _add_token(
    logits_of: Callable[[jax.Array], jax.Array],
    rows: _Rows,
    hidden: jax.Array,
    step: jax.Array,
    eos_ids: tuple[int, ...],
    running: jax.Array,
) -> _Rows:
    """Samples token `step`, of all or of each `[N, G]`, from hidden states `[N, G, D]`.

    Completions that are not running stay as they are."""
    out, logits, by_columns = rows.out, logits_of(hidden), multiplies_by_columns(hidden.dtype)
    limited, greedy = out.truncated_logprobs is not None, rows.temperature == 0
    scale = 1.0 / jnp.where(greedy, 1.0, rows.temperature)
    candidates = logits
    if limited:
        logits, scale = logits * scale[..., None], jnp.ones_like(scale)
        candidates = truncate(logits, rows.limits, running.shape)
    if step.ndim:
        uniforms = jnp.take_along_axis(rows.uniforms, step[..., None, None], axis=2, mode="clip")[:, :, 0]
    else:
        uniforms = rows.uniforms[:, :, step]
    given = None if rows.given is None else rows.given[:, :, step]
    ids, logprob = sample_categorical(
        candidates, uniforms, scale=scale, greedy=greedy, given=given, by_columns=by_columns
    )

    def put(array, value):
        return _put(array, step, value, running)

    ends = jnp.any(ids[..., None] == jnp.asarray(eos_ids, jnp.int32), axis=-1)
    out = out._replace(
        completion_ids=put(out.completion_ids, ids),
        completion_mask=put(out.completion_mask, True),
        sampler_logprobs=put(out.sampler_logprobs, _logprob_of(logits, ids) if limited else logprob),
        truncated_logprobs=put(out.truncated_logprobs, logprob) if limited else None,
        truncated=out.truncated & ~(running & ends),
    )
    if given is not None:  # padding behind the end, in a draw as in its replay: experts compute all rows together
        ids = out.completion_ids[:, :, step]
    return rows._replace(ids=ids, out=out)


def _put(array: jax.Array, step: jax.Array, value: Any, running: jax.Array) -> jax.Array:
    """The value `[N, G]` at `step` of `[N, G, T]` where running: one number for all completions, or one of each."""
    if not step.ndim:
        return array.at[:, :, step].set(jnp.where(running, value, array[:, :, step]))
    here = (jnp.arange(array.shape[-1]) == step[..., None]) & running[..., None]
    return jnp.where(here, jnp.asarray(value)[..., None], array)


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


def _logprob_of(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """log softmax(logits)[ids], `[N, G]`."""
    chosen = jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)
