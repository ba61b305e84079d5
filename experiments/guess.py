"""Higher or lower: does GRPO teach a policy to use what an environment tells it?

A small decoder first learns the rules from a player that ignores half of the answers. Then it plays: it guesses, reads
the environment's answer, which names the ends of the remaining interval, and guesses again, all in one completion. The
loss does not cover the answers.

The decoder wins if it names the number within four guesses. The reward of a turn is its change of the share of games
that halving would still win; a game's rewards add up to 1 if it was won, else 0.

The measure is the share of games won on held-out intervals, over all hidden numbers. Halving wins all of them. The best
policy without answers wins 0.35 of them, so a higher share needs the answers; "above blind" scales this to 1 for
halving. Two controls begin at the same start. One gets a coin toss as its reward, and should not improve.

The other gets a coin toss as each answer, and cannot win more than the best policy without answers. The run takes
minutes on two CPU cores. Expect the share of games won to rise from about 0.41 to about 0.93, to end at 0.38 to 0.40
with a coin toss as the reward, and to stay near 0.3 with noise as answers.

  python -m experiments.guess
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from experiments import common
from experiments.tasks import guess
from grpo_jax.commands import flags
from grpo_jax.config import GRPOConfig, recipe
from grpo_jax.data.types import Example
from grpo_jax.models.config import ModelConfig
from grpo_jax.options import Fraction
from grpo_jax.report import finish
from grpo_jax.rl.evaluate import Evaluation, Samples, summary
from grpo_jax.rl.programs import make_programs
from grpo_jax.tasks.task import Task
from grpo_jax.training.phases import train_with_control, train_with_evaluation

MODEL = ModelConfig(vocab_size=guess.VOCAB_SIZE, initializer_range=0.1)
COLUMNS = {"avg": "sampled", "greedy": "greedy", "above_blind": "above blind", "turns_to_win": "turns of games won"}


@dataclass(frozen=True)
class WarmStart(common.WarmOptions):
    """Options of the supervised phase before reinforcement learning."""

    deaf_share: Fraction = 0.5
    """Share of guesses in the supervised games that pay no heed to the answers."""


@dataclass(frozen=True)
class Config:
    """Options of the run."""

    train: GRPOConfig = recipe(
        steps=400,
        num_prompts=32,
        group_size=16,
        max_tokens=guess.MAX_TOKENS,
        max_turns=guess.MAX_TURNS,
        environment_tokens=guess.ENVIRONMENT_TOKENS,
        advantages_of="turns",
        learning_rate=3e-3,
        warmup_steps=30,
        decay="linear",
        # AdamW divides a gradient by its size. With the usual ε of 1e-8, pure noise causes steps of full length.
        adam_epsilon=1e-3,
        # k3 hardly pulls back a token that is unlikely under the reference; the full divergence does.
        kl_coef=0.04,
        divergence="full",
        eval_every=100,
    )
    warm: WarmStart = WarmStart(warm_steps=300, warm_learning_rate=3e-3)
    output: flags.RunConfig = flags.RunConfig(Path("runs/guess"))
    noise: bool = True
    """Train with a coin toss for each answer as well."""


def main(config: Config) -> None:
    """Runs the warm start, GRPO and controls; prints groups, a table and the checksum, and writes the report."""
    started = time.perf_counter()
    train = config.train
    task = guess.guess_task(num_prompts=train.sampling.num_prompts, seed=train.seed)
    policy, programs, run = common.open_experiment(config, MODEL, guess.TEXT, task)
    games = partial(guess.deaf_games, deaf_share=config.warm.deaf_share)
    params = common.imitate(policy, games, config.warm, run, seed=train.seed)
    measure = partial(examine, task)
    rows, checksum, _ = train_with_control({"policy": params}, task, train, run, programs, measure)
    if config.noise:
        deaf = guess.guess_task(num_prompts=train.sampling.num_prompts, seed=train.seed, reply=guess.noise)
        hearing_noise = programs._replace(sampler=make_programs(policy, deaf, train).sampler)
        _, held = train_with_evaluation({"policy": params}, deaf, train, run, hearing_noise, phase="noise")
        rows["noise"] = summary(held.evaluation) | measure(*held)
    common.print_last_groups(run)
    title = f"share of games won on {guess.NUM_HELDOUT} held-out intervals, with 95% intervals"
    common.print_heldout(run, title, rows, COLUMNS, players(task.heldout.examples))
    finish(run, rows, checksum, started)


def examine(task: Task, evaluation: Evaluation, calls: Sequence[Samples]) -> dict[str, float]:
    """Summarises the sampled games: how far the share won lies above blind play, and the turns of won games."""
    games = [completion for group in evaluation.texts for completion in group[:-1]]
    turns = [len(game.turns) for game in games if guess.is_won(game.turns)]
    above = guess.above_blind(len(turns) / len(games), task.heldout.examples)
    return {"above_blind": above, "turns_to_win": float(np.mean(turns)) if turns else float("nan")}


def players(examples: Sequence[Example]) -> dict[str, list[str]]:
    """Returns the table's rows of three players with known returns."""

    def mean(of: Callable[[Example], float]) -> float:
        return float(np.mean([of(example) for example in examples]))

    def row(won: float, turns: str) -> list[str]:
        return [f"{won:.3f}", "", f"{guess.above_blind(won, examples):.3f}", turns]

    return {
        "best without answers": row(mean(guess.blind_return), f"{(guess.MAX_TURNS + 1) / 2:.3f}"),
        "any number left": row(mean(guess.listening_return), ""),
        "halving": row(1.0, f"{mean(guess.mean_turns):.3f}"),
    }


if __name__ == "__main__":
    flags.main(Config, main, __doc__)
