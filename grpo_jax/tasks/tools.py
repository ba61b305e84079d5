"""Tools: Python functions that a policy calls, and whose results it reads.

A tool has type hints, and a docstring whose "Args:" describes each argument. The chat template describes the tools to
the model. A turn with calls is answered by their results, and a turn without calls ends the episode. Calls are read in
the formats of Qwen (JSON as in Hermes, or the tags of Qwen3.5) and of Llama 3.
"""

import inspect
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from grpo_jax.data.episodes import Key, Reply, ReplyFn, Transcript
from grpo_jax.data.types import Completion, Example
from grpo_jax.errors import UsageError, abbreviate
from grpo_jax.models.chat import (
    Chat,
    Message,
    end_marks,
    render,
    reply_encoder,
    reply_reader,
    turn_end,
    without_end,
    without_reasoning,
)
from grpo_jax.rewards.worker import import_place, load_function

Tools = Mapping[str, Callable[..., Any]]  # by name
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)  # arguments that calls can name


class Call(NamedTuple):
    """A call in a turn of the policy."""

    name: str
    arguments: Mapping[str, Any]
    wrong: str = ""  # the error in the call, if it is malformed; name and arguments are then empty
    are_texts: bool = False  # true if arguments are texts, whose types only the function's type hints tell


def in_chat_template(
    chat: Chat, in_chat: bool, *, has_tools: bool
) -> tuple[Callable[..., Sequence[int]], dict[str, Any]]:
    """Returns the function that encodes replies, and further fields of their `Environment`.

    Args:
      chat: The tokenizer and its chat template.
      in_chat: True if replies are messages.
      has_tools: True if replies are results of calls, which may have the role "tool".

    Raises:
      UsageError: The chat template writes no calls that can be read back.
    """
    roles: tuple[str, ...] = ("tool", "user") if has_tools else ("user",) if in_chat else ()
    if has_tools:
        check_calls(chat._replace(tools=None))
    fields = {"read": reply_reader(chat, roles=roles), "measure": count_calls if has_tools else None}
    return reply_encoder(chat, roles=roles), fields


def schemas_of(tools: Tools) -> list[dict[str, Any]]:
    """Returns the JSON schemas of functions for chat templates, from type hints and docstrings.

    Raises:
      UsageError: A function lacks a type hint, or a line of its docstring, or has arguments that a call cannot name.
    """
    from transformers.utils import get_json_schema

    schemas = []
    for name, function in tools.items():
        try:
            unnamed = [x for x in inspect.signature(function).parameters.values() if x.kind not in _NAMED]
            schema = {} if unnamed else get_json_schema(function)
        except Exception as error:  # transformers raises several types
            reason = " ".join(str(error).split())
            raise UsageError(
                f"the tool {name} needs a type hint and a line of its docstring for each argument: {reason}"
            ) from None
        if unnamed:
            raise UsageError(f"the tool {name} takes {unnamed[0]}, but calls name each argument: name them all")
        schemas.append(schema | {"function": schema["function"] | {"name": name}})  # calls name the key
    return schemas


_LLAMA = re.compile(r'(?=.*"(parameters|arguments)"\s*:)\{\s*"(name|type|parameters)"', re.S)
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|$)", re.S)
_TAGGED = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.S)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.S)


def calls_of(text: str) -> list[Call]:
    """Returns the calls in a turn of the policy, which may be none.

    Hermes and Qwen write <tool_call>{"name": …, "arguments": {…}}</tool_call> for each call. Qwen3.5 writes there
    <function=…><parameter=…>…</parameter></function>. A Llama 3 turn with calls consists only of {"name": …,
    "parameters": {…}}, or several of these objects with ";" between them. Any other object with a name is an answer,
    not a call. Calls within reasoning are thoughts.
    """
    text = without_reasoning(text)
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
    tagged = _TAGGED.fullmatch(text)
    if tagged and not _PARAMETER.sub("", tagged[2]).strip():
        return Call(tagged[1], dict(_PARAMETER.findall(tagged[2])), are_texts=True)
    try:
        parts = json.loads(text)
    except (ValueError, RecursionError):
        return Call("", {}, f"the call cannot be read: {text.strip()[:100]}")
    arguments = parts.get("arguments", parts.get("parameters", {})) if isinstance(parts, dict) else None
    if not isinstance(arguments, dict) or not isinstance(parts.get("name"), str):
        return Call("", {}, 'a call needs a "name", and "arguments" or "parameters" that are an object')
    return Call(parts["name"], arguments)


def check_calls(chat: Chat) -> None:
    """Checks that calls are read as the chat template writes them, and thus the model. It may write none.

    Raises:
      UsageError: They are not.
    """
    call = {"id": "a12345678", "type": "function", "function": {"name": "look_up", "arguments": {"word": "b"}}}
    question: Message = {"role": "user", "content": "a"}
    turns = [question, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        opening, whole = render(chat, turns[:1]), render(chat, turns, is_opened=False)
    except UsageError:
        return
    shared = os.path.commonprefix([opening, whole])  # noqa: RUF071, of texts
    written = without_end(whole.removeprefix(shared), end_marks(chat, turn_end(chat)))
    if "look_up" in written and [call.name for call in calls_of(written)] != ["look_up"]:
        raise UsageError(
            f"the chat template writes calls of tools as {abbreviate(written)}, and they are not read in this format: "
            "take a model that writes them as Qwen or Llama 3 does"
        )


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
        arguments = _typed(tool, call.arguments) if call.are_texts else call.arguments
        inspect.signature(tool).bind(**arguments)
        result = tool(**arguments)
        return result if inspect.isawaitable(result) else _text(result)
    except Exception as error:
        return _told(error)


def _typed(tool: Callable[..., Any], texts: Mapping[str, str]) -> dict[str, Any]:
    """Returns arguments that a call wrote as texts: texts where the function takes them, values of JSON elsewhere."""
    hints = get_type_hints(tool)
    return {name: _value(text, hints.get(name)) for name, text in texts.items()}


_CONSTANTS = {"True": "true", "False": "false", "None": "null"}  # as templates write values of Python


def _value(text: str, kind: Any) -> Any:
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    written = _CONSTANTS.get(text, text)
    if str in kinds and not (NoneType in kinds and written == "null"):
        return text
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        if {int, float, bool}.intersection(kinds):
            raise
        return text


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
    return {name: load_function("tool", f"{place}:{name}", module=module) for name in names}


def reply_with_loaded(*, tools: str) -> ReplyFn:
    """Returns `reply_with` for the functions that a text names. Child processes call this function."""
    return reply_with(load_tools(tools))
