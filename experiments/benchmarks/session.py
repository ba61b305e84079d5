"""Measures everything that matters on an accelerator that is at hand only for a few minutes.

The steps run one after the other, the most valuable first. A step starts only if the time that is left is enough for
it, so a short session ends with the most valuable numbers. The output of each step is in a file, and the table of the
steps and their seconds is written after each of them. Without a model only the benchmarks with random weights run.

  python -m experiments.benchmarks.session --minutes 13 --model DIR --data DIR
  python -m experiments.benchmarks.session --rehearse
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
from typing import NamedTuple

import tyro
from rich.console import Console
from rich.table import Table

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
    """Run the benchmarks with a tiny shape and two iterations, on a CPU."""
    out: Path = Path("runs/session")
    """Folder for the output of each step and the table."""


class Step(NamedTuple):
    """One command, and the minutes that it takes at most."""

    name: str
    minutes: float
    args: tuple[str, ...]  # of Python


def steps_of(config: Config) -> Iterator[Step]:
    """Yields the steps, the most valuable first."""
    results = config.out / "accelerator"
    benchmark = ("-m", "experiments.benchmarks.accelerator", "--out", str(results))
    if config.rehearse:
        yield Step("accelerator tiny", 10, (*benchmark, "tiny", "--steps", "2", "--dtype", "float32"))
        return
    yield Step("accelerator qwen2.5-0.5b", 3, (*benchmark, "qwen2.5-0.5b", "--steps", "4"))
    if config.model:
        task = ("--task", "gsm8k", "--model", config.model, "--data", config.data)
        yield Step("gsm8k", 6, ("-m", "experiments.real", *task, "--out", str(config.out / "real")))
    for shape in ("qwen3-0.6b", "qwen2.5-1.5b"):
        yield Step(f"accelerator {shape}", 3, (*benchmark, shape, "--steps", "4"))


def main(config: Config) -> None:
    """Runs the steps that fit, and writes the table."""
    config.out.mkdir(parents=True, exist_ok=True)
    ends, rows = time.monotonic() + 60 * config.minutes, list[dict[str, str | float]]()
    for step in steps_of(config):
        rows.append({"step": step.name, **run(step, ends - time.monotonic(), config.out)})
        (config.out / "steps.json").write_text(json.dumps(rows, indent=1) + "\n")
        print(rows[-1], flush=True)
    show(rows)


def run(step: Step, seconds: float, out: Path) -> dict[str, str | float]:
    """Runs a step unless it needs more than the seconds that are left. One that takes longer is killed at their end."""
    if 60 * step.minutes > seconds:
        return {"result": "left out", "s": 0.0}
    began, log = time.monotonic(), out / f"{step.name.replace(' ', '-')}.log"
    with log.open("w") as file:
        command, environment = [sys.executable, *step.args], os.environ | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
        try:
            result = "ended" if not process.wait(seconds) else f"failed: see {log}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
            process.wait()
            result = f"killed: see {log}"
    return {"result": result, "s": round(time.monotonic() - began, 1)}


def show(rows: list[dict[str, str | float]]) -> None:
    """Prints the table of the steps."""
    table = Table("step", "result", "s", box=None)
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m experiments.benchmarks.session", description=__doc__))
