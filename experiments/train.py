"""`grpo-jax train` in a clone, as `python -m experiments.train`."""

from grpo_jax.commands.train import command

if __name__ == "__main__":
    command()
