"""The claims asked again on another machine: both numbers side by side, and whether verdicts agree."""

from collections import Counter
from collections.abc import Sequence

from experiments.claims.findings import with_interval
from experiments.claims.numbers import Judged, Numbers
from experiments.claims.page import Block, Heading, Table, Text
from experiments.claims.primary import PRIMARY, Primary

SHARED = """The page's verdicts stay those of the first column; nothing of the second enters them, nor is anything
pooled. Seeds of the same number have the same prompts and the same random keys. Their starts are trained anew by the
same steps. So the two differ by rounding alone, at first: soon a token is sampled otherwise, and from there on the runs
are others. What is asked again is whether an answer hangs on a machine, its arithmetic and its version of jax, not
whether it holds for other seeds. Intervals overlap more easily than those of seeds that are not shared."""


def replication(first: Numbers, others: Sequence[Numbers]) -> list[Block]:
    """The page: a table for each of the other files of numbers."""
    return [
        Heading("The same claims on another machine", 1),
        Text(SHARED),
        *(block for other in others for block in _table(first, other)),
    ]


def _table(first: Numbers, other: Numbers) -> list[Block]:
    both = [
        (claim, first.claims[claim.id], other.claims[claim.id])
        for claim in PRIMARY
        if first.claims[claim.id].decision.seeds and other.claims[claim.id].decision.seeds
    ]
    words = Counter(agreement(one, two) for _, one, two in both)
    said = ", ".join(f"{count} {word}" for word, count in words.items())
    overlapping = sum(overlap(one, two) for _, one, two in both)
    rows = [
        (claim.label, _said(claim, one), _said(claim, two), "yes" if overlap(one, two) else "no", agreement(one, two))
        for claim, one, two in both
    ]
    made = {
        name: "; ".join(dict.fromkeys(it.machine for it in of.questions.values()))
        for name, of in (("first", first), ("other", other))
    }
    minutes = sum(it.seconds for it in other.questions.values()) / 60
    return [
        Text(
            f"First {made['first']}; then {made['other']}, {minutes:.0f} minutes. Of {len(both)} claims the intervals "
            f"of {overlapping} overlap. Verdicts: {said}."
        ),
        *([Text(other.source)] if other.source else []),
        Table(("claim", "first", "again", "intervals overlap", "verdicts"), rows),
    ]


def overlap(one: Judged, two: Judged) -> bool:
    """Whether the 95% intervals have a point in common."""
    a, b = one.decision.interval, two.decision.interval
    return a.low <= b.high and b.low <= a.high


def agreement(one: Judged, two: Judged) -> str:
    """What two verdicts of a claim are to each other."""
    first, again = one.decision.verdict, two.decision.verdict
    if first == again:
        return "the same"
    if "undecided" in (first, again):
        return "open again" if again == "undecided" else "decided again only"
    return "different"


def _said(claim: Primary, judged: Judged) -> str:
    decision = judged.decision
    return f"{with_interval(claim.scale, decision.interval)}, n {decision.seeds}: {decision.verdict}"
