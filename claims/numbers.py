"""The numbers behind the pages, in one file: every seed's, and where they were computed.

`reproduce` writes numbers.json beside its pages and makes the pages of it, so that words, figures and the rule can
change without a run, and where the runs are gone. A file has "answers" with a value for each seed, from which the rule
decides; or, where these values are lost, "claims" with their verdicts and "questions" with means and intervals.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from claims.bench import Size
from claims.questions import BY_ID, CLAIMS, COIN, PAGES, QUESTIONS, RETESTS, START
from claims.verdicts import UNDECIDED, Decision, decide, decide_once, needed
from grpo_jax.errors import UsageError
from grpo_jax.runs.files import finite, read_object, write_text
from grpo_jax.statistics import Interval, interval_over_runs

SCORES = ("accuracy", "score", "gold")  # columns that rise where something is learned
OTHERS = QUESTIONS.keys() - PAGES["questions"]  # questions that `reproduce` does not ask
DIGITS = 7  # of a number in the file: what float32 has

Values = Mapping[str, Mapping[str, Sequence[float]]]  # row -> column -> a value a seed


class Besides(NamedTuple):
    """A number without a verdict."""

    source: str
    words: str
    measure: str
    interval: Interval


class Result(NamedTuple):
    """The numbers of a question on the pages: means with Student's 95% intervals over its seeds."""

    seeds: int
    steps: int  # of a run; 0: those of the file
    seconds: float  # that it took; NaN: not known
    machine: str  # that computed it, and its jax
    code: str  # that computed it
    learned: bool  # whether a score rose above its start
    rows: Mapping[str, Mapping[str, Interval]]
    values: Values  # of `rows`, a value a seed; empty: lost
    also: Sequence[Besides]
    drawn: Sequence[str]  # columns of the figure
    curves: Mapping[str, Sequence[Interval]]  # setting -> score in each part of a run; empty: none, or lost
    note: str


class Numbers(NamedTuple):
    """A file of numbers."""

    preset: str
    steps: int
    num_prompts: int
    source: str  # what a reader has to know of where it comes from; empty: as `reproduce` wrote it
    claims: Mapping[str, Decision]  # by id, all that are registered
    questions: Mapping[str, Result]
    checksum: str  # of all its numbers


def write_numbers(file: Path, preset: str, size: Size, folder: Path, names: Sequence[str]) -> None:
    """Collects answers into one file, rounded to seven digits.

    Args:
      file: to write.
      preset: of the runs.
      size: of the preset.
      folder: of the answers, NAME.json.
      names: of the questions.
    """
    known = {"preset": preset, "steps": size.steps, "num_prompts": size.num_prompts, "source": ""}
    others = read_object(file).get("answers", {}) if file.exists() else {}  # of other commands
    answers = {name: read_object(folder / f"{name}.json") for name in names}
    _write(file, known | {"answers": answers | {name: it for name, it in others.items() if name in OTHERS}})


def add_answer(file: Path, name: str, answer: Mapping[str, Any], *, more: bool = False) -> None:
    """Adds the answer to a question to a file of numbers.

    Args:
      file: of numbers.
      name: of the question.
      answer: as `answers.answer` returns it.
      more: whether its seeds are added to those of the file; else it replaces the file's answer.

    Raises:
      UsageError: the file has no values of seeds.
    """
    known = read_object(file)
    if "answers" not in known:
        raise UsageError(f"{file} has no values of seeds: name a file of numbers as `reproduce` writes it")
    if more and name in known["answers"]:
        answer = with_more_seeds(known["answers"][name], answer)
    _write(file, known | {"answers": known["answers"] | {name: answer}})


def check_addition(file: Path, names: Sequence[str], preset: str, seeds: Sequence[int]) -> None:
    """Refuses seeds that a file of numbers cannot take, before they are run.

    Args:
      file: of numbers.
      names: of the questions.
      preset: of the runs.
      seeds: to be added.

    Raises:
      UsageError: the file is of another preset, or has one of the seeds.
    """
    known = read_object(file)
    if known.get("preset") != preset:
        raise UsageError(f"{file} has runs of the preset {known.get('preset')}, not {preset}: name another --add-to")
    for name in names:
        if shared := {*seeds} & {*known.get("answers", {}).get(name, {}).get("seeds", ())}:
            raise UsageError(f"{file} has seed {min(shared)} of {name}: give another --seed")


def with_more_seeds(answer: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an answer with the seeds of another after its own.

    Args:
      answer: as `answers.answer` returns it.
      more: the same question, asked with other seeds.

    Raises:
      UsageError: they share seeds, or have other rows or columns.
    """
    if shared := set(answer["seeds"]) & set(more["seeds"]):
        raise UsageError(f"seed {min(shared)} is in both answers: give answers with other seeds")
    try:
        joined = {key: _join(answer[key], more[key]) for key in ("rows", "primary", "also", "curves", "seeds")}
    except ValueError as error:
        raise UsageError(f"the answers are to different questions: {error}") from None
    both = {key: " and ".join(dict.fromkeys((answer[key], more[key]))) for key in ("machine", "code")}
    return {**answer, **joined, **both, "seconds": answer["seconds"] + more["seconds"]}


def _join(first: Any, second: Any) -> Any:
    """Joins the lists of two objects with the same names; counts are added."""
    match first, second:
        case dict(), dict() if first.keys() == second.keys():
            return {key: _join(it, second[key]) for key, it in first.items()}
        case [list(), int()], [list(), int()]:  # values of a claim, and how many runs diverged
            return [first[0] + second[0], first[1] + second[1]]
        case [dict(), *_], [dict(), *_] if len(first) == len(second):
            return [_join(*pair) for pair in zip(first, second, strict=True)]
        case list(), list():
            return first + second
        case _ if first == second:
            return first
    raise ValueError(f"{first!r:.60} is not {second!r:.60}")


def _write(file: Path, known: Mapping[str, Any]) -> None:
    """Writes numbers with as many digits as they have."""
    text = json.dumps(finite(known))
    rounded = json.loads(text, parse_float=lambda x: float(f"{float(x):.{DIGITS}g}"))
    write_text(file, json.dumps(rounded, ensure_ascii=False, separators=(",", ":")) + "\n")


def read_numbers(file: Path) -> Numbers:
    """Reads the numbers that `write_numbers` wrote.

    Raises:
      UsageError: it is no such file.
    """
    known = read_object(file)
    try:
        return _numbers_of(known)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{file} is no file of numbers as `reproduce` writes it ({error!r})") from None


def _numbers_of(raw: Mapping[str, Any]) -> Numbers:
    known = with_nan(raw)
    if "answers" in known:
        claims = judge(known["answers"])
        counted = [[it[key] for key in ("rows", "primary", "also", "curves")] for it in raw["answers"].values()]
    else:
        claims = dict.fromkeys(BY_ID, UNDECIDED)
        claims |= {key: _decision_of(it) for key, it in known["claims"].items() if key in claims}
        counted = [raw["claims"], [[it[key] for key in ("rows", "also")] for it in raw["questions"].values()]]
    return Numbers(
        preset=known["preset"],
        steps=known["steps"],
        num_prompts=known["num_prompts"],
        source=known["source"],
        claims=claims,
        questions={name: result_of(it) for name, it in known.get("answers", known.get("questions")).items()},
        checksum=hashlib.sha256(repr(list(_values(counted))).encode()).hexdigest(),
    )


def judge(answers: Mapping[str, Mapping[str, Any]]) -> dict[str, Decision]:
    """Returns what the rule says of each claim. Where nothing learned, nothing was measured."""
    measured = {key: it for known in answers.values() for key, it in known["primary"].items()}
    learned = [known["primary"] for known in answers.values() if has_learned(known["rows"])]
    values = {key: of_claim for primary in learned for key, (of_claim, _) in primary.items()}
    decisions = dict[str, Decision]()
    for family in dict.fromkeys(claim.family for claim in CLAIMS):
        claims = [claim for claim in CLAIMS if claim.family == family]
        decisions |= decide(claims, values)
        for claim in claims:
            decision = decisions[claim.id]._replace(diverged=measured.get(claim.id, ([], 0))[1])
            if decision.seeds and decision.verdict == "undecided":
                decision = decision._replace(needed=needed(claim, values[claim.id], len(claims)))
            decisions[claim.id] = decision
    decided = {claim.id: decisions[claim.id] for claim in CLAIMS}
    for retests in RETESTS:
        decided |= decide_once(retests, values)
    return decided


def _decision_of(known: Mapping[str, Any]) -> Decision:
    return Decision(**(dict(known) | {"interval": Interval(*known["interval"])}))


def result_of(known: Mapping[str, Any]) -> Result:
    """Returns the result that was written as this object: with values of seeds, or with intervals."""
    has_values = isinstance(known["seeds"], list)
    read: Callable[[Any], Interval] = interval_over_runs if has_values else lambda it: Interval(*it)
    return Result(
        seeds=len(known["seeds"]) if has_values else known["seeds"],
        steps=known.get("steps", 0),
        seconds=math.nan if known["seconds"] is None else known["seconds"],
        machine=known["machine"],
        code=known["code"],
        learned=not has_values or has_learned(known["rows"]),
        rows={row: {column: read(it) for column, it in columns.items()} for row, columns in known["rows"].items()},
        values=known["rows"] if has_values else {},
        also=[
            Besides(it["source"], it["words"], it["measure"], read(it["values" if has_values else "interval"]))
            for it in known["also"]
        ],
        drawn=known["drawn"],
        curves=bands_of(known.get("curves", {})),
        note=known["note"],
    )


def _values(known: Any) -> Iterator[float | None]:
    """Yields all numbers in their order, without any words."""
    match known:
        case dict():
            yield from _values(list(known.values()))
        case list():
            for it in known:
                yield from _values(it)
        case int() | float() | None:
            yield known


# ---- values of seeds


def has_learned(rows: Values) -> bool:
    """Returns whether some setting's score rose above that of its start, with its whole interval over seeds.

    Where nothing did, differences between settings are noise, and no verdict follows from them. Tables without a score
    are of no training: what they compare is there from the start.
    """
    score = next((name for name in SCORES if name in rows.get(START, {})), None)
    if score is None:
        return True
    starts = [row for row in rows if row.endswith(START)]
    trained = [row for row in rows if row not in starts and COIN not in row]
    gains = [np.subtract(rows[row][score], rows[start_row(row, starts)][score]) for row in trained]
    return any(interval_over_runs(gain).low > 0 for gain in gains)


def start_row(row: str, starts: Sequence[str] | Mapping[str, str]) -> str:
    """Returns the start of a row: "words, no training" of "words, β 0", else "no training"."""
    return max((start for start in starts if row.startswith(start.removesuffix(START))), key=len)


def with_nan(known: Any) -> Any:
    """Returns an object of JSON with NaN for the nulls of its lists: JSON has neither NaN nor infinity."""
    if isinstance(known, dict):
        return {key: with_nan(it) for key, it in known.items()}
    return [math.nan if it is None else with_nan(it) for it in known] if isinstance(known, list) else known


def bands_of(curves: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, list[Interval]]:
    """Returns curves with a mean and its interval for each part of a run."""
    return {name: [interval_over_runs(part) for part in np.transpose(curve)] for name, curve in curves.items()}
