"""Lines that steps of training make and the runner writes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Skipped(NamedTuple):
    """Optimizer steps whose gradients were not finite."""

    name: str  # of the first one, for its file
    in_a_row: int
    most: int  # skipped steps in a row at which the run stops
    arrays: Callable[[], Mapping[str, Any]]  # the batch, by name


class Line(NamedTuple):
    """Metrics, warnings and groups of a step, to be written."""

    metrics: Mapping[str, Any]  # plain numbers, the same in a rerun; empty: nothing is written
    words: str  # for the progress bar; empty: it stays as it is
    warnings: Mapping[str, str] = {}  # key -> sentence, said once in a run
    groups: Sequence[dict[str, Any]] = ()  # of the rollout, for people to read
    times: Mapping[str, Any] | None = None  # arguments of `RunFolder.log_times`; None: no times are written
    skipped: Skipped | None = None
