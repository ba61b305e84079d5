"""Higher or lower, and the calculator: their environments, the best policies, and the bad ones to begin with."""

import numpy as np
import pytest

from grpo_jax.data.episodes import Reply
from grpo_jax.data.types import Completion, Turn, rng
from grpo_jax.tasks import calculator, guess

KEY = (0, 1, 2, 3)


def play(example, player, reply=guess.higher_or_lower, key=KEY):
    """The turns of a game; `player` is told the answers so far, as (guess, answer)."""
    turns, told = [], []
    while True:
        said = Completion(guess.NUMBERS[player(told)])
        turns.append(Turn(said))
        found = reply(example, turns, (*key, len(turns)))
        assert found == reply(example, turns, (*key, len(turns)))  # a pure function
        turns[-1] = Turn(said, Completion(found.text), found.reward)
        if found.done:
            return turns
        told.append((guess.NUMBERS.index(said), found.text))


def halving(example):
    """Of what the answers leave, or of the whole interval where they leave nothing."""
    first, last = guess.ends_of(example)

    def player(told):
        left = [n for n in range(first, last + 1) if all((n > said) == (heard == ">") for said, heard in told)]
        left = [n for n in left if n not in (said for said, _ in told)] or list(range(first, last + 1))
        return left[(len(left) - 1) // 2]

    return player


def games_of(first, last):
    """The games of an interval, one for each number."""
    numbers = guess.NUMBERS[first : last + 1]
    return [{"prompt": numbers[0] + numbers[-1], "number": number} for number in numbers]


def won(turns):
    return turns[-1].reward == 1


@pytest.mark.parametrize("width", guess.WIDTHS)
def test_halving_wins_every_game_and_a_guess_at_the_end_not(width):
    games = games_of(5, 4 + width)
    turns = [play(game, halving(game)) for game in games]
    assert all(map(won, turns))
    assert np.mean([len(game) for game in turns]) == guess.mean_turns(games[0])
    one_by_one = [won(play(game, lambda told: 5 + len(told))) for game in games]
    assert np.mean(one_by_one) == guess.blind_return(games[0])


@pytest.mark.parametrize("player", [halving, lambda example: lambda told: guess.ends_of(example)[0] + len(told)])
def test_whoever_hears_noise_wins_what_the_best_policy_without_answers_does_at_most(player):
    # Answers are the same for each number to find, so guesses are too, and 4 guesses find 4 numbers at most.
    heard = ""
    for number in range(20):
        games = games_of(number, number + 11)
        turns = [play(game, player(game), guess.noise, key=(0, number)) for game in games]
        assert sum(map(won, turns)) <= guess.MAX_TURNS
        heard += "".join(turn.heard for turn in max(turns, key=len)[:-1])
    assert 0.3 < np.mean([answer == "<" for answer in heard]) < 0.7


def test_naming_any_number_left_wins_what_it_should():
    example, generator = games_of(0, 14)[0], rng(0)

    def player(told):
        low = max((said + 1 for said, heard in told if heard == ">"), default=0)
        high = min((said - 1 for said, heard in told if heard == "<"), default=14)
        return int(generator.integers(low, high + 1))

    rate = np.mean([won(play(game, player)) for _ in range(150) for game in games_of(0, 14)])
    assert abs(rate - guess.listening_return(example)) < 0.03  # three standard errors
    assert guess.above_blind(guess.blind_return(example), [example]) == 0
    assert guess.above_blind(1.0, [example]) == 1


@pytest.mark.parametrize("said", ["", "12", ">", "-"])
def test_what_is_no_number_ends_the_game(said):
    (example,) = guess.examples_of([0])
    assert guess.higher_or_lower(example, [Turn(Completion(said))], (*KEY, 0)) == Reply(done=True, reward=0.0)


def test_the_last_guess_ends_the_game():
    game = games_of(0, 14)[0]
    turns = play(game, lambda told: 14)
    assert len(turns) == guess.MAX_TURNS
    assert not won(turns)
    assert guess.higher_or_lower(game, [*turns[:-1], Turn(Completion("0"))], KEY) == Reply(done=True, reward=1.0)


def test_held_out_intervals_are_never_trained_on():
    task = guess.guess_task(num_prompts=32, seed=0)
    held = [example["prompt"] for example in task.heldout.examples]
    assert len({*held}) == guess.NUM_HELDOUT
    for prompt in {*held}:  # with each number to find
        first, last = guess.ends_of({"prompt": prompt})
        assert held.count(prompt) == last - first + 1
    assert not {*held} & {example["prompt"] for step in range(20) for example in task.prompts(step).examples}


def test_deaf_games_follow_the_rules():
    prompts, ids, mask = guess.deaf_games(batch_size=64, seed=0, step=0, deaf_share=0.5)
    for example, row, own in zip(prompts.examples, ids, mask, strict=True):
        first, last = guess.ends_of(example)
        said, heard = row[own], guess.TEXT.decode(row[~own & (row != guess.PAD_ID)])
        assert (said[1::2] == guess.EOS_ID).all()
        assert all(first <= number <= last for number in said[::2])
        turns = []
        for number, answer in zip(said[::2], [*heard, None], strict=True):
            turns.append(Turn(Completion(guess.NUMBERS[number])))
            found = guess.higher_or_lower({"prompt": example["prompt"], "number": example["number"]}, turns, KEY)
            assert found.done == (answer is None)
            assert found.done or found.text == answer


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
