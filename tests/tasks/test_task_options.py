"""Checks rewards and tasks as a command line names them."""

import json
from collections import Counter

import pytest
from tiny import TEMPLATE, refused, write_rows

from experiments.tasks import arithmetic
from grpo_jax.commands import evaluate
from grpo_jax.commands.export import model_card
from grpo_jax.data.types import Completion, Component, hash_file
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.huggingface import Pretrained, load_tokenizer
from grpo_jax.rewards.reward import open_rewards, parse_reward, to_rewards
from grpo_jax.tasks.options import TaskOptions, check_task_options, open_task

BUILTIN = "grpo_jax.rewards.builtin:"


REWARD_TEXTS = [
    ("gsm8k_answer", ("gsm8k_answer", 1.0, f"{BUILTIN}gsm8k_answer", {})),
    ("lenient=0*length(maximum=1)", ("lenient", 0.0, f"{BUILTIN}length", {"maximum": 1})),
    ("a.py:solved", ("solved", 1.0, "a.py:solved", None)),
    (" -0.5 * my/dir-2/a.py:make(n=3, names=['x'])", ("make", -0.5, "my/dir-2/a.py:make", {"n": 3, "names": ["x"]})),
    ("x = 1e-3*pkg.mod:f()", ("x", 0.001, "pkg.mod:f", {})),
    (r'matches(pattern="(a*b)=\\(\n")', ("matches", 1.0, f"{BUILTIN}matches", {"pattern": "(a*b)=\\(\n"})),
]


@pytest.mark.parametrize(("text", "expected"), REWARD_TEXTS)
def test_a_reward_is_read(text, expected):
    assert parse_reward(text) == expected


UNREADABLE = [
    ("", "cannot be read"),
    ("0.1*", "cannot be read"),
    ("solved", "no built-in reward 'solved'"),
    ("math_answer(lenient='False')", "lenient of the reward .* is 'False': it must be True or False"),
    ("length(maximum=True)", "is True: it must be a whole number"),
    ("repetition(n=1.5)", "is 1.5: it must be a whole number"),
    ("matches(pattern=3)", "is 3: it must be a text"),
    ("1.2.3*length(target=2)", "cannot be read"),
    ("length(7)", "plain values"),
    ("length(target=open('x'))", "plain values"),
    ("length(target=1", "cannot be read"),
    ("length(target=1)(target=7)", "plain values"),
    ("length(target=1, target=7)", "plain values"),
    ("a.py:f(x=" + 5000 * "-" + "1)", "plain values"),
    ("a" + 100_000 * " " + "=", "cannot be read"),
    ("a" + 50_000 * " b" + "=", "cannot be read"),
    ("x" + 3000 * " " + "=" + 3000 * " " + "1" + 3000 * " " + "*" + 3000 * " " + ")", "cannot be read"),
    ("1e999*length(target=1)", "the weight of the reward length is inf"),
    ("-1e39*length(target=1)", "the weight of the reward length is -1e\\+39"),
]


@pytest.mark.parametrize(("text", "sentence"), UNREADABLE)
def test_what_cannot_be_read_is_refused(text, sentence):
    with refused(sentence):
        parse_reward(text)


def test_a_weight_in_python_is_finite():
    for weight in (float("inf"), float("nan"), 1e39):
        with refused("the weight of the reward length is"):
            to_rewards({"length": Component(lambda rows, texts: [1.0], weight)}).grade([{}], [Completion("")])


def test_opened_rewards_are_weighted_and_see_whole_groups(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def rank(rows, texts):\n    return [sorted(texts).index(t) + row['bonus'] for row, t in zip(rows, texts)]\n"
    )
    with open_rewards([f"{tmp_path}/mine.py:rank", "short=0.5*length(maximum=1)"], group_size=2) as rewards:
        assert {name: component.weight for name, component in rewards.items()} == {"rank": 1.0, "short": 0.5}
        first, second = {"bonus": 10}, {"bonus": 10}  # two prompts, and what belongs to one shares its row
        rows = [first, first, second, second]
        completions = [Completion(text, [1] * len(text), True) for text in ("bb", "a", "d", "c")]
        assert rewards["rank"].reward(rows, completions) == [11, 10, 11, 10]
        assert rewards["short"].reward(rows, completions) == [0, 1, 1, 1]


BAD_REWARDS = [
    (["length(maximum=1)", "length(maximum=2)"], "two rewards are called length"),
    (["0*length(maximum=1)"], "nothing to learn from"),
]


@pytest.mark.parametrize(("texts", "sentence"), BAD_REWARDS)
def test_rewards_that_do_not_work_are_refused(texts, sentence):
    with refused(sentence), open_rewards(texts, group_size=2):
        pass


# ---- held-out rows

LENGTH = ("length(maximum=3)",)


def test_held_out_rows_come_from_their_file(tmp_path, pretrained):
    heldout = write_rows(tmp_path / "heldout.jsonl", [{"prompt": f"2+{i}="} for i in range(3)])
    training = ["1+1=", "1+2=", "2+2="]  # the last is in the file of held-out rows, so it is never trained on
    for number in (None, 2):
        options = {"heldout": str(heldout), "num_heldout": number, "reward": LENGTH}
        with opened(tmp_path, pretrained, training, **options) as task:
            held = {example["prompt"] for example in task.heldout.examples}
            trained = {task.prompts(step).examples[0]["prompt"] for step in range(8)}
        assert len(held) == (number or 3)
        assert held <= {"2+0=", "2+1=", "2+2="}
        assert trained == {"1+1=", "1+2="}


def test_held_out_rows_of_gsm8k_are_its_own(tmp_path):
    with refused("--heldout is not for gsm8k"):
        check_task_options(TaskOptions(task="gsm8k", heldout="rows.jsonl"))


# ---- environments and tools

TOOL = '''
def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: one.
        b: another.
    """
    return a + b
'''


@pytest.fixture
def pretrained(tmp_path):
    arithmetic.TEXT.save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.chat_template = TEMPLATE
    shape = ModelConfig(arithmetic.TEXT.vocab_size, 8, 16, 1, 2, 1, 4)
    return Pretrained(shape, {}, tokenizer, (arithmetic.TEXT.eos_id,), tmp_path)


def opened(tmp_path, pretrained, prompts, **options):
    """Opens the task of a file with these prompts."""
    file = write_rows(tmp_path / "rows.jsonl", [{"prompt": prompt} for prompt in prompts])
    options = TaskOptions(task=str(file), **{"num_heldout": 1, **options})
    return open_task(options, pretrained, num_prompts=1, group_size=2, seed=0)


def test_tool_sources_of_packages_and_files_are_hashed(tmp_path, monkeypatch, pretrained):
    (tmp_path / "my_tools").mkdir()
    (tmp_path / "my_tools/sums.py").write_text(TOOL)
    monkeypatch.syspath_prepend(tmp_path)
    sources = []
    for place in ("my_tools.sums", f"{tmp_path}/my_tools/sums.py"):
        options = {"tools": f"{place}:add", "reward": ("length(maximum=3)",)}
        with opened(tmp_path, pretrained, ["1+1=", "1+2="], **options) as task:
            sources.append(task.environment.source)
    assert sources == [hash_file(tmp_path / "my_tools/sums.py")] * 2


def test_a_tenth_of_different_prompts_is_held_out(tmp_path, pretrained):
    rows = [f"1+{i}=" for i in range(20)] * 5
    with opened(tmp_path, pretrained, rows, num_heldout=None, chat=False, reward=("length(maximum=3)",)) as task:
        assert list(Counter(row["prompt"] for row in task.heldout.examples).values()) == [5, 5]


def test_messages_with_environments_need_a_chat_template(tmp_path, pretrained):
    (tmp_path / "game.py").write_text("def make(): pass\n")
    options = {"environment": f"{tmp_path}/game.py:make", "chat": False}
    messages = [[{"role": "user", "content": f"1+{i}="}] for i in range(2)]
    with refused("--chat False gives replies no chat template"), opened(tmp_path, pretrained, messages, **options):
        pass


def test_evaluation_and_card_use_template_variables(tmp_path):
    saved = {"task": "rows.jsonl", "model": {"model": "DIR", "chat_template_kwargs": '{"enable_thinking": false}'}}
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert evaluate.parse([str(tmp_path)]).chat_template_kwargs == '{"enable_thinking": false}'
    card = model_card(tmp_path, phase="grpo", step=1, adapter=False)
    assert 'variables `{"enable_thinking": false}` of the chat template' in card
