"""Words of letters, a task without a download in which any gold reward can be computed exactly.

A prompt is three different letters and a colon ("cab:"); a completion is a word of up to 15 letters, and EOS. 256 of
the 15,600 prompts are held out.
"""

import string
from collections.abc import Sequence
from itertools import permutations

import numpy as np

from experiments.tasks.characters import Characters, characters_task
from grpo_jax.data.types import Example, rng
from grpo_jax.rewards.reward import RewardLike
from grpo_jax.tasks.task import Task

LETTERS = string.ascii_lowercase
TEXT = Characters(LETTERS + ":")
PROMPT_TOKENS = len("cab:")
MAX_TOKENS = 16  # 15 letters, then EOS
NUM_HELDOUT = 256

_PROMPTS = ["".join(letters) for letters in permutations(LETTERS, 3)]
# The split is the same for every seed of a run.
_ORDER = rng(261).permutation(len(_PROMPTS))
_TRAIN, _HELDOUT = _ORDER[NUM_HELDOUT:], _ORDER[:NUM_HELDOUT]


def letters_task(reward: RewardLike, *, num_prompts: int, seed: int) -> Task:
    """Returns the task.

    Args:
      reward: One reward function, or several with weights. Examples have "prompt" and "letters", its three letters.
      num_prompts: The number of different prompts in each step (N).
      seed: The random seed of the order of prompts.
    """
    split = _TRAIN, _HELDOUT
    return characters_task(TEXT, examples_of, split, reward=reward, num_prompts=num_prompts, seed=seed)


def examples_of(numbers: Sequence[int] | np.ndarray) -> list[Example]:
    """Returns the examples with "prompt" and "letters" of the prompts with these numbers, from 0 to 15,599."""
    return [{"prompt": f"{_PROMPTS[number]}:", "letters": _PROMPTS[number]} for number in numbers]
