"""The claims asked again on another machine: both numbers side by side, and whether verdicts agree."""

import math
from collections import Counter
from collections.abc import Sequence

from scipy import special

from experiments.claims.findings import with_interval
from experiments.claims.numbers import Judged, Numbers
from experiments.claims.page import Block, Heading, Table, Text
from experiments.claims.primary import PRIMARY, Primary

FAR = 1.96  # standard errors between two means: by chance one claim in twenty
SHARED = """The page's verdicts stay those of the first; nothing of the second enters them, and nothing is pooled. Seeds
of the same number have the same prompts and random keys. Their starts are trained by the same steps, and differ all the
same: hundreds of steps make a rounding large. So a seed on another machine is nearly a new draw. What is asked again is
whether an answer hangs on the machine, its arithmetic, its jax and the chances of starts and sampling."""
APART = """“Apart” is the distance of the two means in standard errors, as if no seed were shared: above 1.96 is by
chance one claim in twenty. “Decided at first only” may be for want of seeds: the second has fewer."""


def replication(first: Numbers, others: Sequence[Numbers]) -> list[Block]:
    """The page: a table for each of the other files of numbers."""
    return [
        Heading("The same claims on another machine", 1),
        Text(SHARED),
        *(block for other in others for block in _table(first, other)),
    ]


def in_words(first: Numbers, other: Numbers) -> str:
    """How many intervals overlap, and what verdicts are to each other."""
    both = _both(first, other)
    verdicts = Counter(agreement(one, two) for _, one, two in both)
    said = ", ".join(f"{count} {word}" for word, count in verdicts.items())
    overlapping = sum(overlap(one, two) for _, one, two in both)
    distances = [apart(one, two) for _, one, two in both]
    far = sum(distance > FAR for distance in distances)
    turned = [claim.label for claim, one, two in both if turns(one, two)]
    other_way = f"; who is ahead is another in {len(turned)} ({'; '.join(turned)})" if turned else ""
    return (
        f"of {len(both)} claims the intervals of {overlapping} overlap, and the means of {far} are more than {FAR} "
        f"standard errors apart. The largest distance is {max(distances):.1f}; by chance alone the largest of "
        f"{len(both)} is at least that in at most {by_chance(distances):.0%} of repetitions. Verdicts: "
        f"{said}{other_way}"
    )


def _both(first: Numbers, other: Numbers) -> list[tuple[Primary, Judged, Judged]]:
    """The claims that both have measured."""
    found = ((claim, first.claims[claim.id], other.claims[claim.id]) for claim in PRIMARY)
    return [(claim, one, two) for claim, one, two in found if one.decision.seeds and two.decision.seeds]


def _table(first: Numbers, other: Numbers) -> list[Block]:
    rows = [
        (
            claim.label,
            _said(claim, one),
            _said(claim, two),
            "yes" if overlap(one, two) else "no",
            f"{apart(one, two):.1f}",
            agreement(one, two),
        )
        for claim, one, two in _both(first, other)
    ]
    seconds = sum(it.seconds for it in other.questions.values())
    time = "" if math.isnan(seconds) else f", {seconds / 60:.0f} minutes"
    return [
        Text(f"First {_machine(first)}; then {_machine(other)}{time}, code {_code(other)}: {in_words(first, other)}."),
        *([Text(other.source)] if other.source else []),
        Table(("claim", "first", "again", "intervals overlap", "apart", "verdicts"), rows),
        Text(APART),
    ]


def _machine(numbers: Numbers) -> str:
    return " and ".join(dict.fromkeys(told.machine for told in numbers.questions.values()))


def _code(numbers: Numbers) -> str:
    return " and ".join(dict.fromkeys(told.code for told in numbers.questions.values()))


def overlap(one: Judged, two: Judged) -> bool:
    """Whether the 95% intervals have a point in common."""
    a, b = one.decision.interval, two.decision.interval
    return a.low <= b.high and b.low <= a.high


def apart(one: Judged, two: Judged) -> float:
    """|m₁ − m₂| / √(e₁² + e₂²), with each mean's standard error e from its interval: large is no chance."""
    decisions = (one.decision, two.decision)
    halves = [(it.interval.high - it.interval.low) / 2 for it in decisions]
    errors = [half / special.stdtrit(it.seeds - 1, 0.975) for half, it in zip(halves, decisions, strict=True)]
    return abs(decisions[0].interval.mean - decisions[1].interval.mean) / math.hypot(*errors)


def by_chance(distances: Sequence[float]) -> float:
    """Bonferroni's bound n · P(|z| > max): however claims depend on each other, chance gives no more."""
    return min(1.0, len(distances) * math.erfc(max(distances) / math.sqrt(2)))


def turns(one: Judged, two: Judged) -> bool:
    """Whether the means have opposite signs, and neither is a difference that does not matter."""
    if "no difference that matters" in (one.decision.verdict, two.decision.verdict):
        return False
    return one.decision.interval.mean * two.decision.interval.mean < 0


def agreement(one: Judged, two: Judged) -> str:
    """What two verdicts of a claim are to each other."""
    first, again = one.decision.verdict, two.decision.verdict
    if first == again:
        return "undecided in both" if first == "undecided" else "the same"
    if "undecided" in (first, again):
        return "decided at first only" if again == "undecided" else "decided again only"
    return "different"


def _said(claim: Primary, judged: Judged) -> str:
    decision = judged.decision
    return f"{with_interval(claim.scale, decision.interval)}, n {decision.seeds}: {decision.verdict}"
