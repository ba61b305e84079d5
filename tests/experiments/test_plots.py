"""Checks the panels and lines of curves.png."""

import json

from matplotlib import pyplot

from experiments import plots
from grpo_jax.runs.folder import RunFolder


def test_a_panel_has_the_mean_of_each_method_at_the_steps_that_all_seeds_have(tmp_path, monkeypatch):
    panels, close = {}, pyplot.close

    def read(figure):
        panels.update({axis.get_title(): [y.get_xydata().tolist() for y in axis.lines] for axis in figure.axes})
        close(figure)

    monkeypatch.setattr(pyplot, "close", read)
    run = RunFolder(tmp_path, {})
    kls = {"grpo_0": [0.0, 1.0, 5.0], "grpo_1": [1.0, 2.0], "coin_0": [3.0], "coin_1": [5.0]}
    lines = [{"phase": phase, "step": i, "kl": kl} for phase, of in kls.items() for i, kl in enumerate(of)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    methods = {"grpo": ["grpo_0", "grpo_1"], "coin": ["coin_0", "coin_1"]}
    plots.save_curves(run, (("kl", "KL"), ("missing", "none")), methods)
    assert panels == {"KL": [[[0, 0.5], [1, 1.5]], [[0, 4.0]]], "none": [[], []]}
    assert (tmp_path / "curves.png").stat().st_size
