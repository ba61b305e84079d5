"""Policies from ratings and pairs: z₀ of the whole batch, gradients, scores, and how completions are mismatched."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rl_helpers import assert_close, phase_step, some_pairs
from scipy import special
from tiny import random_params, refused, tiny_config, whole_prompts

from grpo_jax.config import with_options
from grpo_jax.data.preferences import EncodedPairs, Rating, read_ratings, with_mismatched
from grpo_jax.functional import dpo_loss, ipo_loss, kto_loss, simpo_loss, token_logprobs
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.offline import pairs as offline_pairs
from grpo_jax.offline.phase import SupervisedConfig

# ---- gradients of TRL, whatever the batch is cut into

GOLDEN = dict(np.load(Path(__file__).parents[1] / "golden/preferences/golden.npz"))
TOKENS, REF, MASK, DESIRABLE = (
    GOLDEN[f"input.{name}"] for name in ("rated", "rated_ref", "rated_mask", "rated_desirable")
)
CASES = {
    "kto_rated": (partial(kto_loss, beta=0.5, desirable_weight=1.25, undesirable_weight=0.75), True),
    "apo_zero": (partial(kto_loss, beta=0.5), False),
}


def table_states(params, rows):
    """Logits of two tokens. Token 0 of the prompt i has the log-probabilities [i, 0], and token 1 those of [i, 1]."""
    logprobs = jnp.take_along_axis(params[rows.prompt.ids[:, 0]], rows.ids[..., :1], axis=1)
    pair = logprobs, jnp.log(-jnp.expm1(logprobs))
    return jnp.where(rows.ids[..., None] == 0, jnp.stack(pair, -1), jnp.stack(pair[::-1], -1)), None


TABLE = Policy(None, lambda params: jnp.eye(2), table_states, None)


def table_batch():
    """The first token of a prompt is its number, and the second what is padded with, which is the same."""
    size, _, width = TOKENS.shape
    prompts = np.arange(size, dtype=np.int32)[:, None]
    ids = np.broadcast_to(np.array([0, 1], np.int32)[:, None], (size, 2, width))
    ref_logprobs = np.sum(REF * MASK, axis=-1)
    extra = {"margin": np.zeros(size, np.float32), "ref_logprobs": ref_logprobs, "desirable": DESIRABLE}
    return offline_pairs.PairBatch(whole_prompts(prompts), ids, MASK, **extra)


@pytest.mark.parametrize("name", CASES)
def test_sharded_loss_and_gradient_equal_trl(name):
    """In float32 as scores are; `tests/functional` compares in float64."""
    loss, estimates_kl = CASES[name]
    objective, config = offline_pairs.kto_objective(TABLE, loss, estimates_kl=estimates_kl), SupervisedConfig(1, 1e-2)
    start, config = jnp.asarray(TOKENS), with_options(config, devices=8, microbatches=2)
    (gradient,), metrics = phase_step(objective, start, table_batch(), config)
    np.testing.assert_allclose(metrics["loss"], GOLDEN[f"{name}.loss"], rtol=1e-6)
    assert not GOLDEN[f"{name}.gradient"][:, 1].any()  # z₀ has none
    np.testing.assert_allclose(gradient, GOLDEN[f"{name}.gradient"], rtol=1e-5, atol=1e-9)

    log_ratios = np.sum((TOKENS - REF.astype(np.float64)) * MASK, axis=-1)
    kl = log_ratios[:, 1].mean() if name == "kto_rated" else 0.0
    assert name == "apo_zero" or kl > 1
    own = log_ratios[:, 0]
    expected = {
        "kl": kl,
        "accuracy": np.mean((own > kl) == DESIRABLE),
        "log_ratio_desirable": own[DESIRABLE].mean(),
        "log_ratio_undesirable": own[~DESIRABLE].mean(),
    }
    assert {key: pytest.approx(metrics[key], rel=1e-5) for key in expected} == expected


# ---- ratings


def test_batches_log_no_ratio_of_absent_kinds():
    objective, batch = offline_pairs.kto_objective(TABLE), table_batch()._replace(desirable=np.ones_like(DESIRABLE))
    _, metrics = phase_step(objective, jnp.asarray(TOKENS), batch, SupervisedConfig(1, 1e-2))
    assert np.isnan(metrics["log_ratio_undesirable"])
    assert np.isfinite([metrics[name] for name in ("log_ratio_desirable", "accuracy", "kl", "loss")]).all()


def encoded(prompts, completions, desirable):
    answers = [(ids, []) for ids in completions]
    return EncodedPairs(prompts, answers, [0.0] * len(answers), desirable=desirable)


def test_mismatched_completions_come_from_other_prompts():
    prompts = [[number // 2] for number in range(40)]  # two completions of each
    ratings = encoded(prompts, [[number, 40] for number in range(40)], [True, False] * 20)
    pairs = with_mismatched(ratings, seed=3)
    assert [own for own, _ in pairs.answers] == [own for own, _ in ratings.answers]
    assert pairs.desirable == ratings.desirable
    others = [other[0] for _, other in pairs.answers]
    assert all(other // 2 != number // 2 for number, other in enumerate(others))
    assert len(set(others)) > 35
    assert 12 < sum(other % 2 == 0 for other in others) < 28  # of both kinds
    assert with_mismatched(ratings, seed=3) == pairs
    assert with_mismatched(ratings, seed=4) != pairs


@pytest.mark.parametrize("odd", [0, 3, 6])
def test_mismatched_completions_exist_with_few_other_prompts(odd):
    prompts = [[int(number == odd)] for number in range(7)]
    ratings = encoded(prompts, [[number] for number in range(7)], [True] * 7)
    pairs = with_mismatched(ratings, seed=0)
    for number, (_, other) in enumerate(pairs.answers):
        assert other != [odd] if number == odd else other == [odd]
    with refused("have one prompt"):
        with_mismatched(ratings._replace(prompts=[[1]] * 7), seed=0)


def test_ratings_are_read_from_labels_and_from_pairs(tmp_path):
    rows = [
        {"prompt": "a", "completion": "b", "label": True},
        {"prompt": "a", "completion": " ", "label": False},
        {"prompt": "", "completion": "b", "label": False},
        {"prompt": "c", "chosen": "d", "rejected": "e"},
        {"prompt": "c", "chosen": "d", "rejected": "d"},
        {"chosen": "\n\nHuman: f\n\nAssistant: g", "rejected": "\n\nHuman: f\n\nAssistant: h"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    actual, dropped = read_ratings(tmp_path / "rows.jsonl")
    asked = "\n\nHuman: f\n\nAssistant:"
    assert actual == [
        Rating("a", "b", True),
        Rating("c", "d", True),
        Rating("c", "e", False),
        Rating(asked, " g", True),
        Rating(asked, " h", False),
    ]
    assert sorted(dropped.values()) == [1, 1, 1]
    assert {"with an empty completion", "with equal answers"} < dropped.keys()


BAD_RATINGS = [
    ({"prompt": "a", "completion": "b", "label": 2}, "line 1: column label"),
    ({"prompt": "a", "label": True}, "no column completion"),
    ({"completion": "a", "label": True}, "column prompt"),
    ({"prompt": "a", "completion": "", "label": True}, "no completion"),
    ({"prompt": "a", "completion": "b"}, "line 1 has no column label"),
    ({"prompt": "a"}, "no column chosen"),
]


@pytest.mark.parametrize(("row", "column"), BAD_RATINGS)
def test_rows_that_are_no_ratings_are_refused(tmp_path, row, column):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with refused(column):
        read_ratings(tmp_path / "rows.jsonl")


# ---- policies from pairs

VOCAB = 12
POLICY = decoder_policy(tiny_config(VOCAB))
PARAMS = random_params(tiny_config(VOCAB))


PAIRS = some_pairs(24, VOCAB)
REFERENCE = offline_pairs.score_pairs(offline_pairs.pair_logprobs, POLICY, PARAMS, PAIRS, num_pairs=8)


def test_pairs_have_logprobs_of_their_separate_texts():
    assert REFERENCE.shape == (24, 2)

    @jax.jit
    def alone(prompt, ids):
        hidden = POLICY.hidden(PARAMS, whole_prompts(prompt), ids)
        return jnp.sum(token_logprobs(hidden, POLICY.unembedding(PARAMS), ids).logprobs)

    for side in (0, 1):
        expected = alone(jnp.array(PAIRS.prompts[5])[None], jnp.array(PAIRS.answers[5][side])[None, None])
        np.testing.assert_allclose(REFERENCE[5, side], expected, rtol=1e-5)


def test_the_gradient_is_dpos():
    """∇ = −β σ(−β h) (∇ log π(c) − ∇ log π(r)), the mean over pairs; the row that fills up the batch counts nothing."""
    batch = offline_pairs.pad_pairs(PAIRS, np.array([0, 1, 2, 99]), (3, 4))
    reference = np.concatenate([REFERENCE[:3] + np.array([[1.0, -2.0]]), np.zeros((1, 2))]).astype(np.float32)
    batch = batch._replace(ref_logprobs=reference, weights=offline_pairs.pair_weights(batch.completion_mask))
    np.testing.assert_allclose(batch.weights, [1 / 3] * 3 + [0])
    loss = partial(dpo_loss, beta=0.5)
    (value, logs), gradient = jax.jit(
        jax.value_and_grad(
            lambda params: offline_pairs.preference_objective(POLICY, loss).loss_fn(params, batch), has_aux=True
        )
    )(PARAMS)
    _, pull = jax.vjp(jax.jit(lambda params: offline_pairs.pair_logprobs(POLICY, params, batch)), PARAMS)
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
BATCH = offline_pairs.whole_batch(EncodedPairs([[1], [1]], [([2] * 2, [3] * 3), ([2] * 3, [3])], [0.0, 0.0]))
BATCH = BATCH._replace(ref_logprobs=jnp.array([[-5.0, -6.0], [-3.0, -3.0]]))


MARGINS = [
    (dpo_loss, [1, -6], [1, 0]),  # of log-ratios
    (ipo_loss, [0.5, -2], [1, 0]),  # of log-ratios per token
    (simpo_loss, [0, 0], [0.5, 0.5]),  # of log-probabilities per token: −2 and −2, −3 and −3
]


@pytest.mark.parametrize(("loss", "margin", "accuracy"), MARGINS)
def test_margins_are_what_the_loss_compares(loss, margin, accuracy):
    _, metrics = offline_pairs.preference_terms(loss, LOGPROBS, BATCH)
    for name, expected in (("margin", margin), ("accuracy", accuracy)):
        values, counts = metrics[name]
        np.testing.assert_allclose(values, expected)
        assert counts.all()
    assert (
        ("log_ratio_chosen" in metrics)
        == offline_pairs.needs_reference(loss)
        == offline_pairs.needs_reference(partial(loss))
    )
    # An optional length is given: what IPO squares is the margin less 1/(2τ).
    np.testing.assert_allclose(
        offline_pairs.preference_terms(partial(ipo_loss, tau=0.5), LOGPROBS, BATCH)[0], [0.25, 9.0]
    )


def test_evaluation_is_the_mean_over_pairs_with_intervals():
    values = offline_pairs.evaluate_terms(
        partial(offline_pairs.preference_terms, dpo_loss), np.asarray(LOGPROBS), BATCH
    )
    np.testing.assert_allclose(values["loss"], np.log1p(np.exp([-0.1, 0.6])), rtol=1e-5)
    many = {name: np.tile(x, 8) for name, x in values.items()}
    numbers = offline_pairs.with_intervals(many)
    assert numbers["accuracy"] == 0.5
    assert numbers["accuracy_low"] < 0.5 < numbers["accuracy_high"]
    assert numbers["margin"] == pytest.approx(-2.5)


def test_a_batch_of_pairs_has_their_reference():
    batches = offline_pairs.pair_batches(PAIRS._replace(ref_logprobs=REFERENCE), 8, 0)
    steps = [batches(step) for step in range(3)]
    drawn = np.concatenate([batch.ref_logprobs for batch in steps])
    np.testing.assert_array_equal(sorted(drawn.tolist()), sorted(REFERENCE.tolist()))
    actual = jax.jit(lambda batch: offline_pairs.pair_logprobs(POLICY, PARAMS, batch))(steps[1])
    np.testing.assert_allclose(actual, steps[1].ref_logprobs, rtol=1e-4)
