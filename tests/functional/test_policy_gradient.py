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
    cispo_surrogate,
    clipped_surrogate,
    gspo_log_ratio,
    per_token,
    sapo_surrogate,
    sequence_log_ratio,
    sequence_mean_log_ratio,
    token_log_ratio,
    unclipped_surrogate,
)

LOG_RATIOS = [token_log_ratio, sequence_log_ratio, sequence_mean_log_ratio, gspo_log_ratio]
bounded_surrogate = partial(clipped_surrogate, delta=4.0)
SURROGATES = [
    clipped_surrogate,
    bounded_surrogate,
    unclipped_surrogate,
    cispo_surrogate,
    sapo_surrogate,
]
every_log_ratio = pytest.mark.parametrize("log_ratio", LOG_RATIOS)
every_surrogate = pytest.mark.parametrize("surrogate", SURROGATES)
few = settings(max_examples=25, deadline=None, derandomize=True)

jitted = {function: jax.jit(function) for function in LOG_RATIOS + SURROGATES}

# Rows of 4, 2, 0 and 1 tokens; the last has its token in the middle.
MASK = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]], bool)


def random_logprobs():
    rng = np.random.default_rng(0)
    return (jnp.asarray(-rng.exponential(size=MASK.shape), jnp.float32) for _ in range(2))


# --- log-ratios ---

# log π = (−1, −2, −3), log π_old = (−1.5, −1, −3), the last token masked: d = (0.5, −1, ·).
LOG_RATIO_BY_HAND = {
    token_log_ratio: [0.5, -1, 0],
    sequence_log_ratio: [-0.5, -0.5, 0],
    sequence_mean_log_ratio: [-0.25, -0.25, 0],
    gspo_log_ratio: [-0.25, -0.25, 0],
}


@every_log_ratio
def test_log_ratio_by_hand(log_ratio):
    result = log_ratio(jnp.array([-1.0, -2, -3]), jnp.array([-1.5, -1, -3]), jnp.array([True, True, False]))
    assert_allclose(result, LOG_RATIO_BY_HAND[log_ratio])


def loop_log_ratio(log_ratio, logprobs, old_logprobs, mask):
    result = np.zeros(mask.shape)
    for i in range(len(mask)):
        differences = [float(logprobs[i, t]) - float(old_logprobs[i, t]) for t in range(len(mask[i])) if mask[i, t]]
        for t in range(len(mask[i])):
            if mask[i, t] and log_ratio is token_log_ratio:
                result[i, t] = logprobs[i, t] - old_logprobs[i, t]
            elif mask[i, t] and log_ratio is sequence_log_ratio:
                result[i, t] = min(max(sum(differences), -40), 40)
            elif mask[i, t]:
                result[i, t] = sum(differences) / len(differences)
    return result


finite_logprobs = hnp.arrays(np.float32, (3, 4), elements=st.floats(-16, 0, width=32))


@few
@given(finite_logprobs, finite_logprobs, hnp.arrays(np.bool_, (3, 4)))
def test_log_ratio_equals_a_plain_loop(logprobs, old_logprobs, mask):
    for log_ratio in LOG_RATIOS:
        expected = loop_log_ratio(log_ratio, logprobs, old_logprobs, mask)
        assert_allclose(jitted[log_ratio](logprobs, old_logprobs, mask), expected, rtol=1e-5, atol=1e-5)


@every_log_ratio
def test_log_ratio_of_any_leading_axes_jit_and_vmap_equals_eager(log_ratio):
    logprobs, old_logprobs = random_logprobs()
    expected = log_ratio(logprobs, old_logprobs, jnp.asarray(MASK))
    assert_allclose(jitted[log_ratio](logprobs, old_logprobs, MASK), expected, rtol=1e-5, atol=1e-6)
    by_row = jax.jit(jax.vmap(log_ratio))(logprobs, old_logprobs, MASK)
    assert_allclose(by_row, expected, rtol=1e-5, atol=1e-6)
    deep = (x.reshape(2, 2, 4) for x in (logprobs, old_logprobs, MASK))
    assert_allclose(jitted[log_ratio](*deep), expected.reshape(2, 2, 4), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("log_ratio", [token_log_ratio, sequence_log_ratio, sequence_mean_log_ratio])
def test_gradient_of_log_ratio_equals_finite_differences(log_ratio):
    logprobs, old_logprobs = random_logprobs()
    function = jax.jit(lambda logprobs: log_ratio(logprobs, old_logprobs, MASK))
    check_grads(function, (logprobs,), order=1, modes=["rev"], eps=1e-2)


@every_log_ratio
def test_gradient_of_log_ratio_is_that_of_token_or_completion(log_ratio):
    logprobs, old_logprobs = random_logprobs()
    weights = np.arange(1.0, 17, dtype=np.float32).reshape(4, 4)

    def weighted(logprobs, old_logprobs):
        return jnp.sum(weights * log_ratio(logprobs, old_logprobs, MASK))

    gradient, old_gradient = jax.jit(jax.grad(weighted, (0, 1)))(logprobs, old_logprobs)
    # Of a completion's ratio each token gets what all its tokens ask for, of their mean its share;
    # GSPO has the token's gradient by design.
    of_row = (weights * MASK).sum(axis=1, keepdims=True)
    share = of_row / np.maximum(MASK.sum(axis=1, keepdims=True), 1)
    expected = {sequence_log_ratio: of_row, sequence_mean_log_ratio: share}.get(log_ratio, weights)
    assert_allclose(gradient, MASK * expected, rtol=1e-6)
    assert_array_equal(old_gradient, np.zeros((4, 4)))


RUBBISH = [1e4, -1e4, np.inf, -np.inf, np.nan]


@every_log_ratio
def test_masked_slots_may_hold_anything(log_ratio):
    logprobs, old_logprobs = (np.asarray(x) for x in random_logprobs())

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def total(logprobs, old_logprobs):
        ratio = log_ratio(logprobs, old_logprobs, MASK)
        return jnp.sum(jnp.exp(ratio)), ratio

    (_, expected), expected_gradient = total(logprobs, old_logprobs)
    for rubbish in RUBBISH:
        dirty, old_dirty = (np.where(MASK, x, np.float32(rubbish)) for x in (logprobs, old_logprobs))
        for arguments in ((dirty, old_logprobs), (logprobs, old_dirty), (dirty, old_dirty)):
            (_, result), gradient = total(*arguments)
            assert_array_equal(result, expected)
            assert_array_equal(gradient, expected_gradient)


@every_log_ratio
def test_of_one_token_all_ratios_are_the_token_ratio(log_ratio):
    logprobs, old_logprobs = (x[:, :1] for x in random_logprobs())

    def of_one_token(log_ratio):
        def total(logprobs):
            return jnp.sum(jnp.exp(log_ratio(logprobs, old_logprobs, MASK[:, :1])))

        return jax.jit(jax.value_and_grad(total))(logprobs)

    for result, expected in zip(of_one_token(log_ratio), of_one_token(token_log_ratio), strict=True):
        assert_allclose(result, expected, rtol=1e-6)


# --- surrogates: numbers derived by hand ---

# (ratio, advantage, loss, gradient). dρ/dd = ρ: where a loss is −ρA, so is its gradient.
CLIPPED = [
    # A good response may gain no more than up to ρ = 1.2, a bad one lose no more than down to 0.8:
    (1.8, 1.0, -1.2, 0.0),  # −min(1.8, 1.2)
    (0.4, -1.0, 0.8, 0.0),  # −min(−0.4, −0.8)
    # The clip never acts against the advantage, so that a step too far is taken back.
    (1.8, -1.0, 1.8, 1.8),  # −min(−1.8, −1.2)
    (0.4, 1.0, -0.4, -0.4),  # −min(0.4, 0.8)
    (1.1, 2.0, -2.2, -2.2),  # within the clip: −ρA
]
BY_HAND = {
    clipped_surrogate: [*CLIPPED, (100.0, -2.0, 200.0, 200.0)],
    # No more than −4A where A < 0, on the side that the clip leaves open.
    bounded_surrogate: [*CLIPPED, (3.5, -2.0, 7.0, 7.0), (100.0, -2.0, 8.0, 0.0), (100.0, 1.0, -1.2, 0.0)],
    unclipped_surrogate: [(1.8, 1.0, -1.8, -1.8), (0.4, -1.0, 0.4, 0.4), (100.0, -2.0, 200.0, 200.0)],
    cispo_surrogate: [
        (2.0, 1.5, -2 * 1.5 * np.log(2), -3.0),  # −ρ A d; the gradient is −ρ A
        (8.0, 1.0, -5 * np.log(8), -5.0),  # weight capped at 5, gradient kept
        (8.0, -1.0, 5 * np.log(8), 5.0),
        (0.01, -1.0, 0.01 * np.log(0.01), 0.01),  # no lower bound
        (1.0, 3.0, 0.0, -3.0),
    ],
    # σ(log 3) = ¾ and σ(−log 3) = ¼, each of slope 3/16: −A (4/τ) σ, and −A · 4 · 3/16 · ρ.
    sapo_surrogate: [
        (1.0, 1.0, -2.0, -1.0),
        (1.0, -1.0, 2 / 1.05, 1.0),
        (1 + np.log(3), 2.0, -6.0, -1.5 * (1 + np.log(3))),
        (1 + np.log(3) / 1.05, -2.0, 6 / 1.05, 1.5 * (1 + np.log(3) / 1.05)),
        (1 - 0.5 * np.log(3), 2.0, -8 / (1 + 3**0.5), -8 / (2 + 3**0.5 + 3**-0.5) * (1 - 0.5 * np.log(3))),
        (100.0, 1.0, -4.0, 0.0),  # a far ratio has no pull
    ],
}


def evaluate(surrogate):
    """(log_ratio, advantages, **constants) -> loss per token, and its gradients."""

    def total(log_ratio, advantages, **constants):
        loss = surrogate(log_ratio, advantages, **constants)
        return jnp.sum(loss), loss

    def function(*arguments, **constants):
        gradients, loss = jax.grad(total, (0, 1), has_aux=True)(*arguments, **constants)
        return loss, *gradients

    return jax.jit(function)


evaluated = {surrogate: evaluate(surrogate) for surrogate in SURROGATES}


@every_surrogate
def test_surrogate_by_hand(surrogate):
    ratio, advantages, loss, gradient = np.array(BY_HAND[surrogate], np.float32).T
    result = evaluated[surrogate](np.log(ratio)[:, None], advantages)
    assert_allclose(result[0], loss[:, None], rtol=1e-5)
    assert_allclose(result[1], gradient[:, None], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("surrogate", "constants", "good", "bad"),
    [
        # Ratios 3 and 0.2, beyond both ends: 1 + 0.5 above, 1 − 0.1 below; A = 1 and A = −1.
        (clipped_surrogate, {}, [-1.5, -0.2], [3.0, 0.9]),
        (clipped_surrogate, {"delta": 2.0}, [-1.5, -0.2], [2.0, 0.9]),
        (clipped_surrogate, {"delta": 1.25}, [-1.5, -0.2], [1.25, 0.9]),  # where A < 0, below 1 + 0.5 too
        (cispo_surrogate, {}, [-1.5 * np.log(3), -0.9 * np.log(0.2)], [1.5 * np.log(3), 0.9 * np.log(0.2)]),
    ],
)
def test_each_clip_has_its_own_epsilon(surrogate, constants, good, bad):
    log_ratio, advantages = jnp.log(jnp.array([[3.0, 0.2], [3.0, 0.2]])), jnp.array([1.0, -1.0])
    result = surrogate(log_ratio, advantages, epsilon_low=0.1, epsilon_high=0.5, **constants)
    assert_allclose(result, [good, bad], rtol=1e-5)


@pytest.mark.parametrize(
    ("surrogate", "constants", "name"),
    [
        (clipped_surrogate, {"delta": 1.0}, "delta"),
        (clipped_surrogate, {"delta": -3}, "delta"),
        (clipped_surrogate, {"delta": float("nan")}, "delta"),
        (cispo_surrogate, {"epsilon_high": -0.5}, "epsilon_high"),
        (cispo_surrogate, {"epsilon_high": -1}, "epsilon_high"),
        (sapo_surrogate, {"tau_positive": 0}, "tau_positive"),
        (sapo_surrogate, {"tau_negative": -1.0}, "tau_negative"),
    ],
)
def test_bad_constants_are_refused(surrogate, constants, name):
    arguments = jnp.zeros((1, 2)), jnp.ones(1)
    surrogate(*arguments)
    with pytest.raises(ValueError, match=name):
        surrogate(*arguments, **constants)


# --- surrogates: a plain loop ---


def loop_clipped(ratio, a, epsilon_low=0.2, epsilon_high=0.2):
    return -min(ratio * a, min(max(ratio, 1 - epsilon_low), 1 + epsilon_high) * a)


def loop_two_sided(ratio, a, delta=4.0, epsilon_low=0.2, epsilon_high=0.2):
    """As INTELLECT-2 and TRL write it, for δ above 1 + ε_high."""
    return -min(min(ratio, delta) * a, min(max(ratio, 1 - epsilon_low), 1 + epsilon_high) * a)


def loop_dual(ratio, a, delta=4.0, **epsilons):
    """As dual-clip PPO and verl write it, for c above 1."""
    return min(loop_clipped(ratio, a, **epsilons), -delta * a) if a < 0 else loop_clipped(ratio, a, **epsilons)


def loop_cispo(ratio, a, epsilon_low=1.0, epsilon_high=4.0):
    return -min(max(ratio, 1 - epsilon_low), 1 + epsilon_high) * a * np.log(ratio)


def loop_sapo(ratio, a, tau_positive=1.0, tau_negative=1.05):
    tau = tau_positive if a > 0 else tau_negative
    return -a * 4 / tau / (1 + np.exp(-tau * (ratio - 1)))


LOOPS = {
    clipped_surrogate: loop_clipped,
    bounded_surrogate: loop_dual,
    unclipped_surrogate: lambda ratio, a: -ratio * a,
    cispo_surrogate: loop_cispo,
    sapo_surrogate: loop_sapo,
}
EPSILONS = [{"epsilon_low": low, "epsilon_high": high} for low, high in [(0.0, 0.28), (0.2, 0.0), (1.0, 4.0)]]
CONSTANTS = {
    clipped_surrogate: EPSILONS,
    bounded_surrogate: [e | {"delta": d} for e, d in zip(EPSILONS, [1.5, 3.0, 8.0], strict=True)],
    unclipped_surrogate: [{}, {}, {}],
    cispo_surrogate: EPSILONS,
    sapo_surrogate: [{"tau_positive": p, "tau_negative": n} for p, n in [(1.0, 1.05), (0.5, 3.0), (4.0, 1.0)]],
}


def loop_surrogate(surrogate, log_ratio, advantages, constants):
    return [
        [LOOPS[surrogate](np.exp(float(d)), float(a), **constants) for d in row]
        for row, a in zip(log_ratio, advantages, strict=True)
    ]


@few
@given(
    hnp.arrays(np.float32, (3, 4), elements=st.floats(-4, 4, width=32)),
    hnp.arrays(np.float32, 3, elements=st.floats(-4, 4, width=32)),
    st.integers(0, 2),
)
def test_surrogate_equals_a_plain_loop(log_ratio, advantages, i):
    for surrogate in SURROGATES:
        expected = loop_surrogate(surrogate, log_ratio, advantages, CONSTANTS[surrogate][i])
        result = jitted[surrogate](log_ratio, advantages, **CONSTANTS[surrogate][i])
        assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("epsilons", EPSILONS)
def test_the_two_sided_clip_and_the_dual_clip_are_the_same_function(epsilons):
    for delta in (1.01, 3.0, 8.0):
        if delta > 1 + epsilons["epsilon_high"]:
            for ratio in (0.1, 0.9, 1.1, 2.0, 4.0, 100.0):
                for a in (-2.0, 0.0, 1.5):
                    expected = loop_dual(ratio, a, delta, **epsilons)
                    assert loop_two_sided(ratio, a, delta, **epsilons) == pytest.approx(expected)


# --- surrogates: transformations and gradients ---

# On both sides of all clips, and away from the kinks at log 0.8 = −0.22, log 1.2 = 0.18, log 4 = 1.39.
LOG_RATIO = np.array([[-0.5, -0.1, 0.05, 0.4, 1.25], [-0.4, -0.15, 0.1, 0.9, 1.8]], np.float32)
ADVANTAGES = np.array([1.5, -0.7], np.float32)


@pytest.mark.slow
@every_surrogate
def test_surrogate_under_jit_and_vmap_equals_eager(surrogate):
    expected = surrogate(jnp.asarray(LOG_RATIO), jnp.asarray(ADVANTAGES))
    assert_allclose(evaluated[surrogate](LOG_RATIO, ADVANTAGES)[0], expected, rtol=1e-6)
    assert_allclose(jax.jit(jax.vmap(surrogate))(LOG_RATIO, ADVANTAGES), expected, rtol=1e-6)


@pytest.mark.parametrize("surrogate", [s for s in SURROGATES if s is not cispo_surrogate])
def test_gradient_of_surrogate_equals_finite_differences(surrogate):
    _, *gradients = evaluated[surrogate](LOG_RATIO, ADVANTAGES)
    right, left = (evaluated[surrogate](LOG_RATIO + d, ADVANTAGES)[0] for d in np.float32([0.01, -0.01]))
    assert_allclose(gradients[0], (right - left) / 0.02, rtol=2e-3, atol=1e-3)
    right, left = (evaluated[surrogate](LOG_RATIO, ADVANTAGES + d)[0] for d in np.float32([0.01, -0.01]))
    assert_allclose(gradients[1], jnp.sum(right - left, axis=-1) / 0.02, rtol=2e-3, atol=1e-3)


def test_gradient_of_cispo_equals_finite_differences_at_a_constant_weight():
    weight = np.clip(np.exp(LOG_RATIO), 0, 5)
    frozen = jax.jit(lambda d: -weight * ADVANTAGES[:, None] * d)
    check_grads(frozen, (LOG_RATIO,), order=1, modes=["rev"], eps=1e-2)
    _, gradient, _ = evaluated[cispo_surrogate](LOG_RATIO, ADVANTAGES)
    assert_allclose(gradient, jax.grad(lambda d: jnp.sum(frozen(d)))(LOG_RATIO), rtol=1e-6)


@every_surrogate
def test_on_policy_gradient_is_reinforce(surrogate):
    logprobs, _ = random_logprobs()
    advantages = np.array([1.5, -0.7, 3.0, 0.2], np.float32)
    # A completion's ratio stands on each token: one number a completion is their mean, and REINFORCE's is −A Σ log π.
    of_row = np.asarray(MASK / np.maximum(MASK.sum(axis=1, keepdims=True), 1), np.float32)

    @jax.jit
    def gradients(logprobs):
        def policy_gradient(logprobs, log_ratio):
            ratio = log_ratio(logprobs, jax.lax.stop_gradient(logprobs), MASK)
            weights = of_row if log_ratio is sequence_log_ratio else np.float32(MASK)
            return jnp.sum(weights * surrogate(ratio, advantages))

        return {f.__name__: jax.grad(policy_gradient)(logprobs, f) for f in LOG_RATIOS}

    # The gradient of Σ −A log π.
    expected = np.where(MASK, -advantages[:, None], 0)
    for name, gradient in gradients(logprobs).items():
        assert_allclose(gradient, expected, rtol=1e-5, err_msg=name)


@every_surrogate
def test_huge_ratios_of_sampled_tokens_stay_finite(surrogate):
    @jax.jit
    def totals(logprobs):
        def total(logprobs, log_ratio):
            ratio = log_ratio(logprobs, jnp.zeros((2, 2)), jnp.ones((2, 2), bool))
            return jnp.sum(surrogate(ratio, jnp.array([1.0, -1.0])))

        return {f.__name__: jax.value_and_grad(total)(logprobs, f) for f in LOG_RATIOS}

    for difference in (1e4, -1e4):
        for name, (value, gradient) in totals(np.full((2, 2), difference, np.float32)).items():
            assert np.isfinite(value), name
            assert np.all(np.isfinite(gradient)), name


@every_surrogate
def test_hyperparameters_may_be_traced(surrogate):
    names = CONSTANTS[surrogate][0].keys()
    columns = {name: jnp.array([constants[name] for constants in CONSTANTS[surrogate]]) for name in names}

    def at(constants, advantages):
        return surrogate(LOG_RATIO, advantages, **constants)

    advantages = np.stack([ADVANTAGES, -ADVANTAGES, 2 * ADVANTAGES])
    results = jax.jit(jax.vmap(at))(columns, advantages)
    for result, constants, a in zip(results, CONSTANTS[surrogate], advantages, strict=True):
        assert_allclose(result, loop_surrogate(surrogate, LOG_RATIO, a, constants), rtol=1e-5)


@pytest.mark.parametrize("delta", [1e9, 1e30, float("inf"), np.float32(np.inf)])
def test_a_bound_that_is_never_reached_leaves_the_clip(delta):
    expected = evaluated[clipped_surrogate](LOG_RATIO, ADVANTAGES)
    for a, b in zip(evaluated[clipped_surrogate](LOG_RATIO, ADVANTAGES, delta=delta), expected, strict=True):
        assert_allclose(a, b, rtol=1e-6)
    # And a bound of 4 does hold here.
    assert not np.allclose(evaluated[bounded_surrogate](LOG_RATIO, ADVANTAGES)[0], expected[0])


def test_an_infinite_bound_costs_nothing():
    def operations(**constants):
        return str(jax.make_jaxpr(partial(clipped_surrogate, **constants))(LOG_RATIO, ADVANTAGES)).count("\n")

    assert operations() == operations(delta=float("inf")) < operations(delta=4.0)


# --- advantages of completions and of tokens ---


@every_surrogate
def test_advantages_of_completions_or_of_tokens(surrogate):
    by_token = jnp.broadcast_to(ADVANTAGES[:, None], LOG_RATIO.shape)
    assert_array_equal(jitted[surrogate](LOG_RATIO, by_token), jitted[surrogate](LOG_RATIO, ADVANTAGES))
    # And credit may differ within a completion.
    half = by_token.at[:, :2].set(0)
    assert_array_equal(jitted[surrogate](LOG_RATIO, half)[:, :2], np.zeros((2, 2)))
    assert_array_equal(jitted[surrogate](LOG_RATIO, half)[:, 2:], jitted[surrogate](LOG_RATIO, by_token)[:, 2:])


def test_per_token_adds_the_missing_axis_only():
    of_tokens = jnp.ones((2, 3, 4))
    assert per_token(jnp.ones((2, 3)), of_tokens).shape == (2, 3, 1)
    assert per_token(of_tokens, of_tokens).shape == (2, 3, 4)
    assert per_token(jnp.ones(()), jnp.ones(4)).shape == (1,)
