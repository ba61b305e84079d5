"""A teacher in GRPO's loop and in the supervised phase: gradients by brute force over the vocabulary, and runs."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bigrams import PARAMS, POLICY, V
from rl_helpers import assert_close, assert_same_runs, loss_of, open_run, says_three
from tiny import digit_task, refused, slow_unless, tiny_config

from experiments.tasks import arithmetic
from grpo_jax import functional as F
from grpo_jax.checks import validate, validate_ppo
from grpo_jax.config import DistillationConfig, GRPOConfig, ModelOptions, PPOConfig, recipe, with_options
from grpo_jax.data.packing import pack, packed_batches, packed_pieces
from grpo_jax.data.types import pad_completions, pad_prompts
from grpo_jax.devices import compiled, sum_rows
from grpo_jax.fit import fit
from grpo_jax.models.huggingface import load_pretrained, save_pretrained
from grpo_jax.models.policy import decoder_policy
from grpo_jax.offline.phase import SupervisedConfig
from grpo_jax.offline.sft import DistillationTarget, distillation_loss, distillation_objective, mean_divergence
from grpo_jax.prepare import check_vocabulary, load_teacher
from grpo_jax.rl.distillation import distillation_method, make_distillation_programs
from grpo_jax.rl.grpo import grpo_method, make_programs
from grpo_jax.rl.pieces import by_prompts
from grpo_jax.rl.scorers import hidden_states, score_completion_tokens
from grpo_jax.rl.types import Batch, RewardArrays
from grpo_jax.rl.update import accumulate_grads
from grpo_jax.runs.folder import RunFolder
from grpo_jax.train import train

WIDTH = 9
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
QUICK = {("jsd", 0), ("forward_kl", 3)}


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
    [pytest.param(kind, k, marks=() if (kind, k) in QUICK else pytest.mark.slow) for kind in KINDS for k in (0, 3)],
)
def test_loss_and_gradient_equal_brute_force_over_the_vocabulary(kind, k):
    beta = {"distillation_beta": 0.3} if kind == "jsd" else {}
    config = recipe("dapo", distillation=kind, distillation_coef=0.7, distillation_top_k=k, **beta)
    method, batch = distillation_method(POLICY, POLICY, config), a_batch()

    @jax.jit
    def actual(params):
        models = {"policy": params, "teacher": TEACHER}
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


def target_of(kind, k=0, nll_coef=0.3):
    beta = {"distillation_beta": 0.3} if kind == "jsd" else {}
    return DistillationTarget(POLICY, DistillationConfig(kind, distillation_top_k=k, **beta), nll_coef)


@pytest.mark.parametrize("kind", slow_unless(("forward_kl",), KINDS))
def test_a_loss_on_texts_is_the_divergence_and_the_nll(kind):
    batch = a_batch()._replace(temperature=np.ones((4, 3), np.float32))

    def actual(params):
        return distillation_loss(POLICY, {"policy": params, "teacher": TEACHER}, batch, target=target_of(kind))[0]

    def expected(params):
        logprobs = score_completion_tokens(POLICY, params, batch).logprobs
        terms = by_brute_force(kind, 0, 0.3, params, batch) - 0.3 * logprobs
        return jnp.sum(batch.weights * jnp.where(batch.completion_mask, terms, 0))

    one, other = (jax.jit(jax.value_and_grad(loss))(PARAMS) for loss in (actual, expected))
    assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert optax.global_norm(other[1]) > 0.1


def texts(count, seed=0):
    noise = np.random.default_rng(seed)
    prompts = [noise.integers(0, V, noise.integers(1, 4)).tolist() for _ in range(count)]
    return prompts, [noise.integers(0, V, noise.integers(1, 5)).tolist() for _ in range(count)]


ROWS = pack(*texts(40), width=8)


@pytest.mark.parametrize(("devices", "pieces"), [pytest.param(1, 4, marks=pytest.mark.slow), (8, 2)])
def test_neither_pieces_nor_devices_count_on_texts(devices, pieces):
    target, models = target_of("jsd", 3), {"policy": PARAMS, "teacher": TEACHER}

    def step(models, batch, *, devices, pieces):
        batch = batch._replace(weights=F.token_mean_weights(batch.completion_mask))

        def of_rows(models, rows):
            def loss_fn(policy, piece):
                return distillation_loss(POLICY, models | {"policy": policy}, piece, target=target)

            return accumulate_grads(loss_fn, models["policy"], rows, by_prompts(len(rows.ids), pieces)), {}

        return sum_rows(of_rows, devices)(models, batch)[0]

    batch = packed_batches(ROWS, 16, 0)(0)
    whole = jax.jit(partial(step, devices=1, pieces=1))(models, batch)
    actual = compiled(partial(step, devices=devices, pieces=pieces), devices=devices)(models, batch)
    assert_close(actual, whole, rtol=2e-5, atol=1e-6)


def test_packed_texts_and_prompts_with_completions_are_the_same_to_it():
    prompts, completions = texts(12)
    ids, mask = pad_completions([[completion] for completion in completions], 4)
    padded = pad_prompts(prompts, [{} for _ in prompts], width=3, pad_id=0)
    alone = Batch(padded.ids, padded.mask, ids, mask, np.ones((len(prompts), 1), np.float32))

    def value(batch):
        batch = batch._replace(weights=F.token_mean_weights(jnp.asarray(batch.completion_mask)))
        models = {"policy": PARAMS, "teacher": TEACHER}
        loss, logs = distillation_loss(POLICY, models, batch, target=target_of("reverse_kl", 3))
        return loss, {name: total / weight for name, (total, weight) in logs.means.items()}

    one, other = (jax.jit(value)(batch) for batch in (pack(prompts, completions, width=8), alone))
    assert_close(one, other, rtol=1e-4)


@pytest.mark.slow
def test_on_texts_the_student_nears_its_teacher(tmp_path):
    config = SupervisedConfig(40, 5e-2, log_every=10, eval_every=20)
    target, heldout = target_of("forward_kl", nll_coef=0.0), packed_pieces(pack(*texts(20, seed=1), width=8), 8)

    def run(name, config=config, teacher=TEACHER):
        def evaluate(params, step):
            return {"heldout_distillation": mean_divergence(POLICY, params, heldout, target=target)}

        folder, params = RunFolder(tmp_path / name, {}), {"policy": PARAMS, "teacher": teacher}
        objective = distillation_objective(POLICY, target)
        fit(objective, params, packed_batches(ROWS, 16, 0), config, folder, phase="sft", evaluate=evaluate)
        return folder.lines()

    lines = run("whole")
    held = [line["heldout_distillation"] for line in lines if "heldout_distillation" in line]
    assert len(held) == 3
    assert held[-1] < 0.5 * held[0]
    assert lines[-1]["loss"] == pytest.approx(lines[-1]["distillation"], rel=1e-5)
    assert run("other", dataclasses.replace(config, steps=1), PARAMS)[-1]["grad_norm"] < 1e-4  # its own teacher


# ---- advantages


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
        actual, logged, logs = advantages(arrays, batch)
        sampled = a_batch().sampler_logprobs if old is None else old
        log_ratio = np.asarray(teachers_logprobs(a_batch()) - sampled)
        mask = a_batch().completion_mask
        total = expected + 0.7 * log_ratio
        np.testing.assert_allclose(actual.advantages[mask], total[mask], rtol=1e-4, atol=1e-5)
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
    for name, vocab_size in {"small": size - 1, "whole": size, "padded": size + 3}.items():
        config = tiny_config(vocab_size)
        save_pretrained(tmp_path / name, jax.jit(decoder_policy(config).init)(jax.random.key(0)), config)
        arithmetic.TEXT.save_tokenizer(tmp_path / name)
    whole, padded = (load_pretrained(tmp_path / name) for name in ("whole", "padded"))
    with refused(f"small lacks tokens from {size - 1} on"):
        load_teacher(tmp_path / "small", ModelOptions(), whole)
    for teacher, student in (("whole", padded), ("padded", whole)):  # rows of padding are no tokens
        load_teacher(tmp_path / teacher, ModelOptions(), student)


# ---- runs


def never(examples, completions):
    raise AssertionError("a run that learns from its teacher alone grades nothing")


TASK = digit_task(never)


def run_of(folder, config=CONFIG, *, programs=None, teacher=TEACHER, until=None, task=TASK):
    """Returns the state at the end of a run, and the run."""
    run = open_run(folder, config)
    programs = programs or make_distillation_programs(POLICY, POLICY, task, config)
    models = {"policy": PARAMS, "teacher": teacher}
    return train(models, task, config, run, programs, phase="grpo", until=until), run


@pytest.fixture(scope="module")
def programs():
    return make_distillation_programs(POLICY, POLICY, TASK, CONFIG)


@pytest.mark.slow
def test_a_policy_nears_its_teacher_without_a_reward_and_resumes_to_the_bit(tmp_path, programs):
    config = with_options(CONFIG, steps=30)
    whole = run_of(tmp_path / "whole", config, programs=programs)
    lines = whole[1].lines()
    divergences = [line["distillation"] for line in lines]
    assert divergences[-1] < 0.3 * divergences[0]
    assert all(line["reward"] is None and line["not_applicable_share"] == 1 for line in lines)
    run_of(tmp_path / "parts", config, programs=programs, until=13)
    assert_same_runs(run_of(tmp_path / "parts", config, programs=programs), whole)
    _, of_itself = run_of(tmp_path / "other", config, programs=programs, teacher=PARAMS, until=1)
    assert of_itself.lines() != lines[:1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"distillation": "jsd", "distillation_top_k": 3, "group_size": 1},
        {"distillation": "k1", "epochs": 2, "minibatches": 2},
        {"reward_coef": 0.5, "kl_coef": 0.1, "microbatches": 2},
    ],
)
def test_kinds_and_mixtures_over_devices_are_the_same_run(tmp_path, options):
    config = with_options(CONFIG, steps=2, rollouts_every=0, **options)
    task = TASK._replace(reward=says_three)
    actual = []
    for devices in (1, 2):
        _, run = run_of(tmp_path / str(devices), with_options(config, devices=devices), task=task)
        actual.append([{name: line[name] for name in ("distillation", "loss", "grad_norm")} for line in run.lines()])
    for one, other in zip(*actual, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
    assert all(np.isfinite(list(line.values())).all() for line in actual[0])


# ---- refusals


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"distillation": "none"}, "reward_coef is 0.0, but distillation is none"),
        ({"distillation": "none", "reward_coef": 1.0, "distillation_top_k": 3}, "distillation_top_k is 3"),
        ({"distillation": "k1", "distillation_top_k": 3}, "k1"),
        ({"distillation_beta": 0.3}, "reverse_kl has no mixture"),
        ({"distillation": "jsd", "distillation_beta": 1.0}, "distillation_beta is 1.0"),
        ({"distillation": "k1", "preset": "gmpo"}, "gmpo has one ratio a completion"),
        ({"max_rollouts": 2}, "reward_coef is 0, so max_rollouts"),
        ({"correction": "token"}, "reward_coef is 0, so correction"),
        ({"kl_in_reward": True, "kl_coef": 0.1}, "reward_coef is 0, so kl_in_reward"),
        ({"reward_coef": 1.0, "group_size": 1}, "group_size is 1"),
    ],
)
def test_options_that_do_not_go_together_are_refused(changes, words):
    with refused(words):
        validate(with_options(CONFIG, **changes))


def test_a_teacher_and_a_distillation_need_each_other_and_one_vocabulary():
    ours = {"a": 0, "b": 1}
    check_vocabulary(dict(ours), ours, "teacher")
    for words, call in {
        "reverse_kl needs a teacher": lambda: make_programs(POLICY, TASK, CONFIG),
        "distillation is none": lambda: make_distillation_programs(POLICY, POLICY, TASK, GRPOConfig()),
        f"{V} tokens": lambda: make_distillation_programs(
            POLICY, POLICY, TASK, with_options(CONFIG, distillation_top_k=V)
        ),
        "distillation jsd needs GRPO": lambda: validate_ppo(with_options(PPOConfig(), distillation="jsd")),
        "'b' is 2 there and 1 here": lambda: check_vocabulary({"a": 0, "b": 2}, ours, "teacher"),
        "'c' is 2 there and no token here": lambda: check_vocabulary(ours | {"c": 2}, ours, "teacher"),
    }.items():
        with refused(words):
            call()
