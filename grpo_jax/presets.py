"""Presets that are not published: an `Objective` of the user's, from a file or as a value."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.data.types import hash_values, sources_of
from grpo_jax.errors import UsageError
from grpo_jax.functional import PRESETS, Objective, check
from grpo_jax.options import check_types, suggestion
from grpo_jax.rewards.worker import look_up_once, one_line

_OWN = "Objective "  # begins the names of presets that were passed as values


class OwnPreset(str):
    """The name of an `Objective` that was passed as a value. It depends on the numbers and the source."""

    objective: Objective

    @classmethod
    def of(cls, preset: Objective) -> "OwnPreset":
        """Names an `Objective` by its numbers and the source of its functions."""
        _check_fields(preset, "the Objective")
        sources = [source for field in preset if callable(field) for source in sources_of(field)]
        flags = [field for field in preset if isinstance(field, bool | int | float)]
        name = cls(f"{_OWN}{hash_values(preset.numbers, flags, sources)[:12]}")
        name.objective = preset
        return name

    def __deepcopy__(self, memo: Any) -> "OwnPreset":
        return self


def own_preset(name: str) -> Objective:
    """Returns a preset that is not published.

    Args:
      name: "file.py:NAME" or "module:NAME" for an `Objective`, or a name that `OwnPreset.of` made.

    Raises:
      UsageError: There is no such preset. The message lists the closest names, or says why it cannot be loaded.
    """
    if isinstance(name, OwnPreset):
        return name.objective
    if str(name).startswith(_OWN):
        raise UsageError(f"the run began with an Objective as preset ({name}): pass it again")
    if ":" in str(name):
        return _load(name)
    if str(name).endswith(".py"):
        raise UsageError(f"the preset {name} is a file: name the Objective in it, as {name}:NAME")
    raise UsageError(f"there is no preset {name}: {suggestion(name, PRESETS)}")


def _load(name: str) -> Objective:
    """Loads an `Objective` from a file or a module."""
    objective = look_up_once("preset", name)
    if not isinstance(objective, Objective):
        raise UsageError(f"the preset {name!r} is of type {type(objective).__name__}: it must be an Objective")
    _check_fields(objective, f"the preset {name}")
    return objective


def _check_fields(objective: Objective, name: str) -> None:
    """Raises if a field has another type, or if the term does not take its constants."""
    try:
        check_types(Objective, objective._asdict())
        len(objective.numbers)  # binds the constants
    except (UsageError, TypeError, ValueError) as error:
        raise UsageError(f"{name} cannot be used: {error}") from None


def check_objective(objective: Objective, group_size: int) -> Iterator[str]:
    """Yields the reason why an objective makes no sense or cannot be computed, if there is one."""

    def compute(x: jax.Array) -> Any:
        check(objective, group_size=group_size)
        mask, in_loss = jnp.ones(x.shape, bool), objective._replace(kl_in_reward=False)
        advantages = objective.compute_advantages(x[..., 0], mask, where=mask[..., 0], penalty=x)
        return in_loss.loss(x, x, advantages, mask, ref_logprobs=x if objective.has_reference else None, entropy=x)

    try:
        jax.eval_shape(compute, jax.ShapeDtypeStruct((2, group_size, 3), jnp.float32))
    except Exception as error:  # a user's function may raise any type of error
        yield one_line(error)
