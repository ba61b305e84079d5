"""Which pieces and which remat a run is computed with: the fastest that fit into the memory of its device.

The fastest is known: pieces of `Traits.piece_tokens`, and remat "none". Memory makes pieces smaller, down to
one prompt with its completions, and only then turns remat on.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax

from grpo_jax.config import GRPOConfig, ModelOptions, PlannedRemat, PPOConfig, run_of
from grpo_jax.errors import UsageError
from grpo_jax.functional.products import traits_of_backend
from grpo_jax.models.config import ModelConfig, Remat
from grpo_jax.planning.memory import Estimate, Shape, estimate

# The estimate is within 15% of what XLA plans.
_SHARE = 0.85
GB = 1e9
_NO_LIMIT = 2**60


class Plan(NamedTuple):
    """How a run is computed, and what it needs."""

    model: ModelConfig  # with its remat
    shape: Shape  # with its piece_tokens
    estimate: Estimate
    limit: int  # bytes of a device

    @property
    def fits(self) -> bool:
        """Whether the device has the memory, with a margin for the error of the estimate."""
        return self.estimate.peak <= _SHARE * self.limit

    @property
    def options(self) -> dict[str, int | Remat]:
        """What was planned, as options of a run."""
        pieces = {} if self.shape.microbatches else {"piece_tokens": self.shape.piece_tokens}
        return {**pieces, "remat": self.model.remat}

    def __str__(self) -> str:
        pieces = self.shape.num_pieces
        microbatches = f"{pieces} microbatch{'es' if pieces > 1 else ''}"
        sizes = f"about {_in_gb(self.estimate.peak)} of {_in_gb(self.limit)} GB"
        return f"plan: {microbatches}, remat {self.model.remat}: {sizes}"


def _in_gb(size: int) -> str:
    """Bytes in GB, with two digits where these are few."""
    return f"{size / GB:.0f}" if size >= 10 * GB else f"{size / GB:.2g}"


def shape_of(
    config: GRPOConfig | PPOConfig,
    options: ModelOptions,
    prompt_tokens: int,
    *,
    parts: int,
    teacher: ModelConfig | None = None,
) -> Shape:
    """What the memory of a run depends on, from its options.

    Args:
      config: the run.
      options: of the model.
      prompt_tokens: P.
      parts: of the mesh that prompts are spread over.
      teacher: of distillation.
    """
    run = run_of(config)
    by_token = run.distillation.distillation in ("none", "k1")
    return Shape(
        num_prompts=run.sampling.num_prompts // parts,
        group_size=run.sampling.group_size,
        prompt_tokens=prompt_tokens,
        max_tokens=run.sampling.row_tokens,
        minibatches=run.optimizer.minibatches,
        microbatches=run.optimizer.microbatches,
        piece_tokens=run.optimizer.piece_tokens,
        packs=run.loss.divergence == "preset" and by_token and not _reads_ends(config),
        lora_rank=options.lora_rank,
        lora_targets=options.lora_targets,
        param_dtype=options.param_dtype,
        quantize=options.quantize,
        critic=config.critic.critic if isinstance(config, PPOConfig) else "none",
        teacher=teacher,
        distillation_top_k=None if by_token else run.distillation.distillation_top_k,
        copies=1 + (run.reference.ref_sync_steps > 0),
        fsdp=run.mesh.fsdp,
        tensor=run.mesh.tensor,
        traits=traits_of_backend(),
    )


def _reads_ends(config: GRPOConfig | PPOConfig) -> bool:
    """Whether PPO reads the values after completions, which are not packed."""
    return isinstance(config, PPOConfig) and config.critic.bootstrap_truncated


def choose(model: ModelConfig, shape: Shape, limit: int, *, remat: PlannedRemat = "auto") -> Plan:
    """The fastest plan that fits.

    Args:
      model: the decoder.
      shape: of the run; with microbatches or piece_tokens above 0 its pieces are given.
      limit: bytes that a device has.
      remat: "auto", or the one that is given.

    Returns:
      The plan. Where pieces and remat are given, these, whether they fit or not.

    Raises:
      UsageError: nothing fits; the sentence names what would.
    """
    plans = list(_plans(model, shape, limit, remat))
    if len(plans) == 1:
        return plans[0]
    chosen = next((plan for plan in plans if plan.fits), None)
    if chosen is None:
        raise UsageError(_what_would_fit(model, shape, limit, plans[-1]))
    return chosen


def _plans(model: ModelConfig, shape: Shape, limit: int, remat: PlannedRemat) -> Iterator[Plan]:
    """From the fastest to the smallest."""
    remats: tuple[Remat, ...] = ("none", "layer") if remat == "auto" else (remat,)
    for own in remats:
        planned = replace(model, remat=own)
        for piece_tokens in _sizes(shape):
            sized = shape._replace(piece_tokens=piece_tokens)
            yield Plan(planned, sized, estimate(planned, sized), limit)


def _sizes(shape: Shape) -> list[int]:
    """Tokens of a piece: the fastest, and halves of it as long as a piece has more than one row."""
    sizes = [shape.piece_tokens or shape.traits.piece_tokens]
    if shape.microbatches or shape.piece_tokens:
        return sizes
    while shape._replace(piece_tokens=sizes[-1]).piece.rows > 1:
        sizes.append(sizes[-1] // 2)
    return sizes


def _what_would_fit(model: ModelConfig, shape: Shape, limit: int, smallest: Plan) -> str:
    """One sentence: what is needed, and what to set instead."""

    def fitting(words: str, model: ModelConfig, shape: Shape) -> list[str]:
        plan = list(_plans(model, shape, limit, "layer"))[-1]
        return [f"{words} (about {_in_gb(plan.estimate.peak)} GB)"] if plan.fits else []

    lora = shape._replace(lora_rank=16, param_dtype="bfloat16")
    half = replace(model, dtype="bfloat16")
    ways = []
    if model.dtype != "bfloat16":
        ways += fitting("dtype bfloat16", half, shape)
    if shape.lora_rank and shape.quantize != "nf4":
        ways += fitting("quantize nf4", model, shape._replace(quantize="nf4"))
    if not shape.lora_rank:
        ways += fitting("lora_rank 16, param_dtype bfloat16", model, lora)
        ways = ways or fitting("lora_rank 16, param_dtype bfloat16, dtype bfloat16", half, lora)
    for devices in (2, 4, 8, 16, 32, 64):
        cut = shape._replace(num_prompts=max(shape.num_prompts // devices, 1), fsdp=shape.fsdp * devices)
        if more := fitting(f"fsdp {cut.fsdp} on {devices} times as many devices", model, cut):
            ways += more
            break
    if shape.num_prompts > 1:
        ways += fitting("num_prompts 1", model, shape._replace(num_prompts=1, minibatches=1))
    instead = ", or ".join(ways) or "a smaller model, or fewer and shorter completions"
    return (
        f"the run needs about {_in_gb(smallest.estimate.peak)} GB of {_in_gb(limit)} on each device, even in the "
        f"smallest microbatches with remat layer: set {instead}; or set microbatches and remat, which are then not "
        "planned"
    )


# ---- what a device has


def memory_limit(devices: int = 1) -> int:
    """Bytes that each device may use: as it says itself, or on a CPU its part of what the machine and its group have.

    Args:
      devices: that share the memory of a CPU.
    """
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in statistics:
        return int(statistics["bytes_limit"])
    ours = sum(x.nbytes for x in jax.live_arrays())  # the model that is loaded counts in the plan
    return min(_available() + ours, _cgroup_limit()) // devices


def _available() -> int:
    """Bytes that the machine has left; without /proc, more than any has."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return _NO_LIMIT
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), _NO_LIMIT)


def _cgroup_limit(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that the control group of this process may take, as a container sees it."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of the second version, and of the first
        try:
            most = (root / name).read_text(encoding="utf-8").strip()
        except OSError:
            continue
        return _NO_LIMIT if most == "max" else int(most)
    return _NO_LIMIT
