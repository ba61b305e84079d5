"""Writes a checkpoint of a run as a Hugging Face folder, which transformers, vLLM and load_pretrained load.

With LoRA the adapters are merged into the model, or written alone (--adapter) as a folder that PEFT loads.

  python -m grpo_jax.export runs/stories trained-model
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console

from grpo_jax.cli import refuse
from grpo_jax.errors import UsageError
from grpo_jax.models import huggingface, peft
from grpo_jax.models.config import Dtype, ModelConfig, config_from_huggingface
from grpo_jax.models.huggingface import Pretrained
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
    if options.adapter and options.dtype != "model":
        raise UsageError("adapters are always written in float32: leave out --dtype")
    trained = _restore(options.run, options.phase, options.step, base=options.base, adapter=options.adapter)
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


def load_run(
    folder: Path, *, phase: str = "grpo", step: int | None = None, base: Path | None = None, **overrides: Any
) -> tuple[Pretrained, int]:
    """A model as a run trained it, as `load_pretrained` has one; adapters are merged.

    Args:
      folder: of the run.
      phase: of the run.
      step: of the checkpoint; None: the newest.
      base: where the base of a LoRA run is now, if it has moved.
      **overrides: fields of ModelConfig that are not the model's: dtype, remat, attention.

    Returns:
      The model, whose folder is the run's model/; and its step.

    Raises:
      UsageError: something is missing, in one sentence.
    """
    trained = _restore(folder, phase, step, base=base, **overrides)
    source = folder / "model"
    tokenizer = huggingface.load_tokenizer(source)
    ids = huggingface.eos_ids(source, tokenizer)
    return Pretrained(trained.config, trained.merged(), tokenizer, ids, source), trained.step


class _Trained(NamedTuple):
    """A checkpoint of a run."""

    config: ModelConfig
    params: Params  # Adapted, if adapters were trained
    lora: LoraDescription | None
    step: int

    def merged(self) -> Params:
        return merge(self.params) if isinstance(self.params, Adapted) else self.params


def _restore(
    run: Path, phase: str, step: int | None, *, base: Path | None = None, adapter: bool = False, **overrides: Any
) -> _Trained:
    """A checkpoint; of adapters alone (`adapter`) the base is but shapes."""
    description = run / "model"
    if not (description / "config.json").exists():
        raise UsageError(
            f"{run} holds no model/config.json: name the folder of a run; in a loop of your own, "
            "huggingface.save_description writes it"
        )
    phases = sorted(folder.name for folder in (run / "checkpoints").glob("*") if folder.is_dir())
    if phase not in phases:
        raise UsageError(f"{run} has no checkpoints of a phase {phase!r}: its phases are {phases}")
    lora = LoraDescription.read(description)
    if lora is None and (adapter or base):
        raise UsageError(f"{run} did not train adapters: leave out --adapter and --base")
    config = config_from_huggingface(huggingface.read_json(description / "config.json"), **overrides)
    like = jax.eval_shape(decoder_policy(config).init, jax.random.key(0))
    with Checkpoints(run / "checkpoints" / phase) as checkpoints:
        if lora is None:
            params, found = checkpoints.restore_params(like, step)
        else:
            params, found = _adapted(checkpoints, like if adapter else _load_base(lora, config, base), lora, step)
    return _Trained(config, params, lora, found)


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
