"""The seal of a checkpoint: its step, its run and the digests of its files, checked before it is read."""

import json
import os
import time
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

from grpo_jax import __version__
from grpo_jax.data import digests

_FILE = "digests.json"  # within the folder of the checkpoint, so that both are deleted together
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
    temporary = folder / f"{_FILE}.tmp"
    text = json.dumps(seal._asdict() | {_DIGEST: digests.of_values(seal._asdict())}, indent=1) + "\n"
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, folder / _FILE)


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
    if not (folder / _FILE).exists():
        return None, "it was never completed" if any(folder.iterdir()) else "it is empty"
    try:
        fields = dict(_mapping(json.loads((folder / _FILE).read_text(encoding="utf-8"))))
        noted = fields.pop(_DIGEST, None)
        seal = Seal(**fields)
        files, _ = _mapping(seal.files), _mapping(seal.lines)
        if noted != digests.of_values(fields):
            return None, f"its {_FILE} is damaged"
    except (OSError, ValueError, TypeError, RecursionError):
        return None, f"its {_FILE} cannot be read"
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
    current = digests.of_files(folder, names - {_DATED})
    if _DATED in names:
        metadata = _mapping(json.loads((folder / _DATED).read_text(encoding="utf-8")))
        current[_DATED] = digests.of_values({name: value for name, value in metadata.items() if name != _TIME})
    return current


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TypeError
    return value
