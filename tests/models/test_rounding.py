"""Checks the rounding of parameters to bfloat16: its mean, its neighbours, its gradient, and that it keeps updates."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import load_golden, whole_prompts

from experiments.new_models import save_new_model
from grpo_jax.models.files.weights import load_params
from grpo_jax.models.params.rounding import changed_share, round_stochastically, round_to_nearest
from grpo_jax.models.policy import decoder_policy


def tree(x, name="kernel"):
    return {"layers": {"mlp": {"up_proj": {name: jnp.asarray(x, jnp.float32)}}}}


def matrix(params):
    return np.asarray(jax.tree.leaves(params)[0])


def neighbours(x):
    """Returns the bfloat16 numbers around each float32 number, towards 0 and away from 0, by way of its bits."""
    low = (np.asarray(x, np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    return low, (low.view(np.uint32) + 0x10000).view(np.float32)


def test_numbers_are_rounded_to_a_neighbour():
    x = np.random.default_rng(0).normal(size=(3, 40, 50)).astype(np.float32)
    rounded = matrix(round_stochastically(tree(x)))
    low, high = neighbours(x)
    assert ((rounded == low) | (rounded == high)).all()
    assert 0.4 < (rounded == high).mean() < 0.6
    np.testing.assert_array_equal(matrix(jax.jit(round_stochastically)(tree(x))), rounded)
    np.testing.assert_array_equal(matrix(round_stochastically(tree(rounded))), rounded)


@pytest.mark.parametrize("share", [0.01, 0.25, 0.9])
@pytest.mark.parametrize("start", [1.0, -0.03125, 0.7109375])
def test_the_mean_is_kept(start, share):
    low, high = neighbours(start)
    x = np.full((200, 500), low + np.float32(share) * (high - low), np.float32)
    rounded = matrix(round_stochastically(tree(x)))
    error = np.sqrt(share * (1 - share) / x.size)
    np.testing.assert_allclose((rounded == high).mean(), share, atol=4 * error + 1e-4)
    columns = (rounded == high).mean(0)  # places that follow each other are independent
    assert columns.std() < 1.2 * np.sqrt(share * (1 - share) / len(x)) + 1e-9


def test_other_matrices_have_other_noise():
    x = np.full((64, 64), 1 + 2.0**-8, np.float32)
    both = {"a": {"kernel": x}, "b": {"kernel": x}}
    rounded = jax.tree.leaves(round_stochastically(jax.tree.map(jnp.asarray, both)))
    assert 0.4 < np.mean(np.asarray(rounded[0]) == np.asarray(rounded[1])) < 0.6


def test_only_matrices_of_products_are_rounded():
    x = np.float32([[1 + 2.0**-10]])
    for exact in (tree(x, "scale"), tree(x, "bias"), {"experts": {"router": {"kernel": x}}}, {"a": x, "b": x}):
        for rounding in (round_stochastically, round_to_nearest):
            jax.tree.map(np.testing.assert_array_equal, rounding(exact), exact)
    half = {"kernel": jnp.ones((2, 2), jnp.bfloat16)}
    assert round_stochastically(half)["kernel"].dtype == jnp.bfloat16


def test_numbers_that_are_not_finite_stay():
    x = np.float32([[np.inf, -np.inf, np.nan, 0.0, -0.0]])
    np.testing.assert_array_equal(matrix(round_stochastically(tree(x))), x)


def test_the_gradient_passes_unchanged():
    x = np.random.default_rng(1).normal(size=(4, 5)).astype(np.float32)

    def square(params):
        return jnp.sum(jnp.square(jax.tree.leaves(round_stochastically(params))[0]))

    np.testing.assert_array_equal(matrix(jax.grad(square)(tree(x))), 2 * matrix(round_stochastically(tree(x))))


def test_changed_share_counts_numbers_of_matrices():
    before = {"embedding": jnp.ones((4, 5)), "norm": {"scale": jnp.ones(7)}}
    after = {"embedding": before["embedding"].at[0].set(2.0), "norm": {"scale": jnp.zeros(7)}}
    assert changed_share(before, after) == pytest.approx(0.25)
    assert changed_share({"a": jnp.ones(2)}, {"a": jnp.zeros(2)}) is None


# ---- a model with small updates


def moved_model():
    """Returns a model of bfloat16 numbers, its configuration, and the model after an update of a hundredth of them."""
    config, params = load_golden("llama")
    start = round_to_nearest(params)
    direction = jax.tree.map(lambda x: jnp.asarray(np.random.default_rng(2).normal(size=x.shape), x.dtype), start)
    moved = jax.tree.map(lambda x, d: x * (1 + 1e-4 * jnp.sign(d)), start, direction)
    return config, start, moved


def logits(config, params):
    ids = jnp.arange(20, dtype=jnp.int32)[None] % config.vocab_size
    policy = decoder_policy(config)
    return policy.hidden(params, whole_prompts(ids[:, :1]), ids[:, None])


def test_updates_show_at_once_only_with_stochastic_rounding():
    config, start, moved = moved_model()
    assert changed_share(start, round_to_nearest(moved)) == 0
    share = changed_share(start, round_stochastically(moved))
    assert 0.01 < share < 0.04  # 1e-4 of a number is .0128 to .0256 of the distance to the next
    np.testing.assert_array_equal(*(logits(config, params) for params in (start, round_stochastically(start))))


def test_the_policy_computes_with_rounded_parameters():
    config, _, moved = moved_model()
    config = replace(config, dtype="bfloat16", rounding="stochastic")
    policy, nearest = decoder_policy(config), replace(config, rounding="nearest")
    np.testing.assert_array_equal(logits(config, moved), logits(nearest, round_stochastically(moved)))
    np.testing.assert_array_equal(policy.unembedding(moved), policy.unembedding(policy.rounded(moved)))
    assert decoder_policy(replace(config, dtype="float32")).rounded is None


def test_a_folder_in_bfloat16_keeps_small_updates(tmp_path):
    config, _, moved = moved_model()
    loaded = load_params(save_new_model(tmp_path / "out", moved, config, dtype=jnp.bfloat16), config)
    assert changed_share(loaded, round_stochastically(moved)) == 0
