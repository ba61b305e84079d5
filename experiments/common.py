"""What the experiments share: small models of our own, and the numbers of several seeds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from grpo_jax import hosts
from grpo_jax.data.packing import Packed
from grpo_jax.data.types import Prompts
from grpo_jax.errors import UsageError
from grpo_jax.fit import fit
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.huggingface import save_description
from grpo_jax.models.policy import Policy
from grpo_jax.models.transformer import Params
from grpo_jax.offline.phase import SupervisedConfig
from grpo_jax.offline.sft import sft_objective
from grpo_jax.rl.types import Batch
from grpo_jax.runs import terminal
from grpo_jax.runs.folder import RunFolder
from grpo_jax.statistics import interval_over_runs
from grpo_jax.tasks.characters import Characters

# ---- small models of our own


def keep_model(run: RunFolder, config: ModelConfig, text: Characters) -> Path:
    """Writes a model's configuration and its tokenizer of characters, and returns their folder, `model` in the run."""
    folder = run.path / "model"
    save_description(folder, config)
    text.save_tokenizer(folder)
    return folder


def completions_batch(prompts: Prompts, ids: np.ndarray, mask: np.ndarray) -> Batch:
    """One completion of each prompt, for supervised training.

    Args:
      prompts: N.
      ids: int32 `[N, 1, T]`.
      mask: bool `[N, 1, T]`.
    """
    return Batch(prompts.ids, prompts.mask, ids, mask, np.ones(ids.shape[:2], np.float32))


def warm_start(
    policy: Policy,
    batches: Callable[[int], Batch | Packed],
    config: SupervisedConfig,
    run: RunFolder,
    *,
    seed: int,
    phase: str,
) -> Params:
    """The parameters of a new model after supervised training; the arguments are those of `fit`."""
    hosts.check_alone("experiments with a warm start")
    return fit(sft_objective(policy), new_params(policy, seed), batches, config, run, phase=phase).params


def new_params(policy: Policy, seed: int) -> Params:
    """The parameters of a new model, made by one program."""
    return _new_params(policy, np.uint32(seed))


@partial(jax.jit, static_argnums=0)
def _new_params(policy: Policy, seed: jax.Array) -> Params:
    return policy.init(jax.random.key(seed))


# ---- costs


def forward_flops(params: Any, tokens: int) -> float:
    """Counts the operations of a forward pass over some tokens, without those of attention: 2 a parameter and token."""
    return 2.0 * float(tokens) * sum(leaf.size for leaf in jax.tree.leaves(params))


def held_bytes(*trees: Any) -> int:
    """Counts the bytes of all arrays in some trees. An array that is in several of them counts once."""
    return sum({id(leaf): leaf.nbytes for leaf in jax.tree.leaves(trees)}.values())


# ---- seeds


@dataclass(frozen=True)
class Seeds:
    """How often an experiment is repeated."""

    num_seeds: int = 3
    """Runs of each method, with seeds from `seed` on."""


def seeds_of(first: int, seeds: Seeds) -> range:
    """The seeds of an experiment, from the first on.

    Raises:
      UsageError: there are none.
    """
    if seeds.num_seeds < 1:
        raise UsageError(f"num_seeds is {seeds.num_seeds}: it must be at least 1")
    return range(first, first + seeds.num_seeds)


def collect(runs: dict[str, dict[str, list[float]]], found: Mapping[str, Mapping[str, float]]) -> None:
    """Adds the numbers of one seed, by method and name, to those of the seeds before it."""
    for method, row in found.items():
        for name, value in row.items():
            runs.setdefault(method, {}).setdefault(name, []).append(value)


def over_seeds(
    runs: Mapping[str, Mapping[str, Sequence[float]]], *, first: str, control: str
) -> dict[str, dict[str, float]]:
    """Numbers of runs with several seeds, as rows of a table.

    Args:
      runs: method -> number -> its value in the run of each seed, in one order of seeds.
      first: the number that methods are compared by.
      control: the method that the others are compared with.

    Returns:
      For each method the mean of each number with its 95% interval over seeds; and but for the control "difference",
      the mean of `first` minus that of the control with the same seed, likewise, and "wins", the seeds where it is
      above 0.
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


def print_over_seeds(
    run: RunFolder, measure: str, seeds: range, columns: Sequence[str], table: Mapping[str, Sequence[Any]]
) -> None:
    """Prints a table of what was measured with each seed: `columns` of each row."""
    which = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}, 95% intervals over seeds"
    terminal.print_table(run, f"{measure}, {which}", columns, table)
