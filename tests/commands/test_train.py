"""Rows and rewards of one's own, from the command line to a table; and graders that misbehave on the way."""

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from grpo_jax.commands import evaluate, grpo
from grpo_jax.errors import UsageError
from grpo_jax.runs import flags
from grpo_jax.tasks.options import TaskOptions, open_task

DATA = Path(__file__).parents[3] / "shared/data"
MODEL, GSM8K = DATA / "stories260K-hf", DATA / "gsm8k"
needs_model = pytest.mark.skipif(not MODEL.exists(), reason="needs the stories260K model")
needs_gsm8k = pytest.mark.skipif(not GSM8K.exists() or not MODEL.exists(), reason="needs GSM8K and stories260K")
ANIMALS = ["cat", "dog", "bird", "fish", "bear", "frog", "duck", "fox", "cow", "pig", "bunny", "mouse"]
SMALL = ("--num-prompts", 4, "--group-size", 4, "--max-tokens", 8, "--steps", 2, "--eval-every", 1, "--seed", 3)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A folder with rows.jsonl and rewards.py."""
    folder = tmp_path_factory.mktemp("own")
    rows = [{"prompt": f"Once there was a {animal}", "word": animal} for animal in ANIMALS]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(
        "import math, os, time\n"
        "def vowels(rows, texts):\n"
        "    return [sum(map(text.count, 'aeiou')) / 8 for text in texts]\n"
        "def word(rows, texts):\n"
        "    return [float(row['word'] in text) for row, text in zip(rows, texts)]\n"
        "def hangs(rows, texts): time.sleep(3600)\n"
        "def raises(rows, texts): raise RuntimeError('no such thing')\n"
        "def nan(rows, texts): return [math.nan] * len(texts)\n"
        "def short(rows, texts): return [1.0]\n"
        "def prints(rows, texts):\n"
        "    for _ in range(1024): print('x' * 2**20)\n"
        "    return [1.0] * len(texts)\n"
        "def leaves(rows, texts): os._exit(3)\n"
    )
    (folder / "game.py").write_text(
        "import time\n"
        "from grpo_jax.data.episodes import Reply\n"
        "def make():\n"
        "    def reply(example, transcript, key):\n"
        "        if key[3] == 5: time.sleep(1000)\n"
        "        vowels = sum(map(transcript[-1].action.count, 'aeiou'))\n"
        "        return Reply(f' and the {example[\"word\"]}', reward=vowels / 8)\n"
        "    return reply\n"
        "def tool(a: int) -> int:\n"
        '    """A tool.\n\n    Args:\n        a: a number.\n    """\n'
        "    return a\n"
        "class Animal:\n"
        "    def reset(self, **row):\n"
        "        self.word = row['word']\n"
        "        return ' that could count.'\n"
        "    def get_reward(self):\n"
        "        return len(self.word)\n"
        "    def count(self, a: int) -> int:\n"
        '        """Counts.\n\n        Args:\n            a: a number.\n        """\n'
        "        return a + 1\n"
    )
    return folder


def run(own, folder, *args):
    given = ["--model", MODEL, "--task", own / "rows.jsonl", "--run-dir", folder, *SMALL, *args]
    config = flags.parse(grpo.Config, None, [str(arg) for arg in given])
    grpo.main(config)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@needs_model
def test_own_rows_and_rewards_then_the_checkpoint_evaluated_alone(own, tmp_path, capsys):
    rewards = ("--reward", f"{own}/rewards.py:vowels", f"word=0.5*{own}/rewards.py:word", "0*length(maximum=3)")
    lines = run(own, tmp_path / "run", *rewards, "--num-heldout", 4)
    for line in lines[1:]:
        assert line["reward"] == pytest.approx(line["reward_vowels"] + 0.5 * line["reward_word"], abs=1e-6)
        assert line["learning_rate"] == pytest.approx(1e-6)
    group = json.loads((tmp_path / "run/rollouts.jsonl").read_text().splitlines()[-1])
    assert group["columns"]["word"] in group["prompt"]
    assert ["".join(texts) for texts in group["tokens"]] == group["completions"]
    assert set(group["components"]) == {"vowels", "word", "length"}
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert set(results) == {"before", "after", "params_sha256"}  # no control unless it is asked for
    assert "held-out prompts" in capsys.readouterr().out

    out = tmp_path / "out"
    # The task and the length are the run's; how many at once is no matter.
    given = [tmp_path / "run", "--samples", 3, "--num-prompts", 3, "--seed", 3, "--out", out]
    evaluate.main(evaluate.parse([str(arg) for arg in given]))
    numbers = json.loads((out / "numbers.json").read_text())
    assert numbers["options"]["task"] == str(own / "rows.jsonl")
    assert numbers["options"]["step"] == 2
    assert {name: numbers[name] for name in results["after"] if not name.startswith("change")} == {
        name: pytest.approx(value, abs=1e-6, nan_ok=True)
        for name, value in results["after"].items()
        if not name.startswith("change")
    }

    with pytest.raises(UsageError, match="leave out --num-heldout"):
        evaluate.main(evaluate.parse([str(tmp_path / "run"), "--num-heldout", "9"]))
    other = evaluate.parse([str(tmp_path / "run"), "--task", "other.jsonl", "--temperature", "0.5"])
    assert (other.task, other.reward, other.max_tokens, other.temperature) == ("other.jsonl", (), 8, 0.5)


@pytest.mark.slow
@needs_model
def test_a_teacher_is_learned_from_without_grading_and_its_files_are_those_of_the_run(own, tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(MODEL, teacher)
    options = ("--teacher", teacher, "--distillation", "reverse_kl", "--reward-coef", 0, "--kl-coef", 0)
    folder = tmp_path / "run"
    lines = run(own, folder, "--reward", f"{own}/rewards.py:vowels", "--num-heldout", 4, *options)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[1]["distillation"] == pytest.approx(0, abs=1e-5)  # it is the model itself
    assert lines[1]["reward"] is None
    assert lines[2]["heldout_avg"] >= 0  # held-out prompts are graded

    file = teacher / "model.safetensors"
    save_file({name: 1.1 * x for name, x in load_file(file).items()}, file, metadata={"format": "pt"})
    again = flags.parse(grpo.Config, None, ["--resume", "--steps", "3", "--run-dir", str(folder)])
    with pytest.raises(UsageError, match=r"model\.safetensors of the teacher"):
        grpo.main(again)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--teacher", "x"), "there is a teacher, but distillation is none"),
        (("--distillation", "k1"), "distillation k1 needs a teacher"),
        (("--teacher", "x", "--distillation", "k1", "--control"), "a teacher would teach it too"),
    ],
)
def test_a_teacher_that_cannot_work_is_refused_before_a_model_is_read(own, tmp_path, options, sentence):
    with pytest.raises(UsageError, match=sentence):
        run(own, tmp_path, "--reward", "exact_answer", *options)


@pytest.mark.slow
@needs_model
def test_an_environment_of_a_file_trains_and_is_evaluated(own, tmp_path, capsys):
    told = ("--environment", f"{own}/game.py:make", "--reply-deadline", 0.5)
    lines = run(own, tmp_path / "run", *told, "--max-turns", 3, "--environment-tokens", 40, "--num-heldout", 4)
    for line in lines[1:]:
        assert line["ended_timeout"] == 1
        assert line["not_applicable_share"] == 1 / 16
        assert line["first_ratio_deviation"] < 1e-4
    assert "the environment failed (timeout)" in " ".join(capsys.readouterr().out.split())
    group = json.loads((tmp_path / "run/rollouts.jsonl").read_text().splitlines()[0])
    for texts, text, turns, rewards in zip(
        group["tokens"], group["completions"], group["turns"], group["turn_rewards"], strict=True
    ):
        assert "".join(texts) == text
        assert max(map(abs, turns)) == len(rewards)
        heard = "".join(part for part, turn in zip(texts, turns, strict=True) if turn < 0)
        assert heard.count(group["columns"]["word"]) == sum(turn < 0 for turn in {*turns})
    out = tmp_path / "out"
    evaluate.main(evaluate.parse([str(tmp_path / "run"), "--samples", "3", "--seed", "3", "--out", str(out)]))
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert json.loads((out / "numbers.json").read_text())["avg"] == pytest.approx(results["after"]["avg"], abs=1e-6)


def with_chat_template(folder):
    """A copy of the model, whose prompts name the tools."""
    shutil.copytree(MODEL, folder)
    template = (
        "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.mark.slow
@needs_model
def test_a_class_written_for_trl_gives_prompts_tools_and_rewards(own, tmp_path):
    told = ("--model", with_chat_template(tmp_path / "model"), "--environment-factory", f"{own}/game.py:Animal")
    room = ("--max-turns", 2, "--environment-tokens", 9, "--num-heldout", 4)
    lines = run(own, tmp_path / "run", *told, *room, "--steps", 1, "--eval-every", 0)
    assert lines[-1]["environment_calls"] == 0
    for line in (tmp_path / "run/rollouts.jsonl").read_text().splitlines():
        group = json.loads(line)
        word = group["columns"]["word"]
        assert group["prompt"] == f"count Once there was a {word} that could count."
        assert group["components"]["get_reward"] == [len(word)] * 4


@pytest.mark.slow
@needs_model
def test_a_run_goes_on_with_the_same_tools_alone_and_an_evaluation_needs_room_for_replies(own, tmp_path):
    model = with_chat_template(tmp_path / "model")
    tools = tmp_path / "tools.py"
    tools.write_text((own / "game.py").read_text())
    told = ("--model", model, "--tools", f"{tools}:tool", "--reward", "length(maximum=3)")
    room = ("--max-turns", 2, "--environment-tokens", 9)
    run(own, tmp_path / "run", *told, *room, "--steps", 1, "--eval-every", 0, "--num-heldout", 4)
    evaluation = [str(arg) for arg in (tmp_path / "run", "--environment-tokens", 0)]
    with pytest.raises(UsageError, match="environment_tokens is 0, so no episode could go on"):
        evaluate.main(evaluate.parse(evaluation))
    tools.write_text(tools.read_text().replace("return a", "return a + 1"))
    with pytest.raises(UsageError, match=r"when the run .* began: source of the environment; put them back"):
        grpo.main(flags.parse(grpo.Config, None, ["--resume", "--run-dir", str(tmp_path / "run")]))


@needs_model
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--tools", "game.py:tool", "--reward", "exact_answer"), "chat template"),
        (("--tools", "game.py:none", "--reward", "exact_answer"), "has no 'none'"),
        (("--tools", "game.py:tool", "--environment", "game.py:make"), "give one of them"),
        (("--tools", "game.py:tool", "--environment-factory", "game.py:Animal"), "give one of them"),
        (("--environment-factory", "game.py:Animal"), "chat template"),
        (("--environment-factory", "game.py:Nobody"), "has no 'Nobody'"),
        (("--environment-factory", "game.py:tool"), "environment_factory cannot be called"),
        (("--environment-factory", "game.py:Animal", "--template", "{word}"), "leave out --template"),
        (("--environment", "game.py:make"), "environment_tokens is 0"),
        (("--environment", "game.py:nobody", "--environment-tokens", 9), "has no 'nobody'"),
    ],
)
def test_an_environment_that_cannot_work_is_refused(own, tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(own)
    with pytest.raises(UsageError, match=words) as error:
        run(own, tmp_path / "run", "--max-turns", 3, *args)
    assert "\n" not in str(error.value)


@pytest.mark.slow
@needs_model
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("hangs", "timeout"),
        *(  # what each of them counts, without a run, is in tests/rewards
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("raises", "raised"),
                ("nan", "nan"),
                ("short", "wrong_length"),
                ("leaves", "died"),
                ("prints", None),
            ]
        ),
    ],
)
def test_a_run_ends_whatever_a_grader_does_and_counts_it(own, tmp_path, capsys, name, reason):
    started = time.monotonic()
    rewards = ("--reward", f"{own}/rewards.py:vowels", f"{own}/rewards.py:{name}")
    limits = ("--reward-deadline", 0.3, "--reward-budget", 1.0) if reason else ()
    lines = run(own, tmp_path / "run", *rewards, *limits, "--eval-every", 0)
    said = " ".join(capsys.readouterr().out.split())
    assert [line["step"] for line in lines] == [1, 2]
    if reason is None:  # what is printed goes nowhere
        assert [line[f"reward_{name}"] for line in lines] == [1.0, 1.0]
        return
    counts = [line.get(f"ungraded_{name}_{reason}", 0) + line.get(f"ungraded_{name}_budget", 0) for line in lines]
    assert counts == [16, 16]
    assert [line[f"reward_{name}"] for line in lines] == [None, None]
    assert all(np.isfinite(line["reward"]) for line in lines)  # the other reward goes on
    assert f"the reward {name} gave" in said
    assert f"ungraded_{name}_{reason}" in said
    # Before, two steps, after: each within the budget, and starting the processes again.
    assert time.monotonic() - started < 90


@needs_gsm8k
@pytest.mark.slow
def test_gsm8k_says_that_a_story_model_finds_nothing_to_learn(tmp_path, capsys):
    given = ["--model", MODEL, "--task", "gsm8k", "--data", GSM8K, "--num-heldout", 8, "--max-prompt-tokens", 160]
    given += ["--template", "Q: {question} A:"]
    config = flags.parse(grpo.Config, None, [str(arg) for arg in [*given, "--run-dir", tmp_path / "run", *SMALL]])
    grpo.main(config)
    said = " ".join(capsys.readouterr().out.split())
    assert "step 1: in every group all rewards are equal (all are 0), so there is nothing to learn from" in said
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["zero_spread_share"] for line in lines[1:]] == [1, 1]
    assert lines[-1]["heldout_avg"] == 0
    assert lines[-1]["heldout_avg_high"] > 0.2  # of a few prompts, none right: little is known


@needs_gsm8k
@pytest.mark.slow
def test_a_format_is_learned_on_gsm8k(tmp_path):
    pattern = 'format=0.2*matches(pattern="[^\\n]+[.!?]\\"?\\\\s*")'
    given = ["--model", MODEL, "--task", "gsm8k", "--data", GSM8K, "--reward", "strict=gsm8k_answer", pattern]
    given += ["--max-prompt-tokens", 200, "--num-prompts", 16, "--group-size", 16, "--max-tokens", 32]
    given += ["--num-heldout", 64, "--learning-rate", 1e-3, "--steps", 40, "--run-dir", tmp_path / "run"]
    grpo.main(flags.parse(grpo.Config, None, [str(arg) for arg in given]))
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert results["before"]["reward_format"] < 0.1
    assert results["after"]["reward_format"] > 0.8


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "--task is needed"),
        ({"task": "rows.jsonl"}, "--reward is needed for rows.jsonl"),
        ({"task": "rows.jsonl", "reward": ("length(maximum=1)",), "data": "x"}, "--data belongs to"),
        ({"task": "gsm8k", "prompt_column": "question"}, "--prompt-column is for rows of your own"),
        ({"task": "math"}, "--data is needed for math"),
        ({"task": "none.jsonl", "reward": ("length(maximum=1)",)}, "there is no none.jsonl"),
        ({"task": "rows.jsonl", "reward": ("lenght(maximum=1)",)}, "no built-in reward 'lenght'"),
    ],
)
def test_a_task_that_does_not_work_is_refused(own, monkeypatch, options, sentence):
    class Tokenizer:
        chat_template = None

    class Pretrained:
        tokenizer = Tokenizer()

    monkeypatch.chdir(own)
    with (
        pytest.raises(UsageError, match=sentence),
        open_task(TaskOptions(**options), Pretrained(), num_prompts=1, group_size=2, seed=0),  # type: ignore[arg-type]
    ):
        pass
