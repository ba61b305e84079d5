"""Trackers of a run's lines besides its files: TensorBoard, Weights & Biases.

They are views of metrics.jsonl and times.jsonl. What a resumed run writes again replaces what was there in TensorBoard;
Weights & Biases cannot take back a line, and is sent it again, under the same step.
"""

import json
import math
import socket
import struct
import time
import uuid
from collections.abc import Callable, Iterable
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from grpo_jax.errors import UsageError

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
    run_id = _known_id(id_file) if id_file.exists() else uuid.uuid4().hex
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


def _known_id(file: Path) -> str:
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["id"])
    except (OSError, ValueError, TypeError, KeyError):
        raise UsageError(
            f"{file} does not hold the id of a run of Weights & Biases: remove it, for a new one"
        ) from None


def _numbers(line: Line) -> dict[str, float]:
    fields = {name: value for name, value in line.items() if name not in ("phase", "step")}
    return {name: value for name, value in fields.items() if isinstance(value, int | float) and math.isfinite(value)}
