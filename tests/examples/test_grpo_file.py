"""Checks that the example has the trainer's gradient, resumes to the bit, learns, and stays short."""

import ast
import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import recorder, whole_prompts

from grpo_jax.config import WHOLE, recipe
from grpo_jax.models.params.tree import split
from grpo_jax.models.policy import Policy
from grpo_jax.rl.grpo import grpo_method
from grpo_jax.rl.types import RewardArrays
from grpo_jax.rl.update import learn
from grpo_jax.step import Batch, init_state

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples/grpo.py"
spec = importlib.util.spec_from_file_location("grpo_example", FILE)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
example.model = example.Transformer(width=16, layers=1)  # what differs from it has no part in what is tested here
N, G, P, T, V = example.N, example.group_size, example.P, example.T, example.V
RATE = 1.0


def test_example_is_short_and_imports_only_allowed_packages():
    assert len(FILE.read_text().splitlines()) <= 200
    modules = set()
    for node in ast.walk(ast.parse(FILE.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    ours = {module for module in modules if module.startswith("grpo_jax")}
    others = {module.split(".")[0] for module in modules - ours} - sys.stdlib_module_names
    assert (ours, others) == ({"grpo_jax.functional"}, {"flax", "jax", "numpy", "optax", "orbax"})


# ---- the same rollout, given to the example and to the trainer


def hidden_states(params, tokens):
    """Returns what the unembedding is multiplied with."""
    _, sown = example.model.apply(params, tokens, capture_intermediates=lambda module, _: module.name == "last_norm")
    return sown["intermediates"]["last_norm"]["__call__"][0]


def states(params, rows):
    prompts = jnp.repeat(rows.prompt.ids[:, None], rows.ids.shape[1], axis=1)
    return hidden_states(params, jnp.concatenate([prompts, rows.ids], axis=-1))[:, :, P - 1 : -1], None


POLICY = Policy(example.initial_state, lambda params: params["params"]["unembedding"]["kernel"].T, states, None)


@pytest.fixture(scope="module")
def rollout():
    """(parameters, a batch of the example) whose reference is not the policy."""
    state = example.initial_state(jnp.zeros(jax.device_count(), int))
    state = state._replace(ref_params=jax.tree.map(lambda x: 1.2 * x, state.params))
    rng = np.random.default_rng(0)
    prompts, noise = rng.integers(0, 10, (N, P)), rng.gumbel(size=(N, G, T, V)).astype(np.float32)
    batch = example.rollout(state, example.shard(prompts), example.shard(noise))
    rewards, _ = example.score(prompts, batch, example.sorting_reward, rng)
    batch = {name: np.asarray(values).reshape(N, *values.shape[2:]) for name, values in batch.items()}
    batch["advantages"] = np.asarray(example.F.group_advantages(rewards))
    return jax.device_get(state), batch, rewards


gradient = jax.jit(jax.grad(example.loss_fn, has_aux=True))


def gradients_of_example(params, batch, updates):
    """Returns the gradients and metrics of steps of plain descent."""
    weights = example.F.sequence_mean_weights(batch["completion_mask"])
    steps = []
    for _ in range(updates):
        steps.append(gradient(params, batch, weights))
        params = jax.tree.map(lambda x, y: x - RATE * y, params, steps[-1][0])
    return zip(*steps, strict=True)


def gradients_of_trainer(params, batch, rewards, updates):
    constants = {name: getattr(example, name) for name in ("group_size", "kl_coef", "epsilon_low", "epsilon_high")}
    config = recipe("grpo", num_prompts=N, max_tokens=T, epochs=updates, piece_tokens=WHOLE, **constants)
    method = grpo_method(POLICY, config)._replace(optimizer=recorder(updates, RATE))
    trained, frozen = split({"policy": params})
    as_tokens = {name: batch[name] for name in ("completion_ids", "completion_mask", "old_logprobs", "ref_logprobs")}
    mine = Batch(whole_prompts(batch["tokens"][:, 0, :P]), **as_tokens, temperature=np.ones((N, G), np.float32))
    program = jax.jit(lambda *arrays: learn(method, config, arrays[0], frozen, *arrays[1:]))
    clock = np.uint32(0), np.uint32(0)
    state, _ = program(init_state(trained, method.optimizer), mine, RewardArrays(rewards, np.ones((N, G), bool)), clock)
    recorded = state.opt_state.gradients["policy"]
    return [jax.tree.map(lambda x, i=i: x[i], recorded) for i in range(updates)]


def test_gradients_are_those_of_the_trainer(rollout):
    state, batch, rewards = rollout
    gradients, metrics = gradients_of_example(state.params, batch, 2)
    total, count = metrics[1]["clip_high"]
    assert rewards.std() > 0
    assert 0 < total < count  # the second update clips some tokens
    for ours, theirs in zip(gradients, gradients_of_trainer(state.params, batch, rewards, 2), strict=True):
        for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert np.linalg.norm(x - y) <= 1e-5 * np.linalg.norm(y)


def test_sampled_completions_end_at_most_once(rollout):
    state, batch, _ = rollout
    ids, mask = batch["completion_ids"], batch["completion_mask"]
    for row, is_token in zip(ids.reshape(-1, T), mask.reshape(-1, T), strict=True):
        ends = np.flatnonzero(row == example.EOS)
        assert is_token.sum() == (ends[0] + 1 if len(ends) else T)
    assert (np.diff(mask.astype(int)) <= 0).all()
    assert -batch["old_logprobs"].mean() > 1  # not the likeliest tokens
    assert np.unique(ids[0], axis=0).shape[0] > 1
    assert state.params is not state.ref_params


def test_rewards_by_hand():
    reward = example.sorting_reward
    assert reward([3, 1, 4, 1, 5], [1, 1, 3, 4, 5], None) == 1
    assert reward([3, 1, 4, 1, 5], [1, 1, 3, 4], None) == 4 / 5
    assert reward([3, 1, 4, 1, 5], [1, 1, 3, 4, 5, 9], None) == 5 / 6
    assert reward([3, 1, 4, 1, 5], [], None) == 0


# ---- runs


def states_equal(x, y):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True))


@pytest.mark.slow
def test_it_resumes_to_the_bit(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(example, "reference_steps", 3)
    calls = iter(range(10**6))

    def stops_in_step_4(prompt, completion, rng):
        if next(calls) == 4 * N * G + 9:
            raise KeyboardInterrupt
        return example.sorting_reward(prompt, completion, rng)

    whole = example.train(6, example.sorting_reward, tmp_path / "whole", save_steps=2)
    with pytest.raises(KeyboardInterrupt):
        example.train(6, stops_in_step_4, tmp_path / "stopped", save_steps=2)
    resumed = example.train(6, example.sorting_reward, tmp_path / "stopped", save_steps=2)
    assert states_equal(whole, resumed)
    # It is done: another call changes nothing, and more steps continue.
    assert states_equal(whole, example.train(6, example.sorting_reward, tmp_path / "stopped", save_steps=2))
    longer = example.train(7, example.sorting_reward, tmp_path / "stopped", save_steps=2)
    assert states_equal(example.train(7, example.sorting_reward, tmp_path / "longer", save_steps=2), longer)
    assert "step   6 reward" in capsys.readouterr().out


def test_devices_add_up(rollout):
    """Adam's first moment is linear in the clipped gradients."""
    state, batch, _ = rollout
    sharded = {name: example.shard(values) for name, values in batch.items()}
    updated, _ = example.update(state, sharded)
    params, opt_state = state.params, state.opt_state
    weights = example.F.sequence_mean_weights(batch["completion_mask"])

    @jax.jit
    def step(params, opt_state, gradients):
        changes, opt_state = example.optimizer.update(gradients, opt_state)
        return optax.apply_updates(params, changes), opt_state

    for _ in range(example.updates_per_rollout):
        params, opt_state = step(params, opt_state, gradient(params, batch, weights)[0])
    moments = [jax.tree.leaves(optax.tree.get(it, "mu")) for it in (updated.opt_state, opt_state)]
    for x, y in zip(*moments, strict=True):
        assert np.linalg.norm(x - y) <= 1e-3 * np.linalg.norm(y)


def start(folder, *options, devices=1):
    flags = f"--xla_force_host_platform_device_count={devices}"
    env = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(FILE), "--folder", str(folder), *options]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def numbers(line, name):
    return float(re.search(rf"{name} (\S+)", line)[1])


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_killed_runs_resume_with_identical_lines(tmp_path, devices):
    options = "--steps", "121"
    whole = start(tmp_path / "whole", *options, devices=devices).communicate()[0].splitlines()
    assert numbers(whole[0], "sorted") < 0.01
    assert numbers(whole[-1], "sorted") > 0.5
    with start(tmp_path / "killed", *options, devices=devices) as run:
        for line in run.stdout:
            if line.startswith("step  80"):
                run.send_signal(signal.SIGKILL)
    resumed = start(tmp_path / "killed", *options, devices=devices).communicate()[0].splitlines()
    assert resumed == whole[-len(resumed) :]
    assert 0 < len(resumed) < len(whole)


@pytest.mark.slow
def test_random_rewards_teach_nothing(tmp_path):
    lines = start(tmp_path, "--steps", "101", "--reward", "random").communicate()[0].splitlines()
    assert numbers(lines[-1], "sorted") < 0.01
