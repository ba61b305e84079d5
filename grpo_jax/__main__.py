"""The program `grpo-jax`, for a shell that does not find it: `python -m grpo_jax`."""

import sys

from grpo_jax.commands import main

if __name__ == "__main__":
    sys.argv[0], __spec__ = "grpo-jax", None  # helps and command.txt then name the program
    main()
