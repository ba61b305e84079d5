"""The projections of the decoder: linear maps inside a block, by their names in the tree of parameters.

Sharding, adapters, quantisation and decoding read this table. A kernel is `[*in, *out]`, in a mixture `[X, *in, *out]`,
with an axis L of layers before it.
"""

from typing import Literal, NamedTuple

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"  # the axes of a mesh: see `sharding`
Axes = str | tuple[str, ...] | None  # the mesh axes along which one dimension of an array is sharded


class Projection(NamedTuple):
    """The axes of a kernel, and the uses of the projection."""

    inputs: tuple[Axes, ...]  # the mesh axes of each axis of an input. Heads are never split into features
    outputs: tuple[Axes, ...]  # the mesh axes of each axis of an output
    is_joined: bool = (
        False  # the projections of a block with this flag have one input, and decoding joins their kernels
    )
    is_target: bool = True  # LoRA can adapt it


_HEADS = Projection((FSDP,), (TENSOR, None), is_joined=True)
_FEATURES = Projection((FSDP,), (TENSOR,), is_joined=True)
_OF_DELTA = Projection((FSDP,), (None,), is_joined=True)

PROJECTIONS: dict[str, Projection] = {
    "q_proj": _HEADS,
    "k_proj": _HEADS,
    "v_proj": _HEADS,
    "o_proj": Projection((TENSOR, None), (FSDP,)),
    "gate_proj": _FEATURES,
    "up_proj": _FEATURES,
    "down_proj": Projection((TENSOR,), (FSDP,)),
    "in_proj_qkv": _OF_DELTA,
    "in_proj_z": _OF_DELTA,
    "in_proj_b": _OF_DELTA,
    "in_proj_a": _OF_DELTA,
    "out_proj": Projection((None,), (FSDP,)),
    "per_layer_input_gate": Projection((FSDP,), (None,), is_target=False),
    "per_layer_projection": Projection((None,), (FSDP,), is_target=False),
}
TARGETS = tuple(name for name, projection in PROJECTIONS.items() if projection.is_target)
Target = Literal[TARGETS]  # type: ignore[valid-type]  # options list the choices


def split_shape(name: str, kernel_shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Splits the shape of a kernel `[L, *in, *out]` into (layers, in, out). For a mixture's kernel `[L, X, in, out]`
    the first part is (layers, experts)."""
    inputs, outputs, *_ = PROJECTIONS[name]
    end, stacked = len(kernel_shape) - len(outputs), len(kernel_shape) - len(outputs) - len(inputs)
    return kernel_shape[:stacked], kernel_shape[stacked:end], kernel_shape[end:]
