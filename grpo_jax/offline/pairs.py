"""Two completions of each prompt: objectives of DPO and its relatives, KTO and reward models, and what they share.

A pair is one prompt with two completions, so that the prompt is computed once for both. They are a chosen and a
rejected one, or for KTO a rated one and one of another prompt. An objective scores completions, as log-probabilities
(`pair_logprobs`) or by the head of a reward model, and its `Terms` say what the scores of a batch cost. What a
reference gives a completion does not change, so it is computed once, before training.

DPO (2305.18290) and its relatives learn from preferences without a reward model: `preference_objective`. Reward models
(Bradley & Terry 1952; 2203.02155) score completions: `reward_model_objective`. KTO (2402.01306) learns from ratings,
completions that are good or bad without another one beside them: `kto_objective`. Its loss compares how far the policy
has moved towards a completion with how far it has moved at all, z₀: a number of the whole batch. It is made of
completions of other prompts, in a pass of their own and without gradient, before the pass that has one.
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
from grpo_jax.data.rows import batches
from grpo_jax.data.types import pad_completions, pad_prompts
from grpo_jax.devices import Devices
from grpo_jax.errors import UsageError
from grpo_jax.functional import bradley_terry_loss, kto_kl, kto_loss, token_mean_weights
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.heads import Headed, scores
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.models.transformer import Params
from grpo_jax.offline.phase import Objective, row_scorer
from grpo_jax.rl.scorers import score_completion_tokens
from grpo_jax.rl.types import Array, Batch, Logs
from grpo_jax.statistics import Calibration, Interval, bootstrap, calibration


class PairBatch(NamedTuple):
    """N prompts of P tokens, with two completions of T tokens each."""

    prompt_ids: Array  # int32 [N, P], padded on the left
    prompt_mask: Array  # bool [N, P]
    completion_ids: Array  # int32 [N, 2, T], chosen and rejected; or of the prompt and of another prompt
    completion_mask: Array  # bool [N, 2, T]; without any token it is no pair, and only fills up the batch
    margin: Array  # float32 [N]; of reward models
    ref_logprobs: Array = None  # float32 [N, 2], sums in nats under a reference; of policies
    desirable: Array = None  # bool [N]; of ratings
    kl: Array = None  # float32 [N], z₀ in nats, the same of all; of ratings, made from a whole optimizer batch
    weights: Array = None  # float32 [N], made from the mask of a whole optimizer batch


# name -> (numbers [N], which of the prompts the metric is the mean of, bool [N])
PairMetrics = Mapping[str, tuple[Array, Array]]
# (scores [N, G], batch) -> the loss of each prompt [N], metrics
Terms = Callable[[Array, PairBatch], tuple[jax.Array, PairMetrics]]


def pair_objective(
    score: Callable[[Any, PairBatch], jax.Array],
    terms: Terms,
    prepare: Callable[[Any, PairBatch, Callable[..., Any]], PairBatch] | None = None,
) -> Objective:
    """Returns the mean loss of pairs, which logs the means of their metrics.

    Args:
      score: (parameters, batch) -> a number for each completion, `[N, G]`.
      terms: what the scores cost.
      prepare: as in `Objective`.
    """

    def loss_fn(params: Any, batch: PairBatch) -> tuple[jax.Array, Logs]:
        losses, metrics = terms(score(params, batch), batch)
        logged = {
            name: (jnp.sum(x * counts * batch.weights), jnp.sum(counts * batch.weights))
            for name, (x, counts) in jax.lax.stop_gradient(metrics).items()
        }
        return jnp.sum(batch.weights * losses), Logs(logged)

    return Objective(loss_fn, pair_weights, prepare)


def pair_weights(completion_mask: jax.Array) -> jax.Array:
    """Returns 1/N for each pair of the whole batch, `[N]`; 0 where there is no pair."""
    return token_mean_weights(jnp.any(completion_mask, axis=(-2, -1)))


def of_every_pair(metrics: Mapping[str, Array]) -> PairMetrics:
    """Returns metrics that are means over all pairs, from numbers `[N]`."""
    return {name: (x, jnp.ones(len(x), bool)) for name, x in metrics.items()}


# ---- batches


def pair_batches(
    pairs: EncodedPairs,
    num_pairs: int,
    seed: int,
    *,
    ref_logprobs: np.ndarray | None = None,
    widths: tuple[int, int] | None = None,
    fills_up: bool = False,
) -> Callable[[int], PairBatch]:
    """Makes batches of pairs: every pair once an epoch, in an order that is a function of the seed.

    Args:
      pairs: M; of ratings those of `data.preferences.with_mismatched`.
      num_pairs: N, at most M unless `fills_up`.
      seed: of the order.
      ref_logprobs: float32 `[M, 2]`, of `score_pairs`; None: no reference.
      widths: P and T, so that several sets of pairs have one shape; None: of the longest prompt and answer.
      fills_up: fill a batch of fewer pairs than N with empty ones, which have no weight.

    Returns:
      A pure function from the step to a batch.

    Raises:
      UsageError: there are fewer pairs, or ref_logprobs are of another number of them.
    """
    size = len(pairs.prompts)
    if ref_logprobs is not None and ref_logprobs.shape != (size, 2):
        raise UsageError(
            f"ref_logprobs are {list(ref_logprobs.shape)}, and there are {size} pairs: give two numbers for each pair"
        )
    count = min(num_pairs, size) if fills_up else num_pairs
    if not 1 <= count <= size:
        raise UsageError(f"num_pairs is {num_pairs}, but there are {size} pairs: take 1 to that many")
    order, shape = batches(size, count, seed), widths or pair_widths(pairs)

    def batch(step: int) -> PairBatch:
        numbers = np.concatenate([order(step), np.arange(count, num_pairs)])  # there are no pairs from count on
        padded = pad_pairs(pairs, numbers, *shape)
        return padded if ref_logprobs is None else padded._replace(ref_logprobs=ref_logprobs[numbers])

    return batch


def pad_pairs(pairs: EncodedPairs, numbers: np.ndarray, prompt_width: int, width: int) -> PairBatch:
    """Returns the pairs with these numbers as arrays. A number beyond the last gets empty answers."""
    is_real = numbers < len(pairs.prompts)
    chosen = np.where(is_real, numbers, 0)
    prompts = pad_prompts([pairs.prompts[i] for i in chosen], [{}] * len(chosen), width=prompt_width, pad_id=0)
    ids, mask = pad_completions([pairs.answers[i] for i in chosen], width)
    margin = np.array(pairs.margins, np.float32)[chosen]
    desirable = None if pairs.desirable is None else np.array(pairs.desirable)[chosen]
    mask &= is_real[:, None, None]
    return PairBatch(prompts.ids, prompts.mask, ids, mask, margin, desirable=desirable)


def pair_widths(pairs: EncodedPairs) -> tuple[int, int]:
    """Returns the tokens of the longest prompt, and of the longest answer."""
    return max(map(len, pairs.prompts)), max(len(ids) for answers in pairs.answers for ids in answers)


def whole_batch(pairs: EncodedPairs) -> PairBatch:
    """Returns all pairs as one batch, for an evaluation of their scores."""
    return pad_pairs(pairs, np.arange(len(pairs.prompts)), *pair_widths(pairs))


# ---- scores


def pair_logprobs(policy: Policy, params: Params, batch: PairBatch) -> jax.Array:
    """Returns log-probabilities of the G completions of each prompt, sums over tokens, float32 `[N, G]`."""
    temperature = jnp.ones(batch.completion_ids.shape[:2], jnp.float32)
    scored = score_completion_tokens(policy, params, Batch(*batch[:4], temperature))
    return jnp.sum(jnp.where(batch.completion_mask, scored.logprobs, 0), axis=-1)


def score_pairs(
    score: Callable[..., jax.Array],
    model: Any,
    params: Any,
    pairs: EncodedPairs,
    *,
    num_pairs: int = 16,
    devices: Devices = 1,
) -> np.ndarray:
    """Scores both completions of all pairs, `num_pairs` at a time with one compiled program.

    Args:
      score: (model, parameters, batch) -> `[N, 2]`: `pair_logprobs` or `reward_model.pair_rewards`.
      model: the policy of the one, or the decoder's shape of the other.
      params: its parameters.
      pairs: M.
      num_pairs: a multiple of the `parts` of a mesh.
      devices: where the parameters are.

    Returns:
      float32 `[M, 2]`.
    """
    size, widths = len(pairs.prompts), pair_widths(pairs)
    program = row_scorer(score, model, devices=devices)
    pieces = (pad_pairs(pairs, np.arange(at, at + num_pairs), *widths) for at in range(0, size, num_pairs))
    return np.concatenate([program(params, piece) for piece in pieces])[:size]


# ---- evaluation


def evaluate_terms(terms: Terms, scores: np.ndarray, batch: PairBatch) -> dict[str, np.ndarray]:
    """Returns "loss" and the metrics of each pair that they are the mean of, float64 arrays.

    Args:
      terms: of the objective.
      scores: `[M, 2]`, of `score_pairs`.
      batch: the M pairs, with all that the terms look at.
    """
    losses, metrics = terms(scores, batch)
    values = {name: np.asarray(x, np.float64)[np.asarray(counts)] for name, (x, counts) in metrics.items()}
    return {"loss": np.asarray(losses, np.float64), **values}


def with_intervals(values: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Means of numbers by name, with 95% intervals from resampling; nothing where there are no numbers."""
    named: dict[str, float] = {}
    for name, x in values.items():
        named |= bootstrap(x, binary=name == "accuracy").named(name) if len(x) else {}
    return named


# ---- DPO and its relatives

# Such as `functional.dpo_loss`. It gets those of chosen, rejected, ref_chosen, ref_rejected (log-probabilities [N], in
# nats), chosen_length and rejected_length (tokens [N]) that it has arguments for, and returns the losses [N]
PairLoss = Callable[..., jax.Array]


def preference_objective(policy: Policy, loss: PairLoss) -> Objective:
    """Returns a loss of pairs, such as DPO's.

    Its parameters are the policy's; of `lora.Adapted` only the adapters are trained. Batches are those of
    `pair_batches`, with `ref_logprobs` if the loss looks at a reference.

    Args:
      policy: the model's functions.
      loss: of pairs, with its constants bound, such as `partial(dpo_loss, beta=0.1)`.
    """
    return pair_objective(partial(pair_logprobs, policy), partial(preference_terms, loss))


def needs_reference(loss: PairLoss) -> bool:
    """Returns whether a loss looks at the reference."""
    return "ref_chosen" in inspect.signature(loss).parameters


def preference_terms(loss: PairLoss, logprobs: Array, batch: PairBatch) -> tuple[jax.Array, PairMetrics]:
    """Returns the loss of each pair, and what is logged of it.

    `margin` is by how much more the policy has learned to prefer the chosen completion: the difference of log-ratios
    where there is a reference, of log-probabilities where there is none, per token where the loss compares those.
    `accuracy` is 1 where it is above 0, and ½ where it is 0. `log_ratio_chosen` and `log_ratio_rejected` are
    log π/π_ref of the whole completions, `logprob_chosen` and `logprob_rejected` log π; all in nats. The mean of
    `log_ratio_chosen` may well fall: the loss asks for a difference.

    Args:
      loss: as in `preference_objective`.
      logprobs: of chosen and rejected, `[N, 2]`.
      batch: of the pairs.
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
    return losses, of_every_pair(metrics)


def _by_side(name: str, values: Array) -> dict[str, Array]:
    return {name.format(side): values[:, place] for place, side in enumerate(("chosen", "rejected"))}


# ---- reward models


@cache  # so that phases with one shape share their programs
def reward_model_objective(config: ModelConfig, *, center_coef: float = 0.0) -> Objective:
    """−log σ(r_chosen − r_rejected − margin), the mean over pairs.

    Its parameters are those of `heads.add_head`; with adapters, only those and the head are trained. Batches are those
    of `pairs.pair_batches`.

    Args:
      config: the decoder's shape, from `heads.add_head`.
      center_coef: as in `functional.bradley_terry_loss`, 0.
    """
    return pair_objective(partial(pair_rewards, config), partial(reward_terms, center_coef=center_coef))


def pair_rewards(config: ModelConfig, params: Headed, batch: PairBatch) -> jax.Array:
    """Returns the rewards of both completions, float32 `[N, 2]`."""
    return scores(decoder_policy(config), params, *batch[:4])


def reward_terms(rewards: Array, batch: PairBatch, *, center_coef: float = 0.0) -> tuple[jax.Array, PairMetrics]:
    """Returns the loss of each pair, whether it is in the right order, its difference and its mean reward."""
    chosen, rejected = rewards[:, 0], rewards[:, 1]
    losses = bradley_terry_loss(chosen, rejected, margin=batch.margin, center_coef=center_coef)
    right = jnp.where(chosen == rejected, 0.5, chosen > rejected)
    metrics = {"accuracy": right, "difference": chosen - rejected, "reward": (chosen + rejected) / 2}
    return losses, of_every_pair(metrics)


class PairEvaluation(NamedTuple):
    """How well scores predict which of two answers was chosen."""

    accuracy: Interval  # share of pairs in the right order, ties half; resampling pairs
    nll: Interval  # −log σ(r_chosen − r_rejected), nats; equal scores give log 2 = 0.693
    calibration: Calibration  # of the preference for the answer with the higher score

    def numbers(self) -> dict[str, float]:
        """The numbers by name, for logs and tables."""
        named = self.accuracy.named("accuracy") | self.nll.named("nll")
        return named | {"calibration_error": self.calibration.error}


def evaluate_pairs(pair_scores: np.ndarray, *, bins: int = 10) -> PairEvaluation:
    """Returns accuracy, likelihood and calibration of scores.

    The prediction is that the answer with the higher score was chosen, with probability σ(|difference|). Calibration
    compares these probabilities with how often the prediction was right.

    Args:
      pair_scores: `[M, 2]`, of chosen and rejected.
      bins: of the calibration curve, 10.

    Returns:
      The evaluation.

    Raises:
      UsageError: there are no pairs.
    """
    difference = np.asarray(pair_scores, np.float64) @ np.array([1, -1])
    right = np.where(difference == 0, 0.5, difference > 0)
    curve = calibration(special.expit(np.abs(difference)), right, bins=bins)
    return PairEvaluation(bootstrap(right), bootstrap(-special.log_expit(difference)), curve)


# ---- ratings

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
