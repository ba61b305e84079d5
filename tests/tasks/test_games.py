"""Higher or lower, and the calculator: their environments, the best policies, and the bad ones to begin with."""

import functools

import numpy as np
import pytest

from grpo_jax.data.episodes import Reply
from grpo_jax.data.types import Completion, Turn, rng
from grpo_jax.tasks import calculator, guess

KEY = (0, 1, 2, 3)


def play(example, player, reply=guess.higher_or_lower, key=KEY):
    """The turns of a game; `player` is told the answers so far, as (guess, answer)."""
    turns, told = [], []
    for number in range(99):
        said = Completion(guess.NUMBERS[player(told)])
        turns.append(Turn(said))
        found = reply(example, turns, (*key, number))
        assert found == reply(example, turns, (*key, number))  # a pure function
        turns[-1] = Turn(said, Completion(found.text), found.reward)
        if found.done:
            return turns
        told.append((guess.NUMBERS.index(said), found.text))
    return turns


def halving(example):
    def player(told):
        low, high = guess.ends_of(example)
        for number, answer in told:
            low, high = (number + 1, high) if answer == ">" else (low, number - 1)
        return (low + high) // 2

    return player


@functools.cache
def fewest(width):
    """Turns that the best first guess needs at worst, tried out."""
    return 0 if width == 0 else 1 + min(max(fewest(i), fewest(width - 1 - i)) for i in range(width))


@pytest.mark.parametrize("number", range(0, 225, 16))
def test_halving_takes_as_many_turns_as_the_best_policy_does_at_worst(number):
    (example,) = guess.examples_of([number])
    first, last = guess.ends_of(example)
    turns = play(example, halving(example))
    assert len(turns) == guess.best_turns(example) == fewest(last - first + 1)
    assert turns[-1].reward == guess.return_of(len(turns))
    # One by one, the opponent gives in at the last number, whatever the player does before.
    assert len(play(example, lambda told: first + len(told))) == last - first + 1


def test_noise_says_nothing_of_the_game():
    examples = guess.examples_of(guess._HELDOUT)
    games = [play(example, halving(example), key=(0, 0, 0, i)) for i, example in enumerate(examples)]
    deaf = [
        play(example, lambda told, example=example: min(31, guess.ends_of(example)[0] + len(told)), guess.noise, (0, i))
        for i, example in enumerate(examples)
    ]
    answers = [turn.heard for game in deaf for turn in game[:-1]]
    assert {*answers} == {"<", ">"}
    assert 0.35 < np.mean([answer == "<" for answer in answers]) < 0.65
    assert [len(game) for game in games] == [guess.best_turns(example) for example in examples]


@pytest.mark.parametrize("said", ["", "12", ">", "-"])
def test_what_is_no_number_ends_the_game(said):
    (example,) = guess.examples_of([0])
    assert guess.higher_or_lower(example, [Turn(Completion(said))], (*KEY, 0)) == Reply(done=True, reward=0.0)


def test_held_out_intervals_are_never_trained_on():
    task = guess.guess_task(num_prompts=32, seed=0)
    held = {example["prompt"] for example in task.heldout.examples}
    assert len(held) == guess.NUM_HELDOUT
    assert not held & {example["prompt"] for step in range(20) for example in task.prompts(step).examples}


def test_bad_games_follow_the_rules():
    prompts, ids, mask = guess.bad_games(batch_size=64, seed=0, step=0, deaf_share=0.5)
    for example, row, own in zip(prompts.examples, ids, mask, strict=True):
        low, high = guess.ends_of(example)
        said, heard = row[own], row[~own & (row != guess.PAD_ID)]
        assert (said[1::2] == guess.EOS_ID).all()
        for number, answer in zip(said[::2], heard, strict=False):
            left = guess._answered(low, high, int(number), rng(0))
            assert guess.TEXT.decode([answer]) in "<>"
            low, high = left[:2] if guess.TEXT.decode([answer]) == left[2] else (low, high)
        assert own.sum() // 2 == len(heard) + 1


def test_the_calculator_answers_calls_and_judges_answers():
    (product,) = (e for e in calculator.examples_of(range(8100, 8101)))
    assert product == {"prompt": "10*10=", "answer": "100"}

    def reply(*said):
        return calculator.calculate(product, [Turn(Completion(text)) for text in said], (0,))

    assert reply("[10*10]") == Reply("100;", reward=-calculator.CALL_COST)
    assert reply("[7+8]").text == "15;"
    assert reply("[10*10]", "100") == Reply(done=True, reward=1.0)
    for wrong in ("", "99", "[10*10", "[10/5]", "[99999*1]", "100;"):
        assert reply(wrong) == Reply(done=True, reward=0.0)


def test_episodes_to_begin_with_are_those_of_the_calculator():
    prompts, ids, mask = calculator.mixed_episodes(batch_size=256, seed=0, step=0, call_share=0.25)
    calls = 0
    for example, row, own in zip(prompts.examples, ids, mask, strict=True):
        turns = calculator.TEXT.decode(row[own]).split("?")[:-1]
        if len(turns) == 2:
            calls += 1
            found = calculator.calculate(example, [Turn(Completion(turns[0]))], (0,))
            heard = row[~own & (row != calculator.PAD_ID)]
            assert found.text == calculator.TEXT.decode(heard) == f"{example['answer']};"
        assert turns[-1] == example["answer"] or (len(turns) == 1 and calculator.is_product(example))
    assert 40 < calls < 90
