from functools import cache, partial
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from jax.test_util import check_grads
from numpy.testing import assert_allclose, assert_array_equal

from grpo_jax.functional import (
    batch_std_advantages,
    best_of_group_advantages,
    centered_advantages,
    gdpo_advantages,
    gpg_advantages,
    group_advantages,
    group_ranks,
    leave_one_out_advantages,
    max_rl_advantages,
    opo_advantages,
    pass_at_k_advantages,
    rank_advantages,
    remax_advantages,
    span_advantages,
    turn_advantages,
    whiten,
)

DIFFERENTIABLE = [group_advantages, centered_advantages, leave_one_out_advantages]
ADVANTAGES = [*DIFFERENTIABLE, rank_advantages]

G = 8
few = settings(max_examples=25, deadline=None, derandomize=True)
# Quarters: sums, means and cubes of eight of them are exact in float32, and unequal rewards
# stay unequal under every map below.
quarters = st.integers(-32, 32).map(lambda n: n / 4)
groups = hnp.arrays(np.float32, G, elements=quarters)
scales = st.integers(1, 80).map(lambda n: np.float32(n / 8))
binary_groups = hnp.arrays(np.float32, G, elements=st.sampled_from([0.0, 1.0]))

jitted = {function: jax.jit(function) for function in [*ADVANTAGES, group_ranks]}


@cache
def compiled(function, **options):
    """One program in place of one for each operation."""
    return jax.jit(partial(function, **options))


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
    group_ranks: [3, 2, 1, 3],  # nobody beats the 4; two beat each 1
}


@pytest.mark.parametrize("function", BY_HAND)
def test_by_hand(function):
    assert_allclose(jitted[function](np.float32([1, 2, 4, 1])), BY_HAND[function], rtol=1e-5)


def test_four_of_eight_right():
    # μ = 1/2, s = √(8 · ¼ / 7) = 0.5345, A = 0.5/0.5345 = 0.935: printed as 0.94.
    advantages = np.asarray(jitted[group_advantages](np.float32([1, 0, 1, 0, 0, 1, 0, 1])))
    assert_allclose(np.abs(advantages), np.full(8, 0.9354), atol=1e-4)
    assert_array_equal(np.sign(advantages), [1, -1, 1, -1, -1, 1, -1, 1])


def test_two_of_four_right():
    # μ = 1/2, s = √(4 · ¼ / 3) = 0.5774, A = ±0.5/0.5774 = ±0.8660.
    assert_allclose(jitted[group_advantages](np.float32([1, 0, 0, 1])), [0.8660, -0.8660, -0.8660, 0.8660], atol=1e-4)


def test_population_deviation_and_eps():
    # r = (0, 1): population deviation ½, sample deviation √½; ε = ½ halves the first: ½/(½ + ½).
    rewards = np.float32([0, 1])
    assert_allclose(compiled(group_advantages, ddof=0)(rewards), [-1, 1], rtol=1e-5)
    assert_allclose(compiled(group_advantages, ddof=1)(rewards), [-(0.5**0.5), 0.5**0.5], rtol=1e-5)
    assert_allclose(compiled(group_advantages, ddof=0, eps=0.5)(rewards), [-0.5, 0.5])
    # The ranks 1 and 2 have the same deviations.
    assert_allclose(compiled(rank_advantages, ddof=0, eps=0.5)(rewards), [-0.5, 0.5])


# --- a plain loop ---


def loop_mean_rank(group, i):
    return 1 + sum(r > group[i] for r in group) + (sum(r == group[i] for r in group) - 1) / 2


def loop_standardised(group):
    mean = sum(group) / len(group)
    deviation = (sum((r - mean) ** 2 for r in group) / max(len(group) - 1, 1)) ** 0.5
    return [(r - mean) / (deviation + 1e-6) if max(group) > min(group) else 0.0 for r in group]


def loop_leave_one_out(group):
    if len(group) == 1:
        return [0.0]
    return [r - sum(s for j, s in enumerate(group) if j != i) / (len(group) - 1) for i, r in enumerate(group)]


LOOPS = {
    group_advantages: loop_standardised,
    centered_advantages: lambda group: [r - sum(group) / len(group) for r in group],
    leave_one_out_advantages: loop_leave_one_out,
    rank_advantages: lambda group: loop_standardised([-loop_mean_rank(group, i) for i in range(len(group))]),
    group_ranks: lambda group: [1 + sum(other > r for other in group) for r in group],
}


@pytest.mark.parametrize("function", LOOPS)
def test_equals_a_plain_loop(function):
    rewards = random_rewards()
    expected = [LOOPS[function](group.astype(float).tolist()) for group in rewards]
    assert_allclose(jitted[function](rewards), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", [group_advantages, centered_advantages, leave_one_out_advantages])
def test_rewards_of_16_bits_have_the_mean_of_32(function):
    # bfloat16 has no 100.25 to be the mean of these: the lower would get 0.
    rewards = np.array([100, 100.5], jnp.bfloat16)
    advantages = np.asarray(jitted[function](rewards))
    assert advantages.dtype == jnp.bfloat16
    assert_allclose(advantages.astype(np.float32), jitted[function](rewards.astype(np.float32)), rtol=5e-3)


# --- transformations ---


@pytest.mark.parametrize("function", LOOPS)
def test_leading_axes_are_independent_groups(function):
    rewards = random_rewards((2, 3, 5))
    one_by_one = jax.jit(jax.vmap(jax.vmap(function)))(rewards)
    assert_allclose(jitted[function](rewards), one_by_one, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
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
    assert_array_equal(jitted[function](np.full(8, reward, np.float32)), np.zeros(8))


@pytest.mark.slow
@pytest.mark.parametrize("function", ADVANTAGES)
@pytest.mark.parametrize("reward", [0.7, 0.1, 1 / 3, -2.3, 0.0])
def test_equal_rewards_give_exactly_zero_one_operation_at_a_time(function, reward):
    # XLA may round the mean in another way.
    assert_array_equal(function(jnp.full(8, reward)), np.zeros(8))


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
    assert_array_equal(jitted[group_ranks](np.float32([[3], [0.7]])), np.ones((2, 1)))


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
    for function in (group_advantages, rank_advantages):
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
    for function in (rank_advantages, group_ranks):
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


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, bool])
def test_ranks_of_small_types(dtype):
    # Four of eight: mean ranks 2.5 and 6.5, sample deviation 4 · √(8/28).
    rewards = jnp.array([0, 1] * 4, dtype)
    assert_allclose(jitted[rank_advantages](rewards), np.array([-1, 1] * 4) * 0.5 / np.sqrt(2 / 7), rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-12, 1e20, 1e37])
def test_standardising_does_not_overflow(scale):
    rewards = np.float32([3, 0, 0, 0]) * np.float32(scale)
    assert_allclose(compiled(group_advantages, eps=0.0)(rewards), [1.5, -0.5, -0.5, -0.5], rtol=1e-5)


def test_nan_is_ranked_last():
    assert_array_equal(jitted[group_ranks](np.float32([np.nan, 1, 0])), [3, 1, 2])


@pytest.mark.parametrize("function", ADVANTAGES)
def test_a_nan_reward_stays_visible(function):
    assert np.isnan(jitted[function](np.float32([1, np.nan, 0]))).any()


# --- the whole batch, the best, the length ---


def lengths_of(rewards):
    """Lengths from 1 to 7 tokens, made of the rewards: a completion that is removed takes its own along."""
    return 1 + (jnp.abs(rewards) * 4).astype(jnp.int32) % 7


def opo(rewards, *, where=None):
    return opo_advantages(rewards, lengths_of(rewards), where=where)


pass_at_2 = partial(pass_at_k_advantages, k=2)


def test_batch_std_by_hand():
    # r = (4, 0), (2, 2): the batch has μ = 2, Σ (r − μ)² = 8, s = √(8/3); the groups have μ = 2 too.
    rewards = np.float32([[4, 0], [2, 2]])
    assert_allclose(compiled(batch_std_advantages)(rewards), np.array([[2, -2], [0, 0]]) / np.sqrt(8 / 3), rtol=1e-5)
    # Population: s = √2. With ε = 2 − √2 the divisor is 2.
    advantages = compiled(batch_std_advantages, ddof=0, eps=2 - 2**0.5)(rewards)
    assert_allclose(advantages, [[1, -1], [0, 0]], rtol=1e-6)


def test_opo_by_hand():
    # Lengths 1, 2, 1 and rewards 4, 1, 0: the baseline is (4 + 2 + 0)/4 = 1.5.
    advantages = compiled(opo_advantages)
    rewards = np.float32([4, 1, 0])
    assert_allclose(advantages(rewards, np.array([1, 2, 1])), [2.5, -0.5, -1.5])
    # All tokens in one completion, were it one: its reward is the baseline.
    assert_allclose(advantages(rewards, np.array([1, 0, 0])), [0, -3, -4])
    # Without tokens there is no baseline.
    assert_allclose(advantages(rewards, np.array([0, 0, 0])), [4, 1, 0])


def test_remax_by_hand():
    rewards, greedy = jnp.array([[1.0, 0.0, 3.0], [2.0, 2.0, 2.0]]), jnp.array([0.5, 2.5])
    expected = [[0.5, -0.5, 2.5], [-0.5, -0.5, -0.5]]
    assert_allclose(remax_advantages(rewards, greedy), expected)
    assert_allclose(jax.jit(jax.vmap(remax_advantages))(rewards, greedy), expected)
    assert_allclose(remax_advantages(jnp.array([3.0]), jnp.array(1.0)), [2])  # one completion is enough


def test_gpg_by_hand():
    # Two of six completions are in a group whose rewards differ: α = 6/2 = 3, r − μ = ±½.
    advantages = compiled(gpg_advantages)(np.float32([[1, 0], [1, 1], [0, 0]]))
    assert_allclose(advantages, [[1.5, -1.5], [0, 0], [0, 0]])
    # Without the last completion B is 5, and its partner a group of one: α = 5/2.
    where = np.array([[True, True], [True, True], [True, False]])
    advantages = compiled(gpg_advantages)(np.float32([[1, 0], [1, 1], [0, 9]]), where=where)
    assert_allclose(advantages, [[1.25, -1.25], [0, 0], [0, 0]])


def test_max_rl_by_hand():
    # μ = ½ and 2: (r − μ)/μ. A negative mean teaches nothing.
    rewards = np.float32([[1, 0, 0, 1], [5, 1, 1, 1], [-1, -2, 0, 1], [-1, 1, 0, 0]])
    expected = [[1, -1, -1, 1], [1.5, -0.5, -0.5, -0.5], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert_allclose(compiled(max_rl_advantages)(rewards), expected)


def test_best_of_group_by_hand():
    rewards = np.float32([[0.25, 2, 0.5], [2, 2, 0.5], [-3, -1, -2]])
    assert_allclose(jitted_best(rewards), [[0, 1.5, 0], [0, 0, 0], [0, 1, 0]])
    assert_array_equal(jitted_best(np.float32([[3], [0.7]])), np.zeros((2, 1)))


def test_pass_at_k_by_hand():
    # n = 4, q = 2, k = 2: R̄ = 1 − C(2,2)/C(4,2) = 5/6, σ = √(5/36), A⁺ = (1/6)/σ = 1/√5,
    # A⁻ = (1 − 5/6 − C(1,1)/C(3,1))/σ = (−1/6)/σ = −1/√5.
    of_two = compiled(pass_at_k_advantages, k=2)
    advantages = of_two(np.float32([1, 0, 1, 0]))
    assert_allclose(advantages, np.array([1, -1, 1, -1]) / np.sqrt(5), rtol=1e-5)
    # Right is what is above 0, by how much does not matter. Three of four pass at every 2.
    assert_allclose(of_two(np.float32([0.1, -5, 7, 0])), advantages)
    assert_array_equal(of_two(np.float32([1, 1, 1, 0])), np.zeros(4))


@pytest.mark.parametrize("k", [0, 5])
def test_pass_at_k_refuses_a_k_outside_of_the_group(k):
    with pytest.raises(ValueError, match=f"k is {k}"):
        pass_at_k_advantages(jnp.ones(4), k=k)


def loop_batch_std(batch):
    rewards = [r for group in batch for r in group]
    mean = sum(rewards) / max(len(rewards), 1)
    deviation = (sum((r - mean) ** 2 for r in rewards) / max(len(rewards) - 1, 1)) ** 0.5
    return [[(r - sum(group) / len(group)) / (deviation + 1e-6) for r in group] for group in batch]


def loop_gpg(batch):
    rows, signals = (sum(len(g) for g in batch if g and max(g) - min(g) >= least) for least in (0, 1e-3))
    return [[(r - sum(group) / len(group)) * rows / max(signals, 1) for r in group] for group in batch]


def loop_max_rl(group):
    mean = sum(group) / len(group)
    return [(r - mean) / mean if mean > 0 else 0.0 for r in group]


def loop_best_of_group(group):
    others = [[s for j, s in enumerate(group) if j != i] for i in range(len(group))]
    return [max(r - max(rest), 0.0) if rest else 0.0 for r, rest in zip(group, others, strict=True)]


def loop_pass_at_k(group, k):
    """A subset of k is worth 1 if one of it is right. A completion gets the mean of its subsets, all standardised."""
    subsets = list(combinations(range(len(group)), k))
    worth = np.array([float(any(group[i] > 0 for i in subset)) for subset in subsets])
    if not subsets or worth.std() == 0:
        return [0.0] * len(group)
    standardised = (worth - worth.mean()) / worth.std()
    return [np.mean([w for w, s in zip(standardised, subsets, strict=True) if i in s]) for i in range(len(group))]


def loop_opo(group):
    lengths = [1 + int(abs(r) * 4) % 7 for r in group]
    baseline = sum(n * r for n, r in zip(lengths, group, strict=True)) / sum(lengths)
    return [r - baseline for r in group]


def of_each_group(loop):
    return lambda batch: [loop(group) if group else [] for group in batch]


BATCH_LOOPS = {
    **{function: of_each_group(LOOPS[function]) for function in ADVANTAGES},
    batch_std_advantages: loop_batch_std,
    opo: of_each_group(loop_opo),
    gpg_advantages: loop_gpg,
    max_rl_advantages: of_each_group(loop_max_rl),
    best_of_group_advantages: of_each_group(loop_best_of_group),
    pass_at_2: of_each_group(partial(loop_pass_at_k, k=2)),
}
OF_BATCH = [batch_std_advantages, gpg_advantages]


def name_of(function):
    return "pass_at_2" if function is pass_at_2 else function.__name__


FUNCTIONS = {name_of(function): function for function in BATCH_LOOPS}


@partial(jax.jit, static_argnames="names")
def advantages_by_name(rewards, where=None, names=tuple(FUNCTIONS)):
    """One program for all of them."""
    return {name: FUNCTIONS[name](rewards, where=where) for name in names}


# Few levels, so that groups have ties or no spread, and means from below to above 0.
batches = hnp.arrays(np.float32, (3, 5), elements=st.integers(-2, 6).map(lambda n: n / 4))
wheres = hnp.arrays(np.bool_, (3, 5))


def loop_where(function, rewards, where):
    """The loop knows no `where`: it gets what is left, and what is left out gets 0."""
    batch = [[float(r) for r, kept in zip(*rows, strict=True) if kept] for rows in zip(rewards, where, strict=True)]
    expected = np.zeros(rewards.shape)
    expected[where] = [a for group in BATCH_LOOPS[function](batch) for a in group]
    return expected


@few
@given(batches, wheres)
def test_what_is_left_out_might_as_well_be_removed(rewards, where):
    for name, advantages in advantages_by_name(rewards, where).items():
        expected = loop_where(FUNCTIONS[name], rewards, where)
        assert_allclose(advantages, expected, rtol=1e-4, atol=1e-5, err_msg=name)
        assert_array_equal(np.asarray(advantages)[~where], 0, err_msg=name)


@few
@given(batches)
def test_without_where_all_count(rewards):
    everywhere = np.ones(rewards.shape, bool)
    for name, advantages in advantages_by_name(rewards).items():
        expected = loop_where(FUNCTIONS[name], rewards, everywhere)
        assert_allclose(advantages, expected, rtol=1e-4, atol=1e-5, err_msg=name)


REWARDS = np.array([[0.3, 1.1, 2.0, 0.7, 0.4], [1.2, 1.6, 0.2, -0.4, 0.9], [0.7, 0.7, 0.7, 0.7, 0.7]], np.float32)
WHERE = np.array([[1, 0, 1, 1, 0], [1, 1, 0, 0, 1], [0, 1, 1, 1, 0]], bool)


def test_left_out_is_physically_removed():
    removed = advantages_by_name(REWARDS[WHERE].reshape(3, 3))
    for name, advantages in advantages_by_name(REWARDS, WHERE).items():
        assert_allclose(advantages[WHERE].reshape(3, 3), removed[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("rubbish", [np.nan, np.inf, -np.inf, 1e30])
def test_what_is_left_out_may_be_anything(rubbish):
    expected = advantages_by_name(REWARDS, WHERE)
    for name, advantages in advantages_by_name(np.where(WHERE, REWARDS, np.float32(rubbish)), WHERE).items():
        assert_array_equal(advantages, expected[name], err_msg=name)


def test_nan_in_what_counts_stays_visible_and_what_is_left_out_stays_zero():
    rewards = REWARDS.copy()
    rewards[0, 0] = np.nan
    for name, advantages in advantages_by_name(rewards, WHERE).items():
        assert np.isnan(advantages[0, 0]), name
        assert_array_equal(np.asarray(advantages)[~WHERE], 0, err_msg=name)
        if FUNCTIONS[name] not in OF_BATCH:  # the batch's deviation is NaN everywhere
            assert np.all(np.isfinite(advantages[1:])), name
    # Alone in its group it is as visible.
    alone = np.zeros_like(WHERE)
    alone[0, 0] = True
    for name, advantages in advantages_by_name(rewards, alone).items():
        assert np.isnan(advantages[0, 0]), name
    for name, advantages in advantages_by_name(np.full((3, 5), np.nan, np.float32)).items():
        assert np.all(np.isnan(advantages).any(axis=-1)), name


@pytest.mark.parametrize("counted", [0, 1])
def test_a_group_where_nothing_or_one_counts_gives_zero(counted):
    where = np.arange(5) < np.array([counted, 0, counted])[:, None]
    rewards = np.where(where, REWARDS, np.float32(np.nan))
    for name, advantages in advantages_by_name(rewards, where).items():
        assert_array_equal(advantages, np.zeros((3, 5)), err_msg=name)


@pytest.mark.parametrize("reward", [0.7, 0.1, 1 / 3, -2.3, 0.0])
def test_equal_rewards_give_exactly_zero_whatever_is_left_out(reward):
    rewards = np.where(WHERE, np.float32(reward), np.float32(5))
    for name, advantages in advantages_by_name(rewards, WHERE).items():
        assert_array_equal(advantages, np.zeros((3, 5)), err_msg=name)
    for name, advantages in advantages_by_name(np.full((3, 5), reward, np.float32)).items():
        assert_array_equal(advantages, np.zeros((3, 5)), err_msg=name)


def test_where_under_vmap_is_one_group_at_a_time():
    names = tuple(name for name, function in FUNCTIONS.items() if function not in OF_BATCH)
    rewards, where = REWARDS[None], WHERE[None]  # leading axes of two kinds
    expected = advantages_by_name(REWARDS, WHERE)
    mapped = jax.vmap(jax.vmap(partial(advantages_by_name, names=names)))(rewards, where)
    for name in names:
        assert_allclose(mapped[name][0], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_where_under_jit_equals_eager():
    for name, advantages in advantages_by_name(REWARDS, WHERE).items():
        eager = FUNCTIONS[name](jnp.asarray(REWARDS), where=jnp.asarray(WHERE))
        assert_allclose(advantages, eager, rtol=1e-5, atol=1e-6, err_msg=name)


SMOOTH = tuple(name_of(function) for function in BATCH_LOOPS if function not in (rank_advantages, pass_at_2))


def stacked(rewards):
    return jnp.stack(list(advantages_by_name(rewards, WHERE, SMOOTH).values()))


def test_gradients_with_where_equal_finite_differences():
    # No two rewards of a group are within a step of each other, no length within one of the next.
    rewards = REWARDS.copy()
    rewards[0, 2:4], rewards[2] = (1.9, 0.65), (0.15, 0.55, 1.35, 0.85, 0.6)
    check_grads(jax.jit(stacked), (rewards,), order=1, modes=["rev"], eps=1e-2, rtol=1e-2)


def test_what_is_left_out_has_no_gradient_and_spoils_none():
    def of_rows(rewards):
        return jnp.sum(stacked(rewards) * jnp.arange(15.0).reshape(1, 3, 5))

    gradient = jax.jit(jax.grad(of_rows))
    expected = gradient(REWARDS)
    assert np.any(np.asarray(expected)[WHERE] != 0)
    assert_array_equal(np.asarray(expected)[~WHERE], 0)
    assert_allclose(gradient(np.where(WHERE, REWARDS, np.float32(np.nan))), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_shape_and_dtype_stay_with_where(dtype):
    for where in (None, jax.ShapeDtypeStruct((3, 5), bool)):
        for name, advantages in jax.eval_shape(advantages_by_name, jax.ShapeDtypeStruct((3, 5), dtype), where).items():
            assert (advantages.shape, advantages.dtype) == ((3, 5), dtype), name


# --- equivalences of the new ---


@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_pass_at_k_is_the_mean_over_all_subsets(k):
    # Every number of right ones, from none to all.
    rewards = (np.arange(6) < np.arange(7)[:, None]).astype(np.float32)
    expected = [loop_pass_at_k(group.tolist(), k) for group in rewards]
    assert_allclose(compiled(pass_at_k_advantages, k=k)(rewards), expected, rtol=1e-5, atol=1e-6)


def test_pass_at_k_of_a_group_with_fewer_than_k_is_zero():
    where = np.arange(4) < 2
    assert_array_equal(compiled(pass_at_k_advantages, k=3)(np.float32([1, 0, 0, 0]), where=where), np.zeros(4))


pass_at_1 = jax.jit(partial(pass_at_k_advantages, k=1))
population = jax.jit(partial(group_advantages, ddof=0))


@few
@given(binary_groups)
def test_pass_at_1_is_the_standardised_reward(rewards):
    assert_allclose(pass_at_1(rewards), population(rewards), rtol=1e-4, atol=1e-5)


def test_of_one_group_the_batch_is_the_group():
    rewards = REWARDS[:1]
    assert_allclose(compiled(batch_std_advantages)(rewards), jitted[group_advantages](rewards), rtol=1e-5)
    assert_allclose(compiled(gpg_advantages)(rewards), jitted[centered_advantages](rewards), rtol=1e-6)


def test_of_equal_lengths_opo_is_centred():
    expected = jitted[centered_advantages](REWARDS)
    assert_allclose(compiled(opo_advantages)(REWARDS, np.full((3, 5), 9)), expected, rtol=1e-5, atol=1e-6)


def test_remax_against_the_mean_is_centred():
    expected = jitted[centered_advantages](REWARDS)
    assert_allclose(compiled(remax_advantages)(REWARDS, REWARDS.mean(-1)), expected, atol=1e-6)


def test_max_rl_of_one_right_is_n_minus_1_to_minus_1():
    # μ = 1/n: (1 − 1/n) n = n − 1.
    assert_allclose(compiled(max_rl_advantages)(np.float32([0, 0, 1, 0, 0])), [-1, -1, 4, -1, -1], rtol=1e-5)


jitted_best = jax.jit(best_of_group_advantages)


@few
@given(groups)
def test_best_of_group_is_what_the_group_would_lose(rewards):
    # The maximum with a completion minus the maximum without it.
    without = [max(np.delete(rewards, i)) for i in range(G)]
    assert_allclose(jitted_best(rewards), max(rewards) - np.array(without), rtol=1e-6)


# --- several rewards ---

NAN = np.float32(np.nan)


def test_gdpo_by_hand():
    # Accuracy (1, 1, 0): μ = 2/3, s = √(6/9/2) = 0.5774, standardised (0.5774, 0.5774, −1.1547).
    # Brevity (−10, −30, −20): (1, −1, 0). Sum (1.5774, −0.4226, −1.1547): mean 0, squares sum to 4, s = √2.
    rewards = np.float32([[1, 1, 0], [-10, -30, -20]])
    assert_allclose(jitted_gdpo(rewards), [1.1154, -0.2989, -0.8165], atol=1e-4)
    # Weighted 1 and ½: (1.0774, 0.0774, −1.1547), squares sum to 2.5, s = 1.1180.
    weighted = jitted_gdpo(rewards, weights=WEIGHTS)
    assert_allclose(weighted, [0.9636, 0.0692, -1.0328], atol=1e-4)
    # Population deviations: (0.7071, 0.7071, −1.4142) + (1.2247, −1.2247, 0) = (1.9319, −0.5176, −1.4142),
    # squares sum to 6, s = √2; ε = 0.
    assert_allclose(compiled(gdpo_advantages, ddof=0, eps=0.0)(rewards), [1.3660, -0.3660, -1.0], atol=1e-4)


def loop_gdpo(rewards, weights):
    total, applies = np.zeros(rewards.shape[1:]), ~np.isnan(rewards).all(axis=0)
    for reward, weight in zip(rewards, weights, strict=True):
        for n, group in enumerate(reward):
            places = [g for g in range(len(group)) if not np.isnan(group[g])]
            standardised = loop_standardised([float(group[g]) for g in places]) if places else []
            for g, advantage in zip(places, standardised, strict=True):
                total[n, g] += weight * advantage
    if applies.sum() < 2 or np.ptp(total[applies]) < 1e-9:
        return np.zeros(total.shape)
    return np.where(applies, (total - total[applies].mean()) / (total[applies].std(ddof=1) + 1e-6), 0)


jitted_gdpo = jax.jit(gdpo_advantages)
# Weighted 1 and ½, no two standardised rewards of up to four cancel. What is left of those that do is rounding
# noise, and another in the loop.
WEIGHTS = np.array([1, 0.5], np.float32)


@few
@given(hnp.arrays(np.float32, (2, 3, 4), elements=st.one_of(quarters, st.just(float("nan")))))
def test_gdpo_equals_a_plain_loop(rewards):
    advantages = jitted_gdpo(rewards, weights=WEIGHTS)
    assert_allclose(advantages, loop_gdpo(rewards, WEIGHTS.tolist()), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_gdpo_under_jit_equals_eager():
    rewards = np.stack([REWARDS, REWARDS[::-1] ** 2])
    expected = jitted_gdpo(rewards)
    assert_allclose(gdpo_advantages(jnp.asarray(rewards)), expected, rtol=1e-5, atol=1e-6)
    assert_allclose(jitted_gdpo(rewards, weights=np.ones(2, np.float32)), expected, rtol=1e-5, atol=1e-6)


def test_of_one_reward_gdpo_is_the_whitened_standardised_reward():
    expected = compiled(whiten, eps=1e-6)(jitted[group_advantages](REWARDS))
    assert_allclose(jitted_gdpo(REWARDS[None]), expected, rtol=1e-5, atol=1e-6)
    ignored = jitted_gdpo(np.stack([REWARDS, -3 * REWARDS]), weights=np.float32([1, 0]))
    assert_allclose(ignored, expected, rtol=1e-5, atol=1e-6)


def test_gdpo_drowns_no_reward_in_the_scale_of_another():
    small, large = REWARDS, REWARDS[::-1] ** 2
    expected = jitted_gdpo(np.stack([small, large]))
    assert_allclose(jitted_gdpo(np.stack([small, 1024 * large])), expected, rtol=1e-4, atol=1e-5)


def test_what_no_reward_applies_to_stays_out_of_gdpo():
    rewards = np.stack([REWARDS, REWARDS[::-1] ** 2])
    without = rewards.copy()
    without[:, :, 4] = NAN
    advantages = jitted_gdpo(without)
    assert_array_equal(advantages[:, 4], np.zeros(3))
    assert_allclose(advantages[:, :4], jitted_gdpo(rewards[:, :, :4]), rtol=1e-5, atol=1e-6)
    assert_array_equal(jitted_gdpo(np.full_like(rewards, NAN)), np.zeros((3, 5)))


# --- turns ---

jitted_turns = jax.jit(turn_advantages)


def test_turns_by_hand():
    # Returns to go of three episodes, the last of one turn: (1, 1), (0, 0), (2).
    # Turn 1: μ = 1, s = 1: 0, −1, 1. Turn 2: μ = ½, s = √½: 0.7071, −0.7071.
    rewards = np.float32([[[0, 1], [0, 0], [2, 9]]])
    turns = np.array([[[True, True], [True, True], [True, False]]])
    expected = [[[0, 0.7071], [-1, -0.7071], [1, 0]]]
    assert_allclose(jitted_turns(rewards, where=turns), expected, atol=1e-4)
    # With turn 2 of the first alone: all turns of the group are 1, 1, 0, 2, μ = 1, s = √⅔: 0 for it.
    turns[0, 1, 1] = False
    assert_allclose(jitted_turns(rewards, where=turns), [[[0, 0], [-1, 0], [1, 0]]], atol=1e-4)
    # And with a reward of 3 in it: 3, 3, 0, 2, μ = 2, s = √2: 1/√2.
    rewards[0, 0, 1] = 3
    assert_allclose(jitted_turns(rewards, where=turns)[0, 0, 1], 0.7071, atol=1e-4)


def loop_turns(rewards, where):
    advantages = np.zeros(rewards.shape)
    for n, (group, turns) in enumerate(zip(rewards, where, strict=True)):
        returns = {
            (i, k): float(sum(group[i, j] for j in range(k, group.shape[1]) if turns[i, j]))
            for i, k in zip(*np.nonzero(turns), strict=True)
        }
        for k in {place[1] for place in returns}:
            same = [place for place in returns if place[1] == k]
            among = same if len(same) > 1 else list(returns)
            standardised = loop_standardised([returns[place] for place in among])
            for place, advantage in zip(among, standardised, strict=True):
                if place in same:
                    advantages[n, *place] = advantage
    return advantages


@few
@given(hnp.arrays(np.float32, (2, 3, 4), elements=quarters), hnp.arrays(np.int8, (2, 3), elements=st.integers(0, 4)))
def test_turns_equal_a_plain_loop(rewards, lengths):
    where = np.arange(4) < lengths[..., None]
    assert_allclose(jitted_turns(rewards, where=where), loop_turns(rewards, where), rtol=1e-4, atol=1e-4)


def test_turns_that_are_masked_are_turns_that_are_not_there():
    rewards = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
    where = np.ones(rewards.shape, bool)
    where[:, :, 2] = False
    where[:, 3] = False
    advantages = jitted_turns(np.where(where, rewards, np.nan), where=where)
    assert_allclose(advantages[:, :3, :2], jitted_turns(rewards[:, :3, :2]), rtol=1e-5, atol=1e-6)
    assert_array_equal(advantages[~where], 0)


def test_of_one_turn_they_are_those_of_groups():
    rewards = np.random.default_rng(0).normal(size=(2, 4, 1)).astype(np.float32)
    assert_array_equal(jitted_turns(rewards)[..., 0], jax.jit(group_advantages)(rewards[..., 0]))


@pytest.mark.slow
def test_turns_under_jit_equal_eager():
    rewards = np.random.default_rng(0).normal(size=(2, 4, 1)).astype(np.float32)
    assert_allclose(turn_advantages(jnp.asarray(rewards)), jitted_turns(rewards), rtol=1e-6)


def test_equal_returns_of_different_turns_are_equal_whatever_rounding_makes_of_them():
    rewards = np.float32([[[0.1, 0.3, 0.5], [0.5, 0.1, 0.3]]])  # 0.90000004 and 0.9
    advantages = jitted_turns(rewards)
    assert_array_equal(advantages[..., 0], 0)
    assert_allclose(advantages[..., 1], [[0.70711, -0.70711]], atol=1e-4)


# --- spans ---

jitted_spans = jax.jit(span_advantages)


def test_spans_by_hand():
    # Spans end at tokens 1 and 3, and at tokens 0 and 1. Returns to go: (3, 1) and (0, −1).
    # First spans: μ = 1½, s = 3/√2: ±0.7071. Second ones: μ = 0, s = √2: ±0.7071. What is behind the last is of it.
    rewards = np.float32([[[7, 2, 7, 1, 7], [1, -1, 7, 7, 7]]])
    ends = np.array([[[False, True, False, True, False], [True, True, False, False, False]]])
    h = 0.70711
    assert_allclose(jitted_spans(rewards, ends), [[[h, h, h, h, h], [-h, -h, -h, -h, -h]]], atol=1e-4)
    # A third completion of one span, that earned 3: first spans 3, 0, 3, μ = 2, s = √3. Second ones are as before.
    rewards = np.float32([[*rewards[0], [0, 0, 3, 9, 9]]])
    ends = np.array([[*ends[0], [False, False, True, False, False]]])
    first, second = 1 / 3**0.5, -2 / 3**0.5
    expected = [[[first, first, h, h, h], [second, -h, -h, -h, -h], [first] * 5]]
    assert_allclose(jitted_spans(rewards, ends), expected, atol=1e-4)


def loop_spans(rewards, ends):
    """By turns: the number of the span of each token, then their advantages."""
    advantages = np.zeros(rewards.shape)
    for n in range(len(rewards)):
        pairs = [zip(*row, strict=True) for row in zip(rewards[n], ends[n], strict=True)]
        own = [[reward for reward, end in row if end] for row in pairs]
        most = max([1, *map(len, own)])
        by_span = np.array([row + [0.0] * (most - len(row)) for row in own])
        by_turn = loop_turns(by_span[None], np.array([[k < len(row) for k in range(most)] for row in own])[None])[0]
        for i, t in np.ndindex(rewards.shape[1:]):
            if own[i]:
                advantages[n, i, t] = by_turn[i, min(int(ends[n, i, :t].sum()), len(own[i]) - 1)]
    return advantages


@few
@given(hnp.arrays(np.float32, (2, 3, 5), elements=quarters), hnp.arrays(bool, (2, 3, 5)))
def test_spans_equal_a_plain_loop(rewards, ends):
    assert_allclose(jitted_spans(rewards, ends), loop_spans(rewards, ends), rtol=1e-4, atol=1e-4)


def test_spans_of_masked_completions_are_not_there():
    rng = np.random.default_rng(0)
    rewards, ends = rng.normal(size=(2, 4, 6)).astype(np.float32), rng.random((2, 4, 6)) < 0.5
    where = np.arange(4) < np.array([[3], [3]])
    advantages = jitted_spans(np.where(where[..., None], rewards, np.nan), ends, where=where)
    assert_allclose(advantages[:, :3], jitted_spans(rewards[:, :3], ends[:, :3]), rtol=1e-5, atol=1e-6)
    assert_array_equal(advantages[:, 3], 0)


def test_of_one_span_they_are_those_of_groups():
    rewards = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
    ends = np.arange(3) == np.array([[0, 1, 2, 1]] * 2)[..., None]
    given, expected = np.where(ends, rewards[..., None], 0), jax.jit(group_advantages)(rewards)
    assert_array_equal(jitted_spans(given, ends), np.repeat(expected[..., None], 3, -1))


@pytest.mark.slow
def test_spans_under_jit_equal_eager():
    rng = np.random.default_rng(0)
    rewards, ends = rng.normal(size=(2, 4, 3)).astype(np.float32), rng.random((2, 4, 3)) < 0.5
    assert_allclose(span_advantages(jnp.asarray(rewards), jnp.asarray(ends)), jitted_spans(rewards, ends), rtol=1e-6)


def test_gradients_of_spans_are_those_of_differences():
    rewards = jnp.asarray([[0.5, 1.0, -1.0], [2.0, 0.25, 0.0]])
    ends = jnp.asarray([[True, False, True], [False, True, True]])
    check_grads(lambda rewards: jitted_spans(rewards, ends), (rewards,), order=1, modes=["rev"], eps=1e-2, rtol=1e-2)


# --- a batch spread over devices ---


def of_the_batch(rewards, where, axis_name=None):
    several = jnp.stack([jnp.where(where, rewards, jnp.nan), jnp.square(rewards)])
    return {
        "batch_std": batch_std_advantages(rewards, where=where, axis_name=axis_name),
        "gpg": gpg_advantages(rewards, where=where, axis_name=axis_name),
        "gdpo": gdpo_advantages(several, weights=jnp.asarray(WEIGHTS), axis_name=axis_name),
    }


def test_moments_are_global_when_the_batch_is_spread(spread):
    rng = np.random.default_rng(0)
    # Another scale on each device: statistics of its own would differ.
    rewards = (rng.integers(0, 4, (8, 2, 4)) * np.arange(1, 9)[:, None, None]).astype(np.float32)
    rewards[4] = 2  # one device without signal
    where = rng.random((8, 2, 4)) < 0.8
    where[2] = False  # and one with nothing to do
    expected = jax.jit(of_the_batch)(rewards, where)
    for name, advantages in spread(partial(of_the_batch, axis_name="data"))(rewards, where).items():
        assert_allclose(advantages, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


# --- types and scales ---


@pytest.mark.parametrize("scale", [1e-12, 1e20, 1e37])
def test_scaling_by_the_batch_does_not_overflow(scale):
    rewards = np.float32([[3, 0, 0, 0]]) * np.float32(scale)
    assert_allclose(compiled(batch_std_advantages, eps=0.0)(rewards), [[1.5, -0.5, -0.5, -0.5]], rtol=1e-5)


def test_verdicts_may_be_bool():
    # Counted in bool, a hundred completions would be one.
    verdicts = np.array([[True, False], [True, True], [False, False]])
    rewards, lengths = verdicts.astype(np.float32), np.array([[300, 100], [2, 3], [4, 5]])
    names = ("batch_std_advantages", "gpg_advantages", "max_rl_advantages", "best_of_group_advantages", "pass_at_2")
    expected = advantages_by_name(rewards, names=names)
    with jax.numpy_dtype_promotion("standard"):
        for name, advantages in advantages_by_name(verdicts, names=names).items():
            assert_allclose(advantages, expected[name], rtol=1e-6, err_msg=name)
        assert_allclose(compiled(opo_advantages)(verdicts, lengths), [[0.25, -0.75], [0, 0], [0, 0]])


def test_lengths_may_be_longer_than_the_type_of_the_rewards_can_count():
    # 60 000 + 60 000 tokens are more than float16 holds.
    advantages = compiled(opo_advantages)(np.float16([1, 0]), np.array([60_000, 60_000]))
    assert_array_equal(advantages, np.array([0.5, -0.5], np.float16))


@pytest.mark.parametrize("group_size", [4, 7])
def test_rewards_that_cancel_teach_nothing(group_size):
    # r and 2 - 3r have opposite standardised values: what is left of their sum is rounding.
    r = np.random.default_rng(0).integers(0, 2, (8, group_size)).astype(np.float32)
    assert_array_equal(jitted_gdpo(np.stack([r, 2 - 3 * r])), np.zeros_like(r))
