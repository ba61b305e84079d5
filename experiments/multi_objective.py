"""Two conflicting rewards on different scales: is it better to standardise them before or after they are added?

A small decoder writes words of up to 15 letters for a prompt of three letters ("cab:"). Two rewards score a word:

- `own`, in [0, 1], counts letters of the word that are in the prompt, up to 8.
- `order` has a heavy tail: n² for n letters in the order of the alphabet ("cdef" earns 16). Most words of the start
  earn 1 to 9, and words of a trained policy earn 225.

A word is too short to score high in both. The gold reward, on which no run trains, is the mean of two scores from 0
to 1: own, and n / 15.

The comparison is at equal weights, over seeds, on held-out prompts:

- GDPO standardises each reward within its group and then weights it (`advantages_of="components"`).
- The sum (the control) is ordinary GRPO on the weighted sum.
- The scaled sum first divides each reward by its deviation at the start, to show what a fixed scale does.
- The coin is GRPO on a coin toss.
- The start has seen only random words.

Then one seed sweeps the weights, to show which pairs of scores each method reaches, and how much of the square they
cover. The experiment leaves out language and wrong reward models.

The run takes about six minutes on two CPU cores. Expect a gold reward of 0.21 at the start, and of 0.60 for both sums,
which write the alphabet whatever the prompt. Expect 0.66 for GDPO, with about 0.7 of own and 0.6 of order; this is 0.01
to 0.11 above the sum (95% interval over three seeds). The coin ends below the start. In the sweep:

- The sum stays in its corner for all weights and covers 0.21 of the square.
- The scaled sum leaves its corner between weights 0.7 and 0.9, and covers 0.38.
- GDPO has a point in the middle at equal weights, and covers 0.59.

A better weight has much of GDPO's effect: with 0.85 on own, the scaled sum reaches 0.65 gold.

  python -m experiments.multi_objective
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from experiments import common, plots
from experiments.common import Seeds, completions_batch, over_seeds, print_over_seeds
from experiments.tasks import letters
from grpo_jax import report
from grpo_jax.commands import flags
from grpo_jax.config import GRPOConfig, recipe, with_options
from grpo_jax.data.types import Component, pad_completions, rng
from grpo_jax.errors import UsageError
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.offline.phase import SupervisedConfig
from grpo_jax.options import Size
from grpo_jax.rewards.reward import RewardLike
from grpo_jax.rl.grade import grade_completions
from grpo_jax.rl.programs import Programs, make_programs
from grpo_jax.rl.source import completion_numbers, group_temperatures
from grpo_jax.rl.types import LABELLING, noise_of
from grpo_jax.runs.files import write_json
from grpo_jax.runs.folder import RunFolder
from grpo_jax.statistics import cell
from grpo_jax.step import Batch
from grpo_jax.tasks.task import Task, random_reward
from grpo_jax.training.phases import HeldoutResult, evaluate_heldout, train_with_evaluation

MODEL = ModelConfig(letters.TEXT.vocab_size, initializer_range=0.1)
ENOUGH = 8  # number of the prompt's letters that earns the full reward
LONGEST = 15  # letters of a word; no reward depends on EOS
EQUAL = 0.5
METHODS = ("sum", "scaled", "gdpo")
SCORES = ("gold", "own", "order_score")
CURVES = (
    ("reward_gold", "gold reward"),
    ("reward_own", "own"),
    ("reward_order_score", "order (n / 15)"),
    ("kl", "KL to the start, nats a token"),
    ("entropy", "entropy, nats a token"),
)
WARM_BATCH = 128


@dataclass(frozen=True)
class Config:
    """Options of the run."""

    train: GRPOConfig = recipe(
        steps=100,
        num_prompts=32,
        max_tokens=LONGEST,
        kl_coef=0.0,
        learning_rate=1e-3,
        rollouts_every=50,
    )
    seeds: Seeds = Seeds()
    output: flags.RunConfig = flags.RunConfig(Path("runs/multi_objective"))
    weights: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    """Weights of `own` in the sweep; `order` has the rest to 1."""
    warm_steps: Size = 300
    """Supervised steps on words at random, before training on rewards."""


# ---- rewards


def own_letters(examples, words) -> list[float]:
    """Returns the number of letters that are in the prompt, up to ENOUGH, scaled to [0, 1]."""
    pairs = zip(examples, words, strict=True)
    return [min(sum(letter in example["letters"] for letter in word), ENOUGH) / ENOUGH for example, word in pairs]


def in_order(word: str) -> int:
    """Returns the length of the longest run of consecutive letters of the alphabet."""
    longest = length = min(len(word), 1)
    for before, letter in pairwise(word):
        length = length + 1 if ord(letter) == ord(before) + 1 else 1
        longest = max(longest, length)
    return longest


def order(examples, words) -> list[float]:
    """Returns n² for n letters in order, from 0 to 225."""
    return [float(in_order(word) ** 2) for word in words]


def order_score(examples, words) -> list[float]:
    """Returns n / 15 for n letters in order."""
    return [in_order(word) / LONGEST for word in words]


def gold(examples, words) -> list[float]:
    """Returns the mean of both scores, in [0, 1]."""
    return np.mean([own_letters(examples, words), order_score(examples, words)], axis=0).tolist()


def weighted(weight: float, scales: Sequence[float] = (1.0, 1.0)) -> dict[str, Component]:
    """Returns both rewards divided by their scales, with `weight` on `own` and the rest on `order`, and scores."""
    parts = {"own": Component(own_letters, weight / scales[0]), "order": Component(order, (1 - weight) / scales[1])}
    return parts | WATCHED


WATCHED = {"order_score": Component(order_score, 0.0), "gold": Component(gold, 0.0)}


# ---- runs


def main(config: Config) -> None:
    """Runs all methods and the coin at equal weights for each seed, and other weights for the first seed."""
    started = time.perf_counter()
    if not all(0 <= weight <= 1 for weight in config.weights):
        raise UsageError(f"weights are {config.weights}: each must be between 0 and 1")
    seeds = config.seeds.starting_at(config.train.seed)
    if config.train.sampling.max_tokens > LONGEST:
        raise UsageError(f"max_tokens is {config.train.sampling.max_tokens}: words have up to {LONGEST} letters")
    policy, task = decoder_policy(MODEL), task_of(config)
    # Methods share the programs that sample and score, and weights are data: everything is compiled once.
    sum_programs, component_programs = (
        make_programs(policy, task, with_options(config.train, advantages_of=kind)) for kind in ("sum", "components")
    )
    gdpo = component_programs._replace(sampler=sum_programs.sampler, score=sum_programs.score)
    programs = {"sum": sum_programs, "scaled": sum_programs, "gdpo": gdpo}
    run = flags.open_run(config)
    common.keep_model(run, MODEL, letters.TEXT)
    scores: dict[str, dict[str, float]] = {}  # run -> held-out means of SCORES
    for seed in seeds:
        seeded = with_options(config, seed=seed)
        start, task = warm_start(policy, seeded, run), task_of(seeded)
        coin = {"coin": Component(random_reward(seed)), "own": Component(own_letters, 0.0)} | WATCHED
        rewards: dict[tuple[str, float], RewardLike] = {("coin", EQUAL): coin}
        scales = deviations(sum_programs, start, task, seeded.train)
        for weight in sorted({EQUAL, *(config.weights if seed == config.train.seed else ())}):
            for method in METHODS:
                rewards[method, weight] = weighted(weight, scales if method == "scaled" else (1.0, 1.0))
        scores[phase_of("start", EQUAL, seed)] = means(evaluate_heldout(sum_programs, start, task, seeded.train, run))
        for (method, weight), reward in rewards.items():
            phase, chosen = phase_of(method, weight, seed), programs.get(method, sum_programs)
            options = with_options(seeded.train, advantages_of=chosen.config.loss.advantages_of)
            scores[phase] = means(
                train_with_evaluation({"policy": start}, task, options, run, chosen, phase=phase, reward=reward)[1]
            )
    show(run, config, scores)
    report.say_end(run, started)


def task_of(config: Config) -> Task:
    """Makes the task. Words are cut off at max_tokens, and both rewards score held-out words."""
    task = letters.letters_task(weighted(EQUAL), num_prompts=config.train.sampling.num_prompts, seed=config.train.seed)
    return task._replace(open_ended=True)


def phase_of(method: str, weight: float, seed: int) -> str:
    """Returns the name of a run, with the weight unless weights are equal."""
    return f"{method}_{seed}" if weight == EQUAL else f"{method}_own{weight:g}_{seed}"


def warm_start(
    policy: Policy,
    config: Config,
    run: RunFolder,
    *,
    lengths: tuple[int, int] = (1, LONGEST),
    phase: str = "warm",
) -> Params:
    """Trains parameters to write words with letters of the prompt and letters in order, within these lengths."""
    prompts_of = letters.letters_task(own_letters, num_prompts=WARM_BATCH, seed=config.train.seed).prompts

    def words(step: int) -> Batch:
        prompts, generator, most = prompts_of(step), rng(config.train.seed, 1, step), config.train.sampling.max_tokens
        tokens = [[word(example["letters"], generator, *lengths)[:most]] for example in prompts.examples]
        return completions_batch(prompts, *pad_completions(tokens, most))

    warm, seed = SupervisedConfig(config.warm_steps, learning_rate=2e-3), config.train.seed
    return common.warm_start(policy, words, warm, run, seed=seed, phase=f"{phase}_{seed}")


def word(inputs: str, generator: np.random.Generator, shortest: int = 1, longest: int = LONGEST) -> list[int]:
    """Draws ids of a word and EOS: each letter is from the prompt, the next in the alphabet, or uniform."""
    ids: list[int] = []
    for kind in generator.choice(3, generator.integers(shortest, longest + 1), p=(0.25, 0.25, 0.5)):
        following = ids[-1] + 1 if ids and ids[-1] + 1 < len(letters.LETTERS) else 0
        of_given = letters.LETTERS.index(inputs[generator.integers(3)])
        ids.append((of_given, following, int(generator.integers(len(letters.LETTERS))))[kind])
    return [*ids, letters.TEXT.eos_id]


def deviations(programs: Programs, params: Params, task: Task, config: GRPOConfig) -> tuple[float, ...]:
    """Returns the scales of both rewards: their standard deviations within groups of one training rollout."""
    numbers, temperature = completion_numbers(config.sampling), np.ones_like(group_temperatures(config.sampling))
    prompts, noise = task.prompts(0), noise_of(config.seed, LABELLING, 0)
    completions = programs.sampler.complete(params, prompts, numbers, temperature, noise)
    graded = grade_completions(prompts, completions, task, task.rewards)
    return tuple(float(graded.components[name].std(-1).mean()) or 1.0 for name in ("own", "order"))


def means(held: HeldoutResult) -> dict[str, float]:
    """Returns the mean scores of the words sampled for held-out prompts."""
    components = held.evaluation.components
    return {name: float(components[name][:, :-1].mean()) for name in SCORES}


# ---- results


def show(run: RunFolder, config: Config, scores: Mapping[str, Mapping[str, float]]) -> None:
    """Prints the tables of equal weights and of the sweep; writes curves.png and results.json."""
    seeds = config.seeds.starting_at(config.train.seed)
    phases = {method: [phase_of(method, EQUAL, seed) for seed in seeds] for method in (*METHODS, "coin", "start")}
    runs = {method: {name: [scores[phase][name] for phase in phases[method]] for name in SCORES} for method in phases}
    rows = over_seeds(runs, first="gold", control="sum")
    table = {method: [cell(row, column) for column in (*SCORES, "difference")] for method, row in rows.items()}
    columns = [*SCORES, "gold above the sum's"]
    print_over_seeds(run, "held-out scores at equal weights", seeds, columns, table, coin="coin")

    def point(method: str, weight: float) -> tuple[float, float]:
        results = scores[phase_of(method, weight, config.train.seed)]
        return results["own"], results["order_score"]

    weights = sorted(config.weights)
    sweep = {method: {f"{weight:g}": point(method, weight) for weight in weights} for method in METHODS}
    covered = {method: hypervolume(list(points.values())) for method, points in sweep.items()}
    lines = {
        method: [*(f"{x:.2f}, {y:.2f}" for x, y in points.values()), covered[method]]
        for method, points in sweep.items()
    }
    title = "held-out own and order_score by the weight of own, and the share of the square that they cover"
    report.print_table(run, title, (*sweep["sum"], "covered"), lines)
    plots.save_curves(run, CURVES, {method: phases[method] for method in (*METHODS, "coin")})
    write_json(run.path / "results.json", {"over_seeds": rows, "covered": covered, "runs": scores})


# ---- fronts


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the different points that no other point dominates, sorted by the first score.

    Args:
      points: Pairs of scores; higher is better.
    """
    selected: list[tuple[float, float]] = []
    for point in sorted(set(points), reverse=True):
        if not selected or point[1] > selected[-1][1]:
            selected.append(point)
    return selected[::-1]


def hypervolume(points: Sequence[tuple[float, float]]) -> float:
    """Returns the area between (0, 0) and the front.

    Args:
      points: Pairs of scores of at least 0; higher is better. For scores in [0, 1] the area is a share of the square.
    """
    area, left = 0.0, 0.0
    for x, y in pareto_front(points):
        area, left = area + (x - left) * y, x
    return area


if __name__ == "__main__":
    flags.main(Config, main, __doc__)
