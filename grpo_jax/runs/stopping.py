"""Signals that ask a run to stop: it ends its step, saves, and says how to go on.

SIGTERM is what a scheduler sends before it takes the machine away, SIGINT is Ctrl-C. Outside of training there is
nothing to save, and both end the process at once; so does a second Ctrl-C. A thread hears them. Python's own handlers
wait until the main thread is back from C code, which may be a compilation of minutes; and an exception that a handler
raises is lost where it meets a callback of C code, such as JAX's of the garbage collector.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from grpo_jax import hosts

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_asked: list[int] = []  # the signals heard during training
_training: list[None] = []  # one entry for each block of `between_steps` that is open


class Stopped(Exception):
    """A run was asked to stop, and has saved what it needs to go on."""

    def __init__(self, number: int) -> None:
        """`number` is that of the signal."""
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def between_steps() -> Iterator[Callable[[], bool]]:
    """A block of training, which stops between two steps.

    Yields:
      Whether to save and to leave the block: the same on all hosts, each of which asks after every step.

    Raises:
      Stopped: at the end of the block, if it was asked to stop.
    """
    _training.append(None)

    def asked() -> bool:
        heard = [number for number in hosts.gather("whether to stop", _asked[0] if _asked else 0) if number]
        if heard and not _asked:
            _asked.append(heard[0])
        return bool(heard)

    try:
        yield asked
    finally:
        _training.pop()
    if _asked:
        raise Stopped(_asked[0])


@contextmanager
def listening(say: Callable[[str], None], leave: Callable[[int], None]) -> Iterator[None]:
    """A block that signals end at once, or when training has saved.

    Args:
      say: tells the user that the run will stop.
      leave: (number of the signal) ends the process.
    """
    if threading.current_thread() is not threading.main_thread():  # Python sets handlers in no other
        yield
        return
    heard, wake = os.pipe()
    os.set_blocking(wake, False)
    before = {number: signal.signal(number, _ignore) for number in _SIGNALS}
    known = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    thread = threading.Thread(target=_hear, args=(heard, say, leave), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(known)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(wake)
        thread.join()
        os.close(heard)
        _asked.clear()


def _hear(heard: int, say: Callable[[str], None], leave: Callable[[int], None]) -> None:
    while number := int.from_bytes(os.read(heard, 1)):
        if number not in _SIGNALS:
            continue
        if not _training or (_asked and number == signal.SIGINT):
            leave(number)
        elif not _asked:
            _asked.append(number)
            say(f"{signal.Signals(number).name}: the run stops when this step is done and saved; Ctrl-C ends it now")


def _ignore(number: int, frame: object) -> None:
    """So that Python writes the signal to the thread, and does nothing else."""


def _forget() -> None:
    """In a fork signals have their usual effect again: it is not the run that they ask to stop."""
    for number in _SIGNALS:
        if signal.getsignal(number) is _ignore:
            signal.set_wakeup_fd(-1)
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)


os.register_at_fork(after_in_child=_forget)
