"""What a run compiles, what it moves between host and devices, and where it may be cut off or skips."""

import itertools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigrams import POLICY, TASK, train_grpo
from rl_helpers import RUN, Stop, assert_same_runs, open_run, run_programs, stopping
from tiny import digit_prompts as prompts, says_three, slow_unless

from grpo_jax.config import recipe, with_options
from grpo_jax.data.types import Component
from grpo_jax.devices import to_devices
from grpo_jax.rl.programs import make_programs
from grpo_jax.rl.update import minibatch_order
from grpo_jax.runs.checkpoint import Checkpoints
from grpo_jax.runs.folder import RunFolder

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


RESUMED_RUNS = [
    {},
    {"staleness": 1, "ref_sync_steps": 2},
    pytest.param({"max_rollouts": 2, "advantages_of": "spans"}, marks=pytest.mark.slow),
    pytest.param({"devices": 2}, marks=pytest.mark.slow),
    pytest.param({"devices": 4, "parallel": "mesh", "advantages_of": "components"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("changes", RESUMED_RUNS, ids=str)
def test_resumed_runs_compile_each_program_once(tmp_path, caplog, logged_compilations, changes):
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


def test_the_callers_changes_come_last_in_order():
    def twice(method):
        return method._replace(terms=2 * method.terms)

    def only_first(method):
        return method._replace(terms=method.terms[:1])

    counts = [len(make_programs(POLICY, TASK, CONFIG, method=it).method.terms) for it in (twice, (twice, only_first))]
    assert counts == [2, 1]


# ---- what moves between host and devices

N, G, P, T = 8, 4, 3, 3
PLAIN, CUT = with_options(RUN, checkpoint_every=0, rollouts_every=0), with_options(RUN, eval_every=2)


def run_whole(path, config=PLAIN, programs=None, **options):
    run = open_run(path, config)
    return train_grpo(TASK, config, run, programs or run_programs(), **options), run


# ---- what moves

PROMPTS = N * P * (4 + 1) + 3 * 4  # ids and mask of prompts; seed, stream and index of the noise
REWARDS = N * G * (4 + 1) + 2 * 4  # rewards, and which apply; seed and step
COMPLETIONS = N * G * (T * (4 + 1) + 1)  # ids and mask; which were cut off
METRICS = 14 * 4  # numbers
DUMPED = COMPLETIONS + N * G * (T + 1) * 4  # log-probabilities and advantages too, to be read by people


def test_steps_transfer_only_prompts_rewards_completions_and_metrics(tmp_path):
    to_devices(np.ones(99))  # no part of the run
    _, run = run_whole(tmp_path)
    times = run.lines("times.jsonl")
    # The prompts that a line counts are those of the next step, which is sampled before this one is read.
    assert [line["to_devices_bytes"] for line in times[1:-1]] == [PROMPTS + REWARDS] * 4
    assert times[-1]["to_devices_bytes"] == REWARDS
    once = N * G * (4 + 4)  # numbers and temperatures of completions
    assert times[0]["to_devices_bytes"] == once + 2 * PROMPTS + REWARDS
    assert [line["to_host_bytes"] for line in times] == [COMPLETIONS + METRICS] * 6


def test_written_rollouts_also_transfer_token_numbers(tmp_path):
    _, run = run_whole(tmp_path, with_options(PLAIN, rollouts_every=4))
    moved = [line["to_host_bytes"] - COMPLETIONS - METRICS for line in run.lines("times.jsonl")]
    assert moved == [DUMPED, 0, 0, 0, DUMPED, DUMPED]  # every fourth from the first on, and the last


def test_all_transfers_to_devices_are_explicit(tmp_path):
    """Once everything is compiled, JAX refuses what is moved without `to_devices`."""
    seen = []

    def guarded(examples, texts):
        seen.append(len(texts))
        if len(seen) == 2:
            jax.config.update("jax_transfer_guard", "disallow")
        if len(seen) == 6:
            jax.config.update("jax_transfer_guard", "allow")
        return says_three(examples, texts)

    add = jax.jit(lambda x: x + 1)
    add(np.ones(3))
    with jax.transfer_guard("disallow"), pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed"):
        add(np.ones(3))
    try:
        run_whole(tmp_path, reward=guarded)
    finally:
        jax.config.update("jax_transfer_guard", "allow")
    assert len(seen) == 6


# ---- where it may be cut off


def evaluate(params, step):
    return {"norm": float(jnp.sum(params["before"]))}


def options_cut_at(place: str, number: int, run: RunFolder):
    """Returns task and options of a run that ends when a place is reached for this time, from 0."""
    options = {"reward": says_three, "evaluate": evaluate}
    if place in options:
        return TASK, options | {place: stopping(options[place], number)}
    if place == "prompts":
        return TASK._replace(prompts=stopping(prompts, number)), options
    setattr(run, place, stopping(getattr(run, place), number))
    return TASK, options


@pytest.fixture(scope="module")
def uncut(tmp_path_factory):
    return run_whole(tmp_path_factory.mktemp("uncut") / "run", CUT, evaluate=evaluate)


PLACES = ("prompts", "reward", "evaluate", "log", "log_rollout", "log_times", "checkpoints")
QUICK = {("reward", 1), *((place, 4) for place in ("prompts", "evaluate", "log", "checkpoints"))}


# Before the first checkpoint, and behind one.
@pytest.mark.parametrize(("place", "step"), slow_unless(QUICK, itertools.product(PLACES, (1, 4))))
def test_runs_cut_off_anywhere_end_the_same(tmp_path, uncut, monkeypatch, place, step):
    run = open_run(tmp_path, CUT)
    if place == "checkpoints":  # before any is saved, and between two
        with monkeypatch.context() as patch:
            patch.setattr(Checkpoints, "save", stopping(Checkpoints.save, step // 2))
            with pytest.raises(Stop):
                train_grpo(TASK, CUT, run, run_programs(), evaluate=evaluate)
    else:
        number = {"prompts": step + 1, "evaluate": step // 2, "log": step + 1}.get(place, step)
        task, options = options_cut_at(place, number, run)
        with pytest.raises(Stop):
            train_grpo(task, CUT, run, run_programs(), **options)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "grpo", "st')  # a line that a crash cut off
    assert_same_runs(run_whole(tmp_path, CUT, evaluate=evaluate), uncut)


# ---- what is skipped


def test_skipped_minibatches_are_dumped_with_their_prompts(tmp_path):
    config, calls = with_options(PLAIN, minibatches=N), iter(range(99))  # of one prompt each
    programs = make_programs(POLICY, TASK, config, sampler=run_programs().sampler)

    def broken_once(examples, texts):
        rewards = says_three(examples, texts)
        if next(calls) == 2:
            rewards[2 * G] = float("nan")  # of the third prompt
        return rewards

    _, run = run_whole(tmp_path, config, programs, reward=broken_once)
    update = np.asarray(minibatch_order(0, 2, N, epochs=1, minibatches=N)).ravel().tolist().index(2)
    assert [file.name for file in tmp_path.glob("*.npz")] == [f"skipped_grpo_000002_{update + 1}.npz"]
    dumped = np.load(next(tmp_path.glob("*.npz")))
    assert dumped["prompts"].tolist() == [2]
    assert np.isnan(dumped["advantages"]).any(-1).tolist() == [number == 2 for number in range(N)]
    np.testing.assert_array_equal(dumped["prompt.ids"], prompts(2).tokens.ids)
    assert dumped["completion_ids"].shape == (N, G, T)
    assert [line["skipped"] for line in run.lines()] == [0, 0, 1, 0, 0, 0]
