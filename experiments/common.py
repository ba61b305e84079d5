"""Shared parts of the experiments: small new models, and results over several seeds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import jax
import numpy as np
from rich import box
from rich.markup import escape
from rich.table import Table

from experiments import plots
from experiments.new_models import describe_new_model
from experiments.tasks.characters import Characters
from grpo_jax import hosts, report
from grpo_jax.commands import flags
from grpo_jax.data.packing import Packed
from grpo_jax.data.prompts import Prompts
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.offline.phase import SupervisedConfig
from grpo_jax.offline.sft import sft_objective
from grpo_jax.options import Positive, Size
from grpo_jax.rl.programs import Programs, make_programs
from grpo_jax.runs.files import write_json
from grpo_jax.runs.folder import RunFolder
from grpo_jax.statistics import cell, interval_over_runs
from grpo_jax.step import Batch
from grpo_jax.tasks.task import Task
from grpo_jax.training.phases import fit

# ---- small new models


def open_experiment(
    config: Any, model: ModelConfig, text: Characters, task: Task
) -> tuple[Policy, Programs, RunFolder]:
    """Returns a small model, the programs of GRPO, and the run, which stores the model's description.

    Args:
      config: The options of the run, with fields `train` and `output`.
      model: The configuration of the decoder.
      text: The tokenizer of the model.
      task: Supplies the prompts and the reward.

    Raises:
      UsageError: Options contradict each other. This is raised before the run has a folder.
    """
    policy = decoder_policy(model)
    programs = make_programs(policy, task, config.train)
    run = flags.open_run(config)
    keep_model(run, model, text)
    return policy, programs, run


def keep_model(run: RunFolder, config: ModelConfig, text: Characters) -> None:
    """Writes a model's configuration and its character tokenizer into the run's model/."""
    describe_new_model(run.path / "model", config)
    text.save_tokenizer(run.path / "model")


def completions_batch(prompts: Prompts, ids: np.ndarray, mask: np.ndarray) -> Batch:
    """Returns a batch for supervised training, with one completion of each prompt.

    Args:
      prompts: The N prompts.
      ids: The tokens of the completions, int32 `[N, 1, T]`.
      mask: The tokens to train on, bool `[N, 1, T]`.
    """
    return Batch(prompts.tokens, ids, mask, np.ones(ids.shape[:2], np.float32))


def warm_start(
    policy: Policy,
    batches: Callable[[int], Batch | Packed],
    config: SupervisedConfig,
    run: RunFolder,
    *,
    seed: int,
    phase: str,
) -> Params:
    """Trains a new model on supervised batches, and returns its parameters; the arguments are those of `fit`."""
    hosts.check_alone("experiments with a warm start")
    return fit(sft_objective(policy), new_params(policy, seed), batches, config, run, phase=phase).params


def new_params(policy: Policy, seed: int) -> Params:
    """Returns the parameters of a new model, which one compiled program makes."""
    return _new_params(policy, np.uint32(seed))


@partial(jax.jit, static_argnums=0)
def _new_params(policy: Policy, seed: jax.Array) -> Params:
    return policy.init(jax.random.key(seed))


@dataclass(frozen=True)
class WarmOptions:
    """Options of the supervised phase before reinforcement learning."""

    warm_steps: Size = 700
    """Supervised steps before training on rewards."""
    warm_batch: Size = 128
    """Examples of a supervised step."""
    warm_learning_rate: Positive = 2e-3
    """Learning rate of the supervised steps."""


def imitate(
    policy: Policy,
    examples: Callable[..., tuple[Prompts, np.ndarray, np.ndarray]],
    warm: WarmOptions,
    run: RunFolder,
    *,
    seed: int,
    phase: str = "warm",
) -> Params:
    """Trains a new model on one completion of each prompt, and returns its parameters.

    Args:
      policy: The functions of the model.
      examples: (batch_size=N, seed=…, step=…) -> prompts, and ids `[N, T]` and mask `[N, T]` of their completions.
      warm: The steps, batch size and learning rate.
      run: The folder of the run.
      seed: The random seed of the model and of the examples.
      phase: The name of the phase.
    """

    def batch(step: int) -> Batch:
        prompts, ids, mask = examples(batch_size=warm.warm_batch, seed=seed, step=step)
        return completions_batch(prompts, ids[:, None], mask[:, None])

    options = SupervisedConfig(warm.warm_steps, warm.warm_learning_rate)
    return warm_start(policy, batch, options, run, seed=seed, phase=phase)


# ---- seeds


@dataclass(frozen=True)
class Seeds:
    """The number of repetitions of an experiment."""

    num_seeds: Size = 3
    """Runs of each method, with seeds from `seed` on."""

    def starting_at(self, first: int) -> range:
        """Returns the seeds, which count up from the first."""
        return range(first, first + self.num_seeds)


def collect(runs: dict[str, dict[str, list[float]]], results: Mapping[str, Mapping[str, float]]) -> None:
    """Appends the results of one seed, by method and name, to the results of earlier seeds."""
    for method, row in results.items():
        for name, value in row.items():
            runs.setdefault(method, {}).setdefault(name, []).append(value)


def over_seeds(
    runs: Mapping[str, Mapping[str, Sequence[float]]], *, first: str, control: str
) -> dict[str, dict[str, float]]:
    """Summarises results over seeds as rows of a table.

    Args:
      runs: Method -> name of a number -> its value for each seed, with the seeds in the same order.
      first: The name of the number by which methods are compared.
      control: The method that all others are compared with.

    Returns:
      For each method, the mean of each number with its 95% interval over seeds. Rows other than the control's also
      have "difference", the mean difference of `first` to the control with the same seed, with its interval, and
      "wins", the number of seeds in which this difference is above 0.
    """
    rows: dict[str, dict[str, float]] = {}
    for method, numbers in runs.items():
        row: dict[str, float] = {}
        for name, values in numbers.items():
            row |= interval_over_runs(values).named(name)
        if method != control:
            differences = np.subtract(numbers[first], runs[control][first])
            row |= interval_over_runs(differences).named("difference") | {"wins": int((differences > 0).sum())}
        rows[method] = row
    return rows


def save_over_seeds(
    run: RunFolder,
    runs: Mapping[str, Mapping[str, Sequence[float]]],
    rows: Mapping[str, Mapping[str, float]],
    seeds: range,
    curves: plots.Curves,
) -> None:
    """Writes results.json, and curves.png of the phases METHOD_SEED.

    Args:
      run: The folder of the run.
      runs: The results, as in `over_seeds`. The methods "start" and "closed form" have no curves.
      rows: The rows that `over_seeds` returned.
      seeds: The seeds of the runs.
      curves: The metrics to plot, with their titles.
    """
    trained = [method for method in runs if method not in ("start", "closed form")]
    phases = {method: [f"{method}_{seed}" for seed in seeds] for method in trained}
    plots.save_curves(run, curves, phases)
    write_json(run.path / "results.json", {"seeds": list(seeds), "runs": runs, "over_seeds": rows})


def print_groups(run: RunFolder, groups: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table of each group's completions with rewards and advantages; episodes are printed turn by turn."""
    for group in groups:
        table = Table(box=box.SIMPLE_HEAD, title=escape(f"prompt {group['prompt']!r}"), title_justify="left")
        table.add_column("completion", overflow="fold")
        for column in ("tokens", "reward", "advantage"):
            table.add_column(column, justify="right")
        columns = (group[name] for name in ("completions", "lengths", "rewards", "advantages"))
        rows = zip(*columns, strict=False)  # the report warns about damaged lines
        for i, (text, length, reward, advantage) in enumerate(rows):
            earned = "–" if reward is None else f"{reward:.2f}"  # None: the reward does not apply
            compared = "–" if advantage is None else f"{advantage:+.2f}"
            table.add_row(escape(_episode(group, i) or repr(text)), str(length), earned, compared)
        run.console.print(table)


def _episode(group: Mapping[str, Any], i: int) -> str:
    """Returns the turns of completion i, one action or observation per line; "" without an environment.

    The group's "turns" have the turn of each token, negative in observations. A damaged line may lack entries.
    """
    rows = [group.get(name) or [] for name in ("turns", "tokens", "turn_advantages")]
    numbers, tokens, advantages = (row[i] if i < len(row) else [] for row in rows)
    lines = []
    for number, part in groupby(zip(numbers, tokens, strict=False), key=itemgetter(0)):
        text = "".join(token for _, token in part)
        advantage = advantages[number - 1] if 0 < number <= len(advantages) else None
        compared = "" if advantage is None else f"  ({advantage:+.2f})"
        lines.append(f"{number} {text!r}{compared}" if number > 0 else f"  > {text!r}")
    return "\n".join(lines)


def print_last_groups(run: RunFolder, phase: str = "grpo") -> None:
    """Prints the last two groups of a phase."""
    print_groups(run, [line for line in run.lines("rollouts.jsonl") if line["phase"] == phase][-2:])


def print_heldout(
    run: RunFolder,
    title: str,
    rows: Mapping[str, Mapping[str, float]],
    columns: Mapping[str, str],
    further: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Prints a table of held-out results with their intervals.

    Args:
      run: The folder of the run, whose console prints the table.
      title: The title of the table.
      rows: Name of a row -> numbers by name.
      columns: Name of a number -> title of its column.
      further: Rows of text to print below.
    """
    table = {name: [cell(row, column) for column in columns] for name, row in rows.items()}
    report.print_table(run, title, tuple(columns.values()), table | dict(further or {}))


def print_over_seeds(
    run: RunFolder,
    measure: str,
    seeds: range,
    columns: Sequence[str],
    table: Mapping[str, Sequence[Any]],
    *,
    coin: str = "",
) -> None:
    """Prints a table of results over seeds, and explains the row `coin` of the random reward if there is one."""
    which = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}, 95% intervals over seeds"
    report.print_table(run, f"{measure}, {which}", columns, table)
    report.explain_control(run, table, control=coin)
