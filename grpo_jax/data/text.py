"""Encoding of texts and chat messages as token ids. Texts that do not fit are dropped or cut, and counted."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from grpo_jax.data.types import Completion, Prompt, Span
from grpo_jax.errors import UsageError, abbreviate
from grpo_jax.models.chat import (
    ENCODING,
    Chat,
    Message as Message,
    check_roles,
    check_text as check_text,
    continue_text,
    digest_of_template,
    encode_conversation,
    end_marks,
    is_learned,
    prompt_writer,
    render,
    render_answer,
    turn_end,
    turn_opening,
    with_kwargs,
    without_end,
)
from grpo_jax.options import Size, check_number

Overlong = Literal["drop", "truncate"]
T = TypeVar("T")

_BATCH = 1000  # texts in one call of a tokenizer
_BAR_AFTER = 3.0  # seconds


def show_progress(items: Iterable[T], words: str) -> Iterable[T]:
    """Returns the items, with a progress bar in a terminal if they take more than a few seconds."""
    from tqdm import tqdm  # installed with the tokenizers

    bar: Iterable[T] = tqdm(items, words, leave=False, delay=_BAR_AFTER, disable=None)
    return bar


def uses_chat(chat: bool | None, tokenizer: Any) -> bool:
    """Returns whether prompts that are text become user messages. By default they do if there is a chat template."""
    return bool(tokenizer.chat_template) if chat is None else chat


# ---- prompts


class Encoded(NamedTuple):
    """The prompts that were not dropped, as token ids."""

    token_ids: list[np.ndarray]  # int32
    texts: list[Prompt]  # the encoded texts; for messages, the filled-in chat template
    numbers: list[int]  # the positions of these prompts among all prompts
    summary: str  # a sentence with the numbers of dropped and cut prompts; empty if there are none


def encode_prompts(
    chat: Chat,
    prompts: Sequence[str | Sequence[Message]],
    *,
    max_prompt_tokens: int | None = None,
    overlong: Overlong = "drop",
    kwargs: Sequence[Mapping[str, Any]] | None = None,
    others: int = 0,
) -> Encoded:
    """Encodes prompts as token ids. Completions are sampled and trained as ids, so they are never encoded again.

    Args:
      chat: The tokenizer and its chat template.
      prompts: Texts, or lists of chat messages. Messages are written in the chat template, which is opened for the
        assistant's turn.
      max_prompt_tokens: The most tokens of a prompt, P. None: no limit.
      overlong: "drop" to drop longer prompts, "truncate" to cut the beginning of their text, or the beginnings of their
        messages except those of the system.
      kwargs: Variables of the chat template for each prompt, which replace those of `chat`. None: there are none.
      others: The number of further prompts, which fit and are not encoded now.

    Returns:
      The prompts that were not dropped, and a summary of dropped and cut prompts.

    Raises:
      UsageError: There are messages but no chat template, P is invalid, or no prompt is left.
    """
    check_number("max_prompt_tokens", max_prompt_tokens, Size)
    template, each = digest_of_template(chat.tokenizer), kwargs or [{}] * len(prompts)

    def written(prompt: str | Sequence[Message], number: int) -> Prompt:
        if isinstance(prompt, str):
            return Prompt(prompt, template=template)
        text = render(with_kwargs(chat, each[number]), prompt, f"prompt {number}")
        return Prompt(text, prompt, each[number], template)

    all_texts = [written(prompt, number) for number, prompt in enumerate(prompts)]
    orders = {(repr(x.kwargs), *(m["role"] for m in x.messages)): (x, i) for i, x in enumerate(all_texts) if x.messages}
    for text, number in orders.values():
        check_roles(with_kwargs(chat, text.kwargs), text.messages, f"prompt {number}")
    all_ids = [np.zeros(0, np.int32)] * len(prompts)
    before, after = _added_tokens(chat.tokenizer)
    for is_plain in (True, False):
        chosen = [i for i, text in enumerate(all_texts) if bool(text.messages) != is_plain and text.strip()]
        # A template already contains the special tokens.
        encoded_texts = encode_texts(chat.tokenizer, [all_texts[i] for i in chosen], special_tokens=is_plain)
        for i, ids in zip(chosen, encoded_texts, strict=True):
            has_two = is_plain and before > 0 and len(ids) > 1 and ids[0] == ids[1]  # one is in the text
            all_ids[i] = ids[int(has_two) : len(ids) - after * is_plain]
    token_ids, dropped, cut = dict[int, np.ndarray](), Counter[str](), 0
    for number, ids in enumerate(all_ids):
        is_long = max_prompt_tokens is not None and len(ids) > max_prompt_tokens
        if is_long and overlong == "truncate":
            assert max_prompt_tokens is not None
            shorten = _shorten_chat if all_texts[number].messages else _shorten_text
            all_texts[number], ids = shorten(chat, all_texts[number], ids, max_prompt_tokens, before)
            is_long = len(ids) > max_prompt_tokens
            cut += not is_long
        if not len(ids):
            dropped["empty"] += 1
        elif is_long:
            dropped[f"longer than {max_prompt_tokens} tokens"] += 1
        else:
            token_ids[number] = ids
    total, reasons = len(prompts) + others, ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    sentences = [f"dropped of {total} prompts: {reasons}"] if dropped else []
    sentences += [f"{cut} of {total} prompts lost their beginning"] if cut else []
    summary = "; ".join(sentences)
    if not token_ids and not others:
        advice = "raise max_prompt_tokens" if any(map(len, all_ids)) else "give prompts with text"
        raise UsageError(f"no prompt is left ({summary or 'there was none'}): {advice}")
    return Encoded(list(token_ids.values()), [all_texts[number] for number in token_ids], list(token_ids), summary)


def _added_tokens(tokenizer: Any) -> tuple[int, int]:
    """Returns how many special tokens a tokenizer puts before and after every text."""
    whole, text = (encode_texts(tokenizer, ["a"], special_tokens=special)[0].tolist() for special in (True, False))
    before = next((i for i in range(len(whole)) if text and whole[i : i + len(text)] == text), None)
    return (0, 0) if before is None else (before, len(whole) - before - len(text))


def _shorten_text(chat: Chat, prompt: Prompt, ids: np.ndarray, limit: int, before: int) -> tuple[Prompt, np.ndarray]:
    """Cuts the beginning of a text, except the special tokens that the tokenizer puts before it."""
    before = before if before < limit else 0
    cut_ids = ids[len(ids) - limit + before :]
    text = chat.tokenizer.decode(cut_ids.tolist(), skip_special_tokens=False)
    return Prompt(text, template=prompt.template), np.concatenate([ids[:before], cut_ids])


def _shorten_chat(chat: Chat, prompt: Prompt, ids: np.ndarray, limit: int, before: int) -> tuple[Prompt, np.ndarray]:
    """Cuts the beginnings of messages, the first message first, until the filled-in template fits.

    The messages of the system and all that the template writes stay whole. If they do not fit, nothing is cut.
    """
    messages = [dict(message) for message in prompt.messages]
    for message in messages:
        while message["role"] != "system" and message.get("content"):
            content = message["content"]
            content_ids = encode_texts(chat.tokenizer, [content], special_tokens=False)[0]
            shorter = chat.tokenizer.decode(content_ids[len(ids) - limit :].tolist(), skip_special_tokens=False)
            shorter = shorter.lstrip("\ufffd")  # a part of a character
            message["content"] = shorter if len(shorter) < len(content) else content[1:]
            text = render(with_kwargs(chat, prompt.kwargs), messages)
            ids = encode_texts(chat.tokenizer, [text], special_tokens=False)[0]
            if len(ids) <= limit and messages[-1]["content"]:
                return Prompt(text, messages, prompt.kwargs, prompt.template), ids
    return prompt, ids


def encode_texts(tokenizer: Any, texts: Sequence[str], *, special_tokens: bool) -> list[np.ndarray]:
    """Returns the token ids of texts, int32. They are encoded in batches, which is faster.

    Args:
      tokenizer: A transformers tokenizer.
      texts: The texts to encode.
      special_tokens: True to add the special tokens with which the tokenizer begins and ends texts.
    """
    token_ids = []
    for start in show_progress(range(0, len(texts), _BATCH), f"encoding, {_BATCH} texts at a time"):
        batch = list(texts[start : start + _BATCH])
        with ENCODING:
            encoded = tokenizer(batch, add_special_tokens=special_tokens, return_attention_mask=False)
        token_ids += [np.asarray(ids, np.int32) for ids in encoded["input_ids"]]
    return token_ids


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


# ---- completions


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


class Answers(NamedTuple):
    """A prompt and its answers, as token ids."""

    prompt: list[int]
    answers: tuple[list[int], ...]  # with their ends
    learned: list[bool] | None = None  # true for the learned tokens of the only answer; None: all are learned
    is_merged: bool = False  # a token across the end of the prompt's text belongs to an answer


def answer_prompts(
    chat: Chat, prompts: Encoded, answers: Sequence[Sequence[str]], *, judged: bool = False, pad_id: int | None = None
) -> list[Answers]:
    """Encodes the answers to prompts as token ids.

    In a chat, prompt and answer are the tokens that `apply_chat_template` of transformers gives for all messages. The
    prompt is then the beginning that they share with the encoded prompt, which the template may have opened further.
    Outside a chat, prompt and answer are encoded as one text too, as TRL does. An answer ends with the end of a turn in
    a chat, and with `ending_id` otherwise, also if its text has an end.

    Args:
      chat: The tokenizer and its chat template.
      prompts: The M prompts, from `encode_prompts`.
      answers: The answers to each of the M prompts. Empty answers have no tokens, unless they are judged in a chat.
      judged: True for a reward model, which judges by the last token. In a chat it reads all that the template writes
        after the answer, and otherwise no end.
      pad_id: The padding token of a reward model, which skips it at the end. None: there is none.

    Returns:
      M prompts with their answers.

    Raises:
      UsageError: An answer is no text, or needs an EOS token that the tokenizer does not have.
    """
    kinds = {repr(text.kwargs): text for text in prompts.texts if text.messages}
    chats = {name: with_kwargs(chat, text.kwargs) for name, text in kinds.items()}
    known = {name: turn_end(chat) for name, chat in chats.items()}
    openings = {name: turn_opening(chats[name], text, text.messages) for name, text in kinds.items()}
    ends = [known[repr(text.kwargs)] if text.messages else None for text in prompts.texts]
    marks = {end: end_marks(chat, end) for end in {None, *known.values()}}

    def written(number: int, answer: str) -> str:
        check_text(answer)
        end, prompt = ends[number], prompts.texts[number]
        answer = without_end(answer, marks[end])
        if end is None:
            return prompt + answer
        if not answer.strip() and not judged:
            return prompt
        if (opening := openings[repr(prompt.kwargs)]) and answer.lstrip().startswith(opening):
            raise UsageError(f"the answer {abbreviate(answer)} begins with {opening}, which the template adds: drop it")
        whole = render_answer(chats[repr(prompt.kwargs)], prompt, prompt.messages, answer, end)
        return whole + (end.tail if judged else end.learned)

    texts = [written(number, answer) for number, several in enumerate(answers) for answer in several]
    encoded = iter(encode_texts(chat.tokenizer, texts, special_tokens=False))
    plain = [text for text, end in zip(prompts.texts, ends, strict=True) if end is None]
    alone = iter(encode_texts(chat.tokenizer, plain, special_tokens=False))
    eos = [ending_id(chat.tokenizer, chat.eos_ids)] if None in ends and not judged else []
    rows = []
    for number, end in enumerate(ends):
        prompt = prompts.token_ids[number].tolist()
        wholes = [next(encoded).tolist() for _ in answers[number]]
        if end is None:
            wholes = _behind(prompt, next(alone).tolist(), wholes)
            if not common_tokens([prompt, *wholes]):  # a model needs a token before the answer
                ends_left_out = (without_end(answer, marks[None]) for answer in answers[number])
                wholes = [prompt + continue_text(chat.tokenizer, answer) for answer in ends_left_out]
            wholes = [ids + (eos if ids != prompt else []) for ids in wholes]
        shared = common_tokens([prompt, *wholes])
        several = tuple(_without_padding(ids[len(shared) :], pad_id) for ids in wholes)
        rows.append(Answers(shared, several, is_merged=end is None and len(shared) < len(prompt)))
    return rows


def _behind(prompt: list[int], alone: list[int], wholes: Sequence[list[int]]) -> list[list[int]]:
    """Replaces the beginnings of texts with a prompt, from where they differ from the prompt's text.

    Args:
      prompt: The tokens of the prompt. Special tokens may be before it, or its beginning may be cut off.
      alone: The tokens of the prompt's text.
      wholes: The tokens of this text with each answer.
    """
    sizes = [len(common_tokens([alone, ids])) for ids in wholes]
    missing = len(prompt) - len(alone)
    return [prompt[: max(missing + size, 0)] + ids[size:] for ids, size in zip(wholes, sizes, strict=True)]


def common_tokens(several: Sequence[list[int]]) -> list[int]:
    """Returns the tokens with which all texts begin."""
    return list(os.path.commonprefix(several))  # noqa: RUF071


def answer_conversation(
    chat: Chat, prompt: Prompt, prompt_ids: Sequence[int], completion: Sequence[Message]
) -> Answers:
    """Encodes a completion of several messages, of which only the assistant's are learned.

    Args:
      chat: The tokenizer and its chat template.
      prompt: The text of the prompt, and `prompt_ids` its tokens.
      completion: The messages after the prompt.

    Returns:
      The prompt with its only answer.

    Raises:
      UsageError: The prompt is no chat, or the tokens of the assistant are unknown.
    """
    if not prompt.messages:
        raise UsageError("a completion holds several messages, which need a chat template: turn chat on")
    messages, chat = [*prompt.messages, *completion], with_kwargs(chat, prompt.kwargs)
    ids, mask = encode_conversation(chat, messages, len(prompt.messages))
    start = len(common_tokens([list(prompt_ids), ids]))
    if not any(message["role"] == "assistant" and is_learned(message) for message in completion):
        return Answers(ids[:start], (ids[start:],), [False] * len(ids[start:]))
    learned = [number for number, is_learned in enumerate(mask) if is_learned and number >= start]
    if not learned:
        raise UsageError("the chat template marks no token of a conversation as the assistant's: mend its marks")
    end = learned[-1] + 1
    return Answers(ids[:start], (ids[start:end],), mask[start:end])


def _without_padding(ids: list[int], pad_id: int | None) -> list[int]:
    while ids and ids[-1] == pad_id:
        ids = ids[:-1]
    return ids


def fit_answers(
    rows: Sequence[Answers],
    *,
    max_tokens: int | None = None,
    overlong: Overlong = "drop",
    vocab_size: int | None = None,
    noun: str = "pairs",
) -> tuple[list[Answers], list[int], tuple[str, ...]]:
    """Drops a prompt if an answer has no tokens or two answers are equal, and drops or cuts long answers.

    Args:
      rows: The prompts with their answers.
      max_tokens: The most tokens of an answer, T, with its end. None: no limit.
      overlong: "drop" to drop longer answers, "truncate" to keep their first T tokens.
      vocab_size: The size of the model's vocabulary. None: tokens outside of it are not looked for.
      noun: The plural noun for rows in notes.

    Returns:
      The rows that were not dropped, their positions, and notes on dropped and cut answers.

    Raises:
      UsageError: T is invalid, nothing is left, or a token is outside the vocabulary.
    """
    check_number("max_tokens", max_tokens, Size)
    fitted, dropped, cut = dict[int, Answers](), Counter[str](), 0
    for number, (prompt, answers, learned, is_merged) in enumerate(rows):
        short, is_pair = tuple(ids[:max_tokens] for ids in answers), len(answers) > 1
        if not all(answers) or len(set(map(tuple, short))) < len(short):
            dropped["whose answers are empty or equal as tokens" if is_pair else "that are empty as tokens"] += 1
        elif learned is not None and not any(learned[:max_tokens]):
            dropped[f"without a message of the assistant to learn in their first {max_tokens} tokens"] += 1
        elif short != answers and overlong == "drop":
            dropped[f"{'with an answer' if is_pair else 'that are'} longer than {max_tokens} tokens"] += 1
        else:
            cut += short != answers
            fitted[number] = Answers(prompt, short, learned and learned[:max_tokens], is_merged)
    notes = [f"dropped {count} {noun} {reason}" for reason, count in dropped.items()]
    if not fitted:
        why = f" ({', '.join(notes)})" if notes else ""
        raise UsageError(f"no {noun.rstrip('s')} is left of {len(rows)}{why}: raise max_tokens, or give other rows")
    notes += [f"{cut} of {len(rows)} {noun} have an answer that lost its end"] if cut else []
    if merged := sum(row.is_merged for row in fitted.values()):
        notes.append(
            f"{merged} of {len(rows)} {noun} have a token across the end of the prompt, which belongs to the answer"
        )
    if vocab_size is not None:
        check_ids([ids for row in fitted.values() for ids in (row.prompt, *row.answers)], vocab_size)
    return list(fitted.values()), list(fitted), tuple(notes)


def encode_answers(
    chat: Chat,
    prompts: Sequence[str | list[Message]],
    answers: Sequence[Sequence[str]],
    *,
    in_chat: bool = False,
    kwargs: Sequence[Mapping[str, Any]] | None = None,
    max_prompt_tokens: int | None = None,
    overlong: Overlong = "truncate",
    judged: bool = False,
    pad_id: int | None = None,
    **limits: Any,
) -> tuple[list[Answers], list[int], tuple[str, ...]]:
    """Encodes prompts and answers as token ids.

    Args:
      chat: The tokenizer and its chat template.
      prompts: Texts, or lists of chat messages.
      answers: The answers to each prompt.
      in_chat: True to make each prompt that is text a user's message.
      kwargs, max_prompt_tokens: See `encode_prompts`.
      overlong: "drop" to drop longer texts, "truncate" to cut the beginning of a prompt or the end of an answer.
      judged, pad_id: See `answer_prompts`.
      **limits: Further options of `fit_answers`.

    Returns:
      The prompts and answers, the positions of these prompts among all prompts, and notes on dropped and cut texts.

    Raises:
      UsageError: See `encode_prompts` and `fit_answers`.
    """
    write = prompt_writer(chat, in_chat)
    written = [write(prompt, x) for prompt, x in zip(prompts, kwargs or [{}] * len(prompts), strict=True)]
    encoded = encode_prompts(chat, written, max_prompt_tokens=max_prompt_tokens, overlong=overlong, kwargs=kwargs)
    several = [answers[number] for number in encoded.numbers]
    rows = answer_prompts(chat, encoded, several, judged=judged, pad_id=pad_id)
    fitted, numbers, notes = fit_answers(rows, overlong=overlong, **limits)
    notes = tuple(filter(None, (encoded.summary, *notes)))
    return fitted, [encoded.numbers[number] for number in numbers], notes


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


def spans_in_tokens(
    spans: Sequence[Span], completion: Completion, decode: Callable[[Sequence[int]], str]
) -> tuple[Span, ...]:
    """Converts spans to tokens: from the token with the first character of a span to the token with its last.

    Args:
      spans: Spans that passed `rewards.worker.checked_spans`, from one reward or several.
      completion: The completion that the spans belong to, or its final part, with all its ids.
      decode: Decodes token ids to text.

    Returns:
      The spans, ordered by their ends. A token may be in two spans.
    """
    if any(span.unit == "characters" for span in spans):
        whole = decode(completion.ids)
        before = max(whole.rfind(completion), 0)  # the reward may have read only the final part of the text
        ends = np.cumsum([len(piece) for piece in token_pieces(completion.ids, whole, decode)])

        def token(character: int) -> int:
            """Returns the token with a character: the first token whose piece of the text ends after it."""
            return int(np.searchsorted(ends, before + character, side="right"))

        spans = [
            span if span.unit == "tokens" else Span(token(span.start), token(span.end - 1) + 1, span.reward, "tokens")
            for span in spans
        ]
    return tuple(sorted(spans, key=lambda span: (span.end, span.start)))
