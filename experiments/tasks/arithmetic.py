"""Two-digit addition, which needs no download and has an exact reward.

A prompt is "07+58="; the answer is written with its last digit first ("56"), the order in which addition is done, and
ends with EOS. There are 10,000 pairs, of which 1,000 are held out.
"""

from collections.abc import Sequence

import numpy as np

from experiments.tasks.characters import Characters, characters_task, encode_examples
from experiments.tasks.rewards import exact_answer
from grpo_jax.data.prompts import Prompts
from grpo_jax.data.types import Example, rng
from grpo_jax.tasks.task import Task

TEXT = Characters("0123456789+=")
PAD_ID, EOS_ID, VOCAB_SIZE = TEXT.pad_id, TEXT.eos_id, TEXT.vocab_size
MAX_TOKENS = len("891") + 1  # 99 + 99 = 198, then EOS
NUM_HELDOUT = 1000

_PAIRS = [(a, b) for a in range(100) for b in range(100)]
# The split is the same for every seed of a run.
_ORDER = rng(260).permutation(len(_PAIRS))
_TRAIN, _HELDOUT = _ORDER[NUM_HELDOUT:], _ORDER[:NUM_HELDOUT]


def arithmetic_task(*, num_prompts: int, seed: int) -> Task:
    """Returns the task.

    Args:
      num_prompts: The number of different prompts in each step (N).
      seed: The random seed of the order of prompts.
    """
    return characters_task(
        TEXT,
        examples_of,
        (_TRAIN, _HELDOUT),
        reward=exact_answer,
        num_prompts=num_prompts,
        seed=seed,
        answer=lambda example, completion: str(completion),
    )


def mixed_answers(*, batch_size: int, seed: int, step: int, wrong_share: float = 0.7) -> tuple[Prompts, np.ndarray]:
    """Draws training pairs whose labels are too large by one with probability `wrong_share`.

    A model that fits the labels gives the right answer in 1 − `wrong_share` of its samples, and a wrong answer
    greedily. Reinforcement learning can bring out this ability.

    Args:
      batch_size: The number of examples (N).
      seed: The random seed of pairs and labels.
      step: The step, which also seeds the draw.
      wrong_share: The probability of a wrong label.

    Returns:
      The prompts, and the labels' ids with EOS, int32 `[N, T]`, padded on the right.
    """
    generator = rng(seed, 1, step)
    indices = generator.choice(_TRAIN, batch_size)
    wrong = generator.random(batch_size) < wrong_share
    labels = np.full((batch_size, MAX_TOKENS), PAD_ID, np.int32)
    for row, (index, offset) in enumerate(zip(indices, wrong, strict=True)):
        text = _answer(sum(_PAIRS[index]) + int(offset))
        labels[row, : len(text) + 1] = [*TEXT.encode(text), EOS_ID]
    return encode_pairs(indices), labels


def encode_pairs(numbers: Sequence[int] | np.ndarray) -> Prompts:
    """Returns the prompts of the pairs with these numbers, from 0 to 9,999."""
    return encode_examples(TEXT, examples_of(numbers))


def examples_of(numbers: Sequence[int] | np.ndarray) -> list[Example]:
    """Returns the examples with "prompt" and "answer" of the pairs with these numbers."""
    pairs = [_PAIRS[number] for number in numbers]
    return [{"prompt": f"{a:02}+{b:02}=", "answer": _answer(a + b)} for a, b in pairs]


def _answer(total: int) -> str:
    return str(total)[::-1]
