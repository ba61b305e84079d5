"""Decodes, grades and measures completions on the host. Each host grades the completions on its own devices."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np

from grpo_jax.config import BY_PART, AdvantagesOf, GRPOConfig
from grpo_jax.data.prompts import Prompts
from grpo_jax.data.text import token_pieces
from grpo_jax.data.types import Completion, Example, Span
from grpo_jax.devices import Devices, devices_of, gather_rows, local_numbers, local_rows
from grpo_jax.hosts import gather
from grpo_jax.rewards.reward import Rewards, to_rewards
from grpo_jax.rl.guards import check_first_rewards, rollout_warnings
from grpo_jax.rl.interaction import interaction_of
from grpo_jax.rl.types import Graded, RewardArrays, Rollout, Timed
from grpo_jax.sampling.sampler import Completions
from grpo_jax.tasks.task import Task


def make_grading(
    task: Task, rewards: Rewards, config: GRPOConfig, *, compares: bool = True, timed: Timed = nullcontext
) -> tuple[Callable[[Rollout], Rollout], Callable[[Rollout, int], Rollout]]:
    """Makes the functions that grade the rollouts of a run.

    Args:
      task: Decodes completions, and supplies an environment if there is one.
      rewards: The rewards of the run.
      config: Supplies the devices, what advantages compare, and if completions are graded at all.
      compares: True if the method compares rewards within groups, and not with a critic.
      timed: Adds the seconds of a block to the time of the named part of the iteration. Default: nothing is timed.

    Returns:
      A function that adds rewards and counts of ungraded completions to a rollout; and a function (rollout, step) ->
      rollout with metrics and warnings, which raises if the run cannot learn.
    """
    devices, read = devices_of(config), rewards if config.needs_rewards else to_rewards({})
    names, by_part = [""], config.loss.advantages_of in BY_PART
    if config.loss.advantages_of == "components":
        names = [name for name, weight in rewards.weights.items() if weight]

    def grade(rollout: Rollout) -> Rollout:
        with timed("rollout"):
            jax.block_until_ready(rollout.batch.completion_ids)
        with timed("reward"):
            before = read.counts()
            completions = read_completions(rollout)
            prompts = rollout.prompts.take(local_numbers(devices, len(rollout.prompts.examples)))
            graded = grade_completions(prompts, completions, task, read)
            counts, warnings = gather_failures(read, before)
            everywhere = gather_rows("rewards", graded, devices)
        return rollout._replace(graded=everywhere, metrics=counts, warnings=warnings)

    def report(rollout: Rollout, step: int) -> Rollout:
        graded = rollout.graded
        assert graded is not None
        if step == 0:  # a resumed run must continue like an uninterrupted run
            check_first_rewards(graded, rewards.failures())
        metrics, warnings = interaction_of(task).report(task, graded, step)
        spread = np.any([has_spread(graded, name, by_part=by_part) for name in names], axis=0)
        metrics = rollout_metrics(graded, spread) | metrics
        warnings |= rollout_warnings(graded, step + 1, spread if compares else None, is_graded=config.needs_rewards)
        return rollout._replace(metrics=metrics | rollout.metrics, warnings=warnings | rollout.warnings)

    return grade, report


def gather_failures(rewards: Rewards, before: Mapping[str, int] = {}) -> tuple[dict[str, int], dict[str, str]]:
    """Returns the new counts of ungraded completions on all hosts, and a warning for each reason. All hosts call this.

    Args:
      rewards: The rewards of the run.
      before: The earlier result of `rewards.counts`, from which on completions are counted.
    """
    if not rewards.graders:
        return {}, {}
    local = Counter(rewards.counts()) - Counter(before), rewards.failures()
    counts, failures = zip(*gather("what was not graded", local), strict=True)
    words = "metrics.jsonl counts them as {}, and those of evaluations as not_graded_share"
    warnings = {name: f"{why}; {words.format(name)}" for some in failures for name, why in some.items()}
    return dict(sum(counts, Counter())), warnings


def read_completions(rollout: Rollout) -> Completions:
    """Copies the completions on this host's devices to the host, without log-probabilities and supports."""
    unread = dict.fromkeys(("sampler_logprobs", "processed_logprobs", "support_ids", "is_border"))
    fields = rollout.batch._asdict() | unread
    return Completions(**local_rows({name: fields[name] for name in Completions._fields}))


def grade_completions(prompts: Prompts, completions: Completions, task: Task, rewards: Rewards) -> Graded:
    """Decodes completions and computes their rewards.

    Args:
      prompts: The N prompts.
      completions: The completions, as returned by `read_completions`.
      task: Decodes completions.
      rewards: The rewards to compute.

    Raises:
      UsageError: A reward function returned the wrong number of rewards.
    """
    interaction, texts, shape = interaction_of(task), decode_groups(completions, task), completions.truncated.shape
    examples = [example for example in prompts.examples for _ in range(shape[1])]
    flat = [text for group in texts for text in group]
    read = final_texts(task, examples, flat)
    sums = rewards.grade(examples, read)
    parts = interaction.find_parts(task, completions, read, sums.parts, rewards)
    sums = jax.tree.map(lambda x: x.reshape(shape), sums)
    return Graded(
        sums.rewards,
        sums.applicable,
        sums.components,
        lengths=np.asarray(completions.completion_mask).sum(-1),
        truncated=np.asarray(completions.truncated),
        distinct=np.array([len({(*text.ids, text.truncated) for text in group}) / shape[1] for group in texts]),
        parts=parts,
        statistics=interaction.statistics(task, completions, texts),
        num_tokens=np.asarray(completions.attention_mask).sum(-1),
    )


def final_texts(task: Task, examples: Sequence[Example], texts: Sequence[Completion]) -> list[Completion]:
    """Returns the part of each completion that rewards and votes read: see `Task.extract_final`."""
    if task.extract_final is None or interaction_of(task).parts == "turns":
        return list(texts)
    return list(map(task.extract_final, examples, texts))


def decode_groups(completions: Completions, task: Task) -> list[list[Completion]]:
    """Decodes completions to `[N][G]` texts without EOS. Those of several turns include the observations."""
    read, (num_prompts, group_size) = interaction_of(task).read, completions.truncated.shape
    # One call for all tokens, since a thousand calls of NumPy take longer than decoding.
    content = completions.attention_mask & ~np.isin(completions.completion_ids, task.eos_ids)
    return [[read(task, completions, content, (i, j)) for j in range(group_size)] for i in range(num_prompts)]


# ---- as arrays for the devices


def reward_arrays(
    graded: Graded, advantages_of: AdvantagesOf, num_tokens: int, weights: Mapping[str, float]
) -> RewardArrays:
    """Converts the rewards of a rollout to the arrays from which advantages are computed.

    Args:
      graded: The rewards of the rollout.
      advantages_of: The option of this name.
      num_tokens: Tokens of a completion, T.
      weights: The weights of the rewards by name.
    """
    if advantages_of in BY_PART:
        return RewardArrays(graded.rewards, graded.applicable, parts=_part_rewards(graded, num_tokens))
    if advantages_of == "sum":
        return RewardArrays(graded.rewards, graded.applicable)
    components = np.stack([graded.components[name] for name in weights], axis=-1)
    weight = np.array([*weights.values()], np.float32)
    return RewardArrays(graded.rewards, graded.applicable, np.where(weight != 0, components, np.nan), weight)


def empty_rewards(shape: tuple[int, int, int], advantages_of: AdvantagesOf, num_rewards: int) -> RewardArrays:
    """Returns zeros with the shapes of `reward_arrays`, for completions of shape `[N, G, T]`."""
    groups = shape[:2]
    if advantages_of in BY_PART:
        return RewardArrays(np.zeros(groups, np.float32), np.zeros(groups, bool), parts=np.zeros(shape, np.float32))
    if advantages_of == "sum":
        return RewardArrays(np.zeros(groups, np.float32), np.zeros(groups, bool))
    components = np.zeros((*groups, num_rewards), np.float32)
    return RewardArrays(components[..., 0], np.zeros(groups, bool), components, np.zeros(num_rewards, np.float32))


def _part_rewards(graded: Graded, num_tokens: int) -> np.ndarray:
    """Returns the reward of each turn or span at its last token, float32 `[N, G, T]`; NaN elsewhere.

    The last part of a completion also gets the difference between the reward of the completion and the sum over its
    parts. A completion without parts is a single part.
    """
    earned = np.full((*graded.rewards.shape, num_tokens), np.nan, np.float32)
    for i, j in np.ndindex(graded.rewards.shape):
        parts: tuple[Span, ...] = graded.parts[i, j]  # type: ignore[assignment]
        rest = float(graded.rewards[i, j]) - sum(part.reward for part in parts)
        last = parts[-1].end - 1 if parts else int(graded.lengths[i, j]) - 1
        for token, reward in [*((part.end - 1, part.reward) for part in parts), (last, rest)]:
            earned[i, j, token] = np.nan_to_num(earned[i, j, token]) + reward
    return earned


# ---- rollouts for people to read

GROUPS = 2  # the number of groups of a rollout that are written


def readable(
    rollout: Rollout,
    completions: Completions,
    logprobs: np.ndarray,
    advantages: np.ndarray,
    task: Task,
    devices: Devices,
) -> list[dict[str, Any]]:
    """Returns the first groups on the devices of this host, as values for JSON.

    Args:
      rollout: The graded rollout, with N groups.
      completions: The completions of the n groups on this host.
      logprobs: The sampler's log-probabilities of these completions, `[n, G, T]`.
      advantages: The advantages of these completions, `[n, G]`. With turns and spans `[n, G, T]`, where the first entry
        is the advantage from the whole reward of a completion.
      task: Decodes completions.
      devices: The devices that share the rows.

    Returns:
      A dict for each group: its prompt, the other columns of the example, and lists over its completions.
    """
    graded = rollout.graded
    assert graded is not None
    numbers = local_numbers(devices, len(graded.rewards))[:GROUPS]
    count = len(numbers)
    texts = decode_groups(jax.tree.map(lambda x: x[:count], completions), task)
    lengths = completions.attention_mask.sum(-1)
    interaction, has_parts = interaction_of(task), any(graded.parts.ravel())

    def group(i: int) -> dict[str, Any]:
        number = numbers[i]
        by_completion = advantages[i] if advantages.ndim == 2 else advantages[i, :, 0]
        by_part = {}
        if advantages.ndim == 3 and has_parts:
            rows = zip(advantages[i], graded.parts[number], strict=True)
            at_ends = [_rounded(row[[part.end - 1 for part in parts]]) for row, parts in rows]
            by_part = {f"{interaction.parts.removesuffix('s')}_advantages": at_ends}
        return {
            **readable_group(task, rollout.prompts.examples[number], graded, number, completions, i, texts[i]),
            "advantages": _rounded(by_completion),
            "logprobs": [_rounded(values[:length], 3) for values, length in zip(logprobs[i], lengths[i], strict=True)],
            **by_part,
        }

    return [group(i) for i in range(count)]


def readable_group(
    task: Task, row: Example, graded: Graded, number: int, completions: Completions, place: int, texts: list[Completion]
) -> dict[str, Any]:
    """Returns a group as values for JSON: its prompt, the other columns of its row, and lists over completions.

    Args:
      task: Decodes completions.
      row: The columns of the prompt.
      graded: The rewards of the rollout.
      number: The number of the group in the rollout.
      completions: The completions on this host, as NumPy arrays.
      place: The place of the group in them.
      texts: The texts of the group's completions.
    """
    lengths = completions.attention_mask[place].sum(-1)
    sampled = zip(completions.completion_ids[place], lengths, texts, strict=True)
    return {
        "prompt": row["prompt"],
        "columns": {name: _short(value) for name, value in row.items() if name != "prompt"},
        "completions": list(texts),
        "rewards": np.where(graded.applicable[number], graded.rewards[number], np.nan).tolist(),
        "components": {name: _rounded(values[number]) for name, values in graded.components.items()},
        "lengths": lengths.tolist(),
        "truncated": completions.truncated[place].tolist(),
        "tokens": [token_texts(ids[:length].tolist(), text, task) for ids, length, text in sampled],
        **interaction_of(task).columns(graded, number, completions, place, texts),
    }


def _rounded(values: np.ndarray, digits: int = 4) -> list[float]:
    rounded: list[float] = values.astype(float).round(digits).tolist()
    return rounded


def token_texts(ids: list[int], text: str, task: Task) -> list[str]:
    """Splits the text of a completion into one text for each token (`data.text.token_pieces`). That of EOS is empty.

    Args:
      ids: The sampled token ids, including EOS.
      text: The text of the completion.
      task: Decodes completions.
    """
    texts = [""] * len(ids)
    content = [place for place, token in enumerate(ids) if token not in task.eos_ids]
    for place, part in zip(content, token_pieces([ids[place] for place in content], text, task.decode), strict=True):
        texts[place] = part
    if texts and not content:
        texts[0] = text
    return texts


def _short(value: Any) -> Any:
    """Returns a value as JSON can hold it. Texts are cut after 2,000 characters."""
    plain = value if isinstance(value, str | int | float | bool | None) else str(value)
    return plain[:2000] if isinstance(plain, str) else plain


# ---- metrics of a rollout


@np.errstate(invalid="ignore", over="ignore")  # the run warns about an infinite reward
def rollout_metrics(graded: Graded, spread: np.ndarray) -> dict[str, Any]:
    """Returns metrics of a rollout, as Python numbers. `spread` is the result of `has_spread`.

    `distinct_share` is the share of distinct completions in a group. Lengths are in tokens, including EOS.
    `length_above` is the mean length of completions with a reward above the mean of their group (the correct ones if
    rewards are 0 and 1). `length_below` is the mean length of completions with a reward below it.
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
    return {
        **{name: _mean(values) for name, values in moments.items()},
        **{f"{name}_std": float(values.std()) if values.size else None for name, values in moments.items()},
        "not_applicable_share": float(1 - graded.applicable.mean()),
        "zero_spread_share": float((~spread).mean()),
        "distinct_share": float(graded.distinct.mean()),
        "length_mean": float(lengths.mean()),
        "length_min": int(lengths.min()),
        "length_max": int(lengths.max()),
        "length_above": _mean(lengths[above > 0]),
        "length_below": _mean(lengths[above < 0]),
        "truncated_share": float(graded.truncated.mean()),
        "tokens": int(lengths.sum()),
    }


def has_spread(graded: Graded | None, metric: str = "", *, by_part: bool = False) -> np.ndarray:
    """Returns for each group if its applicable rewards differ, bool `[N]`. Groups without spread have advantages of 0.

    Args:
      graded: The rewards of N groups.
      metric: The component to compare. Default: the weighted sum.
      by_part: True to compare turns or spans, unless there is a metric.
    """
    assert graded is not None
    values = graded.components[metric] if metric else graded.rewards
    applicable = ~np.isnan(values) if metric else graded.applicable
    highest = np.where(applicable, values, -np.inf).max(-1)
    lowest = np.where(applicable, values, np.inf).min(-1)
    # Groups without any reward have no gradient either, and no step can use NaN or infinity.
    spread: np.ndarray = np.isfinite(highest) & np.isfinite(lowest)
    if by_part and not metric:
        groups = zip(graded.rewards, graded.parts, applicable, strict=True)
        spread &= np.array([_parts_differ(rewards[where], parts[where]) for rewards, parts, where in groups])
    else:
        spread &= highest > lowest
    return spread


def _parts_differ(rewards: np.ndarray, parts: np.ndarray) -> bool:
    """Returns whether returns to go differ in a group, compared as in `functional.turn_advantages`."""
    returns = [_returns_to_go(*completion) for completion in zip(rewards.tolist(), parts, strict=True)]
    everything = [value for row in returns for value in row]
    rounding = 1e-6 * max(map(abs, everything), default=0.0)
    columns = ([row[k] for row in returns if k < len(row)] for k in range(max(map(len, returns), default=0)))
    compared = (column if len(column) > 1 else everything for column in columns)
    return any(max(values) - min(values) > rounding for values in compared)


def _returns_to_go(reward: float, parts: tuple[Span, ...]) -> list[float]:
    """Returns the rewards from each part on. Parts with the same end count as one, and no parts count as one too."""
    returns: dict[int, float] = {}
    for part in parts:
        returns.setdefault(part.end, reward)
        reward -= part.reward
    return list(returns.values()) or [reward]


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if values.size else None
