"""Checks that a command refuses paths, terminals and limits that it cannot use in one sentence, with exit status 2."""

import contextlib
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from command_helpers import exit_status, refusal, run
from tiny import change_json

from grpo_jax import commands, hosts
from grpo_jax.commands import evaluate, export as exporting, flags, model_and_task, sample, sft
from grpo_jax.errors import Interruption, UsageError, lacking
from grpo_jax.models import huggingface
from grpo_jax.models.files import weights
from grpo_jax.models.huggingface import load_pretrained


@pytest.fixture(scope="module")
def origin(inputs, tmp_path_factory):
    """A folder with a tiny model, rows, and a run of one step of supervised fine-tuning."""
    folder = shutil.copytree(inputs, tmp_path_factory.mktemp("places") / "inputs")
    (folder / "model/LICENSE").write_text("free")
    run(folder, folder / "run", "sft", "--warmup-steps", 0, "--steps", 1, "--num-rows", 8)
    return folder


@pytest.fixture
def place(origin, tmp_path, monkeypatch):
    """A copy of it, which is the working directory."""
    shutil.copytree(origin, tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    monkeypatch.setattr(sys, "argv", ["grpo-jax"])
    monkeypatch.setattr(hosts, "leave", lambda reason, code: sys.exit(code))  # it would end the tests
    return tmp_path / "place"


# ---- paths

TRAIN = ["train", "--model", "model", "--num-prompts", "4", "--run-dir", "new", "--no-compilation-cache"]
REWARDED = [*TRAIN, "--task", "rows.jsonl", "--reward", "length(maximum=3)", "--max-tokens", "8"]
USES = {
    "run-dir": [*REWARDED, "--run-dir", "PATH"],
    "resumed run-dir": ["train", "--resume", "--run-dir", "PATH"],
    "config": [*REWARDED, "--config", "PATH"],
    "task": [*TRAIN, "--task", "PATH.jsonl", "--reward", "length(maximum=3)", "--max-tokens", "8"],
    "data": [*TRAIN[:3], "--method", "dpo", "--task", "PATH.jsonl"],
    "model": ["train", "--model", "PATH", *REWARDED[3:]],
    "teacher": [*REWARDED, "--distillation", "reverse_kl", "--teacher", "PATH"],
    "evaluated": ["evaluate", "PATH"],
    "evaluated out": ["evaluate", "run", "--out", "PATH"],
    "sampled": ["sample", "PATH", *REWARDED[8:]],
    "sampled to": ["sample", "model", *REWARDED[8:], "--json", "PATH"],
    "exported": ["export", "PATH", "out"],
    "exported to": ["export", "run", "PATH"],
    "reported": ["report", "PATH"],
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("path", ["x" * 300, "~nouser/x", "closed/x", "r\udce9"])
def test_a_path_that_cannot_be_used_is_named(place, capsys, use, path):
    (place / "closed").mkdir()
    (place / "closed").chmod(0)
    said = refusal(capsys, *(word.replace("PATH", path) for word in USES[use]))
    assert repr(path)[1:-1][:30] in said
    assert not (place / "new").exists()


@pytest.mark.parametrize("args", [["export", "run"], ["evaluate", "model", *REWARDED[8:], "--out"]])
def test_a_folder_that_cannot_be_made_is_named(place, capsys, args):
    words = refusal(capsys, *args, "/proc/here/there")
    assert "/proc/here/there" in words
    assert "name another" in words


@pytest.mark.parametrize("args", [["evaluate", "--out", "readonly"], ["sample", "--json", "readonly/x.jsonl"]])
def test_an_unwritable_folder_is_named_before_sampling(place, capsys, monkeypatch, args):
    monkeypatch.setattr(evaluate, "sample_and_score", lambda *_, **__: pytest.fail("it sampled"))
    monkeypatch.setattr(sample, "sample", lambda *_, **__: pytest.fail("it sampled"))
    (place / "readonly").mkdir(0o555)
    assert "readonly cannot be written" in refusal(capsys, args[0], "model", *REWARDED[8:], *args[1:])


# ---- terminals and encodings


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_help_is_written_to_any_terminal(monkeypatch, encoding):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", terminal)
    with pytest.raises(SystemExit) as ended:
        commands.main(["train", "--help"])
    assert not ended.value.code
    terminal.flush()
    assert b"--learning-rate" in terminal.buffer.getvalue()


class Full(io.StringIO):
    def flush(self) -> None:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("args", [["train", "--help"], ["report", "--help"], ["report", "run"], ["--help"]])
@pytest.mark.parametrize("output", [None, Full()], ids=["closed", "full"])
def test_closed_or_full_output_gives_no_traceback(place, monkeypatch, args, output):
    monkeypatch.setattr(sys, "stdout", output)
    assert exit_status(lambda: commands.main(args)) == (2 if output else 0)


def test_full_stdout_ends_a_run_with_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "_exit", sys.exit)
    given = ["--run-dir", str(tmp_path / "run"), "--no-compilation-cache"]
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:  # closing writes again
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit, match="2"):
            flags.main(sft.Config, lambda config: print("words", flush=True), None, given)
        sys.stdout.flush()  # as Python does at its end
    hosts._over.clear()
    assert capsys.readouterr().err == "error: the disk is full: free some space\n"


REDIRECTED = ["exec >/dev/full", "exec > >(true)", "exec >/dev/full 2>&1"]


@pytest.mark.slow
@pytest.mark.parametrize("before", REDIRECTED)
@pytest.mark.parametrize("args", [[*REWARDED, "--steps", "2"], ["report", "run"], ["evaluate", "run"]])
def test_unread_command_output_ends_with_status_2(place, before, args):
    done = run_command(place, *args, before=f"unset PYTHONUNBUFFERED; {before}")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == (0 if "2>&1" in before else 1)


def test_help_is_at_least_40_columns_wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "1")
    flags.prepare_terminal()
    assert shutil.get_terminal_size().columns == 40


def run_command(place: Path, *args: str, before: str = "") -> subprocess.CompletedProcess:
    """Runs a command in a shell, after a line that limits or changes what it may use."""
    program = [sys.executable, "-c", "from grpo_jax.commands import main; main()", *args]
    shell = ["bash", "-c", f'{before}; exec "$@"', "bash", *program]
    return subprocess.run(shell, cwd=place, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_exports_are_complete_in_an_ascii_locale(place):
    (place / "run/command.txt").write_text("grpo-jax train --run-dir β", encoding="utf-8")
    done = run_command(place, "export", "run", "out", before="export LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0")
    assert done.returncode == 0, done.stderr
    assert "β" in (place / "out/README.md").read_text(encoding="utf-8")


def test_a_command_line_of_any_bytes_is_kept(place, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["grpo-jax train", "--system-prompt", "r\udce9"])
    given = "--model model --task rows.jsonl --steps 1 --num-rows 8 --run-dir kept --no-compilation-cache"
    flags.open_run(flags.parse(sft.Config, None, given.split()))
    assert "--system-prompt" in (place / "kept/command.txt").read_text(encoding="utf-8")


# ---- limits


LIMITS = [
    (OSError(27, "File too large"), "a file is larger than a limit allows"),
    (ValueError("OUT_OF_RANGE: Failed to write: File too large [os_error_code='27']"), "a file is larger"),
    (OSError(24, "Too many open files"), "too many files are open"),
    (ValueError("RESOURCE_EXHAUSTED: Error opening d/1: Too many open files"), "too many files are open"),
    (OSError(36, "File name too long", "x" * 300), "cannot be read or written (File name too long)"),
    (OSError(28, "No space left on device"), "the disk is full"),
    (RuntimeError("can't start new thread"), "too many threads run"),
    (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"), "lower max_tokens or the prompts of a step"),
    (RuntimeError("Unable to initialize backend 'nope': unknown"), "correct JAX_PLATFORMS"),
    (OverflowError("date value out of range"), "set the clock"),
    (BrokenPipeError(32, "Broken pipe"), "nothing reads the output any more"),
]


def test_a_platform_without_a_device_is_refused(place):
    command = "train --model model --task rows.jsonl --reward rewards.py:low --num-prompts 4 --max-tokens 8 --dry-run"
    environment = os.environ | {
        "JAX_PLATFORMS": "cuda",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    run = subprocess.run(
        [sys.executable, "-m", "grpo_jax", *command.split()],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stderr.splitlines()[-1] == "error: JAX finds no such device: correct JAX_PLATFORMS"
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(("error", "sentence"), LIMITS)
def test_a_limit_of_the_machine_has_a_sentence(error, sentence):
    assert sentence in lacking(error)


ULIMITS = [("ulimit -f 8", "a file is larger"), ("ulimit -n 24", "too many files are open")]


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "sentence"), ULIMITS)
def test_resource_limits_while_saving_give_one_sentence(place, limit, sentence):
    more = ["--group-size", "4", "--steps", "2", "--checkpoint-every", "1"]
    printed = run_command(place, *REWARDED, *more, before=limit).stderr
    assert "Traceback" not in printed
    assert sentence in printed


# ---- a run that had not begun


@pytest.mark.parametrize("error", [Interruption("a host is gone"), OSError(28, "No space left on device")])
@pytest.mark.parametrize("begins", [False, True])
def test_only_a_run_that_began_can_be_resumed(place, capsys, error, begins):
    def run(config: sft.Config) -> None:
        if begins:
            flags.open_run(config)
        raise error

    with pytest.raises(SystemExit, match="2"):
        flags.main(sft.Config, run, None, ["--run-dir", "new", "--no-compilation-cache"])
    assert ("--resume" in capsys.readouterr().err) == begins


# ---- exports and reports of a run whose files were changed

HUGE = "1" + "0" * 400


def export(out: str = "out", **options) -> int:
    return exporting.export(exporting.Options(Path("run"), Path(out), **options))


@pytest.mark.parametrize("results", ["{", f'{{"after": {{"avg": {HUGE}}}}}'], ids=["half", "huge"])
def test_damaged_results_do_not_block_a_model(place, results):
    (place / "run/results.json").write_text(results)
    assert export() == 1
    assert (place / "out/README.md").exists()
    load_pretrained("out")


@pytest.mark.parametrize("failing", [(weights, "save_file"), (exporting, "write_text")], ids=["weights", "card"])
@pytest.mark.parametrize("is_killed", [False, True])
def test_interrupted_exports_leave_no_complete_looking_folder(place, failing, is_killed):
    """A killed process tidies nothing up; the next may have its number."""
    with pytest.MonkeyPatch.context() as patch:
        if is_killed:
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        patch.setattr(*failing, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            export()
    assert not (place / "out").exists()
    assert bool([*place.glob("out.partial-*")]) == is_killed
    (place / "out.partial-999999999").mkdir()  # of a process that is gone
    export()
    assert not [*place.glob("out.partial-*")]
    assert {"README.md", "model.safetensors", "config.json"} <= {file.name for file in (place / "out").iterdir()}


def test_killed_evaluations_leave_no_stale_numbers(tmp_path, monkeypatch):
    arrays = {"rewards": np.ones((1, 1)), "greedy": np.ones(1), "graded": np.ones((1, 2), bool)}
    evaluation = SimpleNamespace(texts=[["a", "b"]], lengths=np.ones((1, 2), int), **arrays)
    task = SimpleNamespace(heldout=SimpleNamespace(examples=[{"prompt": "p"}]))
    results = evaluate.Options(), tmp_path, {}, evaluation, task
    evaluate.save(*results)
    assert (tmp_path / "numbers.json").exists()
    monkeypatch.setattr(evaluate, "write_text", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluate.save(*results)
    assert not (tmp_path / "numbers.json").exists()


HARMED_FILES = [
    ("config.json", lambda file: file.write_text(file.read_text().replace('size": 16', 'size": 8'))),
    ("tokenizer.json", Path.unlink),
    ("chat_template.jinja", lambda file: file.write_text("{{ messages }}")),
]


@pytest.mark.parametrize(("name", "harm"), HARMED_FILES)
@pytest.mark.parametrize("read", [export, lambda: model_and_task.load_sampling_model(evaluate.Options(model="run"))])
def test_a_model_description_that_changed_is_refused(place, name, harm, read):
    harm(place / "run/model" / name)
    with pytest.raises(UsageError, match=f"not what they were when the run in .* began: {name} of the model"):
        read()


def test_saved_options_of_the_wrong_type_are_named(place):
    change_json(place / "run/config.json", seed="zero")
    with pytest.raises(UsageError, match=r"seed in run/config\.json is 'zero'"):
        model_and_task.saved_options("run")


def test_report_refuses_a_model_folder_and_changes_nothing(place, capsys):
    before = {file.name for file in (place / "model").iterdir()}
    assert "model is the folder of a model: name that of a run" in refusal(capsys, "report", "model")
    assert {file.name for file in (place / "model").iterdir()} == before


# ---- links in a model's folder


def test_files_outside_of_a_model_are_not_copied(place, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (place / "model/notes.json").symlink_to(tmp_path / "secret")
    (place / "model/merges.txt").symlink_to("LICENSE")
    (place / "link").symlink_to("model")
    assert load_pretrained("link").config.hidden_size == 16
    target = tmp_path / "copy"
    target.mkdir()
    huggingface.copy_text_files(place / "model", target)
    assert {"config.json", "tokenizer.json", "LICENSE", "merges.txt"} <= {file.name for file in target.iterdir()}
    assert not (target / "notes.json").exists()
    (place / "model/LICENSE").unlink()
    (place / "model/LICENSE").symlink_to(tmp_path / "secret")
    with pytest.raises(UsageError, match="LICENSE is a link to a file outside of the model's folder"):
        huggingface.copy_text_files(place / "model", target)


def test_text_files_behind_hub_cache_links_are_copied(place, tmp_path):
    cache = tmp_path / "models--a--b"
    (cache / "snapshots").mkdir(parents=True)
    shutil.move(place / "model", cache / "blobs")
    (cache / "snapshots/1").mkdir()
    (cache / "snapshots/1/LICENSE").symlink_to("../../blobs/LICENSE")
    (tmp_path / "copy").mkdir()
    huggingface.copy_text_files(cache / "snapshots/1", tmp_path / "copy")
    assert (tmp_path / "copy/LICENSE").read_text() == "free"
