"""Happier stories: openings of children's stories, rewarded for sentences with happy words.

The task is for models trained on TinyStories (2305.07759). Prompts differ in adjective, animal and name; held-out
prompts have other animals and other names.
"""

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from experiments.tasks.rewards import happy_sentences, sentences
from grpo_jax.data.prompts import Prompts, pad_prompts
from grpo_jax.data.rows import check_step_size
from grpo_jax.data.text import Encoded, Overlong, check_ids, encode_prompts
from grpo_jax.data.types import rng
from grpo_jax.models.chat import Chat, decode
from grpo_jax.tasks.task import Task, padding_id

OPENING = "Once upon a time, there was a {adjective} {animal} named {name}."
ADJECTIVES = ("little", "big", "small", "brave")
ANIMALS = ("dog", "cat", "bird", "bear", "fish", "frog", "mouse", "duck")
NAMES = ("Tim", "Lily", "Max", "Sue", "Tom", "Anna", "Ben", "Mia")
HELDOUT_ANIMALS = ("rabbit", "fox", "cow", "bug")
HELDOUT_NAMES = ("Sam", "Lucy", "Jack", "Amy")


def stories_task(
    tokenizer: Any,
    eos_ids: tuple[int, ...],
    *,
    vocab_size: int,
    num_prompts: int,
    seed: int,
    max_prompt_tokens: int | None = None,
    overlong: Overlong = "drop",
) -> Task:
    """Returns the task for a tokenizer. Stories are longer than sampled completions, so the task is open-ended.

    Args:
      tokenizer: A tokenizer of transformers.
      eos_ids: The tokens that end a story.
      vocab_size: The vocabulary size of the model.
      num_prompts: The number of different openings in each step (N).
      seed: The random seed of the order of openings.
      max_prompt_tokens, overlong: The limit on prompts, as in `encode_prompts`.
    """

    def encoded(texts: list[str]) -> Encoded:
        return encode_prompts(Chat(tokenizer, eos_ids), texts, max_prompt_tokens=max_prompt_tokens, overlong=overlong)

    openings, heldout = encoded(_openings(ANIMALS, NAMES)), encoded(_openings(HELDOUT_ANIMALS, HELDOUT_NAMES))
    check_step_size("num_prompts", num_prompts, len(openings.numbers))
    width = max(len(ids) for ids in openings.token_ids + heldout.token_ids)
    check_ids(openings.token_ids + heldout.token_ids, vocab_size)
    pad_id = padding_id(tokenizer, vocab_size)

    def padded(chosen: Encoded, numbers: Sequence[int] | np.ndarray) -> Prompts:
        examples = [{"prompt": chosen.texts[i]} for i in numbers]
        return pad_prompts([chosen.token_ids[i] for i in numbers], examples, width=width, pad_id=pad_id)

    def prompts(step: int) -> Prompts:
        return padded(openings, rng(seed, 0, step).choice(len(openings.numbers), num_prompts, replace=False))

    return Task(
        prompts=prompts,
        reward=happy_sentences,
        heldout=padded(heldout, range(len(heldout.numbers))),
        decode=partial(decode, Chat(tokenizer, eos_ids)),
        eos_ids=eos_ids,
        pad_id=pad_id,
        vocab_size=vocab_size,
        open_ended=True,
        notes=tuple(filter(None, (openings.summary, heldout.summary))),
    )


def repeated_share(text: str) -> float:
    """Returns the share of complete sentences that occurred before in the text."""
    results = sentences(text)
    return 1 - len(set(results)) / len(results) if results else 0.0


def _openings(animals: Sequence[str], names: Sequence[str]) -> list[str]:
    parts = product(ADJECTIVES, animals, names)
    return [OPENING.format(adjective=adjective, animal=animal, name=name) for adjective, animal, name in parts]
