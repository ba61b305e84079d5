"""Texts on the command line: what a shell cannot easily write."""

import json

import pytest

from grpo_jax.commands import evaluate, flags, grpo

TYPED = [
    (["--stop", r"\n", r"Q:\t\\nabla"], ("\n", "Q:\t\\nabla")),
    (["--stop", "\n"], ("\n",)),
    (["--stop=---"], ("---",)),
    ([], ()),
]


@pytest.mark.parametrize(("typed", "texts"), TYPED)
def test_backslashes_of_stop_texts_are_read(typed, texts, tmp_path):
    assert evaluate.parse(["model", *typed]).stop == texts
    assert flags.parse(grpo.Config, None, ["--run-dir", str(tmp_path), *typed]).stop == texts


def test_stop_texts_of_files_and_runs_are_literal(tmp_path):
    saved = {"stop": ["\\nabla", "\n"], "task": "rows.jsonl"}
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert evaluate.parse([str(tmp_path)]).stop == ("\\nabla", "\n")
    assert evaluate.parse([str(tmp_path), "--stop", r"\n"]).stop == ("\n",)
    options = flags.parse(
        grpo.Config, None, ["--config", str(tmp_path / "config.json"), "--run-dir", str(tmp_path / "x")]
    )
    assert options.stop == ("\\nabla", "\n")


def test_other_rows_of_the_task_are_all_evaluated(tmp_path):
    saved = {"task": "math", "data": "a.jsonl", "heldout": "b.jsonl", "num_heldout": 5, "chat": False}
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(saved))
    for args, rows in (([], ("b.jsonl", 5)), (["--data", "c.jsonl"], ("", None))):
        options = evaluate.parse([str(tmp_path), *args])
        assert (options.heldout, options.num_heldout, options.chat) == (*rows, False)


PROMPTING = {"template": "Q: {question} A:", "chat": False, "system": "Be brief.", "chat_template_kwargs": '{"a": 1}'}


@pytest.mark.parametrize("task", ["other.jsonl", "math", "reasoning_gym:leg_counting"])
def test_other_tasks_keep_the_runs_prompt_format(tmp_path, task):
    saved = {"task": "rows.jsonl", "reward": ["exact_answer"], "prompt_column": "text", **PROMPTING}
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(saved))
    options = vars(evaluate.parse([str(tmp_path), "--task", task]))
    assert {name: options[name] for name in PROMPTING} == PROMPTING
    assert (options["reward"], options["prompt_column"]) == ((), "prompt")
    args = [str(tmp_path), "--task", task, "--chat", "True", "--template", "None", "--system", "None"]
    changed = evaluate.parse(args)
    assert (changed.chat, changed.template, changed.system) == (True, None, None)


def test_other_generators_keep_the_place_of_answers(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text(json.dumps({"task": "reasoning_gym:leg_counting", "answer_in": "line"}))
    args = [str(tmp_path), "--task", "reasoning_gym:basic_arithmetic"]
    assert evaluate.parse(args).answer_in == "line"
    assert evaluate.parse([str(tmp_path), "--task", "rows.jsonl"]).answer_in == "tags"


def test_resumed_runs_accept_the_options_file_again(tmp_path):
    (tmp_path / "file.yaml").write_text("preset: dapo\n")
    args = ["--config", str(tmp_path / "file.yaml"), "--run-dir", str(tmp_path / "run")]
    first = flags.parse(grpo.Config, None, [*args, "--epsilon-high", "0.5"])
    flags.open_run(first)
    resumed = flags.parse(grpo.Config, None, [*args, "--resume"])
    assert resumed.train == first.train
    assert resumed.train.loss.epsilon_high == 0.5
