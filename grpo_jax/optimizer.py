"""The optimizer and its learning rate: AdamW, Muon or the user's own."""

from grpo_jax.errors import UsageError, need

need("optax")

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from grpo_jax.config import AdamWConfig, load_optimizer
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.params.tree import PROJECTIONS
from grpo_jax.rewards.worker import one_line


def learning_rate_schedule(options: AdamWConfig, total_steps: int) -> optax.Schedule:
    """Returns a schedule with linear warm-up to the peak, then a constant rate or a decay to 0.

    Args:
      options: The peak, the warm-up and the kind of decay.
      total_steps: The number of optimizer steps after which the decay ends.

    Returns:
      A function from the number of optimizer steps taken to the learning rate of the next step.
    """
    learning_rate, warmup_steps = options.learning_rate, options.warmup_steps
    falling = max(total_steps - warmup_steps, 1)
    after: optax.Schedule = {
        "none": optax.constant_schedule(learning_rate),
        "linear": optax.linear_schedule(learning_rate, 0.0, falling),
        "cosine": optax.cosine_decay_schedule(learning_rate, falling),
    }[options.decay]
    rising = optax.linear_schedule(0.0, learning_rate, warmup_steps)
    return optax.join_schedules([rising, after], [warmup_steps]) if warmup_steps else after


def make_optimizer(
    learning_rate: float | optax.Schedule,
    *,
    weight_decay: float = 0.0,
    max_grad_norm: float = 1.0,
    adam_epsilon: float = 1e-8,
    optimizer: Any = "adamw",
) -> optax.GradientTransformation:
    """Makes AdamW (1711.05101) or Muon, with gradients clipped by their global norm, or your own optimizer.

    Muon (2502.16982) is `optax.contrib.muon` with updates as large as those of AdamW. It trains the matrices of
    `muon_matrices`. Everything else has AdamW with Nesterov momentum, and no weight decay.

    Args:
      learning_rate: A learning rate, or a schedule.
      weight_decay: Weight decay of matrices. Default: 0. It does not apply to norms and biases, as in transformers and
        TRL, nor to attention sinks, decay rates of delta nets, and routers of experts, which may be frozen.
      max_grad_norm: The norm above which a gradient is scaled down. Default: 1.
      adam_epsilon: The constant ε of a step m / (√v + ε). Default: 1e-8.
      optimizer: "adamw", "muon", or your own, which reads no other options: an optax transformation, a function from
        the schedule to one, or a text such as file.py:name. Default: "adamw".

    Raises:
      UsageError: There is no such optimizer.
    """
    chosen = load_optimizer(optimizer)
    if chosen == "adamw":
        adamw = optax.adamw(learning_rate, eps=adam_epsilon, weight_decay=weight_decay, mask=has_weight_decay)
        return optax.chain(optax.clip_by_global_norm(max_grad_norm), adamw)
    if chosen == "muon":
        make = partial(optax.contrib.muon, consistent_rms=0.2, muon_weight_dimension_numbers=muon_matrices)
        muon = make(learning_rate, eps=adam_epsilon, weight_decay=weight_decay)
        return optax.chain(optax.clip_by_global_norm(max_grad_norm), muon)
    if callable(chosen):
        try:
            chosen = chosen(learning_rate if callable(learning_rate) else optax.constant_schedule(learning_rate))
        except Exception as error:  # a user's function may raise any type of error
            raise UsageError(f"the optimizer {optimizer!r} must take a schedule, but: {one_line(error)}") from error
    if not isinstance(chosen, optax.GradientTransformation):
        raise UsageError(f"the optimizer {optimizer!r} must return an optax transformation: it is {chosen!r}")
    # It may count no steps, or several things. The factor 1 changes nothing, and its count comes first.
    return optax.chain(optax.scale_by_schedule(lambda count: 1.0), chosen)


def optimizer_of(options: AdamWConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Makes the optimizer that options describe, with a schedule."""
    names = ("weight_decay", "max_grad_norm", "adam_epsilon", "optimizer")
    return make_optimizer(schedule, **{name: getattr(options, name) for name in names if hasattr(options, name)})


def has_weight_decay(params: Params) -> Any:
    """Returns for each parameter if weight decay applies: only to matrices, and not to routers."""

    def is_matrix(path: tuple[Any, ...], _: Any) -> bool:
        names = {getattr(key, "key", None) for key in path[-2:]}
        return not names & {"scale", "offset", "bias", "sinks", "log_rate", "router"}

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def muon_matrices(params: Params) -> Any:
    """Returns for each parameter the axes of its matrix, for Muon, or None if AdamW trains it.

    Each projection of each layer and expert is a matrix from its inputs to its outputs, of all heads. So are its
    adapters A and B, each by itself. Embeddings, heads, routers, norms, biases and all others have None.

    Raises:
      UsageError: No parameter is such a matrix, as in a model of another library.
    """

    def axes(path: tuple[Any, ...], _: Any) -> optax.contrib.MuonDimensionNumbers | None:
        module, leaf = [None, None, *(getattr(key, "key", None) for key in path)][-2:]
        if module not in PROJECTIONS or leaf not in ("kernel", "a", "b"):
            return None
        inputs, outputs, *_ = PROJECTIONS[module]
        num_inputs, num_outputs = 1 if leaf == "b" else len(inputs), 1 if leaf == "a" else len(outputs)
        places = tuple(range(-num_inputs - num_outputs, 0))
        return optax.contrib.MuonDimensionNumbers(places[:num_inputs], places[num_inputs:])

    matrices = jax.tree_util.tree_map_with_path(axes, params)
    if not jax.tree.leaves(matrices) and any(x.ndim > 1 for x in jax.tree.leaves(params)):
        raise UsageError("muon finds no projections of our decoders in this model: make one with optax.contrib.muon")
    return matrices


def logged_rate(options: AdamWConfig, schedule: optax.Schedule, opt_state: optax.OptState) -> dict[str, jax.Array]:
    """Returns the learning rate of the next step, to log. An optimizer that is a transformation hides its own."""
    is_transformation = isinstance(load_optimizer(options.optimizer), tuple)
    return {} if is_transformation else {"learning_rate": jnp.asarray(schedule(steps_taken(opt_state)))}


def steps_taken(opt_state: optax.OptState) -> jax.Array:
    """Returns the number of optimizer steps that changed the parameters, without skipped steps."""
    count: jax.Array = optax.tree_utils.tree_get_all_with_path(opt_state, "count")[0][1]
    return count
