"""Writes a run as a page that people can read: report.html, which opens from disk and asks nothing of the network.

It shows what the run warned of, how it ended, its curves, and groups of completions side by side, with rewards,
advantages and the probabilities of tokens.

  grpo-jax report runs/train
"""

import tyro
from rich.console import Console

from grpo_jax.errors import UsageError
from grpo_jax.runs import flags
from grpo_jax.runs.report import Options, write_report


def command() -> None:
    """The command line."""
    given = tyro.cli(Options, prog=flags.program(), description=__doc__)
    try:
        written = write_report(given.run, given.phase)
    except UsageError as error:
        flags.refuse(str(error))
    Console().print(f"report: {written}", markup=False, highlight=False, soft_wrap=True)
