"""Environments: what answers a policy, so that a completion is an episode of several turns.

An environment is a pure function (example, transcript, key) -> reply. It keeps nothing between calls: whatever it needs
to know follows from the example and from what was said so far. So the same run gives the same numbers, and a run that
was killed goes on as if it had not been. What an episode begins with is part of its prompt, which the completions of a
group share.
"""

import asyncio
import inspect
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.data.coroutines import run_to_end
from grpo_jax.data.types import LARGEST_REWARD, MESSAGE_CHARACTERS, Completion, Example, Number, Turn
from grpo_jax.errors import UsageError

Transcript = Sequence[Turn]  # all turns so far; nothing is heard yet in the last one
Key = tuple[int, ...]  # (seed, stream, step, number of the completion, number of the turn), for `data.types.rng`


class Reply(NamedTuple):
    """The answer of an environment to a turn of the policy."""

    text: str = ""  # what the policy reads next; not read where the episode ends
    done: bool = False  # the episode ends here
    reward: Number = None  # of the turn
    ids: Sequence[int] | None = None  # tokens in place of the text, delimiters included
    failure: str = ""  # why there is no reply, among FAILURES: that ends the episode
    message: str = ""  # about a failure


# Why an episode ended: the environment said so; what it was allowed to take was used up; or the environment failed.
BUDGETS = ("policy tokens", "environment tokens", "turns")
FAILURES = ("timeout", "raised", "died", "not a reply", "budget")
ENDINGS = ("done", *BUDGETS, *FAILURES)

# (examples, transcripts, keys), one entry an episode -> as many replies
Ask = Callable[[Sequence[Example], Sequence[Transcript], Sequence[Key]], Sequence[Reply]]
# one episode; may be async
ReplyFn = Callable[[Example, Transcript, Key], Reply | Awaitable[Reply]]

# A text this long is longer than any budget of tokens, and is not encoded.
MAX_CHARACTERS = 2**18


class Environment(NamedTuple):
    """The side of an episode that answers the policy. `environment` makes one of a function."""

    ask: Ask
    # text of a reply -> ids as the policy reads them, with what delimits turns. Text never becomes a control token
    encode: Callable[[str], Sequence[int]]
    messages: dict[str, str]  # failure -> the last thing known about one
    # an episode -> numbers of it, by name, whose means are logged as "environment_" and the name
    measure: Callable[[Completion], Mapping[str, float]] | None = None
    source: str = ""  # digest of the file that its function was loaded from; empty: it came from no file


def environment(reply: ReplyFn, encode: Callable[[str], Sequence[int]]) -> Environment:
    """The environment of a function that is called in this process, without a deadline.

    Args:
      reply: (example, transcript, key) -> `Reply`; may be async, and then those of all episodes run together. One that
        raises ends its episode.
      encode: text of a reply -> ids.
    """
    messages: dict[str, str] = {}

    def ask(examples: Sequence[Example], transcripts: Sequence[Transcript], keys: Sequence[Key]) -> list[Reply]:
        replies = asked(reply, list(zip(examples, transcripts, keys, strict=True)))
        messages.update(messages_of(replies))
        return replies

    return Environment(ask, encode, messages)


def messages_of(replies: Sequence[Reply]) -> dict[str, str]:
    """A sentence for each kind of failure."""
    return {reply.failure: reply.message for reply in replies if reply.failure}


def asked(reply: ReplyFn, episodes: Sequence[tuple[Example, Transcript, Key]]) -> list[Reply]:
    """Calls a function for each episode and checks its replies."""
    answers: list[Any] = [_called(reply, *episode) for episode in episodes]
    if any(inspect.isawaitable(answer) for answer in answers):
        answers = run_to_end(_gathered(answers))
    return [checked_reply(answer) for answer in answers]


def _called(reply: ReplyFn, *arguments: Any) -> Any:
    try:
        return reply(*arguments)
    except Exception:
        return _raised()


async def _gathered(answers: Sequence[Any]) -> list[Any]:
    async def wait(answer: Any) -> Any:
        try:
            return await answer if inspect.isawaitable(answer) else answer
        except Exception:
            return _raised()

    return await asyncio.gather(*map(wait, answers))


def _raised() -> Reply:
    """Describes the exception that is handled."""
    return Reply(failure="raised", message=traceback.format_exc(limit=-20)[-MESSAGE_CHARACTERS:])


def checked_reply(value: Any) -> Reply:
    """Makes a reply of the value that an environment returned; a failure if it is none."""
    wrong = _wrong(value)
    if wrong:
        return Reply(failure="not a reply", message=f"the environment returned {wrong}")
    # What no budget has room for ends the episode, whatever it says.
    ids = None if value.ids is None else [int(i) for i in value.ids[: MAX_CHARACTERS + 1]]
    reward = None if value.reward is None else float(value.reward)
    return Reply(value.text[: MAX_CHARACTERS + 1], bool(value.done), reward, ids, value.failure, value.message)


def _wrong(value: Any) -> str:
    """Returns why a value is no reply, "" if it is one."""
    if not isinstance(value, Reply):
        return f"{type(value).__name__}, not data.episodes.Reply"
    if value.failure and value.failure not in FAILURES:
        return f"a reply with the failure {str(value.failure)[:100]!r}, which is none of {', '.join(FAILURES)}"
    for name in ("text", "message"):
        if not isinstance(getattr(value, name), str):
            return f"a reply whose {name} is of type {type(getattr(value, name)).__name__}"
    try:
        value.text[: MAX_CHARACTERS + 1].encode()
    except UnicodeEncodeError:
        return "text that is no valid unicode"
    try:
        is_number = value.reward is None or bool(abs(float(value.reward)) <= LARGEST_REWARD)
    except (TypeError, ValueError, OverflowError):
        is_number = False
    if not is_number or isinstance(value.reward, str | bytes):
        return "a reward that is no finite number of float32"
    if not isinstance(value.done, bool | np.bool_):
        return f"a reply whose done is of type {type(value.done).__name__}"
    ids = value.ids
    is_list = isinstance(ids, list | tuple)
    if ids is not None and not (is_list and all(isinstance(i, int) and 0 <= i < 2**31 for i in ids)):
        return "ids that are no list of tokens"
    return ""


def episode_return(examples: Sequence[Example], completions: Sequence[Completion]) -> list[Number]:
    """The reward of an episode: the sum of what the environment gave for its turns.

    None, which does not apply, where it gave nothing at all, or where it failed.
    """
    del examples
    return [_return(completion) for completion in completions]


def _return(completion: Completion) -> Number:
    rewards = [turn.reward for turn in completion.turns if turn.reward is not None]
    return sum(rewards) if rewards and completion.ending not in FAILURES else None


# ---- replies as tokens: text as nothing but text, between what a chat template puts around a turn

_SAID, _HEARD = "said-by-the-policy", "heard-by-the-policy"


def reply_encoder(
    tokenizer: Any, eos_ids: tuple[int, ...], *, roles: Sequence[str] = ("user",)
) -> Callable[[str], list[int]]:
    """How replies are encoded for a model.

    Args:
      tokenizer: of transformers. Without a chat template nothing is put around a reply.
      eos_ids: any of these has ended the policy's turn.
      roles: of the reply in the chat template: the first that it knows. Where none is given, nothing is put around.

    Returns:
      text -> ids. Special tokens that the text spells are encoded as the characters that they are.

    Raises:
      UsageError: the chat template knows none of the roles.
    """
    has_delimiters = tokenizer.chat_template and roles
    before, after = delimiters(tokenizer, eos_ids, roles) if has_delimiters else ([], [])

    def encode(text: str) -> list[int]:
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] if text else []
        return [*before, *ids, *after]

    return encode


def delimiters(tokenizer: Any, eos_ids: tuple[int, ...], roles: Sequence[str]) -> tuple[list[int], list[int]]:
    """Asks a chat template once what it writes around a reply.

    Templates render earlier turns anew, and some leave out parts of them. So it is filled in for one short
    conversation, and what was sampled is never rendered.

    Args:
      tokenizer, eos_ids, roles: as in `reply_encoder`.

    Returns:
      Tokens after the one that ended the policy's turn, and tokens up to where its next turn begins.

    Raises:
      UsageError: the chat template knows none of the roles.
    """
    for role in roles:
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": _SAID},
            {"role": role, "content": _HEARD},
        ]
        try:
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception:  # whatever the template raises of a role that it does not know
            continue
        behind = text.rpartition(_SAID)[2]
        before, marker, after = behind.partition(_HEARD)
        if marker:
            ids, rest = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after))
            # The policy has written the end of its turn.
            ends = next((place for place, token in enumerate(ids) if token in eos_ids), -1)
            return ids[ends + 1 :], rest
    raise UsageError(f"the chat template has no turn of the role {' or '.join(roles)}: take another model or template")
