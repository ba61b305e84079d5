"""Shared parts of the peers' runners: the workload's shape, clocks, and lines of JSON.

This module imports no peer, so that `set_up` can run before a peer is loaded.
"""

import argparse
import json
import os
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

CORES = len(os.sched_getaffinity(0))
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(CORES))
OFFLINE = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1")
QUIET = {"OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
BETA, CLIP, LEARNING_RATE, MAX_GRAD_NORM, ROPE_THETA, NORM_EPS = 0.04, 0.2, 1e-6, 1.0, 10000.0, 1e-6
# The options of TRL's GRPOConfig that make it compute what this library computes. The rest are the caller's.
TRL_SETTINGS = {
    "bf16": False,
    "num_iterations": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "beta": BETA,
    "use_bias_correction_kl": False,
    "epsilon": CLIP,
    "loss_type": "grpo",
    "scale_rewards": "group",
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "max_grad_norm": MAX_GRAD_NORM,
    "shuffle_dataset": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}


def set_up() -> None:
    """Sets variables of the environment that are not set, which peers read when they are imported."""
    os.environ |= {name: os.environ.get(name, value) for name, value in (THREADS | OFFLINE | QUIET | ON_CPU).items()}


@dataclass(frozen=True)
class Shape:
    """A decoder and its rollouts, from the file that `python -m experiments.benchmarks.peers` writes."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    group: int
    completion: int  # tokens
    init: float  # standard deviation of the weights
    ends: list[int]  # ids that end a completion; none: all completions have full length
    prompts: list[list[list[int]]]  # the ids of each step's prompts

    @property
    def longest_prompt(self) -> int:
        return max(len(ids) for step in self.prompts for ids in step)

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def completions(self) -> int:
        return len(self.prompts[0]) * self.group

    @property
    def parameters(self) -> int:
        """The number of parameters of a tied Qwen2 decoder, with biases on q, k and v, and 2L + 1 norms."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * q + 2 * kv) + q + 2 * kv
        layer = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * layer + self.hidden + self.vocabulary * self.hidden

    @property
    def texts(self) -> list[str]:
        """All prompts in order, as decimal ids."""
        return [" ".join(map(str, ids)) for step in self.prompts for ids in step]


def shape_from_arguments(description: str) -> Shape:
    """Reads the shape from the JSON file that is the only argument."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("shape", help="JSON file that python -m experiments.benchmarks.peers writes")
    with open(parser.parse_args().shape) as file:
        return Shape(**json.load(file))


def reward_of(ids: list[int]) -> float:
    """Returns a trivial reward, which is the same for both peers and varies within every group."""
    return sum(ids) % 97 / 97


class Steps:
    """A clock that prints a line of JSON for each step; a step begins at the end of the step before.

    `cpu_seconds` counts all threads of the process: on one core, less than `seconds` means that other processes used
    the core. `generate` counts the seconds inside `generating`.
    """

    def __init__(self):
        self.count, self.generated = 0, 0.0
        self.start, self.cpu = time.perf_counter(), time.process_time()

    @contextmanager
    def generating(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.generated += time.perf_counter() - began

    def end(self, lengths: Sequence[int]) -> None:
        self.count += 1
        times = {
            "seconds": time.perf_counter() - self.start,
            "cpu_seconds": time.process_time() - self.cpu,
            "generate": self.generated,
        }
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"step": self.count, **times, "tokens": sum(lengths), "peak_rss_mib": peak}), flush=True)
        self.generated = 0.0
        self.start, self.cpu = time.perf_counter(), time.process_time()
