"""Claims on a pretrained model: runs that are kept, what they differ in, and the answer that is added to numbers."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from tiny import refused

from claims import pretrained
from claims.numbers import read_numbers
from claims.questions import QUESTIONS
from grpo_jax.data.types import Completion

ROOT = Path(__file__).parents[2]
STORIES = ROOT.parent / "shared/data/stories260K-hf"
STUDY = pretrained.STUDIES["stories"]
SETTINGS = {name: QUESTIONS["stories"].settings[name] for name in ("β 0", "β 0, centred", "coin toss")}


def test_settings_differ_in_one_part():
    options = {row: pretrained.config_of(STUDY, it, seed=3, steps=200) for row, it in STUDY.question.settings.items()}
    base = options["GRPO, β 0.04"]
    assert (base.steps, base.seed, base.loss.kl_coef, base.sampling.max_tokens) == (200, 3, 0.04, 64)
    assert options["β 0"] == dataclasses.replace(base, loss=dataclasses.replace(base.loss, kl_coef=0.0))
    for row, prompts in (("K 2, equal samples", 32), ("K 2, equal prompts", 8)):
        sampling = dataclasses.replace(base.sampling, num_prompts=prompts, group_size=2)
        assert options[row] == dataclasses.replace(base, sampling=sampling)
    clipped, free = options["8 updates, ε 0.2"], options["8 updates, no clip"]
    assert (clipped.loss.epsilon_low, clipped.loss.epsilon_high) == (0.2, 0.2)
    assert free.optimizer == clipped.optimizer
    assert clipped.num_updates == 8 * base.num_updates


def test_settings_of_sums_share_samples_and_steps():
    study = pretrained.STUDIES["sums"]
    options = {row: pretrained.config_of(study, it, seed=3, steps=16) for row, it in study.question.settings.items()}
    assert {it.sampling.num_prompts * it.sampling.group_size for it in options.values()} == {64}
    assert {(it.steps, it.sampling.max_tokens) for it in options.values()} == {(16, 5)}
    assert [it.loss.kl_coef for it in options.values()] == [0.04, 0.0, 0.0, 0.04, 0.04]


def test_committed_curves_end_at_the_last_step():
    known = read_numbers(ROOT / "docs/results/numbers.json")
    steps = {name: known.questions[name].steps for name in pretrained.STUDIES if name in known.questions}
    assert steps == {name: pretrained.STUDIES[name].steps for name in steps}
    assert "stories" in steps
    assert known.questions["ablate_kl"].steps == 0  # those of the file


def test_a_right_sum_may_begin_with_a_space():
    """The tokens of a base model write "3 + 4 =" with " 7", and the text ends before the line break."""
    reward = pretrained.STUDIES["sums"].reward
    row = {"prompt": "3 + 4 =", "answer": "7"}
    completions = [Completion(text, (1,), truncated=False) for text in (" 7", "7", " 8", " 7 8")]
    assert list(reward([row] * 4, completions)) == [1, 1, 0, 0]


@pytest.mark.slow
@pytest.mark.skipif(not STORIES.exists(), reason="needs the stories260K folder")
def test_runs_are_kept_and_their_numbers_are_added(tmp_path, monkeypatch):
    question = dataclasses.replace(
        STUDY.question,
        settings=SETTINGS,
        starts={"no training": "β 0"},
        claims=[it for it in STUDY.question.claims if "_std_" in it.id],
        also=[],
        curves=["β 0"],
    )
    base = STUDY.base | {"max_tokens": 40, "learning_rate": 1e-2, "eval_samples": 1}
    monkeypatch.setitem(pretrained.STUDIES, "stories", STUDY._replace(question=question, base=base))
    numbers = tmp_path / "numbers.json"
    numbers.write_text('{"preset": "cpu", "answers": {"ablate_kl": {}}}')
    config = pretrained.Config(str(STORIES), num_seeds=1, steps=2, run_dir=tmp_path / "runs", numbers=numbers)
    pretrained.main(config)
    answers = json.loads(numbers.read_text())["answers"]
    assert list(answers) == ["ablate_kl", "stories"]
    rows, primary = answers["stories"]["rows"], answers["stories"]["primary"]
    assert rows["no training"]["KL"][0] == pytest.approx(0, abs=1e-4)
    assert rows["β 0"]["KL"][0] > 1e-4
    assert rows["β 0, centred"]["KL"] != rows["β 0"]["KL"]  # other advantages
    for key, column in (("stories_std_end", "score"), ("stories_std_way", "on the way")):
        difference = rows["β 0, centred"][column][0] - rows["β 0"][column][0]
        assert primary[key] == [[pytest.approx(difference, abs=1e-6)], 0]
    assert rows["coin toss"]["on the way"][0] < 0.35  # graded by the task's reward; the coin's mean is 0.5
    files = sorted((tmp_path / "runs").glob("*.npz"))
    assert len(files) == 3
    before = {file: file.read_bytes() for file in files}
    shutil.rmtree(tmp_path / "runs" / files[0].stem)
    monkeypatch.setattr(pretrained, "make_run", None)  # none is repeated
    pretrained.main(config)
    assert {file: file.read_bytes() for file in files} == before
    numbers.write_text('{"preset": "cpu", "questions": {}}')
    with refused("has no values of seeds"):
        pretrained.main(config)
