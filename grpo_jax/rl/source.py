"""Sources of rollouts: they dispatch the sampling of completions, without waiting for it.

A `Sampler` samples completions, either with the policy in this process or with a server (`engines`). A `Source` makes
rollouts of them, and calls `on_dispatch` once the devices have begun to sample. Dynamic sampling wraps a source.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config import BY_PART, GRPOConfig, SamplingConfig
from grpo_jax.data.prompts import Prompts
from grpo_jax.devices import ONE_DEVICE, Devices, all_rows, place, spread_over, to_devices
from grpo_jax.errors import UsageError
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.policy import Policy
from grpo_jax.models.rows.geometry import PromptTokens
from grpo_jax.rl.grade import has_spread
from grpo_jax.rl.interaction import interaction_of
from grpo_jax.rl.types import SAMPLING, Rollout, noise_of
from grpo_jax.sampling.sampler import Completions
from grpo_jax.step import Batch
from grpo_jax.tasks.task import Task


class Sampler(NamedTuple):
    """Functions that sample completions, for both training and evaluation."""

    # (params, prompts, numbers int32 [N, G], temperature float32 [N, G], noise uint32 [3]) -> Completions. The noise is
    # on the host, all other arguments are on the devices
    draw: Callable[..., Completions]
    devices: Devices
    # The compiled program, (params, prompt, numbers, temperature, noise) -> Completions, on the devices. None: an
    # engine samples, or several programs do
    program: Callable[..., Completions] | None = None
    group_tokens: int = 0  # tokens of a prompt's completions, G · T. 0: prompts are never cut
    # Dispatches a copy of the policy that the next update, which donates the state, does not touch. The result is the
    # `params` of `sample`
    take: Callable[[Params], Any] = lambda params: params
    at_once: int = 0  # with staleness, the number of threads that call `sample`. 0: the trainer's thread calls it
    cancel: Callable[[], None] = lambda: None  # ends what threads are sampling, which then raises an Interruption
    pop_times: Callable[[], dict[str, float]] = dict  # returns seconds since the last call, for times.jsonl
    with_journal: Callable[[Any], Any] | None = None  # `beside.Journal` -> the sampler that keeps completions in it
    # (share of a step for which the trainer waits, and for which this sampler waits) -> a sentence about their balance
    balance: Callable[[float, float], str] = lambda trainer, sampler: ""

    def sample(
        self, params: Params, prompts: Prompts, numbers: np.ndarray, temperature: np.ndarray, noise: np.ndarray
    ) -> tuple[Batch, Completions]:
        """Samples a group of completions for each prompt.

        The call waits for engines and for replies. Otherwise it only dispatches the program.

        Args:
          params: The parameters of the policy.
          prompts: N prompts, padded on the left.
          numbers: The numbers of the completions, int32 `[N, G]`, which key the noise of each.
          temperature: The temperature of each completion, float32 `[N, G]`.
          noise: The arguments (seed, stream, index) of `step_key`, uint32 `[3]`.

        Returns:
          The batch, and the completions that it holds, both on the devices.

        Raises:
          UsageError: The prompts are not padded on the left.
          Interruption: An engine does not answer.
        """
        tokens = prompts.tokens
        if not tokens.mask[:, -1].all():
            raise UsageError("prompts must be padded on the left: data.prompts.pad_prompts does it")
        narrow = tokens.narrowed(self.group_tokens) if self.group_tokens else tokens
        prompt, numbers, temperature = to_devices((tokens, numbers, temperature), self.devices)
        narrow = prompt if narrow is tokens else to_devices(narrow, self.devices)
        completions = self.draw(params, prompts._replace(tokens=narrow), numbers, temperature, noise)
        return to_batch(prompt, temperature, completions), completions

    def complete(self, params: Params, *args: Any) -> Completions:
        """Samples as `sample` does, and returns NumPy arrays. The parameters may be on a single device."""
        sampled = self.sample(self.take(place(params, self.devices)), *args)[1]
        completions: Completions = all_rows(sampled, self.devices)
        return completions


def make_sampler(policy: Policy, task: Task, sampling: SamplingConfig, *, devices: Devices = ONE_DEVICE) -> Sampler:
    """Makes the sampler of a run, which is compiled at its first call.

    Args:
      policy: The functions of the model.
      task: Supplies the special tokens, and an environment if there is one.
      sampling: The sampling options of the run.
      devices: The devices that share the rows.

    Raises:
      UsageError: The task has an environment, but the policy cannot continue after its replies.
    """
    draw, program = interaction_of(task).make_draw(task, policy, sampling, devices)
    return Sampler(draw, devices, program, group_tokens=sampling.group_size * sampling.completion_width)


def to_batch(prompt: PromptTokens, temperature: Any, completions: Completions) -> Batch:
    """Combines prompts and completions into a batch."""
    fields = {name: x for name, x in completions._asdict().items() if name in Batch._fields}
    return Batch(prompt, temperature=temperature, **fields)


def group_temperatures(sampling: SamplingConfig) -> Any:
    """τᵢ = temperature + spread · i / G for i = 0 … G − 1, float32 `[N, G]`; NumPy unless a setting is traced."""
    numpy: Any = jnp if isinstance(sampling.temperature, jax.Array) else np
    places = numpy.arange(sampling.group_size, dtype=numpy.float32) / sampling.group_size
    group = sampling.temperature + sampling.temperature_spread * places
    return numpy.tile(group.astype(numpy.float32), (sampling.num_prompts, 1))


def completion_numbers(sampling: SamplingConfig) -> np.ndarray:
    """Returns the numbers of the completions of a step, int32 `[N, G]`."""
    shape = sampling.num_prompts, sampling.group_size
    return np.arange(shape[0] * shape[1], dtype=np.int32).reshape(shape)


# ---- sources

# (parameters of the policy, index of prompts and noise, other prompts than those of the index) -> rollout
Draw = Callable[..., Rollout]
# (what `Sampler.take` returns, index, other prompts) -> a function that samples the rollout
Start = Callable[..., Callable[[], Rollout]]


class Source(NamedTuple):
    """A source of rollouts, with a state that only it reads."""

    # (state, parameters of the policy, step, on_dispatch) -> (state, rollout)
    sample: Callable[[Any, Params, int, Callable[[], None]], tuple[Any, Rollout]]
    initial_state: Callable[[], Any] = tuple  # returns arrays [N, ...]
    settle: Callable[[Any], Any] = lambda state: state  # waits until the state consists of arrays
    suspend: Callable[[Any], Any] = lambda state: state  # state -> the arrays that are there, without waiting
    close: Callable[[], None] = lambda: None  # ends sampling that nobody needs any more


def make_start(sampler: Sampler, task: Task, config: GRPOConfig) -> Start:
    """Returns the function that begins to sample N groups. It gets the prompts, which threads must not share.

    Args:
      sampler: Samples completions on the devices of the run.
      task: Supplies the prompts.
      config: Supplies the shape and the temperatures of a rollout, and the seed.
    """
    numbers = to_devices(completion_numbers(config.sampling), sampler.devices)
    temperature = to_devices(group_temperatures(config.sampling), sampler.devices)

    def start(params: Any, index: int, prompts: Prompts | None = None) -> Callable[[], Rollout]:
        prompts = task.prompts(index) if prompts is None else prompts
        if len(prompts.examples) != config.sampling.num_prompts:
            raise UsageError(
                f"the task gave {len(prompts.examples)} prompts for {config.sampling.num_prompts}: set its num_prompts"
            )
        noise = noise_of(config.seed, SAMPLING, index)
        return lambda: Rollout(prompts, sampler.sample(params, prompts, numbers, temperature, noise)[0])

    return start


def make_source(draw: Draw, task: Task, config: GRPOConfig) -> Source:
    """Returns the source in which the current policy samples, or an older policy if the run sets `staleness`.

    Args:
      draw: Samples a rollout.
      task: Supplies the prompts.
      config: Supplies the staleness.
    """
    if config.sampling.staleness:
        return sampled_ahead(draw, task, config.sampling)

    def sample(state: Any, policy: Params, step: int, on_dispatch: Callable[[], None]) -> tuple[Any, Rollout]:
        rollout = draw(policy, step)
        on_dispatch()
        return state, rollout

    return Source(sample)


# ---- staleness


def sampled_ahead(draw: Draw, task: Task, sampling: SamplingConfig) -> Source:
    """Returns the source that samples each rollout `staleness` steps before the update that uses it.

    Rollouts wait in a queue, the state of the source, so that the devices sample one rollout while graders work on
    another. The initial policy samples the first `staleness` + 1 rollouts. The last steps still sample rollouts for
    later steps, so that a run can be extended.

    Args:
      draw: Samples a rollout.
      task: Supplies the prompts.
      sampling: The sampling options of the run.
    """
    staleness = sampling.staleness

    def sample(
        queue: tuple[Batch, ...], policy: Params, step: int, on_dispatch: Callable[[], None]
    ) -> tuple[tuple[Batch, ...], Rollout]:
        if step == 0:
            queue = tuple(draw(policy, index).batch for index in range(staleness))
        newest = draw(policy, step + staleness)
        on_dispatch()
        batch, *others = (*queue, newest.batch)
        return tuple(others), Rollout(task.prompts(step), batch, is_fresh=False)

    return Source(sample, lambda: (empty_batch(task, sampling),) * staleness)


def empty_batch(task: Task, sampling: SamplingConfig) -> Batch:
    """Returns a batch of zeros with the shapes of sampled batches."""
    prompt = task.prompts(0).tokens
    shape = len(prompt), sampling.group_size, sampling.completion_width
    batch = Batch(
        prompt=jax.tree.map(np.zeros_like, prompt),
        completion_ids=np.zeros(shape, np.int32),
        completion_mask=np.zeros(shape, bool),
        temperature=np.zeros(shape[:2], np.float32),
        sampler_logprobs=np.zeros(shape, np.float32),
        processed_logprobs=np.zeros(shape, np.float32) if sampling.limits_tokens else None,
        truncated=np.zeros(shape[:2], bool),
        support_ids=np.zeros((*shape, sampling.kept_tokens), np.int32) if sampling.kept_tokens else None,
    )
    return interaction_of(task).add_zeros(batch, sampling)


# ---- curriculum


def by_solve_rate(
    draw: Draw,
    grade: Callable[[Rollout], Rollout],
    report: Callable[[Rollout, int], Rollout],
    task: Task,
    sampling: SamplingConfig,
    devices: Devices,
) -> Source:
    """Returns the source that draws prompts by the rewards of earlier steps. Their window is its state.

    Args:
      draw: Samples a rollout.
      grade: Adds rewards to a rollout.
      report: (rollout, step) -> rollout with metrics and warnings.
      task: Supplies the curriculum.
      sampling: The sampling options of the run.
      devices: The devices that share the rows.
    """
    from grpo_jax.tasks.curriculum import add_step, empty_window

    choose = task.curriculum
    if choose is None:
        raise UsageError("curriculum is set, but prompts of this task are all in the same order: leave it out")

    def sample(state: Any, policy: Params, step: int, on_dispatch: Callable[[], None]) -> tuple[Any, Rollout]:
        window = all_rows(state, devices)
        prompts, numbers, metrics = choose(window, step, sampling.curriculum_bound)
        rollout = draw(policy, step, prompts)
        on_dispatch()
        rollout = report(grade(rollout), step)
        graded = rollout.graded
        assert graded is not None
        rewards = graded.components.get(sampling.filter_metric, np.where(graded.applicable, graded.rewards, np.nan))
        window = to_devices(add_step(window, numbers, rewards), devices)
        return window, rollout._replace(metrics=rollout.metrics | metrics)

    return Source(sample, partial(empty_window, sampling.num_prompts, sampling.curriculum))


# ---- dynamic sampling


def with_spread(
    source: Source,
    draw: Draw,
    grade: Callable[[Rollout], Rollout],
    report: Callable[[Rollout, int], Rollout],
    config: GRPOConfig,
    devices: Devices,
    *,
    metric: str = "",
) -> Source:
    """Returns the source that replaces groups whose completions have equal rewards (DAPO, 2503.14476, equation 11).

    Such a group has advantages of 0: it costs as much as any group, and the policy term has no gradient. The source
    takes the first N groups with spread, in the order of the draws. If there are too few after `max_rollouts` draws,
    groups without spread fill up the batch. Surplus groups are discarded, because the policy of the next step differs.
    Every draw has the same shape, so nothing is compiled again. The prompts and noise of a draw depend only on the step
    and the number of the draw, so a run can resume at any step.

    Args:
      source: Samples the first rollout of a step.
      draw: Samples further rollouts of the step with the current policy.
      grade: Adds rewards to a rollout.
      report: (rollout, step) -> rollout with metrics and warnings about all groups of the step.
      config: Supplies the number of groups and of draws, the steps of the run, and what advantages compare.
      devices: The devices that share the rows.
      metric: The component whose spread counts. Default: the weighted sum, or turns or spans if the method compares
        these. With a length penalty in the sum, nearly every group has some spread.
    """
    num_groups, most = config.sampling.num_prompts, config.sampling.max_rollouts
    differs = partial(has_spread, by_part=config.loss.advantages_of in BY_PART)

    def sample(state: Any, policy: Params, step: int, on_dispatch: Callable[[], None]) -> tuple[Any, Rollout]:
        state, first = source.sample(state, policy, step, on_dispatch)
        rollouts = [grade(first)]
        spread = differs(rollouts[0].graded, metric)
        while spread.sum() < num_groups and len(rollouts) < most:
            # The first draw of each step is the same as without dynamic sampling, so that every epoch has all its
            # prompts. Further draws take the prompts that come after the last step.
            index = config.steps + step * (most - 1) + len(rollouts) - 1
            rollouts.append(grade(draw(policy, index)))
            spread = np.concatenate([spread, differs(rollouts[-1].graded, metric)])
        everything = report(_concatenate(rollouts), step)
        chosen = np.sort(np.argsort(~spread, stable=True)[:num_groups]) if len(rollouts) > 1 else np.arange(num_groups)
        rollout = Rollout(
            everything.prompts.take(chosen),
            select_groups([rollout.batch for rollout in rollouts], chosen, devices),
            jax.tree.map(lambda x: x[chosen], everything.graded),
        )
        share = float((~differs(rollout.graded)).mean())
        metrics = everything.metrics | {"rollouts": len(rollouts), "update_zero_spread_share": share}
        filled = {
            "filled": f"after {len(rollouts)} rollouts of a step, the rewards are still equal in {share:.0%} of its "
            "groups: raise max_rollouts, or choose easier or harder prompts"
        }
        warnings = everything.warnings | (filled if share > 0 else {})
        return state, rollout._replace(metrics=metrics, warnings=warnings, is_fresh=first.is_fresh)

    return source._replace(sample=sample)


def _concatenate(rollouts: list[Rollout]) -> Rollout:
    """Returns all groups of several rollouts, without their batches."""
    prompts = [rollout.prompts for rollout in rollouts]
    joined = prompts[0]._replace(
        tokens=jax.tree.map(lambda *parts: np.concatenate(parts), *[each.tokens for each in prompts]),
        examples=[example for each in prompts for example in each.examples],
    )
    counts: dict[str, Any] = {}
    for rollout in rollouts:
        counts |= {name: counts.get(name, 0) + count for name, count in rollout.metrics.items()}

    graded = jax.tree.map(lambda *parts: np.concatenate(parts), *[rollout.graded for rollout in rollouts])
    warnings = {key: sentence for rollout in rollouts for key, sentence in rollout.warnings.items()}
    return Rollout(joined, rollouts[0].batch, graded, counts, warnings)


def select_groups(batches: list[Batch], groups: np.ndarray, devices: Devices = ONE_DEVICE) -> Batch:
    """Selects N groups of several batches of N by their numbers. One program serves any number of batches.

    Args:
      batches: The batches of the draws.
      groups: The numbers of the groups, int `[N]`, ascending, counted over all batches.
      devices: The devices that share the rows.
    """
    count, chosen = len(groups), batches[0]
    if len(batches) == 1:
        return chosen
    for number, batch in enumerate(batches):
        # An index below N keeps the group chosen so far; N + i takes group i of this batch.
        from_batch = groups // count == number
        places = np.where(from_batch, count + groups % count, np.arange(count)).astype(np.int32)
        chosen = _choose(chosen, batch, to_devices(places, devices, axes=None), devices=devices)
    return chosen


@partial(jax.jit, static_argnames="devices")
def _choose(chosen: Batch, batch: Batch, places: jax.Array, *, devices: Devices) -> Batch:
    """Selects groups from the concatenation of both batches, and shards them over devices."""
    picked: Batch = jax.tree.map(lambda one, other: jnp.concatenate([one, other])[places], chosen, batch)
    return spread_over(picked, devices)
