"""GRPO, or what a preset makes of it: rewards are compared within groups."""

import jax
import jax.numpy as jnp
import optax

from grpo_jax.checks import check_models, validate
from grpo_jax.config import GRPOConfig
from grpo_jax.devices import devices_of, parts
from grpo_jax.models.policy import Policy
from grpo_jax.models.transformer import Params
from grpo_jax.rl.advantages import group_advantage
from grpo_jax.rl.guards import check_task
from grpo_jax.rl.iteration import Programs, compile_programs
from grpo_jax.rl.optimizer import learning_rate_schedule, make_optimizer, moving_parts
from grpo_jax.rl.scorers import TokenScores, old_scorer, reference_scorer, score_completion_tokens
from grpo_jax.rl.source import Sampler
from grpo_jax.rl.terms import forward_of, policy_terms
from grpo_jax.rl.types import Batch, Forward, Logs, Method, Term
from grpo_jax.tasks.task import Task


def make_programs(policy: Policy, task: Task, config: GRPOConfig, *, sampler: Sampler | None = None) -> Programs:
    """Checks everything that can be checked, and makes the programs of GRPO, which are compiled at their first call.

    Args:
      policy: the model's functions.
      task: its tokens.
      config: the run.
      sampler: an engine's; None: the policy's own.

    Raises:
      UsageError: one sentence that says what to change.
    """
    validate(config, num_devices=parts(devices_of(config)))
    check_models(config, ("policy",))
    check_task(task, config)
    return compile_programs(grpo_method(policy, config), policy, task, config, sampler=sampler)


def grpo_method(policy: Policy, config: GRPOConfig) -> Method:
    """Returns GRPO as data. Its models are {"policy": ...}.

    Args:
      policy: the model's functions.
      config: the run; `config.loss.preset` names what differs from GRPO.
    """

    def score(models: Params, batch: Batch) -> TokenScores:
        return TokenScores(*score_completion_tokens(policy, models["policy"], batch))

    schedule = schedule_of(config, config.optimizer.learning_rate)
    extras, after = moving_parts(config)
    terms, summarise = policy_terms(policy, config.loss), lambda metrics: metrics
    if policy.num_experts is not None:
        terms, summarise = (*terms, _routing_term(policy.num_experts)), _busiest_expert
    return Method(
        forward=forward_of(policy),
        terms=terms,
        advantage=group_advantage(config.loss),
        aggregation=config.loss.objective.aggregation,
        optimizer=optimizer_of(config, schedule),
        schedule=schedule,
        scorers=(*old_scorer(score, config), *reference_scorer(policy, config)),
        extras=extras,
        after=after,
        packs=config.packs,
        summarise=summarise,
    )


def schedule_of(config: GRPOConfig, learning_rate: float) -> optax.Schedule:
    """Returns the learning rate of each optimizer step of a run, with this peak."""
    optimizer = config.optimizer
    return learning_rate_schedule(
        learning_rate,
        warmup_steps=optimizer.warmup_steps,
        total_steps=config.steps * optimizer.epochs * optimizer.minibatches,
        decay=optimizer.decay,
    )


def optimizer_of(config: GRPOConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Returns the optimizer of a run."""
    options = config.optimizer
    return make_optimizer(
        schedule,
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm,
        adam_epsilon=options.adam_epsilon,
    )


# ---- a mixture of experts


def _routing_term(num_experts: int) -> Term:
    """Returns a term of 0 that logs how tokens are shared out among experts."""
    from grpo_jax.models.experts import load  # a dense model does not load it

    def term(models: Params, forward: Forward, batch: Batch) -> tuple[jax.Array, Logs]:
        return jnp.zeros(()), Logs(load(forward.routing, batch.completion_mask, num_experts))

    return term


def _busiest_expert(metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
    from grpo_jax.models.experts import busiest

    return metrics | {"busiest_expert": busiest(metrics.pop("expert_share"))}
