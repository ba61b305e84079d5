"""Checks how rewards are added up, loaded, and run in processes that are killed when they hang."""

import asyncio
import math
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tiny import refused

from grpo_jax.data.types import Completion, Component, Span
from grpo_jax.rewards.processes import Grader
from grpo_jax.rewards.reward import to_rewards
from grpo_jax.rewards.worker import load_function

ROOT = Path(__file__).parents[2]

# A user's file. `act` does what its first completion says in Python, of n completions.
FILE = r"""
import asyncio, os, re, signal, subprocess, sys, time


def act(examples, completions):
    return eval(completions[0], globals() | {"n": len(completions)})


def write(files, data, times=1):
    for file in files:
        try:
            for _ in range(times):
                os.write(file, data)
        except OSError:
            pass
    return True


def let_go():
    # Starts a child that is not killed with this process, and has all of its files.
    if os.fork() == 0:
        os.setsid()
        time.sleep(10)
        os._exit(0)


def sums(examples, completions):
    return [e["plus"] + sum(c.ids) + len(c) + c.truncated for e, c in zip(examples, completions, strict=True)]


def plain(examples, completions, *, scale=1.0, power=1):
    return [scale * len(c) ** power for c in completions]


def needs(examples, completions, scale):
    return [scale * len(c) for c in completions]


async def waits(examples, completions, *, scale=1.0):
    await asyncio.sleep(0.01)
    return [scale * len(c) for c in completions]


def makes(scale):
    return lambda examples, completions: [scale * len(c) for c in completions]


def makes_of_prompts(prompts):
    return makes(prompts)


def of_trl(completions, word, **columns):
    pass


number = 3
"""
FINE = "[1.0] * n"
SLEEPS = "time.sleep(1000)"
PID = "[float(os.getpid())] * n"
NAP = "[time.sleep(0.1) or float(os.getpid())] * n"
CHILD = "[float(subprocess.Popen(['sleep', '1000']).pid)] * n"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "actions.py"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module")
def actor(file):
    """One completion a call, so that what follows a bad one shows that grading continues.

    The file imports numpy, as many do. Within a call that could take longer than the deadline.
    """
    arrays = file.with_name("arrays_actions.py")
    arrays.write_text(f"import numpy{FILE}")
    with Grader(f"{arrays}:act", chunk=1, workers=1, deadline=0.5, budget=30.0, memory_mb=1000) as grader:
        yield grader


def texts(*words):
    return [Completion(word) for word in words]


def graded(grader, *words):
    """Answers, and what they added to the counts."""
    before = Counter(grader.counts)
    answers = grader([{}] * len(words), texts(*words))
    return answers, dict(Counter(grader.counts) - before)


def both_pids(grader):
    """Waits until both processes of a grader have answered side by side, and returns their numbers."""
    pids = set()
    while len(pids) < 2:
        pids |= {*graded(grader, NAP, NAP)[0]} - {None}
    return pids


def is_gone(pid):
    """Tells if a process ends within seconds. One that nobody has taken note of yet has ended too."""
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


# ---- what rewards add up to


def test_scores_are_weighted_sums_of_applicable_rewards():
    rewards = {
        "a": Component(lambda examples, completions: [1.0, None, None, np.nan]),
        "b": Component(lambda examples, completions: [0.5, 2.0, None, 1.0], weight=-2.0),
    }
    scores = to_rewards(rewards).grade([{}] * 4, texts(*"wxyz"))
    np.testing.assert_array_equal(scores.rewards, np.float32([0.0, -4.0, 0.0, np.nan]))
    np.testing.assert_array_equal(scores.applicable, [True, True, False, True])
    np.testing.assert_array_equal(scores.components["a"], np.float32([1.0, np.nan, np.nan, np.nan]))
    assert scores.rewards.dtype == np.float32


def test_one_function_and_bare_functions_become_rewards_once():
    def size(examples, completions):
        return [len(text) for text in completions]

    alone = to_rewards(size)
    assert alone == to_rewards(alone) == to_rewards({"reward": size}) == to_rewards({"reward": Component(size, 1.0)})
    assert to_rewards({"a": size, "b": Component(size, 0.0)}).weights == {"a": 1.0, "b": 0.0}
    assert alone.grade([{}], texts("bc")).rewards.tolist() == [2.0]
    nothing = to_rewards({}).grade([{}], texts("bc"))
    assert (nothing.rewards.tolist(), nothing.applicable.tolist(), nothing.components) == ([0.0], [False], {})


def test_async_rewards_run_concurrently():
    def rewards():
        first, second = asyncio.Event(), asyncio.Event()

        def waits(mine, other, value):  # one after the other they would wait for ever
            async def reward(examples, completions):
                mine.set()
                await asyncio.wait_for(other.wait(), timeout=5)
                return [value] * len(completions)

            return Component(reward)

        return {"a": waits(first, second, 1.0), "b": waits(second, first, 2.0), "c": Component(lambda e, c: [4.0])}

    async def cell():  # of a notebook
        return to_rewards(rewards()).grade([{}], texts("x"))

    assert to_rewards(rewards()).grade([{}], texts("x")).rewards.tolist() == [7.0]
    assert asyncio.run(cell()).rewards.tolist() == [7.0]


def leave(examples, completions):
    sys.exit(0)


async def leave_later(examples, completions):
    sys.exit(0)


async def one_later(examples, completions):
    return [1.0] * len(completions)


@pytest.mark.parametrize("reward", [leave, leave_later])
def test_rewards_that_exit_do_not_end_training_silently(reward):
    with refused(r"called sys.exit\(0\)"):
        to_rewards(reward).grade([{}], texts("x"))
    assert to_rewards(one_later).grade([{}], texts("x")).rewards.tolist() == [1.0]  # the next call is not affected


def test_spans_are_added_up_by_weight_beside_numbers():
    def lines(examples, completions):
        return [[(0, 1, 0.25), (1, 3, 0.5)], [], None]

    rewards = {"lines": Component(lines, 2.0), "half": Component(lambda *_: [0.5] * 3), "seen": Component(lines, 0.0)}
    scores = to_rewards(rewards).grade([{}] * 3, texts("abc", "de", "f"))
    assert scores.rewards.tolist() == [2.0, 0.5, 0.5]
    assert scores.components["lines"].tolist() == pytest.approx([0.75, 0.0, math.nan], nan_ok=True)
    assert scores.parts.tolist() == [(Span(0, 1, 0.5), Span(1, 3, 1.0)), (), ()]


# ---- functions that misbehave


BAD_ANSWERS = [
    ("[1.0] * (n + 1)", "wrong length"),
    ("[1.0] * 10**6", "wrong length"),
    ("iter(int, 1)", "wrong length"),  # it has no end
    ("['1'] * n", "not numbers"),
    ("[[1.0, 2.0]] * n", "not numbers"),
    ("{i: 1.0 for i in range(n)}", "not numbers"),
    ("{i + 0.5 for i in range(n)}", "not numbers"),
    ("None", "not numbers"),
    ("__import__('numpy').full(n, 1 + 2j)", "not numbers"),
    ("[__import__('numpy').array(1 + 2j)] * n", "not numbers"),
    ("[[(0, 1, __import__('numpy').complex64(2j))]] * n", "bad spans"),
    ("[10**1000] * n", "nan"),
    ("[[(0, 1000, 1.0)]] * n", "bad spans"),
]


@pytest.mark.parametrize(("answer", "reason"), BAD_ANSWERS)
def test_invalid_rewards_spoil_one_call_or_are_refused(actor, answer, reason):
    assert graded(actor, FINE, answer, FINE) == ([1.0, None, 1.0], {reason: 1})
    with refused("mine must return one number"):
        to_rewards({"mine": Component(lambda *_: eval(answer, {"n": 2}))}).grade([{}] * 2, texts("a", "b"))


def test_nested_rewards_name_their_type():
    with refused("must return one number .* the function returned a reward of type list"):
        to_rewards({"mine": Component(lambda *_: [[1.0]])}).grade([{}], texts("a"))


FAILURES = [
    ("[float('nan')] * n", "nan"),
    ("[float('-inf')] * n", "nan"),
    ("[1e300] * n", "nan"),  # float32 does not hold it
    ("[[(0, 1, 1.0), (1, 2, float('nan'))]] * n", "nan"),
    (SLEEPS, "timeout"),
    ("re.match('(a+)+$', 'a' * 64 + 'b')", "timeout"),  # it holds the interpreter's lock
    ("let_go() or time.sleep(1000)", "timeout"),
    ("1 / 0", "raised"),
    ("bytearray(2**34)", "raised"),
    ("sys.exit(3)", "died"),
    ("os.kill(os.getpid(), signal.SIGSEGV)", "died"),
    ("os.killpg(0, signal.SIGKILL)", "died"),
    ("os.closerange(0, 1000)", "died"),
]


@pytest.mark.parametrize(("action", "reason"), FAILURES)
def test_failed_calls_give_none_and_are_counted(actor, action, reason):
    assert graded(actor, FINE, action, FINE) == ([1.0, None, 1.0], {reason: 1})


class MakesFolder:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["too long", "half", "another shape", "a pickle", "a pickle in a line"])
def test_bytes_written_to_our_pipes_are_never_unpickled(actor, tmp_path, kind):
    pickled = pickle.dumps(MakesFolder(tmp_path / "made"))
    # As a line, and behind its length in four bytes: the ways in which `multiprocessing` and we send things.
    sent = {
        "too long": "b'\\x7f\\xff\\xff\\xff' + b'1' * 2**26",
        "half": repr(b"\x00\x00\x00\x40["),
        "another shape": repr(b"\x00\x00\x00\x02[]\n"),
        "a pickle": repr(struct.pack("!i", len(pickled)) + pickled + b"\n"),
        "a pickle in a line": repr(pickled + b"\n"),
    }[kind]
    answers, counts = graded(actor, f"write(range(3, 64), {sent}) and time.sleep(1000)", FINE)
    assert (answers, sum(counts.values())) == ([None, 1.0], 1)
    assert not (tmp_path / "made").exists()


def test_what_does_not_fail_is_not_counted(file):
    expected = {
        "[None] * n": None,
        "[float(write([1], b'x' * 2**20, 1024))] * n": 1.0,
        "[float(write([2], b'x' * 2**20, 1024))] * n": 1.0,
        "[float(len(sys.stdin.read()))] * n": 0.0,
        "[float('jax' in sys.modules)] * n": 0.0,
    }
    with Grader(f"{file}:act", chunk=1, workers=1, deadline=20.0) as grader:
        assert graded(grader, *expected) == (list(expected.values()), {})


def test_messages_say_what_happened(actor):
    graded(actor, "1 / 0", "os.kill(os.getpid(), signal.SIGSEGV)", "[1.0] * 10**6", SLEEPS)
    assert "ZeroDivisionError: division by zero" in actor.messages["raised"]
    assert "Segmentation fault" in actor.messages["died"]
    assert "actions.py" in actor.messages["timeout"]  # where it hung
    assert "1000000 rewards for 1 completions" in actor.messages["wrong length"]
    assert all(len(message) < 2500 for message in actor.messages.values())
    assert actor.messages.keys() <= actor.counts.keys()


def test_failures_cost_a_chunk_but_nan_only_itself(file):
    with Grader(f"{file}:act", chunk=2, workers=1) as grader:
        assert graded(grader, "1 / 0", FINE, FINE, FINE) == ([None, None, 1.0, 1.0], {"raised": 2})
        spans = "[[(0, 2, 1.0), (2, 90, 0.5)], [(0, 99, 0.5)]]"
        assert graded(grader, spans.ljust(90), "") == ([(Span(0, 2, 1.0), Span(2, 90, 0.5)), None], {"bad spans": 1})
        assert "from 0 to 99" in grader.messages["bad spans"]
    with Grader(f"{file}:makes", arguments={"scale": 1e38}) as grader:
        assert graded(grader, "a", "aaaa", "aa") == ([1e38, None, 2e38], {"nan": 1})


def test_budget_ends_hanging_calls_before_their_deadline(file):
    with Grader(f"{file}:act", chunk=1, workers=1, deadline=0.2, budget=0.8) as grader:
        started = time.monotonic()
        answers, counts = graded(grader, *[SLEEPS] * 40)
        assert time.monotonic() - started < 3.0  # 40 deadlines are 8 seconds
        assert answers == [None] * 40
        assert (counts.keys(), sum(counts.values())) == ({"timeout", "budget"}, 40)
        while (answers := graded(grader, FINE)[0]) == [None] and time.monotonic() - started < 20:
            pass  # the next step has a budget of its own, in which the process may not have started again yet
        assert answers == [1.0]
    with Grader(f"{file}:act", chunk=1, workers=2, deadline=20.0, budget=0.5) as grader:
        both_pids(grader)
        assert graded(grader, SLEEPS, FINE, FINE) == ([None, 1.0, 1.0], {"budget": 1})


# ---- processes


def test_processes_are_reused_and_replaced_after_dying(actor):
    (first,), (same,) = graded(actor, PID)[0], graded(actor, PID)[0]
    assert first == same != os.getpid()
    os.kill(int(first), signal.SIGKILL)
    with suppress(ChildProcessError):  # the grader may have taken note of it
        os.waitid(os.P_PID, int(first), os.WEXITED | os.WNOWAIT)  # until all its threads have ended
    assert is_gone(int(first))
    (other,), counts = graded(actor, PID)
    assert other not in (first, None)
    assert counts == {}


def test_death_of_an_idle_process_costs_nothing(file):
    with Grader(f"{file}:act", chunk=1, workers=2, deadline=5.0) as grader:
        pids = both_pids(grader)
        first = graded(grader, PID)[0][0]
        (idle,) = pids - {first}
        killer = threading.Timer(0.05, os.kill, (int(idle), signal.SIGKILL))
        killer.start()
        assert graded(grader, NAP) == ([first], {})
        killer.join()


@pytest.mark.parametrize("chunk", [3, None])
def test_rewards_do_not_depend_on_chunks(file, chunk):
    examples = [{"plus": 0.1 * i} for i in range(8)]
    completions = [Completion("x" * i, range(i), truncated=i % 2 == 0) for i in range(8)]
    expected = [0.1 * i + sum(range(i)) + i + (i % 2 == 0) for i in range(8)]
    with Grader(f"{file}:sums", chunk=chunk, workers=2, deadline=20.0) as grader:
        assert grader(examples, completions) == grader(examples, completions) == expected
        assert grader([], []) == []
        large = [Completion("é" * 20_000, range(5_000))] * 32
        assert grader([{"plus": 0.0}] * 32, large) == [sum(range(5_000)) + 20_000.0] * 32


def test_async_functions_run_in_a_process(file):
    with Grader(f"{file}:waits", workers=1) as grader:
        rewards = {"waits": Component(grader), "one": Component(lambda examples, completions: [1.0, None])}
        for _ in range(2):
            assert to_rewards(rewards).grade([{}] * 2, texts("a", "bc")).rewards.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("path", ["actions.py", "~/actions.py"])
def test_grader_paths_are_relative_to_its_starting_folder(file, monkeypatch, path):
    monkeypatch.chdir(file.parent)
    monkeypatch.setenv("HOME", str(file.parent))
    with Grader(f"{path}:act", chunk=1, workers=1) as grader:
        monkeypatch.chdir("/")
        assert graded(grader, "os._exit(3)", FINE)[0] == [None, 1.0]  # loaded again


EXTREME_LIMITS = [{"memory_mb": 1}, dict.fromkeys(("deadline", "budget", "start_deadline"), threading.TIMEOUT_MAX)]


@pytest.mark.parametrize("limits", EXTREME_LIMITS)
def test_the_extremes_of_the_limits_work(file, limits):
    with Grader(f"{file}:act", workers=1, chunk="prompt", **limits) as grader:
        assert graded(grader, FINE, FINE)[0] == [1.0, 1.0]  # two have twice the deadline


# ---- what a user can mend


UNLOADABLE = [
    ("no_such_module:f", None, "No module named 'no_such_module'"),
    ("json:no_such_function", None, "json has no 'no_such_function'"),
    ("no/such/file.py:f", None, "there is no file"),
    ("json", None, "must be module:name"),
    ("FILE:number", None, "is no function but of type int"),
    ("FILE:of_trl", None, r"takes completions first, .* make it f\(examples, completions\)"),
    ("json:dumps", {"obj": 1}, "must return the reward"),
    ("grpo_jax.rewards.builtin:matches", {"pattern": "("}, "refuses its arguments .*unterminated"),
    ("grpo_jax.rewards.builtin:matches", {"no_such": 1}, r"\(no_such\): expected a function of"),
    ("FILE:plain", {"other": 1}, r"\(other\): expected a function of \(examples, completions, \*"),
]


@pytest.mark.parametrize(("spec", "arguments", "words"), UNLOADABLE)
def test_unloadable_rewards_are_refused_in_one_sentence(file, spec, arguments, words):
    with refused(words):
        load_function("reward", spec.replace("FILE", str(file)), arguments)


BROKEN_FILES = [
    ("def f(:", "SyntaxError"),
    ("raise SystemExit(1)", "SystemExit"),
    ("raise KeyboardInterrupt", "broken.py:f' cannot be loaded: KeyboardInterrupt"),
    ("from . import other", "no known parent package"),
    ("import os; os._exit(7)", "exit status 7"),
    (f"import time; {SLEEPS}", "cannot be loaded: no answer within its deadline"),
]


@pytest.mark.parametrize(("body", "words"), BROKEN_FILES)
def test_graders_refuse_broken_files_at_start(tmp_path, body, words):
    (tmp_path / "broken.py").write_text(body)
    with refused(words):
        Grader(f"{tmp_path}/broken.py:f", workers=1, start_deadline=0.5 if "sleep" in body else 20.0)


KEYWORDS = [(name, {"scale": 2}) for name in ("plain", "needs", "waits", "makes")] + [
    ("makes_of_prompts", {"prompts": 2})
]


@pytest.mark.parametrize(("name", "arguments"), KEYWORDS)
def test_keywords_reach_rewards_and_their_factories(file, name, arguments):
    reward = load_function("reward", f"{file}:{name}", arguments)
    assert to_rewards(reward).grade([{}], texts("abc")).rewards.tolist() == [6.0]


def test_modules_of_the_current_folder_are_importable(file, tmp_path, monkeypatch):
    (tmp_path / "of_this_folder.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    assert load_function("reward", "of_this_folder:plain")([{}], texts("a")) == [1.0]


BAD_LIMITS = [
    ("deadline", 0),
    ("budget", 1e10),
    ("start_deadline", math.inf),
    ("chunk", 0),
    ("workers", -1),
    ("memory_mb", 0),
]


@pytest.mark.parametrize(("name", "value"), BAD_LIMITS)
def test_impossible_limits_are_refused(name, value):
    with refused(f"{name} is .*: it must be"):
        Grader("json:dumps", **{name: value})


def test_unpicklable_arguments_and_closed_graders_are_refused(file):
    with refused("must be picklable"):
        Grader("grpo_jax.rewards.builtin:exact_answer", arguments={"extract": lambda text: text})
    with Grader(f"{file}:act", workers=1) as grader:
        with refused("must be picklable"):
            grader([{"f": lambda: 1}], texts(FINE))
        with refused("give one for each"):
            grader([{}], texts(FINE, FINE))
        assert graded(grader, FINE)[0] == [1.0]
    with refused("is closed"):
        grader([{}], texts(FINE))


# ---- nothing is left behind


def test_closed_graders_leave_no_process(file):
    with Grader(f"{file}:act", chunk=1, workers=1, deadline=0.5) as grader:
        pids, _ = graded(grader, PID, CHILD, SLEEPS, PID, CHILD)
        killed, used = [int(pid) for pid in pids[:2]], [int(pid) for pid in pids[3:]]
        assert all(map(is_gone, killed))  # the process that hung, with the child that it had
        for pid in used:
            os.kill(pid, 0)
    assert all(map(is_gone, used))


@pytest.mark.parametrize("ending", ["forgotten", "killed", "killed while it holds the lock", "killed with a fork"])
def test_no_process_is_left_when_the_parent_ends(file, ending):
    program = f"""
import os, sys, time
from grpo_jax.rewards.processes import Grader
from grpo_jax.data.types import Completion
grader = Grader({f"{file}:act"!r}, chunk=1, workers=1, deadline=100.0, budget=100.0)
print(*map(int, grader([{{}}] * 2, [Completion({PID!r}), Completion({CHILD!r})])), flush=True)
if "fork" in sys.argv[1] and os.fork() == 0:
    os.close(1)
    time.sleep(8)
    os._exit(0)
if sys.argv[1] != "forgotten":
    hangs = "re.match('(a+)+$', 'a' * 64 + 'b')" if "lock" in sys.argv[1] else {SLEEPS!r}
    grader([{{}}], [Completion(hangs)])
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
