"""Checks of what reward functions return."""

import itertools
from collections.abc import Iterable, Mapping, Sequence, Set, Sized
from functools import partial
from typing import Any

from grpo_jax.data.types import LARGEST_REWARD, MESSAGE_CHARACTERS, Checked, Completion, Span
from grpo_jax.errors import abbreviate

MOST_SPANS = 1000  # in one completion

# The reasons why completions have no reward.
REASONS = ("timeout", "raised", "died", "nan", "not numbers", "bad spans", "wrong length", "budget")


class BadReward(ValueError):
    """The error of a reward function that gave no reward. Its `reason` is in `REASONS`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def checked_rewards(answer: Any, completions: Sequence[Completion]) -> list[Checked | BadReward]:
    """Returns the reward of each completion: None, spans, a float that may be infinite or NaN, or a `BadReward`.

    Args:
      answer: The value that a reward function returned for the completions.
      completions: The B completions.

    Raises:
      BadReward: The answer is not B numbers or spans.
    """
    count = len(completions)
    if not isinstance(answer, Iterable) or isinstance(answer, str | bytes | Mapping | Set):
        raise BadReward("not numbers", f"the function returned {type(answer).__name__}, not a list")
    # Reads at most one value too many, since the answer may be endless.
    values = list(itertools.islice(answer, count + 1))
    if len(values) != count:
        number = f"{len(answer)}" if isinstance(answer, Sized) else "more" if len(values) > count else f"{len(values)}"
        raise BadReward("wrong length", f"the function returned {number} rewards for {count} completions")
    return [_checked_reward(*pair) for pair in zip(values, completions, strict=True)]


def _checked_reward(value: Any, completion: Completion) -> Checked | BadReward:
    if value is None:
        return None
    if isinstance(value, list | tuple) and all(isinstance(part, list | tuple) for part in value):
        try:
            return checked_spans(value, completion)
        except BadReward as error:  # the other completions keep their rewards
            return error
    if isinstance(value, str | bytes):  # float() would parse them
        raise BadReward("not numbers", f"the function returned a reward of type {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        return BadReward("nan", "the function returned an integer that is larger than any float")
    except (TypeError, ValueError) as error:
        raise BadReward("not numbers", one_line(error)) from None


def checked_spans(value: Sequence[Any], completion: Completion) -> tuple[Span, ...]:
    """Checks and returns the spans that a reward function gave for a completion.

    Args:
      value: Spans, or tuples (start, end, reward) in characters.
      completion: The completion that the spans belong to.

    Raises:
      BadReward: Spans are not in order, overlap, are empty, or lie outside the completion, or a value is no number.
    """
    bad = partial(BadReward, "bad spans")
    if len(value) > MOST_SPANS:
        raise bad(f"there are {len(value)} spans of one completion, and at most {MOST_SPANS} are read")
    spans = []
    for part in value:
        try:
            start, end, reward, *unit = part
            span = Span(int(start), int(end), float(reward), *unit)
        except (TypeError, ValueError, OverflowError):
            raise bad(f"{abbreviate(part)} is no span: it must be (start, end, reward)") from None
        if span[:2] != (start, end) or span.unit not in ("characters", "tokens"):
            raise bad(f"{abbreviate(part)} is no span of characters or tokens")
        length = len(completion) if span.unit == "characters" else len(completion.ids)
        if not 0 <= span.start < span.end <= length:
            raise bad(f"the span from {span.start} to {span.end} is not one of a completion of {length} {span.unit}")
        spans.append(span)
    if len({span.unit for span in spans}) > 1:
        raise bad("the spans of one completion are of characters and of tokens: take one of them")
    for before, span in itertools.pairwise(spans):
        if span.start < before.end:
            raise bad(f"the span from {span.start} begins before the one to {before.end} ends: put them in order")
    return tuple(spans)


def reward_from_json(value: Any) -> Checked | BadReward:
    """Converts a reward of `checked_rewards` back from JSON; a number that float32 cannot hold becomes `BadReward`."""
    if value is None:
        return None
    parts = tuple(Span(*part) for part in value) if isinstance(value, list) else ()
    numbers = [float(part.reward) for part in parts] if isinstance(value, list) else [float(value)]
    for number in (*numbers, sum(numbers)):
        if not abs(number) <= LARGEST_REWARD:
            return BadReward("nan", f"the function returned {number}")
    return parts if isinstance(value, list) else numbers[0]


def one_line(error: BaseException) -> str:
    """Returns the type and the message of an error in one line, shortened."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:MESSAGE_CHARACTERS]
