from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from numpy.testing import assert_allclose, assert_array_equal

from grpo_jax.functional import (
    keep_completions,
    masked_weights,
    on_policy_completions,
    rejection_weights,
    sequence_mean_log_ratio,
    token_log_ratio,
    top_entropy_tokens,
    truncated_weights,
)

few = settings(max_examples=25, deadline=None, derandomize=True)
WEIGHTS = [truncated_weights, masked_weights, rejection_weights]
every_weight = pytest.mark.parametrize("function", WEIGHTS)
jitted = {function: jax.jit(function) for function in [*WEIGHTS, on_policy_completions, top_entropy_tokens]}

NAN = np.float32(np.nan)
# Rows of 5, 2, 0 and 2 tokens; the last with a gap.
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 1, 0, 1, 0]], bool)
masks = hnp.arrays(np.bool_, MASK.shape)
numbers = hnp.arrays(np.float32, MASK.shape, elements=st.integers(-8, 8).map(lambda n: n / 4))

# --- weights ---

RATIOS = np.array([0.0, 0.45, 0.55, 0.75, 0.9995, 1.0, 1.0005, 2.0, 4.0, 5.5, 1e9], np.float32)
BY_HAND = {
    truncated_weights: [0, 0.45, 0.55, 0.75, 0.9995, 1, 1.0005, 2, 2, 2, 2],
    masked_weights: [0, 0, 0.55, 0.75, 0.9995, 1, 1.0005, 2, 4, 0, 0],
    rejection_weights: [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0],
}


def log(ratio):
    with np.errstate(divide="ignore"):
        return jnp.asarray(np.log(ratio))


@every_weight
def test_weights_by_hand(function):
    assert_allclose(function(log(RATIOS)), BY_HAND[function], rtol=1e-6)


def test_weights_by_hand_of_other_bounds():
    ratios = log(np.array([0.0, 0.25, 2.5, 3.5], np.float32))
    assert_allclose(truncated_weights(ratios, cap=3.0), [0, 0.25, 2.5, 3], rtol=1e-6)
    assert_allclose(masked_weights(ratios, low=0.0, high=3.0), [0, 0.25, 2.5, 0], rtol=1e-6)
    assert_allclose(rejection_weights(ratios, low=0.2, high=3.0), [0, 1, 1, 0])


def test_bounds_belong_to_what_is_kept():
    # exp(0) is 1 without rounding.
    one = jnp.zeros(1)
    for bounds in ({"low": 1.0, "high": 2.0}, {"low": 0.5, "high": 1.0}):
        assert_array_equal(masked_weights(one, **bounds), [1])
        assert_array_equal(rejection_weights(one, **bounds), [1])


LOOPS = {
    truncated_weights: lambda w: min(w, 2),
    masked_weights: lambda w: w if 0.5 <= w <= 5 else 0.0,
    rejection_weights: lambda w: 1.0 if 0.999 <= w <= 1.001 else 0.0,
}


@every_weight
@few
@given(hnp.arrays(np.float32, MASK.shape, elements=st.integers(-40, 40).map(lambda n: n**3 / 25_601)))
def test_weights_equal_a_plain_loop(function, log_ratio):
    expected = [[LOOPS[function](w) for w in row] for row in np.exp(log_ratio.astype(float))]
    assert_allclose(jitted[function](log_ratio), expected, rtol=1e-5)


@pytest.mark.slow
@every_weight
def test_weights_under_jit_and_vmap_equal_eager(function):
    log_ratio = np.random.default_rng(0).normal(size=MASK.shape).astype(np.float32)
    expected = function(jnp.asarray(log_ratio))
    assert_allclose(jitted[function](log_ratio), expected, rtol=1e-6)
    assert_allclose(jax.jit(jax.vmap(function))(log_ratio), expected, rtol=1e-6)


@every_weight
def test_weights_have_no_gradient(function):
    gradient = jax.jit(jax.grad(lambda d: jnp.sum(function(d))))
    assert_array_equal(gradient(log(RATIOS[1:])), np.zeros(10))
    assert_array_equal(gradient(jnp.array([-200.0, 200.0])), np.zeros(2))  # exp is 0 and infinite


@every_weight
def test_what_is_masked_weighs_one(function):
    # As the log-ratios write 0 there, whatever the log-probabilities are.
    logprobs, old_logprobs = (jnp.where(MASK, x, jnp.nan) for x in (jnp.full(MASK.shape, -1.0), jnp.zeros(MASK.shape)))
    weights = function(token_log_ratio(logprobs, old_logprobs, jnp.asarray(MASK)))
    assert_array_equal(np.asarray(weights)[~MASK], 1)


def test_of_a_completion_the_geometric_mean_decides():
    # Ratios of 1.1 and 1/1.1 have the geometric mean 1, of 1.1 and 1 more.
    logprobs = log(np.array([[1.1, 1 / 1.1, 9.0], [1.1, 1.0, 9.0]], np.float32))
    mask = jnp.array([[True, True, False], [True, True, False]])
    weights = rejection_weights(sequence_mean_log_ratio(logprobs, jnp.zeros((2, 3)), mask))
    assert_array_equal(np.asarray(weights)[:, :2], [[1, 1], [0, 0]])


# --- completions that the policy has left ---


def test_on_policy_completions_by_hand():
    # Drifts: mean(2, 1) = 1.5, mean(−2, −1) = −1.5, mean(4, ·) = 4 where the second is masked.
    log_ratio = jnp.array([[-2.0, -1.0], [-2.0, -1.0], [2.0, 1.0], [-4.0, 99.0]])
    mask = jnp.array([[True, True], [True, True], [True, True], [True, False]])
    advantages = jnp.array([1.0, -1.0, -1.0, -1.0])
    keep = partial(on_policy_completions, log_ratio, advantages, mask)
    assert_array_equal(keep(threshold=1.0), [[1, 1], [0, 0], [1, 1], [0, 0]])
    assert_array_equal(keep(threshold=1.5), [[1, 1], [1, 1], [1, 1], [0, 0]])  # 1.5 is not above 1.5
    assert_array_equal(keep(threshold=4.0), mask)
    assert_array_equal(keep(threshold=-2.0), [[1, 1], [0, 0], [0, 0], [0, 0]])
    # What is worth nothing is not punished.
    assert_array_equal(on_policy_completions(log_ratio, jnp.zeros(4), mask, threshold=1.0), mask)
    # One advantage a token: of a completion that drifted the negative ones go.
    of_tokens = jnp.array([[-1.0, 1.0], [1.0, -1.0], [-1.0, -1.0], [0.0, -1.0]])
    kept = on_policy_completions(log_ratio, of_tokens, mask, threshold=1.0)
    assert_array_equal(kept, [[0, 1], [1, 0], [1, 1], [1, 0]])


def loop_on_policy_completions(log_ratio, advantages, mask, threshold):
    kept = mask.copy()
    for i in range(len(mask)):
        drifts = [-float(log_ratio[i, t]) for t in range(mask.shape[1]) if mask[i, t]]
        for t in range(mask.shape[1]):
            if drifts and advantages[i, t] < 0 and sum(drifts) / len(drifts) > threshold:
                kept[i, t] = False
    return kept


@few
@given(numbers, numbers, masks)
def test_on_policy_completions_equal_a_plain_loop(log_ratio, advantages, mask):
    # Means of quarters over up to five tokens never are 0.26.
    expected = loop_on_policy_completions(log_ratio, advantages, mask, 0.26)
    rubbish = np.where(mask, log_ratio, NAN)
    assert_array_equal(jitted[on_policy_completions](rubbish, advantages, mask, threshold=0.26), expected)
    of_rows = np.broadcast_to(advantages[:, :1], mask.shape)
    expected = loop_on_policy_completions(log_ratio, of_rows, mask, 0.26)
    assert_array_equal(jitted[on_policy_completions](rubbish, advantages[:, 0], mask, threshold=0.26), expected)


def test_on_policy_completions_by_completion_under_vmap_and_eager():
    log_ratio = np.random.default_rng(0).normal(size=MASK.shape).astype(np.float32)
    advantages = np.array([-1, 1, -1, -1], np.float32)
    expected = jitted[on_policy_completions](log_ratio, advantages, MASK, threshold=0.0)
    assert np.any(np.asarray(expected) != MASK)
    arrays = [jnp.asarray(x) for x in (log_ratio, advantages, MASK)]
    assert_array_equal(on_policy_completions(*arrays, threshold=0.0), expected)
    assert_array_equal(jax.jit(jax.vmap(partial(on_policy_completions, threshold=0.0)))(*arrays), expected)
    deep = jitted[on_policy_completions](*(x.reshape(2, 2, *x.shape[1:]) for x in arrays), threshold=0.0)
    assert_array_equal(deep.reshape(MASK.shape), expected)
    wide = [jnp.pad(x, ((0, 0), (0, 3))) if x.ndim == 2 else x for x in arrays]
    assert_array_equal(jitted[on_policy_completions](*wide, threshold=0.0)[:, :5], expected)


# --- the tokens of largest entropy ---


def test_top_entropy_tokens_by_hand():
    # Of 5 tokens a share of ½ keeps 1 + ⌊½ · 4⌋ = 3: 9, 7 and 5. The 99 is masked.
    entropy, mask = jnp.array([[9.0, 1, 7], [99, 3, 5]]), jnp.array([[True, True, True], [False, True, True]])
    assert_array_equal(top_entropy_tokens(entropy, mask, share=0.5), [[1, 0, 1], [0, 0, 1]])
    assert_array_equal(top_entropy_tokens(entropy, mask, share=1.0), mask)
    assert_array_equal(top_entropy_tokens(entropy, mask, share=1e-3), [[1, 0, 0], [0, 0, 0]])
    assert_array_equal(top_entropy_tokens(entropy, mask), [[1, 0, 0], [0, 0, 0]])  # 1 + ⌊0.8⌋
    assert_array_equal(top_entropy_tokens(entropy, mask, share=0.25), [[1, 0, 1], [0, 0, 0]])  # 1 + ⌊1⌋


def loop_top_entropy(entropy, mask, share):
    descending = sorted((float(h) for h, m in zip(entropy.ravel(), mask.ravel(), strict=True) if m), reverse=True)
    if not descending:
        return np.zeros(mask.shape, bool)
    threshold = descending[int(share * (len(descending) - 1))]
    return mask & (entropy >= threshold)


# Few levels: most tokens have a tie.
entropies = hnp.arrays(np.float32, MASK.shape, elements=st.integers(0, 4).map(lambda n: n / 4))


@few
@given(entropies, masks, st.integers(0, 20).map(lambda n: Fraction(n, 20)))
def test_top_entropy_tokens_equal_a_plain_loop(entropy, mask, share):
    expected = loop_top_entropy(entropy, mask, share)
    for rubbish in (np.nan, 1e9, -1e9):
        entropy = np.where(mask, entropy, np.float32(rubbish))
        assert_array_equal(jitted[top_entropy_tokens](entropy, mask, share=float(share)), expected)


@pytest.mark.parametrize("num_tokens", [1, 2, 11, 51, 101, 201])
def test_shares_are_not_rounded_down_by_the_binary_system(num_tokens):
    # 0.29 · 100 is 28.999999999999996 in float64, and 0.2 · 10 may be less than 2 in float32.
    hundredths = np.arange(101)
    entropy = np.random.default_rng(0).permutation(201).astype(np.float32)
    of_shares = jax.jit(jax.vmap(lambda mask, share: top_entropy_tokens(entropy, mask, share=share), (None, 0)))
    kept = of_shares(np.arange(201) < num_tokens, (hundredths / 100).astype(np.float32))
    assert_array_equal(np.sum(kept, axis=1), 1 + hundredths * (num_tokens - 1) // 100)


def test_ties_with_the_last_are_kept():
    # 1 + ⌊0.2 · 5⌋ = 2 of six; the second has two equals.
    entropy = jnp.array([1.0, 3, 1, 2, 2, 2])
    assert_array_equal(top_entropy_tokens(entropy, jnp.ones(6, bool)), [0, 1, 0, 1, 1, 1])


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_of_no_tokens_none_are_kept(share):
    none = np.zeros(MASK.shape, bool)
    assert_array_equal(jitted[top_entropy_tokens](np.full(MASK.shape, 1, np.float32), none, share=share), none)


def test_top_entropy_tokens_of_any_shape_and_padding():
    entropy = np.random.default_rng(0).random(MASK.shape).astype(np.float32)
    expected = jitted[top_entropy_tokens](entropy, MASK, share=0.5)
    assert np.sum(expected) == 5  # 1 + ⌊½ · 8⌋
    assert_array_equal(top_entropy_tokens(jnp.asarray(entropy), jnp.asarray(MASK), share=0.5), expected)
    deep = jitted[top_entropy_tokens](entropy.reshape(2, 2, 5), MASK.reshape(2, 2, 5), share=0.5)
    assert_array_equal(deep.reshape(MASK.shape), expected)
    padded = jitted[top_entropy_tokens](
        np.pad(entropy, ((0, 1), (2, 0)), constant_values=9), np.pad(MASK, ((0, 1), (2, 0))), share=0.5
    )
    assert_array_equal(padded[:4, 2:], expected)
    # A batch of batches: each has its own quantile.
    several = jax.jit(jax.vmap(partial(top_entropy_tokens, share=0.5), (0, None)))
    assert_array_equal(several(np.stack([entropy, 9 * entropy]), MASK), np.stack([expected, expected]))


def test_top_entropy_tokens_of_a_batch_over_devices_are_those_of_the_whole(spread):
    rng = np.random.default_rng(0)
    # Another scale on each device: quantiles of its own would differ. Ties, and one device without tokens.
    entropy = (rng.integers(0, 5, (8, 3, 4)) * np.arange(1, 9)[:, None, None]).astype(np.float32)
    mask = rng.random((8, 3, 4)) < 0.8
    mask[2] = False
    expected = jitted[top_entropy_tokens](entropy, mask, share=0.3)
    over_devices = spread(partial(top_entropy_tokens, share=0.3, axis_name="data"))
    assert_array_equal(over_devices(entropy, mask), expected)
    assert np.any(np.asarray(jax.vmap(partial(top_entropy_tokens, share=0.3))(entropy, mask)) != expected)


# --- completions ---


@few
@given(masks, hnp.arrays(np.bool_, len(MASK)))
def test_keep_completions_equals_a_plain_loop(mask, keep):
    expected = [[bool(m) and bool(k) for m in row] for row, k in zip(mask, keep, strict=True)]
    kept = keep_completions(jnp.asarray(mask), jnp.asarray(keep))
    assert kept.dtype == bool
    assert_array_equal(kept, expected)
    assert_array_equal(keep_completions(jnp.asarray(mask[None]), jnp.asarray(keep[None]))[0], expected)
