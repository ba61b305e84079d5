"""GRPO: rewards are compared within groups. What makes it a method of the loop (`loop.train`)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from grpo_jax.config import Divergence, GRPOConfig, validate
from grpo_jax.data.types import Reward, Rewards
from grpo_jax.errors import UsageError
from grpo_jax.functional import (
    gdpo_advantages,
    keep_completions,
    kl_penalized_rewards,
    masked_sum,
    masked_weights,
    per_token,
    rejection_weights,
    sequence_log_ratio,
    sequence_mean_log_ratio,
    token_kl,
    token_log_ratio,
    truncated_weights,
    weighted_sum,
)
from grpo_jax.functional.presets import Objective
from grpo_jax.models.lora import join
from grpo_jax.models.policy import Policy
from grpo_jax.models.transformer import Params
from grpo_jax.runs.folder import RunFolder
from grpo_jax.tasks.task import Task
from grpo_jax.training import loop
from grpo_jax.training.loop import Method, Programs, check_task, compile_programs
from grpo_jax.training.parallel import num_devices
from grpo_jax.training.rollout import (
    Outcome,
    hidden_states,
    score_hidden,
)
from grpo_jax.training.state import (
    Array,
    Batch,
    TrainState,
    learning_rate_schedule,
    make_optimizer,
)
from grpo_jax.training.step import Logs


def train(
    policy: Policy,
    params: Params,
    task: Task,
    config: GRPOConfig,
    run: RunFolder,
    *,
    phase: str = "grpo",
    reward: Reward | Rewards | None = None,
    programs: Programs | None = None,
    evaluate: Callable[[Params, int], dict[str, float]] | None = None,
    until: int | None = None,
) -> TrainState:
    """Trains a policy by GRPO, continuing from the newest checkpoint of this phase in the run.

    Args:
      policy: the model's functions.
      params: where training starts; also the reference, when there is one. With `lora.Adapted`, the
        adapters alone are trained, and the start shares its base with the policy.
      task, config, run, phase, reward, evaluate, until: as in `loop.train`.
      programs: of `make_programs`, to share them between phases; made here, if None.

    Returns:
      The final state; `lora.join(state.params, frozen)` with what `lora.split(params)` calls frozen are the policy's.

    Raises:
      UsageError: the configuration cannot work.
      FloatingPointError: gradients were not finite too many times in a row.
    """
    programs = programs or make_programs(policy, task, config)
    return loop.train(params, task, config, run, programs, phase=phase, reward=reward, evaluate=evaluate, until=until)


def make_programs(policy: Policy, task: Task, config: GRPOConfig) -> Programs:
    """Checks everything that can be checked, and compiles nothing yet.

    Args:
      policy: the model's functions.
      task: its tokens.
      config: the run.

    Returns:
      The functions of GRPO, compiled at their first call.

    Raises:
      UsageError: one sentence that says what to change.
    """
    validate(config, num_devices=num_devices(config.devices))
    check_task(task, config)
    return compile_programs(grpo_method(policy, config), policy, task, config)


def grpo_method(policy: Policy, config: GRPOConfig) -> Method:
    """GRPO, or what the preset makes of it: rewards are compared within groups."""
    algorithm, schedule = config.algorithm, schedule_of(config, config.learning_rate)
    policy_loss_fn = grpo_loss_fn(policy, algorithm, config.divergence)

    def advantages(outcome: Outcome, batch: Batch, kl_coef: Array):
        rewards, penalty, batch = penalised_rewards(outcome.rewards, batch, algorithm, kl_coef)
        if config.advantages_of == "components":
            by_row = gdpo_advantages(outcome.components, weights=outcome.weights)
            by_row = jnp.where(jnp.isnan(rewards), jnp.nan, by_row)  # a reward that is NaN stays visible
        else:
            lengths = jnp.sum(batch.completion_mask, axis=-1, dtype=jnp.int32)
            by_row = algorithm.advantages(rewards, lengths, where=outcome.applicable)
        batch, correction = corrected(batch._replace(advantages=by_row), outcome, config)
        return batch, by_row, penalty | correction

    def loss_fn(trained: Params, frozen: Any, reference: Params | None, batch: Batch):
        return policy_loss_fn(join(trained, frozen), batch, reference)

    optimizer = make_optimizer(schedule, weight_decay=config.weight_decay, max_grad_norm=config.max_grad_norm)
    return Method(advantages, loss_fn, optimizer, schedule)


def schedule_of(config: GRPOConfig, learning_rate: float) -> optax.Schedule:
    """The rates of a run's optimizer steps, with this peak."""
    return learning_rate_schedule(
        learning_rate,
        warmup_steps=config.warmup_steps,
        total_steps=config.steps * config.epochs * config.minibatches,
        decay=config.decay,
    )


def penalised_rewards(
    rewards: Array, batch: Batch, algorithm: Objective, kl_coef: Array
) -> tuple[Array, dict[str, jax.Array], Batch]:
    """rᵢ − β Σₜ k1, where the algorithm has its KL in the reward; the loss then needs no reference.

    Args:
      rewards: `[N, G]`.
      batch: with old and reference log-probabilities.
      algorithm: the run's.
      kl_coef: β of the step.

    Returns:
      Rewards for the advantages, numbers to log of the KL, and the batch for the loss.
    """
    if not (algorithm.kl_in_reward and algorithm.has_reference):
        return rewards, {}, batch
    penalised = kl_penalized_rewards(
        rewards, batch.old_logprobs, batch.ref_logprobs, batch.completion_mask, kl_coef=kl_coef
    )
    return penalised, kl_logs(batch, kl_coef), batch._replace(ref_logprobs=None)


def kl_logs(batch: Batch, kl_coef: Array) -> dict[str, jax.Array]:
    """Of a KL in the reward: k1 a token and a completion, in nats, and its coefficient."""
    mask = batch.completion_mask
    total = jnp.sum(jnp.where(mask, batch.old_logprobs - batch.ref_logprobs, 0))
    counts = {"kl": jnp.sum(mask), "kl_completion": jnp.sum(jnp.any(mask, axis=-1))}
    return {name: total / jnp.maximum(count, 1) for name, count in counts.items()} | {"kl_coef": jnp.asarray(kl_coef)}


# What a correction compares, and what it makes of the ratio.
_CORRECTIONS: dict[str, tuple[Callable[..., jax.Array], Callable[..., jax.Array]]] = {
    "token": (token_log_ratio, truncated_weights),
    "sequence": (sequence_log_ratio, partial(truncated_weights, cap=3.0)),
    "icepop": (token_log_ratio, masked_weights),
    "geometric": (sequence_mean_log_ratio, rejection_weights),
}


def corrected(batch: Batch, outcome: Outcome, config: GRPOConfig) -> tuple[Batch, dict[str, jax.Array]]:
    """Advantages by tokens, weighted for what sampler and trainer disagree on, and the mask without truncated rows.

    Args:
      batch: with advantages `[N, G]` and recomputed log-probabilities.
      outcome: of the rollout.
      config: the run's.

    Returns:
      The batch, and the mean weight to log as `correction`.
    """
    mask, logs = batch.completion_mask, {}
    if config.correction != "none":
        log_ratio, weights_of = _CORRECTIONS[config.correction]
        weights = weights_of(log_ratio(batch.old_logprobs, outcome.sampled_logprobs, mask))
        batch = batch._replace(advantages=per_token(batch.advantages, weights) * weights)
        logs = {"correction": jnp.mean(weights, where=mask)}
    if config.mask_truncated:
        batch = batch._replace(completion_mask=keep_completions(mask, ~outcome.truncated))
    return batch, logs


def grpo_loss_fn(
    policy: Policy, algorithm: Objective, divergence: Divergence = "preset"
) -> Callable[..., tuple[jax.Array, Logs]]:
    """(params, batch with weights, parameters of the reference or None) -> the algorithm's loss and what to log of it.

    Args:
      policy: the model's functions.
      algorithm: the run's.
      divergence: as in GRPOConfig; but for "preset" the loss needs a reference's parameters.

    Returns:
      The loss function, which can be given hidden states `[N, G, T, D]` that are known.
    """
    in_full = divergence != "preset"
    by_tokens = algorithm._replace(kl_coef=0.0) if in_full else algorithm

    def loss_fn(
        params: Params, batch: Batch, reference: Params | None = None, *, hidden: jax.Array | None = None
    ) -> tuple[jax.Array, Logs]:
        if by_tokens.has_reference and not by_tokens.kl_in_reward and batch.ref_logprobs is None:
            raise UsageError(
                "kl_coef is above 0, but the batch has no ref_logprobs: score it under a reference, or set 0"
            )
        if in_full and reference is None:
            raise UsageError(f"divergence {divergence} needs the parameters of a reference: give them to the loss")
        hidden = hidden_states(policy, params, batch) if hidden is None else hidden
        scores, mask = score_hidden(policy, params, hidden, batch), batch.completion_mask
        loss, metrics = by_tokens.loss(
            scores.logprobs,
            batch.old_logprobs,
            batch.advantages,
            mask,
            ref_logprobs=batch.ref_logprobs,
            entropy=scores.entropy,
            weights=batch.weights,
        )
        if in_full:
            kl = token_kl(
                hidden,
                policy.unembedding(params),
                hidden_states(policy, reference, batch),
                policy.unembedding(reference),
                temperature=batch.temperature[..., None],
                reverse=divergence == "reverse",
            )
            loss += algorithm.kl_coef * weighted_sum(kl, batch.weights, mask)
            metrics["kl"] = masked_sum(kl, mask)
        # Against the sampler's own numbers where they are known, whatever the ratio of the loss is taken against.
        sampled = batch.old_logprobs if batch.sampler_logprobs is None else batch.sampler_logprobs
        mismatch = jax.lax.stop_gradient(jnp.where(mask, scores.logprobs - sampled, 0))
        metrics["entropy"] = masked_sum(scores.entropy, mask)
        metrics["sampler_mismatch"] = masked_sum(jnp.exp(jnp.abs(mismatch)), mask)
        return loss, Logs(metrics, {"ratio_deviation": jnp.max(jnp.abs(jnp.expm1(mismatch)))})

    return loss_fn
