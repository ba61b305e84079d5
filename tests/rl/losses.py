"""The loss of a method on a batch, as one function."""

from collections.abc import Callable
from typing import Any

import jax

from grpo_jax.rl.types import Batch, Logs, Method


def loss_of(method: Method) -> Callable[[Any, Batch], tuple[jax.Array, Logs]]:
    """Returns (models by role, batch with weights) -> the sum of the method's terms, and what they log."""

    def loss(models: Any, batch: Batch) -> tuple[jax.Array, Logs]:
        forward = method.forward(models, batch)
        losses, logs = zip(*(term(models, forward, batch) for term in method.terms), strict=True)
        means = {name: pair for log in logs for name, pair in log.means.items()}
        return sum(losses), Logs(means, {name: largest for log in logs for name, largest in log.maxima.items()})

    return loss
