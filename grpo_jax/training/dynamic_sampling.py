"""Dynamic sampling: other prompts in place of those whose completions all earn the same (DAPO, 2503.14476, eq. 11).

Such a group has advantages of 0: it costs what another does and teaches nothing. Every rollout has the shape of all
others, so that nothing is compiled again, and step and number of a rollout decide its prompts and its noise, so that
nothing but the step need be known to go on.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from grpo_jax.training.rollout import Rollout, zero_spread


class Sampled(NamedTuple):
    """What a step sampled, and what of it it learns from."""

    rollout: Rollout  # N groups to learn from
    everything: Rollout  # N groups of each rollout, in the order of sampling
    rollouts: int


def sample_with_spread(draw: Callable[[int], Rollout], *, max_rollouts: int, metric: str = "") -> Sampled:
    """Rollouts until N groups have spread, or there were `max_rollouts`; groups without spread then fill up.

    The first N groups with spread are taken, as if prompts had come one by one. Groups that are left over are
    not kept for the next step, whose policy is another.

    Args:
      draw: number of a rollout within the step, from 0 -> N groups.
      max_rollouts: at least 1; 1 takes the groups as they come.
      metric: component whose spread counts; "": the weighted sum. With a length penalty in the sum, nearly every
        group has some spread.

    Returns:
      What was sampled.
    """
    rollouts = [draw(0)]
    wanted = len(rollouts[0].texts)
    spread = ~zero_spread(rollouts[0], metric)
    while spread.sum() < wanted and len(rollouts) < max_rollouts:
        rollouts.append(draw(len(rollouts)))
        spread = np.concatenate([spread, ~zero_spread(rollouts[-1], metric)])
    if len(rollouts) == 1:
        return Sampled(rollouts[0], rollouts[0], 1)
    everything = concatenate(rollouts)
    first = np.argsort(~spread, stable=True)[:wanted]
    return Sampled(select(everything, np.sort(first)), everything, len(rollouts))


def concatenate(rollouts: list[Rollout]) -> Rollout:
    """The groups of several rollouts as one rollout."""

    def join(*parts):
        if isinstance(parts[0], float):
            return parts[0]  # a weight, the same in all
        return [item for part in parts for item in part] if isinstance(parts[0], list) else np.concatenate(parts)

    return jax.tree.map(join, *rollouts, is_leaf=_is_list)


def select(rollout: Rollout, groups: np.ndarray) -> Rollout:
    """Some groups of a rollout, by their numbers."""

    def take(part):
        if isinstance(part, float):
            return part
        return [part[i] for i in groups] if isinstance(part, list) else part[groups]

    return jax.tree.map(take, rollout, is_leaf=_is_list)


def _is_list(part) -> bool:
    return isinstance(part, list)
