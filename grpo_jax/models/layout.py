"""Rows: how prompts and completions, or texts, are laid out for one pass of the decoder.

A row is a prompt of P tokens and G parts of S tokens behind it. A part holds completions of that prompt, one behind
the other, each in one piece. A completion sees the prompt and itself. So a prompt is computed once for its group, and
gradients flow back into it from all completions. Without a prompt (P = 0) the completions of a part are whole texts.

The last token of a part predicts nothing. A pass leaves it out of parts of one completion. Of parts with several it
computes all tokens: for rows of 256 tokens the gradient of 255 took 1.02 times as long on a CPU.

Letters as in `transformer`; R rows, T tokens of a completion at most, I tokens of a part that a pass computes: S − 1
or S.
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

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
