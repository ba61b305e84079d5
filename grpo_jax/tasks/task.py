"""Tasks: prompts as a function of the step, and a reward on text.

`text_task` makes a task of rows of a file, a folder or a data set of the hub, and whatever reward there is for it. A
row is a dict of columns. Its prompt is one of them, or a template filled with several; all of them reach the reward.
"""

import string
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from grpo_jax.data.rows import batches, check_messages, column, hash_of_prompt, kind_of
from grpo_jax.data.text import Encoded, Message, Overlong, check_ids, encode_prompts, in_chat
from grpo_jax.data.types import (
    Answer,
    Example,
    Prompts,
    Reward,
    Rewards,
    check_num_prompts,
    choose_widths,
    hash_prompts,
    hash_values,
    pad_prompts,
    rng,
)
from grpo_jax.errors import UsageError
from grpo_jax.rewards.reward import sources

if TYPE_CHECKING:  # a task without an environment does not load it
    from grpo_jax.data.episodes import Environment

_STEPS = 100  # whose longest prompts decide the widths that prompts are sampled at


class Task(NamedTuple):
    """Prompts, reward, and the text around the tokens."""

    # step -> prompts: a pure function, so that a resumed run sees what it would have seen
    prompts: Callable[[int], Prompts]
    reward: Reward | Rewards
    heldout: Prompts  # never among `prompts`, unless a note says so
    decode: Callable[[Sequence[int]], str]  # completion ids, without what ended it -> text
    eos_ids: tuple[int, ...]
    pad_id: int
    vocab_size: int
    open_ended: bool = False  # completions are meant to be cut at max_tokens
    notes: tuple[str, ...] = ()  # what a user should know of the prompts, such as how many were dropped
    answer: Answer | None = None  # what completions vote on (maj@n), where it makes sense
    environment: "Environment | None" = None  # what answers each turn; None: a completion is its only turn
    # Widths that prompts are padded to: of pieces, and of the longest prompts of steps. See `data.types.choose_widths`.
    # Empty: all prompts have about the same length
    prompt_widths: tuple[int, ...] = ()
    batch_widths: tuple[int, ...] = ()
    rows: str = ""  # digest of all that is trained on; empty where prompts are made of the seed


def inputs_of(task: Task) -> dict[str, str]:
    """Returns what a run of the task depends on, in words, with digests."""
    named = {
        "held-out prompts": hash_prompts(task.heldout),
        "prompts of the first step": hash_prompts(task.prompts(0)),
        "training rows": task.rows,
    }
    if task.environment and task.environment.source:
        named |= {"source of the environment": task.environment.source}
    return named | {f"source of reward {name}": digest for name, digest in sources(task.reward).items()}


def padding_id(tokenizer: Any, vocab_size: int) -> int:
    """The tokenizer's padding, or 0 where the model has no such token. Masks decide what is padding, so any id does."""
    padding = tokenizer.pad_token_id
    return padding if padding is not None and padding < vocab_size else 0


def random_reward(seed: int) -> Reward:
    """A fair coin for each completion, whatever it says: the control that must not learn.

    A pure function of (seed, prompts, completions), like every reward, so that a resumed
    run draws the same.
    """

    def reward(examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        text = "\x1f".join([*(example["prompt"] for example in examples), *completions])
        return rng(seed, zlib.crc32(text.encode())).integers(0, 2, len(completions)).astype(float).tolist()

    return reward


# ---- tasks from rows


def text_task(
    tokenizer: Any,
    eos_ids: tuple[int, ...],
    rows: Sequence[Mapping[str, Any]],
    *,
    vocab_size: int,
    num_prompts: int,
    seed: int,
    reward: Reward | Rewards,
    open_ended: bool = False,
    answer: Answer | None = None,
    **encoding: Any,
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
      open_ended: completions are meant to be cut.
      answer: what completions of a prompt vote on, such as `rewards.builtin.number_vote`; None: there is no vote.
      encoding: further options of `encode_rows`.

    Returns:
      The task; its notes count the prompts that were dropped or cut.

    Raises:
      UsageError: rows, columns, template or split do not work, in one sentence that says where.
    """
    if num_prompts < 1:
        raise UsageError(f"num_prompts is {num_prompts}: it must be at least 1")
    encoded = encode_rows(tokenizer, eos_ids, rows, vocab_size=vocab_size, **encoding)
    size = len(encoded.training.examples)
    check_num_prompts(num_prompts, size)
    batch, width = batches(size, num_prompts, seed), encoded.width
    lengths = np.array([len(ids) for ids in encoded.training.token_ids] + [width])
    pad_id = padding_id(tokenizer, vocab_size)

    def padded(rows: EncodedRows, numbers: Iterable[int]) -> Prompts:
        numbers = list(numbers)
        ids, examples = [rows.token_ids[i] for i in numbers], [rows.examples[i] for i in numbers]
        return pad_prompts(ids, examples, width=width, pad_id=pad_id)

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    return Task(
        prompts=lambda step: padded(encoded.training, batch(step)),
        reward=reward,
        heldout=padded(encoded.heldout, range(len(encoded.heldout.examples))),
        decode=decode,
        eos_ids=eos_ids,
        pad_id=pad_id,
        vocab_size=vocab_size,
        open_ended=open_ended,
        notes=encoded.notes,
        answer=answer,
        prompt_widths=choose_widths(lengths),
        batch_widths=choose_widths([*(lengths[batch(step)].max() for step in range(_STEPS)), width]),
        rows=hash_values(encoded.training.token_ids, encoded.training.examples),
    )


class EncodedRows(NamedTuple):
    """Rows whose prompts are token ids."""

    token_ids: list[list[int]]  # of the prompts
    examples: list[Example]  # all columns, with the text as encoded as "prompt"


class RowsOfTask(NamedTuple):
    """Training rows and held-out rows of a task."""

    training: EncodedRows
    heldout: EncodedRows
    notes: tuple[str, ...]  # count the prompts that were dropped or cut

    @property
    def width(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(ids) for part in (self.training, self.heldout) for ids in part.token_ids)


def encode_rows(
    tokenizer: Any,
    eos_ids: tuple[int, ...],
    rows: Sequence[Mapping[str, Any]],
    *,
    vocab_size: int,
    prompt_column: str = "prompt",
    template: str | None = None,
    chat: bool = False,
    system: str | None = None,
    heldout_rows: Sequence[Mapping[str, Any]] | None = None,
    heldout_share: float = 0.1,
    num_heldout: int | None = None,
    max_prompt_tokens: int | None = None,
    overlong: Overlong = "drop",
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> RowsOfTask:
    """Splits rows by their prompts and encodes the prompts.

    Args:
      tokenizer: of transformers.
      eos_ids: what ends a completion.
      rows: for training, and if there are no others for holding out.
      vocab_size: of the model.
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
      max_prompt_tokens, overlong, tools: as in `encode_prompts`.

    Returns:
      The rows of both sides.

    Raises:
      UsageError: rows, columns, template or split do not work, in one sentence that says where.
    """
    if num_heldout is not None and num_heldout < 1:
        raise UsageError(f"num_heldout is {num_heldout}: it must be at least 1")

    def items(rows: Sequence[Mapping[str, Any]], name: str) -> list[_Item]:
        wheres = (getattr(row, "where", f"{name} {number}") for number, row in enumerate(rows))
        return [_item(row, where, prompt_column, template) for row, where in zip(rows, wheres, strict=True)]

    def encode(chosen: Sequence[_Item]) -> Encoded:
        prompts = [in_chat(item.prompt, tokenizer, chat, system) for item in chosen]
        return encode_prompts(
            tokenizer, prompts, eos_ids=eos_ids, max_prompt_tokens=max_prompt_tokens, overlong=overlong, tools=tools
        )

    def with_columns(encoded: Encoded, chosen: Sequence[_Item], numbers: Iterable[int]) -> EncodedRows:
        numbers = list(numbers)
        examples = [{**chosen[encoded.numbers[i]].row, "prompt": encoded.texts[i]} for i in numbers]
        return EncodedRows([encoded.token_ids[i] for i in numbers], examples)

    nothing_held_out = heldout_rows is None and num_heldout is None and heldout_share == 0
    train_items = items(rows, "row")
    apart = None if heldout_rows is None else items(heldout_rows, "held-out row")
    training, heldout, lost = _sides(train_items, apart, heldout_share, num_heldout)
    if not training or not heldout:
        which = "training" if heldout else "held out"
        raise UsageError(
            f"no prompt is left for {which} among {len(rows)} rows: rows with equal prompts stay together, so give "
            "rows with other prompts"
        )
    train, out = encode(training), encode(heldout)
    # Once more, as ids: two texts that were cut may have become the same prompt.
    known = set() if nothing_held_out else {tuple(ids) for ids in out.token_ids}
    order = [i for i, ids in enumerate(train.token_ids) if tuple(ids) not in known]
    check_ids(train.token_ids + out.token_ids, vocab_size)
    lost += len(train.numbers) - len(order)
    notes = (
        f"training: {train.summary()}" if train.summary() else "",
        f"held out: {out.summary()}" if out.summary() and not nothing_held_out else "",
        "no prompt is held out: all are trained on" if nothing_held_out else "",
        f"training: dropped, for they are held out: {lost}" if lost else "",
    )
    return RowsOfTask(
        with_columns(train, training, order),
        with_columns(out, heldout, range(len(out.numbers))),
        tuple(filter(None, notes)),
    )


class _Item(NamedTuple):
    row: Mapping[str, Any]
    prompt: str | list[Message]  # before any chat template
    place: float  # in [0, 1), a hash of the prompt


def _item(row: Mapping[str, Any], where: str, prompt_column: str, template: str | None) -> _Item:
    """A row with its prompt.

    Raises:
      UsageError: the prompt is neither text nor messages, or the template does not fit.
    """
    remedy = "put the prompt there, or set prompt_column or template"
    prompt = column(row, prompt_column, where, remedy=remedy) if template is None else _fill(template, row, where)
    if not isinstance(prompt, str):
        check_messages(prompt, f"{where}: column {prompt_column}")
        prompt = list(prompt)
    return _Item(row, prompt, hash_of_prompt(prompt, where))


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
            raise UsageError(f"{where}: column {name} holds {kind_of(value)}, and a template takes text and numbers")
        text.append(str(value))
    return "".join(text)


def _sides(
    items: list[_Item], apart: list[_Item] | None, share: float, number: int | None
) -> tuple[list[_Item], list[_Item], int]:
    """Rows to train on, rows held out, and how many are not trained on because others with their prompt are `apart`.

    Args:
      items: for training, and without `apart` for holding out.
      apart: never trained on.
      share: without `apart`, of the prompts that are held out. 0: all are trained on, and the same are held out.
      number: of held-out prompts, in place of a share.
    """
    if apart is None:
        all_alike = number is None and share == 0
        return (items, items, 0) if all_alike else (*_split(items, share, number), 0)
    places = {item.place for item in apart}
    training = [item for item in items if item.place not in places]
    heldout = apart if number is None else _split(apart, 0.0, number)[1]
    return training, heldout, len(items) - len(training)


def _split(items: Sequence[_Item], share: float, number: int | None) -> tuple[list[_Item], list[_Item]]:
    """Splits rows into training and held-out ones: the `number` different prompts of the smallest hash, or a share."""
    if number is not None:
        places = sorted({item.place for item in items})
        share = places[number] if number < len(places) else 1.0
    elif not 0 < share < 1:
        raise UsageError(f"heldout_share is {share}: it must be at least 0, and below 1")
    return [item for item in items if item.place >= share], [item for item in items if item.place < share]
