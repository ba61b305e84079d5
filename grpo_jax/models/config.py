"""The shape of a decoder: one dataclass. `families` maps a Hugging Face config.json onto it, both ways."""

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, get_args

from grpo_jax.errors import UsageError, shown

Params = Any  # of a network: nested dicts of arrays

# The largest that is believed: beyond any model, and below what makes a machine stand still.
MOST = {
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
        for name, most in MOST.items():
            if name not in _OPTIONAL or getattr(self, name) is not None:
                check_whole(name, getattr(self, name), most)
        check_number("rope_theta", self.rope_theta, above=0, most=1e12)
        check_number("rms_norm_eps", self.rms_norm_eps, least=0, most=1)
        check_number("initializer_range", self.initializer_range, least=0, most=100)
        for name, value in self.rope_scaling._asdict().items() if self.rope_scaling else ():
            check_number(f"{name} of the rope scaling", value, above=0)
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


def check_whole(name: str, value: Any, most: int) -> None:
    """Refuses what is no whole number from 1 to `most`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or not 1 <= int(value) <= most:
        raise UsageError(f"{name} is {shown(value)}: it must be a whole number from 1 to {most}")


def check_number(
    name: str, value: Any, *, least: float = -math.inf, above: float = -math.inf, most: float = math.inf
) -> None:
    """Refuses what is no finite number, or out of bounds."""
    if (
        not isinstance(value, Real)
        or isinstance(value, bool)
        or not (math.isfinite(value) and least <= float(value) <= most and float(value) > above)
    ):
        bounds = [f"above {above}"] * (above > -math.inf) + [f"at least {least}"] * (least > -math.inf)
        bounds += [f"at most {most}"] * (most < math.inf)
        raise UsageError(f"{name} is {shown(value)}: it must be a finite number {' and '.join(bounds)}")
