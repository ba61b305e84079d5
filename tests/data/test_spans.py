"""Checks spans of characters against tokens, which may be cut elsewhere."""

import pytest

from grpo_jax.data.text import spans_in_tokens
from grpo_jax.data.types import Completion, Span
from grpo_jax.rewards.worker import MOST_SPANS as MOST, BadReward, checked_spans

# Tokens 0 … 5; the first loses its space, and two of them make up one character.
PIECES = [b" ab", b"c.\n", b"de", b"\xc3", b"\xa9", b"f"]


def decode(ids):
    return b"".join(PIECES[i] for i in ids).decode(errors="replace").removeprefix(" ")


WHOLE = Completion(decode(range(6)), range(6))  # "abc.\ndeéf"


def tokens_of(*spans):
    return [span[:3] for span in spans_in_tokens(checked_spans(spans, WHOLE), WHOLE, decode)]


def test_character_spans_cover_tokens_holding_their_ends():
    assert str(WHOLE) == "abc.\ndeéf"
    assert tokens_of((0, 4, 1.0), (5, 9, 2.0)) == [(0, 2, 1.0), (2, 6, 2.0)]
    assert tokens_of((0, 3, 1.0), (3, 4, 2.0)) == [(0, 2, 1.0), (1, 2, 2.0)]  # both end in token 1
    assert tokens_of((7, 8, 1.0)) == [(4, 5, 1.0)]  # é is there with the second of its tokens
    assert tokens_of((0, 9, 1.0)) == [(0, 6, 1.0)]


def test_token_spans_mix_with_character_spans():
    tokens = checked_spans([Span(1, 3, 0.5, "tokens")], WHOLE)
    characters = checked_spans([(0, 2, 1.0)], WHOLE)
    assert [span[:3] for span in spans_in_tokens([*tokens, *characters], WHOLE, decode)] == [(0, 1, 1.0), (1, 3, 0.5)]


BAD_SPANS = [
    ([(0, 10, 1.0)], "from 0 to 10 is not one of a completion of 9 characters"),
    ([(0, 7, 1.0, "tokens")], "of 6 tokens"),
    ([(3, 3, 1.0)], "from 3 to 3"),
    ([(-1, 3, 1.0)], "from -1 to 3"),
    ([(0, 5, 1.0), (4, 6, 1.0)], "begins before the one to 5 ends"),
    ([(5, 6, 1.0), (0, 4, 1.0)], "put them in order"),
    ([(0, 1, 1.0), (1, 2, 1.0, "tokens")], "take one of them"),
    ([(0, 1)], "must be .start, end, reward."),
    ([(0, 1, "x")], "must be .start, end, reward."),
    ([(0, 1, 1.0, "words")], "no span of characters or tokens"),
    ([(0.5, 1, 1.0)], "no span of characters or tokens"),
    ([(0, 1, 0.0)] * (MOST + 1), "at most 1000 are read"),
]


@pytest.mark.parametrize(("spans", "words"), BAD_SPANS)
def test_what_cannot_be_spans_is_told(spans, words):
    with pytest.raises(BadReward, match=words):
        checked_spans(spans, WHOLE)
