"""Loading and saving LoRA adapters as PEFT folders with adapter_config.json and adapter_model.safetensors."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from grpo_jax.errors import UsageError, abbreviate, missing, user_path
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.files.families import text_module
from grpo_jax.models.files.weights import (
    FLOAT_DTYPES,
    Tensor,
    find_tensors,
    read_json,
    read_tensor,
    tensor_layout,
    text_name,
    write_model_json,
)
from grpo_jax.models.huggingface import complete_or_not_at_all
from grpo_jax.models.params.lora import sites
from grpo_jax.models.params.tree import TARGETS, Adapted, Target, split_shape

try:
    from safetensors.numpy import save_file
except ModuleNotFoundError as error:
    raise missing(error.name) from None

_PREFIX = "base_model.model."  # of the names of tensors

# Options of adapter_config.json with which an adapter is still W + s·A B. Any other may change that if it is true, a
# list or an object. Numbers and strings only set details of such options.
_HARMLESS_IN_ADAPTERS = {"auto_mapping", "inference_mode", "target_modules", "exclude_modules", "fan_in_fan_out"}
_HARMLESS_IN_ADAPTERS |= {"use_rslora", "init_lora_weights", "layers_pattern", "ensure_weight_tying"}
_HARMLESS_IN_ADAPTERS |= {"loftq_config", "eva_config", "corda_config", "lora_ga_config"}  # of initialisations
# Initialisations that do not change W
_INITS_BESIDE_THE_BASE = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


def adapter_config(*, rank: int, alpha: float, targets: Iterable[str] | str, base: str) -> dict[str, Any]:
    """Makes the adapter_config.json of LoRA adapters.

    Args:
      rank: The rank of the adapters, R.
      alpha: α in ΔW = (α/R)·A B.
      targets: The names of the modules that have adapters, or a regular expression.
      base: The folder or hub id of the base model.

    Returns:
      The contents of adapter_config.json.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": targets if isinstance(targets, str) else sorted(targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def adaptable(config: ModelConfig) -> tuple[Target, ...]:
    """Returns the projections of a family whose adapters PEFT can hold, because they are in modules of transformers."""
    layers = tensor_layout(config)["layers"]
    names = dict.fromkeys(name for _, name in sites(layers))
    impossible = {name for block, name in sites(layers) if not layers[block][name]["kernel"].name.endswith(".weight")}
    if len(layers.keys() & {"mlp", "experts", "shared_expert"}) > 1:  # PEFT takes the names of experts only for experts
        impossible |= layers["experts"].keys()
    return tuple(name for name in names if name not in impossible)


def targets_of(config: ModelConfig, targets: Sequence[Target]) -> tuple[Target, ...]:
    """Returns the projections of a model that get adapters: these targets, or if they are `TARGETS` all that can.

    Raises:
      UsageError: PEFT cannot hold the adapters of a target, or the model does not have it.
    """
    possible = adaptable(config)
    if tuple(targets) != TARGETS and set(targets) - set(possible):
        raise UsageError(f"lora_targets is {tuple(targets)}: choose among {possible} for this model")
    return tuple(name for name in targets if name in possible)


def save_adapter(
    folder: str | Path, config: ModelConfig, params: Adapted, *, base: str, source: Path | None = None
) -> Path:
    """Writes adapters to a folder that PEFT can load.

    A module of transformers may compute several projections, such as qkv_proj of Phi-3. Its adapter joins theirs: A
    holds all their rows, and B is block diagonal. In such a folder all adapters have the sum of these ranks, filled up
    with zeros.

    Args:
      folder: The folder to write, which must not exist or must be empty.
      config: The configuration of the decoder.
      params: The parameters with adapters.
      base: The folder or hub id of the base model, for adapter_config.json.
      source: A folder with the config.json of the base, which names modules differently if the base has towers for
        images; None: `base`. Without that file, it has none.

    Returns:
      The folder.

    Raises:
      UsageError: The folder is in use, or PEFT cannot hold an adapter.
    """
    layers, layout = params.adapters["layers"], tensor_layout(config)["layers"]
    if impossible := {name for _, name in sites(layers)} - set(adaptable(config)):
        raise UsageError(f"PEFT cannot hold adapters of {sorted(impossible)} in this family: export merged weights")
    described = Path(source or base) / "config.json"
    inside = text_module(read_json(described)) if described.is_file() else "model"
    tensors: dict[str, np.ndarray] = {}
    modules: dict[Tensor, int] = {}  # the sum of the ranks in a module
    places = []  # block, projection, and the ranks before it in its module
    for block, name in sites(layers):
        module = replace(layout[block][name]["kernel"], selection=...)
        places.append((block, name, modules.get(module, 0)))
        modules[module] = modules.get(module, 0) + layers[block][name]["a"].shape[-1]
    rank = max(modules.values())
    for block, name, first in places:
        a, b = (np.asarray(layers[block][name][matrix]) for matrix in "ab")
        stacked, ranks = split_shape(name, params.base["layers"][block][name]["kernel"].shape)[0], a.shape[-1]
        a, b = a.reshape(*stacked, -1, ranks), b.reshape(*stacked, ranks, -1)
        tensor, columns = layout[block][name]["kernel"], np.s_[first : first + ranks]
        for numbers in np.ndindex(stacked):
            stem, (outputs, inputs) = _peft_name(tensor, numbers, inside), tensor.shape
            tensors.setdefault(f"{stem}.lora_A.weight", np.zeros((rank, inputs), a.dtype))[columns] = a[numbers].T
            whole = tensors.setdefault(f"{stem}.lora_B.weight", np.zeros((outputs, rank), b.dtype))
            tensor.put_leaf(whole[:, columns], b[numbers])
    targets: Any = {name.split(".")[-3] for name in tensors}
    if inside != "model":  # towers have modules of the same names
        targets = rf"{re.escape(inside)}\..*\.({'|'.join(sorted(targets))})"
    options = adapter_config(rank=rank, alpha=float(params.scale) * rank, targets=targets, base=base)
    with complete_or_not_at_all(folder) as partial:
        save_file(tensors, partial / "adapter_model.safetensors", {"format": "pt"})
        write_model_json(partial / "adapter_config.json", options)
    return Path(folder).expanduser()


def load_adapter(folder: str | Path, config: ModelConfig, params: Params) -> Adapted:
    """Loads LoRA adapters that PEFT or `save_adapter` wrote, and adds them to the parameters of their base.

    Args:
      folder: The folder with adapter_config.json and adapter_model.safetensors.
      config: The configuration of the decoder.
      params: The parameters of the decoder, with layers stacked.

    Returns:
      The adapted parameters.

    Raises:
      UsageError: Something is missing or not supported.
    """
    folder = user_path(folder)
    options = read_json(folder / "adapter_config.json")
    if options.get("peft_type") != "LORA":
        raise UsageError(f"{folder} is an adapter of type {options.get('peft_type')!r}: only LORA is supported")
    for option in options.keys() - _HARMLESS_IN_ADAPTERS:
        if options[option] is True or (options[option] and isinstance(options[option], list | dict)):
            raise UsageError(f"{option} in {folder}/adapter_config.json is not supported")
    if options.get("init_lora_weights") not in _INITS_BESIDE_THE_BASE:
        raise UsageError(
            f"init_lora_weights {options['init_lora_weights']!r} in {folder}/adapter_config.json changes the base: "
            "save the adapter with PEFT's path_initial_model_for_weight_conversion first"
        )
    places = find_tensors(folder, ["adapter_model.safetensors"])
    by_name = {_PREFIX + text_name(name.removeprefix(_PREFIX)): place for name, place in places.items()}
    rank, alpha, left = options.get("r", 8), options.get("lora_alpha", 8), set(by_name)  # 8 and 8 are PEFT's defaults
    if type(alpha) not in (int, float) or not abs(alpha) < 1e30:  # also NaN
        raise UsageError(
            f"lora_alpha in {folder}/adapter_config.json is {abbreviate(alpha)}: it must be a finite number"
        )
    if type(rank) is not int or rank < 1:
        raise UsageError(f"r in {folder}/adapter_config.json is {abbreviate(rank)}: it must be a whole number above 0")

    def take(name: str, shape: tuple[int, int]) -> np.ndarray:
        if name not in by_name or by_name[name].shape != shape or by_name[name].dtype not in FLOAT_DTYPES:
            there = by_name[name]._asdict() if name in by_name else "missing"
            raise UsageError(f"{folder}: {name} must be floats of shape {shape}, but is {there}")
        left.discard(name)
        return read_tensor(by_name, name).astype(np.float32)

    layers: dict[str, Any] = {}
    layout = tensor_layout(config)["layers"]
    for block, name in sites(params["layers"], adaptable(config)):
        stacked, inputs, outputs = split_shape(name, params["layers"][block][name]["kernel"].shape)
        tensor = layout[block][name]["kernel"]
        stems = [_peft_name(tensor, place) for place in np.ndindex(stacked)]
        if f"{stems[0]}.lora_A.weight" in by_name:
            a = [take(f"{stem}.lora_A.weight", (rank, math.prod(inputs))).T for stem in stems]
            shape = rank, math.prod(outputs)
            b = [tensor.to_leaf(take(f"{stem}.lora_B.weight", (tensor.shape[0], rank)), shape) for stem in stems]
            layers.setdefault(block, {})[name] = {
                "a": jnp.asarray(np.stack(a).reshape(*stacked, *inputs, rank)),
                "b": jnp.asarray(np.stack(b).reshape(*stacked, rank, *outputs)),
            }
    if left or not layers:
        raise UsageError(f"{folder} holds adapters that this decoder does not have: {sorted(left)[:3]}")
    scale = alpha / (rank**0.5 if options.get("use_rslora") else rank)
    return Adapted(params, {"layers": layers}, jnp.float32(scale))


def _peft_name(tensor: Tensor, place: tuple[int, ...], inside: str = "model") -> str:
    """Returns the name of a projection in PEFT's files. Each expert has a module, as in transformers 4."""
    return f"{_PREFIX}{inside}{tensor.name_at(place).removesuffix('.weight').removeprefix('model')}"
