"""Policies that learn from ratings, completions that are good or bad without another one beside them: KTO (2402.01306).

The loss compares how far the policy has moved towards a completion with how far it has moved at all, z₀: a number of
the whole batch. It is made of completions that are given to other prompts, in a pass of their own and without gradient,
before the pass that has one. Each prompt has its own completion and a mismatched one as a group of two. What the
reference gives both does not change, so it is computed once, before training.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.data.preferences import EncodedPairs
from grpo_jax.data.rows import batches
from grpo_jax.errors import UsageError
from grpo_jax.functional import kto_kl, kto_loss
from grpo_jax.models.policy import Policy
from grpo_jax.models.transformer import Params
from grpo_jax.offline.phase import SupervisedConfig, SupervisedLoss, fit
from grpo_jax.offline.preference import completion_logprobs
from grpo_jax.offline.reward_model import pad_pairs, pair_weights, pair_widths
from grpo_jax.rl.types import Array, Logs, TrainState
from grpo_jax.runs.folder import RunFolder

# `functional.kto_loss` with its constants bound: (logprobs [N], ref_logprobs [N], desirable [N], *, kl) -> [N]
RatedLoss = Callable[..., jax.Array]


class RatedBatch(NamedTuple):
    """N rated completions, each beside a mismatched one."""

    prompt_ids: Array  # int32 [N, P], padded on the left
    prompt_mask: Array  # bool [N, P]
    completion_ids: Array  # int32 [N, 2, T], of the prompt, and of another prompt
    completion_mask: Array  # bool [N, 2, T]; without any token nothing was rated, and it only fills up the batch
    desirable: Array  # bool [N]
    ref_logprobs: Array  # float32 [N, 2], sums in nats under the reference
    kl: Array = None  # float32 [N], z₀ in nats, the same of all; made from a whole optimizer batch
    weights: Array = None  # float32 [N], likewise


def train_kto(
    policy: Policy,
    params: Params,
    ratings: Callable[[int], RatedBatch],
    config: SupervisedConfig,
    run: RunFolder,
    *,
    loss: RatedLoss = kto_loss,
    estimates_kl: bool = True,
    phase: str = "kto",
    evaluate: Callable[[Params], dict[str, float]] | None = None,
) -> TrainState:
    """Minimises KTO's loss of rated completions, continuing from the newest checkpoint of this phase.

    Args:
      policy: the model's functions.
      params: where training starts; of `lora.Adapted` only the adapters are trained.
      ratings: step -> batch, a pure function: `rated_batches`.
      config: the phase.
      run: where lines and checkpoints go.
      loss: with its constants bound, such as `partial(kto_loss, beta=0.5)`.
      estimates_kl: as in `kto_objective`.
      phase: names lines and checkpoints.
      evaluate: (all parameters) -> numbers to log, every `config.eval_every` steps.

    Returns:
      The final state, of what `trainable.split` calls trained.

    Raises:
      UsageError: the configuration cannot work.
      FloatingPointError: gradients were not finite too many times in a row.
    """
    objective = kto_objective(policy, loss, estimates_kl=estimates_kl)
    return fit(objective, params, ratings, config, run, phase=phase, evaluate=evaluate)


def kto_objective(policy: Policy, loss: RatedLoss = kto_loss, *, estimates_kl: bool = True) -> SupervisedLoss:
    """The mean loss of rated completions, with z₀ of the whole batch.

    Args:
      policy: the model's functions.
      loss: as in `train_kto`.
      estimates_kl: whether z₀ is `kto_kl` of the mismatched completions, as in KTO. Otherwise it is 0, which makes the
        loss APO-zero's (2408.06266), and saves a pass.
    """

    def prepare(params: Params, batch: RatedBatch, map_pieces: Callable[..., Any]) -> RatedBatch:
        if not estimates_kl:
            return batch._replace(kl=jnp.zeros(len(batch.desirable)))
        logprobs = map_pieces(partial(_logprobs, policy, side=1), params, batch)
        is_real = jnp.any(batch.completion_mask[:, 1], axis=-1)
        kl = kto_kl(logprobs[:, 0], batch.ref_logprobs[:, 1], where=is_real)
        return batch._replace(kl=jnp.full(len(batch.desirable), kl))

    return SupervisedLoss(partial(rated_loss, policy, loss=loss), pair_weights, prepare=prepare)


def rated_loss(
    policy: Policy, params: Params, batch: RatedBatch, *, loss: RatedLoss = kto_loss
) -> tuple[jax.Array, Logs]:
    """Σ weights · loss of a completion; logs `rated_metrics`."""
    logprobs, ref_logprobs = _logprobs(policy, params, batch, side=0)[:, 0], batch.ref_logprobs[:, 0]
    losses = loss(logprobs, ref_logprobs, batch.desirable, kl=batch.kl)
    log_ratio = jax.lax.stop_gradient(logprobs) - ref_logprobs
    metrics = rated_metrics(log_ratio, batch.desirable, batch.kl)
    logged = {
        name: (jnp.sum(x * counts * batch.weights), jnp.sum(counts * batch.weights))
        for name, (x, counts) in metrics.items()
    }
    return jnp.sum(batch.weights * losses), Logs(logged, {})


def rated_metrics(log_ratio: Array, desirable: Array, kl: Array) -> dict[str, tuple[Array, Array]]:
    """What is logged of rated completions: numbers `[N]`, and which of the completions each is the mean of, `[N]`.

    `log_ratio_desirable` and `log_ratio_undesirable` are log π/π_ref of whole completions, in nats. `accuracy` is 1
    where a completion is on its side of z₀: its log-ratio is above where it is desirable and below where it is not; ½
    where it is equal. `kl` is z₀.
    """
    beyond = jnp.where(desirable, log_ratio - kl, kl - log_ratio)
    everyone = jnp.ones_like(desirable)
    return {
        "accuracy": (jnp.where(beyond == 0, 0.5, beyond > 0), everyone),
        "kl": (kl, everyone),
        "log_ratio_desirable": (log_ratio, desirable),
        "log_ratio_undesirable": (log_ratio, ~desirable),
    }


def _logprobs(policy: Policy, params: Params, batch: RatedBatch, *, side: int) -> jax.Array:
    """Log-probabilities of the prompts' own completions (0) or of the mismatched ones (1), `[N, 1]`."""
    ids, mask = (x[:, side : side + 1] for x in (batch.completion_ids, batch.completion_mask))
    return completion_logprobs(policy, params, batch.prompt_ids, batch.prompt_mask, ids, mask)


def rated_batches(
    pairs: EncodedPairs, desirable: np.ndarray, ref_logprobs: np.ndarray, num_completions: int, seed: int
) -> Callable[[int], RatedBatch]:
    """Every rated completion once an epoch, in an order that is a function of the seed.

    Args:
      pairs: M, of `ratings.with_mismatched`.
      desirable: bool `[M]`.
      ref_logprobs: float32 `[M, 2]`, of `score_preferences` of these pairs.
      num_completions: N, at most M.
      seed: of the order.

    Returns:
      A pure function from the step to a batch.

    Raises:
      UsageError: there are fewer completions.
    """
    size, desirable = len(pairs.prompts), np.asarray(desirable, bool)
    if not 1 <= num_completions <= size:
        raise UsageError(f"num_completions is {num_completions}, but there are {size} completions: take 1 to that many")
    order, widths = batches(size, num_completions, seed), pair_widths(pairs)

    def batch(step: int) -> RatedBatch:
        numbers = order(step)
        return RatedBatch(*pad_pairs(pairs, numbers, *widths)[:4], desirable[numbers], ref_logprobs[numbers])

    return batch


def evaluate_ratings(
    loss: RatedLoss, log_ratios: np.ndarray, desirable: np.ndarray, *, estimates_kl: bool = True
) -> dict[str, np.ndarray]:
    """What `rated_loss` logs, and `loss`, of each completion that it is the mean of.

    Args:
      loss: as in `train_kto`.
      log_ratios: float32 `[M, 2]`, log π/π_ref of completions and of the mismatched ones.
      desirable: bool `[M]`.
      estimates_kl: as in `kto_objective`; z₀ is of all M.

    Returns:
      float64 arrays; `kl` is `[1]`.
    """
    own, other = np.moveaxis(np.asarray(log_ratios), -1, 0)
    kl = kto_kl(other, np.zeros_like(other)) if estimates_kl else jnp.zeros(())
    losses = loss(own, np.zeros_like(own), desirable, kl=kl)
    metrics = rated_metrics(own, desirable, jnp.full(len(own), kl))
    found = {name: np.asarray(x, np.float64)[np.asarray(counts)] for name, (x, counts) in metrics.items()}
    return {"loss": np.asarray(losses, np.float64), **found, "kl": np.asarray(kl, np.float64)[None]}
