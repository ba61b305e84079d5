"""Supervised training: packed rows have the loss and the gradients of texts alone, and resume to the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rl_helpers import Stop, assert_same_runs, stopping
from tiny import random_params, refused, tiny_config

from grpo_jax.data.packing import pack, packed_batches, packed_pieces
from grpo_jax.data.types import pad_completions, pad_prompts
from grpo_jax.fit import fit
from grpo_jax.functional import token_mean_weights
from grpo_jax.models.policy import decoder_policy
from grpo_jax.offline.phase import SupervisedConfig
from grpo_jax.offline.sft import mean_nll, sft_objective, text_nll
from grpo_jax.rl.types import Batch
from grpo_jax.runs.folder import RunFolder

POLICY = decoder_policy(tiny_config(16))
PARAMS = random_params(tiny_config(16))


def texts(count: int, seed: int = 0):
    """Prompts, and completions that repeat the prompt's first token."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 15, rng.integers(1, 5)).tolist() for _ in range(count)]
    return prompts, [[prompt[0]] * int(rng.integers(1, 4)) + [15] for prompt in prompts]


def test_rows_hold_every_text_whole_and_little_else():
    prompts, completions = texts(40)
    packed = pack(prompts, completions, width=16)
    actual = []
    for ids, text, learned in zip(packed.ids, packed.texts, packed.completion_mask, strict=True):
        used = int((text > 0).sum())
        assert (text[:used] > 0).all()
        assert (np.diff(text[:used]) >= 0).all()
        for number in range(1, text.max() + 1):
            mine = text == number
            actual.append((ids[mine & ~learned].tolist(), ids[mine & learned].tolist()))
        assert not learned[text == 0].any()
    assert sorted(actual) == sorted(zip(prompts, completions, strict=True))
    needed = sum(map(len, prompts)) + sum(map(len, completions))
    assert len(packed.ids) <= -(-needed // 16) + 1  # one more than if texts could be cut
    again = pack(prompts, completions, width=16)
    np.testing.assert_array_equal(again.ids, packed.ids)


def test_the_first_token_of_a_text_without_prompt_is_not_learned():
    packed = pack([[], [1]], [[3, 4, 5], [6]], width=5)
    np.testing.assert_array_equal(packed.ids, [[3, 4, 5, 1, 6]])
    np.testing.assert_array_equal(packed.completion_mask, [[False, True, True, False, True]])


@pytest.mark.parametrize(
    ("prompts", "completions", "sentence"),
    [
        ([], [], "0 prompts"),
        ([[1]], [], "give one each"),
        ([[1, 2, 3]], [[4, 5, 6]], "text 0 has 6 tokens, and a row 5"),
        ([[1], [1]], [[2], []], "text 1 has no token to learn"),
        ([[]], [[2]], "text 0 has no token to learn"),
    ],
)
def test_what_cannot_be_packed_is_refused(prompts, completions, sentence):
    with refused(sentence):
        pack(prompts, completions, width=5)


def test_packed_rows_have_the_loss_and_gradients_of_texts_alone():
    prompts, completions = texts(9)
    packed = pack(prompts, completions, width=16)
    ids, mask = pad_completions([[completion] for completion in completions], 5)
    padded = pad_prompts(prompts, [{} for _ in prompts], width=4, pad_id=0)
    alone = Batch(padded.ids, padded.mask, ids, mask, np.ones((len(prompts), 1), np.float32))
    loss_fn = sft_objective(POLICY).loss_fn

    def loss(params, batch):
        batch = batch._replace(weights=token_mean_weights(jnp.asarray(batch.completion_mask)))
        return loss_fn(params, batch)[0]

    values_and_grads = [jax.jit(jax.value_and_grad(loss))(PARAMS, batch) for batch in (packed, alone)]
    (value, grads), (expected, expected_grads) = values_and_grads
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-6), grads, expected_grads)
    np.testing.assert_allclose(mean_nll(POLICY, PARAMS, [packed]), expected, rtol=1e-5)


def test_training_lowers_the_held_out_nll_and_resumes_to_the_same_bits(tmp_path):
    rows, heldout = pack(*texts(400), width=16), pack(*texts(40, seed=1), width=16)
    config = SupervisedConfig(steps=30, learning_rate=2e-2, checkpoint_every=10, eval_every=15, log_every=5)

    def evaluate(params, step):
        return {"heldout_nll": mean_nll(POLICY, params, [heldout])}

    def run(name, batches):
        folder = RunFolder(tmp_path / name, {})
        return fit(sft_objective(POLICY), PARAMS, batches, config, folder, phase="sft", evaluate=evaluate), folder

    batches = packed_batches(rows, 8, seed=0)
    whole = run("whole", batches)
    with pytest.raises(Stop):
        run("cut", stopping(batches, 25))
    assert_same_runs(run("cut", batches), whole, ["metrics.jsonl"])
    nll = [line["heldout_nll"] for line in whole[1].lines() if "heldout_nll" in line]
    assert len(nll) == 3
    assert nll[-1] < 0.5 * nll[0]


def test_a_phase_that_skips_every_step_says_so_at_its_end_at_the_latest(tmp_path):
    broken = jax.tree.map(lambda x: x * jnp.nan, PARAMS)
    with pytest.raises(FloatingPointError, match="not finite"):
        fit(
            sft_objective(POLICY),
            broken,
            packed_batches(pack(*texts(50), width=16), 8, seed=0),
            SupervisedConfig(6, 1e-2),
            RunFolder(tmp_path, {}),
            phase="sft",
        )


def test_the_nll_of_each_text_is_that_of_the_text_alone():
    prompts, completions = texts(9)
    packed = pack(prompts, completions, width=16)
    totals, tokens = text_nll(POLICY, PARAMS, packed_pieces(packed, 2))
    alone = [pack([prompt], [text], width=16) for prompt, text in zip(prompts, completions, strict=True)]
    expected = [mean_nll(POLICY, PARAMS, [one]) * len(text) for one, text in zip(alone, completions, strict=True)]
    assert sorted(tokens) == sorted(map(len, completions))
    np.testing.assert_allclose(sorted(totals), sorted(expected), rtol=1e-4)
    np.testing.assert_allclose(totals.sum() / tokens.sum(), mean_nll(POLICY, PARAMS, [packed]), rtol=1e-5)
