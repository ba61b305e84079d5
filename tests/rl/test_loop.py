"""The loop: guards, resume, epochs, devices. A task of one-token answers keeps every run to seconds."""

import dataclasses
import gzip
import json
import math
import warnings
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigrams import PARAMS, POLICY, V
from grpo_jax.rl.learn import Advantages, sync_reference

from grpo_jax.config import recipe, validate, with_options
from grpo_jax.data.types import Component, pad_prompts, rng
from grpo_jax.devices import to_host
from grpo_jax.errors import UsageError
from grpo_jax.functional import gdpo_advantages, group_advantages, whiten
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.policy import decoder_policy
from grpo_jax.rewards.grading import Grader
from grpo_jax.rl import guards
from grpo_jax.rl.advantages import masked
from grpo_jax.rl.evaluate import evaluate, prompt_means, sample_heldout, summary
from grpo_jax.rl.grpo import grpo_loss_fn, grpo_method, make_programs
from grpo_jax.rl.iteration import check_programs, compile_programs
from grpo_jax.rl.keys import SAMPLING, noise_of
from grpo_jax.rl.sampler import completion_numbers, group_temperatures, make_sampler
from grpo_jax.rl.terms import corrected_advantages
from grpo_jax.rl.types import Batch, TrainState
from grpo_jax.runs.checkpoint import Checkpoints, params_sha256
from grpo_jax.runs.folder import RunFolder
from grpo_jax.statistics import paired_difference
from grpo_jax.tasks.task import Task, random_reward
from grpo_jax.train import train

EOS, PAD = 6, 7
CONFIG = recipe(
    steps=6, num_prompts=8, group_size=4, max_tokens=3, learning_rate=5e-2, checkpoint_every=2, rollouts_every=1
)
METHOD = grpo_method(POLICY, CONFIG)


def prompts(step: int):
    tokens = rng(step).integers(0, 6, (8, 2)).tolist()
    return pad_prompts(tokens, [{"prompt": str(t)} for t in tokens], width=3, pad_id=PAD)


def says_three(examples, completions):
    return [text.count("3") / 3 for text in completions]


TASK = Task(prompts, says_three, prompts(999), lambda ids: "".join(map(str, ids)), (EOS,), PAD, V)


@pytest.fixture(scope="module")
def programs():
    return make_programs(POLICY, TASK, CONFIG)


def open_run(path, config=CONFIG) -> RunFolder:
    return RunFolder(path, dataclasses.asdict(config))


# ---- learning and logging


def test_training_raises_the_reward_and_logs_every_step(tmp_path, programs):
    run = open_run(tmp_path)
    config = with_options(CONFIG, steps=30)
    train(POLICY, PARAMS, TASK, config, run, programs=programs)
    lines = run.lines()
    assert [line["step"] for line in lines] == list(range(1, 31))
    first, last = (np.mean([line["reward"] for line in part]) for part in (lines[:5], lines[-5:]))
    assert last > first + 0.3
    assert lines[0]["first_ratio_deviation"] < 1e-5
    assert lines[0]["sampler_mismatch"] == pytest.approx(1, abs=1e-5)
    assert run.lines("times.jsonl")[-1]["compilations"] == run.lines("times.jsonl")[1]["compilations"]
    group = run.lines("rollouts.jsonl")[0]
    assert len(group["completions"]) == len(group["rewards"]) == len(group["advantages"]) == 4


def test_a_profile_has_the_steps_that_were_asked_for(tmp_path, programs):
    run = open_run(tmp_path)
    train(POLICY, PARAMS, TASK, with_options(CONFIG, steps=5, profile_steps=2), run, programs=programs)
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


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"epochs": 2, "minibatches": 2}, marks=pytest.mark.slow),
        {"preset": "rloo", "temperature": 0.8, "top_k": 4},
        pytest.param({"preset": "dapo", "temperature": 0.8, "microbatches": 2}, marks=pytest.mark.slow),
    ],
)
def test_first_ratio_is_one_whatever_the_sampling(tmp_path, changes):
    policy = decoder_policy(ModelConfig(V, 8, 16, 1, 2, 1, 4, initializer_range=0.5))
    params = jax.jit(policy.init)(jax.random.key(0))
    config = with_options(CONFIG, steps=2, **changes)
    run = open_run(tmp_path, config)
    state = train(policy, params, TASK, config, run)
    assert [line["first_ratio_deviation"] < 1e-5 for line in run.lines()] == [True, True]
    updates = 2 * config.optimizer.epochs * config.optimizer.minibatches
    counts = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state) if "count" in str(path)]
    assert counts
    assert all(int(count) == updates for count in counts)
    assert params_sha256(state.params) != params_sha256(params)


def test_kl_in_the_reward_lowers_advantages_of_unlikely_rows(tmp_path, programs):
    # With a zero reward, only the penalty tells completions apart, once the policy has left the reference.
    config = with_options(CONFIG, steps=4, preset="rloo", kl_coef=1.0)
    run = open_run(tmp_path, config)

    def first_steps_only(examples, texts, calls=iter(range(99))):  # noqa: B008
        return says_three(examples, texts) if next(calls) < 3 else [0.0] * len(texts)

    sharing = make_programs(POLICY, TASK, config, sampler=programs.sampler)
    train(POLICY, PARAMS, TASK, config, run, programs=sharing, reward=first_steps_only)
    advantages = [group["advantages"] for group in run.lines("rollouts.jsonl") if group["step"] == 4]
    assert np.abs(advantages).max() > 1e-3


# ---- what the policy is held near


def test_a_reference_moves_by_its_share_when_it_is_due():
    config = with_options(CONFIG, ref_sync_steps=2, ref_mixup_alpha=0.25)
    state = TrainState({"w": jnp.float32(8)}, (), jnp.int32(0), reference={"w": jnp.float32(4)})
    moved = [float(sync_reference(METHOD, state, step, config).reference["w"]) for step in range(4)]
    assert moved == [4, 5, 4, 5]  # the steps are counted from 0


def test_a_reference_that_moves_every_step_is_the_policy_that_sampled(tmp_path, programs):
    kl = {}
    for every in (0, 1):
        config, run = with_options(CONFIG, ref_sync_steps=every), open_run(tmp_path / f"every_{every}")
        moving = make_programs(POLICY, TASK, config, sampler=programs.sampler)
        train(POLICY, PARAMS, TASK, config, run, programs=moving if every else programs)
        kl[every] = [line["kl"] for line in run.lines()]
    assert kl[0][-1] > 1e-3
    assert kl[1] == pytest.approx([0] * 6, abs=1e-6)  # and the gradient of the KL with it


def test_kl_coef_is_steered_to_a_target(tmp_path, programs):
    config = with_options(CONFIG, steps=4, preset="rloo", kl_coef=0.5, kl_target=0.005, kl_horizon=64)
    run = open_run(tmp_path, config)
    sharing = make_programs(POLICY, TASK, config, sampler=programs.sampler)
    state = train(POLICY, PARAMS, TASK, config, run, programs=sharing)
    lines = run.lines()
    coef = 0.5
    for line in lines:
        assert line["kl_coef"] == pytest.approx(coef, rel=1e-5)
        coef *= 1 + np.clip(line["kl_completion"] / 0.005 - 1, -0.2, 0.2) * 32 / 64
    assert float(state.kl_coef) == pytest.approx(coef, rel=1e-5)
    assert lines[1]["kl_coef"] == pytest.approx(0.45, rel=1e-5)  # nothing to hold back at first
    assert lines[2]["kl_coef"] > lines[1]["kl_coef"]  # KL above the target


# ---- resume


class Stop(Exception):
    pass


def test_resume_gives_the_same_bits_and_the_same_lines(tmp_path, programs):
    whole, cut = open_run(tmp_path / "whole"), open_run(tmp_path / "cut")
    expected = train(POLICY, PARAMS, TASK, CONFIG, whole, programs=programs)

    def stopping_reward(examples, texts, calls=iter(range(99))):  # noqa: B008
        if next(calls) == 5:
            raise Stop
        return says_three(examples, texts)

    with pytest.raises(Stop):
        train(POLICY, PARAMS, TASK, CONFIG, cut, programs=programs, reward=stopping_reward)
    with (cut.path / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "grpo", "st')  # a line that a crash cut off
    assert cut.lines("times.jsonl")[-1]["step"] == 5  # one step further than the last checkpoint
    resumed = train(POLICY, PARAMS, TASK, CONFIG, open_run(tmp_path / "cut"), programs=programs)

    assert params_sha256(resumed) == params_sha256(expected)
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert (cut.path / name).read_text() == (whole.path / name).read_text()
    again = train(POLICY, PARAMS, TASK, CONFIG, open_run(tmp_path / "cut"), programs=programs)
    assert params_sha256(again) == params_sha256(expected)


@pytest.mark.slow
def test_a_finished_run_goes_on_with_more_steps(tmp_path):
    short, long = with_options(CONFIG, steps=2), with_options(CONFIG, steps=4)
    train(POLICY, PARAMS, TASK, short, open_run(tmp_path / "short", short))
    run = open_run(tmp_path / "short", long)
    extended = train(POLICY, PARAMS, TASK, long, run)
    whole = train(POLICY, PARAMS, TASK, long, open_run(tmp_path / "long", long))
    assert params_sha256(extended.params) == params_sha256(whole.params)
    assert run.lines() == RunFolder(tmp_path / "long", dataclasses.asdict(long)).lines()
    assert json.loads((tmp_path / "short/config.json").read_text())["steps"] == 4


@pytest.mark.parametrize(
    ("saved", "steps", "word"),
    [({}, 3, "more"), ({"decay": "linear"}, 12, "learning rate"), ({"max_rollouts": 4}, 12, "prompts")],
)
def test_a_run_whose_steps_depend_on_their_number_is_not_extended(tmp_path, saved, steps, word):
    config = with_options(CONFIG, **saved)
    open_run(tmp_path, config)
    with pytest.raises(UsageError, match=word) as error:
        open_run(tmp_path, with_options(config, steps=steps))
    assert "\n" not in str(error.value)


def test_a_checkpoint_is_what_was_saved_though_its_buffers_are_donated(tmp_path):
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = TrainState({"w": jnp.zeros((512, 1024))}, (), jnp.int32(0))
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for number in range(3):
            checkpoints.save(state, number)
            state = step(step(state))
    with Checkpoints(tmp_path) as checkpoints:
        restored, number = checkpoints.restore(lambda: state)
    assert number == 2
    np.testing.assert_array_equal(restored.params["w"], np.full((512, 1024), 4.0))


@pytest.mark.slow
def test_a_checkpoint_does_not_know_how_many_devices_wrote_it(tmp_path, programs):
    many = with_options(CONFIG, steps=2, devices=8)
    train(POLICY, PARAMS, TASK, many, open_run(tmp_path / "run"))
    train(POLICY, PARAMS, TASK, CONFIG, open_run(tmp_path / "run"), programs=programs)
    train(POLICY, PARAMS, TASK, CONFIG, open_run(tmp_path / "one"), programs=programs)
    many_lines, one_lines = (open_run(tmp_path / name).lines() for name in ("run", "one"))
    # Eight devices sample the same tokens, so the rewards are the same numbers.
    assert [line["reward"] for line in many_lines[:2]] == [line["reward"] for line in one_lines[:2]]
    np.testing.assert_allclose(many_lines[0]["grad_norm"], one_lines[0]["grad_norm"], rtol=1e-5)


def test_parameters_of_one_device_are_sampled_from_on_several():
    sampler = make_sampler(POLICY, TASK, CONFIG.sampling, devices=2)
    params = jax.device_put(PARAMS, jax.devices()[0])  # as a supervised phase on one device leaves them
    numbers, temperature = completion_numbers(CONFIG.sampling), group_temperatures(CONFIG.sampling)
    found = sampler.complete(params, prompts(0), numbers, temperature, noise_of(0, SAMPLING, 0))
    assert found.completion_ids.shape == (8, 4, 3)


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_nothing_compiles_after_the_first_step_also_when_resumed(tmp_path, devices):
    config = with_options(CONFIG, steps=3, devices=devices, checkpoint_every=1)
    programs = make_programs(POLICY, TASK, config)
    train(POLICY, PARAMS, TASK, config, open_run(tmp_path), programs=programs)
    longer, run = with_options(config, steps=6), open_run(tmp_path)
    train(POLICY, PARAMS, TASK, longer, run, programs=make_programs(POLICY, TASK, config))
    # What another test compiled is read from the cache.
    counts = [line["compilations"] + line["cache_reads"] for line in run.lines("times.jsonl")]
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
        train(POLICY, PARAMS, TASK, config, run)
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
    kept = masked(batch, with_options(CONFIG, mask_truncated=True).loss, None)
    np.testing.assert_array_equal(kept.completion_mask, [[[True, True], [False, False]]])
    np.testing.assert_array_equal(kept.advantages, batch.advantages)


def test_a_mask_that_would_leave_nothing_is_refused():
    with pytest.raises(ValueError, match="mask_truncated"):
        make_programs(POLICY, TASK._replace(open_ended=True), with_options(CONFIG, mask_truncated=True))


@pytest.mark.slow
def test_a_run_with_correction_entropy_bonus_and_mask_learns(tmp_path):
    changes = {"correction": "icepop", "mask_truncated": True, "entropy_coef": 1e-3, "preset": "sapo"}
    config = with_options(CONFIG, steps=20, max_tokens=6, **changes)
    run = open_run(tmp_path, config)
    train(POLICY, PARAMS, TASK, config, run)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    first, last = (np.mean([line["reward"] for line in part]) for part in (lines[:5], lines[-5:]))
    assert last > first + 0.3
    left = [line["correction"] for line in lines if line["truncated_share"] < 1]
    assert left == pytest.approx([1] * len(left), abs=1e-4)
    assert len(left) > 1


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

    def recorded(state, frozen, reference, batch, given, clock):
        state, learned = programs.learn(state, frozen, reference, batch, given, clock)
        seen.append((to_host(given), to_host(learned.advantages)))
        return state, learned

    run = open_run(path, config)
    train(POLICY, PARAMS, task, config, run, programs=programs._replace(learn=recorded), reward=rewards)
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
    def best_of_both(rewards, batch, kl_coef, axis_name):
        by_row = jnp.nanmax(rewards.components * rewards.weights, axis=-1)
        return Advantages(batch._replace(advantages=by_row), by_row, {})

    def change(method):
        return method._replace(advantages=best_of_both)

    for rewards, advantages in judged_steps(tmp_path, programs.sampler, COMPONENTS, change=change)[0]:
        parts = np.nan_to_num(rewards.components)
        np.testing.assert_allclose(advantages, np.maximum(0.7 * parts[..., 0], 0.3 * parts[..., 1]), rtol=1e-6)


def test_a_component_that_is_nan_stops_the_run(tmp_path, programs):
    broken = COMPONENTS | {"threes": Component(lambda examples, texts: [float("nan")] * len(texts))}
    with pytest.raises(FloatingPointError):
        judged_steps(tmp_path, programs.sampler, broken, config=with_options(BY_COMPONENT, max_skipped=1))


@pytest.mark.parametrize("reward", [says_three, {"a": Component(says_three), "b": Component(says_three, 0.0)}])
def test_one_reward_has_no_components_to_compare(reward):
    with pytest.raises(ValueError, match="fewer than two of this task have a weight"):
        make_programs(POLICY, TASK._replace(reward=reward), BY_COMPONENT)


# ---- guards


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"group_size": 1}, "group_size"),
        ({"num_prompts": 6, "microbatches": 4}, "num_prompts"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature_spread": float("inf")}, "temperature"),
        ({"weight_decay": float("inf")}, "weight_decay"),
        ({"preset": "rloo", "kl_target": float("inf")}, "kl_target"),
        ({"temperature": 0.5, "temperature_spread": -0.6}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"kl_coef": -0.1}, "kl_coef"),
        ({"epsilon_low": -0.1}, "epsilon_low"),
        ({"epsilon_low": 2.0}, "epsilon_low is 2.0: a ratio is at least 0, so set it to at most 1"),
        ({"preset": "dppo", "correction": "token"}, "takes its ratio against the sampler already"),
        ({"preset": "sapo", "epsilon_low": 0.1}, "sapo has no such constant"),
        ({"correction": "geometric", "top_k": 3}, "geometric"),
        ({"preset": "gpg", "epochs": 2}, "gpg has no ratio"),
        ({"entropy_coef": float("nan")}, "entropy_coef"),
        ({"preset": "pass_at_k", "group_size": 2}, "k is 4"),
        ({"advantages_of": "components", "max_rollouts": 2}, "dynamic sampling"),
        ({"advantages_of": "components", "preset": "rloo"}, "KL off the sum"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"adam_epsilon": 0.0}, "adam_epsilon"),
        ({"steps": 0}, "steps"),
        ({"seed": -1}, "seed"),
        ({"eval_every": -1}, "eval_every"),
        ({"eval_samples": 0}, "eval_samples"),
        ({"kl_target": 6.0}, "kl_target"),
        ({"preset": "rloo", "kl_target": 0.0}, "kl_target"),
        ({"preset": "rloo", "kl_target": 6.0, "kl_horizon": 16}, "kl_horizon"),
        ({"ref_sync_steps": 99}, "ref_sync_steps"),
        ({"kl_coef": 0.0, "ref_sync_steps": 1}, "ref_sync_steps"),
        ({"ref_mixup_alpha": 0.5}, "ref_mixup_alpha"),
        ({"ref_sync_steps": 1, "ref_mixup_alpha": 0.0}, "ref_mixup_alpha"),
        ({"microbatches": -1}, "microbatches is -1"),
        ({"steps": 2, "profile_steps": 1}, "set steps to 3 or more"),
        ({"epsilon_high": None}, "epsilon_high is None, but preset grpo needs it: 0.2"),
        ({"preset": "sapo", "delta": 4.0}, "delta is 4.0, but preset sapo has no such constant"),
        ({"top_entropy": 0.0}, "top_entropy"),
        ({"top_entropy": 1.1}, "top_entropy"),
        ({"off_policy_threshold": 0.0}, "off_policy_threshold"),
        ({"kl_bias_correction": True, "kl_coef": 0.0}, "kl_bias_correction"),
        ({"kl_bias_correction": True, "preset": "rloo"}, "kl_bias_correction"),
        ({"kl_bias_correction": True, "divergence": "full"}, "kl_bias_correction"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(changes, word):
    with pytest.raises(ValueError, match=word) as error:
        validate(with_options(CONFIG, **changes))
    assert "\n" not in str(error.value)


def test_the_log_ratio_of_gmpo_has_no_least_value():
    validate(with_options(CONFIG, preset="gmpo", epsilon_low=2.0))


def test_more_tokens_to_choose_from_than_there_are_is_refused():
    with pytest.raises(UsageError, match=f"top_k is 999, but the model has {TASK.vocab_size} tokens"):
        make_programs(POLICY, TASK, with_options(CONFIG, top_k=999))


def test_infinite_rewards_print_no_warnings_of_numpy(tmp_path, programs):
    def reward(examples, texts):
        return [(math.inf, -math.inf, 1e300, 1.0)[i % 4] for i in range(len(texts))]

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(FloatingPointError):
            train(POLICY, PARAMS, TASK, CONFIG, open_run(tmp_path), programs=programs, reward=reward)
        samples = sample_heldout(
            programs.sampler, PARAMS, TASK, num_prompts=8, group_size=4, temperature=1.0, seed=0, samples=3
        )
        held = evaluate(samples, TASK._replace(reward=reward))
        summary(held)
        paired_difference(prompt_means(held), prompt_means(held))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise RuntimeError('no such thing')", "no such thing"),
        ("return [1.0]", "returned 1 rewards for"),
        ("return ['1'] * len(completions)", "a reward is of type str"),
    ],
)
def test_a_reward_that_fails_on_every_completion_ends_the_run(tmp_path, programs, body, said):
    (tmp_path / "bad.py").write_text(f"def f(examples, completions):\n    {body}\n")
    with Grader(f"{tmp_path}/bad.py:f", workers=1) as grader:
        with pytest.raises(UsageError, match=f"no completion of the first rollout .* {said}") as caught:
            train(POLICY, PARAMS, TASK, CONFIG, open_run(tmp_path / "run"), programs=programs, reward=grader)
        assert "\n" not in str(caught.value)


def test_a_run_that_goes_on_is_not_ended_by_rewards_that_fail_in_one_step(tmp_path, programs):
    (tmp_path / "bad.py").write_text("def f(examples, completions):\n    raise RuntimeError('no such thing')\n")
    run = open_run(tmp_path / "run")
    train(POLICY, PARAMS, TASK, with_options(CONFIG, steps=1), run, programs=programs)
    with Grader(f"{tmp_path}/bad.py:f", workers=1) as grader:
        train(POLICY, PARAMS, TASK, with_options(CONFIG, steps=2), run, programs=programs, reward=grader)
    assert [line["step"] for line in run.lines("metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("changes", [{"learning_rate": 1e-3, "kl_coef": 0.1}, {"decay": "linear", "steps": 9}])
def test_programs_of_another_run_are_refused(tmp_path, changes):
    programs = make_programs(POLICY, TASK, with_options(CONFIG, **changes))
    with pytest.raises(ValueError, match=f"another .*{next(iter(changes))}"):
        train(POLICY, PARAMS, TASK, CONFIG, open_run(tmp_path), programs=programs)


def test_programs_are_shared_by_phases_that_differ_on_the_host(programs):
    check_programs(programs, with_options(CONFIG, steps=9, seed=1, max_rollouts=2, eval_every=1, max_skipped=1))


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(ValueError, match="devices is 99"):
        make_programs(POLICY, TASK, with_options(CONFIG, devices=99))


@pytest.mark.parametrize("changes", [{"eos_ids": ()}, {"vocab_size": 5}])
def test_a_task_whose_completions_cannot_end_is_refused(changes):
    with pytest.raises(ValueError, match=r"EOS"):
        guards.check_task(TASK._replace(**changes))


def test_texts_longer_than_the_model_was_trained_on_are_warned_of(tmp_path, capsys):
    run = open_run(tmp_path)
    guards.check_length(run, 8, 8)
    guards.check_length(run, 9, None)
    assert not capsys.readouterr().out
    guards.check_length(run, 9, 8)
    assert "longer than the 8" in " ".join(capsys.readouterr().out.split())


def test_prompts_padded_on_the_right_are_refused(tmp_path, programs):
    task = TASK._replace(prompts=lambda step: prompts(step)._replace(mask=prompts(step).mask[:, ::-1]))
    with pytest.raises(ValueError, match="padded on the left"):
        train(POLICY, PARAMS, task, CONFIG, open_run(tmp_path), programs=programs)


def test_a_kl_without_reference_is_refused():
    batch = Batch(*jnp.zeros((5, 1, 1, 1)))
    with pytest.raises(ValueError, match="no ref_logprobs"):
        grpo_loss_fn(POLICY, CONFIG.loss)(PARAMS, batch)


def test_rollouts_that_teach_nothing_are_warned_of_once(tmp_path, programs, capsys):
    config = with_options(CONFIG, steps=3)
    train(POLICY, PARAMS, TASK, config, open_run(tmp_path), programs=programs, reward=lambda e, t: [1.0] * len(t))
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("all rewards are equal") == 1
    assert "ratio" not in said


def test_completions_that_never_end_are_warned_of(tmp_path, capsys):
    likeliest = (jnp.tanh(PARAMS["before"]) @ PARAMS["after"].T).argmax(-1).tolist()
    never = next(token for token in range(V) if token not in likeliest)
    task = TASK._replace(eos_ids=(never,), pad_id=0)
    config = with_options(CONFIG, steps=1, max_tokens=1, top_k=1)
    train(POLICY, PARAMS, task, config, open_run(tmp_path), reward=says_three)
    assert "no completion ended" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("far", [{"first_ratio_deviation": 2.0}, {"first_sampler_mismatch": 1.1}])
def test_a_ratio_off_one_is_warned_of(tmp_path, capsys, far):
    run, close = open_run(tmp_path), {"first_ratio_deviation": 0.3, "first_sampler_mismatch": 1.01}
    guards.check_first_ratio(run, close)
    assert not capsys.readouterr().out
    guards.check_first_ratio(run, close | far)
    guards.check_first_ratio(run, close | far)
    assert capsys.readouterr().out.count("ratio is off 1") == 1


def test_gradients_that_are_not_finite_are_skipped_dumped_and_stop_the_run(tmp_path, programs):
    config = with_options(CONFIG, max_skipped=2)
    run = open_run(tmp_path)
    with pytest.raises(FloatingPointError, match="2 times in a row"):
        train(POLICY, PARAMS, TASK, config, run, programs=programs, reward=lambda e, t: [float("nan")] * len(t))
    dumped = np.load(tmp_path / "skipped_grpo_000000_1.npz")
    assert np.isnan(dumped["advantages"]).all()
    assert not any("rewards are equal" in line["message"] for line in run.lines("warnings.jsonl"))
    assert [line["skipped"] for line in run.lines()] == [1, 2]  # of the step that stopped it too


def test_a_reward_of_the_wrong_length_is_refused(tmp_path, programs):
    with pytest.raises(ValueError, match="returned 1 rewards for 32 completions"):
        train(POLICY, PARAMS, TASK, CONFIG, open_run(tmp_path), programs=programs, reward=lambda e, t: [1.0])
