"""Runs with an environment that are killed, again and again, end with the same bytes."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Async replies of random latency in processes; a checkpoint every other step.
SCRIPT = """
import sys
from pathlib import Path
from test_episodes import CONFIG, DECODER, PAD, TASK, V, decoder_params, encode, open_run
from grpo_jax.config import with_options
from grpo_jax.rewards.environments import environment_in_processes
from grpo_jax.runs.checkpoint import params_sha256
from grpo_jax.training.grpo import train

if __name__ == "__main__":
    config = with_options(CONFIG, steps=12, checkpoint_every=2)
    with environment_in_processes("slow.py:slow", encode, workers=2) as environment:
        task = TASK._replace(environment=environment)
        state = train(DECODER, decoder_params(), task, config, open_run(Path("run"), config))
    Path("sha").write_text(params_sha256(state.params))
"""
SLOW = """
import asyncio, random
from grpo_jax.data.episodes import Reply
from grpo_jax.data.types import rng

async def slow(example, transcript, key):
    await asyncio.sleep(random.random() / 50)
    return Reply("".join(str(int(x)) for x in rng(*key).integers(0, 8, min(len(transcript[-1].said), 3))))
"""


def start(folder: Path) -> subprocess.Popen:
    (folder / "slow.py").write_text(SLOW)
    path = [str(Path(__file__).parent), *filter(None, sys.path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    return subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=folder, env=environment, stdout=subprocess.DEVNULL)


@pytest.mark.slow
def test_ten_kills_within_turns_updates_and_saves_change_no_byte(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    began = time.monotonic()
    assert start(whole).wait(timeout=300) == 0
    dice, longest = random.Random(0), time.monotonic() - began
    for _ in range(10):
        process = start(cut)
        try:
            process.wait(timeout=dice.uniform(0.3, 0.9) * longest)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert start(cut).wait(timeout=300) == 0
    assert (cut / "sha").read_text() == (whole / "sha").read_text()
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert (cut / "run" / name).read_bytes() == (whole / "run" / name).read_bytes()
