"""Checkpoints of a phase of a run: asynchronous, the newest few, verified by their seals and restored exactly."""

import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from rich.console import Console
from rich.markup import escape

from grpo_jax import __version__, hosts
from grpo_jax.data.types import hash_files, hash_values
from grpo_jax.errors import UsageError, lacking
from grpo_jax.models.transformer import Params
from grpo_jax.runs.files import write_json

State = TypeVar("State", bound=Any)  # a NamedTuple with a field `params`, such as `rl.types.TrainState`


class Checkpoints:
    """The checkpoints of one phase, in a folder of its own. A context manager that waits for saves.

    A save that was cut off by a crash is ignored, and one that is damaged is found by its seal; the one before it
    restores.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 2,
        every: int = 0,
        run: Callable[[], str | None] = lambda: None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """Names a folder; `restore` and `save` create it.

        Args:
          folder: of the phase.
          keep: the newest so many stay.
          every: steps after which one is due; 0: none for that.
          run: the digest of what the run began with, as in `write_seal`; checkpoints of another run are passed over.
          warn: says a sentence; None: on stderr.
        """
        self._folder, self._keep, self._every = folder.absolute(), keep, every
        self._run, self._warn = run, warn or _say
        self._saving = 0  # the step

    @cached_property
    def _manager(self) -> ocp.CheckpointManager:
        """Opened when it is needed: it stumbles over what is no checkpoint, which `restore` sets aside first."""
        then = ocp.AsyncOptions(post_finalization_callback=self._seal)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep, enable_async_checkpointing=True, async_options=then
        )
        return ocp.CheckpointManager(self._folder, options=options)

    def save(self, state: State, step: int) -> None:
        """Starts to save; returns when the arrays have been copied."""
        # One copy of what every device holds; orbax would cut it into a slice for each, and compile the cuts. With
        # several hosts it has to know of all.
        alone = hosts.count() == 1
        single = jax.tree.map(lambda x: x.addressable_data(0) if alone and x.is_fully_replicated else x, state)
        items = {name: ocp.args.StandardSave(item) for name, item in _items(single).items()}
        self._manager.wait_until_finished()  # the seal of the one before needs its step
        self._check_room(state)
        self._saving = step
        if not self._manager.save(step, args=ocp.args.Composite(**items)):
            raise UsageError(f"step {step} cannot be saved in {self._folder}, which holds a later one: start a new run")

    def _seal(self) -> None:
        """Before the checkpoint gets its name: it appears with its seal, or not at all."""
        if hosts.is_first():
            folder, unnamed = (self._folder / f"{self._saving}{end}" for end in ("", ocp.path.atomicity.TMP_DIR_SUFFIX))
            write_seal(unnamed if unnamed.is_dir() else folder, step=self._saving, run=self._run())

    def _check_room(self, state: State) -> None:
        """Refuses to go on where the disk has no room for a checkpoint, before a half of it is written."""
        self._folder.mkdir(parents=True, exist_ok=True)
        needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        if needed > (free := shutil.disk_usage(self._folder).free):
            raise UsageError(
                f"a checkpoint takes {needed / 2**20:.1f} MiB, and the disk of {self._folder} has {free / 2**20:.1f} "
                "free: free some space, then add --resume"
            )

    def is_due(self, step: int) -> bool:
        """Returns whether to save after a step."""
        return self._every > 0 and step % self._every == 0

    def restore(
        self, like: Callable[[], State], shardings: Callable[[State], State] | None = None
    ) -> tuple[State, int]:
        """The newest state that verifies and its step, or `like()` and 0 where nothing was saved.

        What is newer and does not verify gets another name, and a warning names it.

        Args:
          like: a first state; of a checkpoint its shapes.
          shardings: shapes of a state -> where its arrays are put, whatever devices saved them; None: on the first
            device.

        Raises:
          UsageError: there are checkpoints, and none verifies; or the disk has no room for another.
        """
        shapes = jax.eval_shape(like)
        self._check_room(shapes)
        if not (step := hosts.first_says("where the run goes on", self._where_to_go_on() if hosts.is_first() else 0)):
            return like(), 0
        targets = _placed(_items(shapes), None if shardings is None else _items(shardings(shapes)))
        restored = self._read(step, {name: ocp.args.StandardRestore(target) for name, target in targets.items()})
        return shapes._replace(params=restored["params"], **restored["rest"]), step

    def _where_to_go_on(self) -> int:
        """Returns the newest step that verifies, or 0 where nothing was saved. What is newer gets another name."""
        if not (steps := saved_steps(self._folder)):
            return 0
        step, passed = self._newest(steps)
        for wrong in passed:
            (self._folder / str(wrong)).rename(_unused(self._folder / f"damaged-{wrong}"))
        if passed:
            self._warn(f"{self._folder}: {_in_words(passed)}; the run goes on from step {step}")
        return step

    def _newest(self, steps: Sequence[int], part: str = "") -> tuple[int, dict[int, str]]:
        """Returns the newest of these steps that verifies, and why newer ones do not."""
        passed: dict[int, str] = {}
        for step in sorted(steps, reverse=True):
            seal, wrong = check_seal(self._folder / str(step), part)
            if seal:
                if seal["version"].rpartition(".")[0] != __version__.rpartition(".")[0]:
                    raise UsageError(
                        f"checkpoint {step} in {self._folder} was written by grpo_jax {seal['version']}, and this is "
                        f"{__version__}, which cannot read it: take that version, or start a new run"
                    )
                if seal["step"] != step:
                    wrong = f"it is of step {seal['step']}"
                elif seal["run"] != (run := self._run()) and None not in (seal["run"], run):
                    wrong = "it is of another run, or of one that began with other options or rows"
                else:
                    return step, passed
            passed[step] = wrong
        raise UsageError(
            f"{self._folder}: {_in_words(passed)}, and there is no other: put its files back, or start a new run"
        )

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
        steps = sorted(saved_steps(self._folder))
        if step not in (None, *steps) or not steps:
            raise UsageError(f"there is no checkpoint of step {step or 0} in {self._folder}, only of {steps}")
        chosen, passed = self._newest([step] if step else steps, "params/")
        if passed:
            self._warn(f"{self._folder}: {_in_words(passed)}; step {chosen} is taken")
        names = self._names(chosen)
        if "head" in names:
            raise UsageError(
                f"the checkpoints in {self._folder} are of a reward model, and of no policy: take the run's "
                "folder reward-model, or name another phase with --phase"
            )
        # The parameters of methods that learn from rollouts are named by the role of their model.
        has_roles = "policy" in names
        target = _placed({"policy": like} if has_roles else like)
        how = ocp.checkpoint_utils.construct_restore_args(target)
        args = ocp.args.PyTreeRestore(target, restore_args=how, partial_restore=has_roles)
        params = self._read(chosen, {"params": args})["params"]
        return params["policy"] if has_roles else params, chosen

    def _read(self, step: int, items: Mapping[str, Any]) -> Any:
        """Returns the items of a checkpoint, each read as its arguments say."""
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except (ValueError, TypeError, LookupError) as error:
            if lacking(error):
                raise
            raise UsageError(
                f"checkpoint {step} in {self._folder} has other parameters than the model: put its files back, or "
                "start a new run"
            ) from error

    def _names(self, step: int) -> set[str]:
        """Returns the names at the top of a checkpoint's tree of parameters."""
        stored = self._folder / str(step) / "params"
        return set(ocp.PyTreeCheckpointHandler().metadata(stored).tree)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: Any) -> None:
        if "_manager" in vars(self):
            self._manager.wait_until_finished()
            self._manager.close()


def saved_steps(folder: Path) -> list[int]:
    """Returns the steps that something in a folder of checkpoints is named after, in any order."""
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return [int(name) for name in names if name.isascii() and name.isdecimal() and str(int(name)) == name]


def _say(sentence: str) -> None:
    Console(stderr=True).print(f"[yellow]warning:[/] {escape(sentence)}", soft_wrap=True)


def _in_words(passed: Mapping[int, str]) -> str:
    """Why checkpoints are passed over."""
    return ", and ".join(f"checkpoint {step} is not used, for {wrong}" for step, wrong in passed.items())


def _unused(path: Path) -> Path:
    """The path, or where it is taken one with a number behind it."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(free for free in itertools.chain([path], numbered) if not free.exists())


def _placed(tree: Any, shardings: Any = None) -> Any:
    """Shapes and dtypes of a tree with their shardings; None: on the first device."""
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shardings = jax.tree.map(lambda _: first, tree) if shardings is None else shardings
    return jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree, shardings)


def _items(state: Any) -> dict[str, Any]:
    """Splits a state into parameters and the rest, which are stored separately."""
    rest = state._asdict()
    return {"params": rest.pop("params"), "rest": rest}


def params_sha256(params: Any) -> str:
    """SHA-256 of all leaves, with their names and shapes: equal exactly when the parameters are."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.ascontiguousarray(hosts.whole(leaf))
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


# ---- seals

_SEAL_FILE = "digests.json"  # within the folder of the checkpoint, so that both are deleted together
_DIGEST = "digest"  # of the seal itself
# What orbax may write after a checkpoint is sealed, and nothing here reads.
_UNSEALED = {"_CHECKPOINT_METADATA", "commit_success.txt"}


def write_seal(folder: Path, *, step: int, run: str | None = None) -> None:
    """Seals a complete checkpoint.

    Args:
      folder: of the checkpoint.
      step: of the checkpoint.
      run: the digest of what the run began with; None: it did not note that.
    """
    names = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    seal = {"files": hash_files(folder, names - _UNSEALED), "step": step, "run": run, "version": __version__}
    write_json(folder / _SEAL_FILE, seal | {_DIGEST: hash_values(seal)})


def check_seal(folder: Path, part: str = "") -> tuple[dict[str, Any] | None, str]:
    """Compares a checkpoint with its seal. One bit that differs is found.

    Args:
      folder: of the checkpoint.
      part: only files whose paths begin so are read; their names are always compared.

    Returns:
      Its files, step, run and version, and ""; or None and what is wrong, in words.
    """
    if not folder.is_dir():
        return None, "it is no folder"
    if not (folder / _SEAL_FILE).exists():
        return None, "it was never completed" if any(folder.iterdir()) else "it is empty"
    try:
        seal = json.loads((folder / _SEAL_FILE).read_text(encoding="utf-8"))
        if seal.pop(_DIGEST, None) != hash_values(seal):
            return None, f"its {_SEAL_FILE} is damaged"
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None, f"its {_SEAL_FILE} cannot be read"
    files = seal["files"]
    try:
        if missing := [name for name in files if not (folder / name).is_file()]:
            return None, f"it lacks {missing[0]}"
        current = hash_files(folder, (name for name in files if name.startswith(part)))
    except OSError as error:
        return None, f"it cannot be read ({error.strerror})"
    if changed := [name for name, digest in current.items() if digest != files[name]]:
        return None, f"{changed[0]} is damaged"
    return seal, ""
