"""Methods that learn from rollouts."""

from grpo_jax.errors import need

need("optax", "flax")
