"""GRPO and its variants (presets), which compare rewards within groups.

Advantages are computed by `functional` from a scored batch. The terms of the loss are the preset's objective and,
optionally, the KL over the whole vocabulary. PPO and distillation add further terms. Letters as in `types`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax import functional as F
from grpo_jax.config import BY_PART, GRPOConfig, LossConfig
from grpo_jax.functional.numerics import call_with
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.policy import Policy
from grpo_jax.models.rows.pieces import choose_pieces
from grpo_jax.optimizer import learning_rate_schedule, optimizer_of
from grpo_jax.rl.scorers import old_scorer, reference_scorer
from grpo_jax.rl.types import Advantage, Forward, LossTerm, Method, RewardArrays
from grpo_jax.rl.update import make_hooks, objective_term
from grpo_jax.scoring import score_completion_tokens, states_of
from grpo_jax.step import Array, Batch, Logs


def grpo_method(policy: Policy, config: GRPOConfig) -> Method:
    """Returns the method GRPO, or the variant that `config.loss.preset` names. Its models are {"policy": ...}.

    Args:
      policy: The functions of the model.
      config: Supplies the loss, the optimizer, the number of updates and the correction.
    """

    def score(models: Params, batch: Batch) -> dict[str, jax.Array]:
        scores = score_completion_tokens(policy, models["policy"], batch)
        return {"old_logprobs": scores.logprobs, "old_entropy": scores.entropy}

    schedule = learning_rate_schedule(config.optimizer, config.num_updates)
    (initial_extras, hooks), rounded = make_hooks(config), policy.rounded
    terms, summarise = policy_terms(policy, replace(config.loss, correction=config.correction)), lambda metrics: metrics
    if policy.num_experts is not None:
        terms, summarise = (*terms, _routing_term(policy.num_experts)), _busiest_expert
    return Method(
        forward=forward_of(policy),
        terms=terms,
        advantage=make_group_advantage(config.loss),
        aggregation=config.loss.objective.aggregation,
        optimizer=optimizer_of(config.optimizer, schedule),
        schedule=schedule,
        scorers=(*old_scorer(score, config), *reference_scorer(policy, config)),
        initial_extras=initial_extras,
        hooks=hooks,
        rounded=rounded and (lambda trained: rounded(trained["policy"])),
        pieces=partial(choose_pieces, packs=policy.packs),
        summarise=summarise,
    )


# ---- a mixture of experts


def _routing_term(num_experts: int) -> LossTerm:
    """Returns a term of value 0 that logs how tokens are distributed over experts."""
    from grpo_jax.models.decoder.experts import load_metrics  # not loaded for dense models

    def term(models: Params, forward: Forward, batch: Batch) -> tuple[jax.Array, Logs]:
        return jnp.zeros(()), Logs(load_metrics(forward.states.routing, batch.completion_mask, num_experts))

    return term


def _busiest_expert(metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
    from grpo_jax.models.decoder.experts import busiest

    return metrics | {"busiest_expert": busiest(metrics.pop("expert_share"))}


# ---- from rewards to advantages


def make_group_advantage(config: LossConfig) -> Advantage:
    """Returns the advantage function that compares sums, components or parts of rewards within groups."""
    compare = {"components": by_component, **dict.fromkeys(BY_PART, by_part)}.get(config.advantages_of)

    def advantage(rewards: RewardArrays, batch: Batch, kl_coef: Array) -> tuple[Batch, jax.Array, dict[str, Any]]:
        penalty, logs, batch = kl_in_reward(batch, config, kl_coef)
        mask = batch.completion_mask
        if compare is not None:
            advantages = logged = compare(rewards, **config.constants)
        else:
            advantages = config.objective.compute_advantages(
                rewards.rewards, mask, where=rewards.applicable, penalty=penalty
            )
            logged = advantages if advantages.ndim == 2 else masked_mean(advantages, mask, axis=-1)
        return masked(batch._replace(advantages=advantages), config), logged, logs

    return advantage


def by_component(rewards: RewardArrays, **constants: float) -> jax.Array:
    """Returns `gdpo_advantages` of several rewards, `[N, G]`."""
    components = jnp.moveaxis(rewards.components, -1, 0)
    advantages = call_with(F.gdpo_advantages, components, weights=rewards.weights, **constants)
    return jnp.where(jnp.isnan(rewards.rewards), jnp.nan, advantages)  # a reward that is NaN stays visible


def by_part(rewards: RewardArrays, **constants: float) -> jax.Array:
    """Returns `span_advantages` of turns or spans, `[N, G, T]`."""
    ends = ~jnp.isnan(rewards.parts)
    parts = jnp.where(ends, rewards.parts, 0)
    advantages = call_with(F.span_advantages, parts, ends, where=rewards.applicable, **constants)
    is_bad = rewards.applicable & jnp.isnan(rewards.rewards)
    return jnp.where(is_bad[..., None], jnp.nan, advantages)  # a reward that is NaN stays visible


def kl_in_reward(
    batch: Batch, config: LossConfig, kl_coef: Array
) -> tuple[jax.Array | None, dict[str, jax.Array], Batch]:
    """β k1ₜ, the penalty of each token if the KL is in the reward. The loss then needs no reference.

    Args:
      batch: The scored batch, with old and reference log-probabilities.
      config: The loss options of the run.
      kl_coef: The coefficient β of the step.

    Returns:
      The penalty `[N, G, T]`, 0 on masked tokens, or None if there is none; metrics of the KL, k1 per token and per
      completion, in nats; and the batch for the loss.
    """
    if not (config.kl_in_reward and config.objective.has_reference):
        return None, {}, batch
    mask = batch.completion_mask
    k1 = jnp.where(mask, F.kl_k1(batch.old_logprobs, batch.ref_logprobs), 0)
    counts = {"kl": jnp.sum(mask), "kl_completion": jnp.sum(jnp.any(mask, axis=-1))}
    logs = {name: jnp.sum(k1) / jnp.maximum(count, 1) for name, count in counts.items()}
    return kl_coef * k1, logs | {"kl_coef": jnp.asarray(kl_coef)}, batch._replace(ref_logprobs=None)


def masked_mean(values: jax.Array, mask: jax.Array, *, axis: int | None = None) -> jax.Array:
    """Returns the mean over the mask, or 0 if the mask is empty."""
    return jnp.sum(jnp.where(mask, values, 0), axis=axis) / jnp.maximum(jnp.sum(mask, axis=axis), 1)


def masked(batch: Batch, config: LossConfig) -> Batch:
    """Masks truncated completions and tokens of low entropy, if the options ask for it.

    A truncated completion is removed from the mask, so it has no KL either. For a token of low entropy only the
    advantage is set to 0 (2506.01939). The share of tokens to keep is of those that are left in the mask, as in TRL.

    Args:
      batch: The batch with advantages, and with entropies if `top_entropy` is below 1.
      config: The loss options of the run.
    """
    if config.mask_truncated:
        batch = batch._replace(completion_mask=F.keep_completions(batch.completion_mask, ~batch.truncated))
    return batch._replace(advantages=keep_top_entropy(batch.advantages, batch, config))


def keep_top_entropy(advantages: jax.Array, batch: Batch, config: LossConfig) -> jax.Array:
    """Returns advantages that are 0 on tokens of low entropy, if `top_entropy` is below 1."""
    if config.top_entropy == 1:
        return advantages
    keep = F.top_entropy_tokens(batch.old_entropy, batch.completion_mask, share=config.top_entropy)
    return jnp.where(keep, F.per_token(advantages, batch.old_entropy), 0)


# ---- terms of the loss, which are added


def forward_of(policy: Policy) -> Callable[[Params, Batch], Forward]:
    """Returns the forward pass shared by the terms of a loss."""

    def forward(models: Params, batch: Batch) -> Forward:
        states = states_of(policy, models["policy"], batch)
        return Forward(states, *score_completion_tokens(policy, models["policy"], batch, states))

    return forward


def policy_terms(policy: Policy, config: LossConfig) -> tuple[LossTerm, ...]:
    """Returns the objective of a preset, and the KL over the whole vocabulary if the run asks for it."""
    if config.divergence == "preset":
        return (objective_term(config),)
    return objective_term(config), full_kl_term(policy, config)


def full_kl_term(policy: Policy, config: LossConfig) -> LossTerm:
    """β Σ w KL(π ‖ π_ref), or KL(π_ref ‖ π), over the whole vocabulary. The reference runs again in every update."""
    reverse, head = config.divergence == "reverse", policy.head

    def term(models: Params, forward: Forward, batch: Batch) -> tuple[jax.Array, Logs]:
        (unembedding, softcap), (ref_unembedding, _) = head(models["policy"]), head(models["reference"])

        def divergence(states: jax.Array, ref_states: jax.Array, temperature: jax.Array) -> jax.Array:
            both = states, unembedding, ref_states, ref_unembedding
            common: Any = {"temperature": temperature, "softcap": softcap, "ref_softcap": softcap}
            return F.token_kl(*both, reverse=reverse, **common)

        reference = states_of(policy, models["reference"], batch)
        kl, mask = forward.states.map(divergence, reference, batch.temperature), batch.completion_mask
        return config.kl_coef * F.weighted_sum(kl, batch.weights, mask), Logs({"kl": F.masked_sum(kl, mask)})

    return term
