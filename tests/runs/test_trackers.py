"""Checks that TensorBoard and Weights & Biases show the numbers of the files, also after a resume."""

import itertools
import math
import sys
import types

import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from grpo_jax.errors import UsageError
from grpo_jax.runs import files
from grpo_jax.runs.files import weights_and_biases
from grpo_jax.runs.folder import RunFolder


def events(folder):
    """(tag, step) -> value, of all event files: a length, its checksum, the message, its checksum."""
    found = {}
    for file in folder.glob("events*"):
        data = file.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            for start, end in ((0, 8), (12, 12 + size)):
                assert data[end : end + 4] == masked_crc32c(data[start:end]).to_bytes(4, "little")
            event = Event.FromString(data[12 : 12 + size])
            for value in event.summary.value:
                assert (value.tag, event.step) not in found
                found[value.tag, event.step] = value.simple_value
            data = data[16 + size :]
    return found


def test_tensorboard_has_each_number_once_after_resuming(tmp_path, monkeypatch):
    seconds = itertools.count()  # a file's name has the second in which it began
    monkeypatch.setattr(files, "time", types.SimpleNamespace(time=lambda: next(seconds)))
    run = RunFolder(tmp_path, {})
    run.rewind("grpo", 0)
    for step in (1, 2, 3):
        run.log("grpo", step, {"reward": step / 2, "nothing": None, "infinite": math.inf})
    run.log("control", 1, {"reward": 9.0})
    assert events(tmp_path / "tensorboard" / "grpo") == {("reward", step): step / 2 for step in (1, 2, 3)}
    (tmp_path / "tensorboard/grpo/notes.txt").write_text("a user's")
    again = RunFolder(tmp_path, {})
    for step in (3, 2):
        again.rewind("grpo", step)
    again.log("grpo", 3, {"reward": 7.0})
    assert events(tmp_path / "tensorboard" / "grpo") == {("reward", 1): 0.5, ("reward", 2): 1.0, ("reward", 3): 7.0}
    assert events(tmp_path / "tensorboard" / "control") == {("reward", 1): 9.0}
    assert (tmp_path / "tensorboard/grpo/notes.txt").exists()


@pytest.mark.parametrize("linked", ["tensorboard", "tensorboard/grpo"])
def test_nothing_is_deleted_behind_a_link(tmp_path, linked):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "grpo").mkdir(parents=True)
    for file in (elsewhere / "events.mine", elsewhere / "grpo/events.mine"):
        file.write_text("mine")
    run = RunFolder(tmp_path / "run", {})
    (run.path / linked).parent.mkdir(exist_ok=True)
    (run.path / linked).symlink_to(elsewhere)
    with pytest.raises(UsageError, match=f"{linked} is a link, and a run deletes no files elsewhere"):
        run.rewind("grpo", 0)
    assert len(list(elsewhere.rglob("events.mine"))) == 2


def test_wandb_resumes_one_run_with_steps_per_phase(tmp_path, monkeypatch):
    calls = []
    theirs = types.SimpleNamespace(
        log=lambda values: calls.append(values),
        define_metric=lambda name, step_metric: calls.append((name, step_metric)),
    )
    module = types.SimpleNamespace(init=lambda **given: calls.append(given) or theirs)
    monkeypatch.setitem(sys.modules, "wandb", module)
    for _ in range(2):  # begun and resumed
        tracker = weights_and_biases("project", tmp_path, {"seed": 0})
        tracker.log({"phase": "grpo", "step": 4, "reward": 0.5, "nothing": None})
    assert calls[0]["id"] == calls[3]["id"]
    assert calls[1:3] == [("grpo/*", "grpo/step"), {"grpo/step": 4, "grpo/reward": 0.5}]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match="install it"):
        weights_and_biases("project", tmp_path, {})
