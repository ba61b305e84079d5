"""Policies that learn from ratings, completions that are good or bad without another one beside them: KTO (2402.01306).

The loss compares how far the policy has moved towards a completion with how far it has moved at all, z₀: a number of
the whole batch. It is made of completions of other prompts, in a pass of their own and without gradient, before the
pass that has one. So a batch has pairs: the completion of each prompt, and a mismatched one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.functional import kto_kl, kto_loss
from grpo_jax.models.policy import Policy
from grpo_jax.models.transformer import Params
from grpo_jax.offline.pairs import PairBatch, PairMetrics, pair_logprobs, pair_objective
from grpo_jax.offline.phase import Objective
from grpo_jax.rl.types import Array

# `functional.kto_loss` with its constants bound: (logprobs [N], ref_logprobs [N], desirable [N], *, kl) -> [N]
RatedLoss = Callable[..., jax.Array]


def kto_objective(policy: Policy, loss: RatedLoss = kto_loss, *, estimates_kl: bool = True) -> Objective:
    """Returns the mean loss of rated completions, with z₀ of the whole batch.

    Its parameters are the policy's; of `lora.Adapted` only the adapters are trained. Batches are those of
    `pairs.pair_batches` with `desirable`, and with `ref_logprobs` of both completions.

    Args:
      policy: the model's functions.
      loss: with its constants bound, such as `partial(kto_loss, beta=0.5)`.
      estimates_kl: whether z₀ is `kto_kl` of the mismatched completions, as in KTO. Otherwise it is 0, which makes the
        loss APO-zero's (2408.06266), and saves a pass.
    """

    def prepare(params: Params, batch: PairBatch, map_pieces: Callable[..., Any]) -> PairBatch:
        if not estimates_kl:
            return with_reference_point(batch, None)
        mismatched = map_pieces(partial(side_logprobs, policy, 1), params, batch)
        return with_reference_point(batch, mismatched[:, 0])

    return pair_objective(partial(side_logprobs, policy, 0), partial(rated_terms, loss), prepare)


def side_logprobs(policy: Policy, side: int, params: Params, batch: PairBatch) -> jax.Array:
    """Returns log-probabilities of the completions of the prompts (side 0), or of the mismatched ones (1), `[N, 1]`."""
    ids, mask = (x[:, side : side + 1] for x in (batch.completion_ids, batch.completion_mask))
    return pair_logprobs(policy, params, batch._replace(completion_ids=ids, completion_mask=mask))


def with_reference_point(batch: PairBatch, mismatched: Array | None) -> PairBatch:
    """Adds z₀ to a batch.

    Args:
      batch: all completions that share z₀.
      mismatched: log-probabilities of the mismatched completions, `[N]`; None: z₀ is 0.
    """
    is_real = jnp.any(batch.completion_mask[:, 1], axis=-1)
    kl = 0.0 if mismatched is None else kto_kl(mismatched, batch.ref_logprobs[:, 1], where=is_real)
    return batch._replace(kl=jnp.full(len(batch.desirable), kl, jnp.float32))


def rated_terms(loss: RatedLoss, logprobs: Array, batch: PairBatch) -> tuple[jax.Array, PairMetrics]:
    """Returns the loss of each completion, and what is logged of it.

    `log_ratio_desirable` and `log_ratio_undesirable` are log π/π_ref of whole completions, in nats. `accuracy` is 1
    where a completion is on its side of z₀: its log-ratio is above where it is desirable and below where it is not; ½
    where it is equal. `kl` is z₀.

    Args:
      loss: as in `kto_objective`.
      logprobs: of completions, `[N, 1]`; a second column is not read.
      batch: with z₀.
    """
    losses = loss(logprobs[:, 0], batch.ref_logprobs[:, 0], batch.desirable, kl=batch.kl)
    log_ratio = logprobs[:, 0] - batch.ref_logprobs[:, 0]
    beyond = jnp.where(batch.desirable, log_ratio - batch.kl, batch.kl - log_ratio)
    everyone = jnp.ones_like(batch.desirable)
    return losses, {
        "accuracy": (jnp.where(beyond == 0, 0.5, beyond > 0), everyone),
        "kl": (batch.kl, everyone),
        "log_ratio_desirable": (log_ratio, batch.desirable),
        "log_ratio_undesirable": (log_ratio, ~batch.desirable),
    }
