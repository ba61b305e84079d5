"""Refusals, warnings and metrics: what a run says of a task and of its rollouts."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from grpo_jax import hosts
from grpo_jax.checks import check_episodes
from grpo_jax.config import GRPOConfig
from grpo_jax.data.types import Reward, Rewards
from grpo_jax.errors import UsageError
from grpo_jax.rewards.reward import ungraded_messages
from grpo_jax.rl.types import Graded
from grpo_jax.tasks.task import Task

# In float32 every token's ratio is 1 to about 1e-5. In bfloat16 one was seen off by 0.33, and their mean by 0.013.
RATIO_TOLERANCE = 1.0
MISMATCH_TOLERANCE = 1.05


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
    if task.environment is not None:
        hosts.check_alone("environments")
    check_episodes(sampling, has_environment=task.environment is not None)
    if loss.mask_truncated and task.open_ended:
        raise UsageError(
            "completions of this task are meant to be cut off: mask_truncated would leave nothing to learn"
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


def check_tokens(task: Task) -> None:
    """Refuses a task whose completions could never end.

    Raises:
      UsageError: the model can sample no token that ends a completion, or a prompt has a token that it does not know.
    """
    if not task.eos_ids:
        raise UsageError("the tokenizer has no EOS token, so no completion could end: name one in its eos_token")
    last = task.vocab_size - 1
    if not any(0 <= eos_id <= last for eos_id in task.eos_ids):
        raise UsageError(
            f"the model has the tokens 0 to {last}, and no EOS among {task.eos_ids}, so no completion could end: take "
            "the model's own tokenizer"
        )
    if not 0 <= task.pad_id <= last:
        raise UsageError(f"pad_id is {task.pad_id}, but the model has the tokens 0 to {last}: take one of these")
    largest = task.heldout.ids.max(initial=0)
    if largest > last:
        raise UsageError(
            f"a prompt has token {largest}, but the model has the tokens 0 to {last}: take the model's own tokenizer"
        )


def length_warning(width: int, longest: int | None) -> dict[str, str]:
    """Warns of texts longer than the model was trained on.

    Args:
      width: tokens of the longest text that there can be, prompt included.
      longest: the model's `max_position_embeddings`, if it is known.

    Returns:
      Sentences by key, here and below: a run says each key once.
    """
    if longest is None or width <= longest:
        return {}
    return {
        "length": f"texts of up to {width} tokens, prompts included, are longer than the {longest} that the model was "
        "trained on: lower max_tokens or max_prompt_tokens"
    }


@np.errstate(invalid="ignore", over="ignore")  # the run warns about an infinite reward
def rollout_warnings(graded: Graded, task: Task, step: int, *, is_graded: bool = True) -> dict[str, str]:
    """Warns of rollouts that nothing can be learned from.

    Args:
      graded: what the step sampled.
      task: of the run.
      step: from 1.
      is_graded: whether rewards are needed.
    """
    warnings = {}
    if not np.isfinite(graded.rewards).all():
        warnings["reward"] = "the reward function returned NaN or infinity: such a step is skipped"
    if graded.truncated.all() and not task.open_ended and not graded.episodes:
        warnings["truncated"] = (
            "no completion ended within max_tokens: raise max_tokens, or check that the model was trained to write EOS"
        )
    if not is_graded:
        return warnings
    if not graded.applicable.any():
        warnings["applicable"] = "no completion has a reward: see in the other warnings why the graders gave none"
    elif _compares_nothing(graded):
        warnings["spread"] = (
            f"step {step}: in every group all rewards are equal{_which(graded)}, so there is nothing to learn from: "
            "choose easier or harder prompts, larger groups or a finer reward"
        )
    return warnings


def _compares_nothing(graded: Graded) -> bool:
    """Returns whether the rewards of each group are equal numbers; a group of one has nothing to compare anyway."""
    finite = np.isfinite(graded.rewards[graded.applicable]).all()
    return bool(finite) and graded.rewards.shape[-1] > 1 and not has_spread(graded).any()


def _which(graded: Graded) -> str:
    values = np.unique(graded.rewards[graded.applicable])
    return f" (all are {values[0]:g})" if len(values) == 1 else ""


# Failures of a function, which will come again. One that hung may answer the next time, and one that gave NaN may do so
# only for these rows.
_FAILED = ("_raised", "_died", "_wrong_length", "_not_numbers", "_bad_spans")


def check_first_rewards(graded: Graded, reward: Reward | Rewards) -> None:
    """Ends a run whose rewards fail on every completion of its first rollout: it would learn nothing until its end.

    Args:
      graded: the rollout.
      reward: that graded it.

    Raises:
      UsageError: how they failed, and where.
    """
    failures = [message for name, message in ungraded_messages(reward).items() if name.endswith(_FAILED)]
    if failures and not graded.applicable.any():
        raise UsageError(f"no completion of the first rollout has a reward: {failures[0]}")


def ratio_warning(metrics: Mapping[str, float]) -> dict[str, str]:
    """Warns when trainer and sampler disagree on the probabilities of samples.

    Args:
      metrics: of the first minibatch, when nothing was updated yet: `first_ratio_deviation`, the largest |ratio − 1|
        against the sampler, and `first_sampler_mismatch`, the mean of exp |Δ log-probability|.
    """
    deviation, mismatch = metrics["first_ratio_deviation"], metrics["first_sampler_mismatch"]
    if deviation <= RATIO_TOLERANCE and mismatch <= MISMATCH_TOLERANCE:
        return {}
    return {
        "ratio": f"sampler and trainer compute different probabilities: in the first minibatch a ratio is off 1 by "
        f"{deviation:.2g}, and the mean of exp |difference of log-probabilities| is {mismatch:.3f}; check that "
        "temperature, dtype and model code are the same"
    }


# ---- metrics of a rollout


@np.errstate(invalid="ignore", over="ignore")  # the run warns about an infinite reward
def rollout_metrics(graded: Graded) -> dict[str, Any]:
    """Returns metrics of a rollout, as plain numbers.

    `distinct_share` is the share of completions of a group that differ. Lengths are in tokens, the ending one included.
    `length_above` is the mean length of completions with more reward than the mean of their group (the solved ones if
    rewards are 0 and 1), `length_below` of those with less.
    """
    lengths, components = graded.lengths, graded.components
    counts = np.maximum(graded.applicable.sum(-1, keepdims=True), 1)
    group_mean = np.where(graded.applicable, graded.rewards, 0).sum(-1, keepdims=True) / counts
    # The mean of equal rewards may be off by rounding.
    counted = graded.applicable & has_spread(graded)[:, None]
    above = np.where(counted, graded.rewards - group_mean, 0)
    moments = {"reward": graded.rewards[graded.applicable]}
    if len(components) > 1:
        moments |= {f"reward_{name}": values[~np.isnan(values)] for name, values in components.items()}
    num_parts = [len(parts) for parts in graded.parts.ravel()]
    return {
        **{name: _mean(values) for name, values in moments.items()},
        **{f"{name}_std": float(values.std()) if values.size else None for name, values in moments.items()},
        "not_applicable_share": float(1 - graded.applicable.mean()),
        "zero_spread_share": float((~has_spread(graded)).mean()),
        "distinct_share": float(graded.distinct.mean()),
        "length_mean": float(lengths.mean()),
        "length_min": int(lengths.min()),
        "length_max": int(lengths.max()),
        "length_above": _mean(lengths[above > 0]),
        "length_below": _mean(lengths[above < 0]),
        "truncated_share": float(graded.truncated.mean()),
        "tokens": int(lengths.sum()),
        **({"spans_mean": float(np.mean(num_parts))} if any(num_parts) and not graded.episodes else {}),
    }


def has_spread(graded: Graded | None, metric: str = "") -> np.ndarray:
    """Returns whether the rewards of a group that apply differ, bool `[N]`: a group without spread teaches nothing.

    Args:
      graded: N groups.
      metric: the component to look at; "": the weighted sum.
    """
    assert graded is not None
    values = graded.components[metric] if metric else graded.rewards
    applicable = ~np.isnan(values) if metric else graded.applicable
    highest = np.where(applicable, values, -np.inf).max(-1)
    lowest = np.where(applicable, values, np.inf).min(-1)
    # A group without any reward teaches nothing either, and no step can use one with NaN or infinity.
    return (highest > lowest) & np.isfinite(highest) & np.isfinite(lowest)


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if values.size else None
