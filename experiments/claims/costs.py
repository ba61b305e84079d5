"""What a step costs, counted rather than timed: the same on every machine."""

from functools import partial

import jax

from experiments.claims.ablation import Bench, Setting
from grpo_jax.config import PPOConfig, run_of
from grpo_jax.models.policy import decoder_policy
from grpo_jax.runs.throughput import forward_flops, update_flops
from grpo_jax.training.grpo import grpo_method
from grpo_jax.training.ppo import add_critic, critic_policy, ppo_method
from grpo_jax.training.state import init_state


def operations(bench: Bench, setting: Setting) -> float:
    """Operations of a step: sampling, the reference, a critic's values, and the update; completions of full length.

    A group's prompt counts once.

    Args:
      bench: with starts.
      setting: with one optimizer step a rollout.
    """
    config, policy = bench.config(setting), bench.start(setting.testbed, bench.seeds[0])
    prompt = bench.task(setting, bench.seeds[0]).task.prompts(0).ids.shape[1]
    sampling = run_of(config).sampling
    tokens = sampling.num_prompts * (prompt + sampling.group_size * sampling.max_tokens)
    if setting.method == "grpo":
        return 2 * forward_flops(policy, tokens) + update_flops(policy, None, tokens)
    both = add_critic(setting.testbed.model, policy)
    return 2 * forward_flops(policy, tokens) + forward_flops(both.critic, tokens) + update_flops(both, None, tokens)


def bytes_held(bench: Bench, setting: Setting) -> int:
    """Bytes of what is trained, of its optimizer, and of the reference."""
    config, model, policy = bench.config(setting), setting.testbed.model, bench.start(setting.testbed, bench.seeds[0])
    if not isinstance(config, PPOConfig):
        method, params = grpo_method(decoder_policy(model), config), policy
    else:
        method, params = ppo_method(decoder_policy(model), critic_policy(model), config), add_critic(model, policy)
    state = jax.eval_shape(partial(init_state, optimizer=method.optimizer), method.split(params)[0])
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((state, policy)))
