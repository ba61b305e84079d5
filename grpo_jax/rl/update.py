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
from grpo_jax.devices import Devices, size, spread_over, sum_rows
from grpo_jax.functional import Metrics, constant_length_weights
from grpo_jax.models.params import join
from grpo_jax.models.rounding import changed_share
from grpo_jax.models.sharding import laid_out
from grpo_jax.models.transformer import Params
from grpo_jax.rl.optimizer import steps_taken
from grpo_jax.rl.pieces import Microbatches, Pieces, choose_pieces, take
from grpo_jax.rl.types import SHUFFLING, Array, Batch, Learned, Logs, Method, RewardArrays, TrainState, step_key

# Metrics of optimizer steps, not of tokens.
STEP_METRICS = frozenset({"loss", "grad_norm", "skipped", "ratio_deviation", "learning_rate", "changed_share"})

# (inputs without gradient, trained parameters, batch with weights) -> (Σ weights · loss, logs)
LossFn = Callable[[Any, Params, Any], tuple[jax.Array, Logs]]


def learn(
    method: Method,
    config: GRPOConfig,
    state: TrainState,
    frozen: Any,
    batch: Batch,
    rewards: RewardArrays,
    seed_and_step: tuple[Array, Array],
    *,
    devices: Devices = 1,
) -> tuple[TrainState, Learned]:
    """Computes advantages, takes all optimizer steps on a rollout, and runs the method's hooks.

    Args:
      method: The method, such as GRPO or PPO.
      config: The configuration of the run.
      state: The state before the updates. Callers that compile this function donate it.
      frozen: Parameters that are not trained, by role. A "reference" among them is the initial policy.
      batch: The scored batch of N prompts.
      rewards: The rewards of its completions.
      seed_and_step: The seed of the run, and the number of the iteration, from 0.
      devices: The devices that share the rows.

    Returns:
      The next state, and the metrics and advantages to log.
    """
    # ---- advantages
    kl_coef = state.extras.get("kl_coef", jnp.float32(config.loss.kl_coef))
    batch, advantages, logs = method.advantage(rewards, batch, kl_coef)

    # ---- updates: each prompt once per epoch, in shuffled minibatches
    step = partial(optimizer_step, method, config, frozen, devices)
    state, metrics, order = update_epochs(step, state, batch, config, seed_and_step, devices)

    # ---- hooks
    for hook in method.hooks:
        state = hook(state, logs | metrics, seed_and_step[1])
    return state, Learned(logs | metrics, advantages, order)


def models_of(trained: Params, frozen: Any, extras: Mapping[str, Any]) -> Params:
    """Returns all models of a run by role. A reference that moves comes from `extras`."""
    models = join(trained, frozen)
    return models | {"reference": join(extras["reference"], frozen["policy"])} if "reference" in extras else models


def update_epochs(
    optimizer_step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]],
    state: TrainState,
    batch: Batch,
    config: GRPOConfig,
    seed_and_step: tuple[Array, Array],
    devices: Devices = 1,
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
    num_prompts = len(batch.prompt)
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
            return spread_over(chosen, devices) if size(devices) > 1 else chosen

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
    devices: Devices,
    state: TrainState,
    minibatch: Batch,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Takes one optimizer step of a method on a minibatch. For the arguments see `learn` and `train_step`."""
    rate, weights_of = method.schedule(steps_taken(state)), method.aggregation
    if weights_of is constant_length_weights:
        # With an environment the mask also has room for observations, which do not count.
        longest = min(minibatch.completion_ids.shape[-1], config.sampling.max_tokens)
        weights_of = partial(weights_of, max_length=longest)
    state, metrics = train_step(
        state,
        (frozen, state.extras),
        minibatch,
        loss_fn=partial(loss_of, method),
        weights_of=partial(weights_of, num_completions=minibatch.temperature.size),
        optimizer=method.optimizer,
        pieces=partial(choose_pieces, config),
        devices=devices,
        rounded=method.rounded and partial(_rounded_policy, method.rounded),
    )
    tokens = jnp.sum(minibatch.completion_mask)
    return state, method.summarise(metrics) | {"learning_rate": jnp.asarray(rate), "_tokens": tokens}


def _rounded_policy(rounded: Callable[[Params], Params], trained: Params) -> Params:
    return rounded(trained["policy"])


def loss_of(method: Method, others: tuple[Any, Any], trained: Params, piece: Batch) -> tuple[jax.Array, Logs]:
    """Returns the sum of a method's terms, and their logs.

    Args:
      method: The method, such as GRPO or PPO.
      others: Frozen parameters, and the extras of the state.
      trained: Trained parameters by role.
      piece: A piece of a batch, with weights.
    """
    models = models_of(trained, *others)
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
    devices: Devices = 1,
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

    def grads_of(piece: Any) -> tuple[tuple[Params, jax.Array, Metrics], Mapping[str, jax.Array]]:
        (loss, logs), grads = grad_fn(inputs[1], piece)
        return (laid_out(grads), loss, logs.means), logs.maxima

    if not pieces:
        return grads_of(batch)

    def add(microbatches: Microbatches, number: jax.Array, total: Any) -> Any:
        sums, maxima = grads_of(take(batch, microbatches, number))
        return jax.tree.map(jnp.add, total[0], sums), jax.tree.map(jnp.maximum, total[1], maxima)

    sums, maxima = jax.eval_shape(lambda: grads_of(take(batch, pieces[0], 0)))
    grads, loss, means = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
    total: Any = (laid_out(grads), loss, means), jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), maxima)
    for microbatches in pieces:
        num_used = microbatches.num_used
        if microbatches is pieces[-1]:
            # Without any completions, compute one empty piece: the maxima would otherwise stay −∞.
            num_used = jnp.maximum(num_used, 1 if len(pieces) == 1 else sum(x.num_used for x in pieces) == 0)
        total = jax.lax.fori_loop(0, num_used, partial(add, microbatches), total)
    return total


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
