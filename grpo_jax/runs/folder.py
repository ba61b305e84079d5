"""A run on disk: configuration, metrics, times, rollouts, checkpoints.

Rules that make a resumed run's files equal those of an uninterrupted one: a step's lines are
written before the checkpoint that covers it; resuming drops the lines of later steps; wall
times, which never repeat, have a file of their own.
"""

import glob
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from grpo_jax.config import flattened
from grpo_jax.errors import UsageError
from grpo_jax.runs.checkpoint import Checkpoints
from grpo_jax.runs.compilation import count_programs
from grpo_jax.runs.progress import Show, progress, waiting
from grpo_jax.runs.throughput import peak_memory_mb
from grpo_jax.runs.trackers import tensorboard

# Files whose lines carry "phase" and "step".
_NUMBER_FILES = ("metrics.jsonl", "times.jsonl")
_LINE_FILES = (*_NUMBER_FILES, "rollouts.jsonl")
# The warm start and the control: no phases that a run is for.
SIDE_PHASES = ("warm", "control")
# Options that a resumed run may change: its results do not depend on them.
_FREE_OPTIONS = frozenset(
    {"devices", "parallel", "fsdp", "tensor", "keep_checkpoints", "checkpoint_every", "wandb", "compilation_cache"}
)


class RunFolder:
    """The folder of a run: writes its files, and shows its progress."""

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        *,
        console: Console | None = None,
    ) -> None:
        """Creates `path` with config.json, or opens it to continue.

        Args:
          path: of the folder.
          config: every option, as JSON can hold it.
          console: where words go; None: the terminal.

        Raises:
          UsageError: `path` holds a run with other options.
        """
        self.path = path
        self.console = console or Console()
        self.trackers = [tensorboard(path / "tensorboard")]
        self._warned: set[str] = set()
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()
        path.mkdir(parents=True, exist_ok=True)
        try:  # to create the file: of two runs that start at once, one succeeds
            with (path / "config.json").open("x") as file:
                file.write(json.dumps(config, indent=2) + "\n")
        except FileExistsError:
            saved = json.loads((path / "config.json").read_text())
            differing = differing_options(saved, config)
            if differing == ["steps"]:
                check_more_steps(flattened(saved), flattened(config))
                write_json(path / "config.json", config)
            elif differing:
                raise UsageError(
                    f"{', '.join(differing)} differ from the options of the run in {path}: leave them out, or start a "
                    "new run"
                ) from None
        self.programs = count_programs()

    def keep_prompts(self, phase: str, **fingerprints: str) -> None:
        """Notes in task.json which prompts a phase is of.

        Raises:
          UsageError: the phase is resumed, and they are others.
        """
        file = self.path / "task.json"
        known = json.loads(file.read_text()) if file.exists() else {}
        if known.get(phase, fingerprints) != fingerprints:
            raise UsageError(f"the task's prompts have changed since the run in {self.path} began: start a new run")
        write_json(file, known | {phase: fingerprints})

    # ---- lines

    def log(self, phase: str, step: int, values: dict[str, Any]) -> None:
        """Writes a line of metrics.jsonl; only numbers that are the same in a rerun."""
        self._log("metrics.jsonl", {"phase": phase, "step": step, **values})

    def log_times(
        self,
        phase: str,
        step: int,
        *,
        tokens: Mapping[str, int] | None = None,
        update_flops: float = 0.0,
        peak_flops: float | None = None,
        numbers: Mapping[str, float] | None = None,
    ) -> None:
        """One line of times.jsonl: seconds of each part since the last line, and what was done in them.

        Args:
          phase: of the run.
          step: reached.
          tokens: part -> tokens that it worked on.
          update_flops: operations of the part "update", for how many a second.
          peak_flops: operations a second that the devices can do at most, if known; `mfu` is the share of it.
          numbers: others to log.
        """
        seconds = dict(self._seconds)
        line = {"s": round(time.perf_counter() - self._started, 3)}
        line |= {f"{part}_s": round(spent, 4) for part, spent in seconds.items()}
        for part, count in (tokens or {}).items():
            line |= {f"{part}_tokens": count, f"{part}_tokens_per_s": round(count / seconds[part], 1)}
        if update_flops:
            done = update_flops / seconds["update"]
            line["update_tflops"] = float(f"{done / 1e12:.4g}")
            line |= {"mfu": float(f"{done / peak_flops:.4g}")} if peak_flops else {}
        programs = self.programs()
        line |= {"peak_memory_mb": peak_memory_mb(), "compilations": programs.compiled, "cache_reads": programs.read}
        line |= numbers or {}
        self._log("times.jsonl", {"phase": phase, "step": step, **line})
        self._seconds.clear()

    def log_rollout(self, phase: str, step: int, groups: list[dict[str, Any]]) -> None:
        """Lines of rollouts.jsonl, one a group."""
        for group in groups:
            self._append("rollouts.jsonl", {"phase": phase, "step": step, **group})

    def rewind(self, phase: str, step: int) -> None:
        """Drops lines of `phase` after `step`, all of them for 0, and a last line cut off by a crash."""
        for name in _LINE_FILES:
            file = self.path / name
            if not file.exists():
                continue
            text = file.read_text()
            complete = text[: text.rfind("\n") + 1].splitlines()
            kept = [line for line in complete if not _is_later(json.loads(line), phase, step)]
            write_text(file, "".join(line + "\n" for line in kept))
        lines = [line for name in _NUMBER_FILES for line in self.lines(name) if line["phase"] == phase]
        for tracker in self.trackers:
            tracker.restart(phase, lines)

    def lines(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        """The lines of a file of the run, which may not exist yet."""
        file = self.path / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def _log(self, name: str, record: dict[str, Any]) -> None:
        self._append(name, record)
        for tracker in self.trackers:
            tracker.log(record)

    def _append(self, name: str, record: dict[str, Any]) -> None:
        with (self.path / name).open("a") as file:
            file.write(json.dumps(_finite(record), allow_nan=False) + "\n")

    # ---- checkpoints, times, words

    def checkpoints(self, phase: str, *, keep: int) -> Checkpoints:
        """The checkpoints of a phase."""
        return Checkpoints(self.path / "checkpoints" / phase, keep=keep)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Adds the seconds inside to `part`."""
        start = time.perf_counter()
        yield
        self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - start

    def progress(
        self, phase: str, total: int, completed: int = 0, *, seldom: bool = True
    ) -> AbstractContextManager[Show]:
        """A bar, or lines where there is no terminal; call what this yields with the step reached and a few words."""
        return progress(self.console, phase, total, completed, seldom=seldom)

    def waiting(self, words: str) -> AbstractContextManager[Callable[[str], None]]:
        """Words on what takes its time; call what this yields with others."""
        return waiting(self.console, words)

    def warn_once(self, name: str, message: str) -> None:
        """Prints a warning the first time that it occurs, and keeps it in warnings.jsonl.

        Args:
          name: of the warning: a process prints only the first message of each name.
          message: one sentence. It is written to the file once.
        """
        if name in self._warned:
            return
        self._warned.add(name)
        message = message.encode(errors="replace").decode()  # lone surrogates would end the run here
        self.console.print(f"[yellow]warning:[/] {escape(message)}")
        known = self.lines("warnings.jsonl")
        if {"message": message} not in known:  # the file is written whole: `rewind` mends none without phases
            text = "".join(json.dumps(line) + "\n" for line in [*known, {"message": message}])
            write_text(self.path / "warnings.jsonl", text)


def _finite(value: Any) -> Any:
    """The value with null for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def numbered_runs(folder: Path) -> dict[int, Path]:
    """Runs in folder (number 1), folder-2, folder-3 …"""
    found = {1: folder} if (folder / "config.json").exists() else {}
    for path in folder.parent.glob(f"{glob.escape(folder.name)}-*/config.json"):
        number = path.parent.name.removeprefix(f"{folder.name}-")
        if number.isdecimal():
            found[int(number)] = path.parent
    return found


def fresh_folder(folder: Path) -> Path:
    """`folder`, or where it holds a run, folder-n with the next number.

    Raises:
      UsageError: it holds something else.
    """
    runs = numbered_runs(folder)
    if not runs and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is no run: name another run_dir")
    return folder.with_name(f"{folder.name}-{max(runs) + 1}") if runs else folder


def differing_options(saved: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """Options that change what a run computes and are not the same in both."""
    saved, given = flattened(saved), flattened(json.loads(json.dumps(config)))  # as the file holds them
    names = saved.keys() | given.keys()
    return sorted(name for name in names - _FREE_OPTIONS if saved.get(name) != given.get(name))


def check_more_steps(saved: dict[str, Any], config: dict[str, Any]) -> None:
    """Refuses to continue a run with this number of steps, where its steps so far depended on the earlier number.

    Args:
      saved: options of the run so far, by name.
      config: those that it is to be continued with; they differ in `steps`.

    Raises:
      UsageError: one sentence that says what to do.
    """
    export = "export the run and start a new one from it"
    if config["steps"] < saved["steps"]:
        raise UsageError(f"the run is of {saved['steps']} steps: continue it with more, or leave out steps")
    if saved.get("decay", "none") != "none":
        raise UsageError(f"the learning rate of the run falls until step {saved['steps']}: to go on, {export}")
    if saved.get("max_rollouts", 1) > 1 or "rounds" in saved:
        raise UsageError(f"the prompts of the run were chosen for {saved['steps']} steps: to go on, {export}")


def _is_later(record: dict[str, Any], phase: str, step: int) -> bool:
    return record["phase"] == phase and (record["step"] > step or step == 0)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON so that a reader sees the old file or the new one, never a part."""
    write_text(path, json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a file at once, by renaming a complete one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
