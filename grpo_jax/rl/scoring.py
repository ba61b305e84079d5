"""Log-probabilities of completions that are written already, whole or packed."""

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from grpo_jax.functional import TokenLogprobs, token_logprobs
from grpo_jax.models.layout import Rows, rows_of_groups, rows_of_packed_groups
from grpo_jax.models.policy import Policy
from grpo_jax.models.sharding import AXES, BATCH, mesh_sizes, spread
from grpo_jax.models.transformer import Params
from grpo_jax.rl.types import Batch

if TYPE_CHECKING:
    from grpo_jax.models.experts import Routing


def score_completion_tokens(
    policy: Policy, params: Params, batch: Batch, *, hidden: jax.Array | None = None
) -> TokenLogprobs:
    """Log-probabilities and entropies of completion tokens, after the sampler's temperature, `[N, G, T]`.

    Args:
      policy: the model's functions.
      params: its parameters.
      batch: completions. Those that are packed get 0 where they are not computed.
      hidden: of `hidden_states`, if they are computed already.
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
    """Returns the states that predict each completion token: `[N, G, T, D]`, or `[N, 1, S, D]` of packed ones."""
    return policy.states(params, rows_of(batch))[0]


def hidden_and_routing(policy: Policy, params: Params, batch: Batch) -> tuple[jax.Array, "Routing | None"]:
    """Returns `hidden_states`, and where these went in each layer `[N, G, T, L]`, if the model has experts."""
    rows = rows_of(batch)
    hidden, routing = policy.states(params, rows)
    return hidden, jax.tree.map(rows.unpack, routing)


def unpack_completions(x: jax.Array, batch: Batch) -> jax.Array:
    """Takes what was computed of tokens to `[N, G, T, ...]`: see `Rows.unpack`."""
    return rows_of(batch).unpack(x)


def _token_logprobs(
    policy: Policy, params: Params, hidden: jax.Array, ids: jax.Array, temperature: jax.Array
) -> TokenLogprobs:
    """`token_logprobs`. On a mesh all devices share out the tokens, those too that share out heads."""
    scored = partial(token_logprobs, unembedding=policy.unembedding(params), softcap=policy.softcap)
    if mesh_sizes() is None:
        return scored(hidden, ids=ids, temperature=temperature)
    temperature = jnp.broadcast_to(temperature, ids.shape)
    rows = spread((hidden.reshape(-1, hidden.shape[-1]), ids.ravel(), temperature.ravel()), AXES)
    scores = spread(scored(rows[0], ids=rows[1], temperature=rows[2]), AXES)
    return spread(jax.tree.map(lambda x: x.reshape(ids.shape), scores), BATCH)
