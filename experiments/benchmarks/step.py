"""How long does one iteration of GRPO take, and which of its parts take the time?

The benchmark has a decoder with random weights, completions of full length (except for long-tail), a separate
reference, one optimizer step per rollout, and float32. TRL's and Tunix's trainers do the same work at the same shapes.
Each line describes one iteration as `grpo_jax.training.phases` runs it, with text and rewards. The first line includes
the compilation.

The last line has medians over the iterations from the third to the last but one, the peak memory of the process, and
the speed of a matrix product for comparison. The last iteration waits for two updates, because the loop reads each
update while it samples the next rollout. Use `taskset -c 0` for one core.

  python -m experiments.benchmarks.step --shape tiny
"""

import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import tyro
from rich.console import Console

from experiments.benchmarks.peers.recorder import peak_mb
from experiments.benchmarks.programs import matmul_flops
from experiments.benchmarks.shapes import SHAPES, ShapeName, end_ids, random_prompts
from grpo_jax.config import recipe
from grpo_jax.data.prompts import Prompts
from grpo_jax.data.types import Completion, Example
from grpo_jax.models.policy import decoder_policy
from grpo_jax.rl.grpo import grpo_method
from grpo_jax.rl.programs import make_method_programs
from grpo_jax.runs import progress
from grpo_jax.runs.folder import RunFolder
from grpo_jax.tasks.task import Task
from grpo_jax.training.phases import train

_BEGAN = time.perf_counter() - time.process_time()  # approximately the start of the process


@dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    shape: ShapeName = "tiny"
    """tiny, tiny256, tiny1024: a million parameters and completions of 32, 256 or 1,024 tokens. skewed, one-long: tiny
    with log-normal prompts of up to 1,024 tokens, or one such prompt in 512. group32, one-prompt: tiny with groups of
    32 or 64. vocabulary: tiny with 151,936 tokens. prompt2048: tiny with prompts of 2,048. mid, prompt: 48 million, and
    completions of 128 tokens or prompts of 512. long-tail: mid with completions of 64 tokens in the mean and 256 at
    most. The others are for accelerators."""
    steps: int = 9
    """Iterations."""
    piece_tokens: int = 0
    """Largest number of tokens of a piece of an update; 0: chosen by the library."""
    cache: bool = False
    """Read compiled programs from the cache of the commands."""


def main(config: Config) -> None:
    """Prints a line of JSON for each iteration, and a line of medians."""
    if config.cache:
        progress.use_cache()
    shape, marks = SHAPES[config.shape], dict[int, tuple[float, float]]()
    policy = decoder_policy(shape.model)
    run_config = recipe(
        steps=config.steps,
        num_prompts=shape.num_prompts,
        group_size=shape.group_size,
        max_tokens=shape.completion,
        piece_tokens=config.piece_tokens,
        checkpoint_every=0,
        rollouts_every=0,
    )

    def prompts(step: int) -> Prompts:
        """Returns the prompts of a step, and records the time: the loop calls this last when an iteration begins."""
        marks[step] = time.perf_counter(), time.process_time()
        return random_prompts(shape, step)

    def reward(examples: Sequence[Example], completions: Sequence[Completion]) -> list[float]:
        return [sum(text.ids) % 97 / 97 for text in completions]

    vocab_size = shape.model.vocab_size
    ends = tuple(end_ids(shape)) or (-1,)
    task = Task(prompts, reward, prompts(0), lambda ids: " ".join(map(str, ids)), ends, 0, vocab_size)
    params = jax.block_until_ready(jax.jit(policy.init)(jax.random.key(0)))
    ready = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder) / "run", {}, console=Console(quiet=True))
        programs = make_method_programs(grpo_method(policy, run_config), policy, task, run_config)
        jax.block_until_ready(train({"policy": params}, task, run_config, run, programs, phase="grpo"))
        marks[config.steps] = time.perf_counter(), time.process_time()
        lines = iterations(run.lines("times.jsonl"), marks)
    for line in lines:
        print(json.dumps(line), flush=True)
    print(json.dumps(summary(lines, ready, marks[1][0])))


def iterations(times: list[dict[str, Any]], marks: Mapping[int, tuple[float, float]]) -> list[dict[str, Any]]:
    """Adds seconds and CPU seconds to each line, from one request for prompts to the next."""
    lines = []
    for number, line in enumerate(times):
        (start, cpu), (end, end_cpu) = marks[number], marks[number + 1]
        lines.append({"step": number + 1, "seconds": end - start, "cpu_seconds": end_cpu - cpu} | line)
    return lines


def summary(lines: list[dict[str, Any]], ready: float, first_end: float) -> dict[str, Any]:
    """Returns medians over iterations, and the startup time, compilations and memory of the process."""
    warm = lines[2:-1] or lines[-1:]
    names = ("seconds", "cpu_seconds", "rollout_s", "reward_s", "update_s")
    medians = {name: round(statistics.median(line.get(name, 0.0) for line in warm), 4) for name in names}
    return medians | {
        "ready_to_first_step": round(first_end - ready, 2),
        "start_to_first_step": round(first_end - _BEGAN, 2),
        "compilations": lines[-1]["compilations"],
        "peak_rss_mb": round(peak_mb()),
        "matmul_gflops": round(matmul_flops("float32") / 1e9, 1),
    }


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m experiments.benchmarks.step", description=__doc__))
