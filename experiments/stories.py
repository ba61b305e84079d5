"""Happier stories: GRPO on a real pretrained model, with a KL to its start that keeps the stories readable.

The reward is the share of sentences that say something happy (grpo_jax/tasks/stories.py). The control gets a
coin toss and must stay near the start. One to one and a half minutes on two CPU cores with the 260-thousand-parameter
TinyStories model; expect held-out reward to rise from about 0.2 to 0.8. Group size and KL are this experiment's,
also under other presets, unless you give your own. Left out of the paper: a learned reward model, and a
reference that is refreshed.

  python -m experiments.stories --model DIR
  python -m experiments.stories --model DIR --lora-rank 4 --learning-rate 3e-3
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from experiments.common import PHASES, against_control, keep_description, load_model
from grpo_jax import cli, report, terminal
from grpo_jax.config import GRPOConfig, ModelOptions
from grpo_jax.tasks.stories import repeated_share, stories_task
from grpo_jax.training.grpo import make_programs
from grpo_jax.training.guards import check_length
from grpo_jax.training.parallel import num_devices, replicate
from grpo_jax.training.rollout import to_batch
from grpo_jax.training.run import write_json

CURVES = (("reward", "reward (control's: a coin)"), ("kl", "KL to the start, nats a token"), ("entropy", "entropy"))


@dataclass(frozen=True)
class Config(GRPOConfig, ModelOptions, cli.RunConfig):
    """Options of the run; those of the algorithm come from the preset unless given."""

    steps: int = 30
    num_prompts: int = 8
    group_size: int | None = 8
    max_tokens: int = 96
    kl_coef: float | None = 0.1
    learning_rate: float = 4e-4
    decay: Literal["none", "linear", "cosine"] = "linear"
    microbatches: int = 4
    eval_every: int = 10
    checkpoint_every: int = 10
    run_dir: Path = Path("runs/stories")


class Row(NamedTuple):
    """A row of the table; means over sampled held-out stories."""

    reward: float
    reward_se: float
    greedy: float
    start_nll: float  # nats a token under the start
    kl: float  # nats a token, to the start
    repeated: float  # share of sentences


def main(config: Config) -> None:
    """GRPO and control; a table, two stories before and after, curves, a page, and the checksum of the result."""
    started = time.perf_counter()
    model = load_model(config, seed=config.seed)
    task = stories_task(
        model.pretrained.tokenizer,
        model.pretrained.eos_ids,
        vocab_size=model.pretrained.config.vocab_size,
        num_prompts=config.num_prompts,
        seed=config.seed,
        max_prompt_tokens=config.max_prompt_tokens,
        overlong=config.overlong,
    )
    programs = make_programs(model.policy, task, config)  # refuses bad options before anything is compiled
    start = replicate(model.params, num_devices(config.devices))
    run = cli.open_run(config)
    keep_description(run, model, config)
    check_length(run, task, config.max_tokens, model.pretrained.config.max_position_embeddings)
    stories: list[str] = []

    def examine(params, evaluation, rollouts) -> Row:
        start_logprob = logprob = tokens = 0.0
        repeated = []
        for rollout, count in rollouts:
            sampled = rollout.completions.completion_mask.copy()
            sampled[count:], sampled[:, -1] = False, False  # filling, and the greedy story of a group
            # Both at the sampler's temperature.
            temperature = np.full(rollout.rewards.shape, config.algorithm.temperature, np.float32)
            scores = programs.scorer(start, to_batch(rollout, temperature))
            start_logprob += float(np.asarray(scores.logprobs)[sampled].sum())
            logprob += float(rollout.completions.sampler_logprobs[sampled].sum())
            tokens += sampled.sum()
            repeated += [repeated_share(text) for group in rollout.texts[:count] for text in group[:-1]]
        prompts, completions = rollouts[0][0].prompts, rollouts[0][0].completions
        ids = [*prompts.ids[0][prompts.mask[0]], *completions.completion_ids[0, 0]]
        stories.append(task.decode(ids))
        return Row(
            evaluation.sampled,
            evaluation.sampled_se,
            evaluation.greedy,
            start_nll=-start_logprob / tokens,
            kl=(logprob - start_logprob) / tokens,
            repeated=float(np.mean(repeated)),
        )

    rows, checksum = against_control(model.policy, start, task, config, run, programs, examine)
    for title, story in zip(("before", "after"), stories, strict=False):
        run.console.print(f"\n[bold]{title}:[/] ", end="")
        run.console.print(story, markup=False, highlight=False)
    columns = ("reward", "± s.e.", "greedy", "NLL at start", "KL", "repeated")
    terminal.print_table(run, f"{len(task.heldout.examples)} held-out openings", columns, rows)
    terminal.save_curves(run, CURVES, PHASES)
    run.console.print(f"{run.compilations()} programs compiled, {time.perf_counter() - started:.0f} s")
    run.console.print(f"SHA-256 of the trained parameters: {checksum}", soft_wrap=True)
    write_json(run.path / "results.json", {k: v._asdict() for k, v in rows.items()} | {"params_sha256": checksum})
    run.console.print(f"report: {report.write_report(run.path)}", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    cli.main(Config, main, __doc__)
