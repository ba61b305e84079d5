"""Runs SFT, DPO, KTO or the training of a reward model, from the options to the results.

A method is a function that makes a `Job` from the options. It reads the data, loads the model and refuses impossible
options before the run has a folder. `run_method` does the rest: it evaluates, trains, evaluates again, prints a table,
and writes results.json and report.html.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax import report
from grpo_jax.commands import flags
from grpo_jax.commands.train import RUN_DIR, Method
from grpo_jax.config import ModelOptions, check_warmup, optimizer_source, with_options
from grpo_jax.data.preferences import EncodedPairs, split_preferences
from grpo_jax.data.text import prompt_limit, uses_chat
from grpo_jax.data.types import hash_values
from grpo_jax.devices import devices_of, load_shardings, place
from grpo_jax.errors import UsageError
from grpo_jax.models.chat import Chat, make_chat, turn_end
from grpo_jax.models.files.weights import read_json
from grpo_jax.models.huggingface import Pretrained, classifier_padding, for_texts, load_tokenizer, model_folder
from grpo_jax.models.params.tree import join, split
from grpo_jax.offline.pairs import pair_batches, pair_widths, whole_batch, with_intervals
from grpo_jax.offline.phase import FitObjective, SupervisedConfig, check_rows, make_fit_optimizer
from grpo_jax.options import Fraction, Seed, Size
from grpo_jax.rl.guards import length_warning
from grpo_jax.runs.checkpoint import params_sha256
from grpo_jax.runs.folder import RunFolder
from grpo_jax.runs.pretrained import keep_description
from grpo_jax.statistics import paired_difference
from grpo_jax.training.phases import fit
from grpo_jax.training.prepare import load_model

Values = Mapping[str, np.ndarray]  # name -> one number for each held-out pair or text; the first is minimised
Rows = dict[str, dict[str, Any]]  # name of a row of the final table -> numbers by name


@dataclass(frozen=True)
class PairOptions:
    """Options that all methods on pairs and ratings have."""

    train: SupervisedConfig = SupervisedConfig(
        steps=100, learning_rate=1e-6, warmup_steps=10, decay="linear", checkpoint_every=50, log_every=10, eval_every=20
    )
    model: ModelOptions = ModelOptions()
    output: flags.RunConfig = flags.RunConfig(Path(RUN_DIR))
    method: Method = "dpo"
    """Method that trains the model. Each method has options of its own, which `--method NAME --help` lists."""
    task: str = ""
    """Preferences, or ratings for KTO: a file (.jsonl, .json, .csv, .parquet), a folder with train.jsonl, an id on the
    hub."""
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
    """The data, model and functions of a method, made from its options."""

    config: Any  # the options, with defaults that were resolved
    phase: str
    model: Pretrained  # the trained model
    params: Any  # initial parameters of the objective
    objective: FitObjective
    batches: Callable[[int], Any]  # step -> batch
    evaluate: Callable[[Any], Any]  # parameters -> `Values`, or another evaluation
    inputs: Mapping[str, str]  # digests of the data, which must be the same when the run resumes
    title: str  # title of the table
    warnings: Mapping[str, str]
    losses: Sequence[str] = ()  # sentences about dropped and cut rows, which are warnings
    notes: Sequence[str] = ()  # sentences about the other rows
    others: Mapping[str, Pretrained] = {}  # frozen models by role, whose files must be the same when the run resumes
    # (job, initial parameters) -> the job with scores of the initial model, computed once; None: it needs none
    with_reference: "Callable[[Job, Any], Job] | None" = None
    summary: Callable[[Any], dict[str, float]] = with_intervals  # evaluation -> numbers
    # (parameters, evaluation) -> held-out metrics; None: the summary
    log: Callable[[Any, Any], Mapping[str, float]] | None = None
    # (evaluation before, evaluation after, parameters after) -> table; None: `compare`
    rows: Callable[[Any, Any, Any], Rows] | None = None
    # (run, evaluation after, parameters after) -> further results; may write further files
    leave: Callable[[RunFolder, Any, Any], Mapping[str, Any]] = lambda run, evaluation, params: {}


def run_method(make_job: Callable[[Any], Job], config: Any) -> None:
    """Trains and evaluates; prints a table and the checksum, and writes results.json and report.html.

    Args:
      make_job: The method: options of the run -> the job.
      config: The options of the run.
    """
    started = time.perf_counter()
    make_fit_optimizer(config.train)  # refuses a bad one before the data is read
    job = make_job(config)
    # A resumed run keeps the dtype, even on another kind of device.
    config = with_options(job.config, dtype=job.model.config.dtype)
    run = open_job(job._replace(config=config))
    params = place(job.params, devices_of(config.train))
    if job.with_reference:
        with run.waiting("scoring all completions by the reference (may take minutes)"):
            job = job.with_reference(job, params)
    latest: dict[int, Any] = {}  # steps taken -> evaluation, to evaluate no parameters twice

    def evaluate(params: Any, step: int) -> Any:
        if step not in latest:
            latest.clear()
            latest[step] = job.evaluate(params)
        return latest[step]

    def log(params: Any, step: int) -> dict[str, float]:
        evaluation = evaluate(params, step)
        numbers = job.log(params, evaluation) if job.log else job.summary(evaluation)
        return {f"heldout_{name}": value for name, value in numbers.items()}

    def evaluate_start() -> dict[str, Any]:
        with run.waiting("evaluating the initial model (may take minutes if programs must be compiled)"):
            leaves = jax.tree.leaves(evaluate(params, 0))
            return {"leaves": leaves, "numbers": log(params, 0)}

    start = run.remember(job.phase, evaluate_start)
    state = fit(
        *(job.objective, params, job.batches, config.train, run),
        phase=job.phase,
        start=start["numbers"],
        evaluate=log,
    )
    trained = join(state.params, split(params)[1])
    after = evaluate(trained, config.train.steps)
    before = jax.tree.unflatten(jax.tree.structure(after), start["leaves"])
    rows = job.rows(before, after, trained) if job.rows else compare(before, after, job.summary)
    more = job.leave(run, after, trained)
    checksum = params_sha256(state.params)
    report.print_results(run, job.title, rows)
    report.finish(run, {**rows, **more}, checksum, started)


def open_job(job: Job) -> RunFolder:
    """Opens the folder of a run, and stores the model's description, the warnings and the digests of all inputs."""
    run = flags.open_run(job.config)
    keep_description(run, {"policy": job.model, **job.others}, job.config.model, job.config.chat)
    tokenizer = job.model.tokenizer
    end = turn_end(Chat(tokenizer, job.model.eos_ids)) if uses_chat(job.config.chat, tokenizer) else None
    if end and not end.learned:
        run.say("plan: the chat template writes no end of a turn, so none is trained")
    for note in job.notes:
        run.say(note)
    run.warn({**{loss: loss for loss in job.losses}, **job.warnings})
    run.keep_inputs(job.phase, {**job.inputs, **optimizer_source(job.config.train)})
    return run


def compare(before: Values, after: Values, summary: Callable[[Values], dict[str, float]]) -> Rows:
    """Returns the rows "before" and "after"; "after" includes the change of the minimised number.

    Args:
      before, after: The numbers of the same pairs or texts before and after training.
      summary: Summarises the numbers, with intervals.
    """
    first = next(iter(after))
    change = paired_difference(after[first], before[first])
    return {"before": summary(before), "after": summary(after) | change.named("change")}


# ---- pairs and ratings


def pair_job(
    config: Any,
    phase: str,
    make: Callable[[Pretrained, EncodedPairs, EncodedPairs], dict[str, Any]],
    *,
    number: str,
    read: Callable[..., tuple[Sequence[Any], Mapping[str, int]]],
    encode: Callable[..., EncodedPairs],
    has_reference: bool = False,
    has_end: bool = True,
) -> Job:
    """Reads --task, holds out a share by a hash of the prompt, loads the model, and makes the job.

    Args:
      config: The options of the run.
      phase: The name of the phase.
      make: (model, training rows, held-out rows) -> fields of the job, and two functions: "score" is `score_pairs` with
        the method's scores and model; "evaluate" maps (scores of the held-out pairs `[M, 2]`, these pairs) to an
        evaluation.
      number: The name of the option for the number of pairs or completions in a step.
      read: (source, chat=...) -> rows, and the numbers of dropped rows by reason.
      encode: (chat, rows, options of `encode_answers`) -> encoded rows.
      has_reference: True if the loss uses the scores of the initial model.
      has_end: True if the end of completions is learned, by a policy. A reward model scores the last token.

    Raises:
      UsageError: One sentence that says what to change.
    """
    size, devices = getattr(config, number), devices_of(config.train)
    check_warmup(config.train, config.train.steps, default=type(config)().train.warmup_steps)
    check_rows(config.train, rows=size, name=number)
    if not config.task:
        raise UsageError(f"--task is needed: name a file of {number.removeprefix('num_')}")
    config = with_options(config, chat=uses_chat(config.chat, load_tokenizer(model_folder(config.model.model))))
    rows, dropped = read(config.task, chat=bool(config.chat))
    parts = split_preferences(rows, config.heldout_share)
    model = load_model(config.model, seed=config.seed, sharding=load_shardings(devices))
    chat = make_chat(model.tokenizer, model.eos_ids, config.model.chat_template_kwargs)
    options = encoding(model, config.model, config.max_tokens) | {"in_chat": bool(config.chat)}
    options |= {} if has_end else judging(model)
    training, heldout = (encode(chat, part, **options) for part in parts)
    batches = pair_batches(training, size, config.seed, name=number)
    noun = number.removeprefix("num_")
    width = max(sum(pair_widths(part)) for part in (training, heldout))
    model = for_texts(model, width)
    fields = make(model, training, heldout)
    score, evaluate = partial(fields.pop("score"), num_pairs=size, devices=devices), fields.pop("evaluate")
    digests = (hash_values(side.prompts, side.answers, side.desirable) for side in (training, heldout))

    sides = {"training": training, "held out": heldout}
    losses = [f"{name}: {note}" for name, pairs in sides.items() for note in pairs.notes]

    def evaluated(pairs: EncodedPairs, params: Any) -> Any:
        return evaluate(score(params, heldout), whole_batch(pairs))

    def with_reference(job: Job, params: Any) -> Job:
        scored = [side._replace(ref_logprobs=score(params, side)) for side in (training, heldout)]
        batches = pair_batches(scored[0], size, config.seed)
        return job._replace(batches=batches, evaluate=partial(evaluated, scored[1]))

    return Job(
        config=config,
        phase=phase,
        model=model,
        params=fields.pop("params", model.params),
        batches=batches,
        evaluate=partial(evaluated, heldout),
        inputs=dict(zip(("training rows", f"held-out {noun}"), digests, strict=True)),
        title=f"{len(heldout.prompts)} held-out {noun} of {len(rows)}, with 95% intervals",
        losses=[f"dropped {many} rows {why}" for why, many in dropped.items()] + losses,
        warnings=fields.pop("warnings", {}) | length_warning(width, model.config.max_position_embeddings),
        with_reference=with_reference if has_reference else None,
        **fields,
    )


def encoding(pretrained: Pretrained, options: ModelOptions, max_tokens: int | None) -> dict[str, Any]:
    """Returns the options of `encode_answers` that limit texts to those of a model.

    Args:
      pretrained: The model.
      options: The options of the model, which limit prompts.
      max_tokens: The longest completion, in tokens; None: the length that the model was trained on.

    Raises:
      UsageError: Completions leave no room for a prompt.
    """
    longest = pretrained.config.max_position_embeddings
    return {
        "max_prompt_tokens": prompt_limit(options.max_prompt_tokens, longest, max_tokens or 1),
        "max_tokens": longest if max_tokens is None else max_tokens,
        "overlong": options.overlong,
        "vocab_size": pretrained.config.vocab_size,
    }


def judging(pretrained: Pretrained) -> dict[str, Any]:
    """Returns the options of `encode_answers` for a reward model made from a pretrained one."""
    return {"judged": True, "pad_id": classifier_padding(read_json(pretrained.folder / "config.json"))}
