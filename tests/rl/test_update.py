"""The optimizer step: one batch, however it is split, gives one gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bigrams import PARAMS, POLICY, V
from losses import loss_of

from grpo_jax import functional as F
from grpo_jax.config import recipe
from grpo_jax.devices import compiled
from grpo_jax.errors import UsageError
from grpo_jax.functional.presets import PRESETS
from grpo_jax.rl.grpo import grpo_method
from grpo_jax.rl.optimizer import init_state
from grpo_jax.rl.pieces import by_prompts
from grpo_jax.rl.scorers import hidden_states, score_completion_tokens
from grpo_jax.rl.types import Batch
from grpo_jax.rl.update import train_step

N, G, P, T = 8, 3, 5, 6
# A preset for each loss; those that differ in advantages and constants alone are the same program.
DIFFERENT_LOSSES = {(a.term, a.aggregation): name for name, a in PRESETS.items()}.values()
AGGREGATIONS = (F.token_mean_weights, F.sequence_mean_weights, F.sequence_sum_weights, F.constant_length_weights)


@functools.cache
def ragged_batch() -> Batch:
    """Lengths from 0 (a wholly masked row) to T, prompts from 1 to P; old and reference policies near the policy."""
    rng = np.random.default_rng(0)
    prompt_mask = np.arange(P) >= P - rng.integers(1, P + 1, (N, 1))
    completion_mask = np.arange(T) < rng.integers(0, T + 1, (N, G, 1))
    assert not completion_mask.any(-1).all()
    batch = Batch(
        prompt_ids=rng.integers(0, V, (N, P)).astype(np.int32),
        prompt_mask=prompt_mask,
        completion_ids=rng.integers(0, V, (N, G, T)).astype(np.int32),
        completion_mask=completion_mask,
        temperature=rng.uniform(0.8, 1.5, (N, G)).astype(np.float32),
        advantages=rng.normal(size=(N, G)).astype(np.float32),
    )
    logprobs = np.asarray(jax.jit(lambda batch: score_completion_tokens(POLICY, PARAMS, batch))(batch).logprobs)
    near = [logprobs + rng.normal(0, 0.2, logprobs.shape).astype(np.float32) for _ in range(3)]
    return batch._replace(old_logprobs=near[0], ref_logprobs=near[1], sampler_logprobs=near[2])


def policy_loss(config):
    """(parameters of the policy, batch, perhaps a reference's) -> loss, logs; as a run of this configuration has it."""
    loss = loss_of(grpo_method(POLICY, config))

    def loss_fn(params, batch, reference=None):
        return loss({"policy": params} | ({} if reference is None else {"reference": reference}), batch)

    return loss_fn


@functools.cache
def compiled_gradient(aggregation, num_microbatches, devices, preset):
    """(state, batch) -> gradient and metrics of a step, by an optimizer whose state is the gradient it was given."""
    loss_fn = policy_loss(recipe(preset))

    def step(state, batch):
        moved, metrics = train_step(
            state,
            None,
            batch,
            loss_fn=lambda params, others, batch: loss_fn(params, batch),
            weights_of=aggregation,
            optimizer=optax.trace(decay=0.0),
            pieces=lambda rows: by_prompts(rows.prompt_ids.shape[0], num_microbatches),
            devices=devices,
        )
        return moved.opt_state.trace, metrics

    return compiled(step, devices=devices)


def gradient(batch, *, aggregation=F.token_mean_weights, num_microbatches=1, devices=1, preset="grpo"):
    state = init_state(PARAMS, optax.trace(decay=0.0))
    return compiled_gradient(aggregation, num_microbatches, devices, preset)(state, batch)


def assert_same_gradient(one, other, tolerance=1e-6):
    """‖Δ‖/‖g‖ of each leaf."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True):
        relative = float(jnp.linalg.norm(a - b) / jnp.linalg.norm(a))
        assert relative <= tolerance, (jax.tree_util.keystr(path), relative)


@pytest.mark.parametrize(
    ("aggregation", "split"),
    [
        (F.token_mean_weights, {"devices": 8}),
        *(pytest.param(other, {"devices": 8}, marks=pytest.mark.slow) for other in AGGREGATIONS[1:]),
        pytest.param(F.sequence_mean_weights, {"devices": 2, "num_microbatches": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_split_batch_has_the_gradient_of_the_whole(aggregation, split):
    whole, metrics = gradient(ragged_batch(), aggregation=aggregation)
    pieces, piece_metrics = gradient(ragged_batch(), aggregation=aggregation, **split)
    assert_same_gradient(whole, pieces)
    for name, value in metrics.items():
        np.testing.assert_allclose(piece_metrics[name], value, rtol=2e-5, atol=1e-6, err_msg=name)


def test_a_mean_of_microbatch_means_would_be_another_gradient():
    # What the equality above protects from: equal weight for pieces of unequal length.
    batch = ragged_batch()
    halves = [jax.tree.map(lambda x, s=s: x[s], batch) for s in (slice(0, 4), slice(4, 8))]
    whole, _ = gradient(batch)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *(gradient(half)[0] for half in halves))
    relative = optax.global_norm(jax.tree.map(jnp.subtract, whole, mean)) / optax.global_norm(whole)
    assert relative > 0.01


# Of terms and aggregations alone it is held for every preset by the tests of `functional`.
@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(x, marks=() if x in ("dapo", "gspo", "vespo") else pytest.mark.slow)
        for x in sorted(DIFFERENT_LOSSES)
    ],
)
def test_every_preset_has_a_finite_gradient_that_masked_tokens_do_not_change(preset):
    batch, rng = ragged_batch(), np.random.default_rng(1)
    aggregation = PRESETS[preset].aggregation

    def rubbish(x):
        return np.where(batch.completion_mask, x, rng.choice([np.nan, np.inf, -1e30], x.shape)).astype(np.float32)

    spoiled = batch._replace(
        old_logprobs=rubbish(batch.old_logprobs),
        ref_logprobs=rubbish(batch.ref_logprobs),
        sampler_logprobs=rubbish(batch.sampler_logprobs),
        completion_ids=np.where(batch.completion_mask, batch.completion_ids, 3).astype(np.int32),
    )
    clean, metrics = gradient(batch, aggregation=aggregation, preset=preset)
    dirty, _ = gradient(spoiled, aggregation=aggregation, preset=preset)
    assert 0 < metrics["grad_norm"] < np.inf
    assert_same_gradient(clean, dirty)


@pytest.mark.parametrize("divergence", ["full", pytest.param("reverse", marks=pytest.mark.slow)])
def test_a_divergence_of_the_whole_vocabulary_has_the_gradient_of_that_of_all_logits(divergence):
    batch, config = ragged_batch()._replace(ref_logprobs=None), recipe("grpo", kl_coef=0.3, divergence=divergence)
    batch = batch._replace(weights=F.sequence_mean_weights(batch.completion_mask))
    reference = jax.tree.map(lambda x: 1.2 * x, PARAMS)

    def found(params):
        loss, logs = policy_loss(config)(params, batch, reference)
        return loss, logs.means["kl"]

    def expected(params):
        logits = [
            hidden_states(POLICY, p, batch) @ POLICY.unembedding(p).T / batch.temperature[..., None, None]
            for p in (params, reference)
        ]
        kl = F.kl_full(*logits, reverse=divergence == "reverse")
        rest, _ = policy_loss(recipe("grpo", kl_coef=0.0))(params, batch)
        return rest + 0.3 * jnp.sum(batch.weights * kl), F.masked_sum(kl, batch.completion_mask)

    one, other = (jax.jit(jax.value_and_grad(loss, has_aux=True))(PARAMS) for loss in (found, expected))
    np.testing.assert_allclose(one[0][0], other[0][0], rtol=1e-5)
    np.testing.assert_allclose(one[0][1], other[0][1], rtol=1e-4)
    assert_same_gradient(one[1], other[1], 1e-5)
    with pytest.raises(UsageError, match="needs the parameters of a reference"):
        policy_loss(config)(PARAMS, batch)


def test_gradients_that_are_not_finite_change_nothing_but_the_count():
    optimizer = optax.adam(1e-2)
    loss_fn = policy_loss(recipe("grpo"))
    step = jax.jit(
        lambda state, batch: train_step(
            state,
            None,
            batch,
            loss_fn=lambda params, others, batch: loss_fn(params, batch),
            weights_of=F.token_mean_weights,
            optimizer=optimizer,
        )
    )
    good, state = ragged_batch(), init_state(PARAMS, optimizer)
    advantages = np.array(good.advantages)
    advantages[0, 0] = np.nan
    bad = good._replace(advantages=advantages)
    after_bad, metrics = step(state, bad)
    assert metrics["skipped"] == 1
    assert step(after_bad, bad)[1]["skipped"] == 2
    for before, after in zip(
        jax.tree.leaves((state.params, state.opt_state)),
        jax.tree.leaves((after_bad.params, after_bad.opt_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(before, after)
    recovered, metrics = step(after_bad, good)
    assert metrics["skipped"] == 0
    assert any(
        bool(jnp.any(a != b)) for a, b in zip(jax.tree.leaves(recovered.params), jax.tree.leaves(PARAMS), strict=True)
    )
