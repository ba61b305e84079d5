"""Several hosts, each a process of its own, beside one: the same numbers, and when one ends the others end too."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import on_hosts
import pytest
import test_devices as cases
from command_runs import EPISODES, GRPO, write_inputs
from rl_helpers import assert_same_files

from grpo_jax.commands import train
from grpo_jax.config import with_options

Processes = list[subprocess.Popen]
WORKER = Path(__file__).with_name("on_hosts.py")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def launch(folder: Path, *args: str, number: int = 1, devices: int = 1, updates: bool = False) -> Processes:
    """Starts the worker on so many hosts with so many devices each."""
    flags = re.sub(r"(device_count)=\d+", rf"\1={devices}", os.environ["XLA_FLAGS"])
    flags += " --xla_cpu_multi_thread_eigen=false"
    # XLA on a CPU runs independent collectives of a program side by side, and Gloo then takes one for another.
    flags += " --xla_cpu_enable_concurrency_optimized_scheduler=false"
    path = [str(WORKER.parent), str(WORKER.parents[1] / "experiments"), *filter(None, sys.path)]
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(path), "JAX_PLATFORMS": "cpu"}
    address = f"127.0.0.1:{free_port()}"

    def begin(own: int) -> subprocess.Popen:
        where = ["--coordinator-address", address, "--num-processes", str(number), "--process-id", str(own)]
        given = [f"0.{own + 1}" if arg == "HOST" else arg for arg in args]
        options = ["updates", address, str(number), str(own), str(folder)] if updates else [*given, *where]
        if number == 1:
            options = list(args)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [sys.executable, str(WORKER), *options]
        return subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes)  # type: ignore[call-overload]

    return [begin(own) for own in range(number)]


def finish(processes: Processes, codes: tuple[int, ...] = (0, 0, 0, 0)) -> list[tuple[str, str]]:
    """What each said, once all have ended with these statuses."""
    try:
        said = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == list(codes[: len(processes)]), said
    return [(out, " ".join(error.split())) for out, error in said]


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (folder / "run" / name).read_text().splitlines()]


def assert_close(actual: list[dict], expected: list[dict]) -> None:
    """Lines of metrics.jsonl that differ by rounding alone."""
    assert [line.keys() for line in actual] == [line.keys() for line in expected]
    for line, other in zip(actual, expected, strict=True):
        for name, value in other.items():
            if isinstance(value, float) and name not in ("ratio_deviation", "first_ratio_deviation"):
                assert line[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
            elif not isinstance(value, float):
                assert line[name] == value, name


@pytest.fixture(scope="module")
def one_host(tmp_path_factory):
    """The folder of a run that this process makes alone."""
    folder = tmp_path_factory.mktemp("one")
    on_hosts.run(with_options(on_hosts.Config(), run_dir=folder / "run"))
    return folder


def test_two_hosts_have_the_numbers_of_one(tmp_path, one_host):
    """With dynamic sampling, evaluations, and completions that nobody grades. One writes; one goes on alone."""
    processes = launch(tmp_path, "--devices", "0", number=2)
    (out, error), (other, _) = finish(processes)
    assert "checksum" in out
    assert "checksum" not in other
    calls = re.findall("^hook .*", out, re.M)
    assert calls == re.findall("^hook .*", other, re.M)
    assert [int(call.split()[1]) for call in calls] == [0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert "waits until all hosts are there" in error
    actual, expected = lines(tmp_path), lines(one_host)
    assert_close(actual, expected)
    assert sum(line.get("ungraded_reward_no_number", 0) for line in expected) > 0
    assert max(line.get("rollouts", 0) for line in expected) > 1
    groups, others = lines(tmp_path, "rollouts.jsonl"), lines(one_host, "rollouts.jsonl")
    assert [group["completions"] for group in groups] == [group["completions"] for group in others]
    assert lines(tmp_path, "warnings.jsonl") == lines(one_host, "warnings.jsonl")
    assert sorted(path.name for path in (tmp_path / "run/checkpoints/grpo").iterdir()) == ["2", "4"]
    assert len(lines(tmp_path, "times.jsonl")) == 4


@pytest.mark.slow
@pytest.mark.parametrize(("number", "devices"), [(2, 2), (4, 1)])
def test_updates_on_several_hosts_equal_one_host(tmp_path, number, devices):
    """Of a decoder and of PPO, with parameters cut over hosts. And the same noise gives the same tokens, and what the
    compiled update exchanges is what is planned."""
    finish(launch(tmp_path, number=number, devices=devices, updates=True))
    for name in ("decoder", "ppo"):
        expected = cases.gradients(name, cases.ONE)
        actual = list(np.load(tmp_path / f"{name}.npz").values())
        cases.compare(expected, jax.tree.unflatten(jax.tree.structure(expected), actual))
    one, other = cases.sampled(cases.ONE), np.load(tmp_path / "sampled.npz")
    same = (one.completion_ids == other["ids"]).all(-1)
    assert (~same).sum() <= 1  # rounding may decide between two tokens
    np.testing.assert_allclose(other["logprobs"][same], one.sampler_logprobs[same], atol=1e-5)
    exchanged, planned = json.loads((tmp_path / "exchanged.json").read_text())
    assert sum(planned) > 0
    assert exchanged == pytest.approx(planned, rel=0.05)


SAMPLED = {
    # With parameters cut over both hosts, each of which samples its own groups on two of its four devices.
    "grpo": (f"{GRPO} --reward user.py:low --steps 4 --fsdp 4 --learning-rate 0.1", 2, "--sampler-fsdp 2"),
    "episodes": (f"{EPISODES} --environment user.py:make --steps 3 --learning-rate 0.1", 1, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_samplers_of_two_hosts_have_the_numbers_of_no_samplers(tmp_path, name):
    options, others, layout = SAMPLED[name]
    own = (f"--sampler-devices 2 {layout}", 2, 4)
    for folder, (more, number, devices) in {"own": own, "none": ("", others, 4 // others)}.items():
        (tmp_path / folder).mkdir()
        write_inputs(tmp_path / folder)
        command = f"command {options} {more} --staleness 1 --devices 0 --run-dir run".split()
        finish(launch(tmp_path / folder, *command, number=number, devices=devices))
    assert_close(lines(tmp_path / "own"), lines(tmp_path / "none"))
    groups = [lines(tmp_path / folder, "rollouts.jsonl") for folder in ("own", "none")]
    assert [group["completions"] for group in groups[0]] == [group["completions"] for group in groups[1]]
    assert len({line["reward"] for line in lines(tmp_path / "own") if "reward" in line}) > 1


PAIRS = ("--task", "rows.jsonl", "--num-pairs", "8")
METHODS = {
    "dpo": (*PAIRS, "--lora-rank", "2"),
    "reward-model": PAIRS,
    "sft": ("--task", "rows.jsonl", "--num-rows", "8", "--fsdp", "4"),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_offline_phases_on_two_hosts_equal_one_host(tmp_path, monkeypatch, method):
    """Cut off on two hosts of two devices, and resumed there; host 0 alone writes."""
    write_inputs(tmp_path)
    given = ["--method", method, "--model", "model", *METHODS[method], "--no-compilation-cache", "--log-every", "1"]
    given += ["--steps", "4", "--decay", "none", "--learning-rate", "1e-2", "--eval-every", "2"]
    for more in (["--devices", "0", "--steps", "2"], ["--resume", "--steps", "4"]):
        arguments = ["command", *([] if "--resume" in more else given), *more, "--run-dir", "run"]
        finish(launch(tmp_path, *arguments, number=2, devices=2))
    monkeypatch.chdir(tmp_path)
    train.command([*given, "--fsdp", "1", "--run-dir", "one/run"])
    assert_close(lines(tmp_path), lines(tmp_path / "one"))
    made, alone = ({path.name for path in (tmp_path / at).iterdir()} for at in ("run", "one/run"))
    assert made == alone


# ---- hosts that end

SLOW = ("--mode", "slow", "--steps", "12", "--eval-every", "0")  # steps of a second


@pytest.fixture(scope="module")
def slow_run(tmp_path_factory):
    """The folder of a run of two hosts that nobody stopped."""
    folder = tmp_path_factory.mktemp("two")
    finish(launch(folder, *SLOW, "--devices", "0", number=2))
    return folder


def wait_for_step(process: subprocess.Popen, number: int) -> None:
    """Until a host grades for this time."""
    while number and (line := process.stdout.readline()):  # type: ignore[union-attr]
        number -= line == "step\n"
    assert not number


@pytest.mark.slow
def test_a_signal_stops_hosts_at_the_same_step(tmp_path, slow_run):
    processes = launch(tmp_path, *SLOW, "--devices", "0", number=2)
    wait_for_step(processes[1], 6)
    processes[1].send_signal(signal.SIGTERM)
    for _, error in finish(processes, (75, 75)):
        assert "stopped by SIGTERM; the last step is saved" in error
    assert 2 < len(lines(tmp_path)) < 12
    shutil.copytree(tmp_path / "run", tmp_path / "alone/run")
    finish(launch(tmp_path, "--resume", number=2))
    assert_same_files(tmp_path / "run", slow_run / "run", ["metrics.jsonl"])
    finish(launch(tmp_path / "alone", "--resume", "--devices", "1"))
    assert_close(lines(tmp_path / "alone"), lines(slow_run))


@pytest.mark.slow
def test_hosts_resume_from_the_newest_valid_checkpoint(tmp_path, slow_run):
    shutil.copytree(slow_run, tmp_path, dirs_exist_ok=True)
    (damaged,) = (tmp_path / "run/checkpoints/grpo/12/params/d").iterdir()
    damaged.write_bytes(damaged.read_bytes()[:-1])
    finish(launch(tmp_path, "--resume", number=2))
    (warned,) = (line["message"] for line in lines(tmp_path, "warnings.jsonl") if "checkpoint" in line["message"])
    assert re.search("checkpoint 12 is not used, .* is damaged; the run goes on from step 10", warned)
    assert_same_files(tmp_path / "run", slow_run / "run", ["metrics.jsonl"])
    assert {path.name for path in (tmp_path / "run/checkpoints/grpo").iterdir()} == {"10", "12", "damaged-12"}


@pytest.mark.slow
def test_nonfinite_gradients_on_one_host_end_all_hosts(tmp_path):
    more = ("--mode", "nan", "--max-skipped", "2", "--max-rollouts", "1", "--devices", "0")
    said = finish(launch(tmp_path, *SLOW, *more, number=2), (2, 2))
    assert all("gradients were not finite 2 times in a row" in error for _, error in said)
    assert [line["skipped"] for line in lines(tmp_path)][-3:] == [0, 1, 2]
    assert len(list((tmp_path / "run").glob("skipped_*.npz"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_host_is_named_and_ends_others(tmp_path, slow_run, number):
    processes = launch(tmp_path, *SLOW, "--devices", "0", "--checkpoint-every", "1", number=2)
    wait_for_step(processes[1], 6)
    processes[1].send_signal(number)
    began = time.monotonic()
    processes[0].wait(timeout=60)
    assert time.monotonic() - began < 60
    processes[1].kill()
    said = finish(processes, (-signal.SIGABRT, -signal.SIGKILL))[0][1]
    assert "tasks are unhealthy (stopped sending heartbeats): 1 " in said
    assert "Traceback" not in said
    finish(launch(tmp_path, "--resume", "--devices", "1"))
    assert_close(lines(tmp_path), lines(slow_run))


@pytest.mark.slow
def test_killing_the_first_host_ends_the_other(tmp_path):
    processes = launch(tmp_path, *SLOW, "--devices", "0", number=2)
    wait_for_step(processes[1], 6)
    processes[0].kill()
    processes[1].wait(timeout=60)
    said = processes[1].communicate()[1]
    assert "another task died" in said or "host 0 cannot be reached" in said
    processes[0].communicate()


@pytest.mark.slow
def test_one_hosts_error_ends_all_with_its_message(tmp_path):
    processes = launch(tmp_path, *SLOW, "--mode", "raise", "--devices", "0", number=2)
    first, second = finish(processes, (1, 1))
    assert "error of host 0: host 1 has ended: ZeroDivisionError: of host 1" in first[1]
    assert "Traceback" in second[1]


UNSHARED_OPTIONS = [
    (("--devices", "1"), "uses all of their 2 devices: set devices to 0"),
    (("--devices", "0", "--parallel", "pmap"), "pmap runs on one host"),
    (("--devices", "0", "--tensor", "2"), "lies on those of one host: set tensor"),
    (("--devices", "0", "--learning-rate", "HOST"), "given another learning_rate"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("args", "words"), UNSHARED_OPTIONS)
def test_runs_that_hosts_cannot_share_are_refused(tmp_path, args, words):
    said = [error for _, error in finish(launch(tmp_path, *args, number=2), (2, 2))]
    assert all(error.count(words) == 1 for error in said)
    assert not any("Traceback" in error or "--resume" in error for error in said)
