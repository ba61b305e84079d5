"""A profile of some iterations: what devices and host do at each moment."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

# Programs are compiled in the first iteration of a call, and the second may read what the first left behind.
_UNPROFILED = 2


@contextmanager
def profiling(folder: Path, begin: int, steps: int) -> Iterator[Callable[[int], None]]:
    """Records some steps of a loop by JAX's profiler. Call what this yields when a step begins.

    `plugins/profile/…/perfetto_trace.json.gz` in the folder opens in ui.perfetto.dev, the rest in XProf.

    Args:
      folder: for the profile; one of earlier steps stays beside it.
      begin: the first step of the loop, numbered from 0. Recording begins two steps later.
      steps: how many are recorded; 0: none.
    """
    first, recording = begin + _UNPROFILED, False

    def at_step(step: int) -> None:
        nonlocal recording
        if steps and step == first:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # calls of Python would be most of the profile
            jax.profiler.start_trace(folder, create_perfetto_trace=True, profiler_options=options)
            recording = True
        elif recording and step == first + steps:
            jax.profiler.stop_trace()
            recording = False

    try:
        yield at_step
    finally:
        if recording:
            jax.profiler.stop_trace()
