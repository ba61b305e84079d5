"""Columns and rows of the questions' tables, read from runs."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from experiments.claims.ablation import START, Runs
from experiments.common import collect
from grpo_jax.errors import UsageError
from grpo_jax.training.scan import OF_SAMPLING

# (a setting's runs) -> a value a seed
Column = Callable[[Runs], np.ndarray]


def accuracy(runs: Runs) -> np.ndarray:
    """Mean score of sampled held-out completions at the end."""
    return runs.final


def on_the_way(runs: Runs) -> np.ndarray:
    """The mean of `accuracy` over the evaluations of a run: higher for faster learning."""
    return runs.curve.mean(1)


def jitter(metric: str) -> Column:
    """The standard deviation of a metric from step to step; differences remove its trend."""

    def read(runs: Runs) -> np.ndarray:
        values = runs.metrics[metric]
        return np.diff(values, axis=1).std(1) / np.sqrt(2) if values.shape[1] > 2 else np.full(len(values), np.nan)

    return read


def steps_to(targets: np.ndarray) -> Column:
    """The step at which each seed's accuracy first reaches its target, interpolated; all steps if it never does."""

    def read(runs: Runs) -> np.ndarray:
        steps, found = runs.metrics["reward"].shape[1], []
        for curve, target in zip(runs.curve, targets, strict=True):
            at, first = np.linspace(0, steps, len(curve)), int(np.argmax(curve >= target))
            if np.isnan(target) or np.isnan(curve).any():  # of a run that diverged
                found.append(np.nan)
                continue
            around = slice(max(first - 1, 0), first + 1)
            found.append(np.interp(target, curve[around], at[around]) if curve[first] >= target else steps)
        return np.array(found) if runs.curve.shape[1] > 1 else np.full(len(targets), np.nan)

    return read


def last(metric: str, share: float = 0.1) -> Column:
    """The mean of a metric over the last steps."""

    def read(runs: Runs) -> np.ndarray:
        if metric not in runs.metrics:
            raise UsageError(f"there is no metric {metric!r}: there are {', '.join(sorted(runs.metrics))}")
        values = runs.metrics[metric]
        return values[:, -max(1, round(share * values.shape[1])) :].mean(1)

    return read


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
    first = {name: values[:, :1] for name, values in runs[start].metrics.items()}
    if reused:
        first |= {name: np.full(first[name].shape, np.nan) for name in first.keys() - set(OF_SAMPLING)}
    rows = {START: Runs(first, runs[start].scores[:, :1])} | dict(runs)
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
