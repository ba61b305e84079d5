from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import Mesh, PartitionSpec
from jax.test_util import check_grads
from numpy.testing import assert_allclose, assert_array_equal

from grpo_jax.functional import (
    centered_advantages,
    generalized_advantages,
    kl_penalized_rewards,
    overlong_penalty,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    rewards_at_end,
    whiten,
)

few = settings(max_examples=25, deadline=None, derandomize=True)
quarters = st.integers(-8, 8).map(lambda n: n / 4)
NAN = np.float32(np.nan)

# Rows of 6, 4, 0 and 3 tokens; the second and the last with gaps.
MASK = np.array([[1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0], [0, 1, 1, 0, 1, 0]], bool)
masks = hnp.arrays(np.bool_, MASK.shape)
numbers = hnp.arrays(np.float32, MASK.shape, elements=quarters)
of_rows = hnp.arrays(np.float32, len(MASK), elements=quarters)
discounts = st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0])

jitted_gae = jax.jit(generalized_advantages, static_argnames="num_steps")
jitted_end = jax.jit(rewards_at_end)
jitted_whiten = jax.jit(whiten, static_argnames="ddof")
jitted_reinforce = jax.jit(reinforce_pp_advantages)
jitted_baseline = jax.jit(reinforce_pp_baseline_advantages)


def random_tokens(seed=0):
    """Rewards and values of tokens, and a bootstrap value of each completion."""
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in (MASK.shape, MASK.shape, len(MASK)))


# --- the reward on the last token ---


def test_rewards_at_end_by_hand():
    expected = [[0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 2], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 4, 0]]
    rewards = jnp.array([1, 2, jnp.nan, 4])  # of the completion without tokens it does not matter
    assert_array_equal(rewards_at_end(rewards, jnp.asarray(MASK)), expected)
    assert_array_equal(jax.vmap(rewards_at_end)(rewards, jnp.asarray(MASK)), expected)


@few
@given(of_rows, masks)
def test_rewards_at_end_equal_a_plain_loop(rewards, mask):
    expected = np.zeros(mask.shape)
    for i, row in enumerate(mask):
        places = [t for t in range(len(row)) if row[t]]
        if places:
            expected[i, places[-1]] = rewards[i]
    assert_array_equal(jitted_end(rewards, mask), expected)


def test_the_gradient_of_a_reward_is_that_of_the_last_token():
    gradient = jax.grad(lambda r: jnp.sum(rewards_at_end(r, jnp.asarray(MASK)) * jnp.arange(6.0)[None]))(jnp.ones(4))
    assert_array_equal(gradient, [5, 5, 0, 4])


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
    ({"lam": 1.0}, [-3 / 8 + 1 / 8, 1 / 4, 1 / 2]),  # ½ now
    ({"gamma": 1.0, "lam": 0.0}, [-1 / 4, 1 / 4, 1 / 2]),  # δ, undiscounted
]


@pytest.mark.parametrize(("options", "expected"), BY_HAND)
def test_generalized_advantages_by_hand(options, expected):
    rewards, values = jnp.array([0.0, 0.0, 1.0]), jnp.array([0.5, 0.25, 0.5])
    options = {"gamma": 0.5, "lam": 0.5} | options
    assert_array_equal(jitted_gae(rewards, values, jnp.ones(3, bool), **options), np.array(expected, np.float32))


def loop_gae(rewards, values, mask, gamma, lam, bootstrap, num_steps=None):
    """The sum as it is written, over the tokens that there are."""
    advantages = np.zeros(mask.shape)
    for i, row in enumerate(mask):
        places = [t for t in range(len(row)) if row[t]]
        following = [float(values[i, t]) for t in places[1:]] + [float(bootstrap[i])] * bool(places)
        deltas = [rewards[i, t] + gamma * v - values[i, t] for t, v in zip(places, following, strict=True)]
        for n, t in enumerate(places):
            window = deltas[n:] if num_steps is None else deltas[n : n + num_steps]
            advantages[i, t] = sum((gamma * lam) ** k * delta for k, delta in enumerate(window))
    return advantages


@pytest.mark.parametrize("num_steps", [None, 3])
@few
@given(numbers, numbers, of_rows, masks, discounts, discounts)
def test_generalized_advantages_equal_a_plain_loop(num_steps, rewards, values, bootstrap, mask, gamma, lam):
    advantages = jitted_gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap=bootstrap, num_steps=num_steps)
    expected = loop_gae(rewards, values, mask, gamma, lam, bootstrap, num_steps)
    assert_allclose(advantages, expected, rtol=1e-5, atol=1e-5)


def test_generalized_advantages_by_default():
    rewards, values, _ = random_tokens()
    expected = loop_gae(rewards, values, MASK, 1.0, 0.95, np.zeros(4))
    assert_allclose(generalized_advantages(*map(jnp.asarray, (rewards, values, MASK))), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_generalized_advantages_under_jit_equal_eager():
    rewards, values, bootstrap = map(jnp.asarray, random_tokens())
    for num_steps in (None, 3):
        options = {"gamma": 0.9, "lam": 0.8, "num_steps": num_steps}
        compiled = jitted_gae(rewards, values, MASK, bootstrap=bootstrap, **options)
        eager = generalized_advantages(rewards, values, jnp.asarray(MASK), bootstrap=bootstrap, **options)
        assert_allclose(eager, compiled, rtol=1e-5, atol=1e-6)


def test_completions_are_independent():
    rewards, values, bootstrap = random_tokens()
    expected = jitted_gae(rewards, values, MASK, bootstrap=bootstrap)
    mapped = jax.jit(jax.vmap(lambda r, v, m, b: generalized_advantages(r, v, m, bootstrap=b)))
    assert_allclose(mapped(rewards, values, MASK, bootstrap), expected, rtol=1e-5, atol=1e-6)
    deep = jitted_gae(*(x.reshape(2, 2, 6) for x in (rewards, values, MASK)), bootstrap=bootstrap.reshape(2, 2))
    assert_allclose(deep.reshape(4, 6), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_steps", [None, 2])
def test_masked_tokens_are_stepped_over(num_steps):
    # Four tokens among six slots of rubbish are four tokens.
    rewards, values, bootstrap = (x[1] for x in random_tokens())
    mask = MASK[1]
    options = {"gamma": 0.9, "lam": 0.8, "bootstrap": bootstrap, "num_steps": num_steps}
    among = jitted_gae(np.where(mask, rewards, NAN), np.where(mask, values, NAN), mask, **options)
    removed = jitted_gae(rewards[mask], values[mask], np.ones(4, bool), **options)
    assert_array_equal(np.asarray(among)[mask], removed)
    assert_array_equal(np.asarray(among)[~mask], np.zeros(2))


@pytest.mark.parametrize("left", [0, 2, 5])
def test_padding_on_either_side_changes_nothing(left):
    rewards, values, bootstrap = random_tokens()
    expected = jitted_gae(rewards, values, MASK, gamma=0.9, lam=0.8, bootstrap=bootstrap)
    widths = ((0, 0), (left, 5 - left))
    rewards, values = (np.pad(x, widths, constant_values=7) for x in (rewards, values))
    padded = jitted_gae(rewards, values, np.pad(MASK, widths), gamma=0.9, lam=0.8, bootstrap=bootstrap)
    assert_array_equal(padded, np.pad(expected, widths))


def test_of_lambda_1_it_is_the_discounted_return_against_the_critic():
    # Σ γˡ δₜ₊ₗ telescopes to Σ γˡ rₜ₊ₗ + γⁿ V(end) − Vₜ.
    rewards, values, bootstrap = random_tokens()
    full = np.ones_like(MASK)
    expected = np.zeros(MASK.shape)
    for t in range(6):
        discount = 0.9 ** np.arange(6 - t)
        expected[:, t] = rewards[:, t:] @ discount + 0.9 ** (6 - t) * bootstrap - values[:, t]
    advantages = jitted_gae(rewards, values, full, gamma=0.9, lam=1.0, bootstrap=bootstrap)
    assert_allclose(advantages, expected, rtol=1e-4, atol=1e-5)


def test_without_critic_and_discount_it_is_what_is_still_to_come():
    rewards = random_tokens()[0]
    advantages = jitted_gae(rewards, np.zeros_like(rewards), MASK, gamma=1.0, lam=1.0)
    to_come = np.cumsum((rewards * MASK)[:, ::-1], axis=1)[:, ::-1]
    assert_allclose(advantages, to_come * MASK, rtol=1e-5, atol=1e-6)


def test_of_lambda_0_it_is_one_step():
    rewards, values, bootstrap = random_tokens()
    of_lambda_0, of_one_step = (
        jitted_gae(rewards, values, MASK, gamma=0.9, bootstrap=bootstrap, **options)
        for options in ({"lam": 0.0}, {"lam": 0.7, "num_steps": 1})
    )
    assert_allclose(of_one_step, of_lambda_0, rtol=1e-6)
    expected = rewards[0] + 0.9 * np.append(values[0, 1:], bootstrap[0]) - values[0]
    assert_allclose(of_lambda_0[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_steps", [6, 20])
def test_as_many_steps_as_tokens_are_all_steps(num_steps):
    rewards, values, bootstrap = random_tokens()
    options = {"gamma": 0.9, "lam": 0.8, "bootstrap": bootstrap}
    expected = jitted_gae(rewards, values, MASK, **options)
    assert_allclose(jitted_gae(rewards, values, MASK, num_steps=num_steps, **options), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_steps", [0, -1])
def test_less_than_a_step_is_refused(num_steps):
    with pytest.raises(ValueError, match=f"num_steps is {num_steps}"):
        generalized_advantages(jnp.ones(3), jnp.ones(3), jnp.ones(3, bool), num_steps=num_steps)


@pytest.mark.parametrize("num_steps", [None, 3])
def test_gradients_of_generalized_advantages_equal_finite_differences(num_steps):
    def advantages(rewards, values, bootstrap, gamma, lam):
        return generalized_advantages(
            rewards, values, MASK, gamma=gamma, lam=lam, bootstrap=bootstrap, num_steps=num_steps
        )

    constants = np.float32(0.9), np.float32(0.8)
    check_grads(jax.jit(advantages), (*random_tokens(), *constants), order=1, modes=["rev"], eps=1e-2, rtol=1e-2)


@pytest.mark.parametrize("num_steps", [None, 3])
def test_rubbish_in_masked_slots_spoils_no_gradient(num_steps):
    rewards, values, bootstrap = random_tokens()

    @jax.jit
    def gradients(rewards, values, gamma):
        def weighted(rewards, values, gamma):
            advantages = generalized_advantages(
                rewards, values, MASK, gamma=gamma, bootstrap=bootstrap, num_steps=num_steps
            )
            return jnp.sum(advantages * jnp.arange(24.0).reshape(4, 6))

        return jax.grad(weighted, (0, 1, 2))(rewards, values, gamma)

    gamma = np.float32(0.9)
    expected = gradients(rewards, values, gamma)
    for rubbish in (np.nan, np.inf):
        actual = gradients(*(np.where(MASK, x, np.float32(rubbish)) for x in (rewards, values)), gamma)
        for gradient, unspoilt in zip(actual, expected, strict=True):
            assert_array_equal(gradient, unspoilt)
    for gradient in expected[:2]:
        assert_array_equal(np.asarray(gradient)[~MASK], 0)


def test_a_critic_of_16_bits_is_summed_in_32():
    # 1 + 300 · 2⁻⁸ in bfloat16 stays 1: half of its spacing there is 2⁻⁸.
    rewards = jnp.full(301, 2.0**-8).at[-1].set(1)
    ones = jnp.ones(301, bool)
    for dtype in (jnp.bfloat16, jnp.float32):
        returns = jitted_gae(rewards.astype(dtype), jnp.zeros(301, jnp.bfloat16), ones, lam=1.0)
        assert returns.dtype == jnp.float32
        assert_allclose(returns[0], 1 + 300 / 256, rtol=1e-6)
    bootstrapped = jitted_gae(rewards, jnp.zeros(301), ones, lam=1.0, bootstrap=jnp.ones((), jnp.bfloat16))
    assert_allclose(bootstrapped[0], 2 + 300 / 256, rtol=1e-6)


# --- whitening ---


def test_whiten_by_hand():
    # 1, 2, 3 of mean 2: sample deviation 1, population deviation √(2/3).
    values, mask = jnp.array([[1.0, 2.0], [3.0, 99.0]]), jnp.array([[True, True], [True, False]])
    assert_allclose(whiten(values, mask), np.array([[-1, 0], [1, 0]]) / (1 + 1e-4), rtol=1e-6)
    assert_allclose(whiten(values, mask, eps=0.0), [[-1, 0], [1, 0]], rtol=1e-6)
    assert_allclose(whiten(values, mask, eps=1.0), [[-0.5, 0], [0.5, 0]], rtol=1e-6)
    assert_allclose(whiten(values, mask, ddof=0, eps=0.0), [[-(1.5**0.5), 0], [1.5**0.5, 0]], rtol=1e-6)
    # Without a mask the 99 counts: mean 26.25, deviations (−25.25, −24.25, −23.25, 72.75), s = 48.507.
    assert_allclose(whiten(values), np.array([[-25.25, -24.25], [-23.25, 72.75]]) / 48.507, rtol=1e-4)


def loop_whiten(values, mask, eps=1e-4):
    kept = [float(v) for v, m in zip(values.ravel(), mask.ravel(), strict=True) if m]
    if not kept or max(kept) - min(kept) < 1e-9:
        return np.zeros(values.shape)
    mean = sum(kept) / len(kept)
    deviation = (sum((v - mean) ** 2 for v in kept) / (len(kept) - 1)) ** 0.5
    return np.where(mask, (values - mean) / (deviation + eps), 0)


@few
@given(numbers, masks)
def test_whiten_equals_a_plain_loop(values, mask):
    expected = loop_whiten(values, mask)
    assert_allclose(jitted_whiten(values, mask), expected, rtol=1e-4, atol=1e-5)
    assert_allclose(jitted_whiten(np.where(mask, values, NAN), mask), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_whiten_under_jit_equals_eager():
    values = random_tokens()[0]
    expected = whiten(jnp.asarray(values), jnp.asarray(MASK))
    assert_allclose(jitted_whiten(values, MASK), expected, rtol=1e-5, atol=1e-6)
    several = jnp.stack(
        [values, 3 * values]
    )  # under vmap each batch has its own moments; without ε the scale drops out
    mapped = jax.jit(jax.vmap(partial(whiten, eps=0.0), (0, None)))(several, jnp.asarray(MASK))
    expected = whiten(jnp.asarray(values), jnp.asarray(MASK), eps=0.0)
    assert_allclose(mapped, jnp.stack([expected, expected]), rtol=1e-5, atol=1e-6)


def test_padding_leaves_the_moments_alone():
    values = random_tokens()[0]
    padded = jitted_whiten(np.pad(values, ((0, 2), (3, 0)), constant_values=7), np.pad(MASK, ((0, 2), (3, 0))))
    assert_allclose(padded[:4, 3:], jitted_whiten(values, MASK), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [0.7, 0.1, 1 / 3, -2.3, 0.0])
def test_equal_values_give_exactly_zero(value):
    values = np.where(MASK, np.float32(value), np.float32(5))
    assert_array_equal(jitted_whiten(values, MASK), np.zeros(MASK.shape))
    assert_array_equal(whiten(jnp.asarray(values), jnp.asarray(MASK)), np.zeros(MASK.shape))


@pytest.mark.parametrize("num_tokens", [0, 1])
@pytest.mark.parametrize("ddof", [0, 1])
def test_none_or_one_gives_zero(num_tokens, ddof):
    values, mask = np.full((2, 3), NAN), np.zeros((2, 3), bool)
    values[1, 1], mask[1, 1] = 5, num_tokens == 1
    assert_array_equal(jitted_whiten(values, mask, ddof=ddof), np.zeros((2, 3)))


def test_nan_in_what_counts_stays_visible():
    values = random_tokens()[0].copy()
    values[0, 0] = np.nan
    whitened = np.asarray(jitted_whiten(values, MASK))
    assert np.all(np.isnan(whitened[MASK]))
    assert_array_equal(whitened[~MASK], 0)


@pytest.mark.parametrize("scale", [1e-12, 1e20, 1e37])
def test_whitening_does_not_overflow(scale):
    whitened = jitted_whiten(np.array([3.0, 0, 0, 0], np.float32) * np.float32(scale), eps=0.0)
    assert_allclose(whitened, [1.5, -0.5, -0.5, -0.5], rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_more_values_than_16_bits_can_count(dtype):
    values = (np.arange(70_000) % 2).astype(dtype)
    whitened = jitted_whiten(values)
    assert whitened.dtype == dtype
    assert_allclose(np.asarray(whitened, np.float32), np.arange(70_000) % 2 * 2.0 - 1, rtol=1e-2)


def test_gradients_of_whitening_equal_finite_differences():
    check_grads(jax.jit(lambda values: whiten(values, MASK)), random_tokens()[:1], order=1, modes=["rev"], eps=1e-2)


def test_gradients_of_whitening_are_finite():
    gradient = jax.jit(jax.grad(lambda values: jnp.sum(whiten(values, MASK) * jnp.arange(24.0).reshape(4, 6))))
    values = random_tokens()[0]
    expected = gradient(values)
    assert_allclose(gradient(np.where(MASK, values, NAN)), expected, rtol=1e-5, atol=1e-6)
    assert_array_equal(np.asarray(expected)[~MASK], 0)
    # No spread: the variance is rounding noise of the one, and exactly 0 of the other.
    for value in (0.7, 0.5):
        assert_array_equal(gradient(np.full(MASK.shape, value, np.float32)), np.zeros(MASK.shape))


# --- REINFORCE++ ---


def test_rounding_noise_is_not_blown_up():
    # All rewards equal, and penalties of the size of rounding: verl's 1/√(s² + 1e-8) gives thousandths.
    penalty = 1e-7 * np.random.default_rng(0).normal(size=MASK.shape).astype(np.float32)
    advantages = reinforce_pp_advantages(jnp.full(MASK.shape[:-1], 0.7), MASK, token_penalty=penalty)
    assert np.abs(advantages).max() < 0.01


def test_k_steps_under_shard_map():
    mesh = Mesh(np.array(jax.devices()), ("i",))
    rewards, values = np.random.default_rng(1).normal(size=(2, 8, 5)).astype(np.float32)
    mask = np.arange(5) < np.arange(8)[:, None] % 5 + 1
    k_steps = partial(generalized_advantages, lam=0.9, num_steps=3)
    spec = PartitionSpec("i")
    spread = jax.jit(jax.shard_map(k_steps, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec))
    assert_allclose(spread(rewards, values, mask), jax.jit(k_steps)(rewards, values, mask), rtol=1e-5, atol=1e-6)


def test_reinforce_pp_by_hand():
    # r = 1, penalties (1, 0, 0): r̂ = (−1, 0, 1). γ = 1: R = (0, 1, 1), mean 2/3, s = √(6/9/2) = 0.57735.
    rewards, mask, penalty = jnp.array([1.0]), jnp.ones((1, 3), bool), jnp.array([[1.0, 0, 0]])
    options = {"token_penalty": penalty, "eps": 0.0}
    assert_allclose(reinforce_pp_advantages(rewards, mask, **options), [[-1.1547, 0.57735, 0.57735]], rtol=1e-4)
    # γ = ½: R = (−1 + ¼, ½, 1), mean ¼, deviations (−1, ¼, ¾), s = √(1.625/2) = 0.90139.
    advantages = reinforce_pp_advantages(rewards, mask, gamma=0.5, **options)
    assert_allclose(advantages, [[-1.10940, 0.27735, 0.83205]], rtol=1e-4)


def test_reinforce_pp_with_baseline_by_hand():
    # Rewards 3 and 1 against 2, on two tokens and one: (1, 1, −1), mean 1/3, s = √(24/9/2) = 1.1547.
    mask = jnp.array([[[True, True], [True, False]]])
    advantages = reinforce_pp_baseline_advantages(jnp.array([[3.0, 1.0]]), mask)
    assert_allclose(advantages, [[[0.57735, 0.57735], [-1.1547, 0]]], rtol=1e-4)
    # ε = 1.1547 halves them.
    advantages = reinforce_pp_baseline_advantages(jnp.array([[3.0, 1.0]]), mask, eps=1.154701)
    assert_allclose(advantages, [[[0.288675, 0.288675], [-0.57735, 0]]], rtol=1e-4)


def loop_reinforce_pp(rewards, mask, penalty, gamma):
    returns = np.zeros(mask.shape)
    for i, row in enumerate(mask):
        to_come = 0.0
        places = [t for t in range(len(row)) if row[t]]
        for t in reversed(places):
            reward = float(rewards[i]) if t == places[-1] else 0.0
            to_come = reward - float(penalty[i, t]) + gamma * to_come
            returns[i, t] = to_come
    return loop_whiten(returns, mask)


@few
@given(of_rows, masks, numbers, st.sampled_from([0.5, 1.0]))
def test_reinforce_pp_equals_a_plain_loop(rewards, mask, penalty, gamma):
    # Powers of two: returns that are equal in the loop are equal in float32.
    expected = loop_reinforce_pp(rewards, mask, penalty, gamma)
    rubbish = np.where(mask, penalty, NAN)
    advantages = jitted_reinforce(rewards, mask, token_penalty=rubbish, gamma=gamma)
    assert_allclose(advantages, expected, rtol=1e-4, atol=1e-5)


def test_reinforce_pp_without_penalty_or_discount_gives_every_token_its_reward():
    rewards = np.array([1, -2, 9, 0.5], np.float32)
    expected = whiten(jnp.broadcast_to(rewards[:, None], MASK.shape), jnp.asarray(MASK))
    for function in (reinforce_pp_advantages, jitted_reinforce):
        assert_allclose(function(jnp.asarray(rewards), jnp.asarray(MASK)), expected, rtol=1e-5, atol=1e-6)
    larger_eps = jitted_reinforce(rewards, MASK, eps=100.0)
    expected = whiten(jnp.broadcast_to(rewards[:, None], MASK.shape), jnp.asarray(MASK), eps=100.0)
    assert_allclose(larger_eps, expected, rtol=1e-5, atol=1e-7)


@few
@given(hnp.arrays(np.float32, (2, 2), elements=quarters), hnp.arrays(np.bool_, (2, 2, 6)))
def test_reinforce_pp_with_baseline_equals_a_plain_loop(rewards, mask):
    centered = np.array([[r - sum(group) / 2 for r in group] for group in rewards.astype(float).tolist()])
    expected = loop_whiten(np.broadcast_to(centered[..., None], mask.shape), mask)
    assert_allclose(jitted_baseline(rewards, mask), expected, rtol=1e-4, atol=1e-5)


def test_reinforce_pp_with_baseline_of_equal_lengths_is_the_whitened_centred_reward():
    rewards = random_tokens()[0]  # four groups of six
    centered = np.asarray(jax.jit(centered_advantages)(rewards))
    expected = jitted_whiten(np.repeat(centered[..., None], 3, axis=-1))
    assert_allclose(jitted_baseline(rewards, np.ones((4, 6, 3), bool)), expected, rtol=1e-5, atol=1e-6)


def test_padding_changes_no_reinforce_pp():
    rewards, penalty, _ = random_tokens()
    expected = jitted_reinforce(rewards[:, 0], MASK, token_penalty=penalty, gamma=0.9)
    padded, mask = (np.pad(x, ((0, 0), (0, 3))) for x in (penalty, MASK))
    advantages = jitted_reinforce(rewards[:, 0], mask, token_penalty=padded, gamma=0.9)
    assert_allclose(advantages[:, :6], expected, rtol=1e-5, atol=1e-6)
    assert_array_equal(advantages[:, 6:], np.zeros((4, 3)))


# --- a batch spread over devices ---


def of_the_batch(rewards, penalty, mask, axis_name=None):
    return {
        "whiten": whiten(penalty, mask, axis_name=axis_name),
        "reinforce_pp": reinforce_pp_advantages(rewards, mask, token_penalty=penalty, gamma=0.9, axis_name=axis_name),
        "reinforce_pp_baseline": reinforce_pp_baseline_advantages(rewards, mask, axis_name=axis_name),
    }


def test_moments_are_global_when_the_batch_is_spread(spread):
    rng = np.random.default_rng(0)
    scale = np.arange(1, 9, dtype=np.float32)[:, None, None]  # statistics of a device would differ
    rewards = rng.normal(size=(8, 1, 4)).astype(np.float32) * scale
    penalty = rng.normal(size=(8, 1, 4, 3)).astype(np.float32) * scale[..., None]
    penalty[4], penalty[5] = 99, -99  # devices without spread, at the batch's either end
    mask = rng.random((8, 1, 4, 3)) < 0.7
    mask[2] = False  # and one with nothing to do
    expected = jax.jit(of_the_batch)(rewards, penalty, mask)
    spread_out = spread(partial(of_the_batch, axis_name="data"))(rewards, penalty, mask)
    for name, advantages in spread_out.items():
        assert_allclose(advantages, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


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
