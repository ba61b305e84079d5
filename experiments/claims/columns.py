"""Columns and rows of the questions' tables, read from runs, and the differences that claims are about."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from experiments.claims.ablation import START, Runs
from experiments.claims.findings import Measured
from experiments.common import collect
from experiments.whole_run import OF_SAMPLING
from grpo_jax.errors import UsageError
from grpo_jax.statistics import best_of

TENTHS = 10  # parts of a run that a curve has
SMOOTH = 5  # steps that a curve of learning is a mean of, where it is asked when it first reaches a score

# (a setting's runs) -> a value a seed
Column = Callable[[Runs], np.ndarray]


def accuracy(runs: Runs) -> np.ndarray:
    """Mean score of sampled held-out completions at the end; of several scores the first."""
    return score(0)(runs)


def score(k: int) -> Column:
    """The mean at the end of one of the numbers that a testbed judges completions by."""
    return lambda runs: runs.final[..., k] if runs.final.ndim > 1 else runs.final


def on_the_way(runs: Runs) -> np.ndarray:
    """The mean score of all completions that a run learns from, over its steps: the area under the curve of learning.

    These are sampled with noise of their own at every step, so the mean is over hundreds of completions for each of
    the run's policies. Settings that sample at another temperature are not compared by it.
    """
    return runs.metrics["gold"].mean(1)


def learning_curve(runs: Runs) -> list[list[float]]:
    """`on_the_way` of each tenth of a run (or of each step of a shorter one), `[seeds, 10]`."""
    steps = runs.metrics["gold"]
    return [[float(part.mean()) for part in np.array_split(of_run, min(TENTHS, len(of_run)))] for of_run in steps]


def pass_at(k: int) -> Column:
    """pass@k at the end, unbiased."""
    return lambda runs: np.array([best_of(of_run[-1, :, :-1], k).mean() for of_run in runs.scores])


def of_prompts(chosen: np.ndarray) -> Column:
    """`accuracy` on some of the held-out prompts, bool `[M]`."""
    return lambda runs: runs.scores[:, -1][:, chosen, :-1].mean((1, 2))


def jitter(runs: Runs) -> np.ndarray:
    """The standard deviation of the gold score from step to step; differences remove its trend."""
    values = runs.metrics["gold"]
    return np.diff(values, axis=1).std(1) / np.sqrt(2) if values.shape[1] > 2 else np.full(len(values), np.nan)


def steps_to(targets: np.ndarray) -> Column:
    """The step from which on the mean score of `SMOOTH` steps first reaches each seed's target, from 1; all steps and
    one more if it never does."""

    def read(runs: Runs) -> np.ndarray:
        means = np.stack([np.convolve(x, np.full(SMOOTH, 1 / SMOOTH), "valid") for x in smoothable(runs)])
        reached = means >= targets[:, None]
        return np.where(reached.any(1), reached.argmax(1), reached.shape[1]) + 1.0

    return read


def smoothable(runs: Runs) -> np.ndarray:
    """The score of each step `[seeds, S]`; a run shorter than `SMOOTH` steps is as if it stood still before."""
    steps = runs.metrics["gold"]
    return np.pad(steps, [(0, 0), (max(0, SMOOTH - steps.shape[1]), 0)], mode="edge")


def last(metric: str, share: float = 0.1) -> Column:
    """The mean of a metric over the last steps."""
    return lambda runs: _metric(runs, metric)[:, -max(1, round(share * runs.metrics["reward"].shape[1])) :].mean(1)


def first(metric: str, steps: int) -> Column:
    """The mean of a metric over the first steps."""
    return lambda runs: _metric(runs, metric)[:, :steps].mean(1)


def _metric(runs: Runs, name: str) -> np.ndarray:
    if name not in runs.metrics:
        raise UsageError(f"there is no metric {name!r}: there are {', '.join(sorted(runs.metrics))}")
    return runs.metrics[name]


def table(
    runs: Mapping[str, Runs], columns: Mapping[str, Column], *, start: str, reused: bool = False
) -> dict[str, dict[str, list[float]]]:
    """Rows of a finding. The first is the start of all runs: their metrics at the first step and evaluation.

    Args:
      runs: of settings, by name.
      columns: what is read of them.
      start: the setting whose first step it is, since what a step samples depends on group size and temperature.
      reused: whether a rollout is used for several optimizer steps, so that what the first step has of updates is not
        of the start.
    """
    first_step = {name: values[:, :1] for name, values in runs[start].metrics.items()}
    if reused:
        unknown = first_step.keys() - set(OF_SAMPLING)
        first_step |= {name: np.full(first_step[name].shape, np.nan) for name in unknown}
    rows = {START: Runs(first_step, runs[start].scores[:, :1])} | dict(runs)
    return {name: {title: list(map(float, read(of))) for title, read in columns.items()} for name, of in rows.items()}


def merge_seeds(found: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, list[float]]]:
    """Rows of a finding, from one table for each seed."""
    rows: dict[str, dict[str, list[float]]] = {}
    for of_one in found:
        collect(rows, of_one)
    return rows


def minus(rows: Mapping[str, Mapping[str, Sequence[float]]], column: str, one: str, other: str) -> np.ndarray:
    """A column of one row minus that of another, seed by seed."""
    return np.subtract(rows[one][column], rows[other][column])


def compared(runs: Mapping[str, Runs], read: Column, one: str, other: str, *, ratio: bool = False) -> Measured:
    """The number of a primary claim: a column of one setting minus that of another, seed by seed.

    Args:
      runs: of settings, by name.
      read: the column.
      one: name of a setting.
      other: name of the other one.
      ratio: whether it is the logarithm of their ratio instead.
    """
    values = [read(runs[name]) for name in (one, other)]
    diverged = runs[one].diverged + runs[other].diverged
    return Measured(log_ratio(*values) if ratio else np.subtract(*values), diverged)


def log_ratio(one: Sequence[float] | np.ndarray, other: Sequence[float] | np.ndarray) -> np.ndarray:
    """ln(one / other), seed by seed; NaN where either is not above 0."""
    both = np.stack([one, other]).astype(np.float64)
    both[both <= 0] = np.nan
    return np.subtract(*np.log(both))
