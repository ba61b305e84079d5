"""How arrays lie on a mesh of devices: which of their axes is cut along which axis of the mesh.

A mesh has three axes. Prompts are spread along "data" and "fsdp". Parameters are cut along "fsdp" and "tensor", so that
a device holds 1 / (fsdp · tensor) of them. Along "fsdp" a layer is put together while it is computed; along "tensor" it
stays cut, and each device computes its heads and its features of the MLP. In decoding a layer that is put together for
every token would cost more than the token. So there "fsdp" is more "tensor": parameters stay cut along both, and the
few rows of activations travel.

What is here acts within programs that `devices` compiles for a mesh. Everywhere else it changes nothing.

Letters as in `transformer`; R the rank of adapters.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

AXES = DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
BATCH = DATA, FSDP  # what prompts are spread along
MODEL = FSDP, TENSOR  # what features are cut along where nothing else is

Axes = str | tuple[str, ...] | None  # of the mesh, that one axis of an array is cut along

# Of projections: axes of what goes in, and of what comes out. Heads are never cut into features.
_PROJECTIONS: dict[str, tuple[tuple[Axes, ...], tuple[Axes, ...]]] = {
    "q_proj": ((FSDP,), (TENSOR, None)),
    "k_proj": ((FSDP,), (TENSOR, None)),
    "v_proj": ((FSDP,), (TENSOR, None)),
    "o_proj": ((TENSOR, None), (FSDP,)),
    "gate_proj": ((FSDP,), (TENSOR,)),
    "up_proj": ((FSDP,), (TENSOR,)),
    "down_proj": ((TENSOR,), (FSDP,)),
}
# Of parameters, by the last one to three names of their path. Others, such as norms, are whole on every device, and so
# is the leading axis L of stacked layers. Embeddings are cut by features alone: slices of the vocabulary stay local.
_PARAMETERS: dict[tuple[str | None, ...], tuple[Axes, ...]] = {
    ("embedding",): (None, MODEL),
    ("unembedding",): (None, MODEL),
}
for _name, (_in, _out) in _PROJECTIONS.items():
    _PARAMETERS |= {
        (_name, "kernel"): (*_in, *_out),
        (_name, "transposed"): (_out[0], _in[0]),  # of `transformer.decoding_layout`
        (_name, "bias"): _out,
        (_name, "a"): (*_in, None),
        (_name, "b"): (None, *_out),
    }
    for _kernel, _leaf in itertools.product(("kernel", "quantised"), ("codes", "scales")):  # matrices [I, O]
        _PARAMETERS[_name, _kernel, _leaf] = (_in[0], _out[0])

Layout = Callable[[Axes], Axes]  # axes of a parameter as it is stored -> as it is needed


def stored(axes: Axes) -> Axes:
    """Parameters between programs, their gradients, and the moments of the optimizer."""
    return axes


def gathered(axes: Axes) -> Axes:
    """Returns the axes of one layer's parameters while it is computed for many tokens."""
    return None if axes == FSDP else axes


def decoding(axes: Axes) -> Axes:
    """Returns the axes of all layers' parameters while tokens are decoded."""
    return (TENSOR, FSDP) if axes == TENSOR else gathered(axes)


# ---- as data


def specs(params: Any, sizes: Any, layout: Layout = stored) -> Any:
    """How parameters are cut, as a tree of `PartitionSpec`.

    Args:
      params: a tree with parameters anywhere in it, such as the state of a run; shapes do.
      sizes: of the mesh's axes, by name.
      layout: what they are needed for.

    Returns:
      The tree. An axis that the mesh does not divide stays whole.
    """

    def spec(path: Any, x: Any) -> PartitionSpec:
        names = tuple(getattr(key, "key", getattr(key, "name", None)) for key in path)
        axes = next((_PARAMETERS[names[-n:]] for n in (3, 2, 1) if names[-n:] in _PARAMETERS), ())
        if len(axes) > x.ndim:  # of another model, with the same names
            return PartitionSpec()
        return _spec(x.shape, sizes, (*[None] * (x.ndim - len(axes)), *map(layout, axes)))

    return jax.tree_util.tree_map_with_path(spec, params)


def _spec(shape: tuple[int, ...], sizes: Any, axes: tuple[Axes, ...]) -> PartitionSpec:
    return PartitionSpec(*(fitting(size, sizes, axis) for size, axis in zip(shape, axes, strict=True)))


def fitting(size: int, sizes: Any, axes: Axes) -> Axes:
    """Returns as many of the axes of a mesh, from the first on, as divide a size."""
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    while names and size % math.prod(sizes[name] for name in names):
        names = names[:-1]
    return names or None


# ---- within a program


def mesh_sizes() -> Any:
    """Sizes of the axes of the mesh that the program is compiled for, by name; None: it is compiled for none."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape if mesh.axis_names == AXES else None


def batch_parts() -> int:
    """Parts that the arrays of a batch have along their first axis: 1 without a mesh."""
    sizes = mesh_sizes()
    return 1 if sizes is None else math.prod(sizes[name] for name in BATCH)


def spread(tree: Any, *axes: Axes) -> Any:
    """Arrays cut by their leading dimensions, the same for all.

    Args:
      tree: of arrays.
      axes: of each dimension from the first on; further ones are whole, and so is what the mesh does not divide.
    """
    sizes = mesh_sizes()
    if sizes is None:
        return tree

    def constrained(x: jax.Array) -> jax.Array:
        full = (*axes, *[None] * (x.ndim - len(axes)))[: x.ndim]
        return jax.lax.with_sharding_constraint(x, _spec(x.shape, sizes, full))

    return jax.tree.map(constrained, tree)


def laid_out(params: Any, layout: Layout = stored) -> Any:
    """Parameters, or what has their shapes, cut as they are needed."""
    sizes = mesh_sizes()
    return params if sizes is None else jax.lax.with_sharding_constraint(params, specs(params, sizes, layout))


def put_together(module: str, leaf: str, x: Any) -> Any:
    """A parameter of a layer as its projection needs it. Its gradient is cut again as it is stored."""
    if mesh_sizes() is None:
        return x
    named = laid_out({module: {leaf: x}})
    return laid_out(named, gathered)[module][leaf]


def unembedding_axes(vocab_size: int) -> tuple[Axes, Axes]:
    """Returns the axes of an unembedding `[V, D]` in decoding: of tokens if the mesh divides them, else of features."""
    sizes, cut = mesh_sizes(), (TENSOR, FSDP)
    divides = sizes is not None and fitting(vocab_size, sizes, cut) == cut
    return (cut, None) if divides else (None, MODEL)


def decoding_axes(module: str) -> tuple[Axes, Axes]:
    """Returns the axes of a projection's rows in decoding: of its inputs, and of its outputs."""
    inputs, outputs = _PROJECTIONS[module]
    return decoding(inputs[0]), decoding(outputs[0])
