"""Checks which answers of an engine are accepted, and how a run ends if it does not answer. Nothing is sampled here."""

import json
import os
import threading
import time
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from server import INITIAL, Server, constant_score
from tiny import digit_stop, digits, refused

from grpo_jax.config import EngineOptions
from grpo_jax.engines import http
from grpo_jax.engines.completions import read_completion, request_body
from grpo_jax.engines.servers import Engine, Request
from grpo_jax.errors import Interruption, UsageError
from grpo_jax.models.params.tree import Adapted

EOS = 6
VOCAB_SIZE = 8


def request_of(group, **options):
    return Request(
        group,
        request_body([1, 2, group], **{"temperature": 1.0, "seed": 0, "max_tokens": 3, "eos_ids": (EOS,)} | options),
    )


ASKED = [request_of(number) for number in range(5)]


def echo(folder, body):
    """The last token of the prompt, then EOS."""
    return [body["prompt"][-1], EOS], [-0.5, -0.25]


def save(folder, params):
    folder.mkdir()
    np.save(folder / "params.npy", params.adapters if isinstance(params, Adapted) else params)


@pytest.fixture
def server():
    server = Server(echo, digits, (EOS,))
    yield server
    server.stop()


def score(params, ids, temperature):
    return lambda: np.array(constant_score("", ids, temperature))


MODEL = {"save": save, "score": score, "read": partial(read_completion, vocab_size=VOCAB_SIZE), "dtype": "float32"}


def engine_of(servers, folder, stop=None, **options):
    urls = tuple(server.url for server in (servers if isinstance(servers, list) else [servers]))
    options = EngineOptions(urls, engine_folder=str(folder), **{"engine_timeout": 20.0} | options)
    read = partial(read_completion, vocab_size=VOCAB_SIZE, stop=stop)
    return Engine(options, **MODEL | {"read": read}, note=print)


ONES = np.ones(2)


def complete(engine, params=ONES, requests=ASKED):
    return engine.submit(params, requests).result()


def stop_words(engine, *args):
    """The sentence with which sampling ends."""
    with pytest.raises(Interruption) as error:
        complete(engine, *args)
    return str(error.value)


def choice_with(**changes):
    """Changes the completion in an answer; logprobs by their own names."""

    def tamper(number, answer):
        choice = answer["choices"][0]
        for name, value in changes.items():
            (choice if name in choice else choice["logprobs"])[name] = value
        return answer

    return tamper


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
    monkeypatch.setattr("os.environ", os.environ | {http.KEY: key})
    with Raw(echo_key) as server:
        with pytest.raises(http.Refused, match=words) as error:
            http.ask(server.url, timeout=9)
        with pytest.raises(UsageError, match=words) as refusal:
            Engine(EngineOptions((server.url,)), **MODEL)
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


def trickle_headers(handler):
    handler.send_response(200)
    handler.flush_headers()
    for _ in range(1000):
        handler.wfile.write(b"X")
        time.sleep(0.02)


def continue_forever(handler):
    while True:
        handler.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def redirect(handler):
    handler.send_response(302)
    handler.send_header("Location", "http://127.0.0.1:9/")
    handler.end_headers()


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
    *((write, http.Gone, "within 0.3 s") for write in (trickle, trickle_headers, continue_forever)),
    (redirect, http.Refused, "302 Found"),
    (flood, http.Refused, "more than 33554432 bytes"),
    (break_off, http.Gone, "IncompleteRead"),
]


@pytest.mark.parametrize(("write", "error", "words"), ENDLESS)
def test_answers_are_limited_in_time_and_size(write, error, words):
    started = time.monotonic()
    with Raw(write) as server:
        with pytest.raises(error, match=words):
            http.ask(server.url, timeout=0.3 if "0.3" in words else 30)
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
    "another prompt, 5 instead": choice_with(prompt_token_ids=5),
    "too large": choice_with(token_logprobs=[-(10**400), -1.0]),
    "recursion": lambda number, answer: b"[" * 99999,
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
        complete(engine_of(server, tmp_path), np.ones(2), ASKED[:1])
    assert server.url in str(error.value)
    assert len(server.completions()) == 1  # it was not asked again


def test_stop_texts_are_requested_and_end_answers(server, tmp_path):
    """A server that decodes several tokens at once may give more than the text."""
    asked = request_of(2, max_tokens=9, stop=("34",))
    engine = engine_of(server, tmp_path, digit_stop("34"))
    server.tamper = choice_with(token_ids=[1, 3, 4, 5, 0], token_logprobs=[-1.0, -2.0, -3.0, -4.0, -5.0])
    assert complete(engine, np.ones(2), [asked]) == [([1, 3, 4], [-1.0, -2.0, -3.0])]
    (body,) = server.completions()
    assert (body["stop"], body["include_stop_str_in_output"], body["skip_special_tokens"]) == (["34"], True, False)
    server.tamper = choice_with(token_ids=[1, 3, 5], token_logprobs=[-1.0, -2.0, -3.0])
    with pytest.raises(Interruption, match="after 3 of 9 tokens by token 5"):
        complete(engine, np.ones(2), [asked])
    assert not {"stop", "include_stop_str_in_output"} & ASKED[0].body.keys()


@pytest.mark.parametrize("failure", [None, 503, 429])
def test_only_failed_requests_are_repeated(server, tmp_path, failure, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    server.tamper = lambda number, answer: failure if number == 2 else answer
    answers = complete(engine_of(server, tmp_path))
    assert answers == [([number, EOS], [-0.5, -0.25]) for number in range(5)]
    assert len(server.completions()) <= 6
    assert len(server.loads()) == 1


@pytest.mark.parametrize("has_worker", [False, True])
@pytest.mark.parametrize("place", [0, 3])
def test_completions_of_a_restarted_server_are_drawn_again(server, tmp_path, monkeypatch, has_worker, place):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    server.has_worker = has_worker

    def restart(number, answer):
        if number == place:  # between two requests, of which none fails
            server.restart()
        return answer

    server.tamper = restart
    answers = complete(engine_of(server, tmp_path))
    assert answers == [([number, EOS], [-0.5, -0.25]) for number in range(5)]
    assert len(server.completions()) == 10
    assert len(server.loads()) == 2


def test_parameters_are_sent_once_and_leave_one_folder(server, tmp_path):
    engine, first = engine_of(server, tmp_path), np.ones(2)
    complete(engine, first, ASKED[:1])
    complete(engine, first, ASKED[:1])
    del first  # folders stay as long as their parameters
    complete(engine, np.zeros(2), ASKED[:1])
    folders = server.loads()
    assert len(folders) == 2
    assert [str(folder) for folder in tmp_path.iterdir()] == [folders[1]]
    handover = ["/pause?mode=abort", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]
    paths = [path for path, body in server.asked if path in handover and body.get("method") != "policy_version"]
    assert paths == handover * 2


def test_unresponsive_servers_are_abandoned_after_the_timeout(server, tmp_path):
    server.tamper = lambda number, answer: 503
    words = stop_words(engine_of(server, tmp_path, engine_timeout=0.05))
    assert "has not answered for 0.05 s (503" in words
    assert "5 of 5 completions missing" in words


def test_servers_that_refuse_parameters_are_reported(server, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "reply", lambda path, body: {"success": False, "message": "no such folder"})
    words = stop_words(engine_of(server, tmp_path, engine_kind="sglang"))
    assert "does not load parameters (no such folder): it must see" in words
    monkeypatch.setattr(server, "reply", lambda path, body: 404)
    assert "refuses /update_weights_from_disk" in stop_words(engine_of(server, tmp_path, engine_kind="sglang"))


@pytest.mark.parametrize("has_worker", [False, True])
def test_a_folder_unseen_by_the_server_is_refused(server, tmp_path, monkeypatch, has_worker):
    server.has_worker, reply = has_worker, server.call_workers
    elsewhere = {"weights_path": "/nowhere"}, {"folder": "/nowhere"}
    monkeypatch.setattr(
        server, "call_workers", lambda method, **args: reply(method, **(elsewhere[has_worker] if args else {}))
    )
    words = stop_words(engine_of(server, tmp_path))
    assert "set engine_folder to" in words
    assert ("start the server again" in words) == (not has_worker)


def test_refusals_name_their_cure(server, tmp_path, monkeypatch):
    reply, refusals = server.reply, {"/pause?mode=abort": 404, "/v1/load_lora_adapter": 404, "/v1/completions": 401}
    monkeypatch.setattr(server, "reply", lambda path, body: refusals.get(path) or reply(path, body))
    adapters = Adapted(np.ones(2), np.ones(2), np.ones(1))
    assert "VLLM_SERVER_DEV_MODE=1" in stop_words(engine_of(server, tmp_path))
    assert "set the variable ENGINE_API_KEY" in stop_words(engine_of(server, tmp_path), adapters)
    del refusals["/v1/completions"]
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" in stop_words(engine_of(server, tmp_path), adapters)


# ---- the server holds the policy


def score_of_file(folder, ids, temperature):
    """Log-probabilities that depend on the parameters in a folder; those of the server's start are 0.9."""
    return [-read_first(folder) / temperature] * (len(ids) - 1)


@cache
def read_first(folder):
    return float(np.load(f"{folder}/params.npy")[0]) if folder else 0.9


def score_params(params, ids, temperature):
    params = params.adapters if isinstance(params, Adapted) else params
    return lambda: np.full(len(ids) - 1, -float(params[0]) / temperature)


@pytest.fixture
def scoring():
    """A server whose log-probabilities follow its parameters."""
    server = Server(echo, digits, (EOS,), score=score_of_file)
    yield server
    server.stop()


def engine_with_proof(server, folder, **options):
    options = EngineOptions((server.url,), engine_timeout=20.0, engine_folder=str(folder), **options)
    return Engine(options, **MODEL | {"score": score_params}, temperature=0.5, note=print)


def test_a_server_that_holds_the_policy_samples(scoring, tmp_path):
    engine = engine_with_proof(scoring, tmp_path)
    for value in (1.0, 2.0):
        assert complete(engine, np.array([value])) == [([number, EOS], [-0.5, -0.25]) for number in range(5)]


@pytest.mark.parametrize("has_worker", [False, True])
@pytest.mark.parametrize("is_versioned", [False, True])
def test_dropped_loads_are_noticed(scoring, tmp_path, monkeypatch, has_worker, is_versioned):
    """Something on the way answers that the load succeeded. It may pass on the new version, or drop that too."""
    scoring.has_worker, reply = has_worker, scoring.call_workers
    engine = engine_with_proof(scoring, tmp_path)
    complete(engine, np.array([1.0]))
    monkeypatch.setattr(scoring, "call_workers", lambda method, **args: {"results": [None]} if args else reply(method))
    scoring.drops = set() if is_versioned else {"/update_weight_version"}
    asked = len(scoring.completions())
    words = stop_words(engine, np.array([1.01]))
    assert ("drops requests" if has_worker or not is_versioned else "differ from the trainer's by 0.01 nats") in words
    assert len(scoring.completions()) == asked


def test_other_parameters_and_processing_have_own_sentences(scoring, tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "_score", lambda folder, ids, temperature: score_of_file(folder, ids, 1.0))
    words = stop_words(engine_with_proof(scoring, tmp_path), np.array([1.0]))
    assert "log-probabilities of sampled tokens differ from the trainer's by 1 nats" in words
    assert "--logprobs-mode processed_logprobs" in words
    monkeypatch.setattr(scoring, "_score", lambda *args: [value - 0.01 for value in score_of_file(*args)])
    words = stop_words(engine_with_proof(scoring, tmp_path), np.array([1.0]))
    assert "log-probabilities of a prompt differ" in words
    assert "--worker-extension-cls" in words
    assert "--dtype float32" in words
    assert not scoring.completions()
    complete(engine_with_proof(scoring, tmp_path, engine_dtype="bfloat16"), np.array([1.0]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_single_tokens_may_be_far_off_in_bfloat16(scoring, tmp_path, monkeypatch, dtype):
    def one_off(*args):
        return [*score_of_file(*args)[:-1], -9.0]

    monkeypatch.setattr(scoring, "_score", one_off)
    engine = engine_with_proof(scoring, tmp_path, engine_dtype=dtype)
    if dtype == "float32":
        assert "differ from the trainer's by" in stop_words(engine, np.array([1.0]))
    else:
        complete(engine, np.array([1.0]))
    (scored, *_) = (body for _, body in scoring.asked if "prompt_logprobs" in body)
    assert len(scored["prompt"]) == 3 + 3 - 1  # a longer text than the prompt, as long as a completion allows


@pytest.mark.parametrize(("base", "loads"), [(0.9, 0), (0.8, 1)])
def test_the_base_of_adapters_replaces_another(scoring, tmp_path, base, loads):
    """The adapters of this stub replace the base."""
    engine = engine_with_proof(scoring, tmp_path)
    for value in (1.0, 2.0):
        complete(engine, Adapted(np.array([base]), np.array([value]), np.ones(1)))
    assert len(scoring.loads()) == loads
    assert len(scoring.adapters) == 1


# ---- several servers


@pytest.fixture
def servers():
    servers = [Server(echo, digits, (EOS,)) for _ in range(2)]
    yield servers
    for server in servers:
        server.stop()


PAIRS = [request_of(group, seed=number) for group in range(4) for number in range(2)]


def test_groups_go_to_servers_by_their_numbers(servers, tmp_path):
    complete(engine_of(servers, tmp_path), np.ones(2), PAIRS)
    groups = [sorted(body["prompt"][-1] for body in server.completions()) for server in servers]
    assert groups == [[0, 0, 2, 2], [1, 1, 3, 3]]


@pytest.mark.parametrize("failure", [None, 503, 500])
def test_other_servers_take_over_failed_groups(servers, tmp_path, capsys, failure):
    servers[0].tamper = lambda number, answer: failure if number >= 1 else answer
    engine = engine_of(servers, tmp_path)
    answers = complete(engine, np.ones(2), PAIRS)
    complete(engine, np.zeros(2), PAIRS)
    assert capsys.readouterr().out.count(f"{servers[0].url} does not answer") == 1
    assert answers == [([group, EOS], [-0.5, -0.25]) for group in range(4) for _ in range(2)]
    assert all(server.version != INITIAL for server in servers)


def test_a_server_that_starts_later_samples(servers, tmp_path, capsys):
    servers[0].stop()
    engine = engine_of(servers, tmp_path)
    assert f"{servers[0].url} (" in capsys.readouterr().out
    complete(engine, np.ones(2), PAIRS)
    assert len(servers[1].completions()) == len(PAIRS)
    servers[0] = Server(echo, digits, (EOS,), port=servers[0].port)
    complete(engine, np.zeros(2), PAIRS)
    assert len(servers[0].completions()) == len(PAIRS) / 2


# ---- addresses


def test_addresses_without_an_engine_are_refused(server, tmp_path):
    server.models = []
    with refused("no engine that serves /v1/models answers at"):
        engine_of(server, tmp_path)
    server.stop()
    with refused("no engine that serves /v1/models answers at"):
        engine_of(server, tmp_path)
    with refused("no engine that serves /v1/models answers at nonsense"):
        Engine(EngineOptions(("nonsense",)), **MODEL)
    for address in ("nowhere/v1", "file:///etc/hostname", "http://", "http://a b/"):
        with pytest.raises(http.Refused, match="its address is not like http://host:8000"):
            http.ask(address, timeout=1.0)
    with refused("holds a user or a password") as refusal:
        Engine(EngineOptions((server.url.replace("//", "//me:hush@"),)), **MODEL)
    assert "hush" not in str(refusal.value)


def test_requests_are_portable_and_override_server_defaults(server, tmp_path):
    complete(engine_of(server, tmp_path), np.ones(2), ASKED[:1])
    body = json.loads(json.dumps(server.completions()[0]))
    assert (body["prompt"], body["stop_token_ids"], body["model"]) == ([1, 2, 0], [EOS], "the-model")
    assert (body["return_token_ids"], body["logprobs"]) == (True, 0)
    assert {"top_p", "top_k", "min_p", "repetition_penalty"} <= body.keys()
