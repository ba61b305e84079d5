"""Checks columns of tables and numbers of claims on runs with known scores."""

from types import SimpleNamespace

import numpy as np
import pytest
from tiny import refused

from claims import answers, bench as benches, columns
from claims.bench import Runs, make_setting
from claims.columns import gold_at_equal_kl, read_column
from claims.questions import CLAIMS, QUESTIONS, START, Comparison, Question


def runs_of(gold, scores=None, **metrics):
    """Runs whose steps have this score."""
    gold = np.asarray(gold, float)
    shared = {"gold": gold, "reward": gold, "diverged": np.zeros(gold.shape)}
    return Runs(make_setting(), shared | metrics, np.zeros((len(gold), 2, 1, 2)) if scores is None else scores)


def measured(question, cases):
    """The answer to a question whose runs are these, by row."""
    return answers.measure(SimpleNamespace(seeds=[0, 1], runs=lambda settings: cases), question)


def test_tables_measure_runs_and_their_starting_policy():
    scores = np.zeros((2, 3, 4, 2))  # seeds, evaluations, prompts, a sample and the greedy one
    scores[:, 1, :2, 0], scores[:, 2, :, 0], scores[1, 2, 0, 0] = 1, 1, 0
    scores[..., 1] = 7  # greedy ones do not count
    runs = runs_of([[0.0, 1.0, 0.0], [2.0, 2.0, 2.0]], scores, kl=np.ones((2, 3)))
    question = Question("it", "", "", ["reward"], ["accuracy", "reward", "on the way", "KL"], {"it": {}}, {START: "it"})
    known = measured(question, {"it": runs})
    assert known["rows"] == {
        START: {"accuracy": [0.0, 0.0], "reward": [0.0, 2.0], "on the way": [0.0, 2.0], "KL": [1.0, 1.0]},
        "it": {
            "accuracy": [1.0, 0.75],
            "reward": [0.0, 2.0],  # of the last tenth of the steps
            "on the way": [pytest.approx(1 / 3), 2.0],
            "KL": [1.0, 1.0],
        },
    }
    # At eight updates a rollout the first step's KL is not of the start.
    reused = runs._replace(setting=make_setting(reused=True))
    rows = measured(question, {"it": reused})["rows"]
    assert np.isnan(rows[START]["KL"]).all()
    assert rows[START]["reward"] == [0.0, 2.0]


def test_additions_with_a_carry_are_counted_apart():
    runs = runs_of([[0.0]] * 2, np.zeros((2, 1, 30, 2)))
    examples = runs.setting.testbed.task(num_prompts=1, seed=0, heldout=30).task.heldout.examples
    carries = columns.has_carry(examples)
    assert 0 < carries.sum() < 30
    runs.scores[:, :, carries, 0] = 1
    np.testing.assert_array_equal(read_column("carried", runs), [1, 1])
    np.testing.assert_array_equal(read_column("without", runs), [0, 0])


def test_a_column_that_is_not_there_is_refused():
    with refused("there is no column 'speed'"):
        read_column("speed", runs_of([[0.0]]))


def test_targets_are_reached_by_means_of_five_steps():
    rising = np.arange(10.0)  # the mean of steps 1 to 5 is 2, of 2 to 6 it is 3, and of the last five 7
    reached = columns.steps_to(runs_of([rising] * 3), np.array([2.0, 2.5, 7.5]))
    np.testing.assert_array_equal(reached, [1, 2, 7])
    assert columns.steps_to(runs_of([[0.0, 1.0]]), np.array([0.5])) == [2]  # a run of two steps: never


def test_pass_at_k_of_the_last_evaluation():
    scores = np.zeros((1, 2, 2, 5))
    scores[0, 1, 0, 0] = scores[0, :, :, -1] = 1  # one of four samples of a prompt is right; greedy ones do not count
    np.testing.assert_allclose(read_column("pass@1", runs_of([[0.0]], scores)), [1 / 8])
    np.testing.assert_allclose(read_column("pass@2", runs_of([[0.0]], scores)), [1 / 4])


def test_comparisons_are_differences_or_log_ratios():
    cells = {("a", "x"): [2.0, 4.0], ("b", "x"): [1.0, 1.0], ("c", "x"): [5.0, 5.0], ("a", "y"): [0.5, 0.5]}

    def value(rows, column="x", scale="difference"):
        comparison = Comparison("source", "words", "measure", column, rows, scale)
        return columns.compare(comparison, lambda row, column: np.array(cells[row, column]))

    np.testing.assert_array_equal(value(["a"]), [2, 4])
    np.testing.assert_array_equal(value(["a", "b"]), [1, 3])
    np.testing.assert_array_equal(value(["a", "b", "c", "b"]), [1 - 4, 3 - 4])  # of two differences
    np.testing.assert_array_equal(value(["a", "a"], ["x", "y"]), [1.5, 3.5])
    np.testing.assert_allclose(value(["a", "b"], scale="ratio"), np.log([2, 4]))
    assert np.isnan(columns.log_ratio(np.zeros(1), np.ones(1))).all()


def test_runs_that_diverged_are_counted_with_their_claim():
    one, other = runs_of([[2.0] * 4, [4.0] * 4]), runs_of([[1.0] * 4, [1.0] * 4])
    one.metrics["diverged"][1, 2] = 1
    claim = QUESTIONS["ablate_kl"].claims[0]
    rows = {row: {} for row in claim.rows}
    question = Question("it", "", "", [], ["accuracy"], rows, {START: claim.rows[0]}, claims=[claim])
    known = measured(question, dict(zip(claim.rows, (one, other), strict=True)))
    assert known["primary"] == {claim.id: [[1.0, 3.0], 1]}


def test_gold_is_compared_where_the_kl_is_equal():
    kl, gold = np.arange(20.0)[None], np.arange(20.0)[None] / 10
    one, other = runs_of(gold, kl=kl), runs_of(gold, kl=2 * kl)
    # Both reach 19: the first at its last step, the other at step 10, where gold is 1.0 to 1.4.
    np.testing.assert_allclose(gold_at_equal_kl(one, other), [1.9 - 1.2])


@pytest.fixture(autouse=True)
def no_gradients(monkeypatch):
    """Replaces the signal in gradients, which needs a trained start."""
    monkeypatch.setattr(answers, "gradient_signal", lambda bench, seed, group_size: float(group_size))


def planted(scores):
    """A bench whose runs came to these scores by row; every metric is the score."""

    def runs(settings):
        def of(row, setting):
            score = next((score for part, score in scores.items() if part in row), 0.5)
            seeds = score + np.array([-0.001, 0.0, 0.001])
            shape = (3, 2, 16, 65, 3) if setting.testbed.name == "words" else (3, 2, 16, 65)
            values = np.broadcast_to(seeds.reshape(3, *[1] * (len(shape) - 1)), shape)
            metrics = dict.fromkeys(METRICS, np.repeat(seeds[:, None], 6, axis=1))
            return Runs(setting, metrics | {"diverged": np.zeros((3, 6))}, values)

        return {row: of(row, setting) for row, setting in settings.items()}

    return SimpleNamespace(size=benches.SIZES["smoke"], seeds=[0, 1, 2], runs=runs)


METRICS = ("gold", "reward", "kl", "entropy", "distinct_share", "ratio_deviation", "first_sampler_mismatch")
METRICS += ("zero_spread_share",)


# question -> scores by a part of the row's name, others being 0.5, and what its claims then come to
RIGHT_WAY = {
    "ppo_vs_grpo": ({"critic": 0.2, "group": 0.3, "PPO": 0.4}, {"posts_ppo": 0.1, "grpo_ppo": 0.1, "critic": 0.1}),
    "ablate_kl": ({"β 0.01": 0.6, "β 0.1": 0.3}, {"kl_none": 0.1, "kl_high": 0.3}),
    "ablate_clip": ({"ε 0.15": 0.6}, {"clip_none": 0.1}),
    "ablate_temperature": ({"0.7 +": 0.8}, {"temperature": 0.3}),
    "entropy_bonus": ({"GRPO, c 0.01": 0.6}, {"entropy_bonus": 0.1}),
    "reward_noise": (
        {"distorted: ranks": 0.8, "shifted prompts: GRPO": 0.7},
        {"ranks_distorted": 0.3, "shifted_prompts": 0.2},
    ),
    "staleness": ({"corrected": 0.4}, {"stale": -0.1}),
    "sampler_mismatch": ({"GSPO": 0.9, "corrected": 0.6}, {"gspo_noise": 0.4, "mismatch": 0.1}),
    "reward_hacking": ({"PPO: repetition": 0.8}, {"hacking": 0.3}),
    "field_since": ({"centred": 0.7, "mean of tokens": 0.6}, {"std_weight": 0.2, "aggregation": 0.1}),
    "ablate_group_size": ({"K 8": 0.6, "equal samples": 0.9}, {"group_size_2": 0.1, "group_size_samples": -0.3}),
    "pass_at_k": ({}, {"pass_at_k": 0.0}),
}


@pytest.mark.parametrize(
    "name",
    [name for name, question in QUESTIONS.items() if not question.computed_by and question.module == "reproduce"],
)
def test_every_question_is_measured_with_correctly_signed_claims(name):
    question, (scores, expected) = QUESTIONS[name], RIGHT_WAY.get(name, ({}, {}))
    known = answers.measure(planted(scores), question)
    assert next(iter(known["rows"])) == START
    assert known["rows"].keys() == question.settings.keys() | question.starts.keys() | question.means.keys()
    assert all(len(it["values"]) == 3 for it in known["also"])
    assert known["primary"].keys() == {claim.id for claim in CLAIMS if claim.question == name}
    means = {key: float(np.mean(values)) for key, (values, _) in known["primary"].items()}
    assert {key: means[key] for key in expected} == pytest.approx(expected)
