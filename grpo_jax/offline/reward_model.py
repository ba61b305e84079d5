"""Reward models from preferences (Bradley & Terry 1952; 2203.02155): training, and how good one is.

A pair is one prompt with two completions, the chosen one first, so that the prompt is computed once for both.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from grpo_jax.data.preferences import EncodedPairs
from grpo_jax.data.rows import batches
from grpo_jax.data.types import pad_completions, pad_prompts
from grpo_jax.devices import Devices, rows_program
from grpo_jax.errors import UsageError
from grpo_jax.functional import bradley_terry_loss, token_mean_weights
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.heads import Headed, scores
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.offline.phase import (
    FitPrograms,
    SupervisedConfig,
    SupervisedLoss,
    fit,
    make_fit_programs,
)
from grpo_jax.rl.types import Array, Logs, TrainState
from grpo_jax.runs.folder import RunFolder
from grpo_jax.statistics import Calibration, Interval, bootstrap, calibration


class PairBatch(NamedTuple):
    """N pairs with prompts of P tokens and answers of T."""

    prompt_ids: Array  # int32 [N, P], padded on the left
    prompt_mask: Array  # bool [N, P]
    completion_ids: Array  # int32 [N, 2, T], chosen and rejected
    completion_mask: Array  # bool [N, 2, T]; without any token it is no pair, and only fills up the batch
    margin: Array  # float32 [N]; of reward models
    ref_logprobs: Array = None  # float32 [N, 2], sums in nats under a reference; of policies
    weights: Array = None  # float32 [N], made from the mask of a whole optimizer batch


def train_reward_model(
    policy: Policy,
    params: Headed,
    pairs: Callable[[int], PairBatch],
    config: SupervisedConfig,
    run: RunFolder,
    *,
    center_coef: float = 0.0,
    phase: str = "reward_model",
    evaluate: Callable[[Headed], dict[str, Any]] | None = None,
    programs: FitPrograms | None = None,
) -> TrainState:
    """Minimises −log σ(r_chosen − r_rejected − margin), continuing from the newest checkpoint of this phase.

    Args:
      policy: of the decoder.
      params: where training starts, from `heads.add_head`; with adapters, those and the head alone are trained.
      pairs: step -> batch, a pure function: `pair_batches`.
      config: the phase.
      run: where lines and checkpoints go.
      center_coef: as in `functional.bradley_terry_loss`, 0.
      phase: names lines and checkpoints.
      evaluate: (parameters) -> numbers to log, every `config.eval_every` steps.
      programs: of `make_reward_model_programs` with the same configuration, to share them; made here, if None.

    Returns:
      The final state; `trainable.join(state.params, trainable.split(params)[1])` are the model's parameters.

    Raises:
      UsageError: the configuration cannot work.
      FloatingPointError: gradients were not finite too many times in a row.
    """
    loss = reward_model_loss(policy, center_coef)
    return fit(loss, params, pairs, config, run, phase=phase, evaluate=evaluate, programs=programs)


def make_reward_model_programs(policy: Policy, config: SupervisedConfig) -> FitPrograms:
    """What `train_reward_model` compiles without `center_coef`, for phases that differ in pairs and parameters alone.

    Args:
      policy, config: as there.

    Returns:
      The functions, compiled at their first call.

    Raises:
      UsageError: the configuration cannot work.
    """
    return make_fit_programs(reward_model_loss(policy, 0.0), config)


def reward_model_loss(policy: Policy, center_coef: float) -> SupervisedLoss:
    """`pair_loss` of the adapters or the decoder, and of the head."""
    return SupervisedLoss(partial(pair_loss, policy, center_coef=center_coef), pair_weights)


def pair_loss(policy: Policy, params: Headed, batch: PairBatch, *, center_coef: float = 0.0) -> tuple[jax.Array, Logs]:
    """Σ weights · loss of a pair; logs the share of pairs in the right order, and means of margin and reward."""
    chosen, rejected = jnp.moveaxis(scores(policy, params, *batch[:4]), -1, 0)
    losses = bradley_terry_loss(chosen, rejected, margin=batch.margin, center_coef=center_coef)
    right = jnp.where(chosen == rejected, 0.5, chosen > rejected)
    means = {"accuracy": right, "difference": chosen - rejected, "reward": (chosen + rejected) / 2}
    weight = jnp.sum(batch.weights)
    logged = {name: (jnp.sum(jax.lax.stop_gradient(x) * batch.weights), weight) for name, x in means.items()}
    return jnp.sum(losses * batch.weights), Logs(logged, {})


def pair_weights(completion_mask: jax.Array) -> jax.Array:
    """Returns 1/N for each pair of the whole batch, `[N]`; 0 where there is no pair."""
    return token_mean_weights(jnp.any(completion_mask, axis=(-2, -1)))


def pair_batches(
    pairs: EncodedPairs,
    num_pairs: int,
    seed: int,
    *,
    ref_logprobs: np.ndarray | None = None,
    widths: tuple[int, int] | None = None,
    fills_up: bool = False,
) -> Callable[[int], PairBatch]:
    """Every pair once an epoch, in an order that is a function of the seed.

    Args:
      pairs: M.
      num_pairs: N, at most M unless `fills_up`.
      seed: of the order.
      ref_logprobs: float32 `[M, 2]`, of `preference.score_preferences`; None: no reference.
      widths: P and T, so that several sets of pairs have one shape; None: of the longest prompt and answer.
      fills_up: fill a batch of fewer pairs than N with empty ones, which have no weight.

    Returns:
      A pure function from the step to a batch.

    Raises:
      UsageError: there are fewer pairs, or ref_logprobs are of another number of them.
    """
    if ref_logprobs is not None and ref_logprobs.shape != (len(pairs.prompts), 2):
        raise UsageError(
            f"ref_logprobs are {list(ref_logprobs.shape)}, and there are {len(pairs.prompts)} pairs: give two numbers "
            "for each pair"
        )
    count = min(num_pairs, len(pairs.prompts)) if fills_up else num_pairs
    if not 1 <= count <= len(pairs.prompts):
        raise UsageError(f"num_pairs is {num_pairs}, but there are {len(pairs.prompts)} pairs: take 1 to that many")
    order, (prompt_width, width) = batches(len(pairs.prompts), count, seed), widths or pair_widths(pairs)

    def batch(step: int) -> PairBatch:
        numbers = np.concatenate([order(step), np.arange(count, num_pairs)])  # there are no pairs from count on
        found = pad_pairs(pairs, numbers, prompt_width, width)
        return found if ref_logprobs is None else found._replace(ref_logprobs=ref_logprobs[numbers])

    return batch


def pad_pairs(pairs: EncodedPairs, numbers: np.ndarray, prompt_width: int, width: int) -> PairBatch:
    """The pairs with these numbers as arrays. A number beyond the last gets empty answers, to fill up the batch."""
    real = [i if i < len(pairs.prompts) else None for i in numbers]
    prompts = pad_prompts(
        [pairs.prompts[0 if i is None else i] for i in real], [{}] * len(real), width=prompt_width, pad_id=0
    )
    ids, mask = pad_completions([([], []) if i is None else pairs.answers[i] for i in real], width)
    margin = np.array([0.0 if i is None else pairs.margins[i] for i in real], np.float32)
    return PairBatch(prompts.ids, prompts.mask, ids, mask, margin)


def pair_widths(pairs: EncodedPairs) -> tuple[int, int]:
    return max(map(len, pairs.prompts)), max(len(ids) for answers in pairs.answers for ids in answers)


def score_pairs(
    config: ModelConfig, params: Headed, pairs: EncodedPairs, *, num_pairs: int = 32, devices: Devices = 1
) -> np.ndarray:
    """Scores of chosen and rejected, float32 `[M, 2]`, `num_pairs` at a time with one compiled program.

    Args:
      config: the decoder's shape.
      params: its parameters and the head.
      pairs: M.
      num_pairs: a multiple of the `parts` of a mesh.
      devices: where the parameters are.
    """
    return in_pieces(lambda piece: _scorer(config, devices)(params, piece[:4]), pairs, num_pairs)


def in_pieces(program: Callable[[PairBatch], np.ndarray], pairs: EncodedPairs, num_pairs: int) -> np.ndarray:
    """What a program gives for all pairs, `[M, ...]`, computed for `num_pairs` at a time."""
    size, widths = len(pairs.prompts), pair_widths(pairs)
    pieces = (pad_pairs(pairs, np.arange(at, at + num_pairs), *widths) for at in range(0, size, num_pairs))
    return np.concatenate([program(piece) for piece in pieces])[:size]


@cache
def _scorer(config: ModelConfig, devices: Devices) -> Callable[[Headed, Any], np.ndarray]:
    policy = decoder_policy(config)
    return rows_program(lambda params, arrays: scores(policy, params, *arrays), devices=devices)


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
    """Accuracy, likelihood and calibration of scores.

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
