"""Completions of one turn: how they are sampled and read. `rl.episodes` has the same functions for several turns."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from grpo_jax.config import SamplingConfig
from grpo_jax.data.prompts import Prompts
from grpo_jax.data.text import spans_in_tokens
from grpo_jax.data.types import Completion
from grpo_jax.devices import Devices, jit_on_devices, map_rows, to_devices
from grpo_jax.errors import UsageError
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.policy import Policy
from grpo_jax.models.rows.geometry import PromptTokens
from grpo_jax.rewards.reward import Rewards
from grpo_jax.rl.types import Graded, Interaction, step_key
from grpo_jax.sampling.sampler import Completions, limits_of, sample_groups
from grpo_jax.step import Array
from grpo_jax.tasks.task import Task


def check_one_turn(options: SamplingConfig) -> None:
    """Raises if options are for several turns.

    Raises:
      UsageError: Task and options conflict. The message says what to change.
    """
    if options.max_turns > 1 or options.completion_width > options.max_tokens:
        raise UsageError(
            "max_turns and environment_tokens are for tasks with an environment, and this one has none: leave them out"
        )


def make_text_draw(
    task: Task, policy: Policy, sampling: SamplingConfig, devices: Devices
) -> tuple[Callable[..., Completions], Callable[..., Completions]]:
    """Returns the function `draw` of a `Sampler`, and its program, which is compiled at its first call."""

    def sample(params: Params, prompt: PromptTokens, numbers: Array, temperature: Array, noise: Array) -> Completions:
        def sample_rows(
            shared: tuple[Params, Array], prompt: PromptTokens, numbers: Array, temperature: Array
        ) -> Completions:
            params, noise = shared
            return sample_completions(policy, task, sampling, params, prompt, numbers, temperature, step_key(*noise))

        return map_rows(sample_rows, devices)((params, noise), prompt, numbers, temperature)

    run_program = jit_on_devices(sample, 0, devices=devices)

    def draw(params: Params, prompts: Prompts, numbers: Array, temperature: Array, noise: np.ndarray) -> Completions:
        noise = to_devices(noise, devices, axes=None)
        return run_program(params, prompts.tokens, numbers, temperature, noise)

    return draw, run_program


def sample_completions(
    policy: Policy,
    task: Task,
    sampling: SamplingConfig,
    params: Params,
    prompt: PromptTokens,
    numbers: jax.Array,
    temperature: jax.Array,
    key: jax.Array,
) -> Completions:
    """Samples completions of prompts with the options of a run.

    Args:
      policy, params: The functions and parameters of the model.
      task: Supplies the special tokens.
      sampling: The sampling options of the run.
      prompt: The prompts, `[N, P]`.
      numbers: The numbers of the completions, int32 `[N, G]`, which key the noise of each.
      temperature: The temperature of each completion, `[N, G]`.
      key: The key of the noise, consumed.
    """
    policy = policy if sampling.narrow_decoding else policy._replace(select=None)
    return sample_groups(
        policy,
        params,
        prompt,
        numbers,
        key,
        max_tokens=sampling.max_tokens,
        temperature=temperature,
        limits=limits_of(sampling.top_k, sampling.top_p, sampling.min_p),
        pad_id=task.pad_id,
        support_size=sampling.kept_tokens,
        **task.ends,
    )


def read_text(task: Task, completions: Completions, content: Any, place: tuple[int, int]) -> Completion:
    """Returns the text of a completion, from its tokens where `content` `[N, G, T]` is true."""
    ids = completions.completion_ids[place][content[place]].tolist()
    return task.read(ids, truncated=bool(completions.truncated[place]))


def find_spans(
    task: Task, completions: Completions, texts: Sequence[Completion], spans: np.ndarray, rewards: Rewards
) -> np.ndarray:
    """Converts the spans of texts from characters to tokens."""
    for number, (parts, text) in enumerate(zip(spans, texts, strict=True) if any(spans) else ()):
        spans[number] = spans_in_tokens(parts, text, lambda ids: task.read(ids, truncated=False))
    return spans.reshape(completions.truncated.shape)


def report_texts(task: Task, graded: Graded, step: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the mean number of spans if there are any, and a warning if no completion ended."""
    numbers = [len(parts) for parts in graded.parts.ravel()]
    warnings = {}
    if graded.truncated.all() and not task.open_ended:
        warnings["truncated"] = (
            "no completion ended within max_tokens: raise max_tokens, name a text that ends completions with stop, or "
            "check that the model was trained to write EOS"
        )
    return {"spans_mean": float(np.mean(numbers))} if any(numbers) else {}, warnings


def span_columns(
    graded: Graded, number: int, completions: Completions, place: int, texts: Sequence[Completion]
) -> dict[str, Any]:
    """Returns the spans of a group as half-open ranges of tokens, and their rewards, if there are any."""
    if not any(graded.parts.ravel()):
        return {}
    parts = graded.parts[number]
    return {
        "spans": [[[part.start, part.end] for part in row] for row in parts],
        "span_rewards": [[part.reward for part in row] for row in parts],
    }


ONE_TURN = Interaction("spans", check_one_turn, make_text_draw, read_text, find_spans, report_texts, span_columns)


def interaction_of(task: Task) -> Interaction:
    """Returns the functions for the completions of a task."""
    if task.environment is None:
        return ONE_TURN
    from grpo_jax.rl.episodes import EPISODES  # loaded only for tasks with an environment

    return EPISODES
