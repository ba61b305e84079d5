"""The guards: what is refused before a run, what ends one, and what it warns of."""

import dataclasses
import math
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from bigrams import PARAMS, POLICY, TASK, V, prompts, says_three, train_grpo

from grpo_jax.checks import validate
from grpo_jax.config import recipe, with_options
from grpo_jax.errors import UsageError
from grpo_jax.rewards.processes import Grader
from grpo_jax.rl import guards
from grpo_jax.rl.evaluate import evaluate, prompt_means, sample_heldout, summary
from grpo_jax.rl.grpo import grpo_method, make_programs
from grpo_jax.rl.iteration import check_programs
from grpo_jax.rl.types import Batch, Forward
from grpo_jax.runs.folder import RunFolder
from grpo_jax.statistics import paired_difference

CONFIG = recipe(
    steps=6, num_prompts=8, group_size=4, max_tokens=3, learning_rate=5e-2, checkpoint_every=2, rollouts_every=1
)


@pytest.fixture(scope="module")
def programs():
    return make_programs(POLICY, TASK, CONFIG)


def open_run(path, config=CONFIG) -> RunFolder:
    return RunFolder(path, dataclasses.asdict(config))


# ---- options and tasks that are refused


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
        ({"preset": "pass_at_k", "group_size": 2}, "group_size is 2: preset pass_at_k .* at least 4"),
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
        ({"steps": 2, "profile_steps": 1}, "set steps above 2"),
        ({"epsilon_high": None}, "epsilon_high is None, but preset grpo needs it: 0.2"),
        ({"preset": "sapo", "delta": 4.0}, "delta is 4.0, but preset sapo has no such constant"),
        ({"top_entropy": 0.0}, "top_entropy"),
        ({"top_entropy": 1.1}, "top_entropy"),
        *(
            ({"preset": preset, **option}, f"{preset} has one ratio a completion, but {words}")
            for preset in ("rloo", "gmpo", "luspo", "companion_post", "introduction_post", "introduction_post_rank")
            for option, words in (
                ({"top_entropy": 0.5}, "top_entropy 0.5"),
                ({"correction": "token"}, "correction token"),
                ({"correction": "icepop"}, "correction icepop"),
            )
        ),
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
            train_grpo(TASK, CONFIG, open_run(tmp_path), programs, reward=reward)
        samples = sample_heldout(
            programs.sampler, PARAMS, TASK, num_prompts=8, group_size=4, temperature=1.0, seed=0, samples=3
        )
        held = evaluate(samples, TASK._replace(reward=reward))
        summary(held)
        paired_difference(prompt_means(held), prompt_means(held))


@pytest.mark.parametrize("preset", ["rloo", "gmpo", "luspo"])
def test_weights_of_completions_go_with_ratios_of_completions(preset):
    validate(with_options(CONFIG, preset=preset, correction="sequence", off_policy_threshold=0.1))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise RuntimeError('no such thing')", "no such thing"),
        ("return [1.0]", "returned 1 rewards for"),
        ("return ['1'] * len(completions)", "returned a reward of type str"),
        ("return [[(0, 999, 1.0)] for _ in completions]", "from 0 to 999 is not one of a completion"),
    ],
)
def test_a_reward_that_fails_on_every_completion_ends_the_run(tmp_path, programs, body, said):
    (tmp_path / "bad.py").write_text(f"def f(examples, completions):\n    {body}\n")
    with Grader(f"{tmp_path}/bad.py:f", workers=1) as grader:
        with pytest.raises(UsageError, match=f"no completion of the first rollout .* {said}") as caught:
            train_grpo(TASK, CONFIG, open_run(tmp_path / "run"), programs, reward=grader)
        assert "\n" not in str(caught.value)


def test_a_run_that_goes_on_is_not_ended_by_rewards_that_fail_in_one_step(tmp_path, programs):
    (tmp_path / "bad.py").write_text("def f(examples, completions):\n    raise RuntimeError('no such thing')\n")
    run = open_run(tmp_path / "run")
    train_grpo(TASK, with_options(CONFIG, steps=1), run, programs)
    with Grader(f"{tmp_path}/bad.py:f", workers=1) as grader:
        train_grpo(TASK, with_options(CONFIG, steps=2), run, programs, reward=grader)
    assert [line["step"] for line in run.lines("metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("changes", [{"learning_rate": 1e-3, "kl_coef": 0.1}, {"decay": "linear", "steps": 9}])
def test_programs_of_another_run_are_refused(tmp_path, changes):
    programs = make_programs(POLICY, TASK, with_options(CONFIG, **changes))
    with pytest.raises(ValueError, match=f"another .*{next(iter(changes))}"):
        train_grpo(TASK, CONFIG, open_run(tmp_path), programs)


def test_programs_are_shared_by_phases_that_differ_on_the_host(programs):
    check_programs(programs, with_options(CONFIG, steps=9, seed=1, max_rollouts=2, eval_every=1, max_skipped=1))


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(ValueError, match="devices is 99"):
        make_programs(POLICY, TASK, with_options(CONFIG, devices=99))


@pytest.mark.parametrize("changes", [{"eos_ids": ()}, {"vocab_size": 5}])
def test_a_task_whose_completions_cannot_end_is_refused(changes):
    with pytest.raises(ValueError, match=r"EOS"):
        guards.check_tokens(TASK._replace(**changes))


def test_texts_longer_than_the_model_was_trained_on_are_warned_of(tmp_path, capsys):
    run = open_run(tmp_path)
    run.warn(guards.length_warning(8, 8))
    run.warn(guards.length_warning(9, None))
    assert not capsys.readouterr().out
    run.warn(guards.length_warning(9, 8))
    assert "longer than the 8" in " ".join(capsys.readouterr().out.split())


def test_prompts_padded_on_the_right_are_refused(tmp_path, programs):
    task = TASK._replace(prompts=lambda step: prompts(step)._replace(mask=prompts(step).mask[:, ::-1]))
    with pytest.raises(ValueError, match="padded on the left"):
        train_grpo(task, CONFIG, open_run(tmp_path), programs)


def test_a_kl_without_reference_is_refused():
    batch, (objective,) = Batch(*jnp.zeros((5, 1, 1, 1))), grpo_method(POLICY, CONFIG).terms
    with pytest.raises(ValueError, match="no ref_logprobs"):
        objective({"policy": PARAMS}, Forward(*jnp.zeros((3, 1, 1, 1))), batch)


def test_rollouts_that_teach_nothing_are_warned_of_once(tmp_path, programs, capsys):
    config = with_options(CONFIG, steps=3)
    train_grpo(TASK, config, open_run(tmp_path), programs, reward=lambda e, t: [1.0] * len(t))
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("all rewards are equal") == 1
    assert "ratio" not in said


def test_completions_that_never_end_are_warned_of(tmp_path, capsys):
    likeliest = (jnp.tanh(PARAMS["before"]) @ PARAMS["after"].T).argmax(-1).tolist()
    never = next(token for token in range(V) if token not in likeliest)
    task = TASK._replace(eos_ids=(never,), pad_id=0)
    config = with_options(CONFIG, steps=1, max_tokens=1, top_k=1)
    train_grpo(task, config, open_run(tmp_path), reward=says_three)
    assert "no completion ended" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("far", [{"first_ratio_deviation": 2.0}, {"first_sampler_mismatch": 1.1}])
def test_a_ratio_off_one_is_warned_of(tmp_path, capsys, far):
    run, close = open_run(tmp_path), {"first_ratio_deviation": 0.3, "first_sampler_mismatch": 1.01}
    run.warn(guards.ratio_warning(close))
    assert not capsys.readouterr().out
    run.warn(guards.ratio_warning(close | far))
    run.warn(guards.ratio_warning(close | far))
    assert capsys.readouterr().out.count("ratio is off 1") == 1


def test_gradients_that_are_not_finite_are_skipped_dumped_and_stop_the_run(tmp_path, programs):
    config = with_options(CONFIG, max_skipped=2)
    run = open_run(tmp_path)
    with pytest.raises(FloatingPointError, match="2 times in a row"):
        train_grpo(TASK, config, run, programs, reward=lambda e, t: [float("nan")] * len(t))
    dumped = np.load(tmp_path / "skipped_grpo_000000_1.npz")
    assert np.isnan(dumped["advantages"]).all()
    assert not any("rewards are equal" in line["message"] for line in run.lines("warnings.jsonl"))
    assert [line["skipped"] for line in run.lines()] == [1, 2]  # of the step that stopped it too


def test_a_reward_of_the_wrong_length_is_refused(tmp_path, programs):
    with pytest.raises(ValueError, match="returned 1 rewards for 32 completions"):
        train_grpo(TASK, CONFIG, open_run(tmp_path), programs, reward=lambda e, t: [1.0])
