"""Sampling of groups: the prompt once, then one token of every completion at a time.

Letters: N prompts of P tokens, G completions of T tokens each, D features, V tokens of the vocabulary.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.functional.numerics import softcapped
from grpo_jax.functional.products import multiplies_by_columns, times_transposed, traits_of_backend
from grpo_jax.models.policy import Policy
from grpo_jax.models.sharding import AXES, BATCH, DATA, TENSOR, mesh_sizes, spread, unembedding_axes
from grpo_jax.models.transformer import Params
from grpo_jax.sampling.categorical import Truncation, draw_noise, sample_categorical, truncate


class Completions(NamedTuple):
    """Sampled completions. Log-probabilities are in nats, 0 on masked tokens."""

    completion_ids: jax.Array  # int32 [N, G, T], `pad_id` on masked tokens
    completion_mask: jax.Array  # bool [N, G, T], true up to and including the token that ended the row
    sampler_logprobs: jax.Array  # [N, G, T], of the softmax after temperature: what a scorer computes
    truncated_logprobs: jax.Array | None  # [N, G, T], after top-k, top-p and min-p too; None without them
    truncated: jax.Array  # bool [N, G], no token ended the row within T
    # ---- of episodes; None without an environment
    turn: Any = None  # int32 [N, G, T], the turn, from 1; a reply has that of the turn before it; 0: none
    turn_rewards: Any = None  # float32 [N, G, K] of NumPy, the environment's reward for each turn; NaN: none
    ending: Any = None  # int8 [N, G] of NumPy, why the episode ended: a place in `data.episodes.ENDINGS`

    @property
    def attention_mask(self) -> jax.Array:
        """All tokens of the policy and of the environment, bool `[N, G, T]`."""
        return self.completion_mask if self.turn is None else self.turn > 0


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

    The noise of a token depends only on the key, the row and the position: not on the width
    of the batch or of the prompts, the number of devices, or the vocabulary.

    Long completions are decoded in fewer and fewer rows as they end, unless `policy.select` is None (`_widths`). This
    changes nothing but the rounding of products with fewer rows.

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
    running = initial_state(rows, key, max_tokens, temperature, truncation, pad_id)
    rooms = rooms_of(max_tokens) if policy.widen else (max_tokens,)
    # Nothing reads the cache of a completion that has ended, so it need not stay valid.
    policy = policy._replace(forgets=False)
    extend, state = start_decoding(policy, params, prompt_ids, prompt_mask, running, rooms[0], eos_ids)
    widths = _widths(policy, params, state[1], rows.size, max_tokens)
    for room, wider in itertools.pairwise(rooms):
        until = partial(is_running, max_tokens=room, fewer=widths[0] if widths else 0)
        step, cache, running = jax.lax.while_loop(until, extend, state)
        assert policy.widen
        state = step, policy.widen(cache, wider), running
    return _decode_all(extend, policy.select, state, max_tokens, widths)


class Running(NamedTuple):
    """Completions that are being sampled. Leading axes are [N, G], or [R, 1] if R of them are left."""

    last_ids: jax.Array  # int32, the last token
    uniforms: jax.Array  # [..., T, 2]
    temperature: jax.Array
    limits: Truncation
    out: Completions  # so far


def initial_state(
    rows: jax.Array,
    key: jax.Array,
    size: int,
    temperature: jax.Array | float,
    truncation: Truncation | None,
    pad_id: int,
) -> Running:
    """Returns completions before the first token, with room for `size` tokens. Arguments as of `sample_groups`."""
    shape = rows.shape
    zeros = jnp.zeros((*shape, size), jnp.float32)
    out = Completions(
        completion_ids=jnp.full(zeros.shape, pad_id, jnp.int32),
        completion_mask=jnp.zeros(zeros.shape, bool),
        sampler_logprobs=zeros,
        truncated_logprobs=zeros if jax.tree.leaves(truncation) else None,
        truncated=jnp.ones(shape, bool),
    )
    running = Running(
        last_ids=jnp.zeros(shape, jnp.int32),
        uniforms=draw_noise(key, rows, size),
        temperature=jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), shape),
        limits=jax.tree.map(lambda limit: jnp.broadcast_to(limit, shape), truncation or Truncation()),
        out=out,
    )
    return spread(running, BATCH)


def start_decoding(
    policy: Policy,
    params: Params,
    prompt_ids: jax.Array,
    prompt_mask: jax.Array,
    running: Running,
    room: int,
    eos_ids: tuple[int, ...],
) -> tuple[Callable[[Any], Any], tuple[jax.Array, Any, Running]]:
    """Computes the prompts and samples the first token.

    If `policy.forgets`, the cache stays valid for completions that have ended.

    Args:
      policy, params, prompt_ids, prompt_mask, eos_ids: as in `sample_groups`.
      running: before the first token.
      room: tokens of a completion that the cache has room for.

    Returns:
      A function that extends (step, cache, running) by one token; and these after the first token.
    """
    shape = running.last_ids.shape
    hidden, decode, cache = policy.prefill(params, prompt_ids, prompt_mask, shape[1], room)
    logits_of = make_logits(policy, params)

    def add(running: Running, hidden: jax.Array, step: jax.Array) -> Running:
        return add_token(logits_of, running, hidden, step, eos_ids, running.out.truncated)

    def extend(state):
        step, cache, running = state
        active = (running.out.truncated,) if policy.forgets else ()
        hidden, cache = decode(cache, running.last_ids, step - 1, *active)
        return step + 1, cache, add(running, hidden, step)

    first = add(running, jnp.broadcast_to(hidden[:, None], (*shape, hidden.shape[-1])), jnp.int32(0))
    return extend, (jnp.int32(1), cache, first)


def make_logits(policy: Policy, params: Params) -> Callable[[jax.Array], jax.Array]:
    """Makes the function of hidden states `[N, G, D]` to logits before temperature, float32 `[N, G, V]`.

    They are those of `functional.token_logprobs`.
    """
    unembedding = policy.unembedding(params)
    of_tokens, of_features = unembedding_axes(unembedding.shape[0])
    unembedding = spread(unembedding, of_tokens, of_features)

    def logits_of(hidden: jax.Array) -> jax.Array:
        hidden = spread(hidden, DATA, None, of_features)
        logits = softcapped(times_transposed(hidden, unembedding, jnp.float32, by_columns=True), policy.softcap)
        # On a mesh each device has the logits of its tokens of the vocabulary, and then samples for its prompts.
        return spread(spread(spread(logits, DATA, None, of_tokens), BATCH, None, TENSOR), AXES)

    return logits_of


# Decoding continues with a quarter of the completions, but with no fewer than 8: on a CPU 2 take as long as 8.
_QUARTER = 4
_FEWEST = 8
# A decode step with fewer completions must read at most this share of the bytes, or it is not worth its compilation.
# Their number is then halved until it does.
_WORTHWHILE = 0.75


def _widths(policy: Policy, params: Params, cache: Any, num_completions: int, max_tokens: int) -> tuple[int, ...]:
    """Returns numbers of completions to continue with when no more than that are left, from large to small.

    Every completion that is left gets a copy of its prompt's keys and values. With long prompts and large groups, few
    completions can therefore read more than all of them did. Large weights are read for any number of completions.
    """
    traits, select = traits_of_backend(), policy.select
    # On a mesh the completions that are left would not be spread evenly.
    if select is None or mesh_sizes() is not None or max_tokens < traits.narrows_from:
        return ()
    weights = 0
    if traits.is_bound_by_memory:
        dtype = jax.eval_shape(policy.unembedding, params).dtype
        weights = dtype.itemsize * sum(x.size for x in jax.tree.leaves(params))
    widths: list[int] = []
    bytes_read, fewer = weights + _num_bytes(cache), num_completions // _QUARTER
    while fewer >= _FEWEST and len(widths) < traits.narrowings:
        chosen = jax.ShapeDtypeStruct((fewer,), jnp.int32)
        bytes_of_fewer = weights + _num_bytes(jax.eval_shape(select, cache, chosen))
        is_worthwhile = bytes_of_fewer <= _WORTHWHILE * bytes_read
        if is_worthwhile:
            widths.append(fewer)
            bytes_read = bytes_of_fewer
        fewer //= _QUARTER if is_worthwhile else 2
    return tuple(widths)


def _num_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def rooms_of(max_tokens: int) -> tuple[int, ...]:
    """Returns the tokens of a completion that the cache has room for, at first and later on: see `Traits.rooms`."""
    traits = traits_of_backend()
    if max_tokens < traits.grows_from:
        return (max_tokens,)
    return tuple(max_tokens * room // traits.rooms for room in range(1, traits.rooms + 1))


def is_running(state: Any, *, max_tokens: int, fewer: int = 0) -> jax.Array:
    """Tells whether more than `fewer` completions of (step, cache, running) have neither ended nor `max_tokens`."""
    step, _, running = state
    return (step < max_tokens) & (jnp.sum(running.out.truncated) > fewer)


def _decode_all(
    extend: Callable[[Any], Any],
    select: Callable[[Any, jax.Array], Any] | None,
    state: tuple[jax.Array, Any, Running],
    max_tokens: int,
    widths: tuple[int, ...],
) -> Completions:
    """Adds tokens until all have ended. When at most widths[0] are left, it copies these and continues with them only.

    Args:
      extend: (step, cache, running) -> the same after one more token of each.
      select: `Policy.select`.
      state: (step, cache, running) after the first token.
      max_tokens: T.
      widths: of `_widths`.

    Returns:
      All completions.
    """
    fewer = widths[0] if widths else 0
    step, cache, running = jax.lax.while_loop(partial(is_running, max_tokens=max_tokens, fewer=fewer), extend, state)
    if not widths or select is None:
        return running.out
    chosen = jnp.argsort(~running.out.truncated.ravel(), stable=True)[:fewer]  # those that have not ended come first
    place = jnp.divmod(chosen, running.last_ids.shape[1])
    few = jax.tree.map(lambda x: x[place][:, None], running)
    out = _decode_all(extend, select, (step, select(cache, chosen), few), max_tokens, widths[1:])
    return jax.tree.map(lambda whole, part: whole.at[place].set(part[:, 0]), running.out, out)


def add_token(
    logits_of: Callable[[jax.Array], jax.Array],
    running: Running,
    hidden: jax.Array,
    step: jax.Array,
    eos_ids: tuple[int, ...],
    active: jax.Array,
) -> Running:
    """Samples the next token of active completions. The others stay as they are.

    Args:
      logits_of: of `make_logits`.
      running: all completions.
      hidden: `[N, G, D]`, the states that predict the token.
      step: int32, the token's place: a scalar for all completions, or `[N, G]`.
      eos_ids: any of these ends a completion.
      active: bool `[N, G]`.
    """
    ids, logprobs, truncated_logprobs = _draw(running, logits_of(hidden), step, multiplies_by_columns(hidden.dtype))

    def put(array, value):
        return put_at(array, step, value, active)

    ends, out = jnp.any(ids[..., None] == jnp.asarray(eos_ids, jnp.int32), axis=-1), running.out
    out = out._replace(
        completion_ids=put(out.completion_ids, ids),
        completion_mask=put(out.completion_mask, True),
        sampler_logprobs=put(out.sampler_logprobs, logprobs),
        truncated_logprobs=None if truncated_logprobs is None else put(out.truncated_logprobs, truncated_logprobs),
        truncated=out.truncated & ~(active & ends),
    )
    return running._replace(last_ids=ids, out=out)


def _draw(
    running: Running, logits: jax.Array, step: jax.Array, by_columns: bool
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Draws tokens `[N, G]` from logits `[N, G, V]`. Returns their log-probabilities before and after truncation."""
    greedy = running.temperature == 0
    scale = 1.0 / jnp.where(greedy, 1.0, running.temperature)
    if step.ndim:
        uniforms = jnp.take_along_axis(running.uniforms, step[..., None, None], axis=2, mode="clip")[:, :, 0]
    else:
        uniforms = running.uniforms[:, :, step]
    draw = partial(sample_categorical, uniforms=uniforms, greedy=greedy, by_columns=by_columns)
    if running.out.truncated_logprobs is None:
        return *draw(logits, scale=scale), None
    logits = logits * scale[..., None]
    ids, truncated_logprobs = draw(truncate(logits, running.limits, greedy.shape))
    logprobs = jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(logits, axis=-1)
    return ids, logprobs, truncated_logprobs


def put_at(array: jax.Array, step: jax.Array, value: Any, active: jax.Array) -> jax.Array:
    """Puts a value `[N, G]` at `step` of `[N, G, T]` for active completions; a step as in `add_token`."""
    if not step.ndim:
        return array.at[:, :, step].set(jnp.where(active, value, array[:, :, step]))
    is_there = (jnp.arange(array.shape[-1]) == step[..., None]) & active[..., None]
    return jnp.where(is_there, jnp.asarray(value)[..., None], array)
