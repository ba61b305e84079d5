"""Supervised fine-tuning on rows that have a prompt and a completion, or a text.

The model learns the tokens of the completion and its EOS, and none of the prompt. Of a text it learns all. Texts are
packed into rows of the longest one's width, so that little padding is computed.

Prompts are made and held out as for GRPO: with the same rows and options, what is held out here is held out there. The
NLL of held-out completions is measured before, during and after training. With --teacher the model learns another
model's probabilities at each token of the completions.

  grpo-jax train --method sft --model DIR --task rows.jsonl
  grpo-jax train --method sft --model SMALL --teacher LARGE --distillation forward_kl --task rows.jsonl
  grpo-jax train --method sft --model DIR --task train.jsonl --template "Q: {question} A:" --completion-column answer
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.commands import flags
from grpo_jax.commands.offline import Job, PairOptions, Values, encoding, run_method
from grpo_jax.commands.train import RUN_DIR, Method
from grpo_jax.config import ModelOptions, TeacherConfig, check_top_k, check_warmup, with_options
from grpo_jax.data.packing import Packed, pack, packed_batches, packed_pieces
from grpo_jax.data.prompts import Prompts, hash_prompts, pad_prompts
from grpo_jax.data.rows import Row, completion_text, is_plain_answer, read_messages, read_rows, text_column
from grpo_jax.data.text import Answers, Encoded, answer_conversation, answer_prompts, ending_id, fit_answers, uses_chat
from grpo_jax.data.types import hash_values
from grpo_jax.devices import devices_of, load_shardings
from grpo_jax.errors import UsageError
from grpo_jax.hosts import check_alone
from grpo_jax.models.chat import make_chat
from grpo_jax.models.huggingface import Pretrained, for_texts
from grpo_jax.models.policy import decoder_policy
from grpo_jax.offline.distillation import check_teacher_options, divergence_objective, mean_divergence
from grpo_jax.offline.phase import SupervisedConfig, check_rows
from grpo_jax.offline.sft import sft_objective, text_nll
from grpo_jax.options import Seed, Size, Weight
from grpo_jax.rl.guards import length_warning
from grpo_jax.tasks.options import usual_num_heldout
from grpo_jax.tasks.task import encode_rows, padding_id
from grpo_jax.training.prepare import load_frozen, load_model


@dataclass(frozen=True)
class Config:
    """Options of the run."""

    train: SupervisedConfig = with_options(PairOptions.train, learning_rate=1e-5)
    model: ModelOptions = ModelOptions()
    divergence: TeacherConfig = TeacherConfig()
    output: flags.RunConfig = flags.RunConfig(Path(RUN_DIR))
    method: Method = "sft"
    """Method that trains the model. Each method has options of its own: `--method grpo --help` lists those of GRPO."""
    task: str = ""
    """Rows with prompt and completion, messages or text: a file (.jsonl, .json, .csv, .parquet), a folder with
    train.jsonl, an id on the hub."""
    completion_column: str = "completion"
    """Column with the completion, a text. The end of a turn, or EOS, is put at its end."""
    prompt_column: str = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    template: str | None = None
    """Prompt with {column} where the text of a column goes. It replaces prompt_column. None: no template."""
    chat: bool | None = None
    """Put prompts that are text into the chat template, as the user's message. None: if the tokenizer has one."""
    system: str | None = None
    """System message before prompts that have none; needs a chat template."""
    num_heldout: int | None = None
    """Largest number of held-out prompts. None: 200, and at most a tenth of the prompts."""
    max_tokens: Size | None = None
    """Longest completion with its EOS, in tokens (T). None: the length that the model was trained on. `overlong`
    decides about longer completions."""
    nll_coef: Weight = 0.0
    """With a teacher: weight λ of the NLL of the completions, which is added to the divergence. 0: no NLL."""
    num_rows: Size = 8
    """Number of packed rows in a step. The run prints how many rows an epoch has."""
    seed: Seed = 0
    """Random seed of the order of rows and of new adapters."""


def make_sft_job(config: Config) -> Job:
    """Reads the rows, and loads the model and a teacher if one is named.

    Raises:
      UsageError: One sentence that says what to change.
    """
    for role in config.divergence.frozen_models:
        check_alone(f"phases with a {role}")
    check_warmup(config.train, config.train.steps, default=type(config)().train.warmup_steps)
    check_rows(config.train, rows=config.num_rows, name="num_rows")
    check_teacher_options(config.divergence, config.nll_coef)
    devices = devices_of(config.train)
    rows = read_training_rows(config)  # before the weights, which take longer
    model = load_model(config.model, seed=config.seed, sharding=load_shardings(devices))
    training, held_out, prompts, (*losses, sizes) = encode_splits(config, rows, model)
    width = training.ids.shape[1]
    model = for_texts(model, width)
    policy, heldout = decoder_policy(model.config), partial(packed_pieces, held_out, config.num_rows)

    def evaluate(params: Any) -> Values:
        return {"nll": shares_of_mean(*text_nll(policy, params, heldout(), devices=devices))}

    job = Job(
        config=config,
        phase="sft",
        model=model,
        params=model.params,
        objective=sft_objective(policy),
        batches=packed_batches(training, config.num_rows, config.seed),
        evaluate=evaluate,
        log=log_means,
        inputs={
            "held-out prompts": hash_prompts(prompts),
            "held-out texts": hash_values(*held_out[:3]),
            "training rows": hash_values(*training[:3]),
        },
        title="held-out completions, nats a token [95% interval]",
        losses=losses,
        notes=[sizes],
        warnings=length_warning(width, model.config.max_position_embeddings),
    )
    for role, name in config.divergence.frozen_models.items():
        job = add_divergence(job, role, name, width, heldout)
    return job


def add_divergence(job: Job, role: str, name: str, width: int, heldout: Callable[[], Iterable[Packed]]) -> Job:
    """Adds the divergence from a frozen model to a job, and its mean over held-out texts to the log.

    Args:
      job: The job without the model.
      role, name: As in `load_frozen`.
      width: The longest text, in tokens.
      heldout: Returns the held-out texts.
    """
    config, policy, devices = job.config, decoder_policy(job.model.config), devices_of(job.config.train)
    check_top_k(config, job.model.config.vocab_size)
    other = load_frozen(role, name, config.model, job.model, sharding=load_shardings(devices))
    other = for_texts(other, width)
    compared = policy, decoder_policy(other.config), config.divergence.divergence

    def log(params: Any, values: Values) -> dict[str, float]:
        mean = mean_divergence(*compared, params, heldout(), devices=devices)
        numbers = log_means(params, values)
        # The loss is first, and so the score of keep_best and patience.
        return {"loss": mean + config.nll_coef * numbers["nll"], **numbers, "distillation": mean}

    return job._replace(
        params={"policy": job.params, role: other.params},
        objective=divergence_objective(*compared, config.nll_coef),
        evaluate=lambda params: job.evaluate(params["policy"]),
        log=log,
        others={role: other},
    )


def log_means(params: Any, values: Values) -> dict[str, float]:
    """Returns the mean of each value over the held-out texts."""
    return {name: float(x.mean()) for name, x in values.items()}


main = partial(run_method, make_sft_job)


def read_training_rows(config: Config) -> Sequence[Mapping[str, Any]]:
    """Reads the rows. The completion of a row is a text, or chat messages; "messages" holds prompt and completion.

    If the first row has only a "text", each row's text is its prompt, and its completion is None.

    Raises:
      UsageError: One sentence that says what to change.
    """
    if not config.task:
        raise UsageError("--task is needed: name a file of rows with a prompt and a completion")
    rows, name = read_rows(config.task), config.completion_column
    has_columns = config.template or not _has_usual_columns(config)
    if "text" not in rows[0] or has_columns or {name, config.prompt_column, "messages"} & rows[0].keys():
        return [_with_completion(config, row) for row in rows]
    if config.chat:
        raise UsageError("rows with a column text are whole texts outside a chat: leave out --chat")
    if config.model.max_prompt_tokens is not None:
        raise UsageError("rows with a column text have no prompts: leave out --max-prompt-tokens, or use --max-tokens")
    return [Row({**row, config.prompt_column: text_column(row, "text"), name: None}, row.where) for row in rows]


def _has_usual_columns(config: Config) -> bool:
    """Returns whether no option names a column, so that rows may have messages or a text instead."""
    return (config.prompt_column, config.completion_column) == ("prompt", "completion")


def _with_completion(config: Config, row: Row) -> Row:
    """Returns a row whose completion is a text, or messages that end with the assistant's."""
    name, place = config.completion_column, f"{row.where}: column {config.completion_column}"
    if _has_usual_columns(config) and name not in row and isinstance(row.get("messages"), list):
        place = f"{row.where}: column messages"
        messages = read_messages(row["messages"], place)
        first = next((number for number, message in enumerate(messages) if message["role"] == "assistant"), 0)
        if not first:
            raise UsageError(f"{place} should hold a message of the assistant after the first one of the user")
        row = Row({**row, config.prompt_column: messages[:first], name: messages[first:]}, row.where)
    if isinstance(row.get(name), list):
        messages = read_messages(row[name], place)
        while messages and messages[-1]["role"] != "assistant":
            messages = messages[:-1]  # nothing in them is learned
        if not messages:
            raise UsageError(f"{place} holds no message of the assistant")
        row = Row({**row, name: messages}, row.where)
        if not is_plain_answer(messages):
            return row
    return Row({**row, name: completion_text(row, name, remedy="set --completion-column")}, row.where)


def encode_splits(
    config: Config, rows: Sequence[Mapping[str, Any]], pretrained: Pretrained
) -> tuple[Packed, Packed, Prompts, list[str]]:
    """Encodes, splits and packs rows, with the same split as in a task with these rows.

    Returns:
      The packed training rows, the packed held-out rows, the held-out prompts in the format of a task, and sentences
      about dropped and cut rows, the last one about packed rows.

    Raises:
      UsageError: One sentence that says what to change.
    """
    tokenizer, limits = pretrained.tokenizer, encoding(pretrained, config.model, config.max_tokens)
    overlong, vocab_size, limit = limits["overlong"], limits["vocab_size"], limits.pop("max_prompt_tokens")
    chat = make_chat(tokenizer, pretrained.eos_ids, config.model.chat_template_kwargs)
    are_texts = rows[0][config.completion_column] is None
    training_rows, heldout_rows, row_notes, prompt_tokens = encode_rows(
        chat,
        rows,
        vocab_size=vocab_size,
        prompt_column=config.prompt_column,
        template=config.template,
        in_chat=not are_texts and uses_chat(config.chat, tokenizer),
        system=config.system,
        num_heldout=usual_num_heldout if config.num_heldout is None else config.num_heldout,
        max_prompt_tokens=None if are_texts else limit,  # a text loses its end, below
        overlong=overlong,
    )
    notes, sides = list(row_notes), []
    for name, side in (("training", training_rows), ("held out", heldout_rows)):
        prompts, examples = side.take()
        encoded = Encoded(prompts, [example["prompt"] for example in examples], [], "")
        completions = [example[config.completion_column] for example in examples]
        answers = answer_prompts(chat, encoded, [(x if isinstance(x, str) else "",) for x in completions])
        for number, completion in enumerate(completions):
            ids = prompts[number].tolist()
            if are_texts:
                answers[number] = _text_answer(ids, ending_id(tokenizer, chat.eos_ids))
            elif not isinstance(completion, str):
                answers[number] = answer_conversation(chat, encoded.texts[number], ids, completion)
        fitted, _, about = fit_answers(answers, noun="completions", **limits)
        notes += [f"{name}: {note}" for note in about]
        sides.append(([x.prompt for x in fitted], [x.answers[0] for x in fitted], [x.learned for x in fitted]))
    width = max(len(ids) + len(more) for side in sides for ids, more, _ in zip(*side, strict=True))
    training, heldout = (pack(*side, width=width) for side in sides)
    count, size = len(sides[0][0]), len(training.ids)
    notes.append(
        f"{count} texts to train on in {size} rows of {width} tokens: {size / config.num_rows:.3g} steps an epoch"
    )
    padded = pad_prompts(*heldout_rows.take(), width=prompt_tokens, pad_id=padding_id(tokenizer, vocab_size))
    return training, heldout, padded, notes


def _text_answer(ids: list[int], eos: int) -> Answers:
    """Returns a text's first token as its prompt, which nothing predicts, and all others with EOS as the answer."""
    return Answers(ids[:1], (ids[1:] + [eos] * (ids[-1] != eos),))


def shares_of_mean(totals: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns one value for each text, with mean Σ totals / Σ tokens and the spread of this ratio to first order."""
    ratio = totals.sum() / tokens.sum()
    return ratio + (totals - ratio * tokens) / tokens.mean()
