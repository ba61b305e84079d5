"""The peers' environments, and processes on some of the cores."""

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.benchmarks.peers.recorder import Plan
from grpo_jax.runs.files import write_json

ROOT = Path(__file__).parents[3]
FOLDER = Path.home() / ".cache" / "grpo_jax" / "peers"
PACKAGES = {
    "trl": ("torch==2.13.0", "trl==1.16.0", "transformers==5.23.0", "datasets", "accelerate", "tokenizers"),
    "tunix": ("google-tunix==0.1.7", "jax==0.10.2"),
}
PLAN = "plan.json"


def environment(peer: str, folder: Path, pip_options: Sequence[str] = ()) -> str:
    """Returns the Python of a peer's environment, which is created if it does not exist.

    Args:
      peer: A key of PACKAGES.
      folder: The folder of all environments.
      pip_options: Further arguments of pip install.
    """
    python = folder / peer / "bin" / "python"
    if not (folder / peer / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder / peer)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", *pip_options, *PACKAGES[peer]], check=True)
        (folder / peer / "complete").touch()
    return str(python)


def run_on(cores: Sequence[int], command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command in the root of the repository, on these cores.

    Args:
      cores: The numbers of the cores.
      command: The program and its arguments.
      options: Further arguments of `subprocess.run`.

    Raises:
      subprocess.CalledProcessError: The command failed.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)  # the new process inherits it
    try:
        return subprocess.run(command, cwd=ROOT, text=True, check=True, **options)
    finally:
        os.sched_setaffinity(0, before)


def run_plan(plan: Plan, module: str, python: str, cores: Sequence[int], settings: Mapping[str, str]) -> None:
    """Runs the process of a plan. Its output goes to log.txt in the plan's folder, which is created.

    Args:
      plan: The plan.
      module: The name of the runner.
      python: The Python of its environment.
      cores: The numbers of the cores.
      settings: Variables of the environment to add.
    """
    folder = Path(plan.folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / PLAN, dataclasses.asdict(plan))
    with (folder / "log.txt").open("w") as log:
        command = [python, "-m", module, str(folder / PLAN), str(time.monotonic())]
        run_on(cores, command, env=os.environ | settings, stdout=log, stderr=subprocess.STDOUT)
