"""Rewards of experiments as plain functions of text, which other libraries can also import.

This module imports neither this library nor JAX.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

HAPPY_WORDS = frozenset(
    ("happy", "smiled", "laughed", "love", "loved", "hug", "hugged", "fun", "joy", "glad", "cheerful", "giggled")
)

_SENTENCE = re.compile(r"[^.!?]*[.!?]+")
_WORD = re.compile(r"[a-z']+")


def exact_answer(examples: Sequence[Mapping[str, Any]], completions: Sequence[str]) -> list[float]:
    """Returns 1 for a completion that equals the answer, else 0."""
    return [float(text == example["answer"]) for example, text in zip(examples, completions, strict=True)]


def first_number(examples: Sequence[Mapping[str, Any]], completions: Sequence[str]) -> list[float]:
    """Returns 1 for a completion whose first number is the answer, else 0."""
    numbers = (re.search(r"\d+", text) for text in completions)
    return [float(it is not None and it[0] == example["answer"]) for example, it in zip(examples, numbers, strict=True)]


def hash_number(examples: Sequence[Mapping[str, Any]], completions: Sequence[str]) -> list[float]:
    """Returns 1 for a completion whose number after its last "####" is the answer, else 0, as in GSM8K."""
    numbers = (re.search(r".*####\s*\$?(-?[\d,]*\.?\d+)", text, re.DOTALL) for text in completions)
    return [
        float(it is not None and float(it[1].replace(",", "")) == float(example["answer"].replace(",", "")))
        for example, it in zip(examples, numbers, strict=True)
    ]


def sum_of_numbers(examples: Sequence[Mapping[str, Any]], completions: Sequence[str]) -> list[float]:
    """Returns the sum of the numbers in each text modulo 97, from 0 to 96/97: trivial, and different in a group."""
    return [sum(map(int, text.split())) % 97 / 97 for text in completions]


def happy_sentences(examples: Sequence[Mapping[str, Any]], completions: Sequence[str]) -> list[float]:
    """Returns distinct happy sentences ÷ max(3, complete sentences), from 0 to 1.

    A happy sentence is complete and has at least four words, one of them in HAPPY_WORDS. A repeated sentence counts
    only in the denominator.
    """
    return [_happy_share(text) for text in completions]


def sentences(text: str) -> list[str]:
    """Returns the complete sentences of a text, as lower-case words."""
    results = (" ".join(_WORD.findall(sentence.lower())) for sentence in _SENTENCE.findall(text))
    return [sentence for sentence in results if sentence]


def _happy_share(text: str) -> float:
    results = sentences(text)
    happy = {sentence for sentence in results if len(words := sentence.split()) >= 4 and HAPPY_WORDS & set(words)}
    return len(happy) / max(3, len(results))
