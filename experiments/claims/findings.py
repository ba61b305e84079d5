"""What a question to the sources comes to: a table over seeds, claims with their verdicts, and a figure.

A script gives `main` a function of a `Bench` that returns a `Finding`.
"""

import hashlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import tyro

from experiments.claims.ablation import COIN, START, Bench, Config, cores
from grpo_jax.errors import UsageError
from grpo_jax.runs import flags, terminal
from grpo_jax.runs.compilation import in_words, programs_so_far
from grpo_jax.runs.folder import RunFolder, write_json
from grpo_jax.statistics import Interval, of_runs

QUESTIONS = "experiments.claims.questions"  # the package of their scripts


class Claim(NamedTuple):
    """What the sources say, as a number and the range that their words allow it."""

    source: str  # which text, and where
    words: str  # its words and figures
    measure: str  # the number of ours
    values: Sequence[float] | np.ndarray  # one a seed, or a single one where there is no chance in it
    low: float = 0.0
    high: float = math.inf


class Finding(NamedTuple):
    """What a question came to."""

    rows: Mapping[str, Mapping[str, Sequence[float]]]  # setting -> column -> a value a seed; START and COIN are there
    claims: Sequence[Claim]
    drawn: Sequence[str]  # columns of the figure
    note: str = ""  # what a reader has to know to read the table


def verdict(claim: Claim) -> tuple[Interval, str]:
    """The mean over seeds with its 95% interval, and whether it bears the claim out.

    "agree": the whole interval is within the range that the words allow. "disagree": none of it is. Else, or where a
    run has no such number, "undecided". The range is open: equal rows are not better than one another.
    """
    interval = of_runs(claim.values)
    low, high = interval[1:] if len(claim.values) > 1 else (interval.mean,) * 2
    if claim.low < low and high < claim.high:
        return interval, "agree"
    return interval, "disagree" if high <= claim.low or low >= claim.high else "undecided"


# ---- from the command line

Measure = Callable[[Bench], Finding]


def main(measure: Measure, description: str | None) -> None:
    """Answers one question: a table, its claims with verdicts, and a figure in the folder of runs."""
    config = tyro.cli(Config, prog=f"python -m {QUESTIONS}.{Path(sys.argv[0]).stem}", description=description)
    guarded(lambda: _main(measure, config, Path(sys.argv[0]).stem), config)


def guarded(act: Callable[[], None], config: Config) -> None:
    """Does something with all cores as devices; a refusal is one sentence."""
    jax.config.update("jax_num_cpu_devices", cores())
    if config.compilation_cache:
        flags.keep_programs()
    try:
        act()
    except (UsageError, FloatingPointError) as error:
        flags.refuse(str(error))
    except KeyboardInterrupt:
        flags.say_refusal("stopped; the same command goes on where it was")
        sys.stdout.flush()
        os._exit(128 + signal.SIGINT)


def _main(measure: Measure, config: Config, name: str) -> None:
    bench = Bench(config)
    with bench.run.console.status("starting") as status:
        bench.say = status.update
        answered = answer(bench, name, measure)
    show(bench.run, answered.finding)
    bench.run.console.print(f"{in_words(programs_so_far())}, {answered.seconds:.0f} s")
    bench.run.console.print(f"to look at: {bench.run.path / name}.png", markup=False, highlight=False, soft_wrap=True)


class Answer(NamedTuple):
    """What is kept of a question."""

    finding: Finding
    seconds: float  # that it took, each time that it was asked


def answer(bench: Bench, name: str, measure: Measure) -> Answer:
    """Measures, and leaves name.json and name.png in the folder of the preset."""
    started = time.perf_counter()
    finding = measure(bench)
    if len({claim.measure for claim in finding.claims}) < len(finding.claims):
        raise UsageError(f"{name}: two claims have one measure: let each say its own")
    save_figure(bench.run.path / f"{name}.png", finding)
    claims = [claim._asdict() | {"values": list(map(float, claim.values))} for claim in finding.claims]
    file = bench.run.path / f"{name}.json"
    seconds = time.perf_counter() - started + (kept(bench, name).seconds if file.exists() else 0.0)
    of_answer = {"claims": claims, "seconds": seconds, "made_by": question_checksum(name)}
    write_json(file, finding._asdict() | of_answer)
    return Answer(finding, seconds)


def is_kept(bench: Bench, name: str) -> bool:
    """Whether a question was answered, by the code that there is."""
    file = bench.run.path / f"{name}.json"
    return file.exists() and json.loads(file.read_text()).get("made_by") == question_checksum(name)


def question_checksum(name: str) -> str:
    """Of the script, and of what makes numbers and claims of runs."""
    here = Path(__file__).parent
    files = [here / "questions" / f"{name}.py", here.parent / "common.py", *sorted(here.glob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files if file.exists())).hexdigest()[:16]


def kept(bench: Bench, name: str) -> Answer:
    """What `answer` left."""
    known = json.loads((bench.run.path / f"{name}.json").read_text())

    def numbers(values: Sequence[float | None]) -> list[float]:
        return [math.nan if value is None else value for value in values]  # JSON has neither NaN nor infinity

    rows = {row: {column: numbers(x) for column, x in columns.items()} for row, columns in known["rows"].items()}
    claims = [
        Claim(**claim)._replace(
            values=numbers(claim["values"]),
            low=-math.inf if claim["low"] is None else claim["low"],
            high=math.inf if claim["high"] is None else claim["high"],
        )
        for claim in known["claims"]
    ]
    return Answer(Finding(rows, claims, known["drawn"], known["note"]), known["seconds"])


def show(run: RunFolder, finding: Finding) -> None:
    """The table and the verdicts of a finding."""
    columns, rows = cells(finding)
    terminal.print_table(run, "means over seeds ± half a 95% interval", columns, rows)
    judged = {claim.measure: [claim.words, *said(claim)] for claim in finding.claims}
    terminal.print_table(run, "what the sources say of it", ("", "measured", "allowed", "verdict"), judged)
    if finding.note:
        run.console.print(finding.note)


def cells(finding: Finding) -> tuple[list[str], dict[str, list[str]]]:
    """The columns of a finding, and its rows as text."""
    rows = {name: [number(of_runs(values)) for values in row.values()] for name, row in finding.rows.items()}
    return list(next(iter(finding.rows.values()))), rows


def said(claim: Claim) -> tuple[str, str, str]:
    """Of a claim: the interval, the range that its words allow, and the verdict, as text."""
    interval, judged = verdict(claim)
    allowed = f"{claim.low:g} to {claim.high:g}"
    if math.isinf(claim.high):
        allowed = f"above {claim.low:g}"
    elif math.isinf(claim.low):
        allowed = f"below {claim.high:g}"
    return number(interval), allowed, judged


def number(interval: Interval) -> str:
    """A mean and half its 95% interval, "0.953 ± 0.012"; a dash where there is nothing to say."""
    mean, low, high = interval
    if math.isnan(mean):
        return "–"
    half = 0.0 if math.isnan(low) else (high - low) / 2
    digits = 0 if abs(mean) >= 100 else 3
    while 1e-6 < half < 0.5 * 10.0**-digits:  # so that a spread is not printed as none
        digits += 1
    return f"{mean:z.{digits}f}" + ("" if math.isnan(low) else f" ± {half:.{digits}f}")


def save_figure(path: Path, finding: Finding) -> None:
    """Means with their intervals as dots and bars, a panel a column below one another: black on white, to be read on a
    phone. Lines through the panels are the controls."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    shown = [name for name in finding.rows if name not in (START, COIN)]
    height = sum(0.9 + 0.24 * len(shown) for _ in finding.drawn)
    figure, axes = plt.subplots(len(finding.drawn), 1, figsize=(4.5, height), layout="constrained", squeeze=False)
    for axis, column in zip(axes[:, 0], finding.drawn, strict=True):
        for place, name in enumerate(reversed(shown)):
            mean, low, high = of_runs(finding.rows[name][column])
            axis.plot(mean, place, "o", color="black", markersize=5)
            if not math.isnan(low):
                axis.plot((low, high), (place, place), color="black", linewidth=1.2)
        left, right = axis.get_xlim()
        for control, style in ((START, ":"), (COIN, "--")):
            value = of_runs(finding.rows[control][column]).mean if control in finding.rows else math.nan
            if left - 4 * (right - left) < value < right + 4 * (right - left):  # one further away would hide the rest
                axis.axvline(value, color="0.5", linestyle=style, linewidth=1, label=control, zorder=0)
            elif not math.isnan(value):
                axis.plot([], [], " ", label=f"{control}: {value:.3g}")
        axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.set_yticks(range(len(shown)), reversed(shown), fontsize=9)
        axis.set_ylim(-0.7, len(shown) - 0.3)
        axis.set_xlabel(column, fontsize=10)
        axis.grid(axis="x", alpha=0.3)
        axis.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)
    figure.savefig(path, dpi=160, metadata={"Software": None})
    plt.close(figure)
