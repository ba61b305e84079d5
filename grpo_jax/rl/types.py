"""The data of an iteration. Letters: N prompts of P tokens, G completions of T tokens, K rewards, C candidate
tokens, M turns, U optimizer steps.

Rewards pass through four containers: the list that a function returns becomes `rewards.reward.RewardScores`, then
`Graded` on the host, then `RewardArrays` on the devices, and finally the advantages of a `Batch`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax.data.prompts import Prompts
from grpo_jax.functional import Metrics
from grpo_jax.models.geometry import Rows, TokenStates
from grpo_jax.models.prompts import PromptTokens
from grpo_jax.models.transformer import Params

_NOTHING: Any = MappingProxyType({})  # read-only, since it is shared

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


class TeacherOutputs(NamedTuple):
    """Outputs of a teacher that the loss needs. A field is None if the kind of distillation does not need it."""

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
    truncated_logprobs: Array = None  # [N, G, T], after top-k, top-p and min-p too; None without them
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
    teacher: TeacherOutputs | None = None
    # ---- from the rewards
    advantages: Array = None  # [N, G], or [N, G, T]
    returns: Array = None  # [N, G, T], the targets of a critic
    # ---- from the masks of a whole optimizer batch
    weights: Array = None  # [N, G, T]
    # ---- from the cutting of a batch into pieces
    layout: Rows | None = None  # how the decoder computes the piece; None: each completion in full


class Graded(NamedTuple):
    """Rewards of completions, the same on every host. All arrays are NumPy arrays."""

    rewards: np.ndarray  # float32 [N, G], the weighted sum
    applicable: np.ndarray  # bool [N, G], true if any reward applies
    components: dict[str, np.ndarray]  # name -> float32 [N, G], NaN where the reward does not apply
    lengths: np.ndarray  # int [N, G], in tokens, including EOS
    truncated: np.ndarray  # bool [N, G]
    distinct: np.ndarray  # float [N], share of distinct completions in a group
    parts: np.ndarray  # object [N, G], the turns or spans: tuples of `Span` in tokens, ordered by their ends
    episodes: dict[str, np.ndarray]  # name -> [N, G], statistics of episodes; empty without an environment


class Rollout(NamedTuple):
    """N prompts with G completions each."""

    prompts: Prompts
    batch: Batch
    graded: Graded | None = None  # None: not graded yet
    metrics: dict[str, Any] = _NOTHING  # metrics of grading, as Python numbers
    warnings: dict[str, str] = _NOTHING  # key -> sentence for the user
    is_fresh: bool = True  # the current policy sampled it


class RewardArrays(NamedTuple):
    """Rewards of completions, on the devices."""

    rewards: Array  # float32 [N, G], the weighted sum
    applicable: Array  # bool [N, G], true if any reward applies
    components: Array = None  # float32 [N, G, K], NaN where a reward does not apply or has weight 0
    weights: Array = None  # float32 [K]
    parts: Array = None  # float32 [N, G, T], the reward of each turn or span at its last token, NaN elsewhere


REWARD_AXES = RewardArrays(0, 0, 0, None, 0)  # 0: split over devices; None: the same on all


class Forward(NamedTuple):
    """One differentiated forward pass over a piece of a batch."""

    states: TokenStates  # the states that predict the tokens
    logprobs: jax.Array  # [N, G, T], after the sampler's temperature
    entropy: jax.Array  # [N, G, T], in nats


class Logs(NamedTuple):
    """Metrics of a loss, which can be combined over the pieces of a batch."""

    means: Metrics  # name -> (weighted sum, weight)
    maxima: Mapping[str, jax.Array] = {}  # over pieces; `average_over_updates` must know each name


Scorer = Callable[[Params, Batch], dict[str, Any]]  # (models by role, batch) -> fields of the batch
# (rewards, scored batch, β) -> (batch with advantages, advantages to log [N, G] or [N, G, T], metrics)
Advantage = Callable[[RewardArrays, Batch, Array], tuple[Batch, jax.Array, dict[str, jax.Array]]]
# (models by role, forward pass, batch with weights) -> (Σ weights · loss, logs)
LossTerm = Callable[[Params, Forward, Batch], tuple[jax.Array, Logs]]
# (state after the updates of an iteration, metrics, number of the iteration from 0) -> state
Hook = Callable[[TrainState, Mapping[str, Array], Array], TrainState]


class Method(NamedTuple):
    """A method that learns from rollouts, such as GRPO or PPO, as data."""

    forward: Callable[[Params, Batch], Forward]  # (models by role, piece of a batch) -> input of the terms
    terms: tuple[LossTerm, ...]  # the loss is their sum
    advantage: Advantage
    aggregation: Callable[..., jax.Array]  # (mask, *, num_completions) -> weights
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule  # the learning rate of the policy, to log
    scorers: tuple[Scorer, ...] = ()
    initial_extras: Callable[[Any], dict[str, Any]] = lambda trained: {}  # trained parameters -> initial extras
    hooks: tuple[Hook, ...] = ()
    rounded: Callable[[Params], Params] | None = None  # `Policy.rounded`
    scores_ends: bool = False  # true if scorers also compute the state after the last token
    # metrics of an optimizer step -> metrics to log
    summarise: Callable[[dict[str, jax.Array]], dict[str, jax.Array]] = lambda metrics: metrics


class Learned(NamedTuple):
    """Metrics and advantages of an iteration's updates, to log."""

    metrics: dict[str, jax.Array]  # scalars
    advantages: jax.Array  # [N, G], or [N, G, T] for turns and spans
    order: jax.Array  # int32 [U, n], the prompts of each optimizer step


# Streams of random numbers, independent of each other.
SAMPLING, SHUFFLING, EVALUATION, LABELLING, REWARD = range(5)


def step_key(seed: Any, stream: Any, index: Any) -> jax.Array:
    """Returns the random key of a step in a stream. Each of the three numbers is below 2³²."""
    seed, stream, index = (jnp.asarray(number, jnp.uint32) for number in (seed, stream, index))
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), index)


def noise_of(seed: int, stream: int, index: int) -> np.ndarray:
    """Returns the arguments of `step_key` as an array, uint32 `[3]`."""
    return np.array([seed, stream, index], np.uint32)
