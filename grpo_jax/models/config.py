"""The configuration of a decoder. `families` converts it from and to a Hugging Face config.json."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from grpo_jax.errors import UsageError
from grpo_jax.options import FLOAT32, STORABLE, Fraction, above, at_least, between, check_types

Activation = Literal["silu", "gelu_pytorch_tanh", "gelu", "relu"]
Norms = Literal["before", "after", "around"]
Dtype = Literal["float32", "bfloat16"]
Rounding = Literal["nearest", "stochastic"]
Remat = Literal["none", "layer", "offload"]
Router = Literal["trained", "frozen"]
# Kinds of products of queries and keys that an implementation of attention does not compute
_NOT_COMPUTED = {
    "xla": ("attn_logit_softcapping", "attention_sinks"),
    "cudnn": ("attn_logit_softcapping", "attention_sinks"),
    "tokamax": ("attention_sinks",),
}
AttentionKind = Literal["auto", "shared", "xla", "cudnn", "tokamax"]


# These limits are above the numbers of any model, and low enough that no machine stalls and devices can hold them.
_Length = Annotated[int, at_least(1), STORABLE]
_Number = Annotated[float, above(0), between(0, 1e12), FLOAT32]


class ExpertsConfig(NamedTuple):
    """The mixture of experts that replaces every layer's MLP."""

    num_experts: Annotated[int, between(1, 10**5)]
    num_experts_per_tok: Annotated[int, between(1, 10**5)]
    moe_intermediate_size: Annotated[int, between(1, 10**8)]  # features of each expert's MLP
    norm_topk_prob: bool  # normalise the weights of a token's experts to add up to 1
    # features of an MLP that every token passes, with a gate. None: none. Qwen3-Next, Qwen3.5
    shared_expert_intermediate_size: Annotated[int, between(1, 10**8)] | None = None
    # c in (1 + clip(up, −c, c)) · g · sigmoid(1.702 g), g = min(gate, c), with biases: gpt-oss. None: silu(gate) · up,
    # without biases
    swiglu_limit: _Number | None = None
    # The mixture is added to the shared MLP, which has no gate. Router, mixture and MLP have norms, and the router
    # scales its input and the output of each expert: Gemma 4
    has_norms: bool = False


DELTA_CHUNK = 64  # tokens of a row that a delta net computes at once


class DeltaConfig(NamedTuple):
    """The gated delta net that replaces attention in some layers."""

    num_key_heads: Annotated[int, between(1, 10**5)]  # each serves num_value_heads / num_key_heads value heads
    num_value_heads: Annotated[int, between(1, 10**5)]
    key_head_dim: Annotated[int, between(1, 10**6)]
    value_head_dim: Annotated[int, between(1, 10**6)]
    conv_kernel_dim: Annotated[int, between(2, 100)]  # tokens that the convolution mixes

    @property
    def convolved(self) -> int:
        """The number of features of queries, keys and values."""
        return 2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim


class RopeScaling(NamedTuple):
    """A stretching of rotations, for contexts longer than the original training context.

    linear: all positions are divided by the factor (2306.15595). llama3: long waves are stretched by the factor
    (2407.21783). yarn: long waves are stretched, short waves stay, and products are larger (2309.00071). longrope: each
    wave is stretched by a factor of its own, and products are larger (2402.13753). dynamic: nothing changes within the
    original context, and longer texts are refused.
    """

    rope_type: Literal["linear", "llama3", "yarn", "longrope", "dynamic"]
    factor: _Number
    original_max_position_embeddings: _Length  # the original training context, in tokens
    # ---- only for llama3
    low_freq_factor: _Number | None = None  # waves longer than the original context / this are stretched
    high_freq_factor: _Number | None = None  # waves shorter than the original context / this stay
    # ---- only for yarn and longrope
    # multiplies queries and keys; None: m(mscale) / m(mscale_all_dim), or in longrope √(1 + ln(factor) / ln(original))
    attention_factor: _Number | None = None
    # ---- only for yarn
    # m(a) = 1 + a·ln(factor)/10. If one of the two is missing or 0, they count as 1 and 0.
    mscale: Annotated[float, between(0, 1e6)] | None = None
    mscale_all_dim: Annotated[float, between(0, 1e6)] | None = None
    beta_fast: _Number = 32.0  # waves with more turns than this in the original context stay
    beta_slow: _Number = 1.0  # waves with fewer turns than this are stretched
    truncate: bool = True  # round the feature indices of beta_fast and beta_slow outwards
    # ---- only for longrope: the factor of each pair of features
    short_factor: tuple[_Number, ...] | None = None  # if no text is longer than the original context
    long_factor: tuple[_Number, ...] | None = None  # otherwise: see `ModelConfig.longest_text`


# "global_attention" has the heads of `ModelConfig.global_heads`. Readers have only queries, and attend to the keys and
# values of an earlier layer: see READ.
Mixer = Literal["attention", "global_attention", "reader", "global_reader", "delta"]
FeedForward = Literal["mlp", "wide_mlp", "experts"]
READ: dict[Mixer, Mixer] = {"reader": "attention", "global_reader": "global_attention"}
_READERS = {source: reader for reader, source in READ.items()}


class Form(NamedTuple):
    """The modules of a layer, besides its norms: one that mixes tokens, and one that acts on single tokens."""

    mixer: Mixer
    feed_forward: FeedForward


class Heads(NamedTuple):
    """The keys and values of a layer."""

    num_key_value_heads: Annotated[int, between(1, 10**5)]
    head_dim: Annotated[int, between(1, 10**6)]
    turning: Fraction = 1.0  # the share of the pairs of features that turn; the other pairs have the frequency 0
    keys_are_values: bool = False  # values are the keys before their norm and rotation, without a projection


class Rotation(NamedTuple):
    """The rotation of a layer's queries and keys by their positions."""

    theta: float
    scaling: RopeScaling | None = None
    heads: Heads | None = None  # None: those of most layers
    is_long: bool = False  # use the long_factor of longrope


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: RMS norm, rotary positions, gated MLP, grouped-query attention.

    It describes the families of `families.FAMILIES`. Names follow config.json. The model lacks a part whose field is
    None or empty, unless the field says otherwise.
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
    rope_local_base_freq: _Number | None = None  # theta in layers with a window, without scaling: Gemma 3, OLMo 3
    unrotated_layers: tuple[int, ...] = ()  # the 0s of no_rope_layers: SmolLM3
    partial_rotary_factor: Fraction = 1.0  # the share of a head's features that is rotated: Qwen3.5, GLM-4
    rms_norm_eps: Fraction = 1e-6
    # Norms of attention and of the MLP: on their input, on their output (OLMo), or on both (Gemma 2 and 3, GLM-4).
    norms: Norms = "before"
    zero_centered_norms: bool = False  # scales are 1 + w: Gemma
    embedding_multiplier: _Number = 1.0  # √hidden_size: Gemma; any number: Granite
    residual_multiplier: _Number = 1.0  # of the outputs of attention and of the MLP, before they are added: Granite
    attention_multiplier: _Number | None = None  # products are q·k times this; None: see query_pre_attn_scalar. Granite
    logits_scaling: _Number = 1.0  # the divisor of the last norm's output, and thus of the logits: Granite
    hidden_act: Activation = "silu"  # Gemma: gelu_pytorch_tanh
    tie_word_embeddings: bool = True
    qkv_bias: bool = False  # Qwen2; Llama and Qwen3 with attention_bias
    o_bias: bool = False  # Llama and Qwen3 with attention_bias
    mlp_bias: bool = False  # Llama
    qk_norm: bool = False  # RMS norm of each head's queries and keys: Qwen3, Gemma 3
    qk_norm_across_heads: bool = False  # one norm across all heads instead: OLMo
    attention_sinks: bool = (
        False  # a learned product for each head takes part in the softmax, and adds nothing: gpt-oss
    )
    gated_attention: bool = False  # attended values are multiplied by sigmoid(gate), from q_proj too: Qwen3.5
    value_norm: bool = False  # RMS norm of each head's values, without scales: Gemma 4
    global_heads: Heads | None = None  # heads of the layers without a window, if they differ: Gemma 4
    # The number of last layers, which read keys and values of the last layer before them: Gemma 4
    num_kv_shared_layers: Annotated[int, between(0, 10**4)] = 0
    use_double_wide_mlp: bool = False  # the MLPs of these layers have twice the features
    hidden_size_per_layer_input: Annotated[int, between(0, 10**6)] = 0  # features of a token's input to each layer
    layer_scales: bool = False  # the output of each layer is multiplied by a number, which is not trained: Gemma 4
    delta: DeltaConfig | None = None  # the delta net of delta_layers: Qwen3.5
    delta_layers: tuple[int, ...] = ()  # layers with a delta net instead of attention
    query_pre_attn_scalar: _Number | None = None  # products are q·k / √this; None: head_dim. Gemma
    attn_logit_softcapping: _Number | None = None  # c in c·tanh(s/c), of products before their softmax: Gemma 2
    final_logit_softcapping: _Number | None = None  # c in c·tanh(s/c), of the logits: Gemma 2
    sliding_window: _Length | None = None  # tokens that a token attends to, itself included: Mistral, Gemma
    sliding_layers: tuple[int, ...] | None = None  # the layers that have the window; None: all
    max_position_embeddings: _Length | None = None  # the length of the longest training texts, in tokens
    initializer_range: Annotated[float, between(0, 100)] = 0.02
    experts: ExpertsConfig | None = None  # None: each layer has one MLP
    dense_layers: tuple[int, ...] = ()  # layers with one MLP instead of experts: mlp_only_layers, decoder_sparse_step
    # The dtype of activations and matrix products. Norms, rotations and softmax are computed in float32.
    dtype: Dtype = "float32"
    # Rounding of parameters to bfloat16, for products in bfloat16: see `rounding`.
    rounding: Rounding = "nearest"
    # The part that the backward pass computes again. "none": norms, rotations and q·k, but no projection. "layer":
    # each whole layer, from its input. "offload": each whole layer, with its input kept in host memory.
    remat: Remat = "none"
    # Attention over prompt and completion in a row. "shared": two products with a softmax between them. "xla" and
    # "cudnn": jax.nn.dot_product_attention; cudnn is flash attention for bfloat16 on NVIDIA GPUs. "tokamax": that
    # of the package tokamax, with kernels for TPUs and GPUs. "auto": cudnn if it can be used, else shared.
    attention: AttentionKind = "auto"
    # The longest text, prompt included, in tokens. It chooses one list of longrope's factors for all texts, so that the
    # sampler and the trainer rotate alike. None: the short list, and passes beyond the original context are refused.
    longest_text: _Length | None = None
    # Routers of experts. "frozen": they have no gradient.
    router: Router = "trained"
    # The family, which names tensors in files: see `families`. It has no part in what the decoder computes, nor in
    # equality. None: the first family that has this configuration.
    model_type: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_types(ModelConfig, vars(self))
        for part in (self.rope_scaling, self.experts, self.delta, self.global_heads):
            if part:
                check_types(type(part), part._asdict())
        for sentence in _conflicts(self):
            raise UsageError(sentence)

    @property
    def forms(self) -> tuple[Form, ...]:
        """The modules of each layer."""
        mlp_of_readers: FeedForward = "wide_mlp" if self.use_double_wide_mlp else "mlp"
        first_reader = self.num_hidden_layers - self.num_kv_shared_layers

        def form(layer: int, window: int | None) -> Form:
            mixer: Mixer = "global_attention" if self.global_heads and window is None else "attention"
            mixer, mlp = (_READERS[mixer], mlp_of_readers) if layer >= first_reader else (mixer, "mlp")
            has_experts = self.experts and layer not in self.dense_layers
            return Form("delta" if layer in self.delta_layers else mixer, "experts" if has_experts else mlp)

        return tuple(itertools.starmap(form, enumerate(self.windows)))

    @property
    def sources(self) -> tuple[int, ...]:
        """The layer whose keys and values each layer attends to: itself, or for a reader an earlier one."""
        last = {mixer: layer for layer, (mixer, _) in enumerate(self.forms)}
        return tuple(last[READ[mixer]] if mixer in READ else layer for layer, (mixer, _) in enumerate(self.forms))

    def heads_of(self, mixer: Mixer) -> Heads:
        """Returns the heads of a kind of attention."""
        heads = self.global_heads if mixer in ("global_attention", "global_reader") else None
        return heads or Heads(self.num_key_value_heads, self.head_dim)

    @property
    def head_dims(self) -> tuple[int, ...]:
        """The different numbers of features of a head."""
        return tuple({self.heads_of(form.mixer).head_dim for form in self.forms})

    @property
    def rotated(self) -> int:
        """The number of features of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None for a layer without a window."""
        layers = range(self.num_hidden_layers)
        sliding = layers if self.sliding_layers is None else self.sliding_layers
        return tuple(self.sliding_window if layer in sliding else None for layer in layers)

    @property
    def longest_short_text(self) -> int | None:
        """The original context of longrope, in tokens; None for a model without longrope."""
        scaling = self.rope_scaling
        return scaling.original_max_position_embeddings if scaling and scaling.rope_type == "longrope" else None

    @property
    def has_long_texts(self) -> bool:
        """True if texts use the long factors of longrope."""
        return (self.longest_text or 0) > (self.longest_short_text or math.inf)

    def check_width(self, width: int) -> None:
        """Checks that texts of this many tokens have known rotations.

        Raises:
          UsageError: The width exceeds the original context of longrope, and `longest_text` is None; or it exceeds the
            original context of dynamic scaling.
        """
        scaling = self.rope_scaling
        if scaling and scaling.rope_type == "dynamic" and width > scaling.original_max_position_embeddings:
            raise UsageError(
                f"texts of up to {width} tokens exceed the {scaling.original_max_position_embeddings} of this model, "
                "whose dynamic rope scaling would then rotate each text differently: lower max_prompt_tokens or "
                "max_tokens"
            )
        if self.longest_text is None and width > (self.longest_short_text or math.inf):
            raise UsageError(
                f"texts of up to {width} tokens may need the long factors of longrope, which all texts then share: set "
                "longest_text to the length of the longest, as in load_pretrained(folder, longest_text=…)"
            )

    @property
    def rotations(self) -> tuple[Rotation | None, ...]:
        """The rotation of each layer; None for a layer without rotation."""
        everywhere = Rotation(self.rope_theta, self.rope_scaling, self.global_heads, self.has_long_texts)
        local = everywhere if self.rope_local_base_freq is None else Rotation(self.rope_local_base_freq)
        return tuple(
            None if layer in self.unrotated_layers else everywhere if window is None else local
            for layer, window in enumerate(self.windows)
        )


def _conflicts(config: ModelConfig) -> Iterator[str]:
    """Yields a sentence for each conflict between fields."""
    heads, experts, delta, scaling = config.num_attention_heads, config.experts, config.delta, config.rope_scaling
    if experts and experts.num_experts_per_tok > experts.num_experts:
        most = experts.num_experts
        yield f"num_experts_per_tok is {experts.num_experts_per_tok}: it must be at most num_experts, {most}"
    if not experts and config.router == "frozen":
        yield 'router "frozen" is of models with experts, and this one has none: set it to "trained"'
    if scaling and scaling.rope_type == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        if low is None or high is None or low >= high:
            yield "the rope scaling llama3 needs a low_freq_factor that is below its high_freq_factor"
    if scaling and scaling.rope_type == "yarn" and config.rope_theta == 1:
        yield "the rope scaling yarn divides by the logarithm of rope_theta, which is 1: it must be another number"
    if scaling and scaling.rope_type == "longrope":
        if scaling.original_max_position_embeddings == 1:
            yield "the rope scaling longrope needs original_max_position_embeddings above 1"
        for name in ("short_factor", "long_factor"):
            factors, pairs = getattr(scaling, name) or (), config.rotated // 2
            if len(factors) != pairs:
                yield (
                    f"the rope scaling longrope has {len(factors)} numbers in {name}: it needs {pairs}, one for each "
                    "rotated pair of features"
                )
    if heads % config.num_key_value_heads:
        yield f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({config.num_key_value_heads})"
    if config.rotated % 2:
        yield f"{config.rotated} features of a head would be rotated: head_dim · partial_rotary_factor must be even"
    if delta and delta.num_value_heads % delta.num_key_heads:
        yield "linear_num_value_heads must be a multiple of linear_num_key_heads"
    if (others := config.global_heads) and (heads % others.num_key_value_heads or others.head_dim % 2):
        yield f"num_attention_heads must be a multiple of {others}, with an even head_dim"
    if experts and config.use_double_wide_mlp and config.num_kv_shared_layers:
        yield "use_double_wide_mlp is not supported in models with experts"
    mixers = {mixer for mixer, _ in config.forms}
    if {READ.get(mixer, mixer) for mixer in mixers} - mixers:
        yield "num_kv_shared_layers: each of the last layers needs an earlier layer with the same window"
    if config.delta_layers and (not delta or len(config.delta_layers) == config.num_hidden_layers):
        yield "a decoder needs the sizes of its delta nets, and at least one layer with attention"
    if config.attention == "cudnn" and config.dtype != "bfloat16":
        yield 'attention "cudnn" computes in bfloat16: set dtype to bfloat16, or attention to "shared"'
    for name in _NOT_COMPUTED.get(config.attention, ()):
        if getattr(config, name):
            yield f'attention "{config.attention}" does not compute {name}: set it to "auto" or "shared"'
    unfit = [size for size in config.head_dims if size % 8 or size > 256]
    if config.attention == "cudnn" and unfit:
        yield (
            f'attention "cudnn" computes heads of at most 256 features, in eights, and head_dim is {unfit[0]}: set it '
            'to "auto", "shared" or "xla"'
        )
