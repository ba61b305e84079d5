"""Advantages and whitening: groups without spread, what is not a number, large numbers, and types."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from grpo_jax import functional as F


def opo(rewards, *, where=None):
    return F.opo_advantages(rewards, jnp.broadcast_to(jnp.arange(1, rewards.shape[-1] + 1), rewards.shape), where=where)


def whiten(rewards, *, where=None):
    return F.whiten(rewards, where)


FUNCTIONS = {
    "group": F.group_advantages,
    "centered": F.centered_advantages,
    "leave_one_out": F.leave_one_out_advantages,
    "rank": F.rank_advantages,
    "batch_std": F.batch_std_advantages,
    "opo": opo,
    "gpg": F.gpg_advantages,
    "max_rl": F.max_rl_advantages,
    "best_of_group": F.best_of_group_advantages,
    "pass_at_2": partial(F.pass_at_k_advantages, k=2),
    "whiten": whiten,
}
OF_BATCH = ("batch_std", "gpg", "whiten")
every_function = pytest.mark.parametrize("name", FUNCTIONS)
REWARDS = np.array([[0.3, 1.1, 2.0, 0.7, 0.4], [1.2, 1.6, 0.2, -0.4, 0.9], [0.7, 0.7, 0.7, 0.7, 0.7]], np.float32)
WHERE = np.array([[1, 0, 1, 1, 0], [1, 1, 0, 0, 1], [0, 1, 1, 1, 0]], bool)
# Sums of most of them are rounded: the float32 mean of eight 0.7s is not 0.7.
EQUAL = np.float32([0.7, 0.1, 1 / 3, -2.3, 0, 1e-30, 1e30])[:, None, None]


@jax.jit
def advantages(rewards, where=None):
    """Returns those of every function."""
    return {name: function(rewards, where=where) for name, function in FUNCTIONS.items()}


@cache
def of_equal_rewards():
    """Returns advantages of groups of five, of three of five, and of one; and derivatives."""
    left_out = np.arange(5) < 3

    @jax.jit
    def compute(rewards):
        def of(name, rewards, where=None):
            return jax.vmap(lambda x: FUNCTIONS[name](x, where=where))(rewards)

        rest = jnp.where(left_out, rewards, 5)
        groups = {name: [of(name, rewards), of(name, rest, left_out[None])] for name in FUNCTIONS}
        alone = {name: of(name, rewards[..., :1]) for name in FUNCTIONS if name != "pass_at_2"}
        slopes = {name: jax.jacrev(partial(of, name))(rewards[:1]) for name in FUNCTIONS}
        return groups, alone, slopes

    return jax.device_get(compute(np.repeat(EQUAL, 5, axis=-1)))


@every_function
def test_equal_rewards_give_exactly_zero_and_finite_gradients(name):
    groups, alone, slopes = of_equal_rewards()
    assert not np.any(groups[name])
    assert not np.any(alone.get(name, 0))
    assert np.all(np.isfinite(slopes[name]))  # √ has an infinite slope at a variance of 0


@cache
def with_a_nan():
    """Returns advantages with a NaN that counts, among others and as the only one of its group, and of NaNs alone."""
    rewards, only = REWARDS.copy(), np.zeros_like(WHERE)
    rewards[0, 0], only[0, 0] = np.nan, True
    of_nothing = advantages(np.full((3, 5), np.nan, np.float32), np.ones_like(WHERE))
    return [(where, advantages(rewards, where)) for where in (WHERE, only)], of_nothing


@every_function
def test_nan_stays_visible_and_excluded_completions_stay_zero(name):
    some, of_nothing = with_a_nan()
    for where, results in some:
        result = np.asarray(results[name])
        assert np.isnan(result[0, 0])
        assert_array_equal(result[~where], 0)
        if name not in OF_BATCH:  # the batch's deviation is NaN everywhere
            assert np.all(np.isfinite(result[1:]))
    assert np.all(np.isnan(of_nothing[name]).any(axis=-1))


def test_verdicts_may_be_bool():
    # Counted in bool, a hundred completions would be one.
    verdicts = np.random.default_rng(0).random((3, 5)) < 0.5
    functions = {name: function for name, function in FUNCTIONS.items() if name != "whiten"}
    compute = jax.jit(lambda rewards: {name: function(rewards) for name, function in functions.items()})
    with jax.numpy_dtype_promotion("standard"):
        results, expected = compute(verdicts), compute(verdicts.astype(np.float32))
    for name in functions:
        assert_allclose(results[name], expected[name], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("scale", [1e-12, 1e20, 1e37])
def test_standardising_does_not_overflow(scale):
    for function in (F.group_advantages, F.batch_std_advantages, F.whiten):
        standardised = jax.jit(partial(function, eps=0.0))(np.float32([[3, 0, 0, 0]]) * np.float32(scale))
        assert_allclose(standardised, [[1.5, -0.5, -0.5, -0.5]], rtol=1e-5)


@pytest.mark.parametrize("group_size", [4, 7])
def test_rewards_that_cancel_teach_nothing(group_size):
    # r and 2 - 3r have opposite standardised values: what is left of their sum is rounding.
    r = np.random.default_rng(0).integers(0, 2, (8, group_size)).astype(np.float32)
    assert not np.any(jax.jit(F.gdpo_advantages)(np.stack([r, 2 - 3 * r])))


def test_rounding_does_not_separate_equal_returns():
    rewards = np.float32([[[0.1, 0.3, 0.5], [0.5, 0.1, 0.3]]])  # 0.90000004 and 0.9
    result = jax.jit(F.turn_advantages)(rewards)
    assert_array_equal(result[..., 0], 0)
    assert_allclose(result[..., 1], [[0.70711, -0.70711]], atol=1e-4)


def test_reinforce_pp_does_not_blow_up_rounding_noise():
    # All rewards equal, and penalties of the size of rounding: verl's 1/√(s² + 1e-8) gives thousandths.
    penalty = 1e-7 * np.random.default_rng(0).normal(size=WHERE.shape).astype(np.float32)
    result = F.reinforce_pp_advantages(jnp.full(3, 0.7), WHERE, token_penalty=penalty)
    assert np.abs(result).max() < 0.01


def test_types():
    # Four of eight: mean ranks 2.5 and 6.5, sample deviation 4 · √(8/28).
    for dtype in (jnp.uint8, bool):
        ranks = jax.jit(F.rank_advantages)(jnp.array([0, 1] * 4, dtype))
        assert_allclose(ranks, np.array([-1, 1] * 4) * 0.5 / np.sqrt(2 / 7), 1e-5)
    # bfloat16 has no 100.25 to be the mean of these: the lower would get 0.
    result = jax.jit(F.centered_advantages)(jnp.array([100, 100.5], jnp.bfloat16))
    assert result.dtype == jnp.bfloat16
    assert_array_equal(result.astype(jnp.float32), [-0.25, 0.25])
    # 60 000 + 60 000 tokens are more than float16 holds.
    result = jax.jit(F.opo_advantages)(np.float16([1, 0]), np.array([60_000, 60_000]))
    assert_array_equal(result, np.array([0.5, -0.5], np.float16))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_more_values_than_16_bits_can_count(dtype):
    whitened = F.whiten((np.arange(70_000) % 2).astype(dtype))
    assert whitened.dtype == dtype
    assert_allclose(np.asarray(whitened, np.float32), np.arange(70_000) % 2 * 2.0 - 1, rtol=1e-2)


def test_bfloat16_critics_are_summed_in_float32():
    # 1 + 300 · 2⁻⁸ in bfloat16 stays 1: half of its spacing there is 2⁻⁸.
    rewards, mask, gae = jnp.full(301, 2.0**-8).at[-1].set(1), jnp.ones(301, bool), jax.jit(F.generalized_advantages)
    for dtype in (jnp.bfloat16, jnp.float32):
        returns = gae(rewards.astype(dtype), jnp.zeros(301, jnp.bfloat16), mask, lam=1.0)
        assert returns.dtype == jnp.float32
        assert_allclose(returns[0], 1 + 300 / 256, rtol=1e-6)
    bootstrapped = gae(rewards, jnp.zeros(301), mask, lam=1.0, bootstrap=jnp.ones((), jnp.bfloat16))
    assert_allclose(bootstrapped[0], 2 + 300 / 256, rtol=1e-6)


@pytest.mark.parametrize("name", ["group_advantages", "centered_advantages", "rank_advantages", "gdpo_advantages"])
def test_numpy_rewards_give_no_warning(name, recwarn):
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]])
    np.testing.assert_array_equal(getattr(F, name)(rewards), getattr(F, name)(jnp.asarray(rewards)))
    assert [str(warning.message) for warning in recwarn] == []


def test_a_loss_of_numpy_arrays_gives_no_warning(recwarn):
    logprobs, mask = np.full((2, 4, 3), -1.0), np.ones((2, 4, 3), bool)
    advantages = F.group_advantages(np.array([[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]]))
    loss, _ = F.grpo_loss(logprobs, logprobs, advantages, mask)
    assert loss.dtype == jnp.asarray(logprobs).dtype
    assert [str(warning.message) for warning in recwarn] == []
