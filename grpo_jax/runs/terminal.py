"""The end of a run: a table and a few groups in the terminal, curves.png, results.json, report.html."""

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
from rich import box
from rich.markup import escape
from rich.table import Table

from grpo_jax.runs import report
from grpo_jax.runs.files import write_json
from grpo_jax.runs.folder import RunFolder, is_coin
from grpo_jax.runs.progress import in_words, programs_so_far


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
    """The completions of each group below one another, with rewards and advantages; of episodes their turns."""
    for group in groups:
        table = Table(box=box.SIMPLE_HEAD, title=escape(f"prompt {group['prompt']!r}"), title_justify="left")
        table.add_column("completion", overflow="fold")
        for column in ("tokens", "reward", "advantage"):
            table.add_column(column, justify="right")
        columns = (group[name] for name in ("completions", "lengths", "rewards", "advantages"))
        rows = zip(*columns, strict=False)  # where a line is damaged, the report says so
        for i, (text, length, reward, advantage) in enumerate(rows):
            earned = "–" if reward is None else f"{reward:.2f}"  # none: it does not apply
            compared = "–" if advantage is None else f"{advantage:+.2f}"
            table.add_row(escape(_episode(group, i) or repr(text)), str(length), earned, compared)
        run.console.print(table)


def _episode(group: Mapping[str, Any], i: int) -> str:
    """Returns the turns of completion i, an action or an observation a line; "" where no environment answers.

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


def save_results(
    run: RunFolder,
    rows: Mapping[str, Mapping[str, float]],
    checksum: str,
    curves: Sequence[tuple[str | Sequence[str], str]],
    phases: Sequence[str],
) -> None:
    """Leaves curves.png and results.json, and says the checksum.

    Args:
      run: whose metrics.jsonl is drawn.
      rows: of the final table; may be empty.
      checksum: of the parameters after training.
      curves: (metric or metrics, title) of each panel, such as those of `curves_of`.
      phases: a line for each.
    """
    save_curves(run, curves, phases)
    write_json(run.path / "results.json", {**rows, "params_sha256": checksum})
    run.console.print(f"SHA-256 of the trained parameters: {checksum}", soft_wrap=True)


def say_end(run: RunFolder, started: float) -> None:
    """Leaves report.html, and says where, and what the run took since `started`."""
    page = report.write_report(run.path)
    run.console.print(f"{in_words(programs_so_far())}, {time.perf_counter() - started:.0f} s")
    run.console.print(f"report: {page}", markup=False, highlight=False, soft_wrap=True)


def explain_control(run: RunFolder, names: Iterable[str], *, control: str = "control") -> None:
    """Prints what the control's line of a table is, if it has one."""
    if control in names:
        run.console.print(
            f"{control}: same start, prompts and steps, but the reward is a coin toss. Its changes are not learning.",
            soft_wrap=True,
        )


def finish(
    run: RunFolder,
    rows: Mapping[str, Mapping[str, float]],
    checksum: str,
    curves: Sequence[tuple[str, str]],
    started: float,
    *,
    phases: Sequence[str] = ("grpo", "control"),
) -> None:
    """Leaves curves.png, results.json and report.html of a run with rewards; of several hosts the first does.

    Args:
      run: of the experiment.
      rows: of `train_with_control`; may be empty.
      checksum: of the parameters after training.
      curves: (metric, title) besides the three curves to watch, as for `curves_of`.
      started: by `time.perf_counter`.
      phases: a line of curves.png for each.
    """
    if not run.writes:
        return
    explain_control(run, rows)
    save_results(run, rows, checksum, curves_of(run, curves), phases)
    say_end(run, started)


Steps = dict[int, list[float]]  # a value of each phase of a line
_STYLES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
# The curves to watch: (metrics of one panel, title). Dots are of held-out prompts.
THREE_CURVES = (
    (("reward", "heldout_avg"), "reward (dots: held out)"),
    (("kl",), "KL to the start, nats a token"),
    (("entropy",), "entropy, nats a token"),
)

# Further panels of methods that learn from rewards. One without a line is left out: the second needs a teacher, the
# third a critic.
METHOD_CURVES = (
    ("length_mean", "tokens"),
    ("distillation", "divergence from the teacher, nats a token"),
    ("explained_variance", "variance of returns that the critic explains"),
)


def curves_of(run: RunFolder, further: Sequence[tuple[str, str]] = ()) -> list[tuple[tuple[str, ...], str]]:
    """Panels of a run: the three curves to watch, each of several rewards by itself, and further ones.

    Args:
      run: whose metrics.jsonl has them.
      further: (metric, title); of one of the three, or of a reward, it is a title of its own.
    """
    titles = dict(further)
    names = dict.fromkeys(name for line in run.lines() for name in line)
    rewards = [name for name in names if name.startswith("reward_") and not name.endswith("_std")]
    panels = [(metrics, titles.get(metrics[0], title)) for metrics, title in THREE_CURVES]
    heldout = {name: f"heldout_{name}" for name in rewards}
    several = [((name, heldout[name]), titles.get(name, name.replace("_", " ", 1))) for name in rewards]
    titled = {metric for metrics, _ in (*panels, *several) for metric in metrics}
    others = [((metric,), title) for metric, title in further if metric not in titled]
    return [panels[0], *several, *panels[1:], *others]


def save_curves(
    run: RunFolder,
    curves: Sequence[tuple[str | Sequence[str], str]],
    phases: Sequence[str] | Mapping[str, Sequence[str]],
) -> None:
    """curves.png: one panel a metric, one line a phase, or a mean of phases in a band from the least to the largest.

    A panel in which nothing ever moves is left out, and so is the reward of a coin toss.

    Args:
      run: whose metrics.jsonl is drawn.
      curves: (metric, or two of which the second is drawn as dots; title of the panel).
      phases: a line for each that has the metric; or the name of a line, and the phases that it is the mean of.
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
            if dots:  # in front of the line, and told apart from it
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
    """The values of a metric by step, where all phases have one."""
    steps: Steps = {}
    for line in lines:
        if line["phase"] in phases and line.get(metric) is not None:
            steps.setdefault(line["step"], []).append(line[metric])
    return {step: values for step, values in sorted(steps.items()) if len(values) == len(phases)}


def _moves(steps: Steps) -> bool:
    """Returns whether values differ by more than rounding."""
    values = np.array(list(steps.values()))
    return len(values) == 1 or bool(np.ptp(values) > 1e-6 * max(1e-6, np.abs(values).max()))
