"""The pieces that a batch is computed in: whole prompts, or completions packed so that padding is not computed.

Letters as in `types`; R rows of packed completions, S tokens of a row, C pieces of n prompts or rows each.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.config import GRPOConfig
from grpo_jax.functional.products import traits_of_backend
from grpo_jax.models.sharding import BATCH, batch_parts, spread
from grpo_jax.rl.types import Array, Batch, Method

# Packing computes a prompt again for each of its rows. If no completion is padded it may cost this much more.
_MAX_OVERHEAD = 1.12
# The most completions of full length in a row. A query is compared with as many keys before its own completion as
# these may have: with 16 short completions in a row an update without any padding took 1.9 times as long.
_MAX_TOGETHER = 2


class Piece(NamedTuple):
    """The shape of each piece of a batch, chosen before there is a batch."""

    rows: int  # prompts, each with completions behind it
    texts: int  # completions of a row that are padded to one width; 1 if they are packed
    width: int  # tokens of each; if they are packed, of all in a row
    is_packed: bool = False


class Microbatches(NamedTuple):
    """Pieces of a batch, each of the same shape. None in place of this: the batch is computed at once."""

    prompts: Array  # int32 [C, n], of each piece
    members: Array  # bool [C, n, G or 1], the completions of the prompt that the piece computes
    num_used: int | jax.Array  # pieces to compute, at most C; the others are empty
    width: int | None  # S; None: completions are not packed


def choose_pieces(method: Method, config: GRPOConfig, batch: Batch) -> Microbatches | None:
    """Returns the pieces that a batch is computed in, of the rows that one device has; None: it is one piece."""
    num_prompts, group_size, tokens = batch.completion_ids.shape
    local, optimizer = num_prompts // batch_parts(), config.optimizer
    piece = choose_piece(
        local,
        batch.prompt_ids.shape[-1],
        group_size,
        tokens,
        microbatches=optimizer.microbatches,
        piece_tokens=optimizer.piece_tokens or traits_of_backend().piece_tokens,
        packs=method.packs,
    )
    if piece.is_packed:
        return packed(lengths_of(batch.completion_mask), piece.width, piece.rows)
    return by_prompts(num_prompts, local // piece.rows)


def choose_piece(
    num_prompts: int, prompt: int, group_size: int, tokens: int, *, microbatches: int, piece_tokens: int, packs: bool
) -> Piece:
    """Chooses the pieces that a batch is computed in.

    Args:
      num_prompts: N, on one device.
      prompt: P.
      group_size: G.
      tokens: T.
      microbatches: the number of pieces of whole prompts; 0: `piece_tokens` decides, and packs if that saves work.
      piece_tokens: as in `choose_microbatches`.
      packs: completions may be packed.

    Returns:
      Their shape.
    """
    whole = prompt + group_size * tokens
    rows = choose_rows(num_prompts, prompt, group_size, tokens, piece_tokens) if packs and not microbatches else None
    if rows is not None:
        return Piece(rows[1], 1, rows[0], is_packed=True)
    microbatches = microbatches or choose_microbatches(num_prompts, whole, piece_tokens)
    return Piece(-(-num_prompts // microbatches), group_size, tokens)


def choose_microbatches(num_prompts: int, tokens: int, piece_tokens: int) -> int:
    """Chooses the number of pieces of whole prompts that a batch is computed in.

    A batch of up to two pieces stays whole: in two pieces 1,500 and 1,800 tokens took up to a quarter longer.

    Args:
      num_prompts: N, on one device.
      tokens: of one prompt with its completions, padding included.
      piece_tokens: the most tokens of one of several pieces; one prompt with its completions may have more.

    Returns:
      A divisor of num_prompts.
    """
    if num_prompts * tokens <= 2 * piece_tokens:
        return 1
    return num_prompts // _largest_divisor(num_prompts, tokens, piece_tokens)


def choose_rows(
    num_prompts: int, prompt: int, group_size: int, tokens: int, piece_tokens: int
) -> tuple[int, int] | None:
    """Chooses the shape of pieces of packed completions, if packing can save work.

    Args:
      num_prompts: N.
      prompt: P.
      group_size: G.
      tokens: T.
      piece_tokens: of a piece.

    Returns:
      Tokens of a row and rows of a piece; or None.
    """
    whole = prompt + group_size * tokens
    if choose_microbatches(num_prompts, whole, piece_tokens) == 1:
        return None
    for together in range(1, min(_MAX_TOGETHER + 1, group_size)):
        rows, width = -(-group_size // together), together * tokens
        if rows * (prompt + width) <= _MAX_OVERHEAD * whole:
            # A little above the size of other pieces: rows of full length should fill the last piece too.
            limit = piece_tokens * 9 // 8
            return width, _largest_divisor(num_prompts * rows, prompt + width, limit)
    return None


def _largest_divisor(number: int, tokens: int, limit: int) -> int:
    """Returns the largest divisor d with d · tokens ≤ limit; 1 if there is none."""
    return max((d for d in range(1, number + 1) if number % d == 0 and d * tokens <= limit), default=1)


def by_prompts(num_prompts: int, pieces: int) -> Microbatches | None:
    """Pieces of whole prompts. On a mesh each has as many of every part of the batch.

    Args:
      num_prompts: N.
      pieces: C; with the parts of the batch it divides N.
    """
    if pieces == 1:
        return None
    parts, prompts = batch_parts(), jnp.arange(num_prompts, dtype=jnp.int32)
    prompts = prompts.reshape(pieces, -1) if parts == 1 else _side_by_side(prompts.reshape(parts, pieces, -1))
    return Microbatches(prompts, jnp.ones((*prompts.shape, 1), bool), pieces, None)


def packed(lengths: jax.Array, width: int, rows: int) -> Microbatches:
    """Pieces of packed completions. A row has completions of one prompt, as many as fit: first the longest.

    On a mesh each part of the batch is packed by itself, and a piece has rows of all parts. As many pieces are computed
    as the fullest part needs.

    Args:
      lengths: int `[N, G]`, tokens of each completion, at most `width`; 0 for those that are left out.
      width: S, tokens of a row.
      rows: n, of a piece; on a mesh of each part.
    """
    parts, num_prompts = batch_parts(), lengths.shape[0]
    if parts == 1:
        return _packed_part(lengths, width, rows)
    part_lengths = lengths.reshape(parts, -1, lengths.shape[-1])
    pack = jax.vmap(lambda lengths: _packed_part(lengths, width, rows)._replace(width=0))
    prompts, members, num_used, _ = pack(part_lengths)
    prompts += jnp.arange(0, num_prompts, num_prompts // parts, dtype=jnp.int32)[:, None, None]
    return Microbatches(_side_by_side(prompts), _side_by_side(members), jnp.max(num_used), width)


def _side_by_side(x: jax.Array) -> jax.Array:
    """Pieces of the parts of a batch `[parts, C, n, ...]` as pieces of all of it, `[C, parts · n, ...]`."""
    x = x.swapaxes(0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _packed_part(lengths: jax.Array, width: int, rows: int) -> Microbatches:
    """`packed` of one part of a batch."""
    num_prompts, group_size = lengths.shape
    numbers = jnp.arange(group_size)

    def rows_of_group(lengths: jax.Array) -> jax.Array:
        """The row of each completion, `[G]`: first-fit decreasing."""
        before = numbers[:, None] < numbers
        goes_first = (lengths[:, None] > lengths) | ((lengths[:, None] == lengths) & before)
        order = _places(jnp.sum(goes_first, axis=0), group_size)  # the longest first

        def place(used: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
            row = jnp.argmax(used + length <= width)
            return used.at[row].add(length), row

        _, chosen = jax.lax.scan(place, jnp.zeros_like(lengths), lengths[order])
        return jnp.zeros_like(chosen).at[order].set(chosen)

    chosen = jax.vmap(rows_of_group)(lengths)
    members = (chosen[:, None] == numbers[:, None]) & (lengths > 0)[:, None]  # [N, row, G]
    members = members.reshape(-1, group_size)
    is_used = jnp.any(members, axis=-1)
    size = num_prompts * group_size
    order = _true_places(is_used, size + -size % rows)  # the last piece is filled up
    prompts = jnp.minimum(order // group_size, num_prompts - 1)
    members = jnp.pad(members, [(0, 1), (0, 0)])[order]
    num_used = -(-jnp.sum(is_used, dtype=jnp.int32) // rows)
    return Microbatches(prompts.reshape(-1, rows), members.reshape(-1, rows, group_size), num_used, width)


def take(batch: Any, microbatches: Microbatches, number: Array) -> Any:
    """A piece of a batch. Completions that it does not compute are masked."""
    prompts, members = microbatches.prompts[number], microbatches.members[number]
    piece = spread(jax.tree.map(lambda x: x[prompts], batch), BATCH)
    if microbatches.width is None:
        return piece
    piece = piece._replace(completion_mask=piece.completion_mask & members[..., None])
    if piece.weights is not None:
        piece = piece._replace(weights=jnp.where(members[..., None], piece.weights, 0))
    tokens = jnp.arange(piece.completion_mask.shape[-1]) < lengths_of(piece.completion_mask)[..., None]
    return piece._replace(packed=_true_places(tokens.reshape(len(prompts), -1), microbatches.width))


def lengths_of(completion_mask: jax.Array) -> jax.Array:
    """Tokens of completions up to the last that is learned from: bool `[..., T]` -> int32 `[...]`."""
    numbers = jnp.arange(1, completion_mask.shape[-1] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(completion_mask, numbers, 0), axis=-1)


def _true_places(chosen: jax.Array, width: int) -> jax.Array:
    """The places of true elements, in order: bool `[..., M]` -> int32 `[..., width]`, filled up with M."""
    ranks = jnp.where(chosen, jnp.cumsum(chosen, axis=-1) - 1, width)
    flat = ranks.reshape(-1, ranks.shape[-1])
    return jax.vmap(lambda ranks: _places(ranks, width))(flat).reshape(*chosen.shape[:-1], width)


def _places(ranks: jax.Array, width: int) -> jax.Array:
    """The place of each rank: int `[M]` -> int32 `[width]`, filled up with M. A sort would take longer to compile."""
    (size,) = ranks.shape
    places = jnp.arange(size, dtype=jnp.int32)
    return jnp.full(width, size, jnp.int32).at[ranks].set(places, mode="drop")


def computed_in_pieces(fn: Callable[[Any], Any], batch: Any, microbatches: Microbatches | None) -> Any:
    """The function of a batch, one piece after another. Completions must not depend on each other.

    Args:
      fn: batch -> arrays `[N, G, ...]`.
      batch: of N prompts.
      microbatches: of the batch.

    Returns:
      What fn gives for the whole batch; 0 for completions in no piece.
    """
    if microbatches is None:
        return fn(batch)
    num_prompts = jax.tree.leaves(batch)[0].shape[0]

    def put(number: jax.Array, total: Any) -> Any:
        prompts, members = microbatches.prompts[number], microbatches.members[number]

        def add(total: jax.Array, x: jax.Array) -> jax.Array:
            return total.at[prompts].add(jnp.where(members.reshape(*members.shape, *[1] * (x.ndim - 2)), x, 0))

        return jax.tree.map(add, total, fn(take(batch, microbatches, number)))

    shapes = jax.eval_shape(lambda: fn(take(batch, microbatches, 0)))
    zeros = spread(jax.tree.map(lambda x: jnp.zeros((num_prompts, *x.shape[1:]), x.dtype), shapes), BATCH)
    return jax.lax.fori_loop(0, microbatches.num_used, put, zeros)
