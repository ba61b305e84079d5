"""A run's folder, and what reads and writes it."""

from grpo_jax.errors import need

need("tyro", "rich", "filelock", "orbax", "yaml", "huggingface_hub")
