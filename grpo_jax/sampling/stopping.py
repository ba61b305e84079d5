"""Stop texts: a completion ends where its text contains one of them, also across tokens and bytes of a character.

`make_stop` turns the texts into an automaton over the tokens of a vocabulary. The sampler looks up one state per token,
so no text is decoded on the devices. The tokens are grouped into classes that lead to the same states, so the tables
are small.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.errors import UsageError

_MOST_BYTES = 1024  # of all stop texts; the tables of more take minutes to make
START, STOPPED = 0, 1  # states of the automaton: before the first token, and after a stop text


class Stop(NamedTuple):
    """Stop texts and their automaton. The next state is `table[state, classes[token]]`."""

    texts: tuple[str, ...]
    classes: np.ndarray  # unsigned int [V], the class of each token
    table: np.ndarray  # unsigned int [S, C], the state after a token of each class
    strips: bool  # the decoder drops a space at the beginning of a text

    def find_end(self, ids: Sequence[int]) -> int | None:
        """Returns the place of the token that completes a stop text, or None."""
        state = START
        for place, token in enumerate(ids):
            state = self.table[state, self.classes[token]]
            if state == STOPPED:
                return place
        return None

    def cut(self, text: str) -> str:
        """Returns the part of a decoded text before the first stop text, or all of it."""
        return text[: min((text.find(part) for part in self.texts if part in text), default=len(text))]


class TokenBytes(NamedTuple):
    """The UTF-8 bytes that a decoder writes for each of V tokens."""

    first: list[bytes]  # as the first token of a text
    later: list[bytes]
    is_byte: np.ndarray  # bool [V], true for <0xNN>: U+FFFD replaces each byte of an adjacent run that is not UTF-8
    removed: np.ndarray  # bool [V], true if decoding leaves the token out, as if it were not there

    def text(self, ids: Sequence[int]) -> str:
        """Returns the text that the decoder writes for token ids."""
        ids = [i for i in ids if not self.removed[i]]
        written = [*(self.first[i] for i in ids[:1]), *(self.later[i] for i in ids[1:])]
        texts = []
        for is_byte, run in groupby(zip(ids, written, strict=True), lambda pair: self.is_byte[pair[0]]):
            parts = [part for _, part in run]
            try:
                texts.append(b"".join(parts).decode())
            except UnicodeDecodeError:
                texts.append("\ufffd" * len(parts) if is_byte else b"".join(parts).decode(errors="replace"))
        return "".join(texts)


# ---- the bytes of tokens

# GPT-2 writes bytes as printable characters: most as themselves, the others as the characters from 256 on.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = sorted({*range(256)} - {*_PRINTABLE})
_BYTE_TOKEN = re.compile(b"<0x[0-9A-Fa-f]{2}>")
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}


def read_token_bytes(
    tokenizer: Any, decode: Callable[[Sequence[int]], str], vocab_size: int, special_ids: Sequence[int] = ()
) -> TokenBytes:
    """Reads the bytes of all tokens from the decoder of a tokenizer, and checks them against `decode`.

    Args:
      tokenizer: A transformers tokenizer.
      decode: Decodes token ids to the text of a completion. It may leave out added tokens and `special_ids`.
      vocab_size: The size of the model's vocabulary, V. Tokens that the tokenizer lacks write nothing.
      special_ids: Tokens that `decode` may leave out although the tokenizer has not added them, such as EOS.

    Raises:
      UsageError: The text of some tokens depends on other tokens in a way that is not known here.
    """
    refusal = UsageError("stop needs a tokenizer that decodes token by token, and this one does not: leave stop out")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise refusal
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": "Join"}
    tokens = [backend.id_to_token(i) for i in range(vocab_size)]
    later = first = [(token or "").encode() for token in tokens]
    is_byte = np.zeros(vocab_size, bool)
    for step in decoder.get("decoders", [decoder]):
        match step:
            case {"type": "Fuse"}:
                pass
            case {"type": "Join"}:  # tokenizers without a decoder
                later = [b" " + token_bytes for token_bytes in later]
            case {"type": "ByteLevel"}:
                later = first = [_from_byte_level(token_bytes) for token_bytes in later]
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                later = first = [token_bytes.replace(old.encode(), new.encode()) for token_bytes in later]
            case {"type": "Metaspace", "replacement": old, "prepend_scheme": scheme}:
                first = [token_bytes.replace(old.encode(), b" " if scheme == "never" else b"") for token_bytes in later]
                later = [token_bytes.replace(old.encode(), b" ") for token_bytes in later]
            case {"type": "ByteFallback"}:
                is_byte = np.array([_BYTE_TOKEN.fullmatch(token_bytes) is not None for token_bytes in later])
                later = first = [
                    bytes([int(token_bytes[3:5], 16)]) if single else token_bytes
                    for token_bytes, single in zip(later, is_byte, strict=True)
                ]
            case {"type": "Strip", "content": str(start), "start": 1, "stop": 0}:
                first = [token_bytes.removeprefix(start.encode()) for token_bytes in first]
            case _:
                raise refusal
    removed = np.array([token is None for token in tokens])
    letter = [i for i, token_bytes in enumerate(later) if token_bytes.isalpha()][:1]
    for i in {*tokenizer.added_tokens_decoder, *special_ids} & {*range(vocab_size)}:
        removed[i] = decode([*letter, i]) == decode(letter)
    read, written = TokenBytes(first, later, is_byte, removed), np.flatnonzero(~removed).tolist()
    if any(decode(ids) != read.text(ids) for ids in (written, written[::-1])):
        raise refusal
    return read


def _from_byte_level(token_bytes: bytes) -> bytes:
    """Returns the bytes of a byte-level token. Tokens with other characters stand for themselves."""
    characters = token_bytes.decode()
    return bytes(map(_BYTES.__getitem__, characters)) if all(x in _BYTES for x in characters) else token_bytes


# ---- the automaton

# The ranges of the bytes that must follow in a character of UTF-8, (): none. None: the run of bytes is not UTF-8.
_Rest = tuple[tuple[int, int], ...] | None
_State = tuple[int, _Rest]  # the longest end of the text that begins a stop text, as its number, and the rest


def make_stop(texts: Sequence[str], tokens: TokenBytes) -> Stop:
    """Makes the automaton of stop texts. It is exact: it stops at the token whose text completes one of them.

    UTF-8 texts contain each other exactly if their bytes do, so the automaton reads bytes (Aho & Corasick, 1975).
    Byte-fallback decoders are an exception: one byte can turn all bytes of a run into U+FFFD. Their states therefore
    also contain the bytes that may follow in the current character.

    Args:
      texts: The stop texts, at least one.
      tokens: The bytes of all tokens.

    Raises:
      UsageError: A text is empty, holds U+FFFD or half of a surrogate pair, or there are too many texts.
    """
    for text in texts:
        if not text or "\ufffd" in text.encode(errors="surrogatepass").decode(errors="replace"):
            raise UsageError(f"a stop text is {text!r}: it must be text that tokens can write, and not empty")
    encoded = [text.encode() for text in texts]
    if (size := sum(map(len, encoded))) > _MOST_BYTES:
        raise UsageError(f"stop has texts of {size} bytes: give fewer or shorter ones, of at most {_MOST_BYTES}")
    next_node, count = _next_nodes(encoded)
    first, later, is_byte, removed = tokens
    initial, flat = _advance(next_node, _flatten(first), 0), _flatten(later)
    after_tokens = cache(partial(_advance, next_node, flat))
    single = [(i, later[i][0]) for i in np.flatnonzero(is_byte).tolist()]
    states: list[_State] = [(0, ()), (count, ()), *((node, ()) for node in range(count))]
    known = {state: number for number, state in enumerate(states) if number}
    rows = []
    for number, (node, rest) in enumerate(states):  # the list grows in the loop
        if number == STOPPED:
            rows.append(np.full(len(later), STOPPED))
            continue
        nodes = initial if number == START else after_tokens(node if rest == () else 0)
        row = np.where(nodes == count, STOPPED, nodes + 2)
        for token, byte in single:
            if number == START and not first[token]:
                continue
            after = _after_byte(next_node, (node, rest), byte)
            after = (count, ()) if after[0] == count else after
            if after not in known:
                known[after] = len(states)
                states.append(after)
            row[token] = known[after]
        rows.append(np.where(removed, number, row))
    columns: dict[bytes, int] = {}  # np.unique takes seconds
    dtype = np.min_scalar_type(len(states) - 1)
    classes = [columns.setdefault(column.tobytes(), len(columns)) for column in np.stack(rows, axis=1).astype(dtype)]
    table = np.frombuffer(b"".join(columns), dtype).reshape(len(columns), len(states)).T
    return Stop(tuple(texts), np.array(classes, np.min_scalar_type(len(columns) - 1)), table, first != later)


def _next_nodes(texts: Sequence[bytes]) -> tuple[np.ndarray, int]:
    """Returns the automaton over bytes `[K + 1, 256]`, and K. Nodes are beginnings of texts. Node K is a whole text."""
    beginnings = sorted({text[:end] for text in texts for end in range(len(text))}, key=len)
    numbers = {beginning: number for number, beginning in enumerate(beginnings)}
    count = len(beginnings)
    next_node = np.zeros((count + 1, 256), np.uint16)
    next_node[count] = count
    for beginning, number in numbers.items():
        for byte in {*b"".join(texts)}:
            end = beginning + bytes([byte])
            if end.endswith(tuple(texts)):
                next_node[number, byte] = count
                continue
            while end not in numbers:
                end = end[1:]
            next_node[number, byte] = numbers[end]
    return next_node, count


def _flatten(tokens: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the bytes of all tokens in one array, and where each token begins and ends."""
    ends = np.cumsum([len(token) for token in tokens])
    return np.frombuffer(b"".join(tokens), np.uint8), np.append(0, ends[:-1]), ends


def _advance(next_node: np.ndarray, flat: tuple[np.ndarray, np.ndarray, np.ndarray], node: int) -> np.ndarray:
    """Returns the node after each token, int `[V]`, from `node` on."""
    data, starts, ends = flat
    nodes, left, place = np.full(len(starts), node, np.int32), np.arange(len(starts)), 0
    while len(left := left[starts[left] + place < ends[left]]):
        nodes[left] = next_node[nodes[left], data[starts[left] + place]]
        place += 1
    return nodes


_LEADS: dict[tuple[int, int], _Rest] = {
    (0x00, 0x7F): (),
    (0xC2, 0xDF): ((0x80, 0xBF),),
    (0xE0, 0xE0): ((0xA0, 0xBF), (0x80, 0xBF)),
    (0xE1, 0xEC): ((0x80, 0xBF),) * 2,
    (0xED, 0xED): ((0x80, 0x9F), (0x80, 0xBF)),
    (0xEE, 0xEF): ((0x80, 0xBF),) * 2,
    (0xF0, 0xF0): ((0x90, 0xBF), *((0x80, 0xBF),) * 2),
    (0xF1, 0xF3): ((0x80, 0xBF),) * 3,
    (0xF4, 0xF4): ((0x80, 0x8F), *((0x80, 0xBF),) * 2),
}


def _after_byte(next_node: np.ndarray, state: _State, byte: int) -> _State:
    """Returns the state after a byte of byte fallback."""
    node, rest = state
    if rest:
        rest = rest[1:] if rest[0][0] <= byte <= rest[0][1] else None
    elif rest == ():
        rest = next((rest for (low, high), rest in _LEADS.items() if low <= byte <= high), None)
    return (0, None) if rest is None else (int(next_node[node, byte]), rest)
