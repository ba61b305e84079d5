"""One device or many: the same pure function, wrapped; and the one place where arrays move between host and devices."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax.errors import UsageError

AXIS = "data"

# Bytes moved by `to_devices` and `to_host` since they were last taken.
bytes_moved = {"to_devices": 0, "to_host": 0}


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
    in_axes: Sequence[Any],
    out_axes: Any,
    *,
    devices: int = 1,
    donate_argnums: tuple[int, ...] = (),
) -> Callable[..., Any]:
    """Compiles `fn(*args, axis_name)`: with `jax.jit` for one device, with `jax.pmap` inside it for more.

    Arrays are `[N, ...]` for the caller either way. With several devices each gets N / devices of them, and the
    caller's arrays are spread over the devices, so that one program's results are the next one's arguments without a
    copy. Parameters are the same on every device.

    Args:
      fn: pure; its keyword `axis_name` is None on one device.
      in_axes: for each argument 0 (spread its leading axis over devices) or None (the same on all), or a tree of these.
      out_axes: likewise for the result.
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
    )

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(devices, -1, *x.shape[1:])

    def merge(x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[2:])

    def call(*args: Any) -> Any:
        return _where_spread(merge, out_axes, mapped(*_where_spread(split, tuple(in_axes), args)))

    return jax.jit(call, donate_argnums=donate_argnums)


def to_devices(tree: Any, devices: int = 1, *, axes: Any = 0) -> Any:
    """Arrays of the host on the devices. What is there already is not moved.

    Args:
      tree: of NumPy arrays `[N, ...]`.
      devices: how many; divides N.
      axes: 0: each device gets N / devices. None: every device gets all. Or a tree of these.
    """

    def put(spec: PartitionSpec, x: Any) -> Any:
        if getattr(x, "committed", False):
            return x
        bytes_moved["to_devices"] += x.nbytes
        return jax.device_put(x, NamedSharding(_mesh(devices), spec) if devices > 1 else jax.devices()[0])

    def place(axis: int | None, part: Any) -> Any:
        return jax.tree.map(partial(put, PartitionSpec() if axis is None else PartitionSpec(AXIS)), part)

    return jax.tree.map(place, axes, tree, is_leaf=_is_none)


def spread_over(tree: Any, devices: int) -> Any:
    """Within a program: leading axes `[N, ...]` spread over devices as `to_devices` does it. The program that takes the
    result is then compiled once."""
    return jax.lax.with_sharding_constraint(tree, NamedSharding(_mesh(devices), PartitionSpec(AXIS)))


def to_host(tree: Any) -> Any:
    """Arrays of the devices as NumPy arrays."""
    bytes_moved["to_host"] += sum(x.nbytes for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))
    return jax.tree.map(np.asarray, jax.device_get(tree))


def take_bytes_moved() -> dict[str, int]:
    """Bytes moved to the devices and back since the last call."""
    taken = dict(bytes_moved)
    bytes_moved.update(dict.fromkeys(bytes_moved, 0))
    return taken


def replicate(tree: Any, devices: int) -> Any:
    """The tree on each of the first `devices` devices; what is there already is not moved.

    On one device the arrays are committed to it, as results of a step are. A program whose arguments are committed
    later than at its first call would be compiled again.
    """
    if devices > 1:
        return jax.device_put(tree, NamedSharding(_mesh(devices), PartitionSpec()))
    first = jax.devices()[0]
    return jax.tree.map(lambda x: x if getattr(x, "committed", False) else jax.device_put(x, first), tree)


def _where_spread(fn: Callable[[jax.Array], jax.Array], axes: Any, tree: Any) -> Any:
    """`fn` of the leaves whose axis is 0; the others stay."""

    def apply(axis: int | None, part: Any) -> Any:
        return part if axis is None else jax.tree.map(fn, part)

    return jax.tree.map(apply, axes, tree, is_leaf=_is_none)


def _is_none(x: Any) -> bool:
    return x is None


def _mesh(devices: int) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.asarray(jax.devices()[:devices]), (AXIS,))
