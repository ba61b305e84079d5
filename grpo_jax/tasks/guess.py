"""Higher or lower: find a number by guessing, told after each guess on which side of it the number lies.

Numbers are characters, from 0 to f. A prompt is the ends of the interval, "3d". The policy
writes a number and EOS; the environment answers ">" (the number is higher) or "<", until the guess is right or is
none. A number that is found in turn k of K earns 1 − (k − 1)/K, and one that is not found 0. The best policy halves the
interval.
"""

from collections.abc import Sequence

import numpy as np

from grpo_jax.data.episodes import Key, Reply, ReplyFn, Transcript, environment, episode_return
from grpo_jax.data.types import Example, Prompts, rng
from grpo_jax.tasks.characters import Characters, characters_task, encode_examples
from grpo_jax.tasks.task import Task

NUMBERS = "0123456789abcdef"
TEXT = Characters(NUMBERS + "<>")
PAD_ID, EOS_ID, VOCAB_SIZE = TEXT.pad_id, TEXT.eos_id, TEXT.vocab_size
MAX_TURNS = 5
MAX_TOKENS = 2 * MAX_TURNS  # of the policy: a number and EOS in each turn
ENVIRONMENT_TOKENS = MAX_TURNS - 1  # ">" or "<" after all but the last
WIDTHS = range(7, 16)  # numbers of an interval
NUM_HELDOUT = 100

# (first number, last number, the one to find)
_GAMES = [
    (first, first + width - 1, secret)
    for width in WIDTHS
    for first in range(len(NUMBERS) - width + 1)
    for secret in range(first, first + width)
]
# The split is the same for every seed of a run.
_ORDER = rng(261).permutation(len(_GAMES))
_TRAIN, _HELDOUT = _ORDER[NUM_HELDOUT:], _ORDER[:NUM_HELDOUT]


def guess_task(*, num_prompts: int, seed: int, reply: ReplyFn | None = None) -> Task:
    """The task, with `num_prompts` different games a step.

    Args:
      num_prompts: N.
      seed: of the order of games.
      reply: in place of the environment's, such as `noise`.

    Returns:
      The task.
    """
    task = characters_task(
        TEXT, examples_of, (_TRAIN, _HELDOUT), reward=episode_return, num_prompts=num_prompts, seed=seed
    )
    return task._replace(environment=environment(reply or higher_or_lower, TEXT.encode))


def higher_or_lower(example: Example, transcript: Transcript, key: Key) -> Reply:
    """Whether the number is higher or lower than the last guess."""
    del key
    guess = _guessed(transcript[-1].said)
    secret = NUMBERS.index(example["secret"])
    if guess is None or guess == secret:
        return Reply(done=True, reward=0.0 if guess is None else return_of(len(transcript)))
    return Reply(">" if secret > guess else "<", reward=0.0)


def noise(example: Example, transcript: Transcript, key: Key) -> Reply:
    """The control: a number that is found is found, but what is said of the others is a coin toss."""
    reply = higher_or_lower(example, transcript, key)
    return reply if reply.done else reply._replace(text="<>"[rng(*key).integers(2)])


def return_of(turn: int) -> float:
    """What a number earns that is found in this turn, counted from 1."""
    return 1 - (turn - 1) / MAX_TURNS


def _guessed(text: str) -> int | None:
    """The number that a text is, or None."""
    return NUMBERS.index(text) if len(text) == 1 and text in NUMBERS else None


def examples_of(numbers: Sequence[int] | np.ndarray) -> list[Example]:
    """The "prompt" and "secret" of the games with these numbers."""
    games = [_GAMES[number] for number in numbers]
    return [{"prompt": NUMBERS[first] + NUMBERS[last], "secret": NUMBERS[secret]} for first, last, secret in games]


# ---- players


def turns_by_halving(width: int) -> np.ndarray:
    """The turns in which halving finds each number of an interval: 1 once, 2 twice, 3 four times, … . No policy finds
    them in fewer turns on average."""
    turns = np.arange(1, width.bit_length() + 1)
    return np.repeat(turns, 2 ** (turns - 1))[:width]


def best_return(examples: Sequence[Example]) -> float:
    """The mean return of the best policy on games like these."""
    turns = [turns_by_halving(width_of(example)) for example in examples]
    return float(np.mean([np.mean([return_of(turn) for turn in of_game]) for of_game in turns]))


def width_of(example: Example) -> int:
    """How many numbers the interval of a game has."""
    first, last = (NUMBERS.index(character) for character in example["prompt"])
    return last - first + 1


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
        text, own = _bad_game(generator, _GAMES[game], deaf_share)
        ids[row, : len(text)], mask[row, : len(text)] = text, own
    return encode_examples(TEXT, examples_of(games)), ids, mask


def _bad_game(
    generator: np.random.Generator, game: tuple[int, int, int], deaf_share: float
) -> tuple[list[int], list[bool]]:
    """The tokens of a game, and which are the player's own."""
    ids: list[int] = []
    own: list[bool] = []
    first, last, secret = game
    low, high = first, last
    for turn in range(MAX_TURNS):
        is_deaf = generator.random() < deaf_share
        guess = int(generator.integers(first, last + 1) if is_deaf else generator.integers(low, high + 1))
        ids, own = [*ids, guess, EOS_ID], [*own, True, True]
        if guess == secret:
            break
        low, high = (max(low, guess + 1), high) if guess < secret else (low, min(high, guess - 1))
        if turn + 1 < MAX_TURNS:
            ids, own = [*ids, *TEXT.encode(">" if secret > guess else "<")], [*own, False]
    return ids, own
