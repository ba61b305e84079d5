"""Sampling on devices of its own: copies of the policy, and the way of its rollouts back to the devices that train.

Arrays never pass through the memory of the host, and only the trainer's devices exchange anything with other hosts.

Parameters move one by one. Each device of the sampler copies the pieces of its part from the devices of its host that
train. Where the parts of both sides differ, the trainer's devices first cut theirs into such pieces, and the sampler's
devices join them. If no host has all of a parameter, the trainer's devices gather it before. With adapters only these
move, since their base is copied once.

Rollouts move in two steps, because a program of the trainer's devices that waited for a rollout would also delay the
programs after it. The sampler's devices cut a rollout into the parts of the trainer's devices, which copy them.
"""

import math
import operator
import weakref
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding

from grpo_jax.data.prompts import Prompts
from grpo_jax.devices import (
    Devices,
    cut_of,
    jit_on_devices,
    local_devices,
    local_numbers,
    local_rows,
    num_hosts,
    num_shards,
    shardings,
    size,
    to_devices,
)
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.params import sharding
from grpo_jax.rl.source import Sampler
from grpo_jax.sampling.sampler import Completions


def on_own_devices(sampler: Sampler, devices: Devices) -> Sampler:
    """Returns a sampler that takes the policy from other devices, and moves rollouts to them.

    Args:
      sampler: Samples completions on devices of this host, each host those of its own groups.
      devices: The devices that train. Parameters, prompts and rollouts lie on them.
    """
    take, give = make_take(devices, sampler.devices), make_give(sampler.devices, devices)

    def draw(params: Params, prompts: Prompts, numbers: Any, temperature: Any, noise: np.ndarray) -> Completions:
        tokens, *rows = to_devices(local_rows((prompts.tokens, numbers, temperature)), sampler.devices)
        examples = [prompts.examples[number] for number in local_numbers(devices, len(numbers))]
        sampled = sampler.draw(params, prompts._replace(tokens=tokens, examples=examples), *rows, noise)
        completions: Completions = give(sampled)
        return completions

    counts = size(sampler.devices), size(devices) // num_hosts(devices)
    return sampler._replace(draw=draw, devices=devices, take=take, at_once=1, balance=partial(balance_devices, *counts))


def balance_devices(sampling: int, training: int, trainer: float, sampler: float) -> str:
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

IN_FLIGHT = 2**28  # bytes of parameters on their way that are in memory at once, beside the largest of them


class Way(NamedTuple):
    """The way of a parameter, as shapes. Its parts on the trainer's devices are cut into pieces, which the sampler's
    devices join to parts of their own."""

    source: tuple[int, ...]  # the shape of a part on the trainer's devices
    piece: tuple[int, ...]  # the shape of a piece
    target: tuple[int, ...]  # the shape of a part on the sampler's devices
    gathers: bool  # true if the trainer's devices gather the parameter first, since no host has all of it

    @property
    def cuts(self) -> tuple[int, ...]:
        """The number of pieces of a part on the trainer's devices, along each axis."""
        return tuple(map(operator.floordiv, self.source, self.piece))

    @property
    def joins(self) -> tuple[int, ...]:
        """The number of pieces of a part on the sampler's devices, along each axis."""
        return tuple(map(operator.floordiv, self.target, self.piece))

    @property
    def sizes(self) -> tuple[int, int]:
        """The elements that a copy takes on its way, on a device of the trainer and on one of the sampler."""
        source, piece, target = map(math.prod, self[:3])
        return (source if self.gathers or piece < source else 0), (target if piece < target else 0)


def way_of(shape: tuple[int, ...], source: tuple[int, ...], target: tuple[int, ...], gathers: bool) -> Way:
    """Returns the way of a parameter.

    Args:
      shape: The shape of the parameter.
      source: The shape of a part on the trainer's devices.
      target: The shape of a part on the sampler's devices.
      gathers: True if no host has all parts.
    """
    source = shape if gathers else source
    return Way(source, tuple(map(math.gcd, source, target)), target, gathers)


def needs_gather(training: Devices) -> bool:
    """Returns whether no host has all parts of the parameters."""
    return math.prod(cut_of(training)) > size(training) // num_hosts(training)


def moving_bytes(params: Params, training: Devices, sampling: Devices) -> tuple[int, int]:
    """Returns the bytes that a copy on its way takes on a device of the trainer and on one of the sampler.

    Args:
      params: The shapes of the parameters.
      training: The devices of the trainer.
      sampling: The devices of the sampler.
    """

    def parts_on(devices: Devices) -> list[tuple[int, ...]]:
        mesh = AbstractMesh((1, *cut_of(devices)), sharding.AXES)
        specs = jax.tree.leaves(sharding.specs(params, mesh.shape))
        return [NamedSharding(mesh, spec).shard_shape(x.shape) for x, spec in zip(leaves, specs, strict=True)]

    def at_once(sizes: Iterable[int]) -> int:
        known: list[int] = [x.dtype.itemsize * elements for x, elements in zip(leaves, sizes, strict=True)]
        return min(sum(known), IN_FLIGHT + max(known, default=0))

    leaves, gathers = jax.tree.leaves(params), needs_gather(training)
    parts = zip(leaves, parts_on(training), parts_on(sampling), strict=True)
    sizes = [way_of(x.shape, source, target, gathers).sizes for x, source, target in parts]
    return at_once(trainer for trainer, _ in sizes), at_once(sampler for _, sampler in sizes)


def make_take(training: Devices, sampling: Devices) -> Callable[[Params], Params]:
    """Makes the function that dispatches a copy of the policy for the sampler.

    Parameters that were copied at the last call are not copied again. The function waits only where more than
    `IN_FLIGHT` bytes would be on their way at once.
    """
    gathers, known = needs_gather(training), list[tuple[Any, Any]]()  # weak references to parameters, and their copies

    def take(params: Params) -> Params:
        leaves, structure = jax.tree.flatten(params)
        before = known if len(known) == len(leaves) else [(lambda: None, None)] * len(leaves)
        copies = [copied if source() is x else None for x, (source, copied) in zip(leaves, before, strict=True)]
        known.clear()  # the last copy is freed once nothing samples from it
        in_flight = 0
        for number, target in enumerate(jax.tree.leaves(shardings(params, sampling))):
            x = leaves[number]
            if copies[number] is None:
                parts = x.sharding.shard_shape(x.shape), target.shard_shape(x.shape)
                way = way_of(x.shape, *parts, gathers)
                copies[number] = copy(x, way, target)
                in_flight += x.dtype.itemsize * max(way.sizes)
                if in_flight > IN_FLIGHT:
                    jax.block_until_ready(copies[number])
                    in_flight = 0
        known.extend((weakref.ref(x), copied) for x, copied in zip(leaves, copies, strict=True))
        return jax.tree.unflatten(structure, copies)

    return take


def copy(x: jax.Array, way: Way, target: Sharding) -> jax.Array:
    """Dispatches the copy of a parameter to this host's devices of the sampler.

    Args:
      x: The parameter.
      way: Its way.
      target: The sharding of the copy.
    """
    pieces = make_cut(way, x.sharding)(x) if way.gathers or way.piece != way.source else [x]
    there = dict[tuple[int, ...], list[jax.Array]]()  # place of a piece -> its replicas
    for offset, piece in zip(np.ndindex(way.cuts), pieces, strict=True):
        for shard in piece.addressable_shards:
            place = _place(shard.index, way.piece, way.cuts, offset)
            there.setdefault(place, []).append(shard.data)
    devices = target.addressable_devices_indices_map(x.shape)
    shape, joined = tuple(map(operator.floordiv, x.shape, way.joins)), list[jax.Array]()
    for offset in np.ndindex(way.joins):
        replicas = [there[_place(index, way.target, way.joins, offset)] for index in devices.values()]
        nearest = [each[number % len(each)] for number, each in enumerate(replicas)]
        joined.append(jax.make_array_from_single_device_arrays(shape, target, jax.device_put(nearest, [*devices])))
    return joined[0] if len(joined) == 1 else make_join(way, target)(joined)


def _place(index: Any, part: tuple[int, ...], counts: tuple[int, ...], offset: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the place of a piece among all pieces of a parameter, from the index of the part that it belongs to."""
    rows = zip(index, part, counts, offset, strict=True)
    return tuple((axis.start or 0) // length * count + place for axis, length, count, place in rows)


@cache
def make_cut(way: Way, source: Sharding) -> Callable[[jax.Array], list[jax.Array]]:
    """Makes the program that cuts each part of a parameter into pieces: into arrays with one piece of each part."""

    def cut(part: jax.Array) -> list[jax.Array]:
        starts = (tuple(map(operator.mul, offset, way.piece)) for offset in np.ndindex(way.cuts))
        return [jax.lax.slice(part, start, tuple(map(operator.add, start, way.piece))) for start in starts]

    spread = NamedSharding(source.mesh, PartitionSpec()) if way.gathers else source  # type: ignore[attr-defined]
    return _on_each_device(cut, spread)


@cache
def make_join(way: Way, target: Sharding) -> Callable[[list[jax.Array]], jax.Array]:
    """Makes the program that joins such pieces to the parts of the sampler's devices."""

    def join(pieces: list[jax.Array]) -> jax.Array:
        rest = iter(pieces)

        def joined(axis: int) -> jax.Array:
            """Joins the next pieces along this axis and the axes after it."""
            if axis == len(way.piece):
                return next(rest)
            return jnp.concatenate([joined(axis + 1) for _ in range(way.joins[axis])], axis)

        return joined(0)

    return _on_each_device(join, target)


def _on_each_device(fn: Callable[[Any], Any], spread: Sharding) -> Callable[[Any], Any]:
    """Compiles a function that acts on each device's part of arrays with this sharding."""
    if isinstance(spread, NamedSharding):
        fn = jax.shard_map(fn, mesh=spread.mesh, in_specs=spread.spec, out_specs=spread.spec)
    return jax.jit(fn)


# ---- rollouts


def make_give(sampling: Devices, training: Devices) -> Callable[[Any], Any]:
    """Makes the function that moves the rows of this host, arrays `[n, ...]`, to the trainer's devices, on which they
    are a part of the rows of all hosts."""
    targets, count = local_devices(training), num_hosts(training)
    number = num_shards(training) // count

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
