"""The commands of the installed package: `grpo-jax train` and others.

Their list is printed without JAX, which takes a second to import.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from grpo_jax.errors import need, open_nowhere

# name -> module with a function `command`, and a description
COMMANDS = {
    "train": (
        "grpo_jax.commands.train",
        "GRPO, PPO, DPO, supervised fine-tuning or a reward model, on any model and your data",
    ),
    "sample": (
        "grpo_jax.commands.sample",
        "a few completions with their rewards, and what the rewards could teach",
    ),
    "evaluate": (
        "grpo_jax.commands.evaluate",
        "greedy, avg@n, pass@k and maj@n of a model or of a run, with 95% intervals",
    ),
    "export": ("grpo_jax.commands.export", "a run's checkpoint as a folder in Hugging Face format"),
    "report": ("grpo_jax.commands.report", "a run as a page that opens from disk"),
}


def main(args: list[str] | None = None) -> None:
    """Runs the command that the first argument names.

    Args:
      args: The arguments of the command line; None: sys.argv[1:].
    """
    program, (name, *rest) = Path(sys.argv[0]).name, (sys.argv[1:] if args is None else args) or ["--help"]
    if name in ("-h", "--help"):
        _print(_help(program))
        return
    if name == "--version":
        from grpo_jax import __version__

        _print(__version__)
        return
    if name not in COMMANDS:
        _refuse(f"there is no command {name!r}: name one of {', '.join(COMMANDS)}")
    sys.argv = [f"{program} {name}", *rest]
    try:
        need("tyro", "rich")
        module = import_module(COMMANDS[name][0])
    except ImportError as error:
        sys.exit(f"error: {error}")
    module.command()


def _print(text: str) -> None:
    """Prints a text, or says why it cannot."""
    try:
        print(text, flush=True)
    except OSError as error:
        sys.stdout = open_nowhere()  # the interpreter would try again as it ends
        _refuse(f"the output cannot be written ({error.strerror}): mend stdout")


def _refuse(sentence: str) -> NoReturn:
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)


def _help(program: str) -> str:
    """Returns the help, which lists the commands."""
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:{width}}  {what}" for name, (_, what) in COMMANDS.items())
    return (
        f"usage: {program} COMMAND [OPTIONS]\n\nGRPO post-training of language models in JAX.\n\n{lines}\n\n"
        f"`{program} COMMAND --help` lists the options of a command, and\n"
        f"`{program} COMMAND --tyro-print-completion bash` completes them in a shell."
    )
