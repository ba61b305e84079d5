"""Questions to the seeds: verdicts by hand, runs that are kept, and the page of results."""

import importlib
import math
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments.claims import ablation, columns, findings, reproduce
from experiments.claims.ablation import COIN, START, Bench, Config, Runs
from experiments.claims.findings import Claim, Finding
from experiments.claims.testbeds import ARITHMETIC
from grpo_jax.errors import UsageError
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.policy import decoder_policy
from grpo_jax.tasks import arithmetic

TINY = ARITHMETIC._replace(
    model=ModelConfig(arithmetic.VOCAB_SIZE, 8, 16, 1, 1, 1, 8),
    start=lambda seed, steps, run: jax.jit(decoder_policy(TINY.model).init)(jax.random.key(seed)),
)


def claim(values, low=0.0, high=math.inf):
    return Claim("source", "words", "measure", values, low, high)


@pytest.mark.parametrize(
    ("values", "low", "high", "verdict"),
    [
        # The mean of 1, 2, 3 is 2, and half its interval 4.303 · 1 / √3 = 2.484.
        ([1, 2, 3], -0.49, math.inf, "agree"),
        ([1, 2, 3], -0.48, math.inf, "undecided"),
        ([1, 2, 3], -0.49, 4.48, "undecided"),
        ([1, 2, 3], 4.48, math.inf, "undecided"),
        ([1, 2, 3], 4.49, math.inf, "disagree"),
        ([1, 2, 3], -math.inf, -0.49, "disagree"),
        ([0, 0, 0], 0.0, math.inf, "disagree"),  # equal is not better
        ([0.5], 0.4, 0.6, "agree"),
        ([1, math.nan, 3], 0.0, math.inf, "undecided"),
    ],
)
def test_a_verdict_is_whether_the_interval_is_in_the_range(values, low, high, verdict):
    assert findings.verdict(claim(values, low, high))[1] == verdict


def test_a_column_reads_runs_and_the_start():
    scores = np.zeros((2, 3, 4, 2))  # seeds, evaluations, prompts, a sample and the greedy one
    scores[:, 1, :2, 0], scores[:, 2, :, 0], scores[1, 2, 0, 0] = 1, 1, 0
    scores[..., 1] = 7  # greedy ones do not count
    runs = Runs({"reward": np.array([[0.0, 1.0, 0.0], [2.0, 2.0, 2.0]])}, scores)
    rows = columns.table(
        {"it": runs}, {"accuracy": columns.accuracy, "reward": columns.last("reward", 1.0)}, start="it"
    )
    assert rows == {
        START: {"accuracy": [0.0, 0.0], "reward": [0.0, 2.0]},
        "it": {"accuracy": [1.0, 0.75], "reward": [pytest.approx(1 / 3), 2.0]},
    }
    # Evaluations are at steps 0, 1.5 and 3; a target that is never reached counts the whole run.
    np.testing.assert_allclose(columns.steps_to(np.array([0.75, 0.8]))(runs), [2.25, 3.0])


def test_runs_are_kept_and_share_programs(tmp_path):
    settings = {COIN: ablation.grpo(TINY, coin=1.0), "fast": ablation.grpo(TINY, learning_rate=0.01)}
    said = list[str]()
    bench = Bench(Config(preset="smoke", run_dir=tmp_path), said.append)
    first, compiled = bench.runs(settings), bench.run.programs()
    assert first["fast"].scores.shape == (2, 3, 16, 2)
    assert not np.array_equal(first[COIN].metrics["reward"], first["fast"].metrics["reward"])
    assert said[0] == "0 of 4 runs are done; compiling (may take minutes)"
    again = Bench(Config(preset="smoke", run_dir=tmp_path))
    kept = again.runs(settings)
    assert bench.run.programs() == compiled
    jax.tree.map(np.testing.assert_array_equal, kept, first)
    with pytest.raises(UsageError, match="differ in seed: name another --run-dir"):
        Bench(Config(preset="smoke", run_dir=tmp_path, seed=5))


def test_results_are_the_same_when_written_again(tmp_path):
    rows = {name: {"accuracy": [0.5, 0.75], "nothing": [math.nan] * 2} for name in (START, COIN, "it")}
    rows[START]["accuracy"] = [0.25, 0.5]
    finding = Finding(rows, [claim(np.array([1.0, 2.0]), high=math.inf)], drawn=["accuracy"])
    config = reproduce.Config(preset="smoke", run_dir=tmp_path / "runs", out=tmp_path)
    bench = Bench(config)
    for name in reproduce.QUESTIONS:
        findings.answer(bench, name, lambda bench: finding)
    reproduce.main(config)
    page = (tmp_path / "RESULTS-smoke.md").read_text()
    assert "| it | 0.625 ± 1.588 | – |" in page
    assert page.count("\n| words | measure | 1.500 ± 6.353 | above 0 | undecided |") == len(reproduce.QUESTIONS)
    reproduce.main(config)
    assert (tmp_path / "RESULTS-smoke.md").read_text() == page


@pytest.mark.parametrize(
    ("it", "learned"),
    [
        ([0.6, 0.7, 0.65], True),
        ([0.3, 0.2, 0.31], False),  # above on average, and not beyond chance
        ([0.2, 0.2, 0.2], False),
        ([math.nan, 0.9, 0.9], False),
    ],
)
def test_where_nothing_learned_there_is_no_verdict(it, learned):
    rows = {START: {"accuracy": [0.3, 0.2, 0.2]}, COIN: {"accuracy": [0.9, 0.9, 0.9]}, "it": {"accuracy": it}}
    assert findings.has_learned(Finding(rows, [], [])) is learned
    word = findings.claim_cells(claim([1.0, 1.1, 1.2]), learned)[-1]
    assert word == ("agree" if learned else "nothing learned")
    # Of words the start is another, and a table without a score is of no training.
    words = {f"words, {START}": {"accuracy": [0.8] * 3}, "words, it": {"accuracy": [0.7, 0.7, 0.7]}}
    assert findings.has_learned(Finding(rows | words, [], [])) is learned
    assert findings.has_learned(Finding({START: {"signal": [0.0] * 3}}, [], []))


def test_seeds_may_be_others_than_the_presets(tmp_path, capsys):
    config = Config(preset="smoke", run_dir=tmp_path, num_seeds=3, seed=9)
    bench = Bench(config)
    assert bench.seeds == [9, 15, 16]
    assert bench.run.path == tmp_path / "smoke-3-seeds"
    rows = {name: {"accuracy": [0.5] * 3} for name in (START, COIN, "it")}
    findings.show(bench, Finding(rows, [claim([1.0, 1.1, 1.2])], ["accuracy"]))
    said = " ".join(capsys.readouterr().out.split())
    assert "over seeds 9, 15, 16; runs of 4 steps" in said
    assert "coin toss: the same start, prompts and steps" in said
    assert "nothing learned: no setting's score rose above its start" in said
    findings.show(bench, Finding({name: {"signal": [0.5] * 3} for name in (START, COIN)}, [], ["signal"]))
    assert "a coin toss for a reward" not in " ".join(capsys.readouterr().out.split())  # in no run
    assert Bench(Config(preset="smoke", run_dir=tmp_path, num_seeds=2)).run.path == tmp_path / "smoke"
    with pytest.raises(UsageError, match="num_seeds is 0"):
        Bench(Config(preset="smoke", run_dir=tmp_path, num_seeds=0))


@pytest.mark.parametrize("name", reproduce.QUESTIONS)
def test_a_question_is_short_and_says_its_command(name):
    module = importlib.import_module(f"experiments.claims.questions.{name}")
    assert len(Path(module.__file__).read_text().splitlines()) <= 80
    assert f"python -m experiments.claims.questions.{name} --preset cpu" in module.__doc__
    assert callable(module.measure)


def planted(scores, metrics):
    """A bench whose runs came to these scores; each metric is its factor times the score."""

    def runs(settings):
        noise = np.array([-0.001, 0.0, 0.001])[:, None]  # of seeds

        def of(name):
            score = next((score for part, score in scores.items() if part in name), 0.5) + noise
            numbers = {metric: factor * score.repeat(6, axis=1) for metric, factor in metrics.items()}
            return Runs(numbers, np.broadcast_to(score[..., None, None], (3, 3, 4, 2)))

        return {name: of(name) for name in settings}

    return SimpleNamespace(size=ablation.SIZES["smoke"], seeds=[0, 1, 2], runs=runs)


@pytest.mark.parametrize(
    ("name", "scores", "metrics"),
    [
        ("ablate_temperature", {"0.7 +": 0.8, "0.7": 0.1, "0.83": 0.2, "1.0": 0.7}, {"distinct_share": 1}),
        (
            "ablate_clip",
            {"ε 0.02": 0.1, "ε 0.4": 0.3, "no clip": 0.2},
            {"kl": -1, "entropy": 1, "ratio_deviation": 0.3},
        ),
        (
            "ablate_kl",
            {"GRPO, β 0.1": 0.49, "GRPO, β 0.01": 0.51, "PPO, β 0.1": 0.9, "PPO, β 0.01": 0.1, "words, β 0.01": 0.6},
            {"kl": 1},
        ),
        ("entropy_bonus", {"PPO, c 0.01": 0.45, "PPO": 0.4}, {"reward": 1, "entropy": 1}),
        (
            "reward_noise",
            {"heavy tails: ranks": 0.8, "distorted: ranks": 0.8, "GRPO": 0.7, "PPO": 0.6},
            {},
        ),
        ("estimators", {"seed_001": 0.6, "ppo": 0.4}, {"entropy": 1}),
        (
            "staleness",
            {"corrected": 0.5, "16": 0.2, "8": 0.3},
            {"kl": 1, "entropy": 1, "first_sampler_mismatch": 1},
        ),
    ],
)
def test_claims_look_the_right_way(name, scores, metrics):
    measure = importlib.import_module(f"experiments.claims.questions.{name}").measure
    claims = measure(planted(scores, metrics)).claims
    words = {claim.measure: findings.verdict(claim)[1] for claim in claims}
    assert len(words) == len(claims)
    assert set(words.values()) == {"agree"}, words


@pytest.mark.slow
def test_every_table_has_its_controls(tmp_path):
    command = [sys.executable, "-m", "experiments.claims.reproduce", "--preset", "smoke"]
    folders = ["--run-dir", str(tmp_path / "runs"), "--out", str(tmp_path)]
    interrupted = subprocess.Popen([*command, *folders])
    while not list((tmp_path / "runs/smoke/runs").glob("*.npz")):
        assert interrupted.poll() is None
        time.sleep(0.1)
    interrupted.kill()
    subprocess.run([*command, *folders], check=True)
    bench = Bench(Config(preset="smoke", run_dir=tmp_path / "runs"))
    for name in reproduce.QUESTIONS:
        finding = findings.read_answer(bench, name).finding
        assert list(finding.rows)[:2] == [START, COIN]
        assert finding.claims
