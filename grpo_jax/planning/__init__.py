"""Planning before anything is compiled: the memory of a run, and the pieces and remat that fit."""

from grpo_jax.errors import need

need("flax", "optax")
