"""How good is a model at a task: greedy, avg@n, pass@k and maj@n, with 95% intervals over prompts.

MODEL is a folder in Hugging Face format, an id on the hub, or the folder of a run: then its newest checkpoint is taken,
and its task, held-out prompts and sampling unless others are given (its rewards are code that is run: evaluate only
runs that you trust). Of a task that is given all rows are evaluated. Completions do not depend on how many prompts are
sampled at once. pass@k is the unbiased estimate; of rewards other than 0 and 1 it is the mean best of k.

  python -m experiments.evaluate DIR --task gsm8k --data DIR --samples 8 --max-tokens 256
  python -m experiments.evaluate runs/train --samples 31
"""

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from experiments.common import cell
from grpo_jax import cli
from grpo_jax.config import GRPOConfig, validate
from grpo_jax.errors import UsageError
from grpo_jax.models.config import Dtype
from grpo_jax.models.huggingface import Pretrained, load_pretrained, read_json
from grpo_jax.models.policy import decoder_policy
from grpo_jax.rewards.reward import ungraded_messages
from grpo_jax.tasks.options import TaskOptions, check_task_options, open_task
from grpo_jax.tasks.task import Task
from grpo_jax.tasks.text import Overlong
from grpo_jax.training.evaluate import Evaluation, evaluate, sample_heldout, summary
from grpo_jax.training.guards import check_task
from grpo_jax.training.pretrained import load_run
from grpo_jax.training.rollout import make_sampler
from grpo_jax.training.run import write_json, write_text

_MAX_GROUP = 16  # completions of a prompt sampled at once, to bound the memory
_GROUP_SIZE = 8  # that deadlines of rewards are meant for, as in training


@dataclass(frozen=True)
class Options(TaskOptions):
    """What to evaluate, and how to sample."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")] = ""
    """Folder of a model or of a run, or an id on the hub."""
    samples: int = 8
    """Sampled completions of each prompt (n), besides a greedy one."""
    metric: str = ""
    """Reward that counts; none: the weighted sum."""
    max_tokens: int | None = None
    """Longest completion, in tokens; None: the run's, or 256."""
    temperature: float | None = None
    """Of the sampled completions; None: the run's, or 1."""
    top_k: int | None = None
    """Sample among the k likeliest tokens; 0 for all, None: as the run."""
    top_p: float | None = None
    """Sample among the fewest likeliest tokens of this mass; 1 for all, None: as the run."""
    min_p: float | None = None
    """Sample among tokens of at least this share of the largest probability; 0 for all, None: as the run."""
    max_prompt_tokens: int | None = None
    """Longest prompt, in tokens; None: the run's, or as long as they come."""
    overlong: Overlong | None = None
    """What happens to longer prompts: drop, or truncate their beginning; None: as the run, or drop."""
    num_prompts: int = 16
    """Prompts sampled at once. No number depends on it."""
    dtype: Dtype = "float32"
    """Of activations and matrix products, of a model that is no run."""
    phase: str = "grpo"
    """Phase of a run."""
    step: int | None = None
    """Step of a run's checkpoint; None: the newest."""
    seed: int = 0
    """Of the sampling."""
    out: Path | None = None
    """Folder for numbers.json, which has every option too, and completions.jsonl."""


def main(options: Options) -> None:
    """Samples, scores, and prints a table."""
    started, console = time.perf_counter(), Console()
    if not options.model:
        raise UsageError("name a model: a folder, an id on the hub, or the folder of a run")
    options, of_run = filled(options)
    groups = -(-(options.samples + 1) // _MAX_GROUP)  # of a prompt
    group_size = max(2, -(-(options.samples + 1) // groups))
    sampling = dataclasses.replace(
        GRPOConfig(num_prompts=options.num_prompts, group_size=group_size, seed=options.seed),
        **{name: getattr(options, name) for name in ("max_tokens", "temperature", "top_k", "top_p", "min_p")},
    )
    validate(sampling)
    check_task_options(options)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    pretrained = load(options)
    task_of = open_task(
        options,
        pretrained,
        num_prompts=1,
        group_size=of_run.get("group_size") or _GROUP_SIZE,
        seed=0,
        max_prompt_tokens=options.max_prompt_tokens,
        overlong=options.overlong or "drop",
        training="task" in of_run,
    )
    with task_of as task:
        check_task(task)
        for note in task.notes:
            if note.startswith("held out"):
                console.print(f"note: {note}", markup=False, soft_wrap=True)
        calls = sample_heldout(
            make_sampler(decoder_policy(pretrained.config), task, sampling),
            pretrained.params,
            task,
            num_prompts=options.num_prompts,
            group_size=group_size,
            temperature=sampling.algorithm.temperature,
            seed=options.seed,
            samples=options.samples,
        )
        total = -(-groups * len(task.heldout.examples) // options.num_prompts)
        shown = track(calls, "sampling", total=total, console=console, transient=True)
        evaluation = evaluate(shown, task, metric=options.metric)
        for message in ungraded_messages(task.reward).values():
            console.print(f"[yellow]warning:[/] {escape(message)}", soft_wrap=True)
    numbers = summary(evaluation)
    console.print(f"{len(task.heldout.examples)} held-out prompts, {options.samples} samples each [95% interval]")
    table = Table(box=None, show_header=False)
    for name in numbers:
        if not name.endswith(("_low", "_high")):
            table.add_row(name, cell(numbers, name))
    console.print(table)
    console.print(f"{time.perf_counter() - started:.0f} s")
    if options.out:
        save(options, numbers, evaluation, task)


def filled(options: Options) -> tuple[Options, dict[str, Any]]:
    """Options with those of the run where none are given, and what else is known of the run; nothing if it is none, or
    if another task is given."""
    file = Path(options.model) / "config.json"
    saved = read_json(file) if (Path(options.model) / "checkpoints").is_dir() else {}
    names = {"max_tokens", "top_k", "top_p", "min_p", "max_prompt_tokens", "overlong"}
    if saved:
        known = {field.name for field in dataclasses.fields(GRPOConfig)}
        algorithm = GRPOConfig(**{name: value for name, value in saved.items() if name in known}).algorithm
        saved |= {"temperature": algorithm.temperature, "group_size": algorithm.group_size}
    if not options.task:
        names |= {field.name for field in dataclasses.fields(TaskOptions)}
    else:
        saved.pop("task", None)
    given = {name: getattr(options, name) for name in names | {"temperature"}}
    unset = {name for name, value in given.items() if value is None or value == getattr(TaskOptions, name, None)}
    found = {name: saved[name] for name in unset & saved.keys()}
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    options = dataclasses.replace(options, **found)
    rest: dict[str, Any] = {"max_tokens": 256, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    missing = {name: value for name, value in rest.items() if getattr(options, name) is None}
    return dataclasses.replace(options, **missing), saved


def load(options: Options) -> Pretrained:
    """The model of a folder, or of a run."""
    if (Path(options.model) / "checkpoints").is_dir():
        return load_run(Path(options.model), phase=options.phase, step=options.step)[0]
    return load_pretrained(options.model, dtype=options.dtype)


def save(options: Options, numbers: dict[str, float], evaluation: Evaluation, task: Task) -> None:
    """numbers.json, and completions.jsonl with a line a prompt; the last completion of each is the greedy one."""
    assert options.out
    given = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    write_json(options.out / "numbers.json", {**numbers, "options": given})
    scores = np.concatenate([evaluation.scores, evaluation.greedy[:, None]], axis=1)
    groups = zip(task.heldout.examples, evaluation.texts, scores.tolist(), evaluation.lengths.tolist(), strict=True)
    lines = (
        json.dumps({"prompt": row["prompt"], "completions": texts, "scores": earned, "lengths": lengths})
        for row, texts, earned, lengths in groups
    )
    write_text(options.out / "completions.jsonl", "".join(line + "\n" for line in lines))


if __name__ == "__main__":
    given = tyro.cli(Options, prog="python -m experiments.evaluate", description=__doc__)
    try:
        main(given)
    except UsageError as error:
        cli.refuse(str(error))
    except KeyboardInterrupt:
        cli.refuse("stopped: nothing was written")
