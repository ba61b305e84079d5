"""Prompts as arrays, and the widths at which they are computed.

Letters: N prompts of P tokens.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.functional.products import traits_of_backend
from grpo_jax.models.sharding import mesh_sizes

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


def computed_at_widths(compute: Callable[[PromptTokens], Any], prompt: PromptTokens) -> Any:
    """Computes prompts in pieces of similar length, the longest first, so that little padding is computed.

    Args:
      compute: A function of prompts `[n, w]` to arrays `[n, ...]`, in which some axes may have size w.
      prompt: The prompts. If their widths save little, or on a mesh, all are computed at once.

    Returns:
      The arrays of all prompts, in which these axes have size P. They are padded on the left with zeros.
    """
    num_prompts, tokens = len(prompt), traits_of_backend().piece_tokens
    widths = useful_widths(prompt.widths.pieces, prompt.width, 0)
    # On a mesh a piece would not be spread evenly.
    if len(widths) < 2 or prompt.ids.size <= 2 * tokens or mesh_sizes() is not None:
        return compute(prompt)
    prompt = jax.tree.map(jnp.asarray, prompt)
    number = jnp.searchsorted(jnp.asarray(widths), jnp.sum(prompt.mask, axis=-1, dtype=jnp.int32))
    order = jnp.argsort(-number, stable=True)
    total = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(compute, prompt))

    def put(width: int, places: jax.Array, begin: Any, piece: jax.Array, total: Any) -> Any:
        # The last piece may compute the last prompt several times.
        prompts = order[jnp.minimum(begin + piece * places.size + places, num_prompts - 1)]

        def put_array(total: jax.Array, x: jax.Array) -> jax.Array:
            ends = (slice(whole - part, None) for whole, part in zip(total.shape[1:], x.shape[1:], strict=True))
            return total.at[(prompts, *ends)].set(x)

        return jax.tree.map(put_array, total, compute(prompt.take(prompts).cut(width)))

    begin: Any = 0
    for place, width in reversed([*enumerate(widths)]):
        size = min(max(1, tokens // width), num_prompts)
        # Prompts that fill up the pieces of a wider width are not computed again.
        num_pieces = -(-jnp.maximum(jnp.sum(number >= place) - begin, 0) // size)
        total = jax.lax.fori_loop(0, num_pieces, partial(put, width, jnp.arange(size), begin), total)
        begin += num_pieces * size
    return total
