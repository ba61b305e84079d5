"""Checks of a run, and warnings of what would otherwise go wrong unnoticed."""

from collections.abc import Callable
from typing import Any

import numpy as np

from grpo_jax.data.episodes import ENDINGS
from grpo_jax.data.types import Reward, Rewards
from grpo_jax.errors import UsageError
from grpo_jax.rewards.reward import graders, place_and_reason, ungraded_messages
from grpo_jax.runs import hosts
from grpo_jax.runs.folder import RunFolder
from grpo_jax.tasks.task import Task
from grpo_jax.training.rollout import Outcomes, zero_spread

# In float32 every token's ratio is 1 to about 1e-5. In bfloat16 one was seen off by 0.33, and their mean by 0.013.
RATIO_TOLERANCE = 1.0
MISMATCH_TOLERANCE = 1.05


def check_task(task: Task) -> None:
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


def check_turns(task: Task, max_turns: int, environment_tokens: int) -> None:
    """Refuses turns without an environment, and an environment without room for its replies.

    Raises:
      UsageError: one sentence that says what to change.
    """
    if task.environment is None and (max_turns > 1 or environment_tokens):
        raise UsageError(
            "max_turns and environment_tokens are for tasks with an environment, and this one has none: leave them out"
        )
    if task.environment and max_turns > 1 and not environment_tokens:
        raise UsageError(
            "environment_tokens is 0, so no episode could go on after its first turn: set it to the tokens of all "
            "replies of an episode"
        )


def check_length(run: RunFolder, width: int, longest: int | None) -> None:
    """Warns of texts longer than the model was trained on.

    Args:
      run: says it.
      width: tokens of the longest text that there can be, prompt included.
      longest: the model's `max_position_embeddings`, if it is known.
    """
    if longest is not None and width > longest:
        run.warn_once(
            "length",
            f"texts of up to {width} tokens, prompts included, are longer than the {longest} that the model was "
            "trained on: lower max_tokens or max_prompt_tokens",
        )


def check_rollout(run: RunFolder, rollout: Outcomes, task: Task, step: int, *, graded: bool = True) -> None:
    """Warns of rollouts that nothing can be learned from. `step` is counted from 1; `graded`: rewards are needed."""
    if not np.isfinite(rollout.rewards).all():
        run.warn_once("reward", "the reward function returned NaN or infinity: such a step is skipped")
    if rollout.truncated.all() and not task.open_ended and rollout.episodes is None:
        run.warn_once(
            "truncated",
            "no completion ended within max_tokens: raise max_tokens, or check that the model was trained to write EOS",
        )
    if not graded:
        return
    if not rollout.applicable.any():
        run.warn_once("applicable", "no completion has a reward: see in the other warnings why the graders gave none")
    elif _compares_nothing(rollout):
        run.warn_once(
            "spread",
            f"step {step}: in every group all rewards are equal{_which(rollout)}, so there is nothing to learn from: "
            "choose easier or harder prompts, larger groups or a finer reward",
        )


def _compares_nothing(rollout: Outcomes) -> bool:
    """Whether in all groups the rewards are equal numbers; a group of one has nothing to compare anyway."""
    finite = np.isfinite(rollout.rewards[rollout.applicable]).all()
    return bool(finite) and rollout.rewards.shape[-1] > 1 and bool(zero_spread(rollout).all())


def _which(rollout: Outcomes) -> str:
    values = np.unique(rollout.rewards[rollout.applicable])
    return f" (all are {values[0]:g})" if len(values) == 1 else ""


def check_graders(run: RunFolder, rewards: Reward | Rewards) -> None:
    """Warns of completions that graders gave no number, once for each reason."""
    if not graders(rewards):
        return
    messages: dict[str, str] = {}
    for of_host in hosts.gather("why completions were not graded", ungraded_messages(rewards)):
        messages |= of_host
    for name, message in messages.items():
        run.warn_once(
            name, f"{message}; metrics.jsonl counts them as {name}, and those of evaluations as not_graded_share"
        )


# Failures of a function, which will come again. One that hung may answer the next time, and one that gave NaN may do so
# only for these rows.
_FAILED = ("_raised", "_died", "_wrong_length", "_not_numbers", "_bad_spans")


def check_not_all_failed(rollout: Outcomes, rewards: Reward | Rewards) -> None:
    """Ends a run whose rewards fail on every completion: nothing would be learned until its end.

    Args:
      rollout: the first one.
      rewards: that it was graded by.

    Raises:
      UsageError: how they failed; of what was raised also where.
    """
    failed = [message for name, message in ungraded_messages(rewards).items() if name.endswith(_FAILED)]
    if failed and not rollout.applicable.any():
        raise UsageError(f"no completion of the first rollout has a reward: {failed[0]}")


def check_episodes(run: RunFolder, rollout: Outcomes, task: Task, *, is_first: bool) -> None:
    """Warns of what the environment failed at, once for each kind, and of episodes that had too few turns.

    Args:
      run: says it.
      rollout: of the step.
      task: of the run.
      is_first: whether this is the first step of a call of training.

    Raises:
      UsageError: every episode of the first rollout ended because the environment raised, died, or gave no reply.
    """
    if task.environment is None or rollout.episodes is None:
        return
    endings = {ENDINGS[number] for number in np.unique(rollout.episodes.ending)}
    for failure, message in task.environment.messages.items():
        said = f"the environment failed ({failure}), which ends the episode: {place_and_reason(message)}"
        if is_first and endings <= {"raised", "not a reply", "died"}:
            raise UsageError(f"every episode of the first rollout ended in its environment: {said}")
        run.warn_once(
            f"environment {failure}", f"{said}; metrics.jsonl counts them as ended_{failure.replace(' ', '_')}"
        )
    if endings == {"turns"}:
        run.warn_once("turns", "every episode was cut off after its last turn: raise max_turns")


def check_filled(run: RunFolder, rollouts: int, share: float) -> None:
    """Warns when dynamic sampling had to fill up a batch with groups of equal rewards.

    Args:
      run: says it.
      rollouts: of the step.
      share: of groups in the update whose rewards do not differ.
    """
    if share > 0:
        run.warn_once(
            "filled",
            f"after {rollouts} rollouts of a step, the rewards are still equal in {share:.0%} of its groups: raise "
            "max_rollouts, or choose easier or harder prompts",
        )


def check_first_ratio(run: RunFolder, metrics: dict[str, float]) -> None:
    """Warns when trainer and sampler disagree on the probabilities of samples.

    Args:
      run: says it.
      metrics: of the first minibatch, when nothing was updated yet: `first_ratio_deviation`, the largest |ratio − 1|
        against the sampler, and `first_sampler_mismatch`, the mean of exp |Δ log-probability|.
    """
    deviation, mismatch = metrics["first_ratio_deviation"], metrics["first_sampler_mismatch"]
    if deviation > RATIO_TOLERANCE or mismatch > MISMATCH_TOLERANCE:
        run.warn_once(
            "ratio",
            f"sampler and trainer compute different probabilities: in the first minibatch a ratio is off 1 by "
            f"{deviation:.2g}, and the mean of exp |difference of log-probabilities| is {mismatch:.3f}; check that "
            "temperature, dtype and model code are the same",
        )


def check_gradients(run: RunFolder, name: str, skipped: int, max_skipped: int, dump: Callable[[], Any]) -> None:
    """Writes the batch of a skipped step to a file, and stops after `max_skipped` in a row.

    Args:
      run: says it, and keeps the dump.
      name: of the phase and optimizer step.
      skipped: steps in a row whose gradients were not finite, up to this one.
      max_skipped: skipped steps in a row at which the run stops.
      dump: makes the arrays to keep, by name.

    Raises:
      FloatingPointError: too many in a row.
    """
    if not skipped:
        return
    file = run.path / f"skipped_{name}.npz"
    arrays: Any = {name: np.asarray(value) for name, value in dump().items() if value is not None}
    if run.writes:
        np.savez_compressed(file, **arrays)
    run.warn_once("skipped", f"gradients of {name} are not finite: the step is skipped, its batch is in {file}")
    if skipped >= max_skipped:
        raise FloatingPointError(
            f"gradients were not finite {max_skipped} times in a row: lower the learning rate, or look at {file}"
        )
