"""Held-out evaluation: sampled with a standard error, and greedy."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from grpo_jax.models.transformer import Params
from grpo_jax.tasks.task import Prompts, Reward, Rewards, Task
from grpo_jax.training.rollout import Rollout, Sampler, roll_out, step_key

_EVALUATION = 2  # stream of keys


class Evaluation(NamedTuple):
    """Mean rewards over held-out prompts."""

    sampled: float
    sampled_se: float  # standard error over prompts
    greedy: float
    ended_share: float  # of sampled completions


def heldout_rollouts(
    sampler: Sampler,
    params: Params,
    task: Task,
    reward: Reward | Rewards,
    *,
    num_prompts: int,
    group_size: int,
    temperature: float,
    seed: int,
) -> Iterator[tuple[Rollout, int]]:
    """Rollouts over all held-out prompts: the last completion of a group is greedy, the others sampled.

    In batches of the training shape, so that evaluation compiles nothing of its own. The same
    noise every time: differences between evaluations are those of the parameters.

    Args:
      sampler: the run's.
      params: to evaluate.
      task: its held-out prompts are used.
      reward: on text.
      num_prompts: N of the sampler.
      group_size: G of the sampler.
      temperature: of all but the last.
      seed: of the noise.

    Yields:
      A rollout, and how many of its prompts count (the last batch is filled up).
    """
    row = np.full(group_size, temperature, np.float32)
    row[-1] = 0.0
    total = len(task.heldout.examples)
    for number, start in enumerate(range(0, total, num_prompts)):
        indices = np.minimum(np.arange(start, start + num_prompts), total - 1)
        examples = [task.heldout.examples[i] for i in indices]
        prompts = Prompts(task.heldout.ids[indices], task.heldout.mask[indices], examples)
        temperatures = np.tile(row, (num_prompts, 1))
        key = step_key(seed, _EVALUATION, number)
        rollout = roll_out(sampler, params, prompts, task, reward, temperatures, key)
        yield rollout, min(num_prompts, total - start)


def evaluate(rollouts: Iterator[tuple[Rollout, int]] | list[tuple[Rollout, int]]) -> Evaluation:
    """The numbers of `heldout_rollouts`."""
    rewards, ended = [], []
    for rollout, count in rollouts:
        rewards.append(rollout.rewards[:count])
        ended.append(~rollout.completions.truncated[:count, :-1])
    scores = np.concatenate(rewards).astype(np.float64)
    of_prompt = scores[:, :-1].mean(-1)
    return Evaluation(
        sampled=float(of_prompt.mean()),
        sampled_se=float(of_prompt.std(ddof=1) / np.sqrt(len(of_prompt))),
        greedy=float(scores[:, -1].mean()),
        ended_share=float(np.concatenate(ended).mean()),
    )
