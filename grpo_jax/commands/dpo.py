"""A policy from preferences, without a reward model: DPO and its relatives.

--data are rows with prompt, chosen and rejected, or transcripts of HH-RLHF; a share is held out by a hash of the
prompt. The policy learns to raise the log-probability of the chosen completion over that of the rejected one, compared
with the model that it starts from (the reference). --preference-loss has others; simpo, orpo and cpo have no reference.
Start from a model that was trained on such completions: `--method sft`.

  grpo-jax train --method dpo --model DIR --data FILE.jsonl
  grpo-jax train --method dpo --model DIR --data FILE.jsonl --preference-loss ipo --tau 0.5
"""

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from grpo_jax import functional
from grpo_jax.commands.train import RUN_DIR, Method
from grpo_jax.config import ModelOptions, with_options
from grpo_jax.data import digests
from grpo_jax.data.preferences import EncodedPairs, encode_preferences, read_preferences, split_preferences
from grpo_jax.data.text import ending_id, prompt_limit
from grpo_jax.devices import Devices, devices_of, load_shardings, place
from grpo_jax.errors import UsageError
from grpo_jax.models.huggingface import Pretrained
from grpo_jax.models.trainable import join, split
from grpo_jax.models.transformer import Params
from grpo_jax.offline.phase import SupervisedConfig, check_supervised
from grpo_jax.offline.preference import (
    PairLoss,
    evaluate_preferences,
    needs_reference,
    pair_scores,
    score_preferences,
    train_preference,
    with_intervals,
)
from grpo_jax.offline.reward_model import pad_pairs, pair_batches, pair_widths
from grpo_jax.prepare import Loaded, decide_chat, load_model
from grpo_jax.rl.guards import length_warning
from grpo_jax.runs import flags, terminal
from grpo_jax.runs.checkpoint import params_sha256
from grpo_jax.runs.folder import RunFolder, kept_arrays
from grpo_jax.runs.pretrained import keep_description
from grpo_jax.statistics import cell, paired_difference

PHASE = "dpo"
CURVES = (
    (("loss", "heldout_loss"), "loss (dots: held out)"),
    (("accuracy", "heldout_accuracy"), "chosen above rejected (dots: held out)"),
    (("margin", "heldout_margin"), "margin, nats (dots: held out)"),
    (("log_ratio_chosen", "heldout_log_ratio_chosen"), "log π/π_ref of chosen, nats"),
)
LOSSES: Mapping[str, PairLoss] = {
    "dpo": functional.dpo_loss,
    "robust": functional.robust_dpo_loss,
    "length-normalized": functional.length_normalized_dpo_loss,
    "ipo": functional.ipo_loss,
    "hinge": functional.hinge_loss,
    "simpo": functional.simpo_loss,
    "orpo": functional.orpo_loss,
    "cpo": functional.cpo_loss,
}
# constant of losses -> what it must be, and in words
CONSTANTS = {
    "beta": (lambda x: x > 0, "above 0"),
    "tau": (lambda x: x > 0, "above 0"),
    "gamma": (lambda x: x >= 0, "at least 0"),
    "label_smoothing": (lambda x: 0 <= x < 0.5, "at least 0 and below 0.5"),
    "odds_coef": (lambda x: x >= 0, "at least 0"),
    "nll_coef": (lambda x: x >= 0, "at least 0"),
}


@dataclass(frozen=True)
class Config:
    """Options of the run."""

    train: SupervisedConfig = SupervisedConfig(
        steps=100, learning_rate=1e-6, warmup_steps=10, decay="linear", checkpoint_every=50, log_every=10, eval_every=20
    )
    model: ModelOptions = ModelOptions()
    output: flags.RunConfig = flags.RunConfig(Path(RUN_DIR))
    method: Method = "dpo"
    """What trains the model. Each method has options of its own: `--method grpo --help` lists those of GRPO."""
    preference_loss: Literal["dpo", "robust", "length-normalized", "ipo", "hinge", "simpo", "orpo", "cpo"] = "dpo"
    """The loss of a pair. Its constants follow; None: that of the paper."""
    beta: float | None = None
    """β of dpo, robust, length-normalized, hinge, simpo and cpo."""
    label_smoothing: float | None = None
    """Probability that a pair is the wrong way round: of dpo, robust and length-normalized."""
    tau: float | None = None
    """Weight of the KL in ipo."""
    gamma: float | None = None
    """Margin that simpo asks for."""
    odds_coef: float | None = None
    """Weight of the odds ratio in orpo."""
    nll_coef: float | None = None
    """Weight of the NLL of the chosen completion in cpo."""
    data: str = ""
    """File, folder or hub id of preferences."""
    chat: bool | None = None
    """Whether a text is a user's message of the chat template, and a transcript several messages. None: if the
    tokenizer has one."""
    heldout_share: float = 0.1
    """Share of the pairs that is evaluated and not trained on."""
    max_tokens: int | None = None
    """Longest completion with its EOS, in tokens (T); None: the length that the model was trained on. `overlong` says
    what happens to pairs with more: they are dropped, or a completion loses its end."""
    num_pairs: int = 16
    """Pairs of a step (N)."""
    seed: int = 0
    """Of the order of pairs, and of new adapters."""


class Pairs(NamedTuple):
    """Preferences as tokens, and what the reference gives them."""

    training: EncodedPairs
    heldout: EncodedPairs
    ref_logprobs: Mapping[str, np.ndarray]  # of both, as `reference_logprobs`; empty without a reference


def main(config: Config) -> None:
    """Trains and evaluates; a table, curves, a page, and the checksum."""
    started = time.perf_counter()
    loss = loss_of(config)
    check_supervised(config.train, seed=config.seed, rows=config.num_pairs, name="num_pairs")
    if not config.data:
        raise UsageError("--data is needed: name a file of preferences")
    config = with_options(config, chat=decide_chat(config.chat, config.model))
    preferences, dropped = read_preferences(config.data, chat=bool(config.chat))
    parts = split_preferences(preferences, config.heldout_share)
    devices = devices_of(config.train)
    model = load_model(config.model, seed=config.seed, sharding=load_shardings(devices))
    training, heldout = (encode(config, part, model.pretrained) for part in parts)
    if config.num_pairs > len(training.prompts):
        raise UsageError(
            f"num_pairs is {config.num_pairs}, but there are {len(training.prompts)} pairs: set it to at most that"
        )
    run = flags.open_run(config)
    keep_description(run, model.pretrained, config.model, config.chat)
    for note in (*(f"dropped {count} rows {why}" for why, count in dropped.items()), *training.notes):
        run.console.print(note, markup=False, highlight=False)
    run.warn(length_warning(sum(pair_widths(training)), model.pretrained.config.max_position_embeddings))
    inputs = {"training rows": digests.of_values(*training[:2]), "held-out pairs": digests.of_values(*heldout[:2])}
    run.keep_inputs(PHASE, inputs)
    model = model._replace(params=place(model.params, devices))
    ref_logprobs = {}
    if needs_reference(loss):
        by_name = {"training": training, "heldout": heldout}
        ref_logprobs = reference_logprobs(run, model, by_name, config.num_pairs, devices)
    pairs = Pairs(training, heldout, ref_logprobs)
    batches = pair_batches(training, config.num_pairs, config.seed, ref_logprobs=ref_logprobs.get("training"))

    def evaluated(params: Params) -> dict[str, np.ndarray]:
        return evaluate(model, params, pairs, loss, config.num_pairs, devices)

    def heldout_numbers(params: Params) -> dict[str, float]:
        return {f"heldout_{name}": value for name, value in with_intervals(evaluated(params)).items()}

    with run.waiting("evaluating the initial model (may take minutes if programs must be compiled)"):
        before = evaluated(model.params)
    state = train_preference(
        model.policy, model.params, batches, config.train, run, loss=loss, phase=PHASE, evaluate=heldout_numbers
    )
    after = evaluated(join(state.params, split(model.params)[1]))
    checksum = params_sha256(state.params)
    if run.writes:
        show(run, compare(before, after), checksum)
        terminal.say_end(run, started)


def loss_of(config: Config) -> PairLoss:
    """The loss with its constants.

    Raises:
      UsageError: a constant is of another loss, or impossible.
    """
    loss = LOSSES[config.preference_loss]
    given = given_constants(config, CONSTANTS)
    for name in given:
        if name not in inspect.signature(loss).parameters:
            owners = [other for other, function in LOSSES.items() if name in inspect.signature(function).parameters]
            raise UsageError(
                f"{name} is no constant of --preference-loss {config.preference_loss}: leave it out, or choose "
                f"{' or '.join(owners)}"
            )
    return partial(loss, **given)


def given_constants(config: Any, known: Mapping[str, tuple[Callable[[float], bool], str]]) -> dict[str, float]:
    """The constants of a loss that a config sets, by name.

    Args:
      config: has an option of each name.
      known: name -> what it must be, and in words.

    Raises:
      UsageError: one is impossible.
    """
    given = {name: getattr(config, name) for name in known if getattr(config, name) is not None}
    for name, value in given.items():
        is_possible, words = known[name]
        if not (math.isfinite(value) and is_possible(value)):
            raise UsageError(f"{name} is {value}: it must be {words}")
    return given


def encode(config: Config, preferences: Any, pretrained: Pretrained) -> EncodedPairs:
    """Preferences as the tokens of a model, each completion with its EOS.

    Raises:
      UsageError: one sentence that says what to change.
    """
    options = encoding(config, pretrained)
    return encode_preferences(pretrained.tokenizer, preferences, **options)


def encoding(config: Any, pretrained: Pretrained) -> dict[str, Any]:
    """How prompts and completions become tokens of a model: options of `encode_answers`.

    Raises:
      UsageError: completions leave no room for a prompt, or the tokenizer has no EOS.
    """
    longest, model, max_tokens = pretrained.config.max_position_embeddings, config.model, config.max_tokens
    return {
        "eos_ids": pretrained.eos_ids,
        "max_prompt_tokens": prompt_limit(model.max_prompt_tokens, longest, max_tokens or 1),
        "max_tokens": longest if max_tokens is None else max_tokens,
        "overlong": model.overlong,
        "vocab_size": pretrained.config.vocab_size,
        "chat": bool(config.chat),
        "end_id": ending_id(pretrained.tokenizer, pretrained.eos_ids),
    }


def reference_logprobs(
    run: RunFolder, model: Loaded, parts: Mapping[str, EncodedPairs], num_pairs: int, devices: Devices
) -> dict[str, np.ndarray]:
    """The log-probabilities of both completions under the start, which a resumed run reads from its reference.npz.

    Args:
      run: new, or to be continued.
      model: the start.
      parts: of the data, by name.
      num_pairs: that are scored at a time.
      devices: where the parameters are.

    Returns:
      float32 `[M, 2]` of each part.

    Raises:
      UsageError: the file is damaged or another one.
    """

    def score() -> dict[str, np.ndarray]:
        with run.waiting("scoring all completions by the reference (may take minutes)"):
            return {
                name: score_preferences(model.policy, model.params, part, num_pairs=num_pairs, devices=devices)
                for name, part in parts.items()
            }

    arrays = kept_arrays(run.path / "reference.npz", score)
    names = sorted(arrays)
    run.keep_inputs("reference", {"reference.npz": digests.of_values(names, *(arrays[name] for name in names))})
    return arrays


def evaluate(
    model: Loaded, params: Params, pairs: Pairs, loss: PairLoss, num_pairs: int, devices: Devices
) -> dict[str, np.ndarray]:
    """`evaluate_preferences` of the held-out pairs."""
    logprobs = score_preferences(model.policy, params, pairs.heldout, num_pairs=num_pairs, devices=devices)
    everything = pad_pairs(pairs.heldout, np.arange(len(logprobs)), *pair_widths(pairs.heldout))
    batch = everything._replace(ref_logprobs=pairs.ref_logprobs.get("heldout"))
    return evaluate_preferences(loss, pair_scores(logprobs, batch))


def compare(before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Rows "before" and "after", the latter with the change of the loss."""
    change = paired_difference(after["loss"], before["loss"])
    return {"before": with_intervals(before), "after": with_intervals(after) | change.named("change")}


def show(
    run: RunFolder,
    rows: Mapping[str, Mapping[str, float]],
    checksum: str,
    *,
    title: str = "held-out pairs",
    curves: Sequence[Any] = CURVES,
    phase: str = PHASE,
) -> None:
    """The table, curves.png and results.json."""
    names = [name for name in rows["after"] if not name.endswith(("_low", "_high"))]
    table = {name: [cell(row, name) for row in rows.values()] for name in names}
    terminal.print_table(run, f"{title} [95% intervals]", tuple(rows), table)
    terminal.save_results(run, rows, checksum, curves, (phase,))
