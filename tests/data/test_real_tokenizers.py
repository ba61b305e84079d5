"""Compares rows of every format, encoded by real tokenizers, with the tokens of transformers.

A model's folder in GRPO_JAX_MODEL adds its tokenizer.
"""

import os
from itertools import groupby

import pytest
from row_formats import FORMATS, KINDS, columns
from tiny import DATA, needs_data, write_rows

from grpo_jax.commands import sft
from grpo_jax.data.preferences import encode_preferences, encode_ratings, read_preferences, read_ratings
from grpo_jax.data.rows import read_messages, read_rows
from grpo_jax.models.chat import Chat, turn_end
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.huggingface import Pretrained, load_tokenizer
from grpo_jax.tasks.task import text_task

pytestmark = needs_data
FOLDERS = ["gpt2-tokenizer", "hf-tokenizers/falcon-tokenizer", "hf-tokenizers/phi-3-mini", "stories260K-hf"]
FOLDERS += [os.environ[name] for name in ("GRPO_JAX_MODEL",) if name in os.environ]
# For tokenizers without a template, and for tools, which the template of Phi-3 does not write.
CHATML = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = [
    ("What is 2 + 3?\n  Say why: ä 猫 <b>", "5, of course.", "6 🐈"),
    ("Once upon a time", "there was\n\na cat.", "no more"),
    ("def f(x):", "return x", "pass  # Käse"),
]


def tokenizer_of(folder, kind):
    tokenizer = load_tokenizer(DATA / folder)
    tokenizer.eos_token = tokenizer.eos_token or "<|endoftext|>"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if kind == "episodes" or not tokenizer.chat_template:
        tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.chat_template = None if kind == "texts" else CHATML
    return tokenizer


def texts_of(packed):
    """The tokens of packed texts, and their masks."""
    for ids, texts, mask in zip(*packed[:3], strict=True):
        for number in range(1, texts.max() + 1):
            yield ids[texts == number].tolist(), mask[texts == number].tolist()


def encoded(chat, form, file, in_chat):
    """The tokens of all prompts, or of all prompts with an answer, and the mask of the learned ones."""
    size = len(chat.tokenizer)
    if form == "prompt-only":
        options = {"vocab_size": size, "num_prompts": 3, "seed": 0, "reward": None, "heldout_share": 0.0}
        prompts = text_task(chat.tokenizer, chat.eos_ids, read_rows(file), chat=in_chat, **options).heldout.tokens
        return [(ids[mask].tolist(), [False] * mask.sum()) for ids, mask in zip(prompts.ids, prompts.mask, strict=True)]
    if form in ("language modelling", "prompt-completion"):
        config = sft.Config(task=str(file), num_heldout=1)
        model = Pretrained(ModelConfig(size, 8, 16, 1, 2, 1, 4), {}, chat.tokenizer, chat.eos_ids, file.parent)
        sides = sft.encode_texts(config, sft.read_completions(config), model)[:2]
        return [text for side in sides for text in texts_of(side)]
    read, encode = read_preferences, encode_preferences
    if form == "unpaired preference":
        read, encode = read_ratings, encode_ratings
    pairs = encode(chat, read(file, chat=in_chat)[0], in_chat=in_chat, vocab_size=size)
    several = [(prompt, ids) for prompt, both in zip(pairs.prompts, pairs.answers, strict=True) for ids in both if ids]
    return [(prompt + ids, [False] * len(prompt) + [True] * len(ids)) for prompt, ids in several]


def answers_of(form, texts, is_good):
    """The answers that a format has to a prompt."""
    _, good, bad = texts
    if form == "prompt-only":
        return [None]
    if form.startswith("preference"):
        return [good, bad]
    return [good if is_good or form != "unpaired preference" else bad]


def squeezed(text):
    return "".join(text.split())


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("folder", FOLDERS)
def test_chats_are_the_tokens_of_transformers(tmp_path, folder, kind):
    tokenizer = tokenizer_of(folder, kind)
    chat = Chat(tokenizer, (tokenizer.eos_token_id,))
    end = turn_end(chat).learned
    for form in FORMATS:
        rows = [columns(form, kind, texts, i % 2 == 0) for i, texts in enumerate(TEXTS)]
        expected = []
        for i, texts in enumerate(TEXTS):
            prompt = columns("prompt-only", kind, texts, i % 2 == 0)
            messages = read_messages(prompt["prompt"], "a row")
            for answer in answers_of(form, texts, i % 2 == 0):
                more = [] if answer is None else [{"role": "assistant", "content": answer}]
                options = {"tokenize": True, "return_dict": False, "tools": prompt.get("tools")}
                ids = tokenizer.apply_chat_template(messages + more, add_generation_prompt=not more, **options)
                turns = [answer + end] if more else []
                if (form, kind) == ("language modelling", "episodes"):
                    turns = ['{"name": "7", "arguments": {"a": 8}}' + end, *turns]
                expected.append((ids, turns))
        results = encoded(chat, form, write_rows(tmp_path / f"{form}.jsonl", rows), in_chat=True)
        for (ids, mask), (whole, turns) in zip(sorted(results), sorted(expected), strict=True):
            assert ids == whole[: len(ids)]
            # The template of Phi-3 writes EOS after the end of the last turn.
            assert tokenizer.decode(whole[len(ids) :]).strip() in ("", tokenizer.eos_token)
            runs = groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
            learned = [tokenizer.decode([i for i, _ in run]) for is_learned, run in runs if is_learned]
            assert list(map(squeezed, learned)) == list(map(squeezed, turns))


@pytest.mark.parametrize("folder", FOLDERS)
def test_texts_are_the_tokens_of_transformers(tmp_path, folder):
    tokenizer = tokenizer_of(folder, "texts")
    tokenizer.chat_template = None
    chat = Chat(tokenizer, (tokenizer.eos_token_id,))
    rows = [(f"{prompt} ", good, bad) for prompt, good, bad in TEXTS]
    for form in FORMATS:
        file = write_rows(tmp_path / "rows.jsonl", [columns(form, "texts", row, i == 1) for i, row in enumerate(rows)])
        results = encoded(chat, form, file, in_chat=False)
        if form == "language modelling":
            wholes = [tokenizer(prompt + good)["input_ids"] + [tokenizer.eos_token_id] for prompt, good, _ in rows]
            assert sorted(results) == sorted((ids, [False] + [True] * (len(ids) - 1)) for ids in wholes)
            continue
        expected = []
        for i, row in enumerate(rows):
            prompt = row[0].removesuffix(" ") if form == "preference without prompt" else row[0]
            ends = [answer + tokenizer.eos_token if answer else "" for answer in answers_of(form, row, i == 1)]
            expected += [(tokenizer(prompt)["input_ids"], squeezed(end)) for end in ends]
        starts = [mask.index(True) if any(mask) else len(mask) for _, mask in results]
        assert all(all(mask[start:]) for start, (_, mask) in zip(starts, results, strict=True))
        parts = [(ids[:start], ids[start:]) for start, (ids, _) in zip(starts, results, strict=True)]
        assert sorted((prompt, squeezed(tokenizer.decode(ids))) for prompt, ids in parts) == sorted(expected)
