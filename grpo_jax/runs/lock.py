"""One process at a time writes to the folder of a run."""

import contextlib
import fcntl
import os
import socket
import weakref
from pathlib import Path

from grpo_jax.errors import UsageError

_FILE = "lock"


class Lock:
    """Holds a folder until it is collected, or its process ends, however it ends. See `hold`."""

    def __init__(self, folder: Path) -> None:
        file = (folder / _FILE).open("a+", encoding="utf-8")
        self._release = weakref.finalize(self, file.close)
        with contextlib.suppress(OSError):  # some network file systems have no locks
            try:
                # Of the process: a fork does not inherit it, and the system releases it.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                file.seek(0)
                holder = file.read().strip() or "another process"
                self._release()
                raise UsageError(
                    f"{holder} is writing to the run in {folder}: wait for its end, or end it, to go on with this run"
                ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()


_held: "weakref.WeakValueDictionary[Path, Lock]" = weakref.WeakValueDictionary()


def hold(folder: Path) -> Lock:
    """The lock of a folder, which this process may hold already.

    Raises:
      UsageError: another process holds it; the sentence says which, and on which host.
    """
    folder = folder.resolve()
    lock = _held.get(folder)
    if lock is None:
        lock = _held[folder] = Lock(folder)
    return lock
