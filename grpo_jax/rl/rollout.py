"""Prompts to completions to text to rewards: what an iteration learns from."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import hosts
from grpo_jax.config import AdvantagesOf, SamplingConfig
from grpo_jax.data.episodes import ENDINGS
from grpo_jax.data.spans import in_tokens, total
from grpo_jax.data.types import Completion, Prompts, Reward, Rewards
from grpo_jax.devices import (
    Devices,
    all_rows,
    data_parallel,
    in_order,
    own_rows,
    place,
    rows_of_hosts,
    to_devices,
)
from grpo_jax.errors import UsageError
from grpo_jax.models.policy import Policy
from grpo_jax.models.transformer import Params
from grpo_jax.rewards.reward import named_components, score_completions
from grpo_jax.rl.episodes import EpisodePrograms, episode_metrics, play, turns_of
from grpo_jax.rl.learn import step_key
from grpo_jax.rl.state import Batch, RewardArrays
from grpo_jax.sampling.sampler import Completions, Episodes, begin_episodes, continue_episodes, sample_groups
from grpo_jax.sampling.truncation import Truncation
from grpo_jax.tasks.task import Task


class Rollout(NamedTuple):
    """N prompts with G completions each, and what they earned, on the host."""

    prompts: Prompts
    completions: Completions  # NumPy arrays; log-probabilities are None, for they stay on the device
    texts: list[list[Completion]]  # [N][G]
    rewards: np.ndarray  # float32 [N, G], the weighted sum
    applicable: np.ndarray  # bool [N, G], whether any reward applies
    components: dict[str, np.ndarray]  # name -> float32 [N, G], NaN where it does not apply
    weights: dict[str, float]  # name -> its weight in the sum, 0 where it is only watched
    spans: np.ndarray | None = None  # object [N, G], of tuples of `Span` of tokens, ordered by their ends


class Outcomes(NamedTuple):
    """What is told of N prompts with G completions each, the same on every host: prompts, and numbers."""

    prompts: Prompts
    rewards: np.ndarray  # as in `Rollout`
    applicable: np.ndarray
    components: dict[str, np.ndarray]
    weights: dict[str, float]
    lengths: np.ndarray  # int [N, G], in tokens, the ending one included
    truncated: np.ndarray  # bool [N, G]
    distinct: np.ndarray  # float [N], share of the completions of a group that differ
    episodes: Completions | None = None  # NumPy arrays, where an environment answers, which is on one host alone
    spans: np.ndarray | None = None  # as in `Rollout`


class Sampler(NamedTuple):
    """What draws completions, for training and evaluation alike: the policy's own program, or another engine."""

    # (params, prompts, numbers int32 [N, G], temperature float32 [N, G], noise uint32 [3]) -> Completions. The noise is
    # on the host, all others on the devices
    draw: Callable[..., Completions]
    devices: Devices
    # Of the policy's own: (params, prompt_ids, prompt_mask, numbers, temperature, noise) -> Completions, on the
    # devices. Where there is `replay`, `given` of `sample_groups` is the last argument. None: an engine draws, or
    # episodes are drawn by several programs
    program: Callable[..., Completions] | None = None
    # (params, batch as sampled) -> the log-probabilities `[N, G, T]` that `program` gives to its completions. None: the
    # sampler was not asked to
    replay: Callable[[Params, Batch], jax.Array] | None = None

    def sample(
        self, params: Params, prompts: Prompts, numbers: np.ndarray, temperature: np.ndarray, noise: np.ndarray
    ) -> tuple[Batch, Completions]:
        """Samples a group for each prompt. The policy's own program is started and not waited for; episodes and other
        engines are waited for.

        Args:
          params: the policy's.
          prompts: N, padded on the left.
          numbers: int32 `[N, G]`, of the completions; they key the noise of each.
          temperature: float32 `[N, G]`.
          noise: uint32 `[3]`, (seed, stream, index) of `step_key`.

        Returns:
          The batch, and the completions that it holds, both on the devices.

        Raises:
          UsageError: prompts are not padded on the left.
          Interruption: an engine is gone.
        """
        if not prompts.mask[:, -1].all():
            raise UsageError("prompts must be padded on the left: data.types.pad_prompts does it")
        ids, mask, numbers, temperature = to_devices((prompts.ids, prompts.mask, numbers, temperature), self.devices)
        completions = self.draw(params, prompts._replace(ids=ids, mask=mask), numbers, temperature, noise)
        return to_batch(ids, mask, temperature, completions), completions

    def complete(self, params: Params, *args: Any) -> Completions:
        """The completions of `sample`, waited for, as NumPy arrays. The parameters may be on one device alone."""
        return all_rows(self.sample(place(params, self.devices), *args)[1], self.devices)


def truncation_of(sampling: SamplingConfig) -> Truncation:
    """The limits of a run's sampling."""
    return Truncation(
        top_k=sampling.top_k or None,
        top_p=sampling.top_p if sampling.top_p < 1 else None,
        min_p=sampling.min_p or None,
    )


def sample(
    policy: Policy,
    task: Task,
    sampling: SamplingConfig,
    params: Params,
    prompts: tuple[jax.Array, jax.Array],
    numbers: jax.Array,
    temperature: jax.Array,
    key: jax.Array,
    given: jax.Array | None = None,
) -> Completions:
    """Completions of prompts, as a run samples them.

    Args:
      policy, params: of the model.
      task, sampling: of the run.
      prompts: ids int32 and mask bool, `[N, P]`.
      numbers: int32 `[N, G]`, of the completions; they key the noise of each.
      temperature: `[N, G]`.
      key: consumed.
      given: as in `sample_groups`.
    """
    return sample_groups(
        policy,
        params,
        *prompts,
        numbers,
        key,
        max_tokens=sampling.max_tokens,
        eos_ids=task.eos_ids,
        temperature=temperature,
        truncation=truncation_of(sampling),
        pad_id=task.pad_id,
        given=given,
    )


def make_sampler(
    policy: Policy, task: Task, sampling: SamplingConfig, *, devices: Devices = 1, replays: bool = False
) -> Sampler:
    """The sampler of a run, compiled at its first call.

    Args:
      policy: the model's functions.
      task: its tokens.
      sampling: of the run.
      devices: that it runs on.
      replays: whether it has to have `replay`. Episodes are not replayed.

    Raises:
      UsageError: the task has an environment, and the policy cannot go on after its replies.
    """

    def program(params, prompt_ids, prompt_mask, numbers, temperature, noise, *given, axis_name) -> Completions:
        del axis_name  # completions do not depend on each other
        prompts = prompt_ids, prompt_mask
        return sample(policy, task, sampling, params, prompts, numbers, temperature, step_key(*noise), *given)

    sample_all = data_parallel(program, (None, 0, 0, 0, 0, None, *[0] * replays), 0, devices=devices)

    def draw(params, prompts, numbers, temperature, noise) -> Completions:
        noise = to_devices(noise, devices, axes=None)
        all_drawn = [np.full((*numbers.shape, sampling.max_tokens), -1, np.int32)] if replays else []
        given = to_devices(all_drawn, devices)
        return sample_all(params, prompts.ids, prompts.mask, numbers, temperature, noise, *given)

    def replay(params, batch: Batch) -> jax.Array:
        """By the program that drew, which is compiled already. No token is drawn, so its noise has no effect."""
        numbers, noise = np.zeros(batch.temperature.shape, np.int32), np.zeros(3, np.uint32)
        numbers, noise = to_devices(numbers, devices), to_devices(noise, devices, axes=None)
        prompts = batch.prompt_ids, batch.prompt_mask
        drawn = sample_all(params, *prompts, numbers, batch.temperature, noise, batch.completion_ids)
        return drawn.sampler_logprobs

    if task.environment is None:
        return Sampler(draw, devices, sample_all, replay if replays else None)
    if policy.decoder is None:
        raise UsageError("this policy has no decoder, with which a completion goes on after a reply: give it one")
    programs = episode_programs(policy, task, sampling, devices)

    def draw_episodes(params, prompts, numbers, temperature, noise) -> Completions:
        given = prompts.ids, prompts.mask, numbers, temperature
        return play(programs, params, given, noise, prompts.examples, task, sampling, devices)

    return Sampler(draw_episodes, devices)


def episode_programs(policy: Policy, task: Task, sampling: SamplingConfig, devices: Devices) -> EpisodePrograms:
    """Of `begin_episodes` and `continue_episodes`."""
    common: Any = {"max_tokens": sampling.max_tokens, "eos_ids": task.eos_ids}

    def begin(params, prompt_ids, prompt_mask, numbers, temperature, noise, *, axis_name) -> Episodes:
        del axis_name  # completions do not depend on each other
        return begin_episodes(
            policy,
            params,
            prompt_ids,
            prompt_mask,
            numbers,
            step_key(*noise),
            environment_tokens=sampling.environment_tokens,
            temperature=temperature,
            truncation=truncation_of(sampling),
            pad_id=task.pad_id,
            **common,
        )

    def go_on(params, episodes, replies, counts, goes_on, *, axis_name) -> Episodes:
        del axis_name
        return continue_episodes(policy, params, episodes, replies, counts, goes_on, **common)

    over_devices = partial(data_parallel, devices=devices)
    return EpisodePrograms(
        over_devices(begin, (None, 0, 0, 0, 0, None), 0),
        over_devices(go_on, (None, 0, 0, 0, 0), 0, donate_argnums=(1,)),
    )


def noise_of(seed: int, stream: int, index: int) -> np.ndarray:
    """(seed, stream, index) as programs take them."""
    return np.array([seed, stream, index], np.uint32)


def to_batch(prompt_ids: Any, prompt_mask: Any, temperature: Any, completions: Completions) -> Batch:
    """Prompts and completions as the batch that is scored and learned from."""
    return Batch(
        prompt_ids,
        prompt_mask,
        completions.completion_ids,
        completions.completion_mask,
        temperature,
        completions.sampler_logprobs,
        completions.truncated_logprobs,
        completions.truncated,
        completions.turn,
    )


# ---- text and rewards


def read_completions(completions: Completions | Batch) -> Completions:
    """What the host needs of completions on its devices: all but log-probabilities."""
    if isinstance(completions, Completions):
        return own_rows(completions._replace(sampler_logprobs=None, truncated_logprobs=None))  # type: ignore[arg-type]
    few = (completions.completion_ids, completions.completion_mask, completions.truncated)
    ids, mask, truncated = own_rows(few)
    return Completions(ids, mask, None, None, truncated)  # type: ignore[arg-type]


def grade(prompts: Prompts, completions: Completions, task: Task, reward: Reward | Rewards) -> Rollout:
    """Decodes completions and rewards them.

    Args:
      prompts: N.
      completions: of `read_completions`.
      task: for its decoder.
      reward: one function, or several with weights.

    Raises:
      UsageError: a reward function returned another number than asked.
    """
    texts = decode_groups(completions, task)
    shape = completions.truncated.shape
    examples = [example for example in prompts.examples for _ in range(shape[1])]
    flat = [text for group in texts for text in group]
    scores = score_completions(reward, examples, flat)
    for number, (parts, text) in enumerate(zip(scores.spans, flat, strict=True)):
        scores.spans[number] = in_tokens(parts, text, task.decode)
    scores = jax.tree.map(lambda x: x.reshape(shape), scores)
    weights = {name: float(component.weight) for name, component in named_components(reward).items()}
    graded = scores.rewards, scores.applicable, scores.components
    return Rollout(prompts, completions, texts, *graded, weights, scores.spans)


def take_prompts(prompts: Prompts, rows: np.ndarray) -> Prompts:
    """Some prompts, by their numbers."""
    return Prompts(prompts.ids[rows], prompts.mask[rows], [prompts.examples[row] for row in rows])


def outcomes_of_hosts(own: Rollout, prompts: Prompts, devices: Devices) -> Outcomes:
    """The outcomes of all groups, of which each host graded those on its devices.

    Args:
      own: those of this host.
      prompts: of all groups.
      devices: that they are spread over.
    """
    numbers = {
        "rewards": own.rewards,
        "applicable": own.applicable,
        "components": own.components,
        "lengths": np.asarray(own.completions.completion_mask).sum(-1),
        "truncated": np.asarray(own.completions.truncated),
        "distinct": np.array([_distinct(group) for group in own.texts]),
        "spans": own.spans,
    }
    found = hosts.gather("rewards", numbers)
    joined = jax.tree.map(lambda *parts: in_order(parts, devices), *found)
    episodes = None if own.completions.turn is None else own.completions
    return Outcomes(prompts=prompts, weights=own.weights, episodes=episodes, **joined)


def own_groups(outcomes: Outcomes, batch: Batch, task: Task, devices: Devices) -> Rollout:
    """The groups of a batch that lie on the devices of this host, with their texts.

    Args:
      outcomes: of the whole batch.
      batch: on the devices.
      task: for its decoder.
      devices: that the batch is spread over.
    """
    rows = rows_of_hosts(devices, len(outcomes.rewards))[hosts.index()]
    completions = read_completions(batch) if outcomes.episodes is None else outcomes.episodes
    return Rollout(
        take_prompts(outcomes.prompts, rows),
        completions,
        decode_groups(completions, task),
        outcomes.rewards[rows],
        outcomes.applicable[rows],
        {name: values[rows] for name, values in outcomes.components.items()},
        outcomes.weights,
        None if outcomes.spans is None else outcomes.spans[rows],
    )


def reward_arrays(
    rollout: Outcomes, advantages_of: AdvantagesOf, num_tokens: int, *, environment_counts: bool = True
) -> RewardArrays:
    """The rewards of a rollout as the arrays that advantages are made of.

    Args:
      rollout: its outcomes.
      advantages_of: what is compared; of the run.
      num_tokens: T.
      environment_counts: whether what the environment gave for turns is learned from: see `shares_a_function`.
    """
    if advantages_of == "spans":
        return RewardArrays(rollout.rewards, rollout.applicable, spans=_rewards_of_spans(rollout, num_tokens))
    if advantages_of == "turns":
        return RewardArrays(rollout.rewards, rollout.applicable, turns=_rewards_of_turns(rollout, environment_counts))
    if advantages_of == "sum":
        return RewardArrays(rollout.rewards, rollout.applicable)
    weights = np.array(list(rollout.weights.values()), np.float32)
    components = np.stack([rollout.components[name] for name in rollout.weights], axis=-1)
    return RewardArrays(rollout.rewards, rollout.applicable, np.where(weights != 0, components, np.nan), weights)


def shares_a_function(reward: Reward | Rewards, of_task: Reward | Rewards) -> bool:
    """Whether a run's reward has a function of the task's. Then it also has what the environment gives for turns.

    Where it has none, as a control's coin toss, the rewards of turns are left out as well. Otherwise they would teach
    the control, even where they cancel in the sum of an episode: the loss weighs a token by the length of its
    completion, and later turns change that length.
    """
    functions, others = ([part.reward for part in named_components(each).values()] for each in (reward, of_task))
    return any(function in others for function in functions)


def _rewards_of_turns(rollout: Outcomes, environment_counts: bool) -> np.ndarray:
    """What the environment gave for each turn, float32 `[N, G, K]`. The last turn of an episode also has what its
    reward is above their sum: all of it, where the environment gives nothing or does not count."""
    assert rollout.episodes is not None
    turns = np.nan_to_num(rollout.episodes.turn_rewards) * np.float32(environment_counts)
    last = np.asarray(rollout.episodes.turn).max(-1) - 1
    is_last = np.arange(turns.shape[-1]) == last[..., None]
    return turns + np.where(is_last, (rollout.rewards - turns.sum(-1))[..., None], 0)


def _rewards_of_spans(rollout: Outcomes, num_tokens: int) -> np.ndarray:
    """What each span earned, at the last of its tokens, float32 `[N, G, T]`; NaN where no span ends.

    The last span of a completion also has what its reward is above their sum: what whole completions earned. Where
    there are no spans, the completion is one.
    """
    earned = np.full((*rollout.rewards.shape, num_tokens), np.nan, np.float32)
    for i, j in np.ndindex(rollout.rewards.shape):
        spans: Any = () if rollout.spans is None else rollout.spans[i, j]
        rest = float(rollout.rewards[i, j]) - total(spans)
        last = spans[-1].end - 1 if spans else int(rollout.lengths[i, j]) - 1
        for token, reward in [*((span.end - 1, span.reward) for span in spans), (last, rest)]:
            earned[i, j, token] = np.nan_to_num(earned[i, j, token]) + reward
    return earned


def decode_groups(completions: Completions, task: Task) -> list[list[Completion]]:
    """Texts `[N][G]` of what was sampled, without the token that ended it; of episodes with what was heard."""
    content = completions.attention_mask & ~np.isin(completions.completion_ids, task.eos_ids)

    def decode(row: tuple[int, int]) -> Completion:
        ids = completions.completion_ids[row][content[row]].tolist()
        given = task.decode(ids), ids, bool(completions.truncated[row])
        if completions.turn is None:
            return Completion(*given)
        return Completion(*given, turns_of(completions, row, task), ENDINGS[completions.ending[row]])

    num_prompts, group_size = completions.truncated.shape
    return [[decode((i, j)) for j in range(group_size)] for i in range(num_prompts)]


def group_temperatures(sampling: SamplingConfig) -> Any:
    """τᵢ = temperature + spread · i / G for i = 0 … G − 1, float32 `[N, G]`; of NumPy unless a setting is traced."""
    numpy: Any = jnp if isinstance(sampling.temperature, jax.Array) else np
    places = numpy.arange(sampling.group_size, dtype=numpy.float32) / sampling.group_size
    group = sampling.temperature + sampling.temperature_spread * places
    return numpy.tile(group.astype(numpy.float32), (sampling.num_prompts, 1))


def completion_numbers(sampling: SamplingConfig) -> np.ndarray:
    """Numbers of the completions of a step, int32 `[N, G]`."""
    shape = sampling.num_prompts, sampling.group_size
    return np.arange(shape[0] * shape[1], dtype=np.int32).reshape(shape)


@np.errstate(invalid="ignore", over="ignore")  # an infinite reward is told by the run, once
def rollout_metrics(rollout: Outcomes) -> dict[str, Any]:
    """Metrics of a rollout, as plain numbers.

    `distinct_share` is the share of completions of a group that differ. Lengths are in tokens, the ending one included.
    `length_above` is the mean length of completions with more reward than the mean of their group (the solved ones,
    where rewards are 0 and 1), `length_below` of those with less.
    """
    lengths, components = rollout.lengths, rollout.components
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
        "distinct_share": float(rollout.distinct.mean()),
        "length_mean": float(lengths.mean()),
        "length_min": int(lengths.min()),
        "length_max": int(lengths.max()),
        "length_above": _mean(lengths[above > 0]),
        "length_below": _mean(lengths[above < 0]),
        "truncated_share": float(rollout.truncated.mean()),
        "tokens": int(lengths.sum()),
        **_span_metrics(rollout),
        **({} if rollout.episodes is None else episode_metrics(rollout.episodes)),
    }


def _span_metrics(rollout: Outcomes) -> dict[str, float]:
    """Spans of a completion, if a reward gives any."""
    counts = [] if rollout.spans is None else [len(spans) for spans in rollout.spans.ravel()]
    return {"spans_mean": float(np.mean(counts))} if any(counts) else {}


def zero_spread(rollout: Rollout | Outcomes, metric: str = "") -> np.ndarray:
    """Whether the rewards of a group that apply are all equal, bool `[N]`: such a group teaches nothing.

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
