"""Tasks: prompts as a function of the step, and a reward on text.

`text_task` makes a task from a reward and the rows of a file, a folder or a hub data set. A row is a dict of columns.
Its prompt is one of its columns, or a template filled with several columns. The reward gets all columns.
"""

import string
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from grpo_jax.data.rows import batches, check_messages, column, hash_of_prompt, kind_of
from grpo_jax.data.text import Message, Overlong, check_ids, encode_prompts, in_chat, progress
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
from grpo_jax.options import Size, check_number
from grpo_jax.rewards.reward import sources

if TYPE_CHECKING:  # imported only by tasks with an environment
    from grpo_jax.data.episodes import Environment

_STEPS = 100  # the longest prompts of this many steps decide the widths for sampling
_DIGESTED = 1_000  # rows hashed at once


class Task(NamedTuple):
    """Prompts, their reward, and how token ids become text."""

    # step -> prompts: a pure function, so that a resumed run sees the same prompts
    prompts: Callable[[int], Prompts]
    reward: Reward | Rewards
    heldout: Prompts  # never among `prompts`, unless a note says so
    decode: Callable[[Sequence[int]], str]  # completion ids, without the token that ended it -> text
    eos_ids: tuple[int, ...]
    pad_id: int
    vocab_size: int
    open_ended: bool = False  # completions are meant to be cut at max_tokens
    notes: tuple[str, ...] = ()  # facts about the prompts for the user, such as how many were dropped
    answer: Answer | None = None  # the answer that completions vote on (maj@n); None: they do not vote
    environment: "Environment | None" = None  # answers each turn; None: a completion has a single turn
    # The widths that prompts are padded to, in pieces and by the longest prompts of steps: `data.types.choose_widths`.
    # Empty: all prompts have about the same length.
    prompt_widths: tuple[int, ...] = ()
    batch_widths: tuple[int, ...] = ()
    rows: str = ""  # digest of all training rows; empty if prompts are generated from the seed


def inputs_of(task: Task) -> dict[str, str]:
    """Returns digests of the inputs that a run of the task depends on, by their descriptions."""
    named = {
        "held-out prompts": hash_prompts(task.heldout),
        "prompts of the first step": hash_prompts(task.prompts(0)),
        "training rows": task.rows,
    }
    if task.environment and task.environment.source:
        named |= {"source of the environment": task.environment.source}
    return named | {f"source of reward {name}": digest for name, digest in sources(task.reward).items()}


def padding_id(tokenizer: Any, vocab_size: int) -> int:
    """Returns the tokenizer's padding token, or 0 if the model has no such token. Any id works, since masks decide."""
    padding = tokenizer.pad_token_id
    return padding if padding is not None and padding < vocab_size else 0


def random_reward(seed: int) -> Reward:
    """Makes a reward that tosses a fair coin for each completion: a control from which nothing can be learned.

    It is a pure function of (seed, prompts, completions), so that a resumed run draws the same rewards.
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
    answer: Answer | None = None,
    **encoding: Any,
) -> Task:
    """Makes a task from rows. Every epoch has each training prompt once, in an order that depends on the seed.

    The split depends only on the prompts before any chat template. So it is the same for every seed and tokenizer, and
    equal prompts are never on both sides.

    Args:
      tokenizer: A transformers tokenizer.
      eos_ids: The ids of the tokens that end a completion.
      rows: The rows for training and, without `heldout_rows`, for the held-out set.
      vocab_size: The size of the model's vocabulary.
      num_prompts: The number of prompts in a step, N.
      seed: The seed of the order of prompts.
      reward: One reward function, or several by name. An example has all columns of its row, with the encoded text as
        "prompt" (which replaces a column of that name).
      answer: Extracts the answer that completions of a prompt vote on, such as `rewards.builtin.number_vote`. None:
        there is no vote.
      encoding: Further options of `encode_rows`.

    Returns:
      The task. Its notes count the prompts that were dropped or cut.

    Raises:
      UsageError: Rows, columns, template or split are invalid. The message is one sentence that says where.
    """
    check_number("num_prompts", num_prompts, Size)
    training, heldout, notes, width = encode_rows(tokenizer, eos_ids, rows, vocab_size=vocab_size, **encoding)
    size = len(training.rows)
    check_num_prompts(num_prompts, size)
    batch = batches(size, num_prompts, seed)
    lengths = np.array([len(ids) for ids in training.token_ids])
    longest = [lengths[batch(step)].max() for step in range(_STEPS)]
    pad_id = padding_id(tokenizer, vocab_size)

    def padded(rows: PromptRows, numbers: Iterable[int] | None = None) -> Prompts:
        return pad_prompts(*rows.take(numbers), width=width, pad_id=pad_id)

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    return Task(
        prompts=lambda step: padded(training, batch(step)),
        reward=reward,
        heldout=padded(heldout),
        decode=decode,
        eos_ids=eos_ids,
        pad_id=pad_id,
        vocab_size=vocab_size,
        notes=notes,
        answer=answer,
        prompt_widths=choose_widths([*lengths, width]),
        batch_widths=choose_widths([*longest, width]),
        rows=hash_values(*(training.rows[i : i + _DIGESTED] for i in range(0, size, _DIGESTED))),
    )


class PromptRows(NamedTuple):
    """M rows with their encoded prompts."""

    rows: list[Mapping[str, Any]]
    texts: list[str]  # the encoded texts, as in `Encoded`
    token_ids: list[np.ndarray]

    def take(self, numbers: Iterable[int] | None = None) -> tuple[list[np.ndarray], list[Example]]:
        """Returns the token ids of rows, and their columns with the encoded text as "prompt".

        Args:
          numbers: The numbers of the rows to take. None: all.
        """
        numbers = list(range(len(self.rows)) if numbers is None else numbers)
        examples = [{**self.rows[number], "prompt": self.texts[number]} for number in numbers]
        return [self.token_ids[number] for number in numbers], examples


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
) -> tuple[PromptRows, PromptRows, tuple[str, ...], int]:
    """Checks rows, splits them by their prompts, and encodes the prompts.

    Args:
      tokenizer: A transformers tokenizer.
      eos_ids: The ids of the tokens that end a completion.
      rows: The rows for training and, without `heldout_rows`, for the held-out set.
      vocab_size: The size of the model's vocabulary.
      prompt_column: The column with the prompt: text, or a list of chat messages.
      template: A text that replaces the column. Each {column} in it becomes the text or number of that column; {{ and
        }} are braces. Formats and attributes are not supported.
      chat: True to make each text a user's message in the tokenizer's chat template.
      system: A system message before prompts that have none. Prompts that are text need `chat` with it.
      heldout_rows: Rows that are never trained on. Training prompts that are among them are dropped.
      heldout_share: About the share of the prompts that is held out, without `heldout_rows`. 0: all prompts are trained
        on and also evaluated, and a note says so.
      num_heldout: The most rows taken from `heldout_rows`, or without these, the number of different held-out prompts,
        which replaces the share. The prompts with the smallest hashes are taken.
      max_prompt_tokens, overlong, tools: See `encode_prompts`.

    Returns:
      The training rows, the held-out rows, notes that count the prompts that were dropped or cut, and the number of
      tokens of the longest prompt.

    Raises:
      UsageError: Rows, columns, template or split are invalid. The message is one sentence that says where.
    """
    check_number("num_heldout", num_heldout, Size)
    prompt_of = partial(_prompt, prompt_column=prompt_column, template=template)

    def encode(rows: Sequence[Mapping[str, Any]], numbers: np.ndarray, name: str) -> tuple[PromptRows, str]:
        places = [_place(rows[i], name, i) for i in numbers]
        rows = [rows[i] for i in numbers]
        prompts = [in_chat(prompt_of(*pair), tokenizer, chat, system) for pair in zip(rows, places, strict=True)]
        encoded = encode_prompts(
            tokenizer,
            prompts,
            eos_ids=eos_ids,
            max_prompt_tokens=max_prompt_tokens,
            overlong=overlong,
            tools=tools,
            places=places,
        )
        return PromptRows([rows[i] for i in encoded.numbers], encoded.texts, encoded.token_ids), encoded.summary

    hashes, apart = _hashes(prompt_of, rows, "row"), None
    if heldout_rows is not None:
        apart = _hashes(prompt_of, heldout_rows, "held-out row")
    nothing_held_out = apart is None and num_heldout is None and heldout_share == 0
    train, out, lost = _sides(hashes, apart, heldout_share, num_heldout)
    training, trained_on = encode(rows, train, "row")
    heldout, held_out = encode(rows if heldout_rows is None else heldout_rows, out, "held-out row")
    token_ids = training.token_ids + heldout.token_ids
    check_ids(token_ids, vocab_size)
    # Compares prompts again as ids, since two different texts may be the same prompt once they are cut.
    known = set() if nothing_held_out else {ids.tobytes() for ids in heldout.token_ids}
    left = [i for i, ids in enumerate(training.token_ids) if ids.tobytes() not in known]
    lost += len(training.rows) - len(left)
    notes = (
        f"training: {trained_on}" if trained_on else "",
        f"held out: {held_out}" if held_out and not nothing_held_out else "",
        "no prompt is held out: all are trained on" if nothing_held_out else "",
        f"training: dropped, for they are held out: {lost}" if lost else "",
    )
    parts: Any = ([part[i] for i in left] for part in training)
    return PromptRows(*parts), heldout, tuple(filter(None, notes)), max(map(len, token_ids))


def _place(row: Mapping[str, Any], name: str, number: int) -> str:
    """Returns the place of a row for errors: the place that it was read from, or its number."""
    return getattr(row, "where", f"{name} {number}")


def _hashes(prompt_of: Callable[..., str | list[Message]], rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """Checks the prompts of M rows, and returns their hashes in [0, 1), float64 `[M]`."""
    hashes = np.empty(len(rows))
    for number, row in enumerate(progress(rows, "checking rows")):
        place = _place(row, name, number)
        hashes[number] = hash_of_prompt(prompt_of(row, place), place)
    return hashes


def _prompt(row: Mapping[str, Any], where: str, *, prompt_column: str, template: str | None) -> str | list[Message]:
    """Returns the prompt of a row, before any chat template.

    Raises:
      UsageError: The prompt is neither text nor messages, or the template does not fit the row.
    """
    remedy = "put the prompt there, or set prompt_column or template"
    prompt = column(row, prompt_column, where, remedy=remedy) if template is None else _fill(template, row, where)
    if not isinstance(prompt, str):
        check_messages(prompt, f"{where}: column {prompt_column}")
        prompt = list(prompt)
    return prompt


def _fill(template: str, row: Mapping[str, Any], where: str) -> str:
    """Fills a template with the row's columns. Only names of columns are allowed: no attributes, indices or formats."""
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
    places: np.ndarray, apart: np.ndarray | None, share: float, number: int | None
) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns the numbers of training rows and of held-out rows, and how many rows have a prompt in `apart`.

    Args:
      places: The hashes of the prompts of rows for training and, without `apart`, for the held-out set.
      apart: The hashes of the prompts of rows that are never trained on.
      share: The share of held-out prompts, without `apart`. 0: all prompts are trained on and also held out.
      number: The number of held-out prompts, which replaces the share.

    Raises:
      UsageError: Nothing is left on one side.
    """
    everything, lost = np.arange(len(places)), 0
    if apart is not None:
        training = everything[~np.isin(places, apart)]
        heldout = np.arange(len(apart)) if number is None else _split(apart, 0.0, number)[1]
        lost = len(places) - len(training)
    elif number is None and share == 0:
        training = heldout = everything
    else:
        training, heldout = _split(places, share, number)
    if not len(training) or not len(heldout):
        which = "training" if len(heldout) else "held out"
        raise UsageError(
            f"no prompt is left for {which} among {len(places)} rows: rows with equal prompts stay together, so give "
            "rows with other prompts"
        )
    return training, heldout, lost


def _split(places: np.ndarray, share: float, number: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Splits rows: holds out the `number` different prompts with the smallest hashes, or a share of all prompts."""
    if number is not None:
        different = np.unique(places)
        share = different[number] if number < len(different) else 1.0
    elif not 0 < share < 1:
        raise UsageError(f"heldout_share is {share}: it must be at least 0, and below 1")
    return np.flatnonzero(places >= share), np.flatnonzero(places < share)
