"""Online preference learning: the reward model keeps training on pairs from the policy that it rewards.

A reward model knows the completions that it was trained on. As a policy improves on it, the policy moves away from
these completions, until it exploits errors of the model (2210.10760). So the policy is trained in rounds, and before
each round a judge compares pairs of its current completions (iterated RLHF, 2204.05862; iterative GRPO, Algorithm 1 of
2402.03300).
"""

import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import special

from grpo_jax.config import GRPOConfig
from grpo_jax.data.preferences import Preference, encode_preferences, read_preferences
from grpo_jax.data.rows import batches
from grpo_jax.data.types import Completion, Component, Example, rng
from grpo_jax.errors import UsageError
from grpo_jax.hosts import check_alone
from grpo_jax.models.chat import Chat
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.params.tree import join, split
from grpo_jax.models.policy import Policy
from grpo_jax.offline.pairs import PairBatch, pad_pairs, reward_model_objective
from grpo_jax.offline.phase import SupervisedConfig
from grpo_jax.rewards.learned import RewardModel, reward_function
from grpo_jax.rl.grade import decode_groups
from grpo_jax.rl.programs import Programs, make_programs
from grpo_jax.rl.source import completion_numbers, group_temperatures
from grpo_jax.rl.types import LABELLING, noise_of
from grpo_jax.runs.folder import RunFolder
from grpo_jax.step import TrainState
from grpo_jax.tasks.task import Task
from grpo_jax.training.phases import fit, train

# (examples, first completions, second completions) -> whether the first is better; None: the judge does not choose
PairJudge = Callable[[Sequence[Example], Sequence[Completion], Sequence[Completion]], Sequence[bool | None]]
_PATIENCE = 4  # a multiple of the rollouts that are needed if all completions differ


class OnlineConfig(NamedTuple):
    """The configuration of the judge's labels and of the reward model's training."""

    labels: tuple[int, ...]  # pairs that the judge sees before each round; with one round the reward model is frozen
    replay_share: float = 0.1  # share of earlier pairs to train on again, as in 2402.03300
    epochs: int = 4  # there are epochs x labels / num_pairs optimizer steps, whatever the number of replayed pairs
    num_pairs: int = 64  # pairs of an optimizer step
    learning_rate: float = 1e-3  # peak; warm-up, decay and AdamW restart in each round
    warmup_steps: int = 10


def train_online(
    policy: Policy,
    params: Params,
    reward_model: RewardModel,
    task: Task,
    judge: PairJudge,
    config: GRPOConfig,
    online: OnlineConfig,
    run: RunFolder,
    *,
    phase: str = "online",
    programs: Programs | None = None,
    evaluate: Callable[[RewardModel, Params, int], dict[str, float]] | None = None,
) -> tuple[TrainState, RewardModel]:
    """Trains a policy on a reward model that is also trained, and resumes an interrupted run.

    Each round samples pairs from the policy and asks the judge about them. It trains the reward model on these pairs
    and a share of earlier pairs, and then the policy on the reward model. All rounds of the policy are one phase, with
    one optimizer, one stream of noise and one order of prompts. The judge's answers are stored in the run's
    preferences/, so that a resumed run does not ask again.

    Args:
      policy: The functions of the model.
      params: The initial parameters of the policy, which are also those of the reference, if there is one. Set
        `ref_sync_steps` to the steps of a round to move the reference to the policy of each round, as in 2402.03300.
      reward_model: The initial reward model, made with `heads.add_head`. It has the policy's tokenizer.
      task: Supplies the prompts. Its reward holds further components by name; weight 0: only logged.
      judge: Compares pairs of completions.
      config: The configuration of the policy's training. The rounds share its steps evenly.
      online: The configuration of the rounds.
      run: The folder of the run.
      phase: The name of the policy's phase; phases of the reward model append "_reward_" and the round's number.
      programs: The compiled programs, as in `training.phases.train`.
      evaluate: (reward model of the round, parameters of the policy, step) -> numbers to log, as in `train`.

    Returns:
      The final state of the policy, and the last reward model.

    Raises:
      UsageError: The configuration cannot work, or the completions of a prompt no longer differ.
      FloatingPointError: Gradients were not finite too many times in a row.
    """
    _check(config, online, task)
    params = {"policy": params}
    programs = programs or make_programs(policy, task, config)
    trained, frozen = split(params)
    old: list[Preference] = []
    for number, labels in enumerate(online.labels):
        name = f"{phase}_reward_{number}"
        file = run.path / "preferences" / f"{name}.jsonl"
        if not file.exists():
            # Rollouts of the policy's steps and of earlier rounds have smaller indices.
            first = config.steps * config.sampling.max_rollouts
            first += sum(_most_rollouts(count, config) for count in online.labels[:number])
            pairs = sample_pairs(programs, join(trained, frozen)["policy"], task, config, labels, first=first)
            if not (answers := ask_judge(*pairs, judge)):  # nothing is written, so that a resumed run asks again
                raise UsageError(f"{name}: the judge preferred neither completion of any of {labels} pairs")
            write_preferences(file, answers)
        new, _ = read_preferences(file)
        replayed = draw_replay(old, online.replay_share, seed=config.seed)
        steps = online.epochs * labels // online.num_pairs
        reward_model = _train_reward_model(reward_model, [*new, *replayed], steps, online, task, config, run, name)
        old += new
        state = train(
            params,
            task,
            config,
            run,
            programs,
            phase=phase,
            reward=with_reward_model(task, reward_model, config),
            evaluate=partial(evaluate, reward_model) if evaluate else None,
            until=config.steps * (number + 1) // len(online.labels),
        )
        trained = state.params
    return state, reward_model


def with_reward_model(task: Task, model: RewardModel, config: GRPOConfig) -> dict[str, Component]:
    """Returns the task's rewards and "reward_model", which always has the same shapes."""
    shapes = {"max_prompt_tokens": task.heldout.tokens.width, "max_tokens": config.sampling.max_tokens}
    size = config.sampling.num_prompts * config.sampling.group_size
    return {"reward_model": Component(reward_function(model, batch_size=size, **shapes)), **task.rewards.components}


def sample_pairs(
    programs: Programs, params: Params, task: Task, config: GRPOConfig, number: int, *, first: int
) -> tuple[list[Example], list[Completion], list[Completion]]:
    """Samples pairs of completions of a prompt, with different texts.

    A group of G completions makes G // 2 pairs. Pairs with equal or empty texts are replaced by new samples.

    Args:
      programs: The compiled programs, with the sampler.
      params: The parameters of the policy.
      task: Supplies the prompts and decodes completions.
      config: The configuration with shapes, temperature and seed.
      number: The number of pairs.
      first: The index of the first rollout, for the task's prompts and the noise.

    Returns:
      The examples, the first completions and the second completions.

    Raises:
      UsageError: Four times the expected number of rollouts did not yield enough pairs.
    """
    numbers, temperature = completion_numbers(config.sampling), group_temperatures(config.sampling)
    sampled: list[tuple[Example, Completion, Completion]] = []
    for index in range(first, first + _most_rollouts(number, config)):
        prompts, noise = task.prompts(index), noise_of(config.seed, LABELLING, index)
        completions = programs.sampler.complete(params, prompts, numbers, temperature, noise)
        for example, group in zip(prompts.examples, decode_groups(completions, task), strict=True):
            pairs = zip(group[::2], group[1::2], strict=False)
            sampled += [
                (example, one, other)
                for one, other in pairs
                if one.strip() and other.strip() and one.strip() != other.strip()
            ]
        if len(sampled) >= number:
            examples, ones, others = zip(*sampled[:number], strict=True)
            return list(examples), list(ones), list(others)
    raise UsageError(
        f"of {number} pairs for the judge only {len(sampled)} could be sampled, because nearly all completions of a "
        "prompt are equal or empty: lower the learning rate, or raise the temperature"
    )


def draw_replay(preferences: Sequence[Preference], share: float, *, seed: int) -> list[Preference]:
    """Draws a share of the preferences without replacement."""
    chosen = rng(seed, len(preferences)).permutation(len(preferences))[: round(share * len(preferences))]
    return [preferences[i] for i in chosen]


def _train_reward_model(
    model: RewardModel,
    preferences: Sequence[Preference],
    steps: int,
    online: OnlineConfig,
    task: Task,
    config: GRPOConfig,
    run: RunFolder,
    phase: str,
) -> RewardModel:
    """Trains the reward model on these preferences, as a phase of the run."""
    max_prompt_tokens, max_tokens = widths = task.heldout.tokens.width, config.sampling.max_tokens
    pairs = encode_preferences(
        Chat(model.tokenizer, model.eos_ids),
        preferences,
        max_prompt_tokens=max_prompt_tokens,
        max_tokens=max_tokens,
        vocab_size=model.config.vocab_size,
    )
    run.warn({f"{phase} {note}": f"{phase}: {note}" for note in pairs.notes})
    # A judge may abstain, so there may be fewer pairs than in a step. Empty pairs, whose numbers are no pair's, then
    # fill it up.
    size = len(pairs.prompts)
    order, empty = batches(size, min(online.num_pairs, size), config.seed), np.arange(size, online.num_pairs)

    def batch(step: int) -> PairBatch:
        return pad_pairs(pairs, np.concatenate([order(step), empty]), widths)

    options = SupervisedConfig(steps, online.learning_rate, online.warmup_steps, decay="linear", devices=config.devices)
    state = fit(reward_model_objective(model.config), model.params, batch, options, run, phase=phase)
    return model._replace(params=join(state.params, split(model.params)[1]))


def _most_rollouts(pairs: int, config: GRPOConfig) -> int:
    """Returns the maximum number of rollouts for `pairs` pairs."""
    return _PATIENCE * -(-pairs // (config.sampling.num_prompts * (config.sampling.group_size // 2)))


def _check(config: GRPOConfig, online: OnlineConfig, task: Task) -> None:
    check_alone("rounds of preferences")
    if not online.labels or min(online.labels) < online.num_pairs:
        raise UsageError(
            f"labels is {online.labels}: each round needs at least the {online.num_pairs} pairs of a step of the "
            "reward model"
        )
    if not 0 <= online.replay_share <= 1:
        raise UsageError(f"replay_share is {online.replay_share}: it must be between 0 and 1")
    if config.steps < len(online.labels):
        raise UsageError(f"steps is {config.steps}, but there are {len(online.labels)} rounds: each needs a step")
    if not isinstance(task.reward, Mapping) or "reward_model" in task.reward:
        raise UsageError(
            'the reward of the task must be a dict of rewards that are added to "reward_model": {} adds none'
        )


# ---- judges


def write_preferences(path: Path, preferences: Sequence[Preference]) -> None:
    """Writes a .jsonl file for `read_preferences` atomically.

    Args:
      path: The path of the file, whose folder is created.
      preferences: The preferences to write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(json.dumps(pair._asdict()) + "\n" for pair in preferences), encoding="utf-8")
    os.replace(temporary, path)


def ask_judge(
    examples: Sequence[Example], firsts: Sequence[Completion], seconds: Sequence[Completion], judge: PairJudge
) -> list[Preference]:
    """Asks a judge which of two completions of a prompt is better.

    Args:
      examples: M examples, with the column "prompt".
      firsts: The M first completions.
      seconds: The M second completions.
      judge: Compares pairs of completions. It is called once, with all pairs.

    Returns:
      The preferences, without the pairs for which the judge returned None.

    Raises:
      UsageError: The judge did not return True, False or None for each pair.
    """
    answers = list(judge(examples, firsts, seconds))
    if len(answers) != len(examples) or not all(isinstance(answer, bool | np.bool_ | None) for answer in answers):
        raise UsageError(
            f"the judge must return True, False or None for each of {len(examples)} pairs: whether the first is better"
        )
    asked = zip(examples, firsts, seconds, answers, strict=True)
    return [
        Preference(example["prompt"], str(first), str(second))
        if better
        else Preference(example["prompt"], str(second), str(first))
        for example, first, second, better in asked
        if better is not None
    ]


def bradley_terry_judge(
    utility: Callable[[Sequence[Example], Sequence[Completion]], Sequence[float]], *, seed: int
) -> PairJudge:
    """Returns a noisy judge, which prefers the first completion with probability σ(u₁ − u₂) (Bradley and Terry).

    Args:
      utility: (examples, completions) -> utilities u; a difference of two utilities is a log-odds.
      seed: The random seed of the judge's errors. For the same ordered pair the judge always returns the same.
    """

    def judge(examples: Sequence[Example], firsts: Sequence[Completion], seconds: Sequence[Completion]) -> list[bool]:
        difference = np.subtract(utility(examples, firsts), utility(examples, seconds))
        texts = (
            "\x1f".join((str(example["prompt"]), *pair))
            for example, *pair in zip(examples, firsts, seconds, strict=True)
        )
        draws = np.array([rng(seed, zlib.crc32(text.encode())).random() for text in texts])
        return (draws < special.expit(difference)).tolist()

    return judge
