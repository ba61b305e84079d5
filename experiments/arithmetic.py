"""Two-digit addition: does GRPO bring out an ability that the model has but rarely shows?

First, supervised training fits a small new decoder to additions of which 70% have a wrong label (too large by one). The
model then answers a quarter to a third of the problems correctly. GRPO trains it with a reward that says only whether
an answer is correct.

The control trains the same model with a coin toss as the reward: its accuracy drifts between 0.1 and 0.4, and must not
rise. The run takes one to two minutes on two CPU cores. Expect the sampled accuracy on held-out additions to rise from
about 0.3 to above 0.9. Compared with the paper, there is no pretrained model and no natural language.

  python -m experiments.arithmetic
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments import common
from experiments.tasks import arithmetic
from grpo_jax.commands import flags
from grpo_jax.config import GRPOConfig, recipe
from grpo_jax.data.prompts import Prompts
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.options import Fraction
from grpo_jax.report import finish
from grpo_jax.rl.programs import make_programs
from grpo_jax.runs.folder import RunFolder
from grpo_jax.training.phases import train_with_control

MODEL = ModelConfig(vocab_size=arithmetic.VOCAB_SIZE, initializer_range=0.1)
PHASES = "Phases: warm (supervised, most labels are wrong), grpo (true reward), control (a coin toss as the reward)."
DIGITS = "Answers are written with the last digit first: '69' means 96."


@dataclass(frozen=True)
class WarmStart(common.WarmOptions):
    """Options of the supervised phase before reinforcement learning."""

    wrong_share: Fraction = 0.7
    """Share of wrong labels in the supervised steps."""


@dataclass(frozen=True)
class Config:
    """Options of the run."""

    train: GRPOConfig = recipe(
        steps=250,
        num_prompts=32,
        max_tokens=arithmetic.MAX_TOKENS,
        learning_rate=4e-4,
        eval_every=50,
    )
    warm: WarmStart = WarmStart()
    output: flags.RunConfig = flags.RunConfig(Path("runs/arithmetic"))


def main(config: Config) -> None:
    """Runs the warm start, GRPO and the control, and prints groups, accuracies and the checksum of the result."""
    started = time.perf_counter()
    task = arithmetic.arithmetic_task(num_prompts=config.train.sampling.num_prompts, seed=config.train.seed)
    policy = decoder_policy(MODEL)
    programs = make_programs(policy, task, config.train)  # refuses bad options before anything is compiled
    run = flags.open_run(config)
    run.console.print(PHASES, highlight=False, soft_wrap=True)
    params = warm_start(policy, config.warm, config.train.seed, run)
    rows, checksum, _ = train_with_control({"policy": params}, task, config.train, run, programs)
    show(run, rows)
    finish(run, rows, checksum, started)


def warm_start(policy: Policy, config: WarmStart, seed: int, run: RunFolder, *, phase: str = "warm") -> Params:
    """Trains parameters that answer some problems right, and stores the model's description in the run."""
    common.keep_model(run, MODEL, arithmetic.TEXT)

    def additions(**batch: int) -> tuple[Prompts, np.ndarray, np.ndarray]:
        prompts, labels = arithmetic.mixed_answers(**batch, wrong_share=config.wrong_share)
        return prompts, labels, labels != arithmetic.PAD_ID

    return common.imitate(policy, additions, config, run, seed=seed, phase=phase)


def show(run: RunFolder, rows: Mapping[str, Mapping[str, float]]) -> None:
    """Prints the last two groups, and accuracies before and after training."""
    run.console.print(DIGITS, highlight=False, soft_wrap=True)
    common.print_last_groups(run)
    columns = {"avg": "sampled", "greedy": "greedy", "ended_share": "share ended"}
    common.print_heldout(run, "accuracy on 1,000 held-out additions, with 95% intervals", rows, columns)


if __name__ == "__main__":
    flags.main(Config, main, __doc__)
