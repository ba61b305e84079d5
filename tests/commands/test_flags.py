"""Texts on the command line: what a shell cannot easily write."""

import json

import pytest

from grpo_jax.commands import evaluate, grpo
from grpo_jax.runs import flags

TYPED = [
    (["--stop", r"\n", r"Q:\t\\nabla"], ("\n", "Q:\t\\nabla")),
    (["--stop", "\n"], ("\n",)),
    (["--stop=---"], ("---",)),
    ([], ()),
]


@pytest.mark.parametrize(("typed", "texts"), TYPED)
def test_backslashes_of_stop_texts_are_read(typed, texts, tmp_path):
    assert evaluate.parse(["model", *typed]).stop == texts
    assert flags.parse(grpo.Config, None, ["--run-dir", str(tmp_path), *typed]).train.sampling.stop == texts


def test_stop_texts_of_files_and_runs_are_literal(tmp_path):
    saved = {"stop": ["\\nabla", "\n"], "task": "rows.jsonl"}
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert evaluate.parse([str(tmp_path)]).stop == ("\\nabla", "\n")
    assert evaluate.parse([str(tmp_path), "--stop", r"\n"]).stop == ("\n",)
    options = flags.parse(
        grpo.Config, None, ["--config", str(tmp_path / "config.json"), "--run-dir", str(tmp_path / "x")]
    )
    assert options.train.sampling.stop == ("\\nabla", "\n")


def test_other_rows_of_the_task_are_all_evaluated(tmp_path):
    saved = {"task": "math", "data": "a.jsonl", "heldout": "b.jsonl", "num_heldout": 5, "chat": False}
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(saved))
    for args, rows in (([], ("b.jsonl", 5)), (["--data", "c.jsonl"], ("", None))):
        options = evaluate.parse([str(tmp_path), *args])
        assert (options.heldout, options.num_heldout, options.chat) == (*rows, False)
