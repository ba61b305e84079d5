"""Command line of an experiment, from its dataclass."""

import dataclasses
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

import tyro
from rich.console import Console

from grpo_jax.training.run import RunFolder


@dataclass(frozen=True)
class RunConfig:
    """Where a run is kept."""

    run_dir: Path
    """Folder of the run; a number is added if it holds one."""
    resume: bool = False
    """Continue the newest run in run_dir where it stopped."""


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
    if not config.resume:
        return dataclasses.replace(config, run_dir=_candidates(config.run_dir)[-1])
    existing = _candidates(config.run_dir)[:-1]
    if not existing:
        refuse(f"there is no run to resume at {config.run_dir}: leave out --resume, or name its --run-dir")
    saved = json.loads((existing[-1] / "config.json").read_text())
    default = config_class(**saved, run_dir=config.run_dir, resume=True)
    config = tyro.cli(config_class, prog=prog, args=args, description=description, default=default)
    changed = [field.name for field in dataclasses.fields(config) if _differ(config, default, field.name)]
    if changed:
        refuse(f"{', '.join(changed)} differ from the run in {existing[-1]}: leave them out, or start a new run")
    return dataclasses.replace(config, run_dir=existing[-1])


def main(config_class: type[Config], run: Callable[[Config], None], description: str | None) -> None:
    """Parses the command line and runs; a refusal (ValueError) is one sentence and no traceback.

    Args:
      config_class: as in `parse`.
      run: the experiment.
      description: its docstring.
    """
    config = parse(config_class, description)
    try:
        run(config)
    except (ValueError, FloatingPointError) as error:
        refuse(str(error))
    except KeyboardInterrupt:
        refuse(f"stopped; add --resume to continue the run in {config.run_dir}")


def open_run(config: RunConfig) -> RunFolder:
    """The run folder of parsed options."""
    values = dataclasses.asdict(config)
    del values["run_dir"], values["resume"]
    run = RunFolder(config.run_dir, values)
    run.console.print(f"run folder: {config.run_dir}")
    return run


def refuse(message: str) -> NoReturn:
    """Ends the program with one sentence."""
    Console(stderr=True).print(f"[red]error:[/] {message}")
    raise SystemExit(2)


def _differ(config: RunConfig, default: RunConfig, name: str) -> bool:
    return getattr(config, name) != getattr(default, name)


def _candidates(folder: Path) -> list[Path]:
    """folder, folder-2, folder-3 … up to the first that holds no run."""
    found = [folder]
    while (found[-1] / "config.json").exists():
        found.append(folder.with_name(f"{folder.name}-{len(found) + 1}"))
    return found
