"""From rollouts to updates."""

from grpo_jax.errors import need

need("optax", "flax")
