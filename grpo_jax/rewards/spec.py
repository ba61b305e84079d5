"""Rewards written as text, for command lines: name = weight * function(arguments).

    gsm8k_answer
    0.1*my_rewards.py:brevity
    0.1*my_rewards.py:brevity(scale=20)
    format=0.5*matches(pattern="<think>.*</think>.*")

Nothing but the function must be there. A bare name is a function of `grpo_jax.rewards.builtin`; others are named as
module:function or path/to/file.py:function.

Parentheses give keywords. Its signature decides what they are for: a function that needs two things beside them, as
brevity(examples, completions, *, scale) does, is the reward, and gets them at every call. A function of them alone, as
make_brevity(scale), is called once, and returns the reward, as the built-in ones always do.
"""

import ast
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from grpo_jax.data.types import Component, Rewards
from grpo_jax.errors import UsageError
from grpo_jax.rewards import builtin
from grpo_jax.rewards.grading import Grader

_SPEC = re.compile(
    r"(?:(?P<name>[A-Za-z_]\w*)\s*=)?\s*(?:(?P<weight>[-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*\*)?\s*"
    r"(?P<function>[^()*=]+?)\s*(?:\((?P<arguments>.*)\))?",
    re.DOTALL,
)
_BUILTIN = ("exact_answer", "gsm8k_answer", "math_answer", "matches", "length", "overlong_penalty", "repetition")


class Spec(NamedTuple):
    """A reward as it was written."""

    name: str
    weight: float
    function: str  # as `Grader` takes it
    arguments: Mapping[str, Any] | None


def parse_reward(text: str) -> Spec:
    """What a text says.

    Args:
      text: name = weight * function(arguments).

    Returns:
      The reward: its name is that of the function, its weight 1, where the text has none.

    Raises:
      UsageError: it cannot be read, or there is no such built-in reward.
    """
    found = _SPEC.fullmatch(text.strip())
    if not found:
        raise UsageError(f"the reward {text!r} cannot be read: write name=weight*function(argument=value)")
    function, written = found["function"], found["arguments"]
    arguments = None if written is None else _arguments(text, written)
    own = function.rpartition(":")[2]
    if ":" not in function:
        if function not in _BUILTIN:
            raise UsageError(
                f"there is no built-in reward {function!r}: take one of {', '.join(_BUILTIN)}, or name your own as "
                "file.py:function"
            )
        function, arguments = f"{builtin.__name__}:{function}", arguments or {}
    try:
        weight = float(found["weight"] or 1)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise UsageError(f"the weight of the reward {text!r} is no number: {found['weight']}")
    return Spec(found["name"] or own, weight, function, arguments)


@contextmanager
def open_rewards(
    texts: Sequence[str], *, group_size: int, deadline: float = 10.0, budget: float = 60.0, memory_mb: int | None = None
) -> Iterator[Rewards]:
    """Rewards that texts name, each in processes of its own, which end with the block.

    Args:
      texts: at least one, as for `parse_reward`.
      group_size: of training. A call has all completions of one prompt, so that a function can compare them.
      deadline: seconds for a call of that many completions, in proportion for more.
      budget: seconds for all the completions of a rollout.
      memory_mb: that a process may allocate beyond what loading took; None: no limit.

    Yields:
      The rewards by name.

    Raises:
      UsageError: one cannot be read or loaded, two have one name, or all weights are 0.
    """
    specs = [parse_reward(text) for text in texts]
    names = [spec.name for spec in specs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"two rewards are called {twice[0]}: give them names, as in other={twice[0]}")
    if not any(spec.weight for spec in specs):
        raise UsageError("every reward has the weight 0: there is nothing to learn from")
    with ExitStack() as stack:
        rewards = {}
        for spec in specs:
            grader = Grader(
                spec.function,
                arguments=spec.arguments,
                deadline=deadline,
                budget=budget,
                chunk="prompt",
                group_size=group_size,
                memory_mb=memory_mb,
            )
            rewards[spec.name] = Component(stack.enter_context(grader), spec.weight)
        yield rewards


def _arguments(text: str, written: str) -> dict[str, Any]:
    """Keywords with plain values; nothing is evaluated."""
    try:
        call = ast.parse(f"f({written})", mode="eval").body
        names = [keyword.arg for keyword in call.keywords] if isinstance(call, ast.Call) else [None]
        # One call of f, by names, each once.
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args or None in names:
            raise ValueError
        if len(set(names)) < len(names):
            raise ValueError
        return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UsageError(f"the arguments of the reward {text!r} must be name=value with plain values") from None
