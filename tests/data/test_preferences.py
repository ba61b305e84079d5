"""Checks that rows of preferences and ratings are refused with their line."""

import pytest
from tiny import refused, write_rows

from grpo_jax.commands.sft import Config, read_training_rows
from grpo_jax.data.preferences import Preference, preference_of, read_preferences, read_ratings

USER = {"role": "user", "content": "Hi"}
PAIR = {"prompt": [USER], "chosen": "a", "rejected": "b"}
RATED = {"prompt": [USER], "completion": "a", "label": True}
NO_TEXT = 'column prompt holds .*without text as "role" and "content"'
MESSAGES = [
    ({"role": "user", "content": None}, NO_TEXT),
    ({"role": "user", "content": [{"type": "image"}]}, NO_TEXT),
    ({"role": 3, "content": "Hi"}, NO_TEXT),
    ({"role": "user"}, NO_TEXT),
    ({"role": "assistant", "content": "Hello"}, "column prompt holds .*should end with the user's"),
]
HALF = "a\ud800"  # of a surrogate pair
MARGINS = [1e308, -1e39, 10**400, float("nan"), True, "1"]


def read_texts(file):
    return read_training_rows(Config(task=str(file)))


BAD_ROWS = [
    *(
        (read, row, {"prompt": [USER, message]}, words)
        for read, row in ((read_preferences, PAIR), (read_ratings, PAIR), (read_ratings, RATED))
        for message, words in MESSAGES
    ),
    *((read_preferences, PAIR | {"margin": 3e38}, {"margin": margin}, "margin should hold") for margin in MARGINS),
    (read_preferences, PAIR, {"prompt": HALF}, "column prompt holds half of a surrogate pair"),
    (read_preferences, PAIR, {"prompt": [{"role": "user", "content": HALF}]}, "column prompt holds half"),
    (read_preferences, PAIR, {"chosen": HALF}, "column chosen holds half of a surrogate pair"),
    (read_preferences, PAIR, {"rejected": HALF}, "column rejected holds half of a surrogate pair"),
    (read_ratings, RATED, {"completion": HALF}, "column completion holds half of a surrogate pair"),
    (read_texts, {"prompt": "Hi", "completion": "a"}, {"completion": HALF}, "completion holds half of a surrogate"),
]


@pytest.mark.parametrize(("read", "row", "change", "words"), BAD_ROWS)
def test_unusable_rows_are_refused_with_their_line(tmp_path, read, row, change, words):
    file = write_rows(tmp_path / "rows.jsonl", [row, row | change])
    with refused(rf"rows.jsonl, line 2: .*{words}"):
        read(file)


def test_transcripts_keep_their_margin():
    sides = {
        side: f"\n\nHuman: Hi\n\nAssistant: {answer}" for side, answer in zip(("chosen", "rejected"), "ab", strict=True)
    }
    assert preference_of(sides | {"margin": 2}) == Preference("\n\nHuman: Hi\n\nAssistant:", " a", " b", 2.0)
