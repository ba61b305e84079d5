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
    adaptive_entropy_coef,
    adaptive_kl_coef,
    entropy,
    kl_abs,
    kl_full,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_unbiased,
)

few = settings(max_examples=25, deadline=None, derandomize=True)
jitted_entropy = jax.jit(entropy)
ESTIMATORS = [kl_k1, kl_k2, kl_k3, kl_abs, kl_unbiased]


def kl_reverse(logits, ref_logits):
    return kl_full(logits, ref_logits, reverse=True)


def random_logits(*shape):
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=shape), jnp.float32), jnp.asarray(rng.normal(size=shape), jnp.float32)


# --- numbers derived by hand ---


def test_estimators_by_hand():
    # π = 1/2, π_ref = 1/4: x = log 2. k1 = 0.6931, k2 = 0.6931²/2 = 0.2402, k3 = 1/2 − 1 + 0.6931 = 0.1931.
    logprobs, ref_logprobs = jnp.log(jnp.array([0.5])), jnp.log(jnp.array([0.25]))
    assert_allclose(kl_k1(logprobs, ref_logprobs), [0.6931], atol=5e-5)
    assert_allclose(kl_k2(logprobs, ref_logprobs), [0.2402], atol=5e-5)
    assert_allclose(kl_k3(logprobs, ref_logprobs), [0.1931], atol=5e-5)
    assert_allclose(kl_abs(logprobs, ref_logprobs), [0.6931], atol=5e-5)
    assert_allclose(kl_abs(ref_logprobs, logprobs), [0.6931], atol=5e-5)
    assert_allclose(kl_unbiased(logprobs, ref_logprobs), [0.1931], atol=5e-5)


def test_weather_models():
    # A is sunny, rainy, cloudy with 0.7, 0.2, 0.1 and B with 0.6, 0.3, 0.1.
    # KL(B ‖ A) = 0.6 log(6/7) + 0.3 log(3/2) + 0 = −0.09249 + 0.12164 = 0.02915 (rounded earlier: 0.030).
    # KL(A ‖ B) = 0.7 log(7/6) + 0.2 log(2/3) = 0.10791 − 0.08109 = 0.02681.
    a, b = jnp.log(jnp.array([0.7, 0.2, 0.1])), jnp.log(jnp.array([0.6, 0.3, 0.1]))
    assert round(float(kl_full(b, a)), 3) == 0.029
    assert_allclose(kl_full(b, a), 0.02915, atol=1e-5)
    assert_allclose(kl_full(a, b), 0.02681, atol=1e-5)


@pytest.mark.parametrize(
    ("probabilities", "nats"),
    [
        ([0.5, 0.5], 0.6931),  # log 2
        ([0.99, 0.01], 0.0560),  # −0.99 log 0.99 − 0.01 log 0.01 = 0.00995 + 0.04605
        ([0.25, 0.25, 0.25, 0.25], 1.3863),  # log 4, the most that four can have
    ],
)
def test_entropy_by_hand(probabilities, nats):
    assert_allclose(jitted_entropy(np.log(np.array(probabilities, np.float32))), nats, atol=5e-5)


# --- a plain loop ---


def loop_kl(logits, ref_logits):
    p, q = np.exp(logits) / np.exp(logits).sum(), np.exp(ref_logits) / np.exp(ref_logits).sum()
    return sum(p[v] * (np.log(p[v]) - np.log(q[v])) for v in range(len(p)))


def loop_entropy(logits):
    p = np.exp(logits) / np.exp(logits).sum()
    return -sum(p[v] * np.log(p[v]) for v in range(len(p)))


def test_full_divergences_equal_a_plain_loop():
    logits, ref_logits = random_logits(2, 3, 5)
    rows = np.asarray(logits, float).reshape(-1, 5), np.asarray(ref_logits, float).reshape(-1, 5)
    pairs = list(zip(*rows, strict=True))
    assert_allclose(kl_full(logits, ref_logits).ravel(), [loop_kl(p, q) for p, q in pairs], rtol=1e-5)
    assert_allclose(kl_reverse(logits, ref_logits).ravel(), [loop_kl(q, p) for p, q in pairs], rtol=1e-5)
    assert_allclose(entropy(logits).ravel(), [loop_entropy(p) for p, _ in pairs], rtol=1e-5)


LOOPS = {
    kl_k1: lambda x: x,
    kl_k2: lambda x: x * x / 2,
    kl_k3: lambda x: np.exp(-x) - 1 + x,
    kl_abs: abs,
    kl_unbiased: lambda x: np.exp(-x) - 1 + x,
}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimators_equal_a_plain_loop(estimator):
    logprobs, ref_logprobs = random_logits(2, 3, 4)
    differences = np.asarray(logprobs, float) - np.asarray(ref_logprobs, float)
    expected = [LOOPS[estimator](x) for x in differences.ravel()]
    assert_allclose(estimator(logprobs, ref_logprobs).ravel(), expected, rtol=1e-4, atol=1e-6)


# --- transformations ---


@pytest.mark.parametrize("function", [kl_k1, kl_k2, kl_k3, kl_abs, kl_full, kl_reverse])
def test_gradients_equal_finite_differences(function):
    check_grads(jax.jit(function), random_logits(3, 5), order=1, modes=["rev"], eps=1e-2)


def test_gradient_of_the_unbiased_estimator_is_that_of_k2():
    logits, ref_logits = random_logits(3, 5)
    gradients = jax.jit(jax.grad(lambda *arrays: jnp.sum(kl_unbiased(*arrays)), (0, 1)))(logits, ref_logits)
    assert_allclose(gradients[0], logits - ref_logits, rtol=1e-6)
    assert_allclose(gradients[1], ref_logits - logits, rtol=1e-6)


def test_gradient_of_the_entropy_equals_finite_differences():
    check_grads(jitted_entropy, random_logits(3, 5)[:1], order=1, modes=["rev"], eps=1e-2)


@pytest.mark.parametrize(
    "function", [kl_full, *(pytest.param(x, marks=pytest.mark.slow) for x in (*ESTIMATORS, kl_reverse))]
)
def test_jit_and_vmap_equal_eager(function):
    logits, ref_logits = random_logits(3, 5)
    expected = function(logits, ref_logits)
    assert_allclose(jax.jit(function)(logits, ref_logits), expected, rtol=1e-5, atol=1e-6)
    assert_allclose(jax.jit(jax.vmap(function))(logits, ref_logits), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_jit_and_vmap_of_the_entropy_equal_eager():
    logits, _ = random_logits(3, 5)
    assert_allclose(jitted_entropy(logits), entropy(logits), rtol=1e-6)
    assert_allclose(jax.jit(jax.vmap(entropy))(logits), entropy(logits), rtol=1e-6)


# --- k3 in float32 ---

small = st.floats(-(2**-7), 2**-7, width=32)
large = st.floats(-20, 20, width=32)
jitted_k3 = jax.jit(kl_k3)


@few
@given(hnp.arrays(np.float32, 64, elements=st.one_of(small, large)), hnp.arrays(np.float32, 64, elements=small))
def test_k3_is_never_negative(logprobs, ref_logprobs):
    assert np.all(jitted_k3(logprobs, ref_logprobs) >= 0)
    assert np.all(kl_k3(jnp.asarray(logprobs), jnp.asarray(ref_logprobs)) >= 0)


jitted_unbiased = jax.jit(kl_unbiased)


@few
@given(hnp.arrays(np.float32, 64, elements=st.one_of(small, large)), hnp.arrays(np.float32, 64, elements=small))
def test_the_unbiased_estimator_has_the_value_of_k3_to_the_last_digit(logprobs, ref_logprobs):
    # As k2 + (k3 − k2) it would have the digits of k2.
    for of_tokens in (logprobs, 500 + logprobs):
        assert_array_equal(jitted_unbiased(of_tokens, ref_logprobs), jitted_k3(of_tokens, ref_logprobs))


@pytest.mark.parametrize("x", [1e-2, -1e-2, 1e-3, -1e-3, 1e-4, -1e-4])
def test_k3_keeps_its_digits_near_zero(x):
    # k3 ≈ x²/2 (1 − x/3). With exp in place of expm1 the rounding of 1 alone is 6e-8, all of it at x = 1e-4.
    assert_allclose(kl_k3(jnp.array([x]), jnp.zeros(1)), [x * x / 2 * (1 - x / 3)], rtol=1e-2)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_policies_do_not_diverge(estimator):
    logprobs, _ = random_logits(4)
    assert_array_equal(estimator(logprobs, logprobs), np.zeros(4))


# --- equivalences, by enumeration of a small vocabulary ---


def expectation(estimator, logits, ref_logits):
    """E_π[estimator], the sampled token being each of the vocabulary in turn."""
    log_p, log_q = jax.nn.log_softmax(logits), jax.nn.log_softmax(ref_logits)
    return jnp.sum(jnp.exp(log_p) * estimator(log_p, log_q), axis=-1)


@pytest.mark.parametrize("estimator", [kl_k1, kl_k3, kl_unbiased])
def test_unbiased_estimators(estimator):
    logits, ref_logits = random_logits(4, 6)
    expected = kl_full(logits, ref_logits)
    assert_allclose(jax.jit(partial(expectation, estimator))(logits, ref_logits), expected, rtol=1e-4)


@pytest.mark.parametrize("estimator", [kl_k2, kl_abs])
def test_biased_estimators(estimator):
    logits, ref_logits = random_logits(4, 6)
    expected = kl_full(logits, ref_logits)
    assert jnp.all(jnp.abs(expectation(estimator, logits, ref_logits) / expected - 1) > 0.05)


def on_policy_gradient(estimator, logits, ref_logits):
    """E_π[∇ estimator]: tokens are drawn from a policy that is held constant."""
    sampler = jax.nn.softmax(logits)

    def sampled_loss(logits):
        return jnp.sum(sampler * estimator(jax.nn.log_softmax(logits), jax.nn.log_softmax(ref_logits)))

    return jax.jit(jax.grad(sampled_loss))(logits)


@pytest.mark.parametrize(
    ("estimator", "divergence"),
    [
        (kl_k1, lambda logits, _: jnp.zeros(())),  # Σ π ∇ log π = ∇ Σ π = 0
        (kl_k2, kl_full),  # Σ π x ∇ log π
        (kl_k3, kl_reverse),  # Σ π (1 − π_ref/π) ∇ log π = −Σ π_ref ∇ log π
        (kl_unbiased, kl_full),
    ],
)
def test_expected_on_policy_gradients(estimator, divergence):
    logits, ref_logits = random_logits(6)
    expected = jax.jit(jax.grad(divergence))(logits, ref_logits)
    assert_allclose(on_policy_gradient(estimator, logits, ref_logits), expected, atol=1e-6)


def test_gradients_of_both_divergences_differ():
    # So k3 in the loss does not follow the gradient of what it estimates.
    logits, ref_logits = random_logits(6)
    of_full, of_reverse = (jax.grad(divergence)(logits, ref_logits) for divergence in (kl_full, kl_reverse))
    assert jnp.max(jnp.abs(of_full - of_reverse)) > 0.05


def test_reverse_swaps_the_arguments():
    logits, ref_logits = random_logits(4, 6)
    assert_allclose(kl_reverse(logits, ref_logits), kl_full(ref_logits, logits), rtol=1e-6)


@pytest.mark.parametrize("function", [kl_full, kl_reverse])
def test_divergence_is_invariant_to_shifts_of_the_logits(function):
    logits, ref_logits = random_logits(4, 6)
    assert_allclose(function(logits + 3, ref_logits - 2), function(logits, ref_logits), rtol=1e-4, atol=1e-6)


# --- coefficients that follow a target ---

jitted_kl_coef = jax.jit(adaptive_kl_coef, static_argnames=("num_samples", "horizon", "target"))
jitted_entropy_coef = jax.jit(adaptive_entropy_coef)


@pytest.mark.parametrize(
    ("kl", "options", "coefficient"),
    [
        (6.0, {}, 0.1),  # on target
        (6.6, {}, 0.101),  # 10 % above, n/horizon = 0.1: β · 1.01
        (5.4, {}, 0.099),
        (9.0, {}, 0.102),  # 50 % above counts as 20 %
        (0.0, {}, 0.098),
        (6.6, {"horizon": 1000.0}, 0.11),
        (6.6, {"num_samples": 500}, 0.1005),
        (6.6, {"target": 6.6}, 0.1),
    ],
)
def test_adaptive_kl_coef_by_hand(kl, options, coefficient):
    options = {"target": 6.0, "num_samples": 1000} | options
    assert_allclose(jitted_kl_coef(jnp.array(0.1), jnp.array(kl), **options), coefficient, rtol=1e-5)
    assert_allclose(adaptive_kl_coef(jnp.array(0.1), jnp.array(kl), **options), coefficient, rtol=1e-5)


def test_adaptive_kl_coef_settles_at_the_target():
    # A policy whose divergence falls as 0.6/β: at β = 0.1 it is 6.
    coefficient = jnp.array(0.02)
    for _ in range(100):
        coefficient = jitted_kl_coef(coefficient, 0.6 / coefficient, target=6.0, num_samples=5000)
    assert_allclose(coefficient, 0.1, rtol=1e-2)


@pytest.mark.parametrize(
    ("coefficient", "entropy_now", "options", "following"),
    [
        (0.01, 0.1, {}, 0.015),
        (0.01, 0.3, {}, 0.005),
        (0.01, 0.2, {}, 0.015),  # on target counts as below
        (0.0, 0.3, {}, 0.0),
        (0.002, 0.3, {}, 0.0),
        (1.0, 0.1, {}, 1.0),
        (0.01, 0.3, {"target": 0.4}, 0.015),
        (0.5, 0.1, {"step": 0.25}, 0.75),
        (0.5, 0.1, {"step": 0.25, "largest": 0.6}, 0.6),
    ],
)
def test_adaptive_entropy_coef_by_hand(coefficient, entropy_now, options, following):
    arrays = jnp.array(coefficient), jnp.array(entropy_now)
    assert_allclose(jitted_entropy_coef(*arrays, **options), following, rtol=1e-5, atol=1e-9)
    assert_allclose(adaptive_entropy_coef(*arrays, **options), following, rtol=1e-5, atol=1e-9)


# --- excluded tokens ---


def exclude(logits, excluded):
    return jnp.where(excluded, -jnp.inf, logits)


EXCLUDED = np.array([False, True, False, False, True])


@pytest.mark.parametrize("function", [kl_full, kl_reverse])
def test_excluded_by_both_is_removed(function):
    logits, ref_logits = random_logits(5)
    kept = ~EXCLUDED

    def of_all(logits, ref_logits):
        return function(exclude(logits, EXCLUDED), exclude(ref_logits, EXCLUDED))

    value, gradients = jax.jit(jax.value_and_grad(of_all, (0, 1)))(logits, ref_logits)
    expected, expected_gradients = jax.jit(jax.value_and_grad(function, (0, 1)))(logits[kept], ref_logits[kept])
    assert_allclose(value, expected, rtol=1e-5)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert_allclose(gradient[kept], expected_gradient, atol=1e-6)
        assert_array_equal(gradient[EXCLUDED], np.zeros(2))


def test_excluded_from_the_entropy_is_removed():
    logits, _ = random_logits(5)
    value, gradient = jax.jit(jax.value_and_grad(lambda z: entropy(exclude(z, EXCLUDED))))(logits)
    expected, expected_gradient = jax.jit(jax.value_and_grad(entropy))(logits[~EXCLUDED])
    assert_allclose(value, expected, rtol=1e-5)
    assert_allclose(gradient[~EXCLUDED], expected_gradient, atol=1e-6)
    assert_array_equal(gradient[EXCLUDED], np.zeros(2))


def test_gradients_are_finite_at_logits_of_minus_infinity():
    # The derivative is taken at −inf itself, with no `where` of the caller before it.
    logits, ref_logits = (exclude(z, EXCLUDED) for z in random_logits(5))
    gradients = *jax.jit(jax.grad(kl_full, (0, 1)))(logits, ref_logits), jax.jit(jax.grad(entropy))(logits)
    for gradient in gradients:
        assert jnp.all(jnp.isfinite(gradient))


def test_excluded_by_one_side():
    # Uniform over two of three against uniform over three: log(3/2). The other way round is infinite.
    of_two, of_three = jnp.array([0.0, 0.0, -jnp.inf]), jnp.zeros(3)
    assert_allclose(kl_full(of_two, of_three), np.log(1.5), rtol=1e-6)
    assert jnp.all(jnp.isfinite(jax.jit(jax.grad(kl_full))(of_two, of_three)))
    assert kl_full(of_three, of_two) == jnp.inf
