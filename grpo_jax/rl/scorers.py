"""Scorers: what the update needs to know of completions from forward passes without gradient.

They need no rewards, so the devices run them while graders work.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from grpo_jax.config import GRPOConfig
from grpo_jax.devices import Devices, map_rows
from grpo_jax.models.policy import Policy
from grpo_jax.models.transformer import Params
from grpo_jax.rl.pieces import computed_in_pieces
from grpo_jax.rl.scoring import score_completion_tokens
from grpo_jax.rl.types import Batch, Method, Scorer
from grpo_jax.rl.update import choose_pieces


class TokenScores(NamedTuple):
    """Scores of completion tokens, from one forward pass."""

    logprobs: jax.Array  # [N, G, T], after the sampler's temperature
    entropy: jax.Array  # [N, G, T], in nats
    values: jax.Array | None = None  # [N, G, T + 1], of a critic


def score_rollout(
    method: Method, config: GRPOConfig, models: Params, batch: Batch, *, devices: Devices = 1
) -> dict[str, Any]:
    """Runs the method's scorers over a rollout.

    Args:
      method: of the run.
      config: the run.
      models: by role, before the update on the batch.
      batch: as sampled.
      devices: that share the rows.

    Returns:
      Fields of the batch, `[N, G, ...]`.
    """

    def score_rows(models: Params, rows: Batch) -> dict[str, Any]:
        def score_piece(piece: Batch) -> dict[str, Any]:
            return {name: array for scorer in method.scorers for name, array in scorer(models, piece).items()}

        return computed_in_pieces(score_piece, rows, choose_pieces(method, config, rows))

    return map_rows(score_rows, devices)(models, batch)


def old_scorer(
    score: Callable[[Params, Batch], TokenScores], config: GRPOConfig, *, values: bool = False
) -> tuple[Scorer, ...]:
    """Returns the scorer of the policy before the update; none if the update needs nothing of it.

    Args:
      score: (models by role, batch) -> scores.
      config: the run, which decides about log-probabilities and entropies.
      values: whether there is a critic, whose values are needed.
    """
    logprobs, entropy = needs_old_logprobs(config), config.loss.top_entropy < 1

    def scorer(models: Params, batch: Batch) -> dict[str, Any]:
        scores = score(models, batch)
        fields = {"old_logprobs": logprobs, "old_entropy": entropy, "old_values": values}
        arrays = scores.logprobs, scores.entropy, scores.values
        return {name: x for (name, needed), x in zip(fields.items(), arrays, strict=True) if needed}

    return (scorer,) if logprobs or entropy or values else ()


def reference_scorer(policy: Policy, config: GRPOConfig) -> tuple[Scorer, ...]:
    """Returns the scorer of the reference; none if the loss has no KL of sampled tokens."""

    def scorer(models: Params, batch: Batch) -> dict[str, Any]:
        return {"ref_logprobs": score_completion_tokens(policy, models["reference"], batch).logprobs}

    is_needed = config.loss.objective.has_reference and config.loss.divergence == "preset"
    return (scorer,) if is_needed else ()


# ---- whose numbers the old log-probabilities are: four cases


def needs_old_logprobs(config: GRPOConfig) -> bool:
    """Returns whether old log-probabilities, those before the first step on a rollout, need a pass of their own.

    With one optimizer step on a rollout, the old policy is the one that is differentiated, and its own numbers without
    gradient serve. Several steps need the numbers from before the first, and a KL in the reward needs them too. A
    method whose ratio is defined against the sampler takes the sampler's numbers for both, and so does a run that asks
    for them.
    """
    objective = config.loss.objective
    has_penalty = objective.has_reference and objective.kl_in_reward
    several_steps = config.optimizer.epochs * config.optimizer.minibatches > 1
    return (several_steps or has_penalty) and not takes_sampler_logprobs(config) and not needs_replay(config)


def takes_sampler_logprobs(config: GRPOConfig) -> bool:
    """Returns whether the log-probabilities that the sampler reported are the old ones."""
    from_sampler = config.loss.old_logprobs == "sampler" and not needs_replay(config)
    return config.loss.objective.ratio_to_sampler or from_sampler


def needs_replay(config: GRPOConfig) -> bool:
    """Returns whether the sampler's program runs again, to give its old log-probabilities.

    Without staleness the policy before the update is the one that sampled, and the sampler has reported them already.
    """
    return config.loss.old_logprobs == "sampler" and config.sampling.staleness > 0
