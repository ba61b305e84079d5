"""How far a run is: a bar in a terminal, a line now and then in a file."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from grpo_jax.runs.compilation import before_programs, count_programs

# A line is due after both of these; a slow run does not keep silent for longer than the third.
_SECONDS = 30.0
_SHARE = 0.1  # of the steps
_LONGEST_SECONDS = 600.0

_COMPILING = "compiling or loading programs (may take minutes)"

Show = Callable[..., None]  # (step, words="")


class RunConsole(Console):
    """The output of a run. A closed pipe raises `BrokenPipeError`, where rich would exit without a word."""

    def on_broken_pipe(self) -> None:
        """Raises the error that rich handles."""
        raise


@contextmanager
def progress(console: Console, phase: str, total: int, completed: int = 0, *, seldom: bool = True) -> Iterator[Show]:
    """Shows progress; call what this yields with the step reached and a few words.

    Args:
      console: of the run. A bar, if it is a terminal or a notebook; else lines.
      phase: what is going on.
      total: steps.
      completed: of them, before.
      seldom: whether lines that come too fast are left out; the first and the last one stay.
    """
    if not _moves(console):
        if 0 < completed < total:
            _print(console, f"{phase}: continues after step {completed} of {total}")
        lines = _Lines(console, phase, total, completed, seldom)
        with before_programs(lines.compiling) if completed < total else nullcontext():
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
        task = bar.add_task(phase, total=total, completed=completed, words="")
        with before_programs(lambda: bar.update(task, words=_COMPILING, refresh=True)):
            yield lambda step, words="": bar.update(task, completed=step, words=words)


@contextmanager
def waiting(console: Console, words: str) -> Iterator[Callable[[str], None]]:
    """Words beside a spinner while something takes its time, or a line of them; call what this yields with others."""
    started = time.perf_counter()
    if not _moves(console):
        _print(console, words)
        yield lambda words: _print(console, f"{words}, {in_time(time.perf_counter() - started)}")
        return
    with console.status(words) as status:
        yield status.update


def in_time(seconds: float) -> str:
    """Seconds as people say them: "41 s", "13 min", "2.5 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class _Lines:
    """Progress as lines of text."""

    def __init__(self, console: Console, phase: str, total: int, completed: int, seldom: bool) -> None:
        self._console, self._phase, self._total, self._seldom = console, phase, total, seldom
        self._started = self._said = time.perf_counter()
        self._first: tuple[int, float] | None = None  # the first step shown, and when: from then on nothing compiles
        self._programs = count_programs()
        self._said_step = completed
        self._left_out: tuple[int, str] | None = None

    def compiling(self) -> None:
        _print(self._console, f"{self._phase}: {_COMPILING}")

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
        """The last line, if it was left out."""
        if self._left_out:
            self._say(*self._left_out)

    def _due(self, step: int, now: float) -> bool:
        waited, done = now - self._said, step - self._said_step
        often = waited >= _SECONDS and done >= _SHARE * self._total
        return not self._seldom or often or waited >= _LONGEST_SECONDS

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
    console.file.flush()  # of a pipe or a file, which would keep it for later
