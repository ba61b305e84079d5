"""What `grpo_loss` sums: terms, from log-probabilities, advantages and a mask to a loss per token."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import Mesh, PartitionSpec
from numpy.testing import assert_allclose, assert_array_equal

from grpo_jax.functional import (
    cispo_surrogate,
    clip_cov_term,
    clipped_surrogate,
    dppo_term,
    gmpo_term,
    gspo_log_ratio,
    kl_cov_term,
    masked_weights,
    ratio_term,
    reinforce_term,
    rejection_weights,
    sapo_surrogate,
    sequence_log_ratio,
    sequence_mean_log_ratio,
    sequence_mean_weights,
    sequence_sum_weights,
    token_covariance,
    token_log_ratio,
    token_mean_weights,
    truncated_weights,
    unclipped_surrogate,
    vespo_term,
)

KEY = jax.random.key(0)
# With a share of all tokens, which are chosen does not depend on random numbers or on padding.
clip_cov = partial(clip_cov_term, key=KEY, share=1.0, covariance_low=0.1, covariance_high=9.0)
RATIO_TERMS = {
    "clipped": (token_log_ratio, clipped_surrogate),
    "bounded": (token_log_ratio, partial(clipped_surrogate, delta=4.0)),
    "unclipped": (token_log_ratio, unclipped_surrogate),
    "cispo": (token_log_ratio, cispo_surrogate),
    "sapo": (token_log_ratio, sapo_surrogate),
    "sequence": (sequence_log_ratio, clipped_surrogate),
    "sequence_mean": (sequence_mean_log_ratio, clipped_surrogate),
    "gspo": (gspo_log_ratio, clipped_surrogate),
}
OTHER_TERMS = {
    "reinforce": reinforce_term,
    "gmpo": gmpo_term,
    "dppo": dppo_term,
    "vespo": vespo_term,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov_term,
}
TERMS = {name: ratio_term(*pair) for name, pair in RATIO_TERMS.items()} | OTHER_TERMS
OF_COMPLETIONS = {"sequence", "sequence_mean", "gmpo"}
OF_THE_BATCH = {"clip_cov", "kl_cov"}
every_term = pytest.mark.parametrize("name", TERMS)
# A ratio of tokens, one of completions, and two that choose tokens of the batch: the others are made of the same parts.
TYPICAL = ("clipped", "sequence", "clip_cov", "kl_cov")
typical_terms = pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in TYPICAL else pytest.mark.slow) for x in TERMS]
)
few = settings(max_examples=25, deadline=None, derandomize=True)

# Rows of 4, 2, 0 and 2 tokens; the last has its tokens in the middle.
MASK = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 0]], bool)
ADVANTAGES = np.array([1.5, -0.7, 3.0, -0.2], np.float32)


def random_logprobs(seed=0, shape=MASK.shape):
    """logprobs, old_logprobs; no ratio is near a kink at 0.8, 1.2, e^±0.4, 3 or 4, and no probability moves by 0.2."""
    rng = np.random.default_rng(seed)
    logprobs = -rng.exponential(size=shape).astype(np.float32)
    return logprobs, logprobs - rng.choice([-0.6, -0.1, 0.1, 0.6], size=shape).astype(np.float32)


@cache
def evaluated(name):
    """(logprobs, old_logprobs, advantages, mask, weights) -> loss per token, gradients of both log-probabilities."""

    def total(logprobs, old_logprobs, advantages, mask, weights):
        loss = TERMS[name](logprobs, old_logprobs, advantages, mask)
        return jnp.sum(weights * jnp.where(mask, loss, 0)), loss

    def function(*arguments):
        gradients, loss = jax.grad(total, (0, 1), has_aux=True)(*arguments)
        return loss, *gradients

    return jax.jit(function)


WEIGHTS = np.where(MASK, np.arange(1, 17).reshape(4, 4), 0).astype(np.float32)


def arguments(seed=0):
    return *random_logprobs(seed), ADVANTAGES, MASK, WEIGHTS


def padded(*arrays, fill=0):
    """The arrays, three tokens wider."""
    return [np.pad(x, ((0, 0), (0, 3)), constant_values=np.array(fill).astype(x.dtype)) for x in arrays]


# --- every term ---


# Without a compiler each operation is a program of its own.
@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x == "gspo" else pytest.mark.slow) for x in TERMS])
def test_jit_equals_eager(name):
    *inputs, _ = arguments()
    expected = TERMS[name](*map(jnp.asarray, inputs))
    assert expected.shape == MASK.shape
    assert_allclose(evaluated(name)(*arguments())[0], expected, rtol=1e-5, atol=1e-6)


@typical_terms
def test_leading_axes_and_vmap(name):
    # Two batches at once, each of two groups of two completions.
    batches = [np.stack(pair) for pair in zip(arguments(0), arguments(1), strict=True)]
    deep = [x.reshape(2, 2, 2, *x.shape[2:]) for x in batches]
    one_at_a_time = [evaluated(name)(*arguments(seed)) for seed in (0, 1)]
    for result, *expected in zip(jax.vmap(evaluated(name))(*deep), *one_at_a_time, strict=True):
        assert_allclose(result, np.stack(expected).reshape(2, 2, 2, 4), rtol=1e-5, atol=1e-6)


@every_term
def test_masked_is_physically_removed(name):
    loss, gradient, _ = evaluated(name)(*arguments())
    logprobs, old_logprobs, advantages, mask, weights = arguments()
    if name in OF_THE_BATCH:  # one completion of all tokens
        by_token = np.broadcast_to(advantages[:, None], mask.shape)
        pieces = [[x[mask][None] for x in (logprobs, old_logprobs, by_token, mask, weights)]]
        kept = [mask]
    else:
        kept = [np.ix_([i], mask[i]) for i in (1, 3)]
        pieces = [[x[k] if x.ndim == 2 else x[k[0][0]] for x in arguments()] for k in kept]
    for k, piece in zip(kept, pieces, strict=True):
        piece_loss, piece_gradient, _ = evaluated(name)(*piece)
        assert_allclose(np.ravel(loss[k]), piece_loss[0], rtol=1e-5, atol=1e-6)
        assert_allclose(np.ravel(gradient[k]), piece_gradient[0], rtol=1e-5, atol=1e-6)
    assert_array_equal(np.asarray(gradient)[~MASK], np.zeros(np.sum(~MASK)))
    if name in OTHER_TERMS:
        assert_array_equal(np.asarray(loss)[~MASK], np.zeros(np.sum(~MASK)))


@every_term
def test_padding_and_rubbish_in_masked_slots_change_nothing(name):
    logprobs, old_logprobs, advantages, mask, weights = arguments()
    by_token = np.broadcast_to(advantages[:, None], mask.shape)
    clean = (*padded(logprobs, old_logprobs, by_token, mask, weights),)
    expected = evaluated(name)(*clean)
    for result, narrow in zip(expected, evaluated(name)(*arguments()), strict=True):
        assert_allclose(np.where(MASK, result[:, :4], 0), np.where(MASK, narrow, 0), rtol=1e-5, atol=1e-6)
    wide_mask = clean[3]
    for rubbish in [1e4, -1e4, np.inf, -np.inf, np.nan]:
        dirty = [np.where(wide_mask, x, np.float32(rubbish)) for x in clean[:3]]
        for is_dirty in [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)]:
            inputs = (d if flag else x for d, x, flag in zip(dirty, clean[:3], is_dirty, strict=True))
            (loss, *gradients), (clean_loss, *clean_gradients) = evaluated(name)(*inputs, *clean[3:]), expected
            # A term of ratios alone may be NaN where the advantages of masked slots are.
            seen = wide_mask | (name in OTHER_TERMS)
            assert_array_equal(np.where(seen, loss, 0), np.where(seen, clean_loss, 0))
            assert_array_equal(gradients, clean_gradients)


@typical_terms
def test_advantages_of_completions_equal_advantages_of_tokens(name):
    inputs = list(arguments())
    expected = evaluated(name)(*inputs)
    inputs[2] = np.broadcast_to(ADVANTAGES[:, None], MASK.shape)
    for result, by_row in zip(evaluated(name)(*inputs), expected, strict=True):
        assert_allclose(np.where(MASK, result, 0), np.where(MASK, by_row, 0), rtol=1e-6)


@every_term
def test_old_logprobs_have_no_gradient(name):
    _, gradient, old_gradient = evaluated(name)(*arguments())
    assert np.any(np.asarray(gradient) != 0)
    assert_array_equal(old_gradient, np.zeros_like(MASK))


@every_term
def test_far_policies_stay_finite(name):
    logprobs, old_logprobs, *rest = arguments()
    for difference in (1e4, -1e4):
        for result in evaluated(name)(logprobs, logprobs + np.float32(difference), *rest):
            assert np.all(np.isfinite(result))
    # A token that the policy can no longer say, and a completion that it could not say before.
    impossible = np.where(np.arange(4) == 1, np.float32(-1e30), logprobs)
    for pair in ((impossible, old_logprobs), (logprobs, impossible)):
        for result in evaluated(name)(*pair, *rest):
            assert np.all(np.isfinite(result))


@typical_terms
def test_16_bits_are_computed_in_32(name):
    logprobs, old_logprobs, *rest = arguments()
    short = [x.astype(jnp.bfloat16) for x in (logprobs, old_logprobs)]
    loss, gradient, _ = evaluated(name)(*short, *rest)
    expected, expected_gradient, _ = evaluated(name)(*(x.astype(np.float32) for x in short), *rest)
    assert loss.dtype == jnp.float32
    assert_allclose(loss, expected, rtol=1e-6)
    assert_allclose(gradient.astype(np.float32), expected_gradient, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("name", [n for n in TERMS if n not in {"cispo", "vespo", "gspo"}])
def test_gradient_equals_finite_differences(name):
    # CISPO and VESPO hold their weights constant, and GSPO's has another gradient than its value, by design.
    logprobs, *rest = arguments()
    _, gradient, _ = evaluated(name)(logprobs, *rest)

    def total(logprobs):
        loss, _, _ = evaluated(name)(logprobs, *rest)
        return np.sum(WEIGHTS * np.where(MASK, loss, 0), dtype=float)

    for i in range(16):
        move = np.eye(16, dtype=np.float32)[i].reshape(4, 4) * np.float32(0.01)
        slope = (total(logprobs + move) - total(logprobs - move)) / 0.02
        assert_allclose(np.ravel(gradient)[i], slope, rtol=5e-3, atol=1e-2)


AGGREGATIONS = [token_mean_weights, sequence_mean_weights, sequence_sum_weights]


@pytest.mark.parametrize("name", [n for n in TERMS if n != "clip_cov"])
def test_on_policy_gradient_is_reinforce(name):
    # Not Clip-Cov's: the tokens that it chooses have none. KL-Cov's |d| has slope 0 at d = 0.
    logprobs, _ = random_logprobs()
    for aggregation in AGGREGATIONS:
        weights = np.asarray(aggregation(jnp.asarray(MASK)))
        _, gradient, _ = evaluated(name)(logprobs, logprobs, ADVANTAGES, MASK, weights)
        # Of one number a completion, its ratio is on all tokens: the product of theirs, or their geometric mean.
        of_row = weights.sum(axis=1, keepdims=True)
        if name in OF_COMPLETIONS:
            of_token = of_row if name == "sequence" else of_row / np.maximum(MASK.sum(axis=1, keepdims=True), 1)
            weights = np.where(MASK, of_token, 0)
        assert_allclose(gradient, -ADVANTAGES[:, None] * weights, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", ["sequence", "sequence_mean", "gspo", "gmpo"])
def test_of_one_token_a_completion_s_ratio_is_the_token_s(name):
    logprobs, old_logprobs, advantages, _, weights = arguments()
    first = np.arange(4) == np.array([0, 1, 3, 2])[:, None]  # one token a completion, anywhere
    # GMPO clips in log space: from e^−0.4 to e^0.4.
    epsilons = {"epsilon_low": 1 - np.exp(-0.4), "epsilon_high": np.exp(0.4) - 1} if name == "gmpo" else {}

    def token_term(logprobs):
        loss = TERMS["clipped"](logprobs, old_logprobs, advantages, first, **epsilons)
        return jnp.sum(np.where(first, weights, 0) * loss), loss

    expected_gradient, expected = jax.jit(jax.grad(token_term, has_aux=True))(logprobs)
    loss, gradient, _ = evaluated(name)(logprobs, old_logprobs, advantages, first, weights)
    assert_allclose(loss[first], expected[first], rtol=1e-6)
    assert_allclose(gradient, expected_gradient, rtol=1e-6)


# --- terms of ratios ---


@pytest.mark.parametrize("name", RATIO_TERMS)
def test_ratio_term_is_its_surrogate_of_its_log_ratio(name):
    log_ratio, surrogate = RATIO_TERMS[name]
    constants = {"sapo": {"tau_positive": 2.0}, "unclipped": {}}.get(name, {"epsilon_low": 0.01, "epsilon_high": 0.02})
    inputs = [jnp.asarray(x) for x in arguments()[:4]]
    expected = surrogate(log_ratio(*inputs[:2], inputs[3]), inputs[2], **constants)
    assert_array_equal(ratio_term(log_ratio, surrogate)(*inputs, **constants), expected)
    if constants:
        assert not np.allclose(expected, TERMS[name](*inputs))


def test_a_constant_that_the_surrogate_does_not_take_is_refused():
    with pytest.raises(TypeError, match="epsilon_low"):
        TERMS["unclipped"](*map(jnp.asarray, arguments()[:4]), epsilon_low=0.1)


# --- REINFORCE, GMPO, DPPO, VESPO: by hand ---


def test_reinforce_by_hand():
    logprobs, mask = jnp.array([[-1.0, -2.0, -3.0]]), jnp.array([[True, True, False]])
    assert_allclose(reinforce_term(logprobs, logprobs, jnp.array([-0.5]), mask), [[-0.5, -1.0, 0.0]])
    # The old policy is not read.
    assert_allclose(reinforce_term(logprobs, jnp.full((1, 3), jnp.nan), jnp.array([-0.5]), mask), [[-0.5, -1.0, 0.0]])


@pytest.mark.parametrize(
    ("advantage", "epsilons", "exponent"),
    [
        # d = (1, −1, 0.1), then a masked slot. Against A > 0 the clip holds 1 to 0.4, against A < 0 −1 to −0.4.
        (2.0, {}, (0.4 - 1 + 0.1) / 3),
        (-2.0, {}, (1 - 0.4 + 0.1) / 3),
        (2.0, {"epsilon_low": 0.05, "epsilon_high": 0.08}, (0.08 - 1 + 0.08) / 3),
        (-2.0, {"epsilon_low": 0.05, "epsilon_high": 0.08}, (1 - 0.05 + 0.1) / 3),
    ],
)
def test_gmpo_by_hand(advantage, epsilons, exponent):
    old_logprobs, mask = jnp.full((1, 4), -2.0), jnp.array([[True, True, True, False]])
    logprobs = old_logprobs + jnp.array([[1.0, -1.0, 0.1, 9.0]])
    loss = gmpo_term(logprobs, old_logprobs, jnp.array([advantage]), mask, **epsilons)
    assert_allclose(loss, -advantage * np.exp(exponent) * np.array([[1, 1, 1, 0]]), rtol=1e-5)


@pytest.mark.parametrize(
    ("constants", "good", "bad"),
    [
        # π = (0.9, 0.02, 0.1, 0.5), π_s = (0.5, 0.01, 0.5, 0.5): moved by 0.4, 0.01, −0.4 and 0; ρ = 1.8, 2, 0.2, 1.
        # A = 1 loses the first, A = −1 the third, however far the ratio of the second is.
        ({"penalty": 0.0}, [0, -2, -0.2, -1], [1.8, 2, 0, 1]),
        ({"penalty": 0.0, "threshold": 0.005}, [0, 0, -0.2, -1], [1.8, 2, 0, 1]),
        ({"penalty": 0.0, "threshold": 0.5}, [-1.8, -2, -0.2, -1], [1.8, 2, 0.2, 1]),
        # The square stays on every token: 0.5 (log ρ)².
        (
            {"penalty": 0.5},
            [0.5 * np.log(1.8) ** 2, -2 + 0.5 * np.log(2) ** 2, -0.2 + 0.5 * np.log(5) ** 2, -1],
            [1.8 + 0.5 * np.log(1.8) ** 2, 2 + 0.5 * np.log(2) ** 2, 0.5 * np.log(5) ** 2, 1],
        ),
    ],
)
def test_dppo_by_hand(constants, good, bad):
    logprobs = jnp.log(jnp.array([[0.9, 0.02, 0.1, 0.5]] * 2))
    sampler_logprobs = jnp.log(jnp.array([[0.5, 0.01, 0.5, 0.5]] * 2))
    loss = dppo_term(logprobs, sampler_logprobs, jnp.array([1.0, -1.0]), jnp.ones((2, 4), bool), **constants)
    assert_allclose(loss, [good, bad], rtol=1e-5, atol=1e-7)


def test_dropped_tokens_of_dppo_keep_the_gradient_of_the_square_alone():
    # d = log 1.8 on both: A = 1 is dropped, and 2 · 0.001 log 1.8 is left; A = −1 adds 1.8.
    logprobs, sampler_logprobs = (np.log(np.full((4, 4), x, np.float32)) for x in (0.9, 0.5))
    advantages, everything = np.float32([1, -1, 1, -1]), np.ones((4, 4), bool)
    _, gradient, _ = evaluated("dppo")(logprobs, sampler_logprobs, advantages, everything, np.ones((4, 4), np.float32))
    square = 0.002 * np.log(1.8)
    assert_allclose(gradient, np.where(advantages[:, None] > 0, square, 1.8 + square) * everything, rtol=1e-5)


def test_vespo_by_hand():
    # W = 2 in both completions. A = 1: φ = exp(3 + 2 log 2 − 3 · 2) = 4 e⁻³; A = −1: exp(2 + 3 log 2 − 2 · 2) = 8 e⁻².
    logprobs = jnp.array([[-1.0, -2.0, 5.0]] * 2)
    old_logprobs = logprobs - jnp.log(jnp.array([[4.0, 0.5, 9.0]] * 2))
    mask = jnp.array([[True, True, False]] * 2)

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def gradient(logprobs, **constants):
        loss = vespo_term(logprobs, old_logprobs, jnp.array([1.0, -1.0]), mask, **constants)
        return jnp.sum(loss), loss

    weights, signs = np.array([[4 * np.exp(-3)], [8 * np.exp(-2)]]), np.array([[1], [-1]])
    slope, loss = gradient(logprobs)
    assert_allclose(loss, signs * weights * np.array([[1, 2, 0]]), rtol=1e-5)
    assert_allclose(slope, -signs * weights * np.array([[1, 1, 0]]), rtol=1e-5)  # φ is held constant
    _, loss = gradient(logprobs, k_positive=1.0, lambda_positive=0.5, k_negative=0.0, lambda_negative=1.0)
    weights = np.array([[2 * np.exp(-0.5)], [np.exp(-1.0)]])
    assert_allclose(loss, signs * weights * np.array([[1, 2, 0]]), rtol=1e-5)


def test_vespo_takes_the_constants_of_each_token_by_the_sign_of_its_advantage():
    # W = 2, as above; a completion with both signs is made of the tokens of one with each.
    logprobs, mask = jnp.array([-1.0, -2.0, -3.0]), jnp.array([True, True, False])
    old_logprobs = logprobs - jnp.log(jnp.array([4.0, 0.5, 9.0]))
    loss = vespo_term(logprobs, old_logprobs, jnp.array([1.0, -1.0, 1.0]), mask)
    assert_allclose(loss, [4 * np.exp(-3), -2 * 8 * np.exp(-2), 0], rtol=1e-5)


def test_vespo_bounds_the_completion_s_ratio():
    # Tokens within ±20, so that (25, −5) is 15; completions from log 1e-8 to 20.
    # φ is e^15, 1e-8 and e^20 each, with k = 1 and λ = 0.
    logprobs, mask = jnp.zeros((3, 2)) - 1, jnp.ones((3, 2), bool)
    old_logprobs = logprobs - jnp.array([[25.0, -5.0], [-30.0, 5.0], [15.0, 15.0]])
    term = jax.jit(partial(vespo_term, k_positive=1.0, lambda_positive=0.0))
    loss = term(logprobs, old_logprobs, jnp.ones(3), mask)
    expected = np.exp([15, -15, 20])
    assert_allclose(loss, np.broadcast_to(expected[:, None], (3, 2)), rtol=1e-4)
    loss = term(logprobs, logprobs + 15, jnp.ones(3), mask)
    assert_allclose(loss, np.full((3, 2), 1e-8), rtol=1e-4)


# --- plain loops ---


def loop_completion(name, new, old, advantages):
    """The term of a completion's tokens, with default constants."""
    d = [a - b for a, b in zip(new, old, strict=True)]
    if name == "reinforce":
        return [-a * x for a, x in zip(advantages, new, strict=True)]
    if name == "gmpo":
        total = 0
        for a, x in zip(advantages, d, strict=True):
            total += min(x, 0.4) if a > 0 else max(x, -0.4)
        return [-a * np.exp(total / len(d)) for a in advantages]
    if name == "dppo":
        loss = []
        for a, x, y in zip(advantages, new, old, strict=True):
            moved = np.exp(x) - np.exp(y)
            dropped = moved > 0.2 if a > 0 else moved < -0.2
            loss.append((0 if dropped else -np.exp(x - y) * a) + 1e-3 * (x - y) ** 2)
        return loss
    log_w = max(min(sum(max(min(x, 20), -20) for x in d), 20), np.log(1e-8))
    loss = []
    for a, x in zip(advantages, new, strict=True):
        k, lam = (2, 3) if a >= 0 else (3, 2)
        loss.append(-np.exp(lam + k * log_w - lam * np.exp(log_w)) * a * x)
    return loss


@pytest.mark.parametrize("name", ["reinforce", "gmpo", "dppo", "vespo"])
@few
@given(st.integers(0, 999))
def test_term_equals_a_plain_loop(name, seed):
    rng = np.random.default_rng(seed)
    logprobs, old_logprobs = (-rng.exponential(size=(4, 4)).astype(np.float32) for _ in range(2))
    advantages, mask = rng.normal(size=4).astype(np.float32), rng.random((4, 4)) < 0.7
    loss, _, _ = evaluated(name)(logprobs, old_logprobs, advantages, mask, WEIGHTS)
    expected = np.zeros((4, 4))
    for i in np.flatnonzero(mask.any(axis=1)):
        new, old = logprobs[i, mask[i]].astype(float), old_logprobs[i, mask[i]].astype(float)
        expected[i, mask[i]] = loop_completion(name, new, old, [float(advantages[i])] * len(new))
    assert_allclose(loss, expected, rtol=1e-4, atol=1e-6)


# --- covariances ---


def loop_covariance(logprobs, advantages, mask):
    tokens = list(zip(*np.nonzero(mask), strict=True))
    mean_logprob = sum(float(logprobs[i, t]) for i, t in tokens) / max(len(tokens), 1)
    mean_advantage = sum(float(advantages[i]) for i, _ in tokens) / max(len(tokens), 1)
    result = np.zeros(mask.shape)
    for i, t in tokens:
        result[i, t] = (advantages[i] - mean_advantage) * (logprobs[i, t] - mean_logprob)
    return result


jitted_covariance = jax.jit(token_covariance)


def test_covariance_by_hand():
    # Tokens of log π −1, −2 and −6, mean −3, and A = 2, 2, −1, mean 1: (1 · 2, 1 · 1, −2 · −3).
    logprobs, mask = jnp.array([[-1.0, -2.0], [-6.0, -50.0]]), jnp.array([[True, True], [True, False]])
    assert_allclose(token_covariance(logprobs, jnp.array([2.0, -1.0]), mask), [[2, 1], [6, 0]])
    by_token = jnp.array([[2.0, 2.0], [-1.0, jnp.nan]])
    assert_allclose(token_covariance(logprobs, by_token, mask), [[2, 1], [6, 0]])


@few
@given(st.integers(0, 999))
def test_covariance_equals_a_plain_loop(seed):
    rng = np.random.default_rng(seed)
    logprobs, advantages = -rng.exponential(size=(4, 4)).astype(np.float32), rng.normal(size=4).astype(np.float32)
    mask = rng.random((4, 4)) < rng.random()
    covariance = jitted_covariance(logprobs, advantages, mask)
    assert_allclose(covariance, loop_covariance(logprobs, advantages, mask), rtol=1e-4, atol=1e-5)
    rubbish = np.where(mask, logprobs, np.float32(np.nan))
    assert_array_equal(jitted_covariance(rubbish, advantages, mask), covariance)
    # Their mean is the covariance of the tokens' advantages and log-probabilities.
    if mask.sum() > 1:
        by_token = np.broadcast_to(advantages[:, None], mask.shape)
        expected = np.cov(by_token[mask], logprobs[mask], ddof=0)[0, 1]
        assert_allclose(np.mean(np.asarray(covariance)[mask]), expected, rtol=1e-3, atol=1e-5)


def test_covariance_has_no_gradient():
    gradients = jax.jit(jax.grad(lambda *x: jnp.sum(WEIGHTS * token_covariance(*x, MASK)), (0, 1)))
    for gradient in gradients(random_logprobs()[0], ADVANTAGES):
        assert_array_equal(gradient, np.zeros_like(gradient))


def test_covariance_of_a_batch_over_devices_is_that_of_the_whole():
    rng = np.random.default_rng(0)
    logprobs, advantages = -rng.exponential(size=(16, 4)).astype(np.float32), rng.normal(size=16).astype(np.float32)
    mask = np.arange(4) < rng.integers(0, 5, (16, 1))
    expected = jitted_covariance(logprobs, advantages, mask)
    function = partial(token_covariance, axis_name="data")
    pieces = [x.reshape(8, 2, *x.shape[1:]) for x in (logprobs, advantages, mask)]
    mapped = jax.jit(jax.vmap(function, axis_name="data"))(*pieces)
    assert_allclose(mapped.reshape(16, 4), expected, rtol=1e-5, atol=1e-6)
    spec, mesh = PartitionSpec("data"), Mesh(np.array(jax.devices()), ("data",))
    sharded = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec))
    assert_allclose(sharded(logprobs, advantages, mask), expected, rtol=1e-5, atol=1e-6)
    # A mean of each device's own tokens would be another number.
    assert not np.allclose(jax.vmap(jitted_covariance)(*pieces).reshape(16, 4), expected, atol=0.1)


# Pairs of tokens of A = ±1 and log π = −8 ± c, whose covariances are exactly c: 4 below the band from 1 to 5,
# 24 in it, 4 above and 8 negative, 40 of 40. As many slots are masked.
COVARIANCES = np.repeat(np.array([0.5, 1.5, 2, 3, 4, 4.5, 4.75, 6, -1, -2], np.float32), 4).reshape(5, 8)
SIGNS = np.tile(np.array([1, -1], np.float32), 20).reshape(5, 8)
COV_LOGPROBS, COV_MASK = padded(-8 + SIGNS * COVARIANCES, np.ones((5, 8), bool))
COV_LOGPROBS = np.pad(COV_LOGPROBS, ((0, 0), (0, 5)))
COV_MASK = np.pad(COV_MASK, ((0, 0), (0, 5)))
COV_ADVANTAGES = np.pad(SIGNS, ((0, 0), (0, 8)))
IN_BAND = np.pad((COVARIANCES > 1) & (COVARIANCES < 5), ((0, 0), (0, 8)))


def test_the_covariances_of_the_example():
    expected = np.pad(COVARIANCES, ((0, 0), (0, 8)))
    assert_allclose(token_covariance(COV_LOGPROBS, COV_ADVANTAGES, COV_MASK), expected, atol=1e-5)


@cache
def clip_cov_at(share):
    """(key, old_logprobs, **constants) -> loss and gradient on the example."""

    def total(logprobs, key, old_logprobs, constants):
        loss = clip_cov_term(logprobs, old_logprobs, COV_ADVANTAGES, COV_MASK, key=key, share=share, **constants)
        return jnp.sum(loss), loss

    function = jax.jit(jax.value_and_grad(total, has_aux=True))

    def at(key, old_logprobs=COV_LOGPROBS, **constants):
        (_, loss), gradient = function(COV_LOGPROBS, key, old_logprobs, constants)
        return np.asarray(loss), np.asarray(gradient)

    return at


def chosen_by(share, key, **constants):
    """On policy each token's loss is −A = ±1: it is 0 where chosen or masked."""
    loss, gradient = clip_cov_at(share)(key, **constants)
    assert_array_equal(loss == 0, gradient == 0)
    assert_array_equal(loss[loss != 0], -COV_ADVANTAGES[loss != 0])
    assert_array_equal(loss[~COV_MASK], 0 * loss[~COV_MASK])
    return (loss == 0) & COV_MASK


@pytest.mark.parametrize(
    ("share", "number"),
    [
        (0.1, 4),  # of 40 tokens, not of 80 slots
        pytest.param(0.33, 13, marks=pytest.mark.slow),  # 13.2
        (1e-6, 1),  # at least one
        pytest.param(0.6, 24, marks=pytest.mark.slow),
        (1.0, 24),  # no more than there are in the band
    ],
)
def test_clip_cov_chooses_a_share_of_all_tokens_from_the_band(share, number):
    chosen = chosen_by(share, KEY)
    assert chosen.sum() == number
    assert not np.any(chosen & ~IN_BAND)
    narrow = chosen_by(share, KEY, covariance_low=2.5, covariance_high=3.5)
    assert narrow.sum() == min(number, 4)
    assert_array_equal(narrow & (COV_LOGPROBS != -8 + 3 * COV_ADVANTAGES), np.zeros_like(narrow))
    assert not np.any(chosen_by(share, KEY, covariance_low=10.0, covariance_high=20.0))


def test_clip_cov_chooses_by_its_key_alone():
    chosen = chosen_by(0.1, KEY)
    assert_array_equal(chosen_by(0.1, jax.random.key(0)), chosen)
    # 400 keys: each of the 24 tokens of the band is chosen about 4/24 of the time; sd 7.5 of 66.7.
    keys = jax.random.split(jax.random.key(1), 400)

    @jax.jit
    @jax.vmap
    def losses(key):
        return clip_cov_term(COV_LOGPROBS, COV_LOGPROBS, COV_ADVANTAGES, COV_MASK, key=key, share=0.1)

    counts = np.sum((np.asarray(losses(keys)) == 0) & COV_MASK, axis=0)
    assert counts.sum() == 1600
    assert np.all(counts[~IN_BAND] == 0)
    assert counts[IN_BAND].min() > 66.7 - 4 * 7.5
    assert counts[IN_BAND].max() < 66.7 + 4 * 7.5


def test_clip_cov_does_not_choose_what_the_clip_holds_already():
    # The first three completions have ρ = e^0.5 on all tokens, beyond 1.2: where A > 0 the clip holds them, at −1.2.
    old_logprobs = COV_LOGPROBS - np.float32(0.5) * (np.arange(5) < 3)[:, None]
    held = COV_MASK & (COV_ADVANTAGES > 0) & (np.arange(5) < 3)[:, None]
    loss, gradient = clip_cov_at(1.0)(KEY, old_logprobs)
    assert_allclose(loss[held], np.full(held.sum(), -1.2), rtol=1e-6)
    assert_array_equal(gradient == 0, ~COV_MASK | held | IN_BAND)
    assert_array_equal((loss == 0) & COV_MASK, IN_BAND & ~held)
    # The clip is that of the constants.
    loss, _ = clip_cov_at(1.0)(KEY, old_logprobs, epsilon_high=0.3, epsilon_low=0.1)
    assert_allclose(loss[held], np.full(held.sum(), -1.3), rtol=1e-6)
    loss, _ = clip_cov_at(1.0)(KEY, old_logprobs, epsilon_high=0.7)
    assert_array_equal((loss == 0) & COV_MASK, IN_BAND)


@pytest.mark.parametrize(("share", "number"), [(0.1, 4), (0.33, 13), (1e-6, 1), (1.0, 40)])
def test_kl_cov_adds_its_penalty_to_the_largest_covariances(share, number):
    # d = ±0.25 by token: −ρA, and 0.25 c more on the chosen.
    d = np.where(np.arange(16) % 4 < 2, 0.25, -0.25).astype(np.float32)
    old_logprobs = COV_LOGPROBS - d

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def at(logprobs, penalty):
        loss = kl_cov_term(logprobs, old_logprobs, COV_ADVANTAGES, COV_MASK, share=share, penalty=penalty)
        return jnp.sum(loss), loss

    plain = np.where(COV_MASK, -np.exp(d) * COV_ADVANTAGES, 0)
    for penalty in (1.0, 0.1):
        (_, loss), gradient = at(COV_LOGPROBS, penalty)
        chosen = ~np.isclose(loss, plain, atol=1e-5)
        assert chosen.sum() == number
        assert_allclose(loss, plain + penalty * 0.25 * chosen, rtol=1e-5, atol=1e-6)
        assert_allclose(gradient, plain + penalty * np.sign(d) * chosen, rtol=1e-4, atol=1e-6)
        covariances = np.where(COV_MASK, COV_LOGPROBS + 8, -np.inf) * np.where(COV_MASK, COV_ADVANTAGES, 1)
        assert covariances[chosen].min() >= np.sort(covariances[COV_MASK])[-number]


@pytest.mark.parametrize("share", [0.05, pytest.param(0.4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted(OF_THE_BATCH))
def test_tokens_of_a_batch_over_devices_are_chosen_from_the_whole(name, share, spread):
    rng = np.random.default_rng(0)
    shape = 8, 3, 4
    logprobs = -rng.exponential(size=shape).astype(np.float32)
    old_logprobs = logprobs - rng.choice([-0.6, -0.1, 0.1, 0.6], size=shape).astype(np.float32)
    # Another scale on each device: the largest of its own would differ.
    advantages = (rng.normal(size=shape[:-1]) * np.arange(1, 9)[:, None]).astype(np.float32)
    mask = rng.random(shape) < 0.8
    mask[2] = False
    options = {"clip_cov": {"key": KEY, "covariance_low": 0.1, "covariance_high": 9.0}, "kl_cov": {}}[name]
    term = partial({"clip_cov": clip_cov_term, "kl_cov": kl_cov_term}[name], share=share, **options)

    def with_gradient(term):
        def total(logprobs, old_logprobs, advantages, mask):
            loss = term(logprobs, old_logprobs, advantages, mask)
            return jnp.sum(loss), loss

        return lambda *arrays: jax.grad(total, has_aux=True)(*arrays)[::-1]

    arrays = logprobs, old_logprobs, advantages, mask
    expected = jax.jit(with_gradient(term))(*arrays)
    result = spread(with_gradient(partial(term, axis_name="data")))(*arrays)
    jax.tree.map(partial(assert_allclose, rtol=1e-5, atol=1e-6), result, expected)
    of_each = jax.jit(jax.vmap(with_gradient(term)))(*arrays)
    assert not np.allclose(of_each[0], expected[0], atol=1e-3)


def test_no_token_is_chosen_where_there_is_none():
    nothing = np.zeros_like(MASK)
    for name in OF_THE_BATCH:
        for result in evaluated(name)(*random_logprobs(), ADVANTAGES, nothing, WEIGHTS):
            assert_array_equal(result, np.zeros(MASK.shape))


def test_defaults_of_the_covariance_terms_are_the_paper_s():
    # 10 000 tokens, covariances 2 and 3: two are chosen of either.
    signs = np.tile(np.array([1, -1], np.float32), 5000)[None]
    covariances = np.repeat(np.array([2, 3], np.float32), 5000)[None]
    logprobs, mask = -8 + signs * covariances, np.ones((1, 10_000), bool)
    loss = jax.jit(clip_cov_term)(logprobs, logprobs, signs, mask, key=KEY)
    assert np.sum(np.asarray(loss) == 0) == 2
    loss = jax.jit(kl_cov_term)(logprobs, logprobs - np.float32(0.5), signs, mask)
    chosen = ~np.isclose(loss, -np.exp(0.5) * signs)
    assert_array_equal(covariances[chosen], [3, 3])
    assert_allclose(np.asarray(loss)[chosen], -np.exp(0.5) * signs[chosen] + 0.5, rtol=1e-6)


def test_a_token_that_a_correction_silences_is_clipped_in_gmpo_like_the_others():
    # d = (1, 0.3) clipped to (0.4, 0.3): the completion's ratio is exp(0.35), whatever weight a token has.
    logprobs, mask = jnp.array([1.0, 0.3]), jnp.ones(2, bool)
    assert_allclose(gmpo_term(logprobs, jnp.zeros(2), jnp.array([0.0, 1.0]), mask), [0, -np.exp(0.35)], rtol=1e-6)


@pytest.mark.parametrize("weights", [truncated_weights, masked_weights, rejection_weights])
def test_a_log_ratio_that_is_nan_stays_visible(weights):
    assert np.isnan(weights(jnp.array([jnp.nan, 0.0]))[0])
