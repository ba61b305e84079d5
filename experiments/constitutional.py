"""Principles instead of a learned reward: does GRPO on a judge's yes and no teach a policy to follow them?

The principles are in a text file next to this script. They are about words of letters, so that the truth, here called
gold, can be checked. One small decoder first learns to write random words. From labelled examples it also learns to
answer "y" or "n" to (principle, prompt, word). GRPO then trains this model, and the initial model's answers are the
reward. This is compared with:

- the start
- a coin toss as the reward (the control)
- a judge that was never trained
- gold as the reward (the ceiling)

A large language model can judge without training; this model is trained to judge. The tables show how often the judge
agrees with gold on held-out words before and after, and whether it believes a word that ends in "?y". Compared with the
paper, there are no critiques, no revisions, and no preference model.

The run takes about five minutes on two CPU cores. With three seeds, expect the share of principles kept to rise from
0.43 to 0.89, and the share of words that keep them all from 0.05 to 0.74. The coin stays at 0.47, gold reaches 0.95,
and the untrained judge leads anywhere from 0.10 to 0.79.

On words of the start, the judge disagrees with gold in only 1% of cases for three principles. On "starts with a to m"
it agrees no more often than a coin. Afterwards 5% of completions are not words, against 1% before and with gold. The
judge never saw such completions, and does not punish them.

  python -m experiments.constitutional
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments import common
from experiments.common import Seeds, collect, over_seeds, print_over_seeds
from experiments.tasks import letters
from experiments.tasks.characters import Characters
from grpo_jax import report
from grpo_jax.commands import flags
from grpo_jax.config import GRPOConfig, recipe, with_options
from grpo_jax.data.packing import Packed, pack, packed_batches
from grpo_jax.data.types import Completion, Component, Reward, rng
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.huggingface import Pretrained, load_tokenizer
from grpo_jax.models.policy import Policy
from grpo_jax.offline.phase import SupervisedConfig
from grpo_jax.options import Positive, Size
from grpo_jax.rewards.constitution import Judge, constitution, model_judge, read_principles
from grpo_jax.rewards.reward import RewardLike
from grpo_jax.rl.evaluate import summary
from grpo_jax.runs.folder import RunFolder
from grpo_jax.statistics import cell
from grpo_jax.tasks.task import Task, random_reward
from grpo_jax.training.phases import HeldoutResult, evaluate_heldout, train_with_evaluation

TEXT = Characters(letters.LETTERS + ": ?")
MODEL = ModelConfig(TEXT.vocab_size, initializer_range=0.1)
TEMPLATE = "{principle}: {prompt}{completion}?"
PRINCIPLES = read_principles(Path(__file__).with_suffix(".txt"))
# name of a principle -> function that tests if a word follows it
GOLD: dict[str, Callable[[str], bool]] = {
    "first": lambda word: word[0] in "abcdefghijklm",
    "vowel": lambda word: word[-1] in "aeiou",
    "long": lambda word: len(word) >= 8,
    "e": lambda word: "e" in word,
}
CURVES = (
    ("reward", "reward of the method"),
    ("heldout_avg", "gold: share of principles kept"),
    ("heldout_reward_all", "gold: all kept"),
    ("kl", "KL to the start, nats a token"),
    ("entropy", "entropy, nats a token"),
)


@dataclass(frozen=True)
class Config:
    """Options of the run."""

    train: GRPOConfig = recipe(
        steps=60,
        num_prompts=32,
        max_tokens=letters.MAX_TOKENS,
        learning_rate=4e-4,
        eval_every=20,
    )
    seeds: Seeds = Seeds()
    output: flags.RunConfig = flags.RunConfig(Path("runs/constitutional"))
    warm_steps: Size = 600
    """Supervised steps of writing and judging."""
    warm_rows: Size = 16
    """Rows of 128 tokens of a supervised step."""
    warm_learning_rate: Positive = 4e-3
    """Peak of the supervised steps."""
    log_odds: bool = False
    """The judge's log-odds in place of its probabilities."""


def main(config: Config) -> None:
    """Runs the warm start and every method for each seed; prints two tables, and writes curves and the report."""
    started = time.perf_counter()
    seeds = config.seeds.starting_at(config.train.seed)
    policy, programs, run = common.open_experiment(config, MODEL, TEXT, words_task(config))
    runs: dict[str, dict[str, list[float]]] = {}
    for seed in seeds:
        settings = with_options(config, seed=seed)
        task, untrained = words_task(settings), common.new_params(policy, seed)
        start = warm_start(policy, settings, run)
        judge = judge_of(start, run)
        held = evaluate_heldout(programs, start, task, settings.train, run)
        results = {"start": numbers(held) | judgement(judge, held, task)}
        rewards: dict[str, RewardLike] = {
            "control": random_reward(seed),
            "untrained": constitution(PRINCIPLES, judge_of(untrained, run, probability=not config.log_odds)),
            "constitution": constitution(PRINCIPLES, judge_of(start, run, probability=not config.log_odds)),
            "gold": task.reward,
        }
        for name, reward in rewards.items():
            phase = f"{name}_{seed}"
            _, end = train_with_evaluation(
                {"policy": start}, task, settings.train, run, programs, phase=phase, reward=reward, start=held
            )
            results[name] = numbers(end) | judgement(judge, end, task)
        collect(runs, results)
    show(run, runs, seeds)
    report.say_end(run, started)


def keeps(name: str, word: str) -> bool:
    """Returns whether a completion follows a principle; a completion with other characters follows none."""
    return word.isalpha() and GOLD[name](word)


def words_task(config: Config) -> Task:
    """Makes the letters task with the gold reward: the share of principles kept, and, with weight 0, if all are."""

    def one(name: str) -> Reward:
        return lambda examples, words: [float(keeps(name, word)) for word in words]

    gold = {name: Component(one(name), 1 / len(GOLD)) for name in GOLD}
    gold["all"] = Component(
        lambda examples, words: [float(all(keeps(name, word) for name in GOLD)) for word in words], 0.0
    )
    task = letters.letters_task(gold, num_prompts=config.train.sampling.num_prompts, seed=config.train.seed)
    # The letters' ids are the same in both alphabets, and prompts have no padding.
    return task._replace(decode=TEXT.decode, eos_ids=(TEXT.eos_id,), pad_id=TEXT.pad_id, vocab_size=TEXT.vocab_size)


def warm_start(policy: Policy, config: Config, run: RunFolder) -> Params:
    """Trains parameters that write random words and judge words by the principles."""
    seed = config.train.seed
    batches = packed_batches(labelled_words(8000, seed), config.warm_rows, seed)
    warm = SupervisedConfig(config.warm_steps, config.warm_learning_rate, warmup_steps=50, decay="cosine")
    return common.warm_start(policy, batches, warm, run, seed=seed, phase=f"warm_{seed}")


def labelled_words(number: int, seed: int) -> Packed:
    """Makes training texts of random words: each word is written once, and judged once by every principle."""
    examples = letters.letters_task({}, num_prompts=number, seed=seed).prompts(0).examples
    generator, prompts, answers = rng(seed, 3), [], []
    for example in examples:
        word = random_word(generator)
        prompts.append(TEXT.encode(example["prompt"]))
        answers.append([*TEXT.encode(word), TEXT.eos_id])
        for name, principle in PRINCIPLES.items():
            question = TEMPLATE.format(principle=principle, prompt=example["prompt"], completion=word)
            prompts.append(TEXT.encode(question))
            answers.append(TEXT.encode("y" if keeps(name, word) else "n"))
    return pack(prompts, answers, width=128)


def random_word(generator: np.random.Generator) -> str:
    """Draws 1 to 15 letters, which follow each principle every second or third time, so that RL has a signal."""
    word = [letters.LETTERS[i] for i in generator.integers(0, 26, generator.integers(1, letters.MAX_TOKENS))]
    if generator.random() < 0.3:
        word[-1] = str(generator.choice(list("aeiou")))
    return "".join(word)


def judge_of(params: Params, run: RunFolder, *, probability: bool = True) -> Judge:
    """Makes a judge from the model with these parameters."""
    folder = run.path / "model"
    model = Pretrained(MODEL, params, load_tokenizer(folder), (TEXT.eos_id,), folder)
    return model_judge(model, template=TEMPLATE, yes=("y",), no=("n",), probability=probability, batch_size=256)


def numbers(held: HeldoutResult) -> dict[str, float]:
    """Returns the gold rewards of held-out words: all principles on average, together and each; and the word share."""
    results, texts = summary(held.evaluation), held.evaluation.texts
    words = float(np.mean([text.isalpha() for group in texts for text in group[:-1]]))  # the last is greedy
    return {"gold": results["avg"], "words": words} | {name: results[f"reward_{name}"] for name in ("all", *GOLD)}


def judgement(judge: Judge, held: HeldoutResult, task: Task) -> dict[str, float]:
    """Measures a judge on the words of 64 held-out prompts: its mean yes by principle, and its agreement with gold.

    Also measures how often it says yes if gold says no, to the word and to the word followed by "?y"."""
    texts = held.evaluation.texts[:64]
    examples = [example for example, group in zip(task.heldout.examples, texts, strict=False) for _ in group]
    words = [word for group in texts for word in group]
    injected = [Completion(f"{word}?y") for word in words]
    results: dict[str, float] = {}
    believed: dict[str, list[bool]] = {"believed": [], "injected": []}
    for name, principle in PRINCIPLES.items():
        gold = held.evaluation.components[name][:64].ravel() > 0
        plain, arguments = (np.asarray(judge(principle, examples, answer)) for answer in (words, injected))
        agrees = (plain > 0.5) == gold
        results |= {f"yes_{name}": float(plain.mean()), f"agrees_{name}": float(agrees.mean())}
        believed["believed"] += (plain > 0.5)[~gold].tolist()
        believed["injected"] += (arguments > 0.5)[~gold].tolist()
    return results | {name: float(np.mean(cases)) if cases else np.nan for name, cases in believed.items()}


def show(run: RunFolder, runs: dict[str, dict[str, list[float]]], seeds: range) -> None:
    """Prints two groups and the tables; writes curves.png and results.json."""
    common.print_last_groups(run, f"constitution_{seeds[-1]}")
    rows = over_seeds(runs, first="gold", control="control")
    table = {name: [cell(row, key) for key in ("gold", "difference", "all", "words")] for name, row in rows.items()}
    titles = ["kept", "above control", "all kept", "words"]
    print_over_seeds(run, "gold of held-out words", seeds, titles, table, coin="control")
    columns = [("", "start"), ("", "constitution"), ("", "gold")]
    columns += [(kind, name) for kind in ("yes_", "agrees_") for name in ("start", "constitution")]
    table = {key: [f"{rows[name][kind + key]:.3f}" for kind, name in columns] for key in PRINCIPLES}
    titles = ["gold", "after", "ceiling", "yes", "after", "agree", "after"]
    report.print_table(run, "gold, the judge's yes, and how often they agree, before and after", titles, table)
    table = {name: [cell(rows[name], key) for key in ("believed", "injected")] for name in ("start", "constitution")}
    report.print_table(run, "the judge's yes where gold says no", ("word", "word?y"), table)
    common.save_over_seeds(run, runs, rows, seeds, CURVES)


if __name__ == "__main__":
    flags.main(Config, main, __doc__)
