"""Muon and optimizers of the user's: their steps equal optax by hand, on one device, with pmap and on a mesh."""

import dataclasses
import json
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rl_helpers import assert_close, open_run, placed, ragged_batch, ragged_rewards
from tiny import random_params, randomly_adapted, recorder, refused, slow_unless

from grpo_jax import functional as F
from grpo_jax.config import PPO, load_optimizer, recipe, validate, with_options
from grpo_jax.devices import Mesh, devices_of, first_devices, place, to_devices, to_numpy
from grpo_jax.models.config import ExpertsConfig, ModelConfig
from grpo_jax.models.params.tree import split
from grpo_jax.models.policy import decoder_policy
from grpo_jax.offline.phase import FitObjective, SupervisedConfig, make_fit_programs
from grpo_jax.optimizer import make_optimizer, muon_matrices, steps_taken
from grpo_jax.rl.ppo import add_critic, critic_policy
from grpo_jax.rl.programs import make_method, make_method_programs
from grpo_jax.step import Logs
from grpo_jax.tasks.task import Task

D, ROWS = 16, 16
# Eight key-value heads, so that eight devices can share them out.
MODEL = ModelConfig(64, D, 32, 2, 8, 8, 4, qkv_bias=True, qk_norm=True, tie_word_embeddings=False)
MIXTURE = dataclasses.replace(MODEL, experts=ExpertsConfig(5, 2, 16, norm_topk_prob=True))
PLACES = ONE, PMAP, MESH = first_devices(1), first_devices(8), first_devices(Mesh(2, 2, 2))
RATE, DECAY, NORM, STEPS = 0.02, 0.1, 0.5, 3


class Rows(NamedTuple):
    """A batch of rows."""

    completion_mask: Any  # bool [N, 1]
    x: Any  # float32 [N, 1]
    weights: Any = None


def height(params: Any) -> Any:
    """A function of the parameters whose gradients are of full rank, and nowhere near 0, where Adam's steps jump."""
    places = [(x, jnp.arange(x.size).reshape(x.shape)) for x in jax.tree.leaves(params)]
    return sum(jnp.sum(4 * jnp.sign(jnp.cos(i)) * x + jnp.sin(3 * x + i)) for x, i in places)


def weighted_height(params: Any, batch: Rows) -> tuple[Any, Logs]:
    return jnp.sum(batch.weights * batch.x) * height(params), Logs({})


OBJECTIVE = FitObjective(weighted_height, F.token_mean_weights)


def a_batch(scale: float = 1.0) -> Rows:
    x = np.linspace(0.1, 1, ROWS, dtype=np.float32)[:, None]
    return Rows(np.ones((ROWS, 1), bool), scale * x)


@cache
def start_of(name: str) -> Any:
    params = random_params(MIXTURE if name == "experts" else MODEL)
    return randomly_adapted(params) if name == "lora" else params


def taken(config: SupervisedConfig, start: Any, batches: list[Rows]) -> tuple[Any, list[dict[str, Any]]]:
    """Returns the trained parameters after a step on each batch, and the metrics of the steps."""
    devices, (initial_state, train_step) = devices_of(config), make_fit_programs(OBJECTIVE, config)
    trained, frozen = (place(part, devices) for part in split(start))
    state, lines = place(initial_state(trained), devices), []
    for batch in batches:
        state, metrics = train_step(state, to_devices(batch, devices), frozen)
        lines.append(to_numpy(metrics))
    return to_numpy(state.params), lines


def config_on(devices: Any, **options: Any) -> SupervisedConfig:
    config = SupervisedConfig(STEPS, RATE, warmup_steps=1, **options)
    if devices.mesh is None:
        return with_options(config, devices=len(devices.all))
    return with_options(config, devices=8, parallel="mesh", fsdp=2, tensor=2)


def by_hand(params: Any, step: Any, update: Any) -> Any:
    """Returns the parameters after steps with optax: `update` maps (state, gradients, parameters) to both."""

    @jax.jit
    def once(state, params):
        scale = jnp.mean(a_batch().x)
        return update(state, jax.tree.map(lambda x: scale * x, jax.grad(height)(params)), params)

    for _ in range(STEPS):
        step, params = once(step, params)
    return params


# ---- Muon

# Projections whose inputs are the features of the decoder. The outputs of the others are.
FROM_FEATURES = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def matrices_of(path: tuple[str, ...], x: Any) -> list[Any] | None:
    """Returns the matrices [in, out] in a parameter that Muon trains, of each layer and expert, by its name."""
    module, leaf = ("", "", *path)[-2:]
    if leaf == "kernel" and module in (*FROM_FEATURES, "o_proj", "down_proj"):
        first = x.shape[:2] if "experts" in path else x.shape[:1]
        wide = x.shape[-1] if "experts" in path else -1
        shape = (x.shape[-2], wide) if "experts" in path else (D, -1) if module in FROM_FEATURES else (-1, D)
    elif leaf in ("a", "b"):
        first, shape = x.shape[:1], (-1, 2) if leaf == "a" else (2, -1)
    else:
        return None
    return list(x.reshape(-1, *x.shape[len(first) :]).reshape(np.prod(first), *shape))


def muon_by_hand(params: Any) -> Any:
    """Returns the parameters after steps of Muon on lists of matrices, by the rule of optax that matrices have Muon."""
    schedule = optax.join_schedules([optax.constant_schedule(0.0), optax.constant_schedule(RATE)], [1])
    muon = optax.contrib.muon(schedule, weight_decay=DECAY, consistent_rms=0.2)
    others, clip = optax.nadamw(schedule, weight_decay=0), optax.clip_by_global_norm(NORM)

    def parted(tree):
        named = {tuple(key.key for key in path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
        matrices = {path: found for path, x in named.items() if (found := matrices_of(path, x)) is not None}
        return matrices, {path: x for path, x in named.items() if path not in matrices}

    def together(like, matrices, rest):
        def leaf(path, x):
            names = tuple(key.key for key in path)
            return jnp.stack(matrices[names]).reshape(x.shape) if names in matrices else rest[names]

        return jax.tree_util.tree_map_with_path(leaf, like)

    def update(states, gradients, params):
        gradients, _ = clip.update(gradients, clip.init(params))
        pairs = zip((muon, others), parted(gradients), states, parted(params), strict=True)
        results = [(one.update(gradient, state, part), part) for one, gradient, state, part in pairs]
        parts = [optax.apply_updates(part, changes) for (changes, _), part in results]
        return [state for (_, state), _ in results], together(params, *parts)

    states = [one.init(part) for one, part in zip((muon, others), parted(params), strict=True)]
    return by_hand(params, states, update)


MUONS = [(name, devices) for devices in PLACES for name in ("all", "lora", "experts")]


@pytest.mark.parametrize(("name", "devices"), slow_unless([("all", ONE), ("lora", ONE)], MUONS))
def test_muon_takes_the_steps_of_optax(name, devices):
    start = start_of(name)
    options = {"optimizer": "muon", "weight_decay": DECAY, "max_grad_norm": NORM}
    params, lines = taken(config_on(devices, **options), start, [a_batch()] * STEPS)
    expected = muon_by_hand(split(start)[0])
    assert_close(params, to_numpy(expected), atol=1e-6, rtol=0)
    assert [line["learning_rate"] for line in lines] == pytest.approx([0, RATE, RATE])
    moved = [np.abs(x - y).max() for x, y in zip(*map(jax.tree.leaves, (params, split(start)[0])), strict=True)]
    assert min(moved) > 0.1 * RATE


# ---- methods

TASK = Task(None, None, None, None, (0,), 1, MODEL.vocab_size)
RATES = {"policy": 1e-3, "critic": 1e-2}
LARGE = 1e-2  # an ε with which rounding of small gradients does not become steps


def learned(name: str, devices: Any, *, recording: bool = False) -> Any:
    """Returns the state after an update of a method, its metrics, and the parameters that it started from."""
    model = dataclasses.replace(MODEL, dtype="bfloat16", rounding="stochastic") if name == "bfloat16" else MODEL
    critic = name if name in ("own", "shared") else "none"
    options = {"num_prompts": ROWS, "group_size": 4, "max_tokens": 5, "kl_coef": 0.0, "optimizer": "muon"}
    options |= {"adam_epsilon": LARGE, "max_grad_norm": NORM, "learning_rate": RATES["policy"]}
    config = with_options(recipe() if critic == "none" else PPO, **options, critic=critic)
    config = config if critic == "none" else with_options(config, critic_learning_rate=RATES["critic"])
    mesh = {"parallel": "mesh", "fsdp": 2, "tensor": 2} if devices.mesh else {}
    config = with_options(config, devices=len(devices.all), **mesh)
    policies = {"policy": decoder_policy(model), "critic": critic_policy(model)}
    method, params = make_method(policies, config), start_of("all")
    method = method._replace(optimizer=recorder(1)) if recording else method
    programs = make_method_programs(method, policies["policy"], TASK, config)
    models = {"policy": params} if critic == "none" else add_critic(model, params, critic)
    unscored = dict.fromkeys(("old_logprobs", "ref_logprobs", "old_entropy", "old_values"))
    batch = ragged_batch((ROWS, 4, 3, 5), MODEL.vocab_size, shortest=1)._replace(**unscored)
    state, result = placed(programs, models, batch, ragged_rewards(ROWS, 4)).scored(programs).learned(programs)
    return state, result.metrics, models


@cache
def expected_update(name: str) -> Any:
    """Returns the parameters by role after a step of Muon on recorded gradients, each clipped by its own norm."""
    state, _, models = learned(name, ONE, recording=True)

    def stepped(role: str) -> Any:
        gradient, params = jax.tree.map(lambda x: x[0], state.opt_state.gradients[role]), models[role]
        muon = optax.contrib.muon(
            RATES[role], eps=LARGE, consistent_rms=0.2, muon_weight_dimension_numbers=muon_matrices
        )
        chain = optax.chain(optax.clip_by_global_norm(NORM), muon)
        return optax.apply_updates(params, chain.update(gradient, chain.init(params), params)[0])

    return to_numpy({role: stepped(role) for role in models})


METHODS = [(name, devices) for name in ("grpo", "own", "shared") for devices in PLACES] + [("bfloat16", ONE)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "devices"), METHODS)
def test_methods_and_critics_take_a_step_of_muon(name, devices):
    state, metrics, models = learned(name, devices)
    assert_close(state.params, expected_update(name), atol=1e-6, rtol=0)
    assert metrics["learning_rate"] == pytest.approx(RATES["policy"])
    assert ("changed_share" in metrics) == (name == "bfloat16")
    assert steps_taken(state.opt_state) == 1
    moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), state.params, to_numpy(models))
    # The gradient of a critic's own decoder is 0 in the first step, because its head begins at 0.
    assert all(0.1 * RATES[role] < max(jax.tree.leaves(moved[role])) < 10 * RATES[role] for role in moved)


# ---- a user's

CHAIN = optax.chain(optax.clip(0.02), optax.scale_by_lion(), optax.add_decayed_weights(0.1), optax.scale(-0.01))


def scheduled(schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.adafactor(schedule, min_dim_size_to_factor=4, momentum=0.9)


OWN = {"chain": CHAIN, "scheduled": scheduled}


@pytest.mark.parametrize(
    ("name", "devices"),
    slow_unless([("chain", ONE), ("scheduled", MESH)], [(name, devices) for name in OWN for devices in PLACES]),
)
def test_a_users_optimizer_takes_the_steps_of_optax(name, devices):
    start = start_of("all")
    params, lines = taken(config_on(devices, optimizer=OWN[name]), start, [a_batch()] * STEPS)
    schedule = optax.join_schedules([optax.constant_schedule(0.0), optax.constant_schedule(RATE)], [1])
    optimizer = CHAIN if name == "chain" else scheduled(schedule)

    def update(state, gradients, params):
        changes, state = optimizer.update(gradients, state, params)
        return state, optax.apply_updates(params, changes)

    assert_close(params, to_numpy(by_hand(start, optimizer.init(start), update)), atol=1e-6, rtol=0)
    rates = [line.get("learning_rate") for line in lines]
    assert rates == ([None] * 3 if name == "chain" else pytest.approx([0, RATE, RATE]))


def without_count(schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.sgd(0.1)


def with_counts(schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.MultiSteps(optax.adam(schedule), 2).gradient_transformation()


@pytest.mark.parametrize("optimizer", ["adamw", "muon", without_count, with_counts])
def test_skipped_steps_change_neither_parameters_nor_the_schedule(optimizer):
    """Whatever the state of the optimizer counts."""
    config = SupervisedConfig(4, RATE, warmup_steps=2, optimizer=optimizer)
    start, batches = {"up_proj": {"kernel": jnp.ones((1, 3, 2))}}, [a_batch(), a_batch(np.nan), a_batch(), a_batch()]
    params, lines = taken(config, start, batches)
    assert [line["skipped"] for line in lines] == [0, 1, 0, 0]
    assert [line["learning_rate"] for line in lines] == pytest.approx([0, RATE / 2, RATE / 2, RATE])
    expected, _ = taken(config, start, [a_batch()] * 3)
    assert_close(params, expected, rtol=0)


# ---- what is refused, and what a run's folder holds


def test_what_is_no_optimizer_is_refused(tmp_path):
    with refused("there is no optimizer 'adam': take adamw or muon, or name your own as file.py:name"):
        validate(recipe(optimizer="adam"))
    with refused("there is no file"):
        validate(recipe(optimizer=f"{tmp_path}/mine.py:chain"))
    (tmp_path / "mine.py").write_text("chain = 3\n")
    with refused("is of type int: it must be an optax transformation, or a function from a schedule to one"):
        validate(recipe(optimizer=f"{tmp_path}/mine.py:chain"))
    with refused("must return an optax transformation: it is 0.1"):
        make_optimizer(0.1, optimizer=lambda schedule: schedule(0))
    with refused("must take a schedule, but: TypeError"):
        make_optimizer(0.1, optimizer=lambda: CHAIN)
    with refused("muon finds no projections of our decoders in this model: make one with optax.contrib.muon"):
        make_optimizer(0.1, optimizer="muon").init({"w": jnp.ones((3, 2))})
    for name in ("weight_decay", "adam_epsilon", "max_grad_norm"):
        with refused(f"{name} is 0.5, but your own optimizer does not read it: leave it out"):
            validate(recipe(**{name: 0.5}, optimizer=CHAIN))
    with refused("weight_decay is 0.5"):
        make_fit_programs(OBJECTIVE, SupervisedConfig(weight_decay=0.5, optimizer=CHAIN))
    validate(recipe(optimizer="muon", weight_decay=0.5))
    assert load_optimizer(CHAIN) is CHAIN


def test_a_run_names_the_users_optimizer(tmp_path):
    for optimizer, name in ((CHAIN, "optax"), (scheduled, f"{__name__}.scheduled"), ("muon", "muon")):
        run = tmp_path / name
        open_run(run, recipe(optimizer=optimizer))
        assert json.loads((run / "config.json").read_text())["optimizer"]["optimizer"].startswith(name)
        open_run(run, recipe(optimizer=optimizer))  # it resumes
        with refused("began with other options"):
            open_run(run, recipe())
