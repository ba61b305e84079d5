"""How long does one iteration of GRPO take in this library, in TRL and in Tunix?

This library with its defaults, TRL's GRPOTrainer and Tunix's GRPOLearner take turns on the same core, with the same
decoder, losses and settings. Each peer has a separate environment, which the first call makes with pip (TRL's takes 2
GB with the CPU build of torch, more with another). A number of the table is the median over the iterations of a process
from the third to the last but one, because our last iteration waits for two updates. A ratio compares two processes of
one round: the peer's CPU time over ours.

  python -m experiments.benchmarks.peers --shape tiny --rounds 3
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.peers.environments import FOLDER, environment, run_on
from experiments.benchmarks.shapes import SHAPES, CpuShape, Shape, end_ids, random_prompts


@dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    shape: CpuShape = "tiny"
    """Decoder and rollout, as in benchmarks.step. All but tiny and tiny256 take up to a quarter of an hour a round."""
    peers: tuple[Literal["trl", "tunix"], ...] = ("trl", "tunix")
    """Libraries that are compared with this one."""
    steps: int = 6
    """Iterations of each process."""
    rounds: int = 1
    """How often all take their turn."""
    cores: tuple[int, ...] = (0,)
    """Cores that each process may use."""
    folder: Path = FOLDER
    """Folder in which the peers' environments are made."""
    pip_options: tuple[str, ...] = ()
    """Further arguments of pip install, such as an index with the CPU build of torch."""


def main(config: Config) -> None:
    """Prints a line when each process ends, and a table of medians and ratios."""
    options = ["--shape", config.shape, "--steps", str(config.steps)]
    commands = {"ours": [sys.executable, "-m", "experiments.benchmarks.step", *options]}
    shape_file = config.folder / f"{config.shape}.json"
    config.folder.mkdir(parents=True, exist_ok=True)
    shape_file.write_text(json.dumps(peers_shape(SHAPES[config.shape], config.steps)))
    for peer in config.peers:
        commands[peer] = [
            environment(peer, config.folder, config.pip_options),
            "-m",
            f"{__package__}.{peer}_step",
            str(shape_file),
        ]
    rounds = []
    for number in range(config.rounds):
        took = {}
        for name, command in commands.items():
            took[name] = measured(command, config.cores)
            figures = ", ".join(f"{key} {value:.3g}" for key, value in took[name].items())
            print(f"round {number + 1} of {config.rounds}: {name}: {figures}", file=sys.stderr, flush=True)
        rounds.append(took)
    Console().print(table(rounds))


def peers_shape(shape: Shape, steps: int) -> dict[str, Any]:
    """Returns the decoder, the rollout and the prompts of each step for `peer_common.Shape`."""
    model = shape.model
    # TRL's tokenizer uses the last ids of the vocabulary.
    prompts = [random_prompts(shape, step, below=model.vocab_size - 4) for step in range(steps)]
    return {
        "hidden": model.hidden_size,
        "layers": model.num_hidden_layers,
        "heads": model.num_attention_heads,
        "kv_heads": model.num_key_value_heads,
        "ffn": model.intermediate_size,
        "vocabulary": model.vocab_size,
        "group": shape.group_size,
        "completion": shape.completion,
        "init": model.initializer_range,
        "ends": end_ids(shape),
        "prompts": [[ids[mask].tolist() for ids, mask in zip(p.ids, p.mask, strict=True)] for p in prompts],
    }


def measured(command: Sequence[str], cores: Sequence[int]) -> dict[str, float]:
    """Returns medians of seconds, CPU seconds and seconds of sampling over iterations; and peak memory in MB."""

    done = run_on(cores, command, stdout=subprocess.PIPE)
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    steps = [line for line in lines if "step" in line]
    memory = lines[-1].get("peak_rss_mb") or lines[-1]["peak_rss_mib"] * 2**20 / 1e6
    selected = steps[2:-1] or steps[-1:]

    def median(*names: str) -> float:
        """Returns the median of the first of these names that the lines have."""
        return statistics.median(next(line[name] for name in names if name in line) for line in selected)

    return {
        "seconds": median("seconds"),
        "cpu_seconds": median("cpu_seconds"),
        "sampling": median("generate", "rollout_s"),
        "peak_mb": memory,
    }


def table(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> Table:
    """Returns a table with a row for each library and round, and rows of median ratios."""
    visible = Table("round", "", "s", "of which sampling", "CPU s", "peak MB", "its CPU s over ours")
    ratios: dict[str, list[float]] = {peer: [] for peer in rounds[0] if peer != "ours"}
    for number, took in enumerate(rounds):
        for name, values in took.items():
            ratio = values["cpu_seconds"] / took["ours"]["cpu_seconds"]
            ratios.get(name, []).append(ratio)
            figures = (f"{values[key]:.3g}" for key in ("seconds", "sampling", "cpu_seconds"))
            visible.add_row(str(number + 1), name, *figures, f"{values['peak_mb']:.0f}", f"{ratio:.2f}")
    for peer, results in ratios.items():
        visible.add_row("median", peer, "", "", "", "", f"{statistics.median(results):.2f}")
    return visible


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m experiments.benchmarks.peers", description=__doc__))
