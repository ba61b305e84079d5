"""Prompts in words, or in chat messages, as token ids. What does not fit is dropped or cut, and counted."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from grpo_jax.errors import UsageError, abbreviate, reason_of
from grpo_jax.options import Size, check_number

Message = dict[str, str]  # {"role": "user", "content": "…"}
Overlong = Literal["drop", "truncate"]
T = TypeVar("T")

_BATCH = 1000  # texts that a tokenizer takes at once
_BAR_AFTER = 3.0  # seconds


def progress(items: Iterable[T], words: str) -> Iterable[T]:
    """Returns the items, with a bar in a terminal if they take more than a few seconds."""
    from tqdm import tqdm  # comes with the packages that have tokenizers

    bar: Iterable[T] = tqdm(items, words, leave=False, delay=_BAR_AFTER, disable=None)
    return bar


class Encoded(NamedTuple):
    """Texts that are left, as token ids."""

    token_ids: list[np.ndarray]  # int32
    texts: list[str]  # what was encoded: of messages, the chat template filled in
    numbers: list[int]  # numbers of these texts among those that were to be encoded
    summary: str  # says how many others were dropped, and how many were cut; empty if none


def _fitting(
    all_ids: Sequence[np.ndarray],
    texts: Sequence[str],
    limit: int | None,
    overlong: Overlong,
    *,
    kind: Literal["prompts", "completions"],
    others: int = 0,
) -> Encoded:
    """Leaves out texts that are empty as tokens, and those of more than `limit` tokens, or cuts them.

    A prompt loses its beginning, a completion its end. `others` fit and are not encoded.
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
    """Returns whether a prompt that is text becomes a user's message: by default if there is a chat template."""
    return bool(tokenizer.chat_template) if chat is None else chat


def in_chat(prompt: str | list[Message], tokenizer: Any, chat: bool, system: str | None = None) -> str | list[Message]:
    """Returns a prompt as it is encoded: with `chat` as messages, and behind a system message if there is one.

    Raises:
      UsageError: messages are asked for, but the tokenizer has no chat template.
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
    """Token ids of prompts. Completions are sampled and trained as ids: nothing is ever encoded again.

    Args:
      tokenizer: of transformers.
      prompts: texts, or lists of chat messages, for which the tokenizer's chat template is filled in and opened
        for the assistant's turn.
      eos_ids: dropped at the end of a prompt, for a prompt is to be continued.
      max_prompt_tokens: P; None: as long as they come.
      overlong: what happens to a prompt of more tokens: it is dropped, or keeps its last P tokens.
      tools: JSON schemas of functions that chat templates tell the model of; None: there are none.
      others: further prompts, which fit and need not be encoded now.

    Returns:
      The prompts that are left, and the counts of the others.

    Raises:
      UsageError: messages without a chat template, an impossible P, or nothing is left.
    """
    if isinstance(prompts, str):
        raise UsageError("prompts must be a list: put the one prompt into brackets")
    check_number("max_prompt_tokens", max_prompt_tokens, Size)
    all_texts = [
        prompt if isinstance(prompt, str) else fill_template(tokenizer, prompt, f"prompt {number}", tools)
        for number, prompt in enumerate(prompts)
    ]
    all_ids = [np.zeros(0, np.int32)] * len(prompts)
    for is_plain in (True, False):
        chosen = [i for i, p in enumerate(prompts) if isinstance(p, str) == is_plain and all_texts[i].strip()]
        # A template writes the special tokens itself.
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
    """Returns the token ids of texts, int32. They are encoded in batches, which takes less time.

    Args:
      tokenizer: of transformers.
      texts: any number of them.
      special_tokens: puts in what the tokenizer begins and ends texts with.
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
    """The longest prompt to take, in tokens: what was asked for, or what a completion leaves of the model's length.

    Args:
      asked: `max_prompt_tokens`; None: nothing was asked for.
      longest: the longest text that the model was trained on, in tokens; None: it does not say.
      max_tokens: of a completion.

    Returns:
      P, or None where nothing bounds it.

    Raises:
      UsageError: completions leave no room for a prompt.
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
    """Token ids of texts that continue others, int32.

    A tokenizer that puts a space before every text of its own accord is not given another one there.

    Args:
      tokenizer: of transformers.
      texts: the completions.
      eos_ids: dropped at their ends.
    """
    for text in texts:
        check_text(text)
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode("a", add_special_tokens=False))
    if pieces and pieces[0].startswith("▁"):
        texts = [text.removeprefix(" ") for text in texts]
    return [_without_end(ids, eos_ids) for ids in encode_texts(tokenizer, texts, special_tokens=False)]


def check_text(text: str, where: str = "a text") -> None:
    """Refuses a text that cannot be encoded.

    Args:
      text: to check.
      where: the subject of the sentence.

    Raises:
      UsageError: it holds half of a surrogate pair; the sentence quotes what is around it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = abbreviate(text[max(error.start - 20, 0) : error.start + 20])
        raise UsageError(f"{where} holds half of a surrogate pair, which is no text: mend {place}") from None


def ending_id(tokenizer: Any, eos_ids: tuple[int, ...]) -> int:
    """The token that is written at the end of a completion.

    Args:
      tokenizer: of transformers.
      eos_ids: what ends a completion. Where the tokenizer's own EOS is not among them, the last one is written.

    Raises:
      UsageError: there is none.
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
    """Token ids of given completions, each ended by the tokenizer's EOS.

    Args:
      tokenizer: of transformers.
      texts: completions. One that is empty as tokens is dropped.
      eos_ids: what ends a completion. Where the tokenizer's own EOS is not among them, the last one is written.
      max_tokens: T, EOS included; None: as long as they come.
      overlong: what happens to a completion of more tokens: it is dropped, or keeps its first T tokens.

    Returns:
      The completions that are left.

    Raises:
      UsageError: there is no EOS, or an impossible T.
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
    """Token ids of prompts and answers. Answers to one prompt are kept where all have tokens and no two are equal.

    Args:
      tokenizer: of transformers.
      prompts: texts or messages.
      answers: to each of them.
      eos_ids: what ends a text; dropped where it does.
      max_prompt_tokens: P; None: as long as they come.
      max_tokens: of an answer, T; None: as long as they come.
      overlong: what is longer is dropped, or cut: a prompt loses its beginning, an answer its end.
      vocab_size: of the model, which refuses tokens outside of it; None: they are not looked at.
      end_id: put behind every answer, and counted in its length; None: nothing is.
      chat: a prompt that is text becomes a user's message of the chat template.
      rows: what one of them is called in notes.

    Returns:
      M prompts, the answers to each, the numbers of these prompts among all, and what was dropped or cut, in words.

    Raises:
      UsageError: as `encode_prompts` does, nothing is left, or the model lacks a token.
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
    """Answers to one prompt with their ends, cut to what is allowed; or why they are dropped."""
    unfit = "whose answers are empty or equal as tokens" if len(answers) > 1 else "that are empty as tokens"
    if not all(answers):
        return unfit
    ended = [[*ids, *([] if end_id is None else [end_id])] for ids in answers]
    if max_tokens is not None and overlong == "drop" and max(map(len, ended)) > max_tokens:
        return f"with an answer longer than {max_tokens} tokens"
    fitted = tuple(ids[:max_tokens] for ids in ended)
    return unfit if len(set(map(tuple, fitted))) < len(fitted) else fitted


def check_ids(token_ids: Iterable[Sequence[int] | np.ndarray], vocab_size: int, where: str = "") -> None:
    """Refuses tokens that a model does not have. A tokenizer may know more, as long as they do not occur.

    Args:
      token_ids: lists of ids.
      vocab_size: of the model.
      where: the text of the ids, as the beginning of the refusal.

    Raises:
      UsageError: one of the ids is outside the vocabulary.
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
    """Returns messages as the tokenizer's chat template writes them, opened for the assistant's turn.

    Args:
      tokenizer: of transformers.
      messages: a prompt.
      place: names the prompt in a refusal.
      tools: as in `encode_prompts`.

    Raises:
      UsageError: there is no template, or it refuses the messages or the tools.
    """
    if not tokenizer.chat_template:
        raise UsageError(
            "the prompts are chat messages, but the tokenizer has no chat template: give prompts as text, or put a "
            "chat_template.jinja into the model's folder"
        )
    try:
        options: dict[str, Any] = {} if tools is None else {"tools": list(tools)}
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False, **options)
    except Exception as error:  # whatever the template raises, such as that roles must alternate
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
    make up one character. So a part is what decoding gains by one more token. Text that cannot be assigned yet goes to
    a later token: the first after which it can, or the last.

    Args:
      ids: as sampled, without what ended them.
      text: of them.
      decode: ids to text.

    Returns:
      One text for each id.
    """
    texts = [""] * len(ids)
    place, start, done = 0, 0, 0  # in the text; decoded anew from `start`; known up to `done`
    for end in range(1, len(ids) + 1):
        known, more = decode(ids[start:done]), decode(ids[start:end])
        part = more[len(known) :]
        if more.startswith(known) and not part.endswith("\ufffd") and text.startswith(part, place):
            texts[end - 1], place, start, done = part, place + len(part), done, end
    if texts:
        texts[-1] += text[place:]
    return texts
