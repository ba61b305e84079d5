"""Common parts of the peers' runners: the workload's shapes, clocks, a probe of the machine, lines of JSON.

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


def prompts(shape: Shape, steps: int) -> list[str]:
    """Texts of exactly `shape.prompt` ids in decimal. Of the last 4 ids of the vocabulary none is in a prompt."""
    import numpy as np

    ids = np.random.default_rng(1).integers(0, shape.vocabulary - 4, (shape.prompts * steps, shape.prompt))
    return [" ".join(map(str, row)) for row in ids.tolist()]


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
