"""Agents that talk to the policy by HTTP: what is learned is what was sampled, and faults fail only their rollout."""

import asyncio
import http.client
import json
import random
import re
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import numpy as np
import pytest
import tokenizers
from tiny import random_params, refused, tiny_config
from transformers import PreTrainedTokenizerFast

from grpo_jax.config import EngineOptions, recipe
from grpo_jax.data.episodes import ENDINGS, Reply, environment, episode_return
from grpo_jax.data.types import Completion, Prompt, Turn
from grpo_jax.engines.sampler import sampler_of, seed_of
from grpo_jax.models.chat import Chat, messages_encoder, reply_encoder
from grpo_jax.models.huggingface import Pretrained
from grpo_jax.models.policy import decoder_policy
from grpo_jax.rl.source import completion_numbers, group_temperatures, make_sampler
from grpo_jax.rl.types import SAMPLING, noise_of
from grpo_jax.tasks.agents import open_agent
from grpo_jax.tasks.chat_api import answer_message, read_message, request_values
from grpo_jax.tasks.task import text_task

CHATML = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = recipe(num_prompts=2, group_size=3, max_tokens=12, max_turns=3, environment_tokens=200, temperature=1.5)
SAMPLING_OPTIONS = CONFIG.sampling
ROWS = [{"prompt": "unused", "question": question} for question in ("1+1", "a long question?")]
SHAPE = tiny_config(259)
POLICY, PARAMS = decoder_policy(SHAPE), random_params(SHAPE)
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {}}}


@cache
def tokenizer():
    """Returns a tokenizer of bytes. Most sampled texts are no UTF-8, so encoding them again would give other tokens."""
    bytes_ = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    of_bytes = tokenizers.Tokenizer(tokenizers.models.BPE({byte: i for i, byte in enumerate(bytes_)}, []))
    of_bytes.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    of_bytes.decoder = tokenizers.decoders.ByteLevel()
    of_bytes.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=of_bytes, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHATML
    return fast


CHAT = Chat(tokenizer(), (257, *range(0, 250, 5)))  # some bytes end a turn too, so that episodes have several


def task_of(rows, opened):
    options = {"vocab_size": 259, "num_prompts": 2, "seed": 0, "heldout_share": 0.0, "chat": True}
    task = text_task(CHAT.tokenizer, CHAT.eos_ids, rows, reward=episode_return, **options)
    return task._replace(environment=opened)


@cache
def sampler():
    """Returns a sampler whose programs are compiled once, for the environment that is in OPENED."""
    task = task_of([{"prompt": row["question"]} for row in ROWS], None)
    ask = environment(lambda *_: Reply(done=True), reply_encoder(CHAT))
    passing = ask._replace(ask=lambda *args: OPENED[-1].ask(*args), end=lambda keys: OPENED[-1].end(keys))
    return make_sampler(POLICY, task._replace(environment=passing), SAMPLING_OPTIONS)


OPENED = []


def sample(task):
    """Returns the completions of the first step."""
    OPENED.append(task.environment)
    inputs = completion_numbers(SAMPLING_OPTIONS), group_temperatures(SAMPLING_OPTIONS), noise_of(0, SAMPLING, 0)
    return sampler().complete(PARAMS, task.prompts(0), *inputs)


@contextmanager
def opened_agent(run, **options):
    with open_agent(run, CHAT, request_values(SAMPLING_OPTIONS, ()), **options) as opened:
        yield opened


def play(run, **options):
    """Returns the completions of an agent, and the messages about its failures."""
    with opened_agent(run, **options) as opened:
        return sample(task_of(opened.begin(ROWS), opened)), opened.messages


def endings(completions):
    return [ENDINGS[i] for i in completions.ending.ravel()]


def call(url, body=None, method=None):
    """Returns the status and the JSON of an answer."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with build_opener(ProxyHandler({})).open(Request(url, data, method=method), timeout=30) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        return error.code, json.load(error)


def complete(url, messages, **fields):
    status, answer = call(f"{url}/chat/completions", {"model": "policy", "messages": messages, **fields})
    if status != 200:
        raise RuntimeError(answer["error"]["message"])
    return answer["choices"][0]


# ---- what is learned from


def talk(example, url):
    """A plain loop of HTTP: it answers "no <turn>" until the third turn. Its reward is the length of the answers."""
    messages = [{"role": "user", "content": example["question"]}]
    total = 0
    for turn in range(3):
        choice = complete(url, messages, temperature=1.5, max_tokens=12)
        total += len(choice["message"]["content"])
        messages += [choice["message"], {"role": "user", "content": f"no {turn}"}]
        if choice["finish_reason"] == "length":
            break
    return total


async def talk_later(example, url):
    """`talk` in a coroutine, in an order that changes."""
    await asyncio.sleep(random.random() / 20)
    return await asyncio.to_thread(talk, example, url)


def reply_as_talk(example, transcript, key):
    """An environment that does what `talk` does."""
    is_done = len(transcript) == 3 or transcript[-1].action.truncated
    reward = float(sum(len(turn.action) for turn in transcript)) if is_done else None
    return Reply(f"no {len(transcript) - 1}", done=is_done, reward=reward)


@cache
def by_environment():
    rows = [{"prompt": row["question"]} for row in ROWS]
    return sample(task_of(rows, environment(reply_as_talk, reply_encoder(CHAT))))


def assert_same(one, other):
    for name, value in one._asdict().items():
        np.testing.assert_array_equal(value, getattr(other, name), name)


@pytest.mark.parametrize("run", [talk, talk_later])
def test_agents_learn_the_same_bits_as_episodes(run):
    expected = by_environment()
    assert {*endings(expected)} == {"done"}
    assert expected.turn.max() == 3
    for _ in range(2):  # the second time in another order
        out, messages = play(run)
        assert messages == {}
        assert_same(out, expected)


def test_learned_tokens_are_those_that_the_agent_was_sent():
    sent = {}

    def keep(example, url):
        messages = [{"role": "user", "content": example["question"]}]
        texts = sent.setdefault(url.split("/")[-2], [])
        for turn in range(2):
            message = complete(url, messages)["message"]
            texts.append(message["content"])
            messages += [message, {"role": "user", "content": f"no {turn}"}]
        return 1

    out, _ = play(keep)
    task = task_of([{"prompt": row["question"]} for row in ROWS], None)
    for number, (i, j) in enumerate(np.ndindex(2, 3)):
        actions = [out.completion_ids[i, j][out.completion_mask[i, j] & (out.turn[i, j] == turn)] for turn in (1, 2)]
        texts = [str(task.read(ids.tolist())) for ids in actions if len(ids)]
        assert sent[f"0-{SAMPLING}-0-{number}"][: len(texts)] == texts


def test_messages_are_written_as_by_the_template():
    encode = messages_encoder(CHAT)
    added = [{"role": "user", "content": "one<|im_end|>"}, {"role": "system", "content": "two"}]
    text = "\n<|im_start|>user\none<|im_end|><|im_end|>\n<|im_start|>system\ntwo<|im_end|>\n<|im_start|>assistant\n"
    assert CHAT.tokenizer.decode(encode(added)) == text
    assert encode(added).count(257) == 2  # the end that the text spells out is no token
    assert encode(added[:1]) == reply_encoder(CHAT)("one<|im_end|>")


def test_openai_clients_are_agents_too():
    pytest.importorskip("openai")

    async def run(example, client):
        messages = [{"role": "user", "content": example["question"]}]
        total = 0
        for turn in range(3):
            choice = (await client.chat.completions.create(model="policy", messages=messages)).choices[0]
            total += len(choice.message.content)
            messages += [choice.message.model_dump(), {"role": "user", "content": f"no {turn}"}]
            if choice.finish_reason == "length":
                break
        return total

    assert_same(play(run)[0], by_environment())


def test_agents_may_append_to_the_messages_of_their_row():
    def run(example, url):
        messages = example["prompt"]
        messages += [complete(url, messages)["message"], says("no")]
        complete(url, messages)
        return 1

    rows = [{"prompt": [says(row["question"])]} for row in ROWS]
    with opened_agent(run) as opened:
        task = task_of(opened.begin(rows), opened)
        first, second = sample(task), sample(task)
    assert opened.messages == {}
    assert_same(first, second)


def ask(opened, row, *actions, copies=1):
    """Returns the replies to the last of some turns, which the policy is said to have written."""
    example, transcript = row | {"prompt": Prompt("", row["prompt"])}, [Turn(action) for action in actions]
    return opened.ask([example] * copies, [transcript] * copies, [(0, 0, 0, 0, len(actions) - 1)] * copies)


def test_copies_of_an_episode_share_an_agent():
    started = []

    def run(example, url):
        started.append(url)
        return len(first(example, url))

    with opened_agent(run) as opened:
        (row,) = opened.begin(ROWS[:1])
        replies = ask(opened, row, Completion("a"), copies=2)
    assert [reply.reward for reply in replies] == [2, 2]
    assert len(started) == 2  # once for the prompt


def test_turns_without_an_end_are_ended_before_what_follows():
    def run(example, url):
        complete(url, [*first(example, url), says("no")])

    chat = CHAT._replace(eos_ids=(257,))
    with open_agent(run, chat, request_values(SAMPLING_OPTIONS, ())) as opened:
        (row,) = opened.begin(ROWS[:1])
        texts = [chat.tokenizer.decode(ask(opened, row, Completion("a", stopped=stopped))[0].ids) for stopped in (0, 1)]
    assert texts[0].startswith("\n<|im_start|>user\nno")
    assert texts[1] == "<|im_end|>" + texts[0]


def test_a_turn_that_leaves_no_tokens_is_finished_by_length():
    reasons = []

    def run(example, url):
        messages = [says(example["question"])]
        choice = complete(url, messages)
        reasons.append(choice["finish_reason"])
        return 1

    with opened_agent(run) as opened:
        (row,) = opened.begin(ROWS[:1])
        for size in (10, 11):  # with the end of the turn 12 is all
            ask(opened, row, Completion("a", range(size)))
    assert reasons == ["stop", "length"]


def test_lists_are_rewards_of_turns():
    def run(example, url):
        messages = first(example, url)
        complete(url, [*messages, says("no")])
        return [None, 2]

    out, _ = play(run)
    done = out.ending == ENDINGS.index("done")
    assert done.any()
    np.testing.assert_array_equal(out.turn_rewards[done], np.tile([np.nan, 2, np.nan], (done.sum(), 1)))


def test_servers_sample_the_turns_of_agents(monkeypatch):
    """The engine gives what our sampler drew, if a request's prompt holds the ids of all turns before."""
    own, turns, noise = by_environment(), {}, noise_of(0, SAMPLING, 0)

    def submit(self, params, requests, journal=None):
        bodies, answer = [request.body for request in requests], Future()
        answer.set_result([turns.pop((x["seed"], tuple(x["prompt"]), x["max_tokens"])) for x in bodies])
        return answer

    replaced = {"_connect": lambda self, server: None, "turn": lambda self, params: nullcontext(), "submit": submit}
    for name, function in replaced.items():  # of servers there are only the answers
        monkeypatch.setattr(f"grpo_jax.engines.servers.Engine.{name}", function)
    model = Pretrained(SHAPE, PARAMS, CHAT.tokenizer, CHAT.eos_ids, Path("model"))
    with opened_agent(talk) as opened:
        task = task_of(opened.begin(ROWS), opened)
        prompts, numbers = task.prompts(0), completion_numbers(SAMPLING_OPTIONS)
        for i, j in np.ndindex(numbers.shape):
            ids, mask, logprobs, turn = (
                x[i, j] for x in (own.completion_ids, own.completion_mask, own.sampler_logprobs, own.turn)
            )
            for number in range(1, turn.max() + 1):
                before = (turn > 0) & (turn < number)
                text = (*prompts.tokens.ids[i][prompts.tokens.mask[i]].tolist(), *ids[before].tolist())
                left, action = 12 - int((before & mask).sum()), mask & (turn == number)
                turns[seed_of(noise, numbers[i, j], number), text, left] = (
                    ids[action].tolist(),
                    logprobs[action].tolist(),
                )
        through = sampler_of(EngineOptions(("http://x",)), model, task, CONFIG, note=print)
        out = through.complete(PARAMS, prompts, numbers, group_temperatures(SAMPLING_OPTIONS), noise)
    assert not turns
    assert_same(out, own)


# ---- tools


def test_calls_become_tool_calls_and_continue_the_transcript():
    call = '<tool_call>{"name": "look_up", "arguments": {"word": "b"}}</tool_call>'
    message = answer_message(Completion(f"so {call}{call}"), 2, has_tools=True)
    assert message["content"] == "so"
    functions = {"name": "look_up", "arguments": '{"word": "b"}'}
    names = [f"call02{i:03}" for i in range(2)]
    assert message["tool_calls"] == [{"id": name, "type": "function", "function": functions} for name in names]
    calls = [each | {"function": functions | {"arguments": '{"word":"b"}'}} for each in message["tool_calls"]]
    spelled = message | {"tool_calls": calls}
    assert read_message(message, "") == read_message(spelled | {"refusal": None}, "")
    assert answer_message(Completion(call), 0, has_tools=False)["content"] == call
    assert answer_message(Completion("<tool_call>{"), 0, has_tools=True)["content"] == "<tool_call>{"


def test_tools_of_the_first_request_are_in_the_prompt():
    def run(example, url):
        complete(url, [{"role": "user", "content": "a"}], tools=[TOOL])
        return 1

    with opened_agent(run) as opened:
        task = task_of(opened.begin(ROWS), opened)
        assert {example["prompt"].partition(";")[0] for example in task.prompts(0).examples} == {"look_up"}
        assert {*endings(sample(task))} == {"done"}


# ---- faults


def first(example, url):
    messages = [{"role": "user", "content": example["question"]}]
    return [*messages, complete(url, messages)["message"]]


def says(text):
    return {"role": "user", "content": text}


def raising(example, url):
    first(example, url)
    raise LookupError("nothing there")


def hanging(example, url):
    first(example, url)
    time.sleep(3)


async def hanging_later(example, url):
    await asyncio.to_thread(first, example, url)
    await asyncio.sleep(30)


def rewarding_too_often(example, url):
    first(example, url)
    return [1, 2]


def rewarding_with_text(example, url):
    first(example, url)
    return "well done"


def summarising(example, url):
    first(example, url)
    complete(url, [says("in short"), says("go on")])


def editing(example, url):
    question, answer = first(example, url)
    complete(url, [question, {**answer, "content": "I never said so"}, says("go on")])


def repeating(example, url):
    complete(url, first(example, url))


def speaking_for_the_policy(example, url):
    complete(url, [*first(example, url), says("go on"), {"role": "assistant", "content": "yes"}, says("go on")])


def in_parallel(example, url):
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(partial(complete, url), [[says(example["question"])], [says("other")]]))


def changing_tools(example, url):
    complete(url, [*first(example, url), says("go on")], tools=[TOOL])


STARTS = []


def beginning_otherwise(example, url):
    STARTS.append(url)
    complete(url, [says(str(len(STARTS)))])


FAULTS = [
    (raising, "raised", "LookupError: nothing there"),
    (hanging, "timeout", "neither made a request nor ended within 0.5 s"),
    (hanging_later, "timeout", "neither made a request nor ended within 0.5 s"),
    (rewarding_with_text, "not a reply", "a reward that is no finite number"),
    (rewarding_too_often, "not a reply", "returned 2 rewards for 1 turns"),
    (summarising, "not a reply", r"messages\[0\] does not continue the transcript of this rollout: its content is"),
    (editing, "not a reply", r"messages\[1\] does not continue .* its content is 'I never said so'"),
    (repeating, "not a reply", "adds no message to the transcript"),
    (speaking_for_the_policy, "not a reply", "adds a message of the assistant that the model did not write"),
    (in_parallel, "not a reply", "(one request at a time|other messages or tools|does not continue)"),
    (changing_tools, "not a reply", "its tools differ from those of the first request"),
    (beginning_otherwise, "not a reply", "other messages or tools than when the agent told the prompt"),
]


@pytest.mark.parametrize(("run", "ending", "words"), FAULTS, ids=[run.__name__ for run, *_ in FAULTS])
def test_faults_fail_the_rollout_with_a_sentence(run, ending, words):
    out, messages = play(run, deadline=0.5 if ending == "timeout" else 20)
    assert {*endings(out)} == {ending}
    assert re.search(words, messages[ending])
    assert episode_return([{}], [Completion("", ending=ending)]) == [None]


def test_budgets_end_agents_whose_requests_are_refused():
    ended = []

    def endless(example, url):
        messages = [says(example["question"])]
        try:
            while True:
                messages += [complete(url, messages)["message"], says("no")]
        except RuntimeError as error:
            ended.append(str(error))
            raise

    with opened_agent(endless) as opened:
        out = sample(task_of(opened.begin(ROWS), opened))
        deadline = time.monotonic() + 10
        while len(ended) < 8 and time.monotonic() < deadline:  # six rollouts, and the two that told prompts
            time.sleep(0.01)
    assert {*endings(out)} <= {"turns", "policy tokens"}
    assert opened.messages == {}
    assert len(ended) == 8
    assert all("ended" in words or "has its prompt" in words for words in ended)


def test_agents_that_tell_no_prompt_are_refused(monkeypatch):
    with opened_agent(lambda example, url: 1) as opened, refused("told no prompt of row 0: it ended without a request"):
        opened.begin(ROWS)
    with refused(r"function of \(example, client\) or \(example, url\)"), opened_agent(lambda x: 1):
        pass
    monkeypatch.setitem(sys.modules, "openai", None)  # as if it were not installed
    with refused("needs the package openai: pip install openai"), opened_agent(lambda example, client: 1):
        pass


# ---- requests


GOOD = {"model": "policy", "messages": [says("a")]}
WRONG_CALLS = [{"function": {"arguments": "{"}}]
BAD = [
    *(b"", b"{", b"[]", b"3", b"null", b'"\xff"', b"[" * 100_000, b'{"a":' * 5_000, b"\x00", b"9" * 5_000),
    *({"model": "policy"}, GOOD | {"messages": []}, GOOD | {"messages": "a"}, GOOD | {"messages": [3]}),
    *(GOOD | {"messages": [{}]}, GOOD | {"messages": [{"role": "user"}]}, GOOD | {"messages": [{"role": 3}]}),
    *(GOOD | {"messages": [{"role": "robot", "content": "a"}]}, GOOD | {"messages": [says(3)]}),
    GOOD | {"messages": [says([{"type": "image_url", "image_url": {"url": "data:"}}])]},
    GOOD | {"messages": [says([{"type": "input_audio"}])]},
    GOOD | {"messages": [says([3])]},
    GOOD | {"messages": [says("\ud800")]},
    GOOD | {"messages": [says("a") | {"name": 3}]},
    GOOD | {"messages": [says("a") | {"reasoning_content": "b"}]},
    *(GOOD | {"messages": [says("a") | {"tool_calls": calls}]} for calls in (3, [3], WRONG_CALLS)),
    *(GOOD | {"tools": tools} for tools in (3, [3], [{"function": {}}], {"a": "b"})),
    *(GOOD | {"model": "gpt-4o"}, GOOD | {"model": 3}, GOOD | {"stream": True}, GOOD | {"n": 2}),
    *(GOOD | {"logit_bias": {"5": 1}}, GOOD | {"temperature": 0.2}, GOOD | {"max_tokens": 5}, GOOD | {"seed": 1}),
    *(GOOD | {"max_completion_tokens": -1}, GOOD | {"stop": ["a"]}, GOOD | {"top_p": 0.5}, GOOD | {"logprobs": True}),
    *(GOOD | {"tool_choice": "required"}, GOOD | {"response_format": {"type": "json_object"}}, GOOD | {"x" * 999: 1}),
    GOOD | {"messages": [says("a" * 2**22)]},
]


def test_bad_requests_get_an_error_as_openai_writes_it():
    assert len(BAD) >= 40
    seen, answers = SimpleNamespace(url=""), []

    def run(example, url):
        seen.url = url
        answers.extend((body, call(f"{url}/chat/completions", body)) for body in BAD)
        return first(example, url) and 1

    with opened_agent(run) as opened:
        opened.begin([ROWS[0]])
        host, path = urlsplit(seen.url)[1:3]
        for place, method in (("/v1/models", "POST"), (f"{path}/embeddings", "POST"), ("/", "GET"), ("/a/b", "PUT")):
            answers.append((place, call(f"http://{host}{place}", b"{}", method)))
        heads = ["nonsense", "POST / HTTP/1.1\r\nTransfer-Encoding: chunked", "GET / HTTP/9"]
        heads += ["GET / HTTP/1.1\r\nA: " + "a" * 2**17, "POST / HTTP/1.1\r\nContent-Length: -5"]
        answers += [(head[:40], send(host, f"{head}\r\n\r\n".encode())) for head in heads]
    for body, (status, answer) in answers:
        assert 400 <= status < 500, body
        assert answer.keys() == {"error"}
        error = answer["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert len(error["message"]) < 400, body
        assert "Traceback" not in error["message"]


def send(host, head):
    """Sends bytes, and returns the status and the JSON of the answer."""
    connection = http.client.HTTPConnection(host, timeout=10)
    connection.connect()
    connection.sock.sendall(head)
    answer = http.client.HTTPResponse(connection.sock)
    answer.begin()
    body = json.loads(answer.read())
    connection.close()
    return answer.status, body
