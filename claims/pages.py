"""RESULTS.md and docs/results/*.md: what was measured, what the rule makes of it, and what is open.

The words of the pages are in `pages.toml`, their numbers in files that `numbers` reads.
"""

import math
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from string import Template

import numpy as np
from scipy import special

from claims import questions as asked
from claims.bench import SIZES
from claims.figures import save_curves, save_forest, save_rows
from claims.numbers import SCORES, Numbers, Result, read_numbers
from claims.questions import Claim, Evidence, Scale
from claims.verdicts import LOOKS, POWER, VERDICTS, Decision, detectable, standard_error
from grpo_jax.runs.files import write_text
from grpo_jax.statistics import Interval, interval_over_runs

UNLEARNED = "nothing learned"  # in place of a verdict
WHY_UNLEARNED = "no setting's score rose above its start by more than chance, so there is no verdict; take more steps."
MARKS = "¹²³⁴⁵⁶⁷⁸⁹"  # of the notes below the table
PLACES = ("at the end", "on the way")  # of a score
DIFFERS = (
    "Options, prompts and random keys are the same on both. The processor, the version of jax and the starts (the "
    "models before GRPO or PPO) differ. Each machine trained its own starts, and rounding makes them different, so "
    "seeds are not paired across them."
)
UNKNOWN = Interval(math.nan, math.nan, math.nan)
POSTS, NOTES = ("000", "001"), ("003",)  # sources without an author, and notes
NOT_MEASURED = "–"
AS_CLAIMED = ", as claimed"
# How the verdicts of two machines compare.
ONLY_FIRST, ONLY_SECOND = "decided only on the first machine", "decided only on the second machine"
DIFFERENT = "different verdicts"


def write_pages(files: Sequence[Path], out: Path) -> Path:
    """Writes all pages and figures, from files of numbers alone.

    Args:
      files: as `numbers.write_numbers` writes them. The first decides; others have the same claims on other machines,
        and are put beside it.
      out: the folder for RESULTS.md, and for docs/.

    Returns:
      The place of RESULTS.md.
    """
    (first, *others), texts = map(read_numbers, files), [file.read_text(encoding="utf-8") for file in files]
    folder = folder_of(out, first.preset)
    folder.mkdir(parents=True, exist_ok=True)
    for place, text in enumerate(texts):
        write_text(folder / _file_of(place), text)
    _draw(first, folder, files[0].parent)
    pages = {name: _question_page(name, first, folder) for name in first.questions}
    if others:
        pages["replication"] = _fill("replication", machines="\n\n".join(_again(first, other) for other in others))
    for name, text in pages.items():
        write_text(folder / f"{name}.md", text)
    page = out / f"{folder.name.replace('results', 'RESULTS')}.md"
    write_text(page, _results_page(first, others, pages, folder))
    return page


def folder_of(out: Path, preset: str) -> Path:
    """Returns the folder of all pages but RESULTS.md."""
    return out / "docs" / ("results" if preset == "cpu" else f"results-{preset}")


def _file_of(place: int) -> str:
    return f"numbers{place + 1 if place else ''}.json"


def _fill(page: str, **words: object) -> str:
    """Returns a page of `pages.toml` with words for its $NAMES; a paragraph without words is left out."""
    return re.sub(r"\n{3,}", "\n\n", Template(asked.PAGES["texts"][page]).substitute(words)).lstrip("\n")


def _draw(numbers: Numbers, folder: Path, before: Path) -> None:
    """Draws all figures. Where curves are lost, the figure that was drawn of them is copied."""
    save_forest(folder / "claims.png", [(it, of) for it in asked.CLAIMS if (of := numbers.claims[it.id]).seeds])
    for name, result in numbers.questions.items():
        save_rows(folder / f"{name}.png", result.rows, result.drawn)
        curves = f"{name}_curves.png"
        if result.curves:
            save_curves(folder / curves, result.curves, result.steps or numbers.steps)
        elif (before / curves).exists() and before.resolve() != folder.resolve():
            shutil.copy(before / curves, folder / curves)


# ---- numbers and tables as text


def with_interval(scale: Scale, interval: Interval) -> str:
    """Returns a claim's number with its bounds: "+0.012 [−0.003, +0.027]", or "× 1.03 [0.97, 1.10]" of a ratio."""
    if math.isnan(interval.mean):
        return NOT_MEASURED
    mean, *bounds = (f"{math.exp(x):.3g}" if scale == "ratio" else f"{x:+z.3f}".replace("-", "−") for x in interval)
    return ("× " if scale == "ratio" else "") + mean + ("" if math.isnan(interval.low) else f" [{', '.join(bounds)}]")


def number(interval: Interval) -> str:
    """Returns a mean and half its 95% interval, "0.953 ± 0.012"; a dash where there is nothing to say."""
    mean, low, high = interval
    if math.isnan(mean):
        return "–"
    half = 0.0 if math.isnan(low) else (high - low) / 2
    digits = 0 if abs(mean) >= 100 else 3
    while 1e-6 < half < 0.5 * 10.0**-digits:  # so that a spread is not printed as none
        digits += 1
    return f"{mean:z.{digits}f}" + ("" if math.isnan(low) else f" ± {half:.{digits}f}")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def rows_as_text(result: Result) -> tuple[list[str], dict[str, list[str]]]:
    """Returns the columns of a question's table, and its rows as text."""
    return list(next(iter(result.rows.values()))), {
        name: list(map(number, row.values())) for name, row in result.rows.items()
    }


def _claims_table(claims: Sequence[Claim], numbers: Numbers, link: str = "") -> str:
    def row(claim: Claim) -> tuple[str, ...]:
        decision = numbers.claims[claim.id]
        diverged = f"; {decision.diverged} runs diverged" if decision.diverged else ""
        return (
            f"[{claim.source}]({link}{claim.question}.md)",
            claim.words,
            claim.measure,
            _ours(claim, decision) + diverged,
            _range(claim),
            _claimed(claim),
            str(decision.seeds),
            _verdict(claim, decision),
        )

    columns = ("source", "what it says", "measured by", "ours", "allowed", "claimed", "seeds", "verdict")
    return table(columns, map(row, claims))


def _ours(claim: Claim, decision: Decision) -> str:
    return with_interval(claim.scale, decision.interval)


def _verdict(claim: Claim, decision: Decision) -> str:
    """Returns the verdict, and if a difference of 0 is what the words say."""
    holds = claim.low < 0 < claim.high and decision.verdict == "no difference that matters"
    return decision.verdict + (AS_CLAIMED if holds else "")


def _range(claim: Claim) -> str:
    low, high = (math.exp(x) if claim.scale == "ratio" else x for x in (claim.low, claim.high))
    if math.isinf(claim.high):
        return f"above {low:g}"
    return f"below {high:g}" if math.isinf(claim.low) else f"{low:g} to {high:g}"


def _claimed(claim: Claim) -> str:
    if math.isnan(claim.claimed):
        return ""
    return f"× {math.exp(claim.claimed):.2g}" if claim.scale == "ratio" else f"{claim.claimed:+g}"


# ---- RESULTS.md


def _results_page(numbers: Numbers, others: Sequence[Numbers], pages: Mapping[str, str], folder: Path) -> str:
    link, words = f"docs/{folder.name}/", Counter(numbers.claims[it.id].verdict for it in asked.CLAIMS)
    families = Counter(claim.family for claim in asked.CLAIMS)
    looks = sorted({seeds for it in asked.CLAIMS if (seeds := numbers.claims[it.id].seeds)})
    retests = {name: it for name, it in asked.PAGES["retests"].items() if name in numbers.questions}
    rules = ", ".join(f"[{it['model']}]({link}{name}.md)" for name, it in retests.items())
    last, curves = max(looks, default=0), folder / "ppo_vs_grpo_curves.png"
    says = "GRPO or PPO: scores during training; a coin toss has random rewards"
    open_claims = [(it, of) for it in asked.CLAIMS if (of := numbers.claims[it.id]).verdict == "undecided"]
    notes = [" ".join(_measured(it.note, numbers)) for it in asked.HEADLINES if it.note]
    again = [f"{agreement(numbers, it)} See [every claim on both machines]({link}replication.md)." for it in others]
    sources = Counter(claim.source[:3] for claim in asked.CLAIMS)
    posts, of_notes = (sum(sources[name] for name in names) for names in (POSTS, NOTES))
    return _fill(
        "results",
        link=link,
        count=len(asked.CLAIMS),
        posts=posts,
        of_notes=of_notes,
        papers=len(asked.CLAIMS) - posts - of_notes,
        power=_power(numbers),
        machines_of_ppo=_both_machines(numbers, others) if others else "",
        **families,
        steps=numbers.steps,
        num_prompts=numbers.num_prompts,
        preset=numbers.preset,
        smoke="This is a test of whether it works: the numbers mean nothing." * (numbers.preset == "smoke"),
        findings="\n".join(f"- {it}" for it in _measured(asked.PAGES["findings"], numbers)),
        headlines=_headlines_table(numbers, link),
        notes=" ".join(f"{mark} {note}" for mark, note in zip(MARKS, notes, strict=False)),
        early=explain_early(sum(it.seeds < LOOKS[-1] for _, it in open_claims)),
        verdicts=", ".join(f"{words[word]} {word}" for word in (*VERDICTS[1:], VERDICTS[0], "undecided")),
        again="\n\n".join(again),
        elsewhere=" ".join(map(partial(_elsewhere, numbers), others)),
        curves=f"![{says}]({link}{curves.name})" if curves.exists() else "",
        claims=_claims_table(asked.CLAIMS, numbers, link),
        open=table(
            ("claim", "ours", "seeds", "why they were not spent"),
            [
                (claim.label, _ours(claim, it), _enough(it), _why_open(numbers.questions.get(claim.question), it))
                for claim, it in open_claims
            ],
        ),
        looks=", ".join(map(str, looks)),
        pretrained="".join(f"{it['says']} " for it in retests.values()),
        retests=f"Pretrained models have rules of their own ({rules})." * bool(retests),
        look=f" --look {last}" if last > SIZES[numbers.preset].seeds else "",
        machines=_machines(numbers),
        source=numbers.source,
        facts=table(
            ("source", "what it says", "", "what is so"),
            [(it.source, it.words, "holds" if it.holds else "does not hold", it.says) for it in asked.FACTS],
        ),
        questions="\n".join(f"- [{text.splitlines()[0][2:]}]({link}{name}.md)" for name, text in pages.items()),
        files=", ".join(f"[{_file_of(place)}]({link}{_file_of(place)})" for place in range(1 + len(others))),
        checksum=numbers.checksum,
    )


def explain_early(count: int) -> str:
    """Returns a sentence about the number of undecided claims that did not take the last look."""
    if not count:
        return f"Every undecided claim had the planned {LOOKS[-1]} seeds."
    return f"For {count} of the undecided claims, we ran fewer than the planned {LOOKS[-1]} seeds."


def _headlines_table(numbers: Numbers, link: str) -> str:
    """Returns the questions of a reader with a row for each difference."""
    marks = dict(zip((it.question for it in asked.HEADLINES if it.note), MARKS, strict=False))
    rows = [
        (f"{it.question}{marks.get(it.question, '')}" * (place == 0), *_evidence(row, numbers, link))
        for it in asked.HEADLINES
        for place, row in enumerate(row for row in it.evidence if row.question in numbers.questions)
    ]
    return table(("question", "difference", "model", "verdict", *PLACES, "n"), rows)


def _power(numbers: Numbers) -> str:
    """Returns the differences that the rule finds, by the number of seeds."""
    families = Counter(claim.family for claim in asked.CLAIMS)
    measured = [
        (numbers.claims[claim.id], families[claim.family])
        for claim in asked.CLAIMS
        if claim.scale == "difference" and numbers.claims[claim.id].seeds > 1
    ]
    if not measured:
        return ""
    smallest = [np.median([detectable(*it, look) for it in measured]) for look in (LOOKS[0], LOOKS[-1])]
    return (
        f"For half of the claims, [the rule](#rule) finds differences of {smallest[0]:.3f} with {LOOKS[0]} seeds, or "
        f"{smallest[1]:.3f} with {LOOKS[-1]}, with probability {POWER}. It rarely decides smaller ones."
    )


def _both_machines(first: Numbers, others: Sequence[Numbers], claim: str = "grpo_ppo") -> str:
    """Returns a claim's number on each machine, and how far the machines are apart."""
    rows = [
        (of.questions[asked.BY_ID[claim].question].machine, str(it.seeds), _ours(asked.BY_ID[claim], it), it.verdict)
        for of in (first, *others)
        if (it := of.claims[claim]).seeds
    ]
    distances = [f"{apart(first.claims[claim], of.claims[claim]):.1f}" for of in others if of.claims[claim].seeds]
    return table(("machine", "seeds", "accuracy of GRPO − PPO at the end", "verdict"), rows) + (
        f"\n\nThe means are {' and '.join(distances)} standard errors apart. {DIFFERS}" if distances else ""
    )


def _evidence(row: Evidence, numbers: Numbers, link: str) -> tuple[str, ...]:
    result = numbers.questions[row.question]
    differences = _differences(row, result)
    verdicts = {
        place: decision.verdict
        for key in row.ids
        if (decision := numbers.claims[key]).verdict != "undecided"
        for place in PLACES
        if place == PLACES[PLACES[1] in asked.BY_ID[key].measure]
    }
    cells = [
        ("**{}**" if place in verdicts else "{}").format(with_interval("difference", differences.get(place, UNKNOWN)))
        for place in PLACES
    ]
    return (
        f"[{row.says}]({link}{row.question}.md)",
        row.model,
        _verdict_of(row, differences, verdicts),
        *cells,
        str(result.seeds if differences else 0),
    )


def _differences(row: Evidence, result: Result) -> dict[str, Interval]:
    """Returns the differences with their intervals, by place: at the end, on the way or both."""
    if row.measure:
        return {PLACES[0]: next(it.interval for it in result.also if it.measure == row.measure)}
    one, other = (result.values.get(name, {}) for name in row.rows)
    columns = (row.column or next((name for name in SCORES if name in one), ""), PLACES[1])
    return {
        place: interval_over_runs(np.subtract(one[column], other[column]))
        for place, column in zip(PLACES, columns, strict=True)
        if column in one
    }


def _verdict_of(row: Evidence, differences: Mapping[str, Interval], verdicts: Mapping[str, str]) -> str:
    """Returns the verdict of a row, and who is ahead where its interval excludes 0; verdicts of the rule are bold."""
    ahead = {
        place: f": {row.sides[it.mean < 0]} ahead" for place, it in differences.items() if it.low > 0 or it.high < 0
    }
    if verdicts:
        words = {place: f"**{it}**{ahead.get(place, '') * (it in VERDICTS[1:])}" for place, it in verdicts.items()}
    elif not differences or math.isnan(next(iter(differences.values())).low):
        return NOT_MEASURED
    else:
        verdict = "undecided" if row.ids else "no claim"
        words = {place: verdict + it for place, it in ahead.items()}
        if not words:
            return f"{verdict}, a lead is at most {max(max(-it.low, it.high) for it in differences.values()):.3f}"
    if len(set(words.values())) == 1 and words.keys() == differences.keys():
        return next(iter(words.values()))
    return "; ".join(f"{word} {place}" for place, word in words.items())


def _measured(texts: Sequence[str], numbers: Numbers) -> list[str]:
    """Returns the sentences whose numbers are measured, with their numbers."""
    return [it for it in (cite(text, numbers) for text in texts) if NOT_MEASURED not in it]


def cite(text: str, numbers: Numbers) -> str:
    """Returns a sentence with the numbers that it names in braces, as `findings` of pages.toml does."""

    def lookup(match: re.Match[str]) -> str:
        name, *path = match[1].split(" | ")
        if name in asked.BY_ID:
            decision = numbers.claims[name]
            return str(decision.seeds) if path == ["seeds"] else _ours(asked.BY_ID[name], decision)
        result = numbers.questions.get(name)
        if result is None:
            return NOT_MEASURED
        if path == ["seeds"]:
            return str(result.seeds)
        if len(path) == 2:
            return number(result.rows[path[0]][path[1]])
        return next(
            (with_interval("difference", it.interval) for it in result.also if it.measure == path[0]), NOT_MEASURED
        )

    return re.sub(r"\{([^{}]+)\}", lookup, text)


def _enough(decision: Decision) -> str:
    return "over 10,000" if decision.needed is None else str(decision.needed)


def _why_open(result: Result | None, decision: Decision) -> str:
    """Returns why no more seeds were spent on an undecided claim."""
    seeds = decision.seeds
    if result is None or not seeds:
        return "not measured" if result is None else f"{UNLEARNED}: {WHY_UNLEARNED}"
    if math.isnan(decision.interval.mean):
        return "a run has no such number"
    look = next((look for look in LOOKS if look > seeds), None)
    if look is None:
        return "the last look was taken"
    minutes = result.seconds / 60 * (look - seeds) / seeds
    takes = "was not taken" if math.isnan(minutes) else f"takes up to {minutes:.0f} min more"
    cost = f"the look at {look} seeds {takes}, `--look {look}`"
    within = decision.needed is not None and decision.needed <= LOOKS[-1]
    return cost if within else f"more than the last look's {LOOKS[-1]}; {cost}"


def _machines(numbers: Numbers) -> str:
    """Returns where the numbers were computed, by which code and in what time."""
    made: dict[tuple[str, str], dict[str, float]] = {}
    for name, result in numbers.questions.items():
        made.setdefault((result.machine, result.code), {})[name] = result.seconds
    rows = [(*key, ", ".join(seconds), _minutes(sum(seconds.values()))) for key, seconds in made.items()]
    return table(("machine", "code", "questions", "minutes"), rows)


def _minutes(seconds: float) -> str:
    return "–" if math.isnan(seconds) else f"{seconds / 60:.0f}"


# ---- a question


def _question_page(name: str, numbers: Numbers, folder: Path) -> str:
    """Returns a question with its claims, table, figure, and what was measured besides."""
    question, result, curves = asked.QUESTIONS[name], numbers.questions[name], f"{name}_curves.png"
    columns, rows = rows_as_text(result)
    shared = " without the runs of earlier questions" * (question.module == "reproduce")
    says = {asked.START: "is where all runs start", asked.COIN: "has random rewards"}
    controls = [f"“{it}” {words}" for it, words in says.items() if any(row.endswith(it) for row in rows)]
    besides = table(
        ("source", "what it says", "measured by", "ours"),
        [(it.source, it.words, it.measure, number(it.interval)) for it in result.also],
    )
    return _fill(
        "question",
        name=name,
        command="reproduce --only " + name
        if question.module == "reproduce"
        else f"{question.module} --question {name} --model DIR",
        title=question.title,
        text=question.text,
        unlearned="" if result.learned else f"{UNLEARNED.capitalize()}: {WHY_UNLEARNED}",
        claims=_claims_table(question.claims, numbers) if question.claims else "",
        reasons="\n\n".join(f"{claim.label}: {claim.why}." for claim in question.claims if claim.why),
        seeds=result.seeds,
        controls=f" {', '.join(controls)}." if controls else "",
        rows=table(("", *columns), [(row, *values) for row, values in rows.items()]),
        note=result.note,
        drawn=" and ".join(result.drawn),
        curves=f"![scores over the steps of training]({curves})" if (folder / curves).exists() else "",
        also=f"Also measured, without a verdict.\n\n{besides}" if result.also else "",
        machine=result.machine,
        time="" if math.isnan(result.seconds) else f", {result.seconds:.0f} s{shared}",
    )


# ---- the same claims on another machine


def agreement(first: Numbers, other: Numbers) -> str:
    """Returns sentences on how many intervals overlap, and how verdicts compare."""
    both = _both(first, other)
    verdicts = Counter(relation(one, two) for _, one, two in both)
    overlapping = sum(overlap(one.interval, two.interval) for _, one, two in both)
    distances, chances = ([of(one, two) for _, one, two in both] for of in (apart, chance))
    far, least = sum(p < 0.05 for p in chances), min(1.0, len(both) * min(chances))  # Bonferroni: claims may depend
    turned = [claim.label for claim, one, two in both if turns(one, two)]
    other_way = f" The sign differs in {len(turned)} ({'; '.join(turned)})." if turned else ""
    return (
        f"The intervals of {overlapping} of {len(both)} claims overlap. The means of {far} are further apart than 95% "
        f"would be by chance (Welch's t test), and the largest distance is {max(distances):.1f} standard errors. If "
        f"machines did not differ, at most {least:.0%} of repetitions would have a p as small among "
        f"{len(both)}. Verdicts: "
        f"{', '.join(f'{count} {word}' for word, count in verdicts.items())}.{other_way}"
    )


def _elsewhere(first: Numbers, other: Numbers) -> str:
    """Returns what another machine decided, in a sentence."""
    both = _both(first, other)
    verdicts, seeds = Counter(relation(one, two) for _, one, two in both), max(two.seeds for _, _, two in both)
    return (
        f"On another machine, with up to {seeds} seeds, the rule decided {verdicts[ONLY_SECOND]} of the undecided "
        f"claims. {verdicts[DIFFERENT] or 'None'} of the decided claims got a conflicting verdict there "
        "([comparison](#again))."
    )


def _both(first: Numbers, other: Numbers) -> list[tuple[Claim, Decision, Decision]]:
    """Returns the claims that both have measured."""
    pairs = ((claim, first.claims[claim.id], other.claims[claim.id]) for claim in asked.CLAIMS)
    return [(claim, one, two) for claim, one, two in pairs if one.seeds and two.seeds]


def _again(first: Numbers, other: Numbers) -> str:
    """Returns both numbers of each claim side by side."""
    rows = [
        (
            claim.label,
            *(f"{_ours(claim, it)}, n {it.seeds}: {it.verdict}" for it in (one, two)),
            "yes" if overlap(one.interval, two.interval) else "no",
            f"{apart(one, two):.1f}",
            relation(one, two),
        )
        for claim, one, two in _both(first, other)
    ]
    seconds = sum(it.seconds for it in other.questions.values())
    time = "" if math.isnan(seconds) else f", {_minutes(seconds)} minutes"
    names = list(dict.fromkeys(claim.question for claim, _, _ in _both(first, other)))
    one = places_of({name: first.questions[name].machine for name in names})
    two = places_of({name: "{0.machine}, code {0.code}".format(other.questions[name]) for name in names})
    machines = f"The first machine is {one}. The second is {two}{time}."
    return f"{machines} {agreement(first, other)}\n\n{other.source}\n\n" + table(
        ("claim", "first machine", "second machine", "intervals overlap", "apart", "verdicts"), rows
    )


def places_of(places: Mapping[str, str]) -> str:
    """Returns the place where most of the questions were answered, and the other places with their questions."""
    (most, _), *others = Counter(places.values()).most_common()
    named = {other: ", ".join(name for name, place in places.items() if place == other) for other, _ in others}
    return most + "".join(f" (but of {names}: {other})" for other, names in named.items())


def overlap(a: Interval, b: Interval) -> bool:
    """Returns whether two intervals have a point in common."""
    return a.low <= b.high and b.low <= a.high


def apart(one: Decision, two: Decision) -> float:
    """|m₁ − m₂| / √(e₁² + e₂²), with each mean's standard error e from its interval: large is no chance."""
    return abs(one.interval.mean - two.interval.mean) / math.hypot(standard_error(one), standard_error(two))


def chance(one: Decision, two: Decision) -> float:
    """Welch's p: how often chance puts two means at least as far apart, with deviations of so few seeds."""
    squares = np.square([standard_error(one), standard_error(two)])
    degrees = squares.sum() ** 2 / (squares**2 / [one.seeds - 1, two.seeds - 1]).sum()
    return float(2 * special.stdtr(degrees, -apart(one, two)))


def turns(one: Decision, two: Decision) -> bool:
    """Returns whether the means have opposite signs, and neither is a difference that does not matter."""
    if "no difference that matters" in (one.verdict, two.verdict):
        return False
    return one.interval.mean * two.interval.mean < 0


def relation(one: Decision, two: Decision) -> str:
    """Returns how two verdicts of a claim compare."""
    if one.verdict == two.verdict:
        return "undecided on both" if one.verdict == "undecided" else "the same verdict"
    if "undecided" in (one.verdict, two.verdict):
        return ONLY_FIRST if two.verdict == "undecided" else ONLY_SECOND
    return DIFFERENT
