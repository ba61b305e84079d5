"""A run of SFT, DPO, KTO or a reward model, from its options to its results.

A method is a function that makes a `Job` of the options. It reads the data, loads the model and refuses what cannot
work, before the run has a folder. `run_method` does the rest: it evaluates, trains, evaluates again and leaves a table,
results and a page.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.commands.train import RUN_DIR, Method
from grpo_jax.config import ModelOptions, with_options
from grpo_jax.data.preferences import EncodedPairs, split_preferences
from grpo_jax.data.text import ending_id, prompt_limit
from grpo_jax.data.types import hash_values
from grpo_jax.devices import devices_of, load_shardings, place
from grpo_jax.errors import UsageError
from grpo_jax.fit import fit
from grpo_jax.models.huggingface import Pretrained
from grpo_jax.models.params import join, split
from grpo_jax.offline.pairs import pair_batches, pair_widths, whole_batch, with_intervals
from grpo_jax.offline.phase import Objective, SupervisedConfig, check_supervised
from grpo_jax.options import Fraction, Seed, Size
from grpo_jax.prepare import Loaded, decide_chat, load_model
from grpo_jax.rl.guards import length_warning
from grpo_jax.runs import flags, report
from grpo_jax.runs.checkpoint import params_sha256
from grpo_jax.runs.folder import RunFolder
from grpo_jax.runs.pretrained import keep_description, keep_files
from grpo_jax.statistics import paired_difference

Values = Mapping[str, np.ndarray]  # numbers of each held-out pair or text, by name; the first is what is minimised
Rows = dict[str, dict[str, Any]]  # of the final table, by name
Reference = Mapping[str, np.ndarray]  # "training" and "heldout": what the start says of the data; or nothing


@dataclass(frozen=True)
class PairOptions:
    """Options that all methods on pairs and ratings have."""

    train: SupervisedConfig
    model: ModelOptions = ModelOptions()
    output: flags.RunConfig = flags.RunConfig(Path(RUN_DIR))
    method: Method = "dpo"
    """Method that trains the model. Each method has options of its own, which `--method NAME --help` lists."""
    data: str = ""
    """File, folder or hub id of preferences; KTO also reads ratings."""
    chat: bool | None = None
    """Put prompts into the chat template: a text as the user's message, a transcript as several messages. None: if the
    tokenizer has one."""
    heldout_share: Fraction = 0.1
    """Share of the rows that is held out: evaluated, but not trained on."""
    max_tokens: Size | None = None
    """Longest completion with its EOS, in tokens (T). None: the length that the model was trained on. `overlong`
    decides about longer completions."""
    seed: Seed = 0
    """Random seed of the order of rows, of mismatched completions and of new adapters."""


class Job(NamedTuple):
    """Data of a method and functions of them, made from its options."""

    config: Any  # the options, with what was decided on the way
    phase: str
    model: Loaded  # that is trained
    params: Any  # where training starts, as the objective takes them
    objective: Objective
    batches: Callable[[Reference], Callable[[int], Any]]  # -> (step -> batch)
    evaluate: Callable[[Any, Reference], Any]  # (parameters, reference) -> `Values`, or another evaluation
    inputs: Mapping[str, str]  # digests of the data, which a resumed run must find again
    title: str  # of the table
    notes: Sequence[str]  # what was dropped, cut and packed, in words
    warnings: Mapping[str, str]
    others: Mapping[str, Loaded] = {}  # frozen models by role, whose files a resumed run must find again
    reference: Callable[[Any], Reference] | None = None  # start's parameters -> what is computed once
    summary: Callable[[Any], dict[str, float]] = with_intervals  # of an evaluation
    # (parameters, evaluation) -> held-out metrics; None: the summary
    log: Callable[[Any, Any], Mapping[str, float]] | None = None
    # (evaluation before, evaluation after, parameters after) -> table; None: `compare`
    rows: Callable[[Any, Any, Any], Rows] | None = None
    # (run, evaluation after, parameters after) -> further results; leaves further files
    leave: Callable[[RunFolder, Any, Any], Mapping[str, Any]] = lambda run, evaluation, params: {}


def run_method(prepare: Callable[[Any], Job], config: Any) -> None:
    """Trains and evaluates; leaves a table, a page, and the checksum.

    Args:
      prepare: the method.
      config: its options.
    """
    started = time.perf_counter()
    job = prepare(config)
    config, run = job.config, open_run(job)
    params = place(job.params, devices_of(config.train))
    reference: Reference = {}
    if job.reference:
        with run.waiting("scoring all completions by the reference (may take minutes)"):
            reference = job.reference(params)
    latest: dict[int, Any] = {}  # steps taken -> evaluation, so that no parameters are evaluated twice

    def evaluate(params: Any, step: int) -> Any:
        if step not in latest:
            latest.clear()
            latest[step] = job.evaluate(params, reference)
        return latest[step]

    def log(params: Any, step: int) -> dict[str, float]:
        evaluation = evaluate(params, step)
        numbers = job.log(params, evaluation) if job.log else job.summary(evaluation)
        return {f"heldout_{name}": value for name, value in numbers.items()}

    run.announce_checkpoints(job.phase)
    with run.waiting("evaluating the initial model (may take minutes if programs must be compiled)"):
        before = evaluate(params, 0)
    batches = job.batches(reference)
    state = fit(job.objective, params, batches, config.train, run, phase=job.phase, evaluate=log)
    trained = join(state.params, split(params)[1])
    after = evaluate(trained, config.train.steps)
    rows = job.rows(before, after, trained) if job.rows else compare(before, after, job.summary)
    more = job.leave(run, after, trained)
    checksum = params_sha256(state.params)
    report.print_results(run, job.title, rows)
    report.finish(run, {**rows, **more}, checksum, started)


def open_run(job: Job) -> RunFolder:
    """Opens the folder of a run, with the model's description, notes and digests of all that it is made of."""
    run = flags.open_run(job.config)
    keep_description(run, job.model.pretrained, job.config.model, job.config.chat)
    for role, model in job.others.items():
        keep_files(run, role, model.pretrained.folder)
    for note in job.notes:
        run.console.print(note, markup=False, highlight=False)
    run.warn(job.warnings)
    run.keep_inputs(job.phase, job.inputs)
    return run


def compare(before: Values, after: Values, summary: Callable[[Values], dict[str, float]]) -> Rows:
    """Returns rows "before" and "after", the latter with the change of what is minimised.

    Args:
      before, after: of the same pairs or texts.
      summary: of these numbers.
    """
    first = next(iter(after))
    change = paired_difference(after[first], before[first])
    return {"before": summary(before), "after": summary(after) | change.named("change")}


# ---- pairs and ratings


def pair_job(
    config: Any,
    phase: str,
    make: Callable[[Loaded, EncodedPairs, EncodedPairs], dict[str, Any]],
    *,
    number: str,
    read: Callable[..., tuple[Sequence[Any], Mapping[str, int]]],
    encode: Callable[..., EncodedPairs],
    has_reference: bool = False,
    has_end: bool = True,
) -> Job:
    """Reads --data, holds a share out by a hash of the prompt, loads the model, and makes the job.

    Args:
      config: the options.
      phase: its name.
      make: (model, training rows, held-out rows) -> fields of the job, and besides: "score", `score_pairs` of the
        method's scores and its model; "evaluate", (scores of the held-out pairs `[M, 2]`, these pairs) -> evaluation.
      number: the option that says how many pairs or completions a step has.
      read: (source, chat=...) -> rows, and how many were dropped, by reason.
      encode: (tokenizer, rows, options of `encode_answers`) -> rows as tokens.
      has_reference: whether the scores of the start are part of the loss.
      has_end: as in `encoding`.

    Raises:
      UsageError: one sentence that says what to change.
    """
    size, devices = getattr(config, number), devices_of(config.train)
    check_supervised(config.train, seed=config.seed, rows=size, name=number)
    if not config.data:
        raise UsageError(f"--data is needed: name a file of {number.removeprefix('num_')}")
    config = with_options(config, chat=decide_chat(config.chat, config.model))
    rows, dropped = read(config.data, chat=bool(config.chat))
    parts = split_preferences(rows, config.heldout_share)
    model = load_model(config.model, seed=config.seed, sharding=load_shardings(devices))
    pretrained = model.pretrained
    options = encoding(pretrained, config.model, config.max_tokens, chat=bool(config.chat), has_end=has_end)
    training, heldout = (encode(pretrained.tokenizer, part, **options) for part in parts)
    count, noun = len(training.prompts), number.removeprefix("num_")
    if size > count:
        raise UsageError(f"{number} is {size}, but there are {count} {noun}: set it to at most that")
    fields = make(model, training, heldout)
    score, evaluate = partial(fields.pop("score"), num_pairs=size, devices=devices), fields.pop("evaluate")
    longest = pretrained.config.max_position_embeddings
    digests = (hash_values(side.prompts, side.answers, side.desirable) for side in (training, heldout))

    def evaluated(params: Any, reference: Reference) -> Any:
        batch = whole_batch(heldout)._replace(ref_logprobs=reference.get("heldout"))
        return evaluate(score(params, heldout), batch)

    def scored(params: Any) -> Reference:
        return {"training": score(params, training), "heldout": score(params, heldout)}

    return Job(
        config=config,
        phase=phase,
        model=model,
        params=fields.pop("params", model.params),
        batches=lambda reference: pair_batches(training, size, config.seed, ref_logprobs=reference.get("training")),
        evaluate=evaluated,
        inputs=dict(zip(("training rows", f"held-out {noun}"), digests, strict=True)),
        title=f"{len(heldout.prompts)} held-out {noun} of {len(rows)}, with 95% intervals",
        notes=[*(f"dropped {many} rows {why}" for why, many in dropped.items()), *training.notes],
        warnings=fields.pop("warnings", {}) | length_warning(sum(pair_widths(training)), longest),
        reference=scored if has_reference else None,
        **fields,
    )


def encoding(
    pretrained: Pretrained, options: ModelOptions, max_tokens: int | None, *, chat: bool = False, has_end: bool = True
) -> dict[str, Any]:
    """Returns how prompts and completions become tokens of a model: options of `encode_answers`.

    Args:
      pretrained: the model.
      options: of the model; they limit prompts.
      max_tokens: longest completion; None: as long as the model was trained on.
      chat: as in `encode_answers`.
      has_end: whether a completion ends with EOS, as for a policy; a reward model scores the last token.

    Raises:
      UsageError: completions leave no room for a prompt, or the tokenizer has no EOS.
    """
    longest = pretrained.config.max_position_embeddings
    return {
        "eos_ids": pretrained.eos_ids,
        "max_prompt_tokens": prompt_limit(options.max_prompt_tokens, longest, max_tokens or 1),
        "max_tokens": longest if max_tokens is None else max_tokens,
        "overlong": options.overlong,
        "vocab_size": pretrained.config.vocab_size,
        "chat": chat,
        "end_id": ending_id(pretrained.tokenizer, pretrained.eos_ids) if has_end else None,
    }
