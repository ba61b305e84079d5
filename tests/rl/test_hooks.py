"""The functions that a run calls with its rollouts and lines: what they see, when, and that an error ends the run."""

import jax
import numpy as np
import pytest
from bigrams import PARAMS, POLICY, TASK, train_grpo
from rl_helpers import RUN, Stop, assert_same_runs, open_run, run_programs, stopping

from grpo_jax.config import with_options
from grpo_jax.rl.programs import make_programs
from grpo_jax.rl.types import Rollout
from grpo_jax.training.phases import train_with_control


def drawn(window, step, bound):
    """A curriculum that draws the prompts in their order."""
    return TASK.prompts(step), np.arange(RUN.sampling.num_prompts), {}


SOURCES = [{}, {"max_rollouts": 3}, {"curriculum": 4}, {"staleness": 1}]


@pytest.mark.parametrize("changes", SOURCES, ids=str)
def test_hooks_see_each_rollout_and_line(tmp_path, changes):
    config, task = with_options(RUN, **changes), TASK._replace(curriculum=drawn)
    programs = make_programs(POLICY, task, config)
    calls, rollouts, lines = [], [], []

    def learn(state, frozen, batch, rewards, seed_and_step):
        np.testing.assert_array_equal(rewards.rewards, rollouts[-1].graded.rewards)
        calls.append("update")
        return programs.learn(state, frozen, batch, rewards, seed_and_step)

    def on_rollout(step, rollout):
        calls.append(step)
        rollouts.append(rollout)

    run = open_run(tmp_path, config)
    train_grpo(
        task,
        config,
        run,
        programs._replace(learn=learn),
        on_rollout=on_rollout,
        on_line=lambda step, line: lines.append((step, line)),
    )
    assert calls == [call for step in range(1, config.steps + 1) for call in (step, "update")]
    assert [line for _, line in lines] == run.lines()
    assert [step for step, _ in lines] == [line["step"] for line in run.lines()]
    groups = run.lines("rollouts.jsonl")
    for number, rollout in enumerate(rollouts):
        assert isinstance(rollout, Rollout)
        assert rollout.batch.completion_ids.shape[:2] == rollout.graded.rewards.shape == (8, 4)
        logged = [group for group in groups if group["step"] == number + 1]
        assert [group["rewards"] for group in logged] == rollout.graded.rewards[: len(logged)].tolist()


@pytest.mark.parametrize("hook", ["on_rollout", "on_line"])
def test_a_run_resumes_after_a_hooks_error(tmp_path, hook):
    whole = train_grpo(TASK, RUN, open_run(tmp_path / "whole", RUN), run_programs())
    failing = {hook: stopping(lambda step, value: None, 4)}
    with pytest.raises(Stop):
        train_grpo(TASK, RUN, open_run(tmp_path / "cut", RUN), run_programs(), **failing)
    steps, run = [], open_run(tmp_path / "cut", RUN)
    state = train_grpo(TASK, RUN, run, run_programs(), **{hook: lambda step, value: steps.append(step)})
    assert steps == [*range(steps[0], RUN.steps + 1)]
    assert steps[0] in (3, 5)  # after a checkpoint
    assert_same_runs((whole.params, open_run(tmp_path / "whole", RUN)), (state.params, run))


def test_hooks_see_lines_of_evaluations_and_the_control(tmp_path):
    config, lines = with_options(RUN, steps=2, eval_every=1, eval_samples=1), []
    run = open_run(tmp_path, config)
    rows, checksum, state = train_with_control(
        {"policy": PARAMS}, TASK, config, run, run_programs(), on_line=lambda step, line: lines.append(line)
    )
    assert lines == run.lines()
    assert [(line["phase"], line["step"]) for line in lines] == [(p, s) for p in ("grpo", "control") for s in range(3)]
    assert all("heldout_avg" in line for line in lines)
    assert rows.keys() == {"before", "after", "control"}
    assert len(checksum) == 64
    assert jax.tree.structure(state.params["policy"]) == jax.tree.structure(PARAMS)
