"""The plan, the clock and the lines of JSON that the runners of all libraries share.

This module imports neither a peer nor this library, so that all runners share it.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from experiments.tasks import rewards

LINES = "lines.jsonl"


@dataclass(frozen=True)
class Plan:
    """The plan of one process, from the file that the benchmark writes."""

    folder: str  # receives lines and snapshots
    model: str  # folder of the Hugging Face model
    seed: int
    prompts: list[list[str]]  # the texts of each step
    ids: list[list[list[int]]]  # the token ids of these prompts
    reward: str  # a function of `experiments.tasks.rewards`
    group: int
    max_tokens: int
    ends: list[int]  # ids that end a completion
    pad_id: int
    learning_rate: float
    race: str = ""
    data: str = ""  # folder of the race's rows
    answers: dict[str, str] = field(default_factory=dict)  # prompt -> answer, for rewards that need one
    full_length: bool = False  # no id ends a completion
    snapshots: list[int] = field(default_factory=list)  # steps after which the policy is saved
    # A completion for each prompt of the first step, to compare log-probabilities. Empty: they are not compared.
    probe: list[list[int]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)  # options of the library

    @property
    def texts(self) -> list[str]:
        """All prompts in order."""
        return [text for step in self.prompts for text in step]

    @property
    def completions(self) -> int:
        """The number of completions of a step."""
        return len(self.prompts[0]) * self.group

    @property
    def width(self) -> int:
        """The number of tokens of the longest prompt."""
        return max(len(ids) for step in self.ids for ids in step)

    def first_prompts(self) -> tuple[list[list[int]], list[list[bool]]]:
        """Returns the ids and the mask of the first step's prompts, padded on the left to the longest of them."""
        width = max(map(len, self.ids[0]))
        pads = [width - len(ids) for ids in self.ids[0]]
        padded = [[self.pad_id] * pad + ids for pad, ids in zip(pads, self.ids[0], strict=True)]
        return padded, [[False] * pad + [True] * (width - pad) for pad in pads]


class Moment(NamedTuple):
    """A time since the start of the process."""

    seconds: float
    cpu_seconds: float  # of all threads


def process_clock(started: float) -> Callable[[], Moment]:
    """Returns a clock of this process.

    Args:
      started: The value of `time.monotonic()`, which all processes of a machine share, before the process started.
    """
    return lambda: Moment(time.monotonic() - started, time.process_time())


class Recorder:
    """Writes the lines of a process, by a clock that stops while snapshots are saved."""

    def __init__(self, plan: Plan, clock: Callable[[], Moment]) -> None:
        """Opens the file of lines.

        Args:
          plan: The plan of the process.
          clock: The time since the start of the process.
        """
        self.plan, self._clock = plan, clock
        self._paused = Moment(0.0, 0.0)
        self._rollouts, self._sampling = 0, 0.0
        self._file = open(Path(plan.folder) / LINES, "w", encoding="utf-8")  # noqa: SIM115, open until the process ends

    def now(self) -> Moment:
        """Returns the time since the start of the process, without pauses."""
        return Moment(*(time - paused for time, paused in zip(self._clock(), self._paused, strict=True)))

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Opens a block whose time does not count."""
        before = self._clock()
        yield
        times = zip(self._paused, self._clock(), before, strict=True)
        self._paused = Moment(*(paused + after - begun for paused, after, begun in times))

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Opens a block that samples completions."""
        begun = self._clock()
        yield
        self._sampling += self._clock().seconds - begun.seconds

    def write(self, **line: Any) -> None:
        """Writes a line of JSON."""
        print(json.dumps(line), file=self._file, flush=True)

    def write_versions(self, *packages: str) -> None:
        """Writes the versions of Python and of packages."""
        python = ".".join(map(str, sys.version_info[:3]))
        self.write(versions={"python": python} | {package: version(package) for package in packages})

    def grade(self, prompts: Iterable[str], completions: Sequence[str]) -> list[float]:
        """Returns the rewards of a step's completions, and writes a line about the step."""
        examples = [{"prompt": str(prompt), "answer": self.plan.answers.get(str(prompt))} for prompt in prompts]
        earned: list[float] = getattr(rewards, self.plan.reward)(examples, completions)
        self._rollouts += 1  # the line is about the time when the rollout is graded, before its update
        reward, sampling, self._sampling = sum(earned) / len(earned), self._sampling, 0.0
        self.write(step=self._rollouts, reward=reward, sampling=sampling, **self._state(self._rollouts))
        return earned

    def _state(self, step: int) -> dict[str, float]:
        """Returns the completions of this number of steps, the peak memory in MB, and the time."""
        return {"samples": step * self.plan.completions, "peak_mb": peak_mb(), **self.now()._asdict()}

    def is_due(self, step: int) -> bool:
        """Returns true if the policy must be saved after this number of updates."""
        return step in self.plan.snapshots

    def save(self, step: int, save: Callable[[Path], object]) -> None:
        """Writes the time, and then saves the policy while the clock stands still.

        Args:
          step: The number of updates of the policy, which must be complete.
          save: Writes model.safetensors into a folder.
        """
        self.write(snapshot=step, **self._state(step))
        with self.pause():
            folder = snapshot_folder(Path(self.plan.folder), step)
            folder.mkdir(parents=True, exist_ok=True)
            save(folder)

    def finish(self, logprobs: Any) -> None:
        """Writes the last line.

        Args:
          logprobs: Log-probabilities of the plan's probe under the initial model, `[N, T]`.
        """
        self.write(logprobs=[[float(x) for x in row] for row in logprobs])


def peak_mb() -> float:
    """Returns the peak memory of this process; `ru_maxrss` would include that of the process which started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


def snapshot_folder(folder: Path, step: int) -> Path:
    """Returns the folder of a snapshot."""
    return folder / "snapshots" / str(step)


def recorder_from_arguments() -> Recorder:
    """Makes the recorder of this process, whose arguments are the plan's file and the time of the start."""
    file, started = sys.argv[1:]
    plan = Plan(**json.loads(Path(file).read_text(encoding="utf-8")))
    recorder = Recorder(plan, process_clock(float(started)))
    cache = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or "none")
    recorder.write(cached_programs=len(list(cache.glob("*-cache"))))
    return recorder
