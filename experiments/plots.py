"""Draws curves.png, the main curves of an experiment over seeds."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpo_jax.runs.folder import RunFolder, is_coin

Steps = dict[int, list[float]]  # step -> a value for each phase of a curve
_STYLES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
# Metrics to plot after the reward and its components, or after the loss if there is no reward.
_WATCHED = [
    *("nll", "accuracy", "margin", "log_ratio_chosen", "log_ratio_desirable", "log_ratio_undesirable"),
    *("kl", "entropy", "length_mean", "turns_mean", "distillation", "explained_variance"),
]


def curves_of(run: RunFolder) -> list[tuple[tuple[str, str], str]]:
    """Returns the panels of a run, for `save_curves`: metrics to watch, with their held-out values as dots."""
    names = dict.fromkeys(name for line in run.lines() for name in line)
    components = [name for name in names if name.startswith("reward_") and not name.endswith("_std")]
    panels = []
    for name in ("reward", *components, *_WATCHED) if "reward" in names else ("loss", *_WATCHED):
        heldout = "heldout_avg" if name == "reward" else f"heldout_{name}"
        dots = " (dots: held out)" if heldout in names else ""
        panels += [((name, heldout), name.replace("_", " ") + dots)] if {name, heldout} & names.keys() else []
    return panels


def save_curves(
    run: RunFolder,
    curves: Sequence[tuple[str | Sequence[str], str]],
    phases: Sequence[str] | Mapping[str, Sequence[str]],
) -> None:
    """Draws curves.png, with a panel for each metric and a curve for each phase, or for the mean of several phases.

    A band shows the range of several phases. Panels of constant curves and the reward of a coin toss are left out.

    Args:
      run: The folder of the run, whose metrics.jsonl is drawn.
      curves: (metric, or two metrics of which the second is drawn as dots; title of the panel).
      phases: The phases, one curve each; or name of a curve -> the phases to average.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lines = run.lines()
    named = phases if isinstance(phases, Mapping) else {phase: [phase] for phase in phases}
    panels = []
    for metrics, title in curves:
        metrics = (metrics,) if isinstance(metrics, str) else tuple(metrics)
        drawn = {
            (name, metric): steps
            for metric in metrics
            for name, parts in named.items()
            if not (metric == "reward" and is_coin(name)) and (steps := _steps(lines, parts, metric))
        }
        panels.append((title, metrics, drawn))
    moving = [panel for panel in panels if any(_moves(steps) for steps in panel[2].values())]
    panels = moving or panels[:1]
    high = -(-len(panels) // 4)
    wide = -(-len(panels) // high)
    size = (3.6 * wide, 2.8 * high + 0.4)
    figure, axes = plt.subplots(high, wide, figsize=size, layout="constrained", squeeze=False)
    keys: dict[str, Any] = {}
    for axis, (title, metrics, drawn) in zip(axes.flat, panels, strict=False):
        for (name, metric), steps in drawn.items():
            place, values = list(named).index(name), np.array(list(steps.values()))
            color, dots = f"C{place % 10}", metric != metrics[0]
            look: dict[str, Any] = {"linestyle": _STYLES[place % len(_STYLES)], "linewidth": 1.3, "color": color}
            if dots:  # in front of the line
                look |= {"linestyle": "none", "marker": "o", "markersize": 6, "markeredgecolor": "white", "zorder": 3}
            (line,) = axis.plot(list(steps), values.mean(1), **look)
            if not dots or name not in keys:
                keys[name] = line
            if values.shape[1] > 1:
                band = {"alpha": 0.2, "color": color, "linewidth": 0}
                axis.fill_between(list(steps), values.min(1), values.max(1), **band)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    if keys:
        ordered = {name: keys[name] for name in named if name in keys}
        figure.legend(ordered.values(), ordered, fontsize=9, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(run.path / "curves.png", dpi=120)
    plt.close(figure)


def _steps(lines: Sequence[Mapping[str, Any]], phases: Sequence[str], metric: str) -> Steps:
    """Returns the values of a metric by step, for steps at which all phases have a value."""
    steps: Steps = {}
    for line in lines:
        if line["phase"] in phases and line.get(metric) is not None:
            steps.setdefault(line["step"], []).append(line[metric])
    return {step: values for step, values in sorted(steps.items()) if len(values) == len(phases)}


def _moves(steps: Steps) -> bool:
    """Returns whether values differ by more than rounding."""
    values = np.array(list(steps.values()))
    return len(values) == 1 or bool(np.ptp(values) > 1e-6 * max(1e-6, np.abs(values).max()))
