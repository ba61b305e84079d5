"""GRPO: rewards are compared within groups. As a `learn.Method` it is run by `loop.train`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from grpo_jax.config import GRPOConfig, LossConfig, validate
from grpo_jax.data.types import Reward, Rewards
from grpo_jax.errors import UsageError
from grpo_jax.functional import (
    gdpo_advantages,
    keep_completions,
    kl_penalized_rewards,
    masked_sum,
    masked_weights,
    on_policy_completions,
    per_token,
    rejection_weights,
    sequence_log_ratio,
    sequence_mean_log_ratio,
    span_advantages,
    token_kl,
    token_log_ratio,
    top_entropy_tokens,
    truncated_weights,
    turn_advantages,
    weighted_sum,
)
from grpo_jax.functional.numerics import maybe_psum
from grpo_jax.models.lora import join
from grpo_jax.models.policy import Policy
from grpo_jax.models.transformer import Params
from grpo_jax.runs.folder import RunFolder
from grpo_jax.tasks.task import Task
from grpo_jax.training import loop
from grpo_jax.training.learn import Advantages, AxisName, Method, Scores
from grpo_jax.training.loop import Programs, check_task, compile_programs
from grpo_jax.training.parallel import devices_of, parts
from grpo_jax.training.rollout import Sampler
from grpo_jax.training.scoring import hidden_and_routing, hidden_states, score_completion_tokens
from grpo_jax.training.state import (
    Array,
    Batch,
    RewardArrays,
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
      The final state. The parameters of the policy are `lora.join(state.params, lora.split(params)[1])`.

    Raises:
      UsageError: the configuration cannot work.
      FloatingPointError: gradients were not finite too many times in a row.
    """
    programs = programs or make_programs(policy, task, config)
    return loop.train(params, task, config, run, programs, phase=phase, reward=reward, evaluate=evaluate, until=until)


def make_programs(policy: Policy, task: Task, config: GRPOConfig, *, sampler: Sampler | None = None) -> Programs:
    """Checks everything that can be checked, and compiles nothing yet.

    Args:
      policy: the model's functions.
      task: its tokens.
      config: the run.
      sampler: another engine; None: the policy's own.

    Returns:
      The functions of GRPO, compiled at their first call.

    Raises:
      UsageError: one sentence that says what to change.
    """
    validate(config, num_devices=parts(devices_of(config)))
    check_teacher(config, has_teacher=False)
    check_task(task, config)
    return compile_programs(grpo_method(policy, config), policy, task, config, sampler=sampler)


def check_teacher(config: GRPOConfig, *, has_teacher: bool) -> None:
    """Refuses a teacher that nothing is learned from, and the reverse.

    Raises:
      UsageError: one sentence that says what to change.
    """
    kind = config.distillation.distillation
    if has_teacher and kind == "none":
        raise UsageError("there is a teacher, but distillation is none: set it to reverse_kl, forward_kl, jsd or k1")
    if kind != "none" and not has_teacher:
        raise UsageError(f"distillation {kind} needs a teacher: name a model with the same tokenizer as teacher")


def grpo_method(policy: Policy, config: GRPOConfig) -> Method:
    """GRPO, or what the preset makes of it: rewards are compared within groups."""
    objective, schedule = config.loss.objective, schedule_of(config, config.optimizer.learning_rate)
    policy_loss_fn = grpo_loss_fn(policy, config.loss)

    def score(trained: Params, frozen: Any, batch: Batch) -> Scores:
        return Scores(*score_completion_tokens(policy, join(trained, frozen), batch))

    def advantages(rewards: RewardArrays, batch: Batch, kl_coef: Array, axis_name: AxisName) -> Advantages:
        total, logs, batch = penalized_rewards(rewards.rewards, batch, config.loss, kl_coef, axis_name)
        kind = config.loss.advantages_of
        if kind == "turns":
            shown = advantages_by_turn(rewards, batch)
            found = jnp.take_along_axis(shown, jnp.maximum(batch.turn - 1, 0), axis=-1)
        elif kind == "spans":
            found = shown = advantages_by_span(rewards)
        elif kind == "components":
            components = jnp.moveaxis(rewards.components, -1, 0)
            found = gdpo_advantages(components, weights=rewards.weights, axis_name=axis_name)
            found = shown = jnp.where(jnp.isnan(total), jnp.nan, found)  # a reward that is NaN stays visible
        else:
            lengths = jnp.sum(batch.completion_mask, axis=-1, dtype=jnp.int32)
            found = shown = objective.advantages(total, lengths, where=rewards.applicable, axis_name=axis_name)
        return Advantages(masked(batch._replace(advantages=found), config.loss, axis_name), shown, logs)

    def loss_fn(trained: Params, frozen: Any, batch: Batch, reference: Params | None):
        return policy_loss_fn(join(trained, frozen), batch, reference)

    optimizer = optimizer_of(config, schedule)
    return Method(score, advantages, loss_fn, optimizer, schedule, packs=packs(config.loss))


def packs(config: LossConfig) -> bool:
    """Whether the loss can be computed of packed completions."""
    return config.divergence == "preset"


def schedule_of(config: GRPOConfig, learning_rate: float) -> optax.Schedule:
    """The learning rate of each optimizer step of a run, with this peak."""
    optimizer = config.optimizer
    return learning_rate_schedule(
        learning_rate,
        warmup_steps=optimizer.warmup_steps,
        total_steps=config.steps * optimizer.epochs * optimizer.minibatches,
        decay=optimizer.decay,
    )


def optimizer_of(config: GRPOConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """The optimizer of a run."""
    options = config.optimizer
    return make_optimizer(
        schedule,
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm,
        adam_epsilon=options.adam_epsilon,
    )


# ---- advantages


def penalized_rewards(
    rewards: Array, batch: Batch, config: LossConfig, kl_coef: Array, axis_name: AxisName
) -> tuple[Array, dict[str, jax.Array], Batch]:
    """rᵢ − β Σₜ k1, if the KL is in the reward. The loss then needs no reference.

    Args:
      rewards: `[N, G]`.
      batch: with old and reference log-probabilities.
      config: the run's.
      kl_coef: β of the step.
      axis_name: the mapped axis over which prompts are spread, or None.

    Returns:
      Rewards for the advantages, numbers to log of the KL, and the batch for the loss.
    """
    if not (config.kl_in_reward and config.objective.has_reference):
        return rewards, {}, batch
    penalized = kl_penalized_rewards(
        rewards, batch.old_logprobs, batch.ref_logprobs, batch.completion_mask, kl_coef=kl_coef
    )
    return penalized, kl_logs(batch, kl_coef, axis_name), batch._replace(ref_logprobs=None)


def kl_logs(batch: Batch, kl_coef: Array, axis_name: AxisName) -> dict[str, jax.Array]:
    """What to log of a KL in the reward: k1 of a token and of a completion, in nats, and its coefficient."""
    mask = batch.completion_mask
    total = jnp.sum(jnp.where(mask, batch.old_logprobs - batch.ref_logprobs, 0))
    counts = {"kl": jnp.sum(mask), "kl_completion": jnp.sum(jnp.any(mask, axis=-1))}
    total = maybe_psum(total, axis_name)
    means = {name: total / jnp.maximum(maybe_psum(count, axis_name), 1) for name, count in counts.items()}
    return means | {"kl_coef": jnp.asarray(kl_coef)}


def advantages_by_turn(rewards: RewardArrays, batch: Batch) -> jax.Array:
    """`turn_advantages` of the turns of episodes, `[N, G, K]`.

    Args:
      rewards: with those of turns.
      batch: of episodes.
    """
    numbers = jnp.arange(1, rewards.turns.shape[-1] + 1)
    where = (numbers <= jnp.max(batch.turn, axis=-1)[..., None]) & rewards.applicable[..., None]
    by_turn = turn_advantages(rewards.turns, where=where)
    return jnp.where(where & jnp.isnan(rewards.rewards)[..., None], jnp.nan, by_turn)  # a NaN stays visible


def advantages_by_span(rewards: RewardArrays) -> jax.Array:
    """`span_advantages`, `[N, G, T]`.

    Args:
      rewards: with those of spans.
    """
    ends = ~jnp.isnan(rewards.spans)
    advantages = span_advantages(jnp.where(ends, rewards.spans, 0), ends, where=rewards.applicable)
    is_bad = rewards.applicable & jnp.isnan(rewards.rewards)
    return jnp.where(is_bad[..., None], jnp.nan, advantages)  # a NaN stays visible


def masked(batch: Batch, config: LossConfig, axis_name: AxisName) -> Batch:
    """The batch without what the configuration leaves out: truncated completions, and tokens of low entropy.

    A truncated completion leaves the mask, and so the KL too. A token of low entropy loses its advantage alone
    (2506.01939).

    Args:
      batch: with advantages, and entropies where they are needed.
      config: the run's.
      axis_name: the mapped axis over which prompts are spread, or None.
    """
    if config.top_entropy < 1:
        entropy, mask = batch.old_entropy, batch.completion_mask
        keep = top_entropy_tokens(entropy, mask, share=config.top_entropy, axis_name=axis_name)
        batch = batch._replace(advantages=jnp.where(keep, per_token(batch.advantages, entropy), 0))
    if config.mask_truncated:
        batch = batch._replace(completion_mask=keep_completions(batch.completion_mask, ~batch.truncated))
    return batch


# ---- the loss


# What a correction compares, and what it makes of the ratio.
_CORRECTIONS: dict[str, tuple[Callable[..., jax.Array], Callable[..., jax.Array]]] = {
    "token": (token_log_ratio, truncated_weights),
    "sequence": (sequence_log_ratio, partial(truncated_weights, cap=3.0)),
    "icepop": (token_log_ratio, masked_weights),
    "geometric": (sequence_mean_log_ratio, rejection_weights),
}


def corrected_advantages(
    batch: Batch, logprobs: jax.Array, old_logprobs: jax.Array, config: LossConfig
) -> tuple[jax.Array, dict[str, Any]]:
    """Advantages after `correction` and `off_policy_threshold`.

    Args:
      batch: with advantages and the sampler's log-probabilities.
      logprobs: `[N, G, T]`, of the policy.
      old_logprobs: `[N, G, T]`, of the policy that sampled, as the trainer computes them.
      config: the run's.

    Returns:
      Advantages `[N, G]` or `[N, G, T]`, and metrics.
    """
    advantages, mask, metrics = batch.advantages, batch.completion_mask, {}
    if config.correction != "none":
        log_ratio, weights_of = _CORRECTIONS[config.correction]
        sampled = batch.sampler_logprobs if batch.truncated_logprobs is None else batch.truncated_logprobs
        weights = weights_of(log_ratio(old_logprobs, sampled, mask))
        advantages = per_token(advantages, weights) * weights
        metrics["correction"] = masked_sum(weights, mask)
    if config.off_policy_threshold is not None:
        # Against the sampler: against old_logprobs it would change nothing in the first optimizer step.
        drift = token_log_ratio(logprobs, batch.sampler_logprobs, mask)
        keep = on_policy_completions(drift, batch.advantages, mask, threshold=config.off_policy_threshold)
        advantages = jnp.where(keep, per_token(advantages, logprobs), 0)
        metrics["on_policy_share"] = masked_sum(keep, mask)
    return advantages, metrics


def grpo_loss_fn(policy: Policy, config: LossConfig) -> Callable[..., tuple[jax.Array, Logs]]:
    """(params, batch with weights, parameters of the reference or None) -> the method's loss and what to log of it.

    Args:
      policy: the model's functions.
      config: the run's. With another divergence than "preset" the loss needs the parameters of a reference.

    Returns:
      The loss function. What `hidden_and_routing` gives can be given to it, if it is computed already.
    """
    in_full = config.divergence != "preset"
    objective = config.objective._replace(kl_coef=0.0) if in_full else config.objective

    def loss_fn(
        params: Params,
        batch: Batch,
        reference: Params | None = None,
        *,
        hidden: jax.Array | None = None,
        routing: Any = None,
    ) -> tuple[jax.Array, Logs]:
        if objective.has_reference and not objective.kl_in_reward and batch.ref_logprobs is None:
            raise UsageError(
                "kl_coef is above 0, but the batch has no ref_logprobs: score it under a reference, or set 0"
            )
        if in_full and reference is None:
            raise UsageError(
                f"divergence {config.divergence} needs the parameters of a reference: give them to the loss"
            )
        mask = batch.completion_mask
        if hidden is None:
            hidden, routing = hidden_and_routing(policy, params, batch)
        scores = score_completion_tokens(policy, params, batch, hidden=hidden)
        fresh = jax.lax.stop_gradient(scores.logprobs)
        old_logprobs = fresh if batch.old_logprobs is None else batch.old_logprobs
        advantages, more = corrected_advantages(batch, fresh, old_logprobs, config)
        loss, metrics = objective.loss(
            scores.logprobs,
            old_logprobs,
            advantages,
            mask,
            ref_logprobs=batch.ref_logprobs,
            entropy=scores.entropy,
            weights=batch.weights,
        )
        if in_full:
            kl = _full_kl(policy, params, hidden, batch, reference, reverse=config.divergence == "reverse")
            loss += config.kl_coef * weighted_sum(kl, batch.weights, mask)
            metrics["kl"] = masked_sum(kl, mask)
        # Against the sampler's own numbers where they are known, whatever the ratio of the loss is taken against.
        sampled = old_logprobs if batch.sampler_logprobs is None else batch.sampler_logprobs
        mismatch = jnp.where(mask, fresh - sampled, 0)
        if routing is not None and policy.num_experts is not None:
            from grpo_jax.models.experts import load

            metrics |= load(routing, mask, policy.num_experts)
        metrics["entropy"] = masked_sum(scores.entropy, mask)
        metrics["sampler_mismatch"] = masked_sum(jnp.exp(jnp.abs(mismatch)), mask)
        return loss, Logs(metrics | more, {"ratio_deviation": jnp.max(jnp.abs(jnp.expm1(mismatch)))})

    return loss_fn


def _full_kl(policy, params, hidden, batch, reference, *, reverse):
    """The KL divergence over the whole vocabulary, `[N, G, T]`."""
    return token_kl(
        hidden,
        policy.unembedding(params),
        hidden_states(policy, reference, batch),
        policy.unembedding(reference),
        temperature=batch.temperature[..., None],
        reverse=reverse,
        softcap=policy.softcap,
        ref_softcap=policy.softcap,
    )
