"""RESULTS.md, docs/results/*.md and claims.html: what was measured, what the rule makes of it, and what is open."""

import hashlib
import importlib
import math
import platform
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from experiments.claims import ablation, findings
from experiments.claims.ablation import COIN, START, Bench
from experiments.claims.earlier import EARLIER
from experiments.claims.facts import FACTS
from experiments.claims.figures import Drawn, save_forest
from experiments.claims.findings import Answer, cells, has_learned, number, with_interval
from experiments.claims.page import Block, Figure, Folded, Heading, Table, Text, html, markdown
from experiments.claims.primary import BY_ID, HEADLINES, PRIMARY, Answered, Primary
from experiments.claims.verdicts import LOOKS, Decision, decide, needed
from grpo_jax.runs.folder import write_text
from grpo_jax.statistics import interval_over_runs

TITLE = "What is claimed of GRPO, and what was measured"
OUT_OF_SCOPE = """Out of scope are large models, learned rewards, long texts and tasks of the real world: what fails
here is not refuted there, and what holds here is not proved there."""
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
SOURCES = """000 and 001 are the posts that announced GRPO in September 2022, 003 are notes on PPO and GRPO; none of
them published data. The field since is named by its papers."""
FIRST = {"agree": "supported", "disagree": "contradicted"}  # words of the earlier page


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


def write_results(bench: Bench, preset: str, out: Path, answers: Mapping[str, Answer]) -> Path:
    """All pages and figures; returns the place of RESULTS.md."""
    suffix = "" if preset == "cpu" else f"-{preset}"
    folder = out / "docs" / f"results{suffix}"
    folder.mkdir(parents=True, exist_ok=True)
    decisions = decisions_of(answers)
    measured = [claim for claim in PRIMARY if decisions[claim.id].seeds]
    save_forest(folder / "claims.png", [Drawn(claim, decisions[claim.id]) for claim in measured])
    sections = {name: _section(name, answer, decisions) for name, answer in answers.items()}
    for name, blocks in sections.items():
        for file in bench.run.path.glob(f"{name}*.png"):
            shutil.copy(file, folder / file.name)
        write_text(folder / f"{name}.md", markdown(blocks) + "\n")
    page = [*_first_screen(bench, preset, answers, decisions), *_folded(answers, decisions)]
    ending = Text(f"SHA-256 of all numbers: `{_checksum(answers)}`")
    links = [f"[{_title(name)}](docs/results{suffix}/{name}.md)" for name in answers]
    pages = Text("Each question with its settings and all that was measured besides:\n\n- " + "\n- ".join(links))
    sortable = Text(f"The same with tables that a click sorts: [claims.html](docs/results{suffix}/claims.html).")
    text = markdown([*_of_root(page, suffix), pages, sortable, ending])
    write_text(out / f"RESULTS{suffix}.md", text + "\n")
    inner = [Folded(_title(name), _linked(blocks[1:], r"](#\1)"), name) for name, blocks in sections.items()]
    write_text(folder / "claims.html", html([*_linked(page, r"](#\1)"), Heading("Questions"), *inner, ending], TITLE))
    return out / f"RESULTS{suffix}.md"


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


def _first_screen(
    bench: Bench, preset: str, answers: Mapping[str, Answer], decisions: Mapping[str, Decision]
) -> list[Block]:
    counts = Counter(decision.verdict for decision in decisions.values())
    minutes = sum(answer.seconds for answer in answers.values()) / 60
    looks = sorted({decision.seeds for decision in decisions.values() if decision.seeds})
    look = f" --look {max(looks)}" if max(looks, default=0) > ablation.SIZES[preset].seeds else ""
    blocks: list[Block] = [
        Heading(TITLE, 1),
        Text(
            f"{len(PRIMARY)} claims, asked of small models: of 124,000 parameters on additions, a tenth of which has "
            f"no right answer, and of 39,000 on writing words. Runs have {bench.size.steps} steps of "
            f"{bench.size.num_prompts} prompts (half as many on words) with 8 completions, unless a setting says "
            f"otherwise. Claims were decided at {', '.join(map(str, looks))} seeds. "
            f"`python -m experiments.claims.reproduce --preset {preset}{look}`, "
            f"{minutes:.0f} minutes on {_hardware()}. {OUT_OF_SCOPE}"
        ),
    ]
    if preset == "smoke":
        blocks.append(Text("This is a test of whether it works: the numbers mean nothing."))
    rows = [
        (
            headline.question,
            " ".join(_sentence(it, decisions[it.id]) for it in headline.claims),
            _evidence(headline.claims, decisions),
        )
        for headline in HEADLINES
    ]
    said = ", ".join(
        f"{counts[word]} {word}" for word in ("supported", "contradicted", "no difference that matters", "undecided")
    )
    return [
        *blocks,
        Table(("question", "answer", "evidence"), rows),
        Text(
            f"Of all {len(PRIMARY)}: {said}. How sure: of the verdicts of each of two families 5% at most are false, "
            "in expectation ([the rule](#rule)). Verdicts are corrected for all claims of a family and for three "
            "looks; the intervals are plain 95% ones. So an interval may leave 0 out while the claim is undecided. "
            "What does not matter is a difference within ±0.02, or a ratio within 10%."
        ),
        Text(
            f"{_open(answers, decisions)}Evidence: [every claim](#every), a page a question (links in the table, and "
            "below), [what changed against the earlier page](#earlier)."
        ),
        Figure("claims.png", "each claim's difference with its interval, what does not matter, and what was claimed"),
        Figure("ppo_vs_grpo_curves.png", "GRPO or PPO: scores during training; a coin toss has random rewards"),
    ]


def _open(answers: Mapping[str, Answer], decisions: Mapping[str, Decision]) -> str:
    """The claims that are undecided, each with the seeds that would decide it."""
    left = [f"{claim.label} ({enough})" for claim, enough, _ in _undecided(answers, decisions)]
    if not left:
        return ""
    said = f"Undecided, with the number of seeds that would decide: {'; '.join(left)}"
    return f"{said} ([why they were not run](#undecided)). "


def _sentence(said: Answered, decision: Decision) -> str:
    mean = decision.interval.mean
    ahead = f"; {said.sides[mean < 0]} is ahead by {abs(mean):.3f} in these seeds" if decision.seeds else ""
    words = {
        "supported": said.supported,
        "contradicted": said.contradicted,
        "no difference that matters": said.no_difference,
        "undecided": f"{said.where}: not settled{ahead}.",
    }
    return words[decision.verdict]


def _evidence(claims: Sequence[Answered], decisions: Mapping[str, Decision]) -> str:
    return "; ".join(
        f"[{BY_ID[it.id].label}]({BY_ID[it.id].question}.md): {_ours(BY_ID[it.id], decisions[it.id])}, "
        f"{decisions[it.id].seeds} seeds"
        for it in claims
    )


def _ours(claim: Primary, decision: Decision) -> str:
    return with_interval(claim.scale, decision.interval)


# ---- what is folded


def _folded(answers: Mapping[str, Answer], decisions: Mapping[str, Decision]) -> list[Block]:
    return [
        Folded("Every claim, its number and its verdict", [_claims_table(PRIMARY, answers, decisions)], "every"),
        Folded("What is undecided, and what it would take", _why_undecided(answers, decisions), "undecided"),
        Folded("The rule", [Text(RULE), Text(SOURCES)], "rule"),
        Folded("What changed against the earlier page", _earlier(decisions), "earlier"),
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


def _claims_table(claims: Sequence[Primary], answers: Mapping[str, Answer], decisions: Mapping[str, Decision]) -> Table:
    measured = {key: it for answer in answers.values() for key, it in answer.finding.primary.items()}

    def row(claim: Primary) -> tuple[str, ...]:
        decision, of_claim = decisions[claim.id], measured.get(claim.id)
        diverged = f"; {of_claim.diverged} runs diverged" if of_claim and of_claim.diverged else ""
        holds = claim.low < 0 < claim.high and decision.verdict == "no difference that matters"
        verdict = decision.verdict + (", as claimed" if holds else "")
        ours = _ours(claim, decision) + diverged
        return (
            f"[{claim.source}]({claim.question}.md)",
            claim.words,
            claim.measure,
            ours,
            _range(claim),
            _claimed(claim),
            str(decision.seeds),
            verdict,
        )

    columns = ("source", "what it says", "measured by", "ours", "allowed", "claimed", "seeds", "verdict")
    return Table(columns, [row(claim) for claim in claims])


def _range(claim: Primary) -> str:
    low, high = (math.exp(x) if claim.scale == "ratio" else x for x in (claim.low, claim.high))
    if math.isinf(claim.high):
        return f"above {low:g}"
    return f"below {high:g}" if math.isinf(claim.low) else f"{low:g} to {high:g}"


def _claimed(claim: Primary) -> str:
    if math.isnan(claim.claimed):
        return ""
    return f"× {math.exp(claim.claimed):.2g}" if claim.scale == "ratio" else f"{claim.claimed:+g}"


def _undecided(
    answers: Mapping[str, Answer], decisions: Mapping[str, Decision]
) -> list[tuple[Primary, str, Sequence[float]]]:
    """Each undecided claim with the seeds that would decide it, in words, and its values."""
    found: list[tuple[Primary, str, Sequence[float]]] = []
    for claim in PRIMARY:
        if decisions[claim.id].verdict == "undecided":
            measured = answers[claim.question].finding.primary if decisions[claim.id].seeds else {}
            values = list(measured[claim.id].values) if measured else []
            enough = needed(claim, values, sum(it.family == claim.family for it in PRIMARY))
            found.append((claim, "over 10,000" if enough is None else str(enough), values))
    return found


def _why_undecided(answers: Mapping[str, Answer], decisions: Mapping[str, Decision]) -> list[Block]:
    """Each undecided claim with the seeds that would decide it, and why they were not spent."""
    says = """Seeds that would decide with probability 0.8, if mean and deviation are those seen and no other claim of
the family is decided at the same look."""
    rows = [
        (claim.label, _ours(claim, decisions[claim.id]), enough, _why_open(answers.get(claim.question), values, enough))
        for claim, enough, values in _undecided(answers, decisions)
    ]
    return [Text(says), Table(("claim", "ours", "seeds", "why they were not spent"), rows)]


def _why_open(answer: Answer | None, values: Sequence[float], enough: str) -> str:
    if answer is None or not len(values):
        return "not measured" if answer is None else f"{findings.UNLEARNED}: {findings.WHY_UNLEARNED}"
    if not all(map(math.isfinite, values)):
        return "a run has no such number"
    look = next((look for look in LOOKS if look > len(values)), None)
    if look is None:
        return "the last look was taken"
    minutes = answer.seconds / 60 * (look - len(values)) / len(values)
    within = enough.isdigit() and int(enough) <= LOOKS[-1]
    cost = f"the look at {look} seeds takes up to {minutes:.0f} minutes more, `--look {look}`"
    return cost if within else f"more than the last look's {LOOKS[-1]}; {cost}"


def _earlier(decisions: Mapping[str, Decision]) -> list[Block]:
    """Verdicts that differ from those of the earlier page."""
    rows = [
        (
            BY_ID[key].label,
            f"{was.number}: {was.verdict}",
            f"{_ours(BY_ID[key], now)}: {now.verdict}",
            was.differs or "the same measure, more seeds and samples",
        )
        for key, was in EARLIER.items()
        if (now := decisions[key]).verdict != FIRST.get(was.verdict, was.verdict)
    ]
    says = f"""The earlier page had 81 rows with 5 seeds and one sample a prompt, and no correction: 29 agreed, 18
disagreed, 34 were undecided. {len(EARLIER)} of its rows are among today's claims; here are those whose verdict differs.
About a dozen were arithmetic and are listed below. The others have an interval without a verdict on the pages of their
questions, or were left out. Of a difference of less than 0.02 it said "undecided", for which there is a verdict now."""
    return [Text(says), Table(("claim", "then", "now", "measured otherwise"), rows)]


# ---- a question


def _section(name: str, answer: Answer, decisions: Mapping[str, Decision]) -> list[Block]:
    """A question with its claims, table, figure, and what was measured besides."""
    finding, claims = answer.finding, [claim for claim in PRIMARY if claim.question == name]
    columns, rows = cells(finding)
    text = (importlib.import_module(f"{findings.QUESTIONS}.{name}").__doc__ or name).strip().partition("\n")[2]
    of_claims: list[Block] = [_claims_table(claims, {name: answer}, decisions)]
    of_claims += [Text(f"{claim.label}: {claim.why}.") for claim in claims if claim.why]
    also = [(it.source, it.words, it.measure, number(interval_over_runs(it.values))) for it in finding.also]
    besides: list[Block] = [
        Text("Also measured, without a verdict."),
        Table(("source", "what it says", "measured by", "ours"), also),
    ]
    unlearned = [] if has_learned(finding) else [Text(f"{findings.UNLEARNED.capitalize()}: {findings.WHY_UNLEARNED}")]
    return [
        Heading(_title(name), 1),
        Text(text.strip().rpartition("\n\n")[0]),
        *unlearned,
        *(of_claims if claims else []),
        Text(
            f"Means ± half a 95% interval over {len(answer.seeds)} seeds; a claim keeps the number of the look that "
            f"decided it. “{START}” is where all runs start, “{COIN}” has random rewards."
        ),
        Table(("", *columns), [(row, *values) for row, values in rows.items()]),
        *([Text(finding.note)] if finding.note else []),
        Figure(f"{name}.png", " and ".join(finding.drawn)),
        *([Figure(f"{name}_curves.png", "scores over the steps of training")] if finding.curves else []),
        *(besides if also else []),
        Text(f"`python -m {findings.QUESTIONS}.{name}`: {answer.seconds:.0f} s here, after the questions before it."),
    ]


def _title(name: str) -> str:
    return (importlib.import_module(f"{findings.QUESTIONS}.{name}").__doc__ or name).strip().partition("\n")[0]


def _checksum(answers: Mapping[str, Answer]) -> str:
    """Of all values of all seeds, without any words."""

    def numbers(answer: Answer) -> list:
        finding = answer.finding
        rows = [list(values) for columns in finding.rows.values() for values in columns.values()]
        return [*rows, *(list(it.values) for it in finding.primary.values()), *(list(it.values) for it in finding.also)]

    return hashlib.sha256(repr([numbers(answer) for answer in answers.values()]).encode()).hexdigest()


def _hardware() -> str:
    """What computed: without names of machines."""
    if jax.default_backend() != "cpu":
        return f"{jax.device_count()} × {jax.devices()[0].device_kind}, jax {jax.__version__}"
    return f"{ablation.cores()} {platform.machine()} cores, jax {jax.__version__}"
