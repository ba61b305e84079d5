"""Trains with rewards, optionally with held-out evaluations or a control run, or on a data set.

`train` takes the iteration of `rl`, and `fit` an objective of `offline`. The runner of `runs` takes their steps.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from grpo_jax.config import GRPOConfig, LoggingConfig
from grpo_jax.devices import devices_of, place, pop_bytes_moved, to_devices
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.params.tree import join, split
from grpo_jax.rewards.reward import RewardLike, to_rewards
from grpo_jax.rl.evaluate import Evaluation, Samples, evaluate, num_heldout_calls, prompt_means, sample_heldout, summary
from grpo_jax.rl.grade import gather_failures
from grpo_jax.rl.iteration import OnRollout, iterate, make_iteration
from grpo_jax.rl.programs import Programs, check_programs, compile_ahead
from grpo_jax.rl.source import Sampler
from grpo_jax.rl.update import with_fixed_reference
from grpo_jax.runs.checkpoint import params_sha256, saved_steps
from grpo_jax.runs.folder import WAIT_SHARES, RunFolder
from grpo_jax.runs.progress import watched
from grpo_jax.runs.runner import OnLine, Pending, run_steps
from grpo_jax.statistics import paired_difference
from grpo_jax.step import TrainState
from grpo_jax.tasks.task import Task, inputs_of, random_reward

if TYPE_CHECKING:
    from grpo_jax.offline.phase import FitObjective, SupervisedConfig

CONTROL = "control"
PHASES = ("grpo", CONTROL)
STATE_AXES: Any = TrainState(None, None, None, None, 0)  # type: ignore[arg-type]  # 0: spread over devices


def train(
    params: Params,
    task: Task,
    config: GRPOConfig,
    run: RunFolder,
    programs: Programs,
    *,
    phase: str,
    reward: RewardLike | None = None,
    start: Mapping[str, float] | None = None,
    evaluate: Callable[[Params, int], dict[str, float]] | None = None,
    until: int | None = None,
    on_rollout: OnRollout = lambda step, rollout: None,
    on_line: OnLine = lambda step, line: None,
) -> TrainState:
    """Trains with the programs of a method. Resumes from the newest checkpoint of this phase in the run.

    Args:
      params: Initial parameters by role: {"policy": ...}, and optionally "critic" and "teacher". The policy is also the
        reference, if there is one. Only the adapters of `lora.Adapted` parameters are trained.
      task: Supplies the prompts and decodes completions.
      config: The options that the programs were made for. Those that act only on the host may differ.
      run: The folder for lines and checkpoints.
      programs: The programs of the run. Phases that differ only in the reward can share them.
      phase: The name of the phase, which names lines and checkpoints.
      reward: Replaces the reward of the task. Unless the two have a function in common, rewards of turns from the
        environment are ignored too.
      start: Metrics of step 0, if they are known, as in `run_steps`.
      evaluate: (parameters of the policy, steps taken) -> metrics to log, called at step 0, every `eval_every` steps,
        and at the end.
      until: The step at which to stop. A later call continues from there, even with another reward. Default: the last
        step.
      on_rollout: (step, rollout) -> None, called before each update with the `rl.types.Rollout` that it learns from:
        prompts, batch, and rewards in `graded`. Steps count from 1, as in metrics.jsonl.
      on_line: (step, line) -> None, called with each line of metrics.jsonl, a dict, once it is written. A step's line
        follows while the devices work on the next step. With several hosts, every host calls both functions with the
        same step. An exception in either ends the run.

    Returns:
      The final state. The models are `join(state.params, split(params)[1])`, both of `models.params.tree`.

    Raises:
      UsageError: The configuration does not work.
      FloatingPointError: Gradients were not finite too many times in a row.
    """
    check_programs(programs, config)
    pop_bytes_moved()  # the first line counts only what this phase moves
    for note in (*task.notes, *programs.policy.notes):
        run.warn_once(note, note)
    run.keep_inputs(phase, inputs_of(task) | config.sources)
    devices, logging = programs.sampler.devices, config.logging
    trained, frozen = split(with_fixed_reference(place(params, devices), config))
    rewards, journal = to_rewards(reward or task.reward), run.open_journal()
    it = make_iteration(phase, programs, trained, frozen, task, rewards, config, timed=run.timed, journal=journal)
    it = it._replace(on_rollout=on_rollout)

    def initial_state() -> TrainState:
        return programs.initial_state(trained)._replace(source=it.queue.initial_state())

    def with_source(change: Callable[[Any], Any]) -> Callable[[TrainState], TrainState]:
        return lambda state: state._replace(source=change(state.source))

    def take_step(state: TrainState, step: int, on_dispatch: Callable[[], None]) -> tuple[TrainState, Pending]:
        compile_ahead(programs, params, task, len(rewards.components))  # while the first step samples
        return iterate(it, state, step, on_dispatch)

    try:
        state = run_steps(
            run,
            phase,
            config.steps,
            logging,
            initial_state=initial_state,
            step=take_step,
            devices=devices,
            axes=STATE_AXES,
            settle=with_source(it.queue.settle),
            suspend=with_source(it.queue.suspend),
            start=start,
            evaluate=(lambda state, step: evaluate(join(state.params, frozen)["policy"], step)) if evaluate else None,
            until=until,
            on_line=on_line,
        )
    finally:
        it.queue.close()
    journal.clear()
    if words := balance_of(programs.sampler, run, phase, config.sampling.staleness):
        run.say(f"{phase}: {words}")
    return state


def balance_of(sampler: Sampler, run: RunFolder, phase: str, staleness: int) -> str:
    """Returns a sentence about who waited for whom in a phase, the sampler or the trainer; "" if they take turns."""
    lines = [line for line in run.lines("times.jsonl") if line["phase"] == phase][1 + staleness :]
    shares = [[line[name] for name in WAIT_SHARES] for line in lines if WAIT_SHARES[0] in line]
    return sampler.balance(*np.mean(shares, axis=0)) if shares else ""


# ---- on a data set


def fit(
    objective: "FitObjective",
    params: Any,
    batches: Callable[[int], Any],
    config: "SupervisedConfig",
    run: RunFolder,
    *,
    phase: str,
    start: Mapping[str, float] | None = None,
    evaluate: Callable[[Any, int], dict[str, float]] | None = None,
) -> TrainState:
    """Minimises an objective over batches, continuing from the newest checkpoint of this phase in the run.

    Args:
      objective: The objective, such as `sft_objective`, `divergence_objective`, `preference_objective`,
        `kto_objective` or `reward_model_objective`.
      params: Initial parameters for the objective. `models.params.tree.split` decides which of them are trained.
      batches: A pure function from a step to its batch. The leading axis is a multiple of microbatches x the
        `devices.num_shards`. Every host makes the whole batch.
      config: The configuration of the phase.
      run: The folder for lines and checkpoints.
      phase: The name of the phase, which names lines and checkpoints.
      start: Metrics of step 0, if they are known, as in `run_steps`.
      evaluate: (all parameters, steps taken) -> metrics to log, called at step 0 and every `config.eval_every` steps.

    Returns:
      The final state. The model is `join(state.params, split(params)[1])`, both of `models.params.tree`.

    Raises:
      UsageError: The configuration does not work, or a batch cannot be divided among pieces and devices.
      FloatingPointError: Gradients were not finite too many times in a row.
    """
    from grpo_jax.offline.phase import check_rows, make_fit_programs, read_metrics  # runs with rewards load without it

    devices, (first_state, train_step) = devices_of(config), make_fit_programs(objective, config)
    trained, frozen = (place(part, devices) for part in split(params))

    def step(state: TrainState, number: int, on_dispatch: Callable[[], None]) -> tuple[TrainState, Pending]:
        batch = batches(number)
        check_rows(config, rows=len(jax.tree.leaves(batch)[0]), name="the number of rows of a batch")
        state, metrics = train_step(state, to_devices(batch, devices), frozen)
        on_dispatch()
        return state, partial(read_metrics, phase, config, number + 1, metrics, batch)

    return run_steps(
        run,
        phase,
        config.steps,
        LoggingConfig(config.eval_every, config.checkpoint_every, config.keep_best, config.patience),
        evaluates_end=False,
        score=_negative_loss,
        initial_state=lambda: first_state(trained),
        step=step,
        devices=devices,
        start=start,
        evaluate=(lambda state, step: evaluate(join(state.params, frozen), step)) if evaluate else None,
    )


def _negative_loss(numbers: Mapping[str, float]) -> float:
    """Returns the negative of the first loss or NLL of an evaluation, or else its first number."""
    losses = (-value for name, value in numbers.items() if name.endswith(("loss", "nll")))
    return next(chain(losses, numbers.values()), math.nan)


# ---- with rewards, and evaluations on held-out prompts


class HeldoutResult(NamedTuple):
    """The evaluation of a policy on the held-out prompts."""

    evaluation: Evaluation
    calls: list[Samples]  # the evaluated completions


def evaluate_heldout(
    programs: Programs, params: Params, task: Task, config: GRPOConfig, run: RunFolder
) -> HeldoutResult:
    """Samples completions of the held-out prompts, and scores them with the task's reward."""
    sampled = sample_heldout(programs.sampler, params, task, config)
    calls = list(watched(sampled, run.console, "evaluation", num_heldout_calls(task, config)))
    evaluation = evaluate(calls, task, block=config.sampling.num_prompts * config.sampling.group_size)
    run.warn(gather_failures(task.rewards)[1])
    return HeldoutResult(evaluation, calls)


def train_with_evaluation(
    params: Any,
    task: Task,
    config: GRPOConfig,
    run: RunFolder,
    programs: Programs,
    *,
    phase: str,
    reward: RewardLike | None = None,
    start: HeldoutResult | Mapping[str, float] | None = None,
    **hooks: Any,
) -> tuple[TrainState, HeldoutResult]:
    """Trains, and logs held-out evaluations. No parameters are evaluated twice.

    Args:
      params: Initial parameters by role.
      task: Supplies the prompts, and the reward of held-out completions.
      config: As in `train`. It also supplies the seed and the number of held-out samples.
      run: The folder for lines and checkpoints.
      programs: The programs of the run.
      phase: The name of the phase, which names lines and checkpoints.
      reward: Replaces the reward of the task in training.
      start: The evaluation of the initial policy, or its `summary`, if it is known.
      **hooks: `on_rollout` and `on_line` of `train`.

    Returns:
      The final state, and the evaluation of its policy.
    """
    latest: dict[int, HeldoutResult] = {}  # step -> evaluation

    def named(numbers: Mapping[str, float]) -> dict[str, float]:
        return {f"heldout_{name}": value for name, value in numbers.items()}

    def heldout(params: Params, step: int) -> dict[str, float]:
        latest.clear()
        latest[step] = evaluate_heldout(programs, params, task, config, run)
        return named(summary(latest[step].evaluation))

    first = named(summary(start.evaluation) if isinstance(start, HeldoutResult) else start or {})
    state = train(
        params, task, config, run, programs, phase=phase, reward=reward, start=first, evaluate=heldout, **hooks
    )
    final = join(state.params, split(params)[1])["policy"]
    return state, next(iter(latest.values()), None) or evaluate_heldout(programs, final, task, config, run)


def train_with_control(
    params: Params,
    task: Task,
    config: GRPOConfig,
    run: RunFolder,
    programs: Programs,
    examine: Callable[[Evaluation, list[Samples]], dict[str, float]] = lambda evaluation, calls: {},
    *,
    phases: Sequence[str] = PHASES,
    **hooks: Any,
) -> tuple[dict[str, dict[str, float]], str, TrainState]:
    """Trains on the task's reward, and then a control from the same initial parameters on coin tosses.

    Args:
      params: Initial parameters by role, of both phases.
      task: Supplies the prompts and the reward.
      config: The configuration of both phases.
      run: The folder for lines and checkpoints.
      programs: The programs of both phases.
      examine: (evaluation, its calls of the sampler) -> further metrics of a row.
      phases: The names of the phases: the method, and "control" to train a control.
      **hooks: `on_rollout` and `on_line` of `train`, in all phases.

    Returns:
      Rows "before", "after" and, with a control, "control": summaries of held-out evaluations, the last two with the
      change of avg over the same prompts. The SHA-256 of the policy's trained parameters after the first phase. And the
      final state of the last phase.
    """

    def row(held: HeldoutResult) -> dict[str, float]:
        return summary(held.evaluation) | examine(*held)

    def evaluate_start() -> dict[str, Any]:
        with run.waiting("evaluating the initial model (may take minutes if programs must be compiled)"):
            held = evaluate_heldout(programs, params["policy"], task, config, run)
        return {"summary": summary(held.evaluation), "row": row(held), "means": prompt_means(held.evaluation)}

    for phase in phases:  # before the initial evaluation, which takes long
        run.keep_inputs(phase, inputs_of(task) | config.sources)
    if max(saved_steps(run.path / "checkpoints" / phases[0]), default=0) < config.steps:
        compile_ahead(programs, params, task, len(task.rewards.components))
    start = run.remember(phases[0], evaluate_start)
    rows, checksum = {"before": start["row"]}, ""
    state: Any = None
    for phase in phases:
        del state  # its optimizer's memory, before the next phase
        reward = random_reward(config.seed) if phase == CONTROL else task.reward
        state, end = train_with_evaluation(
            params, task, config, run, programs, phase=phase, reward=reward, start=start["summary"], **hooks
        )
        change = paired_difference(prompt_means(end.evaluation), start["means"])
        rows[phase if phase == CONTROL else "after"] = row(end) | change.named("change")
        checksum = checksum or params_sha256(state.params["policy"])
    return rows, checksum, state
