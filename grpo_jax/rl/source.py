"""Sources of rollouts: prompts to completions, started on the devices and not waited for.

A source is a function (queue, policy's parameters, step, meanwhile) -> (queue, rollout). It calls `meanwhile` once the
devices have begun to sample. Staleness and dynamic sampling wrap a source.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config import GRPOConfig, SamplingConfig
from grpo_jax.devices import Devices, size, spread_over, to_devices, to_numpy
from grpo_jax.errors import UsageError
from grpo_jax.models.transformer import Params
from grpo_jax.rl.grade import reader_of
from grpo_jax.rl.guards import has_spread
from grpo_jax.rl.sampler import Sampler, completion_numbers, group_temperatures, truncation_of
from grpo_jax.rl.types import SAMPLING, Batch, EpisodeRecord, Rollout, noise_of, record_of
from grpo_jax.tasks.task import Task

Queue = tuple[Any, ...]
Draw = Callable[[Params, int], Rollout]  # (policy's parameters, index of prompts and noise) -> rollout
Source = Callable[[Queue, Params, int, Callable[[], None]], tuple[Queue, Rollout]]


def sampling(sampler: Sampler, task: Task, config: GRPOConfig) -> Draw:
    """Returns the function that starts to sample N groups.

    Args:
      sampler: the policy's own, or an engine.
      task: its prompts.
      config: the run.
    """
    numbers = to_devices(completion_numbers(config.sampling), sampler.devices)
    temperature = to_devices(group_temperatures(config.sampling), sampler.devices)

    def draw(policy: Params, index: int) -> Rollout:
        prompts = task.prompts(index)
        if len(prompts.examples) != config.sampling.num_prompts:
            raise UsageError(
                f"the task gave {len(prompts.examples)} prompts for {config.sampling.num_prompts}: set its num_prompts"
            )
        noise = noise_of(config.seed, SAMPLING, index)
        batch, completions = sampler.sample(policy, prompts, numbers, temperature, noise)
        return Rollout(prompts, batch, record_of(completions))

    return draw


def fresh(draw: Draw) -> Source:
    """Returns the source that samples each rollout with the policy of its own step."""

    def source(queue: Queue, policy: Params, step: int, meanwhile: Callable[[], None]) -> tuple[Queue, Rollout]:
        rollout = draw(policy, step)
        meanwhile()
        return queue, rollout

    return source


# ---- staleness


def ahead(draw: Draw, task: Task, config: GRPOConfig, devices: Devices) -> Source:
    """Returns the source that samples each rollout `staleness` steps before it is learned from.

    Rollouts wait in the queue, so the devices sample one while graders work on another. The start samples the first
    ones. Past the last step it samples too, so that a run can be extended.

    Args:
      draw: of `sampling`.
      task: its prompts.
      config: the run.
      devices: where rollouts wait.
    """
    staleness = config.sampling.staleness

    def waiting(policy: Params, index: int) -> tuple[Batch, EpisodeRecord | None]:
        rollout = draw(policy, index)
        return rollout.batch, to_devices(rollout.episodes, devices)

    def source(queue: Queue, policy: Params, step: int, meanwhile: Callable[[], None]) -> tuple[Queue, Rollout]:
        if step == 0:
            queue = tuple(waiting(policy, index) for index in range(staleness))
        (batch, episodes), *others = (*queue, waiting(policy, step + staleness))
        meanwhile()
        return tuple(others), Rollout(task.prompts(step), batch, to_numpy(episodes))

    return source


def empty_queue(task: Task, sampling: SamplingConfig) -> Queue:
    """Returns a queue of zeros, with the shapes that a checkpoint of the run has."""
    if not sampling.staleness:
        return ()
    n, p = task.prompts(0).ids.shape
    shape = n, sampling.group_size, sampling.row_tokens
    is_truncated = truncation_of(sampling) != truncation_of(SamplingConfig())
    batch = Batch(
        prompt_ids=jnp.zeros((n, p), jnp.int32),
        prompt_mask=jnp.zeros((n, p), bool),
        completion_ids=jnp.zeros(shape, jnp.int32),
        completion_mask=jnp.zeros(shape, bool),
        temperature=jnp.zeros(shape[:2]),
        sampler_logprobs=jnp.zeros(shape),
        truncated_logprobs=jnp.zeros(shape) if is_truncated else None,
        truncated=jnp.zeros(shape[:2], bool),
    )
    return (reader_of(task).empty(batch, sampling),) * sampling.staleness


# ---- dynamic sampling


def until_spread(
    source: Source,
    draw: Draw,
    grade: Callable[[Rollout], Rollout],
    report: Callable[[Rollout, int], Rollout],
    config: GRPOConfig,
    devices: Devices,
    *,
    metric: str = "",
) -> Source:
    """Returns the source that replaces groups whose completions all earn the same (DAPO, 2503.14476, equation 11).

    Such a group has advantages of 0: it costs as much as another and teaches nothing. The first N groups with spread
    are taken, as if prompts had come one by one. If there are too few after `max_rollouts` draws, groups without spread
    fill up the batch. Groups that are left over are not kept for the next step, whose policy is another. Every draw has
    the same shape, so nothing is compiled again. Step and number of a draw decide its prompts and its noise, so a
    resumed run needs to know only its step.

    Args:
      source: of the first draw of a step.
      draw: of the further ones, which the present policy samples.
      grade: rollout -> rollout with rewards.
      report: (rollout, step) -> with metrics and warnings about all groups of the step.
      config: the run.
      devices: where groups lie.
      metric: component whose spread counts; "": the weighted sum. With a length penalty in the sum, nearly every group
        has some spread.
    """
    num_groups, most = config.sampling.num_prompts, config.sampling.max_rollouts

    def spread_source(queue: Queue, policy: Params, step: int, meanwhile: Callable[[], None]) -> tuple[Queue, Rollout]:
        queue, first = source(queue, policy, step, meanwhile)
        rollouts = [grade(first)]
        spread = has_spread(rollouts[0].graded, metric)
        while spread.sum() < num_groups and len(rollouts) < most:
            # The first draw of each step is that of a run without further ones, so that every epoch has all its
            # prompts. The others are further on in the same order.
            index = config.steps + step * (most - 1) + len(rollouts) - 1
            rollouts.append(grade(draw(policy, index)))
            spread = np.concatenate([spread, has_spread(rollouts[-1].graded, metric)])
        everything = report(_concatenate(rollouts), step)
        chosen = np.sort(np.argsort(~spread, stable=True)[:num_groups]) if len(rollouts) > 1 else np.arange(num_groups)
        rollout = _select(everything, [rollout.batch for rollout in rollouts], chosen, devices)
        share = float((~has_spread(rollout.graded)).mean())
        metrics = everything.metrics | {"rollouts": len(rollouts), "update_zero_spread_share": share}
        filled = {
            "filled": f"after {len(rollouts)} rollouts of a step, the rewards are still equal in {share:.0%} of its "
            "groups: raise max_rollouts, or choose easier or harder prompts"
        }
        warnings = everything.warnings | (filled if share > 0 else {})
        return queue, rollout._replace(metrics=metrics, warnings=warnings)

    return spread_source


def _concatenate(rollouts: list[Rollout]) -> Rollout:
    """Returns all groups of several rollouts, without their batches."""
    prompts = [rollout.prompts for rollout in rollouts]
    joined = prompts[0]._replace(
        ids=np.concatenate([each.ids for each in prompts]),
        mask=np.concatenate([each.mask for each in prompts]),
        examples=[example for each in prompts for example in each.examples],
    )
    counts: dict[str, Any] = {}
    for rollout in rollouts:
        counts |= {name: counts.get(name, 0) + count for name, count in rollout.metrics.items()}

    def join(trees: list[Any]) -> Any:
        return jax.tree.map(lambda *parts: np.concatenate(parts), *trees)

    graded, episodes = (join([getattr(rollout, name) for rollout in rollouts]) for name in ("graded", "episodes"))
    warnings = {key: sentence for rollout in rollouts for key, sentence in rollout.warnings.items()}
    return Rollout(joined, rollouts[0].batch, episodes, graded, counts, warnings)


def _select(everything: Rollout, batches: list[Batch], groups: np.ndarray, devices: Devices) -> Rollout:
    """Returns some groups of several draws, by their numbers."""
    prompts = everything.prompts
    chosen = prompts._replace(
        ids=prompts.ids[groups], mask=prompts.mask[groups], examples=[prompts.examples[i] for i in groups]
    )
    graded, episodes = jax.tree.map(lambda x: x[groups], (everything.graded, everything.episodes))
    return Rollout(chosen, select_groups(batches, groups, devices), episodes, graded)


def select_groups(batches: list[Batch], groups: np.ndarray, devices: Devices = 1) -> Batch:
    """Returns N groups of several batches of N, by their numbers. It is one program, however many batches there are.

    Args:
      batches: of the draws.
      groups: int `[N]`, ascending, counted over all batches.
      devices: where groups lie.
    """
    count, chosen = len(groups), batches[0]
    if len(batches) == 1:
        return chosen
    for number, batch in enumerate(batches):
        # Places that this batch fills get its groups, counted behind those that were chosen before.
        from_batch = groups // count == number
        places = np.where(from_batch, count + groups % count, np.arange(count)).astype(np.int32)
        chosen = _choose(chosen, batch, to_devices(places, devices, axes=None), devices=devices)
    return chosen


@partial(jax.jit, static_argnames="devices")
def _choose(chosen: Batch, batch: Batch, places: jax.Array, *, devices: Devices) -> Batch:
    """Takes places of both batches, one behind the other, and spreads them over devices."""
    picked = jax.tree.map(lambda one, other: jnp.concatenate([one, other])[places], chosen, batch)
    return spread_over(picked, devices) if size(devices) > 1 else picked
