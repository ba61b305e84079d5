"""Adapters for environments of other libraries: text environments of Gymnasium, and classes for TRL.

These environments keep a state, but an environment in grpo_jax is a function without state. So each reply starts from a
fresh environment and replays the policy's earlier actions. The replay must give the same answers, so random draws come
from the seed of the row, even if other code draws in between. The cost of an episode is quadratic in its turns.
"""

import inspect
import json
import random
import types
import zlib
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from grpo_jax.data.coroutines import awaited
from grpo_jax.data.episodes import Key, Reply, ReplyFn, Transcript
from grpo_jax.data.types import Completion, Example, Number, Reward, Turn
from grpo_jax.errors import UsageError
from grpo_jax.rewards.worker import load_function
from grpo_jax.tasks.tools import reply_with

Factory = Callable[[], Any]  # makes a fresh environment; may be a class

# ---- Gymnasium


def gymnasium_environment(make: Factory) -> ReplyFn:
    """Wraps a Gymnasium environment whose observations and actions are texts.

    Each turn of the policy is an action, and the reply is the observation. The episode ends when Gymnasium terminates
    or truncates it.

    Args:
      make: Makes a fresh environment, such as `lambda: gymnasium.make("…")`.

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
        return Reply(_observed(observation), done=bool(terminated or truncated), reward=reward)

    return reply


def gymnasium_rows(make: Factory, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Makes a row for each seed, with the first observation as "prompt" and the "seed".

    Raises:
      UsageError: The observation is no text.
    """
    environment = make()
    try:
        first = ((seed, *environment.reset(seed=seed)) for seed in seeds)
        return [{"prompt": _observed(observation), "seed": seed} for seed, observation, _ in first]
    finally:
        environment.close()


def _observed(observation: Any) -> str:
    if not isinstance(observation, str):
        raise UsageError(
            f"the environment shows {type(observation).__name__}, not text: wrap it in gymnasium.wrappers, "
            "TransformObservation and TransformAction, so that it speaks and hears texts"
        )
    return observation


# ---- TRL


def trl_rows(factory: Factory, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Appends the text that `reset` returns to the prompt, or to its last message, as TRL does.

    Args:
      factory: Makes a fresh environment.
      rows: The rows, each passed to `reset` as keywords. They need no "prompt" if `reset` returns a text.

    Returns:
      The rows with that prompt, and the unchanged row as "row".

    Raises:
      UsageError: `reset` raised, or its result cannot be appended to the prompt.
    """
    return [with_prompt(row, _prompt(factory, row, number)) for number, row in enumerate(rows)]


def with_prompt(row: Mapping[str, Any], prompt: Any) -> dict[str, Any]:
    """Returns a row with another prompt, and the unchanged row as "row"."""
    return {**row, "prompt": prompt, "row": dict(row)}


def _prompt(factory: Factory, row: Mapping[str, Any], number: int) -> Any:
    """Returns the prompt of a row with the text that `reset` returns."""
    try:
        with _drawing(_draws_of(row)):
            start_text = factory().reset(**row)
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"reset of the environment, called with row {number}, raised {reason}") from error
    try:
        return _behind(row.get("prompt", ""), start_text or "")
    except (KeyError, TypeError, ValueError):
        raise UsageError(
            f"row {number}: reset returned {type(start_text).__name__}, to stand behind a prompt of type "
            f"{type(row.get('prompt')).__name__}: let it return a text or None, and give a text or messages"
        ) from None


def _behind(prompt: Any, text: str) -> Any:
    if isinstance(prompt, str):
        return prompt + text
    *before, last = prompt
    return [*before, {**last, "content": last["content"] + text}]


def trl_tools(factory: Factory) -> dict[str, Callable[..., Any]]:
    """Returns the tools of an environment by name: its public methods except `reset` and `get_reward`.

    Raises:
      UsageError: The factory does not make an environment for TRL.
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
    """Wraps a class for TRL's `environment_factory`: the policy calls its methods as tools.

    Args:
      factory: Makes a fresh environment with `reset(**row)`, which returns None or a text. May be a class.

    Returns:
      An async function (example, transcript, key) -> reply, for examples from `trl_rows`.
    """

    async def reply(example: Example, transcript: Transcript, key: Key) -> Reply:
        del key
        return (await _played(factory, example, transcript))[1]

    return reply


def trl_reward(factory: Factory, reward: Callable[..., Any] | None = None) -> Reward:
    """Makes a reward that replays each episode and then grades its environment.

    Args:
      factory: Makes a fresh environment.
      reward: A TRL reward, which may be async. It is called with environments, prompts, completions (lists of messages)
        and the columns of the rows, all by name, and returns one number each. None: the environment's `get_reward`.

    Returns:
      An async function (examples, completions) -> numbers.
    """

    async def graded(examples: Sequence[Example], completions: Sequence[Completion]) -> list[Number]:
        pairs = list(zip(examples, completions, strict=True))
        played = [(await _played(factory, example, text.turns))[0] for example, text in pairs]
        if reward is None:
            return [await awaited(environment.get_reward()) for environment in played]
        rows = [_row(example) for example in examples]
        columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(chain(*rows)) if name != "prompt"}
        messages = [_messages(text.turns) for text in completions]
        prompts = [list(getattr(prompt := example["prompt"], "messages", ())) or prompt for example in examples]
        return list(await awaited(reward(environments=played, prompts=prompts, completions=messages, **columns)))

    return graded


async def _played(factory: Factory, example: Example, turns: Sequence[Turn]) -> tuple[Any, Reply]:
    """Replays turns and returns the environment after them, and its reply to the last turn."""

    async def play() -> tuple[Any, Reply]:
        environment, reply = factory(), Reply(done=True)
        environment.reset(**_row(example))
        answer = reply_with(_methods(environment))
        for turn in turns:
            reply = await awaited(answer(example, [turn], ()))
        return environment, reply

    return await _with_draws_for(_row(example), play())


def load_factory(text: str) -> Factory:
    """Loads the class named by a text: "path/to/file.py:Class" or "package.module:Class".

    Raises:
      UsageError: The class cannot be loaded.
    """
    return load_function("environment factory", text)


def prompt_of_factory(*, factory: str) -> Callable[[Example, int], Any]:
    """Returns the function that makes the prompt of a row. Child processes call this function."""
    return partial(_prompt, load_factory(factory))


def environment_of_factory(*, factory: str) -> ReplyFn:
    """Returns `trl_environment` of the class named by a text. Child processes call this function."""
    return trl_environment(load_factory(factory))


def reward_of_factory(*, factory: str) -> Reward:
    """Returns `trl_reward` of the class named by a text. Child processes call this function.

    Raises:
      UsageError: The class has no `get_reward`.
    """
    make = load_factory(factory)
    if not callable(getattr(make(), "get_reward", None)):
        raise UsageError(f"{factory} has no get_reward: give --reward")
    return trl_reward(make)


def _row(example: Example) -> Mapping[str, Any]:
    """Returns the row before `trl_rows` changed its prompt."""
    return example.get("row", example)


def _messages(turns: Sequence[Turn]) -> list[dict[str, str]]:
    messages = []
    for turn in turns:
        messages.append({"role": "assistant", "content": str(turn.action)})
        if turn.observation is not None:
            content = turn.message["content"] if turn.message else str(turn.observation)
            messages.append({"role": "tool", "content": content})
    return messages


# ---- random draws of TRL environments


def _draws_of(row: Mapping[str, Any]) -> list[Any]:
    """Returns the initial states of Python's and NumPy's global generators for a row."""
    seed = zlib.crc32(json.dumps(row, sort_keys=True, default=str).encode())
    return [random.Random(seed).getstate(), np.random.RandomState(seed).get_state()]


@contextmanager
def _drawing(draws: list[Any]) -> Iterator[None]:
    """Runs the block with the generators in these states, and then stores their new states in the list."""
    before = random.getstate(), np.random.get_state()
    random.setstate(draws[0])
    np.random.set_state(draws[1])
    try:
        yield
    finally:
        draws[:] = random.getstate(), np.random.get_state()
        random.setstate(before[0])
        np.random.set_state(before[1])


@types.coroutine
def _with_draws_for(row: Mapping[str, Any], coroutine: Coroutine[Any, Any, Any]) -> Generator[Any, None, Any]:
    """Runs a coroutine with draws seeded by the row, even if other code draws while it waits."""
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
        except BaseException as error:  # for example a cancellation
            step = partial(coroutine.throw, error)
