"""Completions become text on the host: for rewards, and for people. Each host grades those on its own devices."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from grpo_jax.config import AdvantagesOf, GRPOConfig
from grpo_jax.data.text import token_pieces
from grpo_jax.data.types import Completion, Prompts, Reward, Rewards, Span
from grpo_jax.devices import Devices, gather_rows, local_numbers, local_rows
from grpo_jax.hosts import gather
from grpo_jax.rewards.reward import (
    graders,
    named_components,
    new_counts,
    no_reward,
    score_completions,
    ungraded_counts,
    ungraded_messages,
)
from grpo_jax.rl.guards import check_first_rewards, rollout_metrics, rollout_warnings
from grpo_jax.rl.types import Graded, RewardArrays, Rollout
from grpo_jax.sampling.sampler import Completions
from grpo_jax.tasks.task import Task


def grading(task: Task, reward: Reward | Rewards, config: GRPOConfig, devices: Devices) -> Callable[[Rollout], Rollout]:
    """Returns the function that grades a rollout: rewards, and the counts of what graders gave no number.

    Args:
      task: for its decoder, and its environment.
      reward: one function, or several with weights.
      config: the run.
      devices: where rollouts lie.
    """
    reward = reward if config.needs_rewards else no_reward
    episodes = episodes_of(task)

    def grade(rollout: Rollout) -> Rollout:
        before = ungraded_counts(reward)
        completions = read_completions(rollout)
        prompts = take_prompts(rollout.prompts, local_numbers(devices, len(rollout.prompts.examples)))
        graded = grade_completions(prompts, completions, task, reward)
        if episodes and config.loss.advantages_of == "turns":
            counted = shares_a_function(reward, task.reward)
            graded = graded._replace(parts=episodes.turn_parts(completions, counted))
        counts = _sum_everywhere(reward, new_counts(before, ungraded_counts(reward)))
        everywhere = gather_rows("rewards", graded, devices)
        return rollout._replace(graded=everywhere, metrics=counts, warnings=grader_warnings(reward))

    return grade


def reporting(task: Task, reward: Reward | Rewards, config: GRPOConfig) -> Callable[[Rollout, int], Rollout]:
    """Returns the function that adds metrics and warnings to a graded rollout, and ends a run that cannot learn.

    Args:
      task: of the run.
      reward: as in `grading`.
      config: the run.
    """
    is_graded, episodes = config.needs_rewards, episodes_of(task)
    is_first = True

    def report(rollout: Rollout, step: int) -> Rollout:
        nonlocal is_first
        graded = rollout.graded
        assert graded is not None
        if step == 0:  # a resumed run continues as the whole one did
            check_first_rewards(graded, reward)
        metrics = rollout_metrics(graded)
        warnings = rollout_warnings(graded, task, step + 1, is_graded=is_graded)
        if episodes:
            if is_first:
                episodes.check_first_episodes(task, graded)
            metrics |= episodes.episode_metrics(graded)
            warnings = episodes.episode_warnings(task, graded) | warnings
        is_first = False
        return rollout._replace(metrics=metrics | rollout.metrics, warnings=warnings | rollout.warnings)

    return report


def grader_warnings(reward: Reward | Rewards) -> dict[str, str]:
    """Returns a sentence about each reason why graders gave completions no number, by key. All hosts call this."""
    if not graders(reward):
        return {}
    messages: dict[str, str] = {}
    for some in gather("why completions were not graded", ungraded_messages(reward)):
        messages |= some
    return {
        name: f"{message}; metrics.jsonl counts them as {name}, and those of evaluations as not_graded_share"
        for name, message in messages.items()
    }


def _sum_everywhere(reward: Reward | Rewards, counts: dict[str, int]) -> dict[str, int]:
    """Adds up what the graders of all hosts counted, by name."""
    if not graders(reward):
        return counts
    total: Counter[str] = Counter()
    for some in gather("what was not graded", counts):
        total.update(some)
    return dict(total)


def read_completions(rollout: Rollout) -> Completions:
    """Reads what the host needs of the completions on its devices: everything but log-probabilities."""
    fields = rollout.batch._replace(sampler_logprobs=None, truncated_logprobs=None)._asdict()
    return Completions(**local_rows({name: fields[name] for name in Completions._fields}))


def grade_completions(prompts: Prompts, completions: Completions, task: Task, reward: Reward | Rewards) -> Graded:
    """Decodes completions and rewards them.

    Args:
      prompts: N.
      completions: of `read_completions`.
      task: for its decoder.
      reward: one function, or several with weights.

    Raises:
      UsageError: a reward function returned another number of rewards than asked.
    """
    texts, of_episodes = decode_groups(completions, task), episodes_of(task)
    shape = completions.truncated.shape
    examples = [example for example in prompts.examples for _ in range(shape[1])]
    flat = [text for group in texts for text in group]
    scores = score_completions(reward, examples, flat)
    if any(scores.parts):
        from grpo_jax.data.spans import in_tokens  # a run without spans does not load it

        for number, (parts, text) in enumerate(zip(scores.parts, flat, strict=True)):
            scores.parts[number] = in_tokens(parts, text, task.decode)
    scores = jax.tree.map(lambda x: x.reshape(shape), scores)
    return Graded(
        scores.rewards,
        scores.applicable,
        scores.components,
        lengths=np.asarray(completions.completion_mask).sum(-1),
        truncated=np.asarray(completions.truncated),
        distinct=np.array([_distinct(group) for group in texts]),
        parts=scores.parts,
        episodes=of_episodes.episode_numbers(task, completions, texts) if of_episodes else {},
    )


def take_prompts(prompts: Prompts, rows: np.ndarray) -> Prompts:
    """Returns some prompts, by their numbers."""
    return Prompts(prompts.ids[rows], prompts.mask[rows], [prompts.examples[row] for row in rows])


def decode_groups(completions: Completions, task: Task) -> list[list[Completion]]:
    """Decodes `[N][G]` texts without the token that ended them. The text of an episode includes the observations."""
    episodes, (num_prompts, group_size) = episodes_of(task), completions.truncated.shape
    read = episodes.read_episode if episodes else read_text
    return [[read(task, completions, (i, j)) for j in range(group_size)] for i in range(num_prompts)]


def episodes_of(task: Task) -> Any:
    """Returns the module `rl.episodes`; None for a task without an environment, whose runs do not load it."""
    if task.environment is None:
        return None
    from grpo_jax.rl import episodes

    return episodes


def read_text(task: Task, completions: Completions, place: tuple[int, int]) -> Completion:
    """Returns the text of a completion, of all its tokens but those that end a turn."""
    tokens = completions.completion_ids[place][completions.attention_mask[place]]
    ids = tokens[~np.isin(tokens, task.eos_ids)].tolist()
    return Completion(task.decode(ids), ids, bool(completions.truncated[place]))


def shares_a_function(reward: Reward | Rewards, of_task: Reward | Rewards) -> bool:
    """Returns whether a run's reward has a function of the task's. Rewards of turns count only then.

    A control's coin toss has none, so the rewards of turns are left out as well. Otherwise they would teach the
    control, even where they cancel in the sum of an episode: the loss weighs a token by the length of its completion,
    and later turns change that length.
    """
    functions, others = ([part.reward for part in named_components(each).values()] for each in (reward, of_task))
    return any(function in others for function in functions)


# ---- as arrays for the devices


def reward_arrays(
    graded: Graded, advantages_of: AdvantagesOf, num_tokens: int, reward: Reward | Rewards
) -> RewardArrays:
    """Returns the rewards of a rollout as the arrays that advantages are made of.

    Args:
      graded: the rollout.
      advantages_of: what is compared, an option of the run.
      num_tokens: T.
      reward: for the weights of components.
    """
    if advantages_of in ("turns", "spans"):
        return RewardArrays(graded.rewards, graded.applicable, parts=_part_rewards(graded, num_tokens))
    if advantages_of == "sum":
        return RewardArrays(graded.rewards, graded.applicable)
    named = named_components(reward)
    weights = np.array([component.weight for component in named.values()], np.float32)
    components = np.stack([graded.components[name] for name in named], axis=-1)
    return RewardArrays(graded.rewards, graded.applicable, np.where(weights != 0, components, np.nan), weights)


def empty_rewards(shape: tuple[int, int, int], advantages_of: AdvantagesOf, reward: Reward | Rewards) -> RewardArrays:
    """Returns zeros of the shapes `[N, G, T]` that `reward_arrays` has."""
    groups = shape[:2]
    if advantages_of in ("turns", "spans"):
        return RewardArrays(np.zeros(groups, np.float32), np.zeros(groups, bool), parts=np.zeros(shape, np.float32))
    if advantages_of == "sum":
        return RewardArrays(np.zeros(groups, np.float32), np.zeros(groups, bool))
    count = len(named_components(reward))
    components = np.zeros((*groups, count), np.float32)
    return RewardArrays(components[..., 0], np.zeros(groups, bool), components, np.zeros(count, np.float32))


def _part_rewards(graded: Graded, num_tokens: int) -> np.ndarray:
    """Returns what each turn or span earned, at the last of its tokens, float32 `[N, G, T]`; NaN elsewhere.

    The last part of a completion also has what the completion's reward is above their sum: what the whole completion
    earned. A completion without parts is one.
    """
    earned = np.full((*graded.rewards.shape, num_tokens), np.nan, np.float32)
    for i, j in np.ndindex(graded.rewards.shape):
        parts: tuple[Span, ...] = graded.parts[i, j]  # type: ignore[assignment]
        rest = float(graded.rewards[i, j]) - sum(part.reward for part in parts)
        last = parts[-1].end - 1 if parts else int(graded.lengths[i, j]) - 1
        for token, reward in [*((part.end - 1, part.reward) for part in parts), (last, rest)]:
            earned[i, j, token] = np.nan_to_num(earned[i, j, token]) + reward
    return earned


def _distinct(group: Sequence[Completion]) -> float:
    return len({(*text.ids, text.truncated) for text in group}) / len(group)


# ---- as people read it: texts, rewards, and the text of each token

GROUPS = 2  # of a rollout that are written


def readable(
    rollout: Rollout,
    completions: Completions,
    logprobs: np.ndarray,
    advantages: np.ndarray,
    task: Task,
    devices: Devices,
) -> list[dict[str, Any]]:
    """Returns the first groups on the devices of this host, as JSON can hold them.

    Args:
      rollout: N groups, graded.
      completions: those on the devices of this host.
      logprobs: their log-probabilities `[n, G, T]` by the sampler.
      advantages: theirs, `[n, G]`, or `[n, G, T]` of turns and spans: the first entry is the advantage by all that the
        completion earned.
      task: for texts.
      devices: where groups lie.

    Returns:
      For each group the prompt, the example's other columns, and lists over its completions.
    """
    graded = rollout.graded
    assert graded is not None
    numbers = local_numbers(devices, len(graded.rewards))[:GROUPS]
    count = len(numbers)
    texts = decode_groups(jax.tree.map(lambda x: x[:count], completions), task)
    lengths = completions.attention_mask.sum(-1)
    episodes = episodes_of(task)

    def group(i: int) -> dict[str, Any]:
        number = numbers[i]
        example, sampled = rollout.prompts.examples[number], completions.completion_ids[i]
        by_completion = advantages[i] if advantages.ndim == 2 else advantages[i, :, 0]
        parts = _part_columns(graded, number, advantages[i] if advantages.ndim == 3 else None)
        return {
            "prompt": example["prompt"],
            "columns": {name: _short(value) for name, value in example.items() if name != "prompt"},
            "completions": texts[i],
            "rewards": np.where(graded.applicable[number], graded.rewards[number], np.nan).tolist(),
            "components": {name: _rounded(values[number]) for name, values in graded.components.items()},
            "advantages": _rounded(by_completion),
            "lengths": lengths[i].tolist(),
            "truncated": completions.truncated[i].tolist(),
            "tokens": [
                token_texts(ids[:length].tolist(), text, task)
                for ids, length, text in zip(sampled, lengths[i], texts[i], strict=True)
            ],
            "logprobs": [_rounded(values[:length], 3) for values, length in zip(logprobs[i], lengths[i], strict=True)],
            **(episodes.turn_columns(completions, i, texts[i]) if episodes else {}),
            **parts,
        }

    return [group(i) for i in range(count)]


def _part_columns(graded: Graded, number: int, advantages: np.ndarray | None) -> dict[str, Any]:
    """Returns columns about the turns or spans of a group.

    Args:
      graded: of the rollout.
      number: of the group.
      advantages: `[G, T]`, if they are made for each part.
    """
    parts = graded.parts[number]
    columns: dict[str, Any] = {}
    if not graded.episodes and any(graded.parts.ravel()):
        # The first token of each span and the one behind its last.
        columns["spans"] = [[[part.start, part.end] for part in row] for row in parts]
        columns["span_rewards"] = [[part.reward for part in row] for row in parts]
    if advantages is not None and (graded.episodes or columns):
        at_ends = [
            _rounded(row[[part.end - 1 for part in of_row]]) for row, of_row in zip(advantages, parts, strict=True)
        ]
        columns["turn_advantages" if graded.episodes else "span_advantages"] = at_ends
    return columns


def _rounded(values: np.ndarray, digits: int = 4) -> list[float]:
    return values.astype(float).round(digits).tolist()


def token_texts(ids: list[int], text: str, task: Task) -> list[str]:
    """Returns the part of a completion's text that each token adds (`data.text.token_pieces`). EOS adds nothing.

    Args:
      ids: as sampled, with what ended it.
      text: the completion.
      task: for its decoder.

    Returns:
      One text for each id.
    """
    texts = [""] * len(ids)
    content = [place for place, token in enumerate(ids) if token not in task.eos_ids]
    for place, part in zip(content, token_pieces([ids[place] for place in content], text, task.decode), strict=True):
        texts[place] = part
    if texts and not content:
        texts[0] = text
    return texts


def _short(value: Any) -> Any:
    """A column's value as JSON can hold it, if it is not long; else its beginning."""
    plain = value if isinstance(value, str | int | float | bool | None) else str(value)
    return plain[:2000] if isinstance(plain, str) else plain
