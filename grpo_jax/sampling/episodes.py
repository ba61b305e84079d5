"""Sampling episodes: completions of several turns, between which an environment replies.

`begin_episodes` samples the first turn. `continue_episodes` appends the replies and samples the next turn. In between,
the host calls the environment. The cache stays on the device, and no token is encoded or computed twice.

Letters: see `sampler`. A reply has at most R tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.policy import Policy
from grpo_jax.models.rows.geometry import AT_ONCE, PromptTokens
from grpo_jax.sampling.sampler import Limits, Running, initial_state, is_running, put_at, start_decoding, token_adder

if TYPE_CHECKING:
    from grpo_jax.sampling.stopping import Stop


class Episodes(NamedTuple):
    """Completions at the end of a turn, with everything that their next turn needs."""

    cache: Any
    running: Running
    lengths: jax.Array  # int32 [N, G], the number of tokens of each completion, replies included
    computed: jax.Array  # int32 [N, G], the number of these tokens that the cache holds


def begin_episodes(
    policy: Policy,
    params: Params,
    prompt: PromptTokens,
    rows: jax.Array,
    key: jax.Array,
    *,
    max_tokens: int,
    environment_tokens: int,
    eos_ids: tuple[int, ...],
    temperature: jax.Array | float = 1.0,
    limits: Limits | None = None,
    pad_id: int = 0,
    stop: "Stop | None" = None,
    support_size: int = 0,
) -> Episodes:
    """Samples the first turn of G episodes for each of N prompts. The tokens are those that `sample_groups` samples.

    Args:
      policy, params, prompt, rows, key, temperature, limits, pad_id, support_size: See `sample_groups`.
      max_tokens: The maximum number of tokens that the policy samples in an episode.
      environment_tokens: The maximum number of tokens of all replies in an episode. T is the sum of both.
      eos_ids: The tokens that end a turn. The ending token belongs to the turn.
      stop: Ends turns whose text contains a stop text, as in `sample_groups`. Default: None.

    Returns:
      `Episodes` after one turn.
    """
    size = max_tokens + environment_tokens
    running = initial_state(rows, key, size, temperature, limits, pad_id, stop, support_size)
    extend, state = start_decoding(policy, params, prompt, running, size, eos_ids, stop)
    _, cache, running = jax.lax.while_loop(partial(is_running, max_tokens=max_tokens), extend, state)
    out = running.out._replace(turn=running.out.completion_mask.astype(jnp.int32))
    lengths = jnp.sum(out.completion_mask, axis=-1, dtype=jnp.int32)
    return Episodes(cache, running._replace(out=out), lengths, lengths - 1)


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
    stop: "Stop | None" = None,
) -> Episodes:
    """Appends the environment's replies, and samples the next turn of the episodes that continue.

    All other episodes wait. The noise of a token depends on its position in its row, so a token does not depend on how
    many turns other episodes take.

    Args:
      policy, params, max_tokens, eos_ids, stop: See `begin_episodes`.
      episodes: The episodes after the previous turn. Callers that compile this function donate them.
      replies: The tokens of the replies, int32 `[N, G, R]`; only `[..., :counts]` is read.
      counts: The number of tokens of each reply, int32 `[N, G]`, 0 without a reply. It is at most R, and at most what
        remains of environment_tokens.
      continues: True for episodes that continue, bool `[N, G]`. If false, the reply is appended and nothing else
        changes.

    Returns:
      The episodes after one more turn.
    """
    assert policy.decoder
    append, add_token = policy.decoder(params), token_adder(policy, params, eos_ids, stop)
    running, lengths = _append_replies(episodes, replies, counts, continues)
    number = jnp.max(running.out.turn, axis=-1) + 1

    def add(running: Running, hidden: jax.Array, lengths: jax.Array) -> tuple[Running, jax.Array]:
        """Adds one more token to the completions whose turn has not ended."""
        active = _is_in_turn(running, max_tokens)
        added = add_token(running, hidden, lengths, active)
        turn = put_at(added.out.turn, number, lengths, active)
        return added._replace(out=added.out._replace(turn=turn)), lengths + active

    def extend(state):
        cache, running, lengths = state
        counts = _is_in_turn(running, max_tokens).astype(jnp.int32)
        hidden, cache = append(cache, running.last_ids[..., None], lengths - 1, counts)
        return cache, *add(running, hidden[:, :, 0], lengths)

    width = min(AT_ONCE, replies.shape[-1] + 1)
    # A delta net would absorb the last token of an episode that waits a second time when the episode continues.
    done = jnp.where(continues, episodes.computed, lengths)
    hidden, cache = _compute_replies(append, episodes.cache, running.out.completion_ids, done, lengths, width)
    state = cache, *add(running, hidden, lengths)
    state = jax.lax.while_loop(lambda state: jnp.any(_is_in_turn(state[1], max_tokens)), extend, state)
    return Episodes(*state, jnp.where(continues, state[2] - 1, episodes.computed))


def _is_in_turn(running: Running, max_tokens: int) -> jax.Array:
    """Returns true for completions whose turn has not ended and that have tokens left, bool `[N, G]`."""
    return running.out.truncated & (jnp.sum(running.out.completion_mask, axis=-1) < max_tokens)


def _append_replies(
    episodes: Episodes, replies: jax.Array, counts: jax.Array, continues: jax.Array
) -> tuple[Running, jax.Array]:
    """Appends replies to completions and starts the next turn of those that continue. Also returns the new lengths."""
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
    states = jax.tree.map(jnp.zeros_like, episodes.running.stop_states)  # a stop text lies in a single turn
    return episodes.running._replace(out=out, stop_states=states), lengths


def _compute_replies(
    append: Callable[..., Any], cache: Any, ids: jax.Array, done: jax.Array, lengths: jax.Array, width: int
) -> tuple[jax.Array, Any]:
    """Computes the tokens that the cache lacks, from number `done` on: the policy's last token and the reply after it.

    `width` tokens are computed at a time. A completion with fewer tokens left writes arbitrary values after its end,
    which later tokens overwrite.

    Returns:
      The hidden state of the last token of each completion, `[N, G, D]`, and the cache.
    """

    def compute(cache: Any, done: jax.Array) -> tuple[jax.Array, Any]:
        places = done[..., None] + jnp.arange(width)
        counts = jnp.minimum(lengths - done, width)
        return append(cache, jnp.take_along_axis(ids, places, axis=-1, mode="clip"), done, counts)

    def advance(state):
        done, last, cache = state
        hidden, cache = compute(cache, done)
        place = jnp.clip(lengths - 1 - done, 0, width - 1)[..., None, None]
        at_place = jnp.take_along_axis(hidden, place, axis=2)[:, :, 0]
        has_last = (done < lengths) & (lengths <= done + width)
        return jnp.minimum(done + width, lengths), jnp.where(has_last[..., None], at_place, last), cache

    shape = jax.eval_shape(compute, cache, done)[0]
    state = done, jnp.zeros((*done.shape, shape.shape[-1]), shape.dtype), cache
    _, last, cache = jax.lax.while_loop(lambda state: jnp.any(state[0] < lengths), advance, state)
    return last, cache
