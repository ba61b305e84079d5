"""Higher or lower: the policy has only as many guesses as halving needs.

A prompt has the ends of an interval of 8 to 15 numbers, "3e?"; numbers are characters, from 0 to z. The hidden number
is uniform in the interval. The policy writes a number and EOS, and the environment answers with the ends of the
remaining interval, "8e?" after a 7 that is too low. A policy wins the game, and earns 1, if it names the number within
4 guesses; otherwise it earns 0.

The reward of a turn is its change of the share of games that halving would still win. The last turn corrects the sum,
so that a game's turns add up to 1 or 0. This is a potential (Ng, Harada and Russell 1999), so the best policy is the
same as without it. With `advantages_of` "turns", no turn is then blamed for earlier guesses.

We know what policies can earn, on average over the hidden numbers:
- halving the remaining interval wins every game, since 4 guesses distinguish 15 numbers;
- a policy that ignores the answers wins at most 4 of w games, w being the width: it makes 4 different guesses, each of
  which is right in one game of w (`blind_return`);
- a policy that names any number in the remaining interval, without halving, earns `listening_return`.
So a return above `blind_return` needs the answers, and `above_blind` is 0 for the best deaf policy and 1 for halving.
With `noise` for answers no policy can earn more than `blind_return`.
"""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from experiments.tasks.characters import Characters, characters_task, encode_examples
from grpo_jax.data.episodes import Key, Reply, ReplyFn, Transcript, environment
from grpo_jax.data.prompts import Prompts
from grpo_jax.data.types import Completion, Example, Number, rng
from grpo_jax.tasks.task import Task

NUMBERS = "0123456789abcdefghijklmnopqrstuvwxyz"
TEXT = Characters(NUMBERS + "?")
PAD_ID, EOS_ID, VOCAB_SIZE = TEXT.pad_id, TEXT.eos_id, TEXT.vocab_size
Ends = tuple[int, int]  # the first and the last number of an interval
MAX_TURNS = 4
WIDTHS = range(8, 2**MAX_TURNS)  # numbers of an interval
MAX_TOKENS = 2 * MAX_TURNS  # a number and EOS in each turn
ENVIRONMENT_TOKENS = 3 * (MAX_TURNS - 1)  # two numbers and "?" after all guesses but the last
NUM_HELDOUT = 20  # intervals


def asked(ends: Ends) -> str:
    """Returns the text of an interval that the policy reads."""
    return f"{NUMBERS[ends[0]]}{NUMBERS[ends[1]]}?"


# Intervals in an order that is the same for every seed of a run; the first NUM_HELDOUT are held out.
_INTERVALS = [(first, first + width - 1) for width in WIDTHS for first in range(len(NUMBERS) - width + 1)]
_INTERVALS = [_INTERVALS[i] for i in rng(261).permutation(len(_INTERVALS))]
_HELDOUT, _TRAIN = _INTERVALS[:NUM_HELDOUT], _INTERVALS[NUM_HELDOUT:]
# Training intervals have no number: each game draws one. Held-out intervals occur once with each of their numbers.
_EXAMPLES: list[Example] = [{"prompt": asked(ends)} for ends in _TRAIN] + [
    {"prompt": asked(ends), "number": number} for ends in _HELDOUT for number in NUMBERS[ends[0] : ends[1] + 1]
]


def guess_task(*, num_prompts: int, seed: int, reply: ReplyFn | None = None) -> Task:
    """Returns the task. Each training completion has a different hidden number.

    Args:
      num_prompts: The number of different intervals in each step (N).
      seed: The random seed of the order of intervals.
      reply: The function that answers, such as `noise`; None: `higher_or_lower`.

    Returns:
      The task. Its held-out prompts are intervals that are never trained on, one prompt for each of their numbers.
    """
    task = characters_task(
        TEXT,
        lambda chosen: [_EXAMPLES[i] for i in chosen],
        (np.arange(len(_TRAIN)), np.arange(len(_TRAIN), len(_EXAMPLES))),
        reward=games_won,
        num_prompts=num_prompts,
        seed=seed,
    )
    return task._replace(environment=environment(reply or higher_or_lower, TEXT.encode))


def higher_or_lower(example: Example, transcript: Transcript, key: Key) -> Reply:
    """Returns the interval after the last guess, or ends the game. A guess that is not a number ends it."""
    number = number_of(example, key)
    return _reply(example, transcript, number, is_higher=lambda guess: number > guess)


def noise(example: Example, transcript: Transcript, key: Key) -> Reply:
    """Answers in the control: a fair coin, independent of the number, decides on which side of a guess it is.

    An answer that would leave an empty interval does not change the interval.
    """
    return _reply(example, transcript, number_of(example, key), is_higher=lambda guess: bool(rng(*key).integers(2)))


def number_of(example: Example, key: Key) -> int:
    """Returns the hidden number: from the example, or drawn with the completion's key, which is fixed over turns."""
    if "number" in example:
        return NUMBERS.index(example["number"])
    first, last = ends_of(example["prompt"])
    return int(rng(*key[:-1]).integers(first, last + 1))


def _reply(example: Example, transcript: Transcript, number: int, *, is_higher: Callable[[int], bool]) -> Reply:
    words, turn = transcript[-1].action, len(transcript)
    arguments = ends_of(str(transcript[-2].observation) if turn > 1 else example["prompt"])
    before = _halving(arguments, MAX_TURNS - turn + 1)  # 1 in the first turn
    if words == NUMBERS[number]:
        return Reply(done=True, reward=2.0 - before)
    if len(words) != 1 or words not in NUMBERS or turn == MAX_TURNS:
        return Reply(done=True, reward=1.0 - before)
    guess = NUMBERS.index(words)
    left = narrowed(arguments, guess, is_higher(guess))
    return Reply(asked(left), reward=_halving(left, MAX_TURNS - turn) - before)


def games_won(examples: Sequence[Example], completions: Sequence[Completion]) -> list[Number]:
    """Returns the rewards: 1 for a game that was won, else 0, also if the game was cut off."""
    del examples
    return [float(is_won(completion.turns)) for completion in completions]


def is_won(turns: Transcript) -> bool:
    """Returns whether a game that has ended was won."""
    return sum(turn.reward or 0.0 for turn in turns) > 0.5


def narrowed(ends: Ends, guess: int, is_higher: bool) -> Ends:
    """Returns the ends of the remaining interval, or the old ends if it would be empty."""
    first, last = ends
    first, last = (max(first, guess + 1), last) if is_higher else (first, min(last, guess - 1))
    return (first, last) if first <= last else ends


def ends_of(text: str) -> Ends:
    """Reads the first and the last number of an interval from a prompt or a reply."""
    return NUMBERS.index(text[0]), NUMBERS.index(text[1])


def _halving(ends: Ends, turns: int) -> float:
    """Returns the share of the interval's numbers that halving finds within this many turns."""
    return min(1.0, (2**turns - 1) / width_of(ends))


def width_of(ends: Ends) -> int:
    """Returns the number of numbers in an interval."""
    return ends[1] - ends[0] + 1


# ---- returns of known policies


def blind_return(example: Example) -> float:
    """Returns the share of games that the best policy without answers wins, over all numbers of the interval."""
    return MAX_TURNS / _width(example)


def listening_return(example: Example) -> float:
    """Returns the share of games won by a policy that guesses uniformly in the remaining interval."""
    return _found(_width(example), MAX_TURNS) / _width(example)


def _width(example: Example) -> int:
    return width_of(ends_of(example["prompt"]))


@cache
def _found(width: int, turns: int) -> float:
    """Returns how many of `width` numbers uniform guesses in the remaining interval find, averaged over guesses."""
    if width == 0 or turns == 0:
        return 0.0
    return sum(1 + _found(i, turns - 1) + _found(width - 1 - i, turns - 1) for i in range(width)) / width


def above_blind(won: float, examples: Sequence[Example]) -> float:
    """Scales a share of won games to 0 for the best policy without answers and 1 for halving."""
    blind = float(np.mean([blind_return(example) for example in examples]))
    return (won - blind) / (1 - blind)


def mean_turns(example: Example) -> float:
    """Returns the mean number of turns that halving takes, over the numbers of an interval."""
    return _turns(_width(example)) / _width(example)


def _turns(width: int) -> int:
    """Returns the turns that halving takes, summed over the numbers."""
    return width + _turns((width - 1) // 2) + _turns(width // 2) if width else 0


# ---- the policy of the warm start


def deaf_games(*, batch_size: int, seed: int, step: int, deaf_share: float) -> tuple[Prompts, np.ndarray, np.ndarray]:
    """Draws games for the warm start, of a player that knows the rules and often ignores the answers.

    A guess is uniform in the first interval with probability `deaf_share`, and else in the remaining interval.

    Args:
      batch_size: The number of games (N).
      seed: The random seed of games and guesses.
      step: The step, which also seeds the draw.
      deaf_share: The probability of a guess that ignores the answers.

    Returns:
      The prompts; ids, int32, and a mask of the player's tokens, bool, `[N, T]`, padded on the right.
    """
    generator = rng(seed, 1, step)
    chosen = generator.choice(len(_TRAIN), batch_size)
    ids = np.full((batch_size, MAX_TOKENS + ENVIRONMENT_TOKENS), PAD_ID, np.int32)
    for row, i in enumerate(chosen):
        tokens = _deaf_game(generator, _TRAIN[i], deaf_share)
        ids[row, : len(tokens)] = tokens
    # Each answer has three tokens, two numbers and "?", which are not the player's.
    mask = (ids != PAD_ID) & (np.arange(ids.shape[1]) % 5 < 2)
    return encode_examples(TEXT, [_EXAMPLES[i] for i in chosen]), ids, mask


def _deaf_game(generator: np.random.Generator, ends: Ends, deaf_share: float) -> list[int]:
    """Draws the tokens of a game."""
    number, left = int(generator.integers(ends[0], ends[1] + 1)), ends
    ids: list[int] = []
    for turn in range(MAX_TURNS):
        among = ends if generator.random() < deaf_share else left
        guess = int(generator.integers(among[0], among[1] + 1))
        ids += [guess, EOS_ID]
        if guess == number or turn + 1 == MAX_TURNS:
            break
        left = narrowed(left, guess, number > guess)
        ids += TEXT.encode(asked(left))
    return ids
