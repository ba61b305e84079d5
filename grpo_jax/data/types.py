"""Types of data: examples, prompts, completions, and rewards, which are checked here. Digests of them and of files."""

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
MOST_SPANS = 1000  # of one completion
MESSAGE_CHARACTERS = 2000  # of what is known about a failure


class Span(NamedTuple):
    """A part of a completion, and what it earned."""

    start: int  # of its text, or among its ids; the part begins here
    end: int  # and ends before this
    reward: float
    unit: Literal["characters", "tokens"] = "characters"


class Turn(NamedTuple):
    """An action of the policy, and the observation that an environment answered with."""

    action: "Completion"  # of the policy
    observation: "Completion | None" = None  # of the environment; None at the end of the episode
    reward: Number = None  # that the environment gave for the turn


class Completion(str):
    """The text of a completion, which also knows its tokens. An episode is a completion of several turns, and its text
    has what the environment said in it."""

    ids: tuple[int, ...]  # as sampled, without the tokens that ended it or a turn
    truncated: bool  # nothing ended it within max_tokens; or an episode was not done
    _turns: tuple[Turn, ...]
    ending: str  # why an episode ended, among `episodes.ENDINGS`; "" where no environment answers

    def __new__(
        cls, text: str, ids: Sequence[int] = (), truncated: bool = False, turns: Sequence[Turn] = (), ending: str = ""
    ) -> "Completion":
        self = super().__new__(cls, text)
        self.ids, self.truncated, self.ending, self._turns = tuple(ids), truncated, ending, tuple(turns)
        return self

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns of an episode. Where no environment answers, the completion is its only turn."""
        return self._turns or (Turn(self),)

    @property
    def actions(self) -> tuple["Completion", ...]:
        """The actions of the policy, one in each turn."""
        return tuple(turn.action for turn in self.turns)

    @property
    def observations(self) -> tuple["Completion", ...]:
        """The observations that the environment answered with. The last action of an episode may have none."""
        return tuple(turn.observation for turn in self.turns if turn.observation is not None)

    def __getnewargs__(self):
        # So that it can be sent to another process.
        return str(self), self.ids, self.truncated, self._turns, self.ending


Earned = Number | Sequence[Span]  # spans are in order and do not overlap; the completion earned their sum

# (examples, completions), one entry a completion -> what each earned; may be async
Reward = Callable[[Sequence[Example], Sequence[Completion]], Sequence[Earned] | Awaitable[Sequence[Earned]]]
# what a completion answers, for a vote among completions of a prompt; None: nothing
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
    """Token lists as one array, padded on the left.

    Args:
      token_ids: N lists of 1 to `width` ids.
      examples: N.
      width: P.
      pad_id: fills the left.

    Returns:
      The prompts.

    Raises:
      UsageError: a prompt is empty or longer than `width`.
    """
    ids = np.full((len(token_ids), width), pad_id, np.int32)
    mask = np.zeros((len(token_ids), width), bool)
    for row, tokens in enumerate(token_ids):
        if not 0 < len(tokens) <= width:
            raise UsageError(f"prompt {row} has {len(tokens)} tokens: it needs at least 1 and at most {width}")
        ids[row, width - len(tokens) :] = tokens
        mask[row, width - len(tokens) :] = True
    return Prompts(ids, mask, list(examples))


_MOST_WIDTHS = 3  # of prompts; each is compiled into the programs
_NARROWEST = 16  # tokens


def choose_widths(lengths: Sequence[int] | np.ndarray) -> tuple[int, ...]:
    """Chooses the widths that prompts are padded to, so that there is the least padding.

    Args:
      lengths: tokens of each prompt; not empty.

    Returns:
      At most three widths, ascending. The last one is the longest prompt's.
    """
    sorted_lengths, longest = np.sort(np.asarray(lengths)), int(max(lengths))
    # Halves and three quarters of the longest prompt, of its half, and so on, as multiples of 8.
    scales = [scale / 2**power for power in range(longest.bit_length()) for scale in (1.0, 0.75)]
    rounded = {-(-int(longest * scale) // 8) * 8 for scale in scales}
    narrower = sorted(width for width in rounded if _NARROWEST <= width < longest)
    # Fewer widths come first, since the first of equals is chosen.
    counts = range(_MOST_WIDTHS)
    choices = [(*chosen, longest) for count in counts for chosen in itertools.combinations(narrower, count)]

    def padded_tokens(widths: tuple[int, ...]) -> int:
        fitting = np.searchsorted(sorted_lengths, widths, side="right")
        return int(np.diff(fitting, prepend=0) @ np.asarray(widths))

    return min(choices, key=padded_tokens)


def useful_widths(widths: Sequence[int], prompt: int, group_tokens: int) -> tuple[int, ...]:
    """Returns those widths that save at least a tenth of the tokens compared with the next wider one, and P.

    Args:
      widths: ascending.
      prompt: P.
      group_tokens: G · T, which a prompt's completions have.
    """
    useful = [prompt]
    for width in sorted(widths, reverse=True):
        if useful[-1] + group_tokens >= 1.1 * (width + group_tokens):
            useful.append(width)
    return tuple(reversed(useful))


def pad_completions(groups: Sequence[Sequence[Sequence[int]]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Groups of token lists as arrays, padded on the right.

    Args:
      groups: N groups of G lists of at most `width` ids.
      width: T.

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
    """Refuses a step of more prompts than there are.

    Raises:
      UsageError: one sentence that says what to change.
    """
    if num_prompts > available:
        raise UsageError(
            f"num_prompts is {num_prompts}, but there are {available} training prompts (others are held out): lower it"
        )


def rng(*key: int) -> np.random.Generator:
    """NumPy's generator for a tuple of non-negative ints such as (seed, stream, step)."""
    return np.random.default_rng(np.random.SeedSequence(key))


# ---- lines, which steps of training make and the runner writes


class Skipped(NamedTuple):
    """Optimizer steps whose gradients were not finite."""

    name: str  # of the first one, for its file
    in_a_row: int
    most: int  # skipped steps in a row at which the run stops
    arrays: Callable[[], Mapping[str, Any]]  # the batch, by name


class Line(NamedTuple):
    """Metrics, warnings and groups of a step, to be written."""

    metrics: Mapping[str, Any]  # plain numbers, the same in a rerun; empty: nothing is written
    words: str  # for the progress bar; empty: it stays as it is
    warnings: Mapping[str, str] = {}  # key -> sentence, said once in a run
    groups: Sequence[dict[str, Any]] = ()  # of the rollout, for people to read
    times: Mapping[str, Any] | None = None  # arguments of `RunFolder.log_times`; None: no times are written
    skipped: Skipped | None = None


# ---- what a reward function returned


class BadReward(ValueError):
    """A reason why a reward function gave no reward; `reason` is among `processes.REASONS`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def checked_rewards(answer: Any, completions: Sequence[Completion]) -> list[Number | tuple[Span, ...] | BadReward]:
    """Returns what each completion earned: None, a float that may be infinite or NaN, spans, or why there is none.

    Args:
      answer: whatever a reward function returned for the completions.
      completions: B.

    Raises:
      BadReward: it is not B numbers or spans.
    """
    count = len(completions)
    if not isinstance(answer, Iterable) or isinstance(answer, str | bytes | Mapping | Set):
        raise BadReward("not numbers", f"the function returned {type(answer).__name__}, not a list")
    # Never more than one too many: it may be a million, or have no end.
    values = list(itertools.islice(answer, count + 1))
    if len(values) != count:
        number = f"{len(answer)}" if isinstance(answer, Sized) else "more" if len(values) > count else f"{len(values)}"
        raise BadReward("wrong length", f"the function returned {number} rewards for {count} completions")
    return [_checked_reward(*pair) for pair in zip(values, completions, strict=True)]


def _checked_reward(value: Any, completion: Completion) -> Number | tuple[Span, ...] | BadReward:
    if value is None:
        return None
    if isinstance(value, list | tuple):
        from grpo_jax.data import spans  # a run without spans does not load it

        try:
            if spans.are_spans(value):
                return spans.checked(value, completion)
        except spans.BadSpans as error:
            return BadReward("bad spans", str(error))
    if isinstance(value, str | bytes):  # float() would read them
        raise BadReward("not numbers", f"the function returned a reward of type {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        return BadReward("nan", "the function returned an integer that is larger than any float")
    except (TypeError, ValueError) as error:
        raise BadReward("not numbers", one_line(error)) from None


def one_line(error: BaseException) -> str:
    """Returns the type and the words of an error, shortened."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:MESSAGE_CHARACTERS]


# ---- digests: equal exactly when the contents are

_THREADS = 4  # hashing leaves Python's lock


def hash_file(file: Path) -> str:
    """Returns the SHA-256 of a file's contents, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Returns digests of files, each read once.

    Args:
      folder: that they are below.
      names: their paths in it.

    Returns:
      name -> digest.
    """
    names = sorted(names)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(hash_file, (folder / name for name in names)), strict=True))


def hash_values(*values: Any) -> str:
    """Returns the digest of arrays, and of values as JSON has them. Only the type of other values counts."""
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
