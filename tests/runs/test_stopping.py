"""Signals: a run saves its step and says how to go on; resumed it ends with the bytes of one that was not stopped."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from grpo_jax.runs import stopping

TESTS = Path(__file__).parents[1]
# An experiment of which each step takes a tenth of a second; MODE says where it hangs, in C code.
SCRIPT = """
import dataclasses, hashlib, os, sys, time
from dataclasses import dataclass
from pathlib import Path
from bigrams import PARAMS, POLICY, V
from grpo_jax.config import GRPOConfig, recipe
from grpo_jax.data.types import pad_prompts, rng
from grpo_jax.runs import flags
from grpo_jax.tasks.task import Task
from grpo_jax.training.grpo import train

@dataclass(frozen=True)
class Config:
    train: GRPOConfig = recipe(steps=12, num_prompts=8, group_size=4, max_tokens=3, checkpoint_every=50)
    output: flags.RunConfig = flags.RunConfig(Path("run"))

def hang():
    print("hangs", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)

def prompts(step):
    tokens = rng(step).integers(0, 6, (8, 2)).tolist()
    return pad_prompts(tokens, [{"prompt": str(t)} for t in tokens], width=3, pad_id=7)

def reward(examples, completions, calls=[]):
    calls.append(None)
    print("step", len(calls), flush=True)
    if os.environ["MODE"] == "step" and len(calls) == 3:
        hang()
    time.sleep(0.1)
    return [text.count("3") / 3 for text in completions]

def run(config):
    folder = flags.open_run(config)
    if os.environ["MODE"] == "start":
        hang()
    task = Task(prompts, reward, prompts(999), lambda ids: "".join(map(str, ids)), (6,), 7, V)
    train(POLICY, PARAMS, task, config.train, folder)
    print("finished", flush=True)

flags.main(Config, run, None)
"""


def start(folder: Path, *args: str, mode: str = "") -> subprocess.Popen:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS / "training"), *filter(None, sys.path)]),
        "MODE": mode,
    }
    command = [sys.executable, "-c", SCRIPT, *args]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes)  # type: ignore[call-overload]


def wait_for(process: subprocess.Popen, line: str) -> None:
    assert process.stdout is not None
    while (found := process.stdout.readline()) and found.strip() != line:
        pass
    assert found


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    process = start(folder)
    process.communicate(timeout=120)
    assert process.returncode == 0
    return (folder / "run/metrics.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_saves_the_step_and_the_run_goes_on_to_the_same_bytes(tmp_path, expected, number, code):
    process = start(tmp_path)
    wait_for(process, "step 4")
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == code
    assert "the last step is saved: add --resume to continue run" in " ".join(said.split())
    assert "Traceback" not in said
    (saved,) = (tmp_path / "run/checkpoints/grpo").iterdir()
    assert 4 <= int(saved.name) < 12
    again = start(tmp_path, "--resume")
    assert "finished" in again.communicate(timeout=120)[0]
    assert again.returncode == 0
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
def test_a_second_ctrl_c_ends_a_run_whose_step_hangs(tmp_path):
    process = start(tmp_path, mode="step")
    wait_for(process, "hangs")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None  # it waits for its step
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=20)[1]
    assert process.returncode == 130
    assert "Ctrl-C ends it now" in said


FORKS = """
import os, signal, time
from grpo_jax.runs import stopping
with stopping.listening(print, lambda number: os._exit(9)):
    child = os.fork()
    if not child:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_ends_by_the_signal_and_is_not_the_run():
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"{-signal.SIGTERM}\n")


def test_signals_have_their_usual_effect_before_and_after():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    threads = threading.active_count()
    with stopping.listening(print, lambda number: None):
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert threading.active_count() == threads


def test_what_is_asked_for_during_training_is_answered_at_its_end():
    said: list[str] = []

    def train():
        with stopping.between_steps() as asked:
            assert not asked()
            for _ in range(2):  # again is no haste: schedulers repeat themselves
                os.kill(os.getpid(), signal.SIGTERM)
            while not asked():
                time.sleep(0.01)

    with stopping.listening(said.append, lambda number: None), pytest.raises(stopping.Stopped, match="SIGTERM"):
        train()
    assert len(said) == 1
    with stopping.between_steps() as asked:  # later training of the same process is not asked to stop
        assert not asked()
