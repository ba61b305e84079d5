"""Measures everything that matters on an accelerator that is at hand only for a few minutes.

The steps run one after the other, the most valuable first. A step starts only if the time that is left is enough for
it, so a short session ends with the most valuable numbers. The first step compares settings, and writes each line as
soon as it is known. The output of each step is in a file, and the table of the
steps and their seconds, with those of the commands that they run, is written after each of them. Without a model only
the benchmarks with random weights run. A rehearsal runs the same commands in small on a CPU, with any small model.

  python -m experiments.benchmarks.session --minutes 13 --model DIR --data DIR
  python -m experiments.benchmarks.session --rehearse --model DIR --data DIR
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tyro
from rich.console import Console
from rich.table import Table

from experiments import timing

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Config:
    """Options of the session."""

    minutes: float = 13.0
    """Minutes that the accelerator is at hand."""
    model: str = ""
    """Folder of a pretrained model for GSM8K; empty: leave GSM8K out."""
    data: str = ""
    """Folder with GSM8K's train.jsonl and test.jsonl."""
    rehearse: bool = False
    """Run each command in small, on a CPU: a tiny shape, two iterations, few rows."""
    out: Path = Path("runs/session")
    """Folder for the output of each step and the table."""


Row = dict[str, Any]  # "step" and "result" of a step, or "command"; "seconds" and "cpu_seconds"


class Step(NamedTuple):
    """One command, and the minutes that it takes at most."""

    name: str
    minutes: float
    args: tuple[str, ...]  # of Python, without --out


def steps_of(config: Config) -> Iterator[Step]:
    """Yields the steps, the most valuable first."""
    small = ("--steps", "2", "--dtype", "float32") if config.rehearse else ("--steps", "4")
    first, *others = ["tiny"] if config.rehearse else ["qwen2.5-0.5b", "qwen3-0.6b", "qwen2.5-1.5b"]

    def benchmark(shape: str) -> Step:
        return Step(f"accelerator {shape}", 3, ("-m", "experiments.benchmarks.accelerator", shape, *small))

    settings = "-m", "experiments.benchmarks.settings", *["--rehearse"] * config.rehearse
    yield Step("settings", 5, settings)
    yield benchmark(first)
    if config.model:
        task = ("--task", "gsm8k", "--model", config.model, "--data", config.data)
        yield Step("gsm8k", 10, ("-m", "experiments.real", *task, *["--small"] * config.rehearse))
    yield from map(benchmark, others)


def main(config: Config) -> None:
    """Runs the steps that fit, and writes the table."""
    config.out.mkdir(parents=True, exist_ok=True)
    ends, rows = time.monotonic() + 60 * config.minutes, list[Row]()
    for step in steps_of(config):
        rows += run(step, ends - time.monotonic(), config.out / step.name.replace(" ", "-"))
        (config.out / "steps.json").write_text(json.dumps(rows, indent=1) + "\n")
        print(rows[-1], flush=True)
    show(rows)


def run(step: Step, seconds: float, out: Path) -> list[Row]:
    """Runs a step unless it needs more than the seconds that are left. One that takes longer is killed at their end.

    Args:
      step: The step.
      seconds: The seconds that are left.
      out: The folder of its results. Its output goes to a file beside it, with the ending .log.

    Returns:
      A row for the step, and a row for each command that it ran.
    """
    if 60 * step.minutes > seconds:
        return [{"step": step.name, "result": "left out"}]
    began, log, before = timing.times_of_children(), out.with_name(f"{out.name}.log"), commands_in(out)
    with log.open("w") as file:
        command, environment = [sys.executable, *step.args, "--out", str(out)], os.environ | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
        try:
            result = "ended" if not process.wait(seconds) else f"failed: see {log}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
            process.wait()
            result = f"killed: see {log}"
    took = timing.times_of_children().since(began)
    if result.startswith("killed"):
        del took["cpu_seconds"]  # those of the processes that it started are lost, because nobody waited for them
    lines = [line for file, known in commands_in(out).items() for line in known[len(before.get(file, ())) :]]
    return [{"step": step.name, "result": result, **took}, *map(json.loads, lines)]


def commands_in(out: Path) -> dict[Path, list[str]]:
    """Returns the lines of commands in a folder of results, which may have those of earlier sessions, by file."""
    return {file: file.read_text().splitlines() for file in out.rglob(timing.FILE)}


def show(rows: list[Row]) -> None:
    """Prints the table of the steps and their commands."""
    table = Table("step", "command", "result", "s", "CPU s", box=None)
    for row in rows:
        table.add_row(*(str(row.get(name, "")) for name in ("step", "command", "result", "seconds", "cpu_seconds")))
    Console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m experiments.benchmarks.session", description=__doc__))
