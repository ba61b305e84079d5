"""Figures of the page: claims side by side, curves of learning, and the columns of one table. Black on white."""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from claims.questions import COIN, START, Claim
from claims.verdicts import BANDS, Decision
from grpo_jax.statistics import Interval

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

# Colours that are told apart by the colour-blind, and marks by all.
MARKS: Mapping[str, tuple[str, str]] = {
    "supported": ("#0072b2", "o"),
    "contradicted": ("#d55e00", "s"),
    "no difference that matters": ("#009e73", "D"),
    "undecided": ("0.45", "x"),
}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "0.45")
REACH = {"difference": 0.12, "ratio": math.log(3)}  # of an axis; what lies beyond has an arrow and its number


def save_forest(path: Path, drawn: Sequence[tuple[Claim, Decision]]) -> None:
    """The difference of each claim with its interval, by what it decides; ratios apart, on their own axis.

    The grey band is what does not matter. A hollow mark is the source's own figure. Beside each stands its number.
    """
    panels = [[it for it in drawn if it[0].scale == scale] for scale in ("difference", "ratio")]
    panels = [panel for panel in panels if panel]
    heights = [len(panel) + 1.5 for panel in panels]
    size = (8.5, 1.1 + 0.235 * sum(heights))
    figure, axes = plt.subplots(len(panels), figsize=size, layout="constrained", squeeze=False, height_ratios=heights)
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        _forest(axis, panel)
    handles = [plt.Line2D([], [], color=c, marker=m, linestyle="", label=verdict) for verdict, (c, m) in MARKS.items()]
    handles.append(plt.Line2D([], [], color="0.2", marker="o", fillstyle="none", linestyle="", label="as claimed"))
    handles.append(plt.Line2D([], [], color="0.9", linewidth=8, label="does not matter"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=8, frameon=False)
    _save(figure, path)


def _forest(axis: Any, panel: Sequence[tuple[Claim, Decision]]) -> None:
    scale = panel[0][0].scale
    reach, band, ratio = REACH[scale], BANDS[scale], scale == "ratio"
    axis.axvspan(-band, band, color="0.9", zorder=0)
    axis.axvline(0, color="0.4", linewidth=0.8, zorder=0)
    for place, (claim, decision) in enumerate(reversed(panel)):
        (colour, mark), (mean, low, high) = MARKS[decision.verdict], decision.interval
        if math.isfinite(claim.claimed):
            axis.plot(np.clip(claim.claimed, -reach, reach), place, "o", color="0.2", fillstyle="none", markersize=7)
        if math.isnan(mean):
            continue
        beyond = "<" if mean < -reach else ">" if mean > reach else mark
        axis.plot(np.clip(mean, -reach, reach), place, beyond, color=colour, markersize=5)
        if math.isfinite(low):
            axis.plot(np.clip((low, high), -reach, reach), (place, place), color=colour, linewidth=1.4)
            for end, arrow in ((low, "<"), (high, ">")):
                if abs(end) > reach and beyond == mark:  # the interval continues, and the mean has no arrow
                    axis.plot(np.clip(end, -reach, reach), place, arrow, color=colour, markersize=3.5)
        number = f"× {math.exp(mean):.2f}" if ratio else f"{mean:+z.3f}".replace("-", "−")
        words = f"{number}   n {decision.seeds}"
        axis.text(1.01, place, words, transform=axis.get_yaxis_transform(), fontsize=8, va="center")
    axis.set_xlim(-1.03 * reach, 1.03 * reach)
    if ratio:
        ticks = (1 / 3, 0.5, 1 / 1.1, 1.1, 2, 3)
        axis.set_xticks(np.log(ticks), [f"{tick:.2g}" for tick in ticks], fontsize=8)
    else:
        axis.tick_params(axis="x", labelsize=8)
    axis.set_yticks(range(len(panel)), [it[0].label for it in reversed(panel)], fontsize=8.5)
    axis.set_ylim(-0.7, len(panel) - 0.3)
    words = "ratio" if ratio else "difference (of accuracy, unless named), 95% interval; n: seeds"
    axis.set_xlabel(words, fontsize=8.5)


def save_curves(path: Path, curves: Mapping[str, Sequence[Interval]], steps: int) -> None:
    """Scores over the steps of a run, each point a part of it: means over seeds, their 95% intervals as bands."""
    figure, axis = plt.subplots(figsize=(8.5, 3.4), layout="constrained")
    for (name, of), colour in zip(curves.items(), cycle(COLOURS), strict=False):
        bounds = np.array(of)
        at = (np.arange(len(bounds)) + 0.5) * steps / len(bounds)
        axis.plot(at, bounds[:, 0], color=colour, linewidth=1.4, label=name)
        if np.isfinite(bounds).all():
            low, high = np.clip(bounds[:, 1:].T, 0, 1)
            axis.fill_between(at, low, high, color=colour, alpha=0.2, linewidth=0)
    axis.set_xlabel("steps", fontsize=9)
    axis.set_ylabel("score of completions", fontsize=9)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, frameon=False)
    _save(figure, path)


def save_rows(path: Path, rows: Mapping[str, Mapping[str, Interval]], drawn: Sequence[str]) -> None:
    """Means with their intervals as dots and bars, a panel a column. Controls are lines where they fit, else named."""
    visible = [name for name in rows if name not in (START, COIN)]
    size = (2.2 + 2.6 * len(drawn), 1.2 + min(0.24, 5.5 / len(visible)) * len(visible))
    figure, axes = plt.subplots(1, len(drawn), figsize=size, layout="constrained", squeeze=False, sharey=True)
    for axis, column in zip(axes[0], drawn, strict=True):
        least = -math.inf if any(row[column].mean < 0 for row in rows.values()) else 0.0  # no bar below it
        for place, name in enumerate(reversed(visible)):
            mean, low, high = rows[name][column]
            axis.plot(mean, place, "o", color="black", markersize=4)
            if not math.isnan(low):
                axis.plot((max(low, least), high), (place, place), color="black", linewidth=1.2)
        limits = axis.get_xlim()
        for control, style in ((START, ":"), (COIN, "--")):
            value = rows[control][column].mean if control in rows else math.nan
            if limits[0] < value < limits[1]:
                axis.axvline(value, color="0.5", linestyle=style, linewidth=1, label=control, zorder=0)
            elif not math.isnan(value):
                axis.plot([], [], " ", label=f"{control}: {value:.3g}")
        axis.set_xlim(limits)
        axis.xaxis.set_major_locator(MaxNLocator(4))
        axis.set_yticks(range(len(visible)), reversed(visible), fontsize=8)
        axis.set_ylim(-0.7, len(visible) - 0.3)
        axis.set_xlabel(column, fontsize=9)
        axis.grid(axis="x", alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=1, frameon=False)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
