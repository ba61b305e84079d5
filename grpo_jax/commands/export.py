"""`grpo-jax export`: a run's checkpoint as a folder in Hugging Face format."""

from grpo_jax.runs.export import command as command
