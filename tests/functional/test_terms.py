"""Log-ratios, surrogates and terms: numbers derived by hand, on-policy gradients, far policies, and chosen tokens."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ADVANTAGES, KEY, LOGPROBS, MASK, TERM_CASES, TOKENS, WEIGHTS
from numpy.testing import assert_allclose, assert_array_equal

from grpo_jax import functional as F

TERMS = {name: case.function for name, case in TERM_CASES.items() if name != "covariance"}
every_term = pytest.mark.parametrize("name", TERMS)


@cache
def evaluated(name):
    """(logprobs, old_logprobs, advantages, mask, weights) -> loss per token, and its gradient; constants by default."""

    def total(logprobs, old_logprobs, advantages, mask, weights):
        loss = TERMS[name](logprobs, old_logprobs, advantages, mask)
        return jnp.sum(weights * jnp.where(mask, loss, 0)), loss

    def function(*arguments):
        gradient, loss = jax.grad(total, has_aux=True)(*arguments)
        return loss, gradient

    return jax.jit(function)


# --- log-ratios and surrogates: numbers derived by hand ---

# log π = (−1, −2, −3), log π_old = (−1.5, −1, −3), the last token masked: d = (0.5, −1, ·).
LOG_RATIO_BY_HAND = [
    (F.token_log_ratio, [0.5, -1, 0]),
    (F.sequence_log_ratio, [-0.5, -0.5, 0]),
    (F.sequence_mean_log_ratio, [-0.25, -0.25, 0]),
    (F.gspo_log_ratio, [-0.25, -0.25, 0]),
]


@pytest.mark.parametrize(("log_ratio", "expected"), LOG_RATIO_BY_HAND)
def test_log_ratio_by_hand(log_ratio, expected):
    result = log_ratio(jnp.array([-1.0, -2, -3]), jnp.array([-1.5, -1, -3]), jnp.array([True, True, False]))
    assert_allclose(result, expected)


def test_gspo_has_the_gradient_of_the_token():
    gradient = jax.grad(lambda x: jnp.sum(WEIGHTS * F.gspo_log_ratio(x, TOKENS["old_logprobs"], MASK)))(LOGPROBS)
    assert_allclose(gradient, WEIGHTS, rtol=1e-6)


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
    F.clipped_surrogate: [*CLIPPED, (100.0, -2.0, 200.0, 200.0)],
    # No more than −4A where A < 0, on the side that the clip leaves open.
    partial(F.clipped_surrogate, delta=4.0): [
        *CLIPPED,
        (3.5, -2.0, 7.0, 7.0),
        (100.0, -2.0, 8.0, 0.0),
        (100.0, 1.0, -1.2, 0.0),
    ],
    F.unclipped_surrogate: [(1.8, 1.0, -1.8, -1.8), (0.4, -1.0, 0.4, 0.4), (100.0, -2.0, 200.0, 200.0)],
    F.cispo_surrogate: [
        (2.0, 1.5, -2 * 1.5 * np.log(2), -3.0),  # −ρ A d; the gradient is −ρ A
        (8.0, 1.0, -5 * np.log(8), -5.0),  # weight capped at 5, gradient kept
        (8.0, -1.0, 5 * np.log(8), 5.0),
        (0.01, -1.0, 0.01 * np.log(0.01), 0.01),  # no lower bound
        (1.0, 3.0, 0.0, -3.0),
    ],
    # σ(log 3) = ¾ and σ(−log 3) = ¼, each of slope 3/16: −A (4/τ) σ, and −A · 4 · 3/16 · ρ.
    F.sapo_surrogate: [
        (1.0, 1.0, -2.0, -1.0),
        (1.0, -1.0, 2 / 1.05, 1.0),
        (1 + np.log(3), 2.0, -6.0, -1.5 * (1 + np.log(3))),
        (1 + np.log(3) / 1.05, -2.0, 6 / 1.05, 1.5 * (1 + np.log(3) / 1.05)),
        (1 - 0.5 * np.log(3), 2.0, -8 / (1 + 3**0.5), -8 / (2 + 3**0.5 + 3**-0.5) * (1 - 0.5 * np.log(3))),
        (100.0, 1.0, -4.0, 0.0),  # a far ratio has no pull
    ],
}


@pytest.mark.parametrize("surrogate", BY_HAND)
def test_surrogate_by_hand(surrogate):
    ratio, advantages, loss, gradient = np.array(BY_HAND[surrogate], np.float32).T
    result, pull = jax.vjp(lambda d: surrogate(d, advantages), np.log(ratio)[:, None])
    assert_allclose(result, loss[:, None], rtol=1e-5)
    assert_allclose(pull(jnp.ones_like(result))[0], gradient[:, None], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("surrogate", "constants", "good", "bad"),
    [
        # Ratios 3 and 0.2, beyond both ends: 1 + 0.5 above, 1 − 0.1 below; A = 1 and A = −1.
        (F.clipped_surrogate, {}, [-1.5, -0.2], [3.0, 0.9]),
        (F.clipped_surrogate, {"delta": 2.0}, [-1.5, -0.2], [2.0, 0.9]),
        (F.clipped_surrogate, {"delta": 1.25}, [-1.5, -0.2], [1.25, 0.9]),  # where A < 0, below 1 + 0.5 too
        (F.cispo_surrogate, {}, [-1.5 * np.log(3), -0.9 * np.log(0.2)], [1.5 * np.log(3), 0.9 * np.log(0.2)]),
    ],
)
def test_each_clip_has_its_own_epsilon(surrogate, constants, good, bad):
    log_ratio, advantages = jnp.log(jnp.array([[3.0, 0.2], [3.0, 0.2]])), jnp.array([1.0, -1.0])
    result = surrogate(log_ratio, advantages, epsilon_low=0.1, epsilon_high=0.5, **constants)
    assert_allclose(result, [good, bad], rtol=1e-5)


@pytest.mark.parametrize(
    ("surrogate", "constants", "name"),
    [
        (F.clipped_surrogate, {"delta": 1.0}, "delta"),
        (F.clipped_surrogate, {"delta": -3}, "delta"),
        (F.clipped_surrogate, {"delta": float("nan")}, "delta"),
        (F.cispo_surrogate, {"epsilon_high": -0.5}, "epsilon_high"),
        (F.cispo_surrogate, {"epsilon_high": -1}, "epsilon_high"),
        (F.sapo_surrogate, {"tau_positive": 0}, "tau_positive"),
        (F.sapo_surrogate, {"tau_negative": -1.0}, "tau_negative"),
    ],
)
def test_bad_constants_are_refused(surrogate, constants, name):
    arguments = jnp.zeros((1, 2)), jnp.ones(1)
    surrogate(*arguments)
    with pytest.raises(ValueError, match=name):
        surrogate(*arguments, **constants)


def test_an_infinite_bound_leaves_the_clip_and_costs_nothing():
    log_ratio, advantages = np.float32([[-0.5, 0.4, 1.8]] * 2), np.float32([1, -1])

    def operations(**constants):
        return str(jax.make_jaxpr(partial(F.clipped_surrogate, **constants))(log_ratio, advantages)).count("\n")

    assert operations() == operations(delta=float("inf")) < operations(delta=4.0)
    expected = F.clipped_surrogate(log_ratio, advantages)
    for delta in (1e9, 1e30, np.float32(np.inf)):
        assert_allclose(F.clipped_surrogate(log_ratio, advantages, delta=delta), expected, rtol=1e-6)


def test_per_token_adds_the_missing_axis_only():
    of_tokens = jnp.ones((2, 3, 4))
    assert F.per_token(jnp.ones((2, 3)), of_tokens).shape == (2, 3, 1)
    assert F.per_token(of_tokens, of_tokens).shape == (2, 3, 4)
    assert F.per_token(jnp.ones(()), jnp.ones(4)).shape == (1,)


# --- every term ---


@every_term
def test_advantages_of_completions_equal_advantages_of_tokens(name):
    arrays = *(TOKENS[key] for key in ("logprobs", "old_logprobs")), ADVANTAGES, MASK, WEIGHTS
    loss, gradient = evaluated(name)(*arrays)
    by_token = np.broadcast_to(ADVANTAGES[:, None], MASK.shape)
    of_tokens, gradient_of_tokens = evaluated(name)(*arrays[:2], by_token, MASK, WEIGHTS)
    assert_allclose(np.where(MASK, of_tokens, 0), np.where(MASK, loss, 0), rtol=1e-6)
    assert_allclose(gradient_of_tokens, gradient, rtol=1e-6)


@every_term
def test_far_policies_stay_finite(name):
    rest = ADVANTAGES, MASK, WEIGHTS
    # Also a token that the policy can no longer say, and a completion that it could not say before.
    impossible = np.where(np.arange(5) == 1, np.float32(-1e30), LOGPROBS)
    far = [(LOGPROBS, LOGPROBS + np.float32(x)) for x in (1e4, -1e4)]
    for pair in (*far, (impossible, TOKENS["old_logprobs"]), (LOGPROBS, impossible)):
        for result in evaluated(name)(*pair, *rest):
            assert np.all(np.isfinite(result))


# Not Clip-Cov's: the tokens that it chooses have none. KL-Cov's |d| has slope 0 at d = 0.
@pytest.mark.parametrize("name", [name for name in TERMS if name != "clip_cov"])
@pytest.mark.parametrize("aggregation", [F.token_mean_weights, F.sequence_mean_weights, F.sequence_sum_weights])
def test_on_policy_gradient_is_reinforce(name, aggregation):
    weights = np.asarray(aggregation(jnp.asarray(MASK)))
    _, gradient = evaluated(name)(LOGPROBS, LOGPROBS, ADVANTAGES, MASK, weights)
    # Of one number a completion, its ratio is on all tokens: the product of theirs, or their geometric mean.
    if name in ("sequence", "sequence_mean_ratio", "gmpo"):
        of_row = weights.sum(axis=1, keepdims=True)
        length = 1 if name == "sequence" else np.maximum(MASK.sum(axis=1, keepdims=True), 1)
        weights = np.where(MASK, of_row / length, 0)
    assert_allclose(gradient, -ADVANTAGES[:, None] * weights, rtol=1e-5, atol=1e-8)


def test_a_constant_that_the_surrogate_does_not_take_is_refused():
    with pytest.raises(TypeError, match="epsilon_low"):
        TERMS["unclipped"](LOGPROBS, LOGPROBS, ADVANTAGES, MASK, epsilon_low=0.1)
    constants = {"epsilon_low": 0.01, "epsilon_high": 0.02}
    log_ratio = F.sequence_log_ratio(*TOKENS.values())
    expected = F.clipped_surrogate(log_ratio, ADVANTAGES, **constants)
    result = F.ratio_term(F.sequence_log_ratio, F.clipped_surrogate)(
        *list(TOKENS.values())[:2], ADVANTAGES, MASK, **constants
    )
    assert_array_equal(result, expected)


# --- REINFORCE, GMPO, DPPO, VESPO: by hand ---


def test_reinforce_by_hand():
    logprobs, mask = jnp.array([[-1.0, -2.0, -3.0]]), jnp.array([[True, True, False]])
    assert_allclose(F.reinforce_term(logprobs, logprobs, jnp.array([-0.5]), mask), [[-0.5, -1.0, 0.0]])
    # The old policy is not read.
    assert_allclose(F.reinforce_term(logprobs, jnp.full((1, 3), jnp.nan), jnp.array([-0.5]), mask), [[-0.5, -1.0, 0.0]])


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
    loss = F.gmpo_term(logprobs, old_logprobs, jnp.array([advantage]), mask, **epsilons)
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
    loss = F.dppo_term(logprobs, sampler_logprobs, jnp.array([1.0, -1.0]), jnp.ones((2, 4), bool), **constants)
    assert_allclose(loss, [good, bad], rtol=1e-5, atol=1e-7)


def test_dropped_tokens_of_dppo_keep_the_gradient_of_the_square_alone():
    # d = log 1.8 on both: A = 1 is dropped, and 2 · 0.001 log 1.8 is left; A = −1 adds 1.8.
    logprobs, sampler_logprobs = (np.log(np.full((2, 1), x, np.float32)) for x in (0.9, 0.5))
    arrays = sampler_logprobs, jnp.array([1.0, -1.0]), jnp.ones((2, 1), bool)
    gradient = jax.grad(lambda x: jnp.sum(F.dppo_term(x, *arrays)))(logprobs)
    square = 0.002 * np.log(1.8)
    assert_allclose(gradient, [[square], [1.8 + square]], rtol=1e-5)


def test_vespo_by_hand():
    # W = 2 in both completions. A = 1: φ = exp(3 + 2 log 2 − 3 · 2) = 4 e⁻³; A = −1: exp(2 + 3 log 2 − 2 · 2) = 8 e⁻².
    logprobs = jnp.array([[-1.0, -2.0, 5.0]] * 2)
    old_logprobs = logprobs - jnp.log(jnp.array([[4.0, 0.5, 9.0]] * 2))
    mask = jnp.array([[True, True, False]] * 2)

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def gradient(logprobs, **constants):
        loss = F.vespo_term(logprobs, old_logprobs, jnp.array([1.0, -1.0]), mask, **constants)
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
    loss = F.vespo_term(logprobs, old_logprobs, jnp.array([1.0, -1.0, 1.0]), mask)
    assert_allclose(loss, [4 * np.exp(-3), -2 * 8 * np.exp(-2), 0], rtol=1e-5)


def test_vespo_bounds_the_completion_s_ratio():
    # Tokens within ±20, so that (25, −5) is 15; completions from log 1e-8 to 20.
    # φ is e^15, 1e-8 and e^20 each, with k = 1 and λ = 0.
    logprobs, mask = jnp.zeros((3, 2)) - 1, jnp.ones((3, 2), bool)
    old_logprobs = logprobs - jnp.array([[25.0, -5.0], [-30.0, 5.0], [15.0, 15.0]])
    term = jax.jit(partial(F.vespo_term, k_positive=1.0, lambda_positive=0.0))
    loss = term(logprobs, old_logprobs, jnp.ones(3), mask)
    expected = np.exp([15, -15, 20])
    assert_allclose(loss, np.broadcast_to(expected[:, None], (3, 2)), rtol=1e-4)
    loss = term(logprobs, logprobs + 15, jnp.ones(3), mask)
    assert_allclose(loss, np.full((3, 2), 1e-8), rtol=1e-4)


def test_a_token_that_a_correction_silences_is_clipped_in_gmpo_like_the_others():
    # d = (1, 0.3) clipped to (0.4, 0.3): the completion's ratio is exp(0.35), whatever weight a token has.
    logprobs, mask = jnp.array([1.0, 0.3]), jnp.ones(2, bool)
    assert_allclose(F.gmpo_term(logprobs, jnp.zeros(2), jnp.array([0.0, 1.0]), mask), [0, -np.exp(0.35)], rtol=1e-6)


# --- covariances, and tokens that are chosen ---


def test_covariance_by_hand():
    # Tokens of log π −1, −2 and −6, mean −3, and A = 2, 2, −1, mean 1: (1 · 2, 1 · 1, −2 · −3).
    logprobs, mask = jnp.array([[-1.0, -2.0], [-6.0, -50.0]]), jnp.array([[True, True], [True, False]])
    assert_allclose(F.token_covariance(logprobs, jnp.array([2.0, -1.0]), mask), [[2, 1], [6, 0]])
    by_token = jnp.array([[2.0, 2.0], [-1.0, jnp.nan]])
    assert_allclose(F.token_covariance(logprobs, by_token, mask), [[2, 1], [6, 0]])


# Pairs of tokens of A = ±1 and log π = −8 ± c, whose covariances are exactly c: 4 below the band from 1 to 5,
# 24 in it, 4 above and 8 negative, 40 of 40. As many slots are masked.
COVARIANCES = np.repeat(np.array([0.5, 1.5, 2, 3, 4, 4.5, 4.75, 6, -1, -2], np.float32), 4).reshape(5, 8)
SIGNS = np.tile(np.array([1, -1], np.float32), 20).reshape(5, 8)
COV_LOGPROBS = np.pad(-8 + SIGNS * COVARIANCES, ((0, 0), (0, 8)))
COV_MASK = np.pad(np.ones((5, 8), bool), ((0, 0), (0, 8)))
COV_ADVANTAGES = np.pad(SIGNS, ((0, 0), (0, 8)))
IN_BAND = np.pad((COVARIANCES > 1) & (COVARIANCES < 5), ((0, 0), (0, 8)))


def test_the_covariances_of_the_example():
    expected = np.pad(COVARIANCES, ((0, 0), (0, 8)))
    assert_allclose(F.token_covariance(COV_LOGPROBS, COV_ADVANTAGES, COV_MASK), expected, atol=1e-5)


@cache
def clip_cov_at(share):
    """(key, old_logprobs, **constants) -> loss and gradient on the example."""

    def total(logprobs, key, old_logprobs, constants):
        loss = F.clip_cov_term(logprobs, old_logprobs, COV_ADVANTAGES, COV_MASK, key=key, share=share, **constants)
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
        return F.clip_cov_term(COV_LOGPROBS, COV_LOGPROBS, COV_ADVANTAGES, COV_MASK, key=key, share=0.1)

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
        loss = F.kl_cov_term(logprobs, old_logprobs, COV_ADVANTAGES, COV_MASK, share=share, penalty=penalty)
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
@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
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
    term = partial({"clip_cov": F.clip_cov_term, "kl_cov": F.kl_cov_term}[name], share=share, **options)

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
    for name in ("clip_cov", "kl_cov"):
        for result in evaluated(name)(LOGPROBS, TOKENS["old_logprobs"], ADVANTAGES, np.zeros_like(MASK), WEIGHTS):
            assert_array_equal(result, np.zeros(MASK.shape))


def test_defaults_of_the_covariance_terms_are_the_paper_s():
    # 10 000 tokens, covariances 2 and 3: two are chosen of either.
    signs = np.tile(np.array([1, -1], np.float32), 5000)[None]
    covariances = np.repeat(np.array([2, 3], np.float32), 5000)[None]
    logprobs, mask = -8 + signs * covariances, np.ones((1, 10_000), bool)
    loss = jax.jit(F.clip_cov_term)(logprobs, logprobs, signs, mask, key=KEY)
    assert np.sum(np.asarray(loss) == 0) == 2
    loss = jax.jit(F.kl_cov_term)(logprobs, logprobs - np.float32(0.5), signs, mask)
    chosen = ~np.isclose(loss, -np.exp(0.5) * signs)
    assert_array_equal(covariances[chosen], [3, 3])
    assert_allclose(np.asarray(loss)[chosen], -np.exp(0.5) * signs[chosen] + 0.5, rtol=1e-6)
