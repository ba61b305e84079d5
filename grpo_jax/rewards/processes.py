"""Functions of a user in processes of their own, which are killed when they hang: rewards and environments."""

import contextlib
import json
import math
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from grpo_jax.data.types import Example
from grpo_jax.errors import UsageError
from grpo_jax.rewards.worker import HEADER, KINDS, MESSAGE_CHARACTERS

_ROOT = Path(__file__).resolve().parents[2]  # where the package lies
_READ_BYTES = 2**16
_LONGEST_WAIT = 1e6  # seconds; the operating system waits for no more than 2³¹ milliseconds at once


class Unanswered(NamedTuple):
    """In place of an answer: why there is none."""

    reason: str  # "timeout", "raised", "died", "budget", or what the worker says of an answer that is none
    message: str  # the end of a traceback or of the function's stderr


class Answers(NamedTuple):
    """What functions of a kind answer."""

    loads: str  # of `worker.KINDS`
    # an answer to one question, as it came from JSON -> the answer, or `Unanswered`. It may raise ValueError,
    # TypeError or KeyError
    understood: Callable[[Any], Any]
    most_bytes: int  # of one answer


@dataclass(frozen=True)
class ProcessOptions:
    """How a function runs in processes: keywords of `grading.Grader` and `environments.environment_in_processes`.

    Attributes:
      arguments: keywords for the function. Where it also takes what it is asked about, as (examples, completions, *, x)
        does, it gets them at each call. Otherwise it is called once with them, and returns the function that is asked.
        None: it is taken as it is.
      deadline: seconds for one call of the function.
      budget: seconds for all questions of a batch; what has no answer by then gets none.
      chunk: questions in one call of the function; "prompt": those of one prompt, which stand side by side and share
        their example; None: all of them, for a function that compares prompts.
      group_size: with "prompt", the number of questions that the deadline is meant for. More of them, as in an
        evaluation, have more time in proportion.
      workers: processes; None: up to four, one for each CPU; always one if `chunk` is None.
      memory_mb: what the function may allocate beyond what loading it took; None: no limit.
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
        """Processes."""
        return 1 if self.chunk is None else self.workers or min(4, os.cpu_count() or 1)

    def deadline_of(self, questions: int) -> float:
        """Seconds for one call with so many questions."""
        return self.deadline * (max(1.0, questions / self.group_size) if self.chunk == "prompt" else 1.0)


class Processes:
    """A function that runs in child processes.

    Attributes:
      source: digest of the file that the function is in; empty for one of this package.
    """

    def __init__(self, expected: Answers, spec: str, options: ProcessOptions) -> None:
        """Starts the processes and loads the function.

        It sees no accelerator through JAX, and its output goes nowhere. A process that it starts ends with it,
        unless it gives itself a session of its own.

        Args:
          expected: what the function answers.
          spec: "package.module:function" or "path/to/file.py:function"; async functions too.
          options: how it runs.

        Raises:
          UsageError: the function cannot be loaded, or its arguments cannot be sent.
        """
        self._lock = threading.Lock()
        self.source = ""
        self._expected, self._name = expected, f"{KINDS[expected.loads].name} {spec!r}"
        self._options = options
        setup = {
            "kind": expected.loads,
            "spec": spec,
            "arguments": None if options.arguments is None else dict(options.arguments),
            "path": sys.path,
            "folder": os.getcwd(),
            "memory_mb": options.memory_mb,
        }
        self._setup = _packed(setup, f"the arguments of the {self._name}")
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        self._close = weakref.finalize(self, _close, self._workers, self._selector, os.getpid())
        try:
            for _ in range(options.num_workers):
                self._start()
            self._wait_for_the_first()
        except BaseException:
            self.close()
            raise

    def ask(self, examples: Sequence[Example], questions: Sequence[Any]) -> list[Any]:
        """Answers to B questions, one an example, or `Unanswered`.

        Raises:
          UsageError: examples or questions cannot be sent to another process, or the processes are closed.
        """
        if not self._close.alive:
            raise UsageError(f"the {self._name} is closed")
        if len(examples) != len(questions):
            asked = KINDS[self._expected.loads].asked
            raise UsageError(f"{len(examples)} examples and {len(questions)} {asked}: give one for each")
        with self._lock:
            return self._answers(examples, questions)

    def close(self) -> None:
        """Kills the processes."""
        self._close()

    # ---- answers

    def _answers(self, examples: Sequence[Example], questions: Sequence[Any]) -> list[Any]:
        answers: list[Any] = [None] * len(questions)
        waiting = deque(self._chunks(examples))
        ends = time.monotonic() + self._options.budget
        self._replace_the_dead()
        try:
            while (waiting or any(worker.chunk for worker in self._workers)) and time.monotonic() < ends:
                for worker in self._workers:
                    if waiting and worker.ready and worker.chunk is None:
                        chunk = waiting.popleft()
                        worker.ask(chunk, examples, questions, self._options.deadline_of(len(chunk)), self._selector)
                for worker, answer in self._listen(ends):
                    self._take(worker, answer, answers, waiting)
        finally:  # also when it is interrupted: no answer may be taken for that of a later question
            for worker in list(self._workers):
                if worker.chunk is not None:
                    words = worker.last_words()
                    _fill(answers, worker.chunk, Unanswered("budget", f"{self._options.budget} s were over: {words}"))
                    self._replace(worker)
        for chunk in waiting:
            _fill(answers, chunk, Unanswered("budget", f"{self._options.budget} s were over before it was its turn"))
        return answers

    def _chunks(self, examples: Sequence[Example]) -> list[range]:
        """What is asked at once."""
        count = len(examples)
        if self._options.chunk == "prompt":
            starts = [i for i in range(count) if i == 0 or examples[i] is not examples[i - 1]]
        else:
            starts = list(range(0, count, self._options.chunk or max(1, count)))
        return [range(start, end) for start, end in pairwise([*starts, count])] if count else []

    def _take(self, worker: "_Worker", answer: dict[str, Any], answers: list[Any], waiting: deque[range]) -> None:
        """Writes what a worker said into `answers`, or counts why it did not."""
        if answer.get("ready"):
            worker.ready, worker.until = True, math.inf
            return
        chunk = range(0) if worker.chunk is None else worker.chunk  # it may have died with nothing to do
        worker.chunk, worker.until = None, math.inf
        if not worker.ready:  # it did not start again: a chunk pays for it, so that this cannot go on for ever
            chunk = waiting.popleft() if waiting else range(0)
            answer = {"reason": "died", "message": answer.get("error") or answer.get("message", ""), "kill": True}
        if "values" in answer:
            answers[chunk.start : chunk.stop] = answer["values"]
        else:
            _fill(answers, chunk, Unanswered(answer["reason"], answer["message"]))
        if answer.get("kill"):
            self._replace(worker)

    # ---- processes

    def _start(self) -> None:
        parent, child = socket.socketpair()
        command = [sys.executable, "-m", "grpo_jax.rewards.worker", str(child.fileno()), str(os.getpid())]
        with child:
            process = subprocess.Popen(
                command,
                cwd=_ROOT,
                env={**os.environ, "JAX_PLATFORMS": "cpu"},  # the accelerator is the trainer's
                stdin=subprocess.PIPE,  # it closes when this process ends
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(child.fileno(),),
                start_new_session=True,  # with all its children one group, to be killed at once
            )
            worker = _Worker(process, parent, self._expected, until=time.monotonic() + self._options.start_deadline)
        self._workers.append(worker)
        _living.add(worker)
        parent.setblocking(False)
        os.set_blocking(worker.stderr_fd, False)
        self._selector.register(parent, selectors.EVENT_READ, (worker, worker.receive))
        self._selector.register(worker.stderr_fd, selectors.EVENT_READ, (worker, worker.drain))
        worker.send(self._setup, self._selector)

    def _wait_for_the_first(self) -> None:
        while not any(worker.ready for worker in self._workers):
            for worker, answer in self._listen(math.inf):
                if not answer.get("ready"):
                    said = answer.get("error") or f"the {self._name} cannot be loaded: {answer['message']}"
                    raise UsageError(" ".join(said.split()))
                worker.ready, worker.until, self.source = True, math.inf, str(answer.get("source", ""))

    def _listen(self, ends: float) -> list[tuple["_Worker", dict[str, Any]]]:
        """What the workers say until `ends`, the next deadline, or the first word; silence is an answer too."""
        until = min([ends, *(worker.until for worker in self._workers)])
        events = self._selector.select(min(max(0.0, until - time.monotonic()), _LONGEST_WAIT))
        answers = []
        for key, mask in events:
            worker, read = key.data
            if mask & selectors.EVENT_WRITE:
                worker.write(self._selector)
            if mask & selectors.EVENT_READ and (answer := read(self._selector)) is not None:
                answers.append((worker, answer))
        answered = {id(worker) for worker, _ in answers}
        for worker in self._workers:
            if worker.until <= time.monotonic() and id(worker) not in answered:
                doing = "no answer" if worker.ready else "not loaded"
                message = f"{doing} within its deadline; {worker.last_words()}"
                answers.append((worker, {"reason": "timeout", "message": message, "kill": True}))
        return answers

    def _replace(self, worker: "_Worker") -> None:
        worker.kill(self._selector)
        self._workers.remove(worker)
        self._start()

    def _replace_the_dead(self) -> None:
        """Starts workers again that ended since the last call, such as for want of memory."""
        for worker in list(self._workers):
            if not worker.ready:  # nobody listened to it since it was started
                worker.until = time.monotonic() + self._options.start_deadline
            elif worker.receive(self._selector) is not None:
                self._replace(worker)


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Worker:
    """A child process, what it is doing, and what is on its way to and from it."""

    process: subprocess.Popen
    connection: socket.socket
    expected: Answers
    until: float  # when it is killed if it has not answered
    ready: bool = False  # the function is loaded
    chunk: range | None = None  # of the questions that it was asked
    outgoing: memoryview = field(default_factory=lambda: memoryview(b""))
    incoming: bytearray = field(default_factory=bytearray)
    stderr: bytes = b""  # its end

    @property
    def stderr_fd(self) -> int:
        assert self.process.stderr is not None
        return self.process.stderr.fileno()

    def ask(self, chunk: range, examples: Sequence, questions: Sequence, deadline: float, selector: Any) -> None:
        """Sends a chunk."""
        part = slice(chunk.start, chunk.stop)
        arguments = list(examples[part]), list(questions[part]), deadline
        request = _packed(arguments, f"examples, for the {KINDS[self.expected.loads].name} in another process,")
        self.chunk, self.until = chunk, time.monotonic() + deadline
        self.send(request, selector)

    def send(self, message: bytes, selector: Any) -> None:
        self.outgoing = memoryview(message)
        self.write(selector)

    def write(self, selector: Any) -> None:
        """Sends as much as it takes now, and the rest when it takes more."""
        try:
            while self.outgoing:
                self.outgoing = self.outgoing[self.connection.send(self.outgoing) :]
        except BlockingIOError:
            pass
        except OSError:  # it ended: reading will tell
            self.outgoing = memoryview(b"")
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.outgoing else 0)
        selector.modify(self.connection, events, selector.get_key(self.connection).data)

    def receive(self, selector: Any) -> dict[str, Any] | None:
        """An answer, if it is complete; its death is one."""
        limit = 2**16 + self.expected.most_bytes * len(self.chunk or ())
        try:
            data = self.connection.recv(_READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            return {"reason": "died", "message": self._epitaph(selector), "kill": True}
        self.incoming += data
        if len(self.incoming) < HEADER.size:
            return None
        (length,) = HEADER.unpack_from(self.incoming)
        if length > limit:
            return {"reason": "died", "message": "the worker sent nonsense", "kill": True}
        if len(self.incoming) < HEADER.size + length:
            return None
        answer, self.incoming = bytes(self.incoming[HEADER.size :]), bytearray()
        try:
            return _understood(json.loads(answer), len(self.chunk or ()), self.expected)
        except (ValueError, TypeError, KeyError):
            return {"reason": "died", "message": "the worker sent nonsense", "kill": True}

    def drain(self, selector: Any) -> None:
        """Reads stderr and forgets all but the end."""
        try:
            data = os.read(self.stderr_fd, _READ_BYTES)
        except BlockingIOError:
            return
        self.stderr = (self.stderr + data)[-4 * MESSAGE_CHARACTERS :]
        if not data and self.stderr_fd in selector.get_map():  # it closed it
            selector.unregister(self.stderr_fd)

    def last_words(self) -> str:
        """The end of its stderr."""
        text = self.stderr.decode(errors="replace")[-MESSAGE_CHARACTERS:]
        return f"the end of its stderr: {text}" if text else "it wrote nothing to stderr"

    def _epitaph(self, selector: Any) -> str:
        """How it ended, for it has."""
        self._reap(patience=1.0)
        self.drain(selector)
        code = self.process.returncode
        how = f"by a signal ({signal.strsignal(-code)})" if code < 0 else f"with exit status {code}"
        return f"the process ended {how}; {self.last_words()}"

    def _reap(self, patience: float = 0.0) -> None:
        """Kills the group, after `patience` seconds to end by itself."""
        if self.process.returncode is not None:
            return
        ends = time.monotonic() + patience
        # Not by poll(), after which the number of its group may be another's.
        while not _has_ended(self.process.pid) and time.monotonic() < ends:
            time.sleep(0.001)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses where only the dead are left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def kill(self, selector: Any) -> None:
        """Ends the process and its children, and closes all that led to it."""
        self._reap()
        for file in (self.connection, self.stderr_fd):
            if file in selector.get_map():
                selector.unregister(file)
        self.connection.close()
        for pipe in (self.process.stdin, self.process.stderr):
            if pipe is not None:
                pipe.close()


def _close(workers: list[_Worker], selector: Any, owner: int) -> None:
    if os.getpid() != owner:  # a fork's copy of a grader
        return
    for worker in workers:
        worker.kill(selector)
    workers.clear()
    selector.close()


def _has_ended(pid: int) -> bool:
    """Whether a child has ended, without taking note of it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except (AttributeError, ChildProcessError):  # macOS has no waitid; or somebody else took note
        return True


def _packed(value: Any, what: str) -> bytes:
    """A message to a worker."""
    try:
        data = pickle.dumps(value)
    except Exception as error:  # whatever an object's own pickling raises
        raise UsageError(f"{what} must be picklable: {type(error).__name__}: {error}") from error
    return HEADER.pack(len(data)) + data


def _fill(answers: list[Any], chunk: range, answer: Any) -> None:
    """The same answer for all questions of a chunk."""
    answers[chunk.start : chunk.stop] = [answer] * len(chunk)


def _understood(answer: Any, count: int, expected: Answers) -> dict[str, Any]:
    """An answer in the form that it must have.

    Raises:
      ValueError, TypeError or KeyError: it has not.
    """
    if "values" not in answer:
        return (
            answer if "ready" in answer or "error" in answer else {name: answer[name] for name in ("reason", "message")}
        )
    if len(answer["values"]) != count:
        raise ValueError("an answer is missing")
    return {"values": [expected.understood(value) for value in answer["values"]]}


_living: weakref.WeakSet[_Worker] = weakref.WeakSet()


def _let_go() -> None:
    """Closes a fork's copies of the pipes that must close when this process ends."""
    for worker in _living:
        assert worker.process.stdin is not None
        worker.process.stdin.close()


os.register_at_fork(after_in_child=_let_go)
