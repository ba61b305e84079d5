"""Where tokens stand and what they look at: positions, rotations and masks. Letters as in `transformer`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.models.attention import Prefix
from grpo_jax.models.config import ModelConfig


class Geometry(NamedTuple):
    """Where the tokens of a call stand and what they look at; the same for all layers.

    Masks are bool, true where a query may look, at least once for each query. They broadcast against scores
    `[N, K, G, Q, queries, keys]`, and there are one or two. Prompts alone: over themselves. Groups: of the prompt over
    itself, and of completions over prompt and completion in a row. The next tokens of each completion: over the prompt,
    and over the cache.
    """

    angles: tuple[jax.Array, jax.Array]  # of the rotations, from `rotary_angles`
    masks: tuple[jax.Array, ...]


def geometry_of_texts(config: ModelConfig, positions: jax.Array, texts: jax.Array, *, window: int | None) -> Geometry:
    """Of texts, each token of which sees those of its own text up to itself.

    Args:
      config: for the rotations.
      positions: int `[N, S]`, from 0 at the first token of a text.
      texts: int or bool `[N, S]`: several texts in a row, counted from 1, and 0 for padding.
      window: tokens that a token attends to, itself included; None for all.

    Returns:
      `Geometry` with one mask.
    """
    width, texts = positions.shape[-1], texts.astype(jnp.int32)
    queries, keys = texts[:, :, None], texts[:, None, :]
    causal = jnp.tril(jnp.ones((width, width), bool))
    near = _near(positions[:, :, None], positions[:, None, :], window)
    seen = (queries == keys) & (keys > 0) & causal & near
    # Padding attends to itself, so that no row of scores is all −∞. Nobody reads what it computes.
    seen = seen | jnp.eye(width, dtype=bool)
    return Geometry(rotary_angles(positions, config), (seen[:, None, None, None],))


def geometry_of_groups(
    config: ModelConfig, prompt_mask: jax.Array, group_size: int, size: int, *, window: int | None
) -> Geometry:
    """Of prompts, each with completions behind it.

    Args:
      config: for the rotations.
      prompt_mask: bool `[N, P]`.
      group_size: G.
      size: S, tokens of a completion.
      window: tokens that a token attends to, itself included; None for all.

    Returns:
      `Geometry` with two masks.
    """
    of_prompt = prompt_positions(prompt_mask)
    own = jnp.sum(prompt_mask, axis=-1, keepdims=True, dtype=jnp.int32) + jnp.arange(size)  # [N, S]
    in_a_row = jnp.concatenate([of_prompt, own], axis=-1)
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (*own.shape, size))
    of_prompt_seen = jnp.broadcast_to(prompt_mask[:, None], (*own.shape, prompt_mask.shape[-1]))
    seen = jnp.concatenate([of_prompt_seen, causal], axis=-1) & _near(own[:, :, None], in_a_row[:, None, :], window)
    alone = geometry_of_texts(config, of_prompt, prompt_mask, window=window)
    positions = jnp.concatenate([of_prompt, jnp.tile(own, (1, group_size))], axis=-1)
    return Geometry(rotary_angles(positions, config), (*alone.masks, seen[:, None, None, None]))


def geometry_of_packed_groups(
    config: ModelConfig, prompt_mask: jax.Array, completions: jax.Array, *, window: int | None
) -> Geometry:
    """Of prompts, each with several of its completions behind it in one row.

    Args:
      config: for the rotations.
      prompt_mask: bool `[N, P]`.
      completions: int `[N, S]`: numbered from 1, each in one piece, and 0 for padding.
      window: tokens that a token attends to, itself included; None for all.

    Returns:
      `Geometry` with two masks.
    """
    of_prompt = prompt_positions(prompt_mask)
    own = jnp.sum(prompt_mask, axis=-1, keepdims=True, dtype=jnp.int32) + positions_in_texts(completions)
    positions, size = jnp.concatenate([of_prompt, own], axis=-1), own.shape[-1]
    # Padding sees the prompt and itself, as if it were a completion. Nobody reads what it computes.
    same = (completions[:, :, None] == completions[:, None, :]) & jnp.tril(jnp.ones((size, size), bool))
    of_prompt_seen = jnp.broadcast_to(prompt_mask[:, None], (*own.shape, prompt_mask.shape[-1]))
    seen = jnp.concatenate([of_prompt_seen, same], axis=-1) & _near(own[:, :, None], positions[:, None, :], window)
    alone = geometry_of_texts(config, of_prompt, prompt_mask, window=window)
    return Geometry(rotary_angles(positions, config), (*alone.masks, seen[:, None, None, None]))


def positions_in_texts(texts: jax.Array) -> jax.Array:
    """Positions from 0 at the first token of each text: int `[N, S]`, texts numbered from 1, and 0 for padding."""
    place = jnp.arange(texts.shape[-1])
    begins = jnp.where(texts != jnp.pad(texts, [(0, 0), (1, 0)])[:, :-1], place, 0)
    return place - jax.lax.cummax(begins, axis=1)


def geometry_of_step(
    config: ModelConfig, prefix: Prefix, group_size: int, slots: int, step: jax.Array, *, window: int | None
) -> Geometry:
    """Of token number `step` of all completions.

    Args:
      config: for the rotations.
      prefix: the prompts.
      group_size: G.
      slots: C, tokens that the cache has room for.
      step: int32 scalar.
      window: tokens that a token attends to, itself included; None for all.

    Returns:
      `Geometry` with two masks.
    """
    position = prefix.length[:, None] + step  # [N, 1]
    of_prompt = prefix.mask & _near(position, prompt_positions(prefix.mask), window)
    own = jnp.arange(slots)[None] + prefix.length[:, None]
    of_cache = (own <= position) & _near(position, own, window)
    angles = rotary_angles(jnp.broadcast_to(position, (position.shape[0], group_size)), config)
    return Geometry(angles, (of_prompt[:, None, None, None, None], of_cache[:, None, None, None, None]))


def geometry_of_tokens(
    config: ModelConfig, prefix: Prefix, lengths: jax.Array, width: int, slots: int, *, window: int | None
) -> Geometry:
    """Of the next tokens of each completion, each behind its own.

    Args:
      config: for the rotations.
      prefix: the prompts.
      lengths: int32 `[N, G]`, tokens of each completion before them.
      width: W, tokens of each completion.
      slots: C, tokens that the cache has room for.
      window: tokens that a token attends to, itself included; None for all.

    Returns:
      `Geometry` with two masks.
    """
    number = lengths[..., None] + jnp.arange(width)  # [N, G, W]
    position = number + prefix.length[:, None, None]
    of_prompt = prefix.mask[:, None, None] & _near(
        position[..., None], prompt_positions(prefix.mask)[:, None, None], window
    )
    of_prompt = jnp.broadcast_to(of_prompt, (*number.shape, prefix.mask.shape[-1]))
    own = jnp.arange(slots)
    of_cache = (own <= number[..., None]) & _near(number[..., None], own, window)
    angles = rotary_angles(position.reshape(position.shape[0], -1), config)
    return Geometry(angles, (of_prompt[:, None, :, None], of_cache[:, None, :, None]))


def prompt_positions(mask: jax.Array) -> jax.Array:
    """int32 `[N, P]`, from 0 at the first token of each prompt; 0 on the padding before it."""
    return jnp.maximum(jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1, 0)


def _near(queries: jax.Array, keys: jax.Array, window: int | None) -> Any:
    """Whether a key is within the window of a query, from positions that broadcast against each other."""
    return True if window is None else queries - keys < window


def rotary_angles(positions: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """cos and sin of position · θ^(−2i/E), i = 0 … E/2 − 1. RoPE (2104.09864).

    With Llama 3's scaling, waves longer than original/low are stretched by `factor`, those shorter than
    original/high stay, and frequencies in between are mixed linearly in original/wavelength (2407.21783).

    Args:
      positions: int `[N, M]`.
      config: `head_dim`, `rope_theta`, `rope_scaling`.

    Returns:
      (cos, cos) and (−sin, sin), float32 `[N, M, 1, E]`.
    """
    frequencies = config.rope_theta ** (-jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim)
    if config.rope_scaling:
        factor, low, high, original = config.rope_scaling
        waves = original * frequencies / (2 * jnp.pi)  # that fit into the original context
        kept = jnp.clip((waves - low) / (high - low), 0.0, 1.0)
        frequencies = frequencies * (kept + (1 - kept) / factor)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns feature i against feature i + E/2, as Hugging Face checkpoints pair them.

    Args:
      x: `[N, M, heads, E]`.
      angles: from `rotary_angles`.

    Returns:
      As x.
    """
    cos, sin = angles
    exact = x.astype(jnp.float32)
    first, second = jnp.split(exact, 2, axis=-1)
    return (exact * cos + jnp.concatenate([second, first], axis=-1) * sin).astype(x.dtype)
