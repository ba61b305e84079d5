"""Types of data: examples, prompts, completions and rewards. Also checks of rewards, and digests of data and files."""

import hashlib
import itertools
import json
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence, Set, Sized
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from grpo_jax.errors import UsageError

Example = dict[str, Any]  # the columns of one prompt: "prompt", and what its reward needs


Number = float | None  # None: the reward does not apply to this completion

LARGEST_REWARD = float(np.finfo(np.float32).max)  # rewards are float32
MOST_SPANS = 1000  # in one completion
MESSAGE_CHARACTERS = 2000  # in the message about a failure


class Span(NamedTuple):
    """A part of a completion and its reward."""

    start: int  # the first character or token
    end: int  # one after the last character or token
    reward: float
    unit: Literal["characters", "tokens"] = "characters"


class Turn(NamedTuple):
    """An action of the policy, and the environment's observation after it."""

    action: "Completion"
    observation: "Completion | None" = None  # None at the end of the episode
    reward: Number = None  # the environment's reward for the turn
    # the observation as the chat message that the template wrote; None: it has no delimiters
    message: Mapping[str, Any] | None = None


class Completion(str):
    """The text of a completion, with its tokens.

    An episode is a completion of several turns, and its text includes the observations of the environment.
    """

    ids: tuple[int, ...]  # sampled ids, without the EOS tokens that ended a turn or the completion
    truncated: bool  # no token ended it within max_tokens, or the episode was not done
    _turns: tuple[Turn, ...]
    ending: str  # the reason in `episodes.ENDINGS` why an episode ended; "" without an environment
    stopped: bool  # a stop text ended it, which is not in the text; its tokens are among the ids

    def __new__(
        cls,
        text: str,
        ids: Sequence[int] = (),
        truncated: bool = False,
        turns: Sequence[Turn] = (),
        ending: str = "",
        stopped: bool = False,
    ) -> "Completion":
        self = super().__new__(cls, text)
        self.ids, self.truncated, self.ending, self._turns = tuple(ids), truncated, ending, tuple(turns)
        self.stopped = stopped
        return self

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns of an episode. Without an environment, the completion is a single turn."""
        return self._turns or (Turn(self),)

    @property
    def actions(self) -> tuple["Completion", ...]:
        """The actions of the policy, one in each turn."""
        return tuple(turn.action for turn in self.turns)

    @property
    def observations(self) -> tuple["Completion", ...]:
        """The observations of the environment. The last action of an episode may have none."""
        return tuple(turn.observation for turn in self.turns if turn.observation is not None)

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """The chat messages of the turns; empty if an observation is no message."""
        if any(turn.observation is not None and turn.message is None for turn in self.turns):
            return []
        both = (({"role": "assistant", "content": str(turn.action)}, turn.message) for turn in self.turns)
        return [message for pair in both for message in pair if message]

    def __getnewargs__(self):
        # Lets pickle send completions to another process.
        return str(self), self.ids, self.truncated, self._turns, self.ending, self.stopped


class Prompt(str):
    """The text of a prompt as the model reads it, with the chat messages that it was made from."""

    messages: tuple[Mapping[str, Any], ...]  # empty: the prompt is no chat
    kwargs: Mapping[str, Any]  # the row's own variables of the chat template
    template: str  # digest of the chat template of the policy's tokenizer; "" without one

    def __new__(
        cls, text: str, messages: Sequence[Mapping[str, Any]] = (), kwargs: Mapping[str, Any] = {}, template: str = ""
    ) -> "Prompt":
        self = super().__new__(cls, text)
        self.messages, self.kwargs, self.template = tuple(messages), kwargs, template
        return self

    def __getnewargs__(self):
        # Lets pickle send prompts to another process.
        return str(self), self.messages, self.kwargs, self.template


Checked = Number | tuple[Span, ...]  # a reward whose type and spans are checked
Earned = Number | Sequence[Span]  # spans are in order and do not overlap; the reward of the completion is their sum

# (examples, completions), one entry for each completion -> rewards; may be async
Reward = Callable[[Sequence[Example], Sequence[Completion]], Sequence[Earned] | Awaitable[Sequence[Earned]]]
# the answer of a completion, for a vote among completions of a prompt; None: it has no answer
Answer = Callable[[Example, Completion], Hashable | None]


class Component(NamedTuple):
    """One reward among several."""

    reward: Reward
    weight: float = 1.0


Rewards = Mapping[str, Component]


class Prompts(NamedTuple):
    """N prompts of up to P tokens, padded on the left."""

    ids: np.ndarray  # int32 [N, P]
    mask: np.ndarray  # bool [N, P]
    examples: list[Example]  # N


def pad_prompts(
    token_ids: Sequence[Sequence[int] | np.ndarray], examples: Sequence[Example], *, width: int, pad_id: int
) -> Prompts:
    """Pads prompts on the left into one array.

    Args:
      token_ids: N lists of 1 to `width` ids.
      examples: The N examples.
      width: The width of the array, P.
      pad_id: The id of padding.

    Returns:
      The prompts.

    Raises:
      UsageError: A prompt is empty or longer than `width`.
    """
    ids = np.full((len(token_ids), width), pad_id, np.int32)
    mask = np.zeros((len(token_ids), width), bool)
    for row, tokens in enumerate(token_ids):
        if not 0 < len(tokens) <= width:
            raise UsageError(f"prompt {row} has {len(tokens)} tokens: it needs at least 1 and at most {width}")
        ids[row, width - len(tokens) :] = tokens
        mask[row, width - len(tokens) :] = True
    return Prompts(ids, mask, list(examples))


_NARROWEST = 16  # tokens


def choose_widths(lengths: Sequence[int] | np.ndarray, *, most: int) -> tuple[int, ...]:
    """Chooses the widths that prompts are padded to, with the least padding.

    Args:
      lengths: The number of tokens of each prompt; not empty.
      most: The largest number of widths. Each width is compiled.

    Returns:
      At most `most` widths, ascending. The last width is the length of the longest prompt.
    """
    sorted_lengths, longest = np.sort(np.asarray(lengths)), int(max(lengths))
    # Candidates are 1, 3/4, 1/2, 3/8, … of the longest prompt, as multiples of 8.
    scales = [scale / 2**power for power in range(longest.bit_length()) for scale in (1.0, 0.75)]
    rounded = {-(-int(longest * scale) // 8) * 8 for scale in scales}
    narrower = sorted(width for width in rounded if _NARROWEST <= width < longest)
    # Choices with fewer widths come first, since `min` returns the first of equals.
    counts = range(most)
    choices = [(*chosen, longest) for count in counts for chosen in itertools.combinations(narrower, count)]

    def padded_tokens(widths: tuple[int, ...]) -> int:
        fitting = np.searchsorted(sorted_lengths, widths, side="right")
        return int(np.diff(fitting, prepend=0) @ np.asarray(widths))

    return min(choices, key=padded_tokens)


def useful_widths(widths: Sequence[int], prompt: int, group_tokens: int) -> tuple[int, ...]:
    """Returns P, and the widths that save at least a tenth of the tokens compared with the next wider width.

    Args:
      widths: Widths of prompts, ascending.
      prompt: The largest width, P.
      group_tokens: The number of tokens of a prompt's completions, G · T.
    """
    useful = [prompt]
    for width in sorted(widths, reverse=True):
        if useful[-1] + group_tokens >= 1.1 * (width + group_tokens):
            useful.append(width)
    return tuple(reversed(useful))


def pad_completions(groups: Sequence[Sequence[Sequence[int]]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Pads groups of completions on the right into arrays.

    Args:
      groups: N groups of G lists of at most `width` ids.
      width: The width of the arrays, T.

    Returns:
      Ids int32 and mask bool, `[N, G, T]`.
    """
    ids = np.zeros((len(groups), len(groups[0]), width), np.int32)
    mask = np.zeros(ids.shape, bool)
    for i, group in enumerate(groups):
        for j, tokens in enumerate(group):
            ids[i, j, : len(tokens)] = tokens
            mask[i, j, : len(tokens)] = True
    return ids, mask


def check_num_prompts(num_prompts: int, available: int) -> None:
    """Checks that there are enough prompts for a step.

    Raises:
      UsageError: There are fewer prompts. The message says what to change.
    """
    if num_prompts > available:
        raise UsageError(
            f"num_prompts is {num_prompts}, but there are {available} training prompts (others are held out): lower it"
        )


def rng(*key: int) -> np.random.Generator:
    """Returns NumPy's generator for a tuple of non-negative ints such as (seed, stream, step)."""
    return np.random.default_rng(np.random.SeedSequence(key))


# ---- lines of the log, which training steps make and the runner writes


class Skipped(NamedTuple):
    """Optimizer steps that were skipped because their gradients were not finite."""

    name: str  # the name of the first skipped step, for its file
    in_a_row: int
    most: int  # the run stops after this many skipped steps in a row, or if all its steps are skipped
    arrays: Callable[[], Mapping[str, Any]]  # returns the arrays of the batch by name


class Line(NamedTuple):
    """The metrics, warnings and groups of a step that are written to the log."""

    metrics: Mapping[str, Any]  # plain numbers, the same in a rerun; empty: nothing is written
    words: str  # the text of the progress bar; empty: no change
    warnings: Mapping[str, str] = {}  # key -> sentence, printed once in a run
    groups: Sequence[dict[str, Any]] = ()  # groups of the rollout, for people to read
    times: Mapping[str, Any] | None = None  # arguments of `RunFolder.log_times`; None: no times are written
    skipped: Skipped | None = None


# ---- checks of rewards


# The reasons why completions have no reward.
REASONS = ("timeout", "raised", "died", "nan", "not numbers", "bad spans", "wrong length", "budget")


class BadReward(ValueError):
    """The error of a reward function that gave no reward. Its `reason` is in `REASONS`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def checked_rewards(answer: Any, completions: Sequence[Completion]) -> list[Checked | BadReward]:
    """Returns the reward of each completion: None, spans, a float that may be infinite or NaN, or a `BadReward`.

    Args:
      answer: The value that a reward function returned for the completions.
      completions: The B completions.

    Raises:
      BadReward: The answer is not B numbers or spans.
    """
    count = len(completions)
    if not isinstance(answer, Iterable) or isinstance(answer, str | bytes | Mapping | Set):
        raise BadReward("not numbers", f"the function returned {type(answer).__name__}, not a list")
    # Reads at most one value too many, since the answer may be endless.
    values = list(itertools.islice(answer, count + 1))
    if len(values) != count:
        number = f"{len(answer)}" if isinstance(answer, Sized) else "more" if len(values) > count else f"{len(values)}"
        raise BadReward("wrong length", f"the function returned {number} rewards for {count} completions")
    return [_checked_reward(*pair) for pair in zip(values, completions, strict=True)]


def _checked_reward(value: Any, completion: Completion) -> Checked | BadReward:
    if value is None:
        return None
    if isinstance(value, list | tuple) and all(isinstance(part, list | tuple) for part in value):
        from grpo_jax.data import spans  # imported only by runs with spans

        try:
            return spans.checked(value, completion)
        except spans.BadSpans as error:
            return BadReward("bad spans", str(error))
    if isinstance(value, str | bytes):  # float() would parse them
        raise BadReward("not numbers", f"the function returned a reward of type {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        return BadReward("nan", "the function returned an integer that is larger than any float")
    except (TypeError, ValueError) as error:
        raise BadReward("not numbers", one_line(error)) from None


def reward_from_json(value: Any) -> Checked | BadReward:
    """Converts a reward of `checked_rewards` back from JSON; a number that float32 cannot hold becomes `BadReward`."""
    if value is None:
        return None
    parts = tuple(Span(*part) for part in value) if isinstance(value, list) else ()
    numbers = [float(part.reward) for part in parts] if isinstance(value, list) else [float(value)]
    for number in (*numbers, sum(numbers)):
        if not abs(number) <= LARGEST_REWARD:
            return BadReward("nan", f"the function returned {number}")
    return parts if isinstance(value, list) else numbers[0]


def one_line(error: BaseException) -> str:
    """Returns the type and the message of an error in one line, shortened."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:MESSAGE_CHARACTERS]


# ---- digests: equal exactly when the contents are equal

_THREADS = 4  # hashing releases the GIL


def hash_file(file: Path) -> str:
    """Returns the SHA-256 of a file's contents, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Returns digests of files, each read once.

    Args:
      folder: The folder of the files.
      names: The paths of the files in the folder.

    Returns:
      name -> digest.
    """
    names = sorted(names)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(hash_file, (folder / name for name in names)), strict=True))


def hash_values(*values: Any) -> str:
    """Returns the digest of arrays and JSON values. Only the type of any other value counts."""
    digest = hashlib.sha256()
    for value in values:
        if isinstance(value, np.ndarray):
            digest.update(f"{value.dtype} {value.shape}".encode())
            digest.update(np.ascontiguousarray(value).tobytes())
        else:
            digest.update(json.dumps(value, default=lambda x: type(x).__name__).encode())
    return digest.hexdigest()


def hash_prompts(prompts: Prompts) -> str:
    """Returns the digest of prompts and their columns."""
    return hash_values(prompts.ids, prompts.mask, prompts.examples)
