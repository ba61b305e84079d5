"""How fast does the held-out reward rise in this library, in TRL and in Tunix?

All train the same model with the same prompts, reward, lengths, loss and optimizer, one process after another, on the
same core or on a GPU. The clock starts with the process, so it includes imports and compilation. It stands still while
a snapshot of the policy is saved. Afterwards this library evaluates all snapshots on held-out prompts with the same
noise.

Each library runs with its defaults, and each peer also with settings that are faster on a core of a CPU. An entrant
with a warm cache reads the programs that the entrant with a cold cache compiled. The figure shows the better settings
of each peer, the table all of them. Each peer has a separate environment, which the first call makes.

The race "words" makes the stories of a small pretrained model happier, and "real" teaches a larger base model the sums
of experiments.real. The race "arithmetic" needs no model: it exports the warm start of experiments.arithmetic. A
process whose folder is complete is not repeated.

  python -m experiments.benchmarks.race --race words --model DIR
"""

import dataclasses
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

import grpo_jax
from experiments.benchmarks import peers
from experiments.benchmarks.peers.environments import FOLDER, PLAN, environment, run_plan
from experiments.benchmarks.peers.recorder import LINES, Plan
from experiments.benchmarks.race import results
from experiments.benchmarks.race.plans import export_warm_start, make_plan
from experiments.benchmarks.race.races import DIFFERENCES, ENTRANTS, RACES, Entrant
from grpo_jax.commands.flags import refusing
from grpo_jax.errors import UsageError, user_path
from grpo_jax.options import Size, at_least, check_known, check_ranges
from grpo_jax.runs.files import read_lines, read_object, write_json

# Programs of any size and compilation time are kept, as by this library's commands.
CACHE = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
DEVICES = {
    "cpu": {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""},
    "gpu": {"JAX_PLATFORMS": "", "CUDA_VISIBLE_DEVICES": "0"},
}


@dataclass(frozen=True)
class Config:
    """Options of the race."""

    race: Literal["words", "arithmetic", "real", "gsm8k"] = "arithmetic"
    """words: happier stories. arithmetic: additions, with a model that is made here. real: sums, with a base model.
    gsm8k: word problems on a GPU, with a model that solves some of them."""
    model: Path | None = None
    """Folder of the initial model. words needs a Llama trained on TinyStories, real a base model like Gemma 3 270M."""
    data: Path | None = None
    """Folder with GSM8K's train.jsonl and test.jsonl."""
    steps: Annotated[int, at_least(2)] | None = None
    """Steps of each process. None: those of the race."""
    seeds: Size = 3
    """Number of random seeds, from 0."""
    entrants: tuple[str, ...] = tuple(ENTRANTS)
    """Libraries with their settings, by the names in races.py."""
    cores: tuple[int, ...] = (0,)
    """Cores that each process may use."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """auto: the first GPU, if the machine has an NVIDIA GPU. The peers' environments then need builds for it."""
    out: Path = Path("runs/race")
    """Folder of the races. A race with other options needs another folder."""
    folder: Path = FOLDER
    """Folder in which the peers' environments are made."""
    pip_options: tuple[str, ...] = ()
    """Further arguments of pip install, such as an index with the CPU build of torch."""


def main(config: Config) -> None:
    """Runs all processes, evaluates their snapshots, and writes race.json and race.svg."""
    check_ranges(config)
    check_known(config.entrants, ENTRANTS)
    device = config.device if config.device != "auto" else "gpu" if shutil.which("nvidia-smi") else "cpu"
    race, out = RACES[config.race], user_path(config.out).absolute() / config.race
    out.mkdir(parents=True, exist_ok=True)
    if config.race != "arithmetic" and config.model is None:
        made_for = {
            "words": "a model that was trained on TinyStories",
            "real": "a base model",
            "gsm8k": "a model that solves some of GSM8K",
        }
        raise UsageError(f"--model is needed: name the folder of {made_for[config.race]}")
    if config.race == "gsm8k" and config.data is None:
        raise UsageError("--data is needed: name the folder with GSM8K's train.jsonl and test.jsonl")
    data = str(user_path(config.data).absolute()) if config.data else ""
    model = export_warm_start(out) if config.model is None else user_path(config.model).absolute()
    check_model(model, config.entrants)
    steps = config.steps or race.steps
    folders: dict[str, list[Path]] = {name: [] for name in config.entrants}
    for seed in range(config.seeds):
        for name in config.entrants:
            folder = out / f"seed{seed}" / name.replace(", ", "-").replace(" ", "_")
            folders[name].append(folder)
            plan = make_plan(config.race, ENTRANTS[name], model, folder, steps=steps, seed=seed, data=data)
            if not is_complete(folder, plan):
                print(f"seed {seed}: {name}", file=sys.stderr, flush=True)
                run(plan, ENTRANTS[name], device, config)
    reward = results.heldout_reward(config.race, model, data)
    entries = {
        name: [results.entry_of(folder, model, race.learning_rate, reward) for folder in seeds]
        for name, seeds in folders.items()
    }
    summary = results.summaries(entries)
    report = {
        "race": config.race,
        "grpo_jax": grpo_jax.__version__,
        **race._asdict(),
        "steps": steps,
        "device": device,
        "machine": machine(config),
    }
    write_json(out / "race.json", report | summary | {"differences": DIFFERENCES, "runs": entries})
    drawn = results.drawn_entrants(summary["entrants"])
    curves = {name: [entry["curve"] for entry in entries[name]] for name in drawn}
    results.save_figure(out / "race.svg", f"{config.race}, {config.seeds} seeds", curves)
    console = Console()
    console.print(results.table(summary))
    console.print(f"levels are shares of the mean final reward of all, {summary['final']:.3f}", highlight=False)
    console.print(f"log-probabilities differ by at most {summary['log_probability_difference']:.1g}", highlight=False)
    console.print("What could not be made equal:", *DIFFERENCES, sep="\n- ", highlight=False, soft_wrap=True)


def check_model(model: Path, entrants: Sequence[str]) -> None:
    """Refuses entrants that cannot load the model, before hours of work.

    Raises:
      UsageError: Tunix's runner would have to load another model than a Llama.
    """
    kind = read_object(model / "config.json").get("model_type")
    if kind != "llama" and any(ENTRANTS[name].library == "tunix" for name in entrants):
        raise UsageError(f"the model is a {kind}, but Tunix's runner loads only Llamas: leave it out of --entrants")


def is_complete(folder: Path, plan: Plan) -> bool:
    """Returns true if the process of this plan has ended.

    Raises:
      UsageError: The folder has another plan.
    """
    file = folder / PLAN
    if not file.exists():
        return False
    if read_object(file) != dataclasses.asdict(plan):
        raise UsageError(f"{folder} holds a race with other options: name another --out")
    return any("logprobs" in line for line in read_lines(folder / LINES, {}))


def run(plan: Plan, entrant: Entrant, device: str, config: Config) -> None:
    """Runs the process of a plan, with the cache of its entrant.

    Args:
      plan: The plan, whose folder is emptied.
      entrant: The entrant.
      device: "cpu" or "gpu".
      config: The options of the race.
    """
    folder, settings = Path(plan.folder), DEVICES[device]
    shutil.rmtree(folder, ignore_errors=True)
    if entrant.cache:
        cache = folder.with_name(f"cache_{entrant.cache}")
        if entrant.is_cold:
            shutil.rmtree(cache, ignore_errors=True)
        settings = settings | CACHE | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    is_own = entrant.library == "own"
    python = sys.executable if is_own else environment(entrant.library, config.folder, config.pip_options)
    package = __package__ if is_own else peers.__name__
    run_plan(plan, f"{package}.{entrant.library}_runner", python, config.cores, settings)


def machine(config: Config) -> dict[str, Any]:
    """Returns the processor and the number of its cores that a process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {"processor": (names or [platform.processor()])[0], "cores": len(config.cores)}


if __name__ == "__main__":
    options = tyro.cli(Config, prog="python -m experiments.benchmarks.race", description=__doc__)
    with refusing():
        main(options)
