from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.test_util import check_grads
from numpy.testing import assert_allclose, assert_array_equal

from grpo_jax.functional import (
    cispo_surrogate,
    clipped_surrogate,
    gspo_log_ratio,
    per_token,
    sequence_log_ratio,
    token_log_ratio,
)

LOG_RATIOS = [token_log_ratio, sequence_log_ratio, gspo_log_ratio]
SURROGATES = [clipped_surrogate, cispo_surrogate]
every_log_ratio = pytest.mark.parametrize("log_ratio", LOG_RATIOS)
every_surrogate = pytest.mark.parametrize("surrogate", SURROGATES)
few = settings(max_examples=25, deadline=None, derandomize=True)

jitted = {function: jax.jit(function) for function in LOG_RATIOS + SURROGATES}

# Rows of 4, 2, 0 and 1 tokens; the last has its token in the middle.
MASK = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]], bool)


def random_logprobs():
    rng = np.random.default_rng(0)
    return (jnp.asarray(-rng.exponential(size=MASK.shape), jnp.float32) for _ in range(2))


# --- log-ratios ---

# log π = (−1, −2, −3), log π_old = (−1.5, −1, −3), the last token masked: d = (0.5, −1, ·).
BY_HAND = {token_log_ratio: [0.5, -1, 0], sequence_log_ratio: [-0.5, -0.5, 0], gspo_log_ratio: [-0.25, -0.25, 0]}


@every_log_ratio
def test_log_ratio_by_hand(log_ratio):
    result = log_ratio(jnp.array([-1.0, -2, -3]), jnp.array([-1.5, -1, -3]), jnp.array([True, True, False]))
    assert_allclose(result, BY_HAND[log_ratio])


def loop_log_ratio(log_ratio, logprobs, old_logprobs, mask):
    result = np.zeros(mask.shape)
    for i in range(len(mask)):
        differences = [float(logprobs[i, t]) - float(old_logprobs[i, t]) for t in range(len(mask[i])) if mask[i, t]]
        for t in range(len(mask[i])):
            if mask[i, t] and log_ratio is token_log_ratio:
                result[i, t] = logprobs[i, t] - old_logprobs[i, t]
            elif mask[i, t] and log_ratio is sequence_log_ratio:
                result[i, t] = sum(differences)
            elif mask[i, t]:
                result[i, t] = sum(differences) / len(differences)
    return result


finite_logprobs = hnp.arrays(np.float32, (3, 4), elements=st.floats(-16, 0, width=32))


@few
@given(finite_logprobs, finite_logprobs, hnp.arrays(np.bool_, (3, 4)))
def test_log_ratio_equals_a_plain_loop(logprobs, old_logprobs, mask):
    for log_ratio in LOG_RATIOS:
        expected = loop_log_ratio(log_ratio, logprobs, old_logprobs, mask)
        assert_allclose(jitted[log_ratio](logprobs, old_logprobs, mask), expected, rtol=1e-5, atol=1e-5)


@every_log_ratio
def test_log_ratio_of_any_leading_axes_jit_and_vmap_equals_eager(log_ratio):
    logprobs, old_logprobs = random_logprobs()
    expected = log_ratio(logprobs, old_logprobs, jnp.asarray(MASK))
    assert_allclose(jitted[log_ratio](logprobs, old_logprobs, MASK), expected, rtol=1e-5, atol=1e-6)
    by_row = jax.jit(jax.vmap(log_ratio))(logprobs, old_logprobs, MASK)
    assert_allclose(by_row, expected, rtol=1e-5, atol=1e-6)
    deep = (x.reshape(2, 2, 4) for x in (logprobs, old_logprobs, MASK))
    assert_allclose(jitted[log_ratio](*deep), expected.reshape(2, 2, 4), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("log_ratio", [token_log_ratio, sequence_log_ratio])
def test_gradient_of_log_ratio_equals_finite_differences(log_ratio):
    logprobs, old_logprobs = random_logprobs()
    function = jax.jit(lambda logprobs: log_ratio(logprobs, old_logprobs, MASK))
    check_grads(function, (logprobs,), order=1, modes=["rev"], eps=1e-2)


@every_log_ratio
def test_gradient_of_log_ratio_is_that_of_token_or_row(log_ratio):
    logprobs, old_logprobs = random_logprobs()
    weights = np.arange(1.0, 17, dtype=np.float32).reshape(4, 4)

    def weighted(logprobs, old_logprobs):
        return jnp.sum(weights * log_ratio(logprobs, old_logprobs, MASK))

    gradient, old_gradient = jax.jit(jax.grad(weighted, (0, 1)))(logprobs, old_logprobs)
    # Of a row's ratio each token gets what all its tokens ask for; GSPO has the token's gradient by design.
    of_row = (weights * MASK).sum(axis=1, keepdims=True)
    assert_allclose(gradient, MASK * (of_row if log_ratio is sequence_log_ratio else weights))
    assert_array_equal(old_gradient, np.zeros((4, 4)))


RUBBISH = [1e4, -1e4, np.inf, -np.inf, np.nan]


@every_log_ratio
def test_masked_slots_may_hold_anything(log_ratio):
    logprobs, old_logprobs = (np.asarray(x) for x in random_logprobs())

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def total(logprobs, old_logprobs):
        ratio = log_ratio(logprobs, old_logprobs, MASK)
        return jnp.sum(jnp.exp(ratio)), ratio

    (_, expected), expected_gradient = total(logprobs, old_logprobs)
    for rubbish in RUBBISH:
        dirty, old_dirty = (np.where(MASK, x, np.float32(rubbish)) for x in (logprobs, old_logprobs))
        for arguments in ((dirty, old_logprobs), (logprobs, old_dirty), (dirty, old_dirty)):
            (_, result), gradient = total(*arguments)
            assert_array_equal(result, expected)
            assert_array_equal(gradient, expected_gradient)


@every_log_ratio
def test_of_one_token_all_ratios_are_the_token_ratio(log_ratio):
    logprobs, old_logprobs = (x[:, :1] for x in random_logprobs())

    def of_one_token(log_ratio):
        def total(logprobs):
            return jnp.sum(jnp.exp(log_ratio(logprobs, old_logprobs, MASK[:, :1])))

        return jax.jit(jax.value_and_grad(total))(logprobs)

    for result, expected in zip(of_one_token(log_ratio), of_one_token(token_log_ratio), strict=True):
        assert_allclose(result, expected, rtol=1e-6)


# --- surrogates: numbers derived by hand ---


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        # A good response may gain no more than up to ρ = 1.2, a bad one lose no more than down to 0.8:
        (1.8, 1.0, -1.2, 0.0),  # −min(1.8, 1.2)
        (0.4, -1.0, 0.8, 0.0),  # −min(−0.4, −0.8)
        # The clip never acts against the advantage, so that a step too far is taken back. dρ/dd = ρ.
        (1.8, -1.0, 1.8, 1.8),  # −min(−1.8, −1.2)
        (0.4, 1.0, -0.4, -0.4),  # −min(0.4, 0.8)
        (1.1, 2.0, -2.2, -2.2),  # within the clip: −ρA
    ],
)
def test_clipped_surrogate_by_hand(ratio, advantage, loss, gradient):
    log_ratio, advantages = jnp.log(jnp.array([[ratio]])), jnp.array([advantage])
    assert_allclose(clipped_surrogate(log_ratio, advantages), [[loss]], rtol=1e-6)
    slope = jax.grad(lambda d: jnp.sum(clipped_surrogate(d, advantages)))(log_ratio)
    assert_allclose(slope, [[gradient]], rtol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (2.0, 1.5, -2 * 1.5 * np.log(2), -3.0),  # −ρ A d; the gradient is −ρ A
        (8.0, 1.0, -5 * np.log(8), -5.0),  # weight capped at 5, gradient kept
        (8.0, -1.0, 5 * np.log(8), 5.0),
        (0.01, -1.0, 0.01 * np.log(0.01), 0.01),  # no lower bound
        (1.0, 3.0, 0.0, -3.0),
    ],
)
def test_cispo_surrogate_by_hand(ratio, advantage, loss, gradient):
    log_ratio, advantages = jnp.log(jnp.array([[ratio]])), jnp.array([advantage])
    assert_allclose(cispo_surrogate(log_ratio, advantages), [[loss]], rtol=1e-5)
    slope = jax.grad(lambda d: jnp.sum(cispo_surrogate(d, advantages)))(log_ratio)
    assert_allclose(slope, [[gradient]], rtol=1e-5)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_each_clip_has_its_own_epsilon(advantage):
    # Ratios beyond both ends: 1 + 0.5 above, 1 − 0.1 below.
    log_ratio = jnp.log(jnp.array([[3.0, 0.2]]))
    clipped = clipped_surrogate(log_ratio, jnp.array([advantage]), epsilon_low=0.1, epsilon_high=0.5)
    assert_allclose(clipped, [[-1.5, -0.2]] if advantage > 0 else [[3.0, 0.9]], rtol=1e-6)
    capped = cispo_surrogate(log_ratio, jnp.array([advantage]), epsilon_low=0.1, epsilon_high=0.5)
    assert_allclose(capped, -advantage * np.array([[1.5, 0.9]]) * np.log([[3.0, 0.2]]), rtol=1e-5)


# --- surrogates: a plain loop ---


def loop_surrogate(surrogate, log_ratio, advantages, low, high):
    loss = np.zeros(log_ratio.shape)
    for i in range(log_ratio.shape[0]):
        for t in range(log_ratio.shape[1]):
            ratio, advantage = np.exp(float(log_ratio[i, t])), float(advantages[i])
            clipped = min(max(ratio, 1 - low), 1 + high)
            if surrogate is clipped_surrogate:
                loss[i, t] = -min(ratio * advantage, clipped * advantage)
            else:
                loss[i, t] = -clipped * advantage * float(log_ratio[i, t])
    return loss


@few
@given(
    hnp.arrays(np.float32, (3, 4), elements=st.floats(-4, 4, width=32)),
    hnp.arrays(np.float32, 3, elements=st.floats(-4, 4, width=32)),
    st.sampled_from([0.0, 0.2, 1.0]),
    st.sampled_from([0.0, 0.28, 4.0]),
)
def test_surrogate_equals_a_plain_loop(log_ratio, advantages, low, high):
    for surrogate in SURROGATES:
        expected = loop_surrogate(surrogate, log_ratio, advantages, low, high)
        result = jitted[surrogate](log_ratio, advantages, epsilon_low=low, epsilon_high=high)
        assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


# --- surrogates: transformations and gradients ---

# On both sides of both clips, and away from the kinks at log 0.8 = −0.22 and log 1.2 = 0.18.
LOG_RATIO = np.array([[-0.5, -0.1, 0.05, 0.4], [-0.4, -0.15, 0.1, 0.5]], np.float32)
ADVANTAGES = np.array([1.5, -0.7], np.float32)


@every_surrogate
def test_surrogate_under_jit_and_vmap_equals_eager(surrogate):
    expected = surrogate(jnp.asarray(LOG_RATIO), jnp.asarray(ADVANTAGES))
    assert_allclose(jitted[surrogate](LOG_RATIO, ADVANTAGES), expected, rtol=1e-6)
    assert_allclose(jax.jit(jax.vmap(surrogate))(LOG_RATIO, ADVANTAGES), expected, rtol=1e-6)


def test_gradient_of_clipped_surrogate_equals_finite_differences():
    check_grads(jitted[clipped_surrogate], (LOG_RATIO, ADVANTAGES), order=1, modes=["rev"], eps=1e-2)


def test_gradient_of_cispo_equals_finite_differences_at_a_constant_weight():
    weight = np.clip(np.exp(LOG_RATIO), 0, 5)
    frozen = jax.jit(lambda d: -weight * ADVANTAGES[:, None] * d)
    check_grads(frozen, (LOG_RATIO,), order=1, modes=["rev"], eps=1e-2)
    gradient = jax.jit(jax.grad(lambda d: jnp.sum(cispo_surrogate(d, ADVANTAGES))))(LOG_RATIO)
    assert_allclose(gradient, jax.grad(lambda d: jnp.sum(frozen(d)))(LOG_RATIO), rtol=1e-6)


@every_surrogate
@every_log_ratio
def test_on_policy_gradient_is_reinforce(surrogate, log_ratio):
    logprobs, _ = random_logprobs()
    advantages = np.array([1.5, -0.7, 3.0, 0.2], np.float32)
    # A row's ratio stands on each token: one number a row is their mean, and REINFORCE's is −A Σ log π.
    lengths = np.maximum(MASK.sum(axis=1, keepdims=True), 1)
    weights = np.asarray(MASK / lengths if log_ratio is sequence_log_ratio else MASK, np.float32)

    def policy_gradient(logprobs):
        ratio = log_ratio(logprobs, jax.lax.stop_gradient(logprobs), MASK)
        return jnp.sum(weights * surrogate(ratio, advantages))

    def reinforce(logprobs):
        return jnp.sum(jnp.where(MASK, -advantages[:, None] * logprobs, 0))

    expected = jax.jit(jax.grad(reinforce))(logprobs)
    assert_allclose(jax.jit(jax.grad(policy_gradient))(logprobs), expected, rtol=1e-5)


@every_surrogate
@every_log_ratio
def test_huge_ratios_of_sampled_tokens_stay_finite(surrogate, log_ratio):
    @jax.jit
    @jax.value_and_grad
    def total(logprobs):
        ratio = log_ratio(logprobs, jnp.zeros((2, 2)), jnp.ones((2, 2), bool))
        return jnp.sum(surrogate(ratio, jnp.array([1.0, -1.0])))

    for difference in (1e4, -1e4):
        value, gradient = total(np.full((2, 2), difference, np.float32))
        assert np.isfinite(value)
        assert np.all(np.isfinite(gradient))


@every_surrogate
def test_hyperparameters_may_be_traced(surrogate):
    low, high = jnp.array([0.1, 0.2, 0.3]), jnp.array([0.2, 0.28, 4.0])
    traced = jax.jit(jax.vmap(lambda low, high: surrogate(LOG_RATIO, ADVANTAGES, epsilon_low=low, epsilon_high=high)))
    for result, a, b in zip(traced(low, high), low, high, strict=True):
        expected = loop_surrogate(surrogate, LOG_RATIO, ADVANTAGES, float(a), float(b))
        assert_allclose(result, expected, rtol=1e-5)


@pytest.mark.parametrize("epsilon_high", [-0.5, -1])
def test_cispo_refuses_a_cap_below_one(epsilon_high):
    with pytest.raises(ValueError, match="epsilon_high"):
        cispo_surrogate(jnp.zeros((1, 2)), jnp.ones(1), epsilon_high=epsilon_high)


# --- advantages of rows and of tokens ---


@every_surrogate
def test_advantages_of_rows_or_of_tokens(surrogate):
    by_token = jnp.broadcast_to(ADVANTAGES[:, None], LOG_RATIO.shape)
    assert_array_equal(jitted[surrogate](LOG_RATIO, by_token), jitted[surrogate](LOG_RATIO, ADVANTAGES))
    # And credit may differ within a row.
    half = by_token.at[:, :2].set(0)
    assert_array_equal(jitted[surrogate](LOG_RATIO, half)[:, :2], np.zeros((2, 2)))
    assert_array_equal(jitted[surrogate](LOG_RATIO, half)[:, 2:], jitted[surrogate](LOG_RATIO, by_token)[:, 2:])


def test_per_token_adds_the_missing_axis_only():
    of_tokens = jnp.ones((2, 3, 4))
    assert per_token(jnp.ones((2, 3)), of_tokens).shape == (2, 3, 1)
    assert per_token(of_tokens, of_tokens).shape == (2, 3, 4)
    assert per_token(jnp.ones(()), jnp.ones(4)).shape == (1,)
