"""Opens a model, or the model of a run, with its task: for the commands that sample from it."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro
from rich.console import Console
from rich.markup import escape

from grpo_jax.commands import flags
from grpo_jax.config import CriticConfig, DecodingConfig, GRPOConfig, check_effects, recipe, validate
from grpo_jax.data.generators import PREFIX
from grpo_jax.data.text import Overlong
from grpo_jax.errors import UsageError, user_path
from grpo_jax.models.config import Dtype
from grpo_jax.models.files.weights import read_json
from grpo_jax.models.huggingface import Pretrained, for_texts, load_pretrained
from grpo_jax.models.policy import resolve_dtype
from grpo_jax.options import Escaped, Size, check_type, flattened, from_json, option_types, options_of
from grpo_jax.rl.guards import check_tokens
from grpo_jax.rl.interaction import interaction_of
from grpo_jax.runs.pretrained import Step, load_run, phase_of
from grpo_jax.runs.progress import use_cache
from grpo_jax.tasks.options import TaskOptions, check_task_options, open_task
from grpo_jax.tasks.task import Task
from grpo_jax.training.prepare import prompt_options, try_rewards

# Options whose defaults come from the run, with any task
_DECODING = options_of(DecodingConfig()).keys()
_PROMPTING = ("template", "chat", "system", "chat_template_kwargs", "stop")


@dataclass(frozen=True)
class SamplingOptions(TaskOptions, DecodingConfig):
    """Options of the model, the task and the sampling."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")] = ""
    """Folder of a model or of a run, or an id on the hub."""
    max_tokens: Size = 256
    """Longest completion, in tokens."""
    stop: tuple[Escaped, ...] = ()
    """Texts that end a completion or turn. Rewards read the text before. On the command line `\\n` is a line break,
    `\\\\` a backslash."""
    max_prompt_tokens: int | None = None
    """Longest prompt, in tokens; None: what max_tokens leaves of the length that the model was trained on."""
    overlong: Overlong = "drop"
    """Treatment of longer prompts: drop leaves them out, truncate cuts their text."""
    chat_template_kwargs: str = ""
    """Variables of the chat template as a JSON object, such as '{"enable_thinking": false}'. Empty: its defaults."""
    dtype: Literal[Dtype, "auto"] = "auto"
    """Dtype of activations and matrix products. auto: as in training. A run keeps the dtype of its training."""
    compilation_cache: bool = True
    """Keep compiled programs in the user's cache folder, so that the next start reads them."""
    phase: str | None = None
    """Phase of a run; None: the only one that is neither a warm start nor a control."""
    step: Step = None
    """Step of a run's checkpoint; None: the newest; best: the best held-out score."""
    seed: int = 0
    """Random seed of the sampling."""


Options = TypeVar("Options", bound=SamplingOptions)


# ---- the command line


def run_command(read: Callable[[], Options], main: Callable[[Options], None]) -> None:
    """Reads the command line and runs a command."""
    try:
        with flags.refusing():
            options = read()
            if options.compilation_cache:
                use_cache()
            main(options)
    except KeyboardInterrupt:
        flags.refuse("stopped: nothing was written")


def read_command_line(
    options_class: type[Options], description: str | None, args: list[str] | None = None, *, of_run: Iterable[str] = ()
) -> Options:
    """Reads the command line. If MODEL is the folder of a run, the run's options are the defaults.

    Args:
      options_class: The options of the command.
      description: The text at the top of the help.
      args: The arguments of the command line; None: sys.argv[1:].
      of_run: Options of the command, besides those of prompts and sampling, whose defaults come from the run.
    """
    read = partial(flags.read_flags, options_class, prog=flags.program(), description=description, args=args)
    options = read()
    saved, names = saved_options(options.model), {*_DECODING, *_PROMPTING, *of_run}
    if not options.task or same_rows(options.task, saved.get("task", "")):
        names |= {field.name for field in dataclasses.fields(TaskOptions)} | {"max_prompt_tokens", "overlong"}
    elif options.task.startswith(PREFIX):
        names |= {"answer_in"}
    if options.data and not same_rows(options.data, saved.get("data", "")):  # the run held out other rows
        names -= {"heldout", "num_heldout"}
    if saved.get("max_tokens", 0) is None:  # the run did not limit completions
        names.remove("max_tokens")
    default = from_json(options_class(model=options.model), {name: saved[name] for name in names & saved.keys()})
    options = read(default=default) if saved else options
    check_effects(options)
    return options


def same_rows(name: str, saved: str) -> bool:
    """Returns whether two options name the same rows, perhaps by different paths."""
    path, saved_path = (os.path.realpath(os.path.expanduser(text)) for text in (name, saved))
    return name == saved or (bool(name and saved) and path == saved_path)


def saved_options(model: str) -> dict[str, Any]:
    """Reads the options of a run from its folder, by name; empty if the folder holds no run.

    Raises:
      UsageError: config.json is not as a run writes it.
    """
    folder = user_path(model)
    if not (folder / "checkpoints").is_dir():
        return {}
    file = folder / "config.json"
    saved, types = flattened(read_json(file)), option_types(GRPOConfig) | option_types(SamplingOptions)
    for name in options_of(CriticConfig()):  # nothing reads them, and DPO has a gamma of its own
        del types[name]
    if "heldout_share" in saved:
        saved.pop("task", None)  # preferences or ratings, which hold out other prompts than a task does
    types["max_tokens"] = int | None  # None: the run did not limit completions
    for name, value in saved.items():
        if name in types:
            check_type(f"{name} in {file}", value, types[name])
    return saved


# ---- opening


def has_own_task(options: SamplingOptions, saved: Mapping[str, Any]) -> bool:
    """Returns whether the task that options name is that of a run with these saved options."""
    named = [(getattr(options, name), saved.get(name, "")) for name in ("task", "data")]
    return "task" in saved and all(same_rows(*pair) for pair in named)


def check_options(options: Options, *, needs_reward: bool = True, **shape: Any) -> tuple[Options, GRPOConfig]:
    """Checks options before anything is loaded.

    Args:
      options: The options of the command.
      needs_reward: False if completions need no reward.
      shape: Further options of the sampler: num_prompts, group_size and others.

    Returns:
      The options with the model's path and phase, and the configuration of the sampler.

    Raises:
      UsageError: The options are invalid. The message is one sentence that says what to change.
    """
    if not options.model:
        raise UsageError("name a model: a folder, an id on the hub, or the folder of a run")
    options = dataclasses.replace(options, model=str(user_path(options.model)))
    saved, folder = saved_options(options.model), Path(options.model)
    if not options.task and not folder.exists():
        raise UsageError(f"there is no folder {folder}: name that of a run; a model needs --task as well")
    if saved.get("method") == "reward-model":
        raise UsageError(f"{folder} is the run of a reward model, which writes no completions: name another model")
    if saved and not options.task:
        raise UsageError(f"the run in {folder} learned from rows without a reward: name others with --task")
    if not saved and (options.phase or options.step is not None):
        raise UsageError(f"--phase and --step choose a checkpoint, and {folder} is no run: leave them out")
    if saved and options.dtype not in ("auto", saved.get("dtype", "float32")):
        raise UsageError(f"the run keeps its dtype {saved.get('dtype', 'float32')}: leave out --dtype")
    if has_own_task(options, saved) and options.num_heldout != saved.get("num_heldout"):
        raise UsageError("of its own task a run has trained on all but its held-out prompts: leave out --num-heldout")
    config = recipe(seed=options.seed, **{name: getattr(options, name) for name in _DECODING}, **shape)
    validate(config)
    check_task_options(options, needs_reward=needs_reward)
    if saved:
        options = dataclasses.replace(options, phase=phase_of(folder, options.phase))
    return options, config


@contextmanager
def open_model_and_task(
    options: SamplingOptions, config: GRPOConfig, **task_options: Any
) -> Iterator[tuple[Pretrained, int | None, Task, list[str]]]:
    """Loads a model, or the model of a run, and opens its task. The task's rewards end with the block.

    Args:
      options: The checked options of the command.
      config: The configuration of the sampler.
      task_options: Further arguments of `open_task`: num_prompts, group_size, seed and training.

    Yields:
      The model; the step of the run's checkpoint, or None; the task; and facts about model and prompts for the user.

    Raises:
      UsageError: Model and task cannot be opened or do not work together, or every reward fails.
    """
    pretrained, step = load_sampling_model(options)
    sampling, saved = config.sampling, saved_options(options.model)
    prompting = prompt_options(options, sampling, pretrained)
    has_levels = has_own_task(options, saved) and saved.get("curriculum", 0) > 0
    with open_task(options, pretrained, has_levels=has_levels, decoding=sampling, **task_options, **prompting) as task:
        check_tokens(task)
        interaction_of(task).check(sampling)
        try_rewards(task, task.heldout.examples[0], pretrained, task_options["group_size"])
        pretrained = for_texts(pretrained, task.heldout.tokens.width + sampling.completion_width)
        notes = [note for note in (*pretrained.notes, *task.notes) if "no prompt is held out" not in note]
        yield pretrained, step, task, notes


def load_sampling_model(options: SamplingOptions) -> tuple[Pretrained, int | None]:
    """Loads a model, or the model of a run. Also returns the step of the run's checkpoint, or None."""
    if saved := saved_options(options.model):
        dtype = resolve_dtype(saved.get("dtype", "float32"))
        return load_run(Path(options.model), phase=options.phase, step=options.step, dtype=dtype)
    return load_pretrained(options.model, dtype=resolve_dtype(options.dtype)), None


def warn(console: Console, messages: Iterable[str]) -> None:
    """Prints warnings."""
    for message in messages:
        console.print(f"[yellow]warning:[/] {escape(message)}", soft_wrap=True)
