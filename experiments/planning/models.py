"""Shapes of published models, as their config.json has them."""

from grpo_jax.models.config import ExpertsConfig, ModelConfig

# Columns: V, D, F, L, H, K, E.
MODELS = {
    "Qwen2.5-0.5B": ModelConfig(151_936, 896, 4864, 24, 14, 2, 64, rope_theta=1e6, qkv_bias=True),
    "Qwen2.5-1.5B": ModelConfig(151_936, 1536, 8960, 28, 12, 2, 128, rope_theta=1e6, qkv_bias=True),
    "Qwen2.5-7B": ModelConfig(
        152_064, 3584, 18_944, 28, 28, 4, 128, rope_theta=1e6, qkv_bias=True, tie_word_embeddings=False
    ),
    "Qwen3-0.6B": ModelConfig(151_936, 1024, 3072, 28, 16, 8, 128, rope_theta=1e6, qk_norm=True),
    "Qwen3-30B-A3B": ModelConfig(
        *(151_936, 2048, 6144, 48, 32, 4, 128),
        rope_theta=1e6,
        qk_norm=True,
        tie_word_embeddings=False,
        experts=ExpertsConfig(128, 8, 768, norm_topk_prob=True),
    ),
    "Gemma-3-270M": ModelConfig(
        *(262_144, 640, 2048, 18, 4, 1, 256),
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        norms="around",
        zero_centered_norms=True,
        embedding_multiplier=640**0.5,
        hidden_act="gelu_pytorch_tanh",
        qk_norm=True,
        query_pre_attn_scalar=256,
        sliding_window=512,
        sliding_layers=tuple(layer for layer in range(18) if layer % 6 != 5),
        max_position_embeddings=32_768,
    ),
    "Llama-3-70B": ModelConfig(128_256, 8192, 28_672, 80, 64, 8, 128, rope_theta=5e5, tie_word_embeddings=False),
}
