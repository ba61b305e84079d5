"""Two-digit addition: does GRPO bring out an ability that the model has but rarely shows?

First, supervised training fits a small new decoder to additions of which 70% have a wrong label (too large by one).
The model then answers a quarter to a third of the problems correctly. GRPO trains it with a reward that says only
whether an answer is correct. The control trains the same model with a coin toss as the reward: its accuracy drifts
between 0.1 and 0.4, and must not rise. The run takes one to two minutes on two CPU cores. Expect the sampled accuracy
on held-out additions to rise from about 0.3 to above 0.9. Compared with the paper, there is no pretrained model and no
natural language.

  python -m experiments.arithmetic
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from experiments import common
from experiments.common import completions_batch
from grpo_jax.config import GRPOConfig, recipe
from grpo_jax.errors import UsageError
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.models.transformer import Params
from grpo_jax.offline.phase import SupervisedConfig
from grpo_jax.rl.grpo import make_programs
from grpo_jax.rl.types import Batch
from grpo_jax.runs import flags, terminal
from grpo_jax.runs.folder import RunFolder
from grpo_jax.runs.terminal import finish
from grpo_jax.statistics import cell
from grpo_jax.tasks import arithmetic
from grpo_jax.train import train_with_control

MODEL = ModelConfig(vocab_size=arithmetic.VOCAB_SIZE, initializer_range=0.1)
CURVES = (("reward", "accuracy (dots: held out)"),)
PHASES = "Phases: warm (supervised, most labels are wrong), grpo (true reward), control (a coin toss as the reward)."
DIGITS = "Answers are written with the last digit first: '69' means 96."


@dataclass(frozen=True)
class WarmStart:
    """The supervised phase before."""

    warm_steps: int = 700
    """Supervised steps before training on rewards."""
    warm_batch: int = 128
    """Additions of a supervised step."""
    warm_learning_rate: float = 2e-3
    """Of the supervised steps."""
    wrong_share: float = 0.7
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
    check_warm_start(config.warm)
    task = arithmetic.arithmetic_task(num_prompts=config.train.sampling.num_prompts, seed=config.train.seed)
    policy = decoder_policy(MODEL)
    programs = make_programs(policy, task, config.train)  # refuses bad options before anything is compiled
    run = flags.open_run(config)
    run.console.print(PHASES, highlight=False, soft_wrap=True)
    params = warm_start(policy, config.warm, config.train.seed, run)
    rows, checksum = train_with_control({"policy": params}, task, config.train, run, programs)
    show(run, rows, "grpo")
    finish(run, rows, checksum, CURVES, started)


def check_warm_start(config: WarmStart) -> None:
    """Refuses labels that there cannot be.

    Raises:
      UsageError: one sentence that says what to change.
    """
    if config.warm_steps < 1 or config.warm_batch < 1 or not 0 <= config.wrong_share <= 1:
        raise UsageError("warm_steps and warm_batch must be at least 1, and wrong_share between 0 and 1")


def warm_start(policy: Policy, config: WarmStart, seed: int, run: RunFolder, *, phase: str = "warm") -> Params:
    """Parameters that answer right sometimes; the run keeps what describes the model."""
    common.keep_model(run, MODEL, arithmetic.TEXT)

    def warm_batch(step: int) -> Batch:
        prompts, labels = arithmetic.mixed_answers(
            batch_size=config.warm_batch, seed=seed, step=step, wrong_share=config.wrong_share
        )
        return completions_batch(prompts, labels[:, None], (labels != arithmetic.PAD_ID)[:, None])

    warm = SupervisedConfig(config.warm_steps, config.warm_learning_rate)
    return common.warm_start(policy, warm_batch, warm, run, seed=seed, phase=phase)


def show(run: RunFolder, rows: Mapping[str, Mapping[str, float]], phase: str) -> None:
    """Prints the last two groups of a phase, and accuracies before and after training."""
    run.console.print(DIGITS, highlight=False, soft_wrap=True)
    terminal.print_groups(run, [line for line in run.lines("rollouts.jsonl") if line["phase"] == phase][-2:])
    names = ("avg", "greedy", "ended_share")
    table = {title: [cell(row, name) for name in names] for title, row in rows.items()}
    title = "accuracy on 1,000 held-out additions, with 95% intervals"
    terminal.print_table(run, title, ("sampled", "greedy", "share ended"), table)


if __name__ == "__main__":
    flags.main(Config, main, __doc__)
