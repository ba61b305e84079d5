"""Environments that were written for other libraries, unchanged: Gymnasium's with texts, and classes for TRL.

They keep a state, and an environment here is a function that keeps none. So each reply begins with a fresh state, and
what the policy did before is done again. It must then answer as it did: what it draws at random it draws from the seed
of its row, also if it waits while others draw. Long episodes cost the square of their turns.
"""

import inspect
import json
import random
import types
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from grpo_jax.data.episodes import Key, Reply, ReplyFn, Transcript
from grpo_jax.data.types import Completion, Example, Number, Reward, Turn
from grpo_jax.errors import UsageError
from grpo_jax.rewards.worker import load
from grpo_jax.tasks.tools import reply_with

Factory = Callable[[], Any]  # makes a fresh environment; a class is one

# ---- Gymnasium


def gymnasium_environment(make: Factory) -> ReplyFn:
    """The environment of one of Gymnasium whose observations and actions are texts.

    A turn of the policy is an action; the observation is the reply, and the episode ends where it is terminated or
    truncated.

    Args:
      make: such as `lambda: gymnasium.make("…")`.

    Returns:
      (example, transcript, key) -> reply. The example needs the "seed" of `gymnasium_rows`.
    """

    def reply(example: Example, transcript: Transcript, key: Key) -> Reply:
        del key
        environment = make()
        try:
            environment.reset(seed=example["seed"])
            for turn in transcript:
                observation, reward, terminated, truncated, _ = environment.step(str(turn.action))
        finally:
            environment.close()
        return Reply(_observed(observation), done=bool(terminated or truncated), reward=float(reward))

    return reply


def gymnasium_rows(make: Factory, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each seed: "prompt", what the environment shows at its beginning, and "seed".

    Raises:
      UsageError: it shows no text, or is of Gym before Gymnasium.
    """
    environment = make()
    try:
        return [{"prompt": _first(environment.reset(seed=seed)), "seed": seed} for seed in seeds]
    finally:
        environment.close()


def _first(returned: Any) -> str:
    """Adds the text that `reset` returned to a prompt."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise UsageError(
            f"reset of the environment returned {type(returned).__name__}, and in Gymnasium it returns an observation "
            "and a dict: wrap one of Gym before Gymnasium"
        )
    return _observed(returned[0])


def _observed(observation: Any) -> str:
    if not isinstance(observation, str):
        raise UsageError(
            f"the environment shows {type(observation).__name__}, not text: wrap it in gymnasium.wrappers, "
            "TransformObservation and TransformAction, so that it speaks and hears texts"
        )
    return observation


# ---- TRL


def trl_rows(factory: Factory, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows as TRL shows them: what `reset` returns stands behind the prompt, or behind its last message.

    Args:
      factory: of the environment.
      rows: each is given to `reset`, as keywords; "prompt" may be left out where `reset` returns a text.

    Returns:
      The same rows with that prompt, and the "row" as it was.

    Raises:
      UsageError: `reset` raised or is async, or what it returned cannot stand behind the prompt.
    """

    def one(number: int, row: Mapping[str, Any]) -> dict[str, Any]:
        try:
            with _drawing(_draws_of(row)):
                start_text = factory().reset(**row)
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UsageError(
                f"reset of the environment, called with the columns of row {number}, raised {reason}"
            ) from error
        if inspect.isawaitable(start_text):
            if inspect.iscoroutine(start_text):
                start_text.close()  # else Python warns that nobody waited for it
            raise UsageError("reset of the environment is async, and TRL does not wait for it: make it a plain method")
        try:
            return {**row, "prompt": _behind(row.get("prompt", ""), start_text or ""), "row": dict(row)}
        except (KeyError, TypeError, ValueError):
            raise UsageError(
                f"row {number}: reset returned {type(start_text).__name__}, to stand behind a prompt of type "
                f"{type(row.get('prompt')).__name__}: let it return a text or None, and give a text or messages"
            ) from None

    return [one(number, row) for number, row in enumerate(rows)]


def _behind(prompt: Any, text: str) -> Any:
    if isinstance(prompt, str):
        return prompt + text
    *before, last = prompt
    return [*before, {**last, "content": last["content"] + text}]


def trl_tools(factory: Factory) -> dict[str, Callable[..., Any]]:
    """The public methods of an environment but `reset` and `get_reward`, by name: what the policy may call.

    Raises:
      UsageError: it is none for TRL.
    """
    try:
        environment = factory() if callable(factory) else None
    except (Exception, SystemExit) as error:
        raise UsageError(f"environment_factory cannot be called: {type(error).__name__}: {error}") from error
    methods = _methods(environment)
    if not methods or not callable(getattr(environment, "reset", None)):
        raise UsageError(
            "environment_factory must be a class, or make an instance of one, with reset(**row) and a method to call"
        )
    return methods


def _methods(environment: Any) -> dict[str, Callable[..., Any]]:
    names = (name for name, _ in inspect.getmembers(type(environment), inspect.isfunction))
    return {
        name: getattr(environment, name)
        for name in names
        if not name.startswith("_") and name not in ("reset", "get_reward")
    }


def trl_environment(factory: Factory) -> ReplyFn:
    """The environment of a class for TRL's `environment_factory`: the policy calls its methods as tools.

    Args:
      factory: the class, or what makes one. It has `reset(**row)`, which returns None or a text.

    Returns:
      (example, transcript, key) -> reply, async; examples are of `trl_rows`.
    """

    async def reply(example: Example, transcript: Transcript, key: Key) -> Reply:
        del key
        return (await _played(factory, example, transcript))[1]

    return reply


def trl_reward(factory: Factory, reward: Callable[..., Any] | None = None) -> Reward:
    """Makes a reward of an environment's own reward after it has played an episode.

    Args:
      factory: of the environment.
      reward: TRL's: called with environments, prompts, completions (lists of messages) and the columns of the rows, all
        by name, for one number each; may be async. None: `get_reward` of the environment.

    Returns:
      (examples, completions) -> numbers, async.
    """

    async def graded(examples: Sequence[Example], completions: Sequence[Completion]) -> list[Number]:
        pairs = list(zip(examples, completions, strict=True))
        played = [(await _played(factory, example, text.turns))[0] for example, text in pairs]
        if reward is None:
            return [await _waited(environment.get_reward()) for environment in played]
        rows = [_row(example) for example in examples]
        columns = {name: [row.get(name) for row in rows] for name in rows[0] if name != "prompt"}
        messages = [_messages(text.turns) for text in completions]
        prompts = [example["prompt"] for example in examples]
        return list(await _waited(reward(environments=played, prompts=prompts, completions=messages, **columns)))

    return graded


async def _played(factory: Factory, example: Example, turns: Sequence[Turn]) -> tuple[Any, Reply]:
    """Returns an environment after these turns, and what it replies to the last of them."""

    async def play() -> tuple[Any, Reply]:
        environment, reply = factory(), Reply(done=True)
        environment.reset(**_row(example))
        answer = reply_with(_methods(environment))
        for turn in turns:
            reply = await _waited(answer(example, [turn], ()))
        return environment, reply

    return await _with_draws_for(_row(example), play())


def load_factory(text: str) -> Factory:
    """The class that a text names: "path/to/file.py:Class" or "package.module:Class".

    Raises:
      UsageError: it names none that can be loaded.
    """
    return load("environment factory", text)


def environment_of_factory(*, factory: str) -> ReplyFn:
    """`trl_environment` of the class that a text names: `environments` calls this in its processes."""
    return trl_environment(load_factory(factory))


def reward_of_factory(*, factory: str) -> Reward:
    """`trl_reward` of the class that a text names: `rewards.processes` calls this in its processes.

    Raises:
      UsageError: the class has no `get_reward`, or cannot be called.
    """
    methods = load_factory(factory)
    try:
        has_reward = callable(getattr(methods(), "get_reward", None))
    except Exception as error:
        raise UsageError(f"{factory} cannot be called: {type(error).__name__}: {error}") from error
    if not has_reward:
        raise UsageError(f"{factory} has no get_reward: give --reward")
    return trl_reward(methods)


def _row(example: Example) -> Mapping[str, Any]:
    """A row as it was before its prompt was encoded."""
    return example.get("row", example)


def _messages(turns: Sequence[Turn]) -> list[dict[str, str]]:
    spoken = [("assistant", turn.action, "tool", turn.observation) for turn in turns]
    return [
        {"role": role, "content": str(text)}
        for action_role, action, observation_role, heard in spoken
        for role, text in ((action_role, action), (observation_role, heard))
        if text is not None
    ]


async def _waited(value: Awaitable[Any] | Any) -> Any:
    return await value if inspect.isawaitable(value) else value


# ---- what environments of TRL draw


def _draws_of(row: Mapping[str, Any]) -> list[Any]:
    """Returns the states in which Python's and NumPy's own generators begin for a row."""
    seed = zlib.crc32(json.dumps(row, sort_keys=True, default=str).encode())
    return [random.Random(seed).getstate(), np.random.RandomState(seed).get_state()]


def _swap_draws(draws: list[Any]) -> None:
    """Exchanges the states of Python's and NumPy's own generators with those in the list."""
    now = [random.getstate(), np.random.get_state()]
    random.setstate(draws[0])
    np.random.set_state(draws[1])
    draws[:] = now


@contextmanager
def _drawing(draws: list[Any]) -> Iterator[None]:
    """Lets the generators continue from these states, which then hold where they ended."""
    _swap_draws(draws)
    try:
        yield
    finally:
        _swap_draws(draws)


@types.coroutine
def _with_draws_for(row: Mapping[str, Any], coroutine: Coroutine[Any, Any, Any]) -> Generator[Any, None, Any]:
    """Runs a coroutine whose draws begin where the row says, whatever draws while it waits."""
    draws, step = _draws_of(row), partial(coroutine.send, None)
    while True:
        with _drawing(draws):
            try:
                waited_for = step()
            except StopIteration as end:
                return end.value
        try:
            yield waited_for
            step = partial(coroutine.send, None)
        except BaseException as error:  # such as a cancellation
            step = partial(coroutine.throw, error)
