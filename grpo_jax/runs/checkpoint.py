"""Checkpoints of a phase of a run: saved asynchronously, verified by seals, and restored exactly."""

import ctypes
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from grpo_jax import __version__, hosts
from grpo_jax.data.types import hash_files, hash_values
from grpo_jax.errors import UsageError, lacking, reason_of
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.runs.files import check_fields, finite, read_object, write_json
from grpo_jax.runs.progress import say_aside

State = TypeVar("State", bound=Any)  # a NamedTuple with a field `params`, such as `rl.types.TrainState`


class Checkpoints:
    """The checkpoints of one phase, in a folder of their own. A context manager that waits for saves at its end.

    `restore` skips a checkpoint that a crash cut off or whose seal shows damage, and takes the one before it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 2,
        keep_best: bool = False,
        run: Callable[[], str | None] = lambda: None,
        lines: Callable[[], dict[str, Any]] = dict,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """Sets the folder; `restore` and `save` create it.

        Args:
          folder: The folder for the checkpoints of the phase.
          keep: The number of checkpoints to keep; older checkpoints are deleted.
          keep_best: True to keep the checkpoint of the best trained step as well.
          run: Returns the digest of the run's options and inputs, as in `write_seal`. Checkpoints with another digest
            are skipped.
          lines: Writes the lines of the phase to the disk, and returns their number and checksum by file.
          warn: Prints a warning, one sentence; None: to stderr.
        """
        self._folder, self._keep, self._keep_best = folder.absolute(), keep, keep_best
        self._run, self._warn = run, warn or partial(say_aside, "warning")
        self._saving, self._count_lines = 0, lines  # the step
        self.lines: dict[str, Any] = {}  # the lines that the restored or saved checkpoint covers
        self.scores: dict[int, float] = {}  # held-out scores by step, larger is better
        self._saved_scores: dict[int, float] = {}  # those that the checkpoint in `_saving` covers

    @cached_property
    def _manager(self) -> ocp.CheckpointManager:
        """Opens orbax's manager when it is first needed: it fails on damaged folders, which `restore` renames first."""
        then = ocp.AsyncOptions(post_finalization_callback=self._seal)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_Preserved(self._keep, self._best),
            enable_async_checkpointing=True,
            async_options=then,
        )
        return ocp.CheckpointManager(self._folder, options=options)

    def save(self, state: State, step: int) -> None:
        """Starts to save a state, and returns when its arrays have been copied.

        A CPU's arrays are not copied, because host and device share their memory. This then returns when they have been
        written: the next update could not reuse arrays that are still read, and would make a second state.
        """
        # Pass one copy of each replicated array: orbax would compile a slice for each device. With several hosts,
        # orbax must see the arrays of all devices.
        alone = hosts.count() == 1
        single = jax.tree.map(lambda x: x.addressable_data(0) if alone and x.is_fully_replicated else x, state)
        items = {name: ocp.args.StandardSave(item) for name, item in _items(single).items()}
        self._manager.wait_until_finished()  # the seal of the previous checkpoint reads `_saving`
        self._check_room(state)
        self._saving, self.lines, self._saved_scores = step, self._count_lines(), dict(self.scores)
        if not self._manager.save(step, args=ocp.args.Composite(**items)):
            raise UsageError(f"step {step} cannot be saved in {self._folder}, which holds a later one: start a new run")
        if jax.default_backend() == "cpu":
            self._manager.wait_until_finished()
            _return_free_memory()

    def note_score(self, step: int, score: float) -> bool:
        """Records the held-out score of a step in the next seal, or in the seal of the step if it was saved without it.

        Returns:
          True if the checkpoint of the step is to be kept as the best.
        """
        self.scores[step] = score if math.isfinite(score) else -math.inf
        if hosts.is_first() and (file := self._folder / str(step) / _SEAL_FILE).exists():
            write_json(file, _with_digest(read_object(file) | {"scores": finite(self.scores)}))
        return self._best() == step

    def _best(self) -> int | None:
        """Returns the step with the best score, if its checkpoint is kept; step 0, the start, has none."""
        return best_step(self.scores) if self._keep_best and self.scores else None

    def _seal(self) -> None:
        """Seals a checkpoint before orbax renames its folder, so that it appears with its seal or not at all."""
        if hosts.is_first():
            folder, unnamed = (self._folder / f"{self._saving}{end}" for end in ("", ocp.path.atomicity.TMP_DIR_SUFFIX))
            sealed = unnamed if unnamed.is_dir() else folder
            write_seal(sealed, step=self._saving, run=self._run(), lines=self.lines, scores=self._saved_scores)

    def _check_room(self, state: State) -> None:
        """Raises an error if the disk has no room for a checkpoint, before a part of it is written."""
        needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        if needed > (free := shutil.disk_usage(self._folder).free):
            raise UsageError(
                f"a checkpoint takes {needed / 2**20:.1f} MiB, and the disk of {self._folder} has {free / 2**20:.1f} "
                "free: free some space, then add --resume"
            )

    def restore(
        self, like: Callable[[], State], shardings: Callable[[State], State] | None = None
    ) -> tuple[State, int]:
        """Returns the newest state that verifies and its step, or `like()` and 0 if nothing was saved.

        Newer checkpoints that do not verify are renamed, and a warning names them.

        Args:
          like: Returns the initial state. If there is a checkpoint, only the shapes of this state are used.
          shardings: (shapes of a state) -> the shardings of its arrays, which may differ from those at the save; None:
            the first device.

        Raises:
          UsageError: There are checkpoints, and none verifies; or the disk has no room for another.
        """
        shapes = jax.eval_shape(like)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._check_room(shapes)
        newest = self._where_to_go_on() if hosts.is_first() else None
        step, self.lines, self.scores = hosts.first_says("where the run goes on", newest or (0, {}, {}))
        if not step:
            return like(), 0
        targets = _placed(_items(shapes), None if shardings is None else _items(shardings(shapes)))
        restored = self._read(step, {name: ocp.args.StandardRestore(target) for name, target in targets.items()})
        _return_free_memory()
        return shapes._replace(params=restored["params"], **restored["rest"]), step

    def _where_to_go_on(self) -> tuple[int, dict[str, Any], dict[int, float]] | None:
        """Returns the newest step that verifies, with the numbers of lines and the scores that its seal contains.

        Newer checkpoints are renamed. None: nothing was saved.
        """
        if not (steps := saved_steps(self._folder)):
            return None
        seal, passed = self._newest(steps)
        for wrong in passed:
            shutil.rmtree(self._folder / f"damaged-{wrong}", ignore_errors=True)  # of an earlier start
            (self._folder / str(wrong)).rename(self._folder / f"damaged-{wrong}")
        if passed:
            self._warn(f"{self._folder}: {_in_words(passed)}; the run goes on from step {seal['step']}")
        return seal["step"], seal.get("lines", {}), _scores_in(seal)

    def read_scores(self) -> dict[int, float]:
        """Returns the held-out scores by step up to the newest checkpoint, larger is better; {} if there are none."""
        steps = saved_steps(self._folder)
        return _scores_in(self._newest(steps, _SEAL_FILE)[0]) if steps else {}

    def _newest(self, steps: Sequence[int], prefix: str = "") -> tuple[dict[str, Any], dict[int, str]]:
        """Returns the seal of the newest of these steps that verifies, and the reasons why newer steps do not."""
        passed: dict[int, str] = {}
        for step in sorted(steps, reverse=True):
            seal, wrong = check_seal(self._folder / str(step), prefix)
            if seal:
                if seal["version"].rpartition(".")[0] not in _READABLE:
                    raise UsageError(
                        f"checkpoint {step} in {self._folder} was written by grpo_jax {seal['version']}, and this is "
                        f"{__version__}, which cannot read it: take that version, or start a new run"
                    )
                if seal["step"] != step:
                    wrong = f"it is of step {seal['step']}"
                elif seal["run"] != (run := self._run()) and None not in (seal["run"], run):
                    wrong = "it is of another run, or of one that began with other options or rows"
                else:
                    return seal, passed
            passed[step] = wrong
        raise UsageError(
            f"{self._folder}: {_in_words(passed)}, and there is no other: put its files back, or start a new run"
        )

    def restore_params(self, like: Callable[[Any], Params], step: int | None = None) -> tuple[Params, int]:
        """Restores only the policy's trained parameters, without reading the optimizer's state or a critic.

        Args:
          like: A function from the tree of the stored parameters to the shapes and dtypes of the parameters.
          step: The step of the checkpoint; None: the newest.

        Returns:
          The parameters and their step.

        Raises:
          UsageError: There is no such checkpoint.
        """
        steps = sorted(saved_steps(self._folder))
        if not steps:
            raise UsageError(f"there is no checkpoint in {self._folder} yet: continue the run with --resume")
        if step not in (None, *steps):
            raise UsageError(f"there is no checkpoint of step {step} in {self._folder}, only of {steps}")
        seal, passed = self._newest([step] if step else steps, "params/")
        chosen = seal["step"]
        if passed:
            self._warn(f"{self._folder}: {_in_words(passed)}; step {chosen} is taken")
        # Methods that learn from rollouts name parameters by the role of their model.
        stored = self._folder / str(chosen) / "params"
        tree = ocp.PyTreeCheckpointHandler().metadata(stored).tree
        has_roles = "policy" in tree
        target = _placed({"policy": like(tree["policy"])} if has_roles else like(tree))
        how = ocp.checkpoint_utils.construct_restore_args(target)
        args = ocp.args.PyTreeRestore(target, restore_args=how, partial_restore=has_roles)
        params = self._read(chosen, {"params": args})["params"]
        return params["policy"] if has_roles else params, chosen

    def _read(self, step: int, items: Mapping[str, Any]) -> Any:
        """Reads the items of a checkpoint, each with its orbax arguments."""
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(**items))
            if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(dict(restored))):
                raise LookupError("a partial restore leaves out what is not there")
            return restored
        except (ValueError, TypeError, LookupError) as error:
            if lacking(error):
                raise
            raise UsageError(
                f"checkpoint {step} in {self._folder} has other parameters than the model: put its files back, or "
                "start a new run (a reward model is in its run's folder reward-model)"
            ) from error

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: Any) -> None:
        if "_manager" in vars(self):
            self._manager.wait_until_finished()
            self._manager.close()


def _return_free_memory() -> None:
    """Returns the heap's free memory to the system. The C library would keep what a checkpoint's files took."""
    with suppress(AttributeError, OSError):  # only glibc has the function
        ctypes.CDLL(None).malloc_trim(0)


class _Preserved(NamedTuple):
    """Orbax's policy of what to keep: the newest checkpoints, and the best if there is one."""

    newest: int
    best: Callable[[], int | None]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        newest = sorted(checkpoint.step for checkpoint in checkpoints)[-self.newest :]
        return [checkpoint.step in (*newest, self.best()) for checkpoint in checkpoints]


def _scores_in(seal: Mapping[str, Any]) -> dict[int, float]:
    """Returns the held-out scores in a seal, by step."""
    scores = seal.get("scores") or {}
    return {int(step): -math.inf if score is None else score for step, score in scores.items()}


def best_step(scores: Mapping[int, float]) -> int:
    """Returns the step with the best score, the first of equal ones."""
    return max(sorted(scores), key=scores.__getitem__)


def saved_steps(folder: Path) -> list[int]:
    """Returns the steps by which entries in a folder of checkpoints are named, in any order."""
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return [int(name) for name in names if name.isascii() and name.isdecimal() and str(int(name)) == name]


def _in_words(passed: Mapping[int, str]) -> str:
    """Returns the reasons why checkpoints are not used, as text."""
    return ", and ".join(f"checkpoint {step} is not used, for {wrong}" for step, wrong in passed.items())


def _placed(tree: Any, shardings: Any = None) -> Any:
    """Returns the shapes and dtypes of a tree with shardings; None: the first device."""
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shardings = jax.tree.map(lambda _: first, tree) if shardings is None else shardings
    return jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree, shardings)


def _items(state: Any) -> dict[str, Any]:
    """Splits a state into parameters and the rest, which are stored separately."""
    rest = state._asdict()
    return {"params": rest.pop("params"), "rest": rest}


def params_sha256(params: Any) -> str:
    """Returns the SHA-256 of all leaves with their names and shapes: equal exactly when the parameters are equal."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.ascontiguousarray(hosts.whole(leaf))
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


# ---- seals

_SEAL_FILE = "digests.json"  # in the checkpoint's folder, so that both are deleted together
_DIGEST = "digest"  # the key for the digest of the seal itself
_READABLE = ("0.2", "0.3")  # versions whose checkpoints have this form
# Files that orbax may write after a checkpoint is sealed. This module does not read them.
_UNSEALED = {"_CHECKPOINT_METADATA", "commit_success.txt"}


def write_seal(
    folder: Path,
    *,
    step: int,
    run: str | None = None,
    lines: Mapping[str, Any] = {},
    scores: Mapping[int, float] = {},
) -> None:
    """Seals a complete checkpoint.

    Args:
      folder: The folder of the checkpoint.
      step: The step of the checkpoint.
      run: The digest of the options and inputs that the run began with; None: not recorded.
      lines: The numbers and checksums of lines that the run had written, by file.
      scores: The held-out scores so far, by step. They decide which checkpoint is kept and when the run ends.
    """
    names = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    seal = {"files": hash_files(folder, names - _UNSEALED), "step": step, "run": run, "version": __version__}
    seal |= {"lines": dict(lines), "scores": finite(scores)}
    write_json(folder / _SEAL_FILE, _with_digest(seal))


def _with_digest(seal: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a seal with the digest of its other fields."""
    fields = {name: value for name, value in seal.items() if name != _DIGEST}
    return fields | {_DIGEST: hash_values(fields)}


def check_seal(folder: Path, prefix: str = "") -> tuple[dict[str, Any] | None, str]:
    """Compares a checkpoint with its seal, which detects a single changed bit.

    Args:
      folder: The folder of the checkpoint.
      prefix: Read only files whose paths begin with it. All files must exist.

    Returns:
      The seal with files, step, run and version, and ""; or None and a description of the defect.
    """
    try:
        seal = json.loads((folder / _SEAL_FILE).read_text(encoding="utf-8"))
        if seal.pop(_DIGEST) != hash_values(seal):
            raise ValueError(f"{_SEAL_FILE} does not have its digest")
        check_fields(seal, _SEAL_FILE, {"files": dict[str, str], "step": int, "run": str | None, "version": str})
        present = {name for name in seal["files"] if (folder / name).is_file()}
        digests = hash_files(folder, (name for name in present if name.startswith(prefix)))
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        return None, f"it is incomplete or damaged ({reason_of(error)})"
    for name, digest in seal["files"].items():
        if name not in present or digests.get(name, digest) != digest:
            return None, f"{name} is missing or damaged"
    return seal, ""
