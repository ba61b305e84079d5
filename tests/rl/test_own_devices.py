"""Devices that only sample: the way of parameters and rollouts, and runs with the numbers of runs without them."""

import random
import time
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import pytest
import test_episodes as episode_tests
from bigrams import train_grpo
from rl_helpers import RUN, assert_same_runs, open_run, recording
from tiny import (
    digit_prompts,
    digit_task,
    random_params,
    randomly_adapted,
    recorder,
    says_three,
    slow_unless,
    tiny_config,
)

from grpo_jax.config import GRPOConfig, with_options
from grpo_jax.devices import Devices, Mesh, devices_of, place, sampling_devices, shardings, to_devices, to_numpy
from grpo_jax.models.policy import decoder_policy
from grpo_jax.rl import own_devices
from grpo_jax.rl.own_devices import balance_devices, make_give, make_take, moving_bytes
from grpo_jax.rl.programs import make_programs
from grpo_jax.rl.source import Sampler
from grpo_jax.runs.folder import WAIT_SHARES
from grpo_jax.sampling.sampler import Completions

MODEL = tiny_config(8, hidden_size=24, intermediate_size=48, num_attention_heads=4, num_key_value_heads=4, head_dim=4)
POLICY, TASK = decoder_policy(MODEL), digit_task(says_three)


def listed(first: int, end: int, mesh: Mesh | None = None) -> Devices:
    return Devices(tuple(jax.devices()[first:end]), mesh)


# The trainer's devices, the sampler's, and whether each side needs memory for the way of parameters.
ROUTES = {
    "replicas": (listed(0, 4), listed(4, 8), False, False),
    "one to one": (listed(0, 1), listed(1, 2), False, False),
    "one to three": (listed(0, 1), listed(1, 4), False, False),
    "parts to replicas": (listed(0, 4, Mesh(1, 4, 1)), listed(4, 8), False, True),
    "replicas to parts": (listed(0, 4), listed(4, 8, Mesh(1, 2, 2)), True, False),
    "same parts": (listed(0, 4, Mesh(1, 2, 2)), listed(4, 8, Mesh(1, 2, 2)), False, False),
    "along other axes": (listed(0, 4, Mesh(1, 4, 1)), listed(4, 8, Mesh(1, 1, 4)), True, True),
    "to larger parts": (listed(0, 4, Mesh(1, 4, 1)), listed(4, 6, Mesh(1, 2, 1)), False, True),
    "to smaller parts": (listed(0, 4, Mesh(2, 2, 1)), listed(4, 8, Mesh(1, 4, 1)), True, False),
    "in thirds and halves": (listed(0, 6, Mesh(2, 3, 1)), listed(6, 8, Mesh(1, 2, 1)), True, True),
    "four to one": (listed(0, 4, Mesh(1, 4, 1)), listed(4, 5), False, True),
}


@contextmanager
def no_host():
    """A block in which reading an array on the host fails, as `jax.device_put` does between some layouts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(jax.numpy.zeros(1)), "_value", property(lambda _: pytest.fail("it went through the host")))
        yield


@pytest.mark.parametrize(("training", "sampling", "cuts", "joins"), ROUTES.values(), ids=ROUTES)
def test_copies_have_the_samplers_layout_and_outlive_the_original(training, sampling, cuts, joins):
    original = jax.tree.map(np.array, randomly_adapted(random_params(MODEL)))
    assert tuple(map(bool, moving_bytes(original, training, sampling))) == (cuts, joins)
    params, take = place(original, training), make_take(training, sampling)
    stepped = params._replace(adapters=jax.tree.map(lambda x: 2 * x, params.adapters))
    with no_host():
        copied = take(params)
        again = take(stepped)
    assert jax.tree.map(lambda x: x.sharding, copied) == shardings(copied, sampling)
    jax.tree.map(lambda x: x.delete(), (params, stepped.adapters))
    jax.tree.map(np.testing.assert_array_equal, to_numpy(copied), original)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, 2 * y), to_numpy(again.adapters), original.adapters)
    bases = zip(jax.tree.leaves(copied.base), jax.tree.leaves(again.base), strict=True)
    assert all(x is y for x, y in bases)  # it moves only once


@pytest.mark.parametrize("name", ["parts to replicas", "same parts", "four to one"])
def test_what_no_host_has_whole_is_gathered_first(name, monkeypatch):
    training, sampling, *_ = ROUTES[name]
    params = place(random_params(MODEL), training)
    monkeypatch.setattr(own_devices, "needs_gather", lambda training: True)
    most = max(x.nbytes for x in jax.tree.leaves(params))
    monkeypatch.setattr(own_devices, "IN_FLIGHT", most)  # and waits for some
    assert moving_bytes(params, training, sampling)[0] == 2 * most
    with no_host():
        copied = make_take(training, sampling)(params)
    assert jax.tree.map(lambda x: x.sharding, copied) == shardings(copied, sampling)
    jax.tree.map(np.testing.assert_array_equal, to_numpy(copied), to_numpy(params))


@pytest.mark.parametrize(("training", "sampling", "cuts", "joins"), ROUTES.values(), ids=ROUTES)
def test_rollouts_arrive_in_the_trainers_layout(training, sampling, cuts, joins):
    del cuts, joins
    rows = {"ids": np.arange(24 * 3).reshape(24, 3), "ended": np.arange(24) % 3 == 0, "none": None}
    placed, give = to_devices(rows, sampling), make_give(sampling, training)
    with no_host():
        given = give(placed)
    assert jax.tree.map(lambda x: x.sharding, given) == shardings(given, training, 0)
    jax.tree.map(np.testing.assert_array_equal, to_numpy(given), rows)


# ---- runs

CONFIG = with_options(RUN, steps=4, num_prompts=8, kl_coef=0.1, checkpoint_every=0)
PLACES: dict[str, dict[str, Any]] = {
    "four and four": {"devices": 8, "sampler_devices": 4},
    "two and two": {"devices": 4, "sampler_devices": 2, "sampler_tensor": 2},
    "meshes": {"devices": 8, "sampler_devices": 4, "fsdp": 2, "tensor": 2, "sampler_fsdp": 2, "sampler_tensor": 2},
    "fsdp to replicas": {"devices": 8, "sampler_devices": 4, "fsdp": 4},
    "six and two": {"devices": 8, "sampler_devices": 2, "fsdp": 3, "num_prompts": 12, "sampler_fsdp": 2},
}


def without_sampler_devices(config: GRPOConfig) -> GRPOConfig:
    """Returns the same run on only the devices that train."""
    count = config.devices - config.num_sampler_devices
    return with_options(config, devices=count, sampler_devices=0, sampler_fsdp=1, sampler_tensor=1)


def trained(folder, config: GRPOConfig, sampler: Sampler | None = None):
    """Returns the gradients of all steps, and the batches that they learned from."""
    task = digit_task(says_three, lambda step: digit_prompts(step, config.sampling.num_prompts))
    make = {"sampler": sampler, "method": lambda method: method._replace(optimizer=recorder(config.steps))}
    programs, seen = make_programs(POLICY, task, config, **make), list[Any]()
    state = train_grpo(task, config, open_run(folder, config), recording(programs, seen), params=random_params(MODEL))
    return to_numpy(state.opt_state.gradients), [batch for batch, *_ in seen]


def replaying(batches, devices: Devices) -> Sampler:
    """A sampler that returns the completions of these steps."""

    def draw(params, prompts, numbers, temperature, noise) -> Completions:
        del params, prompts, numbers, temperature
        batch = batches[min(int(noise[2]), len(batches) - 1)]
        fields = {name: getattr(batch, name, None) for name in Completions._fields}
        return to_devices(Completions(**fields), devices)

    return Sampler(draw, devices)


RUNS = [(name, staleness) for name in PLACES for staleness in (0, 1, 2)]


@pytest.mark.parametrize(("name", "staleness"), slow_unless([("four and four", 1)], RUNS))
def test_gradients_are_those_of_the_trainers_devices_alone(tmp_path, name, staleness):
    config = with_options(CONFIG, staleness=staleness, **PLACES[name])
    gradients, batches = trained(tmp_path / "own", config)
    alone = without_sampler_devices(config)
    assert devices_of(alone).all == devices_of(config).all
    assert not set(devices_of(config).all) & set(sampling_devices(config).all)
    replayed, seen = trained(tmp_path / "replayed", alone, replaying(batches, devices_of(alone)))
    for batch, other in zip(batches, seen, strict=True):
        np.testing.assert_array_equal(batch.completion_ids, other.completion_ids)
    for x, y in zip(jax.tree.leaves(gradients), jax.tree.leaves(replayed), strict=True):
        for step in range(config.steps):
            assert np.linalg.norm(y[step]) > 0
            assert np.linalg.norm(x[step] - y[step]) <= 1e-6 * np.linalg.norm(y[step])
    _, free = trained(tmp_path / "alone", alone)
    assert ties(batches, free) <= 1


def ties(batches, others) -> int:
    """Counts the completions that differ, up to the first step in which any does: rounding decided between two tokens,
    and what follows depends on it."""
    for batch, other in zip(batches, others, strict=True):
        if differ := int((batch.completion_ids != other.completion_ids).any(-1).sum()):
            return differ
    return 0


def delayed(reward):
    """Returns the reward after a wait of random length."""
    dice = random.Random()

    def wait_and_score(*args):
        time.sleep(0.05 * dice.random())
        return reward(*args)

    return wait_and_score


def test_delays_in_grading_change_no_bit(tmp_path):
    config = with_options(CONFIG, steps=6, staleness=1, eval_every=3, correction="token", **PLACES["four and four"])
    programs, runs = make_programs(POLICY, TASK, config), list[Any]()
    for name in ("first", "second"):
        task, run = TASK._replace(reward=delayed(says_three)), open_run(tmp_path / name, config)
        runs.append((train_grpo(task, config, run, programs, params=random_params(MODEL)), run))
    assert_same_runs(*runs)
    shares = [line[name] for line in runs[0][1].lines("times.jsonl") for name in WAIT_SHARES if name in line]
    assert len(shares) >= 8
    assert all(0 <= share <= 1 for share in shares)


def test_the_balance_is_where_nobody_would_wait():
    """A sampler of 4 devices that works half of the time has the work of 2, and a trainer of 4 that of 3.2."""
    assert "about 3 sampler_devices of 8, where there are 4" in balance_devices(4, 4, 0.2, 0.5)
    assert "about 1 sampler_devices of 4" in balance_devices(1, 3, 0.0, 1.0)
    assert "about 3 sampler_devices of 4" in balance_devices(2, 2, 1.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_episodes_and_dynamic_sampling_use_the_samplers_devices(tmp_path, staleness):
    """With the numbers of a run without these. A bigram has no sums that rounding could change."""
    episodes = episode_tests.PLAYED, with_options(episode_tests.CONFIG, staleness=staleness)
    redrawn = digit_task(says_three), with_options(RUN, staleness=staleness, max_rollouts=3)
    for name, (task, config) in {"episodes": episodes, "redrawn": redrawn}.items():
        own = with_options(config, devices=4, sampler_devices=2, eval_every=2)
        lines = []
        for options in (own, without_sampler_devices(own)):
            run = open_run(tmp_path / f"{name}-{options.devices}", options)
            train_grpo(task, options, run, evaluate=lambda params, step: {})
            lines.append(run.lines("rollouts.jsonl"))
        assert [line["completions"] for line in lines[0]] == [line["completions"] for line in lines[1]]
        assert len({str(line["completions"]) for line in lines[0]}) > 4
