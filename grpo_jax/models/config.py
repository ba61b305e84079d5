"""The shape of a decoder: one dataclass. `families` maps a Hugging Face config.json onto it, both ways."""

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from grpo_jax.errors import UsageError
from grpo_jax.options import Fraction, above, between, check_types

Activation = Literal["silu", "gelu_pytorch_tanh"]
Norms = Literal["before", "after", "around"]
Dtype = Literal["float32", "bfloat16"]
Remat = Literal["none", "layer", "offload"]
Router = Literal["trained", "frozen"]
AttentionKind = Literal["auto", "shared", "xla", "cudnn"]


# The largest numbers are beyond any model, and below what makes a machine stand still.
_Length = Annotated[int, between(1, 10**12)]
_Number = Annotated[float, above(0), between(0, 1e12)]


class ExpertsConfig(NamedTuple):
    """A mixture of experts in place of every layer's MLP."""

    num_experts: Annotated[int, between(1, 10**5)]
    num_experts_per_tok: Annotated[int, between(1, 10**5)]
    moe_intermediate_size: Annotated[int, between(1, 10**8)]  # features of each expert's MLP
    norm_topk_prob: bool  # whether the weights of a token's experts are made to add up to 1


class RopeScaling(NamedTuple):
    """A stretching of rotations, for contexts longer than those first trained on. None: the kind has no such number.

    linear: all positions are divided by the factor (2306.15595). llama3: long waves are stretched by the factor
    (2407.21783). yarn: long waves are stretched, short ones stay, and scores are larger (2309.00071).
    """

    rope_type: Literal["linear", "llama3", "yarn"]
    factor: _Number
    original_max_position_embeddings: _Length  # the context first trained on, in tokens
    # ---- of llama3
    low_freq_factor: _Number | None = None  # longer waves than the context over this are stretched
    high_freq_factor: _Number | None = None  # shorter waves than the context over this stay
    # ---- of yarn
    attention_factor: _Number | None = None  # of queries and of keys; None: 1 + ln(factor)/10
    beta_fast: _Number = 32.0  # waves of more turns in the original context stay
    beta_slow: _Number = 1.0  # waves of fewer turns are stretched
    truncate: bool = True  # whether the places of both, among the features, are rounded


class Rotation(NamedTuple):
    """How a layer turns queries and keys by their positions."""

    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: RMS norm, rotary positions, gated MLP, grouped-query attention.

    Llama (SmolLM too), Mistral, Qwen2, Qwen3, SmolLM3, OLMo 2, Gemma 2 and Gemma 3 are settings of it, and with experts
    Mixtral and Qwen3-MoE. Names follow config.json. What is None, or empty, is not there.
    """

    vocab_size: Annotated[int, between(1, 10**8)]
    hidden_size: Annotated[int, between(1, 10**7)] = 64
    intermediate_size: Annotated[int, between(1, 10**8)] = 256
    num_hidden_layers: Annotated[int, between(1, 10**4)] = 2
    num_attention_heads: Annotated[int, between(1, 10**5)] = 4
    num_key_value_heads: Annotated[int, between(1, 10**5)] = 2
    head_dim: Annotated[int, between(1, 10**6)] = 16
    rope_theta: _Number = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_local_base_freq: _Number | None = None  # theta in layers with a window, without scaling: Gemma 3
    unrotated_layers: tuple[int, ...] = ()  # the 0s of no_rope_layers: SmolLM3
    rms_norm_eps: Fraction = 1e-6
    # Of attention and of the MLP: of what goes in, of what comes out (OLMo 2), or of both (Gemma).
    norms: Norms = "before"
    zero_centered_norms: bool = False  # scales are 1 + w: Gemma
    embedding_multiplier: _Number = 1.0  # √hidden_size: Gemma
    hidden_act: Activation = "silu"  # Gemma: gelu_pytorch_tanh
    tie_word_embeddings: bool = True
    qkv_bias: bool = False  # Qwen2; Llama and Qwen3 with attention_bias
    o_bias: bool = False  # Llama and Qwen3 with attention_bias
    mlp_bias: bool = False  # Llama
    qk_norm: bool = False  # RMS norm of each head's queries and keys: Qwen3, Gemma 3
    qk_norm_across_heads: bool = False  # one norm of all heads instead: OLMo 2
    query_pre_attn_scalar: _Number | None = None  # scores are q·k / √this; None: head_dim. Gemma
    attn_logit_softcapping: _Number | None = None  # c of c·tanh(s/c), of scores before their softmax: Gemma 2
    final_logit_softcapping: _Number | None = None  # the same of the logits: Gemma 2
    sliding_window: _Length | None = None  # tokens that a token attends to, itself included: Mistral, Gemma
    sliding_layers: tuple[int, ...] | None = None  # that have the window; None: all
    max_position_embeddings: _Length | None = None  # the longest texts that it was trained on, in tokens
    initializer_range: Annotated[float, between(0, 100)] = 0.02
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
        check_types(ModelConfig, vars(self))
        if self.rope_scaling:
            check_types(RopeScaling, self.rope_scaling._asdict())
        if self.experts:
            check_types(ExpertsConfig, self.experts._asdict())
            _check_experts(self.experts, self.hidden_act)
        elif self.router == "frozen":
            raise UsageError('router "frozen" is of models with experts, and this one has none: set it to "trained"')
        if self.rope_scaling and self.rope_scaling.rope_type == "llama3":
            _, _, _, low, high, *_ = self.rope_scaling
            if low is None or high is None or low >= high:
                raise UsageError("the rope scaling llama3 needs a low_freq_factor that is below its high_freq_factor")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UsageError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise UsageError(f"head_dim ({self.head_dim}) must be even: rotary positions turn pairs of features")
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
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None: it has none."""
        layers = range(self.num_hidden_layers)
        sliding = layers if self.sliding_layers is None else self.sliding_layers
        return tuple(self.sliding_window if layer in sliding else None for layer in layers)

    @property
    def rotations(self) -> tuple[Rotation | None, ...]:
        """The rotation of each layer; None: it has none."""
        everywhere = Rotation(self.rope_theta, self.rope_scaling)
        local = everywhere if self.rope_local_base_freq is None else Rotation(self.rope_local_base_freq)
        return tuple(
            None if layer in self.unrotated_layers else everywhere if window is None else local
            for layer, window in enumerate(self.windows)
        )


def _check_experts(experts: ExpertsConfig, activation: Activation) -> None:
    if activation != "silu":
        raise UsageError(f"experts with hidden_act {activation} are not supported, only with silu")
    if experts.num_experts_per_tok > experts.num_experts:
        raise UsageError(
            f"num_experts_per_tok is {experts.num_experts_per_tok}: it must be at most num_experts, "
            f"{experts.num_experts}"
        )
