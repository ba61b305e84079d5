"""Samplers: the policy's own programs, for completions and for episodes. `engines` have another."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config import SamplingConfig
from grpo_jax.data.types import Prompts, useful_widths
from grpo_jax.devices import Devices, all_rows, compiled, map_rows, place, to_devices
from grpo_jax.errors import UsageError
from grpo_jax.models.policy import Policy
from grpo_jax.models.transformer import Params
from grpo_jax.rl.types import Batch, step_key
from grpo_jax.sampling.categorical import Truncation
from grpo_jax.sampling.sampler import Completions, sample_groups
from grpo_jax.tasks.task import Task


class Sampler(NamedTuple):
    """Functions that sample completions, for training and evaluation alike."""

    # (params, prompts, numbers int32 [N, G], temperature float32 [N, G], noise uint32 [3]) -> Completions. The noise is
    # on the host, all others on the devices
    draw: Callable[..., Completions]
    devices: Devices
    # The policy's own program: (params, prompt_ids, prompt_mask, numbers, temperature, noise) -> Completions, on the
    # devices. None: an engine samples, or several programs sample episodes
    program: Callable[..., Completions] | None = None
    # Widths that prompts are sampled at, ascending: each compiles a program when it is first needed. Empty: P
    prompt_widths: tuple[int, ...] = ()

    def sample(
        self, params: Params, prompts: Prompts, numbers: np.ndarray, temperature: np.ndarray, noise: np.ndarray
    ) -> tuple[Batch, Completions]:
        """Samples a group for each prompt.

        The policy's own program is started and not waited for; episodes and engines are waited for.

        Args:
          params: the policy's.
          prompts: N, padded on the left.
          numbers: int32 `[N, G]`, numbers of the completions, which key the noise of each.
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
        longest, widest = int(prompts.mask.sum(axis=-1).max()), prompts.ids.shape[1]
        begin = widest - next((width for width in self.prompt_widths if width >= longest), widest)
        ids, mask, numbers, temperature = to_devices((prompts.ids, prompts.mask, numbers, temperature), self.devices)
        columns = to_devices((prompts.ids[:, begin:], prompts.mask[:, begin:]), self.devices) if begin else (ids, mask)
        narrow = prompts._replace(ids=columns[0], mask=columns[1])
        completions = self.draw(params, narrow, numbers, temperature, noise)
        return to_batch(ids, mask, temperature, completions), completions

    def complete(self, params: Params, *args: Any) -> Completions:
        """Samples as `sample` does and waits: NumPy arrays. The parameters may be on one device only."""
        return all_rows(self.sample(place(params, self.devices), *args)[1], self.devices)


def make_sampler(policy: Policy, task: Task, sampling: SamplingConfig, *, devices: Devices = 1) -> Sampler:
    """Makes the sampler of a run, which is compiled at its first call.

    Args:
      policy: the model's functions.
      task: its tokens, and perhaps an environment.
      sampling: options of the run.
      devices: where it runs.

    Raises:
      UsageError: the task has an environment, and the policy cannot continue after its replies.
    """
    group_tokens, longest = sampling.group_size * sampling.row_tokens, max(task.batch_widths, default=0)
    widths = useful_widths(task.batch_widths, longest, group_tokens)
    if task.environment is not None:
        from grpo_jax.rl.episodes import episode_sampler  # a run without an environment does not load it

        return Sampler(episode_sampler(policy, task, sampling, devices), devices, prompt_widths=widths)

    def sample(params, prompt_ids, prompt_mask, numbers, temperature, noise) -> Completions:
        def sample_rows(shared, prompt_ids, prompt_mask, numbers, temperature) -> Completions:
            params, noise = shared
            prompts = prompt_ids, prompt_mask
            return sample_completions(policy, task, sampling, params, prompts, numbers, temperature, step_key(*noise))

        return map_rows(sample_rows, devices)((params, noise), prompt_ids, prompt_mask, numbers, temperature)

    run_program = compiled(sample, 0, devices=devices)

    def draw(params, prompts, numbers, temperature, noise) -> Completions:
        noise = to_devices(noise, devices, axes=None)
        return run_program(params, prompts.ids, prompts.mask, numbers, temperature, noise)

    return Sampler(draw, devices, run_program, widths)


def sample_completions(
    policy: Policy,
    task: Task,
    sampling: SamplingConfig,
    params: Params,
    prompts: tuple[jax.Array, jax.Array],
    numbers: jax.Array,
    temperature: jax.Array,
    key: jax.Array,
) -> Completions:
    """Samples completions of prompts with the options of a run.

    Args:
      policy, params: of the model.
      task, sampling: of the run.
      prompts: ids int32 and mask bool, `[N, P]`.
      numbers: int32 `[N, G]`, numbers of the completions, which key the noise of each.
      temperature: `[N, G]`.
      key: consumed.
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
    )


def truncation_of(sampling: SamplingConfig) -> Truncation:
    """Returns the limits on candidates that the options of a run ask for."""
    return Truncation(
        top_k=sampling.top_k or None,
        top_p=sampling.top_p if sampling.top_p < 1 else None,
        min_p=sampling.min_p or None,
    )


def to_batch(prompt_ids: Any, prompt_mask: Any, temperature: Any, completions: Completions) -> Batch:
    """Returns prompts and completions as the batch that is scored and learned from."""
    fields = {name: x for name, x in completions._asdict().items() if name in Batch._fields}
    return Batch(prompt_ids, prompt_mask, temperature=temperature, **fields)


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
