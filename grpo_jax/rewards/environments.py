"""Environments in processes of their own, which are killed when they hang, as graders are."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from grpo_jax.data.episodes import (
    FAILURES,
    MAX_CHARACTERS,
    Environment,
    Key,
    Reply,
    Transcript,
    checked_reply,
    messages_of,
)
from grpo_jax.data.types import Example
from grpo_jax.rewards.processes import Processes, ProcessOptions, Unanswered

_MOST_BYTES = 12 * MAX_CHARACTERS  # of a reply: JSON writes some characters as two of six each


@contextmanager
def environment_in_processes(
    spec: str, encode: Callable[[str], Sequence[int]], **options: Any
) -> Iterator[Environment]:
    """Opens an environment whose function runs in child processes, which end with the block.

    A call that hangs, raises, dies or returns anything other than a reply ends its episode, and no other episode.

    Args:
      spec: "package.module:function" or "path/to/file.py:function", (example, transcript, key) -> `Reply`; async too.
      encode: text of a reply -> ids.
      **options: fields of `processes.ProcessOptions` but chunk, with their defaults: deadline 10 (seconds for a reply),
        budget 60 (seconds for the replies of a turn of all episodes; those that have none by then end) …

    Yields:
      The environment.

    Raises:
      UsageError: an impossible option, or the function cannot be loaded.
    """
    processes = Processes("environment", spec, ProcessOptions(chunk=1, **options), _read_reply, _MOST_BYTES)
    messages: dict[str, str] = {}

    def ask(examples: Sequence[Example], transcripts: Sequence[Transcript], keys: Sequence[Key]) -> list[Reply]:
        questions = [(tuple(transcript), key) for transcript, key in zip(transcripts, keys, strict=True)]
        replies = [_reply(answer) for answer in processes.ask(examples, questions)]
        messages.update(messages_of(replies))
        return replies

    try:
        yield Environment(ask, encode, messages, source=processes.source)
    finally:
        processes.close()


def _read_reply(value: Any) -> Reply:
    return checked_reply(Reply(**value))


def _reply(answer: Reply | Unanswered) -> Reply:
    if isinstance(answer, Reply):
        return answer
    return Reply(failure=answer.reason if answer.reason in FAILURES else "not a reply", message=answer.message)
