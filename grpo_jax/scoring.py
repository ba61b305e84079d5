"""Scores of tokens: the log-probabilities that a model gives to completions, and entropies.

Letters: N prompts, G completions of T tokens.
"""

from functools import partial

import jax
import jax.numpy as jnp

from grpo_jax import functional as F
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.params.sharding import AXES, BATCH, mesh_sizes, spread
from grpo_jax.models.policy import Policy
from grpo_jax.models.rows.geometry import TokenStates, rows_of_groups
from grpo_jax.step import Batch


def score_completion_tokens(
    policy: Policy, params: Params, batch: Batch, states: TokenStates | None = None
) -> F.TokenLogprobs:
    """Computes log-probabilities and entropies of completion tokens, after the sampler's temperature, `[N, G, T]`.

    They are normalised over the tokens of `batch.support_ids`, or without these over the whole vocabulary.

    Args:
      policy: The functions of the model.
      params: The parameters of the model.
      batch: The batch of completions, or a piece of it. Tokens that are not in the piece get 0.
      states: The result of `states_of`. Default: it is computed.
    """
    states = states or states_of(policy, params, batch)
    arrays = batch.completion_ids, batch.temperature, batch.support_ids
    return states.map(partial(_token_logprobs, policy, params), *arrays)


def states_of(policy: Policy, params: Params, batch: Batch) -> TokenStates:
    """Computes the states of a model that predict the completion tokens of a batch, or of a piece of it."""
    rows = batch.layout or rows_of_groups(batch.prompt, batch.completion_ids)
    return policy.predict(params, rows)


def _token_logprobs(
    policy: Policy,
    params: Params,
    hidden: jax.Array,
    ids: jax.Array,
    temperature: jax.Array,
    support_ids: jax.Array | None,
) -> F.TokenLogprobs:
    """Computes `token_logprobs`, or `support_logprobs`. On a mesh tokens are sharded over all devices, including the
    tensor axis."""
    unembedding, softcap = policy.unembedding and policy.unembedding(params), policy.softcap

    def scored(
        hidden: jax.Array, ids: jax.Array, temperature: jax.Array, support_ids: jax.Array | None
    ) -> F.TokenLogprobs:
        if support_ids is None:
            return F.token_logprobs(hidden, unembedding, ids, temperature=temperature, softcap=softcap)
        return F.support_logprobs(hidden, unembedding, ids, support_ids, temperature=temperature, softcap=softcap)

    if mesh_sizes() is None:
        return scored(hidden, ids, temperature, support_ids)
    arrays = hidden, ids, jnp.broadcast_to(temperature, ids.shape), support_ids
    rows = spread(jax.tree.map(lambda x: x.reshape(ids.size, *x.shape[ids.ndim :]), arrays), AXES)
    scores = spread(scored(*rows), AXES)
    return spread(F.TokenLogprobs(*(x.reshape(ids.shape) for x in scores)), BATCH)
