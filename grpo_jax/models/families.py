"""config.json of the model families of transformers: onto `ModelConfig`, and back.

All families are settings of one decoder. transformers completes a file with its defaults and brings it into the form of
its version 5. What all files have in common is then read once. The rest is a row of FAMILIES: a function from the file
to the fields of `ModelConfig` that only this family sets, and one that writes what the other reads.
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
    written: Callable[[ModelConfig], File] = lambda _: {}  # besides what all files say
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
        architectures = {"architectures": [f"{family.name}ForCausalLM"], "model_type": model_type}
        written = architectures | _common_file(config) | family.written(config)
        if reads_back(written):
            return written
    raise UsageError(f"no model of transformers has this combination of options: {config}")


# ---- what all files say


_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_SAME = ("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "tie_word_embeddings", "initializer_range")


def _complete(file: File) -> File:
    """Returns the file as transformers 5 would write it, with a value for everything that it leaves out."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import CONFIG_MAPPING  # takes seconds

    # Default tokens of transformers may lie outside of a small vocabulary, and it would warn of them.
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    try:
        # It changes what it reads.
        return CONFIG_MAPPING[file["model_type"]].from_dict(deepcopy(file) | tokens).to_dict()
    except Exception as error:  # each kind of wrong value has its own
        reason = " ".join(str(error).split())[:300]
        raise UsageError(
            f"transformers cannot read config.json ({reason}): correct it, or download it again"
        ) from error


def _common_fields(file: File) -> Fields:
    fields = {name: file[name] for name in (*_SIZES, *_SAME) if file.get(name) is not None}
    return {"head_dim": file["hidden_size"] // file["num_attention_heads"]} | fields


def _common_file(config: ModelConfig) -> File:
    written = {name: getattr(config, name) for name in (*_SIZES, *_SAME, "sliding_window")}
    written |= {
        "rope_parameters": _rope_parameters(config),
        "rope_theta": config.rope_theta,  # for readers of before transformers 5
        "attention_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
    }
    if config.max_position_embeddings:
        written["max_position_embeddings"] = config.max_position_embeddings
    return written


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


def _layer_types(config: ModelConfig) -> File:
    """The inverse of `_window`."""
    return {"layer_types": ["sliding_attention" if window else "full_attention" for window in config.windows]}


# ---- families


def _llama(file: File) -> Fields:
    return _attention_bias(file) | {"mlp_bias": bool(file.get("mlp_bias"))}


def _qwen_windows(config: ModelConfig) -> File:
    return {"use_sliding_window": True, **_layer_types(config)} if config.sliding_window else {}


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


def _mixtral_experts(config: ModelConfig) -> File:
    experts = config.experts
    if experts is None:
        return {}
    return {"num_local_experts": experts.num_experts, "num_experts_per_tok": experts.num_experts_per_tok}


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


def _qwen3_moe_experts(config: ModelConfig) -> File:
    if config.experts is None:
        return {}
    always = {"decoder_sparse_step": 1, "mlp_only_layers": [], "num_local_experts": config.experts.num_experts}
    return config.experts._asdict() | always | {"use_sliding_window": config.sliding_window is not None}


# Transformers' default is a token that a small vocabulary does not have.
_NO_PADDING = {"pad_token_id": None}


def _smollm3(file: File) -> Fields:
    rotates, count = file["no_rope_layers"], file["num_hidden_layers"]
    if len(rotates) < count:
        raise UsageError(f"no_rope_layers is {abbreviate(rotates)}: it must have a 0 or 1 for each of {count} layers")
    unrotated = tuple(layer for layer in range(count) if not rotates[layer])
    return {"unrotated_layers": unrotated, **_window(file), **_llama(file)}


def _smollm3_file(config: ModelConfig) -> File:
    rotates = [int(rotation is not None) for rotation in config.rotations]
    return {"no_rope_layers": rotates, **_qwen_windows(config), **_NO_PADDING}


def _olmo2(file: File) -> Fields:
    return {"norms": "after", "qk_norm": True, "qk_norm_across_heads": True, **_attention_bias(file)}


def _phi3(file: File) -> Fields:
    return {"fused_projections": True, **_window(file)}


def _phi3_file(config: ModelConfig) -> File:
    part, rope = {"partial_rotary_factor": config.partial_rotary_factor}, _rope_parameters(config)
    original = {x: y for x, y in rope.items() if x == "original_max_position_embeddings"}
    return {"rope_parameters": rope | part, **part, **original, **_NO_PADDING}


def _gemma(file: File) -> Fields:
    scaled = {"zero_centered_norms": True, "embedding_multiplier": file["hidden_size"] ** 0.5}
    return scaled | _attention_bias(file)


def _gemma2(file: File) -> Fields:
    return {
        "norms": "around",
        "hidden_act": file["hidden_activation"],
        "query_pre_attn_scalar": file["query_pre_attn_scalar"],
        "attn_logit_softcapping": file["attn_logit_softcapping"],
        "final_logit_softcapping": file["final_logit_softcapping"],
        **_gemma(file),
        **_window(file),
    }


def _gemma2_file(config: ModelConfig) -> File:
    names = "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"
    values = {name: getattr(config, name) for name in names}
    return values | {"hidden_activation": config.hidden_act, **_layer_types(config)}


def _gemma3(file: File) -> Fields:
    if file["attn_logit_softcapping"] is not None:  # transformers reads it and does not compute it
        raise UsageError("attn_logit_softcapping is not supported in Gemma 3")
    return {"qk_norm": True, **_gemma2(file)}


def _gemma3_file(config: ModelConfig) -> File:
    local = {"rope_type": "default", "rope_theta": config.rope_local_base_freq}
    rope = {"full_attention": _rope_parameters(config), "sliding_attention": local}
    return {"rope_parameters": rope, "rope_local_base_freq": config.rope_local_base_freq, **_gemma2_file(config)}


# By model_type. A configuration that several have is written as the first one.
FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", _llama),
    "mistral": Family("Mistral", _window),
    "qwen2": Family("Qwen2", _qwen2, _qwen_windows),
    "qwen3": Family("Qwen3", _qwen3, _qwen_windows),
    "smollm3": Family("SmolLM3", _smollm3, _smollm3_file),
    "olmo2": Family("Olmo2", _olmo2),
    "phi3": Family("Phi3", _phi3, _phi3_file, rope=_partial_rope),
    "gemma": Family("Gemma", _gemma),
    "gemma2": Family("Gemma2", _gemma2, _gemma2_file),
    "gemma3_text": Family("Gemma3", _gemma3, _gemma3_file, "Gemma3Text", _rope_by_layer),
    "mixtral": Family("Mixtral", _mixtral, _mixtral_experts),
    "qwen3_moe": Family("Qwen3Moe", _qwen3_moe, _qwen3_moe_experts),
}
