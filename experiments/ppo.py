"""PPO and GRPO on the additions of `experiments.arithmetic`: do both solve them, each with its own tuned settings?

Three runs begin at the same warm start and sample equally many completions per step: PPO with a critic that starts from
the policy, GRPO, and the control, which is PPO on a coin toss.

Learning rates and KL were chosen by the training reward on two other seeds. Three seeds, with three runs each, take
about six minutes in total on two CPU cores. Expect the sampled held-out accuracy to rise from about 0.3 to above 0.95
for both PPO and GRPO.

`--critic shared` gives PPO a critic that shares the policy's layers. `--group-size 1 --num-prompts 256` gives PPO a
different prompt for each completion, which GRPO cannot use.

  python -m experiments.ppo
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np

from experiments import common
from experiments.arithmetic import MODEL, WarmStart, warm_start
from experiments.common import Seeds, collect, over_seeds, print_over_seeds
from experiments.tasks import arithmetic
from grpo_jax import report
from grpo_jax.commands import flags
from grpo_jax.config import PPO, CriticConfig, GRPOConfig, with_options
from grpo_jax.models.policy import decoder_policy
from grpo_jax.rl.evaluate import summary
from grpo_jax.rl.ppo import add_critic, critic_policy
from grpo_jax.rl.programs import make_programs
from grpo_jax.runs.folder import RunFolder
from grpo_jax.statistics import cell
from grpo_jax.tasks.task import random_reward
from grpo_jax.training.phases import evaluate_heldout, train_with_evaluation

CURVES = (
    ("heldout_avg", "held-out accuracy"),
    ("kl", "KL to the start, nats a token"),
    ("entropy", "entropy, nats a token"),
)


@dataclass(frozen=True)
class Config:
    """Options of the run; options that both methods have are those of `experiments.arithmetic`."""

    ppo: GRPOConfig = with_options(
        PPO,
        steps=250,
        num_prompts=32,
        group_size=8,
        max_tokens=arithmetic.MAX_TOKENS,
        learning_rate=4e-4,
        critic_learning_rate=1e-3,
        eval_every=25,
        eval_samples=7,
    )
    warm: WarmStart = WarmStart()
    seeds: Seeds = Seeds()
    output: flags.RunConfig = flags.RunConfig(Path("runs/ppo"))


def main(config: Config) -> None:
    """Runs the warm start, PPO, GRPO and the control for each seed; prints a table and writes curves."""
    started = time.perf_counter()
    seeds = config.seeds.starting_at(config.ppo.seed)
    policy = decoder_policy(MODEL)
    task = arithmetic.arithmetic_task(num_prompts=config.ppo.sampling.num_prompts, seed=config.ppo.seed)
    of_grpo = grpo_config(config.ppo)
    policies = {"policy": policy, "critic": critic_policy(MODEL)}
    ppo = config.ppo, make_programs(policies, task, config.ppo)
    methods = {"ppo": ppo, "grpo": (of_grpo, make_programs(policy, task, of_grpo)), "control": ppo}
    run = flags.open_run(config)
    runs: dict[str, dict[str, list[float]]] = {}
    for seed in seeds:
        policy_start = warm_start(policy, config.warm, seed, run, phase=f"warm_{seed}")
        task = arithmetic.arithmetic_task(num_prompts=of_grpo.sampling.num_prompts, seed=seed)
        seeded = with_options(of_grpo, seed=seed)
        before = evaluate_heldout(methods["grpo"][1], policy_start, task, seeded, run)
        for method, (settings, programs) in methods.items():
            settings, phase, critic = with_options(settings, seed=seed), f"{method}_{seed}", config.ppo.critic.critic
            task = arithmetic.arithmetic_task(num_prompts=settings.sampling.num_prompts, seed=seed)
            start = {"policy": policy_start} if method == "grpo" else add_critic(MODEL, policy_start, critic)
            reward = random_reward(seed) if method == "control" else None
            state, held = train_with_evaluation(
                start, task, settings, run, programs, phase=phase, reward=reward, start=before
            )
            results = summary(held.evaluation)
            row = {
                "before": float(before.evaluation.rewards.mean()),
                "avg": results["avg"],
                "greedy": results["greedy"],
            }
            row["steps"] = steps_to(run, phase)
            row["parameters"] = sum(leaf.size for leaf in jax.tree.leaves(state.params))
            collect(runs, {method: row})
    show(run, runs, seeds)
    report.say_end(run, started)


def grpo_config(config: GRPOConfig) -> GRPOConfig:
    """GRPO with its own settings on as many completions; where PPO has no groups, in groups of 8."""
    config = replace(config, critic=CriticConfig())
    run = with_options(config, preset="grpo", kl_coef=0.01, kl_target=None, divergence="preset", learning_rate=4e-4)
    if run.sampling.group_size == 1:
        return with_options(run, group_size=8, num_prompts=run.sampling.num_prompts // 8)
    return run


def steps_to(run: RunFolder, phase: str, accuracy: float = 0.9) -> float:
    """Returns the first step with this held-out accuracy; NaN if there is none."""
    points = [line for line in run.lines() if line["phase"] == phase and "heldout_avg" in line]
    return min((line["step"] for line in points if line["heldout_avg"] >= accuracy), default=np.nan)


def seconds_a_step(run: RunFolder, method: str) -> float:
    """Returns the median seconds over all steps of a method, without evaluations."""
    times = [line for line in run.lines("times.jsonl") if line["phase"].startswith(f"{method}_")]
    parts = ("rollout", "reward", "update")
    return float(np.median([sum(line[f"{part}_s"] for part in parts) for line in times]))


def show(run: RunFolder, runs: dict[str, dict[str, list[float]]], seeds: range) -> None:
    """Prints the table; writes curves.png and results.json."""
    rows = over_seeds(runs, first="avg", control="control")
    columns = ("before", "sampled", "above control", "steps to .9", "s a step", "trained")
    table = {
        method: [
            f"{row['before']:.3f}",
            cell(row, "avg"),
            cell(row, "difference"),
            "–" if np.isnan(row["steps"]) else f"{row['steps']:.0f}",
            f"{seconds_a_step(run, method):.3f}",
            f"{row['parameters']:,.0f}",
        ]
        for method, row in rows.items()
    }
    print_over_seeds(run, "accuracy on 1,000 held-out additions", seeds, columns, table, coin="control")
    common.save_over_seeds(run, runs, rows, seeds, CURVES)


if __name__ == "__main__":
    flags.main(Config, main, __doc__)
