"""LoRA adapters as PEFT folders: adapter_config.json and adapter_model.safetensors, in and out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from grpo_jax.errors import UsageError, missing
from grpo_jax.models.huggingface import (
    FLOAT_DTYPES,
    complete_or_not_at_all,
    find_tensors,
    read_json,
    read_tensor,
    write_json,
)
from grpo_jax.models.lora import TARGETS, Adapted, Target, sites
from grpo_jax.models.quantised import split_shape
from grpo_jax.models.transformer import Params

try:
    from safetensors.numpy import save_file
except ModuleNotFoundError as error:
    raise missing(error.name) from None

# Of adapter_config.json: what makes more of an adapter than W + s·A B everywhere, and the starts that leave W alone.
_REFUSED_IN_ADAPTERS = (
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layers_to_transform",
    "alora_invocation_tokens",
)
_INITS_BESIDE_THE_BASE = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


def adapter_config(*, rank: int, alpha: float, targets: Sequence[Target], base: str) -> dict[str, Any]:
    """The adapter_config.json of LoRA adapters.

    Args:
      rank: R.
      alpha: α.
      targets: the projections.
      base: folder or hub id of the base model.

    Returns:
      What PEFT reads.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def save_adapter(folder: str | Path, params: Adapted, *, base: str) -> Path:
    """Writes adapters as a folder that PEFT loads.

    Args:
      folder: must not exist, or be empty.
      params: with adapters.
      base: folder or hub id of the base model, for adapter_config.json.

    Returns:
      The folder.

    Raises:
      UsageError: the folder is in use.
    """
    tensors, targets, rank = {}, [], 0
    for block, name in sites():
        if name not in params.adapters["layers"].get(block, {}):
            continue
        a, b = (np.asarray(params.adapters["layers"][block][name][matrix]) for matrix in "ab")
        rank = b.shape[1]
        targets.append(name)
        for layer in range(len(a)):
            stem = _peft_name(layer, block, name)
            tensors[f"{stem}.lora_A.weight"] = np.ascontiguousarray(a[layer].reshape(-1, rank).T)
            tensors[f"{stem}.lora_B.weight"] = np.ascontiguousarray(b[layer].reshape(rank, -1).T)
    config = adapter_config(rank=rank, alpha=float(params.scale) * rank, targets=targets, base=base)
    with complete_or_not_at_all(folder) as partial:
        save_file(tensors, partial / "adapter_model.safetensors", {"format": "pt"})
        write_json(partial / "adapter_config.json", config)
    return Path(folder).expanduser()


def load_adapter(folder: str | Path, params: Params) -> Adapted:
    """LoRA adapters as PEFT or `save_adapter` wrote them, on the parameters of their base.

    Args:
      folder: with adapter_config.json and adapter_model.safetensors.
      params: of the decoder, layers stacked.

    Returns:
      The adapted parameters.

    Raises:
      UsageError: what is missing or not supported, in one sentence.
    """
    folder = Path(folder).expanduser()
    config = read_json(folder / "adapter_config.json")
    if config.get("peft_type") != "LORA":
        raise UsageError(f"{folder} is an adapter of type {config.get('peft_type')!r}: only LORA is supported")
    variants = {name for name in config if name.startswith("use_")} - {"use_rslora"}
    for option in (*_REFUSED_IN_ADAPTERS, *variants):
        if config.get(option):
            raise UsageError(f"{option} in {folder}/adapter_config.json is not supported")
    if config.get("init_lora_weights") not in _INITS_BESIDE_THE_BASE:
        raise UsageError(
            f"init_lora_weights {config['init_lora_weights']!r} in {folder}/adapter_config.json changes the base: save "
            "the adapter with PEFT's path_initial_model_for_weight_conversion first"
        )
    found = find_tensors(folder, ["adapter_model.safetensors"])
    rank, left = config.get("r", 8), set(found)  # 8 and 8 are PEFT's defaults

    def take(name: str, shape: tuple[int, int]) -> np.ndarray:
        if name not in left or found[name].shape != shape or found[name].dtype not in FLOAT_DTYPES:
            there = found[name]._asdict() if name in found else "missing"
            raise UsageError(f"{folder}: {name} must be floats of shape {shape}, but is {there}")
        left.discard(name)
        return read_tensor(found, name).astype(np.float32).T

    layers: dict[str, Any] = {}
    for block, name in sites(TARGETS):
        kernel = params["layers"][block][name]["kernel"]
        inputs, outputs = split_shape(name, kernel.shape)
        stems = [_peft_name(layer, block, name) for layer in range(kernel.shape[0])]
        if f"{stems[0]}.lora_A.weight" in left:
            a = [take(f"{stem}.lora_A.weight", (rank, int(np.prod(inputs)))) for stem in stems]
            b = [take(f"{stem}.lora_B.weight", (int(np.prod(outputs)), rank)) for stem in stems]
            layers.setdefault(block, {})[name] = {
                "a": jnp.asarray(np.stack(a).reshape(-1, *inputs, rank)),
                "b": jnp.asarray(np.stack(b).reshape(-1, rank, *outputs)),
            }
    if left or not layers:
        raise UsageError(f"{folder} holds adapters that this decoder does not have: {sorted(left)[:3]}")
    scale = config.get("lora_alpha", 8) / (rank**0.5 if config.get("use_rslora") else rank)
    return Adapted(params, {"layers": layers}, jnp.float32(scale))


def _peft_name(layer: int, block: str, name: str) -> str:
    module = "self_attn" if block == "attention" else block
    return f"base_model.model.model.layers.{layer}.{module}.{name}"
