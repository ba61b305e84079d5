"""Rows: how prompts and completions, or texts, are laid out for one pass of the decoder; their positions and masks.

A row is a prompt of P tokens and G parts of S tokens behind it. A part holds completions of that prompt, one behind
the other, each in one piece. A completion sees the prompt and itself. So a prompt is computed once for its group, and
gradients flow back into it from all completions. Without a prompt (P = 0) the completions of a part are whole texts.

The last token of a part predicts nothing. A pass leaves it out of parts of one completion. Of parts with several it
computes all tokens: for rows of 256 tokens the gradient of 255 took 1.02 times as long on a CPU.

Letters as in `transformer`; R rows, T tokens of a completion at most, I tokens of a part that a pass computes: S − 1
or S.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.models.attention import Angles, rotary_angles
from grpo_jax.models.cache import Prefix
from grpo_jax.models.config import ModelConfig

_ARRAYS = ("prompt_ids", "prompt_mask", "ids", "numbers", "places")


@partial(jax.tree_util.register_dataclass, data_fields=_ARRAYS, meta_fields=("longest", "shape"))
@dataclass(frozen=True)
class Rows:
    """Tokens of R rows, and which of them belong together."""

    prompt_ids: jax.Array  # int [R, P], padded on the left
    prompt_mask: jax.Array  # bool [R, P]
    ids: jax.Array  # int [R, G, S]
    longest: int  # tokens of a completion, or of a text, that a pass computes at most
    # int [R, G, S]: completions of a part are numbered from 1, and padding is 0. None: a part is one completion
    numbers: jax.Array | None = None
    # ---- of completions that are packed into rows
    places: jax.Array | None = None  # int [R, S]: where tokens are among the prompt's completions `[G, T]` in a row
    shape: tuple[int, int] | None = None  # (G, T) of the prompt's completions

    @property
    def inputs(self) -> int:
        """I, tokens of a part that a pass computes."""
        return self.ids.shape[-1] - (self.numbers is None)

    @property
    def tokens(self) -> jax.Array:
        """The tokens that a pass computes, `[R, P + G·I]`."""
        parts = self.ids[..., : self.inputs].reshape(len(self.ids), -1)
        return jnp.concatenate([self.prompt_ids, parts], axis=-1)

    def predicting(self, x: jax.Array) -> jax.Array:
        """Arranges what was computed at each token as what predicts each token of the parts.

        Args:
          x: `[R, P + G·I, ...]`.

        Returns:
          `[R, G, S, ...]`: at s what was computed at the token before s, which for the first token of a completion is
          the last one of the prompt. Without a prompt it is rubbish.
        """
        width = self.prompt_ids.shape[-1]
        shape = (*self.ids.shape, *x.shape[2:])
        prompt, parts = jnp.split(x, [width], axis=1)
        last = prompt[:, None, -1:] if width else jnp.zeros_like(x, shape=(1, 1, 1, *shape[3:]))
        parts = parts.reshape(*shape[:2], self.inputs, *shape[3:])[:, :, : shape[2] - 1]
        before = jnp.concatenate([jnp.broadcast_to(last, (*shape[:2], 1, *shape[3:])), parts], axis=2)
        if self.numbers is None or not width:
            return before
        # Not a gather: the backward pass of one is slow on a CPU.
        is_first = positions_in_texts(self.numbers) == 0
        return jnp.where(is_first.reshape(*is_first.shape, *[1] * (x.ndim - 2)), last, before)

    def of_completions(self, x: jax.Array) -> jax.Array:
        """Takes numbers of completions `[R, G]` to their tokens: `[R, G, S]`, or what broadcasts against it."""
        return x[..., None] if self.numbers is None else _take(x, self.numbers[:, 0] - 1)[:, None]

    def unpack(self, x: jax.Array) -> jax.Array:
        """Takes what there is for tokens of the parts, `[R, G, S, ...]`, to completions `[R, G, T, ...]`.

        Tokens of completions that are not in the row get 0.
        """
        if self.places is None or self.shape is None:
            return x
        whole = jnp.zeros((len(x), math.prod(self.shape), *x.shape[3:]), x.dtype)
        whole = jax.vmap(lambda row, places, x: row.at[places].set(x, mode="drop"))(whole, self.places, x[:, 0])
        return whole.reshape(len(x), *self.shape, *x.shape[3:])


def rows_of_prompts(prompt_ids: jax.Array, prompt_mask: jax.Array) -> Rows:
    """Lays out only prompts, `[N, P]`."""
    return rows_of_groups(prompt_ids, prompt_mask, jnp.zeros((len(prompt_ids), 1, 1), jnp.int32))


def rows_of_groups(prompt_ids: jax.Array, prompt_mask: jax.Array, completion_ids: jax.Array) -> Rows:
    """Lays out each prompt `[N, P]` with its completions `[N, G, T]`, each as a part with its padding."""
    return Rows(prompt_ids, jnp.asarray(prompt_mask), jnp.asarray(completion_ids), completion_ids.shape[-1] - 1)


def rows_of_packed_groups(
    prompt_ids: jax.Array, prompt_mask: jax.Array, completion_ids: jax.Array, places: jax.Array
) -> Rows:
    """Lays out each prompt with some tokens of its completions, all in one part.

    Args:
      prompt_ids: int `[N, P]`.
      prompt_mask: bool `[N, P]`.
      completion_ids: int `[N, G, T]`.
      places: int `[N, S]`: the tokens, as places among the G·T of the prompt, in order; G·T for padding.
    """
    _, group_size, size = completion_ids.shape
    is_token = places < group_size * size
    ids = jnp.where(is_token, _take(completion_ids, places), 0)[:, None]
    numbers = jnp.where(is_token, places // size + 1, 0)[:, None]
    return Rows(prompt_ids, prompt_mask, ids, size, numbers, places, (group_size, size))


def rows_of_texts(ids: jax.Array, texts: jax.Array) -> Rows:
    """Lays out rows of whole texts.

    Args:
      ids: int `[R, S]`.
      texts: int or bool `[R, S]`: texts are numbered from 1, each in one piece, and padding is 0.
    """
    none = jnp.zeros((len(ids), 0), jnp.int32)
    ids, numbers = (jnp.asarray(x).astype(jnp.int32)[:, None] for x in (ids, texts))
    return Rows(none, none.astype(bool), ids, ids.shape[-1], numbers)


def positions_in_texts(texts: jax.Array) -> jax.Array:
    """Counts from 0 at the first token of each text: int `[..., S]`, texts numbered from 1, and 0 for padding."""
    place = jnp.arange(texts.shape[-1])
    before = jnp.concatenate([jnp.zeros_like(texts[..., :1]), texts[..., :-1]], axis=-1)
    return place - jax.lax.cummax(jnp.where(texts != before, place, 0), axis=texts.ndim - 1)


def _take(x: jax.Array, places: jax.Array) -> jax.Array:
    """Takes elements of each prompt's completions in a row: `[N, ...]`, int `[N, S]` -> `[N, S]`."""
    return jnp.take_along_axis(x.reshape(len(x), -1), places, axis=-1, mode="clip")


# ---- positions and masks


@partial(jax.tree_util.register_dataclass, data_fields=["angles", "masks", "places"], meta_fields=["reaches"])
@dataclass(frozen=True)
class Geometry:
    """The positions of the tokens of a call and what they attend to: what differs between layers once.

    Masks are bool, true where a query may look, at least once for each query. They broadcast against scores
    `[N, K, G, Q, queries, keys]`, and there are two. Rows: of the prompt over itself, and of each part over the prompt
    and itself in a row. The next tokens of each completion: over the prompt, and over the cache.
    """

    angles: tuple[Angles, ...]  # one for each rotation that there is among the layers
    masks: tuple[tuple[jax.Array, ...], ...]  # one for each window
    # of each mask, in any layer: how many keys a query looks back at, as in `attention.attend`
    reaches: tuple[int | None, ...]
    # one for each window, of the next tokens: slots of the cache that they go to, as in `attention.attend_past`
    places: tuple[jax.Array, ...] | None = None

    def of_layer(self, kind: "LayerKind") -> tuple[Angles, tuple[jax.Array, ...], Any]:
        """Returns angles, masks and places of a layer of this kind."""
        rotation, window = kind
        places = None if self.places is None else _chosen(self.places, window)
        return _chosen(self.angles, rotation), _chosen(self.masks, window), places


# Which rotation and which window of the `Geometry` a layer takes: places, as ints or int32 scalars. None: there is but
# one.
LayerKind = tuple[Any, Any]


def layer_kinds(config: ModelConfig) -> list[LayerKind]:
    """Returns the kind of each layer."""

    def places(of_layers: Iterable[Any]) -> list[int | None]:
        of_layers = list(of_layers)
        different = _different(of_layers)
        return [None if len(different) == 1 else different.index(x) for x in of_layers]

    return list(zip(places(config.rotations), places(config.windows), strict=True))


def _different(values: Iterable[Any]) -> list[Any]:
    """Each once, in the order of their first."""
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
    """Makes the geometry of tokens at positions `[N, M]`. A query of the last mask sees `reach` tokens of its row."""
    masks = tuple(masks_of(window) for window in _different(config.windows))
    rotations = _different(config.rotations)
    angles = tuple(rotary_angles(positions, x, config.head_dim) for x in rotations)
    windows = [window for window in config.windows if window is not None]
    largest = max(windows) if len(windows) == len(config.windows) else None
    bounds = [x for x in (largest, reach) if x is not None]
    return Geometry(angles, masks, (*[largest] * (len(masks[0]) - 1), min(bounds, default=None)))


def geometry_of_rows(config: ModelConfig, rows: Rows) -> Geometry:
    """Makes positions and masks of a pass over `Rows`: one mask of prompts, and one of the parts behind them.

    Args:
      config: for rotations and windows.
      rows: of N prompts, or of texts.

    Returns:
      `Geometry` with two masks a window.
    """
    prompt_mask, numbers, size = rows.prompt_mask, rows.numbers, rows.inputs
    (n, width), group_size = prompt_mask.shape, rows.ids.shape[1]
    of_prompt = prompt_positions(prompt_mask)
    place = jnp.arange(size)[None, None] if numbers is None else positions_in_texts(numbers)
    number_in_prompt = jnp.sum(prompt_mask, axis=-1, dtype=jnp.int32)[:, None, None] + place  # [N, G or 1, I]
    causal = jnp.tril(jnp.ones((size, size), bool))
    # Padding sees what completion 0 would see, itself included. Nobody reads what it computes.
    same = causal if numbers is None else causal & (numbers[..., :, None] == numbers[..., None, :])

    def by_part(x: jax.Array) -> jax.Array:
        """`[N, P]` -> `[N, G or 1, P]`."""
        return jnp.broadcast_to(x[:, None], (*number_in_prompt.shape[:2], width))

    def masks_of(window: int | None) -> tuple[jax.Array, ...]:
        within = (prompt_mask[:, :, None] == prompt_mask[:, None, :]) & jnp.tril(jnp.ones((width, width), bool))
        within &= _near(of_prompt[:, :, None], of_prompt[:, None, :], window)
        seen = jnp.broadcast_to(by_part(prompt_mask)[:, :, None], (*number_in_prompt.shape, width))
        seen = jnp.concatenate([seen, jnp.broadcast_to(same, (*number_in_prompt.shape, size))], axis=-1)
        in_a_row = jnp.concatenate([by_part(of_prompt), number_in_prompt], axis=-1)
        seen &= _near(number_in_prompt[..., :, None], in_a_row[..., None, :], window)
        return within[:, None, None, None], seen[:, None, :, None]

    of_parts = jnp.broadcast_to(number_in_prompt, (n, group_size, size)).reshape(n, -1)
    positions = jnp.concatenate([of_prompt, of_parts], axis=-1)
    return _geometry(config, positions, masks_of, rows.longest)


# The most tokens of a completion that are computed at once behind others. Padding among them is written to the cache
# too, so where a layer forgets, it must not reach what a window still sees.
AT_ONCE = 32


def slots_of(window: int | None, room: int) -> int:
    """Slots that a layer's cache has for a completion: no more than its window sees, and `AT_ONCE`.

    Token n goes to slot n mod slots, over one that no later token sees.

    Args:
      window: of the layer, or None.
      room: tokens of a completion.
    """
    return room if window is None else min(room, window + AT_ONCE)


def _held(last: jax.Array, slots: int) -> jax.Array:
    """Numbers of the tokens in the slots of a cache, `[..., slots]`, that were written up to number `last` `[...]`.

    They are negative where none was written yet.
    """
    last = last[..., None]
    return last - (last - jnp.arange(slots)) % slots


def _places(config: ModelConfig, slots: int, number: jax.Array, active: Any = None) -> tuple[jax.Array, ...]:
    """Returns the slots of tokens `number` for each window; as in `Geometry`."""

    def place(window: int | None) -> jax.Array:
        size = slots_of(window, slots)
        if window is None or size != window + AT_ONCE:
            return number  # nothing is written over; a slot that the cache lacks drops the token
        return number % size if active is None else jnp.where(active, number % size, size)[..., None]

    return tuple(map(place, _different(config.windows)))


def geometry_of_step(
    config: ModelConfig, prefix: Prefix, group_size: int, slots: int, step: jax.Array, active: jax.Array | None = None
) -> Geometry:
    """Returns the geometry of token number `step` of all completions.

    Args:
      config: for rotations and windows.
      prefix: the prompts.
      group_size: G.
      slots: C, tokens that the cache has room for, in layers without a window.
      step: int32 scalar.
      active: bool `[N, G]`, the completions that may write over their earlier tokens; None: all.

    Returns:
      `Geometry` with two masks a window.
    """
    position = prefix.length[:, None] + step  # [N, 1]

    def masks_of(window: int | None) -> tuple[jax.Array, ...]:
        of_prompt = prefix.mask & _near(position, prompt_positions(prefix.mask), window)
        held = _held(step, slots_of(window, slots))
        of_cache = jnp.broadcast_to((held >= 0) & _near(step, held, window), (position.shape[0], held.size))
        return of_prompt[:, None, None, None, None], of_cache[:, None, None, None, None]

    positions = jnp.broadcast_to(position, (position.shape[0], group_size))
    return replace(_geometry(config, positions, masks_of), places=_places(config, slots, step, active))


def geometry_of_tokens(config: ModelConfig, prefix: Prefix, lengths: jax.Array, width: int, slots: int) -> Geometry:
    """Returns the geometry of the next tokens of each completion, behind its earlier ones.

    Args:
      config: for rotations and windows.
      prefix: the prompts.
      lengths: int32 `[N, G]`, tokens of each completion before them.
      width: W, tokens of each completion, at most `AT_ONCE`.
      slots: C, tokens that the cache has room for, in layers without a window. What goes beyond is dropped.

    Returns:
      `Geometry` with two masks a window.
    """
    assert width <= AT_ONCE
    number = lengths[..., None] + jnp.arange(width)  # [N, G, W]
    position = number + prefix.length[:, None, None]
    places = prompt_positions(prefix.mask)[:, None, None]

    def masks_of(window: int | None) -> tuple[jax.Array, ...]:
        of_prompt = prefix.mask[:, None, None] & _near(position[..., None], places, window)
        of_prompt = jnp.broadcast_to(of_prompt, (*number.shape, prefix.mask.shape[-1]))
        held = _held(number, slots_of(window, slots))
        of_cache = (held >= 0) & _near(number[..., None], held, window)
        return of_prompt[:, None, :, None], of_cache[:, None, :, None]

    positions = position.reshape(position.shape[0], -1)
    return replace(_geometry(config, positions, masks_of), places=_places(config, slots, number))


def prompt_positions(mask: jax.Array) -> jax.Array:
    """int32 `[N, P]`, from 0 at the first token of each prompt; 0 on the padding before it."""
    return jnp.maximum(jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1, 0)


def _near(queries: jax.Array, keys: jax.Array, window: int | None) -> Any:
    """Returns whether a key is within the window of a query, from positions that broadcast against each other."""
    return True if window is None else queries - keys < window
