"""Rollouts in a form that people can read: texts, rewards, and the text of each token."""

from typing import Any

import numpy as np

from grpo_jax.data.text import token_pieces
from grpo_jax.devices import Devices, local_numbers
from grpo_jax.rl.grade import decode_groups, reader_of
from grpo_jax.rl.types import Graded, Rollout
from grpo_jax.sampling.sampler import Completions
from grpo_jax.tasks.task import Task

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
    texts = decode_groups(_first(completions, count), task)
    lengths = completions.attention_mask.sum(-1)
    columns = reader_of(task).columns

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
            **columns(completions, i, texts[i]),
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


def _first(completions: Completions, count: int) -> Completions:
    return Completions(*(None if x is None else x[:count] for x in completions))  # type: ignore[arg-type]


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
