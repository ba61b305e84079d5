"""Supervised fine-tuning: the policy maximises the likelihood of completions. `offline.distillation` adds a teacher."""

from collections.abc import Callable, Iterable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.data.packing import Packed
from grpo_jax.devices import ONE_DEVICE, Devices
from grpo_jax.functional import masked_sum, token_mean_weights, weighted_sum
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.policy import Policy
from grpo_jax.models.rows.geometry import rows_of_texts
from grpo_jax.offline.phase import FitObjective, row_scorer
from grpo_jax.scoring import score_completion_tokens
from grpo_jax.step import Batch, Logs


def sft_objective(policy: Policy) -> FitObjective:
    """Returns the objective that minimises the NLL of completions.

    Its parameters are the policy's. With `lora.Adapted`, only the adapters are trained. A batch holds prompts with one
    completion each (G is 1), or packed rows.

    Args:
      policy: The model's functions.
    """
    return FitObjective(partial(text_loss, policy), token_mean_weights)


def text_loss(policy: Policy, params: Params, batch: Batch | Packed) -> tuple[jax.Array, Logs]:
    """L = −Σ w log π(oₜ): next-token loss on the completion, none on the prompt."""
    batch = as_completions(batch)
    scores = score_completion_tokens(policy, params, batch)
    loss = weighted_sum(-scores.logprobs, batch.weights, batch.completion_mask)
    return loss, Logs({"entropy": masked_sum(scores.entropy, batch.completion_mask)})


def as_completions(batch: Batch | Packed) -> Batch:
    """Returns packed rows as completions of empty prompts, one a row. The temperature is 1.

    The first token of a text is scored after the end of another text; the mask excludes it.
    """
    if not isinstance(batch, Packed):
        return batch
    ids, mask = (jnp.asarray(x)[:, None] for x in (batch.ids, batch.completion_mask))
    weights = None if batch.weights is None else batch.weights[:, None]
    layout, temperature = rows_of_texts(batch.ids, batch.texts), jnp.ones((len(ids), 1), jnp.float32)
    return Batch(layout.prompt, ids, mask, temperature, weights=weights, layout=layout)


def token_nll(policy: Policy, params: Params, batch: Batch | Packed) -> jax.Array:
    """−log π(oₜ), `[N, G, T]` or `[B, S]`."""
    logprobs = score_completion_tokens(policy, params, as_completions(batch)).logprobs
    return -logprobs.reshape(batch.completion_mask.shape)


# ---- evaluation


def text_nll(
    policy: Policy, params: Params, batches: Iterable[Packed], *, devices: Devices = ONE_DEVICE
) -> tuple[np.ndarray, np.ndarray]:
    """Returns −Σ log π over the completion tokens of each text, in nats, and the number of these tokens.

    Args:
      policy: The model's functions.
      params: The parameters of the policy.
      batches: Batches of one shape, so that one program is compiled.
      devices: The devices that hold the parameters. On a mesh, the rows of a batch must be a multiple of `num_shards`.

    Returns:
      Two arrays `[M]`, float64 and int, row by row and in the order of the texts in a row.
    """
    return sum_texts(row_scorer(token_nll, policy, devices=devices), params, batches)


def sum_texts(
    score: Callable[[Params, Packed], np.ndarray], params: Params, batches: Iterable[Packed]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns sums over the completion tokens of each text, float64 `[M]`, and the numbers of tokens, int `[M]`."""
    totals, tokens = [], []
    for batch in batches:
        values = np.where(batch.completion_mask, score(params, batch), 0).astype(np.float64)
        shape = len(batch.texts), int(np.max(batch.texts)) + 1
        place = np.ravel_multi_index((np.arange(shape[0])[:, None], batch.texts), shape).ravel()
        count = np.bincount(place, np.ravel(batch.completion_mask), minlength=shape[0] * shape[1])
        totals.append(np.bincount(place, values.ravel(), minlength=count.size)[count > 0])
        tokens.append(count[count > 0].astype(int))
    return np.concatenate(totals), np.concatenate(tokens)
