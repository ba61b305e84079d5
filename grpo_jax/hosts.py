"""Running on several hosts: one process on each, all of which take the same steps.

Devices exchange arrays in compiled programs. Hosts exchange everything else as bytes through the coordinator of
`jax.distributed`, without waiting for a device. Every host calls `gather` in the same order. A host that fails tells
the other hosts why, and they exit too. If a host dies without a message, JAX misses its heartbeats and ends the other
hosts.

A host here is a JAX process, and its number is `jax.process_index()`. Several may run on one machine. Hosts trust each
other: they unpickle the bytes that they receive, so only they should be able to reach the coordinator's port.
"""

import atexit
import itertools
import json
import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import jax
from jax.experimental import multihost_utils

from grpo_jax.errors import UsageError, flush_output, reason_of

Value = TypeVar("Value")

_MEET_SECONDS = 120  # the time that all hosts have to connect
_HEARTBEAT_SECONDS = 30  # the time without a heartbeat after which JAX ends the other hosts
_LOOK_SECONDS = 1.0  # the time between two checks for a failed host
_WAIT_SECONDS = 3  # the timeout of one wait for a value, after which Python can handle signals
_LONG_WAITS = 40  # the number of waits after which a host prints what it waits for
_REFUSED = 2  # the exit status of a `UsageError`
_ROUNDS, _FAILED = "grpo_jax/round", "grpo_jax/failed"
_over = threading.Event()  # set when this host exits, or when the run has ended on all hosts
_note: Callable[[str], None] = print  # replaced by `start`


@dataclass(frozen=True)
class HostOptions:
    """Options for running on several hosts, with one process on each. Names follow `jax.distributed.initialize`."""

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
    """Returns the number of hosts: 1 unless `start` connected more. Does not initialise devices."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def index() -> int:
    """Returns the number of this host, from 0."""
    return jax.process_index() if jax.distributed.is_initialized() else 0


def is_first() -> bool:
    """Returns whether this is host 0, which writes the files of the run."""
    return index() == 0


def start(options: HostOptions, say: Callable[[str], None], note: Callable[[str], None]) -> None:
    """Connects the hosts if the options ask for several. Call this before JAX initialises its devices.

    Args:
      options: The options about hosts.
      say: Prints the reason why this host exits.
      note: Prints what this host waits for.

    Raises:
      UsageError: The options contradict each other, or JAX finds no other hosts.
    """
    named: dict[str, Any] = {
        "coordinator_address": options.coordinator_address or None,
        "num_processes": options.num_processes,
        "process_id": options.process_id,
    }
    if not options.distributed and not any(value is not None for value in named.values()):
        return
    _check(options)
    # JAX's handler of SIGTERM would replace the handler of `runs.runner`.
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
    except (ValueError, RuntimeError) as error:
        raise UsageError(
            f"the hosts of the run did not meet ({reason_of(error)}): give each the same coordinator_address and "
            "num_processes, and its process_id"
        ) from None
    if count() > 1:
        threading.Thread(target=_watch, args=(say,), daemon=True).start()
        atexit.register(_over.set)  # runs before JAX's shutdown, which waits for all hosts


def _check(options: HostOptions) -> None:
    address, number, process = options.coordinator_address, options.num_processes, options.process_id
    if not address and number is None and process is None:
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or number is None or process is None or not 0 <= process < number:
        raise UsageError(
            "give all of coordinator_address, such as 10.0.0.1:8476, num_processes, and process_id, from 0 to "
            "num_processes - 1, or only distributed"
        )


def check_alone(what: str) -> None:
    """Refuses to run on several hosts.

    Args:
      what: The name of the tasks that run on only one host, in the plural, for the message.

    Raises:
      UsageError: There are several hosts.
    """
    if count() > 1:
        raise UsageError(f"{what} run on one host, and there are {count()}: leave out --distributed")


# ---- what they tell each other


def share_out(name: str, items: Sequence[Any], compute: Callable[[Any], Value]) -> list[Value]:
    """Computes a value from each item, with the items shared out among the hosts. All hosts must call this.

    Args:
      name: The name of the values, for messages.
      items: The items, the same on all hosts.
      compute: Computes the value of one item.

    Returns:
      The values of all items, in order.
    """
    shares = gather(name, [compute(item) for item in items[index() :: count()]])
    return [shares[number % count()][number // count()] for number in range(len(items))]


def gather(what: str, value: Value) -> list[Value]:
    """Returns the value of each host, in the order of hosts. All hosts must make the same calls in the same order.

    This waits for the other hosts, but not for devices. Values are pickled, and every host reads all values.

    Args:
      what: The name of the value, for the message of a host that waits long for it.
      value: The value of this host.
    """
    if count() == 1:
        return [value]
    number, client = next(_numbers), _client()
    client.key_value_set_bytes(f"{_ROUNDS}/{number}/{index()}", pickle.dumps(value))
    values = [value if host == index() else _value_of(what, number, host) for host in range(count())]
    # Every host that takes part in this round has read all values of the previous round.
    client.key_value_delete(f"{_ROUNDS}/{number - 1}/{index()}")
    return values


def first_says(what: str, value: Value) -> Value:
    """Returns the value of host 0 on all hosts."""
    return gather(what, value if is_first() else None)[0]  # type: ignore[return-value]


def check_same(named: Mapping[str, Any]) -> None:
    """Refuses to run if the options or files of this host differ from those of host 0.

    Args:
      named: The values that must be equal on all hosts, by name.

    Raises:
      UsageError: Some values differ; the message names them.
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
                raise UsageError(f"host 0 cannot be reached any more ({reason_of(error)}): see its messages") from None
        if attempt == _LONG_WAITS:
            _note(f"has waited {attempt * _WAIT_SECONDS} s for host {host}: {what}")
    raise AssertionError


_numbers = itertools.count()


def _client() -> Any:
    """Returns the client of the coordinator, through Orbax because JAX has no public name for it."""
    import orbax.checkpoint as ocp

    return ocp.multihost.get_jax_distributed_client()


def whole(tree: Any) -> Any:
    """Gathers arrays that are spread over hosts into NumPy arrays on every host. Other leaves are returned unchanged.
    This waits for the devices, and all hosts must call it."""

    def gather_array(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
            return x
        return multihost_utils.process_allgather(x, tiled=True)

    return jax.tree.map(gather_array, tree)


# ---- hosts that fail


def leave(reason: str, code: int) -> NoReturn:
    """Exits, and tells the other hosts why, so that they exit too instead of waiting forever.

    Args:
      reason: A sentence, which this host has printed already.
      code: The exit status.
    """
    _over.set()
    if count() > 1:
        with suppress(jax.errors.JaxRuntimeError):  # another host has failed already, or the coordinator is gone
            _client().key_value_set(_FAILED, json.dumps([index(), reason, code]))
    _end(code)


def _watch(say: Callable[[str], None]) -> None:
    """Exits when another host has failed. This runs in a thread because the main thread may hang in C code."""
    while not _over.wait(_LOOK_SECONDS):
        try:
            host, reason, code = json.loads(_client().key_value_try_get(_FAILED))
        except jax.errors.JaxRuntimeError:  # no host has failed, or the coordinator is gone, and JAX ends this process
            continue
        sentence = f"host {host} has ended: {reason}"
        # --resume does not help after a usage error, which would occur again; the run may not even have started.
        say(sentence if code == _REFUSED else f"{sentence}; add --resume to continue the run")
        _end(code)


def _end(code: int) -> NoReturn:
    """Exits at once, since a normal exit of JAX would wait for the other hosts."""
    flush_output()
    if is_first() and count() > 1:  # the coordinator ends with host 0, so the other hosts must read the failure first
        time.sleep(3 * _LOOK_SECONDS)
    os._exit(code)
