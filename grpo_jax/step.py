"""One optimizer step, which `rl` and `offline` share: its state, its batch, and gradients.

Weights are computed from the mask of a whole optimizer batch, before it is split. So the gradients of its pieces, and
of its shards on devices, add up to the gradient of the whole batch.

Letters: N prompts of P tokens, G completions of T tokens, K candidate tokens, E features of another model.
"""

from grpo_jax.errors import UsageError, need

need("optax", "flax")

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from grpo_jax.devices import ONE_DEVICE, Devices, sum_rows
from grpo_jax.functional import Metrics
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.params.rounding import changed_share
from grpo_jax.models.params.sharding import laid_out
from grpo_jax.models.params.tree import Adapted, check_full_precision
from grpo_jax.models.rows.geometry import PromptTokens, Rows
from grpo_jax.models.rows.pieces import Microbatches, Pieces, take

Array = Any  # jax.Array on a device, np.ndarray on the host


class TrainState(NamedTuple):
    """Everything that a checkpoint holds.

    It has no iterator and no key: data and noise are functions of (seed, step), and the name of the checkpoint is the
    step.
    """

    params: Any  # the trained parameters, of one model or by role ("policy", "critic")
    opt_state: optax.OptState
    skipped: Array  # int32, optimizer steps skipped in a row because gradients were not finite
    extras: dict[str, Any]  # values that hooks update: "reference" and "kl_coef"
    source: Any = ()  # the state of the source of rollouts, arrays [N, ...]


class Batch(NamedTuple):
    """Completions to learn from, on the devices."""

    prompt: PromptTokens  # [N, P]
    completion_ids: Array  # int32 [N, G, T]
    completion_mask: Array  # bool [N, G, T], the tokens that the policy wrote
    temperature: Array  # [N, G], the sampling temperature
    # ---- from the sampler
    sampler_logprobs: Array = None  # [N, G, T], after temperature, normalised as scorers do
    processed_logprobs: Array = None  # [N, G, T], after top-k, top-p and min-p too; None without them
    truncated: Array = None  # bool [N, G], true if no token ended the completion
    support_ids: Array = None  # int32 [N, G, T, K], as in `Completions`
    is_border: Array = None  # bool [N, G, T], as in `Completions`
    # ---- for episodes, as in `Completions`; None: there is one turn
    turn: Array = None  # int32 [N, G, T]
    turn_rewards: Array = None  # float32 [N, G, K]
    ending: Array = None  # int8 [N, G]
    # ---- from scorers; None if the update does not need the field
    old_logprobs: Array = None  # [N, G, T]; None: those of the current policy, without gradient
    ref_logprobs: Array = None  # [N, G, T]
    old_entropy: Array = None  # [N, G, T], in nats
    old_values: Array = None  # [N, G, T], values of a critic before the updates
    end_values: Array = None  # [N, G, 1], its values after the last token
    target: Any = None  # outputs of another model, with which terms compare the policy
    # ---- from the rewards
    advantages: Array = None  # [N, G], or [N, G, T]
    returns: Array = None  # [N, G, T], the targets of a critic
    # ---- from the masks of a whole optimizer batch
    weights: Array = None  # [N, G, T]
    # ---- from the cutting of a batch into pieces
    layout: Rows | None = None  # how the decoder computes the piece; None: each completion in full


class Logs(NamedTuple):
    """Metrics of a loss, which can be combined over the pieces of a batch."""

    means: Metrics  # name -> (weighted sum, weight)
    maxima: Mapping[str, jax.Array] = {}  # over pieces; `average_over_updates` must know each name


# ---- gradients and the step

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
      The next state, and scalar metrics: those that the loss logs, and `loss`, `grad_norm` and `skipped`. The mean of a
      metric with weight 0 is NaN. With `rounded`, `changed_share` is the share of the weights that the step changes
      after rounding.
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
    metrics = {name: jnp.where(weight > 0, total / weight, jnp.nan) for name, (total, weight) in means.items()}
    metrics |= {**maxima, "loss": loss, "grad_norm": grad_norm, "skipped": skipped}
    if rounded is not None and (share := changed_share(rounded(state.params), rounded(params))) is not None:
        metrics["changed_share"] = share
    return state._replace(params=params, opt_state=opt_state, skipped=skipped), metrics


Sums = tuple[Params, jax.Array, Metrics]  # gradients, loss and metrics, which add up over pieces and devices


def accumulate_grads(
    loss_fn: LossFn, pieces_of: Callable[[Any], Pieces], inputs: tuple[Any, Params], batch: Any
) -> tuple[Sums, Mapping[str, jax.Array]]:
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
    lowest: Mapping[str, jax.Array] = jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), maxima)
    total: tuple[Sums, Mapping[str, jax.Array]] = (laid_out(grads), loss, means), lowest
    for microbatches in pieces:
        num_used = microbatches.num_used
        if microbatches is pieces[-1]:
            # Without any completions, compute one empty piece: the maxima would otherwise stay −∞.
            num_used = jnp.maximum(num_used, 1 if len(pieces) == 1 else sum(x.num_used for x in pieces) == 0)
        total = jax.lax.fori_loop(0, num_used, partial(add, microbatches), total)
    return total


def _sums_and_maxima(result: Any) -> tuple[Sums, Mapping[str, jax.Array]]:
    """Sorts the result of `jax.value_and_grad` by how pieces are combined."""
    (loss, logs), grads = result
    return (laid_out(grads), loss, logs.means), logs.maxima


# ---- the initial state


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns the state before the first step.

    Raises:
      UsageError: The parameters have adapters, which `params.split` must separate first, or are quantised.
    """
    if isinstance(params, Adapted):
        raise UsageError("these parameters have adapters: train the first of models.params.split(params)")
    check_full_precision(params, "they are frozen, so train adapters on them (lora.add_adapters)")
    return TrainState(params, optimizer.init(params), jnp.int32(0), {})
