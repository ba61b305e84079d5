"""`grpo-jax evaluate` in a clone, as `python -m experiments.evaluate`."""

from grpo_jax.commands.evaluate import command

if __name__ == "__main__":
    command()
