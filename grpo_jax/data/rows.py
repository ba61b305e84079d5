"""Data rows from files, folders and the hub, and batches of them as a function of the step."""

import codecs
import gzip
import hashlib
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from json.encoder import encode_basestring
from pathlib import Path
from sys import intern
from typing import IO, Any

import numpy as np

from grpo_jax.data.text import Message, check_text, progress
from grpo_jax.data.types import rng
from grpo_jax.errors import UsageError, reason_of, user_path

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


class Row(dict[str, Any]):
    """The columns of one prompt, which also know where they were read."""

    __slots__ = ("_number", "_source")

    def __init__(self, columns: Mapping[str, Any], source: str, number: int | None = None) -> None:
        """The place is `source`, followed by `number` if there is one: a million rows share one `source`."""
        # Rows also share the names of their columns.
        super().__init__(zip(map(intern, columns), columns.values(), strict=True))
        self._source, self._number = source, number

    @property
    def where(self) -> str:
        """The place that the row was read from."""
        return self._source if self._number is None else f"{self._source} {self._number}"


def read_rows(source: str | Path, *, split: str | None = None, subset: str | None = None) -> list[Row]:
    """Rows of a local file or folder, or of a data set on the hub.

    Args:
      source: a file (.jsonl: an object a line; .json: a list of objects; either with .gz), a folder with such files
        named after the splits, or an id on the hub.
      split: part of a folder or of a hub set; None: "train". A file is one part.
      subset: of a hub set that has several, such as "main".

    Returns:
      The rows, at least one.

    Raises:
      UsageError: there is no such thing, or it cannot be read; file, line and reason in one sentence.
    """
    path = user_path(source)
    if not path.exists() and not str(source).endswith(SUFFIXES) and _HUB_ID.fullmatch(str(source)):
        rows = _hub_rows(str(source), split or "train", subset)
        where = f"{source}, split {split or 'train'}"
    else:
        path = _file(path, split, subset)
        rows = _json_rows(path) if path.name.removesuffix(".gz").endswith(".json") else _json_lines(path)
        where = str(path)
    if not rows:
        raise UsageError(f"{where} holds no rows")
    return rows


def column(row: Mapping[str, Any], name: str, where: str = "a row", *, remedy: str = "") -> Any:
    """Returns the value of a column in a row.

    Args:
      row: its columns.
      name: of the column.
      where: names a row that was not read by `read_rows`.
      remedy: how to name another column, as the end of the refusal.

    Returns:
      The value.

    Raises:
      UsageError: there is no such column; the sentence says which there are.
    """
    if name not in row:
        there = ", ".join(map(str, row)) or "none"
        raise UsageError(
            f"{getattr(row, 'where', where)} has no column {name}: its columns are {there}{remedy and f'; {remedy}'}"
        )
    return row[name]


def text_column(row: Mapping[str, Any], name: str, where: str = "a row", *, remedy: str = "") -> str:
    """Returns the text of a column in a row, as `column`.

    Raises:
      UsageError: there is no such column, or it holds something else.
    """
    value = column(row, name, where, remedy=remedy)
    if not isinstance(value, str):
        raise UsageError(f"{getattr(row, 'where', where)}: column {name} holds {kind_of(value)}, and should hold text")
    if not value.isascii():
        check_text(value, f"{getattr(row, 'where', where)}: column {name}")
    return value


def batches(size: int, count: int, seed: int) -> Callable[[int], np.ndarray]:
    """Which of `size` things a step takes: the next `count` of shuffled epochs.

    Nothing is taken twice within an epoch, nor within a step that takes from the ends of two.

    Args:
      size: of an epoch.
      count: at most size.
      seed: of the shuffling.

    Returns:
      A pure function from the step to `count` different numbers below `size`.
    """
    # An epoch begins with a step again after this many.
    cycle = count // math.gcd(count, size)

    @lru_cache(maxsize=2)  # a step may take from the ends of two
    def shuffled(epoch: int) -> np.ndarray:
        # What an epoch moves depends on the end of the one before, and that on its own beginning if it is short.
        first = epoch - epoch % cycle
        if size >= 2 * count:
            first = max(first, epoch - 1)
        order = rng(seed, 0, first).permutation(size)
        for later in range(first + 1, epoch + 1):
            taken = later * size % count  # by the step that this epoch begins within
            order = _later(rng(seed, 0, later).permutation(size), order[size - taken :], count)
        return order

    def batch(step: int) -> np.ndarray:
        epoch, start = divmod(step * count, size)
        numbers = shuffled(epoch)[start : start + count]
        missing = count - len(numbers)
        return np.concatenate([numbers, shuffled(epoch + 1)[:missing]]) if missing else numbers

    return batch


def _later(order: np.ndarray, taken: np.ndarray, count: int) -> np.ndarray:
    """An order whose first `count` have those that are `taken` at their end."""
    head = order[:count]
    again = np.isin(head, taken)
    return np.concatenate([head[~again], head[again], order[count:]])


def hash_of_prompt(prompt: str | list[Message], where: str = "a row") -> float:
    """A hash of the prompt in [0, 1), by which rows are held out: the same for every seed and tokenizer.

    Raises:
      UsageError: it is no text.
    """
    if isinstance(prompt, str):
        text = encode_basestring(prompt)  # as json.dumps writes it
    else:
        text = json.dumps(prompt, ensure_ascii=False, default=str)
    check_text(text, f"{where}: its prompt")
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) / 2**48


def check_messages(prompt: Any, where: str) -> None:
    """Refuses a prompt that is no list of chat messages for the assistant to answer.

    Args:
      prompt: the value of a column.
      where: names the row and the column.

    Raises:
      UsageError: a message lacks a text, or the assistant has the last word.
    """
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        raise UsageError(f"{where} holds {kind_of(prompt)}, and should hold text or a list of chat messages")
    for message in prompt:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise UsageError(f'{where} holds a chat message without text as "role" and "content"')
    if not prompt or prompt[-1]["role"] == "assistant":
        raise UsageError(f"{where} holds messages that should end with the user's: the assistant's is to be sampled")


def _file(path: Path, split: str | None, subset: str | None) -> Path:
    """The file to read."""
    if subset is not None:
        raise UsageError(f"{path} is no data set of the hub, and has no subset: leave it out")
    if path.is_dir():
        names = [f"{split or 'train'}{suffix}" for suffix in SUFFIXES]
        candidates = [path / name for name in names if (path / name).is_file()]
        if not candidates:
            there = ", ".join(sorted(file.name for file in path.iterdir() if file.name.endswith(SUFFIXES)))
            advice = f"name one of its files: {there}" if there else "it has no files of rows"
            raise UsageError(f"{path} has no {names[0]}: {advice}")
        return candidates[0]
    if not path.exists():
        raise UsageError(f"there is no {path}: name a file, a folder, or a data set of the hub as owner/name")
    if not path.name.endswith(SUFFIXES):
        known = ", ".join(SUFFIXES)
        raise UsageError(f"{path} is not one of {known}: convert it, for example by pandas' to_json(lines=True)")
    if split is not None:
        raise UsageError(f"{path} is one file and has no split {split}: leave it out, or name the folder")
    return path


def _open(path: Path) -> IO[bytes] | gzip.GzipFile:
    return gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb")


def _lines(path: Path) -> Iterator[bytes]:
    """Lines of a file, which is not read as a whole."""
    try:
        with _open(path) as file:
            for number, line in enumerate(file):
                # Lines of bytes: those of a text also end at characters that JSON allows within one.
                yield from (line if number else line.removeprefix(codecs.BOM_UTF8)).splitlines(keepends=True)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read ({error})") from None


def _json_lines(path: Path) -> list[Row]:
    rows, source = [], f"{path}, line"
    for number, line in enumerate(progress(_lines(path), f"reading {path.name}"), 1):
        if line.strip():
            rows.append(_row(_json(line.rstrip(b"\r\n"), source, number), source, number))
    return rows


def _json_rows(path: Path) -> list[Row]:
    values = _json(b"".join(_lines(path)), str(path))
    if not isinstance(values, list):
        raise UsageError(f"{path} holds {kind_of(values)}, not a list of objects: is it .jsonl?")
    return [_row(value, f"{path}, item", number) for number, value in enumerate(values, 1)]


def _json(content: bytes, *place: Any) -> Any:
    try:
        return json.loads(content.decode())
    except (RecursionError, ValueError) as error:
        where = " ".join(map(str, place))  # not made for the lines without an error
        if isinstance(error, UnicodeDecodeError):
            raise UsageError(f"{where} is not UTF-8: convert it") from None
        if not isinstance(error, json.JSONDecodeError):  # nested too deeply, or a number too long
            raise UsageError(f"{where} is JSON that cannot be read ({reason_of(error)})") from None
        at = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise UsageError(f"{where} is not JSON ({error.msg} at {at})") from None


def _row(value: Any, source: str, number: int) -> Row:
    if not isinstance(value, dict):
        raise UsageError(f"{source} {number} holds {kind_of(value)}, not an object with columns")
    return Row(value, source, number)


def _hub_rows(source: str, split: str, subset: str | None) -> list[Row]:
    try:
        import datasets
    except ImportError:
        raise UsageError(
            f"there is no file or folder {source}; to read it from the hub install grpo_jax[hub] (the package datasets)"
        ) from None
    try:
        rows = datasets.load_dataset(source, subset, split=split)
    except Exception as error:  # the package's own, the hub's, and the network's
        raise UsageError(f"data set {source}, split {split} cannot be loaded: {reason_of(error)}") from error
    return [_row(row, f"{source}, split {split}, row", number) for number, row in enumerate(rows)]


def kind_of(value: Any) -> str:
    """Returns JSON's name for the type of a value."""
    kinds = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return "nothing (null)" if value is None else kinds.get(type(value), type(value).__name__)
