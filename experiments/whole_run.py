"""A whole training run as one XLA program, where the reward is computed on the device.

It is made of the functions that the ordinary loop compiles one by one (a `Method`, the sampler, the scorer, the step),
so both give the same numbers up to rounding. The prompts of all steps are made before, on the host.
Several runs that differ in seeds and numbers are one call, `compile_runs`.

Letters: R runs, S steps, N prompts of a step, C calls of a held-out evaluation, E evaluations, G completions.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config import GRPOConfig, PPOConfig, options_of, run_of, validate, with_options
from grpo_jax.data.types import Example
from grpo_jax.errors import UsageError
from grpo_jax.models.policy import Policy
from grpo_jax.models.transformer import Params
from grpo_jax.rl import learn as learning
from grpo_jax.rl.evaluate import heldout_calls
from grpo_jax.rl.grpo import grpo_method
from grpo_jax.rl.keys import EVALUATION, REWARD, SAMPLING, step_key
from grpo_jax.rl.sampler import completion_numbers, group_temperatures, sample, to_batch
from grpo_jax.rl.scoring import score_completion_tokens
from grpo_jax.rl.types import Array, Batch, Method, RewardArrays, TrainState
from grpo_jax.sampling.sampler import Completions
from grpo_jax.tasks.task import Task

# Metrics of what a step sampled, before its updates.
OF_SAMPLING = (
    "reward",
    "reward_std",
    "gold",
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
    numbers: Array  # int32 [C, N, G], of completions, that key their noise
    greedy: Array  # bool [C, N, G]
    counted: Array  # bool [C, N, G], false for completions that only fill the shape


class History(NamedTuple):
    """What a run leaves behind; from `compile_runs` with a leading axis R."""

    params: Params  # the trained ones, at the end
    # name -> [S]; those of the ordinary loop that can be had on the device, and "gold": the mean of what gold gives the
    # completions that a step samples, or of the first of its numbers
    metrics: dict[str, jax.Array]
    heldout: jax.Array  # what gold gives, [E, C, N, G]; at step 0, every `eval_every` steps and at the end


def prompts_of(task: DeviceTask, steps: int) -> Prompts:
    """The prompts of the first S steps of a task, `[S, N, ...]`."""
    return stacked([_encoded(task, task.task.prompts(step)) for step in range(steps)])


def heldout_of(task: DeviceTask, config: GRPOConfig) -> Heldout:
    """What an evaluation of a run with this configuration samples."""
    calls = heldout_calls(
        task.task.heldout,
        num_prompts=config.sampling.num_prompts,
        group_size=config.sampling.group_size,
        samples=config.logging.eval_samples,
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
    config: GRPOConfig | PPOConfig,
    make_method: Callable[[Policy, Any], Method] = grpo_method,
    *,
    heldout_temperature: float | None = None,
) -> Callable[..., History]:
    """A training run as a pure function, to be compiled, mapped and vmapped.

    Args:
      policy: the model's functions.
      task: its tokens and rewards.
      config: the options; those that the function is given replace them.
      make_method: `grpo_method`, or another function of policy and configuration.
      heldout_temperature: of held-out completions, so that runs of other temperatures are evaluated alike; None: the
        run's.

    Raises:
      UsageError: the configuration cannot work.

    Returns:
      (params, prompts of as many steps as the configuration has, held-out calls, seed, options) -> history.
      Options that are fields of the configuration, such as learning_rate, kl_coef and epsilon_high, replace those. The
      reward gets the others.
    """
    loop = run_of(config)
    validate(loop, compares_groups=make_method is grpo_method)
    every = loop.logging.eval_every or loop.steps
    if loop.steps % every:
        raise UsageError(f"eval_every ({every}) must divide steps ({loop.steps})")
    if loop.sampling.max_rollouts > 1 or loop.loss.advantages_of != "sum":
        raise UsageError("a run as one program has one reward and one rollout a step: leave out what needs more")
    fields = options_of(config).keys()

    def run(params: Params, prompts: Prompts, heldout: Heldout, seed: Array, options: Mapping[str, Array]) -> History:
        if prompts.ids.shape[:2] != (loop.steps, loop.sampling.num_prompts):
            raise UsageError(
                f"prompts are {prompts.ids.shape[1]} of {prompts.ids.shape[0]} steps, but the run has "
                f"{loop.sampling.num_prompts} of {loop.steps}: make both by prompts_of and the task's num_prompts"
            )
        settings = with_options(config, **{name: value for name, value in options.items() if name in fields})
        rewarded = partial(task.reward, **{name: value for name, value in options.items() if name not in fields})
        method, chosen = make_method(policy, settings), run_of(settings)
        start, frozen = method.split(params)
        common = _Run(policy, method, task.task, rewarded, task.gold, chosen, start, frozen, seed)
        temperature = chosen.sampling.temperature if heldout_temperature is None else heldout_temperature
        evaluate = partial(_evaluate, common, heldout, temperature)

        def block(state: TrainState, inputs: Any) -> tuple[TrainState, Any]:
            state, metrics = jax.lax.scan(partial(_iteration, common), state, inputs)
            return state, (metrics, evaluate(state))

        steps = jnp.arange(loop.steps, dtype=jnp.uint32)
        pieces = jax.tree.map(lambda x: x.reshape(-1, every, *x.shape[1:]), (steps, prompts))
        state = learning.begin(method, start, chosen)
        before = evaluate(state)
        state, (metrics, after) = jax.lax.scan(block, state, pieces)
        metrics = jax.tree.map(lambda x: x.reshape(-1), metrics)
        return History(state.params, metrics, jnp.concatenate([before[None], after]))

    return run


def compile_runs(
    run: Callable[..., History], *, side_by_side: bool, devices: int = 1
) -> Callable[[Params, Prompts, Heldout, Array, Mapping[str, Array]], History]:
    """R runs as one call, compiled once for each shape.

    Args:
      run: of `whole_run`.
      side_by_side: True: all at once (`vmap`), for a device that has room. False: one after another.
      devices: that runs are spread over; divides R.

    Returns:
      (params `[R, ...]`, prompts `[R, S, ...]`, held-out calls that all share, seeds `[R]`, options name -> `[R]`) ->
      histories `[R, ...]`. `stacked` makes params and prompts from those of single runs.
    """

    def several(runs: tuple, heldout: Heldout) -> History:
        def one(given: tuple) -> History:
            params, prompts, seed, options = given
            return run(params, prompts, heldout, seed, options)

        return jax.vmap(one)(runs) if side_by_side else jax.lax.map(one, runs)

    compiled = jax.jit(several) if devices == 1 else jax.pmap(several, in_axes=(0, None))

    def call(params: Params, prompts: Prompts, heldout: Heldout, seeds: Array, options: Mapping[str, Array]) -> History:
        runs = params, prompts, np.asarray(seeds, np.uint32), dict(options)
        if devices == 1:
            return compiled(runs, heldout)
        split = jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), runs)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), compiled(split, heldout))

    return call


class _Run(NamedTuple):
    """What the iterations of a run have in common."""

    policy: Policy
    method: Method
    task: Task
    reward: DeviceReward
    gold: DeviceReward
    config: GRPOConfig
    start: Params  # trained parameters
    frozen: Any
    seed: Array


def _iteration(run: _Run, state: TrainState, inputs: tuple[Array, Prompts]) -> tuple[TrainState, dict[str, jax.Array]]:
    """One iteration of the loop: sample, reward, score, learn."""
    policy, method, task, reward, gold, config, start, frozen, seed = run
    step, given = inputs
    current = learning.sampling_policy(method, state, frozen)
    reference = method.actor(start if state.reference is None else state.reference, frozen)
    temperature, numbers = jnp.asarray(group_temperatures(config.sampling)), completion_numbers(config.sampling)

    # ---- sample, and reward
    def drawn(params: Params, tokens: Array) -> Completions:
        prompts, key = (given.ids, given.mask), step_key(seed, SAMPLING, step)
        return sample(policy, task, config.sampling, params, prompts, jnp.asarray(numbers), temperature, key, tokens)

    completions = drawn(current, None)
    rewards = reward(given.targets, completions, step_key(seed, REWARD, step))
    scores = gold(given.targets, completions, step_key(seed, REWARD, step))

    # ---- score
    def reference_logprobs(params: Params, batch: Batch) -> jax.Array:
        return score_completion_tokens(policy, params, batch).logprobs

    batch = to_batch(given.ids, given.mask, temperature, completions)
    scored = learning.score(method, reference_logprobs, config, state.params, frozen, reference, batch)
    if learning.needs_replay(config):
        replayed = drawn(method.actor(state.params, frozen), completions.completion_ids)
        scored = scored._replace(old_logprobs=replayed.sampler_logprobs)
    batch = learning.with_scores(batch, scored, config)

    # ---- learn
    loss_reference = reference if config.loss.divergence != "preset" else None
    graded = RewardArrays(rewards, jnp.ones(rewards.shape, bool))
    state, learned = learning.learn(method, config, state, frozen, loss_reference, batch, graded, (seed, step))
    return state, _sampling_metrics(completions, rewards, scores) | learned.metrics


def _evaluate(run: _Run, heldout: Heldout, temperature: Array, state: TrainState) -> jax.Array:
    """What gold gives held-out completions, `[C, N, G, ...]`."""
    actor, key = run.method.actor(state.params, run.frozen), step_key(run.seed, EVALUATION, 0)

    def call(given: Heldout) -> jax.Array:
        completions = sample(
            run.policy,
            run.task,
            run.config.sampling,
            actor,
            (given.prompts.ids, given.prompts.mask),
            given.numbers,
            jnp.where(given.greedy, 0.0, temperature),
            key,
        )
        return run.gold(given.prompts.targets, completions, key)

    return jax.lax.map(call, heldout)


def _sampling_metrics(completions: Completions, rewards: jax.Array, scores: jax.Array) -> dict[str, jax.Array]:
    """Of what an iteration sampled, before its updates."""
    lengths = jnp.sum(completions.completion_mask, axis=-1)
    spread = jnp.max(rewards, axis=-1) > jnp.min(rewards, axis=-1)
    ids = jnp.where(completions.completion_mask, completions.completion_ids, -1)
    same = jnp.all(ids[:, :, None] == ids[:, None], axis=-1)
    return {
        "distinct_share": jnp.mean(1 / jnp.sum(same, axis=-1)),
        "reward": jnp.mean(rewards),
        "reward_std": jnp.std(rewards),
        "gold": jnp.mean(scores.reshape(*rewards.shape, -1)[..., 0]),
        "zero_spread_share": 1 - jnp.mean(spread),
        "length_mean": jnp.mean(lengths),
        "truncated_share": jnp.mean(completions.truncated),
        "tokens": jnp.sum(lengths),
    }


def _encoded(task: DeviceTask, prompts: Any) -> Prompts:
    return Prompts(prompts.ids, prompts.mask, task.targets(prompts.examples))


def stacked(trees: Sequence[Any]) -> Any:
    """Trees of one structure as one, whose leaves have a leading axis."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
