"""Runs that learn from what spans of completions earned."""

import jax
import numpy as np
from bigrams import EOS, PAD, POLICY, TASK as THREES, prompts, train_grpo
from rl_helpers import RUN, open_run, rise_of, run_programs

from grpo_jax.config import with_options
from grpo_jax.data.types import Component, Span
from grpo_jax.functional import group_advantages
from grpo_jax.rl.grade import grade_completions, reward_arrays
from grpo_jax.rl.grpo import by_part, make_programs
from grpo_jax.rl.types import Graded
from grpo_jax.sampling.sampler import Completions

T = 4
CONFIG = with_options(RUN, steps=30, kl_coef=0.0, advantages_of="spans")


def threes(examples, completions):
    """Each character is a span: 1 for a 3."""
    return [[Span(i, i + 1, float(text[i] == "3")) for i in range(len(text))] for text in completions]


TASK = THREES._replace(reward=threes)


def grade(ids, reward) -> Graded:
    """Grades completions of the first prompt."""
    ids = np.array(ids, np.int32)
    first = prompts(0)
    first = first._replace(ids=first.ids[:1], mask=first.mask[:1], examples=first.examples[:1])
    completions = Completions(ids, ids != PAD, None, None, ~(ids == EOS).any(-1))
    return grade_completions(first, completions, TASK, reward)


def test_rewards_stand_at_the_ends_of_spans_and_the_rest_at_the_last():
    graded = grade([[[3, 0, 3, EOS], [0, EOS, PAD, PAD]]], {"a": Component(threes), "b": Component(lambda *_: [5, 7])})
    earned = reward_arrays(graded, "spans", T, threes).parts
    np.testing.assert_array_equal(earned, [[[1, 0, 6, np.nan], [7, np.nan, np.nan, np.nan]]])
    np.testing.assert_array_equal(np.nansum(earned, -1), graded.rewards)


def test_without_spans_a_completion_is_one():
    graded = grade([[[3, 0, 3, EOS], [0, EOS, PAD, PAD], [1, 2, 3, 4]]], lambda *_: [1.0, None, 3.0])
    arrays = reward_arrays(graded, "spans", T, threes)
    np.testing.assert_array_equal(np.isnan(arrays.parts).argmin(-1), [[3, 1, 3]])
    advantages = jax.jit(by_part)(arrays)
    expected = jax.jit(group_advantages)(graded.rewards, where=graded.applicable)
    np.testing.assert_allclose(advantages, np.repeat(expected[..., None], T, -1), rtol=1e-6)


def test_a_reward_that_is_nan_stays_visible():
    graded = grade([[[3, 0, 3, EOS], [0, EOS, PAD, PAD]]], lambda *_: [float("nan"), 1.0])
    advantages = jax.jit(by_part)(reward_arrays(graded, "spans", T, threes))
    assert np.isnan(advantages[0, 0]).all()


def test_a_run_learns_from_spans_and_shows_them(tmp_path):
    run = open_run(tmp_path, CONFIG)
    train_grpo(TASK, CONFIG, run, make_programs(POLICY, TASK, CONFIG, sampler=run_programs().sampler))
    lines = run.lines()
    assert rise_of(lines) > 0.5
    assert all(line["spans_mean"] > 0 for line in lines)
    group = run.lines("rollouts.jsonl")[0]
    for i, (text, reward) in enumerate(zip(group["completions"], group["rewards"], strict=True)):
        assert group["spans"][i] == [[j, j + 1] for j in range(len(text))]
        assert group["span_rewards"][i] == [float(letter == "3") for letter in text]
        assert sum(group["span_rewards"][i]) == reward
        assert len(group["span_advantages"][i]) == len(text)
        assert group["span_advantages"][i][:1] in ([], [group["advantages"][i]])
