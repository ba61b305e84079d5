"""The peers' environments, and processes on some of the cores."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
FOLDER = Path.home() / ".cache" / "grpo_jax" / "peers"
PACKAGES = {
    "trl": ("torch==2.13.0", "trl==1.16.0", "transformers==5.23.0", "datasets", "accelerate", "tokenizers"),
    "tunix": ("google-tunix==0.1.7", "jax==0.10.2"),
}


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
