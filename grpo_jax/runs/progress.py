"""Shows the progress of a run, and counts and caches its compiled programs.

Progress is a bar in a terminal, and an occasional line in a file.
"""

import hashlib
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import filelock
import jax
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

# ---- compiled programs

CACHE_BYTES = 2 * 2**30  # the programs used least recently are deleted above this size
_LOCK_SECONDS = 10
# JAX records the first event for every program, even if it reads the program from the cache.
_REQUEST_EVENT, _READ_EVENT = "/jax/core/compile/backend_compile_duration", "/jax/compilation_cache/cache_hits"
_seen = {_REQUEST_EVENT: 0, _READ_EVENT: 0}  # events since this module was imported


def programs_so_far() -> tuple[int, int]:
    """Returns how many programs this process has compiled, and how many it has read from the cache instead."""
    return _seen[_REQUEST_EVENT] - _seen[_READ_EVENT], _seen[_READ_EVENT]


def _processor() -> str:
    """Returns a name that is the same for processors with the same instructions."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8").splitlines() if information.exists() else []
    described = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(described.encode()).hexdigest()[:8]}"


def use_cache(folder: Path | None = None) -> None:
    """Lets JAX keep compiled programs on disk, and read them at the next start.

    If JAX already has a cache folder (JAX_COMPILATION_CACHE_DIR), this changes nothing. If the folder cannot be written
    to, a note says so, and JAX compiles without a cache.

    Args:
      folder: The folder for the programs; None: one in the user's cache folder for each kind of processor. JAX's cache
        does not distinguish the processors that CPU programs are compiled for, and machines may share a home folder.
    """
    if jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        return
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute()
        folder = folder or base / "grpo_jax" / "jax" / _processor()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _delete_incomplete(folder)
    except (OSError, RuntimeError, NotImplementedError) as error:  # no home folder; no locks
        say_aside("note", f"compiled programs cannot be kept ({error}): set JAX_COMPILATION_CACHE_DIR")
        return
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

_SECONDS = 60.0  # the time between two lines
_COMPILING = "compiling or loading programs (may take minutes)"

Show = Callable[..., None]  # (step, words="")
T = TypeVar("T")


# Rows, rewards and templates may hold escape sequences, with which a terminal hides or forges lines.
_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class RunConsole(Console):
    """The console of a run. It shows control characters of texts as \\x1b and the like.

    A closed pipe raises `BrokenPipeError`; rich would exit without a message.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        """Converts a text to rich's own type, in which only rich writes control characters."""
        return super().render_str(text.translate(_VISIBLE), **options)

    def on_broken_pipe(self) -> None:
        """Raises the error that rich is handling."""
        raise


def say_aside(kind: str, message: str, colour: str = "yellow") -> None:
    """Prints a message to stderr, if anything reads it, after its kind, such as "note"."""
    with suppress(OSError):
        RunConsole(stderr=True).print(f"[{colour}]{kind}:[/] {escape(message)}", soft_wrap=True)


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
        if completed < total:
            say(console, f"{phase}: {_COMPILING}")
        yield _lines(console, phase, total)
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
        say(console, words)
    with console.status(words) if _moves(console) else nullcontext():
        yield


def watched(items: Iterable[T], console: Console, words: str, total: int) -> Iterator[T]:
    """Yields items, and says once a minute how many of them are done and how long the others will take.

    Args:
      items: The items, each of which takes time.
      console: The console to print to.
      words: The work, such as "evaluation".
      total: The number of items.
    """
    started = printed = time.perf_counter()
    for number, item in enumerate(items, 1):
        now = time.perf_counter()
        if now - printed >= _SECONDS and number < total:
            left = in_time((now - started) / number * (total - number))
            say(console, f"{words}: {number} of {total} parts, about {left} left")
            printed = now
        yield item


def in_time(seconds: float) -> str:
    """Formats seconds as "41 s", "13 min" or "2.5 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _lines(console: Console, phase: str, total: int) -> Show:
    """Returns a function that prints a line for the first step, for the last step, and now and then between them."""
    started = printed = time.perf_counter()
    first: tuple[int, float] | None = None  # the first step and its time; later steps do not compile

    def show(step: int, words: str = "") -> None:
        nonlocal first, printed
        now = time.perf_counter()
        if first is not None and step < total and now - printed < _SECONDS:
            return
        first = first or (step, now)
        parts = [f"step {step} of {total}", words, in_time(now - started)]
        if first[0] < step < total:
            parts.append(f"about {in_time((now - first[1]) / (step - first[0]) * (total - step))} left")
        say(console, f"{phase}: {', '.join(filter(None, parts))}")
        printed = now

    return show


def _moves(console: Console) -> bool:
    return console.is_terminal or console.is_jupyter


def say(console: Console, words: str) -> None:
    """Prints words as they are, in one line, at once."""
    console.print(words, markup=False, highlight=False, soft_wrap=True)
    console.file.flush()  # pipes and files are buffered
