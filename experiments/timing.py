"""Seconds of commands that run in processes of their own."""

import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

FILE = "seconds.jsonl"


class Times(NamedTuple):
    """Times since an arbitrary moment."""

    seconds: float
    cpu_seconds: float  # of processes that have ended

    def since(self, earlier: "Times") -> dict[str, float]:
        """Returns the differences to earlier times, by name."""
        return {name: round(now - getattr(earlier, name), 2) for name, now in self._asdict().items()}


def times_of_children() -> Times:
    """Returns the present times. CPU seconds include children of children that were waited for."""
    return Times(time.monotonic(), sum(os.times()[2:4]))


def run_timed(name: str, folder: Path, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command, and appends its name and times to the folder's seconds.jsonl.

    Args:
      name: The name in the file.
      folder: The folder of the file, which exists.
      command: The program and its arguments.
      options: Further arguments of `subprocess.run`.
    """
    began = times_of_children()
    done = subprocess.run(command, text=True, **options)
    with (folder / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"command": name} | times_of_children().since(began)) + "\n")
    return done
