"""How long does one iteration of GRPO take in this library, in TRL and in Tunix?

This library with its defaults, TRL's GRPOTrainer and Tunix's GRPOLearner take turns on the same core, with the same
decoder, losses and settings. Each peer has a separate environment, which the first call makes with pip (TRL's takes 2
GB with the CPU build of torch, more with another).

A number of the table is the median over the iterations of a process from the third to the last but one, because our
last iteration waits for two updates. A ratio compares two processes of one round: the peer's CPU time over ours.

  python -m experiments.benchmarks.peers --shape tiny --rounds 3
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from subprocess import PIPE
from tempfile import TemporaryDirectory
from typing import Literal

import jax
import tyro
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from experiments.benchmarks.peers.environments import FOLDER, environment, run_on, run_plan
from experiments.benchmarks.peers.recorder import LINES, Plan
from experiments.benchmarks.shapes import SHAPES, CpuShape, Shape, end_ids, random_prompts
from experiments.new_models import save_new_model
from grpo_jax.models.policy import decoder_policy
from grpo_jax.runs.files import read_lines, write_json


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
    pythons: dict[str, str] = {peer: environment(peer, config.folder, config.pip_options) for peer in config.peers}
    rounds = []
    with TemporaryDirectory() as folder:
        plan = shape_plan(SHAPES[config.shape], config.steps, Path(folder))
        for number in range(config.rounds):
            took = {}
            for name in ("ours", *config.peers):
                took[name] = own_medians(config) if name == "ours" else peer_medians(plan, name, pythons[name], config)
                figures = ", ".join(f"{key} {value:.3g}" for key, value in took[name].items())
                print(f"round {number + 1} of {config.rounds}: {name}: {figures}", file=sys.stderr, flush=True)
            rounds.append(took)
    Console().print(table(rounds))


def shape_plan(shape: Shape, steps: int, folder: Path) -> Plan:
    """Returns the plan of a shape, and writes its model with random weights and a tokenizer of decimal ids."""
    model, home = shape.model, folder / "model"
    unknown, pad, eos = range(model.vocab_size - 3, model.vocab_size)
    save_new_model(home, decoder_policy(model).init(jax.random.key(0)), model)
    words = Tokenizer(WordLevel({str(i): i for i in range(model.vocab_size)}, unk_token=str(unknown)))
    words.pre_tokenizer = WhitespaceSplit()
    special = {"unk_token": str(unknown), "pad_token": str(pad), "eos_token": str(eos)}
    words.save(str(home / "tokenizer.json"))
    write_json(home / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})
    ends = [*end_ids(shape), eos]
    write_json(home / "generation_config.json", {"eos_token_id": ends})
    prompts = [random_prompts(shape, step, below=unknown) for step in range(steps)]
    ids = [[row[mask].tolist() for row, mask in zip(p.tokens.ids, p.tokens.mask, strict=True)] for p in prompts]
    return Plan(
        folder=str(folder),
        model=str(home),
        seed=0,
        prompts=[[" ".join(map(str, row)) for row in step] for step in ids],
        ids=ids,
        reward="sum_of_numbers",
        group=shape.group_size,
        max_tokens=shape.completion,
        ends=ends,
        pad_id=pad,
        learning_rate=1e-6,
        full_length=not end_ids(shape),
        settings={"gradient_checkpointing": False},
    )


def own_medians(config: Config) -> dict[str, float]:
    """Returns the medians of this library's iterations."""
    options = ["--shape", config.shape, "--steps", str(config.steps)]
    done = run_on(config.cores, [sys.executable, "-m", "experiments.benchmarks.step", *options], stdout=PIPE)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    rows = [line | {"sampling": line["rollout_s"]} for line in lines if "step" in line]
    return medians(rows[2:-1] or rows[-1:], lines[-1]["peak_rss_mb"])


def peer_medians(plan: Plan, peer: str, python: str, config: Config) -> dict[str, float]:
    """Returns the medians of a peer's iterations, each from the end of a rollout to the end of the next."""
    settings = plan.settings if peer == "trl" else {}
    run_plan(replace(plan, settings=settings), f"{__package__}.{peer}_runner", python, config.cores, {})
    lines = [line for line in read_lines(Path(plan.folder) / LINES, {}) if "step" in line]
    rows = [
        {name: after[name] - before[name] for name in ("seconds", "cpu_seconds")} | {"sampling": after["sampling"]}
        for before, after in pairwise(lines)
    ]
    return medians(rows[1:] or rows, lines[-1]["peak_mb"])


def medians(rows: Sequence[Mapping[str, float]], peak_mb: float) -> dict[str, float]:
    """Returns medians of seconds, CPU seconds and seconds of sampling over iterations; and peak memory in MB."""
    names = ("seconds", "cpu_seconds", "sampling")
    return {name: statistics.median(row[name] for row in rows) for name in names} | {"peak_mb": peak_mb}


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
