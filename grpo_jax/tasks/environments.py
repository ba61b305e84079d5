"""Environments and tools named on the command line. They run in child processes, which are killed when they hang."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

from grpo_jax.data.episodes import (
    FAILURES,
    Environment,
    Key,
    Reply,
    Transcript,
    checked_reply,
    episode_return as episode_return,
    messages_of,
)
from grpo_jax.data.types import Example
from grpo_jax.errors import UsageError
from grpo_jax.models.chat import Chat
from grpo_jax.rewards.processes import Processes, ProcessOptions
from grpo_jax.rewards.reward import place_and_reason
from grpo_jax.rewards.worker import BadReward, digest_of_source
from grpo_jax.tasks.adapters import load_factory, trl_tools, with_prompt
from grpo_jax.tasks.tools import in_chat_template, load_tools, schemas_of


def describe_tools(*, tools: str, factory: str, in_chat: bool) -> tuple[list[dict[str, Any]] | None, str]:
    """Returns the schemas of the functions that the policy may call, and the digest of their file.

    A child process loads the functions. Without functions, the schemas are None and the digest is empty.

    Args:
      tools, factory: The options that name functions, or a class whose methods are functions.
      in_chat: True if the prompts are in the chat template.

    Raises:
      UsageError: A function cannot be loaded, or the functions cannot be described to the model.
    """
    if not (tools or factory):
        return None, ""
    flag, arguments = "--tools" if tools else "--environment-factory", {"tools": tools, "factory": factory}
    ((schemas, source),) = _call_in_process(f"{flag} {tools or factory}", f"{__name__}:description", [{}], arguments)
    if not in_chat:
        raise UsageError(f"{flag} needs a model with a chat template, which tells it of the tools, and --chat")
    return schemas, source


def description(example: Example, number: int, *, tools: str, factory: str) -> tuple[list[dict[str, Any]], str]:
    """Loads and describes functions, for `describe_tools`. Child processes call this function."""
    del example, number
    functions = trl_tools(load_factory(factory)) if factory else load_tools(tools)
    return schemas_of(functions), digest_of_source(tools or factory)


def rows_of_factory(factory: str, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns `trl_rows` of the class that a text names. A child process calls its `reset`.

    Raises:
      UsageError: `reset` raised, hung or ended its process, or its result cannot be appended to the prompt.
    """
    spec, arguments = "grpo_jax.tasks.adapters:prompt_of_factory", {"factory": factory}
    prompts = _call_in_process(f"reset of {factory}", spec, [*map(dict, rows)], arguments)
    return [with_prompt(row, prompt) for row, prompt in zip(rows, prompts, strict=True)]


def _call_in_process(what: str, spec: str, examples: Sequence[Example], arguments: Mapping[str, Any]) -> list[Any]:
    """Calls a function of an example and its number in a child process, and returns its answers, read from JSON."""
    # One call for eight examples: a million calls at once would fill the memory.
    limits = ProcessOptions(arguments, ProcessOptions.start_deadline, threading.TIMEOUT_MAX, chunk=8, workers=1)
    with closing(Processes("function", spec, limits, lambda answer: answer)) as processes:
        answers = processes.ask(examples, range(len(examples)))
    for failure in (answer for answer in answers if isinstance(answer, BadReward)):
        reason = place_and_reason(str(failure))
        raise UsageError(reason if failure.reason == "raised" else f"{what} gives no answer: {reason}")
    return answers


@contextmanager
def open_environment(
    chat: Chat,
    in_chat: bool,
    *,
    environment: str = "",
    tools: str = "",
    factory: str = "",
    source: str = "",
    **limits: Any,
) -> Iterator[Environment]:
    """Opens an environment in child processes that end with the block.

    Args:
      chat: The tokenizer and its chat template.
      in_chat: True if replies are messages.
      environment, tools, factory: One of the options of a task that name the environment.
      source: The digest of the file of tools, or of a factory.
      limits: Options of `environment_in_processes`.
    """
    spec, arguments, named = environment, dict[str, str](), tools or factory
    if tools:
        spec, arguments = "grpo_jax.tasks.tools:reply_with_loaded", {"tools": tools}
    elif factory:
        spec, arguments = "grpo_jax.tasks.adapters:environment_of_factory", {"factory": factory}
    encode, more = in_chat_template(chat, in_chat, has_tools=bool(named))
    with environment_in_processes(spec, encode, arguments=arguments, **limits) as opened:
        yield opened._replace(source=source if named else opened.source, **more)


@contextmanager
def environment_in_processes(
    spec: str, encode: Callable[[str], Sequence[int]], **options: Any
) -> Iterator[Environment]:
    """Opens an environment whose function runs in child processes, which end with the block.

    A call that hangs, raises, dies or returns anything other than a reply ends only its own episode.

    Args:
      spec: The name of the function, as "package.module:function" or "path/to/file.py:function". It maps (example,
        transcript, key) to a `Reply`, and may be async.
      encode: Maps the text of a reply to token ids.
      **options: Fields of `processes.ProcessOptions` except chunk, with their defaults, such as deadline, 10 (seconds
        for one reply), and budget, 60 (seconds for the replies to one turn of all episodes; episodes without one end).

    Yields:
      The environment.

    Raises:
      UsageError: An option is invalid, or the function cannot be loaded.
    """
    processes = Processes("environment", spec, ProcessOptions(chunk=1, **options), _read_reply)
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


def _reply(answer: Reply | BadReward) -> Reply:
    if isinstance(answer, Reply):
        return answer
    return Reply(failure=answer.reason if answer.reason in FAILURES else "not a reply", message=str(answer))
