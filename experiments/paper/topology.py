"""Devices of TPUs and GPUs that are not there: their compilers run on any machine, from the name of a topology."""

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import jax
from jax.experimental import topologies

from grpo_jax.errors import UsageError

# libtpu takes a lock on the machine's TPUs and asks Google's cloud about them; for a compiler it need not.
_WITHOUT_TPUS = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "true", "TPU_SKIP_MDS_QUERY": "true"}
# Without a GPU nothing can be timed. XLA's default tiles for Triton's products then fail for some shapes.
_WITHOUT_GPUS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
_MOST = 2**16
_CHIPS_PER_HOST = 4
# XLA takes the lowest of the three versions. Below 12.3 it leaves products and conditions out of CUDA graphs, and a
# decoding step looks like hundreds of single launches.
_CUDA = "13.0.0"


class Gpu(NamedTuple):
    """The facts of an NVIDIA GPU that its compiler needs: NVIDIA's data sheets, and memory as the driver reports it."""

    name: str
    capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    lanes: int  # float32 units of a core
    threads: int  # the most of a core
    shared_memory: int  # bytes of a core
    cache: int  # bytes of L2
    bandwidth: float  # bytes of memory per second
    clock: float  # GHz
    memory: int  # bytes


_MIB = 2**20
GPUS = {
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 2048, 233_472, 50 * _MIB, 3.35232e12, 1.98, 84_978_434_048),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 2048, 167_936, 40 * _MIB, 2.03904e12, 1.41, 85_100_068_864),
    "rtx4090": Gpu(
        "NVIDIA GeForce RTX 4090", (8, 9), 128, 128, 1536, 102_400, 72 * _MIB, 1.008e12, 2.52, 24_564 * _MIB
    ),
    "l4": Gpu("NVIDIA L4", (8, 9), 58, 128, 1536, 102_400, 48 * _MIB, 3.0e11, 2.04, 23_034 * _MIB),
    "t4": Gpu("Tesla T4", (7, 5), 40, 64, 1024, 65_536, 4 * _MIB, 3.2e11, 1.59, 15_095 * _MIB),
}


def devices_of_topology(name: str) -> list[jax.Device]:
    """The devices of a topology, such as v5p:2x2x2 or h100:1. Programs can be compiled for them and not run.

    Raises:
      UsageError: The compiler is not installed, or has no such topology, or it is larger than there are.
    """
    kind, _, shape = name.partition(":")
    sizes = [int(size) for size in re.findall(r"\d{1,9}", shape)]
    if math.prod(sizes) > _MOST:  # which ends libtpu, and so the process
        raise UsageError(f"topology is {name}: that is more than {_MOST:,} devices, so name a smaller one")
    if kind in GPUS:
        return _gpus(name, GPUS[kind], sizes)
    os.environ |= _WITHOUT_TPUS | os.environ
    try:
        # A host of one or two chips. Otherwise libtpu assumes hosts of 2 x 2 chips.
        small = {"chips_per_host_bounds": (*sizes, 1)[:3]} if math.prod(sizes) < _CHIPS_PER_HOST else {}
        return list(topologies.get_topology_desc(name, platform="tpu", **small).devices)
    except RuntimeError as error:
        words = " ".join(str(error).split())
        raise UsageError(
            f"topology is {name}: install libtpu (grpo_jax[tpu] brings it) and name a topology that it has, such as "
            f"v5p:2x2x2 or v5e:4x4 ({words})"
        ) from None


def _gpus(name: str, gpu: Gpu, sizes: list[int]) -> list[jax.Device]:
    """Returns the GPUs of one host."""
    if len(sizes) != 1 or not sizes[0]:
        raise UsageError(f"topology is {name}: write the number of GPUs of one host behind the colon, such as h100:1")
    os.environ["XLA_FLAGS"] = f"{_WITHOUT_GPUS} {os.environ.get('XLA_FLAGS', '')}"
    jax.config.update("jax_platforms", "cpu")  # the process itself computes nothing
    options: Any = {"target_config": _target(gpu), "topology": f"1x1x{sizes[0]}"}
    try:
        return list(topologies.get_topology_desc("", platform="cuda", **options).devices)
    except (RuntimeError, ValueError) as error:
        words = " ".join(str(error).split())
        raise UsageError(f"topology is {name}: install JAX's plugin for CUDA, such as jax[cuda13] ({words})") from None


def _target(gpu: Gpu) -> str:
    """Returns the facts in the text format that XLA reads."""
    major, minor = gpu.capability
    largest = 2**31 - 1, 2**16 - 1, 2**16 - 1
    blocks = " ".join(f"block_dim_limit_{axis}: {size}" for axis, size in zip("xyz", largest, strict=True))
    return f"""gpu_device_info {{
      threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {gpu.threads} {blocks}
      core_count: {gpu.cores} fpus_per_core: {gpu.lanes} clock_rate_ghz: {gpu.clock}
      shared_memory_per_block: 49152 shared_memory_per_core: {gpu.shared_memory}
      shared_memory_per_block_optin: {gpu.shared_memory - 1024}
      memory_bandwidth: {gpu.bandwidth:.0f} l2_cache_size: {gpu.cache} device_memory_size: {gpu.memory}
      cuda_compute_capability {{ major: {major} minor: {minor} }}
      registers_per_core_limit: 65536 registers_per_block_limit: 65536
      driver_version: "{_CUDA}" runtime_version: "{_CUDA}" compile_time_toolkit_version: "{_CUDA}"
    }}
    platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }} runtime_version {{ major: 13 }}
    device_description_str: "{gpu.name}"
    """


@contextmanager
def as_if_here(devices: Sequence[jax.Device]) -> Iterator[None]:
    """A block in which JAX names these devices as the machine's own to all that ask it."""
    results = list(devices)
    backend = "gpu" if results[0].platform in ("cuda", "gpu") else results[0].platform
    capability = [int(number) for number in str(getattr(results[0], "compute_capability", "0")).split(".")]
    with (
        mock.patch.multiple(
            jax,
            devices=lambda *_: results,
            local_devices=lambda *_, **__: results,
            device_count=lambda *_: len(results),
            local_device_count=lambda *_: len(results),
            default_backend=lambda: backend,
        ),
        mock.patch.multiple(  # asks the machine's own devices whether cuDNN has heads of 256 features
            "jax._src.cudnn.fused_attention_stablehlo",
            check_compute_capability=lambda least: [int(number) for number in least.split(".")] <= capability,
        ),
    ):
        yield
