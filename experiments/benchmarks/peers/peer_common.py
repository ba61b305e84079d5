"""Common parts of the peers' runners: the workload's shape, clocks, a probe of the machine, lines of JSON.

Imports nothing of the peers, so that their threads can be set up before they load.
"""

import argparse
import json
import os
import resource
import time
from collections.abc import Iterator
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
    """A decoder and its rollouts, as `python -m experiments.benchmarks.peers` writes them."""

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
        """Parameters of a tied Qwen2 decoder: biases on q, k and v, two norms a layer and one at the end."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * q + 2 * kv) + q + 2 * kv
        layer = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * layer + self.hidden + self.vocabulary * self.hidden

    @property
    def texts(self) -> list[str]:
        """All prompts in order; a token is an id in decimal."""
        return [" ".join(map(str, ids)) for step in self.prompts for ids in step]


def shape_from_arguments(description: str) -> Shape:
    """Reads the shape from the JSON file that is the only argument."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("shape", help="JSON file that python -m experiments.benchmarks.peers writes")
    with open(parser.parse_args().shape) as file:
        return Shape(**json.load(file))


def since_process_start() -> float:
    """Seconds since the kernel made this process (to 10 ms): interpreter and imports included."""
    with open("/proc/self/stat") as stat:
        started = int(stat.read().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def peak_mib() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def probe(size: int = 768, repeats: int = 3) -> float:
    """GF/s of numpy's float32 matrix product, the best of a few: what the cores give right now."""
    import numpy as np

    a = np.random.default_rng(0).standard_normal((size, size), dtype=np.float32)
    a @ a
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return round(2 * size**3 / best / 1e9, 1)


def reward_of(ids: list[int]) -> float:
    """Trivial, the same for both peers, and different within every group."""
    return sum(ids) % 97 / 97


def say(kind: str, **fields) -> None:
    rounded = {k: round(v, 4) if isinstance(v, float) and abs(v) >= 1e-3 else v for k, v in fields.items()}
    print(json.dumps({"kind": kind, **rounded}), flush=True)


class Steps:
    """Times steps end to end: a step lasts from the end of the one before (or `begin`) to its own `end`.

    Probes between them, outside of every step's time. `cpu_seconds` are those of all threads of the process: less than
    `seconds` on one core means that others had the core.
    """

    def __init__(self, shape: Shape, built: float):
        self.shape, self.ready, self.count = shape, time.perf_counter(), 0
        self.built = built
        self.start, self.cpu = self.ready, time.process_time()
        self.phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        clock = self.clock()
        yield
        self.add(name, clock)

    @staticmethod
    def clock() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def add(self, name: str, since: tuple[float, float]) -> None:
        for key, now, then in zip((name, name + "_cpu"), self.clock(), since):
            self.phases[key] = self.phases.get(key, 0.0) + now - then

    def end(self, describe) -> None:
        now, wall = time.perf_counter(), since_process_start()
        seconds = now - self.start
        self.count += 1
        times = {"seconds": seconds, "cpu_seconds": time.process_time() - self.cpu, **self.phases}
        fields = {"step": self.count, **times}
        if self.count == 1:
            fields["seconds_process_start_to_ready"] = self.built
            fields["seconds_ready_to_first_step_end"] = now - self.ready
            fields["seconds_process_start_to_first_step_end"] = wall
            fields["cpu_seconds_process_start_to_first_step_end"] = time.process_time()
        fields["peak_rss_mib"] = peak_mib()
        say("step", **fields, **describe(), probe_gflops=probe())
        self.phases.clear()
        self.start, self.cpu = time.perf_counter(), time.process_time()

    def summary(self, **fields) -> None:
        say("summary", steps=self.count, cores=CORES, peak_rss_mib=peak_mib(), probe_gflops=probe(), **fields)
