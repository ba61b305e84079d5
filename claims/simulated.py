"""How often the rule of `verdicts` is wrong, and how often it finds a difference, on numbers of known means.

Whole families of claims with all their looks are simulated, as `questions` has them. Means are put where a verdict is
false: at no difference, at the edge of what matters, and at the bound of the claim's own range.

Deviations are those seen over seeds, 0.0029 to 0.01 where tasks are nearly solved and 0.025 to 0.05 where they are not;
claims are independent, or share half of their variance, as claims with a common arm do; values are normal, or have
Student's tails at 3 degrees. The last two lines have for each claim the deviation that its own seeds had. Five minutes
on two cores.

  python -m claims.simulated
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro

from claims.numbers import read_numbers
from claims.questions import CLAIMS, Claim
from claims.verdicts import BANDS, LOOKS, Decision, Verdict, decide, standard_error

DEVIATIONS = (0.0029, 0.01, 0.025, 0.05)
WAYS = {"normal": (0.0, math.inf), "correlated": (0.5, math.inf), "heavy tails": (0.0, 3.0)}  # correlation, degrees


@dataclass(frozen=True)
class Config:
    """Options."""

    sets: int = 2000
    """Simulated families for each line."""
    seed: int = 0
    """Seed of the simulation."""
    last_look: int = LOOKS[-1]
    """Seeds of the last look: how many more would find."""
    numbers: Path = Path("docs/results/numbers.json")
    """Results of `reproduce`, for the deviation of each claim."""


class Rates(NamedTuple):
    """Shares of simulated families, or of their claims."""

    wrong: float  # families with a false verdict
    decided: float  # claims that are decided
    first: float  # claims that are decided at the first look


def no_difference(claim: Claim) -> float:
    """A mean of 0: whatever has 0 on a bound of its range is neither supported nor contradicted."""
    return 0.0


def edge(claim: Claim) -> float:
    """The mean at which a difference begins to matter."""
    return BANDS[claim.scale]


def bound(claim: Claim) -> float:
    """The mean at the bound of a claim's range."""
    return claim.low if math.isfinite(claim.low) else claim.high


def is_false(claim: Claim, mean: float, verdict: Verdict) -> bool:
    """Returns whether a verdict is wrong. At a bound both verdicts that it separates are right."""
    if verdict == "no difference that matters":
        return abs(mean) >= BANDS[claim.scale]
    if verdict == "supported":
        return not claim.low < mean < claim.high
    return verdict == "contradicted" and claim.low <= mean <= claim.high


def alike(claims: Sequence[Claim], number: float) -> list[float]:
    """Returns the same number for all claims, and five times as much for a ratio: its band is five times as wide."""
    return [number if claim.scale == "difference" else 5 * number for claim in claims]


def seen(decision: Decision) -> float:
    """The deviation over seeds that a measured claim's interval was made of."""
    return standard_error(decision) * math.sqrt(decision.seeds)


def simulate(
    claims: Sequence[Claim],
    means: Sequence[float],
    deviations: Sequence[float],
    correlation: float = 0.0,
    degrees: float = math.inf,
    *,
    sets: int,
    seed: int = 0,
    looks: Sequence[int] = LOOKS,
) -> Rates:
    """Whole families, looked at as often as the rule looks.

    Args:
      claims: a family.
      means: of each claim's number.
      deviations: of it over seeds.
      correlation: of claims with one another.
      degrees: of freedom of Student's tails; infinite: normal values.
      sets: simulated families.
      seed: of the simulation.
      looks: seeds of each.
    """
    random, shape = np.random.default_rng(seed), (len(claims), looks[-1])
    wrong, decided, first = 0, 0, 0

    def noise(size: tuple[int, ...]) -> np.ndarray:
        if math.isinf(degrees):
            return random.standard_normal(size)
        return random.standard_t(degrees, size) / math.sqrt(degrees / (degrees - 2))

    for _ in range(sets):
        shared = math.sqrt(correlation) * noise(shape[1:]) + math.sqrt(1 - correlation) * noise(shape)
        values = np.array(means)[:, None] + np.array(deviations)[:, None] * shared
        decisions = decide(claims, {claim.id: row for claim, row in zip(claims, values, strict=True)}, looks)
        ends = [decisions[claim.id] for claim in claims]
        wrong += any(is_false(claim, mean, it.verdict) for claim, mean, it in zip(claims, means, ends, strict=True))
        decided += sum(it.verdict != "undecided" for it in ends)
        first += sum(it.verdict != "undecided" and it.seeds == looks[0] for it in ends)
    count = sets * len(claims)
    return Rates(wrong / sets, decided / count, first / count)


def lines(config: Config) -> Iterator[tuple[str, Rates]]:
    """Yields what is simulated, with its rates."""
    looks, measured = (*LOOKS[:-1], config.last_look), read_numbers(config.numbers).claims
    for family in dict.fromkeys(claim.family for claim in CLAIMS):
        claims = [claim for claim in CLAIMS if claim.family == family]
        rates = partial(simulate, claims, sets=config.sets, seed=config.seed, looks=looks)
        for at, deviation, way in product((no_difference, edge, bound), DEVIATIONS, WAYS):
            result = rates([at(claim) for claim in claims], alike(claims, deviation), *WAYS[way])
            yield f"{family}, {at.__name__}, deviation {deviation:g}, {way}", result
        spreads = {f"deviation {it:g}": alike(claims, it) for it in DEVIATIONS}
        spreads["each claim's own deviation"] = [seen(measured[claim.id]) for claim in claims]
        for words, deviations in spreads.items():
            yield f"{family}, difference of 0.03, {words}, normal", rates(alike(claims, 0.03), deviations)


def main(config: Config) -> None:
    """Prints a line for each way of simulating."""
    print("a false verdict in the family | claims decided | at the first look")
    for name, rates in lines(config):
        print(f"{rates.wrong:6.2%} {rates.decided:7.1%} {rates.first:7.1%}  {name}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m claims.simulated", description=__doc__))
