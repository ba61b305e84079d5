"""Checks environments in processes: whatever a function does, the other episodes get their replies."""

import os

import pytest
from tiny import refused

from experiments.tasks import arithmetic
from grpo_jax.data.episodes import MAX_CHARACTERS, Reply
from grpo_jax.data.types import Completion, Turn
from grpo_jax.models.chat import Chat
from grpo_jax.models.huggingface import load_tokenizer
from grpo_jax.tasks.environments import environment_in_processes, open_environment

# A user's file. `act` does what the action says in Python.
FILE = """
import asyncio, os, time
from grpo_jax.data.episodes import Reply


def act(example, transcript, key):
    return eval(transcript[-1].action)


async def later(example, transcript, key):
    await asyncio.sleep(example["seconds"])
    return Reply(f"{[(turn.action.ids, turn.observation) for turn in transcript]} {key}")


def make(word):
    return lambda example, transcript, key: Reply(word)


def make_nothing():
    return 3
"""
FINE = 'Reply("well", reward=1)'


def encode(text):
    return [ord(character) for character in text]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("environments") / "actions.py"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module")
def actor(file):
    with environment_in_processes(f"{file}:act", encode, deadline=0.5, workers=1, memory_mb=600) as environment:
        yield environment


def ask(environment, *words, examples=None):
    transcripts = [[Turn(Completion(word, (1, 2)))] for word in words]
    return environment.ask(examples or [{}] * len(words), transcripts, [(0, i) for i in range(len(words))])


def test_replies_come_as_they_were_given(actor):
    replies = Reply("well", reward=1.0), Reply(done=True, reward=0.5), Reply(ids=[1, 2])
    assert ask(actor, FINE, "Reply(done=True, reward=0.5)", "Reply(ids=(1, 2))") == list(replies)
    assert int(ask(actor, "Reply(str(os.getpid()))")[0].text) != os.getpid()
    assert len(actor.source) == 64  # of the file, for what a run depends on


@pytest.mark.parametrize("in_chat", [True, False])
def test_replies_in_chat_runs_are_messages(file, tmp_path, in_chat):
    arithmetic.TEXT.save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.chat_template = "{% for m in messages %}={{ m.content }}+{% endfor %}"
    with open_environment(Chat(tokenizer), in_chat, environment=f"{file}:act") as environment:
        ids = environment.encode("12")
        assert tokenizer.decode(ids) == ("+=12+" if in_chat else "12")
        assert (environment.read and environment.read(ids)) == ({"role": "user", "content": "12"} if in_chat else None)


FAILURES = [
    ("time.sleep(1000)", "timeout", "actions.py"),
    ("1 / 0", "raised", "ZeroDivisionError"),
    ("Reply('a', reward=__import__('numpy').complex64(1j))", "not a reply", "a reward that is no finite number"),
    ("Reply('a' * 2**30)", "raised", "MemoryError"),
    ("os._exit(3)", "died", "exit status 3"),
    ("'well'", "not a reply", "str"),
    ("Reply(3)", "not a reply", "int"),
    ("Reply('well', reward=float('nan'))", "not a reply", "number"),
    ("Reply(chr(0xd800))", "not a reply", "unicode"),
]


@pytest.mark.parametrize(("action", "failure", "message"), FAILURES)
def test_failed_replies_are_reported_and_harm_no_other(actor, action, failure, message):
    before, bad, after = ask(actor, FINE, action, FINE)
    assert before == after == Reply("well", reward=1.0)
    assert bad.failure == failure
    assert message in bad.message
    assert actor.messages[failure] == bad.message


def test_replies_beyond_every_budget_are_cut(file):
    odd = "'\\U0001f600\\x00\\u202e' * 80000"
    with environment_in_processes(f"{file}:act", encode, workers=1, memory_mb=600) as environment:
        replies = ask(environment, "Reply('a' * 2**27)", f"Reply({odd})", "Reply(ids=[1] * 10**6)")
    assert len(replies[0].text) == len(replies[2].ids) == MAX_CHARACTERS + 1
    assert replies[1].text == eval(odd)
    assert not replies[2].failure


def test_async_environments_see_transcripts_within_the_budget(file):
    transcript = [Turn(Completion("a", (1,)), Completion("b", (2,))), Turn(Completion("c", (3,)))]
    with environment_in_processes(f"{file}:later", encode, workers=1, budget=0.6) as environment:
        (reply,) = environment.ask([{"seconds": 0.01}], [transcript], [(5, 6)])
        late = ask(environment, "a", "b", examples=[{"seconds": 0.0}, {"seconds": 1000.0}])
    assert reply.text == "[((1,), 'b'), ((3,), None)] (5, 6)"
    assert [reply.failure for reply in late] == ["", "budget"]


def test_a_function_may_make_the_environment(file):
    with environment_in_processes(f"{file}:make", encode, arguments={"word": "x"}, workers=1) as environment:
        assert ask(environment, "any")[0].text == "x"


UNLOADABLE = [("make", {"wrong": 1}, "example, transcript, key"), ("make_nothing", {}, "must return the environment")]


@pytest.mark.parametrize(("name", "arguments", "words"), UNLOADABLE)
def test_what_cannot_be_loaded_is_refused(file, name, arguments, words):
    environment = environment_in_processes(f"{file}:{name}", encode, arguments=arguments, workers=1)
    with refused(words), environment:
        pass
