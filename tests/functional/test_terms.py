"""Terms: advantages of tokens, on-policy gradients, far policies, bounds, and chosen tokens."""

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
OLD_LOGPROBS = TOKENS["old_logprobs"]


@jax.jit
def evaluate_all(logprobs, old_logprobs, advantages, mask=MASK):
    """Returns, for every term with constants by default, its loss per token and the gradient of their weighted sum."""

    def total(logprobs, term):
        loss = jnp.where(mask, term(logprobs, old_logprobs, advantages, mask), 0)
        return jnp.sum(WEIGHTS * loss), loss

    gradients = {name: jax.grad(partial(total, term=term), has_aux=True)(logprobs) for name, term in TERMS.items()}
    return {name: (loss, gradient) for name, (gradient, loss) in gradients.items()}


@cache
def evaluated(kind):
    """Compiles one program for each shape of advantages, and runs it once for each kind of input."""
    # A token that the policy can no longer say, or could not say before.
    impossible = np.where(np.arange(5) == 1, np.float32(-1e30), LOGPROBS)
    arguments = {
        "as in cases.py": (LOGPROBS, OLD_LOGPROBS, ADVANTAGES),
        "advantages of tokens": (LOGPROBS, OLD_LOGPROBS, np.broadcast_to(ADVANTAGES[:, None], MASK.shape)),
        "on policy": (LOGPROBS, LOGPROBS, ADVANTAGES),
        "far above": (LOGPROBS, LOGPROBS - np.float32(1e4), ADVANTAGES),
        "far below": (LOGPROBS, LOGPROBS + np.float32(1e4), ADVANTAGES),
        "impossible now": (impossible, OLD_LOGPROBS, ADVANTAGES),
        "impossible before": (LOGPROBS, impossible, ADVANTAGES),
        "no tokens": (LOGPROBS, OLD_LOGPROBS, ADVANTAGES, np.zeros_like(MASK)),
    }
    return jax.device_get(evaluate_all(*(jnp.asarray(x) for x in (*arguments[kind], MASK)[:4])))


@every_term
def test_advantages_of_completions_equal_advantages_of_tokens(name):
    jax.tree.map(
        partial(assert_allclose, rtol=1e-6), evaluated("advantages of tokens")[name], evaluated("as in cases.py")[name]
    )


@every_term
@pytest.mark.parametrize("kind", ["far above", "far below", "impossible now", "impossible before"])
def test_far_policies_stay_finite(name, kind):
    for result in evaluated(kind)[name]:
        assert np.all(np.isfinite(result))


@every_term
def test_without_tokens_there_is_no_loss(name):
    for result in evaluated("no tokens")[name]:
        assert not np.any(result)


# Not Clip-Cov's: the tokens that it chooses have none. KL-Cov's |d| has slope 0 at d = 0.
@pytest.mark.parametrize("name", [name for name in TERMS if name != "clip_cov"])
def test_on_policy_gradient_is_reinforce(name):
    _, gradient = evaluated("on policy")[name]
    weights = WEIGHTS
    # Of one number a completion, its ratio is on all tokens: the product of theirs, or their geometric mean.
    if name in ("sequence", "sequence_mean_ratio", "gmpo"):
        length = 1 if name == "sequence" else np.maximum(MASK.sum(axis=1, keepdims=True), 1)
        weights = np.where(MASK, WEIGHTS.sum(axis=1, keepdims=True) / length, 0)
    assert_allclose(gradient, -ADVANTAGES[:, None] * weights, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("surrogate", [F.clipped_surrogate, F.unclipped_surrogate, F.cispo_surrogate, F.sapo_surrogate])
def test_surrogates_take_plain_numbers(surrogate):
    number = jax.jit(lambda: surrogate(0.1, 2.0))()
    assert_allclose(number, surrogate(jnp.full(1, 0.1), jnp.array(2.0))[0], rtol=1e-6)


def test_infinite_delta_changes_nothing_and_costs_nothing():
    log_ratio, advantages = np.float32([[-0.5, 0.4, 1.8]] * 2), np.float32([1, -1])

    def operations(**constants):
        return str(jax.make_jaxpr(partial(F.clipped_surrogate, **constants))(log_ratio, advantages)).count("\n")

    assert operations() == operations(delta=float("inf")) < operations(delta=4.0)
    expected = F.clipped_surrogate(log_ratio, advantages)
    for delta in (1e9, np.float32(np.inf)):
        assert_allclose(F.clipped_surrogate(log_ratio, advantages, delta=delta), expected, rtol=1e-6)


# --- tokens that are chosen ---

# Pairs of tokens of A = ±1 and log π = −8 ± c, whose covariances are exactly c: 4 below the band from 1 to 5,
# 24 in it, 4 above and 8 negative, 40 of 40. As many slots are masked.
COVARIANCES = np.pad(
    np.repeat(np.array([0.5, 1.5, 2, 3, 4, 4.5, 4.75, 6, -1, -2], np.float32), 4).reshape(5, 8), ((0, 0), (0, 8))
)
COV_ADVANTAGES = np.pad(np.tile(np.array([1, -1], np.float32), 20).reshape(5, 8), ((0, 0), (0, 8)))
COV_MASK = COV_ADVANTAGES != 0
COV_LOGPROBS = np.where(COV_MASK, -8 + COV_ADVANTAGES * COVARIANCES, 0)
IN_BAND = (COVARIANCES > 1) & (COVARIANCES < 5)


@cache
def covariance_term_at(term, share):
    """(key, old_logprobs, constants) -> loss and gradient on the example."""

    def total(logprobs, key, old_logprobs, constants):
        options = constants | ({} if key is None else {"key": key})
        loss = term(logprobs, old_logprobs, COV_ADVANTAGES, COV_MASK, share=share, **options)
        return jnp.sum(loss), loss

    function = jax.jit(jax.grad(total, has_aux=True))

    def at(key=None, old_logprobs=COV_LOGPROBS, **constants):
        gradient, loss = function(COV_LOGPROBS, key, old_logprobs, constants)
        return np.asarray(loss), np.asarray(gradient)

    return at


def chosen_by(share, key, **constants):
    """On policy each token's loss is −A = ±1: it is 0 where chosen or masked."""
    loss, gradient = covariance_term_at(F.clip_cov_term, share)(key, **constants)
    assert_array_equal(loss == 0, gradient == 0)
    assert_array_equal(loss[loss != 0], -COV_ADVANTAGES[loss != 0])
    return (loss == 0) & COV_MASK


# Of 40 tokens, not of 80 slots; 13.2; at least one; no more than there are in the band.
@pytest.mark.parametrize(("share", "number"), [(0.33, 13), (1e-6, 1), (1.0, 24)])
def test_clip_cov_chooses_a_share_within_the_band(share, number):
    chosen = chosen_by(share, KEY)
    assert chosen.sum() == number
    assert not np.any(chosen & ~IN_BAND)
    narrow = chosen_by(share, KEY, covariance_low=2.5, covariance_high=3.5)
    assert narrow.sum() == min(number, 4)
    assert np.all(COVARIANCES[narrow] == 3)
    assert not np.any(chosen_by(share, KEY, covariance_low=10.0, covariance_high=20.0))


def test_clip_cov_chooses_by_its_key_alone():
    chosen = chosen_by(0.33, KEY)
    assert_array_equal(chosen_by(0.33, jax.random.key(0)), chosen)
    # 400 keys: each of the 24 tokens of the band is chosen about 4/24 of the time; sd 7.5 of 66.7.
    keys = jax.random.split(jax.random.key(1), 400)

    @jax.jit
    @jax.vmap
    def losses(key):
        return F.clip_cov_term(COV_LOGPROBS, COV_LOGPROBS, COV_ADVANTAGES, COV_MASK, key=key, share=0.1)

    counts = np.sum((np.asarray(losses(keys)) == 0) & COV_MASK, axis=0)
    assert counts.sum() == 1600
    assert np.all(counts[~IN_BAND] == 0)
    assert_allclose(counts[IN_BAND], 66.7, atol=4 * 7.5)


def test_clip_cov_skips_tokens_already_clipped():
    # The first three completions have ρ = e^0.5 on all tokens, beyond 1.2: where A > 0 the clip holds them, at −1.2.
    old_logprobs = COV_LOGPROBS - np.float32(0.5) * (np.arange(5) < 3)[:, None]
    held = (COV_ADVANTAGES > 0) & (np.arange(5) < 3)[:, None]
    at = covariance_term_at(F.clip_cov_term, 1.0)
    loss, gradient = at(KEY, old_logprobs)
    assert_allclose(loss[held], np.full(held.sum(), -1.2), rtol=1e-6)
    assert_array_equal(gradient == 0, ~COV_MASK | held | IN_BAND)
    assert_array_equal((loss == 0) & COV_MASK, IN_BAND & ~held)
    # The clip is that of the constants.
    loss, _ = at(KEY, old_logprobs, epsilon_high=0.7)
    assert_array_equal((loss == 0) & COV_MASK, IN_BAND)


@pytest.mark.parametrize(("share", "number"), [(0.33, 13), (1e-6, 1), (1.0, 40)])
def test_kl_cov_penalises_the_largest_covariances(share, number):
    # d = ±0.25 by token: −ρA, and 0.25 c more on the chosen.
    d = np.where(np.arange(16) % 4 < 2, 0.25, -0.25).astype(np.float32)
    plain = np.where(COV_MASK, -np.exp(d) * COV_ADVANTAGES, 0)
    for penalty in (1.0, 0.1):
        loss, gradient = covariance_term_at(F.kl_cov_term, share)(None, COV_LOGPROBS - d, penalty=penalty)
        chosen = ~np.isclose(loss, plain, atol=1e-5)
        assert chosen.sum() == number
        assert_allclose(loss, plain + penalty * 0.25 * chosen, rtol=1e-5, atol=1e-6)
        assert_allclose(gradient, plain + penalty * np.sign(d) * chosen, rtol=1e-4, atol=1e-6)
        assert COVARIANCES[chosen].min() >= np.sort(COVARIANCES[COV_MASK])[-number]


def test_clip_cov_over_devices_chooses_from_all_tokens(spread):
    """test_properties.py chooses all tokens of the band."""
    arrays = [x[:, None] for x in (LOGPROBS, OLD_LOGPROBS, ADVANTAGES * np.arange(1, 9, dtype=np.float32), MASK)]
    term = partial(F.clip_cov_term, key=KEY, share=0.2, covariance_low=0.1, covariance_high=99.0)
    expected, of_each = jax.jit(lambda *arrays: (term(*arrays), jax.vmap(term)(*arrays)))(*arrays)
    assert_allclose(spread(partial(term, axis_name="data"))(*arrays), expected, rtol=1e-5, atol=1e-6)
    assert not np.allclose(of_each, expected, atol=1e-3)


def test_covariance_terms_default_to_the_papers_constants():
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
