"""RESULTS.md, docs/results/*.md and claims.html: what was measured, what the rule makes of it, and what is open."""

import importlib
import math
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from experiments.claims import ablation, findings
from experiments.claims.ablation import COIN, START
from experiments.claims.earlier import EARLIER
from experiments.claims.facts import FACTS
from experiments.claims.figures import Drawn, save_curves, save_forest, save_rows
from experiments.claims.findings import cells, number, with_interval
from experiments.claims.numbers import Judged, Numbers, Told, read_numbers
from experiments.claims.page import Block, Figure, Folded, Heading, Table, Text, html, markdown
from experiments.claims.primary import BY_ID, HEADLINES, PRIMARY, Headline, Primary
from experiments.claims.replication import in_words, replication
from experiments.claims.verdicts import LOOKS, VERDICTS
from grpo_jax.runs.folder import write_text

TITLE = "What is claimed of GRPO, and what was measured"
OUT_OF_SCOPE = """Out of scope are large models, learned rewards, long texts and tasks of the real world: nothing is
proved or refuted there."""
RULE = """A claim has one number: a difference of two settings that share seeds, starts, prompts and evaluation, or
the logarithm of a ratio. "On the way" is the mean score of all completions that a run learns from. Claims, numbers and
the range that words allow were fixed before the runs. Ten seeds of two questions (GRPO or PPO, group size) had been
seen on earlier code; ten claims of other questions were then moved, before any of their runs, from the score at the end
to the score on the way, which varies half as much between seeds. Three t tests
over seeds stand behind three verdicts. **No difference that matters**: the mean is within ±0.02, or a ratio within
10%; this is decided first, whatever the words say. **Supported**: the mean is in the range that the words allow.
**Contradicted**: it is outside. **Undecided**: the rest. Looks are at 10, 20 and 40 seeds, each at a third of 5%;
at each look all hypotheses of a family (the announcements; the field since) are corrected together, after Benjamini
and Yekutieli. A claim with a verdict keeps it. Of the verdicts of a family 5% are false at most, in expectation.
Intervals are Student's 95%, not adjusted. A deviation counts as no less than what evaluation alone would give,
0.0017, or 1% of a ratio. A run that diverged has the score's floor, and is counted."""
# By `simulated`, with 40 seeds at the last look and with 62 and 46.
POWER_SAID = """At the deviations that the claims had, 40 seeds settle a difference of 0.03 with a chance of 68%
(announcements) and 90% (the field since), a mean over claims. Where seeds deviate by 0.05, as at the end of runs, it is
55% and 74%; 62 and 46 seeds would have 80%."""
SOURCES = """000 and 001 are the posts that announced GRPO in September 2022, 003 are notes on PPO and GRPO; none of
them published data. The field since is named by its papers."""
AS_CLAIMED = ", as claimed"
# Words of the earlier page, and what says the same today.
FIRST = {
    "agree": ("supported", "no difference that matters" + AS_CLAIMED),
    "disagree": ("contradicted",),
    "undecided": ("undecided",),
}


def write_results(files: Sequence[Path], out: Path) -> Path:
    """All pages and figures, from files of numbers alone.

    Args:
      files: as `numbers.write_numbers` writes them. The first decides; others have the same claims on other machines,
        and are put beside it.
      out: the folder for RESULTS.md, and for docs/.

    Returns:
      The place of RESULTS.md.
    """
    (first, *others), kept = map(read_numbers, files), [file.read_text() for file in files]
    suffix, folder = _suffix(first.preset), folder_of(out, first.preset)
    folder.mkdir(parents=True, exist_ok=True)
    for place, text in enumerate(kept):
        write_text(folder / _file_of(place), text)
    _draw(first, folder, files[0].parent)
    sections = {name: _section(name, told, first, folder) for name, told in first.questions.items()}
    if others:
        sections["replication"] = replication(first, others)
    for name, blocks in sections.items():
        write_text(folder / f"{name}.md", markdown(blocks) + "\n")
    titles = {name: blocks[0].words for name, blocks in sections.items() if isinstance(blocks[0], Heading)}
    page = [*_first_screen(first, others, folder), *_folded(first)]
    ending = Text(f"SHA-256 of all numbers: `{first.checksum}`")
    pages = Text(
        "Each question with its settings and all that was measured besides:\n\n- "
        + "\n- ".join(f"[{title}](docs/results{suffix}/{name}.md)" for name, title in titles.items())
    )
    data = ", ".join(f"[{_file_of(place)}](docs/results{suffix}/{_file_of(place)})" for place in range(len(files)))
    sortable = Text(
        f"The same with tables that a click sorts: [claims.html](docs/results{suffix}/claims.html). All numbers: "
        f"{data}; `python -m experiments.claims.reproduce --numbers FILE` makes the pages of them."
    )
    text = markdown([*_of_root(page, suffix), pages, sortable, ending])
    write_text(out / f"RESULTS{suffix}.md", text + "\n")
    inner = [Folded(titles[name], _linked(blocks[1:], r"](#\1)"), name) for name, blocks in sections.items()]
    write_text(folder / "claims.html", html([*_linked(page, r"](#\1)"), Heading("Questions"), *inner, ending], TITLE))
    return out / f"RESULTS{suffix}.md"


def folder_of(out: Path, preset: str) -> Path:
    """The folder of all pages but RESULTS.md."""
    return out / "docs" / f"results{_suffix(preset)}"


def _suffix(preset: str) -> str:
    return "" if preset == "cpu" else f"-{preset}"


def _file_of(place: int) -> str:
    return f"numbers{place + 1 if place else ''}.json"


def _draw(numbers: Numbers, folder: Path, before: Path) -> None:
    """All figures. Where curves are lost, the figure that was drawn of them is kept."""
    measured = [Drawn(claim, it.decision) for claim in PRIMARY if (it := numbers.claims[claim.id]).decision.seeds]
    save_forest(folder / "claims.png", measured)
    for name, told in numbers.questions.items():
        save_rows(folder / f"{name}.png", told.rows, told.drawn)
        curves = f"{name}_curves.png"
        if told.curves:
            save_curves(folder / curves, told.curves, numbers.steps)
        elif (before / curves).exists() and before.resolve() != folder.resolve():
            shutil.copy(before / curves, folder / curves)


def _of_root(blocks: Sequence[Block], suffix: str) -> list[Block]:
    """Blocks whose figures and pages lie in docs/results."""
    found = _linked(blocks, f"](docs/results{suffix}/\\1.md)")
    return [
        block._replace(file=f"docs/results{suffix}/{block.file}") if isinstance(block, Figure) else block
        for block in found
    ]


def _linked(blocks: Sequence[Block], to: str) -> list[Block]:
    """Blocks whose links to pages of questions, "](NAME.md)", lead elsewhere."""

    def words(given: str) -> str:
        return re.sub(r"\]\((\w+)\.md\)", to, given)

    def linked(block: Block) -> Block:
        match block:
            case Text(given):
                return Text(words(given))
            case Table(columns, rows):
                return Table(columns, [tuple(map(words, row)) for row in rows])
            case Folded(title, inner, name):
                return Folded(title, _linked(inner, to), name)
        return block

    return list(map(linked, blocks))


# ---- the first screen


def _first_screen(numbers: Numbers, others: Sequence[Numbers], folder: Path) -> list[Block]:
    counts = Counter(it.decision.verdict for it in numbers.claims.values())
    families = Counter(claim.family for claim in PRIMARY)
    blocks: list[Block] = [
        Heading(TITLE, 1),
        Text(
            f"{len(PRIMARY)} claims about GRPO, {families['announcements']} of the texts that announced it and "
            f"{families['since']} of the field since. They were tested in runs of {numbers.steps} steps of a model of "
            "124,000 parameters that adds numbers (a tenth of the problems has no right answer), and of one of 39,000 "
            f"that writes words. {OUT_OF_SCOPE}"
        ),
    ]
    if numbers.preset == "smoke":
        blocks.append(Text("This is a test of whether it works: the numbers mean nothing."))
    rows = [(it.question, _answered(it, numbers), _evidence(it, numbers)) for it in HEADLINES]
    said = ", ".join(f"{counts[word]} {word}" for word in (*VERDICTS[1:], VERDICTS[0], "undecided"))
    again = [Text(f"[Asked again](replication.md) on another machine, {in_words(numbers, other)}.") for other in others]
    blocks += [
        Table(("question", "answer", "difference of scores, 95% interval, n seeds"), rows),
        Text(
            "A score is that of held-out completions at the end of a run or, where “on the way” is said, the mean of "
            "all completions that the run learns from. β weighs the KL, ε bounds the clip, K is the group size. "
            "“No difference that matters” is within ±0.02, or a ratio within 10%. “Not settled” is undecided; the "
            "answer names who is ahead in these seeds."
        ),
        Text(
            f"Of all {len(PRIMARY)}: {said}. Of the verdicts of each of two families (announcements; the field since) "
            "at most 5% are false, in expectation ([the rule](#rule)): they are corrected for all claims of a family "
            "and for three looks. Intervals are 95%, without this correction, so that of an undecided claim may leave "
            "out 0. "
            f"{POWER_SAID}"
        ),
        *_open(numbers),
        *again,
        Text(
            "Evidence: [every claim](#every), a page a question (links in the table, and below), [machines, code and "
            "minutes](#machines), [what changed against the earlier page](#earlier)."
        ),
        Figure("claims.png", "each claim's difference with its interval, what does not matter, and what was claimed"),
    ]
    if (folder / "ppo_vs_grpo_curves.png").exists():
        says = "GRPO or PPO: scores during training; a coin toss has random rewards"
        blocks.append(Figure("ppo_vs_grpo_curves.png", says))
    return blocks


def _open(numbers: Numbers) -> list[Block]:
    """The claims that are undecided, each with the seeds that would decide it."""
    left = [f"{claim.label} ({_enough(it)})" for claim, it in _undecided(numbers)]
    if not left:
        return []
    said = f"Undecided, with the number of seeds that would decide: {'; '.join(left)}"
    return [Text(f"{said} ([why they were not run](#undecided)).")]


def _answered(headline: Headline, numbers: Numbers) -> str:
    decision = numbers.claims[headline.id].decision
    words = {
        "supported": headline.supported,
        "contradicted": headline.contradicted,
        "no difference that matters": headline.no_difference,
        "undecided": f"Not settled; {headline.sides[decision.interval.mean < 0]}." if decision.seeds else "Not known.",
    }
    return words[decision.verdict]


def _evidence(headline: Headline, numbers: Numbers) -> str:
    claim, judged = BY_ID[headline.id], numbers.claims[headline.id]
    told = numbers.questions.get(claim.question)
    name, measure = headline.beside
    beside = [it for it in told.also if it.measure == measure] if told else []
    way = ", on the way" if "on the way" in claim.measure else ""
    says = f"[{claim.label}]({claim.question}.md){way}: {_ours(claim, judged)}, n {judged.decision.seeds}"
    return says + "".join(f"; {name}: {with_interval('difference', it.interval)}, no verdict" for it in beside)


def _ours(claim: Primary, judged: Judged) -> str:
    return with_interval(claim.scale, judged.decision.interval)


# ---- what is folded


def _folded(numbers: Numbers) -> list[Block]:
    return [
        Folded("Every claim, its number and its verdict", [_claims_table(PRIMARY, numbers)], "every"),
        Folded("What is undecided, and what it would take", _why_undecided(numbers), "undecided"),
        Folded("The rule", [Text(RULE), Text(SOURCES)], "rule"),
        Folded("Machines, code and minutes", _machines(numbers), "machines"),
        Folded("What changed against the earlier page", _earlier(numbers), "earlier"),
        Folded(
            "Settled by arithmetic",
            [
                Text("True or false without any run; tests check each."),
                Table(
                    ("source", "what it says", "", "what is so"),
                    [(it.source, it.words, "holds" if it.holds else "does not hold", it.says) for it in FACTS],
                ),
            ],
            "facts",
        ),
    ]


def _claims_table(claims: Sequence[Primary], numbers: Numbers) -> Table:
    def row(claim: Primary) -> tuple[str, ...]:
        judged = numbers.claims[claim.id]
        diverged = f"; {judged.diverged} runs diverged" if judged.diverged else ""
        return (
            f"[{claim.source}]({claim.question}.md)",
            claim.words,
            claim.measure,
            _ours(claim, judged) + diverged,
            _range(claim),
            _claimed(claim),
            str(judged.decision.seeds),
            _verdict(claim, judged),
        )

    columns = ("source", "what it says", "measured by", "ours", "allowed", "claimed", "seeds", "verdict")
    return Table(columns, [row(claim) for claim in claims])


def _verdict(claim: Primary, judged: Judged) -> str:
    """The verdict, and whether a difference of 0 is what the words say."""
    holds = claim.low < 0 < claim.high and judged.decision.verdict == "no difference that matters"
    return judged.decision.verdict + (AS_CLAIMED if holds else "")


def _range(claim: Primary) -> str:
    low, high = (math.exp(x) if claim.scale == "ratio" else x for x in (claim.low, claim.high))
    if math.isinf(claim.high):
        return f"above {low:g}"
    return f"below {high:g}" if math.isinf(claim.low) else f"{low:g} to {high:g}"


def _claimed(claim: Primary) -> str:
    if math.isnan(claim.claimed):
        return ""
    return f"× {math.exp(claim.claimed):.2g}" if claim.scale == "ratio" else f"{claim.claimed:+g}"


def _undecided(numbers: Numbers) -> list[tuple[Primary, Judged]]:
    judged = ((claim, numbers.claims[claim.id]) for claim in PRIMARY)
    return [(claim, it) for claim, it in judged if it.decision.verdict == "undecided"]


def _enough(judged: Judged) -> str:
    return "over 10,000" if judged.needed is None else str(judged.needed)


def _why_undecided(numbers: Numbers) -> list[Block]:
    """Each undecided claim with the seeds that would decide it, and why they were not spent."""
    says = """Seeds that would decide with probability 0.8, if mean and deviation are those seen and no other claim of
the family is decided at the same look."""
    rows = [
        (claim.label, _ours(claim, it), _enough(it), _why_open(numbers.questions.get(claim.question), it))
        for claim, it in _undecided(numbers)
    ]
    return [Text(says), Table(("claim", "ours", "seeds", "why they were not spent"), rows)]


def _why_open(told: Told | None, judged: Judged) -> str:
    seeds = judged.decision.seeds
    if told is None or not seeds:
        return "not measured" if told is None else f"{findings.UNLEARNED}: {findings.WHY_UNLEARNED}"
    if math.isnan(judged.decision.interval.mean):
        return "a run has no such number"
    look = next((look for look in LOOKS if look > seeds), None)
    if look is None:
        return "the last look was taken"
    minutes = told.seconds / 60 * (look - seeds) / seeds
    takes = "was not taken" if math.isnan(minutes) else f"takes up to {minutes:.0f} minutes more"
    cost = f"the look at {look} seeds {takes}, `--look {look}`"
    within = judged.needed is not None and judged.needed <= LOOKS[-1]
    return cost if within else f"more than the last look's {LOOKS[-1]}; {cost}"


def _machines(numbers: Numbers) -> list[Block]:
    """Where the numbers were computed, by which code and in what time."""
    looks = sorted({it.decision.seeds for it in numbers.claims.values() if it.decision.seeds})
    look = f" --look {max(looks)}" if max(looks, default=0) > ablation.SIZES[numbers.preset].seeds else ""
    says = f"""Runs have {numbers.steps} steps of {numbers.num_prompts} prompts (half as many on words) with 8
completions, unless a setting says otherwise. Claims were decided at {", ".join(map(str, looks))} seeds:
`python -m experiments.claims.reproduce --preset {numbers.preset}{look}`. The code that makes runs may have changed
since: what made these is named. A question shares runs and programs with those before it."""
    made: dict[tuple[str, str], list[tuple[str, Told]]] = {}
    for name, told in numbers.questions.items():
        made.setdefault((told.machine, told.code), []).append((name, told))
    rows = [
        (machine, code, ", ".join(name for name, _ in of), _minutes([told.seconds for _, told in of]))
        for (machine, code), of in made.items()
    ]
    table = Table(("machine", "code", "questions", "minutes"), rows)
    return [Text(says), table, *([Text(numbers.source)] if numbers.source else [])]


def _minutes(seconds: Sequence[float]) -> str:
    return "–" if math.isnan(sum(seconds)) else f"{sum(seconds) / 60:.0f}"


def _earlier(numbers: Numbers) -> list[Block]:
    """Verdicts that differ from those of the earlier page."""
    rows = [
        (
            BY_ID[key].label,
            f"{was.number}: {was.verdict}",
            f"{_ours(BY_ID[key], now)}: {now.decision.verdict}",
            was.differs or "the same measure, more seeds and samples",
        )
        for key, was in EARLIER.items()
        if _verdict(BY_ID[key], now := numbers.claims[key]) not in FIRST[was.verdict]
    ]
    says = f"""The earlier page had 81 rows with 5 seeds and one sample a prompt, and no correction: 29 agreed, 18
disagreed, 34 were undecided. {len(EARLIER)} of its rows are among today's claims; here are those whose verdict differs.
About a dozen were arithmetic and are listed below. The others have an interval without a verdict on the pages of their
questions, or were left out. Of a difference of less than 0.02 it said "undecided", for which there is a verdict now."""
    return [Text(says), Table(("claim", "then", "now", "measured otherwise"), rows)]


# ---- a question


def _section(name: str, told: Told, numbers: Numbers, folder: Path) -> list[Block]:
    """A question with its claims, table, figure, and what was measured besides."""
    claims = [claim for claim in PRIMARY if claim.question == name]
    columns, rows = cells(told.rows)
    title, _, text = (importlib.import_module(f"{findings.QUESTIONS}.{name}").__doc__ or name).strip().partition("\n")
    of_claims: list[Block] = [_claims_table(claims, numbers)]
    of_claims += [Text(f"{claim.label}: {claim.why}.") for claim in claims if claim.why]
    besides: list[Block] = [
        Text("Also measured, without a verdict."),
        Table(
            ("source", "what it says", "measured by", "ours"),
            [(it.source, it.words, it.measure, number(it.interval)) for it in told.also],
        ),
    ]
    unlearned = [] if told.learned else [Text(f"{findings.UNLEARNED.capitalize()}: {findings.WHY_UNLEARNED}")]
    curves, time = f"{name}_curves.png", "" if math.isnan(told.seconds) else f", {told.seconds:.0f} s"
    return [
        Heading(title, 1),
        Text(text.strip().rpartition("\n\n")[0]),
        *unlearned,
        *(of_claims if claims else []),
        Text(
            f"Means ± half a 95% interval over {told.seeds} seeds; a claim keeps the number of the look that "
            f"decided it. “{START}” is where all runs start, “{COIN}” has random rewards."
        ),
        Table(("", *columns), [(row, *values) for row, values in rows.items()]),
        *([Text(told.note)] if told.note else []),
        Figure(f"{name}.png", " and ".join(told.drawn)),
        *([Figure(curves, "scores over the steps of training")] if (folder / curves).exists() else []),
        *(besides if told.also else []),
        Text(f"`python -m {findings.QUESTIONS}.{name}`: {told.machine}{time}."),
    ]
