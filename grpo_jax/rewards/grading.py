"""Reward functions in processes of their own, which are killed when they hang.

    with Grader("my_rewards.py:solved", deadline=5.0, chunk=1) as grader:
        task = Task(reward=grader, ...)

A grader is a reward like any other, one that always answers: what its function has nothing to say about is None,
and counted.
"""

import math
from collections.abc import Sequence
from typing import Any

from grpo_jax.data.types import MOST_SPANS, Completion, Earned, Example, Span
from grpo_jax.rewards.processes import Answers, Processes, ProcessOptions, Unanswered

# Why completions have no reward.
REASONS = ("timeout", "raised", "died", "nan", "not numbers", "bad spans", "wrong length", "budget")


def _understood(value: Any) -> Earned | Unanswered:
    if value is None:
        return None
    if isinstance(value, dict):
        return Unanswered(value["reason"], value["message"])
    spans = tuple(Span(*part) for part in value) if isinstance(value, list) else None
    number = float(value) if spans is None else math.fsum(span.reward for span in spans)
    if not math.isfinite(number):
        return Unanswered("nan", f"the function returned {number}")
    return number if spans is None else spans


_NUMBERS = Answers("reward", _understood, 128 * MOST_SPANS)


class Grader:
    """A reward function that runs in child processes; itself a reward.

    Attributes:
      counts: reason -> how many completions got None for it since the start; every one of REASONS is there.
      messages: reason -> the last thing known about it, the end of a traceback or of the function's stderr.
      source: digest of the file that the function is in; empty for one of this package.
    """

    def __init__(self, reward: str, **options: Any) -> None:
        """Starts the processes and loads the function, as `processes.Processes` does.

        Args:
          reward: "package.module:function" or "path/to/file.py:function"; async functions too.
          **options: fields of `processes.ProcessOptions`, with their defaults: deadline 10 (seconds for one call of the
            function), budget 60 (seconds for one call of the grader), chunk None (all completions in one call) …

        Raises:
          UsageError: an impossible option, or the function cannot be loaded.
        """
        self.counts = dict.fromkeys(REASONS, 0)
        self.messages: dict[str, str] = {}
        self._processes = Processes(_NUMBERS, reward, ProcessOptions(**options))
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
