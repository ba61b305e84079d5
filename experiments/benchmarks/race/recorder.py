"""What a runner of the race reads and writes: its plan, its clock, and lines of JSON.

This module imports neither a peer nor this library, so that all runners share it.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from experiments.tasks import rewards

LINES = "lines.jsonl"


@dataclass(frozen=True)
class Plan:
    """The plan of one process, from the file that `python -m experiments.benchmarks.race` writes."""

    folder: str  # receives lines and snapshots
    race: str
    model: str  # folder of the Hugging Face model
    seed: int
    prompts: list[list[str]]  # the texts of each step
    ids: list[list[list[int]]]  # the token ids of these prompts
    answers: dict[str, str]  # prompt -> answer, for rewards that need one
    reward: str  # a function of `experiments.tasks.rewards`
    group: int
    max_tokens: int
    ends: list[int]  # ids that end a completion
    pad_id: int
    learning_rate: float
    snapshots: list[int]  # steps after which the policy is saved
    probe: list[list[int]]  # a completion for each prompt of the first step, to compare log-probabilities
    settings: dict[str, Any]  # options of the library

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
        self._rollouts = 0
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
        self._rollouts += 1
        # The line is written when the rollout is graded, before its update.
        samples = self._rollouts * self.plan.completions
        self.write(step=self._rollouts, samples=samples, reward=sum(earned) / len(earned), **self.now()._asdict())
        return earned

    def is_due(self, step: int) -> bool:
        """Returns true if the policy must be saved after this number of updates."""
        return step in self.plan.snapshots

    def save(self, step: int, save: Callable[[Path], object]) -> None:
        """Writes the time, and then saves the policy while the clock stands still.

        Args:
          step: The number of updates of the policy, which must be complete.
          save: Writes model.safetensors into a folder.
        """
        folder = snapshot_folder(Path(self.plan.folder), step)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
        samples = step * self.plan.completions
        self.write(snapshot=step, samples=samples, peak_mb=peak, **self.now()._asdict())
        with self.pause():
            folder.mkdir(parents=True, exist_ok=True)
            save(folder)

    def finish(self, logprobs: Any) -> None:
        """Writes the last line.

        Args:
          logprobs: Log-probabilities of the plan's probe under the initial model, `[N, T]`.
        """
        self.write(logprobs=[[float(x) for x in row] for row in logprobs])


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
