"""The update of an iteration, as pure functions of whole arrays: epochs, minibatches, pieces, devices.

Weights are computed from the mask of a whole optimizer batch, before it is split. So the gradients of its pieces, and
of its shards on devices, add up to the gradient of the whole batch.

Letters as in `types`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from grpo_jax.config import GRPOConfig
from grpo_jax.devices import ONE_DEVICE, Devices, spread_over, sum_rows
from grpo_jax.models.params import join
from grpo_jax.models.rounding import changed_share
from grpo_jax.models.sharding import laid_out
from grpo_jax.models.transformer import Params
from grpo_jax.rl.optimizer import steps_taken
from grpo_jax.rl.pieces import Microbatches, Pieces, choose_pieces, take
from grpo_jax.rl.types import SHUFFLING, Array, Batch, Learned, Logs, Method, RewardArrays, TrainState, step_key

# Metrics of optimizer steps, not of tokens.
STEP_METRICS = frozenset({"loss", "grad_norm", "skipped", "ratio_deviation", "learning_rate", "changed_share"})

# (trained parameters, other inputs without gradient, batch with weights) -> (Σ weights · loss, logs)
LossFn = Callable[[Params, Any, Batch], tuple[jax.Array, Logs]]


def learn(
    method: Method,
    config: GRPOConfig,
    state: TrainState,
    frozen: Any,
    reference: Params | None,
    batch: Batch,
    rewards: RewardArrays,
    seed_and_step: tuple[Array, Array],
    *,
    devices: Devices = ONE_DEVICE,
    prompt_widths: tuple[int, ...] = (),
) -> tuple[TrainState, Learned]:
    """Computes advantages, takes all optimizer steps on a rollout, and runs the method's hooks.

    Args:
      method: The method, such as GRPO or PPO.
      config: The configuration of the run.
      state: The state before the updates. Callers that compile this function donate it.
      frozen: Parameters that are not trained.
      reference: The initial parameters of the policy, if they are the reference. None: the state has the reference, or
        there is none.
      batch: The scored batch of N prompts.
      rewards: The rewards of its completions.
      seed_and_step: The seed of the run, and the number of the iteration, from 0.
      devices: The devices that share the rows.
      prompt_widths: Widths of prompts, ascending, as in `pieces.choose_pieces`.

    Returns:
      The next state, and the metrics and advantages to log.
    """
    # ---- advantages
    kl_coef = state.extras.get("kl_coef", jnp.float32(config.loss.kl_coef))
    batch, advantages, logs = method.advantage(rewards, batch, kl_coef)

    # ---- updates: each prompt once per epoch, in shuffled minibatches
    pieces = partial(choose_pieces, method, config, widths=prompt_widths)
    step = partial(optimizer_step, method, config, frozen, reference, devices, pieces)
    state, metrics, order = update_epochs(step, state, batch, config, seed_and_step, devices)

    # ---- hooks
    for hook in method.hooks:
        state = hook(state, logs | metrics, seed_and_step[1])
    return state, Learned(logs | metrics, advantages, order)


def models_of(trained: Params, frozen: Any, reference: Params | None, extras: Mapping[str, Any]) -> Params:
    """Returns all models of a run by role. The "reference" comes from `extras`, or else is the initial policy."""
    models = join(trained, frozen)
    moved = extras.get("reference")
    reference = reference if moved is None else join(moved, frozen["policy"])
    return models if reference is None else models | {"reference": reference}


def update_epochs(
    optimizer_step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]],
    state: TrainState,
    batch: Batch,
    config: GRPOConfig,
    seed_and_step: tuple[Array, Array],
    devices: Devices = ONE_DEVICE,
) -> tuple[TrainState, dict[str, jax.Array], jax.Array]:
    """Takes the optimizer steps on a rollout.

    Args:
      optimizer_step: (state, minibatch) -> (state, metrics).
      state: The state before the updates.
      batch: The batch of N prompts, with advantages.
      config: The configuration of the run.
      seed_and_step: The seed of the run, and the number of the iteration, from 0.
      devices: The devices that share the rows.

    Returns:
      The next state, metrics of the iteration, and the prompts of each optimizer step, `[U, n]`.
    """
    epochs, minibatches = config.optimizer.epochs, config.optimizer.minibatches
    num_prompts = batch.prompt_ids.shape[0]
    if minibatches == 1:
        order = jnp.tile(jnp.arange(num_prompts, dtype=jnp.int32), (epochs, 1))
        if epochs == 1:
            state, history = optimizer_step(state, batch)
            history = jax.tree.map(lambda x: x[None], history)
        else:
            state, history = jax.lax.scan(lambda state, _: optimizer_step(state, batch), state, None, length=epochs)
    else:

        def minibatch(prompts: jax.Array) -> Batch:
            chosen = jax.tree.map(lambda x: x[prompts], batch)
            return spread_over(chosen, devices)

        order = minibatch_order(*seed_and_step, num_prompts, epochs=epochs, minibatches=minibatches)
        state, history = jax.lax.scan(lambda state, prompts: optimizer_step(state, minibatch(prompts)), state, order)
    tokens = history.pop("_tokens")
    return state, average_over_updates(history, tokens), order


def minibatch_order(seed: Array, step: Array, num_prompts: int, *, epochs: int, minibatches: int) -> jax.Array:
    """Returns the prompts of each optimizer step, int32 `[epochs · minibatches, N / minibatches]`.

    Each epoch permutes all N prompts. The permutation depends only on (seed, step, epoch).
    """

    def of_epoch(epoch: jax.Array) -> jax.Array:
        key = step_key(seed, SHUFFLING, jnp.asarray(step, jnp.uint32) * epochs + epoch)
        return jax.random.permutation(key, num_prompts)

    orders = jax.vmap(of_epoch)(jnp.arange(epochs, dtype=jnp.uint32))
    return orders.reshape(epochs * minibatches, -1).astype(jnp.int32)


def optimizer_step(
    method: Method,
    config: GRPOConfig,
    frozen: Any,
    reference: Params | None,
    devices: Devices,
    pieces: Callable[[Batch], Pieces],
    state: TrainState,
    minibatch: Batch,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Takes one optimizer step of a method on a minibatch. For the arguments see `learn` and `train_step`."""

    def loss_fn(trained: Params, others: Any, piece: Batch) -> tuple[jax.Array, Logs]:
        return loss_of(method, models_of(trained, *others), piece)

    rate, weights_of = method.schedule(steps_taken(state)), method.aggregation
    if config.loss.objective.fixed_length:
        # With an environment the mask also has room for observations, which do not count.
        longest = min(minibatch.completion_ids.shape[-1], config.sampling.max_tokens)
        weights_of = partial(weights_of, max_length=longest)
    state, metrics = train_step(
        state,
        (frozen, reference, state.extras),
        minibatch,
        loss_fn=loss_fn,
        weights_of=partial(weights_of, num_completions=minibatch.temperature.size),
        optimizer=method.optimizer,
        pieces=pieces,
        devices=devices,
        rounded=method.rounded and partial(_rounded_policy, method.rounded),
    )
    tokens = jnp.sum(minibatch.completion_mask)
    return state, method.summarise(metrics) | {"learning_rate": jnp.asarray(rate), "_tokens": tokens}


def _rounded_policy(rounded: Callable[[Params], Params], trained: Params) -> Params:
    return rounded(trained["policy"])


def loss_of(method: Method, models: Params, piece: Batch) -> tuple[jax.Array, Logs]:
    """Returns the sum of a method's terms, and their logs.

    Args:
      method: The method, such as GRPO or PPO.
      models: Parameters by role.
      piece: A piece of a batch, with weights.
    """
    forward = method.forward(models, piece)
    losses, logs = zip(*(term(models, forward, piece) for term in method.terms), strict=True)
    means = {name: pair for log in logs for name, pair in log.means.items()}
    return sum(losses), Logs(means, {name: most for log in logs for name, most in log.maxima.items()})


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
      loss_fn: (trained parameters, others, batch with weights) -> (Σ weights · loss, logs).
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

    def of_rows(shared: Any, rows: Any) -> tuple[Any, Any]:
        params, others = shared
        fixed = lambda trained, piece: loss_fn(trained, others, piece)  # noqa: E731
        grads, loss, logs = accumulate_grads(fixed, params, rows, pieces(rows))
        return (grads, loss, logs.means), logs.maxima

    (grads, loss, means), maxima = sum_rows(of_rows, devices)((state.params, others), batch)
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
    loss_fn: Callable[[Params, Any], tuple[jax.Array, Logs]], params: Params, batch: Any, pieces: Pieces = ()
) -> tuple[Params, jax.Array, Logs]:
    """Σ over pieces of ∇ loss_fn, with one piece in memory at a time.

    Args:
      loss_fn: (params, batch with weights) -> (Σ weights · per-token loss, logs).
      params: The parameters with respect to which the loss is differentiated.
      batch: Arrays with leading axis N. The weights are those of the whole batch.
      pieces: The pieces of the batch. Default: all rows at once.

    Returns:
      Gradients, loss and logs of the whole batch.
    """
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    if not pieces:
        (loss, logs), grads = grad_fn(params, batch)
        return laid_out(grads), loss, logs

    def add(microbatches: Microbatches, number: jax.Array, total: Any) -> Any:
        (loss, logs), grads = grad_fn(params, take(batch, microbatches, number))
        return _combine(total, (laid_out(grads), loss, logs))

    shapes = jax.eval_shape(lambda: grad_fn(params, take(batch, pieces[0], 0)))
    (loss, logs), grads = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    logs = logs._replace(maxima=jax.tree.map(lambda x: jnp.full_like(x, -jnp.inf), logs.maxima))
    total = laid_out(grads), loss, logs
    for microbatches in pieces:
        num_used = microbatches.num_used
        if microbatches is pieces[-1]:
            # Without any completions, compute one empty piece: the maxima would otherwise stay −∞.
            num_used = jnp.maximum(num_used, 1 if len(pieces) == 1 else sum(x.num_used for x in pieces) == 0)
        total = jax.lax.fori_loop(0, num_used, partial(add, microbatches), total)
    return total


def _combine(total: Any, piece: Any) -> Any:
    """Adds gradients, losses and means, and takes the larger of the maxima."""
    (grads, loss, logs), (more_grads, more_loss, more_logs) = total, piece
    summed = jax.tree.map(jnp.add, (grads, loss, logs.means), (more_grads, more_loss, more_logs.means))
    return summed[0], summed[1], Logs(summed[2], jax.tree.map(jnp.maximum, logs.maxima, more_logs.maxima))


def average_over_updates(metrics: Mapping[str, jax.Array], tokens: jax.Array) -> dict[str, jax.Array]:
    """Returns the metrics of an iteration from those of its optimizer steps.

    Metrics are averaged over the steps. Metrics of tokens are weighted by the tokens of each step, because a plain mean
    would give short minibatches too much weight. `ratio_deviation` is the maximum over the steps.
    `first_ratio_deviation` and `first_sampler_mismatch` are values of the first step, before any update. `skipped` is
    the largest number of steps skipped in a row. `skipped_update` is the first skipped step, counted from 0, or −1.

    Args:
      metrics: The metrics of the optimizer steps: name -> `[U]`.
      tokens: The number of tokens in the loss of each step, `[U]`.
    """
    weights = tokens / (tokens.sum() + (tokens.sum() == 0))
    means = {
        name: values.mean() if name in STEP_METRICS else (values * weights).sum() for name, values in metrics.items()
    }
    skipped = metrics["skipped"] > 0
    return means | {
        "ratio_deviation": metrics["ratio_deviation"].max(),
        "first_ratio_deviation": metrics["ratio_deviation"][0],
        "first_sampler_mismatch": metrics["sampler_mismatch"][0],
        "skipped": metrics["skipped"].max(),
        "skipped_update": jnp.where(skipped.any(), jnp.argmax(skipped), -1),
    }
