"""One optimizer step, which `rl` and `offline` share: scores of tokens, gradients, the optimizer."""

from grpo_jax.errors import need

need("optax", "flax")
