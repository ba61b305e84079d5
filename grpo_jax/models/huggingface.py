"""Hugging Face folders: a model's configuration, parameters and tokenizer, in and out. No torch, no pickle.

Tensors are read and written one at a time; what is held at once is the parameters and one of their leaves.
"""

import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401, teaches NumPy bfloat16
import numpy as np

from grpo_jax.errors import UsageError, missing, reason_of, user_path
from grpo_jax.models.config import ExpertsConfig, ModelConfig
from grpo_jax.models.families import FAMILIES, config_from_huggingface, config_to_huggingface
from grpo_jax.models.heads import Headed, add_head, without_vocabulary
from grpo_jax.models.lora import Adapted
from grpo_jax.models.params import Params, Quantised, Quantize, holds_quantised, is_quantised
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.quantised import quantise, quantise_params

try:
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import save_file
except ModuleNotFoundError as error:
    raise missing(error.name) from None

# By safetensors' names.
FLOAT_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# What a folder holds besides weights, and what of it a run and an export take over. Never a pickle.
_TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*")
_COPIED: tuple[str, ...] = ("*.jinja", "*.model", "LICENSE*", "vocab.*", "merges.txt", "tekken.json", "chat_template.*")
_COPIED += ("config.json", "generation_config.json", "tokenizer*.json", "special_tokens_map.json", "added_tokens.json")
_INDEX = "model.safetensors.index.json"
# Of an expert's projections. The mixture is called block_sparse_moe there, in place of mlp.
MIXTRAL_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_LARGEST = 1e6  # of a weight: those of models are below a thousand, and float16 ends at 65504


class Pretrained(NamedTuple):
    """A model as its folder holds it."""

    config: ModelConfig
    params: Params  # or `Headed`
    tokenizer: Any  # of transformers
    eos_ids: tuple[int, ...]  # the union of config.json, generation_config.json and tokenizer
    folder: Path
    notes: tuple[str, ...] = ()  # what a user should know of it

    def __repr__(self) -> str:  # without the arrays
        count = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        return f"Pretrained({str(self.folder)!r}, {count:,} parameters)"


def load_pretrained(
    name: str | Path,
    *,
    head: bool = False,
    param_dtype: Any = jnp.float32,
    quantize: Quantize = "none",
    sharding: Any = None,
    **overrides: Any,
) -> Pretrained:
    """Loads config.json, *.safetensors and the tokenizer of a model.

    Args:
      name: a local folder, as `save_pretrained` of transformers writes it, or the id of one on the hub.
      head: of a classifier with one label, such as a reward model: the parameters are `heads.Headed`.
      param_dtype: of the parameters, whatever the files hold; float32, in which small updates are not lost.
      quantize: int8 or nf4: the kernels of projections are held in 8 or 4 bits, for LoRA; see `models.quantised`.
      sharding: a `jax.sharding.Sharding` for all parameters, or a tree of them that is a prefix of the parameters', or
        a function of the parameters' shapes that gives one; None: the default device.
      **overrides: fields of ModelConfig that are not the model's: dtype, remat, attention, router.

    Returns:
      The model.

    Raises:
      UsageError: what is missing or not supported, in one sentence.
    """
    folder = model_folder(name)
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise UsageError(f"{folder} is an adapter: load its base, and then the adapter with peft.load_adapter")
    raw = read_json(folder / "config.json")
    try:
        config, param_dtype = config_from_huggingface(raw, **overrides), jnp.dtype(param_dtype)
    except UsageError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise UsageError(f"{folder}/config.json or the options given cannot be understood: {error}") from error
    if not jnp.issubdtype(param_dtype, jnp.floating):
        raise UsageError(f"param_dtype is {param_dtype}: it must be float32, bfloat16 or float16")
    tokenizer = load_tokenizer(folder)  # before the weights, which take longest
    ends, notes = eos_ids(folder, tokenizer, config.vocab_size)
    config = without_vocabulary(config) if head else config
    params = load_params(folder, config, head=head, dtype=param_dtype, quantize=quantize, sharding=sharding)
    return Pretrained(config, params, tokenizer, ends, folder, notes)


def model_folder(name: str | Path) -> Path:
    """The local folder of a model, fetched from the hub if `name` is the id of one there.

    Raises:
      UsageError: there is neither.
    """
    if not name:  # no required option: --resume takes it from the run
        raise UsageError("--model is needed: name a folder of a Hugging Face model, or its id on the hub")
    folder = user_path(name)
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)) or folder.suffix == ".safetensors":
        raise UsageError(f"there is no folder {name}: name one of a Hugging Face model, or an id on the hub")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(name), allow_patterns=[*_TEXT_FILES, "*.safetensors"]))
    except Exception as error:  # offline, unknown, private: the hub has a class for each
        raise UsageError(
            f"{name} is no folder here, and fetching it from the hub failed: {reason_of(error)}"
        ) from error


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder, by transformers' AutoTokenizer.

    Raises:
      UsageError: there is none.
    """
    # Importing transformers takes seconds, and only this needs it; that torch is missing is no news.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    try:
        # No limit of its own: prompts that are too long are counted, and are no matter for a warning of transformers.
        # And no code of the folder's is run, nor asked about.
        return AutoTokenizer.from_pretrained(folder, model_max_length=sys.maxsize, trust_remote_code=False)
    except Exception as error:  # of broken files each has its own
        raise UsageError(
            f"{folder} holds no tokenizer that transformers can load ({reason_of(error)}): copy its tokenizer.json "
            "into it"
        ) from error


def eos_ids(folder: Path, tokenizer: Any, vocab_size: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns the tokens that end a text: the union of config.json, generation_config.json and tokenizer.

    Args:
      folder: of the model.
      tokenizer: of transformers.
      vocab_size: of the model. Ids that it cannot sample are left out, if others remain.

    Returns:
      The ids, and notes that name those left out.
    """
    candidates = {tokenizer.eos_token_id}
    for file in (folder / "config.json", folder / "generation_config.json"):
        ids = read_json(file).get("eos_token_id") if file.exists() else None
        ids = ids if isinstance(ids, list) else [ids]
        if not all(isinstance(x, int | None) and not isinstance(x, bool) and (x or 0) >= 0 for x in ids):
            raise UsageError(f"eos_token_id in {file} is {ids}: it must be a token's number, or a list of them")
        candidates |= set(ids)
    ids = tuple(sorted(candidates - {None}))
    usable = tuple(eos_id for eos_id in ids if eos_id < vocab_size)
    if not usable or usable == ids:
        return ids, ()
    unusable = ", ".join(map(str, ids[len(usable) :]))
    return usable, (f"EOS {unusable} is left out, since the model has the tokens 0 to {vocab_size - 1}",)


# ---- the one table of names and shapes, read in both directions


class Tensor(NamedTuple):
    """A tensor of a folder, or some rows of one, and how it is laid out there."""

    name: str  # the first "{}" stands for the layer, the second for the expert
    shape: tuple[int, ...]  # in the folder; a linear layer's is [out, in]
    linear: bool  # here [*in, *out]: transposed, with axes for heads
    first: int = 0  # row of the folder's tensor
    rows: int | None = None  # that the folder's tensor has; None: those of the shape

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the folder's tensor."""
        return self.shape if self.rows is None else (self.rows, *self.shape[1:])

    @property
    def stacked(self) -> int:
        """Leading axes of its leaf that are tensors of their own in the folder: layers, and then experts."""
        return self.name.count("{}")

    def to_leaf(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Makes the part of a leaf, in its shape there, from the folder's tensor."""
        if self.rows is not None:
            tensor = tensor[self.first : self.first + self.shape[0]]
        return (tensor.T if self.linear else tensor).reshape(shape)

    def from_leaf(self, leaf: np.ndarray) -> np.ndarray:
        """The inverse of `to_leaf`, but for other rows."""
        return np.ascontiguousarray(leaf.reshape(self.shape[::-1]).T if self.linear else leaf.reshape(self.shape))


def headed_layout(config: ModelConfig) -> Headed:
    """Returns `tensor_layout` for a classifier with one label: …ForSequenceClassification in transformers."""
    return Headed(tensor_layout(config), Tensor("score.weight", (1, config.hidden_size), False))  # type: ignore[arg-type]


# Names of norms here, and in folders. Of those with norms around, the second one has what is a name of others.
_NORMS = {
    "before": {"input_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"},
    "after": {
        "attention_output_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    },
    "around": {
        "input_norm": "input_layernorm",
        "attention_output_norm": "post_attention_layernorm",
        "post_attention_norm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    },
}
# Linear maps of one input that are one tensor in a folder with fused projections.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def tensor_layout(config: ModelConfig) -> dict[str, Any]:
    """A `Tensor` for every leaf of the scanned decoder's parameters, in a tree like theirs."""
    width, inner, features = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * features, config.num_key_value_heads * features
    layer = "model.layers.{}"

    def norm(name: str, size: int) -> dict[str, Tensor]:
        return {"offset" if config.zero_centered_norms else "scale": Tensor(f"{name}.weight", (size,), False)}

    out_sizes = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    attention = _linears(f"{layer}.self_attn", width, out_sizes, config.qkv_bias, "qkv_proj", config)
    attention |= _linears(f"{layer}.self_attn", queries, {"o_proj": width}, config.o_bias)
    if config.qk_norm:
        sizes = {"q": queries, "k": keys} if config.qk_norm_across_heads else {"q": features, "k": features}
        attention |= {f"{x}_norm": norm(f"{layer}.self_attn.{x}_norm", size) for x, size in sizes.items()}
    out_sizes = {"gate_proj": inner, "up_proj": inner}
    mlp = _linears(f"{layer}.mlp", width, out_sizes, config.mlp_bias, "gate_up_proj", config)
    mlp |= _linears(f"{layer}.mlp", inner, {"down_proj": width}, config.mlp_bias)
    if config.experts:
        mlp = _experts_layout(config, config.experts)
    norms = {name: norm(f"{layer}.{in_folder}", width) for name, in_folder in _NORMS[config.norms].items()}
    layout = {
        "embedding": Tensor("model.embed_tokens.weight", (config.vocab_size, width), False),
        "final_norm": norm("model.norm", width),
        "layers": {"attention": attention, "mlp": mlp, **norms},
    }
    if not config.tie_word_embeddings:
        layout["unembedding"] = Tensor("lm_head.weight", (config.vocab_size, width), False)
    return layout


def _experts_layout(config: ModelConfig, experts: ExpertsConfig) -> dict[str, Any]:
    """The part of `tensor_layout` that stands in place of an MLP. Mixtral has names of its own."""
    width, inner = config.hidden_size, experts.moe_intermediate_size
    shapes = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
    names = {name: name for name in shapes} if config.qk_norm else MIXTRAL_NAMES
    stem = f"model.layers.{{}}.{'mlp' if config.qk_norm else 'block_sparse_moe'}"
    return {"router": {"kernel": Tensor(f"{stem}.gate.weight", (experts.num_experts, width), True)}} | {
        name: {"kernel": Tensor(f"{stem}.experts.{{}}.{names[name]}.weight", shape, True)}
        for name, shape in shapes.items()
    }


def _linears(
    module: str, inputs: int, out_sizes: dict[str, int], bias: bool, fused: str = "", config: ModelConfig | None = None
) -> dict[str, dict[str, Tensor]]:
    """Linear maps of one input, by name; rows of one tensor `fused` where the configuration says so."""
    is_fused = config is not None and config.fused_projections
    firsts = itertools.accumulate(out_sizes.values(), initial=0)
    rows = sum(out_sizes.values()) if is_fused else None
    layout = {}
    for (name, outputs), first in zip(out_sizes.items(), firsts, strict=False):
        stem, place = f"{module}.{fused if is_fused else name}", (first if is_fused else 0, rows)
        layout[name] = {"kernel": Tensor(f"{stem}.weight", (outputs, inputs), True, *place)}
        if bias:
            layout[name]["bias"] = Tensor(f"{stem}.bias", (outputs,), False, *place)
    return layout


def _tensors_of(layout: Any) -> list[Tensor]:
    """In the order of `jax.tree.leaves` of the parameters."""
    return jax.tree.leaves(layout, is_leaf=lambda x: isinstance(x, Tensor))


# ---- in


@cache
def _shapes(config: ModelConfig) -> Any:
    """Returns the shapes of the parameters: a tree of `jax.ShapeDtypeStruct`, not to be changed."""
    return jax.eval_shape(decoder_policy(config).init, jax.random.key(0))


def load_params(
    folder: Path,
    config: ModelConfig,
    *,
    head: bool = False,
    dtype: Any = jnp.float32,
    quantize: Quantize = "none",
    sharding: Any = None,
) -> Params:
    """The parameters in a folder's safetensors files, leaf by leaf in the dtype and on the devices asked for.

    Args:
      folder: with model.safetensors, or several files and their index.
      config: the decoder's shape.
      head, dtype, quantize, sharding: as in `load_pretrained`. What is quantised is rounded to the dtype first.

    Returns:
      Parameters, layers stacked.

    Raises:
      UsageError: names a tensor or file that is missing, not known, cut off, or of another shape or dtype.
    """
    shapes = _shapes(config)
    layout: Any = tensor_layout(config)
    tensors = _one_by_one(find_tensors(folder), layout, config)
    if head:
        shapes = jax.eval_shape(lambda decoder: add_head(config, decoder)[1], shapes)
        layout = headed_layout(config)
    _check_tensors(tensors, layout, config)
    structure = jax.tree.structure(shapes)
    if quantize != "none":
        shapes = jax.eval_shape(partial(quantise_params, format=quantize), shapes)
    if sharding is None:
        _check_memory(folder, shapes, dtype)
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    sharding = sharding(shapes) if callable(sharding) else sharding
    shardings = jax.tree.broadcast(default if sharding is None else sharding, shapes)

    def load(tensor: Tensor, leaf: Any, target: Any) -> Any:
        if is_quantised(leaf):

            def kernel(place: tuple[int, ...]) -> np.ndarray:
                x = read_tensor(tensors, tensor.name.format(*place))
                x = x if jnp.promote_types(x.dtype, dtype) == dtype else x.astype(dtype)
                return tensor.to_leaf(x, leaf.shape[tensor.stacked :])

            return _quantised(kernel, leaf, target)

        def part(index: Any) -> np.ndarray:
            """Reads what one device holds: a slice for each axis of the leaf."""
            places = [range(size)[part] for size, part in zip(leaf.shape, index, strict=True)]
            stacked, piece = tensor.stacked, np.empty([len(indices) for indices in places], dtype)
            for place, numbers in zip(
                np.ndindex(piece.shape[:stacked]), itertools.product(*places[:stacked]), strict=True
            ):
                whole = tensor.to_leaf(read_tensor(tensors, tensor.name.format(*numbers)), leaf.shape[stacked:])
                piece[place] = whole[index[stacked:]]
            return piece

        return jax.block_until_ready(jax.make_array_from_callback(leaf.shape, target, part))

    columns = _tensors_of(layout), *(jax.tree.leaves(tree, is_leaf=is_quantised) for tree in (shapes, shardings))
    leaves = list(zip(*columns, strict=True))
    # The largest first: while a leaf is put together it exists twice, which then is not on top of all others.
    order = sorted(range(len(leaves)), key=lambda i: -_num_bytes(leaves[i][1], dtype))
    loaded = {i: load(*leaves[i]) for i in order}
    return jax.tree.unflatten(structure, [loaded[i] for i in range(len(leaves))])


def _quantised(kernel: Callable[[tuple[int, ...]], np.ndarray], leaf: Quantised, target: Any) -> Quantised:
    """The kernels of all layers, quantised one by one on the host, and then put where they belong.

    Args:
      kernel: (layer,) or (layer, expert) -> `[*in, *out]`, read then.
      leaf: shapes of the result.
      target: its shardings.
    """
    whole = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), leaf)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        for place in np.ndindex(whole.codes.shape[:-2]):
            one = quantise(kernel(place), leaf.in_shape, leaf.out_shape, leaf.format)
            whole.codes[place], whole.scales[place] = one.codes, one.scales
            del one  # before the next is read

    def put(x: np.ndarray, target: jax.sharding.Sharding) -> jax.Array:
        return jax.block_until_ready(jax.make_array_from_callback(x.shape, target, lambda index: x[index]))

    return jax.tree.map(put, whole, target)


def _num_bytes(tree: Any, dtype: Any) -> int:
    """Returns the size of parameters from their shapes: quantised ones as they are, others in a dtype."""
    leaves = jax.tree.leaves(tree, is_leaf=is_quantised)
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(list(filter(is_quantised, leaves))))
    return held + jnp.dtype(dtype).itemsize * sum(x.size for x in leaves if not is_quantised(x))


class Found(NamedTuple):
    """The place of a tensor, with the shape and dtype in its file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # by safetensors' names
    part: tuple[str, tuple[int | slice, ...]] | None = None  # of another tensor; None: it is one itself


def find_tensors(folder: Path, names: Sequence[str] | None = None) -> dict[str, Found]:
    """All tensors of a folder by name. Reads headers only."""
    if names is None:
        if (folder / _INDEX).exists():
            weight_map = read_json(folder / _INDEX).get("weight_map")
            if not isinstance(weight_map, dict) or not all(map(_is_weights_file, weight_map.values())):
                raise UsageError(f"{folder / _INDEX} has no weight_map of names of files: download it again")
            names = sorted(set(weight_map.values()))
        elif (folder / "model.safetensors").exists():
            names = ["model.safetensors"]
        else:
            names = sorted(file.name for file in folder.glob("*.safetensors"))
    if not names:
        raise UsageError(f"{folder} holds no .safetensors file: convert the model to safetensors first")
    tensors = {}
    for file in (folder / name for name in names):
        if not file.exists():
            raise UsageError(f"{folder} lacks {file.name}: download it again")
        with _opened(file) as opened:
            for name in opened.keys():  # noqa: SIM118, it is no dictionary
                header = opened.get_slice(name)
                tensors[name] = Found(file, tuple(header.get_shape()), header.get_dtype())
    return tensors


def _is_weights_file(name: Any) -> bool:
    """Returns whether this names a file of weights in the folder of its index."""
    return isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name


def _one_by_one(tensors: dict[str, Found], layout: Any, config: ModelConfig) -> dict[str, Found]:
    """Tensors by the names of the layout, also where a folder has one for all experts of a layer.

    transformers 5 holds them so, gate and up in one, and writes them so with save_original_format=False.
    """
    if config.experts is None:
        return tensors
    tensors, mlp, inner = dict(tensors), layout["layers"]["mlp"], config.experts.moe_intermediate_size
    parts = {
        "gate_proj": ("gate_up_proj", slice(0, inner)),
        "up_proj": ("gate_up_proj", slice(inner, 2 * inner)),
        "down_proj": ("down_proj", slice(None)),
    }
    for layer in range(config.num_hidden_layers):
        stem = f"model.layers.{layer}.mlp"
        whole = {name: tensors.pop(f"{stem}.experts.{name}", None) for name in ("gate_up_proj", "down_proj")}
        for name, (of, rows) in parts.items():
            if (tensor := whole[of]) is None:
                continue
            for expert in range(tensor.shape[0] if len(tensor.shape) == 3 else 0):
                shape = (len(range(tensor.shape[1])[rows]), tensor.shape[2])
                part = f"{stem}.experts.{of}", (expert, rows)
                tensors[mlp[name]["kernel"].name.format(layer, expert)] = Found(tensor.file, shape, tensor.dtype, part)
        if any(whole.values()) and f"{stem}.gate.weight" in tensors:
            router = tensors.pop(f"{stem}.gate.weight")._replace(part=(f"{stem}.gate.weight", ()))
            tensors[mlp["router"]["kernel"].name.format(layer)] = router
    return tensors


def _check_tensors(tensors: dict[str, Found], layout: Any, config: ModelConfig) -> None:
    """Every tensor that is needed, in a shape and dtype that can be read, and none that nobody reads."""
    counts = config.num_hidden_layers, config.experts.num_experts if config.experts else 0
    needed = {
        tensor.name.format(*numbers): tensor.whole_shape
        for tensor in _tensors_of(layout)
        for numbers in np.ndindex(counts[: tensor.stacked])
    }
    for name, shape in needed.items():
        if name not in tensors:
            raise UsageError(f"the model's safetensors files hold no tensor {name!r}")
        if tensors[name].shape != shape:
            raise UsageError(f"tensor {name!r} has shape {tensors[name].shape}, but config.json asks for {shape}")
        if tensors[name].dtype not in FLOAT_DTYPES:
            raise UsageError(
                f"tensor {name!r} is of dtype {tensors[name].dtype}, but only {', '.join(FLOAT_DTYPES)} can be read: "
                "convert the model first"
            )
    # Older files keep the rotary frequencies, which follow from the configuration; some repeat the tied matrix.
    ignored = {"lm_head.weight"} if config.tie_word_embeddings else set()
    unknown = {name for name in tensors.keys() - needed.keys() - ignored if not name.endswith("rotary_emb.inv_freq")}
    if unknown:
        raise UsageError(
            f"the model's safetensors files hold tensors that this decoder does not know: {sorted(unknown)[:5]}"
        )


def _check_memory(folder: Path, shapes: Any, dtype: Any) -> None:
    """Refuses parameters that are more than all the memory of a device, before any is taken."""
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
    """A tensor.

    Raises:
      UsageError: a value is not finite, or larger than any of a model: the file is damaged.
    """
    # Opened for each tensor: while a file is open, all that was read of it counts as memory in use.
    with _opened(tensors[name].file) as opened:
        whole, index = tensors[name].part or (name, ())
        tensor = opened.get_slice(whole)[index] if index else opened.get_tensor(whole)
    largest = max(float(tensor.max()), -float(tensor.min())) if tensor.size else 0.0  # NaN, where there is one
    if not largest <= _LARGEST:
        raise UsageError(
            f"tensor {name!r} in {tensors[name].file} holds {largest:.3g}, which no model has: it is damaged, or its "
            "training diverged"
        )
    return tensor


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="np")
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{file} is no complete safetensors file ({error}): download it again") from error


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file of a folder.

    Raises:
      UsageError: it is missing or broken.
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


# ---- out


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Writes JSON in transformers' layout."""
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def save_pretrained(
    folder: str | Path,
    params: Params,
    config: ModelConfig,
    *,
    source: str | Path | None = None,
    dtype: Any = None,
    max_shard_bytes: int | None = None,
) -> Path:
    """Writes a folder that transformers, vLLM and `load_pretrained` load. It appears when it is complete.

    Args:
      folder: must not exist, or be empty.
      params: of the decoder, layers stacked, without adapters (`lora.merge` makes them so); or `heads.Headed`, which
        becomes a classifier with one label.
      config: the decoder's shape.
      source: folder whose config.json, tokenizer, chat template and generation config are taken over; None: a
        config.json is made, and there is no tokenizer.
      dtype: of the tensors; None: the parameters'.
      max_shard_bytes: more weights than this become several files; None: a sixteenth of them, but at least 64 MiB and
        at most 4 GiB, for a file's tensors are in memory while it is written, and some of the last one's still.

    Returns:
      The folder.

    Raises:
      UsageError: the folder is in use, or no architecture of transformers has this configuration.
    """
    decoder = params.decoder if isinstance(params, Headed) else params
    if isinstance(decoder, Adapted):
        raise UsageError("these parameters have adapters: save lora.merge of them, or peft.save_adapter")
    if holds_quantised(decoder):
        raise UsageError(
            "these parameters are quantised: save the original ones, or quantised.dequantise_params of them"
        )
    source = None if source is None else Path(source)
    dtype = np.dtype(dtype or decoder["embedding"].dtype)
    written = read_json(source / "config.json") if source else config_to_huggingface(config)
    if isinstance(params, Headed):
        written = _of_classifier(written)
    written |= {"torch_dtype" if "torch_dtype" in written else "dtype": dtype.name}
    if max_shard_bytes is None:
        total = sum(leaf.size for leaf in jax.tree.leaves(params)) * dtype.itemsize
        max_shard_bytes = min(max(total // 16, 2**26), 2**32)

    with complete_or_not_at_all(folder) as partial:
        if source:
            copy_text_files(source, partial)
        write_json(partial / "config.json", written)
        shards = []
        for number, shard in enumerate(_shards(params, config, dtype, max_shard_bytes)):
            save_file(shard, partial / f"{number}.safetensors", {"format": "pt"})
            shards.append({name: tensor.nbytes for name, tensor in shard.items()})
            shard.clear()
        _name_shards(partial, shards)
    return Path(folder).expanduser()


def _of_classifier(written: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a decoder, as that of a classifier with one label."""
    family = FAMILIES[written["model_type"]]
    architectures = [f"{family.classifier or family.name}ForSequenceClassification"]
    one_label = {"num_labels": 1, "id2label": {"0": "reward"}, "label2id": {"reward": 0}}
    # transformers reads the score at the last token that is not this one, and refuses batches without it. No text that
    # is scored has an ending token behind it, so that one will do.
    end = written.get("eos_token_id")
    padding = written.get("pad_token_id")
    padding = (end[0] if isinstance(end, list) else end) if padding is None else padding
    return written | {"architectures": architectures, **one_label, "pad_token_id": padding}


@contextmanager
def complete_or_not_at_all(folder: str | Path) -> Iterator[Path]:
    """A folder to write to, that gets its name at the end.

    Raises:
      UsageError: the name is taken.
    """
    folder = user_path(folder).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists: name another folder to write to")
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)  # of a killed process; in a container its number is often the same
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial)
        raise
    for file in partial.glob("*.safetensors"):  # written for the owner alone; a server may be another user
        file.chmod(next(partial.glob("*.json")).stat().st_mode)
    if folder.exists():
        folder.rmdir()
    partial.rename(folder)


def save_description(folder: Path, config: ModelConfig, *, source: Path | None = None) -> None:
    """Writes everything of a model's folder but the weights, as a `source` for `save_pretrained`.

    Args:
      folder: created; what is there already is replaced.
      config: the decoder's shape.
      source: the folder that the model was loaded from; None: a config.json is made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if source:
        copy_text_files(source, folder)
    else:
        write_json(folder / "config.json", config_to_huggingface(config))


def files_of(folder: Path) -> list[str]:
    """The files of a model's folder that a run depends on: weights, configurations, tokenizer and chat template."""
    patterns = [pattern for pattern in (*_TEXT_FILES, "*.safetensors") if not pattern.startswith("LICENSE")]
    return sorted({file.name for pattern in patterns for file in folder.glob(pattern) if file.is_file()})


def copy_text_files(source: Path, target: Path) -> None:
    """Copies what is not weights: configurations, tokenizer, chat template, licence.

    Raises:
      UsageError: one of them is a link to a file outside, which may be private, while a copy may be published.
    """
    home = source.parents[1] if source.parent.name == "snapshots" else source  # links of the hub's cache stay in there
    for file in (file for file in source.iterdir() if is_copied(file.name) and file.is_file()):
        # Loading has read the two excepted files, and refuses what is no model's.
        if file.name not in ("config.json", "tokenizer.json") and not file.resolve().is_relative_to(home.resolve()):
            raise UsageError(f"{file} is a link to a file outside of the model's folder: put a copy in its place")
        shutil.copyfile(file, target / file.name)


def is_copied(name: str) -> bool:
    """Returns whether a run and an export take over a file of this name from a model's folder."""
    return any(fnmatchcase(name, pattern) for pattern in _COPIED)


def _tensors(params: Params, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """Names and tensors as the folder has them, one fetched at a time."""
    layout = headed_layout(config) if isinstance(params, Headed) else tensor_layout(config)
    parts: dict[str, list[tuple[Tensor, jax.Array]]] = {}
    for tensor, leaf in zip(_tensors_of(layout), jax.tree.leaves(params), strict=True):
        parts.setdefault(tensor.name, []).append((tensor, leaf))
    for name, leaves in parts.items():
        leaves.sort(key=lambda part: part[0].first)
        # From many devices to one; on CPU nothing is copied.
        wholes = [(tensor, np.asarray(jax.device_put(leaf, jax.devices("cpu")[0]))) for tensor, leaf in leaves]
        for numbers in np.ndindex(wholes[0][1].shape[: wholes[0][0].stacked]):
            rows = [tensor.from_leaf(whole[numbers]) for tensor, whole in wholes]
            yield name.format(*numbers), rows[0] if len(rows) == 1 else np.concatenate(rows)


def _shards(
    params: Params, config: ModelConfig, dtype: np.dtype, max_shard_bytes: int
) -> Iterator[dict[str, np.ndarray]]:
    """Tensors in groups of at most max_shard_bytes, or of one tensor that is larger."""
    shard: dict[str, np.ndarray] = {}
    size = 0
    for name, tensor in _tensors(params, config):
        tensor = tensor.astype(dtype, copy=False)
        if shard and size + tensor.nbytes > max_shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def _name_shards(folder: Path, shards: list[dict[str, int]]) -> None:
    """Gives 0.safetensors … the names that transformers looks for, and several an index."""
    if len(shards) == 1:
        (folder / "0.safetensors").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards):
        name = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"{number}.safetensors").rename(folder / name)
        weight_map |= dict.fromkeys(shard, name)
        total += sum(shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / _INDEX, index)
