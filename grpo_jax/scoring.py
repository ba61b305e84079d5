"""Scores of tokens: log-probabilities that a model gives to completions, and its divergence from another model.

Letters: N prompts of P tokens, G completions of T tokens, K candidate tokens, V tokens that two models have, D features
of the policy, E features of the other model.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax import functional as F
from grpo_jax.config import Divergence
from grpo_jax.errors import UsageError
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.params.sharding import AXES, BATCH, mesh_sizes, spread
from grpo_jax.models.policy import Policy
from grpo_jax.models.rows.geometry import TokenStates, rows_of_groups
from grpo_jax.step import Batch, TargetOutputs


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

    def scored(hidden, ids, temperature, support_ids):
        if support_ids is None:
            return F.token_logprobs(hidden, unembedding, ids, temperature=temperature, softcap=softcap)
        return F.support_logprobs(hidden, unembedding, ids, support_ids, temperature=temperature, softcap=softcap)

    if mesh_sizes() is None:
        return scored(hidden, ids, temperature, support_ids)
    arrays = hidden, ids, jnp.broadcast_to(temperature, ids.shape), support_ids
    rows = spread(jax.tree.map(lambda x: x.reshape(ids.size, *x.shape[ids.ndim :]), arrays), AXES)
    scores = spread(scored(*rows), AXES)
    return spread(jax.tree.map(lambda x: x.reshape(ids.shape), scores), BATCH)


# ---- compared with another model

# The last layer, from hidden states to logits: the unembedding `[V, D]`, and the softcap of `Policy`.
Head = tuple[jax.Array, float | None]


def check_top_k(divergence: Divergence, vocab_size: int) -> None:
    """Checks that `distillation_top_k` is below the number of tokens.

    Raises:
      UsageError: It is too large.
    """
    if divergence.top_k >= vocab_size:
        raise UsageError(
            f"distillation_top_k is {divergence.top_k}, but the model has {vocab_size} tokens: set it below that, or "
            "to 0 for all"
        )


def outputs_of_states(
    divergence: Divergence, head: Head, hidden: jax.Array, temperature: jax.Array | float, *, vocab_size: int
) -> TargetOutputs:
    """Returns the outputs of the other model that `token_divergence` needs: hidden states, or the likeliest tokens.

    Args:
      divergence: The divergence.
      head: The last layer of the other model.
      hidden: Its hidden states, `[..., T, E]`.
      temperature: The sampling temperature, which broadcasts against `[..., T]`.
      vocab_size: The number of tokens of the policy. Further tokens of the other model are excluded from its top k.
    """
    if not divergence.top_k:
        return TargetOutputs(hidden=hidden)
    unembedding, softcap = head[0][:vocab_size], head[1]
    ids = F.top_tokens(hidden, unembedding, divergence.top_k)
    logits = F.bucket_logits(hidden, unembedding, ids, temperature=temperature, softcap=softcap)
    return TargetOutputs(ids=ids, logits=logits)


def token_divergence(
    divergence: Divergence,
    heads: tuple[Head, Head],
    hidden: jax.Array,
    outputs: TargetOutputs,
    temperature: jax.Array | float,
) -> jax.Array:
    """Returns the divergence of a policy from another model at each token.

    Tokens that only one model has, such as padding of embeddings, are excluded from both distributions. If the policy
    samples a padding token that the other model lacks, the other model embeds its own last token instead.

    Args:
      divergence: The divergence.
      heads: The last layers of the policy and of the other model.
      hidden: The hidden states of the policy, `[..., T, D]`.
      outputs: The outputs of the other model, as returned by `outputs_of_states`.
      temperature: The sampling temperature, applied to both models. It broadcasts against `[..., T]`.

    Returns:
      The divergence of each token, `[..., T]`, in nats.
    """
    (own, softcap), (other, ref_softcap) = heads
    (kind, top_k, beta), size = divergence, min(len(own), len(other))
    common: Any = {"temperature": temperature, "softcap": softcap}
    if top_k:
        logits = F.bucket_logits(hidden, own[:size], outputs.ids, **common)
        if kind == "jsd":
            return F.jsd_full(logits, outputs.logits, beta=beta)
        return F.kl_full(logits, outputs.logits, reverse=kind == "forward_kl")
    states = hidden, own[:size], outputs.hidden, other[:size]
    if kind == "jsd":
        return F.token_jsd(*states, beta=beta, ref_softcap=ref_softcap, **common)
    return F.token_kl(*states, reverse=kind == "forward_kl", ref_softcap=ref_softcap, **common)
