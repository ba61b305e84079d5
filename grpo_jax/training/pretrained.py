"""A pretrained model as training takes it, and what a run keeps of it for an export."""

from pathlib import Path
from typing import NamedTuple

import jax

from grpo_jax.config import ModelOptions
from grpo_jax.errors import UsageError
from grpo_jax.export import LORA_FILE, LoraDescription
from grpo_jax.models.huggingface import Pretrained, load_pretrained, save_description
from grpo_jax.models.lora import add_adapters, fingerprint
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.models.transformer import Params
from grpo_jax.training.run import RunFolder, write_json


class Loaded(NamedTuple):
    """A pretrained model, ready to be trained."""

    policy: Policy
    params: Params  # with adapters, if the options ask for them
    pretrained: Pretrained


def load_model(options: ModelOptions, *, seed: int, pretrained: Pretrained | None = None) -> Loaded:
    """The model that the options name.

    Args:
      options: of the run.
      seed: of new adapters.
      pretrained: a model that is loaded already; of the options those of LoRA are then read.

    Returns:
      The model.

    Raises:
      UsageError: there is none, or it cannot be trained as asked.
    """
    if not options.model:  # no required option: --resume takes it from the run
        raise UsageError("--model is needed: name a folder of a Hugging Face model, or its id on the hub")
    if options.lora_rank < 0:
        raise UsageError(f"lora_rank is {options.lora_rank}: it must be at least 0")
    if options.param_dtype != "float32" and not options.lora_rank:
        raise UsageError(
            "param_dtype bfloat16 would lose small updates of parameters that are trained: set it to float32, or "
            "lora_rank above 0"
        )
    if pretrained is None:
        pretrained = load_pretrained(
            options.model,
            param_dtype=options.param_dtype,
            dtype=options.dtype,
            remat=options.remat,
            attention=options.attention,
        )
    params = pretrained.params
    if options.lora_rank:
        key = jax.random.key(seed)
        targets = options.lora_targets
        params = add_adapters(params, key, rank=options.lora_rank, alpha=options.lora_alpha, targets=targets)
    return Loaded(decoder_policy(pretrained.config), params, pretrained)


def keep_description(run: RunFolder, loaded: Loaded, options: ModelOptions) -> None:
    """Puts into the run what `grpo_jax.export` needs besides a checkpoint: the model's folder without the weights.

    Raises:
      UsageError: the run is resumed, and its frozen base is no longer the one that it started from.
    """
    pretrained, lora = loaded.pretrained, None
    if options.lora_rank:
        # A hub id stays one, so that the adapter can be used elsewhere.
        base = str(Path(options.model).resolve()) if Path(options.model).is_dir() else options.model
        lora = LoraDescription(
            base=base,
            fingerprint=fingerprint(pretrained.params),
            param_dtype=options.param_dtype,
            rank=options.lora_rank,
            alpha=options.lora_alpha,
            targets=options.lora_targets,
        )
        lora.check(run.path / "model")
    save_description(run.path / "model", pretrained.config, source=pretrained.folder)
    if lora:
        write_json(run.path / "model" / LORA_FILE, lora._asdict())
