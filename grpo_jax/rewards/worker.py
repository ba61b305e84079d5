"""Users' functions: they are loaded and called, and what they return is checked. `main` is the child process.

Requests arrive pickled. Answers are JSON, so that the parent unpickles nothing from a user's function.
"""

import contextlib
import faulthandler
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import pickle
import resource
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Set, Sized
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO

from grpo_jax.data.coroutines import resolve
from grpo_jax.data.types import LARGEST_REWARD, MESSAGE_CHARACTERS, Checked, Completion, Span, hash_file, real_number
from grpo_jax.errors import UsageError, abbreviate, user_path

_STDERR = 2
_WATCHDOG_BYTES = 16 * 2**20  # a thread's stack, 8 MiB by default, and its allocations
# The kinds of functions that may get keywords, and the positional arguments of each kind.
_PARAMETERS = {"reward": ("examples", "completions"), "environment": ("example", "transcript", "key")}
_PARAMETERS["function"] = ("example", "question")
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

_is_worker = False
answers: BinaryIO  # the pipe from a worker to its parent


def is_worker() -> bool:
    """Returns whether this process is a child process that runs one function under a deadline."""
    return _is_worker


# ---- loading


def load_function(
    kind: str, spec: str, arguments: Mapping[str, Any] | None = None, module: Any = None
) -> Callable[..., Any]:
    """Loads the function named by a text.

    Args:
      kind: "reward", "environment", "function", "environment factory" or "tool".
      spec: The name of the function, as "package.module:function" or "path/to/file.py:function".
      arguments: Keywords for the function. A function such as (examples, completions, *, x) gets them at each call. Any
        other function is called once with them, and returns the function to use. None: the function is used as it is.
      module: The module that `import_place` returned for the text before ":". None: it is imported here.

    Raises:
      UsageError: The function does not exist, cannot be imported, is not callable, or does not take these keywords.
    """
    function = look_up(kind, spec, module)
    if not callable(function):
        raise UsageError(f"the {kind} {spec!r} is no function but of type {type(function).__name__}")
    if arguments is None or _takes_questions(function, _PARAMETERS[kind], arguments):
        if kind == "reward":
            check_takes_examples_first(f"the reward {spec!r}", function)
        return function if arguments is None else partial(function, **arguments)
    return _call_maker(kind, spec, function, arguments)


def look_up(kind: str, spec: str, module: Any = None) -> Any:
    """Returns the value named by a text. For the arguments see `load_function`.

    Raises:
      UsageError: The value does not exist, or its module cannot be imported.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise UsageError(f"the {kind} {spec!r} must be module:name or path/to/file.py:name")
    try:
        return getattr(module or import_place(kind, place, spec), name)
    except AttributeError:
        raise UsageError(f"the {kind} {spec!r} cannot be loaded: {place} has no {name!r}") from None


def _takes_questions(function: Any, parameters: Sequence[str], arguments: Mapping[str, Any]) -> bool:
    """Returns whether a function takes these positional parameters and these keywords."""
    try:
        signature = inspect.signature(function)
        signature.bind(*parameters, **arguments)
    except (TypeError, ValueError):  # some functions in C have no signature
        return False
    first = list(signature.parameters.values())[: len(parameters)]
    return len(first) == len(parameters) and all(x.kind in _BY_PLACE and x.default is x.empty for x in first)


def _call_maker(kind: str, spec: str, maker: Any, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """Calls a function with keywords, and returns the function that it makes."""
    parameters = ", ".join(_PARAMETERS[kind])
    try:
        function = maker(**arguments)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"the {kind} {spec!r} refuses its arguments ({', '.join(arguments) or 'none'}): expected a function of "
            f"({parameters}, *, further keywords), or one of these keywords that returns a function of ({parameters}); "
            f"{one_line(error)}"
        ) from error
    if not callable(function):
        raise UsageError(
            f"{spec!r} must return the {kind}, but returned {type(function).__name__}: called with nothing but "
            f"keywords, it must return a function of ({parameters})"
        )
    return function


def check_takes_examples_first(named: str, reward: Callable[..., Any]) -> None:
    """Checks that the first parameter of a reward is not named as in TRL, since it would get the examples.

    Args:
      named: The name of the reward in the error message.
      reward: The reward function.

    Raises:
      UsageError: The first parameter is "completions" or "prompts".
    """
    try:
        first = next(iter(inspect.signature(reward).parameters), None)
    except (TypeError, ValueError):  # some functions in C have no signature
        return
    if first in ("completions", "prompts"):
        raise UsageError(
            f"{named} takes {first} first, as rewards of TRL do: make it f(examples, completions), where an example is "
            "the row of a prompt"
        )


def look_up_once(kind: str, spec: str) -> Any:
    """Returns the value that `look_up` returns. A file runs again only when it is modified."""
    file = user_path(spec.rpartition(":")[0])
    return _look_up(kind, spec, file.stat().st_mtime_ns if file.is_file() else 0)


@cache
def _look_up(kind: str, spec: str, modified: int) -> Any:
    return look_up(kind, spec)


def import_place(kind: str, place: str, spec: str) -> Any:
    """Imports a module by its name, or a Python file by its path.

    Args:
      kind: The kind of the functions in the module; see `load_function`.
      place: The module or file, as "package.module" or "path/to/file.py".
      spec: The name of the function in error messages.

    Raises:
      UsageError: The module or file does not exist, or cannot be imported.
    """
    try:
        if not place.endswith(".py"):
            if not {"", os.getcwd()} & {*sys.path}:  # an installed command's path lacks the current folder
                sys.path.append(os.getcwd())
            return importlib.import_module(place)
        path = user_path(place).resolve()
        if not path.is_file():
            raise UsageError(f"the {kind} {spec!r} cannot be loaded: there is no file {path}")
        sys.path.insert(0, str(path.parent))  # lets it import modules in its folder
        loader: Any = importlib.util.spec_from_file_location(_module_name(place), path)  # never None for a .py file
        module = sys.modules[loader.name] = importlib.util.module_from_spec(loader)
        loader.loader.exec_module(module)
        return module
    except UsageError:
        raise
    except BaseException as error:  # a module may raise any type of error
        raise UsageError(f"the {kind} {spec!r} cannot be loaded: {one_line(error)}") from error


def digest_of_source(spec: str) -> str:
    """Returns the digest of a loaded function's file; empty for a function of this package, or without a file."""
    place = spec.rpartition(":")[0]
    if place.partition(".")[0] == __name__.partition(".")[0]:
        return ""
    file = Path(getattr(sys.modules.get(_module_name(place)), "__file__", None) or "")
    return hash_file(file) if file.is_file() else ""


def _module_name(place: str) -> str:
    return f"reward_file_{Path(place).stem}" if place.endswith(".py") else place


# ---- checks of what rewards return

MOST_SPANS = 1000  # in one completion

# The reasons why completions have no reward.
REASONS = ("timeout", "raised", "died", "nan", "not numbers", "bad spans", "wrong length", "budget")


class BadReward(ValueError):
    """The error of a reward function that gave no reward. Its `reason` is in `REASONS`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def checked_rewards(answer: Any, completions: Sequence[Completion]) -> list[Checked | BadReward]:
    """Returns the reward of each completion: None, spans, a float that may be infinite or NaN, or a `BadReward`.

    Args:
      answer: The value that a reward function returned for the completions.
      completions: The B completions.

    Raises:
      BadReward: The answer is not B numbers or spans.
    """
    count = len(completions)
    if not isinstance(answer, Iterable) or isinstance(answer, str | bytes | Mapping | Set):
        raise BadReward("not numbers", f"the function returned {type(answer).__name__}, not a list")
    # Reads at most one value too many, since the answer may be endless.
    values = list(itertools.islice(answer, count + 1))
    if len(values) != count:
        number = f"{len(answer)}" if isinstance(answer, Sized) else "more" if len(values) > count else f"{len(values)}"
        raise BadReward("wrong length", f"the function returned {number} rewards for {count} completions")
    return [_checked_reward(*pair) for pair in zip(values, completions, strict=True)]


def _checked_reward(value: Any, completion: Completion) -> Checked | BadReward:
    if value is None:
        return None
    if isinstance(value, list | tuple) and all(isinstance(part, list | tuple) for part in value):
        try:
            return checked_spans(value, completion)
        except BadReward as error:  # the other completions keep their rewards
            return error
    if isinstance(value, str | bytes | list | tuple):  # float() would parse texts
        raise BadReward("not numbers", f"the function returned a reward of type {type(value).__name__}")
    try:
        return real_number(value)
    except OverflowError:
        return BadReward("nan", "the function returned an integer that is larger than any float")
    except (TypeError, ValueError) as error:
        raise BadReward("not numbers", one_line(error)) from None


def checked_spans(value: Sequence[Any], completion: Completion) -> tuple[Span, ...]:
    """Checks and returns the spans that a reward function gave for a completion.

    Args:
      value: Spans, or tuples (start, end, reward) in characters.
      completion: The completion that the spans belong to.

    Raises:
      BadReward: Spans are not in order, overlap, are empty, or lie outside the completion, or a value is no number.
    """
    bad = partial(BadReward, "bad spans")
    if len(value) > MOST_SPANS:
        raise bad(f"there are {len(value)} spans of one completion, and at most {MOST_SPANS} are read")
    spans = []
    for part in value:
        try:
            start, end, reward, *unit = part
            span = Span(int(start), int(end), real_number(reward), *unit)
        except (TypeError, ValueError, OverflowError):
            raise bad(f"{abbreviate(part)} is no span: it must be (start, end, reward)") from None
        if span[:2] != (start, end) or span.unit not in ("characters", "tokens"):
            raise bad(f"{abbreviate(part)} is no span of characters or tokens")
        length = len(completion) if span.unit == "characters" else len(completion.ids)
        if not 0 <= span.start < span.end <= length:
            raise bad(f"the span from {span.start} to {span.end} is not one of a completion of {length} {span.unit}")
        spans.append(span)
    if len({span.unit for span in spans}) > 1:
        raise bad("the spans of one completion are of characters and of tokens: take one of them")
    for before, span in itertools.pairwise(spans):
        if span.start < before.end:
            raise bad(f"the span from {span.start} begins before the one to {before.end} ends: put them in order")
    return tuple(spans)


def reward_from_json(value: Any) -> Checked | BadReward:
    """Converts a reward of `checked_rewards` back from JSON; a number that float32 cannot hold becomes `BadReward`."""
    if value is None:
        return None
    parts = tuple(Span(*part) for part in value) if isinstance(value, list) else ()
    numbers = [float(part.reward) for part in parts] if isinstance(value, list) else [float(value)]
    for number in (*numbers, sum(numbers)):
        if not abs(number) <= LARGEST_REWARD:
            return BadReward("nan", f"the function returned {number}")
    return parts if isinstance(value, list) else numbers[0]


def one_line(error: BaseException) -> str:
    """Returns the type and the message of an error in one line, shortened."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:MESSAGE_CHARACTERS]


# ---- the child process


def main() -> None:
    """Answers requests until the process is killed. The first argument is the file descriptor of the lifeline."""
    global _is_worker, answers
    _is_worker, lifeline = True, int(sys.argv[1])
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    for file, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY)):  # for functions that read their input, or print
        os.dup2(os.open(os.devnull, mode), file)
    # Nothing is written to the lifeline. It closes when the parent ends for any reason. Then a shell kills this process
    # and its children. A thread could not do this while a function holds the GIL.
    end = "exec 3<&0; (read line <&3; kill -KILL 0) >&- 2>&- &"
    subprocess.run(["sh", "-c", end], stdin=lifeline, check=True)
    os.close(lifeline)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash must not fill the disk
    faulthandler.enable(file=_STDERR)
    setup = pickle.loads(pickle.load(requests)[1])  # requests come with the seconds that they may take
    os.chdir(setup["folder"])
    sys.path[:] = setup["path"]
    kind, spec = setup["kind"], setup["spec"]
    try:
        function = load_function(kind, spec, setup["arguments"])
        answer: dict[str, Any] = {"values": [digest_of_source(spec)]}
    except UsageError as error:
        answer = {"reason": "raised", "message": str(error)}
    if setup["memory_mb"] is not None:
        _limit_memory(setup["memory_mb"])
    while True:
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
        answer = _answer(_CALLS[kind], function, *pickle.load(requests))


def _answer(call: Callable[..., list[Any]], function: Any, seconds: float, request: bytes) -> dict[str, Any]:
    """Calls the function for a request, and returns {"values": ...} or {"reason": ..., "message": ...}."""
    try:
        # Shortly before its deadline, a function that hangs writes its stack to stderr.
        faulthandler.dump_traceback_later(min(0.9 * seconds, threading.TIMEOUT_MAX), file=_STDERR)
        return {"values": call(function, *pickle.loads(request))}
    except BadReward as error:
        return _failure(error)
    except SystemExit as error:
        return {"reason": "died", "message": f"the function called sys.exit({error.code!r})"[:MESSAGE_CHARACTERS]}
    except BaseException:
        return {"reason": "raised", "message": traceback.format_exc(limit=-20)[-MESSAGE_CHARACTERS:]}
    finally:
        faulthandler.cancel_dump_traceback_later()


def _rewards(reward: Any, examples: Any, completions: Any) -> list[Any]:
    (answer,) = resolve([reward(examples, completions)])
    earned = checked_rewards(answer, completions)
    return [_failure(value) if isinstance(value, BadReward) else value for value in earned]


def _replies(reply: Any, examples: Any, questions: Any) -> list[Any]:
    from grpo_jax.data.episodes import asked  # not imported by workers of rewards

    calls = [(example, *question) for example, question in zip(examples, questions, strict=True)]
    return [answer._asdict() for answer in asked(reply, calls)]


def _results(function: Any, examples: Any, questions: Any) -> list[Any]:
    return list(map(function, examples, questions))


_CALLS: dict[str, Any] = {"reward": _rewards, "environment": _replies, "function": _results}


def _failure(error: BadReward) -> dict[str, str]:
    return {"reason": error.reason, "message": str(error)}


def _limit_memory(megabytes: int) -> None:
    """Limits the address space to its present size, `megabytes` more, and the memory of the watchdog's thread."""
    taken = 0
    with contextlib.suppress(OSError):  # only Linux has this file
        taken = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    limit = taken + _WATCHDOG_BYTES + megabytes * 2**20
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
