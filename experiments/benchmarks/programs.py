"""How fast is each of the three programs of an iteration, as a share of the device's speed?

It runs `sample`, `score` and `learn` as `grpo_jax.training.phases` compiles them, with a decoder with random weights,
completions of full length, a separate reference, and one optimizer step per rollout. Seconds are medians. Operations
and bytes are the least that the work needs (`shapes.cost_of`); recomputation does not count. They are compared with a
matrix product and a copy of memory, measured in the same run.

  python -m experiments.benchmarks.programs --shape qwen2.5-0.5b --dtype bfloat16
"""

import json
import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.shapes import SHAPES, Shape, ShapeName, cost_of
from grpo_jax.config import GRPOConfig, recipe
from grpo_jax.data.prompts import Prompts
from grpo_jax.models.config import AttentionKind, Dtype, Remat
from grpo_jax.models.params.tree import split
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.rows.geometry import PromptTokens
from grpo_jax.rl.grpo import grpo_method
from grpo_jax.rl.programs import make_method_programs
from grpo_jax.rl.scorers import score_rollout
from grpo_jax.rl.source import completion_numbers, group_temperatures, to_batch
from grpo_jax.rl.types import RewardArrays, noise_of
from grpo_jax.rl.update import models_of
from grpo_jax.tasks.task import Task


@dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    shape: ShapeName = "tiny"
    """Decoder and rollout, of experiments/benchmarks/shapes.py."""
    programs: tuple[str, ...] = ("sample", "score", "learn")
    """Which to time."""
    dtype: Dtype = "float32"
    """Dtype of activations and matrix products."""
    attention: AttentionKind = "auto"
    """The same option as in a run."""
    remat: Remat = "none"
    """The same option as in a run."""
    piece_tokens: int = 0
    """Largest number of tokens of a piece of an update; 0: chosen by the library."""
    repeats: int = 3
    """Timed calls of each program, after one that is not."""
    trace: str = ""
    """Folder for a profile of one more call of each program, to be opened with Perfetto or XProf; empty: none."""


def main(config: Config) -> None:
    """Prints a table, and the same numbers as a line of JSON."""
    shape = SHAPES[config.shape]
    model = replace(shape.model, dtype=config.dtype, attention=config.attention, remat=config.remat)
    run = recipe(
        num_prompts=shape.num_prompts,
        group_size=shape.group_size,
        max_tokens=shape.completion,
        piece_tokens=config.piece_tokens,
    )
    flops, bandwidth = matmul_flops(config.dtype), copy_bandwidth()
    cost = cost_of(shape, element=jnp.dtype(config.dtype).itemsize)
    report: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__} | vars(config)
    report |= {"matmul_tflops": flops / 1e12, "copy_gb_s": bandwidth / 1e9}
    report |= measure(shape._replace(model=model), run, config.programs, config.repeats, config.trace)
    for name, operations in (("sample", 1), ("score", 1), ("learn", 3)):  # in forward passes
        if name in config.programs:
            report[f"{name}_flops_share"] = operations * cost.forward_flops / report[f"{name}_s"] / flops
    if "sample" in config.programs:
        tokens = shape.num_prompts * shape.group_size * shape.completion
        report["sample_tokens_s"] = tokens / report["sample_s"]
        report["sample_bandwidth_share"] = cost.sample_bytes / report["sample_s"] / bandwidth
    memory = jax.devices()[0].memory_stats() or {}
    report["peak_gb"] = memory.get("peak_bytes_in_use", 0) / 1e9
    show(report)


def measure(
    shape: Shape, run: GRPOConfig, names: Collection[str], repeats: int = 3, trace: str = ""
) -> dict[str, float]:
    """Measures the seconds, compilation seconds and temporary memory of programs, by name.

    Args:
      shape: The decoder and the rollout.
      run: The configuration of a run with the same rollout.
      names: The programs to measure.
      repeats: The number of timed calls of each program.
      trace: The folder for profiles; "": none.
    """
    model, policy = shape.model, decoder_policy(shape.model)
    timed = partial(_timed, repeats=repeats, trace=trace)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, model.vocab_size, (shape.num_prompts, shape.prompt)).astype(np.int32)
    inputs = Prompts(PromptTokens(ids, np.ones(ids.shape, bool)), [])
    prompt = jax.tree.map(jnp.asarray, inputs.tokens)
    task = Task(lambda _: inputs, lambda *_: [], inputs, str, (-1,), 0, model.vocab_size)
    method = grpo_method(policy, run)
    programs = make_method_programs(method, policy, task, run)
    params = jax.jit(policy.init)(jax.random.key(0))
    trained, frozen = split({"policy": params, "reference": params})
    numbers, temperature = jnp.asarray(completion_numbers(run.sampling)), jnp.asarray(group_temperatures(run.sampling))
    arguments = prompt, numbers, temperature, noise_of(0, 0, 0)
    results: dict[str, float] = {}
    assert programs.sampler.program
    if "sample" in names:
        completions = timed("sample", programs.sampler.program, results, params, *arguments)
    else:
        shapes = jax.eval_shape(programs.sampler.program, params, *arguments)
        completions = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        completions = completions._replace(completion_mask=jnp.ones_like(completions.completion_mask))
    batch = to_batch(prompt, temperature, completions)
    if "score" in names:
        models = models_of(trained, frozen, {})
        fields = timed("score", jax.jit(partial(score_rollout, method, run)), results, models, batch)
        if "sample" in names:  # the parameters are the same, so only rounding differs
            results["mismatch"] = float(jnp.mean(jnp.abs(batch.sampler_logprobs - fields["ref_logprobs"])))
    if "learn" in names:
        batch = batch._replace(ref_logprobs=jnp.zeros(batch.completion_ids.shape))
        rewards = RewardArrays(jnp.asarray(rng.random(numbers.shape, np.float32)), numbers >= 0)
        state = programs.initial_state(trained)  # a copy, because the start remains as the reference
        timed("learn", programs.learn, results, state, frozen, batch, rewards, jnp.zeros(2, jnp.uint32))
    return results


def _timed(name: str, program: Any, results: dict[str, float], *args: Any, repeats: int, trace: str) -> Any:
    """Times several calls and returns the last result. `learn` returns the state for the next call first."""
    began = time.perf_counter()
    compiled = program.lower(*args).compile()
    results[f"{name}_compile_s"] = time.perf_counter() - began
    if memory := compiled.memory_analysis():
        results[f"{name}_temporary_gb"] = memory.temp_size_in_bytes / 1e9

    def call(args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        out = jax.block_until_ready(compiled(*args))
        return out, (out[0], *args[1:]) if name == "learn" else args

    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        out, args = call(args)
        seconds.append(time.perf_counter() - began)
    results[f"{name}_s"] = statistics.median(seconds[1:])
    if trace:
        with jax.profiler.trace(f"{trace}/{name}"):
            out, args = call(args)
    return out


def show(report: dict[str, Any]) -> None:
    """Prints a row for each number, then JSON."""
    table = Table("", "", show_header=False, box=None)
    for name, value in report.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console().print(table)
    print(json.dumps(report), flush=True)


def matmul_flops(dtype: str) -> float:
    """Measures the FLOP/s of a large matrix product with float32 accumulation, best of five."""
    size = 1024 if jax.default_backend() == "cpu" else 8192
    a = (jax.random.normal(jax.random.key(0), (size, size)) / size**0.5).astype(dtype)  # products stay as large
    product = jax.jit(lambda x: jnp.matmul(x, a, preferred_element_type=jnp.float32).astype(a.dtype))
    return 2 * size**3 / best_of_five(product, a)


def copy_bandwidth() -> float:
    """Measures the bytes read and written per second when adding a number to a large array in place, best of five.

    In place, because a CPU's first write to a new page of memory takes ten times as long as a later write.
    """
    a = jnp.zeros(2**26 if jax.default_backend() == "cpu" else 2**29, jnp.float32)
    return 2 * a.nbytes / best_of_five(jax.jit(lambda a: a + 1, donate_argnums=0), a)


def best_of_five(fn: Callable[[jax.Array], jax.Array], a: jax.Array) -> float:
    """Measures the seconds of a call of `fn` on its last result, over several calls to hide the launch time."""
    a, calls = jax.block_until_ready(fn(a)), 4
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(calls):
            a = fn(a)
        a.block_until_ready()
        seconds.append((time.perf_counter() - began) / calls)
    return min(seconds)


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m experiments.benchmarks.programs", description=__doc__))
