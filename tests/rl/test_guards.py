"""The guards: what is refused before a run, what ends one, and what it warns of."""

import math
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from bigrams import PARAMS, POLICY, TASK, V, prompts, says_three, train_grpo
from rl_helpers import open_run
from tiny import refused

from grpo_jax.checks import validate
from grpo_jax.config import recipe, with_options
from grpo_jax.rewards.processes import Grader
from grpo_jax.rl import guards
from grpo_jax.rl.evaluate import evaluate, prompt_means, sample_heldout, summary
from grpo_jax.rl.grpo import grpo_method, make_programs
from grpo_jax.rl.iteration import check_programs
from grpo_jax.rl.types import Batch, Forward
from grpo_jax.statistics import paired_difference

CONFIG = recipe(
    steps=6, num_prompts=8, group_size=4, max_tokens=3, learning_rate=5e-2, checkpoint_every=2, rollouts_every=1
)


@pytest.fixture(scope="module")
def programs():
    return make_programs(POLICY, TASK, CONFIG)


# ---- options and tasks that are refused: each range is in the tests of options


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"group_size": 1}, "group_size"),
        ({"num_prompts": 6, "microbatches": 4}, "num_prompts"),
        ({"temperature": 0.5, "temperature_spread": -0.6}, "temperature"),
        ({"temperature_spread": float("inf")}, "temperature"),
        ({"epsilon_low": 2.0}, "epsilon_low is 2.0"),
        ({"epsilon_high": None}, "epsilon_high is None"),
        ({"preset": "dppo", "correction": "token"}, "dppo .*sampler"),
        ({"preset": "sapo", "epsilon_low": 0.1}, "sapo .*epsilon_low|epsilon_low .*sapo|sapo has no such constant"),
        ({"preset": "sapo", "delta": 4.0}, "delta is 4.0"),
        ({"correction": "geometric", "top_k": 3}, "geometric"),
        ({"preset": "gpg", "epochs": 2}, "gpg"),
        ({"preset": "pass_at_k", "group_size": 2}, "group_size is 2: preset pass_at_k"),
        ({"advantages_of": "components", "max_rollouts": 2}, "dynamic sampling"),
        ({"advantages_of": "components", "preset": "rloo"}, "KL"),
        ({"kl_target": 6.0}, "kl_target"),
        ({"preset": "rloo", "kl_target": 6.0, "kl_horizon": 16}, "kl_horizon"),
        ({"ref_sync_steps": 99}, "ref_sync_steps"),
        ({"kl_coef": 0.0, "ref_sync_steps": 1}, "ref_sync_steps"),
        ({"ref_mixup_alpha": 0.5}, "ref_mixup_alpha"),
        ({"steps": 2, "profile_steps": 1}, "steps above 2"),
        *(
            ({"preset": preset, option: value}, f"{preset} .*{option}")
            for preset in ("rloo", "gmpo", "luspo", "companion_post", "introduction_post", "introduction_post_rank")
            for option, value in (("top_entropy", 0.5), ("correction", "token"), ("correction", "icepop"))
        ),
        ({"kl_bias_correction": True, "kl_coef": 0.0}, "kl_bias_correction"),
        ({"kl_bias_correction": True, "preset": "rloo"}, "kl_bias_correction"),
        ({"kl_bias_correction": True, "divergence": "full"}, "kl_bias_correction"),
    ],
)
def test_options_that_do_not_go_together_are_refused(changes, option):
    with refused(option):
        validate(with_options(CONFIG, **changes))


@pytest.mark.parametrize("preset", ["rloo", "gmpo", "luspo"])
def test_weights_of_completions_go_with_ratios_of_completions(preset):
    validate(with_options(CONFIG, preset=preset, correction="sequence", off_policy_threshold=0.1))
    # A log-ratio has no least value, as a ratio has.
    validate(with_options(CONFIG, preset="gmpo", epsilon_low=2.0))


@pytest.mark.parametrize(("changes", "option"), [({"top_k": 999}, "top_k is 999"), ({"devices": 99}, "devices is 99")])
def test_more_than_there_are_is_refused(changes, option):
    with refused(option):
        make_programs(POLICY, TASK, with_options(CONFIG, **changes))


@pytest.mark.parametrize("changes", [{"eos_ids": ()}, {"vocab_size": 5}])
def test_a_task_whose_completions_cannot_end_is_refused(changes):
    with refused("EOS"):
        guards.check_tokens(TASK._replace(**changes))


def test_programs_are_shared_only_by_phases_that_differ_on_the_host(programs):
    check_programs(programs, with_options(CONFIG, steps=9, seed=1, max_rollouts=2, eval_every=1, max_skipped=1))
    for changes in ({"learning_rate": 1e-3, "kl_coef": 0.1}, {"decay": "linear", "steps": 9}):
        with refused(f"another .*{next(iter(changes))}"):
            check_programs(make_programs(POLICY, TASK, with_options(CONFIG, **changes)), CONFIG)


def test_infinite_rewards_print_no_warnings_of_numpy(tmp_path, programs):
    def reward(examples, texts):
        return [(math.inf, -math.inf, 1e300, 1.0)[i % 4] for i in range(len(texts))]

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(FloatingPointError):
            train_grpo(TASK, CONFIG, open_run(tmp_path, CONFIG), programs, reward=reward)
        samples = sample_heldout(programs.sampler, PARAMS, TASK, recipe(num_prompts=8, group_size=4))
        held = evaluate(samples, TASK._replace(reward=reward))
        summary(held)
        paired_difference(prompt_means(held), prompt_means(held))


def test_a_reward_that_always_fails_ends_a_run_at_its_first_step_only(tmp_path, programs):
    (tmp_path / "bad.py").write_text("def f(examples, completions):\n    raise RuntimeError('no such thing')\n")
    run = open_run(tmp_path / "run", CONFIG)
    with Grader(f"{tmp_path}/bad.py:f", workers=1) as grader:
        with refused("no completion of the first rollout .* no such thing"):
            train_grpo(TASK, CONFIG, open_run(tmp_path / "first", CONFIG), programs, reward=grader)
        train_grpo(TASK, with_options(CONFIG, steps=1), run, programs)
        train_grpo(TASK, with_options(CONFIG, steps=2), run, programs, reward=grader)
    assert [line["step"] for line in run.lines()] == [1, 2]


def test_texts_longer_than_the_model_was_trained_on_are_warned_of(tmp_path, capsys):
    run = open_run(tmp_path, CONFIG)
    run.warn(guards.length_warning(8, 8))
    run.warn(guards.length_warning(9, None))
    assert not capsys.readouterr().out
    run.warn(guards.length_warning(9, 8))
    assert "longer than the 8" in " ".join(capsys.readouterr().out.split())


def test_prompts_padded_on_the_right_are_refused(tmp_path, programs):
    task = TASK._replace(prompts=lambda step: prompts(step)._replace(mask=prompts(step).mask[:, ::-1]))
    with pytest.raises(ValueError, match="padded on the left"):
        train_grpo(task, CONFIG, open_run(tmp_path, CONFIG), programs)


def test_a_kl_without_reference_is_refused():
    batch, (objective,) = Batch(*jnp.zeros((5, 1, 1, 1))), grpo_method(POLICY, CONFIG).terms
    with refused("ref_logprobs"):
        objective({"policy": PARAMS}, Forward(*jnp.zeros((3, 1, 1, 1))), batch)


def test_rollouts_that_teach_nothing_are_warned_of_once(tmp_path, programs, capsys):
    config = with_options(CONFIG, steps=3)
    train_grpo(TASK, config, open_run(tmp_path, CONFIG), programs, reward=lambda e, t: [1.0] * len(t))
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("all rewards are equal") == 1
    assert "ratio" not in said


def test_completions_that_never_end_are_warned_of(tmp_path, capsys):
    likeliest = (jnp.tanh(PARAMS["before"]) @ PARAMS["after"].T).argmax(-1).tolist()
    never = next(token for token in range(V) if token not in likeliest)
    task = TASK._replace(eos_ids=(never,), pad_id=0)
    config = with_options(CONFIG, steps=1, max_tokens=1, top_k=1)
    train_grpo(task, config, open_run(tmp_path, CONFIG), reward=says_three)
    assert "no completion ended" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("far", [{"first_ratio_deviation": 2.0}, {"first_sampler_mismatch": 1.1}])
def test_a_ratio_off_one_is_warned_of(tmp_path, capsys, far):
    run, close = open_run(tmp_path, CONFIG), {"first_ratio_deviation": 0.3, "first_sampler_mismatch": 1.01}
    run.warn(guards.ratio_warning(close))
    assert not capsys.readouterr().out
    run.warn(guards.ratio_warning(close | far))
    run.warn(guards.ratio_warning(close | far))
    assert capsys.readouterr().out.count("ratio is off 1") == 1


def test_gradients_that_are_not_finite_are_skipped_dumped_and_stop_the_run(tmp_path, programs):
    config = with_options(CONFIG, max_skipped=2)
    run = open_run(tmp_path, CONFIG)
    with pytest.raises(FloatingPointError, match="2 times in a row"):
        train_grpo(TASK, config, run, programs, reward=lambda e, t: [float("nan")] * len(t))
    dumped = np.load(tmp_path / "skipped_grpo_000000_1.npz")
    assert np.isnan(dumped["advantages"]).all()
    assert not any("rewards are equal" in line["message"] for line in run.lines("warnings.jsonl"))
    assert [line["skipped"] for line in run.lines()] == [1, 2]  # of the step that stopped it too


def test_a_reward_of_the_wrong_length_is_refused(tmp_path, programs):
    with pytest.raises(ValueError, match="returned 1 rewards for 32 completions"):
        train_grpo(TASK, CONFIG, open_run(tmp_path, CONFIG), programs, reward=lambda e, t: [1.0])
