"""Chats are written as transformers writes them, for templates with the features of published ones.

`golden/templates.py` repeats the comparison with the published templates.
"""

import pickle
import time
from collections import Counter
from contextlib import suppress
from itertools import groupby
from unittest import mock

import pytest
import tokenizers
import transformers
from golden.chats import TOOL, compare
from golden.today import Today
from tiny import refused, write_rows
from transformers import PreTrainedTokenizerFast

from grpo_jax.commands import sft
from grpo_jax.data.packing import pack
from grpo_jax.data.preferences import Preference, encode_preferences
from grpo_jax.data.rows import read_messages
from grpo_jax.data.text import Answers, answer_conversation, answer_prompts, encode_answers, encode_prompts, fit_answers
from grpo_jax.models.chat import (
    Chat,
    decode,
    encode_conversation,
    make_chat,
    opened_text,
    prompt_writer,
    render,
    turn_end,
)
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.huggingface import Pretrained
from grpo_jax.tasks.task import text_task

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<bos>", "<answer>", "</answer>", "<|user|>", "<|assistant|>"]
TOOLS = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
HEADER = "<|im_start|>{{ m.role }}\n"
OPENED = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = TOOLS + "{% for m in messages %}" + HEADER + "{{ m.content }}<|im_end|>\n{% endfor %}" + OPENED
# The last turn shows its reasoning, or that there is none.
THOUGHT = (
    TOOLS + "{% for m in messages %}" + HEADER + "{% if m.role == 'assistant' and loop.last %}"
    "{% set parts = m.content.split('</think>') %}<think>\n{{ parts[0].split('<think>')[-1].strip() if parts[1:] }}\n"
    "</think>\n\n{{ parts[-1].strip() }}{% else %}{{ m.content.split('</think>')[-1].strip() }}{% endif %}<|im_end|>\n"
    "{% endfor %}"
)
TEMPLATES = {
    "a line break after the end": CHATML,
    "a beginning, and stripped contents": "<bos>{% for m in messages %}" + HEADER + "{{ m.content | trim }}<|im_end|>"
    "{% endfor %}" + OPENED,
    "the system's message in the user's": "{% set s = messages[0].content ~ '\n\n' if messages[0].role == 'system' %}"
    "{% for m in messages if m.role != 'system' %}" + HEADER + "{{ s if loop.first }}{{ m.content }}<|im_end|>\n"
    "{% endfor %}" + OPENED,
    "a token after the last turn": "{% for m in messages %}<|user|>\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{{ '<|assistant|>\n' if add_generation_prompt else '<|endoftext|>' }}".replace(
        "<|user|>", "{{ '<|assistant|>' if m.role == 'assistant' else '<|user|>' }}"
    ),
    "two tokens at the end": "{% for m in messages %}" + HEADER + "{{ m.content }}"
    "{{ '<bos>' if m.role == 'assistant' }}<|im_end|>{% endfor %}" + OPENED,
    "no end": "{% for m in messages %}<|{{ 'assistant' if m.role == 'assistant' else 'user' }}|>\n{{ m.content }}"
    "{% endfor %}{{ '<|assistant|>\n' if add_generation_prompt }}",
    "reasoning": THOUGHT + OPENED,
    "reasoning is opened": THOUGHT + OPENED.replace("assistant\n", "assistant\n<think>\n"),
    "reasoning is dropped": "{% for m in messages %}" + HEADER + "{{ m.content.split('</think>')[-1] }}<|im_end|>"
    "{% endfor %}" + OPENED.replace("assistant\n", "assistant\n<think>\n"),
    "marks and another header": TOOLS + "{% for m in messages %}" + HEADER + "{% if m.role == 'assistant' %}"
    "{% generation %}<|answers|>{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}" + OPENED,
    "a date": "{{ strftime_now('%d %b %Y, %B %-d, %A, %y-%m-%dT%H:%M') }}" + CHATML,
}
COUNTS = {
    "prompts": 40,
    "answers": 120,
    "masks": 32,
    "replies of the user": 18,
    "replies of the tool": 12,
}  # at least so many cases are equal


@pytest.fixture(scope="module")
def tokenizer():
    """A byte is a token, and there are special ones."""
    bytes_ = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    of_bytes = tokenizers.Tokenizer(tokenizers.models.BPE({byte: i for i, byte in enumerate(bytes_)}, []))
    of_bytes.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    of_bytes.decoder = tokenizers.decoders.ByteLevel()
    of_bytes.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=of_bytes, eos_token="<|endoftext|>", pad_token="<|endoftext|>")


def test_ids_and_learned_tokens_are_those_of_transformers(tokenizer):
    results = []
    with mock.patch.object(transformers.utils.chat_template_utils, "datetime", Today):
        for name, tokenizer.chat_template in TEMPLATES.items():
            results += [(name, *result) for result in compare(tokenizer)]
    assert not [result for result in results if result[2].startswith("DIFFERENT")]
    equal = [kind for _, kind, result in results if result == "equal"]
    assert {kind: equal.count(kind) >= count for kind, count in COUNTS.items()} == dict.fromkeys(COUNTS, True)


USER = {"role": "user", "content": "1+1"}
ALL = {"heldout_share": 0.0, "reward": None}


def learned(tokenizer, template, answer, eos=("<|endoftext|>",), **options):
    """The text of the learned tokens."""
    tokenizer.chat_template = template
    chat = Chat(tokenizer, tuple(tokenizer.convert_tokens_to_ids(token) for token in eos), **options)
    ((_, (ids,), *_),) = answer_prompts(chat, encode_prompts(chat, [[USER]]), [(answer,)])
    return tokenizer.decode(ids)


@pytest.mark.parametrize("answer", ["2", "2<|im_end|>", "2<|im_end|>\n", "2<|im_end|><|endoftext|>", "2<|endoftext|>"])
def test_answers_end_exactly_once(tokenizer, answer):
    assert learned(tokenizer, CHATML, answer) == "2<|im_end|>"


@pytest.mark.parametrize("answer", ["2", "2<|endoftext|>", "2<|endoftext|>\n"])
def test_an_answer_to_a_text_has_one_eos(tokenizer, answer):
    rows, _, _ = encode_answers(Chat(tokenizer, (tokenizer.eos_token_id,)), ["1+1="], [(answer,)])
    assert tokenizer.decode(rows[0].answers[0]) == "2<|endoftext|>"


def test_a_template_without_an_end_adds_none(tokenizer):
    assert learned(tokenizer, TEMPLATES["no end"], "2") == "2"
    # The tokenizer's EOS ends answers where the template writes no answers at all.
    assert learned(tokenizer, "{{ messages[0].content }}", "2") == "2<|endoftext|>"


def test_next_turns_end_answers_without_an_end(tokenizer):
    """Where its beginning is an EOS of the model, as <|user|> of GLM-4."""
    template, eos = TEMPLATES["no end"], ("<|user|>", "<|endoftext|>")
    assert learned(tokenizer, template, "2", eos) == "2<|user|>"
    assert learned(tokenizer, template, "2<|user|>\n", eos) == "2<|user|>"
    chat = Chat(tokenizer, tuple(map(tokenizer.convert_tokens_to_ids, eos)))
    ids, mask = encode_conversation(chat, TALK, 1)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(TALK, tokenize=False) + "<|user|>"
    turns = groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    texts = [tokenizer.decode([i for i, _ in turn]) for is_learned, turn in turns if is_learned]
    assert texts == ["<think>so</think>2<|user|>", "<think>four</think>4<|user|>"]


# Reasoning comes from a field, as in templates of Qwen3.8.
FIELD = (
    "{% for m in messages %}"
    + HEADER
    + "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}" + OPENED.replace("assistant\n", "assistant\n<think>\n")
)


@pytest.mark.parametrize("opened", ["", "<think>\n"])
def test_reasoning_is_learned_once(tokenizer, opened):
    """As the policy would write it, and as the template does if it is in the field."""
    tokenizer.chat_template = FIELD
    whole = [USER, {"role": "assistant", "content": "2", "reasoning_content": "so"}]
    expected = tokenizer.apply_chat_template(whole, tokenize=False).rpartition("<think>\n")[2].rstrip("\n")
    assert learned(tokenizer, FIELD, f"{opened}so\n</think>\n\n2") == expected
    assert learned(tokenizer, FIELD, "2") == "\n</think>\n\n2<|im_end|>"


def test_repeated_reasoning_in_a_conversation_is_refused(tokenizer):
    tokenizer.chat_template = FIELD
    chat = Chat(tokenizer, (tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")))
    with refused("move the reasoning into the message's field reasoning_content"):
        encode_conversation(chat, TALK, 1)
    encode_conversation(chat, [{**message, "content": "4", "reasoning_content": "so"} for message in TALK], 1)


@pytest.mark.parametrize("answer", ["so</think>2", "<think>so</think>2", "<think>\nso</think>2"])
def test_reasoning_is_learned_where_the_history_drops_it(tokenizer, answer):
    assert learned(tokenizer, TEMPLATES["reasoning is dropped"], answer) == "so</think>2<|im_end|>"


def test_filled_templates_keep_a_trailing_end_token(tokenizer):
    tokenizer.chat_template = TEMPLATES["no end"].replace("\n' if", "' if")
    ends = tuple(tokenizer.convert_tokens_to_ids(token) for token in ("<|endoftext|>", "<|assistant|>"))
    (ids,) = encode_prompts(Chat(tokenizer, ends), [[USER]]).token_ids
    assert tokenizer.decode(ids) == "<|user|>\n1+1<|assistant|>"


def test_completions_keep_tags_that_are_special_tokens(tokenizer):
    chat = Chat(tokenizer, tuple(tokenizer.convert_tokens_to_ids(["<|im_end|>"])))
    text = "<answer>4</answer><|im_end|><|endoftext|>"
    assert decode(chat, tokenizer(text, add_special_tokens=False)["input_ids"]) == "<answer>4</answer>"


def test_turn_ends_are_those_of_the_template(tokenizer):
    ends = {}
    for name, tokenizer.chat_template in TEMPLATES.items():
        end = turn_end(Chat(tokenizer, tools=[TOOL]))  # also where the template writes no tools
        ends[name] = end and end.learned
    assert (ends.pop("no end"), ends.pop("two tokens at the end")) == ("", "<bos><|im_end|>")
    assert set(ends.values()) == {"<|im_end|>"}


# ---- options of the template


SWITCH = CHATML + "{{ '<think>\n\n</think>\n\n' if add_generation_prompt and thinks is defined and not thinks }}"


def test_template_variables_come_from_run_and_row(tokenizer):
    tokenizer.chat_template = SWITCH
    chat = make_chat(tokenizer, (), '{"thinks": false}')
    texts = encode_prompts(chat, [[USER], [USER]], kwargs=[{}, {"thinks": True}]).texts
    assert [opened_text(text) for text in texts] == ["<think>\n\n</think>\n\n", ""]
    assert render(chat, [USER]).endswith("</think>\n\n")


DEEP = '{"thinks": ' + "[" * 3000 + "]" * 3000 + "}"
NESTED: dict = {}
for _ in range(3000):
    NESTED = {"thinks": NESTED}


@pytest.mark.parametrize(
    "kwargs",
    [
        *("[1]", "{", 3, DEEP, NESTED),
        *('{"thinkz": 1}', '{"tokenize": true}', '{"tools": []}'),
        *('{"think": 1}', '{"content": 1}', '{"messages": []}'),  # a part of a name, a field, what is not to be set
    ],
)
def test_other_variables_are_refused(tokenizer, kwargs):
    tokenizer.chat_template = SWITCH + "{{ tools }}"
    with refused("chat_template_kwargs"):
        make_chat(tokenizer, (), kwargs)


def test_tasks_record_messages_and_template_variables_per_row(tokenizer):
    tokenizer.chat_template = SWITCH
    rows = [{"prompt": f"{i}+1"} | ({"chat_template_kwargs": {"thinks": True}} if i % 2 else {}) for i in range(40)]
    options = {"vocab_size": 300, "num_prompts": 40, "seed": 0, "reward": None, "heldout_share": 0.0}
    task = text_task(tokenizer, (), rows, chat=True, chat_template_kwargs={"thinks": False}, **options)
    for example in task.prompts(0).examples:
        prompt = pickle.loads(pickle.dumps(example["prompt"]))
        ((_, role), (_, content)) = prompt.messages[0].items()
        assert prompt.startswith(f"<|im_start|>{role}\n{content}<|im_end|>")
        assert prompt.endswith("assistant\n" if int(content[:-2]) % 2 else "</think>\n\n")
    with refused("sets thinkz, but the chat template has no such variable"):
        text_task(tokenizer, (), [rows[0] | {"chat_template_kwargs": {"thinkz": 1}}], chat=True, **options)
    with refused("chat_template_kwargs need chat messages"):
        text_task(tokenizer, (), rows, chat_template_kwargs={"thinks": False}, **options)
    with refused("chat_template_kwargs need chat messages"):
        text_task(tokenizer, (), rows, **options)
    with refused("chat_template_kwargs need chat messages"):
        pair = Preference("1+1=", "2", "3", kwargs={"chat_template_kwargs": {"thinks": True}})
        encode_preferences(Chat(tokenizer, ()), [pair])


# ---- texts that are written in a template already


WRITTEN = ["<|im_start|>user\n1+1<|im_end|>\n", "1+1 <|im_start|>user\nso", " <|im_start|>system\nBe."]


@pytest.mark.parametrize("text", WRITTEN)
def test_already_templated_text_is_refused(tokenizer, text):
    tokenizer.chat_template = CHATML
    with refused("--chat False"):
        prompt_writer(Chat(tokenizer), True)(text)
    assert prompt_writer(Chat(tokenizer), False)(text) == text
    assert prompt_writer(Chat(tokenizer), True)("user\n1+1 im_start") == [USER | {"content": "user\n1+1 im_start"}]


# ---- long prompts


LONG = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "".join(map(str, range(100)))}]


def test_long_prompts_lose_text_and_keep_the_frame(tokenizer):
    tokenizer.chat_template = TEMPLATES["a beginning, and stripped contents"]
    chat = Chat(tokenizer)
    encoded = encode_prompts(chat, [LONG], max_prompt_tokens=40, overlong="truncate")
    frame = "<bos><|im_start|>system\nBe brief.<|im_end|><|im_start|>user\n{}<|im_end|><|im_start|>assistant\n"
    content = encoded.texts[0].messages[1]["content"]
    assert encoded.texts[0] == frame.format(content) == tokenizer.decode(encoded.token_ids[0])
    assert len(encoded.token_ids[0]) == 40
    assert LONG[1]["content"].endswith(content)
    assert encoded.summary == "1 of 1 prompts lost their beginning"
    with refused("longer than 20 tokens"):
        encode_prompts(chat, [LONG], max_prompt_tokens=20, overlong="truncate")


def test_a_call_of_a_tool_needs_no_text(tokenizer):
    tokenizer.chat_template = CHATML.replace("{{ m.content }}", "{{ m.content or m.tool_calls[0].name }}")
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}, USER | {"role": "tool"}]
    task = text_task(tokenizer, (), [{"prompt": messages}], vocab_size=300, num_prompts=1, seed=0, **ALL)
    assert "assistant\nadd<|im_end|>\n<|im_start|>tool\n1+1" in task.prompts(0).examples[0]["prompt"]
    with refused("without text"):
        text_task(tokenizer, (), [{"prompt": [USER | {"content": None}]}], vocab_size=300, num_prompts=1, seed=0, **ALL)


def test_tools_are_in_the_text_or_refused(tokenizer):
    tokenizer.chat_template = OPENED
    with refused("never hear of them"):
        render(Chat(tokenizer, tools=[TOOL]), [USER])


# ---- conversations of several turns

TALK = [
    USER,
    {"role": "assistant", "content": "<think>so</think>2"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "<think>four</think>4"},
]
MARKED = (
    "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}!{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
LEARNED = [
    (MARKED, 1, "<think>so</think>2!|<think>four</think>4!"),
    (CHATML, 1, "<think>so</think>2<|im_end|>|<think>four</think>4<|im_end|>"),
    (CHATML, 3, "<think>four</think>4<|im_end|>"),
    # The history has no reasoning, as in templates of Qwen3.
    (THOUGHT + OPENED, 1, "2<|im_end|>|<think>\nfour\n</think>\n\n4<|im_end|>"),
]


@pytest.mark.parametrize(("template", "first", "expected"), LEARNED)
def test_a_conversation_teaches_the_turns_of_the_assistant(tokenizer, template, first, expected):
    tokenizer.chat_template = template
    chat = Chat(tokenizer, (tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")))
    ids, mask = encode_conversation(chat, TALK, first)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(TALK, tokenize=False)
    turns = groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    assert "|".join(tokenizer.decode([i for i, _ in turn]) for is_learned, turn in turns if is_learned) == expected


MARKS = [{"weight": 0}, {"train": False}, {"loss": False}]


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize(("template", "first", "expected"), LEARNED)
def test_messages_with_weight_0_are_only_read(tokenizer, template, first, expected, mark):
    tokenizer.chat_template = template
    chat = Chat(tokenizer, (tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")))
    ids, whole = encode_conversation(chat, TALK, first)
    for left_out in ({1}, {3}, {1, 3}):
        talk = [message | mark if i in left_out else message for i, message in enumerate(TALK)]
        again, mask = encode_conversation(chat, read_messages(talk, "a row"), first)
        runs = [list(run) for is_learned, run in groupby(range(len(whole)), whole.__getitem__) if is_learned]
        turns = zip([1, 3][-len(runs) :], runs, strict=True)
        assert again == ids
        assert [i for i, x in enumerate(mask) if x] == [i for turn, run in turns if turn not in left_out for i in run]


def test_rows_without_a_learned_message_are_dropped(tokenizer, tmp_path):
    tokenizer.chat_template = CHATML
    nothing = [message | {"weight": 0} if message["role"] == "assistant" else message for message in TALK]
    talks = [TALK, nothing, [*TALK[:2], *nothing[2:]], [*nothing[:2], *TALK[2:]], nothing[:2]]
    rows = [{"messages": talk} for talk in talks for _ in range(2)]
    rows += [{"messages": [{"role": "user", "content": str(i)}, *TALK[1:]]} for i in range(20)]
    config = sft.Config(task=str(write_rows(tmp_path / "rows.jsonl", rows)), num_heldout=2)
    model = Pretrained(
        ModelConfig(len(tokenizer), 8, 16, 1, 2, 1, 4), {}, tokenizer, (tokenizer.eos_token_id,), tmp_path
    )
    *sides, _, notes = sft.encode_splits(config, sft.read_training_rows(config), model)
    dropped = [int(note.split()[2]) for note in notes if "without a message of the assistant to learn" in note]
    assert sum(dropped) == 4
    texts = "".join(tokenizer.decode(side.ids[side.completion_mask].tolist()) for side in sides)
    counts = Counter(texts.split("<|im_end|>"))
    assert counts == {"<think>so</think>2": 24, "<think>four</think>4": 24, "": 1}


def test_a_template_gets_arguments_as_json(tokenizer):
    # As DeepSeek's.
    tokenizer.chat_template = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name + "
    tokenizer.chat_template += "'\n' + c.function.arguments }}{% endfor %}{% endfor %}"
    call = {"function": {"name": "f", "arguments": '{"a":1}'}}
    messages = read_messages([USER, {"role": "assistant", "content": None, "tool_calls": [call]}], "a row")
    assert render(Chat(tokenizer), messages) == tokenizer.apply_chat_template(messages, tokenize=False)


# ---- templates that cannot be used

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"


@pytest.mark.parametrize("body", ["", "{{ i * j }}", "{% set x = i %}"])
def test_a_template_that_loops_is_stopped(tokenizer, monkeypatch, body):
    monkeypatch.setattr("grpo_jax.models.chat._SECONDS", 0.3)
    tokenizer.chat_template = LOOP.replace("BODY", body)
    with refused("takes more than 0.3 seconds for messages: mend a loop"):
        render(Chat(tokenizer), [USER])
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.25  # nothing loops any more
    tokenizer.chat_template = CHATML
    assert render(Chat(tokenizer), [USER]) == tokenizer.apply_chat_template(
        [USER], tokenize=False, add_generation_prompt=True
    )


def test_a_template_that_swallows_exceptions_is_stopped(tokenizer, monkeypatch):
    def loop(*_, **__):
        with suppress(TimeoutError):  # as Python does in a callback of the garbage collector
            while True:
                pass
        while True:
            pass

    monkeypatch.setattr("grpo_jax.models.chat._SECONDS", 0.3)
    monkeypatch.setattr(tokenizer, "apply_chat_template", loop)
    with refused("takes more than 0.3 seconds for messages: mend a loop"):
        render(Chat(tokenizer), [USER])
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.25


def test_a_template_that_writes_too_much_is_refused(tokenizer):
    tokenizer.chat_template = "{{ 'words' * 10000000 }}"
    with refused("writes 50,000,000 characters for messages"):
        render(Chat(tokenizer), [USER])


def test_half_a_surrogate_pair_is_refused(tokenizer):
    tokenizer.chat_template = "half \ud800" + CHATML
    with refused("holds half of a surrogate pair, which is no text: mend 'half"):
        encode_prompts(Chat(tokenizer), [[USER]])
    tokenizer.chat_template = "{{ tools[0].function.description }}{{ tools[0].function.name }}"
    tool = {"function": {"name": "f", "description": "half \ud800"}}
    with refused("holds half of a surrogate pair"):
        encode_prompts(Chat(tokenizer), [[USER]], kwargs=[{"tools": [tool]}])


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer):
    tokenizer.chat_template = "{{ messages | length }}" + CHATML
    with refused("differently once others follow"):
        encode_conversation(Chat(tokenizer, (tokenizer.eos_token_id,)), TALK, 1)


USERS_ONLY = CHATML.replace("in messages %}", "in messages if m.role in ('user', 'assistant') %}")
FIRST_ONLY = CHATML.replace("in messages %}", "in messages if m.role != 'system' or m == messages[0] %}")


@pytest.mark.parametrize(
    ("template", "role", "is_first"),
    [(USERS_ONLY, "human", True), (USERS_ONLY, "system", True), (FIRST_ONLY, "system", False)],
)
def test_messages_that_a_template_leaves_out_are_refused(tokenizer, template, role, is_first):
    tokenizer.chat_template = template
    chat, other = Chat(tokenizer, (tokenizer.eos_token_id,)), {"role": role, "content": "Be"}
    with refused(f"leaves out the text of the role {role} in prompt 1"):
        encode_prompts(chat, [[USER], [other, USER] if is_first else [USER, other]])
    talk = [other, *TALK] if is_first else [*TALK[:1], other, *TALK[1:]]
    with refused(f"leaves out the text of the role {role} in a conversation"):
        encode_conversation(chat, talk, 2)


def test_answers_that_open_their_turn_are_refused(tokenizer):
    tokenizer.chat_template = CHATML
    chat = Chat(tokenizer, (tokenizer.eos_token_id,))
    with refused("begins with <|im_start|>assistant, which the template adds: drop it"):
        encode_answers(chat, [[USER]], [("2", "<|im_start|>assistant\n3<|im_end|>")])


def test_messages_after_the_only_answer_are_left_out(tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", [{"messages": [USER, {"role": "assistant", "content": "2"}, USER]}])
    (row,) = sft.read_training_rows(sft.Config(task=str(file)))
    assert (row["prompt"], row["completion"]) == ([USER], "2")


def test_rows_of_conversations_are_packed_with_their_masks(tokenizer, tmp_path):
    tokenizer.chat_template = CHATML
    file = write_rows(tmp_path / "rows.jsonl", [{"messages": TALK}, {"prompt": TALK[:1], "completion": TALK[1:]}])
    first, second = sft.read_training_rows(sft.Config(task=str(file)))
    assert {**first, "messages": None} == {**second, "messages": None}
    (prompt,) = encode_prompts(chat := Chat(tokenizer, (tokenizer.eos_token_id,)), [first["prompt"]]).texts
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    answers = answer_conversation(chat, prompt, ids, first["completion"])
    mask = answers.learned
    packed = pack([answers.prompt], [answers.answers[0]], [mask], width=len(ids) + len(mask))
    learned = tokenizer.decode(packed.ids[packed.completion_mask].tolist())
    assert learned == "<think>so</think>2<|im_end|><think>four</think>4<|im_end|>"


def test_texts_without_a_learned_token_are_dropped():
    rows = [Answers([1], ([2, 3, 4],), mask) for mask in ([False, False, True], [True, False, True], None)]
    _, numbers, notes = fit_answers(rows, max_tokens=2, overlong="truncate", noun="completions")
    assert numbers == [1, 2]
    assert notes[0] == "dropped 1 completions without a message of the assistant to learn in their first 2 tokens"
    with refused("no completion is left of 1"):
        fit_answers(rows[:1], max_tokens=2, overlong="truncate", noun="completions")
    assert len(fit_answers(rows, noun="completions")[0]) == 3


@pytest.mark.parametrize("messages", [[USER], TALK[1:], [TALK[1]]])
def test_a_conversation_without_question_and_answer_is_refused(tmp_path, messages):
    file = write_rows(tmp_path / "rows.jsonl", [{"messages": messages}])
    with refused("line 1: column messages should hold a message of the assistant after the first one of the user"):
        sft.read_training_rows(sft.Config(task=str(file)))
