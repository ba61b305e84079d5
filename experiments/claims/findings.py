"""The result of a question to the sources: a table over seeds, claims with their verdicts, and a figure.

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
from grpo_jax.commands.common import explain_control
from grpo_jax.errors import UsageError
from grpo_jax.runs import flags, terminal
from grpo_jax.runs.compilation import in_words, programs_so_far
from grpo_jax.runs.folder import write_json
from grpo_jax.statistics import Interval, interval_over_runs

SCORES = ("accuracy", "score", "gold")  # columns that rise where something is learned
UNLEARNED = "nothing learned"  # in place of a verdict
WHY_UNLEARNED = "no setting's score rose above its start by more than chance, so there is no verdict; take more steps."
QUESTIONS = "experiments.claims.questions"  # the package of their scripts


class Measured(NamedTuple):
    """The number of a `primary.Primary`."""

    values: Sequence[float] | np.ndarray  # one a seed, in the order of the seeds; differences, or logarithms of ratios
    diverged: int = 0  # runs behind them that diverged: their score is its floor, so that there is a value


class Also(NamedTuple):
    """What was measured besides: it has an interval and no verdict."""

    source: str  # which text, and where
    words: str  # its words and figures
    measure: str  # the number of ours
    values: Sequence[float] | np.ndarray  # one a seed


class Finding(NamedTuple):
    """The result of a question."""

    rows: Mapping[str, Mapping[str, Sequence[float]]]  # setting -> column -> a value a seed; START and COIN are there
    primary: Mapping[str, Measured]  # id of a `primary.Primary` -> its number
    also: Sequence[Also]
    drawn: Sequence[str]  # columns of the figure
    curves: Mapping[str, Sequence[Sequence[float]]] = {}  # setting -> [seeds, E], score at each evaluation; optional
    note: str = ""  # printed below the table


def verdict(claim: Claim) -> tuple[Interval, str]:
    """The mean over seeds with its 95% interval, and whether the claim holds.

    "agree": the whole interval is inside the range that the words allow. "disagree": all of it is outside. "undecided":
    neither, or a run has no such number. The bounds themselves are outside: a difference of exactly 0 is not above 0.
    """
    interval = interval_over_runs(claim.values)
    low, high = interval[1:] if len(claim.values) > 1 else (interval.mean,) * 2
    if claim.low < low and high < claim.high:
        return interval, "agree"
    return interval, "disagree" if high <= claim.low or low >= claim.high else "undecided"


def _score(finding: Finding) -> str | None:
    """The column of the score; None: the table is of no training."""
    return next((name for name in SCORES if name in finding.rows.get(START, {})), None)


def has_learned(finding: Finding) -> bool:
    """Whether the score of some setting rose above that of its start, with its whole interval over seeds.

    Where nothing did, differences between settings are noise, and no verdict follows from them. Tables without a score
    are of no training: what they compare is there from the start.
    """
    score = _score(finding)
    if score is None:
        return True
    starts = sorted((name for name in finding.rows if name.endswith(START)), key=len)  # also of a second testbed
    gains = []
    for name, row in finding.rows.items():
        start = [other for other in starts if name.startswith(other.removesuffix(START))][-1]
        if name not in starts and COIN not in name:
            gains.append(Claim("", "", "", np.subtract(row[score], finding.rows[start][score])))
    return any(verdict(gain)[1] == "agree" for gain in gains)


# ---- from the command line

Measure = Callable[[Bench], Finding]


def main(measure: Measure, description: str | None) -> None:
    """Answers one question: a table, its claims with verdicts, and a figure in the folder of runs."""
    config = tyro.cli(Config, prog=f"python -m {QUESTIONS}.{Path(sys.argv[0]).stem}", description=description)
    run_guarded(lambda: _main(measure, config, Path(sys.argv[0]).stem), config)


def run_guarded(act: Callable[[], None], config: Config) -> None:
    """Does something with all cores as devices; a refusal is one sentence."""
    jax.config.update("jax_num_cpu_devices", cores())
    if config.compilation_cache:
        flags.keep_programs()
    try:
        act()
    except (UsageError, FloatingPointError) as error:
        flags.refuse(str(error))
    except KeyboardInterrupt:
        flags.say_refusal("stopped; the same command continues")
        sys.stdout.flush()
        os._exit(128 + signal.SIGINT)


def _main(measure: Measure, config: Config, name: str) -> None:
    bench = Bench(config)
    with bench.run.waiting("starting") as bench.say:
        answered = answer(bench, name, measure)
    show(bench, answered.finding)
    bench.run.console.print(f"{in_words(programs_so_far())}, {answered.seconds:.0f} s")
    bench.run.console.print(f"to look at: {bench.run.path / name}.png", markup=False, highlight=False, soft_wrap=True)


class Answer(NamedTuple):
    """A question's result, as it is written to disk."""

    finding: Finding
    seconds: float  # that it took, over all calls of `answer`


def answer(bench: Bench, name: str, measure: Measure) -> Answer:
    """Measures, and leaves name.json and name.png in the folder of the preset."""
    started = time.perf_counter()
    finding = measure(bench)
    if len({claim.measure for claim in finding.claims}) < len(finding.claims):
        raise UsageError(f"two claims of {name} have the same measure: give each its own")
    save_figure(bench.run.path / f"{name}.png", finding)
    claims = [claim._asdict() | {"values": list(map(float, claim.values))} for claim in finding.claims]
    file = bench.run.path / f"{name}.json"
    seconds = time.perf_counter() - started + (read_answer(bench, name).seconds if file.exists() else 0.0)
    of_answer = {"claims": claims, "seconds": seconds, "made_by": question_checksum(name)}
    write_json(file, finding._asdict() | of_answer)
    return Answer(finding, seconds)


def is_answered(bench: Bench, name: str) -> bool:
    """Whether a question has an answer on disk, made by the present code."""
    file = bench.run.path / f"{name}.json"
    return file.exists() and json.loads(file.read_text()).get("made_by") == question_checksum(name)


def question_checksum(name: str) -> str:
    """A checksum of the script, and of the modules that turn runs into numbers and claims."""
    here = Path(__file__).parent
    files = [here / "questions" / f"{name}.py", here.parent / "common.py", *sorted(here.glob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files if file.exists())).hexdigest()[:16]


def read_answer(bench: Bench, name: str) -> Answer:
    """Reads the answer that `answer` wrote."""
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


def show(bench: Bench, finding: Finding) -> None:
    """The table and the verdicts of a finding."""
    run, (columns, rows), learned = bench.run, cells(finding), has_learned(finding)
    terminal.print_table(run, f"means ± half a 95% interval over {bench.of_what}", columns, rows)
    if _score(finding):  # else the coin's row is no run
        explain_control(run, rows, control=COIN)
    verdicts = {claim.measure: [claim.words, *claim_cells(claim, learned)] for claim in finding.claims}
    terminal.print_table(run, "what the sources say of it", ("", "measured", "allowed", "verdict"), verdicts)
    if not learned:
        run.console.print(f"{UNLEARNED}: {WHY_UNLEARNED}", soft_wrap=True)
    if finding.note:
        run.console.print(finding.note)


def cells(finding: Finding) -> tuple[list[str], dict[str, list[str]]]:
    """The columns of a finding, and its rows as text."""
    rows = {name: [number(interval_over_runs(values)) for values in row.values()] for name, row in finding.rows.items()}
    return list(next(iter(finding.rows.values()))), rows


def claim_cells(claim: Claim, learned: bool = True) -> tuple[str, str, str]:
    """Cells of a table: the interval of a claim, the range that its words allow, and the verdict, if there is one."""
    interval, word = verdict(claim)
    word = word if learned else UNLEARNED
    allowed = f"{claim.low:g} to {claim.high:g}"
    if math.isinf(claim.high):
        allowed = f"above {claim.low:g}"
    elif math.isinf(claim.low):
        allowed = f"below {claim.high:g}"
    return number(interval), allowed, word


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
            mean, low, high = interval_over_runs(finding.rows[name][column])
            axis.plot(mean, place, "o", color="black", markersize=5)
            if not math.isnan(low):
                axis.plot((low, high), (place, place), color="black", linewidth=1.2)
        left, right = axis.get_xlim()
        for control, style in ((START, ":"), (COIN, "--")):
            value = interval_over_runs(finding.rows[control][column]).mean if control in finding.rows else math.nan
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
