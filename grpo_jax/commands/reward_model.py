"""Trains a reward model on preferences, and measures how often it prefers the chosen one of two held-out answers.

--task names rows with prompt, chosen and rejected, or transcripts of HH-RLHF; a share is held out by a hash of the
prompt. The model gets a scalar head and learns −log σ(r_chosen − r_rejected). The run leaves the folder reward-model,
which `load_reward_model` turns into a reward, and transformers into a classifier. For comparison, the command prints
how often the shorter answer was chosen.

With the second command, the TinyStories model of 260 thousand parameters and the 2,312 pairs of harmless-base's test
set, expect an accuracy of 0.53 to 0.61, depending on the held-out quarter. It takes one to two minutes on two CPU
cores. Such a model learns little more than that shorter answers were preferred. The papers' pretraining on preferences
and ensembles are left out.

  grpo-jax train --method reward-model --model DIR --task FILE.jsonl
  grpo-jax train --method reward-model --model DIR --task FILE.jsonl.gz --steps 108 --learning-rate 3e-4 \\
    --weight-decay 0.1 --heldout-share 0.25 --max-prompt-tokens 32 --max-tokens 64 --overlong truncate
"""

import shutil
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from grpo_jax.commands.offline import Job, PairOptions, Rows, pair_job, run_method
from grpo_jax.commands.train import Method
from grpo_jax.config import with_options
from grpo_jax.data.preferences import EncodedPairs, encode_preferences, read_preferences
from grpo_jax.devices import devices_of, to_numpy
from grpo_jax.models.decoder.heads import Headed, add_head
from grpo_jax.models.files.families import text_config
from grpo_jax.models.files.weights import read_json
from grpo_jax.models.huggingface import Pretrained, classifier_class
from grpo_jax.offline.pairs import PairEvaluation, evaluate_pairs, pair_rewards, reward_model_objective, score_pairs
from grpo_jax.offline.phase import SupervisedConfig
from grpo_jax.options import Size, Weight
from grpo_jax.rewards.learned import RewardModel, save_reward_model
from grpo_jax.runs.folder import RunFolder


@dataclass(frozen=True)
class Config(PairOptions):
    """Options of the run."""

    # The head begins at 0 and must be learned.
    train: SupervisedConfig = with_options(PairOptions.train, learning_rate=1e-5)
    method: Method = "reward-model"
    num_pairs: Size = 16
    """Pairs of a step (N)."""
    center_coef: Weight = 0.0
    """Weight of (r_chosen + r_rejected)^2, which holds rewards near 0; 0.01 is usual."""
    bins: Size = 8
    """Number of bins of the calibration curve."""


def make_reward_model_job(config: Config) -> Job:
    """Reads the pairs, loads the model and adds a head to it.

    Raises:
      UsageError: One sentence that says what to change.
    """

    def make(model: Pretrained, training: EncodedPairs, heldout: EncodedPairs) -> dict[str, Any]:
        classifier_class(text_config(read_json(model.folder / "config.json"))["model_type"])  # the export needs it
        shape, params = add_head(model.config, model.params)
        score = partial(score_pairs, pair_rewards, shape)

        def rows(before: PairEvaluation, after: PairEvaluation, params: Headed) -> Rows:
            rewards = score(params, training, num_pairs=config.num_pairs, devices=devices_of(config.train))
            shorter = evaluate_pairs(-answer_lengths(heldout)).accuracy.named("accuracy")
            trained_on = evaluate_pairs(rewards, bins=config.bins).numbers()
            return {"held out": after.numbers(), "trained on": trained_on, "the shorter one": shorter}

        def leave(run: RunFolder, after: PairEvaluation, params: Headed) -> dict[str, Any]:
            whole = to_numpy(params)  # on all hosts
            if run.writes:
                keep_model(run, RewardModel(*model._replace(config=shape, params=whole)))
            curve = after.calibration._asdict()
            return {"calibration": {name: np.asarray(value).tolist() for name, value in curve.items()}}

        return {
            "params": params,
            "objective": reward_model_objective(shape, center_coef=config.center_coef),
            "score": score,
            "evaluate": lambda rewards, pairs: evaluate_pairs(rewards, bins=config.bins),
            "summary": PairEvaluation.numbers,
            "rows": rows,
            "leave": leave,
        }

    return pair_job(
        config,
        "reward_model",
        make,
        number="num_pairs",
        read=read_preferences,
        encode=encode_preferences,
        has_end=False,
    )


main = partial(run_method, make_reward_model_job)


def answer_lengths(pairs: EncodedPairs) -> np.ndarray:
    """Returns the numbers of tokens of the answers, `[M, 2]`."""
    return np.array([[len(ids) for ids in answers] for answers in pairs.answers], float)


def keep_model(run: RunFolder, model: RewardModel) -> None:
    """Writes the run's reward-model/, and replaces an earlier one, which may be older or damaged."""
    folder = run.path / "reward-model"
    for unfinished in run.path.glob(f"{folder.name}.*"):  # left by a process that was killed
        shutil.rmtree(unfinished)
    complete = save_reward_model(folder.with_name(f"{folder.name}.next"), model)
    shutil.rmtree(folder, ignore_errors=True)
    complete.rename(folder)
    run.say(f"reward model: {folder}")
