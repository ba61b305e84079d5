"""The shape of a decoder: one dataclass. `families` maps a Hugging Face config.json onto it, both ways."""

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, get_args

from grpo_jax.errors import UsageError, abbreviate

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
# Above 0, and may be left out.
_POSITIVE = (
    "rope_theta",
    "rope_local_base_freq",
    "embedding_multiplier",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)

Activation = Literal["silu", "gelu_pytorch_tanh"]
Norms = Literal["before", "after", "around"]
Dtype = Literal["float32", "bfloat16"]
Remat = Literal["none", "layer", "offload"]
Router = Literal["trained", "frozen"]
AttentionKind = Literal["auto", "shared", "xla", "cudnn"]


class LinearScaling(NamedTuple):
    """All positions divided by a factor (2306.15595)."""

    factor: float


class Llama3Scaling(NamedTuple):
    """Llama 3's stretching of long waves, for contexts longer than those first trained on (2407.21783)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class ExpertsConfig(NamedTuple):
    """A mixture of experts in place of every layer's MLP."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int  # features of each expert's MLP
    norm_topk_prob: bool  # whether the weights of a token's experts are made to add up to 1


class YarnScaling(NamedTuple):
    """Long waves stretched by a factor, short ones kept, and larger scores (2309.00071)."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None  # of queries and of keys; None: 1 + ln(factor)/10
    beta_fast: float = 32.0  # waves of more turns in the original context are kept
    beta_slow: float = 1.0  # of fewer turns, stretched
    truncate: bool = True  # whether the places of both, among the features, are rounded


class LongRopeScaling(NamedTuple):
    """A divisor for each frequency, and others for texts longer than those first trained on (2402.13753)."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    factor: float
    attention_factor: float | None = None  # of queries and of keys; None: √(1 + ln(factor)/ln(original))


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


class Rotation(NamedTuple):
    """How a layer turns queries and keys by their positions."""

    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: RMS norm, rotary positions, gated MLP, grouped-query attention.

    Llama (SmolLM too), Mistral, Qwen2, Qwen3, SmolLM3, OLMo 2, Phi-3 (Phi-4 too), Gemma 2 and Gemma 3 are settings of
    it, and with experts Mixtral and Qwen3-MoE. Names follow config.json. What is None, or empty, is not there.
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
    rope_local_base_freq: float | None = None  # theta in layers with a window, without scaling: Gemma 3
    partial_rotary_factor: float = 1.0  # the part of a head's features that is rotated, the first: Phi-4-mini
    unrotated_layers: tuple[int, ...] = ()  # the 0s of no_rope_layers: SmolLM3
    rms_norm_eps: float = 1e-6
    # Of attention and of the MLP: of what goes in, of what comes out (OLMo 2), or of both (Gemma).
    norms: Norms = "before"
    zero_centered_norms: bool = False  # scales are 1 + w: Gemma
    embedding_multiplier: float = 1.0  # √hidden_size: Gemma
    hidden_act: Activation = "silu"  # Gemma: gelu_pytorch_tanh
    tie_word_embeddings: bool = True
    qkv_bias: bool = False  # Qwen2; Llama and Qwen3 with attention_bias
    o_bias: bool = False  # Llama and Qwen3 with attention_bias
    mlp_bias: bool = False  # Llama
    fused_projections: bool = False  # in its folder, q, k and v are one tensor, and so are gate and up: Phi-3
    qk_norm: bool = False  # RMS norm of each head's queries and keys: Qwen3, Gemma 3
    qk_norm_across_heads: bool = False  # one norm of all heads instead: OLMo 2
    query_pre_attn_scalar: float | None = None  # scores are q·k / √this; None: head_dim. Gemma
    attn_logit_softcapping: float | None = None  # c of c·tanh(s/c), of scores before their softmax: Gemma 2
    final_logit_softcapping: float | None = None  # the same of the logits: Gemma 2
    sliding_window: int | None = None  # tokens that a token attends to, itself included: Mistral, Gemma
    sliding_layers: tuple[int, ...] | None = None  # that have the window; None: all
    max_position_embeddings: int | None = None  # the longest texts that it was trained on, in tokens
    initializer_range: float = 0.02
    experts: ExpertsConfig | None = None  # None: each layer has one MLP. Qwen3-MoE, Mixtral
    # Of activations and matrix products; norms, rotations and softmax are computed in float32.
    dtype: Dtype = "float32"
    # What the backward pass computes again. "none": norms, rotations and attention's scores, but no projection;
    # "layer": all of a layer, from what goes into it; "offload": the same, and what goes in waits in the host's memory.
    remat: Remat = "none"
    # Over prompt and completion in a row. "shared": two products and a softmax between them. "xla" and "cudnn": by
    # jax.nn.dot_product_attention; cudnn is flash attention, for bfloat16 on NVIDIA GPUs. "auto": cudnn where it can be
    # used, else shared.
    attention: AttentionKind = "auto"
    # Whether the routers of experts learn. "frozen": they have no gradient.
    router: Router = "trained"

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            if name not in _OPTIONAL or getattr(self, name) is not None:
                check_whole(name, getattr(self, name), most)
        if self.experts:
            _check_experts(self.experts, self.hidden_act)
        elif self.router == "frozen":
            raise UsageError('router "frozen" is of models with experts, and this one has none: set it to "trained"')
        for name in _POSITIVE:
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), above=0, most=1e12)
        check_number("partial_rotary_factor", self.partial_rotary_factor, above=0, most=1)
        check_number("rms_norm_eps", self.rms_norm_eps, least=0, most=1)
        check_number("initializer_range", self.initializer_range, least=0, most=100)
        _check_scaling(self.rope_scaling, self.rotary_features)
        if self.num_attention_heads % self.num_key_value_heads:
            raise UsageError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.rotary_features % 2:
            name = "head_dim" if self.partial_rotary_factor == 1 else "head_dim · partial_rotary_factor"
            raise UsageError(f"{name} ({self.rotary_features}) must be even: rotary positions turn pairs of features")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in get_args(choices):
                raise UsageError(f"{name} is {abbreviate(getattr(self, name))}: choose one of {get_args(choices)}")
        if self.attention == "cudnn" and self.dtype != "bfloat16":
            raise UsageError('attention "cudnn" computes in bfloat16: set dtype to bfloat16, or attention to "shared"')
        if self.attention in ("xla", "cudnn") and self.attn_logit_softcapping is not None:
            raise UsageError(
                f'attention "{self.attention}" does not compute attn_logit_softcapping: set it to "auto" or "shared"'
            )
        if self.attention == "cudnn" and (self.head_dim % 8 or self.head_dim > 256):
            raise UsageError(
                f'attention "cudnn" computes heads of at most 256 features, in eights, and head_dim is {self.head_dim}'
                ': set it to "auto", "shared" or "xla"'
            )

    @property
    def rotary_features(self) -> int:
        """The features of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None: it has none."""
        layers = range(self.num_hidden_layers)
        sliding = layers if self.sliding_layers is None else self.sliding_layers
        return tuple(self.sliding_window if layer in sliding else None for layer in layers)

    @property
    def longest_text(self) -> int | None:
        """Tokens of a text above which its length would change the rotations of all its tokens; None: none do.

        Keys are rotated once, as they are written to the cache, and sampler and trainer must rotate alike. So longer
        texts are refused.
        """
        scaling = self.rope_scaling
        return scaling.original_max_position_embeddings if isinstance(scaling, LongRopeScaling) else None

    @property
    def rotations(self) -> tuple[Rotation | None, ...]:
        """The rotation of each layer; None: it has none."""
        everywhere = Rotation(self.rope_theta, self.rope_scaling)
        local = everywhere if self.rope_local_base_freq is None else Rotation(self.rope_local_base_freq)
        return tuple(
            None if layer in self.unrotated_layers else everywhere if window is None else local
            for layer, window in enumerate(self.windows)
        )


_CHOICES = {
    "hidden_act": Activation,
    "norms": Norms,
    "dtype": Dtype,
    "remat": Remat,
    "attention": AttentionKind,
    "router": Router,
}


def _check_scaling(scaling: RopeScaling | None, features: int) -> None:
    for name, value in scaling._asdict().items() if scaling else ():
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and not isinstance(number, bool):
                check_number(f"{name} of the rope scaling", number, above=0)
        if isinstance(value, tuple) and len(value) != features // 2:
            raise UsageError(f"{name} of the rope scaling has {len(value)} numbers: it must have {features // 2}")
    if isinstance(scaling, Llama3Scaling) and scaling.low_freq_factor >= scaling.high_freq_factor:
        raise UsageError("low_freq_factor of the rope scaling must be below high_freq_factor")


def _check_experts(experts: ExpertsConfig, activation: Activation) -> None:
    if activation != "silu":
        raise UsageError(f"experts with hidden_act {activation} are not supported, only with silu")
    for name, most in (("num_experts", 10**5), ("num_experts_per_tok", 10**5), ("moe_intermediate_size", 10**8)):
        check_whole(name, getattr(experts, name), most)
    if experts.num_experts_per_tok > experts.num_experts:
        raise UsageError(
            f"num_experts_per_tok is {experts.num_experts_per_tok}: it must be at most num_experts, "
            f"{experts.num_experts}"
        )
    if not isinstance(experts.norm_topk_prob, bool):
        raise UsageError(f"norm_topk_prob is {abbreviate(experts.norm_topk_prob)}: it must be true or false")


def check_whole(name: str, value: Any, most: int) -> None:
    """Refuses what is no whole number from 1 to `most`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or not 1 <= int(value) <= most:
        raise UsageError(f"{name} is {abbreviate(value)}: it must be a whole number from 1 to {most}")


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
        raise UsageError(f"{name} is {abbreviate(value)}: it must be a finite number {' and '.join(bounds)}")
