"""What a task is: prompts as a function of the step, and a reward on text."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from grpo_jax.data.types import Answer, Example, Prompts, Reward, Rewards, rng


class Task(NamedTuple):
    """Prompts, reward, and the text around the tokens."""

    # step -> prompts: a pure function, so that a resumed run sees what it would have seen
    prompts: Callable[[int], Prompts]
    reward: Reward | Rewards
    heldout: Prompts  # never among `prompts`, unless a note says so
    decode: Callable[[Sequence[int]], str]  # completion ids, without what ended it -> text
    eos_ids: tuple[int, ...]
    pad_id: int
    vocab_size: int
    open_ended: bool = False  # completions are meant to be cut at max_tokens
    notes: tuple[str, ...] = ()  # what a user should know of the prompts, such as how many were dropped
    answer: Answer | None = None  # what completions vote on (maj@n), where it makes sense


def padding_id(tokenizer: Any, vocab_size: int) -> int:
    """The tokenizer's padding, or 0 where the model has no such token. Masks decide what is padding, so any id does."""
    own = tokenizer.pad_token_id
    return own if own is not None and own < vocab_size else 0


def random_reward(seed: int) -> Reward:
    """A fair coin for each completion, whatever it says: the control that must not learn.

    A pure function of (seed, prompts, completions), like every reward, so that a resumed
    run draws the same.
    """

    def reward(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        text = "\x1f".join([*(example["prompt"] for example in examples), *completions])
        return rng(seed, zlib.crc32(text.encode())).integers(0, 2, len(completions)).astype(float).tolist()

    return reward
