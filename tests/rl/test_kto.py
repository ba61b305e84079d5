"""Policies from ratings: z₀ of the whole batch, gradients of TRL, training, and how completions are mismatched."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import refused

from grpo_jax.data.preferences import EncodedPairs, Rating, read_ratings, with_mismatched
from grpo_jax.devices import jit_on_devices, map_rows, sum_rows
from grpo_jax.functional import kto_loss
from grpo_jax.models.policy import Policy
from grpo_jax.offline.pairs import PairBatch, kto_objective
from grpo_jax.rl.pieces import by_prompts, computed_in_pieces
from grpo_jax.rl.update import accumulate_grads

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
    logprobs = jnp.take_along_axis(params[rows.prompt_ids[:, 0]], rows.ids[..., :1], axis=1)
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
    return PairBatch(prompts, np.ones_like(prompts, bool), ids, MASK, **extra)


def loss_and_gradient(name, devices, pieces):
    """As `make_fit_programs` computes them, in float32 as scores are; `tests/functional` compares in float64."""
    loss, estimates_kl = CASES[name]
    objective = kto_objective(TABLE, loss, estimates_kl=estimates_kl)

    def microbatches(rows):
        return by_prompts(len(rows.desirable), pieces)

    def map_pieces(fn, params, batch):
        def of_rows(params, rows):
            return computed_in_pieces(partial(fn, params), rows, microbatches(rows))

        return map_rows(of_rows, devices)(params, batch)

    def step(params, batch):
        batch = objective.prepare(params, batch, map_pieces)
        batch = batch._replace(weights=objective.aggregation(batch.completion_mask))

        def of_rows(params, rows):
            return accumulate_grads(objective.loss_fn, params, rows, microbatches(rows)), {}

        return sum_rows(of_rows, devices)(params, batch)[0]

    program = jit_on_devices(step, devices=devices)
    return jax.device_get(program(jnp.asarray(TOKENS), table_batch()))


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_of_two_pieces_on_each_of_eight_devices_are_trls(name):
    gradient, value, logs = loss_and_gradient(name, devices=8, pieces=2)
    np.testing.assert_allclose(value, GOLDEN[f"{name}.loss"], rtol=1e-6)
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
    assert {key: pytest.approx(total / weight, rel=1e-5) for key, (total, weight) in logs.means.items()} == expected


# ---- ratings


def encoded(prompts, completions, desirable):
    answers = [(ids, []) for ids in completions]
    return EncodedPairs(prompts, answers, [0.0] * len(answers), desirable=desirable)


def test_a_mismatched_completion_is_of_another_prompt_and_nearly_all_serve():
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
def test_a_mismatched_completion_is_found_where_there_are_hardly_any(odd):
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


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"prompt": "a", "completion": "b", "label": 1}, "line 1: column label"),
        ({"prompt": "a", "label": True}, "no column completion"),
        ({"completion": "a", "label": True}, "column prompt"),
        ({"prompt": "a", "completion": "", "label": True}, "no completion"),
        ({"prompt": "a", "completion": "b"}, "line 1 has no column label"),
        ({"prompt": "a"}, "no column chosen"),
    ],
)
def test_rows_that_are_no_ratings_are_refused(tmp_path, row, column):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with refused(column):
        read_ratings(tmp_path / "rows.jsonl")
