"""Functions of a user in processes of their own, which are killed when they hang: rewards and environments.

    with Grader("my_rewards.py:solved", deadline=5.0, chunk=1) as grader:
        task = Task(reward=grader, ...)

One thread has an event loop for all processes. Requests are pickled. Answers are lines of JSON of limited length:
nothing that a function returns is unpickled here.

Pools that are built on `multiprocessing`, such as pebble's, import the user's main module again in every process, and
do not kill what a process has started.
"""

import asyncio
import json
import os
import pickle
import signal
import sys
import threading
import time
import weakref
from asyncio.subprocess import PIPE
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

from grpo_jax.data.types import (
    LARGEST_REWARD,
    MESSAGE_CHARACTERS,
    BadReward,
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
_LONGEST_ANSWER = 2**25  # bytes
# Nothing is written to this pipe. It closes when this process ends, however that ends, and the children end themselves.
_lifeline, _held_open = os.pipe()
os.register_at_fork(after_in_child=partial(os.close, _held_open))

Result = TypeVar("Result")


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

    def __init__(self, kind: str, spec: str, options: ProcessOptions, read: Callable[[Any], Any]) -> None:
        """Starts the processes and loads the function.

        The function sees no accelerator through JAX, and its output is discarded. A process that it starts ends with
        it, unless that process gives itself a session of its own.

        Args:
          kind: "reward" or "environment".
          spec: "package.module:function" or "path/to/file.py:function"; async functions too.
          options: how it runs.
          read: turns one answer, as it came from JSON, into the answer or `BadReward`. If it raises, all answers of
            the call are discarded, and the process is killed.

        Raises:
          UsageError: the function cannot be loaded, or its arguments cannot be sent.
        """
        self._options, self._name, self._read = options, f"{kind} {spec!r}", read
        setup = {
            "kind": kind,
            "spec": spec,
            "arguments": None if options.arguments is None else dict(options.arguments),
            "path": sys.path,
            "folder": os.getcwd(),
            "memory_mb": options.memory_mb,
        }
        self._setup = _pickled(setup, f"the arguments of the {self._name}")
        # Workers that have loaded the function, and reasons why others have not.
        self._free: asyncio.LifoQueue[_Worker | BadReward] = asyncio.LifoQueue()
        self._workers: set[_Worker] = set()
        self._starting: set[asyncio.Task[None]] = set()
        self._close = weakref.finalize(self, _close, self._workers, os.getpid())
        self.source = _in_loop(self._open())

    def ask(self, examples: Sequence[Example], questions: Sequence[Any]) -> list[Any]:
        """Returns answers to B questions, or `BadReward`. Each question has an example.

        Raises:
          UsageError: examples or questions cannot be sent to another process, or the processes are closed.
        """
        if not self._close.alive:
            raise UsageError(f"the {self._name} is closed")
        ends, chunks = time.monotonic() + self._options.budget, self._options.chunks(examples)
        what = f"examples, for the {self._name} in another process,"
        requests = [_pickled((examples[chunk], questions[chunk]), what) for chunk in chunks]

        async def answers() -> list[list[Any]]:
            calls = zip(requests, chunks, strict=True)
            return await asyncio.gather(*(self._answer(sent, x.stop - x.start, ends) for sent, x in calls))

        return list(chain.from_iterable(_in_loop(answers())))

    def close(self) -> None:
        """Kills the processes."""
        self._close()

    # ---- in the loop

    async def _open(self) -> str:
        """Starts the processes, and returns the digest of the function's file."""
        for _ in range(self._options.num_workers):
            self._start()
        first = await self._free.get()
        if isinstance(first, BadReward):
            self.close()
            why = "" if first.reason == "raised" else f"the {self._name} cannot be loaded: "
            raise UsageError(" ".join(f"{why}{first}".split()))
        self._free.put_nowait(first)
        return first.source

    def _start(self) -> None:
        task = asyncio.create_task(self._load())
        self._starting.add(task)  # the loop itself holds no task
        task.add_done_callback(self._starting.discard)

    async def _load(self) -> None:
        """Starts a process, and loads the function in it."""
        loaded: list[Any] | BadReward
        try:
            worker = _Worker(await _start_process())
        except OSError as error:
            loaded = BadReward("died", f"no process can be started: {error}")
        else:
            self._workers.add(worker)
            if not self._close.alive:  # closed by another thread, which has not seen this process
                worker.kill()
            loaded = await worker.call(self._setup, self._options.start_deadline, 1, str)
        if isinstance(loaded, BadReward):
            self._free.put_nowait(loaded)
        else:
            (worker.source,) = loaded
            self._free.put_nowait(worker)

    async def _answer(self, request: bytes, count: int, ends: float) -> list[Any]:
        """Returns the answers to the questions of one call, which must be over at the time `ends`."""
        budget = self._options.budget
        try:
            async with asyncio.timeout_at(ends):
                worker = await self._free.get()
        except TimeoutError:
            return [BadReward("budget", f"{budget} s were over before it was its turn")] * count
        if isinstance(worker, BadReward):  # a call pays for it, so that this cannot go on for ever
            self._restart()
            return [BadReward("died", str(worker))] * count
        await asyncio.sleep(0)  # the loop sees which processes have ended
        if worker.has_ended:  # while it had nothing to do, which no call pays for
            self._restart(worker)
            return await self._answer(request, count, ends)
        left, deadline = ends - time.monotonic(), self._options.call_seconds(count)
        answers = await worker.call(request, min(left, deadline), count, self._read)
        if worker.has_ended:
            self._restart(worker)
        else:
            self._free.put_nowait(worker)
        if isinstance(answers, BadReward):
            if answers.reason == "timeout" and left < deadline:
                answers = BadReward("budget", f"{budget} s were over: {answers}")
            return [answers] * count
        return answers

    def _restart(self, ended: "_Worker | None" = None) -> None:
        """Starts a process in place of one that has ended."""
        self._workers -= {ended}
        if self._close.alive:
            self._start()


def _close(workers: "set[_Worker]", owner: int) -> None:
    for worker in list(workers) if os.getpid() == owner else ():  # not a fork's copies
        worker.kill()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of all processes, which a thread runs."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="processes", daemon=True).start()
    return loop


def _in_loop(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Returns the result of a coroutine that the loop of all processes runs."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result()


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
        self._processes = Processes("reward", reward, ProcessOptions(**options), _read_reward)
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
        if not isinstance(answer, BadReward):
            return answer
        self.counts[answer.reason] += 1
        self.messages[answer.reason] = str(answer)
        return None

    def close(self) -> None:
        """Kills the processes."""
        self._processes.close()

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_reward(value: Any) -> Earned | BadReward:
    if value is None:
        return None
    if isinstance(value, dict):
        return _read_failure(value)
    parts = tuple(Span(*part) for part in value) if isinstance(value, list) else ()
    numbers = [float(part.reward) for part in parts] if isinstance(value, list) else [float(value)]
    for number in (*numbers, sum(numbers)):
        if not abs(number) <= LARGEST_REWARD:
            return BadReward("nan", f"the function returned {number}")
    return parts if isinstance(value, list) else numbers[0]


def _read_failure(answer: Mapping[str, Any]) -> BadReward:
    if answer["reason"] not in REASONS:
        raise ValueError("there is no such reason")
    return BadReward(answer["reason"], str(answer["message"])[-MESSAGE_CHARACTERS:])


# ---- processes


async def _start_process() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _CHILD, str(_lifeline)),
        cwd=_ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},  # the accelerator is the trainer's
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        limit=_LONGEST_ANSWER,
        pass_fds=(_lifeline,),
        start_new_session=True,  # one group with all its children, to be killed at once
    )


class _Worker:
    """A child process. It is used in the loop; only `kill` may be called by any thread."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.source = ""
        self._process = process
        self._stderr = b""  # its end
        self._exit, self._listener = asyncio.create_task(self._watch()), asyncio.create_task(self._listen())

    @property
    def has_ended(self) -> bool:
        """True if the process takes no more requests."""
        assert self._process.stdout
        return self._exit.done() or self._process.returncode is not None or self._process.stdout.at_eof()

    async def call(
        self, request: bytes, seconds: float, count: int, read: Callable[[Any], Any]
    ) -> list[Any] | BadReward:
        """Sends a request, and returns `count` answers, or why there are none. Without an answer the process ends."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests
        assert answers
        try:
            async with asyncio.timeout(seconds):
                requests.write(pickle.dumps((seconds, len(request))) + request)
                answer = json.loads(await answers.readline())
            if "values" not in answer:
                return _read_failure(answer)
            if len(answer["values"]) != count:
                raise ValueError("an answer is missing")
            return [read(value) for value in answer["values"]]
        except Exception as error:  # it is late, it has ended, or what it sent is no answer
            is_late = isinstance(error, TimeoutError)
            how = await self._end(patience=0.0 if is_late else 1.0)
            text = self._stderr.decode(errors="replace")[-MESSAGE_CHARACTERS:]
            last_words = f"the end of its stderr: {text}" if text else "it wrote nothing to stderr"
            if is_late:
                return BadReward("timeout", f"no answer within its deadline; {last_words}")
            return BadReward("died", f"the process {how}; {last_words}")

    async def _end(self, patience: float) -> str:
        """Kills the process and its children after `patience` seconds, and returns how it ended."""
        await asyncio.wait([self._exit], timeout=patience)
        code = self._process.returncode
        self.kill()
        await asyncio.wait([self._exit], timeout=1.0)
        await asyncio.wait([self._listener], timeout=1.0)  # it reads what is left
        if code is None:
            return "sent nonsense"
        return f"ended by a signal ({signal.strsignal(-code)})" if code < 0 else f"ended with exit status {code}"

    def kill(self) -> None:
        """Kills the process and its children."""
        if self._process.returncode is None:
            _kill_group(self._process.pid)

    async def _watch(self) -> None:
        """Kills the children of the process as soon as it has ended."""
        await self._process.wait()
        _kill_group(self._process.pid)

    async def _listen(self) -> None:
        """Reads stderr and forgets all but its end."""
        assert self._process.stderr
        while block := await self._process.stderr.read(2**16):
            self._stderr = (self._stderr + block)[-4 * MESSAGE_CHARACTERS :]


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS refuses if only dead processes are left
        os.killpg(group, signal.SIGKILL)


def _pickled(value: Any, what: str) -> bytes:
    """Returns a message to a worker."""
    try:
        return pickle.dumps(value)
    except Exception as error:  # anything that an object's own pickling raises
        raise UsageError(f"{what} must be picklable: {type(error).__name__}: {error}") from error
