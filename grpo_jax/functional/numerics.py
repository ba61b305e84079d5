"""What several modules need to stay exact."""

from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp


def exact(values: jax.Array) -> jax.Array:
    """The values in at least float32: 16 bits hold neither small differences, nor counts, nor the sums of a batch."""
    # Not jnp.promote_types, which refuses 16 bits under strict promotion.
    return values if values.dtype == jnp.float64 else values.astype(jnp.float32)


def over_devices(
    value: jax.Array, axis_name: Hashable | None, reduce: Callable[..., jax.Array] = jax.lax.psum
) -> jax.Array:
    """The total over the mapped axes, or another reduction; the value itself if there are none."""
    return value if axis_name is None else reduce(value, axis_name)
