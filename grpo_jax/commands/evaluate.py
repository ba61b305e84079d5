"""Measures a model on a task: greedy, avg@n, pass@k and maj@n, with 95% intervals over prompts.

MODEL is a folder in Hugging Face format, an id on the hub, or the folder of a run. For a run, the command evaluates the
newest checkpoint with the run's task, held-out prompts and sampling options, unless you give others. Another --task
keeps the run's --template, --chat, --system and --chat-template-kwargs.

It executes the run's rewards, so evaluate only runs that you trust. If you give a task, all its rows are evaluated.
--num-prompts does not change the completions. pass@k is the unbiased estimate; if rewards are not 0 or 1, it is the
mean best of k.

  grpo-jax evaluate DIR --task gsm8k --data DIR --samples 8 --max-tokens 256
  grpo-jax evaluate runs/train --samples 31
"""

import dataclasses
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from grpo_jax.config import DecodingConfig, GRPOConfig, check_effects, recipe, validate
from grpo_jax.data.generators import PREFIX
from grpo_jax.data.prompts import hash_prompts
from grpo_jax.data.text import Overlong
from grpo_jax.errors import UsageError, make_folder, user_path
from grpo_jax.models.config import Dtype
from grpo_jax.models.huggingface import Pretrained, for_texts, load_pretrained
from grpo_jax.models.policy import decoder_policy, resolve_dtype
from grpo_jax.models.weights import read_json
from grpo_jax.options import Size, check_type, flattened, from_json, option_types, options_of
from grpo_jax.prepare import prompt_options, try_rewards
from grpo_jax.rewards.reward import ungraded_messages
from grpo_jax.rl.evaluate import Evaluation, evaluate, num_heldout_calls, sample_heldout, summary
from grpo_jax.rl.guards import check_tokens
from grpo_jax.rl.interaction import interaction_of
from grpo_jax.rl.source import make_sampler
from grpo_jax.runs import flags
from grpo_jax.runs.files import write_json, write_text
from grpo_jax.runs.folder import read_inputs
from grpo_jax.runs.pretrained import Step, load_run, phase_of
from grpo_jax.runs.progress import RunConsole, use_cache, watched
from grpo_jax.statistics import cell
from grpo_jax.tasks.options import TaskOptions, check_task_options, open_task
from grpo_jax.tasks.task import Task

_MAX_GROUP = 16  # the most completions of a prompt to sample at once, which bounds the memory
_GROUP_SIZE = 8  # training's usual group size, for which the deadlines of rewards are meant
# Options whose defaults come from the run, with any task
_DECODING = options_of(DecodingConfig()).keys()
_PROMPTING = ("template", "chat", "system", "chat_template_kwargs")


@dataclass(frozen=True)
class Options(TaskOptions, DecodingConfig):
    """Options of the evaluation: the model, the task and the sampling."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")] = ""
    """Folder of a model or of a run, or an id on the hub."""
    samples: Size = 8
    """Sampled completions of each prompt (n), besides a greedy one."""
    metric: str = ""
    """Name of the reward that is evaluated. Empty: the weighted sum."""
    max_tokens: Size = 256
    """Longest completion, in tokens."""
    max_prompt_tokens: int | None = None
    """Longest prompt, in tokens; None: what max_tokens leaves of the length that the model was trained on."""
    overlong: Overlong = "drop"
    """Treatment of longer prompts: drop leaves them out, truncate cuts their text."""
    chat_template_kwargs: str = ""
    """Variables of the chat template as a JSON object, such as '{"enable_thinking": false}'. Empty: its defaults."""
    num_prompts: int = 16
    """Number of prompts sampled at once. Results do not depend on it."""
    dtype: Literal[Dtype, "auto"] = "auto"
    """Dtype of activations and matrix products. auto: float32 on a CPU, else bfloat16. A run keeps the
    dtype that it was trained with."""
    compilation_cache: bool = True
    """Keep compiled programs in the user's cache folder, so that the next start reads them."""
    phase: str | None = None
    """Phase of a run; None: the only one that is neither a warm start nor a control."""
    step: Step = None
    """Step of a run's checkpoint; None: the newest; best: the best held-out score."""
    seed: int = 0
    """Random seed of the sampling."""
    out: Path | None = None
    """Folder for numbers.json, with every option and the checkpoint's step, and completions.jsonl."""


def parse(args: list[str] | None = None) -> Options:
    """Reads the command line. If MODEL is the folder of a run, the run's options are the defaults."""
    read = partial(flags.read_flags, Options, prog=flags.program(), description=__doc__, args=args)
    options = read()
    saved, names = saved_options(options.model), {*_DECODING, *_PROMPTING}
    if not options.task or same_rows(options.task, saved.get("task", "")):
        names |= {field.name for field in dataclasses.fields(TaskOptions)} | {"max_prompt_tokens", "overlong"}
    elif options.task.startswith(PREFIX):
        names |= {"answer_in"}
    if options.data and not same_rows(options.data, saved.get("data", "")):  # other rows are all evaluated
        names -= {"heldout", "num_heldout"}
    if saved.get("max_tokens", 0) is None:  # the run did not limit completions
        names.remove("max_tokens")
    default = from_json(Options(model=options.model), {name: saved[name] for name in names & saved.keys()})
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
    saved, types = flattened(read_json(file)), option_types(GRPOConfig) | option_types(Options)
    if "heldout_share" in saved:
        saved.pop("task", None)  # preferences or ratings, which hold out other prompts than a task does
    types["max_tokens"] = int | None  # None: the run did not limit completions
    for name, value in saved.items():
        if name in types:
            check_type(f"{name} in {file}", value, types[name])
    return saved


def main(options: Options) -> None:
    """Samples completions, scores them, and prints a table."""
    started, console = time.perf_counter(), RunConsole()
    if not options.model:
        raise UsageError("name a model: a folder, an id on the hub, or the folder of a run")
    out = options.out and user_path(options.out)
    options = dataclasses.replace(options, model=str(user_path(options.model)), out=out)
    saved = saved_options(options.model)
    if not options.task and not Path(options.model).exists():
        raise UsageError(f"there is no folder {options.model}: name that of a run; a model needs --task as well")
    if not saved and (options.phase or options.step is not None):
        raise UsageError(f"--phase and --step choose a checkpoint, and {options.model} is no run: leave them out")
    if saved and options.dtype not in ("auto", saved.get("dtype", "float32")):
        raise UsageError(f"the run keeps its dtype {saved.get('dtype', 'float32')}: leave out --dtype")
    named = [(getattr(options, name), saved.get(name, "")) for name in ("task", "data")]
    same_task = "task" in saved and all(same_rows(*pair) for pair in named)
    if same_task and options.num_heldout != saved.get("num_heldout"):
        raise UsageError("of its own task a run has trained on all but its held-out prompts: leave out --num-heldout")
    if options.heldout and not same_task:
        raise UsageError("--heldout is for training: name the rows to evaluate with --task")
    config = config_of(options)
    validate(config)
    check_task_options(options)
    if out and out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file: name a folder with --out")
    if out:
        make_folder(out)  # before the evaluation, which may take long
    if saved:
        options = dataclasses.replace(options, phase=phase_of(Path(options.model), options.phase))
    pretrained, step = load(options)
    group_size = saved.get("group_size", _GROUP_SIZE)
    task_of = open_task(
        options,
        pretrained,
        num_prompts=1,
        group_size=group_size,
        seed=0,
        training=same_task,
        has_levels=same_task and saved.get("curriculum", 0) > 0,
        **prompt_options(options, config.sampling, pretrained),
    )
    with task_of as task:
        check_tokens(task)
        interaction = interaction_of(task)
        interaction.check(config.sampling)
        try_rewards(task, task.heldout.examples[0], pretrained, group_size)
        pretrained = for_texts(pretrained, task.heldout.tokens.width + config.sampling.completion_width)
        notes = [note for note in (*pretrained.notes, *task.notes) if "no prompt is held out" not in note]
        inputs = read_inputs(Path(options.model)).get(options.phase or "", {}) if same_task else {}
        if same_task and inputs.get("held-out prompts") != hash_prompts(task.heldout):
            notes.append("the held-out prompts are no longer those of the run, which may have trained on some of them")
        warn(console, notes)
        block = saved.get("num_prompts", 32) * group_size
        evaluation = sample_and_score(pretrained, task, config, console, metric=options.metric, block=block)
        warn(console, ungraded_messages(task.reward).values())
        warn(console, interaction.failures(task).values())
    numbers = summary(evaluation)
    checkpoint = "" if step is None else f", step {step}"
    show(console, numbers, f"{len(task.heldout.examples)} held-out prompts, {options.samples} samples each{checkpoint}")
    console.print(f"{time.perf_counter() - started:.0f} s")
    if out:
        save(dataclasses.replace(options, step=step, dtype=pretrained.config.dtype), out, numbers, evaluation, task)


def config_of(options: Options) -> GRPOConfig:
    """Returns the configuration of the sampler, with as few groups for each prompt as `_MAX_GROUP` allows."""
    groups = -(-(options.samples + 1) // _MAX_GROUP)
    return recipe(
        num_prompts=options.num_prompts,
        group_size=max(2, -(-(options.samples + 1) // groups)),
        eval_samples=options.samples,
        seed=options.seed,
        **{name: getattr(options, name) for name in _DECODING},
    )


def warn(console: Console, messages: Iterable[str]) -> None:
    """Prints warnings."""
    for message in messages:
        console.print(f"[yellow]warning:[/] {escape(message)}", soft_wrap=True)


def sample_and_score(
    pretrained: Pretrained, task: Task, config: GRPOConfig, console: Console, *, metric: str, block: int
) -> Evaluation:
    """Evaluates a model and shows progress; `metric` and `block` are those of `evaluate`."""
    sampler = make_sampler(decoder_policy(pretrained.config), task, config.sampling)
    calls, total = sample_heldout(sampler, pretrained.params, task, config), num_heldout_calls(task, config)
    if console.is_terminal:
        observed = track(calls, "sampling", total=total, console=console, transient=True)
    else:
        observed = watched(calls, console, "sampling", total)
    return evaluate(observed, task, metric=metric, block=block)


def show(console: Console, numbers: dict[str, float], title: str) -> None:
    """Prints the numbers with their intervals, one on each line."""
    console.print(f"{title} [95% interval]", markup=False)
    table = Table(box=None, show_header=False)
    for name in numbers:
        if not name.endswith(("_low", "_high")):
            table.add_row(name, cell(numbers, name))
    console.print(table)


def load(options: Options) -> tuple[Pretrained, int | None]:
    """Loads a model, or the model of a run. Also returns the step of the run's checkpoint, or None."""
    if saved := saved_options(options.model):
        dtype = resolve_dtype(saved.get("dtype", "float32"))
        return load_run(Path(options.model), phase=options.phase, step=options.step, dtype=dtype)
    return load_pretrained(options.model, dtype=resolve_dtype(options.dtype)), None


def save(options: Options, folder: Path, numbers: dict[str, float], evaluation: Evaluation, task: Task) -> None:
    """Writes numbers.json, and completions.jsonl with one line for each prompt.

    The last completion of a prompt is the greedy one. Ungraded completions have null as their score.
    """
    (folder / "numbers.json").unlink(missing_ok=True)  # written last, so that it always belongs to completions.jsonl
    scores = np.concatenate([evaluation.scores, evaluation.greedy[:, None]], axis=1)
    scores = np.where(evaluation.graded, scores, np.nan)
    earned = [[None if np.isnan(score) else score for score in row] for row in scores.tolist()]
    groups = zip(task.heldout.examples, evaluation.texts, earned, evaluation.lengths.tolist(), strict=True)
    lines = (
        json.dumps({"prompt": row["prompt"], "completions": texts, "scores": scores, "lengths": lengths})
        for row, texts, scores, lengths in groups
    )
    write_text(folder / "completions.jsonl", "".join(line + "\n" for line in lines))
    as_text = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    write_json(folder / "numbers.json", {**numbers, "options": as_text})


def command() -> None:
    """Runs the command."""
    try:
        with flags.refusing():
            options = parse()
            if options.compilation_cache:
                use_cache()
            main(options)
    except KeyboardInterrupt:
        flags.refuse("stopped: nothing was written")
