"""Describes the model of a run in its folder, and loads it from its checkpoints."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_type_hints

import jax
import jax.numpy as jnp

from grpo_jax import hosts
from grpo_jax.config import ModelOptions
from grpo_jax.data.text import uses_chat
from grpo_jax.data.types import hash_files
from grpo_jax.errors import UsageError
from grpo_jax.models import huggingface
from grpo_jax.models.config import Dtype, ModelConfig
from grpo_jax.models.decoder.transformer import Params, param_shapes
from grpo_jax.models.files import weights
from grpo_jax.models.huggingface import Pretrained
from grpo_jax.models.params.lora import add_adapters, fingerprint, merge
from grpo_jax.models.params.quantised import quantise_params
from grpo_jax.models.params.rounding import round_stochastically
from grpo_jax.models.params.tree import Adapted, Quantize, Target, split
from grpo_jax.models.policy import resolve_dtype
from grpo_jax.options import flattened
from grpo_jax.runs import files
from grpo_jax.runs.checkpoint import Checkpoints, best_step
from grpo_jax.runs.folder import SIDE_PHASES, RunFolder, check_inputs, read_inputs, run_digest

Step = int | Literal["best"] | None
_LORA_FILE = "lora.json"


# ---- describing the model in the run


class LoraDescription(NamedTuple):
    """The description of trained adapters, stored in model/lora.json."""

    base: str  # folder or hub id of the base model
    fingerprint: str  # of the base model's weights
    # Options of the run with these names
    param_dtype: Dtype
    lora_rank: int
    lora_alpha: float
    lora_targets: tuple[Target, ...]
    quantize: Quantize = "none"

    @staticmethod
    def read(folder: Path) -> "LoraDescription | None":
        """Reads the description in a run's model/, if there is one.

        Raises:
          UsageError: The description is not as a run writes it.
        """
        file = folder / _LORA_FILE
        if not file.exists():
            return None
        saved, hints = files.read_object(file), get_type_hints(LoraDescription)
        files.check_fields(saved, str(file), hints)
        return LoraDescription(**{name: saved[name] for name in hints})


def keep_description(
    run: RunFolder, models: Mapping[str, Pretrained], options: ModelOptions, chat: bool | None = None
) -> None:
    """Copies the policy's folder without its weights into the run, for `grpo_jax.commands.export`.

    Also prints the notes of all models, and how prompts that are text are encoded.

    Args:
      run: The folder of the run, new or resumed.
      models: The models by role: "policy", and frozen ones.
      options: The options of the model.
      chat: True if a prompt that is text becomes a user's message; None: if the tokenizer has a chat template.

    Raises:
      UsageError: Files of the models have changed since the run began.
    """
    pretrained = models["policy"]
    in_chat = uses_chat(chat, pretrained.tokenizer)
    how = "are user messages of the chat template" if in_chat else "are encoded without a chat template"
    run.say(f"plan: prompts that are text {how}")
    is_rounded = pretrained.config.dtype == "bfloat16" and not options.lora_rank
    how = f", with {pretrained.config.rounding} rounding of parameters" if is_rounded else ""
    run.say(f"plan: products are computed in {pretrained.config.dtype}{how}")
    for role, model in models.items():
        _keep_files(run, "model" if role == "policy" else role, model)
    lora = _describe_lora(pretrained, options) if options.lora_rank else None  # on all hosts: weights may be sharded
    if run.writes:
        huggingface.copy_text_files(pretrained.folder, run.path / "model")
        if pretrained.brings_tokenizer:
            pretrained.tokenizer.save_pretrained(run.path / "model")
        if lora:
            files.write_json(run.path / "model" / _LORA_FILE, lora._asdict())
    written = hosts.first_says("the description of the model", _description(run.path) if run.writes else {})
    run.keep_inputs("description", written)


def _describe_lora(pretrained: Pretrained, options: ModelOptions) -> LoraDescription:
    """Describes the adapters of a run and their base model."""
    # A hub id is not resolved, so that the adapter can be used on other machines.
    base = str(Path(options.model).resolve()) if Path(options.model).is_dir() else options.model
    saved = {name: getattr(options, name) for name in LoraDescription._fields[2:]}
    return LoraDescription(base, fingerprint(pretrained.params.base), **saved)


def _keep_files(run: RunFolder, role: str, pretrained: Pretrained) -> None:
    """Prints a model's notes, and records the digests of its files in the run, which can resume only with the same.

    Args:
      run: The folder of the run.
      role: The role of the model, such as "model" or "teacher".
      pretrained: The model.

    Raises:
      UsageError: The files have changed since the run began.
    """
    folder = pretrained.folder
    for note in pretrained.notes:
        run.warn_once(f"{role}: {note}", note if role == "model" else f"{role}: {note}")
    files = hash_files(folder, huggingface.files_of(folder))
    run.keep_inputs(role, {f"{name} of the {role}": digest for name, digest in files.items()})


def _description(run: Path) -> dict[str, str]:
    """Returns the digests of the files in a run's model/ that decide how its checkpoints are read."""
    folder = run / "model"
    names = {*filter(huggingface.is_copied, huggingface.files_of(folder)), _LORA_FILE}
    digests = hash_files(folder, (name for name in names if (folder / name).exists()))
    return {f"{name} of the model": digest for name, digest in digests.items()}


# ---- loading the model from the run


def load_run(
    folder: Path, *, phase: str | None = None, step: Step = None, base: Path | None = None, **overrides: Any
) -> tuple[Pretrained, int]:
    """Loads a model that a run trained, in the form of `load_pretrained`.

    Adapters are merged into the original weights, even if the run quantised these.

    Args:
      folder: The folder of the run.
      phase: The name of the phase; None: the phase that `phase_of` selects.
      step: The step of the checkpoint; None: the newest; "best": that of the best held-out score.
      base: The folder of the base model of a LoRA run, if it has moved.
      **overrides: Fields of ModelConfig that config.json does not set: dtype, rounding, remat, attention, router.

    Returns:
      The model, whose folder is the run's model/, and the step of its checkpoint.

    Raises:
      UsageError: One sentence that says what is missing.
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

    def merged(self, dtype: Any = None) -> Params:
        """Returns the parameters, with adapters merged if there are any, as `lora.merge` does."""
        return merge(self.params, dtype) if isinstance(self.params, Adapted) else self.params


def phase_of(run: Path, phase: str | None = None) -> str:
    """Returns the name of the phase whose checkpoints are selected.

    Args:
      run: The folder of the run.
      phase: The name of the phase; None: the only phase that is neither a warm start nor a control.

    Raises:
      UsageError: The run has no such phase, or several.
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
    run: Path, phase: str | None, step: Step, *, base: Path | None = None, adapter: bool = False, **overrides: Any
) -> Trained:
    """Restores the policy from a checkpoint of a run, without a critic.

    Args:
      run: The folder of the run.
      phase: The name of the phase; None: the phase that `phase_of` selects.
      step: The step of the checkpoint; None: the newest; "best": that of the best held-out score.
      base: The folder of the base model of a LoRA run, if it has moved.
      adapter: Read only the adapters; the base model then has shapes and no arrays.
      **overrides: Fields of ModelConfig that config.json does not set.

    Returns:
      The parameters, their configuration and their step.

    Raises:
      UsageError: One sentence that says what is missing.
    """
    description = run / "model"
    if not (description / "config.json").exists():
        raise UsageError(
            f"{run} holds no model/config.json: name the folder of a run, or write the file with "
            "huggingface.copy_text_files in a loop of your own"
        )
    if written := read_inputs(run).get("description"):  # a custom training loop may have recorded nothing
        check_inputs(run, written, _description(run))
    phase = phase_of(run, phase)
    lora = LoraDescription.read(description)
    if lora is None and (adapter or base):
        raise UsageError(f"{run} did not train adapters: leave out --adapter and --base")
    config = huggingface.read_config(description, **overrides)

    def untied_if_stored(params: Any) -> ModelConfig:
        return replace(config, tie_word_embeddings=config.tie_word_embeddings and "unembedding" not in params)

    with Checkpoints(run / "checkpoints" / phase, run=partial(run_digest, run, phase)) as checkpoints:
        step = _best_of(run, checkpoints) if step == "best" else step
        if lora is None:
            # The model's files may hold an output matrix although config.json ties it.
            params, step = checkpoints.restore_params(lambda stored: param_shapes(untied_if_stored(stored)), step)
            params = round_stochastically(params) if _rounds_stochastically(run) else params
            config = untied_if_stored(params)
        else:
            config, base_params = (config, param_shapes(config)) if adapter else _load_base(lora, config, base)
            from grpo_jax.models.files.peft import targets_of  # loaded only for runs with adapters

            targets = targets_of(config, lora.lora_targets)
            add = partial(
                add_adapters, key=jax.random.key(0), rank=lora.lora_rank, alpha=lora.lora_alpha, targets=targets
            )
            like = split(jax.eval_shape(add, base_params))[0]
            adapters, step = checkpoints.restore_params(lambda _: like, step)
            params = Adapted(base_params, adapters, jnp.float32(lora.lora_alpha / lora.lora_rank))
    return Trained(config, params, lora, step)


def _best_of(run: Path, checkpoints: Checkpoints) -> int:
    """Returns the step with the best held-out score.

    Raises:
      UsageError: There are no scores, or no step improved on the start.
    """
    if not (scores := checkpoints.read_scores()):
        raise UsageError(f"{run} has no held-out scores: train with --eval-every and --keep-best, or name a step")
    if best := best_step(scores):
        return best
    model = flattened(files.read_object(run / "config.json")).get("model")
    raise UsageError(f"no step of {run} has a better held-out score than its start: take {model}, or name a step")


def _rounds_stochastically(run: Path) -> bool:
    """Returns whether a run computed with stochastically rounded parameters, which are then the trained model."""
    options = flattened(files.read_object(run / "config.json")) if (run / "config.json").exists() else {}
    is_stochastic = options.get("rounding") == "stochastic"
    return is_stochastic and resolve_dtype(options.get("dtype", "float32")) == "bfloat16"


def _load_base(lora: LoraDescription, config: ModelConfig, moved: Path | None) -> tuple[ModelConfig, Params]:
    """Loads the weights that the adapters were trained on, in the dtype that they had in the run."""
    try:
        folder = huggingface.model_folder(moved or lora.base)
        config, _ = weights.untie_if_different(folder, config)
        base = weights.load_params(folder, config, dtype=lora.param_dtype)
    except UsageError as error:
        raise UsageError(
            f"the base of the adapters cannot be loaded ({error}): say where it is with --base, or write the adapters "
            "alone with --adapter"
        ) from error
    # A quantised run recorded the fingerprint of its quantised weights. Adapters go onto the original weights.
    if fingerprint(quantise_params(base, lora.quantize)) != lora.fingerprint:
        raise UsageError(
            f"the weights in {folder} are not those that the adapters were trained on: name theirs (--base)"
        )
    return config, base
