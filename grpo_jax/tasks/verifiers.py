"""Tasksets of the package verifiers as environments, by its protocols single-agent and user-sim.

The policy is the agent that the task scores, with the harness "null": it writes messages and has no tools. When an
episode ends, its messages become a trace of the package, which the task scores.
"""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from grpo_jax.data.coroutines import run_to_end
from grpo_jax.data.episodes import Key, Reply, ReplyFn, Transcript
from grpo_jax.data.types import Example
from grpo_jax.errors import UsageError

try:
    from verifiers.v1 import configs, dialects, graph, session, state, trace as traces, types
    from verifiers.v1.envs.user_sim.env import DONE, PERSONA
    from verifiers.v1.utils.decorators import discover_decorated
except ImportError:  # a package of its own
    DONE = ""

Message = dict[str, Any]
# The conversation as the user sees it, whose own messages have the role "assistant" -> the next message of the user.
User = Callable[[Sequence[Message]], Awaitable[str]]

_GREETING = "Hello! How can I help you today?"  # only the user reads it


def verifiers_rows(taskset: Any, user: User | None = None) -> list[dict[str, Any]]:
    """Makes a row for each task of a taskset, with its number as "index".

    Args:
      taskset: A finite `verifiers.v1.Taskset`.
      user: The user of user-sim, who alone knows the prompt of a task, and opens the conversation. Default: the prompt
        of the task opens it (single-agent).

    Raises:
      UsageError: The tasks need tools, interceptors or a runtime.
    """
    if not DONE:
        raise UsageError("tasksets need the package verifiers of version 0.4: pip install 'verifiers>=0.4'")
    rows = []
    for index, task in enumerate(taskset):
        _check(taskset, task)
        opening = task.data.prompt if user is None else run_to_end(_ask(user, task, []))
        if user is None or opening != DONE:
            first = {"role": "system", "content": task.data.system_prompt}
            opened = [types.UserMessage(content=opening)] if isinstance(opening, str) else opening
            messages = [first] * bool(first["content"]) + [x.model_dump(exclude_none=True) for x in opened]
            rows.append({"prompt": messages, "index": index})
    return rows


def verifiers_environment(taskset: Any, user: User | None = None, *, max_turns: int = 8) -> ReplyFn:
    """Makes an environment whose last reply has the reward of the task: the weighted sum of its rewards and judges.

    Args:
      taskset: The taskset of the rows.
      user: The user of user-sim, who answers until it writes `DONE` of the package. Default: an episode has one turn
        (single-agent).
      max_turns: The most messages of the user, with the first one, which is in the prompt.

    Returns:
      (example, transcript, key) -> reply, for the rows of `verifiers_rows`. It is async.
    """
    tasks = list(taskset)

    async def reply(example: Example, transcript: Transcript, key: Key) -> Reply:
        del key
        task, messages = tasks[example["index"]], example["prompt"].messages
        played = task if user is None else task.with_data(prompt=None)
        trace = await _trace(played, messages, transcript)
        stops = [await session.call_hook(stop, {traces.Trace: trace}) for stop in played.hooks("stop")]
        continues = user is not None and len(transcript) < max_turns and not any(stops)
        text = await _ask(user, task, [x.content for x in trace.messages if x.role != "system"]) if continues else DONE
        if text != DONE:
            return Reply(text)
        await played.finalize(trace, None)
        await played.score(trace)
        return Reply(done=True, reward=trace.reward)

    return reply


async def _ask(user: Any, task: Any, texts: Sequence[str]) -> str:
    """Asks the user for its next message, after those of both sides in turn."""
    persona = PERSONA.replace("{done}", DONE).replace("{scenario}", task.data.prompt_text)
    roles = ("assistant", "user") * len(texts)
    history = [{"role": role, "content": text.strip()} for role, text in zip(roles, texts, strict=False)]
    return (
        await user([{"role": "system", "content": persona}, {"role": "user", "content": _GREETING}, *history])
    ).strip()


async def _trace(task: Any, messages: Sequence[Any], turns: Transcript) -> Any:
    """Returns the package's trace of a transcript that follows these messages."""
    about = traces.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    agent = traces.AgentInfo(config=configs.agent.AgentConfig())
    trace: Any = traces.Trace(task=about, state=state.state_cls(type(task))(), agent=agent)
    await task.setup(trace, None)
    history = [dialects.parse_message(message) for message in messages]
    for turn in turns:
        action = types.AssistantMessage(content=str(turn.action))
        finish: Any = "length" if turn.action.truncated else "stop"
        response = types.Response(id="", created=0, model="", message=action, finish_reason=finish)
        graph.prepare_turn(trace, history).commit(response)
        history = [*history, action, *(dialects.parse_message(message) for message in [turn.message] if message)]
    return trace


def _check(taskset: Any, task: Any) -> None:
    hooks = [*task.hooks("metric"), *task.hooks("reward"), *(judge.score for judge in task.plugged_judges())]
    runtimes = [inspect.signature(hook).parameters.get("runtime") for hook in hooks]
    needs = {
        "tools": task.toolsets(task.config) or taskset.toolsets(taskset.config),
        "interceptors": discover_decorated(task, "intercept"),
        "a runtime": task.NEEDS_CONTAINER or any(x and x.default is x.empty for x in runtimes),
    }
    for what in (what for what, is_needed in needs.items() if is_needed):
        raise UsageError(f"tasks of {type(taskset).__name__} need {what}: take a taskset whose agent only writes")
