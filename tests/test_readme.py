"""What the README shows works as written: its Python, and its own task from a few lines. It stays short."""

import ast
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
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
needs_model = pytest.mark.skipif(not MODEL.exists(), reason="needs the stories260K model")


def blocks(language: str, page: Path = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def imports():
    """Every import of this library, in the README and in docs/."""
    nodes = (node for page in PAGES for block in blocks("python", page) for node in ast.parse(block).body)
    found = {ast.unparse(node) for node in nodes if isinstance(node, ast.ImportFrom)}
    return sorted(line for line in found if line.startswith("from grpo_jax"))


@pytest.mark.parametrize("line", imports())
def test_import_works(line):
    exec(line, {})


def test_readme_is_short():
    text = README.read_text()
    assert len(text.splitlines()) <= 140
    assert len(text.split()) <= 1300
    assert max(map(len, text.splitlines())) <= 120


def test_every_script_is_there():
    named = re.findall(r"^\| `([a-z_.]+)[ `].*\|.*\|$", README.read_text().partition("## Scripts")[2], re.MULTILINE)
    scripts = named[: named.index("claims.reproduce") + 1]
    assert len(scripts) == 8
    assert all((ROOT / "experiments" / f"{name.replace('.', '/')}.py").exists() for name in scripts)


def test_one_line_installs_and_tests():
    (line,) = (line for line in README.read_text().splitlines() if line.endswith("-m pytest"))
    assert line.startswith("python3 -m venv .venv && .venv/bin/pip install -q -e '.[test]'")


def test_losses_alone_run():
    losses, _ = blocks("python")
    names: dict[str, Any] = {}
    exec(losses, names)
    assert names["loss"] == pytest.approx(0, abs=1e-6)


def test_reward_of_own_task_gives_numbers():
    (code,) = re.findall(r"^cat > my_rewards.py <<'END'\n(.*?)^END", README.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["mentions"]([{"word": "cat"}] * 2, ["A cat, a Cat and a cat.", "A dog."]) == [1, 0]


def shell(commands: str, folder: Path) -> None:
    program = ".venv/bin/python -c 'from grpo_jax.commands import main; main()'"
    commands = commands.replace("DIR", str(MODEL)).replace(".venv/bin/grpo-jax", program)
    commands = commands.replace(".venv/bin/python", sys.executable)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{folder}"}
    subprocess.run(["bash", "-euc", commands], cwd=folder, env=environment, check=True, timeout=900)


@needs_model
@pytest.mark.slow
def test_own_task_learns_as_written(tmp_path):
    """In the shell, then in Python."""
    (train,) = (block for block in blocks("bash") if "my_rewards.py" in block)
    assert len(train.splitlines()) <= 15
    shell(train, tmp_path)
    assert (tmp_path / "my-model/model.safetensors").exists()

    results = json.loads((tmp_path / "runs/train/results.json").read_text())
    assert results["before"]["avg"] < 0.3
    assert results["after"]["avg_low"] > 0.6

    _, trainer = blocks("python")
    shell(f"cat > five.py <<'END'\n{trainer}END\n.venv/bin/python five.py", tmp_path)
    assert list((tmp_path / "runs/grpo_trainer").glob("metrics.jsonl"))
