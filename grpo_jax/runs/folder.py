"""A run on disk: configuration, metrics, times, rollouts, checkpoints.

The files of a resumed run equal those of an uninterrupted run. For this, a step's lines are written before the
checkpoint that covers it, resuming drops the lines of later steps, and wall times, which never repeat, have their own
file.

With several hosts only the first host writes and holds the lock. On every other host `RunFolder` writes and prints
nothing. All hosts read the same folder.
"""

import errno
import glob
import json
import os
import re
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from rich.console import Console
from rich.markup import escape

from grpo_jax import hosts
from grpo_jax.config import CriticConfig, SamplerConfig
from grpo_jax.data.types import hash_values
from grpo_jax.devices import peak_memory_mb
from grpo_jax.errors import UsageError
from grpo_jax.options import flattened, from_json, in_current_names, options_of
from grpo_jax.rl.beside import NO_JOURNAL, Journal
from grpo_jax.runs.checkpoint import Checkpoints
from grpo_jax.runs.files import (
    TEMPORARY,
    Tracker,
    each_line,
    finite,
    hold,
    read_lines,
    read_object,
    tensorboard,
    weights_and_biases,
    write_json,
    write_parts,
    write_text,
)
from grpo_jax.runs.journal import open_journal
from grpo_jax.runs.progress import RunConsole, Show, programs_so_far, progress, say, waiting

Options = TypeVar("Options")
_NUMBER_FILES = ("metrics.jsonl", "times.jsonl")
_PHASE_FILES = (*_NUMBER_FILES, "rollouts.jsonl")
WAIT_SHARES = "trainer_wait_share", "sampler_wait_share"  # in times.jsonl, if both work at the same time
LINE = {"phase": str, "step": int}  # the fields of each line in these files
# Auxiliary phases: the warm start and the control.
SIDE_PHASES = ("warm", "control")


def is_coin(phase: str) -> bool:
    """Returns whether a phase is a control with random rewards; its name may end in a seed."""
    return re.fullmatch(r"(control|coin)(_\d+)?", phase) is not None


class RunFolder:
    """The folder of a run: writes its files, and shows its progress.

    Attributes:
      path: The path of the folder.
      console: The console that messages are printed to.
      writes: True on the host that writes.
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
          path: The path of the folder.
          config: All options of the run, as values that JSON can hold, or functions, of which it holds the names.
          console: The console that messages are printed to; None: the terminal.

        Raises:
          UsageError: `path` holds a run with other options.
        """
        self.path, self.writes = path, hosts.is_first()
        self.console = console or RunConsole(quiet=not self.writes)
        self._warned: set[str] = set()
        # work -> its seconds since the last line, the number of its open blocks, and when this was computed
        self._work: dict[str, tuple[float, int, float]] = {}
        self._clock = threading.Lock()  # blocks of several threads may be open
        self._journal = NO_JOURNAL
        # Of the lines of a phase in a file, the number and the CRC-32
        self._lines = defaultdict[tuple[str, str], tuple[int, int]](lambda: (0, 0))
        self._started = self._logged = time.perf_counter()
        self.trackers: list[Tracker] = []
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
        if (path / "model").exists() and not (path / INPUTS_FILE).exists():
            self.warn_once("inputs", f"{INPUTS_FILE} is gone: changes of rows and model since the start go unnoticed")
        self.trackers.append(tensorboard(path / "tensorboard"))

    def _keep_options(self, config: dict[str, Any]) -> None:
        """Writes the options of a new run, or refuses to resume with other options."""
        config = _with_names(config)
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
        if differing:  # checkpoints are sealed with all other options of the file, which may be of an earlier version
            config = _with_steps(read_object(file), now["steps"])
        if differing or not file.exists():
            write_text(file, json.dumps(config, indent=2) + "\n")
        known = read_inputs(self.path).get(_MACHINE, machine())
        self._warn_of_devices(_rounding_options(began) | known, _rounding_options(now) | machine())

    def _warn_of_devices(self, began: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Warns about changed options, devices and versions that change rounding."""
        if differing := [name for name in now if began.get(name) != now[name]]:
            before, after = (" ".join(f"{name} {options.get(name)}" for name in differing) for options in (began, now))
            self.warn_once(
                "devices",
                f"the run began with {before} and goes on with {after}: sums are rounded in another order, so its "
                "numbers are no longer those of an uninterrupted run to the bit",
            )

    def keep_inputs(self, owner: str, inputs: Mapping[str, str]) -> None:
        """Records the inputs of a phase, or of a model, in inputs.json.

        Args:
          owner: The name of a phase, or a role such as "model" or "teacher".
          inputs: Description of an input -> its digest.

        Raises:
          UsageError: An input has changed since the run began, or differs between hosts; the sentence names it.
        """
        hosts.check_same(inputs)
        if not self.writes:
            return
        known = read_inputs(self.path)
        before = known.get(owner, dict(inputs))
        check_inputs(self.path, before, inputs)
        write_json(self.path / INPUTS_FILE, {_MACHINE: machine()} | known | {owner: dict(inputs)})

    # ---- lines

    def log(self, phase: str, step: int, values: dict[str, Any]) -> dict[str, Any]:
        """Writes a line of metrics.jsonl, with numbers that are the same in a rerun. Returns the line on all hosts."""
        self._append("metrics.jsonl", phase, step, values)
        return finite({"phase": phase, "step": step, **values})

    def amend(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Adds numbers to the line of a step in metrics.jsonl, which has been written already."""
        if not self.writes:
            return
        lines = self.lines()
        for line in lines:
            line |= finite(values) if (line["phase"], line["step"]) == (phase, step) else {}
        write_text(self.path / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))

    def log_times(
        self,
        phase: str,
        step: int,
        *,
        tokens: Mapping[str, int] | None = None,
        update_flops: float = 0.0,
        peak_flops: float | None = None,
        numbers: Mapping[str, float] | None = None,
    ) -> Mapping[str, float | None]:
        """Writes a line of times.jsonl: the seconds of each kind of work since the last line, and its throughput.

        Args:
          phase: The name of the phase.
          step: The step that was reached.
          tokens: Part -> the number of tokens that it processed.
          update_flops: The floating-point operations of the work "update"; 0: unknown.
          peak_flops: The peak FLOP/s of the devices, if known. `mfu` is the fraction of it that was achieved.
          numbers: Further numbers to log.

        Returns:
          The numbers of the line.
        """
        seconds, before, self._logged = self._pop_seconds(), self._logged, time.perf_counter()
        line = {"s": round(self._logged - self._started, 3), "step_s": round(self._logged - before, 4)}
        line |= {f"{work}_s": round(spent, 4) for work, spent in seconds.items()}
        if "wait" in seconds:
            shares = seconds["wait"] / line["step_s"], 1 - seconds.get("rollout", 0.0) / line["step_s"]
            line |= {name: round(max(share, 0.0), 4) for name, share in zip(WAIT_SHARES, shares, strict=True)}
        for work, count in (tokens or {}).items():
            line |= {f"{work}_tokens": count}
            line |= {f"{work}_tokens_per_s": round(count / seconds[work], 1)} if seconds.get(work) else {}
        if update_flops:
            done = update_flops / seconds["update"]
            line["update_tflops"] = float(f"{done / 1e12:.4g}")
            line |= {"mfu": float(f"{done / peak_flops:.4g}")} if peak_flops else {}
        compiled, read = programs_so_far()
        line |= {"peak_memory_mb": peak_memory_mb(), "compilations": compiled, "cache_reads": read}
        line |= numbers or {}
        self._append("times.jsonl", phase, step, line)
        return line

    def log_rollout(self, phase: str, step: int, groups: list[dict[str, Any]]) -> None:
        """Writes lines of rollouts.jsonl, one for each group."""
        for group in groups:
            self._append("rollouts.jsonl", phase, step, group)

    def rewind(self, phase: str, step: int, lines_before: Mapping[str, Any] = {}) -> None:
        """Drops the lines of a phase after a step, and a last line that a crash cut off.

        Args:
          phase: The phase that starts or resumes.
          step: The step that was reached; 0: all lines are dropped.
          lines_before: The number and CRC-32 of the lines that a file had at this step, or as in earlier versions only
            the number. If the remaining lines are others, the run warns.
        """
        if not self.writes:
            return
        for name in _PHASE_FILES:
            self._lines.pop((phase, name), None)
            if (self.path / name).exists():
                write_parts(
                    self.path / name, self._remaining(name, phase, step or -1)
                )  # a phase that starts logs step 0 again
            now, before = [*self._lines[phase, name]], lines_before.get(name, [])
            before = [before] if isinstance(before, int) else before
            if now[: len(before)] != before:
                words = f"{name} has lines of {phase} that the run did not write: its curves may be wrong"
                if now[0] < before[0]:
                    words = f"{name} has lost {before[0] - now[0]} lines of {phase}: its curves have gaps"
                self.warn_once(f"{name} of {phase}", words)
        numbers = [line for name in _NUMBER_FILES for line in self.lines(name) if line["phase"] == phase]
        for tracker in self.trackers:
            tracker.restart(phase, numbers)

    def _remaining(self, name: str, phase: str, step: int) -> Iterator[str]:
        """Yields the lines of a file that `rewind` leaves in it, and counts those of the phase."""
        for _, line in each_line(self.path / name, LINE):
            text = json.dumps(line)
            if line["phase"] == phase and line["step"] <= step:
                self._count(phase, name, text)
            if line["phase"] != phase or line["step"] <= step:
                yield text + "\n"

    def lines(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        """Reads the lines of a file of the run, which may not exist yet.

        Raises:
          UsageError: A line is not as a run writes it.
        """
        return read_lines(self.path / name, LINE if name in _PHASE_FILES else {})

    def _append(self, name: str, phase: str, step: int, values: Mapping[str, Any]) -> None:
        """Writes a line, and tells it to the trackers if it consists of numbers."""
        if not self.writes:
            return
        self._check_present()
        record = {"phase": phase, "step": step, **values}
        line = json.dumps(finite(record), allow_nan=False)
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self._count(phase, name, line)
        for tracker in self.trackers if name in _NUMBER_FILES else ():
            tracker.log(record)

    def _count(self, phase: str, name: str, line: str) -> None:
        count, checksum = self._lines[phase, name]
        self._lines[phase, name] = count + 1, zlib.crc32(line.encode(), checksum)

    def _check_present(self) -> None:
        if self.writes and not (self.path / OPTIONS_FILE).exists():
            raise OSError(errno.ESTALE, "it was removed, renamed or replaced during the run", str(self.path))

    @contextmanager
    def present(self) -> Iterator[None]:
        """Opens a block whose errors name the folder as the reason if it is no longer there."""
        try:
            yield
        except Exception:
            self._check_present()
            raise

    def _sync(self, phase: str) -> dict[str, list[int]]:
        """Writes the lines of a phase to the disk, and returns their number and CRC-32 by file."""
        for name in _PHASE_FILES if self.writes else ():
            if (self.path / name).exists():
                with (self.path / name).open("rb") as file:
                    os.fsync(file.fileno())
        self._journal.turn_page()
        return {name: [*self._lines[phase, name]] for name in _PHASE_FILES}

    # ---- checkpoints, times, messages

    def open_journal(self) -> Journal:
        """Returns the journal of the phase that begins or continues."""
        self._journal = open_journal(self.path / "journal")
        return self._journal

    def checkpoints(self, phase: str, *, keep: int, keep_best: bool = False) -> Checkpoints:
        """Returns the checkpoints of a phase; `keep` and `keep_best` are those of `Checkpoints`."""
        return Checkpoints(
            self.path / "checkpoints" / phase,
            keep=keep,
            keep_best=keep_best,
            run=partial(run_digest, self.path, phase),
            lines=partial(self._sync, phase),
            warn=partial(self.warn_once, f"checkpoints of {phase}"),
        )

    def remember(self, phase: str, compute: Callable[[], Any]) -> Any:
        """Returns a value of a phase that is computed once. A resumed run reads it.

        Args:
          phase: The name of the phase, whose inputs have been recorded.
          compute: Computes the value, of JSON and NumPy arrays. All hosts must call it.
        """
        file = self.path / "checkpoints" / f"{phase}.json"
        text = hosts.first_says("what the run remembers", self._remembered(file, phase) if self.writes else None)
        if text is None:
            text = json.dumps(compute(), default=lambda x: {"dtype": str(x.dtype), "values": x.tolist()})
            if self.writes:
                file.parent.mkdir(exist_ok=True)
                write_json(file, {"text": text, "digest": hash_values(text, run_digest(self.path, phase))})
        return json.loads(text, object_hook=lambda x: np.array(x["values"], x["dtype"]) if "dtype" in x else x)

    def _remembered(self, file: Path, phase: str) -> str | None:
        """Returns the text of a file of `remember`; None if there is none, or it does not verify."""
        with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            saved = json.loads(file.read_text(encoding="utf-8"))
            if saved["digest"] == hash_values(saved["text"], run_digest(self.path, phase)):
                return saved["text"]
        return None

    @contextmanager
    def timed(self, work: str) -> Iterator[None]:
        """Adds the seconds spent in the block to the time of `work`. Blocks that are open at once count once."""
        self._count_open(work, 1)
        try:
            with jax.profiler.TraceAnnotation(work):
                yield
        finally:
            self._count_open(work, -1)

    def _count_open(self, work: str, change: int) -> None:
        with self._clock:
            now = time.perf_counter()
            seconds, number, since = self._work.get(work, (0.0, 0, now))
            self._work[work] = seconds + (now - since if number else 0.0), number + change, now

    def _pop_seconds(self) -> dict[str, float]:
        """Returns the seconds of the works since the last call."""
        for work in tuple(self._work):
            self._count_open(work, 0)
        with self._clock:
            seconds = {work: spent for work, (spent, _, _) in self._work.items()}
            self._work = {work: (0.0, number, since) for work, (_, number, since) in self._work.items() if number}
        return seconds

    def progress(self, phase: str, total: int, completed: int = 0) -> AbstractContextManager[Show]:
        """Shows a progress bar, or prints lines without a terminal. Yields a function of the step and a few words."""
        return progress(self.console, phase, total, completed)

    def say(self, words: str) -> None:
        """Prints words as they are, in one line."""
        say(self.console, words)

    def waiting(self, words: str) -> AbstractContextManager[None]:
        """Shows a message while the block takes its time."""
        return waiting(self.console, words)

    def warn(self, warnings: Mapping[str, str]) -> None:
        """Prints and stores each of these warnings once, by name."""
        for name, message in warnings.items():
            self.warn_once(name, message)

    def warn_once(self, name: str, message: str) -> None:
        """Prints a warning the first time that it occurs, and stores it in warnings.jsonl.

        Args:
          name: The name of the warning. A process prints only the first message of each name.
          message: One sentence. The file contains it once.
        """
        if name in self._warned:
            return
        self._warned.add(name)
        message = message.encode(errors="replace").decode()  # lone surrogates cannot be printed or written
        if not self.writes:
            return
        self.console.print(f"[yellow]warning:[/] {escape(message)}", soft_wrap=True)
        known = self.lines("warnings.jsonl")
        if {"message": message} not in known:  # replace the file: `rewind` does not repair it
            text = "".join(json.dumps(line) + "\n" for line in [*known, {"message": message}])
            write_text(self.path / "warnings.jsonl", text)


# ---- resuming: a run continues with the options and inputs that it began with, and possibly more steps

# Options that a resumed run may change, because its results do not depend on them.
FREE_OPTIONS = {"keep_checkpoints", "keep_best", "checkpoint_every", "wandb", "compilation_cache", "stop_code"}
FREE_OPTIONS |= {"engine_dtype", "engine_timeout", "engine_folder"}
# Options that change only rounding, with their defaults.
ROUNDING_OPTIONS = {"devices": 1, "parallel": "auto", "fsdp": 1, "tensor": 1, **options_of(SamplerConfig())}
FREE_OPTIONS |= ROUNDING_OPTIONS.keys()
# Options that runs of earlier commits lack, with the values that they had in effect.
_ADDED_OPTIONS = {"support": "vocabulary", "support_size": 64, "constant": [], "optimizer": "adamw", "agent": ""}
_ADDED_OPTIONS |= options_of(CriticConfig())
OPTIONS_FILE, INPUTS_FILE = "config.json", "inputs.json"
_MACHINE = "machine"  # the entry of inputs.json that may change, with a warning
_UNBEGUN = ("lock", f"{OPTIONS_FILE}*{TEMPORARY}")  # left by a run that was killed before it had written its options


def machine() -> dict[str, str]:
    """Returns what changes rounding beside options: JAX, the kind of device, and on a CPU the number of devices."""
    device, number = jax.devices()[0], jax.device_count()
    return {"jax": jax.__version__, "device": f"{number} cpu" if device.platform == "cpu" else device.device_kind}


def _rounding_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that change only rounding, as a command line names them."""
    return {f"--{name}": options.get(name, default) for name, default in ROUNDING_OPTIONS.items()}


def read_inputs(folder: Path) -> dict[str, dict[str, str]]:
    """Reads inputs.json of a run: owner -> description of an input -> its digest."""
    file = folder / INPUTS_FILE
    return read_object(file, dict[str, dict[str, str]]) if file.exists() else {}


def check_inputs(folder: Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Checks that the inputs of a run are those that it began with.

    Raises:
      UsageError: One sentence that names the inputs that differ.
    """
    if names := ", ".join(sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))):
        raise UsageError(
            f"not what they were when the run in {folder} began: {names}; put them back, or start a new run"
        )


def numbered_runs(folder: Path) -> dict[int, Path]:
    """Returns the runs in folder (number 1), folder-2, folder-3 …, by number."""
    runs = {1: folder} if (folder / "config.json").exists() else {}
    for path in folder.parent.glob(f"{glob.escape(folder.name)}-*/config.json"):
        number = path.parent.name.removeprefix(f"{folder.name}-")
        if number.isdecimal():
            runs[int(number)] = path.parent
    return runs


def fresh_folder(folder: Path) -> Path:
    """Returns `folder`, or folder-n with the next number if `folder` or a numbered one holds a run.

    Raises:
      UsageError: `folder` holds other files, and no run.
    """
    runs = numbered_runs(folder)
    is_unbegun = folder.is_dir() and all(any(map(file.match, _UNBEGUN)) for file in folder.iterdir())
    if not runs and folder.exists() and not is_unbegun:
        raise UsageError(f"{folder} exists and is no run: name another run_dir")
    return folder.with_name(f"{folder.name}-{max(runs) + 1}") if runs else folder


def choose_folder(folder: Path, *, resume: bool) -> Path:
    """Returns the folder of the newest run in `folder` to resume, or else that of a new run, on all hosts.

    Raises:
      UsageError: There is no run to resume, or `folder` holds other files.
    """
    if not resume:
        return hosts.first_says("the run folder", fresh_folder(folder) if hosts.is_first() else folder)
    runs = hosts.first_says("the runs", numbered_runs(folder))
    if not runs:
        raise UsageError(f"there is no run to resume in {folder}: leave out resume, or name the run's run_dir")
    return runs[max(runs)]


def options_of_run(default: Options, folder: Path) -> Options:
    """Returns the options that a run began with.

    Args:
      default: The options that the run may lack, as a dataclass of its class.
      folder: The folder of the run.

    Raises:
      UsageError: Its config.json cannot be read, or one of its options does not fit.
    """
    file = folder / OPTIONS_FILE
    saved = read_object(file)
    try:
        return from_json(default, saved)
    except UsageError as error:
        raise UsageError(f"{file} is of another experiment or version ({error}): start a new run") from None


def open_folder(path: Path, config: dict[str, Any], *, wandb: str = "") -> RunFolder:
    """Opens the folder of a run on all hosts, prints its path, and logs to a project of Weights & Biases if named.

    Raises:
      UsageError: `path` holds a run with other options, options differ between hosts, or Weights & Biases refuses.
    """
    hosts.check_same(flattened(config))
    run = RunFolder(path, config)
    if wandb and run.writes:
        run.trackers.append(weights_and_biases(wandb, path, flattened(config)))
    run.say(f"run folder: {path}")
    return run


def differing_options(saved: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """Returns the options that change what a run computes and differ between the two configurations."""
    saved, present = _shaping(flattened(saved)), _shaping(flattened(json.loads(json.dumps(config))))  # as in the file
    saved = in_current_names(saved, present)
    saved = {name: value for name, value in _ADDED_OPTIONS.items() if name in present} | saved
    return sorted(name for name in saved.keys() | present.keys() if saved.get(name) != present.get(name))


def _with_steps(options: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Returns the content of a config.json with another number of steps, in whichever group it is."""
    inner = {name: _with_steps(value, steps) for name, value in options.items() if isinstance(value, Mapping)}
    return {**options, **inner} | ({"steps": steps} if "steps" in options else {})


def _with_names(value: Any) -> Any:
    """Returns options in which functions, and tuples of functions such as an optax transformation, are names."""
    if isinstance(value, Mapping):
        return {name: _with_names(part) for name, part in value.items()}
    function = value[0] if isinstance(value, tuple) and value else value
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{function.__module__}.{name}" if callable(function) else value


def _shaping(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that change what a run computes. The address of an engine does not matter."""
    shaping = {name: value for name, value in options.items() if name not in FREE_OPTIONS}
    return shaping | {"engine": bool(options.get("engine"))}


def run_digest(run: Path, phase: str) -> str | None:
    """Returns the digest of the options and inputs of a phase; None if the run has not recorded them.

    Runs that compute the same have the same digest. A run that may continue with more steps keeps its digest.

    Args:
      run: The folder of the run.
      phase: The name of the phase.
    """
    inputs, file = read_inputs(run).get(phase), run / OPTIONS_FILE
    if inputs is None or not file.exists():
        return None
    options = flattened(read_object(file))
    if {"task", "heldout_share"} <= options.keys():
        options["data"] = options.pop("task")  # the name when earlier versions sealed checkpoints
    shaping = _shaping(options) | {"steps": _shaped_by_steps(options)}  # ignore the number if steps do not depend on it
    return hash_values(phase, dict(sorted(shaping.items())), inputs)


def check_more_steps(saved: dict[str, Any], config: dict[str, Any]) -> None:
    """Checks that a run can continue with another number of steps.

    Args:
      saved: The options that the run began with, by name.
      config: The new options, which differ only in `steps`.

    Raises:
      UsageError: The new number is smaller, or the steps so far depended on the old number.
    """
    if config["steps"] < saved["steps"]:
        raise UsageError(f"the run is of {saved['steps']} steps: continue it with more, or leave out steps")
    if reason := _shaped_by_steps(saved):
        raise UsageError(f"{reason}: to go on, export the run and start a new one from it")


def _shaped_by_steps(options: Mapping[str, Any]) -> str:
    """Returns a sentence on how the run's steps depend on their total number; "" if they do not."""
    if options.get("decay", "none") != "none":
        return f"the learning rate of the run falls until step {options['steps']}"
    if options.get("max_rollouts", 1) > 1 or "rounds" in options:
        return f"the prompts of the run were chosen for {options['steps']} steps"
    return ""
