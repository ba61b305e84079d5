"""Files of a run: JSON and lines of JSON, written at once and checked when read, and the lock of the folder."""

import contextlib
import fcntl
import json
import math
import os
import socket
import weakref
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax import hosts
from grpo_jax.errors import UsageError, reason_of
from grpo_jax.options import fits

COMMAND = "command.txt"  # how a run was started, a line each time


def finite(value: Any) -> Any:
    """The value with null for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_object(file: Path, hint: Any = dict) -> dict[str, Any]:
    """A JSON file of a run.

    Args:
      file: that exists.
      hint: its type.

    Raises:
      UsageError: it cannot be read, or holds something else.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} cannot be read ({reason_of(error)}): mend it, or start a new run") from None
    if not fits(value, hint):
        raise UsageError(f"{file} is not as a run writes it: mend it, or start a new run")
    return value


def read_lines(file: Path, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The lines of a .jsonl file of a run, which may not exist yet; one cut off at the end is left out.

    Args:
      file: of the run.
      fields: name -> type of what each line must have.

    Raises:
      UsageError: a line is not as a run writes it.
    """
    return [record for _, record in complete_lines(file, fields)] if file.exists() else []


def complete_lines(file: Path, fields: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a file that end, as text and as what they say."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read ({reason_of(error)}): mend or remove it") from None
    for number, line in enumerate(text[: text.rfind("\n") + 1].split("\n")[:-1], 1):
        yield line, parse_line(line, f"line {number} of {file}", fields)


def parse_line(line: str | bytes, where: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Parses a line of a .jsonl file of a run.

    Args:
      line: its text.
      where: names it.
      fields: name -> type of what it must have.

    Raises:
      UsageError: it is not as a run writes it.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON ({reason_of(error)}): mend or remove it") from None
    if not isinstance(record, dict):
        raise UsageError(f"{where} holds no object: mend or remove it")
    check_fields(record, where, fields)
    return record


def check_fields(record: Mapping[str, Any], where: str, fields: Mapping[str, Any]) -> None:
    """Refuses a record that lacks a field, or has one of another type.

    Args:
      record: of a file of the run.
      where: names it.
      fields: name -> type.

    Raises:
      UsageError: one sentence that names the field.
    """
    for name, hint in fields.items():
        if not fits(record.get(name), hint):
            raise UsageError(f'{where} has no "{name}" as a run writes it: mend or remove it')


def write_json(path: Path, value: Any) -> None:
    """Writes JSON so that a reader sees the old file or the new one, never a part."""
    write_text(path, json.dumps(finite(value), indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a file at once, by renaming a complete one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8", errors="replace")  # names of files may hold lone surrogates
    os.replace(temporary, path)


def load_or_compute_arrays(file: Path, make: Callable[[], Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Arrays that are made once: read from the file where it is there, and written to it where it is not.

    Args:
      file: .npz, which all hosts see; a reader sees all of it or nothing.
      make: the arrays by name; all hosts make them together, and the first writes them.

    Raises:
      UsageError: the file is damaged.
    """
    if not hosts.first_says(f"whether there is {file.name}", file.exists()):
        made = dict(make())
        if not hosts.is_first():
            return made
        temporary = file.with_name(file.name + ".tmp")
        with temporary.open("wb") as opened:
            np.savez(opened, **made)  # type: ignore[arg-type]
        os.replace(temporary, file)
        return made
    try:
        with np.load(file) as arrays:
            return dict(arrays)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        raise UsageError(f"{file} cannot be read: delete it, and it is computed anew") from None


# ---- one process at a time writes to the folder of a run

_LOCK_FILE = "lock"


class Lock:
    """Holds a folder until it is collected, or its process ends, however it ends. See `hold`."""

    def __init__(self, folder: Path) -> None:
        file = (folder / _LOCK_FILE).open("a+", encoding="utf-8")
        self._release = weakref.finalize(self, file.close)
        with contextlib.suppress(OSError):  # some network file systems have no locks
            try:
                # Of the process: a fork does not inherit it, and the system releases it.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                file.seek(0)
                holder = file.read().strip() or "another process"
                self._release()
                raise UsageError(
                    f"{holder} is writing to the run in {folder}: wait for its end, or end it, to go on with this run"
                ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()


_held: "weakref.WeakValueDictionary[Path, Lock]" = weakref.WeakValueDictionary()


def hold(folder: Path) -> Lock:
    """The lock of a folder, which this process may hold already.

    Raises:
      UsageError: another process holds it; the sentence says which, and on which host.
    """
    folder = folder.resolve()
    lock = _held.get(folder)
    if lock is None:
        lock = _held[folder] = Lock(folder)
    return lock
