"""On-policy distillation: how many samples does a student need to learn addition from a teacher's probabilities?

The student starts as in `experiments.arithmetic`: three of ten samples are correct. The teacher is a larger decoder
that was fitted only to correct answers. The student samples one completion of each prompt. At each token it learns the
teacher's whole distribution (reverse_kl), or it uses log π_T − log π as the token's advantage (k1). No reward is
computed. Distillation is compared with:

- supervised steps on as many samples of the teacher
- GRPO on the reward, which needs groups
- the control: distillation from a teacher that was never trained

The student's learning rate and the single completion of a prompt were chosen with another seed, 7. GRPO uses the
settings of `experiments.arithmetic`. Three seeds take half an hour on two busy CPU cores. Expect reverse_kl to
reach 95% of its teacher's accuracy after 3,000 to 5,000 samples, and GRPO after 25,000 or more. Compared with the
paper, there are no pretrained models and no long completions.

  python -m experiments.distill
  python -m experiments.distill --kinds reverse_kl forward_kl jsd k1
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from experiments import common
from experiments.arithmetic import MODEL, WarmStart, warm_start
from experiments.common import Seeds, collect, over_seeds, print_over_seeds
from experiments.tasks import arithmetic
from grpo_jax import hosts, report
from grpo_jax.commands import flags
from grpo_jax.config import Distillation, GRPOConfig, recipe, with_options
from grpo_jax.errors import UsageError
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.offline.phase import SupervisedConfig
from grpo_jax.offline.sft import sft_objective
from grpo_jax.options import Positive, Size, Weight
from grpo_jax.rl.evaluate import summary
from grpo_jax.rl.programs import Programs, make_programs
from grpo_jax.rl.source import completion_numbers, group_temperatures, make_sampler
from grpo_jax.rl.types import SAMPLING, noise_of
from grpo_jax.runs.folder import RunFolder
from grpo_jax.statistics import cell
from grpo_jax.step import Batch
from grpo_jax.tasks.task import Task
from grpo_jax.training.phases import HeldoutResult, evaluate_heldout, fit, train_with_evaluation

TEACHER = replace(MODEL, hidden_size=2 * MODEL.hidden_size, intermediate_size=2 * MODEL.intermediate_size)
CURVES = (
    ("heldout_avg", "held-out accuracy"),
    ("distillation", "divergence from the teacher, nats a token"),
)
SHARE = 0.95  # share of the teacher's accuracy up to which samples are counted


@dataclass(frozen=True)
class GRPOOptions:
    """Options of GRPO, which needs groups, as in `experiments.arithmetic`."""

    grpo_steps: Size = 152
    """Steps of GRPO."""
    grpo_eval_every: Size = 8
    """Steps of GRPO between held-out evaluations."""
    grpo_group_size: Size = 8
    """Completions of each prompt."""
    grpo_learning_rate: Positive = 4e-4
    """Learning rate of AdamW."""
    grpo_kl_coef: Weight = 0.04
    """Weight of the KL to the start."""


@dataclass(frozen=True)
class Config:
    """Options of the run; `train` is for distillation and supervised training."""

    train: GRPOConfig = recipe(
        steps=192,
        num_prompts=32,
        group_size=1,
        max_tokens=arithmetic.MAX_TOKENS,
        learning_rate=1e-3,
        kl_coef=0.0,
        distillation="reverse_kl",
        reward_coef=0.0,
        eval_every=16,
        eval_samples=3,
        rollouts_every=0,
    )
    grpo: GRPOOptions = GRPOOptions()
    warm: WarmStart = WarmStart()
    seeds: Seeds = Seeds()
    output: flags.RunConfig = flags.RunConfig(Path("runs/distill"))
    kinds: tuple[Distillation, ...] = ("reverse_kl", "k1")
    """Kinds of distillation to compare; the control has the first."""


class World(NamedTuple):
    """The parts that the methods of one seed share."""

    config: GRPOConfig  # with the seed
    task: Task
    run: RunFolder
    start: Params
    teacher: Params
    untrained: Params
    before: HeldoutResult  # of the start


class Models(NamedTuple):
    """The parts that all seeds share."""

    policy: Policy
    teacher: Policy
    programs: Mapping[str, Programs]  # by method


def main(config: Config) -> None:
    """Trains a student and a teacher, and runs every method, for each seed; prints a table and writes curves."""
    started = time.perf_counter()
    hosts.check_alone("experiments with supervised phases")
    if not config.kinds or "none" in config.kinds:
        raise UsageError("kinds names no distillation: choose reverse_kl, forward_kl, jsd or k1")
    models = new_models(config)
    seeds = config.seeds.starting_at(config.train.seed)
    run = flags.open_run(config)
    runs: dict[str, dict[str, list[float]]] = {}
    for seed in seeds:
        world, score = new_world(config, models, run, seed)
        for method in (*models.programs, "sft"):
            train_by(method, config, models, world)
            collect(runs, {method: numbers_of(method, config, world, score)})
    show(config, run, runs, seeds)
    report.say_end(run, started)


def new_models(config: Config) -> Models:
    """Makes the functions of both models, and the programs of GRPO and of each kind of distillation."""
    policy, teacher = decoder_policy(MODEL), decoder_policy(TEACHER)
    policies = {"policy": policy, "teacher": teacher}
    task = arithmetic.arithmetic_task(num_prompts=config.train.sampling.num_prompts, seed=config.train.seed)
    results = {
        kind: make_programs(policies, task, with_options(config.train, distillation=kind)) for kind in config.kinds
    }
    grpo = make_programs(policy, task, of_grpo(config, config.train))
    return Models(policy, teacher, results | {"grpo": grpo, "control": results[config.kinds[0]]})


def of_grpo(config: Config, train: GRPOConfig) -> GRPOConfig:
    """Returns the configuration of GRPO on the reward."""
    separate = config.grpo
    return with_options(
        train,
        distillation="none",
        reward_coef=1.0,
        steps=separate.grpo_steps,
        eval_every=separate.grpo_eval_every,
        group_size=separate.grpo_group_size,
        learning_rate=separate.grpo_learning_rate,
        kl_coef=separate.grpo_kl_coef,
    )


def new_world(config: Config, models: Models, run: RunFolder, seed: int) -> tuple[World, float]:
    """Makes the student's start and its teachers; also returns the accuracy of the trained teacher."""
    train = with_options(config.train, seed=seed)
    task = arithmetic.arithmetic_task(num_prompts=train.sampling.num_prompts, seed=seed)
    start = warm_start(models.policy, config.warm, seed, run, phase=f"warm_{seed}")
    right = replace(config.warm, wrong_share=0.0)
    taught = warm_start(models.teacher, right, seed, run, phase=f"teacher_{seed}")
    grpo, settings = models.programs["grpo"], of_grpo(config, train)
    of_teacher = grpo._replace(sampler=make_sampler(models.teacher, task, settings.sampling))
    score = float(evaluate_heldout(of_teacher, taught, task, settings, run).evaluation.rewards.mean())
    before = evaluate_heldout(grpo, start, task, settings, run)
    return World(train, task, run, start, taught, common.new_params(models.teacher, seed), before), score


def train_by(method: str, config: Config, models: Models, world: World) -> None:
    """Trains with one method from the start of a seed, and logs to the run."""
    phase = f"{method}_{world.config.seed}"
    if method == "sft":
        train_on_samples(config, models, world, phase)
        return
    start: Params = {"policy": world.start}
    if method == "grpo":
        train = of_grpo(config, world.config)
    else:
        train = with_options(world.config, distillation=config.kinds[0] if method == "control" else method)
        start["teacher"] = world.untrained if method == "control" else world.teacher
    train_with_evaluation(start, world.task, train, world.run, models.programs[method], phase=phase, start=world.before)


def train_on_samples(config: Config, models: Models, world: World, phase: str) -> None:
    """Trains on the teacher's samples for the same prompts, as many as the student samples in distillation."""
    train, grpo = world.config, models.programs["grpo"]

    def evaluate(params: Params, step: int) -> dict[str, float]:
        settings = of_grpo(config, train)  # GRPO's sampler is faster here; completions are the same
        results = evaluate_heldout(grpo, params, world.task, settings, world.run)
        return {f"heldout_{name}": value for name, value in summary(results.evaluation).items()}

    supervised = SupervisedConfig(
        train.steps,
        train.optimizer.learning_rate,
        log_every=train.logging.eval_every,
        eval_every=train.logging.eval_every,
        checkpoint_every=train.logging.checkpoint_every,
    )
    batches = samples_of_teacher(models.teacher, world)
    fit(sft_objective(models.policy), world.start, batches, supervised, world.run, phase=phase, evaluate=evaluate)


def samples_of_teacher(teacher: Policy, world: World) -> Callable[[int], Batch]:
    """Makes a function: step -> the teacher's completions of the prompts of that step."""
    sampling = world.config.sampling
    sampler = make_sampler(teacher, world.task, sampling)
    numbers, temperature = completion_numbers(sampling), np.asarray(group_temperatures(sampling))

    def batch(step: int) -> Batch:
        noise = noise_of(world.config.seed, SAMPLING, step)
        sampled, _ = sampler.sample(world.teacher, world.task.prompts(step), numbers, temperature, noise)
        return jax.device_get(sampled)

    return batch


def points_of(method: str, config: Config, seed: int, run: RunFolder) -> dict[int, float]:
    """Returns number of training samples -> held-out accuracy, for one method and seed."""
    sampling = (of_grpo(config, config.train) if method == "grpo" else config.train).sampling
    a_step = sampling.num_prompts * sampling.group_size
    lines = [line for line in run.lines() if line["phase"] == f"{method}_{seed}" and "heldout_avg" in line]
    return {line["step"] * a_step: line["heldout_avg"] for line in lines}


def numbers_of(method: str, config: Config, world: World, score: float) -> dict[str, float]:
    """Summarises one method and seed: accuracies, as shares of the teacher's too, and samples until `SHARE` of it."""
    points = points_of(method, config, world.config.seed, world.run)
    sampling = config.train.sampling
    budget = config.train.steps * sampling.num_prompts * sampling.group_size
    equal = points[max(samples for samples in points if samples <= budget)]
    return {
        "start": float(world.before.evaluation.rewards.mean()),
        "teacher": score,
        "avg": equal,
        "share": equal / score,
        "end": points[max(points)],
        "samples": float(min((samples for samples, avg in points.items() if avg >= SHARE * score), default=np.nan)),
    }


def show(config: Config, run: RunFolder, runs: dict[str, dict[str, list[float]]], seeds: range) -> None:
    """Prints the table; writes curves.png, samples.png and results.json."""
    rows = over_seeds(runs, first="avg", control="control")
    columns = ("start", "teacher", "at equal samples", "of the teacher's", "at its end", f"samples to {SHARE:.0%}")
    table = {
        method: [
            row["start"],
            row["teacher"],
            cell(row, "avg"),
            cell(row, "share"),
            f"{row['end']:.3f}",
            ", ".join("–" if np.isnan(count) else f"{count:,.0f}" for count in runs[method]["samples"]),
        ]
        for method, row in rows.items()
    }
    print_over_seeds(run, "accuracy on 1,000 held-out additions", seeds, columns, table)
    run.console.print(f"control: {config.kinds[0]} with a teacher that was never trained.", soft_wrap=True)
    save_samples(config, run, seeds, {method: row["teacher"] for method, row in rows.items()})
    common.save_over_seeds(run, runs, rows, seeds, CURVES)


def save_samples(config: Config, run: RunFolder, seeds: range, scores: Mapping[str, float]) -> None:
    """Draws samples.png: held-out accuracy by training samples, with means and ranges over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(5, 3.4), layout="constrained")
    for number, method in enumerate(scores):
        results = [points_of(method, config, seed, run) for seed in seeds]
        samples = [count for count in sorted(results[0]) if count]  # a logarithm has no 0
        values = np.array([[points[count] for count in samples] for points in results])
        axis.plot(samples, values.mean(0), color=f"C{number}", label=method, linewidth=1.3)
        axis.fill_between(samples, values.min(0), values.max(0), color=f"C{number}", alpha=0.2, linewidth=0)
    axis.axhline(SHARE * max(scores.values()), color="0.4", linestyle=":", label=f"{SHARE:.0%} of the teacher")
    axis.set(xscale="log", xlabel="samples of training", ylabel="held-out accuracy")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False)
    figure.savefig(run.path / "samples.png", dpi=160, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    flags.main(Config, main, __doc__)
