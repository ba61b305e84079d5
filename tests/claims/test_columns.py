"""Columns of tables, and the numbers of claims, from runs with known scores."""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.claims import ablation, columns, findings
from experiments.claims.ablation import START, Runs
from experiments.claims.primary import PRIMARY
from experiments.claims.questions.reward_hacking import gold_at_equal_kl


def runs_of(gold, scores=None, **metrics):
    """Runs whose steps have this score."""
    gold = np.asarray(gold, float)
    given = {"gold": gold, "reward": gold, "diverged": np.zeros(gold.shape)}
    return Runs(given | metrics, np.zeros((len(gold), 2, 1, 2)) if scores is None else scores)


def test_a_column_reads_runs_and_the_start():
    scores = np.zeros((2, 3, 4, 2))  # seeds, evaluations, prompts, a sample and the greedy one
    scores[:, 1, :2, 0], scores[:, 2, :, 0], scores[1, 2, 0, 0] = 1, 1, 0
    scores[..., 1] = 7  # greedy ones do not count
    runs = runs_of([[0.0, 1.0, 0.0], [2.0, 2.0, 2.0]], scores)
    read = {"accuracy": columns.accuracy, "reward": columns.last("reward", 1.0), "some": columns.on_the_way}
    read["first prompts"] = columns.of_prompts(np.array([True, True, False, False]))
    assert columns.table({"it": runs}, read, start="it") == {
        START: {"accuracy": [0.0, 0.0], "reward": [0.0, 2.0], "some": [0.0, 2.0], "first prompts": [0.0, 0.0]},
        "it": {
            "accuracy": [1.0, 0.75],
            "reward": [pytest.approx(1 / 3), 2.0],
            "some": [pytest.approx(1 / 3), 2.0],
            "first prompts": [1.0, 0.5],
        },
    }


def test_a_target_is_reached_by_the_mean_of_five_steps():
    rising = np.arange(10.0)  # the mean of steps 1 to 5 is 2, of 2 to 6 it is 3, and of the last five 7
    reached = columns.steps_to(np.array([2.0, 2.5, 7.5]))(runs_of([rising] * 3))
    np.testing.assert_array_equal(reached, [1, 2, 7])
    assert columns.steps_to(np.array([0.5]))(runs_of([[0.0, 1.0]])) == [2]  # a run of two steps: never


def test_pass_at_k_of_the_last_evaluation():
    scores = np.zeros((1, 2, 2, 5))
    scores[0, 1, 0, 0] = scores[0, :, :, -1] = 1  # one of four samples of a prompt is right; greedy ones do not count
    np.testing.assert_allclose(columns.pass_at(1)(runs_of([[0.0]], scores)), [1 / 8])
    np.testing.assert_allclose(columns.pass_at(2)(runs_of([[0.0]], scores)), [1 / 4])


def test_claims_are_differences_or_logarithms_of_ratios():
    one, other = runs_of([[2.0] * 4, [4.0] * 4]), runs_of([[1.0] * 4, [1.0] * 4])
    one.metrics["diverged"][1, 2] = 1
    runs = {"one": one, "other": other}
    found = columns.compared(runs, columns.on_the_way, "one", "other")
    np.testing.assert_array_equal(found.values, [1, 3])
    assert found.diverged == 1
    found = columns.compared(runs, columns.on_the_way, "one", "other", ratio=True)
    np.testing.assert_allclose(found.values, np.log([2, 4]))
    assert np.isnan(columns.log_ratio([0.0], [1.0])).all()


def test_gold_is_compared_where_the_kl_is_equal():
    kl, gold = np.arange(20.0)[None], np.arange(20.0)[None] / 10
    one, other = runs_of(gold, kl=kl), runs_of(gold, kl=2 * kl)
    # Both reach 19: the first at its last step, the other at step 10, where gold is 1.0 to 1.4.
    np.testing.assert_allclose(gold_at_equal_kl(one, other), [1.9 - 1.2])


def planted(scores):
    """A bench whose runs came to these scores by name; every metric is the score."""

    def runs(settings):
        def of(name):
            score = next((score for part, score in scores.items() if part in name), 0.5)
            seeds = score + np.array([-0.001, 0.0, 0.001])
            shape = (3, 2, 16, 65, 3) if "eal" in name else (3, 2, 16, 65)
            given = np.broadcast_to(seeds.reshape(3, *[1] * (len(shape) - 1)), shape)
            metrics = dict.fromkeys(METRICS, np.repeat(seeds[:, None], 6, axis=1))
            return Runs(metrics | {"diverged": np.zeros((3, 6))}, given)

        return {name: of(name) for name in settings}

    bench = SimpleNamespace(size=ablation.SIZES["smoke"], seeds=[0, 1, 2], runs=runs)
    bench.task = lambda setting, seed: setting.testbed.task(num_prompts=4, seed=seed, heldout=16)
    return bench


METRICS = ("gold", "reward", "kl", "entropy", "distinct_share", "ratio_deviation", "first_sampler_mismatch")
METRICS += ("zero_spread_share",)


@pytest.mark.parametrize(
    ("name", "scores", "expected"),
    [
        ("ppo_vs_grpo", {"critic": 0.2, "group": 0.3, "PPO": 0.4}, {"posts_ppo": 0.1, "grpo_ppo": 0.1, "critic": 0.1}),
        ("ablate_kl", {"β 0.01": 0.6, "β 0.1": 0.3}, {"kl_none": 0.1, "kl_high": 0.3}),
        ("ablate_clip", {"ε 0.15": 0.6}, {"clip_none": 0.1}),
        ("ablate_temperature", {"0.7 +": 0.8}, {"temperature": 0.3}),
        ("entropy_bonus", {"GRPO, c 0.01": 0.6}, {"entropy_bonus": 0.1}),
        (
            "reward_noise",
            {"distorted: ranks": 0.8, "shifted prompts: GRPO": 0.7},
            {"ranks_distorted": 0.3, "shifted_prompts": 0.2},
        ),
        ("staleness", {"corrected": 0.4}, {"stale": -0.1}),
        ("sampler_mismatch", {"GSPO": 0.9, "corrected": 0.6}, {"gspo_noise": 0.4, "mismatch": 0.1}),
        ("pass_at_k", {}, {"pass_at_k": 0.0}),
    ],
)
def test_primary_claims_look_the_right_way(name, scores, expected):
    finding = importlib.import_module(f"experiments.claims.questions.{name}").measure(planted(scores))
    findings.check(finding, name, seeds=3)
    found = {key: float(np.mean(measured.values)) for key, measured in finding.primary.items()}
    assert {key: found[key] for key in expected} == pytest.approx(expected)


def test_every_primary_claim_has_a_script_that_measures_it():
    for claim in PRIMARY:
        assert callable(importlib.import_module(f"experiments.claims.questions.{claim.question}").measure)
