"""Loads the model of a run: before training, and from its checkpoints."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, get_type_hints

import jax
import jax.numpy as jnp

from grpo_jax.config import GRPOConfig, ModelOptions, PPOConfig, with_options
from grpo_jax.data import digests
from grpo_jax.data.text import uses_chat
from grpo_jax.errors import UsageError
from grpo_jax.hardware import memory_limit
from grpo_jax.hosts import gather
from grpo_jax.models import huggingface, weights
from grpo_jax.models.config import Dtype, ModelConfig
from grpo_jax.models.families import config_from_huggingface
from grpo_jax.models.huggingface import Pretrained, load_pretrained, save_description
from grpo_jax.models.lora import Adapted, Target, add_adapters, fingerprint, merge
from grpo_jax.models.params import Quantize
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.models.quantised import quantise_params
from grpo_jax.models.trainable import split
from grpo_jax.models.transformer import Params
from grpo_jax.options import fits
from grpo_jax.planning.plan import Plan, choose, shape_of
from grpo_jax.runs.checkpoint import Checkpoints
from grpo_jax.runs.folder import SIDE_PHASES, RunFolder, check_inputs, read_inputs, read_object, run_digest, write_json
from grpo_jax.tasks.task import Task

_LORA_FILE = "lora.json"


class HasModel(Protocol):
    """A dataclass of a run's options, in groups."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def model(self) -> ModelOptions:
        """Those of the model."""


Options = TypeVar("Options", bound=HasModel)


# ---- into a run


class LoraDescription(NamedTuple):
    """What a run that trains adapters says of them, in model/lora.json."""

    base: str  # folder or hub id
    fingerprint: str  # of its weights
    param_dtype: Dtype  # that they had in the run
    rank: int
    alpha: float
    targets: tuple[Target, ...]
    quantize: Quantize = "none"  # how they were held

    @staticmethod
    def read(folder: Path) -> "LoraDescription | None":
        """The description in a run's model/, if it has one."""
        file = folder / _LORA_FILE
        if not file.exists():
            return None
        said = LoraDescription._field_defaults | read_object(file)  # of a run from before there was a field
        if not all(fits(said.get(name), hint) for name, hint in get_type_hints(LoraDescription).items()):
            raise UsageError(f"{file} is not as a run writes it: mend it, or start a new run")
        return LoraDescription(**{name: said[name] for name in LoraDescription._fields})

    def check(self, folder: Path) -> None:
        """Refuses to go on with other weights than those that a run in this folder began with.

        Raises:
          UsageError: they differ.
        """
        saved = LoraDescription.read(folder)
        if saved and saved.fingerprint != self.fingerprint:
            raise UsageError(f"the weights in {self.base} have changed since this run began: start a new run")


def decide_chat(chat: bool | None, options: ModelOptions) -> bool:
    """Returns `uses_chat` of a model whose weights are not read yet.

    Raises:
      UsageError: there is no model, or it has no tokenizer.
    """
    return uses_chat(chat, huggingface.load_tokenizer(huggingface.model_folder(options.model)))


class Loaded(NamedTuple):
    """A pretrained model, ready to be trained."""

    policy: Policy
    params: Params  # with adapters, if the options ask for them
    pretrained: Pretrained


def load_model(
    options: ModelOptions, *, seed: int, pretrained: Pretrained | None = None, sharding: Any = None
) -> Loaded:
    """The model that the options name.

    Args:
      options: of the run.
      seed: of new adapters.
      pretrained: a model that is loaded already; of the options those of LoRA are then read.
      sharding: as in `load_pretrained`.

    Returns:
      The model.

    Raises:
      UsageError: there is none, or it cannot be trained as asked.
    """
    if options.lora_rank < 0:
        raise UsageError(f"lora_rank is {options.lora_rank}: it must be at least 0")
    if options.param_dtype != "float32" and not options.lora_rank:
        raise UsageError(
            "param_dtype bfloat16 would lose small updates of parameters that are trained: set it to float32, or "
            "lora_rank above 0"
        )
    if options.quantize != "none" and not options.lora_rank:
        raise UsageError(
            f"quantize {options.quantize} is of frozen parameters, and without LoRA all are trained: set lora_rank "
            "above 0, or quantize to none"
        )
    if pretrained is None:
        pretrained = load_pretrained(
            options.model,
            param_dtype=options.param_dtype,
            quantize=options.quantize,
            dtype=options.dtype,
            remat="none" if options.remat == "auto" else options.remat,  # auto: until it is planned
            attention=options.attention,
            router=options.router,
            sharding=sharding,
        )
    params, width = pretrained.params, pretrained.config.hidden_size
    if options.lora_rank > width:
        raise UsageError(f"lora_rank is {options.lora_rank}: it must be at most {width}, the width of the model")
    if options.lora_rank:
        key = jax.random.key(seed)
        targets = options.lora_targets
        params = add_adapters(params, key, rank=options.lora_rank, alpha=options.lora_alpha, targets=targets)
    return Loaded(decoder_policy(pretrained.config), params, pretrained)


def load_teacher(name: str | Path, options: ModelOptions, student: Pretrained, *, sharding: Any = None) -> Loaded:
    """A teacher, to be computed like the model that it teaches; its parameters have the dtype of activations.

    Args:
      name: a folder of a Hugging Face model, or its id on the hub.
      options: of the model that it teaches.
      student: that model.
      sharding: as in `load_pretrained`.

    Raises:
      UsageError: there is none, or its tokens are others.
    """
    taught = load_pretrained(
        name, param_dtype=options.dtype, dtype=options.dtype, attention=options.attention, sharding=sharding
    )
    check_vocabulary(taught.tokenizer.get_vocab(), student.tokenizer.get_vocab(), name)
    needed = min(student.config.vocab_size, 1 + max(student.tokenizer.get_vocab().values()))
    if taught.config.vocab_size < needed:
        raise UsageError(f"the teacher {name} lacks tokens from {taught.config.vocab_size} on: name one with {needed}")
    return Loaded(decoder_policy(taught.config), taught.params, taught)


def check_vocabulary(theirs: Mapping[str, int], ours: Mapping[str, int], name: str | Path) -> None:
    """Refuses a teacher whose tokens are not those of the model.

    Args:
      theirs: token -> id, of the teacher.
      ours: token -> id, of the model.
      name: of the teacher.

    Raises:
      UsageError: they differ; the sentence names a token.
    """
    differing = [token for token in sorted(theirs.keys() | ours.keys()) if theirs.get(token) != ours.get(token)]
    if differing:
        there, here = (vocabulary.get(differing[0], "no token") for vocabulary in (theirs, ours))
        raise UsageError(
            f"the teacher {name} has another tokenizer than the model: {differing[0]!r} is {there} there and {here} "
            "here; name a teacher with the model's own tokenizer"
        )


def planned(
    options: Options,
    config: GRPOConfig | PPOConfig,
    loaded: Loaded,
    task: Task,
    *,
    devices: int,
    parts: int,
    teacher: ModelConfig | None = None,
) -> tuple[Options, Loaded, Plan]:
    """The options and the model of a run, with what its memory leaves to choose: pieces, and remat.

    What was chosen is then an option like others, kept in the run's config.json. So a resumed run is computed as it
    began, also on a machine with other memory.

    Args:
      options: all of the run, with those of the model in `model`.
      config: the method's part of them.
      loaded: the model.
      task: its prompts.
      devices: how many the run uses.
      parts: that they spread prompts over.
      teacher: its shape, if there is one.

    Raises:
      UsageError: nothing fits; the sentence names what would.
    """
    shape = shape_of(config, options.model, task.prompts(0).ids.shape[-1], parts=parts, teacher=teacher)
    limits = gather("the memory of a device", memory_limit(min(devices, jax.local_device_count())))
    plan = choose(loaded.pretrained.config, shape, min(limits), remat=options.model.remat)
    pretrained = loaded.pretrained._replace(config=plan.model)
    return (
        with_options(options, **plan.options),
        loaded._replace(policy=decoder_policy(plan.model), pretrained=pretrained),
        plan,
    )


def say_plan(run: RunFolder, plan: Plan) -> None:
    """One line, and a warning where what was asked for may not fit."""
    run.console.print(str(plan), markup=False, highlight=False, soft_wrap=True)
    if not plan.fits:
        run.warn_once("plan", f"{plan}: that is an estimate, but the run may stop for want of memory")


def keep_description(run: RunFolder, loaded: Loaded, options: ModelOptions, chat: bool | None = None) -> None:
    """Puts into the run what `grpo_jax.runs.export` needs besides a checkpoint: the model's folder without the weights.

    Prints the notes of the model, and as a line of the plan how prompts that are text are encoded.

    Args:
      run: new, or to be continued.
      loaded: the model.
      options: of the model.
      chat: whether such a prompt becomes a user's message; None: if the tokenizer has a chat template.

    Raises:
      UsageError: the run is resumed, and the model's files are no longer those that it started from.
    """
    pretrained, lora = loaded.pretrained, None
    in_chat = uses_chat(chat, pretrained.tokenizer)
    how = "are user messages of the chat template" if in_chat else "are encoded without a chat template"
    run.console.print(f"plan: prompts that are text {how}", markup=False, highlight=False, soft_wrap=True)
    for note in pretrained.notes:
        run.warn_once(note, note)
    keep_files(run, "model", pretrained.folder)
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
            quantize=options.quantize,
        )
        lora.check(run.path / "model")
    if not run.writes:
        return
    save_description(run.path / "model", pretrained.config, source=pretrained.folder)
    if lora:
        write_json(run.path / "model" / _LORA_FILE, lora._asdict())


def keep_files(run: RunFolder, part: str, folder: Path) -> None:
    """Notes the files of a model in the run, so that it goes on with the same ones alone.

    Args:
      run: of the model.
      part: "model" or "teacher".
      folder: of the files.

    Raises:
      UsageError: the run is resumed, and they are others.
    """
    files = digests.of_files(folder, huggingface.files_of(folder))
    run.keep_inputs(part, {f"{name} of the {part}": digest for name, digest in files.items()})


def _check_description(run: Path) -> None:
    """Refuses a run whose model/ has other files than the model that it began with."""
    noted, folder = read_inputs(run).get("model"), run / "model"
    if noted is not None:  # a loop of your own may have noted nothing
        before = {name: noted[name] for name in noted if huggingface.is_copied(name.partition(" of ")[0])}
        now = digests.of_files(folder, filter(huggingface.is_copied, huggingface.files_of(folder)))
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
            params, found = checkpoints.restore_params(like, step)
        else:
            params, found = _adapted(checkpoints, like if adapter else _load_base(lora, config, base), lora, step)
    return Trained(config, params, lora, found)


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


def _adapted(checkpoints: Checkpoints, base: Params, lora: LoraDescription, step: int | None) -> tuple[Adapted, int]:
    """Base, or its shapes, with trained adapters; and their step."""

    def start(base: Params) -> Adapted:
        return add_adapters(base, jax.random.key(0), rank=lora.rank, alpha=lora.alpha, targets=lora.targets)

    adapters, step = checkpoints.restore_params(split(jax.eval_shape(start, base))[0], step)
    return Adapted(base, adapters, jnp.float32(lora.alpha / lora.rank)), step
