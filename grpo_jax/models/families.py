"""config.json of the model families of transformers: onto `ModelConfig`, and back.

All families are settings of one decoder. What their files have in common is read once. The rest is a row of FAMILIES: a
family is what a file means that leaves something out, a function from the file to the fields of `ModelConfig` that are
the family's own, and one that writes what the other reads.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from grpo_jax.errors import UsageError, abbreviate
from grpo_jax.models.config import (
    MOST,
    DynamicScaling,
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
    defaults: Mapping[str, Any] = {}  # of transformers, for a file that leaves something out
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
    config = {**family.defaults, **config}
    _check(config)
    rope = (family.rope or _rope)(config)
    return ModelConfig(**_common_fields(config) | rope | family.fields(config), **overrides)


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


def _common_fields(file: File) -> Fields:
    heads = file["num_attention_heads"]
    return {name: file[name] for name in _SIZES} | {
        "num_key_value_heads": _or(file.get("num_key_value_heads"), heads),
        "head_dim": _or(file.get("head_dim"), file["hidden_size"] // heads),
        "hidden_act": file.get("hidden_act", "silu"),
        "rms_norm_eps": file.get("rms_norm_eps", 1e-6),
        "tie_word_embeddings": bool(file.get("tie_word_embeddings")),
        "max_position_embeddings": file.get("max_position_embeddings"),
        "initializer_range": file.get("initializer_range", 0.02),
    }


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


def _or(value: Any, default: Any) -> Any:
    """The value, or the default where there is none; 0 is one, and is refused where it makes no sense."""
    return default if value is None else value


def _check(file: File) -> None:
    """Refuses a file that asks for what no family has, lacks a size, or whose sizes are none.

    What is optional `ModelConfig` checks.
    """
    for unsupported in ("quantization_config", "use_bidirectional_attention"):
        if file.get(unsupported):
            raise UsageError(f"{unsupported} {abbreviate(file[unsupported])} is not supported")
    if missing := [name for name in _SIZES if name not in file]:
        raise UsageError(f"config.json lacks {', '.join(missing)}")
    for name in _SIZES:
        check_whole(name, file[name], MOST[name])
    for name in ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"):
        if not isinstance(file.get(name), bool | None):
            raise UsageError(f"{name} is {abbreviate(file[name])}: it must be true or false")
    heads = file["num_attention_heads"]
    if file.get("head_dim") is None and file["hidden_size"] % heads:
        raise UsageError(
            f"hidden_size ({file['hidden_size']}) must be a multiple of num_attention_heads ({heads}), unless there "
            "is a head_dim"
        )


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
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (earlier)."""
    rope = _rope_object(file)
    if any(isinstance(value, dict) for value in rope.values()):
        raise UsageError("rope_parameters that differ between layers are not supported in this family")
    for part in (rope, file):
        if part.get("partial_rotary_factor") not in (None, 1.0):
            raise UsageError(f"partial_rotary_factor {abbreviate(part['partial_rotary_factor'])} is not supported")
    return _one_rope(rope, file)


def _rope_object(file: File) -> dict[str, Any]:
    rope = file.get("rope_parameters") or file.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UsageError(f"the rope scaling is {abbreviate(rope)}: it must be an object")
    return rope


def _one_rope(rope: dict[str, Any], file: File) -> Fields:
    theta = _or(_or(rope.get("rope_theta"), file.get("rope_theta")), 10000.0)
    return {"rope_theta": theta, "rope_scaling": _scaling(rope, file)}


# By rope_type.
_SCALINGS: dict[str, type[RopeScaling]] = {
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
    "longrope": LongRopeScaling,
}


def _scaling(rope: dict[str, Any], file: File) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind not in _SCALINGS:
        raise UsageError(f"rope scaling {abbreviate(rope)} is not supported, only {tuple(_SCALINGS)}")
    scaling: Any = _SCALINGS[kind]
    fields = {name: value for name, value in rope.items() if value is not None}
    fields |= _implied(kind, fields, file)
    if missing := [x for x in scaling._fields if x not in fields and x not in scaling._field_defaults]:
        raise UsageError(f"rope scaling {kind} in config.json lacks {', '.join(missing)}")
    values = {name: fields[name] for name in scaling._fields if name in fields}
    return scaling(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _implied(kind: str, rope: dict[str, Any], file: File) -> dict[str, Any]:
    """Fields that transformers takes from elsewhere in the file, or derives from the scaling."""
    longest, length = file.get("max_position_embeddings"), "original_max_position_embeddings"
    original = longest if kind == "dynamic" else _or(_or(file.get(length), rope.get(length)), longest)
    implied = {} if original is None else {length: original}
    if kind == "longrope" and "factor" not in rope and longest and original:
        implied |= {"factor": longest / original}
    if kind == "yarn" and "attention_factor" not in rope and all(rope.get(x) for x in ("mscale", "mscale_all_dim")):
        logarithm = 0.1 * math.log(max(rope["factor"], 1.0))
        implied |= {"attention_factor": (rope["mscale"] * logarithm + 1) / (rope["mscale_all_dim"] * logarithm + 1)}
    return implied


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
    rope = _rope_object(file)
    everywhere: dict[str, Any] = rope
    local: dict[str, Any] = {}
    if rope.keys() <= {"full_attention", "sliding_attention"}:
        everywhere, local = rope.get("full_attention") or {}, rope.get("sliding_attention") or {}
    if _scaling(local, file):
        raise UsageError(f"rope scaling {abbreviate(local)} of layers with a window is not supported")
    local_theta = _or(local.get("rope_theta"), file["rope_local_base_freq"])
    return _one_rope(everywhere, file) | {"rope_local_base_freq": local_theta}


def _partial_rope(file: File) -> Fields:
    """Phi's: of a part of the features. Its first files call longrope by other names."""
    rope = _rope_object(file)
    if rope.get("type") in ("su", "yarn"):
        rope = rope | {"type": "longrope"}
    part = _or(_or(rope.get("partial_rotary_factor"), file.get("partial_rotary_factor")), 1.0)
    return _one_rope(rope, file) | {"partial_rotary_factor": part}


# ---- what several families say


def _attention_bias(file: File) -> Fields:
    """Reads one flag for the biases of all four projections."""
    return dict.fromkeys(("qkv_bias", "o_bias"), bool(file.get("attention_bias")))


def _layers_of_kind(kind: str, file: File) -> tuple[int, ...] | None:
    """The layers that layer_types gives this kind; None: the file does not say."""
    kinds, count = file.get("layer_types"), file["num_hidden_layers"]
    if not kinds:
        return None
    if not isinstance(kinds, Sequence) or len(kinds) < count:
        raise UsageError(f"layer_types is {abbreviate(kinds)}: it must name the kind of each of {count} layers")
    return tuple(layer for layer in range(count) if kinds[layer] == kind)


def _window_in(layers: Sequence[int], file: File) -> Fields:
    """The window in these layers, where the file has one."""
    window = file.get("sliding_window")
    if not window or not layers:
        return {}
    all_layers = len(layers) == file["num_hidden_layers"]
    return {"sliding_window": window, "sliding_layers": None if all_layers else tuple(layers)}


def _layer_types(config: ModelConfig) -> File:
    """The inverse of `_layers_of_kind`."""
    return {"layer_types": ["sliding_attention" if window else "full_attention" for window in config.windows]}


# ---- families


def _llama(file: File) -> Fields:
    return _attention_bias(file) | {"mlp_bias": bool(file.get("mlp_bias"))}


def _mistral(file: File) -> Fields:
    return _window_in(range(file["num_hidden_layers"]), file)


def _qwen_window(file: File) -> Fields:
    """Only with use_sliding_window, and in the layers from max_window_layers on unless layer_types says which."""
    if not file.get("use_sliding_window"):
        return {}
    first = file["max_window_layers"]
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise UsageError(f"max_window_layers is {abbreviate(first)}: it must be a whole number of at least 0")
    return _window_in(_or(_layers_of_kind("sliding_attention", file), range(file["num_hidden_layers"])[first:]), file)


def _qwen_windows(config: ModelConfig) -> File:
    return {"use_sliding_window": True, **_layer_types(config)} if config.sliding_window else {}


def _qwen2(file: File) -> Fields:
    return {"qkv_bias": True, **_qwen_window(file)}


def _qwen3(file: File) -> Fields:
    return {"qk_norm": True, **_attention_bias(file), **_qwen_window(file)}


def _mixtral(file: File) -> Fields:
    experts = ExpertsConfig(
        num_experts=file["num_local_experts"],
        num_experts_per_tok=file["num_experts_per_tok"],
        moe_intermediate_size=file["intermediate_size"],
        norm_topk_prob=True,
    )
    return {**_mistral(file), "experts": experts}


def _mixtral_experts(config: ModelConfig) -> File:
    experts = config.experts
    if experts is None:
        return {}
    return {"num_local_experts": experts.num_experts, "num_experts_per_tok": experts.num_experts_per_tok}


def _qwen3_moe(file: File) -> Fields:
    """Reads a mixture of experts. If there is a window, all layers have it."""
    if file.get("mlp_only_layers") or file.get("decoder_sparse_step", 1) != 1:
        raise UsageError("mlp_only_layers and decoder_sparse_step are not supported: every layer must have experts")
    experts = ExpertsConfig(
        num_experts=file["num_experts" if "num_experts" in file else "num_local_experts"],  # in transformers 5
        num_experts_per_tok=file["num_experts_per_tok"],
        moe_intermediate_size=file["moe_intermediate_size"],
        norm_topk_prob=file["norm_topk_prob"],
    )
    window = _mistral(file) if file.get("use_sliding_window") else {}
    return {"qk_norm": True, **_attention_bias(file), **window, "experts": experts}


def _qwen3_moe_experts(config: ModelConfig) -> File:
    if config.experts is None:
        return {}
    always = {"decoder_sparse_step": 1, "mlp_only_layers": [], "num_local_experts": config.experts.num_experts}
    return config.experts._asdict() | always | {"use_sliding_window": config.sliding_window is not None}


_QWEN = {"sliding_window": 4096, "max_window_layers": 28}


# Transformers' default is a token that a small vocabulary does not have.
_NO_PADDING = {"pad_token_id": None}


def _smollm3(file: File) -> Fields:
    """The window, with use_sliding_window, is in layers without rotation unless layer_types says in which."""
    layers = range(file["num_hidden_layers"])
    rotates, interval = file.get("no_rope_layers"), file["no_rope_layer_interval"]
    if rotates is None:
        check_whole("no_rope_layer_interval", interval, MOST["num_hidden_layers"])
        rotates = [(layer + 1) % interval for layer in layers]
    if not isinstance(rotates, Sequence) or len(rotates) < len(layers):
        raise UsageError(
            f"no_rope_layers is {abbreviate(rotates)}: it must have a 0 or 1 for each of {len(layers)} layers"
        )
    unrotated = tuple(layer for layer in layers if not rotates[layer])
    sliding = _or(_layers_of_kind("sliding_attention", file), unrotated) if file.get("use_sliding_window") else ()
    return {"unrotated_layers": unrotated, **_window_in(sliding, file), **_llama(file)}


def _smollm3_file(config: ModelConfig) -> File:
    rotates = [int(rotation is not None) for rotation in config.rotations]
    return {"no_rope_layers": rotates, **_qwen_windows(config), **_NO_PADDING}


def _olmo2(file: File) -> Fields:
    return {"norms": "after", "qk_norm": True, "qk_norm_across_heads": True, **_attention_bias(file)}


def _phi3(file: File) -> Fields:
    return {"fused_projections": True, **_window_in(range(file["num_hidden_layers"]), file)}


def _phi3_file(config: ModelConfig) -> File:
    part, rope = {"partial_rotary_factor": config.partial_rotary_factor}, _rope_parameters(config)
    original = {x: y for x, y in rope.items() if x == "original_max_position_embeddings"}
    return {"rope_parameters": rope | part, **part, **original, **_NO_PADDING}


def _gemma(file: File) -> Fields:
    scaled = {"zero_centered_norms": True, "embedding_multiplier": file["hidden_size"] ** 0.5}
    return scaled | _attention_bias(file)


def _gemma2(file: File) -> Fields:
    """Layers with the window and without take turns unless layer_types says which have it."""
    sliding = _layers_of_kind("sliding_attention", file)
    if sliding is None:
        every = file["sliding_window_pattern"]
        check_whole("sliding_window_pattern", every, MOST["num_hidden_layers"])
        sliding = tuple(layer for layer in range(file["num_hidden_layers"]) if (layer + 1) % every)
    return {
        "norms": "around",
        "hidden_act": file["hidden_activation"],
        "query_pre_attn_scalar": file["query_pre_attn_scalar"],
        "attn_logit_softcapping": file["attn_logit_softcapping"],
        "final_logit_softcapping": file["final_logit_softcapping"],
        **_gemma(file),
        **_window_in(sliding, file),
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


_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6, "rms_norm_eps": 1e-5}
_QWEN3_MOE = {
    "sliding_window": 4096,
    "num_local_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
}
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}
_GEMMA2 = {
    **_GEMMA,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3 = {
    **_GEMMA2,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window_pattern": 6,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
_SMOLLM3 = {"rope_theta": 2e6, "tie_word_embeddings": True, "no_rope_layer_interval": 4, "sliding_window": None}
_OLMO2 = {"rms_norm_eps": 1e-5}
_PHI3 = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}

# By model_type. A configuration that several have is written as the first one.
FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", _llama),
    "mistral": Family("Mistral", _mistral, defaults={"sliding_window": 4096}),
    "qwen2": Family("Qwen2", _qwen2, _qwen_windows, _QWEN),
    "qwen3": Family("Qwen3", _qwen3, _qwen_windows, {**_QWEN, "head_dim": 128}),
    "smollm3": Family("SmolLM3", _smollm3, _smollm3_file, _SMOLLM3),
    "olmo2": Family("Olmo2", _olmo2, defaults=_OLMO2),
    "phi3": Family("Phi3", _phi3, _phi3_file, _PHI3, rope=_partial_rope),
    "gemma": Family("Gemma", _gemma, defaults=_GEMMA),
    "gemma2": Family("Gemma2", _gemma2, _gemma2_file, _GEMMA2),
    "gemma3_text": Family("Gemma3", _gemma3, _gemma3_file, _GEMMA3, "Gemma3Text", _rope_by_layer),
    "mixtral": Family("Mixtral", _mixtral, _mixtral_experts, _MIXTRAL),
    "qwen3_moe": Family("Qwen3Moe", _qwen3_moe, _qwen3_moe_experts, _QWEN3_MOE),
}
