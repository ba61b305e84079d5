"""Checkpoints of a phase of a run: asynchronous, the newest few, restored exactly."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from grpo_jax.errors import UsageError
from grpo_jax.models.transformer import Params

State = TypeVar("State", bound=Any)  # a NamedTuple with a field `params`, such as `training.state.TrainState`


class Checkpoints:
    """The checkpoints of one phase, in a folder of its own. A context manager that waits for saves.

    A save that was cut off by a crash is ignored; the one before it restores.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        """Opens or creates `folder`; the newest `keep` checkpoints stay."""
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def save(self, state: State, step: int) -> None:
        """Starts to save; returns when the arrays have been copied."""
        # One copy of what every device holds; orbax would cut it into a slice for each, and compile the cuts.
        single = jax.tree.map(lambda x: x.addressable_data(0) if x.is_fully_replicated else x, state)
        items = {name: ocp.args.StandardSave(item) for name, item in _items(single).items()}
        self._manager.save(step, args=ocp.args.Composite(**items))

    def restore(
        self, like: Callable[[], State], shardings: Callable[[State], State] | None = None
    ) -> tuple[State, int]:
        """The newest state and its step, or `like()` and 0 where there is none.

        Args:
          like: a first state; of a checkpoint its shapes.
          shardings: shapes of a state -> where its arrays are put, whatever devices saved them; None: on the first
            device.
        """
        step = self._manager.latest_step()
        if step is None:
            return like(), 0
        shapes = jax.eval_shape(like)
        restored = self._restore(step, _items(shapes), None if shardings is None else _items(shardings(shapes)))
        return shapes._replace(params=restored["params"], **restored["rest"]), step

    def restore_params(self, like: Params, step: int | None = None) -> tuple[Params, int]:
        """The policy's trained parameters alone, without reading the optimizer's state or a critic.

        Args:
          like: their shapes and dtypes.
          step: of the checkpoint; None: the newest.

        Returns:
          The parameters and their step.

        Raises:
          UsageError: there is no such checkpoint.
        """
        steps = sorted(self._manager.all_steps())
        chosen = (steps or [0])[-1] if step is None else step
        if chosen not in steps:
            raise UsageError(f"there is no checkpoint of step {chosen} in {self._manager.directory}, only of {steps}")
        names = self._names(chosen)
        if "head" in names:
            raise UsageError(
                f"the checkpoints in {self._manager.directory} are of a reward model, and of no policy: take the run's "
                "folder reward-model, or name another phase with --phase"
            )
        if names != {"policy", "critic"}:
            return self._restore(chosen, {"params": like})["params"], chosen
        # Of PPO, whose parameters are those of policy and critic.
        part = _placed({"policy": like})
        how = ocp.checkpoint_utils.construct_restore_args(part)
        args = ocp.args.PyTreeRestore(part, restore_args=how, partial_restore=True)
        return self._manager.restore(chosen, args=ocp.args.Composite(params=args))["params"]["policy"], chosen

    def _restore(self, step: int, items: dict[str, Any], shardings: Any = None) -> Any:
        args = {name: ocp.args.StandardRestore(target) for name, target in _placed(items, shardings).items()}
        return self._manager.restore(step, args=ocp.args.Composite(**args))

    def _names(self, step: int) -> set[str]:
        """What the parameters of a checkpoint are called, at the top of their tree."""
        stored = self._manager.directory / str(step) / "params"
        return set(ocp.PyTreeCheckpointHandler().metadata(stored).tree)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._manager.wait_until_finished()
        self._manager.close()


def _placed(tree: Any, shardings: Any = None) -> Any:
    """Shapes and dtypes of a tree with their shardings; None: on the first device."""
    first = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda _: first, tree) if shardings is None else shardings
    return jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree, shardings)


def _items(state: Any) -> dict[str, Any]:
    """What is stored apart, so that parameters can be read alone."""
    rest = state._asdict()
    return {"params": rest.pop("params"), "rest": rest}


def params_sha256(params: Any) -> str:
    """SHA-256 of all leaves, with their names and shapes: equal exactly when the parameters are."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
