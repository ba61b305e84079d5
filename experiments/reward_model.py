"""`grpo-jax reward-model` in a clone, as `python -m experiments.reward_model`."""

from grpo_jax.commands.reward_model import command

if __name__ == "__main__":
    command()
