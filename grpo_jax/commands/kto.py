"""A policy from ratings: completions that were found good or bad, without another one beside them (KTO, 2402.01306).

--data are rows with prompt, completion and label (true or false). Rows with chosen and rejected, as for --method dpo,
give one of each. A share is held out by a hash of the prompt. The policy learns to move towards good completions and
away from bad ones, compared with the model that it starts from (the reference). How far is far is measured on
completions of other prompts, in each step. Start from a model that was trained on such completions: `--method sft`.

  grpo-jax train --method kto --model DIR --data FILE.jsonl
  grpo-jax train --method kto --model DIR --data FILE.jsonl --undesirable-weight 0.5
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, cast

import numpy as np

from grpo_jax.commands.dpo import encoding, given_constants, reference_logprobs, show
from grpo_jax.commands.train import RUN_DIR, Method
from grpo_jax.config import ModelOptions, with_options
from grpo_jax.data import digests
from grpo_jax.data.preferences import EncodedPairs, split_preferences
from grpo_jax.data.ratings import EncodedRatings, encode_ratings, read_ratings, with_mismatched, with_none
from grpo_jax.devices import devices_of, load_shardings, place
from grpo_jax.errors import UsageError
from grpo_jax.functional import kto_loss
from grpo_jax.hosts import check_alone
from grpo_jax.models.trainable import join, split
from grpo_jax.models.transformer import Params
from grpo_jax.offline.kto import RatedLoss, evaluate_ratings, rated_batches, train_kto
from grpo_jax.offline.phase import SupervisedConfig, check_supervised
from grpo_jax.offline.preference import score_preferences, with_intervals
from grpo_jax.offline.reward_model import pair_widths
from grpo_jax.prepare import Loaded, decide_chat, load_model
from grpo_jax.rl.guards import length_warning
from grpo_jax.runs import flags, terminal
from grpo_jax.runs.checkpoint import params_sha256
from grpo_jax.runs.folder import RunFolder
from grpo_jax.runs.pretrained import keep_description
from grpo_jax.statistics import paired_difference

PHASE = "kto"
CURVES = (
    (("loss", "heldout_loss"), "loss (dots: held out)"),
    (("log_ratio_desirable", "heldout_log_ratio_desirable"), "log π/π_ref of good ones, nats"),
    (("log_ratio_undesirable", "heldout_log_ratio_undesirable"), "log π/π_ref of bad ones, nats"),
    (("kl", "heldout_kl"), "z₀, nats"),
)
# constant of the loss -> what it must be, and in words
CONSTANTS = {
    "beta": (lambda x: x > 0, "above 0"),
    "desirable_weight": (lambda x: x >= 0, "at least 0"),
    "undesirable_weight": (lambda x: x >= 0, "at least 0"),
}


@dataclass(frozen=True)
class Config:
    """Options of the run."""

    train: SupervisedConfig = SupervisedConfig(
        steps=100, learning_rate=1e-6, warmup_steps=10, decay="linear", checkpoint_every=50, log_every=10, eval_every=20
    )
    model: ModelOptions = ModelOptions()
    output: flags.RunConfig = flags.RunConfig(Path(RUN_DIR))
    method: Method = "kto"
    """What trains the model. Each method has options of its own: `--method grpo --help` lists those of GRPO."""
    beta: float = 0.1
    """β: how fast the loss saturates, in 1/nats. 0.1 from the paper."""
    desirable_weight: float = 1.0
    """λ_D, weight of the loss of good completions; 1 from the paper."""
    undesirable_weight: float = 1.0
    """λ_U, weight of the loss of bad completions; 1 from the paper. For unequal numbers of both it advises a
    (λ_D x good ones) / (λ_U x bad ones) between 1 and 4/3."""
    reference_point: Literal["kl", "zero"] = "kl"
    """z₀, what a log-ratio is compared with. kl: the estimate of KL(π ‖ π_ref) from completions of other prompts, of
    the whole batch. zero: 0, which is APO-zero (2408.06266), for completions better than those of the model."""
    data: str = ""
    """File, folder or hub id of ratings or preferences."""
    chat: bool | None = None
    """Whether a text is a user's message of the chat template, and a transcript several messages. None: if the
    tokenizer has one."""
    heldout_share: float = 0.1
    """Share of the completions that is evaluated and not trained on."""
    max_tokens: int | None = None
    """Longest completion with its EOS, in tokens (T); None: the length that the model was trained on. `overlong` says
    what happens to longer ones: they are dropped, or lose their end."""
    num_completions: int = 32
    """Completions of a step (N)."""
    seed: int = 0
    """Of the order of completions, of which are mismatched, and of new adapters."""


class Part(NamedTuple):
    """Rated completions, each beside one of another prompt where the KL is estimated."""

    pairs: EncodedPairs
    desirable: np.ndarray  # bool [M]


def main(config: Config) -> None:
    """Trains and evaluates; a table, curves, a page, and the checksum."""
    started = time.perf_counter()
    loss = loss_of(config)
    check_alone("phases on ratings")
    check_supervised(config.train, seed=config.seed, rows=config.num_completions, name="num_completions")
    if not config.data:
        raise UsageError("--data is needed: name a file of ratings")
    config = with_options(config, chat=decide_chat(config.chat, config.model))
    ratings, dropped = read_ratings(config.data, chat=bool(config.chat))
    sides = split_preferences(ratings, config.heldout_share)
    devices = devices_of(config.train)
    model = load_model(config.model, seed=config.seed, sharding=load_shardings(devices))
    options = encoding(config, model.pretrained)
    encoded = [encode_ratings(model.pretrained.tokenizer, side, **options) for side in sides]
    beside = partial(with_mismatched, seed=config.seed) if config.reference_point == "kl" else with_none
    training, heldout = (Part(beside(side), np.array(side.desirable)) for side in encoded)
    if config.num_completions > len(training.desirable):
        raise UsageError(
            f"num_completions is {config.num_completions}, but there are {len(training.desirable)} completions: set it "
            "to at most that"
        )
    weights = {True: config.desirable_weight, False: config.undesirable_weight}
    if not any(weights[label] for label in set(training.desirable.tolist())):
        word = only_word(encoded[0].desirable)
        raise UsageError(f"all completions are {word}, and the weight of {word} ones is 0: set it above 0")
    run = flags.open_run(config)
    keep_description(run, model.pretrained, config.model, config.chat)
    for note in (*(f"dropped {count} rows {why}" for why, count in dropped.items()), *notes(encoded[0])):
        run.console.print(note, markup=False, highlight=False)
    if word := only_word(encoded[0].desirable):
        run.warn_once("ratings", f"all completions to train on are {word}: the method tells good ones from bad ones")
    run.warn(length_warning(sum(pair_widths(training.pairs)), model.pretrained.config.max_position_embeddings))
    inputs = {"training rows": encoded[0], "held-out completions": encoded[1]}
    run.keep_inputs(PHASE, {name: digests.of_values(*part[:3]) for name, part in inputs.items()})
    model = model._replace(params=place(model.params, devices))
    train_and_evaluate(run, config, model, training, heldout, loss)
    terminal.say_end(run, started)


def loss_of(config: Config) -> RatedLoss:
    """The loss with its constants.

    Raises:
      UsageError: a constant is impossible.
    """
    given, loss = given_constants(config, CONSTANTS), cast(RatedLoss, kto_loss)
    if not given["desirable_weight"] and not given["undesirable_weight"]:
        raise UsageError("desirable_weight and undesirable_weight are 0, so nothing is learned: set one above 0")
    return partial(loss, **given)


def train_and_evaluate(
    run: RunFolder, config: Config, model: Loaded, training: Part, heldout: Part, loss: RatedLoss
) -> None:
    """Trains on the one part, evaluates on the other before, during and after; leaves table, curves and results."""
    estimates_kl, devices = config.reference_point == "kl", devices_of(config.train)
    parts = {"training": training.pairs, "heldout": heldout.pairs}
    ref_logprobs = reference_logprobs(run, model, parts, config.num_completions, devices)
    batches = rated_batches(
        training.pairs, training.desirable, ref_logprobs["training"], config.num_completions, config.seed
    )

    def evaluated(params: Params) -> dict[str, np.ndarray]:
        size = config.num_completions
        logprobs = score_preferences(model.policy, params, heldout.pairs, num_pairs=size, devices=devices)
        log_ratios = logprobs - ref_logprobs["heldout"]
        return evaluate_ratings(loss, log_ratios, heldout.desirable, estimates_kl=estimates_kl)

    def heldout_numbers(params: Params) -> dict[str, float]:
        return {f"heldout_{name}": value for name, value in summary(evaluated(params)).items()}

    with run.waiting("evaluating the initial model (may take minutes if programs must be compiled)"):
        before = evaluated(model.params)
    state = train_kto(
        model.policy,
        model.params,
        batches,
        config.train,
        run,
        loss=loss,
        estimates_kl=estimates_kl,
        phase=PHASE,
        evaluate=heldout_numbers,
    )
    after = evaluated(join(state.params, split(model.params)[1]))
    change = paired_difference(after["loss"], before["loss"]).named("change")
    rows = {"before": summary(before), "after": summary(after) | change}
    show(run, rows, params_sha256(state.params), title="held-out completions", curves=CURVES, phase=PHASE)


def summary(values: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Means of what `evaluate_ratings` gives, with intervals from resampling completions; z₀ has none."""
    several = {name: x for name, x in values.items() if name != "kl" and len(x)}
    return with_intervals(several) | {"kl": float(values["kl"][0])}


def only_word(desirable: Sequence[bool]) -> str:
    """What all are, good or bad; empty where there are both."""
    return "" if len(set(desirable)) > 1 else "good" if desirable[0] else "bad"


def notes(ratings: EncodedRatings) -> tuple[str, ...]:
    """What was dropped, and how many completions are good and bad, in words."""
    good = sum(ratings.desirable)
    return (*ratings.notes, f"completions to train on: {good} good, {len(ratings.desirable) - good} bad")
