"""Files of a run, the lock of its folder, and trackers.

JSON files are replaced atomically and checked when they are read. Trackers copy metrics.jsonl and times.jsonl to
TensorBoard's event files and to Weights & Biases.
"""

import contextlib
import io
import json
import math
import os
import socket
import struct
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import filelock

from grpo_jax.errors import UsageError, reading, reason_of
from grpo_jax.options import fits, unique_names

COMMAND = "command.txt"  # command lines of the run, one for each start
TEMPORARY = ".tmp"  # the ending of files that are being written


def finite(value: Any) -> Any:
    """Returns a JSON value with None for NaN and infinity, which JSON does not have."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)


def read_object(file: Path, hint: Any = dict) -> dict[str, Any]:
    """Reads a JSON file of a run.

    Args:
      file: The file, which must exist.
      hint: The type of the object.

    Raises:
      UsageError: The file cannot be read, or holds a value of another type.
    """
    with reading(file, "mend it, or start a new run"):
        value = json.loads(file.read_text(encoding="utf-8-sig"), object_pairs_hook=unique_names)
    if not fits(value, hint):
        raise UsageError(f"{file} is not as a run writes it: mend it, or start a new run")
    return value


def read_lines(file: Path, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Reads all lines of a .jsonl file of a run. See `each_line`."""
    return [record for _, record in each_line(file, fields)]


def each_line(file: Path, fields: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the lines of a .jsonl file of a run, one at a time, each with its place in the file in bytes.

    The file may not exist yet. An incomplete last line is left out.

    Args:
      file: The file.
      fields: Name -> type of the fields that each line must have.

    Raises:
      UsageError: A line is not as a run writes it.
    """
    place = 0
    for number, line in enumerate(_complete_lines(file), 1):
        where = f"line {number} of {file}"
        try:
            record = json.loads(line.decode("utf-8-sig"), object_pairs_hook=unique_names)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where} is not JSON in UTF-8 ({reason_of(error)}): mend or remove it") from None
        if not isinstance(record, dict):
            raise UsageError(f"{where} holds no object: mend or remove it")
        check_fields(record, where, fields)
        yield place, record
        place += len(line)


def _complete_lines(file: Path) -> Iterator[bytes]:
    try:
        with file.open("rb") if file.exists() else io.BytesIO() as lines:
            yield from (line for line in lines if line.endswith(b"\n"))
    except OSError as error:
        raise UsageError(f"{file} cannot be read ({reason_of(error)}): mend or remove it") from None


def check_fields(record: Mapping[str, Any], where: str, fields: Mapping[str, Any]) -> None:
    """Checks that a record has all fields, with their types.

    Args:
      record: A record from a file of the run.
      where: A description of the record's place, for the error.
      fields: Name -> type of the fields.

    Raises:
      UsageError: One sentence that names the field that is missing or of another type.
    """
    for name, hint in fields.items():
        if not fits(record.get(name), hint):
            raise UsageError(f'{where} has no "{name}" as a run writes it: mend or remove it')


def write_json(path: Path, value: Any) -> None:
    """Writes JSON so that a reader sees the old file or the new file, never a part."""
    write_text(path, json.dumps(finite(value), indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replaces a file atomically, by renaming a complete file. Several processes may do so at once."""
    write_parts(path, [text])


def write_parts(path: Path, parts: Iterable[str]) -> None:
    """Replaces a file by texts, one after the other, as `write_text` does. They may be read from the replaced file."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}{TEMPORARY}")
    try:
        with temporary.open("w", encoding="utf-8", errors="replace") as file:  # names may hold lone surrogates
            file.writelines(parts)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# ---- one process at a time writes to the folder of a run

_LOCK_FILE = "lock"


def hold(folder: Path) -> filelock.BaseFileLock:
    """Takes the lock on the folder of a run, so that no other process can take it.

    Raises:
      UsageError: Another process has the lock.
    """
    lock = filelock.FileLock(folder.resolve() / _LOCK_FILE, timeout=0, thread_local=False, is_singleton=True)
    try:
        with contextlib.suppress(NotImplementedError):  # some network file systems have no locks
            lock.acquire()
    except filelock.Timeout:
        raise UsageError(
            f"another process is writing to the run in {folder}: wait for its end, or end it, to continue this run"
        ) from None
    return lock


# ---- trackers: in TensorBoard, the lines of a resumed run replace earlier lines of the same steps. Weights & Biases
# cannot delete lines, and gets them again under the same step.

Line = dict[str, Any]  # "phase", "step", and by name numbers or None


class Tracker(NamedTuple):
    """A service that receives the lines of a run."""

    log: Callable[[Line], None]
    # (phase, its remaining lines): called when a phase starts or resumes
    restart: Callable[[str, Iterable[Line]], None]


def tensorboard(folder: Path) -> Tracker:
    """Returns a tracker that writes files for `tensorboard --logdir folder`, one TensorBoard run for each phase."""
    # We do not use SummaryWriter, whose thread may hold the last lines back, nor EventsWriter, which waits at least
    # 5 ms for the disk after each line, as long as a step of a small model takes.
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.record_writer import masked_crc32c

    files: dict[str, FileIO] = {}

    def write(phase: str, **fields: Any) -> None:
        """Writes a record: the length of an event, the length's checksum, the event, the event's checksum."""
        event = Event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(event))
        checksums = (struct.pack("<I", masked_crc32c(part)) for part in (length, event))
        files[phase].write(length + next(checksums) + event + next(checksums))

    def log(line: Line) -> None:
        phase = line["phase"]
        if phase not in files:
            (folder / phase).mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"
            files[phase] = (folder / phase / name).open("wb", buffering=0)
            write(phase, file_version="brain.Event:2")
        values = [Summary.Value(tag=name, simple_value=value) for name, value in _numbers(line).items()]
        write(phase, step=line["step"], summary=Summary(value=values))

    def restart(phase: str, lines: Iterable[Line]) -> None:
        if phase in files:
            files.pop(phase).close()
        for place in (folder, folder / phase):
            if place.is_symlink():
                raise UsageError(f"{place} is a link, and a run deletes no files elsewhere: put a folder in its place")
        for file in (folder / phase).glob("events*"):  # from before the restart
            file.unlink()
        for line in lines:
            log(line)

    return Tracker(log, restart)


def import_wandb() -> Any:
    """Imports the package of Weights & Biases.

    Raises:
      UsageError: The package is not installed.
    """
    try:
        import wandb
    except ImportError:
        raise UsageError("wandb needs the package of this name: install it, or leave out the option") from None
    return wandb


def weights_and_biases(project: str, folder: Path, config: dict[str, Any]) -> Tracker:
    """Returns a tracker for Weights & Biases. A resumed run continues the same run there.

    Args:
      project: The project's name in Weights & Biases.
      folder: The folder of the run, which also stores the run's id in Weights & Biases.
      config: The options of the run.

    Raises:
      UsageError: The package is not installed, or its start fails.
    """
    wandb = import_wandb()
    id_file = folder / "wandb.json"
    run_id = read_object(id_file, dict[str, str])["id"] if id_file.exists() else uuid.uuid4().hex
    id_file.write_text(json.dumps({"id": run_id}) + "\n", encoding="utf-8")
    try:
        wandb_run = wandb.init(
            project=project, id=run_id, resume="allow", name=folder.name, dir=str(folder), config=config
        )
    except Exception as error:  # errors of the package and of the network
        raise UsageError(f"Weights & Biases refuses: {error}") from error
    phases: set[str] = set()

    def log(line: Line) -> None:
        phase = line["phase"]
        if phase not in phases:  # the step of Weights & Biases cannot decrease when a run is resumed
            wandb_run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")
            phases.add(phase)
        wandb_run.log({f"{phase}/{name}": value for name, value in ({"step": line["step"]} | _numbers(line)).items()})

    return Tracker(log, lambda phase, lines: None)


def _numbers(line: Line) -> dict[str, float]:
    fields = {name: value for name, value in line.items() if name not in ("phase", "step")}
    return {name: value for name, value in fields.items() if isinstance(value, int | float) and math.isfinite(value)}
