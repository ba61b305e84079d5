"""Does a reward model that learns along keep a policy from what a frozen one is wrong about?

DRAFT
"""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from experiments.common import evaluate_heldout
from grpo_jax import cli, terminal
from grpo_jax.config import GRPOConfig
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.heads import add_head
from grpo_jax.models.huggingface import load_tokenizer, save_description
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.models.transformer import Params
from grpo_jax.rewards.learned import RewardModel
from grpo_jax.tasks import letters
from grpo_jax.tasks.preferences import bradley_terry_judge
from grpo_jax.tasks.task import Component, Example, pad_completions, random_reward, rng
from grpo_jax.training.evaluate import Evaluation
from grpo_jax.training.grpo import make_programs, train
from grpo_jax.training.online import OnlineConfig, train_online, with_reward_model
from grpo_jax.training.run import RunFolder
from grpo_jax.training.sft import train_sft
from grpo_jax.training.state import Batch
from grpo_jax.training.supervised import SupervisedConfig

MODEL = ModelConfig(vocab_size=letters.TEXT.vocab_size, initializer_range=0.1)
CURVES = (
    ("heldout_reward_gold", "gold reward, held out"),
    ("gain_claimed", "gain by the reward model"),
    ("pair_accuracy", "pairs in gold's order"),
    ("length_mean", "letters"),
)


@dataclass(frozen=True)
class Config(GRPOConfig, cli.RunConfig):
    """Options of the run."""

    steps: int = 240
    num_prompts: int = 32
    max_tokens: int = letters.MAX_TOKENS
    learning_rate: float = 4e-4
    kl_coef: float | None = 0.0
    old_logprobs: Literal["recompute", "sampler"] = "sampler"
    eval_every: int = 60
    warm_steps: int = 300
    """Supervised steps on words before anything else."""
    labels: int = 4096
    """Pairs that the judge sees in all."""
    rounds: int = 4
    """Of the online method, among which labels and steps are divided evenly."""
    replay_share: float = 0.1
    """Of the pairs of earlier rounds that the reward model is trained on again."""
    seeds: int = 3
    """Runs of each method."""
    run_dir: Path = Path("runs/online_preference")


def gold(rows: Sequence[Example], words: Sequence[str]) -> list[float]:
    """What a word is worth: 1 for each letter of the prompt in it, 1/2 for each different vowel; less 1 for each sign
    that it had before or that is no letter, and for each beyond the eighth. At most 5.5."""

    def worth(row: Example, word: str) -> float:
        known = set(word) & set(letters.LETTERS)
        return (
            len(known & set(row["letters"]))
            + len(known & set("aeiou")) / 2
            - (len(word) - len(known))
            - max(len(word) - 8, 0)
        )

    return [float(worth(row, word)) for row, word in zip(rows, words, strict=True)]


def warm_start(policy: Policy, config: Config, seed: int, run: RunFolder) -> Params:
    """A policy that writes words of two to eight different letters, those of the prompt three times as likely."""
    prompts = letters.letters_task(gold, num_prompts=128, seed=seed).prompts

    def batch(step: int) -> Batch:
        rows, generator = prompts(step), rng(seed, 1, step)
        words = [[[*_word(row["letters"], generator), letters.TEXT.eos_id]] for row in rows.examples]
        return Batch(
            rows.ids, rows.mask, *pad_completions(words, letters.MAX_TOKENS), np.ones((len(words), 1), np.float32)
        )

    phase = SupervisedConfig(config.warm_steps, 2e-3)
    return train_sft(policy, jax.jit(policy.init)(jax.random.key(seed)), batch, phase, run, phase=f"warm_{seed}").params


def _word(prompt: str, generator: np.random.Generator) -> list[int]:
    likely = np.array([3.0 if letter in prompt else 1.0 for letter in letters.LETTERS])
    return generator.choice(26, generator.integers(2, 9), replace=False, p=likely / likely.sum()).tolist()


def pair_accuracy(proxy: np.ndarray, worth: np.ndarray) -> float:
    """Share of pairs of a prompt's completions that have the order of their worth, among those that differ in it."""
    by_worth, by_proxy = (np.sign(x[:, :, None] - x[:, None]) for x in (worth, proxy))
    return float(np.mean((by_worth * by_proxy + 1) / 2, where=by_worth != 0))


def main(config: Config) -> None:
    """Runs."""
    started = time.perf_counter()
    policy = decoder_policy(MODEL)
    watched = {"gold": Component(gold, 0.0)}
    task = letters.letters_task(watched, num_prompts=config.num_prompts, seed=config.seed)
    programs = make_programs(policy, task, config)
    run = cli.open_run(config)
    save_description(run.path / "model", MODEL)
    letters.TEXT.save_tokenizer(run.path / "model")
    tokenizer = load_tokenizer(run.path / "model")
    runs: dict[str, dict[str, list[float]]] = {}
    for seed in range(config.seed, config.seed + config.seeds):
        mine = dataclasses.replace(config, seed=seed)
        task = letters.letters_task(watched, num_prompts=config.num_prompts, seed=seed)
        params = warm_start(policy, mine, seed, run)

        def held(params: Params, reward=watched) -> Evaluation:
            return evaluate_heldout(programs, params, task._replace(reward=reward), config, run)[0]

        def note(method: str, evaluation: Evaluation) -> None:
            numbers = {"gold": evaluation.components["gold"][:, :-1].mean()}
            numbers["letters"] = np.mean([len(text) for group in evaluation.texts for text in group[:-1]])
            if "reward_model" in evaluation.components:
                numbers["accuracy"] = pair_accuracy(
                    evaluation.components["reward_model"][:, :-1], evaluation.components["gold"][:, :-1]
                )
            for name, value in numbers.items():
                runs.setdefault(method, {}).setdefault(name, []).append(float(value))

        start = held(params)
        note("start", start)
        for method, rounds in (("frozen", 1), ("online", config.rounds)):
            online = OnlineConfig((config.labels // rounds,) * rounds, config.replay_share)
            shape, headed = add_head(MODEL, params)
            model = RewardModel(shape, headed, tokenizer, (letters.TEXT.eos_id,), run.path / "model")

            def numbers(params: Params, step: int, model: RewardModel) -> dict[str, float]:
                now, then = (held(p, with_reward_model(task, model, config)).components for p in (params, start_params))
                worth, claimed = now["gold"][:, :-1], now["reward_model"][:, :-1]
                return {
                    "heldout_reward_gold": float(worth.mean()),
                    "gain_claimed": float(claimed.mean() - then["reward_model"][:, :-1].mean()),
                    "pair_accuracy": pair_accuracy(claimed, worth),
                    "pair_accuracy_start": pair_accuracy(then["reward_model"][:, :-1], then["gold"][:, :-1]),
                }

            start_params = params
            t = time.perf_counter()
            state, model = train_online(
                policy,
                params,
                model,
                task,
                bradley_terry_judge(gold, seed=seed),
                mine,
                online,
                run,
                phase=f"{method}_{seed}",
                programs=programs,
                evaluate=numbers,
            )
            run.console.print(method, time.perf_counter() - t, "s")
            note(method, held(state.params, with_reward_model(task, model, config)))
        for method, reward in (("coin", random_reward(seed)), ("gold", gold)):
            rewards = {method: Component(reward), **({} if method == "gold" else watched)}

            def gold_alone(params: Params, step: int) -> dict[str, float]:
                return {"heldout_reward_gold": float(held(params).components["gold"][:, :-1].mean())}

            t = time.perf_counter()
            state = train(
                policy,
                params,
                task,
                mine,
                run,
                phase=f"{method}_{seed}",
                reward=rewards,
                programs=programs,
                evaluate=gold_alone,
            )
            run.console.print(method, time.perf_counter() - t, "s")
            note(method, held(state.params))
    for method, numbers in runs.items():
        run.console.print(method, numbers)
    methods = {
        name: [f"{name}_{seed}" for seed in range(config.seed, config.seed + config.seeds)]
        for name in ("frozen", "online", "coin", "gold")
    }
    terminal.save_curves(run, CURVES, methods)
    run.console.print(f"{run.compilations()} programs compiled, {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
