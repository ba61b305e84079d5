"""Which parameters are trained: a property of their tree, whatever the method.

Parameters are those of one model, or a dict of models by their role: "policy", and perhaps "critic" and "teacher".
"""

from typing import Any

from grpo_jax.models.heads import Headed
from grpo_jax.models.params import Adapted, Params

FROZEN_ROLES = ("teacher",)


def split(params: Any) -> tuple[Any, Any]:
    """Splits parameters into those that are trained and those that are not.

    Adapters are trained and their base is not. A head is always trained, and a teacher never. All else is trained.

    Args:
      params: of one model, plain, `lora.Adapted` or `heads.Headed`; or a dict of models by role.

    Returns:
      The trained tree and the frozen one, which is None where everything is trained. `join` puts them together again.
    """
    if isinstance(params, Adapted):
        return params.adapters, (params.base, params.scale)
    if isinstance(params, Headed):
        trained, frozen = split(params.decoder)
        return params._replace(decoder=trained), frozen
    if not has_roles(params):
        return params, None
    parts = {role: (None, model) if role in FROZEN_ROLES else split(model) for role, model in params.items()}
    trained = {role: part for role, (part, _) in parts.items() if role not in FROZEN_ROLES}
    return trained, {role: part for role, (_, part) in parts.items()}


def join(trained: Any, frozen: Any) -> Any:
    """Returns the parameters that `split` took apart."""
    if isinstance(trained, Headed):
        return trained._replace(decoder=join(trained.decoder, frozen))
    if has_roles(frozen):
        return {role: part if role in FROZEN_ROLES else join(trained[role], part) for role, part in frozen.items()}
    return trained if frozen is None else Adapted(frozen[0], trained, frozen[1])


def has_roles(params: Params | Any) -> bool:
    """Returns whether parameters are a dict of models by role."""
    return isinstance(params, dict) and "policy" in params
