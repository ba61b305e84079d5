"""What the tests of signals start: an experiment of which each step takes a tenth of a second.

MODE says where it hangs, in C code.
"""

import hashlib
import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path

from bigrams import TASK, train_grpo

from grpo_jax.commands import flags
from grpo_jax.config import GRPOConfig, recipe

STEPS = itertools.count(1)


@dataclass(frozen=True)
class Config:
    """Options of the run."""

    train: GRPOConfig = recipe(steps=12, num_prompts=8, group_size=4, max_tokens=3, checkpoint_every=50)
    output: flags.RunConfig = flags.RunConfig(Path("run"))


def hang():
    print("hangs", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)


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
    train_grpo(TASK._replace(reward=reward), config.train, folder)
    print("finished", flush=True)


if __name__ == "__main__":
    flags.main(Config, run, None)
