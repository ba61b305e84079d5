"""Checks the parts of single questions: advantages by enumeration, annotators, and gradients of groups."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from claims import annotators, groups
from claims.enumeration import all_completions, quality
from grpo_jax.config import recipe
from grpo_jax.data.prompts import pad_prompts
from grpo_jax.functional import generalized_advantages, rewards_at_end
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.policy import decoder_policy
from grpo_jax.sampling.sampler import Completions
from grpo_jax.scoring import score_completion_tokens
from grpo_jax.step import Batch

V, T, EOS, PAD = 4, 3, 2, 3
POLICY = decoder_policy(ModelConfig(V, 8, 16, 1, 1, 1, 8, initializer_range=1.0))
PARAMS = jax.jit(POLICY.init)(jax.random.key(0))
PROMPTS = pad_prompts([[0, 1], [1]], [{}, {}], width=2, pad_id=PAD)


@pytest.fixture(scope="module")
def tree():
    return all_completions(POLICY, PARAMS, PROMPTS, length=T, eos_id=EOS, pad_id=PAD)


def by_hand(tree, rewards, estimates):
    """Computes the same from means over the completions that begin alike."""
    sums = np.zeros(5)
    for n, p in enumerate(tree.probabilities.reshape(2, -1)):
        for t in range(T):
            alive = (p > 0) & (tree.ids[:, :t] != EOS).all(1)
            ids, weights, estimate = tree.ids[alive], p[alive], estimates[n, alive, t]

            def mean(values, length, ids=ids, weights=weights):
                alike = (ids[:, None, :length] == ids[None, :, :length]).all(-1) * weights
                return alike @ values / alike.sum(-1)

            advantage = mean(rewards[n, alive], t + 1) - mean(rewards[n, alive], t)
            bias = mean(estimate, t + 1) - advantage
            tilt = bias - mean(bias, t)
            errors = bias, tilt, estimate - mean(estimate, t + 1), estimate - advantage, advantage
            sums += [weights @ error**2 for error in errors]
    return sums[:4] / sums[4]


def test_all_completions_have_the_probabilities_of_the_scorer(tree):
    np.testing.assert_allclose(tree.probabilities.sum((1, 2, 3)), 1, rtol=1e-6)

    ids, mask = (np.broadcast_to(x, (2, *x.shape)) for x in (tree.ids, tree.mask))
    batch = Batch(PROMPTS.tokens, ids, mask, np.ones(ids.shape[:2], np.float32))
    logprobs = np.asarray(jax.jit(lambda params: score_completion_tokens(POLICY, params, batch))(PARAMS).logprobs)
    expected = np.exp(np.where(mask, logprobs, 0).sum(-1)) * np.all(mask | (ids == PAD), axis=-1)
    np.testing.assert_allclose(tree.probabilities.reshape(2, -1), expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize(("lam", "steps"), [(0.0, None), (0.6, None), (1.0, None), (0.9, 2)])
def test_bias_and_variance_are_those_of_loops(tree, lam, steps):
    rng = np.random.default_rng(0)
    rewards, values = rng.random((2, V**T)).astype(np.float32), np.zeros((2, V**T, T), np.float32)
    for n, t in itertools.product(range(2), range(T)):  # a critic sees what was written so far
        known = rng.random(V**t).astype(np.float32)
        values[n, :, t] = np.repeat(known, V ** (T - t))
    mask = jnp.broadcast_to(tree.mask, values.shape)
    estimates = generalized_advantages(
        rewards_at_end(jnp.asarray(rewards), mask), jnp.asarray(values), mask, lam=lam, num_steps=steps
    )
    results = quality(tree, rewards, estimates)
    errors = [results[name] for name in ("bias²", "tilt²", "variance", "error")]
    np.testing.assert_allclose(errors, by_hand(tree, rewards, np.asarray(estimates, np.float64)), rtol=1e-5, atol=1e-7)
    assert results["error"] == pytest.approx(results["bias²"] + results["variance"])
    assert results["error, tilt"] == pytest.approx(results["tilt²"] + results["variance"])
    assert (results["variance"] < 1e-12) == (lam == 0)  # the next state is known with the token
    assert (results["tilt²"] < 1e-12) == (lam == 1)  # V − V_critic is the same for all tokens


def test_concordance_counts_a_shift_and_ranks_do_not():
    x = np.array([[[1.0, 2.0, 3.0]]])
    assert annotators.concordance(x, x + 1) == pytest.approx((4 / 3) / (4 / 3 + 1))
    assert annotators.concordance(annotators.ranks(x), annotators.ranks(10 * x)) == 1
    draws = annotators.draw(0, annotators=16, prompts=20)
    without_noise = annotators.scored(draws, annotators.Kind(1.0, 0.0))
    assert annotators.agreement(without_noise, annotators.ranks) == 1
    assert annotators.agreement(without_noise) < annotators.agreement(without_noise, again=True) < 1


def test_annotators_are_fitted():
    draws = annotators.draw(0, annotators=16, prompts=20)
    kind = annotators.fit(draws, scores=0.6, ranks_=0.8)
    scores = annotators.scored(draws, kind)
    assert annotators.agreement(scores) == pytest.approx(0.6, abs=0.01)
    assert annotators.agreement(scores, annotators.ranks) == pytest.approx(0.8, abs=0.01)


def test_gradients_of_groups():
    ids = np.array([[0, 1, 2, 3], [1, 2, 3, 0]])[..., None]
    logprobs = np.full(ids.shape, -1.0, np.float32)
    drawn = Completions(ids, ids >= 0, logprobs, None, np.zeros(ids.shape[:2], bool))
    teach = groups.make_gradients(POLICY, recipe(kl_coef=0.0))
    rewards = np.array([[1.0, 1, 0, 0], [0.5] * 4], np.float32)
    norms, means = teach(PARAMS, PROMPTS.tokens, drawn, rewards, np.array([[1.0, 0.0], [0.5, 0.5]], np.float32))
    assert norms[0] > 0.01
    assert norms[1] == 0  # equal rewards teach exactly nothing
    assert np.linalg.norm(means[0]) == pytest.approx(float(norms[0]), rel=1e-5)
    np.testing.assert_allclose(means[1], means[0] / 2, rtol=1e-4, atol=1e-7)
    # Advantages are divided by the deviation, so larger rewards teach no more.
    scaled, _ = teach(PARAMS, PROMPTS.tokens, drawn, 3 * rewards, np.eye(2, dtype=np.float32))
    np.testing.assert_allclose(scaled[0], norms[0], rtol=1e-3)


def test_signal_and_noise_are_without_bias():
    # Two prompts, with gradients 2 and 4, and −1 and 3: their means are 3 and 1, |mean|² is 3 · 1, and the noise
    # (½ · 2² + ½ · 4²) / 2 = 5.
    assert groups.signal(np.array([2.0, 4.0, 1.0, 3.0]), np.array([[3.0], [1.0]])) == pytest.approx(3 / 5)
