"""Weights of tokens and completions: empty batches, devices, far ratios, and shares."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from grpo_jax import functional as F

AGGREGATIONS = {
    "token_mean": F.token_mean_weights,
    "sequence_mean": F.sequence_mean_weights,
    "sequence_sum": F.sequence_sum_weights,
    "constant_length": F.constant_length_weights,
}
every_aggregation = pytest.mark.parametrize("name", AGGREGATIONS)


@every_aggregation
def test_an_empty_batch_gives_zeros(name):
    # Compiled, XLA turns an unguarded 0/0 into 0 here; eagerly it is NaN.
    for shape in ((4, 5), (0, 5)):
        weights = AGGREGATIONS[name](jnp.zeros(shape, bool))
        assert weights.dtype == jnp.float32
        assert_array_equal(weights, np.zeros(shape))
    assert_array_equal(AGGREGATIONS[name](jnp.zeros((4, 5), bool), num_completions=0), np.zeros((4, 5)))


@every_aggregation
def test_num_completions_is_of_all_devices(name, spread):
    # As in TRL: a completion that is masked out may keep its place in the mean.
    mask = np.arange(5) < np.random.default_rng(0).integers(0, 6, (8, 3, 1))
    weights = spread(partial(AGGREGATIONS[name], num_completions=24, axis_name="data"))(mask)
    by_mask = AGGREGATIONS[name](jnp.asarray(mask))
    completions = mask.any(-1).sum()
    assert completions < 24
    assert_allclose(weights, by_mask if name == "token_mean" else by_mask * (completions / 24), rtol=1e-6)


@pytest.mark.parametrize("function", [F.truncated_weights, F.masked_weights, F.rejection_weights])
def test_gradients_at_far_ratios_are_zero(function):
    far = jnp.array([-200.0, 200.0])  # exp is 0 and infinite
    assert_array_equal(jax.grad(lambda d: jnp.sum(function(d)))(far), np.zeros(2))


@pytest.mark.parametrize("num_tokens", [1, 2, 11, 51, 101, 201])
def test_shares_are_not_rounded_down_by_the_binary_system(num_tokens):
    # 0.29 · 100 is 28.999999999999996 in float64, and 0.2 · 10 may be less than 2 in float32.
    hundredths = np.arange(101)
    entropy = np.random.default_rng(0).permutation(201).astype(np.float32)
    of_shares = jax.jit(jax.vmap(lambda mask, share: F.top_entropy_tokens(entropy, mask, share=share), (None, 0)))
    chosen = of_shares(np.arange(201) < num_tokens, (hundredths / 100).astype(np.float32))
    assert_array_equal(np.sum(chosen, axis=1), 1 + hundredths * (num_tokens - 1) // 100)
