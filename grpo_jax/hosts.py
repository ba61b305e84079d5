"""A run over several hosts: one process on each, and all of them take the same steps.

Devices share arrays in compiled programs. Hosts agree on everything else through the coordinator of `jax.distributed`,
as bytes: that waits for no device. Every host calls `gather` in the same order. A host that fails tells the others why,
and they end too. If a host dies without a word, JAX misses its heartbeats and ends the others.

A host is a process of JAX here, and its number is `jax.process_index()`. Several may run on one machine. Hosts trust
each other: what they read is unpickled, so the coordinator's port is for them alone.
"""

import atexit
import itertools
import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import jax
from jax.experimental import multihost_utils

from grpo_jax.errors import UsageError

Value = TypeVar("Value")

_MEET_SECONDS = 120  # for all hosts to be there
_HEARTBEAT_SECONDS = 30  # without a heartbeat, after which JAX ends the other hosts
_LOOK_SECONDS = 1.0  # between two looks whether a host has failed
_WAIT_SECONDS = 3  # for a value, after which Python handles signals
_LONG_WAITS = 40  # after which a host says what it waits for
_REFUSED = 2  # the exit status of a refusal
_ROUNDS, _FAILED = "grpo_jax/round", "grpo_jax/failed"
_over = threading.Event()  # this host ends, or the run has ended on all hosts
_note: Callable[[str], None] = print  # replaced by `start`


@dataclass(frozen=True)
class HostOptions:
    """Several hosts, each with a process of its own. Names are those of `jax.distributed.initialize`."""

    distributed: bool = False
    """Run on several hosts, each started with the same command. JAX finds the hosts under Slurm, Open MPI, Kubernetes
    or on a TPU pod."""
    coordinator_address: str = ""
    """Address and free port of host 0, such as 10.0.0.1:8476, if JAX cannot find the hosts. It needs num_processes and
    process_id, and replaces distributed."""
    num_processes: int | None = None
    """Number of hosts."""
    process_id: int | None = None
    """Number of this host, from 0."""


# ---- which


def count() -> int:
    """Returns how many hosts there are; 1 unless `start` found more. Devices are not touched before."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def index() -> int:
    """Returns the number of this host, from 0."""
    return jax.process_index() if jax.distributed.is_initialized() else 0


def is_first() -> bool:
    """Returns whether this host writes the files of the run."""
    return index() == 0


def start(options: HostOptions, say: Callable[[str], None], note: Callable[[str], None]) -> None:
    """Finds the other hosts, if the options ask for any. Call this before JAX sees a device.

    Args:
      options: of the command line.
      say: tells the user why this host ends.
      note: tells the user what this host waits for.

    Raises:
      UsageError: the options do not fit together, or JAX finds no other hosts.
    """
    named: dict[str, Any] = {
        "coordinator_address": options.coordinator_address or None,
        "num_processes": options.num_processes,
        "process_id": options.process_id,
    }
    if not options.distributed and not any(value is not None for value in named.values()):
        return
    _check(options)
    # Its handler of SIGTERM would replace that of `runs.runner`.
    jax.config.update("jax_enable_preemption_service", False)
    global _note
    _note = note
    note(
        f"waits until all hosts are there, {_MEET_SECONDS} s at most; if JAX then ends with DEADLINE_EXCEEDED, start "
        "those that are missing, and check address, port and firewall"
    )
    try:
        jax.distributed.initialize(
            **named, initialization_timeout=_MEET_SECONDS, heartbeat_timeout_seconds=_HEARTBEAT_SECONDS
        )
    except ValueError:
        raise UsageError(
            "JAX finds no other hosts here: give each coordinator_address, num_processes and process_id"
        ) from None
    except RuntimeError as error:
        raise UsageError(f"the hosts of the run did not meet ({_line(error)}): start all with one address") from None
    if count() > 1:
        threading.Thread(target=_watch, args=(say,), daemon=True).start()
        atexit.register(_over.set)  # before JAX's own, which waits until all hosts are there


def _check(options: HostOptions) -> None:
    address, number, process = options.coordinator_address, options.num_processes, options.process_id
    named = [bool(address), number is not None, process is not None]
    if any(named) and not all(named):
        raise UsageError(
            "coordinator_address, num_processes and process_id belong together: give all three, or distributed alone"
        )
    if number is None or process is None:
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UsageError(
            f"coordinator_address is {address}: it must be an address and a port from 1 to 65535, such as 10.0.0.1:8476"
        )
    if number < 1 or not 0 <= process < number:
        raise UsageError(f"process_id is {process} of {number} processes: it must be from 0 to num_processes - 1")


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
    """Returns the value of each host, in their order. All hosts call this, in the same order of calls.

    It waits for the other hosts, but for no device. Values are pickled; every host reads those of all.

    Args:
      what: names the value if a host waits long for it.
      value: that of this host.
    """
    if count() == 1:
        return [value]
    number, client = next(_numbers), _client()
    client.key_value_set_bytes(f"{_ROUNDS}/{number}/{index()}", pickle.dumps(value))
    values = [value if host == index() else _value_of(what, number, host) for host in range(count())]
    # A host that is in this round has read all of the one before.
    client.key_value_delete(f"{_ROUNDS}/{number - 1}/{index()}")
    return values


def first_says(what: str, value: Value) -> Value:
    """Returns the value of the first host, on all hosts."""
    return gather(what, value if is_first() else None)[0]  # type: ignore[return-value]


def check_same(named: Mapping[str, Any]) -> None:
    """Refuses a host whose options or files differ from those of the first.

    Args:
      named: the values that must be the same, by name.

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
    for attempt in itertools.count(1):
        try:
            key = f"{_ROUNDS}/{number}/{host}"
            return pickle.loads(_client().blocking_key_value_get_bytes(key, _WAIT_SECONDS * 1000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise UsageError(f"host 0 cannot be reached any more ({_line(error)}): see its messages") from None
        if attempt == _LONG_WAITS:
            _note(f"has waited {attempt * _WAIT_SECONDS} s for host {host}: {what}")
    raise AssertionError


_numbers = itertools.count()


def _client() -> Any:
    """Returns the client of the coordinator. JAX itself has no public name for it."""
    import orbax.checkpoint as ocp

    return ocp.multihost.get_jax_distributed_client()


def whole(tree: Any) -> Any:
    """Gathers arrays that are spread over hosts as NumPy arrays on every host; other leaves stay as they are. It waits
    for the devices, and all hosts call it."""

    def gather_array(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
            return x
        return multihost_utils.process_allgather(x, tiled=True)

    return jax.tree.map(gather_array, tree)


# ---- hosts that fail


def leave(reason: str, code: int) -> NoReturn:
    """Ends this process, and tells the other hosts why, so that they end too: they would wait for it forever.

    Args:
      reason: a sentence, which this host has printed already.
      code: the exit status.
    """
    _over.set()
    if count() > 1:
        with suppress(jax.errors.JaxRuntimeError):  # another host has failed before, or the coordinator is gone
            _client().key_value_set(_FAILED, json.dumps([index(), reason, code]))
    _end(code)


def _watch(say: Callable[[str], None]) -> None:
    """Ends the process when another host has failed. This is a thread, since the main thread may hang in C code."""
    while not _over.wait(_LOOK_SECONDS):
        try:
            host, reason, code = json.loads(_client().key_value_try_get(_FAILED))
        except jax.errors.JaxRuntimeError:  # no host has failed, or the coordinator is gone, and JAX ends this process
            continue
        sentence = f"host {host} has ended: {reason}"
        # What was refused is refused again, and the run may not have begun.
        say(sentence if code == _REFUSED else f"{sentence}; add --resume to continue the run")
        _end(code)


def _end(code: int) -> NoReturn:
    """Ends the process. JAX would wait for the other hosts on its way out."""
    sys.stdout.flush()
    if is_first() and count() > 1:  # the coordinator ends with it, and the others must have looked before
        time.sleep(3 * _LOOK_SECONDS)
    os._exit(code)


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
