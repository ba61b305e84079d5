"""Hopeless prompts: does a curriculum by solve rate save samples if 80% of the prompts cannot be solved?

A prompt is three letters, such as "bfc:". The reward is 1 for a completion that begins with the letter after the last
one. Of 100 training prompts, 20 have it, those that begin with a or b. The other 80 have reward 0 whatever the policy
writes. A small decoder first learns by imitation to be right in a third of its completions. Then it learns from rewards
with each prompt once an epoch (uniform), and with `--curriculum`. Both sample equally many completions per step. The
measure is the number of sampled completions until the held-out score, on other prompts that can be solved, first
reaches a bound at an evaluation. A run that never reaches it counts with all its samples. Five seeds take a few minutes
on two CPU cores.

  python -m experiments.curriculum
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import Seeds, WarmOptions, collect, imitate, over_seeds, print_over_seeds, save_over_seeds
from experiments.tasks.characters import Characters, encode_examples
from grpo_jax import report
from grpo_jax.commands import flags
from grpo_jax.config import GRPOConfig, recipe, with_options
from grpo_jax.data.prompts import Prompts
from grpo_jax.data.types import Completion, Example, rng
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.huggingface import load_tokenizer
from grpo_jax.models.policy import decoder_policy
from grpo_jax.options import Fraction, Size
from grpo_jax.rl.programs import make_programs
from grpo_jax.statistics import cell
from grpo_jax.tasks.task import Task, text_task
from grpo_jax.training.phases import train_with_evaluation

LETTERS = "abcdefghij"
SOLVABLE = "ab"  # first letters of prompts that can be solved
TEXT = Characters(LETTERS + ":")
MODEL = ModelConfig(TEXT.vocab_size, 32, 64, 1, 2, 1, 16, initializer_range=0.1)
BOUNDS = (0.8, 0.9)  # of the held-out score
CURVES = (("heldout_avg", "held-out score"), ("reward", "reward of the drawn prompts"))


@dataclass(frozen=True)
class WarmStart(WarmOptions):
    """Options of the supervised phase before reinforcement learning."""

    warm_steps: Size = 200
    """Supervised steps before training on rewards."""
    right_share: Fraction = 0.3
    """Share of right letters in the imitated completions. The others are random."""


@dataclass(frozen=True)
class Config:
    """Options of the experiment."""

    train: GRPOConfig = recipe(
        steps=250, num_prompts=8, group_size=8, max_tokens=1, learning_rate=1e-3, kl_coef=0.0, eval_every=5
    )
    warm: WarmStart = WarmStart()
    window: Size = 100
    """Steps of the curriculum's window."""
    seeds: Seeds = Seeds(5)
    output: flags.RunConfig = flags.RunConfig(Path("runs/curriculum"))


def reward(examples: Sequence[Example], completions: Sequence[Completion]) -> list[float]:
    """Returns 1 for completions that begin with the next letter, if the prompt can be solved."""
    return [float(text.startswith(row["next"] or "?")) for row, text in zip(examples, completions, strict=True)]


def curriculum_task(*, num_prompts: int, seed: int) -> Task:
    """Returns the task: 20 prompts that can be solved, 80 that cannot, and 60 held-out ones that can."""

    def rows(firsts: str, count: int, stream: int) -> list[dict[str, str]]:
        """Returns rows of random prompts with one of these first letters, equally many for each last letter."""
        noise = rng(stream)
        pairs = [(first, second) for first in firsts for second in LETTERS]
        return [
            {"prompt": f"{''.join(pairs[i])}{last}:", "next": following if firsts == SOLVABLE else ""}
            for last, following in zip(LETTERS, LETTERS[1:] + LETTERS[:1], strict=True)
            for i in noise.permutation(len(pairs))[: count // len(LETTERS)]
        ]

    solvable, hopeless = rows(SOLVABLE, 80, 1), rows(LETTERS.removeprefix(SOLVABLE), 80, 2)
    training, heldout = [*solvable[::4], *hopeless], [row for i, row in enumerate(solvable) if i % 4]
    with tempfile.TemporaryDirectory() as folder:
        TEXT.save_tokenizer(Path(folder))
        tokenizer = load_tokenizer(Path(folder))
    options: dict[str, Any] = {
        "vocab_size": TEXT.vocab_size,
        "num_prompts": num_prompts,
        "seed": seed,
        "reward": reward,
    }
    return text_task(tokenizer, (TEXT.eos_id,), training, heldout_rows=heldout, **options)


def mixed_answers(
    right_share: float, *, batch_size: int, seed: int, step: int
) -> tuple[Prompts, np.ndarray, np.ndarray]:
    """Returns random prompts with the ids `[N, 1]` of one letter each, and their mask."""
    noise = rng(seed, step)
    letters = noise.integers(0, len(LETTERS), (batch_size, 3))
    right = (letters[:, -1] + 1) % len(LETTERS)
    answers = np.where(noise.random(batch_size) < right_share, right, noise.integers(0, len(LETTERS), batch_size))
    examples = [{"prompt": "".join(LETTERS[i] for i in row) + ":"} for row in letters]
    return encode_examples(TEXT, examples), answers[:, None].astype(np.int32), np.ones((batch_size, 1), bool)


def main(config: Config) -> None:
    """Trains both ways with each seed; prints the samples until each bound, and writes results.json and curves.png."""
    started, policy = time.perf_counter(), decoder_policy(MODEL)
    seeds = config.seeds.starting_at(config.train.seed)
    tasks = {seed: curriculum_task(num_prompts=config.train.sampling.num_prompts, seed=seed) for seed in seeds}
    programs = make_programs(policy, tasks[seeds[0]], config.train)
    run = flags.open_run(config)
    runs: dict[str, dict[str, list[float]]] = {}
    for seed in seeds:
        start = imitate(
            policy, partial(mixed_answers, config.warm.right_share), config.warm, run, seed=seed, phase=f"warm_{seed}"
        )
        for method, window in {"uniform": 0, "curriculum": config.window}.items():
            options = with_options(config.train, seed=seed, curriculum=window)
            phase = f"{method}_{seed}"
            train_with_evaluation({"policy": start}, tasks[seed], options, run, programs, phase=phase)
            lines = [line for line in run.lines() if line["phase"] == phase and "heldout_avg" in line]
            collect(runs, {method: samples_until(lines, options)})
    rows = over_seeds(runs, first=f"until {BOUNDS[-1]}", control="uniform")
    save_over_seeds(run, runs, rows, seeds, CURVES)
    columns = [*runs["uniform"], "difference"]
    table = {method: [cell(row, name) if name in row else "" for name in columns] for method, row in rows.items()}
    print_over_seeds(run, "sampled completions until the held-out score reaches a bound", seeds, columns, table)
    report.say_end(run, started)


def samples_until(lines: Sequence[Mapping[str, float]], config: GRPOConfig) -> dict[str, float]:
    """Returns the completions sampled until each bound is reached, or all, and the last held-out score."""
    samples = config.sampling.num_prompts * config.sampling.group_size
    steps = {bound: [line["step"] for line in lines if line["heldout_avg"] >= bound] for bound in BOUNDS}
    until = {f"until {bound}": float(samples * min(some, default=config.steps)) for bound, some in steps.items()}
    return until | {"last score": lines[-1]["heldout_avg"]}


if __name__ == "__main__":
    flags.main(Config, main, __doc__)
