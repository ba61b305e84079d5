"""The optimizer, its state, and one step of it, as pure functions of whole arrays.

Weights are computed from the mask of a whole optimizer batch, before it is split. So the gradients of its pieces, and
of its shards on devices, add up to the gradient of the whole batch.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from grpo_jax.config import AdamWConfig
from grpo_jax.devices import ONE_DEVICE, Devices, sum_rows
from grpo_jax.errors import UsageError
from grpo_jax.functional import Metrics
from grpo_jax.models.params import Adapted, check_full_precision
from grpo_jax.models.pieces import Microbatches, Pieces, take
from grpo_jax.models.rounding import changed_share
from grpo_jax.models.sharding import laid_out
from grpo_jax.models.transformer import Params
from grpo_jax.step.types import Logs, TrainState

# (inputs without gradient, trained parameters, batch with weights) -> (Σ weights · loss, logs)
LossFn = Callable[[Any, Params, Any], tuple[jax.Array, Logs]]


def train_step(
    state: TrainState,
    others: Any,
    batch: Any,
    *,
    loss_fn: LossFn,
    weights_of: Callable[[jax.Array], jax.Array],
    optimizer: optax.GradientTransformation,
    pieces: Callable[[Any], Pieces] = lambda rows: (),
    devices: Devices = ONE_DEVICE,
    rounded: Callable[[Params], Params] | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Takes one optimizer step. Gradients that are not finite change only the count of skipped steps.

    Args:
      state: The state before the step.
      others: Inputs of the loss without gradient, such as frozen parameters.
      batch: The batch of N rows, with fields `completion_mask` and `weights`.
      loss_fn: (others, trained parameters, batch with weights) -> (Σ weights · loss, logs).
      weights_of: Computes weights from the mask of the whole batch, such as `functional.token_mean_weights`.
      optimizer: An optax transformation.
      pieces: Returns the pieces in which one device computes its rows. Default: all rows at once.
      devices: The devices that share the rows.
      rounded: Rounds parameters as products in bfloat16 do. None: products are in float32.

    Returns:
      The next state, and scalar metrics: those that the loss logs, and `loss`, `grad_norm` and `skipped`. With
      `rounded`, `changed_share` is the share of the weights that the step changes after rounding.
    """
    batch = batch._replace(weights=weights_of(batch.completion_mask))
    summed = sum_rows(partial(accumulate_grads, loss_fn, pieces), devices)
    (grads, loss, means), maxima = summed((others, state.params), batch)
    grad_norm = optax.global_norm(grads)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)

    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    updated = optax.apply_updates(state.params, updates), opt_state
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old), updated, (state.params, state.opt_state)
    )
    skipped = jnp.where(finite, 0, state.skipped + 1)
    metrics = {name: total / jnp.maximum(weight, 1e-9) for name, (total, weight) in means.items()}
    metrics |= {**maxima, "loss": loss, "grad_norm": grad_norm, "skipped": skipped}
    if rounded is not None and (share := changed_share(rounded(state.params), rounded(params))) is not None:
        metrics["changed_share"] = share
    return state._replace(params=params, opt_state=opt_state, skipped=skipped), metrics


def accumulate_grads(
    loss_fn: LossFn, pieces_of: Callable[[Any], Pieces], inputs: tuple[Any, Params], batch: Any
) -> tuple[tuple[Params, jax.Array, Metrics], Mapping[str, jax.Array]]:
    """Σ over pieces of ∇ loss_fn, with one piece in memory at a time.

    Args:
      loss_fn: See `train_step`.
      pieces_of: Returns the pieces of the batch; () for all rows at once.
      inputs: The first two arguments of `loss_fn`: inputs without gradient, and parameters.
      batch: Arrays with leading axis N. The weights are those of the whole batch.

    Returns:
      Sums over the batch (gradients, loss and metrics), and maxima.
    """
    pieces, grad_fn = pieces_of(batch), jax.value_and_grad(partial(loss_fn, inputs[0]), has_aux=True)

    if not pieces:
        return _sums_and_maxima(grad_fn(inputs[1], batch))

    def add(microbatches: Microbatches, number: jax.Array, total: Any) -> Any:
        sums, maxima = _sums_and_maxima(grad_fn(inputs[1], take(batch, microbatches, number)))
        return jax.tree.map(jnp.add, total[0], sums), jax.tree.map(jnp.maximum, total[1], maxima)

    sums, maxima = jax.eval_shape(lambda: _sums_and_maxima(grad_fn(inputs[1], take(batch, pieces[0], 0))))
    grads, loss, means = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
    total: Any = (laid_out(grads), loss, means), jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), maxima)
    for microbatches in pieces:
        num_used = microbatches.num_used
        if microbatches is pieces[-1]:
            # Without any completions, compute one empty piece: the maxima would otherwise stay −∞.
            num_used = jnp.maximum(num_used, 1 if len(pieces) == 1 else sum(x.num_used for x in pieces) == 0)
        total = jax.lax.fori_loop(0, num_used, partial(add, microbatches), total)
    return total


def _sums_and_maxima(result: Any) -> tuple[tuple[Params, jax.Array, Metrics], Mapping[str, jax.Array]]:
    """Sorts the result of `jax.value_and_grad` by how pieces are combined."""
    (loss, logs), grads = result
    return (laid_out(grads), loss, logs.means), logs.maxima


# ---- the optimizer and its state


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns the state before the first step.

    Raises:
      UsageError: The parameters have adapters, which `params.split` must separate first, or are quantised.
    """
    if isinstance(params, Adapted):
        raise UsageError("these parameters have adapters: train the first of models.params.split(params)")
    check_full_precision(params, "they are frozen, so train adapters on them (lora.add_adapters)")
    return TrainState(params, optimizer.init(params), jnp.int32(0), {})


def learning_rate_schedule(options: AdamWConfig, total_steps: int) -> optax.Schedule:
    """Returns a schedule with linear warm-up to the peak, then a constant rate or a decay to 0.

    Args:
      options: The peak, the warm-up and the kind of decay.
      total_steps: The number of optimizer steps after which the decay ends.

    Returns:
      A function from the number of optimizer steps taken to the learning rate of the next step.
    """
    learning_rate, warmup_steps = options.learning_rate, options.warmup_steps
    falling = max(total_steps - warmup_steps, 1)
    after: optax.Schedule = {
        "none": optax.constant_schedule(learning_rate),
        "linear": optax.linear_schedule(learning_rate, 0.0, falling),
        "cosine": optax.cosine_decay_schedule(learning_rate, falling),
    }[options.decay]
    rising = optax.linear_schedule(0.0, learning_rate, warmup_steps)
    return optax.join_schedules([rising, after], [warmup_steps]) if warmup_steps else after


def make_optimizer(
    learning_rate: float | optax.Schedule,
    *,
    weight_decay: float = 0.0,
    max_grad_norm: float = 1.0,
    adam_epsilon: float = 1e-8,
) -> optax.GradientTransformation:
    """Makes AdamW (1711.05101), with gradients clipped by their global norm.

    Args:
      learning_rate: A learning rate, or a schedule.
      weight_decay: Weight decay of matrices. Default: 0. It does not apply to norms and biases, as in transformers and
        TRL, nor to routers of experts, which may be frozen.
      max_grad_norm: The norm above which a gradient is scaled down. Default: 1.
      adam_epsilon: The constant ε of a step m / (√v + ε). Default: 1e-8.
    """
    adamw = optax.adamw(learning_rate, eps=adam_epsilon, weight_decay=weight_decay, mask=has_weight_decay)
    return optax.chain(optax.clip_by_global_norm(max_grad_norm), adamw)


def has_weight_decay(params: Params) -> Any:
    """Returns for each parameter if weight decay applies: not to scales and offsets of norms, biases and routers."""

    def is_matrix(path: tuple[Any, ...], _: Any) -> bool:
        names = {getattr(key, "key", None) for key in path[-2:]}
        return not names & {"scale", "offset", "bias", "router"}

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def steps_taken(state: TrainState) -> jax.Array:
    """Returns the number of optimizer steps that changed the parameters, without skipped steps."""
    return optax.tree_utils.tree_get_all_with_path(state.opt_state, "count")[0][1]
