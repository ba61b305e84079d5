"""How much work was done, as is usually counted: 2 operations a parameter and token forward, 4 backward."""

import resource
import sys
from typing import Any

import jax

from grpo_jax.planning.accelerators import DEVICES

# Dense bfloat16 products a second, from the vendors' data sheets, by a part of JAX's device_kind.
_PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": DEVICES["h100"].flops,
    "A100": 312e12,
    "L40S": 362e12,
    "TPU v6": DEVICES["v6e"].flops,
    "TPU v5 lite": DEVICES["v5e"].flops,
    "TPU v5e": DEVICES["v5e"].flops,
    "TPU v5": DEVICES["v5p"].flops,
    "TPU v4": 275e12,
}


def update_flops(trained: Any, frozen: Any, tokens: int) -> float:
    """Operations of a forward and backward pass over some tokens, without those of attention itself.

    6 for each trained parameter and token. Of a frozen one no gradient is taken: 4.

    Args:
      trained: parameters that are trained.
      frozen: the others, or None.
      tokens: real ones, padding aside; a prompt counts once a group.

    Returns:
      Their number.
    """
    return float(tokens) * (6 * _size(trained) + 4 * _size(frozen))


def forward_flops(params: Any, tokens: int) -> float:
    """Operations of a forward pass over some tokens, without those of attention itself: 2 a parameter and token."""
    return 2.0 * float(tokens) * _size(params)


def held_bytes(*trees: Any) -> int:
    """Bytes of all arrays in some trees; an array that is in several counts once."""
    return sum({id(leaf): leaf.nbytes for leaf in jax.tree.leaves(trees)}.values())


def peak_flops(devices: int) -> float | None:
    """What the devices can do at most in a second, in bfloat16; None where that is not known."""
    kind = jax.local_devices()[0].device_kind
    return next((devices * peak for name, peak in _PEAK_FLOPS.items() if name in kind), None)


def peak_memory_mb() -> float:
    """Most memory in use since the start, in MiB: of the first device, or where it does not tell, of the process."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in statistics:
        return round(statistics["peak_bytes_in_use"] / 2**20, 1)
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20, 1)


def _size(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
