"""Rotary positions, and how they are scaled for texts longer than those first trained on. Letters as in `transformer`.

R: features of a head that are rotated.
"""

import math

import jax
import jax.numpy as jnp

from grpo_jax.models.config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rotation,
    YarnScaling,
)

Angles = tuple[jax.Array, jax.Array]  # from `rotary_angles`


def rotary_angles(positions: jax.Array, rotation: Rotation | None, features: int) -> Angles:
    """cos and sin of position · θ^(−2i/R), i = 0 … R/2 − 1. RoPE (2104.09864).

    A scaling makes other frequencies of them, and may make both factors larger.

    Args:
      positions: int `[N, M]`.
      rotation: θ and scaling; None: nothing turns.
      features: R, of a head, that are rotated.

    Returns:
      (cos, cos) and (−sin, sin), float32 `[N, M, 1, R]`.
    """
    frequencies, factor = _frequencies(rotation, features)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if factor != 1:
        cos, sin = factor * cos, factor * sin
    return jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)


def _frequencies(rotation: Rotation | None, features: int) -> tuple[jax.Array, float]:
    """`[R/2]`, and what queries and keys are multiplied by."""
    if rotation is None:
        return jnp.zeros(features // 2), 1.0
    frequencies = rotation.theta ** (-jnp.arange(0, features, 2, dtype=jnp.float32) / features)
    match rotation.scaling:
        case None | DynamicScaling():  # of texts that are not longer than those trained on: see `longest_text`
            return frequencies, 1.0
        case LinearScaling(factor):
            return frequencies / factor, 1.0
        case Llama3Scaling() as scaling:
            return _llama3(frequencies, scaling), 1.0
        case YarnScaling() as scaling:
            return _yarn(frequencies, scaling, rotation.theta, features)
        case LongRopeScaling() as scaling:
            return _longrope(frequencies, scaling)
    raise AssertionError(rotation.scaling)


def _llama3(frequencies: jax.Array, scaling: Llama3Scaling) -> jax.Array:
    """Waves longer than original/low are stretched by `factor`, those shorter than original/high stay.

    Frequencies in between are mixed linearly in original/wavelength (2407.21783).
    """
    factor, low, high, original = scaling
    waves = original * frequencies / (2 * jnp.pi)  # that fit into the original context
    unscaled = jnp.clip((waves - low) / (high - low), 0.0, 1.0)
    return frequencies * (unscaled + (1 - unscaled) / factor)


def _yarn(frequencies: jax.Array, scaling: YarnScaling, theta: float, features: int) -> tuple[jax.Array, float]:
    """Waves of fewer than β_slow turns in the original context are stretched by `factor`, of more than β_fast kept.

    Frequencies in between are mixed linearly in their number, 0 to R/2 − 1 (2309.00071).
    """

    def place(rotations: float) -> float:
        """The number of the frequency with so many turns, a fraction."""
        original = scaling.original_max_position_embeddings
        return features * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, features - 1)
    last = last + 0.001 if first == last else last  # as transformers avoids a division by 0
    stretched = jnp.clip((jnp.arange(features // 2, dtype=jnp.float32) - first) / (last - first), 0.0, 1.0)
    mixed = frequencies * (stretched / scaling.factor + 1 - stretched)
    if scaling.attention_factor is not None:
        return mixed, scaling.attention_factor
    return mixed, 0.1 * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0


def _longrope(frequencies: jax.Array, scaling: LongRopeScaling) -> tuple[jax.Array, float]:
    """Frequencies of texts up to the original context, each over its own short factor (2402.13753)."""
    divided = frequencies / jnp.array(scaling.short_factor, jnp.float32)
    if scaling.attention_factor is not None:
        return divided, scaling.attention_factor
    if scaling.factor <= 1:
        return divided, 1.0
    return divided, math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position_embeddings))


def rotate(x: jax.Array, angles: Angles) -> jax.Array:
    """Turns feature i against feature i + R/2, as Hugging Face checkpoints pair them; those from R on stay.

    Args:
      x: `[N, M, heads, E]`.
      angles: from `rotary_angles`.

    Returns:
      As x.
    """
    cos, sin = angles
    features = cos.shape[-1]
    if features < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :features], angles), x[..., features:]], axis=-1)
    exact = x.astype(jnp.float32)
    first, second = jnp.split(exact, 2, axis=-1)
    return (exact * cos + jnp.concatenate([second, first], axis=-1) * sin).astype(x.dtype)
