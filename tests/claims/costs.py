"""Counts what a step costs: the same on every machine, and without a run."""

from functools import partial

import jax

from experiments.claims.bench import Setting
from grpo_jax.config import GRPOConfig, PPOConfig, recipe, run_of, with_options
from grpo_jax.devices import update_flops
from grpo_jax.models.params import split
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.transformer import Params
from grpo_jax.rl.grpo import grpo_method
from grpo_jax.rl.optimizer import init_state
from grpo_jax.rl.ppo import add_critic, critic_policy, ppo_method


def operations(setting: Setting, *, num_prompts: int, prompt_tokens: int) -> float:
    """Operations of a step: sampling, the reference, a critic's values, and the update; completions of full length.

    A group's prompt counts once.

    Args:
      setting: with one optimizer step a rollout.
      num_prompts: of a step.
      prompt_tokens: of a prompt.
    """
    params, sampling = _params(setting), run_of(_config(setting)).sampling
    tokens = num_prompts * (prompt_tokens + sampling.group_size * setting.testbed.max_tokens)
    size = {role: sum(leaf.size for leaf in jax.tree.leaves(tree)) for role, tree in params.items()}
    scored = 2.0 * tokens * (2 * size["policy"] + size.get("critic", 0))  # two operations a parameter and token
    return scored + update_flops(params, None, tokens)


def bytes_held(setting: Setting) -> int:
    """Bytes of what is trained, of its optimizer, and of the reference."""
    config, model, params = _config(setting), setting.testbed.model, _params(setting)
    policy = decoder_policy(model)
    if isinstance(config, PPOConfig):
        method = ppo_method(policy, critic_policy(model), config)
    else:
        method = grpo_method(policy, config)
    state = jax.eval_shape(lambda params: init_state(split(params)[0], method.optimizer), params)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((state, params["policy"])))


def _config(setting: Setting) -> GRPOConfig | PPOConfig:
    shape = dict(setting.shape)
    return with_options(PPOConfig(), **shape) if setting.method == "ppo" else recipe(**shape)


def _params(setting: Setting) -> Params:
    """Returns the shapes of all models by role."""
    model = setting.testbed.model
    params = jax.eval_shape(decoder_policy(model).init, jax.random.key(0))
    return jax.eval_shape(partial(add_critic, model), params) if setting.method == "ppo" else {"policy": params}
