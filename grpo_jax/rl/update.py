"""The update of an iteration, as pure functions of whole arrays: epochs, minibatches, the objective's loss, hooks.

Letters as in `types`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax import functional as F
from grpo_jax.config import GRPOConfig, LossConfig
from grpo_jax.devices import ONE_DEVICE, Devices, spread_over
from grpo_jax.functional.numerics import call_with
from grpo_jax.functional.presets import CORRECTIONS
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.params.tree import join
from grpo_jax.optimizer import logged_rate
from grpo_jax.rl.types import SHUFFLING, Forward, Hook, Learned, LossTerm, Method, RewardArrays, step_key
from grpo_jax.step import Array, Batch, Logs, TrainState, train_step

# Metrics of optimizer steps, not of tokens.
STEP_METRICS = frozenset({"loss", "grad_norm", "skipped", "ratio_deviation", "learning_rate", "changed_share"})


def learn(
    method: Method,
    config: GRPOConfig,
    state: TrainState,
    frozen: Any,
    batch: Batch,
    rewards: RewardArrays,
    seed_and_step: Array,
    *,
    devices: Devices = ONE_DEVICE,
) -> tuple[TrainState, Learned]:
    """Computes advantages, takes all optimizer steps on a rollout, and runs the method's hooks.

    Args:
      method: The method, such as GRPO or PPO.
      config: Supplies epochs, minibatches, the size of pieces, and the first weight of the KL.
      state: The state before the updates. Callers that compile this function donate it.
      frozen: Parameters that are not trained, by role. A "reference" among them is the initial policy.
      batch: The scored batch of N prompts.
      rewards: The rewards of its completions.
      seed_and_step: The seed of the run, and the number of the iteration, from 0; uint32 `[2]`.
      devices: The devices that share the rows.

    Returns:
      The next state, and the metrics and advantages to log.
    """
    seed, number = seed_and_step
    # ---- advantages
    kl_coef = state.extras.get("kl_coef", jnp.float32(config.loss.kl_coef))
    batch, advantages, logs = method.advantage(rewards, batch, kl_coef)

    # ---- updates: each prompt once per epoch, in shuffled minibatches
    step = partial(optimizer_step, method, config, frozen, devices)
    state, metrics, order = update_epochs(step, state, batch, config, (seed, number), devices)

    # ---- hooks
    for hook in method.hooks:
        state = hook(state, logs | metrics, number)
    return state, Learned(logs | metrics, advantages, order)


def models_of(trained: Params, frozen: Any, extras: Mapping[str, Any]) -> Params:
    """Returns all models of a run by role. A reference that moves comes from `extras`."""
    models = join(trained, frozen)
    return models | {"reference": join(extras["reference"], frozen["policy"])} if "reference" in extras else models


def with_fixed_reference(models: Params, config: GRPOConfig) -> Params:
    """Adds the frozen role "reference", the initial policy, to a run's models by role, if the reference never moves."""
    if config.loss.ref_sync_steps or not config.loss.objective.has_reference:
        return models
    return models | {"reference": models["policy"]}


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
      config: Supplies the numbers of epochs and minibatches.
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
            chosen: Batch = jax.tree.map(lambda x: x[prompts], batch)
            return spread_over(chosen, devices)

        order = minibatch_order(*seed_and_step, num_prompts, epochs=epochs, minibatches=minibatches)
        state, history = jax.lax.scan(lambda state, prompts: optimizer_step(state, minibatch(prompts)), state, order)
    tokens = history.pop("_tokens")
    return state, average_over_updates(history, tokens), order


def minibatch_order(seed: Array, step: Array, num_prompts: int, *, epochs: int, minibatches: int) -> jax.Array:
    """Returns the prompts of each optimizer step, int32 `[epochs · minibatches, N / minibatches]`.

    Each epoch permutes all N prompts. The permutation depends only on (seed, step, epoch).
    """

    def order_of_epoch(epoch: jax.Array) -> jax.Array:
        key = step_key(seed, SHUFFLING, jnp.asarray(step, jnp.uint32) * epochs + epoch)
        return jax.random.permutation(key, num_prompts)

    orders = jax.vmap(order_of_epoch)(jnp.arange(epochs, dtype=jnp.uint32))
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
    options = config.optimizer
    rate = logged_rate(options, method.schedule, state.opt_state)
    # With an environment the mask also has room for observations, which do not count.
    longest = min(minibatch.completion_ids.shape[-1], config.sampling.max_tokens)
    state, metrics = train_step(
        state,
        (frozen, state.extras),
        minibatch,
        loss_fn=partial(loss_of, method),
        weights_of=partial(
            call_with, method.aggregation, num_completions=minibatch.temperature.size, max_length=longest
        ),
        optimizer=method.optimizer,
        pieces=partial(method.pieces, piece_tokens=config.piece_tokens),
        devices=devices,
        rounded=method.rounded,
    )
    tokens = jnp.sum(minibatch.completion_mask)
    return state, method.summarise(metrics) | rate | {"_tokens": tokens}


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


def objective_term(config: LossConfig) -> LossTerm:
    """Returns the term `Objective.loss` of the preset, with corrected advantages."""
    in_full = config.divergence != "preset"
    objective = config.objective._replace(kl_coef=0.0) if in_full else config.objective

    def term(models: Params, forward: Forward, batch: Batch) -> tuple[jax.Array, Logs]:
        mask, fresh = batch.completion_mask, jax.lax.stop_gradient(forward.logprobs)
        old_logprobs = fresh if batch.old_logprobs is None else batch.old_logprobs
        advantages, more = corrected_advantages(batch, fresh, old_logprobs, config)
        loss, metrics = objective.loss(
            forward.logprobs,
            old_logprobs,
            advantages,
            mask,
            ref_logprobs=batch.ref_logprobs,
            entropy=forward.entropy,
            weights=batch.weights,
        )
        # Compare with the sampler's log-probabilities if they are known, even if the loss uses other old ones.
        sampled = old_logprobs if batch.sampler_logprobs is None else batch.sampler_logprobs
        is_compared = mask if batch.is_border is None else mask & ~batch.is_border
        mismatch = jnp.where(is_compared, fresh - sampled, 0)
        metrics["entropy"] = F.masked_sum(forward.entropy, mask)
        metrics["sampler_mismatch"] = F.masked_sum(jnp.exp(jnp.abs(mismatch)), mask)
        if batch.support_ids is not None:
            left_out = -jnp.expm1(batch.processed_logprobs - batch.sampler_logprobs)
            metrics["support_left_out"] = F.masked_sum(left_out, mask)
        if batch.is_border is not None:
            metrics["support_border"] = F.masked_sum(batch.is_border, mask)
        return loss, Logs(metrics | more, {"ratio_deviation": jnp.max(jnp.abs(jnp.expm1(mismatch)))})

    return term


def corrected_advantages(
    batch: Batch, logprobs: jax.Array, old_logprobs: jax.Array, config: LossConfig
) -> tuple[jax.Array, dict[str, Any]]:
    """Applies `correction` and `off_policy_threshold` to advantages.

    Args:
      batch: The batch with advantages and the sampler's log-probabilities.
      logprobs: Log-probabilities of the current policy, `[N, G, T]`.
      old_logprobs: Log-probabilities in the denominator of the ratio, `[N, G, T]`.
      config: The loss options of the run.

    Returns:
      Advantages `[N, G]` or `[N, G, T]`, and metrics.
    """
    advantages, mask, metrics = batch.advantages, batch.completion_mask, {}
    if config.correction != "none":
        log_ratio, weights_of = CORRECTIONS[config.correction]
        sampled = batch.sampler_logprobs if batch.processed_logprobs is None else batch.processed_logprobs
        weights = call_with(weights_of, log_ratio(old_logprobs, sampled, mask), **config.constants)
        advantages = F.per_token(advantages, weights) * weights
        metrics["correction"] = F.masked_sum(weights, mask)
    if config.off_policy_threshold is not None:
        # Compare with the sampler: old_logprobs equal the current ones in the first optimizer step.
        drift = F.token_log_ratio(logprobs, batch.sampler_logprobs, mask)
        keep = F.on_policy_completions(drift, batch.advantages, mask, threshold=config.off_policy_threshold)
        advantages = jnp.where(keep, F.per_token(advantages, logprobs), 0)
        metrics["on_policy_share"] = F.masked_sum(keep, mask)
    return advantages, metrics


def average_over_updates(metrics: Mapping[str, jax.Array], tokens: jax.Array) -> dict[str, jax.Array]:
    """Returns the metrics of an iteration from those of its optimizer steps.

    Metrics are averaged over the steps. Metrics of tokens are weighted by the tokens of each step, because a plain mean
    would give short minibatches too much weight. Without any tokens they are NaN. `ratio_deviation` is the maximum over
    the steps. `first_ratio_deviation` and `first_sampler_mismatch` are values of the first step, before any update.
    `skipped` is the largest number of steps skipped in a row. `skipped_update` is the first skipped step, counted from
    0, or −1.

    Args:
      metrics: The metrics of the optimizer steps: name -> `[U]`.
      tokens: The number of tokens in the loss of each step, `[U]`.
    """
    weights = tokens / tokens.sum()
    means = {
        name: values.mean() if name in STEP_METRICS else (jnp.where(tokens == 0, 0, values) * weights).sum()
        for name, values in metrics.items()
    }
    skipped = metrics["skipped"] > 0
    return means | {
        "ratio_deviation": metrics["ratio_deviation"].max(),
        "first_ratio_deviation": metrics["ratio_deviation"][0],
        "first_sampler_mismatch": metrics["sampler_mismatch"][0],
        "skipped": metrics["skipped"].max(),
        "skipped_update": jnp.where(skipped.any(), jnp.argmax(skipped), -1),
    }


# ---- hooks: a reference that moves, and an adaptive coefficient of its KL


def make_hooks(config: GRPOConfig) -> tuple[Callable[[Any], dict[str, Any]], tuple[Hook, ...]]:
    """Returns a function from trained parameters to initial `TrainState.extras`, and the hooks that update these."""
    moves, adapts = config.loss.ref_sync_steps > 0, config.loss.kl_target is not None

    def extras(trained: Any) -> dict[str, Any]:
        # A copy, since the update donates the state.
        reference = {"reference": jax.tree.map(jnp.copy, trained["policy"])} if moves else {}
        return reference | ({"kl_coef": jnp.float32(config.loss.kl_coef)} if adapts else {})

    hooks = (sync_reference(config) if moves else None, adapt_kl_coef(config) if adapts else None)
    return extras, tuple(hook for hook in hooks if hook is not None)


def sync_reference(config: GRPOConfig) -> Hook:
    """θ_ref ← α θ + (1 − α) θ_ref every `ref_sync_steps` iterations. TR-DPO (2404.09656)."""

    def hook(state: TrainState, metrics: Any, step: Any) -> TrainState:
        due = (step + 1) % config.loss.ref_sync_steps == 0
        alpha = jnp.where(due, config.loss.ref_mixup_alpha, 0.0)
        reference = jax.tree.map(
            lambda new, old: (alpha * new + (1 - alpha) * old).astype(old.dtype),
            state.params["policy"],
            state.extras["reference"],
        )
        return state._replace(extras=state.extras | {"reference": reference})

    return hook


def adapt_kl_coef(config: GRPOConfig) -> Hook:
    """Moves β towards `kl_target` (`functional.adaptive_kl_coef`). 1909.08593."""

    target = config.loss.kl_target
    assert target is not None

    def hook(state: TrainState, metrics: Any, step: Any) -> TrainState:
        kl_coef = F.adaptive_kl_coef(
            state.extras["kl_coef"],
            metrics["kl_completion"],
            target=target,
            num_samples=config.sampling.num_prompts * config.sampling.group_size,
        )
        # A step whose KL is not finite is skipped. With it, this coefficient and so all later steps would be lost.
        kl_coef = jnp.where(jnp.isfinite(kl_coef), kl_coef, state.extras["kl_coef"])
        return state._replace(extras=state.extras | {"kl_coef": kl_coef})

    return hook
