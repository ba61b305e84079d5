"""Checks that rows in the formats of TRL's data sets, and files of the package datasets, are read."""

import json
import sys

import pytest
import tokenizers
from tiny import refused, write_rows
from transformers import PreTrainedTokenizerFast

from grpo_jax.data.preferences import Preference, read_preferences, read_ratings
from grpo_jax.data.rows import read_prompt, read_rows
from grpo_jax.models.chat import Chat, render, row_kwargs, with_kwargs

ASKED = [{"role": "user", "content": "What color is the sky?"}]
BLUE = [{"role": "assistant", "content": "It is blue."}]
GREEN = [{"role": "assistant", "content": "It is green."}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": text} for text in ("What color ", "is the sky?")]}]
TOOL = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
CALLED = [
    *ASKED,
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": {"at": "noon"}}}]},
    {"role": "tool", "name": "look", "content": "blue"},
]
SKY = Preference(ASKED, "It is blue.", "It is green.", 0.0, {})
PREFERENCES = [
    ({"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}, ("The sky is", " blue.", " green.")),
    ({"chosen": "The sky is blue.", "rejected": "The sky is green."}, ("The sky is", " blue.", " green.")),
    ({"chosen": "We are grateful.", "rejected": "We are green."}, ("We are", " grateful.", " green.")),
    ({"prompt": ASKED, "chosen": BLUE, "rejected": GREEN}, SKY),
    ({"prompt": PARTS, "chosen": "It is blue.", "rejected": GREEN}, SKY),
    ({"chosen": ASKED + BLUE, "rejected": ASKED + GREEN}, SKY),
    ({"prompt": "What color is the sky?", "chosen": ASKED + BLUE, "rejected": ASKED + GREEN}, SKY),
    ({"prompt": "What color is the sky?", "chosen": BLUE, "rejected": GREEN}, SKY),
    ({"prompt": PARTS, "chosen": ASKED + BLUE, "rejected": ASKED + GREEN}, SKY),
    ({"prompt": ASKED, "tools": [TOOL], "chosen": BLUE, "rejected": GREEN}, SKY._replace(kwargs={"tools": [TOOL]})),
]


@pytest.mark.parametrize(("row", "expected"), PREFERENCES)
def test_each_format_of_preferences_becomes_a_pair(tmp_path, row, expected):
    file = write_rows(tmp_path / "rows.jsonl", [row])
    (pair,), dropped = read_preferences(file)
    assert pair[: len(expected)] == expected
    assert not dropped
    good, bad = read_ratings(file)[0]
    assert (good.prompt, good.completion, good.desirable) == (pair.prompt, pair.chosen, True)
    assert (bad.completion, bad.desirable) == (pair.rejected, False)


@pytest.mark.parametrize("label", [True, False, 1, 0])
@pytest.mark.parametrize(("prompt", "completion"), [("The sky is", " blue."), (ASKED, BLUE), (ASKED, "It is blue.")])
def test_each_format_of_ratings_is_read(tmp_path, prompt, completion, label):
    row = {"prompt": prompt, "completion": completion, "label": label}
    (rating,), _ = read_ratings(write_rows(tmp_path / "rows.jsonl", [row]))
    text = completion if isinstance(completion, str) else completion[0]["content"]
    assert rating[:3] == (prompt, text, bool(label))


def test_equal_conversations_are_dropped_and_counted(tmp_path):
    same = {"chosen": ASKED + BLUE, "rejected": ASKED + BLUE}
    file = write_rows(tmp_path / "rows.jsonl", [same, {"chosen": ASKED + BLUE, "rejected": ASKED + GREEN}])
    assert read_preferences(file) == ([SKY], {"with equal answers": 1})


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"chosen": BLUE, "rejected": GREEN}, "share no message, so there is no prompt: add a column prompt"),
        (
            {"prompt": ASKED, "chosen": BLUE + ASKED, "rejected": GREEN},
            "chosen should hold text, or one message",
        ),
        ({"prompt": ASKED, "chosen": CALLED[1:2], "rejected": GREEN}, "chosen should hold text, or one message"),
        ({"prompt": ASKED, "completion": BLUE, "label": 2}, "column label holds a number, and should hold true or"),
    ],
)
def test_other_conversations_are_refused_with_their_line(tmp_path, row, words):
    with refused(f"rows.jsonl, line 1: .*{words}"):
        read_ratings(write_rows(tmp_path / "rows.jsonl", [row]))


def test_calls_of_tools_are_messages_without_content():
    stored = [CALLED[0] | {"tool_calls": None}, {x: CALLED[1][x] for x in ("role", "tool_calls")}, CALLED[2]]
    assert read_prompt(stored, "a row") == CALLED


class Template:
    """A tokenizer that has a template and nothing else."""

    chat_template = "{{ tools }}"


def test_tools_are_schemas_or_their_json():
    chat = Chat(Template())
    assert row_kwargs(chat, {"tools": [TOOL]}) == row_kwargs(chat, {"tools": json.dumps([TOOL])}) == {"tools": [TOOL]}
    assert row_kwargs(chat, {"tools": []}) == row_kwargs(chat._replace(tools=[TOOL]), {"tools": [TOOL]}) == {}
    deep = "[" * 3000 + "]" * 3000
    nested: list = []
    for _ in range(3000):
        nested = [nested]
    for tools in (["hammer"], "hammer", 3, deep, [TOOL | {"x": nested}]):
        with refused("column tools should hold JSON schemas of functions"):
            row_kwargs(chat, {"tools": tools})


def test_a_csv_holds_texts(tmp_path):
    (tmp_path / "train.csv").write_text('\ufeffprompt,completion,label\n"a, ""b""\nc",d,1\ne,f,False\n')
    rows = read_rows(tmp_path)
    assert rows[0] == {"prompt": 'a, "b"\nc', "completion": "d", "label": "1"}
    assert [rating.desirable for rating in read_ratings(tmp_path)[0]] == [True, False]
    assert rows[1].where == f"{tmp_path}/train.csv, line 4"
    (tmp_path / "long.csv").write_text(f"prompt,,\n{'word ' * 30_000},,\n")
    assert len(read_rows(tmp_path / "long.csv")[0]["prompt"]) == 150_000


# ---- calls of tools, and messages that are not learned


def call_of(arguments, **fields):
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call | fields]}


@pytest.mark.parametrize("arguments", ["{", "3", "[1]", "", 3, [1], None, "[" * 3000 + "]" * 3000, {"a": [[]] * 2}])
def test_arguments_of_calls_are_objects_or_their_json(arguments):
    messages = [*ASKED, call_of(arguments), *CALLED[2:]]
    if isinstance(arguments, dict):
        assert read_prompt(messages, "a row") == messages
    else:
        with refused("a row holds calls of tools whose arguments are no JSON object"):
            read_prompt(messages, "a row")


def arrow_rows(**fields):
    both = [{"at": "noon", "far": None}, {"at": None, "far": 1}]
    turns = [[message | {"tool_calls": None, "name": None} for message in ASKED] for _ in both]
    for messages, arguments in zip(turns, both, strict=True):
        messages.append({"name": None, **call_of(arguments, id=None)})
    tools = [{"function": {"name": "look", "parameters": {"at": x, "far": y}}} for x, y in (("a", None), (None, 2))]
    info = {"info": [{"a": None, "b": 1}], **fields}
    return [{"messages": x, "tools": [y]} | info for x, y in zip(turns, tools, strict=True)]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_tools_and_calls_lose_nulls_of_arrow(tmp_path, name):
    lines = [json.dumps(row) for row in arrow_rows()]
    (tmp_path / name).write_text("\n".join(lines) if name == "rows.jsonl" else f"[{','.join(lines)}]")
    with pytest.warns(UserWarning, match="rows.*: 6 nulls were left out of tools and their calls"):
        rows = read_rows(tmp_path / name)
    assert [row["messages"][1]["tool_calls"] for row in rows] == [
        call_of(arguments)["tool_calls"] for arguments in ({"at": "noon"}, {"far": 1})
    ]
    assert [row["tools"][0]["function"]["parameters"] for row in rows] == [{"at": "a"}, {"far": 2}]
    assert rows[0]["info"] == arrow_rows()[0]["info"]
    assert rows[0]["messages"][0] == arrow_rows()[0]["messages"][0]


def test_nulls_of_arrow_define_no_variable(tmp_path):
    # As in SmolLM3, where a variable that is null would turn thinking off.
    template = "{% if think is not defined %}{% set think = true %}{% endif %}{{ think }} {{ effort or 'high' }}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()))
    tokenizer.chat_template = template
    stated = [{"effort": "low"}, {"think": False}]
    rows = [{"prompt": "a", "chat_template_kwargs": {"think": None, "effort": None} | kwargs} for kwargs in stated]
    with pytest.warns(UserWarning, match="2 nulls were left out of .*chat_template_kwargs"):
        rows = read_rows(write_rows(tmp_path / "rows.jsonl", rows))
    chat = Chat(tokenizer)
    written = [render(with_kwargs(chat, row_kwargs(chat, row)), ASKED) for row in rows]
    assert written == [tokenizer.apply_chat_template(ASKED, tokenize=False, **kwargs) for kwargs in stated]


def test_nulls_stay_where_fields_differ(tmp_path):
    rows = arrow_rows()
    del rows[1]["messages"][0]["name"], rows[1]["tools"][0]["function"]["parameters"]["at"]
    assert read_rows(write_rows(tmp_path / "rows.jsonl", rows)) == rows


MARKS = [{"weight": 0}, {"train": False}, {"loss": False}, {"weight": 0.0, "train": True}]


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("read", [read_preferences, read_ratings])
def test_an_answer_with_weight_0_is_refused(tmp_path, read, mark):
    rows = [{"prompt": ASKED, "chosen": BLUE, "rejected": [GREEN[0] | mark]}]
    if read is read_ratings:
        rows = [{"prompt": ASKED, "completion": [BLUE[0] | mark], "label": True}]
    with refused("line 1: column (rejected|completion) should hold text, .* without the weight 0"):
        read(write_rows(tmp_path / "rows.jsonl", rows))


@pytest.mark.parametrize(
    "message",
    [BLUE[0] | {"weight": 0.5}, BLUE[0] | {"train": "no"}, ASKED[0] | {"train": True}, BLUE[0] | {"loss": []}],
)
def test_other_weights_of_messages_are_refused(message):
    with refused("a row holds a message of the (user|assistant) with .*: only the assistant can be learned"):
        read_prompt([message, *ASKED], "a row")
    assert read_prompt([BLUE[0] | {"weight": 1, "train": True}, ASKED[0] | {"weight": 1}], "a row") == BLUE + ASKED


# ---- the package datasets

ROWS = [
    {"messages": CALLED, "n": 1},
    {
        "messages": [*ASKED, CALLED[1] | {"tool_calls": [{"function": {"name": "look", "arguments": {"far": 1}}}]}],
        "n": 2,
    },
]


def saved(kind, path):
    """Writes ROWS as people do, and returns what to name on the command line."""
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(ROWS)
    if kind == "parquet":
        data.to_parquet(path / "rows.parquet")
        return path / "rows.parquet"
    if kind == "clone":
        (path / "data").mkdir()
        data.to_parquet(path / "data" / "train-00000-of-00001.parquet")
        (path / "README.md").write_text("---\nlicense: mit\n---\n# Rows\n")
        return path
    if kind == "clone with files in its root":
        for number in (0, 1):
            data.select([number]).to_parquet(path / f"train-0000{number}-of-00002.parquet")
        data.select([0]).to_parquet(path / "test-00000-of-00001.parquet")
        (path / ".gitattributes").write_text("*.parquet filter=lfs\n")
        return path
    data = datasets.DatasetDict(train=data, test=data.select([1])) if kind == "DatasetDict" else data
    data.save_to_disk(path / "saved")
    return path / "saved"


@pytest.mark.parametrize("kind", ["parquet", "Dataset", "DatasetDict", "clone", "clone with files in its root"])
def test_files_of_the_package_datasets_are_read(tmp_path, kind):
    rows = read_rows(saved(kind, tmp_path))
    assert [row["n"] for row in rows] == [1, 2]
    for row, expected in zip(rows, ROWS, strict=True):
        assert read_prompt([*row["messages"], *ASKED], "a row") == read_prompt([*expected["messages"], *ASKED], "a row")
    if kind == "DatasetDict":
        assert len(read_rows(tmp_path / "saved", split="test")) == len(read_rows(tmp_path / "saved/test")) == 1
        with refused("saved, split dev cannot be loaded: name one of the folders in it, train, test"):
            read_rows(tmp_path / "saved", split="dev")


@pytest.mark.parametrize("name", ["rows.parquet", "saved/state.json", "clone/README.md"])
def test_without_the_package_a_sentence_names_the_extra(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "datasets", None)
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("{}")
    source = file.parent if "/" in name else file
    with refused(f"{source} is a data set of the package datasets: to read it install grpo_jax\\[hub\\]"):
        read_rows(source)
