"""Compares updates in float32 and in bfloat16, with weights rounded stochastically or to the nearest number.

A decoder of five million parameters first learns additions by imitation, with mostly wrong labels. Its weights are then
rounded to bfloat16 numbers, as they are in the files of pretrained models. From this start GRPO trains in float32 and
with both kinds of rounding, at each learning rate and with each seed. The measures are the accuracy on held-out
additions, the KL to the start, and the share of bfloat16 weights that one step changes.

  python -m experiments.dtypes
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from experiments.arithmetic import WarmStart
from experiments.common import Seeds, collect, imitate, over_seeds, print_over_seeds, save_over_seeds
from experiments.tasks import arithmetic
from grpo_jax import report
from grpo_jax.commands import flags
from grpo_jax.config import GRPOConfig, recipe, with_options
from grpo_jax.data.prompts import Prompts
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.params.rounding import round_to_nearest
from grpo_jax.models.policy import decoder_policy
from grpo_jax.options import Positive
from grpo_jax.rl.evaluate import summary
from grpo_jax.rl.programs import make_programs
from grpo_jax.runs.folder import RunFolder
from grpo_jax.statistics import cell
from grpo_jax.training.phases import train_with_evaluation

MODEL = ModelConfig(arithmetic.VOCAB_SIZE, 256, 768, 6, 4, 4, 64, initializer_range=0.05)
DTYPES: Mapping[str, Mapping[str, Any]] = {
    "float32": {"dtype": "float32"},
    "stochastic": {"dtype": "bfloat16", "rounding": "stochastic"},
    "nearest": {"dtype": "bfloat16", "rounding": "nearest"},
}
CURVES = (("kl", "KL to the start, in nats per token"), ("reward", "reward"))
MEASURES = ("kl", "changed_share")
LAST = 5  # steps over which the measures are averaged


@dataclass(frozen=True)
class Config:
    """Options of the experiment."""

    train: GRPOConfig = recipe(
        steps=40, num_prompts=16, max_tokens=arithmetic.MAX_TOKENS, eval_every=0, eval_samples=1, checkpoint_every=0
    )
    warm: WarmStart = WarmStart(warm_steps=300, warm_learning_rate=1e-3)
    rates: tuple[Positive, ...] = (1e-5, 1e-4, 1e-3)
    """Learning rates."""
    seeds: Seeds = Seeds(3)
    output: flags.RunConfig = flags.RunConfig(Path("runs/dtypes"))


def additions(wrong_share: float, **batch: int) -> tuple[Prompts, np.ndarray, np.ndarray]:
    """Returns prompts, labels of which a share is wrong, and the labels' mask."""
    prompts, labels = arithmetic.mixed_answers(**batch, wrong_share=wrong_share)
    return prompts, labels, labels != arithmetic.PAD_ID


def main(config: Config) -> None:
    """Trains in each dtype, at each rate and with each seed; prints a table, and writes results.json and curves.png."""
    started, seeds = time.perf_counter(), config.seeds.starting_at(config.train.seed)
    num_prompts = config.train.sampling.num_prompts
    tasks = {seed: arithmetic.arithmetic_task(num_prompts=num_prompts, seed=seed) for seed in seeds}
    run = flags.open_run(config)
    imitated, base = partial(additions, config.warm.wrong_share), decoder_policy(MODEL)
    starts = {
        seed: round_to_nearest(imitate(base, imitated, config.warm, run, seed=seed, phase=f"warm_{seed}"))
        for seed in seeds
    }
    runs: dict[str, dict[str, list[float]]] = {}
    for rate, (dtype, computed) in product(config.rates, DTYPES.items()):
        method, options = f"{dtype} {rate:g}", with_options(config.train, learning_rate=rate)
        programs = make_programs(decoder_policy(replace(MODEL, **computed)), tasks[seeds[0]], options)
        for seed in seeds:
            phase, of_seed = f"{method}_{seed}", with_options(options, seed=seed)
            train = partial(train_with_evaluation, {"policy": starts[seed]}, tasks[seed], of_seed, run, programs)
            _, heldout = train(phase=phase)
            collect(runs, {method: {"accuracy": summary(heldout.evaluation)["avg"], **last_steps(run, phase)}})
    rows = over_seeds(runs, first="accuracy", control=next(iter(runs)))
    save_over_seeds(run, runs, rows, seeds, CURVES)
    columns = ("accuracy", *MEASURES)
    table = {method: [cell(row, name) if name in row else "" for name in columns] for method, row in rows.items()}
    print_over_seeds(run, f"held-out accuracy, and the last {LAST} steps", seeds, columns, table)
    report.say_end(run, started)


def last_steps(run: RunFolder, phase: str) -> dict[str, float]:
    """Returns the means of `MEASURES` over the last steps. Only runs in bfloat16 have a `changed_share`."""
    lines = [line for line in run.lines() if line["phase"] == phase and "kl" in line][-LAST:]
    return {name: float(np.mean([line[name] for line in lines])) for name in MEASURES if name in lines[-1]}


if __name__ == "__main__":
    flags.main(Config, main, __doc__)
