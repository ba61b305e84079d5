"""Returns, whitening and rewards: numbers derived by hand, 16 bits, and what is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from numpy.testing import assert_allclose, assert_array_equal

from grpo_jax import functional as F

# Rows of 6, 4, 0 and 3 tokens; the second and the last with gaps.
MASK = np.array([[1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0], [0, 1, 1, 0, 1, 0]], bool)
NAN = np.float32(np.nan)
gae = jax.jit(F.generalized_advantages, static_argnames="num_steps")


def test_rewards_at_end_by_hand():
    expected = [[0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 2], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 4, 0]]
    rewards = jnp.array([1, 2, jnp.nan, 4])  # of the completion without tokens it does not matter
    assert_array_equal(F.rewards_at_end(rewards, jnp.asarray(MASK)), expected)


# --- generalized advantages ---

# r = (0, 0, 1), V = (½, ¼, ½), γ = λ = ½.
# δ = (0 + ½·¼ − ½, 0 + ½·½ − ¼, 1 − ½) = (−3/8, 0, ½).
# A = (−3/8 + ¼·1/8, 0 + ¼·½, ½) = (−11/32, 1/8, ½).
# With V = 2 after the end: δ₂ = 1 + ½·2 − ½ = 3/2; A = (−3/8 + ¼·3/8, ¼·3/2, 3/2) = (−9/32, 3/8, 3/2).
# With K = 2: A₀ = δ₀ + ¼ δ₁ = −3/8.
BY_HAND = [
    ({}, [-11 / 32, 1 / 8, 1 / 2]),
    ({"bootstrap": jnp.array(2.0)}, [-9 / 32, 3 / 8, 3 / 2]),
    ({"num_steps": 2}, [-3 / 8, 1 / 8, 1 / 2]),
    ({"num_steps": 1}, [-3 / 8, 0, 1 / 2]),
    ({"num_steps": 20}, [-11 / 32, 1 / 8, 1 / 2]),
    ({"lam": 1.0}, [-3 / 8 + 1 / 8, 1 / 4, 1 / 2]),  # ½ now
    ({"gamma": 1.0, "lam": 0.0}, [-1 / 4, 1 / 4, 1 / 2]),  # δ, undiscounted
]


@pytest.mark.parametrize(("options", "expected"), BY_HAND)
def test_generalized_advantages_by_hand(options, expected):
    rewards, values = jnp.array([0.0, 0.0, 1.0]), jnp.array([0.5, 0.25, 0.5])
    options = {"gamma": 0.5, "lam": 0.5} | options
    assert_array_equal(gae(rewards, values, jnp.ones(3, bool), **options), np.array(expected, np.float32))
    # Masked tokens are stepped over: three tokens among five slots of rubbish are three tokens.
    mask = np.array([False, True, True, False, True])
    rewards, values = (np.insert(np.asarray(x), (0, 2), NAN) for x in (rewards, values))
    assert_array_equal(gae(rewards, values, mask, **options)[mask], np.array(expected, np.float32))


def test_generalized_advantages_by_default():
    # γ = 1 and λ = 0.95 without a critic: what is to come, discounted by λ.
    advantages = F.generalized_advantages(jnp.array([0.0, 0.0, 1.0]), jnp.zeros(3), jnp.ones(3, bool))
    assert_allclose(advantages, [0.95**2, 0.95, 1], rtol=1e-6)


def test_of_lambda_1_it_is_the_discounted_return_against_the_critic():
    # Σ γˡ δₜ₊ₗ telescopes to Σ γˡ rₜ₊ₗ + γⁿ V(end) − Vₜ.
    rewards, values = np.random.default_rng(0).normal(size=(2, 6)).astype(np.float32)
    discounts = 0.9 ** np.arange(7)
    expected = [rewards[t:] @ discounts[: 6 - t] + discounts[6 - t] * 2 - values[t] for t in range(6)]
    advantages = gae(rewards, values, np.ones(6, bool), gamma=0.9, lam=1.0, bootstrap=np.float32(2))
    assert_allclose(advantages, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_steps", [0, -1])
def test_less_than_a_step_is_refused(num_steps):
    with pytest.raises(ValueError, match=f"num_steps is {num_steps}"):
        F.generalized_advantages(jnp.ones(3), jnp.ones(3), jnp.ones(3, bool), num_steps=num_steps)


def test_a_critic_of_16_bits_is_summed_in_32():
    # 1 + 300 · 2⁻⁸ in bfloat16 stays 1: half of its spacing there is 2⁻⁸.
    rewards = jnp.full(301, 2.0**-8).at[-1].set(1)
    for dtype in (jnp.bfloat16, jnp.float32):
        returns = gae(rewards.astype(dtype), jnp.zeros(301, jnp.bfloat16), jnp.ones(301, bool), lam=1.0)
        assert returns.dtype == jnp.float32
        assert_allclose(returns[0], 1 + 300 / 256, rtol=1e-6)
    bootstrap = jnp.ones((), jnp.bfloat16)
    bootstrapped = gae(rewards, jnp.zeros(301), jnp.ones(301, bool), lam=1.0, bootstrap=bootstrap)
    assert_allclose(bootstrapped[0], 2 + 300 / 256, rtol=1e-6)


def test_k_steps_under_shard_map():
    rewards, values = np.random.default_rng(1).normal(size=(2, 8, 5)).astype(np.float32)
    mask = np.arange(5) < np.arange(8)[:, None] % 5 + 1
    k_steps = partial(F.generalized_advantages, lam=0.9, num_steps=3)
    mesh, spec = Mesh(np.array(jax.devices()), ("i",)), PartitionSpec("i")
    spread = jax.jit(jax.shard_map(k_steps, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec))
    assert_allclose(spread(rewards, values, mask), jax.jit(k_steps)(rewards, values, mask), rtol=1e-5, atol=1e-6)


# --- whitening ---


def test_whiten_by_hand():
    # 1, 2, 3 of mean 2: sample deviation 1, population deviation √(2/3).
    values, mask = jnp.array([[1.0, 2.0], [3.0, 99.0]]), jnp.array([[True, True], [True, False]])
    assert_allclose(F.whiten(values, mask), np.array([[-1, 0], [1, 0]]) / (1 + 1e-4), rtol=1e-6)
    assert_allclose(F.whiten(values, mask, eps=0.0), [[-1, 0], [1, 0]], rtol=1e-6)
    assert_allclose(F.whiten(values, mask, eps=1.0), [[-0.5, 0], [0.5, 0]], rtol=1e-6)
    assert_allclose(F.whiten(values, mask, ddof=0, eps=0.0), [[-(1.5**0.5), 0], [1.5**0.5, 0]], rtol=1e-6)
    # Without a mask the 99 counts: mean 26.25, deviations (−25.25, −24.25, −23.25, 72.75), s = 48.507.
    assert_allclose(F.whiten(values), np.array([[-25.25, -24.25], [-23.25, 72.75]]) / 48.507, rtol=1e-4)


@pytest.mark.parametrize("value", [0.7, 0.1, 1 / 3, -2.3, 0.0, 0.5])
def test_equal_values_give_exactly_zero(value):
    # The variance is rounding noise of 0.7, and exactly 0 of 0.5.
    values = np.where(MASK, np.float32(value), np.float32(5))
    for function in (F.whiten, jax.jit(F.whiten), jax.grad(lambda values, mask: jnp.sum(F.whiten(values, mask)))):
        assert_array_equal(function(jnp.asarray(values), jnp.asarray(MASK)), np.zeros(MASK.shape))


@pytest.mark.parametrize("num_tokens", [0, 1])
@pytest.mark.parametrize("ddof", [0, 1])
def test_none_or_one_gives_zero_and_a_nan_stays_visible(num_tokens, ddof):
    values, mask = np.full((2, 3), NAN), np.zeros((2, 3), bool)
    values[1, 1], mask[1, 1] = 5, num_tokens == 1
    assert_array_equal(F.whiten(values, mask, ddof=ddof), np.zeros((2, 3)))
    mask[0] = True
    assert_array_equal(np.isnan(F.whiten(values, mask, ddof=ddof)), mask)


@pytest.mark.parametrize("scale", [1e-12, 1e20, 1e37])
def test_whitening_does_not_overflow(scale):
    whitened = F.whiten(np.array([3.0, 0, 0, 0], np.float32) * np.float32(scale), eps=0.0)
    assert_allclose(whitened, [1.5, -0.5, -0.5, -0.5], rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_more_values_than_16_bits_can_count(dtype):
    whitened = F.whiten((np.arange(70_000) % 2).astype(dtype))
    assert whitened.dtype == dtype
    assert_allclose(np.asarray(whitened, np.float32), np.arange(70_000) % 2 * 2.0 - 1, rtol=1e-2)


# --- REINFORCE++ ---


def test_rounding_noise_is_not_blown_up():
    # All rewards equal, and penalties of the size of rounding: verl's 1/√(s² + 1e-8) gives thousandths.
    penalty = 1e-7 * np.random.default_rng(0).normal(size=MASK.shape).astype(np.float32)
    advantages = F.reinforce_pp_advantages(jnp.full(MASK.shape[:-1], 0.7), MASK, token_penalty=penalty)
    assert np.abs(advantages).max() < 0.01


def test_reinforce_pp_by_hand():
    # r = 1, penalties (1, 0, 0): r̂ = (−1, 0, 1). γ = 1: R = (0, 1, 1), mean 2/3, s = √(6/9/2) = 0.57735.
    rewards, mask, penalty = jnp.array([1.0]), jnp.ones((1, 3), bool), jnp.array([[1.0, 0, 0]])
    options = {"token_penalty": penalty, "eps": 0.0}
    assert_allclose(F.reinforce_pp_advantages(rewards, mask, **options), [[-1.1547, 0.57735, 0.57735]], rtol=1e-4)
    # γ = ½: R = (−1 + ¼, ½, 1), mean ¼, deviations (−1, ¼, ¾), s = √(1.625/2) = 0.90139.
    advantages = F.reinforce_pp_advantages(rewards, mask, gamma=0.5, **options)
    assert_allclose(advantages, [[-1.10940, 0.27735, 0.83205]], rtol=1e-4)
    # Without penalty and discount every token has its completion's reward.
    rewards = jnp.array([1, -2, 9, 0.5])
    expected = F.whiten(jnp.broadcast_to(rewards[:, None], MASK.shape), jnp.asarray(MASK))
    assert_allclose(F.reinforce_pp_advantages(rewards, jnp.asarray(MASK)), expected, rtol=1e-5, atol=1e-6)


def test_reinforce_pp_with_baseline_by_hand():
    # Rewards 3 and 1 against 2, on two tokens and one: (1, 1, −1), mean 1/3, s = √(24/9/2) = 1.1547.
    rewards, mask = jnp.array([[3.0, 1.0]]), jnp.array([[[True, True], [True, False]]])
    advantages = F.reinforce_pp_baseline_advantages(rewards, mask)
    assert_allclose(advantages, [[[0.57735, 0.57735], [-1.1547, 0]]], rtol=1e-4)
    # ε = 1.1547 halves them.
    advantages = F.reinforce_pp_baseline_advantages(rewards, mask, eps=1.154701)
    assert_allclose(advantages, [[[0.288675, 0.288675], [-0.57735, 0]]], rtol=1e-4)


# --- the penalty of long completions ---


@pytest.mark.parametrize(
    ("max_length", "buffer", "lengths", "penalties"),
    [
        # Nothing up to 80, then −1/20 a token, −1 from 100 on.
        (100, 20, [0, 79, 80, 81, 85, 90, 99, 100, 5000], [0, 0, 0, -0.05, -0.25, -0.5, -0.95, -1, -1]),
        (4, 4, [0, 1, 2, 3, 4, 5], [0, -0.25, -0.5, -0.75, -1, -1]),
        (4, 1, [0, 1, 2, 3, 4, 5], [0, 0, 0, 0, -1, -1]),
        # DAPO's 20480 and 4096: half of the buffer is at 16384 + 2048.
        (20480, 4096, [16384, 18432, 20480], [0, -0.5, -1]),
    ],
)
def test_overlong_penalty_by_hand(max_length, buffer, lengths, penalties):
    penalty = F.overlong_penalty(jnp.array(lengths), max_length=max_length, buffer=buffer)
    assert penalty.dtype == jnp.float32
    assert_allclose(penalty, penalties, rtol=1e-6)


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_overlong_penalty_refuses_a_buffer_outside_of_the_length(buffer):
    with pytest.raises(ValueError, match=f"buffer is {buffer}.*max_length"):
        F.overlong_penalty(jnp.array([1]), max_length=100, buffer=buffer)
