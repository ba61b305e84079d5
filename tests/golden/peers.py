"""Shares what the makers of golden arrays need: random inputs, losses with their gradient, trainers of TRL."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

ACCELERATOR = SimpleNamespace(
    device=torch.device("cpu"),
    num_processes=1,
    process_index=0,
    is_main_process=True,
    sync_gradients=True,
    gather=lambda x: x,
    gather_for_metrics=lambda x: x,
    reduce=lambda x, reduction: x,
    pad_across_processes=lambda x, **_: x,
    unwrap_model=lambda model: model,
)


def grid(x: Any) -> np.ndarray:
    """Rounds to multiples of 2⁻¹², whose differences and sums float32 holds exactly."""
    return (np.round(np.asarray(x) * 4096) / 4096).astype(np.float32)


def near(rng: np.random.Generator, logprobs: np.ndarray, scale: float) -> np.ndarray:
    """Draws log-probabilities around others, all below 0."""
    return np.minimum(grid(logprobs + scale * rng.normal(size=logprobs.shape)), np.float32(-1 / 4096))


def loss_and_gradient(loss_of: Callable, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Computes a loss and the gradient of its sum, by torch's autograd."""
    x = x.requires_grad_()
    loss = loss_of(x)
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    return {"loss": loss.detach(), "gradient": gradient}


class Options(SimpleNamespace):
    """Options of which those that are not set are None, which turns a feature of a trainer off."""

    def __getattr__(self, name: str) -> None:
        return None


def make_trainer(cls: type, **attributes: Any) -> Any:
    """Makes a trainer of TRL without its __init__. Attributes that are not passed are None."""
    self = object.__new__(type(cls.__name__, (cls,), {"__getattr__": Options.__getattr__}))
    vars(self).update({"accelerator": ACCELERATOR} | attributes)
    return self
