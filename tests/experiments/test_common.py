"""What experiments make of runs with several seeds, and what they say of the control."""

import io
import math

import pytest
from rich.console import Console

from experiments import online_preference
from experiments.common import over_seeds
from grpo_jax.runs.folder import RunFolder
from grpo_jax.runs.report import explain_control
from grpo_jax.statistics import interval_over_runs


def test_the_interval_of_runs_is_students():
    # mean 2, standard deviation 1, t of two degrees of freedom at 97.5% is 4.3027
    margin = 4.3027 / math.sqrt(3)
    assert interval_over_runs([1.0, 2.0, 3.0]) == pytest.approx((2, 2 - margin, 2 + margin), abs=1e-4)
    assert interval_over_runs([5.0]).mean == 5
    assert math.isnan(interval_over_runs([5.0]).low)


def test_methods_are_compared_seed_by_seed():
    runs = {"ours": {"gold": [3.0, 5.0], "length": [1.0, 1.0]}, "control": {"gold": [2.0, 6.0], "length": [2.0, 4.0]}}
    rows = over_seeds(runs, first="gold", control="control")
    assert rows["ours"]["gold"] == 4
    assert rows["ours"]["difference"] == 0
    assert rows["ours"]["wins"] == 1
    assert rows["control"]["length"] == 3
    assert "difference" not in rows["control"]


def test_a_table_with_a_control_says_that_its_drift_is_not_learning(tmp_path):
    run = RunFolder(tmp_path, {}, console=Console(file=io.StringIO(), width=40))
    explain_control(run, ("before", "after"))
    assert run.console.file.getvalue() == ""
    explain_control(run, ("before", "after", "control"))
    said = "control: same start, prompts and steps, but the reward is a coin toss. Its changes are not learning.\n"
    assert run.console.file.getvalue() == said


def test_the_table_of_online_preferences_says_what_its_coin_is(tmp_path):
    run = RunFolder(tmp_path, {}, console=Console(file=io.StringIO(), width=200))
    numbers = {name: [0.5, 0.6] for name in ("gold", "best", "repeats", "claimed")}
    numbers |= {f"accuracy_{name}": [0.5, 0.6] for name in ("start", "frozen", "online")}
    online_preference.show(run, dict.fromkeys(("start", "frozen", "online", "coin", "gold"), numbers), range(2))
    assert "coin: same start, prompts and steps, but the reward is a coin toss" in run.console.file.getvalue()
