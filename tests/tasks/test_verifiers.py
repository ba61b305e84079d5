"""Tasksets of verifiers: transcript, reward and length are those of the package's own loop, with scripted sides."""

import asyncio
import hashlib
import json
import sys
import threading
import types
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.machinery import ModuleSpec

import pytest
from tiny import refused

from grpo_jax.data.types import Completion, Prompt, Turn
from grpo_jax.tasks import verifiers as adapter

vf = pytest.importorskip("verifiers.v1", reason="needs the package verifiers, of version 0.4")
pytestmark = pytest.mark.slow

from verifiers.v1.clients import EvalClientConfig, ModelContext  # noqa: E402
from verifiers.v1.envs.single_agent import SingleAgentEnv, SingleAgentEnvConfig  # noqa: E402
from verifiers.v1.envs.user_sim import UserSimEnv, UserSimEnvConfig  # noqa: E402
from verifiers.v1.runtimes.base import Runtime  # noqa: E402

MAX_TURNS = 4

# ---- two tasksets


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    """Two weighted rewards, and a stop."""

    @vf.reward
    async def right(self, trace):
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.25)
    async def short(self, trace):
        return float(len(trace.last_reply) < 10)

    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return "stop" in trace.last_reply


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for a in range(1, 6):
            data = SumData(prompt=f"{a} + 3?", system_prompt="You add." if a % 2 else None, answer=str(a + 3))
            yield SumTask(data, self.config.task)


class WordData(vf.TaskData):
    word: str


class WordState(vf.State):
    turns: int = 0


class WordTask(vf.Task[WordData, WordState]):
    """A prompt of several messages, a state, a reward with several names, and a metric."""

    async def finalize(self, trace, runtime):
        trace.state.turns = trace.num_turns

    @vf.reward
    async def shares(self, trace) -> dict:
        texts = [message.content or "" for message in trace.assistant_messages]
        share = sum(self.data.word in text for text in texts) / max(1, len(texts))
        return {"share": share, "turns": 0.1 * trace.state.turns}

    @vf.metric
    async def messages(self, trace):
        return len(trace.messages)


class WordTaskset(vf.Taskset[WordTask, vf.TasksetConfig]):
    def load(self):
        for word in ("cat", "11", "bird"):
            said = [
                vf.UserMessage(content=f"{word}!"),
                vf.AssistantMessage(content="How?"),
                vf.UserMessage(content="Go."),
            ]
            yield WordTask(WordData(prompt=said, word=word), self.config.task)


# ---- a scripted policy and a scripted user: functions of what they read

POLICY = ["  It is 8. ", "cat", "7 stop", "I do not know", "dog 11", "It is 11"]
USER = ["Please help me.", " And then? ", "Go on.", "Once more.", "Thanks."]


def pick(texts, messages):
    read = "\x1f".join(message["content"].strip() for message in messages)
    return texts[zlib.crc32(read.encode()) % len(texts)]


def policy_text(messages):
    return pick(POLICY, messages)


def user_text(messages):
    has_spoken = any(message["role"] == "assistant" for message in messages)
    return pick([*USER, adapter.DONE] if has_spoken else USER, messages)


async def user(messages):
    return user_text(messages)


def flat(message):
    content = message["content"]
    return {**message, "content": content if isinstance(content, str) else "".join(part["text"] for part in content)}


class Model(BaseHTTPRequestHandler):
    """An endpoint of both sides."""

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = (user_text if body["model"] == "user" else policy_text)([flat(x) for x in body["messages"]])
        message, is_stream = {"role": "assistant", "content": text}, body.get("stream")
        choice = {"index": 0, "delta" if is_stream else "message": message, "finish_reason": "stop"}
        kind = "chat.completion.chunk" if is_stream else "chat.completion"
        answer = json.dumps({"id": "x", "object": kind, "created": 0, "model": body["model"], "choices": [choice]})
        data = (f"data: {answer}\n\ndata: [DONE]\n\n" if is_stream else answer).encode()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if is_stream else "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def seat(tmp_path, monkeypatch):
    """Starts the endpoint, and returns the configuration of an agent whose program uses installed packages."""

    async def prepare(self, script, env=None, *, activate=True):
        data = script.encode() if isinstance(script, str) else script
        file = tmp_path / f"{hashlib.sha256(data).hexdigest()[:12]}.py"
        file.write_bytes(data)
        return [sys.executable, str(file)]

    monkeypatch.setattr(Runtime, "prepare_uv_script", prepare)  # it would download uv
    for taskset in (SumTaskset, WordTaskset):
        module = types.ModuleType(taskset.__name__.lower())
        module.__all__, module.__spec__ = [taskset.__name__], ModuleSpec(module.__name__, None)
        setattr(module, taskset.__name__, taskset)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("MODEL_KEY", "x")
    with ThreadingHTTPServer(("127.0.0.1", 0), Model) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        client = {"type": "eval", "base_url": url, "api_key_var": "MODEL_KEY"}
        yield {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "client": client}
        server.shutdown()


def play_by_package(taskset, seat, *, user_sim):
    """Returns the taskset and the trace of each episode of the package's loop."""
    config = {"taskset": {"id": taskset.__name__.lower()}}
    if user_sim:
        seats = {"assistant": {**seat, "model": "policy"}, "user": {**seat, "model": "user", "max_turns": MAX_TURNS}}
        environment = UserSimEnv(UserSimEnvConfig(**config, **seats))
    else:
        environment = SingleAgentEnv(SingleAgentEnvConfig(**config, agent={**seat, "model": "policy"}))

    async def play():
        context = ModelContext(model="policy", client=EvalClientConfig(**seat["client"]))
        async with environment.serving():
            return [await environment.run_episode(task, context) for task in environment.taskset]

    episodes = asyncio.run(play())
    assert all(episode.ok for episode in episodes)
    return environment.taskset, [
        next(trace for trace in episode.traces if trace.agent.name in ("agent", "assistant")) for episode in episodes
    ]


def play(row, environment):
    """Returns the messages and the reward of an episode of our environment."""
    said, transcript = list(row["prompt"]), []
    example = row | {"prompt": Prompt("as the model reads it", row["prompt"])}
    while True:
        action = policy_text(said)
        transcript.append(Turn(Completion(action)))
        said.append({"role": "assistant", "content": action})
        reply = asyncio.run(environment(example, transcript, (0,)))
        if reply.done:
            return said, reply.reward
        said.append({"role": "user", "content": reply.text})
        written = Completion(f"<|user|>{reply.text}<|end|>")
        transcript[-1] = transcript[-1]._replace(observation=written, message=said[-1])


@pytest.mark.parametrize("user_sim", [False, True])
@pytest.mark.parametrize("taskset", [SumTaskset, WordTaskset])
def test_an_episode_is_that_of_the_package(seat, taskset, user_sim):
    taskset, traces = play_by_package(taskset, seat, user_sim=user_sim)
    options = [user] if user_sim else []
    rows, turns = adapter.verifiers_rows(taskset, *options), []
    environment = adapter.verifiers_environment(taskset, *options, max_turns=MAX_TURNS)
    assert [row["index"] for row in rows] == list(range(len(traces)))
    for row, trace in zip(rows, traces, strict=True):
        said, reward = play(row, environment)
        theirs = [
            flat({"role": message.role, "content": message.model_dump()["content"]}) for message in trace.messages
        ]
        assert [(x["role"], x["content"]) for x in said] == [(x["role"], x["content"]) for x in theirs]
        assert reward == pytest.approx(trace.reward)
        assert trace.stop_condition in (("user_closed", "enough") if user_sim else ("agent_completed",))
        turns.append(trace.num_turns)
    assert len({trace.reward for trace in traces}) > 1
    assert (max(turns) == MAX_TURNS) == user_sim


def test_tasks_that_need_more_than_messages_are_refused():
    class Needy(WordTask):
        @vf.reward
        async def runs(self, trace, runtime):
            return 1.0

    class NeedyTaskset(vf.Taskset[Needy, vf.TasksetConfig]):
        def load(self):
            yield Needy(WordData(prompt="cat", word="cat"))

    with refused("tasks of NeedyTaskset need a runtime"):
        adapter.verifiers_rows(NeedyTaskset(vf.TasksetConfig()))
