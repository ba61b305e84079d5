"""Whole losses: corrections of the KL, batches that are split or empty, and metrics."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from grpo_jax import functional as F

AGGREGATIONS = [F.token_mean_weights, F.sequence_mean_weights, F.sequence_sum_weights, F.constant_length_weights]


def random_logprobs(shape=(6, 4)):
    """Returns logprobs, old_logprobs, ref_logprobs; no ratio is near the kinks of the clip at 0.8 and 1.2."""
    rng = np.random.default_rng(0)
    logprobs = -rng.exponential(size=shape).astype(np.float32)
    differences = rng.choice([-0.5, -0.1, 0.1, 0.5], size=shape).astype(np.float32)
    return logprobs, logprobs - differences, -rng.exponential(size=shape).astype(np.float32)


@jax.jit
def evaluated(logprobs, old_logprobs, advantages, mask, ref_logprobs, weights):
    """Returns (loss, metrics), gradient."""
    options = {"ref_logprobs": ref_logprobs, "weights": weights}
    return jax.value_and_grad(F.grpo_loss, has_aux=True)(logprobs, old_logprobs, advantages, mask, **options)


# --- the KL ---


def test_a_switched_off_divergence_that_overflows_spoils_nothing():
    # k3 of a token that the reference finds e⁹⁴ times likelier is infinite in float32.
    logprobs, mask = np.float32([[-95, -1]]), np.ones((1, 2), bool)

    @partial(jax.jit, static_argnums=1)
    @jax.value_and_grad
    def loss(logprobs, kl_coef):
        arguments = logprobs, jax.lax.stop_gradient(logprobs), jnp.array([1.0]), mask
        return F.grpo_loss(*arguments, ref_logprobs=-jnp.ones((1, 2)), kl_coef=kl_coef)[0]

    value, gradient = loss(logprobs, 0.0)
    assert_allclose(value, -1, rtol=1e-6)
    assert_allclose(gradient, [[-0.5, -0.5]], rtol=1e-6)
    assert np.isinf(loss(logprobs, 0.1)[0])


@pytest.mark.parametrize("divergence", [pytest.param(F.kl_k1, marks=pytest.mark.slow), F.kl_k3])
def test_the_corrected_divergence_has_the_value_and_gradient_of_the_kl_of_the_policy(divergence):
    # Tokens of probability π_old are weighed by it: Σ π_old ρ k = Σ π k = KL, and so in gradient, as ρ has one.
    logits, ref_logits, old_logits = (jnp.asarray(x) for x in np.random.default_rng(0).normal(size=(3, 6)))
    mask = jnp.ones((6, 1), bool)

    def sampled(logits, correction):
        new, old, ref = (jax.nn.log_softmax(x)[:, None] for x in (logits, old_logits, ref_logits))
        options = {"ref_logprobs": ref, "kl_coef": 1.0, "divergence": divergence, "weights": jnp.exp(old)}
        loss, metrics = F.grpo_loss(new, old, jnp.zeros(6), mask, kl_bias_correction=correction, **options)
        ratio = jnp.exp(new - old) if correction else 1.0
        return loss, (metrics["kl"][0], jnp.sum(ratio * divergence(new, ref)))

    @jax.jit
    def evaluate(logits):
        of_sample = jax.value_and_grad(sampled, has_aux=True)
        return [of_sample(logits, x) for x in (True, False)], jax.value_and_grad(F.kl_full)(logits, ref_logits)

    (corrected, ((value, _), uncorrected)), (expected, gradient) = evaluate(logits)
    assert_allclose(corrected[0][0], expected, rtol=1e-5)
    assert_allclose(corrected[1], gradient, atol=1e-6)
    assert_allclose(*corrected[0][1], rtol=1e-5)
    assert abs(value - expected) > 1e-2
    assert np.max(np.abs(uncorrected - gradient)) > 1e-2


# --- split batches ---


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_microbatches_add_up_to_the_batch(aggregation):
    rng = np.random.default_rng(0)
    mask = rng.random((6, 4)) < 0.6
    mask[3:5] = False  # most of a microbatch has no tokens
    weights = np.asarray(aggregation(mask))  # of the whole batch, before it is split
    logprobs, old_logprobs, ref_logprobs = random_logprobs()
    everything = logprobs, old_logprobs, rng.normal(size=6).astype(np.float32), mask, ref_logprobs, weights
    (loss, metrics), gradient = evaluated(*everything)
    pieces = [evaluated(*(x[i : i + 2] for x in everything)) for i in (0, 2, 4)]
    assert_allclose(sum(piece[0][0] for piece in pieces), loss, rtol=1e-4, atol=1e-5)
    assert_allclose(np.concatenate([piece[1] for piece in pieces]), gradient, rtol=1e-5, atol=1e-7)
    for name, metric in metrics.items():
        assert_allclose(np.sum([piece[0][1][name] for piece in pieces], axis=0), metric, rtol=1e-4, atol=1e-5)


def test_an_empty_batch_has_no_loss_and_no_gradient():
    logprobs, old_logprobs, ref_logprobs = random_logprobs()
    nothing, advantages = np.zeros(logprobs.shape, bool), np.ones(6, np.float32)
    weights = np.asarray(F.sequence_mean_weights(nothing))
    (loss, metrics), gradient = evaluated(logprobs, old_logprobs, advantages, nothing, ref_logprobs, weights)
    assert loss == 0
    assert_array_equal(gradient, np.zeros(logprobs.shape))
    assert all(total == 0 and weight == 0 for total, weight in metrics.values())


# --- metrics ---


def test_a_token_without_advantage_is_not_clipped():
    logprobs, mask = np.log(np.float32([[0.5, 2]])), np.ones((1, 2), bool)
    metrics = F.policy_metrics(logprobs, np.zeros((1, 2), np.float32), np.zeros(1, np.float32), mask)
    assert metrics["clip_low"] == metrics["clip_high"] == (0, 2)


# Two completions of π = (0.1, 0.2, 0.8) and π_old = 0.2, so that ρ = (0.5, 1, 4), with A = 1 and A = −1;
# a masked slot of rubbish on each. How many tokens of A < 0 and of A > 0 get no gradient from it:
HELD_BACK = {
    "clipped": (F.clipped_term, 1, 1),  # 0.5 is below 0.8, 4 above 1.2
    "wide": (partial(F.clipped_term, epsilon_low=0.6), 0, 1),
    "bounded": (partial(F.clipped_term, delta=2.0), 2, 1),  # and 4 above 2
    "unclipped": (F.ratio_term(F.token_log_ratio, F.unclipped_surrogate), 0, 0),
    "cispo": (F.ratio_term(F.token_log_ratio, partial(F.cispo_surrogate, epsilon_high=0.2)), 0, 0),
    "sapo": (F.ratio_term(F.token_log_ratio, F.sapo_surrogate), 0, 0),
    "sequence": (F.ratio_term(F.sequence_log_ratio, F.clipped_surrogate), 0, 3),  # the completion's 2 is above 1.2
    "sequence_mean": (F.ratio_term(F.sequence_mean_log_ratio, F.clipped_surrogate), 0, 3),  # 2^⅓ = 1.26
    "gspo": (F.ratio_term(F.gspo_log_ratio, F.clipped_surrogate), 0, 3),
    "reinforce": (F.reinforce_term, 0, 0),
    "gmpo": (F.gmpo_term, 1, 1),  # log 0.5 is below −0.4, log 4 above 0.4
    "dppo": (F.dppo_term, 0, 1),  # moved by −0.1, 0 and 0.6; the square's gradient does not count
    "dppo_tight": (partial(F.dppo_term, threshold=0.05), 1, 1),
    "vespo": (F.vespo_term, 0, 0),
    # Covariances ±(log π + 1.378) = (−0.92, −0.23, 1.15) and (0.92, 0.23, −1.15): chosen is the 0.23, the others
    # of the band are held by the clip.
    "clip_cov": (partial(F.clip_cov_term, key=jax.random.key(0), share=1.0, covariance_low=0.1), 2, 1),
    "kl_cov": (partial(F.kl_cov_term, share=1.0), 0, 0),
}


@cache
def metrics_of_every_term():
    logprobs = np.log(np.float32([[0.1, 0.2, 0.8, np.nan]] * 2))
    old_logprobs = np.log(np.float32([[0.2, 0.2, 0.2, np.nan]] * 2))
    mask = np.array([[True, True, True, False]] * 2)
    advantages = np.float32([[1, 1, 1, np.nan], [-1, -1, -1, np.nan]])

    @jax.jit
    def of_all(*arguments):
        return {name: F.grpo_loss(*arguments, term=term)[1] for name, (term, _, _) in HELD_BACK.items()}

    return of_all(logprobs, old_logprobs, advantages, mask)


@pytest.mark.parametrize("name", HELD_BACK)
def test_policy_metrics_of_every_term(name):
    _, clip_low, clip_high = HELD_BACK[name]
    metrics = metrics_of_every_term()[name]
    expected = {"ratio": (11.0, 6.0), "clip_low": (clip_low, 6.0), "clip_high": (clip_high, 6.0)}
    assert metrics.keys() == expected.keys()
    for metric, value in expected.items():
        assert_allclose(metrics[metric], value, rtol=1e-6, err_msg=metric)
