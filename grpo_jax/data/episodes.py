"""Environments, which answer a policy so that a completion is an episode of several turns.

An environment is a pure function (example, transcript, key) -> reply. It keeps no state between calls, and derives all
that it needs from the example and the transcript. So runs are reproducible, and a killed run resumes as if it had not
been killed. The first observation of an episode is part of its prompt, which the completions of a group share.
"""

import inspect
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.data.coroutines import resolve
from grpo_jax.data.types import LARGEST_REWARD, MESSAGE_CHARACTERS, Completion, Example, Number, Turn, real_number

Transcript = Sequence[Turn]  # all turns so far; the last turn has no observation yet
Key = tuple[int, ...]  # (seed, stream, step, number of the completion, number of the turn), for `data.types.rng`


class Reply(NamedTuple):
    """An environment's answer to a turn of the policy."""

    text: str = ""  # read next by the policy; not read if the episode ends
    done: bool = False  # the episode ends here
    reward: Number = None  # the reward of the turn
    ids: Sequence[int] | None = None  # token ids that replace the text, delimiters included
    failure: str = ""  # the reason in FAILURES why there is no reply; it ends the episode
    message: str = ""  # details of the failure
    rewards: Sequence[Number] = ()  # rewards of all turns so far, which replace earlier ones


# The reasons why an episode ends: the environment is done, a budget is used up, or the environment failed.
BUDGETS = ("policy tokens", "environment tokens", "turns")
FAILURES = ("timeout", "raised", "died", "not a reply", "budget")
ENDINGS = ("done", *BUDGETS, *FAILURES)

# (examples, transcripts, keys), one entry for each episode -> one reply for each episode
Ask = Callable[[Sequence[Example], Sequence[Transcript], Sequence[Key]], Sequence[Reply]]
# answers one episode; may be async
ReplyFn = Callable[[Example, Transcript, Key], Reply | Awaitable[Reply]]

# A longer text exceeds any budget of tokens, and is not encoded.
MAX_CHARACTERS = 2**18


class Environment(NamedTuple):
    """The side of an episode that answers the policy. `environment` makes one from a function."""

    ask: Ask
    # text of a reply -> ids for the policy, with the delimiters of turns. Text never becomes a control token. Rows with
    # variables of the chat template pass them as `kwargs`. After a turn that a stop text ended, `is_open` is True.
    encode: Callable[..., Sequence[int]]
    messages: dict[str, str]  # failure -> the last message about it
    # ids of a reply -> its chat message; None: replies have no delimiters
    read: Callable[[Sequence[int]], Mapping[str, Any]] | None = None
    # an episode -> its metrics by name; their means are logged with the prefix "environment_"
    measure: Callable[[Completion], Mapping[str, float]] | None = None
    source: str = ""  # digest of the file that the function was loaded from; empty: it is not from a file
    # rows -> rows with the first observations as prompts. Default: the rows have their prompts
    begin: Callable[[Sequence[Mapping[str, Any]]], Sequence[Mapping[str, Any]]] = lambda rows: rows
    # is told the keys of the last turns of episodes that have ended
    end: Callable[[Sequence[Key]], None] = lambda keys: None


def environment(reply: ReplyFn, encode: Callable[[str], Sequence[int]]) -> Environment:
    """Makes an environment from a function, which is called in this process and without a deadline.

    Args:
      reply: Maps (example, transcript, key) to a `Reply`. If it is async, the calls of all episodes run concurrently.
        A call that raises ends its episode.
      encode: Maps the text of a reply to token ids. See `Environment` for the arguments that stop texts and rows add.
    """
    messages: dict[str, str] = {}

    def ask(examples: Sequence[Example], transcripts: Sequence[Transcript], keys: Sequence[Key]) -> list[Reply]:
        replies = asked(reply, list(zip(examples, transcripts, keys, strict=True)))
        messages.update(messages_of(replies))
        return replies

    return Environment(ask, encode, messages)


def messages_of(replies: Sequence[Reply]) -> dict[str, str]:
    """Returns a message for each kind of failure."""
    return {reply.failure: reply.message for reply in replies if reply.failure}


def asked(reply: ReplyFn, episodes: Sequence[tuple[Example, Transcript, Key]]) -> list[Reply]:
    """Calls a function for each episode and checks its replies."""
    return [checked_reply(answer) for answer in resolve([called(reply, *episode) for episode in episodes])]


def called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the answer of a function, or its coroutine, neither of which raises. An error becomes a `Reply`."""
    try:
        answer = function(*arguments)
        return _finished(answer) if inspect.isawaitable(answer) else answer
    except (Exception, SystemExit):  # code of a policy may call exit()
        return _raised()


async def _finished(answer: Awaitable[Any]) -> Any:
    try:
        return await answer
    except (Exception, SystemExit):  # code of a policy may call exit()
        return _raised()


def _raised() -> Reply:
    """Makes a reply that reports the current exception."""
    return Reply(failure="raised", message=traceback.format_exc(limit=-20)[-MESSAGE_CHARACTERS:])


def checked_reply(value: Any) -> Reply:
    """Checks the value that an environment returned. If it is no reply, returns a failure."""
    wrong = _wrong(value)
    if wrong:
        return Reply(failure="not a reply", message=f"the environment returned {wrong}")
    # A text that exceeds any budget ends the episode anyway, so its rest is not needed.
    ids = None if value.ids is None else [int(i) for i in value.ids[: MAX_CHARACTERS + 1]]
    reward = None if value.reward is None else real_number(value.reward)
    rewards = tuple(None if x is None else real_number(x) for x in value.rewards)
    return Reply(value.text[: MAX_CHARACTERS + 1], bool(value.done), reward, ids, value.failure, value.message, rewards)


def _wrong(value: Any) -> str:
    """Returns the reason why a value is no reply, or "" if it is a reply."""
    if not isinstance(value, Reply):
        return f"{type(value).__name__}, not data.episodes.Reply"
    if value.failure and value.failure not in FAILURES:
        return f"a reply with the failure {str(value.failure)[:100]!r}, which is none of {', '.join(FAILURES)}"
    for name, kind in {"text": str, "message": str, "done": bool | np.bool_}.items():
        if not isinstance(getattr(value, name), kind):
            return f"a reply whose {name} is of type {type(getattr(value, name)).__name__}"
    try:
        value.text[: MAX_CHARACTERS + 1].encode()
        numbers = [x for x in (value.reward, *value.rewards) if x is not None]
        is_number = all(bool(abs(real_number(x)) <= LARGEST_REWARD) for x in numbers)
        is_number &= not any(isinstance(x, str | bytes) for x in numbers)
    except UnicodeEncodeError:
        return "text that is no valid unicode"
    except (TypeError, ValueError, OverflowError):
        is_number = False
    if not is_number:
        return "a reward that is no finite number of float32"
    ids = value.ids
    is_list = isinstance(ids, list | tuple)
    if ids is not None and not (is_list and all(isinstance(i, int) and 0 <= i < 2**31 for i in ids)):
        return "ids that are no list of tokens"
    return ""


def episode_return(examples: Sequence[Example], completions: Sequence[Completion]) -> list[Number]:
    """Returns the reward of each episode: the sum of the environment's rewards for its turns.

    The reward is None, so that it does not apply, if the environment rewarded no turn or failed.
    """
    del examples
    return [_return(completion) for completion in completions]


def _return(completion: Completion) -> Number:
    rewards = [turn.reward for turn in completion.turns if turn.reward is not None]
    return sum(rewards) if rewards and completion.ending not in FAILURES else None
