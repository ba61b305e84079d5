"""The guards: what ends a run, and what it warns of. What is refused before a run is in test_refusals.py."""

import math
import re
import warnings
from dataclasses import replace

import numpy as np
import pytest
from bigrams import PARAMS, POLICY, TASK, train_grpo
from rl_helpers import RUN, open_run, run_programs
from tiny import digit_prompts as prompts, refused

from grpo_jax.config import recipe, with_options
from grpo_jax.data.types import Component, Span
from grpo_jax.rewards.processes import Grader
from grpo_jax.rewards.reward import to_rewards
from grpo_jax.rl import guards
from grpo_jax.rl.evaluate import evaluate, prompt_means, sample_heldout, summary
from grpo_jax.rl.grade import has_spread, make_grading, reward_arrays
from grpo_jax.rl.grpo import by_part
from grpo_jax.rl.interaction import ONE_TURN
from grpo_jax.rl.programs import check_programs, make_programs
from grpo_jax.rl.types import Graded, Rollout
from grpo_jax.statistics import paired_difference


def test_phases_sharing_programs_differ_only_in_host_options():
    check_programs(run_programs(), with_options(RUN, steps=9, seed=1, max_rollouts=2, eval_every=1, max_skipped=1))
    for changes in ({"learning_rate": 1e-3, "kl_coef": 0.1}, {"decay": "linear", "steps": 9}):
        with refused(f"another .*{next(iter(changes))}"):
            check_programs(make_programs(POLICY, TASK, with_options(RUN, **changes)), RUN)


def test_infinite_rewards_print_no_warnings_of_numpy(tmp_path):
    def reward(examples, texts):
        return [(math.inf, -math.inf, 1e300, 1.0)[i % 4] for i in range(len(texts))]

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(FloatingPointError):
            train_grpo(TASK, RUN, open_run(tmp_path, RUN), run_programs(), reward=reward)
        samples = sample_heldout(run_programs().sampler, PARAMS, TASK, recipe(num_prompts=8, group_size=4))
        held = evaluate(samples, TASK._replace(reward=reward))
        summary(held)
        paired_difference(prompt_means(held), prompt_means(held))


def test_failing_rewards_stop_only_a_runs_first_step(tmp_path):
    (tmp_path / "bad.py").write_text("def f(examples, completions):\n    raise RuntimeError('no such thing')\n")
    run = open_run(tmp_path / "run", RUN)
    with Grader(f"{tmp_path}/bad.py:f", workers=1) as grader:
        with refused("no completion of the first rollout .* no such thing"):
            train_grpo(TASK, RUN, open_run(tmp_path / "first", RUN), run_programs(), reward=grader)
        train_grpo(TASK, with_options(RUN, steps=1), run, run_programs())
        train_grpo(TASK, with_options(RUN, steps=2), run, run_programs(), reward=grader)
    assert [line["step"] for line in run.lines()] == [1, 2]


def test_rollouts_that_teach_nothing_are_warned_of_once(tmp_path, capsys):
    config = with_options(RUN, steps=3)
    train_grpo(TASK, config, open_run(tmp_path, RUN), run_programs(), reward=lambda e, t: [1.0] * len(t))
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("all rewards are equal") == 1
    assert "ratio" not in said


def test_endless_completions_warn_except_in_open_ended_tasks():
    all_, ones = np.ones((2, 3), bool), np.ones((2, 3))
    parts = np.empty((2, 3), object)
    parts.fill(())
    graded = Graded(np.arange(6.0).reshape(2, 3), all_, {}, ones, all_, np.ones(2), parts, {}, ones)
    assert ONE_TURN.report(TASK, graded, 0)[1].keys() == {"truncated"}
    assert not ONE_TURN.report(TASK._replace(open_ended=True), graded, 0)[1]
    assert not ONE_TURN.report(TASK, graded._replace(truncated=all_ & (np.arange(3) > 0)), 0)[1]


START = {"reward": 0.4, "kl": 0.0, "sampler_mismatch": 1.0}
NO_KL = {"reward": 0.4, "sampler_mismatch": 1.0}
DAMAGE = [  # (metrics of the first step, of a later step, words of the warning)
    (START, {"reward": 0.1, "kl": 1.2}, "KL to the reference is 1.2 .* from 0.4 to 0.1: .* such as 1e-05"),
    (START, {"reward": 0.3, "kl": 9.0}, ""),  # a method may move far, as long as the reward does not fall
    (START, {"reward": 0.0, "kl": 0.9}, ""),  # hard prompts
    (START | {"reward": None}, {"reward": 0.0, "kl": 9.0}, ""),  # no reward applied
    (START | {"reward": 0.0}, {"reward": 0.0, "kl": 9.0}, ""),  # there was nothing to lose
    (START | {"reward": -1.0}, {"reward": -1.2, "kl": 9.0}, ""),
    (START | {"reward": -1.0}, {"reward": -1.8, "kl": 9.0}, "from -1 to -1.8"),
    (NO_KL, {"reward": 0.1, "sampler_mismatch": 4.0}, "moves log-probabilities by 1.4 nats .* such as 1e-05"),
    (NO_KL, {"reward": 0.1, "sampler_mismatch": 2.0}, ""),
]


@pytest.mark.parametrize(("first", "later", "words"), DAMAGE)
def test_updates_that_destroy_the_policy_name_the_rate(first, later, words):
    check = guards.make_damage_check(1e-4)
    assert not check(first)
    warned = " ".join(check(first | later).values())
    assert re.search(words, warned) if words else not warned


def test_destroyed_policies_blame_the_learning_rate(tmp_path, capsys):
    calls = []

    def lost(examples, texts):
        calls.append(1)
        return [float(len(calls) == 1 and i % 2) for i in range(len(texts))]

    config = with_options(RUN, steps=4, learning_rate=100.0, kl_coef=0.01)
    programs = make_programs(POLICY, TASK, config)
    train_grpo(TASK, config, open_run(tmp_path, config), programs, reward=lost)
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("the updates destroy the policy") == 1
    assert "choose easier or harder prompts" not in said


CLOSE = {"first_ratio_deviation": 0.3, "first_sampler_mismatch": 1.01}
EMPTY = {"first_ratio_deviation": 0.0, "first_sampler_mismatch": math.nan}  # the minibatch has no tokens


BOUNDS = [
    (guards.ratio_warning, (CLOSE,), (CLOSE | {"first_ratio_deviation": 20.0},), "ratio is off 1"),
    (guards.ratio_warning, (CLOSE,), (CLOSE | {"first_sampler_mismatch": 1.1},), "ratio is off 1"),
    (guards.ratio_warning, (EMPTY,), (CLOSE | {"first_ratio_deviation": 20.0},), "ratio is off 1"),
    (guards.length_warning, (8, 8), (9, 8), "longer than the 8"),
    (guards.length_warning, (9, None), (9, 8), "longer than the 8"),
]


@pytest.mark.parametrize(("warning", "fine", "far", "words"), BOUNDS)
def test_values_beyond_bounds_warn_once(tmp_path, capsys, warning, fine, far, words):
    run = open_run(tmp_path, RUN)
    run.warn(warning(*fine))
    assert not capsys.readouterr().out
    for _ in range(2):
        run.warn(warning(*far))
    assert " ".join(capsys.readouterr().out.split()).count(words) == 1


def test_nonfinite_gradients_are_dumped_and_stop_the_run(tmp_path):
    config = with_options(RUN, max_skipped=2)
    run = open_run(tmp_path, RUN)
    with pytest.raises(FloatingPointError, match="2 times in a row"):
        train_grpo(TASK, config, run, run_programs(), reward=lambda e, t: [float("nan")] * len(t))
    dumped = np.load(tmp_path / "skipped_grpo_000000_1.npz")
    assert np.isnan(dumped["advantages"]).all()
    assert not any("rewards are equal" in line["message"] for line in run.lines("warnings.jsonl"))
    assert [line["skipped"] for line in run.lines()] == [1, 2]  # of the step that stopped it too


def test_runs_that_skip_every_update_fail(tmp_path):
    config = with_options(RUN, steps=2, max_skipped=5)
    with pytest.raises(FloatingPointError, match="2 times in a row"):
        train_grpo(
            TASK, config, open_run(tmp_path, config), run_programs(), reward=lambda e, t: [float("nan")] * len(t)
        )


def right_padded(step):
    tokens = prompts(step).tokens
    return prompts(step)._replace(tokens=replace(tokens, mask=tokens.mask[:, ::-1]))


BAD_TASKS = [
    (TASK._replace(reward=lambda examples, texts: [1.0]), "returned 1 rewards for 32 completions"),
    (TASK._replace(prompts=right_padded), "padded on the left"),
]


@pytest.mark.parametrize(("task", "words"), BAD_TASKS)
def test_tasks_with_malformed_arrays_are_refused(tmp_path, task, words):
    with pytest.raises(ValueError, match=words):
        train_grpo(task, RUN, open_run(tmp_path, RUN), run_programs())


# ---- groups from which a policy can learn


def graded_parts(rewards, parts, applicable=True, **components) -> Graded:
    """Returns graded groups whose completions have parts with these rewards, of two tokens each."""
    rewards = np.asarray(rewards, np.float32)
    spans = np.empty(rewards.shape, object)
    for place in np.ndindex(spans.shape):
        earned = parts[place[0]][place[1]]
        spans[place] = tuple(Span(2 * k, 2 * k + 2, float(r), "tokens") for k, r in enumerate(earned))
    ones, named = np.ones(rewards.shape), {name: np.asarray(x, np.float32) for name, x in components.items()}
    where = np.broadcast_to(applicable, rewards.shape)
    return Graded(rewards, where, named, 10 * ones, ones > 1, np.ones(len(ones)), spans, {}, 10 * ones)


def test_spread_of_parts_is_where_their_advantages_are():
    noise = np.random.default_rng(0)
    groups = [
        ([1, 1], [[1, 0], [0, 1]]),  # equal sums, but other turns
        ([1, 1], [[1, 0], [1, 0]]),
        ([1, 1], [[1], [1, 0]]),  # the second turn happened once, and differs from the others
        ([1, 1], [[0, 1], [1]]),  # equal returns to go
        ([0.3, 0.3], [[0.1, 0.2], [0.3, 0]]),  # the first turns have equal returns up to rounding
        ([2, 1], [[], []]),
        ([1, 1], [[], []]),
    ]
    for _ in range(40):
        parts = [noise.choice([0, 0, 1, 2.7], noise.integers(4)).tolist() for _ in range(2)]
        groups.append(([sum(x) + noise.integers(2) for x in parts], parts))
    rewards, parts = zip(*groups, strict=True)
    applicable = noise.random((len(groups), 2)) < 0.8
    applicable[:7] = True
    graded = graded_parts(rewards, parts, applicable)
    advantages = by_part(reward_arrays(graded, "turns", 10, {}))
    spread = has_spread(graded, by_part=True)
    np.testing.assert_array_equal(spread, np.any(np.asarray(advantages) != 0, axis=(1, 2)))
    assert (has_spread(graded) != spread).sum() > 2


@pytest.mark.parametrize(
    ("changes", "compares", "share"),
    [({}, True, 1), ({"advantages_of": "spans"}, True, 0), ({"advantages_of": "components"}, True, 0), ({}, False, 1)],
)
def test_equal_sums_warn_unless_what_is_compared_differs(changes, compares, share):
    ones = [[1, 1], [1, 1]]
    graded = graded_parts(ones, [[[1, 0], [0, 1]]] * 2, a=[[0, 1]] * 2, b=[[2, 1]] * 2, c=ones)
    rewards = to_rewards({name: Component(None, weight) for name, weight in {"a": 1.0, "b": 1.0, "c": 0.0}.items()})
    _, report = make_grading(TASK, rewards, with_options(RUN, **changes), compares=compares)
    reported = report(Rollout(None, None, graded), 1)
    assert reported.metrics["zero_spread_share"] == share
    assert ("spread" in reported.warnings) == (compares and share == 1)
