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
    centered_advantages,
    group_advantages,
    group_ranks,
    leave_one_out_advantages,
    linear_rank_advantages,
    rank_advantages,
)

DIFFERENTIABLE = [group_advantages, centered_advantages, leave_one_out_advantages]
OF_RANKS = [rank_advantages, linear_rank_advantages]
ADVANTAGES = DIFFERENTIABLE + OF_RANKS

G = 8
few = settings(max_examples=25, deadline=None, derandomize=True)
# Quarters: sums, means and cubes of eight of them are exact in float32, and unequal rewards
# stay unequal under every map below.
quarters = st.integers(-32, 32).map(lambda n: n / 4)
groups = hnp.arrays(np.float32, G, elements=quarters)
scales = st.integers(1, 80).map(lambda n: np.float32(n / 8))
binary_groups = hnp.arrays(np.float32, G, elements=st.sampled_from([0.0, 1.0]))

jitted = {function: jax.jit(function) for function in [*ADVANTAGES, group_ranks]}


def random_rewards(shape=(5, 7)):
    """Rewards of few levels, so that groups have ties."""
    return np.random.default_rng(0).integers(0, 4, shape).astype(np.float32)


# --- numbers derived by hand ---

# r = (1, 2, 4, 1): μ = 2, r − μ = (−1, 0, 2, −1), Σ (r − μ)² = 6, s = √(6/3) = √2.
# Mean ranks: 4 is first, 2 second, the two 1s share places 3 and 4: rank̄ = (3.5, 2, 1, 3.5).
# −rank̄ about its mean −2.5: (−1, 0.5, 1.5, −1); squares sum to 4.5, s = √(4.5/3) = √1.5.
BY_HAND = {
    group_advantages: np.array([-1, 0, 2, -1]) / np.sqrt(2),
    centered_advantages: [-1, 0, 2, -1],
    leave_one_out_advantages: [-4 / 3, 0, 8 / 3, -4 / 3],  # G/(G − 1) = 4/3; first: 1 − (2 + 4 + 1)/3
    rank_advantages: np.array([-1, 0.5, 1.5, -1]) / np.sqrt(1.5),
    linear_rank_advantages: [-2 / 3, 1 / 3, 1, -2 / 3],  # 2 (4 − rank̄)/3 − 1
    group_ranks: [3, 2, 1, 3],  # nobody beats the 4; two beat each 1
}


@pytest.mark.parametrize("function", BY_HAND)
def test_by_hand(function):
    assert_allclose(function(jnp.array([1.0, 2.0, 4.0, 1.0])), BY_HAND[function], rtol=1e-5)


def test_four_of_eight_right():
    # μ = 1/2, s = √(8 · ¼ / 7) = 0.5345, A = 0.5/0.5345 = 0.935: printed as 0.94.
    advantages = group_advantages(jnp.array([1.0, 0, 1, 0, 0, 1, 0, 1]))
    assert_allclose(jnp.abs(advantages), np.full(8, 0.9354), atol=1e-4)
    assert_array_equal(jnp.sign(advantages), [1, -1, 1, -1, -1, 1, -1, 1])


def test_two_of_four_right():
    # μ = 1/2, s = √(4 · ¼ / 3) = 0.5774, A = ±0.5/0.5774 = ±0.8660.
    assert_allclose(group_advantages(jnp.array([1.0, 0, 0, 1])), [0.8660, -0.8660, -0.8660, 0.8660], atol=1e-4)


def test_population_deviation_and_eps():
    # r = (0, 1): population deviation ½, sample deviation √½; ε = ½ halves the first: ½/(½ + ½).
    rewards = jnp.array([0.0, 1.0])
    assert_allclose(group_advantages(rewards, ddof=0), [-1, 1], rtol=1e-5)
    assert_allclose(group_advantages(rewards, ddof=1), [-(0.5**0.5), 0.5**0.5], rtol=1e-5)
    assert_allclose(group_advantages(rewards, ddof=0, eps=0.5), [-0.5, 0.5])
    # The ranks 1 and 2 have the same deviations.
    assert_allclose(rank_advantages(rewards, ddof=0, eps=0.5), [-0.5, 0.5])


# --- a plain loop ---


def loop_mean_rank(group, i):
    return 1 + sum(r > group[i] for r in group) + (sum(r == group[i] for r in group) - 1) / 2


def loop_standardised(group):
    mean = sum(group) / len(group)
    deviation = (sum((r - mean) ** 2 for r in group) / (len(group) - 1)) ** 0.5
    return [(r - mean) / (deviation + 1e-6) if max(group) > min(group) else 0.0 for r in group]


def loop_leave_one_out(group):
    return [r - sum(s for j, s in enumerate(group) if j != i) / (len(group) - 1) for i, r in enumerate(group)]


LOOPS = {
    group_advantages: loop_standardised,
    centered_advantages: lambda group: [r - sum(group) / len(group) for r in group],
    leave_one_out_advantages: loop_leave_one_out,
    rank_advantages: lambda group: loop_standardised([-loop_mean_rank(group, i) for i in range(len(group))]),
    linear_rank_advantages: lambda group: [
        2 * (len(group) - loop_mean_rank(group, i)) / (len(group) - 1) - 1 for i in range(len(group))
    ],
    group_ranks: lambda group: [1 + sum(other > r for other in group) for r in group],
}


@pytest.mark.parametrize("function", LOOPS)
def test_equals_a_plain_loop(function):
    rewards = random_rewards()
    expected = [LOOPS[function](group.astype(float).tolist()) for group in rewards]
    assert_allclose(jitted[function](rewards), expected, rtol=1e-5, atol=1e-6)


# --- transformations ---


@pytest.mark.parametrize("function", LOOPS)
def test_leading_axes_are_independent_groups(function):
    rewards = random_rewards((2, 3, 5))
    one_by_one = jax.jit(jax.vmap(jax.vmap(function)))(rewards)
    assert_allclose(jitted[function](rewards), one_by_one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", LOOPS)
def test_jit_equals_eager(function):
    rewards = jnp.array([0.3, -1.0, 2.0, 0.3])
    assert_allclose(jitted[function](rewards), function(rewards), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", [group_advantages, rank_advantages])
def test_eps_may_be_traced(function):
    rewards = jnp.array([0.0, 1.0, 5.0])
    values = jnp.array([1e-6, 1e-2, 1.0])
    traced = jax.jit(jax.vmap(lambda eps: function(rewards, eps=eps)))(values)
    centered = np.array([-2, -1, 3]) if function is group_advantages else np.array([-1, 0, 1])
    expected = [centered / (np.sqrt(np.sum(centered**2) / 2) + eps) for eps in values.tolist()]
    assert_allclose(traced, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("function", ADVANTAGES)
def test_shape_and_dtype_stay(function, dtype):
    advantages = jax.eval_shape(function, jax.ShapeDtypeStruct((5, 7), dtype))
    assert (advantages.shape, advantages.dtype) == ((5, 7), dtype)


@pytest.mark.parametrize("function", DIFFERENTIABLE)
def test_gradients_equal_finite_differences(function):
    rewards = jnp.array([[0.3, -1.0, 2.0, 0.7], [1.0, 1.5, 0.2, -0.4]])
    check_grads(jitted[function], (rewards,), order=1, modes=["rev"], eps=1e-2)


@pytest.mark.parametrize("function", ADVANTAGES)
@pytest.mark.parametrize("group_size", [1, 4])
def test_gradients_are_finite_without_spread(function, group_size):
    # √ has an infinite slope at a variance of 0.
    jacobian = jax.jit(jax.jacrev(function))(np.full(group_size, 0.7, np.float32))
    assert np.all(np.isfinite(jacobian))


# --- no spread ---


@pytest.mark.parametrize("function", ADVANTAGES)
@pytest.mark.parametrize("reward", [0.7, 0.1, 1 / 3, -2.3, 0.0])
def test_equal_rewards_give_exactly_zero(function, reward):
    # The float32 mean of eight 0.7s is not 0.7: a deviation of 1e-8 over itself would give 0.86.
    for transformed in (function, jitted[function]):  # XLA may round the mean in another way
        assert_array_equal(transformed(jnp.full(8, reward)), np.zeros(8))


@few
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_any_equal_rewards_give_exactly_zero(reward):
    rewards = np.full(G, reward, np.float32)
    for function in ADVANTAGES:
        assert_array_equal(jitted[function](rewards), np.zeros(G))


@pytest.mark.parametrize("function", DIFFERENTIABLE)
def test_a_group_without_spread_leaves_its_neighbours_alone(function):
    rewards = np.array([[0.7, 0.7, 0.7], [0.1, 0.7, 0.4]], np.float32)
    without, neighbour = np.asarray(jitted[function](rewards))
    assert_array_equal(without, np.zeros(3))
    assert_allclose(neighbour, LOOPS[function](rewards[1].astype(float).tolist()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("function", [group_advantages, rank_advantages])
def test_group_of_one_of_either_deviation(function, ddof):
    assert_array_equal(jax.jit(partial(function, ddof=ddof))(jnp.array([[3.0], [0.7]])), np.zeros((2, 1)))


@pytest.mark.parametrize("function", ADVANTAGES)
def test_group_of_one(function):
    assert_array_equal(jitted[function](jnp.array([[3.0], [0.7]])), np.zeros((2, 1)))


def test_rank_in_a_group_of_one():
    assert_array_equal(group_ranks(jnp.array([[3.0], [0.7]])), np.ones((2, 1)))


# --- invariances ---


@few
@given(groups, st.permutations(range(G)))
def test_permuting_the_group_permutes_its_advantages(rewards, order):
    order = np.array(order)
    for function, compiled in jitted.items():
        assert_allclose(
            compiled(rewards[order]), compiled(rewards)[order], rtol=1e-5, atol=1e-6, err_msg=function.__name__
        )


@few
@given(groups, st.integers(-100, 100))
def test_shifting_the_rewards_changes_nothing(rewards, shift):
    for function in ADVANTAGES:
        assert_allclose(jitted[function](rewards + np.float32(shift)), jitted[function](rewards), rtol=1e-5)


@few
@given(groups, scales)
def test_scaling_the_rewards_changes_nothing_after_standardising(rewards, scale):
    # Unequal quarters have s ≥ ¼/√8 = 0.088, times a scale of at least 1/8: ε/s is below 1e-4.
    for function in (group_advantages, rank_advantages, linear_rank_advantages):
        assert_allclose(jitted[function](rewards * scale), jitted[function](rewards), rtol=2e-4, atol=1e-6)


@few
@given(groups, scales)
def test_scaling_the_rewards_scales_what_is_only_centred(rewards, scale):
    for function in (centered_advantages, leave_one_out_advantages):
        assert_allclose(jitted[function](rewards * scale), jitted[function](rewards) * scale, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "increasing", [np.exp, lambda r: r**3, lambda r: np.float32(3) * r + np.float32(1)], ids=["exp", "cubic", "affine"]
)
@few
@given(groups)
def test_ranks_are_invariant_under_increasing_maps(increasing, rewards):
    for function in (*OF_RANKS, group_ranks):
        assert_array_equal(jitted[function](increasing(rewards)), jitted[function](rewards))


@few
@given(groups)
def test_advantages_sum_to_zero_and_keep_the_order(rewards):
    better = rewards[None, :] > rewards[:, None]
    for function in ADVANTAGES:
        advantages = np.asarray(jitted[function](rewards))
        assert_allclose(advantages.sum(), 0, atol=1e-4)
        assert np.all((advantages[None, :] > advantages[:, None]) == better), function.__name__


# --- equivalences ---


@few
@given(groups)
def test_leave_one_out_is_a_multiple_of_centred(rewards):
    expected = G / (G - 1) * np.asarray(jitted[centered_advantages](rewards))
    assert_allclose(jitted[leave_one_out_advantages](rewards), expected, rtol=1e-6)


@few
@given(binary_groups)
def test_of_right_and_wrong_the_rank_is_the_standardised_reward(rewards):
    assert_allclose(jitted[rank_advantages](rewards), jitted[group_advantages](rewards), rtol=1e-5, atol=1e-6)


population_rank = jax.jit(partial(rank_advantages, ddof=0))


@few
@given(hnp.arrays(np.float32, (6, 2), elements=quarters))
def test_the_rank_of_two_is_a_sign(rewards):
    sign = np.sign(rewards - rewards[:, ::-1])
    assert_allclose(population_rank(rewards), sign, atol=1e-5)
    assert_array_equal(jitted[linear_rank_advantages](rewards), sign)


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, bool])
def test_ranks_of_small_types(dtype):
    # Four of eight: mean ranks 2.5 and 6.5, sample deviation 4 · √(8/28).
    rewards = jnp.array([0, 1] * 4, dtype)
    assert_allclose(rank_advantages(rewards), np.array([-1, 1] * 4) * 0.5 / np.sqrt(2 / 7), rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-12, 1e20, 1e37])
def test_standardising_does_not_overflow(scale):
    assert_allclose(group_advantages(jnp.array([3.0, 0, 0, 0]) * scale, eps=0.0), [1.5, -0.5, -0.5, -0.5], rtol=1e-5)


def test_nan_is_ranked_last():
    assert_array_equal(group_ranks(jnp.array([jnp.nan, 1.0, 0.0])), [3, 1, 2])


@pytest.mark.parametrize("function", ADVANTAGES)
def test_a_nan_reward_stays_visible(function):
    assert jnp.isnan(function(jnp.array([1.0, jnp.nan, 0.0]))).any()
