"""Command line of an experiment, from its dataclass."""

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

import tyro
from rich.console import Console
from rich.markup import escape

from grpo_jax.errors import UsageError
from grpo_jax.runs.folder import RunFolder, fresh_folder, numbered_runs
from grpo_jax.runs.trackers import weights_and_biases


@dataclass(frozen=True)
class RunConfig:
    """Where a run is kept."""

    run_dir: Path
    """Folder of the run; a number is added if it holds one."""
    resume: bool = False
    """Continue the newest run in run_dir where it stopped."""
    wandb: str = ""
    """Project of Weights & Biases to log to as well; needs the package wandb. TensorBoard's files are there anyway."""


Config = TypeVar("Config", bound=RunConfig)


def parse(config_class: type[Config], description: str | None, args: list[str] | None = None) -> Config:
    """Reads the command line into a dataclass.

    With --resume the defaults are those of the run that is continued, so that no other
    option need be repeated; one that differs is refused.

    Args:
      config_class: a dataclass of options; its field docstrings become the help.
      description: the top of the help.
      args: in place of sys.argv.

    Returns:
      The options. `run_dir` is the folder of the run, which exists exactly when resuming.
    """
    prog = f"python -m experiments.{Path(sys.argv[0]).stem}"
    config = tyro.cli(config_class, prog=prog, args=args, description=description)
    folder = config.run_dir.expanduser()
    config = dataclasses.replace(config, run_dir=folder if folder.name else folder.absolute())
    if not config.resume:
        try:
            return dataclasses.replace(config, run_dir=fresh_folder(config.run_dir))
        except UsageError as error:
            refuse(str(error))
    runs = numbered_runs(config.run_dir)
    if not runs:
        refuse(f"there is no run to resume at {config.run_dir}: leave out --resume, or name its --run-dir")
    newest = runs[max(runs)]
    try:
        saved = json.loads((newest / "config.json").read_text())
        saved = {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
        default = config_class(**saved, run_dir=config.run_dir, resume=True)
    except (ValueError, TypeError) as error:
        refuse(f"{newest}/config.json is not of this experiment and version ({error}): start a new run")
    config = tyro.cli(config_class, prog=prog, args=args, description=description, default=default)
    return dataclasses.replace(config, run_dir=newest)


def main(config_class: type[Config], run: Callable[[Config], None], description: str | None) -> None:
    """Parses the command line and runs; a refusal (UsageError) is one sentence and no traceback.

    Args:
      config_class: as in `parse`.
      run: the experiment.
      description: its docstring.
    """
    config = parse(config_class, description)
    try:
        run(config)
    except (UsageError, FloatingPointError) as error:
        refuse(str(error))
    except KeyboardInterrupt:
        say_refusal(f"stopped; add --resume to continue the run in {config.run_dir}")
        sys.stdout.flush()
        # Not by an exception: a compilation that goes on in a thread would crash the interpreter on its way out.
        os._exit(128 + signal.SIGINT)


def open_run(config: RunConfig) -> RunFolder:
    """The run folder of parsed options.

    Raises:
      UsageError: the folder holds a run with other options.
    """
    values = dataclasses.asdict(config)
    del values["run_dir"], values["resume"]
    if not config.resume and (config.run_dir / "config.json").exists():
        raise UsageError(f"another run has just started in {config.run_dir}: try again, or name a --run-dir")
    run = RunFolder(config.run_dir, values)
    if config.wandb:
        run.trackers.append(weights_and_biases(config.wandb, config.run_dir, values))
    run.console.print(f"run folder: {config.run_dir}", markup=False, highlight=False, soft_wrap=True)
    return run


def refuse(message: str) -> NoReturn:
    """Ends the program with one sentence."""
    say_refusal(message)
    raise SystemExit(2)


def say_refusal(message: str) -> None:
    """One sentence on stderr."""
    Console(stderr=True).print(f"[red]error:[/] {escape(message)}", soft_wrap=True)
    sys.stderr.flush()
