"""The chat template of a tokenizer, by which messages become the text that a model reads and learns.

Every method uses these functions: prompts, completions to learn or to score, and replies of environments. Tokens are
made from whole texts, as `apply_chat_template` of transformers does.
"""

import contextlib
import ctypes
import inspect
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import date
from functools import cache, lru_cache, partial
from hashlib import sha256
from itertools import pairwise
from threading import Lock, get_ident
from typing import Any, NamedTuple

from grpo_jax.errors import UsageError, abbreviate, reason_of

Message = Mapping[str, Any]  # {"role": "user", "content": "…"}
Turns = str | list[Message]  # a prompt as text, or as messages

# Replaces the function of transformers in templates that write today's date: a run must see the same prompts when it
# resumes on another day.
_FIXED_DATE = "{% macro strftime_now(form) %}{{ form"
for _letter in "YymBbdAaHIMSpjF":
    _value = f"{date(2025, 1, 1):%{_letter}}"
    _FIXED_DATE += f".replace('%{_letter}', '{_value}').replace('%-{_letter}', '{_value.lstrip('0') or 0}')"
_FIXED_DATE += " }}{% endmacro %}"
_SECONDS, _CHARACTERS = 5.0, 20_000_000  # limits of what a template takes and writes
_ATTEMPTS = 10  # to stop a template
_DELIMITERS = 1024  # orders of messages whose delimiters are remembered
DEEPEST = 100  # levels of JSON
ENCODING = Lock()  # held while a tokenizer encodes, in which transformers keeps the options of the call
_ANSWER, _REPLY = "answer-of-the-assistant", "reply-to-the-assistant"  # contents by which the template is explored


class Chat(NamedTuple):
    """A tokenizer, and all that decides how its template writes messages."""

    tokenizer: Any  # a transformers tokenizer
    eos_ids: tuple[int, ...] = ()  # the ids of the tokens that end a text
    tools: Sequence[Mapping[str, Any]] | None = None  # JSON schemas of functions that the template describes
    kwargs: Mapping[str, Any] = {}  # variables of the template, such as enable_thinking


def make_chat(tokenizer: Any, eos_ids: tuple[int, ...], kwargs: Any = None, tools: Any = None) -> Chat:
    """Makes a `Chat`, whose variables of the template may be JSON, and checks that the template has them.

    Args:
      tokenizer, eos_ids, kwargs, tools: See `Chat`.

    Raises:
      UsageError: `kwargs` is no object, or the template has no such variable.
    """
    chat = Chat(tokenizer, eos_ids, tools)
    return chat._replace(kwargs=template_kwargs(chat, kwargs, "chat_template_kwargs"))


def with_kwargs(chat: Chat, kwargs: Mapping[str, Any]) -> Chat:
    """Replaces some variables of the template. A variable "tools" replaces the tools."""
    variables = {**chat.kwargs, **kwargs}
    return chat._replace(tools=variables.pop("tools", chat.tools), kwargs=variables)


class TurnEnd(NamedTuple):
    """The text that a template writes after the content of the last assistant's message."""

    tail: str  # all of it
    # its beginning up to a space or line break, such as "<|im_end|>"; the model must learn to write it. Without a tail,
    # the EOS with which the template begins the next turn, such as <|user|> of GLM-4
    learned: str


def render(chat: Chat, messages: Sequence[Message], place: str = "messages", *, is_opened: bool = True) -> str:
    """Writes messages in the chat template. Templates that write today's date get 1 January 2025.

    Args:
      chat: The tokenizer and its template.
      messages: The messages of a conversation.
      place: The place of the messages, for errors.
      is_opened: True to open the assistant's turn at the end.

    Raises:
      UsageError: There is no template, or it does not accept the messages or the tools, or takes too long.
    """
    tokenizer, tools = chat.tokenizer, chat.tools
    if not tokenizer.chat_template:
        raise UsageError(
            "the prompts are chat messages, but the tokenizer has no chat template: give prompts as text, or put a "
            "chat_template.jinja into the model's folder"
        )
    try:
        text: str = _apply(tokenizer, messages, tokenize=False, **_options(chat, is_opened))
    except TimeoutError:
        raise UsageError(
            f"the chat template takes more than {_SECONDS:g} seconds for {place}: mend a loop in it that does not end"
        ) from None
    except Exception as error:  # templates raise any type of error
        raise UsageError(f"the chat template refuses {place}: {reason_of(error)}") from error
    if len(text) > _CHARACTERS:
        raise UsageError(f"the chat template writes {len(text):,} characters for {place}: mend it")
    check_text(text, f"the text that the chat template writes for {place}")
    if tools and not all(tool["function"]["name"] in text for tool in tools):
        raise UsageError(
            "the chat template writes no tools into the prompt, so the model would never hear of them: take a model "
            "whose template does"
        )
    return text


def check_roles(chat: Chat, messages: Sequence[Message], place: str) -> None:
    """Checks that the template writes every message except the assistant's, which it may shorten.

    Raises:
      UsageError: The template leaves out a message: it does not know its role, or not at its place.
    """
    probes = [m if m["role"] == "assistant" else {**m, "content": f"message-{i}-"} for i, m in enumerate(messages)]
    try:
        written = render(chat, probes)
    except UsageError:  # the template reads the contents
        return
    for message in probes:
        if message["role"] != "assistant" and message["content"] not in written:
            raise UsageError(
                f"the chat template leaves out the text of the role {message['role']} in {place}: move it into a "
                "message of another role"
            )


def _apply(tokenizer: Any, messages: Sequence[Message], **options: Any) -> Any:
    """Calls `apply_chat_template` in another thread, and stops it there after some seconds, whatever it loops over.

    Raises:
      TimeoutError: It was stopped. It may also raise any other error.
    """
    started = list[tuple[int, float]]()  # the thread, and its time before the call

    def call() -> Any:
        started.append((get_ident(), _seconds_of(get_ident())))
        try:
            return tokenizer.apply_chat_template([*map(parse_calls, messages)], **options)
        except TypeError:  # some templates, such as DeepSeek's, take the arguments of calls as JSON
            return tokenizer.apply_chat_template(list(messages), **options)

    future = _threads(os.getpid()).submit(call)
    while not wait([future], _SECONDS).done:
        if not any(_seconds_of(thread) - before >= _SECONDS for thread, before in started):
            continue
        for _ in range(_ATTEMPTS):  # a destructor or a callback of the garbage collector swallows the exception
            for thread, _before in started if not future.done() else ():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeoutError))
            wait([future], 0.1)
        raise TimeoutError
    return future.result()


def _seconds_of(thread: int) -> float:
    """Returns the CPU time of a thread, which a busy machine does not lengthen; the time of the clock on macOS."""
    clock = getattr(time, "pthread_getcpuclockid", None)
    return time.clock_gettime(clock(thread)) if clock else time.monotonic()


@cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Makes the threads of a process, which take over calls faster than new ones. A fork has none of its parent's."""
    return ThreadPoolExecutor(thread_name_prefix="chat-template")


def parse_calls(message: Message) -> Message:
    """Parses the arguments of calls of tools, which may be JSON, as OpenAI stores them.

    Raises:
      TypeError, ValueError: The arguments are no object, or the calls are no list.
    """

    def one(call: Any) -> Any:
        return {**call, "arguments": parse_json(call["arguments"], Mapping)} if "arguments" in call else call

    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": one(call["function"])} if "function" in call else one(call)
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def parse_json(value: Any, kind: Any) -> Any:
    """Parses a value of a kind that may be JSON.

    Raises:
      ValueError: The text is no JSON, or the value is of another kind or has too many levels.
    """
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except RecursionError as error:
        raise ValueError("too many levels") from error
    level = [value]
    for _ in range(DEEPEST):
        parts = [x.values() if isinstance(x, Mapping) else x for x in level if isinstance(x, Mapping | list)]
        level = [x for part in parts for x in part]
    if level or not isinstance(value, kind):
        raise ValueError("too many levels, or another kind")
    return value


def check_text(text: str, where: str = "a text") -> None:
    """Checks that a text can be encoded.

    Args:
      text: The text to check.
      where: The place of the text, as the subject of the error message.

    Raises:
      UsageError: The text holds half of a surrogate pair. The message quotes the text around it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = abbreviate(text[max(error.start - 20, 0) : error.start + 20])
        raise UsageError(f"{where} holds half of a surrogate pair, which is no text: mend {place}") from None


def _options(chat: Chat, is_opened: bool) -> dict[str, Any]:
    """Returns the arguments of `apply_chat_template`."""
    tokenizer, tools = chat.tokenizer, chat.tools
    options: dict[str, Any] = {**chat.kwargs} | ({} if tools is None else {"tools": list(tools)})
    if "strftime_now" in str(tokenizer.chat_template):
        options["chat_template"] = _FIXED_DATE + tokenizer.get_chat_template(tools=tools)
    return options | {"add_generation_prompt": is_opened}


def digest_of_template(tokenizer: Any) -> str:
    """Returns a digest of the tokenizer's chat template, or "" if it has none."""
    template = getattr(tokenizer, "chat_template", None)
    return sha256(str(template).encode(errors="surrogatepass")).hexdigest()[:16] if template else ""


def template_kwargs(chat: Chat, value: Any, place: str) -> dict[str, Any]:
    """Checks variables of the chat template.

    Args:
      chat: The tokenizer and its template.
      value: A dict, its JSON, or None or "" for no variables.
      place: The option or column that has the value, for errors.

    Raises:
      UsageError: The value is no object, or the template has no such variable.
    """
    try:
        kwargs = parse_json(value or {}, Mapping)
    except ValueError:
        raise UsageError(
            f'{place} is no JSON object of at most {DEEPEST} levels: give one, such as {{"enable_thinking": false}}'
        ) from None
    taken = inspect.signature(chat.tokenizer.apply_chat_template).parameters if kwargs else ()
    known = _variables(str(chat.tokenizer.chat_template)) if kwargs else ()
    for name in kwargs:
        if name in taken or name not in known:
            raise UsageError(f"{place} sets {name}, but the chat template has no such variable: leave it out")
    return dict(kwargs)


@cache
def _variables(template: str) -> set[str]:
    """Returns the names in the code of a template, without its texts and the fields of objects."""
    from jinja2 import Environment, TemplateSyntaxError  # needed only to check variables

    try:
        tokens = [(kind, text) for _, kind, text in Environment().lex(template) if kind != "whitespace"]
    except TemplateSyntaxError:  # writing the prompts will raise it
        return {*re.findall(r"\w+", template)}
    pairs = pairwise([("", ""), *tokens])
    return {name for before, (kind, name) in pairs if kind == "name" and before != ("operator", ".")} - {"messages"}


def row_kwargs(chat: Chat, row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the variables of the chat template in the columns chat_template_kwargs and tools of a row.

    Args:
      chat: The tokenizer and its template. If it has tools, the column is not read.
      row: The row. "tools" is a list of JSON schemas of functions, or its JSON.

    Raises:
      UsageError: A column is invalid.
    """
    where = getattr(row, "where", "a row")
    kwargs = template_kwargs(chat, row.get("chat_template_kwargs"), f"{where}: column chat_template_kwargs")
    tools = row.get("tools")
    if chat.tools or not tools or not chat.tokenizer.chat_template:
        return kwargs
    try:
        tools = parse_json(tools, Sequence)
        assert all(isinstance(tool["function"]["name"], str) for tool in tools)
    except (AssertionError, KeyError, TypeError, ValueError):
        raise UsageError(
            f"{where}: column tools should hold JSON schemas of functions, which the chat template describes"
        ) from None
    return kwargs | {"tools": tools}


def control_tokens(tokenizer: Any) -> re.Pattern[str] | None:
    """Returns a pattern for texts that a tokenizer reads as special tokens, such as the end of a turn."""
    special = [token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values() if token.special]
    return re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True)))) if special else None


def decode(chat: Chat, ids: Sequence[int], end: Sequence[int] = ()) -> str:
    """Decodes a completion. Only its end, tokens that end a text and padding are left out: tags may be special tokens.

    Args:
      chat: The tokenizer, and the tokens that end a text.
      ids: The tokens of the completion.
      end: The tokens that the template writes before the one that ends a turn: see `make_decoder`.
    """
    left_out = {*chat.eos_ids, chat.tokenizer.pad_token_id}
    ids = [i for i in ids if i not in left_out]
    ids = ids[: -len(end)] if end and ids[-len(end) :] == end else ids
    text: str = chat.tokenizer.decode(ids, skip_special_tokens=False)
    return text


# ---- prompts


def prompt_writer(chat: Chat, in_chat: bool, system: str | None = None) -> Callable[..., Turns]:
    """Makes the function that turns a prompt into the text or the messages to encode.

    Args:
      chat: The tokenizer and its template.
      in_chat: True to make each prompt that is text a user's message.
      system: A system message before prompts that have none. Prompts that are text need `in_chat` with it.

    Returns:
      The function, which may also take the prompt's own variables of the template. It raises UsageError if chat is on
      without a template, if a system message or variables are given for text with chat off, or if a text is written in
      the template already.
    """
    bos, opening, header = getattr(chat.tokenizer, "bos_token", None) or "", "", ""
    if in_chat and chat.tokenizer.chat_template:
        try:
            written = render(chat._replace(tools=None), [{"role": "user", "content": _REPLY}])
            before = written.partition(_REPLY)[0].removeprefix(bos)
        except UsageError:  # encoding the prompts will raise it
            before = ""
        control = control_tokens(chat.tokenizer)
        marks = list(control.finditer(before)) if control else []
        opening = marks[0].group() if marks else before.strip()
        header = before[marks[-1].start() :].strip() if marks else ""

    def is_written(text: str) -> bool:
        return any(mark and text.lstrip().startswith(mark) for mark in (bos, opening)) or bool(
            header and header in text
        )

    def write(prompt: Turns, kwargs: Mapping[str, Any] = {}) -> Turns:
        if isinstance(prompt, str):
            if not in_chat:
                if system is not None or chat.kwargs or kwargs.keys() - {"tools"}:
                    what = "a system message needs" if system is not None else "chat_template_kwargs need"
                    raise UsageError(f"{what} chat messages: turn chat on, or write it into the prompts")
                return prompt
            if not chat.tokenizer.chat_template:
                raise UsageError("chat is on, but the tokenizer has no chat template: turn it off")
            if is_written(prompt):
                raise UsageError(
                    f"the prompt {abbreviate(prompt)} is written in the chat template already, and would be put into "
                    "it again: turn it off with --chat False, or give messages"
                )
            prompt = [{"role": "user", "content": prompt}]
        if system is None or prompt[0]["role"] == "system":
            return prompt
        return [{"role": "system", "content": system}, *prompt]

    return write


# Text that a template opens for the assistant to continue: "<think>\n", or "<think>\n\n</think>\n\n" without thinking.
_TAG = r"[\w:|]*think\w*\|?[>\]]"
_OPENED = re.compile(rf"[<\[]{_TAG}\s*([<\[]/{_TAG}\s*)?\Z", re.IGNORECASE)
_OPENING, _CLOSING = (re.compile(mark + _TAG, re.IGNORECASE) for mark in (r"[<\[]", r"[<\[]/"))


def opened_text(prompt: str) -> str:
    """Returns the beginning of the completion that a prompt holds already, such as "<think>", or ""."""
    match = _OPENED.search(prompt)
    return match.group() if match else ""


def without_reasoning(text: str) -> str:
    """Removes the reasoning from a turn: from each <think>, or from the beginning, to the next </think>."""
    *before, rest = _CLOSING.split(text)
    parts = [_OPENING.split(part, 1) for part in before]
    return "".join(part[0] for part in parts if part[1:]) + rest


def _repeats_reasoning(content: str, written: str) -> bool:
    """Returns whether a template wrote reasoning of its own, such as none at all, before that in a content."""
    return 0 < len(_CLOSING.findall(content)) < len(_CLOSING.findall(written))


# ---- completions


def turn_end(chat: Chat) -> TurnEnd | None:
    """Returns the end of the assistant's last turn, or None if the template does not write the assistant's messages."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}]
    chat = chat._replace(tools=None)
    try:
        _, answer, tail = render(chat, messages, is_opened=False).rpartition(_ANSWER)
    except UsageError:
        return None
    if not answer:
        return None
    if learned := re.match(r"\s*\S+", tail):
        return TurnEnd(tail, learned.group())
    following = _after_answer(chat, "user", _REPLY)
    return TurnEnd(tail, next((mark for mark in end_marks(chat, None) if following.startswith(mark)), ""))


def make_decoder(chat: Chat) -> Callable[[Sequence[int]], str]:
    """Makes `decode` for completions whose end may have tokens before its EOS, such as Cohere's <|END_RESPONSE|>."""
    end = turn_end(chat)
    *tokens, last = chat.tokenizer(end.learned, add_special_tokens=False)["input_ids"] if end and end.learned else [-1]
    return partial(decode, chat, end=tokens if last in chat.eos_ids else [])


def end_marks(chat: Chat, end: TurnEnd | None) -> list[str]:
    """Returns the texts of the tokens that end a text, and of the end of a turn."""
    added = getattr(chat.tokenizer, "added_tokens_decoder", {})  # decoding may change them
    texts = [added[i].content if i in added else chat.tokenizer.decode([i]) for i in chat.eos_ids]
    return list(filter(None, [*texts, end.learned.strip() if end else ""]))


def without_end(text: str, marks: Sequence[str]) -> str:
    """Removes the `end_marks` from the end of a completion, and white space after them."""
    while mark := next((mark for mark in marks if text.rstrip().endswith(mark)), ""):
        text = text.rstrip().removesuffix(mark)
    return text


def render_answer(chat: Chat, prompt: str, messages: Sequence[Message], answer: str, end: TurnEnd) -> str:
    """Writes messages and the assistant's answer in the chat template, without the end of the turn.

    Some templates drop a part of the answer, such as its reasoning, since they were written for the history of a chat.
    Others take reasoning only from a field of the message, and write an empty one before that in the answer. Then the
    answer continues the prompt as it is.

    Args:
      chat: The tokenizer and its template.
      prompt: The messages as `render` writes them.
      messages: The messages before the answer.
      answer: The answer, without the end of a turn.
      end: The result of `turn_end`.
    """
    whole = ""
    with contextlib.suppress(UsageError):
        whole = render(chat, [*messages, {"role": "assistant", "content": answer}], is_opened=False)
    body = whole[: len(whole) - len(end.tail)]
    is_written = whole.endswith(end.tail) and "".join(body.split()).endswith("".join(answer.split()))
    shared = os.path.commonprefix([prompt, body])  # noqa: RUF071, of texts
    if is_written and not _repeats_reasoning(answer, body.removeprefix(shared)):
        return body
    opened = opened_text(prompt)
    if opened and answer.lstrip().startswith(opened.strip()):
        answer = answer.lstrip()[len(opened.strip()) :].lstrip()
    return prompt + answer


def turn_opening(chat: Chat, prompt: str, messages: Sequence[Message]) -> str:
    """Returns the text by which a prompt opens the assistant's turn, such as "<|im_start|>assistant"."""
    opening = prompt.removeprefix(render(chat, messages, is_opened=False))
    return opening.removesuffix(opened_text(opening)).strip()


# ---- conversations of several turns


def encode_conversation(chat: Chat, messages: Sequence[Message], first: int) -> tuple[list[int], list[bool]]:
    """Encodes a conversation, and marks the tokens that the assistant writes, with the ends of its turns.

    Args:
      chat: The tokenizer and its template. Its {% generation %} marks decide if it has them and all messages are
        learned. Otherwise a turn begins where the template opens it after the messages before it, and ends where the
        template ends it.
      messages: All messages. Those that are not `is_learned` are not marked.
      first: The number of the first message whose tokens are marked. The marks of the template also cover earlier ones.

    Returns:
      The token ids, and a mask of equal length.

    Raises:
      UsageError: The template writes the messages before a turn differently once other turns follow, or writes
        reasoning of its own before that of a message.
    """
    tokenizer = chat.tokenizer
    text = render(chat, messages, "a conversation", is_opened=False)
    check_roles(chat, messages, "a conversation")
    turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
    learned = [i for i in turns if is_learned(messages[i])]
    if learned == turns and re.search(r"\{%-?\s*generation\b", str(tokenizer.chat_template)):
        options = {"return_dict": True, "return_assistant_tokens_mask": True} | _options(chat, False)
        marked = _apply(tokenizer, messages, tokenize=True, **options)
        return list(marked["input_ids"]), list(map(bool, marked["assistant_masks"]))
    if turns and text.endswith(messages[turns[-1]]["content"] or "\0") and (end := turn_end(chat)):
        text += end.learned  # no next turn follows that would begin with it
    spans = [_span_of_turn(chat, messages, i, text) for i in learned]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    places = encoded["offset_mapping"]
    return encoded["input_ids"], [any(start < b and a < end for start, end in spans) for a, b in places]


def is_learned(message: Message) -> bool:
    """Returns whether an assistant's message is to be learned; see `rows.read_messages`."""
    return bool(message.get("weight", 1))


def _span_of_turn(chat: Chat, messages: Sequence[Message], number: int, text: str) -> tuple[int, int]:
    """Returns the characters of an assistant's turn in a conversation, with its end."""
    opening = render(chat, messages[:number])
    openings = (opening, opening.removesuffix(opened_text(opening)))  # the history may have no reasoning
    start = next((len(before) for before in openings if text.startswith(before)), -1)
    closed = render(chat, messages[: number + 1], is_opened=False)
    if text.startswith(closed):
        end = len(closed.rstrip())
        end += next((len(mark) for mark in end_marks(chat, None) if text.startswith(mark, end)), 0)
    else:  # the last turn of a conversation has reasoning, or another end
        mark = _end_of_turn(chat, _after_answer(chat, "user", _REPLY).partition(_REPLY)[0])
        body, written, _ = text[max(start, 0) :].partition(mark or "\0")
        is_unique = written and mark not in (messages[number]["content"] or "")
        end = start + len(body) + len(mark) if is_unique else -1
    if not 0 <= start < end:
        raise UsageError(
            "the chat template writes the turns of a conversation differently once others follow, so it is unknown "
            "which tokens the assistant writes: put {% generation %} marks into the template, or give one turn a row"
        )
    if _repeats_reasoning(messages[number]["content"] or "", text[start:end]):
        raise UsageError(
            "the chat template writes empty reasoning before that in the content of a message: move the reasoning into "
            "the message's field reasoning_content"
        )
    return start, end


# ---- replies of environments


def continue_text(tokenizer: Any, text: str, **options: bool) -> list[int]:
    """Encodes a text that continues another one: behind its tokens, the ids decode to the text.

    Tokenizers of Llama 2's kind put a space before every text. So the text is encoded behind a short one.

    Args:
      tokenizer: A transformers tokenizer.
      text: The text.
      **options: Options of the tokenizer.
    """

    def encode(text: str) -> list[int]:
        with ENCODING:
            return tokenizer(text, add_special_tokens=False, **options)["input_ids"] if text else []

    decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    known = encode("a")
    for before in ("", "\n", "a"):  # some tokenizers merge one of them with the text
        ids = encode(before + text)[len(encode(before)) :]
        if decode([*known, *ids]) == decode(known) + text:
            return ids
    return encode(text)


def reply_encoder(chat: Chat, *, roles: Sequence[str] = ("user",)) -> Callable[..., list[int]]:
    """Makes the function that encodes replies for a model.

    Templates render earlier turns again, and some omit parts of them. So sampled turns are never rendered.

    Args:
      chat: The tokenizer and its template. Without a template replies have no delimiters.
      roles: Roles for the reply. The first role that the template knows is used. Without roles, replies have no
        delimiters.

    Returns:
      (text, variables of the template, `is_open`) -> the tokens between the end of the policy's turn and its next turn.
      Special tokens spelled out in the text are encoded as plain characters. `is_open` is True if a stop text ended the
      policy's turn. Then the tokens begin with the end of this turn.

    Raises:
      UsageError: The chat template knows none of the roles.
    """
    if not (chat.tokenizer.chat_template and roles):
        return lambda text, kwargs={}, is_open=False: _plain_ids(chat.tokenizer, text)
    role, encode = known_role(chat, roles), messages_encoder(chat)
    return lambda text, kwargs={}, is_open=False: encode([{"role": role, "content": text}], kwargs, is_open)


def messages_encoder(chat: Chat) -> Callable[..., list[int]]:
    """Makes the function that encodes the messages after a turn of the policy. `reply_encoder` is for one message.

    Args:
      chat: The tokenizer and its template, which it has.

    Returns:
      (messages, variables of the template, `is_open`) -> the tokens between the end of the policy's turn and its next
      turn. It raises UsageError if the template has no such messages after the assistant's.
    """
    chat = chat._replace(tools=None)  # they are at the beginning of a conversation
    tokenizer, control = chat.tokenizer, control_tokens(chat.tokenizer)

    @lru_cache(_DELIMITERS)
    def delimiters(shape: str) -> tuple[Chat, list[str], str]:
        kwargs, probes = json.loads(shape)
        row_chat = with_kwargs(chat, kwargs)._replace(tools=None)
        parts = _after_turn(row_chat, probes).split(_REPLY)
        if len(parts) != len(probes) + 1:
            roles = " and ".join(dict.fromkeys(probe["role"] for probe in probes))
            raise UsageError(f"the chat template writes no messages of {roles} after a turn of the assistant")
        return row_chat, parts, _end_of_turn(row_chat, parts[0])

    def encode(messages: Sequence[Message], kwargs: Mapping[str, Any] = {}, is_open: bool = False) -> list[int]:
        probes = [{**message, "content": _REPLY} for message in messages]
        row_chat, parts, mark = delimiters(json.dumps([kwargs, probes]))
        texts = []
        for i, message in enumerate(messages):
            before, after, text = _REPLY.join(parts[: i + 1]), _REPLY.join(parts[i + 1 :]), message["content"]
            written = _after_turn(row_chat, [*probes[:i], message, *probes[i + 1 :]])
            if written.startswith(before) and written.endswith(after) and len(written) >= len(before) + len(after):
                text = written[
                    len(before) : len(written) - len(after)
                ]  # the template may strip it, or write it as JSON
            texts.append(text)
        end, parts = continue_text(tokenizer, mark), [parts[0][parts[0].find(mark) :], *parts[1:]]
        pieces = [piece for pair in zip(parts, [*texts, ""], strict=True) for piece in pair][:-1]
        if control and len(control.findall("".join(pieces))) != len(control.findall("".join(parts))):
            encoded = (
                _plain_ids(tokenizer, piece) if i % 2 else continue_text(tokenizer, piece)
                for i, piece in enumerate(pieces)
            )
            ids = [token for each in encoded for token in each]
        else:
            ids = continue_text(tokenizer, "".join(pieces))
        return ids if is_open else ids[len(end) :]  # else the policy has written the end of its turn

    return encode


def _plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Encodes a text in which special tokens are spelled out as plain characters."""
    return continue_text(tokenizer, text, split_special_tokens=True)


def reply_reader(chat: Chat, *, roles: Sequence[str] = ("user",)) -> Callable[[Sequence[int]], Message] | None:
    """Makes the function that inverts `reply_encoder`.

    Args:
      chat, roles: See `reply_encoder`.

    Returns:
      The tokens of a reply -> its chat message. Text without the delimiters of the template is the content as it is.
      None: replies have no delimiters.
    """
    if not (chat.tokenizer.chat_template and roles):
        return None

    def decoded(text: str) -> str:  # as in a reply: decoding may change special tokens and spaces next to them
        return str(chat.tokenizer.decode(chat.tokenizer(text, add_special_tokens=False)["input_ids"]))

    role = known_role(chat, roles)
    before, _, after = _after_answer(chat, role, _REPLY).partition(_REPLY)
    mark = _end_of_turn(chat, before)
    before, mark = decoded(before[before.find(mark) + len(mark) :]), decoded(mark)  # the policy has written the mark
    end = "".join(after.split(maxsplit=1)[:1])  # variables of the template may change what follows it
    space, end = after[: after.find(end)], decoded(end)
    is_json = '\\"' in _after_answer(chat, role, '"')

    def read(ids: Sequence[int]) -> Message:
        content = chat.tokenizer.decode(ids, skip_special_tokens=False).removeprefix(mark)  # after a stop text
        is_exact = content.startswith(before)
        content = content.removeprefix(before) if is_exact else content.lstrip().removeprefix(before.lstrip())
        if end and end in content:
            content = content.rpartition(end)[0].removesuffix(space)
        with contextlib.suppress(ValueError):
            content = json.loads(f'"{content}"') if is_json else content
        return {"role": role, "content": content}

    return read


def known_role(chat: Chat, roles: Sequence[str]) -> str:
    """Returns the first of some roles after the assistant's that the chat template writes.

    Raises:
      UsageError: The template writes none of them.
    """
    chat = chat._replace(tools=None)
    role = next((role for role in roles if _REPLY in _after_answer(chat, role, _REPLY)), "")
    if not role:
        raise UsageError(
            f"the chat template has no turn of the role {' or '.join(roles)}: take another model or template"
        )
    return role


def _after_answer(chat: Chat, role: str, content: str) -> str:
    """Returns the text between an answer of the assistant and its next turn; "" if the template lacks the role."""
    return _after_turn(chat, [{"role": role, "content": content}])


def _after_turn(chat: Chat, messages: Sequence[Message]) -> str:
    """Returns the text between an answer of the assistant and its next turn; "" if the template refuses messages."""
    contents = {"user": "a", "assistant": _ANSWER}
    before = [{"role": role, "content": text} for role, text in contents.items()]
    try:
        return render(chat, [*before, *messages]).rpartition(_ANSWER)[2]
    except UsageError:
        return ""


def _end_of_turn(chat: Chat, text: str) -> str:
    """Returns the token in a text after an answer that ends the turn, or ""."""
    end, control = turn_end(chat), control_tokens(chat.tokenizer)
    marks = [mark for mark in end_marks(chat, None) if mark in text]
    if marks:
        return min(marks, key=text.find)
    # gpt-oss ends a turn of the history with another token than the last turn.
    match = control.match(text) if control and end and not text.startswith(end.learned) else None
    return match.group() if match else ""
