"""Several texts in a row of fixed width: supervised training on texts of different lengths computes little padding."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.data.rows import batches
from grpo_jax.errors import UsageError

Array = Any  # np.ndarray on the host, jax.Array on a device


class Packed(NamedTuple):
    """B rows of S tokens, a batch of `offline.sft`."""

    ids: Array  # int32 [B, S]
    texts: Array  # int32 [B, S], which text of the row a token is of, from 1; 0 for padding
    completion_mask: Array  # bool [B, S], true on the tokens that are learned
    weights: Array = None  # [B, S], made from the mask of a whole optimizer batch


def pack(
    prompts: Sequence[Sequence[int] | np.ndarray], completions: Sequence[Sequence[int] | np.ndarray], *, width: int
) -> Packed:
    """Texts as rows, each whole in one of them; prompts are seen and not learned.

    The longest first, each into the fullest row that has room for it (best fit, decreasing).

    Args:
      prompts: M lists of ids.
      completions: M lists of ids, with the token that ends them.
      width: S.

    Returns:
      The rows. Which texts share one is a function of the lengths alone.

    Raises:
      UsageError: there are no texts, one has nothing to learn, or one is longer than a row.
    """
    if not prompts or len(prompts) != len(completions):
        raise UsageError(f"{len(prompts)} prompts and {len(completions)} completions cannot be packed: give one each")
    lengths = [len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True)]
    for number, length in enumerate(lengths):
        if length > width:
            raise UsageError(f"text {number} has {length} tokens, and a row {width}: drop it, or widen the rows")
        if not len(completions[number]) or length < 2:
            raise UsageError(f"text {number} has no token to learn: drop it")
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # what is left of each row, sorted
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect_left(room, (lengths[number], 0))
        left, row = room.pop(place) if place < len(room) else (width, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(number)
        insort(room, (left - lengths[number], row))
    packed = Packed(*(np.zeros((len(rows), width), dtype) for dtype in (np.int32, np.int32, bool)))
    for row, numbers in enumerate(rows):
        start = 0
        for text, number in enumerate(numbers, 1):
            end = start + lengths[number]
            packed.ids[row, start:end] = [*prompts[number], *completions[number]]
            packed.texts[row, start:end] = text
            # Nothing predicts the first token of a text.
            packed.completion_mask[row, start + max(len(prompts[number]), 1) : end] = True
            start = end
    return packed


def packed_batches(rows: Packed, count: int, seed: int) -> Callable[[int], Packed]:
    """Batches of `count` rows: every row once an epoch.

    Args:
      rows: of `pack`.
      count: rows of a step, at most as many as there are.
      seed: of their order.

    Returns:
      A pure function from the step to its batch.

    Raises:
      UsageError: there are fewer rows.
    """
    total = len(rows.ids)
    if not 1 <= count <= total:
        raise UsageError(f"a step of {count} rows is asked for: it must be 1 to {total}, the rows that there are")
    chosen = batches(total, count, seed)

    def batch(step: int) -> Packed:
        numbers = chosen(step)
        return Packed(rows.ids[numbers], rows.texts[numbers], rows.completion_mask[numbers])

    return batch


def packed_pieces(rows: Packed, count: int) -> Iterator[Packed]:
    """All rows in order, `count` at a time and the last filled up with empty ones: what `sft.mean_nll` takes."""
    for start in range(0, len(rows.ids), count):
        piece = [x[start : start + count] for x in rows[:3]]
        yield Packed(*(np.pad(x, [(0, count - len(x)), (0, 0)]) for x in piece))
