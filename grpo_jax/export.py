"""Writes a checkpoint of a run as a Hugging Face folder, which transformers, vLLM and load_pretrained load.

With LoRA the adapters are merged into the model, or written alone (--adapter) as a folder that PEFT loads.

  python -m grpo_jax.export runs/stories trained-model
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console

from grpo_jax.cli import refuse
from grpo_jax.errors import UsageError
from grpo_jax.models import huggingface, peft
from grpo_jax.models.config import ModelConfig, config_from_huggingface
from grpo_jax.models.lora import Adapted, add_adapters, merge, split
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.transformer import Params
from grpo_jax.training.checkpoint import Checkpoints


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
    adapter: bool = False
    """Write the adapters of a LoRA run alone."""


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
    lora = description / "adapter_config.json"
    if options.adapter and not lora.exists():
        raise UsageError(f"{options.run} did not train adapters: leave out --adapter")
    if options.adapter and options.dtype != "model":
        raise UsageError("adapters are always written in float32: leave out --dtype")
    raw = huggingface.read_json(description / "config.json")
    config = config_from_huggingface(raw)
    like = jax.eval_shape(decoder_policy(config).init, jax.random.key(0))
    with Checkpoints(options.run / "checkpoints" / options.phase) as checkpoints:
        if lora.exists():
            trained = huggingface.read_json(lora)
            base = like if options.adapter else _base(trained, config)
            params, step = _adapted(checkpoints, base, trained, options.step)
        else:
            params, step = checkpoints.restore_params(like, options.step)
    if options.adapter:
        peft.save_adapter(options.out, params, base=trained["base_model_name_or_path"])
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


def _base(lora: dict[str, Any], config: ModelConfig) -> Params:
    """The weights that the adapters were trained on."""
    try:
        return huggingface.load_params(huggingface.model_folder(lora["base_model_name_or_path"]), config)
    except UsageError as error:
        raise UsageError(
            f"the base of the adapters cannot be loaded ({error}): write them alone with --adapter, or put the base's "
            "new place into model/adapter_config.json of the run"
        ) from error


def _adapted(checkpoints: Checkpoints, base: Params, lora: dict[str, Any], step: int | None) -> tuple[Adapted, int]:
    """Base, or its shapes, with trained adapters; and their step."""

    def start(base: Params) -> Adapted:
        rank, alpha, targets = lora["r"], lora["lora_alpha"], lora["target_modules"]
        return add_adapters(base, jax.random.key(0), rank=rank, alpha=alpha, targets=targets)

    adapters, step = checkpoints.restore_params(split(jax.eval_shape(start, base))[0], step)
    return Adapted(base, adapters, jnp.float32(lora["lora_alpha"] / lora["r"])), step


if __name__ == "__main__":
    given = tyro.cli(Options, prog="python -m grpo_jax.export", description=__doc__)
    try:
        done = export(given)
    except UsageError as error:
        refuse(str(error))
    Console().print(f"step {done} of {given.run} is now in {given.out}", markup=False, highlight=False, soft_wrap=True)
