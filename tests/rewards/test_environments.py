"""Environments in processes: whatever a function does, the other episodes have their replies."""

import os

import pytest

from grpo_jax.data.episodes import MAX_CHARACTERS, Reply
from grpo_jax.data.types import Completion, Turn
from grpo_jax.errors import UsageError
from grpo_jax.tasks.environments import environment_in_processes

FILE = """
import asyncio, os, re, signal, sys, time
from grpo_jax.data.episodes import Reply


def fail():
    raise RuntimeError("it raised")


ACTIONS = {
    "fine": lambda: Reply("well", reward=1),
    "done": lambda: Reply(done=True, reward=0.5),
    "ids": lambda: Reply(ids=(1, 2)),
    "sleeps": lambda: time.sleep(1000),
    "holds the lock": lambda: re.match("(a+)+$", "a" * 64 + "b"),
    "raises": fail,
    "exits": lambda: sys.exit(0),
    "os._exit": lambda: os._exit(3),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "a gigabyte": lambda: Reply("a" * 2**30),
    "within memory": lambda: Reply("a" * 2**27),
    "a million tokens": lambda: Reply(ids=[1] * 10**6),
    "a text": lambda: "well",
    "nothing": lambda: None,
    "a number": lambda: Reply(3),
    "nan": lambda: Reply("well", reward=float("nan")),
    "no unicode": lambda: Reply("\\ud800"),
    "other unicode": lambda: Reply("\\U0001f600\\x00\\u202e" * 80000),
    "its number": lambda: Reply(str(os.getpid())),
}


def act(example, transcript, key):
    return ACTIONS[transcript[-1].action]()


async def later(example, transcript, key):
    await asyncio.sleep(example["seconds"])
    return Reply(f"{[(turn.action.ids, turn.observation) for turn in transcript]} {key}")


def make(word):
    return lambda example, transcript, key: Reply(word)


def make_nothing():
    return 3
"""


def encode(text):
    return [ord(character) for character in text]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("environments") / "actions.py"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module")
def actor(file):
    with environment_in_processes(f"{file}:act", encode, deadline=0.5, workers=1, memory_mb=600) as found:
        yield found


def ask(environment, *words, examples=None):
    said = [[Turn(Completion(word, (1, 2)))] for word in words]
    return environment.ask(examples or [{}] * len(words), said, [(0, i) for i in range(len(words))])


def test_replies_come_as_they_were_given(actor):
    assert ask(actor, "fine", "done", "ids") == [
        Reply("well", reward=1.0),
        Reply(done=True, reward=0.5),
        Reply(ids=[1, 2]),
    ]
    assert int(ask(actor, "its number")[0].text) != os.getpid()
    assert len(actor.source) == 64  # of the file, for what a run depends on


@pytest.mark.parametrize(
    ("word", "failure", "message"),
    [
        ("sleeps", "timeout", "in <lambda>"),
        ("holds the lock", "timeout", "in <lambda>"),
        ("raises", "raised", "it raised"),
        ("exits", "died", "exit"),
        ("os._exit", "died", "exit status 3"),
        ("segfault", "died", "Segmentation"),
        ("a gigabyte", "raised", "MemoryError"),
        ("a text", "not a reply", "str"),
        ("nothing", "not a reply", "NoneType"),
        ("a number", "not a reply", "int"),
        ("nan", "not a reply", "number"),
        ("no unicode", "not a reply", "unicode"),
    ],
)
def test_what_gives_no_reply_is_told_and_harms_no_other(actor, word, failure, message):
    before, bad, after = ask(actor, "fine", word, "fine")
    assert before == after == Reply("well", reward=1.0)
    assert bad.failure == failure
    assert message in bad.message
    assert actor.messages[failure] == bad.message


def test_long_texts_are_cut_where_no_budget_has_room_for_them(file):
    with environment_in_processes(f"{file}:act", encode, workers=1, memory_mb=600) as environment:
        long, odd, tokens = ask(environment, "within memory", "other unicode", "a million tokens")
    assert len(long.text) == MAX_CHARACTERS + 1
    assert odd.text == "\U0001f600\x00\u202e" * 80000
    assert not tokens.failure
    assert len(tokens.ids) == MAX_CHARACTERS + 1


def test_async_functions_and_what_they_are_told(file):
    with environment_in_processes(f"{file}:later", encode, workers=2) as environment:
        transcript = [Turn(Completion("a", (1,)), Completion("b", (2,))), Turn(Completion("c", (3,)))]
        (reply,) = environment.ask([{"seconds": 0.01}], [transcript], [(5, 6)])
    assert reply.text == "[((1,), 'b'), ((3,), None)] (5, 6)"


def test_a_turn_has_a_budget(file):
    with environment_in_processes(f"{file}:later", encode, workers=1, budget=0.6) as environment:
        replies = ask(environment, "a", "b", examples=[{"seconds": 0.0}, {"seconds": 1000.0}])
    assert [reply.failure for reply in replies] == ["", "budget"]


def test_functions_that_make_one(file):
    with environment_in_processes(f"{file}:make", encode, arguments={"word": "x"}, workers=1) as environment:
        assert ask(environment, "any")[0].text == "x"


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("nobody", None, "the environment .*nobody"),
        ("make", {"wrong": 1}, "example, transcript, key"),
        ("make_nothing", {}, "must return the environment"),
    ],
)
def test_what_cannot_be_loaded_is_told_in_a_sentence(file, name, arguments, words):
    with (
        pytest.raises(UsageError, match=words) as error,
        environment_in_processes(f"{file}:{name}", encode, arguments=arguments, workers=1),
    ):
        pass
    assert "\n" not in str(error.value)
