"""Checks HH-RLHF from pairs to a table: the split, the rules, and the numbers of a judge's scores."""

import numpy as np
import pytest
from tiny import refused

from experiments.judging import best_answers, correlation, prompt_numbers
from experiments.tasks.dialogue import candid, dialogue_rows, opening, question, split_by_dialogue, taken_up
from grpo_jax.data.preferences import Preference
from grpo_jax.data.types import Completion

FIRST = "\n\nHuman: how tall is tower {}?\n\nAssistant:"
LATER = FIRST + " no idea.\n\nHuman: and the bridge?\n\nAssistant:"


# ---- the split


def test_dialogues_are_split_by_their_opening():
    pairs = [Preference(turn.format(i), "a", "b") for i in range(60) for turn in (FIRST, LATER)]
    pairs += [Preference([{"role": "user", "content": f"hello {i}"}], "a", "b") for i in range(30)]
    parts = split_by_dialogue(pairs, 3)
    assert sorted(repr(pair) for part in parts for pair in part) == sorted(map(repr, pairs))
    assert all(30 < len(part) < 70 for part in parts)
    openings = [{repr(opening(pair.prompt)) for pair in part} for part in parts]
    assert sum(map(len, openings)) == len(set.union(*openings))
    with refused("do not fill 3 parts"):
        split_by_dialogue(pairs[:2], 3)


def test_the_question_is_what_was_said_last():
    assert question(LATER.format(1)) == "and the bridge?"
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "x"}]
    assert question([*messages, {"role": "user", "content": "two"}]) == "two"
    assert opening([{"role": "system", "content": "s"}, *messages])[-1]["content"] == "one"
    rows = dialogue_rows([Preference(FIRST.format(1), "a", "b"), Preference(FIRST.format(1), "c", "d")])
    assert rows == [{"prompt": FIRST.format(1), "question": "how tall is tower 1?"}]


# ---- the rules


HELPFULNESS = [
    ("Where can I buy a parrot and a cage?", "The parrots are in the shop.", 0.5),  # parrot, cage
    ("Where can I buy a parrot and a cage?", "A parrot in a cage!", 1.0),
    ("Where can I buy a parrot and a cage?", "I'm sorry, a parrot in a cage is cruel.", 0.0),
    ("Where can I buy a parrot and a cage?", Completion("A parrot in a cage", truncated=True), 0.0),
    ("Where can I buy a parrot and a cage?", "Carrots.", 0.0),
    ("What do you think?", "Yes.", None),  # no content words
]


@pytest.mark.parametrize(("asked", "answer", "expected"), HELPFULNESS)
def test_helpfulness_analogue(asked, answer, expected):
    assert taken_up([{"question": asked}], [answer]) == [expected]


HONESTY = [
    ("How tall is it?", "It is a tower.", 0.5),
    ("How tall is it?", "It is 300 feet.", 0.0),
    ("How tall is it, 300 feet?", "It is 300 feet.", 0.5),
    ("How tall is it?", "It is always growing.", 0.0),
    ("How tall is it?", "I\u2019m not sure, perhaps 300 feet.", 1.0),
    ("Was it 30?", "It was 300.", 0.0),
]


@pytest.mark.parametrize(("asked", "answer", "expected"), HONESTY)
def test_honesty_analogue(asked, answer, expected):
    assert candid([{"question": asked}], [answer]) == [expected]


# ---- numbers


def answers(judge, length):
    judge, length = np.array(judge, float), np.array(length)
    return {"judge": judge, "learned": -judge, "length": length, "taken_up": np.full(judge.shape, np.nan)}


def test_scores_are_standardised_and_wins_cover_all_pairs():
    # Within prompts the start's score is twice the length: slope 2, and its deviation is sqrt(5).
    start = answers([[0, 2], [4, 6]], [[1, 2], [1, 2]])
    ours = answers([[2, 3], [0, 0]], [[3, 3], [1, 2]])
    numbers = prompt_numbers(ours, start)
    assert numbers["judge"] == pytest.approx((np.array([2.5, 0]) - 3) / np.sqrt(5))
    assert numbers["learned"] == pytest.approx((3 - np.array([2.5, 0])) / np.sqrt(5))
    assert numbers["win_rate"] == pytest.approx([3.5 / 4, 0])
    assert numbers["by_length"] == pytest.approx([2 / np.sqrt(5) * 1.5, 0])
    assert np.isnan(numbers["taken_up"]).all()
    assert prompt_numbers(start, start)["win_rate"] == pytest.approx(0.5)
    assert correlation(start["length"], start["judge"]) == pytest.approx(1)
    shortest = best_answers(start, -start["length"])
    assert shortest["judge"].tolist() == [[0], [4]]
