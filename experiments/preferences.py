"""Does DPO reach the best policy, which is known in closed form, from pairs only?

Completions are three tokens of eight, so all 512 completions of a prompt can be enumerated, and every result below is
exact. A completion is worth u = Σₜ w(prompt, oₜ). The start samples two completions, and the first is chosen with
probability σ(u₁ − u₂) (Bradley and Terry).

The policy with the highest J = E u − β KL(π ‖ π_ref) is π* ∝ π_ref exp(u/β) (2305.18290, equation 4). DPO never sees u.
At β = 1 its loss is least at π* itself. The control learns from the same pairs, but a coin toss decides which
completion is chosen.

"accuracy" is how often the implicit reward is higher for the chosen completion, over all possible pairs. π* has the
highest possible accuracy, and "below π*" is the distance to it. Each seed takes one and a half minutes on a CPU core.

Expect DPO to gain 0.93 to 0.97 of the J that π* gains, and to be 0.002 to 0.003 below its accuracy. Expect the control
to gain nothing. Compared with the paper, there is no pretrained model, no supervised start, and no natural language.

--loss kto learns from single completions: chosen completions are good, and rejected completions are bad. Its loss has
no finite optimum if labels contain errors: it makes a completion that is good more often than not ever more likely.

  python -m experiments.preferences
  python -m experiments.preferences --loss kto
"""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from scipy import special

from experiments import common
from experiments.common import Seeds, collect, over_seeds, print_over_seeds
from grpo_jax import hosts, report
from grpo_jax.commands import flags
from grpo_jax.data.preferences import EncodedPairs, with_mismatched
from grpo_jax.data.types import rng
from grpo_jax.functional import dpo_loss, kto_loss
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.rows.geometry import PromptTokens
from grpo_jax.offline.pairs import (
    PairBatch,
    kto_objective,
    pair_batches,
    pair_logprobs,
    preference_objective,
    score_pairs,
)
from grpo_jax.offline.phase import SupervisedConfig, check_rows
from grpo_jax.options import Positive, Seed, Size
from grpo_jax.runs.folder import RunFolder
from grpo_jax.statistics import cell
from grpo_jax.step import TrainState
from grpo_jax.training.phases import fit

VOCAB, TOKENS, PROMPTS = 8, 3, 4
POLICY = decoder_policy(ModelConfig(VOCAB, 32, 64, 2, 2, 2, 16, initializer_range=0.3))
COMPLETIONS = np.array(np.unravel_index(np.arange(VOCAB**TOKENS), (VOCAB,) * TOKENS)).T.astype(np.int32)  # [V^T, T]
COLUMNS = {
    "share": "share of π*'s gain",
    "accuracy": "accuracy",
    "below_best": "below π*",
    "utility": "E u",
    "objective": "J",
    "kl": "KL to π_ref",
    "kl_to_best": "KL to π*",
}


@dataclass(frozen=True)
class Config:
    """Options of the run."""

    train: SupervisedConfig = SupervisedConfig(
        steps=1200,
        learning_rate=1e-3,
        warmup_steps=20,
        decay="linear",
        checkpoint_every=200,
        log_every=20,
        eval_every=100,
    )
    seeds: Seeds = Seeds()
    output: flags.RunConfig = flags.RunConfig(Path("runs/preferences"))
    num_pairs: Size = 512
    """Pairs of a step. Each pair is seen once."""
    loss: Literal["dpo", "kto"] = "dpo"
    """dpo: of pairs. kto: of their completions one by one."""
    beta: Positive = 1.0
    """β of the loss and of the objective."""
    seed: Seed = 0
    """First seed: of utilities, parameters and pairs."""


def main(config: Config) -> None:
    """Trains with every seed; prints a table and writes curves and results.json."""
    started = time.perf_counter()
    hosts.check_alone("experiments with supervised phases")
    check_rows(config.train, rows=config.num_pairs, name="num_pairs")
    seeds = config.seeds.starting_at(config.seed)
    runs: dict[str, dict[str, list[float]]] = {}
    run = flags.open_run(config)
    for seed in seeds:
        collect(runs, one_seed(config, seed, run))
    rows = over_seeds(runs, first="share", control="control")
    # Worlds differ far more than methods, so intervals are useful only for differences to the same world's start.
    table = {
        name: [cell(row, column) if column in ("share", "below_best") else row[column] for column in COLUMNS]
        for name, row in rows.items()
    }
    print_over_seeds(run, "exact, by enumeration", seeds, list(COLUMNS.values()), table)
    curves = (("loss", "loss of a batch"), ("accuracy", "accuracy of a batch"), ("heldout_objective", "J"))
    common.save_over_seeds(run, runs, rows, seeds, curves)
    report.say_end(run, started)


def one_seed(config: Config, seed: int, run: RunFolder) -> dict[str, dict[str, float]]:
    """Measures the start, both methods and the closed form in the world of one seed."""
    params = common.new_params(POLICY, seed)
    reference = log_probabilities(params)
    worth = utilities(seed)
    best = special.log_softmax(reference + worth / config.beta, axis=-1)
    numbers = partial(judge, reference=reference, worth=worth, best=best, beta=config.beta)

    def heldout(params: Params, step: int) -> dict[str, float]:
        return {f"heldout_{name}": value for name, value in numbers(log_probabilities(params)).items()}

    results = {"start": numbers(reference)}
    total = config.train.steps * config.num_pairs
    for method in (config.loss, "control"):
        pairs = sample_pairs(reference, worth, total, seed, shuffled=method == "control")
        train = {"dpo": train_dpo, "kto": train_on_ratings}[config.loss]
        state = train(config, params, pairs, seed, run, phase=f"{method}_{seed}", evaluate=heldout)
        results[method] = numbers(log_probabilities(state.params))
    results["closed form"] = numbers(best)
    first, last = results["start"], results["closed form"]
    return {
        name: row
        | {
            "share": (row["objective"] - first["objective"]) / (last["objective"] - first["objective"]),
            "below_best": last["accuracy"] - row["accuracy"],
        }
        for name, row in results.items()
    }


def train_dpo(
    config: Config, params: Params, pairs: EncodedPairs, seed: int, run: RunFolder, **phase: Any
) -> TrainState:
    """Trains by DPO on pairs; `phase` holds further arguments of `fit`."""
    pairs = pairs._replace(ref_logprobs=score_pairs(pair_logprobs, POLICY, params, pairs, num_pairs=512))
    batches = pair_batches(pairs, config.num_pairs, seed)
    objective = preference_objective(POLICY, partial(dpo_loss, beta=config.beta))
    return fit(objective, params, batches, config.train, run, **phase)


def train_on_ratings(
    config: Config, params: Params, pairs: EncodedPairs, seed: int, run: RunFolder, **phase: Any
) -> TrainState:
    """Trains by KTO on the completions of pairs, two for each pair; `phase` holds further arguments of `fit`."""
    prompts = [prompt for prompt in pairs.prompts for _ in range(2)]
    answers = [(ids, list[int]()) for pair in pairs.answers for ids in pair]
    ratings = EncodedPairs(prompts, answers, [0.0] * len(answers), desirable=[True, False] * len(pairs.prompts))
    mismatched = with_mismatched(ratings, seed)
    rated = mismatched._replace(ref_logprobs=score_pairs(pair_logprobs, POLICY, params, mismatched, num_pairs=512))
    batches = pair_batches(rated, 2 * config.num_pairs, seed)
    objective = kto_objective(POLICY, partial(kto_loss, beta=config.beta))
    return fit(objective, params, batches, config.train, run, **phase)


def judge(
    policy: np.ndarray, *, reference: np.ndarray, worth: np.ndarray, best: np.ndarray, beta: float
) -> dict[str, float]:
    """Measures a policy by its log-probabilities and the worth of completions, all `[prompts, completions]`."""
    probabilities = np.exp(policy)
    utility, kl, kl_to_best = (
        float((probabilities * x).sum(-1).mean()) for x in (worth, policy - reference, policy - best)
    )
    accuracy = pair_accuracy(policy - reference, reference=reference, worth=worth)
    objective = utility - beta * kl
    return {"utility": utility, "kl": kl, "objective": objective, "kl_to_best": kl_to_best, "accuracy": accuracy}


def pair_accuracy(log_ratio: np.ndarray, *, reference: np.ndarray, worth: np.ndarray) -> float:
    """Returns how often the implicit reward, β log π/π_ref, is higher for the chosen completion.

    Σᵢⱼ P(i) P(j | not i) (σ(uᵢ − uⱼ) [rᵢ > rⱼ] + σ(uⱼ − uᵢ) [rᵢ < rⱼ] + ½ [rᵢ = rⱼ]),   r = log π/π_ref

    over all pairs that the start may sample. No reward is right more often than u, and the reward of π* is u plus a
    constant for each prompt.

    Args:
      log_ratio: The log-ratio r, `[prompts, completions]`.
      reference, worth: The start's log-probabilities and the utilities u, `[prompts, completions]`.
    """

    def differences(x: np.ndarray) -> np.ndarray:
        return x[:, :, None] - x[:, None, :]

    first = np.exp(reference)[:, :, None]
    pairs = first * first.swapaxes(1, 2) / (1 - first) * (1 - np.eye(reference.shape[-1]))
    chosen, margin = special.expit(differences(worth)), differences(log_ratio)
    right = np.where(margin == 0, 0.5, np.where(margin > 0, chosen, 1 - chosen))
    return float((pairs * right).sum((1, 2)).mean())


def utilities(seed: int) -> np.ndarray:
    """Returns u of every completion of every prompt, with w ~ N(0, 1), float64 `[prompts, completions]`."""
    return rng(seed, 1).normal(size=(PROMPTS, VOCAB))[:, COMPLETIONS].sum(-1)


def log_probabilities(params: Params) -> np.ndarray:
    """Returns log π of every completion of every prompt, float64 `[prompts, completions]`."""
    return np.asarray(_log_probabilities(params), np.float64)


@jax.jit
def _log_probabilities(params: Params) -> jax.Array:
    prompts = np.arange(PROMPTS, dtype=np.int32)[:, None]
    ids = np.broadcast_to(COMPLETIONS, (PROMPTS, *COMPLETIONS.shape))
    prompt, mask = PromptTokens(prompts, np.ones_like(prompts, bool)), np.ones_like(ids, bool)
    everything = PairBatch(prompt, ids, mask, np.zeros(PROMPTS))
    return pair_logprobs(POLICY, params, everything)


def sample_pairs(reference: np.ndarray, worth: np.ndarray, number: int, seed: int, *, shuffled: bool) -> EncodedPairs:
    """Samples pairs of different completions from the start, with choices by Bradley and Terry or by a coin toss.

    Args:
      reference: The log-probabilities of the start, `[prompts, completions]`.
      worth: The utilities u, `[prompts, completions]`.
      number: The number of pairs.
      seed: The random seed of prompts, completions and choices. Pairs do not depend on `shuffled`.
      shuffled: True if a coin chooses.
    """
    draws, coins = rng(seed, 2), rng(seed, 3)
    probabilities = special.softmax(reference, axis=-1)
    ends = probabilities.cumsum(-1)  # completion i has the numbers of [0, 1) from ends[i - 1] to ends[i]
    prompts = draws.integers(0, PROMPTS, number)

    def completions_at(places: np.ndarray) -> np.ndarray:
        results = [np.searchsorted(ends[prompt], place, "right") for prompt, place in zip(prompts, places, strict=True)]
        return np.minimum(results, len(COMPLETIONS) - 1)

    first = completions_at(draws.random(number))
    taken = probabilities[prompts, first]
    places = draws.random(number) * (1 - taken)  # in what the first has left, which is then put around its place
    second = completions_at(places + taken * (places >= ends[prompts, first] - taken))
    difference = 0.0 if shuffled else worth[prompts, first] - worth[prompts, second]
    is_first = coins.random(number) < special.expit(difference)
    chosen, rejected = np.where(is_first, (first, second), (second, first))
    answers = zip(COMPLETIONS[chosen].tolist(), COMPLETIONS[rejected].tolist(), strict=True)
    return EncodedPairs(prompts[:, None].tolist(), list(answers), [0.0] * number)


if __name__ == "__main__":
    flags.main(Config, main, __doc__)
