"""config.json of the model families of transformers: onto `ModelConfig`, and back.

All families are settings of one decoder. transformers completes a file with its defaults and brings it into the form of
its version 5. What all files have in common is then read once. The rest is a row of FAMILIES: a function from the file
to the fields of `ModelConfig` that only this family sets.
"""

import os
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

from grpo_jax.errors import UsageError, abbreviate
from grpo_jax.models.config import (
    MOST,
    ExpertsConfig,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelConfig,
    RopeScaling,
    YarnScaling,
    check_whole,
)

File = dict[str, Any]  # the contents of a config.json
Fields = dict[str, Any]  # of ModelConfig, by name


class Family(NamedTuple):
    """Fields of config.json that only this family has."""

    name: str  # in the names of classes: the Llama of LlamaForCausalLM
    fields: Callable[[File], Fields]  # what differs from `_common_fields`
    classifier: str = ""  # its name in that of the class of classifiers, where it is another
    rope: Callable[[File], Fields] | None = None  # instead of `_rope`


def config_from_huggingface(config: File, **overrides: Any) -> ModelConfig:
    """Maps the contents of a config.json, as transformers 5 or earlier wrote it.

    Args:
      config: the parsed file.
      **overrides: fields of ModelConfig that the file does not determine (dtype, remat, attention, router).

    Returns:
      The configuration.

    Raises:
      UsageError: the file asks for something that this decoder does not compute.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UsageError(
            f"model_type {abbreviate(model_type)} is not supported{_refused(config)}; choose one of {tuple(FAMILIES)}"
        )
    family = FAMILIES[model_type]
    _check(config)
    # A model without this number has no known limit, and no warning of long texts.
    longest = {"max_position_embeddings": config.get("max_position_embeddings")}
    file = _complete(config)
    fields = _common_fields(file) | longest | (family.rope or _rope)(file) | family.fields(file)
    return ModelConfig(**fields, **overrides)


def config_to_huggingface(config: ModelConfig) -> File:
    """The config.json of a model that was not loaded from one; `config_from_huggingface` reads it back.

    Args:
      config: the decoder's shape.

    Returns:
      What to write, of the first family that has this configuration, with `rope_parameters` as transformers 5 has them.

    Raises:
      UsageError: no supported family has this combination.
    """
    not_in_the_file = {name: getattr(config, name) for name in ("dtype", "remat", "attention", "router")}

    def reads_back(written: File) -> bool:
        try:
            return config_from_huggingface(written, **not_in_the_file) == config
        except UsageError:
            return False

    for model_type, family in FAMILIES.items():
        written = {"architectures": [f"{family.name}ForCausalLM"], "model_type": model_type} | _file(model_type, config)
        if reads_back(written):
            return written
    raise UsageError(f"no model of transformers has this combination of options: {config}")


# ---- what all files say


_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_CAPS = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")  # Gemma's
_SAME = ("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "tie_word_embeddings", "initializer_range")


def _config_class(model_type: str) -> Any:
    """Returns the class of transformers that reads files of a family."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import CONFIG_MAPPING  # takes seconds

    return CONFIG_MAPPING[model_type]


def _complete(file: File) -> File:
    """Returns the file as transformers 5 would write it, with a value for everything that it leaves out."""
    # Default tokens of transformers may lie outside of a small vocabulary, and it would warn of them.
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    try:
        # It changes what it reads.
        return _config_class(file["model_type"]).from_dict(deepcopy(file) | tokens).to_dict()
    except Exception as error:  # each kind of wrong value has its own
        reason = " ".join(str(error).split())[:300]
        raise UsageError(
            f"transformers cannot read config.json ({reason}): correct it, or download it again"
        ) from error


def _common_fields(file: File) -> Fields:
    fields = {name: file[name] for name in (*_SIZES, *_SAME) if file.get(name) is not None}
    return {"head_dim": file["hidden_size"] // file["num_attention_heads"]} | fields


def _file(model_type: str, config: ModelConfig) -> File:
    """Returns what a file of this family says of a configuration, by the names that its class in transformers has."""
    known = _config_class(model_type)().to_dict()
    rope: dict[str, Any] = _rope_parameters(config)
    if "partial_rotary_factor" in known["rope_parameters"]:
        rope |= {"partial_rotary_factor": config.partial_rotary_factor}
    written = {name: getattr(config, name) for name in (*_SIZES, *_SAME, *_CAPS, "sliding_window", "mlp_bias")}
    written |= config.experts._asdict() | {"num_local_experts": config.experts.num_experts} if config.experts else {}
    written |= {
        "hidden_activation": config.hidden_act,
        "attention_bias": config.o_bias,
        "use_sliding_window": config.sliding_window is not None,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in config.windows],
        "no_rope_layers": [int(rotation is not None) for rotation in config.rotations],
        "original_max_position_embeddings": rope.get("original_max_position_embeddings"),
        "max_position_embeddings": config.max_position_embeddings,
    }
    # Earlier transformers read these names.
    always: File = {name: written[name] for name in ("head_dim", "num_experts") if name in written}
    written = {name: value for name, value in written.items() if name in known and value is not None}
    if (known.get("pad_token_id") or 0) >= config.vocab_size:
        written["pad_token_id"] = None
    if "full_attention" in known["rope_parameters"]:
        local = config.rope_local_base_freq or config.rope_theta
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": local}}
        always["rope_local_base_freq"] = local
    return written | always | {"rope_parameters": rope, "rope_theta": config.rope_theta}


def _check(file: File) -> None:
    """Refuses a file that asks for what no family has, or whose sizes transformers could not work with."""
    for unsupported in ("quantization_config", "use_bidirectional_attention"):
        if file.get(unsupported):
            raise UsageError(f"{unsupported} {abbreviate(file[unsupported])} is not supported")
    if missing := [name for name in _SIZES if name not in file]:
        raise UsageError(f"config.json lacks {', '.join(missing)}")
    for name in _SIZES:
        check_whole(name, file[name], MOST[name])


def _refused(file: File) -> str:
    """Why a model is not supported, where that is known."""
    if any(file.get(name) for name in ("vision_config", "audio_config")) or file.get("model_type") in _WITH_TOWERS:
        return " (a model with towers for images or sound: take a text model)"
    return ""


_WITH_TOWERS = (
    "gemma3",
    "gemma3n",
    "llama4",
    "mllama",
    "llava",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "phi4_multimodal",
)

# ---- rotations


def _rope(file: File) -> Fields:
    """Base and scaling."""
    if "rope_theta" not in file["rope_parameters"]:
        raise UsageError("rope_parameters that differ between layers are not supported in this family")
    for part in (file["rope_parameters"], file):
        if part.get("partial_rotary_factor") not in (None, 1.0):
            raise UsageError(f"partial_rotary_factor {abbreviate(part['partial_rotary_factor'])} is not supported")
    return _one_rope(file["rope_parameters"], file)


def _one_rope(rope: dict[str, Any], file: File) -> Fields:
    return {"rope_theta": rope["rope_theta"], "rope_scaling": _scaling(rope, file)}


# By rope_type.
_SCALINGS: dict[str, type[RopeScaling]] = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
    "longrope": LongRopeScaling,
}


def _scaling(rope: dict[str, Any], file: File) -> RopeScaling | None:
    kind = rope["rope_type"]
    if kind == "default":
        return None
    if kind not in _SCALINGS:
        raise UsageError(f"rope scaling {abbreviate(rope)} is not supported, only {tuple(_SCALINGS)}")
    scaling: Any = _SCALINGS[kind]
    fields = {name: value for name, value in rope.items() if value is not None}
    longest, length = file["max_position_embeddings"], "original_max_position_embeddings"
    fields[length] = original = file.get(length) or fields.get(length) or longest
    if kind == "longrope":
        fields.setdefault("factor", longest / original)
    values = {name: fields[name] for name in scaling._fields if name in fields}
    return scaling(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _rope_parameters(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `_rope`, as transformers 5 has it."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling := config.rope_scaling:
        kind = next(name for name, kind in _SCALINGS.items() if isinstance(scaling, kind))
        fields = {x: y for x, y in scaling._asdict().items() if y != scaling._field_defaults.get(x, ...)}
        rope |= {"rope_type": kind, **{x: list(y) if isinstance(y, tuple) else y for x, y in fields.items()}}
    return rope


def _rope_by_layer(file: File) -> Fields:
    """Gemma 3's: one for layers with the window, without scaling, and one for the others."""
    local = file["rope_parameters"]["sliding_attention"]
    if _scaling(local, file):
        raise UsageError(f"rope scaling {abbreviate(local)} of layers with a window is not supported")
    return _one_rope(file["rope_parameters"]["full_attention"], file) | {"rope_local_base_freq": local["rope_theta"]}


def _partial_rope(file: File) -> Fields:
    """Phi's: of a part of the features."""
    rope = file["rope_parameters"]
    return _one_rope(rope, file) | {"partial_rotary_factor": rope["partial_rotary_factor"]}


# ---- what several families say


def _attention_bias(file: File) -> Fields:
    """Reads one flag for the biases of all four projections."""
    return dict.fromkeys(("qkv_bias", "o_bias"), bool(file.get("attention_bias")))


def _window(file: File) -> Fields:
    """The window in the layers that layer_types names; without it, in all."""
    kinds, layers = file.get("layer_types"), file["num_hidden_layers"]
    sliding = [layer for layer in range(layers) if not kinds or kinds[layer] == "sliding_attention"]
    if not file.get("sliding_window") or not sliding:
        return {}
    return {
        "sliding_window": file["sliding_window"],
        "sliding_layers": tuple(sliding) if len(sliding) < layers else None,
    }


# ---- families


def _llama(file: File) -> Fields:
    return _attention_bias(file) | {"mlp_bias": bool(file.get("mlp_bias"))}


def _qwen2(file: File) -> Fields:
    return {"qkv_bias": True, **_window(file)}


def _qwen3(file: File) -> Fields:
    return {"qk_norm": True, **_attention_bias(file), **_window(file)}


def _mixtral(file: File) -> Fields:
    experts = ExpertsConfig(
        num_experts=file["num_local_experts"],
        num_experts_per_tok=file["num_experts_per_tok"],
        moe_intermediate_size=file["intermediate_size"],
        norm_topk_prob=True,
    )
    return {**_window(file), "experts": experts}


def _qwen3_moe(file: File) -> Fields:
    if file["mlp_only_layers"] or file["decoder_sparse_step"] != 1:
        raise UsageError("mlp_only_layers and decoder_sparse_step are not supported: every layer must have experts")
    experts = ExpertsConfig(
        num_experts=file["num_local_experts"],
        num_experts_per_tok=file["num_experts_per_tok"],
        moe_intermediate_size=file["moe_intermediate_size"],
        norm_topk_prob=file["norm_topk_prob"],
    )
    return {"qk_norm": True, **_attention_bias(file), **_window(file), "experts": experts}


def _smollm3(file: File) -> Fields:
    unrotated = tuple(layer for layer in range(file["num_hidden_layers"]) if not file["no_rope_layers"][layer])
    return {"unrotated_layers": unrotated, **_window(file), **_llama(file)}


def _olmo2(file: File) -> Fields:
    return {"norms": "after", "qk_norm": True, "qk_norm_across_heads": True, **_attention_bias(file)}


def _phi3(file: File) -> Fields:
    return {"fused_projections": True, **_window(file)}


def _gemma(file: File) -> Fields:
    scaled = {"zero_centered_norms": True, "embedding_multiplier": file["hidden_size"] ** 0.5}
    return scaled | _attention_bias(file)


def _gemma2(file: File) -> Fields:
    return {
        "norms": "around",
        "hidden_act": file["hidden_activation"],
        **{name: file[name] for name in _CAPS},
        **_gemma(file),
        **_window(file),
    }


def _gemma3(file: File) -> Fields:
    if file["attn_logit_softcapping"] is not None:  # transformers reads it and does not compute it
        raise UsageError("attn_logit_softcapping is not supported in Gemma 3")
    return {"qk_norm": True, **_gemma2(file)}


# By model_type. A configuration that several have is written as the first one.
FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", _llama),
    "mistral": Family("Mistral", _window),
    "qwen2": Family("Qwen2", _qwen2),
    "qwen3": Family("Qwen3", _qwen3),
    "smollm3": Family("SmolLM3", _smollm3),
    "olmo2": Family("Olmo2", _olmo2),
    "phi3": Family("Phi3", _phi3, rope=_partial_rope),
    "gemma": Family("Gemma", _gemma),
    "gemma2": Family("Gemma2", _gemma2),
    "gemma3_text": Family("Gemma3", _gemma3, "Gemma3Text", _rope_by_layer),
    "mixtral": Family("Mixtral", _mixtral),
    "qwen3_moe": Family("Qwen3Moe", _qwen3_moe),
}
