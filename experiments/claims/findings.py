"""The result of a question to the sources: a table over seeds, the numbers of its claims, and a figure.

A script gives `main` a function of a `Bench` that returns a `Finding`. What its numbers decide is said by the rule of
`verdicts` over all claims of a family at once: by `reproduce`, not by one question.
"""

import hashlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.claims.ablation import COIN, START, Bench, Config, cores
from experiments.claims.figures import save_curves, save_rows
from experiments.claims.primary import BY_ID, PRIMARY, Scale
from experiments.claims.verdicts import interval
from grpo_jax.errors import UsageError
from grpo_jax.runs import flags, terminal
from grpo_jax.runs.compilation import in_words, programs_so_far
from grpo_jax.runs.folder import read_object, write_json
from grpo_jax.runs.terminal import explain_control
from grpo_jax.statistics import Interval, interval_over_runs

SCORES = ("accuracy", "score", "gold")  # columns that rise where something is learned
UNLEARNED = "nothing learned"  # in place of a verdict
WHY_UNLEARNED = "no setting's score rose above its start by more than chance, so there is no verdict; take more steps."
QUESTIONS = "experiments.claims.questions"  # the package of their scripts
OF_PAGES = (
    "primary",
    "verdicts",
    "simulated",
    "facts",
    "figures",
    "page",
    "results",
    "numbers",
    "replication",
    "earlier",
    "reproduce",
)  # no number depends on it


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
    curves: Mapping[str, Sequence[Sequence[float]]] = {}  # setting -> [seeds, parts], score in each part of a run
    note: str = ""  # printed below the table


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
            gains.append(interval_over_runs(np.subtract(row[score], finding.rows[start][score])))
    return any(gain.low > 0 for gain in gains)


# ---- from the command line

Measure = Callable[[Bench], Finding]


def main(measure: Measure, description: str | None) -> None:
    """Answers one question: a table, its claims with verdicts, and a figure in the folder of runs."""
    config = flags.read_flags(Config, prog=f"python -m {QUESTIONS}.{Path(sys.argv[0]).stem}", description=description)
    run_guarded(lambda: _main(measure, config, Path(sys.argv[0]).stem), config)


def run_guarded(act: Callable[[], None], config: Config) -> None:
    """Does something with all cores as devices, and products in float32; a refusal is one sentence."""
    jax.config.update("jax_num_cpu_devices", cores())
    # GPUs would round the factors of a product to TF32, and TPUs to bfloat16: then a machine would be an experiment.
    jax.config.update("jax_default_matmul_precision", "highest")
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
    seeds: Sequence[int]  # that its values are of, in their order


def answer(bench: Bench, name: str, measure: Measure) -> Answer:
    """Measures, and leaves name.json and its figures in the folder of the preset.

    Raises:
      UsageError: the script does not measure the claims that `primary` has of it, or not with each seed.
    """
    started = time.perf_counter()
    finding = measure(bench)
    check(finding, name, len(bench.seeds))
    save_rows(bench.run.path / f"{name}.png", intervals_of(finding.rows), finding.drawn)
    if finding.curves:
        save_curves(bench.run.path / f"{name}_curves.png", bands_of(finding.curves), bench.size.steps)
    file = bench.run.path / f"{name}.json"
    before = read_answer(bench, name).seconds if file.exists() else 0.0
    known = finding._asdict() | {
        "rows": {row: {key: list(map(float, x)) for key, x in of.items()} for row, of in finding.rows.items()},
        "curves": {key: np.asarray(of, np.float64).tolist() for key, of in finding.curves.items()},
        "primary": {key: [list(map(float, it.values)), int(it.diverged)] for key, it in finding.primary.items()},
        "also": [it._asdict() | {"values": list(map(float, it.values))} for it in finding.also],
        "seconds": before + time.perf_counter() - started,
        "seeds": list(bench.seeds),
        "made_by": question_checksum(name),
    }
    write_json(file, known)
    return read_answer(bench, name)


def check(finding: Finding, name: str, seeds: int) -> None:
    """Whether a finding has the claims that are registered, and a value of each for each seed.

    Raises:
      UsageError: it has not.
    """
    registered = {claim.id for claim in PRIMARY if claim.question == name}
    if registered != set(finding.primary):
        off = ", ".join(sorted(registered ^ set(finding.primary)))
        raise UsageError(f"{name} and experiments/claims/primary.py differ in {off}: measure what is registered")
    for key, measured in finding.primary.items():
        if len(measured.values) != seeds:
            raise UsageError(f"{key} of {name} has {len(measured.values)} values: give one for each of {seeds} seeds")


def is_answered(bench: Bench, name: str) -> bool:
    """Whether a question has an answer on disk, made by the present code with at least the seeds of the bench."""
    file = bench.run.path / f"{name}.json"
    known = read_object(file) if file.exists() else {}
    if known.get("made_by") != question_checksum(name):
        return False
    return read_answer(bench, name).seeds[: len(bench.seeds)] == list(bench.seeds)


def question_checksum(name: str) -> str:
    """A checksum of the script, and of the modules that turn runs into numbers."""
    here = Path(__file__).parent
    files = [here / "questions" / f"{name}.py", here.parent / "common.py", *sorted(here.glob("*.py"))]
    made = [file for file in files if file.exists() and file.stem not in OF_PAGES]
    return hashlib.sha256(b"".join(file.read_bytes() for file in made)).hexdigest()[:16]


def read_answer(bench: Bench, name: str) -> Answer:
    """Reads the answer that `answer` wrote.

    Raises:
      UsageError: the file is damaged.
    """
    file = bench.run.path / f"{name}.json"
    try:
        return answer_of(read_object(file))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UsageError(f"{file} is damaged: delete it, and the question is answered again") from None


def answer_of(known: Mapping[str, Any]) -> Answer:
    """The answer that was written as this object."""

    def numbers(values: Sequence[float | None]) -> list[float]:
        return [math.nan if value is None else value for value in values]  # JSON has neither NaN nor infinity

    rows = {row: {column: numbers(x) for column, x in columns.items()} for row, columns in known["rows"].items()}
    primary = {key: Measured(numbers(values), diverged) for key, (values, diverged) in known["primary"].items()}
    also = [Also(**it)._replace(values=numbers(it["values"])) for it in known["also"]]
    curves = {setting: [numbers(curve) for curve in of] for setting, of in known["curves"].items()}
    finding = Finding(rows, primary, also, known["drawn"], curves, known["note"])
    return Answer(finding, known["seconds"], list(known["seeds"]))


def show(bench: Bench, finding: Finding) -> None:
    """The table and the numbers of a finding."""
    run, (columns, rows) = bench.run, cells(intervals_of(finding.rows))
    terminal.print_table(run, f"means ± half a 95% interval over {bench.of_what}", columns, rows)
    if _score(finding):  # else the coin's row is no run
        explain_control(run, rows, control=COIN)
    of_claims = {
        BY_ID[key].measure: [BY_ID[key].words, with_interval(BY_ID[key].scale, interval(BY_ID[key], it.values))]
        for key, it in finding.primary.items()
    }
    of_claims |= {it.measure: [it.words, number(interval_over_runs(it.values))] for it in finding.also}
    terminal.print_table(run, "what the sources say of it", ("", "measured"), of_claims)
    if not has_learned(finding):
        run.console.print(f"{UNLEARNED}: {WHY_UNLEARNED}", soft_wrap=True)
    if finding.note:
        run.console.print(finding.note)


Rows = Mapping[str, Mapping[str, Interval]]  # setting -> column -> its mean with Student's 95% interval over seeds


def intervals_of(rows: Mapping[str, Mapping[str, Sequence[float]]]) -> Rows:
    """The rows of a finding, with a mean and its interval in place of a value for each seed."""
    return {row: {column: interval_over_runs(x) for column, x in of.items()} for row, of in rows.items()}


def bands_of(curves: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, list[Interval]]:
    """The curves of a finding, with a mean and its interval for each part of a run."""
    return {name: [interval_over_runs(part) for part in np.transpose(of)] for name, of in curves.items()}


def cells(rows: Rows) -> tuple[list[str], dict[str, list[str]]]:
    """The columns of a table, and its rows as text."""
    return list(next(iter(rows.values()))), {name: list(map(number, row.values())) for name, row in rows.items()}


def with_interval(scale: Scale, found: Interval) -> str:
    """The number of a claim with its bounds: "+0.012 [−0.003, +0.027]", or "× 1.03 [0.97, 1.10]" of a ratio."""
    if math.isnan(found.mean):
        return "–"
    mean, *bounds = (f"{math.exp(x):.3g}" if scale == "ratio" else f"{x:+z.3f}".replace("-", "−") for x in found)
    return ("× " if scale == "ratio" else "") + mean + ("" if math.isnan(found.low) else f" [{', '.join(bounds)}]")


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
