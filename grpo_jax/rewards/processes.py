"""Functions of a user in processes of their own, which are killed when they hang: rewards and environments.

    with Grader("my_rewards.py:solved", deadline=5.0, chunk=1) as grader:
        task = Task(reward=grader, ...)

Each call has a thread here, and a process. Requests are pickled. Answers are JSON of limited length: nothing that a
function returns is unpickled here.
"""

import json
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, pairwise
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Literal, NamedTuple

from grpo_jax.data.types import (
    LARGEST_REWARD,
    MESSAGE_CHARACTERS,
    MOST_SPANS,
    Completion,
    Earned,
    Example,
    Span,
)
from grpo_jax.errors import UsageError

# Why completions have no reward.
REASONS = ("timeout", "raised", "died", "nan", "not numbers", "bad spans", "wrong length", "budget")
_ROOT = Path(__file__).resolve().parents[2]  # the folder that holds the package
_CHILD = "from grpo_jax.rewards.worker import main; main()"


class Unanswered(NamedTuple):
    """The reason why a question has no answer."""

    reason: str  # "timeout", "raised", "died", "budget", or what is wrong with the answer
    message: str  # the end of a traceback or of the function's stderr


@dataclass(frozen=True)
class ProcessOptions:
    """The way in which a function runs in processes: keywords of `Grader` and `environments.environment_in_processes`.

    Attributes:
      arguments: keywords for the function. If it also takes what it is asked about, as (examples, completions, *, x)
        does, it gets them at each call. Otherwise it is called once with them, and returns the function that is asked.
        None: it is taken as it is.
      deadline: seconds for one call of the function.
      budget: seconds for all questions of a batch. A question that has no answer by then gets none.
      chunk: questions in one call of the function; "prompt": those of one prompt, which stand side by side and share
        their example; None: all of them, for a function that compares prompts.
      group_size: with "prompt", the number of questions that the deadline is meant for. More of them, as in an
        evaluation, have more time in proportion.
      workers: processes; None: up to four, one for each CPU; always one if `chunk` is None.
      memory_mb: the memory that the function may allocate beyond what loading it took; None: no limit.
      start_deadline: seconds for loading the function.

    Raises:
      UsageError: an impossible number.
    """

    arguments: Mapping[str, Any] | None = None
    deadline: float = 10.0
    budget: float = 60.0
    chunk: int | Literal["prompt"] | None = None
    group_size: int = 1
    workers: int | None = None
    memory_mb: int | None = None
    start_deadline: float = 120.0

    def __post_init__(self) -> None:
        for name in ("deadline", "budget", "start_deadline"):
            if not 0 < (value := getattr(self, name)) <= threading.TIMEOUT_MAX:
                raise UsageError(f"{name} is {value}: it must be above 0 and at most {threading.TIMEOUT_MAX:g} seconds")
        for name in ("chunk", "group_size", "workers", "memory_mb"):
            number = getattr(self, name)
            if number is not None and number != "prompt" and (isinstance(number, str) or number < 1):
                raise UsageError(f"{name} is {number}: it must be at least 1")

    @property
    def num_workers(self) -> int:
        """The number of processes."""
        return 1 if self.chunk is None else self.workers or min(4, os.cpu_count() or 1)

    def call_seconds(self, num_questions: int) -> float:
        """Returns the seconds that one call with so many questions may take."""
        return self.deadline * (max(1.0, num_questions / self.group_size) if self.chunk == "prompt" else 1.0)

    def chunks(self, examples: Sequence[Example]) -> list[slice]:
        """Returns the questions of each call."""
        count = len(examples)
        if self.chunk == "prompt":
            starts = [i for i in range(count) if i == 0 or examples[i] is not examples[i - 1]]
        else:
            starts = list(range(0, count, self.chunk or max(1, count)))
        return [slice(*ends) for ends in pairwise([*starts, count])]


class Processes:
    """A function that runs in child processes.

    Attributes:
      source: digest of the file that the function is in; empty for one of this package.
    """

    def __init__(
        self, kind: str, spec: str, options: ProcessOptions, read: Callable[[Any], Any], most_bytes: int
    ) -> None:
        """Starts the processes and loads the function.

        The function sees no accelerator through JAX, and its output is discarded. A process that it starts ends with
        it, unless that process gives itself a session of its own.

        Args:
          kind: "reward" or "environment".
          spec: "package.module:function" or "path/to/file.py:function"; async functions too.
          options: how it runs.
          read: turns one answer, as it came from JSON, into the answer or `Unanswered`. If it raises, all answers of
            the call are discarded, and the process is killed.
          most_bytes: the largest length of one answer.

        Raises:
          UsageError: the function cannot be loaded, or its arguments cannot be sent.
        """
        self._options, self._name, self._read, self._most_bytes = options, f"{kind} {spec!r}", read, most_bytes
        setup = {
            "kind": kind,
            "spec": spec,
            "arguments": None if options.arguments is None else dict(options.arguments),
            "path": sys.path,
            "folder": os.getcwd(),
            "memory_mb": options.memory_mb,
        }
        self._setup = _pickled(setup, f"the arguments of the {self._name}")
        self._threads = ThreadPoolExecutor(options.num_workers)
        self._free: queue.LifoQueue[_Worker] = queue.LifoQueue()  # workers that have tried to load the function
        self._workers: set[_Worker] = set()
        self._close = weakref.finalize(self, _close, self._workers, self._free, os.getpid())
        for _ in range(options.num_workers):
            self._start()
        first = self._free.get()
        if isinstance(first.loaded, Unanswered):
            self.close()
            why = "" if first.loaded.reason == "raised" else f"the {self._name} cannot be loaded: "
            raise UsageError(" ".join(f"{why}{first.loaded.message}".split()))
        (self.source,) = first.loaded
        self._free.put(first)

    def ask(self, examples: Sequence[Example], questions: Sequence[Any]) -> list[Any]:
        """Returns answers to B questions, or `Unanswered`. Each question has an example.

        Raises:
          UsageError: examples or questions cannot be sent to another process, or the processes are closed.
        """
        if not self._close.alive:
            raise UsageError(f"the {self._name} is closed")
        ends = time.monotonic() + self._options.budget

        def answer(chunk: slice) -> list[Any]:
            return self._answer(examples[chunk], questions[chunk], ends)

        return list(chain.from_iterable(self._threads.map(answer, self._options.chunks(examples))))

    def close(self) -> None:
        """Kills the processes."""
        self._close()

    def _answer(self, examples: Sequence[Example], questions: Sequence[Any], ends: float) -> list[Any]:
        """Returns the answers to the questions of one call, which must be over at the time `ends`."""
        count = len(questions)
        worker = self._next_free(ends)
        if worker is None:
            return [Unanswered("budget", f"{self._options.budget} s were over before it was its turn")] * count
        try:
            if isinstance(worker.loaded, Unanswered):  # a call pays for it, so that this cannot go on for ever
                return [worker.loaded._replace(reason="died")] * count
            left, deadline = ends - time.monotonic(), self._options.call_seconds(count)
            what = f"examples, for the {self._name} in another process,"
            request = _pickled((examples, questions, min(left, deadline)), what)
            answers = worker.call(request, min(left, deadline), count, self._read, self._most_bytes)
            if not isinstance(answers, Unanswered):
                return answers
            if answers.reason == "timeout" and left < deadline:
                answers = Unanswered("budget", f"{self._options.budget} s were over: {answers.message}")
            return [answers] * count
        finally:
            if worker.has_ended or isinstance(worker.loaded, Unanswered):
                self._replace(worker)
            else:
                self._free.put(worker)

    def _next_free(self, ends: float) -> "_Worker | None":
        """Waits for a worker, until the time `ends`."""
        while (left := ends - time.monotonic()) > 0:
            with suppress(queue.Empty):
                worker = self._free.get(timeout=left)
                if isinstance(worker.loaded, Unanswered) or not worker.connection.poll():
                    return worker
                self._replace(worker)  # it ended while it had nothing to do, which no call pays for
        return None

    def _start(self) -> None:
        worker = _Worker()
        self._workers.add(worker)
        if not self._close.alive:  # closed by another thread, which may not have seen this worker
            worker.kill()

        def load() -> None:
            worker.loaded = worker.call(self._setup, self._options.start_deadline, 1, str, 2**16)
            self._free.put(worker)

        threading.Thread(target=load, daemon=True).start()

    def _replace(self, worker: "_Worker") -> None:
        worker.end()
        self._workers.discard(worker)
        if self._close.alive:
            self._start()


def _close(workers: "set[_Worker]", free: "queue.LifoQueue[_Worker]", owner: int) -> None:
    if os.getpid() != owner:  # a fork's copy
        return
    for worker in list(workers):
        worker.kill()  # a thread that waits for it then ends it
    with suppress(queue.Empty):
        while True:
            free.get_nowait().end()


class Grader:
    """A reward function that runs in child processes; itself a reward, which always answers.

    If its function has nothing to say about a completion, the reward is None, and the reason is counted.

    Attributes:
      counts: reason -> how many completions got None for it since the start; every one of REASONS is there.
      messages: reason -> the last thing known about it, the end of a traceback or of the function's stderr.
      source: digest of the file that the function is in; empty for one of this package.
    """

    def __init__(self, reward: str, **options: Any) -> None:
        """Starts the processes and loads the function, as `Processes` does.

        Args:
          reward: "package.module:function" or "path/to/file.py:function"; async functions too.
          **options: fields of `ProcessOptions`, with their defaults: deadline 10 (seconds for one call of the
            function), budget 60 (seconds for one call of the grader), chunk None (all completions in one call) …

        Raises:
          UsageError: an impossible option, or the function cannot be loaded.
        """
        self.counts = dict.fromkeys(REASONS, 0)
        self.messages: dict[str, str] = {}
        self._processes = Processes("reward", reward, ProcessOptions(**options), _read_reward, 128 * MOST_SPANS)
        self.source = self._processes.source

    def __call__(self, examples: Sequence[Example], completions: Sequence[Completion]) -> list[Earned]:
        """Returns the rewards of B completions, each finite or None.

        Raises:
          UsageError: the examples cannot be sent to another process, or the grader is closed.
        """
        if len(examples) != len(completions):
            raise UsageError(f"{len(examples)} examples and {len(completions)} completions: give one for each")
        return [self._counted(answer) for answer in self._processes.ask(examples, completions)]

    def _counted(self, answer: Any) -> Earned:
        if not isinstance(answer, Unanswered):
            return answer
        self.counts[answer.reason] += 1
        self.messages[answer.reason] = answer.message
        return None

    def close(self) -> None:
        """Kills the processes."""
        self._processes.close()

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_reward(value: Any) -> Earned | Unanswered:
    if value is None:
        return None
    if isinstance(value, dict):
        return _read_failure(value)
    parts = tuple(Span(*part) for part in value) if isinstance(value, list) else ()
    numbers = [float(part.reward) for part in parts] if isinstance(value, list) else [float(value)]
    for number in (*numbers, sum(numbers)):
        if not abs(number) <= LARGEST_REWARD:
            return Unanswered("nan", f"the function returned {number}")
    return parts if isinstance(value, list) else numbers[0]


def _read_failure(answer: Mapping[str, Any]) -> Unanswered:
    if answer["reason"] not in REASONS:
        raise ValueError("there is no such reason")
    return Unanswered(answer["reason"], str(answer["message"])[-MESSAGE_CHARACTERS:])


# ---- processes

_living: "weakref.WeakSet[subprocess.Popen[bytes]]" = weakref.WeakSet()


class _Worker:
    """A child process, and the files that lead to it."""

    def __init__(self) -> None:
        self.connection, child = Pipe()
        with child:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CHILD, str(child.fileno())],
                cwd=_ROOT,
                env={**os.environ, "JAX_PLATFORMS": "cpu"},  # the accelerator is the trainer's
                stdin=subprocess.PIPE,  # it closes when this process ends
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(child.fileno(),),
                start_new_session=True,  # one group with all its children, to be killed at once
            )
        _living.add(self._process)
        self._stderr = b""  # its end
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self._lock = threading.RLock()
        self.loaded: list[Any] | Unanswered = []  # the digest of the function's file, or why it could not be loaded
        self.has_ended = False

    def call(
        self, request: bytes, seconds: float, count: int, read: Callable[[Any], Any], most_bytes: int
    ) -> list[Any] | Unanswered:
        """Sends a request, and returns `count` answers, or why there are none. Without an answer the process ends."""
        until = time.monotonic() + seconds
        # A thread kills the process, since both reading and writing may block.
        timer = threading.Timer(max(0.0, seconds), self.kill)
        timer.daemon = True
        timer.start()
        try:
            self.connection.send_bytes(request)
            answer = json.loads(self.connection.recv_bytes(2**16 + count * most_bytes))
            if "values" not in answer:
                return _read_failure(answer)
            if len(answer["values"]) != count:
                raise ValueError("an answer is missing")
            return [read(value) for value in answer["values"]]
        except Exception:  # it has ended, or what it sent is no answer
            is_late = time.monotonic() >= until
            how = self.end(patience=0.0 if is_late else 1.0)
            text = self._stderr.decode(errors="replace")[-MESSAGE_CHARACTERS:]
            last_words = f"the end of its stderr: {text}" if text else "it wrote nothing to stderr"
            if is_late:
                return Unanswered("timeout", f"no answer within its deadline; {last_words}")
            return Unanswered("died", f"the process {how}; {last_words}")
        finally:
            timer.cancel()

    def kill(self) -> None:
        """Kills the process and its children. Any thread may call this, at any time."""
        with self._lock:
            if self.has_ended:  # the number of its group may be another's
                return
            with suppress(ProcessLookupError, PermissionError):  # macOS refuses if only dead processes are left
                os.killpg(self._process.pid, signal.SIGKILL)
            # A child in a session of its own may keep the other end open, and a thread here would wait for it.
            with suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as channel:
                channel.shutdown(socket.SHUT_RDWR)

    def end(self, patience: float = 0.0) -> str:
        """Kills the process and its children after `patience` seconds, closes the files, and returns how it ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        code = self._process.returncode
        with self._lock:
            self.kill()
            self.has_ended = True
            self._process.wait()
            self.connection.close()
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._listener.join(1.0)  # it reads what is left
        if code is None:
            return "sent nonsense"
        return f"ended by a signal ({signal.strsignal(-code)})" if code < 0 else f"ended with exit status {code}"

    def _listen(self) -> None:
        """Reads stderr and forgets all but its end."""
        assert self._process.stderr is not None
        with self._process.stderr as pipe:
            while block := os.read(pipe.fileno(), 2**16):
                self._stderr = (self._stderr + block)[-4 * MESSAGE_CHARACTERS :]


def _pickled(value: Any, what: str) -> bytes:
    """Returns a message to a worker."""
    try:
        return pickle.dumps(value)
    except Exception as error:  # anything that an object's own pickling raises
        raise UsageError(f"{what} must be picklable: {type(error).__name__}: {error}") from error


def _let_go() -> None:
    """Closes a fork's copies of the pipes that must close when this process ends."""
    for process in _living:
        assert process.stdin is not None
        process.stdin.close()


os.register_at_fork(after_in_child=_let_go)
