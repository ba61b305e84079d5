"""The data of optimizer steps. Letters: N prompts of P tokens, G completions of T tokens, K candidate tokens."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import optax

from grpo_jax.functional import Metrics
from grpo_jax.models.geometry import PromptTokens, Rows

Array = Any  # jax.Array on a device, np.ndarray on the host


class TrainState(NamedTuple):
    """Everything that a checkpoint holds.

    It has no iterator and no key: data and noise are functions of (seed, step), and the name of the checkpoint is the
    step.
    """

    params: Any  # the trained parameters, of one model or by role ("policy", "critic")
    opt_state: optax.OptState
    skipped: Array  # int32, optimizer steps skipped in a row because gradients were not finite
    extras: dict[str, Any]  # values that hooks update: "reference" and "kl_coef"
    source: Any = ()  # the state of the source of rollouts, arrays [N, ...]


class TargetOutputs(NamedTuple):
    """Outputs of a model that the policy should match. A field is None if the loss does not need it."""

    logprobs: Array = None  # [N, G, T], log-probabilities of the sampled tokens
    hidden: Array = None  # [N, G, T, E], hidden states
    ids: Array = None  # int32 [N, G, T, K], the likeliest tokens
    logits: Array = None  # [N, G, T, K + 1], logits of these tokens, and one for all other tokens together


class Batch(NamedTuple):
    """Completions to learn from, on the devices."""

    prompt: PromptTokens  # [N, P]
    completion_ids: Array  # int32 [N, G, T]
    completion_mask: Array  # bool [N, G, T], the tokens that the policy wrote
    temperature: Array  # [N, G], the sampling temperature
    # ---- from the sampler
    sampler_logprobs: Array = None  # [N, G, T], after temperature
    processed_logprobs: Array = None  # [N, G, T], after top-k, top-p and min-p too; None without them
    truncated: Array = None  # bool [N, G], true if no token ended the completion
    # ---- for episodes, as in `Completions`; None: there is one turn
    turn: Array = None  # int32 [N, G, T]
    turn_rewards: Array = None  # float32 [N, G, K]
    ending: Array = None  # int8 [N, G]
    # ---- from scorers; None if the update does not need the field
    old_logprobs: Array = None  # [N, G, T]; None: those of the current policy, without gradient
    ref_logprobs: Array = None  # [N, G, T]
    old_entropy: Array = None  # [N, G, T], in nats
    old_values: Array = None  # [N, G, T], values of a critic before the updates
    end_values: Array = None  # [N, G, 1], its values after the last token
    target: TargetOutputs | None = None  # outputs of another model, with which terms compare the policy
    # ---- from the rewards
    advantages: Array = None  # [N, G], or [N, G, T]
    returns: Array = None  # [N, G, T], the targets of a critic
    # ---- from the masks of a whole optimizer batch
    weights: Array = None  # [N, G, T]
    # ---- from the cutting of a batch into pieces
    layout: Rows | None = None  # how the decoder computes the piece; None: each completion in full


class Logs(NamedTuple):
    """Metrics of a loss, which can be combined over the pieces of a batch."""

    means: Metrics  # name -> (weighted sum, weight)
    maxima: Mapping[str, jax.Array] = {}  # over pieces; `average_over_updates` must know each name
