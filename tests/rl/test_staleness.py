"""Rollouts that wait in a queue: which policy sampled them, what corrections see, and exact resume."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigrams import PARAMS, POLICY, TASK, train_grpo
from rl_helpers import RUN, Stop, assert_same_runs, open_run, recording, run_programs, stopping
from tiny import digit_prompts as prompts

from grpo_jax.config import BEST_CORRECTION, with_options
from grpo_jax.devices import to_numpy
from grpo_jax.rl.programs import make_programs
from grpo_jax.rl.source import completion_numbers, group_temperatures
from grpo_jax.rl.types import SAMPLING, noise_of

STEPS, STALENESS = RUN.steps, 2
CONFIG = with_options(RUN, staleness=STALENESS, checkpoint_every=1, keep_checkpoints=STEPS, correction="token")


@pytest.fixture(scope="module")
def programs():
    return make_programs(POLICY, TASK, CONFIG, sampler=run_programs().sampler)


def trained(path, programs, config=CONFIG, **options):
    run = open_run(path, config)
    return train_grpo(TASK, config, run, programs, **options), run


@pytest.fixture(scope="module")
def whole(tmp_path_factory, programs):
    """A run that nobody stopped, and its final state."""
    return trained(tmp_path_factory.mktemp("whole"), programs)


def params_after(run, step):
    """Returns the parameters of the policy after so many steps."""
    if step <= 0:
        return PARAMS
    with run.checkpoints("grpo", keep=STEPS) as checkpoints:
        return checkpoints.restore_params(lambda _: PARAMS, step)[0]


def sampled_by(programs, params, index):
    """Returns the completions of a rollout, by its number, if these parameters sample it."""
    numbers, temperature = completion_numbers(CONFIG.sampling), group_temperatures(CONFIG.sampling)
    noise = noise_of(CONFIG.seed, SAMPLING, index)
    return to_numpy(programs.sampler.sample(params, prompts(index), numbers, temperature, noise)[0])


def test_tokens_come_from_the_policy_staleness_steps_ago(tmp_path, programs):
    seen, differs = [], []
    _, run = trained(tmp_path, recording(programs, seen))
    assert len(seen) == STEPS
    for step, (batch, _, _) in enumerate(seen):
        expected = sampled_by(programs, params_after(run, step - STALENESS), step)
        for name in ("prompt", "completion_ids", "completion_mask", "sampler_logprobs"):
            jax.tree.map(np.testing.assert_array_equal, getattr(batch, name), getattr(expected, name))
        present = sampled_by(programs, params_after(run, step), step)
        differs.append(bool((batch.sampler_logprobs != present.sampler_logprobs).any()))
        # What people read is of the same rollout.
        ids, mask = (x.reshape(32, -1) for x in (expected.completion_ids, expected.completion_mask))
        texts = [TASK.decode(i[m & ~np.isin(i, TASK.eos_ids)].tolist()) for i, m in zip(ids, mask, strict=True)]
        groups = [group for group in run.lines("rollouts.jsonl") if group["step"] == step + 1]
        logged = [text for group in groups for text in group["completions"]]
        assert len(logged) >= 8
        assert logged == texts[: len(logged)]
    assert differs == [False] + [True] * (STEPS - 1)


def test_runs_with_a_queue_can_be_extended(tmp_path, programs, whole):
    short = with_options(CONFIG, steps=4)
    state, run = trained(tmp_path, programs, short)
    for index, batch in enumerate(state.source, start=4):
        expected = sampled_by(programs, params_after(run, index - STALENESS), index)
        jax.tree.map(np.testing.assert_array_equal, to_numpy(batch), expected)
    assert_same_runs(trained(tmp_path, programs), whole)
    assert not run.lines("warnings.jsonl")


@pytest.mark.parametrize(("step", "every"), [(0, 3), (1, 1), (4, 3)])
def test_runs_killed_while_grading_resume_exactly(tmp_path, programs, whole, step, every):
    """After one step the queue still holds rollouts of the start."""
    config = with_options(CONFIG, checkpoint_every=every)
    with pytest.raises(Stop):
        trained(tmp_path, programs, config, reward=stopping(TASK.reward, step))
    assert_same_runs(trained(tmp_path, programs, config), whole)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["pmap", "mesh"])
def test_two_device_queues_resume_on_two_or_one(tmp_path, programs, whole, parallel):
    two = with_options(CONFIG, devices=2, parallel=parallel)
    programs_of_two = make_programs(POLICY, TASK, two)
    state, on_two = trained(tmp_path / "two", programs_of_two, two)
    trained(tmp_path / "cut", programs_of_two, two, until=3)
    shutil.copytree(tmp_path / "cut", tmp_path / "alone")
    assert_same_runs(trained(tmp_path / "cut", programs_of_two, two), (state, on_two))
    _, alone = trained(tmp_path / "alone", programs)
    logged = [[line["reward"] for line in run.lines()] for run in (alone, on_two, whole[1])]
    assert logged[0] == logged[1] == logged[2]  # the same tokens


def test_checkpoints_hold_queued_rollouts_without_parameter_copies(whole):
    state, run = whole
    mismatch = [line["first_sampler_mismatch"] for line in run.lines()]
    assert mismatch[0] == pytest.approx(1, abs=1e-5)  # the start is the policy
    assert min(mismatch[1:]) > 1.001
    assert len(state.source) == STALENESS
    with run.checkpoints("grpo", keep=STEPS) as checkpoints:
        restored, step = checkpoints.restore(lambda: jax.tree.map(jnp.zeros_like, state))
    assert step == STEPS
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    # Parameters, two moments of each, and none besides.
    shapes = [x.shape for x in jax.tree.leaves(state)]
    for shape in {x.shape for x in jax.tree.leaves(PARAMS)}:
        assert shapes.count(shape) == 3 * len(PARAMS)
    assert [batch.completion_ids.shape for batch in restored.source] == [(8, 4, 3)] * STALENESS


def test_stale_rollouts_are_corrected_by_default(tmp_path):
    """The default computes what the best correction does, and without staleness nothing."""
    lines = {}
    for name, options in {
        "auto": {"staleness": STALENESS},
        "best": {"staleness": STALENESS, "correction": BEST_CORRECTION},
        "fresh": {},
    }.items():
        config = with_options(RUN, **options)
        programs = make_programs(POLICY, TASK, config, sampler=run_programs().sampler)
        lines[name] = trained(tmp_path / name, programs, config)[1].lines()
    assert lines["auto"] == lines["best"]
    weights = [line["correction"] for line in lines["auto"] if "correction" in line]
    assert len(weights) == STEPS
    assert any(abs(weight - 1) > 1e-4 for weight in weights)
    assert not any("correction" in line for line in lines["fresh"])


def test_sampler_logprobs_put_staleness_into_the_ratio(tmp_path):
    """In the first steps the policy that samples is the one before the update; later it has moved since."""
    config = with_options(CONFIG, old_logprobs="sampler", correction="none")
    programs = make_programs(POLICY, TASK, config, sampler=run_programs().sampler)
    _, run = trained(tmp_path, programs, config)
    ratios = [line["ratio"] for line in run.lines() if "ratio" in line]
    assert ratios[0] == pytest.approx(1, abs=1e-5)
    assert all(abs(ratio - 1) > 1e-4 for ratio in ratios[1:])


@pytest.mark.slow
def test_the_run_as_one_program_is_as_stale(tmp_path):
    from experiments.whole_run import DeviceTask, heldout_of, prompts_of, whole_run  # only this test needs them

    config = with_options(RUN, steps=4, staleness=STALENESS, eval_every=4)

    def on_device(targets, completions, key):
        del targets, key
        return jnp.sum((completions.completion_ids == 3) & completions.completion_mask, axis=-1) / 3

    task = DeviceTask(TASK, lambda rows: np.zeros(len(rows)), on_device, on_device)
    heldout = heldout_of(task, config)
    history = jax.jit(whole_run({"policy": POLICY}, task, config))(
        {"policy": PARAMS}, prompts_of(task, config.steps), heldout, config.seed, {}
    )
    state, run = trained(tmp_path, None, config)
    for name in ("reward", "loss", "grad_norm", "first_sampler_mismatch"):
        logged = [line[name] for line in run.lines() if line["step"]]
        np.testing.assert_allclose(history.metrics[name], logged, rtol=1e-3, atol=1e-5, err_msg=name)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), history.params, state.params)
