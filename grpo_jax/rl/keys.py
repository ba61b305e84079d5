"""Keys of random numbers: pure functions of (seed, stream, index)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# The streams of a run. Each has noise of its own.
SAMPLING, SHUFFLING, EVALUATION, LABELLING, REWARD = range(5)


def step_key(seed: Any, stream: Any, index: Any) -> jax.Array:
    """Returns the key of a step. Each of the three numbers is below 2³²."""
    seed, stream, index = (jnp.asarray(number, jnp.uint32) for number in (seed, stream, index))
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), index)


def noise_of(seed: int, stream: int, index: int) -> np.ndarray:
    """Returns (seed, stream, index) as programs take them, for `step_key`."""
    return np.array([seed, stream, index], np.uint32)
