"""Checks rows, rewards and environments of a user's files from the command line to a table, and graders that fail."""

import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from command_helpers import evaluation, refusal, run, with_template
from safetensors.numpy import load_file, save_file
from tiny import TEMPLATE, read_lines, refused, write_rows

from grpo_jax.commands import evaluate
from grpo_jax.commands.export import Options, export
from grpo_jax.models.huggingface import load_pretrained
from grpo_jax.models.params.rounding import changed_share
from grpo_jax.runs.pretrained import restore

pytestmark = pytest.mark.slow
SMALL = ("--num-prompts", 4, "--group-size", 4, "--max-tokens", 8, "--steps", 2, "--eval-every", 1, "--seed", 3)
SMALL += ("--num-heldout", 4)
ROOM = ("--max-turns", 3, "--environment-tokens", 20)
LOW = ("--reward", "rewards.py:low")
SAMPLED = ("--samples", 3, "--seed", 3)
REWARDS = """
import math, os, time
def low(rows, texts): return [sum(map(text.count, '01234')) / 8 for text in texts]
def digit(rows, texts): return [float(row['digit'] in text) for row, text in zip(rows, texts)]
def hangs(rows, texts): time.sleep(3600)
def raises(rows, texts): raise RuntimeError('no such thing')
def nan(rows, texts): return [math.nan] * len(texts)
def short(rows, texts): return [1.0]
def leaves(rows, texts): os._exit(3)
def prints(rows, texts):
    for _ in range(1024): print('x' * 2**20)
    return [1.0] * len(texts)
"""


@pytest.fixture(scope="module")
def inputs(inputs, tmp_path_factory):
    folder = shutil.copytree(inputs, tmp_path_factory.mktemp("train") / "inputs")
    (folder / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"{i}+{j}=", "digit": str(i)} for i in range(4) for j in range(4)]
    write_rows(folder / "rows.jsonl", rows)
    return folder


def test_evaluate_reproduces_the_final_scores_of_training(folder, tmp_path, capsys):
    rewards = (*LOW, "digit=0.5*rewards.py:digit", "0*length(maximum=3)")
    lines, results = run(folder, tmp_path / "run", "grpo", *SMALL, *rewards)
    for line in lines[1:]:
        assert line["reward"] == pytest.approx(line["reward_low"] + 0.5 * line["reward_digit"], abs=1e-6)
        assert line["learning_rate"] == pytest.approx(1e-6)
    group = read_lines(tmp_path / "run/rollouts.jsonl")[-1]
    assert group["prompt"].startswith(group["columns"]["digit"])
    assert ["".join(texts) for texts in group["tokens"]] == group["completions"]
    assert set(group["components"]) == {"low", "digit", "length"}
    assert set(results) == {"before", "after", "params_sha256"}  # no control unless it is asked for
    printed = capsys.readouterr().out
    assert "held-out prompts" in printed
    assert re.search(r"step 1 of 2, reward \d\.\d+, KL \S+, length \d+\.\d, [\d,]+ tokens/s", printed)
    assert printed.endswith(f"next: grpo-jax evaluate {tmp_path}/run; grpo-jax export {tmp_path}/run NEW_FOLDER\n")

    # The task and the length are the run's; how many prompts are sampled at once makes no difference.
    numbers = evaluation(tmp_path / "run", tmp_path / "out", *SAMPLED, "--num-prompts", 3)
    options = numbers["options"]
    assert (options["task"], options["step"], options["dtype"]) == (str(folder / "rows.jsonl"), 2, "float32")
    after = {name: value for name, value in results["after"].items() if not name.startswith("change")}
    assert {name: numbers[name] for name in after} == pytest.approx(after, abs=1e-6, nan_ok=True)
    for path in ((), ("--task", f"{folder}/../{folder.name}/rows.jsonl")):
        with refused("leave out --num-heldout"):
            evaluation(tmp_path / "run", tmp_path / "out", *SAMPLED, *path, "--num-heldout", 9)
    with refused("the run keeps its dtype float32"):
        evaluation(tmp_path / "run", tmp_path / "out", *SAMPLED, "--dtype", "bfloat16")
    with refused("--heldout is for training"):
        evaluation(
            folder / "model", tmp_path / "out", *LOW, "--task", folder / "rows.jsonl", "--heldout", "other.jsonl"
        )
    other = evaluate.parse([str(tmp_path / "run"), "--task", "other.jsonl", "--temperature", "0.5"])
    assert (other.task, other.reward, other.max_tokens, other.temperature) == ("other.jsonl", (), 8, 0.5)


def test_bfloat16_runs_are_exported_as_evaluated(folder, tmp_path):
    options = ("--dtype", "bfloat16", "--learning-rate", 1e-5, *LOW)
    lines, results = run(folder, tmp_path / "run", "grpo", *SMALL, *options)
    assert 0 < lines[1]["changed_share"] < 0.5
    numbers = evaluation(tmp_path / "run", tmp_path / "out", *SAMPLED)
    for name in ("avg", "greedy", "length"):
        assert numbers[name] == pytest.approx(results["after"][name], abs=1e-6)
    export(Options(tmp_path / "run", tmp_path / "model", dtype="bfloat16"))
    assert "rounded to bfloat16 stochastically" in (tmp_path / "model/README.md").read_text()
    exported, trained = load_pretrained(tmp_path / "model"), restore(tmp_path / "run", None, None)
    assert changed_share(exported.params, trained.params) == 0


def test_distillation_needs_no_rewards_but_the_same_teacher(folder, tmp_path, capsys):
    teacher = shutil.copytree(folder / "model", tmp_path / "teacher")
    options = ("--teacher", teacher, "--distillation", "reverse_kl", "--reward-coef", 0, "--kl-coef", 0)
    lines, _ = run(folder, tmp_path / "run", "grpo", *SMALL, *LOW, *options)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[1]["distillation"] == pytest.approx(0, abs=1e-5)  # it is the model itself
    assert lines[1]["reward"] is None
    assert lines[2]["heldout_avg"] >= 0  # held-out prompts are graded
    file = teacher / "model.safetensors"
    save_file({name: 1.1 * x for name, x in load_file(file).items()}, file, metadata={"format": "pt"})
    sentence = refusal(capsys, "train", "--resume", "--steps", 3, "--run-dir", tmp_path / "run")
    assert "model.safetensors of the teacher" in sentence


def test_environments_from_a_file_train_and_evaluate(folder, tmp_path, capsys):
    options = ("--environment", "game.py:make", "--reply-deadline", 0.5, *ROOM, "--max-tokens", 24)
    lines, results = run(folder, tmp_path / "run", "grpo", *SMALL, *options)
    for line in lines[1:]:
        assert line["ended_timeout"] == 1
        assert line["not_applicable_share"] == 1 / 16
        assert line["first_ratio_deviation"] < 1e-4
    assert "the environment failed (timeout)" in " ".join(capsys.readouterr().out.split())
    group = read_lines(tmp_path / "run/rollouts.jsonl")[0]
    fields = ("tokens", "completions", "turns", "turn_rewards")
    for texts, text, turns, rewards in zip(*(group[name] for name in fields), strict=True):
        assert "".join(texts) == text
        assert max(map(abs, turns)) == len(rewards)
        replies = "".join(part for part, turn in zip(texts, turns, strict=True) if turn < 0)
        assert replies.count(f"={group['columns']['digit']}=") == sum(turn < 0 for turn in {*turns})
    numbers = evaluation(tmp_path / "run", tmp_path / "out", *SAMPLED)
    assert numbers["avg"] == pytest.approx(results["after"]["avg"], abs=1e-6)


def test_trl_environment_classes_give_prompts_and_rewards(folder, tmp_path):
    model = with_template(folder, tmp_path / "model", TEMPLATE)
    options = ("--model", model, "--environment-factory", "game.py:Game", *ROOM, "--steps", 1, "--eval-every", 0)
    run(folder, tmp_path / "run", "grpo", *SMALL, *options)
    for group in read_lines(tmp_path / "run/rollouts.jsonl"):
        digit = group["columns"]["digit"]
        assert group["prompt"].startswith(f"add{digit}+")
        assert group["prompt"].endswith("=0")
        assert group["components"]["get_reward"] == [int(digit)] * 4


def test_agents_train_and_are_evaluated(folder, tmp_path, capsys):
    game = Path(shutil.copy(folder / "game.py", tmp_path / "game.py"))
    model = with_template(folder, tmp_path / "model", TEMPLATE)
    options = ("--model", model, "--agent", f"{game}:talk", *ROOM, "--max-tokens", 24)
    lines, results = run(folder, tmp_path / "run", "grpo", *SMALL, *options)
    assert all(line["first_ratio_deviation"] < 1e-4 for line in lines[1:])
    turns = set()
    for group in read_lines(tmp_path / "run/rollouts.jsonl"):
        digit = group["columns"]["digit"]
        assert None not in group["rewards"]
        assert group["prompt"].startswith(f"{digit}+")
        for texts, each in zip(group["tokens"], group["turns"], strict=True):
            replies = "".join(part for part, turn in zip(texts, each, strict=True) if turn < 0)
            assert replies == f"={digit}=" * len({turn for turn in each if turn < 0})
            turns.add(max(map(abs, each)))
    assert turns == {1, 2, 3}
    assert results["after"]["not_graded_share"] == 0
    numbers = evaluation(tmp_path / "run", tmp_path / "out", *SAMPLED)
    assert numbers["avg"] == pytest.approx(results["after"]["avg"], abs=1e-6)
    game.write_text(game.read_text().replace("range(3)", "range(2)"))
    assert "source of the environment" in refusal(capsys, "train", "--resume", "--run-dir", tmp_path / "run")


def test_changed_tools_and_missing_reply_room_are_refused(folder, tmp_path, capsys):
    tools = shutil.copy(folder / "game.py", tmp_path / "tools.py")
    options = ("--model", with_template(folder, tmp_path / "model", TEMPLATE), "--tools", f"{tools}:add", *ROOM)
    lines, _ = run(folder, tmp_path / "run", "grpo", *SMALL, *LOW, *options, "--steps", 1, "--eval-every", 0)
    assert lines[-1]["environment_calls"] == 0
    assert read_lines(tmp_path / "run/rollouts.jsonl")[0]["prompt"].startswith("add")
    with refused("environment_tokens is 0"):
        evaluation(tmp_path / "run", tmp_path / "out", *SAMPLED, "--environment-tokens", 0)
    tools.write_text(tools.read_text().replace("return a + 1", "return a + 2"))
    assert "source of the environment" in refusal(capsys, "train", "--resume", "--run-dir", tmp_path / "run")


def test_runs_finish_and_count_failing_graders(folder, tmp_path, capsys):
    reasons = {"hangs": "timeout", "raises": "raised", "nan": "nan", "short": "wrong_length", "leaves": "died"}
    started = time.monotonic()
    rewards = (*LOW, *(f"rewards.py:{name}" for name in (*reasons, "prints")))
    limits = ("--reward-deadline", 2, "--reward-budget", 4, "--eval-every", 0)
    lines, _ = run(folder, tmp_path / "run", "grpo", *SMALL, *rewards, *limits)
    printed = " ".join(capsys.readouterr().out.split())
    assert [line["step"] for line in lines] == [1, 2]
    for name, reason in reasons.items():
        counts = [line.get(f"ungraded_{name}_{reason}", 0) + line.get(f"ungraded_{name}_budget", 0) for line in lines]
        assert counts == [16, 16]
        assert [line[f"reward_{name}"] for line in lines] == [None, None]
        assert f"ungraded_{name}_{reason}" in printed
    assert [line["reward_prints"] for line in lines] == [1.0, 1.0]  # what is printed goes nowhere
    assert all(np.isfinite(line["reward"]) for line in lines)  # the other rewards count
    # Before, two steps, after: each within the budget, and starting the processes again.
    assert time.monotonic() - started < 90
