"""Objectives with two completions of each prompt: DPO and its relatives, KTO, and reward models.

A pair is one prompt with two completions, so that the prompt is computed once for both. The completions are chosen and
rejected; for KTO, the second is a completion of another prompt. An objective scores completions, by log-probabilities
(`pair_logprobs`) or by the head of a reward model. Its `Terms` compute the loss from these scores. Log-probabilities
under the reference do not change, so they are computed once, before training.

DPO (2305.18290) and its relatives learn from preferences without a reward model: `preference_objective`. Reward models
(Bradley & Terry 1952; 2203.02155) score completions: `reward_model_objective`. KTO (2402.01306) learns from ratings,
single completions that are good or bad: `kto_objective`. Its loss compares how far the policy has moved towards a
completion with z₀, how far it has moved in general. z₀ is one number for the whole batch. It is computed from the
completions of other prompts in a separate pass without gradient, before the pass with gradient.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from grpo_jax.data.preferences import EncodedPairs
from grpo_jax.data.prompts import pad_prompts
from grpo_jax.data.rows import batches, check_step_size
from grpo_jax.data.types import pad_completions
from grpo_jax.devices import ONE_DEVICE, Devices
from grpo_jax.functional import bradley_terry_loss, kto_kl, kto_loss, token_mean_weights
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.decoder.heads import Headed, judge_texts
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.models.rows.geometry import PromptTokens
from grpo_jax.offline.phase import FitObjective, row_scorer
from grpo_jax.scoring import score_completion_tokens
from grpo_jax.statistics import Calibration, Interval, bootstrap, calibration
from grpo_jax.step import Array, Batch, Logs


class PairBatch(NamedTuple):
    """N prompts of P tokens, with two completions of T tokens each."""

    prompt: PromptTokens  # [N, P]
    completion_ids: Array  # int32 [N, 2, T], chosen and rejected; for KTO, rated and mismatched
    completion_mask: Array  # bool [N, 2, T]; a pair without tokens only fills up the batch
    margin: Array  # float32 [N]; for reward models
    ref_logprobs: Array = None  # float32 [N, 2], sums over tokens in nats under the reference; for policies
    desirable: Array = None  # bool [N]; for ratings
    kl: Array = None  # float32 [N], z₀ in nats, equal for all; for ratings, computed from a whole optimizer batch
    weights: Array = None  # float32 [N], computed from the mask of a whole optimizer batch


# name -> (numbers [N], mask of the prompts that the mean is taken over, bool [N])
PairMetrics = Mapping[str, tuple[Array, Array]]
# (scores [N, G], batch) -> the loss of each prompt [N], metrics
Terms = Callable[[Array, PairBatch], tuple[jax.Array, PairMetrics]]


def pair_objective(
    score: Callable[[Any, PairBatch], jax.Array],
    terms: Terms,
    prepare: Callable[[Any, PairBatch, Callable[..., Any]], PairBatch] | None = None,
) -> FitObjective:
    """Returns the objective that minimises the mean loss of pairs and logs the means of their metrics.

    Args:
      score: (parameters, batch) -> a number for each completion, `[N, G]`.
      terms: Computes the losses and metrics from the scores.
      prepare: See `FitObjective`.
    """

    def loss_fn(params: Any, batch: PairBatch) -> tuple[jax.Array, Logs]:
        losses, metrics = terms(score(params, batch), batch)
        logged = {
            name: (jnp.sum(x * counts * batch.weights), jnp.sum(counts * batch.weights))
            for name, (x, counts) in jax.lax.stop_gradient(metrics).items()
        }
        return jnp.sum(batch.weights * losses), Logs(logged)

    return FitObjective(loss_fn, pair_weights, prepare)


def pair_weights(completion_mask: jax.Array) -> jax.Array:
    """Returns the weight 1/N for each pair of the whole batch, `[N]`, and 0 for rows without a pair."""
    return token_mean_weights(jnp.any(completion_mask, axis=(-2, -1)))


def pair_metrics(metrics: Mapping[str, Array]) -> PairMetrics:
    """Makes metrics that are means over all pairs from numbers `[N]`."""
    return {name: (x, jnp.ones(len(x), bool)) for name, x in metrics.items()}


# ---- batches


def pair_batches(
    pairs: EncodedPairs, num_pairs: int, seed: int, *, name: str = "num_pairs"
) -> Callable[[int], PairBatch]:
    """Makes batches of pairs, with every pair once an epoch, in an order that depends on the seed.

    Args:
      pairs: The M pairs. For ratings, the result of `data.preferences.with_mismatched`.
      num_pairs: The number of pairs in a step, N; at most M.
      seed: The seed of the order of pairs.
      name: The name of the option that sets `num_pairs`.

    Returns:
      A pure function from the step to its batch.

    Raises:
      UsageError: There are fewer than N pairs.
    """
    check_step_size(name, num_pairs, len(pairs.prompts))
    order, shape = batches(len(pairs.prompts), num_pairs, seed), pair_widths(pairs)
    return lambda step: pad_pairs(pairs, order(step), shape)


def pad_pairs(pairs: EncodedPairs, numbers: np.ndarray, shape: tuple[int, int]) -> PairBatch:
    """Returns the pairs with these numbers as arrays, with shape (P, T). Other numbers give empty answers."""
    is_real = numbers < len(pairs.prompts)
    chosen = np.where(is_real, numbers, 0)
    prompts = pad_prompts([pairs.prompts[i] for i in chosen], [{}] * len(chosen), width=shape[0], pad_id=0)
    ids, mask = pad_completions([pairs.answers[i] for i in chosen], shape[1])
    margin = np.array(pairs.margins, np.float32)[chosen]
    desirable = None if pairs.desirable is None else np.array(pairs.desirable)[chosen]
    ref_logprobs = None if pairs.ref_logprobs is None else pairs.ref_logprobs[chosen]
    mask &= is_real[:, None, None]
    return PairBatch(prompts.tokens, ids, mask, margin, ref_logprobs, desirable)


def pair_widths(pairs: EncodedPairs) -> tuple[int, int]:
    """Returns the number of tokens of the longest prompt and of the longest answer."""
    return max(map(len, pairs.prompts)), max(len(ids) for answers in pairs.answers for ids in answers)


def whole_batch(pairs: EncodedPairs) -> PairBatch:
    """Returns all pairs as one batch, to evaluate their scores."""
    return pad_pairs(pairs, np.arange(len(pairs.prompts)), pair_widths(pairs))


# ---- scores


def pair_logprobs(policy: Policy, params: Params, batch: PairBatch) -> jax.Array:
    """Returns the log-probabilities of the G completions of each prompt, summed over tokens, float32 `[N, G]`."""
    temperature = jnp.ones(batch.completion_ids.shape[:2], jnp.float32)
    completions = Batch(batch.prompt, batch.completion_ids, batch.completion_mask, temperature)
    scored = score_completion_tokens(policy, params, completions)
    return jnp.sum(jnp.where(batch.completion_mask, scored.logprobs, 0), axis=-1)


def score_pairs(
    score: Callable[..., jax.Array],
    model: Any,
    params: Any,
    pairs: EncodedPairs,
    *,
    num_pairs: int = 16,
    devices: Devices = ONE_DEVICE,
) -> np.ndarray:
    """Scores both completions of all pairs, `num_pairs` at a time with one compiled program.

    Args:
      score: `pair_logprobs` or `pair_rewards`, which map (model, parameters, batch) to scores `[N, 2]`.
      model: The policy for `pair_logprobs`, or the decoder's configuration for `pair_rewards`.
      params: The parameters of the model.
      pairs: The M pairs.
      num_pairs: The number of pairs scored at once; on a mesh, a multiple of `num_shards`.
      devices: The devices that hold the parameters.

    Returns:
      float32 `[M, 2]`.
    """
    size, widths = len(pairs.prompts), pair_widths(pairs)
    program = row_scorer(score, model, devices=devices)
    pieces = (pad_pairs(pairs, np.arange(at, at + num_pairs), widths) for at in range(0, size, num_pairs))
    return np.concatenate([program(params, piece) for piece in pieces])[:size]


# ---- evaluation


def evaluate_terms(terms: Terms, scores: np.ndarray, batch: PairBatch) -> dict[str, np.ndarray]:
    """Returns "loss" and the metrics by name, each as a float64 array of the pairs that its mean is taken over.

    Args:
      terms: The terms of the objective.
      scores: Scores `[M, 2]` from `score_pairs`.
      batch: The M pairs, with all fields that the terms use.
    """
    losses, metrics = terms(scores, batch)
    values = {name: np.asarray(x, np.float64)[np.asarray(counts)] for name, (x, counts) in metrics.items()}
    return {"loss": np.asarray(losses, np.float64), **values}


def with_intervals(values: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns means by name, with 95% intervals from resampling. Empty arrays are left out."""
    named: dict[str, float] = {}
    for name, x in values.items():
        named |= bootstrap(x, binary=name == "accuracy").named(name) if len(x) else {}
    return named


# ---- DPO and its relatives

# A loss such as `functional.dpo_loss`, which returns the losses [N]. It may have any of the arguments chosen, rejected,
# ref_chosen, ref_rejected (log-probabilities [N], in nats), chosen_length and rejected_length (tokens [N]).
PairLoss = Callable[..., jax.Array]


def preference_objective(policy: Policy, loss: PairLoss) -> FitObjective:
    """Returns the objective of a preference loss such as DPO.

    Its parameters are the policy's. With `lora.Adapted`, only the adapters are trained. Batches come from
    `pair_batches`, with `ref_logprobs` if the loss uses a reference.

    Args:
      policy: The model's functions.
      loss: The loss of pairs with its constants bound, such as `partial(dpo_loss, beta=0.1)`.
    """
    return pair_objective(partial(pair_logprobs, policy), partial(preference_terms, loss))


def needs_reference(loss: PairLoss) -> bool:
    """Returns whether a loss uses the reference."""
    return "ref_chosen" in inspect.signature(loss).parameters


def preference_terms(loss: PairLoss, logprobs: Array, batch: PairBatch) -> tuple[jax.Array, PairMetrics]:
    """Returns the loss and the metrics of each pair.

    `margin` measures how much the policy prefers the chosen completion. It is the difference of log-ratios with a
    reference, or of log-probabilities without one, and per token if the loss normalises by length. `accuracy` is 1 if
    the margin is above 0, and ½ if it is 0. `log_ratio_chosen` and `log_ratio_rejected` are log π/π_ref of whole
    completions, `logprob_chosen` and `logprob_rejected` are log π; all are in nats. The mean of `log_ratio_chosen` may
    well fall, since the loss depends only on a difference.

    Args:
      loss: See `preference_objective`.
      logprobs: The log-probabilities of the chosen and rejected completions, `[N, 2]`.
      batch: The N pairs.
    """
    arguments, lengths = inspect.signature(loss).parameters, batch.completion_mask.sum(-1)
    known = _by_side("{}", logprobs) | _by_side("{}_length", lengths)
    compared, metrics = logprobs, _by_side("logprob_{}", logprobs)
    if needs_reference(loss):
        compared = logprobs - batch.ref_logprobs
        known |= _by_side("ref_{}", batch.ref_logprobs)
        metrics |= _by_side("log_ratio_{}", compared)
    if "rejected_length" in arguments:
        compared = compared / jnp.maximum(lengths, 1)
    margin = compared[:, 0] - compared[:, 1]
    metrics |= {"accuracy": jnp.where(margin == 0, 0.5, margin > 0), "margin": margin}
    losses = loss(**{name: value for name, value in known.items() if name in arguments})
    return losses, pair_metrics(metrics)


def _by_side(name: str, values: Array) -> dict[str, Array]:
    return {name.format(side): values[:, place] for place, side in enumerate(("chosen", "rejected"))}


# ---- reward models


@cache  # so that phases with one shape share their programs
def reward_model_objective(config: ModelConfig, *, center_coef: float = 0.0) -> FitObjective:
    """L = mean over pairs of −log σ(r_chosen − r_rejected − margin).

    Its parameters come from `heads.add_head`. With adapters, only the adapters and the head are trained. Batches come
    from `pair_batches`.

    Args:
      config: The decoder's configuration, from `heads.add_head`.
      center_coef: See `functional.bradley_terry_loss`.
    """
    return pair_objective(partial(pair_rewards, config), partial(reward_terms, center_coef=center_coef))


def pair_rewards(config: ModelConfig, params: Headed, batch: PairBatch) -> jax.Array:
    """Returns the rewards of both completions, float32 `[N, 2]`."""
    return judge_texts(decoder_policy(config), params, batch.prompt, batch.completion_ids, batch.completion_mask)


def reward_terms(rewards: Array, batch: PairBatch, *, center_coef: float = 0.0) -> tuple[jax.Array, PairMetrics]:
    """Returns the loss of each pair, and its accuracy, difference of rewards and mean reward as metrics."""
    chosen, rejected = rewards[:, 0], rewards[:, 1]
    losses = bradley_terry_loss(chosen, rejected, margin=batch.margin, center_coef=center_coef)
    right = jnp.where(chosen == rejected, 0.5, chosen > rejected)
    metrics = {"accuracy": right, "difference": chosen - rejected, "reward": (chosen + rejected) / 2}
    return losses, pair_metrics(metrics)


class PairEvaluation(NamedTuple):
    """The quality of scores as predictions of the chosen answer. Intervals resample pairs."""

    accuracy: Interval  # share of pairs in the right order; a tie counts half
    nll: Interval  # −log σ(r_chosen − r_rejected), nats; equal scores give log 2 = 0.693
    calibration: Calibration  # calibration of the probability that the answer with the higher score was chosen

    def numbers(self) -> dict[str, float]:
        """Returns the numbers by name, for logs and tables."""
        named = self.accuracy.named("accuracy") | self.nll.named("nll")
        return named | {"calibration_error": self.calibration.error}


def evaluate_pairs(pair_scores: np.ndarray, *, bins: int = 10) -> PairEvaluation:
    """Returns the accuracy, likelihood and calibration of scores.

    The prediction is that the answer with the higher score was chosen, with probability σ(|difference|). Calibration
    compares these probabilities with how often the prediction was right.

    Args:
      pair_scores: The scores of the chosen and rejected answers, `[M, 2]`.
      bins: The number of bins of the calibration curve.

    Returns:
      The evaluation.

    Raises:
      UsageError: There are no pairs.
    """
    difference = np.asarray(pair_scores, np.float64) @ np.array([1, -1])
    right = np.where(difference == 0, 0.5, difference > 0)
    curve = calibration(special.expit(np.abs(difference)), right, bins=bins)
    return PairEvaluation(bootstrap(right), bootstrap(-special.log_expit(difference)), curve)


# ---- ratings

# `functional.kto_loss` with its constants bound: (logprobs [N], ref_logprobs [N], desirable [N], *, kl) -> [N]
RatedLoss = Callable[..., jax.Array]


def kto_objective(policy: Policy, loss: RatedLoss = kto_loss, *, estimates_kl: bool = True) -> FitObjective:
    """Returns the objective that minimises the mean loss of rated completions, with z₀ of the whole batch.

    Its parameters are the policy's. With `lora.Adapted`, only the adapters are trained. Batches come from
    `pair_batches`, with `desirable` and the `ref_logprobs` of both completions.

    Args:
      policy: The model's functions.
      loss: The loss of completions with its constants bound, such as `partial(kto_loss, beta=0.5)`.
      estimates_kl: True if z₀ is `kto_kl` of the mismatched completions, as in KTO. Otherwise z₀ is 0, which gives the
        loss of APO-zero (2408.06266) and saves a pass.
    """

    def prepare(params: Params, batch: PairBatch, map_pieces: Callable[..., Any]) -> PairBatch:
        if not estimates_kl:
            return with_reference_point(batch, None)
        mismatched = map_pieces(partial(side_logprobs, policy, 1), params, batch)
        return with_reference_point(batch, mismatched[:, 0])

    return pair_objective(partial(side_logprobs, policy, 0), partial(rated_terms, loss), prepare)


def side_logprobs(policy: Policy, side: int, params: Params, batch: PairBatch) -> jax.Array:
    """Returns the log-probabilities of the rated completions (side 0) or of the mismatched ones (side 1), `[N, 1]`."""
    ids, mask = (x[:, side : side + 1] for x in (batch.completion_ids, batch.completion_mask))
    return pair_logprobs(policy, params, batch._replace(completion_ids=ids, completion_mask=mask))


def with_reference_point(batch: PairBatch, mismatched: Array | None) -> PairBatch:
    """Adds z₀ to a batch.

    Args:
      batch: All completions that share z₀.
      mismatched: The log-probabilities of the mismatched completions, `[N]`. None: z₀ is 0.
    """
    is_real = jnp.any(batch.completion_mask[:, 1], axis=-1)
    kl = 0.0 if mismatched is None else kto_kl(mismatched, batch.ref_logprobs[:, 1], where=is_real)
    return batch._replace(kl=jnp.full(len(batch.desirable), kl, jnp.float32))


def rated_terms(loss: RatedLoss, logprobs: Array, batch: PairBatch) -> tuple[jax.Array, PairMetrics]:
    """Returns the loss and the metrics of each completion.

    `log_ratio_desirable` and `log_ratio_undesirable` are log π/π_ref of whole completions, in nats. `accuracy` is 1 if
    the log-ratio of a desirable completion is above z₀, or that of an undesirable one is below z₀; ½ if it equals z₀.
    `kl` is z₀.

    Args:
      loss: See `kto_objective`.
      logprobs: The log-probabilities of completions, `[N, 1]`. A second column is not read.
      batch: The N completions, with z₀.
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
