"""The shape of a decoder: one dataclass that a Hugging Face config.json maps onto, both ways."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, get_args

from grpo_jax.errors import UsageError, shown

Params = Any  # of a network: nested dicts of arrays

# Those whose forward pass differs in what ModelConfig says and in nothing else.
SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")

# The largest that is believed: beyond any model, and below what makes a machine stand still.
_MOST = {
    "vocab_size": 10**8,
    "hidden_size": 10**7,
    "intermediate_size": 10**8,
    "num_hidden_layers": 10**4,
    "num_attention_heads": 10**5,
    "num_key_value_heads": 10**5,
    "head_dim": 10**6,
    "sliding_window": 10**12,
    "max_position_embeddings": 10**12,
}
# What may be left out: the others are needed.
_OPTIONAL = ("sliding_window", "max_position_embeddings")

Dtype = Literal["float32", "bfloat16"]
Remat = Literal["none", "layer"]
AttentionKind = Literal["auto", "shared", "xla", "cudnn"]


class RopeScaling(NamedTuple):
    """Llama 3's stretching of long waves, for contexts longer than those first trained on (2407.21783)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: RMS norm, rotary positions, gated MLP, grouped-query attention.

    Llama (SmolLM too), Mistral, Qwen2 and Qwen3 are settings of it. Names follow config.json.
    """

    vocab_size: int
    hidden_size: int = 64
    intermediate_size: int = 256
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    qkv_bias: bool = False  # Qwen2; Llama and Qwen3 with attention_bias
    o_bias: bool = False  # Llama and Qwen3 with attention_bias
    mlp_bias: bool = False  # Llama
    qk_norm: bool = False  # RMS norm of each head's queries and keys: Qwen3
    sliding_window: int | None = None  # tokens that a token attends to, itself included: Mistral
    sliding_layers: tuple[int, ...] | None = None  # that have the window; None: all
    max_position_embeddings: int | None = None  # the longest texts that it was trained on, in tokens
    initializer_range: float = 0.02
    # Of activations and matrix products; norms, rotations and softmax are computed in float32.
    dtype: Dtype = "float32"
    # What the backward pass computes again. "none": norms, rotations and attention's scores, but no projection;
    # "layer": all of a layer.
    remat: Remat = "none"
    # Over prompt and completion in a row. "shared": two products and a softmax between them. "xla" and "cudnn": by
    # jax.nn.dot_product_attention; cudnn is flash attention, for bfloat16 on NVIDIA GPUs. "auto": cudnn where it can be
    # used, else shared.
    attention: AttentionKind = "auto"

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            if name not in _OPTIONAL or getattr(self, name) is not None:
                _check_whole(name, getattr(self, name), most)
        _check_number("rope_theta", self.rope_theta, above=0, most=1e12)
        _check_number("rms_norm_eps", self.rms_norm_eps, least=0, most=1)
        _check_number("initializer_range", self.initializer_range, least=0, most=100)
        for name, value in self.rope_scaling._asdict().items() if self.rope_scaling else ():
            _check_number(f"{name} of the rope scaling", value, above=0)
        if self.rope_scaling and self.rope_scaling.low_freq_factor >= self.rope_scaling.high_freq_factor:
            raise UsageError("low_freq_factor of the rope scaling must be below high_freq_factor")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UsageError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise UsageError(f"head_dim ({self.head_dim}) must be even: rotary positions turn pairs of features")
        for name, choices in (("dtype", Dtype), ("remat", Remat), ("attention", AttentionKind)):
            if getattr(self, name) not in get_args(choices):
                raise UsageError(f"{name} is {getattr(self, name)!r}: choose one of {get_args(choices)}")
        if self.attention == "cudnn" and self.dtype != "bfloat16":
            raise UsageError('attention "cudnn" computes in bfloat16: set dtype to bfloat16, or attention to "shared"')


def _check_whole(name: str, value: Any, most: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or not 1 <= int(value) <= most:
        raise UsageError(f"{name} is {shown(value)}: it must be a whole number from 1 to {most}")


def _check_number(
    name: str, value: Any, *, least: float = -math.inf, above: float = -math.inf, most: float = math.inf
) -> None:
    if (
        not isinstance(value, Real)
        or isinstance(value, bool)
        or not (math.isfinite(value) and least <= float(value) <= most and float(value) > above)
    ):
        bounds = [f"above {above}"] * (above > -math.inf) + [f"at least {least}"] * (least > -math.inf)
        bounds += [f"at most {most}"] * (most < math.inf)
        raise UsageError(f"{name} is {shown(value)}: it must be a finite number {' and '.join(bounds)}")


def _or(value: Any, default: Any) -> Any:
    """The value, or the default where there is none; 0 is one, and is refused where it makes no sense."""
    return default if value is None else value


def config_from_huggingface(config: dict[str, Any], **overrides: Any) -> ModelConfig:
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
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise UsageError(f"model_type {shown(model_type)} is not supported; choose one of {SUPPORTED_MODEL_TYPES}")
    if config.get("hidden_act", "silu") != "silu":
        raise UsageError(f"hidden_act {shown(config['hidden_act'])} is not supported, only silu")
    for unsupported in ("quantization_config", "partial_rotary_factor"):
        if config.get(unsupported) not in (None, 1.0):
            raise UsageError(f"{unsupported} {shown(config[unsupported])} is not supported")
    _check_shapes(config)
    heads = config["num_attention_heads"]
    rope_theta, rope_scaling = _rope(config)
    sliding_window, sliding_layers = _sliding(config)
    attention_bias = bool(config.get("attention_bias")) and model_type in ("llama", "qwen3")
    return ModelConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_hidden_layers=config["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=_or(config.get("num_key_value_heads"), heads),
        # Qwen3's files always say it; its default is not the quotient.
        head_dim=_or(config.get("head_dim"), 128 if model_type == "qwen3" else config["hidden_size"] // heads),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        tie_word_embeddings=bool(config.get("tie_word_embeddings")),
        qkv_bias=attention_bias or model_type == "qwen2",
        o_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias")) and model_type == "llama",
        qk_norm=model_type == "qwen3",
        sliding_window=sliding_window,
        sliding_layers=sliding_layers,
        max_position_embeddings=config.get("max_position_embeddings"),
        initializer_range=config.get("initializer_range", 0.02),
        **overrides,
    )


def _check_shapes(config: dict[str, Any]) -> None:
    """Refuses a config.json that lacks a size, or whose sizes are none. What is optional `ModelConfig` checks."""
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    if missing := [name for name in needed if name not in config]:
        raise UsageError(f"config.json lacks {', '.join(missing)}")
    for name in needed:
        _check_whole(name, config[name], _MOST[name])
    for name in ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"):
        if not isinstance(config.get(name), bool | None):
            raise UsageError(f"{name} is {shown(config[name])}: it must be true or false")
    heads = config["num_attention_heads"]
    if config.get("head_dim") is None and config["model_type"] != "qwen3" and config["hidden_size"] % heads:
        raise UsageError(
            f"hidden_size ({config['hidden_size']}) must be a multiple of num_attention_heads ({heads}), unless there "
            "is a head_dim"
        )


def config_to_huggingface(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a model that was not loaded from one; `config_from_huggingface` reads it back.

    Args:
      config: the decoder's shape.

    Returns:
      What to write, with `rope_parameters` as transformers 5 has them.

    Raises:
      UsageError: no supported architecture has this combination.
    """
    model_type, architecture = _architecture(config)
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling:
        rope |= {"rope_type": "llama3", **config.rope_scaling._asdict()}
    written = {
        "architectures": [f"{architecture}ForCausalLM"],
        "model_type": model_type,
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
    if model_type.startswith("qwen") and config.sliding_window:
        layers = range(config.num_hidden_layers)
        sliding = layers if config.sliding_layers is None else config.sliding_layers
        kinds = ["sliding_attention" if layer in sliding else "full_attention" for layer in layers]
        written |= {"use_sliding_window": True, "layer_types": kinds}
    if config_from_huggingface(written, dtype=config.dtype, remat=config.remat, attention=config.attention) != config:
        raise UsageError(f"no {model_type} of transformers has this combination of options: {config}")
    return written


def _architecture(config: ModelConfig) -> tuple[str, str]:
    """The model_type that has these options, and its name in class names."""
    if config.qk_norm:
        return "qwen3", "Qwen3"
    if config.qkv_bias and not config.o_bias:
        return "qwen2", "Qwen2"
    if config.sliding_window:
        return "mistral", "Mistral"
    return "llama", "Llama"


def _rope(config: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (earlier)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UsageError(f"the rope scaling is {shown(rope)}: it must be an object")
    if any(isinstance(value, dict) for value in rope.values()):
        raise UsageError("rope_parameters that differ between layers are not supported")
    theta = _or(_or(rope.get("rope_theta"), config.get("rope_theta")), 10000.0)
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


def _sliding(config: dict[str, Any]) -> tuple[int | None, tuple[int, ...] | None]:
    """Window, and the layers that have it (None: all). Only Qwen mixes layers, and only with use_sliding_window."""
    window, layers = config.get("sliding_window", 4096), range(config["num_hidden_layers"])  # transformers' default
    if not window or config["model_type"] == "llama":
        return None, None
    if config["model_type"] == "mistral":
        return window, None
    if not config.get("use_sliding_window"):
        return None, None
    kinds = config.get("layer_types")
    if kinds and (not isinstance(kinds, Sequence) or len(kinds) < len(layers)):
        raise UsageError(f"layer_types is {shown(kinds)}: it must name the kind of each of {len(layers)} layers")
    if kinds:
        sliding = tuple(layer for layer in layers if kinds[layer] == "sliding_attention")
    else:
        first = config.get("max_window_layers", 28)
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise UsageError(f"max_window_layers is {shown(first)}: it must be a whole number of at least 0")
        sliding = tuple(layers[first:])
    if not sliding:
        return None, None
    return window, None if len(sliding) == len(layers) else sliding
