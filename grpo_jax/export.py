"""Writes a checkpoint of a run as a Hugging Face folder, which transformers, vLLM and load_pretrained load.

With LoRA the adapters are merged into the model, or written alone (--adapter) as a folder that PEFT loads.

  python -m grpo_jax.export runs/stories trained-model
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console

from grpo_jax.cli import refuse
from grpo_jax.errors import UsageError
from grpo_jax.models import huggingface, peft
from grpo_jax.models.config import Dtype, ModelConfig, config_from_huggingface
from grpo_jax.models.lora import Adapted, Target, add_adapters, fingerprint, merge, split
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.transformer import Params
from grpo_jax.training.checkpoint import Checkpoints

LORA_FILE = "lora.json"


@dataclass(frozen=True)
class Options:
    """What to write, and where."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of a run."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Folder to write; must not exist, or be empty."""
    phase: str = "grpo"
    """Phase of the run."""
    step: int | None = None
    """Step of the checkpoint; None: the newest. A run keeps the newest few (--keep-checkpoints)."""
    dtype: Literal["model", "float32", "bfloat16", "float16"] = "model"
    """Of the tensors written; model: that of the model which was trained. float32 loses nothing."""
    base: Path | None = None
    """Where the base of a LoRA run is now, if it has moved."""
    adapter: bool = False
    """Write the adapters of a LoRA run alone."""


class LoraDescription(NamedTuple):
    """What a run that trains adapters says of them, in model/lora.json."""

    base: str  # folder or hub id
    fingerprint: str  # of its weights
    param_dtype: Dtype  # that they had in the run
    rank: int
    alpha: float
    targets: Sequence[Target]

    @staticmethod
    def read(folder: Path) -> "LoraDescription | None":
        """The description in a run's model/, if it has one."""
        file = folder / LORA_FILE
        return LoraDescription(**huggingface.read_json(file)) if file.exists() else None

    def check(self, folder: Path) -> None:
        """Refuses to go on with other weights than those that a run in this folder began with.

        Raises:
          UsageError: they differ.
        """
        earlier = LoraDescription.read(folder)
        if earlier and earlier.fingerprint != self.fingerprint:
            raise UsageError(
                f"the weights in {self.base} are no longer those that this run began with: start a new run"
            )


def export(options: Options) -> int:
    """Writes the folder.

    Args:
      options: what and where.

    Returns:
      The step of the checkpoint that was written.

    Raises:
      UsageError: something is missing, in one sentence.
    """
    description = options.run / "model"
    if not (description / "config.json").exists():
        raise UsageError(
            f"{options.run} holds no model/config.json: name the folder of a run; in a loop of your own, "
            "huggingface.save_description writes it"
        )
    phases = sorted(folder.name for folder in (options.run / "checkpoints").glob("*") if folder.is_dir())
    if options.phase not in phases:
        raise UsageError(f"{options.run} has no checkpoints of a phase {options.phase!r}: its phases are {phases}")
    lora = LoraDescription.read(description)
    if lora is None and (options.adapter or options.base):
        raise UsageError(f"{options.run} did not train adapters: leave out --adapter and --base")
    if options.adapter and options.dtype != "model":
        raise UsageError("adapters are always written in float32: leave out --dtype")
    raw = huggingface.read_json(description / "config.json")
    config = config_from_huggingface(raw)
    like = jax.eval_shape(decoder_policy(config).init, jax.random.key(0))
    with Checkpoints(options.run / "checkpoints" / options.phase) as checkpoints:
        if lora is None:
            params, step = checkpoints.restore_params(like, options.step)
        else:
            base = like if options.adapter else _load_base(lora, config, options.base)
            params, step = _adapted(checkpoints, base, lora, options.step)
    if options.adapter and lora:
        peft.save_adapter(options.out, params, base=str(options.base or lora.base))
        return step
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    huggingface.save_pretrained(
        options.out,
        merge(params) if isinstance(params, Adapted) else params,
        config,
        source=description,
        dtype=jnp.dtype(dtype if options.dtype == "model" else options.dtype),
    )
    return step


def _load_base(lora: LoraDescription, config: ModelConfig, moved: Path | None) -> Params:
    """The weights that the adapters were trained on, in the dtype that they had."""
    try:
        folder = huggingface.model_folder(moved or lora.base)
        base = huggingface.load_params(folder, config, dtype=lora.param_dtype)
    except UsageError as error:
        raise UsageError(
            f"the base of the adapters cannot be loaded ({error}): say where it is with --base, or write the adapters "
            "alone with --adapter"
        ) from error
    if fingerprint(base) != lora.fingerprint:
        raise UsageError(
            f"the weights in {folder} are not those that the adapters were trained on: name theirs (--base)"
        )
    return base


def _adapted(checkpoints: Checkpoints, base: Params, lora: LoraDescription, step: int | None) -> tuple[Adapted, int]:
    """Base, or its shapes, with trained adapters; and their step."""

    def start(base: Params) -> Adapted:
        return add_adapters(base, jax.random.key(0), rank=lora.rank, alpha=lora.alpha, targets=lora.targets)

    adapters, step = checkpoints.restore_params(split(jax.eval_shape(start, base))[0], step)
    return Adapted(base, adapters, jnp.float32(lora.alpha / lora.rank)), step


if __name__ == "__main__":
    given = tyro.cli(Options, prog="python -m grpo_jax.export", description=__doc__)
    try:
        done = export(given)
    except UsageError as error:
        refuse(str(error))
    Console().print(f"step {done} of {given.run} is now in {given.out}", markup=False, highlight=False, soft_wrap=True)
