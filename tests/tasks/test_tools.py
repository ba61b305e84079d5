"""Checks the schemas of tools, the calls that models write, and the results and errors that the policy reads."""

import asyncio
import inspect
import json

import pytest
import tokenizers
from tiny import refused
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from grpo_jax.data.episodes import Reply, asked
from grpo_jax.data.types import Completion, Turn
from grpo_jax.models.chat import Chat
from grpo_jax.rewards.processes import ProcessOptions
from grpo_jax.tasks.environments import describe_tools, environment_in_processes
from grpo_jax.tasks.tools import Call, calls_of, check_calls, count_calls, load_tools, reply_with, schemas_of


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
    (
        "I see.\n<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=y>\na\n\nb\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        [Call("f", {"x": "1", "y": "a\n\nb"}, are_texts=True), Call("g", {}, are_texts=True)],
    ),
    # Calls within reasoning are not meant to be executed. The prompt may have opened the reasoning.
    ('<think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n</think>\n\n6', []),
    ('perhaps <tool_call>{"name": "f", "arguments": {}}</tool_call>\n</think>\n\n6', []),
    ('so</think>{"name": "f", "parameters": {}}', [Call("f", {})]),
    (
        '<think>so</think><tool_call>{"name": "f", "arguments": {}}</tool_call>[THINK]<tool_call>[/THINK]'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        [Call("f", {}), Call("g", {})],
    ),
]


@pytest.mark.parametrize(("text", "calls"), CALLS)
def test_calls_are_read_in_all_formats(text, calls):
    assert calls_of(text) == calls


def echo(text: str, number: int, yes: bool, numbers: list[int], object: dict, maybe: str | None, nothing: int | None):
    return [text, number, yes, numbers, object, maybe, nothing]


@pytest.mark.parametrize("python", [True, False])
def test_arguments_between_tags_have_the_types_of_hints(python):
    """Templates write values that are no text as JSON, or as Python writes them."""
    values = ["12", 3, True, [1, 2], {"a": None}, "no", None]
    names = inspect.signature(echo).parameters
    written = [x if isinstance(x, str) else repr(x) if python and x in (True, None) else json.dumps(x) for x in values]
    parameters = (f"<parameter={name}>\n{text}\n</parameter>" for name, text in zip(names, written, strict=True))
    text = f"<tool_call>\n<function=echo>\n{chr(10).join(parameters)}\n</function>\n</tool_call>"
    assert json.loads(ask(text, {"echo": echo}).text) == values


HEADER = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls %}"
FORMATS = {
    "hermes": "<tool_call>\n{{ call.function | tojson }}\n</tool_call>",
    "tags": "<tool_call>\n<function={{ call.function.name }}>\n{% for x, y in call.function.arguments | items %}"
    "<parameter={{ x }}>\n{{ y }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    "llama": '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}',
    "none": "",
}
OTHER_FORMATS = {
    "to a channel": "to={{ call.function.name }}<|message|>{{ call.function.arguments | tojson }}",
    "a list": "[TOOL_CALLS][{{ call.function | tojson }}]",
    "a name before tags": "<tool_call>{{ call.function.name }}\n<arg_key>a</arg_key></tool_call>",
}


def chat_with(calls):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}, "a")), eos_token="</s>"
    )
    turn_ends = "{% endfor %}</s>{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
    tokenizer.chat_template = HEADER + calls + turn_ends
    return Chat(tokenizer, (1,))


def test_call_formats_that_nothing_reads_are_refused():
    for calls in FORMATS.values():
        check_calls(chat_with(calls))
    check_calls(chat_with("{{ raise_exception('no calls') }}"))
    for calls in OTHER_FORMATS.values():
        with refused("writes calls of tools as .*look_up"):
            check_calls(chat_with(calls))


BAD_CALLS = [
    "<tool_call><function=multiply><parameter=a>2</parameter>3</function></tool_call>",
    "<tool_call><function=multiply><parameter=a>2</parameter></tool_call>",
    "<tool_call><function=multiply><parameter=a>2</parameter><parameter=b>x</parameter></function></tool_call>",
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


FILES = [
    ("import os\nos._exit(3)", "gives no answer: the process ended with exit status 3"),
    ("while True: pass", r"gives no answer: no answer within its deadline .*ends.py, line 1"),
    ("1 / 0", r"ZeroDivisionError: division by zero \(.*ends.py, line 1"),
    ("f = 3", "is no function but of type int"),
    ("def f(a): pass", "the tool f needs a type hint"),
]


@pytest.mark.parametrize(("text", "sentence"), FILES)
def test_tools_that_end_their_process_are_refused(tmp_path, monkeypatch, text, sentence):
    monkeypatch.setattr(ProcessOptions, "start_deadline", 2.0 if "while" in text else 20.0)
    (tmp_path / "ends.py").write_text(text)
    with refused(sentence):
        describe_tools(tools=f"{tmp_path}/ends.py:f", factory="", in_chat=True)


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


def texts(*words: str) -> str:
    """Joins.

    Args:
      words: the words.
    """
    return " ".join(words)


def pairs(**words: str) -> str:
    """Joins.

    Args:
      words: the words.
    """
    return " ".join(words)


def first(word: str, /) -> str:
    """Returns the word.

    Args:
      word: the word.
    """
    return word


@pytest.mark.parametrize(("tool", "argument"), [(texts, r"\*words"), (pairs, r"\*\*words"), (first, "word")])
def test_arguments_that_a_call_cannot_name_are_refused(tool, argument):
    assert "words" in get_json_schema(tool)["function"]["parameters"]["properties"] or tool is first
    with refused(f"the tool f takes {argument}: str, but calls name each argument"):
        schemas_of({"f": tool})
