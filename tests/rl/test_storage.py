"""What a disk does to a run: it resumes to the same bits, or a sentence says what is wrong. Nothing goes unnoticed."""

import dataclasses
import json
import math
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigrams import PARAMS, TASK, train_grpo
from rl_helpers import RUN, assert_same_files, open_run, run_programs
from tiny import digit_prompts as prompts, read_lines, refused, write_rows

from grpo_jax import __version__
from grpo_jax.config import with_options
from grpo_jax.data.types import Component, hash_values
from grpo_jax.errors import UsageError, lacking
from grpo_jax.rewards.processes import Grader
from grpo_jax.runs import checkpoint as seal
from grpo_jax.runs.checkpoint import Checkpoints, best_step, check_seal, params_sha256, saved_steps
from grpo_jax.runs.files import hold, write_text
from grpo_jax.runs.folder import RunFolder, fresh_folder
from grpo_jax.step import TrainState
from grpo_jax.training.phases import train

CONFIG = with_options(RUN, rollouts_every=0)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, which has the checkpoints 4 and 6, and its parameters' checksum."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    state = train_grpo(TASK, CONFIG, open_run(folder, CONFIG), run_programs())
    assert sorted(path.name for path in (folder / "checkpoints/grpo").iterdir()) == ["4", "6"]
    return folder, state


def resumed(finished, folder, harm) -> str:
    """What a copy of the run says when it is resumed after `harm`; it must end as it did before."""
    whole, expected = finished
    shutil.copytree(whole, folder)
    harm(folder)
    try:
        run = open_run(folder, CONFIG)
        state = train_grpo(TASK, CONFIG, run, run_programs())
    except UsageError as error:
        return f"refused: {error}"
    assert params_sha256(state) == params_sha256(expected)
    assert_same_files(whole, folder, ["metrics.jsonl"])
    return " ".join(line["message"] for line in run.lines("warnings.jsonl"))


# ---- checkpoints


def flip(file: Path, place: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[place.randrange(len(content))] ^= 1 << place.randrange(8)
    file.write_bytes(content)


def cut(file: Path, place: random.Random) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: place.randrange(len(content))])


def delete(file: Path, place: random.Random) -> None:
    file.unlink()


def test_any_damaged_checkpoint_bit_is_noticed(finished, tmp_path):
    folder = finished[0] / "checkpoints/grpo/6"
    files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    files = [name for name in files if name not in ("commit_success.txt", "_CHECKPOINT_METADATA")]  # nobody reads them
    assert len(files) >= 9
    places = random.Random(0)
    cases = [(name, fault) for name in files for fault in (flip, cut, delete)]
    for name, fault in cases + 30 * [("digests.json", flip)]:
        shutil.copytree(folder, tmp_path / "copy", dirs_exist_ok=True)
        fault(tmp_path / "copy" / name, places)
        seal, wrong = check_seal(tmp_path / "copy")
        assert seal is None, (name, fault)
        assert wrong
        shutil.rmtree(tmp_path / "copy")
    assert check_seal(folder)[1] == ""


@pytest.mark.parametrize("forged", [{"files": []}, {"files": {"a": 3}}, {"step": "6"}, {"version": 3}, {"run": []}])
def test_a_forged_seal_is_damage(finished, tmp_path, forged):
    folder = shutil.copytree(finished[0] / "checkpoints/grpo/6", tmp_path / "6")
    content = {**check_seal(folder)[0], **forged}
    (folder / "digests.json").write_text(json.dumps(content | {"digest": hash_values(content)}))
    assert check_seal(folder)[0] is None


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


HARMS = {
    "a flipped bit": (lambda grpo: flip(next(grpo.glob("6/params/d/*")), random.Random(0)), "is missing or damaged"),
    "half a file": (lambda grpo: cut(next(grpo.glob("6/rest/d/*")), random.Random(0)), "is missing or damaged"),
    "a file less": (lambda grpo: next(grpo.glob("6/params/manifest*")).unlink(), "params/manifest.ocdbt is missing"),
    "no parameters": (lambda grpo: shutil.rmtree(grpo / "6/params"), "is missing or damaged"),
    "no digests": (lambda grpo: (grpo / "6/digests.json").unlink(), "is incomplete"),
    "broken digests": (lambda grpo: (grpo / "6/digests.json").write_text("{"), "incomplete or damaged"),
    "other digests": (lambda grpo: (grpo / "6/digests.json").write_text("[]"), "incomplete or damaged"),
    "an empty folder": (lambda grpo: empty(grpo / "6"), "checkpoint 6 is not used, for it is incomplete"),
    "no newest one": (lambda grpo: shutil.rmtree(grpo / "6"), ""),
    "a stray folder": (lambda grpo: (grpo / "99").mkdir(), "checkpoint 99 is not used, for it is incomplete"),
    "a stray file": (lambda grpo: (grpo / "99").write_text(""), "checkpoint 99 is not used, for it is incomplete"),
    "an older stray folder": (lambda grpo: (grpo / "1").mkdir(), ""),
    "an older damaged one": (lambda grpo: empty(grpo / "4"), ""),
    "another number": (lambda grpo: (grpo / "007").mkdir(), ""),
    "another name": (lambda grpo: (grpo / "notes").mkdir(), ""),
    "another step": (
        lambda grpo: (shutil.rmtree(grpo / "6"), shutil.copytree(grpo / "4", grpo / "6")),
        "checkpoint 6 is not used, for it is of step 4",
    ),
    "a save that was cut off": (lambda grpo: (grpo / "8.orbax-checkpoint-tmp").mkdir(), ""),
}


@pytest.mark.parametrize("name", HARMS)
def test_newest_valid_checkpoint_is_used_and_others_named(finished, tmp_path, name):
    harm, words = HARMS[name]
    whole, state = finished
    shutil.copytree(whole, tmp_path / "run")
    harm(tmp_path / "run/checkpoints/grpo")
    run = open_run(tmp_path / "run", CONFIG)
    for _ in range(2):  # what was set aside is not looked at again
        with run.checkpoints("grpo", keep=2) as checkpoints:
            restored, step = checkpoints.restore(lambda: state)
        assert step == (4 if not (tmp_path / "run/checkpoints/grpo/6").exists() else 6)
        assert step == 4 or params_sha256(restored) == params_sha256(state)
    assert step == 6 or words or name == "no newest one"
    warnings = [line["message"] for line in run.lines("warnings.jsonl")]
    assert len(warnings) == len(words and [words])
    assert words in " ".join(warnings)


def test_runs_resume_from_a_valid_checkpoint_or_stop(finished, tmp_path):
    def damage(*steps):
        def harm(folder):
            for step in steps:
                delete(next((folder / f"checkpoints/grpo/{step}").glob("params/d/*")), random.Random(0))

        return harm

    assert "checkpoint 6 is not used" in resumed(finished, tmp_path / "one", damage(6))
    said = resumed(finished, tmp_path / "both", damage(4, 6))
    assert all(words in said for words in ("refused", "checkpoint 6 is not", "checkpoint 4 is not", "start a new run"))


@pytest.mark.parametrize("other", ["another seed", "another phase", "other rows"])
def test_a_checkpoint_of_another_run_is_passed_over(finished, tmp_path, other):
    config = dataclasses.replace(CONFIG, seed=CONFIG.seed + (other == "another seed"))
    task = TASK._replace(prompts=lambda step: prompts(step + 1)) if other == "other rows" else TASK
    phase = "control" if other == "another phase" else "grpo"
    run = open_run(tmp_path / "other", config)
    train({"policy": PARAMS}, task, config, run, run_programs()._replace(config=config), phase=phase)

    def harm(folder):
        shutil.rmtree(folder / "checkpoints/grpo/6")
        shutil.copytree(tmp_path / "other/checkpoints" / phase / "6", folder / "checkpoints/grpo/6")

    assert "checkpoint 6 is not used, for it is of another run" in resumed(finished, tmp_path / "run", harm)


# ---- lines

BROKEN = {
    "metrics.jsonl": ["[]\n", "{\n", '{"phase": ["x"], "step": {}}\n', "\x00\x00\n", "\ud800\n", "[" * 99999 + "\n"],
    "config.json": ["[]", '{"grpo": 1}'],
    "inputs.json": ["[]", '{"grpo": {"held-out prompts": 3}}'],
}


@pytest.mark.parametrize(("file", "content"), [(file, text) for file, texts in BROKEN.items() for text in texts])
def test_malformed_run_files_are_named_in_one_sentence(finished, tmp_path, file, content):
    def harm(folder):
        before = (folder / file).read_bytes() if file == "metrics.jsonl" else b""
        (folder / file).write_bytes(before + content.encode(errors="surrogatepass"))

    said = resumed(finished, tmp_path / "run", harm)
    assert said.startswith("refused")
    assert file != "metrics.jsonl" or file in said


# ---- options


def edit(folder: Path, **options) -> None:
    """What somebody may do to config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(dataclasses.asdict(with_options(CONFIG, **options))))


def test_an_edited_option_is_noticed(finished, tmp_path):
    said = resumed(finished, tmp_path / "run", lambda folder: edit(folder, learning_rate=0.5))
    assert said.startswith("refused")
    assert "began with other options (learning_rate)" in said
    edited = dataclasses.asdict(with_options(CONFIG, learning_rate=0.5))
    run = RunFolder(shutil.copytree(tmp_path / "run", tmp_path / "edited"), edited)  # options are read from the file
    with refused("other options"):
        run.checkpoints("grpo", keep=2).restore(lambda: TrainState(PARAMS, (), jnp.int32(0), {}))


def test_more_steps_are_recorded_and_fewer_are_refused(tmp_path):
    for steps in (6, 8):
        open_run(tmp_path, with_options(CONFIG, steps=steps, max_grad_norm=math.inf))
    saved = json.loads((tmp_path / "config.json").read_text())
    assert (saved["steps"], saved["optimizer"]["max_grad_norm"]) == (8, math.inf)
    edit(tmp_path, steps=9, max_grad_norm=math.inf)  # as a crash between two files leaves it
    RunFolder(tmp_path, json.loads((tmp_path / "config.json").read_text()))
    with refused("9 steps"):
        RunFolder(tmp_path, dataclasses.asdict(with_options(CONFIG, steps=7, max_grad_norm=math.inf)))


def test_starts_killed_before_writing_may_be_repeated(tmp_path):
    lock = hold(tmp_path)
    (tmp_path / "config.json.tmp").write_text("{")
    assert fresh_folder(tmp_path) == tmp_path
    del lock
    (tmp_path / "thesis.txt").write_text("mine")
    with refused("is no run"):
        fresh_folder(tmp_path)


# ---- inputs


def test_inputs_that_changed_are_named(tmp_path):
    def begin(rows):
        with Grader(f"{file}:threes", chunk=4, workers=1) as grader:
            task = TASK._replace(reward={"threes": Component(grader)}, rows=rows)
            train_grpo(task, with_options(CONFIG, steps=2), RunFolder(tmp_path / "run", {}), run_programs())

    file = tmp_path / "reward.py"
    file.write_text("def threes(rows, texts): return [text.count('3') / 3 for text in texts]\n")
    for _ in range(2):
        begin("one digest")
    with refused("began: training rows"):
        begin("another")
    file.write_text(file.read_text() + "# changed\n")
    with refused("began: source of reward threes"):
        begin("one digest")


# ---- the lock

HOLDS = """
import sys, time
from pathlib import Path
from grpo_jax.runs.files import hold
lock = hold(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_resuming_on_other_devices_or_versions_warns(tmp_path, monkeypatch):
    def resume():
        run = open_run(tmp_path, CONFIG)
        run.keep_inputs("grpo", {"rows": "a"})
        return [line["message"] for line in run.lines("warnings.jsonl")]

    assert resume() == resume() == []
    monkeypatch.setattr(jax, "device_count", lambda: 3)
    (message,) = resume()
    assert "goes on with device 3 cpu: sums are rounded in another order" in message
    monkeypatch.undo()
    assert resume() == [message]  # those are the devices that it began with
    monkeypatch.setattr(jax, "__version__", "1.2.3")
    assert "goes on with jax 1.2.3" in resume()[-1]


def test_folders_another_process_writes_to_are_refused(tmp_path):
    other = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match="another process is writing to the run"):
            RunFolder(tmp_path, {})
        assert not (tmp_path / "config.json").exists()
    finally:
        other.kill()  # nobody tidies up
        other.wait()
    first, second = RunFolder(tmp_path, {}), RunFolder(tmp_path, {})  # of one process
    assert first.path == second.path


# ---- a checkpoint of another model


class Other(NamedTuple):
    """A state with other parameters."""

    params: dict
    rest: jax.Array


@pytest.mark.parametrize("harm", ["structure", "shape"])
def test_a_checkpoint_of_another_structure_is_a_sentence(tmp_path, harm):
    stored = {"structure": {"other": jnp.ones(3)}, "shape": jax.tree.map(lambda x: jnp.ones((*x.shape, 2)), PARAMS)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(Other(stored[harm], jnp.ones(3)), 1)
    for read in (
        lambda checkpoints: checkpoints.restore(lambda: Other(PARAMS, jnp.ones(3))),
        lambda checkpoints: checkpoints.restore_params(lambda _: PARAMS),
    ):
        with (
            Checkpoints(tmp_path) as checkpoints,
            pytest.raises(UsageError, match=r"checkpoint 1 in .* has other parameters than the model"),
        ):
            read(checkpoints)


def test_valid_remembered_results_are_not_recomputed(tmp_path):
    calls = []

    def compute() -> dict:
        calls.append(None)
        return {"means": np.float32([0.1, math.nan]), "row": {"avg": 0.1, "many": 3, "none": math.inf}}

    run = open_run(tmp_path, CONFIG)
    run.keep_inputs("grpo", {"rows": "a"})
    first, file = run.remember("grpo", compute), tmp_path / "checkpoints/grpo.json"
    again = run.remember("grpo", compute)
    assert len(calls) == 1
    for value in (first, again):
        assert value["means"].dtype == np.float32
        np.testing.assert_array_equal(value["means"], compute()["means"])
        assert value["row"] == compute()["row"]
    calls.clear()
    content = file.read_text()
    forged = content.replace('"digest": "', '"digest": "f')
    harms = [content.replace("0.1", "0.2"), content[:40], "[]", "\udce9", forged]
    for number, harm in enumerate(harms, 1):
        file.write_text(harm, errors="surrogateescape")
        assert run.remember("grpo", compute)["row"]["avg"] == 0.1
        assert len(calls) == number
    (tmp_path / "inputs.json").write_text('{"grpo": {"rows": "b"}}')
    run.remember("grpo", compute)
    assert len(calls) == len(harms) + 1


SCORES = {0: 0.1, 1: 0.2, 2: 0.5, 3: 0.4, 4: 0.5, 5: 0.9}


BEST = {"eval_every": 1, "checkpoint_every": 0, "keep_checkpoints": 1, "keep_best": True, "patience": 2}
BEST_CONFIG = with_options(CONFIG, **BEST)


def run_with_scores(folder: Path, until: int | None = None, scale: float = 1.0) -> RunFolder:
    run = open_run(folder, BEST_CONFIG)
    scores = {"evaluate": lambda params, step: {"heldout_avg": scale * SCORES[step], "other": 1.0}}
    train_grpo(TASK, BEST_CONFIG, run, run_programs(), until=until, **scores)
    return run


def read_scores(folder: Path) -> dict[int, float]:
    return Checkpoints(folder).read_scores()


def test_best_checkpoint_is_retained_and_patience_ends_runs(tmp_path):
    def run_until(name: str, until: int | None = None, score: float = 1.0) -> RunFolder:
        return run_with_scores(tmp_path / name, until, score)

    run = run_until("whole")
    folder = run.path / "checkpoints/grpo"
    assert [line["step"] for line in run.lines()] == [0, 1, 2, 3, 4]
    assert sorted(saved_steps(folder)) == [2, 4]
    assert best_step(read_scores(folder)) == 2
    run_until("whole")  # it has ended
    run_until("cut", 3)
    assert sorted(saved_steps(tmp_path / "cut/checkpoints/grpo")) == [2, 3]
    run_until("cut")
    assert_same_files(run.path, tmp_path / "cut", ["metrics.jsonl"])
    assert sorted(saved_steps(tmp_path / "cut/checkpoints/grpo")) == [2, 4]
    assert read_scores(tmp_path / "cut/checkpoints/grpo") == read_scores(folder)
    run_until("nan", score=math.nan)  # a score that is undefined is no best one
    assert max(read_scores(tmp_path / "nan/checkpoints/grpo")) == 2


def test_the_start_can_be_the_best(tmp_path):
    run = run_with_scores(tmp_path, scale=-1.0)  # scores fall
    assert saved_steps(run.path / "checkpoints/grpo") == [2]  # the newest
    assert best_step(read_scores(run.path / "checkpoints/grpo")) == 0


def test_damaged_files_do_not_change_the_best(tmp_path):
    """Each file outside the sealed checkpoints is removed or replaced by something else that a run may write."""
    cut = run_with_scores(tmp_path / "cut", 3).path
    whole = run_with_scores(shutil.copytree(cut, tmp_path / "whole")).path
    sealed = {
        file for step in saved_steps(cut / "checkpoints/grpo") for file in (cut / f"checkpoints/grpo/{step}").rglob("*")
    }
    deciding = [file for file in cut.rglob("*") if file.is_file() and file not in sealed and file.suffix == ".json"]
    for number, file in enumerate(deciding):
        for harm in (Path.unlink, lambda file: file.write_text('{"0": 9, "1": 8, "2": 7}')):
            folder = shutil.copytree(cut, tmp_path / f"run-{number}", dirs_exist_ok=True)
            harm(folder / file.relative_to(cut))
            try:
                run = run_with_scores(folder)
            except UsageError:
                continue  # noticed
            if not run.lines("warnings.jsonl"):
                assert sorted(saved_steps(folder / "checkpoints/grpo")) == [2, 4], file
                assert_same_files(whole, folder, ["metrics.jsonl"])
            shutil.rmtree(folder)


def test_lost_lines_before_a_checkpoint_are_noticed(finished, tmp_path):
    whole, names = finished[0], ("metrics.jsonl", "times.jsonl")
    for name in names:
        for harm, lost in ((Path.unlink, None), (lambda file: file.write_text(""), None), (cut_lines, 2)):
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
            shutil.copytree(whole, tmp_path / "run")
            count = len((whole / name).read_text().splitlines())
            harm(tmp_path / "run" / name)
            run = open_run(tmp_path / "run", CONFIG)
            train_grpo(TASK, CONFIG, run, run_programs())
            (warning,) = [line["message"] for line in run.lines("warnings.jsonl")]
            assert warning == f"{name} has lost {lost or count} lines of grpo: its curves have gaps"
    (tmp_path / "run/model").mkdir()
    (tmp_path / "run/inputs.json").unlink()
    assert "inputs.json is gone" in open_run(tmp_path / "run", CONFIG).lines("warnings.jsonl")[-1]["message"]


def edit_number(file: Path) -> None:
    lines = read_lines(file)
    number = next(name for name, value in lines[1].items() if type(value) is float)
    lines[1][number] += 1
    write_rows(file, lines)


def repeat_line(file: Path) -> None:
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines, lines[-1]]))


def replace_line(file: Path) -> None:
    """Removes a line, and repeats another."""
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[1:], lines[-1]]))


@pytest.mark.parametrize("harm", [edit_number, repeat_line, replace_line])
@pytest.mark.parametrize("name", ["metrics.jsonl", "times.jsonl"])
def test_changed_lines_before_a_checkpoint_are_noticed(finished, tmp_path, name, harm):
    shutil.copytree(finished[0], tmp_path / "run")
    harm(tmp_path / "run" / name)
    run = open_run(tmp_path / "run", CONFIG)
    train_grpo(TASK, CONFIG, run, run_programs())
    (warning,) = [line["message"] for line in run.lines("warnings.jsonl")]
    assert warning == f"{name} has lines of grpo that the run did not write: its curves may be wrong"


def test_fewer_steps_than_taken_are_refused(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "run")
    file = tmp_path / "run/config.json"
    config = with_options(CONFIG, steps=1)
    shutil.copy(open_run(tmp_path / "other", config).path / "config.json", file)
    with refused(f"grpo has taken {CONFIG.steps} steps, and steps is 1"):
        train_grpo(TASK, config, open_run(tmp_path / "run", config), run_programs())


def cut_lines(file: Path) -> None:
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-2]))


# ---- the disk


@pytest.mark.parametrize("place", ["/dev/full/x", "/dev/null/x/y", "/proc/x"])
def test_unwritable_folders_give_one_sentence(place):
    with refused("cannot be written to"):
        RunFolder(Path(place), {})


def test_a_full_disk_is_told_from_a_defect(tmp_path):
    run = open_run(tmp_path, CONFIG)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as error:
        run.log("grpo", 1, {})
    assert lacking(error.value) == "the disk is full: free some space"
    assert lacking(KeyError("x")) == ""
    assert lacking(FileNotFoundError(2, "No such file", "x")) == ""


def test_folders_removed_during_a_run_are_named(tmp_path):
    def vanish(state: TrainState, step: int) -> dict[str, float]:
        if step:
            (tmp_path / "run").rename(tmp_path / "moved")
            (tmp_path / "run/checkpoints").mkdir(parents=True)  # a save that goes on makes folders again
        return {}

    config = with_options(CONFIG, eval_every=2)
    run = open_run(tmp_path / "run", config)
    with pytest.raises(OSError, match="was removed, renamed or replaced during the run") as error:
        train_grpo(TASK, config, run, run_programs(), evaluate=vanish)
    assert str(tmp_path / "run") in lacking(error.value)
    (tmp_path / "a").mkdir()
    with pytest.raises(FileNotFoundError) as error:
        write_text(tmp_path / "b/c.json", "")
    assert lacking(error.value) == f"the folder {tmp_path / 'b'} is gone: put it back"


def test_simultaneous_writers_do_not_collide(tmp_path, monkeypatch):
    replace, file = os.replace, tmp_path / "report.html"

    def after_another(source: str, target: str) -> None:
        monkeypatch.setattr(os, "replace", replace)
        write_text(file, "another")
        replace(source, target)

    monkeypatch.setattr(os, "replace", after_another)
    write_text(file, "mine")
    assert file.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_no_training_without_room_for_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=100))
    run = open_run(tmp_path, CONFIG)
    with refused("free some space"):
        train_grpo(TASK, CONFIG, run, run_programs())
    assert not run.lines()


# ---- readers


def test_readers_use_valid_checkpoints_and_move_nothing(finished, tmp_path):
    folder = tmp_path / "grpo"
    shutil.copytree(finished[0] / "checkpoints/grpo", folder)
    (folder / "99").mkdir()
    (folder / "98").write_text("")
    flip(next(folder.glob("6/params/d/*")), random.Random(0))
    shutil.copytree(folder / "4", tmp_path / "other/4")
    flip(next((tmp_path / "other").glob("4/rest/d/*")), random.Random(0))  # of the optimizer, which is not read
    with Checkpoints(tmp_path / "other", warn=pytest.fail) as checkpoints:
        assert checkpoints.restore_params(lambda _: PARAMS)[1] == 4
    with Checkpoints(tmp_path / "empty") as checkpoints, refused("no checkpoint in .* yet: .* --resume"):
        checkpoints.restore_params(lambda _: PARAMS)
    said: list[str] = []
    with Checkpoints(folder, warn=said.append) as checkpoints:
        params, step = checkpoints.restore_params(lambda _: PARAMS)
        assert checkpoints.restore_params(lambda _: PARAMS, 4)[1] == 4
        for number, words in ((6, "checkpoint 6 is not used"), (5, r"no checkpoint of step 5 .*\[4, 6, 98, 99\]")):
            with refused(words):
                checkpoints.restore_params(lambda _: PARAMS, number)
    assert step == 4
    assert params.keys() == PARAMS.keys()
    (sentence,) = said
    assert all(f"checkpoint {number} is not used" in sentence for number in (6, 98, 99))
    assert (folder / "99").is_dir()
    assert (folder / "6").is_dir()  # a reader moves nothing


def saved_by(version, folder, state, monkeypatch):
    """Saves step 3 as a version of the library does."""
    with monkeypatch.context() as patch, Checkpoints(folder) as checkpoints:
        patch.setattr(seal, "__version__", version)
        checkpoints.save(state, 3)


def test_checkpoints_of_other_forms_are_refused(tmp_path, monkeypatch):
    state = TrainState({"policy": {"w": jnp.ones(2)}}, (), jnp.int32(0), {})
    for version in ("0.1.0", "0.4.0"):
        saved_by(version, tmp_path / version, state, monkeypatch)
        with Checkpoints(tmp_path / version) as checkpoints, pytest.raises(UsageError) as refusal:
            checkpoints.restore(lambda: state)
        assert version in str(refusal.value)
        assert __version__ in str(refusal.value)


def test_checkpoints_of_the_version_before_are_read(tmp_path, monkeypatch):
    state = TrainState({"policy": {"w": jnp.full(2, 5.0)}}, (), jnp.int32(0), {})
    saved_by("0.2.0", tmp_path, state, monkeypatch)
    with Checkpoints(tmp_path) as checkpoints:
        restored, step = checkpoints.restore(lambda: state)
    assert step == 3
    assert restored.params["policy"]["w"].tolist() == [5, 5]
