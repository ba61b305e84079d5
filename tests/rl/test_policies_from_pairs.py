"""Policies from pairs: scores, gradients, and what is refused. Tiny models throughout."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rl_helpers import assert_close, some_pairs
from scipy import special
from tiny import random_params, tiny_config

from grpo_jax.data.preferences import EncodedPairs
from grpo_jax.functional import dpo_loss, ipo_loss, simpo_loss, token_logprobs
from grpo_jax.models.policy import decoder_policy
from grpo_jax.offline.pairs import (
    evaluate_terms,
    needs_reference,
    pad_pairs,
    pair_batches,
    pair_logprobs,
    pair_weights,
    preference_objective,
    preference_terms,
    score_pairs,
    whole_batch,
    with_intervals,
)

VOCAB = 12
POLICY = decoder_policy(tiny_config(VOCAB))
PARAMS = random_params(tiny_config(VOCAB))


PAIRS = some_pairs(24, VOCAB)
REFERENCE = score_pairs(pair_logprobs, POLICY, PARAMS, PAIRS, num_pairs=8)


def test_a_pair_has_the_log_probabilities_of_its_texts_alone():
    assert REFERENCE.shape == (24, 2)

    @jax.jit
    def alone(prompt, ids):
        hidden = POLICY.hidden(PARAMS, prompt, jnp.ones_like(prompt, bool), ids)
        return jnp.sum(token_logprobs(hidden, POLICY.unembedding(PARAMS), ids).logprobs)

    for side in (0, 1):
        expected = alone(jnp.array(PAIRS.prompts[5])[None], jnp.array(PAIRS.answers[5][side])[None, None])
        np.testing.assert_allclose(REFERENCE[5, side], expected, rtol=1e-5)


def test_the_gradient_is_dpos():
    """∇ = −β σ(−β h) (∇ log π(c) − ∇ log π(r)), the mean over pairs; the row that fills up the batch counts nothing."""
    batch = pad_pairs(PAIRS, np.array([0, 1, 2, 99]), 3, 4)
    reference = np.concatenate([REFERENCE[:3] + np.array([[1.0, -2.0]]), np.zeros((1, 2))]).astype(np.float32)
    batch = batch._replace(ref_logprobs=reference, weights=pair_weights(batch.completion_mask))
    np.testing.assert_allclose(batch.weights, [1 / 3] * 3 + [0])
    loss = partial(dpo_loss, beta=0.5)
    (value, logs), gradient = jax.jit(
        jax.value_and_grad(lambda params: preference_objective(POLICY, loss).loss_fn(params, batch), has_aux=True)
    )(PARAMS)
    _, pull = jax.vjp(jax.jit(lambda params: pair_logprobs(POLICY, params, batch)), PARAMS)
    # Under the policy the log-probabilities are REFERENCE, so that h = −1 − 2 for each pair.
    slopes = np.outer([1, 1, 1, 0], [1, -1]) * -0.5 * special.expit(1.5) / 3
    assert_close(gradient, pull(slopes.astype(np.float32))[0], rtol=1e-3, atol=1e-5)
    assert float(value) == pytest.approx(np.log1p(np.exp(1.5)), rel=1e-4)
    means = {name: float(total / weight) for name, (total, weight) in logs.means.items()}
    assert means["accuracy"] == 0
    assert means["margin"] == pytest.approx(-3, abs=1e-4)
    assert means["log_ratio_chosen"] == pytest.approx(-1, abs=1e-4)
    assert means["logprob_rejected"] == pytest.approx(REFERENCE[:3, 1].mean(), rel=1e-4)


LOGPROBS = jnp.array([[-4.0, -6.0], [-9.0, -3.0]])
# Two and three tokens, three and one.
BATCH = whole_batch(EncodedPairs([[1], [1]], [([2] * 2, [3] * 3), ([2] * 3, [3])], [0.0, 0.0]))
BATCH = BATCH._replace(ref_logprobs=jnp.array([[-5.0, -6.0], [-3.0, -3.0]]))


@pytest.mark.parametrize(
    ("loss", "margin", "accuracy"),
    [
        (dpo_loss, [1, -6], [1, 0]),  # of log-ratios
        (ipo_loss, [0.5, -2], [1, 0]),  # of log-ratios per token
        (simpo_loss, [0, 0], [0.5, 0.5]),  # of log-probabilities per token: −2 and −2, −3 and −3
    ],
)
def test_margins_are_what_the_loss_compares(loss, margin, accuracy):
    _, metrics = preference_terms(loss, LOGPROBS, BATCH)
    for name, expected in (("margin", margin), ("accuracy", accuracy)):
        values, counts = metrics[name]
        np.testing.assert_allclose(values, expected)
        assert counts.all()
    assert ("log_ratio_chosen" in metrics) == needs_reference(loss) == needs_reference(partial(loss))
    # An optional length is given: what IPO squares is the margin less 1/(2τ).
    np.testing.assert_allclose(preference_terms(partial(ipo_loss, tau=0.5), LOGPROBS, BATCH)[0], [0.25, 9.0])


def test_evaluation_is_the_mean_over_pairs_with_intervals():
    values = evaluate_terms(partial(preference_terms, dpo_loss), np.asarray(LOGPROBS), BATCH)
    np.testing.assert_allclose(values["loss"], np.log1p(np.exp([-0.1, 0.6])), rtol=1e-5)
    many = {name: np.tile(x, 8) for name, x in values.items()}
    numbers = with_intervals(many)
    assert numbers["accuracy"] == 0.5
    assert numbers["accuracy_low"] < 0.5 < numbers["accuracy_high"]
    assert numbers["margin"] == pytest.approx(-2.5)


def test_a_batch_of_pairs_has_their_reference():
    steps = [pair_batches(PAIRS, 8, 0, ref_logprobs=REFERENCE)(step) for step in range(3)]
    drawn = np.concatenate([batch.ref_logprobs for batch in steps])
    np.testing.assert_array_equal(sorted(drawn.tolist()), sorted(REFERENCE.tolist()))
    actual = jax.jit(lambda batch: pair_logprobs(POLICY, PARAMS, batch))(steps[1])
    np.testing.assert_allclose(actual, steps[1].ref_logprobs, rtol=1e-4)
