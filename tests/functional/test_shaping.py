from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from jax.test_util import check_grads
from numpy.testing import assert_allclose, assert_array_equal

from grpo_jax.functional import (
    centered_advantages,
    combine_rewards,
    group_advantages,
    kl_penalized_rewards,
    overlong_penalty,
)

few = settings(max_examples=25, deadline=None, derandomize=True)
NAN = np.float32(np.nan)

# --- the penalty of long completions ---

# L_max = 100, L_c = 20: nothing up to 80, then −1/20 a token, −1 from 100 on.
LENGTHS = np.array([0, 79, 80, 81, 85, 90, 99, 100, 101, 5000], np.int32)
PENALTIES = np.array([0, 0, 0, -0.05, -0.25, -0.5, -0.95, -1, -1, -1], np.float32)


def test_overlong_penalty_by_hand():
    penalty = overlong_penalty(jnp.asarray(LENGTHS), max_length=100, buffer=20)
    assert penalty.dtype == jnp.float32
    assert_allclose(penalty, PENALTIES, rtol=1e-6)


def test_overlong_penalty_of_a_buffer_of_all_or_one():
    lengths = jnp.array([0, 1, 2, 3, 4, 5])
    assert_allclose(overlong_penalty(lengths, max_length=4, buffer=4), [0, -0.25, -0.5, -0.75, -1, -1])
    assert_allclose(overlong_penalty(lengths, max_length=4, buffer=1), [0, 0, 0, 0, -1, -1])


def test_overlong_penalty_of_dapo():
    # 20480 and 4096: half of the buffer is at 16384 + 2048.
    assert_allclose(overlong_penalty(jnp.array([16384, 18432, 20480]), max_length=20480, buffer=4096), [0, -0.5, -1])


@few
@given(st.integers(0, 300), st.integers(1, 200), st.integers(1, 200))
def test_overlong_penalty_equals_a_plain_formula(length, max_length, buffer):
    buffer = min(buffer, max_length)
    start = max_length - buffer
    expected = 0 if length <= start else -1 if length >= max_length else -(length - start) / buffer
    penalty = overlong_penalty(jnp.asarray([length]), max_length=max_length, buffer=buffer)
    assert_allclose(penalty, [expected], rtol=1e-6)


def test_overlong_penalty_under_jit_and_vmap():
    penalty = jax.jit(lambda lengths: overlong_penalty(lengths, max_length=100, buffer=20))
    assert_allclose(penalty(LENGTHS), PENALTIES, rtol=1e-6)
    assert_allclose(jax.vmap(penalty)(jnp.asarray(LENGTHS)), PENALTIES, rtol=1e-6)
    assert_allclose(penalty(LENGTHS.reshape(2, 5)), PENALTIES.reshape(2, 5), rtol=1e-6)


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_overlong_penalty_refuses_a_buffer_outside_of_the_length(buffer):
    with pytest.raises(ValueError, match=f"buffer is {buffer}"):
        overlong_penalty(jnp.array([1]), max_length=100, buffer=buffer)


# --- several rewards in one ---

jitted_combine = jax.jit(combine_rewards)
WEIGHTS = np.array([1, -2, 0.5], np.float32)
maybe = st.one_of(st.integers(-8, 8).map(lambda n: n / 4), st.just(float("nan")))


def test_combine_rewards_by_hand():
    # The first two of all; the first alone; the second alone; none.
    rewards = jnp.array([[1.0, 3.0, jnp.nan, jnp.nan], [0.5, jnp.nan, 2.0, jnp.nan]])
    combined = combine_rewards(rewards, weights=jnp.array([1.0, 2.0]))
    assert_array_equal(combined.rewards, [2, 3, 4, 0])
    assert_array_equal(combined.applicable, [True, True, True, False])
    combined = combine_rewards(rewards)
    assert_array_equal(combined.rewards, [1.5, 3, 2, 0])
    assert_array_equal(combined.applicable, [True, True, True, False])


@few
@given(hnp.arrays(np.float32, (3, 2, 4), elements=maybe))
def test_combine_rewards_equals_a_plain_loop(rewards):
    expected, applicable = np.zeros((2, 4)), np.zeros((2, 4), bool)
    for k in range(3):
        for n in range(2):
            for g in range(4):
                if not np.isnan(rewards[k, n, g]):
                    expected[n, g] += WEIGHTS[k] * rewards[k, n, g]
                    applicable[n, g] = True
    combined = jitted_combine(rewards, weights=WEIGHTS)
    assert_allclose(combined.rewards, expected, rtol=1e-6, atol=1e-6)
    assert_array_equal(combined.applicable, applicable)


@pytest.mark.slow
def test_combine_rewards_under_jit_and_vmap_equals_eager():
    rewards = np.random.default_rng(0).normal(size=(3, 2, 4)).astype(np.float32)
    rewards[0, 0], rewards[:, 1, 2] = NAN, NAN
    expected = combine_rewards(jnp.asarray(rewards), weights=jnp.asarray(WEIGHTS))
    mapped = jax.vmap(lambda r: combine_rewards(r, weights=jnp.asarray(WEIGHTS)), 1)(jnp.asarray(rewards))
    for combined in (jitted_combine(rewards, weights=WEIGHTS), mapped):
        assert_allclose(combined.rewards, expected.rewards, rtol=1e-6)
        assert_array_equal(combined.applicable, expected.applicable)


def test_gradient_of_combined_rewards_equals_finite_differences():
    rewards = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    check_grads(
        jax.jit(lambda *arrays: combine_rewards(arrays[0], weights=arrays[1]).rewards),
        (rewards, WEIGHTS),
        order=1,
        modes=["rev"],
        eps=1e-2,
    )
    # What does not apply spoils no gradient: neither its own nor that of a weight.
    rewards[1, 2] = NAN
    of_rewards, of_weights = jax.jit(jax.grad(lambda r, w: jnp.sum(combine_rewards(r, weights=w).rewards), (0, 1)))(
        rewards, WEIGHTS
    )
    assert_array_equal(of_rewards, np.where(np.isnan(rewards), 0, WEIGHTS[:, None]))
    assert_allclose(of_weights, np.nansum(rewards, axis=1), rtol=1e-5)


@pytest.mark.parametrize("function", [group_advantages, centered_advantages])
def test_what_nothing_applies_to_stays_out_of_the_baseline(function):
    rewards = np.array([[[1.0, NAN, 0.0, 4.0]], [[0.5, NAN, NAN, 1.0]]], np.float32)
    combined = combine_rewards(jnp.asarray(rewards))
    advantages = np.asarray(function(combined.rewards, where=combined.applicable))
    # (1.5, 0, 5) without the second completion. With it as a reward of 0 the mean would be another.
    assert_array_equal(advantages[:, 1], [0])
    assert_allclose(advantages[:, [0, 2, 3]], function(jnp.array([[1.5, 0.0, 5.0]])), rtol=1e-5)
    assert np.abs(advantages[:, [0, 2, 3]] - function(combined.rewards)[:, np.array([0, 2, 3])]).max() > 0.1


# --- KL in the reward ---


def test_kl_penalized_rewards_equal_a_plain_loop():
    rng = np.random.default_rng(0)
    rewards, (logprobs, ref_logprobs) = rng.normal(size=3).astype(np.float32), rng.normal(size=(2, 3, 4))
    mask = np.array([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]], bool)
    expected = [
        rewards[i] - 0.1 * sum(logprobs[i, t] - ref_logprobs[i, t] for t in range(4) if mask[i, t]) for i in range(3)
    ]
    arrays = (np.where(mask, x, np.nan).astype(np.float32) for x in (logprobs, ref_logprobs))
    penalized = jax.jit(partial(kl_penalized_rewards, kl_coef=0.1))(rewards, *arrays, mask)
    assert_allclose(penalized, expected, rtol=1e-5)


def test_kl_penalized_rewards_have_no_gradient():
    def total(logprobs):
        return jnp.sum(
            kl_penalized_rewards(jnp.ones(1), logprobs, jnp.zeros((1, 2)), jnp.ones((1, 2), bool), kl_coef=1.0)
        )

    assert_array_equal(jax.grad(total)(jnp.ones((1, 2))), np.zeros((1, 2)))


def test_a_reward_that_is_only_watched_applies_to_nothing():
    rewards = jnp.array([[1.0, jnp.nan], [5.0, 5.0]])
    combined = combine_rewards(rewards, weights=jnp.array([1.0, 0.0]))
    assert_array_equal(combined.rewards, [1, 0])
    assert_array_equal(combined.applicable, [True, False])
