"""Sampling groups of completions: computes each prompt once, then one token of every completion at a time.

Letters: N prompts of P tokens, G completions of T tokens each, D features, V tokens of the vocabulary.

Tokens are sampled by inverting the distribution function. This needs two random numbers per token, and the Gumbel trick
needs V. With a vocabulary of 32 thousand, inversion is 20 times faster on CPU, and the noise does not depend on V.

Top-k, top-p and min-p are each a threshold on the probability: a rule keeps the tokens whose probability is at least
some number. Instead of sorting the vocabulary, the largest number that keeps enough (k tokens, or a mass of p) is found
by bisection on the bits of the float, with 31 sums over the vocabulary. Ties at the threshold are kept.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.functional.numerics import softcapped
from grpo_jax.functional.products import (
    exp_sums,
    multiplies_by_columns,
    times_transposed,
    traits_of_backend,
    write_slice,
)
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.params.sharding import AXES, BATCH, DATA, TENSOR, mesh_sizes, spread, unembedding_axes
from grpo_jax.models.policy import Policy
from grpo_jax.models.rows.geometry import PromptTokens

if TYPE_CHECKING:  # loaded only with stop texts
    from grpo_jax.sampling.stopping import Stop

# ---- one token


class Limits(NamedTuple):
    """Limits on the candidate tokens. Each limit applies to the tokens that the previous limits kept.

    Each limit broadcasts against the rows `[N, G]`, or is None and does not apply.
    """

    top_k: jax.Array | int | None = None  # the number of likeliest tokens to keep; 0 or less keeps all
    top_p: jax.Array | float | None = None  # keep the fewest likeliest tokens whose total probability is at least this
    min_p: jax.Array | float | None = None  # keep tokens with at least this fraction of the largest probability


def limits_of(top_k: int, top_p: float, min_p: float) -> Limits:
    """Returns the limits that options set, in which a `top_k` of 0, a `top_p` of 1 and a `min_p` of 0 mean none."""
    return Limits(top_k=top_k or None, top_p=top_p if top_p < 1 else None, min_p=min_p or None)


def limit_logits(logits: jax.Array, limits: Limits, shape: tuple[int, ...]) -> jax.Array:
    """Sets the logits of tokens outside the limits to −inf.

    Args:
      logits: The logits after temperature, float32 `[N, G, V]`.
      limits: The limits on the candidate tokens.
      shape: (N, G).

    Returns:
      The logits `[N, G, V]`. The likeliest token is always kept.
    """
    probs = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))  # scaled so that the largest is 1
    threshold = jnp.zeros((*shape, 1), jnp.float32)
    top_k, top_p, min_p = jax.tree.map(lambda limit: jnp.broadcast_to(limit, shape)[..., None], limits)
    if top_k is not None:
        k = jnp.where(top_k > 0, jnp.minimum(top_k, logits.shape[-1]), logits.shape[-1])
        threshold = _largest_threshold(probs, jnp.ones_like(probs), k.astype(jnp.float32))
    if top_p is not None:
        mass = jnp.where(probs >= threshold, probs, 0)
        target = top_p * jnp.sum(mass, axis=-1, keepdims=True)
        # Rounded sums reach the whole mass before the last token, and p = 1 must keep every token.
        nucleus = jnp.where(top_p < 1, _largest_threshold(probs, mass, target), 0)
        threshold = jnp.maximum(threshold, nucleus)
    if min_p is not None:
        threshold = jnp.maximum(threshold, min_p)
    return jnp.where(probs >= jnp.minimum(threshold, 1), logits, -jnp.inf)


def _largest_threshold(probs: jax.Array, weights: jax.Array, target: jax.Array) -> jax.Array:
    """Finds the largest x in [0, 1] with Σ_{v: p[v] ≥ x} w[v] ≥ target, `[..., 1]`."""

    def halve(_, bounds):
        low, high = bounds  # enough weight above low, too little above high
        middle = low + (high - low) // 2
        x = jax.lax.bitcast_convert_type(middle, jnp.float32)
        enough = jnp.sum(jnp.where(probs >= x, weights, 0), axis=-1, keepdims=True) >= target
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    # The bits of positive floats, read as integers, have the order of the floats.
    one = jax.lax.bitcast_convert_type(jnp.float32(1), jnp.int32)
    bounds = jnp.zeros(target.shape, jnp.int32), jnp.full(target.shape, one + 1)
    low, _ = jax.lax.fori_loop(0, 31, halve, bounds)
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def keep_support(logits: jax.Array, ids: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns the likeliest tokens that the limits left, among them the sampled ones.

    Args:
      logits: The logits within the limits, float32 `[N, G, V]`.
      ids: The sampled tokens, int32 `[N, G]`.
      size: The number of tokens to keep, K.

    Returns:
      Different tokens, int32 `[N, G, K]`, −1 where fewer are left; and log-probabilities of the sampled tokens among
      them, `[N, G]`.
    """
    likeliest = limit_logits(logits, Limits(top_k=size), ids.shape) > -jnp.inf
    tokens = _true_places(likeliest, size)
    values = jnp.where(tokens >= 0, jnp.take_along_axis(logits, tokens, axis=-1, mode="clip"), -jnp.inf)
    # A sampled token that is less likely than K others takes the place of the least likely of these.
    is_missing = ~jnp.any(tokens == ids[..., None], axis=-1, keepdims=True)
    is_replaced = is_missing & (jnp.arange(size) == jnp.argmin(values, axis=-1, keepdims=True))
    chosen = jnp.take_along_axis(logits, ids[..., None], axis=-1)
    values = jnp.where(is_replaced, chosen, values)
    return jnp.where(is_replaced, ids[..., None], tokens), chosen[..., 0] - jax.nn.logsumexp(values, axis=-1)


def _true_places(mask: jax.Array, size: int) -> jax.Array:
    """Returns the first `size` places of true elements, bool `[..., V]` -> int32 `[..., size]`, −1 if there are fewer.

    First the block of the vocabulary is found, and then the place in it. On a CPU a sort takes four times as long as
    everything else in a decode step.
    """
    vocab_size = mask.shape[-1]
    width = math.isqrt(vocab_size - 1) + 1
    blocks = jnp.pad(mask, [*[(0, 0)] * (mask.ndim - 1), (0, -vocab_size % width)])
    blocks = blocks.reshape(*mask.shape[:-1], -1, width)
    counts = jnp.sum(blocks, axis=-1, dtype=jnp.int32)
    ends, number = jnp.cumsum(counts, axis=-1), jnp.arange(1, size + 1)
    block = jnp.sum(ends[..., None, :] < number[:, None], axis=-1, dtype=jnp.int32)
    before = jnp.take_along_axis(ends - counts, block, axis=-1, mode="clip")
    chosen = jnp.take_along_axis(blocks, block[..., None], axis=-2, mode="clip")
    running = jnp.cumsum(chosen, axis=-1, dtype=jnp.int32)
    place = jnp.sum(running < (number - before)[..., None], axis=-1, dtype=jnp.int32)
    return jnp.where(block < counts.shape[-1], block * width + place, -1)


def sample_categorical(
    logits: jax.Array,
    uniforms: jax.Array,
    *,
    scale: jax.Array | float = 1.0,
    greedy: jax.Array | None = None,
    by_columns: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Samples v with probability softmax(scale · logits)[v]: first a block of the vocabulary, then a token in it.

    Each choice is the first i at which the running sum exceeds u times the total. Two uniforms give both choices full
    resolution, and a single uniform would be rounded to 2⁻²³ of the whole vocabulary.

    Args:
      logits: The logits, float32 `[..., V]`. A token with logit −inf is never sampled.
      uniforms: Random numbers in [0, 1), `[..., 2]`.
      scale: 1/temperature, above 0; broadcasts against `[...]`. Default 1. Scaling the logits beforehand would write
        and read one more array of their size, which takes a GPU a twentieth of a decode step.
      greedy: True for rows that take the largest logit instead, bool `[...]`.
      by_columns: True if the vocabulary is the first axis in memory, as `times_transposed` by columns leaves it. This
        does not change the tokens.

    Returns:
      Token ids, int32 `[...]`, and their log-probabilities `[...]` in nats.
    """
    vocab_size, shape = logits.shape[-1], logits.shape[:-1]
    axis = 0 if by_columns else len(shape)
    width = math.isqrt(vocab_size - 1) + 1  # tokens in a block; the last block may have fewer
    end = vocab_size - vocab_size % width
    scale = jnp.broadcast_to(jnp.asarray(scale, jnp.float32), shape)

    def by_row(x: jax.Array) -> jax.Array:
        return jnp.expand_dims(x, axis)

    def in_blocks(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Splits the vocabulary into whole blocks and the rest, since padding would make one more array of its size."""
        whole, rest = jnp.split(x, [end], axis)
        return whole.reshape(*shape[:axis], -1, width, *shape[axis:]), jnp.expand_dims(rest, axis)

    logits = jnp.moveaxis(logits, -1, axis)
    if traits_of_backend().sums_at_once:
        parts = [exp_sums(x, axis=axis + 1) for x in in_blocks(logits * by_row(scale))]
        maxima, sums = (jnp.concatenate(x, axis) for x in zip(*parts, strict=True))
        maximum = jnp.max(maxima, axis)
        sums = sums * jnp.exp(maxima - by_row(maximum))
    else:
        maximum = jnp.max(logits, axis)

    def exponents(logits: jax.Array) -> jax.Array:
        """Returns scale · (logits − their maximum)."""
        if traits_of_backend().sums_at_once:
            return logits * by_row(scale) - by_row(maximum)
        return (logits - by_row(maximum)) * by_row(scale)

    weights = jnp.exp(exponents(logits))
    if not traits_of_backend().sums_at_once:
        sums = jnp.concatenate([jnp.sum(x, axis + 1) for x in in_blocks(weights)], axis)
    first = _invert(sums, uniforms[..., 0], axis) * width
    tokens = by_row(first) + jnp.arange(width).reshape([width if x == axis else 1 for x in range(logits.ndim)])
    chosen = jnp.where(tokens < vocab_size, jnp.take_along_axis(weights, tokens, axis, mode="clip"), 0)
    ids = first + _invert(chosen, uniforms[..., 1], axis)
    if greedy is not None:
        # On CPU the arg max takes as long as everything else in this function, and is rarely needed.
        likeliest = jax.lax.cond(jnp.any(greedy), lambda: jnp.argmax(logits, axis).astype(jnp.int32), lambda: ids)
        ids = jnp.where(greedy, likeliest, ids)
    exponent = exponents(jnp.take_along_axis(logits, by_row(ids), axis)).squeeze(axis)
    return ids, exponent - jnp.log(jnp.sum(sums, axis))


def _invert(weights: jax.Array, uniform: jax.Array, axis: int) -> jax.Array:
    """Finds the first i along an axis with w₀ + … + wᵢ > u Σ w, int32 `[...]`, and never an i with wᵢ = 0."""
    # Rounding in a parallel prefix sum may raise it at a weight of 0. There it is set to 0, which is below any target.
    running = jnp.where(weights > 0, jnp.cumsum(weights, axis), 0)
    total = jnp.max(running, axis, keepdims=True)
    # Rounding could also raise the target to the total, which no running sum exceeds.
    target = jnp.minimum(jnp.expand_dims(uniform, axis) * total, jnp.nextafter(total, 0.0))
    return jnp.argmax(running > target, axis).astype(jnp.int32)


def draw_noise(key: jax.Array, rows: jax.Array, max_tokens: int) -> jax.Array:
    """Draws two uniforms for each token, `[N, G, T, 2]`, that depend only on (key, row, position).

    The row and the position are folded into the key in a scan, which compiles one hash instead of two.

    Args:
      key: The random key of a step.
      rows: The numbers of the completions, int `[N, G]`.
      max_tokens: The maximum number of tokens of a completion, T.
    """
    shape = (*rows.shape, max_tokens)
    numbers = (jnp.broadcast_to(x, shape).ravel() for x in (rows[..., None], jnp.arange(max_tokens)))

    def fold(keys, number):
        return jax.vmap(jax.random.fold_in)(keys, number), None

    keys, _ = jax.lax.scan(fold, jnp.broadcast_to(key, shape).ravel(), jnp.stack([*numbers]))
    return jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys).reshape(*shape, 2)


# ---- groups of completions


class Completions(NamedTuple):
    """Sampled completions. Log-probabilities are in nats, and 0 on masked tokens."""

    completion_ids: jax.Array  # int32 [N, G, T], `pad_id` on masked tokens
    completion_mask: jax.Array  # bool [N, G, T], true up to and including the token that ended the row
    sampler_logprobs: jax.Array  # [N, G, T], after temperature, of the distribution that a scorer computes too
    processed_logprobs: jax.Array | None  # [N, G, T], after top-k, top-p and min-p too; None without them
    truncated: jax.Array  # bool [N, G], true if no token ended the row within T
    # ---- fields of episodes; None without an environment
    turn: Any = None  # int32 [N, G, T], the turn of each token, from 1; a reply belongs to the turn before it; 0: none
    turn_rewards: Any = None  # float32 [N, G, K], the environment's reward for each turn; NaN: none
    ending: Any = None  # int8 [N, G], the reason why the episode ended, as an index into `data.episodes.ENDINGS`
    # ---- int32 [N, G, T, K], the tokens over which a scorer normalises, −1 for padding; None: the whole vocabulary
    support_ids: Any = None
    # bool [N, G, T], true if rounding decides over which tokens a server normalised (`engines.supports`); None: nowhere
    is_border: Any = None

    @property
    def attention_mask(self) -> jax.Array:
        """The mask of all tokens, the policy's and the environment's, bool `[N, G, T]`."""
        return self.completion_mask if self.turn is None else self.turn > 0


def sample_groups(
    policy: Policy,
    params: Params,
    prompt: PromptTokens,
    rows: jax.Array,
    key: jax.Array,
    *,
    max_tokens: int,
    eos_ids: tuple[int, ...],
    temperature: jax.Array | float = 1.0,
    limits: Limits | None = None,
    pad_id: int = 0,
    stop: "Stop | None" = None,
    support_size: int = 0,
) -> Completions:
    """Samples G completions for each of N prompts.

    The noise of a token depends only on the key, the row and the position. It does not depend on the width of the batch
    or of the prompts, on the number of devices, or on the vocabulary.

    As long completions end, decoding continues with fewer and fewer rows, unless `policy.select` is None (`_widths`).
    This changes only the rounding of products.

    Args:
      policy: The functions of the model.
      params: The parameters of the model.
      prompt: The prompts, `[N, P]`, each of at least one token.
      rows: The numbers of the completions, int `[N, G]`, unique within a step. They determine the noise.
      key: The random key of a step; consumed.
      max_tokens: The maximum number of tokens of a completion, T.
      eos_ids: The tokens that end a completion. The ending token belongs to the completion.
      temperature: The sampling temperature; broadcasts against `[N, G]`. 0 takes the likeliest token, and the
        log-probabilities are then those at temperature 1. Default 1.
      limits: The limits on the candidate tokens, or None.
      pad_id: The token that fills completion_ids after the end.
      stop: Ends completions whose text contains a stop text, from `stopping.make_stop`. The token that completes
        the text belongs to the completion. Default: None.
      support_size: With limits, the number of tokens that `support_ids` keeps of each support, K. The sampler's
        log-probabilities are then normalised over these. 0: no support is kept.

    Returns:
      `Completions`.
    """
    running = initial_state(rows, key, max_tokens, temperature, limits, pad_id, stop, support_size)
    rooms = rooms_of(max_tokens) if policy.widen else (max_tokens,)
    # Nothing reads the cache of an ended completion, so it need not stay valid.
    policy = policy._replace(forgets=False)
    extend, state = start_decoding(policy, params, prompt, running, rooms[0], eos_ids, stop)
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
    limits: Limits
    out: Completions  # the tokens so far
    stop_states: jax.Array | None = None  # int32, states of the automaton of `Stop`; None without stop texts


def initial_state(
    rows: jax.Array,
    key: jax.Array,
    size: int,
    temperature: jax.Array | float,
    limits: Limits | None,
    pad_id: int,
    stop: "Stop | None",
    support_size: int = 0,
) -> Running:
    """Returns completions before the first token, with room for `size` tokens. For arguments see `sample_groups`."""
    shape = rows.shape
    zeros = jnp.zeros((*shape, size), jnp.float32)
    out = Completions(
        completion_ids=jnp.full(zeros.shape, pad_id, jnp.int32),
        completion_mask=jnp.zeros(zeros.shape, bool),
        sampler_logprobs=zeros,
        processed_logprobs=zeros if jax.tree.leaves(limits) else None,
        truncated=jnp.ones(shape, bool),
        support_ids=jnp.full((*zeros.shape, support_size), -1, jnp.int32) if support_size else None,
    )
    running = Running(
        last_ids=jnp.zeros(shape, jnp.int32),
        uniforms=draw_noise(key, rows, size),
        temperature=jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), shape),
        limits=jax.tree.map(lambda limit: jnp.broadcast_to(limit, shape), limits or Limits()),
        out=out,
        stop_states=None if stop is None else jnp.zeros(shape, jnp.int32),
    )
    return spread(running, BATCH)


def start_decoding(
    policy: Policy,
    params: Params,
    prompt: PromptTokens,
    running: Running,
    room: int,
    eos_ids: tuple[int, ...],
    stop: "Stop | None",
) -> tuple[Callable[[Any], Any], tuple[jax.Array, Any, Running]]:
    """Computes the prompts and samples the first token.

    If `policy.forgets`, the cache stays valid for completions that have ended.

    Args:
      policy, params, prompt, eos_ids, stop: See `sample_groups`.
      running: The completions before the first token.
      room: The number of tokens per completion that the cache has room for.

    Returns:
      A function that extends the state (step, cache, running) by one token, and the state after the first token.
    """
    shape = running.last_ids.shape
    hidden, decode, cache = policy.prefill(params, prompt, shape[1], room)
    add = token_adder(policy, params, eos_ids, stop)

    def extend(state):
        step, cache, running = state
        active = (running.out.truncated,) if policy.forgets else ()
        hidden, cache = decode(cache, running.last_ids, step - 1, *active)
        return step + 1, cache, add(running, hidden, step, running.out.truncated)

    hidden = jnp.broadcast_to(hidden[:, None], (*shape, hidden.shape[-1]))
    first = add(running, hidden, jnp.int32(0), running.out.truncated)
    return extend, (jnp.int32(1), cache, first)


def make_logits(policy: Policy, params: Params) -> Callable[[jax.Array], jax.Array]:
    """Makes the function from hidden states `[N, G, D]` to logits before temperature, float32 `[N, G, V]`.

    `functional.token_logprobs` computes the same logits.
    """
    if policy.unembedding is None:
        return lambda hidden: softcapped(hidden.astype(jnp.float32), policy.softcap)
    unembedding = policy.unembedding(params)
    token_axis, feature_axis = unembedding_axes(unembedding.shape[0])
    unembedding = spread(unembedding, token_axis, feature_axis)

    def logits_of(hidden: jax.Array) -> jax.Array:
        hidden = spread(hidden, DATA, None, feature_axis)
        logits = softcapped(times_transposed(hidden, unembedding, jnp.float32, by_columns=True), policy.softcap)
        # On a mesh each device computes the logits of its part of the vocabulary, and then samples for its prompts.
        return spread(spread(spread(logits, DATA, None, token_axis), BATCH, None, TENSOR), AXES)

    return logits_of


# Decoding continues with a quarter of the completions, but with at least 8: on a CPU 2 take as long as 8.
_QUARTER = 4
_FEWEST = 8
# A decode step with fewer completions is worth compiling only if it reads at most this share of the bytes. Otherwise
# their number is halved until it does.
_WORTHWHILE = 0.75


def _widths(policy: Policy, params: Params, cache: Any, num_completions: int, max_tokens: int) -> tuple[int, ...]:
    """Returns the numbers of completions at which decoding continues with only the unfinished ones, descending.

    Every unfinished completion gets a copy of its prompt's keys and values. With long prompts and large groups, few
    completions can therefore read more than all of them did. Large weights are read for any number of completions.
    """
    traits, select = traits_of_backend(), policy.select
    # On a mesh the unfinished completions would not be spread evenly.
    if select is None or mesh_sizes() is not None or max_tokens < traits.narrows_from:
        return ()
    weights = 0
    if traits.is_bound_by_memory:
        computed = jax.eval_shape(policy.unembedding, params) if policy.unembedding else jax.tree.leaves(params)[0]
        weights = computed.dtype.itemsize * sum(x.size for x in jax.tree.leaves(params))
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
    """Returns the numbers of tokens per completion that the cache has room for, ascending: see `Traits.rooms`."""
    traits = traits_of_backend()
    if max_tokens < traits.grows_from:
        return (max_tokens,)
    return tuple(max_tokens * room // traits.rooms for room in range(1, traits.rooms + 1))


def is_running(state: Any, *, max_tokens: int, fewer: int = 0) -> jax.Array:
    """Returns whether the state (step, cache, running) has fewer than `max_tokens` tokens and more than `fewer`
    unfinished completions."""
    step, _, running = state
    return (step < max_tokens) & (jnp.sum(running.out.truncated) > fewer)


def _decode_all(
    extend: Callable[[Any], Any],
    select: Callable[[Any, jax.Array], Any] | None,
    state: tuple[jax.Array, Any, Running],
    max_tokens: int,
    widths: tuple[int, ...],
) -> Completions:
    """Adds tokens until all completions have ended. At widths[0] unfinished ones, continues with copies of only these.

    Args:
      extend: Extends the state (step, cache, running) by one token.
      select: `Policy.select`.
      state: The state (step, cache, running) after the first token or later.
      max_tokens: The maximum number of tokens of a completion, T.
      widths: The numbers of completions to continue with, from `_widths`.

    Returns:
      All completions.
    """
    fewer = widths[0] if widths else 0
    step, cache, running = jax.lax.while_loop(partial(is_running, max_tokens=max_tokens, fewer=fewer), extend, state)
    if not widths or select is None:
        return running.out
    chosen = jnp.argsort(~running.out.truncated.ravel(), stable=True)[:fewer]  # unfinished completions come first
    place = jnp.divmod(chosen, running.last_ids.shape[1])
    few = jax.tree.map(lambda x: x[place][:, None], running)
    out = _decode_all(extend, select, (step, select(cache, chosen), few), max_tokens, widths[1:])
    return jax.tree.map(lambda whole, part: whole.at[place].set(part[:, 0]), running.out, out)


def token_adder(
    policy: Policy, params: Params, eos_ids: tuple[int, ...], stop: "Stop | None"
) -> Callable[[Running, jax.Array, jax.Array, jax.Array], Running]:
    """Makes the function that samples the next token of active completions.

    Args:
      policy, params, eos_ids, stop: See `sample_groups`.

    Returns:
      (completions, hidden states `[N, G, D]` that predict the token, its position as an int32 scalar or `[N, G]`, bool
      `[N, G]` that is true for active completions) -> completions. The outputs of inactive completions do not change.
    """
    logits_of = make_logits(policy, params)
    if stop is not None:
        from grpo_jax.sampling.stopping import STOPPED

    def add_token(running: Running, hidden: jax.Array, step: jax.Array, active: jax.Array) -> Running:
        ids, fields = _draw(running, logits_of(hidden), step, multiplies_by_columns(hidden.dtype))
        put = partial(put_at, step=step, active=active)
        ends, out = jnp.any(ids[..., None] == jnp.asarray(eos_ids, jnp.int32), axis=-1), running.out
        states = running.stop_states
        if stop is not None:
            states = jnp.asarray(stop.table, jnp.int32)[states, jnp.asarray(stop.classes)[ids]]
            ends |= states == STOPPED
        out = out._replace(
            completion_ids=put(out.completion_ids, ids),
            completion_mask=put(out.completion_mask, True),
            truncated=out.truncated & ~(active & ends),
            **{name: put(getattr(out, name), value) for name, value in fields.items()},
        )
        return running._replace(last_ids=ids, out=out, stop_states=states)

    return add_token


def _draw(
    running: Running, logits: jax.Array, step: jax.Array, by_columns: bool
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Draws tokens `[N, G]` from logits `[N, G, V]`; also returns their values for the fields of `Completions`."""
    greedy = running.temperature == 0
    scale = 1.0 / jnp.where(greedy, 1.0, running.temperature)
    if step.ndim:
        uniforms = jnp.take_along_axis(running.uniforms, step[..., None, None], axis=2, mode="clip")[:, :, 0]
    else:
        uniforms = running.uniforms[:, :, step]
    draw = partial(sample_categorical, uniforms=uniforms, greedy=greedy, by_columns=by_columns)
    if running.out.processed_logprobs is None:
        ids, logprobs = draw(logits, scale=scale)
        return ids, {"sampler_logprobs": logprobs}
    logits = logits * scale[..., None]
    limited = limit_logits(logits, running.limits, greedy.shape)
    ids, processed_logprobs = draw(limited)
    fields = {"processed_logprobs": processed_logprobs}
    if running.out.support_ids is not None:
        support_ids, logprobs = keep_support(limited, ids, running.out.support_ids.shape[-1])
        return ids, fields | {"sampler_logprobs": logprobs, "support_ids": support_ids}
    logprobs = jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(logits, axis=-1)
    return ids, fields | {"sampler_logprobs": logprobs}


def put_at(array: Any, value: Any, step: jax.Array, active: jax.Array) -> jax.Array:
    """Puts a value `[N, G, ...]` at position `step` of `[N, G, T, ...]` for active completions.

    For `step` see `token_adder`.
    """
    others = array.shape[3:]
    active = active.reshape(*active.shape, *[1] * len(others))
    if not step.ndim:
        old = jax.lax.dynamic_slice_in_dim(array, step, 1, axis=2)
        new = jnp.where(active, value, old[:, :, 0]).astype(array.dtype)
        return write_slice(array, new[:, :, None], {2: step})
    is_there = jnp.arange(array.shape[2]) == step[..., None]
    is_there = is_there.reshape(*is_there.shape, *[1] * len(others)) & active[:, :, None]
    return jnp.where(is_there, jnp.broadcast_to(value, (*array.shape[:2], *others))[:, :, None], array)
