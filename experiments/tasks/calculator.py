"""Sums and products: when is it worth calling a calculator?

A prompt is "03+04=" or "37*58=". The policy writes the answer and EOS. Or it calls the calculator with "[37*58]" and
EOS, reads the result "2146;", and then answers. A small model memorises the hundred sums of two digits, but almost no
product of two-digit numbers. A right answer earns 1, and a call costs `CALL_COST`.
"""

import re
from collections.abc import Sequence

import numpy as np

from experiments.tasks.characters import Characters, characters_task, encode_examples
from grpo_jax.data.episodes import Key, Reply, Transcript, environment, episode_return
from grpo_jax.data.prompts import Prompts
from grpo_jax.data.types import Completion, Example, rng
from grpo_jax.tasks.task import Task

TEXT = Characters("0123456789+*=[];")
PAD_ID, EOS_ID, VOCAB_SIZE = TEXT.pad_id, TEXT.eos_id, TEXT.vocab_size
MAX_TURNS = 2
ENVIRONMENT_TOKENS = len("9801;")
MAX_TOKENS = len("[99*99]") + 1 + len("9801") + 1  # a call and an answer, each with EOS
CALL_COST = 0.2
NUM_HELDOUT = 500

_PRODUCTS = [(a, "*", b) for a in range(10, 100) for b in range(10, 100)]
_SUMS = [(a, "+", b) for a in range(10) for b in range(10)] * 81  # as many as products
_TASKS = _SUMS + _PRODUCTS
# The split is the same for every seed of a run. A product is on one side only; each sum is on both sides.
_ORDER = rng(262).permutation(len(_TASKS))
_TRAIN, _HELDOUT = _ORDER[NUM_HELDOUT:], _ORDER[:NUM_HELDOUT]


def calculator_task(*, num_prompts: int, seed: int) -> Task:
    """Returns the task. On average, half of the prompts are products.

    Args:
      num_prompts: The number of prompts in each step (N).
      seed: The random seed of the order of prompts.
    """
    task = characters_task(
        TEXT, examples_of, (_TRAIN, _HELDOUT), reward=episode_return, num_prompts=num_prompts, seed=seed
    )
    return task._replace(environment=environment(calculate, TEXT.encode))


_CALL = re.compile(r"\[(\d{1,4})([+*])(\d{1,4})\]")


def calculate(example: Example, transcript: Transcript, key: Key) -> Reply:
    """Returns the result of a call, at a cost; or grades an answer, which ends the episode."""
    del key
    words = transcript[-1].action
    call = _CALL.fullmatch(words)
    if call is None:
        return Reply(done=True, reward=float(words == example["answer"]))
    a, b = int(call[1]), int(call[3])
    return Reply(f"{a + b if call[2] == '+' else a * b};", reward=-CALL_COST)


def is_call(completion: Completion) -> bool:
    """Returns whether an episode began with a call."""
    return _CALL.fullmatch(completion.turns[0].action) is not None


def is_right(completion: Completion) -> bool:
    """Returns whether an episode ended with the right answer."""
    return completion.turns[-1].reward == 1


def is_product(example: Example) -> bool:
    """Returns whether the prompt is a product."""
    return "*" in example["prompt"]


def examples_of(numbers: Sequence[int] | np.ndarray) -> list[Example]:
    """Returns the examples with "prompt" and "answer" of the problems with these numbers."""
    tasks = [_TASKS[number] for number in numbers]
    return [{"prompt": f"{a:02}{sign}{b:02}=", "answer": str(a + b if sign == "+" else a * b)} for a, sign, b in tasks]


def mixed_episodes(
    *, batch_size: int, seed: int, step: int, call_share: float
) -> tuple[Prompts, np.ndarray, np.ndarray]:
    """Draws episodes for the warm start, of a policy that calls at random for sums and products alike.

    Without a call, the policy answers sums right, and products with a random number of four digits.

    Args:
      batch_size: The number of episodes (N).
      seed: The random seed of problems and calls.
      step: The step, which also seeds the draw.
      call_share: The probability of a call.

    Returns:
      The prompts; ids, int32, and a mask of the policy's tokens, bool, `[N, T]`, padded on the right.
    """
    generator = rng(seed, 1, step)
    examples = examples_of(generator.choice(_TRAIN, batch_size))
    ids = np.full((batch_size, MAX_TOKENS + ENVIRONMENT_TOKENS), PAD_ID, np.int32)
    mask = np.zeros(ids.shape, bool)
    for row, example in enumerate(examples):
        prompt, answer = example["prompt"], example["answer"]
        if generator.random() < call_share:
            parts = [(f"[{prompt[:-1]}]", True), (f"{answer};", False), (answer, True)]
        else:
            parts = [(str(generator.integers(1000, 10000)) if is_product(example) else answer, True)]
        tokens = [(token, separate) for text, separate in parts for token in [*TEXT.encode(text), *[EOS_ID] * separate]]
        ids[row, : len(tokens)], mask[row, : len(tokens)] = zip(*tokens, strict=True)
    return encode_examples(TEXT, examples), ids, mask
