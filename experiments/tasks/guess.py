"""Higher or lower: the policy has as many guesses as halving needs, and no more.

A prompt is the ends of an interval of 8 to 15 numbers, "3e?"; numbers are characters, from 0 to z. One number of the
interval is the one to find, each as likely as any other. The policy writes a number and EOS; the environment answers
with the ends of what is left, "8e?" after a 7 that is too low. A game is won, and earns 1, if the number is named
within 4 guesses; else it earns 0.

A turn earns by how much it changed the share of games that halving would still win. What this took on the way, the last
turn gives back, so that a game's turns add up to 1 or 0. This is a potential (Ng, Harada and Russell 1999), so the best
policy is the same as without it. With `advantages_of` "turns" no turn is then blamed for guesses before it.

What a policy can earn is known, on average over the numbers to find:
- halving what is left wins every game, since 4 guesses tell 15 numbers apart;
- a policy that hears no answer wins 4 games of w at best, w being the width: 4 different guesses, of which each is
  right in one game of w (`blind_return`);
- naming any number that the answers have left wins `listening_return`, without halving.
So what is above `blind_return` needs the answers, and `above_blind` is 0 for the best deaf policy and 1 for halving.
With `noise` for answers no policy can earn more than `blind_return`.
"""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from experiments.tasks.characters import Characters, characters_task, encode_examples
from grpo_jax.data.episodes import Key, Reply, ReplyFn, Transcript, environment
from grpo_jax.data.types import Completion, Example, Number, Prompts, rng
from grpo_jax.tasks.task import Task

NUMBERS = "0123456789abcdefghijklmnopqrstuvwxyz"
TEXT = Characters(NUMBERS + "?")
PAD_ID, EOS_ID, VOCAB_SIZE = TEXT.pad_id, TEXT.eos_id, TEXT.vocab_size
Ends = tuple[int, int]  # the first and the last number of an interval
MAX_TURNS = 4
WIDTHS = range(8, 2**MAX_TURNS)  # numbers of an interval
MAX_TOKENS = 2 * MAX_TURNS  # of the policy: a number and EOS in each turn
ENVIRONMENT_TOKENS = 3 * (MAX_TURNS - 1)  # two numbers and "?" after all guesses but the last
NUM_HELDOUT = 20  # intervals


def asked(ends: Ends) -> str:
    """An interval as the policy reads it."""
    return f"{NUMBERS[ends[0]]}{NUMBERS[ends[1]]}?"


# First and last number, in an order that is the same for every seed of a run: the first are held out.
_INTERVALS = [(first, first + width - 1) for width in WIDTHS for first in range(len(NUMBERS) - width + 1)]
_INTERVALS = [_INTERVALS[i] for i in rng(261).permutation(len(_INTERVALS))]
_HELDOUT, _TRAIN = _INTERVALS[:NUM_HELDOUT], _INTERVALS[NUM_HELDOUT:]
# Intervals to train on, without a number: each game draws one. Held out is every number of an interval.
_EXAMPLES: list[Example] = [{"prompt": asked(ends)} for ends in _TRAIN] + [
    {"prompt": asked(ends), "number": number} for ends in _HELDOUT for number in NUMBERS[ends[0] : ends[1] + 1]
]


def guess_task(*, num_prompts: int, seed: int, reply: ReplyFn | None = None) -> Task:
    """The task, with `num_prompts` different intervals a step; each completion looks for a number of its own.

    Args:
      num_prompts: N.
      seed: of the order of intervals.
      reply: in place of the environment's, such as `noise`.

    Returns:
      The task. Its held-out prompts are intervals that are never trained on, each once for each of its numbers.
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
    """Returns the range after the last guess, or how the game ended. A guess that is no number ends it."""
    number = number_of(example, key)
    return _reply(example, transcript, number, is_higher=lambda guess: number > guess)


def noise(example: Example, transcript: Transcript, key: Key) -> Reply:
    """The control: the same game, but a fair coin, which does not know the number, says on which side of a guess it is.

    The coin's answer is left out where it would leave nothing.
    """
    return _reply(example, transcript, number_of(example, key), is_higher=lambda guess: bool(rng(*key).integers(2)))


def number_of(example: Example, key: Key) -> int:
    """The number to find: the example's, or one that the completion's key draws, which is the same in all its turns."""
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
    """The reward: 1 for a game that was won, 0 for others, also for those that were cut."""
    del examples
    return [float(is_won(completion.turns)) for completion in completions]


def is_won(turns: Transcript) -> bool:
    """Returns whether a game that has ended was won."""
    return sum(turn.reward or 0.0 for turn in turns) > 0.5


def narrowed(ends: Ends, guess: int, is_higher: bool) -> Ends:
    """The ends of what is left of an interval; as they were, where nothing would be left."""
    first, last = ends
    first, last = (max(first, guess + 1), last) if is_higher else (first, min(last, guess - 1))
    return (first, last) if first <= last else ends


def ends_of(text: str) -> Ends:
    """The first and the last number of an interval, of a prompt or a reply."""
    return NUMBERS.index(text[0]), NUMBERS.index(text[1])


def _halving(ends: Ends, turns: int) -> float:
    """The share of games that halving wins with so many turns, over the numbers of an interval."""
    return min(1.0, (2**turns - 1) / width_of(ends))


def width_of(ends: Ends) -> int:
    """How many numbers an interval has."""
    return ends[1] - ends[0] + 1


# ---- what players earn


def blind_return(example: Example) -> float:
    """The share of games that the best policy without answers wins, over all numbers of the interval."""
    return MAX_TURNS / _width(example)


def listening_return(example: Example) -> float:
    """The share that is won by naming any of the numbers that the answers have left."""
    return _found(_width(example), MAX_TURNS) / _width(example)


def _width(example: Example) -> int:
    return width_of(ends_of(example["prompt"]))


@cache
def _found(width: int, turns: int) -> float:
    """How many of `width` numbers are found by naming any that is left, on average over the guesses."""
    if width == 0 or turns == 0:
        return 0.0
    return sum(1 + _found(i, turns - 1) + _found(width - 1 - i, turns - 1) for i in range(width)) / width


def above_blind(won: float, examples: Sequence[Example]) -> float:
    """Scales a share of won games: 0 is the best policy without answers, 1 is halving."""
    blind = float(np.mean([blind_return(example) for example in examples]))
    return (won - blind) / (1 - blind)


def mean_turns(example: Example) -> float:
    """The turns that halving takes, on average over the numbers of an interval."""
    return _turns(_width(example)) / _width(example)


def _turns(width: int) -> int:
    """Added up over the numbers."""
    return width + _turns((width - 1) // 2) + _turns(width // 2) if width else 0


# ---- the player to begin with


def deaf_games(*, batch_size: int, seed: int, step: int, deaf_share: float) -> tuple[Prompts, np.ndarray, np.ndarray]:
    """Games of a player that knows the rules and often does not listen, to begin training with.

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
    chosen = generator.choice(len(_TRAIN), batch_size)
    ids = np.full((batch_size, MAX_TOKENS + ENVIRONMENT_TOKENS), PAD_ID, np.int32)
    for row, i in enumerate(chosen):
        tokens = _deaf_game(generator, _TRAIN[i], deaf_share)
        ids[row, : len(tokens)] = tokens
    # Of two numbers and "?" for each answer, none is the player's own.
    mask = (ids != PAD_ID) & (np.arange(ids.shape[1]) % 5 < 2)
    return encode_examples(TEXT, [_EXAMPLES[i] for i in chosen]), ids, mask


def _deaf_game(generator: np.random.Generator, ends: Ends, deaf_share: float) -> list[int]:
    """The tokens of a game."""
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
