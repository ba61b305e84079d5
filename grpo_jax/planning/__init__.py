"""A run on paper, before anything is compiled: its memory, and the pieces and remat that fit."""

from grpo_jax.errors import need

need("flax", "optax")
