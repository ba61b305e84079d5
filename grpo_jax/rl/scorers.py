"""Scorers: forward passes without gradient over completions, before the update.

They need no rewards, so the devices run them while graders work.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from grpo_jax.config import GRPOConfig
from grpo_jax.devices import ONE_DEVICE, Devices, map_rows
from grpo_jax.functional import TokenLogprobs, token_logprobs
from grpo_jax.models.geometry import Rows, rows_of_groups, rows_of_packed_groups
from grpo_jax.models.policy import Policy
from grpo_jax.models.sharding import AXES, BATCH, mesh_sizes, spread
from grpo_jax.models.transformer import Params
from grpo_jax.rl.pieces import choose_pieces, computed_in_pieces
from grpo_jax.rl.types import Batch, Method, Scorer

if TYPE_CHECKING:
    from grpo_jax.models.experts import Routing


def score_rollout(
    method: Method,
    config: GRPOConfig,
    models: Params,
    batch: Batch,
    *,
    devices: Devices = ONE_DEVICE,
    prompt_widths: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Runs the scorers of a method over a rollout.

    Args:
      method: The method, such as GRPO or PPO.
      config: The configuration of the run.
      models: Parameters by role, before the update.
      batch: The sampled batch.
      devices: The devices that share the rows.
      prompt_widths: Widths of prompts, ascending, as in `pieces.choose_pieces`.

    Returns:
      Fields of the batch, `[N, G, ...]`.
    """

    def score_rows(models: Params, rows: Batch) -> dict[str, Any]:
        def score_piece(piece: Batch) -> dict[str, Any]:
            return {name: array for scorer in method.scorers for name, array in scorer(models, piece).items()}

        return computed_in_pieces(score_piece, rows, choose_pieces(method, config, rows, prompt_widths))

    return map_rows(score_rows, devices)(models, batch)


def old_scorer(
    score: Callable[[Params, Batch], tuple[jax.Array, ...]], config: GRPOConfig, *, values: bool = False
) -> tuple[Scorer, ...]:
    """Returns the scorer of the policy before the update, or no scorer if the update does not need it.

    Args:
      score: (models by role, batch) -> log-probabilities and entropies `[N, G, T]`, and values `[N, G, T + 1]` of a
        critic.
      config: The configuration of the run, which determines if log-probabilities and entropies are needed.
      values: True if the values of a critic are needed.
    """
    needed = {
        "old_logprobs": needs_old_logprobs(config),
        "old_entropy": config.loss.top_entropy < 1,
        "old_values": values,
    }

    def scorer(models: Params, batch: Batch) -> dict[str, Any]:
        return {name: x for name, x in zip(needed, score(models, batch), strict=False) if needed[name]}

    return (scorer,) if any(needed.values()) else ()


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


def score_completion_tokens(
    policy: Policy, params: Params, batch: Batch, *, hidden: jax.Array | None = None
) -> TokenLogprobs:
    """Computes log-probabilities and entropies of completion tokens, after the sampler's temperature, `[N, G, T]`.

    Args:
      policy: The functions of the model.
      params: The parameters of the model.
      batch: The batch of completions. With packed completions, tokens that are not in the piece get 0.
      hidden: The result of `hidden_states`. Default: it is computed.
    """
    rows = rows_of(batch)
    hidden = policy.states(params, rows)[0] if hidden is None else hidden
    scores = _token_logprobs(policy, params, hidden, rows.ids, rows.of_completions(batch.temperature))
    return jax.tree.map(rows.unpack, scores)


def rows_of(batch: Batch) -> Rows:
    """Lays out a batch for the decoder."""
    groups = batch.prompt_ids, batch.prompt_mask, batch.completion_ids
    return rows_of_groups(*groups) if batch.packed is None else rows_of_packed_groups(*groups, batch.packed)


def hidden_states(policy: Policy, params: Params, batch: Batch) -> jax.Array:
    """Returns the hidden states that predict each completion token: `[N, G, T, D]`, or `[N, 1, S, D]` if packed."""
    return policy.states(params, rows_of(batch))[0]


def hidden_and_routing(policy: Policy, params: Params, batch: Batch) -> tuple[jax.Array, "Routing | None"]:
    """Returns `hidden_states`, and their routing in each layer, `[N, G, T, L]`, if the model has experts."""
    rows = rows_of(batch)
    hidden, routing = policy.states(params, rows)
    return hidden, jax.tree.map(rows.unpack, routing)


def unpack_completions(x: jax.Array, batch: Batch) -> jax.Array:
    """Arranges values of tokens as `[N, G, T, ...]`. See `Rows.unpack`."""
    return rows_of(batch).unpack(x)


def _token_logprobs(
    policy: Policy, params: Params, hidden: jax.Array, ids: jax.Array, temperature: jax.Array
) -> TokenLogprobs:
    """Computes `token_logprobs`. On a mesh tokens are sharded over all devices, including the tensor axis."""
    scored = partial(token_logprobs, unembedding=policy.unembedding(params), softcap=policy.softcap)
    if mesh_sizes() is None:
        return scored(hidden, ids=ids, temperature=temperature)
    temperature = jnp.broadcast_to(temperature, ids.shape)
    rows = spread((hidden.reshape(-1, hidden.shape[-1]), ids.ravel(), temperature.ravel()), AXES)
    scores = spread(scored(rows[0], ids=rows[1], temperature=rows[2]), AXES)
    return spread(jax.tree.map(lambda x: x.reshape(ids.shape), scores), BATCH)
