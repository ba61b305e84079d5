"""How good is a model at a task: greedy, avg@n, unbiased pass@k and maj@n, with 95% intervals.

MODEL is a folder in Hugging Face format, an id on the hub, or the folder of a run, whose newest checkpoint is taken,
and whose task unless another is given. The completions do not depend on how many prompts are sampled at once.

  python -m experiments.evaluate DIR --task gsm8k --data DIR --samples 8 --max-tokens 256
  python -m experiments.evaluate runs/train --samples 32
"""

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.common import cell
from grpo_jax import cli
from grpo_jax.config import GRPOConfig, validate
from grpo_jax.errors import UsageError
from grpo_jax.export import load_run
from grpo_jax.models.config import Dtype
from grpo_jax.models.huggingface import Pretrained, load_pretrained, read_json
from grpo_jax.models.policy import decoder_policy
from grpo_jax.tasks.options import TaskOptions, open_task
from grpo_jax.training.evaluate import evaluate, sample_heldout, summary
from grpo_jax.training.guards import check_task
from grpo_jax.training.rollout import make_sampler
from grpo_jax.training.run import write_json

_MAX_GROUP = 16  # completions of a prompt sampled at once, to bound the memory


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
    temperature: float = 1.0
    """Of the sampled completions."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Sample among the fewest likeliest tokens of this mass; 1 for all."""
    min_p: float = 0.0
    """Sample among tokens of at least this share of the largest probability; 0 for all."""
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
    """File for the numbers, as JSON."""


def main(options: Options) -> None:
    """Samples, scores, and prints a table."""
    started, console = time.perf_counter(), Console()
    if not options.model:
        raise UsageError("name a model: a folder, an id on the hub, or the folder of a run")
    pretrained, options = load(options)
    group_size = min(options.samples + 1, _MAX_GROUP)
    sampling = GRPOConfig(
        num_prompts=options.num_prompts,
        max_tokens=options.max_tokens or 256,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        group_size=max(group_size, 2),
    )
    validate(sampling)
    with open_task(options, pretrained, num_prompts=1, group_size=options.samples + 1, seed=0) as task:
        check_task(task)
        sampler = make_sampler(decoder_policy(pretrained.config), task, sampling)
        calls = sample_heldout(
            sampler,
            pretrained.params,
            task,
            num_prompts=options.num_prompts,
            group_size=group_size,
            temperature=options.temperature,
            seed=options.seed,
            samples=options.samples,
        )
        groups = -(-(options.samples + 1) // group_size) * len(task.heldout.examples)
        total = -(-groups // options.num_prompts)
        shown = track(calls, "sampling", total=total, console=console, transient=True)
        numbers = summary(evaluate(shown, task, metric=options.metric))
    table = Table(
        title=f"{len(task.heldout.examples)} held-out prompts, {options.samples} samples each, 95% intervals",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    table.add_column("")
    table.add_column("", justify="right")
    for name in numbers:
        if not name.endswith(("_low", "_high")):
            table.add_row(name, cell(numbers, name))
    console.print(table)
    console.print(f"{time.perf_counter() - started:.0f} s")
    if options.out:
        write_json(options.out, numbers)


def load(options: Options) -> tuple[Pretrained, Options]:
    """The model; and the options, those of a run's task filled in where none are given."""
    folder = Path(options.model)
    if not (folder / "checkpoints").is_dir():
        return load_pretrained(options.model, dtype=options.dtype), options
    saved = read_json(folder / "config.json")
    taken = {"max_tokens"} if options.max_tokens is None else set()
    if not options.task:
        names = {field.name for field in dataclasses.fields(TaskOptions)}
        taken |= {name for name in names if getattr(options, name) == getattr(TaskOptions, name)}
    found = {name: saved[name] for name in taken & saved.keys()}
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    pretrained, _ = load_run(folder, phase=options.phase, step=options.step)
    return pretrained, dataclasses.replace(options, **found)


if __name__ == "__main__":
    given = tyro.cli(Options, prog="python -m experiments.evaluate", description=__doc__)
    try:
        main(given)
    except UsageError as error:
        cli.refuse(str(error))
