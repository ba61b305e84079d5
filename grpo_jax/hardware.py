"""Speed and memory of this machine's devices, and how much of both a run uses."""

import resource
import sys
from pathlib import Path
from typing import Any

import jax

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
