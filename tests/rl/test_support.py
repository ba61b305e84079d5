"""Training on the support of truncated sampling: ratios, gradients, and what runs report."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigrams import POLICY, TASK, V, train_grpo
from rl_helpers import assert_same_gradient, open_run, placed, ragged_batch, ragged_rewards, recording, rise_of
from tiny import random_params, recorder, refused, task_of_tokens, tiny_config

from grpo_jax import functional as F
from grpo_jax.config import PPO, recipe, validate, with_options
from grpo_jax.models.policy import decoder_policy
from grpo_jax.rl import ppo
from grpo_jax.rl.grpo import grpo_method
from grpo_jax.rl.programs import make_method_programs, make_programs
from grpo_jax.rl.scorers import with_ends

LIMITS = {"top_p": 0.8, "top_k": 6, "min_p": 0.1, "support": "sampler"}
RUN = recipe(steps=1, num_prompts=8, group_size=4, max_tokens=6, learning_rate=1e-2, **LIMITS)
MODEL = tiny_config(V, intermediate_size=24, initializer_range=0.5)


@pytest.mark.parametrize("options", [{}, {"minibatches": 2, "epochs": 2}, {"old_logprobs": "sampler"}])
def test_the_first_ratio_over_supports_is_one(tmp_path, options):
    """Over the whole vocabulary the trainer's probabilities are smaller, by the probability of the support."""
    config, decoder, seen = with_options(RUN, **options), decoder_policy(MODEL), []
    run, programs = open_run(tmp_path, config), make_programs(decoder, TASK, config)
    train_grpo(TASK, config, run, recording(programs, seen), params=random_params(MODEL), policy=decoder)
    (line,), (batch, *_) = run.lines(), seen[0]
    assert line["first_ratio_deviation"] < 1e-4
    assert line["support_left_out"] == pytest.approx(0, abs=1e-6)
    np.testing.assert_allclose(batch.sampler_logprobs, batch.processed_logprobs, atol=1e-5)
    sizes = (batch.support_ids >= 0).sum(-1)[batch.completion_mask]
    assert (sizes > 1).any()
    assert (sizes < V).all()
    np.testing.assert_allclose(
        np.where(batch.completion_mask, batch.ref_logprobs - batch.processed_logprobs, 0), 0, atol=1e-4
    )
    if "minibatches" in options:
        difference = batch.old_logprobs - batch.processed_logprobs
        np.testing.assert_allclose(np.where(batch.completion_mask, difference, 0), 0, atol=1e-4)


def test_training_on_supports_raises_the_reward(tmp_path):
    config = with_options(RUN, steps=20, learning_rate=5e-2, max_tokens=3, top_p=0.95)
    run = open_run(tmp_path, config)
    train_grpo(TASK, config, run)
    assert rise_of(run.lines()) > 0.2
    assert not any("support" in warning["message"] for warning in run.lines("warnings.jsonl"))


def test_stale_rollouts_bring_their_supports(tmp_path):
    config = with_options(RUN, steps=3, staleness=1, correction="token")
    run = open_run(tmp_path, config)
    state = train_grpo(TASK, config, run)
    (queued,) = state.source
    assert queued.support_ids.shape == (*queued.completion_ids.shape, 6)
    first, *others = [line["first_sampler_mismatch"] for line in run.lines()]
    assert first == pytest.approx(1, abs=1e-5)
    assert min(others) > 1.001


def test_runs_report_what_small_supports_leave_out(tmp_path):
    config = with_options(RUN, top_k=0, min_p=0.0, top_p=0.99, support_size=2)
    run, seen = open_run(tmp_path, config), []
    train_grpo(TASK, config, run, recording(make_programs(POLICY, TASK, config), seen))
    (line,), (batch, *_) = run.lines(), seen[0]
    left_out = 1 - np.exp(batch.processed_logprobs - batch.sampler_logprobs)[batch.completion_mask]
    assert line["support_left_out"] == pytest.approx(left_out.mean(), rel=1e-4) != pytest.approx(0, abs=0.05)
    assert line["first_ratio_deviation"] < 1e-4
    messages = [warning["message"] for warning in run.lines("warnings.jsonl")]
    assert any(f"leaves out {line['support_left_out']:.2g} of" in message for message in messages)


def a_batch(lengths=None):
    """Completions whose tokens have 1 to 5 tokens in their supports, the sampled ones among them."""
    batch, noise = ragged_batch((8, 4, 3, 4), V, lengths=lengths, shortest=1), np.random.default_rng(3)
    others = np.argsort(
        noise.random((*batch.completion_ids.shape, V)) + (np.arange(V) == batch.completion_ids[..., None])
    )
    sizes = noise.integers(0, 5, batch.completion_ids.shape)
    others = np.where(np.arange(4) < sizes[..., None], others[..., :4], -1)
    support_ids = np.concatenate([others, batch.completion_ids[..., None]], axis=-1).astype(np.int32)
    return batch._replace(support_ids=support_ids, processed_logprobs=batch.sampler_logprobs, old_logprobs=None)


def gradient_of(batch, **options):
    config = with_options(RUN, group_size=4, entropy_coef=0.1, **options)
    task, decoder = task_of_tokens((0,), 0, V), decoder_policy(MODEL)
    method = grpo_method(decoder, config)._replace(optimizer=recorder(1))
    programs = make_method_programs(method, decoder, task, config)
    start = placed(programs, {"policy": random_params(MODEL)}, batch, ragged_rewards(8, 4))
    return start.scored(programs, reference=random_params(MODEL)).learned(programs)[0].opt_state.gradients["policy"]


def test_gradients_ignore_pieces_and_masked_tokens():
    """Pieces of 12 tokens pack completions; the values behind the end of a completion do not matter."""
    batch = a_batch()
    whole = gradient_of(batch)
    assert_same_gradient(gradient_of(batch, piece_tokens=40), whole, 1e-5)
    assert_same_gradient(gradient_of(batch, piece_tokens=12), whole, 1e-5)
    masked = ~batch.completion_mask
    other = batch._replace(
        completion_ids=np.where(masked, 1, batch.completion_ids),
        support_ids=np.where(masked[..., None], -1, batch.support_ids),
    )
    assert_same_gradient(gradient_of(other), whole, 1e-6)


def in_float64(hidden, unembedding, ids, support_ids, temperature):
    """The sum of log-probabilities and of 0.3 entropies, from all logits."""
    logits = hidden @ unembedding.T / temperature[..., None]
    is_in = jax.nn.one_hot(support_ids, len(unembedding), dtype=bool).any(-2)
    log_p = jax.nn.log_softmax(jnp.where(is_in, logits, -jnp.inf))
    entropy = -jnp.sum(jnp.where(is_in, jnp.exp(log_p) * jnp.where(is_in, log_p, 0), 0), axis=-1)
    return jnp.sum(jnp.take_along_axis(log_p, ids[..., None], axis=-1)) + 0.3 * jnp.sum(entropy)


def ours(hidden, unembedding, ids, support_ids, temperature):
    scores = F.support_logprobs(hidden, unembedding, ids, support_ids, temperature=temperature)
    return jnp.sum(scores.logprobs) + 0.3 * jnp.sum(scores.entropy)


def test_gradients_equal_float64_and_finite_differences():
    batch, noise = a_batch(), np.random.default_rng(0)
    shape = batch.completion_ids.shape
    hidden, unembedding = noise.normal(size=(*shape, 5)), noise.normal(size=(V, 5))
    others = batch.completion_ids, batch.support_ids, np.broadcast_to(batch.temperature[..., None], shape)
    single = [x.astype(np.float32) for x in (hidden, unembedding)]
    gradients = jax.grad(ours, argnums=(0, 1))(*single, *others)
    compiled = jax.jit(jax.grad(ours, argnums=(0, 1)))(*single, *others)
    for one, other in zip(gradients, compiled, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    with jax.enable_x64(True):
        expected = jax.jit(jax.grad(in_float64, argnums=(0, 1)))(hidden, unembedding, *others)
        value = partial(jax.jit(in_float64), ids=others[0], support_ids=others[1], temperature=others[2])
        directions = [noise.normal(size=x.shape) for x in (hidden, unembedding)]
        ends = [value(hidden + e * directions[0], unembedding + e * directions[1]) for e in (1e-5, -1e-5)]
    slope = sum(float(np.sum(x * y)) for x, y in zip(gradients, directions, strict=True))
    assert slope == pytest.approx(float(ends[0] - ends[1]) / 2e-5, rel=1e-5)
    for one, other in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_logits_outside_the_support_get_no_gradient():
    unembedding, support_ids = np.eye(V, dtype=np.float32), np.array([[1, 4, -1], [2, -1, -1]])
    hidden = np.random.default_rng(0).normal(size=(2, V)).astype(np.float32)
    gradient = jax.grad(ours)(hidden, unembedding, np.array([4, 2]), support_ids, np.ones(2, np.float32))
    assert (np.asarray(gradient) != 0).nonzero()[1].tolist() == [1, 4]  # a support of one token has no gradient


def test_critics_score_the_end_of_completions_with_supports():
    batch, decoder = a_batch(), decoder_policy(MODEL)
    config = with_options(PPO, critic="shared", bootstrap_truncated=True, **LIMITS)
    params = {"policy": random_params(MODEL)}
    params["critic"] = ppo.heads.Headed(None, jnp.linspace(-1, 1, MODEL.hidden_size))
    scores, ends = (jax.jit(partial(ppo.score, decoder, decoder))(params, x) for x in (batch, with_ends(batch)))
    assert config.sampling.kept_tokens == 6
    for name in ("old_logprobs", "old_entropy"):
        mask, whole = batch.completion_mask, ends[name][:, :, :-1]
        np.testing.assert_allclose(np.where(mask, whole, 0), np.where(mask, scores[name], 0), atol=1e-5)


REFUSED = [
    ({"top_p": 1.0, "top_k": 0, "min_p": 0.0}, "draws from all tokens"),
    ({"top_k": 1}, "one token nothing can be learned"),
    ({"support_size": 1}, "support_size"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_supports_of_all_or_one_token_are_refused(changes, words):
    with refused(words):
        validate(with_options(RUN, **changes))


def test_geometric_corrections_need_the_support():
    validate(with_options(RUN, correction="geometric"))
    with refused("set support to sampler"):
        validate(with_options(RUN, correction="geometric", support="vocabulary"))
