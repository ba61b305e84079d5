"""Data rows from files, folders and the hub, and batches of them as a function of the step."""

import codecs
import csv
import gzip
import hashlib
import json
import math
import re
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from json.encoder import encode_basestring
from pathlib import Path
from sys import intern
from typing import Any

import numpy as np

from grpo_jax.data.text import Message, check_text, show_progress
from grpo_jax.data.types import rng
from grpo_jax.errors import UsageError, abbreviate, reason_of, user_path
from grpo_jax.models.chat import DEEPEST, is_learned, parse_calls
from grpo_jax.options import unique_names

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".parquet")
_SAVED = ("state.json", "dataset_dict.json", "dataset_info.json")  # files of save_to_disk that hold no rows
_CLONED = ".gitattributes"  # in every repository of the hub
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
      source: A file (.jsonl: one object per line; .json: a list of objects; either may end with .gz; .csv: texts below
        a line of names; .parquet), a folder with such files named after the splits, a folder of the package datasets
        (written by `save_to_disk`, or cloned from the hub), or an id on the hub. Only the last three and .parquet need
        the package.
      split: The split of a folder or hub data set. None: "train". A file has no splits.
      subset: The subset of a hub data set that has several, such as "main".

    Returns:
      The rows, at least one. Tools, calls of tools and variables of the chat template lose the nulls that Arrow adds,
      and a warning counts them.

    Raises:
      UsageError: The source does not exist, or cannot be read. The message names file, line and reason.
    """
    path = user_path(source)
    if not path.exists() and not str(source).endswith(SUFFIXES) and _HUB_ID.fullmatch(str(source)):
        rows = _dataset_rows(str(source), split or "train", subset)
    elif (path := _file(path, split)).is_dir():
        rows = _dataset_rows(str(path), split or "train", subset)
    elif path.name.endswith(".parquet"):
        rows = _dataset_rows("parquet", "train", data_files=str(path))
    else:
        kind = path.name.removesuffix(".gz").rpartition(".")[2]
        rows = {"json": _json_rows, "jsonl": _json_lines, "csv": _csv_rows}[kind](path)
    if not rows:
        raise UsageError(f"{source} holds no rows")
    remove_nulls(rows, str(source))
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


def text_column(row: Mapping[str, Any], name: str) -> str:
    """Returns the text of a column in a row.

    Raises:
      UsageError: There is no such column, or it holds anything other than text.
    """
    value, where = column(row, name), getattr(row, "where", "a row")
    if not isinstance(value, str):
        raise UsageError(f"{where}: column {name} holds {kind_of(value)}, and should hold text")
    if not value.isascii():
        check_text(value, f"{where}: column {name}")
    return value


def check_step_size(name: str, count: int, size: int) -> None:
    """Checks that there are enough rows for a step.

    Args:
      name: The name of the option that sets `count`, such as "num_prompts".
      count: The number of rows in a step.
      size: The number of rows.

    Raises:
      UsageError: `count` is not from 1 to `size`. The message says what to change.
    """
    if not 1 <= count <= size:
        noun = name.removeprefix("num_")
        raise UsageError(f"{name} is {count}, but there are {size} {noun} for training: set it to 1 to {size}")


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


def read_prompt(value: Any, where: str) -> list[Message]:
    """Reads the chat messages of a prompt, which the assistant answers. See `read_messages`.

    Raises:
      UsageError: A message has no text, or the last message is the assistant's.
    """
    messages = read_messages(value, where)
    if not messages or messages[-1]["role"] == "assistant":
        raise UsageError(f"{where} holds messages that should end with the user's: the assistant's is to be sampled")
    return messages


def read_messages(value: Any, where: str) -> list[Message]:
    """Reads chat messages as data sets store them.

    Args:
      value: The value of a column: a list of messages. A content may be a list of parts of type text, or be missing
        from a message with tool calls, whose arguments may be JSON. Fields without a value are left out.
      where: The row and the column, for errors.

    Returns:
      Messages whose "role" and "content" are texts. The content of a call of tools may be None. A message has the
      weight 0 if its field weight, train or loss is 0 or false: it is not to be learned.

    Raises:
      UsageError: The value is no list of messages, or a message has no text, another weight, or invalid arguments.
    """
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise UsageError(f"{where} holds {kind_of(value)}, and should hold text or a list of chat messages")
    messages: list[Message] = []
    for fields in value:
        message = {name: field for name, field in fields.items() if field is not None}
        content = message.get("content")
        if isinstance(content, list) and all(isinstance(x, dict) and isinstance(x.get("text"), str) for x in content):
            content = "".join(part["text"] for part in content)
        is_call = content is None and bool(message.get("tool_calls"))  # a call needs no text
        if not isinstance(message.get("role"), str) or not (is_call or isinstance(content, str)):
            raise UsageError(f'{where} holds a chat message without text as "role" and "content"')
        weights = {name: message.pop(name) for name in _WEIGHTS if name in message}
        is_other = message["role"] != "assistant"
        if any(x not in (0, 1) or (x and is_other and name != "weight") for name, x in weights.items()):
            raise UsageError(
                f"{where} holds a message of the {message['role']} with {abbreviate(weights)}: only the assistant can "
                "be learned, by the weight 0 or 1"
            )
        try:
            parse_calls(message)
        except (TypeError, ValueError):
            raise UsageError(f"{where} holds calls of tools whose arguments are no JSON object: correct them") from None
        messages.append({**message, "content": content} | ({"weight": 0} if 0 in weights.values() else {}))
    return messages


_WEIGHTS = ("weight", "train", "loss")  # as OpenAI and Mistral, axolotl, and others mark what is learned


_NOT_IN_CONTENT = {"tool_calls", "reasoning_content", "reasoning", "thinking"}  # fields that templates write


def completion_text(row: Mapping[str, Any], name: str, *, remedy: str = "") -> str:
    """Returns the completion in a column: its text, or the content of its only message, the assistant's.

    Args:
      row, name, remedy: See `column`.

    Raises:
      UsageError: The column is missing, or it holds several messages or more than text.
    """
    value, where = column(row, name, remedy=remedy), getattr(row, "where", "a row")
    if not isinstance(value, list):
        return text_column(row, name)
    messages = read_messages(value, f"{where}: column {name}")
    if not is_plain_answer(messages):
        raise UsageError(
            f"{where}: column {name} should hold text, or one message of the assistant after the prompt, with text "
            "only and without the weight 0"
        )
    return text_column(Row({name: messages[0]["content"]}, where), name)


def is_plain_answer(messages: Sequence[Message]) -> bool:
    """Returns whether messages are one of the assistant that is no more than its content, and is learned."""
    is_one = [message["role"] for message in messages] == ["assistant"]
    return is_one and not _NOT_IN_CONTENT & messages[0].keys() and is_learned(messages[0])


def _file(path: Path, split: str | None) -> Path:
    """Returns the file to read."""
    if path.is_dir():
        names = [f"{split or 'train'}{suffix}" for suffix in SUFFIXES]
        candidates = [path / name for name in names if (path / name).is_file()]
        if not candidates:
            if any((path / name).is_file() for name in (*_SAVED, _CLONED)) or not _row_files(path):
                return path  # for the package datasets
            raise UsageError(f"{path} has no {names[0]}: name one of its files: {', '.join(_row_files(path))}")
        if len(candidates) > 1:
            raise UsageError(f"{path} has {' and '.join(file.name for file in candidates)}: name one of them")
        return candidates[0]
    if not path.exists():
        raise UsageError(f"there is no {path}: name a file, a folder, or a data set of the hub as owner/name")
    if not path.name.endswith(SUFFIXES):
        known = ", ".join(SUFFIXES)
        advice = 'for example by pandas\' to_json(path, orient="records", lines=True)'
        raise UsageError(f"{path} is not one of {known}: convert it, {advice}")
    if split is not None:
        raise UsageError(f"{path} is one file and has no split {split}: leave it out, or name the folder")
    return path


def _row_files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if file.name.endswith(SUFFIXES))


def _lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file without reading it as a whole."""
    try:
        with gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb") as file:
            yield from file
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read ({error})") from None


def _json_lines(path: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(show_progress(_lines(path), f"reading {path.name}"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            if line.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
                raise UsageError(f"{where} holds a list, not an object with columns: is it .json?")
            rows.append(_row(_json(line.rstrip(b"\r\n"), where), where))
    return rows


def _json_rows(path: Path) -> list[Row]:
    values = _json(b"".join(_lines(path)), str(path), ": is it .jsonl?")
    if not isinstance(values, list):
        raise UsageError(f"{path} holds {kind_of(values)}, not a list of objects: is it .jsonl?")
    return [_row(value, f"{path}, item {number}") for number, value in enumerate(values, 1)]


def _csv_rows(path: Path) -> list[Row]:
    csv.field_size_limit(2**31 - 1)  # Python's default, 128 KiB, is too short for long prompts
    rows = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            names = [name for name in reader.fieldnames or () if name]  # spreadsheets write empty names
            if twice := next((name for name in names if names.count(name) > 1), ""):
                raise UsageError(f"{path} has two columns {twice}: rename one of them in its first line")
            for columns in show_progress(reader, f"reading {path.name}"):
                where = f"{path}, line {reader.line_num}"
                if None in columns or None in columns.values():
                    raise UsageError(f"{where} has other columns than the first line of the file names")
                rows.append(_row(columns, where))
    except (csv.Error, OSError, UnicodeError) as error:
        raise UsageError(f"{path} is not CSV in UTF-8 ({reason_of(error)})") from None
    return rows


def _json(content: bytes, where: str, remedy: str = "") -> Any:
    try:
        # The first line may have a byte order mark.
        return json.loads(content.decode("utf-8-sig"), object_pairs_hook=unique_names)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    except (RecursionError, ValueError) as error:
        raise UsageError(f"{where} is not JSON in UTF-8 ({reason_of(error)}){remedy}") from None


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise UsageError(f"{where} holds {kind_of(value)}, not an object with columns")
    return Row(value, where)


def _dataset_rows(source: str, split: str, subset: str | None = None, **files: str) -> list[Row]:
    """Reads rows with the package datasets, from the hub or from files of its own."""
    name = files.get("data_files", source)
    try:
        import datasets
    except ImportError:
        problem = f"there is no file or folder {name}; to read it from the hub"
        if Path(name).exists():
            problem = f"{name} is a data set of the package datasets: to read it"
        raise UsageError(f"{problem} install grpo_jax[hub] (the package datasets)") from None
    try:
        if files or not any((Path(source) / saved).is_file() for saved in _SAVED):
            rows = datasets.load_dataset(source, subset, split=split, **files)
        else:
            rows = datasets.load_from_disk(source)
            if isinstance(rows, dict) and split not in rows:
                raise ValueError(f"name one of the folders in it, {', '.join(rows)}")
            rows = rows[split] if isinstance(rows, dict) else rows
    except Exception as error:  # from the package, the hub or the network
        raise UsageError(f"data set {name}, split {split} cannot be loaded: {reason_of(error)}") from error
    return [_row(row, f"{name}, split {split}, row {number}") for number, row in enumerate(rows)]


_FOR_TEMPLATES = {"tools", "chat_template_kwargs"}  # columns that the chat template reads


def remove_nulls(rows: Sequence[Mapping[str, Any]], source: str) -> None:
    """Removes the nulls of tools, their calls and template variables from columns that Arrow wrote, and warns.

    Arrow gives all objects at a place the same fields, and a variable that is null is defined for a template. In a
    column with any other object, nulls have a meaning.

    Args:
      rows: The rows, whose objects are changed.
      source: The name of their source, for the warning.
    """
    names = {name for row in rows for name, value in row.items() if name in _FOR_TEMPLATES or _has_calls(value)}
    count = 0
    for name in names:
        fields: dict[Any, Any] = {}
        columns = [row.get(name) for row in rows]
        if all(fields.setdefault(place, x.keys()) == x.keys() for place, x in _objects(columns, (name,))):
            for place, x in _objects(columns, (name,)):
                for field in [y for y in x if x[y] is None and {*_FOR_TEMPLATES, "tool_calls"} & {*place}]:
                    del x[field]
                    count += 1
    if count:
        where = "tools and their calls, or of chat_template_kwargs"
        note = f"{source}: {count} nulls were left out of {where}, since Arrow adds them"
        warnings.warn(note, stacklevel=3)


def _has_calls(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "tool_calls" in value[0]


def _objects(value: Any, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yields the objects in a value with the names of the fields above them, down to the level that templates read."""
    if isinstance(value, dict):
        yield place, value
        for name, x in value.items():
            yield from _objects(x, (*place, name)) if len(place) < DEEPEST else ()
    for x in value if isinstance(value, list) else ():
        yield from _objects(x, place)


def kind_of(value: Any) -> str:
    """Returns JSON's name for the type of a value."""
    kinds = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return "nothing (null)" if value is None else kinds.get(type(value), type(value).__name__)
