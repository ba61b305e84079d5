"""Types of data: examples, prompts, completions and rewards. Also checks of rewards, and digests of data and files."""

import hashlib
import inspect
import json
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from grpo_jax.errors import abbreviate

if TYPE_CHECKING:
    import numpy as np

Example = dict[str, Any]  # the columns of one prompt: "prompt", and what its reward needs


Number = float | None  # None: the reward does not apply to this completion

LARGEST_REWARD = (2 - 2**-23) * 2.0**127  # rewards are float32
MESSAGE_CHARACTERS = 2000  # in the message about a failure


def real_number(value: Any) -> float:
    """Returns a value as a float; unlike `float`, it does not drop the imaginary part of NumPy's complex numbers.

    Raises:
      TypeError, ValueError, OverflowError: The value is no number, is complex, or is larger than any float.
    """
    if complex(value).imag:
        raise TypeError(f"{abbreviate(value)} is a complex number")
    return float(value)


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
        self.stopped = turns[-1].action.stopped if turns else stopped
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


def pad_completions(groups: Sequence[Sequence[Sequence[int]]], width: int) -> "tuple[np.ndarray, np.ndarray]":
    """Pads groups of completions on the right into arrays.

    Args:
      groups: N groups of G lists of at most `width` ids.
      width: The width of the arrays, T.

    Returns:
      Ids int32 and mask bool, `[N, G, T]`.
    """
    shape = len(groups), len(groups[0]), width
    ids, mask = pad_rows([tokens for group in groups for tokens in group], width)
    return ids.reshape(shape), mask.reshape(shape)


def pad_rows(
    rows: "Sequence[Sequence[int] | np.ndarray]", width: int, *, pad_id: int = 0, at_left: bool = False
) -> "tuple[np.ndarray, np.ndarray]":
    """Pads rows of at most `width` ids on the right, or on the left, into arrays: ids int32 and mask bool, `[N, S]`."""
    import numpy as np  # not at the top: a grader's process, which needs no arrays, starts in half of the time

    ids, mask = np.full((len(rows), width), pad_id, np.int32), np.zeros((len(rows), width), bool)
    for number, tokens in enumerate(rows):
        place = slice(width - len(tokens), width) if at_left else slice(len(tokens))
        ids[number, place], mask[number, place] = tokens, True
    return ids, mask


def rng(*key: int) -> "np.random.Generator":
    """Returns NumPy's generator for a tuple of non-negative ints such as (seed, stream, step)."""
    import numpy as np

    return np.random.default_rng(np.random.SeedSequence(key))


# ---- lines of the log, which training steps make and the runner writes


class Skipped(NamedTuple):
    """Optimizer steps that were skipped because their gradients were not finite."""

    name: str  # the name of the first skipped step, for its file
    in_a_row: int
    most: int  # the run stops after this many skipped steps in a row, or if all its steps are skipped
    arrays: Callable[[], Mapping[str, Any]]  # returns the arrays of the batch by name, or trees of them


class StepLog(NamedTuple):
    """The metrics, warnings and groups of a step that are written to the log."""

    metrics: Mapping[str, Any]  # plain numbers, the same in a rerun; empty: nothing is written
    words: str  # the text of the progress bar; empty: no change
    warnings: Mapping[str, str] = {}  # key -> sentence, printed once in a run
    groups: Sequence[dict[str, Any]] = ()  # groups of the rollout, for people to read
    times: Mapping[str, Any] | None = None  # arguments of `RunFolder.log_times`; None: no times are written
    skipped: Skipped | None = None


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


def wrapped_functions(function: Any) -> list[Callable[..., Any]]:
    """Returns a function and those that it wraps or encloses."""
    parts = [function]
    for part in parts:  # which grows
        inner: list[Any] = [part.func] if isinstance(part, partial) else []
        for cell in getattr(part, "__closure__", None) or ():
            with suppress(ValueError):  # it is still empty
                inner.append(cell.cell_contents)
        parts += [x for x in inner if callable(x) and not any(x is known for known in parts)]
    return parts


def sources_of(function: Any) -> list[str]:
    """Returns the source code of `wrapped_functions` a function, as far as Python knows it."""
    sources = []
    for part in wrapped_functions(function):
        with suppress(OSError, TypeError):  # it was typed into a shell, or is no function
            sources.append(inspect.getsource(part))
    return sources


def hash_values(*values: Any) -> str:
    """Returns the digest of arrays and JSON values. Only the type of any other value counts."""
    import numpy as np

    digest = hashlib.sha256()
    for value in values:
        if isinstance(value, np.ndarray):
            digest.update(f"{value.dtype} {value.shape}".encode())
            digest.update(np.ascontiguousarray(value).tobytes())
        else:
            digest.update(json.dumps(value, default=lambda x: type(x).__name__).encode())
    return digest.hexdigest()
