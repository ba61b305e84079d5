"""The command line of a training command or experiment, made from its dataclass of options."""

import ast
import atexit
import dataclasses
import inspect
import io
import json
import logging
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import tyro
import yaml
from rich.console import Console

from grpo_jax import functional, hosts
from grpo_jax.config import BEST_CORRECTION, check_effects, preset_of, with_options
from grpo_jax.data.types import wrapped_functions
from grpo_jax.devices import COMPILING
from grpo_jax.errors import Interruption, UsageError, flush_output, lacking, open_nowhere, reading, user_path
from grpo_jax.functional.numerics import constants_of
from grpo_jax.functional.presets import CORRECTIONS
from grpo_jax.hosts import HostOptions
from grpo_jax.options import (
    Escaped,
    between,
    check_ranges,
    flattened,
    from_json,
    group_names,
    option_types,
    options_of,
    replace_options,
    unique_names,
)
from grpo_jax.runs import progress, runner
from grpo_jax.runs.files import COMMAND
from grpo_jax.runs.folder import RunFolder, choose_folder, open_folder, options_of_run


@dataclass(frozen=True)
class RunConfig:
    """Folder of the run, and options of its start."""

    run_dir: Path
    """Folder of the run. If it holds a run already, a number is added to its name."""
    config: Path | None = None
    """File of options, JSON or YAML: the config.json of any run, or some of its options. Flags replace them."""
    resume: bool = False
    """Continue the newest run in run_dir where it stopped."""
    wandb: str = ""
    """Project of Weights & Biases to log to; needs the package wandb. TensorBoard's files are always written."""
    compilation_cache: bool = True
    """Keep compiled programs in the user's cache folder, so that the next start reads them."""
    stop_code: Annotated[int, between(0, 255)] = 75
    """Exit status after SIGTERM, when the run was saved for --resume. 75 (EX_TEMPFAIL) makes schedulers start the job
    again, 0 does not."""
    hosts: HostOptions = HostOptions()


# Options that --help shows first, in this order, if a command has them. Options outside the groups follow.
FIRST_OPTIONS = (
    *("model", "task", "data", "template", "chat", "system", "reward", "num_heldout", "dry_run", "method", "preset"),
    *("critic", "steps", "num_prompts", "group_size", "max_tokens", "stop", "temperature", "learning_rate", "kl_coef"),
    *("lora_rank", "dtype", "eval_every", "devices", "run_dir", "wandb", "resume", "config"),
)
_NARROWEST = 40  # columns; with fewer than three, the layout of the help never ends
Config = TypeVar("Config", bound=Any)  # a dataclass of options in groups, of which `output` is a `RunConfig`
Options = TypeVar("Options")
say_note = partial(progress.say_aside, "note")
_note_once = cache(say_note)


@contextmanager
def refusing() -> Iterator[None]:
    """Opens a block in which a UsageError or a lack of memory or disk ends the program with one sentence."""
    prepare_terminal()
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # a full disk or a closed pipe is noticed here, not when the interpreter ends
    except UsageError as error:
        refuse(str(error))
    except Exception as error:
        if not (sentence := lacking(error)):
            raise
        refuse(sentence)


@refusing()
def parse(config_class: type[Config], description: str | None, args: list[str] | None = None) -> Config:
    """Reads the command line into a dataclass.

    The options of all groups are flags without a prefix. --config reads defaults from a file and --preset sets those of
    its recipe, at any position on the command line; other flags replace them. With --resume the defaults are the
    options of the resumed run, so you need not repeat them; an option that differs is refused.

    Args:
      config_class: A dataclass whose fields are options or groups of options, all with defaults. Field docstrings
        become the help.
      description: The text at the top of the help.
      args: The arguments of the command line; None: sys.argv[1:].

    Returns:
      The options. `output.run_dir` is the folder of the run, which exists exactly when resuming.
    """
    args, prog = sys.argv[1:] if args is None else args, program()
    default = _with_file(config_class(), args)
    config = _read(config_class, _with_preset(default, value_of("--preset", args)), args, prog, description)
    hosts.start(config.output.hosts, say_refusal, say_note)
    folder = user_path(config.output.run_dir)
    folder = folder if folder.name else folder.absolute()
    folder = choose_folder(folder, resume=config.output.resume)
    if config.output.resume:
        default = _with_file(options_of_run(config_class(), folder), args, resumes=True)
        config = _read(config_class, default, args, prog, description)
    return with_options(config, run_dir=folder)


def program() -> str:
    """Returns the name for the usage line: "grpo-jax train", or "python -m experiments.train"."""
    spec = sys.modules["__main__"].__spec__
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec else Path(sys.argv[0]).name


def _read(config_class: type[Config], default: Config, args: list[str], prog: str, description: str | None) -> Config:
    """Reads the command line with these defaults. --help shows the main options, --help-all every option."""
    if {"-h", "--help"} & {*args}:
        text = f"{description or ''}\n\n--help-all shows all {len(options_of(default))} options."
        text += _constants(default, value_of("--correction", args))
        read_flags(_first_options(config_class, default), args=["--help"], prog=prog, description=text)
    args = ["--help" if arg == "--help-all" else arg for arg in args]
    flat = (tyro.conf.OmitArgPrefixes,)
    config = read_flags(config_class, args=args, default=default, config=flat, prog=prog, description=description)
    check_effects(config)
    return config


def _constants(default: Any, correction: str) -> str:
    """Returns the paragraph of the help on the constants that --constant sets; "" without a preset."""
    loss = next((group.loss for group in vars(default).values() if hasattr(group, "loss")), None)
    if loss is None:
        return ""
    functions = *preset_of(loss.preset).functions, CORRECTIONS.get(correction, CORRECTIONS[BEST_CORRECTION])[1]
    lines = [
        f"\n  {name}={default:g}: {_text_of(function, name)}"
        for function in functions
        for name, default in constants_of(function).items()
        if not hasattr(loss, name)
    ]
    return f"\n\n--constant sets numbers of at least 0, of preset {loss.preset} and of a correction:{''.join(lines)}"


def _text_of(function: Any, name: str) -> str:
    """Returns the text on an argument in the docstrings of a function and of those that it wraps."""
    docs = "\n\n".join(part.__doc__ or "" for part in wrapped_functions(function))
    match = re.search(rf"^ +{name}: (.*?)(?=\n *\w+: |\n\s*\n|\Z)", docs, re.DOTALL | re.MULTILINE)
    text = " ".join(match[1].split()) if match else ""
    other = re.match(r"see `(\w+)`", text)
    return _text_of(getattr(functional, other[1]), name) if other else text


def _first_options(config_class: type, default: Any) -> type:
    """Returns a dataclass of the options that --help shows, with these defaults."""
    values, types, texts = options_of(default), option_types(config_class), option_texts(config_class)
    plain = (name for name, value in vars(default).items() if not dataclasses.is_dataclass(value))
    return dataclasses.make_dataclass(
        "Options",
        [
            (name, Annotated[types[name], tyro.conf.arg(help=texts[name])], dataclasses.field(default=values[name]))
            for name in dict.fromkeys((*FIRST_OPTIONS, *plain))
            if name in types
        ],
    )


def option_texts(config_class: Any) -> dict[str, str]:
    """Returns the docstrings of a config's options, by name, each as one line."""
    texts: dict[str, str] = {}
    for parent in filter(dataclasses.is_dataclass, reversed(config_class.__mro__)):
        definition: Any = ast.parse(inspect.getsource(parent)).body[0]  # type: ignore[arg-type]
        for field, text in pairwise(definition.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                texts[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    for hint in filter(dataclasses.is_dataclass, get_type_hints(config_class).values()):
        texts |= option_texts(hint)
    return texts


def read_flags(config_class: type[Options], **settings: Any) -> Options:
    """Calls `tyro.cli`, and checks the numbers.

    Args:
      config_class: The dataclass of options, as in `parse`.
      settings: Further arguments of `tyro.cli`.

    Raises:
      UsageError: A number is not in the range of its option, or --config or an option of several values is given twice.
    """
    prepare_terminal()
    lists = {f"--{name.replace('_', '-')}" for name, x in option_types(config_class).items() if get_origin(x) is tuple}
    _check_repeated(settings.get("args") or sys.argv[1:], {"--config", *lists})
    options = tyro.cli(config_class, **settings)
    check_ranges(options)
    values, types = options_of(options), option_types(config_class, include_extras=True)
    default = options_of(settings["default"]) if settings.get("default") else {}  # its texts are not typed in a shell
    escaped = [name for name, hint in types.items() if Escaped in get_args(hint) and values[name] != default.get(name)]
    return replace_options(options, {name: tuple(map(_unescaped, values[name])) for name in escaped})


def _check_repeated(args: Sequence[str], refused: Collection[str]) -> None:
    """Refuses some flags that are given twice. A note says of all others that the last one counts, as tyro takes it."""
    starts = [place for place, arg in enumerate(args) if arg.startswith("--")]
    names = ["--" + re.sub("^--(no[-_])?|=.*", "", args[start], flags=re.DOTALL).replace("_", "-") for start in starts]
    texts = [" ".join(args[start:end]) for start, end in pairwise([*starts, len(args)])]
    pairs = [*zip(names, texts, strict=True)]
    unique_names([pair for pair in pairs if pair[0] in refused])
    for name, text in pairs:
        if text != (last := dict(pairs)[name]):
            _note_once(f"{name} is given twice, as {text!r} and as {last!r}: the last one counts")


def _unescaped(text: str) -> str:
    """Returns a text with line breaks, tabs and backslashes for \\n, \\t and \\\\."""
    return re.sub(r"\\[nt\\]", lambda match: {"n": "\n", "t": "\t"}.get(match[0][1], "\\"), text)


def prepare_terminal() -> None:
    """Makes every text printable, even if stdout or stderr is closed, is not UTF-8, or has few columns."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open_nowhere())
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if shutil.get_terminal_size().columns < _NARROWEST:
        os.environ["COLUMNS"] = str(_NARROWEST)


def _with_preset(default: Config, preset: Any) -> Config:
    """Returns the defaults, with the values of a preset if there is one; in a file it may be anything."""
    has_one = preset and isinstance(preset, str) and "preset" in options_of(default)
    return with_options(default, preset=preset) if has_one else default


def _with_file(default: Config, args: list[str], *, resumes: bool = False) -> Config:
    """Returns the defaults, with the options of the --config file.

    Args:
      default: The defaults.
      args: The arguments of the command line.
      resumes: True if the defaults are those of a run. A preset in the file then sets no other options.

    Raises:
      UsageError: The file cannot be read, or one of its options does not fit.
    """
    file = value_of("--config", args)
    if not file:
        return default
    saved = read_options(user_path(file), group_names(type(default)))
    try:
        # The preset sets what the file leaves out.
        return from_json(default if resumes else _with_preset(default, saved.get("preset")), saved)
    except UsageError as error:
        raise UsageError(f"{file} does not fit ({error})") from None


def value_of(flag: str, args: Sequence[str]) -> str:
    """Returns the last value of a flag, such as "--run-dir", on the command line; "" if it is absent."""
    value = ""
    for arg, following in pairwise([*args, ""]):
        name, has_value, rest = arg.partition("=")
        if name.replace("_", "-") == flag:  # users may write flags with underscores
            value = rest if has_value else following
    return value


def read_options(file: Path, groups: Set[str] | None = None) -> dict[str, Any]:
    """Returns the options in a JSON or YAML file, by name.

    Args:
      file: The file.
      groups: The names that groups of options may have. None: any name.

    Raises:
      UsageError: The file cannot be read, sets an option twice, or has a group of another name.
    """
    with reading(file, "mend it"):
        text, is_yaml = file.read_text(encoding="utf-8-sig"), file.suffix in (".yaml", ".yml")
        saved = yaml.load(text, _UniqueLoader) if is_yaml else json.loads(text, object_pairs_hook=unique_names)
        if is_yaml and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise UsageError("it refers to a value by *name, which may never end: write the value out")
        if not isinstance(saved, dict):
            raise UsageError("it holds no options: it must be a mapping of names to values")
        return flattened(saved, groups)


class _UniqueLoader(yaml.SafeLoader):
    """The safe loader of YAML, which refuses a mapping that has a name twice.

    Numbers are those of YAML 1.2. In 1.1, which PyYAML reads, 1:30 is 90, 010 is 8, and 1e-4 is a text.
    """

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":int", ":float", ":timestamp"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        scalars = [pair for pair in node.value if isinstance(pair[0], yaml.ScalarNode)]
        unique_names([(name.value, value.value if value.id == "scalar" else value.id) for name, value in scalars])
        return super().construct_mapping(node, deep)


_UniqueLoader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$"), [*"-+0123456789"])
_UniqueLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|\.(?:inf|nan))$"),
    [*"-+.0123456789"],
)


def main(
    config_class: type[Config], run: Callable[[Config], None], description: str | None, args: list[str] | None = None
) -> None:
    """Parses the command line and runs an experiment; prints a UsageError as one sentence without a traceback.

    Args:
      config_class: The dataclass of options, as in `parse`.
      run: The function that runs the experiment.
      description: The text at the top of the help.
      args: The arguments of the command line; None: sys.argv[1:].
    """
    config = parse(config_class, description, args)
    if config.output.compilation_cache:
        progress.use_cache()
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax also logs the exceptions that it raises
    sys.unraisablehook = _print_unraisable
    try:
        with runner.listening(say_note, partial(_leave, config.output)):
            run(config)
            hosts.gather("the end", None)  # a host that exits early would look dead to the other hosts
    except runner.Stopped as stopped:
        hosts.gather("the end", None)
        say_refusal(f"stopped by {stopped}; the last step is saved: add --resume to continue {config.output.run_dir}")
        raise SystemExit(_code(config.output, stopped.number)) from None
    except (UsageError, FloatingPointError) as error:
        then = _how_to_resume(config.output, "; ") if isinstance(error, Interruption) else ""
        refuse(f"{error}{then}")
    except Exception as error:  # `lacking` recognises errors of the machine, such as a full disk
        if not (sentence := lacking(error)):
            if hosts.count() > 1:
                traceback.print_exc()
                hosts.leave(f"{type(error).__name__}: {error}".partition("\n")[0], 1)
            raise
        say_refusal(f"{sentence}{_how_to_resume(config.output, '; then ')}")
        hosts.leave(sentence, 2)  # threads that still save would fail again at exit


def _print_unraisable(unraisable: Any) -> None:
    """Prints an unraisable error, unless it comes from a writing thread whose event loop a failed save has closed."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def _how_to_resume(output: RunConfig, link: str) -> str:
    """Returns the words on how to resume a run that ended; "" if it had not begun."""
    began = os.path.exists(output.run_dir / "config.json")
    return f"{link}add --resume to continue the run in {output.run_dir}" if began else ""


def _leave(output: RunConfig, number: int) -> NoReturn:
    """Ends the process at once, after a signal."""
    then = _how_to_resume(output, "; ") or "; the run had not begun"
    say_refusal(f"stopped by {signal.Signals(number).name} between checkpoints{then}")
    with suppress(OSError):
        Console(stderr=True).show_cursor(True)
    # With an exception, a compilation that continues in a thread would crash the interpreter at its exit.
    hosts.leave(f"stopped by {signal.Signals(number).name}", _code(output, number))


def _code(output: RunConfig, number: int) -> int:
    """Returns the exit status after a signal."""
    return output.stop_code if number == signal.SIGTERM else 128 + number


def open_run(config: Any) -> RunFolder:
    """Opens the run folder of parsed options.

    Raises:
      UsageError: The folder holds a run with other options.
    """
    output, values = config.output, dataclasses.asdict(config)
    for name in ("run_dir", "resume", "config", "hosts"):
        del values["output"][name]
    values.pop("dry_run", None)  # it makes no run
    run = open_folder(output.run_dir, values, wandb=output.wandb)
    if run.writes:
        with (output.run_dir / COMMAND).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(shlex.join([*program().split(), *sys.argv[1:]]) + "\n")
    return run


def refuse(message: str) -> NoReturn:
    """Ends the program on all hosts with one sentence."""
    say_refusal(message)
    if hosts.count() > 1:
        hosts.leave(message, 2)
    atexit.register(_end_compilation, 2)
    raise SystemExit(2)


def _end_compilation(code: int) -> None:
    """Ends the process without waiting for programs that a thread compiles, if there is such a thread."""
    if any(thread.name == COMPILING for thread in threading.enumerate()):
        flush_output()
        os._exit(code)


def say_refusal(message: str) -> None:
    """Prints an error to stderr, with the host's number if there are several hosts."""
    host = f" of host {hosts.index()}" if hosts.count() > 1 else ""
    progress.say_aside(f"error{host}", message, "red")
    flush_output()
