"""The choice of the pieces in which a batch is computed. Letters as in `models.pieces`."""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp

from grpo_jax.config import GRPOConfig
from grpo_jax.functional.products import traits_of_backend
from grpo_jax.models.pieces import Pieces, Sorting, by_prompts, lengths_of, packed
from grpo_jax.models.prompts import useful_widths
from grpo_jax.models.sharding import batch_parts
from grpo_jax.step.types import Batch

# Packing computes a prompt again for each of its rows. This is the largest extra cost when no completion is padded.
_MAX_OVERHEAD = 1.12
# The largest number of full-length completions in a row. Each query also attends over masked keys of earlier
# completions in its row: with 16 short completions in a row, an update without any padding took 1.9 times as long.
_MAX_TOGETHER = 2


class Piece(NamedTuple):
    """The shape of each piece of a batch, chosen before there is a batch."""

    rows: int  # number of rows: a prompt followed by completions
    texts: int  # completions of a row that are padded to one width; 1 if they are packed
    width: int  # tokens of each padded completion, or of all packed completions in a row
    is_packed: bool = False


def choose_pieces(config: GRPOConfig, batch: Batch) -> Pieces:
    """Returns the pieces in which one device computes its rows of a batch.

    Args:
      config: The configuration of the run.
      batch: N prompts with their completions. A piece has the least of their widths that fits its longest prompt.
    """
    num_prompts, group_size, tokens = batch.completion_ids.shape
    local, prompt, group_tokens = num_prompts // batch_parts(), batch.prompt.width, group_size * tokens
    microbatches, piece_tokens = config.optimizer.microbatches, config.optimizer.piece_tokens
    piece_tokens = piece_tokens or traits_of_backend().piece_tokens
    choose = partial(
        choose_piece,
        group_size=group_size,
        tokens=tokens,
        microbatches=microbatches,
        piece_tokens=piece_tokens,
    )
    widths = useful_widths(batch.prompt.widths.pieces, prompt, group_tokens)
    piece = choose(local, prompt)
    if len(widths) == 1 or (piece.rows == local and not piece.is_packed):
        sorting = None
    else:
        # Most prompts are short, so the narrowest width decides whether completions are packed.
        piece = choose(local, widths[0])
        row = piece.width * piece.texts
        fitting = (piece.rows if microbatches else max(1, piece_tokens // (width + row)) for width in widths)
        lengths = jnp.sum(batch.prompt.mask, axis=-1, dtype=jnp.int32)
        sorting = Sorting(lengths, widths, tuple(min(rows, local) for rows in fitting))
    if piece.is_packed:
        return packed(lengths_of(batch.completion_mask), piece.width, piece.rows, sorting)
    return by_prompts(num_prompts, local // piece.rows, sorting)


def choose_piece(
    num_prompts: int, prompt: int, group_size: int, tokens: int, *, microbatches: int, piece_tokens: int
) -> Piece:
    """Chooses the shape of the pieces in which a batch is computed.

    Args:
      num_prompts: The number of prompts on one device, N.
      prompt: Tokens of a prompt, P.
      group_size: Completions of a prompt, G.
      tokens: Tokens of a completion, T.
      microbatches: The number of pieces of whole prompts. 0: `piece_tokens` decides, and completions are packed if that
        saves work.
      piece_tokens: The largest number of tokens of a piece, as in `choose_microbatches`.
    """
    whole = prompt + group_size * tokens
    rows = None if microbatches else choose_rows(num_prompts, prompt, group_size, tokens, piece_tokens)
    if rows is not None:
        return Piece(rows[1], 1, rows[0], is_packed=True)
    microbatches = microbatches or choose_microbatches(num_prompts, whole, piece_tokens)
    return Piece(-(-num_prompts // microbatches), group_size, tokens)


def choose_microbatches(num_prompts: int, tokens: int, piece_tokens: int) -> int:
    """Chooses the number of pieces of whole prompts in which a batch is computed.

    A batch of up to two pieces stays whole: split in two, batches of 1,500 and 1,800 tokens took up to a quarter
    longer.

    Args:
      num_prompts: The number of prompts on one device, N.
      tokens: Tokens of one prompt with its completions, including padding.
      piece_tokens: The largest number of tokens of a piece. One prompt with its completions may exceed it.

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
      num_prompts: The number of prompts on one device, N.
      prompt: Tokens of a prompt, P.
      group_size: Completions of a prompt, G.
      tokens: Tokens of a completion, T.
      piece_tokens: The largest number of tokens of a piece.

    Returns:
      Tokens of a row and rows of a piece, or None if completions should not be packed.
    """
    whole = prompt + group_size * tokens
    if choose_microbatches(num_prompts, whole, piece_tokens) == 1:
        return None
    for together in range(1, min(_MAX_TOGETHER + 1, group_size)):
        rows, width = -(-group_size // together), together * tokens
        if rows * (prompt + width) <= _MAX_OVERHEAD * whole:
            # Slightly larger than other pieces, so that rows of full length also fill the last piece.
            limit = piece_tokens * 9 // 8
            return width, _largest_divisor(num_prompts * rows, prompt + width, limit)
    return None


def _largest_divisor(number: int, tokens: int, limit: int) -> int:
    """Returns the largest divisor d with d · tokens ≤ limit; 1 if there is none."""
    return max((d for d in range(1, number + 1) if number % d == 0 and d * tokens <= limit), default=1)
