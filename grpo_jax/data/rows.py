"""Data rows from files, folders and the hub, and batches of them as a function of the step."""

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
from typing import Any

import numpy as np

from grpo_jax.data.text import Message, check_text, progress
from grpo_jax.data.types import rng
from grpo_jax.errors import UsageError, reason_of, user_path

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


class Row(dict[str, Any]):
    """The columns of one prompt, and the place that they were read from."""

    __slots__ = ("where",)

    def __init__(self, columns: Mapping[str, Any], where: str) -> None:
        """Sets the columns and the place."""
        # Rows share the names of their columns, which saves memory.
        super().__init__(zip(map(intern, columns), columns.values(), strict=True))
        self.where = where


def read_rows(source: str | Path, *, split: str | None = None, subset: str | None = None) -> list[Row]:
    """Reads the rows of a local file or folder, or of a hub data set.

    Args:
      source: A file (.jsonl: one object per line; .json: a list of objects; either may end with .gz), a folder with
        such files named after the splits, or an id on the hub.
      split: The split of a folder or hub data set. None: "train". A file has no splits.
      subset: The subset of a hub data set that has several, such as "main".

    Returns:
      The rows, at least one.

    Raises:
      UsageError: The source does not exist, or cannot be read. The message names file, line and reason.
    """
    path = user_path(source)
    if not path.exists() and not str(source).endswith(SUFFIXES) and _HUB_ID.fullmatch(str(source)):
        rows = _hub_rows(str(source), split or "train", subset)
    else:
        path = _file(path, split)
        rows = _json_rows(path) if path.name.removesuffix(".gz").endswith(".json") else _json_lines(path)
    if not rows:
        raise UsageError(f"{source} holds no rows")
    return rows


def column(row: Mapping[str, Any], name: str, where: str = "a row", *, remedy: str = "") -> Any:
    """Returns the value of a column in a row.

    Args:
      row: The row.
      name: The name of the column.
      where: The place of a row that was not read by `read_rows`, for errors.
      remedy: The end of the error message, which says how to name another column.

    Returns:
      The value.

    Raises:
      UsageError: There is no such column. The message lists the columns of the row.
    """
    if name not in row:
        there = ", ".join(map(str, row)) or "none"
        raise UsageError(
            f"{getattr(row, 'where', where)} has no column {name}: its columns are {there}{remedy and f'; {remedy}'}"
        )
    return row[name]


def text_column(row: Mapping[str, Any], name: str, where: str = "a row", *, remedy: str = "") -> str:
    """Returns the text of a column in a row. Arguments are those of `column`.

    Raises:
      UsageError: There is no such column, or it holds anything other than text.
    """
    value = column(row, name, where, remedy=remedy)
    if not isinstance(value, str):
        raise UsageError(f"{getattr(row, 'where', where)}: column {name} holds {kind_of(value)}, and should hold text")
    if not value.isascii():
        check_text(value, f"{getattr(row, 'where', where)}: column {name}")
    return value


def batches(size: int, count: int, seed: int) -> Callable[[int], np.ndarray]:
    """Makes batches of shuffled epochs, as numbers of rows.

    No row is taken twice within an epoch, nor within a step that spans two epochs.

    Args:
      size: The number of rows in an epoch.
      count: The number of rows in a step, at most `size`.
      seed: The seed of the order of rows.

    Returns:
      A pure function from the step to `count` different numbers below `size`.
    """
    # After this many epochs, the beginning of an epoch is again the beginning of a step.
    cycle = count // math.gcd(count, size)

    @lru_cache(maxsize=2)  # a step may span two epochs
    def shuffled(epoch: int) -> np.ndarray:
        # The rows that an epoch moves depend on the end of the epoch before it. If epochs are short, that end depends
        # on earlier epochs in turn.
        first = epoch - epoch % cycle
        if size >= 2 * count:
            first = max(first, epoch - 1)
        order = rng(seed, 0, first).permutation(size)
        for later in range(first + 1, epoch + 1):
            taken = later * size % count  # from the epoch before, by the step that spans both
            order = _later(rng(seed, 0, later).permutation(size), order[size - taken :], count)
        return order

    def batch(step: int) -> np.ndarray:
        epoch, start = divmod(step * count, size)
        numbers = shuffled(epoch)[start : start + count]
        missing = count - len(numbers)
        return np.concatenate([numbers, shuffled(epoch + 1)[:missing]]) if missing else numbers

    return batch


def _later(order: np.ndarray, taken: np.ndarray, count: int) -> np.ndarray:
    """Moves `taken` rows to the end of the first `count` rows of an order."""
    head = order[:count]
    again = np.isin(head, taken)
    return np.concatenate([head[~again], head[again], order[count:]])


def hash_of_prompt(prompt: str | list[Message], where: str = "a row") -> float:
    """Hashes a prompt to a number in [0, 1), by which rows are held out. It is the same for every seed and tokenizer.

    Raises:
      UsageError: The prompt is no valid text.
    """
    if isinstance(prompt, str):
        text = encode_basestring(prompt)  # as json.dumps writes it
    else:
        text = json.dumps(prompt, ensure_ascii=False, default=str)
    check_text(text, f"{where}: its prompt")
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) / 2**48


def check_messages(prompt: Any, where: str) -> None:
    """Checks that a prompt is a list of chat messages for the assistant to answer.

    Args:
      prompt: The value of a column.
      where: The row and the column, for errors.

    Raises:
      UsageError: A message has no text, or the last message is the assistant's.
    """
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        raise UsageError(f"{where} holds {kind_of(prompt)}, and should hold text or a list of chat messages")
    for message in prompt:
        content = message.get("content")
        if content is None and message.get("tool_calls"):  # a call needs no text
            content = ""
        if not isinstance(message.get("role"), str) or not isinstance(content, str):
            raise UsageError(f'{where} holds a chat message without text as "role" and "content"')
    if not prompt or prompt[-1]["role"] == "assistant":
        raise UsageError(f"{where} holds messages that should end with the user's: the assistant's is to be sampled")


def _file(path: Path, split: str | None) -> Path:
    """Returns the file to read."""
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


def _lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file without reading it as a whole."""
    try:
        with gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb") as file:
            yield from file
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read ({error})") from None


def _json_lines(path: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(progress(_lines(path), f"reading {path.name}"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            rows.append(_row(_json(line.rstrip(b"\r\n"), where), where))
    return rows


def _json_rows(path: Path) -> list[Row]:
    values = _json(b"".join(_lines(path)), str(path))
    if not isinstance(values, list):
        raise UsageError(f"{path} holds {kind_of(values)}, not a list of objects: is it .jsonl?")
    return [_row(value, f"{path}, item {number}") for number, value in enumerate(values, 1)]


def _json(content: bytes, where: str) -> Any:
    try:
        return json.loads(content.decode("utf-8-sig"))  # the first line may have a byte order mark
    except (RecursionError, ValueError) as error:
        raise UsageError(f"{where} is not JSON in UTF-8 ({reason_of(error)})") from None


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise UsageError(f"{where} holds {kind_of(value)}, not an object with columns")
    return Row(value, where)


def _hub_rows(source: str, split: str, subset: str | None) -> list[Row]:
    try:
        import datasets
    except ImportError:
        raise UsageError(
            f"there is no file or folder {source}; to read it from the hub install grpo_jax[hub] (the package datasets)"
        ) from None
    try:
        rows = datasets.load_dataset(source, subset, split=split)
    except Exception as error:  # from the package, the hub or the network
        raise UsageError(f"data set {source}, split {split} cannot be loaded: {reason_of(error)}") from error
    return [_row(row, f"{source}, split {split}, row {number}") for number, row in enumerate(rows)]


def kind_of(value: Any) -> str:
    """Returns JSON's name for the type of a value."""
    kinds = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return "nothing (null)" if value is None else kinds.get(type(value), type(value).__name__)
