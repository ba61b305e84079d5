"""Rows of preferences and ratings: what is read, and what is refused."""

import json

import pytest

from grpo_jax.commands.sft import Config, read_completions
from grpo_jax.data.preferences import read_preferences, read_ratings
from grpo_jax.errors import UsageError

USER = {"role": "user", "content": "Hi"}
PAIR = {"chosen": "a", "rejected": "b"}
RATED = {"completion": "a", "label": True}


@pytest.mark.parametrize(("read", "answers"), [(read_preferences, PAIR), (read_ratings, PAIR), (read_ratings, RATED)])
@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ({"role": "user", "content": None}, 'without text as "role" and "content"'),
        ({"role": "user", "content": 3}, 'without text as "role" and "content"'),
        ({"role": "user", "content": [{"type": "text", "text": "Hi"}]}, 'without text as "role" and "content"'),
        ({"role": 3, "content": "Hi"}, 'without text as "role" and "content"'),
        ({"role": "user"}, 'without text as "role" and "content"'),
        ({"role": "assistant", "content": "Hello"}, "should end with the user's"),
    ],
)
def test_messages_that_cannot_be_answered_are_refused_with_their_line(tmp_path, read, answers, message, sentence):
    rows = [{"prompt": [USER], **answers}, {"prompt": [USER, message], **answers}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UsageError, match=rf"rows.jsonl, line 2: column prompt holds .*{sentence}"):
        read(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("margin", [1e308, -1e39, 10**400, float("nan"), True, "1"])
def test_a_margin_that_float32_does_not_hold_is_refused(tmp_path, margin):
    rows = [{"prompt": "a", **PAIR, "margin": 3e38}, {"prompt": "a", **PAIR, "margin": margin}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UsageError, match=r"line 2: column margin should hold a finite number"):
        read_preferences(tmp_path / "rows.jsonl")


def read_texts(file):
    return read_completions(Config(task=str(file)))


@pytest.mark.parametrize(
    ("read", "row", "column"),
    [
        (read_preferences, PAIR, "chosen"),
        (read_preferences, PAIR, "rejected"),
        (read_ratings, RATED, "completion"),
        (read_texts, {"completion": "a"}, "completion"),
    ],
)
def test_half_of_a_surrogate_pair_is_refused_with_its_line(tmp_path, read, row, column):
    rows = [{"prompt": "Hi", **row}, {"prompt": "Hi", **row, column: "a\ud800"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UsageError, match=rf"line 2: column {column} holds half of a surrogate pair"):
        read(tmp_path / "rows.jsonl")
