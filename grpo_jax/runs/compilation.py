"""Compiled programs: how many there were, and where they are kept for the next start."""

import hashlib
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import filelock
import jax

from grpo_jax.errors import UsageError

CACHE_BYTES = 2 * 2**30  # the programs used least recently are deleted above this size
_LOCK_SECONDS = 10
# JAX times every program that it asks for, also one that it finds in the cache.
_REQUEST_EVENT, _READ_EVENT = "/jax/core/compile/backend_compile_duration", "/jax/compilation_cache/cache_hits"
_seen = {_REQUEST_EVENT: 0, _READ_EVENT: 0}  # events since this module was imported
# A program is written down for the compiler just before it is asked for.
_WRITTEN_EVENT = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_to_call: list[Callable[[], None]] = []


class Programs(NamedTuple):
    """Numbers of programs."""

    compiled: int
    read: int  # from the cache of an earlier start, in place of being compiled


def programs_so_far() -> Programs:
    """The programs of this process."""
    return Programs(_seen[_REQUEST_EVENT] - _seen[_READ_EVENT], _seen[_READ_EVENT])


def count_programs() -> Callable[[], Programs]:
    """Starts to count programs; returns a function that says how many there were since."""
    before = programs_so_far()

    def since() -> Programs:
        now = programs_so_far()
        return Programs(now.compiled - before.compiled, now.read - before.read)

    return since


@contextmanager
def before_programs(say: Callable[[], None]) -> Iterator[None]:
    """Calls `say` once, before the first program of the block is compiled or read; never, if there is none."""
    _to_call.append(say)
    try:
        yield
    finally:
        if say in _to_call:
            _to_call.remove(say)


def in_words(programs: Programs) -> str:
    """For example "3 programs compiled, 6 loaded from the cache"."""
    read = f", {programs.read} loaded from the cache" if programs.read else ""
    return f"{programs.compiled} programs compiled{read}"


def cache_folder() -> Path:
    """The user's folder for compiled programs, one for each kind of processor.

    JAX tells devices apart, but not the processors that its CPU programs are compiled for. A home folder may be shared
    by machines that differ.
    """
    if os.environ.get("XDG_CACHE_HOME"):
        base = Path(os.environ["XDG_CACHE_HOME"])
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path.home() / ".cache"
    return base.absolute() / "grpo_jax" / "jax" / _processor()


def _processor() -> str:
    """A name for processors with the same instructions."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8").splitlines() if information.exists() else []
    described = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(described.encode()).hexdigest()[:8]}"


def use_cache(folder: Path | None = None) -> None:
    """Lets JAX keep compiled programs on disk, and read them at the next start.

    A folder that JAX was told already (JAX_COMPILATION_CACHE_DIR) stays, with its own settings.

    Args:
      folder: where they are kept; None: `cache_folder`.

    Raises:
      UsageError: the folder cannot be written to. JAX then compiles as it does without a cache.
    """
    if jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        return
    try:
        folder = folder or cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _delete_incomplete(folder)
    except (OSError, RuntimeError, NotImplementedError) as error:  # no home folder; no locks
        raise UsageError(f"compiled programs cannot be kept ({error}): set JAX_COMPILATION_CACHE_DIR") from None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # small programs too
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _delete_incomplete(folder: Path) -> None:
    """Deletes programs whose writer was killed before it noted their time of use: JAX stumbles over them for ever.

    It also shows whether the folder can be written to.
    """
    with filelock.FileLock(folder / ".lockfile", timeout=_LOCK_SECONDS):  # the lock of JAX's own cache
        for program in folder.glob("*-cache"):
            if not program.with_name(f"{program.name.removesuffix('-cache')}-atime").exists():
                program.unlink()


def _count(event: str, **_: str | int) -> None:
    if event in _seen:
        _seen[event] += 1


def _count_timed(event: str, duration_secs: float, **_: str | int) -> None:
    _count(event)
    while event == _WRITTEN_EVENT and _to_call:
        _to_call.pop()()


jax.monitoring.register_event_listener(_count)
jax.monitoring.register_event_duration_secs_listener(_count_timed)
