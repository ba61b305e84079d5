"""How fast are products of row groups, each with a different kernel?

Each row of a decode step or update is a token at one of its experts. One projection multiplies the rows in four ways:
by `models.experts.grouped_product`, by `jax.lax.ragged_dot`, with every expert for every token, and as one matrix with
as much work. The table shows medians and the compiler's planned memory. It takes under a minute on two CPU cores.

  python -m experiments.benchmarks.grouped
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

from grpo_jax.models.experts import grouped_product


@dataclass(frozen=True)
class Options:
    """The sizes of the mixture, and the number of timed calls."""

    experts: int = 16
    per_token: int = 4
    width: int = 256
    inner: int = 192
    tokens: tuple[int, ...] = (8, 64, 1024)
    repeats: int = 11


def timed(fn: Callable[..., jax.Array], *args: jax.Array, repeats: int) -> str:
    """Returns the median milliseconds, and the MiB of temporary arrays."""
    program = jax.jit(fn).lower(*args).compile()
    jax.block_until_ready(program(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(program(*args))
        times.append(time.perf_counter() - start)
    planned: Any = program.memory_analysis()
    return f"{1e3 * statistics.median(times):.1f} ms, {planned.temp_size_in_bytes / 2**20:.0f} MiB"


def main(options: Options) -> None:
    """Prints the table."""
    table = Table("tokens", "grouped_product", "ragged_dot", "every expert", "one matrix")
    kernels = 0.02 * jax.random.normal(jax.random.key(0), (options.experts, options.width, options.inner))
    for tokens in options.tokens:
        rows = jax.random.normal(jax.random.key(1), (tokens * options.per_token, options.width))
        chosen = jax.random.randint(jax.random.key(2), (len(rows),), 0, options.experts)
        grouped = rows, kernels, jnp.bincount(chosen, length=options.experts)
        cells = (
            timed(grouped_product, *grouped, repeats=options.repeats),
            timed(jax.lax.ragged_dot, *grouped, repeats=options.repeats),
            timed(lambda x, w: jnp.einsum("md,xdf->xmf", x, w), rows[:tokens], kernels, repeats=options.repeats),
            timed(jnp.matmul, rows, kernels[0], repeats=options.repeats),
        )
        table.add_row(str(tokens), *cells)
    Console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Options))
