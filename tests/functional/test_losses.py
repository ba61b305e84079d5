"""Whole losses, their weights, divergences and losses on pairs: split and empty batches, ends, digits, and metrics."""

import inspect
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import PAIR_CASES
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
def test_corrected_divergence_has_value_and_gradient_of_kl(divergence):
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


def test_empty_batches_have_zero_loss_and_gradient():
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


# ---- weights

every_aggregation = pytest.mark.parametrize("aggregation", AGGREGATIONS)


@every_aggregation
def test_an_empty_batch_gives_zeros(aggregation):
    # Compiled, XLA turns an unguarded 0/0 into 0 here; eagerly it is NaN.
    for shape in ((4, 5), (0, 5)):
        weights = aggregation(jnp.zeros(shape, bool))
        assert weights.dtype == jnp.float32
        assert_array_equal(weights, np.zeros(shape))
    assert_array_equal(aggregation(jnp.zeros((4, 5), bool), num_completions=0), np.zeros((4, 5)))


@every_aggregation
def test_num_completions_is_of_all_devices(aggregation, spread):
    # As in TRL: a completion that is masked out may keep its place in the mean.
    mask = np.arange(5) < np.random.default_rng(0).integers(0, 6, (8, 3, 1))
    weights = spread(partial(aggregation, num_completions=24, axis_name="data"))(mask)
    by_mask = aggregation(jnp.asarray(mask))
    share = 1 if aggregation is F.token_mean_weights else mask.any(-1).sum() / 24
    assert mask.any(-1).sum() < 24
    assert_allclose(weights, by_mask * share, rtol=1e-6)


@pytest.mark.parametrize("function", [F.truncated_weights, F.masked_weights, F.rejection_weights])
def test_gradients_at_far_ratios_are_zero(function):
    far = jnp.array([-200.0, 200.0])  # exp is 0 and infinite
    assert_array_equal(jax.grad(lambda d: jnp.sum(function(d)))(far), np.zeros(2))


@pytest.mark.parametrize("num_tokens", [1, 2, 11, 51, 101, 201])
def test_binary_rounding_never_lowers_a_share(num_tokens):
    # 0.29 · 100 is 28.999999999999996 in float64, and 0.2 · 10 may be less than 2 in float32.
    hundredths = np.arange(101)
    entropy = np.random.default_rng(0).permutation(201).astype(np.float32)
    of_shares = jax.jit(jax.vmap(lambda mask, share: F.top_entropy_tokens(entropy, mask, share=share), (None, 0)))
    chosen = of_shares(np.arange(201) < num_tokens, (hundredths / 100).astype(np.float32))
    assert_array_equal(np.sum(chosen, axis=1), 1 + hundredths * (num_tokens - 1) // 100)


# ---- divergences


def kl_reverse(logits, ref_logits):
    return F.kl_full(logits, ref_logits, reverse=True)


def random_logits(*shape):
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=shape), jnp.float32), jnp.asarray(rng.normal(size=shape), jnp.float32)


# --- float32 ---


def test_k3_is_nonnegative_and_equals_the_unbiased_estimate():
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


ESTIMATORS = [
    (F.kl_k1, True, lambda logits, _: jnp.zeros(())),  # Σ π ∇ log π = ∇ Σ π = 0
    (F.kl_k2, False, F.kl_full),  # Σ π x ∇ log π
    (F.kl_k3, True, kl_reverse),  # Σ π (1 − π_ref/π) ∇ log π = −Σ π_ref ∇ log π
    (F.kl_unbiased, True, F.kl_full),
    (F.teacher_advantages, True, None),  # −A: E_π[−A ∇ log π] = ∇ KL(π ‖ π_T)
]


@pytest.mark.parametrize(("estimator", "is_unbiased", "divergence"), ESTIMATORS)
def test_estimators_have_expected_means_and_gradients_on_policy(estimator, is_unbiased, divergence):
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
def test_kl_at_the_reference_has_zero_gradient(estimator):
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


# ---- losses on pairs

OF_PAIRS = [name for name, case in PAIR_CASES.items() if "rejected" in case.arrays]


@pytest.mark.parametrize("name", OF_PAIRS)
def test_extreme_pairs_have_finite_losses_and_gradients(name):
    # Probability 1, almost 0, an empty completion (which fills up a batch), and the wrong order by far.
    loss, far = PAIR_CASES[name].function, np.array([0.0, -1e4, 0.0, -1e4], np.float32)
    arrays = {"chosen": far, "rejected": far[::-1].copy(), "ref_chosen": far[::-1].copy(), "ref_rejected": far}
    arrays |= {"chosen_length": np.array([3, 0, 0, 1]), "rejected_length": np.array([0, 3, 0, 1])}
    arrays = {name: x for name, x in arrays.items() if name in inspect.signature(loss).parameters}
    losses, gradients = jax.jit(jax.value_and_grad(lambda x: jnp.sum(loss(**x)), allow_int=True))(arrays)
    for x in (losses, gradients["chosen"], gradients["rejected"]):
        assert np.isfinite(x).all()


def test_scores_that_are_far_apart():
    chosen = np.array([1e4, -1e4, 1e30, -1e30], np.float32)
    losses, pull = jax.vjp(F.bradley_terry_loss, chosen, -chosen)
    assert_allclose(losses, [0, 2e4, 0, 2e30], rtol=1e-6)
    for gradient, sign in zip(pull(jnp.ones(4)), (-1, 1), strict=True):
        assert_array_equal(gradient, sign * np.array([0, 1, 0, 1]))
