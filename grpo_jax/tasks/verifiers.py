"""Tasksets of the package verifiers as environments, by its protocols single-agent and user-sim.

The policy is the agent that the task scores, with the harness "null": it writes messages and has no tools. When an
episode ends, its messages become a trace of the package, and the task's rewards score it.
"""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from grpo_jax.data.coroutines import run_to_end
from grpo_jax.data.episodes import Key, Reply, ReplyFn, Transcript
from grpo_jax.data.types import Example
from grpo_jax.errors import UsageError

try:
    import verifiers.v1 as vf
    from verifiers.v1 import graph
    from verifiers.v1.dialects import parse_message
    from verifiers.v1.envs.user_sim.env import DONE, PERSONA
    from verifiers.v1.session import call_hook
    from verifiers.v1.state import state_cls
    from verifiers.v1.trace import AgentInfo, TraceTask
    from verifiers.v1.types import Response
    from verifiers.v1.utils.decorators import discover_decorated
except ImportError as error:
    raise UsageError(f"tasksets need the package verifiers: pip install 'verifiers>=0.4' ({error})") from None

Message = dict[str, Any]
# The conversation as the user sees it, whose own messages have the role "assistant" -> the next message of the user.
User = Callable[[Sequence[Message]], Awaitable[str]]

_GREETING = "Hello! How can I help you today?"  # only the user reads it
_MOST = 10_000  # messages of users that are remembered


def verifiers_rows(taskset: Any, user: User | None = None) -> list[dict[str, Any]]:
    """Makes a row for each task of a taskset, with its number as "index".

    Args:
      taskset: A finite `verifiers.v1.Taskset`.
      user: The user of user-sim, who opens the conversation. The prompt of a task is known only to this user. Default:
        the prompt of the task opens it (single-agent).

    Raises:
      UsageError: The tasks need tools, interceptors or a runtime.
    """
    rows = []
    for index, task in enumerate(taskset):
        _check(taskset, task)
        prompt, system = task.data.prompt, task.data.system_prompt
        messages = [{"role": "system", "content": system}] if system else []
        if user is not None:
            prompt = run_to_end(_ask(user, task, [])).strip()
            if prompt == DONE:  # there is no conversation
                continue
        if not isinstance(prompt, str):
            messages += [message.model_dump(exclude_none=True) for message in prompt or ()]
        rows.append(
            {
                "prompt": [*messages, {"role": "user", "content": prompt}][: None if isinstance(prompt, str) else -1],
                "index": index,
            }
        )
    return rows


def verifiers_environment(taskset: Any, user: User | None = None, *, max_turns: int = 8) -> ReplyFn:
    """Makes an environment whose last reply has the reward of the task: the weighted sum of its rewards and judges.

    Args:
      taskset: The taskset of the rows.
      user: The user of user-sim, who answers until it writes `DONE` of the package. Default: the episode ends after the
        first turn (single-agent).
      max_turns: The most messages of the user, with the first one, which is in the prompt.

    Returns:
      (example, transcript, key) -> reply, for the rows of `verifiers_rows`. It is async.
    """
    tasks, remembered = list(taskset), dict[Any, str]()

    async def answer(task: vf.Task, texts: Sequence[str]) -> str:
        assert user is not None
        if (task.data.idx, *texts) not in remembered:
            if len(remembered) >= _MOST:
                remembered.clear()
            remembered[task.data.idx, *texts] = (await _ask(user, task, texts)).strip()
        return remembered[task.data.idx, *texts]

    async def reply(example: Example, transcript: Transcript, key: Key) -> Reply:
        del key
        task, messages = tasks[example["index"]], list(example["prompt"].messages)
        if user is None:
            return Reply(done=True, reward=await _score(task, messages, transcript, []))
        # The words of the user in the transcript have the delimiters of turns, so the user is asked again.
        texts, scenario = [messages[-1]["content"]], task
        for turn in transcript[:-1]:
            texts.append(turn.action.strip())
            texts.append(await answer(scenario, texts))
        task, heard = task.with_data(prompt=None), texts[2::2]
        if len(transcript) < max_turns and not await _is_stopped(task, messages, transcript, heard):
            text = await answer(scenario, [*texts, transcript[-1].action.strip()])
            if text != DONE:
                return Reply(text)
        return Reply(done=True, reward=await _score(task, messages, transcript, heard))

    return reply


async def _ask(user: User, task: vf.Task, texts: Sequence[str]) -> str:
    """Asks the user for its next message, after those of both sides in turn."""
    persona = PERSONA.replace("{done}", DONE).replace("{scenario}", task.data.prompt_text)
    roles = ("assistant", "user") * len(texts)
    said = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return await user([{"role": "system", "content": persona}, {"role": "user", "content": _GREETING}, *said])


async def _trace(task: vf.Task, messages: Sequence[Message], turns: Transcript, heard: Sequence[str]) -> vf.Trace:
    """Returns the package's trace of a transcript, in which the user answered with these texts."""
    about = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    trace: vf.Trace = vf.Trace(task=about, state=state_cls(type(task))(), agent=AgentInfo(config=vf.AgentConfig()))
    await task.setup(trace, None)  # type: ignore[arg-type]
    said = [parse_message(message) for message in messages]
    for turn, text in zip(turns, [*heard, ""], strict=True):
        action = vf.AssistantMessage(content=str(turn.action))
        finish: Any = "length" if turn.action.truncated else "stop"
        response = Response(id="", created=0, model="", message=action, finish_reason=finish)
        graph.prepare_turn(trace, said).commit(response)
        said = [*said, action, vf.UserMessage(content=text)]
    return trace


async def _is_stopped(task: vf.Task, *episode: Any) -> bool:
    trace = await _trace(task, *episode)
    return any([await call_hook(stop, {vf.Trace: trace}) for stop in task.hooks("stop")])


async def _score(task: vf.Task, *episode: Any) -> float:
    trace = await _trace(task, *episode)
    await task.finalize(trace, None)  # type: ignore[arg-type]
    await task.score(trace)
    return trace.reward


def _check(taskset: Any, task: vf.Task) -> None:
    hooks = [*task.hooks("metric"), *task.hooks("reward"), *(judge.score for judge in task.plugged_judges())]
    runtimes = [inspect.signature(hook).parameters.get("runtime") for hook in hooks]
    needs = {
        "tools": task.toolsets(task.config) or taskset.toolsets(taskset.config),
        "interceptors": discover_decorated(task, "intercept"),
        "a runtime": task.NEEDS_CONTAINER or any(x is not None and x.default is x.empty for x in runtimes),
    }
    for what, is_needed in needs.items():
        if is_needed:
            raise UsageError(f"tasks of {type(taskset).__name__} need {what}: take a taskset whose agent only writes")
