"""PPO with a critic, on any model and any task.

Model, task and rewards are given as for GRPO. A critic foresees the reward of a completion, so a prompt needs only one;
with --group-size 8 it gets as many as in GRPO. The critic starts from the policy's weights, and takes as much memory
again; --critic shared makes it a head on the policy's decoder.

The trainer subtracts the KL to the start from the reward. Held-out prompts are evaluated before, during and after
training; --control also trains on a coin toss. Export and evaluation of the run take the policy and leave the critic.

  grpo-jax train --method ppo --model DIR --task rows.jsonl --reward my_rewards.py:correct
  grpo-jax train --method ppo --model DIR --task gsm8k --data DIR --critic shared --num-prompts 256
"""

from dataclasses import dataclass

from grpo_jax.commands import grpo
from grpo_jax.commands.train import Method
from grpo_jax.config import PPO, GRPOConfig, with_options


@dataclass(frozen=True)
class Config(grpo.Config):
    """Options of the run."""

    # The usual eval_samples is group_size - 1, which is 0 in PPO.
    train: GRPOConfig = with_options(PPO, eval_every=20, eval_samples=7)
    method: Method = "ppo"


main = grpo.main
