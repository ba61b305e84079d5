"""Checks higher-or-lower and the calculator: their environments, their best policies, and the initial policies."""

import numpy as np
import pytest

from experiments.tasks import calculator, guess
from grpo_jax.data.episodes import Reply
from grpo_jax.data.types import Completion, Turn, rng

KEY = (0, 1, 2, 3)


def play(example, player, reply=guess.higher_or_lower, key=KEY):
    """The turns of a game; `player` is told what was left at the beginning and after each guess."""
    turns, ranges = [], [guess.ends_of(example["prompt"])]
    while True:
        guesses = Completion(guess.NUMBERS[player(ranges)])
        turns.append(Turn(guesses))
        answer = reply(example, turns, (*key, len(turns)))
        assert answer == reply(example, turns, (*key, len(turns)))  # a pure function
        turns[-1] = Turn(guesses, Completion(answer.text), answer.reward)
        if answer.done:
            return turns
        ranges.append(guess.ends_of(answer.text))


def halving(ranges):
    return sum(ranges[-1]) // 2


def one_by_one(ranges):
    """Numbers from the first on, whatever the answers."""
    return ranges[0][0] + len(ranges) - 1


def games_of(first, last):
    """The games of an interval, one for each number."""
    return [{"prompt": guess.asked((first, last)), "number": number} for number in guess.NUMBERS[first : last + 1]]


@pytest.mark.parametrize("width", guess.WIDTHS)
def test_halving_wins_every_game_and_counting_only_some(width):
    games = games_of(5, 4 + width)
    turns = [play(game, halving) for game in games]
    assert all(map(guess.is_won, turns))
    assert np.mean([len(game) for game in turns]) == guess.mean_turns(games[0])
    assert np.mean([guess.is_won(play(game, one_by_one)) for game in games]) == guess.blind_return(games[0])


def test_turn_rewards_add_up_to_the_games_outcome():
    (game,) = (game for game in games_of(0, 14) if game["number"] == "9")
    assert [turn.reward for turn in play(game, halving)] == [0, 0, 1]  # guesses 7, b and 9
    turns = play(game, one_by_one)
    # 14, 13 and 12 numbers are left for 3, 2 and 1 guesses
    assert [turn.reward for turn in turns] == pytest.approx([7 / 14 - 1, 3 / 13 - 7 / 14, 1 / 12 - 3 / 13, 1 - 1 / 12])
    played = [play(game, halving), turns, turns[:2]]  # the last was cut
    assert guess.games_won([game] * 3, [Completion("", turns=tuple(game)) for game in played]) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("player", [halving, one_by_one])
def test_noisy_answers_give_no_edge_over_guessing_blindly(player):
    # Answers are the same for each number to find, so guesses are too, and 4 guesses find 4 numbers at most.
    heard = []
    for number in range(20):
        games = games_of(number, number + 11)
        turns = [play(game, player, guess.noise, key=(0, number)) for game in games]
        assert sum(map(guess.is_won, turns)) <= guess.MAX_TURNS
        heard.append(max(turns, key=len)[0])
    if player is halving:
        assert 0.25 < np.mean([turn.observation[0] > turn.action for turn in heard]) < 0.75


def test_naming_any_number_left_wins_what_it_should():
    example, generator = games_of(0, 14)[0], rng(0)

    def player(ranges):
        return int(generator.integers(ranges[-1][0], ranges[-1][1] + 1))

    rate = np.mean([guess.is_won(play(game, player)) for _ in range(150) for game in games_of(0, 14)])
    assert abs(rate - guess.listening_return(example)) < 0.03  # three standard errors
    assert guess.above_blind(guess.blind_return(example), [example]) == 0
    assert guess.above_blind(1.0, [example]) == 1


@pytest.mark.parametrize("guesses", ["", "12", ">", "-"])
def test_what_is_no_number_ends_the_game(guesses):
    example = games_of(0, 14)[0]
    assert guess.higher_or_lower(example, [Turn(Completion(guesses))], (*KEY, 0)) == Reply(done=True, reward=0.0)


def test_held_out_intervals_are_never_trained_on():
    task = guess.guess_task(num_prompts=32, seed=0)
    held = [example["prompt"] for example in task.heldout.examples]
    assert len({*held}) == guess.NUM_HELDOUT
    for prompt in {*held}:  # with each number to find
        first, last = guess.ends_of(prompt)
        assert held.count(prompt) == last - first + 1
    assert not {*held} & {example["prompt"] for step in range(20) for example in task.prompts(step).examples}


def test_each_training_completion_draws_a_separate_number():
    (example, *_) = guess.guess_task(num_prompts=1, seed=0).prompts(0).examples
    first, last = guess.ends_of(example["prompt"])
    numbers = [guess.number_of(example, (0, 0, 0, completion, 1)) for completion in range(400)]
    assert {*numbers} == {*range(first, last + 1)}
    assert numbers == [guess.number_of(example, (0, 0, 0, completion, 3)) for completion in range(400)]
    assert guess.is_won(play(example, lambda ranges: numbers[5], key=(0, 0, 0, 5)))


def test_deaf_games_follow_the_rules():
    prompts, ids, mask = guess.deaf_games(batch_size=64, seed=0, step=0, deaf_share=0.5)
    for example, row, is_own in zip(prompts.examples, ids, mask, strict=True):
        first, last = guess.ends_of(example["prompt"])
        guesses, heard = row[is_own], guess.TEXT.decode(row[~is_own & (row != guess.PAD_ID)])
        heard = [heard[i : i + 3] for i in range(0, len(heard), 3)]
        assert (guesses[1::2] == guess.EOS_ID).all()
        assert all(first <= number <= last for number in guesses[::2])
        left = (first, last)
        for number, answer in zip(guesses[::2], heard, strict=False):
            below, above = (guess.asked(guess.narrowed(left, number, is_higher)) for is_higher in (False, True))
            assert answer in (below, above)
            left = guess.ends_of(answer)
        assert len(guesses[::2]) == len(heard) + 1
        assert len(heard) == 3 or left[0] <= guesses[-2] <= left[1]  # found, or the guesses are used up


def test_the_calculator_answers_calls_and_judges_answers():
    (product,) = (e for e in calculator.examples_of(range(8100, 8101)))
    assert product == {"prompt": "10*10=", "answer": "100"}

    def reply(*guesses):
        return calculator.calculate(product, [Turn(Completion(text)) for text in guesses], (0,))

    assert reply("[10*10]") == Reply("100;", reward=-calculator.CALL_COST)
    assert reply("[7+8]").text == "15;"
    assert reply("[10*10]", "100") == Reply(done=True, reward=1.0)
    for wrong in ("", "99", "[10*10", "[10/5]", "[99999*1]", "100;"):
        assert reply(wrong) == Reply(done=True, reward=0.0)


def test_warm_start_episodes_match_the_calculator():
    prompts, ids, mask = calculator.mixed_episodes(batch_size=256, seed=0, step=0, call_share=0.25)
    calls = 0
    for example, row, is_own in zip(prompts.examples, ids, mask, strict=True):
        turns = calculator.TEXT.decode(row[is_own]).split("?")[:-1]
        if len(turns) == 2:
            calls += 1
            answer = calculator.calculate(example, [Turn(Completion(turns[0]))], (0,))
            heard = row[~is_own & (row != calculator.PAD_ID)]
            assert answer.text == calculator.TEXT.decode(heard) == f"{example['answer']};"
        assert turns[-1] == example["answer"] or (len(turns) == 1 and calculator.is_product(example))
    assert 40 < calls < 90
