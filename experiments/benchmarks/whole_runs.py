"""Measures what it saves to run the runs of an ablation as one program.

Twelve runs of GRPO on additions (four learning rates, three seeds) from known starts, in five ways: as processes one
after another, by the ordinary loop in one process, as whole runs one after another, and all in one call, either by
`lax.map` spread over a virtual device for each core or side by side (`vmap`). Each way is a process of its own, timed
from its start to its end with all compilation. The ways take turns, and the table has medians over the rounds. Expect
one call to be several times faster than processes and the ordinary loop, and on two cores a little faster than whole
runs one after another. About twenty minutes.

  python -m experiments.benchmarks.whole_runs
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.claims.bench import cores
from experiments.claims.testbeds import ARITHMETIC
from experiments.tasks import arithmetic
from experiments.whole_run import by_prompt, compile_runs, heldout_of, prompts_of, whole_run
from grpo_jax.config import GRPOConfig, recipe, with_options
from grpo_jax.models.policy import decoder_policy
from grpo_jax.rl.grpo import make_programs
from grpo_jax.runs.folder import RunFolder
from grpo_jax.train import learn

RUNS = list(product((1e-4, 2e-4, 4e-4, 8e-4), (0, 1, 2)))  # learning rate, seed
HELDOUT = 500
POLICY = decoder_policy(ARITHMETIC.model)
Way = Literal["processes", "ordinary loop", "whole runs", "one call", "side by side"]
WAYS: tuple[Way, ...] = ("processes", "ordinary loop", "whole runs", "one call", "side by side")


@dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    steps: int = 100
    """Steps of a run."""
    rounds: int = 3
    """How often each way takes its turn."""
    warm_steps: int = 700
    """Supervised steps of the starts, which are not timed."""
    ways: tuple[Way, ...] = WAYS
    """Which ways."""


def main(config: Config) -> None:
    """Times the ways in turns, and compares what they came to."""
    console, seconds, results = Console(), dict[str, list[float]](), dict[str, np.ndarray]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_starts(config, folder)
        for _, way in track(list(product(range(config.rounds), config.ways)), "ways", console=console):
            began = time.perf_counter()
            runs = [[run] for run in range(len(RUNS))] if way == "processes" else [list(range(len(RUNS)))]
            parts = [in_process(config, way, chosen, folder) for chosen in runs]
            seconds.setdefault(way, []).append(time.perf_counter() - began)
            results[way] = np.concatenate(parts)
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    first = config.ways[0]
    table = Table(
        title=f"{len(RUNS)} runs of {config.steps} steps, {config.rounds} rounds, load {os.getloadavg()[0]:.1f}"
    )
    for column in ("", "seconds", f"{first} takes", "accuracy differs by"):
        table.add_column(column)
    for name, median in medians.items():
        difference = np.abs(results[name] - results[first]).max()
        table.add_row(name, f"{median:.1f}", f"{medians[first] / median:.2f} x", f"{difference:.4f}")
    console.print(table)


def make_starts(config: Config, folder: Path) -> None:
    """A file of parameters for each seed."""
    run = RunFolder(folder / "starts", {})
    for seed in sorted({seed for _, seed in RUNS}):
        leaves = jax.tree.leaves(ARITHMETIC.start(seed, config.warm_steps, run))
        np.savez(folder / f"{seed}.npz", *leaves)


def in_process(config: Config, way: Way, runs: list[int], folder: Path) -> np.ndarray:
    """Held-out accuracies of some runs, by a process of their own."""
    inputs = json.dumps([config.steps, way, runs, str(folder)])
    subprocess.run([sys.executable, "-m", "experiments.benchmarks.whole_runs", "--child", inputs], check=True)
    return np.load(folder / "accuracies.npy")


def child(steps: int, way: Way, runs: list[int], folder: str) -> None:
    """Does some runs in one way, and leaves their accuracies."""
    if way == "one call":
        jax.config.update("jax_num_cpu_devices", cores())
    accuracies = WAYS_TO_RUN[way](runs, config_of(steps), Path(folder))
    np.save(Path(folder) / "accuracies.npy", accuracies)


def config_of(steps: int) -> GRPOConfig:
    """The parts that all runs share."""
    return recipe(
        steps=steps,
        num_prompts=32,
        max_tokens=arithmetic.MAX_TOKENS,
        learning_rate=RUNS[0][0],
        kl_coef=0.0,
        eval_samples=1,
        checkpoint_every=0,
        rollouts_every=0,
    )


def start(folder: Path, seed: int) -> Any:
    """The parameters of a file."""
    leaves = list(np.load(folder / f"{seed}.npz").values())
    return jax.tree.unflatten(jax.tree.structure(jax.eval_shape(POLICY.init, jax.random.key(0))), leaves)


def by_loop(runs: list[int], config: GRPOConfig, folder: Path) -> np.ndarray:
    """The ordinary loop; a learning rate is part of its programs."""
    accuracies = []
    for rate, seed in (RUNS[run] for run in runs):
        separate = with_options(config, learning_rate=rate, seed=seed)
        task = ARITHMETIC.task(num_prompts=separate.sampling.num_prompts, seed=seed, heldout=HELDOUT).task
        with tempfile.TemporaryDirectory() as place:
            run = RunFolder(Path(place) / "run", {}, console=Console(quiet=True))
            programs = make_programs(POLICY, task, separate)
            _, held = learn({"policy": start(folder, seed)}, task, separate, run, programs, phase="grpo")
        accuracies.append(held.evaluation.scores.mean())
    return np.array(accuracies)


def by_whole_runs(
    runs: list[int], config: GRPOConfig, folder: Path, *, side_by_side: bool = False, together: bool = True
) -> np.ndarray:
    """Whole runs: all in one call, or each in a call."""
    tasks = {
        seed: ARITHMETIC.task(num_prompts=config.sampling.num_prompts, seed=seed, heldout=HELDOUT) for _, seed in RUNS
    }
    run, heldout = whole_run(POLICY, tasks[0], config), heldout_of(tasks[0], config)
    devices = math.gcd(len(runs), jax.local_device_count()) if together else 1
    run_all = compile_runs(run, side_by_side=side_by_side, devices=devices)
    accuracies = []
    for several in [runs] if together else [[run] for run in runs]:
        rates, seeds = zip(*(RUNS[run] for run in several), strict=True)
        params = jax.tree.map(lambda *x: np.stack(x), *({"policy": start(folder, seed)} for seed in seeds))
        prompts = jax.tree.map(lambda *x: np.stack(x), *(prompts_of(tasks[seed], config.steps) for seed in seeds))
        history = run_all(params, prompts, heldout, seeds, {"learning_rate": np.array(rates, np.float32)})
        accuracies += [by_prompt(heldout, scores)[-1, :, :-1].mean() for scores in np.asarray(history.heldout)]
    return np.array(accuracies)


WAYS_TO_RUN: dict[Way, Callable[[list[int], GRPOConfig, Path], np.ndarray]] = {
    "processes": by_loop,
    "ordinary loop": by_loop,
    "whole runs": lambda *inputs: by_whole_runs(*inputs, together=False),
    "one call": by_whole_runs,
    "side by side": lambda *inputs: by_whole_runs(*inputs, side_by_side=True),
}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*json.loads(sys.argv[2]))
    else:
        main(tyro.cli(Config, prog="python -m experiments.benchmarks.whole_runs", description=__doc__))
