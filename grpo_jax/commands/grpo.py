"""GRPO on any model and any task: GSM8K, MATH, Countdown, or rows and rewards of your own.

A row is a JSON object with a prompt and the columns that its rewards need. A reward is a Python function of (examples,
completions) that returns a number for each; an example is a row with its prompt as text. The function runs in a process
of its own, which is killed when it hangs. Held-out prompts are evaluated before, during and after training. --control
also trains on a coin toss, which must not learn. With --teacher another model judges each token, beside the reward or
in its place. A model of 260 thousand parameters takes minutes on two CPU cores; one of a billion needs an accelerator.

Other methods are --method ppo, sft, reward-model, dpo and kto; each has a --help of its own.

  grpo-jax train --model DIR --task rows.jsonl --reward my_rewards.py:solved
  grpo-jax train --model DIR --task gsm8k --data DIR --preset dapo --max-rollouts 4
  grpo-jax train --model DIR --task gsm8k --teacher DIR --distillation reverse_kl --reward-coef 0 --kl-coef 0
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_jax.checks import validate
from grpo_jax.commands.common import CONTROL, RUN_DIR, Method, finish, train_with_control
from grpo_jax.config import EngineOptions, GRPOConfig, ModelOptions, recipe
from grpo_jax.data.text import prompt_limit
from grpo_jax.devices import devices_of, load_shardings, parts, place, size
from grpo_jax.errors import UsageError
from grpo_jax.rl.grpo import check_teacher
from grpo_jax.rl.guards import length_warning
from grpo_jax.rl.iteration import Programs
from grpo_jax.runs import flags, terminal
from grpo_jax.runs.folder import RunFolder
from grpo_jax.runs.pretrained import (
    Loaded,
    keep_description,
    keep_files,
    load_model,
    load_teacher,
    planned,
    say_plan,
)
from grpo_jax.statistics import cell
from grpo_jax.tasks.options import TaskOptions, check_task_options, open_task
from grpo_jax.tasks.task import Task, inputs_of
from grpo_jax.train import grpo_programs, open_engine

CURVES = (("length_mean", "tokens"),)
TAUGHT_CURVES = (("distillation", "divergence from the teacher, nats a token"),)


@dataclass(frozen=True)
class Config:
    """Options of the run."""

    train: GRPOConfig = recipe(eval_every=20)
    model: ModelOptions = ModelOptions()
    engine: EngineOptions = EngineOptions()
    task: TaskOptions = TaskOptions()
    output: flags.RunConfig = flags.RunConfig(Path(RUN_DIR))
    method: Method = "grpo"
    """What trains the model. Each method has options of its own: `--method ppo --help` lists those of PPO."""
    control: bool = False
    """Train on a coin toss as well, from the same start."""
    teacher: str = ""
    """Model that the policy learns from as --distillation says: folder of a Hugging Face model, or its id on the hub.
    It may have any size, but needs the policy's tokenizer. Empty: none."""


def main(config: Config) -> None:
    """Loads model and task, then trains."""
    devices = devices_of(config.train)
    validate(config.train, num_devices=parts(devices))  # before a checkpoint is read
    check_teacher(config.train, has_teacher=bool(config.teacher))
    if config.teacher and config.control:
        raise UsageError("--control takes a coin toss for rewards, but a teacher would teach it too: leave one out")
    with opened(config.model, config.task, config.train) as (model, task):
        teacher = None
        if config.teacher:
            sharding = load_shardings(devices)
            teacher = load_teacher(config.teacher, config.model, model.pretrained, sharding=sharding)
        config, model, plan = planned(
            config,
            config.train,
            model,
            task,
            devices=size(devices),
            parts=parts(devices),
            teacher=teacher.pretrained.config if teacher else None,
        )
        sampler = open_engine(config.engine, model, task, config.train, note=flags.say_note)
        programs, start = grpo_programs(model, teacher, task, config.train, sampler=sampler)
        run = flags.open_run(config)
        say_plan(run, plan)
        if teacher:
            keep_files(run, "teacher", teacher.pretrained.folder)
        run_method(
            run,
            model,
            task,
            programs,
            start,
            phase="grpo",
            options=config.model,
            chat=config.task.chat,
            control=config.control,
            curves=(*CURVES, *TAUGHT_CURVES) if teacher else CURVES,
        )


@contextmanager
def opened(model: ModelOptions, task: TaskOptions, train: GRPOConfig) -> Iterator[tuple[Loaded, Task]]:
    """The model, and the task whose rewards end with the block.

    Args:
      model, task: of the command line.
      train: the run, checked.
    """
    check_task_options(task)
    loaded = load_model(model, seed=train.seed, sharding=load_shardings(devices_of(train)))
    with open_task(
        task,
        loaded.pretrained,
        num_prompts=train.sampling.num_prompts,
        group_size=train.sampling.group_size,
        seed=train.seed,
        max_prompt_tokens=prompt_limit(
            model.max_prompt_tokens, loaded.pretrained.config.max_position_embeddings, train.sampling.row_tokens
        ),
        overlong=model.overlong,
    ) as opened_task:
        yield loaded, opened_task


def run_method(
    run: RunFolder,
    model: Loaded,
    task: Task,
    programs: Programs,
    start: Any,
    *,
    phase: str,
    options: ModelOptions,
    chat: bool | None,
    control: bool,
    curves: Sequence[tuple[str, str]] = CURVES,
) -> None:
    """Trains by rewards; leaves a group, a table, curves, a page, and the checksum.

    Args:
      run: new, or to be continued.
      model: as loaded.
      task: prompts and rewards.
      programs: of the method, whose configuration they have.
      start: parameters, as the programs take them.
      phase: the name of the method.
      options: of the model.
      chat: as in `keep_description`.
      control: whether a coin toss is trained on as well.
      curves: (metric, title) beside those of every run.
    """
    started, config = time.perf_counter(), programs.config
    keep_description(run, model, options, chat)
    width = task.heldout.ids.shape[1] + config.sampling.row_tokens
    run.warn(length_warning(width, model.pretrained.config.max_position_embeddings))
    start = place(start, devices_of(config))
    phases = (phase, CONTROL) if control else (phase,)
    for name in phases:  # before the start is evaluated, which takes long
        run.keep_inputs(name, inputs_of(task))
    rows, checksum = train_with_control(start, task, config, run, programs, phases=phases)

    groups = [line for line in run.lines("rollouts.jsonl") if line["phase"] == phase]
    telling = [group for group in groups if len(set(group["rewards"])) > 1]  # in the others all advantages are 0
    terminal.print_groups(run, (telling or groups)[-1:])
    names = [name for name in rows["after"] if not name.endswith(("_low", "_high"))]
    table = {name: [cell(row, name) for row in rows.values()] for name in names}
    terminal.print_table(run, f"{len(task.heldout.examples)} held-out prompts [95% interval]", tuple(rows), table)
    print_ungraded(run, config, phase)
    finish(run, rows, checksum, curves, started, phases=phases)


def print_ungraded(run: RunFolder, config: GRPOConfig, phase: str) -> None:
    """How many completions of a phase's rollouts got no number, by reward and reason, if there were any."""
    lines = [line for line in run.lines() if line["phase"] == phase]
    counts: dict[str, int] = {}
    for line in lines:
        for name, count in line.items():
            if name.startswith("ungraded_"):
                counts[name] = counts.get(name, 0) + count
    sampled = sum(line.get("rollouts", 1) for line in lines if line["step"])
    total = sampled * config.sampling.num_prompts * config.sampling.group_size
    if counts:
        rows = {name: (count, f"{count / total:.1%}") for name, count in counts.items()}
        terminal.print_table(run, f"without a number, of {total} completions in training", ("count", "share"), rows)
