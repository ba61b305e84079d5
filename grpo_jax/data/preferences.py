"""Preferences and ratings. What is malformed is dropped, and counted.

A preference is a pair of answers to a prompt, of which one was chosen. A rating is one answer, which is good or bad.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from grpo_jax.data.rows import check_messages, hash_of_prompt, kind_of, read_rows, text_column
from grpo_jax.data.text import Message, encode_answers
from grpo_jax.data.types import LARGEST_REWARD, rng
from grpo_jax.errors import UsageError

# Of a transcript of Anthropic's HH-RLHF (2204.05862).
ASSISTANT = "\n\nAssistant:"
TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}
NO_PROMPT = "with an empty prompt"  # why a row is dropped


class HasPrompt(Protocol):
    """A record that is held out by its prompt."""

    @property
    def prompt(self) -> str | list[Message]: ...


Kind = TypeVar("Kind", bound=HasPrompt)


class Preference(NamedTuple):
    """A prompt, and two answers to it."""

    prompt: str | list[Message]
    chosen: str
    rejected: str
    margin: float = 0.0  # by how much better the chosen one was said to be


class EncodedPairs(NamedTuple):
    """M prompts with two answers as token ids. For a reward model nothing stands behind an answer: a score is read at
    its last token. A policy learns the EOS behind it."""

    prompts: list[list[int]]  # [M], each of at least one token
    answers: list[tuple[list[int], list[int]]]  # [M], chosen and rejected; of ratings the rated and a mismatched one
    margins: list[float]  # [M]
    notes: tuple[str, ...] = ()  # what was dropped or cut, in words
    desirable: list[bool] | None = None  # [M], of ratings


def read_preferences(source: str | Path, *, chat: bool = False) -> tuple[list[Preference], dict[str, int]]:
    """Preferences of a file, a folder or a data set on the hub.

    Args:
      source: as for `rows.read_rows`. Rows have "chosen" and "rejected": with a "prompt" (and perhaps a "margin")
        the answers to it, and without one transcripts of HH-RLHF.
      chat: transcripts become chat messages, for a chat template; otherwise they stay text.

    Returns:
      The preferences, and how many rows were dropped, by reason.

    Raises:
      UsageError: it cannot be read, a column is missing, or nothing is left.
    """

    def parse(row: Mapping[str, Any]) -> list[Preference] | str:
        pair = preference_of(row, chat=chat)
        return pair if isinstance(pair, str) else [pair]

    return _read(source, "pair", parse)


def _read(
    source: str | Path, name: str, parse: Callable[[Mapping[str, Any]], list[Kind] | str]
) -> tuple[list[Kind], dict[str, int]]:
    """Returns what each row is parsed to, and how many rows were dropped, by reason."""
    records, dropped = list[Kind](), Counter[str]()
    for row in read_rows(source):
        parsed = parse(row)
        if isinstance(parsed, str):
            dropped[parsed] += 1
        else:
            records += parsed
    if not records:
        raise UsageError(f"no {name} of {source} is left ({dict(dropped)}): look at its rows")
    return records, dict(dropped)


def preference_of(row: Mapping[str, Any], *, chat: bool = False) -> Preference | str:
    """The preference of a row, or why there is none.

    Args:
      row: as for `read_preferences`.
      chat: as there.

    Raises:
      UsageError: a column is missing, or holds something else.
    """
    if "prompt" not in row:
        return parse_transcripts(text_column(row, "chosen"), text_column(row, "rejected"), chat=chat)
    prompt, margin = prompt_of(row), row.get("margin")
    margin = 0.0 if margin is None else margin
    if not isinstance(margin, int | float) or isinstance(margin, bool) or not abs(margin) <= LARGEST_REWARD:
        raise UsageError(f"{getattr(row, 'where', 'a row')}: column margin should hold a finite number of float32")
    if prompt is None:
        return NO_PROMPT
    return _checked(Preference(prompt, text_column(row, "chosen"), text_column(row, "rejected"), float(margin)))


def prompt_of(row: Mapping[str, Any]) -> str | list[Message] | None:
    """Returns the prompt of a row, or None if it is an empty text.

    Raises:
      UsageError: the prompt is neither text nor chat messages that a policy can answer.
    """
    prompt, where = row.get("prompt"), f"{getattr(row, 'where', 'a row')}: column prompt"
    if not isinstance(prompt, str | list):
        raise UsageError(f"{where} should hold text or chat messages")
    if isinstance(prompt, list):
        check_messages(prompt, where)
    return prompt or None


def parse_transcripts(chosen: str, rejected: str, *, chat: bool = False) -> Preference | str:
    """Two transcripts of HH-RLHF as a prompt and what the assistant says last in each.

    The prompt is what both have in common, up to the last "Assistant:" in it.

    Args:
      chosen: turns that begin with "\\n\\nHuman:" or "\\n\\nAssistant:".
      rejected: the same, with another end.
      chat: the prompt becomes chat messages, and texts lose the space around them.

    Returns:
      The preference, or why there is none.
    """
    shared = os.path.commonprefix([chosen, rejected])  # noqa: RUF071, of texts
    end = shared.rfind(ASSISTANT) + len(ASSISTANT)
    if end < len(ASSISTANT) or not shared.startswith("\n\nHuman:"):
        return "without a common prompt"
    if any(TURN.search(text[end:]) for text in (chosen, rejected)):
        return "with turns after the answer"
    prompt = shared[:end]
    if not chat:
        return _checked(Preference(prompt, chosen[end:], rejected[end:]))
    _, *spoken = TURN.split(prompt.removesuffix(ASSISTANT))
    messages = [
        {"role": _ROLES[who], "content": text.strip()} for who, text in zip(spoken[::2], spoken[1::2], strict=True)
    ]
    return _checked(Preference(messages, chosen[end:].strip(), rejected[end:].strip()))


def _checked(pair: Preference) -> Preference | str:
    if not pair.chosen.strip() or not pair.rejected.strip():
        return "with an empty answer"
    if pair.chosen.strip() == pair.rejected.strip():
        return "with equal answers"
    return pair


def split_preferences(preferences: Sequence[Kind], heldout_share: float = 0.2) -> tuple[list[Kind], list[Kind]]:
    """Splits preferences into training and held-out ones by a hash of the prompt: equal prompts are on one side.

    Args:
      preferences: all; or completions that were rated.
      heldout_share: about this share is held out, 0.2.

    Returns:
      Both.

    Raises:
      UsageError: one of them would be empty.
    """
    places = [hash_of_prompt(pair.prompt) for pair in preferences]
    training = [pair for pair, at in zip(preferences, places, strict=True) if at >= heldout_share]
    heldout = [pair for pair, at in zip(preferences, places, strict=True) if at < heldout_share]
    if not training or not heldout:
        raise UsageError(
            f"of {len(preferences)} rows with {len(set(places))} prompts {len(heldout)} are held out, by a hash of the "
            f"prompt: give rows of more prompts, or another heldout_share than {heldout_share}"
        )
    return training, heldout


def encode_preferences(tokenizer: Any, preferences: Sequence[Preference], **options: Any) -> EncodedPairs:
    """Token ids of preferences.

    Args:
      tokenizer: of transformers.
      preferences: pairs.
      **options: those of `encode_answers`.

    Returns:
      The pairs; their notes count what was dropped and cut.

    Raises:
      UsageError: as `encode_answers`.
    """
    texts = [(pair.chosen, pair.rejected) for pair in preferences]
    prompts, answers, numbers, notes = encode_answers(
        tokenizer, [pair.prompt for pair in preferences], texts, **options
    )
    margins = [preferences[number].margin for number in numbers]
    return EncodedPairs(prompts, [(chosen, rejected) for chosen, rejected in answers], margins, notes)


_ORDER = 1  # stream of random numbers; 0 orders batches


class Rating(NamedTuple):
    """A completion of a prompt, and what was thought of it."""

    prompt: str | list[Message]
    completion: str
    desirable: bool


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
    return _read(source, "completion", partial(_ratings_of, chat=chat))


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


def encode_ratings(tokenizer: Any, ratings: Sequence[Rating], **options: Any) -> EncodedPairs:
    """Encodes ratings as pairs whose second completion is empty, for a loss without an estimate of the KL.

    Args:
      tokenizer: of transformers.
      ratings: some.
      options: those of `encode_answers`.

    Raises:
      UsageError: as `encode_answers`.
    """
    texts = [(rating.completion,) for rating in ratings]
    prompts, completions, numbers, notes = encode_answers(
        tokenizer, [rating.prompt for rating in ratings], texts, rows="completions", **options
    )
    desirable = [ratings[number].desirable for number in numbers]
    answers = [(ids, list[int]()) for (ids,) in completions]
    return EncodedPairs(prompts, answers, [0.0] * len(answers), notes, desirable)


def with_mismatched(ratings: EncodedPairs, seed: int) -> EncodedPairs:
    """Pairs each completion with one of another prompt: the next of another prompt in a random order.

    Which one it is depends on the ratings and the seed alone. So what a reference gives it can be computed once.

    Args:
      ratings: M, of `encode_ratings`.
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
    completions = [ids for ids, _ in ratings.answers]
    return ratings._replace(answers=[(ids, completions[others[number]]) for number, ids in enumerate(completions)])
