"""The initial state of training, and the optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from grpo_jax.config import AdamWConfig
from grpo_jax.errors import UsageError
from grpo_jax.models.params import Adapted, check_full_precision
from grpo_jax.models.transformer import Params
from grpo_jax.step.types import TrainState


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns the state before the first step.

    Raises:
      UsageError: The parameters have adapters, which `params.split` must separate first, or are quantised.
    """
    if isinstance(params, Adapted):
        raise UsageError("these parameters have adapters: train the first of models.params.split(params)")
    check_full_precision(params, "they are frozen, so train adapters on them (lora.add_adapters)")
    return TrainState(params, optimizer.init(params), jnp.int32(0), {})


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
) -> optax.GradientTransformation:
    """Makes AdamW (1711.05101), with gradients clipped by their global norm.

    Args:
      learning_rate: A learning rate, or a schedule.
      weight_decay: Weight decay of matrices. Default: 0. It does not apply to norms and biases, as in transformers and
        TRL, nor to routers of experts, which may be frozen.
      max_grad_norm: The norm above which a gradient is scaled down. Default: 1.
      adam_epsilon: The constant ε of a step m / (√v + ε). Default: 1e-8.
    """
    adamw = optax.adamw(learning_rate, eps=adam_epsilon, weight_decay=weight_decay, mask=has_weight_decay)
    return optax.chain(optax.clip_by_global_norm(max_grad_norm), adamw)


def has_weight_decay(params: Params) -> Any:
    """Returns for each parameter if weight decay applies: not to scales and offsets of norms, biases and routers."""

    def is_matrix(path: tuple[Any, ...], _: Any) -> bool:
        names = {getattr(key, "key", None) for key in path[-2:]}
        return not names & {"scale", "offset", "bias", "router"}

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def steps_taken(state: TrainState) -> jax.Array:
    """Returns the number of optimizer steps that changed the parameters, without skipped steps."""
    return optax.tree_utils.tree_get_all_with_path(state.opt_state, "count")[0][1]
