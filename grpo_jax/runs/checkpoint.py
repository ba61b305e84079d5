"""Checkpoints of a phase of a run: asynchronous, the newest few, verified by their seals and restored exactly."""

import hashlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from rich.console import Console
from rich.markup import escape

from grpo_jax import __version__, hosts
from grpo_jax.data.types import hash_files, hash_values
from grpo_jax.errors import UsageError, lacking
from grpo_jax.models.transformer import Params

State = TypeVar("State", bound=Any)  # a NamedTuple with a field `params`, such as `rl.types.TrainState`


class Checkpoints:
    """The checkpoints of one phase, in a folder of its own. A context manager that waits for saves.

    A save that was cut off by a crash is ignored, and one that is damaged is found by its seal; the one before it
    restores.

    Attributes:
      lines: file of the run -> digest of the lines that led to the restored checkpoint; empty before that.
    """

    lines: Mapping[str, str] = {}

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 2,
        every: int = 0,
        minutes: float = 0.0,
        lines: Callable[[], Mapping[str, str]] = dict,
        run: Callable[[], str | None] = lambda: None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """Names a folder; `restore` and `save` create it.

        Args:
          folder: of the phase.
          keep: the newest so many stay.
          every: steps after which one is due; 0: none for that.
          minutes: after which one is due; 0: none for that.
          lines: digests of the run's lines so far, to be kept with a checkpoint.
          run: the digest of what the run began with, as in `Seal`; checkpoints of another run are passed over.
          warn: says a sentence; None: on stderr.
        """
        self._folder, self._keep, self._lines_so_far, self._warn = folder.absolute(), keep, lines, warn or _say
        self._every, self._minutes, self._run = every, minutes, run
        self._saving: tuple[int, Mapping[str, str]] | None = None
        self._last_save = time.monotonic()

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
        self._manager.wait_until_finished()  # the seal of the one before needs its lines
        self._check_room(state)
        self._saving = step, dict(self._lines_so_far())
        if not self._manager.save(step, args=ocp.args.Composite(**items)):
            raise UsageError(f"step {step} cannot be saved in {self._folder}, which holds a later one: start a new run")
        self._last_save = time.monotonic()

    def _seal(self) -> None:
        """Before the checkpoint gets its name: it appears with its seal, or not at all."""
        if self._saving and hosts.is_first():
            step, lines = self._saving
            folder, unnamed = (self._folder / f"{step}{end}" for end in ("", ocp.path.atomicity.TMP_DIR_SUFFIX))
            complete = unnamed if unnamed.is_dir() else folder
            wait_for_description(complete)
            write_seal(complete, lines, step=step, run=self._run())

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
        if self._every and step % self._every == 0:
            return True
        minutes = (time.monotonic() - self._last_save) / 60
        return self._minutes > 0 and hosts.first_says("whether to save", minutes >= self._minutes)

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
        newest = self._where_to_go_on() if hosts.is_first() else (0, {})
        step, self.lines = hosts.first_says("where the run goes on", newest)
        if not step:
            return like(), 0
        restored = self._restore(step, _items(shapes), None if shardings is None else _items(shardings(shapes)))
        return shapes._replace(params=restored["params"], **restored["rest"]), step

    def _where_to_go_on(self) -> tuple[int, Mapping[str, str]]:
        """The newest step that verifies, and its lines; 0 where nothing was saved. What is newer gets another name."""
        if not (steps := saved_steps(self._folder)):
            return 0, {}
        step, lines, passed = self._newest(steps)
        for wrong in passed:
            (self._folder / str(wrong)).rename(_unused(self._folder / f"damaged-{wrong}"))
        if passed:
            self._warn(f"{self._folder}: {_in_words(passed)}; the run goes on from step {step}")
        return step, lines

    def _newest(self, steps: Sequence[int], part: str = "") -> tuple[int, Mapping[str, str], dict[int, str]]:
        """The newest of these steps that verifies, its lines, and why newer ones do not."""
        passed: dict[int, str] = {}
        for step in sorted(steps, reverse=True):
            seal, wrong = check_seal(self._folder / str(step), part)
            if seal and not seal.is_readable:
                raise UsageError(
                    f"checkpoint {step} in {self._folder} was written by grpo_jax {seal.version}, and this is "
                    f"{__version__}, which cannot read it: take that version, or start a new run"
                )
            if seal and seal.step != step:
                wrong = f"it is of step {seal.step}"
            elif seal and seal.run != (run := self._run()) and None not in (seal.run, run):
                wrong = "it is of another run, or of one that began with other options or rows"
            elif seal:
                return step, seal.lines, passed
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
        chosen, _, passed = self._newest([step] if step else steps, "params/")
        if passed:
            self._warn(f"{self._folder}: {_in_words(passed)}; step {chosen} is taken")
        names = self._names(chosen)
        if "head" in names:
            raise UsageError(
                f"the checkpoints in {self._folder} are of a reward model, and of no policy: take the run's "
                "folder reward-model, or name another phase with --phase"
            )
        if "policy" not in names:
            return self._restore(chosen, {"params": like})["params"], chosen
        # The parameters of methods that learn from rollouts are named by the role of their model.
        part = _placed({"policy": like})
        how = ocp.checkpoint_utils.construct_restore_args(part)
        args = ocp.args.PyTreeRestore(part, restore_args=how, partial_restore=True)
        return self._read(chosen, {"params": args})["params"]["policy"], chosen

    def _restore(self, step: int, items: dict[str, Any], shardings: Any = None) -> Any:
        args = {name: ocp.args.StandardRestore(target) for name, target in _placed(items, shardings).items()}
        return self._read(step, args)

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
# What orbax writes after a checkpoint is sealed: a time into the first, and the second, which nobody reads.
_DATED, _TIME, _EMPTY_WORDS = "_CHECKPOINT_METADATA", "commit_timestamp_nsecs", "commit_success.txt"


class Seal(NamedTuple):
    """The contents of a checkpoint's seal."""

    files: Mapping[str, str]  # path in its folder -> digest
    lines: Mapping[str, str]  # file of the run -> digest of the lines that led to the checkpoint
    step: int | None = None
    run: str | None = None  # digest of what the run began with; None: it did not note that
    version: str = "0.1.0"  # of this library, which did not note it before 0.2.0

    @property
    def is_readable(self) -> bool:
        """Returns whether this version reads the checkpoint."""
        return self.version.rpartition(".")[0] == __version__.rpartition(".")[0]


def wait_for_description(folder: Path, *, seconds: float = 60.0) -> None:
    """Waits until orbax has written what a checkpoint holds, which it does in a thread of its own.

    On a busy machine that thread may write after all else is complete, and the file would differ from its seal.

    Args:
      folder: of the checkpoint.
      seconds: after which it is sealed as it is.
    """
    end = time.monotonic() + seconds
    while not _is_described(folder / _DATED) and time.monotonic() < end:
        time.sleep(0.01)


def _is_described(file: Path) -> bool:
    try:
        return bool(_mapping(json.loads(file.read_text(encoding="utf-8")))["item_handlers"])
    except (OSError, ValueError, TypeError, KeyError):  # half of it is written
        return False


def write_seal(folder: Path, lines: Mapping[str, str], *, step: int, run: str | None = None) -> None:
    """Seals a complete checkpoint.

    Args:
      folder: of the checkpoint.
      lines, step, run: as in `Seal`.
    """
    names = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    seal = Seal(_digests(folder, names - {_EMPTY_WORDS}), dict(lines), step, run, __version__)
    temporary = folder / f"{_SEAL_FILE}.tmp"
    text = json.dumps(seal._asdict() | {_DIGEST: hash_values(seal._asdict())}, indent=1) + "\n"
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, folder / _SEAL_FILE)


def check_seal(folder: Path, part: str = "") -> tuple[Seal | None, str]:
    """Compares a checkpoint with its seal. One bit that differs is found.

    Args:
      folder: of the checkpoint.
      part: only files whose paths begin so are read; their names are always compared.

    Returns:
      The seal and "", or None and what is wrong, in words.
    """
    if not folder.is_dir():
        return None, "it is no folder"
    if not (folder / _SEAL_FILE).exists():
        return None, "it was never completed" if any(folder.iterdir()) else "it is empty"
    try:
        fields = dict(_mapping(json.loads((folder / _SEAL_FILE).read_text(encoding="utf-8"))))
        noted = fields.pop(_DIGEST, None)
        seal = Seal(**fields)
        files, _ = _mapping(seal.files), _mapping(seal.lines)
        if noted != hash_values(fields):
            return None, f"its {_SEAL_FILE} is damaged"
    except (OSError, ValueError, TypeError, RecursionError):
        return None, f"its {_SEAL_FILE} cannot be read"
    try:
        if missing := [name for name in files if not (folder / name).is_file()]:
            return None, f"it lacks {missing[0]}"
        current = _digests(folder, {name for name in files if name.startswith((part, _DATED))})
    except OSError as error:
        return None, f"it cannot be read ({error.strerror})"
    except (ValueError, TypeError):
        return None, f"{_DATED} is damaged"
    if changed := [name for name, digest in current.items() if digest != files[name]]:
        return None, f"{changed[0]} is damaged"
    return seal, ""


def _digests(folder: Path, names: Set[str]) -> dict[str, str]:
    """Digests of the files of a checkpoint, without the time at which it was renamed."""
    current = hash_files(folder, names - {_DATED})
    if _DATED in names:
        metadata = _mapping(json.loads((folder / _DATED).read_text(encoding="utf-8")))
        current[_DATED] = hash_values({name: value for name, value in metadata.items() if name != _TIME})
    return current


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TypeError
    return value
