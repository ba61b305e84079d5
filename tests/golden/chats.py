"""Cases of chats, and their comparison with transformers' `apply_chat_template`."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from grpo_jax.data.text import answer_prompts, encode_prompts
from grpo_jax.data.types import Completion
from grpo_jax.models.chat import Chat, make_decoder, reply_encoder, reply_reader, turn_end
from grpo_jax.tasks.task import final_extractor
from grpo_jax.tasks.tools import Call, calls_of

SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "What is 2 + 3?\n  Say why: ä 猫 <b>"}
CALL = {"id": "a12345678", "type": "function", "function": {"name": "add_numbers", "arguments": {"a": 2}}}
TURNS = [QUESTION, {"role": "assistant", "content": "5, of course."}, {"role": "user", "content": " And 4 + 4? "}]
CHATS = {
    "one turn": [QUESTION],
    "system": [SYSTEM, QUESTION],
    "turns": TURNS,
    "system, turns": [SYSTEM, *TURNS],
    "calls": [QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "5"}],
}
ANSWERS = {
    "plain": "The answer is 8.",
    "lines": "4 + 4\n= 8\n\nSo 8.",
    "spaces": "  8 ",
    "reasoning": "<think>\n4 + 4 is 8.\n</think>\n\nIt is 8.",
}
THOUGHT = "4 + 4"
# Messages of the assistant, and a word that the template writes if it writes more than the content.
MESSAGES = {
    "content": ({"content": "It is 8."}, "It"),
    "reasoning": ({"content": "It is 8.", "reasoning_content": THOUGHT, "thinking": THOUGHT}, THOUGHT),
    "calls": ({"content": "", "tool_calls": [CALL]}, "add_numbers"),
}
READ_CALL = re.compile(r'<tool_call>\s*(\{|<function=)|\s*(<\|python_tag\|>)?\{"name"')  # formats of `tasks.tools`
REPLIES = ("No, wrong.", " 1\n2 ", 'say "so" {1}')
TOOL = {
    "type": "function",
    "function": {
        "name": "add_numbers",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number", "description": "A number."}}},
    },
}

Expected = Callable[..., list[int]]  # messages -> the ids of transformers


def compare(tokenizer: Any) -> Iterator[tuple[str, str]]:
    """Compares our rendering with transformers', for a tokenizer with a template.

    Yields:
      The kind of case, and "equal", "skipped: …" or "DIFFERENT: …".
    """
    end = turn_end(Chat(tokenizer))
    ends = tokenizer(end.learned, add_special_tokens=False)["input_ids"][-1:] if end else []
    chat = Chat(tokenizer, (tokenizer.eos_token_id, *ends))

    def expected(messages: Any, **options: Any) -> Any:
        options = {"tokenize": True, "return_dict": False} | options
        return tokenizer.apply_chat_template(messages, **options)

    for name, messages in CHATS.items():
        for tools in (None, [TOOL]):
            kind = f"{name}{', tools' if tools else ''}"
            try:
                ids = expected(messages, tools=tools, add_generation_prompt=True)
            except Exception as error:
                yield "prompts", f"skipped: refused by the template ({type(error).__name__})"
                continue
            text = tokenizer.decode(ids)
            if "Say why" not in text:
                yield "prompts", "skipped: the template writes no content that is text"
            elif tools and TOOL["function"]["name"] not in text:  # type: ignore[index]
                yield "prompts", "skipped: the template writes no tools"
            else:
                prompts = encode_prompts(chat._replace(tools=tools), [messages])
                yield "prompts", "equal" if prompts.token_ids[0].tolist() == ids else f"DIFFERENT: {kind}"
                for answer in ANSWERS.values():
                    yield from _compare_answer(chat._replace(tools=tools), prompts, messages, answer, expected)
    yield from _compare_replies(chat, expected)
    yield from _compare_messages(chat, expected)


def _compare_answer(
    chat: Chat, prompts: Any, messages: Sequence[Mapping[str, str]], answer: str, expected: Expected
) -> Iterator[tuple[str, str]]:
    """Compares prompt and answer, and the learned part with the marks of a template that has them."""
    tokenizer = chat.tokenizer
    whole: list[Any] = [*messages, {"role": "assistant", "content": answer}]
    try:
        ids = expected(whole, tools=chat.tools)
    except Exception as error:
        yield "answers", f"skipped: refused by the template ({type(error).__name__})"
        return
    if "</think><think>" in "".join(tokenizer.decode(ids).split()):  # the template takes reasoning only from its field
        thought, _, content = answer.removeprefix("<think>").partition("</think>")
        whole[-1] |= {"content": content.strip(), "reasoning_content": thought.strip()}
        ids = expected(whole, tools=chat.tools)
    ((prompt, (learned,), *_),) = answer_prompts(chat, prompts, [(answer,)])
    squeezed = "".join(answer.removeprefix("<think>").split())  # the prompt may hold the tag
    if squeezed not in "".join(tokenizer.decode(learned).split()):
        yield "answers", f"DIFFERENT: {answer!r} is not in {tokenizer.decode(learned)!r}"
    elif squeezed not in "".join(tokenizer.decode(ids).split()):
        yield "answers", "skipped: the template drops the reasoning"
        return
    # Only white space, and Phi's token after the last turn, are not learned.
    rest = tokenizer.decode(ids[len(prompt) + len(learned) :])
    same = ids[: len(prompt) + len(learned)] == [*prompt, *learned] and (not rest or rest[0].isspace())
    yield "answers", "equal" if same else f"DIFFERENT: {answer!r}: {tokenizer.decode(learned)!r}, {rest!r}"
    is_opened = expected(messages, tools=chat.tools) != expected(messages, tools=chat.tools, add_generation_prompt=True)
    if "generation %}" in tokenizer.chat_template and is_opened:
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        marks = expected(whole, tools=chat.tools, **options)["assistant_masks"]  # type: ignore[call-overload]
        mine = list(range(len(prompt), len(prompt) + len(learned)))
        stop = mine[-1] if rest[:1].isspace() else len(ids)  # TRL marks the white space after the end, and more
        marked = [place for place, mark in enumerate(marks) if mark and len(prompt) <= place <= stop]
        odd = tokenizer.decode([ids[place] for place in sorted({*marked} ^ {*mine})])
        yield "masks", "equal" if mine == marked else f"DIFFERENT: {answer!r}: {odd!r}"


def _compare_replies(chat: Chat, expected: Expected) -> Iterator[tuple[str, str]]:
    """Compares an episode with the history of a chat, for templates that write earlier turns as they were sampled."""
    first, answer = {"role": "user", "content": "Guess."}, {"role": "assistant", "content": "It is 7."}
    for role in ("user", "tool"):
        kind = f"replies of the {role}"
        try:
            ((prompt, (sampled,), *_),) = answer_prompts(chat, encode_prompts(chat, [[first]]), [(answer["content"],)])
            encode, reader = (make(chat, roles=(role,)) for make in (reply_encoder, reply_reader))
            sampled_ids = [*prompt, *sampled]
            histories = [[first, answer, {"role": role, "content": reply}] for reply in REPLIES]
            all_ids = [expected(history, add_generation_prompt=True) for history in histories]
        except Exception as error:
            yield kind, f"skipped: refused ({type(error).__name__})"
            continue
        for reply, ids in zip(REPLIES, all_ids, strict=True):
            if ids[: len(sampled_ids) - 1] != sampled_ids[:-1]:  # gpt-oss ends a turn of the history with another token
                yield kind, "skipped: the template writes earlier turns in another way"
                continue
            more = encode(reply)
            yield kind, "equal" if ids[len(sampled_ids) :] == more else f"DIFFERENT: {chat.tokenizer.decode(more)!r}"
            message = reader(more)
            same = message["role"] == role and message["content"] in (reply, reply.strip())  # some templates strip it
            yield f"{kind}, read", "equal" if same else f"DIFFERENT: {reply!r}: {message}"


def _compare_messages(chat: Chat, expected: Expected) -> Iterator[tuple[str, str]]:
    """Reads messages of the assistant from the tokens that the template writes after a prompt, as rewards do."""
    tokenizer, extract, read = chat.tokenizer, final_extractor(chat.tokenizer), make_decoder(chat)
    for name, (fields, word) in MESSAGES.items():
        kind, options = f"messages with {name}", {"tools": [TOOL] if name == "calls" else None, "tokenize": False}
        try:
            prompt = expected([QUESTION], add_generation_prompt=True, **options)
            whole: Any = expected([QUESTION, {"role": "assistant", **fields}], **options)
        except Exception as error:
            yield kind, f"skipped: refused by the template ({type(error).__name__})"
            continue
        if word not in whole.partition("Say why")[2]:
            yield kind, f"skipped: the template writes no {name}"
            continue
        if not whole.startswith(prompt):
            yield kind, "skipped: the template opens a turn in another way than it writes it"
            continue
        ids = tokenizer(whole[len(prompt) :], add_special_tokens=False)["input_ids"]
        ids = ids[: next((place for place, i in enumerate(ids) if i in chat.eos_ids), len(ids))]
        text = read(ids)
        if name == "calls":
            calls = [Call("add_numbers", {"a": 2})], [Call("add_numbers", {"a": "2"}, are_texts=True)]
            result = "equal" if calls_of(text) in calls else f"DIFFERENT: {text!r}"
            yield kind, result if READ_CALL.search(text) else "skipped: a format of calls that is not read"
        elif extract:
            content = extract({"prompt": prompt}, Completion(text, ids))
            same = content == fields["content"]
            yield f"{kind}, extracted", "equal" if same else f"DIFFERENT: {text!r}: {content!r}"
        elif "<|message|>" in text or "channel" in text:
            yield kind, "skipped: the template writes channels, which only a response_template reads"
        else:  # rewards read all text
            tags, thought = r"(\s*<[^<>]*>)*\s*", re.escape(fields.get("reasoning_content", ""))
            same = re.fullmatch(tags + thought + tags + re.escape(fields["content"]), text.rstrip())
            yield kind, "equal" if same else f"DIFFERENT: {text!r}"
