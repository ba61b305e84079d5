"""Curricula: the distribution that prompts are drawn from, levels of generators, and exact resume."""

import numpy as np
import pytest
from bigrams import TASK, train_grpo
from rl_helpers import RUN, Stop, assert_same_runs, open_run, run_programs, stopping
from tiny import digit_prompts, refused

from grpo_jax.config import validate, with_options
from grpo_jax.data.types import rng
from grpo_jax.tasks.curriculum import add_step, choose_levels, draw_by_solve_rate, empty_window, number_of


def window_of(*steps, width=4):
    """Returns the window after steps, each (numbers, rewards)."""
    window = empty_window(len(steps[0][0]), width)
    for numbers, rewards in steps:
        window = add_step(window, np.array(numbers), np.array(rewards, float))
    return window


def test_rewards_leave_the_window_after_its_steps():
    window = window_of(([0, 1], [[1, 0], [5, -1]]), ([2, 3], [[np.nan, 1], [np.nan, np.nan]]), width=2)
    np.testing.assert_array_equal(window.numbers, [[0, 2], [1, 3]])
    np.testing.assert_array_equal(window.solved, [[1, 1], [1, 0]])  # clipped to [0, 1]
    np.testing.assert_array_equal(window.failed, [[1, 0], [1, 0]])  # of the graded ones
    later = add_step(window, np.array([4, 5]), np.zeros((2, 2)))
    np.testing.assert_array_equal(later.numbers, [[2, 4], [3, 5]])


def test_rows_are_drawn_by_expected_reward_variance():
    rewards = [[0] * 8, [1, 0] * 4, [1] * 8, [0] * 6 + [1] * 2]  # of rows 0 to 3; row 4 is not in the window
    window = window_of(([0, 1, 2, 3], rewards))
    noise, drawn = np.random.default_rng(0), np.zeros(5)
    for _ in range(4000):
        numbers, metrics = draw_by_solve_rate(window, 5, 1, noise)
        drawn[numbers] += 1
    rates = np.stack([noise.beta(1 + solved, 1 + 8 - solved, 200_000) for solved in (0, 4, 8, 2)])
    variance = np.append((rates * (1 - rates)).mean(-1), 1 / 6)  # ∫ p (1 − p) dp
    np.testing.assert_allclose(drawn / 4000, variance / variance.sum(), atol=0.02)
    kinds = [metrics[f"curriculum_{kind}"] for kind in ("hard", "middle", "easy", "new")]
    np.testing.assert_allclose(
        kinds, np.array([variance[0], variance[[1, 3]].sum(), *variance[[2, 4]]]) / variance.sum(), atol=0.01
    )


def test_rows_of_a_step_are_different():
    numbers, _ = draw_by_solve_rate(empty_window(6, 3), 6, 6, np.random.default_rng(0))
    assert sorted(numbers) == list(range(6))


def levels(*steps, bound=0.75, tops=(2, 2)):
    return choose_levels(window_of(*steps, width=len(steps)), tops, bound)


def test_levels_rise_at_the_bound_with_enough_prompts():
    low, other = [number_of(0, 0)] * 8, [number_of(1, 0)] * 8
    passing, failing = [[1, 1, 1, 0]] * 8, [[1, 1, 0, 0]] * 8
    assert levels((low, passing), (other, failing)) == [1, 0]
    assert levels((low[:7], passing[:7])) == [0, 0]  # too few
    risen = ([number_of(0, 1)] * 8, failing)
    assert levels((low, passing), risen) == [1, 0]  # it does not fall
    assert levels((low, passing), ([number_of(0, 2)] * 8, passing)) == [2, 0]  # the top
    assert levels((low, [[np.nan] * 4] * 8)) == [0, 0]


# ---- a run

CURRICULUM = with_options(RUN, curriculum=3)


def choose(window, step, bound):
    """Draws from 20 prompts."""
    numbers, metrics = draw_by_solve_rate(window, 20, 8, rng(0, step))
    return digit_prompts(0, count=20).take(numbers), numbers, metrics


def trained(path, config=CURRICULUM, **options):
    run, task = open_run(path, config), TASK._replace(curriculum=choose)
    return train_grpo(task, config, run, run_programs(), **options), run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("step", [1, 4])
def test_a_killed_run_resumes_with_its_window(tmp_path, whole, step):
    with pytest.raises(Stop):
        trained(tmp_path, reward=stopping(TASK.reward, step))
    assert_same_runs(trained(tmp_path), whole)


def test_a_run_draws_from_the_rewards_before(whole):
    state, run = whole
    lines = [line for line in run.lines() if "curriculum_new" in line]
    assert len(lines) == RUN.steps
    assert lines[0]["curriculum_new"] == pytest.approx(1)
    assert lines[1]["curriculum_new"] < 0.9
    for line in lines:
        shares = [line[f"curriculum_{kind}"] for kind in ("new", "hard", "middle", "easy")]
        assert sum(shares) == pytest.approx(1)
    window = state.source
    rewards = (np.asarray(window.solved) / 4)[:, -1]
    assert rewards.mean() == pytest.approx(lines[-1]["reward"], abs=1e-6)


def test_a_task_without_a_curriculum_is_refused(tmp_path):
    with refused("prompts of this task are all in the same order"):
        train_grpo(TASK, CURRICULUM, open_run(tmp_path, CURRICULUM), run_programs())


@pytest.mark.parametrize("other", [{"staleness": 1}, {"max_rollouts": 2}])
def test_a_curriculum_needs_the_rewards_of_all_steps(other):
    with refused(f"set {next(iter(other))} to"):
        validate(with_options(CURRICULUM, **other))
