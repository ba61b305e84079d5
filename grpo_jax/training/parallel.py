"""One device or many: the same pure function, wrapped."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax.errors import UsageError

AXIS = "data"


def num_devices(requested: int) -> int:
    """Devices to use: `requested`, or all of them for 0.

    Raises:
      UsageError: there are fewer.
    """
    available = jax.device_count()
    if not 0 <= requested <= available:
        raise UsageError(f"devices is {requested}, but JAX sees {available}: set it to at most that, or to 0 for all")
    return requested or available


def data_parallel(
    fn: Callable[..., Any],
    in_axes: Sequence[int | None],
    out_axes: Any,
    *,
    devices: int = 1,
    donate_argnums: tuple[int, ...] = (),
) -> Callable[..., Any]:
    """Compiles `fn(*args, axis_name)` for one device with `jax.jit`, for more with `jax.pmap`.

    Callers pass and receive arrays `[N, ...]` either way, from many devices as NumPy arrays. The
    state stays unreplicated in shape, so that a checkpoint does not know how many devices wrote it.

    Args:
      fn: pure; its keyword `axis_name` is None on one device.
      in_axes: for each argument 0 (spread its leading axis over devices) or None (same on all).
      out_axes: likewise for the result, or a tuple for a tuple of results.
      devices: how many; divides N.
      donate_argnums: arguments whose memory may be reused.

    Returns:
      The compiled function of `*args`.
    """
    if devices == 1:
        return jax.jit(partial(fn, axis_name=None), donate_argnums=donate_argnums)
    mapped = jax.pmap(
        partial(fn, axis_name=AXIS),
        axis_name=AXIS,
        in_axes=tuple(in_axes),
        out_axes=out_axes,
        devices=jax.devices()[:devices],
        donate_argnums=donate_argnums,
    )

    def place(tree, axis):
        """Arguments always arrive where pmap wants them: a second placement would be a second compilation."""
        if axis is None:
            return replicate(tree, devices)
        pieces = jax.tree.map(lambda x: np.asarray(x).reshape(devices, -1, *x.shape[1:]), tree)
        return jax.device_put(pieces, NamedSharding(_mesh(devices), PartitionSpec(AXIS)))

    def merge(tree, axis):
        return tree if axis is None else jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:]), tree)

    def call(*args):
        out = mapped(*(place(tree, axis) for tree, axis in zip(args, in_axes, strict=True)))
        if isinstance(out_axes, tuple):
            return tuple(merge(tree, axis) for tree, axis in zip(out, out_axes, strict=True))
        return merge(out, out_axes)

    return call


def replicate(tree: Any, devices: int) -> Any:
    """The tree on the first `devices` devices; what is there already is not moved.

    On one device, what JAX was free to place gets committed: results of a step are, and a program whose arguments
    become so is compiled again.
    """
    if devices > 1:
        return jax.device_put(tree, NamedSharding(_mesh(devices), PartitionSpec()))
    first = jax.devices()[0]
    return jax.tree.map(lambda x: x if getattr(x, "committed", False) else jax.device_put(x, first), tree)


def _mesh(devices: int) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.asarray(jax.devices()[:devices]), (AXIS,))
