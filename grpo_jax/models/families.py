"""Conversion between `ModelConfig` and config.json of the model families of transformers.

All families are settings of one decoder. transformers completes a file with its defaults and converts it to the format
of version 5. Names that the family's class in transformers does not know are dropped. All files are then read in the
same way, except for fields of Gemma. A row of FAMILIES holds the other fields of `ModelConfig`, which are the same in
every model of the family.
"""

import os
from copy import deepcopy
from typing import Any, get_args, get_type_hints

from grpo_jax.errors import UsageError, abbreviate
from grpo_jax.models.config import DeltaConfig, ExpertsConfig, Heads, ModelConfig, RopeScaling
from grpo_jax.options import check_types

File = dict[str, Any]  # the contents of a config.json
Fields = dict[str, Any]  # fields of ModelConfig by name


def config_from_huggingface(config: File, **overrides: Any) -> ModelConfig:
    """Converts the contents of a config.json, written by transformers 5 or earlier, to a `ModelConfig`.

    Args:
      config: The contents of config.json.
      **overrides: The fields of ModelConfig that the file does not determine, NOT_IN_FILES and longest_text.

    Returns:
      The configuration of the decoder.

    Raises:
      UsageError: The file needs something that this decoder does not compute.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UsageError(
            f"model_type {abbreviate(model_type)} is not supported{_refused(config)}; choose one of {tuple(FAMILIES)}"
        )
    _check(config)
    # A model without this number has no known limit, and no warning about long texts.
    longest = {"max_position_embeddings": config.get("max_position_embeddings")}
    _, constants = FAMILIES[model_type]
    return ModelConfig(**_fields(_complete(config)) | longest | constants, **overrides)


def text_part(config: File) -> File:
    """Returns the config.json of the text model, if the file describes one with a tower for images, as Qwen3.5 does.

    Args:
      config: The contents of a config.json. It is returned unchanged if it has no text model of a supported family.
    """
    text, tie = config.get("text_config"), "tie_word_embeddings"
    if not isinstance(text, dict) or text.get("model_type") not in FAMILIES:
        return config
    outer = {name: config[name] for name in ("eos_token_id", "dtype", "quantization_config") if name in config}
    text = text | {tie: config[tie]} if tie in config else text  # the class of the whole model reads the outer value
    return outer | text | {"architectures": [f"{FAMILIES[text['model_type']][0]}ForCausalLM"]}


def config_to_huggingface(config: ModelConfig) -> File:
    """Makes the config.json of a model that was not loaded from one. `config_from_huggingface` reads it back.

    Args:
      config: The configuration of the decoder.

    Returns:
      The contents of config.json for the first family that has this configuration, with `rope_parameters` as in
      transformers 5.

    Raises:
      UsageError: No supported family has this combination of fields.
    """
    not_in_the_file: Fields = {name: getattr(config, name) for name in (*NOT_IN_FILES, "longest_text")}

    def reads_back(written: File) -> bool:
        try:
            return config_from_huggingface(written, **not_in_the_file) == config
        except UsageError:
            return False

    for model_type, (name, _) in FAMILIES.items():
        written = {"architectures": [f"{name}ForCausalLM"], "model_type": model_type} | _file(model_type, config)
        if reads_back(written):
            return written
    raise UsageError(f"no model of transformers has this combination of options: {config}")


# ---- fields of all files

# Fields of `ModelConfig` that no config.json determines
NOT_IN_FILES = ("dtype", "rounding", "remat", "attention", "router")

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_CAPS = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")  # Gemma's
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")  # Granite's
_SMALL = ("num_kv_shared_layers", "use_double_wide_mlp", "hidden_size_per_layer_input")  # Gemma 4's
_SYNONYMS = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh"}  # of activations
_SAME = ("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "tie_word_embeddings", "initializer_range")


def _config_class(model_type: str) -> Any:
    """Returns the class in transformers that reads the files of a family."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import CONFIG_MAPPING  # takes seconds

    return CONFIG_MAPPING[model_type]


def _complete(file: File) -> File:
    """Returns the file as transformers 5 would write it, with a default for each missing value."""
    # The default tokens of transformers may lie outside a small vocabulary, and it would warn about them.
    tokens, config_class = (
        dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        _config_class(file["model_type"]),
    )
    try:
        # from_dict changes its argument.
        completed = config_class.from_dict(deepcopy(file) | tokens).to_dict()
    except Exception as error:  # each kind of wrong value raises another class
        reason = " ".join(str(error).split())[:300]
        raise UsageError(
            f"transformers cannot read config.json ({reason}): correct it, or download it again"
        ) from error
    known = config_class().to_dict() | {"head_dim": None}  # Qwen3-MoE reads it, but its class does not list it
    if ("full_attention" in completed["rope_parameters"]) != ("full_attention" in known["rope_parameters"]):
        raise UsageError("rope_parameters that differ between layers are not supported in this family")
    return {name: value for name, value in completed.items() if name in known}


def _fields(file: File) -> Fields:
    """Returns the fields that a complete file determines, without the constants of its family."""
    heads, layers = file["num_attention_heads"], file["num_hidden_layers"]
    fields = {name: file[name] for name in (*_SIZES, *_SAME, *_CAPS, *_MULTIPLIERS) if file.get(name) is not None}
    fields = {"head_dim": file["hidden_size"] // heads} | fields | _rope(file) | _experts(file)
    fields |= dict.fromkeys(("qkv_bias", "o_bias"), bool(file.get("attention_bias")))
    fields |= {"mlp_bias": bool(file.get("mlp_bias"))}
    fields["unrotated_layers"] = tuple(i for i, rotated in enumerate(file.get("no_rope_layers") or ()) if not rotated)
    kinds = file.get("layer_types") or ["sliding_attention"] * layers
    sliding = tuple(layer for layer in range(layers) if kinds[layer] == "sliding_attention")
    if file.get("sliding_window") and sliding:
        fields["sliding_window"] = file["sliding_window"]
        fields["sliding_layers"] = sliding if len(sliding) < layers else None
    linear = {"linear_attention"} if "linear_conv_kernel_dim" in file else set()
    if unknown := set(kinds) - {"sliding_attention", "full_attention"} - linear:
        raise UsageError(f"layer_types {abbreviate(sorted(unknown))} are not supported")
    delta = tuple(layer for layer in range(layers) if kinds[layer] == "linear_attention")
    if delta:
        sizes = [file[f"linear_{name}"] for name in DeltaConfig._fields[:-1]]
        fields["delta"] = DeltaConfig(*sizes)._replace(has_fused_tensors=file["model_type"] == "qwen3_next")
        fields["delta_layers"] = delta
    for dropout in ("resid_pdrop", "embd_pdrop", "attention_dropout"):
        if file["model_type"] == "phi3" and file[dropout]:
            raise UsageError(f"{dropout} {abbreviate(file[dropout])} is not supported, only 0")
    if file["model_type"].startswith("gemma"):
        fields["embedding_multiplier"] = file["hidden_size"] ** 0.5
        fields["hidden_act"] = file.get("hidden_activation") or file["hidden_act"]
    fields["hidden_act"] = _SYNONYMS.get(fields["hidden_act"], fields["hidden_act"])
    if delta and fields["hidden_act"] != "silu":  # their convolutions have it too
        raise UsageError(f"hidden_act {abbreviate(fields['hidden_act'])} is not supported with delta nets, only silu")
    if file["model_type"] == "gemma4_text":
        fields |= _gemma4(file)
    if file["model_type"] == "gemma3_text" and file["attn_logit_softcapping"] is not None:
        raise UsageError("attn_logit_softcapping is not supported in Gemma 3")  # transformers does not compute it
    return fields


def _gemma4(file: File) -> Fields:
    """Returns the fields that only Gemma 4 has."""
    layers = range(file["num_hidden_layers"])
    is_global = [kind == "full_attention" for kind in file["layer_types"]]
    per_layer = {int(layer): heads for layer, heads in (file.get("per_layer_config") or {}).items()}
    changed = per_layer.get(is_global.index(True), {})
    if [per_layer.get(i, {}) for i in layers] != [changed if x else {} for x in is_global] or changed.keys() - set(
        Heads._fields
    ):
        raise UsageError("per_layer_config is supported only for the heads of all layers without a window")
    heads = {name: changed.get(name, file[name]) for name in Heads._fields[:2]}
    rope = file["rope_parameters"]["full_attention"]
    if rope["rope_type"] == "proportional":
        heads["turning"] = rope.get("partial_rotary_factor", 1.0)
    if file["hidden_size_per_layer_input"] and file["vocab_size_per_layer_input"] != file["vocab_size"]:
        raise UsageError("vocab_size_per_layer_input must be vocab_size")
    fields = {name: file[name] for name in _SMALL}
    return fields | {"global_heads": Heads(**heads, keys_are_values=file["attention_k_eq_v"])}


def _gemma4_experts(file: File) -> Fields:
    names = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if not file["enable_moe_block"]:
        return {}
    if lacking := [name for name in names if file[name] is None]:
        raise UsageError(f"enable_moe_block needs {', '.join(lacking)}")
    num_experts, num_chosen, width = (file[name] for name in names)
    experts = ExpertsConfig(num_experts, num_chosen, width, True, file["intermediate_size"], has_norms=True)
    return {"experts": experts}


def _experts(file: File) -> Fields:
    """Returns the field of the mixture of experts, if the model has one."""
    if file.get("swiglu_alpha", 1.702) != 1.702:
        raise UsageError(f"swiglu_alpha {abbreviate(file['swiglu_alpha'])} is not supported, only 1.702")
    if "enable_moe_block" in file:
        return _gemma4_experts(file)
    num_experts = file.get("num_local_experts", file.get("num_experts"))
    if not num_experts:
        return {}
    sizes = num_experts, file["num_experts_per_tok"]
    width: Any = file.get("moe_intermediate_size", file.get("intermediate_size"))
    dense, step = file.get("mlp_only_layers") or (), file.get("decoder_sparse_step", 1)
    layers = range(file["num_hidden_layers"])
    return {
        "experts": ExpertsConfig(
            *sizes,
            width,
            file.get("norm_topk_prob", True),
            file.get("shared_expert_intermediate_size"),
            file.get("swiglu_limit"),
        ),
        "dense_layers": tuple(i for i in layers if i in dense or (i + 1) % step),
    }


def _file(model_type: str, config: ModelConfig) -> File:
    """Returns the entries of a config.json of this family, by the names of its class in transformers."""
    known = _config_class(model_type)().to_dict()
    rope: dict[str, Any] = _rope_parameters(config)
    names = (*_SIZES, *_SAME, *_CAPS, *_MULTIPLIERS, *_SMALL, "sliding_window", "mlp_bias")
    written = {name: getattr(config, name) for name in names}
    written |= config.experts._asdict() | {"num_local_experts": config.experts.num_experts} if config.experts else {}
    written |= {
        "hidden_activation": config.hidden_act,
        "vocab_size_per_layer_input": config.vocab_size,
        "attention_bias": config.qkv_bias,
        "use_sliding_window": config.sliding_window is not None,
        "layer_types": [
            "linear_attention" if form.mixer == "delta" else "sliding_attention" if window else "full_attention"
            for form, window in zip(config.forms, config.windows, strict=True)
        ],
        "no_rope_layers": [int(rotation is not None) for rotation in config.rotations],
        "max_position_embeddings": config.max_position_embeddings,
        "mlp_only_layers": list(config.dense_layers),
    }
    if "partial_rotary_factor" in known["rope_parameters"]:
        rope["partial_rotary_factor"] = config.partial_rotary_factor
    if config.rope_scaling:  # Phi has it beside `rope_parameters`
        written["original_max_position_embeddings"] = config.rope_scaling.original_max_position_embeddings
    if heads := config.global_heads:
        shape = {name: getattr(heads, name) for name in Heads._fields[:2]}
        written["per_layer_config"] = {str(i): shape for i, window in enumerate(config.windows) if window is None}
        written["attention_k_eq_v"] = heads.keys_are_values
        rope |= {"rope_type": "proportional", "partial_rotary_factor": heads.turning}
    if config.experts and config.experts.has_norms:
        written |= {"enable_moe_block": True, "top_k_experts": config.experts.num_experts_per_tok}
    if config.delta:
        written |= {f"linear_{name}": value for name, value in config.delta._asdict().items()}
    # Earlier versions of transformers read these names.
    always: File = {name: written[name] for name in ("head_dim", "num_experts") if name in written}
    written = {name: value for name, value in written.items() if name in known and value is not None}
    if (known.get("pad_token_id") or 0) >= config.vocab_size:
        written["pad_token_id"] = None
    if "full_attention" in known["rope_parameters"]:
        local = config.rope_local_base_freq or config.rope_theta
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": local}}
        always |= {"rope_local_base_freq": local} if model_type == "gemma3_text" else {}
    return written | always | {"rope_parameters": rope, "rope_theta": config.rope_theta}


def _check(file: File) -> None:
    """Refuses a file that needs a feature which no family has, or whose sizes transformers could not read."""
    quantization = file.get("quantization_config")
    is_mxfp4 = isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"
    harmless: dict[str, tuple[Any, ...]] = {
        "quantization_config": (None, quantization) if is_mxfp4 and file["model_type"] == "gpt_oss" else (None,),
        # Gemma 4 has "vision": tokens of images see each other, and those of texts do not.
        "use_bidirectional_attention": (None, False, "vision"),
        "is_causal": (None, True),
        "transformers_weights": (None,),
    }
    for name, values in harmless.items():
        if file.get(name) not in values:
            raise UsageError(f"{name} {abbreviate(file[name])} is not supported")
    check_types(ModelConfig, {name: file[name] for name in _SIZES if name in file})


def _refused(file: File) -> str:
    """Returns the reason why a model is not supported, or "" if it is unknown."""
    if any(name in file for name in ("vision_config", "audio_config", "text_config")):
        return " (a model with towers for images or sound: take a text model)"
    return ""


# ---- rotations


def _rope(file: File) -> Fields:
    """Returns the base and the scaling. Layers with a window may have a different base, without scaling: Gemma 3."""
    rope, local = file["rope_parameters"], None
    if "full_attention" in rope:
        rope, local = rope["full_attention"], rope["sliding_attention"]
        if file["model_type"] == "gemma4_text":  # `_gemma4` reads the share of features that turn
            if rope["rope_type"] not in ("default", "proportional") or rope.get("factor", 1.0) != 1:
                raise UsageError(f"rope scaling {abbreviate(rope)} is not supported in Gemma 4")
            rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        if _scaling(local, file):
            raise UsageError(f"rope scaling {abbreviate(local)} of layers with a window is not supported")
    fields = {"rope_theta": rope["rope_theta"], "rope_scaling": _scaling(rope, file)}
    if (share := rope.get("partial_rotary_factor")) not in (None, 1.0):
        if file["model_type"] not in _PARTLY_ROTATED:
            raise UsageError(f"partial_rotary_factor {abbreviate(share)} is not supported in this family")
        fields["partial_rotary_factor"] = share
    return fields if local is None else fields | {"rope_local_base_freq": local["rope_theta"]}


def _scaling(rope: dict[str, Any], file: File) -> RopeScaling | None:
    if rope["rope_type"] == "default":
        return None
    if rope["rope_type"] not in _SCALINGS:
        raise UsageError(
            f"rope scaling {abbreviate(rope)} is not supported, only {_SCALINGS}: choose a model with one of these"
        )
    longest = file["max_position_embeddings"]
    fields = {name: rope[name] for name in RopeScaling._fields if rope.get(name) is not None}
    if rope["rope_type"] == "dynamic":
        fields["original_max_position_embeddings"] = longest  # transformers reads no other value
    fields = {"original_max_position_embeddings": longest} | fields
    if rope["rope_type"] in ("yarn", "longrope") and rope.get("factor") is None:
        fields["factor"] = longest / fields["original_max_position_embeddings"]
    if rope["rope_type"] == "longrope":
        fields |= {name: tuple(fields[name]) for name in ("short_factor", "long_factor") if name in fields}
    return RopeScaling(**fields)


_PARTLY_ROTATED = ("phi3", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "glm4")
_SCALINGS = get_args(get_type_hints(RopeScaling)["rope_type"])


def _rope_parameters(config: ModelConfig) -> dict[str, Any]:
    """Inverts `_rope` without the share of features that turn, in the format of transformers 5."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling := config.rope_scaling:
        fields = {x: y for x, y in scaling._asdict().items() if y != scaling._field_defaults.get(x, ...)}
        if scaling.rope_type in ("linear", "dynamic"):
            del fields["original_max_position_embeddings"]  # transformers does not know it for these
        rope |= {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
    return rope


# ---- families


_QWEN_NEXT: Fields = {"qk_norm": True, "zero_centered_norms": True, "gated_attention": True}
_OLMO: Fields = {"norms": "after", "qk_norm": True, "qk_norm_across_heads": True}
_GEMMA: Fields = {"zero_centered_norms": True}
_GEMMA4: Fields = {"norms": "around", "qk_norm": True, "value_norm": True, "layer_scales": True}
# By model_type: the family's name in class names, such as LlamaForCausalLM, and the fields that all its models share.
# A configuration that fits several families is written as the first of them.
FAMILIES: dict[str, tuple[str, Fields]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {}),
    "qwen2": ("Qwen2", {"qkv_bias": True}),
    "qwen3": ("Qwen3", {"qk_norm": True}),
    "smollm3": ("SmolLM3", {}),
    "olmo2": ("Olmo2", _OLMO),
    "olmo3": ("Olmo3", _OLMO),
    "phi3": ("Phi3", {"file_layout": "phi3"}),
    "granite": ("Granite", {}),
    "glm4": ("Glm4", {"norms": "around", "file_layout": "glm4", "o_bias": False}),
    "gemma": ("Gemma", _GEMMA),
    "gemma2": ("Gemma2", _GEMMA | {"norms": "around"}),
    "gemma3_text": ("Gemma3", _GEMMA | {"norms": "around", "qk_norm": True}),
    "mixtral": ("Mixtral", {}),
    "qwen3_moe": ("Qwen3Moe", {"qk_norm": True}),
    "qwen3_5_text": ("Qwen3_5", _QWEN_NEXT),
    "qwen3_5_moe_text": ("Qwen3_5Moe", _QWEN_NEXT),
    "qwen3_next": ("Qwen3Next", _QWEN_NEXT),
    "gpt_oss": ("GptOss", {"attention_sinks": True, "hidden_act": "silu"}),
    "gemma4_text": ("Gemma4", _GEMMA4 | {"attention_multiplier": 1.0}),
}
