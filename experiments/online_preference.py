"""Does a reward model that keeps learning stop a policy from exploiting the errors of a frozen one?

The true reward of a word is known (`gold`). A noisy Bradley-Terry judge says which of two words is better. Both methods
start from the same policy and reward model, and have 8,192 labels:

- "frozen" spends all labels on pairs from the start. It trains the reward model once, and then the policy on it.
- "online" spends an eighth of the labels before each of eight rounds, on pairs from the current policy. It trains the
  reward model further, together with a tenth of the earlier pairs (iterated RLHF, 2204.05862; the rounds of GRPO's
  paper, 2402.03300).

The start's words are short and repeat few letters, so its pairs hardly show the cost of repetitions and long words. For
comparison there are the start, GRPO on a coin toss, and GRPO on gold. There is no KL, so only the reward model
restrains a policy. `--kl-coef 0.04 --ref-sync-steps 30` adds a KL to the policy with which the round began, as in
GRPO's paper.

Expect gold to be 1.1 at the start. It ends at 2.2 [1.1, 3.2] with online, 1.0 with the coin and 4.1 with gold itself.
With frozen it rises to 1.3 within 30 steps and then falls to between 0.5 and -8.4, depending on the seed. Meanwhile the
frozen reward model reports ever higher scores, because it likes repeated letters.

Online ends above frozen for each of three seeds, and also above frozen at its best. With three seeds no interval
confirms this, because the fall of frozen differs too much between seeds. With two seeds more (`--seed 3 --num-seeds
2`), online ends above frozen by 8.3 [3.8, 12.8], and above frozen at its best by 1.0 [0.5, 1.5].

For its first 100 steps, online is misled as well, by a reward model of few labels. At the end, the reward models order
only 0.57 and 0.62 of the pairs of their own policies as gold does. The run takes about ten minutes on two CPU cores. It
leaves out human judges, larger reward models, and ensembles.

  python -m experiments.online_preference
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments import common
from experiments.common import Seeds, collect, completions_batch, over_seeds, print_over_seeds
from experiments.tasks import letters
from experiments.tasks.rounds import OnlineConfig, bradley_terry_judge, train_online
from grpo_jax import report
from grpo_jax.commands import flags
from grpo_jax.config import GRPOConfig, recipe, with_options
from grpo_jax.data.types import Component, Example, pad_completions, rng
from grpo_jax.errors import UsageError
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.decoder.heads import add_head
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.huggingface import load_tokenizer
from grpo_jax.models.policy import Policy
from grpo_jax.offline.phase import SupervisedConfig
from grpo_jax.options import Fraction, Size
from grpo_jax.rewards.learned import RewardModel, reward_function
from grpo_jax.rl.evaluate import Evaluation
from grpo_jax.rl.programs import Programs
from grpo_jax.runs.folder import RunFolder
from grpo_jax.statistics import cell
from grpo_jax.step import Batch
from grpo_jax.tasks.task import Task, random_reward
from grpo_jax.training.phases import evaluate_heldout, train_with_evaluation

MODEL = ModelConfig(vocab_size=letters.TEXT.vocab_size, initializer_range=0.1)
LEARNED = ("frozen", "online")
CURVES = (
    ("heldout_avg", "gold reward, held out"),
    ("claimed", "gain that the reward model sees"),
    ("pair_accuracy", "pairs that it orders as gold does"),
    ("entropy", "entropy, nats a token"),
    ("length_mean", "tokens"),
)


@dataclass(frozen=True)
class Config:
    """Options of the run."""

    train: GRPOConfig = recipe(
        steps=240,
        num_prompts=32,
        max_tokens=letters.MAX_TOKENS,
        learning_rate=4e-4,
        kl_coef=0.0,
        eval_every=30,
    )
    seeds: Seeds = Seeds()
    output: flags.RunConfig = flags.RunConfig(Path("runs/online_preference"))
    warm_steps: Size = 1000
    """Supervised steps on words, before everything else."""
    labels: Size = 8192
    """Pairs that the judge sees in a run."""
    rounds: Size = 8
    """Rounds of the online method; labels and steps are spread evenly over them."""
    replay_share: Fraction = OnlineConfig._field_defaults["replay_share"]
    """Share of the pairs of earlier rounds that the reward model is trained on again."""


def gold(examples: Sequence[Example], words: Sequence[str]) -> list[float]:
    """Returns 1 for each letter of the prompt in a word, 1/2 for each vowel, -1 for each character that is repeated
    or is not a letter, and another -1 for each character after the eighth. No word is worth more than 5.5."""

    def worth(example: Example, word: str) -> float:
        known = set(word) & set(letters.LETTERS)
        required = len(known & set(example["letters"])) + len(known & set("aeiou")) / 2
        return required - (len(word) - len(known)) - max(len(word) - 8, 0)

    return [worth(example, word) for example, word in zip(examples, words, strict=True)]


def main(config: Config) -> None:
    """Runs both methods, a coin toss and the gold reward for each seed; prints a table and writes curves."""
    started = time.perf_counter()
    if config.rounds > config.labels:
        raise UsageError(f"rounds is {config.rounds}: it must be at most labels, {config.labels}")
    task = letters.letters_task(gold, num_prompts=config.train.sampling.num_prompts, seed=config.train.seed)
    policy, programs, run = common.open_experiment(config, MODEL, letters.TEXT, task)
    folder = run.path / "model"
    start = warm_start(policy, config, run)
    shape, headed = add_head(MODEL, start)
    untrained = RewardModel(shape, headed, load_tokenizer(folder), (letters.TEXT.eos_id,), folder)
    seeds = config.seeds.starting_at(config.train.seed)
    runs: dict[str, dict[str, list[float]]] = {}
    for seed in seeds:
        collect(runs, run_seed(policy, start, untrained, with_options(config, seed=seed), run, programs))
    show(run, runs, seeds)
    report.say_end(run, started)


def run_seed(
    policy: Policy, start: Params, untrained: RewardModel, config: Config, run: RunFolder, programs: Programs
) -> dict[str, dict[str, float]]:
    """Runs all methods with one seed, and returns method -> number -> value."""
    watched = {"gold": Component(gold, weight=0.0)}
    task = letters.letters_task(gold, num_prompts=config.train.sampling.num_prompts, seed=config.train.seed)

    def held(params: Params) -> Evaluation:
        return evaluate_heldout(programs, params, task, config.train, run).evaluation

    before = evaluate_heldout(programs, start, task, config.train, run)
    results, models = {"start": before.evaluation}, {}
    for method, rounds in zip(LEARNED, (1, config.rounds), strict=True):

        def heldout(model: RewardModel, params: Params, step: int) -> dict[str, float]:
            now = held(params) if step else results["start"]
            scores, at_start = (opinion(model, evaluation, task) for evaluation in (now, results["start"]))
            return {
                "heldout_avg": float(now.rewards.mean()),
                "claimed": float(scores.mean() - at_start.mean()),
                "pair_accuracy": pair_accuracy(scores, now.rewards),
            }

        online = OnlineConfig((config.labels // rounds,) * rounds, config.replay_share)
        state, models[method] = train_online(
            policy,
            start,
            untrained,
            task._replace(reward=watched),
            bradley_terry_judge(gold, seed=config.train.seed),
            config.train,
            online,
            run,
            phase=f"{method}_{config.train.seed}",
            programs=programs,
            evaluate=heldout,
        )
        results[method] = held(state.params["policy"])
    for method, reward in (("coin", random_reward(config.train.seed)), ("gold", gold)):
        rewards = {method: Component(reward), **({} if method == "gold" else watched)}
        phase = f"{method}_{config.train.seed}"
        _, end = train_with_evaluation(
            {"policy": start}, task, config.train, run, programs, phase=phase, reward=rewards, start=before
        )
        results[method] = end.evaluation
    rows = {method: word_numbers(evaluation) for method, evaluation in results.items()}
    for method in results.keys() - {"start"}:
        lines = [line for line in run.lines() if line["phase"] == f"{method}_{config.train.seed}"]
        rows[method]["best"] = max(line["heldout_avg"] for line in lines if "heldout_avg" in line)
    for method, model in models.items():
        for other in ("start", *LEARNED):
            rows[method][f"accuracy_{other}"] = pair_accuracy(
                opinion(model, results[other], task), results[other].rewards
            )
        scores, at_start = (opinion(model, results[name], task) for name in (method, "start"))
        rows[method]["claimed"] = float(scores.mean() - at_start.mean())
    return rows


def word_numbers(evaluation: Evaluation) -> dict[str, float]:
    """Returns the gold reward, its parts, and the length of the sampled words."""
    words = [word for group in evaluation.texts for word in group[:-1]]
    return {
        "gold": float(evaluation.rewards.mean()),
        "letters": float(np.mean([len(word) for word in words])),
        "repeats": float(np.mean([len(word) - len(set(word)) for word in words])),
    }


def opinion(model: RewardModel, evaluation: Evaluation, task: Task) -> np.ndarray:
    """Returns a reward model's scores of the sampled words of an evaluation, `[M, n]`."""
    examples = [example for example, group in zip(task.heldout.examples, evaluation.texts, strict=True) for _ in group]
    words = [word for group in evaluation.texts for word in group]
    widths = {"max_prompt_tokens": letters.PROMPT_TOKENS, "max_tokens": letters.MAX_TOKENS}
    scores: Any = reward_function(model, batch_size=256, **widths)(examples, words)
    return np.reshape(scores, (len(evaluation.texts), -1))[:, :-1]


def pair_accuracy(scores: np.ndarray, worth: np.ndarray) -> float:
    """Returns the share of pairs of a prompt's words, `[M, n]`, that scores order by worth; equal worth is skipped."""
    results, right = (np.sign(x[:, :, None] - x[:, None]) for x in (scores, worth))
    return float(np.mean((1 + results * right) / 2, where=right != 0))


def warm_start(policy: Policy, config: Config, run: RunFolder) -> Params:
    """Trains a policy to write two to eight different letters, with the prompt's letters three times as often."""
    prompts_of = letters.letters_task(gold, num_prompts=128, seed=config.train.seed).prompts

    def word(example: Example, generator: np.random.Generator) -> list[int]:
        often = np.array([3.0 if letter in example["letters"] else 1.0 for letter in letters.LETTERS])
        chosen = generator.choice(26, generator.integers(2, 9), replace=False, p=often / often.sum())
        return [*chosen.tolist(), letters.TEXT.eos_id]

    def batch(step: int) -> Batch:
        prompts, generator = prompts_of(step), rng(config.train.seed, 1, step)
        words = [[word(example, generator)] for example in prompts.examples]
        return completions_batch(prompts, *pad_completions(words, letters.MAX_TOKENS))

    warm = SupervisedConfig(config.warm_steps, learning_rate=2e-3)
    return common.warm_start(policy, batch, warm, run, seed=config.train.seed, phase="warm")


def show(run: RunFolder, runs: dict[str, dict[str, list[float]]], seeds: range) -> None:
    """Prints the table; writes curves.png and results.json."""
    rows = over_seeds(runs, first="gold", control="frozen")
    above_start = over_seeds(runs, first="gold", control="start")
    worth = {
        method: [
            cell(row, "gold"),
            cell(above_start[method], "difference"),
            f"{row['wins']} of {len(seeds)}" if "wins" in row else "",
            row.get("best", ""),
            row["repeats"],
        ]
        for method, row in rows.items()
    }
    columns = ("at the end", "above start", "seeds above frozen", "at best", "repeated letters")
    print_over_seeds(run, "gold reward on 256 held-out prompts", seeds, columns, worth, coin="coin")
    title = "reward models at the end: the gain that they see, and pairs that they order as gold does"
    columns = ("gain seen", "gain in gold", "pairs of start", "of frozen", "of online")
    gain = {method: rows[method]["gold"] - rows["start"]["gold"] for method in LEARNED}
    accuracies = [f"accuracy_{name}" for name in ("start", *LEARNED)]
    models = {
        method: [rows[method]["claimed"], gain[method], *(rows[method][x] for x in accuracies)] for method in LEARNED
    }
    report.print_table(run, title, columns, models)
    common.save_over_seeds(run, runs, rows, seeds, CURVES)


if __name__ == "__main__":
    flags.main(Config, main, __doc__)
