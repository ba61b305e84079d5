"""Prompts to completions to text to rewards: what a step learns from."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config import GRPOConfig
from grpo_jax.data.types import Completion, Prompts, Reward, Rewards
from grpo_jax.errors import UsageError
from grpo_jax.functional import TokenLogprobs, token_logprobs
from grpo_jax.models.policy import Policy
from grpo_jax.models.transformer import Params
from grpo_jax.rewards.reward import named_components, score_completions
from grpo_jax.sampling.sampler import Completions, sample_groups
from grpo_jax.sampling.truncation import Truncation
from grpo_jax.tasks.task import Task
from grpo_jax.training.parallel import data_parallel
from grpo_jax.training.state import Array, Batch
from grpo_jax.training.step import split_leading

# Streams of keys: the second number of `step_key`.
SAMPLING, SHUFFLING, EVALUATION, LABELLING, REWARD = range(5)

# (params, prompt_ids, prompt_mask, rows, temperature, key) -> Completions
Sampler = Callable[..., Completions]
# (params, batch) -> TokenLogprobs
Scorer = Callable[[Params, Batch], TokenLogprobs]


class Rollout(NamedTuple):
    """N prompts with G completions each, and what they earned, on the host."""

    prompts: Prompts
    completions: Completions  # NumPy arrays
    texts: list[list[Completion]]  # [N][G]
    rewards: np.ndarray  # float32 [N, G], the weighted sum
    applicable: np.ndarray  # bool [N, G], whether any reward applies
    components: dict[str, np.ndarray]  # name -> float32 [N, G], NaN where it does not apply
    weights: dict[str, float]  # name -> its weight in the sum, 0 where it is only watched


class Outcome(NamedTuple):
    """What a rollout came to, as the arrays that advantages are made of."""

    rewards: Array  # float32 [N, G]
    applicable: Array  # bool [N, G]
    truncated: Array  # bool [N, G], no token ended the completion
    sampled_logprobs: Array  # [N, G, T], of what was sampled from: after top-k, top-p and min-p
    # In the order in which rewards were given:
    components: Array = None  # float32 [K, N, G], NaN where one does not apply or is only watched
    weights: Array = None  # float32 [K]


def outcome_of(rollout: "Rollout") -> Outcome:
    """The outcome of a rollout."""
    completions = rollout.completions
    sampled = candidates(completions)
    weights = np.array(list(rollout.weights.values()), np.float32)
    components = np.stack([rollout.components[name] for name in rollout.weights])
    components = np.where(weights[:, None, None] != 0, components, np.nan)
    return Outcome(rollout.rewards, rollout.applicable, completions.truncated, sampled, components, weights)


def candidates(completions: Completions) -> Array:
    """Log-probabilities of completions among what they were sampled from, `[N, G, T]`."""
    return completions.sampler_logprobs if completions.truncated_logprobs is None else completions.truncated_logprobs


def truncation_of(config: GRPOConfig) -> Truncation:
    """The limits of a run's sampling."""
    return Truncation(
        top_k=config.sampling.top_k or None,
        top_p=config.sampling.top_p if config.sampling.top_p < 1 else None,
        min_p=config.sampling.min_p or None,
    )


def make_sampler(policy: Policy, task: Task, config: GRPOConfig, *, devices: int = 1) -> Sampler:
    """The compiled sampler of a run: one program, for training and evaluation alike."""
    limits = truncation_of(config)

    def sample(params, prompt_ids, prompt_mask, rows, temperature, key, *, axis_name) -> Completions:
        del axis_name  # rows do not depend on each other
        return sample_groups(
            policy,
            params,
            prompt_ids,
            prompt_mask,
            rows,
            key,
            max_tokens=config.sampling.max_tokens,
            eos_ids=task.eos_ids,
            temperature=temperature,
            truncation=limits,
            pad_id=task.pad_id,
        )

    return data_parallel(sample, (None, 0, 0, 0, 0, None), 0, devices=devices)


def make_scorer(policy: Policy, *, num_microbatches: int = 1, devices: int = 1) -> Scorer:
    """The compiled scorer of a run: log-probabilities of completions under any parameters."""
    return by_pieces(partial(score, policy), num_microbatches=num_microbatches, devices=devices)


def by_pieces(fn: Callable[[Params, Batch], Any], *, num_microbatches: int = 1, devices: int = 1) -> Callable[..., Any]:
    """Compiles a function of parameters and a batch, whose rows do not depend on each other, to run on pieces of it."""

    def whole(params, batch, *, axis_name):
        del axis_name
        if num_microbatches == 1:
            return fn(params, batch)
        out = jax.lax.map(lambda piece: fn(params, piece), split_leading(batch, num_microbatches))
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), out)

    return data_parallel(whole, (None, 0), 0, devices=devices)


def score(policy: Policy, params: Params, batch: Batch) -> TokenLogprobs:
    """Log-probabilities and entropies of completion tokens, after the sampler's temperature, `[N, G, T]`."""
    return score_hidden(policy, params, hidden_states(policy, params, batch), batch)


def hidden_states(policy: Policy, params: Params, batch: Batch) -> jax.Array:
    """What predicts each completion token, `[N, G, T, D]`."""
    return policy.hidden(params, batch.prompt_ids, batch.prompt_mask, batch.completion_ids)


def score_hidden(policy: Policy, params: Params, hidden: jax.Array, batch: Batch) -> TokenLogprobs:
    """`score` of hidden states that are known."""
    return token_logprobs(
        hidden, policy.unembedding(params), batch.completion_ids, temperature=batch.temperature[..., None]
    )


def roll_out(
    sampler: Sampler,
    params: Params,
    prompts: Prompts,
    task: Task,
    reward: Reward | Rewards,
    temperature: np.ndarray,
    key: jax.Array,
) -> Rollout:
    """Samples a group for each prompt and rewards it.

    Args:
      sampler: from `make_sampler`.
      params: the policy's.
      prompts: N.
      task: for its decoder.
      reward: one function, or several with weights.
      temperature: float32 `[N, G]`.
      key: consumed.

    Returns:
      The rollout.

    Raises:
      UsageError: the task or its reward function returned another number than asked.
    """
    if prompts.ids.shape[0] != temperature.shape[0]:
        raise UsageError(
            f"the task gave {prompts.ids.shape[0]} prompts for {temperature.shape[0]}: set its num_prompts"
        )
    rows = np.arange(temperature.size, dtype=np.int32).reshape(temperature.shape)
    completions = sample_prompts(sampler, params, prompts, rows, temperature, key)
    texts = decode_groups(completions, task)
    group_size = temperature.shape[1]
    examples = [example for example in prompts.examples for _ in range(group_size)]
    scores = score_completions(reward, examples, [text for group in texts for text in group])
    scores = jax.tree.map(lambda x: x.reshape(temperature.shape), scores)
    weights = {name: float(component.weight) for name, component in named_components(reward).items()}
    return Rollout(prompts, completions, texts, scores.rewards, scores.applicable, scores.components, weights)


def sample_prompts(
    sampler: Sampler, params: Params, prompts: Prompts, rows: np.ndarray, temperature: np.ndarray, key: jax.Array
) -> Completions:
    """Samples a group for each prompt.

    Args:
      sampler, params, prompts, temperature, key: as in `roll_out`.
      rows: int32 `[N, G]`, numbers of the completions, that key their noise.

    Returns:
      The completions, as NumPy arrays.

    Raises:
      UsageError: prompts are not padded on the left.
    """
    if not prompts.mask[:, -1].all():
        raise UsageError("prompts must be padded on the left: tasks.task.pad_prompts does it")
    return jax.tree.map(np.asarray, sampler(params, prompts.ids, prompts.mask, rows, temperature, key))


def decode_groups(completions: Completions, task: Task) -> list[list[Completion]]:
    """Texts `[N][G]` of what was sampled, without the token that ended it."""
    content = completions.completion_mask & ~np.isin(completions.completion_ids, task.eos_ids)

    def decode(row: tuple[int, ...]) -> Completion:
        ids = completions.completion_ids[row][content[row]].tolist()
        return Completion(task.decode(ids), ids, bool(completions.truncated[row]))

    num_prompts, group_size = completions.truncated.shape
    return [[decode((i, j)) for j in range(group_size)] for i in range(num_prompts)]


def group_temperatures(num_prompts: int, group_size: int, temperature: Array, spread: Array) -> jax.Array:
    """τᵢ = temperature + spread · i / G for i = 0 … G − 1, float32 `[N, G]`."""
    row = temperature + spread * jnp.arange(group_size) / group_size
    return jnp.tile(row.astype(jnp.float32), (num_prompts, 1))


def to_batch(rollout: Rollout, temperature: np.ndarray) -> Batch:
    """The arrays of a rollout that a scorer needs."""
    return Batch(
        rollout.prompts.ids,
        rollout.prompts.mask,
        rollout.completions.completion_ids,
        rollout.completions.completion_mask,
        temperature,
    )


def rollout_metrics(rollout: Rollout) -> dict[str, Any]:
    """What a reader wants to know of a rollout, as plain numbers.

    `distinct_share` is of the completions of a group. Lengths are in tokens, the ending one included; `length_above` is
    that of completions with more reward than the mean of their group (the solved ones, where rewards are 0 and 1),
    `length_below` of those with less.
    """
    completions, components = rollout.completions, rollout.components
    lengths = np.asarray(completions.completion_mask).sum(-1)
    counts = np.maximum(rollout.applicable.sum(-1, keepdims=True), 1)
    group_mean = np.where(rollout.applicable, rollout.rewards, 0).sum(-1, keepdims=True) / counts
    # Of equal rewards the mean may be off by rounding.
    counted = rollout.applicable & ~zero_spread(rollout)[:, None]
    above = np.where(counted, rollout.rewards - group_mean, 0)
    moments = {"reward": rollout.rewards[rollout.applicable]}
    if len(components) > 1:
        moments |= {f"reward_{name}": values[~np.isnan(values)] for name, values in components.items()}
    return {
        **{name: _mean(values) for name, values in moments.items()},
        **{f"{name}_std": float(values.std()) if values.size else None for name, values in moments.items()},
        "not_applicable_share": float(1 - rollout.applicable.mean()),
        "zero_spread_share": float(zero_spread(rollout).mean()),
        "distinct_share": float(np.mean([_distinct(group) for group in rollout.texts])),
        "length_mean": float(lengths.mean()),
        "length_min": int(lengths.min()),
        "length_max": int(lengths.max()),
        "length_above": _mean(lengths[above > 0]),
        "length_below": _mean(lengths[above < 0]),
        "truncated_share": float(completions.truncated.mean()),
        "tokens": int(lengths.sum()),
    }


def zero_spread(rollout: Rollout, metric: str = "") -> np.ndarray:
    """Whether all rewards of a group that apply are equal, bool `[N]`: such a group teaches nothing.

    Args:
      rollout: N groups.
      metric: the component to look at; "": the weighted sum.
    """
    values = rollout.components[metric] if metric else rollout.rewards
    applicable = ~np.isnan(values) if metric else rollout.applicable
    highest = np.where(applicable, values, -np.inf).max(-1)
    lowest = np.where(applicable, values, np.inf).min(-1)
    # A group without any teaches nothing either, and one with NaN or infinity no step can use.
    return ~((highest > lowest) & np.isfinite(highest) & np.isfinite(lowest))


def _distinct(group: Sequence[Completion]) -> float:
    return len({(*text.ids, text.truncated) for text in group}) / len(group)


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if values.size else None


def step_key(seed: Array, stream: int, step: Array) -> jax.Array:
    """The key of a step: a pure function of (seed, stream, step), each below 2³²."""
    return _step_key(*(jnp.asarray(number, jnp.uint32) for number in (seed, stream, step)))


@jax.jit
def _step_key(seed, stream, step):
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), step)


def shuffled_minibatches(batch: Batch, key: jax.Array, num_minibatches: int) -> list[Batch]:
    """Splits a batch by prompts, in an order that depends on the key. Groups stay whole."""
    if num_minibatches == 1:
        return [batch]
    order = np.asarray(jax.random.permutation(key, batch.prompt_ids.shape[0]))
    pieces = np.split(order, num_minibatches)
    return [jax.tree.map(lambda x, piece=piece: x[piece], batch) for piece in pieces]
