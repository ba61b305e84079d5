"""Checks that each problem of Countdown can be solved and that no attack gets past its reward."""

import time
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from experiments.tasks import countdown

EXAMPLE = {"numbers": [3, 4, 4, 50], "target": 28}


def worth(completion, example=EXAMPLE):
    return countdown.countdown_reward([example], [completion])[0]


def test_every_problem_is_solved_by_its_own_solution():
    rows = countdown.countdown_rows(1000, seed=3)
    for row in rows:
        assert worth(f"<answer>{row['solution']}</answer>", row) == 1.0
        assert sorted(countdown.evaluate(row["solution"])[1]) == row["numbers"]  # all of them
        assert row["target"] not in row["numbers"]
        assert str(row["numbers"])[1:-1] in row["prompt"]
        assert f"equals {row['target']}." in row["prompt"]
    assert {len(row["numbers"]) for row in rows} == {3, 4}
    assert len({row["prompt"] for row in rows}) == 1000
    assert all(any(sign in row["solution"] for row in rows) for sign in "+-*/")


def test_problems_depend_only_on_seed_and_index():
    assert countdown.countdown_row(0, 7) == countdown.countdown_row(0, 7)
    assert countdown.countdown_row(0, 7) != countdown.countdown_row(0, 8)
    assert countdown.countdown_row(0, 7) != countdown.countdown_row(1, 7)
    assert countdown.countdown_rows(20) == countdown.countdown_rows(40)[:20]


REWARDS = [
    ("<answer>4 * (3 + 4)</answer>", 1.0),
    ("Let me think: 50 is too much.\n\n4*(4+3)\n", 1.0),  # the last line
    ("4 * (4 + 3) = 28", 1.0),
    ("28 = 4 * (4 + 3)", 1.0),
    ("<answer>x = 4 * (4 + 3) = 28</answer>", 1.0),
    ("<answer>1</answer> or rather <answer>4*(4+3)</answer>, I think", 1.0),  # the last answer
    ("<answer>4*(4+3)</answer>\n<answer>4", 1.0),  # one that is not closed is none
    ("<answer>4*(4+3)</answer><answer>4</answer>", 0.1),
    ("<answer>50 - 4 * 4</answer>", 0.1),  # well-formed, and not the target
    ("50", 0.1),
    ("4 * 4 + 4 * 3", 0.0),  # there are two fours
    ("28", 0.0),
    ("7 * 4", 0.0),
    ("<answer></answer>", 0.0),
    ("", 0.0),
    ("The answer is 4 * (4 + 3)", 0.0),
    ("<answer>4 * (4 + 3)", 0.0),
    ("4*(4+3)</answer>", 0.0),
]


@pytest.mark.parametrize(("completion", "reward"), REWARDS)
def test_reward_by_hand(completion, reward):
    assert worth(completion) == reward


def test_arithmetic_is_exact():
    assert countdown.evaluate("1/3 + 1/3 + 1/3")[0] == 1
    assert worth("7 / 25 * 100", {"numbers": [7, 25, 100], "target": 28}) == 1.0  # 28.000000000000004 in floats
    assert countdown.evaluate("2-3-4")[0] == -5
    assert countdown.evaluate("8/4/2")[0] == 1
    assert countdown.evaluate("2+3*4-(5-6)/7") == (Fraction(99, 7), [2, 3, 4, 5, 6, 7])


@given(
    st.recursive(
        st.integers(0, 99).map(str),
        lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(" ".join).map("({})".format),
        max_leaves=8,
    )
)
def test_evaluation_agrees_with_python(text):
    assert countdown.evaluate(text)[0] == eval(text)  # on what this test wrote itself


PYTHON = ["__import__('os').system('true')", "4**4", "4//3", "4%3", "1e9", "0x1c", "2_8", "4.0*7", "4 if 4 else 4"]
SIGNS = ["-4", "4--4", "+4", "4 4", "4(3)", "(4", "4)", "()", "4,4", "4;4", "[4]", "4 − 3", "4/0", "4/(4-4)"]
DIGITS = ["٤ + ٣", "4² + 3", "４＋３", "4\x00", "1234567"]  # of other scripts, and too many
LONG = [
    "9" * 100_000,
    "4" + "+4" * 100_000,
    "(" * 10_000 + "4" + ")" * 10_000,
    "(" * 10_000,
    "1" * 199 + "x",  # a pattern that can split digits in many ways would try them all
    "1 " * 99 + "x",
    " " * 199 + "x",
    "9*" * 99 + "9",
    "<answer>" * 50_000 + "</answer>" * 50_000,
    "=" * 100_000,
    " " * 100_000 + "4",
    "4\n" + " " * 100_000 + "(",
]


@pytest.mark.parametrize("attack", PYTHON + SIGNS + DIGITS + LONG, ids=lambda attack: attack[:12])
def test_attacks_earn_nothing_and_quickly(attack):
    generous = {"numbers": [0, 1, 1, 2, 3, 4, 4, 4, 7, 9, 10], "target": 28}
    started = time.perf_counter()
    assert worth(attack, generous) == worth(f"<answer>{attack}</answer>", generous) == 0.0
    assert time.perf_counter() - started < 0.5


def test_nesting_and_length_limits_are_exact():
    def nested(depth):
        return "(" * depth + "4" + ")" * depth

    assert (worth(nested(countdown.MAX_DEPTH)), worth(nested(countdown.MAX_DEPTH + 1))) == (0.1, 0.0)
    assert (worth("4".rjust(countdown.MAX_CHARACTERS)), worth("4".rjust(countdown.MAX_CHARACTERS + 1))) == (0.1, 0.0)


@given(st.text("0123456789+-*/() =<>answer\n٤²４\x00é", max_size=80))
def test_no_text_raises(text):
    assert worth(text) in (0.0, 0.1, 1.0)
    assert isinstance(countdown.expression(text, 28), str)
