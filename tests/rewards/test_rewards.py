"""Rewards: put together, built in, and in processes that are killed when they hang."""

import asyncio
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.data.types import Completion, Span, Turn
from grpo_jax.errors import UsageError
from grpo_jax.functional import overlong_penalty
from grpo_jax.rewards import builtin
from grpo_jax.rewards.processes import REASONS, Grader
from grpo_jax.rewards.reward import Component, open_rewards, score_completions
from grpo_jax.rewards.worker import load

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared/data"
BUILTIN = "grpo_jax.rewards.builtin"
HAS_MATH_VERIFY = importlib.util.find_spec("math_verify") is not None

# What a user's file might do. `act` does what the text of its first completion says.
FILE = r"""
import asyncio, os, re, signal, subprocess, sys, time

from grpo_jax.rewards import worker


def send(answer):
    return os.write(worker.answers.fileno(), answer)


def act(examples, completions):
    return ACTIONS[completions[0]](len(completions))


def fail(count):
    raise ValueError("no reward for you")


def exit_softly(count):
    sys.exit(3)


def write(file_number):
    def action(count):
        for _ in range(1024):
            os.write(file_number, b"x" * 2**20)
        return [1.0] * count
    return action


def endless():
    while True:
        yield 1.0


def let_go():
    # Starts a child that is not killed with this process, and has all of its files.
    if os.fork() == 0:
        os.setsid()
        time.sleep(10)
        os._exit(0)


ACTIONS = {
    "fine": lambda count: [1.0] * count,
    "none": lambda count: [None] * count,
    "sleeps": lambda count: time.sleep(1000),
    "holds the lock": lambda count: re.match("(a+)+$", "a" * 64 + "b"),
    "raises": fail,
    "sys.exit": exit_softly,
    "os._exit": lambda count: os._exit(3),
    "segfault": lambda count: os.kill(os.getpid(), signal.SIGSEGV),
    "aborts": lambda count: os.abort(),
    "kills its group": lambda count: os.killpg(0, signal.SIGKILL),
    "closes everything": lambda count: os.closerange(0, 1000),
    "nan": lambda count: [float("nan")] * count,
    "inf": lambda count: [float("-inf")] * count,
    "more than float32": lambda count: [1e300] * count,
    "more than a float": lambda count: [10**1000] * count,
    "one too many": lambda count: [1.0] * (count + 1),
    "none at all": lambda count: [],
    "a million": lambda count: [1.0] * 10**6,
    "without end": lambda count: endless(),
    "a word": lambda count: ["well done"] * count,
    "a list": lambda count: [[1.0, 2.0]] * count,
    "spans outside": lambda count: [[(0, 1000, 1.0)]] * count,
    "a span of nan": lambda count: [[(0, 1, 1.0), (1, 2, float("nan"))]] * count,
    "a text": lambda count: "1" * count,
    "a dictionary": lambda count: {i: 1.0 for i in range(count)},
    "nothing": lambda count: None,
    "allocates": lambda count: [float(len(bytearray(2**34)))],
    "a gigabyte to stdout": write(1),
    "a gigabyte to stderr": write(2),
    "reads its input": lambda count: [float(len(sys.stdin.read()))] * count,
    "has jax": lambda count: [float("jax" in sys.modules)] * count,
    "its number": lambda count: [float(os.getpid())] * count,
    "naps, its number": lambda count: [time.sleep(0.1) or float(os.getpid())] * count,
    "a child that is let go": lambda count: let_go() or time.sleep(1000),
    "an answer that is too long": lambda count: send(b"1" * 2**26) and time.sleep(1000),
    "half of an answer": lambda count: send(b"[") and time.sleep(1000),
    "a pickle": lambda count: send(b"\x80\x04N.\n"),
    "another shape": lambda count: send(b"[]\n"),
    "a child's number": lambda count: [float(subprocess.Popen(["sleep", "1000"]).pid)] * count,
}


def sums(examples, completions):
    return [e["plus"] + sum(c.ids) + len(c) + c.truncated for e, c in zip(examples, completions, strict=True)]


async def later(examples, completions):
    await asyncio.sleep(0.01)
    return [float(len(c)) for c in completions]


def times(factor):
    return lambda examples, completions: [factor * len(c) for c in completions]


number = 3
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "actions.py"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module")
def actor(file):
    """One completion a call, so that what follows a bad one shows that grading goes on."""
    with Grader(f"{file}:act", chunk=1, workers=1, deadline=0.5, budget=30.0, memory_mb=1000) as grader:
        yield grader


def texts(*words):
    return [Completion(word) for word in words]


def graded(grader, *words):
    """Answers, and what they added to the counts."""
    before = Counter(grader.counts)
    answers = grader([{}] * len(words), texts(*words))
    return answers, dict(Counter(grader.counts) - before)


def both_numbers(grader):
    """Waits until both processes of a grader have started, and returns their numbers."""
    numbers = set()
    while len(numbers) < 2:
        numbers |= {*graded(grader, *["naps, its number"] * 2)[0]} - {None}
    return numbers


def is_gone(pid):
    """Whether a process ends within seconds. One that nobody has taken note of yet has ended too."""
    ends = time.monotonic() + 5
    while time.monotonic() < ends:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.01)
    return False


# ---- score


def test_score_is_the_weighted_sum_of_what_applies():
    rewards = {
        "a": Component(lambda examples, completions: [1.0, None, None, np.nan]),
        "b": Component(lambda examples, completions: [0.5, 2.0, None, 1.0], weight=-2.0),
    }
    scores = score_completions(rewards, [{}] * 4, texts(*"wxyz"))
    np.testing.assert_array_equal(scores.rewards, np.float32([0.0, -4.0, 0.0, np.nan]))
    np.testing.assert_array_equal(scores.applicable, [True, True, False, True])
    np.testing.assert_array_equal(scores.components["a"], np.float32([1.0, np.nan, np.nan, np.nan]))
    np.testing.assert_array_equal(scores.components["b"], np.float32([0.5, 2.0, np.nan, 1.0]))
    assert scores.rewards.dtype == np.float32


def test_score_of_one_function():
    scores = score_completions(
        lambda examples, completions: [len(text) for text in completions], [{}] * 2, texts("a", "bc")
    )
    assert scores.rewards.tolist() == [1.0, 2.0]
    assert list(scores.components) == ["reward"]


def test_async_rewards_run_together():
    # Each waits for the other: one after the other they would wait for ever.
    first, second = asyncio.Event(), asyncio.Event()

    def waits(mine, other, value):
        async def reward(examples, completions):
            mine.set()
            await asyncio.wait_for(other.wait(), timeout=5)
            return [value] * len(completions)

        return Component(reward)

    rewards = {"a": waits(first, second, 1.0), "b": waits(second, first, 2.0), "c": Component(lambda e, c: [4.0])}
    assert score_completions(rewards, [{}], texts("x")).rewards.tolist() == [7.0]


def test_async_rewards_run_where_a_loop_runs_already():
    # As in a notebook, whose cells are run by a loop.
    async def lengths(examples, completions):
        await asyncio.sleep(0)
        return [len(text) for text in completions]

    async def cell():
        return score_completions(lengths, [{}] * 2, texts("a", "bc"))

    assert asyncio.run(cell()).rewards.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("answer", [[], [1.0] * 3, [1.0] * 1000, iter([1.0])])
def test_score_refuses_a_wrong_length(answer):
    with pytest.raises(UsageError, match=r"rewards for 2 completions"):
        score_completions({"mine": Component(lambda examples, completions: answer)}, [{}] * 2, texts("a", "b"))


@pytest.mark.parametrize(
    "answer",
    [None, 1.0, ["x", "y"], ["1", "2"], "12", [[1.0], [2.0]], {0: 1.0, 1: 2.0}, {1.0, 2.0}, [10**400, 1]],
)
def test_score_refuses_what_is_no_number(answer):
    with pytest.raises(UsageError, match="mine must return one number"):
        score_completions({"mine": Component(lambda examples, completions: answer)}, [{}] * 2, texts("a", "b"))


def test_spans_are_added_up_by_weight_beside_numbers():
    def lines(examples, completions):
        return [[(0, 1, 0.25), (1, 3, 0.5)], [], None]

    rewards = {"lines": Component(lines, 2.0), "half": Component(lambda *_: [0.5] * 3), "seen": Component(lines, 0.0)}
    scores = score_completions(rewards, [{}] * 3, texts("abc", "de", "f"))
    assert scores.rewards.tolist() == [2.0, 0.5, 0.5]
    assert scores.components["lines"].tolist() == pytest.approx([0.75, 0.0, math.nan], nan_ok=True)
    assert scores.parts.tolist() == [(Span(0, 1, 0.5), Span(1, 3, 1.0)), (), ()]


def test_bad_spans_are_refused_in_a_sentence():
    with pytest.raises(UsageError, match=r"mine must return .* spans\) for each completion: the span from 0 to 9"):
        score_completions({"mine": Component(lambda *_: [[(0, 9, 1.0)]])}, [{}], texts("abc"))


def test_spans_pass_through_another_process_and_bad_ones_cost_no_others(tmp_path):
    (tmp_path / "lines.py").write_text(
        "from grpo_jax.data.types import Span\n"
        "def halves(examples, texts):\n"
        "    return [[Span(0, 2, 1.0), Span(2, 4, 0.5, 'characters')] for _ in texts]\n"
    )
    with Grader(f"{tmp_path}/lines.py:halves") as grader:
        assert grader([{}] * 2, texts("abcd", "abc")) == [(Span(0, 2, 1.0), Span(2, 4, 0.5)), None]
        assert grader.counts["bad spans"] == 1
        assert "from 2 to 4 is not one of a completion of 3 characters" in grader.messages["bad spans"]


# ---- graders that misbehave


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("sleeps", "timeout"),
        ("holds the lock", "timeout"),
        ("raises", "raised"),
        ("allocates", "raised"),
        ("sys.exit", "died"),
        ("os._exit", "died"),
        ("segfault", "died"),
        ("aborts", "died"),
        ("kills its group", "died"),
        ("closes everything", "died"),
        ("a child that is let go", "timeout"),
        ("half of an answer", "timeout"),
        ("an answer that is too long", "died"),
        ("a pickle", "died"),
        ("another shape", "died"),
        ("nan", "nan"),
        ("inf", "nan"),
        ("more than float32", "nan"),
        ("more than a float", "nan"),
        ("one too many", "wrong length"),
        ("none at all", "wrong length"),
        ("a million", "wrong length"),
        ("without end", "wrong length"),
        ("a word", "not numbers"),
        ("a list", "not numbers"),
        ("a text", "not numbers"),
        ("spans outside", "bad spans"),
        ("a span of nan", "nan"),
        ("a dictionary", "not numbers"),
        ("nothing", "not numbers"),
    ],
)
def test_what_fails_is_none_and_counted_and_the_rest_goes_on(actor, action, reason):
    assert graded(actor, "fine", action, "fine") == ([1.0, None, 1.0], {reason: 1})


def test_what_does_not_fail_is_not_counted(file):
    expected = {
        "none": None,
        "a gigabyte to stdout": 1.0,
        "a gigabyte to stderr": 1.0,
        "reads its input": 0.0,
        "has jax": 0.0,
    }
    with Grader(f"{file}:act", chunk=1, workers=1, deadline=20.0) as grader:
        assert graded(grader, *expected) == (list(expected.values()), {})


def test_messages_say_what_happened(actor):
    graded(actor, "raises", "segfault", "a million", "sleeps")
    assert "ValueError: no reward for you" in actor.messages["raised"]
    assert "Segmentation fault" in actor.messages["died"]
    assert "actions.py" in actor.messages["timeout"]  # where it hung
    assert "1000000 rewards for 1 completions" in actor.messages["wrong length"]
    assert all(len(message) < 2500 for message in actor.messages.values())
    assert actor.counts.keys() == set(REASONS)


def test_a_failing_call_takes_its_whole_chunk_and_a_nan_itself_alone(file):
    with Grader(f"{file}:act", chunk=2, workers=1) as grader:
        assert graded(grader, "raises", "fine", "fine", "fine") == ([None, None, 1.0, 1.0], {"raised": 2})
    with Grader(f"{file}:times", arguments={"factor": 1e38}) as grader:
        assert graded(grader, "a", "aaaa", "aa") == ([1e38, None, 2e38], {"nan": 1})


def test_a_budget_bounds_a_function_that_always_hangs(file):
    with Grader(f"{file}:act", chunk=1, workers=1, deadline=0.2, budget=0.8) as grader:
        started = time.monotonic()
        answers, counts = graded(grader, *["sleeps"] * 40)
        assert time.monotonic() - started < 3.0  # 40 deadlines are 8 seconds
        assert answers == [None] * 40
        assert counts.keys() == {"timeout", "budget"}
        assert sum(counts.values()) == 40
        started = time.monotonic()
        while (answers := graded(grader, "fine")[0]) == [None] and time.monotonic() - started < 20:
            pass  # the next step has a budget of its own, in which the process may not have started again yet
        assert answers == [1.0]


def test_a_budget_ends_a_call_before_its_deadline(file):
    with Grader(f"{file}:act", chunk=1, workers=2, deadline=20.0, budget=0.5) as grader:
        both_numbers(grader)
        assert graded(grader, "sleeps", "fine", "fine") == ([None, 1.0, 1.0], {"budget": 1})


def test_workers_run_at_once(file):
    with Grader(f"{file}:act", chunk=1, workers=2, deadline=5.0) as grader:
        both_numbers(grader)
        assert grader.counts == dict.fromkeys(REASONS, 0)


def test_workers_are_kept_and_replaced_when_they_died_between_calls(actor):
    (first,), (same,) = graded(actor, "its number")[0], graded(actor, "its number")[0]
    assert first == same != os.getpid()
    os.kill(int(first), signal.SIGKILL)
    assert is_gone(int(first))
    (other,), counts = graded(actor, "its number")
    assert other not in (first, None)
    assert counts == {}


def test_a_worker_that_dies_with_nothing_to_do_costs_nothing(file):
    with Grader(f"{file}:act", chunk=1, workers=2, deadline=5.0) as grader:
        numbers = both_numbers(grader)
        first = graded(grader, "its number")[0][0]
        (idle,) = numbers - {first}
        killer = threading.Timer(0.05, os.kill, (int(idle), signal.SIGKILL))
        killer.start()
        assert graded(grader, "naps, its number") == ([first], {})
        killer.join()


@pytest.mark.parametrize("chunk", [1, 3, None])
def test_rewards_do_not_depend_on_chunks(file, chunk):
    examples = [{"plus": 0.1 * i} for i in range(8)]
    completions = [Completion("x" * i, range(i), truncated=i % 2 == 0) for i in range(8)]
    expected = [0.1 * i + sum(range(i)) + i + (i % 2 == 0) for i in range(8)]
    with Grader(f"{file}:sums", chunk=chunk, workers=2) as grader:
        assert grader(examples, completions) == expected
        assert grader(examples, completions) == expected
        assert grader([], []) == []


def test_a_large_batch_passes(file):
    completions = [Completion("é" * 20_000, range(5_000)) for _ in range(32)]
    with Grader(f"{file}:sums", deadline=20.0) as grader:
        assert grader([{"plus": 0.0}] * 32, completions) == [sum(range(5_000)) + 20_000.0] * 32


def test_async_functions_and_functions_that_return_one(file):
    with Grader(f"{file}:later", workers=1) as grader:
        assert graded(grader, "a", "bc")[0] == graded(grader, "a", "bc")[0] == [1.0, 2.0]
    with Grader(f"{file}:times", arguments={"factor": 3.0}, workers=1) as grader:
        rewards = {"times": Component(grader), "one": Component(lambda examples, completions: [1.0, None])}
        assert score_completions(rewards, [{}] * 2, texts("a", "bc")).rewards.tolist() == [4.0, 6.0]


def test_a_path_is_relative_to_where_the_grader_was_made(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    with Grader("actions.py:act", chunk=1, workers=1) as grader:
        monkeypatch.chdir("/")
        assert graded(grader, "os._exit", "fine")[0] == [None, 1.0]  # loaded again


# ---- what a user can mend


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("json:no_such_function", "json has no 'no_such_function'"),
        ("no/such/file.py:f", "there is no file"),
        ("os:sep", "is no function but of type str"),
        ("json", "must be module:function"),
        (":f", "must be module:function"),
    ],
)
def test_what_cannot_be_loaded_is_told_in_one_sentence(spec, said):
    with pytest.raises(UsageError, match=said) as caught:
        load("reward", spec)
    assert "\n" not in str(caught.value)


def test_a_module_of_the_current_folder_is_loaded_by_an_installed_command_too(tmp_path, monkeypatch):
    (tmp_path / "of_this_folder.py").write_text("def f(examples, completions):\n    return [1.0] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    assert load("reward", "of_this_folder:f")([{}], texts("a")) == [1.0]


def test_what_makes_a_reward_may_call_its_keywords_as_it_likes(tmp_path):
    body = "def f(prompts):\n    return lambda examples, completions: [prompts] * len(completions)\n"
    (tmp_path / "made.py").write_text(body)
    assert load("reward", f"{tmp_path}/made.py:f", {"prompts": 3.0})([{}], texts("a")) == [3.0]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("g = 1", "has no 'f'"),
        ("def f(:", "SyntaxError"),
        ("raise SystemExit(1)", "SystemExit"),
        ("from . import other", "name it as package.module:function"),
        ("import os; os._exit(7)", "exit status 7"),
        ("import time; time.sleep(1000)", "cannot be loaded: no answer within its deadline"),
        (
            "def f(completions, word, **columns): pass",
            r"takes completions first, .* make it f\(examples, completions\)",
        ),
    ],
)
def test_a_grader_says_at_its_start_that_it_cannot_load_a_file(tmp_path, body, said):
    (tmp_path / "broken.py").write_text(body)
    with pytest.raises(UsageError, match=said) as caught:
        Grader(f"{tmp_path}/broken.py:f", workers=1, start_deadline=0.5 if "sleep" in body else 20.0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "arguments", "said"),
    [
        (f"{BUILTIN}:matches", {"no_such": 1}, "refuses its arguments"),
        (f"{BUILTIN}:matches", {"pattern": "("}, "no regular expression"),
        ("json:dumps", {"obj": 1}, "must return the reward"),
    ],
)
def test_wrong_arguments_of_a_reward_are_told(spec, arguments, said):
    with pytest.raises(UsageError, match=said):
        load("reward", spec, arguments)


KINDS = """
def plain(examples, completions, *, scale=1.0, power=1):
    return [scale * len(c) ** power for c in completions]

def needs(examples, completions, scale):
    return [scale * len(c) for c in completions]

async def waits(examples, completions, *, scale):
    return [scale * len(c) for c in completions]

def makes(scale):
    return lambda examples, completions: [scale * len(c) for c in completions]

def makes_of_two(scale, power=1):
    return lambda examples, completions: [scale * len(c) ** power for c in completions]
"""


@pytest.mark.parametrize("text", ["plain(scale=2)", "needs(scale=2)", "waits(scale=2)", "makes(scale=2)"])
def test_keywords_are_for_the_reward_or_for_what_makes_it(tmp_path, text):
    (tmp_path / "kinds.py").write_text(KINDS)
    with open_rewards([f"it=0.5*{tmp_path}/kinds.py:{text}"], group_size=1) as rewards:
        assert rewards["it"].weight == 0.5
        assert rewards["it"].reward([{}], ["abc"]) == [6.0]


@pytest.mark.parametrize("name", ["plain", "needs", "makes", "makes_of_two"])
def test_other_keywords_are_refused_with_what_was_expected(tmp_path, name):
    (tmp_path / "kinds.py").write_text(KINDS)
    with pytest.raises(UsageError, match=r"\(other\): expected a function of \(examples, completions, \*") as caught:
        load("reward", f"{tmp_path}/kinds.py:{name}", {"other": 1})
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="expected a function of"):
        load("reward", f"{tmp_path}/kinds.py:makes_of_two", {"power": 2})


def test_arguments_that_cannot_be_sent_are_told():
    with pytest.raises(UsageError, match="must be picklable"):
        Grader(f"{BUILTIN}:exact_answer", arguments={"extract": lambda text: text})


@pytest.mark.parametrize(
    "wrong",
    [
        {"deadline": 0},
        {"deadline": float("nan")},
        {"deadline": 1e300},
        {"budget": float("inf")},
        {"budget": 1e10},
        {"start_deadline": 1e10},
        {"chunk": 0},
        {"workers": -1},
        {"memory_mb": 0},
    ],
)
def test_impossible_arguments_are_refused(wrong):
    with pytest.raises(UsageError, match=f"{next(iter(wrong))} is .*: it must be"):
        Grader("json:dumps", **wrong)


def test_the_longest_deadline_and_budget_work(file):
    most, longest = threading.TIMEOUT_MAX, {"workers": 1, "chunk": "prompt"}
    with Grader(f"{file}:act", deadline=most, budget=most, start_deadline=most, **longest) as grader:
        assert graded(grader, "fine", "fine")[0] == [1.0, 1.0]  # two have twice the deadline


def test_the_least_memory_is_enough_for_a_number(file):
    with Grader(f"{file}:act", workers=1, memory_mb=1) as grader:
        assert graded(grader, "fine")[0] == [1.0]


def test_examples_that_cannot_be_sent_and_closed_graders_are_told(file):
    with Grader(f"{file}:act", workers=1) as grader:
        with pytest.raises(UsageError, match="must be picklable"):
            grader([{"f": lambda: 1}], texts("fine"))
        with pytest.raises(UsageError, match="give one for each"):
            grader([{}], texts("fine", "fine"))
        assert graded(grader, "fine")[0] == [1.0]
    with pytest.raises(UsageError, match="is closed"):
        grader([{}], texts("fine"))


# ---- nothing is left behind


def test_no_process_is_left_when_it_is_closed(file):
    with Grader(f"{file}:act", chunk=1, workers=1, deadline=0.5) as grader:
        children, _ = graded(grader, "its number", "a child's number", "sleeps", "its number", "a child's number")
        assert is_gone(int(children[0]))  # it was killed with the children that it had
        assert is_gone(int(children[1]))
        os.kill(int(children[3]), 0)  # those in use are there
        os.kill(int(children[4]), 0)
    assert is_gone(int(children[3]))
    assert is_gone(int(children[4]))


@pytest.mark.parametrize(
    "ending",
    ["forgotten", "killed while it sleeps", "killed while it holds the lock", "killed with a fork that lives on"],
)
def test_no_process_is_left_when_the_parent_ends(file, ending):
    program = f"""
import os, sys, time
from grpo_jax.rewards.processes import Grader
from grpo_jax.data.types import Completion
grader = Grader({f"{file}:act"!r}, chunk=1, workers=1, deadline=100.0, budget=100.0)
print(*map(int, grader([{{}}] * 2, [Completion("its number"), Completion("a child's number")])), flush=True)
if "fork" in sys.argv[1] and os.fork() == 0:
    os.close(1)
    time.sleep(8)
    os._exit(0)
if sys.argv[1] != "forgotten":
    grader([{{}}], [Completion(sys.argv[1].partition("while it ")[2] or "sleeps")])
"""
    command = [sys.executable, "-c", program, ending]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        if ending != "forgotten":
            time.sleep(0.2)
            assert parent.poll() is None
            parent.kill()
        parent.wait(timeout=20)
    assert len(pids) == 2
    assert all(map(is_gone, pids))


# ---- answers


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        ("1,000", "1000.0", True),
        ("$18", "18", True),
        ("-$1,234.50", "-1234.5", True),
        ("$-5", "-5", True),
        ("50%", "50", True),
        ("1/2", "0.5", True),
        (".5", "0.50", True),
        ("1e3", "1000", True),
        ("18.", "18", True),
        ("−3", "-3", True),
        ("3", "-3", False),
        ("1,2", "12", False),
        ("1,0000", "10000", False),
        ("1/0", "1/0", False),
        ("18 apples", "18", False),
        ("0.30000000000000004", "0.3", False),
        ("1e999999999", "1", False),
        ("9" * 100_000, "9", False),
        ("__import__('os')", "1", False),
        ("", "", False),
        ("nan", "nan", False),
    ],
)
def test_numbers_are_compared_as_numbers(given, expected, same):
    assert builtin.same_number(given, expected) is same


def test_exact_answer():
    examples = [{"goal": "1,000"}, {"goal": "Paris"}, {"goal": "Paris"}, {"goal": 7}]
    reward = builtin.exact_answer("goal")
    assert reward(examples, texts("1000.0 ", "\nParis", "paris", "7.0")) == [1.0, 1.0, 0.0, 1.0]
    assert reward(examples, texts("", "", "It is Paris", "It is 7")) == [0.0, 0.0, 0.0, 0.0]
    last = builtin.exact_answer("goal", extract=builtin.last_number)
    assert last(examples[-1:] * 2, texts("It is 7.", "None")) == [1.0, 0.0]
    assert last([{"goal": 1000}], texts("It is 1e3.")) == [1.0]
    with pytest.raises(UsageError, match="'answer'"):
        builtin.exact_answer()(examples, texts(*"abcd"))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("first 3, then 18.", "18"),
        ("10-5", "5"),
        ("it fell to -5 degrees", "-5"),
        ("costs -$5.25!", "-$5.25"),
        ("x2 and v1.5", None),
        ("a total of 1,234,567 eggs", "1,234,567"),
        ("(1,2)", "2"),
        ("half is 1/2", "1/2"),
        ("about 1e3 of them", "1e3"),
        ("then -2.5E-3.", "-2.5E-3"),
        ("the colour 1e3f", "1"),
        ("none", None),
        ("", None),
    ],
)
def test_last_number(text, number):
    assert builtin.last_number(text) == number


@pytest.mark.parametrize(
    ("text", "strict", "lenient"),
    [
        ("9 * 2 = 18\n#### 18", 1.0, 1.0),
        ("#### $18.00\n", 1.0, 1.0),
        ("#### 3\n#### 18", 1.0, 1.0),
        ("She makes 18 dollars.", 0.0, 1.0),
        ("#### 18 of 20", 0.0, 0.0),
        ("#### 18\nthat is 3 times 6", 1.0, 0.0),
        ("#### 180", 0.0, 0.0),
        ("####", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_gsm8k_by_hand(text, strict, lenient):
    for answer in ("16 - 3 = 13\n#### 18", "18"):
        assert builtin.gsm8k_answer()([{"answer": answer}], texts(text)) == [strict]
        assert builtin.gsm8k_answer(lenient=True)([{"answer": answer}], texts(text)) == [lenient]


def rows(name):
    path = DATA / name
    if not path.exists():
        pytest.skip(f"no {path.name} here")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("lenient", [False, True])
def test_every_gsm8k_solution_is_right_and_those_of_others_are_wrong(lenient):
    solutions = [row["answer"] for row in rows("gsm8k/test.jsonl")]
    reward = builtin.gsm8k_answer(lenient=lenient)
    examples = [{"answer": solution} for solution in solutions]
    assert reward(examples, texts(*solutions)) == [1.0] * len(solutions)
    others = solutions[1:] + solutions[:1]
    numbers = [float(solution.rpartition("#### ")[2].replace(",", "")) for solution in solutions]
    equal = [float(a == b) for a, b in zip(numbers, numbers[1:] + numbers[:1], strict=True)]
    assert reward(examples, texts(*others)) == equal
    assert sum(equal) < 0.02 * len(equal)


@pytest.mark.parametrize(
    ("text", "boxed", "stated"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}", r"\frac{1}{2}"),
        (r"\boxed{1} or \boxed{2}", "2", "2"),
        (r"\boxed{\{1\}}", r"\{1\}", r"\{1\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right.", r"\left\{ x \right."),
        (r"\boxed 15$", "15", "15"),
        (r"\fbox{7}", "7", "7"),
        (r"\boxed{1} then \boxed{2", None, "2"),
        ("The answer is 5. I am sure of 3.", None, "5"),
        ("The answer is: $x^2$, as above", None, "x^2"),
        ("so $x=1$ and $y=2$, twice 3", None, "y=2"),
        (r"it costs $\$36$ now", None, r"\$36"),
        ("$$a$$", None, "a"),
        ("about 3 or 4", None, "4"),
        ("no idea", None, None),
    ],
)
def test_where_a_formula_is_found(text, boxed, stated):
    assert builtin.boxed_answer(text) == boxed
    assert builtin.stated_answer(text) == stated


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        (r"\dfrac12", r"\frac{1}{2}", True),
        (r"\frac{1}{2}", "0.5", True),
        (r"-\frac{1}{2}", "-1/2", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})", True),
        ("x = 5", "5", True),
        (r"\text{Evelyn}", "Evelyn", True),
        (r"5\text{ cm}", "5", True),
        (r"\$32,\!348", "32348", True),
        (r"90^\circ", "90", True),
        (r"50\%", "50", True),
        (r"\sqrt2", r"\sqrt{2}", True),
        ("p - q", "p-q", True),
        ("p - q", "q-p", False),
        ("(1,2)", "[1,2]", False),
        ("12", "1,2", False),
        (r"\frac{1}{3}", "0.33", False),
        ("", "", False),
    ],
)
def test_formulas_that_are_the_same_at_sight(given, expected, same):
    assert builtin.same_formula(given, expected) is same


def math500():
    answers = [row["answer"] for row in rows("math500/math500_prompt_answer.jsonl")]
    # The file repeats the answer behind the solution.
    solutions = [row["answer"].rpartition("The answer is:")[0] for row in rows("math500/math500_with_solutions.jsonl")]
    return [{"answer": answer} for answer in answers], solutions


@pytest.mark.parametrize("lenient", [False, True])
def test_every_math500_solution_is_right_and_those_of_others_are_wrong(lenient):
    examples, solutions = math500()
    reward = builtin.math_answer(lenient=lenient, sympy=False)
    assert reward(examples, texts(*solutions)) == [1.0] * 500
    boxes = [rf"\boxed{{{example['answer']}}}" for example in examples]
    others = reward(examples, texts(*boxes[1:], boxes[0]))
    assert sum(others) == 3  # neighbours that are equal: 7 and 7, 3 and 3, 5 and x=5
    if lenient:
        stated = [f"The answer is {example['answer']}" for example in examples]
        dollars = [f"Hence ${example['answer']}$." for example in examples]
        assert reward(examples, texts(*stated)) == [1.0] * 500
        assert reward(examples, texts(*dollars)) == [1.0] * 500


@pytest.mark.skipif(not HAS_MATH_VERIFY, reason="math-verify is not installed")
def test_math_verify_finds_formulas_the_same_under_a_deadline():
    pairs = [
        ("x+1", "1+x", 1.0),
        (r"2\sqrt{2}", r"\sqrt{8}", 1.0),
        (r"\frac{2}{4}", "0.5", 1.0),
        ("x+1", "x-1", 0.0),
        ("not a formula", "7", 0.0),
        (r"__import__('os')._exit(3)", "7", 0.0),
        (r"9^{9^{9^{9}}}", "7", None),
        (r"\{2, 1\}", r"\{1, 2\}", 1.0),
    ]
    arguments = {"lenient": False}
    with Grader(f"{BUILTIN}:math_answer", arguments=arguments, chunk=1, workers=1, deadline=1.5) as grader:
        boxes = texts(*(rf"\boxed{{{given}}}" for given, _, _ in pairs))
        assert grader([{"answer": expected} for _, expected, _ in pairs], boxes) == [reward for _, _, reward in pairs]
        assert {reason: count for reason, count in grader.counts.items() if count} == {"timeout": 1}
    with pytest.raises(UsageError, match="name it to a Grader"):
        builtin.math_answer()


@pytest.mark.skipif(HAS_MATH_VERIFY, reason="math-verify is installed")
def test_math_verify_is_asked_for_where_it_is_missing():
    with pytest.raises(UsageError, match=r"grpo_jax\[math\]"):
        builtin.math_answer(sympy=True)
    assert builtin.math_answer()([{"answer": "1/2"}], texts(r"\boxed{\frac12}")) == [1.0]


# ---- formats and lengths


def test_matches_is_of_the_whole_text_and_over_lines():
    reward = builtin.matches(r"<think>.*</think>\s*\d+")
    given = texts("<think>a\nb</think>\n12", "<think>a</think>", "x<think></think>1", "<think></think>1 x")
    assert reward([{}] * 4, given) == [1.0, 0.0, 0.0, 0.0]


def test_a_catastrophic_pattern_ends_in_a_grader():
    arguments = {"pattern": "(a+)+b"}
    with Grader(f"{BUILTIN}:matches", arguments=arguments, chunk=1, workers=1, deadline=0.5) as grader:
        assert graded(grader, "aab", "a" * 64, "c") == ([1.0, None, 0.0], {"timeout": 1})


def sampled(length, truncated=False):
    return Completion("", range(length), truncated)


def test_length_counts_the_ending_token():
    lengths = [sampled(0), sampled(9), sampled(10), sampled(10, truncated=True), sampled(14), sampled(40)]
    target = builtin.length(target=10)([{}] * 6, lengths)
    assert target == pytest.approx([0.1, 1.0, 0.9, 1.0, 0.5, 0.0])
    assert builtin.length(maximum=10)([{}] * 6, lengths) == [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    for wrong in ({}, {"target": 1, "maximum": 1}, {"target": 0}):
        with pytest.raises(UsageError, match="length"):
            builtin.length(**wrong)


def test_overlong_penalty_is_the_function_of_arrays():
    completions = [sampled(n, truncated=n == 100) for n in range(101)]
    lengths = [min(n + 1, 100) for n in range(101)]
    expected = overlong_penalty(jnp.array(lengths), max_length=100, buffer=20)
    rewards = builtin.overlong_penalty(max_length=100, buffer=20)([{}] * 101, completions)
    np.testing.assert_allclose(rewards, expected, atol=1e-6)
    assert rewards[79] == 0.0  # 80 tokens
    assert rewards[80] == pytest.approx(-0.05)
    assert rewards[100] == -1.0
    with pytest.raises(UsageError, match="buffer is 0"):
        builtin.overlong_penalty(max_length=100, buffer=0)


@pytest.mark.parametrize(
    ("ids", "n", "reward"),
    [
        ([1, 2, 3, 4], 3, 0.0),
        ([1, 1, 1, 1, 1], 3, -2 / 3),  # three times the same
        ([1, 2, 1, 2, 1], 2, -0.5),
        ([1, 2, 1, 2], 1, -0.5),
        ([1, 1], 3, 0.0),
        ([], 3, 0.0),
    ],
)
def test_repetition_by_hand(ids, n, reward):
    assert builtin.repetition(n)([{}], [Completion("", ids)]) == [pytest.approx(reward)]


def test_rewards_read_only_what_the_policy_said():
    call, reply, final = (
        Completion("<call>", [1, 2, 3]),
        Completion("#### 3\n3" * 9, [7] * 99),
        Completion("18", [4, 5]),
    )
    turns = [Turn(call, reply), Turn(final)]
    episode = Completion("".join([call, reply, final]), [*call.ids, *reply.ids, *final.ids], turns=turns)
    rewards = {
        "answer": builtin.exact_answer(),
        "format": builtin.matches(r"\d+"),
        "target": builtin.length(target=7),  # five tokens, and two that end turns
        "overlong": builtin.overlong_penalty(max_length=8, buffer=1),
        "repetition": builtin.repetition(1),
        "lenient": builtin.gsm8k_answer(lenient=True),
    }
    found = {name: reward([{"answer": "18"}], [episode])[0] for name, reward in rewards.items()}
    assert found == {"answer": 1, "format": 1, "target": 1, "overlong": 0, "repetition": 0, "lenient": 1}
    assert builtin.gsm8k_answer()([{"answer": "3"}], [episode]) == [0.0]  # the environment wrote it
    cut = Completion(episode, turns=[turns[0], Turn(Completion("18", [4, 5], truncated=True))], truncated=True)
    assert builtin.length(target=6)([{}], [cut]) == [1.0]


def test_repetition_of_no_tokens_is_refused():
    with pytest.raises(UsageError, match="n is 0"):
        builtin.repetition(0)
