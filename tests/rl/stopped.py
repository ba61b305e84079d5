"""What the tests of signals start: an experiment of which each step takes a tenth of a second.

MODE says where it hangs, in C code.
"""

import hashlib
import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path

from bigrams import PARAMS, POLICY, V

from grpo_jax.config import GRPOConfig, recipe
from grpo_jax.data.types import pad_prompts, rng
from grpo_jax.runs import flags
from grpo_jax.tasks.task import Task
from grpo_jax.train import train

STEPS = itertools.count(1)


@dataclass(frozen=True)
class Config:
    """Options of the run."""

    train: GRPOConfig = recipe(steps=12, num_prompts=8, group_size=4, max_tokens=3, checkpoint_every=50)
    output: flags.RunConfig = flags.RunConfig(Path("run"))


def hang():
    print("hangs", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)


def prompts(step):
    tokens = rng(step).integers(0, 6, (8, 2)).tolist()
    return pad_prompts(tokens, [{"prompt": str(t)} for t in tokens], width=3, pad_id=7)


def reward(examples, completions):
    step = next(STEPS)
    print("step", step, flush=True)
    if os.environ["MODE"] == "step" and step == 3:
        hang()
    time.sleep(0.1)
    return [text.count("3") / 3 for text in completions]


def run(config):
    folder = flags.open_run(config)
    if os.environ["MODE"] == "start":
        hang()
    task = Task(prompts, reward, prompts(999), lambda ids: "".join(map(str, ids)), (6,), 7, V)
    train(POLICY, PARAMS, task, config.train, folder)
    print("finished", flush=True)


if __name__ == "__main__":
    flags.main(Config, run, None)
