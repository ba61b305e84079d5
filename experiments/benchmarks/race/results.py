"""The results of a race: held-out rewards of snapshots, summaries over seeds, a table and a figure."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from experiments.benchmarks.peers.recorder import LINES, snapshot_folder
from experiments.benchmarks.race.races import ENTRANTS, RACES, race_config, race_task
from grpo_jax.models.files.weights import load_params
from grpo_jax.models.huggingface import load_pretrained
from grpo_jax.models.policy import decoder_policy
from grpo_jax.rl.evaluate import evaluate, sample_heldout
from grpo_jax.rl.source import make_sampler
from grpo_jax.runs.files import read_lines

SHARES = (0.5, 0.9)  # of the final reward
CLOCKS = ("seconds", "cpu_seconds")
Point = dict[str, float]  # step, samples, seconds, cpu_seconds, reward
Entry = dict[str, Any]  # the results of one process

# ---- one process


def heldout_reward(name: str, model: Path, data: str = "") -> Callable[[Path], float]:
    """Returns a function of a folder with weights: their mean reward on held-out prompts, with the same noise for all.

    Args:
      name: The name of the race.
      model: The folder of the initial model, with configuration and tokenizer.
      data: The folder of the race's rows.
    """
    pretrained, config = load_pretrained(model), race_config(RACES[name], steps=1, seed=0)
    task, policy = race_task(name, pretrained, 0, data), decoder_policy(pretrained.config)
    sampler = make_sampler(policy, task, config.sampling)

    @cache
    def reward(folder: Path) -> float:
        params = load_params(folder, pretrained.config)
        return float(evaluate(sample_heldout(sampler, params, task, config), task).rewards.mean())

    return reward


def entry_of(folder: Path, model: Path, learning_rate: float, reward: Callable[[Path], float]) -> Entry:
    """Returns the results of a process from its lines and snapshots.

    Args:
      folder: The folder of the process.
      model: The folder of the initial model.
      learning_rate: The learning rate of the race.
      reward: The function that `heldout_reward` returned.
    """
    lines = read_lines(folder / LINES, {})
    merged = {key: value for line in lines for key, value in line.items() if key in ("versions", "cached_programs")}
    snapshots = [line for line in lines if "snapshot" in line]
    times = ("samples", "seconds", "cpu_seconds")
    curve = [
        {"step": line["snapshot"], "reward": reward(snapshot_folder(folder, line["snapshot"]))}
        | {key: line[key] for key in times}
        for line in snapshots
    ]
    start = {"step": 0, "reward": reward(model)}
    # The initial policy stays until the first update.
    curve = [start | dict.fromkeys(times, 0), curve[0] | start, *curve]
    return merged | {
        "curve": curve,
        "peak_mb": snapshots[-1]["peak_mb"],
        "step_seconds": step_seconds([line["seconds"] for line in lines if "step" in line]),
        "first_change": largest_change(model, snapshot_folder(folder, 1)) / learning_rate,
        "logprobs": lines[-1]["logprobs"],
        "rollout_rewards": [line["reward"] for line in lines if "step" in line],
    }


def step_seconds(graded: Sequence[float]) -> float:
    """Returns the median seconds of a step after the first two, from the times at which rollouts were graded."""
    return statistics.median(np.diff(graded[2:] if len(graded) > 3 else graded))


def largest_change(before: Path, after: Path) -> float:
    """Returns the largest change of a parameter between two folders of weights."""
    from safetensors.numpy import load_file

    old, new = (load_file(folder / "model.safetensors") for folder in (before, after))
    return max(float(np.abs(new[name] - old[name]).max()) for name in old.keys() & new.keys())


def time_to(curve: Sequence[Point], level: float, clock: str = "seconds") -> float | None:
    """Returns the time at which a curve first reaches a level, interpolated between its points; None: never.

    Args:
      curve: The points in order.
      level: The reward to reach.
      clock: The field of the time: "seconds" or "cpu_seconds".
    """
    for before, after in pairwise(curve):
        if after["reward"] >= level:
            rise = after["reward"] - before["reward"]
            share = 0.0 if before["reward"] >= level else (level - before["reward"]) / rise
            return before[clock] + share * (after[clock] - before[clock])
    return None


# ---- all seeds


def summaries(entries: Mapping[str, Sequence[Entry]]) -> dict[str, Any]:
    """Summarises the seeds of each entrant.

    Args:
      entries: Name of an entrant -> its results, one for each seed.

    Returns:
      "final": the mean final reward of all, of which `SHARES` are the levels; "log_probability_difference": the largest
      between two libraries; and "entrants": name -> medians over seeds, and the mean final reward. Times to a level
      are None if a seed never reached it.
    """
    final = statistics.mean(entry["curve"][-1]["reward"] for seeds in entries.values() for entry in seeds)
    probes = np.array([seeds[0]["logprobs"] for seeds in entries.values()])
    entrants = {}
    for name, seeds in entries.items():
        reached = {
            f"{clock}_to_{share}": [time_to(entry["curve"], share * final, clock) for entry in seeds]
            for clock in CLOCKS
            for share in SHARES
        }
        rewards = [entry["curve"][-1]["reward"] for entry in seeds]
        entrants[name] = {
            "reward": statistics.mean(rewards),
            "reward_range": [min(rewards), max(rewards)],
            **{key: _median_if_all(times) for key, times in reached.items()},
            **{key: statistics.median(e["curve"][-1][key] for e in seeds) for key in CLOCKS},
            **{key: statistics.median(e[key] for e in seeds) for key in ("step_seconds", "peak_mb", "first_change")},
        }
    return {"final": final, "log_probability_difference": float(np.ptp(probes, axis=0).max()), "entrants": entrants}


def _median_if_all(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return statistics.median(numbers) if len(numbers) == len(values) else None


def drawn_entrants(summary: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the entrants to draw: all of this library, and the fastest of each peer."""
    fastest: dict[str, str] = {}
    for name in sorted(summary, key=lambda name: summary[name]["seconds"], reverse=True):
        fastest[ENTRANTS[name].library] = name
    return [name for name in summary if ENTRANTS[name].library == "own" or name in fastest.values()]


def table(results: Mapping[str, Any]) -> Table:
    """Returns a table with a row for each entrant."""
    titles = {
        "reward": "final reward",
        **{f"seconds_to_{share}": f"s to {share:g}" for share in SHARES},
        "cpu_seconds_to_0.9": "CPU s to 0.9",
        "seconds": "s",
        "cpu_seconds": "CPU s",
        "step_seconds": "s a step",
        "peak_mb": "peak MB",
        "first_change": "first change ÷ rate",
    }
    visible = Table("", *titles.values())
    for name, row in results["entrants"].items():
        visible.add_row(name, *("never" if row[key] is None else f"{row[key]:.3g}" for key in titles))
    return visible


def save_figure(file: Path, title: str, curves: Mapping[str, Sequence[Sequence[Point]]]) -> None:
    """Draws held-out reward over seconds and over samples: the mean over seeds, and a band for their range.

    Args:
      file: The SVG or PNG to write.
      title: The title of the figure.
      curves: Name of an entrant -> its curves, one for each seed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained", sharey=True)
    for axis, (key, label) in zip(axes, (("seconds", "seconds"), ("samples", "completions")), strict=True):
        for number, (name, seeds) in enumerate(curves.items()):
            x = np.mean([[point[key] for point in curve] for curve in seeds], axis=0)
            rewards = np.array([[point["reward"] for point in curve] for curve in seeds])
            axis.plot(x, rewards.mean(0), color=f"C{number}", label=name)
            axis.fill_between(x, rewards.min(0), rewards.max(0), color=f"C{number}", alpha=0.2, linewidth=0)
        axis.set_xlabel(label, fontsize=9)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out reward", fontsize=9)
    figure.suptitle(title, fontsize=10)
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=9, loc="outside lower center", ncols=4)
    figure.savefig(file, dpi=120)
    plt.close(figure)
