"""Refusals of tasks that cannot be trained on, before anything is compiled."""

from collections.abc import Mapping

from grpo_jax.config import GRPOConfig
from grpo_jax.devices import host_count
from grpo_jax.errors import UsageError
from grpo_jax.rl.guards import check_tokens, check_turns
from grpo_jax.rl.scorers import needs_replay
from grpo_jax.tasks.task import Task


def check_task(task: Task, config: GRPOConfig) -> None:
    """Refuses a task that cannot be trained on with these options.

    Raises:
      UsageError: one sentence that says what to change.
    """
    check_tokens(task)
    loss, sampling = config.loss, config.sampling
    if sampling.top_k > task.vocab_size:
        raise UsageError(
            f"top_k is {sampling.top_k}, but the model has {task.vocab_size} tokens: set it below that, or to 0 for all"
        )
    if task.environment is not None and host_count() > 1:
        raise UsageError(f"an environment runs on one host, and there are {host_count()}: leave out --distributed")
    check_turns(task, sampling.max_turns, sampling.environment_tokens)
    if loss.mask_truncated and task.open_ended:
        raise UsageError(
            "completions of this task are meant to be cut off: mask_truncated would leave nothing to learn"
        )
    if needs_replay(config) and task.environment is not None:
        raise UsageError(
            "old_logprobs sampler with staleness runs the sampler again on its completions, and not on episodes: leave "
            "out old_logprobs, staleness or the environment"
        )
    if loss.advantages_of == "spans" and task.environment is not None:
        raise UsageError(
            'advantages_of "spans" is for completions of one turn, and this task has an environment: set it to "turns"'
        )
    if loss.advantages_of == "turns" and task.environment is None:
        raise UsageError(
            'advantages_of "turns" is for tasks with an environment, and this one has none: set it to "sum"'
        )
    rewards = task.reward if isinstance(task.reward, Mapping) else {}
    counting = [name for name, component in rewards.items() if component.weight]
    if loss.advantages_of == "components" and len(counting) < 2:
        raise UsageError(
            'advantages_of "components" compares several rewards, but fewer than two of this task have a weight: give '
            'more of them, or take "sum"'
        )
    if sampling.filter_metric and sampling.filter_metric not in counting:
        raise UsageError(
            f'filter_metric "{sampling.filter_metric}" is no reward with a weight; such are: '
            f"{', '.join(counting) or 'none, for the reward has no parts'}"
        )
