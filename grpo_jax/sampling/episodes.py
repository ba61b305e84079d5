"""Sampling of episodes: completions of several turns, between which an environment replies.

`begin_episodes` samples the first turn. `continue_episodes` appends the replies and samples the next turn. The host
asks the environment in between. The cache stays on the device, and no token is encoded or computed twice.

Letters as in `sampler`; R tokens of a reply at most.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.models.geometry import AT_ONCE
from grpo_jax.models.policy import Policy
from grpo_jax.models.transformer import Params
from grpo_jax.sampling.sampler import (
    Running,
    Truncation,
    add_token,
    initial_state,
    is_running,
    make_logits,
    put_at,
    start_decoding,
)


class Episodes(NamedTuple):
    """Completions whose turn has ended, with everything that their next turn needs."""

    cache: Any
    running: Running
    lengths: jax.Array  # int32 [N, G], tokens of each


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
    running = initial_state(rows, key, size, temperature, truncation, pad_id)
    extend, state = start_decoding(policy, params, prompt_ids, prompt_mask, running, size, eos_ids)
    _, cache, running = jax.lax.while_loop(partial(is_running, max_tokens=max_tokens), extend, state)
    out = running.out._replace(turn=running.out.completion_mask.astype(jnp.int32))
    return Episodes(cache, running._replace(out=out), jnp.sum(out.completion_mask, axis=-1, dtype=jnp.int32))


def continue_episodes(
    policy: Policy,
    params: Params,
    episodes: Episodes,
    replies: jax.Array,
    counts: jax.Array,
    continues: jax.Array,
    *,
    max_tokens: int,
    eos_ids: tuple[int, ...],
) -> Episodes:
    """Appends the environment's replies, and samples the next turn of the episodes that continue.

    The others wait. Noise depends on the place of a token in its own row, so the turns of others change no token.

    Args:
      policy, params, max_tokens, eos_ids: as in `begin_episodes`.
      episodes: after the turn before; donated by callers that compile this.
      replies: int32 `[N, G, R]`, in `[..., :counts]`.
      counts: int32 `[N, G]`, at most R, and what environment_tokens leave; 0 if there is no reply.
      continues: bool `[N, G]`; if false the reply is appended and nothing else changes.

    Returns:
      The episodes after one more turn.
    """
    assert policy.decoder
    append, logits_of = policy.decoder(params), make_logits(policy, params)
    running, lengths = _append_replies(episodes, replies, counts, continues)
    number = jnp.max(running.out.turn, axis=-1) + 1

    def add(running: Running, hidden: jax.Array, lengths: jax.Array) -> tuple[Running, jax.Array]:
        """Adds one more token to those whose turn has not ended."""
        active = _is_in_turn(running, max_tokens)
        added = add_token(logits_of, running, hidden, lengths, eos_ids, active)
        turn = put_at(added.out.turn, lengths, number, active)
        return added._replace(out=added.out._replace(turn=turn)), lengths + active

    def extend(state):
        cache, running, lengths = state
        hidden, cache = append(cache, running.last_ids[..., None], lengths - 1)
        return cache, *add(running, hidden[:, :, 0], lengths)

    width = min(AT_ONCE, replies.shape[-1] + 1)
    hidden, cache = _compute_replies(append, episodes, running.out.completion_ids, lengths, width)
    state = cache, *add(running, hidden, lengths)
    return Episodes(*jax.lax.while_loop(lambda state: jnp.any(_is_in_turn(state[1], max_tokens)), extend, state))


def _is_in_turn(running: Running, max_tokens: int) -> jax.Array:
    """Tells of each completion, bool `[N, G]`, whether its turn has not ended and has tokens left."""
    return running.out.truncated & (jnp.sum(running.out.completion_mask, axis=-1) < max_tokens)


def _append_replies(
    episodes: Episodes, replies: jax.Array, counts: jax.Array, continues: jax.Array
) -> tuple[Running, jax.Array]:
    """Returns the completions with replies behind them, those that continue in their next turn; and the lengths."""
    out, lengths = episodes.running.out, episodes.lengths + counts
    places = jnp.arange(out.completion_ids.shape[-1])
    within = places - episodes.lengths[..., None]
    reply_ids = jnp.take_along_axis(replies, jnp.clip(within, 0, replies.shape[-1] - 1), axis=-1)
    is_reply = (within >= 0) & (places < lengths[..., None])
    out = out._replace(
        completion_ids=jnp.where(is_reply, reply_ids, out.completion_ids),
        turn=jnp.where(is_reply, jnp.max(out.turn, axis=-1, keepdims=True), out.turn),
        truncated=jnp.where(continues, True, out.truncated),
    )
    return episodes.running._replace(out=out), lengths


def _compute_replies(
    append: Callable[..., Any], episodes: Episodes, ids: jax.Array, lengths: jax.Array, width: int
) -> tuple[jax.Array, Any]:
    """Computes the tokens that the cache lacks: the last one of the policy, and the reply behind it.

    `width` tokens are computed at a time. A completion with fewer tokens left writes rubbish behind its end, which the
    tokens that come there replace.

    Returns:
      The hidden state of the last token of each completion `[N, G, D]`, and the cache.
    """

    def compute(cache: Any, done: jax.Array) -> tuple[jax.Array, Any]:
        places = done[..., None] + jnp.arange(width)
        return append(cache, jnp.take_along_axis(ids, places, axis=-1, mode="clip"), done)

    def advance(state):
        done, last, cache = state
        hidden, cache = compute(cache, done)
        place = jnp.clip(lengths - 1 - done, 0, width - 1)[..., None, None]
        at_place = jnp.take_along_axis(hidden, place, axis=2)[:, :, 0]
        has_last = (done < lengths) & (lengths <= done + width)
        return jnp.minimum(done + width, lengths), jnp.where(has_last[..., None], at_place, last), cache

    done = episodes.lengths - 1
    shape = jax.eval_shape(compute, episodes.cache, done)[0]
    state = done, jnp.zeros((*done.shape, shape.shape[-1]), shape.dtype), episodes.cache
    _, last, cache = jax.lax.while_loop(lambda state: jnp.any(state[0] < lengths), advance, state)
    return last, cache
