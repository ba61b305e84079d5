"""Checks that `sample` shows what training would see, for models and runs, and what rewards give to texts."""

import io
import re
import sys

import numpy as np
import pytest
from command_helpers import evaluation, exit_status, refusal, run, with_template
from tiny import TEMPLATE, read_lines, refused, save_tiny_model, write_rows

from experiments.tasks.characters import Characters
from grpo_jax import commands
from grpo_jax.commands import sample

SHAPE = ("--num-prompts", 4, "--group-size", 4, "--max-tokens", 8)
LOW = ("--reward", "rewards.py:low", "short=0.5*length(maximum=3)")
FIELDS = ("prompt", "columns", "completions", "rewards", "components", "lengths", "truncated", "tokens")


def sampled(capsys, out, *args):
    """Runs the command, and returns what it printed and the lines of its file."""
    capsys.readouterr()
    named = [str(arg) for arg in (*args, "--json", out, "--no-compilation-cache")]
    sample.main(sample.parse(named))
    return capsys.readouterr().out, read_lines(out)


def row_of(printed, name, nth=0):
    """Returns the numbers of a reward in a table of the summary, without intervals. A dash is None."""
    rows = re.findall(rf"^{name} +((?:\d|–).*)$", printed, re.M)
    words = re.sub(r"\[.*?\]", "", rows[nth]).split()
    return [None if word == "–" else float(word) for word in words]


def assert_same_groups(lines, groups):
    assert groups
    for line, group in zip(lines, groups, strict=False):
        for field in FIELDS:
            assert line[field] == group[field], field


@pytest.mark.slow
def test_sample_shows_what_training_sees_next(folder, tmp_path, capsys):
    options = (*SHAPE, *LOW, "--seed", 3, "--num-heldout", 4)
    start, lines = sampled(capsys, tmp_path / "start.jsonl", "model", "--task", "rows.jsonl", *options)
    train = ("--eval-every", 0, "--rollouts-every", 1, "--learning-rate", 1e-3)
    run(folder, tmp_path / "run", "grpo", *options, *train, "--steps", 2)
    printed, following = sampled(capsys, tmp_path / "next.jsonl", tmp_path / "run", "--num-prompts", 4)
    assert ", step 2\n" in printed
    assert f"{folder}" not in printed
    metrics, _ = run(folder, tmp_path / "run", "", "--resume", "--steps", 3)
    groups = read_lines(tmp_path / "run/rollouts.jsonl")
    assert_same_groups(lines, [group for group in groups if group["step"] == 1])
    assert_same_groups(following, [group for group in groups if group["step"] == 3])
    for step, text in ((1, start), (3, printed)):
        (line,) = [line for line in metrics if line["step"] == step]
        mean, teach, *_ = row_of(text, "reward")
        assert mean == pytest.approx(line["reward"], abs=1e-3)
        assert teach == pytest.approx(1 - line["zero_spread_share"], abs=1e-3)
        assert f"{line['truncated_share']:.1%} of the completions" in text
    with refused("leave out --num-heldout"):
        sampled(capsys, tmp_path / "x", tmp_path / "run", "--num-heldout", 9)
    # Held-out prompts are evaluated as before.
    assert evaluation(tmp_path / "run", tmp_path / "out", "--samples", 2)["options"]["step"] == 3


@pytest.mark.slow
def test_sample_of_a_run_without_rewards_prints_completions(folder, tmp_path, capsys):
    run(folder, tmp_path / "run", "sft", "--warmup-steps", 0, "--steps", 1, "--num-rows", 8)
    printed, lines = sampled(capsys, tmp_path / "out", tmp_path / "run", "--max-tokens", 4)
    assert "reward" not in printed
    assert all(line["components"] == {"reward": [None] * 8} for line in lines)


def test_parts_of_a_sample_do_not_change_it(folder, tmp_path, capsys, monkeypatch):
    options = ("model", "--task", "rows.jsonl", *LOW, *SHAPE, "--num-prompts", 3)
    _, together = sampled(capsys, tmp_path / "a", *options)
    monkeypatch.setattr(sample, "_AT_ONCE", 8)  # two prompts, then one that is filled up
    _, apart = sampled(capsys, tmp_path / "b", *options)
    assert apart == together


REWARDS = """
def solved(rows, texts): return [float(text == row["answer"]) for row, text in zip(rows, texts)]
def length(rows, texts): return [float(len(text)) for text in texts]
def copies(rows, texts): return [float(text.startswith("1+")) for text in texts]
def nothing(rows, texts): return [None if text else 1.0 for text in texts]
"""


def test_each_reward_has_its_numbers(folder, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(REWARDS)
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"1+{i}=", "answer": str(1 + i)} for i in range(9)])
    named = [f"{tmp_path}/mine.py:{name}" for name in ("solved", "length", "copies", "nothing")]
    rewards = ("--reward", f"solved=2*{named[0]}", *named[1:])
    printed, lines = sampled(capsys, tmp_path / "out", "model", "--task", rows, *rewards, *SHAPE, "--num-heldout", 1)
    lengths = np.array([line["components"]["length"] for line in lines])
    mean, teach, never, always = row_of(printed, "length")
    assert mean == pytest.approx(lengths.mean(), abs=1e-3)
    assert teach == np.mean([len({*row}) > 1 for row in lengths.tolist()])
    assert (never, always) == ((lengths.max(-1) <= 0).mean(), (lengths.min(-1) >= 1).mean())
    assert row_of(printed, "copies", 1)[:3] == [0, 1, 0]  # an empty text, the prompt, the row's answer
    assert row_of(printed, "solved", 1)[:3] == [0, 0, 1]
    longest = np.ravel([line["components"]["length"] for line in lines])[np.argmax([line["lengths"] for line in lines])]
    assert row_of(printed, "length", 1) == [0, 4, 1, longest]
    assert row_of(printed, "nothing", 1)[:3] == [1, None, None]
    for line in lines:
        solved, *others = (np.array(line["components"][name], float) for name in ("solved", "length", "copies"))
        assert line["rewards"] == pytest.approx(2 * solved + sum(others))  # "nothing" applies to no completion


def test_a_chat_model_gets_its_template(folder, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(REWARDS)
    model = with_template(folder, tmp_path / "model", TEMPLATE.replace("{{ m.content }}", "={{ m.content }}="))
    reward = ("--reward", f"{tmp_path}/mine.py:copies")
    printed, lines = sampled(capsys, tmp_path / "out", model, "--task", "rows.jsonl", *reward, *SHAPE)
    assert all(line["prompt"].startswith("=") for line in lines)
    assert f"tokens: {lines[0]['prompt']!r}" in printed
    copied = [line["prompt"].startswith("=1+") for line in lines]  # the template's = is not part of the message
    assert row_of(printed, "reward", 1)[1] == np.mean(copied)


def test_environments_and_tools_are_sampled(folder, tmp_path, capsys):
    room = ("--max-turns", 3, "--environment-tokens", 20, "--max-tokens", 24, "--num-prompts", 2, "--group-size", 2)
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{i}+1=", "digit": str(i)} for i in range(6)])
    options = ("--task", rows, "--environment", "game.py:make", "--reply-deadline", 0.5, *room)
    printed, lines = sampled(capsys, tmp_path / "out", "model", *options)
    assert all(np.isfinite(line["turn_rewards"][0]).all() for line in lines)
    assert "empty text" not in printed
    assert "longest completion" in printed
    model = with_template(folder, tmp_path / "model", TEMPLATE)
    printed, lines = sampled(capsys, tmp_path / "out", model, "--task", rows, "--tools", "game.py:add", *room)
    assert all(line["prompt"].startswith("add") for line in lines)
    assert "reward" not in printed


CONTROL = Characters("0123456789+=\x1b\x07[J\u202e")


def test_control_characters_do_not_reach_the_terminal(tmp_path, capsys):
    model = save_tiny_model(tmp_path / "model", CONTROL, max_position_embeddings=64)
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"1+{i}=\x1b[J"} for i in range(9)])
    options = ("--task", rows, "--reward", "length(maximum=3)", *SHAPE, "--max-tokens", 30)
    printed, lines = sampled(capsys, tmp_path / "out", model, *options)
    assert "\x1b" in "".join(text for line in lines for text in line["completions"])
    assert not set("\x1b\x07\u202e") & set(printed)
    assert "\\x1b" in printed


class Unread(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_an_unread_pipe_loses_no_file(folder, tmp_path, capsys, monkeypatch):
    out = tmp_path / "deep/out.jsonl"
    args = ["sample", "model", "--task", "rows.jsonl", *LOW, *SHAPE, "--json", out, "--no-compilation-cache"]
    monkeypatch.setattr(sys, "stdout", Unread())
    status = exit_status(lambda: commands.main([str(arg) for arg in args]))
    assert (status, len(read_lines(out))) == (2, 4)
    assert capsys.readouterr().err == (
        "error: nothing reads the output any more: write it to a file, or read it to its end\n"
    )


REFUSED = [
    ((), "name a model"),
    (("model",), "--task is needed"),
    (("nowhere",), "there is no folder nowhere"),
    (("model", "--task", "rows.jsonl", "--num-prompts", 99), "num_prompts is 99, but there are"),
    (("model", "--task", "rows.jsonl", "--num-prompts", 0), "num_prompts is 0"),
    (("model", "--task", "rows.jsonl", "--step", 3), "is no run"),
    (("model", "--task", "rows.jsonl", "--json", "model"), "model is no regular file"),
    (("model", "--task", "rows.jsonl", "--json", "/dev/null"), "/dev/null is no regular file"),
    (("model", "--task", "rows.jsonl", "--reward", "raises.py:low"), "the reward low fails on the first prompt"),
]


@pytest.mark.parametrize(("args", "words"), REFUSED, ids=[row[1] for row in REFUSED])
def test_what_cannot_be_sampled_is_refused(folder, monkeypatch, capsys, args, words):
    (folder / "raises.py").write_text("def low(rows, texts): raise RuntimeError('no such column')")
    monkeypatch.setattr(sample, "sample", lambda *_: pytest.fail("it samples"))
    assert words in refusal(capsys, "sample", *args, "--max-tokens", 8, "--no-compilation-cache")
