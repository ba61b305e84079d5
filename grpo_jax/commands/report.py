"""`grpo-jax report`: a run as a page that opens from disk."""

from grpo_jax.runs.report import command as command
