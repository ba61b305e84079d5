"""A teacher in GRPO's loop and in the supervised phase: gradients by brute force over the vocabulary, and runs."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bigrams import PARAMS, POLICY, D, V
from rl_helpers import RUN, assert_close, loss_of, near, open_run, ragged_batch
from tiny import digit_task, refused, save_tiny_model, slow_unless

from experiments.tasks import arithmetic
from grpo_jax import functional as F
from grpo_jax.config import PPO, DistillationConfig, Divergence, ModelOptions, recipe, with_options
from grpo_jax.data.packing import pack, packed_pieces
from grpo_jax.data.prompts import pad_prompts
from grpo_jax.data.types import pad_completions
from grpo_jax.models.decoder.heads import Headed
from grpo_jax.models.huggingface import load_pretrained
from grpo_jax.offline.distillation import distillation_loss, mean_divergence
from grpo_jax.rl.grpo import grpo_method
from grpo_jax.rl.programs import make_method, make_programs
from grpo_jax.rl.types import RewardArrays
from grpo_jax.scoring import score_completion_tokens, states_of
from grpo_jax.step import Batch
from grpo_jax.training.phases import train
from grpo_jax.training.prepare import load_frozen

WIDTH = 9
CONFIG = with_options(RUN, kl_coef=0.0, distillation="reverse_kl", reward_coef=0.0)
# Of another width, with a token that the policy does not have.
normal = jax.jit(jax.random.normal, static_argnums=1)
TEACHER = {name: normal(jax.random.key(10 + i), (V + 1, WIDTH)) for i, name in enumerate(PARAMS)}
MODELS = {"policy": PARAMS, "teacher": TEACHER}


@cache
def a_batch() -> Batch:
    """Ragged completions of policies that are near the one that is trained."""
    batch = near(POLICY, PARAMS, ragged_batch((4, 3, 2, 5), V, shortest=1))
    return batch._replace(ref_logprobs=None, weights=jax.jit(F.sequence_mean_weights)(batch.completion_mask))


def some_rewards() -> RewardArrays:
    rewards = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
    return RewardArrays(jnp.asarray(rewards), jnp.ones((4, 3), bool))


def logits_of(params, batch):
    hidden = states_of(POLICY, params, batch).hidden
    return hidden @ POLICY.unembedding(params).T / batch.temperature[..., None, None]


def by_brute_force(kind, k, beta, params, batch):
    """The divergence at each token, from all logits of the tokens that both have."""
    student, teacher = logits_of(params, batch), logits_of(TEACHER, batch)[..., :V]
    p, q = jax.nn.softmax(teacher), jax.nn.softmax(student)
    if k:
        ids = jnp.argsort(-teacher, axis=-1)[..., :k]
        p, q = (jnp.take_along_axis(x, ids, axis=-1) for x in (p, q))
        p, q = (jnp.concatenate([x, 1 - x.sum(-1, keepdims=True)], axis=-1) for x in (p, q))
    if kind == "jsd":
        m = beta * p + (1 - beta) * q
        return jnp.sum(beta * p * jnp.log(p / m) + (1 - beta) * q * jnp.log(q / m), axis=-1)
    return jnp.sum(q * jnp.log(q / p) if kind == "reverse_kl" else p * jnp.log(p / q), axis=-1)


def scores_of(method, models, batch):
    """The fields of a batch that the scorers of a method give."""
    return {name: array for scorer in method.scorers for name, array in scorer(models, batch).items()}


LOSSES = {f"{kind} {k}": (kind, k) for kind in ("reverse_kl", "forward_kl", "jsd") for k in (0, 3)}


@pytest.mark.parametrize("name", slow_unless(("jsd 0", "forward_kl 3"), LOSSES))
def test_loss_and_gradient_equal_brute_force(name):
    kind, k = LOSSES[name]
    beta = {"distillation_beta": 0.3} if kind == "jsd" else {}
    config = recipe("dapo", distillation=kind, distillation_coef=0.7, distillation_top_k=k, **beta)
    method, batch = make_method({"policy": POLICY, "teacher": POLICY}, config), a_batch()

    @jax.jit
    def actual(params):
        models = MODELS | {"policy": params}
        loss, logs = loss_of(method)(models, batch._replace(**scores_of(method, models, batch)))
        return loss, logs.means["distillation"]

    @jax.jit
    def expected(params):
        divergence = by_brute_force(kind, k, 0.3, params, batch)
        rest, _ = loss_of(grpo_method(POLICY, config))({"policy": params}, batch)
        masked = jnp.where(batch.completion_mask, divergence, 0)
        return rest + 0.7 * jnp.sum(batch.weights * masked), F.masked_sum(divergence, batch.completion_mask)

    one, other = (jax.value_and_grad(loss, has_aux=True)(PARAMS) for loss in (actual, expected))
    assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert optax.global_norm(other[1]) > 0.01


# ---- on texts


def test_packed_texts_have_the_loss_of_separate_texts():
    noise = np.random.default_rng(0)
    prompts, texts = ([noise.integers(0, V, noise.integers(1, 5)).tolist() for _ in range(12)] for _ in range(2))
    rows, padded = pack(prompts, texts, width=8), pad_prompts(prompts, [{} for _ in prompts], width=4, pad_id=0)
    alone = Batch(padded.tokens, *pad_completions([[x] for x in texts], 4), np.ones((12, 1), np.float32))
    teacher = POLICY, Divergence("forward_kl")

    def loss(params, batch):
        batch = batch._replace(weights=F.token_mean_weights(jnp.asarray(batch.completion_mask)))
        return distillation_loss(POLICY, *teacher, 0.3, MODELS | {"policy": params}, batch)

    def by_hand(params):
        logprobs, mask = score_completion_tokens(POLICY, params, alone).logprobs, alone.completion_mask
        divergences = by_brute_force("forward_kl", 0, 0.3, params, alone)
        return jnp.mean(divergences - 0.3 * logprobs, where=mask), jnp.mean(divergences, where=mask)

    (value, logs), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(PARAMS, rows)
    (expected, divergence), expected_gradient = jax.jit(jax.value_and_grad(by_hand, has_aux=True))(PARAMS)
    assert_close((value, gradient), (expected, expected_gradient), rtol=1e-4, atol=1e-5)
    assert optax.global_norm(gradient) > 0.1
    assert_close(jax.jit(loss)(PARAMS, alone)[0], expected, rtol=1e-4)
    total, count = logs.means["distillation"]
    assert_close(total / count, divergence, rtol=1e-4)
    assert_close(mean_divergence(POLICY, *teacher, MODELS, packed_pieces(rows, 2)), divergence, rtol=1e-4)


# ---- advantages


def test_k1_adds_teacher_and_reward_advantages():
    config = recipe("dapo", distillation="k1", distillation_coef=0.7, reward_coef=0.5)
    method, mask = make_method({"policy": POLICY, "teacher": POLICY}, config), a_batch().completion_mask

    @jax.jit
    def both(batch):
        taught = batch._replace(**scores_of(method, MODELS, batch))
        every = jax.nn.log_softmax(logits_of(TEACHER, batch))
        of_teacher = jnp.take_along_axis(every, batch.completion_ids[..., None], axis=-1)[..., 0]
        return method.advantage(some_rewards(), taught, 0.0), of_teacher, F.group_advantages(some_rewards().rewards)

    for old in (a_batch().old_logprobs, None):  # None: those of the sampler
        (actual, logged, logs), of_teacher, of_rewards = jax.device_get(both(a_batch()._replace(old_logprobs=old)))
        log_ratio = of_teacher - (a_batch().sampler_logprobs if old is None else old)
        total = 0.5 * of_rewards[..., None] + 0.7 * log_ratio
        np.testing.assert_allclose(actual.advantages[mask], total[mask], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(logs["distillation"], -log_ratio[mask].mean(), rtol=1e-4)
        np.testing.assert_allclose(logged, of_rewards, rtol=1e-5)


def test_top_entropy_masks_reward_and_teacher_advantages():
    sampled, truncated = a_batch().completion_mask, np.broadcast_to(np.arange(3) == 0, (4, 3))
    # Truncated completions have the highest entropies, but take no part of the share if they are masked.
    entropy = a_batch().old_entropy + 9 * truncated[..., None]

    def advantages(**options):
        config = recipe("dapo", distillation="k1", distillation_coef=0.7, **options)
        method = make_method({"policy": POLICY, "teacher": POLICY}, config)

        @jax.jit
        def learned(batch):
            taught = batch._replace(**scores_of(method, MODELS, batch))
            return method.advantage(some_rewards(), taught._replace(truncated=truncated, old_entropy=entropy), 0.0)

        batch, logged, _ = learned(a_batch())
        assert options.get("reward_coef", 1) or not np.any(logged)
        return np.broadcast_to(batch.advantages, sampled.shape)

    for options in ({}, {"reward_coef": 0.0}, {"mask_truncated": True}):
        mask = sampled & ~truncated[..., None] if "mask_truncated" in options else sampled
        keep = F.top_entropy_tokens(entropy, mask, share=0.5)
        assert 0.4 < np.mean(keep[mask]) < 0.7
        whole, masked = advantages(**options), advantages(**options, top_entropy=0.5)
        np.testing.assert_allclose(masked[mask], np.where(keep, whole, 0)[mask], rtol=1e-5, atol=1e-6)
        assert np.abs(whole[mask & ~keep]).min() > 1e-6


def test_teachers_lacking_tokens_are_refused(tmp_path):
    size = arithmetic.TEXT.vocab_size
    for name, vocab_size in {"small": size - 1, "whole": size, "padded": size + 3}.items():
        save_tiny_model(tmp_path / name, arithmetic.TEXT, vocab_size=vocab_size)
    whole, padded = (load_pretrained(tmp_path / name) for name in ("whole", "padded"))
    with refused(f"small lacks tokens from {size - 1} on"):
        load_frozen("teacher", tmp_path / "small", ModelOptions(), whole)
    for teacher, student in (("whole", padded), ("padded", whole)):  # rows of padding are no tokens
        load_frozen("teacher", tmp_path / teacher, ModelOptions(), student)


# ---- runs


def never(examples, completions):
    raise AssertionError("a run that learns from its teacher alone grades nothing")


TASK = digit_task(never)


@pytest.mark.slow
def test_a_policy_nears_its_teacher_without_a_reward(tmp_path):
    config = with_options(CONFIG, steps=30)
    programs, lines = make_programs({"policy": POLICY, "teacher": POLICY}, TASK, config), {}
    for name, teacher, steps in (("other", TEACHER, 30), ("itself", PARAMS, 1)):
        run = open_run(tmp_path / name, config)
        train(MODELS | {"teacher": teacher}, TASK, config, run, programs, phase="grpo", until=steps)
        lines[name] = run.lines()
    divergences = [line["distillation"] for line in lines["other"]]
    assert divergences[-1] < 0.3 * divergences[0]
    assert all(line["reward"] is None and line["not_applicable_share"] == 1 for line in lines["other"])
    assert lines["itself"][0]["grad_norm"] < 1e-4


# ---- with a critic


def test_a_teacher_changes_no_critic():
    """Gradients and advantages are the sums of those of PPO and of the teacher's term by brute force."""
    config = with_options(PPO, critic="shared", distillation="reverse_kl", distillation_coef=0.7, reward_coef=0.5)
    policies = {"policy": POLICY, "teacher": POLICY}
    both = make_method(policies, config)
    alone = make_method(policies, replace(config, distillation=DistillationConfig()))
    critic = Headed(None, jnp.linspace(-1, 1, D))
    models, batch = MODELS | {"critic": critic}, a_batch()._replace(truncated=np.zeros((4, 3), bool))

    @jax.jit
    def actual(params):
        scored = batch._replace(**scores_of(both, models | {"reference": PARAMS}, batch))
        learned, logged, _ = both.advantage(some_rewards(), scored, 0.02)
        expected, expected_logged, _ = alone.advantage(some_rewards(), scored, 0.02)
        gradient = jax.grad(lambda params: loss_of(both)(models | params, learned)[0])(params)
        return gradient, learned, expected, logged, expected_logged

    @jax.jit
    def by_hand(params, learned):
        def loss(params):
            divergence = by_brute_force("reverse_kl", 0, 0.5, params["policy"], batch)
            taught = 0.7 * jnp.sum(batch.weights * jnp.where(batch.completion_mask, divergence, 0))
            return loss_of(alone)(models | params, learned)[0] + taught

        return jax.grad(loss)(params)

    trained = {"policy": PARAMS, "critic": critic}
    gradient, learned, of_ppo, logged, expected_logged = actual(trained)
    assert_close(learned.advantages, 0.5 * of_ppo.advantages, rtol=1e-6)
    assert_close((learned.returns, logged), (of_ppo.returns, expected_logged), rtol=1e-6)
    assert_close(gradient, by_hand(trained, learned), rtol=1e-4, atol=1e-5)
    assert np.abs(gradient["critic"].head).max() > 1e-3


@pytest.mark.slow
def test_ppo_with_a_teacher_trains_both(tmp_path):
    def earned(examples, completions):
        return [float("1" in text) for text in completions]

    task = TASK._replace(reward=earned)
    config = with_options(PPO, steps=20, num_prompts=8, max_tokens=3, critic="shared", distillation="reverse_kl")
    config = with_options(config, learning_rate=1e-2, critic_learning_rate=1e-2, devices=1)
    programs = make_programs({"policy": POLICY, "teacher": POLICY}, task, config)
    run = open_run(tmp_path, config)
    start = MODELS | {"critic": Headed(None, jnp.zeros(D))}
    state = train(start, task, config, run, programs, phase="ppo")
    lines = run.lines()
    assert lines[-1]["distillation"] < 0.7 * lines[0]["distillation"]
    assert np.abs(state.params["critic"].head).max() > 1e-3
