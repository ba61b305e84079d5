"""On-policy distillation: a student learns addition from a teacher's probabilities, in how many samples?

The student starts as in `experiments.arithmetic`: it answers right in three samples of ten. The teacher is a larger
decoder that was fitted to right answers alone. The student samples, and at each token learns the teacher's distribution
(reverse and forward KL, Jensen-Shannon), or takes log π_T − log π as the token's advantage (k1); no reward is computed.
Beside it are supervised steps on as many samples of the teacher, and GRPO on the reward with five times as many samples
at its end. All have the same learning rate, prompts and completions a step. The control has a teacher that was never
trained. About seven minutes on two CPU cores for three seeds; expect the student at 95% of its teacher's accuracy in a
fifth of GRPO's samples or less. Left out of the paper: pretrained models and long completions.

  python -m experiments.distill
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments import common
from experiments.arithmetic import MODEL, WarmStart, check_warm_start, warm_start
from experiments.common import Seeds, collect, over_seeds, seeds_of
from grpo_jax.commands.common import HeldoutResult, evaluate_heldout, learn, say_end
from grpo_jax.config import Distillation, GRPOConfig, recipe, with_options
from grpo_jax.errors import UsageError
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.models.transformer import Params
from grpo_jax.runs import flags, terminal
from grpo_jax.runs.folder import RunFolder, write_json
from grpo_jax.statistics import cell
from grpo_jax.tasks import arithmetic
from grpo_jax.tasks.task import Task
from grpo_jax.training.distillation import Taught, make_distillation_programs
from grpo_jax.training.evaluate import summary
from grpo_jax.training.grpo import make_programs
from grpo_jax.training.loop import Programs
from grpo_jax.training.rollout import (
    completion_numbers,
    group_temperatures,
    make_sampler,
    noise_of,
)
from grpo_jax.training.state import Batch
from grpo_jax.training.supervised.phase import SupervisedConfig
from grpo_jax.training.supervised.sft import train_sft

TEACHER = replace(MODEL, hidden_size=2 * MODEL.hidden_size, intermediate_size=2 * MODEL.intermediate_size)
KINDS: tuple[Distillation, ...] = ("reverse_kl", "forward_kl", "jsd", "k1")
METHODS = (*KINDS, "sft", "grpo", "control")
CURVES = (
    ("heldout_avg", "held-out accuracy"),
    ("distillation", "divergence from the teacher, nats a token"),
)
SHARE = 0.95  # of the teacher's accuracy, which samples are counted to


@dataclass(frozen=True)
class Config:
    """Options of the run."""

    train: GRPOConfig = recipe(
        steps=50,
        num_prompts=32,
        max_tokens=arithmetic.MAX_TOKENS,
        learning_rate=4e-4,
        kl_coef=0.0,
        eval_every=5,
        rollouts_every=0,
    )
    warm: WarmStart = WarmStart()
    seeds: Seeds = Seeds()
    output: flags.RunConfig = flags.RunConfig(Path("runs/distill"))
    grpo_factor: int = 5
    """Steps of GRPO for each step of the others."""
    grpo_kl_coef: float = 0.04
    """Of GRPO alone, as in `experiments.arithmetic`."""


class World(NamedTuple):
    """What the methods of one seed have in common."""

    config: GRPOConfig  # with the seed
    task: Task
    run: RunFolder
    start: Params
    teacher: Params
    untrained: Params
    before: HeldoutResult  # of the start


def main(config: Config) -> None:
    """For each seed a student, a teacher, and every method; a table, curves and all numbers."""
    started = time.perf_counter()
    check_warm_start(config.warm)
    if config.grpo_factor < 1:
        raise UsageError(f"grpo_factor is {config.grpo_factor}: it must be at least 1")
    policy, teacher = decoder_policy(MODEL), decoder_policy(TEACHER)
    programs = programs_of(config, policy, teacher)
    seeds = seeds_of(config.train.seed, config.seeds)
    run = flags.open_run(config)
    runs: dict[str, dict[str, list[float]]] = {}
    for seed in seeds:
        world, score = new_world(config, policy, teacher, programs, run, seed)
        for method in METHODS:
            train_by(method, config, world, policy, teacher, programs)
            collect(runs, {method: numbers_of(method, world, score)})
    show(run, runs, seeds)
    say_end(run, started)


def programs_of(config: Config, policy: Policy, teacher: Policy) -> dict[str, Programs]:
    """Those of GRPO and of each kind of distillation, which all seeds share."""
    task = arithmetic.arithmetic_task(num_prompts=config.train.sampling.num_prompts, seed=config.train.seed)
    found = {"grpo": make_programs(policy, task, of_grpo(config, config.train))}
    for kind in KINDS:
        found[kind] = make_distillation_programs(policy, teacher, task, distilled(config.train, kind))
    return found | {"control": found["reverse_kl"]}


def of_grpo(config: Config, train: GRPOConfig) -> GRPOConfig:
    """GRPO on the reward, with more steps."""
    every = config.grpo_factor * train.logging.eval_every
    return with_options(train, steps=config.grpo_factor * train.steps, kl_coef=config.grpo_kl_coef, eval_every=every)


def distilled(train: GRPOConfig, kind: Distillation) -> GRPOConfig:
    """Distillation without a reward."""
    return with_options(train, distillation=kind, reward_coef=0.0)


def new_world(
    config: Config, policy: Policy, teacher: Policy, programs: dict[str, Programs], run: RunFolder, seed: int
) -> tuple[World, float]:
    """The student's start, its teachers, and the accuracy of the trained one."""
    train = with_options(config.train, seed=seed)
    task = arithmetic.arithmetic_task(num_prompts=train.sampling.num_prompts, seed=seed)
    start = warm_start(policy, config.warm, seed, run, phase=f"warm_{seed}")
    right = replace(config.warm, wrong_share=0.0)
    taught = warm_start(teacher, right, seed, run, phase=f"teacher_{seed}")
    sampler = programs["grpo"]._replace(sampler=make_sampler(teacher, task, train.sampling))
    score = float(evaluate_heldout(sampler, taught, task, train, run).evaluation.scores.mean())
    before = evaluate_heldout(programs["grpo"], start, task, train, run)
    return World(train, task, run, start, taught, common.new_params(teacher, seed), before), score


def train_by(
    method: str, config: Config, world: World, policy: Policy, teacher: Policy, programs: dict[str, Programs]
) -> None:
    """One method from the start of a seed; its lines are in the run."""
    phase = f"{method}_{world.config.seed}"
    if method == "sft":
        train_on_samples(world, policy, teacher, programs["grpo"], phase)
        return
    start: Any = world.start
    if method == "grpo":
        train = of_grpo(config, world.config)
    else:
        train = distilled(world.config, "reverse_kl" if method == "control" else method)  # type: ignore[arg-type]
        start = Taught(world.start, world.untrained if method == "control" else world.teacher)
    learn(start, world.task, train, world.run, programs[method], phase=phase, start=world.before)


def train_on_samples(world: World, policy: Policy, teacher: Policy, programs: Programs, phase: str) -> None:
    """Supervised steps on the teacher's samples, as many of the same prompts as the student samples of itself."""
    train = world.config
    evaluate = heldout(world, programs)
    world.run.log(phase, 0, evaluate(world.start))
    supervised = SupervisedConfig(
        train.steps,
        train.optimizer.learning_rate,
        log_every=train.logging.eval_every,
        eval_every=train.logging.eval_every,
        checkpoint_every=train.logging.checkpoint_every,
    )
    batches = samples_of_teacher(world, teacher)
    train_sft(policy, world.start, batches, supervised, world.run, phase=phase, evaluate=evaluate)


def samples_of_teacher(world: World, teacher: Policy) -> Callable[[int], Batch]:
    """step -> completions by the teacher of the prompts of that step."""
    sampling = world.config.sampling
    sampler = make_sampler(teacher, world.task, sampling)
    numbers, temperature = completion_numbers(sampling), np.asarray(group_temperatures(sampling))

    def batch(step: int) -> Batch:
        noise = noise_of(world.config.seed, 0, step)
        sampled, _ = sampler.sample(world.teacher, world.task.prompts(step), numbers, temperature, noise)
        return jax.device_get(sampled)

    return batch


def heldout(world: World, programs: Programs) -> Callable[[Params], dict[str, float]]:
    """What is logged of parameters while they are trained."""

    def evaluate(params: Params) -> dict[str, float]:
        found = evaluate_heldout(programs, params, world.task, world.config, world.run)
        return {f"heldout_{name}": value for name, value in summary(found.evaluation).items()}

    return evaluate


def numbers_of(method: str, world: World, score: float) -> dict[str, float]:
    """Of one method and seed: accuracies, as shares of the teacher's too, and samples until `SHARE` of it."""
    lines = [line for line in world.run.lines() if line["phase"] == f"{method}_{world.config.seed}"]
    points = {line["step"]: line["heldout_avg"] for line in lines if "heldout_avg" in line}
    sampling = world.config.sampling
    a_step = sampling.num_prompts * sampling.group_size
    reached = [step * a_step for step, avg in points.items() if avg >= SHARE * score]
    return {
        "start": points[0],
        "teacher": score,
        "avg": points[world.config.steps],
        "share": points[world.config.steps] / score,
        "end": points[max(points)],
        "samples": float(min(reached, default=np.nan)),
    }


def show(run: RunFolder, runs: dict[str, dict[str, list[float]]], seeds: range) -> None:
    """The table, curves.png and results.json."""
    rows = over_seeds(runs, first="avg", control="control")
    columns = ("start", "teacher", "at equal samples", "share of teacher", "at its end", f"samples to {SHARE:.0%}")
    table = {
        method: [
            row["start"],
            row["teacher"],
            cell(row, "avg"),
            cell(row, "share"),
            cell(row, "end"),
            ", ".join("–" if np.isnan(count) else f"{count:,.0f}" for count in runs[method]["samples"]),
        ]
        for method, row in rows.items()
    }
    title = f"accuracy on 1,000 held-out additions, seeds {seeds[0]} to {seeds[-1]}, 95% intervals over seeds"
    terminal.print_table(run, title, columns, table)
    run.console.print("control: reverse_kl with a teacher that was never trained.", soft_wrap=True)
    phases = {method: [f"{method}_{seed}" for seed in seeds] for method in METHODS}
    terminal.save_curves(run, CURVES, phases)
    write_json(run.path / "results.json", {"seeds": list(seeds), "runs": runs, "over_seeds": rows})


if __name__ == "__main__":
    flags.main(Config, main, __doc__)
