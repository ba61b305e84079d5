"""Checks that runs of the questions are kept, shared and continued with more seeds, and each question's file."""

import inspect
import json
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny import refused

from claims import annotators, answers, bench as benches, columns
from claims.bench import Bench, Config, make_setting
from claims.questions import COIN, FOLDER, PAGES, QUESTIONS, START, read_question
from claims.testbeds import ARITHMETIC
from experiments import common, whole_run
from experiments.tasks import arithmetic
from experiments.whole_run import History, heldout_of
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.policy import decoder_policy
from grpo_jax.options import options_of

TINY = ARITHMETIC._replace(
    model=ModelConfig(arithmetic.VOCAB_SIZE, 8, 16, 1, 1, 1, 8),
    start=lambda seed, steps, run: INIT(jax.random.key(seed)),
)
INIT = jax.jit(decoder_policy(TINY.model).init)


def test_more_seeds_reuse_the_runs_on_disk(tmp_path, monkeypatch):
    """Runs a program that does not train: rewards are the seed, and scores a hundred times the learning rate."""
    done, draws = list[int](), list[float]()

    def run_all(params, prompts, heldout, seeds, numbers):
        done.extend(seeds)
        draws.extend(numbers.get("draw", ()))
        rewards = np.tile(np.array(seeds, float)[:, None], 4)
        scores = np.ones((len(seeds), 3, *heldout.counted.shape)) * 100
        scores *= numbers["learning_rate"].reshape(-1, 1, 1, 1, 1)
        return History(params, {"reward": rewards, "skipped": np.zeros_like(rewards)}, scores)

    def program(bench, setting, width):
        return run_all, heldout_of(bench.task(setting, 0), benches.config_of(setting, bench.size))

    monkeypatch.setattr(Bench, "_compile", program)
    settings = {COIN: make_setting(TINY, coin=1.0), "fast": make_setting(TINY, learning_rate=0.01)}
    settings["shifted"] = make_setting(TINY, shift=2.0)
    bench = Bench(Config(preset="smoke", run_dir=tmp_path))
    first = bench.runs(settings)
    assert set(done) == {0, 1}
    assert {0.0, 1.0} <= set(draws)  # each seed shifts prompts anew
    done.clear()
    files = {file: file.stat().st_mtime_ns for file in (bench.run.path / "runs").iterdir()}
    assert len(files) == 6
    more = Bench(Config(preset="smoke", run_dir=tmp_path, num_seeds=3)).runs(settings)
    assert set(done) == {2}
    assert {file: file.stat().st_mtime_ns for file in files} == files
    assert len(list((bench.run.path / "runs").iterdir())) == 9
    for name, runs in first.items():
        assert runs.scores.shape == (2, 3, 16, benches.SAMPLES + 1)
        np.testing.assert_array_equal(more[name].scores[:2], runs.scores)
        np.testing.assert_array_equal(more[name].metrics["reward"][:, 0], [0, 1, 2])
    np.testing.assert_allclose(more["fast"].scores, 1)
    assert not np.any(np.isclose(more[COIN].scores, 1))


def test_scores_after_divergence_are_the_floor():
    scores = np.ones((3, 2, 8))  # evaluations at steps 0, 5 and 10
    diverged = np.arange(10) >= 7
    np.testing.assert_array_equal(benches.with_floor(scores, diverged).mean((1, 2)), [1, 1, 0])
    several = np.ones((3, 2, 8, 3))  # of several numbers the first is the score
    np.testing.assert_array_equal(benches.with_floor(several, diverged)[2, 0, 0], [0, 1, 1])


def test_seeds_and_folders(tmp_path):
    bench = Bench(Config(preset="smoke", run_dir=tmp_path, num_seeds=3, seed=9))
    assert bench.seeds == [9, 15, 16]  # settings were tuned on those between
    assert bench.run.path == tmp_path / "smoke"
    for number in (0, 10**9):
        with refused(f"num_seeds is {number}"):
            Bench(Config(preset="smoke", run_dir=tmp_path, num_seeds=number))
    with refused("epsilon_wide: neither"):
        make_setting(epsilon_wide=1.0)
    with refused("there is no testbed 'subtractions': name one of additions, coarse"):
        make_setting("subtractions")


def test_checksums_are_of_all_code_behind_a_number(monkeypatch):
    read, read_bytes = [], Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda file: read.append(file) or read_bytes(file))
    benches.code_checksum()
    behind_runs = (whole_run.whole_run, whole_run.learn, whole_run.init_state, common.imitate, common.fit)
    assert {Path(inspect.getsourcefile(it)) for it in behind_runs} <= {*read}
    answers.question_checksum("pass_at_k")
    behind_columns = (columns.best_of, annotators.calibration, columns.pass_at)
    assert {Path(inspect.getsourcefile(it)) for it in behind_columns} <= {*read}


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_folders_and_files_that_are_damaged_are_named(tmp_path, text):
    (tmp_path / "file").write_text(text)
    with refused("name another run_dir"):
        Bench(Config(preset="smoke", run_dir=tmp_path / "file"))
    bench = Bench(Config(preset="smoke", run_dir=tmp_path))
    for name in ("a.npz", "agreement.json"):
        (bench.run.path / name).write_text(text)
    with refused("delete it, and the run is done again"):
        benches.read_run(bench.run.path / "a.npz")
    with refused(r"agreement\.json"):
        answers.present_answer(bench, "agreement")
    (bench.run.path / "agreement.json").write_text(json.dumps({"made_by": answers.question_checksum("agreement")}))
    with refused("delete it, and the question is answered again"):
        answers.present_answer(bench, "agreement")
    del bench
    (tmp_path / "smoke/config.json").write_text(text)
    with refused(r"config\.json"):
        Bench(Config(preset="smoke", run_dir=tmp_path))


@pytest.mark.parametrize("name", [name for name, question in QUESTIONS.items() if question.module == "reproduce"])
def test_question_files_are_short_and_their_settings_valid(name):
    question = QUESTIONS[name]
    assert len((FOLDER / f"{name}.toml").read_text().splitlines()) <= 120
    settings = {row: make_setting(**options) for row, options in question.settings.items()}
    assert bool(settings) != bool(question.computed_by)
    assert COIN in settings or question.computed_by
    for setting in settings.values():
        benches.config_of(setting, benches.SIZES["smoke"])
    assert question.computed_by or set(question.drawn) <= set(question.columns)


def test_settings_differing_only_in_numbers_share_a_program(tmp_path):
    bench = Bench(Config(preset="smoke", run_dir=tmp_path))
    one, other = (make_setting(TINY, learning_rate=rate) for rate in (0.1, 0.2))
    assert bench.program(one) == bench.program(other)
    assert bench.file(one, 0) != bench.file(other, 0)
    assert bench.program(one) != bench.program(make_setting(TINY, group_size=2))


def test_sizes_of_a_setting_follow_the_preset():
    config = benches.config_of(make_setting(prompts=0.5, evaluations=3, staleness=100), benches.SIZES["cpu"])
    options = options_of(config)
    assert (options["num_prompts"], options["eval_every"]) == (16, 20)
    assert options["staleness"] == 59  # at most one less than there are steps


UNFIT_QUESTIONS = [
    ("title = ", "is no question"),
    ("title = 'a'\ntext = 'b'\ndrawn = []\nsetings = {}", "setings"),
    ("title = 'a'", "text"),
    (
        "title = 'a'\ntext = 'b'\ndrawn = []\n[[also]]\nsource = ''\nwords = ''\nmeasure = ''\ncolumn = 'c'\n"
        "rows = ['none']",
        r"compares none: name it in \[settings\]",
    ),
]


@pytest.mark.parametrize(("text", "reason"), UNFIT_QUESTIONS)
def test_a_question_that_does_not_fit_is_refused(tmp_path, text, reason):
    (tmp_path / "it.toml").write_text(text)
    with refused(reason):
        read_question(tmp_path / "it.toml")


@pytest.mark.slow
def test_every_table_has_its_controls(tmp_path):
    command = [sys.executable, "-m", "claims.reproduce", "--preset", "smoke"]
    folders = ["--run-dir", str(tmp_path / "runs"), "--out", str(tmp_path)]
    interrupted = subprocess.Popen([*command, *folders])
    while not list((tmp_path / "runs/smoke/runs").glob("*.npz")):
        assert interrupted.poll() is None
        time.sleep(0.1)
    interrupted.kill()
    subprocess.run([*command, *folders], check=True)
    bench = Bench(Config(preset="smoke", run_dir=tmp_path / "runs"))
    for name in PAGES["questions"]:
        known = answers.present_answer(bench, name)
        assert list(known["rows"])[:2] == [START, COIN]
