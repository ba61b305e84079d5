"""config.json of the model families of transformers: onto `ModelConfig`, and back.

All families are settings of one decoder. What their files have in common is read once. The rest is a row of FAMILIES: a
family is what a file means that leaves something out, a function from the file to the fields of `ModelConfig` that are
the family's own, and one that writes what the other reads.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from grpo_jax.errors import UsageError, shown
from grpo_jax.models.config import MOST, ModelConfig, RopeScaling, check_whole

File = dict[str, Any]  # the contents of a config.json
Fields = dict[str, Any]  # of ModelConfig, by name


def _none(_: Any) -> dict[str, Any]:
    return {}


class Family(NamedTuple):
    """What a family's config.json says that those of others do not."""

    name: str  # in the names of classes: the Llama of LlamaForCausalLM
    fields: Callable[[File], Fields] = _none  # that are its own
    written: Callable[[ModelConfig], File] = _none  # besides what all files say
    defaults: Mapping[str, Any] = {}  # of transformers, for a file that leaves something out


def config_from_huggingface(config: File, **overrides: Any) -> ModelConfig:
    """Maps the contents of a config.json, as transformers 5 or earlier wrote it.

    Args:
      config: the parsed file.
      **overrides: fields of ModelConfig that the file does not determine (dtype, remat, attention).

    Returns:
      The configuration.

    Raises:
      UsageError: the file asks for something that this decoder does not compute.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UsageError(f"model_type {shown(model_type)} is not supported; choose one of {tuple(FAMILIES)}")
    family = FAMILIES[model_type]
    config = {**family.defaults, **config}
    _check(config)
    return ModelConfig(**_common_fields(config) | family.fields(config), **overrides)


def config_to_huggingface(config: ModelConfig) -> File:
    """The config.json of a model that was not loaded from one; `config_from_huggingface` reads it back.

    Args:
      config: the decoder's shape.

    Returns:
      What to write, of the first family that has this configuration, with `rope_parameters` as transformers 5 has them.

    Raises:
      UsageError: no supported family has this combination.
    """
    not_in_the_file = {name: getattr(config, name) for name in ("dtype", "remat", "attention")}

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


def _common_fields(file: File) -> Fields:
    heads = file["num_attention_heads"]
    rope_theta, rope_scaling = _rope(file)
    return {
        "vocab_size": file["vocab_size"],
        "hidden_size": file["hidden_size"],
        "intermediate_size": file["intermediate_size"],
        "num_hidden_layers": file["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": _or(file.get("num_key_value_heads"), heads),
        "head_dim": _or(file.get("head_dim"), file["hidden_size"] // heads),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "rms_norm_eps": file.get("rms_norm_eps", 1e-6),
        "tie_word_embeddings": bool(file.get("tie_word_embeddings")),
        "max_position_embeddings": file.get("max_position_embeddings"),
        "initializer_range": file.get("initializer_range", 0.02),
    }


def _common_file(config: ModelConfig) -> File:
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling:
        rope |= {"rope_type": "llama3", **config.rope_scaling._asdict()}
    written = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rope_parameters": rope,
        "rope_theta": config.rope_theta,  # for readers of before transformers 5
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
        "initializer_range": config.initializer_range,
        "sliding_window": config.sliding_window,
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
    if file.get("hidden_act", "silu") != "silu":
        raise UsageError(f"hidden_act {shown(file['hidden_act'])} is not supported, only silu")
    for unsupported in ("quantization_config", "partial_rotary_factor"):
        if file.get(unsupported) not in (None, 1.0):
            raise UsageError(f"{unsupported} {shown(file[unsupported])} is not supported")
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    if missing := [name for name in needed if name not in file]:
        raise UsageError(f"config.json lacks {', '.join(missing)}")
    for name in needed:
        check_whole(name, file[name], MOST[name])
    for name in ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"):
        if not isinstance(file.get(name), bool | None):
            raise UsageError(f"{name} is {shown(file[name])}: it must be true or false")
    heads = file["num_attention_heads"]
    if file.get("head_dim") is None and file["hidden_size"] % heads:
        raise UsageError(
            f"hidden_size ({file['hidden_size']}) must be a multiple of num_attention_heads ({heads}), unless there "
            "is a head_dim"
        )


def _rope(file: File) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (earlier)."""
    rope = file.get("rope_parameters") or file.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UsageError(f"the rope scaling is {shown(rope)}: it must be an object")
    if any(isinstance(value, dict) for value in rope.values()):
        raise UsageError("rope_parameters that differ between layers are not supported")
    theta = _or(_or(rope.get("rope_theta"), file.get("rope_theta")), 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        raise UsageError(f"partial_rotary_factor {shown(rope['partial_rotary_factor'])} is not supported")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UsageError(f"rope scaling {shown(rope)} is not supported, only llama3")
    if missing := [name for name in RopeScaling._fields if name not in rope]:
        raise UsageError(f"rope scaling llama3 in config.json lacks {', '.join(missing)}")
    return theta, RopeScaling(*(rope[name] for name in RopeScaling._fields))


# ---- what several families say


def _attention_bias(file: File) -> Fields:
    """Of the four projections of attention alike."""
    return dict.fromkeys(("qkv_bias", "o_bias"), bool(file.get("attention_bias")))


def _layers_of_kind(kind: str, file: File) -> tuple[int, ...] | None:
    """The layers that layer_types gives this kind; None: the file does not say."""
    kinds, count = file.get("layer_types"), file["num_hidden_layers"]
    if not kinds:
        return None
    if not isinstance(kinds, Sequence) or len(kinds) < count:
        raise UsageError(f"layer_types is {shown(kinds)}: it must name the kind of each of {count} layers")
    return tuple(layer for layer in range(count) if kinds[layer] == kind)


def _window_in(layers: Sequence[int], file: File) -> Fields:
    """The window in these layers, where the file has one."""
    window = file.get("sliding_window")
    if not window or not layers:
        return {}
    all_layers = len(layers) == file["num_hidden_layers"]
    return {"sliding_window": window, "sliding_layers": None if all_layers else tuple(layers)}


def _layer_types(config: ModelConfig) -> File:
    """The inverse of `_layers_of_kind`, where a layer has a window."""
    layers = range(config.num_hidden_layers)
    sliding = layers if config.sliding_layers is None else config.sliding_layers
    if not config.sliding_window:
        return {}
    return {"layer_types": ["sliding_attention" if layer in sliding else "full_attention" for layer in layers]}


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
        raise UsageError(f"max_window_layers is {shown(first)}: it must be a whole number of at least 0")
    return _window_in(_or(_layers_of_kind("sliding_attention", file), range(file["num_hidden_layers"])[first:]), file)


def _qwen_windows(config: ModelConfig) -> File:
    return {"use_sliding_window": True, **_layer_types(config)} if config.sliding_window else {}


def _qwen2(file: File) -> Fields:
    return {"qkv_bias": True, **_qwen_window(file)}


def _qwen3(file: File) -> Fields:
    return {"qk_norm": True, **_attention_bias(file), **_qwen_window(file)}


_QWEN = {"sliding_window": 4096, "max_window_layers": 28}

# By model_type.
FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", _llama),
    "mistral": Family("Mistral", _mistral, defaults={"sliding_window": 4096}),
    "qwen2": Family("Qwen2", _qwen2, _qwen_windows, _QWEN),
    "qwen3": Family("Qwen3", _qwen3, _qwen_windows, {**_QWEN, "head_dim": 128}),
}
