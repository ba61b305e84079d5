"""Eight virtual CPU devices for every test, and quick compiles: set before JAX starts.

The default suite is bound by compile time. Level 0 of LLVM leaves the optimisation of the XLA
program as it is, and compiles three times faster; without the newer emitters of fusions it takes half
of that once more, and a program in one piece a quarter of the rest (of jaxlib 0.10: a later one may not
know these flags). What one process has compiled, the others of the same session (workers, and
experiments that tests start) read from a folder.
"""

import contextlib
import ctypes
import functools
import gc
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jaxlib.version import __version_info__ as jaxlib_version

_FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
if jaxlib_version < (0, 11):  # an unknown flag ends the process
    _FLAGS += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}"

_C = ctypes.CDLL(None)
_STATM = Path("/proc/self/statm")
# A worker has about 0.6 GB without programs, and a module adds up to 0.7 GB: two workers stay below 4 GB.
_ENOUGH_BYTES = 1e9

# Scripts that need other libraries; their doctests would be collected.
collect_ignore = ["golden"]

# Workers inherit the variable from the process that starts them.
_is_first = "JAX_COMPILATION_CACHE_DIR" not in os.environ
if _is_first:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="grpo_jax_tests_")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def pytest_unconfigure() -> None:
    if _is_first:
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


# Half a million objects are made while tests are collected, and stay. The garbage collector would walk over all of them
# again and again: a fifth of collection, and a twentieth of the tests.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()
    _share_contexts()


@functools.cache
def _context_of(make, thread: int):
    del thread
    return make()


def _share_contexts() -> None:
    """One MLIR context for all programs that a thread compiles: each takes 6 ms, a third of the smallest program.

    The function is not public. Where a later JAX does not have it, programs get a context each.
    """
    try:
        from jax._src.interpreters import mlir

        make, contexts = mlir.make_ir_context, mlir.ir.Context
    except (ImportError, AttributeError):
        return

    def shared():
        if contexts.current is not None:  # a program that is compiled while another one is lowered
            return make()
        return _context_of(make, threading.get_ident())

    mlir.make_ir_context = shared


def _resident_bytes() -> float:
    """Returns the memory of this process; unknown is infinite."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if _STATM.exists() else float("inf")


@pytest.fixture
def without_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs end with an empty curves.png: a second or two for each. What is drawn has tests of its own."""
    from experiments import plots

    monkeypatch.setattr(plots, "save_curves", lambda run, *_: (run.path / "curves.png").touch())


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts a package with two generators in place of reasoning_gym."""
    from generator_package import FACTORY

    from grpo_jax.data import generators

    folder = tmp_path / "packages/reasoning_gym"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "factory.py").write_text(FACTORY)
    for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(folder.parent)
    caches = generators.generate, generators.open_generator
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()
    for name in ("reasoning_gym", "reasoning_gym.factory"):
        sys.modules.pop(name, None)


@pytest.fixture
def assume() -> Iterator[Callable[..., None]]:
    """Changes traits of the backend for the rest of a test, as `assume(features_first=False)`."""
    from grpo_jax.functional.products import assume_traits

    with contextlib.ExitStack() as stack:
        yield lambda **changes: stack.enter_context(assume_traits(**changes))


@pytest.fixture(scope="module", autouse=True)
def _programs_end_before_they_fill_the_memory() -> Iterator[None]:
    """Compiled programs are most of a worker's memory. What is compiled again is read from the folder."""
    import jax

    yield
    if _resident_bytes() < _ENOUGH_BYTES:
        return
    jax.clear_caches()
    _context_of.cache_clear()
    gc.collect()
    if hasattr(_C, "malloc_trim"):  # what glibc holds back, half a gigabyte after some modules
        _C.malloc_trim(0)


# Doctests are collected from modules, and two modules cannot have one name.
collect_ignore_glob = ["conftest.py", "*/conftest.py"]
