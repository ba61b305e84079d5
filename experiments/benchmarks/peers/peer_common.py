"""Common parts of the peers' runners: the workload's shapes, clocks, lines of JSON.

Imports nothing of the peers, so that their threads can be set up before they load.
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
os.environ |= {name: os.environ.get(name, value) for name, value in (THREADS | OFFLINE | QUIET | ON_CPU).items()}

BETA, CLIP, LEARNING_RATE, MAX_GRAD_NORM, ROPE_THETA, NORM_EPS = 0.04, 0.2, 1e-6, 1.0, 10000.0, 1e-6


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    prompts: int
    group: int
    prompt: int
    completion: int
    mean_length: int = 0  # of completions, in tokens, where a uniform choice of tokens ends them; 0: none ends

    @property
    def init(self) -> float:
        """Deviation of the weights: so small where completions end that all tokens are about equally likely."""
        return 0.001 if self.mean_length else 0.02

    @property
    def ends(self) -> list[int]:
        """The ids that end a completion."""
        return list(range(self.vocabulary // self.mean_length)) if self.mean_length else []

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def completions(self) -> int:
        return self.prompts * self.group

    @property
    def parameters(self) -> int:
        """Parameters of a tied Qwen2 decoder: biases on q, k and v, two norms a layer and one at the end."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * q + 2 * kv) + q + 2 * kv
        layer = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * layer + self.hidden + self.vocabulary * self.hidden


SHAPES = {
    "tiny": Shape(128, 4, 4, 2, 512, 64, 16, 8, 16, 32),
    "mid": Shape(512, 8, 8, 4, 2048, 32000, 4, 8, 16, 128),
    "tiny256": Shape(128, 4, 4, 2, 512, 64, 16, 8, 16, 256),
    "tiny1024": Shape(128, 4, 4, 2, 512, 64, 4, 8, 16, 1024),
    "prompt": Shape(512, 8, 8, 4, 2048, 32000, 1, 8, 512, 64),
    "long-tail": Shape(512, 8, 8, 4, 2048, 32000, 4, 8, 16, 256, mean_length=64),
}


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps; the first is reported like the others")
    return parser.parse_args()


def prompts(shape: Shape, steps: int) -> list[str]:
    """Texts of exactly `shape.prompt` ids in decimal. Of the last 4 ids of the vocabulary none is in a prompt."""
    import numpy as np

    ids = np.random.default_rng(1).integers(0, shape.vocabulary - 4, (shape.prompts * steps, shape.prompt))
    return [" ".join(map(str, row)) for row in ids.tolist()]


def reward_of(ids: list[int]) -> float:
    """Trivial, the same for both peers, and different within every group."""
    return sum(ids) % 97 / 97


class Steps:
    """Times steps end to end, and prints a line of JSON for each: a step begins where the one before ended.

    `cpu_seconds` are those of all threads of the process: less than `seconds` on one core means that others had the
    core. `generate` are the seconds inside `generating`.
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
