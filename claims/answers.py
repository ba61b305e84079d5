"""Answers to the questions: measured by runs, and kept on disk with a value for each seed.

What the numbers decide is said by the rule of `verdicts` over all claims of a family at once: by `reproduce`, not by
one question.
"""

import hashlib
import platform
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from claims.bench import Bench, Runs, code_checksum, cores, make_setting
from claims.columns import PAIRED, Column, compare, learning_curve, read_column, start_of
from claims.figures import save_curves, save_rows
from claims.groups import SIGNAL, gradient_signal
from claims.numbers import result_of, start_row, with_nan
from claims.questions import QUESTIONS, Comparison, Question
from claims.verdicts import choose
from grpo_jax import statistics
from grpo_jax.errors import UsageError
from grpo_jax.runs.files import read_object, write_json


def measure(bench: Bench, question: Question) -> dict[str, Any]:
    """Returns the answer to a question as JSON has it, of runs that the bench makes or reads.

    Args:
      bench: of the runs.
      question: what is varied and compared.

    Returns:
      As `measure_runs` does.
    """
    if question.computed_by:
        module, _, function = question.computed_by.partition(":")
        rows, note = getattr(import_module(module), function)(bench)
        return measure_runs(question, {}, rows=rows, note=note)

    def signal(runs: Runs) -> np.ndarray:
        size = runs.setting.shape["group_size"]
        return np.array([gradient_signal(bench, seed, size) for seed in bench.seeds])

    runs = bench.runs({row: make_setting(**options) for row, options in question.settings.items()})
    return measure_runs(question, runs, signal=signal)


def measure_runs(
    question: Question,
    runs: Mapping[str, Runs],
    *,
    signal: Column | None = None,
    rows: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    note: str = "",
) -> dict[str, Any]:
    """Returns the answer to a question as JSON has it, of runs or of rows that were computed without any.

    Args:
      question: what is varied and compared.
      runs: by row.
      signal: the column `groups.SIGNAL`, where it can be computed.
      rows: row -> column -> a value a seed, where there are no runs.
      note: a sentence for the page.

    Returns:
      "rows": row -> column -> a value a seed; "primary": id of a claim -> its values and how many runs behind them
      diverged (their score is its floor, so that there is a value); "also": numbers without a verdict; "drawn":
      columns of the figure; "curves": row -> score in each part of a run, `[seeds, parts]`; "note".
    """
    cases = _cases(question, runs) if runs else {}

    def read(row: str, column: str) -> np.ndarray:
        if row in question.means:
            return np.mean([read(it, column) for it in question.means[row]], axis=0)
        if not cases:
            return np.asarray(rows[row][column])
        return signal(cases[row]) if signal and column == SIGNAL else read_column(column, cases[row])

    def values(it: Comparison) -> list[float]:
        paired = PAIRED.get(str(it.column))
        return (paired(*(cases[row] for row in it.rows)) if paired else compare(it, read)).tolist()

    trained = cases.keys() - question.starts.keys()
    if question.choice:
        note = f"The rule chooses: {choose({row: read(row, question.columns[0]) for row in question.choice})}."
    return {
        "rows": rows
        or {row: {name: read(row, name).tolist() for name in question.columns} for row in (*cases, *question.means)},
        "primary": {
            claim.id: [values(claim), sum(cases[row].diverged for row in claim.rows if row in trained)]
            for claim in question.claims
        },
        "also": [
            {"source": it.source, "words": it.words, "measure": it.measure, "values": values(it)}
            for it in question.also
        ],
        "drawn": list(question.drawn),
        "curves": {row: learning_curve(cases[row]) for row in question.curves},
        "note": note,
    }


def _cases(question: Question, runs: Mapping[str, Runs]) -> dict[str, Runs]:
    """Returns runs by row; each start stands before the rows that it is the start of."""
    cases = dict[str, Runs]()
    for start, setting in question.starts.items():
        cases[start] = start_of(runs[setting])
        cases |= {row: it for row, it in runs.items() if start_row(row, question.starts) == start}
    return cases


# ---- on disk


def answer(bench: Bench, name: str) -> dict[str, Any]:
    """Measures, and leaves NAME.json and its figures in the folder of the preset.

    Raises:
      UsageError: a claim has not one value for each seed.
    """
    started, file = time.perf_counter(), _file(bench, name)
    earlier: dict[str, Any] = read_answer(file) if file.exists() else {"seeds": (), "seconds": 0.0}
    measured = measure(bench, QUESTIONS[name])
    for key, (values, _) in measured["primary"].items():
        if len(values) != len(bench.seeds):
            raise UsageError(f"{key} of {name} has {len(values)} values: give one for each of {len(bench.seeds)} seeds")
    before = earlier["seconds"] if {*earlier["seeds"]} <= {*bench.seeds} else 0.0  # the time of other seeds is theirs
    measured |= {"seconds": before + time.perf_counter() - started, "seeds": list(bench.seeds)}
    measured |= {"machine": hardware(), "code": f"checksum {code_checksum()}", "made_by": question_checksum(name)}
    write_json(file, measured)
    known = read_answer(file)
    result = result_of(known)
    save_rows(file.with_suffix(".png"), result.rows, result.drawn)
    if result.curves:
        save_curves(file.with_name(f"{name}_curves.png"), result.curves, bench.size.steps)
    return known


def present_answer(bench: Bench, name: str) -> dict[str, Any] | None:
    """Returns the answer on disk, if the present code made it with at least the seeds of the bench."""
    file = _file(bench, name)
    if not file.exists() or read_object(file).get("made_by") != question_checksum(name):
        return None
    known = read_answer(file)
    return known if known["seeds"][: len(bench.seeds)] == bench.seeds else None


def read_answer(file: Path) -> dict[str, Any]:
    """Reads the answer that `answer` wrote.

    Raises:
      UsageError: the file is damaged.
    """
    known = with_nan(read_object(file))
    try:
        result_of(known), dict(known["primary"])
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UsageError(f"{file} is damaged: delete it, and the question is answered again") from None
    return known


def _file(bench: Bench, name: str) -> Path:
    return bench.run.path / f"{name}.json"


def question_checksum(name: str) -> str:
    """Returns a checksum of the question, and of the modules that turn runs into numbers."""
    folder = Path(__file__).parent
    modules = ("answers", "annotators", "columns", "enumeration", "groups", "testbeds", "bench")
    files = [folder / "questions" / f"{name}.toml", *(folder / f"{module}.py" for module in modules)]
    files.append(Path(statistics.__file__))  # pass@k, and errors of calibration
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def hardware() -> str:
    """Returns what computes, without names of machines."""
    if jax.default_backend() != "cpu":
        return f"{jax.device_count()} × {jax.devices()[0].device_kind}, jax {jax.__version__}"
    return f"{cores()} {platform.machine()} cores, jax {jax.__version__}"
