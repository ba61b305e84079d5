"""GRPO on any model and any task: GSM8K, MATH, Countdown, or rows and rewards of your own.

A row is a JSON object with a prompt and the columns that its rewards need. A reward is a Python function of (examples,
completions) that returns a number for each; an example is a row with its prompt as text. The function runs in a process
of its own, which is killed when it hangs. Held-out prompts are evaluated before, during and after training. --control
also trains on a coin toss, which must not learn. A model of 260 thousand parameters takes minutes on two CPU cores; one
of a billion needs an accelerator.

  grpo-jax train --model DIR --task rows.jsonl --reward my_rewards.py:solved
  grpo-jax train --model DIR --task gsm8k --data DIR --preset dapo --max-rollouts 4
"""

import time
from dataclasses import dataclass
from pathlib import Path

from grpo_jax.commands.common import PHASES, finish, train_with_control
from grpo_jax.config import GRPOConfig, ModelOptions, recipe, validate
from grpo_jax.runs import flags, terminal
from grpo_jax.runs.folder import RunFolder
from grpo_jax.runs.pretrained import Loaded, keep_description, load_model
from grpo_jax.statistics import cell
from grpo_jax.tasks.options import TaskOptions, check_task_options, open_task
from grpo_jax.tasks.task import Task
from grpo_jax.training.grpo import make_programs
from grpo_jax.training.guards import check_length
from grpo_jax.training.parallel import num_devices, replicate

CURVES = (("length_mean", "tokens"),)


@dataclass(frozen=True)
class Config:
    """Options of the run."""

    train: GRPOConfig = recipe(eval_every=20)
    model: ModelOptions = ModelOptions()
    task: TaskOptions = TaskOptions()
    output: flags.RunConfig = flags.RunConfig(Path("runs/train"))
    control: bool = False
    """Train on a coin toss as well, from the same start."""


def main(config: Config) -> None:
    """Loads model and task, then trains."""
    validate(config.train, num_devices=num_devices(config.train.devices))  # before a checkpoint is read
    check_task_options(config.task)
    model = load_model(config.model, seed=config.train.seed)
    with open_task(
        config.task,
        model.pretrained,
        num_prompts=config.train.sampling.num_prompts,
        group_size=config.train.sampling.group_size,
        seed=config.train.seed,
        max_prompt_tokens=config.model.max_prompt_tokens,
        overlong=config.model.overlong,
    ) as task:
        run_task(config, model, task)


def run_task(config: Config, model: Loaded, task: Task) -> None:
    """GRPO, and the control if it is asked for; a group, a table, curves, a page, and the checksum."""
    started = time.perf_counter()
    programs = make_programs(model.policy, task, config.train)  # refuses bad options before anything is compiled
    start = replicate(model.params, num_devices(config.train.devices))
    run = flags.open_run(config)
    keep_description(run, model, config.model)
    check_length(run, task, config.train.sampling.max_tokens, model.pretrained.config.max_position_embeddings)
    phases = PHASES if config.control else PHASES[:1]
    rows, checksum = train_with_control(start, task, config.train, run, programs, phases=phases)

    groups = [line for line in run.lines("rollouts.jsonl") if line["phase"] == "grpo"]
    telling = [group for group in groups if len(set(group["rewards"])) > 1]  # in the others all advantages are 0
    terminal.print_groups(run, (telling or groups)[-1:])
    names = [name for name in rows["after"] if not name.endswith(("_low", "_high"))]
    table = {name: [cell(row, name) for row in rows.values()] for name in names}
    terminal.print_table(run, f"{len(task.heldout.examples)} held-out prompts [95% interval]", tuple(rows), table)
    print_ungraded(run, config)
    finish(run, rows, checksum, CURVES, started)


def print_ungraded(run: RunFolder, config: Config) -> None:
    """How many completions of the rollouts got no number, by reward and reason, if there were any."""
    lines = [line for line in run.lines() if line["phase"] == "grpo"]
    counts: dict[str, int] = {}
    for line in lines:
        for name, count in line.items():
            if name.startswith("ungraded_"):
                counts[name] = counts.get(name, 0) + count
    sampled = sum(line.get("rollouts", 1) for line in lines if line["step"])
    total = sampled * config.train.sampling.num_prompts * config.train.sampling.group_size
    if counts:
        rows = {name: (count, f"{count / total:.1%}") for name, count in counts.items()}
        terminal.print_table(run, f"without a number, of {total} completions in training", ("count", "share"), rows)


def command() -> None:
    """The command line."""
    flags.main(Config, main, __doc__)
