"""Checks that a signal saves the step of a run, which resumes to the bytes of one that was not stopped."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_jax.commands import flags
from grpo_jax.runs import runner

WHERE = Path(__file__).parents[1] / "rl"


def start(folder: Path, *args: str, mode: str = "") -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "MODE": mode}
    command = [sys.executable, str(WHERE / "stopped.py"), *args]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=environment, **pipes)


def run_here(folder: Path, *args: str) -> None:
    """The same in this process, for runs that get no signal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(WHERE)
        patch.setenv("MODE", "")
        import stopped

        flags.main(stopped.Config, stopped.run, None, list(args))


def wait_for(process: subprocess.Popen, line: str) -> None:
    assert process.stdout is not None
    while (found := process.stdout.readline()) and found.strip() != line:
        pass
    assert found


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run_here(folder)
    return (folder / "run/metrics.jsonl").read_bytes()


SIGNALS = [(signal.SIGTERM, 75), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_signals_save_the_step_and_runs_resume_exactly(tmp_path, expected, number, code, capsys):
    process = start(tmp_path)
    wait_for(process, "step 4")
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == code
    assert "the last step is saved: add --resume to continue run" in " ".join(said.split())
    assert "Traceback" not in said
    (saved,) = (tmp_path / "run/checkpoints/grpo").iterdir()
    assert 4 <= int(saved.name) < 12
    run_here(tmp_path, "--resume")
    printed = capsys.readouterr().out
    assert "finished" in printed
    assert printed.count(f"continues after step {saved.name} of 12") == 1
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == expected


@pytest.mark.slow
def test_the_status_after_sigterm_is_an_option(tmp_path):
    process = start(tmp_path, "--stop-code", "3", mode="start")
    wait_for(process, "hangs")
    process.send_signal(signal.SIGTERM)
    said = " ".join(process.communicate(timeout=20)[1].split())
    assert process.returncode == 3
    assert "stopped by SIGTERM between checkpoints; add --resume to continue the run in run" in said


@pytest.mark.slow
def test_second_ctrl_c_ends_a_hanging_step(tmp_path):
    process = start(tmp_path, mode="step")
    wait_for(process, "hangs")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None  # it waits for its step
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=20)[1]
    assert process.returncode == 130
    assert "Ctrl-C ends it now" in said


def test_forked_processes_end_by_signal_as_usual():
    with runner.listening(print, lambda number: os._exit(9)):
        child = os.fork()
        if not child:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(10)
            finally:
                os._exit(0)
        status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM


def test_signals_have_their_usual_effect_before_and_after():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    threads = threading.active_count()
    with runner.listening(print, lambda number: None):
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert threading.active_count() == threads


def test_stop_requests_take_effect_when_training_ends():
    said: list[str] = []

    def train():
        with runner.between_steps() as asked:
            assert not asked()
            for _ in range(2):  # again is no haste: schedulers repeat themselves
                os.kill(os.getpid(), signal.SIGTERM)
            while not asked():
                time.sleep(0.01)

    with runner.listening(said.append, lambda number: None), pytest.raises(runner.Stopped, match="SIGTERM"):
        train()
    assert len(said) == 1
    with runner.between_steps() as asked:  # later training of the same process is not asked to stop
        assert not asked()


# ---- the first seconds

# Prints a line when the program handles SIGINT, which must be before it imports JAX.
PRELUDE = """
import runpy, signal, sys
set_handler = signal.signal
def tell(*handler):
    set_handler(*handler)
    print("early" if "jax" not in sys.modules else "late", flush=True)
signal.signal = tell
"""
STARTS = {
    "grpo-jax": "from grpo_jax.__main__ import main; sys.argv[1:1] = ['train']; main()",
    "experiments": "sys.argv[0] = '-m'; import experiments; "
    "runpy.run_module('experiments.train', None, '__main__', True)",
}
WAITS = [0.0, pytest.param(0.3, marks=pytest.mark.slow), 1.0, pytest.param(2.0, marks=pytest.mark.slow)]


@pytest.mark.parametrize("program", STARTS)
@pytest.mark.parametrize("wait", WAITS)
def test_an_early_ctrl_c_is_a_sentence(tmp_path, program, wait):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", PRELUDE + STARTS[program], "--model", "nowhere", "--task", "rows.jsonl"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes)
    wait_for(process, "early")
    time.sleep(wait)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert "Traceback" not in said
    if process.returncode != 2:  # if it had not refused the model yet
        assert process.returncode == 130
        assert said.startswith("error: stopped by SIGINT")
