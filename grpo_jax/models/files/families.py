"""Reads config.json of the model families of transformers as `ModelConfig`, and names their tensors.

All families are settings of one decoder. transformers completes a file with its defaults and converts it to the format
of version 5. Names that the family's class in transformers does not know are dropped. All files are then read in the
same way. A row of FAMILIES holds what is different: constant fields of `ModelConfig`, fields that only this family
has, and the names of its tensors. A new family is a row, if this decoder computes all of its parts.
"""

import itertools
import os
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple, get_args, get_type_hints

import jax
import numpy as np

from grpo_jax.errors import UsageError, abbreviate
from grpo_jax.models.config import DeltaConfig, ExpertsConfig, Heads, ModelConfig, RopeScaling
from grpo_jax.options import check_type, check_types

File = dict[str, Any]  # the contents of a config.json
Fields = dict[str, Any]  # fields of ModelConfig by name


class Stored(NamedTuple):
    """The tensor in which files hold a leaf, if it is more than a linear map or a vector under another name."""

    name: str
    # (config, number of the leaf's outputs) -> an index: where the tensor has the leaf. If several leaves are the
    # whole of one tensor, they lie one behind the other, in the order of `PROJECTIONS`.
    selection: Callable[[ModelConfig, int], Any] = lambda config, num_outputs: ...
    is_transposed: bool = True  # true for matrices [out, in]


# A module, block or leaf in the parameters of a layer, such as "experts.router" -> its name in a layer of the files, in
# which "{}" stands for the expert. The name of a leaf is complete; modules get ".weight" and ".bias".
Names = dict[str, str | Stored]


class Family(NamedTuple):
    """The parts that the models of a family share."""

    name: str  # in the names of classes, such as Llama in LlamaForCausalLM
    constants: Fields
    names: Names
    # A complete config.json -> the fields that only this family has. It raises if this decoder does not compute them.
    read: Callable[[File], Fields] = lambda file: {}
    scalings: tuple[str, ...] = get_args(get_type_hints(RopeScaling)["rope_type"])
    packed_as: str | None = None  # the quant_method of files that can be read


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
        has_towers = any(name in config for name in ("vision_config", "audio_config", "text_config"))
        reason = " (a model with towers for images or sound: take a text model)" if has_towers else ""
        raise UsageError(
            f"model_type {abbreviate(model_type)} is not supported{reason}; choose one of {tuple(FAMILIES)}"
        )
    _check(config)
    # A model without this number has no known limit, and no warning about long texts.
    longest = {"max_position_embeddings": config.get("max_position_embeddings")}
    family, complete = FAMILIES[model_type], _complete(config)
    fields = _fields(complete) | family.read(complete) | longest | family.constants
    read = ModelConfig(**fields, model_type=model_type, **overrides)
    # JSON also writes floats as whole numbers. From 2^31 devices do not hold these, and no size is so large.
    return replace(read, **jax.tree.map(lambda x: float(x) if type(x) is int and x >= 2**31 else x, vars(read)))


def text_config(config: File) -> File:
    """Returns the config.json of the text model, if the file describes one with a tower for images, as Qwen3.5 does.

    Args:
      config: The contents of a config.json. It is returned unchanged if it has no text model of a supported family.
    """
    text, tie = config.get("text_config"), "tie_word_embeddings"
    if not isinstance(text, dict) or text.get("model_type") not in FAMILIES:
        return config
    names = ("eos_token_id", "dtype", "torch_dtype", "quantization_config")
    outer = {name: config[name] for name in names if name in config}
    text = text | {tie: config[tie]} if tie in config else text  # the class of the whole model reads the outer value
    return outer | text | {"architectures": [f"{FAMILIES[text['model_type']].name}ForCausalLM"]}


def text_module(config: File) -> str:
    """Returns the name of the text model in the class with which AutoModelForCausalLM loads this config.json."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as classes

    text = text_config(config)
    is_alone = text is config or classes.get(str(config.get("model_type"))) in text["architectures"]
    return "model" if is_alone else "model.language_model"


def names_of(config: ModelConfig) -> Names:
    """Returns the names of a decoder's tensors in files, by module. Without a family they are those of Llama."""
    return _NAMES | FAMILIES[config.model_type or "llama"].names


# ---- fields of all files

# Fields of `ModelConfig` that no config.json determines
NOT_IN_FILES = ("dtype", "rounding", "remat", "attention", "router")

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_SYNONYMS = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh"}  # of activations
# Fields that have the names of files
SAME: tuple[str, ...] = ("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "tie_word_embeddings")
SAME += ("initializer_range", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
SAME += ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling", "mlp_bias")
SAME += ("num_kv_shared_layers", "use_double_wide_mlp", "hidden_size_per_layer_input")


def config_class(model_type: str) -> Any:
    """Returns the class in transformers that reads the files of a family."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import CONFIG_MAPPING  # takes seconds

    return CONFIG_MAPPING[model_type]


def _complete(file: File) -> File:
    """Returns the file as transformers 5 would write it, with a default for each missing value."""
    # The default tokens of transformers may lie outside a small vocabulary, and it would warn about them.
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    file = {name: value for name, value in file.items() if name != "num_labels"}  # it would name billions of labels
    family = config_class(file["model_type"])
    try:
        # from_dict changes its argument.
        completed = family.from_dict(deepcopy(file) | tokens).to_dict()
    except Exception as error:  # each kind of wrong value raises another class
        reason = " ".join(str(error).split())[:300]
        raise UsageError(
            f"transformers cannot read config.json ({reason}): correct it, or download it again"
        ) from error
    known = family().to_dict() | {"head_dim": None}  # Qwen3-MoE reads it, but its class does not list it
    rope, known_rope = completed["rope_parameters"], known["rope_parameters"]
    differs, stated = "full_attention" in known_rope, file.get("rope_parameters")
    if stated and differs != ("full_attention" in stated or "sliding_attention" in stated):  # transformers ignores such
        layers = "rope_parameters for full_attention and sliding_attention" if differs else "the same for all layers"
        raise UsageError(f"rope_parameters {abbreviate(stated)} are not supported in this family, only {layers}")
    share = rope.get("full_attention", rope).get("partial_rotary_factor")
    if share not in (None, 1.0) and "partial_rotary_factor" not in known_rope.get("full_attention", known_rope):
        raise UsageError(f"partial_rotary_factor {abbreviate(share)} is not supported in this family")
    return {name: value for name, value in completed.items() if name in known}


def _fields(file: File) -> Fields:
    """Returns the fields that a complete file determines, without the constants of its family."""
    heads, layers = file["num_attention_heads"], file["num_hidden_layers"]
    fields = {name: file[name] for name in (*SIZES, *SAME) if file.get(name) is not None}
    fields = {"head_dim": file["hidden_size"] // heads} | fields | _rope(file) | _experts(file)
    biases = {"qkv_bias": file.get("qkv_bias", file.get("attention_bias")), "o_bias": file.get("attention_bias")}
    fields |= {name: bool(value) for name, value in biases.items()}
    fields["unrotated_layers"] = tuple(i for i, rotated in enumerate(file.get("no_rope_layers") or ()) if not rotated)
    kinds = file.get("layer_types") or ["sliding_attention"] * layers
    sliding = tuple(layer for layer in range(layers) if kinds[layer] == "sliding_attention")
    if file.get("sliding_window") is not None and sliding:
        fields["sliding_window"] = file["sliding_window"]
        fields["sliding_layers"] = sliding if len(sliding) < layers else None
    linear = {"linear_attention"} if "linear_conv_kernel_dim" in file else set()
    if unknown := set(kinds) - {"sliding_attention", "full_attention"} - linear:
        raise UsageError(f"layer_types {abbreviate(sorted(unknown))} are not supported")
    delta = tuple(layer for layer in range(layers) if kinds[layer] == "linear_attention")
    if delta:
        fields["delta"] = DeltaConfig(*[file[f"linear_{name}"] for name in DeltaConfig._fields])
        fields["delta_layers"] = delta
    fields["hidden_act"] = file.get("hidden_activation") or fields["hidden_act"]
    fields["hidden_act"] = _SYNONYMS.get(fields["hidden_act"], fields["hidden_act"])
    if delta and fields["hidden_act"] != "silu":  # their convolutions have it too
        raise UsageError(f"hidden_act {abbreviate(fields['hidden_act'])} is not supported with delta nets, only silu")
    return fields


def _phi3(file: File) -> Fields:
    for dropout in ("resid_pdrop", "embd_pdrop", "attention_dropout"):
        if file[dropout]:
            raise UsageError(f"{dropout} {abbreviate(file[dropout])} is not supported, only 0")
    return {}


def _gemma(file: File) -> Fields:
    return {"embedding_multiplier": file["hidden_size"] ** 0.5}


def _gemma3(file: File) -> Fields:
    if file["attn_logit_softcapping"] is not None:
        raise UsageError("attn_logit_softcapping is not supported in Gemma 3")  # transformers does not compute it
    return _gemma(file)


def _gemma4(file: File) -> Fields:
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
    fields = _gemma(file) | _gemma4_experts(file)
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
    num_experts: Any = file.get("num_local_experts", file.get("num_experts"))
    if "num_experts_per_tok" not in file:  # Gemma 4 has another name for it
        return {}
    check_type("num_experts", num_experts, int)
    sizes = num_experts, file["num_experts_per_tok"]
    width: Any = file.get("moe_intermediate_size", file.get("intermediate_size"))
    listed, step = file.get("mlp_only_layers") or (), file.get("decoder_sparse_step", 1)
    layers = range(file["num_hidden_layers"])
    dense = tuple(i for i in layers if i in listed or (i + 1) % step)
    if not num_experts or len(dense) == len(layers):
        return {}
    return {
        "experts": ExpertsConfig(
            *sizes,
            width,
            file.get("norm_topk_prob", True),
            file.get("shared_expert_intermediate_size"),
            file.get("swiglu_limit"),
        ),
        "dense_layers": dense,
    }


def _check(file: File) -> None:
    """Refuses a file that needs a feature which no family has, or whose sizes transformers could not read."""
    quantization, packed_as = file.get("quantization_config"), FAMILIES[file["model_type"]].packed_as
    is_packed = packed_as and isinstance(quantization, dict) and quantization.get("quant_method") == packed_as
    harmless: dict[str, tuple[Any, ...]] = {
        "quantization_config": (None, quantization) if is_packed else (None,),
        # Gemma 4 has "vision": tokens of images see each other, and those of texts do not.
        "use_bidirectional_attention": (None, False, "vision"),
        "is_causal": (None, True),
        "transformers_weights": (None,),
    }
    for name, values in harmless.items():
        if file.get(name) not in values:
            raise UsageError(f"{name} {abbreviate(file[name])} is not supported")
    check_types(ModelConfig, {name: file[name] for name in SIZES if name in file})


# ---- rotations


def _rope(file: File) -> Fields:
    """Returns the base and the scaling. Layers with a window may have a different base, without scaling: Gemma 3."""
    rope, local = file["rope_parameters"], None
    if "full_attention" in rope:
        # transformers reads `truncate` only if all layers have the same scaling.
        rope, local = rope["full_attention"] | {"truncate": True}, rope["sliding_attention"]
        if local["rope_type"] != "default":
            raise UsageError(f"rope scaling {abbreviate(local)} of layers with a window is not supported")
        check_type("rope_theta of layers with a window", local["rope_theta"], float)  # null is no number
    fields = {"rope_theta": rope["rope_theta"], "rope_scaling": _scaling(rope, file)}
    if local is None and rope.get("partial_rotary_factor") is not None:
        fields["partial_rotary_factor"] = rope["partial_rotary_factor"]
    return fields if local is None else fields | {"rope_local_base_freq": local["rope_theta"]}


def _scaling(rope: dict[str, Any], file: File) -> RopeScaling | None:
    if rope["rope_type"] == "default":
        return None
    if rope["rope_type"] not in (scalings := FAMILIES[file["model_type"]].scalings):
        raise UsageError(
            f"rope scaling {abbreviate(rope)} is not supported, only {scalings}: choose a model with one of these"
        )
    if rope["rope_type"] == "proportional":  # some pairs of features do not turn: see `_gemma4`
        if rope.get("factor", 1.0) != 1:
            raise UsageError(f"rope scaling {abbreviate(rope)} is not supported, only with factor 1")
        return None
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


# ---- parts of tensors


def _adjacent_pairs(config: ModelConfig, num_outputs: int) -> np.ndarray:
    """Returns the features of q_proj or k_proj in files that rotate the features (2i, 2i + 1), for a decoder that
    rotates (i, i + E/2). Queries and keys change places of features alike, so products do not change."""
    features = np.arange(config.head_dim)
    pairs, rest = np.split(features, [config.rotated])
    head = np.concatenate([pairs[::2], pairs[1::2], rest])
    return (np.arange(0, num_outputs, config.head_dim)[:, None] + head).reshape(-1)


def _key_head_rows(parts: str, tensor: str) -> Callable[[ModelConfig, int], np.ndarray]:
    """Returns the outputs of these parts, each for all key heads, of a delta net's tensor in Qwen3-Next.

    The tensor holds all of its parts for one key head after those for another.
    """

    def outputs(config: ModelConfig, _: int) -> np.ndarray:
        delta = config.delta
        assert delta
        values = delta.num_value_heads // delta.num_key_heads  # value heads of a key head
        sizes = dict.fromkeys("qk", delta.key_head_dim) | dict.fromkeys("vz", values * delta.value_head_dim)
        sizes |= dict.fromkeys("ba", values)
        starts = dict(zip(tensor, itertools.accumulate((sizes[part] for part in tensor), initial=0), strict=False))
        heads = sum(sizes[part] for part in tensor) * np.arange(delta.num_key_heads)[:, None]
        return np.concatenate([(heads + starts[part] + np.arange(sizes[part])).reshape(-1) for part in parts])

    return outputs


def _alternating(first: int) -> Callable[[ModelConfig, int], Any]:
    """Returns every second output: gpt-oss."""
    return lambda config, _: np.s_[..., first::2]


# ---- families


# Norms: in files post_attention_layernorm is the norm before the MLP or, in models with output norms, the norm after
# attention.
_NAMES: Names = {
    "input_norm": "input_layernorm",
    "attention_output_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
    "attention": "self_attn",
    "attention.sinks": "self_attn.sinks",
    "mlp": "mlp",
    "delta": "linear_attn",
    "delta.conv.taps": "linear_attn.conv1d.weight",
    "delta.decay.log_rate": "linear_attn.A_log",
    "delta.decay.bias": "linear_attn.dt_bias",
    "experts": "mlp.experts.{}",
    "experts.router": "mlp.gate",
    "shared_expert": "mlp.shared_expert",
    "shared_expert_gate": "mlp.shared_expert_gate",
}
_NORMS_AROUND: Names = {"post_attention_norm": "pre_feedforward_layernorm"}
_GATE_UP: Names = {"mlp.gate_proj": "mlp.gate_up_proj", "mlp.up_proj": "mlp.gate_up_proj"}
_PHI3_NAMES: Names = _GATE_UP | {f"attention.{name}_proj": "self_attn.qkv_proj" for name in "qkv"}
_GLM4_NAMES: Names = _GATE_UP | {
    "attention_output_norm": "post_self_attn_layernorm",
    "mlp_output_norm": "post_mlp_layernorm",
    "attention.q_proj": Stored("self_attn.q_proj", _adjacent_pairs),
    "attention.k_proj": Stored("self_attn.k_proj", _adjacent_pairs),
}
_MIXTRAL_NAMES: Names = {
    "experts.router": "block_sparse_moe.gate",
    "experts.gate_proj": "block_sparse_moe.experts.{}.w1",
    "experts.up_proj": "block_sparse_moe.experts.{}.w3",
    "experts.down_proj": "block_sparse_moe.experts.{}.w2",
}
_QWEN3_NEXT_NAMES: Names = {
    "delta.in_proj_qkv": Stored("linear_attn.in_proj_qkvz", _key_head_rows("qkv", "qkvz")),
    "delta.in_proj_z": Stored("linear_attn.in_proj_qkvz", _key_head_rows("z", "qkvz")),
    "delta.in_proj_b": Stored("linear_attn.in_proj_ba", _key_head_rows("b", "ba")),
    "delta.in_proj_a": Stored("linear_attn.in_proj_ba", _key_head_rows("a", "ba")),
}
_GPT_OSS_NAMES: Names = {
    "experts.router": "mlp.router",
    "experts.gate_proj.kernel": Stored("mlp.experts.gate_up_proj", _alternating(0), is_transposed=False),
    "experts.gate_proj.bias": Stored("mlp.experts.gate_up_proj_bias", _alternating(0)),
    "experts.up_proj.kernel": Stored("mlp.experts.gate_up_proj", _alternating(1), is_transposed=False),
    "experts.up_proj.bias": Stored("mlp.experts.gate_up_proj_bias", _alternating(1)),
    "experts.down_proj.kernel": Stored("mlp.experts.down_proj", is_transposed=False),
    "experts.down_proj.bias": "mlp.experts.down_proj_bias",
}
_GEMMA4_NAMES: Names = _NORMS_AROUND | {
    "experts.gate_proj.kernel": "experts.gate_up_proj",
    "experts.up_proj.kernel": "experts.gate_up_proj",
    "experts.down_proj.kernel": "experts.down_proj",
    "experts.router": "router.proj",
    "experts.router.scale": "router.scale",
    "experts.router.expert_scale": "router.per_expert_scale",
    "experts_input_norm": "pre_feedforward_layernorm_2",
    "experts_output_norm": "post_feedforward_layernorm_2",
    "shared_expert": "mlp",
    "shared_expert_norm": "post_feedforward_layernorm_1",
    "per_layer.per_layer_input_gate": "per_layer_input_gate",
    "per_layer.per_layer_projection": "per_layer_projection",
    "per_layer_norm": "post_per_layer_input_norm",
    "layer_scale.scale": "layer_scalar",
}

_QWEN_NEXT: Fields = {"qk_norm": True, "zero_centered_norms": True, "gated_attention": True}
_OLMO: Fields = {"norms": "after", "qk_norm": True, "qk_norm_across_heads": True}
_GEMMA: Fields = {"zero_centered_norms": True}
_GEMMA4: Fields = {"norms": "around", "qk_norm": True, "value_norm": True, "layer_scales": True}
# By model_type
FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", {}, {}),
    "mistral": Family("Mistral", {}, {}),
    "qwen2": Family("Qwen2", {"qkv_bias": True}, {}),
    "qwen3": Family("Qwen3", {"qk_norm": True}, {}),
    "smollm3": Family("SmolLM3", {}, {}),
    "olmo2": Family("Olmo2", _OLMO, {}),
    "olmo3": Family("Olmo3", _OLMO, {}),
    "phi3": Family("Phi3", {}, _PHI3_NAMES, _phi3),
    "granite": Family("Granite", {}, {}),
    "glm4": Family("Glm4", {"norms": "around", "o_bias": False}, _GLM4_NAMES),
    "gemma": Family("Gemma", _GEMMA, {}, _gemma),
    "gemma2": Family("Gemma2", _GEMMA | {"norms": "around"}, _NORMS_AROUND, _gemma),
    "gemma3_text": Family("Gemma3", _GEMMA | {"norms": "around", "qk_norm": True}, _NORMS_AROUND, _gemma3),
    "mixtral": Family("Mixtral", {}, _MIXTRAL_NAMES),
    "qwen2_moe": Family("Qwen2Moe", {}, {}),
    "qwen3_moe": Family("Qwen3Moe", {"qk_norm": True}, {}),
    "qwen3_5_text": Family("Qwen3_5", _QWEN_NEXT, {}),
    "qwen3_5_moe_text": Family("Qwen3_5Moe", _QWEN_NEXT, {}),
    "qwen3_next": Family("Qwen3Next", _QWEN_NEXT, _QWEN3_NEXT_NAMES),
    "gpt_oss": Family("GptOss", {"attention_sinks": True, "hidden_act": "silu"}, _GPT_OSS_NAMES, packed_as="mxfp4"),
    "gemma4_text": Family(
        "Gemma4", _GEMMA4 | {"attention_multiplier": 1.0}, _GEMMA4_NAMES, _gemma4, scalings=("proportional",)
    ),
}
