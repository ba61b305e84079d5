"""Draws curves.png, the main curves of an experiment over its random seeds."""

from collections.abc import Mapping, Sequence

import numpy as np

from grpo_jax.runs.folder import RunFolder

Curves = Sequence[tuple[str, str]]  # metrics to draw, with the titles of their panels


def save_curves(run: RunFolder, curves: Curves, methods: Mapping[str, Sequence[str]]) -> None:
    """Draws curves.png, with a panel for each metric and a line for each method: the mean over the method's phases.

    A band shows the range over the phases. Only steps that all phases have are drawn.

    Args:
      run: The folder of the run, whose metrics.jsonl is drawn.
      curves: Metrics, and the titles of their panels.
      methods: Name of a method -> its phases, one for each seed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lines = run.lines()
    figure, axes = plt.subplots(1, len(curves), figsize=(3.6 * len(curves), 3.2), layout="constrained", squeeze=False)
    for axis, (metric, title) in zip(axes.flat, curves, strict=True):
        for number, (method, phases) in enumerate(methods.items()):
            by_phase = [
                {x["step"]: x[metric] for x in lines if x["phase"] == phase and metric in x} for phase in phases
            ]
            steps = sorted(set.intersection(*map(set, by_phase)))
            values = np.array([[of_phase[step] for of_phase in by_phase] for step in steps]).reshape(-1, len(phases))
            axis.plot(steps, values.mean(1), color=f"C{number}", label=method)
            axis.fill_between(steps, values.min(1), values.max(1), color=f"C{number}", alpha=0.2, linewidth=0)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step", fontsize=9)
        axis.grid(alpha=0.3)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), fontsize=9, loc="outside lower center", ncols=5)
    figure.savefig(run.path / "curves.png", dpi=120)
    plt.close(figure)
