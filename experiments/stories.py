"""Happier stories: GRPO on a small pretrained model, with a KL to its start that keeps the stories readable.

The reward is the share of sentences that say something happy (experiments/tasks/rewards.py). The control gets a coin
toss as its reward and must stay near the start. The run takes about a minute on two CPU cores with the
260-thousand-parameter TinyStories model.

Expect the held-out reward to rise from about 0.2 to 0.8. The KL is a setting of this experiment; another --preset
replaces it. Compared with the paper, there is no learned reward model, and the reference is never refreshed.

  python -m experiments.stories --model DIR
  python -m experiments.stories --model DIR --lora-rank 4 --learning-rate 3e-3
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np

from experiments.tasks.stories import repeated_share, stories_task
from grpo_jax import report
from grpo_jax.commands import flags
from grpo_jax.config import GRPOConfig, ModelOptions, recipe
from grpo_jax.devices import devices_of, place
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.report import finish
from grpo_jax.rl.evaluate import Evaluation, Samples
from grpo_jax.rl.guards import length_warning
from grpo_jax.rl.programs import make_programs
from grpo_jax.runs.pretrained import keep_description
from grpo_jax.scoring import score_completion_tokens
from grpo_jax.statistics import cell
from grpo_jax.step import Batch
from grpo_jax.training.phases import train_with_control
from grpo_jax.training.prepare import load_model


@dataclass(frozen=True)
class Config:
    """Options of the run."""

    train: GRPOConfig = recipe(
        steps=30,
        num_prompts=8,
        group_size=8,
        max_tokens=96,
        kl_coef=0.1,
        learning_rate=4e-4,
        decay="linear",
        eval_every=10,
        checkpoint_every=10,
    )
    model: ModelOptions = ModelOptions()
    output: flags.RunConfig = flags.RunConfig(Path("runs/stories"))


def main(config: Config) -> None:
    """Runs GRPO and the control; prints stories, a table and the checksum, and writes the report."""
    started = time.perf_counter()
    model = load_model(config.model, seed=config.train.seed)
    task = stories_task(
        model.tokenizer,
        model.eos_ids,
        vocab_size=model.config.vocab_size,
        num_prompts=config.train.sampling.num_prompts,
        seed=config.train.seed,
        max_prompt_tokens=config.model.max_prompt_tokens,
        overlong=config.model.overlong,
    )
    policy = decoder_policy(model.config)
    programs = make_programs(policy, task, config.train)  # refuses bad options before anything is compiled
    start = place(model.params, devices_of(config.train))
    run = flags.open_run(config)
    keep_description(run, {"policy": model}, config.model, chat=False)
    width = task.heldout.tokens.width + config.train.sampling.max_tokens
    run.warn(length_warning(width, model.config.max_position_embeddings))
    stories: list[str] = []
    describe = make_description(policy, start, config.train)

    def examine(evaluation: Evaluation, calls: Sequence[Samples]) -> dict[str, float]:
        prompts, completions = calls[0].prompts.tokens, calls[0].completions
        stories.append(task.decode([*prompts.ids[0][prompts.mask[0]], *completions.completion_ids[0, 0]]))
        return describe(evaluation, calls)

    rows, checksum, _ = train_with_control({"policy": start}, task, config.train, run, programs, examine)
    for title, story in zip(("before", "after"), stories, strict=False):
        run.console.print(f"\n[bold]{title}:[/] ", end="")
        run.say(story)
    names = ("greedy", "start_nll", "kl", "repeated")  # of greedy, the interval would be too wide for a terminal
    table = {title: [cell(row, "avg"), *(row[name] for name in names)] for title, row in rows.items()}
    title = f"{len(task.heldout.examples)} held-out openings, with 95% intervals"
    report.print_table(run, title, ("reward", "greedy", "NLL at start", "KL", "repeated"), table)
    finish(run, rows, checksum, started)


def make_description(
    policy: Policy, start: Params, config: GRPOConfig
) -> Callable[[Evaluation, Sequence[Samples]], dict[str, float]]:
    """Returns a function of an evaluation and its samples that summarises the sampled stories.

    Its result has nats a token under the start, the KL to the start in nats a token, and the share of repeated
    sentences.

    Args:
      policy: The functions of the model.
      start: The parameters of the start.
      config: Supplies the temperature of the sampled completions.
    """
    score = jax.jit(partial(score_completion_tokens, policy))

    def describe(evaluation: Evaluation, calls: Sequence[Samples]) -> dict[str, float]:
        start_logprob = logprob = tokens = 0.0
        for call in calls:
            ids, mask = call.completions.completion_ids, call.completions.completion_mask
            chosen = call.counted & ~call.greedy
            sampled = mask & chosen[..., None]
            # The sampler's log-probabilities have this temperature.
            temperature = np.full(chosen.shape, config.sampling.temperature, np.float32)
            scores = score(start, Batch(call.prompts.tokens, ids, mask, temperature))
            start_logprob += float(np.asarray(scores.logprobs)[sampled].sum())
            logprob += float(call.completions.sampler_logprobs[sampled].sum())
            tokens += sampled.sum()
        return {
            "start_nll": -start_logprob / tokens,
            "kl": (logprob - start_logprob) / tokens,
            "repeated": float(np.mean([repeated_share(text) for group in evaluation.texts for text in group[:-1]])),
        }

    return describe


if __name__ == "__main__":
    flags.main(Config, main, __doc__)
