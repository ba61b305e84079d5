"""Packing of several texts into rows of fixed width, to save padding in supervised training."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.data.rows import batches, check_step_size
from grpo_jax.errors import UsageError

Array = Any  # np.ndarray on the host, jax.Array on a device


class Packed(NamedTuple):
    """B rows of S tokens, a batch of `offline.sft`."""

    ids: Array  # int32 [B, S]
    texts: Array  # int32 [B, S], the number of each token's text in its row, from 1; 0 for padding
    completion_mask: Array  # bool [B, S], true for tokens in the loss
    weights: Array = None  # [B, S], computed from the mask of a whole optimizer batch


def pack(
    prompts: Sequence[Sequence[int] | np.ndarray],
    completions: Sequence[Sequence[int] | np.ndarray],
    masks: Sequence[Sequence[bool] | None] | None = None,
    *,
    width: int,
) -> Packed:
    """Packs texts into rows, without cutting a text. The loss covers only the completions.

    Texts are taken from the longest to the shortest. Each goes into the fullest row with room for it (best fit,
    decreasing).

    Args:
      prompts: M lists of ids.
      completions: M lists of ids, each with the token that ends it.
      masks: True for the learned tokens of each completion. None: all are learned, also of a single completion.
      width: The number of tokens in a row, S.

    Returns:
      The rows. The assignment of texts to rows depends only on their lengths.

    Raises:
      UsageError: A text has no token in the loss, or does not fit into a row.
    """
    lengths = [len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True)]
    for number, length in enumerate(lengths):
        if not len(completions[number]) or length < 2:
            raise UsageError(f"text {number} has no token to learn: drop it")
        if length > width:
            raise UsageError(f"text {number} has {length} tokens, but width is {width}: drop or cut it, or raise width")
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
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
            first = max(len(prompts[number]), 1)
            mask = masks[number] if masks else None
            packed.completion_mask[row, start + first : end] = mask[first - len(prompts[number]) :] if mask else True
            start = end
    return packed


def packed_batches(rows: Packed, count: int, seed: int) -> Callable[[int], Packed]:
    """Makes batches of `count` rows, with every row once an epoch.

    Args:
      rows: Packed rows from `pack`.
      count: The number of rows in a step.
      seed: The seed of the order of rows.

    Returns:
      A pure function from the step to its batch.

    Raises:
      UsageError: There are fewer than `count` rows, or `count` is less than 1.
    """
    check_step_size("num_rows", count, len(rows.ids))
    chosen = batches(len(rows.ids), count, seed)

    def batch(step: int) -> Packed:
        numbers = chosen(step)
        return Packed(rows.ids[numbers], rows.texts[numbers], rows.completion_mask[numbers])

    return batch


def packed_pieces(rows: Packed, count: int) -> Iterator[Packed]:
    """Yields all rows in order for `sft.text_nll`, `count` at a time. Empty rows fill up the last piece."""
    for start in range(0, len(rows.ids), count):
        piece = [x[start : start + count] for x in rows[:3]]
        yield Packed(*(np.pad(x, [(0, count - len(x)), (0, 0)]) for x in piece))
