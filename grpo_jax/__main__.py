"""The program `grpo-jax`. A shell that does not find it can run `python -m grpo_jax`."""

import os
import signal
import sys


def main() -> None:
    """Runs the program."""
    end_at_interrupt()
    from grpo_jax.commands import main as run_command  # after the handler

    run_command()


def end_at_interrupt() -> None:
    """Lets Ctrl-C end the process at once, with one sentence, until another handler is set.

    The imports of modules take seconds. Python's own handler raises an exception, which prints a traceback, or is lost
    in a module that catches it or in a callback of C code.
    """
    signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: object) -> None:
    os.write(2, b"error: stopped by SIGINT\n")
    os._exit(128 + number)


if __name__ == "__main__":
    sys.argv[0], __spec__ = "grpo-jax", None  # helps and command.txt then name the program
    main()
