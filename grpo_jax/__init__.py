"""GRPO post-training of language models in JAX, as pure functions."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_jax.config import GRPOConfig, recipe
    from grpo_jax.functional.presets import PRESETS
    from grpo_jax.models.huggingface import load_pretrained
    from grpo_jax.rl.programs import make_programs
    from grpo_jax.tasks.task import text_task
    from grpo_jax.training.phases import train
    from grpo_jax.training.trainer import GRPOTrainer

__version__ = "0.3.0"
__all__ = [
    "PRESETS",
    "GRPOConfig",
    "GRPOTrainer",
    "load_pretrained",
    "make_programs",
    "recipe",
    "text_task",
    "train",
]
_MODULES = {
    "PRESETS": "functional.presets",
    "GRPOConfig": "config",
    "GRPOTrainer": "training.trainer",
    "load_pretrained": "models.huggingface",
    "make_programs": "rl.programs",
    "recipe": "config",
    "text_task": "tasks.task",
    "train": "training.phases",
}


def __getattr__(name: str) -> Any:
    """Imports a name at its first use, so that `grpo_jax.functional` needs only jax."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    """Lists the names that are imported at their first use, too."""
    return sorted({*globals(), *__all__})
