"""Trains a policy on preferences without a reward model, by DPO or a related loss.

--task names rows with prompt, chosen and rejected, or transcripts of HH-RLHF; a share is held out by a hash of the
prompt. The policy learns to raise the log-probability of the chosen completion over that of the rejected one, compared
with the model that it starts from (the reference). --preference-loss selects another loss; simpo, orpo and cpo have no
reference. Start from a model that was trained on such completions: `--method sft`.

  grpo-jax train --method dpo --model DIR --task FILE.jsonl
  grpo-jax train --method dpo --model DIR --task FILE.jsonl --preference-loss ipo --tau 0.5
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from grpo_jax import functional
from grpo_jax.commands.offline import Job, PairOptions, pair_job, run_method
from grpo_jax.commands.train import Method
from grpo_jax.data.preferences import EncodedPairs, encode_preferences, read_preferences
from grpo_jax.errors import UsageError
from grpo_jax.models.huggingface import Pretrained
from grpo_jax.models.policy import decoder_policy
from grpo_jax.offline.pairs import (
    PairLoss,
    evaluate_terms,
    needs_reference,
    pair_logprobs,
    preference_objective,
    preference_terms,
    score_pairs,
)
from grpo_jax.options import Positive, Range, Size, Weight

CONSTANTS = ("beta", "label_smoothing", "tau", "gamma", "odds_coef", "nll_coef")
LOSSES: Mapping[str, PairLoss] = {
    "dpo": functional.dpo_loss,
    "robust": functional.robust_dpo_loss,
    "length-normalized": functional.length_normalized_dpo_loss,
    "ipo": functional.ipo_loss,
    "hinge": functional.hinge_loss,
    "simpo": functional.simpo_loss,
    "orpo": functional.orpo_loss,
    "cpo": functional.cpo_loss,
}


@dataclass(frozen=True)
class Config(PairOptions):
    """Options of the run."""

    method: Method = "dpo"
    preference_loss: Literal["dpo", "robust", "length-normalized", "ipo", "hinge", "simpo", "orpo", "cpo"] = "dpo"
    """Loss of a pair. Its constants are the next options."""
    beta: Positive | None = None
    """β of dpo, robust, length-normalized, hinge, simpo and cpo. None: the paper's value, as in the other constants."""
    label_smoothing: Annotated[float, Range(lambda x: 0 <= x < 0.5, "at least 0 and below 0.5")] | None = None
    """Probability that a pair's labels are swapped, for dpo, robust and length-normalized."""
    tau: Positive | None = None
    """Weight of the KL in ipo."""
    gamma: Weight | None = None
    """Target margin in simpo."""
    odds_coef: Weight | None = None
    """Weight of the odds ratio in orpo."""
    nll_coef: Weight | None = None
    """Weight of the NLL of the chosen completion in cpo."""
    num_pairs: Size = 16
    """Pairs of a step (N)."""


def make_dpo_job(config: Config) -> Job:
    """Reads the pairs and loads the model.

    Raises:
      UsageError: One sentence that says what to change.
    """
    loss = choose_loss(config)

    def make(model: Pretrained, training: EncodedPairs, heldout: EncodedPairs) -> dict[str, Any]:
        policy = decoder_policy(model.config)
        return {
            "objective": preference_objective(policy, loss),
            "score": partial(score_pairs, pair_logprobs, policy),
            "evaluate": partial(evaluate_terms, partial(preference_terms, loss)),
        }

    return pair_job(
        config,
        "dpo",
        make,
        number="num_pairs",
        read=read_preferences,
        encode=encode_preferences,
        has_reference=needs_reference(loss),
    )


main = partial(run_method, make_dpo_job)


def choose_loss(config: Config) -> PairLoss:
    """Returns the loss with its constants.

    Raises:
      UsageError: A constant belongs to another loss.
    """
    loss, options = LOSSES[config.preference_loss], {name: getattr(config, name) for name in CONSTANTS}
    constants = {name: value for name, value in options.items() if value is not None}
    for name in constants:
        if name not in inspect.signature(loss).parameters:
            owners = [other for other, function in LOSSES.items() if name in inspect.signature(function).parameters]
            raise UsageError(
                f"{name} is no constant of --preference-loss {config.preference_loss}: leave it out, or choose "
                f"{' or '.join(owners)}"
            )
    return partial(loss, **constants)
