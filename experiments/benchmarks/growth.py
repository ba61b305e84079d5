"""How does the memory of an iteration grow as one size of it doubles, and does the estimate grow with it?

Of a small decoder, N prompts of P tokens with G completions of T tokens and a vocabulary of V tokens are doubled one at
a time. Each time `sample` and `learn` are compiled, and not run: megabytes that the compiler plans, arguments included,
beside the estimate that runs are planned by. Minutes on two CPU cores.

  python -m experiments.benchmarks.growth --sizes P T
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import matplotlib
import tyro
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.shapes import TINY
from experiments.lowered import lowered, planned_bytes
from grpo_jax.config import recipe
from grpo_jax.planning.memory import FLOAT32, Shape, estimate, num_params
from grpo_jax.planning.pieces import fastest_piece_tokens

Size = Literal["N", "P", "G", "T", "V"]


@dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    sizes: tuple[Size, ...] = ("N", "P", "G", "T", "V")
    """Which are doubled."""
    doublings: int = 3
    """How often."""
    plot: Path | None = None
    """File for a picture; None: none."""


class Point(NamedTuple):
    """A size, and MB of each program: estimated, and planned by the compiler."""

    size: int
    sample: tuple[float, float]
    learn: tuple[float, float]


def main(config: Config) -> None:
    """Prints a table, and draws it."""
    table, curves = Table("", "", "sample", "compiled", "learn", "compiled", box=None), dict[str, list[Point]]()
    for name in config.sizes:
        curves[name] = [point(name, 2**times) for times in range(config.doublings + 1)]
        for one in curves[name]:
            table.add_row(name, str(one.size), *(f"{number:.1f}" for number in (*one.sample, *one.learn)))
    Console().print(table)
    if config.plot:
        draw(curves, config.plot)


def point(name: str, factor: int) -> Point:
    """The memory of an iteration, one of whose sizes is multiplied."""
    sizes = {"N": 8, "P": 32, "G": 4, "T": 32, "V": TINY.vocab_size}
    sizes[name] *= factor
    model = replace(TINY, vocab_size=sizes["V"])
    run = recipe(num_prompts=sizes["N"], group_size=sizes["G"], max_tokens=sizes["T"])
    on_cpu = jax.default_backend() == "cpu"
    shape = Shape(sizes["N"], sizes["G"], sizes["P"], sizes["T"], on_cpu=on_cpu)
    of = estimate(model, shape._replace(piece_tokens=fastest_piece_tokens(on_cpu=on_cpu)))
    estimated = {"sample": FLOAT32 * num_params(model) + of.sampling, "learn": of.params + of.optimizer + of.learning}
    made = lowered(model, run, sizes["P"], programs=("sample", "learn"))
    found = {program: sum(planned_bytes(made[program].compile()).values()) for program in estimated}
    return Point(sizes[name], *((estimated[program] / 1e6, found[program] / 1e6) for program in ("sample", "learn")))


def draw(curves: dict[str, list[Point]], file: Path) -> None:
    """A panel a size: points are compiled programs, lines the estimate."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(curves), figsize=(3 * len(curves), 3), sharey=True, squeeze=False)
    for panel, (name, points) in zip(panels[0], curves.items(), strict=True):
        for program, colour in (("sample", "C0"), ("learn", "C1")):
            values = [getattr(one, program) for one in points]
            panel.loglog([one.size for one in points], [value[0] for value in values], colour, label=program)
            panel.loglog([one.size for one in points], [value[1] for value in values], f"{colour}o")
        panel.set_xlabel(name)
    panels[0][0].set_ylabel("MB")
    panels[0][0].legend()
    figure.savefig(file, bbox_inches="tight")


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m experiments.benchmarks.growth", description=__doc__))
