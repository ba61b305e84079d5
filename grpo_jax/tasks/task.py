"""Tasks: prompts as a function of the step, and a reward on text.

`text_task` makes a task from a reward and the rows of a file, a folder or a hub data set. A row is a dict of columns.
Its prompt is one of its columns, or a template filled with several columns. The reward gets all columns.
"""

import string
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from grpo_jax.data.prompts import Prompts, hash_prompts, pad_prompts
from grpo_jax.data.rows import batches, check_step_size, column, hash_of_prompt, kind_of, read_prompt
from grpo_jax.data.text import Encoded, Message, Overlong, check_ids, encode_prompts, show_progress
from grpo_jax.data.types import Answer, Completion, Example, Prompt, Reward, hash_values, rng
from grpo_jax.errors import UsageError, abbreviate, reason_of
from grpo_jax.models.chat import Chat, make_chat, make_decoder, prompt_writer, render, row_kwargs, with_kwargs
from grpo_jax.models.rows.geometry import PromptWidths, choose_widths
from grpo_jax.options import Size, check_number, check_type
from grpo_jax.rewards.reward import RewardLike, Rewards, to_rewards

if TYPE_CHECKING:  # imported only by tasks with an environment or stop texts, and by curricula
    from grpo_jax.data.episodes import Environment
    from grpo_jax.sampling.stopping import Stop
    from grpo_jax.tasks.curriculum import Curriculum, Window

_STEPS = 100  # the longest prompts of this many steps decide the widths for sampling
_ALL_IN_ADVANCE = 20_000  # with more rows, most prompts are encoded when a step takes them
_SAMPLED = 2_000  # this many of the longest prompts, and as many spread over all rows, are always encoded in advance
_SPECIAL_TOKENS = 8  # the most special tokens that a tokenizer adds to a text
_DIGESTED = 1_000  # rows hashed at once


class Task(NamedTuple):
    """Prompts, their reward, and how token ids become text."""

    # step -> prompts: a pure function, so that a resumed run sees the same prompts
    prompts: Callable[[int], Prompts]
    reward: RewardLike
    heldout: Prompts  # never among `prompts`, unless a note says so
    decode: Callable[[Sequence[int]], str]  # completion ids, without the token that ended it -> text
    eos_ids: tuple[int, ...]
    pad_id: int
    vocab_size: int
    stop: "Stop | None" = None  # ends completions whose text contains a stop text
    open_ended: bool = False  # completions are meant to be cut at max_tokens
    notes: tuple[str, ...] = ()  # facts about the prompts for the user, such as how many were dropped
    answer: Answer | None = None  # the answer that completions vote on (maj@n); None: they do not vote
    environment: "Environment | None" = None  # answers each turn; None: a completion has a single turn
    # Extracts the text that rewards and votes read, of completions that are no episodes. None: they read all text
    extract_final: Callable[[Example, Completion], Completion] | None = None
    rows: str = ""  # digest of all training rows; empty if prompts are generated from the seed
    curriculum: "Curriculum | None" = None  # draws prompts by earlier rewards; None: the task cannot
    # Other rows -> the numbers of those whose prompts have room, with the prompts. None: the task is not from rows
    encode: "Callable[[Sequence[Mapping[str, Any]]], dict[int, EncodedPrompt]] | None" = None

    @property
    def rewards(self) -> Rewards:
        """The reward as one value."""
        return to_rewards(self.reward)

    @property
    def ends(self) -> dict[str, Any]:
        """The tokens and texts that end a completion, as arguments of samplers."""
        return {"eos_ids": self.eos_ids, "stop": self.stop}

    def read(self, ids: Sequence[int], *, truncated: bool | None = None) -> Completion:
        """Returns a completion, or the action of a turn, from its tokens. Its text ends before a stop text.

        Args:
          ids: The token ids, without EOS if `truncated` is known.
          truncated: True if no token ended the completion. None: the last token tells.
        """
        has_eos = truncated is None and ids[-1] in self.eos_ids
        ids = [token for token in ids if token not in self.eos_ids] if has_eos else ids
        whole = self.decode(ids)
        text = self.stop.cut(whole) if self.stop else whole
        truncated = not has_eos and text == whole if truncated is None else truncated
        return Completion(text, ids, truncated, stopped=text != whole)


def inputs_of(task: Task) -> dict[str, str]:
    """Returns digests of the inputs that a run of the task depends on, by their descriptions."""
    named = {
        "held-out prompts": hash_prompts(task.heldout),
        "prompts of the first step": hash_prompts(task.prompts(0)),
        "training rows": task.rows,
    }
    if task.environment and task.environment.source:
        named |= {"source of the environment": task.environment.source}
    sources = {name: getattr(grader, "source", "") for name, grader in task.rewards.graders.items()}
    return named | {f"source of reward {name}": digest for name, digest in sources.items() if digest}


def padding_id(tokenizer: Any, vocab_size: int) -> int:
    """Returns the tokenizer's padding token, or 0 if the model has no such token. Any id works, since masks decide."""
    padding = tokenizer.pad_token_id
    return padding if padding is not None and padding < vocab_size else 0


def final_extractor(tokenizer: Any, stop: "Stop | None" = None) -> Callable[[Example, Completion], Completion] | None:
    """Returns the function that extracts the final text of a completion: see `Task.extract_final`.

    Such a model writes its reasoning and its tool calls into other channels, or between tags. The `response_template`
    of its tokenizer describes them to transformers, which calls the final text "content".

    Args:
      tokenizer: A transformers tokenizer.
      stop: The stop texts of the completions.

    Returns:
      The function, or None if the tokenizer has no `response_template`. A completion without a final text, or with a
      malformed tool call, becomes the empty text. It keeps its token ids.

    Raises:
      UsageError: transformers does not accept the `response_template`.
    """
    if getattr(tokenizer, "response_template", None) is None:
        return None
    try:
        tokenizer.parse_response("", prefix="")
    except Exception as error:  # broken templates raise several types of errors
        raise UsageError(f"the response_template of the tokenizer cannot be used: {reason_of(error)}") from error

    def extract(example: Example, completion: Completion) -> Completion:
        try:
            text = tokenizer.decode(list(completion.ids))
            message = tokenizer.parse_response(stop.cut(text) if stop else text, prefix=example["prompt"])
        except Exception:  # no text of a policy may end a run
            message = {}
        content = message.get("content")
        content = content if isinstance(content, str) else ""
        return Completion(content, completion.ids, completion.truncated, stopped=completion.stopped)

    return extract


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
    num_prompts: int | Callable[[int], int],
    seed: int,
    reward: RewardLike,
    answer: Answer | None = None,
    stop: Sequence[str] = (),
    chat: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | str | None = None,
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
      num_prompts: The number of prompts in a step, N. A function gets the number of all training prompts.
      seed: The seed of the order of prompts.
      reward: One reward function, or several by name. An example has all columns of its row, with the encoded text as
        "prompt" (which replaces a column of that name).
      answer: Extracts the answer that completions of a prompt vote on, such as `rewards.builtin.number_vote`. None:
        there is no vote.
      stop: Texts that end a completion: see the option `stop`.
      chat: True to make each prompt that is text a user's message in the tokenizer's chat template.
      tools: JSON schemas of functions that the chat template describes to the model. None: there are no tools.
      chat_template_kwargs: Variables of the chat template, such as {"enable_thinking": False}, or their JSON.
      encoding: Further options of `encode_rows`.

    Returns:
      The task. Its notes count the prompts that were dropped or cut.

    Raises:
      UsageError: Rows, columns, template or split are invalid. The message is one sentence that says where.
    """
    check_type("stop", stop, tuple[str, ...])
    encoding = {"all_in_advance": _ALL_IN_ADVANCE} | encoding
    writer = make_chat(tokenizer, eos_ids, chat_template_kwargs, tools)
    training, heldout, notes, width = encode_rows(writer, rows, vocab_size=vocab_size, in_chat=chat, **encoding)
    size = len(training.rows)
    num_prompts = num_prompts(size) if callable(num_prompts) else num_prompts
    check_step_size("num_prompts", num_prompts, size)
    batch = batches(size, num_prompts, seed)
    lengths = np.array([len(ids) for _, ids in training.sample])
    longest = [lengths[batch(step) * len(lengths) // size].max() for step in range(_STEPS)]
    widths = PromptWidths(choose_widths([*lengths, width], most=4), choose_widths([*longest, width], most=3))
    pad_id = padding_id(tokenizer, vocab_size)

    def padded(rows: PromptRows, numbers: Iterable[int] | None = None) -> Prompts:
        return pad_prompts(*rows.take(numbers), width=width, pad_id=pad_id, widths=widths)

    decoding = make_decoder(writer)
    ends = None
    if stop:
        from grpo_jax.sampling.stopping import make_stop, read_token_bytes

        ends = make_stop(stop, read_token_bytes(tokenizer, decoding, vocab_size, (*eos_ids, pad_id)))

    def draw(window: "Window", step: int, bound: float) -> tuple[Prompts, np.ndarray, dict[str, float]]:
        from grpo_jax.tasks.curriculum import draw_by_solve_rate

        del bound
        numbers, metrics = draw_by_solve_rate(window, size, num_prompts, rng(seed, 1, step))
        return padded(training, numbers), numbers, metrics

    return Task(
        prompts=lambda step: padded(training, batch(step)),
        reward=reward,
        heldout=padded(heldout),
        decode=decoding,
        eos_ids=eos_ids,
        pad_id=pad_id,
        vocab_size=vocab_size,
        stop=ends,
        notes=notes,
        answer=answer,
        rows=hash_values(*(training.rows[i : i + _DIGESTED] for i in range(0, size, _DIGESTED))),
        extract_final=final_extractor(tokenizer, ends) if training.sample[0][0].messages else None,
        curriculum=draw,
        encode=partial(training.encode, overlong="drop"),
    )


EncodedPrompt = tuple[Prompt, np.ndarray]  # the encoded text, and its token ids


class PromptRows(NamedTuple):
    """Rows whose prompts are encoded in advance or when they are taken."""

    rows: list[Mapping[str, Any]]  # [M]
    prompts: Sequence[EncodedPrompt | None]  # [M]; None: the prompt is encoded when it is taken
    sample: Sequence[EncodedPrompt]  # all prompts, or some that are spread over all rows, in the order of the rows
    encode: Callable[..., dict[int, EncodedPrompt]]

    def take(self, numbers: Iterable[int] | None = None) -> tuple[list[np.ndarray], list[Example]]:
        """Returns the token ids of rows, and their columns with the encoded text as "prompt".

        Args:
          numbers: The numbers of the rows to take. None: all.
        """
        numbers = list(range(len(self.rows)) if numbers is None else numbers)
        later = [number for number in numbers if self.prompts[number] is None]
        encoded = self.encode([self.rows[number] for number in later]) if later else {}
        encoded = {later[place]: prompt for place, prompt in encoded.items()}
        prompts = [self.prompts[number] or encoded[number] for number in numbers]
        examples = [{**self.rows[number], "prompt": text} for number, (text, _) in zip(numbers, prompts, strict=True)]
        return [ids for _, ids in prompts], examples


def encode_rows(
    chat: Chat,
    rows: Sequence[Mapping[str, Any]],
    *,
    vocab_size: int,
    prompt_column: str = "prompt",
    template: str | None = None,
    in_chat: bool = False,
    system: str | None = None,
    heldout_rows: Sequence[Mapping[str, Any]] | None = None,
    heldout_share: float = 0.1,
    num_heldout: int | Callable[[int], int] | None = None,
    max_prompt_tokens: int | None = None,
    overlong: Overlong = "drop",
    all_in_advance: int | None = None,
) -> tuple[PromptRows, PromptRows, tuple[str, ...], int]:
    """Checks rows, splits them by their prompts, and encodes the prompts.

    Args:
      chat: The tokenizer and its chat template.
      rows: The rows for training and, without `heldout_rows`, for the held-out set. The columns chat_template_kwargs
        and tools hold variables of the chat template for their row.
      vocab_size: The size of the model's vocabulary.
      prompt_column: The column with the prompt: text, or a list of chat messages.
      template: A text that replaces the column. Each {column} in it becomes the text or number of that column; {{ and
        }} are braces. Formats and attributes are not supported.
      in_chat: True to make each text a user's message.
      system: A system message before prompts that have none. Prompts that are text need `in_chat` with it.
      heldout_rows: Rows that are never trained on. Training prompts that are among them are dropped.
      heldout_share: About the share of the prompts that is held out, without `heldout_rows`. 0: all prompts are trained
        on and also evaluated, and a note says so.
      num_heldout: The most rows taken from `heldout_rows`, or without these, the number of different held-out prompts,
        which replaces the share. The prompts with the smallest hashes are taken. A function gets the number of
        different prompts.
      max_prompt_tokens, overlong: See `encode_prompts`.
      all_in_advance: The most training rows whose prompts are all encoded in advance. With more rows, only held-out
        prompts, prompts that may not fit, and a sample that decides the width are encoded in advance. None: no limit.

    Returns:
      The training rows, the held-out rows, notes that count the prompts that were dropped or cut, and the number of
      tokens of the longest prompt (of a sample of prompts, rounded up).

    Raises:
      UsageError: Rows, columns, template or split are invalid. The message is one sentence that says where.
    """
    check_number("num_heldout", None if callable(num_heldout) else num_heldout, Size)
    write = prompt_writer(chat, in_chat, system)
    prompt_of = partial(_prompt, prompt_column=prompt_column, template=template)

    def encode(rows: Sequence[Mapping[str, Any]], **options: Any) -> Encoded:
        kwargs = [row_kwargs(chat, row) for row in rows]
        prompts = [write(prompt_of(row, "a row"), x) for row, x in zip(rows, kwargs, strict=True)]
        options = {"max_prompt_tokens": max_prompt_tokens, "overlong": overlong} | options
        return encode_prompts(chat, prompts, kwargs=kwargs, **options)

    check = partial(_check, chat, prompt_of, write)
    checked = check(rows, "row")
    num_heldout = num_heldout(len(np.unique(checked[0]))) if callable(num_heldout) else num_heldout
    apart = None if heldout_rows is None else check(heldout_rows, "held-out row")
    nothing_held_out = apart is None and num_heldout is None and heldout_share == 0
    train, out, lost = _sides(checked[0], None if apart is None else apart[0], heldout_share, num_heldout)
    heldout = [(rows if heldout_rows is None else heldout_rows)[i] for i in out]
    sample = now = np.arange(len(train))
    if all_in_advance is not None and len(train) > all_in_advance:
        sample = np.linspace(0, len(train) - 1, _SAMPLED).astype(int)
        spellings = (checked if apart is None else apart)[2, [] if nothing_held_out else out]
        now = np.union1d(sample, _encoded_now(checked[:, train], spellings, max_prompt_tokens))
    trained = _named("training", encode, [rows[i] for i in train[now]], others=len(train) - len(now))
    held = _named("the held-out share", encode, heldout)
    check_ids(trained.token_ids + held.token_ids, vocab_size)
    width = max(map(len, trained.token_ids + held.token_ids))
    if len(now) < len(train):  # the other prompts are hardly ever longer than those of the sample
        width = min(-(-width // 8) * 8, max_prompt_tokens or width + 7)
    # Compares prompts again as ids, since two different texts may be the same prompt once they are cut.
    known = set() if nothing_held_out else {ids.tobytes() for ids in held.token_ids}
    fitting = zip(now[trained.numbers].tolist(), _pairs(trained), strict=True)
    made = {i: prompt for i, prompt in fitting if prompt[1].tobytes() not in known}
    lost += len(trained.numbers) - len(made)
    left = np.setdiff1d(np.arange(len(train)), np.setdiff1d(now, list(made))).tolist()
    if not left:
        raise UsageError("no prompt is left for training: all have the tokens of held-out prompts; give other rows")
    later = partial(_encode_later, encode, vocab_size, width)
    sample_prompts = [made[i] for i in sample.tolist() if i in made] or _pairs(held)
    training = PromptRows([rows[i] for i in train[left]], [made.get(i) for i in left], sample_prompts, later)
    held_rows = PromptRows([heldout[i] for i in held.numbers], _pairs(held), _pairs(held), later)
    return training, held_rows, _notes(trained, held, lost, nothing_held_out), width


def _named(side: str, encode: Callable[..., Encoded], rows: Sequence[Mapping[str, Any]], **options: Any) -> Encoded:
    """Encodes the rows of one side of the split, which an error names."""
    try:
        return encode(rows, **options)
    except UsageError as error:
        raise UsageError(f"{side} ({len(rows)} rows): {error}") from None


def _notes(training: Encoded, heldout: Encoded, lost: int, nothing_held_out: bool) -> tuple[str, ...]:
    notes = (
        f"training: {training.summary}" if training.summary else "",
        f"held out: {heldout.summary}" if heldout.summary and not nothing_held_out else "",
        "no prompt is held out: all are trained on" if nothing_held_out else "",
        f"training: dropped, for they are held out: {lost}" if lost else "",
    )
    return tuple(filter(None, notes))


def _encoded_now(checked: np.ndarray, heldout_spellings: np.ndarray, max_prompt_tokens: int | None) -> np.ndarray:
    """Returns the numbers of the longest training prompts, and of prompts that may not fit or may be held out."""
    _, bounds, spellings = checked
    is_unsure = (bounds >= (max_prompt_tokens or np.inf)) | np.isin(spellings, heldout_spellings)
    return np.union1d(np.argsort(bounds)[-_SAMPLED:], np.flatnonzero(is_unsure))


def _encode_later(
    encode: Callable[..., Encoded],
    vocab_size: int,
    width: int,
    rows: Sequence[Mapping[str, Any]],
    overlong: Overlong = "truncate",
) -> dict[int, EncodedPrompt]:
    """Encodes prompts that should fit into `width` tokens, by number. Others lose their beginning, or drop out."""
    encoded = encode(rows, max_prompt_tokens=width, overlong=overlong, others=1)
    places = [getattr(row, "where", "a row") for row in rows]
    if overlong == "truncate" and len(encoded.numbers) < len(rows):
        missing = min(set(range(len(rows))) - set(encoded.numbers))
        raise UsageError(f"{places[missing]}: its prompt has no tokens: leave the row out")
    if overlong == "truncate" and encoded.summary:
        warnings.warn(f"a prompt has more tokens than a sample of prompts: it keeps its last {width}", stacklevel=2)
    for number, ids in zip(encoded.numbers, encoded.token_ids, strict=True):
        check_ids([ids], vocab_size, places[number])
    return dict(zip(encoded.numbers, _pairs(encoded), strict=True))


def _pairs(encoded: Encoded) -> list[EncodedPrompt]:
    return list(zip(encoded.texts, encoded.token_ids, strict=True))


def _check(
    chat: Chat,
    prompt_of: Callable[..., str | list[Message]],
    write: Callable[..., str | list[Message]],
    rows: Sequence[Mapping[str, Any]],
    name: str,
) -> np.ndarray:
    """Checks the prompt of every row without encoding it. Each token has at least a byte, so bytes bound its tokens.

    The chat template is filled in once for each order of roles, and for each choice of its variables, so that an order
    that it refuses raises at once.

    Args:
      chat: The tokenizer and its chat template.
      prompt_of: (row, its place) -> its prompt.
      write: prompt -> the prompt as text or messages to encode.
      rows: The M rows.
      name: The word for a row in errors, used if the row does not know its place.

    Returns:
      float64 `[3, M]`: a hash of the prompt in [0, 1), a number of tokens that it hardly ever exceeds, and a hash that
      is equal for prompts that differ only in spaces and case.
    """
    checked = np.empty((3, len(rows)))
    added: dict[Any, int] = {}  # (variables, roles) -> bytes that the template adds to contents
    for number, row in enumerate(show_progress(rows, "checking rows")):
        where = getattr(row, "where", f"{name} {number}")
        prompt = prompt_of(row, where)
        place, kwargs = hash_of_prompt(prompt, where), row_kwargs(chat, row)
        messages = write(prompt, kwargs)
        parts = [{"role": "", "content": messages}] if isinstance(messages, str) else messages
        contents = (f"{part.get('content') or ''}{part.get('tool_calls', '')}" for part in parts)
        text, kind = "".join(contents), (repr(kwargs), *(part["role"] for part in parts))
        size = len(text.encode(errors="replace"))
        if kind not in added:
            whole = messages if isinstance(messages, str) else render(with_kwargs(chat, kwargs), messages, where)
            added[kind] = max(len(whole.encode(errors="replace")) - size, 0) + _SPECIAL_TOKENS
        bound = size + added[kind] if text.strip() else np.inf
        checked[:, number] = place, bound, hash(text.casefold().replace(" ", "").strip())
    return checked


def _prompt(row: Mapping[str, Any], where: str, *, prompt_column: str, template: str | None) -> str | list[Message]:
    """Returns the prompt of a row, before any chat template.

    Raises:
      UsageError: The prompt is neither text nor messages, or the template does not fit the row.
    """
    remedy = "put the prompt there, or set prompt_column or template"
    prompt = column(row, prompt_column, where, remedy=remedy) if template is None else _fill(template, row, where)
    if not isinstance(prompt, str):
        return read_prompt(prompt, f"{where}: column {prompt_column}")
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
            raise UsageError(
                f"the template has {{{name}}} with a format or without a name: write only {{column}}, or {{{{ and }}}} "
                "for braces"
            )
        value = column(row, name, where, remedy=f"change template, which is {abbreviate(template)}, or set it to None")
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
        which = "training" if len(heldout) else "the held-out set"
        counts = f"rows: {len(places)}, different prompts: {len(np.unique(places))}, held-out rows: {len(heldout)}"
        raise UsageError(
            f"no prompt is left for {which} ({counts}): give rows with other prompts, name the columns that differ in "
            "the template, or set num_heldout or heldout_share"
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
