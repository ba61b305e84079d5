"""Exchanges of the devices of a mesh in an iteration, by formula.

Written down from what `models.params.sharding` says of each array, and held against the collectives of compiled
programs (tests/experiments/test_traffic.py). Letters as in `models.decoder.transformer`; a are the tokens of a piece on
one device, D their features, B bytes of an activation.
"""

from typing import Literal, NamedTuple

import jax

from grpo_jax.models.config import ModelConfig
from grpo_jax.models.decoder.transformer import param_shapes
from grpo_jax.models.params import sharding
from grpo_jax.models.params.tree import is_quantised
from grpo_jax.planning.memory import (
    BYTES,
    FLOAT32,
    Shape,
    frozen_shapes,
    size_on_device,
    tokens_of_piece,
    trained_shapes,
)

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]


class Exchange(NamedTuple):
    """One sort of exchange in a program."""

    what: str
    kind: Kind
    size: int  # bytes of the arrays on one device, before they are cut or after they are put together
    devices: int  # that take part in it together

    @property
    def moved(self) -> float:
        """Bytes that a device sends, in a ring."""
        return moved(self.kind, self.size, self.devices)


def moved(kind: str, size: float, devices: int) -> float:
    """Bytes that each of some devices sends in a collective, in a ring.

    Args:
      kind: of the collective; an all-reduce is a reduce-scatter and an all-gather.
      size: bytes of the array before it is cut or after it is put together.
      devices: that take part.
    """
    return (2 if kind == "all-reduce" else 1) * size * (devices - 1) / devices


def learn_traffic(model: ModelConfig, shape: Shape, *, data: int = 1) -> list[Exchange]:
    """The exchanges of an update, one epoch.

    A layer is gathered for the forward pass, and once more for the backward pass; of its gradient each device gets its
    own part. Without fsdp and tensor all devices have all parameters, and add up one gradient a minibatch.

    Args:
      model: the decoder.
      shape: of the run, on one device.
      data: devices of the mesh's axis "data", which have the same parameters.
    """
    trained = trained_shapes(model, shape)
    if shape.fsdp * shape.tensor == 1:
        whole = FLOAT32 * size_on_device(trained, shape.mesh) * shape.minibatches
        return _used([Exchange("gradients", "all-reduce", whole, data)])
    pieces, size, a = shape.num_pieces * shape.minibatches, BYTES[model.dtype], _activation(model, shape)
    decoders, matrix = 2 if shape.critic == "own" else 1, model.vocab_size * model.hidden_size
    gradient = pieces * size * _in_layers(trained, shape)
    # Heads and features: two sums forward, five backward (of queries, keys, values, gate and up), one computed again.
    sums = (7 if model.remat == "none" else 8) * model.num_hidden_layers
    exchanges = _of_pass(model, shape, decoders * pieces, layers=2)
    exchanges += [
        Exchange("gradients of layers", "reduce-scatter", gradient, shape.fsdp),
        Exchange("gradients of layers", "all-reduce", gradient // shape.fsdp, data),
        Exchange("the unembedding", "all-gather", 3 * pieces * size * matrix, shape.fsdp * shape.tensor),
        Exchange("heads and features", "all-reduce", decoders * pieces * sums * a, shape.tensor),
        Exchange("embedded tokens", "all-to-all", 2 * decoders * pieces * a, shape.fsdp),
        Exchange("embedded tokens", "all-gather", 2 * decoders * pieces * a, shape.tensor),
    ]
    if not shape.lora_rank:
        of_matrix = pieces * size * matrix
        exchanges.append(Exchange("its gradient", "reduce-scatter", of_matrix, shape.fsdp * shape.tensor))
        exchanges.append(Exchange("its gradient", "all-reduce", of_matrix // (shape.fsdp * shape.tensor), data))
    return _used(exchanges)


def score_traffic(model: ModelConfig, shape: Shape) -> list[Exchange]:
    """The exchanges of a forward pass over a rollout: of the reference.

    Args:
      model: the decoder.
      shape: of the run, on one device.
    """
    if shape.fsdp * shape.tensor == 1:
        return []
    pieces, size, a = shape.num_pieces * shape.minibatches, BYTES[model.dtype], _activation(model, shape)
    matrix = model.vocab_size * model.hidden_size
    return _used(
        [
            *_of_pass(model, shape, pieces, layers=1),
            Exchange("the unembedding", "all-gather", pieces * size * matrix, shape.fsdp * shape.tensor),
            Exchange("heads and features", "all-reduce", 2 * pieces * model.num_hidden_layers * a, shape.tensor),
            Exchange("embedded tokens", "all-to-all", pieces * a, shape.fsdp),
            Exchange("embedded tokens", "all-gather", pieces * a, shape.tensor),
        ]
    )


def sample_traffic(model: ModelConfig, shape: Shape) -> list[Exchange]:
    """The exchanges of sampling: one pass over the prompts, and for each token the activations of its rows.

    A layer sums twice a token over all devices that have a part of it, and puts its rows together once. What XLA does
    between differs with the shape: of this program the formula is no more than the size.

    Args:
      model: the decoder.
      shape: of the run, on one device.
    """
    cut = shape.fsdp * shape.tensor
    if cut == 1:
        return []
    layers, size = model.num_hidden_layers, BYTES[model.dtype]
    rows = shape.num_prompts * shape.fsdp * shape.group_size * model.hidden_size * size
    return _used(
        [
            *_of_pass(model, shape, 1, layers=1),
            Exchange("decoded tokens", "all-reduce", 2 * layers * rows * (shape.max_tokens - 1), cut),
            Exchange("decoded tokens", "all-gather", (layers + 1) * rows * (shape.max_tokens - 1), cut),
        ]
    )


def _of_pass(model: ModelConfig, shape: Shape, passes: int, *, layers: int) -> list[Exchange]:
    """Layers that are put together, so many times a pass."""
    whole = BYTES[model.dtype] * _in_layers(param_shapes(model), shape)
    if shape.quantize != "none":  # codes travel
        frozen = jax.tree.leaves(frozen_shapes(model, shape)["layers"], is_leaf=is_quantised)
        kernels = [x for x in frozen if is_quantised(x)]
        whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kernels)) // shape.tensor
    return [Exchange("layers", "all-gather", layers * passes * whole, shape.fsdp)]


def _in_layers(tree: object, shape: Shape) -> int:
    """Numbers in the projections of all layers, after fsdp has put them together."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    cut = {**shape.mesh, sharding.FSDP: 1}
    # Norms and routers are whole on every device.
    whole = {"scale", "offset", "router"}
    in_layers = [(path, x) for path, x in leaves if "layers" in str(path)]
    inside = [(path, x) for path, x in in_layers if not whole & {getattr(key, "key", None) for key in path[-2:]}]
    return sum(size_on_device({path[-2].key: {path[-1].key: x}}, cut) for path, x in inside)


def _activation(model: ModelConfig, shape: Shape) -> int:
    """a D B."""
    return tokens_of_piece(shape) * model.hidden_size * BYTES[model.dtype]


def _used(exchanges: list[Exchange]) -> list[Exchange]:
    return [one for one in exchanges if one.devices > 1 and one.size]
