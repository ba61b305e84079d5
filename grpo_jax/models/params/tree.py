"""Trees of parameters: their projections and special nodes, and the split into trained and frozen parameters.

Parameters belong to one model, or are a dict of models by role: "policy", optionally "critic", and frozen models. The
kernel of a projection is `[*in, *out]`, in a mixture `[X, *in, *out]`, with an axis L of layers before it.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax

from grpo_jax.errors import UsageError

Params = Any  # the parameters of a network, as nested dicts of arrays
Format = Literal["int8", "nf4"]
Quantize = Literal["none", "int8", "nf4"]

# ---- projections, the linear maps inside a block. Sharding, adapters, quantisation and decoding read their table

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"  # the axes of a mesh: see `sharding`
Axes = str | tuple[str, ...] | None  # the mesh axes along which one dimension of an array is sharded


class Projection(NamedTuple):
    """The axes of a kernel, and the uses of the projection."""

    inputs: tuple[Axes, ...]  # the mesh axes of each axis of an input. Heads are never split into features
    outputs: tuple[Axes, ...]  # the mesh axes of each axis of an output
    is_joined: bool = False  # its input is that of the others with this flag in a block: decoding joins their kernels
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


# ---- special nodes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantised:
    """A kernel `[L, *in, *out]`, or that of one layer, in few bits. It replaces the array in the tree of parameters."""

    codes: Any  # int8 [L, I, O]; in nf4 uint8 [L, ⌈I/2⌉, O], with even inputs in the high half and odd ones in the low
    scales: Any  # float32 [L, 1, O], M / 127; in nf4 bfloat16 [L, ⌈I/64⌉, O], M
    in_shape: tuple[int, ...] = field(metadata={"static": True})
    out_shape: tuple[int, ...] = field(metadata={"static": True})
    format: Format = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel."""
        return (*self.codes.shape[:-2], *self.in_shape, *self.out_shape)


class Headed(NamedTuple):
    """The parameters of a decoder with a scalar head: see `heads`."""

    decoder: Params  # without an unembedding; may be `Adapted`
    head: jax.Array  # float32 [D], w


class Adapted(NamedTuple):
    """The parameters of a policy with adapters (`models.params.lora`)."""

    base: Params  # frozen, the parameters without adapters
    adapters: Params  # trained
    scale: jax.Array  # float32 scalar, α/r


def variables(params: Params) -> dict[str, Any]:
    """Returns the collections for `Transformer.apply`. The B of adapters is multiplied by the scale."""
    if not isinstance(params, Adapted):
        return {"params": params}
    scaled = jax.tree_util.tree_map_with_path(
        lambda path, x: x * params.scale if path[-1].key == "b" else x, params.adapters
    )
    return {"params": params.base, "lora": scaled}


def is_quantised(x: Any) -> bool:
    """Returns whether a leaf of a tree of parameters is a quantised kernel."""
    return isinstance(x, Quantised)


def format_of(params: Any) -> Quantize:
    """Returns the format of the quantised kernels in a tree of parameters, or "none"."""
    leaves = jax.tree.leaves(params, is_leaf=is_quantised)
    return next((x.format for x in leaves if is_quantised(x)), "none")


def count_used(tree: Any, expert_share: float = 1.0) -> float:
    """Counts the parameters that a token is multiplied by. Embeddings of layers are only looked up.

    Args:
      tree: A tree of parameters. Its leaves only need shapes.
      expert_share: The share of a mixture's experts that compute a token.
    """

    def count(path: Any, x: Any) -> float:
        names = {getattr(entry, "key", None) for entry in path}
        if names >= {"per_layer", "embedding"}:
            return 0
        return math.prod(x.shape) * (expert_share if "experts" in names and "router" not in names else 1)

    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_quantised)
    return sum(count(path, x) for path, x in leaves)


def check_full_precision(params: Any, remedy: str) -> None:
    """Checks that no kernel is quantised.

    Raises:
      UsageError: A kernel is quantised. The message ends with the remedy.
    """
    if format_of(params) != "none":
        raise UsageError(f"these parameters are quantised: {remedy}")


def check_decoder(params: Any) -> None:
    """Checks that parameters are those of `transformer`, by the names of their parts.

    Raises:
      UsageError: They are those of another model.
    """
    if not (isinstance(params, dict) and {"embedding", "final_norm", "layers"} <= params.keys()):
        raise UsageError(
            "these are not the parameters of a decoder of this package, and only those can be adapted, quantised and "
            "saved for transformers: train all parameters of your model, and save them with its own package"
        )


TRAINED_ROLES = ("policy", "critic")


def split(params: Any) -> tuple[Any, Any]:
    """Splits parameters into trained and frozen parameters.

    Adapters are trained and their base is frozen. A head is always trained. In a dict by role, models outside
    `TRAINED_ROLES` are frozen. All other parameters are trained.

    Args:
      params: The parameters of one model, plain, `lora.Adapted` or `heads.Headed`; or a dict of models by role.

    Returns:
      The trained tree and the frozen tree, which is None if everything is trained. `join` inverts this.
    """
    if isinstance(params, Adapted):
        return params.adapters, (params.base, params.scale)
    if isinstance(params, Headed):
        trained, frozen = split(params.decoder)
        return params._replace(decoder=trained), frozen
    if not has_roles(params):
        return params, None
    parts = {role: split(model) if role in TRAINED_ROLES else (None, model) for role, model in params.items()}
    trained = {role: part for role, (part, _) in parts.items() if role in TRAINED_ROLES}
    return trained, {role: part for role, (_, part) in parts.items()}


def join(trained: Any, frozen: Any) -> Any:
    """Joins the trees that `split` returned into parameters."""
    if isinstance(trained, Headed):
        return trained._replace(decoder=join(trained.decoder, frozen))
    if has_roles(frozen):
        return {role: join(trained[role], part) if role in TRAINED_ROLES else part for role, part in frozen.items()}
    return trained if frozen is None else Adapted(frozen[0], trained, frozen[1])


def has_roles(params: Params | Any) -> bool:
    """Returns whether parameters are a dict of models by role."""
    return isinstance(params, dict) and "policy" in params
