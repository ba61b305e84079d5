"""Checks the schemas of tools, the calls that models write, and the results and errors that the policy reads."""

import asyncio

import pytest
from tiny import refused

from grpo_jax.data.episodes import Reply, asked
from grpo_jax.data.types import Completion, Turn
from grpo_jax.tasks.environments import environment_in_processes
from grpo_jax.tasks.tools import Call, calls_of, count_calls, load_tools, reply_with, schemas_of


def multiply(a: float, b: float) -> float:
    """Multiplies two numbers.

    Args:
        a: one number.
        b: another one.
    """
    return a * b


async def later(word: str) -> dict:
    """Says a word.

    Args:
        word: to say.
    """
    await asyncio.sleep(0.001)
    return {"said": word}


TOOLS = {"multiply": multiply, "later": later}


def ask(text, tools=TOOLS):
    return asked(reply_with(tools), [({}, [Turn(Completion(text))], (0,))])[0]


def test_a_schema_has_the_types_and_the_words():
    (schema,) = schemas_of({"times": multiply})
    assert schema["function"]["name"] == "times"
    assert schema["function"]["description"] == "Multiplies two numbers."
    assert schema["function"]["parameters"]["properties"]["b"] == {"type": "number", "description": "another one."}
    assert schema["function"]["parameters"]["required"] == ["a", "b"]
    with refused("the tool bare needs a type hint"):
        schemas_of({"bare": lambda a: None})


CALLS = [
    ("The answer is 6.", []),
    ('{"answer": 6}', []),
    ('{"name": "Paris", "population": 2000000}', []),
    ('{"type": "city", "name": "Paris"}', []),
    (
        'I see.\n<tool_call>\n{"name": "multiply", "arguments": {"a": 2, "b": 3}}\n</tool_call>',
        [Call("multiply", {"a": 2, "b": 3})],
    ),
    (
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g", "arguments": {"x": "<"}}',
        [Call("f", {}), Call("g", {"x": "<"})],
    ),
    ('<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>', [Call("f", {"x": 1})]),
    ('{"name": "multiply", "parameters": {"a": 2, "b": 3}}', [Call("multiply", {"a": 2, "b": 3})]),
    (
        '<|python_tag|>{"name": "f", "parameters": {"x": "a;b"}}; {"name": "g", "parameters": {}}',
        [Call("f", {"x": "a;b"}), Call("g", {})],
    ),
    ('{"type": "function", "name": "f", "parameters": {}}', [Call("f", {})]),
]


@pytest.mark.parametrize(("text", "calls"), CALLS)
def test_calls_are_read_in_both_formats(text, calls):
    assert calls_of(text) == calls


BAD_CALLS = [
    "<tool_call>multiply(2, 3)</tool_call>",
    '<tool_call>{"name": "multiply", "arguments": [2, 3]}</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    "<tool_call>" + "[" * 10**5,
    '{"name": "multiply", "parameters": {"a": 2,',
    '{"name": 3, "parameters": {}}',
    '<tool_call>{"name": "divide", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "multiply", "arguments": {"a": 2}}</tool_call>',
    '<tool_call>{"name": "multiply", "arguments": {"a": 2, "b": {}}}</tool_call>',
    '<tool_call>{"name": "multiply", "arguments": {"a": 2, "b": 3, "c": 4}}</tool_call>',
    '<tool_call>{"name": "later", "arguments": {}}</tool_call>',
]


@pytest.mark.parametrize("text", BAD_CALLS)
def test_bad_calls_get_an_error_and_are_counted(text):
    reply = ask(text)
    assert not reply.done
    assert reply.text.startswith("Error: ")
    assert "\n" not in reply.text
    episode = Completion("", turns=[Turn(Completion(text), Completion(reply.text)), Turn(Completion("6"))])
    assert count_calls(episode) == {"calls": 1, "bad_calls": 1}


COUNTED = [
    ("Error: RuntimeError: Error: no such city", 1),
    ("rain. Error: 3 degrees", 0),
    ("6\nError: TypeError: a", 1),
    ("Error: a\nError: b\nError: of one message", 2),
]


@pytest.mark.parametrize(("result", "bad"), COUNTED)
def test_an_error_is_counted_once(result, bad):
    message = {"role": "tool", "content": result}
    turn = Turn(Completion(BAD_CALLS[-1] * 2), Completion(f"<tool>{result}</tool>"), None, message)
    assert count_calls(Completion("", turns=[turn, Turn(Completion("6"))])) == {"calls": 2, "bad_calls": bad}


def test_results_json_cannot_write_become_errors():
    def pairs() -> dict:
        """Returns a dict without names."""
        return {(1, 2): 3}

    def endless() -> list:
        """Returns a list that holds itself."""
        values: list = []
        values.append(values)
        return values

    async def pairs_later() -> dict:
        """Returns a dict without names, later."""
        return pairs()

    tools = {tool.__name__: tool for tool in (pairs, endless, pairs_later)}
    for name, tool in tools.items():
        for several in (tools, {name: tool}):  # with an async one and without
            reply = ask(f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>', several)
            assert reply.failure == ""
            assert reply.text.startswith("Error: ")


def test_calls_return_lines_and_plain_text_ends_episodes():
    call = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
    both = call % ("multiply", '{"a": 2, "b": 3}') + call % ("later", '{"word": "é"}')
    assert ask(both) == Reply('6\n{"said": "é"}')
    assert ask(both, {"multiply": multiply}).text.startswith("6\nError: there is no tool later")
    assert ask("6") == Reply(done=True)


SHARED = """
print("loaded", file=open({log!r}, "a"))
seen = []

def remember(word: str) -> None: seen.append(word)
def recall() -> list: return seen
"""


def test_tools_of_one_file_share_its_state(tmp_path):
    (tmp_path / "memory.py").write_text(SHARED.format(log=str(tmp_path / "log")))
    tools = load_tools(f"{tmp_path}/memory.py:remember,recall")
    tools["remember"]("a")
    assert tools["recall"]() == ["a"]
    assert (tmp_path / "log").read_text() == "loaded\n"


ESCAPES = """
import os, subprocess, sys, time

def sleep():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    time.sleep(1000)

def spin(): sum(iter(int, 1))  # never returns to the interpreter's other threads
def leave(): sys.exit(3)
def crash(): os._exit(3)
def interrupt(): raise KeyboardInterrupt
async def sleep_later(): time.sleep(1000)
def fine(): return "fine"
"""


ESCAPE_FAILURES = [
    ("leave", "raised"),
    ("spin", "timeout"),
    pytest.param("sleep", "timeout", marks=pytest.mark.slow),
    pytest.param("sleep_later", "timeout", marks=pytest.mark.slow),
    pytest.param("crash", "died", marks=pytest.mark.slow),
    pytest.param("interrupt", "raised", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "failure"), ESCAPE_FAILURES)
def test_hanging_or_escaping_tools_end_only_their_episode(tmp_path, name, failure):
    (tmp_path / "escapes.py").write_text(ESCAPES)
    arguments = {"tools": f"{tmp_path}/escapes.py:{name},fine"}
    call = '<tool_call>{"name": "%s", "arguments": {}}</tool_call>'
    spec = "grpo_jax.tasks.tools:reply_with_loaded"
    with environment_in_processes(spec, list, arguments=arguments, deadline=1.0, workers=1) as found:
        transcripts = [[Turn(Completion(call % asked_for))] for asked_for in ("fine", name, "fine")]
        replies = found.ask([{}] * 3, transcripts, [(0,)] * 3)
    assert [reply.failure for reply in replies] == ["", failure, ""]
    assert [reply.text for reply in replies] == ["fine", "", "fine"]


def leave():
    raise SystemExit(0)


async def leave_later():
    raise SystemExit(0)


@pytest.mark.parametrize("tool", [leave, leave_later])
def test_tools_that_exit_do_not_end_training(tool):
    call = f'<tool_call>{{"name": "{tool.__name__}", "arguments": {{}}}}</tool_call>'
    reply = ask(call, {tool.__name__: tool})
    assert (reply.failure, reply.message.splitlines()[-1]) == ("raised", "SystemExit: 0")


def test_names_of_tools_on_a_command_line():
    for text in ("f", "file.py:", "file.py:f,,g", "file.py:f(1)"):
        with refused("the tools"):
            load_tools(text)


def test_results_keep_the_letters_of_every_language():
    call = '<tool_call>{"name": "later", "arguments": {"word": "Zürich 東京"}}</tool_call>'
    assert ask(call).text == '{"said": "Zürich 東京"}'
