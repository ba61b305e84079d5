"""How fast are whole iterations of `grpo-jax train` on one accelerator?

The script writes a model with random weights into a folder and trains it with the command's defaults in bfloat16. An
iteration samples, decodes, rewards, scores and learns. Each shape runs three times: with completions of full length,
with lengths that follow a geometric distribution, and for two iterations with the programs of the first run in the
compilation cache.

Unless the shape trains adapters, another process times the three compiled programs one at a time, and computes their
share of the device's speed and bandwidth. The results are a table and a JSON file that name the device, the versions
and the commit. A shape takes at most ten minutes on an H100.

  python -m experiments.benchmarks.accelerator qwen2.5-0.5b
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from experiments import timing
from experiments.benchmarks.shapes import SHAPES, Shape
from experiments.new_models import save_new_model
from experiments.planning.models import MODELS
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.decoder.transformer import param_shapes

ShapeName = Literal["qwen2.5-0.5b", "qwen2.5-1.5b", "qwen3-0.6b", "qwen2.5-7b-lora", "tiny"]
LORA = ("--lora-rank", "16", "--param-dtype", "bfloat16")
# name -> decoder and rollout, options of the run
RUNS: Mapping[str, tuple[Shape, tuple[str, ...]]] = {
    **{name: (SHAPES[name], ()) for name in ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen3-0.6b", "tiny")},
    "qwen2.5-7b-lora": (Shape(MODELS["Qwen2.5-7B"], 8, 64, 256), LORA),
}
RUNS_OF_SHAPE = ("full", "geometric", "cached")
REWARD = "def reward(rows, texts): return [len(text) % 97 / 97 for text in texts]\n"
ROOT = Path(__file__).parents[2]
VERSIONS = (
    "import json, jax, jaxlib, flax; "
    "print(json.dumps({'device': jax.devices()[0].device_kind, 'jax': jax.__version__, "
    "'jaxlib': jaxlib.__version__, 'flax': flax.__version__}))"
)


@dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    shape: Annotated[ShapeName, tyro.conf.Positional] = "qwen2.5-0.5b"
    """The decoder and its rollout. The last one is for a CPU."""
    steps: int = 8
    """Iterations of a run."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of activations and matrix products."""
    out: Path = Path("runs/accelerator")
    """Folder for the JSON of each shape."""


class Measured(NamedTuple):
    """The speed and memory of one run, from its files."""

    iteration_s: float  # the median without the first two iterations
    tokens_per_s: float  # sampled tokens by whole iterations
    mean_length: float
    update_mfu: float | None  # the logged MFU; None if the device's speed is not known
    first_step_s: float  # with compilation
    compilation_s: float  # time of the first iteration minus the median
    compilations: int  # programs compiled in the first iteration
    cache_reads: int  # programs read from the compilation cache instead
    peak_gib: float
    planned_gib: float
    mismatch: float  # mean probability ratio of trainer and sampler


def main(config: Config) -> None:
    """Measures one shape; prints a table and writes the JSON."""
    jax.config.update("jax_platforms", "cpu")  # the accelerator is for the processes that this one starts
    shape, options = RUNS[config.shape]
    report: dict[str, Any] = {"shape": config.shape, "dtype": config.dtype, "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    config.out.mkdir(parents=True, exist_ok=True)
    report |= {"commit": commit(), **json.loads(in_child("versions", config.out, "-c", VERSIONS).splitlines()[-1])}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_inputs(folder, shape)
        for name in RUNS_OF_SHAPE:
            write_endings(folder / "model", shape.model.vocab_size, mean_length(shape, name))
            report[name] = measure(folder, name, shape, config, options)._asdict()
    if not options:
        programs = "-m", "experiments.benchmarks.programs", "--shape", config.shape, "--dtype", config.dtype
        text = in_child("programs one at a time", config.out, *programs)
        report["programs"] = json.loads(text.splitlines()[-1])
    show(report)
    (config.out / f"{config.shape}.json").write_text(json.dumps(report, indent=1) + "\n")


def mean_length(shape: Shape, run: str) -> int:
    """Returns the mean length of completions without a cut-off: a quarter of the limit, or so long that few end."""
    return shape.completion // 4 if run == "geometric" else 100 * shape.completion


def commit() -> str:
    """Returns the commit of the working tree, or nothing outside of a repository."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def in_child(name: str, out: Path, *args: str, **variables: str) -> str:
    """Returns the output of a Python process. Only it takes the accelerator's memory.

    Args:
      name: The name of the process, for the seconds.jsonl in `out`.
      out: The folder of the results.
      args: The arguments of Python.
      variables: Variables of the environment to add.

    Raises:
      SystemExit: The process failed; the message has the end of its output.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # it would replace the cache of the run
    done = timing.run_timed(name, out, [sys.executable, *args], env=environment, capture_output=True)
    if done.returncode:
        sys.exit(f"error: a process ended with status {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


# ---- inputs


def write_inputs(folder: Path, shape: Shape) -> None:
    """Writes a model with random weights and a tokenizer of words, prompts, and a reward."""
    import tokenizers

    # With such small weights, all tokens are almost equally likely.
    model = replace(shape.model, max_position_embeddings=shape.prompt + shape.completion)
    save_new_model(folder / "model", random_params(model), model)
    words = ["<pad>", "</s>", *(f"t{number}" for number in range(2, model.vocab_size))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "model/tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "</s>"}
    (folder / "model/tokenizer_config.json").write_text(json.dumps(names))
    numbers = np.random.default_rng(0).integers(2, model.vocab_size, (4 * shape.num_prompts + 8, shape.prompt))
    rows = [{"prompt": " ".join(f"t{number}" for number in row)} for row in numbers]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARD)


def random_params(model: ModelConfig) -> Any:
    """Returns parameters as arrays of the host: norms are 1, and all others small."""
    generator = np.random.default_rng(0)

    def leaf(path: Any, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        if getattr(path[-1], "key", "") == "scale":
            return np.ones(shape.shape, np.float32)
        return 0.001 * generator.standard_normal(shape.shape, np.float32)

    return jax.tree_util.tree_map_with_path(leaf, param_shapes(model))


def write_endings(folder: Path, vocab_size: int, length: int) -> None:
    """Sets the number of EOS tokens so that a uniform choice of tokens gives this mean length."""
    count = max(1, vocab_size // length)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(1, count + 1))}))


# ---- one run


def measure(folder: Path, name: str, shape: Shape, config: Config, options: tuple[str, ...]) -> Measured:
    """Trains with the command, and reads the run's speed from its files."""
    run, sampling = folder / name, (shape.num_prompts, shape.group_size, shape.completion)
    steps = 2 if name == "cached" else config.steps
    numbers = zip(("--num-prompts", "--group-size", "--max-tokens"), map(str, sampling), strict=True)
    args = ["--model", f"{folder}/model", "--task", f"{folder}/rows.jsonl", "--reward", f"{folder}/rewards.py:reward"]
    args += [word for pair in numbers for word in pair]
    args += ["--steps", str(steps), "--dtype", config.dtype, "--run-dir", str(run)]
    args += ["--num-heldout", "1", "--eval-samples", "1", "--eval-every", "0", "--checkpoint-every", "0", *options]
    command = "-c", "from grpo_jax.commands import main; main()", "train"
    cache = str(folder / f"cache-{name.replace('cached', 'full')}")
    answer = in_child(f"grpo-jax train, {name}, {steps} iterations", config.out, *command, *args, XDG_CACHE_HOME=cache)
    times, metrics = (read(run / name) for name in ("times.jsonl", "metrics.jsonl"))
    return summary(times, [line for line in metrics if line["step"]], answer)


def read(file: Path) -> list[dict[str, Any]]:
    """Returns the lines of a file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def summary(times: list[dict[str, Any]], metrics: list[dict[str, Any]], answer: str) -> Measured:
    """Returns the numbers of a run.

    Args:
      times, metrics: The lines of the iterations.
      answer: The output of the run, which contains its plan.
    """
    ends = [line["s"] for line in times]
    seconds = [later - earlier for earlier, later in pairwise(ends)]
    iteration = statistics.median(seconds[1:] or seconds)
    tokens = statistics.median(line["tokens"] for line in metrics[2:] or metrics)
    mfu = [line["mfu"] for line in times[2:] if "mfu" in line]
    planned = re.search(r"about ([\d.]+) of", answer)
    return Measured(
        iteration_s=iteration,
        tokens_per_s=tokens / iteration,
        mean_length=statistics.mean(line["length_mean"] for line in metrics),
        update_mfu=statistics.median(mfu) if mfu else None,
        first_step_s=ends[0],
        compilation_s=ends[0] - iteration,
        compilations=times[0]["compilations"],
        cache_reads=times[0]["cache_reads"],
        peak_gib=max(line["peak_memory_mb"] for line in times) / 2**10,
        planned_gib=float(planned[1]) if planned else float("nan"),
        mismatch=statistics.mean(line["first_sampler_mismatch"] for line in metrics),
    )


def show(report: dict[str, Any]) -> None:
    """Prints a column for each run, and a table of the programs."""
    console, versions = Console(), ", ".join(f"{name} {report[name]}" for name in ("jax", "jaxlib", "flax"))
    title = (
        f"{report['shape']}, {report['dtype']}, {report['device']}, {versions}, {report['commit']}, {report['date']}"
    )
    table = Table("", *RUNS_OF_SHAPE, title=title)
    for name in Measured._fields:
        table.add_row(name, *(f"{x:.4g}" if (x := report[run][name]) is not None else "" for run in RUNS_OF_SHAPE))
    console.print(table)
    programs = Table("programs one at a time, completions of full length", "", box=None)
    for name, value in report.get("programs", {}).items():
        if isinstance(value, float):
            programs.add_row(name, f"{value:.4g}")
    console.print(programs)


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m experiments.benchmarks.accelerator", description=__doc__))
