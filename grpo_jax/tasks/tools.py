"""Tools: Python functions that a policy calls, and whose results it reads.

A tool has type hints, and a docstring whose "Args:" describes each argument. The chat template describes the tools to
the model. A turn with calls is answered by their results, and a turn without calls ends the episode. Calls are read in
the formats of Qwen (Hermes) and of Llama 3.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from grpo_jax.data.episodes import Key, Reply, ReplyFn, Transcript
from grpo_jax.data.types import Completion, Example
from grpo_jax.errors import UsageError
from grpo_jax.rewards.worker import import_place, load

Tools = Mapping[str, Callable[..., Any]]  # by name


class Call(NamedTuple):
    """A call in a turn of the policy."""

    name: str
    arguments: Mapping[str, Any]
    wrong: str = ""  # the error in the call, if it is malformed; name and arguments are then empty


def schemas_of(tools: Tools) -> list[dict[str, Any]]:
    """Returns the JSON schemas of functions for chat templates, from type hints and docstrings.

    Raises:
      UsageError: A function lacks a type hint, or a line of its docstring.
    """
    from transformers.utils import get_json_schema

    schemas = []
    for name, function in tools.items():
        try:
            schema = get_json_schema(function)
        except Exception as error:  # transformers raises several types
            reason = " ".join(str(error).split())
            raise UsageError(
                f"the tool {name} needs a type hint and a line of its docstring for each argument: {reason}"
            ) from None
        schemas.append(schema | {"function": schema["function"] | {"name": name}})  # calls name the key
    return schemas


_LLAMA = re.compile(r'(?=.*"(parameters|arguments)"\s*:)\{\s*"(name|type|parameters)"', re.S)
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|$)", re.S)


def calls_of(text: str) -> list[Call]:
    """Returns the calls in a turn of the policy, which may be none.

    Hermes and Qwen write <tool_call>{"name": …, "arguments": {…}}</tool_call> for each call. A Llama 3 turn with calls
    consists only of {"name": …, "parameters": {…}}, or several of these objects with ";" between them. Any other
    object with a name is an answer, not a call.
    """
    if "<tool_call>" in text:
        return [_call(parts) for parts in _HERMES.findall(text)]
    stripped = text.strip().removeprefix("<|python_tag|>").strip()
    if not _LLAMA.match(stripped):
        return []
    return [_call(part) for part in _objects(stripped)]


def _objects(text: str) -> list[str]:
    """Splits a text into JSON objects with ";" between them. Any rest that is not JSON is the last part."""
    parts: list[str] = []
    decoder = json.JSONDecoder()
    while text:
        try:
            _, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            return [*parts, text]
        parts.append(text[:end])
        text = text[end:].lstrip("; \n")
    return parts


def _call(text: str) -> Call:
    """Reads a call. Without the arguments of one format, those of the other count, so that none are left out."""
    try:
        parts = json.loads(text)
    except (ValueError, RecursionError):
        return Call("", {}, f"the call is no JSON: {text.strip()[:100]}")
    arguments = parts.get("arguments", parts.get("parameters", {})) if isinstance(parts, dict) else None
    if not isinstance(arguments, dict) or not isinstance(parts.get("name"), str):
        return Call("", {}, 'a call needs a "name", and "arguments" or "parameters" that are an object')
    return Call(parts["name"], arguments)


def reply_with(tools: Tools) -> ReplyFn:
    """Makes an environment that answers calls of these functions, which may be async.

    The answer to a call that is invalid or raises is its error. Several calls in a turn are answered in order, one line
    each. A turn without calls ends the episode.
    """

    async def reply_later(example: Example, transcript: Transcript, key: Key) -> Reply:
        results = [await _awaited(_result(tools, call)) for call in calls_of(transcript[-1].action)]
        return _reply(results)

    def reply(example: Example, transcript: Transcript, key: Key) -> Reply:
        return _reply([_result(tools, call) for call in calls_of(transcript[-1].action)])

    return reply_later if any(inspect.iscoroutinefunction(tool) for tool in tools.values()) else reply


_ERROR = "Error: "
_ERRORS = re.compile(f"^{_ERROR}", re.M)  # messages of errors and results may contain the word too


def _reply(results: Sequence[str]) -> Reply:
    return Reply("\n".join(results)) if results else Reply(done=True)


def _result(tools: Tools, call: Call) -> Any:
    """Returns the result of a call as text, or its error; for an async function, an awaitable of the result."""
    if call.wrong:
        return _ERROR + call.wrong
    if call.name not in tools:
        return f"{_ERROR}there is no tool {call.name}: the tools are {', '.join(tools)}"
    tool = tools[call.name]
    try:
        inspect.signature(tool).bind(**call.arguments)
        result = tool(**call.arguments)
        return result if inspect.isawaitable(result) else _text(result)
    except Exception as error:
        return _told(error)


async def _awaited(result: Any) -> str:
    try:
        return _text(await result) if inspect.isawaitable(result) else result
    except Exception as error:
        return _told(error)


def _told(error: Exception) -> str:
    return f"{_ERROR}{type(error).__name__}: {error}"


def _text(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)


def count_calls(completion: Completion) -> dict[str, float]:
    """Counts the calls of an episode, and the calls that were answered by an error."""
    turns = [turn for turn in completion.turns if turn.observation is not None]
    calls = [len(calls_of(turn.action)) for turn in turns]
    texts = [turn.message["content"] if turn.message else str(turn.observation) for turn in turns]
    errors = [len(_ERRORS.findall(text)) for text in texts]
    return {"calls": sum(calls), "bad_calls": sum(map(min, calls, errors))}


# ---- tools named on a command line


def load_tools(text: str) -> dict[str, Callable[..., Any]]:
    """Loads the functions named by a text such as "file.py:f,g", and returns them by name.

    Raises:
      UsageError: The text does not have this form, or a function cannot be loaded.
    """
    place, _, after = text.rpartition(":")
    names = [name.strip() for name in after.split(",")]
    if not place or not all(name.isidentifier() for name in names):
        raise UsageError(f"the tools {text!r} must be path/to/file.py:function,function or package.module:function")
    module = import_place("tool", place, text)  # once, so that tools of one file share its state
    return {name: load("tool", f"{place}:{name}", module=module) for name in names}


def reply_with_loaded(*, tools: str) -> ReplyFn:
    """Returns `reply_with` for the functions that a text names. Child processes call this function."""
    return reply_with(load_tools(tools))
