"""Pieces in which a batch is computed: whole prompts, or completions packed so that padding is not computed.

Letters: N prompts of P tokens, G completions of T tokens each, R rows of packed completions, S tokens in a row, C
pieces of n prompts or rows each.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.functional.products import traits_of_backend
from grpo_jax.models.params.sharding import BATCH, batch_shards, mesh_sizes, spread
from grpo_jax.models.rows.geometry import Array, PromptTokens, rows_of_packed_groups, useful_widths

# Packing computes a prompt again for each of its rows. This is the largest extra cost when no completion is padded.
_MAX_OVERHEAD = 1.12
# The largest number of full-length completions in a row. Each query also attends over masked keys of earlier
# completions in its row: with 16 short completions in a row, an update without any padding took 1.9 times as long.
# With prompts of 250 tokens and up to four long completions (144 of 256 tokens in the mean) in a row, a step of a model
# with 48 million parameters took .82 of its time without packing.
_MAX_TOGETHER, _MAX_LONG_TOGETHER, _LONG = 2, 4, 128


class Microbatches(NamedTuple):
    """Pieces of a batch, each of the same shape."""

    prompts: Array  # int32 [C, n], the prompt of each row
    members: Array  # bool [C, n, G or 1], the completions of this prompt that are in the row
    num_used: int | jax.Array  # pieces to compute, at most C; further pieces are empty
    width: int | None  # S; None: completions are not packed
    prompt_width: int | None = None  # a piece computes only so many last tokens of a prompt; None: all P


# One entry for each width of prompts, the widest first. Empty: the batch is computed at once.
Pieces = tuple[Microbatches, ...]


class Sorting(NamedTuple):
    """Widths to which pieces cut prompts, and the size of the pieces of each width."""

    lengths: Array  # int [N], tokens of each prompt; None: there is one width
    widths: tuple[int | None, ...]  # ascending; every prompt fits the last width. None: all P
    rows: tuple[int, ...]  # number of prompts, or of rows of packed completions, in a piece of each width


def by_prompts(num_prompts: int, pieces: int, sorting: Sorting | None = None) -> Pieces:
    """Returns pieces of whole prompts. On a mesh each piece has equally many prompts of every shard of the batch.

    Args:
      num_prompts: The number of prompts, N.
      pieces: The number of pieces, C. Its product with the number of shards of the batch divides N.
      sorting: The widths of prompts. Default: all prompts are computed at full width.
    """
    if pieces == 1 and sorting is None:
        return ()
    local = num_prompts // batch_shards()
    prompts = jnp.arange(num_prompts, dtype=jnp.int32).reshape(-1, local)
    sorting = sorting or Sorting(None, (None,), (local // pieces,))
    return _cut(prompts, jnp.ones((*prompts.shape, 1), bool), local, None, sorting)


def packed(lengths: jax.Array, width: int, rows: int, sorting: Sorting | None = None) -> Pieces:
    """Returns pieces of packed completions. A row holds completions of one prompt, packed longest first.

    On a mesh each shard of the batch is packed separately, and a piece has rows of all shards. The fullest shard
    determines how many pieces are computed.

    Args:
      lengths: Tokens of each completion, int `[N, G]`, at most `width`; 0 for completions to leave out.
      width: Tokens of a row, S.
      rows: Rows of a piece, n. On a mesh, rows of each shard of the batch.
      sorting: The widths of prompts. Default: all prompts are computed at full width.
    """
    shards, num_prompts = batch_shards(), lengths.shape[0]
    prompts, members, num_rows = jax.vmap(partial(_pack, width=width))(lengths.reshape(shards, -1, lengths.shape[-1]))
    prompts += jnp.arange(0, num_prompts, num_prompts // shards, dtype=jnp.int32)[:, None]
    return _cut(prompts, members, num_rows, width, sorting or Sorting(None, (None,), (rows,)))


def _cut(
    prompts: jax.Array, members: jax.Array, num_rows: int | jax.Array, width: int | None, sorting: Sorting
) -> Pieces:
    """Cuts the rows of each shard of a batch into pieces.

    Rows are sorted by the widths of their prompts and cut from the widest on. The last rows of a width share a piece
    with the first rows of the next narrower width, so only the last piece has empty rows.

    Args:
      prompts: The prompt of each row, int32 `[shards, R]`; used rows come first.
      members: The completions of each row, bool `[shards, R, G or 1]`.
      num_rows: The number of used rows in each shard.
      width: Tokens of a row, S. None: completions are not packed.
      sorting: The widths of prompts.
    """
    size = prompts.shape[1]
    counts: list[Any] = [num_rows]  # rows of each width, and of wider ones
    if len(sorting.widths) > 1:
        number = jnp.searchsorted(jnp.asarray(sorting.widths), sorting.lengths[prompts])
        number = jnp.where(jnp.arange(size) < jnp.reshape(num_rows, (-1, 1)), number, -1)
        order = jnp.argsort(-number, axis=-1, stable=True)
        prompts = jnp.take_along_axis(prompts, order, axis=-1)
        members = jnp.take_along_axis(members, order[..., None], axis=1)
        counts = [jnp.sum(number >= place, axis=-1) for place in range(len(sorting.widths))]
    pieces: list[Microbatches] = []
    taken: Any = 0
    for count, prompt_width, n in reversed(list(zip(counts, sorting.widths, sorting.rows, strict=True))):
        left = count if isinstance(count, int) else jnp.maximum(jnp.max(count) - taken, 0)
        places = jnp.arange(size + -size % n) + taken
        is_used = places < jnp.reshape(num_rows, (-1, 1))
        places = jnp.minimum(places, size - 1)
        chosen, used_members = prompts[:, places], members[:, places] & is_used[..., None]
        # A piece has rows of all shards: [shards, C · n, ...] -> [C, shards · n, ...].
        chosen, used_members = (
            jnp.concatenate([*x.reshape(len(x), -1, n, *x.shape[2:])], axis=1) for x in (chosen, used_members)
        )
        num_used = -(-left // n)
        pieces.append(Microbatches(chosen, used_members, num_used, width, prompt_width))
        taken += num_used * n
    return tuple(pieces)


def _pack(lengths: jax.Array, *, width: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Packs one shard of a batch. Returns the prompt and the members of each row, and how many rows are used."""
    num_prompts, group_size = lengths.shape
    numbers = jnp.arange(group_size)

    def rows_of_group(lengths: jax.Array) -> jax.Array:
        """Returns the row of each completion, `[G]`, by first-fit decreasing."""
        before = numbers[:, None] < numbers
        goes_first = (lengths[:, None] > lengths) | ((lengths[:, None] == lengths) & before)
        # The longest come first. A sort compiles more slowly.
        order = jnp.zeros_like(numbers).at[jnp.sum(goes_first, axis=0)].set(numbers)

        def place(used: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
            row = jnp.argmax(used + length <= width)
            return used.at[row].add(length), row

        _, chosen = jax.lax.scan(place, jnp.zeros_like(lengths), lengths[order])
        return jnp.zeros_like(chosen).at[order].set(chosen)

    chosen = jax.vmap(rows_of_group)(lengths)
    members = (chosen[:, None] == numbers[:, None]) & (lengths > 0)[:, None]  # [N, row, G]
    members = members.reshape(-1, group_size)
    is_used = jnp.any(members, axis=-1)
    order = _true_places(is_used, is_used.size)
    prompts = jnp.minimum(order // group_size, num_prompts - 1)
    return prompts, jnp.pad(members, [(0, 1), (0, 0)])[order], jnp.sum(is_used, dtype=jnp.int32)


def take(batch: Any, microbatches: Microbatches, number: Array) -> Any:
    """Returns a piece of a batch, or of prompts. Completions that are not in the piece are masked."""
    prompts, members = microbatches.prompts[number], microbatches.members[number]
    piece = spread(jax.tree.map(lambda x: x[prompts], batch), BATCH)
    if microbatches.prompt_width and isinstance(piece, PromptTokens):
        return piece.cut(microbatches.prompt_width)
    if microbatches.prompt_width:
        piece = piece._replace(prompt=piece.prompt.cut(microbatches.prompt_width))
    elif microbatches.width is None:
        return piece
    piece = piece._replace(completion_mask=piece.completion_mask & members[..., None])
    if piece.weights is not None:
        piece = piece._replace(weights=jnp.where(members[..., None], piece.weights, 0))
    if microbatches.width is None:
        return piece
    tokens = jnp.arange(piece.completion_mask.shape[-1]) < lengths_of(piece.completion_mask)[..., None]
    places = jax.vmap(partial(_true_places, width=microbatches.width))(tokens.reshape(len(prompts), -1))
    layout = rows_of_packed_groups(piece.prompt, piece.completion_ids, places)
    return piece._replace(layout=layout)


def lengths_of(completion_mask: jax.Array) -> jax.Array:
    """Counts tokens up to the last true element of each mask: bool `[..., T]` -> int32 `[...]`."""
    numbers = jnp.arange(1, completion_mask.shape[-1] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(completion_mask, numbers, 0), axis=-1)


def _true_places(chosen: jax.Array, width: int) -> jax.Array:
    """Returns the indices of true elements, ascending: bool `[M]` -> int32 `[width]`, padded with M."""
    return jnp.flatnonzero(chosen, size=width, fill_value=chosen.size)


def computed_in_pieces(fn: Callable[[Any], Any], batch: Any, pieces: Pieces) -> Any:
    """Computes a function of a batch one piece at a time. Completions must not depend on each other.

    Args:
      fn: A function from a batch to arrays `[N, ...]`. The second axis may be that of completions. Axes of tokens of
        prompts have the width of the piece.
      batch: N prompts with their completions, or N prompts.
      pieces: The pieces of the batch.

    Returns:
      The arrays of the whole batch. They are 0 for completions that are in no piece, and before narrower prompts.
    """
    if not pieces:
        return fn(batch)
    num_prompts = jax.tree.leaves(batch)[0].shape[0]

    def put(microbatches: Microbatches, number: jax.Array, total: Any) -> Any:
        prompts, members = microbatches.prompts[number], microbatches.members[number]

        def add(total: jax.Array, x: jax.Array) -> jax.Array:
            ends = (slice(whole - size, None) for whole, size in zip(total.shape[1:], x.shape[1:], strict=True))
            x = jnp.where(members.reshape(*members.shape, *[1] * (x.ndim - 2)), x, 0)
            return total.at[(prompts, *ends)].add(x)

        return jax.tree.map(add, total, fn(take(batch, microbatches, number)))

    # The first pieces are the widest.
    shapes = jax.eval_shape(lambda: fn(take(batch, pieces[0], 0)))
    total = spread(jax.tree.map(lambda x: jnp.zeros((num_prompts, *x.shape[1:]), x.dtype), shapes), BATCH)
    for microbatches in pieces:
        total = jax.lax.fori_loop(0, microbatches.num_used, partial(put, microbatches), total)
    return total


def pieces_of_prompts(prompt: PromptTokens) -> Pieces:
    """Returns pieces of prompts without completions. If their widths save little, or on a mesh, there is only one."""
    num_prompts, tokens = len(prompt), traits_of_backend().piece_tokens
    widths = useful_widths(prompt.widths.pieces, prompt.width, 0)
    # On a mesh a piece would not be spread evenly.
    if len(widths) < 2 or prompt.ids.size <= 2 * tokens or mesh_sizes() is not None:
        return ()
    sizes = tuple(min(max(1, tokens // width), num_prompts) for width in widths)
    lengths = jnp.sum(jnp.asarray(prompt.mask), axis=-1, dtype=jnp.int32)
    return by_prompts(num_prompts, 1, Sorting(lengths, widths, sizes))


# ---- the choice of pieces


class PieceShape(NamedTuple):
    """The shape of each piece of a batch, chosen before there is a batch."""

    rows: int  # number of rows: a prompt followed by completions
    texts: int  # completions of a row that are padded to one width; 1 if they are packed
    width: int  # tokens of each padded completion, or of all packed completions in a row
    is_packed: bool = False


def choose_pieces(batch: Any, *, piece_tokens: int, packs: bool = True) -> Pieces:
    """Returns the pieces in which one device computes its rows of a batch.

    Args:
      batch: N prompts with their completions. A piece has the least of their widths that fits its longest prompt.
      piece_tokens: The largest number of tokens of a piece. 0: the backend decides.
      packs: False to pack no completions. Default: they are packed if that saves work.
    """
    num_prompts, group_size, tokens = batch.completion_ids.shape
    if not packs:
        group_size, tokens = 1, group_size * tokens  # a single completion of a prompt is never packed
    local, prompt, group_tokens = num_prompts // batch_shards(), batch.prompt.width, group_size * tokens
    piece_tokens = piece_tokens or traits_of_backend().piece_tokens
    choose = partial(choose_piece, group_size=group_size, tokens=tokens, piece_tokens=piece_tokens)
    widths = useful_widths(batch.prompt.widths.pieces, prompt, group_tokens)
    piece = choose(local, prompt)
    if len(widths) == 1 or (piece.rows == local and not piece.is_packed):
        sorting = None
    else:
        # Most prompts are short, so the narrowest width decides whether completions are packed.
        piece = choose(local, widths[0])
        row = piece.width * piece.texts
        fitting = (max(1, piece_tokens // (width + row)) for width in widths)
        lengths = jnp.sum(batch.prompt.mask, axis=-1, dtype=jnp.int32)
        sorting = Sorting(lengths, widths, tuple(min(rows, local) for rows in fitting))
    if piece.is_packed:
        return packed(lengths_of(batch.completion_mask), piece.width, piece.rows, sorting)
    return by_prompts(num_prompts, local // piece.rows, sorting)


def choose_piece(num_prompts: int, prompt: int, group_size: int, tokens: int, *, piece_tokens: int) -> PieceShape:
    """Chooses the shape of the pieces in which a batch is computed. Completions are packed if that saves work.

    One prompt stays whole, and so does a batch of up to two pieces: split in two, batches of 1,500 and 1,800 tokens
    took up to a quarter longer.

    Args:
      num_prompts: The number of prompts on one device, N.
      prompt: Tokens of a prompt, P.
      group_size: Completions of a prompt, G.
      tokens: Tokens of a completion, T.
      piece_tokens: The largest number of tokens of a piece, padding included. One prompt with its completions may
        exceed it.
    """
    whole = prompt + group_size * tokens
    if num_prompts == 1 or num_prompts * whole <= 2 * piece_tokens:
        return PieceShape(num_prompts, group_size, tokens)
    most = _MAX_LONG_TOGETHER if tokens >= _LONG else _MAX_TOGETHER
    for together in range(1, min(most + 1, group_size)):
        rows, width = -(-group_size // together), together * tokens
        if rows * (prompt + width) <= _MAX_OVERHEAD * whole:
            # Slightly larger than other pieces, so that rows of full length also fill the last piece.
            limit = piece_tokens * 9 // 8
            return PieceShape(_largest_divisor(num_prompts * rows, prompt + width, limit), 1, width, is_packed=True)
    return PieceShape(_largest_divisor(num_prompts, whole, piece_tokens), group_size, tokens)


def _largest_divisor(number: int, tokens: int, limit: int) -> int:
    """Returns the largest divisor d with d · tokens ≤ limit; 1 if there is none."""
    return max((d for d in range(1, number + 1) if number % d == 0 and d * tokens <= limit), default=1)
