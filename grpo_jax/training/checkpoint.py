"""Checkpoints of a phase of a run: asynchronous, the newest few, restored exactly."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from grpo_jax.training.state import TrainState


class Checkpoints:
    """The checkpoints of one phase, in a folder of its own. A context manager that waits for saves.

    A save that was cut off by a crash is ignored; the one before it restores.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        """Opens or creates `folder`; the newest `keep` checkpoints stay."""
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def save(self, state: TrainState, step: int) -> None:
        """Starts to save; returns when the arrays have been copied."""
        # One copy of what every device holds; orbax would cut it into a slice for each, and compile the cuts.
        single = jax.tree.map(lambda x: x.addressable_data(0) if x.is_fully_replicated else x, state)
        self._manager.save(step, args=ocp.args.StandardSave(single))

    def restore(self, like: Callable[[], TrainState]) -> tuple[TrainState, int]:
        """The newest state and its step, or `like()` and 0 where there is none."""
        step = self._manager.latest_step()
        if step is None:
            return like(), 0
        target = jax.eval_shape(like)
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), target)
        return self._manager.restore(step, args=ocp.args.StandardRestore(target)), step

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._manager.wait_until_finished()
        self._manager.close()


def params_sha256(params: Any) -> str:
    """SHA-256 of all leaves, with their names and shapes: equal exactly when the parameters are."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
