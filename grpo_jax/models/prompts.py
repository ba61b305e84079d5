"""Prompts as arrays, and the widths at which they are computed.

Letters: N prompts of P tokens.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

Array = Any  # jax.Array on a device, np.ndarray on the host


class PromptWidths(NamedTuple):
    """Widths at which prompts may be computed, each ascending. Empty: all prompts have about the same length."""

    pieces: tuple[int, ...] = ()  # for parts of a batch, within a program
    batches: tuple[int, ...] = ()  # for whole batches; each compiles a program


ONE_WIDTH = PromptWidths()


@partial(jax.tree_util.register_dataclass, data_fields=("ids", "mask", "extras"), meta_fields=("widths",))
@dataclass(frozen=True)
class PromptTokens:
    """N prompts of up to P tokens, padded on the left."""

    ids: Array  # int32 [N, P]
    mask: Array  # bool [N, P]
    extras: Any = None  # a tree of arrays [N, ...] that a model of yours reads too; the decoders here read none
    widths: PromptWidths = ONE_WIDTH

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def width(self) -> int:
        """The number of tokens of a prompt, including padding, P."""
        return self.ids.shape[-1]

    def take(self, rows: Array) -> "PromptTokens":
        """Returns the prompts with these numbers."""
        return jax.tree.map(lambda x: x[rows], self)

    def cut(self, width: int) -> "PromptTokens":
        """Returns the last `width` columns."""
        return replace(self, ids=self.ids[..., -width:], mask=self.mask[..., -width:])

    def batch_widths(self, group_tokens: int) -> tuple[int, ...]:
        """Returns the widths at which whole batches are sampled, ascending.

        Args:
          group_tokens: The number of tokens of a prompt's completions, G · T.
        """
        return useful_widths(self.widths.batches, self.width, group_tokens)

    def narrowed(self, group_tokens: int) -> "PromptTokens":
        """Returns the prompts, which are NumPy arrays, at the least of `batch_widths` that fits them all."""
        longest = int(self.mask.sum(axis=-1).max())
        width = next(width for width in self.batch_widths(group_tokens) if width >= longest)
        return self.cut(width) if width < self.width else self


# ---- widths

_NARROWEST = 16  # tokens


def choose_widths(lengths: Sequence[int] | np.ndarray, *, most: int) -> tuple[int, ...]:
    """Chooses the widths that prompts are padded to, with the least padding.

    Args:
      lengths: The number of tokens of each prompt; not empty.
      most: The largest number of widths. Each width is compiled.

    Returns:
      At most `most` widths, ascending. The last width is the length of the longest prompt.
    """
    sorted_lengths, longest = np.sort(np.asarray(lengths)), int(max(lengths))
    # Candidates are 1, 3/4, 1/2, 3/8, … of the longest prompt, as multiples of 8.
    scales = [scale / 2**power for power in range(longest.bit_length()) for scale in (1.0, 0.75)]
    rounded = {-(-int(longest * scale) // 8) * 8 for scale in scales}
    narrower = sorted(width for width in rounded if _NARROWEST <= width < longest)
    # Choices with fewer widths come first, since `min` returns the first of equals.
    counts = range(most)
    choices = [(*chosen, longest) for count in counts for chosen in itertools.combinations(narrower, count)]

    def padded_tokens(widths: tuple[int, ...]) -> int:
        fitting = np.searchsorted(sorted_lengths, widths, side="right")
        return int(np.diff(fitting, prepend=0) @ np.asarray(widths))

    return min(choices, key=padded_tokens)


def useful_widths(widths: Sequence[int], prompt: int, group_tokens: int) -> tuple[int, ...]:
    """Returns P, and the widths that save at least a tenth of the tokens compared with the next wider width.

    Args:
      widths: Widths of prompts, ascending.
      prompt: The largest width, P.
      group_tokens: The number of tokens of a prompt's completions, G · T.
    """
    useful = [prompt]
    for width in sorted(widths, reverse=True):
        if useful[-1] + group_tokens >= 1.1 * (width + group_tokens):
            useful.append(width)
    return tuple(reversed(useful))
