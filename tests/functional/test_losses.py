from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import Mesh, PartitionSpec
from jax.test_util import check_grads
from numpy.testing import assert_allclose, assert_array_equal

from grpo_jax.functional import (
    PRESETS,
    cispo_surrogate,
    clip_cov_term,
    clipped_surrogate,
    clipped_term,
    constant_length_weights,
    dppo_term,
    gmpo_term,
    grpo_loss,
    grpo_objective,
    gspo_log_ratio,
    kl_abs,
    kl_cov_term,
    kl_full,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_unbiased,
    masked_sum,
    policy_metrics,
    ratio_term,
    reinforce_term,
    sapo_surrogate,
    sequence_log_ratio,
    sequence_mean_log_ratio,
    sequence_mean_weights,
    sequence_sum_weights,
    token_log_ratio,
    token_mean_weights,
    unclipped_surrogate,
    vespo_term,
    weighted_sum,
)

LOG_RATIOS = [token_log_ratio, sequence_log_ratio, gspo_log_ratio]
DIVERGENCES = [kl_k1, kl_k2, kl_k3]
AGGREGATIONS = [token_mean_weights, sequence_mean_weights, sequence_sum_weights, constant_length_weights]
# test_terms.py has every term; here each of these in some composition.
CHOICES = [
    (token_log_ratio, clipped_surrogate, kl_k3),
    (token_log_ratio, cispo_surrogate, kl_k2),
    (sequence_log_ratio, clipped_surrogate, kl_k1),
    (gspo_log_ratio, cispo_surrogate, kl_k3),
]
every_choice = pytest.mark.parametrize(("log_ratio", "surrogate", "divergence"), CHOICES)
jitted_weights = {aggregation: jax.jit(aggregation) for aggregation in AGGREGATIONS}
few = settings(max_examples=25, deadline=None, derandomize=True)

# Rows of 4, 2, 0 and 2 tokens; the last has its tokens in the middle.
MASK = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 0]], bool)
ADVANTAGES = np.array([1.5, -0.7, 3.0, 0.2], np.float32)
WEIGHTS = np.array(MASK / np.array([4, 2, 1, 2])[:, None] / 3, np.float32)  # each of 3 completions the same


def random_logprobs(shape=(4, 4)):
    """logprobs, old_logprobs, ref_logprobs; no ratio is near the kinks of the clip at 0.8 and 1.2."""
    rng = np.random.default_rng(0)
    logprobs = -rng.exponential(size=shape).astype(np.float32)
    differences = rng.choice([-0.5, -0.1, 0.1, 0.5], size=shape).astype(np.float32)
    return logprobs, logprobs - differences, -rng.exponential(size=shape).astype(np.float32)


@cache
def compiled(log_ratio=token_log_ratio, surrogate=clipped_surrogate, divergence=kl_k3):
    """(logprobs, old_logprobs, advantages, mask, ref_logprobs, weights) -> (loss, metrics), gradient."""
    choices = {"term": ratio_term(log_ratio, surrogate), "divergence": divergence}
    choices |= {"epsilon_low": 0.2, "epsilon_high": 0.2}  # CISPO's own would cap no ratio here

    def loss(logprobs, old_logprobs, advantages, mask, ref_logprobs=None, weights=None):
        return grpo_loss(
            logprobs, old_logprobs, advantages, mask, ref_logprobs=ref_logprobs, weights=weights, **choices
        )

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


default = compiled()
jitted_loss = jax.jit(grpo_loss)


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
    assert_allclose(jitted_loss(*arguments)[0], -2.2, rtol=1e-6)
    loss, metrics = jitted_loss(*arguments, ref_logprobs=ref_logprobs)
    assert_allclose(loss, -2.2 + 0.5 * 0.04 * (np.log(2) - 0.5), rtol=1e-6)

    # Sums over the two tokens; the first is above the clip on the side where it acts.
    expected = {"ratio": 2.5, "clip_low": 0, "clip_high": 1, "kl": np.log(2) - 0.5}
    assert metrics.keys() == expected.keys()
    for name, (total, weight) in metrics.items():
        assert_allclose(total, expected[name], rtol=1e-5)
        assert weight == 2


# --- a plain loop ---


def loop_loss(arrays, advantages, mask, weights, log_ratio, surrogate, divergence, kl_coef=0.04, low=0.2, high=0.2):
    logprobs, old_logprobs, ref_logprobs = (x.astype(float) for x in arrays)
    loss = 0.0
    for i in range(len(mask)):
        tokens = [t for t in range(len(mask[i])) if mask[i, t]]
        total = sum(logprobs[i, t] - old_logprobs[i, t] for t in tokens)
        for t in tokens:
            d = {
                token_log_ratio: logprobs[i, t] - old_logprobs[i, t],
                sequence_log_ratio: total,
                gspo_log_ratio: total / len(tokens),
            }[log_ratio]
            ratio, clipped = np.exp(d), min(max(np.exp(d), 1 - low), 1 + high)
            if surrogate is clipped_surrogate:
                term = -min(ratio * advantages[i], clipped * advantages[i])
            else:
                term = -clipped * advantages[i] * d
            x = logprobs[i, t] - ref_logprobs[i, t]
            term += kl_coef * {kl_k1: x, kl_k2: x * x / 2, kl_k3: np.exp(-x) - 1 + x}[divergence]
            loss += weights[i, t] * term
    return loss


@every_choice
def test_equals_a_plain_loop(log_ratio, surrogate, divergence):
    choices = log_ratio, surrogate, divergence
    arrays = random_logprobs()
    (loss, _), _ = compiled(*choices)(*arrays[:2], ADVANTAGES, MASK, arrays[2], WEIGHTS)
    assert_allclose(loss, loop_loss(arrays, ADVANTAGES, MASK, WEIGHTS, *choices), rtol=1e-5)


def test_without_weights_it_is_the_mean_of_deepseekmath_over_completions():
    logprobs, old_logprobs, ref_logprobs = random_logprobs()
    arguments = logprobs, old_logprobs, ADVANTAGES, MASK, ref_logprobs
    (loss, metrics), gradient = default(*arguments)
    expected = default(*arguments, sequence_mean_weights(jnp.asarray(MASK)))
    jax.tree.map(assert_array_equal, ((loss, metrics), gradient), expected)
    preset = jax.jit(jax.value_and_grad(PRESETS["grpo"].loss, has_aux=True))
    result = preset(*arguments[:4], ref_logprobs=ref_logprobs)
    jax.tree.map(assert_array_equal, result, ((loss, metrics), gradient))
    (of_tokens, _), _ = default(*arguments, token_mean_weights(jnp.asarray(MASK)))
    assert abs(of_tokens - loss) > 1e-3


def test_sequence_ratio_with_a_weight_per_completion_is_one_number_a_completion():
    logprobs, old_logprobs, _ = random_logprobs()
    (loss, _), _ = compiled(sequence_log_ratio)(logprobs, old_logprobs, ADVANTAGES, MASK, weights=WEIGHTS)
    rows = MASK.any(axis=1)
    ratios = np.exp(np.sum((logprobs - old_logprobs) * MASK, axis=1))[rows]
    advantages = ADVANTAGES[rows]
    expected = -np.mean(np.minimum(ratios * advantages, np.clip(ratios, 0.8, 1.2) * advantages))
    assert_allclose(loss, expected, rtol=1e-5)


# --- gradients ---


@pytest.mark.parametrize(
    ("log_ratio", "divergence"),
    [
        *(pytest.param(token_log_ratio, k, marks=pytest.mark.slow) for k in DIVERGENCES[:2]),
        (token_log_ratio, kl_k3),
        (sequence_log_ratio, kl_k3),
    ],
)
def test_gradients_equal_finite_differences(log_ratio, divergence):
    logprobs, old_logprobs, ref_logprobs = random_logprobs()

    @jax.jit
    def loss(logprobs, advantages):
        return grpo_loss(
            logprobs,
            old_logprobs,
            advantages,
            MASK,
            ref_logprobs=ref_logprobs,
            term=ratio_term(log_ratio, clipped_surrogate),
            divergence=divergence,
        )[0]

    check_grads(loss, (logprobs, ADVANTAGES), order=1, modes=["rev"], eps=1e-2)


@pytest.mark.parametrize(("log_ratio", "surrogate"), [choice[:2] for choice in CHOICES])
def test_on_policy_gradient_is_reinforce(log_ratio, surrogate):
    # The gradient of a policy's own parameters: logits of 5 possible tokens.
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(4, 4, 5)).astype(np.float32)
    ids = rng.integers(0, 5, (4, 4, 1))

    def logprobs(logits):
        return jnp.take_along_axis(jax.nn.log_softmax(logits), ids, axis=-1)[..., 0]

    def loss(logits, weights):
        new, old = logprobs(logits), jax.lax.stop_gradient(logprobs(logits))
        return grpo_loss(new, old, ADVANTAGES, MASK, weights=weights, term=ratio_term(log_ratio, surrogate))[0]

    def reinforce(logits, weights):
        if log_ratio is sequence_log_ratio:  # the completion's ratio stands on each of its tokens
            weights = jnp.where(MASK, jnp.sum(weights, axis=-1, keepdims=True), 0)
        return jnp.sum(weights * -ADVANTAGES[:, None] * logprobs(logits))

    gradients = jax.jit(lambda *arguments: (jax.grad(loss)(*arguments), jax.grad(reinforce)(*arguments)))
    for aggregation in AGGREGATIONS:
        gradient, expected = gradients(logits, aggregation(MASK))
        assert jnp.max(jnp.abs(expected)) > 1e-2
        assert_allclose(gradient, expected, rtol=1e-4, atol=1e-7)


def test_a_switched_off_divergence_that_overflows_spoils_nothing():
    # k3 of a token that the reference finds e⁹⁴ times likelier is infinite in float32.
    logprobs, mask = np.float32([[-95, -1]]), np.ones((1, 2), bool)

    @partial(jax.jit, static_argnums=1)
    @jax.value_and_grad
    def loss(logprobs, kl_coef):
        arguments = logprobs, jax.lax.stop_gradient(logprobs), jnp.array([1.0]), mask
        return grpo_loss(*arguments, ref_logprobs=-jnp.ones((1, 2)), kl_coef=kl_coef)[0]

    value, gradient = loss(logprobs, 0.0)
    assert_allclose(value, -1, rtol=1e-6)
    assert_allclose(gradient, [[-0.5, -0.5]], rtol=1e-6)
    assert np.isinf(loss(logprobs, 0.1)[0])


# --- samples of an old policy ---


@pytest.mark.parametrize("divergence", [pytest.param(kl_k1, marks=pytest.mark.slow), kl_k3])
def test_the_corrected_divergence_has_the_value_and_gradient_of_the_kl_of_the_policy(divergence):
    # Tokens of probability π_old are weighed by it: Σ π_old ρ k = Σ π k = KL, and so in gradient, as ρ has one.
    logits, ref_logits, old_logits = (jnp.asarray(x) for x in np.random.default_rng(0).normal(size=(3, 6)))
    mask = jnp.ones((6, 1), bool)

    def sampled(logits, correction):
        new, old, ref = (jax.nn.log_softmax(x)[:, None] for x in (logits, old_logits, ref_logits))
        options = {"ref_logprobs": ref, "kl_coef": 1.0, "divergence": divergence, "weights": jnp.exp(old)}
        loss, metrics = grpo_loss(new, old, jnp.zeros(6), mask, kl_bias_correction=correction, **options)
        return loss, metrics["kl"][0]

    evaluated = jax.jit(jax.value_and_grad(sampled, has_aux=True), static_argnums=1)
    expected, gradient = jax.jit(jax.value_and_grad(kl_full))(logits, ref_logits)
    (value, metric), corrected = evaluated(logits, True)
    assert_allclose(value, expected, rtol=1e-5)
    assert_allclose(corrected, gradient, atol=1e-6)
    ratio = jnp.exp(jax.nn.log_softmax(logits) - jax.nn.log_softmax(old_logits))
    estimates = divergence(jax.nn.log_softmax(logits), jax.nn.log_softmax(ref_logits))
    assert_allclose(metric, jnp.sum(ratio * estimates), rtol=1e-5)
    (value, _), uncorrected = evaluated(logits, False)
    assert abs(value - expected) > 1e-2
    assert np.max(np.abs(uncorrected - gradient)) > 1e-2


def test_masked_slots_of_a_corrected_divergence_may_hold_anything():
    arrays = random_logprobs()

    @jax.jit
    @jax.value_and_grad
    def loss(logprobs, old_logprobs, ref_logprobs):
        options = {"ref_logprobs": ref_logprobs, "kl_bias_correction": True, "weights": WEIGHTS}
        return grpo_loss(logprobs, old_logprobs, ADVANTAGES, MASK, **options)[0]

    expected = loss(*arrays)
    for rubbish in RUBBISH:
        dirty = (np.where(MASK, x, np.float32(rubbish)) for x in arrays)
        jax.tree.map(assert_array_equal, loss(*dirty), expected)


# --- masked tokens ---

RUBBISH = [1e4, -1e4, np.inf, -np.inf, np.nan]


@every_choice
def test_masked_is_physically_removed(log_ratio, surrogate, divergence):
    function = compiled(log_ratio, surrogate, divergence)
    logprobs, old_logprobs, ref_logprobs = random_logprobs()
    (loss, metrics), gradient = function(logprobs, old_logprobs, ADVANTAGES, MASK, ref_logprobs, WEIGHTS)

    total, totals = 0, dict.fromkeys(metrics, 0)
    for i in np.flatnonzero(MASK.any(axis=1)):
        kept = np.ix_([i], MASK[i])  # one completion, its tokens only
        (row_loss, row_metrics), row_gradient = function(
            logprobs[kept], old_logprobs[kept], ADVANTAGES[[i]], MASK[kept], ref_logprobs[kept], WEIGHTS[kept]
        )
        total += row_loss
        totals = {name: totals[name] + np.array(row_metrics[name]) for name in totals}
        assert_allclose(gradient[kept], row_gradient, rtol=1e-5, atol=1e-7)
    assert_allclose(loss, total, rtol=1e-5)
    assert_array_equal(np.asarray(gradient)[~MASK], np.zeros(np.sum(~MASK)))
    for name in metrics:
        assert_allclose(metrics[name], totals[name], rtol=1e-5)


arrays_3_5 = hnp.arrays(np.float32, (3, 5), elements=st.floats(-8, 0, width=32))
advantages_3 = hnp.arrays(np.float32, 3, elements=st.floats(-4, 4, width=32))


@pytest.mark.slow
@few
@given(arrays_3_5, arrays_3_5, arrays_3_5, advantages_3, hnp.arrays(np.bool_, (3, 5)))
def test_any_masked_is_physically_removed(logprobs, old_logprobs, ref_logprobs, advantages, mask):
    weights = np.asarray(jitted_weights[token_mean_weights](mask))
    (loss, _), _ = default(logprobs, old_logprobs, advantages, mask, ref_logprobs, weights)
    total = 0
    for i in np.flatnonzero(mask.any(axis=1)):
        kept = np.ix_([i], mask[i])
        (row_loss, _), _ = default(
            logprobs[kept], old_logprobs[kept], advantages[[i]], mask[kept], ref_logprobs[kept], weights[kept]
        )
        total += row_loss
    assert_allclose(loss, total, rtol=1e-4, atol=1e-4)


@every_choice
def test_masked_slots_may_hold_anything(log_ratio, surrogate, divergence):
    function = compiled(log_ratio, surrogate, divergence)
    arrays = random_logprobs()

    def evaluate(logprobs, old_logprobs, ref_logprobs):
        return function(logprobs, old_logprobs, ADVANTAGES, MASK, ref_logprobs, WEIGHTS)

    expected = evaluate(*arrays)
    for rubbish in RUBBISH:
        dirty = [np.where(MASK, x, np.float32(rubbish)) for x in arrays]
        for is_dirty in [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)]:
            result = evaluate(*(d if flag else x for d, x, flag in zip(dirty, arrays, is_dirty, strict=True)))
            jax.tree.map(assert_array_equal, result, expected)


def test_an_empty_batch_has_no_loss_and_no_gradient():
    logprobs, old_logprobs, ref_logprobs = random_logprobs()
    (loss, metrics), gradient = default(logprobs, old_logprobs, ADVANTAGES, np.zeros_like(MASK), ref_logprobs)
    assert loss == 0
    assert_array_equal(gradient, np.zeros((4, 4)))
    assert all(total == 0 and weight == 0 for total, weight in metrics.values())


@few
@given(arrays_3_5, arrays_3_5, arrays_3_5, advantages_3, st.lists(st.integers(0, 5), min_size=3, max_size=3))
def test_padding_width_changes_nothing(logprobs, old_logprobs, ref_logprobs, advantages, lengths):
    mask = np.arange(5) < np.array(lengths)[:, None]
    narrow = default(logprobs, old_logprobs, advantages, mask, ref_logprobs)
    wide = (np.pad(x, ((0, 0), (0, 4))) for x in (logprobs, old_logprobs, mask, ref_logprobs))
    wide_logprobs, wide_old, wide_mask, wide_ref = wide
    (loss, metrics), gradient = default(wide_logprobs, wide_old, advantages, wide_mask, wide_ref)
    assert_allclose(loss, narrow[0][0], rtol=1e-4, atol=1e-4)
    assert_allclose(gradient[:, :5], narrow[1], rtol=1e-5, atol=1e-7)
    jax.tree.map(partial(assert_allclose, rtol=1e-5, atol=1e-5), metrics, narrow[0][1])


# --- split batches ---


@few
@given(
    hnp.arrays(np.float32, (3, 6, 4), elements=st.floats(-8, 0, width=32)),
    hnp.arrays(np.float32, 6, elements=st.floats(-4, 4, width=32)),
    hnp.arrays(np.bool_, (6, 4)),
    st.sampled_from(AGGREGATIONS),
)
def test_microbatches_add_up_to_the_batch(arrays, advantages, mask, aggregation):
    logprobs, old_logprobs, ref_logprobs = arrays
    weights = np.asarray(jitted_weights[aggregation](mask))  # of the whole batch, before it is split
    everything = logprobs, old_logprobs, advantages, mask, ref_logprobs, weights
    (loss, metrics), gradient = default(*everything)
    pieces = [default(*(x[i : i + 2] for x in everything)) for i in (0, 2, 4)]
    assert_allclose(sum(piece[0][0] for piece in pieces), loss, rtol=1e-4, atol=1e-4)
    assert_allclose(np.concatenate([piece[1] for piece in pieces]), gradient, rtol=1e-5, atol=1e-7)
    for name, metric in metrics.items():
        total = np.sum([piece[0][1][name] for piece in pieces], axis=0)
        assert_allclose(total, metric, rtol=1e-4, atol=1e-4)


def test_devices_add_up_to_the_batch():
    # Each of the eight devices makes its weights from the global totals; the losses are summed once.
    logprobs, old_logprobs, _ = random_logprobs((16, 4))
    mask = np.arange(4) < np.random.default_rng(2).integers(0, 5, (16, 1))
    advantages = np.linspace(-1, 1, 16, dtype=np.float32)

    def loss(logprobs, old_logprobs, advantages, mask):
        weights = sequence_mean_weights(mask, axis_name="data")
        return jax.lax.psum(grpo_loss(logprobs, old_logprobs, advantages, mask, weights=weights)[0], "data")

    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharded = jax.shard_map(loss, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec())
    value, gradient = jax.jit(jax.value_and_grad(sharded))(logprobs, old_logprobs, advantages, mask)
    (expected, _), expected_gradient = default(
        logprobs, old_logprobs, advantages, mask, weights=sequence_mean_weights(jnp.asarray(mask))
    )
    assert_allclose(value, expected, rtol=1e-5)
    assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-7)


# --- transformations and shapes ---


@pytest.mark.parametrize(
    "log_ratio", [pytest.param(x, marks=() if x is LOG_RATIOS[-1] else pytest.mark.slow) for x in LOG_RATIOS]
)
def test_jit_equals_eager(log_ratio):
    surrogate, divergence = next(choice[1:] for choice in CHOICES if choice[0] is log_ratio)
    logprobs, old_logprobs, ref_logprobs = random_logprobs()
    arguments = logprobs, old_logprobs, ADVANTAGES, MASK
    eager = grpo_loss(
        *map(jnp.asarray, arguments),
        ref_logprobs=jnp.asarray(ref_logprobs),
        weights=jnp.asarray(WEIGHTS),
        term=ratio_term(log_ratio, surrogate),
        divergence=divergence,
        epsilon_low=0.2,
        epsilon_high=0.2,
    )
    result, _ = compiled(log_ratio, surrogate, divergence)(*arguments, ref_logprobs, WEIGHTS)
    jax.tree.map(partial(assert_allclose, rtol=1e-5), result, eager)


def test_vmap_over_batches_equals_one_at_a_time():
    logprobs, old_logprobs, ref_logprobs = random_logprobs((2, 4, 4))
    advantages, mask = np.stack([ADVANTAGES, -ADVANTAGES]), np.stack([MASK, MASK[::-1]])
    batches = logprobs, old_logprobs, advantages, mask, ref_logprobs
    (losses, _), gradients = jax.vmap(default)(*batches)
    for i in range(2):
        (loss, _), gradient = default(*(x[i] for x in batches))
        assert_allclose(losses[i], loss, rtol=1e-5)
        assert_allclose(gradients[i], gradient, rtol=1e-5, atol=1e-7)


def test_leading_axes_are_all_completions():
    flat = random_logprobs()
    deep = [x.reshape(2, 2, 4) for x in flat]
    (expected, _), _ = default(flat[0], flat[1], ADVANTAGES, MASK, flat[2])
    (loss, _), _ = default(deep[0], deep[1], ADVANTAGES.reshape(2, 2), MASK.reshape(2, 2, 4), deep[2])
    assert_allclose(loss, expected, rtol=1e-6)


def test_advantages_of_completions_equal_advantages_of_tokens():
    logprobs, old_logprobs, ref_logprobs = random_logprobs()
    by_token = np.broadcast_to(ADVANTAGES[:, None], MASK.shape)
    by_row = default(logprobs, old_logprobs, ADVANTAGES, MASK, ref_logprobs)
    result = default(logprobs, old_logprobs, by_token, MASK, ref_logprobs)
    jax.tree.map(partial(assert_allclose, rtol=1e-6), result, by_row)


def test_hyperparameters_may_be_traced():
    arrays = random_logprobs()
    hyperparameters = np.array([[0.0, 0.2, 0.2], [0.04, 0.1, 0.28], [1.0, 0.3, 4.0]], np.float32)

    @jax.jit
    @jax.vmap
    def losses(values):
        kl_coef, low, high = values
        return grpo_loss(
            arrays[0],
            arrays[1],
            ADVANTAGES,
            MASK,
            ref_logprobs=arrays[2],
            weights=WEIGHTS,
            kl_coef=kl_coef,
            epsilon_low=low,
            epsilon_high=high,
        )[0]

    choices = token_log_ratio, clipped_surrogate, kl_k3
    expected = [loop_loss(arrays, ADVANTAGES, MASK, WEIGHTS, *choices, *values) for values in hyperparameters]
    assert_allclose(losses(hyperparameters), expected, rtol=1e-5)


def shapes(**changes):
    """Arguments of `grpo_loss` for two completions of three tokens, some of another shape."""
    right = {
        "logprobs": (2, 3),
        "old_logprobs": (2, 3),
        "advantages": (2,),
        "completion_mask": (2, 3),
        "ref_logprobs": (2, 3),
        "entropy": (2, 3),
        "weights": (2, 3),
    }
    arrays = {name: jnp.zeros(shape) for name, shape in (right | changes).items()}
    return arrays | {"completion_mask": arrays["completion_mask"].astype(bool)}


@pytest.mark.parametrize(
    "wrong",
    [
        {"logprobs": (2, 4)},
        {"old_logprobs": (2, 1)},
        {"old_logprobs": (1, 3)},
        {"completion_mask": (2, 1)},
        {"completion_mask": (3,)},
        {"weights": (2, 1)},
        {"weights": (1, 3)},
        {"ref_logprobs": (2, 1)},
        {"ref_logprobs": (1, 3)},
        {"ref_logprobs": (3,)},
        {"entropy": (2, 1)},
        {"entropy": (2,)},
        {"advantages": (3,)},
        {"advantages": (1,)},
        {"advantages": (1, 3)},
    ],
    ids=lambda wrong: "-".join(f"{name}{shape}" for name, shape in wrong.items()).replace(" ", ""),
)
def test_wrong_shapes_are_refused(wrong):
    with pytest.raises(AssertionError):
        jax.eval_shape(grpo_loss, **shapes(**wrong))


def test_right_shapes_are_accepted():
    # Otherwise the test above would prove nothing.
    loss, _ = jax.eval_shape(grpo_loss, **shapes())
    assert loss.shape == ()
    loss, _ = jax.eval_shape(grpo_loss, **shapes(advantages=(2, 3)))
    assert loss.shape == ()


def test_a_mask_of_numbers_is_refused():
    arguments = shapes()
    arguments["completion_mask"] = arguments["completion_mask"].astype(jnp.float32)
    with pytest.raises(AssertionError):
        grpo_loss(**arguments)


# --- constants of the term, entropy, the sum ---


def test_constants_are_the_term_s_by_name():
    logprobs, old_logprobs = np.log(np.float32([[0.9, 0.1]])), np.log(np.float32([[0.5, 0.5]]))
    arguments = logprobs, old_logprobs, np.float32([1]), np.ones((1, 2), bool)
    assert_allclose(jitted_loss(*arguments, epsilon_high=0.28)[0], -(1.28 + 0.2) / 2, rtol=1e-6)
    # DPPO at a threshold that 0.9 − 0.5 does not exceed: −(1.8 + 0.2)/2.
    loss, _ = jax.jit(partial(grpo_loss, term=dppo_term, threshold=0.5, penalty=0.0))(*arguments)
    assert_allclose(loss, -1, rtol=1e-6)
    for term, wrong in [(clipped_term, "dual_clip"), (dppo_term, "epsilon_low"), (reinforce_term, "epsilon_high")]:
        with pytest.raises(TypeError, match=wrong):
            grpo_loss(*arguments, term=term, **{wrong: 0.2})


def test_entropy_bonus():
    # Weights ¼ on the completion's two tokens: −0.1 (¼ · 1 + ¼ · 2) = −0.075, and −0.025 each of gradient.
    logprobs, mask = jnp.array([[-1.0, -2.0, -3.0]]), jnp.array([[True, True, False]])
    weights = jnp.array([[0.25, 0.25, 0.0]])

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def loss(entropy, coef):
        return grpo_loss(
            logprobs, logprobs, jnp.array([2.0]), mask, weights=weights, entropy=entropy, entropy_coef=coef
        )

    plain, metrics = grpo_loss(logprobs, logprobs, jnp.array([2.0]), mask, weights=weights)
    for rubbish in (0.0, jnp.nan, jnp.inf):
        entropy = jnp.array([[1.0, 2.0, rubbish]])
        (value, with_bonus), gradient = loss(entropy, 0.1)
        assert_allclose(value, plain - 0.075, rtol=1e-6)
        assert_allclose(gradient, [[-0.025, -0.025, 0]], rtol=1e-6)
        jax.tree.map(assert_array_equal, with_bonus, metrics)
        assert_array_equal(loss(entropy, 0.0)[0][0], plain)
    # GRPO has no bonus.
    assert_array_equal(grpo_loss(logprobs, logprobs, jnp.array([2.0]), mask, entropy=entropy)[0], -2.0)


def test_weighted_sum():
    # ½ · 4 − 2 · 3 = −4; what is masked counts nothing, whatever it and its weight are.
    values, weights = jnp.array([[4.0, jnp.nan], [jnp.inf, 3.0]]), jnp.array([[0.5, 1.0], [7.0, -2.0]])
    mask = jnp.array([[True, False], [False, True]])
    sums = jax.jit(jax.value_and_grad(weighted_sum))
    total, gradient = sums(values, weights, mask)
    assert total == weighted_sum(values, weights, mask) == -4
    assert_array_equal(gradient, [[0.5, 0], [0, -2]])
    expected = sum(w * x for w, x, m in zip(weights.ravel(), values.ravel(), mask.ravel(), strict=True) if m)
    assert total == expected
    batches = jax.vmap(weighted_sum)(*(jnp.stack([x, x]) for x in (values, weights, mask)))
    assert_array_equal(batches, [-4, -4])
    assert sums(values, weights, jnp.zeros((2, 2), bool))[0] == 0


@pytest.mark.parametrize("divergence", [kl_k2, kl_k3, kl_abs, kl_unbiased])
def test_a_policy_that_is_the_reference_is_not_pushed_by_it(divergence):
    logprobs, *_ = random_logprobs()
    gradient = jax.grad(lambda x: jnp.sum(divergence(x, jnp.asarray(logprobs))))(logprobs)
    assert_array_equal(gradient, np.zeros((4, 4)))


def test_16_bits_are_computed_in_32():
    short = [x.astype(jnp.bfloat16) for x in random_logprobs()]
    (loss, metrics), gradient = default(*short[:2], ADVANTAGES, MASK, short[2], WEIGHTS)
    long = [x.astype(np.float32) for x in short]
    (expected, expected_metrics), expected_gradient = default(*long[:2], ADVANTAGES, MASK, long[2], WEIGHTS)
    assert loss.dtype == jnp.float32
    assert_allclose(loss, expected, rtol=1e-6)
    jax.tree.map(partial(assert_allclose, rtol=1e-6), metrics, expected_metrics)
    assert_allclose(gradient.astype(np.float32), expected_gradient, rtol=2e-2, atol=1e-6)


def test_vmap_over_keys_of_a_term_that_draws():
    logprobs, old_logprobs, _ = random_logprobs((8, 16))
    advantages, mask = np.linspace(-1, 1, 8, dtype=np.float32), np.ones((8, 16), bool)

    @jax.jit
    def loss(key):
        term = partial(clip_cov_term, key=key, share=0.1, covariance_low=0.0)
        return grpo_loss(logprobs, old_logprobs, advantages, mask, term=term)[0]

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

    term = partial(clipped_term, epsilon_low=0.2, epsilon_high=0.28)
    metrics = jax.jit(partial(policy_metrics, term=term))(logprobs, *arguments)
    expected = {"ratio": (5.0, 5.0), "clip_low": (1.0, 5.0), "clip_high": (1.0, 5.0)}
    assert metrics.keys() == expected.keys()
    for name in expected:
        assert_allclose(metrics[name], expected[name], rtol=1e-6)


# Two completions of π = (0.1, 0.2, 0.8) and π_old = 0.2, so that ρ = (0.5, 1, 4), with A = 1 and A = −1;
# a masked slot of rubbish on each. How many tokens of A < 0 and of A > 0 get no gradient from it:
HELD_BACK = {
    "clipped": (clipped_term, 1, 1),  # 0.5 is below 0.8, 4 above 1.2
    "bounded": (partial(clipped_term, delta=2.0), 2, 1),  # and 4 above 2
    "unclipped": (ratio_term(token_log_ratio, unclipped_surrogate), 0, 0),
    "cispo": (ratio_term(token_log_ratio, partial(cispo_surrogate, epsilon_high=0.2)), 0, 0),
    "sapo": (ratio_term(token_log_ratio, sapo_surrogate), 0, 0),
    "sequence": (ratio_term(sequence_log_ratio, clipped_surrogate), 0, 3),  # the completion's 2 is above 1.2
    "sequence_mean": (ratio_term(sequence_mean_log_ratio, clipped_surrogate), 0, 3),  # 2^⅓ = 1.26
    "gspo": (ratio_term(gspo_log_ratio, clipped_surrogate), 0, 3),
    "reinforce": (reinforce_term, 0, 0),
    "gmpo": (gmpo_term, 1, 1),  # log 0.5 is below −0.4, log 4 above 0.4
    "dppo": (dppo_term, 0, 1),  # moved by −0.1, 0 and 0.6; the square's gradient does not count
    "dppo_tight": (partial(dppo_term, threshold=0.05), 1, 1),
    "vespo": (vespo_term, 0, 0),
    # Covariances ±(log π + 1.378) = (−0.92, −0.23, 1.15) and (0.92, 0.23, −1.15): chosen is the 0.23, the others
    # of the band are held by the clip.
    "clip_cov": (partial(clip_cov_term, key=jax.random.key(0), share=1.0, covariance_low=0.1), 2, 1),
    "kl_cov": (partial(kl_cov_term, share=1.0), 0, 0),
}


@cache
def metrics_of_every_term():
    logprobs = np.log(np.float32([[0.1, 0.2, 0.8, np.nan]] * 2))
    old_logprobs = np.log(np.float32([[0.2, 0.2, 0.2, np.nan]] * 2))
    mask = np.array([[True, True, True, False]] * 2)

    advantages = np.float32([[1, 1, 1, np.nan], [-1, -1, -1, np.nan]])

    @jax.jit
    def of_all(*arguments):
        return {name: grpo_loss(*arguments, term=term)[1] for name, (term, _, _) in HELD_BACK.items()}

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
    logprobs, old_logprobs, _ = random_logprobs((8, 16))
    advantages, mask = np.linspace(-1, 1, 8, dtype=np.float32), np.ones((8, 16), bool)
    (_, metrics), gradient = default(logprobs, old_logprobs, advantages, mask)
    clipped = float(metrics["clip_low"][0] + metrics["clip_high"][0])
    assert clipped == np.sum(np.asarray(gradient) == 0) > 0


def test_metrics_have_no_gradient():
    logprobs, old_logprobs, ref_logprobs = random_logprobs()

    def total_of_metrics(logprobs):
        _, metrics = grpo_loss(logprobs, old_logprobs, ADVANTAGES, MASK, ref_logprobs=ref_logprobs)
        return sum(total for total, _ in metrics.values())

    assert_array_equal(jax.jit(jax.grad(total_of_metrics))(logprobs), np.zeros((4, 4)))


@pytest.mark.parametrize("dtype", [bool, jnp.bfloat16, jnp.float32])
def test_masked_sum(dtype):
    total, weight = masked_sum(jnp.array([1, 0, 1, 1], dtype), jnp.array([True, True, True, False]))
    assert (total, weight) == (2, 3)
    assert (total.dtype, weight.dtype) == (jnp.float32, jnp.float32)


# --- the objective on probabilities of responses ---

EXAMPLE = ([1.2, 0.8, 1.1], [1.0, 1.0, 1.0], [0.9, 1.1, 1.0], [1.0, 0.5, 1.5])


def test_objective_by_hand():
    # No ratio leaves [0.8, 1.2]: the mean of ρA is 3.1/3 = 1.03333.
    # π_θ ∝ (1.08, 0.88, 1.1), π_ref ∝ (1, 0.5, 1.5), each divided by its sum, 3.06 and 3:
    # KL = 0.35294 log 1.05882 + 0.28758 log 1.72549 + 0.35948 log 0.71895 = 0.05842.
    # J = 1.03333 − 0.01 · 0.05842 = 1.032749.
    assert_allclose(grpo_objective(*EXAMPLE, 0.2, 0.01), 1.032749, atol=1e-6)
    assert_array_equal(grpo_objective(*EXAMPLE), grpo_objective(*EXAMPLE, epsilon=0.2, beta=0.01))


def loop_objective(rhos, advantages, old, ref, epsilon, beta):
    scale = sum(r * o for r, o in zip(rhos, old, strict=True))
    surrogate = kl = 0.0
    for i in range(len(rhos)):
        clipped = min(max(rhos[i], 1 - epsilon), 1 + epsilon)
        surrogate += min(rhos[i] * advantages[i], clipped * advantages[i])
        p, q = rhos[i] * old[i] / scale, ref[i] / sum(ref)
        kl += p * np.log(p / q + 1e-10)
    return surrogate / len(rhos) - beta * kl


jitted_objective = jax.jit(grpo_objective)
positive = hnp.arrays(np.float32, 5, elements=st.floats(0.125, 4, width=32))


@few
@given(positive, hnp.arrays(np.float32, 5, elements=st.floats(-4, 4, width=32)), positive, positive)
def test_objective_equals_a_plain_loop(rhos, advantages, old, ref):
    expected = loop_objective(*(x.astype(float) for x in (rhos, advantages, old, ref)), 0.3, 0.5)
    assert_allclose(jitted_objective(rhos, advantages, old, ref, 0.3, 0.5), expected, rtol=1e-4, atol=1e-5)


def test_objective_of_matching_policies_is_the_mean_advantage():
    probabilities = [0.2, 0.3, 0.5]
    assert_allclose(grpo_objective([1.0] * 3, [0.5, -1.0, 2.0], probabilities, probabilities), 0.5, atol=1e-6)


def test_objective_clips_a_large_ratio():
    # −β KL is the same on both sides: only A = 1 is held at 1.2, and A = −1 is not.
    common = [1.0], [1.0]
    assert_allclose(grpo_objective([5.0], [1.0], *common), 1.2, atol=1e-6)
    assert_allclose(grpo_objective([5.0], [-1.0], *common), -5.0, atol=1e-6)


def test_objective_of_an_impossible_response():
    # 0 · log(0 + 1e-10) = 0: only the other response is left, with KL = 1 · log(1/0.5) = 0.6931.
    objective = grpo_objective([0.0, 1.0], [1.0, 1.0], [0.5, 0.5], [0.5, 0.5], beta=1.0)
    assert_allclose(objective, 0.5 - 0.6931, atol=5e-5)


def test_larger_beta_lowers_the_objective():
    values = jax.vmap(lambda beta: grpo_objective(*EXAMPLE, beta=beta))(jnp.array([0.0, 0.01, 0.1, 1.0]))
    assert jnp.all(jnp.diff(values) < 0)


def test_objective_ignores_the_scale_of_probabilities():
    rhos, advantages, old, ref = EXAMPLE
    scaled = grpo_objective(rhos, advantages, [3 * p for p in old], [7 * p for p in ref])
    assert_allclose(scaled, grpo_objective(*EXAMPLE), rtol=1e-6)


def test_objective_under_jit_equals_eager():
    arrays = [jnp.array(x) for x in EXAMPLE]
    assert_allclose(jitted_objective(*arrays), grpo_objective(*arrays), rtol=1e-6)


def test_gradient_of_objective_equals_finite_differences():
    rhos, advantages, old, ref = (jnp.array(x) for x in EXAMPLE)
    off_kink = rhos + jnp.array([0.1, -0.1, 0.0])

    @jax.jit
    def objective(rhos, old, ref):
        return grpo_objective(rhos, advantages, old, ref, beta=0.5)

    check_grads(objective, (off_kink, old, ref), order=1, modes=["rev"], eps=1e-2)


def test_on_policy_gradient_of_objective_is_reinforce():
    # J is maximised; with ρ = π/π_old at 1 and no KL, dJ/d log π = A/G.
    advantages = jnp.array([1.5, -0.7, 0.2])
    old = jnp.array([0.2, 0.3, 0.5])
    gradient = jax.grad(lambda log_pi: grpo_objective(jnp.exp(log_pi) / old, advantages, old, old, beta=0.0))(
        jnp.log(old)
    )
    assert_allclose(gradient, advantages / 3, rtol=1e-5)


@pytest.mark.parametrize("short", range(4))
def test_objective_refuses_lengths_that_differ(short):
    arguments = [list(x) for x in EXAMPLE]
    arguments[short].pop()
    with pytest.raises(ValueError, match="lengths differ"):
        grpo_objective(*arguments)
