"""Checks how rows become tasks: reading, splitting, the order of prompts, and refusals."""

import gzip
import json
import sys
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tiny import DATA, STORIES, Characters, needs_data, refused, write_rows

from grpo_jax.data.rows import Row, batches, read_rows
from grpo_jax.errors import UsageError
from grpo_jax.models.huggingface import load_tokenizer
from grpo_jax.tasks import task as task_module
from grpo_jax.tasks.problems import BOXED, gsm8k_rows, math_rows, problem_task
from grpo_jax.tasks.task import text_task


def zeros(examples, completions):
    return [0.0] * len(completions)


def make(rows, tokenizer=None, **options):
    options = {"vocab_size": 256, "num_prompts": 1, "seed": 0, "reward": zeros} | options
    return text_task(tokenizer or Characters(), (0,), rows, **options)


def texts(prompts):
    """What the ids say."""
    return ["".join(map(chr, ids[mask])) for ids, mask in zip(prompts.tokens.ids, prompts.tokens.mask, strict=True)]


def trained(task, steps=1):
    return [text for step in range(steps) for text in texts(task.prompts(step))]


WORDS = [{"prompt": f"word {i}", "number": i} for i in range(100)]
OTHERS = [{"prompt": "held out"}]
USER = [{"role": "user", "content": "Hi"}]


def refusal(function, *args, **options):
    with pytest.raises(UsageError) as error:
        function(*args, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- the order of prompts ---


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.data())
def test_prompts_never_repeat_within_an_epoch_or_step(size, data):
    count = data.draw(st.integers(1, size))
    batch = batches(size, count, seed=data.draw(st.integers(0, 5)))
    taken = [batch(step) for step in range(3 * size // count + 1)]
    for numbers in taken:
        assert len(set(numbers.tolist())) == len(numbers) == count
    stream = np.concatenate(taken)
    for epoch in range(3):
        assert sorted(stream[epoch * size : (epoch + 1) * size]) == list(range(size))


@pytest.mark.parametrize(("size", "count"), [(100, 7), (100, 50), (11, 7), (8, 8), (1, 1)])
def test_the_order_depends_on_seed_and_step_alone(size, count):
    there = [batches(size, count, seed=3)(step).tolist() for step in range(40)]
    batch = batches(size, count, seed=3)
    assert [batch(step).tolist() for step in reversed(range(40))] == there[::-1]
    if size > 1:
        assert [batches(size, count, seed=4)(step).tolist() for step in range(40)] != there
        assert batch(0).tolist() != batch(size).tolist()  # size steps later an epoch begins with a step again


def test_late_steps_are_as_quick_as_early_ones():
    started = time.process_time()
    for count in (32, 999):
        batches(1_001, count, seed=0)(10**8)
    assert time.process_time() - started < 2  # to shuffle all epochs before it would take minutes


def test_resumed_tasks_see_the_same_prompts():
    first, again, other = (make(WORDS, num_prompts=8, seed=seed) for seed in (0, 0, 1))
    for _ in range(20):
        first.prompts(0)
    np.testing.assert_array_equal(first.prompts(37).tokens.ids, again.prompts(37).tokens.ids)
    assert (first.prompts(37).tokens.ids != other.prompts(37).tokens.ids).any()
    np.testing.assert_array_equal(
        first.heldout.tokens.ids, other.heldout.tokens.ids
    )  # the split is no matter of the seed


# --- what is held out ---


def test_held_out_share_never_splits_equal_prompts():
    rows = WORDS * 3
    task = make(rows, heldout_share=0.2)
    heldout, training = texts(task.heldout), trained(task, 300)
    assert 10 * 3 <= len(heldout) <= 30 * 3
    assert not set(heldout) & set(training)
    assert set(heldout) | set(training) == {row["prompt"] for row in rows}
    assert set(Counter(heldout).values()) == {3}


def test_nothing_is_held_out_where_all_are_needed():
    task = make(WORDS[:2] * 2, heldout_share=0)
    assert sorted(trained(task, 4)) == sorted(texts(task.heldout)) == ["word 0", "word 0", "word 1", "word 1"]
    assert task.notes == ("no prompt is held out: all are trained on",)


def test_a_number_is_held_out():
    task = make(WORDS, num_heldout=7)
    assert len(task.heldout.examples) == 7
    assert len(set(trained(task, 93))) == 93
    # Of rows given for it, those whose hash is smallest: the same among the same prompts.
    again = make([{"prompt": "another"}], heldout_rows=WORDS, num_heldout=7)
    assert texts(again.heldout) == texts(task.heldout)


def test_held_out_rows_are_never_trained_on():
    heldout = [WORDS[3], WORDS[50], {"prompt": "new"}]
    for number in (3, 1):
        task = make(WORDS, heldout_rows=heldout, num_heldout=number)
        assert len(task.heldout.examples) == number
        assert {*texts(task.heldout)} <= {row["prompt"] for row in heldout}
        assert sorted(trained(task, 98)) == sorted(row["prompt"] for row in WORDS if row["number"] not in (3, 50))
        assert task.notes == ("training: dropped, for they are held out: 2",)


def test_prompts_equal_after_cutting_share_one_side():
    rows = [{"prompt": "a 123"}, {"prompt": "b 456"}]
    task = make(rows, heldout_rows=[{"prompt": "c 123"}], max_prompt_tokens=3, overlong="truncate")
    assert trained(task, 3) == ["456"] * 3
    assert task.notes == (
        "training: 2 of 2 prompts lost their beginning",
        "held out: 1 of 1 prompts lost their beginning",
        "training: dropped, for they are held out: 1",
    )


def test_holding_out_all_prompts_is_refused():
    with refused("no prompt is left for training: all have the tokens of held-out prompts"):
        make([{"prompt": "a 123"}], heldout_rows=[{"prompt": "c 123"}], max_prompt_tokens=3, overlong="truncate")


def test_dropped_prompts_are_counted_and_add_no_width():
    rows = [{"prompt": "12"}, {"prompt": "1234567"}, {"prompt": " "}, {"prompt": "123"}]
    task = make(rows, heldout_rows=[{"prompt": "1234"}, {"prompt": "12345"}], max_prompt_tokens=4)
    assert task.notes == (
        "training: dropped of 4 prompts: 1 longer than 4 tokens, 1 empty",
        "held out: dropped of 2 prompts: 1 longer than 4 tokens",
    )
    assert task.heldout.tokens.ids.shape == (1, 4)
    assert task.prompts(0).tokens.ids.shape == (1, 4)
    assert sorted(trained(task, 2)) == ["12", "123"]
    assert [e["prompt"] for e in task.prompts(0).examples] == trained(task)  # of the rows that are left


# --- more rows than are encoded in advance ---


@pytest.fixture
def few_in_advance(monkeypatch):
    monkeypatch.setattr(task_module, "_ALL_IN_ADVANCE", 20)
    monkeypatch.setattr(task_module, "_SAMPLED", 5)


class Counting(Characters):
    """Notes what it encodes. Reads capitals as small letters, and ! as ten tokens; of ~ there is none."""

    def __init__(self):
        self.encoded = []

    def encode(self, text, add_special_tokens):
        self.encoded.append(text)
        return super().encode(text.lower().replace("!", 10 * "!").replace("~", ""), add_special_tokens)


VARIED = [
    *({"prompt": f"{'long ' * (i % 7)}word {i}", "number": i} for i in range(200)),
    {"prompt": " "},
    {"prompt": "Word 3"},
    {"prompt": [{"role": "user", "content": "word"}]},
]


LATE_OPTIONS = [
    {"num_heldout": 8},
    {"num_heldout": 8, "max_prompt_tokens": 30},
    {"num_heldout": 8, "max_prompt_tokens": 30, "overlong": "truncate"},
    {"heldout_rows": VARIED[:9], "chat": True, "system": "Be"},
    {"heldout_share": 0, "max_prompt_tokens": 20},
    {"heldout_rows": VARIED[:9], "template": "{prompt}?", "rows": VARIED[:-1]},
]


@pytest.mark.parametrize("options", LATE_OPTIONS)
def test_lazily_encoded_prompts_are_the_same(options, few_in_advance, monkeypatch):
    options = {"rows": VARIED, "num_prompts": 16} | options
    tokenizer = Counting()
    later = make(tokenizer=tokenizer, **options)
    if "heldout_share" not in options:  # all are held out there
        assert len(set(tokenizer.encoded)) < 150
    monkeypatch.setattr(task_module, "_ALL_IN_ADVANCE", None)
    at_once = make(tokenizer=Counting(), **options)
    assert (later.rows, later.notes) == (at_once.rows, at_once.notes)
    assert texts(later.heldout) == texts(at_once.heldout)
    for step in (0, 1, 30, 1000, 0):
        one, other = later.prompts(step), at_once.prompts(step)
        assert texts(one) == texts(other)
        assert one.examples == other.examples
    width = at_once.heldout.tokens.width
    assert width <= later.heldout.tokens.width <= min(width + 7, options.get("max_prompt_tokens", width + 7))
    assert {widths[-1] for widths in later.heldout.tokens.widths} == {later.heldout.tokens.width}


def test_one_bad_row_is_refused_before_encoding(tmp_path):
    lines = [json.dumps({"prompt": f"word {i}"}) for i in range(3_000)]
    tokenizer, path = Counting(), tmp_path / "r.jsonl"
    for bad, sentence in (
        ('{"prompt": 7}', "line 2901: column prompt holds a number"),
        ('{"text": ""}', "line 2901 has no column prompt: its columns are text"),
        ('{"prompt": ', "line 2901 is not JSON"),
    ):
        path.write_text("\n".join([*lines[:2_900], bad, *lines[2_901:]]))
        assert f"{path}, {sentence}" in refusal(lambda path=path: make(read_rows(path), tokenizer))
    assert tokenizer.encoded == []


def test_role_orders_the_template_rejects_are_refused_early(few_in_advance):
    class Alternating(Counting):
        def apply_chat_template(self, messages, **options):
            if [message["role"] for message in messages] == ["user", "user"]:
                raise ValueError("roles must alternate")
            return super().apply_chat_template(messages, **options)

    message = {"role": "user", "content": "word"}
    for bad, place in (
        (Row({"prompt": [message, message]}, "here, line 101"), "here, line 101"),
        ({"prompt": [message] * 2}, "row 100"),
    ):
        tokenizer = Alternating()
        assert f"refuses {place}: roles must alternate" in refusal(make, [*WORDS, bad], tokenizer, heldout_rows=OTHERS)
        assert tokenizer.encoded == []


def test_prompts_unlike_the_sample_are_cut_or_refused(few_in_advance):
    def odd(text, **options):
        rows = [Row(row | ({"prompt": text} if i == 57 else {}), f"line {i}") for i, row in enumerate(WORDS)]
        task = make(rows, Counting(), heldout_rows=OTHERS, num_prompts=100, **options)
        return lambda: texts(task.prompts(0))

    with pytest.warns(UserWarning, match="it keeps its last 8"):
        assert "!" * 8 in odd("5!")()
    assert "line 57: its prompt has no tokens: leave the row out" in refusal(odd("~"))
    assert "line 57: the tokenizer writes token 253" in refusal(odd("ý", vocab_size=128))


# --- prompts ---


def test_examples_have_all_columns_and_encoded_text():
    rows = [{"question": "1+1", "answer": "2", "prompt": "hidden", "tags": ["sum"]}]
    task = make(rows, template="{question} is {{{answer}}}?", heldout_rows=[rows[0] | {"question": "x"}])
    assert trained(task) == ["1+1 is {2}?"]
    assert task.prompts(0).examples == [rows[0] | {"prompt": "1+1 is {2}?"}]
    assert rows[0]["prompt"] == "hidden"


def test_texts_and_messages_in_chat():
    held = [{"prompt": [{"role": "user", "content": "Oh"}]}]
    assert trained(make([{"prompt": USER}], heldout_rows=held)) == ["<user>Hi<assistant>"]
    assert trained(make([{"prompt": "Hi"}], heldout_rows=held)) == ["Hi"]
    assert trained(make([{"prompt": "Hi"}], heldout_rows=held, chat=True)) == ["<user>Hi<assistant>"]
    both = make([{"prompt": "Hi"}], heldout_rows=held, chat=True, system="Be")
    assert trained(both) == ["<system>Be<user>Hi<assistant>"]
    assert texts(both.heldout) == ["<system>Be<user>Oh<assistant>"]
    own = [{"role": "system", "content": "Do"}, *USER]
    assert trained(make([{"prompt": own}], heldout_rows=held, system="Be")) == ["<system>Do<user>Hi<assistant>"]


def test_chat_templates_do_not_change_the_split():
    bare, chat = make(WORDS), make(WORDS, chat=True)
    assert [f"<user>{text}<assistant>" for text in texts(bare.heldout)] == texts(chat.heldout)


MIXED = [{"prompt": "x", "number": 7, "many": [1], "none": None}]
CANNOT = [
    ({"template": "{question"}, "the template cannot be read"),
    ({"template": "{number.__class__}"}, "no column number.__class__"),
    ({"template": "{missing}"}, "row 0 has no column missing: its columns are prompt, number, many, none"),
    ({"template": "{missing}"}, "; change template, which is '{missing}', or set it to None"),
    ({"template": "{}"}, "without a name"),
    ({"template": "{number:>99999999}"}, "with a format"),
    ({"template": '{number} {"a": 1}'}, "or {{ and }} for braces"),
    ({"template": "{many}"}, "row 0: column many holds a list"),
    ({"template": "{none}"}, "row 0: column none holds nothing (null)"),
    ({"prompt": 7}, "row 1: column prompt holds a number, and should hold text or a list of chat messages"),
    ({"prompt": []}, "should end with the user's"),
    ({"prompt": [{"role": "user"}]}, 'without text as "role" and "content"'),
    ({"prompt": [{"role": "user", "content": ["x"]}]}, 'without text as "role" and "content"'),
    ({"prompt": [*USER, {"role": "assistant", "content": "y"}]}, "should end with the user's"),
    ({"prompt": "\ud800"}, "row 1: its prompt holds half of a surrogate pair"),
    ({"num_prompts": 0}, "num_prompts is 0"),
    ({"num_prompts": 101}, "num_prompts is 101, but there are 100 prompts for training"),
    ({"num_heldout": 0}, "num_heldout is 0"),
    (
        {"num_heldout": 100, "heldout_rows": None},
        "no prompt is left for training (rows: 100, different prompts: 100, held-out rows: 100)",
    ),
    (
        {"heldout_share": 1e-9, "heldout_rows": None},
        "left for the held-out set (rows: 100, different prompts: 100, held-out rows: 0)",
    ),
    ({"heldout_share": 1.5, "heldout_rows": None}, "heldout_share is 1.5"),
    ({"heldout_rows": []}, "no prompt is left for the held-out set"),
    (
        {"heldout_rows": [{"prompt": 50 * "x"}], "max_prompt_tokens": 10},
        "the held-out share (1 rows): no prompt is left (dropped of 1 prompts: 1 longer than 10 tokens)",
    ),
    ({"max_prompt_tokens": 3}, "training (100 rows): no prompt is left"),
    ({"template": "Answer:", "heldout_rows": None}, "(rows: 100, different prompts: 1, held-out rows: 0): give rows"),
    ({"heldout_rows": [{"text": "x"}]}, "held-out row 0 has no column prompt: its columns are text"),
    ({"prompt_column": "question"}, "row 0 has no column question: its columns are prompt, number"),
    ({"system": "Be"}, "a system message needs chat messages"),
    ({"chat": True, "tokenizer": SimpleNamespace(chat_template=None)}, "no chat template"),
    ({"vocab_size": ord("w")}, "the tokenizer writes token 119, but the model has the tokens 0 to 118"),
]


@pytest.mark.parametrize(("options", "sentence"), CANNOT, ids=[str(options)[:60] for options, _ in CANNOT])
def test_what_makes_no_task_is_refused(options, sentence):
    options = {"heldout_rows": OTHERS} | options
    rows = 100 * MIXED if "template" in options else WORDS
    if "prompt" in options:
        rows = [WORDS[0], {"prompt": options.pop("prompt")}]
    assert sentence in refusal(make, rows, **options)


# --- reading ---

LINES = '{"a": "x\u2028y"}\n\n{"a": "2"}\r\n{"a": "ä"}'


def test_a_file_is_read_in_every_form(tmp_path):
    rows = [{"a": "x\u2028y"}, {"a": "2"}, {"a": "ä"}]
    (tmp_path / "r.jsonl").write_bytes(b"\xef\xbb\xbf" + LINES.encode())  # with a byte order mark
    (tmp_path / "r.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    (tmp_path / "r.json").write_text(json.dumps(rows))
    for name in ("r.jsonl", "r.jsonl.gz", "r.json"):
        assert read_rows(tmp_path / name) == rows
    assert [row.where for row in read_rows(tmp_path / "r.jsonl")] == [
        f"{tmp_path}/r.jsonl, line {i}" for i in (1, 3, 4)
    ]
    assert read_rows(tmp_path / "r.json")[2].where == f"{tmp_path}/r.json, item 3"


def test_a_folder_has_splits(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"a": 1}')
    (tmp_path / "test.json").write_text('[{"a": 2}]')
    assert read_rows(tmp_path) == read_rows(str(tmp_path), split="train") == [{"a": 1}]
    assert read_rows(tmp_path, split="test") == [{"a": 2}]
    sentence = refusal(read_rows, tmp_path, split="validation")
    assert "has no validation.jsonl: name one of its files: test.json, train.jsonl" in sentence
    assert "one file and has no split test" in refusal(read_rows, tmp_path / "train.jsonl", split="test")
    (tmp_path / "train.csv").write_text("a\n3\n")
    assert "has train.jsonl and train.csv: name one of them" in refusal(read_rows, tmp_path)
    for missing in (tmp_path / "r.jsonl", "rows.jsonl"):
        assert "there is no" in refusal(read_rows, missing)


UNREADABLE = [
    ("r.jsonl", b'{"a": 1}\n{"a": }', "r.jsonl, line 2 is not JSON in UTF-8 (Expecting value: line 1 column 7"),
    ("r.jsonl", b'{"a": 1}\n{"b": {"a": 2, "a": 3}}', "r.jsonl, line 2: a is given twice, as 2 and as 3: give it once"),
    ("r.json", b'[{"a": 1}, {"a": 2, "a": "x"}]', "r.json: a is given twice, as 2 and as 'x': give it once"),
    ("r.jsonl", b"\n[1]", "r.jsonl, line 2 holds a list, not an object"),
    ("r.jsonl", b'{"a": "\xff"}', "r.jsonl, line 1 is not JSON in UTF-8"),
    ("r.jsonl", b'{"a": ' + b"[" * 100_000, "r.jsonl, line 1 is not JSON in UTF-8"),
    ("r.jsonl", b'{"a": ' + b"1" * 5000 + b"}", "r.jsonl, line 1 is not JSON in UTF-8"),
    ("r.jsonl", b"", "r.jsonl holds no rows"),
    ("r.json", b"[]", "r.json holds no rows"),
    ("r.json", b'{"a": 1}', "r.json holds an object, not a list of objects: is it .jsonl?"),
    ("r.json", b'{"a": 1}\n{"a": 2}', "(Extra data: line 2 column 1 (char 9)): is it .jsonl?"),
    (
        "r.jsonl",
        b'\xef\xbb\xbf[\n{"a": 1}\n]',
        "r.jsonl, line 1 holds a list, not an object with columns: is it .json?",
    ),
    ("r.json", b'[{"a": 1},\n{"a": ]', "r.json is not JSON in UTF-8 (Expecting value: line 2 column 7"),
    ("r.json", b'[{"a": 1}, 2]', "r.json, item 2 holds a number, not an object"),
    ("r.jsonl.gz", b'{"a": 1}', "r.jsonl.gz cannot be read"),
    ("r.jsonl.gz", gzip.compress(b'{"a": 1}', mtime=0)[:-9], "r.jsonl.gz cannot be read"),
    ("r.xlsx", b"a", "r.xlsx is not one of .jsonl"),
    ("r.csv", b"a,b\n1,2\n3", "r.csv, line 3 has other columns than the first line"),
    ("r.csv", b"a,b\n1,2,3", "r.csv, line 2 has other columns than the first line"),
    ("r.csv", b"a,b,a,,\n1,2,3,,", "r.csv has two columns a: rename one of them"),
    ("r.csv", b"a\n\xff", "r.csv is not CSV in UTF-8"),
]


@pytest.mark.parametrize(("name", "content", "sentence"), UNREADABLE)
def test_unreadable_files_give_one_sentence(tmp_path, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    assert sentence in refusal(read_rows, tmp_path / name)


def test_a_data_set_of_the_hub(monkeypatch):
    def load_dataset(name, subset, *, split):
        if name == "no/one":
            raise FileNotFoundError("no such data set\nat all")
        return [{"name": name, "subset": subset, "split": split}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    rows = read_rows("owner/name", split="test", subset="main")
    assert rows == [{"name": "owner/name", "subset": "main", "split": "test"}]
    assert rows[0].where == "owner/name, split test, row 0"
    assert read_rows("name")[0]["split"] == "train"
    assert refusal(read_rows, "no/one").endswith("split train cannot be loaded: no such data set")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "install grpo_jax[hub]" in refusal(read_rows, "owner/name")


# --- GSM8K and MATH ---


BAD_PROBLEMS = [
    (gsm8k_rows, {"question": "How many?", "answer": "5"}, 'line 1: its answer does not end with "####"'),
    (gsm8k_rows, {"question": "How many?", "answer": 5}, "line 1: column answer holds a number"),
    (gsm8k_rows, {"answer": "#### 5"}, "line 1 has no column question: its columns are answer"),
    (math_rows, {"text": "1+1?"}, "has no column question: its columns are text"),
    (math_rows, {"problem": "1+1?", "solution": "2"}, "has no column answer"),
    (math_rows, {"problem": "1+1?", "answer": " "}, "its answer is empty"),
]


@pytest.mark.parametrize(("read", "row", "sentence"), BAD_PROBLEMS)
def test_a_problem_without_question_or_answer_is_refused(tmp_path, read, row, sentence):
    assert sentence in refusal(read, write_rows(tmp_path / "r.jsonl", [row]))


def test_gsm8k_rows_by_hand(tmp_path):
    solution = "2 * 500 = <<2*500=1000>>1,000 of #1 ####"
    row = {"question": "How many?", "answer": f"{solution}\n#### 1,000"}
    rows = gsm8k_rows(write_rows(tmp_path / "train.jsonl", [row]))
    assert rows == [{"question": "How many?", "answer": "1,000", "solution": solution}]


def test_math_rows_by_hand(tmp_path):
    lines = [
        {"prompt": f"1+1?\n{BOXED}", "answer": "2"},
        {"question": "1+1?", "answer": "It is $\\boxed{2}$.The answer is: 2"},
        {"problem": "1+1?", "answer": 2, "level": 1, "solution": "Add."},
    ]
    rows = math_rows(write_rows(tmp_path / "r.jsonl", lines))
    assert [(row["question"], row["answer"]) for row in rows] == [("1+1?", "2")] * 3
    assert [row.get("solution") for row in rows] == [None, "It is $\\boxed{2}$.", "Add."]
    assert rows[2]["level"] == 1
    held = [rows[0] | {"question": "x"}]
    options = {"vocab_size": 256, "num_prompts": 1, "seed": 0, "reward": zeros, "heldout_rows": held}
    (text,) = trained(problem_task("math", Characters(), (0,), rows, **options))
    assert text == f"Problem: 1+1?\n{BOXED}\nSolution:"
    (text,) = trained(problem_task("math", Characters(), (0,), rows, **options, chat=True, system="Be"))
    assert text == f"<system>Be<user>1+1?\n{BOXED}<assistant>"


@needs_data
def test_gsm8k_and_math500_are_read_as_they_come(tmp_path):
    rows, heldout = (gsm8k_rows(DATA / "gsm8k", split=split) for split in ("train", "test"))
    assert (len(rows), len(heldout)) == (7473, 1319)
    tokenizer = load_tokenizer(STORIES)
    options = {"vocab_size": 512, "num_prompts": 4, "num_heldout": 8, "seed": 0, "reward": zeros}
    task = problem_task("gsm8k", tokenizer, (2,), rows[:200], heldout_rows=heldout[:200], **options)
    assert (len(task.heldout.examples), task.notes) == (8, ())
    prompts = task.prompts(0)
    example = prompts.examples[0]
    assert example["prompt"].startswith(f"Question: {example['question']}\n")
    assert example["prompt"].endswith('"#### 72".\nAnswer:')
    assert task.decode(prompts.tokens.ids[0][prompts.tokens.mask[0]].tolist()) == f"<s> {example['prompt']}"
    bare, solved = (math_rows(DATA / f"math500/math500_{name}.jsonl") for name in ("prompt_answer", "with_solutions"))
    assert len(bare) == len(solved) == 500
    for one, other in zip(bare, solved, strict=True):
        assert (one["question"], one["answer"]) == (other["question"], other["answer"])
        assert "The answer is:" not in other["solution"]
