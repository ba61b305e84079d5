"""What a run shows at its end: in the terminal a table and a few groups; curves.png."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from grpo_jax.training.run import RunFolder


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


def save_curves(run: RunFolder, curves: Sequence[tuple[str, str]], phases: Sequence[str]) -> None:
    """curves.png: one panel a metric, one line a phase.

    Args:
      run: whose metrics.jsonl is drawn.
      curves: (metric, title of its panel).
      phases: a line for each that has the metric.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lines = run.lines()
    figure, axes = plt.subplots(1, len(curves), figsize=(4 * len(curves), 3), layout="constrained", squeeze=False)
    for axis, (metric, title) in zip(axes[0], curves, strict=True):
        for phase, style in zip(phases, ("-", "--", ":", "-."), strict=False):
            points = [(line["step"], line[metric]) for line in lines if line["phase"] == phase and metric in line]
            if points:
                axis.plot(*zip(*points, strict=True), style, label=phase, linewidth=1.5)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=8)
    figure.savefig(run.path / "curves.png", dpi=120)
    plt.close(figure)
