"""Compares a run as one program, alone and in a row, with the numbers of the ordinary loop."""

import dataclasses

import bigrams
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import digit_prompts, digit_task, tiny_config

from experiments.whole_run import DeviceTask, by_prompt, compile_runs, heldout_of, prompts_of, whole_run
from grpo_jax.config import PPO, recipe, with_options
from grpo_jax.models.policy import decoder_policy
from grpo_jax.rl.evaluate import evaluate, sample_heldout
from grpo_jax.rl.ppo import add_critic, critic_policy
from grpo_jax.rl.programs import make_programs
from grpo_jax.runs.folder import RunFolder
from grpo_jax.training.phases import train

MODEL = tiny_config(8)
POLICY = decoder_policy(MODEL)
PARAMS = jax.jit(POLICY.init)(jax.random.key(0))
OPTIONS = {"steps": 4, "num_prompts": 8, "group_size": 4, "max_tokens": 3, "learning_rate": 1e-2, "eval_every": 2}
OPTIONS |= {"devices": 1}
GRPO = recipe(**OPTIONS, temperature_spread=0.3, epochs=2, minibatches=2, ref_sync_steps=2, ref_mixup_alpha=0.5)
OF_PPO = with_options(PPO, **OPTIONS, critic_learning_rate=1e-2, kl_target=0.1)


def first_digit(row):
    """Returns the first digit of a prompt, which completions should repeat."""
    return row["prompt"][1]


def says_the_first(examples, texts):
    return [text.count(first_digit(row)) / 3 for row, text in zip(examples, texts, strict=True)]


def on_device(targets, completions, key, scale=1.0):
    del key
    return scale * jnp.sum(completions.completion_ids == targets[:, None, None], axis=-1) / 3


TASK = digit_task(says_the_first)._replace(heldout=digit_prompts(999, 10))
ON_DEVICE = DeviceTask(TASK, lambda rows: np.array([int(first_digit(row)) for row in rows]), on_device, on_device)


METHODS = [
    pytest.param(GRPO, bigrams.POLICY, {"policy": bigrams.PARAMS}, id="bigrams"),
    pytest.param(GRPO, POLICY, {"policy": PARAMS}, id="grpo", marks=pytest.mark.slow),
    pytest.param(OF_PPO, POLICY, add_critic(MODEL, PARAMS), id="ppo", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("config", "policy", "params"), METHODS)
def test_it_has_the_numbers_of_the_ordinary_loop(tmp_path, config, policy, params):
    policies, judged = {"policy": policy, "critic": critic_policy(MODEL)}, []
    programs = make_programs(policies, TASK, config)

    def judge(actor, step):
        shape = recipe(num_prompts=8, group_size=4, seed=config.seed)
        calls = sample_heldout(programs.sampler, actor, TASK, shape)
        judged.append(evaluate(calls, TASK).rewards.mean())
        return {}

    run = RunFolder(tmp_path, dataclasses.asdict(config))
    state = train(params, TASK, config, run, programs, phase="it", evaluate=judge)
    whole = jax.jit(whole_run(policies, ON_DEVICE, config))
    heldout = heldout_of(ON_DEVICE, config)
    history = whole(params, prompts_of(ON_DEVICE, config.steps), heldout, config.seed, {})

    for name in ("reward", "length_mean", "zero_spread_share", "distinct_share", "loss", "kl", "grad_norm", "entropy"):
        logged = [line[name] for line in run.lines() if line["step"]]
        np.testing.assert_allclose(history.metrics[name], logged, rtol=1e-3, atol=1e-5, err_msg=name)
    sampled = by_prompt(heldout, np.asarray(history.heldout))[..., :-1]
    assert sampled.shape == (3, 10, 3)
    np.testing.assert_allclose(sampled.mean((1, 2)), judged, rtol=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), history.params, state.params)


@pytest.mark.slow
@pytest.mark.parametrize(("side_by_side", "devices"), [(False, 2), (True, 1)])
def test_a_row_is_its_runs(side_by_side, devices):
    config = with_options(GRPO, epochs=1, minibatches=1, ref_sync_steps=0, ref_mixup_alpha=1.0)
    run, heldout = whole_run({"policy": bigrams.POLICY}, ON_DEVICE, config), heldout_of(ON_DEVICE, config)
    options = {"learning_rate": np.array([1e-2, 1e-3]), "kl_coef": np.array([0.0, 0.1]), "scale": np.array([1.0, 5.0])}
    step_prompts = prompts_of(ON_DEVICE, config.steps)
    both = jax.tree.map(lambda x: np.stack([x, x]), ({"policy": bigrams.PARAMS}, step_prompts))
    row = compile_runs(run, side_by_side=side_by_side, devices=devices)(*both, heldout, [0, 1], options)
    single = jax.jit(run)
    for i in range(2):
        numbers = {name: values[i] for name, values in options.items()}
        expected = single({"policy": bigrams.PARAMS}, step_prompts, heldout, i, numbers)
        of_row = jax.tree.map(lambda x, i=i: x[i], row)
        np.testing.assert_array_equal(of_row.heldout, expected.heldout)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), of_row.params, expected.params)
