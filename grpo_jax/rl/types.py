"""The data of an iteration and the random keys of its steps. Letters: N prompts of P tokens, G completions of T tokens,
K rewards, C candidate tokens, M turns, U optimizer steps.

Rewards pass through four containers: the list that a function returns becomes `rewards.reward.RewardSums`, then
`Graded` on the host, then `RewardArrays` on the devices, and finally the advantages of a `Batch`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax.config import SamplingConfig
from grpo_jax.data.prompts import Prompts
from grpo_jax.data.types import Completion
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.rows.geometry import TokenStates
from grpo_jax.models.rows.pieces import Pieces, choose_pieces
from grpo_jax.rewards.reward import Rewards
from grpo_jax.sampling.sampler import Completions
from grpo_jax.step import Array, Batch, Logs, TrainState
from grpo_jax.tasks.task import Task

# Name of a part of the iteration -> a block whose seconds are added to the time of the part
Timed = Callable[[str], AbstractContextManager[Any]]
_NOTHING: Any = MappingProxyType({})  # read-only, since it is shared


class Graded(NamedTuple):
    """Rewards of completions, the same on every host. All arrays are NumPy arrays."""

    rewards: np.ndarray  # float32 [N, G], the weighted sum
    applicable: np.ndarray  # bool [N, G], true if any reward applies
    components: dict[str, np.ndarray]  # name -> float32 [N, G], NaN where the reward does not apply
    lengths: np.ndarray  # int [N, G], in tokens of the policy, including EOS
    truncated: np.ndarray  # bool [N, G]
    distinct: np.ndarray  # float [N], share of distinct completions in a group
    parts: np.ndarray  # object [N, G], the turns or spans: tuples of `Span` in tokens, ordered by their ends
    statistics: dict[str, np.ndarray]  # name -> [N, G], see `Interaction`
    num_tokens: np.ndarray  # int [N, G], all tokens, also those that the policy only read


class Interaction(NamedTuple):
    """The functions that differ between completions of one turn and completions of several turns."""

    parts: Literal["spans", "turns"]  # the parts of a completion that may have rewards of their own
    check: Callable[[SamplingConfig], None]  # raises if the options do not suit the task
    # (task, policy, sampling options, devices) -> `draw` and `program` of a `source.Sampler`
    make_draw: Callable[..., tuple[Callable[..., Completions], Callable[..., Completions] | None]]
    # (task, completions as NumPy arrays, mask [N, G, T] of their tokens without EOS, place in [N, G]) -> a text
    read: Callable[[Task, Completions, Any, tuple[int, int]], Completion]
    # (task, completions, texts that are rewarded [N · G], their spans, rewards) -> `Graded.parts`
    find_parts: Callable[[Task, Completions, Sequence[Completion], np.ndarray, Rewards], np.ndarray]
    # (task, rewards, number of the step, from 0) -> metrics and warnings. Raises if the run cannot learn
    report: Callable[[Task, Graded, int], tuple[dict[str, Any], dict[str, str]]]
    # (rewards, number of a group, completions on this host, place of the group in them, texts) -> columns to read
    columns: Callable[[Graded, int, Completions, int, Sequence[Completion]], dict[str, Any]]
    # (batch of zeros, sampling options) -> batch with zeros for the other fields that are sampled
    add_zeros: Callable[[Batch, SamplingConfig], Batch] = lambda batch, sampling: batch
    # (task, completions, texts) -> statistics of completions, name -> [N, G]
    statistics: Callable[[Task, Completions, Sequence[Sequence[Completion]]], dict[str, np.ndarray]] = lambda *_: {}
    failures: Callable[[Task], dict[str, str]] = lambda task: {}  # returns sentences about failures so far, by key


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
    rounded: Callable[[Params], Params] | None = None  # trained parameters -> `Policy.rounded` of the policy's
    pieces: Callable[..., Pieces] = choose_pieces  # cuts a batch into pieces
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
