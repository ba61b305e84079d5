"""What several modules need to stay exact."""

from collections.abc import Callable, Hashable
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp


def exact(values: jax.Array) -> jax.Array:
    """The values in at least float32: 16 bits hold neither small differences, nor counts, nor the sums of a batch."""
    # Not jnp.promote_types, which refuses 16 bits under strict promotion.
    return values if values.dtype == jnp.float64 else values.astype(jnp.float32)


def is_zero(coefficient: Any) -> bool:
    """Whether a term is switched off: 0 times a divergence that overflows would be NaN. A traced number never is."""
    return isinstance(coefficient, Real) and coefficient == 0


def over_devices(
    value: jax.Array, axis_name: Hashable | None, reduce: Callable[..., jax.Array] = jax.lax.psum
) -> jax.Array:
    """The total over the mapped axes, or another reduction; the value itself if there are none."""
    return value if axis_name is None else reduce(value, axis_name)
