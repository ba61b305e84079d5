"""A whole training run as one XLA program, for rewards that are computed on the device.

The program consists of the functions that the ordinary loop compiles separately: a `Method`, the
sampler, `score_rollout` and `learn`. So both give the same numbers up to rounding. The host makes the prompts of all
steps beforehand. `compile_runs` puts several runs, which differ in seeds and numbers, into one call.

Letters: R runs, S steps, N prompts of a step, C calls of a held-out evaluation, E evaluations, G completions of a
prompt.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config import GRPOConfig, validate, with_options
from grpo_jax.data.types import Example
from grpo_jax.errors import UsageError
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.params.tree import join, split
from grpo_jax.models.policy import Policy
from grpo_jax.models.rows.geometry import PromptTokens
from grpo_jax.options import options_of
from grpo_jax.rl.evaluate import heldout_calls
from grpo_jax.rl.interaction import sample_completions
from grpo_jax.rl.programs import make_method
from grpo_jax.rl.scorers import score_rollout, takes_sampler_logprobs
from grpo_jax.rl.source import completion_numbers, group_temperatures, to_batch
from grpo_jax.rl.types import EVALUATION, REWARD, SAMPLING, Method, RewardArrays, step_key
from grpo_jax.rl.update import learn, models_of, with_fixed_reference
from grpo_jax.sampling.sampler import Completions
from grpo_jax.step import Array, TrainState, init_state
from grpo_jax.tasks.task import Task

# Metrics of the rollout of a step, before its updates.
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
    targets: Callable[[Sequence[Example]], np.ndarray]  # examples of N prompts -> inputs of the rewards, [N, ...]
    reward: DeviceReward  # for training
    gold: DeviceReward  # for held-out completions


class Prompts(NamedTuple):
    """Prompts on the device, with leading axes of steps or calls."""

    tokens: PromptTokens  # [..., N, P]
    targets: Any  # [..., N, ...]


class Heldout(NamedTuple):
    """The inputs of the calls of `evaluate.sample_heldout` in a held-out evaluation."""

    prompts: Prompts  # [C, N, ...]
    numbers: Array  # int32 [C, N, G], of completions, that key their noise
    greedy: Array  # bool [C, N, G]
    counted: Array  # bool [C, N, G], false for completions that only fill the shape


class History(NamedTuple):
    """Results of a run; from `compile_runs` with a leading axis R."""

    params: Params  # the trained ones by role, at the end
    # name -> [S]; those of the ordinary loop that can be had on the device, and "gold": the mean of what gold gives the
    # completions that a step samples, or of the first of its numbers
    metrics: dict[str, jax.Array]
    heldout: jax.Array  # what gold gives, [E, C, N, G]; at step 0, every `eval_every` steps and at the end


def prompts_of(task: DeviceTask, steps: int) -> Prompts:
    """Returns the prompts of the first S steps of a task, `[S, N, ...]`."""
    return stacked([_encoded(task, task.task.prompts(step)) for step in range(steps)])


def heldout_of(task: DeviceTask, config: GRPOConfig) -> Heldout:
    """Returns the held-out calls of a run with this configuration."""
    calls = heldout_calls(
        task.task.heldout,
        num_prompts=config.sampling.num_prompts,
        group_size=config.sampling.group_size,
        samples=config.logging.eval_samples,
    )
    return stacked([Heldout(_encoded(task, call.prompts), *call[1:4]) for call in calls])


def by_prompt(heldout: Heldout, scores: np.ndarray) -> np.ndarray:
    """Sorts `History.heldout` by prompt, `[E, M, n + 1, ...]`: n samples of M prompts, and the greedy one last."""
    counted, greedy = np.asarray(heldout.counted), np.asarray(heldout.greedy)
    flat = np.asarray(scores)[:, counted]
    return flat.reshape(len(flat), int((counted & greedy).sum()), -1, *flat.shape[2:])


def whole_run(
    policies: Mapping[str, Policy],
    task: DeviceTask,
    loop: GRPOConfig,
    *,
    heldout_temperature: float | None = None,
) -> Callable[..., History]:
    """Makes a training run as a pure function, to be compiled, mapped and vmapped.

    Args:
      policies: The functions of the models by role, as in `make_programs`.
      task: Supplies the tokens and the rewards.
      loop: The options, whose fields those of the call replace.
      heldout_temperature: The temperature of held-out completions, for a fair comparison of runs with different
        temperatures; None: the temperature of the run.

    Raises:
      UsageError: The configuration cannot work.

    Returns:
      (models by role, prompts of as many steps as the configuration has, held-out calls, seed, options) -> history.
      Options that are fields of the configuration, such as learning_rate, kl_coef and epsilon_high, replace those. The
      reward gets the others.
    """
    validate(loop)
    every = loop.logging.eval_every or loop.steps
    if loop.steps % every:
        raise UsageError(f"eval_every ({every}) must divide steps ({loop.steps})")
    if loop.sampling.max_rollouts > 1 or loop.loss.advantages_of != "sum":
        raise UsageError("a run as one program has one reward and one rollout a step: leave out what needs more")
    fields = options_of(loop).keys()

    def run(params: Params, prompts: Prompts, heldout: Heldout, seed: Array, options: Mapping[str, Array]) -> History:
        if prompts.tokens.ids.shape[:2] != (loop.steps, loop.sampling.num_prompts):
            raise UsageError(
                f"prompts are {prompts.tokens.ids.shape[1]} of {prompts.tokens.ids.shape[0]} steps, but the run has "
                f"{loop.sampling.num_prompts} of {loop.steps}: make both by prompts_of and the task's num_prompts"
            )
        chosen = with_options(loop, **{name: value for name, value in options.items() if name in fields})
        rewarded = partial(task.reward, **{name: value for name, value in options.items() if name not in fields})
        method = make_method(policies, chosen)
        trained, frozen = split(with_fixed_reference(params, chosen))
        common = _Run(policies["policy"], method, task.task, rewarded, task.gold, chosen, frozen, seed)
        temperature = chosen.sampling.temperature if heldout_temperature is None else heldout_temperature
        evaluate = partial(_evaluate, common, heldout, temperature)

        def block(carry: _Carry, inputs: Any) -> tuple[_Carry, Any]:
            carry, metrics = jax.lax.scan(partial(_iterate, common), carry, inputs)
            return carry, (metrics, evaluate(carry.state))

        steps = jnp.arange(loop.steps, dtype=jnp.uint32)
        pieces = jax.tree.map(lambda x: x.reshape(-1, every, *x.shape[1:]), (steps, prompts))
        state = init_state(trained, method.optimizer)._replace(extras=method.initial_extras(trained))
        before = evaluate(state)
        first = _Carry(state, (trained["policy"],) * chosen.sampling.staleness)
        last, (metrics, after) = jax.lax.scan(block, first, pieces)
        metrics = jax.tree.map(lambda x: x.reshape(-1), metrics)
        return History(last.state.params, metrics, jnp.concatenate([before[None], after]))

    return run


def compile_runs(
    run: Callable[..., History], *, side_by_side: bool, devices: int = 1
) -> Callable[[Params, Prompts, Heldout, Array, Mapping[str, Array]], History]:
    """Makes one call of R runs, compiled once for each shape.

    Args:
      run: The function that `whole_run` returned.
      side_by_side: True: all at once (`vmap`), for a device with enough memory. False: one after another.
      devices: The number of devices that share the runs; it must divide R.

    Returns:
      (models by role `[R, ...]`, prompts `[R, S, ...]`, held-out calls that all share, seeds `[R]`, options name ->
      `[R]`) -> histories `[R, ...]`. `stacked` makes models and prompts from those of single runs.
    """

    def several(runs: tuple, heldout: Heldout) -> History:
        def one(single: tuple) -> History:
            params, prompts, seed, options = single
            return run(params, prompts, heldout, seed, options)

        return jax.vmap(one)(runs) if side_by_side else jax.lax.map(one, runs)

    compiled = jax.jit(several) if devices == 1 else jax.pmap(several, in_axes=(0, None))

    def call(params: Params, prompts: Prompts, heldout: Heldout, seeds: Array, options: Mapping[str, Array]) -> History:
        runs = params, prompts, np.asarray(seeds, np.uint32), dict(options)
        if devices == 1:
            return compiled(runs, heldout)
        parts = jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), runs)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), compiled(parts, heldout))

    return call


class _Run(NamedTuple):
    """The parts that the iterations of a run share."""

    policy: Policy
    method: Method
    task: Task
    reward: DeviceReward
    gold: DeviceReward
    config: GRPOConfig
    frozen: Any
    seed: Array


class _Carry(NamedTuple):
    """The state that passes from one iteration to the next."""

    state: TrainState
    earlier: tuple[Params, ...]  # trained parameters of the policy, the oldest first: as many as `staleness` says


def _iterate(run: _Run, carry: _Carry, inputs: tuple[Array, Prompts]) -> tuple[_Carry, dict[str, jax.Array]]:
    """Takes one iteration of the loop: sample, reward, score, learn."""
    policy, method, task, reward, gold, config, frozen, seed = run
    step, prompts = inputs
    state, earlier = carry
    # The ordinary loop samples rollouts ahead. Here the policy of that earlier step samples the same rollout now.
    oldest, *later = (*earlier, state.params["policy"])
    temperature = jnp.asarray(group_temperatures(config.sampling))
    numbers = jnp.asarray(completion_numbers(config.sampling))

    # ---- sample, and reward
    actor, prompt, key = join(oldest, frozen["policy"]), prompts.tokens, step_key(seed, SAMPLING, step)
    completions = sample_completions(policy, task, config.sampling, actor, prompt, numbers, temperature, key)
    rewards = reward(prompts.targets, completions, step_key(seed, REWARD, step))
    scores = gold(prompts.targets, completions, step_key(seed, REWARD, step))

    # ---- score
    batch = to_batch(prompt, temperature, completions)
    models = models_of(state.params, frozen, state.extras)
    batch = batch._replace(**score_rollout(method, config, models, batch))
    if takes_sampler_logprobs(config):
        batch = batch._replace(old_logprobs=completions.sampler_logprobs)

    # ---- learn
    graded = RewardArrays(rewards, jnp.ones(rewards.shape, bool))
    state, learned = learn(method, config, state, frozen, batch, graded, (seed, step))
    return _Carry(state, tuple(later)), _sampling_metrics(completions, rewards, scores) | learned.metrics


def _evaluate(run: _Run, heldout: Heldout, temperature: Array, state: TrainState) -> jax.Array:
    """Returns the gold rewards of held-out completions, `[C, N, G, ...]`."""
    actor, key = join(state.params, run.frozen)["policy"], step_key(run.seed, EVALUATION, 0)

    def call(heldout: Heldout) -> jax.Array:
        completions = sample_completions(
            run.policy,
            run.task,
            run.config.sampling,
            actor,
            heldout.prompts.tokens,
            heldout.numbers,
            jnp.where(heldout.greedy, 0.0, temperature),
            key,
        )
        return run.gold(heldout.prompts.targets, completions, key)

    return jax.lax.map(call, heldout)


def _sampling_metrics(completions: Completions, rewards: jax.Array, scores: jax.Array) -> dict[str, jax.Array]:
    """Returns metrics of the rollout of an iteration, before its updates."""
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
    return Prompts(prompts.tokens, task.targets(prompts.examples))


def stacked(trees: Sequence[Any]) -> Any:
    """Stacks trees of the same structure into one tree, whose leaves have a new leading axis."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
