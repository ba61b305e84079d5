"""The questions to the sources, as data: one in each `questions/NAME.toml`, and words of the pages in `pages.toml`.

A question names settings of GRPO or PPO on a testbed, columns of its table, claims that its numbers decide, and what is
measured besides. `bench.make_setting` says what a setting may have, `columns.COLUMNS` which columns there are.

A claim's number is paired by seed: one setting minus another, or the logarithm of their ratio. `verdicts` decides.
Nothing is added, dropped or reworded once a claim has been looked at; the history of these files shows it. Labels and
headlines are words of the page alone.

"Accuracy" and "score" are means over sampled held-out completions at the end of a run; "on the way" is the mean score
of all completions that a run learns from, over its steps: the area under the curve of learning. Between seeds the end
varies twice as much as the way to it, so claims ask for the way. Those of `ppo_vs_grpo` and `ablate_group_size` keep
what they asked for, since ten seeds of them were looked at before that was known. Staleness asks for the end, since
what is old starts late. "Equal samples" is as many completions a step.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar

from grpo_jax.errors import UsageError

FOLDER = Path(__file__).parent / "questions"
START, COIN = "no training", "coin toss"  # the controls of every table
Scale = Literal["difference", "ratio"]
T = TypeVar("T")


@dataclass(frozen=True)
class Comparison:
    """A number of a question, one value a seed."""

    source: str  # which text, and where
    words: str  # its words and figures
    measure: str  # the number of ours: what minus what, or what over what
    column: str | Sequence[str]  # of `columns`; a list has one for each row
    rows: Sequence[str]  # one: its value; two: the first minus the second; four: a difference of two differences
    scale: Scale = "difference"  # "ratio": values are natural logarithms of ratios

    @property
    def cells(self) -> list[tuple[str, str]]:
        """The rows with their columns."""
        columns = [self.column] * len(self.rows) if isinstance(self.column, str) else self.column
        return list(zip(self.rows, columns, strict=True))


@dataclass(frozen=True, kw_only=True)
class Claim(Comparison):
    """A claim with the one number that decides it. Bounds of a ratio are ratios in its file, and logarithms here."""

    id: str
    question: str  # the name of the file that it is in
    family: str  # claims that are corrected for being many together: of the announcements, or of the field since
    label: str  # of ours, in a few words
    low: float = 0.0  # the words hold between low and high
    high: float = math.inf
    claimed: float = math.nan  # the source's own figure, where it has one
    why: str = ""  # why this number stands for these words


@dataclass(frozen=True)
class Question:
    """A question: what is varied, what is compared, and what the sources claim."""

    name: str
    title: str
    text: str
    drawn: Sequence[str]  # columns of the figure
    columns: Sequence[str] = ()  # of the table
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # row -> options of `bench.make_setting`
    starts: Mapping[str, str] = field(default_factory=dict)  # row of a start -> the setting whose first step it is
    means: Mapping[str, Sequence[str]] = field(default_factory=dict)  # row -> the rows that it is the mean of
    choice: Sequence[str] = ()  # rows that `verdicts.choose` takes one of, the simplest first
    curves: Sequence[str] = ()  # rows whose curves of learning are drawn
    computed_by: str = ""  # module:function of a bench that returns rows and a note, where nothing is trained
    module: str = "reproduce"  # of this package: its command answers the question
    claims: Sequence[Claim] = ()
    also: Sequence[Comparison] = ()  # what is measured besides: it has an interval and no verdict


@dataclass(frozen=True)
class Evidence:
    """A row below a question of a reader: a difference at the end of runs and on the way, and who is ahead."""

    says: str  # what minus what
    question: str  # the name of the file that it is in
    sides: Sequence[str]  # who is ahead where the difference is above 0, and below
    rows: Sequence[str] = ()  # two: the first minus the second, in the score at the end and in that on the way
    column: str = ""  # at the end, instead of the score
    measure: str = ""  # instead of rows, a measure of the question, of the end and without a verdict
    ids: Sequence[str] = ()  # claims whose verdicts answer, of the end and of the way
    model: str = "additions"


@dataclass(frozen=True)
class Headline:
    """A question of a reader, with the differences that answer it."""

    question: str
    evidence: Sequence[Evidence]
    note: Sequence[str] = ()  # sentences that a reader needs to take the answer for no more than it is


@dataclass(frozen=True)
class Fact:
    """A claim that is true or false by algebra, or a count. `tests/claims/test_facts.py` checks each."""

    id: str  # of its test
    source: str
    words: str
    holds: bool
    says: str  # what is so instead, or why


def read_question(file: Path) -> Question:
    """Reads a question from its file.

    Raises:
      UsageError: the file is no TOML, or it has an unknown key, lacks one, or compares rows that it does not name.
    """
    try:
        known = tomllib.loads(file.read_text(encoding="utf-8"))
        base = known.pop("base", {})
        known["settings"] = {row: base | options for row, options in known.get("settings", {}).items()}
        known["claims"] = [_claim(file.stem, it) for it in known.get("claims", ())]
        known["also"] = [Comparison(**it) for it in known.get("also", ())]
        question = Question(name=file.stem, **known)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{file} is no question ({error}): see docs/ablations.md") from None
    rows = {row for it in (*question.claims, *question.also) for row in it.rows} | {*question.curves, *question.choice}
    rows |= {row for rows in question.means.values() for row in rows}
    unknown = rows - question.settings.keys() - question.starts.keys() - question.means.keys()
    if unknown and not question.computed_by:
        raise UsageError(f"{file} compares {', '.join(sorted(unknown))}: name it in [settings]")
    return question


def _claim(question: str, known: Mapping[str, Any]) -> Claim:
    claim = Claim(question=question, **known)
    if claim.scale == "difference":
        return claim
    low = known.get("low", 1.0)
    low = math.log(low) if low else -math.inf
    return replace(claim, low=low, high=math.log(claim.high), claimed=math.log(claim.claimed))


def _entries(kind: type[T], known: Sequence[Mapping[str, Any]]) -> tuple[T, ...]:
    return tuple(kind(**it) for it in known)


PAGES = tomllib.loads(FOLDER.with_name("pages.toml").read_text(encoding="utf-8"))
FACTS = _entries(Fact, PAGES["facts"])
HEADLINES = tuple(
    Headline(**it | {"evidence": _entries(Evidence, it["evidence"])})  # rows of a table
    for it in PAGES["headlines"]
)
QUESTIONS = {file.stem: read_question(file) for file in sorted(FOLDER.glob("*.toml"))}
CLAIMS = tuple(claim for name in PAGES["questions"] for claim in QUESTIONS[name].claims)
RETESTS = tuple(QUESTIONS[name].claims for name in PAGES["retests"])  # each with a rule of its own
BY_ID = {claim.id: claim for claim in (*CLAIMS, *chain(*RETESTS))}
