"""Shows the progress of a run, and counts and caches its compiled programs.

Progress is a bar in a terminal, and an occasional line in a file.
"""

import hashlib
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from grpo_jax.errors import UsageError

# ---- compiled programs

CACHE_BYTES = 2 * 2**30  # the programs used least recently are deleted above this size
_LOCK_SECONDS = 10
# JAX records the first event for every program, even if it reads the program from the cache.
_REQUEST_EVENT, _READ_EVENT = "/jax/core/compile/backend_compile_duration", "/jax/compilation_cache/cache_hits"
_seen = {_REQUEST_EVENT: 0, _READ_EVENT: 0}  # events since this module was imported


class Programs(NamedTuple):
    """The numbers of compiled programs and of programs read from the cache."""

    compiled: int
    read: int  # from the cache of an earlier start, instead of compiled


def programs_so_far() -> Programs:
    """Returns the numbers of programs of this process so far."""
    return Programs(_seen[_REQUEST_EVENT] - _seen[_READ_EVENT], _seen[_READ_EVENT])


def count_programs() -> Callable[[], Programs]:
    """Starts to count programs, and returns a function that returns the numbers since then."""
    before = programs_so_far()

    def since() -> Programs:
        now = programs_so_far()
        return Programs(now.compiled - before.compiled, now.read - before.read)

    return since


def in_words(programs: Programs) -> str:
    """Returns a text such as "3 programs compiled, 6 loaded from the cache"."""
    read = f", {programs.read} loaded from the cache" if programs.read else ""
    return f"{programs.compiled} programs compiled{read}"


def cache_folder() -> Path:
    """Returns the user's cache folder for compiled programs, which differs for each kind of processor.

    JAX's cache does not distinguish the processors that CPU programs are compiled for, and different machines may share
    a home folder.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base.absolute() / "grpo_jax" / "jax" / _processor()


def _processor() -> str:
    """Returns a name that is the same for processors with the same instructions."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8").splitlines() if information.exists() else []
    described = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(described.encode()).hexdigest()[:8]}"


def use_cache(folder: Path | None = None) -> None:
    """Lets JAX keep compiled programs on disk, and read them at the next start.

    If JAX already has a cache folder (JAX_COMPILATION_CACHE_DIR), this changes nothing.

    Args:
      folder: The folder for the programs; None: `cache_folder()`.

    Raises:
      UsageError: The folder cannot be written to. JAX then compiles without a cache.
    """
    if jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        return
    try:
        folder = folder or cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _delete_incomplete(folder)
    except (OSError, RuntimeError, NotImplementedError) as error:  # no home folder; no locks
        raise UsageError(f"compiled programs cannot be kept ({error}): set JAX_COMPILATION_CACHE_DIR") from None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # small programs too
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _delete_incomplete(folder: Path) -> None:
    """Deletes programs whose writer was killed before it recorded their time of use: JAX would always fail on them.

    Also raises an error if the folder cannot be written to.
    """
    with filelock.FileLock(folder / ".lockfile", timeout=_LOCK_SECONDS):  # the lock of JAX's own cache
        for program in folder.glob("*-cache"):
            if not program.with_name(f"{program.name.removesuffix('-cache')}-atime").exists():
                program.unlink()


def _count(event: str, *_: Any, **__: Any) -> None:
    if event in _seen:
        _seen[event] += 1


jax.monitoring.register_event_listener(_count)
jax.monitoring.register_event_duration_secs_listener(_count)


# ---- steps

# A line is due after this time and this share of the steps, or after the longest time.
_SECONDS = 30.0
_SHARE = 0.1
_LONGEST_SECONDS = 600.0

_COMPILING = "compiling or loading programs (may take minutes)"

Show = Callable[..., None]  # (step, words="")


class RunConsole(Console):
    """The console of a run. A closed pipe raises `BrokenPipeError`; rich would exit without a message."""

    def on_broken_pipe(self) -> None:
        """Raises the error that rich is handling."""
        raise


@contextmanager
def progress(console: Console, phase: str, total: int, completed: int = 0) -> Iterator[Show]:
    """Shows progress. Yields a function of the step reached and a few words, to be called after each step.

    Args:
      console: The console of the run: a terminal or notebook shows a bar, others print lines.
      phase: The name of the phase.
      total: The number of steps.
      completed: The number of steps that were completed before.
    """
    if not _moves(console):
        if 0 < completed < total:
            _print(console, f"{phase}: continues after step {completed} of {total}")
        if completed < total:
            _print(console, f"{phase}: {_COMPILING}")
        lines = _Lines(console, phase, total, completed)
        yield lines.show
        lines.end()
        return
    columns = (
        TextColumn("{task.description:<8}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[words]}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(phase, total=total, completed=completed, words=_COMPILING)
        yield lambda step, words="": bar.update(task, completed=step, words=words)


@contextmanager
def waiting(console: Console, words: str) -> Iterator[None]:
    """Shows a message with a spinner during the block, or prints the message without a terminal."""
    if not _moves(console):
        _print(console, words)
        yield
        return
    with console.status(words):
        yield


def in_time(seconds: float) -> str:
    """Formats seconds as "41 s", "13 min" or "2.5 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class _Lines:
    """Progress that is printed as lines of text."""

    def __init__(self, console: Console, phase: str, total: int, completed: int) -> None:
        self._console, self._phase, self._total = console, phase, total
        self._started = self._said = time.perf_counter()
        self._first: tuple[int, float] | None = None  # the first step and its time; later steps do not compile
        self._programs = count_programs()
        self._said_step = completed
        self._left_out: tuple[int, str] | None = None

    def show(self, step: int, words: str = "") -> None:
        now = time.perf_counter()
        if self._first is None:
            self._first = step, now
            self._say(step, words, ", with compilation" if self._programs().compiled else "")
        elif self._due(step, now):
            self._say(step, words)
        else:
            self._left_out = step, words

    def end(self) -> None:
        """Prints the last line, if it was left out."""
        if self._left_out:
            self._say(*self._left_out)

    def _due(self, step: int, now: float) -> bool:
        waited, done = now - self._said, step - self._said_step
        often = waited >= _SECONDS and done >= _SHARE * self._total
        return often or waited >= _LONGEST_SECONDS

    def _say(self, step: int, words: str, note: str = "") -> None:
        now = time.perf_counter()
        parts = [f"step {step} of {self._total}", words, in_time(now - self._started) + note]
        first_step, at = self._first or (step, now)
        if first_step < step < self._total:
            parts.append(f"about {in_time((now - at) / (step - first_step) * (self._total - step))} left")
        _print(self._console, f"{self._phase}: {', '.join(part for part in parts if part)}")
        self._said, self._said_step, self._left_out = now, step, None


def _moves(console: Console) -> bool:
    return console.is_terminal or console.is_jupyter


def _print(console: Console, words: str) -> None:
    console.print(words, markup=False, highlight=False, soft_wrap=True)
    console.file.flush()  # pipes and files are buffered
