"""The iteration of methods that learn from rollouts, read from top to bottom.

An iteration is three programs: `sample`, `score`, `learn`. The host is needed between the first and the last, for
prompts, text and rewards. It hands work to the devices as early as it can, and it reads an iteration's numbers while
the devices sample the next one.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from threading import Thread
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config import GRPOConfig, LoggingConfig, MeshConfig
from grpo_jax.data.types import Line, Reward, Rewards, Skipped
from grpo_jax.devices import (
    Devices,
    abstract,
    compiled,
    devices_of,
    local_rows,
    peak_flops,
    place,
    pop_bytes_moved,
    size,
    to_devices,
    to_numpy,
    update_flops,
)
from grpo_jax.errors import UsageError
from grpo_jax.models.params import TRAINED_ROLES, join, split
from grpo_jax.models.policy import Policy
from grpo_jax.models.transformer import Params
from grpo_jax.options import options_of
from grpo_jax.rl import source as sources, update
from grpo_jax.rl.grade import empty_rewards, grading, read_completions, readable, reporting, reward_arrays
from grpo_jax.rl.guards import ratio_warning
from grpo_jax.rl.optimizer import init_state
from grpo_jax.rl.scorers import score_rollout, takes_sampler_logprobs
from grpo_jax.rl.source import Sampler, make_sampler
from grpo_jax.rl.types import REWARD_AXES, Array, Batch, Learned, Method, RewardArrays, Rollout, TrainState
from grpo_jax.rl.update import models_of
from grpo_jax.tasks.task import Task

# Options that only the host reads, so that programs do not depend on them. Devices are those of the sampler.
HOST_ONLY_OPTIONS = {"seed", "max_rollouts", "filter_metric", "max_skipped", "devices"}
HOST_ONLY_OPTIONS |= options_of(LoggingConfig()).keys() | options_of(MeshConfig()).keys()

LEARNED_AXES: Any = Learned(None, 0, None)  # type: ignore[arg-type]  # 0: each device has a part; None: the same on all


class Programs(NamedTuple):
    """The programs of a method and a run, compiled at their first call. Phases that differ in the reward share them."""

    method: Method
    sampler: Sampler
    # (trained parameters, extras, frozen ones, the start's policy or None, batch as sampled) -> scored batch
    score: Callable[[Params, Mapping[str, Any], Any, Params | None, Batch], Batch]
    # (state, frozen parameters, the start's policy or None, scored batch, rewards, uint32 [2] of seed and step) ->
    # state, what to log. The state is donated
    learn: Callable[[TrainState, Any, Params | None, Batch, RewardArrays, Array], tuple[TrainState, Learned]]
    # trained parameters -> the first state, a copy
    initial_state: Callable[[Params], TrainState]
    config: GRPOConfig  # that they compute
    # (parameters by role, rewards): starts to compile `score` and `learn` in a thread, once
    compile_ahead: Callable[[Params, Reward | Rewards], None]
    wait: Callable[[], None]  # until that thread has ended


def compile_programs(
    method: Method, policy: Policy, task: Task, config: GRPOConfig, *, sampler: Sampler | None = None
) -> Programs:
    """Makes the programs of a method, which are compiled at their first call.

    Args:
      method: of the run.
      policy: the model's functions.
      task: its tokens.
      config: the run, checked.
      sampler: an engine's, on the run's devices; None: the policy's own.
    """
    sampler = sampler or make_sampler(policy, task, config.sampling, devices=devices_of(config))
    devices = sampler.devices

    where: Any = {"devices": devices, "prompt_widths": task.prompt_widths}

    def score(trained, extras, frozen, start, batch):
        return score_rollout(method, config, models_of(trained, frozen, start, extras), batch, **where)

    score_program: Any = compiled(score, 0, devices=devices) if method.scorers else None

    def score_batch(trained, extras, frozen, start, batch):
        fields = score_program(trained, extras, frozen, start, batch) if score_program else {}
        if takes_sampler_logprobs(config):
            fields["old_logprobs"] = batch.sampler_logprobs
        return batch._replace(**fields)

    def learn(state, frozen, start, batch, rewards, clock):
        return update.learn(method, config, state, frozen, start, batch, rewards, (clock[0], clock[1]), **where)

    def initial_state(trained):
        state = init_state(jax.tree.map(jnp.copy, trained), method.optimizer)
        return state._replace(extras=method.extras(trained))

    learn_program: Any = compiled(learn, (None, LEARNED_AXES), devices=devices, donate_argnums=(0,))
    initial_program = compiled(initial_state, devices=devices)
    threads: list[Thread] = []

    def compile_both(params: Params, batch: Batch, reward: Reward | Rewards) -> None:
        """Compiles `score` and `learn` for the shapes of a run; calls with such arrays then compile nothing."""
        trained, frozen = (abstract(part, devices) for part in split(params))
        state = abstract(jax.eval_shape(initial_program, trained), devices)
        batch = abstract(batch, devices, 0)
        inputs = trained, state.extras, frozen, start_of(config, trained, frozen)
        if score_program:
            score_program.lower(*inputs, batch).compile()
        batch = abstract(jax.eval_shape(score_batch, *inputs, batch), devices, 0)
        rewards = empty_rewards(batch.completion_ids.shape, config.loss.advantages_of, reward)
        clock = abstract(np.zeros(2, np.uint32), devices)
        arguments = state, frozen, inputs[-1], batch, abstract(rewards, devices, REWARD_AXES), clock
        learn_program.lower(*arguments).compile()

    def compile_ahead(params: Params, reward: Reward | Rewards) -> None:
        if not threads:
            batch = sources.empty_rollout(task, config.sampling)[0]
            threads.append(Thread(target=compile_both, args=(params, batch, reward)))
            threads[0].start()

    return Programs(
        method,
        sampler,
        score_batch,
        learn_program,
        initial_program,
        config,
        compile_ahead,
        lambda: threads[0].join() if threads else None,
    )


def start_of(config: GRPOConfig, trained: Params, frozen: Any) -> Params | None:
    """Returns the policy's parameters at the start, if they are the reference of the whole run."""
    moves = config.reference.ref_sync_steps > 0
    return None if moves or not config.loss.objective.has_reference else join(trained, frozen)["policy"]


class Iteration(NamedTuple):
    """The functions of a phase's iterations, and the parameters that stay."""

    source: sources.Source
    grade: Callable[[Rollout, int], Rollout]  # texts to numbers
    programs: Programs
    frozen: Any  # parameters that are not trained
    start: Params | None  # the policy's parameters at the start, if there is a reference that stays
    put_rewards: Callable[[Rollout], RewardArrays]
    clock: Callable[[int], Array]  # uint32 [2] of seed and step, on the devices
    line: Callable[..., Line]  # (step, rollout, scored batch, learned) -> what to write
    timed: Callable[[str], AbstractContextManager]  # adds the seconds of a block to a part of the iteration


def iterate(
    it: Iteration, state: TrainState, step: int, meanwhile: Callable[[], None] = lambda: None
) -> tuple[TrainState, Callable[[], Line]]:
    """Hands one iteration to the devices.

    Args:
      it: the iteration.
      state: before it; donated.
      step: its number, from 0.
      meanwhile: called once, when the devices have begun to sample.

    Returns:
      The state after it, and a function that waits for its numbers.
    """
    # ---- sample: prompts to completions, started and not waited for
    queue, rollout = it.source(state.queue, join(state.params, it.frozen)["policy"], step, meanwhile)

    # ---- score: queued behind it; the devices work while the host grades
    it.programs.wait()
    batch = it.programs.score(state.params, state.extras, it.frozen, it.start, rollout.batch)

    # ---- grade: texts to numbers, on the host; with dynamic sampling the source has graded already
    rollout = it.grade(rollout, step)

    # ---- learn: advantages, then every prompt once an epoch, in shuffled minibatches
    with it.timed("update"):
        # `learn` donates its state, and the queue's rollouts are read later.
        before, rewards = state._replace(queue=()), it.put_rewards(rollout)
        state, learned = it.programs.learn(before, it.frozen, it.start, batch, rewards, it.clock(step))
    return state._replace(queue=queue), partial(it.line, step, rollout, batch, learned)


def make_iteration(
    phase: str,
    programs: Programs,
    params: Params,
    task: Task,
    reward: Reward | Rewards,
    config: GRPOConfig,
    *,
    timed: Callable[[str], AbstractContextManager],
) -> Iteration:
    """Puts together the iteration of a phase.

    Args:
      phase: names what is skipped.
      programs: of the method.
      params: models by role, where training starts. The policy's are also the reference, if there is one.
      task: prompts and text.
      reward: one function, or several with weights.
      config: the run.
      timed: adds the seconds of a block to a part of the iteration.
    """
    devices = programs.sampler.devices
    trained, frozen = split(place(params, devices))
    grade, report = grading(task, reward, config, devices), reporting(task, reward, config)

    def timed_grade(rollout: Rollout) -> Rollout:
        with timed("rollout"):
            jax.block_until_ready(rollout.batch.completion_ids)
        with timed("reward"):
            return grade(rollout)

    sample = sources.sampling(programs.sampler, task, config)

    def draw(policy: Params, index: int) -> Rollout:
        with timed("rollout"):
            return sample(policy, index)

    source = sources.ahead(draw, task, config, devices) if config.sampling.staleness else sources.fresh(draw)
    if config.sampling.max_rollouts > 1:
        # A phase may have one reward that is a single number in place of the task's.
        metric = config.sampling.filter_metric if isinstance(reward, Mapping) else ""
        source = sources.until_spread(source, draw, timed_grade, report, config, devices, metric=metric)

    def put_rewards(rollout: Rollout) -> RewardArrays:
        assert rollout.graded is not None
        tokens = rollout.batch.completion_ids.shape[-1]
        return to_devices(
            reward_arrays(rollout.graded, config.loss.advantages_of, tokens, reward), devices, axes=REWARD_AXES
        )

    return Iteration(
        source=source,
        grade=lambda rollout, step: rollout if rollout.graded else report(timed_grade(rollout), step),
        programs=programs,
        frozen=frozen,
        start=start_of(config, trained, frozen),
        put_rewards=put_rewards,
        clock=lambda step: to_devices(np.array([config.seed, step], np.uint32), devices, axes=None),
        line=partial(read_line, phase, config, task, devices, update_flops(trained, _computed(frozen), 1), timed),
        timed=timed,
    )


def read_line(
    phase: str,
    config: GRPOConfig,
    task: Task,
    devices: Devices,
    flops: float,
    timed: Callable[[str], AbstractContextManager],
    step: int,
    rollout: Rollout,
    batch: Batch,
    learned: Learned,
) -> Line:
    """Waits for the numbers of an iteration, and returns what is to be written of it.

    Args:
      phase: names what is skipped.
      config: the run.
      task: for texts.
      devices: where arrays lie.
      flops: operations of an update, a token.
      timed: adds the seconds of a block to a part of the iteration.
      step: from 0.
      rollout: graded, with its metrics.
      batch: scored.
      learned: of the update.
    """
    graded = rollout.graded
    assert graded is not None
    with timed("update"):
        metrics = {name: value.item() for name, value in to_numpy(learned.metrics).items()}
    first_skipped = metrics.pop("skipped_update")
    every, groups = config.logging.rollouts_every, []
    if every and (step % every == 0 or step + 1 == config.steps):
        logprobs, advantages = local_rows((batch.sampler_logprobs, learned.advantages))
        groups = readable(rollout, read_completions(rollout), logprobs, advantages, task, devices)
    tokens = int(rollout.prompts.mask.sum() + graded.lengths.sum())
    tokens += int(graded.episodes["environment_tokens"].sum()) if graded.episodes else 0  # they are computed too
    times = {
        "tokens": {"rollout": rollout.metrics["tokens"], "update": config.optimizer.epochs * tokens},
        "update_flops": flops * config.optimizer.epochs * tokens,
        "peak_flops": peak_flops(size(devices)),
        "numbers": {f"{way}_bytes": count for way, count in pop_bytes_moved().items()},
    }

    def skipped_arrays() -> dict[str, Any]:
        # Only plain arrays: outputs of another model, which may be large, can be computed again.
        arrays = {name: x for name, x in batch._asdict().items() if isinstance(x, jax.Array)}
        return to_numpy(arrays | {"advantages": learned.advantages, "prompts": learned.order[first_skipped]})

    name, most = f"{phase}_{step:06d}_{first_skipped + 1}", config.optimizer.max_skipped
    reward = rollout.metrics["reward"]
    return Line(
        metrics=rollout.metrics | metrics,
        words="no reward" if reward is None else f"reward {reward:.3f}",
        warnings=rollout.warnings | ({} if config.sampling.staleness else ratio_warning(metrics)),
        groups=groups,
        times=times,
        skipped=Skipped(name, metrics["skipped"], most, skipped_arrays) if metrics["skipped"] else None,
    )


def _computed(frozen: Any) -> Any:
    """Returns the frozen parameters that an update computes with: not those of models that only score."""
    return {role: part for role, part in frozen.items() if role in TRAINED_ROLES}


def check_programs(programs: Programs, config: GRPOConfig) -> None:
    """Refuses programs that compute another run than the one that is asked for.

    Raises:
      UsageError: one sentence that names the options.
    """
    free = HOST_ONLY_OPTIONS if config.optimizer.decay != "none" else HOST_ONLY_OPTIONS | {"steps"}
    compiled_for = options_of(programs.config)
    differing = [name for name, value in options_of(config).items() if name not in free and compiled_for[name] != value]
    if differing:
        raise UsageError(
            f"the programs were made for another {', '.join(differing)}: make them of the configuration of this run"
        )
