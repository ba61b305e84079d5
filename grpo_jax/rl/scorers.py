"""Scorers: forward passes without gradient over completions, before the update.

They need no rewards, so the devices run them while graders work.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.config import GRPOConfig
from grpo_jax.devices import ONE_DEVICE, Devices, map_rows
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.policy import Policy
from grpo_jax.models.rows.pieces import computed_in_pieces, lengths_of
from grpo_jax.rl.types import Method, Scorer
from grpo_jax.scoring import score_completion_tokens
from grpo_jax.step import Batch


def score_rollout(
    method: Method,
    config: GRPOConfig,
    models: Params,
    batch: Batch,
    *,
    devices: Devices = ONE_DEVICE,
) -> dict[str, Any]:
    """Runs the scorers of a method over a rollout.

    Args:
      method: The method, such as GRPO or PPO.
      config: Supplies the size of the pieces.
      models: Parameters by role, before the update.
      batch: The sampled batch.
      devices: The devices that share the rows.

    Returns:
      Fields of the batch, `[N, G, ...]`.
    """

    def score_rows(models: Params, rows: Batch) -> dict[str, Any]:
        def score_piece(piece: Batch) -> dict[str, Any]:
            return {name: array for scorer in method.scorers for name, array in scorer(models, piece).items()}

        tokens = rows.completion_ids.shape[-1]
        rows = with_ends(rows) if method.scores_ends else rows
        scores = computed_in_pieces(score_piece, rows, method.pieces(rows, piece_tokens=config.piece_tokens))
        fields: dict[str, Any] = jax.tree.map(lambda x: x[:, :, :tokens], scores)
        return fields

    return map_rows(score_rows, devices)(models, batch)


def with_ends(batch: Batch) -> Batch:
    """Adds one token to each completion. The state that predicts it is the one after the last token."""

    def pad(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0), (0, 0), (0, 1), *[(0, 0)] * (x.ndim - 3)])

    ids, support_ids = jax.tree.map(pad, (batch.completion_ids, batch.support_ids))
    return batch._replace(
        completion_ids=ids,
        support_ids=support_ids,
        completion_mask=jnp.arange(ids.shape[-1]) <= lengths_of(batch.completion_mask)[..., None],
    )


def old_scorer(
    score: Callable[[Params, Batch], dict[str, jax.Array]], config: GRPOConfig, values: tuple[str, ...] = ()
) -> tuple[Scorer, ...]:
    """Returns the scorer of the policy before the update, or no scorer if the update does not need it.

    Args:
      score: (models by role, batch) -> fields of the batch, among them `old_logprobs` and `old_entropy`.
      config: Determines if these two are needed.
      values: Further fields that are needed, such as the values of a critic.
    """
    needed = [*values]
    needed += ["old_logprobs"] if needs_old_logprobs(config) else []
    needed += ["old_entropy"] if config.loss.top_entropy < 1 else []

    def scorer(models: Params, batch: Batch) -> dict[str, Any]:
        fields = score(models, batch)
        return {name: fields[name] for name in needed}

    return (scorer,) if needed else ()


def reference_scorer(policy: Policy, config: GRPOConfig) -> tuple[Scorer, ...]:
    """Returns the scorer of the reference, or no scorer if no KL of sampled tokens is used."""

    def scorer(models: Params, batch: Batch) -> dict[str, Any]:
        return {"ref_logprobs": score_completion_tokens(policy, models["reference"], batch).logprobs}

    is_needed = config.loss.objective.has_reference and config.loss.divergence == "preset"
    return (scorer,) if is_needed else ()


# ---- three sources of the old log-probabilities


def needs_old_logprobs(config: GRPOConfig) -> bool:
    """Returns true if old log-probabilities, before the first step on a rollout, need a separate forward pass.

    With one optimizer step per rollout, the old policy is the current policy, and the update uses the current
    log-probabilities without gradient. Several steps need log-probabilities from before the first step, and so does a
    KL in the reward. If the method or the run takes the ratio against the sampler, the sampler's log-probabilities
    serve both purposes.
    """
    objective = config.loss.objective
    has_penalty = objective.has_reference and objective.kl_in_reward
    several_steps = config.optimizer.epochs * config.optimizer.minibatches > 1
    return (several_steps or has_penalty) and not takes_sampler_logprobs(config)


def takes_sampler_logprobs(config: GRPOConfig) -> bool:
    """Returns true if the old log-probabilities are the ones that the sampler reported.

    With staleness an earlier policy sampled, so the ratio includes how far the policy has moved since.
    """
    return config.loss.objective.ratio_to_sampler or config.loss.old_logprobs == "sampler"
