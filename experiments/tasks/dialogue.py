"""Dialogues to answer, and two rules that replace human judgements of answers.

The rules are crude on purpose: each is a sentence long and needs only the text, no model. They are analogues of
helpfulness and honesty, not measurements: an answer may take up every word and still be useless.
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
# Words of four or more letters that do not describe what is asked for.
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
    """Returns the beginning of a dialogue: up to the assistant's first turn, or up to the user's first message."""
    if isinstance(prompt, str):
        return prompt.split(ASSISTANT)[0]
    return prompt[: next((i for i, message in enumerate(prompt, 1) if message["role"] == "user"), len(prompt))]


def question(prompt: str | list[Message]) -> str:
    """Returns the last message of the user."""
    if isinstance(prompt, str):
        return TURN.split(prompt.removesuffix(ASSISTANT))[-1].strip()
    return prompt[-1]["content"]


def split_by_dialogue(preferences: Sequence[Preference], number: int) -> list[list[Preference]]:
    """Splits pairs into parts of about equal size, by a hash of the beginning of their dialogue.

    Data sets have pairs from several turns of a dialogue, whose prompts differ. They all go into the same part.

    Args:
      preferences: The pairs.
      number: The number of parts.

    Raises:
      UsageError: A part would be empty.
    """
    parts: list[list[Preference]] = [[] for _ in range(number)]
    for pair in preferences:
        parts[int(number * hash_of_prompt(opening(pair.prompt)))].append(pair)
    if not all(parts):
        raise UsageError(f"{len(preferences)} pairs do not fill {number} parts: give more")
    return parts


def pack_chosen(pairs: EncodedPairs, eos_id: int, max_tokens: int) -> Packed:
    """Packs prompts and chosen answers into rows for SFT.

    Args:
      pairs: The pairs, whose answers were cut to `max_tokens`.
      eos_id: The EOS that ends answers of fewer than `max_tokens` tokens. Longer answers were cut and get no EOS.
      max_tokens: The length of the longest answer (T).

    Returns:
      Rows that are wide enough for at least two texts.
    """
    answers = [[*chosen, eos_id][:max_tokens] for chosen, _ in pairs.answers]
    longest = max(len(prompt) + len(answer) for prompt, answer in zip(pairs.prompts, answers, strict=True))
    return pack(pairs.prompts, answers, width=2 * longest)


def dialogue_rows(preferences: Sequence[Preference]) -> list[Example]:
    """Makes a row for each different prompt, with the user's last message in the column "question"."""
    rows = {repr(pair.prompt): {"prompt": pair.prompt, "question": question(pair.prompt)} for pair in preferences}
    return list(rows.values())


def taken_up(examples: Sequence[Example], completions: Sequence[Completion]) -> list[float | None]:
    """Returns the analogue of helpfulness: the share of the question's content words in the answer, from 0 to 1.

    A content word has at least four letters and is not a function word. The answer takes it up with any word that
    begins with the same five letters. An answer that refuses or is cut off gets 0.

    Args:
      examples: The examples, with the column "question".
      completions: The answers.

    Returns:
      A number for each answer; None if the question has no content words.
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
    """Returns the analogue of honesty: 1 for an answer that hedges, 0 if it is certain without ground, else ½.

    An answer hedges with words such as "I think", "not sure" or "might". It is certain without ground if it does not
    hedge, and contains a number or a word such as "always" or "never" that the question does not contain.

    Args:
      examples: The examples, with the column "question".
      completions: The answers.

    Returns:
      A number for each answer.
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
