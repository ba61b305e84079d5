"""SFT, a reward model, then PPO and GRPO from the same start: how does an independent judge rate the answers?

A hash of how each dialogue begins divides the pairs into thirds:

- The first third trains the policy (SFT on the chosen answers) and the reward model (from the SFT policy). PPO, GRPO
and the control then start from the SFT policy and train on the prompts of this third. The control is GRPO on a coin
toss.

- The second third trains the judge, which is another reward model. It is trained once. - The last third is held out.
Its pairs test both reward models. The policies answer its prompts, and the judge scores the answers.

Each seed trains everything anew except the judge.

PPO and GRPO share the prompts, completions per step, longest completion, learning rate, surrogate, token weights, and
the KL term in the loss (k3 to the SFT policy). They differ in their advantages: PPO's come from a critic that starts
from the reward model, GRPO's from groups. `--kl-in-reward` moves the KL of both into the reward.

The table shows:

- the judge's score, in standard deviations of the SFT policy's answers
- how often the judge prefers an answer to the SFT policy's answer to the same prompt (harmlessness, as far as that
  judge can tell)
- two rules, analogues of helpfulness and honesty (`experiments/tasks/dialogue.py`), which were written before the first
  run
- the length, and how much of the score's change it explains by the slope among SFT answers

Two rows need no training. They select the shortest of the SFT policy's answers to a prompt, and the answer that the
reward model scores highest.

With the 260-thousand-parameter TinyStories model and 796 training pairs of harmless-base's test set, the reward models
are right in .57 to .59 of 728 held-out pairs and prefer the shorter answer in .84 to .87 of them. So expect answers to
become short: from 40 tokens to 18 with GRPO, 12 with PPO, and 41 with the coin toss. The changes of the judge's score
are:

- GRPO: .87 [.65, 1.08]
- PPO: .67 [-.15, 1.49]; in one of three seeds it falls again while the reward model's score rises
- the coin toss: -.04 [-.57, .49]
- the shortest of seven SFT answers: .93 [.89, .96]

So training gained nothing that short answers do not also give. The analogue of helpfulness stays at .003. The analogue
of honesty rises with GRPO from .58 to .72 [.58, .86]. The run takes nine minutes on two CPU cores. It leaves out human
judges, helpfulness pairs, and several rounds of collecting pairs.

  python -m experiments.hh_rlhf --model DIR --data FILE.jsonl.gz

A larger run, which we have not tried, needs other options, such as --chat --lora-rank 16 --dtype bfloat16
--max-prompt-tokens 512 --max-tokens 256 --num-prompts 64 --sft-rows 16 --microbatches 16 --sft-learning-rate 1e-4
--reward-model-learning-rate 1e-5 --learning-rate 1e-5 --critic-learning-rate 1e-5.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from experiments import plots
from experiments.common import Seeds
from experiments.judging import (
    SFT,
    agreement,
    compare_methods,
    pair_numbers,
    print_tables,
    sampled_answers,
    samples_text,
)
from experiments.tasks.dialogue import candid, dialogue_rows, pack_chosen, split_by_dialogue, taken_up
from grpo_jax import hosts, report
from grpo_jax.commands import flags
from grpo_jax.commands.offline import encoding, judging
from grpo_jax.commands.reward_model import answer_lengths
from grpo_jax.config import PPO, CriticConfig, GRPOConfig, ModelOptions, with_options
from grpo_jax.data.packing import Packed, packed_batches, packed_pieces
from grpo_jax.data.preferences import EncodedPairs, Preference, encode_preferences, read_preferences
from grpo_jax.data.types import Component, Reward
from grpo_jax.devices import devices_of, place
from grpo_jax.errors import UsageError
from grpo_jax.models.chat import Chat
from grpo_jax.models.decoder.heads import add_head
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.huggingface import Pretrained
from grpo_jax.models.params.tree import join, split
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.offline.pairs import pair_batches, pair_rewards, reward_model_objective, score_pairs
from grpo_jax.offline.phase import SupervisedConfig
from grpo_jax.offline.sft import sft_objective, text_nll
from grpo_jax.options import Positive, Size
from grpo_jax.rewards.learned import RewardModel, reward_function
from grpo_jax.rl.evaluate import Evaluation
from grpo_jax.rl.ppo import add_critic, critic_policy
from grpo_jax.rl.programs import Programs, make_programs
from grpo_jax.runs.files import write_json, write_text
from grpo_jax.runs.folder import RunFolder
from grpo_jax.runs.pretrained import keep_description
from grpo_jax.tasks.task import Task, random_reward, text_task
from grpo_jax.training.phases import evaluate_heldout, fit, train_with_evaluation
from grpo_jax.training.prepare import load_model

METHODS = {"ppo": "PPO", "grpo": "GRPO", "control": "GRPO, coin toss"}  # phase -> row of the table
CURVES = (
    ("reward_learned", "reward model's score"),
    ("reward_judge", "the judge's score"),
    ("kl", "KL to SFT, nats a token"),
    ("length_mean", "tokens of an answer"),
    ("entropy", "entropy"),
)
WARMUP_STEPS = 10  # of SFT and reward models


@dataclass(frozen=True)
class Config:
    """Options of the run; GRPO uses all options that it shares with PPO."""

    ppo: GRPOConfig = with_options(
        PPO,
        preset="grpo",
        steps=60,
        num_prompts=8,
        group_size=8,
        max_tokens=48,
        kl_coef=0.05,
        learning_rate=1e-4,
        decay="linear",
        critic_learning_rate=1e-3,
        checkpoint_every=20,
    )
    model: ModelOptions = ModelOptions(max_prompt_tokens=64, overlong="truncate")
    seeds: Seeds = Seeds()
    output: flags.RunConfig = flags.RunConfig(Path("runs/hh_rlhf"))
    data: str = ""
    """File, folder or hub id of preferences."""
    chat: bool = False
    """Transcripts become chat messages, for the tokenizer's chat template."""
    num_heldout: Size = 256
    """Held-out prompts that policies answer, at most. All held-out pairs test the reward models."""
    sft_steps: Size = 150
    """Optimizer steps of SFT."""
    sft_rows: Size = 8
    """Rows of a step of SFT, each packed with several dialogues."""
    sft_learning_rate: Positive = 1e-3
    """Peak learning rate of SFT."""
    reward_model_steps: Size = 96
    """Optimizer steps of either reward model."""
    num_pairs: Size = 16
    """Pairs of such a step."""
    reward_model_learning_rate: Positive = 3e-4
    """Peak learning rate of either reward model."""
    microbatches: Size = 1
    """Pieces that a step of SFT or of either reward model is computed in."""
    critic_start: Literal["reward_model", "policy"] = "reward_model"
    """Start of a separate critic: the reward model, as in InstructGPT (2203.02155), or the SFT policy."""


class Thirds(NamedTuple):
    """The thirds of the data: for training, for the judge, and held out."""

    preferences: list[list[Preference]]
    pairs: list[EncodedPairs]
    rows: list[Packed]  # packed prompts and chosen answers for SFT


class Shared(NamedTuple):
    """The parts that all seeds share."""

    model: Pretrained
    policy: Policy
    start: Params  # initial parameters of SFT
    thirds: Thirds
    judge: RewardModel
    programs: dict[str, Programs]  # phase -> its functions
    run: RunFolder


class Seed(NamedTuple):
    """The models of one seed, and their answers to the held-out prompts."""

    answers: dict[str, Evaluation]  # row of the table -> answers
    nll: dict[str, float]  # NLL of the held-out chosen answers before and after SFT, in nats per token
    reward_model: RewardModel


def main(config: Config) -> None:
    """Trains the judge, and for each seed SFT, reward model, PPO, GRPO and control; writes tables and curves."""
    started = time.perf_counter()
    hosts.check_alone("experiments with supervised phases")
    check(config)
    seeds = config.seeds.starting_at(config.ppo.seed)
    model = load_model(config.model, seed=config.ppo.seed)
    thirds = split_and_encode(read_preferences(config.data, chat=config.chat)[0], model, config)
    configs = [with_options(config, seed=seed) for seed in seeds]
    tasks = [dialogue_task(thirds, model, one) for one in configs]
    policy = decoder_policy(model.config)
    grpo = make_programs(policy, tasks[0], replace(config.ppo, critic=CriticConfig()))
    policies = {"policy": policy, "critic": critic_policy(model.config)}
    ppo = make_programs(policies, tasks[0], config.ppo)
    # PPO and GRPO sample alike, and share the compiled sampler.
    programs = {"ppo": ppo._replace(sampler=grpo.sampler), "grpo": grpo, "control": grpo}
    run = flags.open_run(config)
    keep_description(run, {"policy": model}, config.model, config.chat)
    start = place(model.params, devices_of(config.ppo))
    judge = fit_reward_model(start, thirds.pairs[1], model, config, run, "judge")
    shared = Shared(model, policy, start, thirds, judge, programs, run)
    matches = [run_seed(shared, task, one) for task, one in zip(tasks, configs, strict=True)]
    results = summarised(matches, shared)
    write_json(run.path / "results.json", results)
    prompts = [example["prompt"] for example in tasks[0].heldout.examples]
    write_text(run.path / "samples.md", samples_text(matches[0].answers, prompts, 20))
    phases = {title: [f"{name}_{seed}" for seed in seeds] for name, title in METHODS.items()}
    print_tables(run, results, control=METHODS["control"])
    plots.save_curves(run, CURVES, phases)
    report.say_end(run, started)
    run.say(f"answers to read: {run.path / 'samples.md'}")


def check(config: Config) -> None:
    """Checks the options.

    Raises:
      UsageError: One sentence that says what to change.
    """
    if not config.data:
        raise UsageError("--data is needed: name a file of preferences")
    for name in ("sft_rows", "num_pairs"):
        if getattr(config, name) % config.microbatches:
            raise UsageError(f"{name} ({getattr(config, name)}) must be a multiple of microbatches")


# ---- data


def split_and_encode(preferences: Sequence[Preference], model: Pretrained, config: Config) -> Thirds:
    """Splits the data into thirds and encodes them. For SFT, an answer that is not cut at T ends with EOS."""
    parts, max_tokens = split_by_dialogue(preferences, 3), config.ppo.sampling.max_tokens
    options = encoding(model, config.model, max_tokens) | judging(model)
    pairs = [encode_preferences(Chat(model.tokenizer, model.eos_ids), part, **options) for part in parts]
    return Thirds(parts, pairs, [pack_chosen(part, model.eos_ids[-1], max_tokens) for part in pairs])


def dialogue_task(thirds: Thirds, model: Pretrained, config: Config) -> Task:
    """Makes a task with training prompts from the first third and held-out prompts from the last third."""
    return text_task(
        model.tokenizer,
        model.eos_ids,
        dialogue_rows(thirds.preferences[0]),
        vocab_size=model.config.vocab_size,
        num_prompts=config.ppo.sampling.num_prompts,
        seed=config.ppo.seed,
        reward=taken_up,
        heldout_rows=dialogue_rows(thirds.preferences[2]),
        num_heldout=config.num_heldout,
        max_prompt_tokens=config.model.max_prompt_tokens,
        overlong=config.model.overlong,
    )


# ---- training


def run_seed(shared: Shared, task: Task, config: Config) -> Seed:
    """Trains all models of one seed, and samples answers to the held-out prompts before and after."""
    start, thirds, run, seed = shared.start, shared.thirds, shared.run, config.ppo.seed
    model, answers = shared.model, dict[str, Evaluation]()
    sft = fit_sft(start, thirds.rows[0], shared.policy, config, run)
    nll = {}
    for name, params in (("before", start), ("after", sft)):
        totals, tokens = text_nll(shared.policy, params, packed_pieces(thirds.rows[2], config.sft_rows))
        nll[name] = float(totals.sum() / tokens.sum())
    learned = fit_reward_model(sft, thirds.pairs[0], model, config, run, f"reward_model_{seed}")
    scorers = {"learned": as_reward(learned, config), "judge": as_reward(shared.judge, config)}
    rules: dict[str, Reward] = {"taken_up": taken_up, "candid": candid}
    task = task._replace(reward={name: Component(reward) for name, reward in (scorers | rules).items()})
    with run.waiting("answering held-out prompts"):
        grpo = shared.programs["grpo"]
        before = evaluate_heldout(grpo, sft, task, with_options(grpo.config, seed=seed), run)
    answers[SFT] = before.evaluation
    for name, title in METHODS.items():
        programs, phase = shared.programs[name], f"{name}_{seed}"
        params = with_critic(sft, learned, model, config) if name == "ppo" else {"policy": sft}
        rewards = training_rewards(name, scorers, seed)
        settings = with_options(programs.config, seed=seed)
        _, held = train_with_evaluation(
            params, task, settings, run, programs, phase=phase, reward=rewards, start=before
        )
        answers[title] = held.evaluation
    return Seed(answers, nll, learned)


def training_rewards(name: str, scorers: Mapping[str, Reward], seed: int) -> dict[str, Component]:
    """Returns the reward model's score, or a coin, with weight 1, and all other scores with weight 0."""
    learns = "coin" if name == "control" else "learned"
    rewards = {**scorers, **({"coin": random_reward(seed)} if name == "control" else {})}
    return {key: Component(reward, float(key == learns)) for key, reward in rewards.items()}


def with_critic(sft: Params, learned: RewardModel, model: Pretrained, config: Config) -> Params:
    """Returns the SFT policy with the critic that PPO starts from, by role."""
    if config.ppo.critic.critic == "own" and config.critic_start == "reward_model":
        return {"policy": sft, "critic": learned.params}
    return add_critic(model.config, sft, config.ppo.critic.critic)


def supervised(config: Config, steps: int, learning_rate: float, **options: Any) -> SupervisedConfig:
    """Returns the options of a supervised phase, on the devices of the run."""
    options |= {"microbatches": config.microbatches, "devices": config.ppo.devices}
    return SupervisedConfig(steps, learning_rate, warmup_steps=WARMUP_STEPS, decay="linear", **options)


def fit_sft(start: Params, rows: Packed, policy: Policy, config: Config, run: RunFolder) -> Params:
    """Trains the policy by SFT on chosen answers."""
    batches = packed_batches(rows, config.sft_rows, config.ppo.seed)
    phase = supervised(config, config.sft_steps, config.sft_learning_rate)
    state = fit(sft_objective(policy), start, batches, phase, run, phase=f"sft_{config.ppo.seed}")
    return join(state.params, split(start)[1])


def fit_reward_model(
    start: Params, pairs: EncodedPairs, model: Pretrained, config: Config, run: RunFolder, phase: str
) -> RewardModel:
    """Trains a reward model from these parameters."""
    shape, params = add_head(model.config, start)
    batches = pair_batches(pairs, config.num_pairs, config.ppo.seed)
    options = supervised(config, config.reward_model_steps, config.reward_model_learning_rate, weight_decay=0.1)
    state = fit(reward_model_objective(shape), params, batches, options, run, phase=phase)
    trained = join(state.params, split(params)[1])
    return RewardModel(*model._replace(config=shape, params=trained))


def as_reward(model: RewardModel, config: Config) -> Reward:
    """Makes a reward function from a reward model, with the shape of a rollout."""
    return reward_function(
        model,
        batch_size=config.ppo.sampling.num_prompts * config.ppo.sampling.group_size,
        max_prompt_tokens=config.model.max_prompt_tokens,
        max_tokens=config.ppo.sampling.max_tokens,
    )


# ---- what it came to


def summarised(matches: Sequence[Seed], shared: Shared) -> dict[str, Any]:
    """Returns the contents of results.json, which are the same if the run was resumed."""
    thirds, pairs = shared.thirds, shared.thirds.pairs[2]

    def scores(model: RewardModel):
        return score_pairs(pair_rewards, model.config, model.params, pairs, num_pairs=32)

    of_judge, of_learned = scores(shared.judge), [scores(one.reward_model) for one in matches]
    models = {f"reward model {i + 1}": values for i, values in enumerate(of_learned)} | {
        "judge": of_judge,
        "the shorter one": -answer_lengths(pairs),
    }
    agreements = [
        agreement(values, of_judge, pairs, sampled_answers(one.answers[SFT]))
        for values, one in zip(of_learned, matches, strict=True)
    ]
    return {
        "pairs": dict(zip(("training", "judge", "heldout"), map(len, thirds.preferences), strict=True)),
        "prompts": len(matches[0].answers[SFT].texts),
        **compare_methods([one.answers for one in matches], METHODS["control"]),
        "reward_models": {name: pair_numbers(values) for name, values in models.items()},
        "agreement": {name: [one[name] for one in agreements] for name in agreements[0]},
        "nll": {name: [one.nll[name] for one in matches] for name in ("before", "after")},
    }


if __name__ == "__main__":
    flags.main(Config, main, __doc__)
