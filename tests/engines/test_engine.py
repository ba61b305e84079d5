"""Checks which answers of an engine are accepted, and how a run ends if it does not answer. Nothing is sampled here."""

import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from server import Server
from tiny import digit_stop, digits, refused

from grpo_jax.config import EngineOptions
from grpo_jax.engines import completions
from grpo_jax.engines.completions import request_body
from grpo_jax.engines.sampler import Engine
from grpo_jax.errors import Interruption, UsageError

EOS = 6
VOCAB_SIZE = 8


ASKED = [
    request_body([1, 2, number], temperature=1.0, seed=number, max_tokens=3, eos_ids=(EOS,)) for number in range(5)
]


def echo(folder, body):
    """The last token of the prompt, then EOS."""
    return [body["prompt"][-1], EOS], [-0.5, -0.25]


def save(folder, params):
    folder.mkdir()
    np.save(folder / "params.npy", params)


@pytest.fixture
def server():
    server = Server(echo, digits, (EOS,))
    yield server
    server.stop()


def engine_of(server, folder, stop=None, **options):
    return Engine(EngineOptions(server.url, engine_folder=str(folder), **options), save, VOCAB_SIZE, stop)


def choice_with(**changes):
    """Changes the completion in an answer; logprobs by their own names."""

    def tamper(number, answer):
        choice = answer["choices"][0]
        for name, value in changes.items():
            (choice if name in choice else choice["logprobs"])[name] = value
        return answer

    return tamper


def test_redirects_drop_the_api_key(monkeypatch):
    monkeypatch.setenv(completions.KEY, "secret")
    keys = {}

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self):
            keys[self.path] = self.headers["Authorization"]
            self.send_response(302 if self.path == "/first" else 200)
            self.send_header("Location", f"http://localhost:{server.server_port}/second")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        assert completions.ask(f"http://127.0.0.1:{server.server_port}/first", timeout=9) == b""
    finally:
        server.shutdown()
        server.server_close()
    assert keys == {"/first": "Bearer secret", "/second": None}


class Raw(ThreadingHTTPServer):
    """A server that answers each request by `write(handler)`."""

    def __init__(self, write):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                write(self)

            def log_message(self, *_):
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_):  # the client has left
        pass


def echo_key(handler):
    words = f"Incorrect API key provided: {handler.headers['Authorization']}".encode()
    handler.send_response(401)
    handler.send_header("Content-Length", str(len(words)))
    handler.end_headers()
    handler.wfile.write(words)


KEYS = [
    ("hush-hush", "Incorrect API key provided"),
    (" hush-hush\n", "Incorrect API key provided"),
    ("hush-hush\nsecond", "line break"),
    ("hush-hush\r\nX: y", "line break"),
    ("hush-hush\0", "line break"),
    ("hush-hush\u2028", "401"),  # white space at the end
    ("hush-hush\u65e5", "line break"),
]


@pytest.mark.parametrize(("key", "words"), KEYS)
def test_no_message_shows_the_key(monkeypatch, key, words):
    monkeypatch.setattr("os.environ", os.environ | {completions.KEY: key})
    with Raw(echo_key) as server:
        with pytest.raises(completions.Refused, match=words) as error:
            completions.ask(server.url, timeout=9)
        with pytest.raises(UsageError, match=words) as refusal:
            Engine(EngineOptions(server.url), save, VOCAB_SIZE)
        server.shutdown()
    assert "hush" not in f"{error.value} {error.value!r} {refusal.value}"
    assert error.value.__suppress_context__ or error.value.__context__ is None


def trickle(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(1000):
        handler.wfile.write(b" ")
        time.sleep(0.02)


def flood(handler):
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b" " * 2**20)


def break_off(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b"{")


ENDLESS = [
    (trickle, completions.Gone, "within 0.3 s"),
    (flood, completions.Refused, "more than 33554432 bytes"),
    (break_off, completions.Gone, "IncompleteRead"),
]


@pytest.mark.parametrize(("write", "error", "words"), ENDLESS)
def test_answers_are_limited_in_time_and_size(write, error, words):
    started = time.monotonic()
    with Raw(write) as server:
        with pytest.raises(error, match=words):
            completions.ask(server.url, timeout=0.3 if write is trickle else 30)
        server.shutdown()
    assert time.monotonic() - started < 10


LIES = {
    "at most 3": choice_with(token_ids=[1, 2, 3, 4], token_logprobs=[-1.0] * 4),
    "token 8, but the model has the tokens 0 to 7": choice_with(token_ids=[8, EOS]),
    "went on after token 6": choice_with(token_ids=[EOS, 1]),
    "after 2 of 3 tokens by token 1": choice_with(token_ids=[0, 1]),
    "0 tokens with": choice_with(token_ids=[]),
    "no completion with token ids": choice_with(token_ids=None),
    "another prompt": choice_with(prompt_token_ids=[1]),
    r"2 tokens with the log-probabilities \[-0.5\]": choice_with(token_logprobs=[-0.5]),
    r"not 'NoneType'": choice_with(token_logprobs=[None, -1.0]),
    r"2 tokens with the log-probabilities \[0.5, -1.0\]": choice_with(token_logprobs=[0.5, -1.0]),
    "got 0": lambda number, answer: answer | {"choices": []},
    "too many values": lambda number, answer: answer | {"choices": answer["choices"] * 2},
    "Expecting value": lambda number, answer: b"<html>",
    "refuses /v1/completions": lambda number, answer: 400,
}


@pytest.mark.parametrize("words", LIES)
def test_impossible_answers_end_sampling_with_one_sentence(server, tmp_path, words):
    server.tamper = LIES[words]
    with pytest.raises(Interruption, match=words) as error:
        engine_of(server, tmp_path).complete(np.ones(2), ASKED[:1])
    assert server.url in str(error.value)
    assert len(server.completions()) == 1  # it was not asked again


def test_stop_texts_are_requested_and_end_answers(server, tmp_path):
    """A server that decodes several tokens at once may give more than the text."""
    asked = request_body([1, 2], temperature=1.0, seed=0, max_tokens=9, eos_ids=(EOS,), stop=("34",))
    engine = engine_of(server, tmp_path, digit_stop("34"))
    server.tamper = choice_with(token_ids=[1, 3, 4, 5, 0], token_logprobs=[-1.0, -2.0, -3.0, -4.0, -5.0])
    assert engine.complete(np.ones(2), [asked]) == [([1, 3, 4], [-1.0, -2.0, -3.0])]
    (body,) = server.completions()
    assert (body["stop"], body["include_stop_str_in_output"], body["skip_special_tokens"]) == (["34"], True, False)
    server.tamper = choice_with(token_ids=[1, 3, 5], token_logprobs=[-1.0, -2.0, -3.0])
    with pytest.raises(Interruption, match="after 3 of 9 tokens by token 5"):
        engine.complete(np.ones(2), [asked])
    assert not {"stop", "include_stop_str_in_output"} & ASKED[0].keys()


@pytest.mark.parametrize("failure", [None, 503, 429])
def test_only_failed_requests_repeat_after_parameters_are_resent(server, tmp_path, failure, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    server.tamper = lambda number, answer: failure if number == 2 else answer
    answers = engine_of(server, tmp_path).complete(np.ones(2), ASKED)
    assert answers == [([number, EOS], [-0.5, -0.25]) for number in range(5)]
    assert len(server.completions()) <= 6
    assert [path for path, _ in server.asked].count("/collective_rpc") == 2


def test_parameters_are_sent_once_and_leave_one_folder(server, tmp_path):
    engine, first, second = engine_of(server, tmp_path), np.ones(2), np.zeros(2)
    for params in (first, first, second):
        engine.complete(params, ASKED[:1])
    folders = [body["kwargs"]["weights_path"] for path, body in server.asked if path == "/collective_rpc"]
    assert len(folders) == 2
    assert [str(folder) for folder in tmp_path.iterdir()] == [folders[1]]
    assert [path for path, _ in server.asked].count("/reset_prefix_cache") == 2


def test_unresponsive_servers_are_abandoned_after_the_timeout(server, tmp_path):
    server.tamper = lambda number, answer: 503
    engine = engine_of(server, tmp_path, engine_timeout=0.05)
    with pytest.raises(Interruption, match=r"has not answered for 0.05 s \(503.*5 of 5 completions missing"):
        engine.complete(np.ones(2), ASKED)


def test_servers_that_refuse_parameters_are_reported(server, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "reply", lambda path, body: {"success": False, "message": "no such folder"})
    with pytest.raises(Interruption, match=r"does not load parameters \(no such folder\): it must see"):
        engine_of(server, tmp_path, engine_kind="sglang").complete(np.ones(2), ASKED)
    monkeypatch.setattr(server, "reply", lambda path, body: 404)
    with pytest.raises(Interruption, match="refuses /update_weights_from_disk"):
        engine_of(server, tmp_path, engine_kind="sglang").complete(np.ones(2), ASKED)


def test_addresses_without_an_engine_are_refused(server, tmp_path):
    server.models = []
    with refused("no engine that serves /v1/models answers at"):
        engine_of(server, tmp_path)
    server.stop()
    with refused("no engine that serves /v1/models answers at"):
        engine_of(server, tmp_path)
    with refused("no engine that serves /v1/models answers at nonsense"):
        Engine(EngineOptions("nonsense"), save, VOCAB_SIZE)
    with pytest.raises(completions.Refused, match="nowhere/v1 is no address"):
        completions.ask("nowhere/v1", timeout=1.0)


def test_requests_are_portable_and_override_server_defaults(server, tmp_path):
    engine_of(server, tmp_path).complete(np.ones(2), ASKED[:1])
    body = json.loads(json.dumps(server.completions()[0]))
    assert (body["prompt"], body["stop_token_ids"], body["model"]) == ([1, 2, 0], [EOS], "the-model")
    assert (body["return_token_ids"], body["logprobs"]) == (True, 0)
    assert {"top_p", "top_k", "min_p", "repetition_penalty"} <= body.keys()
