"""Estimates with confidence intervals from values `[M, n]` of M prompts with n completions each.

Prompts are drawn from a larger set and completions of one prompt are alike, so intervals come from resampling prompts.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

from grpo_jax.errors import UsageError

_LEVEL = 0.95  # of confidence
_RESAMPLES = 10_000  # enough for two digits of an interval's width (1411.5279)
_CELLS = 2**20  # the largest array of resamples; larger ones are drawn in pieces


class Interval(NamedTuple):
    """A mean with the bounds of its confidence interval. Undefined bounds are NaN."""

    mean: float
    low: float
    high: float

    def named(self, name: str) -> dict[str, float]:
        """Returns the mean under a name, and the bounds with the suffixes `_low` and `_high`."""
        return {name: self.mean, f"{name}_low": self.low, f"{name}_high": self.high}


def best_of(values: np.ndarray, k: int) -> np.ndarray:
    """Returns the expected maximum of k values, drawn without replacement from the n values of each prompt, `[M]`.

    It is an unbiased estimate of the best of k new completions. For values of 0 and 1 it is pass@k,
    1 − C(n − c, k) / C(n, k) with c values of 1 (2107.03374).

    Args:
      values: The values of all completions, `[M, n]`.
      k: The number of completions to draw, from 1 (the mean) to n.

    Returns:
      One estimate per prompt.

    Raises:
      UsageError: k is out of range.
    """
    values = np.sort(np.asarray(values, np.float64), axis=-1)
    n = values.shape[-1]
    if not 1 <= k <= n:
        raise UsageError(f"k is {k}, but there are {n} samples of each prompt: take 1 to {n}")
    # The i-th smallest is the maximum of C(i − 1, k − 1) of the C(n, k) draws. The share of the largest is k / n, and
    # shares of neighbours have simple ratios, so that no binomial is ever computed.
    i = np.arange(n, 1, -1)
    shares = k / n * np.cumprod([1, *(np.maximum(i - k, 0) / (i - 1))])
    return values @ shares[::-1]


def majority(values: np.ndarray, answers: Sequence[Sequence[Hashable | None]]) -> np.ndarray:
    """Returns maj@n: the mean value of the completions with the most frequent answer of a prompt, `[M]` (2203.11171).

    Ties are broken by chance, and the result is the expected value.

    Args:
      values: The values of all completions, `[M, n]`.
      answers: The answers of the completions, `[M][n]`. None abstains; if all abstain, all completions count.

    Returns:
      One value per prompt.
    """
    values = np.asarray(values, np.float64)

    def elected(sample: Sequence[Hashable | None]) -> list[bool]:
        votes = Counter(answer for answer in sample if answer is not None)
        most = max(votes.values(), default=0)
        return [not votes or (answer is not None and votes[answer] == most) for answer in sample]

    chosen = np.array([elected(sample) for sample in answers])
    # Answers that tie have equally many completions, so that the mean over both is the mean over answers.
    return np.mean(values, axis=-1, where=chosen)


def bootstrap(values: np.ndarray, *, binary: bool = True) -> Interval:
    """Returns the mean of one value per prompt, with a 95% interval from 10,000 resamples of the prompts.

    The bounds are percentiles of the resampled means. For few prompts they lie further out: their tail probability is
    Φ(−√(M / (M − 1)) t), with the quantile t of Student's distribution at M − 1 degrees of freedom ("expanded
    percentile", 1411.5279). If all values are equal, resampling gives no interval. Shares of right answers that are all
    0, or all 1, get the bounds of Clopper and Pearson.

    Args:
      values: One value per prompt, `[M]`.
      binary: True if the values are shares of right answers, not other rewards. Default: True.

    Returns:
      The mean and its interval. The bounds are NaN for too few prompts (below 6), and if all values are
      equal and neither 0 nor 1.

    Raises:
      UsageError: There are no values.
    """
    values = np.asarray(values, np.float64)
    interval = _percentiles(values)
    if binary and len(values) > 1 and np.all(values == values[0]) and values[0] in (0, 1):
        unseen = 1 - ((1 - _LEVEL) / 2) ** (1 / len(values))  # the largest share of others that could have been missed
        return interval._replace(low=values[0] * (1 - unseen), high=min(1.0, values[0] + unseen))
    return interval


class Calibration(NamedTuple):
    """A calibration curve over B bins with equally many predictions each, and its error."""

    predicted: np.ndarray  # [B], mean predicted probability
    frequency: np.ndarray  # [B], share of predictions that came true
    sizes: np.ndarray  # int [B], number of predictions
    error: float  # Σ size / M · |frequency − predicted|: the expected calibration error


def calibration(probabilities: np.ndarray, outcomes: np.ndarray, *, bins: int = 10) -> Calibration:
    """Compares predicted probabilities with outcomes, in bins of equal size (1706.04599; equal bins: 1904.01685).

    Even a perfect predictor has an error of about 0.8 √(p (1 − p) / size). Larger bins reduce it.

    Args:
      probabilities: The predictions, `[M]`.
      outcomes: 1 if the prediction came true, 0 if not, ½ for a tie, `[M]`.
      bins: The number of bins, at most M. Default: 10.

    Returns:
      The curve and its error.

    Raises:
      UsageError: There are no predictions.
    """
    probabilities, outcomes = np.asarray(probabilities, np.float64), np.asarray(outcomes, np.float64)
    if not len(outcomes):
        raise UsageError("there are no predictions to compare with outcomes: give at least one")
    pieces = np.array_split(np.argsort(probabilities, kind="stable"), min(bins, len(outcomes)))
    predicted = np.array([probabilities[piece].mean() for piece in pieces])
    frequency = np.array([outcomes[piece].mean() for piece in pieces])
    sizes = np.array([len(piece) for piece in pieces])
    return Calibration(predicted, frequency, sizes, float(sizes @ np.abs(frequency - predicted) / sizes.sum()))


@np.errstate(invalid="ignore", over="ignore")  # infinite values have no interval
def paired_difference(after: np.ndarray, before: np.ndarray) -> Interval:
    """Returns the mean change of a value over the same prompts, with the interval of `bootstrap`.

    The interval is narrower than those of the two means, because the difficulty of a prompt cancels.

    Args:
      after, before: The values after and before a change, `[M]` each, in the same order of prompts.

    Returns:
      The mean of after − before and its interval. The bounds are NaN if all changes are equal or too few.

    Raises:
      UsageError: The numbers of prompts differ, or see `bootstrap`.
    """
    after, before = np.asarray(after, np.float64), np.asarray(before, np.float64)
    if after.shape != before.shape:
        raise UsageError(
            f"{after.shape} values cannot be paired with {before.shape}: evaluate both on the same prompts"
        )
    return _percentiles(after - before)


def interval_over_runs(values: Sequence[float] | np.ndarray) -> Interval:
    """Returns the mean of a number over runs with different seeds, with Student's 95% t interval.

    It estimates the mean over further seeds, if the number is about normally distributed over seeds. With three runs
    the interval is wide: 4.3 standard errors on either side.

    Args:
      values: One value per run.

    Returns:
      The mean and its interval; bounds of NaN for a single run.
    """
    values = np.asarray(values, np.float64)
    mean = float(values.mean())
    if len(values) < 2:
        return Interval(mean, float("nan"), float("nan"))
    width = float(special.stdtrit(len(values) - 1, (1 + _LEVEL) / 2) * values.std(ddof=1) / np.sqrt(len(values)))
    return Interval(mean, mean - width, mean + width)


def _percentiles(values: np.ndarray) -> Interval:
    if values.ndim != 1 or not len(values):
        raise UsageError(f"an interval needs one value for each of at least one prompt, not {values.shape}")
    count, mean = len(values), float(np.mean(values))
    # Bounds from resampling lie between the extreme values, and those hold a median with probability 1 − 2^(1 − M).
    if np.all(values == values[0]) or 2.0 ** (1 - count) > 1 - _LEVEL:
        return Interval(mean, np.nan, np.nan)
    quantile = special.stdtrit(count - 1, (1 + _LEVEL) / 2)
    tail = float(special.ndtr(-np.sqrt(count / (count - 1)) * quantile))
    means = _resampled_means(values, np.random.default_rng(0))
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(mean, float(low), float(high))


def _resampled_means(values: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Returns the means of M values drawn with replacement, one for each resample."""
    count = len(values)
    distinct, counts = np.unique(values, return_counts=True)
    # For a few distinct values, such as shares of n, it suffices to count draws: forty times faster at M = 1,000.
    few = 8 * len(distinct) <= count

    def piece(size: int) -> np.ndarray:
        if few:
            return generator.multinomial(count, counts / count, size) @ distinct / count
        return values[generator.integers(count, size=(size, count), dtype=np.int32)].mean(-1)

    step = max(1, _CELLS // count)
    return np.concatenate([piece(min(step, _RESAMPLES - start)) for start in range(0, _RESAMPLES, step)])


def cell(row: Mapping[str, float], name: str) -> str:
    """Formats a number of a row with its interval: "0.970 [0.960, 0.980]". A missing number gives "", and NaN a
    dash."""
    if name not in row:
        return ""
    if math.isnan(row[name]):
        return "–"
    low, high = row.get(f"{name}_low", math.nan), row.get(f"{name}_high", math.nan)
    return f"{row[name]:z.3f}" + ("" if math.isnan(low) else f" [{low:z.3f}, {high:z.3f}]")
