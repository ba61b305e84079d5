"""The choice of pieces and remat for a run: the fastest that fit into the memory of a device.

The fastest are known: pieces of `Traits.piece_tokens`, and remat "none". If these do not fit, pieces are halved, down
to one prompt with its completions, and only then remat is turned on. The choice depends only on the model, the shape
and the limit. It becomes a part of the run's options, so that a resumed run computes as before.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from grpo_jax.config import GRPOConfig, ModelOptions, PlannedRemat, PPOConfig, run_of
from grpo_jax.errors import UsageError
from grpo_jax.functional.products import traits_of_backend
from grpo_jax.models.config import ModelConfig, Remat
from grpo_jax.planning.memory import Estimate, Shape, estimate

# A plan may take so much of a device, for the estimate may be too low: by up to 10% in our measurements on a CPU.
_SHARE = 0.85
GB = 1e9


class Plan(NamedTuple):
    """The way a run is computed, and its need of memory."""

    model: ModelConfig  # with its remat
    shape: Shape  # with its piece_tokens
    estimate: Estimate
    limit: int  # bytes of a device

    @property
    def fits(self) -> bool:
        """True if the device has the memory, with a margin for the error of the estimate."""
        return self.estimate.peak <= _SHARE * self.limit

    @property
    def options(self) -> dict[str, int | Remat]:
        """The choice, as options of a run."""
        pieces = {} if self.shape.microbatches else {"piece_tokens": self.shape.piece_tokens}
        return {**pieces, "remat": self.model.remat}

    def __str__(self) -> str:
        pieces = self.shape.num_pieces
        microbatches = f"{pieces} microbatch{'es' if pieces > 1 else ''}"
        sizes = f"about {_in_gb(self.estimate.peak)} of {_in_gb(self.limit)} GB"
        return f"plan: {microbatches}, remat {self.model.remat}: {sizes}"


def _in_gb(size: int) -> str:
    """Returns bytes in GB, with two digits if they are few."""
    return f"{size / GB:.0f}" if size >= 10 * GB else f"{size / GB:.2g}"


def shape_of(
    config: GRPOConfig | PPOConfig,
    options: ModelOptions,
    prompt_tokens: int,
    *,
    parts: int,
) -> Shape:
    """Returns what the memory of a run depends on.

    Args:
      config: of the run.
      options: of the model.
      prompt_tokens: P.
      parts: how many parts of the mesh prompts are spread over.
    """
    run = run_of(config)
    return Shape(
        num_prompts=run.sampling.num_prompts // parts,
        group_size=run.sampling.group_size,
        prompt_tokens=prompt_tokens,
        max_tokens=run.sampling.row_tokens,
        minibatches=run.optimizer.minibatches,
        microbatches=run.optimizer.microbatches,
        piece_tokens=run.optimizer.piece_tokens,
        packs=run.packs and not _reads_ends(config),
        lora_rank=options.lora_rank,
        lora_targets=options.lora_targets,
        param_dtype=options.param_dtype,
        quantize=options.quantize,
        critic=config.critic.critic if isinstance(config, PPOConfig) else "none",
        copies=1 + (run.reference.ref_sync_steps > 0),
        fsdp=run.mesh.fsdp,
        tensor=run.mesh.tensor,
        traits=traits_of_backend(),
    )


def _reads_ends(config: GRPOConfig | PPOConfig) -> bool:
    """Tells whether PPO reads the values after completions. These are not packed."""
    return isinstance(config, PPOConfig) and config.critic.bootstrap_truncated


def choose(model: ModelConfig, shape: Shape, limit: int, *, remat: PlannedRemat = "auto") -> Plan:
    """Chooses the fastest plan that fits.

    Args:
      model: the decoder.
      shape: of the run; microbatches or piece_tokens above 0 fix its pieces.
      limit: bytes that a device has.
      remat: "auto" to choose it.

    Returns:
      The plan. If pieces and remat are both fixed, it may not fit.

    Raises:
      UsageError: nothing fits; the sentence names what would.
    """
    plans = list(_plans(model, shape, limit, remat))
    if len(plans) == 1:
        return plans[0]
    chosen = next((plan for plan in plans if plan.fits), None)
    if chosen is None:
        raise UsageError(_describe_what_fits(model, shape, limit, plans[-1]))
    return chosen


def _plans(model: ModelConfig, shape: Shape, limit: int, remat: PlannedRemat) -> Iterator[Plan]:
    """Yields the plans to choose from, from the fastest to the smallest."""
    remats: tuple[Remat, ...] = ("none", "layer") if remat == "auto" else (remat,)
    for decoder in (replace(model, remat=choice) for choice in remats):
        for sized in (shape._replace(piece_tokens=tokens) for tokens in _piece_sizes(shape)):
            yield Plan(decoder, sized, estimate(decoder, sized), limit)


def _piece_sizes(shape: Shape) -> list[int]:
    """Returns tokens of a piece: the fastest, and halves of it while a piece has more than one row."""
    sizes = [shape.piece_tokens or shape.traits.piece_tokens]
    if shape.microbatches or shape.piece_tokens:
        return sizes
    while shape._replace(piece_tokens=sizes[-1]).piece.rows > 1:
        sizes.append(sizes[-1] // 2)
    return sizes


def _describe_what_fits(model: ModelConfig, shape: Shape, limit: int, smallest: Plan) -> str:
    """Returns one sentence: how much is needed, and what to set instead."""

    def if_it_fits(words: str, model: ModelConfig, shape: Shape) -> list[str]:
        plan = list(_plans(model, shape, limit, "layer"))[-1]
        return [f"{words} (about {_in_gb(plan.estimate.peak)} GB)"] if plan.fits else []

    lora = shape._replace(lora_rank=16, param_dtype="bfloat16")
    half = replace(model, dtype="bfloat16")
    ways = []
    if model.dtype != "bfloat16":
        ways += if_it_fits("dtype bfloat16", half, shape)
    if shape.lora_rank and shape.quantize != "nf4":
        ways += if_it_fits("quantize nf4", model, shape._replace(quantize="nf4"))
    if not shape.lora_rank:
        ways += if_it_fits("lora_rank 16, param_dtype bfloat16", model, lora)
        ways = ways or if_it_fits("lora_rank 16, param_dtype bfloat16, dtype bfloat16", half, lora)
    for devices in (2, 4, 8, 16, 32, 64):
        cut = shape._replace(
            num_prompts=max(shape.num_prompts // devices, shape.minibatches), fsdp=shape.fsdp * devices
        )
        if more := if_it_fits(f"fsdp {cut.fsdp} on {devices} times as many devices", model, cut):
            ways += more
            break
    if shape.num_prompts > 1:
        ways += if_it_fits("num_prompts 1", model, shape._replace(num_prompts=1, minibatches=1))
    instead = ", or ".join(ways) or "a smaller model, or fewer and shorter completions"
    return (
        f"the run needs about {_in_gb(smallest.estimate.peak)} GB of {_in_gb(limit)} on each device, even in the "
        f"smallest microbatches with remat layer: set {instead}; or set microbatches and remat, which are then not "
        "planned"
    )
