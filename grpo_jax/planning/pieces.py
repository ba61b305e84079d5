"""Into which pieces a batch is cut: whole prompts with their completions, or rows of packed completions.

Letters as in `models.transformer`: N prompts of P tokens, G completions of T tokens each.
"""

from typing import NamedTuple

# Packing computes a prompt again for each of its rows. Where no completion is padded it may cost this much more.
_MAX_OVERHEAD = 1.12
# Completions of full length in a row, at most. A query is compared with as many keys before its own completion as that
# may have: with 16 short completions in a row an update without any padding took 1.9 times as long.
_MAX_TOGETHER = 2


class Piece(NamedTuple):
    """The shape of each piece of a batch."""

    rows: int  # prompts, each with completions behind it
    texts: int  # completions of a row that are padded to one width; 1 where they are packed
    width: int  # tokens of each; where they are packed, of all in a row
    is_packed: bool = False


def choose_piece(
    num_prompts: int, prompt: int, group_size: int, tokens: int, *, microbatches: int, piece_tokens: int, packs: bool
) -> Piece:
    """The pieces that a batch is computed in.

    Args:
      num_prompts: of the batch, on one device.
      prompt: P.
      group_size: G.
      tokens: T.
      microbatches: how many pieces of whole prompts; 0: as many as `piece_tokens` says, packed where that saves work.
      piece_tokens: as in `choose_microbatches`.
      packs: whether completions may be packed.
    """
    whole = prompt + group_size * tokens
    rows = choose_rows(num_prompts, prompt, group_size, tokens, piece_tokens) if packs and not microbatches else None
    if rows is not None:
        return Piece(rows[1], 1, rows[0], is_packed=True)
    microbatches = microbatches or choose_microbatches(num_prompts, whole, piece_tokens)
    return Piece(-(-num_prompts // microbatches), group_size, tokens)


def choose_microbatches(num_prompts: int, tokens: int, piece_tokens: int) -> int:
    """How many pieces of whole prompts a batch is computed in.

    A batch of up to two pieces stays whole: in two pieces 1,500 and 1,800 tokens took up to a quarter longer.

    Args:
      num_prompts: of the batch, on one device.
      tokens: of one prompt with its completions, padding included.
      piece_tokens: of a piece at most, where there are several; one prompt with its completions may be more.

    Returns:
      A divisor of num_prompts.
    """
    if num_prompts * tokens <= 2 * piece_tokens:
        return 1
    return num_prompts // _largest_divisor(num_prompts, tokens, piece_tokens)


def choose_rows(
    num_prompts: int, prompt: int, group_size: int, tokens: int, piece_tokens: int
) -> tuple[int, int] | None:
    """The shape of pieces of packed completions, if packing can save work.

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
    """The largest divisor d with d · tokens ≤ limit; 1 if there is none."""
    return max((d for d in range(1, number + 1) if number % d == 0 and d * tokens <= limit), default=1)
