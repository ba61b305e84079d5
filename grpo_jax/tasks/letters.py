"""Words whose worth is known exactly: any gold reward can be written down, and nothing is downloaded.

A prompt is three different letters and a colon ("cab:"); a completion is a word of up to 15 letters, and EOS. 256 of
the 15,600 prompts are held out.
"""

import string
from collections.abc import Sequence
from itertools import permutations

import numpy as np

from grpo_jax.data.types import Prompts, Reward, Rewards, check_num_prompts, pad_prompts, rng
from grpo_jax.tasks.characters import Characters
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


def letters_task(reward: Reward | Rewards, *, num_prompts: int, seed: int) -> Task:
    """The task, with `num_prompts` different prompts a step.

    Args:
      reward: of words; a row has the columns "prompt" and "letters", the three of the prompt.
      num_prompts: N.
      seed: of the order of prompts.

    Returns:
      The task.
    """
    check_num_prompts(num_prompts, len(_TRAIN))

    def prompts(step: int) -> Prompts:
        return encode_prompts(rng(seed, 0, step).choice(_TRAIN, num_prompts, replace=False))

    return Task(
        prompts=prompts,
        reward=reward,
        heldout=encode_prompts(_HELDOUT),
        decode=TEXT.decode,
        eos_ids=(TEXT.eos_id,),
        pad_id=TEXT.pad_id,
        vocab_size=TEXT.vocab_size,
    )


def encode_prompts(indices: Sequence[int] | np.ndarray) -> Prompts:
    """The prompts with these numbers, from 0 to 15,599."""
    examples = [{"prompt": f"{_PROMPTS[index]}:", "letters": _PROMPTS[index]} for index in indices]
    tokens = [TEXT.encode(example["prompt"]) for example in examples]
    return pad_prompts(tokens, examples, width=PROMPT_TOKENS, pad_id=TEXT.pad_id)
