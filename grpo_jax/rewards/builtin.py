r"""Rewards that many tasks need: answers, formats and lengths.

Each function makes a reward, a function of examples and completions. In a process of its own, with a deadline:
`Grader("grpo_jax.rewards.builtin:math_answer", arguments={"lenient": True}, chunk=1)`. That is the place for
`math_answer` and `matches`, which a model's text can keep busy for ever.

In an episode these rewards read only the policy. Its answer is its last turn, and so are formats. Lengths and
repetitions are of its tokens in all turns.

No text is ever evaluated as code: numbers are read by a pattern, formulas by a parser of LaTeX.
"""

import contextlib
import importlib.util
import logging
import re
from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction

import numpy as np

from grpo_jax.data.types import Completion, Example, Reward
from grpo_jax.errors import UsageError
from grpo_jax.rewards.worker import is_worker

Extract = Callable[[str], str | None]  # a completion -> its answer; None: it gives none

# Groups of thousands or plain digits, decimals, and an exponent of at most three digits.
_DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\w))?"
_NUMBER = re.compile(rf"\$?([-−+]?)\$?({_DIGITS})(?:/(\d+))?")
# In running text a sign follows neither a digit nor a letter, as in 10-5, nor does a number begin inside a word.
_IN_TEXT = re.compile(rf"(?:(?<![\w)\]}}.])[-−]\$?|(?<![\w.])){_DIGITS}(?:/\d+)?")
_FORMULA = re.compile(r"(?<!\\)\$\$?((?:\\.|[^$\\])+)\$\$?", re.DOTALL)  # \$ is no end of it
_LONGEST_NUMBER = 64  # in characters; a longer one is a text like any other
_LONGEST_FORMULA = 500


# ---- what a text answers


def last_action(completion: str) -> str:
    """Returns what the policy said last: of an episode the text of its last turn, otherwise the whole completion."""
    return completion.actions[-1] if isinstance(completion, Completion) else completion


def text_answer(text: str) -> str:
    """The whole text without the blanks around it."""
    return text.strip()


def last_number(text: str) -> str | None:
    """The last number of a text."""
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
    r"""The last \boxed{...}, else what follows "answer is", else the last $...$, else the last number."""
    boxed = boxed_answer(text)
    if boxed is not None:
        return boxed
    stated = re.split(r"answer is:?|answer:", text, flags=re.IGNORECASE)
    if len(stated) > 1 and stated[-1].strip():
        line = stated[-1].strip().splitlines()[0]
        # A full stop ends it, or a dollar sign that opened it.
        formula = _FORMULA.match(line)
        return formula.group(1).strip() if formula else re.split(r"\.(?:\s|$)", line)[0].strip()
    formulas = _FORMULA.findall(text)
    return formulas[-1].strip() if formulas else last_number(text)


# ---- whether two answers are the same


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
    """A formula without what does not change its meaning: blanks, sizes, units, and the ways to write a fraction."""
    text = text.strip().strip("$").strip().rstrip(".")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\cfrac", "\\frac")
    text = _TEXT.sub(r"\1", _UNIT.sub("", _LEFT_OUT.sub("", text)))
    text = "".join(text.split())
    text = _ASSIGNED.sub("", text)
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text)
    return _PLAIN_FRACTION.sub(r"\1\2/\3", text) if _PLAIN_FRACTION.fullmatch(text) else text


def same_formula(stated: str, expected: str) -> bool:
    """Returns whether both are the same number, or the same formula in two forms that `normal_formula` knows."""
    first, second = normal_formula(stated), normal_formula(expected)
    return (first == second and bool(first)) or same_number(first, second)


def _same_by_sympy(stated: str, expected: str) -> bool:
    """Returns whether math-verify considers both the same. It can take for ever."""
    import math_verify

    # Their deadlines are this process's; they warn that there is none.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # LaTeX alone: the pattern for plain expressions hands text to sympy's evaluating parser.
    latex = [math_verify.LatexExtractionConfig()]

    def parsed(formula: str):
        return math_verify.parse(f"${formula}$", latex, fallback_mode="no_fallback", parsing_timeout=None)

    if len(stated) > _LONGEST_FORMULA or "$" in stated:
        return False
    return bool(math_verify.verify(parsed(expected), parsed(stated), timeout_seconds=None))


# ---- answers


def exact_answer(column: str = "answer", extract: Extract = text_answer) -> Reward:
    """1 where the completion's answer is the example's, as a number or as a text, else 0.

    Args:
      column: of the example, with the answer.
      extract: what finds the answer in a completion, such as `last_number`.

    Returns:
      The reward.
    """

    def reward(examples: Sequence[Example], completions: Sequence[Completion]) -> list[float]:
        return _graded(column, extract, text_answer, same_text, examples, completions)

    return reward


def gsm8k_answer(column: str = "answer", lenient: bool = False) -> Reward:
    """1 where the completion's number is that of the example, else 0.

    Args:
      column: of the example, with the solution that ends with "#### 18", or with the number alone.
      lenient: the last number of the text is taken; else what follows the last "####" must be the number.

    Returns:
      The reward.
    """

    def expected(text: str) -> str:
        return hash_answer(text) or text

    def reward(examples: Sequence[Example], completions: Sequence[Completion]) -> list[float]:
        extract = last_number if lenient else hash_answer
        return _graded(column, extract, expected, same_number, examples, completions)

    return reward


def math_answer(column: str = "answer", lenient: bool = False, sympy: bool | None = None) -> Reward:
    r"""1 where the completion's formula equals that of the example, else 0.

    Args:
      column: of the example, with the formula alone or with a solution that has it in \boxed{...}.
      lenient: without \boxed{...}, what follows "answer is", else the last $...$, else the last number is taken.
      sympy: whether the package math-verify compares what is not the same at sight; None: if it is installed.

    Returns:
      The reward.

    Raises:
      UsageError: math-verify is not installed, or is to be used outside of a `Grader`, where nothing can stop it.
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
        _same_by_sympy("x+1", "1+x")  # imports and makes its tables now, outside of any deadline

    def same(stated: str, expected: str) -> bool:
        return same_formula(stated, expected) or (by_sympy and _same_by_sympy(stated, expected))

    def expected(text: str) -> str:
        boxed = boxed_answer(text)
        return text if boxed is None else boxed

    def reward(examples: Sequence[Example], completions: Sequence[Completion]) -> list[float]:
        extract = stated_answer if lenient else boxed_answer
        return _graded(column, extract, expected, same, examples, completions)

    return reward


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


# ---- what is voted on: answers that are the same, written in the same way


def number_vote(example: Example, completion: Completion) -> Hashable | None:
    """The last number of a completion; None: it has none. 18, 18.0 and $18 are one vote."""
    answer = last_number(last_action(completion))
    return None if answer is None else _number(answer)


def formula_vote(example: Example, completion: Completion) -> Hashable | None:
    r"""Returns the answer that a completion states (`stated_answer`), as a number or in its normal form; None: nothing.

    1/2, 0.5 and \dfrac12 are one vote; formulas that sympy alone finds equal are several.
    """
    formula = normal_formula(stated_answer(last_action(completion)) or "")
    number = _number(formula)
    return number if number is not None else formula or None


# ---- formats and lengths


def matches(pattern: str) -> Reward:
    r"""1 where the policy's last turn, as a whole, matches a regular expression, else 0. A dot is any character.

    Some patterns, such as (a+)+b, take for ever on some texts, and hold the interpreter: only a `Grader` ends that.

    Args:
      pattern: such as r"<think>.*</think>\s*<answer>.*</answer>\s*".

    Returns:
      The reward.

    Raises:
      UsageError: it is no regular expression.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UsageError(f"{pattern!r} is no regular expression: {error}") from None

    def reward(examples: Sequence[Example], completions: Sequence[Completion]) -> list[float]:
        return [float(compiled.fullmatch(last_action(completion)) is not None) for completion in completions]

    return reward


def length(*, target: int | None = None, maximum: int | None = None) -> Reward:
    """How well a completion keeps to a length in tokens, the ending one included.

    Args:
      target: 1 at this length, falling on two lines to 0 at none and at twice as many.
      maximum: 1 up to this length, 0 above. One of both is given.

    Returns:
      The reward.

    Raises:
      UsageError: both or none are given, or it is less than 1.
    """
    if (target is None) == (maximum is None):
        raise UsageError("length needs target or maximum, and not both")
    limit = target if target is not None else maximum
    assert limit is not None
    if limit < 1:
        raise UsageError(f"a length of {limit} tokens is asked for: it must be at least 1")

    def reward(examples: Sequence[Example], completions: Sequence[Completion]) -> list[float]:
        lengths = _lengths(completions)
        if target is None:
            return (lengths <= limit).astype(float).tolist()
        return np.clip(1 - np.abs(lengths - limit) / limit, 0, 1).tolist()

    return reward


def overlong_penalty(*, max_length: int, buffer: int) -> Reward:
    """clip(−(|o| − (L_max − L_c))/L_c, −1, 0), DAPO (2503.14476).

    It is `grpo_jax.functional.overlong_penalty` in NumPy: the processes of a `Grader` do not load JAX.

    Args:
      max_length: L_max in tokens, the sampler's limit.
      buffer: L_c in tokens.

    Returns:
      The reward, of |o| with the ending token.

    Raises:
      UsageError: buffer is not between 1 and max_length.
    """
    if not 1 <= buffer <= max_length:
        raise UsageError(f"buffer is {buffer}: it must be between 1 and max_length, {max_length}")

    def reward(examples: Sequence[Example], completions: Sequence[Completion]) -> list[float]:
        excess = _lengths(completions) - (max_length - buffer)
        return (-np.clip(excess / buffer, 0, 1)).tolist()

    return reward


def repetition(n: int = 3) -> Reward:
    """Minus the share of n-grams of the policy's tokens that occurred before in the completion: from −1 to 0.

    Args:
      n: tokens in one; a completion of fewer has 0.

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
    """|o|, float64 `[B]`: the policy's tokens in all turns. The token that ended a turn counts, if there is one."""
    lengths = [sum(len(x.ids) + (not x.truncated) for x in completion.actions) for completion in completions]
    return np.array(lengths, np.float64)
