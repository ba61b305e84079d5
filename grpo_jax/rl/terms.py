"""Terms of the loss, which are added: the policy's objective, and the KL over the whole vocabulary.

The critic's term is in `ppo`, the teacher's in `distillation`. Letters as in `types`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.config import LossConfig
from grpo_jax.errors import UsageError
from grpo_jax.functional import (
    masked_sum,
    masked_weights,
    on_policy_completions,
    per_token,
    rejection_weights,
    sequence_log_ratio,
    sequence_mean_log_ratio,
    token_kl,
    token_log_ratio,
    truncated_weights,
    weighted_sum,
)
from grpo_jax.models.policy import Policy
from grpo_jax.models.transformer import Params
from grpo_jax.rl.scorers import hidden_and_routing, hidden_states, score_completion_tokens
from grpo_jax.rl.types import Batch, Forward, Logs, Term

# What a correction compares, and what it makes of the ratio.
_CORRECTIONS: dict[str, tuple[Callable[..., jax.Array], Callable[..., jax.Array]]] = {
    "token": (token_log_ratio, truncated_weights),
    "sequence": (sequence_log_ratio, partial(truncated_weights, cap=3.0)),
    "icepop": (token_log_ratio, masked_weights),
    "geometric": (sequence_mean_log_ratio, rejection_weights),
}


def forward_of(policy: Policy) -> Callable[[Params, Batch], Forward]:
    """Returns the forward pass that the terms of a loss share."""

    def forward(models: Params, batch: Batch) -> Forward:
        states, routing = hidden_and_routing(policy, models["policy"], batch)
        scores = score_completion_tokens(policy, models["policy"], batch, hidden=states)
        return Forward(states, scores.logprobs, scores.entropy, routing)

    return forward


def policy_terms(policy: Policy, config: LossConfig) -> tuple[Term, ...]:
    """Returns the objective of a preset, and the KL over the whole vocabulary if the run asks for it."""
    if config.divergence == "preset":
        return (objective_term(config),)
    return objective_term(config), full_kl_term(policy, config)


def objective_term(config: LossConfig) -> Term:
    """`Objective.loss` of the preset, with corrected advantages."""
    in_full = config.divergence != "preset"
    objective = config.objective._replace(kl_coef=0.0) if in_full else config.objective

    def term(models: Params, forward: Forward, batch: Batch) -> tuple[jax.Array, Logs]:
        if objective.has_reference and not objective.kl_in_reward and batch.ref_logprobs is None:
            raise UsageError(
                "kl_coef is above 0, but the batch has no ref_logprobs: score it under a reference, or set 0"
            )
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
        # Against the sampler's own numbers where they are known, whatever the ratio of the loss is taken against.
        sampled = old_logprobs if batch.sampler_logprobs is None else batch.sampler_logprobs
        mismatch = jnp.where(mask, fresh - sampled, 0)
        metrics["entropy"] = masked_sum(forward.entropy, mask)
        metrics["sampler_mismatch"] = masked_sum(jnp.exp(jnp.abs(mismatch)), mask)
        return loss, Logs(metrics | more, {"ratio_deviation": jnp.max(jnp.abs(jnp.expm1(mismatch)))})

    return term


def full_kl_term(policy: Policy, config: LossConfig) -> Term:
    """β Σ w KL(π ‖ π_ref), or KL(π_ref ‖ π), over the whole vocabulary. The reference runs again in every update."""

    def term(models: Params, forward: Forward, batch: Batch) -> tuple[jax.Array, Logs]:
        if "reference" not in models:
            raise UsageError(
                f"divergence {config.divergence} needs the parameters of a reference: give them to the loss"
            )
        reference = models["reference"]
        kl = token_kl(
            forward.states,
            policy.unembedding(models["policy"]),
            hidden_states(policy, reference, batch),
            policy.unembedding(reference),
            temperature=batch.temperature[..., None],
            reverse=config.divergence == "reverse",
            softcap=policy.softcap,
            ref_softcap=policy.softcap,
        )
        mask = batch.completion_mask
        return config.kl_coef * weighted_sum(kl, batch.weights, mask), Logs({"kl": masked_sum(kl, mask)})

    return term


def corrected_advantages(
    batch: Batch, logprobs: jax.Array, old_logprobs: jax.Array, config: LossConfig
) -> tuple[jax.Array, dict[str, Any]]:
    """Applies `correction` and `off_policy_threshold` to advantages.

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
