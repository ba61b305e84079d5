"""A teacher in the supervised phase: gradients by brute force over the vocabulary, pieces and devices, and runs."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bigrams import PARAMS, POLICY, V

from grpo_jax.config import DistillationConfig
from grpo_jax.data.packing import pack, packed_batches, packed_pieces
from grpo_jax.data.types import pad_completions, pad_prompts
from grpo_jax.devices import compiled, sum_rows
from grpo_jax.fit import fit
from grpo_jax.functional import token_mean_weights
from grpo_jax.models.params import split
from grpo_jax.offline.phase import SupervisedConfig
from grpo_jax.offline.sft import DistillationTarget, distillation_loss, distillation_objective, mean_divergence
from grpo_jax.rl.pieces import by_prompts
from grpo_jax.rl.types import Batch
from grpo_jax.rl.update import accumulate_grads
from grpo_jax.runs.checkpoint import params_sha256
from grpo_jax.runs.folder import RunFolder

# Of another width, with a token that the policy does not have.
TEACHER = {name: jax.random.normal(jax.random.key(10 + i), (V + 1, 9)) for i, name in enumerate(PARAMS)}
KINDS = ["reverse_kl", "forward_kl", "jsd"]


def texts(count, seed=0):
    noise = np.random.default_rng(seed)
    prompts = [noise.integers(0, V, noise.integers(1, 4)).tolist() for _ in range(count)]
    return prompts, [noise.integers(0, V, noise.integers(1, 5)).tolist() for _ in range(count)]


ROWS = pack(*texts(40), width=8)
BATCH = packed_batches(ROWS, 16, 0)(0)
WEIGHTED = BATCH._replace(weights=jax.jit(token_mean_weights)(BATCH.completion_mask))


def target_of(kind, k=0, nll_coef=0.3):
    beta = {"distillation_beta": 0.3} if kind == "jsd" else {}
    return DistillationTarget(POLICY, DistillationConfig(kind, distillation_top_k=k, **beta), nll_coef)


def by_brute_force(kind, k, params):
    """Σ w [D_T − 0.3 log π], from all logits of the tokens that both have; nothing is wrapped or shifted."""
    rows, places = np.nonzero(BATCH.completion_mask)

    def term(before, token):
        q, p = (jax.nn.softmax((jnp.tanh(x["before"])[before] @ x["after"].T)[:V]) for x in (params, TEACHER))
        likely = jnp.log(q[token])
        if k:
            chosen = jnp.argsort(-p)[:k]
            p, q = (jnp.append(x[chosen], 1 - x[chosen].sum()) for x in (p, q))
        m = 0.3 * p + 0.7 * q
        divergence = {
            "reverse_kl": jnp.sum(q * jnp.log(q / p)),
            "forward_kl": jnp.sum(p * jnp.log(p / q)),
            "jsd": jnp.sum(0.3 * p * jnp.log(p / m) + 0.7 * q * jnp.log(q / m)),
        }[kind]
        return divergence - 0.3 * likely

    terms = jax.vmap(term)(BATCH.ids[rows, places - 1], BATCH.ids[rows, places])
    return jnp.sum(WEIGHTED.weights[rows, places] * terms)


@pytest.mark.parametrize(
    ("kind", "k"),
    [
        pytest.param(kind, k, marks=() if (kind, k) == ("jsd", 3) else pytest.mark.slow)
        for kind in KINDS
        for k in (0, 3)
    ],
)
def test_loss_and_gradient_equal_brute_force_over_the_vocabulary(kind, k):
    def found(params):
        return distillation_loss(POLICY, {"policy": params, "teacher": TEACHER}, WEIGHTED, target=target_of(kind, k))[0]

    one = jax.jit(jax.value_and_grad(found))(PARAMS)
    other = jax.jit(jax.value_and_grad(partial(by_brute_force, kind, k)))(PARAMS)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), one, other)
    assert optax.global_norm(other[1]) > 0.1


@pytest.mark.parametrize(
    ("devices", "pieces"), [*(pytest.param(*x, marks=pytest.mark.slow) for x in [(1, 4), (8, 1)]), (8, 2)]
)
@pytest.mark.parametrize(("kind", "k"), [pytest.param("forward_kl", 0, marks=pytest.mark.slow), ("jsd", 3)])
def test_neither_pieces_nor_devices_count(kind, k, devices, pieces):
    target = target_of(kind, k)

    def step(models, batch, *, devices, pieces):
        batch = batch._replace(weights=token_mean_weights(batch.completion_mask))

        def of_rows(models, rows):
            def loss_fn(policy, piece):
                return distillation_loss(POLICY, models | {"policy": policy}, piece, target=target)

            found = accumulate_grads(loss_fn, models["policy"], rows, by_prompts(len(rows.ids), pieces))
            return found, {}

        return sum_rows(of_rows, devices)(models, batch)[0]

    models = {"policy": PARAMS, "teacher": TEACHER}
    whole = jax.jit(partial(step, devices=1, pieces=1))(models, BATCH)
    found = compiled(partial(step, devices=devices, pieces=pieces), devices=devices)(models, BATCH)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), found, whole)


def test_packed_texts_and_prompts_with_completions_are_the_same_to_it():
    prompts, completions = texts(12)
    packed = pack(prompts, completions, width=8)
    ids, mask = pad_completions([[completion] for completion in completions], 4)
    padded = pad_prompts(prompts, [{} for _ in prompts], width=3, pad_id=0)
    alone = Batch(padded.ids, padded.mask, ids, mask, np.ones((len(prompts), 1), np.float32))

    def value(batch):
        batch = batch._replace(weights=token_mean_weights(jnp.asarray(batch.completion_mask)))
        loss, logs = distillation_loss(
            POLICY, {"policy": PARAMS, "teacher": TEACHER}, batch, target=target_of("reverse_kl", 3)
        )
        return loss, {name: total / weight for name, (total, weight) in logs.means.items()}

    one, other = (jax.jit(value)(batch) for batch in (packed, alone))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4), one, other)


@pytest.mark.slow
def test_the_student_nears_its_teacher_and_resumes_to_the_bit(tmp_path):
    config = SupervisedConfig(40, 5e-2, checkpoint_every=10, log_every=10, eval_every=20)
    target, heldout = target_of("forward_kl", nll_coef=0.0), pack(*texts(20, seed=1), width=8)

    def run(name, stop=None, config=config, teacher=TEACHER):
        def batch(step):
            if step == stop:
                raise KeyboardInterrupt
            return packed_batches(ROWS, 16, 0)(step)

        def evaluate(params, step):
            assert params.keys() == {"policy", "teacher"}
            divergence = mean_divergence(POLICY, params, packed_pieces(heldout, 8), target=target)
            return {"heldout_distillation": divergence}

        folder = RunFolder(tmp_path / name, {})
        params = {"policy": PARAMS, "teacher": teacher}
        objective = distillation_objective(POLICY, target)
        state = fit(objective, params, batch, config, folder, phase="sft", evaluate=evaluate)
        return params_sha256(state.params), folder.lines()

    whole, lines = run("whole")
    held = [line["heldout_distillation"] for line in lines if "heldout_distillation" in line]
    assert len(held) == 3
    assert held[-1] < 0.5 * held[0]
    assert lines[-1]["loss"] == pytest.approx(lines[-1]["distillation"], rel=1e-5)
    with pytest.raises(KeyboardInterrupt):
        run("cut", stop=25)
    assert run("cut") == (whole, lines)
    assert run("other", config=replace(config, steps=1), teacher=PARAMS)[1][-1]["grad_norm"] < 1e-4  # its own teacher


def test_what_is_trained_is_the_policy_alone():
    trained, frozen = split({"policy": PARAMS, "teacher": TEACHER})
    assert trained == {"policy": PARAMS}
    assert frozen["teacher"] is TEACHER
