"""Higher or lower, against an opponent that keeps its number open as long as it can.

A prompt is the ends of an interval, "3d"; numbers are characters, from 0 to v. The policy writes a number and EOS; the
environment answers ">" (its number is higher) or "<", whichever leaves it more numbers, until one alone is left and the
policy says it. That earns 1 − (k − 1)/K in turn k of K; a number that is never found earns 0. The best policy halves
the interval: the least k is ⌈log₂(numbers + 1)⌉. Nothing depends on luck, as it would if the number were drawn.
"""

from collections.abc import Sequence

import numpy as np

from grpo_jax.data.episodes import Key, Reply, ReplyFn, Transcript, environment, episode_return
from grpo_jax.data.types import Example, Prompts, rng
from grpo_jax.tasks.characters import Characters, characters_task, encode_examples
from grpo_jax.tasks.task import Task

NUMBERS = "0123456789abcdefghijklmnopqrstuv"
TEXT = Characters(NUMBERS + "<>")
PAD_ID, EOS_ID, VOCAB_SIZE = TEXT.pad_id, TEXT.eos_id, TEXT.vocab_size
MAX_TURNS = 7
MAX_TOKENS = 2 * MAX_TURNS  # of the policy: a number and EOS in each turn
ENVIRONMENT_TOKENS = MAX_TURNS - 1  # ">" or "<" after all but the last
NUM_HELDOUT = 25

# First and last number.
_INTERVALS = [(first, first + width - 1) for width in range(6, 16) for first in range(len(NUMBERS) - width + 1)]
# The split is the same for every seed of a run.
_ORDER = rng(261).permutation(len(_INTERVALS))
_TRAIN, _HELDOUT = _ORDER[NUM_HELDOUT:], _ORDER[:NUM_HELDOUT]


def guess_task(*, num_prompts: int, seed: int, reply: ReplyFn | None = None) -> Task:
    """The task, with `num_prompts` different intervals a step.

    Args:
      num_prompts: N.
      seed: of the order of intervals.
      reply: in place of the environment's, such as `noise`.

    Returns:
      The task.
    """
    task = characters_task(
        TEXT, examples_of, (_TRAIN, _HELDOUT), reward=episode_return, num_prompts=num_prompts, seed=seed
    )
    return task._replace(environment=environment(reply or higher_or_lower, TEXT.encode))


def higher_or_lower(example: Example, transcript: Transcript, key: Key) -> Reply:
    """Whether the number is higher or lower than the last guess, or that it was found. What is no number ends the
    game."""
    low, high = ends_of(example)
    answer = ""
    for turn, (said, *_) in enumerate(transcript):
        if len(said) != 1 or said not in NUMBERS:
            return Reply(done=True, reward=0.0)
        low, high, answer = _answered(low, high, NUMBERS.index(said), rng(*key[:-1], turn))
    return Reply(answer, reward=0.0) if answer else Reply(done=True, reward=return_of(len(transcript)))


def noise(example: Example, transcript: Transcript, key: Key) -> Reply:
    """The control: the same game, but what is said of it is a coin toss."""
    reply = higher_or_lower(example, transcript, key)
    return reply if reply.done else reply._replace(text="<>"[rng(*key, 1).integers(2)])


def _answered(low: int, high: int, guess: int, coin: np.random.Generator) -> tuple[int, int, str]:
    """What is left of an interval after a guess, and the answer; "" if the number was found."""
    if not low <= guess <= high:
        return low, high, ">" if guess < low else "<"
    if low == high:
        return low, high, ""
    below, above = guess - low, high - guess
    is_above = above > below or (above == below and bool(coin.integers(2)))
    return (guess + 1, high, ">") if is_above else (low, guess - 1, "<")


def return_of(turn: int) -> float:
    """What a number earns that is found in this turn, counted from 1."""
    return 1 - (turn - 1) / MAX_TURNS


def ends_of(example: Example) -> tuple[int, int]:
    """The first and the last number of an interval."""
    first, last = (NUMBERS.index(character) for character in example["prompt"])
    return first, last


def examples_of(numbers: Sequence[int] | np.ndarray) -> list[Example]:
    """The "prompt" of the intervals with these numbers."""
    return [{"prompt": NUMBERS[first] + NUMBERS[last]} for first, last in (_INTERVALS[i] for i in numbers)]


# ---- players


def best_turns(example: Example) -> int:
    """The turns that halving takes: ⌈log₂(numbers + 1)⌉. No policy needs fewer."""
    first, last = ends_of(example)
    return (last - first + 1).bit_length()


def bad_games(*, batch_size: int, seed: int, step: int, deaf_share: float) -> tuple[Prompts, np.ndarray, np.ndarray]:
    """Games of a player that often does not listen, to begin training with.

    A guess is any number of the interval with probability `deaf_share`, and else any that the answers have left.

    Args:
      batch_size: N.
      seed: of games and guesses.
      step: draws differ between steps.
      deaf_share: probability of a guess that pays no heed to the answers.

    Returns:
      Prompts; ids int32 and mask of the player's own tokens, bool, `[N, T]`, padded on the right.
    """
    generator = rng(seed, 1, step)
    games = generator.choice(_TRAIN, batch_size)
    ids = np.full((batch_size, MAX_TOKENS + ENVIRONMENT_TOKENS), PAD_ID, np.int32)
    mask = np.zeros(ids.shape, bool)
    for row, game in enumerate(games):
        text, own = _bad_game(generator, _INTERVALS[game], deaf_share)
        ids[row, : len(text)], mask[row, : len(text)] = text, own
    return encode_examples(TEXT, examples_of(games)), ids, mask


def _bad_game(
    generator: np.random.Generator, interval: tuple[int, int], deaf_share: float
) -> tuple[list[int], list[bool]]:
    """The tokens of a game, and which are the player's own."""
    ids: list[int] = []
    own: list[bool] = []
    low, high = interval
    for turn in range(MAX_TURNS):
        first, last = interval if generator.random() < deaf_share else (low, high)
        guess = int(generator.integers(first, last + 1))
        ids, own = [*ids, guess, EOS_ID], [*own, True, True]
        low, high, answer = _answered(low, high, guess, generator)
        if not answer:
            break
        if turn + 1 < MAX_TURNS:
            ids, own = [*ids, *TEXT.encode(answer)], [*own, False]
    return ids, own
