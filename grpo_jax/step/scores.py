"""Forward passes of a model over completions, and the scores of their tokens."""

from functools import partial

import jax
import jax.numpy as jnp

from grpo_jax.functional import TokenLogprobs, token_logprobs
from grpo_jax.models.geometry import TokenStates, rows_of_groups
from grpo_jax.models.policy import Policy
from grpo_jax.models.sharding import AXES, BATCH, mesh_sizes, spread
from grpo_jax.models.transformer import Params
from grpo_jax.step.types import Batch


def score_completion_tokens(
    policy: Policy, params: Params, batch: Batch, states: TokenStates | None = None
) -> TokenLogprobs:
    """Computes log-probabilities and entropies of completion tokens, after the sampler's temperature, `[N, G, T]`.

    Args:
      policy: The functions of the model.
      params: The parameters of the model.
      batch: The batch of completions, or a piece of it. Tokens that are not in the piece get 0.
      states: The result of `states_of`. Default: it is computed.
    """
    states = states or states_of(policy, params, batch)
    return states.map(partial(_token_logprobs, policy, params), batch.completion_ids, batch.temperature)


def states_of(policy: Policy, params: Params, batch: Batch) -> TokenStates:
    """Computes the states of a model that predict the completion tokens of a batch, or of a piece of it."""
    rows = batch.layout or rows_of_groups(batch.prompt, batch.completion_ids)
    return policy.predict(params, rows)


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
