"""Running programs on one or many devices, moving arrays between host and devices, and measuring speed and memory.

`Devices` lists the devices of a program. Without a mesh, each of them holds all parameters. With a `Mesh`, parameters
are sharded by the rules of `models.params.sharding`. Every program is a `jax.jit` of whole arrays. On several
devices without a mesh, computations that are independent for each row run in a `jax.pmap` inside it.

With several hosts, there is always a mesh over the devices of all hosts, and arrays are spread over all of them. The
devices that only sample are an exception: each host has its own, whose programs no other host takes part in.
Every host passes the whole array to `to_devices`, which puts only this host's part. `local_rows` reads the rows that
lie on this host's devices.
"""

import dataclasses
import math
import os
import re
import resource
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from grpo_jax import hosts
from grpo_jax.config import GRPOConfig, PhaseConfig, validate_mesh
from grpo_jax.errors import UsageError
from grpo_jax.functional.products import backend_name
from grpo_jax.models.params import sharding
from grpo_jax.models.params.tree import count_used

T = TypeVar("T")  # arrays, or a tree of them

AXIS = "data"
COMPILING = "compile_ahead"  # name of the thread that compiles programs while others run

# Bytes moved by `to_devices` and `to_numpy` since the last call of `pop_bytes_moved`.
bytes_moved = {"to_devices": 0, "to_host": 0}


class Mesh(NamedTuple):
    """The shape of a grid of devices for a model that is larger than one. Prompts are spread over data · fsdp."""

    data: int = 1
    fsdp: int = 1  # parameters are sharded, and each layer is gathered while it is computed
    tensor: int = 1  # parameters are sharded, and each device computes its heads and features; divides key-value heads


@dataclass(frozen=True)
class Devices:
    """The devices that run a program, and how they share its work."""

    listed: tuple[jax.Device, ...] = ()  # (): the first device of this process
    mesh: Mesh | None = None  # None: each device holds all parameters

    @property
    def all(self) -> tuple[jax.Device, ...]:
        """The devices, in the order in which they share rows."""
        return self.listed or tuple(jax.local_devices()[:1])

    @property
    def is_single(self) -> bool:
        """True for one device without a mesh."""
        return len(self.all) == 1 and self.mesh is None


ONE_DEVICE = Devices()


def first_devices(shape: int | Mesh) -> Devices:
    """Returns the first devices of all hosts, as many as a number or a mesh has. A mesh has an order that suits the
    topology."""
    if not isinstance(shape, Mesh):
        return Devices(tuple(jax.devices()[:shape]))
    automatic, listed = (AxisType.Auto,) * len(shape), jax.devices()[: math.prod(shape)]
    ordered = jax.make_mesh(shape, sharding.AXES, axis_types=automatic, devices=listed)
    return Devices(tuple(ordered.devices.flat), shape)


def num_devices(requested: int) -> int:
    """Returns the number of devices to use: `requested`, or all of them for 0.

    Raises:
      UsageError: There are fewer devices, or several hosts of which only some devices are requested.
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


def split_devices(config: PhaseConfig) -> tuple[tuple[jax.Device, ...], tuple[jax.Device, ...]]:
    """Returns the devices that train, of all hosts, and the devices of this host that only sample.

    Raises:
      UsageError: The devices do not exist, or none of a host's devices would train.
    """
    listed, sampling = jax.devices()[: num_devices(config.devices)], config.num_sampler_devices
    by_host = [[x for x in listed if x.process_index == host] for host in sorted({x.process_index for x in listed})]
    if sampling >= (fewest := min(map(len, by_host))):
        raise UsageError(
            f"sampler_devices is {sampling}, but the run has {fewest} device{'s' if fewest > 1 else ''} on a host, and "
            "at least one must train: set sampler_devices lower, or devices higher"
        )
    training = [x for devices in by_host for x in devices[: len(devices) - sampling]]
    return tuple(training), tuple(x for x in local_devices(Devices(tuple(listed))) if x not in training)


def devices_of(config: PhaseConfig) -> Devices:
    """Returns the devices that the options request, without those that only sample.

    Raises:
      UsageError: The devices do not exist, or cannot share the work in this way.
    """
    validate_mesh(config.mesh)
    (listed, only_sample), (kind, fsdp, tensor) = split_devices(config), dataclasses.astuple(config.mesh)
    count = len(listed)
    if hosts.count() > 1 and kind == "pmap":
        raise UsageError(f"pmap runs on one host, and there are {hosts.count()}: leave out parallel, or set it to mesh")
    if hosts.count() == 1 and (kind == "pmap" or (kind == "auto" and fsdp * tensor == 1)):
        return Devices(listed)
    if count % (fsdp * tensor):
        raise UsageError(
            f"fsdp x tensor is {fsdp * tensor}, which does not divide the {count} devices of the run"
            f"{' that train' if only_sample else ''}: set devices to a multiple, or to 0 for all"
        )
    mesh = Mesh(count // (fsdp * tensor), fsdp, tensor)
    devices = Devices(listed, mesh) if only_sample else first_devices(mesh)
    if sum(map(len, rows_of_hosts(devices, num_shards(devices)))) > num_shards(devices):
        raise UsageError(
            f"tensor is {tensor}, but a host has {len(local_devices(devices))} devices, and a group lies on those of "
            "one host: set tensor to a divisor of them, and fsdp to the rest"
        )
    return devices


def sampling_devices(config: GRPOConfig) -> Devices:
    """Returns the devices that sample completions: those of the run, or those of this host that only sample.

    Raises:
      UsageError: The devices do not exist, or cannot share the work in this way.
    """
    training, (_, listed) = devices_of(config), split_devices(config)
    if not listed:
        return training
    (count, fsdp, tensor), prompts = dataclasses.astuple(config.sampler), config.sampling.num_prompts
    if count % (fsdp * tensor):
        raise UsageError(
            f"sampler_fsdp x sampler_tensor is {fsdp * tensor}, which does not divide the {count} sampler_devices: set "
            "sampler_devices to a multiple"
        )
    # With several hosts, `jax.pmap` inside a program takes the first devices of a host.
    has_mesh = fsdp * tensor > 1 or (count > 1 and hosts.count() > 1)
    devices = Devices(listed, Mesh(count // (fsdp * tensor), fsdp, tensor) if has_mesh else None)
    if prompts % (split := num_hosts(training) * num_shards(devices)):
        raise UsageError(
            f"num_prompts is {prompts}: it must be a multiple of hosts x sampler_devices / sampler_tensor, {split}"
        )
    return devices


def local_devices(devices: Devices) -> tuple[jax.Device, ...]:
    """Returns those of the devices that belong to this host."""
    return tuple(x for x in devices.all if x.process_index == jax.process_index())


def num_hosts(devices: Devices) -> int:
    """Returns the number of hosts that the devices belong to."""
    return len({x.process_index for x in devices.all})


def size(devices: Devices) -> int:
    """Returns the number of devices."""
    return len(devices.all)


def num_shards(devices: Devices) -> int:
    """Returns the number of shards of a batch's prompts. A group is never split."""
    return size(devices) if devices.mesh is None else devices.mesh.data * devices.mesh.fsdp


def cut_of(devices: Devices) -> tuple[int, int]:
    """Returns into how many parts the devices cut parameters, along fsdp and along tensor."""
    return (1, 1) if devices.mesh is None else devices.mesh[1:]


# ---- programs


def map_rows(fn: Callable[..., T], devices: Devices) -> Callable[..., T]:
    """Maps a function of independent rows over devices with `jax.pmap`.

    Call the result inside a program, with whole arrays. Each device computes its rows. On one device or a mesh the
    result is `fn` itself.

    Args:
      fn: A function (values that all rows share, such as parameters, *trees of arrays `[n, ...]`) -> arrays `[n, ...]`.
      devices: The devices that the program runs on. N is a multiple of `num_shards`.
    """
    if devices.is_single or devices.mesh is not None:
        return fn

    def merge(x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[2:])

    def call(shared: Any, *rows: Any) -> T:
        merged: T = jax.tree.map(merge, _mapped(fn, devices, len(rows), 0)(shared, *_split(rows, devices)))
        return merged

    return call


def sum_rows(fn: Callable[[Any, Any], tuple[Any, Any]], devices: Devices) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Extends a function of sums and maxima over rows to the rows of all devices.

    Only this function adds up gradients of devices, so that nothing is summed twice. On a mesh, XLA does it.

    Args:
      fn: A function (values that all rows share, a tree of arrays `[n, ...]`) -> sums and maxima over these rows.
      devices: The devices that the program runs on. N is a multiple of `num_shards`.
    """
    if devices.is_single or devices.mesh is not None:
        return fn

    def on_device(shared: Any, rows: Any) -> tuple[Any, Any]:
        sums, maxima = fn(shared, rows)
        return jax.lax.psum(sums, AXIS), jax.lax.pmax(maxima, AXIS)

    return lambda shared, rows: _mapped(on_device, devices, 1, None)(shared, _split(rows, devices))


def _mapped(fn: Callable[..., Any], devices: Devices, num_rows: int, out_axes: int | None) -> Callable[..., Any]:
    in_axes = (None, *[0] * num_rows)
    return jax.pmap(fn, axis_name=AXIS, in_axes=in_axes, out_axes=out_axes, devices=devices.all)


def _split(tree: Any, devices: Devices) -> Any:
    return jax.tree.map(lambda x: x.reshape(size(devices), -1, *x.shape[1:]), tree)


def jit_on_devices(
    fn: Callable[..., T], out_axes: Any = None, *, devices: Devices = ONE_DEVICE, donate_argnums: tuple[int, ...] = ()
) -> Callable[..., T]:
    """Compiles a function of whole arrays with `jax.jit`.

    Args:
      fn: A pure function. It computes independent rows through `map_rows` or `sum_rows`.
      out_axes: 0 if the leading axis of the result is spread over devices; None if the result is parameters, or the
        same on all devices; or a tree of both.
      devices: The devices that hold the arguments.
      donate_argnums: The positions of arguments whose memory may be reused.
    """
    if devices.is_single:
        return jax.jit(fn, donate_argnums=donate_argnums)

    @wraps(getattr(fn, "func", fn))  # logs and profiles name the program
    def call(*args: Any) -> Any:
        if devices.mesh is not None:
            # `jax.set_mesh` around the call would not apply when the program is only lowered or traced.
            with jax.sharding.use_abstract_mesh(_mesh(devices).abstract_mesh):
                result = fn(*args)
        else:
            result = fn(*args)
        # With fixed shardings the program that takes the result is compiled only once.
        return jax.lax.with_sharding_constraint(result, shardings(result, devices, out_axes))

    return jax.jit(call, donate_argnums=donate_argnums)


def abstract(tree: Any, devices: Devices, axes: Any = None) -> Any:
    """Returns the shapes and shardings that `place` or `to_devices` would produce, for lowering a program."""
    targets = shardings(tree, devices, axes)
    return jax.tree.map(lambda x, target: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=target), tree, targets)


def num_cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spread_over(tree: T, devices: Devices) -> T:
    """Spreads leading axes `[N, ...]` over devices like `to_devices`, but inside a program. The program that takes the
    result is then compiled only once."""
    return tree if size(devices) == 1 else jax.lax.with_sharding_constraint(tree, shardings(tree, devices, 0))


# ---- where arrays are


def to_devices(tree: Any, devices: Devices = ONE_DEVICE, *, axes: Any = 0) -> Any:
    """Moves arrays from the host to the devices. Arrays that are committed to devices already are not moved.

    Args:
      tree: A tree of NumPy arrays `[N, ...]`.
      devices: The devices that programs run on. N is a multiple of `num_shards`.
      axes: 0 if each device gets its part of N; None if every device gets everything; or a tree of both.
    """

    def put(x: Any, target: jax.sharding.Sharding) -> Any:
        if getattr(x, "committed", False):
            return x
        bytes_moved["to_devices"] += x.nbytes
        return _put(x, target)

    return jax.tree.map(put, tree, shardings(tree, devices, axes))


def to_numpy(tree: Any) -> Any:
    """Moves arrays from the devices to NumPy arrays. Arrays that are spread over several hosts are gathered on every
    host, and all hosts must then call this."""
    bytes_moved["to_host"] += sum(x.nbytes for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))
    return jax.tree.map(np.asarray, jax.device_get(hosts.whole(tree)))


def all_rows(tree: Any, devices: Devices) -> Any:
    """Returns all rows of arrays `[N, ...]` that are spread over devices, as NumPy arrays on every host. All hosts must
    call this."""
    if hosts.count() == 1:
        return to_numpy(tree)
    return gather_rows("rows", local_rows(tree), devices)  # JAX's gather would compile a program for each array


def gather_rows(name: str, tree: Any, devices: Devices) -> Any:
    """Gathers the rows `[N, ...]` of NumPy arrays from the hosts that hold them. All hosts must call this."""

    def in_order(*parts: np.ndarray) -> np.ndarray:
        joined = np.concatenate(parts)
        return joined[np.argsort(np.concatenate(rows_of_hosts(devices, len(joined))))]

    return jax.tree.map(in_order, *hosts.gather(name, tree))


def local_numbers(devices: Devices, num_prompts: int) -> np.ndarray:
    """Returns the indices of the prompts in a batch of N that lie on this host's devices, ascending."""
    return rows_of_hosts(devices, num_prompts)[hosts.index()]


def rows_of_hosts(devices: Devices, num_prompts: int) -> list[np.ndarray]:
    """Returns, for each host in order, the indices of the prompts in a batch of N on its devices, ascending."""
    if hosts.count() == 1:
        return [np.arange(num_prompts)]
    rows: list[set[int]] = [set() for _ in range(hosts.count())]
    spread = NamedSharding(_mesh(devices), PartitionSpec(sharding.BATCH))
    placed: Mapping[Any, Any] = spread.devices_indices_map((num_prompts,))
    for device, (part,) in placed.items():
        rows[device.process_index].update(range(num_prompts)[part])
    return [np.array(sorted(rows_of_host), np.int64) for rows_of_host in rows]


def local_rows(tree: Any) -> Any:
    """Returns the rows of arrays `[N, ...]` that lie on this host's devices, as NumPy arrays, in the order of
    `rows_of_hosts`."""

    def pieces(x: jax.Array) -> list[jax.Array]:
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return [x]
        shards = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}  # replicas share a key
        return [shards[start] for start in sorted(shards)]

    leaves, structure = jax.tree.flatten(tree)
    read = to_numpy([pieces(x) for x in leaves])
    joined = [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in read]
    return jax.tree.unflatten(structure, joined)


def pop_bytes_moved() -> dict[str, int]:
    """Returns the bytes moved to the devices and to the host since the last call, and resets both counters."""
    taken = dict(bytes_moved)
    bytes_moved.update(dict.fromkeys(bytes_moved, 0))
    return taken


def place(tree: Any, devices: Devices, axes: Any = None) -> Any:
    """Puts parameters, or a state that contains them, where programs expect them.

    Arrays that are there already are not moved. On one device the arrays are committed to it, like the results of a
    step. Otherwise the second call of a program would have committed arguments, and compile the program again.

    Args:
      tree: Parameters, or a state.
      devices: The devices that programs run on.
      axes: None for parameters, which are whole on each device or sharded over a mesh; 0 for rows, which are spread
        over devices; or a tree of both.

    Raises:
      UsageError: The mesh would split key-value heads.
    """
    if devices.is_single:
        (first,) = devices.all
        return jax.tree.map(lambda x: x if getattr(x, "committed", False) else jax.device_put(x, first), tree)
    return jax.tree.map(_put, tree, shardings(tree, devices, axes))


def _put(x: Any, target: jax.sharding.Sharding) -> Any:
    """Puts an array on its devices. If it goes to several hosts, each host passes the whole array and puts its part."""
    if target.is_fully_addressable or not getattr(x, "is_fully_addressable", True):
        return jax.device_put(x, target)
    whole = np.asarray(x)
    return jax.make_array_from_callback(whole.shape, target, lambda index: whole[index])


def shardings(tree: Any, devices: Devices, axes: Any = None) -> Any:
    """Returns the shardings of a tree, whose leaves only need shapes. For arguments and errors see `place`."""
    if devices.is_single:
        return jax.tree.map(lambda _: SingleDeviceSharding(devices.all[0]), tree)
    mesh = _mesh(devices)
    names = AXIS if devices.mesh is None else sharding.BATCH

    def spec_of_part(axis: int | None, part: Any) -> Any:
        if axis is None and devices.mesh is not None:
            _check_heads(part, devices.mesh)
            return jax.tree.map(partial(NamedSharding, mesh), sharding.specs(part, mesh.shape))
        spec = PartitionSpec() if axis is None else PartitionSpec(names)
        return jax.tree.map(lambda _: NamedSharding(mesh, spec), part)

    return jax.tree.map(spec_of_part, axes, tree, is_leaf=lambda x: x is None)


def load_shardings(devices: Devices) -> Callable[[Any], Any] | None:
    """Returns a function from shapes to shardings for loading a model, or None to load it on the first device, from
    which `place` copies it."""
    return partial(shardings, devices=devices) if devices.mesh is not None else None


def _check_heads(params: Any, mesh: Mesh) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: hasattr(x, "shape")):
        is_keys = [getattr(key, "key", "") for key in path[-2:]] == ["k_proj", "kernel"]
        # The state of an optimizer also has arrays of other shapes by this name.
        heads = x.shape[-2] if is_keys and len(x.shape) == 4 else mesh.tensor
        if heads % mesh.tensor:
            raise UsageError(
                f"tensor is {mesh.tensor}, but the model has {heads} key-value heads, which are never cut: set tensor "
                "to a divisor of them, and fsdp to the rest"
            )


def _mesh(devices: Devices) -> jax.sharding.Mesh:
    if devices.mesh is None:
        return jax.sharding.Mesh(np.asarray(devices.all), (AXIS,))
    automatic = (AxisType.Auto,) * len(devices.mesh)
    return jax.sharding.Mesh(np.reshape(devices.all, devices.mesh), sharding.AXES, axis_types=automatic)


# ---- speed and memory

# Dense bfloat16 operations per second, from the vendors' data sheets. Keys are parts of JAX's device_kind.
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
    """Returns the peak number of bfloat16 operations per second on this many devices; None if it is unknown."""
    kind = jax.local_devices()[0].device_kind
    return next((devices * peak for name, peak in _PEAK_FLOPS.items() if name in kind), None)


def update_flops(trained: Any, frozen: Any, tokens: int, expert_share: float = 1.0) -> float:
    """Counts the operations of a forward and backward pass, except for those of attention itself.

    Each trained parameter takes 6 operations per token: 2 forward and 4 backward. A frozen parameter takes 4, since it
    has no gradient.

    Args:
      trained: The trained parameters.
      frozen: The frozen parameters, or None.
      tokens: The number of tokens, without padding. A prompt counts once per group.
      expert_share: The share of a mixture's experts that compute a token.

    Returns:
      The number of operations.
    """
    return float(tokens) * (6 * count_used(trained, expert_share) + 4 * count_used(frozen, expert_share))


def peak_memory_mb() -> float:
    """Returns the peak memory since the start, in MiB: of the first device if it reports this, else of the process."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in statistics:
        return round(statistics["peak_bytes_in_use"] / 2**20, 1)
    if peak := _memory_of_process("VmHWM"):  # `ru_maxrss` would include the peak of the process which started this one
        return round(peak / 2**20, 1)
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20, 1)


def memory_limit(devices: int = 1) -> int:
    """Returns the number of bytes that each device may use.

    An accelerator reports it. On a CPU it is the device's share of the memory of the machine and its control group.

    Args:
      devices: The number of devices that share the memory of a CPU.
    """
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in statistics:
        return int(statistics["bytes_limit"])
    # A memory plan counts the loaded model and the process too.
    return min(_available() + _memory_of_process("VmRSS"), _cgroup_limit()) // devices


def _memory_of_process(name: str) -> int:
    """Returns a number of bytes from the status of this process, such as VmRSS, or 0 without /proc."""
    status = Path("/proc/self/status")
    kib = re.search(rf"{name}:\s*(\d+)", status.read_text(encoding="utf-8") if status.exists() else "")
    return int(kib[1]) * 2**10 if kib else 0


def _available() -> int:
    """Returns the number of bytes that the machine has left, or `_NO_LIMIT` without /proc."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return _NO_LIMIT
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), _NO_LIMIT)


def _cgroup_limit(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the number of bytes that the control group of this process may use, as a container sees it."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of groups of version 2, and of version 1
        with suppress(OSError):
            most = (root / name).read_text(encoding="utf-8").strip()
            return _NO_LIMIT if most == "max" else min(int(most), _NO_LIMIT)
    return _NO_LIMIT
