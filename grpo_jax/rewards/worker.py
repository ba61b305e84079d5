"""The child process of processes.py: loads a function, then answers requests until it is killed.

Requests come as a length and a pickle, answers go back as a length and JSON: what the function returns is
never unpickled by the parent.
"""

import asyncio
import contextlib
import faulthandler
import fcntl
import importlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Set, Sized
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from grpo_jax.data import digests
from grpo_jax.data.types import LARGEST_REWARD, MESSAGE_CHARACTERS, Completion, Reward
from grpo_jax.errors import UsageError

HEADER = struct.Struct(">Q")  # the length of what follows
STDERR = 2
WATCHDOG_BYTES = 16 * 2**20  # a thread's stack, 8 MiB by default, and what it allocates


class Kind(NamedTuple):
    """A kind of functions that are called in child processes."""

    name: str
    asked: str  # what it is asked about, beside examples
    takes: tuple[str, ...]  # what a function takes by place


KINDS = {
    "reward": Kind("reward", "completions", ("examples", "completions")),
    "tool": Kind("tool", "calls", ()),
    "factory": Kind("environment factory", "calls", ()),
    "environment": Kind("environment", "transcripts", ("example", "transcript", "key")),
}

_is_worker = False


def is_worker() -> bool:
    """Whether this process grades, under a deadline."""
    return _is_worker


def load(kind: Kind, spec: str, arguments: Mapping[str, Any] | None = None, module: Any = None) -> Callable[..., Any]:
    """The function that a text names.

    Args:
      kind: of the function; below the words are those of a reward.
      spec: "package.module:function" or "path/to/file.py:function".
      arguments: keywords for the function. Where it also takes what it is asked about, as (examples, completions, *, x)
        does, it gets them at each call. Otherwise it is called once with them, and returns the function that is asked.
        None: it is taken as it is.
      module: what `import_place` returned for the text before ":"; None: it is imported here.

    Returns:
      The function.

    Raises:
      UsageError: there is no such module or function, it cannot be imported, it is no function, or it does not take
        these keywords.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise UsageError(f"the {kind.name} {spec!r} must be module:function or path/to/file.py:function")
    try:
        found = getattr(module or import_place(kind, place, spec), name)
    except AttributeError:
        raise UsageError(f"the {kind.name} {spec!r} cannot be loaded: {place} has no {name!r}") from None
    if not callable(found):
        raise UsageError(f"the {kind.name} {spec!r} is no function but of type {type(found).__name__}")
    if arguments is None or _is_itself(kind, found, arguments):
        if kind.name == "reward":
            check_takes_examples_first(f"the reward {spec!r}", found)
        return found if arguments is None else partial(found, **arguments)
    taken = ", ".join(kind.takes)
    try:
        made = found(**arguments)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"the {kind.name} {spec!r} refuses its arguments ({', '.join(arguments) or 'none'}): expected a function "
            f"of ({taken}, *, further keywords), or one of these keywords that returns a function of ({taken}); "
            f"{_one_line(error)}"
        ) from error
    if not callable(made):
        raise UsageError(
            f"{spec!r} must return the {kind.name}, but returned {type(made).__name__}: called with keywords "
            f"alone, it has to return a function of ({taken})"
        )
    return made


def check_takes_examples_first(named: str, reward: Callable[..., Any]) -> None:
    """Refuses a function whose first parameter is called as another thing than examples: it would read the rows as it.

    Args:
      named: how the error calls it.
      reward: the function.

    Raises:
      UsageError: how a reward is called here.
    """
    try:
        first = next(iter(inspect.signature(reward).parameters), None)
    except (TypeError, ValueError):  # some functions in C have none
        return
    if first in ("completions", "prompts"):
        raise UsageError(
            f"{named} takes {first} first, as rewards of TRL do: make it f(examples, completions), where an example is "
            "the row of a prompt"
        )


def _is_itself(kind: Kind, function: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether it needs beside these keywords what a function of its kind takes, such as examples and completions."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions in C have none
        return False
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    first = list(signature.parameters.values())[: len(kind.takes)]
    if len(first) < len(kind.takes) or any(x.kind not in by_place or x.default is not x.empty for x in first):
        return False
    try:
        signature.bind(*kind.takes, **arguments)
    except TypeError:
        return False
    return True


def import_place(kind: Kind, place: str, spec: str) -> Any:
    """Imports a module by its name, or runs a file of Python.

    Args:
      kind: of the functions in it.
      place: "package.module" or "path/to/file.py".
      spec: how an error calls it.

    Raises:
      UsageError: there is no such module or file, or it cannot be imported.
    """
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        path = Path(place).resolve()
        if not path.is_file():
            raise UsageError(f"the {kind.name} {spec!r} cannot be loaded: there is no file {path}")
        sys.path.insert(0, str(path.parent))  # for what lies beside it
        name = _name_of_file(place)
        loader = importlib.util.spec_from_file_location(name, path)
        assert loader is not None
        assert loader.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(loader)
        loader.loader.exec_module(module)
        return module
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # whatever the module's own lines raise
        raise UsageError(f"the {kind.name} {spec!r} cannot be loaded: {_one_line(error)}") from error


def digest_of_source(spec: str) -> str:
    """Returns the digest of the file that a loaded function is in; empty if it is of this package, or has no file."""
    place = spec.rpartition(":")[0]
    if place.partition(".")[0] == __name__.partition(".")[0]:
        return ""
    module = sys.modules.get(_name_of_file(place) if place.endswith(".py") else place)
    file = Path(getattr(module, "__file__", None) or "")
    return digests.of_file(file) if file.is_file() else ""


def _name_of_file(place: str) -> str:
    """What the module of a file is called."""
    return f"reward_file_{Path(place).stem}"


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:MESSAGE_CHARACTERS]


def main() -> None:
    """Serves the socket whose number is the first argument; the second is the parent's process id."""
    global _is_worker
    _is_worker = True
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    _die_with_the_parent(int(sys.argv[2]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash must not fill the disk
    faulthandler.enable(file=STDERR)
    setup = pickle.loads(_receive(connection))
    os.chdir(setup["folder"])
    sys.path[:] = setup["path"]
    try:
        function = load(KINDS[setup["kind"]], setup["spec"], setup["arguments"])
    except UsageError as error:
        _send(connection, {"error": str(error)})
        return
    if setup["memory_mb"] is not None:
        _limit_memory(setup["memory_mb"])
    _send(connection, {"ready": True, "source": digest_of_source(setup["spec"])})
    with asyncio.Runner() as runner:  # one loop for all calls: clients of a service belong to theirs
        while True:
            _send(connection, _answer(_ANSWERS[setup["kind"]], function, _receive(connection), runner))


def _answer(call: Callable[..., Any], function: Any, request: bytes, runner: asyncio.Runner) -> dict[str, Any]:
    """What the function makes of a request: {"values": ...}, or {"reason": ..., "message": ...}."""
    try:
        examples, questions, deadline = pickle.loads(request)
        # Shortly before it is killed, a function that hangs says on stderr where it is.
        faulthandler.dump_traceback_later(min(0.9 * deadline, threading.TIMEOUT_MAX), file=STDERR)
        return call(function, examples, questions, runner)
    except SystemExit as error:
        return {"reason": "died", "message": f"the function called sys.exit({error.code!r})"[:MESSAGE_CHARACTERS]}
    except BaseException:
        return {"reason": "raised", "message": traceback.format_exc(limit=-20)[-MESSAGE_CHARACTERS:]}
    finally:
        faulthandler.cancel_dump_traceback_later()


def _rewards(reward: Reward, examples: Any, completions: Any, runner: asyncio.Runner) -> dict[str, Any]:
    answer = reward(examples, completions)
    if inspect.isawaitable(answer):
        answer = runner.run(_wait(answer))
    return _checked(answer, completions)


def _replies(reply: Any, examples: Any, questions: Any, runner: asyncio.Runner) -> dict[str, Any]:
    from grpo_jax.data.episodes import asked  # the worker of a reward does not load it

    episodes = [(example, *question) for example, question in zip(examples, questions, strict=True)]
    return {"values": [found._asdict() for found in asked(reply, episodes, runner.run)]}


_ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {"reward": _rewards, "environment": _replies}


async def _wait(answer):
    return await answer


def _checked(answer: Any, completions: Sequence[Completion]) -> dict[str, Any]:
    count = len(completions)
    if not isinstance(answer, Iterable) or isinstance(answer, str | bytes | Mapping | Set):
        return {"reason": "not numbers", "message": f"the function returned {type(answer).__name__}, not a list"}
    # Never more than one too many: it may be a million, or have no end.
    values = list(itertools.islice(answer, count + 1))
    if len(values) != count:
        got = f"{len(answer)}" if isinstance(answer, Sized) else "more" if len(values) > count else f"{len(values)}"
        return {"reason": "wrong length", "message": f"the function returned {got} rewards for {count} completions"}
    try:
        return {"values": [_earned(*pair) for pair in zip(values, completions, strict=True)]}
    except (TypeError, ValueError) as error:
        return {"reason": "not numbers", "message": _one_line(error)}


def _earned(value: Any, completion: Completion) -> Any:
    """What a completion earned, as JSON has it; in place of bad spans why they are bad."""
    if not isinstance(value, list | tuple):
        return None if value is None else _number(value)
    from grpo_jax.data import spans  # a run without spans does not load it

    if not spans.are_spans(value):
        return _number(value)
    try:
        return [span._replace(reward=_number(span.reward)) for span in spans.checked(value, completion)]
    except spans.BadSpans as error:
        return {"reason": "bad spans", "message": _one_line(error)}


def _number(value: Any) -> float:
    """The value as a float; NaN for what is not finite in float32."""
    if isinstance(value, str | bytes):
        raise TypeError(f"a reward is of type {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:  # an integer of a thousand digits
        return math.nan
    return number if abs(number) <= LARGEST_REWARD else math.nan


# ---- the process


def _die_with_the_parent(parent: int) -> None:
    """Kills this process and its children when the parent ends, however it ends, and whatever runs here.

    Standard input is a pipe on which nothing is written: it closes when the parent ends. A thread waits for
    that. A function that holds the interpreter's lock stops the thread, so the kernel is asked too, where it is
    Linux. PR_SET_PDEATHSIG would kill this process alone, leave its children, and also act when no more than
    the thread that started it ends.
    """
    lifeline = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3)
    with open(os.devnull, encoding="utf-8") as nothing:
        os.dup2(nothing.fileno(), 0)  # for functions that read their input
    threading.Thread(target=_kill_group_at_end, args=(lifeline,), daemon=True).start()
    if sys.platform == "linux":
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgid(0))
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if os.getppid() != parent:  # it ended before this was set up
        os.killpg(0, signal.SIGKILL)


def _kill_group_at_end(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)


def _limit_memory(megabytes: int) -> None:
    """Limits the address space to what loading took and `megabytes` more, and the stack of the watchdog's thread."""
    taken = 0
    with contextlib.suppress(OSError):  # only Linux tells
        taken = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    limit = taken + WATCHDOG_BYTES + megabytes * 2**20
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _receive(connection: socket.socket) -> bytes:
    (length,) = HEADER.unpack(_read(connection, HEADER.size))
    return _read(connection, length)


def _read(connection: socket.socket, length: int) -> bytes:
    parts = []
    while length:
        part = connection.recv(min(length, 2**20))
        if not part:
            os._exit(0)  # the parent closed it
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    connection.sendall(HEADER.pack(len(data)) + data)


if __name__ == "__main__":
    from grpo_jax.rewards import worker  # the module that others import is not this one

    worker.main()
