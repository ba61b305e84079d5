"""A run on disk: configuration, metrics, times, rollouts, checkpoints.

Rules that make a resumed run's files equal those of an uninterrupted one: a step's lines are
written before the checkpoint that covers it; resuming drops the lines of later steps; wall
times, which never repeat, have a file of their own.

With several hosts the first one writes, and holds the lock. For the others a run folder is quiet, and writes nothing.
All hosts read the same folder.
"""

import glob
import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.markup import escape

from grpo_jax import hosts
from grpo_jax.data.types import hash_values
from grpo_jax.devices import peak_memory_mb
from grpo_jax.errors import UsageError
from grpo_jax.options import flattened
from grpo_jax.runs.checkpoint import Checkpoints, saved_steps
from grpo_jax.runs.files import (
    Tracker,
    complete_lines,
    finite,
    hold,
    read_lines,
    read_object,
    tensorboard,
    write_json,
    write_text,
)
from grpo_jax.runs.progress import RunConsole, Show, count_programs, progress, waiting

_NUMBER_FILES = ("metrics.jsonl", "times.jsonl")
_PHASE_FILES = (*_NUMBER_FILES, "rollouts.jsonl")
_LINE = {"phase": str, "step": int}  # what each of their lines has
# The warm start and the control: no phases that a run is for.
SIDE_PHASES = ("warm", "control")


def is_coin(phase: str) -> bool:
    """Returns whether a phase is a control that is rewarded by a coin toss, perhaps with a seed in its name."""
    return re.fullmatch(r"(control|coin)(_\d+)?", phase) is not None


class RunFolder:
    """The folder of a run: writes its files, and shows its progress.

    Attributes:
      path: of the folder.
      console: where words go.
      writes: whether this is the host that writes.
    """

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
        self.path, self.writes = path, hosts.is_first()
        self.console = console or RunConsole(quiet=not self.writes)
        self._warned: set[str] = set()
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()
        self.trackers: list[Tracker] = []
        self.programs = count_programs()
        if self.writes:
            self._open(config)
        hosts.first_says("the run folder is open", None)

    def _open(self, config: dict[str, Any]) -> None:
        """Opens the folder on the host that writes."""
        path = self.path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = hold(path)
            self._keep_options(config)
        except OSError as error:
            raise UsageError(f"{path} cannot be written to ({error.strerror}): name another run_dir") from None
        self.trackers.append(tensorboard(path / "tensorboard"))

    def _keep_options(self, config: dict[str, Any]) -> None:
        """Writes the options of a new run; refuses to go on with others."""
        file, now = self.path / OPTIONS_FILE, flattened(json.loads(json.dumps(config)))  # as the file holds them
        began = flattened(read_object(file)) if file.exists() else now
        differing = differing_options(began, now)
        if differing == ["steps"]:
            check_more_steps(began, now)
        elif differing:
            raise UsageError(
                f"the run in {self.path} began with other options ({', '.join(differing)}): leave these out, or start "
                "a new run"
            )
        if differing or not file.exists():
            write_text(file, json.dumps(config, indent=2) + "\n")
        self._warn_of_devices(ROUNDING_OPTIONS | began, ROUNDING_OPTIONS | now)

    def _warn_of_devices(self, began: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Says which options differ by rounding."""
        if differing := [name for name in ROUNDING_OPTIONS if began[name] != now[name]]:
            before, after = (" ".join(f"--{name} {options[name]}" for name in differing) for options in (began, now))
            self.warn_once(
                "devices",
                f"the run began with {before} and goes on with {after}: sums are rounded in another order, so its "
                "numbers are no longer those of an uninterrupted run to the bit",
            )

    def keep_inputs(self, part: str, inputs: Mapping[str, str]) -> None:
        """Notes in inputs.json what a phase, or the model, was made of.

        Args:
          part: a phase, or "model".
          inputs: what it is, in words -> its digest.

        Raises:
          UsageError: the run is resumed, and something of it has changed, or another host has others; the sentence
            names it.
        """
        hosts.check_same(inputs)
        if not self.writes:
            return
        known = read_inputs(self.path)
        before = known.get(part, dict(inputs))
        check_inputs(self.path, before, inputs)
        write_json(self.path / INPUTS_FILE, known | {part: dict(inputs)})

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
        """Drops lines of `phase` after `step`, all of them for 0, and a last line cut off by a crash.

        Args:
          phase: that begins, or begins again.
          step: reached.
        """
        if not self.writes:
            return
        for name in _PHASE_FILES:
            file = self.path / name
            if file.exists():
                done = step or -1  # of a phase that begins, also the line before its first step is dropped
                lines = complete_lines(file, _LINE)
                remaining = [line for line, record in lines if record["phase"] != phase or record["step"] <= done]
                write_text(file, "".join(line + "\n" for line in remaining))
        numbers = [line for name in _NUMBER_FILES for line in self.lines(name) if line["phase"] == phase]
        for tracker in self.trackers:
            tracker.restart(phase, numbers)

    def lines(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        """The lines of a file of the run, which may not exist yet.

        Raises:
          UsageError: a line is not as a run writes it.
        """
        return read_lines(self.path / name, _LINE if name in _PHASE_FILES else {})

    def _log(self, name: str, record: dict[str, Any]) -> None:
        self._append(name, record)
        for tracker in self.trackers:
            tracker.log(record)

    def _append(self, name: str, record: dict[str, Any]) -> None:
        if not self.writes:
            return
        line = json.dumps(finite(record), allow_nan=False)
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    # ---- checkpoints, times, words

    def checkpoints(self, phase: str, *, keep: int, every: int = 0) -> Checkpoints:
        """The checkpoints of a phase; the others as in `Checkpoints`."""
        return Checkpoints(
            self.path / "checkpoints" / phase,
            keep=keep,
            every=every,
            run=partial(run_digest, self.path, phase),
            warn=partial(self.warn_once, f"checkpoints of {phase}"),
        )

    def announce_checkpoints(self, *phases: str) -> None:
        """Prints where a resumed run continues, before it evaluates its start again. A new run prints nothing."""
        for phase in phases:
            if steps := saved_steps(self.path / "checkpoints" / phase):
                self.console.print(
                    f"{phase}: the newest checkpoint is that of step {max(steps)}; the initial model is evaluated "
                    "again before the run continues",
                    markup=False,
                    highlight=False,
                    soft_wrap=True,
                )

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Adds the seconds inside to `part`."""
        start = time.perf_counter()
        with jax.profiler.TraceAnnotation(part):
            yield
        self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - start

    def progress(self, phase: str, total: int, completed: int = 0) -> AbstractContextManager[Show]:
        """A bar, or lines where there is no terminal; call what this yields with the step reached and a few words."""
        return progress(self.console, phase, total, completed)

    def waiting(self, words: str) -> AbstractContextManager[None]:
        """Words on what takes its time; call what this yields with others."""
        return waiting(self.console, words)

    def warn(self, warnings: Mapping[str, str]) -> None:
        """Prints and keeps each of these sentences once, by key."""
        for name, message in warnings.items():
            self.warn_once(name, message)

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
        if not self.writes:
            return
        self.console.print(f"[yellow]warning:[/] {escape(message)}")
        known = self.lines("warnings.jsonl")
        if {"message": message} not in known:  # the file is written whole: `rewind` mends none without phases
            text = "".join(json.dumps(line) + "\n" for line in [*known, {"message": message}])
            write_text(self.path / "warnings.jsonl", text)


# ---- resuming: a run continues with the options and inputs that it began with, and perhaps more steps

# Options that a resumed run may change: its results do not depend on them.
FREE_OPTIONS = frozenset(
    {
        "devices",  # but for rounding
        "parallel",
        "fsdp",
        "tensor",
        "keep_checkpoints",
        "checkpoint_every",
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
    """Returns what inputs.json of a run holds: part -> name of an input -> its digest."""
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
    """Returns the digest of the options and inputs of a phase; None where the run has not noted them.

    Runs that compute the same have the same digest. A run that may be continued with more steps keeps its digest.

    Args:
      run: its folder.
      phase: of the run.
    """
    inputs, file = read_inputs(run).get(phase), run / OPTIONS_FILE
    if inputs is None or not file.exists():
        return None
    options = flattened(read_object(file))
    shaping = _shaping(options) | {"steps": _shaped_by_steps(options)}  # the number matters only where it shapes them
    return hash_values(phase, dict(sorted(shaping.items())), inputs)


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
