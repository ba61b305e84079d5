"""Distillation on given completions: the supervised phase with a teacher beside the tokens that are written.

The teacher is a second policy, frozen, of any size that has the policy's tokens. At each token of a completion the
policy moves towards the teacher's distribution over the whole vocabulary, and by a coefficient towards the token
itself. On-policy distillation, where the policy writes the completions, is `rl.distillation`; divergences are the
same.

The teacher is computed in the same piece of a batch as the policy, so nothing of it is kept longer.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config import DistillationConfig
from grpo_jax.data.packing import Packed
from grpo_jax.devices import Devices, rows_program
from grpo_jax.functional import masked_sum, token_mean_weights
from grpo_jax.models.policy import Policy
from grpo_jax.models.transformer import Params
from grpo_jax.offline.phase import SupervisedConfig, SupervisedLoss, fit
from grpo_jax.offline.sft import predicting_states, score_tokens
from grpo_jax.rl.distillation import Head, outputs_of_states, token_divergence
from grpo_jax.rl.types import Batch, Logs, TrainState
from grpo_jax.runs.folder import RunFolder


class DistillationTarget(NamedTuple):
    """What is learned, and from whom."""

    teacher: Policy
    divergence: DistillationConfig  # its kind, other than k1, and its constants
    nll_coef: float = 0.0  # λ, weight of the NLL of the tokens beside the divergence


def train_distillation(
    policy: Policy,
    params: Params,
    batches: Callable[[int], Batch | Packed],
    config: SupervisedConfig,
    run: RunFolder,
    *,
    target: DistillationTarget,
    phase: str,
    evaluate: Callable[[Params], dict[str, float]] | None = None,
) -> TrainState:
    """Minimises the divergence from a teacher on completions, continuing from the newest checkpoint of this phase.

    Args:
      policy: the model's functions.
      params: {"policy": where training starts, "teacher": ...}; of `lora.Adapted` only the adapters are trained.
      batches: step -> batch, a pure function: completions of prompts, or packed rows.
      config: the phase.
      run: where lines and checkpoints go.
      target: the teacher, and what is learned.
      phase: names lines and checkpoints.
      evaluate: (all parameters) -> numbers to log, every `config.eval_every` steps.

    Returns:
      The final state, of what `trainable.split` calls trained.

    Raises:
      UsageError: the configuration cannot work.
      FloatingPointError: gradients were not finite too many times in a row.
    """
    loss = SupervisedLoss(partial(distillation_loss, policy, target=target), token_mean_weights)
    return fit(loss, params, batches, config, run, phase=phase, evaluate=evaluate)


def distillation_loss(
    policy: Policy, params: Params, batch: Batch | Packed, *, target: DistillationTarget
) -> tuple[jax.Array, Logs]:
    """L = Σ w [D_T − λ log π(oₜ)]; logs the means of divergence, NLL and entropy over tokens."""
    hidden = predicting_states(policy, params["policy"], batch)
    scores = score_tokens(policy, params["policy"], hidden, batch)
    divergence = divergence_of(policy, params, hidden, batch, target=target)
    losses = divergence - target.nll_coef * scores.logprobs
    loss = jnp.sum(jnp.where(batch.completion_mask, batch.weights * losses, 0))
    means = {"distillation": divergence, "nll": -scores.logprobs, "entropy": scores.entropy}
    return loss, Logs({name: masked_sum(x, batch.completion_mask) for name, x in means.items()}, {})


def divergence_of(
    policy: Policy, params: Params, hidden: jax.Array, batch: Batch | Packed, *, target: DistillationTarget
) -> jax.Array:
    """The divergence of the policy from its teacher at each token, in nats, `[N, G, T]` or `[B, S]`.

    Of both at a temperature of 1, or that of a batch that was sampled.

    Args:
      policy: the model's functions.
      params: its parameters and the teacher's.
      hidden: of `predicting_states`.
      batch: what they are of.
      target: the teacher, and what is learned.
    """
    head, teacher = Head(policy.unembedding(params["policy"]), policy.softcap), target.teacher
    theirs = Head(teacher.unembedding(params["teacher"]), teacher.softcap)
    temperature = 1.0 if isinstance(batch, Packed) else batch.temperature[..., None]
    states = jax.lax.stop_gradient(predicting_states(teacher, params["teacher"], batch))
    known = outputs_of_states(target.divergence, states, theirs, temperature, vocab_size=len(head.unembedding))
    return token_divergence(target.divergence, hidden, head, theirs, known, temperature)


def mean_divergence(
    policy: Policy, params: Params, batches: Iterable[Packed], *, target: DistillationTarget, devices: Devices = 1
) -> float:
    """The mean divergence over all learned tokens of some batches, in nats.

    Args:
      policy, target: as in `train_distillation`.
      params: the policy's and the teacher's.
      batches, devices: as for `sft.mean_nll`.
    """
    totals, tokens = [], 0
    for batch in batches:
        found = _token_divergence(policy, target, devices)(params, batch)
        totals.append(np.sum(found, dtype=np.float64))
        tokens += np.sum(batch.completion_mask)
    return float(np.sum(totals) / max(tokens, 1))


@cache
def _token_divergence(
    policy: Policy, target: DistillationTarget, devices: Devices
) -> Callable[[Params, Packed], np.ndarray]:
    def token_divergences(params: Params, batch: Packed) -> jax.Array:
        hidden = predicting_states(policy, params["policy"], batch)
        return jnp.where(batch.completion_mask, divergence_of(policy, params, hidden, batch, target=target), 0)

    return rows_program(token_divergences, devices=devices)
