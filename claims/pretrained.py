"""Claims again on pretrained language models: the runs of `questions/stories.toml` and `questions/sums.toml`.

Each setting is run with each seed, and a run whose file is on disk is not repeated: after a stop the same command
continues. `--numbers` then adds the settings whose runs are all there to a file of numbers, of which
`claims.reproduce --numbers` makes the pages.

  python -m claims.pretrained --model DIR --numbers docs/results/numbers.json
  python -m claims.pretrained --question sums --model DIR --numbers docs/results/numbers.json
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from rich.console import Console

from claims.answers import hardware, measure_runs
from claims.bench import Runs, Setting, code_checksum, read_run
from claims.numbers import add_answer
from claims.questions import QUESTIONS, Question
from experiments.real import EXAMPLES, sums
from experiments.stories import make_description
from experiments.tasks.rewards import happy_sentences
from experiments.tasks.stories import stories_task
from grpo_jax.commands import flags
from grpo_jax.config import GRPOConfig, ModelOptions, recipe, with_options
from grpo_jax.data.types import Component, Reward
from grpo_jax.errors import UsageError
from grpo_jax.models.huggingface import Pretrained
from grpo_jax.models.policy import decoder_policy
from grpo_jax.options import Size, options_of
from grpo_jax.rewards.builtin import exact_answer
from grpo_jax.rewards.reward import RewardLike
from grpo_jax.rl.grpo import grpo_method, make_group_advantage
from grpo_jax.rl.programs import Programs, make_method_programs
from grpo_jax.runs.folder import RunFolder
from grpo_jax.runs.progress import use_cache
from grpo_jax.tasks.task import Task, random_reward, text_task
from grpo_jax.training.phases import PHASES, evaluate_heldout, train_with_evaluation
from grpo_jax.training.prepare import load_model

RIGHT = exact_answer()
TESTBED: Any = None  # rewards are computed on the host, so there is none
METRICS = ("entropy", "zero_spread_share", "ratio_deviation", "skipped")


def stories(model: Pretrained, config: GRPOConfig) -> Task:
    """Returns the task of happy stories for a run."""
    return stories_task(
        model.tokenizer,
        model.eos_ids,
        vocab_size=model.config.vocab_size,
        num_prompts=config.sampling.num_prompts,
        seed=config.seed,
    )


def additions(model: Pretrained, config: GRPOConfig) -> Task:
    """Returns the task of sums after three solved ones for a run."""
    rows, heldout = sums()
    return text_task(
        model.tokenizer,
        model.eos_ids,
        rows,
        vocab_size=model.config.vocab_size,
        num_prompts=config.sampling.num_prompts,
        seed=config.seed,
        reward=RIGHT,
        template=EXAMPLES + "{question}",
        stop=("\n",),
        heldout_rows=heldout[:NUM_HELDOUT],
    )


class Study(NamedTuple):
    """A question about a pretrained model, and what all of its runs share."""

    question: Question
    base: Mapping[str, Any]  # options, of which a setting changes some
    steps: int
    make_task: Callable[[Pretrained, GRPOConfig], Task]
    reward: Reward  # that is measured
    describes_samples: bool  # whether the KL to the start and repeated sentences are measured on held-out samples


NUM_HELDOUT = 100
STUDIES = {
    "stories": Study(
        QUESTIONS["stories"],
        {"num_prompts": 8, "group_size": 8, "max_tokens": 64, "learning_rate": 1e-4, "eval_samples": 7},
        steps=200,
        make_task=stories,
        reward=happy_sentences,
        describes_samples=True,
    ),
    "sums": Study(
        QUESTIONS["sums"],
        {"num_prompts": 8, "group_size": 8, "max_tokens": 5, "learning_rate": 1e-6, "eval_samples": 4},
        steps=16,
        make_task=additions,
        reward=RIGHT,
        describes_samples=False,
    ),
}


@dataclass(frozen=True)
class Config:
    """Options of the runs."""

    model: str
    """Folder of the model in Hugging Face's format: stories260K for stories, Gemma 3 270M for sums."""
    question: Literal["stories", "sums"] = "stories"
    """stories: the reward is the share of happy sentences. sums: it is 1 for the right sum."""
    seed: int = 0
    """The first random seed."""
    num_seeds: Size = 6
    """Runs of each setting, with random seeds from `seed` on."""
    steps: Size | None = None
    """Training steps of a run. None: 200 of stories, 16 of sums."""
    run_dir: Path = Path("runs/pretrained_claims")
    """Folder of the runs. A run that is there is not repeated."""
    only: tuple[str, ...] = ()
    """Settings to run now, by name. None: all."""
    numbers: Path | None = None
    """File of numbers that the answer is added to. None: only the runs are made."""


def main(config: Config) -> None:
    """Makes the runs that are missing, seed by seed, and adds their numbers to a file.

    Raises:
      UsageError: There is no model, or a run or the file of numbers cannot be used.
    """
    study = STUDIES[config.question]
    settings = study.question.settings
    if unknown := set(config.only) - settings.keys():
        raise UsageError(f"there is no setting {', '.join(unknown)}: name some of {', '.join(settings)}")
    model = load_model(ModelOptions(model=config.model), seed=0)
    programs: dict[str, Programs] = {}  # a setting's programs serve all of its seeds
    for seed, (row, options) in product(seeds_of(config), settings.items()):
        file = file_of(config, options, seed)
        if row in (config.only or settings) and not file.exists():
            Console().print(f"seed {seed} of {row}", markup=False)
            run_config = config_of(study, options, seed, config.steps or study.steps)
            task = study.make_task(model, run_config)
            if row not in programs:
                advantages = options.get("advantages", run_config.loss.preset)
                programs[row] = make_setting_programs(model, task, run_config, advantages)
            reward = make_coin(study.reward, seed) if "coin" in options else task.reward
            make_run(file, model, task, reward, run_config, programs[row], describes_samples=study.describes_samples)
    if config.numbers:
        add_answer(config.numbers, study.question.name, answer_of(config))


# ---- runs


def config_of(study: Study, options: Mapping[str, Any], seed: int, steps: int) -> GRPOConfig:
    """Returns the configuration of a setting's run."""
    changed = {name: value for name, value in options.items() if name not in ("advantages", "coin")}
    return recipe(**{**study.base, **changed}, steps=steps, seed=seed, checkpoint_every=0, rollouts_every=0)


def seeds_of(config: Config) -> range:
    """Returns the random seeds of the runs."""
    return range(config.seed, config.seed + config.num_seeds)


def make_coin(reward: Reward, seed: int) -> dict[str, Component]:
    """Returns rewards of which a coin toss is learned, and that of the task is only measured."""
    return {"measured": Component(reward, weight=0.0), "coin": Component(random_reward(seed))}


def make_run(
    file: Path,
    model: Pretrained,
    task: Task,
    reward: RewardLike,
    config: GRPOConfig,
    programs: Programs,
    *,
    describes_samples: bool,
) -> None:
    """Trains a setting with one seed, and writes its metrics and held-out rewards.

    Args:
      file: The file to write. The run has a folder of the same name.
      model: The start.
      task: The task with the seed of the run.
      reward: The reward to learn from.
      config: The options of the setting, with the seed.
      programs: The programs of the setting.
      describes_samples: See `Study`.
    """
    started, models = time.perf_counter(), {"policy": model.params}
    run = RunFolder(file.with_suffix(""), options_of(config), console=Console(quiet=True))
    start = evaluate_heldout(programs, model.params, task, config, run)
    _, end = train_with_evaluation(models, task, config, run, programs, phase=PHASES[0], reward=reward, start=start)
    lines = [line for line in run.lines() if "reward" in line]
    metrics: dict[str, Any] = {name: [line[name] for line in lines] for name in METRICS} | {
        "gold": [line.get("reward_measured", line["reward"]) for line in lines]
    }
    if describes_samples:
        describe = make_description(decoder_policy(model.config), model.params, config)
        described = [describe(*held) for held in (start, end)]
        metrics |= {name: [it[name] for it in described] for name in ("kl", "repeated")}
    scores = [np.column_stack([held.evaluation.rewards, held.evaluation.greedy]) for held in (start, end)]
    temporary = file.with_suffix(".tmp.npz")
    np.savez_compressed(temporary, scores=scores, seconds=time.perf_counter() - started, **metrics)
    temporary.replace(file)


def make_setting_programs(model: Pretrained, task: Task, config: GRPOConfig, advantages: str) -> Programs:
    """Returns the programs of GRPO with the advantages of a preset."""
    policy = decoder_policy(model.config)
    method = grpo_method(policy, config)
    method = method._replace(advantage=make_group_advantage(with_options(config, preset=advantages).loss))
    return make_method_programs(method, policy, task, config)


def file_of(config: Config, options: Mapping[str, Any], seed: int) -> Path:
    """Returns the file of a run, named by a checksum of its options."""
    study = STUDIES[config.question]
    known = json.dumps([study.base, dict(sorted(options.items())), config.steps or study.steps, seed])
    return config.run_dir.expanduser() / f"{hashlib.sha256(known.encode()).hexdigest()[:16]}.npz"


# ---- numbers


def answer_of(config: Config) -> dict[str, Any]:
    """Returns the answer to the question, of the settings whose runs are all on disk."""
    asked = STUDIES[config.question].question
    runs, seeds, seconds = dict[str, Runs](), seeds_of(config), 0.0
    for row, options in asked.settings.items():
        files = [file_of(config, options, seed) for seed in seeds]
        if all(file.exists() for file in files):
            results = [read_run(file) for file in files]
            stacked = {name: np.stack([run[name] for run in results]) for name in results[0]}
            stacked["diverged"] = np.zeros(stacked["gold"].shape, bool)  # a run that diverges ends with an error
            seconds += float(stacked.pop("seconds").sum())
            runs[row] = Runs(Setting(TESTBED, "grpo", options, {}), stacked, stacked.pop("scores"))
    known = runs.keys() | asked.starts.keys()
    question = replace(
        asked,
        claims=[it for it in asked.claims if known >= set(it.rows)],
        also=[it for it in asked.also if known >= set(it.rows)],
        curves=[row for row in asked.curves if row in known],
    )
    return measure_runs(question, runs) | {
        "seconds": seconds,
        "steps": config.steps or STUDIES[config.question].steps,
        "seeds": list(seeds),
        "machine": hardware(),
        "code": f"checksum {code_checksum()}",
    }


if __name__ == "__main__":
    options = flags.read_flags(Config, prog="python -m claims.pretrained", description=__doc__)
    use_cache()
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax logs each checkpoint
    try:
        main(options)
    except UsageError as error:
        flags.refuse(str(error))
