"""Gradients of single groups, and how much of them is signal.

Letters: N prompts, G completions of a group, T tokens, R sets of groups, M prompts with two groups each.
"""

from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from claims.bench import Bench
from claims.testbeds import ADDITIONS
from experiments.tasks.arithmetic import EOS_ID, PAD_ID
from grpo_jax.config import GRPOConfig, recipe
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.models.rows.geometry import PromptTokens
from grpo_jax.rl.grpo import grpo_method
from grpo_jax.rl.source import to_batch
from grpo_jax.rl.types import REWARD, SAMPLING, RewardArrays, step_key
from grpo_jax.rl.update import loss_of
from grpo_jax.sampling.sampler import Completions, sample_groups

SIGNAL = "signal in a prompt's gradient"  # the name of its column


def make_gradients(policy: Policy, config: GRPOConfig) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Returns a function of groups to gradients of the method's own loss on one group, before any step.

    It takes params, prompts, completions `[N, G, ...]`, rewards `[N, G]` and sets `[R, N]`, the weights
    of groups in a mean. It returns the norm of each group's gradient, `[N]`, and the means over sets, `[R, D]`.

    Args:
      policy: the model's functions.
      config: of the method, without KL.
    """
    method = grpo_method(policy, config)

    def of_group(params: Params, group: tuple) -> jax.Array:
        prompt, completions, rewards = jax.tree.map(lambda x: x[None], group)
        ones = jnp.ones(rewards.shape)
        batch, _, _ = method.advantage(RewardArrays(rewards, ones > 0), to_batch(prompt, ones, completions), 0.0)
        batch = batch._replace(weights=method.aggregation(batch.completion_mask))
        gradient = jax.grad(lambda params: loss_of(method, (None, {}), {"policy": params}, batch)[0])
        return ravel_pytree(gradient(params))[0]

    @jax.jit
    def gradients_of(params, prompt, completions, rewards, sets) -> tuple[jax.Array, jax.Array]:
        gradients = jax.lax.map(partial(of_group, params), (prompt, completions, rewards))
        return jnp.linalg.norm(gradients, axis=-1), sets @ gradients

    return gradients_of


def signal(norms: np.ndarray, pairs: np.ndarray) -> float:
    """|mean|² / Tr Cov of the gradient of one group, Cov over groups of the same prompt. Neither is biased.

    With two groups of a prompt, g and g′, and their mean p: ½ |g − g′|² = |g|² + |g′|² − 2 |p|² has the expectation
    Tr Cov, and p · q of two prompts that of |mean|².

    Args:
      norms: of M prompts with two groups each, one after the other, `[2 M]`.
      pairs: the mean gradient of each prompt's two groups, `[M, D]`.

    Returns:
      The ratio, about 0 (or below) where there is no signal.
    """
    squared, count = np.square(norms).reshape(-1, 2).sum(-1), len(pairs)
    of_pairs = np.square(pairs).sum(-1)
    mean_squared = (np.square(pairs.sum(0)).sum() - of_pairs.sum()) / (count * (count - 1))
    return float(mean_squared / (squared - 2 * of_pairs).mean())


def gradient_signal(bench: Bench, seed: int, group_size: int, *, prompts: int = 256) -> float:
    """Returns `signal` of groups of additions at the start of a seed.

    Args:
      bench: knows the start.
      seed: of it, of prompts and of completions.
      group_size: G.
      prompts: M.
    """
    task = ADDITIONS.task(num_prompts=prompts, seed=seed, heldout=1)
    drawn, params = task.task.prompts(0), bench.start(ADDITIONS, seed)
    examples = [example for example in drawn.examples for _ in range(2)]
    prompt = drawn.tokens.take(np.repeat(np.arange(len(drawn.examples)), 2))
    completions = _sampled(params, prompt, step_key(seed, SAMPLING, 0), group_size)
    rewards = task.reward(task.targets(examples), completions, step_key(seed, REWARD, 0))
    pairs = np.repeat(np.eye(prompts), 2, axis=1) / 2
    return signal(*jax.device_get(_gradients()(params, prompt, completions, rewards, pairs)))


@partial(jax.jit, static_argnames="pool")
def _sampled(params: Params, prompt: PromptTokens, key: jax.Array, pool: int) -> Completions:
    policy, rows = decoder_policy(ADDITIONS.model), jnp.arange(len(prompt) * pool).reshape(-1, pool)
    length = ADDITIONS.max_tokens
    return sample_groups(policy, params, prompt, rows, key, max_tokens=length, eos_ids=(EOS_ID,), pad_id=PAD_ID)


@cache
def _gradients() -> Callable[..., tuple[jax.Array, jax.Array]]:
    return make_gradients(decoder_policy(ADDITIONS.model), recipe("grpo", kl_coef=0.0))
