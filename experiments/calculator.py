"""Sums and products: does GRPO teach a policy to call a tool where, and only where, it helps?

A small decoder first learns to call a calculator a quarter of the time, to copy what it says, to add digits by heart,
and to guess products. A right answer then earns 1 and a call costs 0.2: products need the call, sums are cheaper
without. The control gets a coin toss for a reward. Some minutes on two CPU cores; expect right answers to products to
rise from about 0.25 to above 0.9, calls for products to nearly all, and calls for sums to fall.

  python -m experiments.calculator
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from experiments import common
from grpo_jax.config import GRPOConfig, recipe
from grpo_jax.errors import UsageError
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.models.transformer import Params
from grpo_jax.offline.phase import SupervisedConfig
from grpo_jax.rl.evaluate import Evaluation, Samples
from grpo_jax.rl.grpo import make_programs
from grpo_jax.rl.types import Batch
from grpo_jax.runs import flags, terminal
from grpo_jax.runs.folder import RunFolder
from grpo_jax.runs.terminal import finish
from grpo_jax.statistics import cell
from grpo_jax.tasks import calculator
from grpo_jax.tasks.task import Task
from grpo_jax.train import train_with_control

MODEL = ModelConfig(vocab_size=calculator.VOCAB_SIZE, initializer_range=0.1)
CURVES = (("turns_mean", "turns"),)


@dataclass(frozen=True)
class WarmStart:
    """The supervised phase before."""

    warm_steps: int = 600
    """Supervised steps before training on rewards."""
    warm_batch: int = 128
    """Tasks of a supervised step."""
    warm_learning_rate: float = 2e-3
    """Of the supervised steps."""
    call_share: float = 0.25
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
    warm: WarmStart = WarmStart()
    output: flags.RunConfig = flags.RunConfig(Path("runs/calculator"))


def main(config: Config) -> None:
    """Warm start, GRPO, control; a table, a few groups, curves, a page, and the checksum of the result."""
    started = time.perf_counter()
    check_warm_start(config.warm)
    train = config.train
    task = calculator.calculator_task(num_prompts=train.sampling.num_prompts, seed=train.seed)
    policy = decoder_policy(MODEL)
    programs = make_programs(policy, task, train)  # refuses bad options before anything is compiled
    run = flags.open_run(config)
    params = warm_start(policy, config.warm, train.seed, run)
    rows, checksum = train_with_control({"policy": params}, task, train, run, programs, partial(examine, task))
    show(run, rows)
    finish(run, rows, checksum, CURVES, started)


def check_warm_start(config: WarmStart) -> None:
    """Refuses tasks that there cannot be.

    Raises:
      UsageError: one sentence that says what to change.
    """
    if config.warm_steps < 1 or config.warm_batch < 1 or not 0 <= config.call_share <= 1:
        raise UsageError("warm_steps and warm_batch must be at least 1, and call_share between 0 and 1")


def warm_start(policy: Policy, config: WarmStart, seed: int, run: RunFolder) -> Params:
    """Parameters that call now and then; the run keeps what describes the model."""
    common.keep_model(run, MODEL, calculator.TEXT)

    def warm_batch(step: int) -> Batch:
        prompts, ids, mask = calculator.mixed_episodes(
            batch_size=config.warm_batch, seed=seed, step=step, call_share=config.call_share
        )
        return common.completions_batch(prompts, ids[:, None], mask[:, None])

    warm = SupervisedConfig(config.warm_steps, config.warm_learning_rate)
    return common.warm_start(policy, warm_batch, warm, run, seed=seed, phase="warm")


def examine(task: Task, evaluation: Evaluation, calls: Sequence[Samples]) -> dict[str, float]:
    """Of the sampled completions to sums and to products: shares of right answers and of calls."""
    del calls
    products = np.array([calculator.is_product(example) for example in task.heldout.examples])
    numbers: dict[str, float] = {}
    for name, measure in (("right", calculator.is_right), ("calls", calculator.is_call)):
        found = np.array([[measure(text) for text in group[:-1]] for group in evaluation.texts])
        numbers |= {f"{name}_products": float(found[products].mean()), f"{name}_sums": float(found[~products].mean())}
    return numbers


def show(run: RunFolder, rows: dict[str, dict[str, float]]) -> None:
    """Prints two groups of the end, and returns, right answers and calls before and after."""
    terminal.print_groups(run, [line for line in run.lines("rollouts.jsonl") if line["phase"] == "grpo"][-2:])
    names = ("avg", "right_products", "calls_products", "right_sums", "calls_sums")
    table = {title: [cell(row, name) for name in names] for title, row in rows.items()}
    titles = ("return", "right: products", "calls: products", "right: sums", "calls: sums")
    terminal.print_table(run, f"{calculator.NUM_HELDOUT} held-out tasks, with a 95% interval", titles, table)


if __name__ == "__main__":
    flags.main(Config, main, __doc__)
