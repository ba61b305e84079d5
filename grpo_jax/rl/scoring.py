"""Log-probabilities of completions that are written already, whole or packed."""

from functools import partial

import jax
import jax.numpy as jnp

from grpo_jax.functional import TokenLogprobs, token_logprobs
from grpo_jax.models.experts import Routing
from grpo_jax.models.policy import Policy
from grpo_jax.models.sharding import AXES, BATCH, mesh_sizes, spread
from grpo_jax.models.transformer import Params
from grpo_jax.rl.types import Batch


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
    hidden = hidden_states(policy, params, batch) if hidden is None else hidden
    if batch.packed is None:
        return _token_logprobs(policy, params, hidden, batch.completion_ids, batch.temperature[..., None])
    ids, numbers = _packed_ids(batch)
    temperature = _take_tokens(batch.temperature, numbers - 1)
    scores = _token_logprobs(policy, params, hidden, ids, temperature)
    return jax.tree.map(lambda x: unpack_completions(x, batch), scores)


def hidden_states(policy: Policy, params: Params, batch: Batch) -> jax.Array:
    """The hidden states that predict each completion token: `[N, G, T, D]`, or `[N, S, D]` of packed ones."""
    return hidden_and_routing(policy._replace(routed=None), params, batch)[0]


def hidden_and_routing(policy: Policy, params: Params, batch: Batch) -> tuple[jax.Array, Routing | None]:
    """`hidden_states`, and where these went in each layer `[N, G, T, L]`, if the model has experts."""
    states, packed_states, has_routing = policy.hidden, policy.packed_groups, policy.routed is not None
    if policy.routed is not None:
        states, packed_states, _ = policy.routed
    prompts = params, batch.prompt_ids, batch.prompt_mask
    if batch.packed is None:
        computed = states(*prompts, batch.completion_ids)
    else:
        assert packed_states
        computed = packed_states(*prompts, *_packed_ids(batch), batch.completion_ids.shape[-1])
    hidden, routing = computed if has_routing else (computed, None)
    return hidden, jax.tree.map(lambda x: unpack_completions(x, batch), routing)


def unpack_completions(x: jax.Array, batch: Batch) -> jax.Array:
    """What was computed of tokens as `[N, G, T, ...]`: where they are packed it is `[N, S, ...]` before, and 0 is put
    in for all others."""
    if batch.packed is None:
        return x
    n, group_size, size = batch.completion_ids.shape
    whole = jnp.zeros((n, group_size * size, *x.shape[2:]), x.dtype)
    whole = jax.vmap(lambda row, places, x: row.at[places].set(x, mode="drop"))(whole, batch.packed, x)
    return whole.reshape(n, group_size, size, *x.shape[2:])


def _packed_ids(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Of packed completions the tokens, and the numbers of their completions from 1 on; 0 for padding. `[N, S]`."""
    _, group_size, size = batch.completion_ids.shape
    is_token = batch.packed < group_size * size
    ids = jnp.where(is_token, _take_tokens(batch.completion_ids, batch.packed), 0)
    return ids, jnp.where(is_token, batch.packed // size + 1, 0)


def _take_tokens(x: jax.Array, places: jax.Array) -> jax.Array:
    """Elements of each prompt's completions in a row: `[N, ...]`, int `[N, S]` -> `[N, S]`."""
    return jnp.take_along_axis(x.reshape(x.shape[0], -1), places, axis=-1, mode="clip")


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
