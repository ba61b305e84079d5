"""A whole training run as one XLA program, where the reward is computed on the device.

It is made of the functions that the ordinary loop compiles one by one (a `Method`, the sampler, the scorer, the step),
so both give the same numbers up to rounding. What the host alone can do, the prompts of all steps, is done before.
Several runs that differ in seeds and numbers are one call, `compile_row`.

Letters: R runs, S steps, N prompts of a step, C calls of a held-out evaluation, E evaluations, G completions.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config import GRPOConfig, validate
from grpo_jax.data.types import Example
from grpo_jax.errors import UsageError
from grpo_jax.models.policy import Policy
from grpo_jax.models.transformer import Params
from grpo_jax.sampling.sampler import Completions, sample_groups
from grpo_jax.tasks.task import Task
from grpo_jax.training.evaluate import heldout_calls
from grpo_jax.training.grpo import grpo_method
from grpo_jax.training.loop import Method, after_step, begin, kl_coef_of, optimizer_step, over_updates, scored
from grpo_jax.training.rollout import (
    EVALUATION,
    REWARD,
    SAMPLING,
    SHUFFLING,
    Outcome,
    candidates,
    group_temperatures,
    score,
    step_key,
    truncation_of,
)
from grpo_jax.training.state import Array, Batch, TrainState, init_state

# Metrics of what a step sampled, before its updates.
OF_SAMPLING = (
    "reward",
    "reward_std",
    "zero_spread_share",
    "distinct_share",
    "length_mean",
    "truncated_share",
    "tokens",
)

# (what it needs of the prompts [N, ...], completions, key, **options) -> rewards float32 [N, G]; gold may give several
# numbers of a completion, [N, G, K]. `completions.completion_ids` have the token that ended them, and padding after it.
DeviceReward = Callable[..., jax.Array]


class DeviceTask(NamedTuple):
    """A task whose reward is computed from tokens."""

    task: Task
    targets: Callable[[Sequence[Example]], np.ndarray]  # columns of N prompts -> what rewards need of them, [N, ...]
    reward: DeviceReward  # that is learned from
    gold: DeviceReward  # that held-out completions are judged by


class Prompts(NamedTuple):
    """Prompts on the device, with leading axes of steps or calls."""

    ids: Array  # int32 [..., N, P]
    mask: Array  # bool [..., N, P]
    targets: Any  # [..., N, ...]


class Heldout(NamedTuple):
    """The calls of a held-out evaluation, as `evaluate.sample_heldout` makes them."""

    prompts: Prompts  # [C, N, ...]
    rows: Array  # int32 [C, N, G]
    greedy: Array  # bool [C, N, G]
    counted: Array  # bool [C, N, G], false for what only fills the shape


class History(NamedTuple):
    """What a run leaves behind; from `compile_row` with a leading axis R."""

    params: Params  # the trained ones, at the end
    metrics: dict[str, jax.Array]  # name -> [S]; those of the ordinary loop that can be had on the device
    heldout: jax.Array  # what gold gives, [E, C, N, G]; at step 0, every `eval_every` steps and at the end


def prompts_of(task: DeviceTask, steps: int) -> Prompts:
    """The prompts of the first S steps of a task, `[S, N, ...]`."""
    return stacked([_encoded(task, task.task.prompts(step)) for step in range(steps)])


def heldout_of(task: DeviceTask, config: GRPOConfig) -> Heldout:
    """What an evaluation of a run with this configuration samples."""
    calls = heldout_calls(
        task.task.heldout,
        num_prompts=config.num_prompts,
        group_size=config.sampling.group_size,
        samples=config.eval_samples,
    )
    return stacked([Heldout(_encoded(task, call.prompts), *call[1:]) for call in calls])


def by_prompt(heldout: Heldout, scores: np.ndarray) -> np.ndarray:
    """What gold gave (`History.heldout`) as `[E, M, n + 1, ...]`: n samples of M prompts, and the greedy one last."""
    counted, greedy = np.asarray(heldout.counted), np.asarray(heldout.greedy)
    flat = np.asarray(scores)[:, counted]
    return flat.reshape(len(flat), int((counted & greedy).sum()), -1, *flat.shape[2:])


def whole_run(
    policy: Policy,
    task: DeviceTask,
    config: GRPOConfig,
    make_method: Callable[[Policy, GRPOConfig], Method] = grpo_method,
    *,
    heldout_temperature: float | None = None,
) -> Callable[..., History]:
    """A training run as a pure function, to be compiled, mapped and vmapped.

    Args:
      policy: the model's functions.
      task: its tokens and rewards.
      config: of all that is not given to the function.
      make_method: `grpo_method`, or another function of policy and configuration.
      heldout_temperature: of held-out completions, for runs that differ in that of training; None: the run's.

    Raises:
      UsageError: the configuration cannot work.

    Returns:
      (params, prompts of as many steps as the configuration has, held-out calls, seed, options) -> history. Of the
      options those that are fields of the configuration, such as learning_rate, kl_coef and epsilon_high, take their
      place; the reward gets the others.
    """
    validate(config, compares_groups=make_method is grpo_method)
    every = config.eval_every or config.steps
    if config.steps % every:
        raise UsageError(f"eval_every ({every}) must divide steps ({config.steps})")
    if config.max_rollouts > 1 or config.advantages_of != "sum":
        raise UsageError("a run as one program has one reward and one rollout a step: leave out what needs more")
    fields = {field.name for field in dataclasses.fields(config)}

    def run(params: Params, prompts: Prompts, heldout: Heldout, seed: Array, options: Mapping[str, Array]) -> History:
        if prompts.ids.shape[:2] != (config.steps, config.num_prompts):
            raise UsageError(
                f"prompts are {prompts.ids.shape[1]} of {prompts.ids.shape[0]} steps, but the run has "
                f"{config.num_prompts} of {config.steps}: make both by prompts_of and the task's num_prompts"
            )
        settings = dataclasses.replace(config, **{name: value for name, value in options.items() if name in fields})
        rewarded = partial(task.reward, **{name: value for name, value in options.items() if name not in fields})
        method = make_method(policy, settings)
        start, frozen = method.split(params)

        def learn(state: TrainState, inputs: tuple[Array, Prompts]) -> tuple[TrainState, dict[str, jax.Array]]:
            step, given = inputs
            return _step(method, policy, task.task, rewarded, settings, state, start, frozen, given, seed, step)

        def judge(state: TrainState) -> jax.Array:
            actor = method.actor(state.params, frozen)
            key = step_key(seed, EVALUATION, 0)
            temperature = settings.sampling.temperature if heldout_temperature is None else heldout_temperature

            def call(given: Heldout) -> jax.Array:
                completions = sample(
                    policy,
                    actor,
                    task.task,
                    settings,
                    given.prompts,
                    given.rows,
                    jnp.where(given.greedy, 0.0, temperature),
                    key,
                )
                return task.gold(given.prompts.targets, completions, key)

            return jax.lax.map(call, heldout)

        def block(state: TrainState, inputs: Any) -> tuple[TrainState, Any]:
            state, metrics = jax.lax.scan(learn, state, inputs)
            return state, (metrics, judge(state))

        steps = jnp.arange(config.steps, dtype=jnp.uint32)
        pieces = jax.tree.map(lambda x: x.reshape(-1, every, *x.shape[1:]), (steps, prompts))
        state = begin(lambda params: init_state(params, method.optimizer), method, start, settings)
        before = judge(state)
        state, (metrics, after) = jax.lax.scan(block, state, pieces)
        metrics = jax.tree.map(lambda x: x.reshape(-1), metrics)
        return History(state.params, metrics, jnp.concatenate([before[None], after]))

    return run


def compile_row(
    run: Callable[..., History], *, side_by_side: bool, devices: int = 1
) -> Callable[[Params, Prompts, Heldout, Array, Mapping[str, Array]], History]:
    """R runs as one call, compiled once for all rows of one shape.

    Args:
      run: of `whole_run`.
      side_by_side: all at once (`vmap`), where a device has room to fill; else one after another.
      devices: that runs are spread over; divides R.

    Returns:
      (params `[R, ...]`, prompts `[R, S, ...]` (`stacked` makes both of those of runs), held-out calls that all share,
      seeds `[R]`, options name -> `[R]`) -> histories `[R, ...]`.
    """

    def several(rows: tuple, heldout: Heldout) -> History:
        def one(row: tuple) -> History:
            params, prompts, seed, options = row
            return run(params, prompts, heldout, seed, options)

        return jax.vmap(one)(rows) if side_by_side else jax.lax.map(one, rows)

    compiled = jax.jit(several) if devices == 1 else jax.pmap(several, in_axes=(0, None))

    def row(params: Params, prompts: Prompts, heldout: Heldout, seeds: Array, options: Mapping[str, Array]) -> History:
        rows = params, prompts, np.asarray(seeds, np.uint32), dict(options)
        if devices == 1:
            return compiled(rows, heldout)
        split = jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), rows)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), compiled(split, heldout))

    return row


def _step(method, policy, task, reward, config, state, start, frozen, given, seed, step):
    """One step of the loop: rollout, score, advantages, update."""
    sampling = config.sampling
    shape = given.ids.shape[0], sampling.group_size
    current = method.actor(state.params, frozen)
    reference = method.actor(start if state.reference is None else state.reference, frozen)
    temperature = group_temperatures(*shape, sampling.temperature, sampling.temperature_spread)

    # ---- rollout
    rows = jnp.arange(shape[0] * shape[1], dtype=jnp.int32).reshape(shape)
    completions = sample(policy, current, task, config, given, rows, temperature, step_key(seed, SAMPLING, step))
    rewards = reward(given.targets, completions, step_key(seed, REWARD, step))

    # ---- score
    batch = Batch(given.ids, given.mask, completions.completion_ids, completions.completion_mask, temperature)
    batch = scored(partial(score, policy), current, reference, batch, completions.sampler_logprobs, config)
    if method.values:
        batch = batch._replace(old_values=method.values(state.params, frozen, batch))

    # ---- advantages
    outcome = Outcome(rewards, jnp.ones(shape, bool), completions.truncated, candidates(completions))
    batch, _, logs = method.advantages(outcome, batch, kl_coef_of(state, config))

    # ---- update
    held_to = reference if config.divergence != "preset" else None

    def minibatch_step(state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
        state, metrics = optimizer_step(method, state, batch, frozen, held_to, config)
        return state, (metrics, jnp.sum(batch.completion_mask))

    def epoch(state: TrainState, number: jax.Array) -> tuple[TrainState, Any]:
        key = step_key(seed, SHUFFLING, step * config.epochs + number)
        order = jax.random.permutation(key, shape[0]) if config.minibatches > 1 else jnp.arange(shape[0])
        pieces = jax.tree.map(lambda x: x[order].reshape(config.minibatches, -1, *x.shape[1:]), batch)
        return jax.lax.scan(minibatch_step, state, pieces)

    state, updates = jax.lax.scan(epoch, state, jnp.arange(config.epochs, dtype=jnp.uint32))
    metrics, tokens = jax.tree.map(lambda x: x.reshape(-1), updates)
    lengths = jnp.sum(completions.completion_mask, axis=-1)
    spread = jnp.max(rewards, axis=-1) > jnp.min(rewards, axis=-1)
    ids = jnp.where(completions.completion_mask, completions.completion_ids, -1)
    same = jnp.all(ids[:, :, None] == ids[:, None], axis=-1)
    sampled = {
        "distinct_share": jnp.mean(1 / jnp.sum(same, axis=-1)),
        "reward": jnp.mean(rewards),
        "reward_std": jnp.std(rewards),
        "zero_spread_share": 1 - jnp.mean(spread),
        "length_mean": jnp.mean(lengths),
        "truncated_share": jnp.mean(completions.truncated),
        "tokens": jnp.sum(lengths),
    }
    of_updates = over_updates(metrics, tokens) | {"skipped": jnp.max(metrics["skipped"])}  # in a row, so far
    return after_step(method, state, step, logs, config), sampled | logs | of_updates


def sample(
    policy: Policy,
    params: Params,
    task: Task,
    config: GRPOConfig,
    given: Prompts,
    rows: Array,
    temperature: Array,
    key: jax.Array,
) -> Completions:
    """Completions of prompts, as a run samples them.

    Args:
      policy, params: of the model.
      task, config: of the run.
      given: N prompts.
      rows: int32 `[N, G]`, numbers of the completions, that key their noise.
      temperature: `[N, G]`.
      key: consumed.
    """
    return sample_groups(
        policy,
        params,
        given.ids,
        given.mask,
        rows,
        key,
        max_tokens=config.max_tokens,
        eos_ids=task.eos_ids,
        temperature=temperature,
        truncation=truncation_of(config),
        pad_id=task.pad_id,
    )


def _encoded(task: DeviceTask, prompts: Any) -> Prompts:
    return Prompts(prompts.ids, prompts.mask, task.targets(prompts.examples))


def stacked(trees: Sequence[Any]) -> Any:
    """Trees of one structure as one, whose leaves have a leading axis."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
