"""A run on paper, before anything is compiled: its memory, its pieces, and what its devices exchange."""

from grpo_jax.errors import need

need("flax", "optax")
