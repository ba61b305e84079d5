"""Policies that learn from preferences without a reward model: DPO (2305.18290) and its relatives.

A pair is one prompt with two completions, the chosen one first: a group of two, so that the prompt is computed once for
both. What the reference gives them does not change, so it is computed once, before training.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.data.preferences import EncodedPairs
from grpo_jax.devices import Devices, rows_program
from grpo_jax.models.policy import Policy
from grpo_jax.models.transformer import Params
from grpo_jax.offline.phase import SupervisedConfig, SupervisedLoss, fit
from grpo_jax.offline.reward_model import PairBatch, in_pieces, pair_weights
from grpo_jax.rl.scorers import score_completion_tokens
from grpo_jax.rl.types import Array, Batch, Logs, TrainState
from grpo_jax.runs.folder import RunFolder
from grpo_jax.statistics import bootstrap

# Such as `functional.dpo_loss`: takes those fields of `PairScores` that it has arguments for, and gives [N].
PairLoss = Callable[..., jax.Array]


class PairScores(NamedTuple):
    """Log-probabilities of N pairs, sums over tokens in nats. The names are those of arguments of losses."""

    chosen: Array  # float32 [N]
    rejected: Array  # float32 [N]
    ref_chosen: Array  # float32 [N], None without a reference
    ref_rejected: Array  # float32 [N], None without a reference
    chosen_length: Array  # int32 [N], tokens
    rejected_length: Array  # int32 [N]


def train_preference(
    policy: Policy,
    params: Params,
    pairs: Callable[[int], PairBatch],
    config: SupervisedConfig,
    run: RunFolder,
    *,
    loss: PairLoss,
    phase: str = "dpo",
    evaluate: Callable[[Params], dict[str, float]] | None = None,
) -> TrainState:
    """Minimises a loss of pairs, continuing from the newest checkpoint of this phase.

    Args:
      policy: the model's functions.
      params: where training starts; of `lora.Adapted` only the adapters are trained.
      pairs: step -> batch, a pure function: `reward_model.pair_batches`.
      config: the phase.
      run: where lines and checkpoints go.
      loss: of pairs, with its constants bound, such as `partial(dpo_loss, beta=0.1)`.
      phase: names lines and checkpoints.
      evaluate: (all parameters) -> numbers to log, every `config.eval_every` steps.

    Returns:
      The final state, of what `trainable.split` calls trained.

    Raises:
      UsageError: the configuration cannot work.
      FloatingPointError: gradients were not finite too many times in a row.
    """
    objective = SupervisedLoss(partial(preference_loss, policy, loss=loss), pair_weights)
    return fit(objective, params, pairs, config, run, phase=phase, evaluate=evaluate)


def preference_loss(policy: Policy, params: Params, batch: PairBatch, *, loss: PairLoss) -> tuple[jax.Array, Logs]:
    """Σ weights · loss of a pair; logs the means of `pair_metrics`."""
    scores = pair_scores(pair_logprobs(policy, params, batch), batch)
    weight = jnp.sum(batch.weights)
    metrics = jax.lax.stop_gradient(pair_metrics(loss, scores))
    logged = {name: (jnp.sum(x * batch.weights), weight) for name, x in metrics.items()}
    return jnp.sum(batch.weights * pair_losses(loss, scores)), Logs(logged, {})


# ---- scores


def pair_logprobs(policy: Policy, params: Params, batch: PairBatch) -> jax.Array:
    """Log-probabilities of chosen and rejected, sums over tokens, float32 `[N, 2]`."""
    return completion_logprobs(policy, params, *batch[:4])


def completion_logprobs(
    policy: Policy,
    params: Params,
    prompt_ids: Array,
    prompt_mask: Array,
    completion_ids: Array,
    completion_mask: Array,
) -> jax.Array:
    """Log-probabilities of G completions of each prompt, sums over tokens, float32 `[N, G]`.

    Args:
      policy: the model's functions.
      params: its parameters.
      prompt_ids, prompt_mask: `[N, P]`, padded on the left.
      completion_ids, completion_mask: `[N, G, T]`.
    """
    temperature = jnp.ones(completion_ids.shape[:2], jnp.float32)
    completions = Batch(prompt_ids, prompt_mask, completion_ids, completion_mask, temperature)
    scored = score_completion_tokens(policy, params, completions)
    return jnp.sum(jnp.where(completion_mask, scored.logprobs, 0), axis=-1)


def pair_scores(logprobs: Array, batch: PairBatch) -> PairScores:
    """What losses look at, from log-probabilities `[N, 2]` and the batch that they are of."""
    lengths = batch.completion_mask.sum(-1)
    chosen, rejected = (None, None) if batch.ref_logprobs is None else jnp.moveaxis(batch.ref_logprobs, -1, 0)
    return PairScores(logprobs[:, 0], logprobs[:, 1], chosen, rejected, lengths[:, 0], lengths[:, 1])


def needs_reference(loss: PairLoss) -> bool:
    """Whether a loss looks at the reference."""
    return "ref_chosen" in inspect.signature(loss).parameters


def pair_losses(loss: PairLoss, scores: PairScores) -> jax.Array:
    """The loss of each pair, `[N]`: it is given what it has arguments for, lengths too where they are optional."""
    known = inspect.signature(loss).parameters
    return loss(**{name: value for name, value in scores._asdict().items() if name in known})


def pair_metrics(loss: PairLoss, scores: PairScores) -> dict[str, Array]:
    """What is logged of each pair, `[N]`.

    `margin` is by how much more the policy has learned to prefer the chosen completion: the difference of log-ratios
    where there is a reference, of log-probabilities where there is none, per token where the loss compares those.
    `accuracy` is 1 where it is above 0, and ½ where it is 0. `log_ratio_chosen` and `log_ratio_rejected` are
    log π/π_ref of the whole completions, `logprob_chosen` and `logprob_rejected` log π; all in nats. The mean of
    `log_ratio_chosen` may well fall: the loss asks for a difference.
    """
    metrics = {"logprob_chosen": scores.chosen, "logprob_rejected": scores.rejected}
    chosen, rejected = scores.chosen, scores.rejected
    if needs_reference(loss):
        chosen, rejected = chosen - scores.ref_chosen, rejected - scores.ref_rejected
        metrics |= {"log_ratio_chosen": chosen, "log_ratio_rejected": rejected}
    if "rejected_length" in inspect.signature(loss).parameters:
        chosen, rejected = (
            x / jnp.maximum(length, 1)
            for x, length in ((chosen, scores.chosen_length), (rejected, scores.rejected_length))
        )
    margin = chosen - rejected
    return {"accuracy": jnp.where(margin == 0, 0.5, margin > 0), "margin": margin, **metrics}


# ---- the reference


def score_preferences(
    policy: Policy, params: Params, pairs: EncodedPairs, *, num_pairs: int = 16, devices: Devices = 1
) -> np.ndarray:
    """Log-probabilities of chosen and rejected, float32 `[M, 2]`, `num_pairs` at a time with one compiled program.

    Args:
      policy, params: the model.
      pairs: M.
      num_pairs: a multiple of the `parts` of a mesh.
      devices: where the parameters are.
    """
    return in_pieces(partial(_pair_logprobs(policy, devices), params), pairs, num_pairs)


@cache
def _pair_logprobs(policy: Policy, devices: Devices) -> Callable[[Params, PairBatch], np.ndarray]:
    return rows_program(partial(pair_logprobs, policy), devices=devices)


# ---- evaluation


def evaluate_preferences(loss: PairLoss, scores: PairScores) -> dict[str, np.ndarray]:
    """`pair_metrics` and `loss` of each pair, float64 `[M]`."""
    values = {"loss": pair_losses(loss, scores), **pair_metrics(loss, scores)}
    return {name: np.asarray(x, np.float64) for name, x in values.items()}


def with_intervals(values: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Means of numbers by name, with 95% intervals from resampling."""
    found: dict[str, float] = {}
    for name, x in values.items():
        found |= bootstrap(x, binary=name == "accuracy").named(name)
    return found
