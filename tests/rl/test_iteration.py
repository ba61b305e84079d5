"""The iteration: learning, resume, corrections, several rewards and rewards of spans, on a task of short answers."""

import gzip
import json
from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigrams import POLICY, TASK, train_grpo
from rl_helpers import RUN, assert_same_runs, open_run, recording, rise_of, run_programs
from tiny import digit_prompts as prompts, refused, says_three

from grpo_jax.config import with_options
from grpo_jax.data.types import Component, Span
from grpo_jax.errors import Interruption
from grpo_jax.functional import gdpo_advantages, group_advantages, whiten
from grpo_jax.rewards.reward import to_rewards
from grpo_jax.rl.grade import grade_completions, reward_arrays
from grpo_jax.rl.grpo import by_part
from grpo_jax.rl.programs import make_method_programs, make_programs
from grpo_jax.rl.types import Graded
from grpo_jax.rl.update import adapt_kl_coef, average_over_updates, corrected_advantages, sync_reference
from grpo_jax.runs.checkpoint import Checkpoints
from grpo_jax.sampling.sampler import Completions
from grpo_jax.step import Batch, TrainState
from grpo_jax.tasks.task import random_reward

# ---- learning and logging


def test_training_raises_the_reward_and_logs_every_step(tmp_path):
    run = open_run(tmp_path, RUN)
    config = with_options(RUN, steps=30)
    train_grpo(TASK, config, run, run_programs())
    lines = run.lines()
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert rise_of(lines) > 0.3
    assert lines[0]["first_ratio_deviation"] < 1e-5
    assert lines[0]["sampler_mismatch"] == pytest.approx(1, abs=1e-5)
    assert lines[-1]["kl"] > 1e-3
    group = run.lines("rollouts.jsonl")[0]
    assert len(group["completions"]) == len(group["rewards"]) == len(group["advantages"]) == 4


def test_profiles_cover_the_requested_steps(tmp_path):
    run = open_run(tmp_path, RUN)
    train_grpo(TASK, with_options(RUN, steps=5, profile_steps=2), run, run_programs())
    (file,) = tmp_path.glob("profile/plugins/profile/*/perfetto_trace.json.gz")
    with gzip.open(file) as trace:
        names = Counter(event.get("name") for event in json.load(trace)["traceEvents"])
    assert names["reward"] == 2
    assert names["rollout"] >= 2
    assert names["update"] >= 2


def test_a_random_reward_depends_on_the_completions_alone():
    examples, texts = [{"prompt": "a"}] * 64, [str(i) for i in range(64)]
    draws = random_reward(0)(examples, texts)
    assert draws == random_reward(0)(examples, texts)
    assert draws != random_reward(1)(examples, texts)
    assert set(draws) == {0.0, 1.0}


# ---- what the policy is held near


def test_reference_mixes_in_the_policy_when_due():
    config = with_options(RUN, ref_sync_steps=2, ref_mixup_alpha=0.25)
    params, extras = {"policy": {"w": jnp.float32(8)}}, {"reference": {"w": jnp.float32(4)}}
    state, sync = TrainState(params, (), jnp.int32(0), extras), sync_reference(config)
    moved = [float(sync(state, {}, step).extras["reference"]["w"]) for step in range(4)]
    assert moved == [4, 5, 4, 5]  # the steps are counted from 0


def test_a_kl_that_is_nan_keeps_its_coefficient():
    state, adapt = TrainState({}, (), 0, {"kl_coef": jnp.float32(0.5)}), adapt_kl_coef(with_options(RUN, kl_target=6.0))
    numbers = {"kl_completion": jnp.array([jnp.nan, 3.0, 9.0])}
    without, below, above = adapt(state, numbers, 0).extras["kl_coef"]
    assert below < without == 0.5 < above


def test_kl_in_the_reward_is_steered_to_target(tmp_path):
    """With rewards of zero in the last step, only the penalty tells completions apart."""
    config = with_options(RUN, steps=4, preset="rloo", kl_coef=0.5, kl_target=0.005)
    run, programs = open_run(tmp_path, config), make_programs(POLICY, TASK, config, sampler=run_programs().sampler)

    def first_steps_only(examples, texts, calls=iter(range(99))):  # noqa: B008
        return says_three(examples, texts) if next(calls) < 3 else [0.0] * len(texts)

    state = train_grpo(TASK, config, run, programs, reward=first_steps_only)
    lines = run.lines()
    coef = 0.5
    for line in lines:
        assert line["kl_coef"] == pytest.approx(coef, rel=1e-5)
        coef *= 1 + np.clip(line["kl_completion"] / 0.005 - 1, -0.2, 0.2) * 32 / 10_000
    assert float(state.extras["kl_coef"]) == pytest.approx(coef, rel=1e-5)
    assert lines[1]["kl_coef"] == pytest.approx(0.5 * (1 - 0.2 * 32 / 10_000))  # nothing to hold back at first
    assert lines[2]["kl_coef"] > lines[1]["kl_coef"]  # KL above the target
    advantages = [group["advantages"] for group in run.lines("rollouts.jsonl") if group["step"] == 4]
    assert np.abs(advantages).max() > 1e-3


# ---- resume


FIXED_LENGTHS = [({}, 3, "more"), ({"decay": "linear"}, 12, "learning rate"), ({"max_rollouts": 4}, 12, "prompts")]


@pytest.mark.parametrize(("saved", "steps", "word"), FIXED_LENGTHS)
def test_runs_with_step_dependent_schedules_cannot_be_extended(tmp_path, saved, steps, word):
    config = with_options(RUN, **saved)
    open_run(tmp_path, config)
    with refused(word):
        open_run(tmp_path, with_options(config, steps=steps))


def test_checkpoints_survive_donation_of_their_buffers(tmp_path):
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = TrainState({"w": jnp.zeros((512, 1024))}, (), jnp.int32(0), {})
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for number in range(3):
            checkpoints.save(state, number)
            state = step(step(state))
    with Checkpoints(tmp_path) as checkpoints:
        restored, number = checkpoints.restore(lambda: state)
    assert number == 2
    np.testing.assert_array_equal(restored.params["w"], np.full((512, 1024), 4.0))


# ---- metrics


def test_metrics_are_averaged_over_updates_by_tokens():
    names, tokens = ("entropy", "loss", "ratio_deviation", "sampler_mismatch"), jnp.array([3, 1])
    steps = {name: [1, 5] for name in names} | {"skipped": [0, 2]}
    actual = average_over_updates({name: jnp.array(values) for name, values in steps.items()}, tokens)
    expected = {"entropy": 2, "loss": 3, "ratio_deviation": 5, "first_ratio_deviation": 1, "sampler_mismatch": 2}
    expected |= {"first_sampler_mismatch": 1, "skipped": 2, "skipped_update": 1}
    assert {name: float(value) for name, value in actual.items()} == expected


def test_updates_without_tokens_do_not_count():
    skipped = jnp.zeros(2)
    for tokens, expected in (([3, 0], 1.0), ([0, 0], np.nan)):
        steps = {name: jnp.array([1.0, np.nan]) for name in ("kl", "sampler_mismatch")}
        steps |= {"ratio_deviation": skipped, "skipped": skipped}
        np.testing.assert_equal(float(average_over_updates(steps, jnp.array(tokens))["kl"]), expected)


# ---- evaluations that failed


@pytest.mark.parametrize("failing", [3, 6])
def test_resumed_runs_make_up_for_failed_evaluations(tmp_path, failing):
    config, calls = with_options(RUN, eval_every=3, keep_best=True), []

    def evaluate(params, step):
        calls.append(step)
        if step == failing and calls.count(step) == 1:
            raise Interruption("the engine does not answer")
        return {"heldout_avg": float(np.abs(params["before"]).sum()), "heldout_n": step}

    with pytest.raises(Interruption):
        train_grpo(TASK, config, open_run(tmp_path / "cut", config), run_programs(), evaluate=evaluate)
    runs = {name: open_run(tmp_path / name, config) for name in ("cut", "whole")}
    ends = {name: train_grpo(TASK, config, run, run_programs(), evaluate=evaluate) for name, run in runs.items()}
    assert_same_runs(*((ends[name], runs[name]) for name in runs))
    assert [line["step"] for line in runs["cut"].lines() if "heldout_avg" in line] == [0, 3, 6]
    scores = [Checkpoints(tmp_path / name / "checkpoints/grpo").read_scores() for name in runs]
    assert scores[0] == scores[1]
    assert calls.count(failing) == 3  # the failed call, the one that made up for it, and that of the other run


# ---- corrections


def an_update(**logprobs):
    """One prompt, two completions of two tokens; the second has one token and no end."""
    mask, truncated = np.array([[[True, True], [True, False]]]), np.array([[False, True]])
    advantages = np.array([[2.0, -1.0]], np.float32)
    return Batch(None, None, mask, None, truncated=truncated, advantages=advantages, **logprobs)


CORRECTIONS = [
    ("none", [[2.0, -1.0]], None),
    ("token", [[[4.0, 1.6], [-0.25, -1.0]]], 3.05 / 3),  # w = 4 and 0.8; ¼
    ("sequence", [[[6.0, 6.0], [-0.25, -1.0]]], 6.25 / 3),  # 4 · 0.8 = 3.2
    ("sequence_mask", [[[0.0, 0.0], [-0.25, -1.0]]], 0.25 / 3),  # 3.2 is above 3
    ("icepop", [[[8.0, 1.6], [0.0, -1.0]]], 4.8 / 3),  # ¼ is below 0.5
    ("geometric", [[[0.0, 0.0], [0.0, -1.0]]], 0.0),
]


@pytest.mark.parametrize(("correction", "expected", "mean"), CORRECTIONS)
def test_corrections_by_hand(correction, expected, mean):
    old_logprobs = np.log(np.array([[[0.8, 0.2], [0.1, 0.9]]], np.float32))
    sampler_logprobs = np.log(np.array([[[0.2, 0.25], [0.4, 0.1]]], np.float32))
    loss = with_options(RUN, correction=correction).loss
    # Whatever the policy is by now, weights are those of when it sampled.
    batch, now = an_update(old_logprobs=old_logprobs, sampler_logprobs=sampler_logprobs), old_logprobs + 1
    advantages, metrics = corrected_advantages(batch, now, old_logprobs, loss)
    np.testing.assert_allclose(advantages, expected, rtol=1e-5)
    assert metrics.keys() == (set() if mean is None else {"correction"})
    for total, count in metrics.values():
        assert total / count == pytest.approx(mean, rel=1e-5)
    # What was sampled from, where that was less than the whole softmax.
    batch = batch._replace(sampler_logprobs=old_logprobs, processed_logprobs=sampler_logprobs)
    np.testing.assert_allclose(corrected_advantages(batch, now, old_logprobs, loss)[0], expected, rtol=1e-5)


def test_glm5_is_the_published_weight():
    """2602.15763, eq. 3: r · 1[1 − ε < r < 1 + ε] with SkyRL's ε of 0.2, for tokens."""
    ratios = np.array([[[0.7, 0.9], [1.1, 1.3]]], np.float32)
    batch = an_update(sampler_logprobs=np.zeros_like(ratios))._replace(completion_mask=np.ones(ratios.shape, bool))
    loss, logprobs = with_options(RUN, correction="glm5").loss, np.log(ratios)
    expected = np.where(np.abs(ratios - 1) < 0.2, ratios, 0) * batch.advantages[..., None]
    np.testing.assert_allclose(corrected_advantages(batch, logprobs, logprobs, loss)[0], expected, rtol=1e-5)


# ---- several rewards


def hundreds_of_tokens(examples, completions):
    """A reward of another scale, which does not apply to empty completions."""
    return [100.0 * len(text) if text else None for text in completions]


COMPONENTS = {
    "threes": Component(says_three, 0.7),
    "length": Component(hundreds_of_tokens, 0.3),
    "watched": Component(lambda examples, texts: [9.0 * text.count("1") for text in texts], 0.0),
}
BY_COMPONENT, JUDGED = with_options(RUN, advantages_of="components"), TASK._replace(reward=COMPONENTS)


@cache
def component_programs():
    return make_programs(POLICY, JUDGED, BY_COMPONENT, sampler=run_programs().sampler)


def judged_steps(path, rewards=None, programs=None, **options):
    """Rewards and advantages of two steps, and the run."""
    config, seen = with_options(BY_COMPONENT, steps=2, **options), []
    run, programs = open_run(path, config), recording(programs or component_programs(), seen)
    train_grpo(JUDGED, config, run, programs, reward=rewards)
    return [each[1:] for each in seen], run


def test_weighted_components_are_standardised_separately(tmp_path):
    seen, run = judged_steps(tmp_path)
    for rewards, advantages in seen:
        np.testing.assert_array_equal(rewards.weights, np.array([0.7, 0.3, 0], np.float32))
        parts = np.moveaxis(rewards.components, -1, 0)
        expected = gdpo_advantages(parts[:2], weights=jnp.array([0.7, 0.3]))
        np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-6)
    # What was compared is what the functions said of the completions.
    group, (rewards, advantages) = run.lines("rollouts.jsonl")[0], seen[0]
    texts = group["completions"]
    np.testing.assert_allclose(rewards.components[0, :, 0], says_three([], texts), rtol=1e-6)
    np.testing.assert_array_equal(rewards.components[0, :, 1], np.array(hundreds_of_tokens([], texts), np.float32))
    np.testing.assert_allclose(group["advantages"], advantages[0], atol=1e-4)
    assert np.isnan(np.concatenate([rewards.components[..., 1] for rewards, _ in seen])).any()  # of empty completions


def test_a_single_component_is_standardised_and_whitened(tmp_path):
    for rewards, advantages in judged_steps(tmp_path, says_three)[0]:
        expected = whiten(group_advantages(rewards.rewards), eps=1e-6)
        np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-6)


def test_custom_advantages_receive_components_and_weights(tmp_path):
    def best_of_both(rewards, batch, kl_coef):
        by_row = jnp.nanmax(rewards.components * rewards.weights, axis=-1)
        return batch._replace(advantages=by_row), by_row, {}

    method, sampler = component_programs().method._replace(advantage=best_of_both), run_programs().sampler
    programs = make_method_programs(method, POLICY, JUDGED, BY_COMPONENT, sampler=sampler)
    for rewards, advantages in judged_steps(tmp_path, programs=programs)[0]:
        parts = np.nan_to_num(rewards.components)
        np.testing.assert_allclose(advantages, np.maximum(0.7 * parts[..., 0], 0.3 * parts[..., 1]), rtol=1e-6)


def test_a_component_that_is_nan_stops_the_run(tmp_path):
    broken = COMPONENTS | {"threes": Component(lambda examples, texts: [float("nan")] * len(texts))}
    with pytest.raises(FloatingPointError):
        judged_steps(tmp_path, broken, max_skipped=1)


# ---- rewards of spans

EOS, PAD = 6, 7
WIDTH = 4
CONFIG = with_options(RUN, steps=30, kl_coef=0.0, advantages_of="spans")


def threes(examples, completions):
    """Each character is a span: 1 for a 3."""
    return [[Span(i, i + 1, float(text[i] == "3")) for i in range(len(text))] for text in completions]


MARKED = TASK._replace(reward=threes)


def grade(ids, reward) -> Graded:
    """Grades completions of the first prompt."""
    ids = np.array(ids, np.int32)
    first = prompts(0)
    first = first.take(np.arange(1))
    completions = Completions(ids, ids != PAD, None, None, ~(ids == EOS).any(-1))
    return grade_completions(first, completions, MARKED, to_rewards(reward))


def test_rewards_lie_at_the_ends_of_spans():
    graded = grade([[[3, 0, 3, EOS], [0, EOS, PAD, PAD]]], {"a": Component(threes), "b": Component(lambda *_: [5, 7])})
    earned = reward_arrays(graded, "spans", WIDTH, {}).parts
    np.testing.assert_array_equal(earned, [[[1, 0, 6, np.nan], [7, np.nan, np.nan, np.nan]]])
    np.testing.assert_array_equal(np.nansum(earned, -1), graded.rewards)


def test_without_spans_a_completion_is_one():
    graded = grade([[[3, 0, 3, EOS], [0, EOS, PAD, PAD], [1, 2, 3, 4]]], lambda *_: [1.0, None, 3.0])
    arrays = reward_arrays(graded, "spans", WIDTH, {})
    np.testing.assert_array_equal(np.isnan(arrays.parts).argmin(-1), [[3, 1, 3]])
    advantages = jax.jit(by_part)(arrays)
    expected = jax.jit(group_advantages)(graded.rewards, where=graded.applicable)
    np.testing.assert_allclose(advantages, np.repeat(expected[..., None], WIDTH, -1), rtol=1e-6)


def test_a_reward_that_is_nan_stays_visible():
    graded = grade([[[3, 0, 3, EOS], [0, EOS, PAD, PAD]]], lambda *_: [float("nan"), 1.0])
    advantages = jax.jit(by_part)(reward_arrays(graded, "spans", WIDTH, {}))
    assert np.isnan(advantages[0, 0]).all()


def test_a_run_learns_from_spans_and_shows_them(tmp_path):
    run = open_run(tmp_path, CONFIG)
    train_grpo(MARKED, CONFIG, run, make_programs(POLICY, MARKED, CONFIG, sampler=run_programs().sampler))
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
