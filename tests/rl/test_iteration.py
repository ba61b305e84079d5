"""The iteration: learning, resume, epochs, devices. A task of one-token answers keeps every run to seconds."""

import gzip
import json
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigrams import PARAMS, POLICY, TASK, V, prompts, says_three, train_grpo
from rl_helpers import Stop, assert_same_runs, compilations_of, open_run, rise_of, stopping
from tiny import refused

from grpo_jax.config import recipe, with_options
from grpo_jax.data.types import Component
from grpo_jax.devices import to_numpy
from grpo_jax.functional import gdpo_advantages, group_advantages, whiten
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.policy import decoder_policy
from grpo_jax.rl.grpo import corrected_advantages, grpo_method, make_programs, masked
from grpo_jax.rl.iteration import compile_programs
from grpo_jax.rl.optimizer import sync_reference
from grpo_jax.rl.source import completion_numbers, group_temperatures, make_sampler
from grpo_jax.rl.types import SAMPLING, Batch, TrainState, noise_of
from grpo_jax.runs.checkpoint import Checkpoints, params_sha256
from grpo_jax.tasks.task import random_reward

CONFIG = recipe(
    steps=6, num_prompts=8, group_size=4, max_tokens=3, learning_rate=5e-2, checkpoint_every=2, rollouts_every=1
)


@pytest.fixture(scope="module")
def programs():
    return make_programs(POLICY, TASK, CONFIG)


# ---- learning and logging


def test_training_raises_the_reward_and_logs_every_step(tmp_path, programs):
    run = open_run(tmp_path, CONFIG)
    config = with_options(CONFIG, steps=30)
    train_grpo(TASK, config, run, programs)
    lines = run.lines()
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert rise_of(lines) > 0.3
    assert lines[0]["first_ratio_deviation"] < 1e-5
    assert lines[0]["sampler_mismatch"] == pytest.approx(1, abs=1e-5)
    assert compilations_of(run)[-1] == compilations_of(run)[1]
    group = run.lines("rollouts.jsonl")[0]
    assert len(group["completions"]) == len(group["rewards"]) == len(group["advantages"]) == 4


def test_a_profile_has_the_steps_that_were_asked_for(tmp_path, programs):
    run = open_run(tmp_path, CONFIG)
    train_grpo(TASK, with_options(CONFIG, steps=5, profile_steps=2), run, programs)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"epochs": 2, "minibatches": 2},
        {"preset": "rloo", "temperature": 0.8, "top_k": 4},
        {"preset": "dapo", "temperature": 0.8, "microbatches": 2},
    ],
)
def test_first_ratio_is_one_whatever_the_sampling(tmp_path, changes):
    policy = decoder_policy(ModelConfig(V, 8, 16, 1, 2, 1, 4, initializer_range=0.5))
    params = jax.jit(policy.init)(jax.random.key(0))
    config = with_options(CONFIG, steps=2, **changes)
    run = open_run(tmp_path, config)
    state = train_grpo(TASK, config, run, params=params, policy=policy)
    assert [line["first_ratio_deviation"] < 1e-5 for line in run.lines()] == [True, True]
    updates = 2 * config.optimizer.epochs * config.optimizer.minibatches
    counts = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state) if "count" in str(path)]
    assert counts
    assert all(int(count) == updates for count in counts)
    assert params_sha256(state.params["policy"]) != params_sha256(params)


def test_kl_in_the_reward_lowers_advantages_of_unlikely_rows(tmp_path, programs):
    # With a zero reward, only the penalty tells completions apart, once the policy has left the reference.
    config = with_options(CONFIG, steps=4, preset="rloo", kl_coef=1.0)
    run = open_run(tmp_path, config)

    def first_steps_only(examples, texts, calls=iter(range(99))):  # noqa: B008
        return says_three(examples, texts) if next(calls) < 3 else [0.0] * len(texts)

    sharing = make_programs(POLICY, TASK, config, sampler=programs.sampler)
    train_grpo(TASK, config, run, sharing, reward=first_steps_only)
    advantages = [group["advantages"] for group in run.lines("rollouts.jsonl") if group["step"] == 4]
    assert np.abs(advantages).max() > 1e-3


# ---- what the policy is held near


def test_a_reference_moves_by_its_share_when_it_is_due():
    config = with_options(CONFIG, ref_sync_steps=2, ref_mixup_alpha=0.25)
    params, extras = {"policy": {"w": jnp.float32(8)}}, {"reference": {"w": jnp.float32(4)}}
    state, sync = TrainState(params, (), jnp.int32(0), extras), sync_reference(config)
    moved = [float(sync(state, {}, step).extras["reference"]["w"]) for step in range(4)]
    assert moved == [4, 5, 4, 5]  # the steps are counted from 0


def test_a_reference_that_moves_every_step_is_the_policy_that_sampled(tmp_path, programs):
    kl = {}
    for every in (0, 1):
        config = with_options(CONFIG, ref_sync_steps=every)
        run = open_run(tmp_path / f"every_{every}", config)
        moving = make_programs(POLICY, TASK, config, sampler=programs.sampler)
        train_grpo(TASK, config, run, moving if every else programs)
        kl[every] = [line["kl"] for line in run.lines()]
    assert kl[0][-1] > 1e-3
    assert kl[1] == pytest.approx([0] * 6, abs=1e-6)  # and the gradient of the KL with it


def test_kl_coef_is_steered_to_a_target(tmp_path, programs):
    config = with_options(CONFIG, steps=4, preset="rloo", kl_coef=0.5, kl_target=0.005, kl_horizon=64)
    run = open_run(tmp_path, config)
    sharing = make_programs(POLICY, TASK, config, sampler=programs.sampler)
    state = train_grpo(TASK, config, run, sharing)
    lines = run.lines()
    coef = 0.5
    for line in lines:
        assert line["kl_coef"] == pytest.approx(coef, rel=1e-5)
        coef *= 1 + np.clip(line["kl_completion"] / 0.005 - 1, -0.2, 0.2) * 32 / 64
    assert float(state.extras["kl_coef"]) == pytest.approx(coef, rel=1e-5)
    assert lines[1]["kl_coef"] == pytest.approx(0.45, rel=1e-5)  # nothing to hold back at first
    assert lines[2]["kl_coef"] > lines[1]["kl_coef"]  # KL above the target


# ---- resume


def test_resume_gives_the_same_bits_and_the_same_lines(tmp_path, programs):
    def resume(name, **options):
        run = open_run(tmp_path / name, CONFIG)
        return train_grpo(TASK, CONFIG, run, programs, **options), run

    whole = resume("whole")
    with pytest.raises(Stop):
        resume("cut", reward=stopping(says_three, 5))
    with (tmp_path / "cut/metrics.jsonl").open("a") as file:
        file.write('{"phase": "grpo", "st')  # a line that a crash cut off
    assert open_run(tmp_path / "cut", CONFIG).lines("times.jsonl")[-1]["step"] == 5  # one after the last checkpoint
    for _ in range(2):
        assert_same_runs(resume("cut"), whole)


@pytest.mark.parametrize(
    ("saved", "steps", "word"),
    [({}, 3, "more"), ({"decay": "linear"}, 12, "learning rate"), ({"max_rollouts": 4}, 12, "prompts")],
)
def test_a_run_whose_steps_depend_on_their_number_is_not_extended(tmp_path, saved, steps, word):
    config = with_options(CONFIG, **saved)
    open_run(tmp_path, config)
    with refused(word):
        open_run(tmp_path, with_options(config, steps=steps))


def test_a_checkpoint_is_what_was_saved_though_its_buffers_are_donated(tmp_path):
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


def test_parameters_of_one_device_are_sampled_from_on_several():
    sampler = make_sampler(POLICY, TASK, CONFIG.sampling, devices=2)
    params = jax.device_put(PARAMS, jax.devices()[0])  # as a supervised phase on one device leaves them
    numbers, temperature = completion_numbers(CONFIG.sampling), group_temperatures(CONFIG.sampling)
    actual = sampler.complete(params, prompts(0), numbers, temperature, noise_of(0, SAMPLING, 0))
    assert actual.completion_ids.shape == (8, 4, 3)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_nothing_compiles_after_the_first_step_also_when_resumed(tmp_path, devices):
    config = with_options(CONFIG, steps=3, devices=devices, checkpoint_every=1)
    programs = make_programs(POLICY, TASK, config)
    train_grpo(TASK, config, open_run(tmp_path, CONFIG), programs)
    longer, run = with_options(config, steps=6), open_run(tmp_path, CONFIG)
    train_grpo(TASK, longer, run, make_programs(POLICY, TASK, config))
    counts = compilations_of(run)
    assert counts[0] > 0
    assert counts[3] > 0
    assert counts == [counts[0]] * 3 + [counts[3]] * 3


# ---- metrics


@pytest.mark.slow
def test_metrics_of_tokens_do_not_depend_on_minibatches(tmp_path):
    # Without learning, and completions of 1 to 3 tokens.
    logged = []
    for minibatches in (1, 4):
        config = with_options(CONFIG, steps=1, learning_rate=1e-12, minibatches=minibatches)
        run = open_run(tmp_path / str(minibatches), config)
        train_grpo(TASK, config, run)
        logged.append(run.lines()[-1])
    one, four = logged
    assert one["length_min"] < one["length_max"]
    assert four["entropy"] == pytest.approx(one["entropy"], rel=1e-5)


# ---- corrections


def an_update(old_logprobs, sampler_logprobs, truncated_logprobs=None):
    """One prompt, two completions of two tokens; the second has one token and no end."""
    return Batch(
        None,
        None,
        None,
        np.array([[[True, True], [True, False]]]),
        None,
        sampler_logprobs=sampler_logprobs,
        truncated_logprobs=truncated_logprobs,
        truncated=np.array([[False, True]]),
        old_logprobs=old_logprobs,
        advantages=np.array([[2.0, -1.0]], np.float32),
    )


@pytest.mark.parametrize(
    ("correction", "expected", "mean"),
    [
        ("none", [[2.0, -1.0]], None),
        ("token", [[[4.0, 1.6], [-0.25, -1.0]]], 3.05 / 3),  # w = 4 and 0.8; ¼
        ("sequence", [[[6.0, 6.0], [-0.25, -1.0]]], 6.25 / 3),  # 4 · 0.8 = 3.2
        ("icepop", [[[8.0, 1.6], [0.0, -1.0]]], 4.8 / 3),  # ¼ is below 0.5
        ("geometric", [[[0.0, 0.0], [0.0, -1.0]]], 0.0),
    ],
)
def test_corrections_by_hand(correction, expected, mean):
    old_logprobs = np.log(np.array([[[0.8, 0.2], [0.1, 0.9]]], np.float32))
    sampler_logprobs = np.log(np.array([[[0.2, 0.25], [0.4, 0.1]]], np.float32))
    loss = with_options(CONFIG, correction=correction).loss
    # Whatever the policy is by now, weights are those of when it sampled.
    batch, now = an_update(old_logprobs, sampler_logprobs), old_logprobs + 1
    advantages, metrics = corrected_advantages(batch, now, old_logprobs, loss)
    np.testing.assert_allclose(advantages, expected, rtol=1e-5)
    assert metrics.keys() == (set() if mean is None else {"correction"})
    for total, count in metrics.values():
        assert total / count == pytest.approx(mean, rel=1e-5)
    # What was sampled from, where that was less than the whole softmax.
    batch = an_update(old_logprobs, old_logprobs, sampler_logprobs)
    np.testing.assert_allclose(corrected_advantages(batch, now, old_logprobs, loss)[0], expected, rtol=1e-5)


def test_completions_of_negative_advantage_that_left_the_policy_are_left_out():
    sampler_logprobs = np.array([[[-1.0, -1.0], [-1.0, 0.0]]], np.float32)
    now, loss = sampler_logprobs - 0.5, with_options(CONFIG, off_policy_threshold=0.4).loss
    batch = an_update(now, sampler_logprobs)
    advantages, metrics = corrected_advantages(batch, now, now, loss)
    np.testing.assert_array_equal(advantages, [[[2.0, 2.0], [0.0, 0.0]]])
    assert float(metrics["on_policy_share"][0]) == 2  # of three tokens
    near = corrected_advantages(batch, now + 0.2, now, loss)[0]
    np.testing.assert_array_equal(near[0, 1, 0], -1)


def test_truncated_completions_leave_the_loss_but_not_the_baseline():
    batch = an_update(*np.zeros((2, 1, 2, 2), np.float32))
    kept = masked(batch, with_options(CONFIG, mask_truncated=True).loss)
    np.testing.assert_array_equal(kept.completion_mask, [[[True, True], [False, False]]])
    np.testing.assert_array_equal(kept.advantages, batch.advantages)


def test_a_mask_that_would_leave_nothing_is_refused():
    with refused("mask_truncated"):
        make_programs(POLICY, TASK._replace(open_ended=True), with_options(CONFIG, mask_truncated=True))


# ---- several rewards


def hundreds_of_tokens(examples, completions):
    """A reward of another scale, which does not apply to empty completions."""
    return [100.0 * len(text) if text else None for text in completions]


COMPONENTS = {
    "threes": Component(says_three, 0.7),
    "length": Component(hundreds_of_tokens, 0.3),
    "watched": Component(lambda examples, texts: [9.0 * text.count("1") for text in texts], 0.0),
}
BY_COMPONENT = with_options(CONFIG, advantages_of="components")


def judged_steps(path, sampler, rewards, config=BY_COMPONENT, change=lambda method: method):
    """What two steps learned from, and the run; by a method of components, or by what is made of it."""
    task, config, seen = TASK._replace(reward=COMPONENTS), with_options(config, steps=2), []
    programs = compile_programs(change(grpo_method(POLICY, config)), POLICY, task, config, sampler=sampler)

    def recorded(state, frozen, start, batch, arrays, clock):
        state, learned = programs.learn(state, frozen, start, batch, arrays, clock)
        seen.append((to_numpy(arrays), to_numpy(learned.advantages)))
        return state, learned

    run = open_run(path, config)
    train_grpo(task, config, run, programs._replace(learn=recorded), reward=rewards)
    return seen, run


def test_components_are_compared_one_by_one_and_those_without_a_weight_not_at_all(tmp_path, programs):
    seen, run = judged_steps(tmp_path, programs.sampler, COMPONENTS)
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


@pytest.mark.slow
def test_in_place_of_several_rewards_one_alone_is_standardised_and_whitened(tmp_path, programs):
    for rewards, advantages in judged_steps(tmp_path, programs.sampler, says_three)[0]:
        expected = whiten(group_advantages(rewards.rewards), eps=1e-6)
        np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-6)


def test_advantages_of_ones_own_take_the_components_and_their_weights(tmp_path, programs):
    def best_of_both(rewards, batch, kl_coef):
        by_row = jnp.nanmax(rewards.components * rewards.weights, axis=-1)
        return batch._replace(advantages=by_row), by_row, {}

    def change(method):
        return method._replace(advantage=best_of_both)

    for rewards, advantages in judged_steps(tmp_path, programs.sampler, COMPONENTS, change=change)[0]:
        parts = np.nan_to_num(rewards.components)
        np.testing.assert_allclose(advantages, np.maximum(0.7 * parts[..., 0], 0.3 * parts[..., 1]), rtol=1e-6)


def test_a_component_that_is_nan_stops_the_run(tmp_path, programs):
    broken = COMPONENTS | {"threes": Component(lambda examples, texts: [float("nan")] * len(texts))}
    with pytest.raises(FloatingPointError):
        judged_steps(tmp_path, programs.sampler, broken, config=with_options(BY_COMPONENT, max_skipped=1))


@pytest.mark.parametrize("reward", [says_three, {"a": Component(says_three), "b": Component(says_three, 0.0)}])
def test_one_reward_has_no_components_to_compare(reward):
    with refused("components"):
        make_programs(POLICY, TASK._replace(reward=reward), BY_COMPONENT)
