"""Compares rewards on tokens of the ablations' tasks with the rewards on text."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import whole_prompts

from claims import bench, testbeds
from experiments.tasks import arithmetic, letters
from grpo_jax.data.types import rng
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.policy import decoder_policy
from grpo_jax.sampling.sampler import Completions

KEY = jax.random.key(0)


def completions_of(ids, eos_id, pad_id):
    """Random tokens `[N, G, T]` as the sampler leaves them: padded after the first EOS."""
    ends = ids == eos_id
    mask = np.cumsum(ends, axis=-1) - ends == 0
    ids, zeros = np.where(mask, ids, pad_id), np.zeros(ids.shape)
    return Completions(ids, mask, zeros, None, ~ends.any(-1))


def texts_of(completions, characters):
    """The text of each completion, as the ordinary loop decodes it."""
    ids = completions.completion_ids
    keep = completions.completion_mask & (ids != characters.eos_id)
    return [[characters.decode(ids[i, j, keep[i, j]].tolist()) for j in range(ids.shape[1])] for i in range(len(ids))]


# ---- additions

TASK = testbeds.ARITHMETIC.task(num_prompts=40, seed=0, heldout=4)
SUMS = TASK.task.prompts(0).examples
ANSWERS = TASK.targets(SUMS)


def answers():
    """Half right, some with a wrong digit, some that go on, some at random."""
    ids = np.repeat(ANSWERS[:, None], 10, axis=1)
    generator = rng(1)
    changed = generator.random(ids.shape) < 0.1
    ids = np.where(changed, generator.integers(0, arithmetic.VOCAB_SIZE, ids.shape), ids)
    ids[:, -1] = generator.integers(0, arithmetic.VOCAB_SIZE, ids[:, -1].shape)
    return completions_of(ids, arithmetic.EOS_ID, arithmetic.PAD_ID)


DRAWN = answers()
compiled_reward = jax.jit(testbeds.addition_reward)


def reward_of(targets, drawn, key=KEY, **options):
    return np.array(compiled_reward(targets, drawn, key, **{**testbeds.ARITHMETIC.options, **options}))


@cache
def is_right():
    return np.array(jax.jit(testbeds.addition_reward)(ANSWERS, DRAWN, KEY))


def test_an_addition_is_right_where_its_text_is():
    texts = texts_of(DRAWN, arithmetic.TEXT)
    ended = ~DRAWN.truncated
    rows = [arithmetic.exact_answer([row] * 10, group) for row, group in zip(SUMS, texts, strict=True)]
    assert 0.3 < np.mean(rows) < 0.9
    np.testing.assert_array_equal(is_right(), np.array(rows) * ended)


def test_graded_additions_earn_their_share_of_right_tokens():
    ids = ANSWERS[:1, None].repeat(3, axis=1)
    ids[0, 1, 0] = (ids[0, 1, 0] + 1) % 10
    ids[0, 2] = arithmetic.EOS_ID
    drawn = completions_of(ids, arithmetic.EOS_ID, arithmetic.PAD_ID)
    padding = np.sum(ANSWERS[0] == arithmetic.PAD_ID) / 4
    np.testing.assert_allclose(reward_of(ANSWERS[:1], drawn, graded=1.0), [[1, 0.75, padding]])


def test_addition_rewards_have_the_requested_flaws():
    reward, right = partial(reward_of, ANSWERS, DRAWN), is_right()
    assert set(reward(coin=1.0).ravel()) == {0, 1}
    assert abs(np.corrcoef(reward(coin=1.0).ravel(), right.ravel())[0, 1]) < 0.2
    graded = reward(graded=1.0)
    bent = reward(graded=1.0, sharpness=5.0)
    np.testing.assert_array_equal(np.unique(graded, return_inverse=True)[1], np.unique(bent, return_inverse=True)[1])
    np.testing.assert_allclose(bent, np.expm1(5 * graded) / 5, rtol=1e-5)
    # Half of what Student's t with 2 degrees of freedom gives is within sqrt(2 / 3).
    assert np.mean(np.abs(reward(heavy=2.0) - right) < 2 * np.sqrt(2 / 3)) == pytest.approx(0.5, abs=0.1)


def test_shift_and_scale_are_a_prompts_own():
    reward, right = partial(reward_of, ANSWERS, DRAWN), is_right()
    shifts = reward(shift=2.0) - right
    np.testing.assert_allclose(shifts, shifts[:, :1].repeat(10, axis=1), atol=1e-5)
    again = reward(jax.random.key(9), shift=2.0) - right
    np.testing.assert_allclose(again, shifts, atol=1e-5)  # an answer's own
    other = reward(shift=2.0, draw=1.0) - right
    assert abs(np.corrcoef(other[:, 0], shifts[:, 0])[0, 1]) < 0.4  # and another seed's another
    assert np.std(shifts[:, 0]) == pytest.approx(2, rel=0.35)
    scaled = reward(scale=0.5)
    factors = scaled.max(axis=1, keepdims=True)  # 0 where nothing is right
    np.testing.assert_allclose(scaled, right * factors)
    assert np.std(np.log(factors[factors > 0])) == pytest.approx(0.5, rel=0.35)


# ---- additions with room


def test_some_additions_have_no_answer():
    task = testbeds.ADDITIONS.task(num_prompts=2, seed=0, heldout=1000)
    examples = task.task.heldout.examples
    targets, exact = (
        task.targets(examples),
        testbeds.ARITHMETIC.task(num_prompts=2, seed=0, heldout=1).targets(examples),
    )
    unsolvable = (targets == -1).all(axis=1)
    np.testing.assert_array_equal(targets[~unsolvable], exact[~unsolvable])
    assert unsolvable.mean() == pytest.approx(testbeds.UNSOLVABLE, abs=0.03)
    assert task.targets(examples[:1])[0].tolist() == targets[0].tolist()  # whatever they stand beside
    drawn = Completions(exact[:, None], exact[:, None] >= 0, None, None, None)
    np.testing.assert_array_equal(jax.jit(testbeds.addition_reward)(targets, drawn, KEY)[:, 0], ~unsolvable)


def test_carries_are_of_the_last_digits():
    prompts = ["12+34=", "07+58=", "95+05=", "50+60="]
    np.testing.assert_array_equal(testbeds.has_carry([{"prompt": prompt} for prompt in prompts]), [0, 1, 1, 0])


@pytest.mark.slow
def test_coarse_sampler_probabilities_differ_from_scored_ones():
    model = ModelConfig(4, 8, 16, 1, 1, 1, 8, initializer_range=1.0)
    exact, coarse = decoder_policy(model), testbeds.coarse_sampler(model)
    params, ids = jax.jit(exact.init)(jax.random.key(0)), jnp.array([[0, 1]])

    def first_and_second(policy):
        last, decode, cache = policy.prefill(params, whole_prompts(ids), 1, 3)
        return last, decode(cache, jnp.array([[2]]), jnp.int32(0))[0]

    for of_exact, of_coarse in zip(first_and_second(exact), first_and_second(coarse), strict=True):
        error = np.abs(of_coarse / of_exact - 1)
        assert 0.001 < error.max() <= 2**-3 + 1e-6  # half of the last of two bits
    assert (
        coarse.hidden(params, whole_prompts(ids), ids[:, None]).tolist()
        == exact.hidden(params, whole_prompts(ids), ids[:, None]).tolist()
    )


# ---- words


def test_words_are_worth_what_their_text_is():
    task = testbeds.WORDS.task(num_prompts=6, seed=0, heldout=4)
    rows = task.task.prompts(0).examples
    ids = rng(2).integers(0, 10, (6, 40, letters.MAX_TOKENS))
    ids = np.where(rng(3).random(ids.shape) < 0.15, letters.TEXT.eos_id, ids)
    ids[:, 0] = 3  # one letter again and again
    ids[:, 1, :4] = np.concatenate([task.targets(rows), np.full((6, 1), letters.TEXT.eos_id)], axis=1)
    drawn = completions_of(ids, letters.TEXT.eos_id, letters.TEXT.pad_id)
    expected = []
    for row, texts in zip(rows, texts_of(drawn, letters.TEXT), strict=True):
        for text in texts:
            new = len(set(text)) / max(len(text), 1)
            gold = len(set(text) & set(row["letters"])) / 3 * new * min(1, 8 / max(len(text), 1))
            expected.append((gold, len(text), 1 - new if text else 0))
    expected = np.array(expected).reshape(6, 40, 3)
    scores = jax.jit(task.gold)(task.targets(rows), drawn, KEY)
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    np.testing.assert_allclose(scores[:, 1], [[1, 3, 0]] * 6)
    assert {0, 16} <= set(expected[..., 1].ravel())

    compiled = jax.jit(testbeds.word_reward)

    def reward(**options):
        return compiled(task.targets(rows), drawn, KEY, **{**testbeds.WORDS.options, **options})

    gold, length, repeated = np.moveaxis(expected, -1, 0)
    np.testing.assert_allclose(reward(), gold, atol=1e-6)
    np.testing.assert_allclose(reward(length=2.0), gold + 2 * length / 16, atol=1e-6)
    np.testing.assert_allclose(reward(repetition=2.0), gold + 2 * length * repeated / 16, atol=1e-6)
    assert set(np.array(reward(coin=1.0, length=1.0)).ravel()) == {0, 1}


# ---- all testbeds


@pytest.mark.parametrize("preset", bench.SIZES)
@pytest.mark.parametrize("name", testbeds.TESTBEDS)
def test_tasks_hold_out_what_presets_ask(name, preset):
    heldout = bench.SIZES[preset].heldout
    prompts = testbeds.TESTBEDS[name].task(num_prompts=2, seed=0, heldout=heldout).task.heldout
    assert len(prompts.examples) == len(prompts.tokens.ids) == min(heldout, 256 if name == "words" else heldout)
