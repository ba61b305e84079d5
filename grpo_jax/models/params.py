"""Nodes of a tree of parameters other than arrays: kernels in few bits, and a scalar head."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax

Params = Any  # of a network: nested dicts of arrays
Format = Literal["int8", "nf4"]
Quantize = Literal["none", "int8", "nf4"]


@partial(
    jax.tree_util.register_dataclass, data_fields=("codes", "scales"), meta_fields=("in_shape", "out_shape", "format")
)
@dataclass(frozen=True)
class Quantised:
    """A kernel `[L, *in, *out]`, or of one layer, in few bits. It replaces the array in the tree of parameters."""

    codes: Any  # int8 [L, I, O]; of nf4 uint8 [L, ⌈I/2⌉, O], an even input in the high half and the next in the low one
    scales: Any  # float32 [L, 1, O], M / 127; of nf4 bfloat16 [L, ⌈I/64⌉, O], M
    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    format: Format

    @property
    def shape(self) -> tuple[int, ...]:
        """The kernel's shape."""
        return (*self.codes.shape[:-2], *self.in_shape, *self.out_shape)


class Headed(NamedTuple):
    """Parameters of a decoder with a scalar head: see `heads`."""

    decoder: Params  # without an unembedding; may be `Adapted`
    head: jax.Array  # float32 [D], w


class Adapted(NamedTuple):
    """Parameters of a policy with adapters (`models.lora`)."""

    base: Params  # frozen, as without adapters
    adapters: Params  # trained
    scale: jax.Array  # float32 scalar, α/r


def is_quantised(x: Any) -> bool:
    """Tells whether a leaf of a tree of parameters is a quantised kernel."""
    return isinstance(x, Quantised)


def format_of(params: Any) -> Quantize:
    """Returns the format of the kernels of a tree of parameters."""
    leaves = jax.tree.leaves(params, is_leaf=is_quantised)
    return next((x.format for x in leaves if is_quantised(x)), "none")


def holds_quantised(params: Any) -> bool:
    """Tells whether any kernel of a tree of parameters is quantised."""
    return format_of(params) != "none"
