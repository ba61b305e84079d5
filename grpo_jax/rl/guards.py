"""Checks of tasks, and warnings about rollouts and updates."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from grpo_jax.config import BY_PART, GRPOConfig, SamplingConfig, check_top_k
from grpo_jax.errors import UsageError
from grpo_jax.rl.interaction import interaction_of
from grpo_jax.rl.types import Graded
from grpo_jax.tasks.task import Task

# In float32 ratios of tokens are within 1e-5 of 1. In bfloat16 on an H200, the largest of 32,000 ratios was off by 1 at
# the median of 96 rollouts and by 2.9 at most, although the mean was always between 1.012 and 1.017.
RATIO_TOLERANCE = 10.0
MISMATCH_TOLERANCE = 1.05
FAR_FROM_START = 1.0  # nats a token
LEFT_OUT_TOLERANCE = 1e-5  # probability of a token; rounding leaves less than 1e-6


def check_task(task: Task, config: GRPOConfig) -> None:
    """Raises if a task and the options do not work together.

    Args:
      task: The task of the run.
      config: Supplies the options of sampling, loss, critic and teacher that a task may not suit.

    Raises:
      UsageError: Task and options conflict. The message says what to change.
    """
    check_tokens(task)
    loss, sampling = config.loss, config.sampling
    check_top_k(config, task.vocab_size)
    interaction = interaction_of(task)
    interaction.check(sampling)
    if config.has_critic and interaction.parts == "turns":
        raise UsageError("a critic reads no episodes of several turns: leave critic out, or take no environment")
    if task.open_ended and (loss.mask_truncated or config.critic.bootstrap_truncated):
        raise UsageError(
            "completions of this task are meant to be cut off, and end there: leave mask_truncated and "
            "bootstrap_truncated out"
        )
    if loss.advantages_of in BY_PART and loss.advantages_of != interaction.parts:
        raise UsageError(
            f'advantages_of "{loss.advantages_of}" does not suit this task: "turns" is for tasks with an environment, '
            '"spans" for completions of one turn'
        )
    if sampling.curriculum_bound != SamplingConfig.curriculum_bound and task.encode is not None:
        raise UsageError("curriculum_bound is for the levels of generators, and this task has none: leave it out")
    counting = [name for name, weight in task.rewards.weights.items() if weight]
    if loss.advantages_of == "components" and len(counting) < 2:
        raise UsageError(
            'advantages_of "components" compares several rewards, but fewer than two of this task have a weight: give '
            'more of them, or take "sum"'
        )
    if sampling.filter_metric and sampling.filter_metric not in counting:
        raise UsageError(
            f'filter_metric "{sampling.filter_metric}" is no reward with a weight; such are: '
            f"{', '.join(counting) or 'none'}"
        )


def check_tokens(task: Task) -> None:
    """Raises if the tokens of a task do not fit the model.

    Raises:
      UsageError: The model cannot sample EOS, or its vocabulary lacks the padding token or a token of a prompt.
    """
    if not task.eos_ids:
        raise UsageError("the tokenizer has no EOS token, so no completion could end: name one in its eos_token")
    last = task.vocab_size - 1
    if not any(0 <= eos_id <= last for eos_id in task.eos_ids):
        raise UsageError(
            f"the model has the tokens 0 to {last}, and no EOS among {task.eos_ids}, so no completion could end: take "
            "the model's own tokenizer"
        )
    largest = task.heldout.tokens.ids.max(initial=task.pad_id)
    if largest > last:
        raise UsageError(
            f"a prompt has token {largest}, but the model has the tokens 0 to {last}: take the model's own tokenizer"
        )


def length_warning(width: int, longest: int | None) -> dict[str, str]:
    """Returns a warning if texts may be longer than the model was trained on.

    Args:
      width: The largest possible length of a text in tokens, including the prompt.
      longest: The model's `max_position_embeddings`, or None if it is not known.

    Returns:
      Sentences by key, like all warnings. A run prints each key once.
    """
    if longest is None or width <= longest:
        return {}
    return {
        "length": f"texts of up to {width} tokens, prompts included, are longer than the {longest} that the model was "
        "trained on: lower max_tokens or max_prompt_tokens"
    }


@np.errstate(invalid="ignore", over="ignore")  # the run warns about an infinite reward
def rollout_warnings(graded: Graded, step: int, spread: np.ndarray | None, *, is_graded: bool = True) -> dict[str, str]:
    """Returns warnings about rollouts from which the policy cannot learn.

    Args:
      graded: The rewards of the rollout.
      step: The number of the step, from 1.
      spread: The result of `has_spread`. None: the method does not compare rewards within groups.
      is_graded: True if the method needs rewards.
    """
    warnings = {}
    if not np.isfinite(graded.rewards).all():
        warnings["reward"] = "the reward function returned NaN or infinity: such a step is skipped"
    if not is_graded:
        return warnings
    if not graded.applicable.any():
        warnings["applicable"] = "no completion has a reward: see in the other warnings why the graders gave none"
    elif spread is not None and _compares_nothing(graded, spread):
        warnings["spread"] = (
            f"step {step}: in every group all rewards are equal{_which(graded)}, so there is nothing to learn from: "
            "choose easier or harder prompts, larger groups or a finer reward"
        )
    return warnings


def _compares_nothing(graded: Graded, spread: np.ndarray) -> bool:
    """Returns true if all groups have equal, finite rewards. Groups of one do not count: they never have spread."""
    finite = np.isfinite(graded.rewards[graded.applicable]).all()
    return bool(finite) and graded.rewards.shape[-1] > 1 and not spread.any()


def _which(graded: Graded) -> str:
    values = np.unique(graded.rewards[graded.applicable])
    return f" (all are {values[0]:g})" if len(values) == 1 else ""


# Failures that will recur. A function that hung may answer the next time, and NaN may concern only these rows.
_FAILED = ("_raised", "_died", "_wrong_length", "_not_numbers", "_bad_spans")


def check_first_rewards(graded: Graded, failures: Mapping[str, str]) -> None:
    """Raises if rewards failed on every completion of the first rollout: the run would never learn anything.

    Args:
      graded: The rewards of the rollout.
      failures: The result of `Rewards.failures`.

    Raises:
      UsageError: The rewards failed. The message says how and where.
    """
    sentences = [sentence for name, sentence in failures.items() if name.endswith(_FAILED)]
    if sentences and not graded.applicable.any():
        raise UsageError(f"no completion of the first rollout has a reward: {sentences[0]}")


def ratio_warning(metrics: Mapping[str, float]) -> dict[str, str]:
    """Returns a warning if trainer and sampler disagree on the probabilities of sampled tokens.

    Args:
      metrics: Metrics of the first minibatch, before any update: `first_ratio_deviation`, the largest |ratio − 1|
        against the sampler, and `first_sampler_mismatch`, the mean of exp |Δ log-probability|.
    """
    deviation, mismatch = metrics["first_ratio_deviation"], metrics["first_sampler_mismatch"]
    if not (deviation > RATIO_TOLERANCE or mismatch > MISMATCH_TOLERANCE):  # NaN: the minibatch has no tokens
        return {}
    return {
        "ratio": f"sampler and trainer compute different probabilities: in the first minibatch a ratio is off 1 by "
        f"{deviation:.2g}, and the mean of exp |difference of log-probabilities| is {mismatch:.3f}; check that "
        "temperature, dtype and model code are the same"
    }


def support_warning(metrics: Mapping[str, float]) -> dict[str, str]:
    """Returns a warning if supports of sampled tokens were larger than what is kept of them.

    Args:
      metrics: Metrics of a step, among them `support_left_out` if training uses supports.
    """
    left_out = metrics.get("support_left_out", 0.0)
    if not left_out > LEFT_OUT_TOLERANCE:
        return {}
    return {
        "support": f"the sampler draws from more tokens than support_size keeps: training leaves out {left_out:.2g} of "
        "the probability, in the mean over tokens: raise support_size, or lower top_p or top_k"
    }


def make_damage_check(learning_rate: float) -> Callable[[Mapping[str, Any]], dict[str, str]]:
    """Makes a check for updates that destroy the policy. It remembers the reward of the first step that it sees.

    The policy counts as destroyed if it is far from its start and has lost half of the first step's reward. The
    distance is `kl`, the KL to the reference. Without a reference it is the movement within an iteration, which is
    visible from the second optimizer step on: `sampler_mismatch`, the mean of exp |Δ log-probability|.

    Args:
      learning_rate: The peak learning rate of the run.

    Returns:
      metrics of a step -> a warning, or nothing.
    """
    first: list[float] = []

    def check(metrics: Mapping[str, Any]) -> dict[str, str]:
        reward, kl = metrics["reward"], metrics.get("kl")
        if reward is None:
            return {}
        if not first:
            first.append(reward)
        is_far = kl > FAR_FROM_START if kl is not None else metrics["sampler_mismatch"] > math.exp(FAR_FROM_START)
        if not is_far or reward >= first[0] - abs(first[0]) / 2 or first[0] == 0:
            return {}
        distance = (
            f"its KL to the reference is {kl:.2g} nats a token"
            if kl is not None
            else (f"one iteration moves log-probabilities by {math.log(metrics['sampler_mismatch']):.2g} nats a token")
        )
        return {
            "damage": f"the updates destroy the policy: {distance}, and its reward fell from {first[0]:.3g} to "
            f"{reward:.3g}: start again with a lower learning rate, such as {learning_rate / 10:.0e}"
        }

    return check
