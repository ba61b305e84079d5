"""Rules for sharding arrays over a mesh of devices: which axis of an array is sharded along which axis of the mesh.

A mesh has three axes. Prompts are spread along "data" and "fsdp". Parameters are sharded along "fsdp" and "tensor", so
that a device holds 1 / (fsdp · tensor) of them. Along "fsdp" a layer is gathered while it is computed. Along "tensor"
it stays sharded, and each device computes its heads and its features of the MLP. In decoding, gathering a layer for
every token would cost more than computing the token. There "fsdp" acts like more "tensor": parameters stay sharded
along both, and the few rows of activations travel.

These functions act inside programs that `devices` compiles for a mesh. Everywhere else they change nothing.

Letters: see `transformer`. R is the rank of adapters.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec

from grpo_jax.models.params.tree import DATA, FSDP, PROJECTIONS, TENSOR, Axes

T = TypeVar("T")  # arrays, or a tree of them

AXES = DATA, FSDP, TENSOR
BATCH = DATA, FSDP  # the axes that prompts are spread along
MODEL = FSDP, TENSOR  # the axes that features are sharded along if no other dimension is

# The axes of parameters, by the last one to three names of their path. Others, such as norms, are whole on every
# device, and so is the leading axis L of stacked layers. Embeddings are sharded only by features, so that slices of the
# vocabulary stay local.
_PARAMETERS: dict[tuple[str | None, ...], tuple[Axes, ...]] = {
    ("embedding",): (None, MODEL),
    ("unembedding",): (None, MODEL),
}
for _name, (_in, _out, *_) in PROJECTIONS.items():
    _PARAMETERS |= {
        (_name, "kernel"): (*_in, *_out),
        (_name, "transposed"): (_out[0], _in[0]),  # from `transformer.decoding_layout`
        (_name, "bias"): _out,
        (_name, "a"): (*_in, None),
        (_name, "b"): (None, *_out),
    }
    for _kernel, _leaf in itertools.product(("kernel", "quantised"), ("codes", "scales")):  # matrices [I, O]
        _PARAMETERS[_name, _kernel, _leaf] = (_in[0], _out[0])

Layout = Callable[[Axes], Axes]  # axes of a stored parameter -> axes of the same parameter in use


def stored(axes: Axes) -> Axes:
    """Returns the axes of parameters between programs, of their gradients, and of the optimizer's moments."""
    return axes


def gathered(axes: Axes) -> Axes:
    """Returns the axes of one layer's parameters while it is computed for many tokens."""
    return None if axes == FSDP else axes


def decoding(axes: Axes) -> Axes:
    """Returns the axes of all layers' parameters while tokens are decoded."""
    return (TENSOR, FSDP) if axes == TENSOR else gathered(axes)


# ---- specifications


def specs(params: Any, sizes: Any, layout: Layout = stored) -> Any:
    """Returns how parameters are sharded, as a tree of `PartitionSpec`.

    Args:
      params: A tree that contains parameters, such as the state of a run. Its leaves only need shapes.
      sizes: The sizes of the mesh's axes, by name.
      layout: The use of the parameters: `stored`, `gathered` or `decoding`.

    Returns:
      A tree like `params`. A dimension that the mesh does not divide stays whole.
    """

    def spec(path: Any, x: Any) -> PartitionSpec:
        names = tuple(getattr(key, "key", getattr(key, "name", None)) for key in path)
        axes = next((_PARAMETERS[names[-n:]] for n in (3, 2, 1) if names[-n:] in _PARAMETERS), ())
        if len(axes) > x.ndim:  # a parameter of another model with the same name
            return PartitionSpec()
        return _spec(x.shape, sizes, (*[None] * (x.ndim - len(axes)), *map(layout, axes)))

    return jax.tree_util.tree_map_with_path(spec, params)


def _spec(shape: tuple[int, ...], sizes: Any, axes: tuple[Axes, ...]) -> PartitionSpec:
    return PartitionSpec(*(fitting(size, sizes, axis) for size, axis in zip(shape, axes, strict=True)))


def fitting(size: int, sizes: Any, axes: Axes) -> Axes:
    """Returns the longest leading part of the mesh axes whose sizes divide `size`, or None."""
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    while names and size % math.prod(sizes[name] for name in names):
        names = names[:-1]
    return names or None


# ---- inside a program


def mesh_sizes() -> Any:
    """Returns the sizes of the axes of the mesh that the program is compiled for, by name; None without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape if mesh.axis_names == AXES else None


def batch_shards() -> int:
    """Returns the number of shards of a batch's first axis: 1 without a mesh."""
    sizes = mesh_sizes()
    return 1 if sizes is None else math.prod(sizes[name] for name in BATCH)


def spread(tree: T, *axes: Axes) -> T:
    """Shards the leading dimensions of all arrays in a tree in the same way.

    Args:
      tree: A tree of arrays.
      *axes: The mesh axes of each dimension, from the first on. Further dimensions stay whole, and so do dimensions
        that the mesh does not divide.
    """
    sizes = mesh_sizes()
    if sizes is None:
        return tree

    def constrained(x: jax.Array) -> jax.Array:
        full = (*axes, *[None] * (x.ndim - len(axes)))[: x.ndim]
        return jax.lax.with_sharding_constraint(x, _spec(x.shape, sizes, full))

    sharded: T = jax.tree.map(constrained, tree)
    return sharded


def laid_out(params: Any, layout: Layout = stored) -> Any:
    """Shards parameters, or arrays of their shapes, as `layout` says."""
    sizes = mesh_sizes()
    return params if sizes is None else jax.lax.with_sharding_constraint(params, specs(params, sizes, layout))


def put_together(module: str, leaf: str, x: Any) -> Any:
    """Gathers a parameter of a layer for its projection. Its gradient is sharded like the stored parameter."""
    if mesh_sizes() is None:
        return x
    named = laid_out({module: {leaf: x}})
    return laid_out(named, gathered)[module][leaf]


def unembedding_axes(vocab_size: int) -> tuple[Axes, Axes]:
    """Returns the axes of an unembedding `[V, D]` in decoding. Tokens are sharded if the mesh divides them, else
    features."""
    sizes, cut = mesh_sizes(), (TENSOR, FSDP)
    divides = sizes is not None and fitting(vocab_size, sizes, cut) == cut
    return (cut, None) if divides else (None, MODEL)


def decoding_axes(module: str) -> tuple[Axes, Axes]:
    """Returns the axes of the features of a projection's inputs and outputs in decoding."""
    inputs, outputs, *_ = PROJECTIONS[module]
    return decoding(inputs[0]), decoding(outputs[0])
