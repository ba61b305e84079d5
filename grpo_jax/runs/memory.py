"""What a run needs of one device's memory, from shapes alone. `python -m grpo_jax.runs.memory` prints README's table.

Peak = held + max(sample, learn), in bytes:

- held = w W + 8 A + start: parameters, two moments of AdamW in float32, and the start, which is the reference.
- sample = B W_layers + B V D + cache: the layers laid out for decoding, their keys and values.
- learn = 4 A · (2 with microbatches, else 1) + activations + logits: gradients, their sum, and one microbatch.

W parameters of the decoder of w bytes each, A that are trained, B bytes of an activation. Without LoRA A is W, and the
start is a copy of W. With LoRA the start shares its base with the policy. On a mesh all but cache, activations and
logits are divided by fsdp · tensor, and the prompts are those of one device. Left out are what the compiler adds,
fragmentation, the parameters of a layer that a mesh has gathered, a critic of PPO (as much again as the policy), and a
reference that moves (one more copy).

Other letters as in `models.transformer`: N prompts of P tokens, G completions of T tokens each.
"""

from typing import NamedTuple

from grpo_jax.models.config import ModelConfig

FLOAT32 = 4
_BYTES = {"float32": 4, "bfloat16": 2}
_BLOCK = 128  # queries whose scores exist at a time, as in `models.attention.attend`
GIB = 2**30


class Shape(NamedTuple):
    """The numbers of a run that its memory depends on, on one device."""

    num_prompts: int = 8  # N
    group_size: int = 8  # G
    prompt_tokens: int = 256  # P
    max_tokens: int = 512  # T
    microbatches: int = 2  # pieces that a minibatch is computed in
    lora_rank: int = 0  # 0: all parameters are trained
    param_bytes: int = FLOAT32  # of each parameter of the decoder
    slice_elements: int = 2**23  # of a slice of the logits: 2¹⁹ on a CPU
    min_slice_width: int = 512  # tokens of the vocabulary in a slice: 128 on a CPU
    shards: int = 1  # devices that each parameter is divided among: fsdp · tensor of a mesh


class Estimate(NamedTuple):
    """Bytes of one device."""

    params: int  # of the decoder, and of adapters
    optimizer: int  # the two moments of AdamW
    start: int  # the trained parameters as they were: the reference
    gradients: int
    decoding: int  # the layers again, laid out for decoding, and the unembedding
    cache: int  # keys and values of prompts and completions
    activations: int  # of one microbatch
    logits: int  # slices of them, and their matrix

    @property
    def held(self) -> int:
        """What stays on the device between programs."""
        return self.params + self.optimizer + self.start

    @property
    def peak(self) -> int:
        """The larger of sampling and learning, with what is held."""
        return self.held + max(self.decoding + self.cache, self.gradients + self.activations + self.logits)


def num_params(config: ModelConfig) -> int:
    """Parameters of the decoder: V D (twice if untied) + L · (attention + MLP + norms) + D.

    Args:
      config: the decoder's shape.
    """
    d, f, e = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    attention = 2 * d * heads * e + 2 * d * kv_heads * e
    attention += (heads + 2 * kv_heads) * e * config.qkv_bias + d * config.o_bias + 2 * e * config.qk_norm
    mlp = 3 * d * f + (2 * f + d) * config.mlp_bias
    matrices = 1 if config.tie_word_embeddings else 2
    return matrices * config.vocab_size * d + config.num_hidden_layers * (attention + mlp + 2 * d) + d


def num_adapter_params(config: ModelConfig, rank: int) -> int:
    """Parameters of LoRA on all seven projections: rank · Σ (inputs + outputs).

    Args:
      config: the decoder's shape.
      rank: R.
    """
    d, f = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    of_layer = 2 * (d + queries) + 2 * (d + keys) + 3 * (d + f)
    return config.num_hidden_layers * rank * of_layer


def estimate(config: ModelConfig, shape: Shape) -> Estimate:
    """The memory of a run of GRPO on one device.

    Args:
      config: the decoder, with its dtype and remat.
      shape: of the run.

    Returns:
      Bytes by purpose.
    """
    decoder = num_params(config)
    adapters = num_adapter_params(config, shape.lora_rank)
    trained = (adapters or decoder) // shape.shards
    activation = _BYTES[config.dtype]
    return Estimate(
        params=(decoder * shape.param_bytes + adapters * FLOAT32) // shape.shards,
        optimizer=2 * FLOAT32 * trained,
        start=FLOAT32 * trained,
        gradients=FLOAT32 * trained * (2 if shape.microbatches > 1 else 1),
        decoding=_decoding(config) // shape.shards,
        cache=_cache(config, shape) * activation,
        activations=_activations(config, shape),
        logits=_logits(config, shape),
    )


def _decoding(config: ModelConfig) -> int:
    """Bytes: the layers, and the unembedding where it has to be cast."""
    vocabulary = config.vocab_size * config.hidden_size
    layers = num_params(config) - vocabulary * (1 if config.tie_word_embeddings else 2)
    return _BYTES[config.dtype] * (layers + (vocabulary if config.dtype != "float32" else 0))


def _cache(config: ModelConfig, shape: Shape) -> int:
    """Numbers: 2 L K E for each token of a prompt, once a group, and of a completion."""
    tokens = shape.num_prompts * (shape.prompt_tokens + shape.group_size * (shape.max_tokens - 1))
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * tokens


def _activations(config: ModelConfig, shape: Shape) -> int:
    """Bytes: what each layer keeps, and what the backward pass of one layer works on."""
    prompts = -(-shape.num_prompts // shape.microbatches)
    tokens = prompts * (shape.prompt_tokens + shape.group_size * (shape.max_tokens - 1))
    d, f, size = config.hidden_size, config.intermediate_size, _BYTES[config.dtype]
    heads, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    projected = heads + 2 * keys + heads + d + 2 * f  # of queries, keys, values; attended; middle; gate and up
    kept = d if config.remat == "layer" else d + projected
    # A prompt's keys and values are copied to each of its completions.
    in_a_row = prompts * shape.group_size * (shape.prompt_tokens + shape.max_tokens)
    scores = in_a_row * config.num_attention_heads * min(_BLOCK, shape.max_tokens)
    working = 2 * projected * tokens * size + 4 * keys * in_a_row * size + 2 * FLOAT32 * scores
    return config.num_hidden_layers * kept * tokens * size + working


def _logits(config: ModelConfig, shape: Shape) -> int:
    """Bytes: three slices in float32, hidden states and their gradient, and the matrix in the dtype of activations."""
    rows = -(-shape.num_prompts // shape.microbatches) * shape.group_size * shape.max_tokens
    width = min(max(shape.slice_elements // rows, shape.min_slice_width), config.vocab_size)
    cast = 0 if config.dtype == "float32" else config.vocab_size * config.hidden_size * _BYTES[config.dtype]
    return 3 * FLOAT32 * rows * width + 2 * rows * config.hidden_size * FLOAT32 + cast


# ---- README's table


def _qwen2(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        rope_theta=1e6,
        tie_word_embeddings=tied,
        qkv_bias=True,
        dtype="bfloat16",
        remat="layer",
    )


# As published: config.json of Qwen/Qwen2.5-….
MODELS = {
    "Qwen2.5-0.5B": _qwen2(896, 4864, 24, 14, 2, 151936, True),
    "Qwen2.5-1.5B": _qwen2(1536, 8960, 28, 12, 2, 151936, True),
    "Qwen2.5-7B": _qwen2(3584, 18944, 28, 28, 4, 152064, False),
}


def table() -> str:
    """README's table: GiB of one device for each model, in markdown."""
    lines = ["| model | parameters | all trained | with `--fsdp 8` | LoRA, rank 16 |", "|---|---|---|---|---|"]
    for name, config in MODELS.items():
        shapes = Shape(), Shape(shards=8), Shape(lora_rank=16, param_bytes=2)
        cells = (f"{of.peak / GIB:.0f} ({of.held / GIB:.0f})" for of in (estimate(config, shape) for shape in shapes))
        lines.append(f"| {name} | {num_params(config) / 1e9:.2f} billion | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
