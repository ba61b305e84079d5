"""Supervised distillation: on given completions, the policy moves towards the distributions of a teacher.

A teacher is a frozen second policy of any size with the same tokens. At each token of a completion the policy moves
towards the teacher's distribution over the vocabulary, and with a coefficient towards the token itself. Teacher and
policy are computed in the same piece of a batch, so that no state of the teacher outlives the piece. For on-policy
distillation, in which the policy samples the completions, see `rl.distillation`; the divergences are the same.

Letters: N prompts, G completions of T tokens, K candidate tokens, V tokens that both models have, D features of the
policy, E features of the teacher.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import jax

from grpo_jax import functional as F
from grpo_jax.config import Divergence, TeacherConfig
from grpo_jax.data.packing import Packed
from grpo_jax.devices import ONE_DEVICE, Devices
from grpo_jax.errors import UsageError
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.policy import Policy
from grpo_jax.models.rows.geometry import TokenStates
from grpo_jax.offline.phase import FitObjective, row_scorer
from grpo_jax.offline.sft import as_completions, sum_texts
from grpo_jax.options import check_ranges
from grpo_jax.scoring import score_completion_tokens, states_of
from grpo_jax.step import Array, Batch, Logs


class TargetOutputs(NamedTuple):
    """Outputs of a model that the policy should match. A field is None if the loss does not need it."""

    logprobs: Array = None  # [N, G, T], log-probabilities of the sampled tokens
    hidden: Array = None  # [N, G, T, E], hidden states
    ids: Array = None  # int32 [N, G, T, K], the likeliest tokens
    logits: Array = None  # [N, G, T, K + 1], logits of these tokens, and one for all other tokens together


# The last layer, from hidden states to logits: the unembedding `[V, D]`, and the softcap of `Policy`.
Head = tuple[jax.Array, float | None]


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
    (unembedding, softcap), (other, ref_softcap) = heads
    (kind, top_k, beta), size = divergence, min(len(unembedding), len(other))
    common: Any = {"temperature": temperature, "softcap": softcap}
    if top_k:
        logits = F.bucket_logits(hidden, unembedding[:size], outputs.ids, **common)
        if kind == "jsd":
            return F.jsd_full(logits, outputs.logits, beta=beta)
        return F.kl_full(logits, outputs.logits, reverse=kind == "forward_kl")
    states = hidden, unembedding[:size], outputs.hidden, other[:size]
    if kind == "jsd":
        return F.token_jsd(*states, beta=beta, ref_softcap=ref_softcap, **common)
    return F.token_kl(*states, reverse=kind == "forward_kl", ref_softcap=ref_softcap, **common)


# ---- texts


def check_teacher_options(options: TeacherConfig, nll_coef: float) -> None:
    """Raises if the options of a phase with a teacher do not work together.

    Args:
      options: The options of the teacher.
      nll_coef: The weight λ.

    Raises:
      UsageError: Options do not work. The message says what to change.
    """
    check_ranges(options)
    for sentence in options.conflicts():
        raise UsageError(sentence)
    kind = options.distillation
    if kind == "k1":
        raise UsageError("distillation k1 is an advantage, and this method has none: take another, or --method grpo")
    if kind != "none" and not options.teacher:
        raise UsageError(f"distillation {kind} needs a teacher: name a model with the same tokenizer as teacher")
    if nll_coef and kind == "none":
        raise UsageError(f"nll_coef is {nll_coef}, but distillation is none: leave it out, or name a teacher")


def divergence_objective(
    policy: Policy, teacher: Policy, divergence: Divergence, nll_coef: float = 0.0
) -> FitObjective:
    """Returns the objective that minimises the divergence from a teacher plus λ times the NLL of completions.

    Its parameters are {"policy": ..., "teacher": ...}, and only the policy's are trained. Batches are those of
    `sft_objective`.

    Args:
      policy: The model's functions.
      teacher: The teacher's functions.
      divergence: The divergence from the teacher.
      nll_coef: λ, the weight of the tokens' NLL. Default: 0.
    """
    return FitObjective(partial(distillation_loss, policy, teacher, divergence, nll_coef), F.token_mean_weights)


def distillation_loss(
    policy: Policy, teacher: Policy, divergence: Divergence, nll_coef: float, params: Params, batch: Batch | Packed
) -> tuple[jax.Array, Logs]:
    """L = Σ w [D_T − λ log π(oₜ)]; logs the means of divergence, NLL and entropy over tokens."""
    batch = as_completions(batch)
    states = states_of(policy, params["policy"], batch)
    scores = score_completion_tokens(policy, params["policy"], batch, states)
    values = divergence_of_states(policy, teacher, divergence, params, batch, states)
    loss = F.weighted_sum(values - nll_coef * scores.logprobs, batch.weights, batch.completion_mask)
    means = {"distillation": values, "nll": -scores.logprobs, "entropy": scores.entropy}
    return loss, Logs({name: F.masked_sum(x, batch.completion_mask) for name, x in means.items()})


def teacher_divergence(
    policy: Policy, teacher: Policy, divergence: Divergence, params: Params, batch: Batch | Packed
) -> jax.Array:
    """Returns the divergence of the policy from its teacher at each token, in nats, `[N, G, T]` or `[B, S]`.

    Args:
      policy, teacher, divergence: See `divergence_objective`.
      params: The parameters of policy and teacher, by role.
      batch: The completions.
    """
    completions = as_completions(batch)
    states = states_of(policy, params["policy"], completions)
    values = divergence_of_states(policy, teacher, divergence, params, completions, states)
    return values.reshape(batch.completion_mask.shape)


def divergence_of_states(
    policy: Policy, teacher: Policy, divergence: Divergence, params: Params, batch: Batch, states: TokenStates
) -> jax.Array:
    """Returns `teacher_divergence`, `[N, G, T]`, from the states of the policy."""
    heads = policy.head(params["policy"]), teacher.head(params["teacher"])

    def compare(hidden: jax.Array, taught: jax.Array, temperature: jax.Array) -> jax.Array:
        outputs = outputs_of_states(divergence, heads[1], taught, temperature, vocab_size=len(heads[0][0]))
        return token_divergence(divergence, heads, hidden, outputs, temperature)

    taught = jax.lax.stop_gradient(states_of(teacher, params["teacher"], batch))
    return states.map(compare, taught, batch.temperature)


def mean_divergence(
    policy: Policy,
    teacher: Policy,
    divergence: Divergence,
    params: Params,
    batches: Iterable[Packed],
    *,
    devices: Devices = ONE_DEVICE,
) -> float:
    """Returns the mean divergence from the teacher over all completion tokens of the batches, in nats.

    Args:
      policy, teacher, divergence: See `divergence_objective`.
      params: The parameters of policy and teacher, by role.
      batches, devices: See `text_nll`.
    """
    score = row_scorer(teacher_divergence, policy, teacher, divergence, devices=devices)
    totals, tokens = sum_texts(score, params, batches)
    return float(totals.sum() / max(tokens.sum(), 1))
