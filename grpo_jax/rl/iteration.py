"""The iteration of methods that learn from rollouts. Read this file from top to bottom.

An iteration runs three programs on the devices: `sample`, `score` and `learn`. Between them the host supplies prompts,
decodes text and computes rewards. It dispatches work to the devices as early as it can, and reads the metrics of an
iteration while the devices sample for the next iteration.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.config import GRPOConfig
from grpo_jax.data.types import Skipped, StepLog
from grpo_jax.devices import (
    devices_of,
    local_rows,
    peak_flops,
    pop_bytes_moved,
    size,
    to_devices,
    to_numpy,
    update_flops,
)
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.params.tree import TRAINED_ROLES, join
from grpo_jax.models.rows.geometry import PromptTokens
from grpo_jax.rewards.reward import Rewards
from grpo_jax.rl.beside import NO_JOURNAL, Journal, sampled_beside
from grpo_jax.rl.grade import make_grading, read_completions, readable, reward_arrays
from grpo_jax.rl.guards import make_damage_check, ratio_warning, support_warning
from grpo_jax.rl.programs import Programs
from grpo_jax.rl.source import Source, by_solve_rate, make_source, make_start, with_spread
from grpo_jax.rl.types import REWARD_AXES, Learned, Rollout, Timed
from grpo_jax.step import Batch, TrainState
from grpo_jax.tasks.task import Task

OnRollout = Callable[[int, Rollout], None]  # (number of the step, from 1, graded rollout)


class Iteration(NamedTuple):
    """The functions that an iteration of a phase calls."""

    queue: Source  # the source, of which `source` samples
    # (state, step, on_dispatch) -> (state of the source, rollout)
    source: Callable[[TrainState, int, Callable[[], None]], tuple[Any, Rollout]]
    score: Callable[[TrainState, Batch], Batch]
    # (rollout, step) -> rollout with rewards, metrics and warnings: decodes and rewards completions
    grade: Callable[[Rollout, int], Rollout]
    learn: Callable[[TrainState, Batch, Rollout, int], tuple[TrainState, Learned]]  # the state is donated
    line: Callable[[int, Rollout, Batch, Learned], StepLog]  # waits for the metrics of the update
    is_beside: bool = False  # other threads sample, and the devices may still learn while the host grades
    on_rollout: OnRollout = lambda step, rollout: None  # called before the update


def iterate(
    it: Iteration, state: TrainState, step: int, on_dispatch: Callable[[], None] = lambda: None
) -> tuple[TrainState, Callable[[], StepLog]]:
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
    source, rollout = it.source(state, step, (lambda: None) if it.is_beside else on_dispatch)

    # ---- score: queued after sampling, so that the devices work while the host grades
    batch = it.score(state, rollout.batch)

    # ---- grade: decode and reward completions on the host; dynamic sampling has done this already
    if rollout.graded is None:
        rollout = it.grade(rollout, step)
    if it.is_beside:
        on_dispatch()
    it.on_rollout(step + 1, rollout)

    # ---- learn: compute advantages, then use each prompt once per epoch, in shuffled minibatches
    state, learned = it.learn(state, batch, rollout, step)
    return state._replace(source=source), partial(it.line, step, rollout, batch, learned)


def make_iteration(
    phase: str,
    programs: Programs,
    trained: Params,
    frozen: Any,
    task: Task,
    rewards: Rewards,
    config: GRPOConfig,
    *,
    timed: Timed,
    journal: Journal = NO_JOURNAL,
) -> Iteration:
    """Builds the functions of a phase's iterations.

    Args:
      phase: The name of the phase, which names the files of skipped updates.
      programs: The programs of the run.
      trained, frozen: Initial parameters by role, on the devices, as `models.params.tree.split` returns them.
      task: Supplies the prompts and decodes completions.
      rewards: The rewards of the run.
      config: Chooses the source of rollouts and how they are graded; supplies the seed, the devices and what is logged.
      timed: Adds the seconds of a block to the time of the named part of the iteration.
      journal: Keeps completions, so that a run that was killed does not sample them again. Default: nothing is kept.
    """
    devices = devices_of(config)
    grade, report = make_grading(task, rewards, config, compares="critic" not in trained, timed=timed)
    sampler, is_beside = programs.sampler, bool(config.sampling.staleness and programs.sampler.at_once)
    sampler = sampler.with_journal(journal) if sampler.with_journal else sampler
    start = make_start(sampler, task, config)

    def draw(policy: Params, *args: Any) -> Rollout:
        with timed("rollout"):
            return start(sampler.take(policy), *args)()

    source = make_source(draw, task, config)
    if is_beside:
        source = sampled_beside(start, sampler, task, config.sampling, timed=timed, journal=journal)
    if config.sampling.max_rollouts > 1:
        # A phase may replace the rewards of the task with others, which have other names.
        metric = config.sampling.filter_metric if config.sampling.filter_metric in rewards.components else ""
        source = with_spread(source, draw, grade, report, config, devices, metric=metric)

    if config.sampling.curriculum:
        source = by_solve_rate(draw, grade, report, task, config.sampling, devices)

    def sample_rollout(state: TrainState, step: int, on_dispatch: Callable[[], None]) -> tuple[Any, Rollout]:
        if programs.sampler.program is None and not is_beside:
            on_dispatch()  # before it waits for the completions, which are no part of the previous step
            return source.sample(state.source, join(state.params, frozen)["policy"], step, lambda: None)
        return source.sample(state.source, join(state.params, frozen)["policy"], step, on_dispatch)

    def score(state: TrainState, batch: Batch) -> Batch:
        with timed("update"):
            for thread in programs.compiling:
                thread.join()
        return programs.score(state.params, state.extras, frozen, batch)

    def learn(state: TrainState, batch: Batch, rollout: Rollout, step: int) -> tuple[TrainState, Learned]:
        assert rollout.graded is not None
        with timed("update"):
            num_tokens = batch.completion_ids.shape[-1]
            arrays = reward_arrays(rollout.graded, config.loss.advantages_of, num_tokens, rewards.weights)
            arrays = to_devices(arrays, devices, axes=REWARD_AXES)
            seed_and_step = to_devices(np.array([config.seed, step], np.uint32), devices, axes=None)
            # The program donates the state, but not the rollouts that the source keeps.
            learned: tuple[TrainState, Learned] = programs.learn(
                state._replace(source=()), frozen, batch, arrays, seed_and_step
            )
            return learned

    # Models that only score take no part in an update.
    updated = {role: part for role, part in frozen.items() if role in TRAINED_ROLES}
    flops = update_flops(trained, updated, 1, programs.policy.expert_share)
    damage = make_damage_check(config.optimizer.learning_rate)

    def line(step: int, rollout: Rollout, batch: Batch, learned: Learned) -> StepLog:
        """Waits for the metrics of an iteration, and returns its line of the log."""
        graded = rollout.graded
        assert graded is not None
        with timed("update"):
            metrics = {name: value.item() for name, value in to_numpy(learned.metrics).items()}
        first_skipped = metrics.pop("skipped_update")
        every, groups = config.logging.rollouts_every, []
        if every and (step % every == 0 or step + 1 == config.steps):
            logprobs, advantages = local_rows((batch.sampler_logprobs, learned.advantages))
            groups = readable(rollout, read_completions(rollout), logprobs, advantages, task, devices)
        tokens = int(rollout.prompts.tokens.mask.sum() + graded.num_tokens.sum())
        times = {
            "tokens": {"rollout": rollout.metrics["tokens"], "update": config.optimizer.epochs * tokens},
            "update_flops": flops * config.optimizer.epochs * tokens,
            "peak_flops": peak_flops(size(devices)),
            "numbers": {f"{way}_bytes": count for way, count in pop_bytes_moved().items()} | sampler.pop_times(),
        }

        def skipped_arrays() -> dict[str, Any]:
            # Leave out the outputs of a teacher: they may be large, and can be computed again.
            arrays = {name: x for name, x in batch._asdict().items() if isinstance(x, jax.Array | PromptTokens)}
            arrays |= {"advantages": learned.advantages, "prompts": learned.order[first_skipped]}
            on_host: dict[str, Any] = to_numpy(arrays)
            return on_host

        name, most = f"{phase}_{step:06d}_{first_skipped + 1}", min(config.optimizer.max_skipped, config.num_updates)
        reward, warnings = rollout.metrics["reward"], dict(rollout.warnings)
        if damaged := damage(rollout.metrics | metrics):
            warnings.pop("spread", None)  # equal rewards are then not the fault of the prompts
        words = ["no reward" if reward is None else f"reward {reward:.3f}"]
        words += [f"KL {metrics['kl']:.3g}"] if "kl" in metrics else []
        words += [f"length {rollout.metrics['length_mean']:.1f}"]
        return StepLog(
            metrics=rollout.metrics | metrics,
            words=", ".join(words),
            warnings=warnings
            | damaged
            | support_warning(metrics)
            | (ratio_warning(metrics) if rollout.is_fresh else {}),
            groups=groups,
            times=times,
            skipped=Skipped(name, metrics["skipped"], most, skipped_arrays) if metrics["skipped"] else None,
        )

    return Iteration(
        queue=source,
        source=sample_rollout,
        score=score,
        grade=lambda rollout, step: report(grade(rollout), step),
        learn=learn,
        line=line,
        is_beside=is_beside,
    )
