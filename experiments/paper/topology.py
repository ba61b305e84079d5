"""Devices of TPUs that are not there: libtpu compiles for them on any machine, from the name of their topology."""

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import jax
from jax.experimental import topologies

from grpo_jax.errors import UsageError

# libtpu takes a lock on the machine's TPUs and asks Google's cloud about them; for a compiler it need not.
_WITHOUT_TPUS = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "true", "TPU_SKIP_MDS_QUERY": "true"}
_MOST = 2**16


def devices_of_topology(name: str) -> list[jax.Device]:
    """The devices of a topology, such as v5p:2x2x2. Programs can be compiled for them and not run.

    Raises:
      UsageError: libtpu is not installed, or has no such topology, or it is larger than there are.
    """
    sizes = [int(size) for size in re.findall(r"\d{1,9}", name.partition(":")[2])]
    if math.prod(sizes) > _MOST:  # which ends libtpu, and so the process
        raise UsageError(f"topology is {name}: that is more than {_MOST:,} devices, so name a smaller one")
    os.environ |= _WITHOUT_TPUS | os.environ
    try:
        return list(topologies.get_topology_desc(name, platform="tpu").devices)
    except RuntimeError as error:
        words = " ".join(str(error).split())
        raise UsageError(
            f"topology is {name}: install libtpu (grpo_jax[tpu] brings it) and name a topology that it has, such as "
            f"v5p:2x2x2 or v5e:4x4 ({words})"
        ) from None


@contextmanager
def as_if_here(devices: Sequence[jax.Device]) -> Iterator[None]:
    """A block in which JAX names these devices as the machine's own to all that ask it."""
    results = list(devices)
    with mock.patch.multiple(
        jax,
        devices=lambda *_: results,
        local_devices=lambda *_, **__: results,
        device_count=lambda *_: len(results),
        local_device_count=lambda *_: len(results),
        default_backend=lambda: results[0].platform,
    ):
        yield
