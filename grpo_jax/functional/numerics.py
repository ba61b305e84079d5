"""What several modules share: at least 32 bits, and totals over devices."""

from collections.abc import Hashable
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp

# Of mapped axes (`jax.pmap`, `shard_map`, `vmap`) over which a batch is spread; None: it is not.
AxisName = Hashable | None


def upcast(values: jax.Array) -> jax.Array:
    """The values in at least float32: 16 bits hold neither small differences, nor counts, nor the sums of a batch."""
    # Not jnp.promote_types, which refuses 16 bits under strict promotion.
    return values if values.dtype == jnp.float64 else values.astype(jnp.float32)


def is_zero(coefficient: Any) -> bool:
    """Whether a term is switched off: 0 times a divergence that overflows would be NaN. A traced number never is."""
    return isinstance(coefficient, Real) and coefficient == 0


def maybe_psum(value: jax.Array, axis_name: AxisName) -> jax.Array:
    """The sum over the mapped axes; the value itself if there are none."""
    return value if axis_name is None else jax.lax.psum(value, axis_name)


def maybe_pmax(value: jax.Array, axis_name: AxisName) -> jax.Array:
    """The maximum over the mapped axes; the value itself if there are none."""
    return value if axis_name is None else jax.lax.pmax(value, axis_name)


def maybe_all_gather(values: jax.Array, axis_name: AxisName) -> jax.Array:
    """The values `[n]` of all devices, one after another; the values themselves if there are no mapped axes."""
    return values if axis_name is None else jax.lax.all_gather(values, axis_name, tiled=True)


def device_index_and_count(axis_name: AxisName) -> tuple[jax.Array | int, int]:
    """Which device of the mapped axes this is, and how many there are; (0, 1) if there are no mapped axes."""
    return (0, 1) if axis_name is None else (jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name))
