"""Prompts of a step: their tokens, padded, and their examples."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from grpo_jax.data.types import Example, hash_values, pad_rows
from grpo_jax.errors import UsageError
from grpo_jax.models.rows.geometry import ONE_WIDTH, PromptTokens, PromptWidths


class Prompts(NamedTuple):
    """N prompts: their tokens as NumPy arrays, and their examples."""

    tokens: PromptTokens
    examples: list[Example]  # N

    def take(self, rows: np.ndarray) -> "Prompts":
        """Returns the prompts with these numbers."""
        return Prompts(self.tokens.take(rows), [self.examples[row] for row in rows])


def pad_prompts(
    token_ids: Sequence[Sequence[int] | np.ndarray],
    examples: Sequence[Example],
    *,
    width: int,
    pad_id: int,
    widths: PromptWidths = ONE_WIDTH,
) -> Prompts:
    """Pads prompts on the left into one array.

    Args:
      token_ids: N lists of 1 to `width` ids.
      examples: The N examples.
      width: The width of the array, P.
      pad_id: The id of padding.
      widths: See `PromptTokens`.

    Returns:
      The prompts.

    Raises:
      UsageError: A prompt is empty or longer than `width`.
    """
    for row, tokens in enumerate(token_ids):
        if not 0 < len(tokens) <= width:
            raise UsageError(f"prompt {row} has {len(tokens)} tokens: it needs at least 1 and at most {width}")
    ids, mask = pad_rows(token_ids, width, pad_id=pad_id, at_left=True)
    return Prompts(PromptTokens(ids, mask, widths=widths), list(examples))


def hash_prompts(prompts: Prompts) -> str:
    """Returns the digest of prompts and their columns."""
    return hash_values(prompts.tokens.ids, prompts.tokens.mask, prompts.examples)
