"""One optimizer step, as a pure function: microbatches, gradients, update.

This module is the one place that adds gradients up, over microbatches and over devices. The weights of a batch are made
here from its whole mask, before it is split. So the pieces add up to the gradient of the whole batch.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from grpo_jax.functional import Metrics
from grpo_jax.models.sharding import laid_out
from grpo_jax.models.transformer import Params
from grpo_jax.rl.microbatches import Microbatches, take
from grpo_jax.rl.state import Batch, TrainState


class Logs(NamedTuple):
    """What a loss reports besides its value. Those of pieces of a batch can be combined."""

    means: Metrics  # name -> (weighted sum, weight)
    maxima: dict[str, jax.Array]


LossFn = Callable[[Params, Batch], tuple[jax.Array, Logs]]


def accumulate_grads(
    loss_fn: LossFn, params: Params, batch: Batch, microbatches: Microbatches | None = None
) -> tuple[Params, jax.Array, Logs]:
    """Σ over microbatches of ∇ loss_fn, one at a time in memory.

    Args:
      loss_fn: (params, batch with weights) -> (Σ weights · per-token loss, logs).
      params: where to differentiate.
      batch: leading axis N; weights already made from all of it.
      microbatches: of the batch; None: it is computed in one piece.

    Returns:
      Gradients, loss and logs of the whole batch.
    """
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    if microbatches is None:
        (loss, logs), grads = grad_fn(params, batch)
        return laid_out(grads), loss, logs

    def add(number: jax.Array, total: Any) -> Any:
        (loss, logs), grads = grad_fn(params, take(batch, microbatches, number))
        return _combine(total, (laid_out(grads), loss, logs))

    shapes = jax.eval_shape(lambda: grad_fn(params, take(batch, microbatches, 0)))
    (loss, logs), grads = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    grads = laid_out(grads)
    logs = logs._replace(maxima=jax.tree.map(lambda x: jnp.full_like(x, -jnp.inf), logs.maxima))
    # Also an empty piece, where every completion is left out: the maxima would stay −∞.
    return jax.lax.fori_loop(0, jnp.maximum(microbatches.num_used, 1), add, (grads, loss, logs))


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    loss_fn: LossFn,
    aggregation: Callable[..., jax.Array],
    optimizer: optax.GradientTransformation,
    microbatches: Microbatches | None = None,
    axis_name: Hashable | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimizer step on one minibatch.

    Gradients that are not finite change nothing but the count of skipped steps.

    Args:
      state: donated by callers that jit this.
      batch: leading axis N, of this device.
      loss_fn: as in `accumulate_grads`.
      aggregation: (mask, *, axis_name) -> weights, as those of `functional.aggregation`.
      optimizer: an optax transformation.
      microbatches: as in `accumulate_grads`.
      axis_name: the mapped axis over which the minibatch is spread, or None.

    Returns:
      The next state, and metrics as scalars: those of the loss, `loss`, `grad_norm`, `skipped`.
    """
    batch = batch._replace(weights=aggregation(batch.completion_mask, axis_name=axis_name))
    grads, loss, logs = accumulate_grads(loss_fn, state.params, batch, microbatches)
    if axis_name is not None:
        grads, loss, means = jax.lax.psum((grads, loss, logs.means), axis_name)
        logs = Logs(means, jax.lax.pmax(logs.maxima, axis_name))
    grad_norm = optax.global_norm(grads)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)

    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    updated = optax.apply_updates(state.params, updates), opt_state
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old), updated, (state.params, state.opt_state)
    )
    skipped = jnp.where(finite, 0, state.skipped + 1)
    metrics = {name: total / jnp.maximum(weight, 1e-9) for name, (total, weight) in logs.means.items()}
    metrics |= logs.maxima | {"loss": loss, "grad_norm": grad_norm, "skipped": skipped}
    return state._replace(params=params, opt_state=opt_state, skipped=skipped), metrics


def _combine(total, piece):
    """Adds gradients, losses and means; takes the larger of maxima."""
    (grads, loss, logs), (more_grads, more_loss, more_logs) = total, piece
    summed = jax.tree.map(jnp.add, (grads, loss, logs.means), (more_grads, more_loss, more_logs.means))
    return summed[0], summed[1], Logs(summed[2], jax.tree.map(jnp.maximum, logs.maxima, more_logs.maxima))
