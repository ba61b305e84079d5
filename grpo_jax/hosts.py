"""A run over several hosts: one process on each, and all of them take the same steps.

What devices share goes through programs. What hosts have to agree on goes through the coordinator of
`jax.distributed`, as bytes: that waits for no device. Every host calls `gather` in the same order. A thread of each
host says every few seconds that it is there and what it does; so when one ends the others say which, and end too.

A host is a process of JAX here, and its number is `jax.process_index()`. Several may run on one machine. Hosts trust
each other: what they read is unpickled, so the coordinator's port is for them alone.
"""

import atexit
import itertools
import json
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import jax
from jax.experimental import multihost_utils

from grpo_jax.errors import UsageError

Value = TypeVar("Value")

_BEAT_SECONDS = 3.0  # between two signs of life
_SILENT_SECONDS = 30.0  # after which a host that gives none has ended
_LONG_SECONDS = 120.0  # after which the first host says what all hosts do
_MEET_SECONDS = 120.0  # for host 0 to answer at the start, and then for all to be there
_TOLD_SECONDS = 10.0  # after which a host says that it waits for that
_JAX_SECONDS = 60  # after which JAX itself ends the others: if this thread cannot
_REFUSED = 2  # the exit status of a refusal
_LOST = 75  # the exit status of hosts that lost another: EX_TEMPFAIL, as after SIGTERM
_ALIVE, _ROUNDS = "grpo_jax/alive", "grpo_jax/round"
_met = threading.Event()  # cleared while JAX waits for all hosts: asked for devices then, it aborts
_met.set()


@dataclass(frozen=True)
class HostOptions:
    """Several hosts, each with a process of its own. Names are those of `jax.distributed.initialize`."""

    distributed: bool = False
    """The same command is started on several hosts, which JAX finds by itself: under Slurm, Open MPI, Kubernetes or on
    a TPU pod."""
    coordinator_address: str = ""
    """In its place, where JAX cannot find the hosts: address and free port of host 0, such as 10.0.0.1:8476. It needs
    num_processes and process_id."""
    num_processes: int | None = None
    """How many hosts there are."""
    process_id: int | None = None
    """The number of this one, from 0."""


# ---- which


def count() -> int:
    """How many hosts there are; 1 unless `start` found more. Devices are not touched before."""
    return jax.process_count() if jax.distributed.is_initialized() and _met.is_set() else 1


def index() -> int:
    """The number of this one, from 0."""
    return jax.process_index() if jax.distributed.is_initialized() and _met.is_set() else 0


def is_first() -> bool:
    """Whether it is this one that writes the files of the run."""
    return index() == 0


def start(options: HostOptions, say: Callable[[str], None], note: Callable[[str], None]) -> None:
    """Finds the other hosts, if the options ask for any. To be called before JAX sees a device.

    Args:
      options: of the command line.
      say: tells the user why this host ends.
      note: tells the user what takes long.

    Raises:
      UsageError: the options do not fit together, or the others are not found.
    """
    given: dict[str, Any] = {
        "coordinator_address": options.coordinator_address or None,
        "num_processes": options.num_processes,
        "process_id": options.process_id,
    }
    if not options.distributed and not any(value is not None for value in given.values()):
        return
    _check(options)
    # Its handler of SIGTERM would replace that of `runs.stopping`.
    jax.config.update("jax_enable_preemption_service", False)
    if options.process_id:
        _reach(options.coordinator_address, note)
    try:
        with _meeting(say, note):
            jax.distributed.initialize(**given, heartbeat_timeout_seconds=_JAX_SECONDS)
    except ValueError:
        raise UsageError(
            "JAX finds no other hosts here: give each coordinator_address, num_processes and process_id"
        ) from None
    except RuntimeError as error:
        raise UsageError(f"the hosts of the run did not meet ({_line(error)}): start all with one address") from None
    if count() > 1:
        _watch(say, note)


def _reach(address: str, note: Callable[[str], None]) -> None:
    """Waits until host 0 answers. JAX would wait for five minutes without a word, and abort.

    Raises:
      UsageError: it does not answer.
    """
    host, _, port = address.rpartition(":")
    began, told = time.monotonic(), False
    while time.monotonic() - began < _MEET_SECONDS:
        try:
            socket.create_connection((host.strip("[]"), int(port)), 3).close()
            return
        except OSError:
            time.sleep(1)
        if not told and time.monotonic() - began > _TOLD_SECONDS:
            note(f"waits for host 0 at {address}, {_MEET_SECONDS:.0f} s at most")
            told = True
    raise UsageError(f"host 0 does not answer at {address}: start it, and check address, port and firewall")


@contextmanager
def _meeting(say: Callable[[str], None], note: Callable[[str], None]) -> Iterator[None]:
    """A block in which JAX waits for all hosts. It would do so for five minutes without a word, and abort.

    A thread ends the process sooner, as when a host is lost, so that a scheduler starts all of them again.
    """
    _met.clear()

    def watch() -> None:
        if _met.wait(_TOLD_SECONDS):
            return
        note(f"waits until all hosts are there, {_MEET_SECONDS:.0f} s at most")
        if not _met.wait(_MEET_SECONDS - _TOLD_SECONDS):
            say(
                f"not all hosts were there within {_MEET_SECONDS:.0f} s: start all at once, and see what the others say"
            )
            sys.stdout.flush()
            os._exit(_LOST)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        _met.set()


def _check(options: HostOptions) -> None:
    address, number, own = options.coordinator_address, options.num_processes, options.process_id
    named = [bool(address), number is not None, own is not None]
    if any(named) and not all(named):
        raise UsageError(
            "coordinator_address, num_processes and process_id belong together: give all three, or distributed alone"
        )
    if number is None or own is None:
        return
    if not address.rpartition(":")[0] or not address.rpartition(":")[2].isdecimal():
        raise UsageError(f"coordinator_address is {address}: it must be an address and a port, such as 10.0.0.1:8476")
    if not 0 < int(address.rpartition(":")[2]) < 2**16:
        raise UsageError(f"coordinator_address is {address}: a port is between 1 and 65535")
    if number < 1 or not 0 <= own < number:
        raise UsageError(f"process_id is {own} of {number} processes: it must be from 0 to num_processes - 1")


def check_alone(what: str) -> None:
    """Refuses several hosts.

    Args:
      what: that runs on one, in the plural.

    Raises:
      UsageError: there are several.
    """
    if count() > 1:
        raise UsageError(f"{what} run on one host, and there are {count()}: leave out --distributed")


# ---- what they tell each other


def share_out(name: str, items: Sequence[Any], compute: Callable[[Any], Value]) -> list[Value]:
    """Returns what is computed of each item, of which every host computes its share. All hosts call this.

    Args:
      name: of what is computed, for messages.
      items: the same on all hosts.
      compute: of one item.
    """
    shares = gather(name, [compute(item) for item in items[index() :: count()]])
    return [shares[number % count()][number // count()] for number in range(len(items))]


def gather(what: str, value: Value) -> list[Value]:
    """The value of each host, in their order. All hosts call this, in the same order of calls.

    It waits for the other hosts, but for no device. Values are pickled; every host reads those of all.

    Args:
      what: names it while hosts wait.
      value: of this host.
    """
    if count() == 1:
        return [value]
    number, client = next(_numbers), _client()
    client.key_value_set_bytes(f"{_ROUNDS}/{number}/{index()}", pickle.dumps(value))
    found = [value if host == index() else _value_of(what, number, host) for host in range(count())]
    # A host that is in this round has read all of the one before.
    client.key_value_delete(f"{_ROUNDS}/{number - 1}/{index()}")
    return found


def first_says(what: str, value: Value) -> Value:
    """The value of the first host, for all."""
    return gather(what, value if is_first() else None)[0]  # type: ignore[return-value]


def check_same(named: Mapping[str, Any]) -> None:
    """Refuses a host that was given other things than the first.

    Args:
      named: what it was given, by name.

    Raises:
      UsageError: one sentence that names what differs.
    """
    first = first_says("what each was given", dict(named))
    differing = sorted(name for name in named.keys() | first.keys() if named.get(name) != first.get(name))
    if differing:
        raise UsageError(
            f"host {index()} was given another {', '.join(differing)} than host 0: start all with the same options and "
            "the same files"
        )


def _value_of(what: str, number: int, host: int) -> Any:
    with doing(f"waits for host {host}: {what}"):
        while True:
            try:
                key = f"{_ROUNDS}/{number}/{host}"
                return pickle.loads(_client().blocking_key_value_get_bytes(key, int(_BEAT_SECONDS * 1000)))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise UsageError(f"host 0 cannot be reached any more ({_line(error)}): see what it said") from None


_numbers = itertools.count()


def _client() -> Any:
    """Of the coordinator. JAX itself has no public name for it."""
    import orbax.checkpoint as ocp

    return ocp.multihost.get_jax_distributed_client()


def whole(tree: Any) -> Any:
    """Arrays that lie on devices of several hosts as NumPy arrays, on every host; others as they are. By the devices,
    so it waits for them, and all hosts call it."""

    def brought(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
            return x
        return multihost_utils.process_allgather(x, tiled=True)

    return jax.tree.map(brought, tree)


# ---- whether they are all there

_now: list[tuple[str, float]] = [("starts", time.monotonic())]  # what this host does since when, the innermost last
_last_words: dict[str, Any] = {}  # why this host ends, and its exit status


@contextmanager
def doing(words: str) -> Iterator[None]:
    """A block that others are told of while they wait."""
    _now.append((words, time.monotonic()))
    try:
        yield
    finally:
        _now.pop()
        _now[-1] = _now[-1][0] if len(_now) > 1 else "between two parts", time.monotonic()


def leave(reason: str, code: int) -> NoReturn:
    """Ends this process, and tells the other hosts why, so that they end too: they would wait for ever."""
    if count() > 1:
        _last_words.update(ended=reason, code=code)
        with suppress(jax.errors.JaxRuntimeError):  # the coordinator may be gone
            _say_sign(_last_words)
        if is_first():  # the coordinator ends with it, and the others have yet to read this
            time.sleep(2 * _BEAT_SECONDS)
    os._exit(code)  # JAX would wait for the others on its way out


def _watch(say: Callable[[str], None], note: Callable[[str], None]) -> None:
    """Starts the thread that gives signs of life, and looks for those of the others."""
    over = threading.Event()
    thread = threading.Thread(target=_beat, args=(over, say, note), daemon=True)
    thread.start()

    def stop() -> None:
        over.set()
        thread.join()

    atexit.register(stop)  # before JAX's own, which waits until all hosts are there


def _beat(over: threading.Event, say: Callable[[str], None], note: Callable[[str], None]) -> None:
    """Gives a sign every few seconds, and ends the process when another host has ended."""
    heard: dict[int, tuple[Any, float]] = {}  # the last sign of each host, and when it was another than before
    told = 0.0
    for beat in itertools.count():
        words, since = _now[-1]
        seconds = round(time.monotonic() - since)
        try:
            _say_sign(_last_words or {"beat": beat, "doing": words, "s": seconds})
            signs = {int(key.rpartition("/")[2]): json.loads(sign) for key, sign in _client().key_value_dir_get(_ALIVE)}
        except jax.errors.JaxRuntimeError:  # where the coordinator is gone JAX ends the process at once, or this does
            if not over.is_set():
                _end(say, "host 0 cannot be reached any more, and hosts talk through it: see what it said", _LOST)
            return
        for host in range(count()):
            if heard.get(host, ("", 0.0))[0] != signs.get(host):
                heard[host] = signs.get(host), time.monotonic()
            _check_sign(host, signs.get(host, {}), time.monotonic() - heard[host][1], say)
        if is_first() and seconds > _LONG_SECONDS and since != told:
            told = since
            note("this takes long: " + "; ".join(_in_words(host, signs[host]) for host in sorted(signs)))
        if over.wait(_BEAT_SECONDS):
            return


def _check_sign(host: int, sign: Mapping[str, Any], age: float, say: Callable[[str], None]) -> None:
    """Ends the process if another host has ended, by its own words or by its silence of `age` seconds."""
    if _last_words:
        return  # this one ends already, and has said why
    if "ended" in sign and host != index():
        _end(say, f"host {host} has ended: {sign['ended']}", sign["code"])
    if age > _SILENT_SECONDS:
        _end(say, f"host {host} has given no sign of life for {_SILENT_SECONDS:.0f} s, so this one ends too", _LOST)


def _end(say: Callable[[str], None], sentence: str, code: int) -> NoReturn:
    # What was refused is refused again, and the run may not have begun.
    say(sentence if code == _REFUSED else f"{sentence}; add --resume to continue the run")
    sys.stdout.flush()
    os._exit(code)  # the main thread may hang in C code


def _say_sign(sign: Mapping[str, Any]) -> None:
    _client().key_value_set(f"{_ALIVE}/{index()}", json.dumps(sign), allow_overwrite=True)


def _in_words(host: int, sign: Mapping[str, Any]) -> str:
    return f"host {host}: {sign.get('doing', 'ends')}, for {sign.get('s', 0)} s"


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
