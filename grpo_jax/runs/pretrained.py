"""Describes the model of a run in its folder, and loads it from its checkpoints."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import jax
import jax.numpy as jnp

from grpo_jax.config import ModelOptions
from grpo_jax.data.text import uses_chat
from grpo_jax.data.types import hash_files
from grpo_jax.errors import UsageError
from grpo_jax.models import huggingface, weights
from grpo_jax.models.config import Dtype, ModelConfig
from grpo_jax.models.families import config_from_huggingface
from grpo_jax.models.huggingface import Pretrained
from grpo_jax.models.lora import Target, add_adapters, fingerprint, merge
from grpo_jax.models.params import Adapted, Quantize, split
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.quantised import quantise_params
from grpo_jax.models.transformer import Params
from grpo_jax.runs import files
from grpo_jax.runs.checkpoint import Checkpoints
from grpo_jax.runs.folder import SIDE_PHASES, RunFolder, check_inputs, read_inputs, run_digest

_LORA_FILE = "lora.json"


# ---- into a run


class LoraDescription(NamedTuple):
    """The description of trained adapters, in model/lora.json."""

    base: str  # folder or hub id
    fingerprint: str  # of its weights
    param_dtype: Dtype  # that they had in the run
    rank: int
    alpha: float
    targets: tuple[Target, ...]
    quantize: Quantize = "none"  # how they were held

    @staticmethod
    def read(folder: Path) -> "LoraDescription | None":
        """Returns the description in a run's model/, if it has one.

        Raises:
          UsageError: it is not as a run writes it.
        """
        file = folder / _LORA_FILE
        if not file.exists():
            return None
        saved, hints = files.read_object(file), get_type_hints(LoraDescription)
        files.check_fields(saved, str(file), hints)
        return LoraDescription(**{name: saved[name] for name in hints})


def keep_description(run: RunFolder, pretrained: Pretrained, options: ModelOptions, chat: bool | None = None) -> None:
    """Puts into the run what `grpo_jax.runs.export` needs besides a checkpoint: the model's folder without the weights.

    Prints the notes of the model, and as a line of the plan how prompts that are text are encoded.

    Args:
      run: new, or to be continued.
      pretrained: the model.
      options: of the model.
      chat: whether such a prompt becomes a user's message; None: if the tokenizer has a chat template.

    Raises:
      UsageError: the run is resumed, and the model's files are no longer those that it started from.
    """
    in_chat = uses_chat(chat, pretrained.tokenizer)
    how = "are user messages of the chat template" if in_chat else "are encoded without a chat template"
    run.console.print(f"plan: prompts that are text {how}", markup=False, highlight=False, soft_wrap=True)
    for note in pretrained.notes:
        run.warn_once(note, note)
    keep_files(run, "model", pretrained.folder)
    lora = _describe_lora(pretrained, options) if options.lora_rank else None  # all hosts: the weights may be spread
    if not run.writes:
        return
    huggingface.save_description(run.path / "model", pretrained.config, source=pretrained.folder)
    if lora:
        files.write_json(run.path / "model" / _LORA_FILE, lora._asdict())


def _describe_lora(pretrained: Pretrained, options: ModelOptions) -> LoraDescription:
    """Describes the adapters of a run, and the weights that they are trained on."""
    return LoraDescription(
        # A hub id stays one, so that the adapter can be used elsewhere.
        base=str(Path(options.model).resolve()) if Path(options.model).is_dir() else options.model,
        fingerprint=fingerprint(pretrained.params),
        param_dtype=options.param_dtype,
        rank=options.lora_rank,
        alpha=options.lora_alpha,
        targets=options.lora_targets,
        quantize=options.quantize,
    )


def keep_files(run: RunFolder, part: str, folder: Path) -> None:
    """Notes the files of a model in the run, so that it goes on with the same ones alone.

    Args:
      run: of the model.
      part: "model" or "teacher".
      folder: of the files.

    Raises:
      UsageError: the run is resumed, and they are others.
    """
    files = hash_files(folder, huggingface.files_of(folder))
    run.keep_inputs(part, {f"{name} of the {part}": digest for name, digest in files.items()})


def _check_description(run: Path) -> None:
    """Refuses a run whose model/ has other files than the model that it began with."""
    noted, folder = read_inputs(run).get("model"), run / "model"
    if noted is not None:  # a loop of your own may have noted nothing
        before = {name: noted[name] for name in noted if huggingface.is_copied(name.partition(" of ")[0])}
        now = hash_files(folder, filter(huggingface.is_copied, huggingface.files_of(folder)))
        check_inputs(run, before, {f"{name} of the model": digest for name, digest in now.items()})


# ---- out of it


def load_run(
    folder: Path, *, phase: str | None = None, step: int | None = None, base: Path | None = None, **overrides: Any
) -> tuple[Pretrained, int]:
    """A model as a run trained it, as `load_pretrained` has one; adapters are merged, into the original weights also
    where the run held them quantised.

    Args:
      folder: of the run.
      phase: of the run; None: `phase_of`.
      step: of the checkpoint; None: the newest.
      base: where the base of a LoRA run is now, if it has moved.
      **overrides: fields of ModelConfig that are not the model's: dtype, remat, attention, router.

    Returns:
      The model, whose folder is the run's model/; and its step.

    Raises:
      UsageError: something is missing, in one sentence.
    """
    trained = restore(folder, phase, step, base=base, **overrides)
    source = folder / "model"
    tokenizer = huggingface.load_tokenizer(source)
    ids, notes = huggingface.eos_ids(source, tokenizer, trained.config.vocab_size)
    return Pretrained(trained.config, trained.merged(), tokenizer, ids, source, notes), trained.step


class Trained(NamedTuple):
    """A checkpoint of a run."""

    config: ModelConfig
    params: Params  # Adapted, if adapters were trained
    lora: LoraDescription | None
    step: int

    def merged(self) -> Params:
        """The parameters with adapters multiplied in, if there are any."""
        return merge(self.params) if isinstance(self.params, Adapted) else self.params


def phase_of(run: Path, phase: str | None = None) -> str:
    """The phase of a run whose checkpoints are meant.

    Args:
      run: its folder.
      phase: its name. None: the only one that is neither a warm start nor a control.

    Returns:
      The name.

    Raises:
      UsageError: the run has no such phase, or several.
    """
    phases = sorted(folder.name for folder in (run / "checkpoints").glob("*") if folder.is_dir())
    if phase is None:
        meant = [name for name in phases if name not in SIDE_PHASES]
        if len(meant) != 1:
            raise UsageError(f"{run} has checkpoints of the phases {phases}: choose one with --phase")
        (phase,) = meant
    if phase not in phases:
        raise UsageError(f"{run} has no checkpoints of a phase {phase!r}: its phases are {phases}")
    return phase


def restore(
    run: Path, phase: str | None, step: int | None, *, base: Path | None = None, adapter: bool = False, **overrides: Any
) -> Trained:
    """A checkpoint of a run; where there is a critic, of the policy alone.

    Args:
      run: its folder.
      phase: of the run; None: `phase_of`.
      step: of the checkpoint; None: the newest.
      base: where the base of a LoRA run is now, if it has moved.
      adapter: read the adapters alone; the base then has shapes and no arrays.
      **overrides: fields of ModelConfig that are not the model's.

    Returns:
      The parameters, and what they are of.

    Raises:
      UsageError: something is missing, in one sentence.
    """
    description = run / "model"
    if not (description / "config.json").exists():
        raise UsageError(
            f"{run} holds no model/config.json: name the folder of a run, or write the file with "
            "huggingface.save_description in a loop of your own"
        )
    _check_description(run)
    phase = phase_of(run, phase)
    lora = LoraDescription.read(description)
    if lora is None and (adapter or base):
        raise UsageError(f"{run} did not train adapters: leave out --adapter and --base")
    config = config_from_huggingface(weights.read_json(description / "config.json"), **overrides)
    like = jax.eval_shape(decoder_policy(config).init, jax.random.key(0))
    with Checkpoints(run / "checkpoints" / phase, run=partial(run_digest, run, phase)) as checkpoints:
        if lora is None:
            params, step = checkpoints.restore_params(like, step)
        else:
            base_params = like if adapter else _load_base(lora, config, base)
            add = partial(add_adapters, key=jax.random.key(0), rank=lora.rank, alpha=lora.alpha, targets=lora.targets)
            adapters, step = checkpoints.restore_params(split(jax.eval_shape(add, base_params))[0], step)
            params = Adapted(base_params, adapters, jnp.float32(lora.alpha / lora.rank))
    return Trained(config, params, lora, step)


def _load_base(lora: LoraDescription, config: ModelConfig, moved: Path | None) -> Params:
    """The weights that the adapters were trained on, in the dtype that they had."""
    try:
        folder = huggingface.model_folder(moved or lora.base)
        base = weights.load_params(folder, config, dtype=lora.param_dtype)
    except UsageError as error:
        raise UsageError(
            f"the base of the adapters cannot be loaded ({error}): say where it is with --base, or write the adapters "
            "alone with --adapter"
        ) from error
    # Of a quantised run adapters go onto the original weights, which are the right ones if they quantise to the run's.
    if fingerprint(quantise_params(base, lora.quantize)) != lora.fingerprint:
        raise UsageError(
            f"the weights in {folder} are not those that the adapters were trained on: name theirs (--base)"
        )
    return base
