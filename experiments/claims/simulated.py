"""How often the rule of `verdicts` is wrong, and how often it finds a difference, on numbers of known means.

Whole families of claims with all their looks are simulated, as they are registered in `primary`. Means are put where a
verdict is false: at no difference, at the edge of what matters, and at the bound of the claim's own range. Deviations
are those seen over seeds, 0.0029 to 0.01 where tasks are nearly solved and 0.025 to 0.05 where they are not; claims are
independent, or share half of their variance, as claims with a common arm do; values are normal, or have Student's tails
at 3 degrees. The last two lines have for each claim the deviation that its own seeds had. Five minutes on two cores.

  python -m experiments.claims.simulated
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro
from scipy import special

from experiments.claims.numbers import read_numbers
from experiments.claims.primary import PRIMARY, Primary
from experiments.claims.verdicts import BANDS, LOOKS, Decision, Verdict, decide

DEVIATIONS = (0.0029, 0.01, 0.025, 0.05)


@dataclass(frozen=True)
class Config:
    """Options."""

    sets: int = 2000
    """Simulated families for each line."""
    seed: int = 0
    """Of the simulation."""
    last_look: int = LOOKS[-1]
    """Seeds of the last look: how many more would find."""
    numbers: Path = Path("docs/results/numbers.json")
    """What `reproduce` measured: for the deviation of each claim."""


class Rates(NamedTuple):
    """Shares of simulated families, or of their claims."""

    wrong: float  # families with a false verdict
    decided: float  # claims that are decided
    first: float  # claims that are decided at the first look


def no_difference(claim: Primary) -> float:
    """A mean of 0: whatever has 0 on a bound of its range is neither supported nor contradicted."""
    return 0.0


def edge(claim: Primary) -> float:
    """The mean at which a difference begins to matter."""
    return BANDS[claim.scale]


def bound(claim: Primary) -> float:
    """The mean at the bound of a claim's range."""
    return claim.low if math.isfinite(claim.low) else claim.high


def is_false(claim: Primary, mean: float, verdict: Verdict) -> bool:
    """Whether a verdict is wrong. At a bound all verdicts that the bound parts are."""
    if verdict == "no difference that matters":
        return abs(mean) >= BANDS[claim.scale]
    if verdict == "supported":
        return not claim.low < mean < claim.high
    return verdict == "contradicted" and claim.low <= mean <= claim.high


def alike(claims: Sequence[Primary], deviation: float) -> list[float]:
    """The same deviation for all claims, and five times as much for a ratio: its band is five times as wide."""
    return [deviation if claim.scale == "difference" else 5 * deviation for claim in claims]


def seen(decision: Decision) -> float:
    """The deviation over seeds that a measured claim's interval was made of."""
    half = (decision.interval.high - decision.interval.low) / 2
    return half * math.sqrt(decision.seeds) / float(special.stdtrit(decision.seeds - 1, 0.975))


def simulate(
    claims: Sequence[Primary],
    means: Sequence[float],
    deviations: Sequence[float],
    *,
    sets: int,
    seed: int = 0,
    correlation: float = 0.0,
    degrees: float = math.inf,
    looks: Sequence[int] = LOOKS,
) -> Rates:
    """Whole families, looked at as often as the rule looks.

    Args:
      claims: a family.
      means: of each claim's number.
      deviations: of it over seeds.
      sets: simulated families.
      seed: of the simulation.
      correlation: of claims with one another.
      degrees: of freedom of Student's tails; infinite: normal values.
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
        found = decide(claims, {claim.id: row for claim, row in zip(claims, values, strict=True)}, looks)
        said = [found[claim.id] for claim in claims]
        wrong += any(is_false(claim, mean, it.verdict) for claim, mean, it in zip(claims, means, said, strict=True))
        decided += sum(it.verdict != "undecided" for it in said)
        first += sum(it.verdict != "undecided" and it.seeds == looks[0] for it in said)
    count = sets * len(claims)
    return Rates(wrong / sets, decided / count, first / count)


def lines(config: Config) -> Iterator[tuple[str, Rates]]:
    """What is simulated, with its rates."""
    families = {name: [c for c in PRIMARY if c.family == name] for name in dict.fromkeys(c.family for c in PRIMARY)}
    looks = (*LOOKS[:-1], config.last_look)
    nulls: tuple[Callable[[Primary], float], ...] = (no_difference, edge, bound)
    ways = (("normal", 0.0, math.inf), ("correlated", 0.5, math.inf), ("heavy tails", 0.0, 3.0))
    for (name, claims), at, deviation, (way, correlation, degrees) in product(
        families.items(), nulls, DEVIATIONS, ways
    ):
        yield (
            f"{name}, {at.__name__}, deviation {deviation:g}, {way}",
            simulate(
                claims,
                [at(claim) for claim in claims],
                alike(claims, deviation),
                sets=config.sets,
                seed=config.seed,
                correlation=correlation,
                degrees=degrees,
                looks=looks,
            ),
        )
    measured = read_numbers(config.numbers).claims
    for name, claims in families.items():
        means = [0.03 if claim.scale == "difference" else 0.15 for claim in claims]
        spreads = {f"deviation {it:g}": alike(claims, it) for it in DEVIATIONS}
        spreads["each claim's own deviation"] = [seen(measured[claim.id].decision) for claim in claims]
        for said, deviations in spreads.items():
            rates = simulate(claims, means, deviations, sets=config.sets, seed=config.seed, looks=looks)
            yield f"{name}, difference of 0.03, {said}, normal", rates


def main(config: Config) -> None:
    """Prints a line for each way of simulating."""
    print("a false verdict in the family | claims decided | at the first look")
    for name, rates in lines(config):
        print(f"{rates.wrong:6.2%} {rates.decided:7.1%} {rates.first:7.1%}  {name}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m experiments.claims.simulated", description=__doc__))
