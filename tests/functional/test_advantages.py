"""Advantages: numbers derived by hand, groups without spread, what is not a number, and types."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from grpo_jax import functional as F


@cache
def compiled(function, **options):
    """One program in place of one for each operation."""
    return jax.jit(partial(function, **options))


def check(function, arrays, expected, tolerance=1e-4, **options):
    arrays = [np.float32(x) if np.asarray(x).dtype == float else np.asarray(x) for x in arrays]
    assert_allclose(compiled(function, **options)(*arrays), expected, rtol=1e-5, atol=tolerance)


# --- numbers derived by hand ---

# r = (1, 2, 4, 1): μ = 2, r − μ = (−1, 0, 2, −1), Σ (r − μ)² = 6, s = √(6/3) = √2.
# Mean ranks: 4 is first, 2 second, the two 1s share places 3 and 4: rank̄ = (3.5, 2, 1, 3.5).
# −rank̄ about its mean −2.5: (−1, 0.5, 1.5, −1); squares sum to 4.5, s = √(4.5/3) = √1.5.
BY_HAND = [
    (F.group_advantages, np.array([-1, 0, 2, -1]) / np.sqrt(2)),
    (F.centered_advantages, [-1, 0, 2, -1]),
    (F.leave_one_out_advantages, [-4 / 3, 0, 8 / 3, -4 / 3]),  # G/(G − 1) = 4/3; first: 1 − (2 + 4 + 1)/3
    (F.rank_advantages, np.array([-1, 0.5, 1.5, -1]) / np.sqrt(1.5)),
    (F.group_ranks, [3, 2, 1, 3]),  # nobody beats the 4; two beat each 1
    (F.best_of_group_advantages, [0, 0, 2, 0]),
    (F.max_rl_advantages, [-0.5, 0, 1, -0.5]),
]


@pytest.mark.parametrize(("function", "expected"), BY_HAND)
def test_by_hand(function, expected):
    check(function, [[1.0, 2.0, 4.0, 1.0]], expected, 1e-5)


def test_right_and_wrong_by_hand():
    # μ = 1/2, s = √(8 · ¼ / 7) = 0.5345, A = 0.5/0.5345 = 0.935: printed as 0.94.
    signs = np.array([1, -1, 1, -1, -1, 1, -1, 1])
    for function in (F.group_advantages, F.rank_advantages):
        check(function, [np.float32(signs > 0)], 0.9354 * signs)
    # μ = 1/2, s = √(4 · ¼ / 3) = 0.5774, A = ±0.5/0.5774 = ±0.8660.
    check(F.group_advantages, [[1.0, 0.0, 0.0, 1.0]], [0.8660, -0.8660, -0.8660, 0.8660])
    # MaxRL of one right: μ = 1/n, (1 − 1/n) n = n − 1.
    check(F.max_rl_advantages, [[0.0, 0.0, 1.0, 0.0, 0.0]], [-1, -1, 4, -1, -1])


def test_population_deviation_and_eps():
    # r = (0, 1): population deviation ½, sample deviation √½; ε = ½ halves the first: ½/(½ + ½).
    check(F.group_advantages, [[0.0, 1.0]], [-1, 1], ddof=0)
    check(F.group_advantages, [[0.0, 1.0]], [-(0.5**0.5), 0.5**0.5], ddof=1)
    check(F.group_advantages, [[0.0, 1.0]], [-0.5, 0.5], ddof=0, eps=0.5)
    # The ranks 1 and 2 have the same deviations.
    check(F.rank_advantages, [[0.0, 1.0]], [-0.5, 0.5], ddof=0, eps=0.5)


def test_of_a_batch_by_hand():
    # r = (4, 0), (2, 2): the batch has μ = 2, Σ (r − μ)² = 8, s = √(8/3); the groups have μ = 2 too.
    check(F.batch_std_advantages, [[[4.0, 0.0], [2.0, 2.0]]], np.array([[2, -2], [0, 0]]) / np.sqrt(8 / 3))
    # Population: s = √2. With ε = 2 − √2 the divisor is 2.
    check(F.batch_std_advantages, [[[4.0, 0.0], [2.0, 2.0]]], [[1, -1], [0, 0]], ddof=0, eps=2 - 2**0.5)
    # Two of six completions are in a group whose rewards differ: α = 6/2 = 3, r − μ = ±½.
    check(F.gpg_advantages, [[[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]], [[1.5, -1.5], [0, 0], [0, 0]])
    # Without the last completion B is 5, and its partner a group of one: α = 5/2.
    where = np.array([[True, True], [True, True], [True, False]])
    advantages = F.gpg_advantages(jnp.array([[1.0, 0], [1, 1], [0, 9]]), where=where)
    assert_allclose(advantages, [[1.25, -1.25], [0, 0], [0, 0]])


def test_opo_by_hand():
    # Lengths 1, 2, 1 and rewards 4, 1, 0: the baseline is (4 + 2 + 0)/4 = 1.5.
    check(F.opo_advantages, [[4.0, 1.0, 0.0], [1, 2, 1]], [2.5, -0.5, -1.5])
    # All tokens in one completion, were it one: its reward is the baseline. Without tokens there is none.
    check(F.opo_advantages, [[4.0, 1.0, 0.0], [1, 0, 0]], [0, -3, -4])
    check(F.opo_advantages, [[4.0, 1.0, 0.0], [0, 0, 0]], [4, 1, 0])


def test_against_one_other_by_hand():
    check(F.remax_advantages, [[[1.0, 0.0, 3.0], [2.0, 2.0, 2.0]], [0.5, 2.5]], [[0.5, -0.5, 2.5], [-0.5, -0.5, -0.5]])
    check(F.remax_advantages, [[3.0], np.float32(1)], [2])  # one completion is enough
    rewards = [[0.25, 2.0, 0.5], [2.0, 2.0, 0.5], [-3.0, -1.0, -2.0]]
    check(F.best_of_group_advantages, [rewards], [[0, 1.5, 0], [0, 0, 0], [0, 1, 0]])
    # A negative mean teaches MaxRL nothing.
    check(F.max_rl_advantages, [[[-1.0, -2.0, 0.0, 1.0], [-1.0, 1.0, 0.0, 0.0]]], np.zeros((2, 4)))


def test_pass_at_k_by_hand():
    # n = 4, q = 2, k = 2: R̄ = 1 − C(2,2)/C(4,2) = 5/6, σ = √(5/36), A⁺ = (1/6)/σ = 1/√5,
    # A⁻ = (1 − 5/6 − C(1,1)/C(3,1))/σ = (−1/6)/σ = −1/√5.
    expected = np.array([1, -1, 1, -1]) / np.sqrt(5)
    check(F.pass_at_k_advantages, [[1.0, 0.0, 1.0, 0.0]], expected, k=2)
    # Right is what is above 0, by how much does not matter. Three of four pass at every 2.
    check(F.pass_at_k_advantages, [[0.1, -5.0, 7.0, 0.0]], expected, k=2)
    check(F.pass_at_k_advantages, [[1.0, 1.0, 1.0, 0.0]], np.zeros(4), 0, k=2)
    # k = 1 is the standardised reward.
    check(F.pass_at_k_advantages, [[1.0, 0.0, 0.0, 0.0]], np.array([3, -1, -1, -1]) / np.sqrt(3), k=1)


@pytest.mark.parametrize("k", [0, 5])
def test_pass_at_k_refuses_a_k_outside_of_the_group(k):
    with pytest.raises(ValueError, match=f"k is {k}"):
        F.pass_at_k_advantages(jnp.ones(4), k=k)


def test_gdpo_by_hand():
    # Accuracy (1, 1, 0): μ = 2/3, s = √(6/9/2) = 0.5774, standardised (0.5774, 0.5774, −1.1547).
    # Brevity (−10, −30, −20): (1, −1, 0). Sum (1.5774, −0.4226, −1.1547): mean 0, squares sum to 4, s = √2.
    rewards = np.float32([[1, 1, 0], [-10, -30, -20]])
    check(F.gdpo_advantages, [rewards], [1.1154, -0.2989, -0.8165])
    # Weighted 1 and ½: (1.0774, 0.0774, −1.1547), squares sum to 2.5, s = 1.1180.
    weighted = F.gdpo_advantages(rewards, weights=np.float32([1, 0.5]))
    assert_allclose(weighted, [0.9636, 0.0692, -1.0328], atol=1e-4)
    # Population deviations: (0.7071, 0.7071, −1.4142) + (1.2247, −1.2247, 0) = (1.9319, −0.5176, −1.4142),
    # squares sum to 6, s = √2; ε = 0.
    check(F.gdpo_advantages, [rewards], [1.3660, -0.3660, -1.0], ddof=0, eps=0.0)
    # The scale of one drowns no other, and a completion to which none applies stays out.
    check(F.gdpo_advantages, [rewards * np.float32([[1], [1024]])], [1.1154, -0.2989, -0.8165])
    with_fourth = np.pad(rewards, ((0, 0), (0, 1)), constant_values=np.nan)
    check(F.gdpo_advantages, [with_fourth], [1.1154, -0.2989, -0.8165, 0])


@pytest.mark.parametrize("group_size", [4, 7])
def test_rewards_that_cancel_teach_nothing(group_size):
    # r and 2 - 3r have opposite standardised values: what is left of their sum is rounding.
    r = np.random.default_rng(0).integers(0, 2, (8, group_size)).astype(np.float32)
    check(F.gdpo_advantages, [np.stack([r, 2 - 3 * r])], np.zeros_like(r), 0)


def test_turns_by_hand():
    # Returns to go of three episodes, the last of one turn: (1, 1), (0, 0), (2).
    # Turn 1: μ = 1, s = 1: 0, −1, 1. Turn 2: μ = ½, s = √½: 0.7071, −0.7071.
    rewards = np.float32([[[0, 1], [0, 0], [2, 9]]])
    turns = np.array([[[True, True], [True, True], [True, False]]])
    expected = [[[0, 0.7071], [-1, -0.7071], [1, 0]]]
    assert_allclose(F.turn_advantages(rewards, where=turns), expected, atol=1e-4)
    # With turn 2 of the first alone: all turns of the group are 1, 1, 0, 2, μ = 1, s = √⅔: 0 for it.
    turns[0, 1, 1] = False
    assert_allclose(F.turn_advantages(rewards, where=turns), [[[0, 0], [-1, 0], [1, 0]]], atol=1e-4)
    # And with a reward of 3 in it: 3, 3, 0, 2, μ = 2, s = √2: 1/√2.
    rewards[0, 0, 1] = 3
    assert_allclose(F.turn_advantages(rewards, where=turns)[0, 0, 1], 0.7071, atol=1e-4)


def test_equal_returns_of_different_turns_are_equal_whatever_rounding_makes_of_them():
    rewards = np.float32([[[0.1, 0.3, 0.5], [0.5, 0.1, 0.3]]])  # 0.90000004 and 0.9
    advantages = compiled(F.turn_advantages)(rewards)
    assert_array_equal(advantages[..., 0], 0)
    assert_allclose(advantages[..., 1], [[0.70711, -0.70711]], atol=1e-4)


def test_spans_by_hand():
    # Spans end at tokens 1 and 3, and at tokens 0 and 1. Returns to go: (3, 1) and (0, −1).
    # First spans: μ = 1½, s = 3/√2: ±0.7071. Second ones: μ = 0, s = √2: ±0.7071. What is behind the last is of it.
    rewards = np.float32([[[7, 2, 7, 1, 7], [1, -1, 7, 7, 7]]])
    ends = np.array([[[False, True, False, True, False], [True, True, False, False, False]]])
    h = 0.70711
    check(F.span_advantages, [rewards, ends], [[[h, h, h, h, h], [-h, -h, -h, -h, -h]]])
    # A third completion of one span, that earned 3: first spans 3, 0, 3, μ = 2, s = √3. Second ones are as before.
    rewards = np.float32([[*rewards[0], [0, 0, 3, 9, 9]]])
    ends = np.array([[*ends[0], [False, False, True, False, False]]])
    first, second = 1 / 3**0.5, -2 / 3**0.5
    check(F.span_advantages, [rewards, ends], [[[first, first, h, h, h], [second, -h, -h, -h, -h], [first] * 5]])


def test_of_one_turn_or_span_they_are_those_of_groups():
    rewards = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
    expected = compiled(F.group_advantages)(rewards)
    assert_array_equal(compiled(F.turn_advantages)(rewards[..., None])[..., 0], expected)
    ends = np.arange(3) == np.array([[0, 1, 2, 1]] * 2)[..., None]
    by_token = compiled(F.span_advantages)(np.where(ends, rewards[..., None], 0), ends)
    assert_array_equal(by_token, np.repeat(np.asarray(expected)[..., None], 3, -1))


# --- of every function of groups: no spread, what is not a number, types ---


def opo(rewards, *, where=None):
    return F.opo_advantages(rewards, jnp.broadcast_to(jnp.arange(1, 6), rewards.shape), where=where)


OF_GROUPS = {
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
}
OF_BATCH = ("batch_std", "gpg")
every_function = pytest.mark.parametrize("name", OF_GROUPS)
REWARDS = np.array([[0.3, 1.1, 2.0, 0.7, 0.4], [1.2, 1.6, 0.2, -0.4, 0.9], [0.7, 0.7, 0.7, 0.7, 0.7]], np.float32)
WHERE = np.array([[1, 0, 1, 1, 0], [1, 1, 0, 0, 1], [0, 1, 1, 1, 0]], bool)
EQUAL = np.float32([0.7, 0.1, 1 / 3, -2.3, 0, 1e-30, 1e30, *np.random.default_rng(0).normal(size=13)])


@every_function
def test_equal_rewards_give_exactly_zero_and_finite_gradients(name):
    # The float32 mean of eight 0.7s is not 0.7: a deviation of 1e-8 over itself would give 0.86.
    function, rewards = OF_GROUPS[name], np.repeat(EQUAL, 5).reshape(-1, 1, 5)
    of_each = jax.jit(jax.vmap(function))
    assert_array_equal(of_each(rewards), np.zeros(rewards.shape))
    left_out = np.arange(5) < np.array([[3]])
    of_some = jax.jit(jax.vmap(lambda rewards: function(rewards, where=left_out)))
    assert_array_equal(of_some(np.where(left_out, rewards, np.float32(5))), np.zeros(rewards.shape))
    # √ has an infinite slope at a variance of 0.
    for size in (2, 5):
        if name != "opo" or size == 5:
            assert np.all(np.isfinite(jax.jit(jax.jacrev(function))(np.full((1, size), 0.7, np.float32))))


@pytest.mark.slow
@every_function
def test_equal_rewards_give_exactly_zero_one_operation_at_a_time(name):
    for reward in EQUAL[:5]:  # XLA may round the mean in another way
        assert_array_equal(OF_GROUPS[name](jnp.full((2, 5), reward)), np.zeros((2, 5)))


@every_function
@pytest.mark.parametrize("counted", [0, 1])
def test_a_group_where_nothing_or_one_counts_gives_zero(name, counted):
    where = np.arange(5) < np.array([counted, 0, counted])[:, None]
    rewards = np.where(where, REWARDS, np.float32(np.nan))
    assert_array_equal(jax.jit(OF_GROUPS[name])(rewards, where=where), np.zeros((3, 5)))
    if name not in ("opo", "pass_at_2"):
        assert_array_equal(OF_GROUPS[name](jnp.array([[3.0], [0.7]])), np.zeros((2, 1)))


@every_function
def test_a_nan_stays_visible_and_what_is_left_out_stays_zero(name):
    rewards = REWARDS.copy()
    rewards[0, 0] = np.nan
    function = jax.jit(OF_GROUPS[name])
    alone = np.zeros_like(WHERE)
    alone[0, 0] = True
    for where in (WHERE, alone):
        advantages = np.asarray(function(rewards, where=where))
        assert np.isnan(advantages[0, 0])
        assert_array_equal(advantages[~where], 0)
        if name not in OF_BATCH:  # the batch's deviation is NaN everywhere
            assert np.all(np.isfinite(advantages[1:]))
    assert np.all(np.isnan(function(np.full((3, 5), np.nan, np.float32))).any(axis=-1))


@pytest.mark.parametrize("scale", [1e-12, 1e20, 1e37])
def test_standardising_does_not_overflow(scale):
    rewards = np.float32([[3, 0, 0, 0]]) * np.float32(scale)
    for function in (F.group_advantages, F.batch_std_advantages):
        check(function, [rewards], [[1.5, -0.5, -0.5, -0.5]], eps=0.0)


@every_function
def test_verdicts_may_be_bool(name):
    # Counted in bool, a hundred completions would be one.
    verdicts = np.random.default_rng(0).random((3, 5)) < 0.5
    with jax.numpy_dtype_promotion("standard"):
        advantages = jax.jit(OF_GROUPS[name])(verdicts)
    assert_allclose(advantages, jax.jit(OF_GROUPS[name])(verdicts.astype(np.float32)), rtol=1e-6)


def test_types():
    # Four of eight: mean ranks 2.5 and 6.5, sample deviation 4 · √(8/28).
    for dtype in (jnp.uint8, jnp.int8, bool):
        assert_allclose(
            F.rank_advantages(jnp.array([0, 1] * 4, dtype)), np.array([-1, 1] * 4) * 0.5 / np.sqrt(2 / 7), 1e-5
        )
    # bfloat16 has no 100.25 to be the mean of these: the lower would get 0.
    advantages = F.centered_advantages(jnp.array([100, 100.5], jnp.bfloat16))
    assert advantages.dtype == jnp.bfloat16
    assert_array_equal(advantages.astype(jnp.float32), [-0.25, 0.25])
    # 60 000 + 60 000 tokens are more than float16 holds.
    advantages = compiled(F.opo_advantages)(np.float16([1, 0]), np.array([60_000, 60_000]))
    assert_array_equal(advantages, np.array([0.5, -0.5], np.float16))
    assert_array_equal(F.group_ranks(jnp.array([jnp.nan, 1, 0])), [3, 1, 2])  # NaN is last
