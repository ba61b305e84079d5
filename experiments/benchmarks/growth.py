"""How do the time and memory of an iteration grow when one of its sizes doubles?

The sizes are N prompts of P tokens, G completions of T tokens each, and a vocabulary of V tokens. The benchmark doubles
one size at a time for a small decoder, and compiles and runs `sample`, `score` and `learn`. Seconds are medians.
Megabytes are the temporary memory that the compiler plans. The table also has the operations that the work
needs (`shapes.cost_of`):

- If they double and the time does not, a fixed cost was hidden before.
- If the time grows faster, something is lost.

The memory of `score` and `learn` stops growing when a batch is computed in pieces. The run takes five minutes on a CPU
core.

  python -m experiments.benchmarks.growth
"""

import json
from dataclasses import dataclass, replace
from typing import Literal

import tyro
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.programs import measure
from experiments.benchmarks.shapes import TINY, Shape, cost_of
from grpo_jax.config import recipe

Size = Literal["N", "P", "G", "T", "V"]
PROGRAMS = ("sample", "score", "learn")
BASE = {"N": 4, "P": 64, "G": 4, "T": 64, "V": 1024}


@dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    sizes: tuple[Size, ...] = ("N", "P", "G", "T", "V")
    """Which are doubled."""
    doublings: int = 3
    """How often."""
    repeats: int = 3
    """Timed calls of each program, after one that is not."""


def main(config: Config) -> None:
    """Prints a table and a line of JSON."""
    sizes = {"": BASE} | {
        f"{name} {BASE[name] * 2**times}": BASE | {name: BASE[name] * 2**times}
        for name in config.sizes
        for times in range(1, config.doublings + 1)
    }
    console, results = Console(), dict[str, dict[str, float]]()
    for name, of in sizes.items():
        with console.status(f"{len(results)} of {len(sizes)} sizes"):
            results[name] = measured(of, config.repeats)
    show(console, results)
    print(json.dumps(results))


def measured(sizes: dict[str, int], repeats: int) -> dict[str, float]:
    """Measures the seconds and temporary MB of each program, and counts the operations of a forward pass."""
    shape = Shape(replace(TINY, vocab_size=sizes["V"]), sizes["N"], sizes["P"], sizes["T"], sizes["G"])
    run = recipe(num_prompts=sizes["N"], group_size=sizes["G"], max_tokens=sizes["T"])
    results = measure(shape, run, PROGRAMS, repeats)
    seconds = {f"{name}_s": results[f"{name}_s"] for name in PROGRAMS}
    memory = {f"{name}_mb": 1000 * results[f"{name}_temporary_gb"] for name in PROGRAMS}
    return seconds | memory | {"gflop": cost_of(shape, element=4).forward_flops / 1e9}


def show(console: Console, results: dict[str, dict[str, float]]) -> None:
    """Prints a row for each size. The first row has the base sizes."""
    base = ", ".join(f"{name} {size}" for name, size in BASE.items())
    table = Table("", *next(iter(results.values())), box=None, title=f"{base}, with one size changed")
    for name, numbers in results.items():
        table.add_row(name or "as above", *(f"{number:.3g}" for number in numbers.values()))
    console.print(table)


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m experiments.benchmarks.growth", description=__doc__))
