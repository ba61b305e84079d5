"""What programs of training read and write. Letters: N prompts of P tokens, G completions of T tokens, K rewards."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from grpo_jax.errors import UsageError
from grpo_jax.models.lora import Adapted
from grpo_jax.models.params import holds_quantised
from grpo_jax.models.transformer import Params

Array = Any  # jax.Array on a device, np.ndarray on the host


class TrainState(NamedTuple):
    """Everything that a checkpoint holds. Data and noise are functions of (seed, step), and the step is the
    checkpoint's name, so no iterator and no key is part of it."""

    params: Params
    opt_state: optax.OptState
    skipped: Array  # int32, optimizer steps skipped in a row, for gradients that were not finite
    reference: Params | None = None  # parameters of the reference, if it moves
    kl_coef: Array = None  # float32, β, if it adapts
    earlier: tuple[Params, ...] = ()  # parameters of the policy before the last `staleness` iterations, oldest first


class TeacherOutputs(NamedTuple):
    """What a teacher says of completions; None where the kind of distillation does not need it."""

    logprobs: Array = None  # [N, G, T], of the sampled tokens
    hidden: Array = None  # [N, G, T, E], of the teacher's decoder
    ids: Array = None  # int32 [N, G, T, K], its likeliest tokens
    logits: Array = None  # [N, G, T, K + 1], theirs, and of all others in one


class Batch(NamedTuple):
    """Completions to learn from."""

    prompt_ids: Array  # int32 [N, P], padded on the left
    prompt_mask: Array  # bool [N, P]
    completion_ids: Array  # int32 [N, G, T]
    completion_mask: Array  # bool [N, G, T], the tokens that are learned from
    temperature: Array  # [N, G], that of the sampler
    # ---- from the sampler
    sampler_logprobs: Array = None  # [N, G, T], of the softmax after temperature
    truncated_logprobs: Array = None  # [N, G, T], after top-k, top-p and min-p too; None without them
    truncated: Array = None  # bool [N, G], cut off: no token ended the completion
    turn: Array = None  # int32 [N, G, T], as of `Completions`; None: there is one turn
    # ---- from the scoring pass; None where the update does not need it
    old_logprobs: Array = None  # [N, G, T]; None: those of the policy that is differentiated, without gradient
    ref_logprobs: Array = None  # [N, G, T]
    old_entropy: Array = None  # [N, G, T], in nats
    old_values: Array = None  # [N, G, T + 1], of a critic when the completions were sampled
    teacher: TeacherOutputs | None = None
    # ---- from the rewards
    advantages: Array = None  # [N, G], or [N, G, T]
    returns: Array = None  # [N, G, T], what a critic learns
    # ---- from the masks of a whole optimizer batch
    weights: Array = None  # [N, G, T]
    # ---- of a piece whose completions are packed; None elsewhere
    packed: Array = None  # int32 [N, S], places of tokens among the G·T of their prompt, in order; G·T for padding


class RewardArrays(NamedTuple):
    """What completions earned, as arrays."""

    rewards: Array  # float32 [N, G], the weighted sum
    applicable: Array  # bool [N, G], whether any reward applies
    components: Array = None  # float32 [N, G, K], NaN where one does not apply or is only watched
    weights: Array = None  # float32 [K]
    turns: Array = None  # float32 [N, G, K], of K turns of an episode; their sum is its reward
    spans: Array = None  # float32 [N, G, T], of spans at the token that ends each, NaN elsewhere; likewise


REWARD_AXES = RewardArrays(0, 0, 0, None, 0, 0)  # what devices share out; the weights are the same on all


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step.

    Raises:
      UsageError: the parameters have adapters, which `lora.split` takes out for training, or are quantised.
    """
    if isinstance(params, Adapted):
        raise UsageError("these parameters have adapters: train the first of lora.split(params)")
    if holds_quantised(params):
        raise UsageError("quantised parameters are frozen: train adapters on them (lora.add_adapters)")
    return TrainState(params, optimizer.init(params), jnp.int32(0))


def learning_rate_schedule(
    learning_rate: float,
    *,
    warmup_steps: int = 0,
    total_steps: int = 0,
    decay: Literal["none", "linear", "cosine"] = "none",
) -> optax.Schedule:
    """A linear rise to the peak, then a constant rate or a fall to 0.

    Args:
      learning_rate: peak rate.
      warmup_steps: optimizer steps of the rise from 0 to the peak; default 0.
      total_steps: optimizer steps at which the fall ends.
      decay: how the rate falls; default "none".

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
    learning_rate: float | optax.Schedule,
    *,
    weight_decay: float = 0.0,
    max_grad_norm: float = 1.0,
    adam_epsilon: float = 1e-8,
) -> optax.GradientTransformation:
    """AdamW (1711.05101) after scaling down long gradients.

    Args:
      learning_rate: a rate, or a schedule.
      weight_decay: of matrices; default 0. Norms and biases have none, as in transformers and TRL. Routers of experts
        have none either: they may be frozen.
      max_grad_norm: norm above which a gradient is scaled down; default 1.
      adam_epsilon: ε of a step m / (√v + ε); default 1e-8.

    Returns:
      An optax transformation.
    """
    adamw = optax.adamw(learning_rate, eps=adam_epsilon, weight_decay=weight_decay, mask=has_weight_decay)
    return optax.chain(optax.clip_by_global_norm(max_grad_norm), adamw)


def has_weight_decay(params: Params) -> Any:
    """For each parameter, whether weight decay applies: not to a norm's scale or its offset, a bias, or a router."""

    def is_matrix(path: tuple[Any, ...], _: Any) -> bool:
        names = {getattr(key, "key", None) for key in path[-2:]}
        return not names & {"scale", "offset", "bias", "router"}

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def steps_taken(state: TrainState) -> jax.Array:
    """Optimizer steps that changed the parameters: those that were skipped do not count."""
    return optax.tree_utils.tree_get_all_with_path(state.opt_state, "count")[0][1]
