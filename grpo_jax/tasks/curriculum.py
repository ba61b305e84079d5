"""Curricula: prompts are drawn by how often they were solved during the last W steps.

The window is part of the checkpoint. Prompts are a function of the seed, the step and the window.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.data.prompts import Prompts

_LEVELS = 1000  # the number of a prompt of a generator is _LEVELS · generator + level
_LEAST = 8  # prompts of a level in the window before it may rise


class Window(NamedTuple):
    """The prompts of the last W steps, oldest first. Completions without a reward count as neither."""

    numbers: Any  # int32 [N, W]; −1 before the first step
    solved: Any  # float32 [N, W], sum of the rewards of a prompt's completions, each clipped to [0, 1]
    failed: Any  # float32 [N, W], number of these completions − solved


# (window, step, bound of the solve rate) -> the prompts of a step; their numbers in a window, int [N]; and metrics of
# the distribution that they are drawn from
Curriculum = Callable[[Window, int, float], tuple[Prompts, np.ndarray, dict[str, float]]]


def empty_window(num_prompts: int, steps: int) -> Window:
    """Returns the window before the first step."""
    zeros = np.zeros((num_prompts, steps), np.float32)
    return Window(np.full(zeros.shape, -1, np.int32), zeros, zeros)


def add_step(window: Window, numbers: np.ndarray, rewards: np.ndarray) -> Window:
    """Returns the window after another step.

    Args:
      window: The window before the step.
      numbers: The numbers of the prompts, int `[N]`.
      rewards: The rewards of their completions, float `[N, G]`; NaN: no reward.
    """
    graded = ~np.isnan(rewards)
    solved = np.where(graded, np.clip(rewards, 0, 1), 0).sum(-1)
    newest = (numbers, solved, graded.sum(-1) - solved)
    columns = zip(window, newest, strict=True)
    return Window(*(np.column_stack([old[:, 1:], new]).astype(old.dtype) for old, new in columns))


def draw_by_solve_rate(
    window: Window, size: int, count: int, noise: np.random.Generator
) -> tuple[np.ndarray, dict[str, float]]:
    """Draws rows by E[p (1 − p)], the expected variance of a reward of 0 or 1.

    The solve rate p of a row has the distribution Beta(1 + solved, 1 + failed) over the window. So a row that was not
    drawn in the window is likelier than one that was always or never solved, and no row is left out for ever.

    Args:
      window: The prompts of the last steps; their numbers are those of rows.
      size: The number of rows.
      count: The number of different rows to draw, N.
      noise: The random generator.

    Returns:
      The numbers of the rows, and the shares of the draw that go to rows of four kinds.
    """
    known = window.numbers >= 0
    solved, failed = (np.bincount(window.numbers[known], x[known], size) for x in (window.solved, window.failed))
    a, b = 1 + solved, 1 + failed
    weights = a * b / ((a + b) * (a + b + 1))
    shares, rates, is_new = weights / weights.sum(), a / (a + b), a + b == 2
    kinds = {"new": is_new, "hard": ~is_new & (rates < 0.2), "easy": ~is_new & (rates > 0.8)}
    kinds["middle"] = ~np.logical_or.reduce(list(kinds.values()))
    metrics = {f"curriculum_{kind}": float(shares[mask].sum()) for kind, mask in kinds.items()}
    return noise.choice(size, count, replace=False, p=shares), metrics


# ---- levels of generators


def number_of(generator: int, level: int) -> int:
    """Returns the number of a generator's prompts of a level in a window."""
    return _LEVELS * generator + level


def choose_levels(window: Window, tops: Sequence[int], bound: float) -> list[int]:
    """Returns the level of each generator.

    A level is the newest one in the window, or the next if its solve rate is at least `bound` over at least 8 prompts.
    A generator that is not in the window begins again at level 0.

    Args:
      window: The prompts of the last steps, with numbers of `number_of`.
      tops: The highest level of each generator.
      bound: The solve rate at which a level rises.
    """
    levels = []
    for generator, top in enumerate(tops):
        numbers = np.where(window.numbers // _LEVELS == generator, window.numbers, -1)
        is_newest = (numbers == numbers.max()) & (numbers >= 0)
        solved, failed = window.solved[is_newest].sum(), window.failed[is_newest].sum()
        level = int(numbers.max()) % _LEVELS if is_newest.any() else 0
        rises = is_newest.sum() >= _LEAST and solved >= bound * (solved + failed) > 0
        levels.append(min(level + int(rises), top))
    return levels
