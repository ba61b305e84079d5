"""Stop texts: sampling ends where the decoded text contains one, and every tokenizer's own `decode` says where that is.

Byte-level BPE, byte fallback with and without a dropped space, Metaspace and joined words are different decoders.
"""

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from markov import markov_policy, random_table
from test_ended import MARKOV_ON_ACCELERATOR
from tiny import DATA, needs_data, ragged_prompts, refused, row_numbers, sampler_of
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from grpo_jax.models.huggingface import load_tokenizer
from grpo_jax.models.policy import Policy
from grpo_jax.sampling.stopping import STOPPED, TokenBytes, make_stop, read_token_bytes

WORDS = ["▁", "▁a", "a", "ab", "▁▁b", "b\n", "\n", "é", "<x>", *(f"<0x{byte:02X}>" for byte in range(256)), "<eos>"]
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
DECODERS = {
    "byte level": decoders.ByteLevel(),
    "byte fallback": decoders.Sequence(LLAMA[:3]),
    "dropped space": decoders.Sequence(LLAMA),
    "metaspace": decoders.Metaspace("▁", "always"),
    "metaspace never": decoders.Metaspace("▁", "never"),
    "none": None,
}


def made(decoder, words=WORDS):
    """A tokenizer of these words and a special token <eos>, which decoding leaves out."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    if decoder is not None:
        backend.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", clean_up_tokenization_spaces=False)


@functools.cache
def load(name):
    if name in DECODERS:
        words = ["Ġ", "Ċ", "Ã", "©", "a", "ab", "Ġa", "bĊ", "<eos>"] if name == "byte level" else WORDS
        return made(DECODERS[name], words)
    folder = DATA / name
    if (folder / "tokenizer_config.json").exists():
        return load_tokenizer(folder)
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>")


def decoder_of(tokenizer):
    return functools.partial(tokenizer.decode, skip_special_tokens=True)


@functools.cache
def pieces_of(name):
    tokenizer = load(name)
    return read_token_bytes(tokenizer, decoder_of(tokenizer), len(tokenizer) + 3)  # the model has three more tokens


def names_of(quick):
    """All tokenizers; the published ones, except `quick`, are slow."""
    published = ["stories260K-hf", "hf-tokenizers/phi-3-mini", "gpt2-tokenizer", "hf-tokenizers/falcon-tokenizer"]
    marks = {name: [needs_data] + ([] if name in quick else [pytest.mark.slow]) for name in published}
    return [*DECODERS, *(pytest.param(name, marks=marks[name]) for name in published)]


def random_ids(name, texts, rng, length):
    """Random tokens: any, special ones, those of a single byte, and some in a row that write a stop text."""
    pieces, special = pieces_of(name), [*load(name).added_tokens_decoder]
    short = [i for i, piece in enumerate(pieces.later) if len(piece) <= 2 and not pieces.removed[i]]
    ids = [
        int(rng.choice([rng.integers(len(pieces.later)), rng.choice(special), rng.choice(short)]))
        for _ in range(length)
    ]
    place = rng.integers(length + 1)
    return ids[:place] + written_at_random(name, str(rng.choice(texts)).encode(), rng) + ids[place:]


def written_at_random(name, text, rng):
    """Tokens that write the bytes of a text, or as many of them as tokens can."""
    numbers = numbers_by_piece(name)
    ids: list[int] = []
    while ends := [end for end in range(1, len(text) + 1) if text[:end] in numbers]:
        end = int(rng.choice(ends))
        ids, text = [*ids, int(rng.choice(numbers[text[:end]]))], text[end:]
    return ids


@functools.cache
def numbers_by_piece(name):
    pieces = pieces_of(name)
    numbers: dict[bytes, list[int]] = {}
    for i in np.flatnonzero(~pieces.removed).tolist():
        numbers.setdefault(pieces.later[i], []).append(i)
    return numbers


def first_end(decode, ids, texts):
    """The place of the first token after which the decoded text contains a stop text, or None."""
    return next((i for i in range(len(ids)) if any(text in decode(ids[: i + 1]) for text in texts)), None)


@pytest.mark.parametrize("name", names_of({"stories260K-hf"}))
def test_pieces_are_what_the_tokenizer_decodes(name):
    decode, pieces, rng = decoder_of(load(name)), pieces_of(name), np.random.default_rng(0)
    for length in range(200):
        ids = random_ids(name, ["é a", "\ufffd"], rng, length % 9)
        assert pieces.text(ids) == decode(ids)


TEXTS = [("\n",), (" a", "é"), ("ab\n", "b", "\n\n a"), ("é\n", "aab"), ("日本", "\u20ac")]


@pytest.mark.parametrize("name", names_of({"stories260K-hf"}))
@pytest.mark.parametrize("texts", TEXTS, ids=repr)
def test_the_automaton_stops_where_decoded_text_does(name, texts):
    decode, stop, rng = decoder_of(load(name)), make_stop(texts, pieces_of(name)), np.random.default_rng(0)
    for length in range(150):
        ids = random_ids(name, texts, rng, length % 15)
        assert stop.find_end(ids) == first_end(decode, ids, texts)


# ---- sampling


def favouring(sets, size, width=8):
    """A policy of bigrams that likes the tokens of some sets, and after a token of a set the others of this set.

    To that it adds random logits of rank `width`.
    """
    noise = np.random.default_rng(0)
    after, features = noise.normal(scale=0.5, size=(2, size, width + 1 + len(sets))).astype(np.float32)
    after[:, width:], features[:, width:] = 0, 0
    after[:, width], features[:, width] = 1, -np.log(size)
    for number, ids in enumerate(sets, width + 1):
        after[ids, number], features[ids, number], features[ids, width] = 1, 3, 1 - np.log(len(ids))

    def prefill(params, prompt, group_size, max_tokens):
        def decode(cache, ids, step):
            return params[0][ids], cache

        return params[0][prompt.ids[:, -1]], decode, jnp.zeros((len(prompt), group_size))

    return Policy(lambda key: None, lambda params: params[1], None, prefill), (after, features)


SAMPLED = [
    ("stories260K-hf", ("at t", "ed", "\n\n"), 12),
    ("hf-tokenizers/phi-3-mini", ("Ω", "\nQ:", " of the"), 8),
    ("gpt2-tokenizer", ("Ω", "\nQ:", " of the"), 8),
]


@needs_data
@pytest.mark.parametrize(
    ("name", "texts", "tokens"),
    [
        pytest.param(*case, marks=[] if case[0] == "stories260K-hf" else pytest.mark.slow, id=case[0])
        for case in SAMPLED
    ],
)
def test_a_thousand_completions_are_those_cut_afterwards(name, texts, tokens):
    """The noise of a token depends on its place, so sampling without stop texts gives the tokens to cut."""
    decode, pieces = decoder_of(load(name)), pieces_of(name)
    stop, rng = make_stop(texts, pieces), np.random.default_rng(0)
    size = len(pieces.later)
    sets = [sorted({i for _ in range(3) for i in written_at_random(name, text.encode(), rng)}) for text in texts]
    policy, params = favouring(sets, size)
    prompts, options = ragged_prompts([1] * 5, size), {"max_tokens": tokens, "eos_ids": (2,)}
    cut, whole = (sampler_of(policy, stop=each, **options) for each in (stop, None))
    counts = {"stopped": 0, "across": 0}
    for call in range(25):
        inputs = params, prompts, row_numbers(5, 8), jax.random.key(call)
        left, right = jax.device_get((cut(*inputs), whole(*inputs)))
        for place in np.ndindex(5, 8):
            ids = right.completion_ids[place][right.completion_mask[place]].tolist()
            end = first_end(decode, ids, texts)
            length = len(ids) if end is None else end + 1
            assert left.completion_mask[place].tolist() == [i < length for i in range(tokens)]
            assert left.completion_ids[place].tolist() == ids[:length] + [0] * (tokens - length)
            assert left.truncated[place] == (right.truncated[place] and end is None)
            np.testing.assert_allclose(
                left.sampler_logprobs[place][:length], right.sampler_logprobs[place][:length], rtol=1e-5
            )
            counts["stopped"] += end is not None
            counts["across"] += end is not None and not any(text in decode([ids[end]]) for text in texts)
    assert counts["stopped"] >= 300
    assert counts["across"] >= 100


def test_states_follow_completions_that_are_left_behind(assume):
    """A small batch continues with the unfinished completions, and must keep their states."""
    assume(**MARKOV_ON_ACCELERATOR)
    counts = []
    policy = markov_policy(lambda step, num_rows: counts.append(int(num_rows)))
    words = [bytes([65 + i]) for i in range(12)]
    pieces = TokenBytes(words, words, np.zeros(12, bool), np.zeros(12, bool))
    stop = make_stop(["AB", "CD", "EEF", "GA", "HH", "IK"], pieces)
    inputs = random_table(12) / 2, ragged_prompts([2] * 16, 12), row_numbers(16, 8), jax.random.key(1)
    out = jax.device_get(sampler_of(policy, max_tokens=64, eos_ids=(), stop=stop)(*inputs))
    jax.effects_barrier()
    assert {128, 32} <= set(counts)
    lengths = out.completion_mask.sum(-1).ravel()
    for ids, length in zip(out.completion_ids.reshape(-1, 64).tolist(), lengths, strict=True):
        assert stop.find_end(ids[:length]) == (length - 1 if length < 64 else None)


# ---- tables, texts and what is refused


def test_tables_of_a_large_vocabulary_are_small():
    """262,144 tokens of up to three letters."""
    words = [bytes(word) for n in (1, 2, 3) for word in itertools.product(range(64, 128), repeat=n)][: 2**18]
    words += [b"x"] * (2**18 - len(words))
    none = np.zeros(2**18, bool)
    stop = make_stop(["Question:", "User:", "ABC"], TokenBytes(words, words, none, none))
    assert stop.classes.nbytes + stop.table.nbytes < 2**20
    assert stop.classes.itemsize == 1


def test_texts_are_cut_before_the_first_stop():
    pieces = pieces_of("metaspace")
    assert make_stop(["a", "bay", "c"], pieces).cut("xxbay") == "xx"
    assert make_stop(["c"], pieces).cut("xxba") == "xxba"


@pytest.mark.parametrize("text", ["", "a\ufffd", "\ud83d"])
def test_texts_that_no_token_writes_are_refused(text):
    with refused("a stop text is"):
        make_stop([text], pieces_of("metaspace"))


def test_many_texts_are_refused():
    with refused("of 2000 bytes"):
        make_stop(["ab" * 500] * 2, pieces_of("metaspace"))


class NotFast:
    """A tokenizer that is not one of the library of Hugging Face."""


UNKNOWN = {
    "word pieces": made(decoders.WordPiece()),
    "suffixes": made(decoders.BPEDecoder()),
    "two spaces": made(decoders.Sequence([*LLAMA[:3], decoders.Strip(" ", 2, 0)])),
    "spaces of all tokens": made(decoders.Sequence([*LLAMA[:2], LLAMA[3]])),
    "not fast": NotFast(),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_decoders_that_are_not_exact_are_refused(kind):
    tokenizer = UNKNOWN[kind]
    with refused("leave stop out"):
        read_token_bytes(tokenizer, decoder_of(tokenizer) if kind != "not fast" else None, len(WORDS))


def test_a_decode_that_changes_the_text_is_refused():
    tokenizer = load("byte fallback")
    with refused("leave stop out"):
        read_token_bytes(tokenizer, lambda ids: decoder_of(tokenizer)(ids).replace(" a", "a"), len(WORDS))


def test_states_have_the_numbers_that_the_sampler_reads():
    stop = make_stop(["ab"], pieces_of("byte fallback"))
    assert (stop.table[STOPPED] == STOPPED).all()
    assert json.dumps(stop.find_end([2, 2, 3])) == "2"
