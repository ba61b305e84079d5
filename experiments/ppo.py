"""PPO beside GRPO: `experiments.arithmetic` with a critic in place of the comparison within groups.

The same task, warm start, rollouts and loop; a critic that starts from the policy is trained along. Less than two
minutes on two CPU cores. `--group-size 1 --num-prompts 256` takes as many completions of prompts that all differ, which
GRPO could not learn from.

  python -m experiments.ppo
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from experiments.arithmetic import CURVES, MODEL, WarmStart, check_warm_start, show, warm_start
from experiments.common import against_control, finish
from grpo_jax import cli
from grpo_jax.config import PPOConfig
from grpo_jax.models.policy import decoder_policy
from grpo_jax.tasks import arithmetic
from grpo_jax.training.ppo import add_critic, critic_policy, make_ppo_programs


@dataclass(frozen=True)
class Config(PPOConfig, WarmStart, cli.RunConfig):
    """Options of the run; what both have is as in `experiments.arithmetic`."""

    steps: int = 250
    num_prompts: int = 32
    group_size: int | None = 8
    max_tokens: int = arithmetic.MAX_TOKENS
    learning_rate: float = 4e-4
    critic_learning_rate: float = 1e-3
    old_logprobs: Literal["recompute", "sampler"] = "sampler"
    eval_every: int = 25
    eval_samples: int | None = 7
    run_dir: Path = Path("runs/ppo")


def main(config: Config) -> None:
    """Warm start, PPO; a table, a few groups, curves, a page, and the checksum of the result."""
    started = time.perf_counter()
    check_warm_start(config)
    task = arithmetic.arithmetic_task(num_prompts=config.num_prompts, seed=config.seed)
    policy = decoder_policy(MODEL)
    programs = make_ppo_programs(policy, critic_policy(MODEL), task, config)
    run = cli.open_run(config)
    params = add_critic(MODEL, warm_start(policy, config, config.seed, run))
    rows, checksum = against_control(policy, params, task, config, run, programs, phases=("ppo",))
    show(run, rows, "ppo")
    curves = (*CURVES, ("explained_variance", "variance of returns that the critic explains"))
    finish(run, rows, checksum, curves, started, phases=("ppo",))


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
