"""On-policy distillation: GRPO's loop, with a teacher that judges each token of what the policy samples.

The teacher is a second policy, frozen, of any size that has the policy's tokens. It is run once for each rollout, in
`score`. Of it the update needs hidden states, or k of its likeliest tokens, or one log-probability; never logits
`[N, G, T, V]`. As a `learn.Method` this is GRPO's with the teacher among the frozen parameters, so the loop, the whole
run as one program, and checkpoints are the same.

Letters as in `state`; V tokens that policy and teacher both have, E features of the teacher.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.config import DistillationConfig, GRPOConfig, validate
from grpo_jax.errors import UsageError
from grpo_jax.functional import (
    bucket_logits,
    jsd_full,
    kl_full,
    masked_sum,
    per_token,
    teacher_advantages,
    token_jsd,
    token_kl,
    top_tokens,
    weighted_sum,
)
from grpo_jax.functional.numerics import is_zero, maybe_psum
from grpo_jax.models import lora
from grpo_jax.models.policy import Policy
from grpo_jax.models.transformer import Params
from grpo_jax.runs.pretrained import Loaded
from grpo_jax.tasks.task import Task
from grpo_jax.training.grpo import check_teacher, grpo_loss_fn, grpo_method, make_programs, masked
from grpo_jax.training.learn import Advantages, AxisName, Method
from grpo_jax.training.loop import Programs, check_task, compile_programs
from grpo_jax.training.parallel import devices_of, parts
from grpo_jax.training.rollout import Sampler
from grpo_jax.training.scoring import hidden_and_routing, hidden_states, score_completion_tokens
from grpo_jax.training.state import Array, Batch, RewardArrays, TeacherOutputs
from grpo_jax.training.step import Logs


class Head(NamedTuple):
    """What makes logits of hidden states."""

    unembedding: jax.Array  # [V, D]
    softcap: float | None  # of `Policy`


class WithTeacher(NamedTuple):
    """Parameters of a policy and of its teacher; or of both those that are not trained."""

    policy: Any
    teacher: Params


def split(params: WithTeacher) -> tuple[Params, WithTeacher]:
    """What is trained of the policy, and all that is not."""
    trained, frozen = lora.split(params.policy)
    return trained, WithTeacher(frozen, params.teacher)


def join(trained: Params, frozen: WithTeacher) -> WithTeacher:
    """The parameters that `split` took apart."""
    return WithTeacher(lora.join(trained, frozen.policy), frozen.teacher)


def make_distillation_programs(
    policy: Policy, teacher: Policy, task: Task, config: GRPOConfig, *, sampler: Sampler | None = None
) -> Programs:
    """Checks everything that can be checked, and compiles nothing yet.

    Args:
      policy: the model's functions.
      teacher: those of the teacher.
      task: its tokens.
      config: the run, with a distillation.
      sampler: as in `compile_programs`.

    Returns:
      The functions of GRPO with a teacher, compiled at their first call. They take `WithTeacher` parameters.

    Raises:
      UsageError: one sentence that says what to change.
    """
    check_teacher(config, has_teacher=True)
    validate(config, num_devices=parts(devices_of(config)))
    check_task(task, config)
    check_top_k(config.distillation, task.vocab_size)
    return compile_programs(distillation_method(policy, teacher, config), policy, task, config, sampler=sampler)


def check_top_k(config: DistillationConfig, vocab_size: int) -> None:
    """Refuses as many of the teacher's likeliest tokens as there are tokens.

    Raises:
      UsageError: one sentence that says what to change.
    """
    if config.distillation_top_k >= vocab_size:
        raise UsageError(
            f"distillation_top_k is {config.distillation_top_k}, but the model has {vocab_size} tokens: set it below "
            "that, or to 0 for all"
        )


def programs_with(
    model: Loaded, teacher: Loaded | None, task: Task, config: GRPOConfig, *, sampler: Sampler | None = None
) -> tuple[Programs, Any]:
    """The programs of GRPO, with a teacher if there is one, and the parameters that they start from.

    Args:
      model: that is trained.
      teacher: of it, or None.
      task: its tokens.
      config: the run.
      sampler: as in `compile_programs`.

    Raises:
      UsageError: one sentence that says what to change.
    """
    if teacher is None:
        return make_programs(model.policy, task, config, sampler=sampler), model.params
    programs = make_distillation_programs(model.policy, teacher.policy, task, config, sampler=sampler)
    return programs, WithTeacher(model.params, teacher.params)


def distillation_method(policy: Policy, teacher: Policy, config: GRPOConfig) -> Method:
    """GRPO with a teacher, whose parameters are `WithTeacher`."""
    own, grpo = config.distillation, grpo_method(policy, config)
    policy_loss_fn = grpo_loss_fn(policy, config.loss)

    def advantages(rewards: RewardArrays, batch: Batch, kl_coef: Array, axis_name: AxisName) -> Advantages:
        if is_zero(own.reward_coef):
            zeros = jnp.zeros(rewards.rewards.shape, jnp.float32)
            found = Advantages(masked(batch._replace(advantages=zeros), config.loss, axis_name), zeros, {})
        else:
            found = grpo.advantages(rewards, batch, kl_coef, axis_name)
        return taught_advantages(found, own, axis_name)

    def loss_fn(trained: Params, frozen: WithTeacher, batch: Batch, reference: Params | None) -> tuple[jax.Array, Logs]:
        params = lora.join(trained, frozen.policy)
        if own.distillation == "k1":
            return policy_loss_fn(params, batch, reference)
        hidden, routing = hidden_and_routing(policy, params, batch)
        loss, logs = policy_loss_fn(params, batch, reference, hidden=hidden, routing=routing)
        divergence = token_divergence(
            own,
            hidden,
            Head(policy.unembedding(params), policy.softcap),
            Head(teacher.unembedding(frozen.teacher), teacher.softcap),
            batch.teacher,
            batch.temperature[..., None],
        )
        logs.means["distillation"] = masked_sum(divergence, batch.completion_mask)
        return loss + own.distillation_coef * weighted_sum(divergence, batch.weights, batch.completion_mask), logs

    def of_completions(trained: Params, frozen: WithTeacher, batch: Batch) -> TeacherOutputs:
        size = len(policy.unembedding(lora.join(trained, frozen.policy)))
        return teacher_outputs(teacher, frozen.teacher, own, batch, vocab_size=size)

    return grpo._replace(
        score=lambda trained, frozen, batch: grpo.score(trained, frozen.policy, batch),
        advantages=advantages,
        loss_fn=loss_fn,
        packs=grpo.packs and own.distillation == "k1",
        split=split,
        actor=lambda trained, frozen: lora.join(trained, frozen.policy),
        teacher_outputs=of_completions,
        updated=lambda frozen: frozen.policy,
    )


def teacher_outputs(
    teacher: Policy, params: Params, config: DistillationConfig, batch: Batch, *, vocab_size: int
) -> TeacherOutputs:
    """What a teacher says of completions: as much as the kind of distillation needs.

    Args:
      teacher: its functions.
      params: its parameters.
      config: of the run.
      batch: as sampled.
      vocab_size: tokens of the policy; further ones of the teacher are left out of its likeliest.
    """
    if config.distillation == "k1":
        return TeacherOutputs(logprobs=score_completion_tokens(teacher, params, batch).logprobs)
    hidden = hidden_states(teacher, params, batch)
    head = Head(teacher.unembedding(params), teacher.softcap)
    return outputs_of_states(config, hidden, head, batch.temperature[..., None], vocab_size=vocab_size)


def outputs_of_states(
    config: DistillationConfig, hidden: jax.Array, head: Head, temperature: jax.Array | float, *, vocab_size: int
) -> TeacherOutputs:
    """Of a teacher what `token_divergence` needs: its hidden states, or its likeliest tokens.

    Args:
      config: how it is learned from, other than by k1.
      hidden: of the teacher, `[..., T, E]`.
      head: of the teacher.
      temperature: broadcasts against `[..., T]`.
      vocab_size: as in `teacher_outputs`.
    """
    if not config.distillation_top_k:
        return TeacherOutputs(hidden=hidden)
    unembedding = head.unembedding[:vocab_size]
    ids = top_tokens(hidden, unembedding, config.distillation_top_k)
    logits = bucket_logits(hidden, unembedding, ids, temperature=temperature, softcap=head.softcap)
    return TeacherOutputs(ids=ids, logits=logits)


def taught_advantages(found: Advantages, config: DistillationConfig, axis_name: AxisName) -> Advantages:
    """Advantages weighted by `reward_coef`; for k1 with the teacher's of each token added.

    Args:
      found: of the rewards, with a scored batch.
      config: of the run.
      axis_name: the mapped axis over which prompts are spread, or None.
    """
    batch, coef = found.batch, config.reward_coef
    weighted = batch.advantages if coef == 1 else coef * batch.advantages
    if config.distillation != "k1":
        return found._replace(batch=batch._replace(advantages=weighted))
    # Of the policy before the update, which is the sampler's where it has no pass of its own.
    logprobs = batch.sampler_logprobs if batch.old_logprobs is None else batch.old_logprobs
    assert batch.teacher is not None
    by_token = jnp.where(batch.completion_mask, teacher_advantages(logprobs, batch.teacher.logprobs), 0)
    total, count = jnp.sum(by_token), jnp.sum(batch.completion_mask)
    k1 = -maybe_psum(total, axis_name) / jnp.maximum(maybe_psum(count, axis_name), 1)
    advantages = per_token(weighted, by_token) + config.distillation_coef * by_token
    return found._replace(batch=batch._replace(advantages=advantages), logs=found.logs | {"distillation": k1})


def token_divergence(
    config: DistillationConfig,
    hidden: jax.Array,
    student: Head,
    teacher: Head,
    outputs: TeacherOutputs | None,
    temperature: jax.Array | float,
) -> jax.Array:
    """The divergence of a policy from its teacher at each token, of the kind that the run asks for.

    Tokens that one of them alone has, as the padding of embeddings, are left out of both.

    Args:
      config: of the run.
      hidden: of the policy, `[..., T, D]`.
      student: the policy's.
      teacher: the teacher's.
      outputs: of `teacher_outputs`.
      temperature: of both, broadcasts against `[..., T]`.

    Returns:
      `[..., T]`, in nats.
    """
    assert outputs is not None
    kind, beta, size = config.distillation, config.distillation_beta, min(len(student[0]), len(teacher[0]))
    own = student.unembedding[:size]
    common: Any = {"temperature": temperature, "softcap": student.softcap}
    if config.distillation_top_k:
        logits = bucket_logits(hidden, own, outputs.ids, **common)
        if kind == "jsd":
            return jsd_full(logits, outputs.logits, beta=beta)
        return kl_full(logits, outputs.logits, reverse=kind == "forward_kl")
    theirs = outputs.hidden, teacher.unembedding[:size]
    if kind == "jsd":
        return token_jsd(hidden, own, *theirs, beta=beta, teacher_softcap=teacher.softcap, **common)
    return token_kl(hidden, own, *theirs, reverse=kind == "forward_kl", ref_softcap=teacher.softcap, **common)
