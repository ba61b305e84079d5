"""The turns of an episode, as a line of rollouts.jsonl has them, for people to read."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple


class Part(NamedTuple):
    """What the policy said in a turn, or what the environment answered."""

    number: int  # of the turn, from 1
    is_own: bool  # of the policy
    tokens: list[str]  # texts of them
    logprobs: list[float | None]

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.tokens)

    @property
    def mean_probability(self) -> float | None:
        """The geometric mean over tokens; None where a probability is not known."""
        known = [logprob for logprob in self.logprobs if logprob is not None and math.isfinite(logprob)]
        return math.exp(min(0.0, sum(known) / len(known))) if known and len(known) == len(self.tokens) else None


def parts_of(group: Mapping[str, Any], i: int) -> list[Part]:
    """The parts of completion i of a group, in order; none where no environment answers.

    Args:
      group: a line of rollouts.jsonl. Its "turns" number the turn of each token, negative where the environment said
        it.
      i: from 0.
    """
    turns, tokens = _at(group, "turns", i), _at(group, "tokens", i)
    logprobs = [*_at(group, "logprobs", i), *[None] * len(tokens)]
    rows = groupby(zip(turns, tokens, logprobs, strict=False), key=lambda row: row[0])
    parts = ((turn, [*chosen]) for turn, chosen in rows)
    return [Part(abs(turn), turn > 0, [row[1] for row in chosen], [row[2] for row in chosen]) for turn, chosen in parts]


def of_turn(group: Mapping[str, Any], name: str, i: int, number: int) -> float | None:
    """A number of a turn, such as its reward; None where there is none.

    Args:
      group: a line of rollouts.jsonl.
      name: "turn_rewards" or "turn_advantages".
      i: the completion, from 0.
      number: of the turn, from 1.
    """
    values = _at(group, name, i)
    return values[number - 1] if 0 < number <= len(values) else None


def _at(group: Mapping[str, Any], name: str, i: int) -> Sequence[Any]:
    values = group.get(name) or []
    return values[i] if i < len(values) else []
