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
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from grpo_jax.commands import flags
from grpo_jax.commands.model_and_task import (
    SamplingOptions,
    check_options,
    has_own_task,
    open_model_and_task,
    read_command_line,
    run_command,
    saved_options,
    warn,
)
from grpo_jax.config import EngineOptions, GRPOConfig
from grpo_jax.data.prompts import hash_prompts
from grpo_jax.errors import UsageError, make_folder, user_path
from grpo_jax.models.huggingface import Pretrained
from grpo_jax.models.policy import decoder_policy
from grpo_jax.options import Size
from grpo_jax.rl.evaluate import Evaluation, evaluate, num_heldout_calls, sample_heldout, summary
from grpo_jax.rl.interaction import interaction_of
from grpo_jax.rl.source import make_sampler
from grpo_jax.runs.files import write_json, write_text
from grpo_jax.runs.folder import read_inputs
from grpo_jax.runs.progress import RunConsole, watched
from grpo_jax.statistics import cell
from grpo_jax.tasks.task import Task
from grpo_jax.training.prepare import make_engine_sampler

_MAX_GROUP = 16  # the most completions of a prompt to sample at once, which bounds the memory
_GROUP_SIZE = 8  # training's usual group size, for which the deadlines of rewards are meant


@dataclass(frozen=True)
class Options(SamplingOptions, EngineOptions):
    """Options of the evaluation: the model, the task and the sampling."""

    samples: Size = 8
    """Sampled completions of each prompt (n), besides a greedy one."""
    metric: str = ""
    """Name of the reward that is evaluated. Empty: the weighted sum."""
    num_prompts: int = 16
    """Number of prompts sampled at once. Results do not depend on it."""
    out: Path | None = None
    """Folder for numbers.json, with every option and the checkpoint's step, and completions.jsonl."""


parse = partial(read_command_line, Options, __doc__)


def main(options: Options) -> None:
    """Samples completions, grades them, and prints a table."""
    started, console = time.perf_counter(), RunConsole()
    out = options.out and user_path(options.out)
    shape = {"num_prompts": options.num_prompts, "eval_samples": options.samples}
    shape["group_size"] = _group_size(options.samples + 1)
    options, config = check_options(dataclasses.replace(options, out=out), needs_reward=True, **shape)
    saved = saved_options(options.model)
    same_task = has_own_task(options, saved)
    if options.heldout and not same_task:
        raise UsageError("--heldout is for training: name the rows to evaluate with --task")
    if out and out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file: name a folder with --out")
    if out:
        make_folder(out)  # before the evaluation, which may take long
    group_size = saved.get("group_size", _GROUP_SIZE)
    opened = open_model_and_task(options, config, num_prompts=1, group_size=group_size, seed=0, training=same_task)
    with opened as (pretrained, step, task, notes):
        inputs = read_inputs(Path(options.model)).get(options.phase or "", {}) if same_task else {}
        if same_task and inputs.get("held-out prompts") != hash_prompts(task.heldout):
            notes.append("the held-out prompts are no longer those of the run, which may have trained on some of them")
        warn(console, notes)
        block = saved.get("num_prompts", 32) * group_size
        evaluation = sample_and_score(options, pretrained, task, config, console, block=block)
        warn(console, task.rewards.failures().values())
        warn(console, interaction_of(task).failures(task).values())
    numbers = summary(evaluation)
    checkpoint = "" if step is None else f", step {step}"
    show(console, numbers, f"{len(task.heldout.examples)} held-out prompts, {options.samples} samples each{checkpoint}")
    console.print(f"{time.perf_counter() - started:.0f} s")
    if out:
        save(dataclasses.replace(options, step=step, dtype=pretrained.config.dtype), out, numbers, evaluation, task)


def _group_size(count: int) -> int:
    """Returns the size of a group for `count` completions of a prompt, in as few groups as `_MAX_GROUP` allows."""
    return max(2, -(-count // -(-count // _MAX_GROUP)))


def sample_and_score(
    options: Options, pretrained: Pretrained, task: Task, config: GRPOConfig, console: Console, *, block: int
) -> Evaluation:
    """Evaluates a model, with servers if there are any, and shows progress; `block` is that of `evaluate`."""
    sampler = make_engine_sampler(options, pretrained, task, config, note=flags.say_note)
    sampler = sampler or make_sampler(decoder_policy(pretrained.config), task, config.sampling)
    calls, total = sample_heldout(sampler, pretrained.params, task, config), num_heldout_calls(task, config)
    if console.is_terminal:
        observed = track(calls, "sampling", total=total, console=console, transient=True)
    else:
        observed = watched(calls, console, "sampling", total)
    return evaluate(observed, task, metric=options.metric, block=block)


def show(console: Console, numbers: dict[str, float], title: str) -> None:
    """Prints the numbers with their intervals, one on each line."""
    console.print(f"{title} [95% interval]", markup=False)
    table = Table(box=None, show_header=False)
    for name in numbers:
        if not name.endswith(("_low", "_high")):
            table.add_row(name, cell(numbers, name))
    console.print(table)


def save(options: Options, folder: Path, numbers: dict[str, float], evaluation: Evaluation, task: Task) -> None:
    """Writes numbers.json, and completions.jsonl with one line for each prompt.

    The last completion of a prompt is the greedy one. Ungraded completions have null as their reward.
    """
    (folder / "numbers.json").unlink(missing_ok=True)  # written last, so that it always belongs to completions.jsonl
    scores = np.concatenate([evaluation.rewards, evaluation.greedy[:, None]], axis=1)
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
    run_command(parse, main)
