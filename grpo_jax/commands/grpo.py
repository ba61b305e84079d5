"""GRPO on any model and any task: GSM8K, MATH, or rows and rewards of your own.

A row is a JSON object with a prompt and the columns that its rewards need. A reward is a Python function of (examples,
completions) that returns a number for each; an example is a row with its prompt as text. The function runs in a process
of its own, which is killed when it hangs.

Held-out prompts are evaluated before, during and after training. --control also trains on a coin toss, which must not
learn. With --teacher another model judges each token, alongside the reward or instead of it. A model of 260 thousand
parameters takes minutes on two CPU cores; one of a billion needs an accelerator.

Other methods are --method ppo, sft, reward-model, dpo and kto; each has a --help of its own.

  grpo-jax train --model DIR --task rows.jsonl --reward my_rewards.py:correct
  grpo-jax train --model DIR --task gsm8k --data DIR --preset dapo --max-rollouts 4
  grpo-jax train --model DIR --task gsm8k --teacher DIR --distillation reverse_kl --reward-coef 0 --kl-coef 0
"""

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from grpo_jax import report
from grpo_jax.commands import flags
from grpo_jax.commands.train import RUN_DIR, Method
from grpo_jax.config import EngineOptions, GRPOConfig, check_control, recipe, validate
from grpo_jax.devices import devices_of, num_shards, sampling_devices
from grpo_jax.models.huggingface import Pretrained
from grpo_jax.rl.guards import check_task
from grpo_jax.runs.files import import_wandb
from grpo_jax.runs.progress import RunConsole, say
from grpo_jax.tasks.options import TaskOptions, check_task_options, open_task
from grpo_jax.tasks.task import Task
from grpo_jax.training.phases import CONTROL, train_with_control
from grpo_jax.training.prepare import (
    Models,
    RunOptions,
    apply_memory_plan,
    begin,
    load_models,
    prepare,
    prompt_options,
    rate_warning,
    try_rewards,
)


@dataclass(frozen=True)
class Config(RunOptions):
    """Options of the run."""

    train: GRPOConfig = recipe(eval_every=20)
    engine: EngineOptions = EngineOptions()
    task: TaskOptions = TaskOptions()
    output: flags.RunConfig = flags.RunConfig(Path(RUN_DIR))
    method: Method = "grpo"
    """Method that trains the model. Each method has options of its own, which `--method NAME --help` lists."""
    control: bool = False
    """Train on a coin toss as well, from the same start."""
    dry_run: bool = False
    """Check options, files and rewards without loading weights; show the memory plan, the first prompt and its
    rewards, and end."""


def main(options: Config) -> None:
    """Trains a policy on rewards; prints a table and the checksum, and writes results.json and report.html.

    Args:
      options: The options of the command line.

    Raises:
      UsageError: One sentence that says what to change.
    """
    started, config = time.perf_counter(), options.train
    validate(config, num_devices=num_shards(devices_of(config)))  # before a checkpoint is read
    sampling_devices(config)
    check_task_options(options.task)
    if options.output.wandb:
        import_wandb()  # before the weights are loaded
    if options.control:
        check_control(config)
    models = load_models(options.model, config, weights=not options.dry_run)
    with task_of(options, models["policy"]) as task:
        if options.dry_run:
            show_start(options, models, task)
            return
        prepared = prepare(options, models, task, engine=options.engine, note=flags.say_note)
        run, programs = flags.open_run(prepared.options), prepared.programs
        begin(run, prepared, chat=options.task.chat)
        phases = (options.method, CONTROL) if options.control else (options.method,)
        rows, checksum, _ = train_with_control(prepared.params, task, programs.config, run, programs, phases=phases)
        report.print_results(run, f"{len(task.heldout.examples)} held-out prompts [95% interval]", rows)
        report.finish(run, rows, checksum, started)


def show_start(options: Config, models: Models, task: Task) -> None:
    """Prints what a run would begin with: the notes, the memory plan, and the first prompt with its rewards."""
    pretrained, prompts = models["policy"], task.prompts(0)
    check_task(task, options.train)
    tries = try_rewards(task, prompts.examples[0], pretrained, options.train.sampling.group_size)
    _, _, plan = apply_memory_plan(options, models, task, options.engine)
    first = pretrained.tokenizer.decode(prompts.tokens.ids[0][prompts.tokens.mask[0]].tolist())
    lines = [*pretrained.notes, *task.notes, *rate_warning(options, pretrained).values(), str(plan)]
    lines.append(f"the first prompt, as the model reads it: {first!r}")
    for what, rewards in tries.items():
        lines.append(f"rewards of {what}: {', '.join(f'{name} {value}' for name, value in rewards.items())}")
    say(RunConsole(), "\n".join(lines))


def task_of(options: Config, pretrained: Pretrained) -> AbstractContextManager[Task]:
    """Opens the task of a command line. The processes of its rewards end with the block."""
    sampling = options.train.sampling
    return open_task(
        options.task,
        pretrained,
        num_prompts=sampling.num_prompts,
        group_size=sampling.group_size,
        seed=options.train.seed,
        has_levels=sampling.curriculum > 0,
        decoding=sampling,
        **prompt_options(options, sampling, pretrained),
    )
