"""Checks the rule of verdicts by hand, its correction by a loop, claims that stop, and how often it is wrong."""

import math
from pathlib import Path

import numpy as np
import pytest

from claims import simulated, verdicts
from claims.numbers import read_numbers
from claims.questions import BY_ID, CLAIMS, HEADLINES, QUESTIONS, RETESTS, Claim
from claims.verdicts import decide, needed, p_values
from grpo_jax.config import BEST_CORRECTION

ROOT = Path(__file__).parents[2]


def claim(name="it", low=0.0, high=math.inf, scale="difference"):
    shared = ("source", "words", "measure", "column", ["one", "other"], scale)
    return Claim(*shared, id=name, question="question", family="announcements", label="label", low=low, high=high)


def around(mean, deviation, count):
    """Values with exactly this mean and deviation."""
    noise = np.random.default_rng(0).standard_normal(count)
    return mean + deviation * (noise - noise.mean()) / noise.std(ddof=1)


P_VALUES = [
    # A mean of 0.05 with an error of 0.1 / √4: t is 1 at 0, 1.4 at −0.02, 0.6 at 0.02. With 3 degrees of freedom.
    (0.0, math.inf, (0.7046, 0.1955, 0.8045)),
    (-math.inf, 0.0, (0.7046, 0.8045, 0.1955)),
    (-0.02, 0.02, (0.7046, 0.7046, 0.5908)),  # outside on either side: twice the smaller p
]


@pytest.mark.parametrize(("low", "high", "expected"), P_VALUES)
def test_p_values_by_hand(low, high, expected):
    np.testing.assert_allclose(p_values(claim(low=low, high=high), around(0.05, 0.1, 4)), expected, atol=1e-4)


DECISIONS = [
    (around(0.05, 0.01, 10), 0.0, math.inf, "supported"),
    (around(-0.05, 0.01, 10), 0.0, math.inf, "contradicted"),
    (around(0.05, 0.01, 10), -math.inf, 0.02, "contradicted"),
    (around(0.05, 0.2, 10), 0.0, math.inf, "undecided"),
    (around(0.004, 0.003, 10), 0.0, math.inf, "no difference that matters"),  # though it is above 0 beyond chance
    ([0.0] * 10, 0.0, math.inf, "no difference that matters"),  # the floor of the deviation keeps t finite
    ([0.03] * 9, 0.0, math.inf, "undecided"),  # before the first look
    ([0.03] * 9 + [math.nan], 0.0, math.inf, "undecided"),
]


@pytest.mark.parametrize(("values", "low", "high", "verdict"), DECISIONS)
def test_verdicts(values, low, high, verdict):
    assert decide([claim(low=low, high=high)], {"it": values})["it"].verdict == verdict


def test_a_ratio_is_decided_by_its_logarithm():
    of = claim(scale="ratio", low=-math.inf, high=math.log(0.5))
    for ratio, verdict in ((0.35, "supported"), (0.8, "contradicted"), (1.03, "no difference that matters")):
        assert decide([of], {"it": around(math.log(ratio), 0.05, 10)})["it"].verdict == verdict


def by_loop(p):
    """Benjamini and Yekutieli 2001, theorem 1.3, at a third of 5%: which are rejected."""
    order, count = sorted(range(len(p)), key=lambda i: p[i]), len(p)
    harmonic = sum(1 / i for i in range(1, count + 1))
    last = max((k for k in range(count) if p[order[k]] <= (k + 1) * 0.05 / 3 / (count * harmonic)), default=-1)
    return {order[k] for k in range(last + 1)}


def test_a_family_is_corrected_together():
    random = np.random.default_rng(1)
    claims = [claim(str(i)) for i in range(12)]
    values = {str(i): random.normal(0.08 * random.random(), 0.03, 10) for i in range(12)}
    p = [x for it in claims for x in p_values(it, values[it.id])]
    rejected = by_loop(p)
    expected = {
        it.id: next((v for j, v in enumerate(verdicts.VERDICTS) if 3 * i + j in rejected), "undecided")
        for i, it in enumerate(claims)
    }
    decided = {key: decision.verdict for key, decision in decide(claims, values).items()}
    assert decided == expected
    assert {"supported", "undecided"} <= set(decided.values())
    # Alone a claim is decided that is not in a family of twelve.
    alone = [key for key in values if decide([claim(key)], {key: values[key]})[key].verdict != decided[key]]
    assert alone


def test_significance_level_is_split_among_looks():
    values = around(0.05, 0.035, 10)  # p of "supported" is 0.0007: t is 4.52 with 9 degrees of freedom
    assert p_values(claim(), values)[1] == pytest.approx(0.00073, abs=2e-5)
    # The smallest of three is compared with a level of 0.05 / looks / (3 · 11 / 6): 0.00303 of three, 0.00061 of 15.
    assert decide([claim()], {"it": values}, looks=(10, 20, 40))["it"].verdict == "supported"
    assert decide([claim()], {"it": values}, looks=range(10, 25))["it"].verdict == "undecided"


def test_a_claim_that_stopped_keeps_its_verdict():
    first, second = around(0.05, 0.01, 10), around(-0.2, 0.01, 10)
    (decision,) = decide([claim()], {"it": [*first, *second]}).values()
    assert decision.verdict == "supported"
    assert decision.seeds == 10
    assert decision.interval.mean == pytest.approx(0.05)
    # One that did not stop is decided by all its seeds.
    open_then = around(0.02, 0.03, 10)
    assert decide([claim()], {"it": open_then})["it"].verdict == "undecided"
    (later,) = decide([claim()], {"it": [*open_then, *around(0.04, 0.005, 10)]}).values()
    assert (later.verdict, later.seeds) == ("supported", 20)


def test_seeds_that_are_needed_by_hand():
    # One claim has three hypotheses: level 0.05 / 3 / (3 · (1 + 1/2 + 1/3)) = 0.00303. At 31 degrees of freedom t is
    # 2.946 there and 0.853 at 0.8: 3.799 · 0.03 / √32 = 0.0201 is more than the mean, 3.792 · 0.03 / √33 = 0.0198 less.
    assert verdicts.lone_level(1) == pytest.approx(0.003030, rel=1e-3)
    values = around(0.02, 0.03, 10)
    assert needed(claim(), values, 1) == 33
    assert needed(claim(), values, 20) > 33
    assert needed(claim(), around(0.0, 1.0, 10), 1) is None


@pytest.mark.parametrize(("seeds", "distance"), [(32, 0.0201), (33, 0.0198)])
def test_the_difference_that_seeds_find_by_hand(seeds, distance):
    (decision,) = decide([claim()], {"it": around(0.0, 0.03, 10)}).values()
    assert verdicts.detectable(decision, 1, seeds) == pytest.approx(distance, abs=5e-5)


def test_intervals_are_not_narrower_than_the_floor_allows():
    mean, low, high = verdicts.interval(claim(), [0.01] * 10)
    assert high - mean == pytest.approx(2.262 * 0.0017 / math.sqrt(10), rel=1e-3)
    assert mean - low == pytest.approx(high - mean)


def test_claims_are_told_apart():
    for claims in (CLAIMS, *RETESTS):
        assert len({it.label for it in claims}) == len({it.measure for it in claims}) == len(claims)
        assert all(it.low < it.high for it in claims)
    assert len(BY_ID) == len(CLAIMS) + sum(map(len, RETESTS))
    for headline in HEADLINES:
        for row in headline.evidence:
            assert set(row.ids) <= BY_ID.keys()
            assert all(BY_ID[key].question == row.question for key in row.ids)
            assert len(row.sides) == 2


def test_single_look_verdicts_follow_the_corrected_interval():
    claims = [claim(str(place)) for place in range(10)]
    t = 4.773  # of a one-sided test at 5% / 20, with six seeds
    error = 0.01
    means = {"0": 1.01 * t * error, "1": 0.99 * t * error, "2": -1.01 * t * error}
    values: dict[str, list[float]] = {key: around(mean, error * math.sqrt(6), 6) for key, mean in means.items()}
    error = 0.001
    for key, mean in {"3": 0.02 - 1.01 * t * error, "4": 0.02 - 0.99 * t * error}.items():
        values[key] = around(mean, error * math.sqrt(6), 6)
    decisions = verdicts.decide_once(claims, values | {"5": [0.5]})
    assert [decisions[str(place)].verdict for place in range(7)] == [
        "supported",
        "undecided",
        "contradicted",
        "no difference that matters",
        "supported",
        "undecided",
        "undecided",
    ]


@pytest.mark.parametrize("at", [simulated.no_difference, simulated.edge, simulated.bound])
def test_false_verdicts_are_rare(at):
    claims = [it for it in CLAIMS if it.family == "announcements"]
    rates = simulated.simulate(claims, [at(it) for it in claims], simulated.alike(claims, 0.01), sets=100)
    assert rates.wrong <= 0.05


def test_a_difference_is_found_at_the_first_look():
    claims = [it for it in CLAIMS if it.family == "since"]
    means = [0.03 if it.scale == "difference" else 0.15 for it in claims]
    assert simulated.simulate(claims, means, simulated.alike(claims, 0.01), sets=50).first >= 0.8


def test_the_deviation_behind_an_interval():
    values = around(0.05, 0.05, verdicts.LOOKS[-1])
    decision = decide([claim()], {"it": values})["it"]
    assert simulated.seen(decision) == pytest.approx(np.std(values[: decision.seeds], ddof=1))


def test_the_simplest_of_tied_rows_is_chosen():
    best, noise = np.array([0.6, 0.7, 0.5, 0.65]), np.array([0.01, -0.01, 0.012, -0.012])
    rows = {"none": best - 0.1 + noise, "simple": best - 0.002 + noise, "other": best - 0.001 - noise, "best": best}
    assert verdicts.choose(rows) == "simple"
    assert verdicts.choose(rows | {"simple": best - 0.1 - noise}) == "other"
    assert verdicts.choose({name: rows[name] for name in ("none", "best")}) == "best"


def test_auto_is_the_correction_that_the_rule_chooses():
    rows = read_numbers(ROOT / "docs/results/numbers.json").questions["corrections"].values
    values = {row: rows[row]["accuracy"] for row in QUESTIONS["corrections"].choice}
    for row, members in QUESTIONS["corrections"].means.items():
        np.testing.assert_allclose(values[row], np.mean([rows[it]["accuracy"] for it in members], axis=0), atol=1e-6)
    assert verdicts.choose(values) == BEST_CORRECTION
