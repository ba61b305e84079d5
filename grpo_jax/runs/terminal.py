"""What a run shows at its end: in the terminal a table and a few groups; curves.png."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.markup import escape
from rich.table import Table

from grpo_jax.runs.folder import RunFolder
from grpo_jax.statistics import hypervolume, pareto_front


def print_table(run: RunFolder, title: str, columns: Sequence[str], rows: Mapping[str, Sequence[Any]]) -> None:
    """A table with a name at the left of each row; floats get three digits."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for name, values in rows.items():
        table.add_row(name, *(f"{value:.3f}" if isinstance(value, float) else str(value) for value in values))
    run.console.print(table)


def print_groups(run: RunFolder, groups: Sequence[Mapping[str, Any]]) -> None:
    """The completions of each group below one another, with rewards and advantages."""
    for group in groups:
        table = Table(box=box.SIMPLE_HEAD, title=escape(f"prompt {group['prompt']!r}"), title_justify="left")
        table.add_column("completion", overflow="fold")
        for column in ("tokens", "reward", "advantage"):
            table.add_column(column, justify="right")
        rows = zip(group["completions"], group["lengths"], group["rewards"], group["advantages"], strict=True)
        for text, length, reward, advantage in rows:
            earned = "–" if reward is None else f"{reward:.2f}"  # none: it does not apply
            table.add_row(escape(repr(text)), str(length), earned, f"{advantage:+.2f}")
        run.console.print(table)


def save_curves(
    run: RunFolder, curves: Sequence[tuple[str, str]], phases: Sequence[str] | Mapping[str, Sequence[str]]
) -> None:
    """curves.png: one panel a metric, one line a phase, or a mean of phases in a band from the least to the largest.

    Args:
      run: whose metrics.jsonl is drawn.
      curves: (metric, title of its panel).
      phases: a line for each that has the metric; or the name of a line, and the phases that it is the mean of.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lines = run.lines()
    named = phases if isinstance(phases, Mapping) else {phase: [phase] for phase in phases}
    figure, axes = plt.subplots(1, len(curves), figsize=(4 * len(curves), 3), layout="constrained", squeeze=False)
    for axis, (metric, title) in zip(axes[0], curves, strict=True):
        for (name, parts), style in zip(named.items(), ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1))), strict=False):
            steps: dict[int, list[float]] = {}
            for line in lines:
                if line["phase"] in parts and line.get(metric) is not None:
                    steps.setdefault(line["step"], []).append(line[metric])
            steps = {step: values for step, values in sorted(steps.items()) if len(values) == len(parts)}
            if not steps:
                continue
            values = np.array(list(steps.values()))
            (drawn,) = axis.plot(list(steps), values.mean(1), linestyle=style, label=name, linewidth=1.5)
            if len(parts) > 1:
                axis.fill_between(
                    list(steps), values.min(1), values.max(1), alpha=0.2, color=drawn.get_color(), linewidth=0
                )
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=8)
    figure.savefig(run.path / "curves.png", dpi=120)
    plt.close(figure)


def save_front(
    run: RunFolder,
    points: Mapping[str, Mapping[str, tuple[float, float]]],
    marks: Mapping[str, tuple[float, float]],
    names: Sequence[str],
) -> None:
    """front.png: pairs of scores in [0, 1], and the Pareto front of each method. It is readable without colours.

    Args:
      run: where it goes.
      points: method -> what is written beside a point -> the point; up to three methods.
      marks: name -> a point beside them, such as the start.
      names: of both scores.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 6.5), layout="constrained")
    # From the largest marker to the smallest, with the words on other sides, so that points in one place stay apart.
    styles = (("s", "white", "-", 11, (0, 14)), ("o", "0.7", "--", 8, (0, -17)), ("^", "black", ":", 5, (10, 0)))
    for (method, found), (marker, fill, line, size, offset) in zip(points.items(), styles, strict=False):
        front = pareto_front(list(found.values()))
        axis.plot(*zip(*front, strict=True), color="black", linestyle=line, linewidth=1)
        axis.plot(
            *zip(*found.values(), strict=True),
            marker,
            color="black",
            markerfacecolor=fill,
            markersize=size,
            label=f"{method}: {hypervolume(front):.2f} of the square",
        )
        places: dict[tuple[float, float], list[str]] = {}
        for label, point in found.items():
            near = (place for place in places if math.dist(place, point) < 0.04)
            places.setdefault(next(near, point), []).append(label)
        for place, labels in places.items():
            words, align = ", ".join(labels), "left" if offset[0] else "center"
            axis.annotate(words, place, xytext=offset, textcoords="offset points", fontsize=7, ha=align, va="center")
    for (name, point), marker in zip(marks.items(), ("x", "+", "*"), strict=False):
        axis.plot(*point, marker, color="black", label=name)
    axis.set(xlim=(0, 1.08), ylim=(0, 1.08), xlabel=names[0], ylabel=names[1])
    axis.grid(alpha=0.3)
    figure.legend(fontsize=8, loc="outside lower center", ncols=2)
    figure.savefig(run.path / "front.png", dpi=120)
    plt.close(figure)
