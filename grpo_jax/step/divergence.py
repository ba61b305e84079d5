"""The divergence of a policy from its teacher at each token, over the whole vocabulary or the likeliest tokens.

Letters: V tokens that both policy and teacher have, D features of the policy, E features of the teacher.
"""

from typing import Any

import jax

from grpo_jax import functional as F
from grpo_jax.config import DistillationConfig
from grpo_jax.step.types import TeacherOutputs

# The last layer, from hidden states to logits: the unembedding `[V, D]`, and the softcap of `Policy`.
Head = tuple[jax.Array, float | None]


def outputs_of_states(
    config: DistillationConfig, head: Head, hidden: jax.Array, temperature: jax.Array | float, *, vocab_size: int
) -> TeacherOutputs:
    """Returns the teacher's outputs that `token_divergence` needs: hidden states, or the likeliest tokens.

    Args:
      config: The distillation options of the run. The kind is not k1.
      head: The last layer of the teacher.
      hidden: The hidden states of the teacher, `[..., T, E]`.
      temperature: The sampling temperature, which broadcasts against `[..., T]`.
      vocab_size: The number of tokens of the policy, as in `teacher_outputs`.
    """
    if not config.distillation_top_k:
        return TeacherOutputs(hidden=hidden)
    unembedding, softcap = head[0][:vocab_size], head[1]
    ids = F.top_tokens(hidden, unembedding, config.distillation_top_k)
    logits = F.bucket_logits(hidden, unembedding, ids, temperature=temperature, softcap=softcap)
    return TeacherOutputs(ids=ids, logits=logits)


def token_divergence(
    config: DistillationConfig,
    heads: tuple[Head, Head],
    hidden: jax.Array,
    outputs: TeacherOutputs | None,
    temperature: jax.Array | float,
) -> jax.Array:
    """Returns the divergence of a policy from its teacher at each token, of the kind that the options set.

    Tokens that only one model has, such as padding of embeddings, are excluded from both distributions. If the policy
    samples a padding token that its teacher lacks, the teacher embeds its own last token instead.

    Args:
      config: The distillation options of the run.
      heads: The last layers of the policy and of the teacher.
      hidden: The hidden states of the policy, `[..., T, D]`.
      outputs: The outputs of the teacher, as returned by `teacher_outputs`.
      temperature: The sampling temperature, applied to both models. It broadcasts against `[..., T]`.

    Returns:
      The divergence of each token, `[..., T]`, in nats.
    """
    assert outputs is not None
    student, teacher = heads
    kind, beta, size = config.distillation, config.distillation_beta, min(len(student[0]), len(teacher[0]))
    unembedding, ref_softcap = student[0][:size], teacher[1]
    common: Any = {"temperature": temperature, "softcap": student[1]}
    if config.distillation_top_k:
        logits = F.bucket_logits(hidden, unembedding, outputs.ids, **common)
        if kind == "jsd":
            return F.jsd_full(logits, outputs.logits, beta=beta)
        return F.kl_full(logits, outputs.logits, reverse=kind == "forward_kl")
    teacher_head = outputs.hidden, teacher[0][:size]
    if kind == "jsd":
        return F.token_jsd(hidden, unembedding, *teacher_head, beta=beta, ref_softcap=ref_softcap, **common)
    return F.token_kl(
        hidden, unembedding, *teacher_head, reverse=kind == "forward_kl", ref_softcap=ref_softcap, **common
    )
