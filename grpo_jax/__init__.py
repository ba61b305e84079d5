"""GRPO post-training of language models in JAX, as pure functions."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_jax.trainer import GRPOTrainer

__version__ = "0.2.0"
__all__ = ["GRPOTrainer"]


def __getattr__(name: str) -> Any:
    """Imports the trainer at its first use, so that `grpo_jax.functional` needs only jax."""
    if name != "GRPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from grpo_jax.trainer import GRPOTrainer

    return GRPOTrainer
