"""The numbers behind the pages, in one file: every seed's, and where they were computed.

`reproduce` writes numbers.json beside its pages and makes the pages of it, so that words, figures and the rule can
change without a run, and where the runs are gone. A file has "answers" with a value for each seed, from which the rule
decides; or, where these values are lost, "claims" with their verdicts and "questions" with means and intervals.
"""

import hashlib
import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.claims.ablation import Bench, code_checksum, cores
from experiments.claims.findings import Answer, Rows, answer_of, bands_of, has_learned, intervals_of
from experiments.claims.primary import PRIMARY
from experiments.claims.verdicts import Decision, decide, needed
from grpo_jax.errors import UsageError
from grpo_jax.runs.folder import read_object, write_text
from grpo_jax.statistics import Interval, interval_over_runs

DIGITS = 7  # of a number in the file: what float32 has
UNKNOWN = Interval(math.nan, math.nan, math.nan)


class Judged(NamedTuple):
    """A claim with what the rule says of it."""

    decision: Decision
    diverged: int = 0  # runs behind it that diverged
    needed: int | None = None  # seeds that would decide it, where it is undecided; None: over 10,000, or not known


class Besides(NamedTuple):
    """What was measured without a verdict, as `findings.Also`."""

    source: str
    words: str
    measure: str
    interval: Interval


class Told(NamedTuple):
    """What the pages say of a question: means with Student's 95% intervals over its seeds."""

    seeds: int
    seconds: float  # that it took; NaN: not known
    machine: str  # that computed it, and its jax
    code: str  # that computed it
    learned: bool  # whether a score rose above its start
    rows: Rows
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
    claims: Mapping[str, Judged]  # by id, all that are registered
    questions: Mapping[str, Told]
    checksum: str  # of all its numbers


def decisions_of(answers: Mapping[str, Answer]) -> dict[str, Decision]:
    """What the rule says of each registered claim. Where nothing learned, nothing was measured."""
    values = {
        key: measured.values
        for answer in answers.values()
        if has_learned(answer.finding)
        for key, measured in answer.finding.primary.items()
    }
    families = dict.fromkeys(claim.family for claim in PRIMARY)
    return {
        key: decision
        for family in families
        for key, decision in decide([claim for claim in PRIMARY if claim.family == family], values).items()
    }


def write_numbers(file: Path, bench: Bench, preset: str, names: Sequence[str]) -> None:
    """Collects the answers in the bench's folder into one file, rounded to seven digits.

    Args:
      file: to write.
      bench: of the answers.
      preset: of the bench.
      names: of the questions, which are answered.
    """
    made = {"machine": hardware(), "code": f"checksum {code_checksum()}"}
    answers = {name: read_object(bench.run.path / f"{name}.json") | made for name in names}
    size = {"preset": preset, "steps": bench.size.steps, "num_prompts": bench.size.num_prompts}
    known = _rounded(size | {"source": "", "answers": answers})
    write_text(file, json.dumps(known, ensure_ascii=False, separators=(",", ":")) + "\n")


def read_numbers(file: Path) -> Numbers:
    """The numbers that `write_numbers` wrote.

    Raises:
      UsageError: it is no such file.
    """
    known = read_object(file)
    try:
        return _numbers_of(known)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{file} is no file of numbers as `reproduce` writes it ({error!r})") from None


def hardware() -> str:
    """What computes: without names of machines."""
    if jax.default_backend() != "cpu":
        return f"{jax.device_count()} × {jax.devices()[0].device_kind}, jax {jax.__version__}"
    return f"{cores()} {platform.machine()} cores, jax {jax.__version__}"


def _numbers_of(known: Mapping[str, Any]) -> Numbers:
    shared = {key: known[key] for key in ("preset", "steps", "num_prompts", "source")}
    if "answers" in known:
        answers = {name: answer_of(of) for name, of in known["answers"].items()}
        claims = _judged(answers)
        questions = {
            name: _told(answer, known["answers"][name]["machine"], known["answers"][name]["code"])
            for name, answer in answers.items()
        }
        counted = [[of[key] for key in ("rows", "primary", "also", "curves")] for of in known["answers"].values()]
    else:
        undecided = Judged(Decision("undecided", 0, UNKNOWN))
        claims = {claim.id: undecided for claim in PRIMARY}
        claims |= {key: _judged_of(of) for key, of in known["claims"].items() if key in claims}
        questions = {name: _told_of(of) for name, of in known["questions"].items()}
        counted = [known["claims"], [[of[key] for key in ("rows", "also")] for of in known["questions"].values()]]
    checksum = hashlib.sha256(repr(list(_values(counted))).encode()).hexdigest()
    return Numbers(**shared, claims=claims, questions=questions, checksum=checksum)


# ---- from a value for each seed


def _judged(answers: Mapping[str, Answer]) -> dict[str, Judged]:
    found, decisions = dict[str, Judged](), decisions_of(answers)
    measured = {key: it for answer in answers.values() for key, it in answer.finding.primary.items()}
    for claim in PRIMARY:
        decision, of_claim = decisions[claim.id], measured.get(claim.id)
        found[claim.id] = Judged(decision, of_claim.diverged if of_claim else 0)
        if of_claim and decision.seeds and decision.verdict == "undecided":
            family = sum(it.family == claim.family for it in PRIMARY)
            found[claim.id] = found[claim.id]._replace(needed=needed(claim, of_claim.values, family))
    return found


def _told(answer: Answer, machine: str, code: str) -> Told:
    finding = answer.finding
    return Told(
        seeds=len(answer.seeds),
        seconds=answer.seconds,
        machine=machine,
        code=code,
        learned=has_learned(finding),
        rows=intervals_of(finding.rows),
        also=[Besides(it.source, it.words, it.measure, interval_over_runs(it.values)) for it in finding.also],
        drawn=finding.drawn,
        curves=bands_of(finding.curves),
        note=finding.note,
    )


# ---- from means and intervals


def _judged_of(known: Mapping[str, Any]) -> Judged:
    decision = Decision(known["verdict"], known["seeds"], _interval_of(known["interval"]))
    return Judged(decision, known["diverged"], known["needed"])


def _told_of(known: Mapping[str, Any]) -> Told:
    rows = {row: {column: _interval_of(x) for column, x in of.items()} for row, of in known["rows"].items()}
    also = [Besides(**it)._replace(interval=_interval_of(it["interval"])) for it in known["also"]]
    seconds = math.nan if known["seconds"] is None else known["seconds"]
    return Told(**(dict(known) | {"rows": rows, "also": also, "seconds": seconds, "curves": {}, "learned": True}))


def _interval_of(known: Sequence[float | None]) -> Interval:
    return Interval(*(math.nan if x is None else x for x in known))


# ---- numbers in JSON


def _rounded(known: Any) -> Any:
    match known:
        case dict():
            return {key: _rounded(of) for key, of in known.items()}
        case list():
            return [_rounded(of) for of in known]
        case float():
            return float(f"{known:.{DIGITS}g}")
    return known


def _values(known: Any) -> Iterator[float | None]:
    """All numbers, in their order, without any words."""
    match known:
        case dict():
            yield from _values(list(known.values()))
        case list():
            for of in known:
                yield from _values(of)
        case int() | float() | None:
            yield known
