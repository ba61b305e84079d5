"""Generators of verifiable questions, those of the package reasoning_gym. An entry is a function of its index.

A text such as "2*chain_sum?min_terms=2&max_terms=3,leg_counting" names generators with weights and options.
"""

import ast
import re
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal, NamedTuple

from grpo_jax.errors import UsageError, reason_of
from grpo_jax.options import suggestion

PREFIX = "reasoning_gym:"
AnswerIn = Literal["tags", "line", "text", "stop"]

_SPEC = re.compile(r"(?:(?P<weight>\d+\.?\d*|\.\d+)\*)?(?P<text>(?P<name>[A-Za-z_]\w*)(?:\?.*)?)", re.DOTALL)
_COMMA = re.compile(r",(?=(?:[\d.]+\*)?[A-Za-z_]\w*(?:\?|,|$))")  # others are in the values of options
_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Generator(NamedTuple):
    """A generator, as a text names it."""

    text: str  # its name and options, such as "chain_sum?min_terms=2"
    name: str
    weight: float  # its share of the rows is the weight's share of all weights


def parse_generators(text: str) -> list[Generator]:
    """Parses a text such as "2*chain_sum?min_terms=2,leg_counting", and opens each generator.

    Raises:
      UsageError: The text cannot be read, the package is not installed, or it has no such generator or options.
    """
    generators = []
    for part in _COMMA.split(text):
        match = _SPEC.fullmatch(part.strip())
        if not match or (weight := float(match["weight"] or 1)) <= 0:
            raise UsageError(f"the generator {part!r} cannot be read: write weight*name?option=value&option=value")
        generators.append(Generator(match["text"], match["name"], weight))
        open_generator(match["text"])
    return generators


@lru_cache(maxsize=16)
def generate(text: str, level: int | None, index: int) -> tuple[Any, dict[str, Any]]:
    """Generates an entry.

    Args:
      text: The name and options of the generator.
      level: The level of its curriculum. None: the options decide.
      index: The number of the entry, from 0. There is no last one.

    Returns:
      The generator's object, which grades answers, and the entry: its "question", "answer" and "metadata".
    """
    dataset = open_generator(text, level)
    try:
        return dataset, dataset[index]
    except IndexError:  # it made a list of its first entries
        dataset = _open(text, level, index)
        return dataset, dataset[0]


@lru_cache(maxsize=256)
def open_generator(text: str, level: int | None = None) -> Any:
    """Opens a generator. Options that the text names are the same at every level.

    Raises:
      UsageError: The package is not installed, or it has no such generator or options.
    """
    return _open(text, level, 0)


def _open(text: str, level: int | None, seed: int) -> Any:
    factory, (name, _, written) = _package(), text.partition("?")
    if name not in factory.DATASETS:
        raise UsageError(f"reasoning_gym has no generator {name}: {suggestion(name, factory.DATASETS)}")
    options = dict(_option(part) for part in written.split("&") if part)
    try:
        if level is not None:
            curriculum = factory.create_curriculum(name)
            curriculum.set_global_level(level)
            options = vars(curriculum.generate_configuration()) | options
        return factory.create_dataset(name, **options | {"seed": seed, "size": 1})
    except Exception as error:  # generators check their options by assertions
        raise UsageError(f"the generator {text} refuses its options: {reason_of(error)}") from error


def num_levels(generator: Generator) -> int:
    """Returns the number of levels in the curriculum of a generator, up to the first that it refuses itself.

    Raises:
      UsageError: There is no curriculum, or the generator refuses its first level.
    """
    factory, level = _package(), 0
    if not factory.has_curriculum(generator.name):
        raise UsageError(f"the generator {generator.name} has no levels: leave out --curriculum, or this generator")
    open_generator(generator.text, 0)
    attributes = factory.create_curriculum(generator.name).attributes.values()
    with suppress(UsageError):
        for level in range(1, max(len(attribute.levels) for attribute in attributes)):
            open_generator(generator.text, level)
        return level + 1
    return level


def _package() -> Any:
    try:
        return import_module("reasoning_gym.factory")
    except ImportError as error:
        raise UsageError(f"{PREFIX}NAME needs the package reasoning-gym: pip install reasoning-gym ({error})") from None


def _option(part: str) -> tuple[str, Any]:
    name, _, value = part.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value  # text needs no quotation marks


# ---- answers


def answer_format(answer_in: AnswerIn, stop: str = "") -> str:
    """Returns the sentence that tells the policy where to write its answer."""
    shown = stop.replace("\n", "\\n")
    return {
        "tags": "Write your final answer between <answer> and </answer>.",
        "line": "Write your final answer, and nothing else, on the last line.",
        "text": "Reply with your answer, and nothing else.",
        "stop": f'Reply with your answer, and nothing else, followed by "{shown}".',
    }[answer_in]


def written_answer(answer: str, answer_in: AnswerIn) -> str:
    """Returns a completion that states an answer."""
    return f"<answer>{answer}</answer>" if answer_in == "tags" else answer


def read_answer(text: str, answer_in: AnswerIn) -> str | None:
    """Returns the answer that a completion states, or None without one. The text ends before a stop text."""
    if answer_in == "tags":
        parts = _TAGS.findall(text)
    elif answer_in == "line":
        parts = text.strip().splitlines()
    else:
        parts = [text]
    return parts[-1].strip() or None if parts else None
