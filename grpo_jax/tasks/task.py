"""Tasks: prompts as a function of the step, and a reward on text."""

import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_jax.data import digests
from grpo_jax.data.types import Answer, Example, Prompts, Reward, Rewards, rng
from grpo_jax.rewards.reward import sources

if TYPE_CHECKING:  # a task without an environment does not load it
    from grpo_jax.data.episodes import Environment


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
    environment: "Environment | None" = None  # what answers each turn; None: a completion is its only turn
    # Widths that prompts are padded to: of pieces, and of the longest prompts of steps. See `data.types.choose_widths`.
    # Empty: all prompts have about the same length
    prompt_widths: tuple[int, ...] = ()
    batch_widths: tuple[int, ...] = ()
    rows: str = ""  # digest of all that is trained on; empty where prompts are made of the seed


def inputs_of(task: Task) -> dict[str, str]:
    """Returns what a run of the task depends on, in words, with digests."""
    named = {
        "held-out prompts": digests.of_prompts(task.heldout),
        "prompts of the first step": digests.of_prompts(task.prompts(0)),
        "training rows": task.rows,
    }
    if task.environment and task.environment.source:
        named |= {"source of the environment": task.environment.source}
    return named | {f"source of reward {name}": digest for name, digest in sources(task.reward).items()}


def padding_id(tokenizer: Any, vocab_size: int) -> int:
    """The tokenizer's padding, or 0 where the model has no such token. Masks decide what is padding, so any id does."""
    padding = tokenizer.pad_token_id
    return padding if padding is not None and padding < vocab_size else 0


def random_reward(seed: int) -> Reward:
    """A fair coin for each completion, whatever it says: the control that must not learn.

    A pure function of (seed, prompts, completions), like every reward, so that a resumed
    run draws the same.
    """

    def reward(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        text = "\x1f".join([*(example["prompt"] for example in examples), *completions])
        return rng(seed, zlib.crc32(text.encode())).integers(0, 2, len(completions)).astype(float).tolist()

    return reward
