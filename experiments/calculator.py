"""Sums and products: does GRPO teach a policy to call a tool where, and only where, it helps?

A small decoder first learns to call a calculator a quarter of the time, to copy its result, to add digits by heart, and
to guess products. A right answer then earns 1 and a call costs 0.2: products need the call, sums earn more without it.

The control gets a coin toss as its reward. The run takes some minutes on two CPU cores. Expect right answers to
products to rise from about 0.25 to above 0.9, calls for products to rise to nearly all, and calls for sums to fall.

  python -m experiments.calculator
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from experiments import common
from experiments.tasks import calculator
from grpo_jax.commands import flags
from grpo_jax.config import GRPOConfig, recipe
from grpo_jax.models.config import ModelConfig
from grpo_jax.options import Fraction
from grpo_jax.report import finish
from grpo_jax.rl.evaluate import Evaluation, Samples
from grpo_jax.tasks.task import Task
from grpo_jax.training.phases import train_with_control

MODEL = ModelConfig(vocab_size=calculator.VOCAB_SIZE, initializer_range=0.1)
COLUMNS = {
    "avg": "return",
    "right_products": "right: products",
    "calls_products": "calls: products",
    "right_sums": "right: sums",
    "calls_sums": "calls: sums",
}


@dataclass(frozen=True)
class WarmStart(common.WarmOptions):
    """Options of the supervised phase before reinforcement learning."""

    call_share: Fraction = 0.25
    """Share of the supervised tasks that call the calculator."""


@dataclass(frozen=True)
class Config:
    """Options of the run."""

    train: GRPOConfig = recipe(
        steps=60,
        num_prompts=32,
        max_tokens=calculator.MAX_TOKENS,
        max_turns=calculator.MAX_TURNS,
        environment_tokens=calculator.ENVIRONMENT_TOKENS,
        learning_rate=4e-4,
        eval_every=20,
    )
    warm: WarmStart = WarmStart(warm_steps=600)
    output: flags.RunConfig = flags.RunConfig(Path("runs/calculator"))


def main(config: Config) -> None:
    """Runs the warm start, GRPO and the control; prints groups, a table and the checksum, and writes the report."""
    started = time.perf_counter()
    train = config.train
    task = calculator.calculator_task(num_prompts=train.sampling.num_prompts, seed=train.seed)
    policy, programs, run = common.open_experiment(config, MODEL, calculator.TEXT, task)
    episodes = partial(calculator.mixed_episodes, call_share=config.warm.call_share)
    params = common.imitate(policy, episodes, config.warm, run, seed=train.seed)
    rows, checksum, _ = train_with_control({"policy": params}, task, train, run, programs, partial(examine, task))
    common.print_last_groups(run)
    common.print_heldout(run, f"{calculator.NUM_HELDOUT} held-out tasks, with a 95% interval", rows, COLUMNS)
    finish(run, rows, checksum, started)


def examine(task: Task, evaluation: Evaluation, calls: Sequence[Samples]) -> dict[str, float]:
    """Returns shares of right answers and of calls in the sampled completions to sums and to products."""
    products = np.array([calculator.is_product(example) for example in task.heldout.examples])
    numbers: dict[str, float] = {}
    for name, measure in (("right", calculator.is_right), ("calls", calculator.is_call)):
        marks = np.array([[measure(text) for text in group[:-1]] for group in evaluation.texts])
        numbers |= {f"{name}_products": float(marks[products].mean()), f"{name}_sums": float(marks[~products].mean())}
    return numbers


if __name__ == "__main__":
    flags.main(Config, main, __doc__)
