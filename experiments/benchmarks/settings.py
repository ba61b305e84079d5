"""Which settings of XLA and of the library make `sample` and `learn` fast on this accelerator?

Each line compiles one program of a model with random weights, calls it once to warm up and then three times, and writes
the median as soon as it is known. Completions never end. A line that fails is written with its error.

  python -m experiments.benchmarks.settings
  python -m experiments.benchmarks.settings --rehearse
"""

import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import tyro

from experiments.benchmarks.shapes import TINY
from experiments.paper.lowered import lowered, planned_bytes
from experiments.planning.models import MODELS
from grpo_jax.config import recipe
from grpo_jax.functional.products import assume_traits
from grpo_jax.models.config import AttentionKind, ModelConfig
from grpo_jax.planning.memory import GB

_NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
_WITH_LOOPS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE",
    "xla_gpu_graph_min_graph_size": "1",
}
_SIDE_BY_SIDE = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
_CALLS = 3


class Line(NamedTuple):
    """A program, and what differs from the library's own way to compile it."""

    name: str
    program: str = "sample"
    options: Mapping[str, Any] = {}  # of XLA
    traits: Mapping[str, Any] = {}
    attention: AttentionKind = "auto"
    num_prompts: int = 32


LINES = (
    Line("as it is"),
    Line("kernels side by side", options=_SIDE_BY_SIDE),
    Line("plain attention", attention="shared"),
    Line("plain attention, kernels side by side", attention="shared", options=_SIDE_BY_SIDE),
    Line("512 completions", num_prompts=64),
    Line("1,024 completions", num_prompts=128),
    Line("no graphs", options=_NO_GRAPHS),
    Line("loops in graphs", options=_WITH_LOOPS),
    Line("no products by Triton", options={"xla_gpu_enable_triton_gemm": False}),
    Line("no autotuning", options={"xla_gpu_autotune_level": "0"}),
    *(Line(f"slices at once: {count}", "learn", traits={"slices_at_once": count}) for count in (4, 2, 1)),
    Line("plain attention", "learn", attention="shared"),
)


@dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    rehearse: bool = False
    """Run all lines in small, on a CPU."""
    out: Path = Path("runs/settings")
    """Folder of lines.jsonl."""


def main(config: Config) -> None:
    """Measures each line and writes it."""
    config.out.mkdir(parents=True, exist_ok=True)
    for line in LINES:
        try:
            results = measure(line, config.rehearse)
        except Exception as error:  # the other lines are worth their time
            results = {"error": " ".join(str(error).split())[:300]}
        row = json.dumps({"line": line.name, "program": line.program, **results})
        print(row, flush=True)
        with (config.out / "lines.jsonl").open("a") as file:
            file.write(row + "\n")


def measure(line: Line, is_small: bool) -> dict[str, Any]:
    """Returns the seconds to compile and of a call, the milliseconds of a decoding step, and the planned memory."""
    model: ModelConfig = TINY if is_small else replace(MODELS["Gemma-3-270M"], dtype="bfloat16")
    model = replace(model, attention=line.attention, rounding="stochastic")
    prompt, tokens = (4, 8) if is_small else (128, 256)
    run = recipe(num_prompts=line.num_prompts // (16 if is_small else 1), group_size=8, max_tokens=tokens)
    with assume_traits(**line.traits):
        program = lowered(model, run, prompt, programs=(line.program,))[line.program]
    began = time.perf_counter()
    compiled = program.compile(compiler_options=dict(line.options))
    compilation_s = time.perf_counter() - began
    seconds = [timed(compiled, program) for _ in range(1 + _CALLS)][1:]
    step = {"ms_of_step": 1000 * statistics.median(seconds) / tokens} if line.program == "sample" else {}
    temporary = planned_bytes(compiled)["temporary"] / GB
    return {"compilation_s": compilation_s, "s": statistics.median(seconds), **step, "temporary_gb": temporary}


def timed(compiled: jax.stages.Compiled, program: jax.stages.Lowered) -> float:
    """Returns the seconds of one call. `learn` takes its state's memory, so that each call has new arguments."""
    arguments, options = jax.block_until_ready(jax.tree.map(_argument, program.args_info))
    began = time.perf_counter()
    jax.block_until_ready(compiled(*arguments, **options))
    return time.perf_counter() - began


def _argument(x: Any) -> jax.Array:
    """Returns small weights, tokens 0, masks of whole texts, or the random key 0."""
    return jnp.full(x.shape, 0.01 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype == bool, x.dtype)


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m experiments.benchmarks.settings", description=__doc__))
