"""What the README shows works as written: its Python, and its own task from two files."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MODEL = ROOT.parent / "shared/data/stories260K-hf"
TEXT = (ROOT / "README.md").read_text()
needs_model = pytest.mark.skipif(not MODEL.exists(), reason="needs the stories260K model")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("line", re.findall(r"^from grpo_jax.*$", TEXT, re.MULTILINE))
def test_import_works(line):
    exec(line, {})


def test_reward_of_own_task_gives_numbers():
    (code,) = re.findall(r"^cat > my_rewards.py <<'END'\n(.*?)^END", TEXT, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["mentions"]([{"word": "cat"}] * 2, ["A cat, a Cat and a cat.", "A dog."]) == [1, 0]


@needs_model
@pytest.mark.slow
def test_every_python_block_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{i}+1", "answer": str(i + 1)} for i in range(40)]
    Path("questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names: dict[str, object] = {}
    for block in blocks("python"):
        exec(block.replace("folder-or-hub/id", str(MODEL)), names)
    assert Path("trained-model/model.safetensors").exists()
    assert names["trained"].params.keys() == names["model"].params.keys()  # type: ignore[attr-defined]


@needs_model
@pytest.mark.slow
def test_own_task_learns_as_written(tmp_path):
    make, train = (block for block in blocks("bash") if ("my_rewards.py" in block and "DIR" in block) or "END" in block)
    assert len(make.splitlines()) <= 25
    commands = make + train.replace("DIR", str(MODEL)).replace(".venv/bin/python", sys.executable)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(["bash", "-euc", commands], cwd=tmp_path, env=environment, check=True, timeout=900)

    results = json.loads((tmp_path / "runs/train/results.json").read_text())
    assert results["before"]["avg"] < 0.3
    assert results["after"]["avg_low"] > 0.6
