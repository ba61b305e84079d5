"""Encoding of texts and chat messages as token ids. Texts that do not fit are dropped or cut, and counted."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from grpo_jax.errors import UsageError, abbreviate, reason_of
from grpo_jax.options import Size, check_number

Message = dict[str, str]  # {"role": "user", "content": "…"}
Overlong = Literal["drop", "truncate"]
T = TypeVar("T")

_BATCH = 1000  # texts in one call of a tokenizer
_BAR_AFTER = 3.0  # seconds
# Replaces the function of transformers in templates that write today's date: a run must see the same prompts when it
# resumes on another day.
_FIXED_DATE = "{% macro strftime_now(form) %}{{ form.replace('%Y', '2025').replace('%b', 'Jan').replace('%m', '01')"
_FIXED_DATE += ".replace('%d', '01') }}{% endmacro %}"


def progress(items: Iterable[T], words: str) -> Iterable[T]:
    """Returns the items, with a progress bar in a terminal if they take more than a few seconds."""
    from tqdm import tqdm  # installed with the tokenizers

    bar: Iterable[T] = tqdm(items, words, leave=False, delay=_BAR_AFTER, disable=None)
    return bar


class Encoded(NamedTuple):
    """The texts that were not dropped, as token ids."""

    token_ids: list[np.ndarray]  # int32
    texts: list[str]  # the encoded texts; for messages, the filled-in chat template
    numbers: list[int]  # the positions of these texts among all texts
    summary: str  # a sentence with the numbers of dropped and cut texts; empty if there are none


def _fitting(
    all_ids: Sequence[np.ndarray],
    texts: Sequence[str],
    limit: int | None,
    overlong: Overlong,
    *,
    kind: Literal["prompts", "completions"],
    others: int = 0,
) -> Encoded:
    """Drops texts without tokens, and drops or cuts texts of more than `limit` tokens.

    A prompt loses its beginning, a completion its end. `others` counts further texts, which fit and are not encoded.
    """
    fitted, dropped, truncated = dict[int, np.ndarray](), Counter[str](), 0
    for number, ids in enumerate(all_ids):
        is_long = limit is not None and len(ids) > limit
        if not len(ids):
            dropped["empty"] += 1
        elif is_long and overlong == "drop":
            dropped[f"longer than {limit} tokens"] += 1
        else:
            truncated += is_long
            fitted[number] = ids if limit is None else ids[-limit:] if kind == "prompts" else ids[:limit]
    total, lost = len(all_ids) + others, "beginning" if kind == "prompts" else "end"
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    sentences = [f"dropped of {total} {kind}: {reasons}"] if dropped else []
    sentences += [f"{truncated} of {total} {kind} lost their {lost}"] if truncated else []
    return Encoded(list(fitted.values()), [texts[number] for number in fitted], list(fitted), "; ".join(sentences))


def uses_chat(chat: bool | None, tokenizer: Any) -> bool:
    """Returns whether prompts that are text become user messages. By default they do if there is a chat template."""
    return bool(tokenizer.chat_template) if chat is None else chat


def in_chat(prompt: str | list[Message], tokenizer: Any, chat: bool, system: str | None = None) -> str | list[Message]:
    """Returns a prompt ready to encode: as messages if `chat` is set, and with the system message first.

    Raises:
      UsageError: `chat` is set without a chat template, or a system message is given for text without `chat`.
    """
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


def encode_prompts(
    tokenizer: Any,
    prompts: Sequence[str | Sequence[Message]],
    *,
    eos_ids: tuple[int, ...],
    max_prompt_tokens: int | None = None,
    overlong: Overlong = "drop",
    tools: Sequence[Mapping[str, Any]] | None = None,
    others: int = 0,
) -> Encoded:
    """Encodes prompts as token ids. Completions are sampled and trained as ids, so they are never encoded again.

    Args:
      tokenizer: A transformers tokenizer.
      prompts: Texts, or lists of chat messages. Messages are written in the tokenizer's chat template, which is opened
        for the assistant's turn.
      eos_ids: The ids of the tokens that end a text. They are dropped at the end of a prompt, which is to be continued.
      max_prompt_tokens: The most tokens of a prompt, P. None: no limit.
      overlong: "drop" to drop longer prompts, "truncate" to keep their last P tokens.
      tools: JSON schemas of functions that the chat template describes to the model. None: there are no tools.
      others: The number of further prompts, which fit and are not encoded now.

    Returns:
      The prompts that were not dropped, and a summary of dropped and cut prompts.

    Raises:
      UsageError: There are messages but no chat template, P is invalid, or no prompt is left.
    """
    check_number("max_prompt_tokens", max_prompt_tokens, Size)
    all_texts = [
        prompt if isinstance(prompt, str) else fill_template(tokenizer, prompt, f"prompt {number}", tools)
        for number, prompt in enumerate(prompts)
    ]
    all_ids = [np.zeros(0, np.int32)] * len(prompts)
    for is_plain in (True, False):
        chosen = [i for i, p in enumerate(prompts) if isinstance(p, str) == is_plain and all_texts[i].strip()]
        # A template already contains the special tokens.
        encoded_texts = encode_texts(tokenizer, [all_texts[i] for i in chosen], special_tokens=is_plain)
        for i, ids in zip(chosen, encoded_texts, strict=True):
            has_two = len(ids) > 1 and ids[0] == ids[1] == getattr(tokenizer, "bos_token_id", None)  # one in the text
            all_ids[i] = _without_end(ids[int(has_two) :], eos_ids)
    encoded = _fitting(all_ids, all_texts, max_prompt_tokens, overlong, kind="prompts", others=others)
    if not encoded.numbers and not others:
        advice = "raise max_prompt_tokens" if any(map(len, all_ids)) else "give prompts with text"
        raise UsageError(f"no prompt is left ({encoded.summary or 'there was none'}): {advice}")
    return encoded


def encode_texts(tokenizer: Any, texts: Sequence[str], *, special_tokens: bool) -> list[np.ndarray]:
    """Returns the token ids of texts, int32. They are encoded in batches, which is faster.

    Args:
      tokenizer: A transformers tokenizer.
      texts: The texts to encode.
      special_tokens: True to add the special tokens with which the tokenizer begins and ends texts.
    """
    token_ids = []
    for start in progress(range(0, len(texts), _BATCH), f"encoding, {_BATCH} texts at a time"):
        batch = list(texts[start : start + _BATCH])
        encoded = tokenizer(batch, add_special_tokens=special_tokens, return_attention_mask=False)
        token_ids += [np.asarray(ids, np.int32) for ids in encoded["input_ids"]]
    return token_ids


def _without_end(ids: np.ndarray, eos_ids: tuple[int, ...]) -> np.ndarray:
    while len(ids) and ids[-1] in eos_ids:
        ids = ids[:-1]
    return ids


def prompt_limit(asked: int | None, longest: int | None, max_tokens: int) -> int | None:
    """Returns the most tokens of a prompt: `asked`, or the model's length minus the length of a completion.

    Args:
      asked: The option `max_prompt_tokens`. None: it is not set.
      longest: The most tokens of a text that the model was trained on. None: unknown.
      max_tokens: The most tokens of a completion.

    Returns:
      P, or None if there is no limit.

    Raises:
      UsageError: Completions leave no room for a prompt.
    """
    if asked is not None or longest is None:
        return asked
    if longest <= max_tokens:
        raise UsageError(
            f"max_tokens is {max_tokens}, but the model was trained on texts of up to {longest} tokens, prompts "
            "included: lower it, or say by max_prompt_tokens how long prompts may be"
        )
    return longest - max_tokens


def encode_continuations(tokenizer: Any, texts: Sequence[str], *, eos_ids: tuple[int, ...] = ()) -> list[np.ndarray]:
    """Encodes texts that continue other texts as token ids, int32.

    If the tokenizer itself puts a space before every text, the space at the beginning of a text is removed.

    Args:
      tokenizer: A transformers tokenizer.
      texts: The completions.
      eos_ids: The ids of the tokens that end a text. They are dropped at the end of a completion.
    """
    for text in texts:
        check_text(text)
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode("a", add_special_tokens=False))
    if pieces and pieces[0].startswith("▁"):
        texts = [text.removeprefix(" ") for text in texts]
    return [_without_end(ids, eos_ids) for ids in encode_texts(tokenizer, texts, special_tokens=False)]


def check_text(text: str, where: str = "a text") -> None:
    """Checks that a text can be encoded.

    Args:
      text: The text to check.
      where: The place of the text, as the subject of the error message.

    Raises:
      UsageError: The text holds half of a surrogate pair. The message quotes the text around it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = abbreviate(text[max(error.start - 20, 0) : error.start + 20])
        raise UsageError(f"{where} holds half of a surrogate pair, which is no text: mend {place}") from None


def ending_id(tokenizer: Any, eos_ids: tuple[int, ...]) -> int:
    """Returns the token to write at the end of a completion.

    Args:
      tokenizer: A transformers tokenizer.
      eos_ids: The ids of the tokens that end a completion. If the tokenizer's EOS is not one of them, the last is used.

    Raises:
      UsageError: There is no EOS token.
    """
    if not eos_ids:
        raise UsageError("the tokenizer has no EOS token to end completions with: name one in its eos_token")
    return tokenizer.eos_token_id if tokenizer.eos_token_id in eos_ids else eos_ids[-1]


def encode_completions(
    tokenizer: Any,
    texts: Sequence[str],
    *,
    eos_ids: tuple[int, ...],
    max_tokens: int | None = None,
    overlong: Overlong = "drop",
) -> Encoded:
    """Encodes completions as token ids, each ended by `ending_id`.

    Args:
      tokenizer: A transformers tokenizer.
      texts: The completions. Completions without tokens are dropped.
      eos_ids: The ids of the tokens that end a completion. If the tokenizer's EOS is not one of them, the last is used.
      max_tokens: The most tokens of a completion, T, EOS included. None: no limit.
      overlong: "drop" to drop longer completions, "truncate" to keep their first T tokens.

    Returns:
      The completions that were not dropped.

    Raises:
      UsageError: There is no EOS token, or T is invalid.
    """
    eos_id = ending_id(tokenizer, eos_ids)
    check_number("max_tokens", max_tokens, Size)
    all_ids = encode_continuations(tokenizer, texts, eos_ids=eos_ids)
    ended = [np.append(ids, np.int32(eos_id)) if len(ids) else ids for ids in all_ids]
    return _fitting(ended, texts, max_tokens, overlong, kind="completions")


def encode_answers(
    tokenizer: Any,
    prompts: Sequence[str | list[Message]],
    answers: Sequence[tuple[str, ...]],
    *,
    eos_ids: tuple[int, ...],
    max_prompt_tokens: int | None = None,
    max_tokens: int | None = None,
    overlong: Overlong = "truncate",
    vocab_size: int | None = None,
    end_id: int | None = None,
    chat: bool = False,
    rows: str = "pairs",
) -> tuple[list[list[int]], list[tuple[list[int], ...]], list[int], tuple[str, ...]]:
    """Encodes prompts and answers as token ids. Drops a prompt if an answer has no tokens or two answers are equal.

    Args:
      tokenizer: A transformers tokenizer.
      prompts: Texts, or lists of chat messages.
      answers: The answers to each prompt.
      eos_ids: The ids of the tokens that end a text. They are dropped at the end of prompts and answers.
      max_prompt_tokens: The most tokens of a prompt, P. None: no limit.
      max_tokens: The most tokens of an answer, T. None: no limit.
      overlong: "drop" to drop longer texts, "truncate" to cut the beginning of a prompt or the end of an answer.
      vocab_size: The size of the model's vocabulary. None: tokens outside of it are not looked for.
      end_id: The token appended to every answer, which counts in its length. None: nothing is appended.
      chat: True to make each prompt that is text a user's message in the tokenizer's chat template.
      rows: The plural noun for records in notes.

    Returns:
      M prompts, the answers to each, the positions of these prompts among all prompts, and notes on dropped and cut
      texts.

    Raises:
      UsageError: See `encode_prompts`; or nothing is left, or a token is outside the vocabulary.
    """
    check_number("max_tokens", max_tokens, Size)
    messages = [in_chat(prompt, tokenizer, chat) for prompt in prompts]
    encoded = encode_prompts(
        tokenizer, messages, eos_ids=eos_ids, max_prompt_tokens=max_prompt_tokens, overlong=overlong
    )
    fitted_rows: list[tuple[list[int], tuple[list[int], ...], int]] = []
    dropped, cut = Counter[str](), 0
    texts = [text for number in encoded.numbers for text in answers[number]]
    all_ids = iter(encode_continuations(tokenizer, texts, eos_ids=eos_ids))
    for prompt, number in zip(encoded.token_ids, encoded.numbers, strict=True):
        ids = [next(all_ids).tolist() for _ in answers[number]]
        fitted = _fitted(ids, max_tokens=max_tokens, overlong=overlong, end_id=end_id)
        if isinstance(fitted, str):
            dropped[fitted] += 1
            continue
        cut += sum(map(len, fitted)) < sum(map(len, ids)) + (end_id is not None) * len(ids)
        fitted_rows.append((prompt.tolist(), fitted, number))
    if not fitted_rows:
        raise UsageError(f"no {rows.rstrip('s')} is left of {len(prompts)} ({dict(dropped)}): raise max_tokens")
    notes = (
        encoded.summary,
        "; ".join(f"dropped {count} {rows} {reason}" for reason, count in dropped.items()),
        f"{cut} of {len(encoded.numbers)} {rows} have an answer that lost its end" if cut else "",
    )
    if vocab_size is not None:
        check_ids([ids for prompt, several, _ in fitted_rows for ids in (prompt, *several)], vocab_size)
    token_ids, fitting, numbers = (list(part) for part in zip(*fitted_rows, strict=True))
    return token_ids, fitting, numbers, tuple(filter(None, notes))


def _fitted(
    answers: Sequence[list[int]], *, max_tokens: int | None, overlong: Overlong, end_id: int | None
) -> tuple[list[int], ...] | str:
    """Returns the answers to one prompt with `end_id`, cut to `max_tokens`, or the reason why they are dropped."""
    unfit = "whose answers are empty or equal as tokens" if len(answers) > 1 else "that are empty as tokens"
    if not all(answers):
        return unfit
    ended = [[*ids, *([] if end_id is None else [end_id])] for ids in answers]
    if max_tokens is not None and overlong == "drop" and max(map(len, ended)) > max_tokens:
        return f"with an answer longer than {max_tokens} tokens"
    fitted = tuple(ids[:max_tokens] for ids in ended)
    return unfit if len(set(map(tuple, fitted))) < len(fitted) else fitted


def check_ids(token_ids: Iterable[Sequence[int] | np.ndarray], vocab_size: int, where: str = "") -> None:
    """Checks that a model has all tokens. The tokenizer may know further tokens if they do not occur.

    Args:
      token_ids: Lists of token ids.
      vocab_size: The size of the model's vocabulary.
      where: The place of the text, as the beginning of the error message.

    Raises:
      UsageError: An id is outside the vocabulary.
    """
    largest = max((int(np.max(ids)) for ids in token_ids if len(ids)), default=0)
    if largest >= vocab_size:
        raise UsageError(
            f"{where}{where and ': '}the tokenizer writes token {largest}, but the model has the tokens 0 to "
            f"{vocab_size - 1}: take the model's own tokenizer, or leave out the text that needs this token"
        )


def fill_template(
    tokenizer: Any, messages: Sequence[Message], place: str, tools: Sequence[Mapping[str, Any]] | None
) -> str:
    """Writes messages in the tokenizer's chat template, opened for the assistant's turn.

    Templates that write today's date get 1 January 2025.

    Args:
      tokenizer: A transformers tokenizer.
      messages: The messages of a prompt.
      place: The place of the prompt, for errors.
      tools: See `encode_prompts`.

    Raises:
      UsageError: There is no template, or it does not accept the messages or the tools.
    """
    if not tokenizer.chat_template:
        raise UsageError(
            "the prompts are chat messages, but the tokenizer has no chat template: give prompts as text, or put a "
            "chat_template.jinja into the model's folder"
        )
    try:
        options: dict[str, Any] = {} if tools is None else {"tools": list(tools)}
        if "strftime_now" in str(tokenizer.chat_template):
            options["chat_template"] = _FIXED_DATE + tokenizer.get_chat_template(tools=tools)
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False, **options)
    except Exception as error:  # templates raise any type of error
        raise UsageError(f"the chat template refuses {place}: {reason_of(error)}") from error
    if tools and not all(tool["function"]["name"] in text for tool in tools):
        raise UsageError(
            "the chat template writes no tools into the prompt, so the model would never hear of them: take a model "
            "whose template does"
        )
    return text


def token_pieces(ids: Sequence[int], text: str, decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Returns the part of a text that each of its tokens adds. Together the parts are the text.

    Tokens cannot be decoded one by one: a tokenizer may drop the space before the first token, and several tokens may
    make up one character. So a part is the text that decoding gains with one more token. Text that cannot be assigned
    yet goes to the first later token after which it can be, or to the last token.

    Args:
      ids: The sampled ids, without the token that ended them.
      text: The decoded text of all ids.
      decode: Decodes token ids to text.

    Returns:
      One text for each id.
    """
    texts = [""] * len(ids)
    place, start, done = 0, 0, 0  # place in the text; decoding starts at id `start`, and ids before `done` are assigned
    for end in range(1, len(ids) + 1):
        known, more = decode(ids[start:done]), decode(ids[start:end])
        part = more[len(known) :]
        if more.startswith(known) and not part.endswith("\ufffd") and text.startswith(part, place):
            texts[end - 1], place, start, done = part, place + len(part), done, end
    if texts:
        texts[-1] += text[place:]
    return texts
