"""Rollouts in a form that people can read: texts, rewards, and the text of each token."""

from typing import Any

import numpy as np

from grpo_jax.data.spans import pieces
from grpo_jax.rl.rollout import Rollout
from grpo_jax.tasks.task import Task

GROUPS = 2  # of a rollout that are kept


def readable(rollout: Rollout, logprobs: np.ndarray, advantages: np.ndarray, task: Task) -> list[dict[str, Any]]:
    """The first groups of a rollout as JSON can hold them.

    Args:
      rollout: N groups.
      logprobs: `[N, G, T]`, of the sampler.
      advantages: `[N, G]`; of turns `[N, G, K]`, of spans `[N, G, T]`: their first entry is the advantage by all that
        the completion earned.
      task: for the texts of tokens.

    Returns:
      For each group the prompt, the example's other columns, and lists over its completions.
    """
    completions = rollout.completions
    lengths = completions.attention_mask.sum(-1)
    spans = None if rollout.spans is None or not any(rollout.spans.ravel()) else rollout.spans
    by_completion = advantages[..., 0] if advantages.ndim == 3 else advantages

    def rounded(values: np.ndarray, digits: int = 4) -> list[float]:
        return values.astype(float).round(digits).tolist()

    def group(i: int) -> dict[str, Any]:
        example = rollout.prompts.examples[i]
        sampled = [ids[:length] for ids, length in zip(completions.completion_ids[i], lengths[i], strict=True)]
        of_tokens = zip(logprobs[i], lengths[i], strict=True)
        return {
            "prompt": example["prompt"],
            "columns": {name: _short(value) for name, value in example.items() if name != "prompt"},
            "completions": rollout.texts[i],
            "rewards": np.where(rollout.applicable[i], rollout.rewards[i], np.nan).tolist(),
            "components": {name: rounded(values[i]) for name, values in rollout.components.items()},
            "advantages": rounded(by_completion[i]),
            "lengths": lengths[i].tolist(),
            "truncated": completions.truncated[i].tolist(),
            "tokens": [
                token_texts(ids.tolist(), text, task) for ids, text in zip(sampled, rollout.texts[i], strict=True)
            ],
            "logprobs": [rounded(values[:length], 3) for values, length in of_tokens],
            **({} if completions.turn is None else of_episodes(i)),
            **({} if spans is None else of_spans(i, spans[i])),
        }

    def of_episodes(i: int) -> dict[str, Any]:
        """The turn of each token, negative where the environment said it; what turns earned; why episodes ended."""
        own, turn = completions.completion_mask[i], completions.turn[i]
        signed = np.where(own, turn, -turn)
        return {
            "turns": [numbers[:length].tolist() for numbers, length in zip(signed, lengths[i], strict=True)],
            "turn_rewards": [[turn.reward for turn in text.turns] for text in rollout.texts[i]],
            "endings": [text.ending for text in rollout.texts[i]],
        } | ({} if advantages.ndim == 2 else {"turn_advantages": of_turns(i, advantages[i])})

    def of_spans(i: int, parts: np.ndarray) -> dict[str, Any]:
        """The first token of each span and the one behind its last; what spans earned, and their advantages."""
        found = {
            "spans": [[[span.start, span.end] for span in row] for row in parts],
            "span_rewards": [[span.reward for span in row] for row in parts],
        }
        if advantages.ndim == 2 or completions.turn is not None:
            return found
        rows = zip(advantages[i], parts, strict=True)
        return found | {"span_advantages": [rounded(x[[span.end - 1 for span in row]]) for x, row in rows]}

    def of_turns(i: int, values: np.ndarray) -> list[list[float]]:
        return [rounded(row[: len(text.turns)]) for row, text in zip(values, rollout.texts[i], strict=True)]

    return [group(i) for i in range(min(GROUPS, len(rollout.texts)))]


def token_texts(ids: list[int], text: str, task: Task) -> list[str]:
    """The part of a completion's text that each token adds (`spans.pieces`). EOS adds nothing, also between
    turns.

    Args:
      ids: as sampled, with what ended it.
      text: the completion.
      task: for its decoder.

    Returns:
      One text for each id.
    """
    texts = [""] * len(ids)
    content = [place for place, token in enumerate(ids) if token not in task.eos_ids]
    for place, part in zip(content, pieces([ids[place] for place in content], text, task.decode), strict=True):
        texts[place] = part
    if texts and not content:
        texts[0] = text
    return texts


def _short(value: Any) -> Any:
    """A column's value as JSON can hold it, if it is not long; else its beginning."""
    plain = value if isinstance(value, str | int | float | bool | None) else str(value)
    return plain[:2000] if isinstance(plain, str) else plain
