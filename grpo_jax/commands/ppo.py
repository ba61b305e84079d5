"""PPO with a critic, on any model and any task.

Model, task and rewards are given as for GRPO. A critic foresees the reward of a completion, so a prompt needs only one;
with --group-size 8 it gets as many as in GRPO. The critic starts from the policy's weights, and takes as much memory
again; --critic shared makes it a head on the policy's decoder. The KL to the start is taken off the reward. Held-out
prompts are evaluated before, during and after training; --control also trains on a coin toss. Export and evaluation of
the run take the policy and leave the critic.

  grpo-jax train --method ppo --model DIR --task rows.jsonl --reward my_rewards.py:solved
  grpo-jax train --method ppo --model DIR --task gsm8k --data DIR --critic shared --num-prompts 256
"""

from dataclasses import dataclass
from pathlib import Path

from grpo_jax.checks import validate_ppo
from grpo_jax.commands.common import RUN_DIR, Method
from grpo_jax.commands.grpo import CURVES, opened, run_method
from grpo_jax.config import EngineOptions, ModelOptions, PPOConfig, with_options
from grpo_jax.devices import devices_of, parts, size
from grpo_jax.rl.ppo import add_critic, critic_policy, make_ppo_programs
from grpo_jax.runs import flags
from grpo_jax.runs.pretrained import planned, say_plan
from grpo_jax.tasks.options import TaskOptions
from grpo_jax.train import open_engine

PPO_CURVES = (*CURVES, ("explained_variance", "variance of returns that the critic explains"))


# eval_samples of None is group_size - 1, which is 0 in PPO.
DEFAULTS = with_options(PPOConfig(), eval_every=20, eval_samples=7)


@dataclass(frozen=True)
class Config:
    """Options of the run."""

    ppo: PPOConfig = DEFAULTS
    model: ModelOptions = ModelOptions()
    engine: EngineOptions = EngineOptions()
    task: TaskOptions = TaskOptions()
    output: flags.RunConfig = flags.RunConfig(Path(RUN_DIR))
    method: Method = "ppo"
    """What trains the model. Each method has options of its own: `--method grpo --help` lists those of GRPO."""
    control: bool = False
    """Train on a coin toss as well, from the same start."""


def main(config: Config) -> None:
    """Loads model and task, adds a critic, then trains."""
    devices = devices_of(config.ppo.run)
    validate_ppo(config.ppo, num_devices=parts(devices))  # before a checkpoint is read
    with opened(config.model, config.task, config.ppo.run) as (model, task):
        config, model, plan = planned(config, config.ppo, model, task, devices=size(devices), parts=parts(devices))
        shape = model.pretrained.config
        sampler = open_engine(config.engine, model, task, config.ppo.run, note=flags.say_note)
        programs = make_ppo_programs(model.policy, critic_policy(shape), task, config.ppo, sampler=sampler)
        start = add_critic(shape, model.params, config.ppo.critic.critic)
        run = flags.open_run(config)
        say_plan(run, plan)
        run_method(
            run,
            model,
            task,
            programs,
            start,
            phase="ppo",
            options=config.model,
            chat=config.task.chat,
            control=config.control,
            curves=PPO_CURVES,
        )
