"""Sums and products: when is it worth to call a calculator?

A prompt is "03+04=" or "37*58=". The policy writes the answer and EOS; or it calls the calculator, "[37*58]" and EOS,
reads what that computes, "2146;", and answers then. A small model learns the hundred sums of two digits by heart, and
of the products of two-digit numbers next to none. A right answer earns 1, and a call costs `CALL_COST`.
"""

import re
from collections.abc import Sequence

import numpy as np

from experiments.tasks.characters import Characters, characters_task, encode_examples
from grpo_jax.data.episodes import Key, Reply, Transcript, environment, episode_return
from grpo_jax.data.types import Completion, Example, Prompts, rng
from grpo_jax.tasks.task import Task

TEXT = Characters("0123456789+*=[];")
PAD_ID, EOS_ID, VOCAB_SIZE = TEXT.pad_id, TEXT.eos_id, TEXT.vocab_size
MAX_TURNS = 2
ENVIRONMENT_TOKENS = len("9801;")
MAX_TOKENS = len("[99*99]") + 1 + len("9801") + 1  # of the policy: a call and an answer, with EOS
CALL_COST = 0.2
NUM_HELDOUT = 500

_PRODUCTS = [(a, "*", b) for a in range(10, 100) for b in range(10, 100)]
_SUMS = [(a, "+", b) for a in range(10) for b in range(10)] * 81  # as many
_TASKS = _SUMS + _PRODUCTS
# The split is the same for every seed of a run. A product is on one side of it; each sum is on both.
_ORDER = rng(262).permutation(len(_TASKS))
_TRAIN, _HELDOUT = _ORDER[NUM_HELDOUT:], _ORDER[:NUM_HELDOUT]


def calculator_task(*, num_prompts: int, seed: int) -> Task:
    """The task, with `num_prompts` prompts a step, half of them products on average.

    Args:
      num_prompts: N.
      seed: of the order of prompts.

    Returns:
      The task.
    """
    task = characters_task(
        TEXT, examples_of, (_TRAIN, _HELDOUT), reward=episode_return, num_prompts=num_prompts, seed=seed
    )
    return task._replace(environment=environment(calculate, TEXT.encode))


_CALL = re.compile(r"\[(\d{1,4})([+*])(\d{1,4})\]")


def calculate(example: Example, transcript: Transcript, key: Key) -> Reply:
    """The result of a call, which costs something; or whether an answer is right, which ends the episode."""
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
    """The "prompt" and "answer" of the tasks with these numbers."""
    tasks = [_TASKS[number] for number in numbers]
    return [{"prompt": f"{a:02}{sign}{b:02}=", "answer": str(a + b if sign == "+" else a * b)} for a, sign, b in tasks]


def mixed_episodes(
    *, batch_size: int, seed: int, step: int, call_share: float
) -> tuple[Prompts, np.ndarray, np.ndarray]:
    """Episodes of a policy that calls now and then, whatever the task, to begin training with.

    Without a call it answers sums right, and products by a number of four digits at random.

    Args:
      batch_size: N.
      seed: of tasks and calls.
      step: draws differ between steps.
      call_share: probability of a call.

    Returns:
      Prompts; ids int32 and mask of the policy's own tokens, bool, `[N, T]`, padded on the right.
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
