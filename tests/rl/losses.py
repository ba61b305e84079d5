"""The loss of a method on a batch, as a function of (models by role, batch with weights)."""

from functools import partial

from grpo_jax.rl import update


def loss_of(method):
    return partial(update.loss_of, method)
