"""curves.png: which panels, and which lines in them."""

import json

import pytest
from matplotlib import pyplot

from experiments import plots
from grpo_jax.runs.folder import RunFolder


@pytest.fixture
def drawn(monkeypatch):
    """Titles of the panels -> values of the lines in them, once curves are saved."""
    panels: dict[str, list] = {}
    close = pyplot.close

    def read(figure):
        panels.clear()
        panels.update({x.get_title(): [list(y.get_ydata()) for y in x.lines] for x in figure.axes if x.get_visible()})
        close(figure)

    monkeypatch.setattr(pyplot, "close", read)
    return panels


def run_with(path, **phases):
    run = RunFolder(path, {})
    lines = [{"phase": phase, "step": i, **line} for phase, of in phases.items() for i, line in enumerate(of)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_the_three_curves_without_the_coin_and_without_what_never_moves(tmp_path, drawn):
    ours = [{"reward": r, "heldout_avg": r / 2, "kl": 0.0, "entropy": 1 - r, "length_mean": 3.0} for r in (0.0, 0.5)]
    coin = [{"reward": 0.5, "heldout_avg": 0.25, "kl": 0.0, "entropy": e, "length_mean": 3.0} for e in (0.9, 0.8)]
    run = run_with(tmp_path, grpo=ours, control=coin)
    plots.save_curves(run, plots.curves_of(run), ("grpo", "control"))
    assert drawn == {
        "reward (dots: held out)": [[0.0, 0.5], [0.0, 0.25], [0.25, 0.25]],  # of the control the held-out score alone
        "entropy": [[1.0, 0.5], [0.9, 0.8]],
    }
    assert (tmp_path / "curves.png").exists()


def test_each_of_several_rewards_has_a_panel(tmp_path, drawn):
    lines = [{"reward": r, "reward_std": 0.1, "reward_a": 2 * r, "reward_b": -r, "kl": r} for r in (0.0, 0.5)]
    run = run_with(tmp_path, grpo=lines)
    plots.save_curves(run, plots.curves_of(run), ("grpo",))
    values = {"reward": [0.0, 0.5], "reward a": [0.0, 1.0], "reward b": [0.0, -0.5], "kl": [0.0, 0.5]}
    assert drawn == {name: [line] for name, line in values.items()}


def test_a_mean_of_seeds_and_a_run_of_one_step(tmp_path, drawn):
    seeds = {"grpo_0": [{"kl": 0.0}, {"kl": 1.0}], "grpo_1": [{"kl": 1.0}, {"kl": 2.0}]}
    plots.save_curves(run_with(tmp_path / "two", **seeds), (("kl", "KL"),), {"grpo": ["grpo_0", "grpo_1"]})
    assert drawn == {"KL": [[0.5, 1.5]]}
    plots.save_curves(run_with(tmp_path / "one", grpo=[{"kl": 1.0}]), (("kl", "KL"),), ("grpo",))
    assert drawn == {"KL": [[1.0]]}
