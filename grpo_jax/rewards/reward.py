"""Rewards put together: several functions, weights, and what does not apply."""

import asyncio
import inspect
import math
import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.data.coroutines import run_to_end
from grpo_jax.data.types import Completion, Component, Example, Reward, Rewards, Span
from grpo_jax.errors import UsageError


class Scores(NamedTuple):
    """What B completions earned."""

    rewards: np.ndarray  # float32 [B], Σ weight · component over those that apply; 0 where none does
    applicable: np.ndarray  # bool [B], whether any does
    components: dict[str, np.ndarray]  # name -> float32 [B], unweighted, NaN where it does not apply
    spans: np.ndarray  # object [B], of tuples of `Span`: weighted parts of `rewards`; () where there are none


@np.errstate(invalid="ignore", over="ignore")  # an infinite reward is told by the run, once
def score_completions(
    rewards: Reward | Rewards, examples: Sequence[Example], completions: Sequence[Completion]
) -> Scores:
    """Rewards of completions. Async functions run together.

    Args:
      rewards: one function, or several with weights.
      examples: B, the prompt's columns of each completion.
      completions: B.

    Returns:
      The scores. A NaN that a function returned stays NaN in the sum; None does not apply.

    Raises:
      UsageError: a function returned another number of rewards than there are completions, no numbers, or bad spans.
    """
    named = named_components(rewards)
    answers = [component.reward(examples, completions) for component in named.values()]
    if any(inspect.isawaitable(answer) for answer in answers):
        answers = run_to_end(_gather(answers))
    # Here NaN does not mean "not applicable": one that a function returned has to be seen.
    total, applicable = np.zeros(len(completions), np.float32), np.zeros(len(completions), bool)
    components, parts = {}, np.empty(len(completions), object)
    parts[:] = [()] * len(completions)
    for (name, component), answer in zip(named.items(), answers, strict=True):
        values, applies, own = _checked(name, answer, completions)
        if component.weight:  # a weight of 0 is for rewards that are only watched, whatever they are
            total += np.where(applies, np.float32(component.weight) * values, 0)
            applicable |= applies
            for place, found in own.items():
                parts[place] += tuple(span._replace(reward=component.weight * span.reward) for span in found)
        components[name] = np.where(applies, values, np.nan)
    return Scores(total, applicable, components, parts)


def named_components(rewards: Reward | Rewards) -> Rewards:
    """Several rewards as they are, and one alone as the component "reward"."""
    return rewards if isinstance(rewards, Mapping) else {"reward": Component(rewards)}


def no_reward(examples: Sequence[Example], completions: Sequence[Completion]) -> list[None]:
    """A reward that applies to nothing, where nothing is learned from rewards."""
    return [None] * len(completions)


def graders(rewards: Reward | Rewards) -> dict[str, Any]:
    """The rewards that count what they could not grade, as `grading.Grader` does, by name."""
    named = named_components(rewards)
    return {name: component.reward for name, component in named.items() if hasattr(component.reward, "counts")}


def sources(rewards: Reward | Rewards) -> dict[str, str]:
    """Digests of the files that rewards were loaded from, by name, where graders know them."""
    return {name: grader.source for name, grader in graders(rewards).items() if getattr(grader, "source", "")}


def ungraded_counts(rewards: Reward | Rewards) -> dict[str, int]:
    """Completions that graders had nothing to say about since their start, by "ungraded_" name and reason."""
    return {
        f"ungraded_{name}_{reason.replace(' ', '_')}": count
        for name, grader in graders(rewards).items()
        for reason, count in grader.counts.items()
    }


def ungraded_messages(rewards: Reward | Rewards) -> dict[str, str]:
    """A sentence about each reason why graders had nothing to say, by the names of `ungraded_counts`."""
    return {
        f"ungraded_{name}_{reason.replace(' ', '_')}": (
            f"the reward {name} gave {grader.counts[reason]} completions no number ({reason}), so it is left out of "
            f"theirs: {place_and_reason(message)}"
        )
        for name, grader in graders(rewards).items()
        for reason, message in list(grader.messages.items())
    }


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>.+)')
_ERROR = re.compile(r"[\s|]*[A-Za-z_][\w.]*(Error|Exception|Failure|Timeout|Interrupt|Exit)\b")
_OURS = str(Path(__file__).parent)


def place_and_reason(message: str) -> str:
    """Of a traceback, or of the stack of a process that hung, the user's own line and the last words."""
    frames = [found for found in _FRAME.finditer(message) if not found["file"].startswith((_OURS, "<frozen"))]
    # A traceback ends with the innermost frame, a stack of faulthandler begins with it.
    stack = "most recent call first" in message
    own = [frame for frame in frames if "site-packages" not in frame["file"] and "/lib/python" not in frame["file"]]
    place = (own or frames)[0 if stack else -1] if frames else None
    lines = message.strip().splitlines() or [""]
    errors = [line.strip(" |+") for line in lines if _ERROR.match(line)]  # its message may have more lines
    words = lines[0] if stack else (errors or lines)[-1]
    words = words.removeprefix("grpo_jax.errors.UsageError: ").split("; the end of its stderr")[0][:300]
    return f"{words} ({place['file']}, line {place['line']}, in {place['name']})" if place else words


def new_counts(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """What came to counts, where something came."""
    return {name: count - before[name] for name, count in after.items() if count > before[name]}


async def _gather(answers):
    async def wait(answer):
        return await answer if inspect.isawaitable(answer) else answer

    return await asyncio.gather(*map(wait, answers))


def _checked(
    name: str, answer: Any, completions: Sequence[Completion]
) -> tuple[np.ndarray, np.ndarray, dict[int, tuple[Span, ...]]]:
    """Values float32 `[B]`, 0 where it does not apply; where it applies; and spans, by the completion's place."""
    wrong = UsageError(f"reward {name} must return one number (or None, or spans) for each completion")
    if isinstance(answer, str | bytes | Mapping | Set):  # keys, letters, and what has no order
        raise wrong
    try:
        answer = list(answer)
    except TypeError:
        raise wrong from None
    count = len(completions)
    if len(answer) != count:
        raise UsageError(f"the reward function {name} returned {len(answer)} rewards for {count} completions")
    parts = _spans_of(name, answer, completions)
    try:
        numbers = [
            math.fsum(span.reward for span in parts[i]) if i in parts else value for i, value in enumerate(answer)
        ]
        if any(isinstance(number, str | bytes) for number in numbers):  # float() would read them
            raise wrong
        applies = np.array([number is not None for number in numbers], bool)
        values = np.array([0.0 if number is None else float(number) for number in numbers], np.float32)
    except (TypeError, ValueError, OverflowError):
        raise wrong from None
    return values, applies, parts


def _spans_of(name: str, answer: list[Any], completions: Sequence[Completion]) -> dict[int, tuple[Span, ...]]:
    """Returns the spans that a reward gave in place of numbers, by the completion's place."""
    places = [place for place, value in enumerate(answer) if isinstance(value, list | tuple)]
    if not places:
        return {}
    from grpo_jax.data import spans  # a run without spans does not load it

    try:
        return {i: spans.checked(answer[i], completions[i]) for i in places if spans.are_spans(answer[i])}
    except spans.BadSpans as error:
        raise UsageError(f"reward {name} returned spans that cannot be: {error}") from None
