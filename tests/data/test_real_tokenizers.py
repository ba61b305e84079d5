"""Compares rows of every format, encoded by real tokenizers, with the tokens of transformers.

A model's folder in GRPO_JAX_MODEL adds its tokenizer.
"""

import json
import os
import shutil
from functools import partial
from itertools import chain, groupby

import jax
import numpy as np
import pytest
from row_formats import FORMATS, columns
from tiny import DATA, STORIES, needs_data, random_params, tiny_config, write_rows
from tokenizers import decoders, normalizers

from grpo_jax.commands import sft
from grpo_jax.data.preferences import encode_preferences, encode_ratings, read_preferences, read_ratings
from grpo_jax.data.rows import read_messages, read_rows
from grpo_jax.data.text import encode_answers
from grpo_jax.data.types import Completion
from grpo_jax.models.chat import Chat, render, reply_encoder, reply_reader, turn_end
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.decoder.heads import add_head, judge_groups
from grpo_jax.models.huggingface import Pretrained, load_tokenizer
from grpo_jax.models.rows.geometry import PromptTokens
from grpo_jax.rewards.learned import RewardModel, reward_function
from grpo_jax.tasks.task import text_task

pytestmark = needs_data
FOLDERS = ["gpt2-tokenizer", "hf-tokenizers/falcon-tokenizer", "hf-tokenizers/phi-3-mini", "stories260K-hf"]
FOLDERS += ["of Gemma's kind"]
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
    tokenizer = load_tokenizer(STORIES if folder == "of Gemma's kind" else DATA / folder)
    if folder == "of Gemma's kind":  # as Llama 2's, but no space is put before a text
        tokenizer.backend_tokenizer.normalizer = normalizers.Replace(" ", "▁")
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.backend_tokenizer.decoder = decoders.Sequence(parts)
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
        sides = sft.encode_splits(config, sft.read_training_rows(config), model)[:2]
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


def with_names(text, number):
    """A text, a row or messages whose call has an argument b in every other row."""
    written = json.dumps(text)
    return json.loads(
        written.replace('"a": 8', '"b": 8').replace('\\"a\\": 8', '\\"b\\": 8') if number % 2 else written
    )


def filled(values):
    """Values as Arrow stores them: objects have all fields that any object at their place has."""
    values = list(values)
    objects = [value for value in values if isinstance(value, dict)]
    columns = {name: iter(filled(x.get(name) for x in objects)) for name in dict.fromkeys(chain(*objects))}
    items = iter(filled(chain(*(value for value in values if isinstance(value, list)))) if values else ())
    for number, value in enumerate(values):
        if isinstance(value, dict):
            values[number] = {name: next(column) for name, column in columns.items()}
        elif isinstance(value, list):
            values[number] = [next(items) for _ in value]
    return values


def with_json(value):
    """A row whose calls have their arguments as JSON, as OpenAI stores them."""
    if isinstance(value, dict):
        return {name: json.dumps(x) if name == "arguments" else with_json(x) for name, x in value.items()}
    return list(map(with_json, value)) if isinstance(value, list) else value


STORED = {"as they are": list, "with JSON": partial(map, with_json), "by Arrow": filled}


@pytest.mark.parametrize(("kind", "stored"), [("messages", "as they are"), *(("episodes", name) for name in STORED)])
@pytest.mark.parametrize("folder", FOLDERS)
def test_chats_are_the_tokens_of_transformers(tmp_path, folder, kind, stored):
    tokenizer = tokenizer_of(folder, kind)
    chat = Chat(tokenizer, (tokenizer.eos_token_id,))
    end = turn_end(chat).learned
    for form in FORMATS:
        rows = [with_names(columns(form, kind, texts, i % 2 == 0), i) for i, texts in enumerate(TEXTS)]
        rows = list(STORED[stored](rows))
        expected = []
        for i, texts in enumerate(TEXTS):
            prompt = with_names(columns("prompt-only", kind, texts, i % 2 == 0), i)
            messages = read_messages(prompt["prompt"], "a row")
            for answer in answers_of(form, texts, i % 2 == 0):
                more = [] if answer is None else [{"role": "assistant", "content": answer}]
                options = {"tokenize": True, "return_dict": False, "tools": prompt.get("tools")}
                ids = tokenizer.apply_chat_template(messages + more, add_generation_prompt=not more, **options)
                turns = [answer + end] if more else []
                if (form, kind) == ("language modelling", "episodes"):
                    turns = [with_names('{"name": "7", "arguments": {"a": 8}}', i) + end, *turns]
                expected.append((ids, turns))
        results = encoded(chat, form, write_rows(tmp_path / f"{form}.jsonl", rows), in_chat=True)
        for (ids, mask), (whole, turns) in zip(sorted(results), sorted(expected), strict=True):
            assert ids == whole[: len(ids)]
            # The template of Phi-3 writes EOS after the end of the last turn.
            assert tokenizer.decode(whole[len(ids) :]).strip() in ("", tokenizer.eos_token)
            runs = groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
            learned = [tokenizer.decode([i for i, _ in run]) for is_learned, run in runs if is_learned]
            assert list(map(squeezed, learned)) == list(map(squeezed, turns))


JOINED = [
    *((f"{prompt} ", good, bad) for prompt, good, bad in TEXTS),
    ("2+2=", "4", " 5"),
    ("def f():\n", "    return 1", "  pass"),
    ("I like foo", "bar", "d"),
    ("One line\n", "\n\nmore", "\nless"),
]


def tokens_of_trl(tokenizer, prompt, answers, end):
    """The tokens of a prompt with each answer, and the number of tokens before the answers, as in TRL 1.16."""
    alone = tokenizer(prompt)["input_ids"]
    wholes = [tokenizer(prompt + answer)["input_ids"] + end for answer in answers]
    start = min(len(os.path.commonprefix([alone, ids])) for ids in wholes)  # noqa: RUF071, of lists
    return [(ids, [False] * start + [True] * (len(ids) - start)) for ids in wholes], start < len(alone)


@pytest.mark.parametrize("folder", FOLDERS)
def test_texts_are_the_tokens_of_trl(tmp_path, folder):
    tokenizer = tokenizer_of(folder, "texts")
    tokenizer.chat_template = None
    chat = Chat(tokenizer, (tokenizer.eos_token_id,))
    for form in FORMATS:
        rows = JOINED[:3] if form == "preference without prompt" else JOINED
        file = write_rows(tmp_path / "rows.jsonl", [columns(form, "texts", row, i == 1) for i, row in enumerate(rows)])
        results = encoded(chat, form, file, in_chat=False)
        if form == "language modelling":
            wholes = [tokenizer(prompt + good)["input_ids"] + [tokenizer.eos_token_id] for prompt, good, _ in rows]
            assert sorted(results) == sorted((ids, [False] + [True] * (len(ids) - 1)) for ids in wholes)
            continue
        if form == "prompt-only":
            assert sorted(ids for ids, _ in results) == sorted(tokenizer(prompt)["input_ids"] for prompt, *_ in rows)
            continue
        expected = []
        for i, row in enumerate(rows):
            prompt, answers = row[0], answers_of(form, row, i == 1)
            if form == "preference without prompt":
                prompt, answers = prompt.removesuffix(" "), [f" {answer}" for answer in answers]
            expected += tokens_of_trl(tokenizer, prompt, answers, [tokenizer.eos_token_id])[0]
        assert sorted(results) == sorted(expected)


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("judged", [False, True])
def test_tokens_across_the_end_of_prompts_are_counted(folder, judged):
    tokenizer = tokenizer_of(folder, "texts")
    tokenizer.chat_template = None
    chat, end = Chat(tokenizer, (tokenizer.eos_token_id,)), [] if judged else [tokenizer.eos_token_id]
    prompts, answers = [prompt for prompt, *_ in JOINED], [row[1:] for row in JOINED]
    rows, _, notes = encode_answers(chat, prompts, answers, judged=judged)
    expected = [tokens_of_trl(tokenizer, *pair, end) for pair in zip(prompts, answers, strict=True)]
    assert [[row.prompt + ids for ids in row.answers] for row in rows] == [[ids for ids, _ in x] for x, _ in expected]
    assert [len(row.prompt) for row in rows] == [mask.count(False) for (_, mask), *_ in (x for x, _ in expected)]
    count = sum(is_merged for _, is_merged in expected)
    assert count
    words = f"{count} of 7 pairs have a token across the end of the prompt, which belongs to the answer"
    assert notes == (words,)


@pytest.mark.parametrize("folder", FOLDERS)
def test_reward_models_read_trls_or_policy_tokens(tmp_path, folder):
    tokenizer = tokenizer_of(folder, "texts")
    tokenizer.chat_template = None
    config = tiny_config(len(tokenizer))
    head = jax.random.normal(jax.random.key(1), (config.hidden_size,))
    params = add_head(config, random_params(config))[1]._replace(head=head)
    (tmp_path / "config.json").write_text("{}")
    reward = reward_function(RewardModel(config, params, tokenizer, (tokenizer.eos_token_id,), tmp_path))
    rows, nothing = [{"prompt": prompt} for prompt, *_ in JOINED], np.zeros((1, 1, 1), np.int32)

    def scores(texts):
        prompts = (PromptTokens(np.array([ids]), np.ones((1, len(ids)), bool)) for ids in texts)
        return [float(judge_groups(config, params, ids, nothing, nothing > 0)[0, 0]) for ids in prompts]

    both = [(row["prompt"], good) for row, (_, good, _) in zip(rows, JOINED, strict=True)]
    joined = [tokenizer(prompt + good)["input_ids"] for prompt, good in both]
    close = {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(reward(rows, [good for _, good in both]), scores(joined), **close)
    sampled = [tokenizer(good, add_special_tokens=False)["input_ids"] for _, good in both]
    completions = [Completion(tokenizer.decode(ids), ids) for ids in sampled]
    wholes = [tokenizer(prompt)["input_ids"] + ids for (prompt, _), ids in zip(both, sampled, strict=True)]
    np.testing.assert_allclose(reward(rows, completions), scores(wholes), **close)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_prompt_keeps_its_special_tokens(folder):
    tokenizer = tokenizer_of(folder, "texts")
    tokenizer.chat_template = None
    chat, bos = Chat(tokenizer, (tokenizer.eos_token_id,)), tokenizer.bos_token or ""
    prompts = ["7", "foo", f"{bos}foo", "Once upon a time there was a "]
    rows, *_ = encode_answers(chat, prompts, [("0",), ("bar",), ("bar",), ("dog",)], max_prompt_tokens=5)
    texts = [tokenizer.decode(row.prompt + row.answers[0][:-1], skip_special_tokens=True) for row in rows]
    assert texts[:3] == ["70", "foobar", "foobar"]
    assert texts[3].endswith(" a dog")
    assert all(row.prompt for row in rows)
    first = tokenizer("a")["input_ids"][0]
    assert [row.prompt[0] == first for row in rows] == [first == tokenizer.bos_token_id] * 4


REPLIES = ["0", " 0", "    return 1", "\n\nmore", "bar", "  ", "<|endoftext|>", "</s>", "<0x0A>", "ä 猫🐈", "a\u200bb"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_replies_continue_the_text(folder):
    tokenizer = tokenizer_of(folder, "texts")
    encode = reply_encoder(Chat(tokenizer, (tokenizer.eos_token_id,)), roles=())
    for before in ("7", "foo", "def f():\n", "I like "):
        ids = tokenizer(before, add_special_tokens=False)["input_ids"]
        for text in REPLIES:
            assert tokenizer.decode(ids + encode(text)) == tokenizer.decode(ids) + text, (before, text)


# Without a token that ends the assistant's turn, as in old templates.
PLAIN = "{% for m in messages %}{{ m.content if m.role == 'assistant' else 'Q:' + m.content + ' A:' }}{% endfor %}"
MIXED = PLAIN.replace("'Q:'", "'<|im_start|>Q:'")


@pytest.mark.parametrize("template", [PLAIN, MIXED, CHATML])
@pytest.mark.parametrize("folder", FOLDERS)
def test_replies_in_a_template_are_its_text(folder, template):
    tokenizer = tokenizer_of(folder, "episodes")
    tokenizer.chat_template = template
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    chat = Chat(tokenizer, (end,))
    encode, read = reply_encoder(chat), reply_reader(chat)
    for text in REPLIES[:5] + REPLIES[-2:] + ["<|im_end|>\nx"]:
        messages = [{"role": "user", "content": "7"}, {"role": "assistant", "content": "8"}]
        before = render(chat, [*messages[:1]]) + "8" + ("<|im_end|>" if template == CHATML else "")
        whole = render(chat, [*messages, {"role": "user", "content": text}])
        ids = tokenizer(before, add_special_tokens=False)["input_ids"]
        written = tokenizer.decode(ids + encode(text))
        assert "".join(written.split()) == "".join(whole.split())
        if "<" not in whole:
            assert written == whole
        assert read(encode(text))["content"] == text


def test_a_tokenizer_with_dropout_is_deterministic(tmp_path):
    shutil.copytree(DATA / "gpt2-tokenizer", tmp_path, dirs_exist_ok=True)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.warns(UserWarning, match="BPE dropout of 0.5 is set to none"):
        tokenizer = load_tokenizer(tmp_path)
    text = "Once upon a time there was a little dog"
    assert {tuple(tokenizer(text)["input_ids"]) for _ in range(20)} == {
        tuple(load_tokenizer(DATA / "gpt2-tokenizer")(text)["input_ids"])
    }
