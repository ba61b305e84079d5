"""Options, tasks and models that do not go together are refused before a run. Ranges are in the tests of options."""

import jax
import jax.numpy as jnp
import pytest
from bigrams import POLICY, TASK, V
from rl_helpers import RUN, some_pairs
from tiny import refused, says_three

from grpo_jax.config import PPO, validate, with_options
from grpo_jax.data.packing import pack, packed_batches
from grpo_jax.data.types import Component
from grpo_jax.devices import Mesh, first_devices, place
from grpo_jax.hosts import HostOptions, start
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.policy import decoder_policy
from grpo_jax.offline.pairs import pair_batches
from grpo_jax.offline.phase import SupervisedConfig, check_rows, make_fit_programs
from grpo_jax.offline.sft import sft_objective
from grpo_jax.rl import guards
from grpo_jax.rl.grpo import grpo_method
from grpo_jax.rl.programs import make_programs
from grpo_jax.training.prepare import check_vocabulary

TAUGHT = with_options(RUN, kl_coef=0.0, distillation="reverse_kl", reward_coef=0.0)
EPISODES = with_options(RUN, max_turns=3, environment_tokens=6)
PLAYED, ENDLESS = TASK._replace(environment=object()), TASK._replace(open_ended=True)


def judged(*weights):
    return TASK._replace(reward={name: Component(says_three, x) for name, x in zip("ab", weights, strict=True)})


# ---- options of one configuration: what it was, what changes, and the words of the sentence

OF_COMPLETIONS = ("rloo", "gmpo", "luspo", "companion_post", "introduction_post", "introduction_post_rank")
OPTIONS = [
    (RUN, {"group_size": 1}, "group_size"),
    (RUN, {"num_prompts": 6, "minibatches": 4}, "num_prompts"),
    (RUN, {"preset": "kl_cov", "piece_tokens": 64}, "kl_cov chooses among all tokens .*leave piece_tokens out"),
    (RUN, {"temperature": 0.5, "temperature_spread": -0.6}, "temperature"),
    (RUN, {"temperature_spread": float("inf")}, "temperature"),
    (RUN, {"epsilon_low": 2.0}, "epsilon_low is 2.0"),
    (RUN, {"epsilon_high": None}, "epsilon_high is None"),
    (RUN, {"preset": "dppo", "correction": "token"}, "dppo .*sampler"),
    (RUN, {"preset": "sapo", "epsilon_low": 0.1}, "epsilon_low"),
    (RUN, {"preset": "sapo", "delta": 4.0}, "delta is 4.0"),
    (RUN, {"correction": "geometric", "top_k": 3}, "geometric"),
    (RUN, {"staleness": 6}, "staleness is 6"),
    (RUN, {"preset": "dppo", "old_logprobs": "sampler"}, "old_logprobs"),
    (RUN, {"correction": "token", "old_logprobs": "sampler"}, "correction token .*old_logprobs"),
    (RUN, {"advantages_of": "spans", "preset": "gmpo"}, "gmpo .*advantages_of"),
    (RUN, {"preset": "gpg", "epochs": 2}, "gpg"),
    (RUN, {"preset": "gpg", "old_logprobs": "sampler"}, "gpg has no ratio"),
    (RUN, {"preset": "pass_at_k", "group_size": 4}, "group_size is 4: preset pass_at_k"),
    (RUN, {"preset": "max_rl", "kl_in_reward": True, "kl_coef": 0.1}, "max_rl .*kl_in_reward"),
    (RUN, {"advantages_of": "components", "max_rollouts": 2}, "dynamic sampling"),
    (RUN, {"advantages_of": "components", "preset": "rloo"}, "KL"),
    (RUN, {"kl_target": 6.0}, "kl_target"),
    (RUN, {"preset": "rloo", "kl_target": 6.0, "num_prompts": 4096}, "a step has 16384: lower num_prompts"),
    (RUN, {"ref_sync_steps": 99}, "ref_sync_steps"),
    (RUN, {"kl_coef": 0.0, "ref_sync_steps": 1}, "ref_sync_steps"),
    (RUN, {"ref_mixup_alpha": 0.5}, "ref_mixup_alpha"),
    (RUN, {"steps": 2, "profile_steps": 1}, "steps above 2"),
    (RUN, {"kl_bias_correction": True, "kl_coef": 0.0}, "kl_bias_correction"),
    (RUN, {"kl_bias_correction": True, "preset": "rloo"}, "kl_bias_correction"),
    (RUN, {"kl_bias_correction": True, "divergence": "full"}, "kl_bias_correction"),
    *(
        (RUN, {"preset": preset, option: value}, f"{preset} .*{option}")
        for preset in OF_COMPLETIONS
        for option, value in (("top_entropy", 0.5), ("correction", "token"), ("correction", "icepop"))
    ),
    (TAUGHT, {"distillation": "none"}, "reward_coef is 0.0"),
    (TAUGHT, {"distillation": "none", "reward_coef": 1.0, "distillation_top_k": 3}, "distillation_top_k is 3"),
    (TAUGHT, {"distillation": "k1", "distillation_top_k": 3}, "k1"),
    (TAUGHT, {"distillation_beta": 0.3}, "reverse_kl"),
    (TAUGHT, {"distillation": "jsd", "distillation_beta": 1.0}, "distillation_beta is 1.0"),
    (TAUGHT, {"distillation": "k1", "preset": "gmpo"}, "gmpo"),
    (TAUGHT, {"max_rollouts": 2}, "reward_coef is 0, so max_rollouts"),
    (TAUGHT, {"correction": "token"}, "reward_coef is 0, so correction"),
    (TAUGHT, {"kl_in_reward": True, "kl_coef": 0.1}, "reward_coef is 0, so kl_in_reward"),
    (TAUGHT, {"reward_coef": 1.0, "group_size": 1}, "group_size is 1"),
    (PPO, {"max_rollouts": 2}, "max_rollouts"),
    (PPO, {"preset": "rloo"}, "one ratio a completion"),
    (PPO, {"divergence": "full"}, "kl_in_reward"),
    (PPO, {"divergence": "full", "kl_in_reward": False, "kl_coef": 0.0}, "divergence full"),
    (PPO, {"advantages_of": "components"}, "advantages_of"),
    (PPO, {"num_prompts": 6, "minibatches": 4}, "num_prompts"),
    (PPO, {"distillation": "jsd", "reward_coef": 0.0}, "reward_coef is 0, so critic"),
]


@pytest.mark.parametrize(("config", "changes", "words"), OPTIONS)
def test_options_that_do_not_go_together_are_refused(config, changes, words):
    with refused(words):
        validate(with_options(config, **changes))


def test_a_kl_also_reads_old_logprobs():
    for other in ("kl_in_reward", "kl_bias_correction"):
        validate(with_options(RUN, preset="gpg", old_logprobs="sampler", kl_coef=0.1, **{other: True}))


def test_weights_of_completions_go_with_ratios_of_completions():
    for preset in ("rloo", "gmpo", "luspo"):
        validate(with_options(RUN, preset=preset, correction="sequence", off_policy_threshold=0.1))
    # A log-ratio has no least value, as a ratio has.
    validate(with_options(RUN, preset="gmpo", epsilon_low=2.0))


# ---- options with a task, a model or data

PROGRAMS = [
    (TASK, RUN, {"top_k": 999}, "top_k is 999"),
    (TASK, RUN, {"devices": 99}, "devices is 99"),
    (TASK, RUN, {"devices": 8, "fsdp": 3}, "does not divide the 8 devices"),
    (TASK, RUN, {"devices": 8, "parallel": "pmap", "tensor": 2}, "set parallel to mesh"),
    (TASK, RUN, {"devices": 8, "fsdp": 8, "num_prompts": 4}, "must be a multiple of"),
    (TASK, RUN, {"devices": 8, "fsdp": 4, "tensor": 2, "num_prompts": 6}, "devices / tensor, 4"),
    (TASK, RUN, {"devices": 4, "sampler_devices": 4}, "the run has 4 devices on a host, and at least one must train"),
    (TASK, RUN, {"sampler_devices": 1}, "the run has 1 device on a host"),
    (TASK, RUN, {"devices": 8, "sampler_devices": 4, "sampler_fsdp": 3}, "is 3, which does not divide the 4 sampler"),
    (TASK, RUN, {"devices": 7, "sampler_devices": 3}, "a multiple of hosts x sampler_devices / sampler_tensor, 3"),
    (TASK, RUN, {"devices": 8, "sampler_devices": 4, "fsdp": 8}, "the 4 devices of the run that train"),
    (TASK, RUN, {"devices": 8, "sampler_tensor": 2}, "sampler_tensor has no effect while sampler_devices is 0"),
    (TASK, RUN, {"advantages_of": "components"}, "advantages_of"),
    (judged(1.0, 0.0), RUN, {"advantages_of": "components"}, "advantages_of"),
    (judged(1.0, 0.1), RUN, {"max_rollouts": 1, "filter_metric": "a"}, "raise max_rollouts"),
    (judged(1.0, 0.1), RUN, {"max_rollouts": 5, "filter_metric": "c"}, "a, b"),
    (ENDLESS, RUN, {"mask_truncated": True}, "mask_truncated"),
    (TASK, EPISODES, {}, "max_turns and environment_tokens"),
    (PLAYED, EPISODES, {"environment_tokens": 0}, "environment_tokens is 0"),
    (PLAYED, EPISODES, {"advantages_of": "spans"}, '"spans"'),
    (TASK, TAUGHT, {}, "need a teacher"),
]
OURS = {"a": 0, "b": 1}
ZEROS, (OBJECTIVE,) = jnp.zeros((5, 1, 1, 1)), grpo_method(POLICY, RUN).terms
TWO_HEADS = ModelConfig(64, 16, 32, 1, 8, 2, 4)
PAIRS = some_pairs(24, V)
CALLS = [
    *(
        (lambda task=task, config=with_options(config, **changes): make_programs(POLICY, task, config), words)
        for task, config, changes, words in PROGRAMS
    ),
    (lambda: make_programs({"policy": POLICY, "teacher": POLICY}, TASK, RUN), "distillation is none"),
    (lambda: make_programs(POLICY, TASK, PPO), "critic_policy"),
    (lambda: make_programs(POLICY, PLAYED, with_options(EPISODES, critic="shared")), "leave critic out"),
    (lambda: make_programs(POLICY, TASK, with_options(RUN, gae_lambda=0.5)), "gae_lambda has no effect"),
    (
        lambda: make_programs({"policy": POLICY, "teacher": POLICY}, TASK, with_options(TAUGHT, distillation_top_k=V)),
        f"{V} tokens",
    ),
    (lambda: check_vocabulary({"a": 0, "b": 2}, OURS, "teacher"), "'b' is 2 there and 1 here"),
    (lambda: check_vocabulary(OURS | {"c": 2}, OURS, "teacher"), "'c' is 2 there and no token here"),
    (
        lambda: make_programs(
            {"policy": POLICY, "critic": POLICY}, ENDLESS, with_options(PPO, bootstrap_truncated=True)
        ),
        "bootstrap",
    ),
    (lambda: guards.check_tokens(TASK._replace(eos_ids=())), "EOS"),
    (lambda: guards.check_tokens(TASK._replace(vocab_size=5)), "EOS"),
    (  # key-value heads are never cut
        lambda: place(jax.eval_shape(decoder_policy(TWO_HEADS).init, jax.random.key(0)), first_devices(Mesh(tensor=4))),
        "2 key-value heads",
    ),
    *(
        (lambda options=options: start(options, print, print), words)
        for options, words in [
            (HostOptions(coordinator_address="10.0.0.1:1"), "give all of"),
            (HostOptions(num_processes=2, process_id=1), "give all of"),
            (HostOptions(process_id=0), "give all of"),
            (HostOptions(False, "10.0.0.1", 2, 1), "give all of"),
            (HostOptions(False, "10.0.0.1:1", 2, 2), "give all of"),
            (HostOptions(False, "10.0.0.1:1", 0, 0), "give all of"),
        ]
    ),
    # Packed rows: width 5.
    (lambda: pack([[1], [1]], [[2], []], width=5), "text 1 has no token to learn"),
    (lambda: pack([[1] * 3], [[2] * 3], width=5), "text 0 has 6 tokens, but width is 5"),
    (lambda: pack([[]], [[2]], width=5), "text 0 has no token to learn"),
    (lambda: packed_batches(pack([[1]], [[2]], width=5), 99, seed=0), "num_rows is 99, but there are 1 rows"),
    # Phases on data.
    (lambda: pair_batches(PAIRS, 25, 0), "num_pairs is 25, but there are 24"),
    (lambda: make_fit_programs(sft_objective(POLICY), SupervisedConfig(0, 1e-2)), "steps is 0"),
    (
        lambda: check_rows(SupervisedConfig(6, 1e-2, microbatches=3), rows=16, name="num_pairs"),
        "num_pairs is 16: .*microbatches x devices, 3",
    ),
]


@pytest.mark.parametrize(("call", "words"), CALLS)
def test_unsuitable_tasks_models_and_data_are_refused(call, words):
    with refused(words):
        call()


def test_one_vocabulary_of_policy_and_teacher_is_accepted():
    check_vocabulary(dict(OURS), OURS, "teacher")
