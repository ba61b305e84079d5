"""Reading and writing the weights of Hugging Face folders, from one table of names and shapes. No torch, no pickle.

Tensors are read and written one at a time, so that memory holds the parameters and one more leaf.
"""

import itertools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401, teaches NumPy bfloat16
import numpy as np

from grpo_jax.errors import UsageError, missing
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.decoder.heads import Headed, add_head
from grpo_jax.models.decoder.transformer import layers_with, param_shapes
from grpo_jax.models.files.families import Names, Stored, names_of
from grpo_jax.models.params.quantised import quantise, quantise_params
from grpo_jax.models.params.rounding import round_leaf
from grpo_jax.models.params.tree import PROJECTIONS, Params, Quantised, Quantize, is_quantised, split_shape
from grpo_jax.models.policy import decoder_policy

try:
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import save_file
except ModuleNotFoundError as error:
    raise missing(error.name) from None

# Dtypes by their names in safetensors.
FLOAT_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Tensors that stay in float32 in a folder or a model of bfloat16, as in the folders of Qwen3.5
_FLOAT32 = (".linear_attn.A_log", ".linear_attn.norm.weight")
_LARGEST = 1e6  # the largest plausible weight: models have weights below a thousand, and float16 ends at 65504


# ---- names and shapes


@dataclass(frozen=True)
class Tensor:
    """A tensor of a folder, and its layout there."""

    name: str  # the first "{}" stands for the layer, the second for the expert
    shape: tuple[int, ...]  # in the folder; a linear layer's is [out, in]
    linear: bool  # true for linear layers, whose leaves are transposed and may have axes for heads, [*in, *out]
    layers: tuple[int, ...] = ()  # the layers that have the tensor
    selection: Any = ...  # an index: where the tensor has the leaf, which may hold several leaves

    @property
    def stacked(self) -> int:
        """The number of leading axes of the leaf, layers and then experts, that are separate tensors in the folder."""
        return self.name.count("{}")

    def name_at(self, place: Sequence[int]) -> str:
        """Returns the name of the tensor at this place of the leaf's stacked axes."""
        return self.name.format(self.layers[place[0]], *place[1:]) if place else self.name

    def choose_dtype(self, dtype: Any) -> np.dtype:
        """Returns the dtype of the tensor, and of its leaf, in a folder or a model of this dtype."""
        return np.dtype(np.float32 if self.name.endswith(_FLOAT32) else dtype)

    def to_leaf(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Converts a tensor of the folder to a part of its leaf, in the given shape."""
        tensor = tensor[self.selection]
        return (tensor.swapaxes(-1, -2) if self.linear else tensor).reshape(shape)

    def put_leaf(self, tensor: np.ndarray, leaf: np.ndarray) -> None:
        """Inverts `to_leaf`: writes a part of the leaf to a tensor of the folder."""
        shape = tensor[self.selection].shape
        if self.linear:
            leaf = leaf.reshape(*shape[:-2], shape[-1], shape[-2]).swapaxes(-1, -2)
        tensor[self.selection] = leaf.reshape(shape)


# Names of leaves outside layers
_OUTSIDE: Names = {
    "embedding": _EMBEDDING,
    "final_norm": "model.norm",
    "unembedding": _HEAD,
    "per_layer.embedding": "model.embed_tokens_per_layer.weight",
    "per_layer.projection": "model.per_layer_model_projection",
    "per_layer.norm": "model.per_layer_projection_norm",
}
# Kinds of blocks whose tensors have the names of another kind
_NAMED_AS = dict.fromkeys(("global_attention", "reader", "global_reader"), "attention") | {"wide_mlp": "mlp"}


def tensor_layout(config: ModelConfig, *, head: bool = False) -> Any:
    """Returns a `Tensor` for every leaf of the scanned decoder's parameters, in the same tree.

    Shapes follow from the parameters, and names from the family. With a head, the parameters are `Headed`, and the
    files those of a classifier with one label, …ForSequenceClassification in transformers.

    Raises:
      UsageError: No supported family has this configuration.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(param_shapes(config))
    names, tensors = names_of(config), {}
    in_one_tensor: dict[tuple[str, tuple[int, ...]], list[tuple[str, ...]]] = {}
    for path, leaf in leaves:
        place = tuple(entry.key for entry in path)
        tensor = tensors[place] = _tensor(config, names, place, leaf.shape)
        in_one_tensor.setdefault((tensor.name, tensor.layers), []).append(place)
    for places in in_one_tensor.values():
        if len(places) > 1:
            places.sort(key=lambda place: list(PROJECTIONS).index(place[-2]))
            tensors |= zip(places, _joined([tensors[place] for place in places]), strict=True)
    layout = jax.tree.unflatten(tree, tensors.values())
    score: Any = Tensor("score.weight", (1, config.hidden_size), False)
    return Headed(layout, score) if head else layout


def _tensor(config: ModelConfig, names: Names, place: tuple[str, ...], shape: tuple[int, ...]) -> Tensor:
    """Returns the tensor of a leaf, which may be only a part of the tensor: see `_joined`.

    Args:
      config: The configuration of the decoder.
      names: The names of the family.
      place: The keys of the leaf in the tree.
      shape: The shape of the leaf.
    """
    module, leaf, layers = place[-2:][0], place[-1], tuple[int, ...]()
    if place[0] != "layers":
        stored = _stored(_OUTSIDE, place)
    else:
        block, *rest = place[1:]
        stored, layers = _stored(names, (_NAMED_AS.get(block, block), *rest)), tuple(layers_with(config, block))
        shape = shape[1 + stored.name.count("{}") :]
        stored = stored._replace(name=f"model.layers.{{}}.{stored.name}")
    linear = leaf == "kernel" and stored.is_transposed
    if leaf == "kernel":
        is_projection = module in PROJECTIONS
        stacked, *sides = split_shape(module, shape) if is_projection else (shape[:-2], shape[-2:-1], shape[-1:])
        shape = (*stacked, *map(math.prod, reversed(sides) if linear else sides))
    elif leaf == "bias" and module in PROJECTIONS:
        count = len(PROJECTIONS[module].outputs)
        shape = (*shape[:-count], math.prod(shape[-count:]))
    elif leaf == "taps":  # a convolution of each feature by itself has one input
        shape = (shape[0], 1, shape[1])
    return Tensor(stored.name, shape, linear, layers, stored.selection(config, shape[-2 if linear else -1]))


def _stored(names: Names, place: tuple[str, ...]) -> Stored:
    """Returns the name of a leaf, from that of the leaf itself or of the innermost module that has a name."""
    for end in range(len(place), 0, -1):
        if name := names.get(".".join(place[:end])):
            stored = name if isinstance(name, Stored) else Stored(name)
            suffix = [*place[end:-1], "bias" if place[-1] == "bias" else "weight"] if end < len(place) else []
            return stored._replace(name=".".join([stored.name, *suffix]))
    raise KeyError(place)


def _joined(tensors: list[Tensor]) -> list[Tensor]:
    """Returns leaves that are in one tensor: parts of their own, or one behind the other."""
    axis, after = (-2, (slice(None),)) if tensors[0].linear else (-1, ())
    sizes = [tensor.shape[axis] for tensor in tensors]
    shape = list(tensors[0].shape)
    shape[axis] = sum(sizes)
    return [
        replace(
            x,
            shape=tuple(shape),
            selection=(..., slice(end - size, end), *after) if x.selection is ... else x.selection,
        )
        for x, size, end in zip(tensors, sizes, itertools.accumulate(sizes), strict=True)
    ]


# ---- in


def load_params(
    folder: Path,
    config: ModelConfig,
    *,
    head: bool = False,
    dtype: Any = jnp.float32,
    quantize: Quantize = "none",
    sharding: Any = None,
    weights: bool = True,
) -> Params:
    """Loads the parameters from a folder's safetensors files, leaf by leaf, with the requested dtype and sharding.

    Args:
      folder: The folder with model.safetensors, or with several files and their index.
      config: The configuration of the decoder.
      head, dtype, quantize, sharding: See `load_pretrained`; dtype is its `param_dtype`. Weights are rounded to the
        dtype before they are quantised.
      weights: False to check only the names and shapes of the tensors.

    Returns:
      The parameters, with layers stacked; without weights their shapes.

    Raises:
      UsageError: A tensor or file is missing, unknown or damaged, a shape or dtype is wrong, or the device has too
        little memory.
    """
    decoder_policy(config)  # refuses a kind of attention that this machine lacks, before weights are read
    shapes, layout = param_shapes(config), tensor_layout(config, head=head)
    tensors = find_tensors(folder)
    if _stored(names_of(config), ("experts", "gate_proj", "kernel")).name == "mlp.experts.{}.gate_proj.weight":
        tensors = _split_experts(tensors, config.experts.num_experts if config.experts else 0)
    if config.tie_word_embeddings and not head and _HEAD in tensors:
        tensors.setdefault(_EMBEDDING, tensors[_HEAD])  # files may hold a shared matrix under either name
    if head:
        shapes = jax.eval_shape(lambda decoder: add_head(config, decoder)[1], shapes)
    _check_tensors(tensors, layout, config)
    structure = jax.tree.structure(shapes)
    if quantize != "none":
        shapes = jax.eval_shape(partial(quantise_params, format=quantize), shapes)
    if not weights:
        return shapes
    if sharding is None:
        _check_memory(folder, shapes, dtype)
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    sharding = sharding(shapes) if callable(sharding) else sharding
    shardings = jax.tree.broadcast(default if sharding is None else sharding, shapes)

    @lru_cache(maxsize=1)  # a tensor may hold the kernels of all experts, which are quantised one by one
    def read(name: str) -> np.ndarray:
        return read_tensor(tensors, name)

    def load(tensor: Tensor, leaf: Any, target: Any) -> Any:
        stacked = tensor.stacked

        def read_part(place: Sequence[int], index: Any) -> np.ndarray:
            """Reads a part of the leaf at a place of its stacked axes, by an index of its other axes."""
            return tensor.to_leaf(read(tensor.name_at(place)), leaf.shape[stacked:])[index]

        if is_quantised(leaf):

            def kernel(place: tuple[int, ...]) -> np.ndarray:
                x = read_part(place[:stacked], place[stacked:])
                return x if jnp.promote_types(x.dtype, dtype) == dtype else x.astype(dtype)

            return _quantised(kernel, leaf, target)

        def part(index: Any) -> np.ndarray:
            """Reads the part of one device: a slice for each axis of the leaf."""
            numbers = [range(size)[part] for size, part in zip(leaf.shape, index, strict=True)]
            piece = np.empty([len(indices) for indices in numbers], tensor.choose_dtype(dtype))
            places = itertools.product(*numbers[:stacked])
            for number, place in zip(np.ndindex(piece.shape[:stacked]), places, strict=True):
                piece[number] = read_part(place, index[stacked:])
            return piece

        return jax.block_until_ready(jax.make_array_from_callback(leaf.shape, target, part))

    columns = jax.tree.leaves(layout), *(jax.tree.leaves(tree, is_leaf=is_quantised) for tree in (shapes, shardings))
    leaves = list(zip(*columns, strict=True))
    # The largest leaf is loaded first: each leaf exists twice while it is made, and then few other leaves exist.
    order = sorted(range(len(leaves)), key=lambda i: -_num_bytes(leaves[i][1], dtype))
    loaded = {i: load(*leaves[i]) for i in order}
    return jax.tree.unflatten(structure, [loaded[i] for i in range(len(leaves))])


def _quantised(kernel: Callable[[tuple[int, ...]], np.ndarray], leaf: Quantised, target: Any) -> Quantised:
    """Quantises the kernels of all layers one by one on the host, and puts the result on devices.

    Args:
      kernel: A function that reads a kernel: (layer,) or (layer, expert) -> `[*in, *out]`.
      leaf: The shapes of the result.
      target: The shardings of the result.
    """
    whole = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), leaf)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        for place in np.ndindex(whole.codes.shape[:-2]):
            one = quantise(kernel(place), leaf.in_shape, leaf.out_shape, leaf.format)
            whole.codes[place], whole.scales[place] = one.codes, one.scales
            del one  # frees its memory before the next kernel is read

    def put(x: np.ndarray, target: jax.sharding.Sharding) -> jax.Array:
        return jax.block_until_ready(jax.make_array_from_callback(x.shape, target, lambda index: x[index]))

    return jax.tree.map(put, whole, target)


def _num_bytes(tree: Any, dtype: Any) -> int:
    """Returns the bytes of parameters, from their shapes. Parameters that are not quantised count in the dtype."""
    leaves = jax.tree.leaves(tree, is_leaf=is_quantised)
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(list(filter(is_quantised, leaves))))
    return held + jnp.dtype(dtype).itemsize * sum(x.size for x in leaves if not is_quantised(x))


class Found(NamedTuple):
    """The place of a tensor, with the shape and dtype in its file."""

    file: Path
    name: str  # in the file
    shape: tuple[int, ...]
    dtype: str  # its name in safetensors
    selection: tuple[slice, ...] = ()  # where the file's tensor has it; (): all of it


def find_tensors(folder: Path, names: Sequence[str] | None = None) -> dict[str, Found]:
    """Finds all tensors of a folder, by name. Only the headers of files are read.

    If several files hold a tensor, the index decides. If the model has a tower for images, the result has only the
    tensors of its text model, by their names in a folder that holds nothing else.

    Raises:
      UsageError: A file is missing or damaged, or a tensor occurs twice and no index decides.
    """
    weight_map: Any = {}
    if names is None:
        if (folder / _SINGLE).exists():  # transformers too ignores an index beside it
            names = [_SINGLE]
        elif (folder / _INDEX).exists():
            weight_map = read_json(folder / _INDEX).get("weight_map")
            if not isinstance(weight_map, dict) or not all(map(_is_weights_file, weight_map.values())):
                raise UsageError(f"{folder / _INDEX} has no weight_map of names of files: download it again")
            names = sorted(set(weight_map.values()))
        else:
            names = sorted(file.name for file in folder.glob("*.safetensors"))
    if not names:
        raise UsageError(f"{folder} holds no .safetensors file: convert the model to safetensors first")
    tensors = dict[str, Found]()
    for file in (folder / name for name in names):
        if not file.exists():
            raise UsageError(f"{folder} lacks {file.name}: download it again")
        with _opened(file) as opened:
            for name in opened.keys():  # noqa: SIM118, it is no dictionary
                if _BESIDE_TEXT.match(name) or weight_map.get(name, file.name) != file.name:
                    continue
                header = opened.get_slice(name)
                _add(tensors, text_name(name), Found(file, name, tuple(header.get_shape()), header.get_dtype()))
    return tensors


def _add(tensors: dict[str, Found], name: str, place: Found) -> None:
    """Adds a tensor under this name.

    Raises:
      UsageError: There is one already.
    """
    if other := tensors.get(name):
        raise UsageError(
            f"{name} is in {place.file} as {place.name!r} and in {other.file} as {other.name!r}: remove one of them"
        )
    tensors[name] = place


# The names of a text model that has a tower for images, and of what lies beside it, such as heads for several tokens.
_TEXT_NAME = re.compile(r"(?:model\.)?language_model\.(?:model\.)?(.*)")
_BESIDE_TEXT = re.compile(r"(model\.)?(visual|(vision|audio)_tower|embed_(vision|audio)|multi_modal_projector)\.|mtp\.")


def text_name(name: str) -> str:
    """Returns the name of a tensor in a folder that holds only the text model."""
    match = _TEXT_NAME.fullmatch(name)
    return name if match is None else match[1] if match[1].startswith("lm_head.") else f"model.{match[1]}"


# Tensors of all experts of a layer: `[X, 2F, D]` and `[X, D, F]`
_ALL_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj")


def _split_experts(tensors: dict[str, Found], num_experts: int) -> dict[str, Found]:
    """Replaces tensors that hold all experts of a layer, as those of Qwen3.5 on the hub, by those of single experts."""
    single = dict[str, Found]()
    for name, tensor in tensors.items():
        match = _ALL_EXPERTS.fullmatch(name)
        if not match or len(tensor.shape) != 3 or tensor.shape[0] != num_experts:
            _add(single, name, tensor)
            continue
        projections = match[2].split("_")
        rows, inputs = tensor.shape[1] // len(projections), tensor.shape[2]
        for number, expert in itertools.product(range(len(projections)), range(num_experts)):
            selection = slice(expert, expert + 1), slice(number * rows, (number + 1) * rows)
            whole = f"{match[1]}.{expert}.{projections[number]}_proj.weight"
            _add(single, whole, tensor._replace(shape=(rows, inputs), selection=selection))
    return single


def untie_if_different(folder: Path, config: ModelConfig) -> tuple[ModelConfig, tuple[str, ...]]:
    """Unties the output matrix from the embedding if the files hold a different one, as transformers does.

    Args:
      folder: The folder of the model.
      config: The configuration according to config.json.

    Returns:
      The configuration of the weights, and a note for the user if it differs.
    """
    tensors = find_tensors(folder)
    if not config.tie_word_embeddings or not {_EMBEDDING, _HEAD} <= tensors.keys() or _are_equal(tensors):
        return config, ()
    note = f"config.json ties the output matrix to the embedding, but the files hold a different {_HEAD}, which is used"
    return replace(config, tie_word_embeddings=False), (note,)


def ignored_index(folder: Path) -> tuple[str, ...]:
    """Returns a note for the user if the folder holds a single file of weights and the index of others."""
    if not (folder / _SINGLE).exists() or not (folder / _INDEX).exists():
        return ()
    return (f"weights are read from {_SINGLE}, as transformers does, and not from the files in {_INDEX}",)


def _are_equal(tensors: dict[str, Found]) -> bool:
    """Returns whether the output matrix equals the embedding, of which only a part is in memory at a time.

    It does not equal one that cannot be read, which `load_params` then refuses.
    """
    places = tensors[_EMBEDDING], tensors[_HEAD]
    if places[0].shape != places[1].shape or not all(x.shape and x.dtype in FLOAT_DTYPES for x in places):
        return False
    rows = places[0].shape[0]
    with _opened(places[0].file) as first, _opened(places[1].file) as second:
        embedding, head = first.get_slice(places[0].name), second.get_slice(places[1].name)
        parts = (slice(start, min(start + 4096, rows)) for start in range(0, rows, 4096))
        return all(np.array_equal(embedding[part], head[part]) for part in parts)


def _is_weights_file(name: Any) -> bool:
    """Returns whether this is the name of a file of weights in the folder itself."""
    return isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name


def _check_tensors(tensors: dict[str, Found], layout: Any, config: ModelConfig) -> None:
    """Checks that every needed tensor exists, with the right shape and a supported dtype, and that no other does."""
    num_experts = config.experts.num_experts if config.experts else 0
    needed = {
        tensor.name_at(place): tensor.shape
        for tensor in jax.tree.leaves(layout)
        for place in np.ndindex((len(tensor.layers), num_experts)[: tensor.stacked])
    }
    # Some files repeat the tied matrix.
    ignored = {_HEAD} if config.tie_word_embeddings else set()
    for name, shape in needed.items():
        packed = {f"{name}_blocks", f"{name}_scales"}
        if name not in tensors and packed <= tensors.keys():
            _check_mxfp4(tensors, name, shape)
            ignored |= packed
            continue
        if name not in tensors:
            raise UsageError(f"the model's safetensors files hold no tensor {name!r}")
        if tensors[name].shape != shape:
            raise UsageError(f"tensor {name!r} has shape {tensors[name].shape}, but config.json asks for {shape}")
        if tensors[name].dtype not in FLOAT_DTYPES:
            raise UsageError(
                f"tensor {name!r} is of dtype {tensors[name].dtype}, but only {', '.join(FLOAT_DTYPES)} can be read: "
                "convert the model first"
            )
    # Files of Gemma 4 also hold keys and values for layers that read those of another layer.
    readers = [layer for layer, source in enumerate(config.sources) if source != layer]
    unused = ("k_proj", "v_proj", "k_norm", "v_norm")
    ignored |= {f"model.layers.{layer}.self_attn.{name}.weight" for layer in readers for name in unused}
    # Older files have rotary frequencies, which follow from the configuration.
    unknown = {name for name in tensors.keys() - needed.keys() - ignored if not name.endswith("rotary_emb.inv_freq")}
    if unknown:
        raise UsageError(
            f"the model's safetensors files hold tensors that this decoder does not know: {sorted(unknown)[:5]}"
        )


def _check_mxfp4(tensors: dict[str, Found], name: str, shape: tuple[int, ...]) -> None:
    """Checks the two tensors that hold a kernel in MXFP4: see `unpack_mxfp4`."""
    experts, inputs, outputs = shape
    blocks = experts, outputs, inputs // 32
    for part, needed in (("blocks", (*blocks, 16)), ("scales", blocks)):
        packed = tensors[f"{name}_{part}"]
        if (packed.shape, packed.dtype) != (needed, "U8") or inputs % 32:
            raise UsageError(
                f"tensor {packed.name!r} has shape {packed.shape} and dtype {packed.dtype}, but config.json asks for "
                f"{needed} and U8, 32 inputs a block"
            )


def _check_memory(folder: Path, shapes: Any, dtype: Any) -> None:
    """Refuses parameters that are larger than the memory of a device, before loading any."""
    device = jax.local_devices()[0]
    there = (device.memory_stats() or {}).get("bytes_limit")
    if there is None and device.platform == "cpu" and hasattr(os, "sysconf"):
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = _num_bytes(shapes, dtype)
    if there and needed > there:
        raise UsageError(
            f"the parameters in {folder} take {needed / 2**30:.1f} GiB in {jnp.dtype(dtype).name}, and a device has "
            f"{there / 2**30:.1f} GiB: take a smaller model, param_dtype bfloat16, quantize, or a larger device"
        )


def read_tensor(tensors: dict[str, Found], name: str) -> np.ndarray:
    """Reads a tensor.

    Raises:
      UsageError: The file is damaged: a value is not finite, or larger than the weights of any model.
    """
    if name not in tensors:
        place = tensors[f"{name}_blocks"]
        tensor = unpack_mxfp4(*(read_tensor(tensors, f"{name}_{part}") for part in ("blocks", "scales")))
    else:
        place = tensors[name]
        # The file is opened for each tensor because everything read from an open file counts as memory in use.
        with _opened(place.file) as opened:
            tensor = (
                opened.get_slice(place.name)[place.selection][0] if place.selection else opened.get_tensor(place.name)
            )
    if not (largest := _largest(tensor)) <= _LARGEST:
        raise UsageError(
            f"tensor {place.name!r} in {place.file} holds {largest:.3g}, which no model has: it is damaged, or its "
            "training diverged"
        )
    return tensor


def _largest(tensor: np.ndarray) -> float:
    """Returns the largest magnitude, or NaN if a value is NaN.

    Without their sign bits, floats have the order of their bits as integers, in which NaN comes last. NumPy compares
    integers 20 times as fast as bfloat16.
    """
    if tensor.dtype.kind in "biu":
        return float(tensor.max(initial=0))
    bits = tensor.reshape(-1).view(f"u{tensor.dtype.itemsize}")
    pieces = np.array_split(bits, -(-bits.size // 2**22) or 1)  # so that only a small copy is in memory
    magnitudes = [(piece & (np.iinfo(bits.dtype).max >> 1)).max(initial=0) for piece in pieces]
    return float(np.array(max(magnitudes), bits.dtype).view(tensor.dtype))


_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def unpack_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Converts weights of gpt-oss in MXFP4: 32 numbers of 4 bits share an exponent (2310.10537).

    Args:
      blocks: Two numbers a byte, the first in the low half, uint8 `[X, out, in/32, 16]`.
      scales: The exponents plus 127, uint8 `[X, out, in/32]`.

    Returns:
      The kernels `[X, in, out]` in bfloat16, which represents them exactly. A scale of 255 makes them NaN or infinite.
    """
    numbers = np.stack([_FP4[blocks & 15], _FP4[blocks >> 4]], axis=-1).reshape(*scales.shape, 32)
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = numbers * np.ldexp(np.float32(1), scales.astype(np.int32)[..., None] - 127)
    return numbers.reshape(*scales.shape[:2], -1).swapaxes(1, 2).astype(jnp.bfloat16)


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="np")
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{file} is no complete safetensors file ({error}): download it again") from error


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object from a file.

    Raises:
      UsageError: The file is missing or holds no JSON object.
    """
    if not file.is_file():
        raise UsageError(f"{file.parent} holds no {file.name}: name a folder of a Hugging Face model")
    try:
        contents = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not valid JSON ({error}): download it again") from error
    if not isinstance(contents, dict):
        raise UsageError(f"{file} holds no JSON object: download it again")
    return contents


def write_model_json(file: Path, value: dict[str, Any]) -> None:
    """Writes JSON with the indentation of transformers."""
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


# ---- out


def save_params(folder: Path, params: Params, config: ModelConfig, *, dtype: np.dtype, max_shard_bytes: int) -> None:
    """Writes parameters as model.safetensors, or as several files and their index.

    Args:
      folder: The folder to write to, which must exist.
      params: The parameters of the decoder, with layers stacked; or `heads.Headed`.
      config: The configuration of the decoder.
      dtype: The dtype of the tensors.
      max_shard_bytes: The size above which weights are split into several files.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    leaves = jax.tree_util.tree_leaves_with_path(params)
    stored = list(zip(jax.tree.leaves(tensor_layout(config, head=isinstance(params, Headed))), leaves, strict=True))
    parts = [
        (tensor.name_at(place), tensor.choose_dtype(dtype).itemsize * math.prod(tensor.shape))
        for tensor, (_, leaf) in stored
        for place in np.ndindex(leaf.shape[: tensor.stacked])
    ]
    sizes = dict(reversed(dict(reversed(parts)).items()))  # by the last leaf of each tensor, which completes it
    split = split_state_dict_into_shards_factory(
        sizes, get_storage_size=int, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_bytes
    )
    files: dict[str, dict[str, np.ndarray]] = {file: {} for file in split.filename_to_tensors}
    missing = Counter(split.tensor_to_filename[name] for name, _ in parts)  # parts that files lack
    # Rounded to the nearest, weights would lose updates that are small beside them.
    rounded = jax.jit(round_leaf, static_argnums=0) if dtype == jnp.bfloat16 else lambda path, leaf: leaf
    for tensor, (path, leaf) in stored:
        # Gathers the leaf from all devices; on CPU nothing is copied.
        whole = np.asarray(rounded(path, jax.device_put(leaf, jax.local_devices(backend="cpu")[0])))
        for place in np.ndindex(whole.shape[: tensor.stacked]):
            name = tensor.name_at(place)
            file = split.tensor_to_filename[name]
            if name not in files[file]:
                files[file][name] = np.empty(tensor.shape, tensor.choose_dtype(dtype))
            tensor.put_leaf(files[file][name], whole[place])
            missing[file] -= 1
            if not missing[file]:
                save_file(files.pop(file), folder / file, {"format": "pt"})
    if split.is_sharded:
        write_model_json(folder / _INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})
