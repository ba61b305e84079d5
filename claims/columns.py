"""Columns of the questions' tables, by name, and the numbers of comparisons."""

import re
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from claims.bench import Runs
from claims.questions import Comparison
from claims.testbeds import ALL_RIGHT, has_carry
from experiments.whole_run import OF_SAMPLING
from grpo_jax.errors import UsageError
from grpo_jax.statistics import best_of

TENTHS = 10  # parts of a run that a curve has
SMOOTH = 5  # steps that a curve of learning is a mean of, where it is asked when it first reaches a score

# (a setting's runs) -> a value a seed
Column = Callable[[Runs], np.ndarray]


def final_score(runs: Runs, *, k: int = 0) -> np.ndarray:
    """Returns the mean at the end of one of the numbers that a testbed judges sampled held-out completions by."""
    final = runs.curve[:, -1]
    return final[..., k] if final.ndim > 1 else final


def score_on_the_way(runs: Runs) -> np.ndarray:
    """Returns the mean score of all completions that a run learns from: the area under the curve of learning.

    These are sampled with noise of their own at every step, so the mean is over hundreds of completions for each of
    the run's policies. Settings that sample at another temperature are not compared by it.
    """
    return runs.metrics["gold"].mean(1)


def metric_mean(runs: Runs, *, metric: str, first: int = 0, share: float = 0.1) -> np.ndarray:
    """Returns the mean of a metric over the first steps, or over the last share of all steps if `first` is 0."""
    values = runs.metrics[metric]
    return (values[:, :first] if first else values[:, -max(1, round(share * values.shape[1])) :]).mean(1)


def carry_score(runs: Runs, *, carries: bool) -> np.ndarray:
    """Returns the mean score at the end of held-out additions that carry, or of those that do not."""
    examples = runs.setting.testbed.task(num_prompts=1, seed=0, heldout=runs.scores.shape[2]).task.heldout.examples
    return runs.scores[:, -1][:, has_carry(examples) == carries, :-1].mean((1, 2))


def jitter(runs: Runs) -> np.ndarray:
    """Returns the standard deviation of the score from step to step; differences remove its trend."""
    values = runs.metrics["gold"]
    return np.diff(values, axis=1).std(1) / np.sqrt(2) if values.shape[1] > 2 else np.full(len(values), np.nan)


def wrong_length(runs: Runs) -> np.ndarray:
    """Returns the mean letters of held-out words at the end whose gold score is below 1."""
    gold, letters = runs.scores[:, -1, :, :-1, 0], runs.scores[:, -1, :, :-1, 1]
    return np.array([length[score < ALL_RIGHT].mean() for score, length in zip(gold, letters, strict=True)])


def pass_at(runs: Runs, *, k: int) -> np.ndarray:
    """Returns pass@k at the end, unbiased."""
    return np.array([best_of(scores[-1, :, :-1], k).mean() for scores in runs.scores])


COLUMNS: Mapping[str, Column] = {
    **dict.fromkeys(("accuracy", "score", "gold"), final_score),
    "on the way": score_on_the_way,
    "letters": partial(final_score, k=1),
    "repeated": partial(final_score, k=2),
    "repeated sentences": partial(metric_mean, metric="repeated"),
    **dict.fromkeys(("with a carry", "carried"), partial(carry_score, carries=True)),
    "without": partial(carry_score, carries=False),
    "letters of wrong words": wrong_length,
    "reward": partial(metric_mean, metric="reward"),
    "reward jitter": jitter,
    "KL": partial(metric_mean, metric="kl"),
    "entropy": partial(metric_mean, metric="entropy"),
    "mismatch": partial(metric_mean, metric="first_sampler_mismatch"),
    "largest |ratio − 1| of a token": partial(metric_mean, metric="ratio_deviation", share=1),
    "groups of equal rewards": partial(metric_mean, metric="zero_spread_share", share=1),
    "different": partial(metric_mean, metric="distinct_share", share=1),
    "different, first steps": partial(metric_mean, metric="distinct_share", first=5),
}


def read_column(name: str, runs: Runs) -> np.ndarray:
    """Returns the values of a column by its name: one of `COLUMNS`, or pass@k.

    Raises:
      UsageError: there is no such column.
    """
    if passes := re.fullmatch(r"pass@(\d+)", name):
        return pass_at(runs, k=int(passes[1]))
    if name not in COLUMNS:
        raise UsageError(f"there is no column {name!r}: name one of {', '.join(COLUMNS)}, or pass@k")
    return COLUMNS[name](runs)


# ---- numbers of two settings together


def log_ratio_of_samples(one: Runs, other: Runs) -> np.ndarray:
    """Returns ln of the ratio of samples until 95% of the final score of the worse of the two."""
    targets = 0.95 * np.minimum(*(runs.curve[:, -1] for runs in (one, other)))
    return log_ratio(steps_to(one, targets), steps_to(other, targets))


def steps_to(runs: Runs, targets: np.ndarray) -> np.ndarray:
    """Returns the step from which on the mean score of `SMOOTH` steps first reaches each seed's target, from 1.

    If a run never does, it is the last such step and one more. A run shorter than `SMOOTH` steps is as if it stood
    still before.
    """
    steps = runs.metrics["gold"]
    padded = np.pad(steps, [(0, 0), (max(0, SMOOTH - steps.shape[1]), 0)], mode="edge")
    means = np.stack([np.convolve(x, np.full(SMOOTH, 1 / SMOOTH), "valid") for x in padded])
    reached = means >= targets[:, None]
    return np.where(reached.any(1), reached.argmax(1), reached.shape[1]) + 1.0


def gold_at_equal_kl(one: Runs, other: Runs) -> np.ndarray:
    """Returns the gold score of `one` minus that of `other`, where each first has the KL that both reach."""
    paths = [np.maximum.accumulate(runs.metrics["kl"], axis=1) for runs in (one, other)]
    both = np.minimum(paths[0][:, -1], paths[1][:, -1])[:, None]

    def gold(runs: Runs, path: np.ndarray) -> np.ndarray:
        begin = np.argmax(path >= both, axis=1)
        return np.array([steps[at : at + SMOOTH].mean() for steps, at in zip(runs.metrics["gold"], begin, strict=True)])

    return gold(one, paths[0]) - gold(other, paths[1])


PAIRED: Mapping[str, Callable[[Runs, Runs], np.ndarray]] = {
    "ln(samples to a target)": log_ratio_of_samples,
    "gold at equal KL": gold_at_equal_kl,
}


# ---- tables and comparisons


def compare(comparison: Comparison, read: Callable[[str, str], np.ndarray]) -> np.ndarray:
    """Returns the number of a comparison, a value a seed.

    Args:
      comparison: of one, two or four cells.
      read: (row, column) -> a value a seed.
    """
    values = [read(*cell) for cell in comparison.cells]
    if comparison.scale == "ratio":
        return log_ratio(*values)
    return np.sum([sign * x for sign, x in zip((1, -1, -1, 1), values, strict=False)], axis=0)


def log_ratio(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns ln(one / other), seed by seed; NaN where either is not above 0."""
    both = np.stack([one, other]).astype(np.float64)
    both[both <= 0] = np.nan
    return np.subtract(*np.log(both))


def start_of(runs: Runs) -> Runs:
    """Returns the start of runs: their metrics at the first step, and their first evaluation.

    Where a rollout is used for several optimizer steps, what the first step has of updates is not of the start: NaN.
    """
    updates = runs.setting.shape.get("epochs", 1) * runs.setting.shape.get("minibatches", 1)
    metrics = {name: values[:, :1] for name, values in runs.metrics.items()}
    if updates > 1:
        metrics |= {name: np.full(x.shape, np.nan) for name, x in metrics.items() if name not in OF_SAMPLING}
    return runs._replace(metrics=metrics, scores=runs.scores[:, :1])


def learning_curve(runs: Runs) -> list[list[float]]:
    """Returns the mean score in each tenth of a run (or of each step of a shorter one), `[seeds, 10]`."""
    steps = runs.metrics["gold"]
    return [[float(part.mean()) for part in np.array_split(run, min(TENTHS, len(run)))] for run in steps]
