"""Whole losses: numbers derived by hand, corrections, batches that are split, metrics, and the objective."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from numpy.testing import assert_allclose, assert_array_equal

from grpo_jax import functional as F

AGGREGATIONS = [F.token_mean_weights, F.sequence_mean_weights, F.sequence_sum_weights, F.constant_length_weights]


def random_logprobs(shape=(8, 16)):
    """Returns logprobs, old_logprobs, ref_logprobs; no ratio is near the kinks of the clip at 0.8 and 1.2."""
    rng = np.random.default_rng(0)
    logprobs = -rng.exponential(size=shape).astype(np.float32)
    differences = rng.choice([-0.5, -0.1, 0.1, 0.5], size=shape).astype(np.float32)
    return logprobs, logprobs - differences, -rng.exponential(size=shape).astype(np.float32)


@jax.jit
def evaluated(logprobs, old_logprobs, advantages, mask, ref_logprobs, weights=None):
    """Returns (loss, metrics), gradient."""
    options = {"ref_logprobs": ref_logprobs, "weights": weights}
    return jax.value_and_grad(F.grpo_loss, has_aux=True)(logprobs, old_logprobs, advantages, mask, **options)


# --- numbers derived by hand ---


def test_by_hand():
    # One completion, A = 2, ρ = (1.5, 1), then a masked slot; weights ½ and ½.
    # Clip: −min(3, 1.2 · 2) = −2.4 and −2; their mean is −2.2.
    # KL: log π − log π_ref = log 2 on the first, k3 = ½ − 1 + log 2 = 0.1931; 0 on the second.
    # With β = 0.04: −2.2 + ½ · 0.04 · 0.1931 = −2.19614.
    logprobs = np.log(np.float32([[0.6, 0.5, 0.9]]))
    old_logprobs = np.log(np.float32([[0.4, 0.5, 0.1]]))
    ref_logprobs = np.log(np.float32([[0.3, 0.5, 0.2]]))
    arguments = logprobs, old_logprobs, np.float32([2]), np.array([[True, True, False]])
    assert_allclose(F.grpo_loss(*arguments)[0], -2.2, rtol=1e-6)
    loss, metrics = F.grpo_loss(*arguments, ref_logprobs=ref_logprobs)
    assert_allclose(loss, -2.2 + 0.5 * 0.04 * (np.log(2) - 0.5), rtol=1e-6)

    # Sums over the two tokens; the first is above the clip on the side where it acts.
    expected = {"ratio": 2.5, "clip_low": 0, "clip_high": 1, "kl": np.log(2) - 0.5}
    assert metrics.keys() == expected.keys()
    for name, (total, weight) in metrics.items():
        assert_allclose(total, expected[name], rtol=1e-5)
        assert weight == 2


def test_sequence_ratio_with_a_weight_per_completion_is_one_number_a_completion():
    # ρ = 2 · ½ · 1.1 = 1.1 in the clip, and 2 · 2 = 4 above it: −(1.1 · 3 + 1.2 · 1)/2.
    logprobs, mask = np.log(np.float32([[2, 0.5, 1.1], [2, 2, 9]])), np.array([[True] * 3, [True, True, False]])
    term = F.ratio_term(F.sequence_log_ratio, F.clipped_surrogate)
    loss, _ = F.grpo_loss(logprobs, np.zeros_like(logprobs), np.float32([3, 1]), mask, term=term)
    assert_allclose(loss, -(1.1 * 3 + 1.2) / 2, rtol=1e-5)


def test_without_weights_it_is_the_mean_of_deepseekmath_over_completions():
    logprobs, old_logprobs, ref_logprobs = random_logprobs((2, 4))
    arrays = logprobs, old_logprobs, np.float32([1, -1]), np.array([[True] * 4, [True, False, False, False]])
    expected = evaluated(*arrays, ref_logprobs, F.sequence_mean_weights(arrays[3]))
    jax.tree.map(assert_array_equal, evaluated(*arrays, ref_logprobs), expected)
    preset = jax.jit(jax.value_and_grad(F.PRESETS["grpo"].loss, has_aux=True))(*arrays, ref_logprobs=ref_logprobs)
    jax.tree.map(partial(assert_allclose, rtol=1e-6), preset, expected)
    (of_tokens, _), _ = evaluated(*arrays, ref_logprobs, F.token_mean_weights(arrays[3]))
    assert abs(of_tokens - expected[0][0]) > 1e-3


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
        return loss, metrics["kl"][0]

    evaluated = jax.jit(jax.value_and_grad(sampled, has_aux=True), static_argnums=1)
    expected, gradient = jax.jit(jax.value_and_grad(F.kl_full))(logits, ref_logits)
    (value, metric), corrected = evaluated(logits, True)
    assert_allclose(value, expected, rtol=1e-5)
    assert_allclose(corrected, gradient, atol=1e-6)
    ratio = jnp.exp(jax.nn.log_softmax(logits) - jax.nn.log_softmax(old_logits))
    estimates = divergence(jax.nn.log_softmax(logits), jax.nn.log_softmax(ref_logits))
    assert_allclose(metric, jnp.sum(ratio * estimates), rtol=1e-5)
    (value, _), uncorrected = evaluated(logits, False)
    assert abs(value - expected) > 1e-2
    assert np.max(np.abs(uncorrected - gradient)) > 1e-2


# --- split batches ---


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_microbatches_add_up_to_the_batch(aggregation):
    rng = np.random.default_rng(0)
    mask = rng.random((6, 4)) < 0.6
    mask[3:5] = False  # most of a microbatch has no tokens
    weights = np.asarray(aggregation(mask))  # of the whole batch, before it is split
    logprobs, old_logprobs, ref_logprobs = random_logprobs((6, 4))
    everything = logprobs, old_logprobs, rng.normal(size=6).astype(np.float32), mask, ref_logprobs, weights
    (loss, metrics), gradient = evaluated(*everything)
    pieces = [evaluated(*(x[i : i + 2] for x in everything)) for i in (0, 2, 4)]
    assert_allclose(sum(piece[0][0] for piece in pieces), loss, rtol=1e-4, atol=1e-5)
    assert_allclose(np.concatenate([piece[1] for piece in pieces]), gradient, rtol=1e-5, atol=1e-7)
    for name, metric in metrics.items():
        assert_allclose(np.sum([piece[0][1][name] for piece in pieces], axis=0), metric, rtol=1e-4, atol=1e-5)


def test_devices_add_up_to_the_batch():
    # Each of the eight devices makes its weights from the global totals; the losses are summed once.
    arrays = *random_logprobs((16, 4))[:2], np.linspace(-1, 1, 16, dtype=np.float32)
    mask = np.arange(4) < np.random.default_rng(2).integers(0, 5, (16, 1))

    def loss(*arrays, axis_name="data"):
        weights = F.sequence_mean_weights(arrays[3], axis_name=axis_name)
        value = F.grpo_loss(*arrays, weights=weights)[0]
        return value if axis_name is None else jax.lax.psum(value, axis_name)

    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharded = jax.shard_map(loss, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec())
    value, gradient = jax.jit(jax.value_and_grad(sharded))(*arrays, mask)
    expected, expected_gradient = jax.jit(jax.value_and_grad(partial(loss, axis_name=None)))(*arrays, mask)
    assert_allclose(value, expected, rtol=1e-5)
    assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-7)


def test_an_empty_batch_has_no_loss_and_no_gradient():
    logprobs, old_logprobs, ref_logprobs = random_logprobs()
    nothing = np.zeros(logprobs.shape, bool)
    (loss, metrics), gradient = evaluated(logprobs, old_logprobs, np.ones(8, np.float32), nothing, ref_logprobs)
    assert loss == 0
    assert_array_equal(gradient, np.zeros(logprobs.shape))
    assert all(total == 0 and weight == 0 for total, weight in metrics.values())


def test_a_mask_of_numbers_is_refused():
    x = jnp.zeros((2, 3))
    with pytest.raises(AssertionError, match="completion_mask must be bool"):
        F.grpo_loss(x, x, jnp.zeros(2), x)


# --- constants of the term, entropy, the sum ---


def test_constants_are_the_term_s_by_name():
    logprobs, old_logprobs = np.log(np.float32([[0.9, 0.1]])), np.log(np.float32([[0.5, 0.5]]))
    arguments = logprobs, old_logprobs, np.float32([1]), np.ones((1, 2), bool)
    assert_allclose(F.grpo_loss(*arguments, epsilon_high=0.28)[0], -(1.28 + 0.2) / 2, rtol=1e-6)
    # DPPO at a threshold that 0.9 − 0.5 does not exceed: −(1.8 + 0.2)/2.
    loss, _ = jax.jit(partial(F.grpo_loss, term=F.dppo_term, threshold=0.5, penalty=0.0))(*arguments)
    assert_allclose(loss, -1, rtol=1e-6)
    refused = [(F.clipped_term, "dual_clip"), (F.dppo_term, "epsilon_low"), (F.reinforce_term, "epsilon_high")]
    for term, wrong in refused:
        with pytest.raises(TypeError, match=wrong):
            F.grpo_loss(*arguments, term=term, **{wrong: 0.2})


def test_entropy_bonus():
    # Weights ¼ on the completion's two tokens: −0.1 (¼ · 1 + ¼ · 2) = −0.075, and −0.025 each of gradient.
    logprobs, mask = jnp.array([[-1.0, -2.0, -3.0]]), jnp.array([[True, True, False]])
    weights = jnp.array([[0.25, 0.25, 0.0]])

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def loss(entropy, coef):
        return F.grpo_loss(
            logprobs, logprobs, jnp.array([2.0]), mask, weights=weights, entropy=entropy, entropy_coef=coef
        )

    plain, metrics = F.grpo_loss(logprobs, logprobs, jnp.array([2.0]), mask, weights=weights)
    for rubbish in (0.0, jnp.nan, jnp.inf):
        entropy = jnp.array([[1.0, 2.0, rubbish]])
        (value, with_bonus), gradient = loss(entropy, 0.1)
        assert_allclose(value, plain - 0.075, rtol=1e-6)
        assert_allclose(gradient, [[-0.025, -0.025, 0]], rtol=1e-6)
        jax.tree.map(assert_array_equal, with_bonus, metrics)
        assert_array_equal(loss(entropy, 0.0)[0][0], plain)
    # GRPO has no bonus.
    assert_array_equal(F.grpo_loss(logprobs, logprobs, jnp.array([2.0]), mask, entropy=entropy)[0], -2.0)


def test_weighted_sum():
    # ½ · 4 − 2 · 3 = −4; what is masked counts nothing, whatever it and its weight are.
    values, weights = jnp.array([[4.0, jnp.nan], [jnp.inf, 3.0]]), jnp.array([[0.5, 1.0], [7.0, -2.0]])
    total, gradient = jax.value_and_grad(F.weighted_sum)(values, weights, jnp.array([[True, False], [False, True]]))
    assert total == -4
    assert_array_equal(gradient, [[0.5, 0], [0, -2]])


def test_vmap_over_keys_of_a_term_that_draws():
    logprobs, old_logprobs, _ = random_logprobs()
    advantages, mask = np.linspace(-1, 1, 8, dtype=np.float32), np.ones((8, 16), bool)

    @jax.jit
    def loss(key):
        term = partial(F.clip_cov_term, key=key, share=0.1, covariance_low=0.0)
        return F.grpo_loss(logprobs, old_logprobs, advantages, mask, term=term)[0]

    keys = jax.random.split(jax.random.key(0), 5)
    losses = jax.jit(jax.vmap(loss))(keys)
    assert_allclose(losses, [loss(key) for key in keys], rtol=1e-5)
    assert len(set(losses.tolist())) == 5


# --- metrics ---


def test_policy_metrics_by_hand():
    # ρ = (0.5, 1, 2) in each completion, the last token of the second masked. Below 0.8 the clip acts
    # on A < 0 only, above 1.28 on A > 0 only.
    logprobs, old_logprobs = np.log(np.float32([[0.5, 1, 2], [0.5, 1, 2]])) - 3, np.full((2, 3), -3, np.float32)
    mask = np.array([[True, True, True], [True, True, False]])
    arguments = old_logprobs, np.float32([1, -1]), mask

    term = partial(F.clipped_term, epsilon_low=0.2, epsilon_high=0.28)
    metrics = jax.jit(partial(F.policy_metrics, term=term))(logprobs, *arguments)
    expected = {"ratio": (5.0, 5.0), "clip_low": (1.0, 5.0), "clip_high": (1.0, 5.0)}
    assert metrics.keys() == expected.keys()
    for name in expected:
        assert_allclose(metrics[name], expected[name], rtol=1e-6)


def test_a_token_without_advantage_is_not_clipped():
    logprobs, mask = np.log(np.float32([[0.5, 2]])), np.ones((1, 2), bool)
    metrics = F.policy_metrics(logprobs, np.zeros((1, 2), np.float32), np.zeros(1, np.float32), mask)
    assert metrics["clip_low"] == metrics["clip_high"] == (0, 2)


# Two completions of π = (0.1, 0.2, 0.8) and π_old = 0.2, so that ρ = (0.5, 1, 4), with A = 1 and A = −1;
# a masked slot of rubbish on each. How many tokens of A < 0 and of A > 0 get no gradient from it:
HELD_BACK = {
    "clipped": (F.clipped_term, 1, 1),  # 0.5 is below 0.8, 4 above 1.2
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


def test_clip_metrics_count_the_tokens_whose_gradient_is_gone():
    logprobs, old_logprobs, _ = random_logprobs()
    advantages, mask = np.linspace(-1, 1, 8, dtype=np.float32), np.ones((8, 16), bool)
    (_, metrics), gradient = jax.value_and_grad(F.grpo_loss, has_aux=True)(logprobs, old_logprobs, advantages, mask)
    clipped = float(metrics["clip_low"][0] + metrics["clip_high"][0])
    assert clipped == np.sum(np.asarray(gradient) == 0) > 0


@pytest.mark.parametrize("dtype", [bool, jnp.bfloat16, jnp.float32])
def test_masked_sum(dtype):
    total, weight = F.masked_sum(jnp.array([1, 0, 1, 1], dtype), jnp.array([True, True, True, False]))
    assert (total, weight) == (2, 3)
    assert (total.dtype, weight.dtype) == (jnp.float32, jnp.float32)


# --- the objective on probabilities of responses ---

EXAMPLE = ([1.2, 0.8, 1.1], [1.0, 1.0, 1.0], [0.9, 1.1, 1.0], [1.0, 0.5, 1.5])


def test_objective_by_hand():
    # No ratio leaves [0.8, 1.2]: the mean of ρA is 3.1/3 = 1.03333.
    # π_θ ∝ (1.08, 0.88, 1.1), π_ref ∝ (1, 0.5, 1.5), each divided by its sum, 3.06 and 3:
    # KL = 0.35294 log 1.05882 + 0.28758 log 1.72549 + 0.35948 log 0.71895 = 0.05842.
    # J = 1.03333 − 0.01 · 0.05842 = 1.032749.
    assert_allclose(F.grpo_objective(*EXAMPLE, 0.2, 0.01), 1.032749, atol=1e-6)
    assert_array_equal(F.grpo_objective(*EXAMPLE), F.grpo_objective(*EXAMPLE, epsilon=0.2, beta=0.01))


def test_objective_clips_a_large_ratio():
    # −β KL is the same on both sides: only A = 1 is held at 1.2, and A = −1 is not.
    common = [1.0], [1.0]
    assert_allclose(F.grpo_objective([5.0], [1.0], *common), 1.2, atol=1e-6)
    assert_allclose(F.grpo_objective([5.0], [-1.0], *common), -5.0, atol=1e-6)


def test_objective_of_an_impossible_response():
    # 0 · log(0 + 1e-10) = 0: only the other response is left, with KL = 1 · log(1/0.5) = 0.6931.
    objective = F.grpo_objective([0.0, 1.0], [1.0, 1.0], [0.5, 0.5], [0.5, 0.5], beta=1.0)
    assert_allclose(objective, 0.5 - 0.6931, atol=5e-5)


def test_on_policy_gradient_of_objective_is_reinforce():
    # J is maximised; with ρ = π/π_old at 1 and no KL, dJ/d log π = A/G.
    advantages = jnp.array([1.5, -0.7, 0.2])
    old = jnp.array([0.2, 0.3, 0.5])
    gradient = jax.grad(lambda log_pi: F.grpo_objective(jnp.exp(log_pi) / old, advantages, old, old, beta=0.0))(
        jnp.log(old)
    )
    assert_allclose(gradient, advantages / 3, rtol=1e-5)


@pytest.mark.parametrize("short", range(4))
def test_objective_refuses_lengths_that_differ(short):
    arguments = [list(x) for x in EXAMPLE]
    arguments[short].pop()
    with pytest.raises(ValueError, match="lengths differ"):
        F.grpo_objective(*arguments)
