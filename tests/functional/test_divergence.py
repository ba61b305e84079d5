"""Divergences: float32's digits, expectations over a small vocabulary, and tokens that are excluded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from grpo_jax import functional as F


def kl_reverse(logits, ref_logits):
    return F.kl_full(logits, ref_logits, reverse=True)


def random_logits(*shape):
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=shape), jnp.float32), jnp.asarray(rng.normal(size=shape), jnp.float32)


# --- float32 ---


def test_k3_is_never_negative_and_is_the_value_of_the_unbiased_estimator_to_the_last_digit():
    # As k2 + (k3 − k2) the unbiased one would have the digits of k2.
    rng = np.random.default_rng(0)
    x, ref = (rng.normal(size=4096) * 2.0 ** rng.integers(-30, 4, 4096)).astype(np.float32), np.zeros(4096, np.float32)
    for function in (lambda f: f, jax.jit):
        k3 = function(F.kl_k3)(jnp.asarray(x), jnp.asarray(ref))
        assert np.min(k3) >= 0
        assert_array_equal(function(F.kl_unbiased)(jnp.asarray(x), jnp.asarray(ref)), k3)


def test_k3_has_its_digits_near_zero():
    # k3 ≈ x²/2 (1 − x/3). With exp in place of expm1 the rounding of 1 is 6e-8, all of it at x = 1e-4.
    x = np.float32([1e-2, -1e-2, 1e-3, -1e-3, 1e-4, -1e-4])
    assert_allclose(F.kl_k3(x, np.zeros_like(x)), x * x / 2 * (1 - x / 3), rtol=1e-2)


# --- expectations, by enumeration of a small vocabulary ---


@pytest.mark.parametrize(
    ("estimator", "is_unbiased", "divergence"),
    [
        (F.kl_k1, True, lambda logits, _: jnp.zeros(())),  # Σ π ∇ log π = ∇ Σ π = 0
        (F.kl_k2, False, F.kl_full),  # Σ π x ∇ log π
        (F.kl_k3, True, kl_reverse),  # Σ π (1 − π_ref/π) ∇ log π = −Σ π_ref ∇ log π
        (F.kl_unbiased, True, F.kl_full),
        (F.teacher_advantages, True, None),  # −A: E_π[−A ∇ log π] = ∇ KL(π ‖ π_T)
    ],
)
def test_expectations_of_estimators_and_of_their_gradients_on_policy(estimator, is_unbiased, divergence):
    logits, ref_logits = random_logits(6)
    sampler = jax.nn.softmax(logits)  # tokens are drawn from a policy that is held constant

    def sampled(logits):
        log_p, log_q = jax.nn.log_softmax(logits), jax.nn.log_softmax(ref_logits)
        if estimator is F.teacher_advantages:
            advantages = estimator(log_p, log_q)
            return jnp.sum(-sampler * advantages * log_p), -advantages
        estimates = estimator(log_p, log_q)
        return jnp.sum(sampler * estimates), estimates

    (_, estimates), gradient = jax.jit(jax.value_and_grad(sampled, has_aux=True))(logits)
    mean, kl = jnp.sum(sampler * estimates), F.kl_full(logits, ref_logits)
    assert (abs(mean / kl - 1) < 1e-4) == is_unbiased
    assert_allclose(gradient, jax.grad(divergence or F.kl_full)(logits, ref_logits), atol=1e-6)


@pytest.mark.parametrize("estimator", [F.kl_k2, F.kl_k3, F.kl_abs, F.kl_unbiased])
def test_a_policy_that_is_its_reference_is_not_pushed_by_it(estimator):
    logprobs = np.float32([-0.7])
    value, slope = jax.value_and_grad(lambda x: estimator(x, logprobs)[0])(logprobs)
    assert value == slope == 0


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


def test_excluded_by_one_side_has_finite_gradients():
    of_two, of_three = jnp.array([0.0, 0.0, -jnp.inf]), jnp.zeros(3)
    # The mixture of the Jensen–Shannon divergence has both.
    assert jnp.isfinite(F.jsd_full(of_two, of_three) + F.jsd_full(of_three, of_two))
    for function in (F.kl_full, F.jsd_full):
        assert jnp.all(jnp.isfinite(jax.grad(function)(of_two, of_three)))
