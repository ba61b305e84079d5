"""Errors that a user can mend."""

import contextlib
import errno
import re
from importlib.util import find_spec
from pathlib import Path


class UsageError(ValueError):
    """An option, a file or a task that cannot work, in one sentence that says what to change.

    Programs print it without a traceback; any other error is a defect and keeps its own. What it quotes may have line
    breaks or be long, and the sentence has not: lines are joined, and the middle of more than 1,000 characters is left
    out.
    """

    def __init__(self, sentence: str) -> None:
        """`sentence` begins with what is wrong and ends with what to do."""
        line = " ".join(sentence.splitlines())
        super().__init__(line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} … {line[-_LONGEST // 3 :]}")


_LONGEST = 1000  # characters of a sentence


class Interruption(UsageError):
    """Something that a run waits for is gone, or not what it was. Nothing of the run is wrong: what it has learned is
    saved, and it can be resumed."""


def abbreviate(value: object) -> str:
    """A value in an error: one line, and not more than one can read."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def reason_of(error: Exception) -> str:
    """Returns why something failed, in a few words: the first line of what an error says."""
    text = str(getattr(error, "strerror", None) or error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def missing(package: str | None) -> ImportError:
    """Returns the error for a package of the extra `train` that cannot be imported."""
    return ImportError(
        f"this part of grpo_jax needs the package {package}: pip install 'grpo_jax[train]'", name=package
    )


def need(*packages: str) -> None:
    """Refuses to go on without packages of the extra `train`.

    Raises:
      ImportError: one of them is not installed.
    """
    for package in packages:
        if find_spec(package) is None:
            raise missing(package)


def user_path(name: str | Path) -> Path:
    """Returns a path that the user names, with ~ replaced. Nothing need exist there.

    Raises:
      UsageError: no file can have this name, or a folder above it cannot be entered.
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


# Limits of the machine: numbers of errors, what libraries write instead of a number, and the sentence.
_LIMITS = (
    ({errno.ENOSPC, errno.EDQUOT}, "No space left on device|Disk quota exceeded", "the disk is full: free some space"),
    ({errno.EFBIG}, "File too large", "a file is larger than a limit allows: raise the limit (ulimit -f)"),
    ({errno.EMFILE, errno.ENFILE}, "Too many open files", "too many files are open: raise the limit (ulimit -n)"),
    ({errno.EPIPE}, r"^\[Errno 32\]", "nothing reads the output any more: write it to a file, or read it to its end"),
)
_UNWRITABLE = {errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.ESTALE, errno.ENAMETOOLONG}
_UNWRITABLE |= {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP}  # something else, or a dead link, in its place


def lacking(error: BaseException) -> str:
    """Returns what the machine lacks, as a sentence without its end, if an error was raised for that; else nothing."""
    number, text = getattr(error, "errno", None), " ".join(str(error).split())
    for numbers, words, sentence in _LIMITS:
        if number in numbers or re.search(words, text):
            return sentence
    if isinstance(error, OSError) and number in _UNWRITABLE:
        return f"{error.filename or 'a file'} cannot be read or written ({error.strerror}): mend that"
    if "RESOURCE_EXHAUSTED" in text or "Out of memory" in text or isinstance(error, MemoryError):
        return "there is not enough memory: see docs/performance.md for what needs less"
    return ""
