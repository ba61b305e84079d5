"""Makes updates.npz beside this file: one rollout step of each of several runs, as the training loop took it.

Written against the training loop of commit 7b9fd22. It uses functions of that commit that later ones may not have, so
it runs there only. FORMAT.md says what the arrays are.

  python tests/golden/updates/make.py

The step is that of `loop.train` with number 0, by the loop's own functions, except that the optimizer is plain SGD,
which also keeps the gradients. The LoRA case needs the folder shared/data/stories260K-hf beside the repository, and is
left out without it; the file is then not complete.
"""

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

# Quick compiles, and the rounding of the test suite: tests/conftest.py sets the same.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from grpo_jax.training import loop
from grpo_jax.training.grpo import grpo_method
from grpo_jax.training.loop import Method, compile_programs
from grpo_jax.training.ppo import add_critic, critic_policy, ppo_method
from grpo_jax.training.rollout import (
    SHUFFLING,
    Rollout,
    group_temperatures,
    outcome_of,
    step_key,
    to_batch,
    zero_spread,
)
from grpo_jax.training.run import RunFolder

from grpo_jax.config import GRPOConfig, PPOConfig
from grpo_jax.models.config import ModelConfig, config_from_huggingface
from grpo_jax.models.lora import add_adapters
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.models.weights import load_params, read_json
from grpo_jax.tasks.task import Component, Prompts, Task, pad_prompts, rng

FILE = Path(__file__).with_name("updates.npz")
STORIES = Path(__file__).resolve().parents[4] / "shared" / "data" / "stories260K-hf"
STEP = 0

VOCAB, EOS, PAD = 8, 6, 7
MODEL = ModelConfig(VOCAB, 8, 16, 2, 2, 1, 4, initializer_range=0.5)
COMMON: dict[str, Any] = {"steps": 1, "num_prompts": 8, "group_size": 4, "max_tokens": 5, "seed": 0}
MINIBATCHES = {"minibatches": 4, "epochs": 2}

Arrays = dict[str, np.ndarray]


# ---- tasks


def prompts(step: int) -> Prompts:
    """Eight prompts of 1 to 3 tokens below 6."""
    noise = rng(STEP, step)
    tokens = [noise.integers(0, 6, length).tolist() for length in noise.integers(1, 4, 8)]
    return pad_prompts(tokens, [{"prompt": str(t)} for t in tokens], width=3, pad_id=PAD)


def digits(ids) -> str:
    return "".join(map(str, ids))


def threes_and_ones(examples, texts):
    return [0.2 * text.count("3") + 0.05 * text.count("1") for text in texts]


def begins_with_three(examples, texts):
    return [float(text.startswith("3")) for text in texts]


def has_three(examples, texts):
    return [float("3" in text) for text in texts]


def hundreds_of_tokens(examples, texts):
    """A reward of another scale, which does not apply to empty completions."""
    return [100.0 * len(text) if text else None for text in texts]


def first_digit(examples, texts):
    return [-0.001 * int(text[0]) if text else -0.01 for text in texts]


COMPONENTS = {
    "threes": Component(threes_and_ones, 0.7),
    "length": Component(hundreds_of_tokens, 0.3),
    "first": Component(first_digit, 0.5),
}

TASK = Task(prompts, threes_and_ones, prompts(999), digits, (EOS,), PAD, VOCAB)

# Beginnings of what stories260K writes. A full stop or a comma ends a completion, as its own end hardly comes up.
STORIES_PROMPTS = [[1, 403, 407], [1, 403, 407, 261, 378, 432, 383], [1, 338, 401, 396], [1, 385, 328]]
STORIES_EOS = (1, 426, 432)


def stories_prompts(step: int) -> Prompts:
    return pad_prompts(STORIES_PROMPTS, [{"prompt": str(t)} for t in STORIES_PROMPTS], width=7, pad_id=2)


def even_ids(examples, texts):
    """The share of even ids, of 8 tokens."""
    return [sum(int(word) % 2 == 0 for word in text.split()) / 8 for text in texts]


STORIES_TASK = Task(
    stories_prompts, even_ids, stories_prompts(999), lambda ids: " ".join(map(str, ids)), STORIES_EOS, 2, 512
)


# ---- parameters


def random_like(tree, scale: float, seed: int):
    """Normal numbers in the shapes of a tree."""
    noise = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(noise.normal(0, scale, x.shape), jnp.float32), tree)


def moved(tree, scale: float, seed: int):
    return jax.tree.map(jnp.add, tree, random_like(tree, scale, seed))


POLICY = decoder_policy(MODEL)
PARAMS = jax.jit(POLICY.init)(jax.random.key(0))


def actor_critic(kind: str):
    """A critic whose head is not 0, so that its decoder has a gradient in the first update too."""
    params = add_critic(MODEL, PARAMS, kind)
    return params._replace(critic=params.critic._replace(head=random_like(params.critic.head, 0.2, 1)))


def adapted_stories() -> tuple[Policy, Any]:
    """The stories model with adapters whose B is not 0, so that A has a gradient in the first update too."""
    config = config_from_huggingface(read_json(STORIES / "config.json"))
    params = add_adapters(
        load_params(STORIES, config), jax.random.key(0), rank=2, alpha=4.0, targets=("q_proj", "v_proj")
    )

    def with_b(path, x):
        return random_like(x, 0.1, len(str(path))) if path[-1].key == "b" else x

    return decoder_policy(config), params._replace(adapters=jax.tree_util.tree_map_with_path(with_b, params.adapters))


# ---- an optimizer that remembers


class Recorded(NamedTuple):
    """State of `recorder`."""

    count: jax.Array  # int32, optimizer steps taken; by this name the loop asks for them
    gradients: Any  # [U, ...] for each leaf


def recorder(updates: int) -> optax.GradientTransformation:
    """Keeps the gradients of the first U optimizer steps, and passes them on as they are."""

    def init(params) -> Recorded:
        return Recorded(jnp.int32(0), jax.tree.map(lambda x: jnp.zeros((updates, *x.shape), x.dtype), params))

    def update(gradients, state: Recorded, params=None):
        kept = jax.tree.map(lambda buffer, g: buffer.at[state.count].set(g), state.gradients, gradients)
        return gradients, Recorded(state.count + 1, kept)

    return optax.GradientTransformation(init, update)


# ---- cases


class Case(NamedTuple):
    """A run, of which one step is recorded."""

    config: GRPOConfig
    policy: Policy
    start: Any  # parameters at which the step begins
    method: Callable[[Policy, GRPOConfig], Method]
    task: Task = TASK
    sgd: float = 0.1
    reference: Any = None  # parameters of the reference; None: the start, as in the first step of a run


def ppo(policy: Policy, config: PPOConfig) -> Method:
    return ppo_method(policy, critic_policy(MODEL), config)


def make_cases() -> dict[str, Case]:
    def grpo(**changes) -> GRPOConfig:
        return GRPOConfig(**COMMON | changes)

    def of_policy(config: GRPOConfig, **options) -> Case:
        return Case(config, POLICY, PARAMS, grpo_method, **options)

    def of_critic(kind: str, sgd: float = 0.05, **options) -> Case:
        split = MINIBATCHES if kind == "own" else {"minibatches": 2, "epochs": 2}
        config = PPOConfig(**COMMON | split | {"critic": kind, "kl_coef": 0.1, "preset": "lite_ppo"})
        return Case(config, POLICY, actor_critic(kind), ppo, sgd=sgd, **options)

    elsewhere = moved(PARAMS, 0.1, 2)
    cases = {
        "grpo": of_policy(grpo(kl_coef=0.04)),
        "grpo_reference": of_policy(grpo(kl_coef=0.04), reference=elsewhere),
        "grpo_minibatches": of_policy(grpo(kl_coef=0.04, **MINIBATCHES)),
        "dapo": of_policy(grpo(preset="dapo")),
        "ppo_own": of_critic("own"),
        "ppo_own_reference": of_critic("own", sgd=0.03, reference=elsewhere),
        "ppo_shared": of_critic("shared"),
        "ppo_shared_reference": of_critic("shared", reference=elsewhere),
        "dynamic": of_policy(grpo(preset="dapo", max_rollouts=3), task=TASK._replace(reward=has_three)),
        "gdpo": of_policy(grpo(kl_coef=0.04, advantages_of="components"), task=TASK._replace(reward=COMPONENTS)),
    }
    cases["dynamic_filled"] = cases["dynamic"]._replace(task=TASK._replace(reward=begins_with_three))
    if STORIES.is_dir():
        config = grpo(kl_coef=0.04, num_prompts=4, max_tokens=8, minibatches=2, epochs=2)
        policy, params = adapted_stories()
        cases["lora"] = Case(config, policy, params, grpo_method, STORIES_TASK, sgd=0.2)
    return cases


# ---- one step


def by_path(prefix: str, tree) -> Arrays:
    """Leaves by the names on their path, with "/" between."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {f"{prefix}/{jax.tree_util.keystr(p, simple=True, separator='/')}": np.asarray(x) for p, x in leaves}


def record(case: Case) -> Arrays:
    """The arrays of the first step of a run, in the order in which `loop.train` makes them."""
    config, task, optimizer_steps = case.config, case.task, case.config.epochs * case.config.minibatches
    optimizer = optax.chain(recorder(optimizer_steps), optax.sgd(case.sgd))
    method = case.method(case.policy, config)._replace(optimizer=optimizer)
    programs = compile_programs(method, case.policy, task, config)
    history: list[tuple[Any, Arrays]] = []

    def remembered(state, minibatch, frozen, reference):
        state, metrics = programs.train_step(state, minibatch, frozen, reference)
        history.append((minibatch, jax.device_get(metrics)))
        return state, metrics

    temperature = np.asarray(group_temperatures(config.num_prompts, config.algorithm.group_size, 1.0, 0.0))
    start, frozen = method.split(loop.replicate(case.start, 1))
    current = method.actor(start, frozen)
    reference = current if case.reference is None else case.reference
    everything: list[Rollout] = []

    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder), dataclasses.asdict(config))
        state = loop.begin(programs.init_state, method, start, config)
        with watched_sampling(everything):
            rollout, _ = loop.sample_step(programs, current, task, task.reward, temperature, STEP, config, run)
        batch, sampler_logprobs = to_batch(rollout, temperature), rollout.completions.sampler_logprobs
        batch = loop.scored(programs.scorer, current, reference, batch, sampler_logprobs, config)
        if programs.values:
            batch = batch._replace(old_values=programs.values(state.params, frozen, batch))
        scored = jax.device_get(batch)
        found = programs.advantages(outcome_of(rollout), batch, loop.kl_coef_of(state, config))
        batch, advantages, judged = jax.device_get(found)
        watched = programs._replace(train_step=remembered)
        state, means = loop.update(watched, state, frozen, None, batch, STEP, config, run, "golden")

    # What the loss took: its ref_logprobs are gone where the KL is in the reward, so those of the scorer are kept.
    arrays: Arrays = {
        "prompt_ids": batch.prompt_ids,
        "prompt_mask": batch.prompt_mask,
        "completion_ids": batch.completion_ids,
        "completion_mask": batch.completion_mask,
        "sampler_logprobs": batch.sampler_logprobs,
        "truncated": rollout.completions.truncated,
        "temperature": batch.temperature,
        "rewards": rollout.rewards,
        "old_logprobs": scored.old_logprobs,
        "advantages": batch.advantages,
        "advantages_logged": advantages,
        "order": np.stack([order_of(config, epoch) for epoch in range(config.epochs)]),
        "tokens": np.array([minibatch.completion_mask.sum() for minibatch, _ in history], np.int32),
    }
    for name, value in (
        ("ref_logprobs", scored.ref_logprobs),
        ("old_values", batch.old_values),
        ("returns", batch.returns),
    ):
        if value is not None:
            arrays[name] = value
    if config.advantages_of == "components":
        outcome = outcome_of(rollout)
        arrays |= {"components": outcome.components, "weights": outcome.weights, "applicable": rollout.applicable}
    if config.max_rollouts > 1:
        arrays |= all_draws(rollout, *everything)
    check_order(arrays["order"], history, batch, config)
    arrays |= by_path("start", start) | by_path("end", state.params)
    if case.reference is not None:
        arrays |= by_path("reference", case.reference)
    arrays |= by_path("gradients", state.opt_state[0].gradients)
    arrays |= {f"metrics/{name}": np.stack([metrics[name] for _, metrics in history]) for name in history[0][1]}
    arrays |= {f"means/{name}": np.float32(value) for name, value in means.items()}
    arrays |= {f"judged/{name}": np.float32(value) for name, value in judged.items()}
    described = dataclasses.asdict(config) | {"sgd": case.sgd}
    arrays["config"] = np.array(json.dumps(described))
    assert int(state.opt_state[0].count) == len(history) == optimizer_steps
    return {name: narrowed(np.asarray(value)) for name, value in arrays.items()}


@contextmanager
def watched_sampling(seen: list[Rollout]) -> Iterator[None]:
    """Within it, all that `loop.sample_step` samples is added to a list."""
    original = loop.sample_with_spread

    def sample(draw, **options):
        sampled = original(draw, **options)
        seen.append(sampled.everything)
        return sampled

    loop.sample_with_spread = sample
    try:
        yield
    finally:
        loop.sample_with_spread = original


def all_draws(rollout: Rollout, everything: Rollout) -> Arrays:
    """All that a step of dynamic sampling drew, and the numbers of the groups that it kept."""
    spread, num_prompts = ~zero_spread(everything), len(rollout.texts)
    kept = np.sort(np.argsort(~spread, stable=True)[:num_prompts])
    completions = everything.completions
    for mine, its in (
        (completions.completion_ids[kept], rollout.completions.completion_ids),
        (everything.prompts.ids[kept], rollout.prompts.ids),
        (everything.rewards[kept], rollout.rewards),
    ):
        np.testing.assert_array_equal(mine, its)
    return {
        "draws/prompt_ids": everything.prompts.ids,
        "draws/prompt_mask": everything.prompts.mask,
        "draws/completion_ids": completions.completion_ids,
        "draws/completion_mask": completions.completion_mask,
        "draws/sampler_logprobs": completions.sampler_logprobs,
        "draws/truncated": completions.truncated,
        "draws/rewards": everything.rewards,
        "draws/spread": spread,
        "draws/kept": kept.astype(np.int32),
    }


def order_of(config: GRPOConfig, epoch: int) -> np.ndarray:
    """The order of the prompts in an epoch. A single minibatch is not shuffled."""
    if config.minibatches == 1:
        return np.arange(config.num_prompts)
    key = step_key(config.seed, SHUFFLING, STEP * config.epochs + epoch)
    return np.asarray(jax.random.permutation(key, config.num_prompts))


def check_order(order: np.ndarray, history, batch, config: GRPOConfig) -> None:
    """Asserts that the updates took the prompts in this order."""
    for piece, (minibatch, _) in zip(order.reshape(len(history), -1), history, strict=True):
        np.testing.assert_array_equal(minibatch.completion_ids, batch.completion_ids[piece])
        np.testing.assert_array_equal(minibatch.advantages, batch.advantages[piece])


def narrowed(array: np.ndarray) -> np.ndarray:
    """float32, int32 and bool, as the loop computes; text as it is."""
    kinds = {"f": np.float32, "i": np.int32}
    return array.astype(kinds.get(array.dtype.kind, array.dtype))


# ---- the file


def main() -> None:
    arrays: Arrays = {}
    for name, case in make_cases().items():
        recorded = record(case)
        arrays |= {f"{name}/{key}": value for key, value in recorded.items()}
        print(name, {key: np.round(recorded[f"metrics/{key}"], 4).tolist() for key in ("loss", "grad_norm", "ratio")})
    np.savez_compressed(FILE, **arrays)
    print(f"{len(arrays)} arrays, {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
