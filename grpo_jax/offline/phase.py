"""The training steps of every phase on fixed data. `fit` runs the objectives of this folder."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax.config import AdamWConfig, CheckpointConfig, PhaseConfig, check_optimizer
from grpo_jax.data.types import Skipped, StepLog
from grpo_jax.devices import (
    ONE_DEVICE,
    Devices,
    all_rows,
    devices_of,
    jit_on_devices,
    map_rows,
    num_shards,
    to_devices,
    to_numpy,
)
from grpo_jax.errors import UsageError
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.params.tree import join
from grpo_jax.models.rows.pieces import Pieces, by_prompts, computed_in_pieces
from grpo_jax.optimizer import learning_rate_schedule, logged_rate, optimizer_of
from grpo_jax.options import Size, check_ranges
from grpo_jax.step import Logs, TrainState, init_state, train_step

_MAX_SKIPPED = 5  # steps in a row without finite gradients


@dataclass(frozen=True)
class SupervisedConfig(CheckpointConfig, AdamWConfig, PhaseConfig):
    """The configuration of a phase on fixed data."""

    microbatches: Size = 1
    """Pieces that a step is computed in, to save memory. Results differ only by rounding."""
    log_every: Size = 50
    """Steps between lines of the log."""


class FitObjective(NamedTuple):
    """The loss that a phase minimises."""

    # (parameters, batch with weights) -> Σ weights · loss, logs
    loss_fn: Callable[[Any, Any], tuple[jax.Array, Logs]]
    # mask of the whole batch -> weights
    aggregation: Callable[[jax.Array], jax.Array]
    # Adds fields that depend on the whole batch: (parameters, batch, map_pieces) -> batch. map_pieces(fn, parameters,
    # batch) applies fn(parameters, rows) -> arrays to the rows of the batch in pieces
    prepare: Callable[[Any, Any, Callable[..., Any]], Any] | None = None


def make_fit_optimizer(config: SupervisedConfig) -> tuple[optax.Schedule, optax.GradientTransformation]:
    """Returns the learning rate of a phase, and its optimizer.

    Raises:
      UsageError: There is no such optimizer, or options are set that it does not read.
    """
    check_optimizer(config)
    schedule = learning_rate_schedule(config, config.steps)
    return schedule, optimizer_of(config, schedule)


@lru_cache(maxsize=8)
def make_fit_programs(
    objective: FitObjective, config: SupervisedConfig
) -> tuple[Callable[[Params], TrainState], Callable[..., tuple[TrainState, dict[str, jax.Array]]]]:
    """Checks the configuration and makes the programs of a phase, which are compiled at their first call.

    Phases with the same objective and configuration, such as the rounds of a reward model, share their programs.

    Args:
      objective: The objective of the phase.
      config: The configuration of the phase.

    Returns:
      A function from trained parameters to the first state, which holds copies of them; and the step, (state, batch,
      frozen parameters) -> (state, metrics), which donates the state.

    Raises:
      UsageError: The configuration is invalid.
    """
    devices = devices_of(config)
    check_ranges(config)
    learning_rate, optimizer = make_fit_optimizer(config)

    def pieces(rows: Any) -> Pieces:
        return by_prompts(jax.tree.leaves(rows)[0].shape[0], config.microbatches)

    def map_pieces(fn: Callable[[Any, Any], Any], params: Any, batch: Any) -> Any:
        def map_piece(params: Any, rows: Any) -> Any:
            return computed_in_pieces(partial(fn, params), rows, pieces(rows))

        return map_rows(map_piece, devices)(params, batch)

    def step(state: TrainState, batch: Any, frozen: Any):
        rate = logged_rate(config, learning_rate, state.opt_state)
        if objective.prepare is not None:
            batch = objective.prepare(join(state.params, frozen), batch, map_pieces)
        state, metrics = train_step(
            state,
            frozen,
            batch,
            loss_fn=lambda frozen, trained, batch: objective.loss_fn(join(trained, frozen), batch),
            weights_of=objective.aggregation,
            optimizer=optimizer,
            pieces=pieces,
            devices=devices,
        )
        return state, metrics | rate

    def initial_state(params: Params) -> TrainState:
        return init_state(jax.tree.map(jnp.copy, params), optimizer)

    return (
        jit_on_devices(initial_state, devices=devices),
        jit_on_devices(step, devices=devices, donate_argnums=(0,)),
    )


def read_metrics(phase: str, config: SupervisedConfig, number: int, metrics: dict[str, Any], batch: Any) -> StepLog:
    """Returns the line of a step, which is empty unless a line is due or the step was skipped.

    Each skipped step has a line, so that lines do not depend on where a run was interrupted.

    Args:
      phase: The name of the phase, for files of skipped steps.
      config: The configuration of the phase.
      number: The number of the step, from 1.
      metrics: The metrics of the step, which this waits for.
      batch: The batch of the step.
    """
    skipped = to_numpy(metrics["skipped"]).item()
    is_evaluated = config.eval_every and number % config.eval_every == 0
    is_due = number % config.log_every == 0 or number == config.steps or is_evaluated
    if not (is_due or skipped):
        return StepLog({}, "")
    numbers = jax.tree.map(float, to_numpy(metrics))
    name = f"{phase}_{number:06d}"
    return StepLog(
        metrics=numbers,
        words=f"loss {numbers['loss']:.3f}" if is_due else "",
        times={} if is_due else None,
        skipped=Skipped(name, skipped, min(_MAX_SKIPPED, config.steps), batch._asdict) if skipped else None,
    )


@cache
def row_scorer(
    score: Callable[..., jax.Array], *constants: Hashable, devices: Devices = ONE_DEVICE
) -> Callable[[Any, Any], np.ndarray]:
    """Compiles a function that scores rows, once for all calls with the same arguments.

    Args:
      score: (*constants, parameters, batch `[N, ...]`) -> numbers `[N, ...]`, such as `pairs.pair_logprobs`.
      constants: The first arguments of `score`, such as the policy.
      devices: The devices that hold the parameters. On a mesh, N must be a multiple of `num_shards`.

    Returns:
      (parameters, batch of NumPy arrays) -> NumPy arrays of all rows.
    """
    program = jit_on_devices(partial(score, *constants), 0, devices=devices)

    def call(params: Any, batch: Any) -> np.ndarray:
        return all_rows(program(params, batch if devices.mesh is None else to_devices(batch, devices)), devices)

    return call


def check_rows(config: SupervisedConfig, *, rows: int, name: str) -> None:
    """Checks that a batch can be divided among pieces and devices.

    Args:
      config: The configuration of the phase.
      rows: The number of rows in a step.
      name: The name of the option that sets `rows`.

    Raises:
      UsageError: The batch cannot be divided. The message says what to change.
    """
    devices = devices_of(config)
    pieces = config.microbatches * num_shards(devices)
    if rows < 1 or rows % pieces:
        along = "devices" if devices.mesh is None else "data x fsdp"
        raise UsageError(f"{name} is {rows}: it must be a multiple of microbatches x {along}, {pieces}, and at least 1")
