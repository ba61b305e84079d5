"""Checks the lines of progress in a file and in a terminal."""

import io
import os
import re
import unicodedata
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grpo_jax.data.types import StepLog
from grpo_jax.runs import progress as module
from grpo_jax.runs.progress import RunConsole, in_time, progress, say, say_aside, waiting, watched
from grpo_jax.runs.runner import write_line


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when they are told to."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(module, "time", clock)
    return clock


def silent_console(**options):
    return Console(file=io.StringIO(), width=200, **options)


def test_control_characters_of_texts_are_made_visible(capsys):
    text = "\x1b[2J\x9b31m\x07\r\x7f\ttab\nline [bold]"
    console = RunConsole(file=io.StringIO(), force_terminal=True, color_system="standard", width=200)
    table = Table(text)
    table.add_row(text)
    say(console, text)
    console.print(f"[yellow]warning:[/] {escape(text)}")
    console.print(table)
    printed = console.file.getvalue()
    assert "\x1b[33mwarning:\x1b[0m" in printed  # the colours are rich's own
    left = re.sub("\x1b\\[[0-9;]*m", "", printed)
    assert left.count(r"\x1b[2J\x9b31m\x07\x0d\x7f") == 4
    assert not [x for x in left if x != "\n" and unicodedata.category(x) == "Cc" and x != "\t"]
    say_aside("note", text)
    assert "\x1b" not in capsys.readouterr().err


def lines_of(clock, total, seconds, **options):
    """The lines of a phase whose steps take so many seconds, but for 20 more of the first."""
    console = silent_console()
    with progress(console, "grpo", total, **options) as show:
        clock.now += 20
        for step in range(options.get("completed", 0) + 1, total + 1):
            clock.now += seconds
            show(step, f"reward {step}")
    return console.file.getvalue().splitlines()


def test_files_get_one_progress_line_a_minute(clock):
    lines = lines_of(clock, 100, 5)
    assert lines[0] == "grpo: compiling or loading programs (may take minutes)"
    assert lines[1] == "grpo: step 1 of 100, reward 1, 25 s"
    assert lines[2] == "grpo: step 13 of 100, reward 13, 85 s, about 7 min left"
    assert lines[-1] == "grpo: step 100 of 100, reward 100, 9 min"
    assert len(lines) == 11
    assert len(lines_of(clock, 1000, 0.1)) == 4  # the first two, one of a minute, and the last
    assert [line.split()[2] for line in lines_of(clock, 3, 310)[1:]] == ["1", "2", "3"]


def test_complete_phases_print_nothing(clock):
    assert lines_of(clock, 10, 1, completed=10) == []


def test_evaluations_print_remaining_time_once_a_minute(clock):
    def calls(number, seconds):
        for call in range(number):
            clock.now += seconds
            yield call

    console = silent_console()
    assert list(watched(calls(3, 15), console, "evaluation", 3)) == [0, 1, 2]
    assert not console.file.getvalue()
    assert len(list(watched(calls(10, 25), console, "evaluation", 10))) == 10
    assert console.file.getvalue().splitlines() == [
        "evaluation: 3 of 10 parts, about 3 min left",
        "evaluation: 6 of 10 parts, about 100 s left",
        "evaluation: 9 of 10 parts, about 25 s left",
    ]


def test_closed_pipes_raise_instead_of_exiting_silently():
    reader, writer = os.pipe()
    os.close(reader)
    # The file is flushed once more as it closes.
    with suppress(BrokenPipeError), open(writer, "w") as pipe, pytest.raises(BrokenPipeError):
        RunConsole(file=pipe).print("words")


def test_what_takes_its_time_is_a_line():
    console = silent_console()
    with waiting(console, "starting"):
        pass
    assert console.file.getvalue() == "starting\n"


def test_terminal_bar_mentions_compilation_until_first_step(clock):
    console = silent_console(force_terminal=True)
    with progress(console, "grpo", 4) as show:
        show(4, "reward 1")
    shown = console.file.getvalue()
    assert "4/4" in shown
    assert "step 4 of 4" not in shown
    assert shown.rfind("reward 1") > shown.rfind("compiling or loading programs") > -1  # the newest


def test_times_are_short():
    assert [in_time(s) for s in (3.2, 119, 780, 9000)] == ["3 s", "119 s", "13 min", "2.5 h"]


def test_evaluations_do_not_slow_sampling_down():
    times = {"rollout_tokens": 500, "step_s": 10.0, "evaluate_s": 9.5}
    run = Mock(log_times=Mock(return_value=times))
    assert write_line(run, "grpo", 1, StepLog({}, "reward 1", times={}), {}) == "reward 1, 1,000 tokens/s"
