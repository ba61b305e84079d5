"""One device or many: the same pure function, wrapped; and the one place where arrays move between host and devices.

`Devices` says how a program runs. A number: so many devices, each with all parameters; `jax.jit` on one, `jax.pmap` on
more. A `Mesh`: parameters are cut over devices, as the rules of `models.sharding` say, and `jax.jit` shares out the
work.

With several hosts devices are those of all, always as a `Mesh`, and an array is spread over all of them. Every host
gives `to_devices` the whole array, of which it puts its part; `own_rows` reads what lies on its own devices.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from grpo_jax.config import MeshConfig, validate_mesh
from grpo_jax.errors import UsageError
from grpo_jax.functional.products import backend_name
from grpo_jax.models import sharding
from grpo_jax.models.params import is_quantised
from grpo_jax.runs import hosts

AXIS = "data"

# Bytes moved by `to_devices` and `to_host` since they were last taken.
bytes_moved = {"to_devices": 0, "to_host": 0}


class Mesh(NamedTuple):
    """Devices in three axes, for a model that is larger than one of them. Prompts are spread over data · fsdp."""

    data: int = 1
    fsdp: int = 1  # parameters are cut, and each layer is put together while it is computed
    tensor: int = 1  # parameters are cut, and each device computes its heads and features; divides key-value heads


Devices = int | Mesh


class HasDevices(Protocol):
    """Options of a run, or of a phase."""

    @property
    def devices(self) -> int:
        """Devices to use; 0 for all."""

    @property
    def mesh(self) -> MeshConfig:
        """How they share the work."""


def num_devices(requested: int) -> int:
    """Devices to use: `requested`, or all of them for 0.

    Raises:
      UsageError: there are fewer, or there are several hosts and not all of their devices are asked for.
    """
    available = jax.device_count()
    if hosts.count() > 1 and requested not in (0, available):
        raise UsageError(
            f"devices is {requested}, but a run over {hosts.count()} hosts uses all of their {available} devices: set "
            "devices to 0"
        )
    if not 0 <= requested <= available:
        raise UsageError(
            f"devices is {requested}, but JAX sees {available} ({backend_name()}): set it to at most that, or "
            "to 0 for all"
        )
    return requested or available


def devices_of(config: HasDevices) -> Devices:
    """The devices that a run asks for.

    Raises:
      UsageError: they cannot be had, or not in this way.
    """
    validate_mesh(config.mesh)
    count, kind, fsdp, tensor = num_devices(config.devices), *dataclasses.astuple(config.mesh)
    if hosts.count() > 1 and kind == "pmap":
        raise UsageError(f"pmap is of one host, and there are {hosts.count()}: leave out parallel, or set it to mesh")
    if hosts.count() == 1 and (kind == "pmap" or (kind == "auto" and fsdp * tensor == 1)):
        return count
    if count % (fsdp * tensor):
        raise UsageError(
            f"fsdp x tensor is {fsdp * tensor}, which does not divide the {count} devices of the run: set devices to a "
            "multiple, or to 0 for all"
        )
    mesh = Mesh(count // (fsdp * tensor), fsdp, tensor)
    if sum(map(len, rows_of_hosts(mesh, parts(mesh)))) > parts(mesh):
        raise UsageError(
            f"tensor is {tensor}, but a host has {jax.local_device_count()} devices, and a group lies on those of one "
            "host: set tensor to a divisor of them, and fsdp to the rest"
        )
    return mesh


def size(devices: Devices) -> int:
    """How many devices these are."""
    return math.prod(devices) if isinstance(devices, Mesh) else devices


def parts(devices: Devices) -> int:
    """How many parts the prompts of a batch are spread over; a group is never split."""
    return devices.data * devices.fsdp if isinstance(devices, Mesh) else devices


# ---- programs


def data_parallel(
    fn: Callable[..., Any],
    in_axes: Sequence[Any],
    out_axes: Any,
    *,
    devices: Devices = 1,
    donate_argnums: tuple[int, ...] = (),
) -> Callable[..., Any]:
    """Compiles `fn(*args, axis_name)`: with `jax.jit` for one device or a mesh, with `jax.pmap` inside it for several.

    Arrays are `[N, ...]` for the caller in any case. With several devices each gets N / devices of them, and the
    caller's arrays are spread over the devices, so that one program's results are the next one's arguments without a
    copy. Parameters are the same on every device, or cut over a mesh.

    Args:
      fn: pure; its keyword `axis_name` is None but under `jax.pmap`. On a mesh it sees whole arrays.
      in_axes: for each argument 0 (spread its leading axis over devices) or None (the same on all, or parameters), or a
        tree of these.
      out_axes: likewise for the result.
      devices: that it runs on; N is a multiple of their `parts`.
      donate_argnums: arguments whose memory may be reused.

    Returns:
      The compiled function of `*args`.
    """
    if isinstance(devices, Mesh) or devices == 1:
        return compiled(partial(fn, axis_name=None), out_axes, devices=devices, donate_argnums=donate_argnums)
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


def compiled(
    fn: Callable[..., Any], out_axes: Any = None, *, devices: Devices = 1, donate_argnums: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """Compiles a function of whole arrays with `jax.jit`.

    Args:
      fn: pure.
      out_axes: as in `data_parallel`; how its result lies on a mesh.
      devices: where its arguments are.
      donate_argnums: arguments whose memory may be reused.
    """
    if not isinstance(devices, Mesh):
        return jax.jit(fn, donate_argnums=donate_argnums)
    mesh = _mesh(devices)

    def call(*args: Any) -> Any:
        # Not `jax.set_mesh` around the call: this is of the program alone, which can then be lowered and traced.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            result = fn(*args)
        # Said of every result: the next program takes it as it is, and is compiled once.
        return jax.lax.with_sharding_constraint(result, _shardings(result, devices, out_axes))

    return jax.jit(call, donate_argnums=donate_argnums)


def rows_program(fn: Callable[[Any, Any], Any], *, devices: Devices = 1) -> Callable[[Any, Any], Any]:
    """Compiles a function of rows that do not depend on each other, such as scores, with its results on the host.

    Args:
      fn: (parameters, batch `[N, ...]`) -> arrays `[N, ...]`.
      devices: where the parameters are. On a mesh N is a multiple of its `parts`.

    Returns:
      (parameters, batch of NumPy arrays) -> NumPy arrays of all rows, on every host; all hosts call it.
    """
    program = compiled(fn, 0, devices=devices)

    def call(params: Any, batch: Any) -> Any:
        given = to_devices(batch, devices) if isinstance(devices, Mesh) else batch
        return all_rows(program(params, given), devices)

    return call


def spread_over(tree: Any, devices: Devices) -> Any:
    """Within a program: leading axes `[N, ...]` spread over devices as `to_devices` does it. The program that takes the
    result is then compiled once."""
    return jax.lax.with_sharding_constraint(tree, _shardings(tree, devices, 0))


# ---- where arrays are


def to_devices(tree: Any, devices: Devices = 1, *, axes: Any = 0) -> Any:
    """Arrays of the host on the devices. What is there already is not moved.

    Args:
      tree: of NumPy arrays `[N, ...]`.
      devices: that programs run on; N is a multiple of their `parts`.
      axes: 0: each device gets its part of N. None: every device gets all. Or a tree of these.
    """

    def put(x: Any, target: jax.sharding.Sharding) -> Any:
        if getattr(x, "committed", False):
            return x
        bytes_moved["to_devices"] += x.nbytes
        return _put(x, target)

    return jax.tree.map(put, tree, _shardings(tree, devices, axes))


def to_host(tree: Any) -> Any:
    """Arrays of the devices as NumPy arrays. What is spread over several hosts is brought to all, which all call
    this."""
    bytes_moved["to_host"] += sum(x.nbytes for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))
    return jax.tree.map(np.asarray, jax.device_get(hosts.whole(tree)))


def all_rows(tree: Any, devices: Devices) -> Any:
    """Of arrays `[N, ...]` that are spread over devices all rows, as NumPy arrays, on every host. All hosts call
    this."""
    if hosts.count() == 1:
        return to_host(tree)
    found = hosts.gather("rows", own_rows(tree))  # not by the devices, which would compile a program for each array
    return jax.tree.map(lambda *parts: in_order(parts, devices), *found)


def in_order(parts: Sequence[np.ndarray], devices: Devices) -> np.ndarray:
    """The rows that each host has as all rows `[N, ...]`."""
    joined = np.concatenate(parts)
    return joined[np.argsort(np.concatenate(rows_of_hosts(devices, len(joined))))]


def rows_of_hosts(devices: Devices, num_prompts: int) -> list[np.ndarray]:
    """The prompts of a batch of N that lie on the devices of each host, ascending, in the order of hosts."""
    if hosts.count() == 1:
        return [np.arange(num_prompts)]
    rows: list[set[int]] = [set() for _ in range(hosts.count())]
    spread = NamedSharding(_mesh(devices), PartitionSpec(sharding.BATCH))
    placed: Mapping[Any, Any] = spread.devices_indices_map((num_prompts,))
    for device, (part,) in placed.items():
        rows[device.process_index].update(range(num_prompts)[part])
    return [np.array(sorted(own), np.int64) for own in rows]


def own_rows(tree: Any) -> Any:
    """Of arrays `[N, ...]` that are spread over devices what lies on those of this host, as NumPy arrays, in the order
    of `rows_of_hosts`."""

    def pieces(x: jax.Array) -> list[jax.Array]:
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return [x]
        found = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}  # copies have one place
        return [found[start] for start in sorted(found)]

    leaves, structure = jax.tree.flatten(tree)
    read = to_host([pieces(x) for x in leaves])
    joined = [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in read]
    return jax.tree.unflatten(structure, joined)


def take_bytes_moved() -> dict[str, int]:
    """Bytes moved to the devices and back since the last call."""
    taken = dict(bytes_moved)
    bytes_moved.update(dict.fromkeys(bytes_moved, 0))
    return taken


def place(params: Any, devices: Devices) -> Any:
    """Parameters, or a state with them, as programs take them: whole on each device, or cut over a mesh.

    What is there already is not moved. On one device the arrays are committed to it, as results of a step are. A
    program whose arguments are committed later than at its first call would be compiled again.

    Raises:
      UsageError: the mesh would cut key-value heads.
    """
    if devices == 1:
        first = jax.local_devices()[0]
        return jax.tree.map(lambda x: x if getattr(x, "committed", False) else jax.device_put(x, first), params)
    return jax.tree.map(_put, params, shardings(params, devices))


def _put(x: Any, target: jax.sharding.Sharding) -> Any:
    """An array there. Of one that goes to several hosts, and that each of them has, each puts its part."""
    if target.is_fully_addressable or not getattr(x, "is_fully_addressable", True):
        return jax.device_put(x, target)
    whole = np.asarray(x)
    return jax.make_array_from_callback(whole.shape, target, lambda index: whole[index])


def shardings(params: Any, devices: Devices) -> Any:
    """Where `place` puts parameters, from their shapes: a tree of shardings.

    Raises:
      UsageError: the mesh would cut key-value heads.
    """
    if isinstance(devices, Mesh):
        _check_heads(params, devices)
    return _shardings(params, devices, None)


def where_to_load(devices: Devices) -> Callable[[Any], Any] | None:
    """Where a model is loaded: shapes -> shardings. None: on the first device, from which `place` copies it."""
    return partial(shardings, devices=devices) if isinstance(devices, Mesh) else None


def _check_heads(params: Any, mesh: Mesh) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantised):
        heads = x.shape[-2] if [getattr(key, "key", "") for key in path[-2:]] == ["k_proj", "kernel"] else mesh.tensor
        if heads % mesh.tensor:
            raise UsageError(
                f"tensor is {mesh.tensor}, but the model has {heads} key-value heads, which are never cut: set tensor "
                "to a divisor of them, and fsdp to the rest"
            )


def _shardings(tree: Any, devices: Devices, axes: Any) -> Any:
    """Of arrays that are spread (0), or parameters or the same on all devices (None), or a tree of these."""
    if devices == 1:
        return jax.tree.map(lambda _: SingleDeviceSharding(jax.local_devices()[0]), tree)
    mesh = _mesh(devices)
    names = sharding.BATCH if isinstance(devices, Mesh) else AXIS

    def of_part(axis: int | None, part: Any) -> Any:
        if axis is None and isinstance(devices, Mesh):
            return jax.tree.map(partial(NamedSharding, mesh), sharding.specs(part, mesh.shape))
        spec = PartitionSpec() if axis is None else PartitionSpec(names)
        return jax.tree.map(lambda _: NamedSharding(mesh, spec), part)

    return jax.tree.map(of_part, axes, tree, is_leaf=_is_none)


def _where_spread(fn: Callable[[jax.Array], jax.Array], axes: Any, tree: Any) -> Any:
    """`fn` of the leaves whose axis is 0; the others stay."""

    def apply(axis: int | None, part: Any) -> Any:
        return part if axis is None else jax.tree.map(fn, part)

    return jax.tree.map(apply, axes, tree, is_leaf=_is_none)


def _is_none(x: Any) -> bool:
    return x is None


def _mesh(devices: Devices) -> jax.sharding.Mesh:
    used = jax.devices()[: size(devices)]
    if isinstance(devices, Mesh):
        return jax.make_mesh(devices, sharding.AXES, axis_types=(AxisType.Auto,) * 3, devices=used)
    return jax.sharding.Mesh(np.asarray(used), (AXIS,))
