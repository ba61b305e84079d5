"""Rules of resuming: a run continues with the options and inputs that it began with, and perhaps more steps."""

import glob
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_jax.data import digests
from grpo_jax.errors import UsageError
from grpo_jax.options import flattened
from grpo_jax.runs.files import read_object

# Options that a resumed run may change: its results do not depend on them.
FREE_OPTIONS = frozenset(
    {
        "devices",  # but for rounding
        "parallel",
        "fsdp",
        "tensor",
        "keep_checkpoints",
        "checkpoint_every",
        "save_every_minutes",
        "wandb",
        "compilation_cache",
        "stop_code",
        "engine_timeout",
        "engine_folder",
    }
)
ROUNDING_OPTIONS = {
    "devices": 1,
    "parallel": "auto",
    "fsdp": 1,
    "tensor": 1,
}  # options that change rounding, with defaults
OPTIONS_FILE, INPUTS_FILE = "config.json", "inputs.json"
_UNBEGUN = {"lock", f"{OPTIONS_FILE}.tmp"}  # what a run leaves that is killed before it has written its options


def read_inputs(folder: Path) -> dict[str, dict[str, str]]:
    """Returns what inputs.json of a run holds: part -> name of an input -> its digest, or an option's value as JSON."""
    file = folder / INPUTS_FILE
    return read_object(file, dict[str, dict[str, str]]) if file.exists() else {}


def check_inputs(folder: Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Refuses to go on with other inputs than those that the run in a folder began with.

    Raises:
      UsageError: they differ; the sentence names them.
    """
    if names := ", ".join(sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))):
        raise UsageError(
            f"not what they were when the run in {folder} began: {names}; put them back, or start a new run"
        )


def numbered_runs(folder: Path) -> dict[int, Path]:
    """Runs in folder (number 1), folder-2, folder-3 …"""
    runs = {1: folder} if (folder / "config.json").exists() else {}
    for path in folder.parent.glob(f"{glob.escape(folder.name)}-*/config.json"):
        number = path.parent.name.removeprefix(f"{folder.name}-")
        if number.isdecimal():
            runs[int(number)] = path.parent
    return runs


def fresh_folder(folder: Path) -> Path:
    """`folder`, or where it holds a run, folder-n with the next number.

    Raises:
      UsageError: it holds something else.
    """
    runs = numbered_runs(folder)
    if not runs and folder.exists() and (not folder.is_dir() or {file.name for file in folder.iterdir()} - _UNBEGUN):
        raise UsageError(f"{folder} exists and is no run: name another run_dir")
    return folder.with_name(f"{folder.name}-{max(runs) + 1}") if runs else folder


def differing_options(saved: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """Options that change what a run computes and are not the same in both."""
    saved, present = _shaping(flattened(saved)), _shaping(flattened(json.loads(json.dumps(config))))  # as in the file
    return sorted(name for name in saved.keys() | present.keys() if saved.get(name) != present.get(name))


def _shaping(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that change what a run computes: an engine may be at any address."""
    shaping = {name: value for name, value in options.items() if name not in FREE_OPTIONS}
    return shaping | {"engine": bool(options.get("engine"))}


def run_digest(run: Path, phase: str) -> str | None:
    """Returns the digest of the options and rows that a phase began with; None where the run has not noted them.

    Runs that compute the same have the same digest. A run that may be continued with more steps keeps its digest.

    Args:
      run: its folder.
      phase: of the run.
    """
    inputs = read_inputs(run)
    if (noted := noted_options(run, inputs)) is None:
        return None
    options = _shaping(noted) | {"steps": _shaped_by_steps(noted)}  # their number matters only where it shapes steps
    return digests.of_values(phase, dict(sorted(options.items())), inputs.get(phase))


def noted_options(run: Path, inputs: Mapping[str, Mapping[str, str]]) -> dict[str, Any] | None:
    """Returns the options in inputs.json by name; None: there are none, as in runs of earlier versions."""
    try:
        return (
            {name: json.loads(value) for name, value in inputs[OPTIONS_FILE].items()}
            if OPTIONS_FILE in inputs
            else None
        )
    except ValueError:
        raise UsageError(f"{run / INPUTS_FILE} is not as a run writes it: mend it, or start a new run") from None


def check_more_steps(saved: dict[str, Any], config: dict[str, Any]) -> None:
    """Refuses to continue a run with this number of steps, where its steps so far depended on the earlier number.

    Args:
      saved: options of the run so far, by name.
      config: those that it is to be continued with; they differ in `steps`.

    Raises:
      UsageError: one sentence that says what to do.
    """
    if config["steps"] < saved["steps"]:
        raise UsageError(f"the run is of {saved['steps']} steps: continue it with more, or leave out steps")
    if reason := _shaped_by_steps(saved):
        raise UsageError(f"{reason}: to go on, export the run and start a new one from it")


def _shaped_by_steps(options: Mapping[str, Any]) -> str:
    """Returns how the steps of a run depend on their number, in words; "" if they do not."""
    if options.get("decay", "none") != "none":
        return f"the learning rate of the run falls until step {options['steps']}"
    if options.get("max_rollouts", 1) > 1 or "rounds" in options:
        return f"the prompts of the run were chosen for {options['steps']} steps"
    return ""
