"""Reads and writes the folder of a run."""

from grpo_jax.errors import need

need("tyro", "rich", "filelock", "orbax", "yaml", "huggingface_hub")
