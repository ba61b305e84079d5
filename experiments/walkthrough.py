"""One step of GRPO with every number: the DeepSeekMath chapter of Hugging Face's course, with your model.

The settings are the chapter's (https://huggingface.co/learn/llm-course/chapter12/3b): two prompts, four completions
each of one token, top-k 10, temperature 0.7, ε 0.2, β 0.04. Each step names the function that computes it. If the
chapter is wrong, a correction states its claim and the right answer, with the number that shows it.

The numbers are the same each time. A model that cannot do the arithmetic earns nothing and learns nothing. The script
shows this, and then uses another reward, which differs between its completions. It takes twenty seconds on two CPU
cores with the 260-thousand-parameter TinyStories model.

  python -m experiments.walkthrough --model DIR
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from experiments import chapter
from experiments.chapter import signed
from grpo_jax import functional as F
from grpo_jax.commands import flags
from grpo_jax.config import GRPOConfig, ModelOptions, recipe, with_options
from grpo_jax.data.prompts import pad_prompts
from grpo_jax.data.text import check_ids, encode_prompts
from grpo_jax.data.types import Completion, Example
from grpo_jax.devices import ONE_DEVICE
from grpo_jax.errors import UsageError
from grpo_jax.functional import Objective
from grpo_jax.models.chat import Chat
from grpo_jax.models.config import Dtype
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.huggingface import Pretrained
from grpo_jax.models.params.tree import split
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.options import options_of
from grpo_jax.rewards.reward import to_rewards
from grpo_jax.rl.grade import decode_groups, grade_completions, has_spread
from grpo_jax.rl.grpo import grpo_method
from grpo_jax.rl.programs import Programs, make_programs
from grpo_jax.rl.source import completion_numbers, group_temperatures, to_batch
from grpo_jax.rl.types import SAMPLING, Graded, noise_of
from grpo_jax.rl.update import optimizer_step
from grpo_jax.runs.progress import use_cache
from grpo_jax.sampling.sampler import Completions
from grpo_jax.scoring import score_completion_tokens
from grpo_jax.step import Array, Batch
from grpo_jax.tasks.task import Task
from grpo_jax.training.prepare import load_model

CONSOLE = Console(highlight=False)


@dataclass(frozen=True)
class Config:
    """The chapter's settings."""

    model: str = ""
    """Folder of a Hugging Face model, or its id on the hub."""
    dtype: Dtype = "float32"
    """Dtype of activations and matrix products."""
    prompts: tuple[str, ...] = ("Solve y = 2x + 1 for x = 2, y = ", "Solve y = 2x + 1 for x = 4, y = ")
    """Prompts of the batch."""
    answers: tuple[str, ...] = ("5", "9")
    """The right answers, one a prompt."""
    reward: Literal["auto", "answer", "vowels", "even"] = "auto"
    """answer: 1 where it is right. vowels: their share of the letters. even: 1 where the first token's id is even.
    auto: the first of these in which completions of a prompt differ."""
    group_size: int = 4
    """Completions of each prompt (G)."""
    max_tokens: int = 1
    """Longest completion, in tokens (T)."""
    top_k: int = 10
    """Sample among the k likeliest tokens; 0 for all."""
    temperature: float = 0.7
    """Temperature of sampling."""
    epsilon_low: float = 0.2
    """How far below 1 the ratio may go."""
    epsilon_high: float = 0.2
    """How far above 1 the ratio may go."""
    kl_coef: float = 0.04
    """Weight of the KL divergence from the start (β); 0 for none."""
    learning_rate: float = 1e-5
    """Learning rate of AdamW, for one visible step; the chapter names none."""
    seed: int = 0
    """Seed of sampling."""
    compilation_cache: bool = True
    """Keep compiled programs in the user's cache folder, so that the next start reads them."""


class Terms(NamedTuple):
    """The parts of the loss, `[N, G, T]` each, and the loss."""

    logprobs: Array
    ratio: Array
    term: Array  # −min(ρA, clip(ρ)A)
    slope: Array  # its derivative by log π
    kl: Array  # k3
    loss: Array


class Walk(NamedTuple):
    """The numbers of a walk."""

    reward: str  # name of the rule
    rewards: np.ndarray  # [N, G]
    advantages: np.ndarray  # [N, G]
    before: Terms
    after: Terms
    kl: np.ndarray  # [N, G, T], KL(π ‖ π_ref) after the update, exact
    metrics: dict[str, float]  # of the optimizer step
    moved: np.ndarray  # [N · G], -1, 0 or 1: where the probability of each completion went


def answer(examples: Sequence[Example], completions: Sequence[Completion]) -> list[float]:
    """1 where a completion begins with the answer, and its number ends there."""
    pairs = zip(examples, completions, strict=True)
    return [bool(re.match(rf"\s*{re.escape(example['answer'])}(\.0+)?(?!\.?\d)", text)) for example, text in pairs]


def vowels(examples: Sequence[Example], completions: Sequence[Completion]) -> list[float]:
    """The share of vowels among the letters."""
    words = [[letter for letter in text.lower() if letter.isalpha()] for text in completions]
    return [sum(letter in "aeiou" for letter in word) / max(len(word), 1) for word in words]


def even(examples: Sequence[Example], completions: Sequence[Completion]) -> list[float]:
    """1 where the first token's id is even: it means nothing, and is learned like any other."""
    return [bool(completion.ids) and completion.ids[0] % 2 == 0 for completion in completions]


RULES = {"answer": answer, "vowels": vowels, "even": even}


def main(config: Config) -> Walk:
    """Takes one step of GRPO, and prints its numbers."""
    if len(config.answers) != len(config.prompts):
        raise UsageError(f"there are {len(config.prompts)} prompts and {len(config.answers)} answers: give one each")
    pretrained = load_model(ModelOptions(model=config.model, dtype=config.dtype), seed=config.seed)
    policy, params = decoder_policy(pretrained.config), pretrained.params
    task = task_of(config, pretrained)
    same = {name: value for name, value in vars(config).items() if name in options_of(recipe())}
    options = recipe(num_prompts=len(task.heldout.examples), **same)
    algorithm = options.loss.objective
    programs = make_programs(policy, task, options)  # what the loop calls in turn
    score = jax.jit(partial(score_completion_tokens, policy))
    say(f"{chapter.TITLE}, with numbers of a model. The chapter is at {chapter.ADDRESS}")

    heading("1. A group of completions for each prompt", "sampling.sampler.sample_groups")
    numbers, temperature = completion_numbers(options.sampling), group_temperatures(options.sampling)
    noise = noise_of(config.seed, SAMPLING, 0)
    sampled = programs.sampler.complete(params, task.heldout, numbers, temperature, noise)
    show_completions(task, sampled)
    correct(*chapter.about_sampling(pretrained.tokenizer, config.prompts[0]))

    heading("2. A reward for each completion", "rewards.reward.Rewards")
    rule, graded, advantages = grade_by_rules(config, task, sampled, algorithm)

    heading("3. Advantages: (reward − mean) / (standard deviation + ε)", "functional.group_advantages")
    show_advantages(graded.rewards, advantages)

    heading("4. Log-probabilities of the sampled tokens", "step.score_completion_tokens")
    batch = to_batch(task.heldout.tokens, temperature, sampled)
    start = np.asarray(score(params, batch).logprobs)
    plain = np.asarray(score(params, batch._replace(temperature=np.ones_like(temperature))).logprobs)
    # The initial policy is both the sampler and the reference.
    batch = batch._replace(advantages=advantages, old_logprobs=start, ref_logprobs=start)
    mask = batch.completion_mask
    tokens = [repr(task.decode([token])) for token in batch.completion_ids[mask].tolist()]
    show_logprobs(config, sampled, tokens, start, plain)

    heading("5. Ratio and clip, before the update", "functional.token_log_ratio, functional.clipped_surrogate")
    before = terms(start, batch, algorithm)
    show_start(config, tokens, before, mask)

    heading("7. One optimizer step", "rl.update.optimizer_step")
    updated, metrics = updates(policy, programs, options, params, batch)

    heading("8. The same completions after the update", "step.score_completion_tokens")
    after = terms(np.asarray(score(updated, batch).logprobs), batch, algorithm)
    show_terms(tokens, after, mask)
    say(f"loss of a second pass over this rollout: {after.loss:.4f}")
    texts = decode_groups(sampled, task)
    expected, moved = show_moves(texts, advantages, mask, before, after)
    kl = np.asarray(exact_kl(policy, updated, params, batch))
    if metrics["grad_norm"] > 0:  # with nothing learned, there are no numbers that show it
        as_expected = (moved == expected)[expected != 0]
        kl_now = np.mean(exact_kl(policy, updated, updated, batch), where=mask)
        show_changes(config, batch, after, as_expected, kl, kl_now)
    return Walk(rule, graded.rewards, advantages, before, after, kl, metrics, moved)


def grade_by_rules(
    config: Config, task: Task, sampled: Completions, algorithm: Objective
) -> tuple[str, Graded, np.ndarray]:
    """Returns the first rule whose rewards differ within a prompt, the graded completions, and the advantages."""
    for name in list(RULES) if config.reward == "auto" else [config.reward]:
        graded = grade_completions(task.heldout, sampled, task, to_rewards(RULES[name]))
        lengths = sampled.completion_mask.sum(-1)
        advantages = np.asarray(algorithm.advantages(graded.rewards, lengths, where=graded.applicable))
        say(f"{name}: {RULES[name].__doc__}")
        say("  " + " | ".join(" ".join(f"{reward:.2f}" for reward in group) for group in graded.rewards))
        if has_spread(graded).any():
            break
        say(f"  Equal within each group, so that all advantages are {advantages.max():.4f}: nothing to learn from.")
    else:
        other = "another --seed or a larger --group-size" if config.reward == "auto" else "--reward auto"
        say(f"What follows is zeros: take {other}, so that completions differ in their rewards.")
    return name, graded, advantages


def updates(
    policy: Policy, programs: Programs, options: GRPOConfig, params: Params, batch: Batch
) -> tuple[Params, dict[str, float]]:
    """Takes a step on the batch, and returns parameters and metrics. Also prints steps on other advantages."""
    # While the policy equals the reference, the KL's gradient is only rounding, which AdamW would scale up.
    without_kl = grpo_method(policy, with_options(options, kl_coef=0.0))

    trained, frozen = split({"policy": params})
    step = jax.jit(partial(optimizer_step, without_kl, options, frozen, ONE_DEVICE))

    def update(advantages: np.ndarray) -> tuple[Params, dict[str, float]]:
        state, metrics = step(programs.initial_state(trained), batch._replace(advantages=advantages))
        moves = jax.tree.map(lambda new, old: np.abs(np.asarray(new) - old).max(), state.params, trained)
        metrics = jax.tree.map(float, metrics) | {"change": float(max(jax.tree.leaves(moves)))}
        say(f"  gradient norm {metrics['grad_norm']:.4f}, largest change of a weight {metrics['change']:.2e}")
        return state.params["policy"], metrics

    updated, metrics = update(batch.advantages)
    say("had the rewards of each group been equal:")
    update(np.zeros_like(batch.advantages))
    say("had the advantages been twice as large:")
    _, twice = update(2 * batch.advantages)
    if metrics["grad_norm"] > 0:
        times = [twice[name] / metrics[name] for name in ("grad_norm", "change")]
        correct(
            'The chapter says that "updates to the policy are proportional to the advantage": the gradient is. The '
            f"limit on its norm, and AdamW, divide by it: {times[0]:.2f} times the norm, {times[1]:.2f} times the "
            "change."
        )
    return updated, metrics


def task_of(config: Config, pretrained: Pretrained) -> Task:
    """Makes a task that has all prompts in every step."""
    tokenizer, eos_ids = pretrained.tokenizer, pretrained.eos_ids
    encoded = encode_prompts(Chat(tokenizer, eos_ids), config.prompts)
    examples = [{"prompt": config.prompts[i], "answer": config.answers[i]} for i in encoded.numbers]
    prompts = pad_prompts(encoded.token_ids, examples, width=max(map(len, encoded.token_ids)), pad_id=0)
    vocab_size = pretrained.config.vocab_size
    check_ids(encoded.token_ids, vocab_size)
    return Task(lambda step: prompts, answer, prompts, tokenizer.decode, eos_ids, 0, vocab_size, open_ended=True)


@partial(jax.jit, static_argnums=2)
def _terms(logprobs: jax.Array, batch: Batch, algorithm: Objective) -> Terms:
    arrays = batch.old_logprobs, batch.advantages, batch.completion_mask

    def term(logprobs):
        return algorithm.term(logprobs, *arrays, **algorithm.constants)

    weights = algorithm.aggregation(batch.completion_mask)
    loss, _ = algorithm.loss(logprobs, *arrays, ref_logprobs=batch.ref_logprobs, weights=weights)
    ratio = jnp.exp(F.token_log_ratio(logprobs, batch.old_logprobs, batch.completion_mask))
    slope = jax.grad(lambda logprobs: term(logprobs).sum())(logprobs)
    return Terms(logprobs, ratio, term(logprobs), slope, F.kl_k3(logprobs, batch.ref_logprobs), loss)


def terms(logprobs: np.ndarray, batch: Batch, algorithm: Objective) -> Terms:
    """Computes the loss of a batch at these log-probabilities, and its parts."""
    return jax.tree.map(np.asarray, _terms(logprobs, batch, algorithm))


@partial(jax.jit, static_argnums=0)
def exact_kl(policy: Policy, params: Params, reference: Params, batch: Batch) -> jax.Array:
    """KL(π ‖ π_ref) over the whole vocabulary, at each sampled token of a batch, `[N, G, T]`."""

    def logits(params: Params) -> jax.Array:
        hidden = policy.hidden(params, batch.prompt, batch.completion_ids)
        unembedding, _ = policy.head(params)
        products = jnp.einsum("ngtd,vd->ngtv", hidden, unembedding, preferred_element_type=jnp.float32)
        return products / batch.temperature[..., None, None]

    return F.kl_full(logits(params), logits(reference))


# ---- the page


def show_completions(task: Task, sampled: Completions) -> None:
    """Prints the samples, and the right answers."""
    pairs = zip(task.heldout.examples, decode_groups(sampled, task), strict=True)
    for number, (example, texts) in enumerate(pairs, 1):
        say(f"prompt {number}: {example['prompt']!r}, right: {example['answer']}")
        say(f"  sampled: {', '.join(repr(str(text)) for text in texts)}")


def show_advantages(rewards: np.ndarray, advantages: np.ndarray) -> None:
    """Prints the advantages of each group, with the rewards that they are computed from."""
    for number, (of_group, group) in enumerate(zip(rewards, advantages, strict=True), 1):
        say(f"prompt {number}: mean {of_group.mean():.4f}, standard deviation (n − 1) {of_group.std(ddof=1):.4f}")
        say(f"  advantages {signed(group)}, sum {abs(group.sum()):.4f}")
    correct(*chapter.about_advantages())


def show_logprobs(
    config: Config, sampled: Completions, tokens: list[str], start: np.ndarray, plain: np.ndarray
) -> None:
    """Prints log-probabilities of the policy, `start`, those among the top k, and those at temperature 1, `plain`."""
    mask = sampled.completion_mask
    drawn = sampled.sampler_logprobs if sampled.processed_logprobs is None else sampled.processed_logprobs
    columns = {"log π": start, "π": np.exp(start), "π among top k": np.exp(drawn), "π, temperature 1": np.exp(plain)}
    table({"token": tokens} | {name: values[mask] for name, values in columns.items()})
    off, selected = np.exp(plain - start)[mask], np.exp(start - drawn)[mask]
    correct(
        "The chapter samples with temperature=0.7 and top_k=10, and takes log-probabilities without either. A "
        f"temperature of {config.temperature:g} alone takes the ratio of one policy, scored so and sampled, from 1 to "
        f"between {off.min():.3f} and {off.max():.3f}. Here the temperature is part of π, on both sides. Top-k is not: "
        "π is a softmax over all tokens, of which those sampled among hold "
        f"{selected.min():.4f} to {selected.max():.4f}.",
        *chapter.about_logprobs(),
    )


def show_start(config: Config, tokens: list[str], before: Terms, mask: np.ndarray) -> None:
    """Prints the loss before the update, whose ratios are all 1, and the two cases of the clip."""
    show_terms(tokens, before, mask)
    say("π is still π_old: each ratio is 1, and nothing is clipped. The loss falls with log π where A > 0.")
    say("\nThe two cases of the chapter, with both signs of A (the slope is by log π):")
    table(chapter.cases())
    correct(*chapter.about_clip())
    heading("6. KL divergence from the reference, and the loss", "functional.kl_k3, functional.grpo_loss")
    say(f"k3 = exp(−x) − 1 + x, x = log π − log π_ref: {before.kl[mask].max():.4f} at most, for π is still π_ref.")
    say(f"loss = mean of (term + {config.kl_coef:g} k3) = {abs(before.loss):.4f}: advantages of a group add up to 0.")
    correct(*chapter.about_kl())


def show_moves(
    texts: list[list[Completion]], advantages: np.ndarray, mask: np.ndarray, before: Terms, after: Terms
) -> tuple[np.ndarray, np.ndarray]:
    """Shows where the probability of each completion was to go and where it went: -1, 0 or 1, `[N · G]` each."""
    old, new = (np.exp(np.where(mask, of.logprobs, 0).sum(-1)).ravel() for of in (before, after))
    expected, moved = np.sign(advantages.ravel()).astype(int), np.sign(new - old).astype(int)
    completions = [repr(str(text)) for group in texts for text in group]
    words = np.array(["down", "", "up"])
    columns = {"completion": completions, "A": advantages.ravel(), "π before": old, "π after": new}
    table(columns | {"expected": words[expected + 1], "moved": words[moved + 1]})
    return expected, moved


def show_changes(
    config: Config, batch: Batch, after: Terms, as_expected: np.ndarray, kl: np.ndarray, kl_now: float
) -> None:
    """Compares the chapter's words on the update with the numbers of this one."""
    mask, side = batch.completion_mask, batch.advantages[..., None]
    low, high = 1 - config.epsilon_low, 1 + config.epsilon_high
    ratio, above, below = after.ratio[mask], (after.ratio > high) & mask, (after.ratio < low) & mask
    stopped = (above & (side > 0)) | (below & (side < 0))
    pull = f"β = {config.kl_coef:g} pulls back to it" if config.kl_coef else "with β = 0 nothing pulls back to it"
    correct(
        'The chapter says that for A > 0 the "generation probability will be increased": that is likely, not '
        f"certain, for completions share all weights. Here {as_expected.sum()} of {as_expected.size} moved as "
        "expected.",
        'The chapter says that the clip limits "how much the probability ratio can increase": in a step from 1 it '
        f"has no say, and {(above | below).sum()} of {ratio.size} ratios are now outside {low:g} to {high:g}, the "
        f"largest {ratio.max():.3g}. In the next pass it takes the slope of those outside on the side that A "
        f"pushes to (above with A > 0, below with A < 0), {stopped.sum()} here; on the other side they keep it.",
        'The chapter says that π_ref is "the pre-update model\'s output, per_token_logps": that is π_old. In the '
        f"next rollout π_old is the policy of now, and the KL to it {kl_now:.4f}. π_ref stays the start: "
        f"KL(π ‖ π_ref) over the whole vocabulary is {kl[mask].mean():.4f}, the mean of the places above, and "
        f"{pull}. The mean of the k3 above, {after.kl[mask].mean():.3g}, is another number: k3 estimates this KL "
        "from tokens that π samples, and π_old sampled these.",
    )


def heading(title: str, functions: str) -> None:
    """Prints the numbers of a step, with the functions that compute them."""
    CONSOLE.print(f"\n[bold]{title}[/]\n[dim]grpo_jax: {functions}[/]")


def say(text: str) -> None:
    """Prints a text without markup."""
    CONSOLE.print(text, markup=False)


def correct(*corrections: str) -> None:
    """Prints the errors of the chapter."""
    for text in corrections:
        CONSOLE.print(Padding(f"[yellow]Correction:[/] {escape(text)}", (0, 0, 0, 2), expand=False))


def show_terms(tokens: list[str], terms: Terms, mask: np.ndarray) -> None:
    """Prints a row for each token."""
    columns = {
        "ratio": terms.ratio,
        "−min(ρA, clip(ρ)A)": terms.term,
        "its slope by log π": terms.slope,
        "k3": terms.kl,
    }
    table({"token": tokens} | {name: np.asarray(values)[mask] for name, values in columns.items()})


def table(columns: Mapping[str, Any]) -> None:
    """Prints columns of texts and numbers."""
    page = Table(box=box.SIMPLE_HEAD)
    for number, name in enumerate(columns):
        page.add_column(name, justify="right" if number else "left")
    for row in zip(*columns.values(), strict=True):
        page.add_row(*(escape(x) if isinstance(x, str) else f"{round(float(x), 4) + 0.0:.4f}" for x in row))
    CONSOLE.print(page)


if __name__ == "__main__":
    config = flags.read_flags(Config, prog="python -m experiments.walkthrough", description=__doc__)
    if config.compilation_cache:
        use_cache()
    with flags.refusing():
        main(config)
