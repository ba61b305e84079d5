r"""Rewards that many tasks need: answers, formats and lengths.

Each function makes a reward, a function of examples and completions. To run a reward in a separate process with a
deadline, use `Grader("grpo_jax.rewards.builtin:math_answer", arguments={"lenient": True}, chunk=1)`. Do this for
`math_answer` and `matches`, which may never finish on some texts of a model.

In an episode these rewards read only the policy's turns. Answers and formats are read from its last turn. Lengths and
repetitions count its tokens in all turns.

The functions in `answers` find and compare answers. No text is ever evaluated as code.
"""

import importlib.util
import logging
import operator
import re
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np

from grpo_jax.data.generators import generate, parse_generators, read_answer
from grpo_jax.data.rows import column
from grpo_jax.data.types import Completion, Example, Reward
from grpo_jax.errors import UsageError
from grpo_jax.models.chat import opened_text
from grpo_jax.rewards.answers import (
    Extract,
    boxed_answer,
    hash_number,
    parse_number,
    read_formula,
    same_formula,
    same_text,
    stated_answer,
    stated_number,
)
from grpo_jax.rewards.worker import is_worker

# The pattern of GSM8K's own code (openai/grade-school-math), which takes the first match and compares texts.
_GSM8K = re.compile(r"#### (\-?[0-9\.\,]+)")


def last_action(completion: str) -> str:
    """Returns the policy's last action: the last turn of an episode, or the whole completion."""
    return completion.actions[-1] if isinstance(completion, Completion) else completion


def _opened(example: Example, completion: str) -> str:
    """Returns the beginning of the policy's last turn that the chat template wrote, such as <think>."""
    turns = completion.turns if isinstance(completion, Completion) else ()
    before = turns[-2].observation if len(turns) > 1 else example.get("prompt")
    return opened_text(before) if isinstance(before, str) else ""


# ---- answers


def _same_by_sympy(stated: str, expected: str) -> bool:
    """Returns whether math-verify considers both equal. It may never finish.

    It reads words as products of letters, ignores bases, and takes letters behind a number for a unit. So formulas
    with words or a base are different, and so are a number and a formula with variables.
    """
    import math_verify

    # It warns that its own deadlines are off. The deadline of the process replaces them.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Only LaTeX is read, since plain expressions would go to sympy's parser, which evaluates code.
    latex = [math_verify.LatexExtractionConfig()]

    def parsed(formula: str):
        return math_verify.parse(f"${formula}$", latex, fallback_mode="no_fallback", parsing_timeout=None)

    formulas = [re.sub(r"\\[a-zA-Z]+", "", formula) for formula in (stated, expected)]
    if any("$" in formula or re.search(r"[a-zA-Z]{4}|\d\s*_", formula) for formula in formulas):
        return False
    has_variable = [re.search("[a-df-hj-zA-Z]", formula) is not None for formula in formulas]
    if any(has_variable) and any(parse_number(formula) is not None for formula in (stated, expected)):
        return False
    values = parsed(expected), parsed(stated)
    return bool(math_verify.verify(*values, timeout_seconds=None)) and not _are_small_and_differ(*values)


def _are_small_and_differ(*values: list[Any]) -> bool:
    """Returns whether these are numbers below 0.001 that differ in five digits.

    math-verify compares a fixed number of decimals, in which small numbers are equal.
    """
    if not all(getattr(value[0], "is_number", False) and value[0].is_finite and value[0] for value in values):
        return False  # math-verify compares with 0 exactly
    first, second = (value[0].evalf() for value in values)
    largest = max(abs(first), abs(second))
    return bool(largest < 1e-3 and abs(first - second) > 1e-5 * largest)


def exact_answer(column: str = "answer", extract: Extract = str.strip) -> Reward:
    """Makes a reward: 1 if the completion's answer equals the example's, as a number or as a text, else 0.

    Args:
      column: The column of the example with the answer.
      extract: Extracts the answer from a completion, such as `last_number`.

    Returns:
      The reward.
    """
    return partial(_graded, column, extract, str.strip, same_text)


def gsm8k_answer(column: str = "answer", lenient: bool = False) -> Reward:
    r"""Makes a reward: 1 if the completion's number equals the example's, else 0.

    Args:
      column: The column of the example with a solution that ends with "#### 18", or with only the number.
      lenient: True to read the number in \boxed{}, after "answer is" or at the end of a text without "####" and a
        number. Otherwise the number must follow the last "####", without a second number on its line.

    Returns:
      The reward.
    """

    def expected(text: str) -> Any:
        return hash_number(text if "####" in text else f"#### {text}")

    return partial(_graded, column, stated_number if lenient else hash_number, expected, operator.eq)


def gsm8k_official(column: str = "answer") -> Reward:
    """Makes a reward: 1 if the completion passes the check in GSM8K's own code, else 0.

    The check takes the number directly after the first "#### ", removes commas, and compares texts. It rejects
    "#### $18" and "#### 18.00". Published scores use it, so report it next to `gsm8k_answer`.

    Args:
      column: As for `gsm8k_answer`.

    Returns:
      The reward.
    """

    def number(text: str) -> str | None:
        match = _GSM8K.search(text)
        return match and match[1].replace(",", "")

    def expected(text: str) -> str | None:
        return number(text if "####" in text else f"#### {text}")

    return partial(_graded, column, number, expected, operator.eq)


def math_answer(column: str = "answer", lenient: bool = False, sympy: bool | None = None) -> Reward:
    r"""Makes a reward: 1 if the completion's formula equals the example's, else 0.

    Args:
      column: The column of the example with only the formula, or with a solution that has it in \boxed{...}.
      lenient: True to read, without \boxed{...}, the text after "answer is", else the last $...$, else the last number.
      sympy: True to compare formulas that are written differently by the package math-verify. None: if it is installed.

    Returns:
      The reward.

    Raises:
      UsageError: math-verify is not installed, or would run outside of a `Grader`, where nothing can stop it.
    """
    installed = importlib.util.find_spec("math_verify") is not None
    if sympy and not installed:
        raise UsageError("math_answer needs the package math-verify for sympy=True: pip install 'grpo_jax[math]'")
    by_sympy = installed if sympy is None else sympy
    if by_sympy and not is_worker():
        raise UsageError(
            "math_answer compares formulas by sympy, which can take for ever: name it to a Grader, or give sympy=False"
        )
    if by_sympy:
        _same_by_sympy("x+1", "1+x")  # loads sympy now, outside of any deadline

    same = partial(same_formula, same_leaf=_same_by_sympy if by_sympy else None)

    def expected(text: str) -> str:
        boxed = boxed_answer(text)
        return text if boxed is None else boxed

    return partial(_graded, column, stated_answer if lenient else boxed_answer, expected, same)


def _graded(
    column: str,
    extract: Callable[[str], Any],
    expected: Callable[[str], Any],
    same: Callable[[Any, Any], bool],
    examples: Sequence[Example],
    completions: Sequence[Completion],
) -> list[float]:
    if any(example.get(column) is None for example in examples):
        raise UsageError(
            f"a reward compares with the column {column!r}, which an example does not have, or without a value: name "
            "it by column=..., or leave the row out"
        )
    answers = (extract(last_action(completion)) for completion in completions)
    truths = (expected(str(example[column])) for example in examples)
    return [float(a is not None and same(a, truth)) for a, truth in zip(answers, truths, strict=True)]


def generator_score(generators: str = "") -> Reward:
    """Makes a reward: the score that the generator of a row gives to the answer, 0 to 1; 0 without an answer.

    Args:
      generators: The generators to open at once, outside of any deadline, as `parse_generators` reads them.

    Returns:
      The reward.

    Raises:
      UsageError: A generator cannot be opened.
    """
    if generators:
        parse_generators(generators)
    return lambda examples, completions: [_score(*pair) for pair in zip(examples, completions, strict=True)]


def _score(example: Example, completion: Completion) -> float:
    generator = column(example, "generator", remedy="take --task reasoning_gym:NAME")
    dataset, entry = generate(generator, example["level"], example["index"])
    if entry["question"] != example["question"]:
        raise ValueError(f"{generator} made another question from the same index: set PYTHONHASHSEED=0")
    answer = generator_vote(example, completion)
    try:
        return 0.0 if answer is None else float(dataset.score_answer(answer, entry))
    except Exception:  # some generators cannot read every text
        return 0.0


# ---- votes: equal answers written in the same way


def number_vote(example: Example, completion: Completion) -> Hashable | None:
    """Returns the number that a completion states, or None without one. 18, 18.0 and $18 are equal votes."""
    return stated_number(last_action(completion))


def formula_vote(example: Example, completion: Completion) -> Hashable | None:
    r"""Returns the `stated_answer` of a completion as a value, or None without one.

    1/2, 0.5 and \dfrac12 are equal votes. Formulas that only sympy considers equal are different votes.
    """
    value = read_formula(stated_answer(last_action(completion)) or "").value
    return None if value == "" else value


def generator_vote(example: Example, completion: Completion) -> str | None:
    """Returns the answer to a generator's question, where the prompt asked for it, or None without one."""
    return read_answer(last_action(completion), example["answer_in"])


# ---- formats and lengths


def matches(pattern: str) -> Reward:
    r"""Makes a reward: 1 if the policy's whole last turn matches a regular expression, else 0.

    If the chat template opens the turn with a tag such as <think>, the turn begins with this tag.

    Some patterns, such as (a+)+b, never finish on some texts and block the interpreter. Only a `Grader` can stop them.

    Args:
      pattern: A pattern such as r"<think>.*</think>\s*<answer>.*</answer>\s*". A dot also matches line breaks.

    Returns:
      The reward.
    """
    compiled = re.compile(pattern, re.DOTALL)

    def reward(examples: Sequence[Example], completions: Sequence[Completion]) -> list[float]:
        turns = zip(examples, completions, strict=True)
        return [float(compiled.fullmatch(_opened(*turn) + last_action(turn[1])) is not None) for turn in turns]

    return reward


def length(*, target: int | None = None, maximum: int | None = None) -> Reward:
    """Makes a reward for the length of a completion in tokens, its ending token included.

    Args:
      target: The length with reward 1. The reward falls linearly to 0 at no tokens and at twice the target.
      maximum: The largest length with reward 1. The reward is 0 above. Set either target or maximum.

    Returns:
      The reward.

    Raises:
      UsageError: Both or none of the arguments are set, or the length is less than 1.
    """
    limits = [limit for limit in (target, maximum) if limit is not None]
    if len(limits) != 1 or limits[0] < 1:
        raise UsageError("length needs either target or maximum, and at least 1")
    limit = limits[0]
    if target is None:
        return _by_length(lambda lengths: lengths <= limit)
    return _by_length(lambda lengths: np.clip(1 - np.abs(lengths - limit) / limit, 0, 1))


def overlong_penalty(*, max_length: int, buffer: int) -> Reward:
    """clip(−(|o| − (L_max − L_c))/L_c, −1, 0), DAPO (2503.14476).

    This is `grpo_jax.functional.overlong_penalty` in NumPy, since the processes of a `Grader` do not load JAX.

    Args:
      max_length: The sampler's limit in tokens, L_max.
      buffer: The length of the buffer in tokens, L_c.

    Returns:
      The reward. |o| includes the ending token.

    Raises:
      UsageError: `buffer` is not between 1 and `max_length`.
    """
    if not 1 <= buffer <= max_length:
        raise UsageError(f"buffer is {buffer}: it must be between 1 and max_length, {max_length}")

    return _by_length(lambda lengths: -np.clip((lengths - (max_length - buffer)) / buffer, 0, 1))


def repetition(n: int = 3) -> Reward:
    """Makes a reward from −1 to 0: minus the share of the policy's n-grams that occurred before in the completion.

    Args:
      n: The number of tokens in an n-gram. A completion with fewer tokens has reward 0.

    Returns:
      The reward.

    Raises:
      UsageError: n is less than 1.
    """
    if n < 1:
        raise UsageError(f"n is {n}: it must be at least 1")

    def repeated(ids: list[int]) -> float:
        grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
        return len(set(grams)) / len(grams) - 1 if grams else 0.0

    def reward(examples: Sequence[Example], completions: Sequence[Completion]) -> list[float]:
        return [repeated([i for action in completion.actions for i in action.ids]) for completion in completions]

    return reward


def _by_length(score: Callable[[np.ndarray], np.ndarray]) -> Reward:
    """Makes a reward from a function of |o|, float64 `[B]`.

    |o| counts the policy's tokens in all turns, with the tokens that ended turns.
    """

    def reward(examples: Sequence[Example], completions: Sequence[Completion]) -> list[float]:
        actions = [completion.actions for completion in completions]
        lengths = [sum(len(x.ids) + (not (x.truncated or x.stopped)) for x in several) for several in actions]
        return score(np.array(lengths, np.float64)).astype(float).tolist()

    return reward
