"""Dynamic sampling: other prompts in place of those whose completions all earn the same (DAPO, 2503.14476, eq. 11).

Such a group has advantages of 0: it costs what another does and teaches nothing. Every draw has the shape of all
others, so that nothing is compiled again. Step and number of a draw decide its prompts and its noise, so a resumed run
needs to know nothing but its step.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.devices import Devices, size, spread_over, to_devices
from grpo_jax.rl.rollout import Outcomes, zero_spread
from grpo_jax.rl.state import Batch


class Sampled(NamedTuple):
    """What a step sampled, and what of it it learns from."""

    rollout: Outcomes  # of N groups to learn from
    batch: Batch  # those groups, on the devices
    everything: Outcomes  # of N groups of each draw, in the order of sampling
    draws: int


def sample_with_spread(
    draw: Callable[[int], tuple[Outcomes, Batch]], *, max_rollouts: int, metric: str = "", devices: Devices = 1
) -> Sampled:
    """Draws until N groups have spread, or there were `max_rollouts`; groups without spread then fill up.

    The first N groups with spread are taken, as if prompts had come one by one. Groups that are left over are
    not kept for the next step, whose policy is another.

    Args:
      draw: number of a draw within the step, from 0 -> N groups, on the host and on the devices.
      max_rollouts: draws at most, at least 1; 1 takes the groups as they come.
      metric: component whose spread counts; "": the weighted sum. With a length penalty in the sum, nearly every
        group has some spread.
      devices: that groups are spread over.

    Returns:
      What was sampled.
    """
    rollout, batch = draw(0)
    rollouts, batches, spread = [rollout], [batch], ~zero_spread(rollout, metric)
    wanted = len(rollout.rewards)
    while spread.sum() < wanted and len(rollouts) < max_rollouts:
        rollout, batch = draw(len(rollouts))
        rollouts.append(rollout)
        batches.append(batch)
        spread = np.concatenate([spread, ~zero_spread(rollout, metric)])
    if len(rollouts) == 1:
        return Sampled(rollouts[0], batches[0], rollouts[0], 1)
    everything = concatenate(rollouts)
    kept = np.sort(np.argsort(~spread, stable=True)[:wanted])
    return Sampled(select(everything, kept), select_on_devices(batches, kept, devices), everything, len(rollouts))


def select_on_devices(batches: list[Batch], groups: np.ndarray, devices: Devices = 1) -> Batch:
    """N groups of several batches of N, by their numbers. One program, however many batches there are.

    Args:
      batches: of the draws.
      groups: int `[N]`, ascending, counted over all batches.
      devices: that groups are spread over.
    """
    size = len(groups)
    chosen = batches[0]
    for number, batch in enumerate(batches):
        # Places that this batch fills get its groups, counted behind those that were chosen before.
        own = groups // size == number
        source = np.where(own, size + groups % size, np.arange(size)).astype(np.int32)
        chosen = _choose(chosen, batch, to_devices(source, devices, axes=None), devices=devices)
    return chosen


@partial(jax.jit, static_argnames="devices")
def _choose(chosen: Batch, batch: Batch, source: jax.Array, *, devices: Devices) -> Batch:
    """Places of both batches, one behind the other, spread over devices as they were."""
    picked = jax.tree.map(lambda one, other: jnp.concatenate([one, other])[source], chosen, batch)
    return spread_over(picked, devices) if size(devices) > 1 else picked


def concatenate(rollouts: list[Outcomes]) -> Outcomes:
    """The groups of several rollouts together."""

    def join(*parts):
        if isinstance(parts[0], float):
            return parts[0]  # a weight, the same in all
        return [item for part in parts for item in part] if isinstance(parts[0], list) else np.concatenate(parts)

    return jax.tree.map(join, *rollouts, is_leaf=_is_list)


def select(rollout: Outcomes, groups: np.ndarray) -> Outcomes:
    """Some groups of a rollout, by their numbers."""

    def take(part):
        if isinstance(part, float):
            return part
        return [part[i] for i in groups] if isinstance(part, list) else part[groups]

    return jax.tree.map(take, rollout, is_leaf=_is_list)


def _is_list(part) -> bool:
    return isinstance(part, list)
