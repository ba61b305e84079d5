"""A reward model from preferences: how often does it prefer the chosen one of two held-out answers, and how surely?

--data are rows with prompt, chosen and rejected, or transcripts of HH-RLHF; a share is held out by a hash of the
prompt. The model gets a scalar head and learns −log σ(r_chosen − r_rejected). What comes out is a folder that
`load_reward_model` makes a reward of, and transformers a classifier. Shown beside it: how often the shorter answer was
the chosen one. With the 260-thousand-parameter TinyStories model and the 2,312 pairs of harmless-base's test set,
expect an accuracy of 0.53 to 0.61 in one to two minutes on two CPU cores, by which quarter of the pairs is held out:
such a model learns little more than that shorter answers were preferred.
Left out of the papers: pretraining on preferences, and ensembles.

  grpo-jax train --method reward-model --model DIR --data FILE.jsonl.gz
"""

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.commands.dpo import given_constants
from grpo_jax.commands.train import RUN_DIR, Method
from grpo_jax.config import ModelOptions, with_options
from grpo_jax.data import digests
from grpo_jax.data.preferences import EncodedPairs, Preference, encode_preferences, read_preferences, split_preferences
from grpo_jax.devices import devices_of, load_shardings, place, to_numpy
from grpo_jax.errors import UsageError
from grpo_jax.models.heads import Headed, add_head
from grpo_jax.models.huggingface import Pretrained
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.trainable import join, split
from grpo_jax.offline.phase import SupervisedConfig, check_supervised
from grpo_jax.offline.reward_model import (
    PairEvaluation,
    evaluate_pairs,
    pair_batches,
    score_pairs,
    train_reward_model,
)
from grpo_jax.prepare import decide_chat, load_model
from grpo_jax.rewards.learned import RewardModel, save_reward_model
from grpo_jax.runs import flags, terminal
from grpo_jax.runs.checkpoint import params_sha256
from grpo_jax.runs.folder import RunFolder, write_json
from grpo_jax.runs.pretrained import keep_description
from grpo_jax.statistics import cell

PHASE = "reward_model"
# option -> what it must be, and in words
RANGES = {"center_coef": (lambda x: x >= 0, "at least 0, and finite"), "bins": (lambda x: x >= 1, "at least 1")}
CURVES = (("loss", "loss of a batch"), ("heldout_nll", "held-out NLL"), ("heldout_accuracy", "held-out accuracy"))


@dataclass(frozen=True)
class Config:
    """Options of the run."""

    train: SupervisedConfig = SupervisedConfig(
        steps=108,
        learning_rate=3e-4,
        warmup_steps=10,
        decay="linear",
        weight_decay=0.1,
        checkpoint_every=27,
        log_every=10,
        eval_every=27,
    )
    model: ModelOptions = ModelOptions(max_prompt_tokens=32, overlong="truncate")
    output: flags.RunConfig = flags.RunConfig(Path(RUN_DIR))
    method: Method = "reward-model"
    """What trains the model. Each method has options of its own: `--method grpo --help` lists those of GRPO."""
    data: str = ""
    """File, folder or hub id of preferences."""
    chat: bool | None = None
    """Whether a text is a user's message of the chat template, and a transcript several messages. None: if the
    tokenizer has one."""
    heldout_share: float = 0.25
    """Share of the pairs that is evaluated and not trained on."""
    max_tokens: int | None = 64
    """Longest answer, in tokens (T); None: as long as they come. `overlong` says what happens to pairs with more: they
    are dropped, or an answer loses its end."""
    num_pairs: int = 16
    """Pairs of a step (N)."""
    center_coef: float = 0.0
    """Weight of (r_chosen + r_rejected)^2, which holds rewards near 0; 0.01 is usual."""
    bins: int = 8
    """Of the calibration curve."""
    seed: int = 0
    """Of the order of pairs."""


def encode_pairs(
    loaded: Pretrained, pairs: Sequence[Preference], options: ModelOptions, max_tokens: int | None, chat: bool = False
) -> EncodedPairs:
    """Preferences as the tokens of a model, with prompts as long as its options allow."""
    return encode_preferences(
        loaded.tokenizer,
        pairs,
        eos_ids=loaded.eos_ids,
        max_prompt_tokens=options.max_prompt_tokens,
        max_tokens=max_tokens,
        overlong=options.overlong,
        vocab_size=loaded.config.vocab_size,
        chat=chat,
    )


def main(config: Config) -> None:
    """Trains and evaluates; a table, curves, the calibration picture, the model's folder, and a checksum."""
    started = time.perf_counter()
    given_constants(config, RANGES)
    check_supervised(config.train, seed=config.seed, rows=config.num_pairs, name="num_pairs")
    if not config.data:
        raise UsageError("--data is needed: name a file of preferences")
    config = with_options(config, chat=decide_chat(config.chat, config.model))
    preferences, dropped = read_preferences(config.data, chat=bool(config.chat))
    training, heldout = split_preferences(preferences, config.heldout_share)
    devices = devices_of(config.train)
    model = load_model(config.model, seed=config.seed, sharding=load_shardings(devices))
    loaded = model.pretrained
    shape, params = add_head(loaded.config, model.params)
    params = place(params, devices)
    train_pairs, heldout_pairs = (
        encode_pairs(loaded, part, config.model, config.max_tokens, bool(config.chat)) for part in (training, heldout)
    )
    batches = pair_batches(train_pairs, config.num_pairs, config.seed)

    def evaluated(params: Headed, pairs: EncodedPairs) -> PairEvaluation:
        found = score_pairs(shape, params, pairs, num_pairs=config.num_pairs, devices=devices)
        return evaluate_pairs(found, bins=config.bins)

    def heldout_numbers(params: Headed) -> dict[str, Any]:
        numbers = evaluated(params, heldout_pairs).numbers()
        return {f"heldout_{name}": value for name, value in numbers.items()}

    run = flags.open_run(config)
    keep_description(run, model.pretrained, config.model, config.chat)
    pairs = {"training rows": train_pairs, "held-out pairs": heldout_pairs}
    run.keep_inputs(PHASE, {name: digests.of_values(*part[:3]) for name, part in pairs.items()})
    for note in (*(f"dropped {count} rows {why}" for why, count in dropped.items()), *train_pairs.notes):
        run.console.print(note, markup=False, highlight=False)
    state = train_reward_model(
        decoder_policy(shape),
        params,
        batches,
        config.train,
        run,
        center_coef=config.center_coef,
        evaluate=heldout_numbers,
    )
    trained = join(state.params, split(params)[1])

    after, shorter = evaluated(trained, heldout_pairs), evaluate_pairs(-answer_lengths(heldout_pairs))
    rows = {"held out": after.numbers(), "trained on": evaluated(trained, train_pairs).numbers()}
    rows["the shorter one"] = shorter.accuracy.named("accuracy")
    checksum, whole = params_sha256(state.params), to_numpy(trained)
    if run.writes:
        title = f"{len(heldout_pairs.prompts)} held-out pairs of {len(preferences)}, with 95% intervals"
        show(run, title, rows, after, checksum)
        keep_model(run, RewardModel(shape, whole, loaded.tokenizer, loaded.eos_ids, loaded.folder))
        terminal.say_end(run, started)
        run.console.print(f"SHA-256 of the trained parameters: {checksum}", soft_wrap=True)


def show(
    run: RunFolder, title: str, rows: Mapping[str, Mapping[str, Any]], evaluation: PairEvaluation, checksum: str
) -> None:
    """The table, curves.png, the calibration picture and results.json."""
    table = {
        name: [cell(row, "accuracy"), cell(row, "nll"), cell(row, "calibration_error")] for name, row in rows.items()
    }
    terminal.print_table(run, title, ("accuracy", "NLL", "calibration error"), table)
    curve = {name: np.asarray(value).tolist() for name, value in evaluation.calibration._asdict().items()}
    write_json(run.path / "results.json", {**rows, "calibration": curve, "params_sha256": checksum})
    terminal.save_curves(run, CURVES, (PHASE,))
    save_calibration(run, evaluation)


def answer_lengths(pairs: EncodedPairs) -> np.ndarray:
    """Tokens of the answers, `[M, 2]`."""
    return np.array([[len(ids) for ids in answers] for answers in pairs.answers], float)


def keep_model(run: RunFolder, model: RewardModel) -> None:
    """Writes the run's reward-model/ in place of an earlier one, which may be of fewer steps or damaged."""
    folder = run.path / "reward-model"
    for unfinished in run.path.glob(f"{folder.name}.*"):  # of a process that was killed
        shutil.rmtree(unfinished)
    complete = save_reward_model(folder.with_name(f"{folder.name}.next"), model)
    shutil.rmtree(folder, ignore_errors=True)
    complete.rename(folder)
    run.console.print(f"reward model: {folder}", markup=False, highlight=False, soft_wrap=True)


def save_calibration(run: RunFolder, evaluation: PairEvaluation) -> None:
    """calibration.png: how often the preferred answer was the chosen one, by how surely it was preferred."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    curve = evaluation.calibration
    spread = 1.96 * np.sqrt(curve.predicted * (1 - curve.predicted) / curve.sizes)
    figure, axis = plt.subplots(figsize=(4, 3.6), layout="constrained")
    axis.plot([0.5, 1], [0.5, 1], "k:", linewidth=1, label="calibrated")
    axis.fill_between(
        curve.predicted, curve.predicted - spread, curve.predicted + spread, alpha=0.15, label="95% if calibrated"
    )
    axis.plot(curve.predicted, curve.frequency, "o-", label=f"error {curve.error:.3f}")
    axis.set_xlabel("predicted probability of the preferred answer")
    axis.set_ylabel("share where it was the chosen one")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(run.path / "calibration.png", dpi=120)
    plt.close(figure)
