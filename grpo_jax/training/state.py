"""What an optimizer step reads and writes."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from grpo_jax.errors import UsageError
from grpo_jax.models.lora import Adapted
from grpo_jax.models.transformer import Params

Array = Any  # jax.Array on a device, np.ndarray on the host


class TrainState(NamedTuple):
    """Everything that a checkpoint holds. Data and noise are functions of (seed, step), and the step is the
    checkpoint's name, so no iterator and no key is part of it."""

    params: Params
    opt_state: optax.OptState
    skipped: Array  # int32, optimizer steps skipped in a row, for gradients that were not finite
    reference: Params | None = None  # what the policy is held near, if that moves
    kl_coef: Array = None  # float32, by how much, if that adapts


class Batch(NamedTuple):
    """Completions to learn from. N prompts of P tokens, G completions of T tokens."""

    prompt_ids: Array  # int32 [N, P], padded on the left
    prompt_mask: Array  # bool [N, P]
    completion_ids: Array  # int32 [N, G, T]
    completion_mask: Array  # bool [N, G, T]
    temperature: Array  # [N, G], that of the sampler
    advantages: Array = None  # [N, G]; [N, G, T] when corrected, or of a critic
    old_logprobs: Array = None  # [N, G, T]
    ref_logprobs: Array = None  # [N, G, T]; None without a reference
    sampler_logprobs: Array = None  # [N, G, T]
    old_values: Array = None  # [N, G, T + 1], of a critic when the completions were sampled; None without one
    returns: Array = None  # [N, G, T], what a critic learns
    weights: Array = None  # [N, G, T], made from the mask of a whole optimizer batch


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step.

    Raises:
      UsageError: the parameters have adapters, which `lora.split` takes out for training.
    """
    if isinstance(params, Adapted):
        raise UsageError("these parameters have adapters: train the first of lora.split(params)")
    return TrainState(params, optimizer.init(params), jnp.int32(0))


def learning_rate_schedule(
    learning_rate: float,
    *,
    warmup_steps: int = 0,
    total_steps: int = 0,
    decay: Literal["none", "linear", "cosine"] = "none",
) -> optax.Schedule:
    """A linear rise, then none or a fall to 0.

    Args:
      learning_rate: peak rate.
      warmup_steps: optimizer steps of the rise from 0 to the peak, 0.
      total_steps: optimizer steps at which the fall ends.
      decay: how the rate falls, "none".

    Returns:
      Number of optimizer steps taken -> rate of the next.
    """
    falling = max(total_steps - warmup_steps, 1)
    after: optax.Schedule = {
        "none": optax.constant_schedule(learning_rate),
        "linear": optax.linear_schedule(learning_rate, 0.0, falling),
        "cosine": optax.cosine_decay_schedule(learning_rate, falling),
    }[decay]
    rising = optax.linear_schedule(0.0, learning_rate, warmup_steps)
    return optax.join_schedules([rising, after], [warmup_steps]) if warmup_steps else after


def make_optimizer(
    learning_rate: float | optax.Schedule, *, weight_decay: float = 0.0, max_grad_norm: float = 1.0
) -> optax.GradientTransformation:
    """AdamW after scaling down long gradients.

    Args:
      learning_rate: a rate, or a schedule.
      weight_decay: of AdamW, 0.
      max_grad_norm: norm above which a gradient is scaled down, 1.

    Returns:
      An optax transformation.
    """
    return optax.chain(optax.clip_by_global_norm(max_grad_norm), optax.adamw(learning_rate, weight_decay=weight_decay))


def steps_taken(state: TrainState) -> jax.Array:
    """Optimizer steps that changed the parameters: those that were skipped do not count."""
    return optax.tree_utils.tree_get_all_with_path(state.opt_state, "count")[0][1]
