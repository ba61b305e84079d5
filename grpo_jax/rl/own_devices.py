"""Sampling on devices of its own: copies of the policy, and the way of its rollouts back to the devices that train.

Arrays never pass through the memory of the host, and only the trainer's devices exchange anything with other hosts.

Parameters move in three steps. The trainer's devices arrange them in parts that both sides can hold, and each host then
has all parts. Each device of the sampler copies its part from a device of its host. Last, the sampler's devices arrange
the parts in the layout of their programs. The first and the last step are programs, and a layout that is right already
needs none. Adapters move alone, since their base is copied only once.

Rollouts move in two steps, because a program of the trainer's devices that waited for a rollout would also delay the
programs after it. The sampler's devices cut a rollout into the parts of the trainer's devices, which copy them.
"""

import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from grpo_jax.devices import (
    Devices,
    Mesh,
    cut_of,
    jit_on_devices,
    local_devices,
    local_rows,
    num_hosts,
    parts,
    shardings,
    size,
    to_devices,
)
from grpo_jax.models.transformer import Params
from grpo_jax.rl.source import Sampler
from grpo_jax.sampling.sampler import Completions


def on_own_devices(sampler: Sampler, devices: Devices) -> Sampler:
    """Returns a sampler that takes the policy from other devices, and moves rollouts to them.

    Args:
      sampler: Samples completions on devices of this host, each host those of its own groups.
      devices: The devices that train. Parameters, prompts and rollouts lie on them.
    """
    take, give = make_take(devices, sampler.devices), make_give(sampler.devices, devices)

    def draw(params, prompts, numbers, temperature, noise) -> Completions:
        rows = to_devices(local_rows((prompts.tokens, numbers, temperature)), sampler.devices)
        return give(sampler.draw(params, prompts._replace(tokens=rows[0]), *rows[1:], noise))

    counts = size(sampler.devices), size(devices) // num_hosts(devices)
    return sampler._replace(draw=draw, devices=devices, take=take, at_once=1, balance=partial(balance, *counts))


def balance(sampling: int, training: int, trainer: float, sampler: float) -> str:
    """Returns a sentence about who waited, and with how many devices of a host that sample nobody would have.

    Args:
      sampling: The number of devices that sampled.
      training: The number of devices that trained.
      trainer: The share of a step for which the trainer waited.
      sampler: The share of a step for which the sampler waited.
    """
    worked = sampling * (1 - sampler), training * (1 - trainer)
    count = sampling + training
    balanced = min(max(round(count * worked[0] / max(sum(worked), 1e-9)), 1), count - 1)
    return (
        f"the trainer waited for {trainer:.0%} of a step, and the sampler for {sampler:.0%}: about {balanced} "
        f"sampler_devices of {count}, where there are {sampling}, would have balanced both"
    )


# ---- parameters


class Route(NamedTuple):
    """The layouts in which parameters leave the trainer's devices and arrive at the sampler's."""

    leaves: Devices  # the trainer's devices
    arrives: Devices  # the sampler's devices
    packs: bool  # true if the trainer's layout is another
    unpacks: bool  # true if the sampler's layout is another


def route_of(training: Devices, sampling: Devices) -> Route:
    """Returns the route of parameters: in the trainer's parts if a host's devices of both sides can hold these, else
    each parameter in as many parts as both can hold."""
    most = math.gcd(size(training) // num_hosts(training), size(sampling))
    cut = cut_of(training) if most % math.prod(cut_of(training)) == 0 else (most, 1)

    def layout(devices: Devices) -> Devices:
        return Devices(devices.all, Mesh(size(devices) // math.prod(cut), *cut))

    return Route(layout(training), layout(sampling), cut_of(training) != cut, cut_of(sampling) != cut)


def make_packing(training: Devices, sampling: Devices) -> tuple[Callable[[Params], Params], Callable[[Params], Params]]:
    """Makes the programs of the first and the last step of the route, which change only layouts."""

    def unchanged(params: Params) -> Params:
        return params

    route = route_of(training, sampling)
    pack = jit_on_devices(unchanged, devices=route.leaves) if route.packs else unchanged
    return pack, jit_on_devices(unchanged, devices=sampling) if route.unpacks else unchanged


def make_take(training: Devices, sampling: Devices) -> Callable[[Params], Params]:
    """Makes the function that dispatches a copy of the policy for the sampler, without waiting for it.

    Parameters that were copied at the last call are not copied again.
    """
    route, (pack, unpack) = route_of(training, sampling), make_packing(training, sampling)
    here = Devices(local_devices(training), _of_one_host(route.leaves))
    known: list[tuple[Any, Any]] = []  # (weak reference to a parameter, its copy)

    def copy(params: Params) -> Params:
        packed = _relabelled(pack(params), here)
        arrived = jax.device_put(packed, shardings(packed, route.arrives))
        return _relabelled(unpack(arrived), sampling)

    def take(params: Params) -> Params:
        leaves, structure = jax.tree.flatten(params)
        before = known if len(known) == len(leaves) else [(lambda: None, None)] * len(leaves)
        copies = [copied if source() is x else None for x, (source, copied) in zip(leaves, before, strict=True)]
        del before
        known.clear()  # the last copy is freed once nothing samples from it
        changed = jax.tree.unflatten(
            structure, [x if copied is None else None for x, copied in zip(leaves, copies, strict=True)]
        )
        moved = iter(jax.tree.leaves(copy(changed)))
        copies = [next(moved) if copied is None else copied for copied in copies]
        known.extend((weakref.ref(x), copied) for x, copied in zip(leaves, copies, strict=True))
        return jax.tree.unflatten(structure, copies)

    return take


def _of_one_host(devices: Devices) -> Mesh:
    """Returns the part of a mesh that is of one host, each of which holds all parameters."""
    assert devices.mesh is not None
    return devices.mesh._replace(data=devices.mesh.data // num_hosts(devices))


def _relabelled(params: Params, devices: Devices) -> Params:
    """Returns the parts on this host's devices as arrays on only these."""

    def relabel(x: jax.Array, target: jax.sharding.Sharding) -> jax.Array:
        return jax.make_array_from_single_device_arrays(x.shape, target, [part.data for part in x.addressable_shards])

    return jax.tree.map(relabel, params, shardings(params, devices))


# ---- rollouts


def make_give(sampling: Devices, training: Devices) -> Callable[[Any], Any]:
    """Makes the function that moves the rows of this host, arrays `[n, ...]`, to the trainer's devices, on which they
    are a part of the rows of all hosts."""
    targets, count = local_devices(training), num_hosts(training)
    number = parts(training) // count

    def cut(rows: Any) -> list[Any]:
        def part(x: jax.Array, place: int) -> jax.Array:
            return x.reshape(number, -1, *x.shape[1:])[place]

        return [jax.tree.map(lambda x, place=place: part(x, place), rows) for place in range(number)]

    program = jit_on_devices(cut, devices=sampling)

    def give(rows: Any) -> Any:
        cut_rows, copied = program(rows), []
        for place, device in enumerate(targets):
            part = cut_rows[place * number // len(targets)]
            nearest = jax.tree.map(lambda x, place=place: x.addressable_shards[place % size(sampling)].data, part)
            copied.append(jax.device_put(nearest, device))
        whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0] * count, *x.shape[1:]), x.dtype), rows)

        def join(x: Any, target: jax.sharding.Sharding, *shards: jax.Array) -> jax.Array:
            return jax.make_array_from_single_device_arrays(x.shape, target, list(shards))

        return jax.tree.map(join, whole, shardings(whole, training, 0), *copied)

    return give
