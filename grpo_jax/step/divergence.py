"""The divergence of a policy from another model at each token, over the whole vocabulary or the likeliest tokens.

Letters: V tokens that both models have, D features of the policy, E features of the other model.
"""

from typing import Any

import jax

from grpo_jax import functional as F
from grpo_jax.config import Divergence
from grpo_jax.errors import UsageError
from grpo_jax.step.types import TargetOutputs

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
