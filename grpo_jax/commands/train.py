"""`grpo-jax train`: one command for every method.

Each method is a module of this folder with its own options. For example, `grpo-jax train --method sft --help` lists the
options of supervised fine-tuning.
"""

import sys
from collections.abc import Collection, Sequence
from importlib import import_module
from types import ModuleType
from typing import Literal, get_args

from grpo_jax.commands import flags
from grpo_jax.errors import UsageError, user_path
from grpo_jax.functional import PRESETS
from grpo_jax.options import COUNTERPARTS, DIFFERENCES, check_known, current_name, option_types, suggestion
from grpo_jax.runs.files import read_object
from grpo_jax.runs.folder import numbered_runs

# Each method is a module of this folder with options (`Config`) and a function (`main`).
Method = Literal["grpo", "ppo", "sft", "reward-model", "dpo", "kto"]
METHODS: tuple[Method, ...] = get_args(Method)
# Options that have one purpose in different methods. Each method has one of them.
ROLES = {
    "set its batch size": {"num_prompts", "num_rows", "num_pairs", "num_completions"},
}
RUN_DIR = "runs/train"  # shared by all methods, so that --resume without --run-dir continues the newest run


def module_of(method: str) -> ModuleType:
    """Returns the module of a method.

    Raises:
      UsageError: There is no such method.
    """
    if method not in METHODS:
        remedy = f"--preset {method} names it" if method in PRESETS else suggestion(method, METHODS)
        raise UsageError(f"there is no method {method}: {remedy}")
    return import_module(f"grpo_jax.commands.{method.replace('-', '_')}")


def method_of(args: Sequence[str]) -> str:
    """Returns the method of a command line: from --method, the run to resume, or --config; else grpo.

    Args:
      args: The arguments of the command line.

    Raises:
      UsageError: The run to resume has another method.
    """
    named, file = flags.value_of("--method", args), flags.value_of("--config", args)
    options = flags.read_options(user_path(file)) if file else {}
    if "--resume" in args:
        folder = flags.value_of("--run-dir", args) or str(options.get("run_dir", RUN_DIR))
        runs = numbered_runs(user_path(folder))
        saved = str(read_object(runs[max(runs)] / "config.json").get("method", "")) if runs else ""
        if named and saved and named != saved:
            raise UsageError(f"the run in {folder} is of method {saved}: leave out --method, or start a new run")
        named = named or saved
    return named or str(options.get("method", "grpo"))


def check_flags(method: str, args: Sequence[str]) -> None:
    """Checks for options that only other methods have.

    Args:
      method: The method of the run.
      args: The arguments of the command line.

    Raises:
      UsageError: One sentence that says which methods have the option.
    """
    known = option_types(module_of(method).Config)
    for flag in (arg.partition("=")[0].replace("_", "-") for arg in args if arg.startswith("--")):
        names = {flag.removeprefix("--").replace("-", "_"), flag.removeprefix("--no-").replace("-", "_")}
        if names & known.keys():
            continue
        check_known(names & (COUNTERPARTS.keys() | DIFFERENCES.keys()), known)
        others = [other for other in METHODS if names & option_types(module_of(other).Config).keys()]
        if others:
            roles = [(words, role & known.keys()) for words, role in ROLES.items() if names & role]
            remedies = [f"{words} with --{name.replace('_', '-')}" for words, options in roles for name in options]
            remedy = (remedies or ["leave it out"])[0]
            raise UsageError(
                f"{flag} is an option of --method {' and '.join(others)}, and the method is {method}: {remedy}, or "
                "choose another method"
            )


def _with_current_name(arg: str, known: Collection[str]) -> str:
    """Returns an argument of the command line in which an option has its current name."""
    flag, has_value, value = arg.partition("=")
    return f"--{current_name(flag[2:], known)}{has_value}{value}" if flag.startswith("--") else arg


def command(args: list[str] | None = None) -> None:
    """Runs the command.

    Args:
      args: The arguments of the command line; None: sys.argv[1:].
    """
    args = sys.argv[1:] if args is None else args
    with flags.refusing():
        method = method_of(args)
        module = module_of(method)
        known = option_types(module.Config)
        args = [_with_current_name(arg, known) for arg in args]
        check_flags(method, args)
    flags.main(module.Config, module.main, module.__doc__, args)
