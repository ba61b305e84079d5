"""Supervised training on given completions, with the step of everything else."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.data.packing import Packed
from grpo_jax.devices import Devices, rows_program
from grpo_jax.functional import TokenLogprobs, masked_sum, token_logprobs, token_mean_weights
from grpo_jax.models.layout import rows_of_texts
from grpo_jax.models.policy import Policy
from grpo_jax.models.transformer import Params
from grpo_jax.offline.phase import SupervisedConfig, SupervisedLoss, fit
from grpo_jax.rl.scorers import hidden_states, score_completion_tokens
from grpo_jax.rl.types import Batch, Logs, TrainState
from grpo_jax.runs.folder import RunFolder


def train_sft(
    policy: Policy,
    params: Params,
    batches: Callable[[int], Batch | Packed],
    config: SupervisedConfig,
    run: RunFolder,
    *,
    phase: str,
    evaluate: Callable[[Params], dict[str, float]] | None = None,
) -> TrainState:
    """Maximises the likelihood of completions, continuing from the newest checkpoint of this phase.

    Args:
      policy: the model's functions.
      params: where training starts; of `lora.Adapted` only the adapters are trained.
      batches: step -> batch, a pure function: completions of prompts, where G is 1, or packed rows.
      config: the phase.
      run: where lines and checkpoints go.
      phase: names them.
      evaluate: (all parameters) -> numbers to log, every `config.eval_every` steps.

    Returns:
      The final state, of what `trainable.split` calls trained.

    Raises:
      UsageError: the configuration cannot work.
      FloatingPointError: gradients were not finite too many times in a row.
    """
    loss = SupervisedLoss(sft_loss_fn(policy), token_mean_weights)
    return fit(loss, params, batches, config, run, phase=phase, evaluate=evaluate)


def sft_loss_fn(policy: Policy) -> Callable[[Params, Any], tuple[jax.Array, Logs]]:
    """L = −Σ w log π(oₜ): next-token loss on the completion, none on the prompt."""

    def loss_fn(params: Params, batch: Batch | Packed) -> tuple[jax.Array, Logs]:
        scores = score_tokens(policy, params, predicting_states(policy, params, batch), batch)
        # Where nothing is learned, packed rows have scores of one text's token after another's.
        loss = -jnp.sum(jnp.where(batch.completion_mask, batch.weights * scores.logprobs, 0))
        return loss, Logs({"entropy": masked_sum(scores.entropy, batch.completion_mask)}, {})

    return loss_fn


def predicting_states(policy: Policy, params: Params, batch: Batch | Packed) -> jax.Array:
    """Returns the states that predict each token, `[N, G, T, D]` or `[B, S, D]`: rubbish before a packed text."""
    if not isinstance(batch, Packed):
        return hidden_states(policy, params, batch)
    return policy.states(params, rows_of_texts(batch.ids, batch.texts))[0][:, 0]


def score_tokens(policy: Policy, params: Params, hidden: jax.Array, batch: Batch | Packed) -> TokenLogprobs:
    """Log-probabilities and entropies of tokens, from the states that predict them: `[N, G, T]` or `[B, S]`.

    At a temperature of 1, or that of a batch that was sampled.
    """
    if not isinstance(batch, Packed):
        return score_completion_tokens(policy, params, batch, hidden=hidden)
    return token_logprobs(hidden, policy.unembedding(params), jnp.asarray(batch.ids), softcap=policy.softcap)


def mean_nll(policy: Policy, params: Params, batches: Iterable[Packed], *, devices: Devices = 1) -> float:
    """−mean log π over all learned tokens of some batches, in nats.

    Args:
      policy: the model's functions.
      params: its parameters.
      batches: of one shape, so that one program is compiled.
      devices: where the parameters are; the rows of a batch are a multiple of the `parts` of a mesh.

    Returns:
      The mean.
    """
    totals, tokens = text_nll(policy, params, batches, devices=devices)
    return float(totals.sum() / max(tokens.sum(), 1))


def text_nll(
    policy: Policy, params: Params, batches: Iterable[Packed], *, devices: Devices = 1
) -> tuple[np.ndarray, np.ndarray]:
    """−Σ log π over the learned tokens of each text, in nats, and how many these tokens are.

    Args:
      policy, params, batches, devices: as for `mean_nll`.

    Returns:
      float64 and int `[M]`: row by row, and in a row in the order of its texts.
    """
    totals, tokens = [], []
    for batch in batches:
        nll = np.asarray(_token_nll(policy, devices)(params, batch), np.float64)
        shape = len(batch.texts), int(np.max(batch.texts)) + 1
        place = np.ravel_multi_index((np.arange(shape[0])[:, None], batch.texts), shape).ravel()
        count = np.bincount(place, np.ravel(batch.completion_mask), minlength=shape[0] * shape[1])
        totals.append(np.bincount(place, nll.ravel(), minlength=count.size)[count > 0])
        tokens.append(count[count > 0].astype(int))
    return np.concatenate(totals), np.concatenate(tokens)


@cache
def _token_nll(policy: Policy, devices: Devices) -> Callable[[Params, Packed], np.ndarray]:
    def token_nll(params: Params, batch: Packed) -> jax.Array:
        scores = score_tokens(policy, params, predicting_states(policy, params, batch), batch)
        return -jnp.where(batch.completion_mask, scores.logprobs, 0)

    return rows_program(token_nll, devices=devices)
