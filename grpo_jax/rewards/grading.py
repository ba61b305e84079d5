"""Reward functions in processes of their own, which are killed when they hang.

    with Grader("my_rewards.py:solved", deadline=5.0, chunk=1) as grader:
        task = Task(reward=grader, ...)

A grader is a reward like any other, one that always answers: what its function has nothing to say about is None,
and counted.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from grpo_jax.data.spans import MOST, total
from grpo_jax.data.types import Completion, Earned, Example, Span
from grpo_jax.rewards.processes import Answers, Processes, Unanswered

# Why completions have no reward.
REASONS = ("timeout", "raised", "died", "nan", "not numbers", "bad spans", "wrong length", "budget")


def _understood(value: Any) -> Earned | Unanswered:
    if value is None:
        return None
    if isinstance(value, dict):
        return Unanswered(value["reason"], value["message"])
    spans = tuple(Span(*part) for part in value) if isinstance(value, list) else None
    number = float(value) if spans is None else total(spans)
    if not math.isfinite(number):
        return Unanswered("nan", f"the function returned {number}")
    return number if spans is None else spans


_NUMBERS = Answers("reward", _understood, 128 * MOST)


class Grader:
    """A reward function that runs in child processes; itself a reward.

    Attributes:
      counts: reason -> how many completions got None for it since the start; every one of REASONS is there.
      messages: reason -> the last thing known about it, the end of a traceback or of the function's stderr.
      source: digest of the file that the function is in; empty for one of this package.
    """

    def __init__(
        self,
        reward: str,
        *,
        arguments: Mapping[str, Any] | None = None,
        deadline: float = 10.0,
        budget: float = 60.0,
        chunk: int | Literal["prompt"] | None = None,
        group_size: int = 1,
        workers: int | None = None,
        memory_mb: int | None = None,
        start_deadline: float = 120.0,
    ) -> None:
        """Starts the processes and loads the function.

        It sees no accelerator through JAX, and its output goes nowhere. A process that it starts ends with it,
        unless it gives itself a session of its own.

        Args:
          reward: "package.module:function" or "path/to/file.py:function"; async functions too.
          arguments: None: the function is the reward; else it is called with these keywords and returns the reward.
          deadline: seconds for one call of the function.
          budget: seconds for one call of the grader; what is not graded by then gets None.
          chunk: completions in one call of the function; "prompt": those of one prompt, which stand side by side and
            share their example; None: all of them, for a function that compares prompts.
          group_size: with "prompt", the number of completions that the deadline is meant for. More of them, as in an
            evaluation, have more time in proportion.
          workers: processes; None: up to four, one for each CPU; always one if `chunk` is None.
          memory_mb: what the function may allocate beyond what loading it took; None: no limit.
          start_deadline: seconds for loading the function.

        Raises:
          UsageError: an impossible argument, or the function cannot be loaded.
        """
        self.counts = dict.fromkeys(REASONS, 0)
        self.messages: dict[str, str] = {}
        self._processes = Processes(
            _NUMBERS,
            reward,
            arguments=arguments,
            deadline=deadline,
            budget=budget,
            chunk=chunk,
            group_size=group_size,
            workers=workers,
            memory_mb=memory_mb,
            start_deadline=start_deadline,
        )
        self.source = self._processes.source

    def __call__(self, examples: Sequence[Example], completions: Sequence[Completion]) -> list[Earned]:
        """Rewards of B completions, each finite or None.

        Raises:
          UsageError: the examples cannot be sent to another process, or the grader is closed.
        """
        return [self._counted(answer) for answer in self._processes.ask(examples, completions)]

    def _counted(self, answer: Any) -> Earned:
        if not isinstance(answer, Unanswered):
            return answer
        self.counts[answer.reason] += 1
        self.messages[answer.reason] = answer.message
        return None

    def close(self) -> None:
        """Kills the processes."""
        self._processes.close()

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
