"""Countdown: make a target from a few numbers by + - * /. No download, and endless.

Problem i is a function of (seed, i). Its target was made from its numbers, so it can be reached. The reward is 1 for an
expression that equals the target, and 0.1 for any other that is well-formed and uses the given numbers alone, each at
most once, as is common (TinyZero gives 1 and 0.1 too, but asks for every number, and gives 0.1 for wrong numbers).

  python -m experiments.tasks.countdown > countdown.jsonl
  grpo-jax train --model DIR --task countdown.jsonl --reward experiments/tasks/countdown.py:countdown_reward
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from grpo_jax.data.rows import Row
from grpo_jax.data.types import Example, rng

LARGEST_NUMBER = 50
TARGETS = range(10, 101)
WELL_FORMED = 0.1
PROMPT = (
    "Using the numbers {numbers}, each at most once, with + - * / and parentheses, make an expression that equals "
    "{target}. End with the expression alone, as in <answer>(1 + 2) / 3</answer>."
)
_POOL_SEED = 50  # for all seeds of a run, so that the held-out problems stay the same

MAX_CHARACTERS = 200
MAX_DEPTH = 20  # of parentheses
_TOKEN = re.compile(r"[0-9]+|[-+*/()]")
_CHARACTERS = frozenset("0123456789+-*/() \t")


def countdown_rows(count: int, seed: int = _POOL_SEED) -> list[Row]:
    """Makes the first `count` different problems.

    Args:
      count: The number of problems.
      seed: The random seed of the problems.

    Returns:
      Rows with "prompt", "numbers", "target" and a "solution".
    """
    rows: dict[str, Row] = {}
    index = 0
    while len(rows) < count:
        row = countdown_row(seed, index)
        rows.setdefault(row["prompt"], row)
        index += 1
    return list(rows.values())


def countdown_row(seed: int, index: int) -> Row:
    """Makes problem `index`: three or four numbers from 1 to 50, and a different target from 10 to 100."""
    generator = rng(seed, index)
    while True:
        numbers = sorted(generator.integers(1, LARGEST_NUMBER + 1, generator.integers(3, 5)).tolist())
        target, solution = _combined(numbers, generator)
        if target in TARGETS and target not in numbers:
            prompt = PROMPT.format(numbers=", ".join(map(str, numbers)), target=target)
            columns = {"prompt": prompt, "numbers": numbers, "target": target, "solution": solution}
            return Row(columns, f"problem {index}")


def countdown_reward(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
    """Returns 1 for an expression that equals the target, 0.1 for another that uses only allowed numbers, else 0.

    The expression is the content of the last <answer>, or the last line if there is none. In "expression = target"
    only the left side counts, in other texts with "=" only the part after the last "=".
    """
    return [
        _worth(example, expression(text, example["target"]))
        for example, text in zip(examples, completions, strict=True)
    ]


def expression(completion: str, target: int) -> str:
    """Returns the part of a completion that should be an expression."""
    # The time of a regular expression could grow with the square of the length.
    inside, closed, _ = completion.rpartition("</answer>")
    _, opened, answer = inside.rpartition("<answer>")
    if not (closed and opened):
        answer = completion.rstrip().rpartition("\n")[2]
    sides = answer.split("=")
    return sides[-2] if len(sides) > 1 and sides[-1].strip() == str(target) else sides[-1]


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """Evaluates an expression of digits, + - * / and parentheses exactly, without running code.

    Numbers have no sign, and there is no power operator.

    Args:
      text: The expression.

    Returns:
      The value, and the numbers in the expression from left to right.

    Raises:
      ValueError: The text is not such an expression, or is too long or too deep.
      ZeroDivisionError: The expression divides by zero.
    """
    if len(text) > MAX_CHARACTERS or not _CHARACTERS.issuperset(text):
        raise ValueError("no expression")
    tokens = _TOKEN.findall(text)[::-1]  # reversed, so that pop() takes the next token
    numbers: list[int] = []

    def factor(depth: int) -> Fraction:
        token = tokens.pop() if tokens else ""
        if token.isdigit():
            numbers.append(int(token))
            return Fraction(int(token))
        if token != "(" or depth == MAX_DEPTH:
            raise ValueError("no number, or too deep")
        value = total(depth + 1)
        if not tokens or tokens.pop() != ")":
            raise ValueError("a parenthesis is open")
        return value

    def product(depth: int) -> Fraction:
        value = factor(depth)
        while tokens and tokens[-1] in "*/":
            value = value * factor(depth) if tokens.pop() == "*" else value / factor(depth)
        return value

    def total(depth: int) -> Fraction:
        value = product(depth)
        while tokens and tokens[-1] in "+-":
            value = value + product(depth) if tokens.pop() == "+" else value - product(depth)
        return value

    value = total(0)
    if tokens:
        raise ValueError("more than an expression")
    return value, numbers


def _worth(example: Example, text: str) -> float:
    try:
        value, numbers = evaluate(text)
    except (ValueError, ZeroDivisionError):
        return 0.0
    if not Counter(numbers) <= Counter(example["numbers"]):
        return 0.0
    return 1.0 if value == example["target"] else WELL_FORMED


def _combined(numbers: Sequence[int], generator: np.random.Generator) -> tuple[int, str]:
    """Combines all numbers pair by pair in random order, with only positive integers; also returns the expression."""
    terms = [(number, str(number)) for number in numbers]
    while len(terms) > 1:
        first, second = (terms.pop(generator.integers(len(terms))) for _ in range(2))
        (large, left), (small, right) = max(first, second), min(first, second)
        results = {"+": large + small, "*": large * small}
        results |= {"-": large - small} if large > small else {}
        results |= {"/": large // small} if large % small == 0 else {}
        sign = sorted(results)[generator.integers(len(results))]
        terms.append((results[sign], f"({left} {sign} {right})"))
    value, text = terms[0]
    return value, text[1:-1]  # without the outer parentheses


if __name__ == "__main__":
    for problem in countdown_rows(8192):
        print(json.dumps(problem))
