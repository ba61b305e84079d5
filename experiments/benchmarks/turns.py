"""Measures where the time of episodes goes: to the host, to prompts and replies, or to sampling.

A decoder with random weights plays three turns, in float32. One in 16 tokens of the vocabulary ends a turn, so turns
have 16 tokens on average. Replies are half as long again. The last turn has no reply, so half of all tokens are the
environment's. The results are medians of several rollouts, after one to warm up:

- "host" is the time that devices wait: for reading tokens, text, the environment, and sending replies.
- "prefill" is the time to compute prompts and replies.
- "decode" is the time to sample.

  python -m experiments.benchmarks.turns
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from experiments.benchmarks.shapes import SHAPES, Shape, ShapeName, random_prompts
from grpo_jax.config import SamplingConfig, recipe
from grpo_jax.data.episodes import Key, Reply, Transcript, environment
from grpo_jax.data.types import Example, rng
from grpo_jax.devices import ONE_DEVICE, to_devices, to_numpy
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.policy import decoder_policy
from grpo_jax.rl.episodes import EpisodePrograms, episode_programs, play, sample_turns
from grpo_jax.rl.source import completion_numbers, group_temperatures
from grpo_jax.rl.types import SAMPLING, noise_of
from grpo_jax.tasks.task import Task

TURN = 16  # mean number of policy tokens in a turn
PARTS = ("host", "prefill", "decode")


@dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    shape: ShapeName = "tiny"
    """Shape of `experiments.benchmarks.step`: the decoder, prompts and groups of it."""
    turns: int = 3
    """Turns of an episode."""
    rollouts: int = 5
    """Rollouts that are measured."""


def main(config: Config) -> None:
    """Prints a line of JSON."""
    shape = SHAPES[config.shape]
    task = game(shape)
    sampling = recipe(
        num_prompts=shape.num_prompts,
        group_size=shape.group_size,
        max_tokens=2 * TURN * config.turns,
        max_turns=config.turns,
        environment_tokens=2 * TURN * config.turns,
    ).sampling
    policy = decoder_policy(shape.model)
    params = jax.block_until_ready(jax.jit(policy.init)(jax.random.key(0)))
    programs = episode_programs(policy, task, sampling, ONE_DEVICE)
    # With the same width and a single sampled token, this program measures only the prompts.
    one = replace(sampling, max_tokens=1, environment_tokens=sampling.completion_width - 1)
    prompts_alone = episode_programs(policy, task, one, ONE_DEVICE)[0]
    rollouts = [measured(programs, prompts_alone, params, task, sampling, step) for step in range(config.rollouts + 1)]
    results = {name: statistics.median(line[name] for line in rollouts[1:]) for name in rollouts[0]}
    whole = sum(results[f"{name}_s"] for name in PARTS)
    shares = {f"{name}_share": results[f"{name}_s"] / whole for name in PARTS}
    print(json.dumps({name: round(value, 4) for name, value in (results | shares).items()}))


def measured(
    programs: EpisodePrograms,
    prompts_alone: Callable[..., Any],
    params: Params,
    task: Task,
    sampling: SamplingConfig,
    step: int,
) -> dict[str, float]:
    """Measures the seconds of each part of a rollout, and counts its tokens."""
    prefill, whole, aside = [0.0], [0.0], [0.0]

    def timed(program: Callable[..., Any], total: list[float], *arguments: Any) -> Any:
        began = time.perf_counter()
        result = jax.block_until_ready(program(*arguments))
        total[0] += time.perf_counter() - began
        return result

    def first_turn(*arguments: Any) -> Any:
        timed(prompts_alone, prefill, *arguments)
        return timed(programs[0], whole, *arguments)

    def next_turn(params: Params, episodes: Any, replies: Any, counts: Any, continues: Any) -> Any:
        # If no episode continues, the program only computes replies. It needs a copy because it donates its argument.
        copy = timed(jax.tree.map, aside, jnp.copy, episodes)
        timed(programs[1], prefill, params, copy, replies, counts, jnp.zeros_like(continues))
        return timed(programs[1], whole, params, episodes, replies, counts, continues)

    prompts = task.prompts(step)
    inputs = to_devices((prompts.tokens, completion_numbers(sampling), group_temperatures(sampling)))
    began = time.perf_counter()
    timed_programs, noise = (first_turn, next_turn), noise_of(0, SAMPLING, step)
    turns = sample_turns(timed_programs, params, inputs, noise, ONE_DEVICE)
    out = play(turns, to_numpy(inputs[1]), noise, prompts.examples, task, sampling)
    host = time.perf_counter() - began - prefill[0] - whole[0] - aside[0]
    turn, separate = to_numpy((out.turn, out.completion_mask))
    return {
        "host_s": host,
        "prefill_s": prefill[0],
        "decode_s": whole[0] - prefill[0],
        "turns_mean": float(turn.max(-1).mean()),
        "tokens": int((turn > 0).sum()),
        "environment_share": float(((turn > 0) & ~separate).sum() / (turn > 0).sum()),
    }


def game(shape: Shape) -> Task:
    """Returns a task with random prompts, replies in proportion to the actions' lengths, and no reward."""
    vocab_size, prompts = shape.model.vocab_size, partial(random_prompts, shape)

    def reply(example: Example, transcript: Transcript, key: Key) -> Reply:
        # The last turn has no reply, so earlier replies are half as long again.
        count = max(1, 3 * len(transcript[-1].action.ids) // 2)
        return Reply(ids=rng(*key).integers(0, vocab_size, count).tolist())

    ends = tuple(range(vocab_size // TURN))
    task = Task(prompts, lambda *_: [], prompts(0), lambda ids: " ".join(map(str, ids)), ends, 0, vocab_size)
    return task._replace(environment=environment(reply, lambda text: []))


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m experiments.benchmarks.turns", description=__doc__))
