"""Checks tasks of experiments: prompts as functions of the step, and rewards by hand."""

import numpy as np
import pytest
from tiny import Characters

from experiments.tasks import arithmetic, stories
from grpo_jax.data.prompts import pad_prompts


def test_arithmetic_prompts_depend_only_on_seed_and_step():
    task, same, other = (arithmetic.arithmetic_task(num_prompts=16, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(task.prompts(3).tokens.ids, same.prompts(3).tokens.ids)
    assert (task.prompts(3).tokens.ids != task.prompts(4).tokens.ids).any()
    assert (task.prompts(3).tokens.ids != other.prompts(3).tokens.ids).any()


def test_heldout_additions_appear_in_no_training_phase():
    task = arithmetic.arithmetic_task(num_prompts=9000, seed=0)
    heldout = {example["prompt"] for example in task.heldout.examples}
    assert len(heldout) == 1000
    assert not heldout & {example["prompt"] for example in task.prompts(0).examples}
    warm, _ = arithmetic.mixed_answers(batch_size=5000, seed=0, step=0)
    assert not heldout & {example["prompt"] for example in warm.examples}


def test_arithmetic_by_hand():
    # 7 + 58 = 65, written with the last digit first.
    prompts = arithmetic.encode_pairs([7 * 100 + 58])
    assert prompts.examples == [{"prompt": "07+58=", "answer": "56"}]
    assert arithmetic.TEXT.decode(prompts.tokens.ids[0].tolist()) == "07+58="
    texts = ["56", "65", "56?", "", "561"]
    assert arithmetic.exact_answer(prompts.examples * 5, texts) == [1.0, 0.0, 0.0, 0.0, 0.0]
    padded = pad_prompts([[5], [6, 7]], [{}, {}], width=3, pad_id=0)
    np.testing.assert_array_equal(padded.tokens.ids, [[0, 0, 5], [0, 6, 7]])
    np.testing.assert_array_equal(padded.tokens.mask, [[False, False, True], [False, True, True]])


def test_mixed_answers_are_wrong_as_often_as_asked():
    prompts, labels = arithmetic.mixed_answers(batch_size=4000, seed=0, step=0, wrong_share=0.7)
    texts = [arithmetic.TEXT.decode(row[: list(row).index(arithmetic.EOS_ID)].tolist()) for row in labels]
    off = [int(t[::-1]) - int(e["answer"][::-1]) for t, e in zip(texts, prompts.examples, strict=True)]
    assert set(off) == {0, 1}
    assert np.mean(off) == pytest.approx(0.7, abs=4 * (0.7 * 0.3 / 4000) ** 0.5)


HAPPINESS = [
    ("", 0.0),
    ("She was very happy. He ran away. They had a lot of fun.", 2 / 3),
    ("She was very happy.", 1 / 3),  # one sentence counts as three
    ("She was very happy. She was very happy. She was very happy.", 1 / 3),  # repeating is no merit
    ("They were happy.", 0.0),  # three words
    ("She was very happy", 0.0),  # not complete
    ("It was a funny day. He unloved the hugs there.", 0.0),  # whole words only
    ('"I love you so much!" said Tim. All was good. They sat. He slept.', 1 / 5),
]


@pytest.mark.parametrize(("text", "reward"), HAPPINESS)
def test_happy_sentences_by_hand(text, reward):
    assert stories.happy_sentences([{}], [text]) == [pytest.approx(reward)]


def test_repeated_share_by_hand():
    assert stories.repeated_share("") == 0
    assert stories.repeated_share("He ran. She sat. He RAN! He ran.") == 0.5


def test_stories_hold_out_animals_and_names():
    task = stories.stories_task(Characters(), (2,), vocab_size=256, num_prompts=256, seed=0)
    trained = {example["prompt"] for example in task.prompts(0).examples}
    heldout = {example["prompt"] for example in task.heldout.examples}
    assert len(trained) == 256
    assert len(heldout) == 64
    for word in stories.HELDOUT_ANIMALS + stories.HELDOUT_NAMES:
        assert not any(word in prompt.split() or f"{word}." in prompt for prompt in trained)


BAD_PROMPTS = [
    (lambda: arithmetic.arithmetic_task(num_prompts=9001, seed=0), "num_prompts is 9001"),
    (lambda: pad_prompts([[1], []], [{}, {}], width=3, pad_id=0), "prompt 1 has"),
    (lambda: pad_prompts([[1], [1, 2, 3, 4]], [{}, {}], width=3, pad_id=0), "prompt 1 has"),
]


@pytest.mark.parametrize(("make", "words"), BAD_PROMPTS)
def test_prompts_that_cannot_be_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
