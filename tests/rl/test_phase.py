"""The loop of supervised phases: what it writes of steps whose gradients are not finite, and where it resumes."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rl_helpers import Stop, assert_same_files, stopping

from grpo_jax.fit import fit
from grpo_jax.functional import token_mean_weights
from grpo_jax.offline.phase import Objective, SupervisedConfig, make_fit_programs
from grpo_jax.rl.types import Logs
from grpo_jax.runs.folder import RunFolder
from grpo_jax.runs.progress import programs_so_far

CONFIG = SupervisedConfig(10, 1e-2, log_every=5, checkpoint_every=4, eval_every=5)
START = {"mean": jnp.zeros(())}


class Rows(NamedTuple):
    """Numbers, to learn the mean of."""

    values: Any  # [N, 1]
    completion_mask: Any
    weights: Any = None


def squares(params, batch):
    return jnp.sum(batch.weights * (batch.values - params["mean"]) ** 2), Logs({}, {})


OBJECTIVE = Objective(squares, token_mean_weights)


def batches(*bad: int):
    """Step, from 0 -> rows that hold its number; those of `bad` steps, counted from 1, are NaN."""

    def batch(step: int) -> Rows:
        value = np.nan if step + 1 in bad else step + 1
        return Rows(np.array([[step + 1], [value]], np.float32), np.ones((2, 1), bool))

    return batch


def trained(folder, batch):
    def evaluate(params, step):
        return {"heldout_mean": float(params["mean"])}

    state = fit(OBJECTIVE, START, batch, CONFIG, RunFolder(folder, {}), phase="phase", evaluate=evaluate)
    return jax.device_get(state.params["mean"])


def test_phases_with_one_objective_and_configuration_share_programs(tmp_path):
    assert make_fit_programs(OBJECTIVE, CONFIG) is make_fit_programs(OBJECTIVE, CONFIG)
    assert make_fit_programs(OBJECTIVE, CONFIG) is not make_fit_programs(OBJECTIVE, replace(CONFIG, steps=11))
    trained(tmp_path / "first", batches())
    before = sum(programs_so_far())
    trained(tmp_path / "second", batches())
    assert sum(programs_so_far()) == before


@pytest.mark.parametrize("bad", [(3,), (5,), (3, 4), (7, 8, 9)])
def test_the_batch_and_the_line_of_a_skipped_step_are_of_that_step(tmp_path, bad):
    trained(tmp_path, batches(*bad))
    dumped = {file.name: np.load(file)["values"][0, 0] for file in tmp_path.glob("skipped_*.npz")}
    assert dumped == {f"skipped_phase_{step:06d}.npz": step for step in bad}
    lines = RunFolder(tmp_path, {}).lines()
    in_a_row = {line["step"]: line["skipped"] for line in lines if "skipped" in line}
    assert in_a_row == {5: 0, 10: 0} | {step: number for number, step in enumerate(bad, 1)}
    assert [line["step"] for line in lines if "heldout_mean" in line] == [0, 5, 10]


@pytest.mark.parametrize("cut", [5, 8, 10])
def test_a_resumed_run_has_the_lines_of_steps_that_were_skipped_before_its_checkpoint(tmp_path, cut):
    whole = trained(tmp_path / "whole", batches(3, 7))
    with pytest.raises(Stop):
        trained(tmp_path / "cut", stopping(batches(3, 7), cut - 1))
    assert trained(tmp_path / "cut", batches(3, 7)) == whole
    assert_same_files(tmp_path / "whole", tmp_path / "cut", ["metrics.jsonl"])


def test_steps_that_are_skipped_in_a_row_end_the_run_and_a_resumed_one_at_the_same_step(tmp_path):
    for _ in range(2):
        with pytest.raises(FloatingPointError, match="5 times in a row"):
            trained(tmp_path, batches(*range(2, 10)))
        assert [line["step"] for line in RunFolder(tmp_path, {}).lines() if "loss" in line] == [2, 3, 4, 5, 6]
        assert sorted(path.name for path in (tmp_path / "checkpoints/phase").iterdir()) == ["4"]
