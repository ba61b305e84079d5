"""Ratings: completions of which each was found good or bad, without another one beside it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_jax.data.preferences import (
    NO_PROMPT,
    EncodedPairs,
    preference_of,
    prompt_of,
)
from grpo_jax.data.rows import kind_of, read_rows, text_column
from grpo_jax.data.text import Message, encode_answers
from grpo_jax.data.types import rng
from grpo_jax.errors import UsageError

_ORDER = 1  # stream of random numbers; 0 orders batches


class Rating(NamedTuple):
    """A completion of a prompt, and what was thought of it."""

    prompt: str | list[Message]
    completion: str
    desirable: bool


class EncodedRatings(NamedTuple):
    """M ratings as token ids."""

    prompts: list[list[int]]  # [M], each of at least one token
    completions: list[list[int]]  # [M], each of at least one token
    desirable: list[bool]  # [M]
    notes: tuple[str, ...] = ()  # what was dropped or cut, in words


def read_ratings(source: str | Path, *, chat: bool = False) -> tuple[list[Rating], dict[str, int]]:
    """Ratings of a file, a folder or a data set on the hub.

    Args:
      source: as for `rows.read_rows`. Rows have "prompt", "completion" and "label", true or false, as for TRL's KTO. A
        row of `read_preferences` gives two ratings: its chosen answer is desirable, its rejected one is not.
      chat: as in `read_preferences`.

    Returns:
      The ratings, and how many rows were dropped, by reason.

    Raises:
      UsageError: it cannot be read, a column is missing, or nothing is left.
    """
    ratings, dropped = list[Rating](), Counter[str]()
    for row in read_rows(source):
        parsed = _ratings_of(row, chat=chat)
        if isinstance(parsed, str):
            dropped[parsed] += 1
        else:
            ratings += parsed
    if not ratings:
        raise UsageError(f"no completion of {source} is left ({dict(dropped)}): look at its rows")
    return ratings, dict(dropped)


def _ratings_of(row: Mapping[str, Any], *, chat: bool) -> list[Rating] | str:
    """Returns the ratings of a row, or why there is none."""
    where = getattr(row, "where", "a row")
    if "label" not in row:
        if "completion" in row and "chosen" not in row:
            raise UsageError(
                f"{where} has no column label: say there, by true or false, whether its completion is good"
            )
        pair = preference_of(row, chat=chat)
        if isinstance(pair, str):
            return pair
        return [Rating(pair.prompt, pair.chosen, True), Rating(pair.prompt, pair.rejected, False)]
    prompt, completion = prompt_of(row), text_column(row, "completion")
    if not isinstance(row["label"], bool):
        raise UsageError(f"{where}: column label holds {kind_of(row['label'])}, and should hold true or false")
    if prompt is None:
        return NO_PROMPT
    return [Rating(prompt, completion, row["label"])] if completion.strip() else "with an empty completion"


def encode_ratings(tokenizer: Any, ratings: Sequence[Rating], **options: Any) -> EncodedRatings:
    """Token ids of ratings.

    Args:
      tokenizer: of transformers.
      ratings: some.
      options: those of `encode_answers`.

    Raises:
      UsageError: as `encode_answers`.
    """
    encoded = encode_answers(
        tokenizer,
        [rating.prompt for rating in ratings],
        [(rating.completion,) for rating in ratings],
        rows="completions",
        **options,
    )
    desirable = [ratings[number].desirable for number in encoded.numbers]
    return EncodedRatings(encoded.prompts, [ids for (ids,) in encoded.answers], desirable, encoded.notes)


def with_none(ratings: EncodedRatings) -> EncodedPairs:
    """Each completion, and beside it an empty one: for a loss without an estimate of the KL."""
    return _pairs(ratings, [[] for _ in ratings.completions])


def with_mismatched(ratings: EncodedRatings, seed: int) -> EncodedPairs:
    """Each completion, and beside it one of another prompt: the next of another prompt in a random order.

    Which one it is depends on the ratings and the seed alone. So what a reference gives it can be computed once.

    Args:
      ratings: M.
      seed: of the order.

    Returns:
      M prompts with both.

    Raises:
      UsageError: all have one prompt.
    """
    if all(prompt == ratings.prompts[0] for prompt in ratings.prompts):
        raise UsageError(
            "all completions to train on, or all that are held out, have one prompt, but the KL is estimated from "
            "those of other prompts: give rows of more prompts, or take the reference point zero"
        )
    order = rng(seed, _ORDER).permutation(len(ratings.prompts)).tolist()
    others, other = dict[int, int](), -1
    following = order[0]
    for number in [*order[::-1], *order[::-1]]:  # the second time with the others of the last ones known
        if ratings.prompts[following] != ratings.prompts[number]:
            other = following
        others[number], following = other, number
    return _pairs(ratings, [ratings.completions[others[number]] for number in range(len(order))])


def _pairs(ratings: EncodedRatings, mismatched: Sequence[list[int]]) -> EncodedPairs:
    answers = list(zip(ratings.completions, mismatched, strict=True))
    return EncodedPairs(ratings.prompts, answers, [0.0] * len(answers), ratings.notes, ratings.desirable)
