"""The shape of a decoder: one dataclass that a Hugging Face config.json maps onto."""

from dataclasses import dataclass
from typing import Any, Literal

from grpo_jax.errors import UsageError

SUPPORTED_MODEL_TYPES = ("llama", "qwen2")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: RMS norm, rotary positions, gated MLP, grouped-query attention.

    Llama and Qwen2 differ in `qkv_bias` alone. Names follow config.json.
    """

    vocab_size: int
    hidden_size: int = 64
    intermediate_size: int = 256
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    qkv_bias: bool = False
    initializer_range: float = 0.02
    # Of activations and matrix products; parameters, norms and softmax stay in float32.
    dtype: Literal["float32", "bfloat16"] = "float32"
    # Recompute each layer's activations in the backward pass instead of storing them.
    remat: bool = False

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise UsageError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise UsageError(f"head_dim ({self.head_dim}) must be even: rotary positions turn pairs of features")


def config_from_huggingface(config: dict[str, Any], **overrides: Any) -> ModelConfig:
    """Maps the contents of a config.json, as transformers 5 or earlier wrote it.

    Args:
      config: the parsed file.
      **overrides: fields of ModelConfig that the file does not determine (dtype, remat).

    Returns:
      The configuration.

    Raises:
      UsageError: the file asks for something that this decoder does not compute.
    """
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise UsageError(f"model_type {model_type!r} is not supported; choose one of {SUPPORTED_MODEL_TYPES}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise UsageError(f"rope scaling {rope} is not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise UsageError(f"hidden_act {config['hidden_act']!r} is not supported, only silu")
    for unsupported in ("quantization_config", "partial_rotary_factor"):
        if config.get(unsupported) not in (None, 1.0):
            raise UsageError(f"{unsupported} {config[unsupported]!r} is not supported")
    if config.get("use_sliding_window"):
        raise UsageError("use_sliding_window is not supported")
    if model_type == "llama" and (config.get("attention_bias") or config.get("mlp_bias")):
        raise UsageError("attention_bias and mlp_bias are not supported for llama")
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    if missing := [name for name in needed if name not in config]:
        raise UsageError(f"config.json lacks {', '.join(missing)}")
    heads = config["num_attention_heads"]
    return ModelConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_hidden_layers=config["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        rope_theta=rope.get("rope_theta") or config.get("rope_theta") or 10000.0,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        tie_word_embeddings=config.get("tie_word_embeddings", False),
        qkv_bias=model_type == "qwen2",
        initializer_range=config.get("initializer_range", 0.02),
        **overrides,
    )
