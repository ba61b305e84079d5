"""The letters task, and texts whose tokens are characters."""

import numpy as np
import pytest
import transformers

from experiments.tasks import letters
from experiments.tasks.characters import Characters


def test_prompts_are_three_different_letters_and_held_out_ones_never_occur():
    task = letters.letters_task(lambda rows, words: [0.0] * len(words), num_prompts=500, seed=0)
    seen = {row["prompt"] for step in range(20) for row in task.prompts(step).examples}
    heldout = {row["prompt"] for row in task.heldout.examples}
    assert len(heldout) == letters.NUM_HELDOUT
    assert not seen & heldout
    assert all(len(set(prompt)) == 4 and prompt.endswith(":") for prompt in seen | heldout)
    again = letters.letters_task(task.reward, num_prompts=500, seed=1)
    np.testing.assert_array_equal(again.heldout.ids, task.heldout.ids)
    assert not np.array_equal(again.prompts(0).ids, task.prompts(0).ids)


def test_too_many_prompts_are_refused():
    with pytest.raises(ValueError, match="num_prompts"):
        letters.letters_task(lambda rows, words: [], num_prompts=15_345, seed=0)


def test_characters_are_those_of_the_tokenizer_that_is_saved(tmp_path):
    text = Characters("abc: ")
    assert (text.pad_id, text.eos_id, text.vocab_size) == (5, 6, 7)
    assert text.decode([0, 5, 4, 6]) == "a? ?"
    text.save_tokenizer(tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.encode("cab: a", add_special_tokens=False) == text.encode("cab: a") == [2, 0, 1, 3, 4, 0]
    assert loaded.decode(text.encode("cab: a")) == "cab: a"
    assert (loaded.pad_token_id, loaded.eos_token_id) == (5, 6)
