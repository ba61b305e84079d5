"""Times the parts of a step of a pretrained model, compared with matrix products on the same machine.

The step is that of the race "real": GRPO on sums, 8 prompts with 8 completions of up to 5 tokens. Each part is compiled
as a separate program. The parts and a matrix product in both dtypes take turns, and the table has medians. Operations
count as in `benchmarks.programs`. Use `taskset -c 0` for one core.

  python -m experiments.benchmarks.parts --model DIR --dtype bfloat16
"""

import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.peers.recorder import peak_mb
from experiments.benchmarks.race.races import RACES, race_config, race_task
from experiments.benchmarks.shapes import Shape, cost_of
from grpo_jax.config import ModelOptions
from grpo_jax.models.config import Dtype
from grpo_jax.models.params.tree import split
from grpo_jax.models.rows.pieces import choose_pieces
from grpo_jax.rl.source import completion_numbers, group_temperatures, to_batch
from grpo_jax.rl.types import noise_of
from grpo_jax.rl.update import loss_of, with_fixed_reference
from grpo_jax.step import TrainState, accumulate_grads
from grpo_jax.training.prepare import Prepared, RunOptions, load_models, prepare

ROWS, INNER, COLUMNS = 8192, 512, 2048  # of the matrix products
PASSES = {"sample": 1, "score": 1, "forward": 1, "forward and backward": 3}  # operations in forward passes


@dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    model: str
    """Folder of a base model such as Gemma 3 270M."""
    dtype: Dtype = "float32"
    """Dtype of activations and matrix products."""
    repeats: int = 5
    """Timed calls of each part, after one that is not."""


def main(config: Config) -> None:
    """Prints a row for each part, and the peak memory of the process."""
    run = race_config(RACES["real"], steps=1, seed=0)
    options = RunOptions(run, ModelOptions(config.model, dtype=config.dtype))
    models = load_models(options.model, run)
    pretrained = models["policy"]
    prepared = prepare(options, models, race_task("real", pretrained, seed=0))
    calls, batch = measure(prepared, config.repeats)
    (prompts, group, tokens), width = batch.completion_ids.shape, batch.prompt.ids.shape[1]
    forward = cost_of(Shape(pretrained.config, prompts, width, tokens, group), element=4).forward_flops
    table = Table("part", "s", "CPU s", "temporary GB", "GFLOP per CPU s", title=f"{config}, prompts of {width} tokens")
    for name, rows in calls.items():
        seconds, cpu, temporary = map(statistics.median, zip(*rows[1:], strict=True))
        operations = PASSES.get(name, 0) * forward or 2 * ROWS * INNER * COLUMNS * name.startswith("product")
        table.add_row(name, f"{seconds:.3f}", f"{cpu:.3f}", f"{temporary:.2f}", f"{operations / cpu / 1e9:.0f}")
    Console().print(table)
    print(f"peak memory: {peak_mb() / 1e3:.1f} GB")


def measure(prepared: Prepared[RunOptions], repeats: int) -> tuple[dict[str, list[tuple[float, float, float]]], Any]:
    """Measures seconds, CPU seconds and temporary GB of each call, by part. Also returns the last batch."""
    programs, method, compiled, results = prepared.programs, prepared.programs.method, {}, defaultdict(list)
    run, (trained, frozen) = programs.config, split(with_fixed_reference(prepared.params, programs.config))
    state, prompt = programs.initial_state(trained), jax.tree.map(jnp.asarray, prepared.task.prompts(0).tokens)
    numbers, temperature = jnp.asarray(completion_numbers(run.sampling)), jnp.asarray(group_temperatures(run.sampling))
    others = frozen, state.extras
    sizes: Any = {"piece_tokens": run.piece_tokens}
    product, loss = partial(jnp.matmul, preferred_element_type=jnp.float32), partial(loss_of, method)

    def update(state: TrainState, grads: Any) -> TrainState:
        updates, opt_state = method.optimizer.update(grads, state.opt_state, state.params)
        return state._replace(params=optax.apply_updates(state.params, updates), opt_state=opt_state)

    def timed(name: str, program: Any, *args: Any) -> Any:
        if name not in compiled:
            compiled[name] = program.lower(*args).compile()
        began, cpu = time.perf_counter(), time.process_time()
        out = jax.block_until_ready(compiled[name](*args))
        seconds = time.perf_counter() - began, time.process_time() - cpu
        results[name].append((*seconds, compiled[name].memory_analysis().temp_size_in_bytes / 1e9))
        return out

    for _ in range(repeats + 1):
        for dtype in ("float32", "bfloat16"):
            factors = jnp.ones((ROWS, INNER), dtype), jnp.ones((INNER, COLUMNS), dtype)
            timed(f"product, {dtype}", jax.jit(product), *factors)
        arguments = prompt, numbers, temperature, noise_of(0, 0, 0)
        completions = timed("sample", programs.sampler.program, trained["policy"], *arguments)
        batch = to_batch(prompt, temperature, completions)
        batch = batch._replace(**timed("score", programs.score_program, trained, state.extras, frozen, batch))
        weights = batch.completion_mask / batch.completion_mask.sum()
        weighted = batch._replace(advantages=numbers % 2 - 0.5, weights=weights)
        timed("forward", jax.jit(lambda *args: loss(*args)[0]), others, trained, weighted)
        backward = jax.jit(partial(accumulate_grads, loss, partial(choose_pieces, **sizes)))
        grads = timed("forward and backward", backward, (others, trained), weighted)[0][0]
        state = timed("optimizer", jax.jit(update, donate_argnums=0), state, grads)
        del grads
    return results, batch


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m experiments.benchmarks.parts", description=__doc__))
