"""Rewards for parts of a completion, such as steps of a proof or lines of code."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from grpo_jax.data.text import token_pieces
from grpo_jax.data.types import MOST_SPANS, Completion, Span
from grpo_jax.errors import abbreviate


class BadSpans(ValueError):
    """The reason why spans do not fit a completion."""


def checked(value: Sequence[Any], completion: Completion) -> tuple[Span, ...]:
    """Checks and returns the spans that a reward function gave for a completion.

    Args:
      value: Spans, or tuples (start, end, reward) in characters.
      completion: The completion that the spans belong to.

    Raises:
      BadSpans: Spans are not in order, overlap, are empty, or lie outside the completion, or a value is no number.
    """
    if len(value) > MOST_SPANS:
        raise BadSpans(f"there are {len(value)} spans of one completion, and at most {MOST_SPANS} are read")
    spans = tuple(_span(part) for part in value)
    for span in spans:
        length = len(completion) if span.unit == "characters" else len(completion.ids)
        if not 0 <= span.start < span.end <= length:
            raise BadSpans(
                f"the span from {span.start} to {span.end} is not one of a completion of {length} {span.unit}"
            )
    if len({span.unit for span in spans}) > 1:
        raise BadSpans("the spans of one completion are of characters and of tokens: take one of them")
    for before, span in itertools.pairwise(spans):
        if span.start < before.end:
            raise BadSpans(f"the span from {span.start} begins before the one to {before.end} ends: put them in order")
    return spans


def _span(part: Any) -> Span:
    try:
        start, end, reward, *unit = part
        span = Span(int(start), int(end), float(reward), *unit)
    except (TypeError, ValueError, OverflowError):
        raise BadSpans(f"{abbreviate(part)} is no span: it must be (start, end, reward)") from None
    if span[:2] != (start, end) or span.unit not in ("characters", "tokens"):
        raise BadSpans(f"{abbreviate(part)} is no span of characters or tokens")
    return span


def in_tokens(
    spans: Sequence[Span], completion: Completion, decode: Callable[[Sequence[int]], str]
) -> tuple[Span, ...]:
    """Converts spans to tokens: from the token with the first character of a span to the token with its last.

    Args:
      spans: Spans that passed `checked`, from one reward or several.
      completion: The completion that the spans belong to, or its final part, with all its ids.
      decode: Decodes token ids to text.

    Returns:
      The spans, ordered by their ends. A token may be in two spans.
    """
    if any(span.unit == "characters" for span in spans):
        whole = decode(completion.ids)
        before = max(whole.rfind(completion), 0)  # the reward may have read only the final part of the text
        ends = np.cumsum([len(piece) for piece in token_pieces(completion.ids, whole, decode)])

        def token(character: int) -> int:
            """Returns the token with a character: the first token whose piece of the text ends after it."""
            return int(np.searchsorted(ends, before + character, side="right"))

        spans = [
            span if span.unit == "tokens" else Span(token(span.start), token(span.end - 1) + 1, span.reward, "tokens")
            for span in spans
        ]
    return tuple(sorted(spans, key=lambda span: (span.end, span.start)))
