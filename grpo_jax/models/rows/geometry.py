"""Prompts and their widths; rows, which lay out prompts and completions or texts for one pass; positions and masks.

A row is a prompt of P tokens, followed by G segments of S tokens. A segment holds completions of that prompt one after
the other, each in one piece. A completion sees the prompt and itself. A prompt is therefore computed once for its
group, and gradients flow back into it from all completions. Without a prompt (P = 0) the completions of a segment are
whole texts.

The last token of a segment predicts nothing. If a segment is one completion, a pass leaves this token out. If a segment
holds several completions, a pass computes all tokens: for rows of 256 tokens, the gradient of 255 took 1.02 times as
long on a CPU.

Letters: see `transformer`. N prompts have P tokens. There are R rows, a completion has at most T tokens, and a pass
computes I tokens of a segment, which is S − 1 or S.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.models.config import ModelConfig
from grpo_jax.models.decoder.attention import Angles, rotary_angles
from grpo_jax.models.decoder.cache import Prefix

# ---- prompts

Array = Any  # jax.Array on a device, np.ndarray on the host
T = TypeVar("T")  # arrays, or a tree of them


class PromptWidths(NamedTuple):
    """Widths at which prompts may be computed, each ascending. Empty: all prompts have about the same length."""

    pieces: tuple[int, ...] = ()  # for parts of a batch, within a program
    batches: tuple[int, ...] = ()  # for whole batches; each compiles a program


ONE_WIDTH = PromptWidths()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PromptTokens:
    """N prompts of up to P tokens, padded on the left."""

    ids: Array  # int32 [N, P]
    mask: Array  # bool [N, P]
    extras: Any = None  # a tree of arrays [N, ...] that a model of yours reads too; the decoders here read none
    widths: PromptWidths = field(default=ONE_WIDTH, metadata={"static": True})

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


# ---- rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """The tokens of R rows, and the texts or completions that they belong to."""

    prompt: PromptTokens  # [R, P]
    ids: jax.Array  # int [R, G, S]
    # the maximum number of tokens of a completion, or of a text, that a pass computes
    longest: int = field(metadata={"static": True})
    # int [R, G, S]: completions of a segment are numbered from 1, and padding is 0. None: a segment is one completion
    numbers: jax.Array | None = None
    # ---- only for completions that are packed into rows
    places: jax.Array | None = None  # int [R, S]: indices of the tokens in the prompt's flattened completions [G, T]
    shape: tuple[int, int] | None = field(default=None, metadata={"static": True})  # (G, T) of the prompt's completions

    @property
    def inputs(self) -> int:
        """The number of tokens of a segment that a pass computes, I."""
        return self.ids.shape[-1] - (self.numbers is None)

    @property
    def tokens(self) -> jax.Array:
        """The tokens that a pass computes, `[R, P + G·I]`."""
        segments = self.ids[..., : self.inputs].reshape(len(self.ids), -1)
        return jnp.concatenate([self.prompt.ids, segments], axis=-1)

    def predicting(self, x: jax.Array) -> jax.Array:
        """Shifts values computed at each token to the tokens that they predict.

        Args:
          x: Values computed at each token of the rows, `[R, P + G·I, ...]`.

        Returns:
          Values for the tokens of the segments, `[R, G, S, ...]`: at s the value of the token before s. For the first
          token of a completion that is the last token of the prompt; without a prompt, this value is arbitrary.
        """
        width = self.prompt.width
        shape = (*self.ids.shape, *x.shape[2:])
        prompt, segments = jnp.split(x, [width], axis=1)
        last = prompt[:, None, -1:] if width else jnp.zeros_like(x, shape=(1, 1, 1, *shape[3:]))
        segments = segments.reshape(*shape[:2], self.inputs, *shape[3:])[:, :, : shape[2] - 1]
        before = jnp.concatenate([jnp.broadcast_to(last, (*shape[:2], 1, *shape[3:])), segments], axis=2)
        if self.numbers is None or not width:
            return before
        # A gather would have a backward pass that is slow on a CPU.
        is_first = positions_in_texts(self.numbers) == 0
        return jnp.where(is_first.reshape(*is_first.shape, *[1] * (x.ndim - 2)), last, before)

    def take_completions(self, x: jax.Array) -> jax.Array:
        """Expands values of completions, `[R, G]`, to tokens: `[R, G, S]`, or an array that broadcasts against it."""
        return x[..., None] if self.numbers is None else _take(x, self.numbers[:, 0] - 1)[:, None]

    def pack(self, x: jax.Array) -> jax.Array:
        """Moves values of the tokens of completions, `[R, G, T, ...]`, to the segments, `[R, G, S, ...]`."""
        if self.places is None:
            return x
        return _take(x.reshape(len(x), -1, *x.shape[3:]), self.places)[:, None]

    def unpack(self, x: jax.Array) -> jax.Array:
        """Moves values for tokens of the segments, `[R, G, S, ...]`, to completions `[R, G, T, ...]`.

        Tokens of completions that are not in the row get 0.
        """
        if self.places is None or self.shape is None:
            return x
        whole = jnp.zeros((len(x), math.prod(self.shape), *x.shape[3:]), x.dtype)
        whole = jax.vmap(lambda row, places, x: row.at[places].set(x, mode="drop"))(whole, self.places, x[:, 0])
        return whole.reshape(len(x), *self.shape, *x.shape[3:])


class TokenStates(NamedTuple):
    """States of a model that predict the tokens of completions, in the layout of the pass that computed them."""

    rows: Rows
    hidden: jax.Array  # [R, G, S, D]
    routing: Any = None  # `experts.Routing` of the completions, with axes [N, G, T, L], if the model has experts

    def map(self, fn: Callable[..., T], *others: Any) -> T:
        """Computes values of each token from its state.

        Args:
          fn: (states `[..., D]`, *others in the same layout) -> values of tokens `[...]`, or a tree of them.
          others: `TokenStates` of another model for the same completions, or trees of arrays: `[N, G, T, ...]` for
            tokens, `[N, G]` for completions. `fn` gets the latter as arrays that broadcast against `[...]`.

        Returns:
          The values `[N, G, T, ...]`. They are 0 for tokens that the pass left out.
        """
        rows = self.rows

        def laid_out(other: Any) -> Any:
            if isinstance(other, TokenStates):
                return other.hidden
            return jax.tree.map(lambda x: rows.take_completions(x) if x.ndim == 2 else rows.pack(x), other)

        values: T = jax.tree.map(rows.unpack, fn(self.hidden, *map(laid_out, others)))
        return values


def rows_of_prompts(prompt: PromptTokens) -> Rows:
    """Lays out prompts `[N, P]` without completions."""
    return rows_of_groups(prompt, jnp.zeros((len(prompt), 1, 1), jnp.int32))


def rows_of_groups(prompt: PromptTokens, completion_ids: jax.Array) -> Rows:
    """Lays out each prompt `[N, P]` with its completions `[N, G, T]`, each as a segment with its padding."""
    prompt, completion_ids = jax.tree.map(jnp.asarray, (prompt, completion_ids))
    return Rows(prompt, completion_ids, completion_ids.shape[-1] - 1)


def rows_of_packed_groups(prompt: PromptTokens, completion_ids: jax.Array, places: jax.Array) -> Rows:
    """Lays out each prompt with some tokens of its completions, all in one segment.

    Args:
      prompt: The prompts, `[N, P]`.
      completion_ids: The tokens of the completions, int `[N, G, T]`.
      places: The tokens to lay out, int `[N, S]`, as ascending indices among the prompt's G·T tokens; G·T for padding.
    """
    _, group_size, size = completion_ids.shape
    is_token = places < group_size * size
    ids = jnp.where(is_token, _take(completion_ids.reshape(len(places), -1), places), 0)[:, None]
    numbers = jnp.where(is_token, places // size + 1, 0)[:, None]
    return Rows(prompt, ids, size, numbers, places, (group_size, size))


def rows_of_texts(ids: jax.Array, texts: jax.Array) -> Rows:
    """Lays out rows of whole texts.

    Args:
      ids: The tokens of the texts, int `[R, S]`.
      texts: The text of each token, int or bool `[R, S]`. Texts are numbered from 1, each in one piece; 0 is padding.
    """
    none = jnp.zeros((len(ids), 0), jnp.int32)
    ids, numbers = (jnp.asarray(x).astype(jnp.int32)[:, None] for x in (ids, texts))
    return Rows(PromptTokens(none, none.astype(bool)), ids, ids.shape[-1], numbers)


def positions_in_texts(texts: jax.Array) -> jax.Array:
    """Returns positions from 0 at the first token of each text. Texts `[..., S]` are numbered from 1; 0 is padding."""
    place = jnp.arange(texts.shape[-1])
    before = jnp.concatenate([jnp.zeros_like(texts[..., :1]), texts[..., :-1]], axis=-1)
    return place - jax.lax.cummax(jnp.where(texts != before, place, 0), axis=texts.ndim - 1)


def _take(x: jax.Array, places: jax.Array) -> jax.Array:
    """Takes elements of each row: `[N, M, ...]`, int `[N, S]` -> `[N, S, ...]`."""
    return jax.vmap(lambda row, places: jnp.take(row, places, axis=0, mode="clip"))(x, places)


# ---- positions and masks


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Geometry:
    """The positions and masks of the tokens of a pass, once for each variant that some layer uses.

    Masks are bool, and true if a query may see a key, which it may for at least one. They broadcast against products
    `[N, K, G, Q, queries, keys]`, and each window has two. For rows, one mask is of the prompt over itself, and one of
    each segment over the prompt and itself in a row. For the next tokens of completions, one mask is over the prompt,
    and one over the cache.
    """

    angles: tuple[Angles, ...]  # one entry for each different rotation of the layers
    masks: tuple[tuple[jax.Array, ...], ...]  # two masks for each different window
    # for each of the two masks, in any layer: the number of keys that a query looks back at, as in `attention.attend`
    reaches: tuple[int | None, ...] = field(metadata={"static": True})
    # for each different window: the slots of the cache for the next tokens, as in `attention.attend_past`
    places: tuple[jax.Array, ...] | None = None
    # for each different window: true if the next token of a completion sees all that came before it
    sees_all: tuple[bool, ...] = field(default=(), metadata={"static": True})
    # ---- only for delta nets
    prompt_mask: jax.Array | None = None  # of rows: bool [N, P]
    numbers: jax.Array | None = None  # of rows: `Rows.numbers`
    segments: tuple[int, int] = field(default=(0, 0), metadata={"static": True})  # of rows: (G, I)
    # bool [N, G, W], for the next tokens: false on tokens that must not change the state of a completion. None: all do
    is_token: jax.Array | None = None

    def layer_geometry(self, kind: "LayerKind") -> tuple[Angles, tuple[jax.Array, ...], Any]:
        """Returns the angles, masks and places for a layer of this kind."""
        rotation, window = kind
        places = None if self.places is None else _chosen(self.places, window)
        return _chosen(self.angles, rotation), _chosen(self.masks, window), places

    def layer_sees_all(self, kind: "LayerKind") -> bool:
        """Returns `sees_all` of a layer of this kind, whose indices are no arrays."""
        return bool(self.sees_all) and self.sees_all[kind[1] or 0]


# The indices of a layer's rotation and window in a `Geometry`, as ints or int32 scalars. None: all layers share it.
LayerKind = tuple[Any, Any]


def layer_kinds(config: ModelConfig) -> list[LayerKind]:
    """Returns the kind of each layer."""

    def places(layer_values: Iterable[Any]) -> list[int | None]:
        layer_values = list(layer_values)
        different = _different(layer_values)
        return [None if len(different) == 1 else different.index(x) for x in layer_values]

    return list(zip(places(config.rotations), places(config.windows), strict=True))


def _different(values: Iterable[Any]) -> list[Any]:
    """Returns each different value once, in the order of first occurrence."""
    return list(dict.fromkeys(values))


def _chosen(variants: tuple[Any, ...], place: Any) -> Any:
    if place is None or isinstance(place, int):
        return variants[place or 0]
    return jax.tree.map(lambda *leaves: jax.lax.select_n(place, *leaves), *variants)


def _geometry(
    config: ModelConfig,
    positions: jax.Array,
    masks_of: Callable[[int | None], tuple[jax.Array, ...]],
    reach: int | None = None,
) -> Geometry:
    """Makes the geometry of tokens at positions `[N, M]`. In the last mask, a query sees at most `reach` keys of its
    segment."""
    masks = tuple(masks_of(window) for window in _different(config.windows))
    rotations = _different(config.rotations)
    angles = tuple(rotary_angles(positions, x, config.rotated) for x in rotations)
    windows = [window for window in config.windows if window is not None]
    largest = max(windows) if len(windows) == len(config.windows) else None
    bounds = [x for x in (largest, reach) if x is not None]
    return Geometry(angles, masks, (*[largest] * (len(masks[0]) - 1), min(bounds, default=None)))


def geometry_of_rows(config: ModelConfig, rows: Rows) -> Geometry:
    """Makes the geometry of a pass over `Rows`, with one mask for the prompts and one for the segments after them.

    Args:
      config: The configuration of the decoder, which has the rotations and windows.
      rows: The rows of N prompts, or of texts.

    Returns:
      `Geometry` with two masks per window.

    Raises:
      UsageError: The rows are wider than the configuration allows: see `ModelConfig.longest_text`.
    """
    prompt_mask, numbers, size = rows.prompt.mask, rows.numbers, rows.inputs
    (n, width), group_size = prompt_mask.shape, rows.ids.shape[1]
    config.check_width(width + rows.longest)
    prompt_places = prompt_positions(prompt_mask)
    place = jnp.arange(size)[None, None] if numbers is None else positions_in_texts(numbers)
    number_in_prompt = jnp.sum(prompt_mask, axis=-1, dtype=jnp.int32)[:, None, None] + place  # [N, G or 1, I]
    causal = jnp.tril(jnp.ones((size, size), bool))
    # All padding counts as completion 0, so that it sees at least itself. Nothing reads its results.
    same = causal if numbers is None else causal & (numbers[..., :, None] == numbers[..., None, :])

    def by_segment(x: jax.Array) -> jax.Array:
        """Repeats `[N, P]` for each segment: `[N, G or 1, P]`."""
        return jnp.broadcast_to(x[:, None], (*number_in_prompt.shape[:2], width))

    def masks_of(window: int | None) -> tuple[jax.Array, ...]:
        within = (prompt_mask[:, :, None] == prompt_mask[:, None, :]) & jnp.tril(jnp.ones((width, width), bool))
        within &= _near(prompt_places[:, :, None], prompt_places[:, None, :], window)
        seen = jnp.broadcast_to(by_segment(prompt_mask)[:, :, None], (*number_in_prompt.shape, width))
        seen = jnp.concatenate([seen, jnp.broadcast_to(same, (*number_in_prompt.shape, size))], axis=-1)
        in_a_row = jnp.concatenate([by_segment(prompt_places), number_in_prompt], axis=-1)
        seen &= _near(number_in_prompt[..., :, None], in_a_row[..., None, :], window)
        return within[:, None, None, None], seen[:, None, :, None]

    segment_places = jnp.broadcast_to(number_in_prompt, (n, group_size, size)).reshape(n, -1)
    positions = jnp.concatenate([prompt_places, segment_places], axis=-1)
    geometry = _geometry(config, positions, masks_of, rows.longest)
    return replace(geometry, prompt_mask=prompt_mask, numbers=numbers, segments=(group_size, size))


# The maximum number of tokens appended to a completion at once. A layer with a window needs this many extra slots, or
# the last of these tokens would overwrite tokens that the first of them still sees.
AT_ONCE = 32


def slots_of(window: int | None, room: int) -> int:
    """Returns the number of slots per completion in a layer's cache: at most its window plus `AT_ONCE`.

    Token n goes to slot n mod slots, and overwrites a token that no later token sees.

    Args:
      window: The window of the layer, or None.
      room: The number of tokens per completion that the cache has room for.
    """
    return room if window is None else min(room, window + AT_ONCE)


def _held(last: jax.Array, slots: int) -> jax.Array:
    """Returns the numbers of the tokens in the slots of a cache, `[..., slots]`, after token number `last` `[...]`.

    A slot that is still empty has a negative number.
    """
    last = last[..., None]
    return last - (last - jnp.arange(slots)) % slots


def geometry_of_next(
    config: ModelConfig,
    prefix: Prefix,
    group_size: int,
    slots: int,
    number: jax.Array,
    is_token: jax.Array | None = None,
) -> Geometry:
    """Returns the geometry of the next tokens of each completion.

    Args:
      config: The configuration of the decoder, which has the rotations and windows.
      prefix: The cache of the prompts.
      group_size: The number of completions per prompt, G.
      slots: The number of tokens per completion that the cache has room for in layers without a window, C. Tokens
        beyond it are dropped.
      number: The numbers of the tokens in their completions, int32 `[N, G, W]` with W at most `AT_ONCE`; or a scalar
        for one token of every completion.
      is_token: False for padding, which must not overwrite what later tokens may see, bool `[N, G, W]`; None: all are
        tokens.

    Returns:
      `Geometry` with two masks per window.
    """
    position = prefix.length[:, None, None] + number  # [N, G, W], or [N, 1, 1]
    width = position.shape[-1]
    assert width <= AT_ONCE
    in_prompt = prompt_positions(prefix.mask)[:, None, None]

    def limits(window: int | None) -> bool:
        """Returns whether the longest text is longer than the window."""
        return window is not None and window < prefix.mask.shape[-1] + slots

    def masks_of(window: int | None) -> tuple[jax.Array, ...]:
        in_cache = _held(number, slots_of(window, slots))
        window = window if limits(window) else None
        seen = (
            prefix.mask[:, None, None] & _near(position[..., None], in_prompt, window),
            (in_cache >= 0) & _near(number[..., None], in_cache, window),
        )
        return tuple(jnp.broadcast_to(x, (*position.shape, x.shape[-1]))[:, None, :, None] for x in seen)

    def places_of(window: int | None) -> jax.Array:
        size = slots_of(window, slots)
        if window is None or size != window + AT_ONCE:
            return number  # no slot is overwritten; a token whose slot the cache lacks is dropped
        return number % size if is_token is None else jnp.where(is_token, number % size, size)

    positions = jnp.broadcast_to(position, (len(position), group_size, width)).reshape(len(position), -1)
    places = tuple(map(places_of, _different(config.windows)))
    sees_all = tuple(not number.ndim and not limits(window) for window in _different(config.windows))
    return replace(_geometry(config, positions, masks_of), places=places, sees_all=sees_all, is_token=is_token)


def prompt_positions(mask: jax.Array) -> jax.Array:
    """Returns positions, int32 `[N, P]`, from 0 at the first token of each prompt, and 0 on the padding before it."""
    return jnp.maximum(jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1, 0)


def _near(queries: jax.Array, keys: jax.Array, window: int | None) -> Any:
    """Returns whether a key is within the window of a query. Their positions broadcast against each other."""
    return True if window is None else queries - keys < window
