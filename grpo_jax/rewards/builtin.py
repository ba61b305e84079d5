r"""Rewards that many tasks need: answers, formats and lengths.

Each function makes a reward, a function of examples and completions. To run a reward in a separate process with a
deadline, use `Grader("grpo_jax.rewards.builtin:math_answer", arguments={"lenient": True}, chunk=1)`. Do this for
`math_answer` and `matches`, which may never finish on some texts of a model.

In an episode these rewards read only the policy's turns. Answers and formats are read from its last turn. Lengths and
repetitions count its tokens in all turns.

No text is ever evaluated as code: a pattern reads numbers, and a LaTeX parser reads formulas.
"""

import contextlib
import importlib.util
import logging
import re
from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from functools import partial

import numpy as np

from grpo_jax.data.types import Completion, Example, Reward
from grpo_jax.errors import UsageError
from grpo_jax.models.chat import opened_text
from grpo_jax.rewards.worker import is_worker

Extract = Callable[[str], str | None]  # a completion -> its answer, or None without one

# Groups of thousands or plain digits, decimals, and an exponent of at most three digits.
_DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\w))?"
_NUMBER = re.compile(rf"\$?([-−+]?)\$?({_DIGITS})(?:/(\d+))?")
# In running text a sign does not follow a digit or a letter, as in 10-5, and a number does not begin inside a word.
_IN_TEXT = re.compile(rf"(?:(?<![\w)\]}}.])[-−]\$?|(?<![\w.])){_DIGITS}(?:/\d+)?")
_FORMULA = re.compile(r"(?<!\\)\$\$?((?:\\.|[^$\\])+)\$\$?", re.DOTALL)  # \$ does not end it
_LONGEST_NUMBER = 64  # in characters; a longer number is treated as text
_LONGEST_FORMULA = 500


# ---- extraction of answers


def last_action(completion: str) -> str:
    """Returns the policy's last action: the last turn of an episode, or the whole completion."""
    return completion.actions[-1] if isinstance(completion, Completion) else completion


def _opened(example: Example, completion: str) -> str:
    """Returns the beginning of the policy's last turn that the chat template wrote, such as <think>."""
    turns = completion.turns if isinstance(completion, Completion) else ()
    before = turns[-2].observation if len(turns) > 1 else example.get("prompt")
    return opened_text(before) if isinstance(before, str) else ""


def last_number(text: str) -> str | None:
    """Returns the last number in a text."""
    matches = _IN_TEXT.findall(text)
    return matches[-1] if matches else None


def hash_answer(text: str) -> str | None:
    """Returns the text after the last "####" on its line."""
    _, mark, after = text.rpartition("####")
    lines = after.strip().splitlines()
    return lines[0].strip() if mark and lines else None


def boxed_answer(text: str) -> str | None:
    r"""Returns the contents of the last \boxed{...}; None also if its braces do not close."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].removeprefix("\\boxed").removeprefix("\\fbox")
    if not rest.startswith("{"):
        single = re.match(r"\s+([-\d.,]+|\w)", rest)  # \boxed 5
        return single.group(1) if single else None
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", rest, re.DOTALL):  # \{ and \} are not braces
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0 and brace.group() == "}":
            return rest[1 : brace.start()].strip()
    return None


def stated_answer(text: str) -> str | None:
    r"""Returns the last \boxed{...}, else the text after "answer is", else the last $...$, else the last number."""
    boxed = boxed_answer(text)
    if boxed is not None:
        return boxed
    stated = re.split(r"answer is:?|answer:", text, flags=re.IGNORECASE)
    if len(stated) > 1 and stated[-1].strip():
        line = stated[-1].strip().splitlines()[0]
        # The answer ends at a full stop or, if a dollar sign opens it, at the next dollar sign.
        formula = _FORMULA.match(line)
        return formula.group(1).strip() if formula else re.split(r"\.(?:\s|$)", line)[0].strip()
    formulas = _FORMULA.findall(text)
    return formulas[-1].strip() if formulas else last_number(text)


# ---- comparison of answers


def same_number(stated: str, expected: str) -> bool:
    """Returns whether both are equal numbers: "1,000" and "1000.0", "$18" and "18", "50%" and "50", "1/2" and "0.5"."""
    first, second = _number(stated), _number(expected)
    return first is not None and first == second


def _number(text: str) -> Fraction | None:
    text = text.strip().rstrip(".").replace("\\$", "$").replace("\\%", "%").removesuffix("%").strip()
    match = _NUMBER.fullmatch(text) if len(text) <= _LONGEST_NUMBER else None
    if match is None:
        return None
    sign, digits, divisor = match.groups()
    with contextlib.suppress(ZeroDivisionError):
        number = Fraction(digits.replace(",", "")) / Fraction(divisor or 1)
        return -number if sign in ("-", "−") else number
    return None


def same_text(stated: str, expected: str) -> bool:
    """Returns whether both are the same number or the same text."""
    return stated.strip() == expected.strip() or same_number(stated, expected)


_LEFT_OUT = re.compile(
    r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;: ]|\\displaystyle|\\mathrm(?![a-z])|\\mbox(?![a-z])|\^\{?\\circ\}?"
    r"|\\degree|\\\$|\\%|%|~|\\quad|\\qquad"
)
_UNIT = re.compile(r"(?<=[\d}])\s*\\(?:text|mbox|textbf)\{[^{}]*\}(?:\^\d)?$")  # 5\text{ cm}
_TEXT = re.compile(r"\\(?:text|textbf|textit|mbox|mathrm|operatorname)\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\frac(\d)(\d)")
_PLAIN_FRACTION = re.compile(r"(-?)\\frac\{(-?\d+)\}\{(\d+)\}")
_ASSIGNED = re.compile(r"^[a-zA-Z](?:\([a-zA-Z]\))?\s*=(?!.*=)")  # x = 5


def normal_formula(text: str) -> str:
    """Normalises a formula: removes spaces, sizes and units, and writes fractions in one way."""
    text = text.strip().strip("$").strip().rstrip(".")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\cfrac", "\\frac")
    text = _TEXT.sub(r"\1", _UNIT.sub("", _LEFT_OUT.sub("", text)))
    text = "".join(text.split())
    text = _ASSIGNED.sub("", text)
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text)
    return _PLAIN_FRACTION.sub(r"\1\2/\3", text) if _PLAIN_FRACTION.fullmatch(text) else text


def same_formula(stated: str, expected: str) -> bool:
    """Returns whether both are the same number, or have the same `normal_formula`."""
    first, second = normal_formula(stated), normal_formula(expected)
    return (first == second and bool(first)) or same_number(first, second)


def _same_by_sympy(stated: str, expected: str) -> bool:
    """Returns whether math-verify considers both equal. It may never finish."""
    import math_verify

    # It warns that its own deadlines are off. The deadline of the process replaces them.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Only LaTeX is read, since plain expressions would go to sympy's parser, which evaluates code.
    latex = [math_verify.LatexExtractionConfig()]

    def parsed(formula: str):
        return math_verify.parse(f"${formula}$", latex, fallback_mode="no_fallback", parsing_timeout=None)

    if len(stated) > _LONGEST_FORMULA or "$" in stated:
        return False
    return bool(math_verify.verify(parsed(expected), parsed(stated), timeout_seconds=None))


# ---- answers


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
    """Makes a reward: 1 if the completion's number equals the example's, else 0.

    Args:
      column: The column of the example with a solution that ends with "#### 18", or with only the number.
      lenient: True to read the last number of the text. Otherwise the number must follow the last "####".

    Returns:
      The reward.
    """

    def expected(text: str) -> str:
        return hash_answer(text) or text

    return partial(_graded, column, last_number if lenient else hash_answer, expected, same_number)


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

    def same(stated: str, expected: str) -> bool:
        return same_formula(stated, expected) or (by_sympy and _same_by_sympy(stated, expected))

    def expected(text: str) -> str:
        boxed = boxed_answer(text)
        return text if boxed is None else boxed

    return partial(_graded, column, stated_answer if lenient else boxed_answer, expected, same)


def _graded(
    column: str,
    extract: Extract,
    expected: Callable[[str], str],
    same: Callable[[str, str], bool],
    examples: Sequence[Example],
    completions: Sequence[Completion],
) -> list[float]:
    if any(column not in example for example in examples):
        raise UsageError(
            f"a reward compares with the column {column!r}, which an example does not have: name it by column=..."
        )
    answers = (extract(last_action(completion)) for completion in completions)
    truths = (expected(str(example[column])) for example in examples)
    return [float(a is not None and same(a, truth)) for a, truth in zip(answers, truths, strict=True)]


# ---- votes: equal answers written in the same way


def number_vote(example: Example, completion: Completion) -> Hashable | None:
    """Returns the last number of a completion, or None without one. 18, 18.0 and $18 are equal votes."""
    answer = last_number(last_action(completion))
    return None if answer is None else _number(answer)


def formula_vote(example: Example, completion: Completion) -> Hashable | None:
    r"""Returns the `stated_answer` of a completion, as a number or a normalised formula, or None without one.

    1/2, 0.5 and \dfrac12 are equal votes. Formulas that only sympy considers equal are different votes.
    """
    formula = normal_formula(stated_answer(last_action(completion)) or "")
    number = _number(formula)
    return number if number is not None else formula or None


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

    def reward(examples: Sequence[Example], completions: Sequence[Completion]) -> list[float]:
        lengths = _lengths(completions)
        if target is None:
            return (lengths <= limit).astype(float).tolist()
        return np.clip(1 - np.abs(lengths - limit) / limit, 0, 1).tolist()

    return reward


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

    def reward(examples: Sequence[Example], completions: Sequence[Completion]) -> list[float]:
        excess = _lengths(completions) - (max_length - buffer)
        return (-np.clip(excess / buffer, 0, 1)).tolist()

    return reward


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


def _lengths(completions: Sequence[Completion]) -> np.ndarray:
    """Returns |o|, float64 `[B]`: the policy's tokens in all turns, with the tokens that ended turns."""
    actions = [completion.actions for completion in completions]
    lengths = [sum(len(x.ids) + (not (x.truncated or x.stopped)) for x in several) for several in actions]
    return np.array(lengths, np.float64)
