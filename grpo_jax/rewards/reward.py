"""The rewards of a run: their weighted sum, and their texts on a command line.

A text is name = weight * function(arguments), in which only the function is required:

    gsm8k_answer
    0.1*my_rewards.py:brevity
    0.1*my_rewards.py:brevity(scale=20)
    format=0.5*matches(pattern="<think>.*</think>.*")

A bare name is a function of `grpo_jax.rewards.builtin`. Other functions are named as module:function or
file.py:function. `arguments` in `processes.ProcessOptions` explains the use of the keywords in parentheses.
"""

import ast
import inspect
import math
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import numpy as np

from grpo_jax.data import coroutines
from grpo_jax.data.types import LARGEST_REWARD, Checked, Completion, Component, Example, Reward
from grpo_jax.errors import UsageError
from grpo_jax.options import check_type
from grpo_jax.rewards.processes import Grader
from grpo_jax.rewards.worker import BadReward, checked_rewards


class RewardSums(NamedTuple):
    """The rewards of B completions."""

    rewards: np.ndarray  # float32 [B], Σ weight · component over the components that apply; 0 if none applies
    applicable: np.ndarray  # bool [B], true if any component applies
    components: dict[str, np.ndarray]  # name -> float32 [B], unweighted, NaN if it does not apply
    parts: np.ndarray  # object [B], tuples of `Span` with the weighted parts of `rewards`; () without parts


class Rewards(NamedTuple):
    """The rewards of a run, as `to_rewards` makes them."""

    components: dict[str, Component]  # by name; empty if there is nothing to compute
    weights: dict[str, float]  # in the sum, by name
    graders: dict[str, Any]  # the functions that count ungraded completions, as `processes.Grader` does, by name

    @np.errstate(invalid="ignore", over="ignore")  # the run warns once about an infinite reward
    def grade(self, examples: Sequence[Example], completions: Sequence[Completion]) -> RewardSums:
        """Computes the rewards of completions. Async functions run concurrently.

        Args:
          examples: The columns of each completion's prompt, B.
          completions: The B completions.

        Returns:
          The rewards. A NaN that a function returned stays NaN in the sum. A reward of None does not apply.

        Raises:
          UsageError: A function returned a wrong number of rewards, anything other than numbers, or bad spans, or
            exited.
        """
        count = len(completions)
        try:
            answers = [component.reward(examples, completions) for component in self.components.values()]
            if any(map(inspect.isawaitable, answers)):
                answers = coroutines.resolve(answers)
        except SystemExit as error:  # it would end the run as if it were finished
            raise UsageError(
                f"a reward called sys.exit({error.code!r}), perhaps in code of a completion: wrap it in a Grader, "
                "which runs it in another process"
            ) from error
        # A NaN must stay visible in the sum, so None, and not NaN, marks a reward that does not apply.
        total, applicable = np.zeros(count, np.float32), np.zeros(count, bool)
        components: dict[str, np.ndarray] = {}
        parts = np.empty(count, object)
        parts[:] = [()] * count
        for (name, component), answer in zip(self.components.items(), answers, strict=True):
            earned = _checked(name, answer, completions)
            applies = np.array([value is not None for value in earned], bool)
            components[name] = np.array([_total(value) for value in earned], np.float32)
            if component.weight:  # rewards with weight 0 are only logged
                total += np.where(applies, np.float32(component.weight) * components[name], 0)
                applicable |= applies
                for place, value in enumerate(earned):
                    if isinstance(value, tuple):
                        parts[place] += tuple(part._replace(reward=component.weight * part.reward) for part in value)
        return RewardSums(total, applicable, components, parts)

    def counts(self) -> dict[str, int]:
        """Returns the number of completions without a reward since the start of the graders, by "ungraded_" names."""
        return {
            _ungraded(name, reason): count
            for name, grader in self.graders.items()
            for reason, count in grader.counts.items()
        }

    def failures(self) -> dict[str, str]:
        """Returns a sentence about each reason why graders gave no reward, by the names of `counts`."""
        return {
            _ungraded(name, reason): (
                f"the reward {name} gave {grader.counts[reason]} completions no number ({reason}), so it is left out "
                f"of theirs: {place_and_reason(message)}"
            )
            for name, grader in self.graders.items()
            for reason, message in list(grader.messages.items())
        }

    def try_each(self, example: Example, completions: Sequence[Completion]) -> dict[str, tuple[float | None, str]]:
        """Calls each reward on one group, without counting a failure.

        Returns:
          By name, the reward of the first completion, None without one, and the reason if the whole call failed, else
          "".

        Raises:
          UsageError: A reward refuses its arguments or the example.
        """
        return {
            name: _try_reward(component.reward, example, completions) for name, component in self.components.items()
        }


# What a caller may give as a reward: one function, several by name, with or without weights, or the value made of them
RewardLike = Reward | Mapping[str, Reward | Component] | Rewards


def to_rewards(reward: RewardLike) -> Rewards:
    """Returns rewards as one value. A single function is called "reward". The default weight is 1.

    Raises:
      UsageError: A weight is not finite.
    """
    if isinstance(reward, Rewards):
        return reward
    named = reward if isinstance(reward, Mapping) else {"reward": reward}
    components = {name: each if isinstance(each, Component) else Component(each) for name, each in named.items()}
    for name, component in components.items():
        _check_weight(name, component.weight)
        if name == "std" or name.removesuffix("_std") in components.keys() - {name}:
            raise UsageError(f"a reward is called {name}, as is a deviation in metrics.jsonl: give it another name")
    weights = {name: component.weight for name, component in components.items()}
    graders = {name: each.reward for name, each in components.items() if hasattr(each.reward, "counts")}
    return Rewards(components, weights, graders)


def _check_weight(name: str, weight: float) -> None:
    if not abs(weight) <= LARGEST_REWARD:
        raise UsageError(f"the weight of the reward {name} is {weight:g}: it must be a number that float32 holds")


def _try_reward(reward: Reward, example: Example, completions: Sequence[Completion]) -> tuple[float | None, str]:
    """Calls a reward as `Rewards.try_each` does."""
    counts, messages = getattr(reward, "counts", {}), getattr(reward, "messages", {})
    before, failure, value = (dict(counts), dict(messages)), "", None
    try:
        sums = to_rewards(reward).grade([example] * len(completions), completions)
        value = float(sums.rewards[0]) if sums.applicable[0] else None
        if not sums.applicable.any():
            failure = next((messages[reason] for reason in counts if counts[reason] > before[0][reason]), "")
    except UsageError:
        raise
    except Exception:  # a function may raise any type of error
        failure = traceback.format_exc()
    for values, saved in zip((counts, messages), before, strict=True):
        values.clear()
        values.update(saved)
    if f"{UsageError.__module__}.{UsageError.__name__}: " in failure:
        raise UsageError(place_and_reason(failure))
    return value, place_and_reason(failure) if failure else ""


def _ungraded(name: str, reason: str) -> str:
    return f"ungraded_{name}_{reason.replace(' ', '_')}"


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>.+)')
_ERROR = re.compile(r"[\s|]*[A-Za-z_][\w.]*(Error|Exception|Failure|Timeout|Interrupt|Exit)\b")
_OURS = (str(Path(__file__).parents[1]), "<frozen")


def place_and_reason(message: str) -> str:
    """Returns the line of the user's code and the error in a traceback, or in the stack of a process that hung."""
    frames = [frame for frame in _FRAME.finditer(message) if not frame["file"].startswith(_OURS)]
    # A traceback ends with the innermost frame, but a stack of faulthandler begins with it.
    stack = "most recent call first" in message
    users = [frame for frame in frames if "site-packages" not in frame["file"] and "/lib/python" not in frame["file"]]
    place = (users or frames)[0 if stack else -1] if frames else None
    lines = message.strip().splitlines() or [""]
    errors = [line.strip(" |+") for line in lines if _ERROR.match(line)]  # messages may have several lines
    words = lines[0] if stack else (errors or lines)[-1]
    words = words.removeprefix("grpo_jax.errors.UsageError: ").split("; the end of its stderr")[0][:300]
    return f"{words} ({place['file']}, line {place['line']}, in {place['name']})" if place else words


def _checked(name: str, answer: Any, completions: Sequence[Completion]) -> list[Checked]:
    """Returns the reward of each completion, or raises if the function's answer is invalid."""
    try:
        earned = []
        for value in checked_rewards(answer, completions):
            if isinstance(value, BadReward):
                raise value
            earned.append(value)
        return earned
    except BadReward as error:
        raise UsageError(
            f"the reward {name} must return one number (or None, or spans) for each completion: {error}"
        ) from None


def _total(earned: Checked) -> float:
    """Returns a reward as one number, NaN if it does not apply."""
    if earned is None:
        return math.nan
    return sum(part.reward for part in earned) if isinstance(earned, tuple) else earned


# ---- texts on a command line

_SPEC = re.compile(
    r"(?:(?P<name>[A-Za-z_]\w*)\s*+=)?\s*+(?:(?P<weight>[-+]?(?:\d++\.?\d*+|\.\d++)(?:[eE][-+]?\d+)?)\s*+\*)?\s*+"
    r"(?P<function>[^()*=\s]++(?:\s++[^()*=\s]++)*+)\s*+(?:\((?P<arguments>.*)\))?",
    re.DOTALL,
)
_BUILTIN = (
    *("exact_answer", "gsm8k_answer", "gsm8k_official", "math_answer", "generator_score"),
    *("matches", "length", "overlong_penalty", "repetition"),
)


# A reward named by a text: its name, its weight, its function for `Grader`, and its arguments.
Spec = tuple[str, float, str, Mapping[str, Any] | None]


def parse_reward(text: str) -> Spec:
    """Parses the text of a reward. The default name is the function's, and the default weight is 1.

    Args:
      text: A text such as name = weight * function(arguments).

    Raises:
      UsageError: The text cannot be parsed, or there is no such built-in reward, or an argument of it has another type.
    """
    match = _SPEC.fullmatch(text.strip())
    if not match:
        raise UsageError(f"the reward {text!r} cannot be read: write name=weight*function(argument=value)")
    function, written = match["function"], match["arguments"]
    arguments = None if written is None else _arguments(text, written)
    name = match["name"] or function.rpartition(":")[2]
    if ":" not in function:
        if function not in _BUILTIN:
            raise UsageError(
                f"there is no built-in reward {function!r}: take one of {', '.join(_BUILTIN)}, or name your own as "
                "file.py:function"
            )
        from grpo_jax.rewards import builtin  # loaded only for built-in rewards

        hints = get_type_hints(getattr(builtin, function))
        for argument, value in (arguments or {}).items():
            check_type(f"{argument} of the reward {text!r}", value, hints.get(argument, Any))
        function, arguments = f"grpo_jax.rewards.builtin:{function}", arguments or {}
    weight = float(match["weight"] or 1)
    _check_weight(name, weight)
    return name, weight, function, arguments


@contextmanager
def open_rewards(texts: Sequence[str], *, group_size: int, **limits: Any) -> Iterator[dict[str, Component]]:
    """Opens the rewards named by texts, each in its own child processes, which end with the block.

    Args:
      texts: Texts for `parse_reward`, at least one.
      group_size: The number of completions of a prompt in training, G. A call gets all completions of one prompt, so
        that a function can compare them.
      **limits: Further fields of `ProcessOptions`, such as deadline, 10 (seconds for a call with G completions; calls
        with more get more time in proportion), budget, 60 (seconds for all completions of a rollout), and memory_mb.

    Yields:
      The rewards by name.

    Raises:
      UsageError: A reward cannot be parsed or loaded, two rewards have the same name, or all weights are 0.
    """
    specs = [parse_reward(text) for text in texts]
    names = [name for name, *_ in specs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"two rewards are called {twice[0]}: give them names, as in other={twice[0]}")
    if not any(weight for _, weight, *_ in specs):
        raise UsageError("every reward has the weight 0: there is nothing to learn from")
    with ExitStack() as stack:
        rewards = {}
        for name, weight, function, arguments in specs:
            grader = Grader(function, arguments=arguments, chunk="prompt", group_size=group_size, **limits)
            rewards[name] = Component(stack.enter_context(grader), weight)
        yield rewards


def _arguments(text: str, written: str) -> dict[str, Any]:
    """Parses keywords with plain values, without evaluating code."""
    try:
        call = ast.parse(f"f({written})", mode="eval").body
        # Accepts only a call of f with keywords, each once.
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError
        arguments = {str(keyword.arg or ""): ast.literal_eval(keyword.value) for keyword in call.keywords}
        if "" in arguments or len(arguments) < len(call.keywords):
            raise ValueError
        return arguments
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UsageError(f"the arguments of the reward {text!r} must be name=value with plain values") from None
