"""Several hosts, each a process of its own, beside one: the same numbers, and when one ends the others end too."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_jax.errors import UsageError
from grpo_jax.runs.hosts import HostOptions, start

Processes = list[subprocess.Popen]
WORKER = Path(__file__).with_name("on_hosts.py")


def launch(
    folder: Path, *args: str, number: int = 1, devices: int = 1, updates: bool = False
) -> Processes:
    """Starts the worker on so many hosts with so many devices each."""
    flags = re.sub(r"(device_count)=\d+", rf"\1={devices}", os.environ["XLA_FLAGS"])
    flags += " --xla_cpu_multi_thread_eigen=false"
    path = [str(WORKER.parent), *filter(None, sys.path)]
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(path), "JAX_PLATFORMS": "cpu"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"

    def begin(own: int) -> subprocess.Popen:
        where = ["--coordinator-address", address, "--num-processes", str(number), "--process-id", str(own)]
        options = ["updates", address, str(number), str(own), str(folder)] if updates else [*args, *where]
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


def assert_close(found: list[dict], expected: list[dict]) -> None:
    """Lines of metrics.jsonl that differ by rounding alone."""
    assert [line.keys() for line in found] == [line.keys() for line in expected]
    for line, other in zip(found, expected, strict=True):
        for name, value in other.items():
            if isinstance(value, float) and name not in ("ratio_deviation", "first_ratio_deviation"):
                assert line[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
            elif not isinstance(value, float):
                assert line[name] == value, name


@pytest.fixture(scope="module")
def one_host(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    finish(launch(folder))
    return folder


def test_two_hosts_have_the_numbers_of_one(tmp_path, one_host):
    """With dynamic sampling, evaluations, and completions that nobody grades. One writes; one goes on alone."""
    processes = launch(tmp_path, "--devices", "0", number=2)
    (out, _), (other, _) = finish(processes)
    assert "checksum" in out
    assert "checksum" not in other
    found, expected = lines(tmp_path), lines(one_host)
    assert_close(found, expected)
    assert sum(line.get("ungraded_reward_no_number", 0) for line in expected) > 0
    assert max(line.get("rollouts", 0) for line in expected) > 1
    groups, others = lines(tmp_path, "rollouts.jsonl"), lines(one_host, "rollouts.jsonl")
    assert [group["completions"] for group in groups] == [group["completions"] for group in others]
    assert lines(tmp_path, "warnings.jsonl") == lines(one_host, "warnings.jsonl")
    assert sorted(path.name for path in (tmp_path / "run/checkpoints/grpo").iterdir()) == ["2", "4"]
    assert len(lines(tmp_path, "times.jsonl")) == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (HostOptions(coordinator_address="10.0.0.1:1"), "give all three"),
        (HostOptions(num_processes=2, process_id=1), "give all three"),
        (HostOptions(process_id=0), "give all three"),
        (HostOptions(False, "10.0.0.1", 2, 1), "an address and a port"),
        (HostOptions(False, "10.0.0.1:1", 2, 2), "from 0 to num_processes - 1"),
        (HostOptions(False, "10.0.0.1:1", 0, 0), "from 0 to num_processes - 1"),
    ],
)
def test_options_of_hosts_that_do_not_fit_together_are_refused(options, words):
    with pytest.raises(UsageError, match=words):
        start(options, print)
