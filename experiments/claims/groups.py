"""Advantages and gradients of single groups, by how many of their completions are right.

Letters: N prompts, B completions sampled of each, G of a group, T tokens, R sets of groups.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from experiments.claims.ablation import COIN, START, Bench
from experiments.claims.testbeds import ARITHMETIC
from grpo_jax.config import GRPOConfig, recipe
from grpo_jax.data.types import Example
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.models.transformer import Params
from grpo_jax.sampling.sampler import Completions, sample_groups
from grpo_jax.tasks.arithmetic import EOS_ID, PAD_ID
from grpo_jax.training.grpo import grpo_method
from grpo_jax.training.learn import REWARD, SAMPLING, step_key
from grpo_jax.training.rollout import to_batch
from grpo_jax.training.state import RewardArrays

CARRIES = ("no carry", "one carry", "two carries")


class GroupGradients(NamedTuple):
    """Advantages and gradients of N groups."""

    advantages: np.ndarray  # [N, G]
    norms: np.ndarray  # [N], of the gradient of each group
    gradients: np.ndarray  # [R, D], means over sets of groups


def groups_with_right(completions: Completions, right: np.ndarray, count: int, group_size: int) -> Completions:
    """Groups with a given number of right completions, `[N, G, ...]`: the first right and wrong ones of B.

    Completions of a prompt are independent, so these groups are distributed like groups that happen to have as many
    right. There must be enough of both kinds.

    Args:
      completions: `[N, B, ...]`.
      right: bool `[N, B]`.
      count: of G.
      group_size: G.
    """
    first_right, first_wrong = np.argsort(~right, kind="stable"), np.argsort(right, kind="stable")
    numbers = np.concatenate([first_right[:, :count], first_wrong[:, : group_size - count]], axis=1)
    return chosen(completions, numbers)


def chosen(completions: Completions, numbers: np.ndarray) -> Completions:
    """The completions with these numbers `[N, G]`: `[N, G, ...]` of `[N, B, ...]`."""

    def of_field(field: np.ndarray) -> np.ndarray:
        field = np.asarray(field)
        return np.take_along_axis(field, numbers.reshape(*numbers.shape, *[1] * (field.ndim - 2)), axis=1)

    return jax.tree.map(of_field, completions)


def make_gradients(policy: Policy, config: GRPOConfig) -> Callable[..., GroupGradients]:
    """(params, prompt ids, prompt mask, completions `[N, G, ...]`, rewards `[N, G]`, sets `[R, N]`) -> gradients.

    A gradient is that of the method's own loss on one group, before any step. A set is the weights of groups in a mean.

    Args:
      policy: the model's functions.
      config: of the method, without KL.
    """
    method = grpo_method(policy, config)

    def of_group(params: Params, group: tuple) -> tuple[jax.Array, jax.Array]:
        ids, mask, completions, rewards = jax.tree.map(lambda x: x[None], group)
        ones = jnp.ones(rewards.shape)
        batch = to_batch(ids, mask, ones, completions)
        graded = RewardArrays(rewards, ones > 0)
        batch, advantages, _ = method.advantages(graded, batch, jnp.float32(0), None)
        batch = batch._replace(weights=config.loss.objective.aggregation(batch.completion_mask))
        trained, frozen = method.split(params)
        gradient = jax.grad(lambda trained: method.loss_fn(trained, frozen, batch, None)[0])(trained)
        return advantages[0], ravel_pytree(gradient)[0]

    @jax.jit
    def gradients_of(params, ids, mask, completions, rewards, sets) -> GroupGradients:
        advantages, gradients = jax.lax.map(partial(of_group, params), (ids, mask, completions, rewards))
        return GroupGradients(advantages, jnp.linalg.norm(gradients, axis=-1), sets @ gradients)

    return lambda *given: jax.device_get(gradients_of(*given))


def cosine(x: np.ndarray, y: np.ndarray) -> float:
    """The cosine of the angle between two gradients; NaN if one is 0."""
    length = np.linalg.norm(x) * np.linalg.norm(y)
    return float(x @ y / length) if length else float("nan")


# ---- additions


def carries(examples: Sequence[Example]) -> np.ndarray:
    """How many of the two columns of an addition carry, int `[N]`."""

    def of_pair(a: int, b: int) -> int:
        ones = a % 10 + b % 10 >= 10
        return ones + (a // 10 + b // 10 + ones >= 10)

    return np.array([of_pair(*map(int, example["prompt"].rstrip("=").split("+"))) for example in examples])


def group_rows(
    bench: Bench, seed: int, counts: Sequence[int], kinds: Mapping[str, float], *, prompts: int = 128, pool: int = 64
) -> dict[str, dict[str, float]]:
    """Rows of a table: the advantages and gradients of groups of 8 at the start of a seed.

    Args:
      bench: knows the start.
      seed: of it, of prompts and of completions.
      counts: rows for groups with so many right.
      kinds: ending of a row's name -> how graded the reward is.
      prompts: N.
      pool: B.
    """
    task = ARITHMETIC.task(num_prompts=prompts, seed=seed, heldout=1)
    given, params = task.task.prompts(0), bench.start(ARITHMETIC, seed)
    targets, start = task.targets(given.examples), (params, given.ids, given.mask)
    drawn, others = (jax.device_get(_sampled(*start, step_key(seed, SAMPLING, i), pool)) for i in range(2))

    def rewards(completions: Completions, **options: float) -> np.ndarray:
        return np.asarray(task.reward(targets, completions, step_key(seed, REWARD, 0), **options))

    everywhere, right = np.full((1, prompts), 1 / prompts), rewards(drawn) == 1
    solving = _gradients("dr_grpo")(*start, others, rewards(others), everywhere).gradients[0]

    def rows_of(names: Sequence[str], completions: Completions, rewards: np.ndarray, sets: np.ndarray) -> dict:
        found = _gradients("grpo")(*start, completions, rewards, sets)
        sizes, best = np.abs(found.advantages).mean(-1), found.advantages.max(-1)
        columns = {"|A|": sets @ sizes, "best A": sets @ best, "gradient": sets @ found.norms}
        columns["cosine"] = [cosine(gradient, solving) for gradient in found.gradients]
        return {name: {title: float(of[i]) for title, of in columns.items()} for i, name in enumerate(names)}

    as_they_come = chosen(drawn, np.tile(np.arange(8), (prompts, 1)))
    by_carries = np.stack([carries(given.examples) == i for i in range(3)])
    usable = _means((np.abs(right.sum(-1) - pool / 2) <= pool / 2 - 8)[None])  # 8 right ones, and 8 wrong ones
    rows = rows_of([START], as_they_come, rewards(as_they_come), everywhere)
    rows |= rows_of([COIN], as_they_come, rewards(as_they_come, coin=1.0), everywhere)
    for kind, graded in kinds.items():
        for count in counts:
            group = groups_with_right(drawn, right, count, 8)
            rows |= rows_of([f"{count} of 8 right{kind}"], group, rewards(group, graded=graded), usable)
    for kind, graded in kinds.items():
        names = [name + kind for name in CARRIES]
        rows |= rows_of(names, as_they_come, rewards(as_they_come, graded=graded), _means(by_carries))
    return rows


def signal(found: GroupGradients) -> float:
    """|mean|² / Tr Cov of the gradient of one group, Cov over groups of the same prompt. Neither is biased.

    With two groups of a prompt, g and g′, and their mean p: ½ |g − g′|² = |g|² + |g′|² − 2 |p|² has the expectation
    Tr Cov, and p · q of two prompts that of |mean|².

    Args:
      found: of M prompts with two groups each, one after the other, and M sets: the pairs.

    Returns:
      The ratio, about 0 (or below) where there is no signal.
    """
    squared = np.square(found.norms).reshape(-1, 2).sum(-1)
    of_pairs, count = np.square(found.gradients).sum(-1), len(found.gradients)
    mean_squared = (np.square(found.gradients.sum(0)).sum() - of_pairs.sum()) / (count * (count - 1))
    return float(mean_squared / (squared - 2 * of_pairs).mean())


def gradient_signal(bench: Bench, seed: int, group_size: int, *, prompts: int = 256, **options: float) -> float:
    """`signal` of groups at the start of a seed.

    Args:
      bench: knows the start.
      seed: of it, of prompts and of completions.
      group_size: G.
      prompts: M.
      options: of the reward.
    """
    task = ARITHMETIC.task(num_prompts=prompts, seed=seed, heldout=1)
    given, params = task.task.prompts(0), bench.start(ARITHMETIC, seed)
    examples = [example for example in given.examples for _ in range(2)]
    ids, mask = (np.repeat(x, 2, axis=0) for x in (given.ids, given.mask))
    completions = _sampled(params, ids, mask, step_key(seed, SAMPLING, 0), group_size)
    rewards = task.reward(task.targets(examples), completions, step_key(seed, REWARD, 0), **options)
    pairs = np.repeat(np.eye(prompts), 2, axis=1) / 2
    return signal(_gradients("grpo")(params, ids, mask, completions, rewards, pairs))


def _means(sets: np.ndarray) -> np.ndarray:
    """Weights of the means over sets, bool `[R, N]`; NaN over an empty one."""
    return np.where(sets.any(-1, keepdims=True), sets, np.nan) / np.maximum(sets.sum(-1, keepdims=True), 1)


@partial(jax.jit, static_argnames="pool")
def _sampled(params: Params, ids: jax.Array, mask: jax.Array, key: jax.Array, pool: int) -> Completions:
    policy, rows = decoder_policy(ARITHMETIC.model), jnp.arange(ids.shape[0] * pool).reshape(-1, pool)
    length = ARITHMETIC.max_tokens
    return sample_groups(policy, params, ids, mask, rows, key, max_tokens=length, eos_ids=(EOS_ID,), pad_id=PAD_ID)


@cache
def _gradients(preset: Literal["grpo", "dr_grpo"]) -> Callable[..., GroupGradients]:
    return make_gradients(decoder_policy(ARITHMETIC.model), recipe(preset, kl_coef=0.0))
