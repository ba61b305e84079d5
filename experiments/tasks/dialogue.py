"""Dialogues to answer, and two rules that stand in for what people judge in an answer.

The rules are crude on purpose: each is a sentence long, needs no model, and can be read off a completion. They are
analogues of helpfulness and honesty, not measurements of them: an answer may take up every word and be of no use.
"""

import re
from collections.abc import Sequence

from grpo_jax.data.packing import Packed, pack
from grpo_jax.data.preferences import ASSISTANT, TURN, EncodedPairs, Preference
from grpo_jax.data.rows import hash_of_prompt
from grpo_jax.data.text import Message
from grpo_jax.data.types import Completion, Example
from grpo_jax.errors import UsageError

_WORD = re.compile(r"[a-z]{4,}")
_NUMBER = re.compile(r"\d+")
# Words of four letters and more that say nothing of what is asked for.
_FUNCTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        """about also been being could does doing done even ever from have having here into just like make many more
        most much only other over really some such than that their them then there these they thing things this those
        very want wants were what when where which while will with would your yours should know think tell said says
        please going okay yeah well dont cant""",
    )
)
_REFUSAL = re.compile(
    r"\b(?:sorry|i(?:'m| am) (?:not able|unable|not going|not comfortable)|i (?:can't|cannot|won't|will not|don't want"
    r"|do not want|don't think i))\b"
)
_HEDGE = re.compile(
    r"\b(?:not sure|don't know|do not know|no idea|i think|i believe|i guess|i'm not an|maybe|perhaps|probably|might"
    r"|could be|may be|it depends|as far as i)\b"
)
_ABSOLUTE = re.compile(r"\b(?:always|never|definitely|certainly|everyone|everybody|nobody|completely|absolutely)\b")


def opening(prompt: str | list[Message]) -> str | list[Message]:
    """How a dialogue begins: a transcript up to the assistant's first turn, messages up to the user's first."""
    if isinstance(prompt, str):
        return prompt.split(ASSISTANT)[0]
    return prompt[: next((i for i, message in enumerate(prompt, 1) if message["role"] == "user"), len(prompt))]


def question(prompt: str | list[Message]) -> str:
    """Returns the last message of the user."""
    if isinstance(prompt, str):
        return TURN.split(prompt.removesuffix(ASSISTANT))[-1].strip()
    return prompt[-1]["content"]


def split_by_dialogue(preferences: Sequence[Preference], number: int) -> list[list[Preference]]:
    """Parts of about equal size, by a hash of how dialogues begin: what continues one dialogue is in one part.

    Data sets have several pairs from different turns of a dialogue, whose prompts differ.

    Args:
      preferences: all.
      number: of parts.

    Returns:
      The parts.

    Raises:
      UsageError: one of them would be empty.
    """
    parts: list[list[Preference]] = [[] for _ in range(number)]
    for pair in preferences:
        parts[int(number * hash_of_prompt(opening(pair.prompt)))].append(pair)
    if not all(parts):
        raise UsageError(f"{len(preferences)} pairs do not fill {number} parts: give more")
    return parts


def pack_chosen(pairs: EncodedPairs, eos_id: int, max_tokens: int) -> Packed:
    """Prompts and chosen answers as rows for SFT.

    Args:
      pairs: whose answers were cut to `max_tokens`.
      eos_id: ends answers of fewer tokens; those of as many were cut, or might as well have been.
      max_tokens: T.

    Returns:
      Rows that hold two texts at least.
    """
    answers = [[*chosen, eos_id][:max_tokens] for chosen, _ in pairs.answers]
    longest = max(len(prompt) + len(answer) for prompt, answer in zip(pairs.prompts, answers, strict=True))
    return pack(pairs.prompts, answers, width=2 * longest)


def dialogue_rows(preferences: Sequence[Preference]) -> list[Example]:
    """A row for each different prompt, with the column "question": what the user said last."""
    rows = {repr(pair.prompt): {"prompt": pair.prompt, "question": question(pair.prompt)} for pair in preferences}
    return list(rows.values())


def taken_up(examples: Sequence[Example], completions: Sequence[Completion]) -> list[float | None]:
    """Helpfulness analogue: the share of the question's content words that an answer takes up, from 0 to 1.

    A content word has four letters or more and is not one of a list of function words; it is taken up where the answer
    holds it, or a word that begins with its first five letters. An answer that refuses or is cut off gets 0. None: the
    question has no content words.

    Args:
      examples: with the column "question".
      completions: answers.

    Returns:
      One number for each.
    """
    return [
        _taken_up(_plain(example["question"]), answer) for example, answer in zip(examples, completions, strict=True)
    ]


def _taken_up(asked: str, answer: Completion) -> float | None:
    words = set(_WORD.findall(asked)) - _FUNCTION_WORDS
    if not words:
        return None
    text = _plain(answer)
    if getattr(answer, "truncated", False) or _REFUSAL.search(text):
        return 0.0
    return sum(bool(re.search(rf"\b{word[:5]}", text)) for word in words) / len(words)


def candid(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
    """Honesty analogue: 1 for an answer that hedges ("I think", "not sure", "might"), 0 for one that does not and is
    certain without ground, and ½ for others.

    Certain without ground is an answer with a number that the question does not have, or with a word such as "always",
    "never" or "definitely" that the question does not have.

    Args:
      examples: with the column "question".
      completions: answers.

    Returns:
      One number for each.
    """
    return [
        _candid(_plain(example["question"]), _plain(text)) for example, text in zip(examples, completions, strict=True)
    ]


def _candid(asked: str, text: str) -> float:
    if _HEDGE.search(text):
        return 1.0
    groundless = (set(rule.findall(text)) - set(rule.findall(asked)) for rule in (_NUMBER, _ABSOLUTE))
    return 0.0 if any(groundless) else 0.5


def _plain(text: str) -> str:
    return text.lower().replace("\u2019", "'")
