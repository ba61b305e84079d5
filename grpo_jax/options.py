"""Options as data: dataclasses whose fields are options or groups of options.

The name of an option is unique across groups. Its type declares its ranges: `Annotated[int, at_least(1)]` is a whole
number from 1. A type may have several ranges; a number must be in all of them.
"""

import dataclasses
import difflib
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import cache
from numbers import Integral
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from grpo_jax.errors import UsageError, abbreviate

Config = TypeVar("Config", bound=Any)  # a dataclass whose fields are options or dataclasses of options


# ---- ranges


class Range(NamedTuple):
    """A range of numbers that an option accepts."""

    contains: Callable[[float], bool]
    """Number -> true if it is in the range; NaN is in none."""
    words: str
    """The end of the sentence "it must be …"."""


def at_least(least: float) -> Range:
    """Returns the numbers from `least` on."""
    return Range(lambda number: number >= least, f"at least {least}")


def above(least: float) -> Range:
    """Returns the numbers larger than `least`."""
    return Range(lambda number: number > least, f"above {least}")


def between(least: float, most: float, words: str | None = None) -> Range:
    """Returns the numbers from `least` to `most`, both included; `words` replace the usual ones."""
    return Range(lambda number: least <= number <= most, words or f"between {least} and {most}")


# Others would become 0 or infinity on the devices. Numbers below the smallest normal one count as 0 there.
FLOAT32 = Range(lambda number: number == 0 or 2.0**-126 <= abs(number) < 2.0**128, "a number that float32 holds")
FLOAT32_OR_INFINITE = Range(lambda number: number == math.inf or FLOAT32.contains(number), f"{FLOAT32.words}, or inf")
STORABLE = Range(lambda number: number < 2**31, "below 2^31")  # counters and array sizes hold no more

Count = Annotated[int, at_least(0), STORABLE]
Size = Annotated[int, at_least(1), STORABLE]
Seed = Annotated[int, between(0, 2**32 - 1, "between 0 and 2^32 - 1")]  # keys of random numbers hold no more
Weight = Annotated[float, at_least(0), FLOAT32]
Positive = Annotated[float, above(0), FLOAT32]
Bound = Annotated[float, above(0), FLOAT32_OR_INFINITE]  # infinity is no bound
Fraction = Annotated[float, between(0, 1)]
Share = Annotated[float, above(0), Range(lambda number: number <= 1, "at most 1")]

# Text in which the command line reads \n, \t and \\. YAML, JSON and Python have escapes of their own.
Escaped = Annotated[str, "escaped"]


def check_ranges(options: Any) -> None:
    """Raises if a number is not in the ranges of its type, or if one of several values is repeated.

    Args:
      options: A dataclass whose fields are options or dataclasses of options.

    Raises:
      UsageError: A number is out of range, or a value is repeated. The message names the option.
    """
    types = option_types(type(options), include_extras=True)
    for name, value in options_of(options).items():
        check_number(name, value, types[name])
        if isinstance(value, tuple) and len(set(map(str, value))) < len(value):
            raise UsageError(f"{name} is {', '.join(map(str, value))}: give each value once")


def check_number(name: str, value: Any, hint: Any) -> None:
    """Raises if a number is not in the ranges of its type.

    Args:
      name: The name of the option.
      value: The value of the option, or several. None is in every range.
      hint: The type of the option, such as `Size` or `Size | None`.

    Raises:
      UsageError: The number is out of range. The message names the option and its range.
    """
    for part in _ranges_of(hint) if value is not None else ():
        if not all(map(part.contains, value if isinstance(value, tuple | list) else [value])):
            raise UsageError(f"{name} is {value}: it must be {part.words}")


def check_types(kind: type, values: Mapping[str, Any]) -> None:
    """Raises if values do not have the types and ranges of the fields of a class.

    Args:
      kind: A dataclass or a NamedTuple.
      values: Values of some of its fields, by name.

    Raises:
      UsageError: A value does not fit. The message names the field.
    """
    types, ranges = (get_type_hints(kind, include_extras=with_ranges) for with_ranges in (False, True))
    for name, value in values.items():
        check_type(name, value, types[name])
        check_number(name, value, ranges[name])


def check_type(name: str, value: Any, hint: Any) -> None:
    """Raises if a value does not have a type.

    Args:
      name: The name of the option or field.
      value: The value, from JSON or Python.
      hint: The type.

    Raises:
      UsageError: The type differs. The message names the option and valid values.
    """
    if fits(value, hint):
        return
    origin = get_origin(hint)
    kinds = get_args(hint) if origin in (Literal, tuple, Union, UnionType) else (hint,)
    if origin is Literal:
        remedy = f"choose among {', '.join(kinds)}"
    elif origin is tuple:
        remedy = f"give a list of {', '.join(get_args(kinds[0])) or 'texts'}"
    else:
        remedy = f"it must be {_TYPES.get(get_origin(kinds[0]) or kinds[0], 'of its type')}"
    raise UsageError(f"{name} is {abbreviate(value)}: {remedy}")


_TYPES: dict[Any, str] = {int: "a whole number", float: "a number", str: "a text", bool: "True or False"}
_TYPES |= {Callable: "a function", Sequence: "a list of functions", Literal: "a name"}


def _ranges_of(hint: Any) -> list[Range]:
    """Returns the ranges in a type hint, at any depth."""
    return [hint] if isinstance(hint, Range) else [part for arg in get_args(hint) for part in _ranges_of(arg)]


# ---- names, values and types


def options_of(config: Any) -> dict[str, Any]:
    """Returns the options of a config, of all its groups, by name."""
    options: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        options |= options_of(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return options


_type_hints = cache(get_type_hints)  # a command asks for them dozens of times


def option_types(config_class: type, *, include_extras: bool = False) -> dict[str, Any]:
    """Returns the types of a config's options, by name.

    Args:
      config_class: A dataclass whose fields are options or dataclasses of options.
      include_extras: True to keep the ranges of types, as in `typing.get_type_hints`.
    """
    types: dict[str, Any] = {}
    hints = _type_hints(config_class, include_extras=include_extras)
    for name in (field.name for field in dataclasses.fields(config_class)):
        is_group = dataclasses.is_dataclass(hints[name])
        types |= option_types(hints[name], include_extras=include_extras) if is_group else {name: hints[name]}
    return types


def from_json(default: Config, saved: Mapping[str, Any]) -> Config:
    """Returns a config from the JSON of its `dataclasses.asdict`.

    Args:
      default: A config of the same class, which supplies options that the JSON lacks.
      saved: The content of the JSON.

    Raises:
      UsageError: The JSON has an unknown option, or a value of the wrong type.
    """
    types = option_types(type(default))
    options = in_current_names(flattened(saved), types)
    check_known(options, types)
    for name, value in options.items():
        if name == "engine" and isinstance(value, str):  # earlier versions took one address, or none as ""
            value = [value] if value else []
        check_type(name, value, types[name])
        options[name] = Path(value) if types[name] is Path else tuple(value) if isinstance(value, list) else value
    return replace_options(default, options)


def fits(value: Any, hint: Any) -> bool:
    """Returns whether a value from JSON or Python matches a type hint. Arguments of functions are not compared."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return isinstance(value, (*map(type, args),)) and value in args  # arrays compare by element
    if origin in (Union, UnionType):
        return any(fits(value, arg) for arg in args)
    if origin is Callable:
        return callable(value)
    if origin in (tuple, list, Sequence) or hint is tuple:
        return isinstance(value, list | tuple) and all(fits(x, args[0]) for x in value if args)
    if origin in (dict, Mapping):
        return isinstance(value, origin) and all(fits(x, args[1]) for x in value.values())
    if hint is Path:
        return isinstance(value, str | Path)
    if hint is float:
        return isinstance(value, float) or (fits(value, int) and abs(value) <= sys.float_info.max)
    if hint is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    return isinstance(value, hint) if isinstance(hint, type) else True


def group_names(config_class: Any) -> set[str]:
    """Returns the names of a config's groups, at any depth."""
    hints = {name: hint for name, hint in get_type_hints(config_class).items() if dataclasses.is_dataclass(hint)}
    return set(hints).union(*map(group_names, hints.values()))


def flattened(options: Mapping[str, Any], groups: Set[str] | None = None) -> dict[str, Any]:
    """Returns the options of all groups of a config.json, by name.

    Args:
      options: The content of the file.
      groups: The names that groups may have. None: any name.

    Raises:
      UsageError: Two groups have the same option, or a group has another name.
    """
    flat: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Mapping) and groups is not None and name not in groups | _REMOVED_GROUPS:
            raise UsageError(f"there is no group of options {name}: {suggestion(name, sorted(groups))}")
        part = flattened(value, groups) if isinstance(value, Mapping) else {name: value}
        for twice in flat.keys() & part.keys():
            raise UsageError(f"{twice} is given twice: leave one of them out")
        flat |= part
    return flat


def unique_names(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    """Makes a dict of pairs, which must have different names.

    Raises:
      UsageError: A name is given twice. The sentence has both values.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        first, second, *_ = (abbreviate(value) for name, value in pairs if name == twice)
        raise UsageError(f"{twice} is given twice, as {first} and as {second}: give it once")
    return values


_FORMER = {"data": "task"}  # former names of options, in whose place they still work
# Options that were removed -> the value with which runs of earlier versions did without them.
_REMOVED = {"microbatches": 0, "kl_horizon": 10_000}
_REMOVED_GROUPS = {"reference"}  # groups whose options are now in other groups


def in_current_names(options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Returns the options of a run of perhaps an earlier version by their current names, without removed ones.

    Args:
      options: The options by name. A removed option stays if it has another value than the one that it always has now.
      known: The names of all options.
    """
    removed = {name for name in _REMOVED.keys() - {*known} if options.get(name) == _REMOVED[name]}
    return {current_name(name, known, options): value for name, value in options.items() if name not in removed}


def current_name(name: str, known: Collection[str], present: Collection[str] = ()) -> str:
    """Returns the name of an option that may have its former name, as in runs of earlier versions.

    Args:
      name: The current or former name.
      known: The names of all options.
      present: The options that are set. A former name is no name of these.
    """
    current = _FORMER.get(name, name)
    return name if name in known or current in present else current


# Names in TRL and in other libraries, or guesses -> the options here, of which a command has at most one. Names that
# are nearly the same here are not in the table.
_BATCH = "num_prompts num_rows num_pairs num_completions"
COUNTERPARTS = {"num_generations": "group_size", "num_iterations": "epochs", "max_completion_length": "max_tokens"}
COUNTERPARTS |= {"max_length": "max_tokens", "max_steps": "steps", "num_train_epochs": "steps", "beta": "kl_coef"}
COUNTERPARTS |= {"epsilon": "epsilon_low", "lr": "learning_rate", "bf16": "dtype", "generation_batch_size": _BATCH}
COUNTERPARTS |= dict.fromkeys(("batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"), _BATCH)
COUNTERPARTS |= dict.fromkeys(("scale_rewards", "importance_sampling_level"), "preset")
COUNTERPARTS |= {"loss_type": "preset preference_loss", "steps_per_generation": "minibatches", "fp16": "dtype"}
COUNTERPARTS |= {"vllm_importance_sampling_correction": "correction", "sync_ref_model": "ref_sync_steps"}
COUNTERPARTS |= {"model_name_or_path": "model", "output_dir": "run_dir", "resume_from_checkpoint": "resume"}
COUNTERPARTS |= dict.fromkeys(("lora_r", "use_peft", "peft_config"), "lora_rank")
COUNTERPARTS |= dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization_config"), "quantize")
COUNTERPARTS |= dict.fromkeys(("dataset", "dataset_name", "train_dataset"), "task")
COUNTERPARTS |= {"eval_dataset": "heldout", "reward_funcs": "reward reward_model", "reward_weights": "reward"}
COUNTERPARTS |= {"use_vllm": "engine", "vllm_server_base_url": "engine", "gradient_checkpointing": "remat"}
COUNTERPARTS |= {"optim": "optimizer", "optimizers": "optimizer", "microbatches": "piece_tokens"}
COUNTERPARTS |= {"report_to": "wandb", "logging_steps": "log_every", "log_completions": "rollouts_every"}
COUNTERPARTS |= {"eval_steps": "eval_every", "save_steps": "checkpoint_every", "save_total_limit": "keep_checkpoints"}
COUNTERPARTS |= {"load_best_model_at_end": "keep_best", "lr_scheduler_type": "decay", "warmup_ratio": "warmup_steps"}
# The same names -> the difference from the option here, or the reason why there is none
DIFFERENCES = {
    **dict.fromkeys(("args", "rollout_func"), "every setting is an argument of GRPOTrainer by itself"),
    **dict.fromkeys(("processing_class", "tokenizer"), "a model's folder has one, and GRPOTrainer takes another"),
    "reward_processing_classes": "a model's folder has its tokenizer",
    **dict.fromkeys(("dataset", "dataset_name", "train_dataset"), "GRPOTrainer takes it as the argument of train"),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), "set it to nf4 or int8, with lora_rank"),
    "callbacks": "on_rollout and on_line of GRPOTrainer are called with each rollout and each line of metrics.jsonl",
    "reward_funcs": "it takes (examples, completions), and an example is a row with its prompt",
    "reward_weights": "a reward is written as name=weight*function",
    "gradient_accumulation_steps": "it multiplies a batch, and pieces only divide its computation",
    "microbatches": "it is the largest number of tokens of a piece, and not the number of pieces",
    "kl_horizon": "kl_coef always moves towards kl_target by at most a fifth in 10,000 completions",
    "per_device_train_batch_size": "it counts completions or rows of a device, and a step here is that of all devices",
    "num_train_epochs": "it counts passes over the rows, and a step takes some of them",
    "max_length": "it includes the prompt, which max_prompt_tokens limits here",
    "warmup_ratio": "it is a share, and warmup_steps is a number of optimizer steps",
    "lr_scheduler_type": "TRL's default is linear, and that of GRPO here is none",
    **dict.fromkeys(("scale_rewards", "importance_sampling_level"), "dr_grpo has no scale, and gspo one ratio a text"),
    "use_vllm": "this process samples, unless engine names the address of a server",
    "optimizers": "it is an optax transformation, or a function from a schedule to one",
    "report_to": "TensorBoard's files are always written, and wandb names a project",
    "logging_steps": "GRPO and PPO write every step",
    "peft_config": "lora_rank, lora_alpha and lora_targets are options of their own",
}


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns a hint for an unknown name: its counterpart here, the closest known names, or else all of them."""
    known, difference = list(known), DIFFERENCES.get(name, "")
    for counterpart in COUNTERPARTS.get(name, "").split():
        if counterpart in known:
            return f"{name} is called {counterpart} here{difference and f' ({difference})'}"
    if difference:
        return difference
    close = difflib.get_close_matches(str(name), known, 3)  # YAML has names that are numbers
    return f"is it {' or '.join(close)}?" if close else f"they are {', '.join(known)}"


def check_known(options: Iterable[str], known: Iterable[str]) -> None:
    """Raises if options are unknown.

    Args:
      options: The names to check.
      known: The names of all options.

    Raises:
      UsageError: A name is unknown. The message lists the closest known names.
    """
    for name in options:
        if name not in known:
            raise UsageError(f"there is no option {name}: {suggestion(name, known)}")


def replace_options(config: Config, options: Mapping[str, Any]) -> Config:
    """Returns a config with some of its options replaced, in whichever group they are.

    Args:
      config: A dataclass whose fields are options or dataclasses of options.
      options: New values by name, which may be traced. Unknown names are ignored.
    """
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            changes[field.name] = replace_options(value, options)
        elif field.name in options:
            changes[field.name] = options[field.name]
    return dataclasses.replace(config, **changes)
