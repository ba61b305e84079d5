"""Files of a run, the lock of its folder, and trackers of its lines.

JSON and lines of JSON are written at once and checked when read. Trackers are views of metrics.jsonl and times.jsonl:
event files of TensorBoard, and Weights & Biases.
"""

import contextlib
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
        where = f"line {number} of {file}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where} is not JSON ({reason_of(error)}): mend or remove it") from None
        if not isinstance(record, dict):
            raise UsageError(f"{where} holds no object: mend or remove it")
        check_fields(record, where, fields)
        yield line, record


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


# ---- one process at a time writes to the folder of a run

_LOCK_FILE = "lock"


def hold(folder: Path) -> filelock.BaseFileLock:
    """Takes the lock on the folder of a run: for as long as anything holds it, no other process gets it.

    Raises:
      UsageError: another process has it.
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


# ---- trackers: what a resumed run writes again replaces what was there in TensorBoard. Weights & Biases cannot take
# back a line, and is sent it again, under the same step.

Line = dict[str, Any]  # "phase", "step", and numbers or None by name


class Tracker(NamedTuple):
    """Another place for a run's lines."""

    log: Callable[[Line], None]
    # (phase, lines of it that stay): a phase begins, or begins again
    restart: Callable[[str, Iterable[Line]], None]


def tensorboard(folder: Path) -> Tracker:
    """Event files for `tensorboard --logdir folder`: one of its runs for each phase."""
    # Not by its SummaryWriter, whose thread may hold the last lines back, nor by its EventsWriter, which waits for the
    # disk after each line: 5 ms and more, as long as a step of a small model takes.
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.record_writer import masked_crc32c

    files: dict[str, FileIO] = {}

    def write(phase: str, **fields: Any) -> None:
        """A record: the length of an event, its checksum, the event, its checksum."""
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
        for file in (folder / phase).glob("events*"):  # those that were written here
            file.unlink()
        for line in lines:
            log(line)

    return Tracker(log, restart)


def weights_and_biases(project: str, folder: Path, config: dict[str, Any]) -> Tracker:
    """A run of Weights & Biases, the same one when a run is resumed.

    Args:
      project: its name.
      folder: of the run; the id of theirs is kept in it.
      config: the run's options.

    Returns:
      The tracker.

    Raises:
      UsageError: the package is not installed, or refuses.
    """
    try:
        import wandb
    except ImportError:
        raise UsageError("--wandb needs the package wandb: install it, or leave out the option") from None
    id_file = folder / "wandb.json"
    run_id = read_object(id_file, dict[str, str])["id"] if id_file.exists() else uuid.uuid4().hex
    id_file.write_text(json.dumps({"id": run_id}) + "\n", encoding="utf-8")
    try:
        wandb_run = wandb.init(
            project=project, id=run_id, resume="allow", name=folder.name, dir=str(folder), config=config
        )
    except Exception as error:  # the package's own and the network's
        raise UsageError(f"Weights & Biases refuses: {error}") from error
    phases: set[str] = set()

    def log(line: Line) -> None:
        phase = line["phase"]
        if phase not in phases:  # its own step, for theirs may not go back when a run is resumed
            wandb_run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")
            phases.add(phase)
        wandb_run.log({f"{phase}/{name}": value for name, value in ({"step": line["step"]} | _numbers(line)).items()})

    return Tracker(log, lambda phase, lines: None)


def _numbers(line: Line) -> dict[str, float]:
    fields = {name: value for name, value in line.items() if name not in ("phase", "step")}
    return {name: value for name, value in fields.items() if isinstance(value, int | float) and math.isfinite(value)}
