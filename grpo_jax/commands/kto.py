"""Trains a policy on ratings: single completions that are labelled good or bad (KTO, 2402.01306).

--task names rows with prompt, completion and label (true or false). Rows with chosen and rejected, as for --method dpo,
give a good and a bad completion. A share is held out by a hash of the prompt.

The policy learns to move towards good completions and away from bad ones, compared with the model that it starts from
(the reference). Each step estimates the distance from the reference on completions of other prompts. Start from a model
that was trained on such completions: `--method sft`.

  grpo-jax train --method kto --model DIR --task FILE.jsonl
  grpo-jax train --method kto --model DIR --task FILE.jsonl --undesirable-weight 0.5
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from grpo_jax.commands.offline import Job, PairOptions, pair_job, run_method
from grpo_jax.commands.train import Method
from grpo_jax.data.preferences import EncodedPairs, Rating, encode_ratings, read_ratings, with_mismatched
from grpo_jax.errors import UsageError
from grpo_jax.functional import kto_loss
from grpo_jax.hosts import check_alone
from grpo_jax.models.huggingface import Pretrained
from grpo_jax.models.policy import decoder_policy
from grpo_jax.offline.pairs import (
    PairBatch,
    evaluate_terms,
    kto_objective,
    pair_logprobs,
    rated_terms,
    score_pairs,
    with_intervals,
    with_reference_point,
)
from grpo_jax.options import Positive, Size, Weight


@dataclass(frozen=True)
class Config(PairOptions):
    """Options of the run."""

    method: Method = "kto"
    beta: Positive = 0.1
    """β: how fast the loss saturates, in 1/nats. 0.1 from the paper."""
    desirable_weight: Weight = 1.0
    """λ_D, weight of the loss of good completions; 1 from the paper."""
    undesirable_weight: Weight = 1.0
    """λ_U, weight of the loss of bad completions. The paper advises λ_D n_D / λ_U n_U between 1 and 4/3."""
    reference_point: Literal["kl", "zero"] = "kl"
    """z₀, which log-ratios are compared with. kl: an estimate of KL(π ‖ π_ref). zero: 0 (APO-zero, 2408.06266)."""
    num_completions: Size = 32
    """Completions of a step (N)."""


def make_kto_job(config: Config) -> Job:
    """Reads the ratings and loads the model.

    Raises:
      UsageError: One sentence that says what to change.
    """
    constants = {name: getattr(config, name) for name in ("beta", "desirable_weight", "undesirable_weight")}
    loss, estimates_kl = partial(kto_loss, **constants), config.reference_point == "kl"
    check_alone("phases on ratings")

    def evaluate(logprobs: np.ndarray, batch: PairBatch) -> dict[str, np.ndarray]:
        batch = with_reference_point(batch, logprobs[:, 1] if estimates_kl else None)
        return evaluate_terms(partial(rated_terms, loss), logprobs, batch)

    def make(model: Pretrained, training: EncodedPairs, heldout: EncodedPairs) -> dict[str, Any]:
        policy, labels = decoder_policy(model.config), training.desirable or ()
        return {
            "notes": [f"completions to train on: {sum(labels)} good, {len(labels) - sum(labels)} bad"],
            "objective": kto_objective(policy, loss, estimates_kl=estimates_kl),
            "score": partial(score_pairs, pair_logprobs, policy),
            "evaluate": evaluate,
            "summary": summarise_ratings,
            "warnings": rating_warnings(config, training),
        }

    return pair_job(
        config,
        "kto",
        make,
        number="num_completions",
        read=read_ratings,
        encode=partial(encode, config),
        has_reference=True,
    )


main = partial(run_method, make_kto_job)


def encode(config: Config, tokenizer: Any, ratings: Sequence[Rating], **options: Any) -> EncodedPairs:
    """Encodes ratings; to estimate the KL, each completion is paired with a completion of another prompt.

    Args:
      config: The options of the run.
      tokenizer: The tokenizer of the model.
      ratings: The rated completions.
      **options: The options of `encode_answers`.
    """
    encoded = encode_ratings(tokenizer, ratings, **options)
    return with_mismatched(encoded, config.seed) if config.reference_point == "kl" else encoded


def rating_warnings(config: Config, ratings: EncodedPairs) -> dict[str, str]:
    """Returns a warning if all completions to train on are good, or all are bad.

    Raises:
      UsageError: The weight of all these completions is 0.
    """
    labels, weights = set(ratings.desirable or ()), (config.undesirable_weight, config.desirable_weight)
    if not any(weights[label] for label in labels):
        raise UsageError("all completions to train on have the weight 0, so nothing is learned: set it above 0")
    if len(labels) > 1:
        return {}
    word = "good" if True in labels else "bad"
    return {"ratings": f"all completions to train on are {word}: the method tells good ones from bad ones"}


def summarise_ratings(values: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns the means of an evaluation, with intervals from resampling completions except for z₀."""
    completion_values = {name: x for name, x in values.items() if name != "kl"}
    return with_intervals(completion_values) | {"kl": float(values["kl"][0])}
