"""The iteration of methods that learn from rollouts. Read this file from top to bottom.

An iteration runs three programs on the devices: `sample`, `score` and `learn`. Between them the host supplies prompts,
decodes text and computes rewards. It dispatches work to the devices as early as it can, and reads the metrics of an
iteration while the devices sample for the next iteration.
"""

import atexit
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from threading import Thread
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config import GRPOConfig, LoggingConfig, MeshConfig
from grpo_jax.data.types import Line, Reward, Rewards, Skipped
from grpo_jax.devices import (
    COMPILING,
    Devices,
    abstract,
    devices_of,
    jit_on_devices,
    local_rows,
    num_cores,
    peak_flops,
    pop_bytes_moved,
    sampling_devices,
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
from grpo_jax.rl.guards import make_damage_check, ratio_warning
from grpo_jax.rl.optimizer import init_state
from grpo_jax.rl.scorers import score_rollout, takes_sampler_logprobs
from grpo_jax.rl.source import Sampler, make_sampler
from grpo_jax.rl.types import REWARD_AXES, Batch, Learned, Method, Rollout, TrainState
from grpo_jax.rl.update import models_of
from grpo_jax.tasks.task import Task

# Options that only the host reads: changing them needs no other programs. The sampler determines the devices.
HOST_ONLY_OPTIONS = {"seed", "max_rollouts", "filter_metric", "max_skipped", "devices"}
HOST_ONLY_OPTIONS |= {"curriculum", "curriculum_bound"}
HOST_ONLY_OPTIONS |= options_of(LoggingConfig()).keys() | options_of(MeshConfig()).keys()

LEARNED_AXES: Any = Learned(None, 0, None)  # type: ignore[arg-type]  # 0: split over devices; None: the same on all


class Programs(NamedTuple):
    """The programs of a run, compiled at their first call. Phases that differ only in the reward can share them."""

    method: Method
    sampler: Sampler
    # (trained parameters, extras, frozen parameters, initial policy or None, sampled batch) -> scored batch
    score: Callable[[Params, Mapping[str, Any], Any, Params | None, Batch], Batch]
    # (state, frozen parameters, initial policy or None, scored batch, rewards, uint32 [2] of seed and step) ->
    # (state, `Learned`). The state is donated
    learn: Any  # a jitted function
    # trained parameters -> the first state, which holds copies of them
    initial_state: Callable[[Params], TrainState]
    config: GRPOConfig  # the configuration that the programs are compiled for
    score_program: Any  # the compiled part of `score`; None without scorers
    compiling: list[Thread]  # the thread of `compile_ahead`, once it has started


def make_method_programs(
    method: Method, policy: Policy, task: Task, config: GRPOConfig, *, sampler: Sampler | None = None
) -> Programs:
    """Makes the programs of a method, which are compiled at their first call.

    Args:
      method: The method, such as GRPO or PPO.
      policy: The functions of the model.
      task: Supplies the widths of prompts and the special tokens.
      config: The configuration of the run, already validated.
      sampler: Samples completions on the devices of the run. Default: the policy samples.
    """
    sampler = sampler or make_sampler(policy, task, config.sampling, devices=sampling_devices(config))
    devices = devices_of(config)

    placement: Any = {"devices": devices, "prompt_widths": task.prompt_widths}

    def score(trained, extras, frozen, reference, batch):
        return score_rollout(method, config, models_of(trained, frozen, reference, extras), batch, **placement)

    score_program: Any = jit_on_devices(score, 0, devices=devices) if method.scorers else None

    def score_batch(trained, extras, frozen, reference, batch):
        fields = score_program(trained, extras, frozen, reference, batch) if score_program else {}
        if takes_sampler_logprobs(config):
            fields["old_logprobs"] = batch.sampler_logprobs
        return batch._replace(**fields)

    def learn(state, frozen, reference, batch, rewards, seed_and_step):
        return update.learn(method, config, state, frozen, reference, batch, rewards, tuple(seed_and_step), **placement)

    def initial_state(trained):
        state = init_state(jax.tree.map(jnp.copy, trained), method.optimizer)
        return state._replace(extras=method.initial_extras(trained))

    return Programs(
        method,
        sampler,
        score_batch,
        jit_on_devices(learn, (None, LEARNED_AXES), devices=devices, donate_argnums=(0,)),
        jit_on_devices(initial_state, devices=devices),
        config,
        score_program,
        [],
    )


def compile_ahead(programs: Programs, params: Params, task: Task, reward: Reward | Rewards) -> None:
    """Starts to compile scoring and learning in a thread, which overlaps with sampling the first completions.

    Further calls do nothing, nor does a call on one core. The first call of `iterate` waits for the thread.

    Args:
      programs: The programs of the run.
      params: Initial parameters by role.
      task: Supplies the prompts, which determine shapes.
      reward: One reward function, or several with weights.
    """
    if programs.compiling or num_cores() == 1:  # on one core it would only take memory
        return
    config, devices = programs.config, programs.sampler.devices
    sampled = sources.empty_batch(task, config.sampling)  # here, because threads must not share the prompts

    def compile_for_shapes() -> None:
        trained, frozen = (abstract(part, devices) for part in split(params))
        state = abstract(jax.eval_shape(programs.initial_state, trained), devices)
        batch, reference = abstract(sampled, devices, 0), fixed_reference(config, trained, frozen)
        if programs.score_program:
            programs.score_program.lower(trained, state.extras, frozen, reference, batch).compile()
        batch = abstract(jax.eval_shape(programs.score, trained, state.extras, frozen, reference, batch), devices, 0)
        rewards = empty_rewards(batch.completion_ids.shape, config.loss.advantages_of, reward)
        rewards, seed_and_step = abstract(rewards, devices, REWARD_AXES), abstract(np.zeros(2, np.uint32), devices)
        programs.learn.lower(state, frozen, reference, batch, rewards, seed_and_step).compile()

    def compile_quietly() -> None:
        with suppress(Exception):  # calling the program raises the error again, where it is handled
            compile_for_shapes()

    thread = Thread(target=compile_quietly, name=COMPILING, daemon=True)
    programs.compiling.append(thread)
    thread.start()
    atexit.register(_wait_at_exit, thread)


def _wait_at_exit(thread: Thread) -> None:
    """Waits for a compilation, which would crash the interpreter as it ends. Ctrl-C ends the process at once."""
    try:
        thread.join()
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)


def fixed_reference(config: GRPOConfig, trained: Params, frozen: Any) -> Params | None:
    """Returns the initial parameters of the policy if they are the reference throughout the run, else None."""
    moves = config.reference.ref_sync_steps > 0
    return None if moves or not config.loss.objective.has_reference else join(trained, frozen)["policy"]


class Iteration(NamedTuple):
    """The functions that an iteration of a phase calls."""

    source: Callable[[TrainState, int, Callable[[], None]], tuple[sources.Queue, Rollout]]
    score: Callable[[TrainState, Batch], Batch]
    grade: Callable[[Rollout, int], Rollout]  # decodes and rewards completions
    learn: Callable[[TrainState, Batch, Rollout, int], tuple[TrainState, Learned]]  # the state is donated
    line: Callable[..., Line]  # (step, rollout, scored batch, learned) -> the line to write


def iterate(
    it: Iteration, state: TrainState, step: int, on_dispatch: Callable[[], None] = lambda: None
) -> tuple[TrainState, Callable[[], Line]]:
    """Runs one iteration, without waiting for the devices to finish the update.

    Args:
      it: The functions of the iteration.
      state: The state before the iteration. It is donated.
      step: The number of the iteration, from 0.
      on_dispatch: Called once, when the devices have begun to sample.

    Returns:
      The state after the iteration, and a function that waits for its metrics and returns its line.
    """
    # ---- sample: dispatch the sampling of completions, without waiting for them
    queue, rollout = it.source(state, step, on_dispatch)

    # ---- score: queued after sampling, so that the devices work while the host grades
    batch = it.score(state, rollout.batch)

    # ---- grade: decode and reward completions on the host; dynamic sampling has done this already
    rollout = it.grade(rollout, step)

    # ---- learn: compute advantages, then use each prompt once per epoch, in shuffled minibatches
    state, learned = it.learn(state._replace(queue=()), batch, rollout, step)  # not donating the queued rollouts
    return state._replace(queue=queue), partial(it.line, step, rollout, batch, learned)


def make_iteration(
    phase: str,
    programs: Programs,
    trained: Params,
    frozen: Any,
    task: Task,
    reward: Reward | Rewards,
    config: GRPOConfig,
    *,
    timed: Callable[[str], AbstractContextManager],
) -> Iteration:
    """Builds the functions of a phase's iterations.

    Args:
      phase: The name of the phase, which names the files of skipped updates.
      programs: The programs of the run.
      trained, frozen: Initial parameters by role, on the devices, as `models.params.split` returns them. The policy is
        also the reference, if there is one.
      task: Supplies the prompts and decodes completions.
      reward: One reward function, or several with weights.
      config: The configuration of the run.
      timed: Adds the seconds of a block to the time of the named part of the iteration.
    """
    devices = programs.sampler.devices
    reference = fixed_reference(config, trained, frozen)
    flops, damage = update_flops(trained, _computed(frozen), 1), make_damage_check(config.optimizer.learning_rate)
    grade, report = grading(task, reward, config, devices), reporting(task, reward, config)

    def timed_grade(rollout: Rollout) -> Rollout:
        with timed("rollout"):
            jax.block_until_ready(rollout.batch.completion_ids)
        with timed("reward"):
            return grade(rollout)

    sample = sources.make_draw(programs.sampler, task, config)

    def draw(policy: Params, *args: Any) -> Rollout:
        with timed("rollout"):
            return sample(policy, *args)

    source = sources.make_source(draw, task, config)
    if config.sampling.max_rollouts > 1:
        # A phase may replace the rewards of the task with one function, which has no named components.
        metric = config.sampling.filter_metric if isinstance(reward, Mapping) else ""
        source = sources.with_spread(source, draw, timed_grade, report, config, devices, metric=metric)

    if config.sampling.curriculum:
        source = sources.by_solve_rate(draw, timed_grade, report, task, config.sampling, devices)

    def source_of_state(state: TrainState, step: int, on_dispatch: Callable[[], None]) -> tuple[sources.Queue, Rollout]:
        return source(state.queue, join(state.params, frozen)["policy"], step, on_dispatch)

    def score(state: TrainState, batch: Batch) -> Batch:
        with timed("update"):
            for thread in programs.compiling:
                thread.join()
        return programs.score(state.params, state.extras, frozen, reference, batch)

    def learn(state: TrainState, batch: Batch, rollout: Rollout, step: int) -> tuple[TrainState, Learned]:
        assert rollout.graded is not None
        with timed("update"):
            tokens = batch.completion_ids.shape[-1]
            rewards = reward_arrays(rollout.graded, config.loss.advantages_of, tokens, reward)
            rewards = to_devices(rewards, devices, axes=REWARD_AXES)
            seed_and_step = to_devices(np.array([config.seed, step], np.uint32), devices, axes=None)
            return programs.learn(state, frozen, reference, batch, rewards, seed_and_step)

    return Iteration(
        source=source_of_state,
        score=score,
        grade=lambda rollout, step: rollout if rollout.graded else report(timed_grade(rollout), step),
        learn=learn,
        line=partial(read_line, phase, config, task, devices, flops, damage, timed),
    )


def read_line(
    phase: str,
    config: GRPOConfig,
    task: Task,
    devices: Devices,
    flops: float,
    damage: Callable[[Mapping[str, Any]], dict[str, str]],
    timed: Callable[[str], AbstractContextManager],
    step: int,
    rollout: Rollout,
    batch: Batch,
    learned: Learned,
) -> Line:
    """Waits for the metrics of an iteration, and returns its line of the log.

    Args:
      phase: The name of the phase, which names the files of skipped updates.
      config: The configuration of the run.
      task: Decodes completions.
      devices: The devices that share the rows.
      flops: Floating-point operations of an update per token.
      damage: Warns about updates that destroy the policy; see `make_damage_check`.
      timed: Adds the seconds of a block to the time of the named part of the iteration.
      step: The number of the iteration, from 0.
      rollout: The graded rollout, with its metrics.
      batch: The scored batch.
      learned: The metrics and advantages of the update.
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
    tokens += int(graded.episodes["environment_tokens"].sum()) if graded.episodes else 0  # computed too
    times = {
        "tokens": {"rollout": rollout.metrics["tokens"], "update": config.optimizer.epochs * tokens},
        "update_flops": flops * config.optimizer.epochs * tokens,
        "peak_flops": peak_flops(size(devices)),
        "numbers": {f"{way}_bytes": count for way, count in pop_bytes_moved().items()},
    }

    def skipped_arrays() -> dict[str, Any]:
        # Leave out the outputs of a teacher: they may be large, and can be computed again.
        arrays = {name: x for name, x in batch._asdict().items() if isinstance(x, jax.Array)}
        return to_numpy(arrays | {"advantages": learned.advantages, "prompts": learned.order[first_skipped]})

    name, most = f"{phase}_{step:06d}_{first_skipped + 1}", min(config.optimizer.max_skipped, config.num_updates)
    reward, warnings = rollout.metrics["reward"], dict(rollout.warnings)
    words = ["no reward" if reward is None else f"reward {reward:.3f}"]
    words += [f"KL {metrics['kl']:.3g}"] if "kl" in metrics else []
    words += [f"length {rollout.metrics['length_mean']:.1f}"]
    if damaged := damage(rollout.metrics | metrics):
        warnings.pop("spread", None)  # equal rewards are then not the fault of the prompts
    return Line(
        metrics=rollout.metrics | metrics,
        words=", ".join(words),
        warnings=warnings | damaged | ({} if config.sampling.staleness else ratio_warning(metrics)),
        groups=groups,
        times=times,
        skipped=Skipped(name, metrics["skipped"], most, skipped_arrays) if metrics["skipped"] else None,
    )


def _computed(frozen: Any) -> Any:
    """Returns the frozen parameters that an update uses, without models that only score."""
    return {role: part for role, part in frozen.items() if role in TRAINED_ROLES}


def check_programs(programs: Programs, config: GRPOConfig) -> None:
    """Raises if programs were compiled for other options than those of this run.

    Raises:
      UsageError: An option differs. The message names it.
    """
    free = HOST_ONLY_OPTIONS if config.optimizer.decay != "none" else HOST_ONLY_OPTIONS | {"steps"}
    compiled_for = options_of(programs.config)
    differing = [name for name, value in options_of(config).items() if name not in free and compiled_for[name] != value]
    if differing:
        raise UsageError(
            f"the programs were made for another {', '.join(differing)}: make them of the configuration of this run"
        )
