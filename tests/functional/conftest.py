"""Strict JAX for these tests: no function may promote a rank or a dtype silently."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from tiny import slow_unless


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def _shard_map(function):
    mesh, spec = Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data")
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec))


SPREAD = {
    "vmap": lambda function: jax.jit(jax.vmap(function, axis_name="data")),
    "pmap": lambda function: jax.pmap(function, axis_name="data"),
    "shard_map": _shard_map,
}


@pytest.fixture(params=slow_unless(("shard_map",), SPREAD))
def spread(request):
    """Runs a function of arrays [8, ...] with the mapped axis "data", one part on each of eight devices."""
    return SPREAD[request.param]
