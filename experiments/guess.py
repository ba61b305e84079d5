"""Higher or lower: does GRPO teach a policy to use what an environment tells it?

A small decoder first learns the rules from a player that pays no heed to half of the answers. Then it plays by itself:
a guess, the environment's answer, the next guess, in one completion whose answers it reads and does not learn from. The
best policy halves the interval. Two controls begin at the same start: one gets a coin toss for a reward, the other a
coin toss for each answer. Minutes on two CPU cores; expect the share of the best policy's return on held-out intervals
to rise from about 0.1 to above 0.8.

  python -m experiments.guess
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from experiments import common
from grpo_jax.commands.common import finish, learn, train_with_control
from grpo_jax.config import GRPOConfig, recipe
from grpo_jax.errors import UsageError
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.models.transformer import Params
from grpo_jax.runs import flags, terminal
from grpo_jax.runs.folder import RunFolder
from grpo_jax.statistics import cell
from grpo_jax.tasks import guess
from grpo_jax.training.evaluate import Evaluation, Samples, summary
from grpo_jax.training.grpo import make_programs
from grpo_jax.training.state import Batch
from grpo_jax.training.supervised.phase import SupervisedConfig

MODEL = ModelConfig(vocab_size=guess.VOCAB_SIZE, initializer_range=0.1)
CURVES = (("reward", "return (dots: held out)"), ("turns_mean", "turns"))


@dataclass(frozen=True)
class WarmStart:
    """The supervised phase before."""

    warm_steps: int = 500
    """Supervised steps before training on rewards."""
    warm_batch: int = 128
    """Games of a supervised step."""
    warm_learning_rate: float = 2e-3
    """Of the supervised steps."""
    deaf_share: float = 0.5
    """Share of guesses in the supervised games that pay no heed to the answers."""


@dataclass(frozen=True)
class Config:
    """Options of the run."""

    train: GRPOConfig = recipe(
        steps=200,
        num_prompts=32,
        epochs=2,
        minibatches=2,
        max_tokens=guess.MAX_TOKENS,
        max_turns=guess.MAX_TURNS,
        environment_tokens=guess.ENVIRONMENT_TOKENS,
        learning_rate=8e-4,
        decay="linear",
        kl_coef=0.01,
        eval_every=50,
    )
    warm: WarmStart = WarmStart()
    output: flags.RunConfig = flags.RunConfig(Path("runs/guess"))
    noise: bool = True
    """Train with a coin toss for each answer as well."""


def main(config: Config) -> None:
    """Warm start, GRPO, controls; a table, a few groups, curves, a page, and the checksum of the result."""
    started = time.perf_counter()
    check_warm_start(config.warm)
    train = config.train
    task = guess.guess_task(num_prompts=train.sampling.num_prompts, seed=train.seed)
    policy = decoder_policy(MODEL)
    programs = make_programs(policy, task, train)  # refuses bad options before anything is compiled
    run = flags.open_run(config)
    params = warm_start(policy, config.warm, train.seed, run)
    rows, checksum = train_with_control(params, task, train, run, programs, examine)
    phases = ["grpo", "control"]
    if config.noise:
        deaf = guess.guess_task(num_prompts=train.sampling.num_prompts, seed=train.seed, reply=guess.noise)
        unseen = replace(train, logging=replace(train.logging, eval_every=0))
        _, held = learn(params, deaf, unseen, run, make_programs(policy, deaf, unseen), phase="noise")
        rows["noise"] = summary(held.evaluation) | examine(*held)
        phases.append("noise")
    show(run, rows, task)
    finish(run, rows, checksum, CURVES, started, phases=phases)


def check_warm_start(config: WarmStart) -> None:
    """Refuses games that there cannot be.

    Raises:
      UsageError: one sentence that says what to change.
    """
    if config.warm_steps < 1 or config.warm_batch < 1 or not 0 <= config.deaf_share <= 1:
        raise UsageError("warm_steps and warm_batch must be at least 1, and deaf_share between 0 and 1")


def warm_start(policy: Policy, config: WarmStart, seed: int, run: RunFolder) -> Params:
    """Parameters that know the rules; the run keeps what describes the model."""
    common.keep_model(run, MODEL, guess.TEXT)

    def warm_batch(step: int) -> Batch:
        prompts, ids, mask = guess.bad_games(
            batch_size=config.warm_batch, seed=seed, step=step, deaf_share=config.deaf_share
        )
        return common.completions_batch(prompts, ids[:, None], mask[:, None])

    warm = SupervisedConfig(config.warm_steps, config.warm_learning_rate)
    return common.warm_start(policy, warm_batch, warm, run, seed=seed, phase="warm")


def examine(evaluation: Evaluation, calls: Sequence[Samples]) -> dict[str, float]:
    """Of the sampled games: the share that was won, and the turns that it took."""
    del calls
    games = [completion for group in evaluation.texts for completion in group[:-1]]
    turns = [len(game.turns) for game in games if (game.turns[-1].reward or 0) > 0]
    return {"won": len(turns) / len(games), "turns_to_win": float(np.mean(turns)) if turns else float("nan")}


def show(run: RunFolder, rows: dict[str, dict[str, float]], task: guess.Task) -> None:
    """Prints two groups of the end, and returns before and after beside the best policy's."""
    terminal.print_groups(run, [line for line in run.lines("rollouts.jsonl") if line["phase"] == "grpo"][-2:])
    turns = [guess.best_turns(example) for example in task.heldout.examples]
    best = float(np.mean([guess.return_of(turn) for turn in turns]))
    for row in rows.values():
        row["share_of_best"] = row["avg"] / best
    names = ("avg", "greedy", "share_of_best", "won", "turns_to_win")
    table = {title: [cell(row, name) for name in names] for title, row in rows.items()}
    table["halving"] = [f"{best:.3f}", f"{best:.3f}", "1.000", "1.000", f"{np.mean(turns):.3f}"]
    title = f"return on {len(turns)} held-out intervals, with 95% intervals"
    terminal.print_table(run, title, ("sampled", "greedy", "share of best", "won", "turns"), table)


if __name__ == "__main__":
    flags.main(Config, main, __doc__)
