"""Trains on a data set: an objective of `offline` under the runner of `runs`."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

from grpo_jax.config import LoggingConfig
from grpo_jax.data.types import StepLog
from grpo_jax.devices import devices_of, place, to_devices
from grpo_jax.models.params import join, split
from grpo_jax.offline.phase import FitObjective, SupervisedConfig, check_rows, make_fit_programs, read_line
from grpo_jax.runs.folder import RunFolder
from grpo_jax.runs.runner import run_steps
from grpo_jax.step.types import TrainState


def fit(
    objective: FitObjective,
    params: Any,
    batches: Callable[[int], Any],
    config: SupervisedConfig,
    run: RunFolder,
    *,
    phase: str,
    evaluate: Callable[[Any, int], dict[str, float]] | None = None,
) -> TrainState:
    """Minimises an objective over batches, continuing from the newest checkpoint of this phase in the run.

    Args:
      objective: The objective, such as `sft_objective`, `divergence_objective`, `preference_objective`,
        `kto_objective` or `reward_model_objective`.
      params: Initial parameters for the objective. `models.params.split` decides which of them are trained.
      batches: A pure function from a step to its batch. The leading axis is a multiple of microbatches x the
        `devices.parts` of the devices. Every host makes the whole batch.
      config: The configuration of the phase.
      run: The folder for lines and checkpoints.
      phase: The name of the phase, which names lines and checkpoints.
      evaluate: (all parameters, steps taken) -> metrics to log, called at step 0 and every `config.eval_every` steps.

    Returns:
      The final state. The model is `join(state.params, split(params)[1])`, both of `models.params`.

    Raises:
      UsageError: The configuration does not work, or a batch cannot be divided among pieces and devices.
      FloatingPointError: Gradients were not finite too many times in a row.
    """
    devices, programs = devices_of(config), make_fit_programs(objective, config)
    trained, frozen = (place(part, devices) for part in split(params))

    def step(
        state: TrainState, number: int, on_dispatch: Callable[[], None]
    ) -> tuple[TrainState, Callable[[], StepLog]]:
        batch = batches(number)
        check_rows(config, rows=len(jax.tree.leaves(batch)[0]), name="the number of rows of a batch")
        state, metrics = programs.train_step(state, to_devices(batch, devices), frozen)
        on_dispatch()
        return state, partial(read_line, phase, config, number + 1, metrics, batch)

    return run_steps(
        run,
        phase,
        config.steps,
        LoggingConfig(config.eval_every, config.checkpoint_every, config.keep_best, config.patience),
        evaluates_end=False,
        score=_score,
        initial_state=lambda: programs.init_state(trained),
        step=step,
        devices=devices,
        evaluate=(lambda state, step: evaluate(join(state.params, frozen), step)) if evaluate else None,
    )


def _score(numbers: Mapping[str, float]) -> float:
    """Returns the negative of the first loss or NLL of an evaluation, or else its first number."""
    losses = (-value for name, value in numbers.items() if name.endswith(("loss", "nll")))
    return next(losses, next(iter(numbers.values())))
