"""Supervised fine-tuning on rows that have a prompt and a completion.

The model learns the tokens of the completion and its EOS, and none of the prompt. Texts are packed into rows of the
longest one's width, so that little padding is computed. Prompts are made and held out as for GRPO: with the same rows
and options, what is held out here is held out there. The NLL of held-out completions is measured before, during and
after training. With --teacher the model learns another model's probabilities at each token of the completions.

  grpo-jax train --method sft --model DIR --task rows.jsonl
  grpo-jax train --method sft --model SMALL --teacher LARGE --distillation forward_kl --task rows.jsonl
  grpo-jax train --method sft --model DIR --task train.jsonl --template "Q: {question} A:" --completion-column answer
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from grpo_jax.commands.train import RUN_DIR, Method
from grpo_jax.config import DistillationConfig, ModelOptions, validate_divergence
from grpo_jax.data import digests
from grpo_jax.data.packing import Packed, pack, packed_batches, packed_pieces
from grpo_jax.data.rows import read_rows, text_column
from grpo_jax.data.text import check_ids, encode_completions, prompt_limit, uses_chat
from grpo_jax.data.types import Prompts, pad_prompts
from grpo_jax.devices import devices_of, load_shardings, place
from grpo_jax.errors import UsageError
from grpo_jax.hosts import check_alone
from grpo_jax.models.huggingface import Pretrained
from grpo_jax.models.policy import Policy
from grpo_jax.models.trainable import join, split
from grpo_jax.models.transformer import Params
from grpo_jax.offline.distillation import DistillationTarget, mean_divergence, train_distillation
from grpo_jax.offline.phase import SupervisedConfig, check_supervised
from grpo_jax.offline.sft import mean_nll, text_nll, train_sft
from grpo_jax.prepare import Loaded, load_model, load_teacher
from grpo_jax.rl.distillation import check_top_k
from grpo_jax.rl.guards import length_warning
from grpo_jax.rl.types import TrainState
from grpo_jax.runs import flags, terminal
from grpo_jax.runs.checkpoint import params_sha256
from grpo_jax.runs.folder import RunFolder
from grpo_jax.runs.pretrained import keep_description, keep_files
from grpo_jax.statistics import bootstrap, cell, paired_difference
from grpo_jax.tasks.dataset import EncodedRows, encode_rows
from grpo_jax.tasks.options import usual_num_heldout
from grpo_jax.tasks.task import padding_id

PHASE = "sft"
CURVES = ((("loss", "heldout_nll"), "NLL, nats a token (dots: held out)"), ("entropy", "entropy, nats a token"))
TAUGHT_CURVES = (
    (("nll", "heldout_nll"), "NLL, nats a token (dots: held out)"),
    ("entropy", "entropy, nats a token"),
    (("distillation", "heldout_distillation"), "divergence from the teacher, nats a token"),
)


@dataclass(frozen=True)
class Config:
    """Options of the run."""

    train: SupervisedConfig = SupervisedConfig(
        steps=100, learning_rate=1e-5, warmup_steps=10, decay="linear", checkpoint_every=50, log_every=10, eval_every=20
    )
    model: ModelOptions = ModelOptions()
    output: flags.RunConfig = flags.RunConfig(Path(RUN_DIR))
    method: Method = "sft"
    """What trains the model. Each method has options of its own: `--method grpo --help` lists those of GRPO."""
    task: str = ""
    """Rows with prompts and completions: a .jsonl or .json file, a folder with train.jsonl, an id on the hub."""
    completion_column: str = "completion"
    """Column with the completion, a text. EOS is put at its end."""
    prompt_column: str = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    template: str | None = None
    """Prompt with {column} in it, in place of a column."""
    chat: bool | None = None
    """Whether a text is a user's message for the tokenizer's chat template; None: if it has one."""
    system: str | None = None
    """System message before prompts that have none; needs a chat template."""
    num_heldout: int | None = None
    """Held-out prompts at most. None: 200, and at most a tenth of the rows."""
    max_tokens: int | None = None
    """Longest completion, in tokens, its EOS included (T); None: as long as the model was trained on. `overlong` says
    what happens to longer ones: they are dropped, or lose their end."""
    teacher: str = ""
    """Model whose probabilities are learned at each token of the completions, as --distillation says: folder of a
    Hugging Face model, or its id on the hub. It may have any size, but needs the model's tokenizer. Empty: none."""
    distillation: Literal["none", "reverse_kl", "forward_kl", "jsd"] = "none"
    """What the model π learns from a teacher π_T at each token, over the whole vocabulary. reverse_kl: KL(π ‖ π_T).
    forward_kl: KL(π_T ‖ π). jsd: the generalised Jensen-Shannon divergence (GKD, 2306.13649). none: there is no
    teacher."""
    distillation_top_k: int = 0
    """Compute the divergence over the teacher's k likeliest tokens, with all others counted as one; 0: over the whole
    vocabulary."""
    distillation_beta: float = 0.5
    """For jsd alone: weight β of the teacher in its mixture. Near 0 it is like forward_kl, near 1 like reverse_kl."""
    nll_coef: float = 0.0
    """With a teacher: weight λ of the NLL of the completions, beside the divergence. 0: from the teacher alone."""
    num_rows: int = 8
    """Packed rows of a step. The run says how many of them an epoch has."""
    seed: int = 0
    """Of the order of rows, and of new adapters."""


class Texts(NamedTuple):
    """Prompts and completions, packed."""

    training: Packed
    heldout: Packed
    heldout_prompts: Prompts  # as a task has them
    notes: tuple[str, ...]  # what was dropped, cut and packed, in words


def main(config: Config) -> None:
    """Trains and evaluates; a table, curves, a page, and the checksum."""
    started = time.perf_counter()
    if config.teacher:
        check_alone("phases with a teacher")
    check_supervised(config.train, seed=config.seed, rows=config.num_rows, name="num_rows")
    divergence, devices = divergence_of(config), devices_of(config.train)
    rows = read_completions(config)  # before a checkpoint is read
    model, teacher = load(config, divergence)
    texts = encode_texts(config, rows, model.pretrained)
    batches = packed_batches(texts.training, config.num_rows, config.seed)
    run = flags.open_run(config)
    keep_description(run, model.pretrained, config.model, config.chat)
    if teacher:
        keep_files(run, "teacher", teacher.pretrained.folder)
    for note in texts.notes:
        run.console.print(note, markup=False, highlight=False)
    run.warn(length_warning(texts.training.ids.shape[1], model.pretrained.config.max_position_embeddings))
    inputs = {
        "held-out prompts": digests.of_prompts(texts.heldout_prompts),
        "held-out texts": digests.of_values(*texts.heldout[:3]),
        "training rows": digests.of_values(*texts.training[:3]),
    }
    run.keep_inputs(PHASE, inputs)

    def heldout() -> Iterable[Packed]:
        return packed_pieces(texts.heldout, config.num_rows)

    with run.waiting("evaluating the initial model (may take minutes if programs must be compiled)"):
        before = text_nll(model.policy, model.params, heldout(), devices=devices)
    target = DistillationTarget(teacher.policy, divergence, config.nll_coef) if teacher else None
    params = {"policy": model.params, "teacher": teacher.params} if teacher else model.params
    state = learn(run, config, model.policy, params, batches, heldout, target)
    models = join(state.params, split(params)[1])
    trained = models["policy"] if teacher else models
    rows_of_table = compare(before, text_nll(model.policy, trained, heldout(), devices=devices))
    checksum = params_sha256(state.params)
    if run.writes:
        show(run, rows_of_table, checksum, TAUGHT_CURVES if teacher else CURVES)
        terminal.say_end(run, started)


def learn(
    run: RunFolder,
    config: Config,
    policy: Policy,
    params: Any,
    batches: Callable[[int], Packed],
    heldout: Callable[[], Iterable[Packed]],
    target: DistillationTarget | None,
) -> TrainState:
    """Trains on texts, and on what a teacher says of them if there is one; `params` are then models by role."""
    devices = devices_of(config.train)

    def nll(params: Params) -> dict[str, float]:
        return {"heldout_nll": mean_nll(policy, params, heldout(), devices=devices)}

    if target is None:
        return train_sft(policy, params, batches, config.train, run, phase=PHASE, evaluate=nll)

    def evaluate(params: Params) -> dict[str, float]:
        divergence = mean_divergence(policy, params, heldout(), target=target, devices=devices)
        return nll(params["policy"]) | {"heldout_distillation": divergence}

    return train_distillation(policy, params, batches, config.train, run, target=target, phase=PHASE, evaluate=evaluate)


def load(config: Config, divergence: DistillationConfig) -> tuple[Loaded, Loaded | None]:
    """The model and its teacher, if it has one, where the devices of the run take them.

    Raises:
      UsageError: there is none, or they do not fit each other, the devices or the options.
    """
    devices = devices_of(config.train)
    model = load_model(config.model, seed=config.seed, sharding=load_shardings(devices))
    model = model._replace(params=place(model.params, devices))
    if not config.teacher:
        return model, None
    check_top_k(divergence, model.pretrained.config.vocab_size)
    teacher = load_teacher(config.teacher, config.model, model.pretrained, sharding=load_shardings(devices))
    return model, teacher._replace(params=place(teacher.params, devices))


def divergence_of(config: Config) -> DistillationConfig:
    """What is learned from the teacher; of kind "none" without one.

    Raises:
      UsageError: one sentence that says what to change.
    """
    found = DistillationConfig(
        distillation=config.distillation,
        distillation_top_k=config.distillation_top_k,
        distillation_beta=config.distillation_beta,
    )
    kinds = "reverse_kl, forward_kl or jsd"
    if config.distillation == "none":
        if config.teacher:
            raise UsageError(f"there is a teacher, but distillation is none: set it to {kinds}")
        for name in ("distillation_top_k", "distillation_beta", "nll_coef"):
            if getattr(config, name) != getattr(Config, name):
                raise UsageError(
                    f"{name} is {getattr(config, name)}, but distillation is none: leave it out, or choose {kinds}"
                )
    elif not config.teacher:
        raise UsageError(
            f"distillation {config.distillation} needs a teacher: name a model with the same tokenizer as teacher"
        )
    if not 0 <= config.nll_coef < float("inf"):
        raise UsageError(f"nll_coef is {config.nll_coef}: it must be at least 0, and finite")
    validate_divergence(found)
    return found


def read_completions(config: Config) -> Sequence[Mapping[str, Any]]:
    """The rows, each with a text as its completion.

    Raises:
      UsageError: one sentence that says what to change.
    """
    if not config.task:
        raise UsageError("--task is needed: name a file of rows with a prompt and a completion")
    if config.task in ("gsm8k", "math", "countdown"):
        raise UsageError(
            f"{config.task} is a task of rewards: name the file of its rows as --task, and what to learn by --template "
            "and --completion-column"
        )
    if config.completion_column in ("prompt", config.prompt_column):
        raise UsageError("--completion-column names the column of the prompt: name that of the completion")
    rows = read_rows(config.task)
    for row in rows:
        text_column(row, config.completion_column)
    return rows


def encode_texts(config: Config, rows: Sequence[Mapping[str, Any]], pretrained: Pretrained) -> Texts:
    """Rows as packed tokens, split as a task of these rows would be.

    Raises:
      UsageError: one sentence that says what to change.
    """
    tokenizer, vocab_size = pretrained.tokenizer, pretrained.config.vocab_size
    longest = pretrained.config.max_position_embeddings
    found = encode_rows(
        tokenizer,
        pretrained.eos_ids,
        rows,
        vocab_size=vocab_size,
        prompt_column=config.prompt_column,
        template=config.template,
        chat=uses_chat(config.chat, tokenizer),
        system=config.system,
        num_heldout=usual_num_heldout(len(rows)) if config.num_heldout is None else config.num_heldout,
        max_prompt_tokens=prompt_limit(config.model.max_prompt_tokens, longest, config.max_tokens or 1),
        overlong=config.model.overlong,
    )
    notes, parts = list(found.notes), []
    for name, part in (("training", found.training), ("held out", found.heldout)):
        prompts, completions, note = with_completions(config, part, pretrained)
        notes += [f"{name}: {note}"] if note else []
        if not completions:
            raise UsageError(
                f"no completion is left ({name}: {note or 'every prompt is held out'}): raise max_tokens, or give "
                "other rows"
            )
        check_ids(completions, vocab_size)
        parts.append((prompts, completions))
    width = max(len(ids) + len(more) for prompts, texts in parts for ids, more in zip(prompts, texts, strict=True))
    training, heldout = (pack(prompts, texts, width=width) for prompts, texts in parts)
    count, size = len(parts[0][0]), len(training.ids)
    notes.append(
        f"{count} texts to train on in {size} rows of {width} tokens: {size / config.num_rows:.3g} steps an epoch"
    )
    padded = pad_prompts(*found.heldout, width=found.width, pad_id=padding_id(tokenizer, vocab_size))
    return Texts(training, heldout, padded, tuple(notes))


def with_completions(
    config: Config, rows: EncodedRows, pretrained: Pretrained
) -> tuple[list[list[int]], list[list[int]], str]:
    """Token ids of prompts and of their completions, and what was dropped or cut, in words."""
    found = encode_completions(
        pretrained.tokenizer,
        [example[config.completion_column] for example in rows.examples],
        eos_ids=pretrained.eos_ids,
        max_tokens=pretrained.config.max_position_embeddings if config.max_tokens is None else config.max_tokens,
        overlong=config.model.overlong,
    )
    return [rows.token_ids[i] for i in found.numbers], found.token_ids, found.summary


def compare(before: tuple[np.ndarray, np.ndarray], after: tuple[np.ndarray, np.ndarray]) -> dict[str, dict[str, float]]:
    """Rows "before" and "after": nats a token, and their change, with intervals over texts.

    Args:
      before, after: of `text_nll`, on the same texts.
    """
    values = [_shares(*of_texts) for of_texts in (before, after)]
    rows = [bootstrap(of_texts, binary=False).named("nll") for of_texts in values]
    return {"before": rows[0], "after": rows[1] | paired_difference(values[1], values[0]).named("change")}


def _shares(totals: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """A value a text whose mean is Σ totals / Σ tokens, and whose spread is that of this ratio to first order."""
    ratio = totals.sum() / tokens.sum()
    return ratio + (totals - ratio * tokens) / tokens.mean()


def show(run: RunFolder, rows: Mapping[str, Mapping[str, float]], checksum: str, curves: Sequence[Any]) -> None:
    """The table, curves.png and results.json."""
    table = {name: [cell(row, name) for row in rows.values()] for name in ("nll", "change")}
    terminal.print_table(run, "held-out completions, nats a token [95% interval]", tuple(rows), table)
    terminal.save_results(run, rows, checksum, curves, (PHASE,))
