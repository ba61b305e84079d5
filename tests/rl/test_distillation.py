"""A teacher in GRPO's loop: gradients by brute force over the vocabulary, and runs of it."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bigrams import PARAMS, POLICY, V
from losses import loss_of

from experiments.tasks import arithmetic
from grpo_jax import functional as F
from grpo_jax.checks import validate, validate_ppo
from grpo_jax.config import GRPOConfig, ModelOptions, PPOConfig, recipe, with_options
from grpo_jax.data.types import pad_prompts, rng
from grpo_jax.errors import UsageError
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.huggingface import load_pretrained, save_pretrained
from grpo_jax.models.params import join, split
from grpo_jax.models.policy import decoder_policy
from grpo_jax.prepare import check_vocabulary, load_teacher
from grpo_jax.rl.distillation import distillation_method, make_distillation_programs
from grpo_jax.rl.grpo import grpo_method, make_programs
from grpo_jax.rl.scorers import hidden_states, score_completion_tokens
from grpo_jax.rl.types import Batch, RewardArrays
from grpo_jax.runs.checkpoint import params_sha256
from grpo_jax.runs.folder import RunFolder
from grpo_jax.tasks.task import Task
from grpo_jax.train import train

EOS, PAD, WIDTH = 6, 7, 9
CONFIG = recipe(
    steps=4,
    num_prompts=8,
    group_size=4,
    max_tokens=3,
    learning_rate=5e-2,
    kl_coef=0.0,
    checkpoint_every=2,
    distillation="reverse_kl",
    reward_coef=0.0,
)
# Of another width, with a token that the policy does not have.
normal = jax.jit(jax.random.normal, static_argnums=1)
TEACHER = {name: normal(jax.random.key(10 + i), (V + 1, WIDTH)) for i, name in enumerate(PARAMS)}
KINDS = ["reverse_kl", "forward_kl", "jsd"]


@cache
def a_batch() -> Batch:
    """Ragged completions of policies that are near the one that is trained."""
    noise = np.random.default_rng(0)
    shape = 4, 3, 5
    batch = Batch(
        noise.integers(0, V, (4, 2)).astype(np.int32),
        np.ones((4, 2), bool),
        noise.integers(0, V, shape).astype(np.int32),
        np.arange(5) < noise.integers(1, 6, (4, 3, 1)),
        noise.uniform(0.8, 1.2, shape[:2]).astype(np.float32),
    )
    own = jax.jit(partial(score_completion_tokens, POLICY))(PARAMS, batch).logprobs
    weights = jax.jit(F.sequence_mean_weights)(batch.completion_mask)
    near = [np.asarray(own + noise.normal(0, 0.3, shape), np.float32) for _ in range(2)]
    advantages = noise.normal(size=shape[:2]).astype(np.float32)
    return batch._replace(sampler_logprobs=near[0], old_logprobs=near[1], weights=weights, advantages=advantages)


def logits_of(params, batch):
    hidden = hidden_states(POLICY, params, batch)
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


@pytest.mark.parametrize(
    ("kind", "k"),
    [
        pytest.param(kind, k, marks=() if (kind, k) == ("jsd", 3) else pytest.mark.slow)
        for kind in KINDS
        for k in (0, 3)
    ],
)
def test_loss_and_gradient_equal_brute_force_over_the_vocabulary(kind, k):
    beta = {"distillation_beta": 0.3} if kind == "jsd" else {}
    config = recipe("dapo", distillation=kind, distillation_coef=0.7, distillation_top_k=k, **beta)
    method, batch = distillation_method(POLICY, POLICY, config), a_batch()

    @jax.jit
    def found(params):
        models = {"policy": params, "teacher": TEACHER}
        loss, logs = loss_of(method)(models, batch._replace(**scores_of(method, models, batch)))
        return loss, logs.means["distillation"]

    @jax.jit
    def expected(params):
        divergence = by_brute_force(kind, k, 0.3, params, batch)
        rest, _ = loss_of(grpo_method(POLICY, config))({"policy": params}, batch)
        masked = jnp.where(batch.completion_mask, divergence, 0)
        return rest + 0.7 * jnp.sum(batch.weights * masked), F.masked_sum(divergence, batch.completion_mask)

    one, other = (jax.value_and_grad(loss, has_aux=True)(PARAMS) for loss in (found, expected))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), one, other)
    assert optax.global_norm(other[1]) > 0.01


@pytest.mark.parametrize("reward_coef", [0.0, 0.5])
def test_advantages_of_k1_are_the_teachers_beside_those_of_rewards(reward_coef):
    config = recipe("dapo", distillation="k1", distillation_coef=0.7, reward_coef=reward_coef)
    method = distillation_method(POLICY, POLICY, config)
    models = {"policy": PARAMS, "teacher": TEACHER}
    scores = jax.jit(partial(scores_of, method))(models, a_batch())
    advantages = jax.jit(lambda arrays, batch: method.advantage(arrays, batch, jnp.float32(0)))

    @jax.jit
    def teachers_logprobs(batch):
        every = jax.nn.log_softmax(logits_of(TEACHER, batch))
        return jnp.take_along_axis(every, batch.completion_ids[..., None], axis=-1)[..., 0]

    rewards = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
    arrays = RewardArrays(jnp.asarray(rewards), jnp.ones((4, 3), bool))
    expected = reward_coef * np.asarray(jax.jit(F.group_advantages)(rewards))[..., None]
    for old in (a_batch().old_logprobs, None):  # None: those of the sampler
        batch = a_batch()._replace(**scores)._replace(old_logprobs=old)
        found, logged, logs = advantages(arrays, batch)
        sampled = a_batch().sampler_logprobs if old is None else old
        log_ratio = np.asarray(teachers_logprobs(a_batch()) - sampled)
        mask = a_batch().completion_mask
        total = expected + 0.7 * log_ratio
        np.testing.assert_allclose(found.advantages[mask], total[mask], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(logs["distillation"], -log_ratio[mask].mean(), rtol=1e-4)
    np.testing.assert_allclose(logged, (reward_coef > 0) * expected[..., 0] / (reward_coef or 1), rtol=1e-5)


def test_top_entropy_masks_advantages_of_rewards_and_not_those_of_the_teacher():
    entropy = np.random.default_rng(2).random(a_batch().completion_mask.shape)
    batch, models = a_batch()._replace(old_entropy=jnp.asarray(entropy)), {"policy": PARAMS, "teacher": TEACHER}
    rewards = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
    arrays = RewardArrays(jnp.asarray(rewards), jnp.ones((4, 3), bool))

    def advantages(**options):
        config = recipe("dapo", distillation="k1", distillation_coef=0.7, **options)
        method = distillation_method(POLICY, POLICY, config)
        taught = batch._replace(teacher=scores_of(method, models, batch)["teacher"])
        by_token = method.advantage(arrays, taught, jnp.float32(0))[0].advantages
        return np.broadcast_to(by_token, batch.completion_mask.shape)

    whole, taught, masked = (advantages(**options) for options in ({}, {"reward_coef": 0.0}, {"top_entropy": 0.5}))
    mask = np.asarray(batch.completion_mask)
    from_rewards = np.abs(masked - taught)[mask] > 1e-6
    np.testing.assert_allclose(masked[mask], np.where(from_rewards, whole[mask], taught[mask]), rtol=1e-5, atol=1e-6)
    assert 0.4 < from_rewards.mean() < 0.7


def test_a_teacher_without_all_tokens_of_the_tokenizer_is_refused(tmp_path):
    size = arithmetic.TEXT.vocab_size
    shape = ModelConfig(size, 8, 16, 1, 2, 1, 4)
    for name, vocab_size in {"small": size - 1, "whole": size, "padded": size + 3}.items():
        config = dataclasses.replace(shape, vocab_size=vocab_size)
        save_pretrained(tmp_path / name, jax.jit(decoder_policy(config).init)(jax.random.key(0)), config)
        arithmetic.TEXT.save_tokenizer(tmp_path / name)
    whole, padded = (load_pretrained(tmp_path / name) for name in ("whole", "padded"))
    with pytest.raises(UsageError, match=f"small lacks tokens from {size - 1} on: name one with {size}"):
        load_teacher(tmp_path / "small", ModelOptions(), whole)
    for teacher, student in (("whole", padded), ("padded", whole)):  # rows of padding are no tokens
        load_teacher(tmp_path / teacher, ModelOptions(), student)


# ---- runs


def prompts(step: int):
    tokens = rng(step).integers(0, 6, (8, 2)).tolist()
    return pad_prompts(tokens, [{"prompt": str(t)} for t in tokens], width=3, pad_id=PAD)


def never(examples, completions):
    raise AssertionError("a run that learns from its teacher alone grades nothing")


TASK = Task(prompts, never, prompts(999), lambda ids: "".join(map(str, ids)), (EOS,), PAD, V)


def run_of(folder, config=CONFIG, *, programs=None, teacher=TEACHER, until=None, task=TASK):
    run = RunFolder(folder, dataclasses.asdict(config))
    programs = programs or make_distillation_programs(POLICY, POLICY, task, config)
    models = {"policy": PARAMS, "teacher": teacher}
    state = train(models, task, config, run, programs, phase="grpo", until=until)
    return params_sha256(state.params), run.lines()


@pytest.fixture(scope="module")
def programs():
    return make_distillation_programs(POLICY, POLICY, TASK, CONFIG)


def test_a_policy_nears_its_teacher_without_a_reward_and_resumes_to_the_bit(tmp_path, programs):
    config = with_options(CONFIG, steps=30)
    whole, lines = run_of(tmp_path / "whole", config, programs=programs)
    divergences = [line["distillation"] for line in lines]
    assert divergences[-1] < 0.3 * divergences[0]
    assert all(line["reward"] is None and line["not_applicable_share"] == 1 for line in lines)
    run_of(tmp_path / "parts", config, programs=programs, until=13)
    again, resumed = run_of(tmp_path / "parts", config, programs=programs)
    assert (again, resumed) == (whole, lines)
    _, of_itself = run_of(tmp_path / "other", config, programs=programs, teacher=PARAMS, until=1)
    assert of_itself != lines[: len(of_itself)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"distillation": "jsd", "distillation_top_k": 3, "group_size": 1},
        pytest.param({"distillation": "k1", "epochs": 2, "minibatches": 2}, marks=pytest.mark.slow),
        pytest.param({"reward_coef": 0.5, "kl_coef": 0.1, "microbatches": 2}, marks=pytest.mark.slow),
    ],
)
def test_kinds_and_mixtures_over_devices_are_the_same_run(tmp_path, options):
    config = with_options(CONFIG, steps=2, rollouts_every=0, **options)
    task = TASK._replace(reward=lambda examples, texts: [text.count("3") / 3 for text in texts])
    found = []
    for devices in (1, 2):
        _, lines = run_of(tmp_path / str(devices), with_options(config, devices=devices), task=task)
        found.append([{name: line[name] for name in ("distillation", "loss", "grad_norm")} for line in lines])
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
    assert all(np.isfinite(list(line.values())).all() for line in found[0])


# ---- refusals


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"distillation": "none", "reward_coef": 0.0}, "reward_coef is 0.0, but distillation is none"),
        ({"distillation": "none", "reward_coef": 1.0, "distillation_top_k": 3}, "distillation_top_k is 3"),
        ({"distillation_coef": 0.0}, "distillation_coef is 0.0: it must be above 0"),
        ({"reward_coef": -1.0}, "reward_coef is -1.0"),
        ({"distillation_top_k": -1}, "distillation_top_k is -1"),
        ({"distillation": "k1", "distillation_top_k": 3}, "k1 looks only at the sampled token"),
        ({"distillation_beta": 0.3}, "reverse_kl has no mixture"),
        ({"distillation": "jsd", "distillation_beta": 1.0}, "distillation_beta is 1.0"),
        ({"distillation": "k1", "preset": "gmpo"}, "gmpo has one ratio a completion"),
        ({"max_rollouts": 2}, "reward_coef is 0, so max_rollouts"),
        ({"correction": "token"}, "reward_coef is 0, so correction"),
        ({"kl_in_reward": True, "kl_coef": 0.1}, "reward_coef is 0, so kl_in_reward"),
        ({"reward_coef": 1.0, "group_size": 1}, "group_size is 1"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(changes, words):
    with pytest.raises(UsageError, match=words) as error:
        validate(with_options(CONFIG, **changes))
    assert "\n" not in str(error.value)


def test_a_teacher_and_a_distillation_need_each_other():
    with pytest.raises(UsageError, match="reverse_kl needs a teacher"):
        make_programs(POLICY, TASK, CONFIG)
    with pytest.raises(UsageError, match="there is a teacher, but distillation is none"):
        make_distillation_programs(POLICY, POLICY, TASK, GRPOConfig())
    with pytest.raises(UsageError, match=f"the model has {V} tokens"):
        make_distillation_programs(POLICY, POLICY, TASK, with_options(CONFIG, distillation_top_k=V))
    with pytest.raises(UsageError, match="distillation jsd needs GRPO"):
        validate_ppo(with_options(PPOConfig(), distillation="jsd"))


def test_another_tokenizer_is_refused():
    ours = {"a": 0, "b": 1}
    check_vocabulary(dict(ours), ours, "teacher")
    with pytest.raises(UsageError, match="'b' is 2 there and 1 here; name a teacher"):
        check_vocabulary({"a": 0, "b": 2}, ours, "teacher")
    with pytest.raises(UsageError, match="'c' is 2 there and no token here"):
        check_vocabulary(ours | {"c": 2}, ours, "teacher")


def test_what_is_trained_is_the_policy_alone():
    trained, frozen = split({"policy": PARAMS, "teacher": TEACHER})
    assert trained.keys() == {"policy"}
    assert trained["policy"] is PARAMS
    assert frozen["teacher"] is TEACHER
    assert join(trained, frozen)["policy"] is PARAMS
