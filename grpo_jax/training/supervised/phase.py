"""The training loop on given data, of every supervised phase."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.config import Decay, MeshConfig, validate_mesh, validate_minutes, validate_seed, validate_sizes
from grpo_jax.errors import UsageError
from grpo_jax.models import lora
from grpo_jax.models.transformer import Params
from grpo_jax.runs.folder import RunFolder
from grpo_jax.runs.stopping import between_steps
from grpo_jax.training.guards import check_gradients
from grpo_jax.training.microbatches import Microbatches, by_prompts
from grpo_jax.training.parallel import (
    Mesh,
    compiled,
    data_parallel,
    devices_of,
    parts,
    place,
    shardings,
    to_devices,
    to_host,
)
from grpo_jax.training.state import (
    TrainState,
    init_state,
    learning_rate_schedule,
    make_optimizer,
    steps_taken,
)
from grpo_jax.training.step import Logs, train_step

_MAX_SKIPPED = 5  # steps in a row without finite gradients


@dataclass(frozen=True)
class SupervisedConfig:
    """A phase on given data."""

    steps: int
    """Optimizer steps."""
    learning_rate: float
    """Peak learning rate of AdamW. A tiny model takes 1e-4 to 1e-3, a large one 1e-5."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    decay: Decay = "none"
    """How the learning rate falls to 0 between warm-up and end."""
    weight_decay: float = 0.0
    """Of AdamW: of matrices; norms and biases have none."""
    max_grad_norm: float = 1.0
    """Gradients with a larger norm are scaled down to this one."""
    microbatches: int = 1
    """Pieces that a step is computed in, to save memory. Results differ by rounding alone."""
    devices: int = 1
    """Devices to spread a step over; 0 for all."""
    mesh: MeshConfig = MeshConfig()
    checkpoint_every: int = 250
    """Steps between checkpoints."""
    save_every_minutes: float = 0.0
    """A checkpoint also after a step that ends so many minutes after the last one; 0: none."""
    log_every: int = 50
    """Steps between lines of the log."""
    eval_every: int = 0
    """Steps between held-out evaluations, the first before training; 0: none in between."""


class SupervisedLoss(NamedTuple):
    """What a phase minimises. Functions of parameters take all of them, in whatever tree `join` makes."""

    # (parameters, batch with weights) -> Σ weights · loss, logs
    loss_fn: Callable[[Any, Any], tuple[jax.Array, Logs]]
    # (mask of the whole batch, axis_name) -> weights
    aggregation: Callable[..., jax.Array]
    # parameters -> those that are trained, the others (None where there are none); and back
    split: Callable[[Any], tuple[Any, Any]] = lora.split
    join: Callable[[Any, Any], Any] = lora.join
    # (parameters, whole batch, its microbatches, axis_name) -> batch with what the loss needs to know of all of it
    prepare: Callable[[Any, Any, Microbatches | None, Hashable | None], Any] | None = None


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

    def step(state: TrainState, batch: Any, frozen: Any, *, axis_name):
        rate = learning_rate(steps_taken(state))
        microbatches = by_prompts(jax.tree.leaves(batch)[0].shape[0], config.microbatches)
        if loss.prepare is not None:
            batch = loss.prepare(loss.join(state.params, frozen), batch, microbatches, axis_name)
        state, metrics = train_step(
            state,
            batch,
            loss_fn=lambda trained, batch: loss.loss_fn(loss.join(trained, frozen), batch),
            aggregation=loss.aggregation,
            optimizer=optimizer,
            microbatches=microbatches,
            axis_name=axis_name,
        )
        return state, metrics | {"learning_rate": jnp.asarray(rate)}

    step_fn = data_parallel(step, (None, 0, None), (None, None), devices=devices, donate_argnums=(0,))

    def initial_state(params: Params) -> TrainState:
        return init_state(jax.tree.map(jnp.copy, params), optimizer)

    return FitPrograms(step_fn, compiled(initial_state, devices=devices))


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
      params: where training starts; `loss.split` says which of them are trained.
      batches: step -> batch, a pure function; its leading axis is a multiple of microbatches x the `parallel.parts` of
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
    trained, frozen = (place(part, devices) for part in loss.split(params))

    def heldout(state: TrainState, number: int) -> dict[str, Any]:
        if not evaluate or not config.eval_every or number % config.eval_every:
            return {}
        return evaluate(loss.join(state.params, frozen))

    kept = run.checkpoints(phase, keep=2, every=config.checkpoint_every, minutes=config.save_every_minutes)
    with between_steps() as asked_to_stop, kept as checkpoints:
        state, done = checkpoints.restore(lambda: programs.init_state(trained), partial(shardings, devices=devices))
        state = place(state, devices)
        run.rewind(phase, done, checkpoints.lines)
        if done == 0 and (start := heldout(state, 0)):
            run.log(phase, 0, start)
        with run.progress(phase, config.steps, done) as show:
            unread: dict[int, dict[str, jax.Array]] = {}
            for number in range(done + 1, config.steps + 1):
                batch = batches(number - 1)
                check_rows(config, rows=len(jax.tree.leaves(batch)[0]), name="the number of rows of a batch")
                state, metrics = programs.train_step(state, to_devices(batch, devices), frozen)
                evaluated, is_last = heldout(state, number), number == config.steps
                unread[number] = metrics
                due = {number: evaluated} if number % config.log_every == 0 or is_last or evaluated else {}
                save = (stop := asked_to_stop()) or is_last or checkpoints.is_due(number)
                if due or save:
                    _log(run, phase, unread, due, batches)
                    unread.clear()
                if due:
                    run.log_times(phase, number)
                    show(number, f"loss {to_host(metrics)['loss']:.3f}")
                if save:  # after the lines that it covers
                    checkpoints.save(state, number)
                if stop:
                    break
    return state


def _log(
    run: RunFolder,
    phase: str,
    steps: dict[int, dict[str, jax.Array]],
    due: dict[int, dict[str, Any]],
    batches: Callable[[int], Any],
) -> None:
    """Writes the lines of steps that are due, and of all that were skipped, also of one that stops the run.

    Each skipped step has a line, so that lines do not depend on where a run was stopped.

    Args:
      run: that the lines go to.
      phase: of the steps.
      steps: those since the last call, counted from 1, with their metrics, which are still on the devices.
      due: steps whose lines are due, with further numbers for these.
      batches: as in `fit`, to dump those of skipped steps.
    """
    for number, skipped in to_host({number: metrics["skipped"] for number, metrics in steps.items()}).items():
        if skipped or number in due:
            run.log(phase, number, jax.tree.map(float, to_host(steps[number])) | due.get(number, {}))
            name, dump = f"{phase}_{number:06d}", lambda number=number: batches(number - 1)._asdict()
            check_gradients(run, name, skipped, _MAX_SKIPPED, dump)


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
    validate_seed(seed)
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
    validate_mesh(config.mesh)
    validate_minutes(config.save_every_minutes)
    validate_sizes(config)
    for least, names in (
        (1, ("steps", "microbatches", "checkpoint_every", "log_every")),
        (0, ("eval_every", "warmup_steps", "weight_decay")),
    ):
        for name in names:
            if getattr(config, name) < least:
                raise UsageError(
                    f"{name} of supervised training is {getattr(config, name)}: it must be at least {least}"
                )
    if not config.weight_decay < float("inf"):
        raise UsageError(f"weight_decay is {config.weight_decay}: it must be finite")
    if not config.max_grad_norm > 0:
        raise UsageError(f"max_grad_norm is {config.max_grad_norm}: it must be above 0")
    if not 0 < config.learning_rate < float("inf"):
        raise UsageError(f"learning_rate is {config.learning_rate}: it must be above 0")
