"""Agents, which own their loop: code that talks to the policy through a URL, as to OpenAI's API.

An agent is an `Environment`. Its requests are what the policy reads, and its end is the end of an episode. The first
request is the prompt of its row. A later request must continue the transcript, so that a rollout is one row of tokens:
what the policy wrote is never encoded again, and the chat template encodes only what the agent added.

All agents and the endpoint run in one thread. A turn of all episodes is sampled once every living agent waits for it.
"""

import asyncio
import inspect
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from typing import Any

from grpo_jax.data.coroutines import awaited
from grpo_jax.data.episodes import (
    MAX_CHARACTERS,
    Environment,
    Key,
    Reply,
    Transcript,
    called,
    checked_reply,
    messages_of,
)
from grpo_jax.data.types import Completion, Example
from grpo_jax.errors import UsageError
from grpo_jax.models.chat import Chat, Message, messages_encoder
from grpo_jax.rewards.reward import place_and_reason
from grpo_jax.tasks.adapters import with_prompt
from grpo_jax.tasks.chat_api import (
    MODELS,
    ChatRequest,
    added_messages,
    answer_message,
    read_message,
    read_request,
    write_answer,
)
from grpo_jax.tasks.endpoint import BadRequest, start_server

_THREADS = 1024  # for `asyncio.to_thread` in agents, each of which may wait for the policy
_AT_ONCE = 64  # agents that begin at once to tell the prompts of rows
_GRACE = 5.0  # seconds beyond those of agents, after which their thread is taken to be blocked

# (example, client) or (example, url) -> reward; may be async
Run = Callable[[Example, Any], Any]


class _Session:
    """A living agent, and the transcript of its rollout."""

    def __init__(self) -> None:
        self.task: asyncio.Task[Any] | None = None
        self.events: asyncio.Queue[ChatRequest | Reply] = asyncio.Queue()  # what the agent did, in order
        self.waiting: asyncio.Future[dict[str, Any]] | None = None  # the answer to the agent's request
        self.failure: Reply | None = None
        self.transcript: list[Message] = []  # what the policy has read and written
        self.tools: list[Mapping[str, Any]] = []

    def answer(self, name: str, actions: Sequence[Completion], max_tokens: int) -> None:
        """Answers the request that waits with the last of all actions, which have at most `max_tokens` tokens."""
        message = answer_message(actions[-1], len(actions), has_tools=bool(self.tools))
        self.transcript.append(read_message(message, "the answer"))
        is_cut = sum(map(_num_tokens, actions)) >= max_tokens
        if self.waiting and not self.waiting.done():
            self.waiting.set_result(write_answer(message, f"{name}-{len(actions)}", is_cut=is_cut))
        self.waiting = None

    def refuse(self, why: BadRequest) -> None:
        """Refuses the request that waits, if there is one."""
        if self.waiting and not self.waiting.done():
            self.waiting.set_exception(why)


class _Agents:
    """The thread of the agents and of the endpoint."""

    def __init__(self, run: Run, values: Mapping[str, Any], encode: Callable[..., list[int]], deadline: float):
        self._run, self._values, self._encode, self._deadline = run, values, encode, deadline
        self._make_client = _client_maker(run)
        self._sessions: dict[str, _Session] = {}
        self._secret = secrets.token_urlsafe(12)  # others on this machine cannot guess a URL
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(_THREADS))
        self._thread = threading.Thread(target=self._loop.run_forever, name="agents", daemon=True)
        self._thread.start()
        self._server, port = asyncio.run_coroutine_threadsafe(start_server(self._serve), self._loop).result()
        self._url = f"http://127.0.0.1:{port}/{self._secret}"

    def close(self) -> None:
        """Ends all agents and the endpoint."""

        def end() -> None:
            self._server.close()
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.call_soon(self._loop.stop)

        self._loop.call_soon_threadsafe(end)
        self._thread.join(_GRACE)
        if not self._thread.is_alive():
            self._loop.close()

    # ---- the side of the trainer, in its thread

    def ask(self, examples: Sequence[Example], transcripts: Sequence[Transcript], keys: Sequence[Key]) -> list[Reply]:
        """Gives each agent its action, and returns what the agents did then."""
        # Copies of an episode, which fill up the calls of an evaluation, share an agent.
        asked = dict(zip(keys, zip(examples, transcripts, strict=True), strict=True))
        events = self._wait([self._advance(key, *each) for key, each in asked.items()], 2 * self._deadline)
        pairs = zip(asked.items(), events, strict=True)
        replies = {key: self._reply(key, *each, event) for (key, each), event in pairs}
        return [replies[key] for key in keys]

    def end(self, keys: Sequence[Key]) -> None:
        """Ends the agents of episodes."""
        why = BadRequest("the rollout has ended: no tokens or turns are left, or it failed", status=404)
        for name in {_name(key) for key in keys}:
            self._loop.call_soon_threadsafe(self._stop, name, why)

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Returns rows whose prompts are the first requests of their agents.

        Raises:
          UsageError: An agent makes no request.
        """
        begun: list[Mapping[str, Any]] = []
        for start in range(0, len(rows), _AT_ONCE):
            names = [f"row-{i}" for i in range(start, min(start + _AT_ONCE, len(rows)))]
            events = self._wait([self._first(name, rows[start + i]) for i, name in enumerate(names)], self._deadline)
            for name, event in zip(names, events, strict=True):
                self._loop.call_soon_threadsafe(self._stop, name, BadRequest("the row has its prompt", status=404))
                if isinstance(event, Reply):
                    reason = place_and_reason(event.message) if event.failure else "it ended without a request"
                    raise UsageError(f"the agent told no prompt of {name.replace('-', ' ')}: {reason}")
                row = rows[len(begun)]
                begun.append(with_prompt(row, event.messages) | {"tools": event.tools or None})
        return begun

    def _wait(self, coroutines: list[Any], seconds: float) -> list[ChatRequest | Reply]:
        """Runs coroutines in the thread of the agents. If an agent blocks the thread, all agents have failed."""

        async def gather() -> list[ChatRequest | Reply]:
            return await asyncio.gather(*coroutines)

        future = asyncio.run_coroutine_threadsafe(gather(), self._loop)
        try:
            return future.result(seconds + _GRACE)
        except TimeoutError:
            future.cancel()
            words = "an agent blocks the thread of all agents: let it await, or define run without async"
            return [Reply(failure="timeout", message=words)] * len(coroutines)

    def _reply(self, key: Key, example: Example, transcript: Transcript, event: ChatRequest | Reply) -> Reply:
        """Returns what an agent did as the reply of an environment."""
        if isinstance(event, Reply):
            turns, count = key[-1] + 1, len(event.rewards)
            return event if count in (0, turns) else _failed(f"the agent returned {count} rewards for {turns} turns")
        session, prompt, action = self._sessions[_name(key)], example["prompt"], transcript[-1].action
        try:
            added = added_messages(session.transcript, session.tools, event)
            if sum(len(message["content"]) for message in added) > MAX_CHARACTERS:
                return Reply("".join(message["content"] for message in added))  # longer than any budget of tokens
            ids = self._encode(added, getattr(prompt, "kwargs", {}), _is_open(action))
        except (BadRequest, UsageError) as error:
            return _failed(f"a request of the agent fails its rollout: {error}")
        session.transcript = event.messages
        return Reply(ids=ids)

    # ---- the side of the agents, in their thread

    async def _advance(self, key: Key, example: Example, transcript: Transcript) -> ChatRequest | Reply:
        """Answers the request of an agent, which begins before its first answer, and returns what it does then."""
        name = _name(key)
        if key[-1] == 0:
            self._stop(name, BadRequest("the rollout begins again", status=404))
            first = await self._first(name, example.get("row", example))
            if isinstance(first, Reply):
                return first if first.failure else _failed("the agent ended without a request")
            prompt = example["prompt"]
            messages = [read_message(message, "the prompt") for message in prompt.messages]
            if first != (messages, prompt.kwargs.get("tools") or []):
                return _failed("the first request has other messages or tools than when the agent told the prompt")
            self._sessions[name].transcript, self._sessions[name].tools = first
        session = self._sessions[name]
        session.answer(name, [turn.action for turn in transcript], self._values["max_tokens"])
        return session.failure or await self._next(session)

    async def _first(self, name: str, row: Mapping[str, Any]) -> ChatRequest | Reply:
        """Begins an agent, and returns its first request, or its end."""
        session = self._sessions[name] = _Session()
        client = self._make_client(f"{self._url}/{name}/v1")
        session.task = asyncio.get_running_loop().create_task(self._run_agent(session, deepcopy(dict(row)), client))
        return await self._next(session)

    async def _next(self, session: _Session) -> ChatRequest | Reply:
        try:
            async with asyncio.timeout(self._deadline):
                return await session.events.get()
        except TimeoutError:
            words = f"the agent neither made a request nor ended within {self._deadline:g} s"
            return Reply(failure="timeout", message=words)

    async def _run_agent(self, session: _Session, row: Example, client: Any) -> None:
        run = self._run if inspect.iscoroutinefunction(self._run) else partial(_in_thread, self._run)
        value = await awaited(called(run, row, client))
        if not isinstance(value, Reply):  # that `called` makes of an error
            value = Reply(done=True, **{"rewards" if isinstance(value, list) else "reward": value})
        session.events.put_nowait(checked_reply(value))

    def _stop(self, name: str, why: BadRequest) -> None:
        """Ends an agent. A request that waits is refused."""
        if session := self._sessions.pop(name, None):
            session.refuse(why)
            assert session.task
            session.task.cancel()

    async def _serve(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Answers a request of an agent, once the policy has."""
        secret, _, rest = path.lstrip("/").partition("/")
        name, _, resource = rest.partition("/")
        session = self._sessions.get(name) if secrets.compare_digest(secret.encode(), self._secret.encode()) else None
        if session is None:
            raise BadRequest("there is no such rollout: it has ended, or the URL is another", status=404)
        if (method, resource) == ("GET", "v1/models"):
            return 200, MODELS
        if (method, resource) != ("POST", "v1/chat/completions"):
            raise BadRequest("here are only POST /v1/chat/completions and GET /v1/models", status=404)
        request = read_request(body, self._values)
        if session.waiting:
            why = BadRequest("a rollout makes one request at a time, and another one still waits: await it first")
            session.failure = _failed(f"a request of the agent fails its rollout: {why}")
            session.events.put_nowait(session.failure)
            session.refuse(why)
            raise why
        session.waiting = asyncio.get_running_loop().create_future()
        session.events.put_nowait(request)
        return 200, await session.waiting


@contextmanager
def open_agent(
    run: Run, chat: Chat, values: Mapping[str, Any], *, deadline: float = 10.0, source: str = ""
) -> Iterator[Environment]:
    """Opens an agent as an environment, whose endpoint ends with the block.

    Args:
      run: (example, client) -> the reward of its rollout, a list with the reward of each turn, or None if no reward
        applies. May be async. The example is a row. The client is an `openai.AsyncOpenAI`, or an `openai.OpenAI` if
        `run` is not async. If the second parameter is named "url", it gets the URL instead.
      chat: The tokenizer and its chat template.
      values: The values that fields of requests may have, from `chat_api.request_values`.
      deadline: Seconds that an agent may take until its next request.
      source: The digest of its file; empty: it is not from a file.

    Yields:
      The environment. An agent that raises, hangs or makes a wrong request fails only its rollout.

    Raises:
      UsageError: There is no chat template, `run` takes other arguments, or openai is not installed.
    """
    if not chat.tokenizer.chat_template:
        raise UsageError("an agent sends chat messages, but the tokenizer has no chat template: take another model")
    encode = messages_encoder(chat)
    agents, messages = _Agents(run, values, encode, deadline), dict[str, str]()

    def ask(*episodes: Any) -> list[Reply]:
        replies = agents.ask(*episodes)
        messages.update(messages_of(replies))
        return replies

    try:
        yield Environment(ask, encode, messages, source=source, begin=agents.begin, end=agents.end)
    finally:
        agents.close()


def _client_maker(run: Run) -> Callable[[str], Any]:
    """Returns the function from a URL to the second argument of an agent."""
    try:
        second = list(inspect.signature(run).parameters)[1]
    except (TypeError, ValueError, IndexError):
        second = ""
    if second == "url":
        return str
    if second != "client":
        raise UsageError("an agent must be a function of (example, client) or (example, url): name its parameters so")
    try:
        import openai  # only agents with a client need it
    except ImportError:
        raise UsageError(
            "an agent with a client needs the package openai: pip install openai, or name the parameter url"
        ) from None
    is_async = inspect.iscoroutinefunction(run)
    make: Any = openai.AsyncOpenAI if is_async else openai.OpenAI
    http: Any = openai.DefaultAsyncHttpxClient if is_async else openai.DefaultHttpxClient
    # One pool of connections, without the proxies that the environment names. A retry would be a second request.
    pool = http(trust_env=False)
    first = make(base_url="http://127.0.0.1", api_key="none", max_retries=0, timeout=None, http_client=pool)
    return lambda url: first.with_options(base_url=url)


def _is_open(action: Completion) -> bool:
    """Returns whether a turn ended without EOS."""
    return action.stopped or action.truncated


def _num_tokens(action: Completion) -> int:
    return len(action.ids) + (not _is_open(action))


def _failed(words: str) -> Reply:
    return Reply(failure="not a reply", message=words)


def _name(key: Key) -> str:
    """Returns the name of a rollout in URLs."""
    return "-".join(map(str, key[:-1]))


async def _in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function in a thread of its own, which does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if result.done():  # the agent was ended
            return
        result.set_exception(error) if error else result.set_result(value)

    def work() -> None:
        value, error = None, None
        try:
            value = function(*arguments)
        except BaseException as raised:
            error = RuntimeError(repr(raised)) if isinstance(raised, StopIteration) else raised
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=work, daemon=True).start()
    return await awaited(await result)
