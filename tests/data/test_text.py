"""Checks how prompts become ids: chat templates, prompts that do not fit, and ids that are never encoded again."""

import dataclasses

import bigrams
import jax
import numpy as np
import pytest
from tiny import DATA, STORIES, Characters, needs_data, refused

from experiments.tasks import arithmetic
from experiments.tasks.stories import stories_task
from grpo_jax.config import recipe
from grpo_jax.data.text import encode_answers, encode_prompts, encode_texts
from grpo_jax.models.chat import Chat
from grpo_jax.models.huggingface import load_pretrained, load_tokenizer
from grpo_jax.runs.folder import RunFolder

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The tokenizer of arithmetic: one character a token, digits and + and = alone."""
    folder = tmp_path_factory.mktemp("tokenizer")
    arithmetic.TEXT.save_tokenizer(folder)
    return load_tokenizer(folder)


def lists(encoded):
    """Token ids as lists."""
    return [ids.tolist() for ids in encoded.token_ids]


EOS = (arithmetic.EOS_ID,)


def encode(tokenizer, prompts, **options):
    return encode_prompts(Chat(tokenizer, EOS), prompts, **options)


def answers(tokenizer, texts, eos_ids=EOS, prompts=None, **options):
    """Encodes an answer to each prompt, and returns their ids and the notes."""
    prompts = prompts or [f"{number}=" for number in range(len(texts))]
    rows, _, notes = encode_answers(Chat(tokenizer, eos_ids), prompts, [(text,) for text in texts], **options)
    return [row.answers[0] for row in rows], notes


OVERLONG = [
    ("drop", ["1+2=", "3+4="], "dropped of 3 prompts: 1 longer than 4 tokens"),
    ("truncate", ["1+2=", "5+1=", "3+4="], "1 of 3 prompts lost their beginning"),
]


@pytest.mark.parametrize(("overlong", "texts", "summary"), OVERLONG)
def test_long_prompts_are_dropped_or_lose_their_beginning(digits, overlong, texts, summary):
    encoded = encode(digits, ["1+2=", "12345+1=", "3+4="], max_prompt_tokens=4, overlong=overlong)
    assert lists(encoded) == [arithmetic.TEXT.encode(text) for text in texts]
    assert encoded.numbers == ([0, 2] if overlong == "drop" else [0, 1, 2])
    assert encoded.summary == summary


def test_messages_go_through_the_chat_template(digits):
    digits = type(digits).from_pretrained(digits.name_or_path)
    digits.chat_template = TEMPLATE
    encoded = encode(digits, [[{"role": "user", "content": text}] for text in ("1+2", "3")])
    assert encoded.texts == ["1+2=", "3="]
    assert lists(encoded) == [arithmetic.TEXT.encode("1+2="), arithmetic.TEXT.encode("3=")]


class Ending(Characters):
    """A tokenizer that begins and ends every text, unless asked not to."""

    def encode(self, text, add_special_tokens=True):
        ids = super().encode(text)
        return [1, *ids, 2] if add_special_tokens else ids


def test_prompts_get_no_eos_and_templates_no_bos():
    encoded = encode_prompts(Chat(Ending(), (2,)), ["a", [{"role": "user", "content": "b"}]])
    assert lists(encoded) == [[1, 97], Characters().encode("<user>b<assistant>")]


def test_truncated_prompts_keep_their_bos_token():
    encoded = encode_prompts(Chat(Ending(), (2,)), ["abcd", "ab"], max_prompt_tokens=3, overlong="truncate")
    assert lists(encoded) == [[1, 99, 100], [1, 97, 98]]
    assert encoded.texts == ["cd", "ab"]


class Marked(Ending):
    """Reads < and > as beginning and end."""

    def encode(self, text, add_special_tokens=True):
        return [{60: 1, 62: 2}.get(i, i) for i in super().encode(text, add_special_tokens)]


def test_only_what_the_tokenizer_adds_is_removed():
    encoded = encode_prompts(Chat(Marked(), (2,)), ["<a", "a>>", "a", [{"role": "user", "content": "a"}]])
    assert lists(encoded)[:3] == [[1, 97], [1, 97, 2, 2], [1, 97]]
    assert lists(encoded)[3][-1] == 2  # the template ends with ">", which is a token that ends texts


UNENCODABLE = [
    (lambda digits: encode(digits, ["", "123"], max_prompt_tokens=2), "no prompt is left"),
    (lambda digits: encode(digits, ["1"], max_prompt_tokens=0), "max_prompt_tokens is 0"),
    (lambda digits: answers(digits, ["1"], eos_ids=()), "no EOS"),
    (lambda digits: answers(digits, ["1"], max_tokens=0), "max_tokens is 0"),
    (lambda digits: answers(digits, ["1", "12\ud83d"]), r"surrogate pair.* mend '12\\ud83d'"),
]


@pytest.mark.parametrize(("call", "words"), UNENCODABLE)
def test_what_cannot_be_encoded_is_refused(digits, call, words):
    with refused(words):
        call(digits)


@needs_data
def test_a_published_chat_template_and_unicode():
    tokenizer = load_tokenizer(DATA / "hf-tokenizers/phi-3-mini")
    message = {"role": "user", "content": "Wie heißt 猫 auf Deutsch? 🐈"}
    encoded = encode_prompts(Chat(tokenizer), [[message]])
    assert encoded.texts[0].startswith("<|user|>\n") and encoded.texts[0].endswith("<|assistant|>\n")  # noqa: PT018
    ids = lists(encoded)[0]
    assert ids.count(tokenizer.convert_tokens_to_ids("<|user|>")) == 1  # special tokens are one token each
    assert message["content"] in tokenizer.decode(ids)


@needs_data
def test_ids_are_never_encoded_again(tmp_path):
    model = load_pretrained(STORIES)

    class Once:
        """Encodes until the task is made."""

        pad_token_id, decode, made = 0, staticmethod(model.tokenizer.decode), False

        def __call__(self, texts, **options):
            assert not self.made
            return model.tokenizer(texts, **options)

    tokenizer = Once()
    task = stories_task(tokenizer, model.eos_ids, vocab_size=512, num_prompts=4, seed=0, max_prompt_tokens=20)
    tokenizer.made = True
    # A name of three tokens does not fit; how many that is, a user is told.
    assert all("dropped of" in note and "longer than 20 tokens" in note for note in task.notes)
    config = recipe(steps=1, num_prompts=4, group_size=2, max_tokens=4, learning_rate=1e-3, kl_coef=0.0)
    run = RunFolder(tmp_path, dataclasses.asdict(config))
    params = {name: bigrams.normal(jax.random.key(i), (512, 4)) for i, name in enumerate(bigrams.PARAMS)}
    bigrams.train_grpo(task, config, run, params=params)
    assert run.lines()[0]["first_ratio_deviation"] < 1e-4


@needs_data
@pytest.mark.parametrize("name", ["stories260K-hf", "hf-tokenizers/phi-3-mini", "hf-tokenizers/falcon-tokenizer"])
def test_batches_give_the_ids_that_single_texts_give(name):
    tokenizer = load_tokenizer(DATA / name)
    texts = ["One day", "", " ", "a much longer text, with a comma", "\n", "Kätzchen 猫 🐈", "</s>", " led by a space"]
    texts = texts * 150  # more than one batch
    for special_tokens in (True, False):
        encoded = encode_texts(tokenizer, texts, special_tokens=special_tokens)
        assert [ids.dtype for ids in encoded] == [np.int32] * len(texts)
        singly = [tokenizer.encode(text, add_special_tokens=special_tokens) for text in texts]
        assert [ids.tolist() for ids in encoded] == singly


# ---- given completions


def test_completions_end_with_one_eos_unless_cut(digits):
    eos = arithmetic.EOS_ID
    ended = digits.decode([eos])
    texts = ["12", "", f"3{ended}", "12345"]
    whole, notes = answers(digits, texts, noun="completions")
    assert whole == [[*arithmetic.TEXT.encode(text), eos] for text in ("12", "3", "12345")]
    assert notes == ("dropped 1 completions that are empty as tokens",)
    short, notes = answers(digits, texts, max_tokens=3, overlong="drop")
    assert len(short) == 2
    assert notes[1] == "dropped 1 pairs that are longer than 3 tokens"
    cut, notes = answers(digits, texts, max_tokens=3)
    assert cut[-1] == arithmetic.TEXT.encode("123")  # nothing says that it ended there
    assert notes[1] == "1 of 4 pairs have an answer that lost its end"


def test_completions_prefer_the_tokenizers_eos_among_end_tokens(digits):
    for eos_ids, last in (((0, arithmetic.EOS_ID, 5), arithmetic.EOS_ID), ((0, 5), 5)):
        assert answers(digits, ["1"], eos_ids=eos_ids)[0][0][-1] == last
