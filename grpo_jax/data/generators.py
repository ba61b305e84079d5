"""Generators of verifiable questions, those of the package reasoning_gym. An entry is a function of its index.

A text such as "2*chain_sum?min_terms=2&max_terms=3,leg_counting" names generators with weights and options.
"""

import re
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal

from grpo_jax.data.types import LARGEST_REWARD
from grpo_jax.errors import UsageError, reason_of
from grpo_jax.options import suggestion

PREFIX = "reasoning_gym:"
AnswerIn = Literal["tags", "line", "text", "stop"]
_LONGEST = 10  # seconds that an entry may take

_SPEC = re.compile(r"(?:(\d++\.?\d*+|\.\d++)\*)?([A-Za-z_]\w*(?:\?.*)?)", re.DOTALL)
_COMMA = re.compile(r",(?=(?:[\d.]+\*)?[A-Za-z_]\w*(?:\?|,|$))")  # others are in the values of options


# The name of a generator with its options, such as "chain_sum?min_terms=2", and its weight. The weight's share of all
# weights is the generator's share of the rows.
Generator = tuple[str, float]


def parse_generators(text: str) -> list[Generator]:
    """Parses a text such as "2*chain_sum?min_terms=2,leg_counting", and opens each generator.

    Raises:
      UsageError: The text cannot be read, the package is not installed, or it has no such generator or options.
    """
    generators = []
    for part in _COMMA.split(text):
        match = _SPEC.fullmatch(part.strip())
        weight = float(match[1] or 1) if match else 0.0
        if not match or not 0 < weight <= LARGEST_REWARD:
            raise UsageError(f"the generator {part!r} cannot be read: write weight*name?option=value&option=value")
        open_generator(match[2])
        generators.append((match[2], weight))
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
        return dataset, _in_time(lambda: dataset[index])
    except IndexError:  # it made a list of its first entries
        dataset = open_generator.__wrapped__(text, level, seed=index)
        return dataset, dataset[0]
    except Exception as error:  # some generators check no options
        raise UsageError(f"the generator {text} fails: {reason_of(error)}: set other options") from error


def _in_time(make: Callable[[], Any]) -> Any:
    """Calls a function, which may take `_LONGEST` seconds in the main thread. Other threads receive no signals."""
    if threading.current_thread() is not threading.main_thread():
        return make()
    before = signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, _LONGEST, 1)  # again each second: a callback of C code may lose the error
    try:
        return make()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _stop(number: int, frame: object) -> None:
    raise TimeoutError(f"an entry takes more than {_LONGEST} seconds")


@lru_cache(maxsize=256)
def open_generator(text: str, level: int | None = None, seed: int = 0) -> Any:
    """Opens a generator. Options that the text names are the same at every level.

    Raises:
      UsageError: The package is not installed, or it has no such generator or options.
    """
    import yaml  # processes of rewards load this module without it

    factory, (name, _, written) = _factory(), text.partition("?")
    if name not in factory.DATASETS:
        raise UsageError(f"reasoning_gym has no generator {name}: {suggestion(name, factory.DATASETS)}")
    if name == "codeio":
        raise UsageError("codeio runs programs of its data set, and some of them write files: take another generator")
    try:
        options = yaml.safe_load("\n".join(part.replace("=", ": ", 1) for part in written.split("&"))) or {}
        if fixed := {"seed", "size"} & set(options):
            raise UsageError(f"the run sets {' and '.join(sorted(fixed))} itself: leave that out")
        if level is not None:
            curriculum = factory.create_curriculum(name)
            curriculum.set_global_level(level)
            options = vars(curriculum.generate_configuration()) | options
        options |= {"seed": seed, "size": 1}
        return _in_time(lambda: factory.create_dataset(name, **options))  # some make their entries now
    except Exception as error:  # generators check their options by assertions
        raise UsageError(f"the generator {text} refuses its options: {reason_of(error)}") from error


def highest_level(text: str) -> int:
    """Returns the highest level of a generator's curriculum, below the first that the generator refuses itself.

    Raises:
      UsageError: There is no curriculum, or the generator refuses its first level.
    """
    open_generator(text, 0)
    attributes, level = _factory().create_curriculum(text.partition("?")[0]).attributes.values(), 0
    with suppress(UsageError):
        while level + 1 < max(len(attribute.levels) for attribute in attributes) and open_generator(text, level + 1):
            level += 1
    return level


def _factory() -> Any:
    try:
        return import_module("reasoning_gym.factory")
    except ImportError as error:
        raise UsageError(f"{PREFIX}NAME needs the package reasoning-gym: pip install reasoning-gym ({error})") from None


# ---- answers


def answer_format(answer_in: AnswerIn, stop: str = "") -> str:
    """Returns the sentence that tells the policy where to write its answer."""
    if answer_in == "tags":
        return "Write your final answer between <answer> and </answer>."
    if answer_in == "line":
        return "Write your final answer, and nothing else, on the last line."
    end = f", followed by {stop!r}" if answer_in == "stop" else ""
    return f"Reply with your answer, and nothing else{end}."


def read_answer(text: str, answer_in: AnswerIn) -> str | None:
    """Returns the answer that a completion states, or None without one. The text ends before a stop text."""
    parts = [text]
    if answer_in == "tags":
        parts = re.findall("<answer>(.*?)</answer>", text, re.DOTALL)
    elif answer_in == "line":
        parts = text.strip().splitlines()
    return parts[-1].strip() or None if parts else None
