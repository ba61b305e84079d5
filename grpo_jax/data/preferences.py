"""Preferences and ratings. Malformed records are dropped and counted.

A preference is a pair of answers to a prompt, of which one was chosen. A rating marks one answer as good or bad.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from grpo_jax.data.rows import Row, completion_text, hash_of_prompt, kind_of, read_messages, read_prompt, read_rows
from grpo_jax.data.text import Message, check_text, encode_answers
from grpo_jax.data.types import LARGEST_REWARD, rng
from grpo_jax.errors import UsageError
from grpo_jax.models.chat import Chat, row_kwargs

# Markers in transcripts of Anthropic's HH-RLHF (2204.05862).
_SIDES = ("chosen", "rejected")
ASSISTANT = "\n\nAssistant:"
TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}
NO_PROMPT = "with an empty prompt"  # a reason why a row is dropped
_NEEDED = "give rows with chosen and rejected, or for kto with completion and label"


class Preference(NamedTuple):
    """A prompt and two answers to it."""

    prompt: str | list[Message]
    chosen: str
    rejected: str
    margin: float = 0.0  # how much better the chosen answer was rated
    kwargs: Mapping[str, Any] = {}  # columns with variables of the chat template: see `chat.row_kwargs`


class Rating(NamedTuple):
    """A completion of a prompt, rated as desirable or not."""

    prompt: str | list[Message]
    completion: str
    desirable: bool
    kwargs: Mapping[str, Any] = {}  # see `Preference`


Kind = TypeVar("Kind", Preference, Rating)


class EncodedPairs(NamedTuple):
    """M prompts with two answers each, as token ids.

    Answers for a policy end with the end of a turn or EOS, which is learned.
    """

    prompts: list[list[int]]  # [M], each of at least one token
    answers: list[tuple[list[int], list[int]]]  # [M], chosen and rejected; for ratings, rated and mismatched
    margins: list[float]  # [M]
    notes: tuple[str, ...] = ()  # sentences about the pairs that were dropped or cut
    desirable: list[bool] | None = None  # [M], for ratings only
    ref_logprobs: np.ndarray | None = None  # float32 [M, 2], from `score_pairs` with the reference; None: there is none


def read_preferences(source: str | Path, *, chat: bool = False) -> tuple[list[Preference], dict[str, int]]:
    """Reads preferences from a file, a folder or a hub data set.

    Args:
      source: See `rows.read_rows`. Rows have "chosen" and "rejected", as texts or chat messages, and perhaps "prompt"
        and "margin". Without "prompt", it is the common beginning of both: the same messages, the turns of transcripts
        of HH-RLHF, or the same words. Prompts of messages may have "tools".
      chat: True to turn transcripts into chat messages for a chat template. Otherwise they stay text.

    Returns:
      The preferences, and the number of dropped rows by reason.

    Raises:
      UsageError: The source cannot be read, a column is missing, or nothing is left.
    """
    return _read(source, "pair", lambda row: preference_of(row, chat=chat))


def _read(
    source: str | Path, name: str, parse: Callable[[Mapping[str, Any]], Kind | list[Kind] | str]
) -> tuple[list[Kind], dict[str, int]]:
    """Returns the parsed records of all rows, and the number of dropped rows by reason."""
    records, dropped = list[Kind](), Counter[str]()
    for row in read_rows(source):
        parsed = parse(row)
        if isinstance(parsed, str):
            dropped[parsed] += 1
        else:
            records += parsed if isinstance(parsed, list) else [parsed]
    if not records:
        reasons = ", ".join(f"dropped {count} rows {why}" for why, count in dropped.items())
        raise UsageError(f"no {name} of {source} is left ({reasons}): look at its rows")
    return records, dict(dropped)


def preference_of(row: Mapping[str, Any], *, chat: bool = False) -> Preference | str:
    """Returns the preference in a row, or the reason why the row is dropped.

    Args:
      row: A row with the columns of `read_preferences`.
      chat: See `read_preferences`.

    Raises:
      UsageError: A column is missing, or has the wrong type.
    """
    row = _with_prompt(row)
    chosen, rejected = (completion_text(row, name, remedy=_NEEDED) for name in _SIDES)
    margin = 0.0 if row.get("margin") is None else row["margin"]
    if not isinstance(margin, int | float) or isinstance(margin, bool) or not abs(margin) <= LARGEST_REWARD:
        raise UsageError(f"{getattr(row, 'where', 'a row')}: column margin should hold a finite number of float32")
    if "prompt" not in row:
        pair = parse_transcripts(chosen, rejected, chat=chat)
    else:
        prompt = prompt_of(row)
        pair = NO_PROMPT if prompt is None else _checked(Preference(prompt, chosen, rejected))
    return pair if isinstance(pair, str) else pair._replace(margin=float(margin), kwargs=_variables(row))


def _variables(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("chat_template_kwargs", "tools") if row.get(name)}


def _with_prompt(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Moves the messages with which both answers begin to the end of the prompt, unless it is among them."""
    where = getattr(row, "where", "a row")
    if not all(isinstance(row.get(name), list) for name in _SIDES):
        return row
    chosen, rejected = (read_messages(row[name], f"{where}: column {name}") for name in _SIDES)
    pairs = list(zip(chosen, rejected, strict=False))
    shared = chosen[: next((number for number, (x, y) in enumerate(pairs) if x != y), len(pairs) - 1)]
    prompt = row.get("prompt") or []
    if isinstance(prompt, str):
        is_repeated = any((message["content"] or "").strip() == prompt.strip() for message in shared)
        prompt = [] if is_repeated else [{"role": "user", "content": prompt}]
    elif isinstance(prompt, list) and shared[: len(prompt)] == read_messages(prompt, f"{where}: column prompt"):
        prompt = []
    if not prompt and not shared:
        raise UsageError(f"{where}: chosen and rejected share no message, so there is no prompt: add a column prompt")
    answers = {"chosen": chosen[len(shared) :], "rejected": rejected[len(shared) :]}
    return Row({**row, "prompt": [*prompt, *shared], **answers}, where)


def prompt_of(row: Mapping[str, Any]) -> str | list[Message] | None:
    """Returns the prompt of a row, or None if it is an empty text.

    Raises:
      UsageError: The prompt is neither text nor chat messages that a policy can answer.
    """
    prompt, where = row.get("prompt"), f"{getattr(row, 'where', 'a row')}: column prompt"
    if not isinstance(prompt, str | list):
        raise UsageError(f"{where} should hold text or chat messages")
    if isinstance(prompt, list):
        prompt = read_prompt(prompt, where)
    check_text(json.dumps(prompt, ensure_ascii=False), where)
    return prompt or None


def parse_transcripts(chosen: str, rejected: str, *, chat: bool = False) -> Preference | str:
    """Splits two transcripts of HH-RLHF, or two other texts, into a prompt and the rest of each.

    The prompt is the common beginning of both, up to its last "Assistant:", or up to its last space without such turns.

    Args:
      chosen: A text, or a transcript whose turns begin with "\\n\\nHuman:" or "\\n\\nAssistant:".
      rejected: The same text with another end.
      chat: True to turn the prompt into chat messages, and to strip the texts.

    Returns:
      The preference, or the reason why there is none.
    """
    shared = os.path.commonprefix([chosen, rejected])  # noqa: RUF071, of texts
    has_turns, end = TURN.search(chosen) or TURN.search(rejected), max(shared.rfind(" "), 0)
    if not has_turns and chosen == rejected:
        return "with equal answers"
    if has_turns:
        end = shared.rfind(ASSISTANT) + len(ASSISTANT) if shared.startswith("\n\nHuman:") and ASSISTANT in shared else 0
    prompt: str | list[Message] = shared[:end]
    if not shared[:end].strip():
        return "without a common prompt"
    if any(TURN.search(text[end:]) for text in (chosen, rejected)):
        return "with turns after the answer"
    if has_turns and chat:
        _, *spoken = TURN.split(shared[:end].removesuffix(ASSISTANT))
        turns = zip(spoken[::2], spoken[1::2], strict=True)
        prompt = [{"role": _ROLES[who], "content": text.strip()} for who, text in turns]
    first, second = (text[end:].strip() if chat else text[end:] for text in (chosen, rejected))
    return _checked(Preference(prompt, first, second))


def _checked(pair: Preference) -> Preference | str:
    if not pair.chosen.strip() or not pair.rejected.strip():
        return "with an empty answer"
    if pair.chosen.strip() == pair.rejected.strip():
        return "with equal answers"
    return pair


def split_preferences(preferences: Sequence[Kind], heldout_share: float = 0.2) -> tuple[list[Kind], list[Kind]]:
    """Splits records into a training and a held-out set by a hash of the prompt. Equal prompts are in the same set.

    Args:
      preferences: All preferences, or all ratings.
      heldout_share: About the share of records that is held out.

    Returns:
      The training set and the held-out set.

    Raises:
      UsageError: One of the sets would be empty.
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


def encode_preferences(chat: Chat, preferences: Sequence[Preference], **options: Any) -> EncodedPairs:
    """Encodes preferences as token ids.

    Args:
      chat: The tokenizer and its chat template.
      preferences: The preferences to encode.
      **options: Options of `encode_answers`.

    Returns:
      The pairs. Their notes count the pairs that were dropped or cut.

    Raises:
      UsageError: See `encode_answers`.
    """
    texts = [(pair.chosen, pair.rejected) for pair in preferences]
    rows, numbers, notes = _encoded(chat, preferences, texts, **options)
    margins = [preferences[number].margin for number in numbers]
    return EncodedPairs([row.prompt for row in rows], [row.answers for row in rows], margins, notes)


def _encoded(chat: Chat, records: Sequence[Kind], texts: Sequence[Sequence[str]], **options: Any) -> Any:
    kwargs = [row_kwargs(chat, record.kwargs) for record in records]
    return encode_answers(chat, [record.prompt for record in records], texts, kwargs=kwargs, **options)


_LABELS = {"true": True, "1": True, "false": False, "0": False}
_ORDER = 1  # the stream of random numbers; stream 0 orders batches


def read_ratings(source: str | Path, *, chat: bool = False) -> tuple[list[Rating], dict[str, int]]:
    """Reads ratings from a file, a folder or a hub data set.

    Args:
      source: See `rows.read_rows`. Rows have "prompt", "completion" and "label" (true or false, or 1 or 0), as for
        TRL's KTO. A row of `read_preferences` gives two ratings: its chosen answer is desirable, the rejected is not.
      chat: See `read_preferences`.

    Returns:
      The ratings, and the number of dropped rows by reason.

    Raises:
      UsageError: The source cannot be read, a column is missing, or nothing is left.
    """
    return _read(source, "completion", partial(_ratings_of, chat=chat))


def _ratings_of(row: Mapping[str, Any], *, chat: bool) -> list[Rating] | str:
    """Returns the ratings in a row, or the reason why the row is dropped."""
    where = getattr(row, "where", "a row")
    if "label" not in row:
        if "completion" in row and "chosen" not in row:
            raise UsageError(
                f"{where} has no column label: say there, by true or false, whether its completion is good"
            )
        pair = preference_of(row, chat=chat)
        if isinstance(pair, str):
            return pair
        answers = {pair.chosen: True, pair.rejected: False}
        return [Rating(pair.prompt, text, is_good, pair.kwargs) for text, is_good in answers.items()]
    prompt, completion = prompt_of(row), completion_text(row, "completion")
    label = _LABELS.get(str(row["label"]).lower())  # in a CSV it is a text
    if label is None:
        raise UsageError(f"{where}: column label holds {kind_of(row['label'])}, and should hold true or false")
    if prompt is None:
        return NO_PROMPT
    rating = Rating(prompt, completion, label, _variables(row))
    return [rating] if completion.strip() else "with an empty completion"


def encode_ratings(chat: Chat, ratings: Sequence[Rating], **options: Any) -> EncodedPairs:
    """Encodes ratings as pairs whose second completion is empty, for a loss without an estimate of the KL.

    Args:
      chat: The tokenizer and its chat template.
      ratings: The ratings to encode.
      options: Options of `encode_answers`.

    Raises:
      UsageError: See `encode_answers`.
    """
    texts = [(rating.completion,) for rating in ratings]
    rows, numbers, notes = _encoded(chat, ratings, texts, noun="completions", **options)
    desirable = [ratings[number].desirable for number in numbers]
    answers = [(*row.answers, list[int]()) for row in rows]
    return EncodedPairs([row.prompt for row in rows], answers, [0.0] * len(answers), notes, desirable)


def with_mismatched(ratings: EncodedPairs, seed: int) -> EncodedPairs:
    """Pairs each completion with a completion of another prompt, the next such completion in a random order.

    The choice depends only on the ratings and the seed, so that reference log-probabilities can be computed once.

    Args:
      ratings: The M ratings from `encode_ratings`.
      seed: The seed of the order.

    Returns:
      M prompts, each with its rated completion and a mismatched one.

    Raises:
      UsageError: All ratings have the same prompt.
    """
    if all(prompt == ratings.prompts[0] for prompt in ratings.prompts):
        raise UsageError(
            "all completions to train on, or all that are held out, have one prompt, but the KL is estimated from "
            "those of other prompts: give rows of more prompts, or take the reference point zero"
        )
    order = rng(seed, _ORDER).permutation(len(ratings.prompts)).tolist()
    others, other = dict[int, int](), -1
    following = order[0]
    for number in [*order[::-1], *order[::-1]]:  # the second pass wraps around
        if ratings.prompts[following] != ratings.prompts[number]:
            other = following
        others[number], following = other, number
    completions = [ids for ids, _ in ratings.answers]
    return ratings._replace(answers=[(ids, completions[others[number]]) for number, ids in enumerate(completions)])
