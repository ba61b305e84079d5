"""The program `grpo-jax`. A shell that does not find it can run `python -m grpo_jax`."""

import sys

from grpo_jax.interrupt import end_at_interrupt


def main() -> None:
    """Runs the program."""
    end_at_interrupt()
    from grpo_jax.commands import main as run_command  # after the handler

    run_command()


if __name__ == "__main__":
    sys.argv[0], __spec__ = "grpo-jax", None  # helps and command.txt then name the program
    main()
