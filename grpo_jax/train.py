"""Trains a policy: an iteration of `rl` under the runner of `runs`."""

from collections.abc import Callable
from functools import partial
from typing import Any

from grpo_jax import devices as where
from grpo_jax.config import EngineOptions, GRPOConfig
from grpo_jax.data.types import Reward, Rewards
from grpo_jax.models.trainable import join, split
from grpo_jax.models.transformer import Params
from grpo_jax.rl.grpo import make_programs
from grpo_jax.rl.iteration import Programs, check_programs, iterate, make_iteration
from grpo_jax.rl.sampler import Sampler
from grpo_jax.rl.source import empty_queue
from grpo_jax.rl.types import TrainState
from grpo_jax.runs.folder import RunFolder
from grpo_jax.runs.pretrained import Loaded
from grpo_jax.runs.runner import Pace, run_steps
from grpo_jax.tasks.task import Task, inputs_of

STATE_AXES: Any = TrainState(None, None, None, None, 0)  # type: ignore[arg-type]  # rollouts are spread over devices


def train(
    params: Params,
    task: Task,
    config: GRPOConfig,
    run: RunFolder,
    programs: Programs,
    *,
    phase: str,
    reward: Reward | Rewards | None = None,
    evaluate: Callable[[Params, int], dict[str, float]] | None = None,
    until: int | None = None,
) -> TrainState:
    """Trains by the programs of a method, continuing from the newest checkpoint of this phase in the run.

    Args:
      params: where training starts: models by role, {"policy": ...}, and perhaps "critic" and "teacher". The policy's
        are also the reference, if there is one. Of `lora.Adapted` parameters only the adapters are trained.
      task: prompts and text.
      config: the run.
      run: where lines and checkpoints go.
      programs: of the method; phases that differ only in the reward may share them.
      phase: names lines and checkpoints.
      reward: replaces the task's, and what its environment gives unless it has one of the task's rewards as a part.
      evaluate: (parameters of the policy, steps taken) -> numbers to log, called at step 0, every `eval_every` steps,
        and at the end.
      until: the step to stop at. A later call continues from there, perhaps with another reward. None: the last step.

    Returns:
      The final state. The models are `trainable.join(state.params, trainable.split(params)[1])`.

    Raises:
      UsageError: the configuration cannot work.
      FloatingPointError: gradients were not finite too many times in a row.
    """
    check_programs(programs, config)
    where.pop_bytes_moved()  # the first line counts only what this phase moves
    for note in task.notes:
        run.warn_once(note, note)
    run.keep_inputs(phase, inputs_of(task))
    devices, logging = programs.sampler.devices, config.logging
    it = make_iteration(phase, programs, params, task, reward or task.reward, config, timed=run.timed)
    trained = split(where.place(params, devices))[0]

    def initial_state() -> TrainState:
        return programs.initial_state(trained)._replace(queue=empty_queue(task, config.sampling))

    def evaluate_state(state: TrainState, step: int) -> dict[str, float]:
        assert evaluate
        return evaluate(join(state.params, it.frozen)["policy"], step)

    return run_steps(
        run,
        phase,
        Pace(
            config.steps,
            logging.eval_every,
            logging.checkpoint_every,
            logging.save_every_minutes,
            logging.keep_checkpoints,
            logging.profile_steps,
        ),
        initial_state=initial_state,
        step=partial(iterate, it),
        place=partial(where.place, devices=devices, axes=STATE_AXES),
        shardings=partial(where.shardings, devices=devices, axes=STATE_AXES),
        evaluate=evaluate_state if evaluate else None,
        until=until,
    )


def grpo_programs(
    model: Loaded, teacher: Loaded | None, task: Task, config: GRPOConfig, *, sampler: Sampler | None = None
) -> tuple[Programs, Params]:
    """Makes the programs of GRPO, with a teacher if there is one, and the models by role that they start from.

    Args:
      model: that is trained.
      teacher: of it, or None.
      task: its tokens.
      config: the run.
      sampler: as in `compile_programs`.

    Raises:
      UsageError: one sentence that says what to change.
    """
    if teacher is None:
        return make_programs(model.policy, task, config, sampler=sampler), {"policy": model.params}
    from grpo_jax.rl.distillation import make_distillation_programs  # a run without a teacher does not load it

    programs = make_distillation_programs(model.policy, teacher.policy, task, config, sampler=sampler)
    return programs, {"policy": model.params, "teacher": teacher.params}


def open_engine(
    options: EngineOptions, model: Loaded, task: Task, config: GRPOConfig, *, note: Callable[[str], None]
) -> Sampler | None:
    """Returns the sampler of the engine that the options name, or None if they name none.

    Args:
      options: of the engine.
      model: that is trained.
      task: its tokens.
      config: the run.
      note: tells the user what takes long.

    Raises:
      UsageError: no engine answers, or the options ask for what it does not do.
    """
    if not options.engine:
        return None
    from grpo_jax.engines.sampler import sampler_of  # a run without an engine does not load it

    return sampler_of(options, model.pretrained, task, config, note=note)
