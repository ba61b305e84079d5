"""GRPO post-training of language models in JAX, as pure functions."""

__version__ = "0.1.0"
