"""Kills runs of every method by SIGKILL and resumes them: they end with the bits of a run that nobody stopped.

A seed draws the moments: a share of a step after a line of metrics, or while a checkpoint is written. A server forks
the runs after it has imported everything, so that a run takes seconds; all runs read programs from one folder.
"""

import importlib
import itertools
import multiprocessing
import os
import random
import re
import shutil
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from command_runs import DPO, EPISODES, GRPO, KTO, MESH, MUON, ONLINE, OWN, PMAP, PPO, REWARD_MODEL, SFT, write_inputs

from grpo_jax.commands import flags, train

FIT = "--steps 5 --checkpoint-every 1"
LONG = f"{FIT} --learning-rate 1e-2 --adam-epsilon 1e-8"
MODULE = "experiments.online_preference"
LOW = f"{GRPO} --reward user.py:low {LONG}"
# name -> virtual devices, arguments, moments of the kills
RUNS = {
    "grpo": (1, LOW, "line save"),
    "ppo": (1, f"{PPO} {LONG}", "line save"),
    "staleness": (1, f"{LOW} --staleness 2 --correction token", "line line"),
    "dynamic_sampling": (1, f"{LOW} --preset dapo --max-rollouts 3", "line"),
    "environment": (1, f"{EPISODES} {LONG} --environment user.py:make", "line save"),
    "delta_nets": (1, f"{LOW} --model qwen3_5", "line save"),
    "lora": (1, f"{LOW} --lora-rank 2", "line save"),
    "own_optimizer": (1, f"{OWN} {FIT} --learning-rate 1e-2", "line save"),
    "muon": (1, f"{MUON} {FIT} --learning-rate 1e-2", "line"),
    "moving_reference": (1, f"{LOW} --ref-sync-steps 2 --ref-mixup-alpha 0.5 --kl-coef 0.1", "line"),
    "adaptive_kl": (1, f"{LOW} --preset rloo --kl-coef 0.1 --kl-target 0.01", "line"),
    "distillation": (1, f"{LOW} --teacher teacher --distillation reverse_kl", "line"),
    "spo_of_a_file": (1, f"{LOW} --preset own.py:spo --constant width=0.3", "line"),
    "reinforce_pp_of_a_file": (1, f"{LOW} --preset own.py:reinforce_pp", "line"),
    "kl_cov_of_a_file": (1, f"{LOW} --preset own.py:kl_cov", "line"),
    "constants_of_sapo": (1, f"{LOW} --preset sapo --constant tau_positive=2 ddof=0", "line"),
    "sft": (1, f"{SFT} {FIT}", "line save"),
    "reward_model": (1, f"{REWARD_MODEL} {FIT}", "line"),
    "dpo": (1, f"{DPO} {FIT}", "line"),
    "kto": (1, f"{KTO} {FIT}", "line"),
    "online_preferences": (1, ONLINE, "line"),
    "pmap": (4, f"{LOW} {PMAP}", "line save"),
    "mesh": (8, f"{LOW} {MESH}", "line line"),
    "sampler_devices": (8, f"{LOW} --devices 8 --sampler-devices 4 --sampler-fsdp 2 --staleness 1", "line save"),
}
COMPARED = ("metrics.jsonl", "rollouts.jsonl", "results.json", "inputs.json")
SAVING = "checkpoints/*/*.orbax-checkpoint-tmp"
PRELOADED = [
    *(f"grpo_jax.commands.{name}" for name in ("train", "grpo", "ppo", "sft", "dpo", "kto", "reward_model")),
    *("transformers.models.auto.tokenization_auto", "PIL.Image", "tensorboardX", "matplotlib.pyplot", MODULE),
]
SECONDS = 300  # after which a process hangs


def start_run(inputs: Path, run: Path, name: str) -> None:
    """Starts or resumes a run in this process, which the server has just forked."""
    import matplotlib.figure

    devices, args, _ = RUNS[name]
    os.environ["XLA_FLAGS"] = re.sub(r"(device_count=)\d+", rf"\g<1>{devices}", os.environ["XLA_FLAGS"])
    os.chdir(inputs)
    matplotlib.figure.Figure.savefig = lambda self, path, *_, **__: Path(path).touch()  # it takes seconds
    resumed = ["--resume"] if (run / "config.json").exists() else args.split()
    argv = [*resumed, "--run-dir", str(run), "--no-compilation-cache"]
    with (inputs / f"{run.name}.log").open("a") as log, redirect_stdout(log), redirect_stderr(log):
        if args == ONLINE:
            experiment = importlib.import_module(MODULE)
            flags.main(experiment.Config, experiment.main, None, argv)
        else:
            train.command(argv)


def count_lines(run: Path) -> int:
    """Returns how many lines of metrics a run has written."""
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def wait_for(process, reached) -> None:
    """Waits until `reached()` is true or the process has ended."""
    while process.is_alive() and not reached():
        time.sleep(0.0005)


@pytest.fixture(scope="module")
def begin(tmp_path_factory):
    """A function that starts a run by name in a process of its own; the runs read one folder of inputs."""
    inputs = tmp_path_factory.mktemp("killed") / "inputs"
    inputs.mkdir()
    write_inputs(inputs)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)

    def begin(name: str, run: Path):
        process = context.Process(target=start_run, args=(inputs, run, name))
        process.start()
        return process

    return begin


def finish(process) -> int:
    """Returns the exit status of a process that ends by itself."""
    process.join(SECONDS)
    return process.exitcode or 0 if not process.is_alive() else (process.kill() or -1000)


def contents(run: Path) -> dict[str, bytes]:
    """Returns the bytes that must be the same: lines of metrics and rollouts, and the SHA-256 of the parameters."""
    return {name: (run / name).read_bytes() for name in COMPARED if (run / name).exists()}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_killed_runs_resume_bit_for_bit(begin, tmp_path, name):
    dice, whole, cut = random.Random(name), tmp_path / f"{name}_whole", tmp_path / f"{name}_cut"
    process, times = begin(name, whole), []
    while process.is_alive():
        times += [time.perf_counter()] * (count_lines(whole) - len(times))
        time.sleep(0.002)
    assert finish(process) == 0
    gaps = sorted(after - before for before, after in itertools.pairwise(times))
    for moment in RUNS[name][2].split():
        line = dice.randint(count_lines(cut), max(count_lines(cut), len(times) - 3))
        process, earlier = begin(name, cut), set(cut.glob(SAVING))
        wait_for(process, lambda line=line: count_lines(cut) > line)
        if moment == "line":
            time.sleep(dice.random() * gaps[len(gaps) // 2])
        else:
            wait_for(process, lambda earlier=earlier: set(cut.glob(SAVING)) - earlier)
        assert process.is_alive(), "the run ended before it was killed"
        process.kill()
        process.join()
    assert finish(begin(name, cut)) == 0
    assert "results.json" in contents(whole)
    assert contents(cut) == contents(whole)
    shutil.rmtree(whole)
