"""Tasks from rows: a file, a folder or a data set of the hub, and whatever reward there is for it.

A row is a dict of columns. Its prompt is one of them, or a template filled with several; all of them reach the reward.
"""

import codecs
import gzip
import hashlib
import json
import math
import re
import string
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.errors import UsageError
from grpo_jax.tasks.task import Answer, Prompts, Reward, Rewards, Task, check_num_prompts, pad_prompts, rng
from grpo_jax.tasks.text import Encoded, Message, Overlong, encode_prompts

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


class Row(dict[str, Any]):
    """The columns of one prompt, which also know where they were read."""

    where: str

    def __init__(self, columns: Mapping[str, Any], where: str) -> None:
        super().__init__(columns)
        self.where = where


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
    path = Path(source).expanduser()
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


def column(row: Mapping[str, Any], name: str, where: str = "a row") -> Any:
    """What a row has in a column.

    Args:
      row: its columns.
      name: of the column.
      where: names a row that was not read by `read_rows`.

    Returns:
      The value.

    Raises:
      UsageError: there is no such column; the sentence says which there are.
    """
    if name not in row:
        there = ", ".join(map(str, row)) or "none"
        raise UsageError(f"{getattr(row, 'where', where)} has no column {name}: its columns are {there}")
    return row[name]


def text_column(row: Mapping[str, Any], name: str, where: str = "a row") -> str:
    """As `column`, of text.

    Raises:
      UsageError: there is no such column, or it holds something else.
    """
    value = column(row, name, where)
    if not isinstance(value, str):
        raise UsageError(f"{getattr(row, 'where', where)}: column {name} holds {_kind(value)}, and should hold text")
    return value


def text_task(
    tokenizer: Any,
    eos_ids: tuple[int, ...],
    rows: Sequence[Mapping[str, Any]],
    *,
    vocab_size: int,
    num_prompts: int,
    seed: int,
    reward: Reward | Rewards,
    prompt_column: str = "prompt",
    template: str | None = None,
    chat: bool = False,
    system: str | None = None,
    heldout_rows: Sequence[Mapping[str, Any]] | None = None,
    heldout_share: float = 0.1,
    num_heldout: int | None = None,
    max_prompt_tokens: int | None = None,
    overlong: Overlong = "drop",
    open_ended: bool = False,
    answer: Answer | None = None,
) -> Task:
    """A task from rows. Every training prompt is seen once an epoch, in an order that is a function of the seed.

    The split is a function of the prompts before any chat template: it is the same for every seed and tokenizer, and
    equal prompts are on one side of it.

    Args:
      tokenizer: of transformers.
      eos_ids: what ends a completion.
      rows: for training, and if there are no others for holding out.
      vocab_size: of the model.
      num_prompts: N.
      seed: of the order.
      reward: on examples, which are all columns of a row, with the text as encoded as "prompt" (in place of a column
        of that name); or several by name.
      prompt_column: text, or a list of chat messages.
      template: instead of a column, a text with {column} in it; {{ and }} are braces. Nothing but names of columns is
        understood, whose text or number is put in.
      chat: makes a text the user's message, for the tokenizer's chat template.
      system: a system message before prompts that have none; for text, with `chat` alone.
      heldout_rows: never trained on: a training prompt that is among them is dropped.
      heldout_share: without heldout_rows, about this share of the prompts is held out. 0: all are trained on, and the
        same are "held out", which a note says.
      num_heldout: of heldout_rows at most this many; without heldout_rows, this many different prompts instead of a
        share. Always those whose hash is smallest.
      max_prompt_tokens, overlong: as in `encode_prompts`.
      open_ended: completions are meant to be cut.
      answer: what completions of a prompt vote on, such as `rewards.builtin.number_vote`; None: there is no vote.

    Returns:
      The task; its notes count the prompts that were dropped or cut.

    Raises:
      UsageError: rows, columns, template or split do not work, in one sentence that says where.
    """
    if num_prompts < 1:
        raise UsageError(f"num_prompts is {num_prompts}: it must be at least 1")
    if num_heldout is not None and num_heldout < 1:
        raise UsageError(f"num_heldout is {num_heldout}: it must be at least 1")

    def items(given: Sequence[Mapping[str, Any]], name: str) -> list[_Item]:
        wheres = (getattr(row, "where", f"{name} {number}") for number, row in enumerate(given))
        return [_item(row, where, prompt_column, template) for row, where in zip(given, wheres, strict=True)]

    def encode(chosen: Sequence[_Item]) -> Encoded:
        prompts = [_in_chat(item.prompt, tokenizer, chat, system) for item in chosen]
        return encode_prompts(
            tokenizer, prompts, eos_ids=eos_ids, max_prompt_tokens=max_prompt_tokens, overlong=overlong
        )

    given, lost = items(rows, "row"), 0
    nothing_held_out = heldout_rows is None and num_heldout is None and heldout_share == 0
    if nothing_held_out:
        training = heldout = given
    elif heldout_rows is None:
        training, heldout = _split(given, heldout_share, num_heldout)
    else:
        heldout = items(heldout_rows, "held-out row")
        places = {item.place for item in heldout}
        training = [item for item in given if item.place not in places]
        lost = len(given) - len(training)
        if num_heldout is not None:
            heldout = _split(heldout, 0.0, num_heldout)[1]
    if not training or not heldout:
        which = "training" if heldout else "held out"
        raise UsageError(
            f"no prompt is left for {which} among {len(rows)} rows, where equal prompts go together: give others"
        )
    train, out = encode(training), encode(heldout)
    # Once more, as ids: two texts that were cut may have become the same prompt.
    known = set() if nothing_held_out else {tuple(ids) for ids in out.token_ids}
    order = [i for i, ids in enumerate(train.token_ids) if tuple(ids) not in known]
    check_num_prompts(num_prompts, len(order))
    batch = batches(len(order), num_prompts, seed)
    width = max(len(ids) for ids in train.token_ids + out.token_ids)
    largest = max(max(ids) for ids in train.token_ids + out.token_ids)
    if largest >= vocab_size:
        raise UsageError(f"the tokenizer writes token {largest}, but the model has {vocab_size}: use the model's own")
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0

    def padded(encoded: Encoded, chosen: Sequence[_Item], numbers: Iterable[int]) -> Prompts:
        numbers = list(numbers)
        examples = [{**chosen[encoded.kept[i]].row, "prompt": encoded.texts[i]} for i in numbers]
        return pad_prompts([encoded.token_ids[i] for i in numbers], examples, width=width, pad_id=pad_id)

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    lost += len(train.kept) - len(order)
    notes = (
        f"training: {train.summary()}" if train.summary() else "",
        f"held out: {out.summary()}" if out.summary() and not nothing_held_out else "",
        "no prompt is held out: all are trained on" if nothing_held_out else "",
        f"training: dropped, for they are held out: {lost}" if lost else "",
    )
    return Task(
        prompts=lambda step: padded(train, training, (order[i] for i in batch(step))),
        reward=reward,
        heldout=padded(out, heldout, range(len(out.kept))),
        decode=decode,
        eos_ids=eos_ids,
        pad_id=pad_id,
        vocab_size=vocab_size,
        open_ended=open_ended,
        notes=tuple(filter(None, notes)),
        answer=answer,
    )


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


class _Item(NamedTuple):
    row: Mapping[str, Any]
    prompt: str | list[Message]  # before any chat template
    place: float  # in [0, 1), a hash of the prompt


def _item(row: Mapping[str, Any], where: str, prompt_column: str, template: str | None) -> _Item:
    """A row with its prompt.

    Raises:
      UsageError: the prompt is neither text nor messages, or the template does not fit.
    """
    prompt = column(row, prompt_column, where) if template is None else _fill(template, row, where)
    if not isinstance(prompt, str):
        _check_messages(prompt, f"{where}: column {prompt_column}")
        prompt = list(prompt)
    return _Item(row, prompt, place(prompt, where))


def place(prompt: str | list[Message], where: str = "a row") -> float:
    """A hash of the prompt in [0, 1), by which rows are held out: the same for every seed and tokenizer.

    Raises:
      UsageError: it is no text.
    """
    try:
        digest = hashlib.sha256(json.dumps(prompt, ensure_ascii=False, default=str).encode()).digest()
    except UnicodeEncodeError:
        raise UsageError(f"{where}: its prompt holds half of a surrogate pair, which is no text: mend it") from None
    return int.from_bytes(digest[:6]) / 2**48


def _check_messages(prompt: Any, where: str) -> None:
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        raise UsageError(f"{where} holds {_kind(prompt)}, and should hold text or a list of chat messages")
    for message in prompt:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise UsageError(f'{where} holds a chat message without text as "role" and "content"')
    if not prompt or prompt[-1]["role"] == "assistant":
        raise UsageError(f"{where} holds messages that should end with the user's: the assistant's is to be sampled")


def _fill(template: str, row: Mapping[str, Any], where: str) -> str:
    """A template with the row's columns. No attributes, indices or formats: a column's name is all that counts."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise UsageError(f"the template cannot be read ({error}): write {{{{ and }}}} for braces") from None
    text = []
    for literal, name, form, conversion in parts:
        text.append(literal)
        if name is None:
            continue
        if not name or form or conversion:
            raise UsageError(f"the template has {{{name}}} with a format or without a name: it takes {{column}} alone")
        value = column(row, name, where)
        if not isinstance(value, str | int | float):
            raise UsageError(f"{where}: column {name} holds {_kind(value)}, and a template takes text and numbers")
        text.append(str(value))
    return "".join(text)


def _in_chat(prompt: str | list[Message], tokenizer: Any, chat: bool, system: str | None) -> str | list[Message]:
    """A prompt as messages, where it is to be, and with the system's."""
    if isinstance(prompt, str):
        if not chat and system is None:
            return prompt
        if not chat:
            raise UsageError("a system message needs chat messages: turn chat on, or put it into the template")
        if not tokenizer.chat_template:
            raise UsageError("chat is on, but the tokenizer has no chat template: turn it off")
        prompt = [{"role": "user", "content": prompt}]
    if system is None or prompt[0]["role"] == "system":
        return prompt
    return [{"role": "system", "content": system}, *prompt]


def _split(items: Sequence[_Item], share: float, number: int | None) -> tuple[list[_Item], list[_Item]]:
    """Those to train on, and those held out: the `number` different prompts of the smallest hash, or a share."""
    if number is not None:
        places = sorted({item.place for item in items})
        share = places[number] if number < len(places) else 1.0
    elif not 0 < share < 1:
        raise UsageError(f"heldout_share is {share}: it must be at least 0, and below 1")
    return [item for item in items if item.place >= share], [item for item in items if item.place < share]


def _file(path: Path, split: str | None, subset: str | None) -> Path:
    """The file to read."""
    if subset is not None:
        raise UsageError(f"{path} is no data set of the hub, and has no subset: leave it out")
    if path.is_dir():
        names = [f"{split or 'train'}{suffix}" for suffix in SUFFIXES]
        found = [path / name for name in names if (path / name).is_file()]
        if not found:
            there = ", ".join(sorted(file.name for file in path.iterdir() if file.name.endswith(SUFFIXES)))
            said = f"name one of its files: {there}" if there else "it has no files of rows"
            raise UsageError(f"{path} has no {names[0]}: {said}")
        return found[0]
    if not path.exists():
        raise UsageError(f"there is no {path}: name a file, a folder, or a data set of the hub as owner/name")
    if not path.name.endswith(SUFFIXES):
        known = ", ".join(SUFFIXES)
        raise UsageError(f"{path} is not one of {known}: convert it, for example by pandas' to_json(lines=True)")
    if split is not None:
        raise UsageError(f"{path} is one file and has no split {split}: leave it out, or name the folder")
    return path


def _bytes(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.name.endswith(".gz") else content
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read ({error})") from None
    return content.removeprefix(codecs.BOM_UTF8)


def _json_lines(path: Path) -> list[Row]:
    rows = []
    # Lines of bytes: those of a text also end at characters that JSON allows within one.
    for number, line in enumerate(_bytes(path).splitlines(), 1):
        if line.strip():
            where = f"{path}, line {number}"
            rows.append(_row(_json(line, where), where))
    return rows


def _json_rows(path: Path) -> list[Row]:
    values = _json(_bytes(path), str(path))
    if not isinstance(values, list):
        raise UsageError(f"{path} holds {_kind(values)}, not a list of objects: is it .jsonl?")
    return [_row(value, f"{path}, item {number}") for number, value in enumerate(values, 1)]


def _json(content: bytes, where: str) -> Any:
    try:
        return json.loads(content.decode())
    except UnicodeDecodeError:
        raise UsageError(f"{where} is not UTF-8: convert it") from None
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise UsageError(f"{where} is not JSON ({error.msg} at {at})") from None
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number too long
        raise UsageError(f"{where} is JSON that cannot be read ({str(error).splitlines()[0]})") from None


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise UsageError(f"{where} holds {_kind(value)}, not an object with columns")
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
    except Exception as error:  # the package's own, the hub's, and the network's
        raise UsageError(f"data set {source}, split {split} cannot be loaded: {_reason(error)}") from error
    return [_row(row, f"{source}, split {split}, row {number}") for number, row in enumerate(rows)]


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _kind(value: Any) -> str:
    """What JSON calls a value."""
    kinds = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return "nothing (null)" if value is None else kinds.get(type(value), type(value).__name__)
