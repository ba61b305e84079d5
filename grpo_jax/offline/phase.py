"""The training loop on given data, of every supervised phase."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.checks import validate_mesh
from grpo_jax.config import AdamWConfig, CheckpointConfig, PhaseConfig
from grpo_jax.data.line import Line, Skipped
from grpo_jax.devices import (
    Mesh,
    compiled,
    devices_of,
    map_rows,
    parts,
    place,
    shardings,
    to_devices,
    to_numpy,
)
from grpo_jax.errors import UsageError
from grpo_jax.models.trainable import join, split
from grpo_jax.models.transformer import Params
from grpo_jax.options import Seed, Size, check_number, check_ranges
from grpo_jax.rl.optimizer import init_state, learning_rate_schedule, make_optimizer, steps_taken
from grpo_jax.rl.pieces import Microbatches, by_prompts, computed_in_pieces
from grpo_jax.rl.types import Logs, TrainState
from grpo_jax.rl.update import train_step
from grpo_jax.runs.folder import RunFolder
from grpo_jax.runs.runner import Pace, run_steps

_MAX_SKIPPED = 5  # steps in a row without finite gradients


@dataclass(frozen=True)
class SupervisedConfig(CheckpointConfig, AdamWConfig, PhaseConfig):
    """A phase on given data."""

    microbatches: Size = 1
    """Pieces that a step is computed in, to save memory. Results differ only by rounding."""
    log_every: Size = 50
    """Steps between lines of the log."""


class SupervisedLoss(NamedTuple):
    """What a phase minimises."""

    # (parameters, batch with weights) -> Σ weights · loss, logs
    loss_fn: Callable[[Any, Any], tuple[jax.Array, Logs]]
    # mask of the whole batch -> weights
    aggregation: Callable[[jax.Array], jax.Array]
    # (parameters, whole batch, function that maps (parameters, batch) -> arrays over the rows of a batch in pieces) ->
    # batch with what the loss needs to know of all of it
    prepare: Callable[[Any, Any, Callable[..., Any]], Any] | None = None


class FitPrograms(NamedTuple):
    """The functions of a phase, compiled at their first call."""

    # (state, batch, frozen parameters) -> state, metrics
    train_step: Callable[[TrainState, Any, Any], tuple[TrainState, dict[str, jax.Array]]]
    # trained parameters -> state; a copy: the step donates its state, and the start stays
    init_state: Callable[[Params], TrainState]


def make_fit_programs(loss: SupervisedLoss, config: SupervisedConfig) -> FitPrograms:
    """Checks the configuration, and compiles nothing yet.

    Args:
      loss: of the phase.
      config: of the phase.

    Returns:
      The functions of every phase with this loss and this configuration.

    Raises:
      UsageError: the configuration cannot work.
    """
    devices = devices_of(config)
    _check(config)
    learning_rate = learning_rate_schedule(
        config.learning_rate, warmup_steps=config.warmup_steps, total_steps=config.steps, decay=config.decay
    )
    optimizer = make_optimizer(learning_rate, weight_decay=config.weight_decay, max_grad_norm=config.max_grad_norm)

    def pieces(rows: Any) -> Microbatches | None:
        return by_prompts(jax.tree.leaves(rows)[0].shape[0], config.microbatches)

    def map_pieces(fn: Callable[[Any, Any], Any], params: Any, batch: Any) -> Any:
        def of_rows(params: Any, rows: Any) -> Any:
            return computed_in_pieces(partial(fn, params), rows, pieces(rows))

        return map_rows(of_rows, devices)(params, batch)

    def step(state: TrainState, batch: Any, frozen: Any):
        rate = learning_rate(steps_taken(state))
        if loss.prepare is not None:
            batch = loss.prepare(join(state.params, frozen), batch, map_pieces)
        state, metrics = train_step(
            state,
            frozen,
            batch,
            loss_fn=lambda trained, frozen, batch: loss.loss_fn(join(trained, frozen), batch),
            weights_of=loss.aggregation,
            optimizer=optimizer,
            pieces=pieces,
            devices=devices,
        )
        return state, metrics | {"learning_rate": jnp.asarray(rate)}

    def initial_state(params: Params) -> TrainState:
        return init_state(jax.tree.map(jnp.copy, params), optimizer)

    return FitPrograms(compiled(step, devices=devices, donate_argnums=(0,)), compiled(initial_state, devices=devices))


def fit(
    loss: SupervisedLoss,
    params: Any,
    batches: Callable[[int], Any],
    config: SupervisedConfig,
    run: RunFolder,
    *,
    phase: str,
    evaluate: Callable[[Any], dict[str, Any]] | None = None,
    programs: FitPrograms | None = None,
) -> TrainState:
    """Minimises a loss over batches, continuing from the newest checkpoint of this phase.

    Args:
      loss: of the phase.
      params: where training starts; `trainable.split` says which of them are trained.
      batches: step -> batch, a pure function; its leading axis is a multiple of microbatches x the `devices.parts` of
        the devices. Every host makes the whole batch.
      config: the phase.
      run: where lines and checkpoints go.
      phase: names lines and checkpoints.
      evaluate: (all parameters) -> numbers to log, every `config.eval_every` steps.
      programs: of `make_fit_programs`, to share them between phases with one configuration; made here, if None.

    Returns:
      The final state, of the parameters that are trained.

    Raises:
      UsageError: the configuration cannot work.
      FloatingPointError: gradients were not finite too many times in a row.
    """
    devices, programs = devices_of(config), programs or make_fit_programs(loss, config)
    trained, frozen = (place(part, devices) for part in split(params))

    def step(state: TrainState, number: int, meanwhile: Callable[[], None]) -> tuple[TrainState, Callable[[], Line]]:
        batch = batches(number)
        check_rows(config, rows=len(jax.tree.leaves(batch)[0]), name="the number of rows of a batch")
        state, metrics = programs.train_step(state, to_devices(batch, devices), frozen)
        meanwhile()
        return state, partial(_read_line, phase, config, number + 1, metrics, batch)

    return run_steps(
        run,
        phase,
        Pace(
            config.steps,
            config.eval_every,
            config.checkpoint_every,
            config.save_every_minutes,
            evaluates_end=False,
        ),
        initial_state=lambda: programs.init_state(trained),
        step=step,
        place=partial(place, devices=devices),
        shardings=partial(shardings, devices=devices),
        evaluate=(lambda state, _: evaluate(join(state.params, frozen))) if evaluate else None,
    )


def _read_line(phase: str, config: SupervisedConfig, number: int, metrics: dict[str, Any], batch: Any) -> Line:
    """Returns the line of a step: empty unless it is due, or the step was skipped.

    Each skipped step has a line, so that lines do not depend on where a run was stopped.
    """
    skipped = to_numpy(metrics["skipped"]).item()
    is_evaluated = config.eval_every and number % config.eval_every == 0
    is_due = number % config.log_every == 0 or number == config.steps or is_evaluated
    if not (is_due or skipped):
        return Line({}, "")
    numbers = jax.tree.map(float, to_numpy(metrics))
    name = f"{phase}_{number:06d}"
    return Line(
        metrics=numbers,
        words=f"loss {numbers['loss']:.3f}" if is_due else "",
        times={} if is_due else None,
        skipped=Skipped(name, skipped, _MAX_SKIPPED, batch._asdict) if skipped else None,
    )


def check_supervised(config: SupervisedConfig, *, seed: int, rows: int, name: str) -> None:
    """Refuses options that cannot work, before anything is computed.

    Args:
      config: the phase.
      seed: of the order of rows.
      rows: of a step.
      name: of the option that says how many.

    Raises:
      UsageError: one sentence that says what to change.
    """
    _check(config)
    check_number("seed", seed, Seed)
    check_rows(config, rows=rows, name=name)


def check_rows(config: SupervisedConfig, *, rows: int, name: str) -> None:
    """Refuses a batch that pieces and devices cannot share.

    Args:
      config, rows, name: as in `check_supervised`.

    Raises:
      UsageError: one sentence that says what to change.
    """
    devices = devices_of(config)
    pieces = config.microbatches * parts(devices)
    if rows < 1 or rows % pieces:
        along = "data x fsdp" if isinstance(devices, Mesh) else "devices"
        raise UsageError(f"{name} is {rows}: it must be a multiple of microbatches x {along}, {pieces}, and at least 1")


def _check(config: SupervisedConfig) -> None:
    check_ranges(config)
    validate_mesh(config.mesh)
