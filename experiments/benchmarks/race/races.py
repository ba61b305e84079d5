"""The races and their entrants, as data."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from experiments.benchmarks.peers.peer_common import BETA, CLIP, MAX_GRAD_NORM
from experiments.real import EXAMPLES, sums
from experiments.tasks.arithmetic import arithmetic_task
from experiments.tasks.rewards import first_number, hash_number
from experiments.tasks.stories import stories_task
from grpo_jax.config import GRPOConfig, recipe
from grpo_jax.models.huggingface import Pretrained
from grpo_jax.tasks.problems import gsm8k_rows, problem_task
from grpo_jax.tasks.task import Task, text_task


class Race(NamedTuple):
    """The work of a race, which is the same in all libraries."""

    reward: str  # a function of `experiments.tasks.rewards`
    num_prompts: int
    max_tokens: int
    steps: int
    save_every: int  # steps between snapshots
    group_size: int = 8
    learning_rate: float = 4e-4


RACES = {
    "words": Race("happy_sentences", num_prompts=8, max_tokens=64, steps=100, save_every=5),
    "arithmetic": Race("exact_answer", num_prompts=32, max_tokens=4, steps=200, save_every=10),
    "real": Race("first_number", num_prompts=8, max_tokens=5, steps=40, save_every=20, learning_rate=1e-6),
    "gsm8k": Race("hash_number", num_prompts=32, max_tokens=256, steps=8, save_every=8, learning_rate=3e-6),
}


class Entrant(NamedTuple):
    """A library with its settings."""

    library: str  # own, trl or tunix: the runner
    settings: Mapping[str, Any]  # options of the library that change at most the rounding of what it computes
    cache: str = ""  # the name of the folder of compiled programs that entrants share; empty: none are kept
    is_cold: bool = False  # the folder of compiled programs is emptied before the process starts


# "defaults" are those of a library's documentation. TRL then takes 8 completions at a time and recomputes activations,
# Tunix takes all completions at once. "bfloat16" is TRL's mixed precision for a whole batch. JAX keeps no compiled
# programs by default. This library's commands do. What TRL's documentation names to speed up sampling and losses,
# vLLM and Liger's kernels, needs a GPU.
_TRL_PIECE = {"per_device_train_batch_size": 8, "gradient_checkpointing": True}
ENTRANTS = {
    "grpo_jax, cold cache": Entrant("own", {}, cache="own", is_cold=True),
    "grpo_jax, warm cache": Entrant("own", {}, cache="own"),
    "TRL, defaults": Entrant("trl", _TRL_PIECE),
    "TRL, whole batch": Entrant("trl", {"gradient_checkpointing": False}),
    "TRL, bfloat16": Entrant("trl", {"gradient_checkpointing": False, "bf16": True}),
    "TRL, bfloat16, eighths": Entrant(
        "trl", {"gradient_checkpointing": False, "bf16": True, "per_device_train_batch_size": 0.125}
    ),
    "Tunix, defaults": Entrant("tunix", {}),
    "Tunix, quarters, cold cache": Entrant("tunix", {"train_micro_batch_size": 0.25}, cache="tunix", is_cold=True),
    "Tunix, quarters, warm cache": Entrant("tunix", {"train_micro_batch_size": 0.25}, cache="tunix"),
}

# Differences that no option of the libraries removes, and what the runners changed to avoid more.
DIFFERENCES = (
    "Random numbers differ. Without a seed, Tunix repeats the same in every step, so its runner sets a new seed each.",
    "Tunix's Llama always has rope_theta 1,000,000, so its runner sets the model's.",
    "TRL divides advantages by the group's deviation + 1e-4; grpo_jax and Tunix add 1e-6.",
    "Tunix cuts the token that ends a completion off, and does not train on it.",
    "Tunix treats sampled padding tokens as padding. These models hardly ever sample one.",
)


def race_config(race: Race, *, steps: int, seed: int, **options: Any) -> GRPOConfig:
    """Returns the configuration of this library for a race.

    Args:
      race: The race.
      steps: The number of steps.
      seed: The random seed.
      options: Further options.
    """
    return recipe(
        steps=steps,
        seed=seed,
        num_prompts=race.num_prompts,
        group_size=race.group_size,
        max_tokens=race.max_tokens,
        learning_rate=race.learning_rate,
        kl_coef=BETA,
        epsilon_low=CLIP,
        epsilon_high=CLIP,
        max_grad_norm=MAX_GRAD_NORM,
        checkpoint_every=0,
        eval_every=1,
        **options,
    )


def race_task(name: str, pretrained: Pretrained, seed: int, data: str = "") -> Task:
    """Returns the task of a race for a model. The race gsm8k reads its rows from the folder `data`."""
    num_prompts = RACES[name].num_prompts
    if name == "arithmetic":
        return arithmetic_task(num_prompts=num_prompts, seed=seed)
    tokenizer, eos_ids, vocab_size = pretrained.tokenizer, pretrained.eos_ids, pretrained.config.vocab_size
    if name == "words":
        return stories_task(tokenizer, eos_ids, vocab_size=vocab_size, num_prompts=num_prompts, seed=seed)
    if name == "gsm8k":
        problems, tests = (gsm8k_rows(data, split=split) for split in ("train", "test"))
        return problem_task(
            "gsm8k",
            tokenizer,
            eos_ids,
            problems,
            vocab_size=vocab_size,
            num_prompts=num_prompts,
            seed=seed,
            reward=hash_number,
            heldout_rows=tests,
            num_heldout=200,
        )
    rows, heldout = sums()
    return text_task(
        tokenizer,
        eos_ids,
        rows,
        vocab_size=vocab_size,
        num_prompts=num_prompts,
        seed=seed,
        reward=first_number,
        template=EXAMPLES + "{question}",
        heldout_rows=heldout,
    )
