"""Supervised training on given completions, with the step of everything else."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.functional import masked_sum, token_mean_weights
from grpo_jax.models.lora import join, split
from grpo_jax.models.policy import Policy
from grpo_jax.models.transformer import Params
from grpo_jax.training.rollout import score
from grpo_jax.training.run import RunFolder
from grpo_jax.training.state import Batch, TrainState
from grpo_jax.training.step import Logs, LossFn
from grpo_jax.training.supervised import SupervisedConfig, fit


def train_sft(
    policy: Policy,
    params: Params,
    batches: Callable[[int], Batch],
    config: SupervisedConfig,
    run: RunFolder,
    *,
    phase: str,
) -> TrainState:
    """Maximises the likelihood of completions, continuing from the newest checkpoint of this phase.

    Args:
      policy: the model's functions.
      params: where training starts; with `lora.Adapted`, the adapters alone are trained.
      batches: step -> batch, a pure function; G is 1.
      config: the phase.
      run: where lines and checkpoints go.
      phase: names them.

    Returns:
      The final state, of what `lora.split` calls trained.

    Raises:
      UsageError: the configuration cannot work.
      FloatingPointError: gradients were not finite too many times in a row.
    """
    trained, frozen = split(params)
    sft_loss = sft_loss_fn(policy)

    def loss_fn(trained: Params, frozen: Any, batch: Batch) -> tuple[jax.Array, Logs]:
        return sft_loss(join(trained, frozen), batch)

    return fit(loss_fn, trained, frozen, batches, config, run, aggregation=token_mean_weights, phase=phase)


def sft_loss_fn(policy: Policy) -> LossFn:
    """L = −Σ w log π(oₜ): next-token loss on the completion, none on the prompt."""

    def loss_fn(params: Params, batch: Batch) -> tuple[jax.Array, Logs]:
        scores = score(policy, params, batch)
        loss = -jnp.sum(batch.weights * scores.logprobs)
        return loss, Logs({"entropy": masked_sum(scores.entropy, batch.completion_mask)}, {})

    return loss_fn
