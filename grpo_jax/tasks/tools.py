"""Tools: Python functions that a policy calls, and whose results it reads.

A tool has type hints, and a docstring whose "Args:" describes each argument. The model's chat template tells it of
them. A turn with calls is answered by their results, one without calls ends the episode. Calls are read in the formats
of Qwen (Hermes) and of Llama 3.
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
    """A call that the policy asks for."""

    name: str
    arguments: Mapping[str, Any]
    wrong: str = ""  # what is wrong with it; then there is neither name nor arguments


def schemas_of(tools: Tools) -> list[dict[str, Any]]:
    """The JSON schemas of functions, from type hints and docstrings, as chat templates take them.

    Raises:
      UsageError: a function lacks a hint or a line of its docstring.
    """
    from transformers.utils import get_json_schema

    schemas = []
    for name, function in tools.items():
        try:
            schemas.append(get_json_schema(function))
        except Exception as error:  # it has several of its own
            reason = " ".join(str(error).split())
            raise UsageError(
                f"the tool {name} needs a type hint and a line of its docstring for each argument: {reason}"
            ) from None
    return schemas


_LLAMA = re.compile(r'(?=.*"(parameters|arguments)"\s*:)\{\s*"(name|type|parameters)"', re.S)
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|$)", re.S)


def calls_of(text: str) -> list[Call]:
    """The calls in a turn of the policy; none where it calls nothing.

    Hermes and Qwen write <tool_call>{"name": …, "arguments": {…}}</tool_call>, as often as they call. The turn of a
    Llama 3 that calls is nothing but {"name": …, "parameters": {…}}, or several with ";" between them. Another object
    with a name is an answer.
    """
    if "<tool_call>" in text:
        return [_call(parts, "arguments") for parts in _HERMES.findall(text)]
    stripped = text.strip().removeprefix("<|python_tag|>").strip()
    if not _LLAMA.match(stripped):
        return []
    return [_call(part, "parameters") for part in _objects(stripped)]


def _objects(text: str) -> list[str]:
    """The JSON objects of a text with ";" between them; what is none is the last."""
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


def _call(text: str, key: str) -> Call:
    try:
        parts = json.loads(text)
    except (ValueError, RecursionError):
        return Call("", {}, f"the call is no JSON: {text.strip()[:100]}")
    arguments = parts.get(key, parts.get("arguments", {})) if isinstance(parts, dict) else None
    if not isinstance(arguments, dict) or not isinstance(parts.get("name"), str):
        return Call("", {}, f'a call needs a "name" and "{key}" that are an object')
    return Call(parts["name"], arguments)


def reply_with(tools: Tools) -> ReplyFn:
    """The environment that answers calls of these functions, which may be async.

    A call that cannot be made, or that raises, is answered by the error. Several calls of a turn are answered in their
    order, a line each. A turn without calls ends the episode.
    """

    async def reply_later(example: Example, transcript: Transcript, key: Key) -> Reply:
        results = [await _awaited(_result(tools, call)) for call in calls_of(transcript[-1].action)]
        return _reply(results)

    def reply(example: Example, transcript: Transcript, key: Key) -> Reply:
        return _reply([_result(tools, call) for call in calls_of(transcript[-1].action)])

    return reply_later if any(inspect.iscoroutinefunction(tool) for tool in tools.values()) else reply


_ERROR = "Error: "
_ERRORS = re.compile(rf"(?<!\w){_ERROR}")  # not the name of an exception that ends so


def _reply(results: Sequence[str]) -> Reply:
    return Reply("\n".join(results)) if results else Reply(done=True)


def _result(tools: Tools, call: Call) -> Any:
    """The text of a result or of what is wrong; of an async function what gives it."""
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
    return result if isinstance(result, str) else json.dumps(result, default=str)


def count_calls(completion: Completion) -> dict[str, float]:
    """How often an episode called a tool, and how many of these calls were answered by an error."""
    observations = completion.observations
    calls = sum(len(calls_of(action)) for action in completion.actions[: len(observations)])
    return {"calls": calls, "bad_calls": sum(len(_ERRORS.findall(text)) for text in observations)}


# ---- as a command line names them


def parse_tools(text: str) -> tuple[str, list[str]]:
    """The file or module, and the names of functions in it: "file.py:f,g".

    Raises:
      UsageError: the text is not of this form.
    """
    place, _, names = text.rpartition(":")
    parts = [name.strip() for name in names.split(",")]
    if not place or not all(name.isidentifier() for name in parts):
        raise UsageError(f"the tools {text!r} must be path/to/file.py:function,function or package.module:function")
    return place, parts


def load_tools(text: str) -> dict[str, Callable[..., Any]]:
    """The functions that a text names, by name.

    Raises:
      UsageError: it names none that can be loaded.
    """
    place, names = parse_tools(text)
    module = import_place("tool", place, text)  # once, so that tools of one file share its state
    return {name: load("tool", f"{place}:{name}", module=module) for name in names}


def environment_of_tools(*, tools: str) -> ReplyFn:
    """The environment of the functions that a text names: `environments` calls this in its processes."""
    return reply_with(load_tools(tools))
