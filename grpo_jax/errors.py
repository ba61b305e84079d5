"""Errors that a user can fix."""

import contextlib
import errno
import os
import re
import sys
import traceback
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO


class UsageError(ValueError):
    """An error in an option, a file or a task, whose message is one sentence that says what to change.

    Programs print the message without a traceback. Any other error is a defect and keeps its traceback. Line breaks in
    the message are joined, and beyond 1,000 characters its middle is left out.
    """

    def __init__(self, sentence: str) -> None:
        """`sentence` begins with what is wrong and ends with what to do."""
        line = " ".join(sentence.splitlines())
        super().__init__(line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} … {line[-_LONGEST // 3 :]}")


_LONGEST = 1000  # characters of a sentence


class Interruption(UsageError):
    """An error in something that a run waits for, such as a server. The run itself is saved and can be resumed."""


def abbreviate(value: object) -> str:
    """Returns a value as text for an error message, at most 60 characters of its `repr`."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


@contextlib.contextmanager
def reading(file: object, remedy: str) -> Iterator[None]:
    """Opens a block that reads a file. All that its parser raises becomes one sentence.

    Args:
      file: The name of the file.
      remedy: The end of the sentence, which says what to do.

    Raises:
      UsageError: The block raised an error.
    """
    try:
        yield
    except Exception as error:  # a parser may raise any type of error: PyYAML raises IndexError for !!int ""
        kind = "" if isinstance(error, OSError | UsageError) else f"{type(error).__name__}: "
        raise UsageError(f"{file} cannot be read ({kind}{error}): {remedy}") from None


def reason_of(error: Exception) -> str:
    """Returns the first line of an error's message, or the name of its type. A line that ends in ":" takes the next."""
    text = str(getattr(error, "strerror", None) or error).strip()
    first, *more = text.splitlines() or [type(error).__name__]
    return " ".join([first, *(line.strip() for line in more[: first.endswith(":")])])


def missing(package: str | None) -> ImportError:
    """Returns the error for a package of the extra `train` that cannot be imported."""
    return ImportError(
        f"this part of grpo_jax needs the package {package}: pip install 'grpo_jax[train]'", name=package
    )


def need(*packages: str) -> None:
    """Raises if packages of the extra `train` are missing.

    Raises:
      ImportError: A package is not installed.
    """
    for package in packages:
        if find_spec(package) is None:
            raise missing(package)


def open_nowhere() -> TextIO:
    """Opens a stream that forgets what is written to it, in place of one that is closed or full."""
    return open(os.devnull, "w", encoding="utf-8")


def flush_output() -> None:
    """Writes what is buffered. A stream that cannot be written is replaced, or Python would fail again as it ends."""
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except OSError:
            setattr(sys, name, open_nowhere())


def user_path(name: str | Path) -> Path:
    """Returns a path from the user, with ~ expanded. The path need not exist.

    Raises:
      UsageError: No file can have this name, or a folder above it cannot be entered.
    """
    try:
        path = Path(name).expanduser()
        str(path.absolute()).encode()  # libraries that write checkpoints take UTF-8 only
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    except UnicodeEncodeError:
        raise UsageError(f"the path {abbreviate(str(name))} is not UTF-8: rename it, or set PYTHONUTF8=1") from None
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"the path {abbreviate(str(name))} cannot be used ({reason_of(error)}): name another"
        ) from None
    return path


def make_folder(folder: Path) -> None:
    """Makes a folder, and the folders above it.

    Raises:
      UsageError: It cannot be made, or no file can be made in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be made ({reason_of(error)}): name another folder") from None
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise UsageError(f"{folder} cannot be written: name another folder")


# Limits of the machine: error numbers, the texts of libraries that raise without a number, and the message.
_LIMITS: tuple[tuple[set[int], str, str], ...] = (
    ({errno.ENOSPC, errno.EDQUOT}, "No space left on device|Disk quota exceeded", "the disk is full: free some space"),
    ({errno.EFBIG}, "File too large", "a file is larger than a limit allows: raise the limit (ulimit -f)"),
    ({errno.EMFILE, errno.ENFILE}, "Too many open files", "too many files are open: raise the limit (ulimit -n)"),
    (set(), "can't start new thread", "too many threads run: raise the limit (ulimit -u)"),
    (set(), "initialize backend|Unknown backend|_default_backend", "JAX finds no such device: correct JAX_PLATFORMS"),
    (set(), "date value out of range|year .* is out of range", "a date is out of range: set the clock of the machine"),
    ({errno.EPIPE}, r"^\[Errno 32\]", "nothing reads the output any more: write it to a file, or read it to its end"),
)
_UNWRITABLE = {errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.ESTALE, errno.ENAMETOOLONG}
_UNWRITABLE |= {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP}  # something else, or a dead link, in its place


def lacking(error: BaseException) -> str:
    """Returns which resource the machine lacks, without a final period, or "" if the error has another cause."""
    number, text = getattr(error, "errno", None), " ".join(str(error).split())
    text = text or "".join(traceback.format_tb(error.__traceback__)[-1:])  # JAX asserts that it has a device
    for numbers, words, sentence in _LIMITS:
        if number in numbers or re.search(words, text):
            return sentence
    if isinstance(error, FileNotFoundError) and error.filename and not Path(error.filename).parent.exists():
        return f"the folder {Path(error.filename).parent} is gone: put it back"
    if isinstance(error, OSError) and number in _UNWRITABLE:
        return f"{error.filename or 'a file'} cannot be read or written ({error.strerror}): mend that"
    if "RESOURCE_EXHAUSTED" in text or "Out of memory" in text or isinstance(error, MemoryError):
        return "there is not enough memory: lower max_tokens or the prompts of a step, or see docs/performance.md"
    return ""
