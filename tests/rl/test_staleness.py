"""Completions of an earlier policy: which one sampled, what corrections see, and exact resume."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigrams import PARAMS, POLICY, V

from experiments.whole_run import DeviceTask, heldout_of, prompts_of, whole_run
from grpo_jax.config import recipe, validate, with_options
from grpo_jax.data.types import pad_prompts, rng
from grpo_jax.devices import to_host
from grpo_jax.errors import UsageError
from grpo_jax.rl.grpo import grpo_method, make_programs
from grpo_jax.rl.keys import SAMPLING, noise_of
from grpo_jax.rl.sampler import completion_numbers, group_temperatures
from grpo_jax.rl.scoring import score_completion_tokens
from grpo_jax.runs.checkpoint import params_sha256
from grpo_jax.runs.folder import RunFolder
from grpo_jax.tasks.task import Task
from grpo_jax.train import train

EOS, PAD, STEPS, STALENESS = 6, 7, 6, 2
OPTIONS = {"num_prompts": 8, "group_size": 4, "max_tokens": 3, "learning_rate": 5e-2}
CONFIG = recipe(
    steps=STEPS,
    staleness=STALENESS,
    checkpoint_every=1,
    keep_checkpoints=STEPS,
    rollouts_every=1,
    correction="token",
    **OPTIONS,
)


def prompts(step: int):
    tokens = rng(step).integers(0, 6, (8, 2)).tolist()
    return pad_prompts(tokens, [{"prompt": str(t)} for t in tokens], width=3, pad_id=PAD)


def says_three(examples, completions):
    return [text.count("3") / 3 for text in completions]


TASK = Task(prompts, says_three, prompts(999), lambda ids: "".join(map(str, ids)), (EOS,), PAD, V)


@pytest.fixture(scope="module")
def programs():
    return make_programs(POLICY, TASK, CONFIG)


def trained(path, programs, config=CONFIG, **options):
    run = RunFolder(path, dataclasses.asdict(config))
    return run, train(POLICY, PARAMS, TASK, config, run, programs=programs, **options)


def params_after(run, step):
    """Those of the policy after so many steps."""
    if step <= 0:
        return PARAMS
    with run.checkpoints("grpo", keep=STEPS) as checkpoints:
        return checkpoints.restore_params(PARAMS, step)[0]


def test_each_step_samples_by_the_policy_of_so_many_steps_before(tmp_path, programs):
    run, _ = trained(tmp_path, programs)
    numbers, temperature = completion_numbers(CONFIG.sampling), group_temperatures(CONFIG.sampling)
    for step in range(STEPS):
        sampler = params_after(run, step - STALENESS)
        noise = noise_of(CONFIG.seed, SAMPLING, step)
        _, completions = programs.sampler.sample(sampler, prompts(step), jnp.asarray(numbers), temperature, noise)
        ids, mask = to_host((completions.completion_ids, completions.completion_mask))
        expected = [
            TASK.decode(i[m & (i != EOS)].tolist())
            for i, m in zip(ids.reshape(32, -1), mask.reshape(32, -1), strict=True)
        ]
        logged = [group for group in run.lines("rollouts.jsonl") if group["step"] == step + 1]
        texts = [text for group in logged for text in group["completions"]]
        assert texts == expected[: len(texts)]
        assert len(texts) >= 8


def test_the_metrics_show_how_far_the_policy_has_moved(tmp_path, programs):
    run, _ = trained(tmp_path, programs)
    mismatch = [line["first_sampler_mismatch"] for line in run.lines()]
    assert mismatch[0] == pytest.approx(1, abs=1e-5)  # the start is the policy
    assert min(mismatch[1:]) > 1.001
    assert not run.lines("warnings.jsonl")


def test_a_run_goes_on_from_any_step_as_if_it_had_not_stopped(tmp_path, programs):
    whole, state = trained(tmp_path / "whole", programs)
    run, _ = trained(tmp_path / "parts", programs, until=3)
    run, resumed = trained(tmp_path / "parts", programs)
    assert params_sha256(resumed) == params_sha256(state)
    assert run.lines() == whole.lines()
    assert run.lines("rollouts.jsonl") == whole.lines("rollouts.jsonl")


def test_without_staleness_no_parameters_are_kept(programs):
    assert len(programs.init_state(PARAMS).earlier) == STALENESS
    synchronous = make_programs(POLICY, TASK, with_options(CONFIG, staleness=0))
    assert synchronous.init_state(PARAMS).earlier == ()


def test_the_sampler_runs_again_for_old_log_probabilities(tmp_path):
    """With the same policy it says the same bits, and with another one what this one gives to the completions."""
    config = with_options(CONFIG, old_logprobs="sampler", minibatches=2)
    programs = make_programs(POLICY, TASK, config)
    given = completion_numbers(config.sampling), group_temperatures(config.sampling), noise_of(0, SAMPLING, 0)
    batch, completions = programs.sampler.sample(PARAMS, prompts(0), *given)
    np.testing.assert_array_equal(programs.sampler.replay(PARAMS, batch), completions.sampler_logprobs)
    moved = jax.tree.map(lambda x: 1.2 * x, PARAMS)
    scores = jax.jit(partial(score_completion_tokens, POLICY))(moved, batch).logprobs
    expected = jnp.where(batch.completion_mask, scores, 0)
    np.testing.assert_allclose(programs.sampler.replay(moved, batch), expected, atol=1e-5)
    run, _ = trained(tmp_path, programs, config)
    stale = [line["first_sampler_mismatch"] for line in run.lines()]
    weights = [line["correction"] for line in run.lines()]
    assert weights[0] == 1  # to the bit: the policy has not moved, and both numbers are of one program
    assert min(stale[1:]) > 1.001
    assert 1 not in weights[STALENESS:]


@pytest.mark.slow
@pytest.mark.parametrize("old_logprobs", ["trainer", "sampler"])
def test_the_run_as_one_program_is_as_stale(tmp_path, old_logprobs):
    config = recipe(steps=4, staleness=STALENESS, eval_every=4, old_logprobs=old_logprobs, **OPTIONS)

    def on_device(targets, completions, key):
        del targets, key
        return jnp.sum((completions.completion_ids == 3) & completions.completion_mask, axis=-1) / 3

    task = DeviceTask(TASK, lambda rows: np.zeros(len(rows)), on_device, on_device)
    heldout = heldout_of(task, config)
    history = jax.jit(whole_run(POLICY, task, config, grpo_method))(
        PARAMS, prompts_of(task, config.steps), heldout, config.seed, {}
    )
    run, state = trained(tmp_path, None, config)
    for name in ("reward", "loss", "grad_norm", "first_sampler_mismatch"):
        logged = [line[name] for line in run.lines() if line["step"]]
        np.testing.assert_allclose(history.metrics[name], logged, rtol=1e-3, atol=1e-5, err_msg=name)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), history.params, state.params)


def test_a_negative_staleness_is_refused():
    with pytest.raises(UsageError, match="staleness is -1: it must be at least 0"):
        validate(with_options(CONFIG, staleness=-1))


def test_a_staleness_of_all_steps_is_refused():
    with pytest.raises(UsageError, match="staleness is 6, and steps is 6, so the start would sample all"):
        validate(with_options(CONFIG, staleness=STEPS))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"preset": "dppo", "correction": "none"}, "takes its ratio against the sampler already: leave old_logprobs"),
        ({"staleness": 0}, "correction token weighs the sampler against old_logprobs, which are its own"),
    ],
)
def test_ratios_to_the_sampler_that_make_no_sense(changes, named):
    with pytest.raises(UsageError, match=named):
        validate(with_options(CONFIG, old_logprobs="sampler", **changes))
