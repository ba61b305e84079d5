"""Reward models from preferences (Bradley & Terry 1952; 2203.02155): the objective, and how good a model is."""

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from grpo_jax.functional import bradley_terry_loss
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.heads import Headed, scores
from grpo_jax.models.policy import decoder_policy
from grpo_jax.offline.pairs import PairBatch, PairMetrics, of_every_pair, pair_objective
from grpo_jax.offline.phase import Objective
from grpo_jax.rl.types import Array
from grpo_jax.statistics import Calibration, Interval, bootstrap, calibration


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
