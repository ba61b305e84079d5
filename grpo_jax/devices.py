"""Devices: how programs run on one or many, the one place where arrays move between host and devices, speed and memory.

`Devices` says how a program runs. A number means that each of so many devices has all parameters. A `Mesh` means that
parameters are cut over devices, as the rules of `models.sharding` say. Every program is a `jax.jit` of whole arrays.
With a number of devices above 1, what is computed row by row is a `jax.pmap` within it.

With several hosts devices are those of all, always as a `Mesh`, and an array is spread over all of them. Every host
gives `to_devices` the whole array, of which it puts its part; `local_rows` reads what lies on its own devices.
"""

import dataclasses
import math
import resource
import sys
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from grpo_jax import hosts
from grpo_jax.checks import validate_mesh
from grpo_jax.config import MeshConfig
from grpo_jax.errors import UsageError
from grpo_jax.functional.products import backend_name
from grpo_jax.models import sharding
from grpo_jax.models.params import is_quantised

AXIS = "data"

# Bytes moved by `to_devices` and `to_numpy` since they were last taken.
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


def map_rows(fn: Callable[..., Any], devices: Devices) -> Callable[..., Any]:
    """Returns a function of rows that do not depend on each other, computed by `jax.pmap` on several devices.

    It is called within a program, with whole arrays. Each device computes the rows that it has. On one device or a mesh
    it is `fn` itself.

    Args:
      fn: (what all rows share, such as parameters, *trees of arrays `[n, ...]`) -> arrays `[n, ...]`.
      devices: where the program runs; N is a multiple of their `parts`.
    """
    if isinstance(devices, Mesh) or devices == 1:
        return fn

    def merge(x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[2:])

    def call(shared: Any, *rows: Any) -> Any:
        return jax.tree.map(merge, _mapped(fn, devices, len(rows), 0)(shared, *_split(rows, devices)))

    return call


def sum_rows(fn: Callable[[Any, Any], tuple[Any, Any]], devices: Devices) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Returns a function whose sums and maxima over rows are those of the rows of all devices.

    This is the one place that reduces over devices, so that nothing is summed twice.

    Args:
      fn: (what all rows share, a tree of arrays `[n, ...]`) -> sums over these rows, and maxima over them.
      devices: as in `map_rows`.
    """
    if isinstance(devices, Mesh) or devices == 1:
        return fn

    def on_device(shared: Any, rows: Any) -> tuple[Any, Any]:
        sums, maxima = fn(shared, rows)
        return jax.lax.psum(sums, AXIS), jax.lax.pmax(maxima, AXIS)

    return lambda shared, rows: _mapped(on_device, devices, 1, None)(shared, _split(rows, devices))


def _mapped(fn: Callable[..., Any], devices: int, num_rows: int, out_axes: int | None) -> Callable[..., Any]:
    in_axes = (None, *[0] * num_rows)
    return jax.pmap(fn, axis_name=AXIS, in_axes=in_axes, out_axes=out_axes, devices=jax.devices()[:devices])


def _split(tree: Any, devices: int) -> Any:
    return jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), tree)


def compiled(
    fn: Callable[..., Any], out_axes: Any = None, *, devices: Devices = 1, donate_argnums: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """Compiles a function of whole arrays with `jax.jit`.

    Args:
      fn: pure. What it computes row by row goes through `map_rows` or `sum_rows`.
      out_axes: 0: the result's leading axis is spread over devices. None: parameters, or the same on all devices. Or a
        tree of these.
      devices: where its arguments are.
      donate_argnums: arguments whose memory may be reused.
    """
    if devices == 1:
        return jax.jit(fn, donate_argnums=donate_argnums)

    @wraps(fn)  # logs and profiles name the program
    def call(*args: Any) -> Any:
        if isinstance(devices, Mesh):
            # Not `jax.set_mesh` around the call: this is of the program only, which can then be lowered and traced.
            with jax.sharding.use_abstract_mesh(_mesh(devices).abstract_mesh):
                result = fn(*args)
        else:
            result = fn(*args)
        # The next program takes every result as it is, and is compiled once.
        return jax.lax.with_sharding_constraint(result, _shardings(result, devices, out_axes))

    return jax.jit(call, donate_argnums=donate_argnums)


def abstract(tree: Any, devices: Devices, axes: Any = None) -> Any:
    """Returns shapes and shardings of arrays that `place` or `to_devices` would put there, for lowering a program."""

    def of_array(x: Any, target: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=target)

    return jax.tree.map(of_array, tree, _shardings(tree, devices, axes))


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
        arrays = to_devices(batch, devices) if isinstance(devices, Mesh) else batch
        return all_rows(program(params, arrays), devices)

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


def to_numpy(tree: Any) -> Any:
    """Arrays of the devices as NumPy arrays. What is spread over several hosts is brought to all, which all call
    this."""
    bytes_moved["to_host"] += sum(x.nbytes for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))
    return jax.tree.map(np.asarray, jax.device_get(hosts.whole(tree)))


def all_rows(tree: Any, devices: Devices) -> Any:
    """Returns all rows of arrays `[N, ...]` that are spread over devices, as NumPy arrays on every host. All hosts call
    this."""
    if hosts.count() == 1:
        return to_numpy(tree)
    return gather_rows("rows", local_rows(tree), devices)  # the devices would compile a program for each array


def gather_rows(name: str, tree: Any, devices: Devices) -> Any:
    """Returns all rows `[N, ...]` of NumPy arrays of which each host has those on its devices. All hosts call this."""

    def in_order(*parts: np.ndarray) -> np.ndarray:
        joined = np.concatenate(parts)
        return joined[np.argsort(np.concatenate(rows_of_hosts(devices, len(joined))))]

    return jax.tree.map(in_order, *hosts.gather(name, tree))


def local_numbers(devices: Devices, num_prompts: int) -> np.ndarray:
    """Returns the prompts of a batch of N that lie on the devices of this host, ascending."""
    return rows_of_hosts(devices, num_prompts)[hosts.index()]


def rows_of_hosts(devices: Devices, num_prompts: int) -> list[np.ndarray]:
    """The prompts of a batch of N that lie on the devices of each host, ascending, in the order of hosts."""
    if hosts.count() == 1:
        return [np.arange(num_prompts)]
    rows: list[set[int]] = [set() for _ in range(hosts.count())]
    spread = NamedSharding(_mesh(devices), PartitionSpec(sharding.BATCH))
    placed: Mapping[Any, Any] = spread.devices_indices_map((num_prompts,))
    for device, (part,) in placed.items():
        rows[device.process_index].update(range(num_prompts)[part])
    return [np.array(sorted(rows_of_host), np.int64) for rows_of_host in rows]


def local_rows(tree: Any) -> Any:
    """Returns the rows of arrays `[N, ...]` that lie on the devices of this host, as NumPy arrays, in the order
    of `rows_of_hosts`."""

    def pieces(x: jax.Array) -> list[jax.Array]:
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return [x]
        shards = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}  # copies have one place
        return [shards[start] for start in sorted(shards)]

    leaves, structure = jax.tree.flatten(tree)
    read = to_numpy([pieces(x) for x in leaves])
    joined = [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in read]
    return jax.tree.unflatten(structure, joined)


def pop_bytes_moved() -> dict[str, int]:
    """Bytes moved to the devices and back since the last call."""
    taken = dict(bytes_moved)
    bytes_moved.update(dict.fromkeys(bytes_moved, 0))
    return taken


def place(tree: Any, devices: Devices, axes: Any = None) -> Any:
    """Puts parameters, or a state with them, where programs take them.

    What is there already is not moved. On one device the arrays are committed to it, as results of a step are. A
    program whose arguments are committed later than at its first call would be compiled again.

    Args:
      tree: parameters, or a state.
      devices: where programs run.
      axes: None: parameters, whole on each device or cut over a mesh. 0: rows, spread over devices. Or a tree of these.

    Raises:
      UsageError: the mesh would cut key-value heads.
    """
    if devices == 1:
        first = jax.local_devices()[0]
        return jax.tree.map(lambda x: x if getattr(x, "committed", False) else jax.device_put(x, first), tree)
    return jax.tree.map(_put, tree, shardings(tree, devices, axes))


def _put(x: Any, target: jax.sharding.Sharding) -> Any:
    """An array there. Of one that goes to several hosts, and that each of them has, each puts its part."""
    if target.is_fully_addressable or not getattr(x, "is_fully_addressable", True):
        return jax.device_put(x, target)
    whole = np.asarray(x)
    return jax.make_array_from_callback(whole.shape, target, lambda index: whole[index])


def shardings(tree: Any, devices: Devices, axes: Any = None) -> Any:
    """Returns where `place` puts a tree, from its shapes: a tree of shardings.

    Raises:
      UsageError: the mesh would cut key-value heads.
    """
    if isinstance(devices, Mesh):
        _check_heads(tree, devices)
    return _shardings(tree, devices, axes)


def load_shardings(devices: Devices) -> Callable[[Any], Any] | None:
    """Returns where a model is loaded: shapes -> shardings. None: on the first device, from which `place` copies it."""
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
    """Returns shardings of arrays that are spread (0), or of parameters and arrays that all devices have (None)."""
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


def _is_none(x: Any) -> bool:
    return x is None


def _mesh(devices: Devices) -> jax.sharding.Mesh:
    used = jax.devices()[: size(devices)]
    if isinstance(devices, Mesh):
        return jax.make_mesh(devices, sharding.AXES, axis_types=(AxisType.Auto,) * 3, devices=used)
    return jax.sharding.Mesh(np.asarray(used), (AXIS,))


# ---- speed and memory

# Dense bfloat16 operations a second, from the vendors' data sheets, by a part of JAX's device_kind.
_PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "TPU v6": 918e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v4": 275e12,
}
_NO_LIMIT = 2**60


def peak_flops(devices: int) -> float | None:
    """Returns the operations a second that so many devices can do at most, in bfloat16; None if that is not known."""
    kind = jax.local_devices()[0].device_kind
    return next((devices * peak for name, peak in _PEAK_FLOPS.items() if name in kind), None)


def update_flops(trained: Any, frozen: Any, tokens: int) -> float:
    """Counts the operations of a forward and backward pass over some tokens, without those of attention itself.

    There are 6 for each trained parameter and token: 2 forward, 4 backward. A frozen one has no gradient: 4.

    Args:
      trained: parameters that are trained.
      frozen: the others, or None.
      tokens: without padding; a prompt counts once a group.

    Returns:
      Their number.
    """
    return float(tokens) * (6 * _size(trained) + 4 * _size(frozen))


def _size(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def peak_memory_mb() -> float:
    """Returns the most memory in use since the start, in MiB, of the first device, or else of the process."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in statistics:
        return round(statistics["peak_bytes_in_use"] / 2**20, 1)
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20, 1)


def memory_limit(devices: int = 1) -> int:
    """Returns the bytes that each device may use.

    An accelerator reports them. On a CPU they are the device's share of what the machine and its control group have.

    Args:
      devices: that share the memory of a CPU.
    """
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in statistics:
        return int(statistics["bytes_limit"])
    in_use = sum(x.nbytes for x in jax.live_arrays())  # the model that is loaded counts in the plan
    return min(_available() + in_use, _cgroup_limit()) // devices


def _available() -> int:
    """Returns the bytes that the machine has left; without /proc, more than any machine has."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return _NO_LIMIT
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), _NO_LIMIT)


def _cgroup_limit(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the bytes that the control group of this process may take, as a container sees it."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of the second version, and of the first
        try:
            most = (root / name).read_text(encoding="utf-8").strip()
        except OSError:
            continue
        return _NO_LIMIT if most == "max" else int(most)
    return _NO_LIMIT
