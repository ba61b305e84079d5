"""Gradients of single groups at the start of training: how long they are, and how far apart."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.ablation import Bench, Setting, program_of
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.transformer import Params
from grpo_jax.training.grpo import grpo_method
from grpo_jax.training.rollout import REWARD, SAMPLING, Outcome, candidates, step_key
from grpo_jax.training.state import Batch
from grpo_jax.training.whole import Prompts, prompts_of, sample


class GroupGradients(NamedTuple):
    """Of M groups of G completions, each the only one of its step."""

    rewards: np.ndarray  # [M, G]
    advantages: np.ndarray  # [M, G]
    squared: np.ndarray  # [M], |gradient|² of a group
    mean_squared: float  # |mean gradient|², of all groups

    @property
    def noise(self) -> float:
        """Tr Cov / |mean|² of the gradient of one group: how many groups it takes until signal and noise are equal.

        Both are without bias: the mean of M gradients is itself longer by Tr Cov / M (1812.06162 has the same in its
        noise scale).
        """
        count = len(self.squared)
        trace = (self.squared.sum() - count * self.mean_squared) / (count - 1)
        signal = self.mean_squared - trace / count
        return float(trace / signal) if signal > 0 else np.nan


_compiled: dict[str, Callable] = {}


def group_gradients(bench: Bench, setting: Setting, seed: int, *, batches: int) -> GroupGradients:
    """Gradients of groups of training prompts, at the start, by the setting's reward, advantages and loss without KL.

    Args:
      bench: with starts.
      setting: of GRPO or another preset.
      seed: of start, prompts and noise.
      batches: so many steps' prompts.
    """
    key = program_of(setting)
    if key not in _compiled:
        _compiled[key] = _make(bench, setting)
    given = prompts_of(bench.task(setting, seed), batches)
    numbers = {name: setting.numbers[name] for name in setting.bed.options}
    parts = _compiled[key](bench.start(setting.bed, seed), given, np.uint32(seed), numbers)
    rewards, advantages, squared, mean_squared = jax.device_get(parts)
    groups = rewards.shape[0] * rewards.shape[1]
    return GroupGradients(
        rewards.reshape(groups, -1), advantages.reshape(groups, -1), squared.reshape(groups), float(mean_squared)
    )


def gradient_noise(bench: Bench, setting: Setting, seed: int) -> float:
    """`GroupGradients.noise` over the prompts of 16 steps, 512 in the cpu preset."""
    return group_gradients(bench, setting, seed, batches=16).noise


def _make(bench: Bench, setting: Setting):
    config, task = dataclasses.replace(bench.config(setting), kl_coef=0.0), bench.task(setting, 0)
    policy = decoder_policy(setting.bed.model)
    method, algorithm = grpo_method(policy, config), config.algorithm

    def batch_of(params: Params, given: Prompts, seed: jax.Array, step: jax.Array, numbers: Mapping[str, jax.Array]):
        shape = given.ids.shape[0], algorithm.group_size
        rows, temperature = jnp.arange(np.prod(shape)).reshape(shape), jnp.ones(shape)
        key = step_key(seed, SAMPLING, step)
        completions = sample(policy, params, task.task, config, given, rows, temperature, key)
        rewards = task.reward(given.targets, completions, step_key(seed, REWARD, step), **numbers)
        outcome = Outcome(rewards, jnp.ones(shape, bool), completions.truncated, candidates(completions))
        batch = Batch(given.ids, given.mask, completions.completion_ids, completions.completion_mask, temperature)
        batch = batch._replace(old_logprobs=completions.sampler_logprobs)
        return rewards, *method.advantages(outcome, batch, jnp.float32(0))[:2]

    def one_group(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        batch = jax.tree.map(lambda x: x[None], batch)
        batch = batch._replace(weights=algorithm.aggregation(batch.completion_mask))
        gradient = jax.grad(lambda params: method.loss_fn(params, None, None, batch)[0])(params)
        return optax.tree.norm(gradient, squared=True), gradient

    @jax.jit
    def run(params: Params, prompts: Prompts, seed: jax.Array, numbers: Mapping[str, jax.Array]):
        start, _ = method.split(params)

        def step(total: Params, inputs: tuple[jax.Array, Prompts]):
            number, given = inputs
            rewards, batch, advantages = batch_of(start, given, seed, number, numbers)

            def add(total: Params, batch: Batch):
                squared, gradient = one_group(start, batch)
                return jax.tree.map(jnp.add, total, gradient), squared

            total, squared = jax.lax.scan(add, total, batch)
            return total, (rewards, advantages, squared)

        count = prompts.ids.shape[0] * prompts.ids.shape[1]
        steps = jnp.arange(prompts.ids.shape[0], dtype=jnp.uint32)
        total, found = jax.lax.scan(step, jax.tree.map(jnp.zeros_like, start), (steps, prompts))
        return *found, optax.tree.norm(total, squared=True) / count**2

    return run
