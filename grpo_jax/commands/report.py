"""Writes a run as a page that people can read: report.html, which opens from disk and uses no network.

It shows warnings, results, the curves that decide whether the run learned, all other metrics, and groups of completions
with rewards, advantages and the probabilities of tokens. It can be written while the run continues.

  grpo-jax report runs/train
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from grpo_jax.commands.flags import program, read_flags, refusing
from grpo_jax.report import write_report
from grpo_jax.runs.progress import RunConsole, say


@dataclass(frozen=True)
class Options:
    """The run to show."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of a run."""


def command() -> None:
    """Runs the command."""
    with refusing():
        page = write_report(read_flags(Options, prog=program(), description=__doc__).run)
        say(RunConsole(), f"report: {page}")
