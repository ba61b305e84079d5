"""On-policy distillation: a teacher for a method, which scores each token sampled by the policy.

The teacher is a frozen model of any size with the tokenizer of the policy. It runs once for each rollout, as a scorer.
For each token the update needs its hidden state, or its k likeliest tokens, or one log-probability, but never logits
`[N, G, T, V]`. The models are {"policy": ..., "teacher": ...}.

Letters as in `types`, and: V tokens that both policy and teacher have, E features of the teacher.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax import functional as F
from grpo_jax.config import DistillationConfig, GRPOConfig, LossConfig
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.policy import Policy
from grpo_jax.offline.distillation import TargetOutputs, outputs_of_states, token_divergence
from grpo_jax.rl.grpo import keep_top_entropy, masked
from grpo_jax.rl.types import Advantage, Forward, LossTerm, Method, RewardArrays
from grpo_jax.scoring import score_completion_tokens, states_of
from grpo_jax.step import Array, Batch, Logs


def distillation_method(method: Method, policies: Mapping[str, Policy], config: GRPOConfig) -> Method:
    """Returns a method that also learns from a teacher.

    Args:
      method: GRPO or PPO.
      policies: The functions of the models by role: "policy" and "teacher".
      config: Supplies the divergence and its weight, the weight of rewards, and `top_entropy`.
    """
    policy, teacher, options = policies["policy"], policies["teacher"], config.distillation
    head = policy.head

    def scorer(models: Params, batch: Batch) -> dict[str, Any]:
        size = len(head(models["policy"])[0])
        return {"target": teacher_outputs(teacher, models["teacher"], options, batch, vocab_size=size)}

    def without_rewards(rewards: RewardArrays, batch: Batch, kl_coef: Array) -> tuple[Batch, jax.Array, dict[str, Any]]:
        zeros = jnp.zeros(rewards.rewards.shape, jnp.float32)
        return masked(batch._replace(advantages=zeros), config.loss), zeros, {}

    by_token = options.distillation == "k1"
    advantage = method.advantage if config.needs_rewards else without_rewards
    return method._replace(
        scorers=(*method.scorers, scorer),
        advantage=taught_advantage(advantage, options, config.loss),
        terms=method.terms if by_token else (*method.terms, teacher_term(policy, teacher, options)),
    )


def teacher_term(policy: Policy, teacher: Policy, config: DistillationConfig) -> LossTerm:
    """c Σ w D, the divergence of the policy from its teacher (`token_divergence`)."""

    def term(models: Params, forward: Forward, batch: Batch) -> tuple[jax.Array, Logs]:
        heads = policy.head(models["policy"]), teacher.head(models["teacher"])
        compare = partial(token_divergence, config.divergence, heads)
        divergence = forward.states.map(compare, batch.target, batch.temperature)
        loss = config.distillation_coef * F.weighted_sum(divergence, batch.weights, batch.completion_mask)
        return loss, Logs({"distillation": F.masked_sum(divergence, batch.completion_mask)})

    return term


def teacher_outputs(
    teacher: Policy, params: Params, config: DistillationConfig, batch: Batch, *, vocab_size: int
) -> TargetOutputs:
    """Computes the outputs of a teacher that the loss needs, which depend on the kind of distillation.

    Args:
      teacher: The functions of the teacher.
      params: The parameters of the teacher.
      config: The distillation options of the run.
      batch: The sampled batch.
      vocab_size: The number of tokens of the policy. Further tokens of the teacher are excluded from its top k.
    """
    if config.distillation == "k1":
        return TargetOutputs(logprobs=score_completion_tokens(teacher, params, batch).logprobs)
    outputs = partial(outputs_of_states, config.divergence, teacher.head(params), vocab_size=vocab_size)
    return states_of(teacher, params, batch).map(outputs, batch.temperature)


def output_bytes(config: GRPOConfig, teacher: ModelConfig) -> int:
    """Returns the size in bytes of `teacher_outputs` for each token of a rollout.

    Args:
      config: Supplies the divergence.
      teacher: The configuration of the teacher's decoder.
    """
    kind, top_k, _ = config.distillation.divergence
    if kind == "k1":
        return 4
    return 4 * (2 * top_k + 1) if top_k else jnp.dtype(teacher.dtype).itemsize * teacher.hidden_size


def taught_advantage(advantage: Advantage, config: DistillationConfig, loss: LossConfig) -> Advantage:
    """Weighs an advantage function by `reward_coef`, and for k1 adds advantages from the teacher.

    Args:
      advantage: The advantage function of the rewards.
      config: The distillation options of the run.
      loss: The loss options of the run, whose `top_entropy` applies to k1 too.
    """

    def taught(rewards: RewardArrays, scored: Batch, kl_coef: Array) -> tuple[Batch, jax.Array, dict[str, jax.Array]]:
        batch, logged, logs = advantage(rewards, scored, kl_coef)
        weighted = batch.advantages if config.reward_coef == 1 else config.reward_coef * batch.advantages
        if config.distillation != "k1":
            return batch._replace(advantages=weighted), logged, logs
        # Without a separate scoring pass, use the sampler's log-probabilities as those before the update.
        logprobs = batch.sampler_logprobs if batch.old_logprobs is None else batch.old_logprobs
        assert batch.target is not None
        by_token = jnp.where(batch.completion_mask, F.teacher_advantages(logprobs, batch.target.logprobs), 0)
        k1 = -jnp.sum(by_token) / jnp.maximum(jnp.sum(batch.completion_mask), 1)
        learned = keep_top_entropy(by_token, batch, loss)
        advantages = F.per_token(weighted, by_token) + config.distillation_coef * learned
        return batch._replace(advantages=advantages), logged, logs | {"distillation": k1}

    return taught
