"""Samples a few prompts, and shows completions, their rewards, and what the rewards could teach.

MODEL is a folder in Hugging Face format, an id on the hub, or the folder of a run. The prompts and the random numbers
are those of the first step that `grpo-jax train` would take with the same options, or the next step of the run. So the
groups are what training would see. For a run, its task, rewards and sampling options are the defaults.

A group teaches if its rewards differ. With --num-prompts 32 the share of such groups gets a useful 95% interval. The
table also shows what each reward gives to texts that solve nothing. Without --reward, completions are only printed.

  grpo-jax sample DIR --task rows.jsonl --reward my_rewards.py:correct
  grpo-jax sample runs/train --num-prompts 32 --json samples.jsonl
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grpo_jax.commands.model_and_task import (
    SamplingOptions,
    check_options,
    open_model_and_task,
    read_command_line,
    run_command,
    warn,
)
from grpo_jax.config import GRPOConfig
from grpo_jax.data.types import Completion, Example
from grpo_jax.errors import UsageError, make_folder, user_path
from grpo_jax.models.huggingface import Pretrained
from grpo_jax.models.policy import decoder_policy
from grpo_jax.options import Size
from grpo_jax.rewards.reward import RewardSums
from grpo_jax.rl.grade import decode_groups, grade_completions, has_spread, readable_group
from grpo_jax.rl.interaction import interaction_of
from grpo_jax.rl.source import completion_numbers, group_temperatures, make_sampler
from grpo_jax.rl.types import SAMPLING, Graded, noise_of
from grpo_jax.runs.files import finite, write_text
from grpo_jax.runs.progress import RunConsole, say, watched
from grpo_jax.sampling.sampler import Completions
from grpo_jax.statistics import bootstrap, cell
from grpo_jax.tasks.task import Task
from grpo_jax.training.prepare import answer_of

_AT_ONCE = 64  # completions to sample at once, which bounds the memory
_SHOWN = 4  # prompts that are printed
_CHARACTERS = 400  # of a text that is printed


@dataclass(frozen=True)
class Options(SamplingOptions):
    """Options of the command: the model, the task and the sampling."""

    num_prompts: Size = 4
    """Number of prompts to sample."""
    group_size: Size = 8
    """Completions of each prompt (G)."""
    json: Path | None = None
    """File to write, with a line of JSON for each prompt, as in a run's rollouts.jsonl."""


parse = partial(read_command_line, Options, __doc__, of_run=("group_size", "seed"))


def main(options: Options) -> None:
    """Samples completions, and prints them with their rewards."""
    started, console = time.perf_counter(), RunConsole()
    file = options.json and user_path(options.json)
    shape = {"num_prompts": options.num_prompts, "group_size": options.group_size}
    options, config = check_options(options, needs_reward=False, **shape)
    if file and file.exists() and not file.is_file():
        raise UsageError(f"{file} is no regular file: name another with --json")
    if file:
        make_folder(file.parent)  # before the sampling, which may take long
    opened = open_model_and_task(options, config, **shape, seed=options.seed, needs_reward=False)
    with opened as (pretrained, step, task, notes):
        warn(console, notes)
        prompts = task.prompts(step or 0)
        completions = sample(pretrained, task, config, step or 0, console)
        graded = grade_completions(prompts, completions, task, task.rewards)
        warn(console, (task.rewards.failures() | interaction_of(task).failures(task)).values())
        texts, examples = decode_groups(completions, task), prompts.examples
        groups = [readable_group(task, row, graded, i, completions, i, texts[i]) for i, row in enumerate(examples)]
        if file:  # first, for nobody may read the terminal to its end
            write_text(file, "".join(json.dumps(finite(group)) + "\n" for group in groups))
        names = reward_names(task)
        for number, group in enumerate(groups[:_SHOWN]):
            say(console, f"prompt {number + 1}, {prompts.tokens.mask[number].sum()} tokens: {shorten(group['prompt'])}")
            show_group(console, group, names)
        if len(groups) > _SHOWN:
            say(console, f"{len(groups) - _SHOWN} more prompts are not printed: --json FILE writes all\n")
        checkpoint = "" if step is None else f", step {step}"
        say(console, f"{len(groups)} prompts, {options.group_size} completions each{checkpoint}")
        say(console, f"{graded.truncated.mean():.1%} of the completions are cut off at {options.max_tokens} tokens")
        if names:
            tries = try_texts(task, examples, options.group_size)
            show_numbers(console, "reward", {name: describe(graded, name) for name in names})
            show_numbers(console, "reward of", {name: describe_tries(tries, graded, name) for name in names})
    console.print(f"{time.perf_counter() - started:.0f} s")


def reward_names(task: Task) -> list[str]:
    """Returns the names of the rewards, after "" for the weighted sum. A single reward is the sum."""
    names = [*task.rewards.components]
    return ["", *names] if len(names) > 1 else [""] * len(names)


def sample(pretrained: Pretrained, task: Task, config: GRPOConfig, step: int, console: Console) -> Completions:
    """Samples the completions of a step of training, a few groups at once, as NumPy arrays."""
    prompts, count = task.prompts(step), config.sampling.num_prompts
    at_once = min(count, max(1, _AT_ONCE // config.sampling.group_size))
    sampler = make_sampler(decoder_policy(pretrained.config), task, config.sampling)
    numbers, temperatures = completion_numbers(config.sampling), group_temperatures(config.sampling)
    noise = noise_of(config.seed, SAMPLING, step)
    # The last call repeats prompts, so that all calls have the shape of one program.
    calls = [np.arange(start, start + at_once) % count for start in range(0, count, at_once)]
    parts = [
        sampler.complete(pretrained.params, prompts.take(rows), numbers[rows], temperatures[rows], noise)
        for rows in watched(calls, console, "sampling", len(calls))
    ]
    return jax.tree.map(lambda *x: np.concatenate(x)[:count], *parts)


# ---- what the rewards could teach


def describe(graded: Graded, name: str) -> dict[str, str]:
    """Returns the mean of a reward, and the shares of groups that teach and of prompts never or always solved."""
    rewards = values_of(graded, name)
    rewards = rewards[~np.isnan(rewards).all(-1)]  # prompts with rewards
    return {
        "mean": mean_of(rewards),
        "groups that teach [95% interval]": cell(bootstrap(has_spread(graded, name)).named("teach"), "teach"),
        "never solved": mean_of(np.nanmax(rewards, -1, initial=-np.inf) <= 0),
        "always solved": mean_of(np.nanmin(rewards, -1, initial=np.inf) >= 1),
    }


def try_texts(task: Task, examples: Sequence[Example], group_size: int) -> dict[str, RewardSums]:
    """Computes the rewards of texts that anybody could write, by what they are, for groups of equal completions.

    Rewards of several turns need a transcript, so they are not tried.
    """
    tries = {"empty text": lambda row: "", "prompt copied": copied_prompt, "answer copied": answer_of}
    sums: dict[str, RewardSums] = {}
    for what, write in tries.items() if interaction_of(task).parts != "turns" else ():
        written = [(row, Completion(text)) for row in examples if (text := write(row)) is not None]
        if groups := [pair for pair in written for _ in range(group_size)]:
            sums[what] = task.rewards.grade(*map(list, zip(*groups, strict=True)))
    return sums


def describe_tries(tries: Mapping[str, RewardSums], graded: Graded, name: str) -> dict[str, str]:
    """Returns the mean rewards of the texts that were tried, and the reward of the longest completion."""
    longest = values_of(graded, name).flat[graded.lengths.argmax()]
    numbers = {what: mean_of(values_of(sums, name)) for what, sums in tries.items()}
    return numbers | {"longest completion": mean_of(longest)}


def values_of(sums: Graded | RewardSums, name: str) -> np.ndarray:
    """Returns the rewards of a name, or their weighted sum for "". Those that do not apply are NaN."""
    return sums.components[name] if name else np.where(sums.applicable, sums.rewards, np.nan)


def mean_of(values: np.ndarray) -> str:
    """Formats the mean of the values that are numbers."""
    numbers = values[~np.isnan(values)]
    return cell({"mean": float(numbers.mean()) if numbers.size else np.nan}, "mean")


def copied_prompt(row: Example) -> str:
    """Returns what a policy would write that copies its prompt: the last message, or the text."""
    messages = getattr(row["prompt"], "messages", ())
    return str(messages[-1].get("content") or "") if messages else str(row["prompt"])


# ---- the terminal


def show_group(console: Console, group: Mapping[str, Any], names: Sequence[str]) -> None:
    """Prints a table of the completions of a prompt."""
    rows = []
    for i, text in enumerate(group["completions"]):
        rewards = {name: (group["components"][name] if name else group["rewards"])[i] for name in names}
        tokens = f"{group['lengths'][i]}{', cut' * group['truncated'][i]}"
        rows.append([*(cell(rewards, name) for name in names), tokens, shorten(text)])
    show_table(console, [*(name or "reward" for name in names), "tokens", "completion"], rows)


def show_numbers(console: Console, title: str, numbers: Mapping[str, Mapping[str, str]]) -> None:
    """Prints the numbers of each reward."""
    rows = [[name or "reward", *row.values()] for name, row in numbers.items()]
    show_table(console, [title, *numbers[""]], rows)


def show_table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table of texts, and an empty line."""
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table, highlight=False)
    say(console, "")


def shorten(text: str) -> str:
    """Returns a text as Python writes it, in one line without control characters. A long text loses its middle."""
    half, written = _CHARACTERS // 2, repr(str(text))
    return written if len(written) <= _CHARACTERS else f"{written[:half]} … {written[-half:]}"


def command() -> None:
    """Runs the command."""
    run_command(parse, main)
