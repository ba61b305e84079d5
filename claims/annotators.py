"""Made-up annotators who score responses, each with a bias and a scale of their own, and how far they agree.

Letters: S sessions, A annotators, P prompts, K responses.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import special

from claims.bench import Bench
from claims.questions import COIN, START
from experiments.common import collect
from grpo_jax.statistics import calibration

View = Callable[[np.ndarray], np.ndarray]


class Draws(NamedTuple):
    """Standard normal numbers that all kinds of annotators are made from."""

    quality: np.ndarray  # [P, K], of responses: deviation 1 within a prompt, and 1 between prompts
    separate: np.ndarray  # [A, 2], of an annotator's bias and factor
    mood: np.ndarray  # [S, A, 2], the same in a session
    noise: np.ndarray  # [S, A, P, K]


class Kind(NamedTuple):
    """Properties of annotators."""

    spread: float  # deviation of their biases; that of the logarithm of their factors is half of it
    noise: float  # deviation of it on a score
    sees: float = 1.0  # factor on the quality; 0: scores of chance alone


def draw(seed: int, *, annotators: int = 64, prompts: int = 100, responses: int = 8) -> Draws:
    """The numbers of a seed, for two sessions."""
    rng, shape = np.random.default_rng(seed), (prompts, responses)
    quality = rng.normal(size=(prompts, 1)) + rng.normal(size=shape)
    people = rng.normal(size=(annotators, 2)), rng.normal(size=(2, annotators, 2))
    return Draws(quality, *people, rng.normal(size=(2, annotators, *shape)))


def scored(draws: Draws, kind: Kind) -> np.ndarray:
    """Scores: bias + factor · quality + noise, `[S, A, P, K]`. A session's mood varies half as much as annotators."""
    person = kind.spread * (draws.separate + draws.mood / 2)
    bias, log_factor = np.moveaxis(person, -1, 0)[..., None, None]
    return bias + np.exp(log_factor / 2) * kind.sees * draws.quality + kind.noise * draws.noise


def concordance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """2 cov(x, y) / (var x + var y + (mean x − mean y)²) over prompts and responses, `[A]` (Lin 1989).

    1: the same numbers, not only numbers on a line as for a correlation.

    Args:
      x: `[A, P, K]`.
      y: likewise.
    """
    axes = (-2, -1)
    means = x.mean(axes, keepdims=True), y.mean(axes, keepdims=True)
    covariance = ((x - means[0]) * (y - means[1])).mean(axes)
    return 2 * covariance / (x.var(axes) + y.var(axes) + (x.mean(axes) - y.mean(axes)) ** 2)


def unchanged(scores: np.ndarray) -> np.ndarray:
    """Returns the scores themselves."""
    return scores


def ranks(scores: np.ndarray) -> np.ndarray:
    """Within a prompt, from 0."""
    return scores.argsort(-1).argsort(-1)


def standardised(scores: np.ndarray) -> np.ndarray:
    """(r − μ) / σ within a prompt: the advantages of a group."""
    return (scores - scores.mean(-1, keepdims=True)) / scores.std(-1, keepdims=True)


def agreement(scores: np.ndarray, view: View = unchanged, *, again: bool = False) -> float:
    """Returns the mean concordance of two annotators, or of the same annotator in two sessions.

    Args:
      scores: of `scored`.
      view: what is compared: `unchanged`, `ranks` or `standardised`.
      again: the same annotator.
    """
    seen = view(scores)
    return float(concordance(seen[0], seen[1] if again else np.roll(seen[0], 1, axis=0)).mean())


def fit(draws: Draws, *, scores: float, ranks_: float, rounds: int = 4) -> Kind:
    """The kind of annotators with these mean agreements on scores and on ranks."""
    kind = Kind(0.5, 0.5)
    for _ in range(rounds):  # noise moves both figures, spread hardly that of ranks
        kind = kind._replace(
            noise=_root(lambda x: agreement(scored(draws, kind._replace(noise=x)), ranks) - ranks_, 0.05, 3.0)  # noqa: B023
        )
        kind = kind._replace(
            spread=_root(lambda x: agreement(scored(draws, kind._replace(spread=x))) - scores, 0.0, 4.0)  # noqa: B023
        )
    return kind


def calibration_errors(draws: Draws, kind: Kind) -> tuple[float, float]:
    """Measures P(i better than j) = σ(k · difference of their scores): the expected calibration error within a prompt,
    and across prompts and annotators.

    k is fitted on pairs within a prompt of half of the annotators, as a reward model is, and used on the other half.
    """
    scores = scored(draws, kind)[0]
    half = len(scores) // 2

    def pairs(scores: np.ndarray, others: np.ndarray, better: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        difference = scores[..., ::2] - others[..., 1::2]
        return difference.ravel(), np.broadcast_to(better, difference.shape).ravel().astype(np.float64)

    within = draws.quality[:, ::2] > draws.quality[:, 1::2]
    x, y = pairs(scores[:half], scores[:half], within)
    k = _root(lambda k: float(np.mean((y - special.expit(k * x)) * x)), 0.0, 100.0, steps=16)
    elsewhere = np.roll(scores[half:], (1, 1), axis=(0, 1))  # the next annotator, at the next prompt
    across = draws.quality[:, ::2] > np.roll(draws.quality, 1, axis=0)[:, 1::2]
    seen = pairs(scores[half:], scores[half:], within), pairs(scores[half:], elsewhere, across)
    near, far = (calibration(special.expit(k * x), y).error for x, y in seen)
    return near, far


def _root(falling: Callable[[float], float], low: float, high: float, *, steps: int = 12) -> float:
    """Finds the zero of a falling function by bisection."""
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2


# ---- the question `agreement`

SPREADS, NOISE = {"small": 0.25, "medium": 0.5, "large": 1.0}, 0.5
VIEWS = {"scores": unchanged, "ranks": ranks, "advantages": standardised}


def rows(bench: Bench) -> tuple[dict[str, dict[str, list[float]]], str]:
    """Returns the table with the draws of each seed, and a note on the annotators that fit."""
    table, fitted = dict[str, dict[str, list[float]]](), list[Kind]()
    for seed in bench.seeds:
        draws = draw(seed)
        fitted.append(fit(draws, scores=0.61, ranks_=0.83))
        kinds = {START: Kind(0.0, NOISE), COIN: Kind(0.0, 1.0, sees=0.0), "fitted": fitted[-1]}
        kinds |= {f"{name}, noise": Kind(spread, NOISE) for name, spread in SPREADS.items()}
        kinds |= {f"{name}, no noise": Kind(spread, 0.0) for name, spread in SPREADS.items()}
        collect(table, {name: _row(draws, kind) for name, kind in kinds.items()})
    spread, noise = np.mean(fitted, axis=0)[:2]
    return table, f"These are annotators of a model, not people. Fitted: spread {spread:.2f}, noise {noise:.2f}."


def _row(draws: Draws, kind: Kind) -> dict[str, float]:
    scores = scored(draws, kind)
    columns = {name: agreement(scores, view) for name, view in VIEWS.items()}
    columns |= {f"{name} again": agreement(scores, VIEWS[name], again=True) for name in ("scores", "ranks")}
    return columns | dict(zip(("error within", "error across"), calibration_errors(draws, kind), strict=True))
