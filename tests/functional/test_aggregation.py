"""Weights of tokens: numbers derived by hand, what they sum to, and batches that are split."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from grpo_jax import functional as F

WEIGHTS = {
    "token_mean": F.token_mean_weights,
    "sequence_mean": F.sequence_mean_weights,
    "sequence_sum": F.sequence_sum_weights,
    "constant_length": F.constant_length_weights,
    "constant_length_of_9": partial(F.constant_length_weights, max_length=9),
}
every_weight = pytest.mark.parametrize("name", WEIGHTS)

# Rows of 3, 0, 5 and 1 tokens. B = 3: the second is not counted. Nine tokens in all.
RAGGED = np.arange(5) < np.array([3, 0, 5, 1])[:, None]

# Weights of a token of each row, and their sum.
BY_HAND = {
    "token_mean": ([1 / 9, 0, 1 / 9, 1 / 9], 1),
    "sequence_mean": ([1 / (3 * 3), 0, 1 / (5 * 3), 1 / (1 * 3)], 1),  # 1/(|o| · B)
    "sequence_sum": ([1 / 3, 0, 1 / 3, 1 / 3], 9 / 3),  # the mean length of a completion
    "constant_length": ([1 / (3 * 5), 0, 1 / (3 * 5), 1 / (3 * 5)], 9 / 3 / 5),  # as wide as the mask
    "constant_length_of_9": ([1 / (3 * 9), 0, 1 / (3 * 9), 1 / (3 * 9)], 9 / 3 / 9),
}


@every_weight
def test_by_hand(name):
    of_rows, total = BY_HAND[name]
    weights = WEIGHTS[name](jnp.asarray(RAGGED))
    assert weights.dtype == jnp.float32
    assert_allclose(weights, np.array(of_rows)[:, None] * RAGGED, rtol=1e-6)
    assert_allclose(jnp.sum(weights), total, rtol=1e-6)


@every_weight
@pytest.mark.parametrize("shape", [(4, 5), (0, 5)])
def test_an_empty_batch_gives_zeros(name, shape):
    # Compiled, XLA turns an unguarded 0/0 into 0 here; eagerly it is NaN.
    for function in (WEIGHTS[name], jax.jit(WEIGHTS[name]), partial(WEIGHTS[name], num_completions=0)):
        assert_array_equal(function(jnp.zeros(shape, bool)), np.zeros(shape))


@every_weight
def test_a_completion_masked_out_may_keep_its_place_in_the_mean(name):
    # As in TRL: a truncated completion adds nothing to the sum, and the others have what they had.
    weights = WEIGHTS[name](jnp.asarray(RAGGED))
    of_four = jax.jit(partial(WEIGHTS[name], num_completions=4))(RAGGED)
    assert_allclose(of_four, weights if name == "token_mean" else weights * (3 / 4), rtol=1e-6)
    assert_array_equal(WEIGHTS[name](jnp.asarray(RAGGED), num_completions=3), weights)


@every_weight
def test_num_completions_is_of_all_devices(name, spread):
    mask = np.arange(5) < np.random.default_rng(0).integers(0, 6, (8, 3, 1))
    weights = spread(partial(WEIGHTS[name], num_completions=24, axis_name="data"))(mask)
    assert_allclose(weights, WEIGHTS[name](jnp.asarray(mask), num_completions=24), rtol=1e-6)


def test_a_mean_of_microbatch_means_is_another_number():
    # Rows of 1 and 3 tokens with losses 4 and 0: the token mean is 4/4 = 1, the mean of means (4 + 0)/2 = 2.
    mask = jnp.asarray(np.arange(3) < np.array([1, 3])[:, None])
    per_token = jnp.array([[4.0, 0, 0], [0, 0, 0]])
    assert_allclose(jnp.sum(F.token_mean_weights(mask) * per_token), 1)
    of_each = [jnp.sum(F.token_mean_weights(mask[i : i + 1]) * per_token[i : i + 1]) for i in range(2)]
    assert_allclose(sum(of_each) / 2, 2)
