"""Writes a checkpoint of a run as a Hugging Face folder, which transformers, vLLM and load_pretrained load.

With LoRA the adapters are merged into the model, or written alone (--adapter) as a folder that PEFT loads.

  grpo-jax export runs/stories trained-model
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax.numpy as jnp
import tyro
from rich.console import Console

from grpo_jax.errors import UsageError
from grpo_jax.models import huggingface, peft
from grpo_jax.runs.flags import program, refuse
from grpo_jax.runs.pretrained import restore


@dataclass(frozen=True)
class Options:
    """What to write, and where."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of a run."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Folder to write; must not exist, or be empty."""
    phase: str | None = None
    """Phase of the run; None: grpo, or the only one that is neither a warm start nor a control."""
    step: int | None = None
    """Step of the checkpoint; None: the newest. A run keeps the newest few (--keep-checkpoints)."""
    dtype: Literal["model", "float32", "bfloat16", "float16"] = "model"
    """Of the tensors written; model: that of the model which was trained. float32 loses nothing."""
    base: Path | None = None
    """Where the base of a LoRA run is now, if it has moved."""
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
    if options.adapter and options.dtype != "model":
        raise UsageError("adapters are always written in float32: leave out --dtype")
    trained = restore(options.run, options.phase, options.step, base=options.base, adapter=options.adapter)
    if options.adapter and trained.lora:
        peft.save_adapter(options.out, trained.params, base=str(options.base or trained.lora.base))
        return trained.step
    source = options.run / "model"
    raw = huggingface.read_json(source / "config.json")
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    huggingface.save_pretrained(
        options.out,
        trained.merged(),
        trained.config,
        source=source,
        dtype=jnp.dtype(dtype if options.dtype == "model" else options.dtype),
    )
    return trained.step


def command() -> None:
    """The command line."""
    given = tyro.cli(Options, prog=program(), description=__doc__)
    try:
        done = export(given)
    except UsageError as error:
        refuse(str(error))
    Console().print(f"step {done} of {given.run} is now in {given.out}", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    command()
