"""The rule that turns numbers over seeds into verdicts, fixed before any run. NumPy and SciPy alone.

A claim says that the mean μ of its number is between `low` and `high`. Three null hypotheses stand against three
verdicts, each with a one-sample t test over seeds (numbers are paired by seed):

- "no difference that matters": |μ| is at least the band, 0.02 or 10% of a ratio (two one-sided tests);
- "supported": μ is outside of the claim's range;
- "contradicted": μ is inside of it.

What is rejected gives the verdict, the first one first; else the claim is "undecided". There are looks at 10, 20 and
40 seeds, each at a third of 5%. At each look Benjamini and Yekutieli's step-up (2001) over all hypotheses of a family
bounds the expected share of false verdicts, however claims depend on one another. A claim that has its verdict keeps
it, and stands in later corrections with a p of 1; so does one that was not measured. Shares of false verdicts of the
three looks add up to at most 5%.

A deviation is at least that of evaluation alone: a few seeds that happen to agree do not decide.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from scipy import special, stats

from claims.questions import Claim, Scale
from grpo_jax.statistics import Interval, interval_over_runs

Verdict = Literal["no difference that matters", "supported", "contradicted", "undecided"]
VERDICTS: tuple[Verdict, ...] = ("no difference that matters", "supported", "contradicted")  # in the order of a claim
LOOKS = (10, 20, 40)  # seeds
ALPHA = 0.05  # of false verdicts in a family, over all looks
POWER = 0.8  # of `needed`
BANDS: Mapping[Scale, float] = {"difference": 0.02, "ratio": math.log(1.1)}
# Two policies that are right in 99% of 1,000 · 7 samples differ by chance with deviation √(2 · 0.99 · 0.01 / 7,000).
# Of a ratio: 1%.
FLOORS: Mapping[Scale, float] = {"difference": 0.0017, "ratio": 0.01}


class Decision(NamedTuple):
    """The rule's verdict on a claim."""

    verdict: Verdict
    seeds: int  # those that it was decided on, or that were looked at last
    interval: Interval  # Student's 95% over them, not adjusted for there being many claims and looks
    diverged: int = 0  # runs behind it that diverged
    needed: int | None = None  # seeds that would decide it, where it is undecided; None: over 10,000, or not known


UNDECIDED = Decision("undecided", 0, Interval(math.nan, math.nan, math.nan))  # before any run


def decide(
    claims: Sequence[Claim], values: Mapping[str, Sequence[float] | np.ndarray], looks: Sequence[int] = LOOKS
) -> dict[str, Decision]:
    """The verdicts of one family.

    Args:
      claims: all of the family, measured or not: so many are corrected for.
      values: id of a claim -> one value a seed, in the order of the seeds; a claim may have no values yet.
      looks: seeds of each.

    Returns:
      A decision for each claim, by its id.
    """
    results: dict[str, tuple[Verdict, int]] = {}
    for look in looks:
        tested = [claim for claim in claims if claim.id not in results and len(values.get(claim.id, ())) >= look]
        p = np.ones((len(claims), len(VERDICTS)))
        for claim in tested:
            p[claims.index(claim)] = p_values(claim, values[claim.id][:look])
        rejected = stats.false_discovery_control(p.ravel(), method="by").reshape(p.shape) <= ALPHA / len(looks)
        for claim in tested:
            if (of_claim := rejected[claims.index(claim)]).any():
                results[claim.id] = VERDICTS[int(np.argmax(of_claim))], look
    decisions = {}
    for claim in claims:
        of_claim = values.get(claim.id, ())
        verdict, seeds = results.get(claim.id, ("undecided", len(of_claim)))
        decisions[claim.id] = Decision(verdict, seeds, interval(claim, of_claim[:seeds]))
    return decisions


def decide_once(claims: Sequence[Claim], values: Mapping[str, Sequence[float] | np.ndarray]) -> dict[str, Decision]:
    """The verdicts of a family that is looked at once, after Bonferroni: some verdict is false in at most 5%.

    A claim has two true null hypotheses at most, so that each test is at 5% / (2 · claims).

    Args:
      claims: all of the family, measured or not.
      values: id of a claim -> one value a seed; a claim may have none.
    """
    decisions = {}
    for claim in claims:
        of_claim = values.get(claim.id, ())
        rejected = np.array(p_values(claim, of_claim) if len(of_claim) > 1 else [1]) <= ALPHA / (2 * len(claims))
        verdict: Verdict = VERDICTS[int(np.argmax(rejected))] if rejected.any() else "undecided"
        decisions[claim.id] = Decision(verdict, len(of_claim), interval(claim, of_claim))
    return decisions


def p_values(claim: Claim, values: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    """The p of each of `VERDICTS`: small where the verdict is not by chance; 1 where a value is not finite."""
    if not np.isfinite(values).all():
        return 1.0, 1.0, 1.0
    count, band = len(values), BANDS[claim.scale]
    bounds = np.array([-band, band, claim.low, claim.high])
    t = (np.mean(values) - bounds) / (spread(claim, values) / math.sqrt(count))
    above, below = special.stdtr(count - 1, -t), special.stdtr(count - 1, t)  # p of: the mean is not above; not below
    outside = min(below[2], above[3]) * (2 if np.isfinite(bounds).all() else 1)
    return max(above[0], below[1]), max(above[2], below[3]), min(1.0, outside)


def spread(claim: Claim, values: Sequence[float] | np.ndarray) -> float:
    """The standard deviation over seeds, at least the floor."""
    return max(float(np.std(values, ddof=1)), FLOORS[claim.scale])


def choose(values: Mapping[str, Sequence[float] | np.ndarray]) -> str:
    """Returns the simplest row that the best one does not exceed for certain.

    The best row has the largest mean. A row is as good as it if Student's 95% interval of their differences, paired by
    seed, contains 0.

    Args:
      values: row -> one value a seed, the simplest row first.
    """
    best = max(values, key=lambda row: float(np.mean(values[row])))
    differences = {row: interval_over_runs(np.subtract(values[best], of_row)) for row, of_row in values.items()}
    return next(row for row, it in differences.items() if row == best or it.low <= 0)


def interval(claim: Claim, values: Sequence[float] | np.ndarray) -> Interval:
    """The mean and Student's 95% interval, by the deviation that the tests have."""
    mean = float(np.mean(values)) if len(values) else math.nan
    if len(values) < 2:
        return Interval(mean, math.nan, math.nan)
    half = special.stdtrit(len(values) - 1, 0.975) * spread(claim, values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def standard_error(decision: Decision) -> float:
    """Returns the standard error of the mean, from its interval."""
    half = (decision.interval.high - decision.interval.low) / 2
    return half / float(special.stdtrit(decision.seeds - 1, 0.975))


def lone_level(family: int) -> float:
    """The level of a verdict that is the only one of its look, in a family of so many claims."""
    hypotheses = family * len(VERDICTS)
    return ALPHA / len(LOOKS) / (hypotheses * sum(1 / i for i in range(1, hypotheses + 1)))


def detectable(decision: Decision, family: int, seeds: int) -> float:
    """The distance of a mean from a bound at which this many seeds decide a claim with probability 0.8.

    The deviation is the one seen, and the level that of a lone verdict in a family of so many claims.
    """
    quantiles = special.stdtrit(seeds - 1, 1 - lone_level(family)) + special.stdtrit(seeds - 1, POWER)
    return float(quantiles) * standard_error(decision) * math.sqrt(decision.seeds / seeds)


def needed(claim: Claim, values: Sequence[float] | np.ndarray, family: int, most: int = 10_000) -> int | None:
    """The seeds at which a claim would be decided with probability 0.8, if its mean and deviation are those seen.

    It is the least n with (t at 1 − level + t at power) · deviation / √n below the distance of the mean from the
    nearest bound of its range, or from the band if it is within. The level is that of a lone verdict.

    Returns:
      n; None: more than `most`, or nothing is known of the deviation.
    """
    if len(values) < 2 or not np.isfinite(values).all():
        return None
    mean, band = float(np.mean(values)), BANDS[claim.scale]
    from_bounds = min(abs(mean - claim.low), abs(mean - claim.high))
    gap = max(from_bounds, band - abs(mean))
    n, level = np.arange(2, most + 1), lone_level(family)
    quantiles = special.stdtrit(n - 1, 1 - level) + special.stdtrit(n - 1, POWER)
    enough = quantiles * spread(claim, values) / np.sqrt(n) <= gap
    return int(n[np.argmax(enough)]) if enough.any() else None
