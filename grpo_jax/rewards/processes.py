"""Child processes for users' rewards and environments, which are killed when they hang.

    with Grader("my_rewards.py:correct", deadline=5.0, chunk=1) as grader:
        task = Task(reward=grader, ...)

One thread runs an event loop for all processes. Requests are pickled. Answers are lines of JSON of limited length, so
that nothing from a user's function is unpickled here.

Pools based on `multiprocessing`, such as pebble's, are not used: they import the user's main module again in every
process, and do not kill the children of a process.
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

from grpo_jax.data.types import MESSAGE_CHARACTERS, Checked, Completion, Earned, Example
from grpo_jax.errors import UsageError
from grpo_jax.options import Size, check_number
from grpo_jax.rewards.worker import REASONS, BadReward, reward_from_json

_ROOT = Path(__file__).resolve().parents[2]  # the folder that holds the package
_CHILD = "from grpo_jax.rewards.worker import main; main()"
_LONGEST_ANSWER = 2**25  # bytes
# Nothing is written to this pipe. It closes when this process ends for any reason, and the children then exit.
_lifeline, _held_open = os.pipe()
os.register_at_fork(after_in_child=partial(os.close, _held_open))

Result = TypeVar("Result")


@dataclass(frozen=True)
class ProcessOptions:
    """Keywords of `Grader` and `environments.environment_in_processes`, which say how a function runs in processes.

    Attributes:
      arguments: Keywords for the function. A function such as (examples, completions, *, x) gets them at each call. Any
        other function is called once with them, and returns the function to use. None: the function is used as it is.
      deadline: Seconds for one call of the function.
      budget: Seconds for all questions of a batch. Questions without an answer by then get none.
      chunk: The number of questions in one call of the function. "prompt": the consecutive questions of one prompt,
        which share their example. None: all questions, for a function that compares prompts.
      group_size: The number of questions that `deadline` is for, if `chunk` is "prompt". Calls with more questions, as
        in an evaluation, get more time in proportion.
      workers: The number of processes. None: one for each CPU, at most four. Always one if `chunk` is None.
      memory_mb: Megabytes that a process may allocate after loading the function. None: no limit.
      start_deadline: Seconds for loading the function.

    Raises:
      UsageError: A number is out of range.
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
            if (number := getattr(self, name)) != "prompt":
                check_number(name, number, Size)

    @property
    def num_workers(self) -> int:
        """The number of processes."""
        return 1 if self.chunk is None else self.workers or min(4, os.cpu_count() or 1)

    def call_seconds(self, num_questions: int) -> float:
        """Returns the seconds that one call with this number of questions may take."""
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
      source: The digest of the function's file; empty for a function of this package.
    """

    def __init__(self, kind: str, spec: str, options: ProcessOptions, read: Callable[[Any], Any]) -> None:
        """Starts the processes and loads the function.

        The function sees no accelerator through JAX, and its standard output is discarded. Processes that it starts
        end with it, unless they start a new session.

        Args:
          kind: "reward", "environment" or "function", which maps (example, question) to an answer that JSON can hold.
          spec: The name of the function, as "package.module:function" or "path/to/file.py:function". It may be async.
          options: The options of the processes.
          read: Converts one answer from JSON to the answer or `BadReward`. If it raises, all answers of the call are
            discarded, and the process is killed.

        Raises:
          UsageError: The function cannot be loaded, or its arguments cannot be pickled.
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
        # Workers that have loaded the function, and the reasons why other workers failed to.
        self._free: asyncio.LifoQueue[_Worker | BadReward] = asyncio.LifoQueue()
        self._workers: set[_Worker] = set()
        self._starting: set[asyncio.Task[None]] = set()
        self._close = weakref.finalize(self, _close, self._workers, os.getpid())
        self.source = _in_loop(self._open())

    def ask(self, examples: Sequence[Example], questions: Sequence[Any]) -> list[Any]:
        """Returns an answer or `BadReward` for each of B questions. Each question has an example.

        Raises:
          UsageError: Examples or questions cannot be pickled, or the processes are closed.
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
        self._starting.add(task)  # the loop keeps only weak references to tasks
        task.add_done_callback(self._starting.discard)

    async def _load(self) -> None:
        """Starts a process and loads the function in it."""
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
        """Returns the answers to the questions of one call, which must end before the time `ends`."""
        budget = self._options.budget
        try:
            async with asyncio.timeout_at(ends):
                worker = await self._free.get()
        except TimeoutError:
            return [BadReward("budget", f"{budget} s were over before it was its turn")] * count
        if isinstance(worker, BadReward):  # fails the call, so that restarts do not repeat forever
            self._restart()
            return [BadReward("died", str(worker))] * count
        await asyncio.sleep(0)  # lets the loop notice processes that have ended
        if worker.has_ended:  # it ended while idle, so the call does not fail
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
        """Starts a process that replaces an ended one."""
        self._workers -= {ended}
        if self._close.alive:
            self._start()


def _close(workers: "set[_Worker]", owner: int) -> None:
    for worker in list(workers) if os.getpid() == owner else ():  # not a fork's copies
        worker.kill()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of all processes, which runs in a thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="processes", daemon=True).start()
    return loop


def _in_loop(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine in the loop of all processes, and returns its result."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result()


class Grader:
    """A reward that runs a function in child processes, and always returns.

    If the function fails for a completion, the reward is None, and the reason is counted.

    Attributes:
      counts: Reason -> the number of completions without a reward since the start, for each of REASONS.
      messages: Reason -> the last message about it, the end of a traceback or of the function's stderr.
      source: The digest of the function's file; empty for a function of this package.
      spec: The name of the function.
    """

    def __init__(self, reward: str, **options: Any) -> None:
        """Starts the processes and loads the function, as `Processes` does.

        Args:
          reward: The name of the function, as "package.module:function" or "path/to/file.py:function". It may be async.
          **options: Fields of `ProcessOptions` with their defaults, such as deadline, 10 (seconds for one call of the
            function), budget, 60 (seconds for one call of the grader), and chunk, None (all completions in one call).

        Raises:
          UsageError: An option is invalid, or the function cannot be loaded.
        """
        self.counts = dict.fromkeys(REASONS, 0)
        self.messages: dict[str, str] = {}
        self._processes = Processes("reward", reward, ProcessOptions(**options), _read_reward)
        self.source, self.spec = self._processes.source, reward

    def __call__(self, examples: Sequence[Example], completions: Sequence[Completion]) -> list[Earned]:
        """Returns the rewards of B completions, each finite or None.

        Raises:
          UsageError: The examples cannot be pickled, or the grader is closed.
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


def _read_reward(value: Any) -> Checked | BadReward:
    return _read_failure(value) if isinstance(value, dict) else reward_from_json(value)


def _read_failure(answer: Mapping[str, Any]) -> BadReward:
    if answer["reason"] not in REASONS:
        raise ValueError("there is no such reason")
    return BadReward(answer["reason"], str(answer["message"])[-MESSAGE_CHARACTERS:])


# ---- processes


async def _start_process() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _CHILD, str(_lifeline)),
        cwd=_ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},  # the trainer uses the accelerator
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        limit=_LONGEST_ANSWER,
        pass_fds=(_lifeline,),
        start_new_session=True,  # one process group with all its children, to kill at once
    )


class _Worker:
    """A child process, used from the loop. Only `kill` may be called from other threads."""

    def __init__(self, process: Any) -> None:  # an asyncio.subprocess.Process with three pipes
        self.source = ""
        self._process = process
        self._stderr = b""  # the end of its stderr
        self._exit, self._listener = asyncio.create_task(self._watch()), asyncio.create_task(self._listen())

    @property
    def has_ended(self) -> bool:
        """True if the process takes no more requests."""
        return self._exit.done() or self._process.returncode is not None or self._process.stdout.at_eof()

    async def call(
        self, request: bytes, seconds: float, count: int, read: Callable[[Any], Any]
    ) -> list[Any] | BadReward:
        """Sends a request and returns `count` answers, or the reason for a failure, after which the process ends."""
        requests, answers = self._process.stdin, self._process.stdout
        try:
            async with asyncio.timeout(seconds):
                requests.write(pickle.dumps((seconds, request)))
                answer = json.loads(await answers.readline())
            if "values" not in answer:
                return _read_failure(answer)
            if len(answer["values"]) != count:
                raise ValueError("an answer is missing")
            return [read(value) for value in answer["values"]]
        except Exception as error:  # a timeout, the end of the process, or an invalid answer
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
        await asyncio.wait([self._listener], timeout=1.0)  # reads the rest of stderr
        if code is None:
            return "sent nonsense"
        return f"ended by a signal ({signal.strsignal(-code)})" if code < 0 else f"ended with exit status {code}"

    def kill(self) -> None:
        """Kills the process and its children."""
        if self._process.returncode is None:
            _kill_group(self._process.pid)

    async def _watch(self) -> None:
        """Kills the children of the process as soon as it ends."""
        await self._process.wait()
        _kill_group(self._process.pid)

    async def _listen(self) -> None:
        """Reads stderr, and keeps only its end."""
        while block := await self._process.stderr.read(2**16):
            self._stderr = (self._stderr + block)[-4 * MESSAGE_CHARACTERS :]


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS refuses if only dead processes are left
        os.killpg(group, signal.SIGKILL)


def _pickled(value: Any, what: str) -> bytes:
    """Pickles a message to a worker."""
    try:
        return pickle.dumps(value)
    except Exception as error:  # objects may raise any type of error
        raise UsageError(f"{what} must be picklable: {type(error).__name__}: {error}") from error
