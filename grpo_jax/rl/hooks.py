"""The reference and the coefficient of its KL: where they come from, and hooks that update them after an iteration."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.config import GRPOConfig
from grpo_jax.functional import adaptive_kl_coef
from grpo_jax.models.transformer import Params
from grpo_jax.rl.types import Hook
from grpo_jax.step.types import TrainState


def with_fixed_reference(models: Params, config: GRPOConfig) -> Params:
    """Adds the frozen role "reference", the initial policy, to a run's models by role, if the reference never moves."""
    if config.reference.ref_sync_steps or not config.loss.objective.has_reference:
        return models
    return models | {"reference": models["policy"]}


def make_hooks(config: GRPOConfig) -> tuple[Callable[[Any], dict[str, Any]], tuple[Hook, ...]]:
    """Returns a function from trained parameters to initial `TrainState.extras`, and the hooks that update these."""
    moves, adapts = config.reference.ref_sync_steps > 0, config.reference.kl_target is not None

    def extras(trained: Any) -> dict[str, Any]:
        # A copy, since the update donates the state.
        reference = {"reference": jax.tree.map(jnp.copy, trained["policy"])} if moves else {}
        return reference | ({"kl_coef": jnp.float32(config.loss.kl_coef)} if adapts else {})

    hooks = (sync_reference(config) if moves else None, adapt_kl_coef(config) if adapts else None)
    return extras, tuple(hook for hook in hooks if hook is not None)


def sync_reference(config: GRPOConfig) -> Hook:
    """θ_ref ← α θ + (1 − α) θ_ref every `ref_sync_steps` iterations. TR-DPO (2404.09656)."""

    def hook(state: TrainState, metrics: Any, step: Any) -> TrainState:
        due = (step + 1) % config.reference.ref_sync_steps == 0
        alpha = jnp.where(due, config.reference.ref_mixup_alpha, 0.0)
        reference = jax.tree.map(
            lambda new, old: (alpha * new + (1 - alpha) * old).astype(old.dtype),
            state.params["policy"],
            state.extras["reference"],
        )
        return state._replace(extras=state.extras | {"reference": reference})

    return hook


def adapt_kl_coef(config: GRPOConfig) -> Hook:
    """Moves β towards `kl_target` (`functional.adaptive_kl_coef`). 1909.08593."""

    target = config.reference.kl_target
    assert target is not None

    def hook(state: TrainState, metrics: Any, step: Any) -> TrainState:
        kl_coef = adaptive_kl_coef(
            state.extras["kl_coef"],
            metrics["kl_completion"],
            target=target,
            num_samples=config.sampling.num_prompts * config.sampling.group_size,
            horizon=config.reference.kl_horizon,
        )
        return state._replace(extras=state.extras | {"kl_coef": kl_coef})

    return hook
