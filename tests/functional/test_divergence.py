"""Divergences: numbers derived by hand, float32's digits, and expectations over a small vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from grpo_jax import functional as F

ESTIMATORS = [F.kl_k1, F.kl_k2, F.kl_k3, F.kl_abs, F.kl_unbiased]


def kl_reverse(logits, ref_logits):
    return F.kl_full(logits, ref_logits, reverse=True)


def random_logits(*shape):
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=shape), jnp.float32), jnp.asarray(rng.normal(size=shape), jnp.float32)


# --- numbers derived by hand ---

# π = 1/2, π_ref = 1/4: x = log 2. k1 = 0.6931, k2 = 0.6931²/2 = 0.2402, k3 = 1/2 − 1 + 0.6931 = 0.1931.
# The other way round x = −log 2, and k3 = 2 − 1 − 0.6931 = 0.3069.
BY_HAND = [(F.kl_k1, 0.6931, -0.6931), (F.kl_k2, 0.2402, 0.2402), (F.kl_k3, 0.1931, 0.3069)]
BY_HAND += [(F.kl_abs, 0.6931, 0.6931), (F.kl_unbiased, 0.1931, 0.3069)]


@pytest.mark.parametrize(("estimator", "nats", "other_way"), BY_HAND)
def test_estimators_by_hand(estimator, nats, other_way):
    logprobs, ref_logprobs = jnp.log(jnp.array([0.5])), jnp.log(jnp.array([0.25]))
    assert_allclose(estimator(logprobs, ref_logprobs), [nats], atol=5e-5)
    assert_allclose(estimator(ref_logprobs, logprobs), [other_way], atol=5e-5)
    # A policy that is its reference does not diverge, and is not pushed by it; of k1 the expected gradient is 0.
    assert_array_equal(estimator(logprobs, logprobs), [0])
    assert estimator is F.kl_k1 or jax.grad(lambda x: estimator(x, logprobs)[0])(logprobs) == 0


def test_weather_models():
    # A is sunny, rainy, cloudy with 0.7, 0.2, 0.1 and B with 0.6, 0.3, 0.1.
    # KL(B ‖ A) = 0.6 log(6/7) + 0.3 log(3/2) + 0 = −0.09249 + 0.12164 = 0.02915 (rounded earlier: 0.030).
    # KL(A ‖ B) = 0.7 log(7/6) + 0.2 log(2/3) = 0.10791 − 0.08109 = 0.02681.
    a, b = jnp.log(jnp.array([0.7, 0.2, 0.1])), jnp.log(jnp.array([0.6, 0.3, 0.1]))
    for function, first, second in ((F.kl_full, a, b), (kl_reverse, b, a)):
        assert_allclose(function(second, first), 0.02915, atol=1e-5)
        assert_allclose(function(first, second), 0.02681, atol=1e-5)


@pytest.mark.parametrize(
    ("probabilities", "nats"),
    [
        ([0.5, 0.5], 0.6931),  # log 2
        ([0.99, 0.01], 0.0560),  # −0.99 log 0.99 − 0.01 log 0.01 = 0.00995 + 0.04605
        ([0.25, 0.25, 0.25, 0.25], 1.3863),  # log 4, the most that four can have
    ],
)
def test_entropy_by_hand(probabilities, nats):
    assert_allclose(F.entropy(jnp.log(jnp.array(probabilities))), nats, atol=5e-5)


def test_jsd_by_hand():
    # π_T = (1/2, 1/2), π = (1/4, 3/4), β = 1/2: M = (3/8, 5/8). KL(π_T ‖ M) = ½ log 4/3 + ½ log 4/5 = 0.1438 − 0.1116 =
    # 0.0323; KL(π ‖ M) = ¼ log 2/3 + ¾ log 6/5 = −0.1014 + 0.1367 = 0.0354. Their mean is 0.0338.
    student, teacher = jnp.log(jnp.array([0.25, 0.75])), jnp.log(jnp.array([0.5, 0.5]))
    assert_allclose(F.jsd_full(student, teacher), 0.0338, atol=5e-5)
    # β = 1/4: M = (5/16, 11/16). ¼ (½ log 8/5 + ½ log 8/11) + ¾ (¼ log 4/5 + ¾ log 12/11) = 0.0190 + 0.0071.
    assert_allclose(F.jsd_full(student, teacher, beta=0.25), 0.0260, atol=5e-5)


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
    assert_allclose(F.adaptive_kl_coef(jnp.array(0.1), jnp.array(kl), **options), coefficient, rtol=1e-5)


@pytest.mark.parametrize(
    ("coefficient", "entropy_now", "options", "following"),
    [
        (0.01, 0.1, {}, 0.015),
        (0.01, 0.3, {}, 0.005),
        (0.01, 0.2, {}, 0.015),  # on target counts as below
        (0.002, 0.3, {}, 0.0),
        (1.0, 0.1, {}, 1.0),
        (0.01, 0.3, {"target": 0.4}, 0.015),
        (0.5, 0.1, {"step": 0.25}, 0.75),
        (0.5, 0.1, {"step": 0.25, "largest": 0.6}, 0.6),
    ],
)
def test_adaptive_entropy_coef_by_hand(coefficient, entropy_now, options, following):
    coefficient, entropy_now = jnp.array(coefficient), jnp.array(entropy_now)
    assert_allclose(F.adaptive_entropy_coef(coefficient, entropy_now, **options), following, rtol=1e-5, atol=1e-9)


# --- float32 ---


def test_k3_is_never_negative_and_is_the_value_of_the_unbiased_estimator_to_the_last_digit():
    # As k2 + (k3 − k2) the unbiased one would have the digits of k2.
    rng = np.random.default_rng(0)
    x, ref = (rng.normal(size=4096) * 2.0 ** rng.integers(-30, 4, 4096)).astype(np.float32), np.zeros(4096, np.float32)
    for function in (lambda f: f, jax.jit):
        k3 = function(F.kl_k3)(jnp.asarray(x), jnp.asarray(ref))
        assert np.min(k3) >= 0
        assert_array_equal(function(F.kl_unbiased)(jnp.asarray(x), jnp.asarray(ref)), k3)


@pytest.mark.parametrize("x", [1e-2, -1e-2, 1e-3, -1e-3, 1e-4, -1e-4])
def test_k3_keeps_its_digits_near_zero(x):
    # k3 ≈ x²/2 (1 − x/3). With exp in place of expm1 the rounding of 1 alone is 6e-8, all of it at x = 1e-4.
    assert_allclose(F.kl_k3(jnp.array([x]), jnp.zeros(1)), [x * x / 2 * (1 - x / 3)], rtol=1e-2)


# --- expectations, by enumeration of a small vocabulary ---


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_which_estimators_are_unbiased(estimator):
    logits, ref_logits = random_logits(4, 6)
    log_p, log_q = jax.nn.log_softmax(logits), jax.nn.log_softmax(ref_logits)
    ratio = jnp.sum(jnp.exp(log_p) * estimator(log_p, log_q), axis=-1) / F.kl_full(logits, ref_logits)
    if estimator in (F.kl_k2, F.kl_abs):
        assert np.all(np.abs(ratio - 1) > 0.05)
    else:
        assert_allclose(ratio, np.ones(4), rtol=1e-4)


@pytest.mark.parametrize(
    ("estimator", "divergence"),
    [
        (F.kl_k1, lambda logits, _: jnp.zeros(())),  # Σ π ∇ log π = ∇ Σ π = 0
        (F.kl_k2, F.kl_full),  # Σ π x ∇ log π
        (F.kl_k3, kl_reverse),  # Σ π (1 − π_ref/π) ∇ log π = −Σ π_ref ∇ log π
        (F.kl_unbiased, F.kl_full),
    ],
)
def test_expected_on_policy_gradients(estimator, divergence):
    logits, ref_logits = random_logits(6)
    sampler = jax.nn.softmax(logits)  # tokens are drawn from a policy that is held constant

    def sampled_loss(logits):
        return jnp.sum(sampler * estimator(jax.nn.log_softmax(logits), jax.nn.log_softmax(ref_logits)))

    expected = jax.grad(divergence)(logits, ref_logits)
    assert_allclose(jax.grad(sampled_loss)(logits), expected, atol=1e-6)


def test_divided_by_its_weight_the_jsd_tends_to_either_kl():
    with jax.enable_x64(True):
        logits = [jnp.asarray(x, jnp.float64) / 5 for x in random_logits(3, 6)]  # not far apart
        assert_allclose(F.jsd_full(*logits, beta=1e-6) / 1e-6, F.kl_full(*logits, reverse=True), rtol=1e-4)
        assert_allclose(F.jsd_full(*logits, beta=1 - 1e-6) / 1e-6, F.kl_full(*logits), rtol=1e-4)


# --- excluded tokens ---

EXCLUDED = np.array([False, True, False, False, True])


@pytest.mark.parametrize("function", [F.kl_full, kl_reverse, F.jsd_full, lambda logits, _: F.entropy(logits)])
def test_excluded_by_both_is_removed(function):
    logits = random_logits(5)
    excluded = [jnp.where(EXCLUDED, -jnp.inf, x) for x in logits]
    value, gradients = jax.jit(jax.value_and_grad(function, (0, 1)))(*excluded)
    expected, expected_gradients = jax.jit(jax.value_and_grad(function, (0, 1)))(*(x[~EXCLUDED] for x in logits))
    assert_allclose(value, expected, rtol=1e-5)
    # The derivative is taken at −inf itself, with no `where` of the caller before it.
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert_allclose(gradient[~EXCLUDED], expected_gradient, atol=1e-6)
        assert_array_equal(gradient[EXCLUDED], np.zeros(2))


def test_excluded_by_one_side():
    # Uniform over two of three against uniform over three: log(3/2). The other way round is infinite.
    of_two, of_three = jnp.array([0.0, 0.0, -jnp.inf]), jnp.zeros(3)
    assert_allclose(F.kl_full(of_two, of_three), np.log(1.5), rtol=1e-6)
    assert F.kl_full(of_three, of_two) == jnp.inf
    # The mixture of the Jensen–Shannon divergence has both.
    assert jnp.isfinite(F.jsd_full(of_two, of_three) + F.jsd_full(of_three, of_two))
    for function in (F.kl_full, F.jsd_full):
        assert jnp.all(jnp.isfinite(jax.grad(function)(of_two, of_three)))


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.1, float("nan")])
def test_a_beta_outside_of_0_and_1_is_refused(beta):
    with pytest.raises(ValueError, match="beta"):
        F.jsd_full(jnp.zeros(3), jnp.zeros(3), beta=beta)
