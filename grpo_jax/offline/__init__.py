"""Training phases on fixed data: completions (with or without a teacher), pairs, and ratings."""

from grpo_jax.errors import need

need("optax", "flax")
