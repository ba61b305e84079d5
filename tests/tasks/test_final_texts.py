"""Rewards read the final channel of replies, by the `response_template` of a tokenizer with the tokens of gpt-oss."""

import json

import numpy as np
from tiny import refused
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from grpo_jax.models.huggingface import eos_ids, load_tokenizer
from grpo_jax.rl.grade import decode_groups, grade_completions
from grpo_jax.sampling.sampler import Completions
from grpo_jax.tasks.task import text_task

MARKS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
TEMPLATE = "{% macro today() %}{{ strftime_now('%Y-%m-%d %d %b') }}{% endmacro %}{{ today() }}"
TEMPLATE += "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
TEMPLATE += "<|start|>assistant"
FIELDS = {
    "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>", "content": "text"},
    "content": {"open": "<|channel|>final<|message|>", "close": "<|return|>", "content": "text"},
    "tool_calls": {"open": "<|channel|>commentary to=f<|message|>", "close": "<|call|>", "content": "json"},
}
PARSED = {"defaults": {"role": "assistant"}, "start_anchor": "<|start|>assistant", "fields": FIELDS}
THOUGHT = "<|channel|>analysis<|message|>4 or 2<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
# A reply -> the text that rewards read.
REPLIES = {
    f"{THOUGHT}{FINAL}42<|return|>": "42",
    f"{THOUGHT}{FINAL}4": "4",
    f"{FINAL}7<|return|>": "7",
    "<|channel|>analysis<|message|>4 or": "",
    f"{THOUGHT}<|channel|>commentary to=f<|message|>{{}}<|call|>": "",
    f"{THOUGHT}<|channel|>commentary to=f<|message|>{{<|call|>": "",
}


def grade(folder, reward, **settings):
    """Grades the replies, with a tokenizer of characters and marks in a task of chat messages."""
    vocabulary = [*map(chr, range(32, 127)), *MARKS]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token=" "))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer.add_special_tokens(MARKS)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|return|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text('{"eos_token_id": [99, 100]}')
    tokenizer = load_tokenizer(folder)
    ends, _ = eos_ids(folder, tokenizer, len(vocabulary))
    assert tokenizer.convert_ids_to_tokens(list(ends)) == ["<|return|>", "<|call|>"]
    options = {"vocab_size": len(vocabulary), "num_prompts": 1, "seed": 0, "heldout_share": 0.0, "chat": True}
    task = text_task(tokenizer, ends, [{"prompt": "Hi"}], reward=reward, **options)
    rows = [tokenizer.encode(reply, add_special_tokens=False) for reply in REPLIES]
    ids = np.array([row + [-1] * (99 - len(row)) for row in rows])[None]
    completions = Completions(ids, ids >= 0, None, None, ~np.isin(ids, ends).any(-1))
    return (
        task,
        decode_groups(completions, task)[0],
        grade_completions(task.prompts(0), completions, task, task.rewards),
    )


def test_rewards_and_spans_read_the_final_channel(tmp_path):
    seen = []

    def reward(examples, completions):
        seen.extend(completions)
        return [[(len(text) - 1, len(text), 1.0)] if text else 0.0 for text in completions]

    task, texts, graded = grade(tmp_path, reward, response_template=PARSED)
    assert (
        task.prompts(0).examples[0]["prompt"] == "2025-01-01 01 Jan<|start|>user<|message|>Hi<|end|><|start|>assistant"
    )
    assert seen == list(REPLIES.values())
    assert texts[0] == "<|channel|>analysis<|message|>4 or 2<|end|><|start|>assistant<|channel|>final<|message|>42"
    for text, final, parts in zip(texts, seen, graded.parts[0], strict=True):
        assert [part[:2] for part in parts] == ([(len(text.ids) - 1, len(text.ids))] if final else [])


def test_without_a_response_template_rewards_read_all_text(tmp_path):
    _, texts, graded = grade(tmp_path, lambda examples, completions: list(map(len, completions)))
    np.testing.assert_array_equal(graded.rewards[0], list(map(len, texts)))
    with refused("the response_template of the tokenizer cannot be used"):
        grade(tmp_path, None, response_template={"fields": {}})
