"""Importance weights and masks: numbers derived by hand, bounds and ties."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from grpo_jax import functional as F

RATIOS = np.array([0.0, 0.45, 0.55, 0.75, 0.9995, 1.0, 1.0005, 2.0, 4.0, 5.5, 1e9], np.float32)
BY_HAND = [
    (F.truncated_weights, {}, [0, 0.45, 0.55, 0.75, 0.9995, 1, 1.0005, 2, 2, 2, 2]),
    (F.truncated_weights, {"cap": 3.0}, [0, 0.45, 0.55, 0.75, 0.9995, 1, 1.0005, 2, 3, 3, 3]),
    (F.masked_weights, {}, [0, 0, 0.55, 0.75, 0.9995, 1, 1.0005, 2, 4, 0, 0]),
    (F.masked_weights, {"low": 0.0, "high": 3.0}, [0, 0.45, 0.55, 0.75, 0.9995, 1, 1.0005, 2, 0, 0, 0]),
    (F.rejection_weights, {}, [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0]),
    (F.rejection_weights, {"low": 0.5, "high": 3.0}, [0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0]),
]


def log(ratio):
    with np.errstate(divide="ignore"):
        return jnp.asarray(np.log(ratio))


@pytest.mark.parametrize(("function", "bounds", "expected"), BY_HAND)
def test_weights_by_hand(function, bounds, expected):
    assert_allclose(function(log(RATIOS), **bounds), expected, rtol=1e-6)
    far = jnp.array([-200.0, 200.0])  # exp is 0 and infinite
    assert_array_equal(jax.grad(lambda d: jnp.sum(function(d, **bounds)))(far), np.zeros(2))
    assert np.isnan(function(jnp.array([jnp.nan, 0.0]), **bounds)[0])


def test_bounds_belong_to_what_is_kept():
    # exp(0) is 1 without rounding.
    for bounds in ({"low": 1.0, "high": 2.0}, {"low": 0.5, "high": 1.0}):
        assert_array_equal(F.masked_weights(jnp.zeros(1), **bounds), [1])
        assert_array_equal(F.rejection_weights(jnp.zeros(1), **bounds), [1])


def test_of_a_completion_the_geometric_mean_decides():
    # Ratios of 1.1 and 1/1.1 have the geometric mean 1, of 1.1 and 1 more.
    logprobs = log(np.array([[1.1, 1 / 1.1, 9.0], [1.1, 1.0, 9.0]], np.float32))
    mask = jnp.array([[True, True, False], [True, True, False]])
    weights = F.rejection_weights(F.sequence_mean_log_ratio(logprobs, jnp.zeros((2, 3)), mask))
    assert_array_equal(np.asarray(weights)[:, :2], [[1, 1], [0, 0]])


def test_on_policy_completions_by_hand():
    # Drifts: mean(2, 1) = 1.5, mean(−2, −1) = −1.5, mean(4, ·) = 4 where the second is masked.
    log_ratio = jnp.array([[-2.0, -1.0], [-2.0, -1.0], [2.0, 1.0], [-4.0, 99.0]])
    mask = jnp.array([[True, True], [True, True], [True, True], [True, False]])
    keep = partial(F.on_policy_completions, log_ratio, jnp.array([1.0, -1.0, -1.0, -1.0]), mask)
    assert_array_equal(keep(threshold=1.0), [[1, 1], [0, 0], [1, 1], [0, 0]])
    assert_array_equal(keep(threshold=1.5), [[1, 1], [1, 1], [1, 1], [0, 0]])  # 1.5 is not above 1.5
    assert_array_equal(keep(threshold=4.0), mask)
    assert_array_equal(keep(threshold=-2.0), [[1, 1], [0, 0], [0, 0], [0, 0]])
    # What is worth nothing is not punished.
    assert_array_equal(F.on_policy_completions(log_ratio, jnp.zeros(4), mask, threshold=1.0), mask)
    # One advantage a token: of a completion that drifted the negative ones go.
    of_tokens = jnp.array([[-1.0, 1.0], [1.0, -1.0], [-1.0, -1.0], [0.0, -1.0]])
    kept = F.on_policy_completions(log_ratio, of_tokens, mask, threshold=1.0)
    assert_array_equal(kept, [[0, 1], [1, 0], [1, 1], [1, 0]])


def test_top_entropy_tokens_by_hand():
    # Of 5 tokens a share of ½ keeps 1 + ⌊½ · 4⌋ = 3: 9, 7 and 5. The 99 is masked.
    entropy, mask = jnp.array([[9.0, 1, 7], [99, 3, 5]]), jnp.array([[True, True, True], [False, True, True]])
    assert_array_equal(F.top_entropy_tokens(entropy, mask, share=0.5), [[1, 0, 1], [0, 0, 1]])
    assert_array_equal(F.top_entropy_tokens(entropy, mask, share=1.0), mask)
    assert_array_equal(F.top_entropy_tokens(entropy, mask, share=1e-3), [[1, 0, 0], [0, 0, 0]])
    assert_array_equal(F.top_entropy_tokens(entropy, mask), [[1, 0, 0], [0, 0, 0]])  # 1 + ⌊0.8⌋
    assert_array_equal(F.top_entropy_tokens(entropy, mask, share=0.25), [[1, 0, 1], [0, 0, 0]])  # 1 + ⌊1⌋
    # 1 + ⌊0.2 · 5⌋ = 2 of six; the second has two equals, which are kept.
    ties = jnp.array([1.0, 3, 1, 2, 2, 2])
    assert_array_equal(F.top_entropy_tokens(ties, jnp.ones(6, bool)), [0, 1, 0, 1, 1, 1])
    for share in (0.0, 0.2, 1.0):
        assert not jnp.any(F.top_entropy_tokens(ties, jnp.zeros(6, bool), share=share))


@pytest.mark.parametrize("num_tokens", [1, 2, 11, 51, 101, 201])
def test_shares_are_not_rounded_down_by_the_binary_system(num_tokens):
    # 0.29 · 100 is 28.999999999999996 in float64, and 0.2 · 10 may be less than 2 in float32.
    hundredths = np.arange(101)
    entropy = np.random.default_rng(0).permutation(201).astype(np.float32)
    of_shares = jax.jit(jax.vmap(lambda mask, share: F.top_entropy_tokens(entropy, mask, share=share), (None, 0)))
    kept = of_shares(np.arange(201) < num_tokens, (hundredths / 100).astype(np.float32))
    assert_array_equal(np.sum(kept, axis=1), 1 + hundredths * (num_tokens - 1) // 100)
