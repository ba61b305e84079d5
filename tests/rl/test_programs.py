"""Programs of a run: how rows are mapped and summed over devices, and how many programs a run compiles."""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigrams import POLICY, TASK, train_grpo
from rl_helpers import assert_close, assert_same_gradient, open_run

from grpo_jax.config import recipe, with_options
from grpo_jax.data.types import Component
from grpo_jax.devices import jit_on_devices, map_rows, sum_rows, to_devices, to_numpy
from grpo_jax.rl.grpo import make_programs

NOISE = np.random.default_rng(0)
ROWS = {name: NOISE.normal(size=(8, 3)).astype(np.float32) for name in ("x", "y")}
WEIGHTS = {name: NOISE.normal(size=(3, 4)).astype(np.float32) for name in ("first", "second")}


def outputs(weights, rows):
    """Arrays of rows that do not depend on each other."""
    hidden = jnp.tanh(rows["x"] @ weights["first"])
    return {"hidden": hidden, "number": jnp.sum(hidden * (rows["y"] @ weights["second"]), axis=-1)}


def sums(weights, rows):
    """The gradient of a sum over rows, that sum, and a maximum."""

    def loss(weights):
        numbers = outputs(weights, rows)["number"] ** 2
        return jnp.sum(numbers), jnp.max(numbers)

    (total, largest), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
    return (gradients, total), largest


def test_mapped_rows_of_several_trees_are_those_of_one_call():
    def scaled(weights, rows, factors):
        return jax.tree.map(lambda x: (x.T * factors["factor"]).T, outputs(weights, rows))

    trees = ROWS, {"factor": np.arange(8, dtype=np.float32)}
    actual = jit_on_devices(map_rows(scaled, 4), 0, devices=4)(WEIGHTS, *to_devices(trees, 4))
    assert all(len(x.sharding.device_set) == 4 for x in jax.tree.leaves(actual))
    assert_close(to_numpy(actual), to_numpy(jax.jit(scaled)(WEIGHTS, *trees)), rtol=1e-5, atol=1e-6)


def test_summed_rows_have_the_gradient_and_the_maximum_of_all_rows():
    (gradients, total), largest = to_numpy(jit_on_devices(sum_rows(sums, 4), devices=4)(WEIGHTS, to_devices(ROWS, 4)))
    (expected, expected_total), expected_largest = to_numpy(jax.jit(sums)(WEIGHTS, ROWS))
    assert_same_gradient(expected, gradients)
    np.testing.assert_allclose([total, largest], [expected_total, expected_largest], rtol=1e-6)


# ---- programs of a run

CONFIG = recipe(
    "grpo", steps=4, num_prompts=8, group_size=4, max_tokens=3, kl_coef=0.1, minibatches=2, epochs=2, checkpoint_every=2
)
# How often each function is compiled, by the names that `make_method_programs` and `make_sampler` give them.
PROGRAMS = {"sample": 1, "score": 1, "learn": 1, "initial_state": 1}


def count_compilations(caplog) -> dict[str, int]:
    """Returns how often JAX compiled each function, or read it from the cache, by the function's name."""
    names = re.findall(r"Finished XLA compilation of jit\((\w+)\)", caplog.text)
    return {name: names.count(name) for name in set(names)}


def test_prompts_are_made_once_a_step(tmp_path):
    asked, config = [], with_options(CONFIG, steps=6)
    task = TASK._replace(prompts=lambda step: asked.append(step) or TASK.prompts(step))
    train_grpo(task, config, open_run(tmp_path, config))
    assert all(asked.count(step) == 1 for step in range(1, config.steps))
    assert asked.count(0) < config.steps  # the first ones also for their shapes


@pytest.fixture
def logged_compilations():
    jax.config.update("jax_log_compiles", True)  # in all threads, unlike `jax.log_compiles`
    yield
    jax.config.update("jax_log_compiles", False)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"staleness": 1, "ref_sync_steps": 2},
        pytest.param({"max_rollouts": 2, "advantages_of": "spans"}, marks=pytest.mark.slow),
        pytest.param({"devices": 2}, marks=pytest.mark.slow),
        pytest.param({"devices": 4, "parallel": "mesh", "advantages_of": "components"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_that_is_resumed_compiles_each_program_once(tmp_path, caplog, logged_compilations, changes):
    config = with_options(CONFIG, **changes)
    by_component = {"threes": Component(TASK.reward), "twice": Component(TASK.reward, 2.0)}
    task = TASK._replace(reward=by_component) if config.loss.advantages_of == "components" else TASK
    programs = make_programs(POLICY, task, config)
    run = open_run(tmp_path, config)
    with caplog.at_level(logging.WARNING, logger="jax"):
        train_grpo(task, config, run, programs, until=3)  # a step past its checkpoint
        train_grpo(task, config, open_run(tmp_path, config), programs)
    assert len(run.lines()) == config.steps
    assert PROGRAMS.items() <= count_compilations(caplog).items()
