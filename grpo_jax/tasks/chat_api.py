"""Chat completions as OpenAI's API writes them: reading requests, and writing answers.

The run decides how it samples. A request that asks for anything else is refused, so that an agent never trains a model
on texts that it did not want.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from grpo_jax.data.types import Completion
from grpo_jax.errors import UsageError, abbreviate
from grpo_jax.models.chat import Message, check_text, parse_calls, parse_json
from grpo_jax.tasks.endpoint import BadRequest
from grpo_jax.tasks.tools import calls_of

MODEL = "policy"  # the name of the only model

# Fields of requests that change no token
_IGNORED = {"messages", "tools", "user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier"}
# Fields that agents may send with these values. `request_values` adds those of the run
_VALUES: Mapping[str, Any] = {
    "model": MODEL,
    "n": 1,
    "stream": False,
    "logprobs": False,
    "top_logprobs": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "modalities": ["text"],
}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_FIELDS = ("role", "content", "name", "tool_call_id", "tool_calls")  # of a message
_EMPTY: tuple[Any, ...] = (None, "", [], {})


class ChatRequest(NamedTuple):
    """A request for a chat completion."""

    messages: list[Message]
    tools: list[Mapping[str, Any]]  # JSON schemas of functions; empty: there are no tools


def request_values(sampling: Any, stop: Sequence[str]) -> dict[str, Any]:
    """Returns the values that fields of requests may have.

    Args:
      sampling: The sampling options of the run, with max_tokens, temperature and top_p.
      stop: The stop texts of the run.
    """
    most = sampling.max_tokens
    own = {"max_tokens": most, "max_completion_tokens": most, "temperature": sampling.temperature}
    return {**_VALUES, **own, "top_p": sampling.top_p, "stop": list(stop)}


def read_request(body: bytes, values: Mapping[str, Any]) -> ChatRequest:
    """Reads a request for a chat completion.

    Args:
      body: The JSON of the request.
      values: The values that fields may have: see `request_values`.

    Raises:
      BadRequest: The request is malformed, or asks for anything that the run does not do.
    """
    try:
        fields = parse_json(body.decode(), dict)
    except ValueError:  # no JSON, no object, or no UTF-8
        raise BadRequest("the body is no JSON object of a few levels in UTF-8") from None
    for name, value in fields.items():
        if name in _IGNORED or value in _EMPTY:
            continue
        if name not in values:
            raise BadRequest(f"{abbreviate(name)} is not supported: leave it out", param=name)
        asked = [value] if name == "stop" and isinstance(value, str) else value
        if asked != values[name]:
            raise BadRequest(
                f"{name} is {abbreviate(value)}, and here it is always {abbreviate(values[name])}: leave it out",
                param=name,
            )
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages should be a list of at least one message", param="messages")
    return ChatRequest([read_message(x, f"messages[{i}]") for i, x in enumerate(messages)], _read_tools(fields))


def read_message(fields: Any, where: str) -> Message:
    """Reads a message, without fields that are empty. Calls of tools have parsed arguments.

    Args:
      fields: The message as JSON.
      where: Its place, for errors.

    Raises:
      BadRequest: It is no message of text.
    """
    if not isinstance(fields, dict) or fields.get("role") not in _ROLES:
        raise BadRequest(f"{where} should be an object with a role among {', '.join(_ROLES)}", param=where)
    if other := [name for name, value in fields.items() if name not in _FIELDS and value not in _EMPTY]:
        raise BadRequest(f"{where} has {abbreviate(other[0])}, which is not supported", param=where)
    content = fields.get("content") or ""
    if isinstance(content, list):
        content = "".join(_text_of(part, where) for part in content)
    if not isinstance(content, str) or not all(isinstance(fields.get(x) or "", str) for x in ("name", "tool_call_id")):
        raise BadRequest(f"{where} should have texts as content, name and tool_call_id", param=where)
    if not (content or fields.get("tool_calls")) and fields["role"] not in ("tool", "assistant"):
        raise BadRequest(f"{where} has no content", param=where)
    message = {name: fields[name] for name in _FIELDS if fields.get(name) not in _EMPTY} | {"content": content}
    try:
        check_text(json.dumps(message, ensure_ascii=False), where)
        message = {**parse_calls(message)}
        if not all(isinstance(call["function"]["name"], str) for call in message.get("tool_calls", ())):
            raise TypeError
    except UsageError as error:
        raise BadRequest(str(error), param=where) from None
    except (LookupError, TypeError, ValueError):
        raise BadRequest(f"{where} has calls of tools that are not as OpenAI's API writes them", param=where) from None
    return message


def _text_of(part: Any, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise BadRequest(f"{where} has a part that is no text: images, sounds and files are not supported", param=where)
    return part["text"]


def _read_tools(fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    tools = fields.get("tools") or []
    try:
        if not isinstance(tools, list) or not all(tool["function"]["name"] + "" for tool in tools):
            raise TypeError
    except (LookupError, TypeError):
        raise BadRequest("tools should be a list of functions with names", param="tools") from None
    return tools


def added_messages(
    transcript: Sequence[Message], tools: Sequence[Mapping[str, Any]], request: ChatRequest
) -> list[Message]:
    """Returns the messages that a request adds to a transcript.

    Args:
      transcript: The messages that the model has read and written.
      tools: The tools of the first request.
      request: The request, which has these tools and begins with these messages.

    Raises:
      BadRequest: It does not continue the transcript.
    """
    messages = request.messages
    if request.tools != tools:
        raise BadRequest("its tools differ from those of the first request")
    for i, (known, message) in enumerate(zip(transcript, messages, strict=False)):
        if known != message:
            name = next((x for x in _FIELDS if known.get(x) != message.get(x)), "role")
            raise BadRequest(
                f"messages[{i}] does not continue the transcript of this rollout: its {name} is "
                f"{abbreviate(message.get(name))}, and was {abbreviate(known.get(name))}"
            )
    added = messages[len(transcript) :]
    if not added or any(message["role"] == "assistant" for message in added):
        what = "a message of the assistant that the model did not write" if added else "no message"
        raise BadRequest(f"the request adds {what} to the transcript of this rollout")
    return added


def answer_message(action: Completion, turn: int, *, has_tools: bool) -> dict[str, Any]:
    """Returns a turn of the policy as the assistant's message.

    Args:
      action: The turn.
      turn: Its number, from 1, for the names of calls.
      has_tools: True if the request had tools. Then calls become `tool_calls`, unless one cannot be read.
    """
    calls = calls_of(action) if has_tools else []
    if not calls or any(call.wrong for call in calls):
        return {"role": "assistant", "content": str(action)}
    before, mark, _ = action.partition("<tool_call>")
    functions = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in calls]
    # Mistral's templates take names of nine letters or digits
    written = [{"id": f"call{turn:02}{i:03}", "type": "function", "function": x} for i, x in enumerate(functions)]
    return {"role": "assistant", "content": (before.strip() if mark else "") or None, "tool_calls": written}


def write_answer(message: Mapping[str, Any], name: str, *, is_cut: bool) -> dict[str, Any]:
    """Returns the answer to a request.

    Args:
      message: The assistant's message.
      name: The name of the answer.
      is_cut: True if the policy has no tokens left.
    """
    reason = "length" if is_cut else "tool_calls" if message.get("tool_calls") else "stop"
    return {
        "id": name,
        "object": "chat.completion",
        "created": 0,  # so that answers of a repeated run are equal
        "model": MODEL,
        "choices": [{"index": 0, "message": {**message}, "finish_reason": reason, "logprobs": None}],
    }


MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "grpo_jax"}]}
