"""Checks words of letters: their prompts, their tokenizer, and their worth in the experiments."""

import numpy as np
import pytest
import transformers
from tiny import refused

from experiments import constitutional
from experiments.multi_objective import gold, hypervolume, in_order, order, own_letters, pareto_front
from experiments.online_preference import gold as word_gold, pair_accuracy
from experiments.tasks import letters
from experiments.tasks.characters import Characters


def test_training_never_sees_held_out_prompts():
    task = letters.letters_task(lambda rows, words: [0.0] * len(words), num_prompts=500, seed=0)
    seen = {row["prompt"] for step in range(20) for row in task.prompts(step).examples}
    heldout = {row["prompt"] for row in task.heldout.examples}
    assert len(heldout) == letters.NUM_HELDOUT
    assert not seen & heldout
    assert all(len(set(prompt)) == 4 and prompt.endswith(":") for prompt in seen | heldout)
    again = letters.letters_task(task.reward, num_prompts=500, seed=1)
    np.testing.assert_array_equal(again.heldout.tokens.ids, task.heldout.tokens.ids)
    assert not np.array_equal(again.prompts(0).tokens.ids, task.prompts(0).tokens.ids)
    with refused("num_prompts"):
        letters.letters_task(task.reward, num_prompts=15_345, seed=0)


def test_saved_tokenizers_encode_the_same_characters(tmp_path):
    text = Characters("abc: ")
    assert (text.pad_id, text.eos_id, text.vocab_size) == (5, 6, 7)
    assert text.decode([0, 5, 4, 6]) == "a? ?"
    text.save_tokenizer(tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.encode("cab: a", add_special_tokens=False) == text.encode("cab: a") == [2, 0, 1, 3, 4, 0]
    assert loaded.decode(text.encode("cab: a")) == "cab: a"
    assert (len(loaded), loaded.pad_token_id, loaded.eos_token_id) == (7, 5, 6)


# ---- two rewards in conflict


WORDS_IN_ORDER = [("", 0), ("q", 1), ("zyx", 1), ("abcxyzab", 3), ("xcdef", 4), ("za", 1), ("acegi", 1)]


@pytest.mark.parametrize(("word", "count"), WORDS_IN_ORDER)
def test_letters_in_order_have_no_gaps(word, count):
    assert in_order(word) == count


def test_words_earn_their_letters_and_their_order():
    rows, words = [{"letters": "cab"}] * 4, ["", "abc", "aaaabbbbcccc", "xxcabx"]
    assert own_letters(rows, words) == [0, 3 / 8, 1, 3 / 8]
    assert order(rows, words) == [0, 9, 4, 4]
    assert gold(rows, words) == pytest.approx([0, (3 / 8 + 3 / 15) / 2, (1 + 2 / 15) / 2, (3 / 8 + 2 / 15) / 2])


def test_a_front_leaves_out_what_another_point_exceeds():
    points = [(0.5, 0.5), (0.2, 0.9), (0.4, 0.5), (0.5, 0.1), (0.8, 0.2), (0.5, 0.5)]
    assert pareto_front(points) == [(0.2, 0.9), (0.5, 0.5), (0.8, 0.2)]
    assert hypervolume(points) == pytest.approx(0.2 * 0.9 + 0.3 * 0.5 + 0.3 * 0.2)
    assert hypervolume([]) == 0


# ---- preferences


def test_the_worth_of_a_word():
    row = {"prompt": "cab:", "letters": "cab"}
    worth = {"": 0, "x": 0, "c": 1, "a": 1.5, "cab": 3.5, "cc": 0, "cabeiou": 5.5, "cabeioux": 5.5}
    worth |= {"cabeiouxy": 4.5, ":": -1, "x?": -1}
    assert word_gold([row] * len(worth), list(worth)) == list(worth.values())


def test_pair_accuracy_skips_ties_and_halves_equal_scores():
    worth = np.array([[0.0, 1.0, 1.0], [2.0, 3.0, 4.0]])
    scores = np.array([[5.0, 6.0, 4.0], [1.0, 1.0, 2.0]])  # right, wrong; half, right, right
    assert pair_accuracy(scores, worth) == pytest.approx(3.5 / 5)


# ---- principles


def test_words_are_labelled_by_what_the_principles_say():
    assert constitutional.GOLD.keys() == constitutional.PRINCIPLES.keys()
    packed = constitutional.labelled_words(20, seed=0)
    decode = constitutional.TEXT.decode
    texts = [
        (decode(ids[(row == text) & ~learned]), decode(ids[(row == text) & learned]))
        for ids, row, learned in zip(packed.ids, packed.texts, packed.completion_mask, strict=True)
        for text in range(1, row.max() + 1)
    ]
    judged = [(question.split(":"), answer) for question, answer in texts if question.endswith("?")]
    assert (len(texts), len(judged)) == (100, 80)
    names = {principle: name for name, principle in constitutional.PRINCIPLES.items()}
    for (principle, _, word), answer in judged:
        assert (answer == "y") == constitutional.keeps(names[principle.strip()], word[:-1])
    assert not constitutional.keeps("vowel", "ba?ye")
    assert not constitutional.keeps("long", "")
